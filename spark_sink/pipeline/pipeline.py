"""The life cycle of the Structured Streaming query that brings the staging log to the tables.

    with Pipeline(spark, "staging", "warehouse") as pipeline:   # start() ... stop()
        pipeline.wait()

    Pipeline(spark, "staging", "warehouse").process_available()

This module decides how errors are handled, and how the query ends. beginning.py decides where it continues, micro_batch.py
writes the changes, and follower.py merges them into the replicas, at its own interval.

Spark's checkpoint only says where to continue reading. If the checkpoint is lost, the query continues from the position up to which
every table has all changes (warehouse.json).

The pipeline releases segments one micro-batch late, because Spark runs a micro-batch again if it has not recorded its end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from cdcpipe.background import Startable
from cdcpipe.measures import Histogram
from spark_sink.changelog.schema_history import SchemaHistory
from spark_sink.files.local import local_directory
from spark_sink.pipeline import fit
from spark_sink.pipeline.beginning import begin, finish_left
from spark_sink.pipeline.catalog import CatalogDatabase, check_options
from spark_sink.pipeline.epochs import behind_gap, record_epochs
from spark_sink.pipeline.failures import StoppedError, own_error, stopped_elsewhere
from spark_sink.pipeline.follower import Follower
from spark_sink.pipeline.histories import Histories
from spark_sink.pipeline.known_tables import KnownTables
from spark_sink.pipeline.micro_batch import MicroBatch, release_segments
from spark_sink.pipeline.pace import MICRO_BATCH_BYTES, Pace
from spark_sink.pipeline.progress import PipelineProgress
from spark_sink.pipeline.query_end import await_end, is_running, wait_until
from spark_sink.pipeline.source_ends import SourceEnds
from spark_sink.schema.catalog_answers import CatalogAnswers
from spark_sink.schema.table import DDL, EXACT, MESSAGES, SCHEMA_HISTORY, Table
from spark_sink.source import datasource
from spark_sink.source.offsets import is_recorded, micro_batch
from spark_sink.source.server import serve_segments
from spark_sink.spark import callbacks, session
from spark_sink.staging.log import Position, list_segments, log_end
from spark_sink.warehouse.formats import HARD, KEEP, OFF, SPARK, VIEW
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.warehouse import CHECKPOINT, Warehouse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

    from spark_sink.pipeline.rounds import Rounds
    from spark_sink.source.server import SegmentServer

__all__ = ["Pipeline", "PipelineProgress"]

_logger = logging.getLogger(__name__)

_MERGES_S: Final = 5.0
"""How long to wait for merges after an error."""


class Pipeline(Startable):
    """Keeps the tables of one warehouse in step with one staging directory.

    ``keys`` names the columns that identify a table's rows, ``{"public.orders": ["id"]}``. Only a table with REPLICA IDENTITY FULL
    or NOTHING needs it, because its changes do not name a key. No two rows may share such a key, not even within a transaction.
    ``describe`` returns the ``tables`` of the output of ``cdcpipe prepare``. The pipeline calls it for such keys, and for the
    columns of a table that is new or has changed. A table without a key has a changelog and no replica. The pipeline logs a warning
    for each such table that is not in ``keyless_named``.

    With ``staging_shared``, executors read the staging directory at the same path as this process. Without it, this process serves
    the segments to them. With ``catalog_database``, the tables get names in that database of the session's catalog
    (pipeline/catalog.py). With ``json_variants``, each table with json columns also gets a view that shows them as VARIANT. With
    ``history="view"``, each table with a key also gets a view with its history (replica/history_view.py).

    With ``drops_columns``, a column that was dropped leaves the replica, if captured DDL says so (changelog/gone_columns.py). With
    ``follows_renames``, a table goes on in its tables under another name, if captured DDL says so (changelog/renames.py).
    ``readers``, ``widen``, ``deletes`` and ``column_names`` are those of `RunConfig`. ``masks`` adds to the masks that the
    warehouse has noted (`cdcpipe.masks`), ``{"public.person.ssn": "hash"}``.

    The replicas catch up with the changelogs every ``replica_interval_s`` seconds, with 0 after each micro-batch, with None every
    second, or less often where that takes long (pipeline/rounds.py). With ``history="table"`` the stored histories do so every
    ``history_interval_s`` seconds (pipeline/histories.py).

    A wait for another process that has the tables alone ends at `stop`, or once ``is_stopping`` is True: call `stop` then, too.
    """

    _spoken_name = "the pipeline"

    def __init__(
        self,
        spark: SparkSession,
        staging: Path | str,
        warehouse: Path | str,
        *,
        format: str = "delta",  # noqa: A002 - Spark's own word for it
        types: str = EXACT,
        readers: str = SPARK,
        widen: str | None = None,
        keys: Mapping[str, Sequence[str]] | None = None,
        describe: Callable[[], Iterable[Mapping[str, Any]]] | None = None,
        keyless_named: Iterable[str] = (),
        checkpoint: Path | str | None = None,
        max_bytes_per_trigger: int = MICRO_BATCH_BYTES,
        trigger_interval_s: float = 0.1,
        staging_shared: bool = True,
        catalog_database: str | None = None,
        json_variants: bool = False,
        replica_interval_s: float | None = None,
        masks: Mapping[str, str] | None = None,
        drops_columns: bool = False,
        follows_renames: bool = True,
        deletes: str = HARD,
        column_names: str = KEEP,
        history: str = OFF,
        history_interval_s: float = 60.0,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        session.check(spark, format)
        self.spark = spark = session.own(spark)
        """The session of this pipeline alone. Its ``streams`` have the query."""
        datasource.register(spark)
        self.staging = local_directory(staging, "the staging directory")
        rules = {"deletes": deletes, "column_names": column_names, "history": history}
        self.warehouse = Warehouse(warehouse, format, types=types, readers=readers, widen=widen, masks=masks, **rules)
        session.check_reach(spark, self.warehouse.root)
        local_root = self.warehouse.local_root(self.staging)
        self.checkpoint = local_root / CHECKPOINT if checkpoint is None else local_directory(checkpoint, "the checkpoint")
        answers = CatalogAnswers(describe)
        schemas = SchemaHistory(spark, self.warehouse, answers)
        choices = {"drops_columns": drops_columns, "is_following": follows_renames}
        self._tables = KnownTables(spark, self.warehouse, schemas, answers, keys, keyless_named, **choices)
        self._max_bytes_per_trigger = max_bytes_per_trigger
        self._pace = Pace(trigger_interval_s)
        self._staging_shared = staging_shared
        check_options(catalog_database, json_variants=json_variants, history=history)
        self._catalog = None
        if catalog_database is not None:
            variants = schemas if json_variants else None
            self._catalog = CatalogDatabase(spark, catalog_database, self.warehouse, variants, history_views=history == VIEW)
        self._server: SegmentServer | None = None
        self._serving = ExitStack()
        """What the query needs here. It is closed at the query's end."""
        self._replica_interval_s, self._history_interval_s = replica_interval_s, history_interval_s
        self._follower: Follower | None = None
        self._histories: Histories | None = None
        self._rounds: list[Rounds] = []  # the threads that follow the changelogs
        self._stopping = threading.Event()
        self.lock = TableLock(local_root, lambda: self._stopping.is_set() or is_stopping(), lambda: self._error is not None)
        """The rights to write the tables. Other writers in this process must use this object, too."""
        self._lock_state = b""
        self._owned = ExitStack()
        """Gives the tables free when it is closed: another pipeline may write them then."""
        self.batches, self.merges = Histogram(), Histogram()
        """How long each micro-batch, and each merge of a replica, took."""
        self.changes: Counter[Table] = Counter()
        """How many changes each changelog got since the start."""
        self._progress = PipelineProgress()
        self.query: StreamingQuery | None = None
        """Spark's query, for reading its progress; None before ``start``. To end the query, call ``stop`` of the pipeline."""
        self._starting = threading.RLock()  # held while query and threads start; a signal handler may call stop() in that thread
        self._batch_id: int | None = None
        """The newest micro-batch whose changes are in the tables."""
        self._available_now = False
        self._end: Position | None = None  # the log's end when the query was started
        self._source_ends = SourceEnds()
        # Held while a micro-batch runs, so that stop() waits for its end. Who may write the tables is decided by `lock`.
        self._batch_running = threading.Lock()

    # --- for the owner of the pipeline ---

    def start(self, *, available_now: bool = False) -> Self:
        """Start to follow the log. With ``available_now``, stop at the log's present end. Returns at once.

        Raises WarehouseError if another pipeline has tables or log, InterruptedError for a stop while it waits for a process that
        has the tables alone, or finishes a killed copy. This one has both until `stop` has ended, or `wait` returned True, or
        raised an error and no merge is running. Then it can be started again.
        """
        fit.check_log(self.warehouse, self.staging)  # before the lock makes a directory
        with self._starting, ExitStack() as owned:
            owned.enter_context(self.lock.own(self.warehouse.name, self.staging))
            self._stopping.clear()
            self._available_now = available_now
            self._begin()
            self._owned = owned.pop_all()
        return self

    def pass_gap(self) -> None:
        """Take note of a gap. Go on to the end of the log if only the gap is between: no segment would bring the tables there.

        The gap's copies may come before the changes from before it. So these must find that their server is not there any more.
        """
        with self._batch_running:
            position = self._progress.position
            assert position is not None
            record_epochs(self.warehouse, self.staging)
            behind = behind_gap(self.warehouse, self.staging, position)
            self._tables.read_names()
            self._progress = replace(self._progress, position=behind)

    def take_copied(self, tables: Iterable[Table]) -> None:
        """Name tables in the catalog that a snapshot has copied, and give them their comments: no change has to come for them."""
        tables = list(tables)
        if self._follower is not None:
            self._follower.copied(tables)
        if self._catalog is not None:
            self._catalog.forget_histories(tables)
            self._catalog.register(tables)

    def catch_up(self) -> None:
        """Bring the replicas to the positions of their changelogs."""
        if self._follower is not None:
            self._follower.catch_up()

    def finish_histories(self, is_stopping: Callable[[], bool]) -> None:
        """Bring the stored histories to the positions of their changelogs, and end their rounds. Ends early for a stop."""
        if self._histories is not None:
            self._histories.rounds.finish(is_stopping)

    def process_available(self) -> None:
        """Bring the tables to the log's present end. Returns when that is done, or stops at an error or an interrupt (^C)."""
        with self._raising_error():
            self.start(available_now=True)
            try:
                self.wait()
            except BaseException:
                with suppress(Exception):  # the first error is kept
                    self.stop()
                raise

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, and raise the error if there was one. Returns False if the time runs out first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            if not self._wait_for_query(deadline):
                return False
            self._serving.close()
            if self._error is None:
                for rounds in self._rounds:
                    rounds.end()
                for rounds in self._rounds:
                    if not rounds.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                        return False
            if self._error is not None:
                raise self._error
        except Exception:
            for rounds in self._rounds:
                rounds.end(is_last_round_wanted=False)
            if all(rounds.wait(_MERGES_S) for rounds in self._rounds):
                self._owned.close()
            raise
        self._owned.close()
        return True

    def _wait_for_query(self, deadline: float | None) -> bool:
        """Wait for the query's end. Restart it if only its source has failed. Returns False if the time runs out first."""
        while self.query is not None:
            try:
                if not await_end(self.query, self.spark, deadline):
                    return False
            except Exception as ex:
                self._serving.close()
                warning = None if self._error is not None else self._source_ends.warning(ex, self._progress.batches)
                if warning is None:
                    self._error = self._error or own_error(ex)  # the first error is kept
                    if self._error is ex or self._error.__cause__ is not None:
                        raise self._error  # noqa: B904 - it keeps its cause
                    raise self._error from ex
            else:
                is_complete = self._available_now and self._progress.has(self._end)
                if not is_complete and not self._stopping.is_set():
                    self._serving.close()
                    self._error = stopped_elsewhere("Spark's query", "its Pipeline or Runner")
                    raise self._error
                return True
            if self._stopping.is_set():
                return True
            _logger.warning(warning)
            self._stop_following(is_last_round_wanted=False)
            if self._error is not None:  # of the last round; a start would forget it
                raise self._error
            with self._starting:
                if self._stopping.is_set():  # another thread has called `stop` while the merges ended
                    return True
                try:
                    self._begin()
                except InterruptedError:
                    if self._stopping.is_set():
                        return True
                    raise
        return True

    def stop(self) -> None:
        """Stop after the running micro-batch, and after the replicas have caught up with the changelogs; histories need not.

        After an error, and while another process has the tables alone, skip the last round of merges.
        """
        self._stopping.set()
        with self._starting:  # what another thread is starting has to be there, so that it can be stopped
            pass
        with self._owned:
            try:
                self._stop_query()
            finally:  # no merge may run once the tables are free
                self._stop_following(is_last_round_wanted=self._error is None)

    def _stop_following(self, *, is_last_round_wanted: bool) -> None:
        # A round of the histories may take long, and the next start makes up for it.
        for each, is_wanted in ((self._follower, is_last_round_wanted), (self._histories, False)):
            if each is not None:
                each.rounds.end(is_last_round_wanted=is_wanted)
        for rounds in self._rounds:
            rounds.wait()

    def _stop_query(self) -> None:
        self._stopping.set()
        query = self.query
        with self._serving:  # it ends also if a full disk refuses to release segments
            if query is not None and is_running(query, self.spark):
                with self._batch_running:
                    # Wait for Spark to record the end of the micro-batch. Otherwise it logs a long error, and runs it again.
                    wait_until(query, self._is_recorded)
                # Called without the lock: Spark waits for a micro-batch that has just begun, and `_batch` ends that one.
                query.stop()
            if self._batch_id is not None and is_recorded(self.checkpoint, self._batch_id):  # Spark will not run it again
                end = micro_batch(self.checkpoint, self._batch_id)[1]
                release_segments(self.checkpoint, self._batch_id, self.staging, end, self.warehouse.name)

    def _is_recorded(self) -> bool:
        """Tell whether Spark has recorded the end of the last micro-batch."""
        return self._batch_id is None or is_recorded(self.checkpoint, self._batch_id)

    def _take_error(self, ex: BaseException) -> None:
        """Make an error of a thread that follows the changelogs the error of the pipeline, and stop the query."""
        self._end_with(own_error(ex))
        self._stop_query()

    @property
    def progress(self) -> PipelineProgress:
        """The present progress."""
        return self._progress

    def replicas(self) -> dict[Table, int | None]:
        """Return the LSN that each replica has; None for one that has all changes of its changelog."""
        return {} if self._follower is None else self._follower.replicas()

    @property
    def history_lsn(self) -> int | None:
        """Up to which LSN the stored histories have all changes; None without them, and before their first round.

        With an interval of 0 they follow only at the start and the end. In between nobody looks, and the answer is None, too.
        """
        return None if self._histories is None or self._history_interval_s == 0 else self._histories.lsn

    def shown(self, table: Table) -> Table:
        """Return a table such that it prints as its name now."""
        return self._tables.names.shown(table)

    @property
    def exact_counts(self) -> Mapping[tuple[Table, str], int]:
        """For each column, how many values since the start are text in ``_cdc_exact`` because the column's type can't hold them."""
        return self._tables.exact_counts

    # --- the stream ---

    def _begin(self) -> None:
        stream = self._stream()
        try:
            self._end = log_end(self.staging)
            self.query = stream.trigger(availableNow=True).start() if self._available_now else self._pace.start(self.spark, stream)
            for rounds in self._rounds:
                rounds.start()
        except BaseException as ex:  # also ^C: then Spark has the query, or makes it now, and we have no answer
            self._error = own_error(ex)  # a later `wait` raises it
            try:
                with suppress(Exception), self._serving:  # the first error is kept; a query that comes now can't call `_batch`
                    self.query = next(iter(self.spark.streams.active), self.query)
                    self._stop_query()
            finally:
                self._stop_following(is_last_round_wanted=False)
            raise

    def _stream(self) -> DataStreamWriter:
        self._error, self._batch_id = None, None
        start = self._open()
        with ExitStack() as serving:
            batch = serving.enter_context(callbacks.taken(self._batch))
            if not self._staging_shared:
                self._server = serve_segments(self.spark, self.staging)
                serving.callback(self._server.stop)
            reader = self.spark.readStream.format("cdcpipe").option("view", "segments").option("start", str(start))
            reader = reader.option("max_bytes_per_trigger", str(self._max_bytes_per_trigger))
            stream = reader.load(str(self.staging)).writeStream.queryName("cdcpipe").foreachBatch(batch)
            fit.tidy_checkpoint(self.warehouse, self.checkpoint, self.staging, start)
            self._serving = serving.pop_all()
        return stream.option("checkpointLocation", str(self.checkpoint))

    def _open(self) -> Position:
        """Make all ready for the query, and return the position from which to continue."""
        position = begin(self.warehouse, self.staging, self.checkpoint, self.lock, self._tables)
        self._progress = replace(self._progress, position=position)
        ends = finish_left(self.spark, self.warehouse, self.lock, self._tables, position)
        position = behind_gap(self.warehouse, self.staging, position)
        self._progress = replace(self._progress, position=position)
        if self._catalog is not None:
            self._catalog.rename()
            self._catalog.register([*self.warehouse.tables(), MESSAGES, SCHEMA_HISTORY, DDL])
        common = (self.spark, self.warehouse, self.lock, self._catalog)
        if self.warehouse.format.keeps_replicas:
            follower = Follower(*common, self._replica_interval_s, self._take_error, self.merges)
            follower.look(position.epoch, ends)
            self._follower = follower
        if self.warehouse.keeps_history:
            self._histories = Histories(*common, self._history_interval_s, self._take_error)
        self._rounds = [each.rounds for each in (self._follower, self._histories) if each is not None]
        return position

    def _batch(self, _rows: DataFrame, batch_id: int) -> None:
        """Write a micro-batch of segments to the tables. Spark calls this in a thread of this process."""
        began_at = time.monotonic()
        with self._batch_running:
            is_written = not self._stopping.is_set() and self._write(batch_id)
        if not is_written:  # end it as soon as the query is stopping
            self._stopping.wait()
            wait_until(self.query, lambda: False)
            raise StoppedError
        if not self._available_now:
            self._pace.rest(began_at, self._stopping.wait)

    def _write(self, batch_id: int) -> bool:
        """Write a micro-batch to the tables. Returns False for a stop while another process has the tables alone."""
        try:
            start, end = micro_batch(self.checkpoint, batch_id)
            with ExitStack() as held:
                try:
                    lock_state = held.enter_context(self.lock.append())
                except InterruptedError:
                    return False
                if lock_state != self._lock_state:  # another writer has changed the tables
                    self._tables.forget()
                    if self._catalog is not None and self._lock_state:
                        self._catalog.forget_histories()
                        self._catalog.register(self.warehouse.tables())
                    self._lock_state = lock_state
                with self.batches.timed():
                    self._process(start, end)
            self._batch_id = batch_id
            if start is not None:  # not ``end``: Spark may run this micro-batch again until it has recorded its end
                release_segments(self.checkpoint, batch_id - 1, self.staging, start, self.warehouse.name)
            # Outside the append block, because a thread holds only one right at a time.
            if self._follower is not None and self._replica_interval_s == 0:
                with suppress(InterruptedError):  # the next start makes up for it
                    self._follower.catch_up()
        except BaseException as ex:
            self._end_with(own_error(ex))
            raise
        return True

    def _process(self, start: Position | None, end: Position) -> None:
        """Write the changes of the log in (start, end] to the tables, except those that the tables already have."""
        position = self._progress.position
        assert position is not None
        fit.check_checkpoint(self.warehouse, self.checkpoint, start, position)
        counts: dict[Table, int] = {}
        if end.lsn > position.lsn:
            if end.epoch != position.epoch:
                self._tables.take_epochs(self.staging)
            segments = [segment for segment in list_segments(self.staging, position) if segment.end_lsn <= end.lsn]
            batch = MicroBatch(self._tables, segments, server=self._server, follower=self._follower, catalog=self._catalog)
            batch.append()
            if self._catalog is not None:
                captured = [DDL] if MESSAGES in batch.contents else []  # it comes in messages
                if batch.renamed:
                    self._catalog.rename()
                self._catalog.register([*sorted(batch.contents), *batch.renamed, SCHEMA_HISTORY, *captured])
            if self._histories is not None:
                self._histories.record(batch.contents.keys() - {MESSAGES})
            self.warehouse.record(end, self.staging)
            if self._follower is not None:
                self._follower.rounds.want()
            counts = {table: found.count for table, found in batch.contents.items()}
            # `pass_gap` can't pass a gap while the log has segments before it. If it has none after it, no micro-batch would come.
            position = behind_gap(self.warehouse, self.staging, end)
            if position != end:
                self._tables.take_epochs(self.staging)
        message_count = counts.pop(MESSAGES, 0)
        self.changes.update(counts)
        self._progress = self._progress.after_batch(position, sum(counts.values()), message_count, len(self.changes))
