"""Runs ``cdcpipe`` as a child process: starts it, reads its output, ends it. No pyspark.

    answer = ask(["slot", "-S", "s"], is_stopping=stopping.is_set)      # for a command that prints its answer and ends
    with Child(["checksum"]) as child:                                  # for a command that keeps running
        child.write(b"...", timeout_s=10)
        line = child.read_line(timeout_s=60)

No other module starts the command. Every wait has a deadline, or ends when another thread calls `Child.kill`. Waits that take
``is_stopping`` ask it ten times a second. Leaving the context ends the child: by SIGTERM, then by SIGKILL. If this process dies,
client/guard.py ends the child.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cdcpipe.errors import CdcpipeError
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.running_time import RunningTime
from cdcpipe.threads import Worker
from spark_sink.client import guard
from spark_sink.client.connection import refuse_passwords
from spark_sink.client.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["ANSWER_S", "COMMAND", "Answer", "Child", "ask", "is_report", "reading", "unanswered"]

COMMAND = (sys.executable, "-P", "-m", "cli")

ANSWER_S = 180.0
"""The time limit for a command that answers and ends. The command has shorter deadlines of its own; this one is for a hang."""

_ERROR_PREFIX, _HINT_PREFIX = "cdcpipe: error: ", "cdcpipe: hint: "
_READ_BYTES = 1 << 20
_SAID_LINES = 20
"""How much of a child's stderr is kept for the error message about its end."""
_LOOK_S = 0.1
"""The pause between two calls of ``is_stopping``."""
_TURN_S = 0.5
"""The longest wait between two questions of `RunningTime`, so that all of it counts."""
_END_S = 3.0
"""How long a child may take to end after SIGTERM. It may have to drop a slot that it was creating."""
_INTERRUPTED = {128 + number: -number for number in (signal.SIGINT, signal.SIGTERM)}
"""The exit codes with which the command reports a signal, and the code of a child that the signal has killed."""


def _environment(temporary: Path | None) -> dict[str, str]:
    """Return the environment of a child: ours, this package's directory at the end of $PYTHONPATH, ``temporary`` as $TMPDIR.

    A child writes its messages in UTF-8, whatever the locale is: we read them.
    """
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))
    changed = {"PYTHONPATH": paths, "PYTHONIOENCODING": "utf-8"}
    if temporary is not None:
        changed["TMPDIR"] = str(temporary.absolute())
    return os.environ | changed


def is_report(line: str) -> bool:
    """Tell whether a line on stderr is the command's final error or hint, which `Child.failure` repeats."""
    return line.startswith((_ERROR_PREFIX, _HINT_PREFIX))


def _failure(code: int, said: Sequence[str]) -> Failure:
    """Return how a child ended, from its exit code and its lines on stderr.

    A signal that came before the command handles signals kills it; later the command reports the signal. Both are the same end.
    """
    errors = [line.removeprefix(_ERROR_PREFIX) for line in said if line.startswith(_ERROR_PREFIX)]
    hints = [line.removeprefix(_HINT_PREFIX) for line in said if line.startswith(_HINT_PREFIX)]
    message = errors[-1] if errors else said[-1] if said else ""
    return Failure(_INTERRUPTED.get(code, code), message, hints[-1] if errors and hints else None)


