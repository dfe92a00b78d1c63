"""Packs a column of many rows into one value on the server, and makes an Arrow column of it. No pyspark.

Row by row, the server and the reader spend more time on a row's frame than on its values. So the server concatenates the values of
a column, in their binary form, over some pages of the table (string_agg), and sends one row for these pages. A column whose values
have one size is then an array of numbers. A column of texts comes with a second one, their lengths. No code runs per row here.

- **NULL** has a value of its own, which ``coalesce`` puts in its place. Where a type has no spare value, the server also counts the
  values that are not NULL. If a real value is the one for NULL, `AmbiguousError` is raised, and the caller reads row by row.
- **A value that the Arrow column cannot hold** (infinity, BC, NaN in a numeric) comes with its text, as from the stream.
- **A numeric** of up to 18 digits comes as an integer, multiplied by a power of ten.
- **Other types** come as text, by the same expression as row by row.

A packed column needs memory on the server for the values of all its rows at once. So tables with TOASTed values are read row by
row. So are tables without pages, and databases whose encoding is not UTF-8, because there a text changes its length on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from cdcpipe.types.arrow.casts import DAY_US, NO_ROWS, NO_TEXTS, YEAR_1_DAY, YEAR_10000_DAY, Converted, convert_text
from cdcpipe.types.arrow.values import BINARY, Values
from cdcpipe.types.names import numeric_modifier
from cdcpipe.types.pg_type import PG_TYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cdcpipe.pgoutput.messages import Column

__all__ = [
    "MAX_EXPRESSIONS",
    "SETTINGS",
    "AmbiguousError",
    "Packing",
    "aggregates",
    "as_text",
    "is_possible",
    "packing",
    "read_packed",
]

BYTES: Final = "bytes"
TEXT: Final = "text"
CAST: Final = "cast"
"""Texts that are cast to the column's type, as the texts of the stream are."""

_WITH_LENGTHS: Final = (BYTES, TEXT, CAST)

MAX_EXPRESSIONS: Final = 1600
"""A SELECT may have 1664."""

SETTINGS: Final = {
    # A plan that reads the pages in their order, in one process.
    "enable_bitmapscan": "off",
    "enable_indexonlyscan": "off",
    "enable_indexscan": "off",
    "enable_seqscan": "off",
    "max_parallel_workers_per_gather": "0",
    # To compile the expressions takes longer than to interpret them for one chunk.
    "jit": "off",
}
"""What the server's planner must be told before it gets such a query."""


class AmbiguousError(Exception):
    """A value of the column is the one that stands for NULL."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How the server packs a column. ``value`` is its expression for a row. In the others ``{0}`` stands for that.

    ``form`` is numpy's name for values of one size; otherwise one of `BYTES`, `TEXT`, `CAST`, which come with their lengths.
    ``null`` are the bytes that stand for NULL, in hexadecimal.
    """

    value: str
    packed: str
    form: str
    null: str = ""
    is_null_spare: bool = True
    """Whether no value of the type can be ``null``."""
    type_id: int = 0
    scale: int = 0
    """The scale of a numeric that comes as an integer."""
    is_integer: bool = False
    """Whether this is a numeric that comes as an integer, which needs a column of decimals."""


@dataclass(frozen=True, slots=True)
class _Fixed:
    send: str
    form: str
    null: str
    is_null_spare: bool = True


_NAN: Final = "8000000000000001"

_FIXED: Final = {
    "bool": _Fixed("boolsend({0})", "u1", "02"),
    "int2": _Fixed("int4send({0}::pg_catalog.int4)", ">i4", "80000000"),
    "int4": _Fixed("int4send({0})", ">i4", "89abcdef", is_null_spare=False),
    "int8": _Fixed("int8send({0})", ">i8", "89abcdef01234567", is_null_spare=False),
    "oid": _Fixed("int8send({0}::pg_catalog.int8)", ">i8", "8000000000000000"),
    # These are NaNs that no computation makes.
    "float4": _Fixed("float4send({0})", ">f4", "7fabcdef", is_null_spare=False),
    "float8": _Fixed("float8send({0})", ">f8", "7ffbcdef01234567", is_null_spare=False),
    # The least values but one are before the first date and time of PostgreSQL. The least one is -infinity.
    "date": _Fixed("date_send({0})", ">i4", "80000001"),
    "timestamp": _Fixed("timestamp_send({0})", ">i8", "8000000000000001"),
    "timestamptz": _Fixed("timestamptz_send({0})", ">i8", "8000000000000001"),
}
"""The types whose values have one size, by pg_type.typname. Their Arrow types are those of `_ARROW`."""

_ARROW: Final = {
    "bool": pa.bool_(),
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "oid": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
}

_MAX_INTEGER_DIGITS: Final = 18


