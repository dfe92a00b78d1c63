"""Reads rows of Delta tables from their files, with Arrow. No Spark, no Java.

The files use other names for columns than the table. A file from before a column was added or widened lacks it, or has a narrower
type. The list of files and their statistics are in the log (delta/log.py). Rows in a deletion vector are still in the file.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from spark_sink.delta import deletion_vector
from spark_sink.delta.schema import arrow_schema
from spark_sink.files import places
from spark_sink.files.parquet import fitted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow.parquet as pq
    from pyspark.sql.types import StructType

    _Batch: TypeAlias = tuple[dict[str, pa.Array], int]

__all__ = [
    "Budget",
    "Flags",
    "ManyBytesError",
    "Numbers",
    "UnsupportedError",
    "encoded_bytes",
    "fields_of",
    "files_between",
    "joined",
    "opened_file",
    "present_rows",
    "read_batches",
    "read_between",
    "read_columns",
    "read_rows",
    "read_where",
    "record_batches",
    "statistics",
]

Flags = np.ndarray[Any, np.dtype[np.bool_]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]

_JULIAN: Final = {b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96"}
"""Spark adds one of these to the footer of a file that it writes in the Julian calendar (`...RebaseModeInWrite=LEGACY`)."""


_BATCH_ROWS: Final = 1 << 13
"""So many rows are read at a time."""


class UnsupportedError(Exception):
    """This client does not support a feature of the table or of a file. Spark has to do the work."""


class ManyBytesError(UnsupportedError):
    """The values to read take more memory than the `Budget` has."""


class Budget:
    """The bytes of values in memory that may still be read.

    Neither the size of a file nor Parquet's "uncompressed" size tells them: values that repeat are in a dictionary, so a file may
    have a thousand times these bytes. So values are read in small batches, and counted in memory. Several threads may share a
    budget: `map_reads` reads files at a time.
    """

    def __init__(self, size: int) -> None:
        self._left = size
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Take off some bytes. Raises ManyBytesError if that many are not left."""
        with self._lock:
            if size > self._left:
                raise ManyBytesError("many bytes to read")
            self._left -= size


def fields_of(physical: StructType, names: Sequence[str]) -> dict[str, pa.Field]:
    """Return the columns as its files have them, by their names in the table."""
    fields = dict(zip(names, arrow_schema(physical), strict=True))
    if any("." in field.name for field in fields.values()):
        raise UnsupportedError("a dot in a column's name")  # Arrow would take it for a field of a struct
    return fields


def read_columns(
    directory: Path, file: Mapping[str, Any], fields: Mapping[str, pa.Field], budget: Budget | None = None
) -> dict[str, pa.Array]:
    """Read columns of a file, in the types of the table. All rows; of a struct only the requested fields.

    Raises ManyBytesError if they take more memory than the ``budget`` has.
    """
    if budget is not None:
        found = _Parts(fields, budget)
        for rows, _ in read_batches(directory, file, fields):
            found.add(rows)
        return found.joined()
    with opened_file(directory, file, coerce_int96_timestamp_unit="us") as opened:
        return _fitted(opened.read(columns=_paths(opened, fields)), fields, opened.metadata.num_rows)


def read_batches(directory: Path, file: Mapping[str, Any], fields: Mapping[str, pa.Field]) -> Iterator[_Batch]:
    """Yield the columns of a file as `read_columns` returns them, some rows at a time, and the number of these rows."""
    with opened_file(directory, file, coerce_int96_timestamp_unit="us") as opened:
        yield from _batches(opened, fields)


def _batches(opened: pq.ParquetFile, fields: Mapping[str, pa.Field], group: int | None = None) -> Iterator[_Batch]:
    """Yield columns of a file, or of one of its row groups, some rows at a time, and the number of these rows."""
    for batch in record_batches(opened, _BATCH_ROWS, _paths(opened, fields), group):
        yield _fitted(pa.Table.from_batches([batch]), fields, len(batch)), len(batch)


