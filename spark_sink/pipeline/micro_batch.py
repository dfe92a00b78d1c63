"""One micro-batch: a range of the staging log comes to the changelogs.

    tables = KnownTables(spark, warehouse, history, published)     # stays from one micro-batch to the next
    batch = MicroBatch(tables, segments)
    batch.append()                                                 # whoever calls it holds the right to append (warehouse/lock.py)

The driver finds in the segments' indexes which tables they change, and how those look there. Executors read each such table's
changes typed, with the schema that the table has then, and write them to files of its changelog, all tables in one job
(changelog/writer.py). So a running query lives through ADD, DROP and RENAME COLUMN and changes of type. Logical messages have a
changelog of their own; a micro-batch without any has nothing to do for them. Without a schema change, a micro-batch does not touch
the schema history.

Nothing twice, nothing missing: a table's commit records the position that it reaches, and a table goes on from its own position
whatever the micro-batch is.
"""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdcpipe.retry import RetryPolicy
from spark_sink.changelog import writer as segment_writer
from spark_sink.changelog.interface import ChangelogState
from spark_sink.changelog.tables import changelogs_of
from spark_sink.changelog.versions import TableVersions
from spark_sink.changelog.writer import Target
from spark_sink.client.keyless import keyless_text
from spark_sink.delta.commit import ChangedError
from spark_sink.files import places as storage
from spark_sink.schema.table import MESSAGES, has_key
from spark_sink.schema.types import (
    INEXACT_MESSAGE,
    MESSAGE_SCHEMA,
    as_typed,
    assign_columns,
    merge_columns,
    split_schema,
    typed_schema,
)
from spark_sink.source.contents import read_contents
from spark_sink.source.server import Origin
from spark_sink.staging.log import Position
from spark_sink.warehouse.warehouse import Warehouse, WarehouseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructField, StructType

    from spark_sink.changelog.history import SchemaHistory
    from spark_sink.changelog.interface import Files
    from spark_sink.changelog.writer import Written
    from spark_sink.pipeline.follower import Follower
    from spark_sink.schema.published import PublishedTables
    from spark_sink.schema.table import Table, Version
    from spark_sink.source.contents import Use
    from spark_sink.source.server import SegmentServer
    from spark_sink.staging.log import Segment

__all__ = ["KnownTables", "MicroBatch"]

_logger = logging.getLogger(__name__)

_THREADS = 4
"""So many tables are opened at a time."""

_APPENDS = RetryPolicy(attempts=10)
"""How often a micro-batch is written whose changelogs another program changes meanwhile."""

_KEYLESS = ""
"""What is told of a table as a whole; of its columns something may be told, too."""


@dataclass(slots=True)
class TableState:
    """What is known of a table: its changelog as it is, None before the first change; its versions."""

    changelog: ChangelogState | None
    versions: list[Version]
    files: Files | None = None

    @property
    def done_lsn(self) -> int:
        """Up to where the changelog is."""
        return 0 if self.changelog is None else self.changelog.lsn

    @property
    def columns(self) -> StructType | None:
        """The table's columns that the changelog has."""
        return None if self.changelog is None else split_schema(self.changelog.schema)[0]

    @property
    def has_key(self) -> bool:
        """Whether the table has, or had, or is to get, a replica."""
        return has_key(self.versions)


class KnownTables:
    """What is known of a warehouse's tables, so that it is not read for every micro-batch; and what was said of them.

    ``keys`` and ``keyless_named`` are those of `pipeline.Pipeline`.
    """

    def __init__(
        self,
        spark: SparkSession,
        warehouse: Warehouse,
        history: SchemaHistory,
        published: PublishedTables,
        keys: Mapping[str, Sequence[str]] | None = None,
        keyless_named: Iterable[str] = (),
    ) -> None:
        self.spark = spark
        self.warehouse = warehouse
        self.changelogs = changelogs_of(spark, warehouse)
        self.history = history
        self.versions = TableVersions(warehouse, history, published, keys)
        self.exact_counts: Counter[tuple[Table, str]] = Counter()
        """How many values of which column stand, since the start, as text in ``_cdc_exact``, because its type can't hold them."""
        self._states: dict[Table, TableState] = {}
        self._told: set[tuple[str, str]] = {(name, _KEYLESS) for name in keyless_named}

    def __getitem__(self, table: Table) -> TableState:
        return self._states[table]

    def open(self, tables: Iterable[Table]) -> None:
        """Find out how tables are that are not known, several at a time."""
        new = [table for table in tables if table not in self._states]
        if new:
            with ThreadPoolExecutor(_THREADS, "open") as pool:
                self._states.update(zip(new, pool.map(self._read, new), strict=True))

    def forget(self) -> None:
        """Have the tables read again: another writer may have changed them."""
        self._states.clear()

    def _read(self, table: Table) -> TableState:
        return TableState(self.changelogs.state(table), self.warehouse.versions(table))

    def tell(self, table: Table, subject: str, message: str, *arguments: object) -> None:
        """Warn of this subject once for each table."""
        if (str(table), subject) not in self._told:
            self._told.add((str(table), subject))
            _logger.warning(message, *arguments)

    def tell_exact(self, table: Table, counts: Mapping[str, int]) -> None:
        """Name the columns that had values that their type can't hold, each once, and count these values."""
        for name, count in sorted(counts.items()):
            self.tell(table, name, INEXACT_MESSAGE, table, name, count)
            self.exact_counts[table, name] += count


