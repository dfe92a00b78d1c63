"""The metrics of a stream: its bytes are those that the reader took."""

from typing import Any

from cdcpipe.measures import STREAM_BYTES
from cdcpipe.streaming.metrics import StreamMetrics
from cdcpipe.streaming.streamer import StreamState


def test_bytes_that_wait_for_the_reader_are_not_written() -> None:
    """CdcpipeReaderBlocked asks whether the counter stands still. For a reader that takes nothing, records may still be queued."""

    class Stream:
        def __init__(self) -> None:
            self.sizes = iter([(100, 40), (130, 70), (131, 90), (140, 0)])

        def state(self) -> StreamState:
            queued, pending = next(self.sizes)
            return StreamState(0, 0, 0, 0, 0, queued, pending, 0, 0, 0.0)

    stream: Any = Stream()
    metrics = StreamMetrics("s")
    metrics.follow(stream)
    found = [value for _ in range(4) for metric, _, value in metrics.collect() if metric is STREAM_BYTES]
    assert found == [60, 60, 60, 140]
