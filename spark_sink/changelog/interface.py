"""The interface of a table format for changelogs: the abstract class `Changelogs`, and the classes of the objects that it returns.

Each format has a module with subclasses of them: delta_changelogs.py, parquet_changelogs.py. tables.py says what holds for all
formats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from spark_sink.files import places
from spark_sink.files.parquet import FileWriter, part_name
from spark_sink.warehouse.errors import WarehouseError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from spark_sink.files.parquet import Layout, WrittenFile
    from spark_sink.schema.table import Table
    from spark_sink.staging.log import Position
    from spark_sink.warehouse.comments import Comments
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["ChangelogState", "Changelogs", "Files", "NewTable", "OldChanges"]


@dataclass(frozen=True, slots=True)
class ChangelogState:
    """A changelog as it is now: its columns, and the LSN up to which it has the table's changes (0 for none)."""

    schema: StructType
    lsn: int


@dataclass(slots=True)
class Files:
    """A changelog that is ready for new files: the directory to write them to, and their columns."""

    schema: StructType
    directory: Path
    layout: Layout


class NewTable(ABC):
    """A table that a snapshot creates from files: its changelog, and, if the format keeps replicas, a replica of the same files.

    Write the files to ``directory`` in the ``layout``. Another attempt needs the ``definition`` to continue with the same files.
    """

    directory: Path
    layout: Layout
    definition: Sequence[Mapping[str, Any]] = ()

    @abstractmethod
    def prepare(self, files: Sequence[WrittenFile], position: Position, *, with_replica: bool) -> None:
        """Do the work that needs no lock."""

    @abstractmethod
    def land(self) -> None:
        """Put the prepared tables into place, the replica first, so that a changelog never exists without its replica."""


class OldChanges(ABC):
    """The old changes of one changelog: a purge can remove ``rows`` of them, up to ``lsn``. ``kept`` are as old, but stay."""

    table: Table
    lsn: int
    rows: int
    kept: int
    reason: str
    """Why the ``kept`` rows stay."""

    @abstractmethod
    def check(self) -> None:
        """Raise WarehouseError if the current rows still need these changes."""

    @abstractmethod
    def remove(self) -> None:
        """Remove these changes."""


_Files = TypeVar("_Files", bound=Files)


class Changelogs(ABC, Generic[_Files]):
    """The changelogs of one warehouse, in one session."""

    def __init__(self, spark: SparkSession, warehouse: Warehouse) -> None:
        self._spark = spark
        self._warehouse = warehouse

    @abstractmethod
    def state(self, table: Table) -> ChangelogState | None:
        """Return the present state of a changelog; None if there is none yet."""

    @abstractmethod
    def read(self, table: Table) -> DataFrame:
        """Return all changes as of this moment. If some are removed later, reading still returns them, or raises an error."""

    @abstractmethod
    def open_files(self, table: Table, schema: StructType, before: _Files | None = None) -> _Files:
        """Prepare a changelog for files with the columns of ``schema``: the result has the table's columns in order, then new ones.

        ``before`` is the result of the previous call, if nobody else has written since.
        """

    def commit_files(
        self, table: Table, files: _Files, written: Sequence[WrittenFile], start: Position, end: Position, count: int
    ) -> None:
        """Add the files with the changes in (start, end] to the changelog, in one step that also records ``end``.

        Raises WarehouseError, and changes nothing, if the files do not have ``count`` rows. Raises delta.file_table.ChangedError if
        another program has changed the table's columns.
        """
        rows = sum(file.rows for file in written)
        if rows != count:
            raise WarehouseError(
                f"{rows} rows were written for the changelog of {table} up to {end}, but the segments have {count} changes",
                hint="none of these rows were added; please report this",
            )
        self._commit(files, written, start, end)

    @abstractmethod
    def _commit(self, files: _Files, written: Sequence[WrittenFile], start: Position, end: Position) -> None:
        """Add files to the changelog. Their number of rows has been checked."""

    def append(self, table: Table, rows: pa.Table, schema: StructType, start: Position, end: Position) -> None:
        """Append rows that are in memory, with the changes in (start, end]."""
        files = self.open_files(table, schema)
        writer = FileWriter(places.name(files.directory), part_name(), files.layout)
        for batch in rows.to_batches():
            writer.write_batch(batch)
        self.commit_files(table, files, [writer.close()], start, end, rows.num_rows)

    # --- snapshots ---

    @abstractmethod
    def new_table(
        self,
        table: Table,
        columns: StructType,
        directory: Path,
        replica_properties: Mapping[str, str] | None,
        definition: Sequence[Mapping[str, Any]],
    ) -> NewTable:
        """Begin a table with these columns in a directory: its final place, or a directory that can be renamed to it.

        With ``replica_properties`` a replica is created, too. ``definition`` is that of a previous attempt, or empty.
        """

    @abstractmethod
    def snapshot_layout(self, table: Table, schema: StructType) -> Layout:
        """Add the columns of a snapshot to a changelog. Returns the layout of the snapshot's files."""

    @abstractmethod
    def add_snapshot(self, table: Table, directory: Path, files: Sequence[WrittenFile], position: Position) -> None:
        """Add the files of a snapshot at ``position`` from a directory to a changelog, all in one step."""

    # --- others ---

    def comment(self, table: Table, comments: Comments) -> None:
        """Give the changelog these comments, if the format has comments."""

    def has_none_before(self, table: Table, place: int | datetime) -> bool:  # noqa: ARG002 - only one of several formats looks
        """Tell whether a changelog has no change before an LSN or a time, as far as facts about its files tell, without Spark."""
        return False

    @abstractmethod
    def old_changes(self, table: Table, lsn: int) -> OldChanges:
        """Return the changes of a changelog up to ``lsn``, to be removed as far as they are not needed."""

    @abstractmethod
    def naming_sql(self, name: str, path: Path) -> str:
        """Return the SQL statement that gives the table at ``path`` a (quoted) name in a catalog, unless the name exists."""
