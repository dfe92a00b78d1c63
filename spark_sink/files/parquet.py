"""Writes Arrow columns to a Parquet file, and returns the statistics that a Delta table needs. No Spark.

Spark would convert the columns to rows and pass them through the JVM, which takes several times as long.
"""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_sink.files import places

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["FileWriter", "Layout", "WrittenFile", "exact_number", "fitted", "part_name"]

_SAMPLE_ROWS: Final = 1000
_MOST_INT32_DIGITS: Final = 9
_MOST_INTEGER_DIGITS: Final = 18
"""The most digits of a decimal that Parquet stores as an integer of 32 or of 64 bits."""
_MOST_CHARACTERS: Final = 32
_GREATEST_CHARACTER: Final = "\U0010ffff"
"""The greatest length of a bound that is text. A longer bound is cut; a cut upper bound gets `_GREATEST_CHARACTER` at its end."""

# Without this, Spark reads days before 1582 as days of the Julian calendar: old versions of Spark wrote them so.
_FILE_METADATA: Final = {"org.apache.spark.version": "4.2.0"}


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a file, in order: their names in the table and their names in the file (with Delta Lake these differ)."""

    names: tuple[str, ...]
    schema: pa.Schema
    clustering: tuple[str, ...] = ()
    """Names in the file of the columns that need a least and a greatest value, if their type has usable ones (`_delta_bound`)."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A written Parquet file: its name, its size and its statistics. The statistics have the names of columns in the file."""

    name: str
    size: int
    rows: int
    minimum: dict[str, Any]
    maximum: dict[str, Any]
    nulls: dict[str, int]

    def statistics(self, names: Collection[str]) -> dict[str, Any]:
        """Return Delta Lake's statistics of the file, limited to the columns ``names`` (names in the file)."""
        found = {"minValues": self.minimum, "maxValues": self.maximum, "nullCount": self.nulls}
        return {"numRecords": self.rows} | {
            key: {name: value for name, value in values.items() if name in names} for key, values in found.items()
        }


class FileWriter:
    """Writes batches of columns to one Parquet file."""

    def __init__(self, directory: str, name: str, layout: Layout) -> None:
        """Begin with a file of this name; `part_name` has one that nobody else takes."""
        self._path = places.place(directory) / name
        self._layout = layout
        self._rows = 0
        self._collected: list[Any] = []
        self._writer: Any = None

    def write(self, arrays: dict[str, pa.Array], count: int) -> None:
        """Write ``count`` rows. A column of the layout that ``arrays`` lacks is written as null."""
        columns = [
            fitted(arrays[name], field.type) if name in arrays else pa.nulls(count, field.type)
            for name, field in zip(self._layout.names, self._layout.schema, strict=True)
        ]
        with self._discarded_on_error():
            if self._writer is None:
                self._writer = self._open(columns)
            self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._layout.schema))
        self._rows += count

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Write a batch whose columns have the layout's names."""
        self.write(dict(zip(batch.schema.names, batch.columns, strict=True)), len(batch))

    def _open(self, columns: list[pa.Array]) -> Any:
        """Begin the file. The first values of a column decide how it is encoded.

        Values that repeat get a dictionary, which costs half of the time of writing. Of integers, times and decimals that lie close
        together the differences are written. Readers take these faster, and the files get smaller.
        """
        named = [(field.name, array) for field, array in zip(self._layout.schema, columns, strict=True)]
        repeated = [name for name, array in named if _repeats(array)]
        close = [name for name, array in named if name not in repeated and _lie_close(array)]
        return places.parquet_writer(
            self._path,
            self._layout.schema,
            # At this level zstd is as fast as snappy, and the file is half as large.
            compression="zstd",
            compression_level=1,
            use_dictionary=repeated,
            column_encoding=dict.fromkeys(close, "DELTA_BINARY_PACKED"),
            store_decimal_as_integer=True,  # of up to 18 digits, as Spark does
            store_schema=False,
            write_statistics=_columns_with_bounds(self._layout.schema),
            metadata_collector=self._collected,
        )

    @contextmanager
    def _discarded_on_error(self) -> Iterator[None]:
        """Remove the file after an error. On a full disk it has the last room, and each new attempt would take what was freed."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Give up the file. In a file system, this removes what was written of it."""
        if self._writer is not None:
            # Otherwise pyarrow ends the file at garbage collection, and after an error prints a second one.
            self._writer.is_open = False
        if places.is_local(self._path):
            self._path.unlink(missing_ok=True)

    def close(self) -> WrittenFile:
        """End the file, make its contents durable, and return its statistics."""
        with self._discarded_on_error():
            if self._writer is None:
                self._writer = self._open([pa.nulls(0, field.type) for field in self._layout.schema])
            self._writer.add_key_value_metadata(_FILE_METADATA)
            self._writer.close()
            # Segments are removed once a changelog has their changes. So its files must be as durable as the segments were.
            places.sync_file(self._path)
        clustering = self._layout.clustering
        minimum, maximum, nulls = _statistics(self._collected[0], clustering) if self._rows else ({}, {}, {})
        return WrittenFile(self._path.name, self._path.stat().st_size, self._rows, minimum, maximum, nulls)


def part_name() -> str:
    """Return a name for a file that is part of a table: of two that are made, no matter where, each has its own."""
    return f"part-{secrets.token_hex(16)}.parquet"


