"""Collects the texts of values that a column's type cannot hold, for the column ``_cdc_exact``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


__all__ = ["ExactTexts", "list_offsets"]


@dataclass(slots=True)
class ExactTexts:
    """The texts of values that their type cannot hold: added column by column, returned row by row."""

    row_count: int
    count: int = 0
    _rows: list[Array] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _texts: list[pa.StringArray] = field(default_factory=list)

    def add(self, name: str, rows: Array, texts: pa.StringArray) -> None:
        """Add the texts of a column, with their rows."""
        if len(rows):
            self.count += len(rows)
            self._rows.append(rows)
            self._names.append(name)
            self._texts.append(texts)

    def to_arrow(self, map_type: pa.MapType) -> pa.MapArray:
        """Return a map from column to text for each row."""
        if not self.count:
            offsets, empty = list_offsets(np.zeros(0, np.int64), self.row_count), pa.array([], pa.string())
            return pa.MapArray.from_arrays(offsets, empty, empty, type=map_type)
        rows = np.concatenate(self._rows)
        order = np.argsort(rows, kind="stable")
        of_column = np.repeat(np.arange(len(self._rows)), [len(some) for some in self._rows])
        keys = pa.array(self._names).take(pa.array(of_column[order]))
        items = pa.concat_arrays(self._texts).take(pa.array(order))
        return pa.MapArray.from_arrays(list_offsets(rows, self.row_count), keys, items, type=map_type)


def list_offsets(rows: Array, row_count: int) -> pa.Int32Array:
    """Return the offsets of a list array that has an item for each of ``rows``, in order."""
    offsets = np.zeros(row_count + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=row_count), out=offsets[1:])
    return pa.array(offsets)
