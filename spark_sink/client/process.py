"""The ``cdcpipe`` command as a child process: how it is run, read and ended, and what it says. No pyspark.

    answer = ask(["slot", "-S", "s"], is_stopping=stopping.is_set)      # for a command that prints its answer and ends
    with Child(["checksum"]) as child:                                  # for one that goes on
        child.write(b"...", timeout_s=10)
        line = child.read_line(timeout_s=60)

This is the only place that starts the command. Every wait has a deadline, or an end that `Child.kill` in another thread brings
about; waits that take ``is_stopping`` ask it ten times a second. Leaving the context ends the child: SIGTERM, then SIGKILL.
client/guard.py ends it when this process is gone.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.client import guard
from spark_sink.client.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ANSWER_S", "COMMAND", "Answer", "Child", "ask", "is_report", "unanswered"]

COMMAND = (sys.executable, "-P", "-m", "cli")

ANSWER_S = 180.0
"""So long a command that answers and ends may take. It has shorter deadlines of its own; this is for one that hangs."""

_ERROR_PREFIX, _HINT_PREFIX = "cdcpipe: error: ", "cdcpipe: hint: "
_READ_BYTES = 1 << 20
_SAID_LINES = 20
"""How much of what a child says on stderr is kept for the error that it ends with."""
_LOOK_S = 0.1
"""How often ``is_stopping`` is asked."""
_END_S = 3.0
"""So long a child may take to end after SIGTERM: a slot that is being made is dropped meanwhile."""


def _environment(temporary: Path | None) -> dict[str, str]:
    """Return our environment, with this package's directory where modules are looked for last, and ``temporary`` as $TMPDIR."""
    root = str(Path(__file__).resolve().parents[2])
    changed = {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))}
    if temporary is not None:
        changed["TMPDIR"] = str(temporary.absolute())
    return os.environ | changed


def is_report(line: str) -> bool:
    """Return whether a line on stderr belongs to the command's last words, which `Child.failure` repeats."""
    return line.startswith((_ERROR_PREFIX, _HINT_PREFIX))


def _failure(code: int, said: Sequence[str]) -> Failure:
    """Return how it ended, from its exit code and the lines that it wrote to stderr."""
    errors = [line.removeprefix(_ERROR_PREFIX) for line in said if line.startswith(_ERROR_PREFIX)]
    hints = [line.removeprefix(_HINT_PREFIX) for line in said if line.startswith(_HINT_PREFIX)]
    message = errors[-1] if errors else said[-1] if said else ""
    return Failure(code, message, hints[-1] if errors and hints else None)


class Child:
    """A running ``cdcpipe``.

    ``stdin`` is what `subprocess.Popen` takes. ``tell`` is called with each line on stderr, by a thread. ``outlives_us`` is for a
    child that has to go on without this process: no guard ends it.
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
        self._tell = tell
        self._lines: deque[str] = deque(maxlen=_SAID_LINES)
        self._partial = b""
        # A child that outlives us would meet the end of a pipe.
        self._errors = tempfile.TemporaryFile() if outlives_us else None  # noqa: SIM115 - closed in `close`
        # In either case ^C at a terminal is for us alone.
        apart: dict[str, Any] = {"start_new_session": True} if outlives_us else {"process_group": guard.group()}
        self._process = subprocess.Popen(
            [*command, *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=self._errors or subprocess.PIPE,
            bufsize=0,
            env=_environment(temporary),
            **apart,
        )
        assert self._process.stdout is not None
        self.stdout_fd = self._process.stdout.fileno()
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
        self._stderr_thread = threading.Thread(target=self._read_stderr, name="cdcpipe-stderr", daemon=True)
        self._stderr_thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self.close()

    # --- its end ---

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return False if it has not ended in time."""
        try:
            self._process.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it by SIGKILL, from any thread."""
        self._process.kill()

    def end(self) -> None:
        """End it if it has not ended: by SIGTERM, and if that does not help soon, by SIGKILL."""
        if self.code is None:
            self._process.terminate()
            if not self.wait(_END_S):
                self.kill()
                self._process.wait()

    def close(self) -> None:
        """Close the pipes. A child that still runs can go on."""
        if self._errors is None:
            self._stderr_thread.join()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr, self._errors):
            if stream is not None:
                stream.close()

    def failure(self) -> Failure:
        """Return how it ended, with what it said last on stderr; for one that has ended, or is about to."""
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

    # --- its pipes ---

    def write(self, data: bytes, timeout_s: float) -> bool:
        """Send ``data`` if the pipe takes it in time; False as well if the child has ended: its exit code says how."""
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
        """Return what comes next on stdout, b"" at its end; raise TimeoutError, or InterruptedError once it is to stop."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self.stdout_fd, select.POLLIN)
        while True:
            if is_stopping is not None and is_stopping():
                raise InterruptedError
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError
            waits_s = [each for each in (left_s, None if is_stopping is None else _LOOK_S) if each is not None]
            if poll.poll(min(waits_s) * 1000 + 1 if waits_s else None):
                return os.read(self.stdout_fd, _READ_BYTES)

    def read_line(self, timeout_s: float | None, is_stopping: Callable[[], bool] | None = None) -> bytes:
        """Return the next whole line on stdout, b"" at its end; raise as `read` does."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        parts = [self._partial]
        while b"\n" not in parts[-1]:
            data = self.read(None if deadline is None else deadline - time.monotonic(), is_stopping)
            if not data:
                return b""
            parts.append(data)
        line, newline, self._partial = b"".join(parts).partition(b"\n")
        return line + newline

    def read_all(self, timeout_s: float, is_stopping: Callable[[], bool] | None = None) -> bytes:
        """Return all of stdout; raise as `read` does."""
        deadline = time.monotonic() + timeout_s
        parts: list[bytes] = []
        while data := self.read(deadline - time.monotonic(), is_stopping):
            parts.append(data)
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command printed, and how it ended: also one that ended well is described by ``failure``."""

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
    """Run a command that answers on stdout and ends; raise InterruptedError once ``is_stopping`` says so.

    One that does not answer in time is ended, and counts as one whose connection was lost.
    """
    with Child(arguments, command=command, stdin=subprocess.DEVNULL, tell=tell) as child:
        try:
            output = child.read_all(timeout_s, is_stopping)
        except TimeoutError:
            return Answer(b"", unanswered(arguments[0], timeout_s))
        return Answer(output, child.failure())


def unanswered(name: str, timeout_s: float) -> Failure:
    """Return what it is when the subcommand ``name`` has not answered for so long: a lost connection."""
    return Failure(ExitCode.PG_CLOSED, f"'cdcpipe {name}' has not answered for {timeout_s:.0f} s", "can the server be reached?")


def _lines(said: bytes) -> list[str]:
    return [line.rstrip() for line in said.decode("utf-8", "backslashreplace").split("\n") if line.strip()]
