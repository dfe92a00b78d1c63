"""Many Insert, Update and Delete records of one relation -> Arrow columns, without Python per row.

The records stay where they are, in one buffer; the caller says where each begins and how long it is, in the order in which
they stand there. `decode_changes` walks all rows at once, column by column, with numpy, and notes where each value's text
is; `Values.to_arrow` gathers one column's texts and casts them to the Arrow type that the caller wants for it.

- Every count and length is compared with what is there before it is believed: malformed bytes are a `ProtocolError`.
- A cast is exact or it does not happen: what the type cannot hold (infinity, BC, a numeric NaN, year 10000) is null in the
  column, and its text is in `Converted.exact`. Only columns that have such a value pay for it.
- NULL, not sent and unchanged TOAST are all null in Arrow; `Values.kind` tells them apart.
- Values in binary form, which may stand beside others in text form, give what their text gives. For a text the Arrow type
  alone says how it is read, in the forms that a server writes under DateStyle ISO, whatever its TimeZone; for bytes it is
  PostgreSQL's type, which must be a built-in one. Common types are read all at once, the others become text one by one.

Source: the manual, "Logical Replication Message Formats", TupleData.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError, ProtocolError
from cdcpipe.pgoutput import binary
from cdcpipe.pgoutput.array_text import gather, split_arrays
from cdcpipe.pgoutput.binary import ARRAYS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cdcpipe.pgoutput.messages import Relation

    Bytes = bytes | memoryview
    Int64s = NDArray[np.int64]
    UInt8s = NDArray[np.uint8]
    Mask = NDArray[np.bool_]

__all__ = ["MAX_SPAN_BYTES", "Changes", "Converted", "Values", "convert_text", "decode_changes", "gather"]

MAX_SPAN_BYTES: Final = 0x7FFFFFFF
"""How far the last byte of a call's records may be from its first: Arrow's strings have 32-bit offsets."""

INSERT, UPDATE, DELETE = b"IUD"
_KEY, _OLD, _NEW = b"KON"
_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"

_MARKER_POS = 5  # after the kind and the relation id


@dataclass(slots=True)
class Converted:
    """One column as Arrow values; ``exact`` has the texts at ``exact_rows`` that the type cannot hold (null in ``array``)."""

    array: pa.Array
    exact_rows: Int64s
    exact: pa.StringArray


@dataclass(slots=True)
class Values:
    """One column, not read yet: where each row's bytes are, and its kind, n, u, t or b; 0 where the record has no such tuple."""

    table: str
    name: str
    type_id: int
    buffer: Bytes
    kind: UInt8s
    start: Int64s
    length: Int64s

    @property
    def unchanged(self) -> Mask:
        """The rows whose value is an unchanged TOAST value, that is, was not sent."""
        return np.equal(self.kind, _UNCHANGED)

    @property
    def sent(self) -> Mask:
        """The rows that have a value."""
        return np.equal(self.kind, _TEXT) | np.equal(self.kind, _BINARY)

    def text(self) -> pa.StringArray:
        """Return the texts; ProtocolError if one is not UTF-8, or malformed, UnknownTypeError for a type that is not built in."""
        return self._text(np.flatnonzero(self.kind == _BINARY))

    def to_arrow(self, arrow_type: pa.DataType) -> Converted:
        """Return the column as ``arrow_type``; the errors are those of `text`."""
        rows = np.flatnonzero(self.kind == _BINARY)
        read = _READERS.get((self.type_id, arrow_type), _READERS.get((self.type_id, arrow_type.id))) if len(rows) else None
        if read is None:
            return convert_text(self._text(rows), arrow_type)
        array, fine = read(replace(self, kind=self.kind[rows], start=self.start[rows], length=self.length[rows]), arrow_type)
        if fine.all() and len(rows) == len(self.kind):
            return Converted(array, _NO_ROWS, _NO_TEXTS)
        converted = convert_text(self._text(rows[~fine]), arrow_type)
        converted.array = _put(converted.array, rows[fine], array)
        return converted

    def _text(self, rows: Int64s) -> pa.StringArray:
        """Return the texts that were sent, and those of the values in binary form in some rows; in others these are null."""
        if not len(rows):
            return self.utf8(self._bytes(), self.start)
        made = self.utf8(pa.array(self._made_text(rows), pa.binary()), self.start[rows])
        return made if len(rows) == len(self.kind) else _put(self.utf8(self._bytes(), self.start), rows, made)

    def _made_text(self, rows: Int64s) -> list[bytes]:
        """Return the texts of values in binary form, one by one."""
        texts = []
        room = MAX_SPAN_BYTES
        for start, length in zip(self.start[rows].tolist(), self.length[rows].tolist(), strict=True):
            try:
                text = binary.to_text(self.type_id, bytes(self.buffer[start : start + length]))
            except (ProtocolError, binary.UnknownTypeError, InvalidArgumentsError) as ex:
                binary.name_column(ex, self.table, self.name)
                raise
            texts.append(text)
            room -= len(text)
            if room < 0:
                msg = f"the values of column {self.name!r} of table {self.table!r} have more than 2 GiB of text"
                raise CdcpipeError(msg, hint="decode fewer records at once")
        return texts

    def utf8(self, array: pa.BinaryArray, start: Int64s) -> pa.StringArray:
        """Return the bytes, of values that begin there, as text; ProtocolError if one is not UTF-8."""
        try:
            return array.cast(pa.string())
        except pa.ArrowInvalid as ex:
            msg = f"a value of column {self.name!r}, at byte {_first_not_utf8(array, start)}, is not UTF-8"
            raise ProtocolError(msg, hint="is the database's encoding SQL_ASCII? its bytes come as they are") from ex

    def numbers(self, layout: str) -> tuple[NDArray[Any], Mask]:
        """Return values of a fixed size as numbers; False for those of another size, whose number means nothing."""
        size = np.dtype(layout).itemsize
        fine = self.length == size
        return _view(self.buffer, layout)[self.start if fine.all() else np.where(fine, self.start, 0)], fine

    def _bytes(self) -> pa.BinaryArray:
        sent = self.kind == _TEXT
        return gather(self.buffer, self.start, self.length, None if sent.all() else sent)


