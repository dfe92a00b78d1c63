"""``cdcpipe-spark run``: the options, signals and progress line of the command. pipeline/runner.py does the work."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click
import cloup

from cdcpipe.exposition import Address
from cdcpipe.masks import parse_masks
from cdcpipe.units import count_from, seconds_from
from spark_sink.commands.configured import ConfiguredCommand
from spark_sink.commands.options import (
    CONTEXT_SETTINGS,
    launcher_config,
    launcher_options,
    log_to_stderr,
    monitoring_options,
    snapshot_options,
    verbose_option,
)
from spark_sink.commands.parameters import DIRECTORY, PLACE, hour_or_off, minute_or_off, parse_amount, parse_heal
from spark_sink.commands.progress import RunLine
from spark_sink.commands.service_manager import ServiceManager
from spark_sink.commands.signals import on_signals
from spark_sink.commands.spark_options import parse_settings, session_options
from spark_sink.metrics.collector import RunMetrics
from spark_sink.schema.names import FOLLOW, RENAMED
from spark_sink.schema.table import EXACT, TYPES
from spark_sink.warehouse.formats import COLUMN_NAMES, DELETES, FORMATS, HARD, HISTORY, KEEP, OFF, READERS, SPARK, WIDEN

if TYPE_CHECKING:
    from pathlib import Path

    from spark_sink.pipeline.config import RunConfig
    from spark_sink.pipeline.runner import Runner

__all__ = ["command"]

_UP_TO_A_DAY = seconds_from(0, 86400)
_EXAMPLE = """\b
Example:
  cdcpipe-spark run -d shop -S shop_cdc --publication shop -c --snapshot initial \\
      --staging staging --warehouse warehouse --available-now
