"""Arrow columns -> a Parquet file of a changelog or a replica, with what its table has to know of it. No Spark.

Spark's way there goes through the JVM, as rows, and takes several times as long.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from spark_sink.files import places as storage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["FileWriter", "Layout", "WrittenFile", "exact_number", "fitted"]

_SAMPLE_ROWS: Final = 1000
_MOST_CHARACTERS: Final = 32
_GREATEST_CHARACTER: Final = "\U0010ffff"
"""So long is a bound that is a text; a longer one is cut off there, the greatest value with this put behind it."""

# Spark takes days before 1582 for another calendar's, unless the file says that a newer Spark has written it.
_FILE_METADATA: Final = {"org.apache.spark.version": "4.2.0"}


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a file, in order: as the table calls them, and as the file does (with Delta Lake they differ)."""

    names: tuple[str, ...]
    schema: pa.Schema
    clustering: tuple[str, ...] = ()
    """Columns, by the file's names, of which Delta Lake wants least and greatest value whatever their type (`_as_noted`)."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A Parquet file: its name in its directory, and what it holds; least and greatest value by the file's names of columns."""

    name: str
    size: int
    rows: int
    minimum: dict[str, Any]
    maximum: dict[str, Any]
    nulls: dict[str, int]

    def statistics(self, names: Collection[str]) -> dict[str, Any]:
        """Return what Delta Lake notes of a file, of the columns that have these names in it."""
        found = {"minValues": self.minimum, "maxValues": self.maximum, "nullCount": self.nulls}
        return {"numRecords": self.rows} | {
            key: {name: value for name, value in values.items() if name in names} for key, values in found.items()
        }


class FileWriter:
    """Writes batches of columns to one Parquet file."""

    def __init__(self, directory: str, name: str, layout: Layout) -> None:
        self._path = storage.place(directory) / name
        self._layout = layout
        self._rows = 0
        self._collected: list[Any] = []
        self._writer: Any = None

    def write(self, arrays: dict[str, pa.Array], count: int) -> None:
        """Write the layout's columns; what there is nothing for is null."""
        columns = [
            fitted(arrays[name], field.type) if name in arrays else pa.nulls(count, field.type)
            for name, field in zip(self._layout.names, self._layout.schema, strict=True)
        ]
        if self._writer is None:
            self._writer = self._open(columns)
        with self._abandoned_on_error():
            self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._layout.schema))
        self._rows += count

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Write a batch whose columns have the layout's names."""
        self.write(dict(zip(batch.schema.names, batch.columns, strict=True)), len(batch))

    def _open(self, columns: list[pa.Array]) -> Any:
        """Begin the file. Dictionaries, half of the cost of writing, are for columns whose first values repeat."""
        repeated = [field.name for field, array in zip(self._layout.schema, columns, strict=True) if _repeats(array)]
        return storage.parquet_writer(
            self._path,
            self._layout.schema,
            # As quick as snappy at this level, and half the bytes.
            compression="zstd",
            compression_level=1,
            use_dictionary=repeated,
            store_schema=False,
            metadata_collector=self._collected,
        )

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        """Keep pyarrow from ending a file that failed (a full disk) once more when it drops it, and printing that that failed."""
        try:
            yield
        except BaseException:
            self._writer.is_open = False
            raise

    def close(self) -> WrittenFile:
        """End the file and say what is in it."""
        if self._writer is None:
            self._writer = self._open([pa.nulls(0, field.type) for field in self._layout.schema])
        with self._abandoned_on_error():
            self._writer.add_key_value_metadata(_FILE_METADATA)
            self._writer.close()
        # Segments go once a changelog has what was in them: it must not be less durable.
        storage.sync_file(self._path)
        clustering = self._layout.clustering
        minimum, maximum, nulls = _statistics(self._collected[0], clustering) if self._rows else ({}, {}, {})
        return WrittenFile(self._path.name, self._path.stat().st_size, self._rows, minimum, maximum, nulls)


def fitted(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the values in the file's type; the fields of a struct may be called otherwise there."""
    if array.type == kind:
        return array
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        values = fitted(array.values, kind.value_type)
        return pa.ListArray.from_arrays(array.offsets, values, kind, mask=array.is_null() if array.null_count else None)
    if not pa.types.is_struct(kind):
        return array.cast(kind)
    children = [fitted(array.field(number), kind.field(number).type) for number in range(kind.num_fields)]
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null())


def _repeats(array: pa.Array) -> bool:
    """Tell from the first values whether a column has each value twice or more."""
    kind = array.type
    if not (pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_date(kind)):
        return False
    sample = array[:_SAMPLE_ROWS]
    return bool(2 * pc.count_distinct(sample).as_py() <= len(sample))


def _statistics(metadata: Any, clustering: Collection[str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """Return least and greatest value of the integer columns and of some others, and their number of nulls."""
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
                unknown.add(name)  # a long text's
    known = {name: (_as_noted(min(values)), _as_noted(max(greatest[name]), is_upper=True)) for name, values in least.items()}
    kept = {name: bounds for name, bounds in known.items() if name not in unknown and None not in bounds}
    return {name: bounds[0] for name, bounds in kept.items()}, {name: bounds[1] for name, bounds in kept.items()}, nulls


def _is_integer(column: Any, found: Any) -> bool:
    return column.physical_type in ("INT32", "INT64") and found.logical_type.type in ("NONE", "INT")


def _as_noted(value: Any, *, is_upper: bool = False) -> Any:
    """Return a bound as Delta Lake notes it (PROTOCOL.md, "Per-file Statistics"); None for a value that has no bounds there.

    That is also a binary floating-point number: NaN, the greatest of them for Spark, is not among what Parquet has.
    """
    if isinstance(value, bool | float | bytes):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, Decimal):
        return exact_number(str(value))
    if isinstance(value, datetime):  # to the millisecond below, whichever bound it is: readers know that
        text = value.replace(microsecond=value.microsecond // 1000 * 1000).isoformat(timespec="milliseconds")
        return text.replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if not isinstance(value, str):
        return None
    if len(value) <= _MOST_CHARACTERS:
        return value
    return value[:_MOST_CHARACTERS] + (_GREATEST_CHARACTER if is_upper else "")


def exact_number(text: str) -> float | None:
    """Return the float whose text is the same number as a decimal's, None if there is none: JSON has a number exactly, or not."""
    number = float(text)
    return number if Decimal(repr(number)) == Decimal(text) else None
