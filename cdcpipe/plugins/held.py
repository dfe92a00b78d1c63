"""Holds records until the end of their transaction is known, because one of them contains it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from cdcpipe.pipe.framing import RecordReader, encode_header
from cdcpipe.pipe.spill import Spill, Spills

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Held"]

_HELD_BYTES: Final = 8 << 20
_READ_BYTES: Final = 256 << 10


class Held:
    """The records of the open transaction, in order: in memory up to a limit, beyond it in a spill, if that is allowed."""

    EMIT: ClassVar[str] = "append((wal_start, {record}))\nif len(held) > {limit}:\n    spill()"
    """Compiled rows count records instead of bytes, because this is cheaper, and compiled rows are seldom long."""

    @staticmethod
    def row_limit(columns: int) -> int:
        """Return ``{limit}`` for rows with this number of columns."""
        return max(16, _HELD_BYTES // (400 * max(1, columns)))

    def __init__(self, *, may_spill: bool) -> None:
        self._records: list[tuple[int, bytes]] = []
        self._may_spill = may_spill
        self._size = 0
        self._spills = Spills()
        self._spill: Spill | None = None

    @property
    def names(self) -> dict[str, object]:
        """The names that `EMIT` uses."""
        return {"append": self._records.append, "held": self._records, "spill": self.spill}

    def add(self, lsn: int, record: bytes) -> None:
        """Add a record."""
        self._records.append((lsn, record))
        self._size += len(record)
        if self._size > _HELD_BYTES:
            self.spill()

    def spill(self) -> None:
        """Move the records from memory to the spill. Raises OutputError if the disk fails."""
        if not self._may_spill:
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

    def clear(self) -> None:
        """Forget all records."""
        self._forget()
        if self._spill is not None:
            self._spill.close()
            self._spill = None

    def _forget(self) -> None:
        # Clear the list instead of making a new one, because compiled rows use this list.
        self._records.clear()
        self._size = 0
