"""Keeps Spark tables in step with a slot: the work of ``cdcpipe-spark run``, without its command line.

    config = RunConfig(LauncherConfig(slot="shop_cdc", publications=("shop",), staging=Path("staging")), "warehouse")

    with Runner(config) as runner:              # start() ... stop()
        while not runner.wait(10.0):            # raises the error that ended the run
            print(runner.progress)

The runner's own thread locks the staging directory, starts the launcher, copies the existing rows of the tables if necessary,
starts the pipeline and the upkeep, and stops them at the end. So an interrupt of the waiting thread (^C) never hits a call to
Spark.

Failures that can be foreseen are raised before a slot is created. If an error ends a run or its start, the runner records it in the
staging directory, where ``status`` finds it.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from cdcpipe.background import Background
from cdcpipe.errors import InitError
from spark_sink.client.keyless import has_key, table_name, warnings_of
from spark_sink.client.slot_monitor import Lag, SlotMonitor
from spark_sink.doctor.at_start import ServerLook, refuse_what_fails
from spark_sink.files.local import check_usable
from spark_sink.files.places import is_local
from spark_sink.files.system_hints import is_full
from spark_sink.launcher.launcher import Launcher
from spark_sink.pipeline.at_rest import Rest
from spark_sink.pipeline.failures import stopped_elsewhere
from spark_sink.pipeline.parts import make_healer, make_pipeline, make_session, make_upkeep
from spark_sink.pipeline.progress import PipelineProgress
from spark_sink.pipeline.published_now import PublishedNow
from spark_sink.schema.types import INEXACT_MESSAGE
from spark_sink.snapshot import two_looks
from spark_sink.snapshot.catalog_look import want_deleted
from spark_sink.snapshot.copy import Snapshot
from spark_sink.snapshot.gap import GapSnapshot, in_words
from spark_sink.snapshot.initial import InitialSnapshot
from spark_sink.spark import given, jvm, session, shared
from spark_sink.spark.failure import explained
from spark_sink.spark.interrupts import without_cancelling
from spark_sink.staging import last_error, samples
from spark_sink.staging.lock import StagingLock
from spark_sink.staging.log import log_end
from spark_sink.warehouse.belonging import check_belonging, copied_lsn, fed_tables, keep_segments, register_tables
from spark_sink.warehouse.mask_settings import check_kept, check_new

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

    from spark_sink.client.prepare import Prepared
    from spark_sink.launcher.launcher import Progress as LauncherProgress
    from spark_sink.pipeline.config import RunConfig
    from spark_sink.pipeline.failures import PipelineError
    from spark_sink.pipeline.pipeline import Pipeline
    from spark_sink.snapshot.copy import SnapshotProgress
    from spark_sink.snapshot.healer import Healer
    from spark_sink.upkeep.upkeep import Upkeep

__all__ = ["RunProgress", "Runner", "run"]

_logger = logging.getLogger(__name__)

_LOOK_S, _LAST_LOOK_S = 0.2, 0.1
"""How often to check for a stop or an end: while the launcher runs, and after it has ended."""

_WATCH_AFTER_S = 5.0
"""When the doctor and the monitor begin to look at the server. Until then the stream and Spark need the processors more."""

_LONGEST_END_S = 10.0
"""How long the JVM may take to end after a signal. systemd and timeout often send the signal to all our processes, also the JVM."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run is. ``snapshot`` is None if none is needed, ``tables`` is None while Spark starts or a snapshot runs."""

    launcher: LauncherProgress
    snapshot: SnapshotProgress | None
    tables: PipelineProgress | None
    lag: Lag | None
    """How far the tables are behind the server; None if unknown."""
    step: str = ""
    """What the run is doing, in words, before there are tables, and after they have all changes."""


