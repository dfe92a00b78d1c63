"""One micro-batch: writes a range of the staging log to the changelogs.

    tables = KnownTables(spark, warehouse, history, published)     # kept from one micro-batch to the next
    batch = MicroBatch(tables, segments)
    batch.append()                                                 # the caller holds the right to append (warehouse/lock.py)

The driver reads from the segments' indexes which tables the segments change, and with which columns. Executors read the changes of
each table with its schema and types at that position. They write the changes to files of its changelog, all tables in one job
(changelog/writer.py). So a running query survives ADD, DROP and RENAME COLUMN and changes of type. Logical messages have their own
changelog; a micro-batch without messages does not touch it. Without a schema change, a micro-batch does not touch the schema
history.

Each change is written exactly once. The commit to a table records the position that it reaches, and each table continues from its
own position, whichever segments the micro-batch has.
"""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdcpipe.retry import RetryPolicy
from spark_sink.changelog import writer as segment_writer
from spark_sink.changelog.described_uses import add_described_uses
from spark_sink.changelog.drops import write_drops
from spark_sink.changelog.interface import ChangelogState
from spark_sink.changelog.tables import changelogs_of
from spark_sink.changelog.unknown_rows import tables_with_unknown_rows
from spark_sink.changelog.versions import TableVersions
from spark_sink.changelog.writer import Target
from spark_sink.client.keyless import keyless_text
from spark_sink.delta.file_table import ChangedError
from spark_sink.files import places
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
from spark_sink.source.contents import Contents, read_contents
from spark_sink.source.ddl import read_ddl
from spark_sink.source.server import Origin
from spark_sink.staging.log import Position
from spark_sink.warehouse.wanted_copies import want as want_copy
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
    from spark_sink.source.ddl import Ddl
    from spark_sink.source.server import SegmentServer
    from spark_sink.staging.log import Segment

__all__ = ["KnownTables", "MicroBatch"]

_logger = logging.getLogger(__name__)

_THREADS = 4
"""How many tables are opened at the same time."""

_APPENDS = RetryPolicy(attempts=10)
"""How often to write a micro-batch if another program changes its changelogs meanwhile."""

_KEYLESS = ""
"""The subject of the warning about a table without a key. Other warnings have a column's name as their subject."""


@dataclass(slots=True)
class TableState:
    """The known state of a table: its changelog (None before the first change) and its versions."""

    changelog: ChangelogState | None
    versions: list[Version]
    files: Files | None = None

    @property
    def done_lsn(self) -> int:
        """The LSN up to which the changelog has the changes."""
        return 0 if self.changelog is None else self.changelog.lsn

    @property
    def columns(self) -> StructType | None:
        """The columns of the table that the changelog has."""
        return None if self.changelog is None else split_schema(self.changelog.schema)[0]

    @property
    def has_key(self) -> bool:
        """Whether the table has, had or will get a replica."""
        return has_key(self.versions)


class KnownTables:
    """A cache of the state of a warehouse's tables, kept between micro-batches. Also remembers which warnings were logged.

    ``keys`` and ``keyless_named`` have the same meaning as in `pipeline.Pipeline`.
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
        """For each column, how many values since the start are text in ``_cdc_exact`` because the column's type can't hold them."""
        self._states: dict[Table, TableState] = {}
        self._told: set[tuple[str, str]] = {(name, _KEYLESS) for name in keyless_named}

    def __getitem__(self, table: Table) -> TableState:
        return self._states[table]

    def open(self, tables: Iterable[Table]) -> None:
        """Read the state of the tables that are not in the cache, several at the same time."""
        new = [table for table in tables if table not in self._states]
        if new:
            with ThreadPoolExecutor(_THREADS, "open") as pool:
                self._states.update(zip(new, pool.map(self._read, new), strict=True))

    def forget(self) -> None:
        """Empty the cache, because another writer may have changed the tables."""
        self._states.clear()

    def _read(self, table: Table) -> TableState:
        return TableState(self.changelogs.state(table), self.warehouse.versions(table))

    def tell(self, table: Table, subject: str, message: str, *arguments: object) -> None:
        """Log a warning about this subject, once for each table."""
        if (str(table), subject) not in self._told:
            self._told.add((str(table), subject))
            _logger.warning(message, *arguments)

    def tell_exact(self, table: Table, counts: Mapping[str, int]) -> None:
        """Count the values that the types of their columns can't hold. Log a warning for each such column, once."""
        for name, count in sorted(counts.items()):
            self.tell(table, name, INEXACT_MESSAGE, table, name, count)
            self.exact_counts[table, name] += count


@dataclass(frozen=True, slots=True)
class _Append:
    """One append to a changelog: ``count`` changes from the segments, and the captured DROP TABLE commands."""

    table: Table
    count: int
    target: Target
    drops: Sequence[Ddl]


