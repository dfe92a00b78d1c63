"""Changelogs in Delta Lake. An append is a commit that records its position. New or wider columns are committed before it.

A replica that a snapshot creates shares the changelog's files, under a second name (a hard link; in a store a copy). Its readers
ignore the columns that only the changelog has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from cdcpipe.lsn import format_lsn
from cdcpipe.retry import RetryPolicy
from spark_sink.changelog.interface import Changelogs, ChangelogState, Files, NewTable, OldChanges
from spark_sink.delta import file_table
from spark_sink.delta import log as delta_log
from spark_sink.delta import sql as delta
from spark_sink.delta.comments import set_comments
from spark_sink.delta.least_values import has_none_before
from spark_sink.delta.schema import INDEXED_COLUMNS
from spark_sink.files import places
from spark_sink.schema.table import has_key
from spark_sink.schema.types import replica_schema, typed_schema
from spark_sink.spark.sql import literal
from spark_sink.warehouse import purged_changes, stored_histories
from spark_sink.warehouse.errors import WarehouseError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from spark_sink.delta.file_table import FileTable
    from spark_sink.files.parquet import Layout, WrittenFile
    from spark_sink.schema.table import Table
    from spark_sink.staging.log import Position
    from spark_sink.warehouse.comments import Comments
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["DeltaChangelogs", "DeltaFiles"]

_CONFLICTS = ("DELTA_CONCURRENT_", "DELTA_METADATA_CHANGED", "DELTA_PROTOCOL_CHANGED")
"""Delta's error texts if another program, which does not take our lock, has rewritten files meanwhile (an OPTIMIZE by hand)."""
_DELETES = RetryPolicy(attempts=5)


@dataclass(slots=True)
class DeltaFiles(Files):
    """Files that are added to a Delta table."""

    table: FileTable


class DeltaChangelogs(Changelogs[DeltaFiles]):
    """The changelogs of a warehouse in Delta Lake."""

    def state(self, table: Table) -> ChangelogState | None:
        """Read the state from the table's log."""
        found = delta.state(self._warehouse.changelog(table))
        return None if found is None else ChangelogState(found.schema, found.lsn)

    def read(self, table: Table) -> DataFrame:
        """Read the newest version of this moment. VACUUM keeps its files for a while."""
        return delta.read_as_is(self._spark, self._warehouse.changelog(table))

    def open_files(self, table: Table, schema: StructType, before: DeltaFiles | None = None) -> DeltaFiles:
        """Add the new columns, and widen those whose type became wider."""
        path = self._warehouse.changelog(table)
        if before is not None:
            found = before.table
        elif delta_log.exists(path):
            found = file_table.open_table(path)
        else:
            found = file_table.define(path, schema, _properties(table, schema))
        is_widened = delta.widen(self._spark, path, found.schema, schema)
        if delta.add_columns(self._spark, path, found.schema, schema) or is_widened:
            found = file_table.open_table(path)
        places.make_directory(path)
        return DeltaFiles(found.schema, path, found.layout(), found)

    def _commit(self, files: DeltaFiles, written: Sequence[WrittenFile], start: Position, end: Position) -> None:
        if files.table.lsn > start.lsn:  # it was opened after the caller had asked how far it is, and has some of the changes
            raise file_table.another_process(files.table.path)
        file_table.commit(files.table, written, end)

    def new_table(
        self,
        table: Table,
        columns: StructType,
        directory: Path,
        replica_properties: Mapping[str, str] | None,
        definition: Sequence[Mapping[str, Any]],
    ) -> NewTable:
        """Define the table, or take the ``definition`` of the previous attempt, because names of columns in files are generated."""
        schema, paths = typed_schema(columns), (self._warehouse.changelog(table), self._warehouse.replica(table))
        if definition:
            made = file_table.defined(directory, definition)
        else:
            made = file_table.define(directory, schema, _properties(table, schema))
        replica = None
        if replica_properties is not None:
            path = paths[1] if directory == paths[0] else directory.with_name("replica")
            replica = file_table.define(
                path, replica_schema(columns, keeps_deleted=self._warehouse.keeps_deleted), replica_properties, like=made
            )
        return _NewDeltaTable(made, replica, paths)

    def snapshot_layout(self, table: Table, schema: StructType) -> Layout:
        """Add columns and widen them, as for an append."""
        return _snapshot_layout(self.open_files(table, schema).table)

    def add_snapshot(self, table: Table, directory: Path, files: Sequence[WrittenFile], position: Position) -> None:
        """Move the files to the table, and commit them without a position.

        This commit ends that the changelog counts as set back (delta/log.py). So first note what RESTORE has taken from it.
        """
        path = self._warehouse.changelog(table)
        end = delta_log.table_end(path)
        if end is not None and end.is_restored:
            purged_changes.record_restored(self._warehouse, table, end.lsn, position.lsn)
            purged_changes.check(self._warehouse, table, position.lsn - 1)
        places.move_files(directory, path, (file.name for file in files))
        file_table.commit(file_table.open_table(path), files, position, is_reached=False)

    def has_none_before(self, table: Table, place: int | datetime) -> bool:
        """Ask the table's log and files."""
        with self._warehouse.logs.newest(self._warehouse.changelog(table)) as log:
            return has_none_before(log, "_cdc_end_lsn" if isinstance(place, int) else "_cdc_commit_time", place)

    def old_changes(self, table: Table, lsn: int) -> OldChanges:
        """Return the old changes that the replica and the stored history have already."""
        changes = None if self.has_none_before(table, lsn + 1) else self.read(table)
        return _OldDeltaChanges(self._spark, self._warehouse, table, lsn, changes)

    def comment(self, table: Table, comments: Comments) -> None:
        """Redefine the table, without Spark."""
        set_comments(self._warehouse.changelog(table), comments.table, comments.columns)

    def naming_sql(self, name: str, path: Path) -> str:
        """Name an external table: the catalog has only its location."""
        return f"CREATE TABLE IF NOT EXISTS {name} USING delta LOCATION {literal(places.name(path))}"


