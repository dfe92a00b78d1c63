"""Holds records until the end of their transaction is known.

`Held` holds all of them, for a plugin of which one record contains the end. `one_behind` holds only the latest one, for a plugin
that writes no record for the commit: the header of the transaction's last record has the end, so that feedback on it is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdcpipe.pipe.framing import RecordReader, encode_header
from cdcpipe.pipe.spill import Spill, Spills

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Held", "one_behind"]

_HELD_BYTES: Final = 8 << 20
_VALUE_BYTES: Final = 400
"""A record with no more bytes than this for each column is short."""
_READ_BYTES: Final = 256 << 10


class Held:
    """The records of the open transaction, in order: in memory up to a limit, beyond it in a spill.

    With a ``separator`` everything stays in memory, and is taken as one text (`joined`). What is beyond the limit is joined at
    once, because each short record takes several times its size.
    """

    @staticmethod
    def emit(columns: int) -> str:
        """Return the statement with which compiled rows of short values add a record.

        It counts records instead of bytes, because this is cheaper. The compiler knows that the values are short.
        """
        return f"append((wal_start, {{record}}))\nif len(held) > {_row_limit(columns)}:\n    spill()"

    @staticmethod
    def emit_long(columns: int) -> str:
        """Return the statement for rows whose values may be of any length: it also counts the bytes of long records."""
        return (
            f"append((wal_start, record := {{record}}))\nif len(held) > {_row_limit(columns)}:\n    spill()\n"
            f"elif len(record) > {_VALUE_BYTES * columns}:\n    grow(len(record))"
        )

    def __init__(self, separator: bytes | None = None) -> None:
        self._records: list[tuple[int, bytes]] = []
        self._separator = separator
        self._joined: list[bytes] = []
        self._size = 0
        self._spills = Spills()
        self._spill: Spill | None = None

    @property
    def names(self) -> dict[str, object]:
        """The names that the statements use."""
        return {"append": self._records.append, "held": self._records, "spill": self.spill, "grow": self._grow}

    def add(self, lsn: int, record: bytes) -> None:
        """Add a record."""
        self._records.append((lsn, record))
        self._grow(len(record))

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > _HELD_BYTES:
            self.spill()

    def spill(self) -> None:
        """Move the records from memory to the spill, or join them. Raises OutputError if the disk fails."""
        if self._separator is not None:
            self._joined.append(self._separator.join([record for _, record in self._records]))
            self._forget()
            return
        if self._spill is None:
            self._spill = self._spills.open()
        self._spill.append(b"".join(piece for lsn, record in self._records for piece in (encode_header(lsn, len(record)), record)))
        self._forget()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        if self._spill is not None:
            reader = RecordReader()
            for pos in range(0, self._spill.size, _READ_BYTES):
                reader.feed(self._spill.read(pos, min(_READ_BYTES, self._spill.size - pos)))
                yield from reader
        yield from self._records

    def joined(self, head: bytes, before: bytes, tail: bytes) -> bytes:
        """Return ``head``, the records, and ``tail``, in one copy. ``before`` stands before the first record, if there is one."""
        assert self._separator is not None
        if self._records:
            self.spill()
        pieces = [head]
        for text in self._joined:
            pieces += (before if len(pieces) == 1 else self._separator, text)
        pieces.append(tail)
        return b"".join(pieces)

    def clear(self) -> None:
        """Forget all records."""
        self._forget()
        self._joined.clear()
        if self._spill is not None:
            self._spill.close()
            self._spill = None

    def _forget(self) -> None:
        # Clear the list instead of making a new one, because compiled rows use this list.
        self._records.clear()
        self._size = 0


def _row_limit(columns: int) -> int:
    """Return how many short records, of rows with this number of columns, are held in memory."""
    return max(16, _HELD_BYTES // (_VALUE_BYTES * max(1, columns)))


def one_behind(
    write: Callable[[int, bytes], None],
) -> tuple[Callable[[int, bytes], None], Callable[[int | None], None]]:
    """Return two functions: one takes a record and writes the previous one; one writes the last record, at a given position."""
    held_lsn = 0
    held: bytes | None = None

    # This runs for each row, and a closure is the fastest way to keep a record.
    def put(lsn: int, record: bytes) -> None:
        nonlocal held_lsn, held
        if held is not None:
            write(held_lsn, held)
        held_lsn, held = lsn, record

    def end(lsn: int | None) -> None:
        nonlocal held
        if held is not None:
            write(held_lsn if lsn is None else lsn, held)
            held = None

    return put, end
