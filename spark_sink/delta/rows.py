"""Reads rows of Delta tables from their files, with Arrow. No Spark, no Java.

The files use other names for columns than the table. A file from before a column was added or widened lacks it, or has a narrower
type. The list of files and their statistics are in the log (delta/log.py). Rows in a deletion vector are still in the file.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from spark_sink.delta import deletion_vector
from spark_sink.delta.schema import arrow_schema
from spark_sink.files import places
from spark_sink.files.parquet import fitted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    import pyarrow.parquet as pq
    from pyspark.sql.types import StructType

__all__ = [
    "Budget",
    "Flags",
    "Numbers",
    "UnsupportedError",
    "fields_of",
    "files_between",
    "joined",
    "opened_file",
    "present_rows",
    "read_between",
    "read_columns",
    "read_rows",
    "read_where",
    "statistics",
    "uncompressed_bytes",
]

Flags = np.ndarray[Any, np.dtype[np.bool_]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]

_JULIAN: Final = {b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96"}
"""Spark adds one of these to the footer of a file that it writes in the Julian calendar (`...RebaseModeInWrite=LEGACY`)."""


class UnsupportedError(Exception):
    """This client does not support a feature of the table or of a file. Spark has to do the work."""


class Budget:
    """The uncompressed bytes that may still be read. A file may have a thousand times the bytes that it has on disk.

    Several threads may share it: `map_reads` reads files at a time.
    """

    def __init__(self, size: int) -> None:
        self._left = size
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Take off some bytes. Raises UnsupportedError if that many are not left."""
        with self._lock:
            self.check(size)
            self._left -= size

    def check(self, size: int) -> None:
        """Raise UnsupportedError if not so many bytes are left."""
        if size > self._left:
            raise UnsupportedError("many bytes to read")


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

    Raises UnsupportedError, before it reads the columns, if the file has more bytes than the ``budget``.
    """
    with opened_file(directory, file, coerce_int96_timestamp_unit="us") as opened:
        if budget is not None:
            budget.take(_uncompressed_bytes(opened))
        rows, count = opened.read(columns=_paths(opened, fields)), opened.metadata.num_rows
    return _fitted(rows, fields, count)


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
        name: _column(rows[field.name].combine_chunks(), field.type) if field.name in present else pa.nulls(count, field.type)
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


def uncompressed_bytes(directory: Path, file: Mapping[str, Any]) -> int:
    """Return the uncompressed size of a file."""
    with opened_file(directory, file) as opened:
        return _uncompressed_bytes(opened)


def _uncompressed_bytes(opened: pq.ParquetFile) -> int:
    return sum(opened.metadata.row_group(number).total_byte_size for number in range(opened.metadata.num_row_groups))


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

    Raises UnsupportedError as `read_columns` does.
    """
    rows = read_columns(directory, file, fields, budget)
    number = rows[name].to_numpy()
    wanted = (number > after) & (number <= until) & present_rows(directory, file, len(number))
    return rows if wanted.all() else {each: values.filter(pa.array(wanted)) for each, values in rows.items()}


def read_where(
    directory: Path,
    file: Mapping[str, Any],
    fields: Mapping[str, pa.Field],
    names: Collection[str],
    is_wanted: Callable[[dict[str, pa.Array]], Flags],
    budget: Budget,
) -> dict[str, pa.Array]:
    """Read the rows of a file that are part of the table and for which ``is_wanted``, given the columns ``names``, returns True.

    This reads one row group at a time, and of the other columns only those of row groups with wanted rows. So a large file needs no
    more memory than its wanted rows, whose bytes in memory the ``budget`` counts. Raises UnsupportedError as `read_columns` does.
    """
    parts, first = [], 0
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
                rows |= _fitted(opened.read_row_group(number, _paths(opened, others)), others, count)
                parts.append({name: values.filter(pa.array(wanted)) for name, values in rows.items()})
                budget.take(sum(values.nbytes for values in parts[-1].values()))
    return {name: joined([part[name] for part in parts], field.type) for name, field in fields.items()}


def read_rows(
    directory: Path, file: Mapping[str, Any], fields: Mapping[str, pa.Field], rows: Numbers, budget: Budget
) -> dict[str, pa.Array]:
    """Read some rows of a file: those with the numbers ``rows``, which ascend. Reads only row groups with such rows, one at a time.

    The ``budget`` counts the bytes of these rows in memory, and none of the row groups may have more than is left. Raises
    UnsupportedError as `read_columns` does.
    """
    parts, first = [], 0
    with opened_file(directory, file, coerce_int96_timestamp_unit="us") as opened:
        for number in range(opened.metadata.num_row_groups):
            group = opened.metadata.row_group(number)
            begin, end = np.searchsorted(rows, (first, first + group.num_rows))
            if begin < end:
                budget.check(group.total_byte_size)
                values = _fitted(opened.read_row_group(number, _paths(opened, fields)), fields, group.num_rows)
                wanted = pa.array(rows[begin:end] - first)
                parts.append({name: each.take(wanted) for name, each in values.items()})
                budget.take(sum(each.nbytes for each in parts[-1].values()))
            first += group.num_rows
    return {name: joined([part[name] for part in parts], field.type) for name, field in fields.items()}


def joined(arrays: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    """Return the values of several arrays of a type, in one array."""
    return pa.concat_arrays(arrays) if arrays else pa.nulls(0, kind)