"""


@cloup.command("run", cls=ConfiguredCommand, context_settings=CONTEXT_SETTINGS, epilog=_EXAMPLE)
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
        "--readers",
        type=click.Choice(READERS),
        default=SPARK,
        show_default=True,
        help="With any, new replicas and stored histories have no deletion vectors, so that more programs can read them;"
        " merges write files anew.",
    ),
    cloup.option(
        "--widen",
        type=click.Choice(WIDEN),
        show_default="yes, or apart with --readers any or --format parquet",
        help="Widen a column whose type gets wider; or with apart, which more programs can read, add another column beside it.",
    ),
    cloup.option(
        "--column-names",
        type=click.Choice(COLUMN_NAMES),
        default=KEEP,
        show_default=True,
        help="With sanitize, call a new column whose name needs Delta's column mapping so that more programs can read it.",
    ),
    cloup.option(
        "--mask",
        "masks",
        multiple=True,
        metavar="SCHEMA.TABLE.COLUMN=null|hash|redact|off",
        help="Mask this column, or with * those that match: NULL, a hash keyed by CDCPIPE_MASK_KEY, or ***; repeatable.",
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
        "--renamed",
        type=click.Choice(RENAMED),
        default=FOLLOW,
        show_default=True,
        help="Let a table that is renamed go on in its tables, under the new name, or in others; follow needs cdcpipe ddl install.",
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
        "trigger_interval_s",
        type=_UP_TO_A_DAY,
        metavar="SECS",
        default="0.1",
        show_default=True,
        help="Begin a micro-batch no sooner than this after the beginning of the last one.",
    ),
    cloup.option(
        "--replica-interval",
        "replica_interval_s",
        type=_UP_TO_A_DAY,
        metavar="SECS",
        show_default="1, or up to 10 where that takes a quarter of the time",
        help="Merge new changes into the replicas this often; 0: in each micro-batch.",
    ),
    cloup.option(
        "--deletes",
        type=click.Choice(DELETES),
        default=HARD,
        show_default=True,
        help="Remove deleted rows from the replicas; or with soft, keep them there, with the time in _cdc_deleted_at.",
    ),
    cloup.option(
        "--history",
        type=click.Choice(HISTORY),
        default=OFF,
        show_default=True,
        help="Keep every version of each table's rows, with its times: with table, in a table beside the replica; with view, in a "
        "view NAME__history in the catalog (--catalog-database), which is computed from the changelog at each read.",
    ),
    cloup.option(
        "--history-interval",
        "history_interval_s",
        type=_UP_TO_A_DAY,
        metavar="SECS",
        default="60",
        show_default=True,
        help="Bring the tables of --history table up to date this often; 0: at the start and the end of --available-now.",
    ),
    cloup.option(
        "--dropped-columns",
        type=click.Choice(["keep", "drop"]),
        default="keep",
        show_default=True,
        help="Keep a dropped column in the replica, where it is NULL in new rows, or drop it there, too, where DDL is captured.",
    ),
)
@cloup.option_group(
    "Snapshot",
    cloup.option(
        "--snapshot",
        type=click.Choice(["initial", "never"]),
        show_default="initial with -c for a new warehouse; otherwise no copy begins, and an unfinished one goes on",
        help="Begin with a copy of the tables' rows; or with never, without one: give up an unfinished copy, and do not heal"
        " unless --heal says so.",
    ),
    *snapshot_options,
)
@cloup.option_group(
    "Heal",
    cloup.option(
        "--heal",
        type=parse_heal,
        metavar="now|off|HH:MM-HH:MM",
        show_default="now, but off with --snapshot never",
        help="Copy a table anew when the stream cannot tell what rows it has, at once or in these hours (local time); or off.",
    ),
    cloup.option(
        "--heal-tables",
        type=count_from(1),
        metavar="N",
        default="3",
        show_default=True,
        help="Copy at most this many such tables at a time.",
    ),
)
@cloup.option_group(
    "Upkeep of Delta tables",
    cloup.option(
        "--optimize-interval",
        "optimize_interval_s",
        type=minute_or_off,
        metavar="DURATION",
        default="1h",
        show_default=True,
        help="Look at each table this often, at least a minute apart, and compact its small files once there are more than 16;"
        " or off.",
    ),
    cloup.option(
        "--cluster-replicas",
        is_flag=True,
        help="Sort a replica by key when its files are compacted, which suits keys that come in no order (random UUIDs), and"
        " rewrites up to 2 GiB each time.",
    ),
    cloup.option(
        "--vacuum-retention",
        "vacuum_retention_s",
        type=hour_or_off,
        metavar="DURATION",
        default="1d",
        show_default=True,
        help="Delete, once in this time but at least once a day, files that have not been part of the table for this long, at least"
        " an hour; or off.",
    ),
    cloup.option(
        "--log-retention",
        "log_retention_s",
        type=hour_or_off,
        metavar="DURATION",
        default="1d",
        show_default=True,
        help="Keep the tables' logs for this long, at least an hour: the longest pause of a stream that reads a table;"
        " or off: 30 days, as Delta does.",
    ),
    cloup.option(
        "--keep-changelog",
        "keep_changelog_s",
        type=hour_or_off,
        metavar="DURATION",
        default="off",
        show_default=True,
        help="Remove, once a day and for good, changes that committed longer ago than this (30d; at least an hour), as"
        " cdcpipe-spark purge does.",
    ),
    cloup.option(
        "--keep-history",
        "keep_history_s",
        type=hour_or_off,
        metavar="DURATION",
        default="off",
        show_default=True,
        help="Remove, once a day and for good, versions of rows that ended longer ago than this (365d; at least an hour) from the"
        " histories.",
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
@monitoring_options
@verbose_option
def command(*, metrics: Address | None, **options: Any) -> None:
    """Keep Spark tables in step with a slot: every change once in a changelog, the current rows in a replica.

    With -c and a new warehouse, the tables begin with a copy of the rows that the server's tables have.

    Changes go to the staging directory first. They are confirmed to the server as soon as they are durable there, and the tables
    follow. SIGINT and SIGTERM end the command cleanly. After a kill, start it again: no change is lost, and none comes twice.
    """
    config = _config(**options)
    log_to_stderr(verbose=config.launcher.verbose)
    _run(config, metrics)


def _config(
    *, masks: tuple[str, ...], json_as: str, confs: tuple[str, ...], jars: Path | None, staging_shared: str, **options: Any
) -> RunConfig:
    """Return the configuration that the options of the command line ask for.

    Most options of ``run`` alone are called like the field of RunConfig that they set. The five that are not are parameters here.
    All others are the launcher's.
    """
    from spark_sink.pipeline.config import RunConfig

    own = {field.name for field in fields(RunConfig)} & options.keys()
    return RunConfig(
        launcher_config(**{name: value for name, value in options.items() if name not in own}),
        **{name: options[name] for name in own},
        masks=parse_masks(masks),
        json_variants=json_as == "variant",
        conf=parse_settings(confs),
        jars_dir=jars,
        staging_shared=staging_shared == "yes",
    )


def _run(config: RunConfig, metrics: Address | None) -> None:
    """Run until the end or a signal. Shows the progress and serves the metrics meanwhile."""
    with RunLine() as line:
        line.say("starting")
        from spark_sink.pipeline.runner import Runner  # takes a while

        runner, service = Runner(config), ServiceManager()
        runner.logs_error = False  # the command's last line says it
        line.say(runner.progress.step)
        _follow(runner, line, service, metrics)


def _follow(runner: Runner, line: RunLine, service: ServiceManager, metrics: Address | None) -> None:
    """Start the runner, and follow it to its end."""
    stop = service.told_before(runner.request_stop)
    with RunMetrics(runner).served(metrics), on_signals(stop) as asked:
        try:
            runner.start()
            while not runner.wait(line.interval_s):
                progress = runner.progress
                line.update(progress)
                service.tick(is_streaming=progress.launcher.position is not None)
        finally:
            line.say("stopping")
            runner.stop()
            line.update(runner.progress, is_last=True)
    if runner.config.launcher.available_now and not runner.is_complete:
        click.get_current_context().exit(asked.exit_code)
