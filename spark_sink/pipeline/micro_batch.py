"""One micro-batch: writes a range of the staging log to the changelogs.

    tables = KnownTables(spark, warehouse, schemas, answers)     # known_tables.py; kept from one micro-batch to the next
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

from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

from cdcpipe.retry import RetryPolicy
from spark_sink.changelog import writer as segment_writer
from spark_sink.changelog.captured_comments import captured_comments
from spark_sink.changelog.described_uses import add_described_uses
from spark_sink.changelog.drops import write_drops
from spark_sink.changelog.interface import ChangelogState
from spark_sink.changelog.unknown_rows import tables_with_unknown_rows
from spark_sink.changelog.writer import Target
from spark_sink.delta.file_table import ChangedError
from spark_sink.files import places
from spark_sink.schema.catalog_answers import is_key_told
from spark_sink.schema.keys import keyed_until_dropped, marked
from spark_sink.schema.table import MESSAGES
from spark_sink.schema.types import MESSAGE_SCHEMA, assign_columns, merge_columns, typed_schema
from spark_sink.source.contents import Contents, find
from spark_sink.source.ddl import read_ddl
from spark_sink.source.offsets import make_durable
from spark_sink.staging.log import Position
from spark_sink.staging.readers import register_reader
from spark_sink.warehouse import dropped_tables, landed_snapshots, new_changelogs
from spark_sink.warehouse.comments import Comments, write_comments
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.former_names import FormerNames
from spark_sink.warehouse.wanted_copies import take_back_first, want_copy
from spark_sink.warehouse.warehouse import READER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pyspark.sql.types import StructField, StructType

    from spark_sink.changelog.writer import Written
    from spark_sink.pipeline.catalog import CatalogDatabase
    from spark_sink.pipeline.follower import Follower
    from spark_sink.pipeline.known_tables import KnownTable, KnownTables
    from spark_sink.schema.ddl_message import TableDescription
    from spark_sink.schema.table import Table
    from spark_sink.source.contents import Use
    from spark_sink.source.ddl import Ddl
    from spark_sink.source.server import SegmentServer
    from spark_sink.staging.log import Segment

__all__ = ["MicroBatch", "release_segments"]

_APPENDS = RetryPolicy(attempts=10)
"""How often to write a micro-batch if another program changes its changelogs meanwhile."""


@dataclass(frozen=True, slots=True)
class _Append:
    """One append to a changelog: ``count`` changes from the segments, and the captured DROP TABLE commands."""

    table: Table
    count: int
    target: Target
    drops: Sequence[Ddl]
    is_altered: bool
    """Whether the table has other versions or columns than before."""


class MicroBatch:
    """The next segments of the log, to be written to the changelogs.

    Executors read the segments from ``server``, or without a server at the same path as this process. A ``follower`` is told which
    changelogs have new changes. ``catalog`` drops the views with the histories of tables before they are altered.
    """

    def __init__(
        self,
        tables: KnownTables,
        segments: Sequence[Segment],
        *,
        server: SegmentServer | None = None,
        follower: Follower | None = None,
        catalog: CatalogDatabase | None = None,
    ) -> None:
        self._found = find(segments)
        self._ddl = read_ddl(segments) if self._found.messages.count else []
        self.contents: dict[Table, Contents] = {}
        """What the segments contain for each table; the logical messages count as a table. Empty before `append`."""
        self.renamed: list[Table] = []
        """The tables that have got another name."""
        self._tables = tables
        self._segments = segments
        self._server = server
        self._follower = follower
        self._catalog = catalog
        self._counts: dict[int, Counter[Table]] = {}
        """The numbers of changes beyond an LSN, for each LSN that was asked for."""

    def append(self) -> None:
        """Append new schemas to the schema history, and then to each changelog the changes of the segments that it lacks."""
        self._tables.schemas.record_ddl(self._ddl, self._segments)
        self.renamed = self._tables.follow([use for _, use in self._found.uses], self._ddl)
        self.contents = self._found.by_table(self._home)
        add_described_uses(self.contents, self._ddl, self._tables.schemas, self._tables.names)
        self._tables.open(self.contents)
        self._take_back_copies()
        self._tables.schemas.record_new(self.contents, partial(self._fields, cache(self._columns)), self._segments)
        self._add_dropped()
        self._want_copies()
        try:
            _APPENDS.call(self._append, ChangedError)
            self._take_comments()
        except ChangedError as ex:
            raise WarehouseError(
                f"changelogs in {self._tables.warehouse.name} were changed by another program each time that changes were written",
                hint="stop the program that alters these tables, and start again; nothing is lost",
            ) from ex

    def _take_back_copies(self) -> None:
        """Take back the first copies that have failed while they were landed, of tables that get their changelogs here.

        With a changelog that lacks the copied rows they would count as complete.
        """
        warehouse, new = self._tables.warehouse, [table for table in self.contents if self._tables[table].changelog is None]
        for table, position in landed_snapshots.unfinished(warehouse) if new else ():
            if table in new:
                take_back_first(warehouse, table, position)
                self._tables[table].versions = []

    def _add_dropped(self) -> None:
        """Add the tables that were dropped to the contents, if they have changelogs."""
        dropped = {table: each.end_lsn for each in self._ddl for table in self._dropped(each)}
        for table, end_lsn in dropped.items():
            if table in self.contents or self._tables.warehouse.has_changelog(table):
                found = self.contents.setdefault(table, Contents())
                found.last_lsn = max(found.last_lsn, end_lsn)

    def _home(self, use: Use) -> Table:
        """Return the table of the warehouse that has the changes of a description."""
        return self._tables.named(use.relation.relation_id, use.name, use.place)

    def _described(self, ddl: Ddl, description: TableDescription) -> Table:
        """Return the table of the warehouse that a command has described."""
        return self._tables.named(description.relation_id, description.table, ddl.place)

    def _dropped(self, ddl: Ddl) -> dict[Table, int]:
        """Return the tables of the warehouse that a command has dropped, with their OIDs."""
        return {self._tables.named(number, name, ddl.place): number for name, number in ddl.message.dropped.items()}

    def _want_copies(self) -> None:
        """Record the tables whose rows the stream does not have any more, according to captured DDL."""
        warehouse, schemas = self._tables.warehouse, self._tables.schemas
        names, masks = self._tables.names, warehouse.masks
        for table, lsn, reason in tables_with_unknown_rows(self._ddl, schemas.captured, names, schemas.tables_with, masks):
            if warehouse.has_changelog(table):
                want_copy(warehouse, table, lsn, reason)

    def _take_comments(self) -> None:
        """Give the changelogs the comments of captured DDL, and leave those of the replicas to the follower."""
        described = {self._described(each, table) for each in self._ddl for table in each.message.tables}
        tables, house, captured = self._tables, self._tables.warehouse, self._tables.schemas.captured
        known = [table for table in sorted({*self.contents, *described} - {MESSAGES}) if house.has_changelog(table)]
        tables.open(known)
        for table in known:
            state, relation = tables[table], tables.schemas.newest(table)
            if relation is None or state.columns is None:
                continue
            found = captured_comments(relation, house.versions(table)[-1].place, state.columns, captured, house.typed)
            if found is not None and found != (state.comments or Comments()):
                tables.changelogs.comment(table, found)
                write_comments(house, table, found)
                state.comments, state.files = found, None
                if self._follower is not None and state.has_key:
                    self._follower.comment(table, found)

    def _append(self) -> None:
        """Append to the changelogs that lack changes. On ChangedError, empty the cache of table states."""
        tables = self._tables
        tables.open(self.contents)
        wanted = [table for table in sorted(self.contents) if tables[table].done_lsn < self.contents[table].last_lsn]
        appends = [self._prepare(table) for table in wanted]
        if not appends:
            return
        address = None if self._server is None else self._server.address
        written = segment_writer.write(tables.spark, self._segments, [append.target for append in appends], address)
        altered = [append.table for append in appends if append.is_altered]
        if self._catalog is not None:
            self._catalog.withdraw_histories(altered)
        try:
            for append, files in zip(appends, written, strict=True):
                self._commit(append, files)
        except ChangedError:
            tables.forget()
            raise
        if self._catalog is not None:
            self._catalog.forget_histories(altered)

    def _prepare(self, table: Table) -> _Append:
        """Prepare a changelog for the changes that the segments have for it: open it for new files and record its versions."""
        state, warehouse = self._tables[table], self._tables.warehouse
        before = state.versions, None if state.changelog is None else state.changelog.schema
        versions = state.versions
        drops = [each for each in self._ddl if each.end_lsn > state.done_lsn and table in self._dropped(each)]
        if table == MESSAGES:
            schema = MESSAGE_SCHEMA
        else:
            columns, uses = self._columns(table), self.contents[table].uses
            self._check_masks(table, [use for use in uses if use.last_lsn > state.done_lsn])
            versions = self._tables.versions.with_new(table, versions, uses, state.done_lsn, state.columns, columns)
            for each in drops:
                versions = keyed_until_dropped(versions, self._dropped(each)[table], each.place)
            if versions and not versions[-1].key:
                is_partial = any(is_key_told(use.relation) and marked(use.relation) for use in uses[-1:])
                self._tables.tell_keyless(table, is_partial=is_partial)
            schema = typed_schema(columns)
        if state.changelog is None:  # one LSN more, at which nothing ends: a history that is right there must not go on either
            new_changelogs.record_begin(warehouse, table, self._segments[0].start_lsn + 1)
        files = state.files = self._tables.changelogs.open_files(table, schema, state.files)
        if versions != state.versions:  # only now: a reader of a version finds the columns that it names
            warehouse.write_versions(table, versions)
            state.versions = versions
        count = self._count(table, state.done_lsn)
        relations = None if table == MESSAGES else self._relations(table)
        directory, masks = places.name(files.directory), warehouse.masks.with_key()
        target = Target(relations, files.schema, directory, files.layout, state.done_lsn, warehouse.types, masks)
        is_altered = before != (state.versions, files.schema)
        return _Append(table, count, target, drops, is_altered)

    def _count(self, table: Table, done_lsn: int) -> int:
        """Return how many changes the segments have for a table beyond an LSN. All tables that one snapshot has copied share it."""
        if done_lsn <= self._segments[0].start_lsn:
            return self.contents[table].count
        if done_lsn not in self._counts:  # the changelogs already have some of the segments' changes
            beyond = find((segment for segment in self._segments if segment.end_lsn > done_lsn), done_lsn)
            self._counts[done_lsn] = Counter({home: each.count for home, each in beyond.by_table(self._home).items()})
        return self._counts[done_lsn][table]

    @cached_property
    def _former_names(self) -> FormerNames:
        return FormerNames(self._tables.warehouse)

    def _check_masks(self, table: Table, uses: Sequence[Use]) -> None:
        """Raise InvalidArgumentsError if a column was masked when its rows came under another name, and would be shown now."""
        tables, masks = self._tables, self._tables.warehouse.masks
        if not masks.rules:
            return
        is_new = not tables[table].versions
        for use in uses:
            relation, former = use.relation, {table}
            own, columns = (relation.namespace, relation.name), [column.name for column in relation.columns]
            masks.check_there(*own, columns)
            # The server describes a table again before the first change of a partition that was attached.
            if (is_new or not use.is_repeated) and masks.may_name(*own, columns):
                names, answers = self._former_names, tables.answers.at(use.end_lsn)
                parts = () if use.is_repeated or names.is_plain(relation.relation_id, use.end_lsn) else answers.parts(relation)
                former |= names.of(relation.relation_id, use.end_lsn, parts, is_new=is_new)
                former |= answers.parents(relation)
            for each in sorted(former):
                masks.check_renamed((each.schema, each.name), own, columns)

    def _relations(self, table: Table) -> dict[tuple[str, str], set[int]]:
        """Return the names under which the segments have changes of the table, each with the OIDs."""
        found: dict[tuple[str, str], set[int]] = {}
        for use in self.contents[table].uses:
            found.setdefault((use.name.schema, use.name.name), set()).add(use.relation.relation_id)
        return found

    def _commit(self, append: _Append, written: Sequence[Written]) -> None:
        """Commit the files that were written for a changelog."""
        table, end, state = append.table, self._segments[-1].end, self._tables[append.table]
        assert state.files is not None
        files = [each.file for each in written]
        incomplete_lsn = max((each.incomplete_lsn for each in written), default=0)
        if incomplete_lsn and state.has_key:  # before the commit: after it, nothing would come back here
            self._tables.tell_incomplete(table, incomplete_lsn)
        if append.drops:
            files.append(write_drops(state.files, append.drops))
            last = append.drops[-1]  # recorded before the commit, too
            dropped_tables.record(self._tables.warehouse, table, self._dropped(last)[table], Position(last.epoch, last.end_lsn))
        count = append.count + len(append.drops)
        self._tables.changelogs.commit_files(table, state.files, files, start := self._start(state), end, count)
        state.changelog = ChangelogState(state.files.schema, end.lsn)
        self._tables.note_changelogs([table])
        self._tables.tell_exact(table, sum((each.exact for each in written), Counter()))
        if self._follower is not None:
            if state.has_key:
                self._follower.record(table, end, start.lsn)
            self._follower.record_commit(state.files.directory)

    def _start(self, state: KnownTable) -> Position:
        """Return the position in the segments from which a table continues."""
        segment = next(segment for segment in self._segments if segment.end_lsn > state.done_lsn)
        return Position(segment.epoch, max(segment.start_lsn, state.done_lsn))

    def _columns(self, table: Table) -> StructType:
        """Return the columns of the table's changelog, and the columns that the changes it still lacks need."""
        state, warehouse = self._tables[table], self._tables.warehouse
        uses = (use for use in self.contents[table].uses if use.last_lsn > state.done_lsn)
        relations = (warehouse.typed(use.relation) for use in uses)
        return merge_columns(state.columns, relations, widen=warehouse.widens_columns, sanitize=warehouse.sanitizes_names)

    def _fields(self, columns_of: Callable[[Table], StructType], table: Table, use: Use) -> list[StructField] | None:
        """Return the changelog's column for each column of a relation.

        Returns None if the changelog began after the relation's last change, with a snapshot.
        """
        if use.last_lsn <= self._tables[table].done_lsn:
            return None
        return assign_columns(columns_of(table), self._tables.warehouse.typed(use.relation))


def release_segments(checkpoint: Path, batch_id: int, staging: Path, end: Position, warehouse: str) -> None:
    """Let the segments be removed that the micro-batches up to ``batch_id`` have written. Spark has ended them, at ``end``."""
    make_durable(checkpoint, batch_id)
    register_reader(staging, READER, end, warehouse)
