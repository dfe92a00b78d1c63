"""Values, in text or in binary form -> a column of an Arrow type, all at once.

`to_arrow` chooses: texts go through casts.py. For bytes PostgreSQL's type says how they are read, which must be a built-in one. The
types of `_READERS` are read all at once, without Python per row; values of other types become text one by one.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import pyarrow as pa

from cdcpipe.types.arrow.buffers import gather, put, view
from cdcpipe.types.arrow.casts import (
    ARROW_TYPES,
    DAY_US,
    NO_ROWS,
    NO_TEXTS,
    YEAR_1_DAY,
    YEAR_10000_DAY,
    Converted,
    convert_text,
    list_array,
)
from cdcpipe.types.arrow.values import BINARY, NULL, Values
from cdcpipe.types.binary import numbers, strings, times
from cdcpipe.types.table import ARRAYS, TYPES, ColumnType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cdcpipe.types.binary.reading import ToText

    Mask = NDArray[np.bool_]

__all__ = ["to_arrow"]


def to_arrow(values: Values, arrow_type: pa.DataType) -> Converted:
    """Return the column as ``arrow_type``; the errors are those of `Values.text`."""
    rows = values.binary_rows
    read = _BY_TYPE.get((values.type_id, arrow_type), _BY_TYPE.get((values.type_id, arrow_type.id))) if len(rows) else None
    if read is None:
        return convert_text(values.text_with(rows), arrow_type)
    array, fine = read(values.rows(rows), arrow_type)
    if fine.all() and len(rows) == len(values.kind):
        return Converted(array, NO_ROWS, NO_TEXTS)
    converted = convert_text(values.text_with(rows[~fine]), arrow_type)
    converted.array = put(converted.array, rows[fine], array)
    return converted


# Bytes to typed arrays. Each function returns what it has read, and which rows that were: the others, be they infinite, out of
# range or malformed, become text, which says more about them.

_Reader: TypeAlias = Callable[[Values, pa.DataType], tuple[pa.Array, "Mask"]]

_2000_DAY: Final = 10_957


def _read_bool(values: Values, arrow_type: pa.DataType) -> tuple[pa.Array, Mask]:
    number, fine = values.numbers("u1")
    fine &= number <= 1
    return pa.array(number[fine].astype(np.bool_), arrow_type), fine


def _read_number(layout: str) -> _Reader:
    def read(values: Values, arrow_type: pa.DataType) -> tuple[pa.Array, Mask]:
        number, fine = values.numbers(layout)
        number = number[fine].astype(arrow_type.to_pandas_dtype())
        if number.dtype.kind == "f":
            number[np.isnan(number)] = np.nan  # as text has it, without a sign
        return pa.array(number, arrow_type), fine

    return read


def _read_date(values: Values, arrow_type: pa.DataType) -> tuple[pa.Array, Mask]:
    day, fine = values.numbers(">i4")
    day = day.astype(np.int64) + _2000_DAY
    fine &= (day >= YEAR_1_DAY) & (day < YEAR_10000_DAY)
    return pa.array(day[fine].astype(np.int32)).cast(arrow_type), fine


def _read_timestamp(values: Values, arrow_type: pa.DataType) -> tuple[pa.Array, Mask]:
    time_us, fine = values.numbers(">i8")
    epoch_us = _2000_DAY * DAY_US
    fine &= (time_us >= YEAR_1_DAY * DAY_US - epoch_us) & (time_us < YEAR_10000_DAY * DAY_US - epoch_us)
    return pa.array(time_us[fine].astype(np.int64) + epoch_us).cast(arrow_type), fine


def _read_text(values: Values, arrow_type: pa.DataType) -> tuple[pa.Array, Mask]:
    array = gather(values.buffer, values.start, values.length)
    return array if arrow_type == pa.binary() else values.utf8(array, values.start), np.ones(len(array), np.bool_)


def _read_versioned_text(values: Values, arrow_type: pa.DataType) -> tuple[pa.Array, Mask]:
    """jsonb, jsonpath."""
    del arrow_type
    fine = values.length > 0
    fine &= view(values.buffer, "u1")[np.where(fine, values.start, 0)] == 1
    return values.utf8(gather(values.buffer, values.start[fine] + 1, values.length[fine] - 1), values.start[fine]), fine


def _read_uuid(values: Values, arrow_type: pa.DataType) -> tuple[pa.Array, Mask]:
    del arrow_type
    fine = values.length == 16
    data = view(values.buffer, "V16")[values.start[fine]].tobytes()
    digits = np.frombuffer(binascii.hexlify(data), np.uint8).reshape(-1, 32)
    text = np.full((len(digits), 36), ord("-"), np.uint8)
    for begin, end, shift in ((0, 8, 0), (8, 12, 1), (12, 16, 2), (16, 20, 3), (20, 32, 4)):
        text[:, begin + shift : end + shift] = digits[:, begin:end]
    return _strings(text), fine


def _strings(text: NDArray[np.uint8]) -> pa.StringArray:
    """Return the rows of a matrix of characters as texts."""
    count, size = text.shape
    offset = np.arange(0, (count + 1) * size, size or 1, dtype=np.int32)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offset), pa.py_buffer(text))


_CHARACTERS: Final = np.frombuffer(b"".join(b"%04d" % digit for digit in range(10_000)), "S4")
"""Those of each digit of base 10000."""


def _read_decimal(values: Values, arrow_type: pa.DataType) -> tuple[pa.Array, Mask]:
    """numeric_send: number of digits of base 10000, weight of the first one, sign, display scale; the digits."""
    whole, scale = arrow_type.precision - arrow_type.scale, arrow_type.scale
    groups_before, groups_after = -(-whole // 4), -(-scale // 4)
    uint16 = view(values.buffer, ">u2")
    fine = values.length >= 8
    start = np.where(fine, values.start, 0)
    count, weight, sign, display = (uint16[start + 2 * field].astype(np.int64) for field in range(4))
    weight = np.where(count > 0, (weight ^ 0x8000) - 0x8000, -1)
    fine &= (values.length == 8 + 2 * count) & ((sign == 0) | (sign == 0x4000)) & (display <= scale)
    fine &= (weight < groups_before) & (weight - count >= -groups_after - 1)

    # All rows' digits in one matrix, aligned at the decimal point.
    start, count, weight = start[fine], count[fine], weight[fine]
    row = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    digits = np.zeros((len(count), groups_before + groups_after), np.uint16)
    digits[row, groups_before - 1 - weight[row] + number] = uint16[start[row] + 8 + 2 * number]
    fits = (digits < 10_000).all(axis=1)
    if whole % 4:
        fits &= digits[:, 0] < 10 ** (whole % 4)
    if scale % 4:
        fits &= digits[:, -1] % 10 ** (4 - scale % 4) == 0
    is_negative = sign[fine][fits] != 0
    fine[fine] = fits

    point = 4 * groups_before
    characters = _CHARACTERS[digits[fits]].view(np.uint8)
    text = np.empty((len(characters), whole + scale + 2), np.uint8)
    text[:, 0] = np.where(is_negative, ord("-"), ord("0"))
    text[:, 1 : whole + 1] = characters[:, point - whole : point]
    text[:, whole + 1] = ord(".")
    text[:, whole + 2 :] = characters[:, point : point + scale]
    return _strings(text).cast(arrow_type), fine


_ARRAY_HEADER_BYTES: Final = 12
_LIST_HEADER_BYTES: Final = 20
_MAX_WALK: Final = 1000
"""Arrays of more elements are read by way of their text: a step along all rows is no good where only one is so long."""


def _read_list(values: Values, arrow_type: pa.DataType) -> tuple[pa.Array, Mask]:
    """array_send: dimensions, flags, the elements' type; of a dimension length and lower bound; of an element length and bytes."""
    element_id = ARRAYS[values.type_id]
    int32 = view(values.buffer, ">i4")
    start, end, size = values.start, values.start + values.length, values.length
    is_empty, is_list = size == _ARRAY_HEADER_BYTES, size >= _LIST_HEADER_BYTES
    is_empty[is_empty] = int32[start[is_empty]] == 0
    header = start[is_list]
    count = np.zeros(len(start), np.int64)
    count[is_list] = int32[header + 12]
    is_list[is_list] = (int32[header] == 1) & (int32[header + 16] == 1)
    is_list &= (count >= 0) & (count <= _MAX_WALK)
    count[~is_list] = 0
    fine = is_empty | is_list
    fine[fine] = int32[start[fine] + 8] == element_id
    count[~fine] = 0

    first = np.cumsum(count) - count
    kind, begin, length = np.zeros(count.sum(), np.uint8), np.zeros(count.sum(), np.int64), np.zeros(count.sum(), np.int64)
    pos = start + np.where(is_list, _LIST_HEADER_BYTES, _ARRAY_HEADER_BYTES)
    for number in range(int(count.max(initial=0))):
        rows = np.flatnonzero(fine & (count > number))
        fine[rows] = pos[rows] + 4 <= end[rows]
        rows = rows[fine[rows]]
        size = int32[pos[rows]]
        place = first[rows] + number
        kind[place] = np.where(size == -1, NULL, BINARY)
        begin[place], length[place] = pos[rows] + 4, np.maximum(size, 0)
        pos[rows] = begin[place] + length[place]
        fine[rows] = (size >= -1) & (pos[rows] <= end[rows])
    fine &= pos == end
    row = np.repeat(np.arange(len(count)), count)
    chosen = fine[row]
    elements = Values(values.table, values.name, element_id, values.buffer, kind[chosen], begin[chosen], length[chosen])
    converted = to_arrow(elements, arrow_type.value_type)
    row = row[chosen]
    fine[row[converted.exact_rows]] = False
    array = converted.array.filter(pa.array(fine[row])) if len(converted.exact_rows) else converted.array
    return list_array(array, count[fine], np.ones(fine.sum(), np.bool_), arrow_type), fine