class MicroBatch:
    """The next segments of the log, to be written to the changelogs.

    Executors read the segments from ``server``, or without a server at the same path as this process. A ``follower`` is told which
    changelogs have new changes.
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
        """What the segments contain for each table; the logical messages count as a table."""
        self._ddl = read_ddl(segments) if MESSAGES in self.contents else []
        self._tables = tables
        self._segments = segments
        self._server = server
        self._follower = follower

    def append(self) -> None:
        """Append new schemas to the schema history, and then to each changelog the changes of the segments that it lacks."""
        self._tables.history.record_ddl(self._ddl, self._segments)
        add_described_uses(self.contents, self._ddl, self._tables.history)
        self._tables.open(self.contents)
        self._tables.history.record_new(self.contents, self._fields, self._segments)
        self._add_dropped()
        self._want_copies()
        try:
            _APPENDS.call(self._append, ChangedError)
        except ChangedError as ex:
            raise WarehouseError(
                f"changelogs in {self._tables.warehouse.name} were changed by another program each time that changes were written",
                hint="stop the program that alters these tables, and start again; nothing is lost",
            ) from ex

    def _add_dropped(self) -> None:
        """Add the tables that were dropped to the contents, if they have changelogs."""
        dropped = {table: each.end_lsn for each in self._ddl for table in each.message.dropped}
        for table, end_lsn in dropped.items():
            if table in self.contents or self._tables.warehouse.has_changelog(table):
                found = self.contents.setdefault(table, Contents())
                found.last_lsn = max(found.last_lsn, end_lsn)

    def _want_copies(self) -> None:
        """Record the tables whose rows the stream does not have any more, according to captured DDL."""
        warehouse = self._tables.warehouse
        for table, lsn, reason in tables_with_unknown_rows(self._ddl, self._tables.history.captured):
            if warehouse.has_changelog(table):
                want_copy(warehouse, table, lsn, reason)

    def _append(self) -> None:
        """Append to the changelogs that lack changes. On ChangedError, empty the cache of table states."""
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
        """Prepare a changelog for the changes that the segments have for it: record its versions and open it for new files."""
        state, warehouse = self._tables[table], self._tables.warehouse
        if table == MESSAGES:
            schema = MESSAGE_SCHEMA
        else:
            columns, uses = self._columns(table), self.contents[table].uses
            state.versions = self._tables.versions.record_new(table, state.versions, uses, state.done_lsn, state.columns, columns)
            if state.versions and not state.versions[-1].key:
                self._tables.tell(table, _KEYLESS, "%s", keyless_text([str(table)]))
            schema = typed_schema(columns)
        files = state.files = self._tables.changelogs.open_files(table, schema, state.files)
        name = None if table == MESSAGES else (table.schema, table.name)
        count = self.contents[table].count
        if state.done_lsn > self._segments[0].start_lsn:  # this changelog already has some of the segments' changes
            count = read_contents(self._segments, state.done_lsn).get(table, Contents()).count
        drops = [each for each in self._ddl if table in each.message.dropped and each.end_lsn > state.done_lsn]
        directory = places.name(files.directory)
        return _Append(table, count, Target(name, files.schema, directory, files.layout, state.done_lsn, warehouse.types), drops)

    def _commit(self, append: _Append, written: Sequence[Written]) -> None:
        """Commit the files that were written for a changelog."""
        table, end, state = append.table, self._segments[-1].end, self._tables[append.table]
        assert state.files is not None
        files = [each.file for each in written]
        if append.drops:
            files.append(write_drops(state.files, append.drops))
        count = append.count + len(append.drops)
        self._tables.changelogs.commit_files(table, state.files, files, self._start(state), end, count)
        state.changelog = ChangelogState(state.files.schema, end.lsn)
        if append.drops:
            last = append.drops[-1]
            self._tables.warehouse.note_dropped(table, last.message.dropped[table], Position(last.epoch, last.end_lsn))
        self._tables.tell_exact(table, sum((each.exact for each in written), Counter()))
        if self._follower is not None:
            if state.has_key:
                self._follower.record(table, end)
            self._follower.record_commit(state.files.directory)

    def _start(self, state: TableState) -> Position:
        """Return the position in the segments from which a table continues."""
        segment = next(segment for segment in self._segments if segment.end_lsn > state.done_lsn)
        return Position(segment.epoch, max(segment.start_lsn, state.done_lsn))

    def _columns(self, table: Table) -> StructType:
        """Return the columns of the table's changelog, and the columns that the changes it still lacks need."""
        state, warehouse = self._tables[table], self._tables.warehouse
        uses = (use for use in self.contents[table].uses if use.last_lsn > state.done_lsn)
        relations = (as_typed(use.relation, warehouse.types) for use in uses)
        return merge_columns(state.columns, relations, widen=warehouse.format.widens_columns)

    def _fields(self, table: Table, use: Use) -> list[StructField] | None:
        """Return the changelog's column for each column of a relation.

        Returns None if the changelog began after the relation's last change, with a snapshot.
        """
        if use.last_lsn <= self._tables[table].done_lsn:
            return None
        return assign_columns(self._columns(table), as_typed(use.relation, self._tables.warehouse.types))
