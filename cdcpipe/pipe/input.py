"""The reading end of the commands: what a descriptor has now, without ever waiting.

A pipe that has been polled can be read. A terminal may take back what it had (^C drops what was typed and not read), and the read
would wait; so a terminal is opened anew, without waiting, as `pipe.output` does with its descriptor and for the same reason.
"""

from __future__ import annotations

import os
import select

__all__ = ["Input"]

_READ_BYTES = 1 << 16


class Input:
    """Reads ``fd``."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._opened_fd: int | None = None
        try:
            if os.isatty(fd):
                self.fd = self._opened_fd = os.open(f"/dev/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:  # no /dev/fd, or another user's terminal: polling has to do
            self._opened_fd = None

    def read(self) -> bytes | None:
        """Return what is there, ``b""`` at the end, None if there is nothing; raise OSError if it can't be read."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        if not poll.poll(0):
            return None
        try:
            return os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return None

    def close(self) -> None:
        """Close what was opened here."""
        if self._opened_fd is not None:
            os.close(self._opened_fd)
            self._opened_fd = None
