"""What a table format does for changelogs, as abstract classes: `Changelogs`, and what it returns.

Each format has a module with a subclass of each: delta_changelogs.py, parquet_changelogs.py. tables.py has what all promise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from spark_sink.files import places as storage
from spark_sink.files.parquet import FileWriter, part_name
from spark_sink.warehouse.warehouse import WarehouseError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from spark_sink.files.parquet import Layout, WrittenFile
    from spark_sink.schema.table import Table
    from spark_sink.staging.log import Position
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["ChangelogState", "Changelogs", "Files", "NewTable", "OldChanges"]


@dataclass(frozen=True, slots=True)
class ChangelogState:
    """A changelog as it is now: its columns, and the LSN up to which it has the table's changes (0 for none)."""

    schema: StructType
    lsn: int


@dataclass(slots=True)
class Files:
    """A changelog to which files are added: where they are to be written, in which columns."""

    schema: StructType
    directory: Path
    layout: Layout


class NewTable(ABC):
    """A table that a snapshot makes of files: its changelog, and a replica of the same files, if the format keeps replicas.

    The files are written to ``directory`` in the ``layout``. ``definition`` is what another attempt has to know to go on with them.
    """

    directory: Path
    layout: Layout
    definition: Sequence[Mapping[str, Any]] = ()

    @property
    @abstractmethod
    def makes_replica(self) -> bool:
        """Whether there is to be a replica."""

    @abstractmethod
    def prepare(self, files: Sequence[WrittenFile], position: Position, *, with_replica: bool) -> None:
        """Do what can be done before anybody has to be kept from the tables."""

    @abstractmethod
    def land(self) -> None:
        """Put what is prepared in its place: the replica first, so that a changelog is only ever there with what belongs to it."""


class OldChanges(ABC):
    """What a purge can remove of one changelog: ``rows`` that end at or before ``lsn``. ``kept`` are as old, and stay."""

    table: Table
    lsn: int
    rows: int
    kept: int
    reason: str
    """Why they stay."""

    @abstractmethod
    def check(self) -> None:
        """Raise WarehouseError if something still needs these changes."""

    @abstractmethod
    def remove(self) -> None:
        """Remove them."""


_Files = TypeVar("_Files", bound=Files)


class Changelogs(ABC, Generic[_Files]):
    """The changelogs of one warehouse, in one session."""

    def __init__(self, spark: SparkSession, warehouse: Warehouse) -> None:
        self._spark = spark
        self._warehouse = warehouse

    @abstractmethod
    def state(self, table: Table) -> ChangelogState | None:
        """Return how a changelog is now; None if there is none yet."""

    @abstractmethod
    def read(self, table: Table) -> DataFrame:
        """Return all changes as of now."""

    @abstractmethod
    def read_as_is(self, table: Table) -> DataFrame:
        """Return all changes as of now; should some be removed later, it shows them all the same, or is an error."""

    @abstractmethod
    def open_files(self, table: Table, schema: StructType, before: _Files | None = None) -> _Files:
        """Make ready for files with these columns; ``before`` is what this returned the last time, if nobody has written since.

        The result's columns are the table's, in its order, and those that are new.
        """

    def commit_files(
        self, table: Table, files: _Files, written: Sequence[WrittenFile], start: Position, end: Position, count: int
    ) -> None:
        """Make the files that have the changes in (start, end] part of the changelog.

        WarehouseError, and nothing is changed, if they do not have ``count`` rows. delta.commit.ChangedError if somebody else has
        changed the table's columns.
        """
        rows = sum(file.rows for file in written)
        if rows != count:
            raise WarehouseError(
                f"{rows} rows were written to the changelog of {table} up to {end}, where the segments have {count} changes",
                hint="nothing of it was kept; report it",
            )
        self._commit(files, written, start, end)

    @abstractmethod
    def _commit(self, files: _Files, written: Sequence[WrittenFile], start: Position, end: Position) -> None:
        """Make files part of the changelog, whose number of rows is right."""

    def append(self, table: Table, rows: pa.Table, schema: StructType, start: Position, end: Position) -> None:
        """Append rows that this process has, of the changes in (start, end]."""
        files = self.open_files(table, schema)
        writer = FileWriter(storage.name(files.directory), part_name(), files.layout)
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
        """Begin a table with these columns in a directory: where the changelog will be, or one that can be renamed to that.

        With ``replica_properties`` there is to be a replica. ``definition`` is that of an attempt before, or empty.
        """

    @abstractmethod
    def snapshot_layout(self, table: Table, schema: StructType) -> Layout:
        """Give a changelog the columns of a snapshot that comes to it; return how a file of that looks."""

    @abstractmethod
    def add_snapshot(self, table: Table, directory: Path, files: Sequence[WrittenFile], position: Position) -> None:
        """Make files of a directory, a snapshot at ``position``, part of a changelog, all at once."""

    # --- others ---

    @abstractmethod
    def old_changes(self, table: Table, lsn: int) -> OldChanges:
        """Return what of a changelog can go of all that is not newer than ``lsn``."""

    @abstractmethod
    def naming_sql(self, name: str, path: Path) -> str:
        """Return the statement that gives the table at ``path`` a name, quoted, in a catalog; what is there is left alone."""