class Runner(Background):
    """Keeps the tables of a warehouse in step with a slot, until it is stopped.

    With ``available_now``, it also ends when the tables have everything. If they have it from the start, Spark is not used
    (at_rest.py). Without ``spark``, it uses the session of this process, or makes one, which the last run in it stops (shared.py).
    """

    pipeline: Pipeline | None
    """The pipeline; None while Spark starts or the initial snapshot runs."""

    _spoken_name = "the run"

    def __init__(self, config: RunConfig, spark: SparkSession | None = None) -> None:
        super().__init__("cdcpipe-run")
        self.config = config
        self._spark = spark
        self._warehouse = config.house()
        self._rest = Rest(config, self._warehouse)
        self._untouched: PipelineProgress | None = None
        """The progress of a run that had nothing to do, and so no pipeline."""
        self._published = PublishedNow(config.launcher, self._stopping)
        source = config.launcher
        self.monitor = SlotMonitor(source.connection, source.slot, command=source.command, delay_s=_WATCH_AFTER_S)
        self.launcher = Launcher(source, self.monitor)
        self.launcher.logs_error = False  # it ends the run, too
        self._snapshot = InitialSnapshot(
            config.launcher, self._warehouse, config.snapshot, config.snapshot_chunk_bytes, config.snapshot_hold_s or 0.0
        )
        self._planned = config.planned()
        self._keyless_named: list[str] = []
        self._gaps_healed = 0
        self._gap_copy: Snapshot | None = None
        """The copies that run after a gap; None if none do."""
        self.has_open_gap: bool | None = None
        """Whether the tables lack changes because of a gap, and were not copied since; None until that is known."""
        self.pipeline = None
        self._healer: Healer | None = None
        self._is_complete = False
        self._step = "asking the server"

    # --- for the owner of the runner ---

    def start(self) -> Self:
        """Start the run, and return at once; while another thread makes a session with Spark's builder, wait for it first.

        Raises an error if the directories are not usable, or Java is missing.
        """
        launcher = self.config.launcher
        try:
            launcher.check_spill()
            if is_local(self._warehouse.root):
                check_usable(self._warehouse.root, "the warehouse")
            check_belonging(self._warehouse, launcher.staging, launcher.slot, begins_anew=self.config.snapshot is not None)
            check_kept(self._warehouse, launcher.staging)
            self._warehouse.masks.with_key()  # a missing key is found before there is a slot
            self._published.with_parts = bool(self._warehouse.masks.rules)
            self._spark = given.take(self._spark, self.config.format, self.config.conf)
            refuse_what_fails(self._planned, starts_spark=self._spark is None)
        except Exception as ex:
            last_error.note(launcher.staging, "run", explained(ex))
            raise
        return super().start()

    def request_stop(self) -> None:
        """Ask for a clean end, and return at once. Thread-safe."""
        super().request_stop()
        self.launcher.request_stop()

    @property
    def is_complete(self) -> bool:
        """Whether the run has ended because, with ``available_now``, the tables have everything."""
        return self._is_complete

    @property
    def waiting(self) -> int | None:
        """How many tables wait for a copy of their rows, as the healer last saw; None before its first look."""
        return None if self._healer is None else self._healer.waiting

    @property
    def progress(self) -> RunProgress:
        """The present progress."""
        pipeline, gap_copy = self.pipeline, self._gap_copy
        return RunProgress(
            self.launcher.progress,
            self._snapshot.progress if self._snapshot.is_needed else None,
            self._untouched if pipeline is None else pipeline.progress,
            self._lag(pipeline),
            self._step if gap_copy is None else in_words(gap_copy.progress),
        )

    # --- the runner's thread ---

    def _work(self) -> None:
        try:
            with ExitStack() as stack:
                self._bring(stack)
        except _StoppedError:
            _logger.info("stopped before Spark was started")
        last_error.clear(self.config.launcher.staging)

    def _bring(self, stack: ExitStack) -> None:
        """Bring the slot's changes to the tables until the run ends. ``stack`` stops all that was started, in reverse order."""
        self._start_stream(stack)
        if self._has_nothing_to_do():
            self._is_complete = True
        else:
            self._write_tables(stack)

    def _start_stream(self, stack: ExitStack) -> None:
        """Start the launcher, with the slot that the initial snapshot may make before it, and look at the catalog once."""
        config = self.config
        for text in config.without_effect():
            _logger.warning("%s", text)
        self._check_stopping()
        # Before anything is written: a start that is refused must not change what the process that works here relies on.
        self.launcher.lock = stack.enter_context(closing(StagingLock(config.launcher.staging)))
        stack.enter_context(self.monitor)  # before the launcher, which may wait for the slot: the metrics tell of the server
        stack.callback(self._snapshot.stop)
        self._snapshot.prepare(self._stopping.is_set)
        self._check_stopping()
        self._step = "starting the stream"
        self.launcher.tables = fed_tables(self._warehouse, config.launcher.staging)
        self.launcher.read_copied_lsn = lambda: copied_lsn(self._warehouse)
        keep_segments(self._warehouse, config.launcher.staging)
        self.launcher.register = lambda: register_tables(self._warehouse, config.launcher.staging)
        stack.enter_context(self.launcher)
        self._check_stopping()
        if self._snapshot.is_left and not self.launcher.progress.gaps:  # the launcher has found the slot: on another server
            self._snapshot.prepare(self._stopping.is_set)
            self._check_stopping()
            self.launcher.register()  # the tables that begin now were not known when the launcher began
        assert self.launcher.prepared is not None
        self._name_keyless(self.launcher.prepared)
        check_new(self._warehouse, self.launcher.prepared.tables)
        try:
            two_looks.begin(self._warehouse, config.launcher, self.launcher.prepared, self._stopping.is_set)
        except InterruptedError:
            self._check_stopping()
        self._snapshot.give_up()
        want_deleted(self._warehouse)

    def _write_tables(self, stack: ExitStack) -> None:
        """Bring the log's changes to the tables with Spark, and copy what the stream does not have, until the run ends."""
        config = self.config
        stack.enter_context(
            ServerLook(self._planned, command=config.launcher.command, delay_s=_WATCH_AFTER_S, is_stopping=self._stopping.is_set)
        )
        spark = stack.enter_context(self._session())  # the launcher already runs while Spark starts
        if self._snapshot.is_needed and not self._stopping.is_set():
            self._step = "looking at the tables to copy"
            self._copy(spark, self._snapshot)
        if self._stopping.is_set():
            return
        self._step = "starting the pipeline"
        self.pipeline = make_pipeline(config, spark, self._published.describe, self._keyless_named, self._stopping.is_set)
        with self.pipeline as pipeline:
            healer = self._healer = make_healer(config, spark, self._warehouse, pipeline, self._stopping.is_set)
            self._pass_gap(spark, pipeline, healer)
            upkeep = make_upkeep(config, spark, pipeline)
            try:
                if not config.launcher.available_now:
                    upkeep.start()
                    healer.start()
                self._step = ""
                self._follow(spark, pipeline, healer)
                if config.launcher.available_now:
                    self._finish(pipeline, healer, upkeep)
            finally:
                self.launcher.request_stop()
                healer.stop()
                upkeep.stop()
        for (table, name), count in sorted(pipeline.exact_counts.items()):
            _logger.warning(INEXACT_MESSAGE, pipeline.shown(table), name, count)
        self._is_complete = config.launcher.available_now and not self._stopping.is_set()
        if self._is_complete:
            self._rest.record(has_looked=healer.has_looked)

    def _finish(self, pipeline: Pipeline, healer: Healer, upkeep: Upkeep) -> None:
        """Do what is left when the changelogs have all changes."""
        self._step = "merging the last changes"
        pipeline.catch_up()  # a merge may find out that a table needs a copy
        self._step = "looking for tables that need a copy"
        healer.finish()
        self._step = "bringing the histories up to date"
        pipeline.finish_histories(self._stopping.is_set)  # the copies count in them
        self._step = "compacting tables"
        upkeep.run(self._stopping.is_set)

    def _has_nothing_to_do(self) -> bool:
        """Tell whether the run can end without Spark. Waits until the launcher has ended, or receives changes."""
        if self._snapshot.is_needed or not self._rest.is_possible():
            return False
        self._step = "looking for changes"
        while not self.launcher.wait(_LAST_LOOK_S):
            self._check_stopping()
            if self.launcher.progress.has_received:
                return False
        if self.launcher.progress.has_received or not self._rest.is_certain(self._stopping.is_set):
            self._check_stopping()
            return False
        self._untouched = PipelineProgress(self._rest.position())
        return True

    def _name_keyless(self, prepared: Prepared) -> None:
        """Log a warning for each table that will have no replica. The pipeline does that for tables that are added later."""
        for text in warnings_of(prepared.tables, keyed=self.config.keys):
            _logger.warning("%s", text)
        self._keyless_named = [table_name(table) for table in prepared.tables if not has_key(table)]

    def _check_stopping(self) -> None:
        if self._stopping.is_set():
            raise _StoppedError

    @contextmanager
    def _session(self) -> Iterator[SparkSession]:
        """Yield a session of the run's own, a copy: of an existing one, or else of one that runs make, and stop at the end."""

        def note(step: str) -> None:
            self._step = step

        def build(*, on_made: Callable[[SparkSession], object]) -> SparkSession:
            self._check_stopping()  # it may have waited until another run had started Spark
            try:
                return make_session(self.config, self._warehouse, on_step=note, on_made=on_made)
            except InitError:
                if jvm.may_have_been_asked():
                    self._check_stopping()  # the signal that asked us to stop may have ended the JVM, too
                raise

        with shared.entered(self._spark, build) as spark:
            self._spark = spark
            yield session.own(spark)

    def _copy(self, spark: SparkSession, snapshot: Snapshot) -> None:
        """Copy the tables. Stops early if the run is asked to stop."""
        try:
            snapshot.start(spark, self._stopping.is_set)
            while not snapshot.wait(_LOOK_S) and not self._stopping.is_set():
                self._check_others()
        finally:
            snapshot.stop()

    def _check_others(self) -> None:
        """Raise the error that ended the launcher or the pipeline. If only the source of the pipeline has failed, start it again.

        Nobody else does this while the runner's thread waits for something.
        """
        if self.launcher.has_ended:
            self.launcher.wait()
        if self.pipeline is not None and self.pipeline.wait(0.0):
            raise _ended_pipeline()

    def _pass_gap(self, spark: SparkSession, pipeline: Pipeline, healer: Healer) -> None:
        """Copy all tables anew if the log has a gap since they were copied."""
        config = self.config
        self._gaps_healed = self.launcher.progress.gaps
        pipeline.pass_gap()
        snapshot = GapSnapshot(
            config.launcher,
            self._warehouse,
            config.snapshot_chunk_bytes,
            config.snapshot_hold_s or 0.0,
            is_ahead=lambda: self.launcher.progress.is_ahead,
        )
        assert self.launcher.prepared is not None
        self.has_open_gap = not snapshot.record_if_healed(self.launcher.prepared.tables)
        if not self.has_open_gap:
            return

        def is_stopping() -> bool:
            if not self._stopping.is_set():
                self._check_others()
            return self._stopping.is_set()

        self._gap_copy = snapshot
        try:
            with healer.paused():
                try:
                    snapshot.prepare(is_stopping)  # it may wait for hours, until the server's WAL has passed the gap
                except InterruptedError:
                    return
                self._copy(spark, snapshot)
                pipeline.take_copied(snapshot.copied)
                self.has_open_gap = self._stopping.is_set()
        finally:
            self._gap_copy = None

    def _follow(self, spark: SparkSession, pipeline: Pipeline, healer: Healer) -> None:
        """Wait until the run is asked to stop, or with ``available_now`` until the tables have the whole log.

        If the launcher's disk is full, the tables take the whole log before this raises the launcher's error. So the next launcher
        can remove segments.
        """
        launcher, is_told = self.launcher, False

        def count() -> samples.Counts:
            return _counts(launcher.progress, pipeline.progress, self._lag(pipeline))

        recorder = samples.Recorder(self.config.launcher.staging, time.monotonic(), count())
        while not self._stopping.is_set():
            if pipeline.wait(_LAST_LOOK_S if launcher.has_ended else _LOOK_S):
                raise _ended_pipeline()
            recorder.tick(time.monotonic(), time.time(), count)
            if launcher.progress.gaps > self._gaps_healed:
                self._pass_gap(spark, pipeline, healer)
            healer.check()
            healer.count_tables(pipeline.progress.tables)
            if not launcher.has_ended:
                continue
            # With available_now the launcher ends by itself, and the log is complete then.
            if launcher.error is None or not is_full(launcher.error) or self._has_all(pipeline):
                launcher.wait()  # raises the error that ended it
                if self._has_all(pipeline):
                    return
            elif not is_told:
                is_told = True
                _logger.warning("%s; the tables take what is in the log before run ends", launcher.error)

    def _has_all(self, pipeline: Pipeline) -> bool:
        """Tell whether the changelogs have all changes of the log."""
        return pipeline.progress.has(log_end(self.config.launcher.staging))

    def _take_error(self, ex: BaseException) -> None:
        """Record the error that ended the run, unless the error is a result of the request to stop."""
        is_stopping = self._stopping.is_set()
        if is_stopping and isinstance(ex, InterruptedError):
            _logger.info("stopped before the pipeline could go on; what the tables lack comes with the next start")
            last_error.clear(self.config.launcher.staging)
            return
        has_spark_ended = self._spark is not None and jvm.has_ended(_LONGEST_END_S if is_stopping else jvm.END_S)
        if self._published.is_interrupted:
            _logger.info("stopped while the server was asked for its tables; what the tables lack comes with the next start")
        elif is_stopping and has_spark_ended and jvm.may_have_been_asked():
            _logger.info("Spark was ended by the signal, too; what the tables lack comes with the next start")
        else:
            error: BaseException = explained(ex)
            if has_spark_ended:
                error = session.ended_error()
                error.__cause__ = ex
            jvm.show_held()
            last_error.note(self.config.launcher.staging, "run", error)
            self._end_with(error)
            return
        last_error.clear(self.config.launcher.staging)  # these are good ends, too

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait as `Background.wait` does. ^C raises KeyboardInterrupt here, and cancels no job of the tables."""
        with without_cancelling():
            return super().wait(timeout_s)

    def stop(self) -> None:
        """Stop as `Background.stop` does. ^C does here what it does in `wait`."""
        with without_cancelling():
            super().stop()

    # --- the lag behind the server ---

    def _lag(self, pipeline: Pipeline | None) -> Lag | None:
        """Return how far the tables are behind the server; None if unknown."""
        if self._is_complete:  # changes from after the start are not wanted
            return Lag(0, 0.0)
        if pipeline is None:
            return None
        now = time.monotonic()
        progress, report, position = self.launcher.progress, self.monitor.report(now), pipeline.progress.position
        sealed = progress.position
        if report is None or sealed is None or position is None or progress.is_ahead:
            return None
        # If the tables have all sealed segments, they have all changes up to the confirmed position.
        lsn = position.lsn if position.lsn < sealed.lsn else max(position.lsn, report.confirmed_flush_lsn or 0)
        return self.monitor.lag(lsn, now)


def _counts(launcher: LauncherProgress, tables: PipelineProgress, lag: Lag | None) -> samples.Counts:
    """Return what a sample of the history is made of."""
    rows, behind = tables.changes + tables.messages, (None, None) if lag is None else (lag.bytes, lag.seconds)
    return samples.Counts(launcher.records, launcher.size, rows, *behind)


def _ended_pipeline() -> PipelineError:
    """Return the error for a pipeline that has ended without one. The pipeline of a run never ends by itself."""
    return stopped_elsewhere("the pipeline", "its Runner")


def run(config: RunConfig, spark: SparkSession | None = None) -> None:
    """Keep the tables in step with the slot until ``available_now`` is reached. ^C ends the run cleanly. Raises the run's error."""
    runner = Runner(config, spark)
    runner.logs_error = False  # it is raised here
    with runner:
        runner.wait()


class _StoppedError(Exception):
    """The run was asked to stop before it had anything to clean up."""