def _first_not_utf8(array: pa.BinaryArray, start: Int64s) -> int:
    for row, value in enumerate(array.to_pylist()):
        try:
            (value or b"").decode()
        except UnicodeDecodeError:
            return int(start[row])
    return -1  # Arrow and Python do not agree: there is no place to name


@dataclass(slots=True)
class Changes:
    """Changes of one relation, row by row as the caller gave them.

    ``columns`` is the row after the change: the new tuple, for a delete the old one as far as it was sent. An unchanged
    TOAST value that the old tuple has is filled in from there: of a whole row, or of a key, which may be TOASTed, too.
    ``old`` is the old tuple, None when no row has one; in a row whose ``old_kind`` is K only the key's columns are there.
    """

    kind: UInt8s
    old_kind: UInt8s
    columns: list[Values]
    old: list[Values] | None


def decode_changes(buffer: Bytes, offset: Int64s, length: Int64s, relation: Relation) -> Changes:
    """Find every value of the records at ``offset``, which are Inserts, Updates and Deletes of ``relation``, in order.

    Raise ProtocolError for malformed records.
    """
    reader = _TupleReader(buffer, relation)
    end = offset + length
    if len(offset):
        in_order = offset[0] >= 0 and (length >= 0).all() and (offset[1:] >= end[:-1]).all() and end[-1] <= len(buffer)
        if not in_order or end[-1] - offset[0] > MAX_SPAN_BYTES:
            msg = "the records' places do not fit the buffer: is the index another segment's?"
            raise ProtocolError(msg)
    reader.require(length > _MARKER_POS, offset, "it is too short")
    reader.require(reader.uint32_at(offset + 1) == relation.relation_id, offset, "it is of another relation")
    kind = reader.bytes_at(offset)
    marker = reader.bytes_at(offset + _MARKER_POS)
    is_delete = kind == DELETE
    has_old = (marker == _KEY) | (marker == _OLD)
    reader.require(
        (has_old & (is_delete | (kind == UPDATE))) | ((marker == _NEW) & ((kind == INSERT) | (kind == UPDATE))),
        offset,
        "it does not begin with a tuple that its kind has",
    )
    pos = offset + (_MARKER_POS + 1)

    old: list[Values] | None = None
    if has_old.any():
        rows = np.flatnonzero(has_old)
        found, pos[rows] = reader.read_tuple(pos[rows], end[rows])
        old = [_spread(values, rows, offset) for values in found]
        rows = rows[~is_delete[rows]]
        reader.require(pos[rows] < end[rows], pos[rows], "it ends before the new tuple")
        reader.require(reader.bytes_at(pos[rows]) == _NEW, pos[rows], "there is no new tuple after the old one")
        pos[rows] += 1
    if is_delete.any():
        rows = np.flatnonzero(~is_delete)
        found, pos[rows] = reader.read_tuple(pos[rows], end[rows])
        columns = [_spread(values, rows, offset) for values in found]
    else:
        columns, pos = reader.read_tuple(pos, end)
    reader.require(pos == end, pos, "bytes follow its last tuple")

    old_kind = np.where(has_old, marker, 0).astype(np.uint8)
    if old is not None:
        for after, before in zip(columns, old, strict=True):
            _fill_in(after, before, is_delete)
    return Changes(kind, old_kind, columns, old)


