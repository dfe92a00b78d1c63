"""stdin, stdout and stderr of a command: always there, and answers are in UTF-8 and complete, or an error says why not.

Both commands call `set_up` first. If a descriptor was closed at the start (`<&-`, `>&-`, `2>&-`), the next file or socket would get
its number otherwise, and Python would have no object for it.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import sys
from typing import Any, Final, NoReturn

from cdcpipe.errors import OutputError

__all__ = ["STDOUT", "set_up", "stdout_error"]

STDOUT: Final = 1
_STDIN, _STDERR = 0, 2


def set_up() -> None:
    """Make stdin, stdout and stderr usable, whatever the command was started with.

    Programs read the answers, so their encoding does not depend on the locale. The same is true for requests on stdin. A stdin that
    can't be read has no requests.
    """
    is_stdout_closed = _fill_closed()
    raw = _ClosedStdout() if is_stdout_closed else _Stdout(STDOUT, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=raw.isatty())
    if fcntl.fcntl(_STDIN, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:  # closed at the start, or given by nohup
        sys.stdin = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    elif isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.encoding.lower() != "utf-8":
        sys.stdin.reconfigure(encoding="utf-8")
    sys.stderr = sys.stderr or open(_STDERR, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - it lasts until the exit


def _fill_closed() -> bool:
    """Open the null device as stdin, stdout or stderr if they were closed at the start. Return whether stdout was.

    Reading a closed stdin and writing to a closed stdout are still errors, because the null device is opened for the other
    direction. What is written to a closed stderr is dropped.
    """
    for fd, mode in ((_STDIN, os.O_WRONLY), (STDOUT, os.O_RDONLY), (_STDERR, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, mode)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
    return sys.stdout is None


def stdout_error() -> OutputError:
    """Return the error for a stdout that nothing can be written to."""
    return OutputError(
        "stdout is closed, or not open for writing",
        hint="records and answers go to stdout: if the command has >&-, remove it; to discard them, write >/dev/null",
    )


class _ClosedStdout(io.RawIOBase):
    """Stands for a stdout that was closed at the start. What is written to it is an error."""

    def writable(self) -> bool:
        return True

    def write(self, _: object) -> NoReturn:
        raise stdout_error()


class _Stdout(io.FileIO):
    """Says of an error that it is stdout's. A closed pipe is left to click: the reader has what it wanted, as ``head`` has."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as ex:
            if ex.errno == errno.EPIPE:
                raise
            raise OutputError(
                f"the answer can't be written to stdout: {ex.strerror}", hint="make room where stdout goes, or write it elsewhere"
            ) from ex
