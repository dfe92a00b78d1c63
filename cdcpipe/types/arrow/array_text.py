"""Cuts arrays as text, ``{1,NULL,"a b"}``, into their elements: all rows of a column at once, without Python per row or element.

Only arrays of one dimension that begin at index 1 are cut, because only these are lists. All other arrays, and malformed texts, are
left to the caller. The delimiter is a comma, as in every built-in type but box.

Source: array_out in PostgreSQL's arrayfuncs.c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from cdcpipe.types.arrow.buffers import gather

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]
    UInt8s = NDArray[np.uint8]
    Mask = NDArray[np.bool_]

__all__ = ["Split", "split_arrays"]

_OPEN, _CLOSE, _COMMA, _QUOTE, _BACKSLASH = b'{},"\\'


@dataclass(slots=True)
class Split:
    """The texts of the elements, row after row. ``fine``: which rows were cut. ``count``: how many elements each row has."""

    elements: pa.StringArray
    fine: Mask
    count: Int64s


def split_arrays(text: pa.StringArray) -> Split:
    """Cut arrays into elements. A row that is null or no list is not ``fine`` and has no elements."""
    fine = _in_braces(text)
    rows = np.flatnonzero(fine)
    count = np.zeros(len(text), np.int64)
    # All rows are treated as one string. A row with an odd number of quotes would swap inside and outside for all later rows.
    while len(rows):
        chosen = text if len(rows) == len(text) else text.take(pa.array(rows))
        found = _Characters(chosen)
        odd = found.inside[found.end - 1]
        if not odd.any():
            elements, count[rows], fine[rows] = _cut(found)
            return Split(elements, fine, count)
        is_odd = np.add.reduceat(found.quote, found.begin, dtype=np.int64) % 2 == 1
        fine[rows[is_odd]] = False
        rows = rows[~is_odd]
    return Split(pa.array([], pa.string()), fine, count)


def _layout(text: pa.StringArray) -> tuple[UInt8s, Int64s]:
    """Return the array's bytes, the begin of each text, and the end of the last one."""
    _, offset_buffer, data_buffer = text.buffers()
    offset = np.frombuffer(offset_buffer, np.int32)[text.offset : text.offset + len(text) + 1].astype(np.int64)
    return np.frombuffer(data_buffer or b"", np.uint8), offset


def _in_braces(text: pa.StringArray) -> Mask:
    data, offset = _layout(text)
    fine: Mask = text.is_valid().to_numpy(zero_copy_only=False) & (np.diff(offset) >= 2)
    begin, end = offset[:-1][fine], offset[1:][fine]
    fine[fine] = (data[begin] == _OPEN) & (data[end - 1] == _CLOSE)
    return fine


class _Characters:
    """Classifies the characters of texts, each of which is in braces. There must be no nulls."""

    def __init__(self, text: pa.StringArray) -> None:
        data, offset = _layout(text)
        data, offset = data[offset[0] : offset[-1]], offset - offset[0]
        self.data, self.begin, self.end = data, offset[:-1], offset[1:]
        self.escape = _escapes(data)
        self.quote = data == _QUOTE
        self.quote[self.escape + 1] = False
        self.inside: Mask = np.logical_xor.accumulate(self.quote) if self.quote.any() else self.quote

    def outside(self, character: int) -> Int64s:
        """Return the places of a character outside of quotes."""
        return np.flatnonzero((self.data == character) & ~self.inside)

    def row(self, pos: Int64s) -> Int64s:
        """Return the rows of some places."""
        return np.searchsorted(self.begin, pos, side="right") - 1


def _escapes(data: UInt8s) -> Int64s:
    """Return the places of backslashes that escape the next character: in a run of backslashes every second one."""
    backslash = np.flatnonzero(data == _BACKSLASH)
    number = np.arange(len(backslash))
    first = np.ones(len(backslash), np.bool_)
    first[1:] = np.diff(backslash) != 1
    run = np.maximum.accumulate(np.where(first, number, 0))
    escape: Int64s = backslash[(number - run) % 2 == 0]
    return escape


def _cut(found: _Characters) -> tuple[pa.StringArray, Int64s, Mask]:
    """Return the elements of the rows that are lists, the number of elements of each row, and which rows are lists."""
    row_count = len(found.begin)
    braces = found.row(np.concatenate([found.outside(_OPEN), found.outside(_CLOSE)]))
    fine = np.bincount(braces, minlength=row_count) == 2
    fine[found.row(found.escape[~found.inside[found.escape]])] = False
    comma = found.outside(_COMMA)
    comma_row = found.row(comma)
    start, end, is_null = _bounds(found, comma, fine, comma_row)
    is_quoted = found.data[np.minimum(start, len(found.data) - 1)] == _QUOTE
    bad = (end <= start) | _has_odd_quotes(found, start, end, is_quoted)
    if bad.any():
        fine[found.row(start[bad])] = False
        start, end, is_null = _bounds(found, comma, fine, comma_row)
        is_quoted = found.data[start] == _QUOTE
    count = np.bincount(found.row(start), minlength=row_count)
    start, end = start + is_quoted, end - is_quoted
    data = found.data
    if len(found.escape):
        data = np.delete(data, found.escape)
        start, end = (pos - np.searchsorted(found.escape, pos) for pos in (start, end))
    return gather(np.ascontiguousarray(data), start, end - start, ~is_null).view(pa.string()), count, fine


def _bounds(found: _Characters, comma: Int64s, fine: Mask, comma_row: Int64s) -> tuple[Int64s, Int64s, Mask]:
    """Return begin and end (with quotes) of the elements of the fine rows, and which elements are NULL."""
    comma = comma[fine[comma_row]]
    filled = fine & (found.end - found.begin > 2)
    start = np.sort(np.concatenate([found.begin[filled], comma]), kind="stable") + 1
    end = np.sort(np.concatenate([found.end[filled] - 1, comma]), kind="stable")
    is_null = end - start == 4
    maybe = start[is_null]
    is_null[is_null] = np.logical_and.reduce([found.data[maybe + place] == letter for place, letter in enumerate(b"NULL")])
    return start, end, is_null


def _has_odd_quotes(found: _Characters, start: Int64s, end: Int64s, is_quoted: Mask) -> Mask:
    """Tell which elements have quotes at other places than around them."""
    quote = np.flatnonzero(found.quote)
    if not len(quote):
        return np.zeros(len(start), np.bool_)
    inner = np.searchsorted(quote, end) - np.searchsorted(quote, start)
    odd: Mask = inner != np.where(is_quoted & found.quote[end - 1], 2, 0)
    return odd