def _fill_in(after: Values, before: Values, is_delete: Mask) -> None:
    """Give a delete's row its old values, and an unchanged TOAST value what the old tuple says it is."""
    known = is_delete | (after.unchanged & before.sent)
    for mine, theirs in ((after.kind, before.kind), (after.start, before.start), (after.length, before.length)):
        np.copyto(mine, theirs, where=known)


def _spread(values: Values, rows: Int64s, offset: Int64s) -> Values:
    """Put what was read for some rows into arrays over all; the other rows get their record's place, so starts stay in order."""
    kind, length, start = np.zeros(len(offset), np.uint8), np.zeros(len(offset), np.int64), offset.copy()
    kind[rows], length[rows], start[rows] = values.kind, values.length, values.start
    return replace(values, kind=kind, start=start, length=length)


def _view(buffer: Bytes, layout: str) -> NDArray[Any]:
    """Return the numbers that begin at each byte: an array whose elements overlap."""
    return np.ndarray(max(len(buffer) - np.dtype(layout).itemsize + 1, 0), layout, buffer, strides=(1,))


class _TupleReader:
    """Reads the same column of many tuples at a time."""

    def __init__(self, buffer: Bytes, relation: Relation) -> None:
        self._buffer = buffer
        self._relation = relation
        self._table = f"{relation.namespace}.{relation.name}"
        self._bytes = np.frombuffer(buffer, np.uint8)
        self._uint16 = _view(buffer, ">u2")
        self._uint32 = _view(buffer, ">u4")

    def bytes_at(self, pos: Int64s) -> UInt8s:
        return self._bytes[pos]

    def uint32_at(self, pos: Int64s) -> Int64s:
        return self._uint32[pos].astype(np.int64)

    def require(self, fine: Mask, pos: Int64s, problem: str) -> None:
        """Raise ProtocolError for the first row that is not fine."""
        if not fine.all():
            self._fail(int(pos[np.argmin(fine)]), problem)

    def _fail(self, pos: int, problem: str) -> None:
        msg = f"a malformed record of table {self._table!r} at byte {pos}: {problem}"
        raise ProtocolError(msg)

    def read_tuple(self, pos: Int64s, end: Int64s) -> tuple[list[Values], Int64s]:
        """Read the TupleData that begins at ``pos`` in each row; return its columns and where it ends."""
        columns = self._relation.columns
        self.require(pos + 2 <= end, pos, "it ends before the number of columns")
        self.require(self._uint16[pos] == len(columns), pos, f"its number of columns is not {len(columns)}")
        pos = pos + 2
        result = []
        for column in columns:
            self.require(pos < end, pos, f"it ends before column {column.name!r}")
            kind = self._bytes[pos]
            sent = kind == _TEXT
            if sent.all():
                self.require(pos + 5 <= end, pos, f"it ends before the length of column {column.name!r}")
                length = self._uint32[pos + 1].astype(np.int64)
                start = pos + 5
            else:
                sent |= kind == _BINARY
                fine = sent | (kind == _NULL) | (kind == _UNCHANGED)
                self.require(fine, pos, f"column {column.name!r} is of no known kind")
                self.require(~sent | (pos + 5 <= end), pos, f"it ends before the length of column {column.name!r}")
                length = np.zeros(len(pos), np.int64)
                length[sent] = self._uint32[pos[sent] + 1]
                start = pos + np.where(sent, 5, 1)
            pos = start + length
            self.require(pos <= end, start, f"it ends inside column {column.name!r}")
            result.append(Values(self._table, column.name, column.type_id, self._buffer, kind, start, length))
        return result, pos


# Texts to typed arrays. Each function gives null for what its type cannot hold exactly, and raises nothing.

