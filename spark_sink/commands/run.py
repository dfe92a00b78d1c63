"""``cdcpipe-spark run``: the launcher and the pipeline in one process."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import cloup

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.retry import RetryPolicy
from spark_sink.client.prepare import Prepared, ask_published
from spark_sink.client.slot_monitor import Lag, SlotMonitor
from spark_sink.commands.options import (
    CONTEXT_SETTINGS,
    launcher_config,
    launcher_options,
    log_to_stderr,
    snapshot_options,
    verbose_option,
)
from spark_sink.commands.parameters import DIRECTORY, PLACE, hour_or_off, minute_or_off, parse_amount
from spark_sink.commands.progress import ProgressLine, SnapshotLine
from spark_sink.commands.signals import kept, on_signals
from spark_sink.commands.spark_options import parse_settings, session_options
from spark_sink.files.local import check_usable
from spark_sink.files.places import is_local
from spark_sink.launcher.launcher import Launcher, LauncherConfig
from spark_sink.schema.table import EXACT, TYPES
from spark_sink.staging import known_position, last_error
from spark_sink.staging.log import log_end
from spark_sink.warehouse.formats import FORMATS
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import SparkSession

    from spark_sink.client.slot_monitor import SlotReport
    from spark_sink.launcher.launcher import Progress
    from spark_sink.pipeline.pipeline import Pipeline, PipelineProgress
    from spark_sink.snapshot.initial import InitialSnapshot

__all__ = ["command"]

_logger = logging.getLogger(__name__)

_LAST_INTERVAL_S = 0.1
"""How often to look whether the tables have everything, once nothing more comes."""

_RECONNECT = RetryPolicy(within_s=60.0, first_pause_s=1.0)
"""A server that is asked for its tables may be restarting."""

_EXAMPLE = """\b
Example:
  cdcpipe-spark run -d shop -S shop_cdc --publication shop -c --snapshot initial \\
      --staging staging --warehouse warehouse --available-now