def record_batches(opened: pq.ParquetFile, rows: int, columns: Sequence[str], group: int | None = None) -> Iterator[pa.RecordBatch]:
    """Yield columns of a file, or of one of its row groups, at most ``rows`` rows at a time.

    No batch has rows of two row groups. Row groups that cdcpipe writes have few rows if the rows are large. So the batches do, too.
    """
    for number in range(opened.metadata.num_row_groups) if group is None else (group,):
        yield from opened.iter_batches(rows, [number], columns=columns)


class _Parts:
    """Collects the values of columns, in parts, and counts their bytes."""

    def __init__(self, fields: Mapping[str, pa.Field], budget: Budget | None) -> None:
        self._types = {name: field.type for name, field in fields.items()}
        self._parts: dict[str, list[pa.Array]] = {name: [] for name in fields}
        self._budget = budget

    def add(self, columns: Mapping[str, pa.Array]) -> None:
        if self._budget is not None:
            self._budget.take(_size(columns))
        for name, values in columns.items():
            self._parts[name].append(values)

    def joined(self) -> dict[str, pa.Array]:
        """Return the columns. Gives the parts away, so that the values of one column at a time are in memory twice."""
        return {name: joined(self._parts.pop(name), kind) for name, kind in self._types.items()}


def _size(columns: Mapping[str, pa.Array]) -> int:
    return sum(values.nbytes for values in columns.values())


def _where(columns: Mapping[str, pa.Array], flags: Flags) -> dict[str, pa.Array]:
    """Return the rows that have a flag."""
    return dict(columns) if flags.all() else {name: values.filter(pa.array(flags)) for name, values in columns.items()}


def _paths(opened: pq.ParquetFile, fields: Mapping[str, pa.Field]) -> list[str]:
    """Return what to read for the columns, without those that the file lacks: they are null in all its rows."""
    present = {field.name: field.type for field in opened.schema_arrow}
    paths = []
    for field in fields.values():
        if field.name not in present:
            continue
        if not pa.types.is_struct(field.type):
            paths.append(field.name)
        elif not {child.name for child in field.type} <= {child.name for child in present[field.name]}:
            raise UnsupportedError("a file from before a column of the key")
        else:
            paths += [f"{field.name}.{child.name}" for child in field.type]
    return paths


def _fitted(rows: pa.Table, fields: Mapping[str, pa.Field], count: int) -> dict[str, pa.Array]:
    """Return the columns of ``count`` rows in the types of the table."""
    present = set(rows.column_names)
    return {
        name: _column(joined(rows[field.name].chunks, rows[field.name].type), field.type)
        if field.name in present
        else pa.nulls(count, field.type)
        for name, field in fields.items()
    }


def opened_file(directory: Path, file: Mapping[str, Any], **options: Any) -> pq.ParquetFile:
    """Open a file of the table.

    Raises UnsupportedError if its days and times are in the Julian calendar: Arrow would take them for Gregorian ones.
    """
    opened = places.parquet_reader(directory / unquote(str(file["path"])), int(file["size"]), **options)
    if _JULIAN & (opened.metadata.metadata or {}).keys():
        opened.close()
        raise UnsupportedError("a file with days and times in the Julian calendar")
    return opened


def _column(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if not pa.types.is_struct(kind):
        return fitted(array, kind)
    children = [fitted(array.field(child.name), child.type) for child in kind]  # the file may have another order
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null())


def present_rows(directory: Path, file: Mapping[str, Any], count: int) -> Flags:
    """Return for each row of a file whether it is part of the table."""
    present = np.ones(count, dtype=bool)
    if (vector := file.get("deletionVector")) is not None:
        present[deletion_vector.read(directory, vector)] = False
    return present


def encoded_bytes(directory: Path, file: Mapping[str, Any]) -> int:
    """Return the uncompressed size of a file. This is no bound for the memory that its values take (`Budget`)."""
    with opened_file(directory, file) as opened:
        return sum(int(opened.metadata.row_group(number).total_byte_size) for number in range(opened.metadata.num_row_groups))


def statistics(file: Mapping[str, Any]) -> dict[str, Any]:
    """Return the log's statistics of a file, ``numRecords`` among them. Columns have their names in the file."""
    found: dict[str, Any] = json.loads(file.get("stats") or "{}")
    if "numRecords" not in found:
        raise UnsupportedError("a file without statistics")
    return found


