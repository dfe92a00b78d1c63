"""Seals segments in a thread, so that the launcher reads on while the disk works."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Literal

from cdcpipe.threads import Worker
from spark_sink.staging.readers import Retention, remove_consumed
from spark_sink.staging.writer import StagingWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdcpipe.measures import Histogram
    from spark_sink.staging.log import Segment
    from spark_sink.staging.writer import Sealing

__all__ = ["Sealer"]


_REMOVE_INTERVAL_S, _REMOVE_SHARE = 10.0, 0.02
"""How often to look for segments that all readers have read, and which share of the thread's time this may take at most: with
--keep-segments there may be 600,000 to look at, and the next segment waits meanwhile."""


class Sealer:
    """A thread that seals segments in the order of their cuts, and stops at the first error.

    ``seals`` counts how long each segment took.
    """

    def __init__(
        self,
        writer: StagingWriter,
        sealed: Callable[[Segment, Sealing], None],
        wake: Callable[[], None],
        retention: Retention,
        seals: Histogram,
    ) -> None:
        self._writer = writer
        self._retention = retention
        self._seals = seals
        self._sealed = sealed
        self._wake = wake
        self._changed = threading.Condition()
        self._queue: deque[Sealing] = deque()
        self._work: Literal["resting", "sealing", "afterwards"] = "resting"
        self._closing = False
        self._error: BaseException | None = None
        self._remove_at = time.monotonic() + _REMOVE_INTERVAL_S
        self.sealed_lsn = 0
        self.unsealed_size = 0
        """The bytes of the segments that were submitted, and are not sealed yet: they wait for the disk."""
        self._thread = Worker(target=self._run, name="cdcpipe-sealer", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error that stopped the thread, if there is one."""
        if self._error is not None:
            raise self._error

    def submit(self, sealing: Sealing) -> None:
        """Queue a segment. Waits while the disk is behind: otherwise the memory would fill with unwritten pages."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) < 2 or self._error is not None)
            self._queue.append(sealing)
            self.unsealed_size += sealing.cut.size
            self._changed.notify_all()
        self.check()

    def drain(self) -> None:
        """Wait until all queued segments are sealed. Raises the error that stopped the thread."""
        with self._changed:
            self._changed.wait_for(lambda: (not self._queue and self._work != "sealing") or self._error is not None)
        self.check()

    def rest(self) -> None:
        """Wait until the thread has also built all indexes, and removes no segments. Raises the error that stopped the thread.

        Nothing that it works with may change before: a new epoch removes old epochs and temporary files.
        """
        with self._changed:
            self._changed.wait_for(lambda: (not self._queue and self._work == "resting") or self._error is not None)
        self.check()

    def close(self) -> None:
        """End the thread. Segments that are still queued are not sealed."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        for sealing in self._queue:
            self._writer.abandon(sealing)

    def _run(self) -> None:
        try:
            while (sealing := self._next()) is not None:
                with self._seals.timed():
                    segment = self._writer.seal(sealing)
                self._sealed(segment, sealing)
                self.sealed_lsn = segment.end_lsn
                self._sealing_ended(sealing.cut.size)
                self._afterwards(segment, sealing)
        except BaseException as ex:  # noqa: BLE001 - `check` raises it again in the launcher's thread
            self._error = ex
            self._sealing_ended()

    def _next(self) -> Sealing | None:
        with self._changed:
            self._work = "resting"
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or self._closing)
            if self._closing:
                return None
            self._work = "sealing"
            return self._queue.popleft()

    def _sealing_ended(self, sealed_size: int = 0) -> None:
        with self._changed:
            self.unsealed_size -= sealed_size
            self._work = "afterwards"
            self._changed.notify_all()
        self._wake()

    def _afterwards(self, segment: Segment, sealing: Sealing) -> None:
        """Build the segment's index, and remove segments that all readers have read. Confirming does not wait for this."""
        _build_index(segment, sealing)
        began_at = time.monotonic()
        if began_at >= self._remove_at:
            remove_consumed(self._writer.root, self._retention)
            ended_at = time.monotonic()
            self._remove_at = ended_at + max(_REMOVE_INTERVAL_S, (ended_at - began_at) / _REMOVE_SHARE)


def _build_index(segment: Segment, sealing: Sealing) -> None:
    """Write the segment's index from the known record boundaries. If the index is missing, the readers build it themselves."""
    try:
        from spark_sink.staging import index as segment_index
    except ImportError:  # pyarrow is not installed: landing does not need it
        return
    boundaries = sealing.boundaries
    if boundaries.is_complete:
        segment_index.build(segment.path, *boundaries.arrays())
