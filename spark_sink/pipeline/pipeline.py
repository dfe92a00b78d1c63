"""From the staging log to the tables: a Structured Streaming query over segments, and what it does with each micro-batch.

    with Pipeline(spark, "staging", "warehouse") as pipeline:   # start() ... stop()
        pipeline.wait()

    Pipeline(spark, "staging", "warehouse").process_available()

A micro-batch is a range of segments (source/offsets.py). The driver finds in their indexes which tables they change, and how those
look there; executors read each such table's changes typed, with the schema that the table has then, and write them to files of
its changelog, all tables in one job (changelog/writer.py). So a running query lives through ADD, DROP and RENAME COLUMN and changes
of type. Logical messages have a changelog of their own; a micro-batch without any has nothing to do for them. Neither has one
without a new version of a table's schema for the schemas' history. Replicas follow the changelogs on a rhythm of their own
(pipeline/follower.py).

Nothing twice, nothing missing: a table's commit records the position that it reaches, and a table goes on from its own
position whatever the micro-batch is. What Spark keeps in its checkpoint only says where to go on reading. A checkpoint that
was lost is made again from the position up to which every table has everything (warehouse.json).

Segments are given back to staging one micro-batch late: the last one is run again when Spark did not get to note its end.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from cdcpipe.retry import RetryPolicy
from spark_sink.changelog import tables as changelog
from spark_sink.changelog import writer as segment_writer
from spark_sink.changelog.history import SchemaHistory
from spark_sink.changelog.versions import TableVersions
from spark_sink.changelog.writer import Target
from spark_sink.delta import sql as delta
from spark_sink.delta.commit import ChangedError
from spark_sink.files import places as storage
from spark_sink.files.local import local_directory
from spark_sink.pipeline.catalog import CatalogDatabase
from spark_sink.pipeline.follower import Follower
from spark_sink.replica import merge as replica
from spark_sink.schema.published import PublishedTables
from spark_sink.schema.table import EXACT, MESSAGES, SCHEMA_HISTORY, Table
from spark_sink.schema.types import (
    INEXACT_MESSAGE,
    MESSAGE_SCHEMA,
    as_typed,
    assign_columns,
    merge_columns,
    split_schema,
    typed_schema,
)
from spark_sink.source import datasource as source
from spark_sink.source.contents import Contents, Use, read_contents
from spark_sink.source.offsets import is_noted, micro_batch
from spark_sink.source.server import Origin, serve_segments
from spark_sink.spark import session
from spark_sink.staging.log import Position, Segment, StagingError, list_epochs, list_segments, removed_position
from spark_sink.staging.readers import read_readers, register_reader
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.warehouse import CHECKPOINT, Warehouse, WarehouseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import DataStreamWriter, StreamingQuery
    from pyspark.sql.types import StructField, StructType

    from cdcpipe.pgoutput.messages import Relation
    from spark_sink.changelog.tables import Files
    from spark_sink.changelog.writer import Written
    from spark_sink.delta.sql import State
    from spark_sink.schema.table import Version
    from spark_sink.source.server import SegmentServer

__all__ = ["Pipeline", "PipelineProgress"]

_logger = logging.getLogger(__name__)

_LATE = "Python worker failed to connect back"
"""What Spark says when the process that runs a stream's source has not started within ten seconds, which can't be changed."""

_STARTS = RetryPolicy(attempts=11)
"""How often a stream is started whose source's process is late."""

_APPENDS = RetryPolicy(attempts=10)
"""How often a micro-batch is written whose changelogs another program changes meanwhile."""

_LEAST_WAIT_S = 0.001
"""Spark takes no shorter time to wait."""

_NOTING_S = 5.0
"""So long Spark is given to note the end of a micro-batch."""

_THREADS = 4
"""So many tables are opened at a time."""

READER = "tables"
"""The name under which the staging directory knows how far the tables are."""


@dataclass(frozen=True, slots=True)
class PipelineProgress:
    """How far a pipeline is: since its start, but for ``position``."""

    position: Position | None = None
    batches: int = 0
    changes: int = 0
    tables: int = 0
    messages: int = 0


