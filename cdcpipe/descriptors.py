"""stdin, stdout and stderr of a command, where some of them were closed at the start (`<&-`, `>&-`, `2>&-`).

Both commands call `fill_closed` first. Otherwise the next file or socket would get the number of a closed descriptor, and Python
would have no object for it.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Final, NoReturn

from cdcpipe.errors import OutputError

__all__ = ["STDOUT", "fill_closed", "stdout_error"]

STDOUT: Final = 1
_STDIN, _STDERR = 0, 2


def fill_closed() -> None:
    """Open the null device as stdin, stdout or stderr if they were closed at the start.

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
    sys.stdout = sys.stdout or io.TextIOWrapper(io.BufferedWriter(_ClosedStdout()), encoding="utf-8")
    sys.stderr = sys.stderr or open(_STDERR, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - it lasts until the exit


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
