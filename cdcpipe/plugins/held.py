"""Records that wait for the end of their transaction, because they, or the one before them, name it."""

from __future__ import annotations

import struct
import tempfile
from typing import IO, TYPE_CHECKING, ClassVar, Final

from cdcpipe.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Held"]

_HELD_BYTES: Final = 8 << 20
_HELD_RECORD: Final = struct.Struct(">QI")  # LSN, length of the record that follows


class Held:
    """Records of the open transaction, in order; in memory up to a limit and, if they may, then in a file."""

    EMIT: ClassVar[str] = "append((wal_start, {record}))\nif len(held) > {limit}:\n    spill()"
    """Counting records is cheaper than counting their bytes; compiled rows are seldom long."""

    @staticmethod
    def row_limit(columns: int) -> int:
        """Return ``{limit}`` for rows of so many columns."""
        return max(16, _HELD_BYTES // (400 * max(1, columns)))

    def __init__(self, *, may_spill: bool) -> None:
        self._records: list[tuple[int, bytes]] = []
        self._may_spill = may_spill
        self._size = 0
        self._file: IO[bytes] | None = None

    @property
    def names(self) -> dict[str, object]:
        """What `EMIT` refers to."""
        return {"append": self._records.append, "held": self._records, "spill": self.spill}

    def add(self, lsn: int, record: bytes) -> None:
        """Hold one more."""
        self._records.append((lsn, record))
        self._size += len(record)
        if self._size > _HELD_BYTES:
            self.spill()

    def spill(self) -> None:
        """Move what is in memory to the file."""
        if not self._may_spill:
            return
        try:
            self._spill()
        except OSError as ex:
            msg = f"a transaction's records can't be held in {tempfile.gettempdir()}: {ex.strerror}"
            raise OutputError(msg, hint="make room there, or name a larger directory in TMPDIR") from ex
        self._forget()

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="cdcpipe-")  # noqa: SIM115 - open until the transaction ends
        for lsn, record in self._records:
            self._file.write(_HELD_RECORD.pack(lsn, len(record)))
            self._file.write(record)
        # Nothing may be left in Python's buffer, where a full disk would show only at the commit.
        self._file.flush()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        if self._file is not None:
            self._file.seek(0)
            while header := self._file.read(_HELD_RECORD.size):
                lsn, length = _HELD_RECORD.unpack(header)
                yield lsn, self._file.read(length)
        yield from self._records

    def clear(self) -> None:
        """Forget all."""
        self._forget()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _forget(self) -> None:
        # Not a new list: the compiled rows know this one.
        self._records.clear()
        self._size = 0