_NO_ROWS: Final = np.zeros(0, np.int64)
_NO_TEXTS: Final = pa.array([], pa.string())

_YEAR_1_DAY: Final = -719_162
_YEAR_10000_DAY: Final = 2_932_897
_DAY_US: Final = 86_400_000_000

_INTEGER: Final = r"^-?[0-9]+$"
_FLOAT: Final = r"^(NaN|-?Infinity|-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?)$"
_DECIMAL: Final = r"^-?[0-9]+(\.[0-9]+)?$"
_DATE: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"
_TIMESTAMP: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?([+-][0-9]{2}(:[0-9]{2})?)?$"
_HEX: Final = r"^\\x([0-9a-f]{2})*$"

_MAX_DECIMAL_DIGITS: Final = 38


def convert_text(text: pa.StringArray, arrow_type: pa.DataType) -> Converted:
    """Return values, as the server writes them as text, as ``arrow_type``."""
    if arrow_type == pa.string():
        return Converted(text, _NO_ROWS, _NO_TEXTS)
    array = _CASTS[arrow_type.id](text, arrow_type)
    lost = array.null_count - text.null_count
    if not lost:
        return Converted(array, _NO_ROWS, _NO_TEXTS)
    rows = np.flatnonzero(_valid(text) & ~_valid(array))
    return Converted(array, rows, text.take(pa.array(rows)))


def _cast(text: pa.StringArray, arrow_type: pa.DataType, pattern: str) -> pa.Array:
    """Cast all texts at once; if Arrow refuses, only those that look like ``pattern``, and then what it refuses singly."""
    try:
        return text.cast(arrow_type)
    except pa.ArrowInvalid:
        return _cast_some(_only(text, pc.match_substring_regex(text, pattern)), arrow_type)


