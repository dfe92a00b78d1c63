"""The streamer, a ``cdcpipe`` child process, as the launcher uses it: three pipes, feedback, an end in order."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cdcpipe.pipe.commands import QUIT, encode_feedback
from spark_sink.client.process import Child
from spark_sink.staging.writer import Failpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


__all__ = ["QUIT_TIMEOUT_S", "Feedback", "Streamer"]

_logger = logging.getLogger(__name__)


_PIPE_BYTES = 1 << 20


QUIT_TIMEOUT_S = 30.0
"""How long a streamer may take to end after `q`; then it is killed. What was confirmed before is not at stake."""


_EXIT_GRACE_S = 0.05
"""A streamer that closes stdout without being at the end position is ending by itself, and is gone within this time."""


class Feedback:
    """Writes ``F`` for what is sealed, the highest only; what does not fit into the pipe goes with the next."""

    def __init__(self, child: Streamer, start_lsn: int, hook: Callable[[Failpoint], None] | None) -> None:
        self._child = child
        self._sent_lsn = start_lsn
        self._hook = hook

    def send(self, sealed_lsn: int, timeout_s: float = 0) -> None:
        """Confirm up to ``sealed_lsn``, if that is news; wait no longer than ``timeout_s`` for room in the pipe."""
        if sealed_lsn <= self._sent_lsn:
            return
        if self._hook is not None:
            self._hook(Failpoint.BEFORE_FEEDBACK)
        if self._child.write(encode_feedback(sealed_lsn), timeout_s):
            self._sent_lsn = sealed_lsn
        if self._hook is not None:
            self._hook(Failpoint.AFTER_FEEDBACK)


class Streamer(Child):
    """A streamer at the other end of three pipes. It lands what it has when asked to quit."""

    def __init__(self, arguments: Sequence[str], *, command: Sequence[str], temporary: Path, tell: Callable[[str], None]) -> None:
        super().__init__(arguments, command=command, temporary=temporary, tell=tell)
        with contextlib.suppress(OSError):  # more than this user may have; the default size works too
            fcntl.fcntl(self.stdout_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def ends_by_itself(self) -> bool:
        """Say whether it has ended, or does so in a moment, without having been asked to."""
        return self.wait(_EXIT_GRACE_S)

    def quit(self) -> None:
        """Ask it to end, drop what it still sends, and wait; not for ever."""
        deadline = time.monotonic() + QUIT_TIMEOUT_S
        self.write(QUIT, QUIT_TIMEOUT_S)
        with contextlib.suppress(TimeoutError):
            while self.read(deadline - time.monotonic()):
                pass
        if not self.wait(deadline - time.monotonic()):
            _logger.warning("the streamer has not ended %.0f s after it was asked to; killing it", QUIT_TIMEOUT_S)
            self.kill()
