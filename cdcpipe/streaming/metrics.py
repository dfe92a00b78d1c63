"""The metrics of a stream: ``cdcpipe --metrics``. Another thread reads them while the loop runs.

It reads numbers that the loop counts anyway, once for each chunk, and changes nothing. Each number is right by itself; two of them
may be a moment apart.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from cdcpipe.exposition import pipeline
from cdcpipe.measures import POSITION, SPILL, STREAM_BYTES, STREAM_RECORDS, STREAM_TRANSACTIONS, Metric

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdcpipe.measures import Reading
    from cdcpipe.streaming.streamer import Streamer

__all__ = ["METRICS", "StreamMetrics"]

_PENDING: Final = Metric("cdcpipe_pending_bytes", "gauge", "Bytes that wait until the reader of the pipe takes them.")
_HELD: Final = Metric("cdcpipe_held_bytes", "gauge", "Bytes of transactions in progress that are in memory.")
_SILENCE: Final = Metric("cdcpipe_server_silence_seconds", "gauge", "How long the server has sent nothing.")

METRICS: Final = (
    pipeline("cdcpipe", "").metric,
    POSITION,
    STREAM_RECORDS,
    STREAM_TRANSACTIONS,
    STREAM_BYTES,
    _PENDING,
    _HELD,
    SPILL,
    _SILENCE,
)


class StreamMetrics:
    """Reads the metrics of one stream. Before the stream begins there is only what runs."""

    def __init__(self, slot: str) -> None:
        self._slot = slot
        self._streamer: Streamer | None = None
        self._written_bytes = 0

    def follow(self, streamer: Streamer) -> None:
        """Show the metrics of this streamer from now on."""
        self._streamer = streamer

    def collect(self) -> Iterator[Reading]:
        """Yield the values at this moment."""
        yield pipeline("cdcpipe", self._slot)
        if self._streamer is None:
            return
        state = self._streamer.state()
        for stage, lsn in (("received", state.received_lsn), ("written", state.written_lsn), ("confirmed", state.confirmed_lsn)):
            if lsn:
                yield POSITION.reading(lsn, stage)
        yield STREAM_RECORDS.reading(state.records)
        yield STREAM_TRANSACTIONS.reading(state.transactions)
        # The two numbers may be a moment apart, and a counter must not go back.
        self._written_bytes = max(self._written_bytes, state.bytes - state.pending_bytes)
        yield STREAM_BYTES.reading(self._written_bytes)
        yield _PENDING.reading(state.pending_bytes)
        yield _HELD.reading(state.held_bytes)
        yield SPILL.reading(state.spilled_bytes)
        yield _SILENCE.reading(max(0.0, time.monotonic() - state.heard_at))
