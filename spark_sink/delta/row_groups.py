"""Puts rows that come in small batches together, so that a Parquet file gets row groups of a useful size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from spark_sink.delta.rows import joined

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["RowGroups"]

_MOST_ROWS: Final = 1 << 17
_MOST_BYTES: Final = 64 << 20
"""So many rows, or bytes of memory, are collected before they are written as one row group."""


class RowGroups:
    """Collects rows, and calls ``write`` with the columns and the number of rows of each row group. Call `flush` at the end."""

    def __init__(self, write: Callable[[dict[str, pa.Array], int], None]) -> None:
        self._write = write
        self._collected: list[Mapping[str, pa.Array]] = []
        self._rows = self._bytes = 0

    def add(self, columns: Mapping[str, pa.Array], count: int) -> None:
        """Add rows. All calls give the same columns."""
        self._collected.append(columns)
        self._rows += count
        self._bytes += sum(values.nbytes for values in columns.values())
        if self._rows >= _MOST_ROWS or self._bytes >= _MOST_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the rows that were collected."""
        if self._rows:
            first = self._collected[0]
            columns = {name: joined([each[name] for each in self._collected], values.type) for name, values in first.items()}
            self._write(columns, self._rows)
        self._collected, self._rows, self._bytes = [], 0, 0
