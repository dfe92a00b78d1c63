r"""Records on the pipe: ``w LSN LENGTH\n`` and then LENGTH bytes.

Used at both ends of the pipe and on the segments of the staging log, whose bytes are the pipe's bytes. Records may hold
newlines and NULs: LENGTH is the only thing that splits them. Everything here works on bytes; nothing reads or writes.
"""

from __future__ import annotations

from collections.abc import Iterator

from cdcpipe.errors import ProtocolError
from cdcpipe.lsn import LSN

__all__ = ["MAX_HEADER_BYTES", "RecordReader", "encode_header", "scan_records"]

MAX_HEADER_BYTES = 32
"""``w FFFFFFFF/FFFFFFFF 2147483647\n`` has 31 bytes; PostgreSQL sends no message over 1 GiB."""

_MAX_RECORD_BYTES = 0x7FFFFFFF


def encode_header(lsn: int, length: int) -> bytes:
    """Return the header line of a record of ``length`` bytes whose WAL start is ``lsn``."""
    return b"w %X/%X %d\n" % (lsn >> 32, lsn & 0xFFFFFFFF, length)


def _parse_header(line: bytes) -> tuple[LSN, int]:
    """Read a header line without its newline; the strict form of what the scanners below take on trust."""
    try:
        mark, lsn_text, length_text = line.decode("ascii").split(" ")
        if mark != "w" or not (length_text.isascii() and length_text.isdigit()):
            raise ValueError
        lsn, length = LSN.parse(lsn_text), int(length_text)
        if length > _MAX_RECORD_BYTES:
            raise ValueError
    except ValueError:
        # What stands there instead may be a row.
        msg = f"not a record header (w LSN LENGTH): {len(line)} bytes that are something else"
        raise ProtocolError(msg) from None
    return lsn, length


def scan_records(buffer: bytes, pos: int = 0) -> tuple[list[int], list[int], int]:
    """Find the whole records in ``buffer`` from ``pos`` on: ``(starts, ends, next_pos)``.

    ``starts[i]:ends[i]`` is the i-th record's bytes, without header; its header begins at ``ends[i - 1]`` (at ``pos`` for
    the first). ``next_pos`` is where the first incomplete record's header begins, ``len(buffer)`` if there is none.
    Raise ProtocolError where a header should be and is not. This is the one loop that runs per record, so it is short.
    """
    starts: list[int] = []
    ends: list[int] = []
    add_start, add_end, find, total = starts.append, ends.append, buffer.find, len(buffer)
    while pos < total:
        newline = find(b"\n", pos, pos + MAX_HEADER_BYTES)
        if newline < 0:
            if total - pos >= MAX_HEADER_BYTES or not b"w ".startswith(buffer[pos : pos + 2]):
                _parse_header(buffer[pos : pos + MAX_HEADER_BYTES])
            break
        try:
            mark, _, length = buffer[pos:newline].split(b" ")
            end = newline + 1 + int(length)
        except ValueError:
            _parse_header(buffer[pos:newline])
            raise
        if mark != b"w" or not length.isdigit():
            _parse_header(buffer[pos:newline])
        if end > total:
            _parse_header(buffer[pos:newline])
            break
        add_start(newline + 1)
        add_end(end)
        pos = end
    return starts, ends, pos


class RecordReader:
    """Splits a stream of bytes, in pieces of any size, into records.

    ``feed`` gives bytes, iterating yields each whole ``(lsn, record)`` once; ``has_partial`` says whether bytes of an unfinished
    record are held, which at the end of a stream means that it was cut.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._pos = 0

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes of the stream."""
        if self._pos:
            del self._buffer[: self._pos]
            self._pos = 0
        self._buffer += data

    @property
    def has_partial(self) -> bool:
        """Whether bytes are held that do not make a whole record yet."""
        return self._pos < len(self._buffer)

    def __iter__(self) -> Iterator[tuple[LSN, bytes]]:
        """Yield the whole records held; raise ProtocolError for bytes that are no header."""
        while self._pos < len(self._buffer):
            newline = self._buffer.find(b"\n", self._pos, self._pos + MAX_HEADER_BYTES)
            if newline < 0:
                held = bytes(self._buffer[self._pos : self._pos + MAX_HEADER_BYTES])
                if len(held) == MAX_HEADER_BYTES or not b"w ".startswith(held[:2]):
                    _parse_header(held)
                return
            lsn, length = _parse_header(bytes(self._buffer[self._pos : newline]))
            end = newline + 1 + length
            if end > len(self._buffer):
                return
            record = bytes(self._buffer[newline + 1 : end])
            self._pos = end
            yield lsn, record
