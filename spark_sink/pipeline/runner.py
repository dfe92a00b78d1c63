"""What ``cdcpipe-spark run`` does, without a command line: it keeps Spark tables in step with a slot.

    config = RunConfig(LauncherConfig(slot="shop_cdc", publications=("shop",), staging=Path("staging")), "warehouse")

    with Runner(config) as runner:              # start() ... stop()
        while not runner.wait(10.0):            # raises what ended it
            print(runner.progress)

    run(config)                                 # the same, until it ends

A thread of its own starts the launcher, copies what the tables held if that is needed, starts the pipeline and the upkeep, and ends
them. So an interrupt of the thread that waits (^C) never falls into a call to Spark.

What is certain to fail shows before there is a slot. The error that ended a run is noted in the staging directory, for ``status``.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pyspark.sql import SparkSession

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.client.keyless import has_key, table_name, warnings_of
from spark_sink.client.prepare import PublishedNow
from spark_sink.client.slot_monitor import Lag, SlotMonitor
from spark_sink.files.local import check_usable
from spark_sink.files.places import is_local
from spark_sink.launcher.launcher import Launcher
from spark_sink.pipeline.catalog import parse_database
from spark_sink.pipeline.pipeline import Pipeline
from spark_sink.schema.table import EXACT, TYPES
from spark_sink.schema.types import INEXACT_MESSAGE
from spark_sink.snapshot.copy import CHUNK_BYTES
from spark_sink.snapshot.initial import InitialSnapshot
from spark_sink.spark import session
from spark_sink.staging import last_error
from spark_sink.staging.log import log_end
from spark_sink.upkeep.upkeep import Upkeep
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from spark_sink.client.prepare import Prepared
    from spark_sink.launcher.launcher import LauncherConfig
    from spark_sink.launcher.launcher import Progress as LauncherProgress
    from spark_sink.pipeline.pipeline import PipelineProgress
    from spark_sink.snapshot.copy import SnapshotProgress

__all__ = ["RunConfig", "RunProgress", "Runner", "run"]

_logger = logging.getLogger(__name__)

_LOOK_S, _LAST_LOOK_S = 0.2, 0.1
"""How often to look whether there is something to do, and how often once nothing more comes."""

_LONGEST_END_S = 10.0
"""So long the JVM may take to end by a signal: what stops us (systemd, timeout) often sends it to all our processes."""
_END_S = 1.0
"""So long after the first error the JVM may be seen to have ended, which is why there is one then."""

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What ``cdcpipe-spark run`` takes as options. None for an interval, a retention or an age: not at all."""

    launcher: LauncherConfig
    """The slot, the staging directory, and with ``available_now`` an end once all is in the tables that is committed now."""
    warehouse: Path | str
    """Where the tables are: a directory, or a URL of an object store."""

    # --- tables ---
    format: str = "delta"
    """``delta`` or ``parquet``."""
    types: str = EXACT
    """``exact`` or ``native``: with native every numeric is a decimal. A warehouse keeps what it began with."""
    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Columns that identify a table's rows where PostgreSQL has no primary key, ``{"public.orders": ["id"]}``: see `Pipeline`."""
    catalog_database: str | None = None
    """The database, or CATALOG.DATABASE, in which the tables get names."""
    json_variants: bool = False
    """Whether tables with json have a view beside them that has it as VARIANT; needs ``catalog_database``."""
    max_bytes_per_trigger: int = 256 << 20
    """A micro-batch takes no more segments than have this size, but at least one."""
    trigger_interval_s: float = 1.0
    """A micro-batch begins no sooner than this after the one before it."""
    replica_interval_s: float = 10.0
    """How often the replicas are brought to where the changelogs are; 0: in each micro-batch."""
    checkpoint: Path | str | None = None
    """Spark's checkpoint; None: in the warehouse, or for one in a store in the staging directory."""

    # --- snapshot ---
    snapshot: Literal["initial", "never"] | None = None
    """Whether to copy first what the tables hold; None: where the slot is made now."""
    snapshot_chunk_bytes: int = CHUNK_BYTES
    """A snapshot reads a table in pieces of about this size."""
    snapshot_hold_s: float | None = 600.0
    """So long the server holds the snapshot after a kill or an error, for the next start to go on with the copy."""

    # --- upkeep (Delta) ---
    optimize_interval_s: float | None = 3600.0
    """How often each table is looked at, to put small files together."""
    cluster_replicas: bool = False
    """Whether replicas are sorted by key where their files are put together."""
    vacuum_retention_s: float | None = 7 * _DAY_S
    """Files that have not been part of a table for so long are deleted."""
    log_retention_s: float | None = _DAY_S
    """So long the tables' logs are kept."""
    keep_changelog_s: float | None = None
    """Changes that are older are dropped from the changelogs."""

    # --- Spark ---
    master: str | None = None
    """Spark's master; None: ``local[2]``, or under spark-submit the one given there."""
    conf: Mapping[str, str] = field(default_factory=dict)
    """Settings of Spark."""
    jars_dir: Path | str | None = None
    """A directory of jars for Spark, where Maven Central can't be reached."""
    ui: bool = False
    """Whether Spark serves its user interface."""
    staging_shared: bool = True
    """Whether executors see the staging directory at the same path; without that they get its segments from this process."""

    def __post_init__(self) -> None:
        """Refuse what is not known, or does not go together."""
        for name, choices in (("types", TYPES), ("snapshot", (None, "initial", "never"))):
            if getattr(self, name) not in choices:
                raise InvalidArgumentsError(f"{name} is {getattr(self, name)!r}; it is one of {', '.join(map(repr, choices))}")
        house = Warehouse(self.warehouse, self.format, self.types)
        if self.catalog_database is not None:
            parse_database(self.catalog_database)
        elif self.json_variants:
            raise InvalidArgumentsError(
                "--json variant makes views in the catalog", hint="name a database there: --catalog-database"
            )
        if self.keep_changelog_s is not None and not house.format.has_upkeep:
            raise InvalidArgumentsError(
                "--keep-changelog is for Delta tables: with Parquet the current rows are made of the changelog",
                hint="now and then cdcpipe-spark snapshot --table, and cdcpipe-spark purge for what is before it",
            )


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run is. None for what has not begun: ``snapshot`` without one, ``tables`` while Spark starts or a snapshot runs."""

    launcher: LauncherProgress
    snapshot: SnapshotProgress | None
    tables: PipelineProgress | None
    lag: Lag | None
    """How far the tables are behind the server; None if that is not known."""


class Runner:
    """Keeps the tables of a warehouse in step with a slot until it is stopped, or with ``available_now`` until all is there.

    Without ``spark`` it takes the session that is active, or makes one, which it stops at its end.
    """

    def __init__(self, config: RunConfig, spark: SparkSession | None = None) -> None:
        self.config = config
        self._spark = spark
        self._warehouse = Warehouse(config.warehouse, config.format, config.types)
        self._stopping = threading.Event()
        self._launcher = Launcher(config.launcher)
        self._published = PublishedNow(config.launcher, self._stopping)
        self._monitor = SlotMonitor(
            config.launcher.connection,
            config.launcher.slot,
            command=config.launcher.command,
            on_report=lambda report: self._launcher.note_confirmed(report.confirmed_flush_lsn),
        )
        self._snapshot = InitialSnapshot(
            config.launcher, self._warehouse, config.snapshot, config.snapshot_chunk_bytes, config.snapshot_hold_s or 0.0
        )
        self._keyless_named: list[str] = []
        self._pipeline: Pipeline | None = None
        self._error: BaseException | None = None
        self._is_complete = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cdcpipe-run", daemon=True)

    # --- for its owner ---

    def start(self) -> Self:
        """Begin, and return at once. Raise what is certain to fail."""
        if is_local(self._warehouse.root):
            check_usable(self._warehouse.root, "the warehouse")
        self._spark = self._spark or SparkSession.getActiveSession()
        if self._spark is None:
            session.find_java()
        self._thread.start()
        return self

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end and raise the error, if it ended with one; return False if it has not ended in time."""
        if not self._ended.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def request_stop(self) -> None:
        """Ask for a clean end, and return at once. From any thread."""
        self._stopping.set()
        self._launcher.request_stop()

    def stop(self) -> None:
        """End cleanly and return when that is done; ``wait`` tells whether there was an error."""
        self.request_stop()
        if self._thread.ident is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, _value: BaseException | None, _tb: TracebackType | None) -> None:
        self.stop()
        if kind is None:
            self.wait()

    @property
    def is_complete(self) -> bool:
        """Whether it has ended because, with ``available_now``, everything is in the tables."""
        return self._is_complete

    @property
    def progress(self) -> RunProgress:
        """How far it is, at this moment."""
        pipeline = self._pipeline
        return RunProgress(
            self._launcher.progress,
            self._snapshot.progress if self._snapshot.is_needed else None,
            None if pipeline is None else pipeline.progress,
            None if pipeline is None else self._lag(pipeline),
        )

    # --- its thread ---

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                self._work(stack)
            last_error.clear(self.config.launcher.staging)
        except _StoppedError:
            _logger.info("stopped before Spark was started")
        except BaseException as ex:  # noqa: BLE001 - it is raised again in the thread that waits
            self._take_error(ex)
        finally:
            self._ended.set()

    def _work(self, stack: ExitStack) -> None:
        """Take the slot's changes to the tables until it is to end. What is begun ends with ``stack``, the last thing first."""
        config = self.config
        stack.callback(self._snapshot.stop)
        self._snapshot.prepare(self._stopping.is_set)
        self._check_stopping()
        stack.enter_context(self._launcher)
        self._check_stopping()
        assert self._launcher.prepared is not None
        self._name_keyless(self._launcher.prepared)
        stack.enter_context(self._monitor)
        spark = stack.enter_context(self._session())  # while it starts, the launcher is at work
        if self._snapshot.is_needed and not self._stopping.is_set():
            self._copy(spark)
        if self._stopping.is_set():
            return
        with self._make_pipeline(spark) as pipeline:
            upkeep = self._make_upkeep(spark, pipeline)
            try:
                if not config.launcher.available_now:
                    upkeep.start()
                self._follow(pipeline)
                if config.launcher.available_now:
                    upkeep.run(self._stopping.is_set)
            finally:
                self._launcher.request_stop()
                upkeep.stop()
        for (table, name), count in sorted(pipeline.exact_counts.items()):
            _logger.warning(INEXACT_MESSAGE, table, name, count)
        self._is_complete = config.launcher.available_now and not self._stopping.is_set()

    def _name_keyless(self, prepared: Prepared) -> None:
        """Say which tables will have no replica; the pipeline says so of tables that come later."""
        for text in warnings_of(prepared.tables, keyed=self.config.keys):
            _logger.warning("%s", text)
        self._keyless_named = [table_name(table) for table in prepared.tables if not has_key(table)]

    def _check_stopping(self) -> None:
        if self._stopping.is_set():
            raise _StoppedError

    @contextmanager
    def _session(self) -> Iterator[SparkSession]:
        """Make a session, and stop it at the end; one that was there goes on."""
        if self._spark is not None:
            yield self._spark
            return
        config = self.config
        self._spark = session.build(
            app_name=f"cdcpipe {config.launcher.slot}",
            master=config.master,
            format=config.format,
            conf=config.conf,
            jars_dir=config.jars_dir,
            ui=config.ui,
        )
        try:
            yield self._spark
        finally:
            if not session.has_ended(self._spark, 0):
                self._spark.stop()

    def _copy(self, spark: SparkSession) -> None:
        """Take the snapshot; give up when asked to stop."""
        self._snapshot.start(spark, self.config.launcher.staging)
        try:
            while not self._snapshot.wait(_LOOK_S) and not self._stopping.is_set():
                if self._launcher.has_ended:
                    self._launcher.wait()  # raises why
        finally:
            self._snapshot.stop()

    def _make_pipeline(self, spark: SparkSession) -> Pipeline:
        config = self.config
        self._pipeline = Pipeline(
            spark,
            config.launcher.staging,
            config.warehouse,
            format=config.format,
            types=config.types,
            keys=config.keys,
            describe=self._published.describe,
            keyless_named=self._keyless_named,
            checkpoint=config.checkpoint,
            max_bytes_per_trigger=config.max_bytes_per_trigger,
            trigger_interval_s=config.trigger_interval_s,
            staging_shared=config.staging_shared,
            catalog_database=config.catalog_database,
            json_variants=config.json_variants,
            replica_interval_s=config.replica_interval_s,
        )
        return self._pipeline

    def _make_upkeep(self, spark: SparkSession, pipeline: Pipeline) -> Upkeep:
        config = self.config
        return Upkeep(
            spark,
            self._warehouse,
            pipeline.lock,
            optimize_interval_s=config.optimize_interval_s,
            vacuum_retention_s=config.vacuum_retention_s,
            log_retention_s=config.log_retention_s,
            keep_changelog_s=config.keep_changelog_s,
            clustering=config.cluster_replicas,
        )

    def _follow(self, pipeline: Pipeline) -> None:
        """Wait until it is to stop, or with ``available_now`` until the tables have all that has landed."""
        launcher = self._launcher
        while not self._stopping.is_set() and not pipeline.wait(_LAST_LOOK_S if launcher.has_ended else _LOOK_S):
            # With available_now it ends by itself, and what has landed is all.
            if launcher.has_ended and launcher.wait() and self._has_all(pipeline):
                return

    def _has_all(self, pipeline: Pipeline) -> bool:
        """Tell whether the changelogs have the whole log."""
        position, end = pipeline.progress.position, log_end(self.config.launcher.staging)
        return end is None or (position is not None and position.lsn >= end.lsn)

    def _take_error(self, ex: BaseException) -> None:
        """Take what it ended with for its error, unless it was to stop and that is why."""
        is_stopping = self._stopping.is_set()
        has_spark_ended = self._spark is not None and session.has_ended(self._spark, _LONGEST_END_S if is_stopping else _END_S)
        if self._published.is_interrupted:
            _logger.info("stopped while the server was asked for its tables; what the tables lack comes with the next start")
        elif is_stopping and has_spark_ended:
            _logger.info("Spark was ended by the signal, too; what the tables lack comes with the next start")
        else:
            self._error = ex
            if has_spark_ended:
                self._error = session.ended_error()
                self._error.__cause__ = ex
            last_error.note(self.config.launcher.staging, "run", self._error)

    # --- what is known of the server ---

    def _lag(self, pipeline: Pipeline) -> Lag | None:
        """Return how far the tables are behind the server, None where that is not known."""
        if self._is_complete:  # what has come to the server since the start is not to be taken
            return Lag(0, 0.0)
        now = time.monotonic()
        report, sealed, position = self._monitor.report(now), self._launcher.progress.position, pipeline.progress.position
        if report is None or sealed is None or position is None:
            return None
        # With all that is sealed the tables have all that there was for them up to what is confirmed.
        lsn = position.lsn if position.lsn < sealed.lsn else max(position.lsn, report.confirmed_flush_lsn or 0)
        return self._monitor.lag(lsn, now)


def run(config: RunConfig, spark: SparkSession | None = None) -> None:
    """Keep the tables in step until an error, which is raised, or the end of ``available_now``. ^C ends it cleanly."""
    with Runner(config, spark) as runner:
        runner.wait()


class _StoppedError(Exception):
    """It was to stop before there was anything to put in order."""