class Pipeline:
    """Keeps the tables of one warehouse in step with one staging directory.

    ``keys`` names the columns that identify a table's rows, ``{"public.orders": ["id"]}``. It is needed only for a table
    with REPLICA IDENTITY FULL or NOTHING, whose changes do not say. No two rows may share such a key, also not amid a
    transaction. ``describe`` returns what ``cdcpipe prepare`` prints as
    ``tables``: it is asked for such keys, and for the columns of a table that is new or has changed.
    A table without a key has a changelog and no replica.

    Executors read the staging directory at the path that it has here; without ``staging_shared`` they get its segments from this
    process. With ``catalog_database`` the tables are named in that database of the session's catalog (pipeline/catalog.py), and
    with ``json_variants`` those with json have a view beside them that has it as VARIANT.

    Every ``replica_interval_s`` seconds the replicas are brought to where the changelogs are; with 0 each micro-batch does.
    """

    def __init__(
        self,
        spark: SparkSession,
        staging: Path | str,
        warehouse: Path | str,
        *,
        format: str = "delta",  # noqa: A002 - Spark's own word for it
        types: str = EXACT,
        keys: Mapping[str, Sequence[str]] | None = None,
        describe: Callable[[], Iterable[Mapping[str, Any]]] | None = None,
        checkpoint: Path | str | None = None,
        max_bytes_per_trigger: int | None = None,
        trigger_interval_s: float = 1.0,
        staging_shared: bool = True,
        catalog_database: str | None = None,
        json_variants: bool = False,
        replica_interval_s: float = 10.0,
    ) -> None:
        session.check(spark, format)
        source.register(spark)
        self.spark = spark
        self.staging = local_directory(staging, "the staging directory")
        self.warehouse = Warehouse(warehouse, format, types)
        session.check_reach(spark, self.warehouse.root)
        local_root = self.warehouse.local_root(self.staging)
        self.checkpoint = local_root / CHECKPOINT if checkpoint is None else local_directory(checkpoint, "the checkpoint")
        self._published = PublishedTables(describe)
        self._history = SchemaHistory(spark, self.warehouse, self._published)
        self._versions = TableVersions(self.warehouse, self._history, self._published, keys)
        self._max_bytes_per_trigger = max_bytes_per_trigger
        self._trigger_interval_s = trigger_interval_s
        self._staging_shared = staging_shared
        if json_variants and catalog_database is None:
            raise InvalidArgumentsError(
                "json as VARIANT is in views in the catalog", hint="name a database there: --catalog-database"
            )
        relation_of = self._relation_of if json_variants else None
        self._names = None
        if catalog_database is not None:
            self._names = CatalogDatabase(spark, catalog_database, self.warehouse, relation_of)
        self._server: SegmentServer | None = None
        self._replica_interval_s = replica_interval_s
        self._follower: Follower | None = None
        self._tables: dict[Table, _TableState] = {}
        self.lock = TableLock(local_root)
        """The rights to write the tables; whoever else in this process writes them shares it."""
        self._lock_state = b""
        self._progress = PipelineProgress()
        self._seen: set[Table] = set()
        self._told: set[tuple[Table, str]] = set()
        self.exact_counts: Counter[tuple[Table, str]] = Counter()
        """How many values of which column stand, since the start, as text in ``_cdc_exact``, because its type can't hold them."""
        self._query: StreamingQuery | None = None
        self._error: BaseException | None = None
        self._stopping = False
        self._batch_id: int | None = None
        """The newest micro-batch that is in the tables."""
        self._available_now = False
        self._late_starts = 0
        # Held while a micro-batch runs, so that stop() lets it come to its end. It says nothing of who may write: `lock` does.
        self._batch_running = threading.Lock()

    # --- for its owner ---

    def start(self, *, available_now: bool = False) -> Self:
        """Begin to follow the log, or with ``available_now`` to bring the tables to its present end; return at once."""
        self._available_now = available_now
        stream = self._stream()
        if available_now:
            stream = stream.trigger(availableNow=True)
        else:
            stream = stream.trigger(processingTime=f"{self._trigger_interval_s} seconds")
        self._query = stream.start()
        if self._follower is not None:
            self._follower.start()
        return self

    def process_available(self) -> None:
        """Bring the tables to the log's present end, and return when that is done."""
        self.start(available_now=True).wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; raise the error if there was one. Return False if it has not ended in time."""
        query, follower = self._query, self._follower
        if query is None:
            return True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            if timeout_s is None:
                query.awaitTermination()
            elif not query.awaitTermination(timeout_s):
                return False
        except Exception as ex:
            self._stop_serving()
            if _LATE in str(ex) and self._error is None and _STARTS.pause_s(self._late_starts + 1) is not None:
                self._late_starts += 1
                _logger.warning("a Python process took Spark more than ten seconds to start; beginning again")
                self._stop_following(is_last_round_wanted=False)
                left_s = None if deadline is None else max(_LEAST_WAIT_S, deadline - time.monotonic())
                return self.start(available_now=self._available_now).wait(left_s)
            self._error = self._error_of(ex)
            raise self._error from ex
        self._stop_serving()
        if follower is not None and self._error is None:
            follower.end()
            if not follower.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """End once the micro-batch that runs is in the changelogs, and the replicas are where they are; after an error at once."""
        self._stop_query()
        self._stop_following(is_last_round_wanted=self._error is None)

    def _stop_following(self, *, is_last_round_wanted: bool) -> None:
        if self._follower is not None:
            self._follower.end(is_last_round_wanted=is_last_round_wanted)
            self._follower.wait()

    def _stop_query(self) -> None:
        self._stopping = True
        query = self._query
        if query is not None and query.isActive:
            with self._batch_running:
                self._wait_until_noted(query)
                query.stop()
        self._stop_serving()

    def _wait_until_noted(self, query: StreamingQuery) -> None:
        """Let Spark note the last micro-batch's end: interrupted at that, it says so at length, and asks for it once more."""
        until = time.monotonic() + _NOTING_S
        while self._batch_id is not None and not is_noted(self.checkpoint, self._batch_id):
            if not query.isActive or time.monotonic() > until:
                return
            time.sleep(0.01)

    def _stop_serving(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _relation_of(self, table: Table) -> Relation | None:
        """Return the newest description of a table: the stream's, or the catalog's of one that it has not described yet."""
        versions = self.warehouse.versions(table)
        if not versions:
            return None
        described = self._history.version(versions[-1].relation_id, (1 << 64, 0))
        return self._published.relation(versions[-1].relation_id) if described is None else described.relation

    def _take_error(self, ex: BaseException) -> None:
        """Take an error of the follower's as the pipeline's, and end."""
        self._error = self._error_of(ex)
        self._stop_query()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, _value: BaseException | None, _tb: TracebackType | None) -> None:
        self.stop()
        if kind is None:
            self.wait()

    @property
    def progress(self) -> PipelineProgress:
        """How far it is, at this moment."""
        return self._progress

    @property
    def query(self) -> StreamingQuery | None:
        """Spark's query, for its progress; None before ``start``. To end it, ``stop`` the pipeline."""
        return self._query

    # --- the stream ---

    def _stream(self) -> DataStreamWriter:
        self._error, self._stopping, self._batch_id = None, False, None
        start = self._open()
        if not self._staging_shared:
            self._server = serve_segments(self.spark, self.staging)
        reader = self.spark.readStream.format("cdcpipe").option("view", "segments").option("start", str(start))
        if self._max_bytes_per_trigger is not None:
            reader = reader.option("max_bytes_per_trigger", str(self._max_bytes_per_trigger))
        stream = reader.load(str(self.staging)).writeStream.queryName("cdcpipe").foreachBatch(self._batch)
        return stream.option("checkpointLocation", str(self.checkpoint))

    def _open(self) -> Position:
        """Check that warehouse and log belong together, and return the position from which to go on."""
        epochs = list_epochs(self.staging)
        if not epochs:
            raise StagingError(f"{self.staging} holds no log yet", hint="start a launcher on it first")
        position = self.warehouse.open(epochs[-1], self.staging)
        removed = removed_position(self.staging)
        if position is None:
            if removed is not None:
                raise WarehouseError(
                    f"{self.warehouse.name} is new, and the log in {self.staging} does not go back to its beginning",
                    hint="restore the warehouse, or start anew: another warehouse, another staging directory, another slot",
                )
            position = epochs[0].start
            self.warehouse.record(position)
        list_segments(self.staging, position)  # are those that the tables still need there?
        if READER not in read_readers(self.staging):
            register_reader(self.staging, READER, Position(0, 0) if removed is None else removed)
        self._progress = replace(self._progress, position=position)
        with self.lock.alone():
            replica.finish_snapshots(self.spark, self.warehouse)
            for table in self.warehouse.tables():
                self._check_changelog(table, position)
        if self._names is not None:
            self._names.register([*self.warehouse.tables(), MESSAGES, SCHEMA_HISTORY])
        if self.warehouse.format == "delta":
            interval_s = self._replica_interval_s
            follower = Follower(self.spark, self.warehouse, self.lock, self._names, interval_s, self._take_error)
            follower.look(position.epoch)
            self._follower = follower
        return position

    def _check_changelog(self, table: Table, position: Position) -> None:
        """Refuse to go on without a changelog that was there: nothing could bring back what was in it."""
        if self.warehouse.versions(table)[0].end_lsn <= position.lsn and not changelog.exists(self.warehouse, table):
            raise WarehouseError(
                f"the changelog of {table}, {self.warehouse.changelog(table)}, has gone, and with it what was in it",
                hint="restore it, or start anew: another warehouse, another staging directory, another slot",
            )

    def _batch(self, _rows: DataFrame, batch_id: int) -> None:
        """Take a micro-batch of segments to the tables; called by Spark in a thread of this process."""
        with self._batch_running:
            if self._stopping:
                raise _StoppedError
            try:
                start, end = micro_batch(self.checkpoint, batch_id)
                with self.lock.append() as lock_state:
                    if lock_state != self._lock_state:  # somebody else has written the tables
                        self._tables.clear()
                        self._lock_state = lock_state
                    self._process(start, end)
                self._batch_id = batch_id
                # After the append: one right at a time.
                if self._follower is not None and not self._replica_interval_s:
                    self._follower.catch_up()
            except BaseException as ex:
                self._error = self._error_of(ex)
                raise

    def _process(self, start: Position | None, end: Position) -> None:
        """Take the log's (start, end] to the tables, or what of it they do not have yet."""
        position = self._progress.position
        assert position is not None
        if start is not None and start.lsn > position.lsn:
            raise WarehouseError(
                f"the checkpoint {self.checkpoint} is at {start}, the tables in {self.warehouse.name} at {position}",
                hint="the checkpoint is another warehouse's, or newer than this one: delete it, and what is there goes on from "
                "where the tables are",
            )
        count = message_count = 0
        if end.lsn > position.lsn:
            segments = [segment for segment in list_segments(self.staging, position) if segment.end_lsn <= end.lsn]
            contents = read_contents(segments)
            self._open_tables(contents)
            self._history.note(contents, lambda table, use: self._fields(table, contents[table], use), segments)
            self._append(contents, segments)
            if self._names is not None:
                self._names.register([*sorted(contents), SCHEMA_HISTORY])
            messages = contents.pop(MESSAGES, None)
            message_count = 0 if messages is None else messages.count
            count = sum(found.count for found in contents.values())
            self._seen.update(contents)
            self.warehouse.record(end)
            position = end
        self._progress = replace(
            self._progress,
            position=position,
            batches=self._progress.batches + 1,
            changes=self._progress.changes + count,
            tables=len(self._seen),
            messages=self._progress.messages + message_count,
        )
        # Not ``end``: until Spark has noted the end of this micro-batch, it may ask for it again.
        if start is not None:
            register_reader(self.staging, READER, start)

    def _append(self, contents: Mapping[Table, Contents], segments: Sequence[Segment]) -> None:
        """Append to the changelogs what the segments have for them; each goes on from where it is."""
        for failures in itertools.count(1):
            self._open_tables(contents)
            appends = [
                self._prepare(table, contents[table], segments)
                for table in sorted(contents)
                if self._tables[table].done_lsn < contents[table].last_lsn
            ]
            if not appends:
                return
            origin = None if self._server is None else Origin.read(self._server.path)
            written = segment_writer.write(self.spark, segments, [append.target for append in appends], origin)
            try:
                for append, files in zip(appends, written, strict=True):
                    self._commit(append, files, segments)
            except ChangedError as ex:
                # Somebody has changed a table's columns. Those that have their changes are not written again.
                self._tables.clear()
                if _APPENDS.pause_s(failures) is None:
                    raise WarehouseError(
                        f"changelogs in {self.warehouse.name} were changed by another program each time that changes were written",
                        hint="stop the program that alters these tables, and start again; nothing is lost",
                    ) from ex
            else:
                return

    def _open_tables(self, tables: Iterable[Table]) -> None:
        """Find out how tables are that were not looked at before, several at a time."""
        new = [table for table in tables if table not in self._tables]
        if new:
            with ThreadPoolExecutor(_THREADS, "open") as pool:
                self._tables.update(zip(new, pool.map(self._state, new), strict=True))

    def _state(self, table: Table) -> _TableState:
        return _TableState(changelog.state(self.spark, self.warehouse, table), self.warehouse.versions(table))

    def _columns(self, table: Table, contents: Contents) -> StructType:
        """Return the columns of the table's changelog, with those that the changes it does not have yet need."""
        state, types = self._tables[table], self.warehouse.types
        relations = (as_typed(use.relation, types) for use in contents.uses if use.last_lsn > state.done_lsn)
        return merge_columns(state.columns, relations, widen=self.warehouse.format == "delta")

    def _fields(self, table: Table, contents: Contents, use: Use) -> list[StructField] | None:
        """Return the columns of the table's changelog that a relation's are; None if it begins, with a snapshot, after that."""
        if use.last_lsn <= self._tables[table].done_lsn:
            return None
        return assign_columns(self._columns(table, contents), as_typed(use.relation, self.warehouse.types))

    def _prepare(self, table: Table, contents: Contents, segments: Sequence[Segment]) -> _Append:
        """Make a changelog ready for what the segments have for it."""
        state = self._tables[table]
        if table == MESSAGES:
            schema = MESSAGE_SCHEMA
        else:
            columns = self._columns(table, contents)
            state.versions = self._versions.note(table, state.versions, contents.uses, state.done_lsn, state.columns, columns)
            if not state.versions[-1].key:
                self._tell(table, "", "table %s has no key: it has a changelog and no replica", table)
            schema = typed_schema(columns)
        files = state.files = changelog.open_files(self.spark, self.warehouse, table, schema, state.files)
        name = None if table == MESSAGES else (table.schema, table.name)
        count = contents.count
        if state.done_lsn > segments[0].start_lsn:  # it is further than the others
            count = read_contents(segments, state.done_lsn)[table].count
        return _Append(
            table,
            count,
            Target(name, files.schema, storage.name(files.directory), files.layout, state.done_lsn, self.warehouse.types),
        )

    def _commit(self, append: _Append, written: Sequence[Written], segments: Sequence[Segment]) -> None:
        """Make what was written for a changelog part of it."""
        table, end, state = append.table, segments[-1].end, self._tables[append.table]
        assert state.files is not None
        start = _start(segments, state.done_lsn)
        changelog.commit_files(self.warehouse, table, state.files, [each.file for each in written], start, end, append.count)
        state.changelog = delta.State(state.files.schema, end.lsn)
        self._tell_exact(table, sum((each.exact for each in written), Counter()))
        if self._follower is None:
            return
        if state.has_key:
            self._follower.note(table, end)
        self._follower.note_log(state.files.directory)

    # --- what to tell ---

    def _tell(self, table: Table, subject: str, message: str, *arguments: object) -> None:
        """Warn once."""
        if (table, subject) not in self._told:
            self._told.add((table, subject))
            _logger.warning(message, *arguments)

    def _tell_exact(self, table: Table, counts: Mapping[str, int]) -> None:
        """Name the columns that had values that their type can't hold, each once, and count these."""
        for name, count in sorted(counts.items()):
            self._tell(table, name, INEXACT_MESSAGE, table, name, count)
            self.exact_counts[table, name] += count

    def _error_of(self, ex: BaseException) -> BaseException:
        """Return an error of ours for one that Spark wrapped, in one line."""
        if self._error is not None:
            return self._error
        if isinstance(ex, CdcpipeError | _StoppedError):
            return ex
        return PipelineError(f"the tables could not be brought further: {session.reason_of(ex)}")


def _start(segments: Sequence[Segment], done_lsn: int) -> Position:
    """Return where a table that is at ``done_lsn`` goes on in the segments."""
    return next(Position(segment.epoch, max(segment.start_lsn, done_lsn)) for segment in segments if segment.end_lsn > done_lsn)


@dataclass(frozen=True, slots=True)
class _Append:
    """What is to be appended to a changelog in a micro-batch."""

    table: Table
    count: int
    """The changes that the segments have for it."""
    target: Target


class PipelineError(CdcpipeError):
    """Spark could not do what a micro-batch needs."""


class _StoppedError(Exception):
    """A micro-batch that was to begin after the end had been asked for."""


@dataclass(slots=True)
class _TableState:
    """What is known of a table of the warehouse, so that it is not read for every micro-batch."""

    changelog: State | None
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
        return any(version.key for version in self.versions)
