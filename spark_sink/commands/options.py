"""Shared parts of the commands of cdcpipe-spark: the options of the launcher and of a connection, and logging."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import click
import cloup

from cdcpipe import logs
from cdcpipe.options import (
    CONNECTION,
    CONTEXT_SETTINGS,
    CREATE_SLOT,
    FAILOVER,
    LOG_FORMAT,
    METRICS,
    NEW_PUBLICATION,
    PUBLICATION,
    SLOT,
    take_new_publication,
)
from cdcpipe.system_ids import parse_system_id
from cdcpipe.units import parse_seconds
from spark_sink.client.connection import connection_arguments
from spark_sink.commands.parameters import DIRECTORY, PLACE, Directory, minute_or_off, parse_amount, parse_retention
from spark_sink.files.local import check_usable
from spark_sink.staging.readers import Retention

if TYPE_CHECKING:
    from spark_sink.launcher.config import LauncherConfig

__all__ = [
    "CONTEXT_SETTINGS",
    "Command",
    "connection_options",
    "launcher_config",
    "launcher_options",
    "log_to_stderr",
    "monitoring_options",
    "new_publication_options",
    "noted_staging_option",
    "snapshot_options",
    "verbose_option",
    "warehouse_options",
]

Command: TypeAlias = Callable[..., Any]

connection_options = cloup.option_group(
    CONNECTION.title, CONNECTION.help, *(cloup.option(*option.names, **option.settings) for option in CONNECTION.options)
)
"""The connection options of libpq, ``-d -h -p -U -m``. `connection_arguments` takes their values."""

verbose_option = cloup.option("-v", "--verbose", is_flag=True, help="Log every step to stderr.")

monitoring_options = cloup.option_group(
    "Monitoring",
    cloup.option(*METRICS.names, **METRICS.settings),
    cloup.option(*LOG_FORMAT.names, type=click.Choice(logs.FORMATS), **LOG_FORMAT.settings),
)

noted_staging_option = cloup.option(
    "--staging",
    type=DIRECTORY,
    metavar="DIR",
    show_default="the one that the warehouse records",
    help="Use this staging directory.",
)
"""``--staging``, for a command that reads a warehouse."""

snapshot_options = (
    cloup.option(
        "--snapshot-chunk-size",
        "snapshot_chunk_bytes",
        type=parse_amount,
        metavar="SIZE",
        default="32MiB",
        show_default=True,
        help="Copy a table in chunks of about this size, several at a time.",
    ),
    cloup.option(
        "--snapshot-hold",
        "snapshot_hold_s",
        type=minute_or_off,
        metavar="DURATION",
        default="10min",
        show_default=True,
        help="Let the server hold the snapshot for this long, at least a minute, after a kill or an error, so that the next start"
        " resumes it; or off.",
    ),
)


def warehouse_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return an option group with ``--warehouse``, for an existing warehouse, and these further options."""
    return cloup.option_group(
        "Warehouse",
        cloup.option("--warehouse", required=True, type=PLACE, metavar="DIR|URL", help="Use the tables in this warehouse."),
        *options,
    )


new_publication_options = tuple(cloup.option(*option.names, **option.settings) for option in NEW_PUBLICATION)