def packing(column: Column, name: str) -> Packing | None:
    """Return how to pack a column of a type that is not selected as text, or a numeric as an integer; None for other columns."""
    kind = PG_TYPES[column.type_id].name if column.type_id in PG_TYPES else ""
    if kind in _FIXED:
        fixed = _FIXED[kind]
        packed = f"coalesce({fixed.send}, '\\x{fixed.null}'::pg_catalog.bytea)"
        return Packing(name, packed, fixed.form, fixed.null, fixed.is_null_spare, type_id=column.type_id)
    if kind in ("text", "varchar"):
        return Packing(f"{name}::pg_catalog.text", "{0}", TEXT)
    if kind == "bpchar":
        return Packing(name, "bpcharsend({0})", TEXT)  # a cast to text would remove spaces at the end
    if kind == "bytea":
        return Packing(name, "{0}", BYTES)
    return _numeric(column, name) if kind == "numeric" and column.type_modifier >= 0 else None


def _numeric(column: Column, name: str) -> Packing | None:
    """Return how to pack a numeric as an integer; None if it may have too many digits."""
    precision, scale = numeric_modifier(column.type_modifier)
    if not 0 <= scale <= precision <= _MAX_INTEGER_DIGITS:
        return None
    integer = f"({{0}} * {10**scale}::pg_catalog.numeric)::pg_catalog.int8" if scale else "{0}::pg_catalog.int8"
    null = "8000000000000000"
    value = f"CASE WHEN {{0}} = 'NaN' THEN '\\x{_NAN}'::pg_catalog.bytea ELSE int8send({integer}) END"
    packed = f"coalesce({value}, '\\x{null}'::pg_catalog.bytea)"
    return Packing(name, packed, ">i8", null, type_id=column.type_id, scale=scale, is_integer=True)


def as_text(expression: str) -> Packing:
    """Return how to pack a text."""
    return Packing(expression, "{0}", CAST)


def is_possible(packings: Sequence[Packing]) -> bool:
    """Tell whether the server can return so many expressions."""
    return len(aggregates(packings)) <= MAX_EXPRESSIONS


def aggregates(packings: Sequence[Packing]) -> list[str]:
    """Return the expressions over the rows ``c0``, ``c1``, … of `Packing.value`.

    The first one counts the rows. Then each column has one or two.
    """
    found = ["count(*)::pg_catalog.int8"]
    for number, each in enumerate(packings):
        column = f"c{number}"
        found.append(f"string_agg({each.packed.format(column)}, NULL)")
        if each.form in _WITH_LENGTHS:
            found.append(f"string_agg(int4send(coalesce(octet_length({column}), -1)), NULL)")
        elif not each.is_null_spare:
            found.append(f"count({column})::pg_catalog.int8")
    return found


def read_packed(packings: Sequence[Packing], kinds: Sequence[pa.DataType], batch: pa.RecordBatch) -> tuple[int, list[Converted]]:
    """Return the number of rows, and their columns, from the server's rows for some pages each.

    ``kinds`` are the types to which texts are cast. Raises AmbiguousError.
    """
    columns = iter(batch.columns)
    count = _sum(next(columns))
    found = []
    for each, kind in zip(packings, kinds, strict=True):
        data = _bytes(next(columns))
        if each.form in _WITH_LENGTHS:
            array = _texts(data, _read(_bytes(next(columns)), ">i4", count), pa.binary() if each.form == BYTES else pa.string())
            found.append(convert_text(array, kind) if each.form == CAST else Converted(array, NO_ROWS, NO_TEXTS))
        else:
            present = None if each.is_null_spare else _sum(next(columns))
            found.append(_numbers(each, kind, data, count, present))
    return count, found


def _sum(counts: pa.Array) -> int:
    return int(counts.to_numpy().sum())


def _bytes(array: pa.Array) -> pa.Buffer:
    """Return the bytes of all values of an array, one after the other. A null has none."""
    _, offsets, data = array.buffers()
    begin, end = np.frombuffer(offsets, np.int32)[[array.offset, array.offset + len(array)]]
    return pa.py_buffer(b"") if data is None else data.slice(int(begin), int(end - begin))


def _read(data: pa.Buffer, layout: str, count: int) -> NDArray[Any]:
    if data.size != count * np.dtype(layout).itemsize:
        msg = f"the server has sent {data.size} bytes for {count} values of the form {layout}"
        raise AssertionError(msg)
    return np.frombuffer(data, layout)


def _texts(data: pa.Buffer, lengths: NDArray[Any], kind: pa.DataType) -> pa.Array:
    is_valid = lengths >= 0
    is_full = bool(is_valid.all())
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths if is_full else np.where(is_valid, lengths, 0), out=offsets[1:], dtype=np.int32)
    if offsets[-1] != data.size:
        msg = f"the server has sent {data.size} bytes for texts of {offsets[-1]} bytes"
        raise AssertionError(msg)
    validity = None if is_full else pa.array(is_valid).buffers()[1]
    return pa.Array.from_buffers(kind, len(lengths), [validity, pa.py_buffer(offsets), data])


