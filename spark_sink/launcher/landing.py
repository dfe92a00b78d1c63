"""Lands one stream: takes what the streamer sends to the staging log, and confirms to it what is durable there.

    landing = Landing(child, filler, writer, sealer, config, passed_at)
    landing.pump(stopping, wakeup, note)      # until the streamer closes its stdout, or the launcher has to stop
    landing.finish()                          # cuts the last segment
    landing.confirm_rest()                    # seals and confirms what is whole

All of it is the work of the launcher's thread, which never waits for one pipe while the other is full. Before an idle position is
confirmed, the sealer seals all that was cut, the position is recorded, and only then `Feedback` may send it.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from typing import TYPE_CHECKING

from spark_sink.launcher.streamer import QUIT_TIMEOUT_S, Feedback
from spark_sink.staging import account
from spark_sink.staging.filler import Idle

if TYPE_CHECKING:
    from collections.abc import Callable

    from spark_sink.launcher.config import LauncherConfig
    from spark_sink.launcher.sealer import Sealer
    from spark_sink.launcher.streamer import Streamer
    from spark_sink.staging.filler import Operation, SegmentFiller
    from spark_sink.staging.writer import StagingWriter

__all__ = ["Landing", "Wakeup"]

_READ_BYTES, _LEAST_READ_BYTES = 1 << 20, 512
_LONGEST_POLL_S = 3600.0
_RECORD_AGAIN_S = 10.0
"""How soon to record an idle position again that had to wait. Until it is confirmed, the streamer tells no other."""

_BULK_BYTES, _BULK_PAUSE_S = 16 << 10, 0.012
"""After a read of at least this size the thread pauses, so that reads are fewer and larger. The pipe holds the data meanwhile.

At 54 MB/s a large pipe is full after 19 ms. If the pipe is smaller, so is the pause.
"""


class Landing:
    """The way of one stream from the streamer ``child`` to the log that ``writer`` writes.

    ``passed_at`` tells when the server's WAL passed an idle position, in seconds since 1970; None if it is not known.
    """

    def __init__(
        self,
        child: Streamer,
        filler: SegmentFiller,
        writer: StagingWriter,
        sealer: Sealer,
        config: LauncherConfig,
        passed_at: Callable[[int], float | None],
    ) -> None:
        self._child = child
        self._filler = filler
        self._writer = writer
        self._sealer = sealer
        self._config = config
        self._passed_at = passed_at
        self._feedback = Feedback(child, writer.end_lsn, config.hook)
        self._waiting_idle: tuple[int, float] | None = None
        """An idle position that could not be recorded yet, and when to try again."""

    def pump(self, stopping: threading.Event, wakeup: Wakeup, note: Callable[[int], None]) -> None:
        """Move bytes from the streamer to the open segment, until the streamer closes its stdout or the launcher has to stop.

        ``note`` gets the size of what was received and is not sealed, each time that it is another one.
        """
        # A segment can be cut only between two reads. So a read must not be larger than a segment.
        read_bytes = min(_READ_BYTES, max(self._config.seal.segment_bytes, _LEAST_READ_BYTES))
        child, sealer, noted_size = self._child, self._sealer, 0
        poll = select.poll()
        poll.register(child.stdout_fd, select.POLLIN)
        poll.register(wakeup.fd, select.POLLIN)
        while not stopping.is_set():
            sealer.check()
            self._feedback.send(sealer.sealed_lsn)
            self._try_waiting_idle()
            deadline = self._deadline()
            timeout_s = _LONGEST_POLL_S if deadline is None else min(deadline - time.monotonic(), _LONGEST_POLL_S)
            ready = {fd for fd, _ in poll.poll(max(timeout_s, 0.0) * 1000 + 1)}
            if wakeup.fd in ready:
                wakeup.clear()
            if child.stdout_fd in ready:
                data = os.read(child.stdout_fd, read_bytes)
                if not data:
                    return
                self._apply(self._filler.feed(data, time.monotonic()))
                if len(data) >= _BULK_BYTES:
                    time.sleep(_BULK_PAUSE_S * child.pipe_share)
            else:
                self._apply(self._filler.tick(time.monotonic()))
            open_size = self._writer.open_size + sealer.unsealed_size
            if open_size != noted_size:
                noted_size = open_size
                note(open_size)

    def finish(self) -> None:
        """Cut the last segment: the stream has ended."""
        self._apply(self._filler.finish())
        if self._waiting_idle is not None:
            self._take_idle(self._waiting_idle[0])

    def confirm_rest(self) -> None:
        """Wait until all segments are sealed, and confirm them."""
        self._sealer.drain()
        self._feedback.send(self._sealer.sealed_lsn, QUIT_TIMEOUT_S)

    def _apply(self, operations: list[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, Idle):
                self._take_idle(operation.lsn)
                continue
            sealing = self._writer.apply(operation)
            if sealing is not None:
                self._sealer.submit(sealing)

    def _take_idle(self, lsn: int) -> None:
        """Record a position up to which nothing more is published, and let the streamer confirm it.

        It waits if transactions before it are in the open segment (with ``available_now``), or if the disk refuses it. One that
        the sealed log has reached needs no record: it comes at the start of another stream, or has waited.
        """
        if lsn > self._sealer.sealed_lsn:
            self._sealer.drain()
            writer = self._writer
            if writer.open_size or not account.record(self._config.staging, lsn, writer.end_lsn, self._passed_at(lsn)):
                self._waiting_idle = lsn, time.monotonic() + _RECORD_AGAIN_S
                return
        self._waiting_idle = None
        self._feedback.allow(lsn)

    def _try_waiting_idle(self) -> None:
        """Record an idle position that waits, if that is due."""
        if (waiting := self._waiting_idle) is not None and time.monotonic() >= waiting[1]:
            self._take_idle(waiting[0])
            self._feedback.send(self._sealer.sealed_lsn)

    def _deadline(self) -> float | None:
        """Return when `pump` has to look again, also if nothing comes; None if it need not."""
        times = [self._filler.deadline, None if self._waiting_idle is None else self._waiting_idle[1]]
        return min((at for at in times if at is not None), default=None)


class Wakeup:
    """Wakes the thread that polls ``fd``. Any thread and a signal handler may call `set`; after `close` it does nothing."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt its own thread inside `set`

    def set(self) -> None:
        """Wake the thread, now or at its next poll."""
        with self._lock:
            if self.fd >= 0:
                with contextlib.suppress(BlockingIOError):  # the pipe is full: the thread wakes up anyway
                    os.write(self._write_fd, b"w")

    def clear(self) -> None:
        """Let the next poll wait again. The woken thread calls this."""
        os.read(self.fd, 4096)

    def close(self) -> None:
        """Close both ends of the pipe."""
        with self._lock:
            os.close(self.fd)
            os.close(self._write_fd)
            self.fd = -1
