"""One table of a snapshot -> a changelog and a replica that appear whole.

The files are written by executors (snapshot_reader.py) into a directory beside the tables; with Delta Lake it is a Delta table
there already, made empty by Delta itself; a commit then adds the files. Renamed, it is the table: replica first, so
that a changelog is only ever there with all that belongs to it.

A replica whose rows have values that their columns can't hold is made from the changelog instead, like any replica
(replica.apply): such a column of texts is rare, and a file can't be given it afterwards.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.pandas.types import to_arrow_schema

from spark_sink import changelog, delta, replica
from spark_sink.keys import identifying_columns, version_of
from spark_sink.parquet_file import Layout
from spark_sink.snapshot_plan import SnapshotError
from spark_sink.snapshot_reader import ChunkTask, select_columns, write_chunk, write_empty
from spark_sink.types import INEXACT_MESSAGE, as_typed, assign_columns, merge_columns, typed_schema
from spark_sink.warehouse import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from spark_sink.parquet_file import WrittenFile
    from spark_sink.snapshot_plan import TablePlan
    from spark_sink.snapshot_reader import Written
    from spark_sink.staging import Position
    from spark_sink.warehouse import Warehouse

__all__ = ["Copying", "copy_table", "table_of"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copying:
    """What the tables of a snapshot have in common."""

    spark: SparkSession
    warehouse: Warehouse
    scratch: Path
    """A directory on the warehouse's file system."""
    connection: str
    snapshot: str
    position: Position
    time_us: int
    is_utf8: bool
    rows: Any
    chunks: Any
    """Accumulators: what has been copied."""
    is_stopping: Callable[[], bool]


def table_of(plan: TablePlan) -> Table:
    """Return the name of a published table."""
    return Table(plan.relation.namespace, plan.relation.name)


def copy_table(copying: Copying, plan: TablePlan) -> None:
    """Copy a table that has no changelog."""
    table, warehouse = table_of(plan), copying.warehouse
    relation = as_typed(plan.relation, warehouse.types)
    columns = merge_columns(None, [relation])
    names = tuple(field.name for field in assign_columns(columns, relation))
    key = identifying_columns(relation, lambda: plan.primary_key)
    version = version_of(copying.position.lsn, 0, relation, columns, key)
    scratch = copying.scratch / uuid.uuid4().hex
    made = _New(copying.spark, scratch / "changelog", warehouse.format)
    layout = made.create(typed_schema(columns), changelog.properties(table, typed_schema(columns).names))
    made_replica, replica_layout = None, None
    if warehouse.format == "delta" and version.key:
        made_replica = _New(copying.spark, scratch / "replica", warehouse.format)
        replica_layout = made_replica.create(columns, replica.properties(version.key, columns.names))
    tasks = [
        ChunkTask(
            connection=copying.connection,
            snapshot=copying.snapshot,
            chunk=chunk,
            number=number,
            chunk_count=len(plan.chunks),
            condition=plan.condition,
            selects=tuple(select_columns(plan.relation)),
            names=names,
            types=to_arrow_schema(columns, timezone="UTC"),
            epoch=copying.position.epoch,
            lsn=copying.position.lsn,
            time_us=copying.time_us,
            directory=str(made.path),
            layout=layout,
            replica_directory=None if made_replica is None else str(made_replica.path),
            replica_layout=replica_layout,
            is_utf8=copying.is_utf8,
        )
        for number, chunk in enumerate(plan.chunks)
    ]
    written = _run(copying, tasks)
    exact: Counter[str] = sum((Counter(each.exact) for each in written), Counter())
    for name, count in sorted(exact.items()):
        _logger.warning(INEXACT_MESSAGE, table, name, count)
    made.add((each.changelog for each in written), copying.position, layout)
    warehouse.write_versions(table, [version])
    # A replica without a changelog is what is left of an attempt that ended between the two.
    shutil.rmtree(warehouse.replica(table), ignore_errors=True)
    if made_replica is not None and not exact:
        made_replica.add((each.replica for each in written if each.replica is not None), copying.position, layout)
        _move(made_replica.path, warehouse.replica(table))
    target = warehouse.changelog(table)
    if warehouse.format == "parquet":
        target = target / changelog.batch_name(copying.position, copying.position)
    _move(made.path, target)
    if made_replica is not None and exact:
        replica.apply(copying.spark, warehouse, table, copying.position)


def _run(copying: Copying, tasks: list[ChunkTask]) -> list[Written]:
    """Let executors write the chunks."""
    if not tasks:  # a partitioned table without partitions
        return []
    if copying.is_stopping():
        raise SnapshotError("the snapshot was not finished: it was stopped")
    rows, chunks = copying.rows, copying.chunks

    def write(task: ChunkTask) -> Written:
        written = write_chunk(task, rows.add)
        chunks.add(1)
        return written

    found: list[Written] = copying.spark.sparkContext.parallelize(tasks, len(tasks)).map(write).collect()
    return found


class _New:
    """A table that is being made."""

    def __init__(self, spark: SparkSession, path: Path, format: str) -> None:  # noqa: A002 - Spark's own word for it
        self.path = path
        self._spark = spark
        self._is_delta = format == "delta"

    def create(self, schema: StructType, properties: dict[str, str]) -> Layout:
        """Make the table, without rows; return how its files look."""
        physical = schema
        if self._is_delta:
            delta.create_empty(self._spark, self.path, schema, properties)
            physical = delta.physical_schema(self._spark, self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        return Layout(tuple(schema.names), to_arrow_schema(physical, timezone="UTC"))

    def add(self, files: Iterable[WrittenFile], position: Position, layout: Layout) -> None:
        """Make files that lie there part of the table."""
        full = []
        for file in files:
            if file.rows:
                full.append(file)
            else:
                (self.path / file.name).unlink()
        if self._is_delta:
            delta.add_files(self.path, ((f.name, f.size, f.statistics()) for f in full), position)
        elif not full:
            write_empty(str(self.path), layout)  # without a file there are no columns


def _move(made: Path, target: Path) -> None:
    """Put a directory in its place; what is there is no table, but left of a first commit that did not come about."""
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    made.rename(target)
