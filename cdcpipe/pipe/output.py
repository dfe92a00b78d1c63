"""Writes chunks of records to a file descriptor without ever waiting.

Other processes may share the open file description of a pipe or a terminal. If ``O_NONBLOCK`` were set on it, their writes would
fail. So the file is opened again (through ``/proc/self/fd`` or ``/dev/fd``), which creates a separate description. A socket is
written with ``MSG_DONTWAIT``. If neither works, the flag is set, and removed at the end. Writes to regular files never wait.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections import deque

from cdcpipe.errors import OutputError

__all__ = ["Output"]

_PIPE_BYTES = 1 << 20
"""The largest pipe that an unprivileged user may have (``/proc/sys/fs/pipe-max-size``). The default is 64 KiB."""


class Output:
    """Writes chunks to ``fd``, as much as it accepts. Raises OutputError if it is closed or fails.

    Each chunk comes with the ends of the transactions in it. ``write`` returns the ends of the chunks that are written completely.
    """

    def __init__(self, fd: int) -> None:
        self._chunks: deque[tuple[memoryview, list[int]]] = deque()
        self.pending_bytes = 0
        self.fd = fd
        self._socket: socket.socket | None = None
        self._opened_fd: int | None = None
        self._flags_to_restore: int | None = None
        try:
            mode = os.fstat(fd).st_mode
            if stat.S_ISSOCK(mode):
                self._socket = socket.socket(fileno=os.dup(fd))
            elif not stat.S_ISREG(mode):
                self._stop_waiting(fd)
            if stat.S_ISFIFO(mode):
                self._grow_pipe()
        except OSError as ex:
            raise self._error(ex) from ex

    def _stop_waiting(self, fd: int) -> None:
        try:
            self._opened_fd = os.open(f"/dev/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            self.fd = self._opened_fd
        except OSError:  # no /dev/fd, or another user's pipe
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_NONBLOCK)
            self._flags_to_restore = flags

    def _grow_pipe(self) -> None:
        set_size = getattr(fcntl, "F_SETPIPE_SZ", None)  # Linux
        if set_size is not None:
            try:
                fcntl.fcntl(self.fd, set_size, _PIPE_BYTES)
            except OSError:  # over this user's limit for pipes: the default size works, too
                return

    @staticmethod
    def _error(ex: OSError) -> OutputError:
        msg = f"records can't be written: {ex.strerror}"
        return OutputError(msg, hint="the reader has closed the pipe, or the disk is full; nothing more was confirmed")

    def put(self, chunk: bytes, ends: list[int]) -> None:
        """Queue a chunk."""
        self._chunks.append((memoryview(chunk), ends))
        self.pending_bytes += len(chunk)

    def write(self) -> list[int]:
        """Write as much as the descriptor accepts now."""
        ends: list[int] = []
        try:
            while self._chunks:
                chunk, chunk_ends = self._chunks[0]
                if len(chunk):
                    if self._socket is not None:
                        count = self._socket.send(chunk, socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0))
                    else:
                        count = os.write(self.fd, chunk)
                    self.pending_bytes -= count
                    if count < len(chunk):
                        self._chunks[0] = (chunk[count:], chunk_ends)
                        continue
                self._chunks.popleft()
                ends += chunk_ends
        except BlockingIOError:
            pass  # the consumer is not reading; the stream's loop waits for it
        except OSError as ex:
            raise self._error(ex) from ex
        return ends

    def close(self) -> None:
        """Restore the descriptor's flags. Queued chunks are dropped."""
        if self._flags_to_restore is not None:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, self._flags_to_restore)
            self._flags_to_restore = None
        if self._opened_fd is not None:
            os.close(self._opened_fd)
            self._opened_fd = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
