"""Reads and writes a stream on the socket of an idle libpq connection, in libpq's place (docs/decisions/0076).

libpq returns one CopyData message for each call. `DirectCopy` has the bytes of many messages in one buffer, so that a caller can
take them all at once. It begins while libpq has nothing to read, sends the command that starts the copy, and reads everything that
the server sends from then on. libpq must not read or write again. It only closes the connection.

Only for a socket without TLS and GSS encryption. Nothing here waits.

Source: the manual, "Frontend/Backend Protocol", Message Formats: Byte1 kind, Int32 length with itself, content.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

from cdcpipe.errors import ProtocolError

__all__ = ["DAMAGE_HINT", "DirectCopy", "Fields", "LostError", "Message"]

CAPACITY_BYTES = 512 << 10
"""The size of the buffer. It grows for a larger message, and shrinks when that has been taken."""
_LEAST_ROOM_BYTES = 128 << 10

DAMAGE_HINT = "something between server and client damages the stream: check proxies"

_HEADER = struct.Struct(">cI")
_LENGTH_BYTES = 4
_MAX_BYTES = 1 << 30
"""PostgreSQL sends no message larger than 1 GiB."""
_MAX_SHORT_BYTES = 30_000
"""Only messages of the kinds in `_LONG_KINDS` may be longer. libpq has the same limit, to find out that it reads garbage."""
_LONG_KINDS = frozenset((b"d", b"E", b"N"))
_ANYTIME = frozenset((b"N", b"S", b"A"))
"""NoticeResponse, ParameterStatus, NotificationResponse: may come at any time."""
_KINDS = _ANYTIME | frozenset((b"d", b"c", b"E", b"W", b"C", b"Z"))


class LostError(Exception):
    """The connection is lost. `DirectCopy.failure` says how."""


class Message(NamedTuple):
    """A message that is neither CopyData nor one that may come at any time."""

    kind: bytes
    body: bytes


class Fields:
    """The fields of an ErrorResponse or NoticeResponse, with the methods of libpq's result that are used for it."""

    error_message = b"the server reported an error without a message"

    def __init__(self, body: bytes) -> None:
        self._values = {field[0]: field[1:] for field in body.split(b"\0") if field}

    def error_field(self, code: int) -> bytes | None:
        """Return a field by the code that libpq has for it, which is the protocol's."""
        return self._values.get(code)


