"""A thread that seals segments, so that the stream flows on while the disk works."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from spark_sink.staging.log import StagingError
from spark_sink.staging.readers import Retention, remove_consumed
from spark_sink.staging.writer import StagingWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from spark_sink.staging.log import Segment
    from spark_sink.staging.writer import Sealing

__all__ = ["Sealer"]


_REMOVE_INTERVAL_S = 10.0


class Sealer:
    """A thread that seals segments in the order of their cuts, and stops at the first that fails."""

    def __init__(
        self,
        writer: StagingWriter,
        sealed: Callable[[Segment, Sealing], None],
        wake: Callable[[], None],
        retention: Retention,
    ) -> None:
        self._writer = writer
        self._retention = retention
        self._sealed = sealed
        self._wake = wake
        self._changed = threading.Condition()
        self._queue: deque[Sealing] = deque()
        self._busy = False
        self._closing = False
        self._error: BaseException | None = None
        self._removed_at = time.monotonic()
        self.sealed_lsn = 0
        self._thread = threading.Thread(target=self._run, name="cdcpipe-sealer", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what stopped the thread."""
        if self._error is not None:
            raise self._error

    def submit(self, sealing: Sealing) -> None:
        """Queue a segment; wait while the disk is behind, so that not all of the stream is in unwritten pages."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) < 2 or self._error is not None)
            self._queue.append(sealing)
            self._changed.notify_all()
        self.check()

    def drain(self) -> None:
        """Wait until all that is queued is sealed; raise what prevents it."""
        with self._changed:
            self._changed.wait_for(lambda: (not self._queue and not self._busy) or self._error is not None)
        self.check()

    def close(self) -> None:
        """End the thread; what is still queued is not sealed."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        for sealing in self._queue:
            self._writer.abandon(sealing)

    def _run(self) -> None:
        try:
            while (sealing := self._next()) is not None:
                segment = self._writer.seal(sealing)
                self._sealed(segment, sealing)
                self.sealed_lsn = segment.end_lsn
                self._tell()
                self._afterwards(segment, sealing)
        except BaseException as ex:  # noqa: BLE001 - it is raised again in the launcher's thread
            self._error = ex
            self._tell()

    def _next(self) -> Sealing | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if self._closing:
                return None
            self._busy = True
            return self._queue.popleft()

    def _tell(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
        self._wake()

    def _afterwards(self, segment: Segment, sealing: Sealing) -> None:
        """Do what nobody waits for: the segment's index, and the removal of segments that all readers are past."""
        _build_index(segment, sealing)
        now = time.monotonic()
        if now - self._removed_at >= _REMOVE_INTERVAL_S:
            self._removed_at = now
            try:
                remove_consumed(self._writer.root, self._retention)
            except OSError as ex:
                msg = f"cannot remove segments that all readers are past: {ex}"
                raise StagingError(msg) from ex


def _build_index(segment: Segment, sealing: Sealing) -> None:
    """Write down where the records are, while that is known; readers make the index themselves where it is missing."""
    try:
        from spark_sink.staging import index as segment_index
    except ImportError:  # no pyarrow: landing does not need it
        return
    boundaries = sealing.boundaries
    if boundaries.is_complete:
        segment_index.build(segment.path, *boundaries.arrays())