@dataclass(frozen=True, slots=True)
class _Append:
    """What is to be appended to a changelog: ``count`` changes that the segments have for it."""

    table: Table
    count: int
    target: Target


class MicroBatch:
    """Some segments, the next ones of the log, on their way to the changelogs.

    Executors read the segments from ``server``, or without one at the path that they have here. A ``follower`` hears which
    changelogs have been brought further.
    """

    def __init__(
        self,
        tables: KnownTables,
        segments: Sequence[Segment],
        *,
        server: SegmentServer | None = None,
        follower: Follower | None = None,
    ) -> None:
        self.contents = read_contents(segments)
        """What the segments have for each table, the logical messages among them."""
        self._tables = tables
        self._segments = segments
        self._server = server
        self._follower = follower

    def append(self) -> None:
        """Append to each changelog what it does not have of the segments; first, to the schema history, what is new there."""
        self._tables.open(self.contents)
        self._tables.history.record_new(self.contents, self._fields, self._segments)
        try:
            _APPENDS.call(self._append, ChangedError)
        except ChangedError as ex:
            raise WarehouseError(
                f"changelogs in {self._tables.warehouse.name} were changed by another program each time that changes were written",
                hint="stop the program that alters these tables, and start again; nothing is lost",
            ) from ex

    def _append(self) -> None:
        """Append to the changelogs that lack changes; on ChangedError nothing is known of the tables any more."""
        tables = self._tables
        tables.open(self.contents)
        wanted = [table for table in sorted(self.contents) if tables[table].done_lsn < self.contents[table].last_lsn]
        appends = [self._prepare(table) for table in wanted]
        if not appends:
            return
        origin = None if self._server is None else Origin.read(self._server.path)
        written = segment_writer.write(tables.spark, self._segments, [append.target for append in appends], origin)
        try:
            for append, files in zip(appends, written, strict=True):
                self._commit(append, files)
        except ChangedError:
            tables.forget()
            raise

    def _prepare(self, table: Table) -> _Append:
        """Make a changelog ready for what the segments have for it."""
        state, warehouse = self._tables[table], self._tables.warehouse
        if table == MESSAGES:
            schema = MESSAGE_SCHEMA
        else:
            columns, uses = self._columns(table), self.contents[table].uses
            state.versions = self._tables.versions.record_new(table, state.versions, uses, state.done_lsn, state.columns, columns)
            if not state.versions[-1].key:
                self._tables.tell(table, _KEYLESS, "%s", keyless_text([str(table)]))
            schema = typed_schema(columns)
        files = state.files = self._tables.changelogs.open_files(table, schema, state.files)
        name = None if table == MESSAGES else (table.schema, table.name)
        count = self.contents[table].count
        if state.done_lsn > self._segments[0].start_lsn:  # it is further than the others
            count = read_contents(self._segments, state.done_lsn)[table].count
        directory = storage.name(files.directory)
        return _Append(table, count, Target(name, files.schema, directory, files.layout, state.done_lsn, warehouse.types))

    def _commit(self, append: _Append, written: Sequence[Written]) -> None:
        """Make what was written for a changelog part of it."""
        table, end, state = append.table, self._segments[-1].end, self._tables[append.table]
        assert state.files is not None
        files = [each.file for each in written]
        self._tables.changelogs.commit_files(table, state.files, files, self._start(state), end, append.count)
        state.changelog = ChangelogState(state.files.schema, end.lsn)
        self._tables.tell_exact(table, sum((each.exact for each in written), Counter()))
        if self._follower is not None:
            if state.has_key:
                self._follower.note(table, end)
            self._follower.note_log(state.files.directory)

    def _start(self, state: TableState) -> Position:
        """Return where a table goes on in the segments."""
        segment = next(segment for segment in self._segments if segment.end_lsn > state.done_lsn)
        return Position(segment.epoch, max(segment.start_lsn, state.done_lsn))

    def _columns(self, table: Table) -> StructType:
        """Return the columns of the table's changelog, with those that the changes it does not have yet need."""
        state, warehouse = self._tables[table], self._tables.warehouse
        uses = (use for use in self.contents[table].uses if use.last_lsn > state.done_lsn)
        relations = (as_typed(use.relation, warehouse.types) for use in uses)
        return merge_columns(state.columns, relations, widen=warehouse.format.widens_columns)

    def _fields(self, table: Table, use: Use) -> list[StructField] | None:
        """Return the columns of the table's changelog that a relation's are; None if it begins, with a snapshot, after that."""
        if use.last_lsn <= self._tables[table].done_lsn:
            return None
        return assign_columns(self._columns(table), as_typed(use.relation, self._tables.warehouse.types))