class DirectCopy:
    """The messages on the socket ``fd``. ``on_notice`` is called with each notice, in its place among the messages.

    ``buffer[begin:end]`` are the bytes that were received and not taken; a message begins at ``begin``.
    """

    def __init__(self, fd: int, on_notice: Callable[[Fields], None]) -> None:
        self._socket = socket.socket(fileno=os.dup(fd))
        self._on_notice = on_notice
        self._unsent = bytearray()
        self.buffer = bytearray(CAPACITY_BYTES)
        self._view = memoryview(self.buffer)
        self.begin = self.end = 0
        self.failure = ""
        """How the connection was lost; empty while it is not."""
        self.is_ended = False
        """Whether this side has ended the copy."""

    # To the server

    def query(self, sql: str) -> None:
        """Queue a command."""
        self._queue(b"Q", sql.encode() + b"\0")

    def send(self, data: bytes) -> bool:
        """Queue a CopyData message. Return False if earlier messages have not left yet."""
        if not self.flush():
            return False
        self._queue(b"d", data)
        return True

    def end_copy(self) -> None:
        """Queue CopyDone."""
        self._queue(b"c", b"")
        self.is_ended = True

    def _queue(self, kind: bytes, body: bytes) -> None:
        self._unsent += _HEADER.pack(kind, len(body) + _LENGTH_BYTES) + body

    def flush(self) -> bool:
        """Send the queued messages. Return True once nothing is left.

        Does not report a lost connection: the server may have sent its reason before, and reading will tell.
        """
        try:
            while self._unsent:
                count = self._socket.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                del self._unsent[:count]
        except BlockingIOError:
            return False
        except OSError:
            self._unsent.clear()
        return True

    # From the server

    @property
    def buffered_bytes(self) -> int:
        """How many bytes were received and not taken."""
        return self.end - self.begin

    @property
    def has_message(self) -> bool:
        """Whether a whole message was received and not taken."""
        return bool(self._peek()[0])

    def fill(self) -> int:
        """Read what the socket has and the buffer takes. Return the number of bytes. Does not raise for a lost connection."""
        if self.failure:
            return 0
        self._make_room()
        try:
            count = self._socket.recv_into(self._view[self.end :], 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as ex:
            self.failure = f"could not receive data from server: {ex.strerror}"
            return 0
        if not count:
            self.failure = "server closed the connection unexpectedly"
        self.end += count
        return count

    def consume_input(self) -> None:
        """Read what the socket has. Raises LostError if the connection is lost and nothing more can be read."""
        if not self.fill() and self.failure:
            raise LostError

    def _make_room(self) -> None:
        """Move what is left to the front if there is little room, and make the buffer larger for a message that does not fit."""
        left = self.end - self.begin
        capacity = len(self.buffer)
        wanted = CAPACITY_BYTES
        while left > wanted - _LEAST_ROOM_BYTES:
            wanted *= 2
        if wanted != capacity:
            buffer = bytearray(wanted)
            buffer[:left] = self._view[self.begin : self.end]
            self.buffer, self._view = buffer, memoryview(buffer)
        elif left and capacity - self.end < _LEAST_ROOM_BYTES:
            self._view[:left] = self._view[self.begin : self.end]
        elif left:
            return
        self.begin, self.end = 0, left

    def receive(self, _nonblocking: int = 1) -> tuple[int, memoryview | bytes]:
        """Take one CopyData message, and return as libpq's ``PQgetCopyData``: its length and its content.

        Length 0: no complete message has arrived. -1: the next message is not a part of the copy: see `next_message`.
        """
        while True:
            kind, begin, end = self._peek()
            if kind == b"d":
                self.begin = end
                if begin == end:
                    continue  # libpq drops an empty one, too
                return end - begin, bytes(self._view[begin:end])
            if not kind:
                return 0, b""
            if kind not in _ANYTIME:
                return -1, b""
            self._take_anytime(kind, begin, end)

    def next_message(self) -> Message | None:
        """Take a message that is not a part of the copy; None if no complete message has arrived."""
        while True:
            kind, begin, end = self._peek()
            if not kind:
                return None
            if kind not in _ANYTIME:
                self.begin = end
                return Message(kind, bytes(self._view[begin:end]))
            self._take_anytime(kind, begin, end)

    def _peek(self) -> tuple[bytes, int, int]:
        """Return the kind of the next message, and where its content is; no kind if it has not arrived completely."""
        begin = self.begin
        if self.end - begin < _HEADER.size:
            return b"", 0, 0
        kind, length = _HEADER.unpack_from(self.buffer, begin)
        if not _LENGTH_BYTES <= length <= (_MAX_BYTES if kind in _LONG_KINDS else _MAX_SHORT_BYTES) or kind not in _KINDS:
            msg = f"the server sent a message of kind {kind!r} and length {length}, which has no place in a stream"
            raise ProtocolError(msg, hint=DAMAGE_HINT)
        end = begin + 1 + length
        return (b"", 0, 0) if end > self.end else (kind, begin + _HEADER.size, end)

    def _take_anytime(self, kind: bytes, begin: int, end: int) -> None:
        self.begin = end
        if kind == b"N":
            self._on_notice(Fields(bytes(self._view[begin:end])))

    def close(self) -> None:
        """Close this object's descriptor of the socket. If a message was sent in part, end the connection."""
        if self._unsent:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError as ex:
                self.failure = self.failure or str(ex)
        self._socket.close()