def fitted(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the values in the type of the file. The fields of a struct may have other names in the file."""
    if array.type == kind:
        return array
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        values = fitted(array.values, kind.value_type)
        return pa.ListArray.from_arrays(array.offsets, values, kind, mask=array.is_null() if array.null_count else None)
    if not pa.types.is_struct(kind):
        return array.cast(kind)
    children = [fitted(array.field(number), kind.field(number).type) for number in range(kind.num_fields)]
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null())


def _columns_with_bounds(schema: pa.Schema) -> list[str]:
    """Return the paths of all columns but floating-point numbers, also of those in structs, lists and maps.

    For Spark NaN is the greatest number, but pyarrow's bounds leave NaN out. So Spark would skip rows with NaN that a query wants.
    """
    columns = [column for field in schema for column in _columns_in(field.name, field.type)]
    return [path for path, kind in columns if not pa.types.is_floating(kind)]


def _columns_in(path: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """Yield the path and the type of each column in which Parquet stores values of a type."""
    if pa.types.is_struct(kind):
        parts = [(field.name, field.type) for field in kind]
    elif pa.types.is_list(kind):
        parts = [("list.element", kind.value_type)]
    elif pa.types.is_map(kind):
        parts = [("key_value.key", kind.key_type), ("key_value.value", kind.item_type)]
    else:
        yield path, kind
        return
    for name, part in parts:
        yield from _columns_in(f"{path}.{name}", part)


def _repeats(array: pa.Array) -> bool:
    """Tell from the first values of a column whether each value occurs twice or more on average."""
    kind = array.type
    if not (pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_date(kind)):
        return False
    sample = array[:_SAMPLE_ROWS]
    return bool(2 * pc.count_distinct(sample).as_py() <= len(sample))


def _lie_close(array: pa.Array) -> bool:
    """Tell from the first values of a column, stored as integers, whether their differences need less room than they do."""
    kind, sample = array.type, array[:_SAMPLE_ROWS].drop_null()
    if len(sample) < 2:
        return False
    if pa.types.is_integer(kind) or pa.types.is_date32(kind) or pa.types.is_timestamp(kind):
        bits, numbers = kind.bit_width, sample.view(f"int{kind.bit_width}").to_numpy()
    elif pa.types.is_decimal128(kind) and kind.precision <= _MOST_INTEGER_DIGITS:
        bits = 64 if kind.precision > _MOST_INT32_DIGITS else 32
        words = np.frombuffer(sample.buffers()[1], np.int64)  # two for each value, the lower one first
        numbers = words[::2][sample.offset : sample.offset + len(sample)]
    else:
        return False
    differences = np.diff(numbers.astype(np.float64))
    bits = max(bits, 32)  # Parquet has no smaller integers
    return bool(differences.max() - differences.min() < 2.0 ** (bits * 5 // 8))


def _statistics(metadata: Any, clustering: Collection[str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """Return least values, greatest values and numbers of nulls of the integer columns and the columns ``clustering``."""
    least: dict[str, list[Any]] = {}
    greatest: dict[str, list[Any]] = {}
    nulls: dict[str, int] = {}
    unknown = set()
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(metadata.num_columns):
            column = row_group.column(index)
            found = column.statistics
            if found is None or not found.has_null_count or "." in column.path_in_schema:
                continue
            name = column.path_in_schema
            if name not in clustering and not _is_integer(column, found):
                continue
            nulls[name] = nulls.get(name, 0) + found.null_count
            if found.has_min_max:
                least.setdefault(name, []).append(found.min)
                greatest.setdefault(name, []).append(found.max)
            elif found.num_values:
                unknown.add(name)  # Parquet has no bounds for a long text
    known = {name: (_delta_bound(min(values)), _delta_bound(max(greatest[name]), is_upper=True)) for name, values in least.items()}
    kept = {name: bounds for name, bounds in known.items() if name not in unknown and None not in bounds}
    return {name: bounds[0] for name, bounds in kept.items()}, {name: bounds[1] for name, bounds in kept.items()}, nulls


def _is_integer(column: Any, found: Any) -> bool:
    return column.physical_type in ("INT32", "INT64") and found.logical_type.type in ("NONE", "INT")


def _delta_bound(value: Any, *, is_upper: bool = False) -> Any:
    """Return a bound as Delta Lake writes it (PROTOCOL.md, "Per-file Statistics"); None for a type without usable bounds."""
    if isinstance(value, bool | bytes):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, Decimal):
        return exact_number(str(value))
    if isinstance(value, datetime):  # rounded down to the millisecond for both bounds: readers of Delta tables expect this
        text = value.replace(microsecond=value.microsecond // 1000 * 1000).isoformat(timespec="milliseconds")
        return text.replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if not isinstance(value, str):
        return None
    if len(value) <= _MOST_CHARACTERS:
        return value
    if is_upper and value[_MOST_CHARACTERS] == _GREATEST_CHARACTER:
        return None  # the cut bound would be less than the value, and readers would skip the file
    return value[:_MOST_CHARACTERS] + (_GREATEST_CHARACTER if is_upper else "")


def exact_number(text: str) -> float | None:
    """Return the float that JSON would write as the number ``text``, digit for digit; None if there is no such float."""
    number = float(text)
    return number if Decimal(repr(number)) == Decimal(text) else None
