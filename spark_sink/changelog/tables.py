"""Changelog tables: append-only, every change once, in either table format.

Rows are in the typed layout of the data source (source/datasource.py): the table's columns, then the ``_cdc_`` columns. They come
as files, written in the table's directory, which a commit makes part of it when their rows have been counted. A column that is
new is added; one that was dropped stays, NULL from then on; with Delta Lake one whose type became wider is widened, and one whose
type changed otherwise goes on under another name beside the old one (types.versioned_name). No file is written anew.

With Delta Lake an append records the position that it reaches, and is skipped if the table has it already. With Parquet it
is a directory ``_cdc_batch=EPOCH-START-END``, put together under a hidden name and renamed: the directory's name is the record.
It has the files that were named by those who wrote them, and no others: Spark may run a task twice, and the second attempt may
still be writing, next to the first one's file, when the commit is made.
So a reader sees all of an append or nothing, in both, and an append made twice leaves the rows of one. A snapshot of a table
that has a changelog (snapshot/table.py) is a commit beside the appends, and records no position; with Parquet it is a directory
``_cdc_batch=EPOCH-LSN-LSN-snapshot``.

The logical messages have a changelog of their own (`warehouse.MESSAGES`), with the data source's columns for them.
"""

from __future__ import annotations

import re
import secrets
import shutil
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from cdcpipe.lsn import format_lsn
from spark_sink.delta import commit as delta_files
from spark_sink.delta import sql as delta
from spark_sink.delta.log import commits
from spark_sink.delta.sql import State
from spark_sink.files import places as storage
from spark_sink.files.local import fsync_directory
from spark_sink.files.parquet import FileWriter, Layout
from spark_sink.schema.types import split_schema, typed_schema
from spark_sink.warehouse.warehouse import WarehouseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from spark_sink.delta.commit import FileTable
    from spark_sink.files.parquet import WrittenFile
    from spark_sink.schema.table import Table
    from spark_sink.staging.log import Position
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = [
    "Files",
    "add_batch",
    "append",
    "batch_name",
    "batches_before",
    "commit_files",
    "exists",
    "open_files",
    "parquet_lsn",
    "properties",
    "read",
    "read_as_is",
    "snapshot_name",
    "state",
]

_INDEXED_COLUMNS = 32
"""Of so many columns, the first ones, Delta Lake keeps the least and the greatest value per file."""

BATCH_COLUMN = "_cdc_batch"
_BATCH_NAME = re.compile(rf"{BATCH_COLUMN}=([0-9]{{6,9}})-([0-9A-F]{{16}})-([0-9A-F]{{16}})", re.ASCII)
_SNAPSHOT_SUFFIX = "-snapshot"
_WRITING, _GATHERED = "_writing", "_gathered"
"""Directories beside the appends of a Parquet changelog: of files that tasks write, and of those that are to be an append."""


def exists(warehouse: Warehouse, table: Table) -> bool:
    """Tell whether the table has a changelog, if only an empty one."""
    path = warehouse.changelog(table)
    return delta.exists(path) if warehouse.format == "delta" else bool(_batches(path))


def state(spark: SparkSession, warehouse: Warehouse, table: Table) -> State | None:
    """Return the changelog's columns and the LSN up to which it has the table's changes; None if there is none yet."""
    path = warehouse.changelog(table)
    if warehouse.format == "delta":
        return delta.state(path)
    batches = _batches(path)
    if not batches:
        return None
    return State(_parquet_schema(spark, path, batches), batches[-1][0])


def _parquet_schema(spark: SparkSession, path: Path, batches: Sequence[tuple[int, Path]]) -> StructType:
    # Each append has all columns of the ones before it. A snapshot, too; but appends that came later may lie before it.
    schema = spark.read.parquet(str(batches[-1][1])).schema
    for snapshot in path.glob(f"{BATCH_COLUMN}=*{_SNAPSHOT_SUFFIX}"):
        columns, others = (split_schema(each)[0] for each in (schema, spark.read.parquet(str(snapshot)).schema))
        if set(others.names) - set(columns.names):
            schema = typed_schema(StructType([*columns, *(field for field in others if field.name not in columns.names)]))
    return schema


def parquet_lsn(warehouse: Warehouse, table: Table) -> int | None:
    """Return the LSN that a Parquet changelog has reached, None if there is none; without Spark."""
    batches = _batches(warehouse.changelog(table))
    return batches[-1][0] if batches else None


def read(spark: SparkSession, warehouse: Warehouse, table: Table) -> DataFrame:
    """Return all changes as of now."""
    path = warehouse.changelog(table)
    if warehouse.format == "delta":
        return delta.read(spark, path)
    batches = _batches(path)
    if not batches:
        raise WarehouseError(f"there is no changelog of {table} in {warehouse.name}")
    return spark.read.schema(_parquet_schema(spark, path, batches)).parquet(str(path)).drop(BATCH_COLUMN)


def read_as_is(spark: SparkSession, warehouse: Warehouse, table: Table) -> DataFrame:
    """Return all changes as of now; should some be removed later, it shows them all the same, or is an error."""
    path = warehouse.changelog(table)
    if warehouse.format == "delta" and (versions := commits(path)):
        return delta.read_version(spark, path, versions[-1])
    return read(spark, warehouse, table)


@dataclass(slots=True)
class Files:
    """A changelog to which files are added: where they are to be written, in which columns."""

    schema: StructType
    directory: Path
    layout: Layout
    delta: FileTable | None = None