_READERS: Final[Mapping[tuple[ToText, ColumnType], _Reader]] = {
    (numbers.bool_text, ColumnType.BOOLEAN): _read_bool,
    (strings.bytea_text, ColumnType.BINARY): _read_text,
    (numbers.int2_text, ColumnType.INT16): _read_number(">i2"),
    (numbers.int4_text, ColumnType.INT32): _read_number(">i4"),
    (numbers.int8_text, ColumnType.INT64): _read_number(">i8"),
    (numbers.oid_text, ColumnType.INT64): _read_number(">u4"),
    (numbers.float4_text, ColumnType.FLOAT32): _read_number(">f4"),
    (numbers.float8_text, ColumnType.FLOAT64): _read_number(">f8"),
    (numbers.numeric_text, ColumnType.DECIMAL): _read_decimal,
    (times.date_text, ColumnType.DATE): _read_date,
    (times.timestamp_text, ColumnType.TIMESTAMP_NTZ): _read_timestamp,
    (times.timestamptz_text, ColumnType.TIMESTAMP): _read_timestamp,
    (strings.plain_text, ColumnType.STRING): _read_text,
    (strings.versioned_text, ColumnType.STRING): _read_versioned_text,
    (strings.uuid_text, ColumnType.STRING): _read_uuid,
}
"""The binary form, told by its function in the table of types, and the column that it goes to."""


def _by_type() -> dict[tuple[int, pa.DataType | int], _Reader]:
    """Return the readers by OID and Arrow type, or this one's id where it has parameters."""
    found: dict[tuple[int, pa.DataType | int], _Reader] = {}
    for type_id, row in TYPES.items():
        read = _READERS.get((row.to_text, row.column_type)) if callable(row.to_text) else None
        if read is not None:
            found[type_id, ARROW_TYPES.get(row.column_type, pa.decimal128(1).id)] = read
    return found | {(type_id, pa.list_(pa.null()).id): _read_list for type_id in ARRAYS}


_BY_TYPE: Final = _by_type()