def _cast_some(text: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
    """Cast what can be cast, halving what cannot: few calls when few texts are wrong."""
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
    """Null what is not in [low, high): Arrow has a year 0, and an offset can lead beyond year 9999; Spark ends there."""
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
    if longest is not None and longest > _MAX_DECIMAL_DIGITS:
        # Arrow lets more than 38 digits overflow without a word, zeros behind the point among them: 1e-45 would be 0.
        text = pc.replace_substring_regex(text, r"(\.[0-9]*[1-9])0+$|\.0+$", r"\1")
        digits = pc.replace_substring_regex(text, r"^-?0*|\.", "")
        text = _only(text, pc.less_equal(pc.binary_length(digits), _MAX_DECIMAL_DIGITS))
    return _cast(text, arrow_type, _DECIMAL)


def _to_date(text: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
    array = _cast(text, arrow_type, _DATE)
    return _only_between(array, array.cast(pa.int32()), _YEAR_1_DAY, _YEAR_10000_DAY)


def _to_timestamp(text: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
    array = _cast(text, arrow_type, _TIMESTAMP)
    return _only_between(array, array.cast(pa.int64()), _YEAR_1_DAY * _DAY_US, _YEAR_10000_DAY * _DAY_US)


def _to_binary(text: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
    """Read bytea_output=hex; other texts, such as those of bytea_output=escape, are not touched."""
    del arrow_type
    try:
        return _unhex(text)
    except ValueError:
        return _unhex(_only(text, pc.match_substring_regex(text, _HEX)))


def _unhex(text: pa.StringArray) -> pa.BinaryArray:
    """Decode all texts of a whole array at once; ValueError if one is not a backslash, an x and pairs of hexadecimal digits."""
    validity, offset_buffer, data_buffer = text.buffers()
    offset = np.frombuffer(offset_buffer, np.int32)[: len(text) + 1]
    present = _valid(text)
    data = np.frombuffer(data_buffer or b"", np.uint8)[: offset[-1]]
    space = np.diff(offset)  # a null may have some, too
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
    return _list_array(elements, split.count, split.fine, arrow_type)


def _list_array(elements: pa.Array, count: Int64s, valid: Mask, arrow_type: pa.DataType) -> pa.ListArray:
    """Return lists of so many elements each, null where ``valid`` is False."""
    offset = np.zeros(len(count) + 1, np.int32)
    np.cumsum(count, out=offset[1:])
    return pa.ListArray.from_arrays(pa.array(offset), elements, type=arrow_type, mask=pa.array(~valid))


def _valid(array: pa.Array) -> Mask:
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


# Bytes to typed arrays, all at once. Each function returns what it has read, and which rows that were: the others, be they
# infinite, out of range or malformed, become text, which says more about them.

_2000_DAY: Final = 10_957


def _put(array: pa.Array, rows: Int64s, values: pa.Array) -> pa.Array:
    """Return the array with other values in some rows."""
    place = np.arange(len(array))
    place[rows] = np.arange(len(array), len(array) + len(rows))
    return pa.concat_arrays([array, values]).take(pa.array(place))


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
    fine &= (day >= _YEAR_1_DAY) & (day < _YEAR_10000_DAY)
    return pa.array(day[fine].astype(np.int32)).cast(arrow_type), fine


def _read_timestamp(values: Values, arrow_type: pa.DataType) -> tuple[pa.Array, Mask]:
    time_us, fine = values.numbers(">i8")
    epoch_us = _2000_DAY * _DAY_US
    fine &= (time_us >= _YEAR_1_DAY * _DAY_US - epoch_us) & (time_us < _YEAR_10000_DAY * _DAY_US - epoch_us)
    return pa.array(time_us[fine].astype(np.int64) + epoch_us).cast(arrow_type), fine


def _read_text(values: Values, arrow_type: pa.DataType) -> tuple[pa.Array, Mask]:
    array = gather(values.buffer, values.start, values.length)
    return array if arrow_type == pa.binary() else values.utf8(array, values.start), np.ones(len(array), np.bool_)


def _read_versioned_text(values: Values, arrow_type: pa.DataType) -> tuple[pa.Array, Mask]:
    """jsonb, jsonpath."""
    del arrow_type
    fine = values.length > 0
    fine &= _view(values.buffer, "u1")[np.where(fine, values.start, 0)] == 1
    return values.utf8(gather(values.buffer, values.start[fine] + 1, values.length[fine] - 1), values.start[fine]), fine


def _read_uuid(values: Values, arrow_type: pa.DataType) -> tuple[pa.Array, Mask]:
    del arrow_type
    fine = values.length == 16
    data = _view(values.buffer, "V16")[values.start[fine]].tobytes()
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
    uint16 = _view(values.buffer, ">u2")
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
    int32 = _view(values.buffer, ">i4")
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
        kind[place] = np.where(size == -1, _NULL, _BINARY)
        begin[place], length[place] = pos[rows] + 4, np.maximum(size, 0)
        pos[rows] = begin[place] + length[place]
        fine[rows] = (size >= -1) & (pos[rows] <= end[rows])
    fine &= pos == end
    row = np.repeat(np.arange(len(count)), count)
    chosen = fine[row]
    elements = Values(values.table, values.name, element_id, values.buffer, kind[chosen], begin[chosen], length[chosen])
    converted = elements.to_arrow(arrow_type.value_type)
    row = row[chosen]
    fine[row[converted.exact_rows]] = False
    array = converted.array.filter(pa.array(fine[row])) if len(converted.exact_rows) else converted.array
    return _list_array(array, count[fine], np.ones(fine.sum(), np.bool_), arrow_type), fine


_Reader: TypeAlias = Callable[[Values, pa.DataType], tuple[pa.Array, "Mask"]]

# By pg_type.dat's OID and the Arrow type, or this one's id.
_READERS: Final[dict[tuple[int, pa.DataType | int], _Reader]] = {
    (16, pa.bool_()): _read_bool,
    (17, pa.binary()): _read_text,  # bytea
    (20, pa.int64()): _read_number(">i8"),
    (21, pa.int16()): _read_number(">i2"),
    (23, pa.int32()): _read_number(">i4"),
    (26, pa.int64()): _read_number(">u4"),  # oid
    (700, pa.float32()): _read_number(">f4"),
    (701, pa.float64()): _read_number(">f8"),
    (1082, pa.date32()): _read_date,
    (1114, pa.timestamp("us")): _read_timestamp,
    (1184, pa.timestamp("us", "UTC")): _read_timestamp,
    (1700, pa.decimal128(1).id): _read_decimal,
    (2950, pa.string()): _read_uuid,
    # name, text, json, xml, bpchar, varchar
    **{(type_id, pa.string()): _read_text for type_id in (19, 25, 114, 142, 1042, 1043)},
    **{(type_id, pa.string()): _read_versioned_text for type_id in (3802, 4072)},
    **{(type_id, pa.list_(pa.null()).id): _read_list for type_id in ARRAYS},
}
