r"""Records on the pipe: ``w LSN LENGTH\n`` and then LENGTH bytes.

Used at both ends of the pipe and on the segments of the staging log, whose bytes are the pipe's bytes. Records may hold
newlines and NULs: LENGTH is the only thing that splits them. Everything here works on bytes; nothing reads or writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from cdcpipe.errors import ProtocolError

__all__ = ["MAX_HEADER_BYTES", "RecordReader", "encode_header", "scan_records"]

MAX_HEADER_BYTES = 32
"""``w FFFFFFFF/FFFFFFFF 2147483647\n`` has 31 bytes; PostgreSQL sends no message over 1 GiB."""

_MAX_RECORD_BYTES = 0x7FFFFFFF

_HEADER = re.compile(rb"w ([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8}) ([0-9]{1,10})\n")


def encode_header(lsn: int, length: int) -> bytes:
    """Return the header line of a record of ``length`` bytes whose WAL start is ``lsn``."""
    return b"w %X/%X %d\n" % (lsn >> 32, lsn & 0xFFFFFFFF, length)


def _check_beginning(data: bytes) -> None:
    """Raise ProtocolError if no record begins with ``data``, the first ``MAX_HEADER_BYTES`` or all that is there."""
    header = _HEADER.match(data)
    if header is None:
        is_possible = b"\n" not in data and len(data) < MAX_HEADER_BYTES and b"w ".startswith(data[:2])
    else:
        is_possible = int(header[3]) <= _MAX_RECORD_BYTES
    if not is_possible:
        # What stands there instead may be a row.
        size = len(data.partition(b"\n")[0])
        msg = f"not a record header (w LSN LENGTH): {size} bytes that are something else"
        raise ProtocolError(msg)


def scan_records(buffer: bytes, pos: int = 0) -> tuple[list[int], list[int], int]:
    """Find the whole records in ``buffer`` from ``pos`` on: ``(starts, ends, next_pos)``.

    ``starts[i]:ends[i]`` is the i-th record's bytes, without header; its header begins at ``ends[i - 1]`` (at ``pos`` for
    the first). ``next_pos`` is where the first incomplete record's header begins, ``len(buffer)`` if there is none.
    Raise ProtocolError where a header should be and is not; LSNs, which it does not return, are left to whoever reads them.
    """
    starts: list[int] = []
    ends: list[int] = []
    add_start, add_end, find, total = starts.append, ends.append, buffer.find, len(buffer)
    while (newline := find(b"\n", pos, pos + MAX_HEADER_BYTES)) >= 0:
        try:
            mark, _, length = buffer[pos:newline].split(b" ")
            end = newline + 1 + int(length)
        except ValueError:
            break
        if mark != b"w" or not length.isdigit() or end > total:
            break
        add_start(newline + 1)
        add_end(end)
        pos = end
    _check_beginning(buffer[pos : pos + MAX_HEADER_BYTES])
    return starts, ends, pos


class RecordReader:
    """Splits a stream of bytes, in pieces of any size, into records.

    ``feed`` gives bytes, iterating yields each whole ``(lsn, record)`` once. ``pos`` is the byte of the stream at which the header
    begins of the record that was yielded last or, when the iteration has ended or failed, of what comes next.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._start = 0
        """What precedes it in the buffer has been yielded."""
        self._dropped_bytes = 0
        self.pos = 0

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes of the stream."""
        if self._start:
            del self._buffer[: self._start]
            self._dropped_bytes += self._start
            self._start = 0
        self._buffer += data

    @property
    def has_partial(self) -> bool:
        """Whether bytes are held that do not make a whole record yet."""
        return self._start < len(self._buffer)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield the whole records held; raise ProtocolError for bytes that are no header."""
        buffer, size, match, dropped_bytes = self._buffer, len(self._buffer), _HEADER.match, self._dropped_bytes
        while header := match(buffer, self._start):
            high, low, length = header.groups()
            start = header.end()
            end = start + int(length)
            if end > size:
                break
            self.pos = dropped_bytes + self._start
            self._start = end
            yield int(high, 16) << 32 | int(low, 16), bytes(buffer[start:end])
        self.pos = dropped_bytes + self._start
        _check_beginning(bytes(buffer[self._start : self._start + MAX_HEADER_BYTES]))

    def end(self) -> None:
        """Raise ProtocolError if the stream, which has ended, was cut inside a record."""
        if not self.has_partial:
            return
        header = _HEADER.match(self._buffer, self._start)
        if header is None:
            raise ProtocolError("cut off in the middle of a header")
        there = len(self._buffer) - header.end()
        raise ProtocolError(f"cut off in the middle of a record: {there} of {int(header[3])} bytes are there")