def open_files(spark: SparkSession, warehouse: Warehouse, table: Table, schema: StructType, before: Files | None) -> Files:
    """Make ready for files with these columns; ``before`` is what this returned the last time, if nobody has written since.

    The result's columns are the table's, in its order, and those that are new.
    """
    path = warehouse.changelog(table)
    if warehouse.format != "delta":
        temporary = path / _WRITING
        # What an append that did not come to its end left behind, and tasks that were run twice.
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True, exist_ok=True)
        return Files(schema, temporary, Layout(tuple(schema.names), to_arrow_schema(schema, timezone="UTC")))
    if before is not None and before.delta is not None:
        found = before.delta
    elif delta.exists(path):
        found = delta_files.open_table(path)
    else:
        found = delta_files.define(path, schema, properties(table, schema.names))
    is_widened = delta.widen(spark, path, found.schema, schema)
    if delta.add_columns(spark, path, found.schema, schema) or is_widened:
        found = delta_files.open_table(path)
    storage.make_directory(path)
    return Files(found.schema, path, found.layout(), found)


def commit_files(
    warehouse: Warehouse, table: Table, files: Files, written: Sequence[WrittenFile], start: Position, end: Position, count: int
) -> None:
    """Make the files that have the changes in (start, end] part of the changelog.

    WarehouseError, and nothing is changed, if they do not have ``count`` rows. delta_files.ChangedError if somebody else has
    changed the table's columns.
    """
    rows = sum(file.rows for file in written)
    if rows != count:
        raise WarehouseError(_wrong_count(table, rows, count, end), hint="nothing of it was kept; report it")
    if files.delta is not None:
        delta_files.commit(files.delta, written, end)
    else:
        add_batch(warehouse, table, batch_name(start, end), files.directory, written)
        storage.remove_tree(files.directory)  # a purge would not find these files there


def add_batch(warehouse: Warehouse, table: Table, name: str, source: Path, files: Iterable[WrittenFile]) -> None:
    """Make files of a directory, no others that lie there, an append ``name`` of a Parquet changelog, all at once.

    They stay where they were, too, so that an attempt that is killed here can be made again.
    """
    path = warehouse.changelog(table)
    gathered = path / _GATHERED
    shutil.rmtree(gathered, ignore_errors=True)  # of an attempt that did not come to its end
    gathered.mkdir(parents=True)
    storage.copy_files(source, gathered, (file.name for file in files))
    fsync_directory(gathered)
    gathered.rename(path / name)
    fsync_directory(path)


def append(
    spark: SparkSession, warehouse: Warehouse, table: Table, rows: pa.Table, schema: StructType, start: Position, end: Position
) -> None:
    """Append rows that this process has, of the changes in (start, end]."""
    files = open_files(spark, warehouse, table, schema, None)
    writer = FileWriter(storage.name(files.directory), f"part-{secrets.token_hex(16)}.parquet", files.layout)
    for batch in rows.to_batches():
        writer.write_batch(batch)
    commit_files(warehouse, table, files, [writer.close()], start, end, rows.num_rows)


def properties(table: Table, columns: Sequence[str]) -> dict[str, str]:
    """Return the properties of a Delta changelog."""
    # Whoever reads what is new has to find it by its position, however wide the table is.
    indexed = max(_INDEXED_COLUMNS, list(columns).index("_cdc_end_lsn") + 1)
    return {"cdcpipe.table": str(table), "delta.dataSkippingNumIndexedCols": str(indexed)}


def batch_name(start: Position, end: Position) -> str:
    """Return the name of the directory of an append to a Parquet changelog."""
    return f"{BATCH_COLUMN}={end.epoch:06d}-{start.lsn:016X}-{end.lsn:016X}"


def snapshot_name(position: Position) -> str:
    """Return the name of the directory of a snapshot that came to a Parquet changelog later."""
    return batch_name(position, position) + _SNAPSHOT_SUFFIX


def batches_before(warehouse: Warehouse, table: Table, lsn: int) -> list[tuple[int, Path]]:
    """Return the appends, and snapshots, of a Parquet changelog that end at or before ``lsn``, each with its end.

    Not the newest append, whatever its end: it says how far the changelog is.
    """
    path = warehouse.changelog(table)
    newest = [entry for _, entry in _batches(path)[-1:]]
    found = [(_BATCH_NAME.match(entry.name), entry) for entry in path.glob(f"{BATCH_COLUMN}=*") if entry not in newest]
    ends = [(int(match[3], 16), entry) for match, entry in found if match is not None]
    return sorted((end_lsn, entry) for end_lsn, entry in ends if end_lsn <= lsn)


def _wrong_count(table: Table, written: int, count: int, end: Position) -> str:
    return f"{written} rows were written to the changelog of {table} up to {end}, where the segments have {count} changes"


def _batches(path: Path) -> list[tuple[int, Path]]:
    """Return the appends of a Parquet changelog, in order, with the LSN that each reaches."""
    if not path.is_dir():
        return []
    found = []
    for entry in path.iterdir():
        match = _BATCH_NAME.fullmatch(entry.name)
        if match is not None:
            found.append((int(match[2], 16), int(match[3], 16), entry))
    found.sort()
    for (_, end_lsn, _), (start_lsn, _, entry) in pairwise(found):
        if start_lsn < end_lsn:
            raise WarehouseError(f"{entry} begins before {format_lsn(end_lsn)}, where the append before it ends")
    return [(end_lsn, entry) for _, end_lsn, entry in found]