def _properties(table: Table, schema: StructType) -> dict[str, str]:
    # Readers find new changes by their position. So its columns need statistics, however wide the table is.
    indexed = max(INDEXED_COLUMNS, schema.names.index("_cdc_end_lsn") + 1)
    return {"cdcpipe.table": str(table), "delta.dataSkippingNumIndexedCols": str(indexed)}


def _snapshot_layout(table: FileTable) -> Layout:
    # These columns are null in a snapshot's rows, which have no transaction and no old row. They may be half of all columns.
    return table.layout(without=("_cdc_xid", "_cdc_old"))


class _NewDeltaTable(NewTable):
    """A new table. If it is made in its final place, `land` makes its commits; otherwise `prepare` does, and `land` renames it."""

    def __init__(self, table: FileTable, replica: FileTable | None, paths: tuple[Path, Path]) -> None:
        self.directory = table.path
        self.layout = _snapshot_layout(table)
        self.definition = table.definition
        self._table = table
        self._replica = replica
        self._paths = paths
        self._is_moved = table.path != paths[0]
        self._prepared: tuple[Sequence[WrittenFile], Position, FileTable | None] | None = None
        places.make_directory(table.path)

    def prepare(self, files: Sequence[WrittenFile], position: Position, *, with_replica: bool) -> None:
        replica = self._replica if with_replica else None
        if self._is_moved:
            for left in (self.directory.with_name("replica"), self.directory / "_delta_log"):
                places.remove_tree(left)
            places.remove_other_files(self.directory, (file.name for file in files))
            self._commit(files, position, replica)
        self._prepared = files, position, replica

    def land(self) -> None:
        assert self._prepared is not None
        files, position, replica = self._prepared
        if self._is_moved:
            if replica is not None:
                _move(replica.path, self._paths[1])
            _move(self.directory, self._paths[0])
        else:
            self._commit(files, position, replica)

    def _commit(self, files: Sequence[WrittenFile], position: Position, replica: FileTable | None) -> None:
        """Create the replica, if there is one, and then the changelog, both from the same files."""
        if replica is not None:
            places.make_directory(replica.path)
            places.copy_files(self.directory, replica.path, (file.name for file in files))
            file_table.commit(replica, files, position)
        file_table.commit(self._table, files, position)


def _move(made: Path, target: Path) -> None:
    """Rename a directory into its place. A directory that is there is no table: a first commit there did not succeed."""
    places.remove_tree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    made.rename(target)
    places.sync_directory(target.parent)  # what notes that the copy is whole comes later, and is durable itself


class _OldDeltaChanges(OldChanges):
    """The old changes of a Delta changelog. Changes that the replica or the history does not have yet stay.

    ``changes`` are all changes; None if none of them is old.
    """

    def __init__(self, spark: SparkSession, warehouse: Warehouse, table: Table, lsn: int, changes: DataFrame | None) -> None:
        self.table = table
        self._spark = spark
        self._warehouse = warehouse
        self.lsn, self.rows, self.kept, self.reason = 0, 0, 0, ""
        if changes is None:
            return
        (limit, what), end_lsn = self._limit(lsn), F.col("_cdc_end_lsn")
        found = (
            changes.where(end_lsn <= lsn)
            .agg(
                F.count(F.when(end_lsn <= limit, 1)).alias("rows"),
                F.max(F.when(end_lsn <= limit, end_lsn)).alias("last"),
                F.count("*").alias("old"),
            )
            .collect()[0]
        )
        self.lsn = found["last"] or 0
        self.rows = found["rows"]
        self.kept = found["old"] - found["rows"]
        self.reason = f"the {what} is at {format_lsn(limit)}" if limit else f"there is no {what}"

    def _limit(self, lsn: int) -> tuple[int, str]:
        """Return the LSN up to which changes may be removed, and which table has only the changes up to there.

        It is ``lsn``, or that of the replica or of the stored history if it is lower.
        """
        versions = self._warehouse.versions(self.table)
        if not has_key(versions):
            return lsn, "replica"
        limits = [(lsn, "replica"), (delta_log.newest_lsn(self._warehouse.replica(self.table)) or 0, "replica")]
        if self._warehouse.keeps_history:
            history = stored_histories.facts(self._warehouse, self.table)
            limits.append((0 if history is None else history.known_lsn(versions), "history"))
        return min(limits, key=lambda each: each[0])

    def check(self) -> None:
        """Raise WarehouseError if the replica or the history has been set back since, or removed."""
        limit, what = self._limit(self.lsn)
        if limit < self.lsn:
            raise WarehouseError(
                f"the {what} of {self.table} was at {format_lsn(self.lsn)} a moment ago, but now it is before", hint="try again"
            )

    def remove(self) -> None:
        """Delete the rows, in one commit."""
        path = self._warehouse.changelog(self.table)
        _DELETES.call(
            lambda: self._spark.sql(f"DELETE FROM {delta.table_name(path)} WHERE _cdc_end_lsn <= {self.lsn}").collect(),
            Exception,
            where=lambda ex: any(conflict in str(ex) for conflict in _CONFLICTS),
        )
