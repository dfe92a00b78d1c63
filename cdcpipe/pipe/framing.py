r"""Records on the pipe: ``w LSN LENGTH\n``, then LENGTH bytes.

Both ends of the pipe use this module. So do readers of segments, whose bytes are the pipe's bytes. Records may contain newlines and
NULs, so only LENGTH tells where a record ends. The functions work on bytes, and do no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from cdcpipe.errors import ProtocolError

__all__ = ["MAX_HEADER_BYTES", "RecordReader", "encode_header", "match_header", "scan_records"]

MAX_HEADER_BYTES = 32
"""``w FFFFFFFF/FFFFFFFF 2147483647\n`` has 31 bytes. PostgreSQL sends no message larger than 1 GiB."""

_MAX_RECORD_BYTES = 0x7FFFFFFF

_HEADER = re.compile(rb"w ([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8}) ([0-9]{1,10})\n")


def encode_header(lsn: int, length: int) -> bytes:
    """Return the header line of a record of ``length`` bytes whose WAL start is ``lsn``."""
    return b"w %X/%X %d\n" % (lsn >> 32, lsn & 0xFFFFFFFF, length)


def match_header(data: bytes | memoryview, pos: int) -> tuple[int, int] | None:
    r"""Return the LSN of the record whose header begins at ``pos``, and where the record ends; None if no header is there.

    >>> match_header(b"w 0/10 3\nabc", 0)
    (16, 12)
    """
    header = _HEADER.match(data, pos)
    if header is None:
        return None
    return int(header[1], 16) << 32 | int(header[2], 16), header.end() + int(header[3])


def _check_beginning(data: bytes) -> None:
    """Raise ProtocolError if no record can begin with ``data``: the first ``MAX_HEADER_BYTES``, or fewer if there are no more."""
    header = _HEADER.match(data)
    if header is None:
        is_possible = b"\n" not in data and len(data) < MAX_HEADER_BYTES and b"w ".startswith(data[:2])
    else:
        is_possible = int(header[3]) <= _MAX_RECORD_BYTES
    if not is_possible:
        # The message must not show the bytes: they may belong to a row.
        size = len(data.partition(b"\n")[0])
        msg = f"not a record header (w LSN LENGTH): {size} other bytes"
        raise ProtocolError(msg)


def scan_records(buffer: bytes, pos: int = 0) -> tuple[list[int], list[int], int]:
    """Find the whole records in ``buffer`` from ``pos`` on: ``(starts, ends, next_pos)``.

    ``starts[i]:ends[i]`` are the bytes of the i-th record, without its header. The header begins at ``ends[i - 1]`` (at ``pos`` for
    the first record). ``next_pos`` is where the header of the first incomplete record begins; ``len(buffer)`` if there is none.
    Raises ProtocolError where a header is expected and something else is found. Does not check the text of LSNs.
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
    """Splits a stream of bytes, which comes in pieces of any size, into records.

    ``feed`` takes bytes. Iterating yields each whole ``(lsn, record)`` once. ``pos`` is the byte of the stream at which the header
    of the last yielded record begins; after the iteration has ended or failed, it is the byte of the next header.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._start = 0
        """The bytes of the buffer before this one have been yielded."""
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
        """Whether there are bytes of an incomplete record."""
        return self._start < len(self._buffer)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield the whole records. Raises ProtocolError where a header is expected and something else is found."""
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
        """Raise ProtocolError if the stream ended inside a record."""
        if not self.has_partial:
            return
        header = _HEADER.match(self._buffer, self._start)
        if header is None:
            raise ProtocolError("cut off in the middle of a header")
        there = len(self._buffer) - header.end()
        raise ProtocolError(f"cut off in the middle of a record, after {there} of {int(header[3])} bytes")
