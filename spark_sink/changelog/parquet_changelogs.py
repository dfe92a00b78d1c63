"""Changelogs in Parquet. An append is a directory whose name has its range of LSNs (warehouse/appends.py). Files never change.

A replica is a view over the changelog. So changes of which the current rows are made can't be removed.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from cdcpipe.lsn import format_lsn
from spark_sink.changelog.interface import Changelogs, ChangelogState, Files, NewTable, OldChanges
from spark_sink.files import places
from spark_sink.files.parquet import FileWriter, Layout, part_name
from spark_sink.schema.table import has_key
from spark_sink.schema.types import ENDS, split_schema, typed_schema
from spark_sink.spark.sql import only, quote
from spark_sink.warehouse import appends
from spark_sink.warehouse.errors import WarehouseError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame

    from spark_sink.files.parquet import WrittenFile
    from spark_sink.schema.table import Table
    from spark_sink.staging.log import Position
    from spark_sink.warehouse.appends import Append
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["ParquetChangelogs"]

_STATUS_HINT = "cdcpipe-spark status --warehouse DIR shows the tables that are there"


class ParquetChangelogs(Changelogs[Files]):
    """The changelogs of a warehouse in Parquet."""

    def state(self, table: Table) -> ChangelogState | None:
        """Read the position from the name of the newest append, and the columns from its files."""
        path = self._warehouse.changelog(table)
        found = appends.list_appends(path)
        return ChangelogState(self._schema(path, found[-1]), found[-1].end_lsn) if found else None

    def _schema(self, path: Path, newest: Append) -> StructType:
        # Each append has all columns of the appends before it. So does a snapshot; but an append that came later may be placed
        # before it, and lack its columns.
        schema = self._schema_of(newest.path)
        for snapshot in appends.list_snapshots(path):
            columns, others = (split_schema(each)[0] for each in (schema, self._schema_of(snapshot)))
            if set(others.names) - set(columns.names):
                schema = typed_schema(StructType([*columns, *(field for field in others if field.name not in columns.names)]))
        return schema

    def _schema_of(self, path: Path) -> StructType:
        """Return an append's columns from the footer of one of its files. Spark would start a job for this."""
        return from_arrow_schema(pq.read_schema(next(path.glob("*.parquet"))), prefer_timestamp_ntz=True)

    def read(self, table: Table) -> DataFrame:
        """Read all appends, with all the columns that they have together. If a file is removed later, reading raises an error."""
        path, schema = self._warehouse.changelog(table), self._columns_of(table)
        while True:
            # Spark lists the files here, and keeps this list. An append that has come since the columns were read may have others.
            rows = self._spark.read.schema(schema).option("recursiveFileLookup", "true").parquet(only(str(path)))
            before, schema = schema, self._columns_of(table)
            if schema == before:
                return rows

    def _columns_of(self, table: Table) -> StructType:
        state = self.state(table)
        if state is None:
            raise WarehouseError(f"there is no changelog of {table} in {self._warehouse.name}", hint=_STATUS_HINT)
        return state.schema

    def open_files(self, table: Table, schema: StructType, before: Files | None = None) -> Files:  # noqa: ARG002
        """Create an empty directory for the files."""
        directory = appends.make_writing_directory(self._warehouse.changelog(table))
        return Files(schema, directory, _layout(schema))

    def _commit(self, files: Files, written: Sequence[WrittenFile], start: Position, end: Position) -> None:
        # An append without a file would have no columns.
        written = written or [FileWriter(places.name(files.directory), part_name(), files.layout).close()]
        _add(files.directory.parent, appends.append_name(start, end), files.directory, written)
        places.remove_tree(files.directory)  # a purge would not find these files there

    def new_table(
        self,
        table: Table,
        columns: StructType,
        directory: Path,
        replica_properties: Mapping[str, str] | None,  # noqa: ARG002 - there are no replicas
        definition: Sequence[Mapping[str, Any]],  # noqa: ARG002 - nothing is generated
    ) -> NewTable:
        """Begin with the directory of the first append."""
        return _NewParquetTable(self._warehouse.changelog(table), directory, _layout(typed_schema(columns)))

    def snapshot_layout(self, table: Table, schema: StructType) -> Layout:  # noqa: ARG002
        """Change nothing: each append has its own columns."""
        return _layout(schema)

    def add_snapshot(self, table: Table, directory: Path, files: Sequence[WrittenFile], position: Position) -> None:
        """Copy the files to an append."""
        _add(self._warehouse.changelog(table), appends.snapshot_name(position), directory, files)

    def old_changes(self, table: Table, lsn: int) -> OldChanges:
        """Return the old appends."""
        return _OldParquetChanges(self._warehouse, table, lsn, self.read(table))

    def naming_sql(self, name: str, path: Path) -> str:
        """Name a view that reads the table's directory."""
        # Each append has all columns of the appends before it. The view has the columns of all of them.
        return (
            f"CREATE VIEW IF NOT EXISTS {name} WITH SCHEMA EVOLUTION AS SELECT * "
            f"FROM parquet.{quote(only(str(path)))} WITH (mergeSchema = 'true', recursiveFileLookup = 'true')"
        )


