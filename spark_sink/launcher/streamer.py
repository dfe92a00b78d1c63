"""The streamer: the ``cdcpipe`` child process from which the launcher reads the stream, and the feedback to it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cdcpipe.pipe.commands import QUIT, encode_feedback
from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.client.prepare import Prepared
from spark_sink.client.process import ANSWER_S, Child, unanswered
from spark_sink.staging.writer import Failpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spark_sink.client.failure import Failure

__all__ = ["QUIT_TIMEOUT_S", "Feedback", "Streamer"]

_logger = logging.getLogger(__name__)


_PIPE_BYTES = 1 << 20


QUIT_TIMEOUT_S = 15.0
"""How long a streamer may take to end after `q`. Then the launcher kills it, which does not affect confirmed positions.

While the server is silent, the streamer needs less than 10 s of this (cdcpipe/streaming/ending.py)."""

_SIGNAL_AFTER_S = 3.0
"""A streamer that has not ended by then may be connecting. It reads no commands then, but a signal ends it."""


_EXIT_GRACE_S = 0.05
"""A streamer that fails closes its stdout and ends within this time. If it still runs, it has reached the end position."""


class Feedback:
    """Writes ``F LSN`` for the highest sealed LSN. If the pipe is full, the LSN is sent with the next call."""

    def __init__(self, child: Streamer, start_lsn: int, hook: Callable[[Failpoint], None] | None) -> None:
        self._child = child
        self._sent_lsn = start_lsn
        self._idle_lsn = 0
        self._hook = hook

    def allow(self, idle_lsn: int) -> None:
        """Let the next `send` confirm up to ``idle_lsn``, which is recorded in the staging directory.

        It is sent in any case, also where the stream began: the streamer tells of no other idle position before that.
        """
        self._idle_lsn = idle_lsn
        self._sent_lsn = min(self._sent_lsn, idle_lsn - 1)

    def send(self, sealed_lsn: int, timeout_s: float = 0) -> None:
        """Confirm up to ``sealed_lsn``, unless that was sent before. Waits at most ``timeout_s`` for room in the pipe."""
        sealed_lsn = max(sealed_lsn, self._idle_lsn)
        if sealed_lsn <= self._sent_lsn:
            return
        if self._hook is not None:
            self._hook(Failpoint.BEFORE_FEEDBACK)
        if self._child.write(encode_feedback(sealed_lsn), timeout_s):
            self._sent_lsn = sealed_lsn
        if self._hook is not None:
            self._hook(Failpoint.AFTER_FEEDBACK)


class Streamer(Child):
    """A running streamer, with a large stdout pipe.

    It is one process from the preparation to the end of the stream, because each start of ``cdcpipe`` takes a quarter of a second:

    1. ``Streamer(["prepare", "--then-stream", …])`` starts it.
    2. `prepared` waits for what it has found.
    3. `begin` starts the stream, with arguments that follow from what was found.
    """

    def __init__(self, arguments: Sequence[str], *, command: Sequence[str], temporary: Path, tell: Callable[[str], None]) -> None:
        super().__init__(arguments, command=command, temporary=temporary, tell=tell)
        with contextlib.suppress(OSError):  # over this user's limit for pipes: the default size works, too
            fcntl.fcntl(self.stdout_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.pipe_share: float = min(1.0, fcntl.fcntl(self.stdout_fd, fcntl.F_GETPIPE_SZ) / _PIPE_BYTES)
        """The size of the stdout pipe, as a part of the wanted size."""

    def prepared(self, is_stopping: Callable[[], bool]) -> Prepared | Failure:
        """Wait for what ``cdcpipe prepare`` finds, and return it, or its failure. Raises InterruptedError when asked to stop."""
        try:
            line = self.read_line(ANSWER_S, is_stopping)
        except TimeoutError:
            return unanswered("prepare", ANSWER_S)
        if line:
            return Prepared.parse(line)
        failure = self.failure()
        return Prepared.parse(b"") if failure.code == ExitCode.SUCCESS else failure

    def begin(self, arguments: Sequence[str]) -> None:
        """Start the stream. If the process has ended meanwhile, its stdout is at its end, and `failure` says why."""
        self.write(json.dumps(list(arguments)).encode() + b"\n", QUIT_TIMEOUT_S)

    def ends_by_itself(self) -> bool:
        """Tell whether the streamer has ended, or ends in a moment, although it was not asked to."""
        return self.wait(_EXIT_GRACE_S)

    def spilled_bytes(self) -> int:
        """Return how many bytes it has in files without names, as Linux tells; 0 elsewhere. Any thread may ask."""
        size = 0
        with contextlib.suppress(OSError):  # it has ended
            for fd in Path(f"/proc/{self.pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed just now
                    found = fd.stat()
                    size += found.st_size if stat.S_ISREG(found.st_mode) and not found.st_nlink else 0
        return size

    def quit(self) -> None:
        """Ask the streamer to end, drop what it still sends, and wait until it has ended; kill it if this takes too long."""
        deadline = time.monotonic() + QUIT_TIMEOUT_S
        self.write(QUIT, _SIGNAL_AFTER_S)
        if self._has_ended_by(min(deadline, time.monotonic() + _SIGNAL_AFTER_S)):
            return
        self.terminate()
        if not self._has_ended_by(deadline):
            _logger.warning("the streamer is still running %.0f s after it was asked to quit; killing it", QUIT_TIMEOUT_S)
            self.kill()

    def _has_ended_by(self, deadline: float) -> bool:
        """Drop what the streamer sends until it has ended. Return False if ``deadline`` comes first."""
        with contextlib.suppress(TimeoutError):
            while time.monotonic() < deadline and self.read(deadline - time.monotonic()):
                pass
        return self.wait(deadline - time.monotonic())