def _numbers(packing: Packing, kind: pa.DataType, data: pa.Buffer, count: int, present: int | None) -> Converted:
    layout = np.dtype(packing.form)
    bits = _read(data, f">u{layout.itemsize}", count).astype(f"=u{layout.itemsize}")
    is_null: NDArray[np.bool_] | None = None
    if present != count:
        is_null = bits == int(packing.null, 16)
        nulls = int(np.count_nonzero(is_null))
        if present is not None and nulls != count - present:
            raise AmbiguousError
        is_null = is_null if nulls else None
    number = bits.view(layout.newbyteorder("="))
    name = PG_TYPES[packing.type_id].name
    if packing.is_integer:
        return _decimals(number, is_null, packing, kind)
    if name == "date":
        return _days(number, is_null, packing, data)
    if name in ("timestamp", "timestamptz"):
        return _times(number, is_null, packing, data)
    if layout.kind == "f" and np.isnan(number).any():
        number[np.isnan(number)] = np.nan  # as text has it, without a sign
    arrow_type = _ARROW[name]
    number = number.astype(np.bool_ if name == "bool" else arrow_type.to_pandas_dtype(), copy=False)
    return Converted(pa.array(number, arrow_type, mask=is_null), NO_ROWS, NO_TEXTS)


_EPOCH_DAY: Final = 10_957
"""2000-01-01, from which PostgreSQL counts."""


def _days(day: NDArray[Any], is_null: NDArray[np.bool_] | None, packing: Packing, data: pa.Buffer) -> Converted:
    lost, is_null = _out_of(day, YEAR_1_DAY - _EPOCH_DAY, YEAR_10000_DAY - _EPOCH_DAY, is_null)
    with np.errstate(over="ignore"):
        day += np.int32(_EPOCH_DAY)
    array = pa.array(day, mask=is_null).cast(pa.date32())
    return Converted(array, lost, _printed(lost, packing, data))


def _times(time_us: NDArray[Any], is_null: NDArray[np.bool_] | None, packing: Packing, data: pa.Buffer) -> Converted:
    low, high = (YEAR_1_DAY - _EPOCH_DAY) * DAY_US, (YEAR_10000_DAY - _EPOCH_DAY) * DAY_US
    lost, is_null = _out_of(time_us, low, high, is_null)
    with np.errstate(over="ignore"):
        time_us += _EPOCH_DAY * DAY_US
    array = pa.array(time_us, mask=is_null).cast(_ARROW[PG_TYPES[packing.type_id].name])
    return Converted(array, lost, _printed(lost, packing, data))


def _out_of(
    number: NDArray[Any], low: int, high: int, is_null: NDArray[np.bool_] | None
) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """Return the rows outside of [low, high) that are not null, and which rows are null then."""
    if not len(number) or (number.min() >= low and number.max() < high):
        return NO_ROWS, is_null
    is_out = (number < low) | (number >= high)  # a null is out, too
    return np.flatnonzero(is_out if is_null is None else is_out & ~is_null), is_out


def _printed(rows: NDArray[np.int64], packing: Packing, data: pa.Buffer) -> pa.StringArray:
    """Return the texts of some of the values."""
    if not len(rows):
        return NO_TEXTS
    size = np.dtype(packing.form).itemsize
    kind, length = np.full(len(rows), BINARY, np.uint8), np.full(len(rows), size, np.int64)
    return Values("", "", packing.type_id, memoryview(data), kind, rows * size, length).text()


def _decimals(number: NDArray[Any], is_null: NDArray[np.bool_] | None, packing: Packing, kind: pa.DataType) -> Converted:
    lost = NO_ROWS
    if len(number) and number.min() < -(10**_MAX_INTEGER_DIGITS):  # so are NULL and NaN, and nothing else
        lost = np.flatnonzero(number == int(_NAN, 16) - (1 << 64))
    if len(lost):
        is_null = np.zeros(len(number), np.bool_) if is_null is None else is_null
        is_null[lost] = True
    validity = None if is_null is None else pa.array(~is_null).buffers()[1]
    words = np.empty((len(number), 2), np.int64)
    words[:, 0] = number
    words[:, 1] = number >> 63
    is_same = kind.scale == packing.scale
    made = kind if is_same else pa.decimal128(_MAX_INTEGER_DIGITS, packing.scale)
    array = pa.Array.from_buffers(made, len(number), [validity, pa.py_buffer(words)])
    texts = pa.array(["NaN"] * len(lost), pa.string()) if len(lost) else NO_TEXTS
    return Converted(array if is_same else array.cast(kind), lost, texts)