"""


@cloup.command("run", context_settings=CONTEXT_SETTINGS, epilog=_EXAMPLE)
@launcher_options
@cloup.option_group(
    "Tables",
    cloup.option(
        "--warehouse",
        required=True,
        type=PLACE,
        metavar="DIR|URL",
        help="Write the tables to this directory, or to this place in an object store (s3a://BUCKET/KEY).",
    ),
    cloup.option(
        "--format",
        "table_format",
        type=click.Choice(list(FORMATS)),
        default="delta",
        show_default=True,
        help="Write the tables in this format; Parquet needs no jar, and its replicas are views.",
    ),
    cloup.option(
        "--types",
        type=click.Choice(TYPES),
        default=EXACT,
        show_default=True,
        help="Choose the types of numbers; native makes every numeric a decimal, one without precision a decimal(38,18).",
    ),
    cloup.option(
        "--catalog-database",
        metavar="NAME",
        help="Name the tables in this database, or CATALOG.DATABASE, of Spark's catalog: SCHEMA__TABLE, SCHEMA__TABLE__changelog.",
    ),
    cloup.option(
        "--json",
        "json_as",
        type=click.Choice(["text", "variant"]),
        default="text",
        show_default=True,
        help="With variant, make a view NAME_variant with VARIANT columns beside each table of the catalog that has json or jsonb.",
    ),
    cloup.option(
        "--max-bytes-per-trigger",
        type=parse_amount,
        metavar="SIZE",
        default="256MiB",
        show_default=True,
        help="Take segments of at most this size into a micro-batch, but at least one segment.",
    ),
    cloup.option(
        "--trigger-interval",
        type=click.FloatRange(min=0.0, max=86400.0),
        metavar="SECS",
        default=1,
        show_default=True,
        help="Begin a micro-batch no sooner than this after the beginning of the last one.",
    ),
    cloup.option(
        "--replica-interval",
        type=click.FloatRange(min=0.0, max=86400.0),
        metavar="SECS",
        default=10,
        show_default=True,
        help="Bring the replicas to where the changelogs are this often; 0: in each micro-batch.",
    ),
)
@cloup.option_group(
    "Snapshot",
    cloup.option(
        "--snapshot",
        "snapshot_mode",
        type=click.Choice(["initial", "never"]),
        show_default="initial where -c makes the slot, never for a slot that exists",
        help="Copy first what the tables hold, or never.",
    ),
    *snapshot_options,
)
@cloup.option_group(
    "Upkeep of Delta tables",
    cloup.option(
        "--optimize-interval",
        type=minute_or_off,
        metavar="DURATION",
        default="1h",
        show_default=True,
        help="Look at each table this often, and compact its small files once there are more than 16; or off.",
    ),
    cloup.option(
        "--cluster-replicas",
        is_flag=True,
        help="Sort a replica by key when its files are compacted, which suits keys that come in no order (random UUIDs), and"
        " rewrites up to 2 GiB each time.",
    ),
    cloup.option(
        "--vacuum-retention",
        type=hour_or_off,
        metavar="DURATION",
        default="7d",
        show_default=True,
        help="Delete, once a day, files that have not been part of the table for so long, at least an hour; or off.",
    ),
    cloup.option(
        "--log-retention",
        type=hour_or_off,
        metavar="DURATION",
        default="1d",
        show_default=True,
        help="Keep the tables' logs for so long, at least an hour, and no stream that reads a table may stand still longer; or off:"
        " 30 days, as Delta does.",
    ),
    cloup.option(
        "--keep-changelog",
        type=hour_or_off,
        metavar="DURATION",
        default="off",
        show_default=True,
        help="Remove, once a day and for good, changes that committed longer ago (30d), as cdcpipe-spark purge does.",
    ),
)
@cloup.option_group(
    "Spark",
    *session_options,
    cloup.option(
        "--staging-shared",
        type=click.Choice(["yes", "no"]),
        default="yes",
        show_default=True,
        help="Say whether executors see the staging directory at the same path; with no they get its segments from the driver.",
    ),
    cloup.option(
        "--checkpoint",
        type=DIRECTORY,
        metavar="DIR",
        show_default="_cdcpipe/checkpoint in the warehouse, or in the staging directory where that is in an object store",
        help="Keep Spark's checkpoint in this directory.",
    ),
    cloup.option("--ui", is_flag=True, help="Let Spark serve its user interface."),
)
@verbose_option
def command(
    *,
    warehouse: Path,
    table_format: str,
    types: str,
    jars: Path | None,
    master: str | None,
    confs: tuple[str, ...],
    staging_shared: str,
    catalog_database: str | None,
    json_as: str,
    ui: bool,
    checkpoint: Path | None,
    max_bytes_per_trigger: int,
    trigger_interval: float,
    replica_interval: float,
    snapshot_mode: str | None,
    snapshot_chunk_size: int,
    snapshot_hold: float | None,
    optimize_interval: float | None,
    cluster_replicas: bool,
    vacuum_retention: float | None,
    log_retention: float | None,
    keep_changelog: float | None,
    **options: Any,
) -> None:
    """Keep Spark tables in step with a slot: every change once in a changelog, the current rows in a replica.

    If -c makes the slot, the tables begin with a copy of what they hold on the server, as of the slot's beginning.

    Changes go to the staging directory first. They are confirmed to the server as soon as they are durable there, and the tables
    follow. SIGINT and SIGTERM end the command in order. After a kill, start it again: nothing is missing and nothing is twice.
    """
    from spark_sink.pipeline.catalog import parse_database
    from spark_sink.pipeline.pipeline import Pipeline
    from spark_sink.schema.types import INEXACT_MESSAGE
    from spark_sink.snapshot.initial import InitialSnapshot
    from spark_sink.spark import session
    from spark_sink.upkeep.upkeep import Upkeep

    settings = parse_settings(confs)
    house = Warehouse(warehouse, table_format, types)
    if catalog_database is not None:
        parse_database(catalog_database)
    elif json_as == "variant":
        raise InvalidArgumentsError("--json variant makes views in the catalog", hint="name a database there: --catalog-database")
    if keep_changelog is not None and not house.format.has_upkeep:
        raise InvalidArgumentsError(
            "--keep-changelog is for Delta tables: with Parquet the current rows are made of the changelog",
            hint="now and then cdcpipe-spark snapshot --table, and cdcpipe-spark purge for what is before it",
        )
    config = launcher_config(**options)
    log_to_stderr(verbose=config.verbose)
    # What is certain to fail had better do so before there is a slot.
    if is_local(house.root):
        check_usable(house.root, "the warehouse")
    session.find_java()
    stopping = threading.Event()
    launcher = Launcher(config)

    def request_stop() -> None:
        stopping.set()
        launcher.request_stop()

    context = click.get_current_context()
    asked = context.with_resource(on_signals(request_stop))
    published = _Catalog(config, stopping)
    snapshot = InitialSnapshot(config, house, snapshot_mode, snapshot_chunk_size, snapshot_hold or 0.0)
    spark = pipeline = upkeep = None
    line = ProgressLine(time.monotonic())
    monitor = SlotMonitor(
        config.connection, config.slot, command=config.command, on_report=lambda report: _note_known(launcher, report)
    )

    is_complete = False

    def show(pipeline: Pipeline, *, is_last: bool = False) -> None:
        progress, tables = launcher.progress, pipeline.progress
        # With --available-now what has come to the server since the start is not to be taken.
        lag = Lag(0, 0.0) if is_complete else _lag(monitor, progress, tables)
        line.update(progress, time.monotonic(), tables=tables, lag=lag, is_last=is_last)

    try:
        snapshot.prepare(stopping.is_set)
        if stopping.is_set():
            raise _StoppedError
        launcher.start()
        if stopping.is_set():
            raise _StoppedError
        assert launcher.prepared is not None
        _name_keyless(launcher.prepared)
        monitor.start()
        # While it starts, the launcher is at work.
        with kept():
            spark = session.build(
                app_name=f"cdcpipe {config.slot}", master=master, format=table_format, conf=settings, jars_dir=jars, ui=ui
            )
        if snapshot.is_needed and not stopping.is_set():
            _copy(snapshot, spark, launcher, stopping)
        pipeline = Pipeline(
            spark,
            config.staging,
            warehouse,
            format=table_format,
            types=types,
            describe=published.describe,
            checkpoint=checkpoint,
            max_bytes_per_trigger=max_bytes_per_trigger,
            trigger_interval_s=trigger_interval,
            staging_shared=staging_shared == "yes",
            catalog_database=catalog_database,
            json_variants=json_as == "variant",
            replica_interval_s=replica_interval,
        )
        upkeep = Upkeep(
            spark,
            house,
            pipeline.lock,
            optimize_interval_s=optimize_interval,
            vacuum_retention_s=vacuum_retention,
            log_retention_s=log_retention,
            keep_changelog_s=keep_changelog,
            clustering=cluster_replicas,
        )
        if not stopping.is_set():
            pipeline.start()
            if not config.available_now:
                upkeep.start()
        while not stopping.is_set() and not pipeline.wait(_LAST_INTERVAL_S if launcher.has_ended else line.interval_s):
            # With --available-now it ends by itself, and what has landed is all.
            if launcher.has_ended and launcher.wait() and _has_all(pipeline, config.staging):
                break
            show(pipeline)
        launcher.stop()
        if config.available_now:
            upkeep.run(stopping.is_set)
        upkeep.stop()
        pipeline.stop()
        pipeline.wait()  # raises what kept the replicas from getting where the changelogs are
        for (table, name), count in sorted(pipeline.exact_counts.items()):
            _logger.warning(INEXACT_MESSAGE, table, name, count)
        is_complete = config.available_now and not stopping.is_set()
        last_error.clear(config.staging)
    except _StoppedError:
        _logger.info("stopped before Spark was started")
    except Exception as ex:
        has_spark_ended = spark is not None and session.has_ended(spark, _LONGEST_END_S if stopping.is_set() else _END_S)
        if published.is_interrupted:
            _logger.info("stopped while the server was asked for its tables; what the tables lack comes with the next start")
        elif stopping.is_set() and has_spark_ended:
            _logger.info("Spark was ended by the signal, too; what the tables lack comes with the next start")
        else:
            error = session.ended_error() if has_spark_ended else ex
            last_error.note(config.staging, "run", error)
            if error is not ex:
                raise error from ex
            raise
    finally:
        line.clear()
        snapshot.stop()
        launcher.stop()
        monitor.stop()
        if upkeep is not None:
            upkeep.stop()
        if pipeline is not None:
            show(pipeline, is_last=True)
        if spark is not None and not session.has_ended(spark, 0):
            if pipeline is not None:
                pipeline.stop()
            spark.stop()
    if config.available_now and not is_complete:
        context.exit(asked.exit_code)


class _StoppedError(Exception):
    """A signal came before there was anything to put in order."""


def _has_all(pipeline: Pipeline, staging: Path) -> bool:
    """Tell whether the changelogs have the whole log."""
    position, end = pipeline.progress.position, log_end(staging)
    return end is None or (position is not None and position.lsn >= end.lsn)


_LONGEST_END_S = 10.0
"""So long the JVM may take to end by a signal: what stops us (systemd, timeout) often sends it to all our processes."""
_END_S = 1.0
"""So long after the first error the JVM may be seen to have ended, which is why there is one then."""


def _copy(snapshot: InitialSnapshot, spark: SparkSession, launcher: Launcher, stopping: threading.Event) -> None:
    """Take the snapshot, and show how far it is; give up when asked to stop."""
    line = SnapshotLine(time.monotonic())
    snapshot.start(spark, launcher.config.staging)
    try:
        while not snapshot.wait(line.interval_s):
            if stopping.is_set():
                return
            if launcher.has_ended and launcher.error is not None:
                launcher.wait()  # raises why
            line.update(snapshot.progress, time.monotonic())
        line.update(snapshot.progress, time.monotonic(), is_last=True)
    finally:
        line.clear()


def _lag(monitor: SlotMonitor, launcher: Progress, tables: PipelineProgress) -> Lag | None:
    """Return how far the tables are behind the server, None where that is not known."""
    now = time.monotonic()
    report, sealed, position = monitor.report(now), launcher.position, tables.position
    if report is None or sealed is None or position is None:
        return None
    # With all that is sealed the tables have all that there was for them up to what is confirmed.
    lsn = position.lsn if position.lsn < sealed.lsn else max(position.lsn, report.confirmed_flush_lsn or 0)
    return monitor.lag(lsn, now)


def _note_known(launcher: Launcher, report: SlotReport) -> None:
    """Note that the log has all that is confirmed, also where nothing was published; nobody else moves the slot meanwhile."""
    confirmed_lsn, sealed = report.confirmed_flush_lsn, launcher.progress.position
    if confirmed_lsn is not None and sealed is not None and confirmed_lsn > sealed.lsn and not launcher.has_ended:
        known_position.note(launcher.config.staging, confirmed_lsn)


def _name_keyless(prepared: Prepared) -> None:
    """Say which tables will have no replica."""
    keyless = [table for table in prepared.tables if not _has_key(table)]
    deferrable = [table for table in keyless if table["has_deferrable_key"]]
    for tables, why in (
        ([table for table in keyless if table not in deferrable], "no primary key"),
        (deferrable, "a deferrable primary key, which two rows may share amid a transaction"),
    ):
        names = sorted(f"{table['schema']}.{table['name']}" for table in tables)
        if names:
            _logger.warning("%s, so a changelog and no replica: %s", why, ", ".join(names))


def _has_key(table: Mapping[str, Any]) -> bool:
    # With REPLICA IDENTITY USING INDEX the index's columns do.
    return bool(table["primary_key"]) or table["replica_identity"] == "i"


class _Catalog:
    """The published tables with their keys and columns, as they are when one is asked for."""

    def __init__(self, config: LauncherConfig, stopping: threading.Event) -> None:
        self._config = config
        self._stopping = stopping
        self.is_interrupted = False
        """Whether an answer was given up because of a stop, which is an error to whoever wanted it."""

    def describe(self) -> Iterable[Mapping[str, Any]]:
        """Return the tables; a server that has gone away may be restarting, and is waited for."""
        began, failures = time.monotonic(), 0
        while True:
            try:
                answer = ask_published(self._config, self._stopping.is_set)
                is_away = answer.code in (ExitCode.INIT_FAILED, ExitCode.PG_CLOSED, ExitCode.PG_ERROR)
                failures += 1
                pause_s = _RECONNECT.pause_s(failures, time.monotonic() - began) if is_away else None
                if pause_s is None:
                    break
                if self._stopping.wait(pause_s):
                    raise InterruptedError
            except InterruptedError:
                self.is_interrupted = True
                raise
        if answer.code != ExitCode.SUCCESS:
            raise CdcpipeError(
                f"tables that are new or have changed could not be looked up: {answer.failure.message or answer.code}",
                hint="start again once the server can be reached; nothing is lost",
            )
        return Prepared.parse(answer.output).tables