_launcher_groups = (
    connection_options,
    cloup.option_group(
        "Source",
        cloup.option(*SLOT.names, required=True, **SLOT.settings),
        cloup.option(*PUBLICATION.names, required=True, **PUBLICATION.settings),
        cloup.option(*CREATE_SLOT.names, **CREATE_SLOT.settings),
        *new_publication_options,
        cloup.option(*FAILOVER.names, type=click.Choice(["yes", "no"]), **FAILOVER.settings),
        cloup.option("--available-now", is_flag=True, help="Take all that is committed on the server now, then exit."),
    ),
    cloup.option_group(
        "When the slot or the server has changed",
        cloup.option(
            "--on-gap",
            type=click.Choice(["stop", "resnapshot"]),
            default="stop",
            show_default=True,
            help="If changes are missing (the slot was lost or moved, or a failover lost changes), stop; or go on, and let run copy"
            " all tables anew.",
        ),
        cloup.option(
            "--reconnect",
            "reconnect_s",
            type=parse_seconds,
            metavar="SECS",
            show_default="for ever",
            help="After a lost connection, look for a server this long, and wait this long for one that lacks room or memory.",
        ),
        cloup.option(
            "--accept-system-id",
            type=parse_system_id,
            metavar="ID",
            help="Take the server with this system identifier for the one that the log comes from, as after pg_upgrade.",
        ),
    ),
    cloup.option_group(
        "Staging",
        cloup.option(
            "--staging",
            required=True,
            type=DIRECTORY,
            metavar="DIR",
            help="Use this staging directory: the log of this slot alone.",
        ),
        cloup.option(
            "--segment-size",
            type=parse_amount,
            metavar="SIZE",
            default="64MiB",
            show_default=True,
            help="Seal a segment when it has this size.",
        ),
        cloup.option(
            "--seal-interval",
            type=parse_seconds,
            metavar="SECS",
            default="1",
            show_default=True,
            help="Seal a segment also when its oldest transaction has waited this long.",
        ),
        cloup.option(
            "--spill",
            type=Directory(),  # the start looks whether it can be used: then the staging directory can keep the error
            metavar="DIR",
            show_default="the staging directory",
            help="Hold transactions in progress that are too large for memory in unnamed files in this directory.",
        ),
        cloup.option(
            "--keep-segments",
            type=parse_retention,
            metavar="DURATION|SIZE",
            show_default="they are removed",
            help="Keep segments that no reader needs any more for this long (12h, 7d), or up to this total size (10GiB).",
        ),
    ),
)


def launcher_options(command: Command) -> Command:
    """Add all options that `launcher_config` takes except ``--verbose``."""
    for group in reversed(_launcher_groups):
        command = group(command)
    return command


def launcher_config(
    *,
    slot: str,
    publications: tuple[str, ...],
    create_slot: bool,
    failover: Literal["yes", "no"] | None,
    staging: Path,
    segment_size: int,
    seal_interval: float,
    spill: Path | None,
    keep_segments: Retention | None,
    available_now: bool,
    on_gap: Literal["stop", "resnapshot"],
    reconnect_s: float | None,
    accept_system_id: str | None,
    verbose: bool,
    **options: Any,
) -> LauncherConfig:
    """Build the configuration from the values of `launcher_options`. The connection options are passed on to the streamer."""
    # Imported here because they need numpy, which `status` does without.
    from spark_sink.launcher.config import LauncherConfig
    from spark_sink.staging.filler import SealPolicy

    check_usable(staging, "the staging directory")
    new_publication = take_new_publication(options)
    return LauncherConfig(
        slot=slot,
        staging=staging,
        publications=publications,
        connection=connection_arguments(**options),
        create_slot=create_slot,
        new_publication=new_publication,
        failover=None if failover is None else failover == "yes",
        available_now=available_now,
        seal=SealPolicy(segment_bytes=segment_size, seal_interval_s=seal_interval),
        spill=spill,
        retention=keep_segments or Retention(),
        on_gap=on_gap,
        reconnect_s=reconnect_s,
        accept_system_id=accept_system_id,
        verbose=verbose,
    )


_QUERY_CONTEXTS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""The loggers of PySpark that print errors with their place in a program or a statement, as JSON (PySparkException)."""


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        logs.show(self.format(record))


def _is_from_py4j(record: logging.LogRecord) -> bool:
    """Tell whether py4j has logged this. It logs errors, some with the root logger, and also raises them."""
    return record.name.partition(".")[0] == "py4j" or "/py4j/" in record.pathname


def log_to_stderr(*, verbose: bool) -> None:
    """Log to stderr: warnings and errors, or with ``verbose`` all messages."""
    handler = _Handler()
    text = "cdcpipe-spark: %(message)s" if not verbose else "cdcpipe-spark: %(name)s: %(message)s"
    handler.setFormatter(logs.formatter(text))
    logging.basicConfig(handlers=[handler], level=logging.INFO if verbose else logging.WARNING, force=True)
    logging.Formatter.converter = time.gmtime
    # PySpark also raises the errors that it logs. The message of such an error may have values of rows.
    for name in _QUERY_CONTEXTS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if not verbose:
        handler.addFilter(lambda record: not _is_from_py4j(record))