def _layout(schema: StructType) -> Layout:
    return Layout(tuple(schema.names), to_arrow_schema(schema, timezone="UTC"))


def _add(path: Path, name: str, directory: Path, files: Sequence[WrittenFile]) -> None:
    appends.add_append(path, name, directory, (file.name for file in files))


class _NewParquetTable(NewTable):
    """A new table. Its files become its first append."""

    def __init__(self, path: Path, directory: Path, layout: Layout) -> None:
        self.directory = directory
        self.layout = layout
        self._path = path
        self._append: tuple[str, Sequence[WrittenFile]] | None = None
        places.make_directory(directory)

    def prepare(self, files: Sequence[WrittenFile], position: Position, *, with_replica: bool) -> None:  # noqa: ARG002
        # An append without a file would have no columns.
        files = files or [FileWriter(places.name(self.directory), part_name(), self.layout).close()]
        self._append = appends.append_name(position, position), files

    def land(self) -> None:
        assert self._append is not None
        name, files = self._append
        _add(self._path, name, self.directory, files)


class _OldParquetChanges(OldChanges):
    """The old changes of a Parquet changelog, as whole appends.

    An append with later changes stays. So does the newest one, because its name has the changelog's position.
    """

    def __init__(self, warehouse: Warehouse, table: Table, lsn: int, changes: DataFrame) -> None:
        self.table = table
        self._path = warehouse.changelog(table)
        self._appends = appends.list_before(self._path, lsn)
        self.lsn = max((append.end_lsn for append in self._appends), default=0)
        self.rows = sum(pq.read_metadata(file).num_rows for append in self._appends for file in append.path.glob("*.parquet"))
        end_lsn = F.col("_cdc_end_lsn")
        self.kept = changes.where(end_lsn <= lsn).count() - self.rows
        self.reason = "they are in one append with later ones, or in the newest"
        is_beginning = F.col("_cdc_op").isin("snapshot", *ENDS)
        self._is_needed = has_key(warehouse.versions(table))
        self._beginning: int | None = None
        if self._is_needed:  # (logical messages have no operation)
            self._beginning = changes.where(is_beginning).agg(F.max(end_lsn)).collect()[0][0]

    def check(self) -> None:
        """Raise WarehouseError if the current rows are made of changes that would be removed."""
        if self.rows and self._is_needed and (self._beginning is None or self._beginning <= self.lsn):
            since = "" if self._beginning is None else f" since {format_lsn(self._beginning)}"
            raise WarehouseError(
                f"the current rows of {self.table} are made of all changes{since}: with Parquet these can't be removed",
                hint=f"run {self.table.copying}, and then purge the changes before that snapshot",
            )

    def remove(self) -> None:
        """Remove the appends. A reader sees each append completely or not at all."""
        going = self._path / "_purged"
        shutil.rmtree(going, ignore_errors=True)  # left by a killed purge
        going.mkdir()
        for append in self._appends:
            if append.path.is_dir():  # otherwise another purge has just removed it
                append.path.rename(going / append.path.name)
        shutil.rmtree(going)