class Child:
    """A running ``cdcpipe``.

    ``stdin`` is passed to `subprocess.Popen`. A thread calls ``tell`` with each line on stderr. With ``outlives_us`` the child
    keeps running after this process has ended: the guard does not end it. Then `tell_news` calls ``tell``.

    Raises InvalidArgumentsError, and starts nothing, if ``arguments`` have a password. Raises OSError if a limit of the machine
    allows no process, no pipe or no thread. Then no child is left.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        command: Sequence[str] = COMMAND,
        stdin: int = subprocess.PIPE,
        temporary: Path | None = None,
        tell: Callable[[str], None] | None = None,
        outlives_us: bool = False,
    ) -> None:
        refuse_passwords(arguments)
        self._tell = tell
        self._lines: deque[str] = deque(maxlen=_SAID_LINES)
        self._partial = b""
        # A child that outlives us could not write to a pipe any more, so its stderr is a file.
        self._errors = tempfile.TemporaryFile() if outlives_us else None  # noqa: SIM115 - closed in `close`
        self._told_bytes = 0

        def start(**apart: Any) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [*command, *arguments],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=self._errors or subprocess.PIPE,
                bufsize=0,
                env=_environment(temporary),
                **apart,
            )

        # In either case ^C at a terminal does not reach the child.
        if outlives_us:
            self._process = start(start_new_session=True)
        else:
            self._process = guard.start_in_group(lambda group: start(process_group=group))
        assert self._process.stdout is not None
        self.stdout_fd = self._process.stdout.fileno()
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
        self._stderr_thread = Worker(target=self._read_stderr, name="cdcpipe-stderr", daemon=True)
        try:
            self._stderr_thread.start()
        except RuntimeError as ex:  # the system gives no thread; nobody else could end the child
            self.kill()
            self._process.wait()
            self.close()
            raise OSError(errno.EAGAIN, str(ex)) from ex

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self.close()

    @property
    def pid(self) -> int:
        """The process ID."""
        return self._process.pid

    # --- end ---

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the child has ended; return False if it is still running after ``timeout_s``."""
        try:
            self._process.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL. Any thread may call this."""
        self._process.kill()

    def end(self) -> None:
        """End the child if it is running: by SIGTERM, and by SIGKILL if it has not ended soon after."""
        if self.code is None:
            self.terminate()
            if not self.wait(_END_S):
                self.kill()
                self._process.wait()

    def close(self) -> None:
        """Close the pipes. A running child is not ended."""
        if self._errors is None:
            self._stderr_thread.join_if_started()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr, self._errors):
            if stream is not None:
                stream.close()

    def failure(self) -> Failure:
        """Return how the child ended, and its last words on stderr. Call it when the child has ended, or is about to end."""
        if not self.wait(_END_S):
            self.end()
        self._stderr_thread.join()
        if self._errors is not None:
            self._errors.seek(0)
            self._lines.extend(_lines(self._errors.read()))
        return _failure(self._process.returncode, list(self._lines))

    def _read_stderr(self) -> None:
        if self._process.stderr is None:
            return
        with open(self._process.stderr.fileno(), "rb", closefd=False) as stream:
            while line := stream.readline(1 << 16):
                for text in _lines(line):
                    self._lines.append(text)
                    if self._tell is not None:
                        self._tell(text)

    def tell_news(self) -> None:
        """Call ``tell`` with the new lines on the stderr of a child that outlives us, which no thread reads."""
        if self._errors is None or self._tell is None:
            return
        said = os.pread(self._errors.fileno(), 1 << 16, self._told_bytes)
        whole = said[: said.rfind(b"\n") + 1]
        self._told_bytes += len(whole)
        for text in _lines(whole):
            self._tell(text)

    # --- pipes ---

    def write(self, data: bytes, timeout_s: float) -> bool:
        """Write ``data`` to stdin; return False if the child does not read it in time, or has ended."""
        assert self._process.stdin is not None
        fd = self._process.stdin.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        deadline = time.monotonic() + timeout_s
        while data:
            if not poll.poll(max(deadline - time.monotonic(), 0.0) * 1000):
                return False
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
            except BrokenPipeError:
                return False
        return True

    def read(self, timeout_s: float | None, is_stopping: Callable[[], bool] | None = None) -> bytes:
        """Return the next bytes from stdout, b"" at its end.

        Raises TimeoutError after ``timeout_s``, InterruptedError once ``is_stopping`` is True: also at the end of stdout, because
        what asks us to stop may have ended the child, too. For a timeout, the time in which this process was paused does not count:
        the child may have been paused with it.
        """
        return self._read(timeout_s, RunningTime(), is_stopping)

    def _read(self, timeout_s: float | None, waited: RunningTime, is_stopping: Callable[[], bool] | None) -> bytes:
        poll = select.poll()
        poll.register(self.stdout_fd, select.POLLIN)
        while True:
            if is_stopping is not None and is_stopping():
                raise InterruptedError
            waits_s = [] if is_stopping is None else [_LOOK_S]
            left_s = None
            if timeout_s is not None:
                left_s = max(0.0, timeout_s - waited.seconds())
                waits_s += [left_s, _TURN_S]
            if poll.poll(min(waits_s) * 1000 if waits_s else None):
                data = os.read(self.stdout_fd, _READ_BYTES)
                if not data and is_stopping is not None and is_stopping():
                    raise InterruptedError
                return data
            if left_s == 0:
                raise TimeoutError

    def read_line(self, timeout_s: float | None, is_stopping: Callable[[], bool] | None = None) -> bytes:
        """Return the next whole line from stdout, b"" at its end; raise the same errors as `read`."""
        waited = RunningTime()
        parts = [self._partial]
        while b"\n" not in parts[-1]:
            data = self._read(timeout_s, waited, is_stopping)
            if not data:
                return b""
            parts.append(data)
        line, newline, self._partial = b"".join(parts).partition(b"\n")
        return line + newline

    def read_all(self, timeout_s: float, is_stopping: Callable[[], bool] | None = None) -> bytes:
        """Return everything up to the end of stdout; raise the same errors as `read`."""
        waited = RunningTime()
        parts: list[bytes] = []
        while data := self._read(timeout_s, waited, is_stopping):
            parts.append(data)
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command printed, and how it ended. ``failure`` is set for a successful end, too."""

    output: bytes
    failure: Failure

    @property
    def code(self) -> int:
        """The exit code, negative for a signal."""
        return self.failure.code


def ask(
    arguments: Sequence[str],
    *,
    command: Sequence[str] = COMMAND,
    is_stopping: Callable[[], bool] | None = None,
    tell: Callable[[str], None] | None = None,
    timeout_s: float = ANSWER_S,
) -> Answer:
    """Run a command that prints its answer on stdout and ends.

    Raises InterruptedError once ``is_stopping`` is True. A command that does not answer in time is ended; the answer is then the
    same as for a lost connection.
    """
    with Child(arguments, command=command, stdin=subprocess.DEVNULL, tell=tell) as child:
        try:
            output = child.read_all(timeout_s, is_stopping)
        except TimeoutError:
            return Answer(b"", unanswered(arguments[0], timeout_s))
        return Answer(output, child.failure())


def unanswered(name: str, timeout_s: float) -> Failure:
    """Return the failure of a subcommand that did not answer within ``timeout_s``: a lost connection."""
    return Failure(ExitCode.PG_CLOSED, f"'cdcpipe {name}' has not answered for {timeout_s:.0f} s", "can the server be reached?")


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn an error in reading what a subcommand has printed into CdcpipeError. The body of ``with`` reads it."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as ex:
        msg = f"cannot read what 'cdcpipe {name}' printed: {ex!r}"
        raise CdcpipeError(msg, hint="are cdcpipe and cdcpipe-spark of the same version?") from ex


def _lines(said: bytes) -> list[str]:
    return [line.rstrip() for line in said.decode("utf-8", "backslashreplace").split("\n") if line.strip()]
