"""Reads commands from a file descriptor without ever waiting.

After a poll, a pipe can be read without waiting. A terminal may drop its input after the poll (^C does), and the read would wait.
So a terminal is opened again with ``O_NONBLOCK``, for the same reason as in `pipe.output`.
"""

from __future__ import annotations

import os
import select

__all__ = ["Input", "read_up_to"]

_READ_BYTES = 1 << 16


def read_up_to(fd: int, count: int) -> bytes:
    """Read at most ``count`` bytes, and wait for the first one. Returns ``b""`` at the end, and if ``fd`` can't be read.

    A stdin that was closed at the start can't be read (cdcpipe/descriptors.py). For commands that is the same as its end.
    """
    try:
        return os.read(fd, count)
    except OSError:
        return b""


class Input:
    """Reads the bytes that ``fd`` has now."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._opened_fd: int | None = None
        try:
            if os.isatty(fd):
                self.fd = self._opened_fd = os.open(f"/dev/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:  # no /dev/fd, or another user's terminal: rely on polling alone
            self._opened_fd = None

    def read(self) -> bytes | None:
        """Return the bytes that are there, ``b""`` at the end, None if there are none now. Raises OSError if reading fails."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        if not poll.poll(0):
            return None
        try:
            return os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return None

    def close(self) -> None:
        """Close the descriptor that was opened here."""
        if self._opened_fd is not None:
            os.close(self._opened_fd)
            self._opened_fd = None
