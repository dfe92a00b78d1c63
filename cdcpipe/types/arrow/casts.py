"""Casts texts, as the server prints values, to a column of an Arrow type, all at once, without Python per row.

A cast is exact. A value that the type cannot hold (infinity, BC, a numeric NaN, year 10000) becomes null in the column, with its
text in `Converted.exact`. Only columns with such a value cost more time. The Arrow type alone decides how a text is read: in the
formats that a server writes with DateStyle ISO, in any TimeZone.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdcpipe.types.arrow.array_text import split_arrays
from cdcpipe.types.table import ColumnType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]
    Mask = NDArray[np.bool_]

__all__ = [
    "ARROW_TYPES",
    "DAY_US",
    "NO_ROWS",
    "NO_TEXTS",
    "YEAR_1_DAY",
    "YEAR_10000_DAY",
    "Converted",
    "convert_text",
    "list_array",
    "valid_rows",
]

ARROW_TYPES: Final[Mapping[ColumnType, pa.DataType]] = {
    ColumnType.BINARY: pa.binary(),
    ColumnType.BOOLEAN: pa.bool_(),
    ColumnType.DATE: pa.date32(),
    ColumnType.FLOAT32: pa.float32(),
    ColumnType.FLOAT64: pa.float64(),
    ColumnType.INT16: pa.int16(),
    ColumnType.INT32: pa.int32(),
    ColumnType.INT64: pa.int64(),
    ColumnType.STRING: pa.string(),
    ColumnType.TIMESTAMP: pa.timestamp("us", "UTC"),
    ColumnType.TIMESTAMP_NTZ: pa.timestamp("us"),
}
"""The Arrow type for each kind of column. A decimal has the precision and scale of its column. `_CASTS` has the casts from text."""


@dataclass(slots=True)
class Converted:
    """A column as an Arrow array. For values that the type cannot hold, ``array`` is null, and ``exact`` has the texts."""

    array: pa.Array
    exact_rows: Int64s
    exact: pa.StringArray


NO_ROWS: Final = np.zeros(0, np.int64)
NO_TEXTS: Final = pa.nulls(0, pa.string())  # pa.array would make pyarrow import pandas

YEAR_1_DAY: Final = -719_162
YEAR_10000_DAY: Final = 2_932_897
DAY_US: Final = 86_400_000_000

_INTEGER: Final = r"^-?[0-9]+$"
_FLOAT: Final = r"^(NaN|-?Infinity|-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?)$"
_DECIMAL: Final = r"^-?[0-9]+(\.[0-9]+)?$"
_DATE: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"
_TIMESTAMP: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?([+-][0-9]{2}(:[0-9]{2})?)?$"
_HEX: Final = r"^\\x([0-9a-f]{2})*$"

_MAX_DECIMAL_DIGITS: Final = 38


def convert_text(text: pa.StringArray, arrow_type: pa.DataType) -> Converted:
    """Cast the server's texts to ``arrow_type``."""
    if arrow_type == pa.string():
        return Converted(text, NO_ROWS, NO_TEXTS)
    array = _CASTS[arrow_type.id](text, arrow_type)
    lost = array.null_count - text.null_count
    if not lost:
        return Converted(array, NO_ROWS, NO_TEXTS)
    rows = np.flatnonzero(valid_rows(text) & ~valid_rows(array))
    return Converted(array, rows, text.take(pa.array(rows)))


def _cast(text: pa.StringArray, arrow_type: pa.DataType, pattern: str) -> pa.Array:
    """Cast all texts at once. If Arrow refuses, cast those that match ``pattern``, and find the refused ones one by one."""
    try:
        return text.cast(arrow_type)
    except pa.ArrowInvalid:
        return _cast_some(_only(text, pc.match_substring_regex(text, pattern)), arrow_type)