def files_between(files: Iterable[Mapping[str, Any]], column: str, after: int, until: int) -> list[Mapping[str, Any]]:
    """Return the files that may have rows with a number in (after, until] in ``column``, which is a name in the files."""
    found = []
    for file in files:
        known = statistics(file)
        least, greatest = (known.get(kind, {}).get(column) for kind in ("minValues", "maxValues"))
        if least is None or (least <= until and greatest > after):
            found.append(file)
    return found


def read_between(
    directory: Path,
    file: Mapping[str, Any],
    fields: Mapping[str, pa.Field],
    name: str,
    after: int,
    until: int,
    budget: Budget | None = None,
) -> dict[str, pa.Array]:
    """Read the rows of a file that are part of the table and have a number in (after, until] in the column ``name``.

    The ``budget`` counts only these rows. Raises ManyBytesError as `read_columns` does.
    """
    found, first = _Parts(fields, budget), 0
    with opened_file(directory, file, coerce_int96_timestamp_unit="us") as opened:
        present = present_rows(directory, file, opened.metadata.num_rows)
        for rows, count in _batches(opened, fields):
            number = rows[name].to_numpy()
            found.add(_where(rows, (number > after) & (number <= until) & present[first : first + count]))
            first += count
    return found.joined()


def read_where(
    directory: Path,
    file: Mapping[str, Any],
    fields: Mapping[str, pa.Field],
    names: Collection[str],
    is_wanted: Callable[[dict[str, pa.Array]], Flags],
    budget: Budget,
) -> dict[str, pa.Array]:
    """Read the rows of a file that are part of the table and for which ``is_wanted``, given the columns ``names``, returns True.

    This reads the columns ``names`` of one row group at a time, and the other columns only of row groups with wanted rows. So a
    large file needs no more memory than its wanted rows, whose bytes in memory the ``budget`` counts. Raises ManyBytesError as
    `read_columns` does.
    """
    found, first = _Parts(fields, budget), 0
    tested = {name: fields[name] for name in names}
    others = {name: field for name, field in fields.items() if name not in tested}
    with opened_file(directory, file, coerce_int96_timestamp_unit="us") as opened:
        present = present_rows(directory, file, opened.metadata.num_rows)
        for number in range(opened.metadata.num_row_groups):
            count = opened.metadata.row_group(number).num_rows
            rows = _fitted(opened.read_row_group(number, _paths(opened, tested)), tested, count)
            wanted = is_wanted(rows) & present[first : first + count]
            first += count
            if wanted.any():
                found.add(_where(rows, wanted))
                at = 0
                for batch, size in _batches(opened, others, number):
                    found.add(_where(batch, wanted[at : at + size]))
                    at += size
    return found.joined()


def read_rows(
    directory: Path, file: Mapping[str, Any], fields: Mapping[str, pa.Field], rows: Numbers, budget: Budget
) -> dict[str, pa.Array]:
    """Read some rows of a file: those with the numbers ``rows``, which ascend. Reads only row groups with such rows, one at a time.

    The ``budget`` counts the bytes of these rows in memory. Raises ManyBytesError as `read_columns` does.
    """
    found, first = _Parts(fields, budget), 0
    with opened_file(directory, file, coerce_int96_timestamp_unit="us") as opened:
        for number in range(opened.metadata.num_row_groups):
            count = opened.metadata.row_group(number).num_rows
            begin, end = np.searchsorted(rows, (first, first + count))
            if begin < end:
                at = first
                for batch, size in _batches(opened, fields, number):
                    begin, end = np.searchsorted(rows, (at, at + size))
                    if begin < end:
                        wanted = pa.array(rows[begin:end] - at)
                        found.add({name: values.take(wanted) for name, values in batch.items()})
                    at += size
            first += count
    return found.joined()


def joined(arrays: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    """Return the values of several arrays of a type, in one array."""
    if len(arrays) == 1:
        return arrays[0]  # pyarrow would copy the values
    return pa.concat_arrays(arrays) if arrays else pa.nulls(0, kind)
