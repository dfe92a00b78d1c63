"""Writes chunks of records to a file descriptor without ever waiting.

Other processes may share the open file description of a pipe or a terminal. If ``O_NONBLOCK`` were set on it, their writes would
fail. So the file is opened again (through ``/proc/self/fd`` or ``/dev/fd``), which creates a separate description. A socket is
written with ``MSG_DONTWAIT``. If neither works, the flag is set, and removed at the end. Writes to regular files never wait.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections import deque
from typing import Final

from cdcpipe.errors import OutputError
from cdcpipe.pipe.framing import match_header

__all__ = ["READER_ENDED", "EndOfRecord", "Output"]

_SENT_AGAIN: Final = "; the server sends again what was not confirmed"
READER_ENDED: Final = "the program that reads the records has ended: see why, then start both again" + _SENT_AGAIN
"""The hint for a pipe without a reader."""
_NO_ROOM: Final = "make room where the output goes, then start again" + _SENT_AGAIN
_HINTS: Final = {errno.EPIPE: READER_ENDED, errno.ECONNRESET: READER_ENDED, errno.ENOSPC: _NO_ROOM, errno.EDQUOT: _NO_ROOM}

_PIPE_BYTES = 1 << 20
"""The largest pipe that an unprivileged user may have (``/proc/sys/fs/pipe-max-size``). The default is 64 KiB."""


class EndOfRecord(int):
    """Where a transaction ends whose last record has another position in its header."""

    header_lsn: int

    @classmethod
    def of(cls, lsn: int, header_lsn: int) -> EndOfRecord:
        """Return the end ``lsn`` of a record with this position in its header."""
        end = cls(lsn)
        end.header_lsn = header_lsn
        return end


class _Chunk:
    """A chunk, and how much of it is written."""

    __slots__ = ("_ends", "_last_lsn", "_places", "_scanned_bytes", "_taken", "data", "is_framed", "written_bytes")

    def __init__(self, data: bytes, ends: list[int], *, is_framed: bool) -> None:
        self.data = memoryview(data)
        self.is_framed = is_framed
        self.written_bytes = 0
        self._ends = ends
        self._taken = 0
        self._places: dict[int, list[int]] = {}
        """For the position in the header before each end: the places of these ends, the last one first."""
        self._scanned_bytes = 0
        self._last_lsn = 0

    def take_ends(self) -> list[int]:
        """Return all ends of transactions that were not taken before."""
        return self._ends[self._taken :] if self._taken else self._ends

    def take_written_ends(self) -> list[int]:
        """Return the ends of the transactions whose last record is written, if they were not taken before.

        The last record of a transaction has the transaction's end as its header LSN, unless the end is an `EndOfRecord`. So may
        the records next to it: others of the same transaction (an output plugin writes several at the commit), and those that begin
        the next one. So an end counts once all the records in a row that have its LSN are written.
        """
        if not self._places:
            for place in range(len(self._ends) - 1, -1, -1):
                self._places.setdefault(self._header_lsn(place), []).append(place)
        begin = self._taken
        while self.is_framed and (header := match_header(self.data, self._scanned_bytes)):
            lsn, end = header
            if self._last_lsn != lsn:
                self._take(self._last_lsn)
            if end > self.written_bytes:
                break
            self._scanned_bytes, self._last_lsn = end, lsn
        return self._ends[begin : self._taken]

    def _take(self, lsn: int) -> None:
        """Take the next ends in a row that have this position in the header. LSNs need not rise, so later ones may have it, too."""
        places = self._places.get(lsn, [])
        while places and places[-1] < self._taken:
            places.pop()
        if places:
            self._taken = places.pop() + 1
            while places and places[-1] == self._taken:
                self._taken = places.pop() + 1

    def _header_lsn(self, place: int) -> int:
        end = self._ends[place]
        return end.header_lsn if isinstance(end, EndOfRecord) else end


class Output:
    """Writes chunks to ``fd``, as much as it accepts. Raises OutputError if it is closed or fails.

    Each chunk comes with the ends of the transactions in it. ``write`` returns the ends of the chunks that are written completely.
    ``take_written_ends`` returns those in the chunk that is written partly.
    """

    def __init__(self, fd: int) -> None:
        self._chunks: deque[_Chunk] = deque()
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
        other = "see why the output takes nothing, then start again" + _SENT_AGAIN
        return OutputError(msg, hint=_HINTS.get(ex.errno or 0, other))

    def put(self, chunk: bytes, ends: list[int], *, is_framed: bool = False) -> None:
        """Queue a chunk. ``is_framed``: it begins with the header of a record, and its records have headers."""
        self._chunks.append(_Chunk(chunk, ends, is_framed=is_framed))
        self.pending_bytes += len(chunk)

    def write(self) -> list[int]:
        """Write as much as the descriptor accepts now."""
        ends: list[int] = []
        try:
            while self._chunks:
                chunk = self._chunks[0]
                rest = chunk.data[chunk.written_bytes :]
                if rest:
                    if self._socket is not None:
                        count = self._socket.send(rest, socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0))
                    else:
                        count = os.write(self.fd, rest)
                    self.pending_bytes -= count
                    chunk.written_bytes += count
                    if count < len(rest):
                        continue
                self._chunks.popleft()
                ends += chunk.take_ends()
        except BlockingIOError:
            pass  # the consumer is not reading; the stream's loop waits for it
        except OSError as ex:
            raise self._error(ex) from ex
        return ends

    def take_written_ends(self) -> list[int]:
        """Return the ends of the transactions that are written, in a chunk that is not. `write` does not return them again."""
        return self._chunks[0].take_written_ends() if self._chunks else []

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