def _cast_some(text: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
    """Cast the texts that can be cast, by halving the ones that cannot: few calls if few texts are wrong."""
    try:
        return text.cast(arrow_type)
    except pa.ArrowInvalid:
        if len(text) == 1:
            return pa.nulls(1, arrow_type)
        half = len(text) // 2
        return pa.concat_arrays([_cast_some(text[:half], arrow_type), _cast_some(text[half:], arrow_type)])


def _only(array: pa.Array, wanted: pa.BooleanArray) -> pa.Array:
    return pc.if_else(wanted, array, pa.scalar(None, array.type))


def _only_between(array: pa.Array, numbers: pa.Array, low: int, high: int) -> pa.Array:
    """Replace values outside of [low, high) by null: Spark has no year 0, which Arrow has, and no year 10000."""
    extremes = pc.min_max(numbers).as_py()
    if extremes["min"] is None or (low <= extremes["min"] and extremes["max"] < high):
        return array
    return _only(array, pc.and_(pc.greater_equal(numbers, low), pc.less(numbers, high)))


def _to_bool(text: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
    del arrow_type
    is_true = pc.equal(text, "t")
    is_known = pc.or_(is_true, pc.equal(text, "f"))
    return is_true if is_known.true_count == len(text) - text.null_count else _only(is_true, is_known)


def _to_integer(text: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
    return _cast(text, arrow_type, _INTEGER)


def _to_float(text: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
    return _cast(text, arrow_type, _FLOAT)


def _to_decimal(text: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
    longest = pc.max(pc.binary_length(text)).as_py()
    most_whole_digits = _MAX_DECIMAL_DIGITS - arrow_type.scale
    if longest is not None and longest > most_whole_digits:
        # Arrow multiplies a number by a power of ten for the type's scale. If this overflows, the result may be another number.
        whole = pc.replace_substring_regex(text, r"^-?0*|\..*$", "")
        text = _only(text, pc.less_equal(pc.binary_length(whole), most_whole_digits))
    if longest is not None and longest > _MAX_DECIMAL_DIGITS:
        # Arrow overflows silently beyond 38 digits, which include trailing zeros; 1e-45 would become 0. So remove trailing zeros.
        text = pc.replace_substring_regex(text, r"(\.[0-9]*[1-9])0+$|\.0+$", r"\1")
        digits = pc.replace_substring_regex(text, r"^-?0*|\.", "")
        text = _only(text, pc.less_equal(pc.binary_length(digits), _MAX_DECIMAL_DIGITS))
    return _cast(text, arrow_type, _DECIMAL)


def _to_date(text: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
    array = _cast(text, arrow_type, _DATE)
    return _only_between(array, array.cast(pa.int32()), YEAR_1_DAY, YEAR_10000_DAY)


def _to_timestamp(text: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
    array = _cast(text, arrow_type, _TIMESTAMP)
    return _only_between(array, array.cast(pa.int64()), YEAR_1_DAY * DAY_US, YEAR_10000_DAY * DAY_US)


def _to_binary(text: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
    """Read texts of bytea_output=hex. Other texts, such as those of bytea_output=escape, are not cast."""
    del arrow_type
    try:
        return _unhex(text)
    except ValueError:
        return _unhex(_only(text, pc.match_substring_regex(text, _HEX)))


def _unhex(text: pa.StringArray) -> pa.BinaryArray:
    """Decode all texts at once. Raises ValueError if one is not a backslash, an x and pairs of hexadecimal digits."""
    validity, offset_buffer, data_buffer = text.buffers()
    offset = np.frombuffer(offset_buffer, np.int32)[: len(text) + 1]
    present = valid_rows(text)
    data = np.frombuffer(data_buffer or b"", np.uint8)[: offset[-1]]
    space = np.diff(offset)  # a null may take space, too
    length = np.where(present, space, 2)
    begin = offset[:-1][present]
    if (length < 2).any() or (length & 1).any() or (data[begin] != ord("\\")).any() or (data[begin + 1] != ord("x")).any():
        raise ValueError
    is_digit = np.repeat(present, space)
    is_digit[begin] = False
    is_digit[begin + 1] = False
    content = binascii.unhexlify(data[is_digit].tobytes())
    new_offset = np.zeros(len(text) + 1, np.int32)
    np.cumsum(length // 2 - 1, out=new_offset[1:])
    return pa.BinaryArray.from_buffers(pa.binary(), len(text), [validity, pa.py_buffer(new_offset), pa.py_buffer(content)])


def _to_list(text: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
    """Read arrays of one dimension that begin at index 1, if the elements' type holds all of them."""
    split = split_arrays(text)
    converted = convert_text(split.elements, arrow_type.value_type)
    elements = converted.array
    if len(converted.exact_rows):
        row = np.repeat(np.arange(len(text)), split.count)
        split.fine[row[converted.exact_rows]] = False
        elements = elements.filter(pa.array(split.fine[row]))
        split.count[~split.fine] = 0
    return list_array(elements, split.count, split.fine, arrow_type)


def list_array(elements: pa.Array, count: Int64s, valid: Mask, arrow_type: pa.DataType) -> pa.ListArray:
    """Return lists with ``count`` elements each; null where ``valid`` is False."""
    offset = np.zeros(len(count) + 1, np.int32)
    np.cumsum(count, out=offset[1:])
    return pa.ListArray.from_arrays(pa.array(offset), elements, type=arrow_type, mask=pa.array(~valid))


def valid_rows(array: pa.Array) -> Mask:
    """Return for each row whether it has a value."""
    valid: Mask = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


_CASTS: Final[dict[int, Callable[[pa.StringArray, pa.DataType], pa.Array]]] = {
    pa.bool_().id: _to_bool,
    pa.int16().id: _to_integer,
    pa.int32().id: _to_integer,
    pa.int64().id: _to_integer,
    pa.float32().id: _to_float,
    pa.float64().id: _to_float,
    pa.decimal128(1).id: _to_decimal,
    pa.date32().id: _to_date,
    pa.timestamp("us").id: _to_timestamp,
    pa.binary().id: _to_binary,
    pa.list_(pa.null()).id: _to_list,
}
