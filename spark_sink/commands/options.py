"""What the commands of cdcpipe-spark share: the options of the launcher and of a connection, and logging."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from spark_sink.commands.parameters import DIRECTORY, MINUTE_OR_OFF, SECONDS, SIZE, Directory, Parsed, parse_retention
from spark_sink.files.local import check_usable
from spark_sink.staging.readers import Retention

if TYPE_CHECKING:
    from spark_sink.launcher.launcher import LauncherConfig

__all__ = [
    "CONTEXT_SETTINGS",
    "Command",
    "connection_arguments",
    "connection_options",
    "launcher_config",
    "launcher_options",
    "log_to_stderr",
    "snapshot_hold_option",
    "staging_option",
    "together",
]

CONTEXT_SETTINGS = {"help_option_names": ["-?", "--help"], "max_content_width": 120}
"""``-h`` is the host, as in all of PostgreSQL's programs."""


Command: TypeAlias = Callable[..., Any]
Decorator: TypeAlias = Callable[[Command], Command]


def together(*options: Decorator) -> Decorator:
    """Return one decorator for several, in the order of ``--help``."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def staging_option(command: Command) -> Command:
    """Add ``--staging``."""
    return click.option(
        "--staging",
        required=True,
        type=DIRECTORY,
        metavar="DIR",
        help="The staging directory: the log of this slot.",
    )(command)


def snapshot_hold_option(command: Command) -> Command:
    """Add ``--snapshot-hold``."""
    return click.option(
        "--snapshot-hold",
        type=MINUTE_OR_OFF,
        default="10min",
        show_default=True,
        help="After a kill or an error the server holds the snapshot for so long, and the next start goes on where it was. Or off.",
    )(command)


connection_options = together(
    click.option("-d", "--dbname", metavar="DBNAME", help="Database to connect to; a conninfo string or a URI as well."),
    click.option("-h", "--host", metavar="HOSTNAME", help="Database server's host or socket directory."),
    click.option("-p", "--port", metavar="PORT", help="Database server's port."),
    click.option("-U", "--username", metavar="USERNAME", help="Database user name."),
    click.option(
        "-m",
        "--param",
        "params",
        multiple=True,
        metavar="KEY=VALUE",
        help="Any other connection parameter of libpq. Passwords come from PGPASSWORD, a password file or a service "
        "file. Repeatable.",
    ),
)
"""libpq's: ``-d -h -p -U -m``, as `connection_arguments` takes them."""


def connection_arguments(
    *, dbname: str | None, host: str | None, port: str | None, username: str | None, params: tuple[str, ...]
) -> tuple[str, ...]:
    """Return a connection as ``cdcpipe`` takes it on its command line."""
    arguments: list[str] = []
    for option, value in (("-d", dbname), ("-h", host), ("-p", port), ("-U", username)):
        if value is not None:
            arguments += [option, value]
    for param in params:
        arguments += ["-m", param]
    return tuple(arguments)


launcher_options = together(
    connection_options,
    click.option("-S", "--slot", required=True, metavar="NAME", help="Name of the replication slot."),
    click.option(
        "--publication",
        "publications",
        required=True,
        multiple=True,
        metavar="NAME",
        help="Publication to take, any name as it is. Repeatable.",
    ),
    click.option("-c", "--create-slot", is_flag=True, help="Make the slot, and the publication, if they do not exist."),
    click.option(
        "--table",
        "tables",
        multiple=True,
        metavar="SCHEMA.NAME",
        help="With -c: a publication that does not exist is made for these tables (left out: for all). Repeatable.",
    ),
    staging_option,
    click.option(
        "--segment-size",
        type=SIZE,
        default="64MiB",
        show_default=True,
        help="A segment is sealed when it has this size,",
    ),
    click.option(
        "--seal-interval",
        type=SECONDS,
        default=1.0,
        show_default=True,
        help="or when its oldest transaction has waited this long.",
    ),
    click.option(
        "--spill",
        type=Directory(exists=True),
        metavar="DIR",
        help="Where transactions in progress that are too large for memory are held, in files without names. "
        "Left out: the staging directory.",
    ),
    click.option(
        "--keep-segments",
        type=Parsed("DURATION|SIZE", parse_retention),
        metavar="DURATION|SIZE",
        help="Keep segments that all readers are past for so long (12h, 7d), or so much of them (10GiB). "
        "Left out: they are removed.",
    ),
    click.option(
        "--available-now",
        is_flag=True,
        help="Take all that is committed on the server now, then end.",
    ),
    click.option("-v", "--verbose", is_flag=True, help="Say on stderr what happens."),
)
"""Everything that `launcher_config` takes."""


def launcher_config(
    *,
    dbname: str | None,
    host: str | None,
    port: str | None,
    username: str | None,
    params: tuple[str, ...],
    slot: str,
    publications: tuple[str, ...],
    create_slot: bool,
    tables: tuple[str, ...],
    staging: Path,
    segment_size: int,
    seal_interval: float,
    spill: Path | None,
    keep_segments: Retention | None,
    available_now: bool,
    verbose: bool,
) -> LauncherConfig:
    """Build the configuration from the values of `launcher_options`. The connection goes to the streamer as it is."""
    # They need numpy, and status, which needs no option of theirs, does not.
    from spark_sink.launcher.launcher import LauncherConfig
    from spark_sink.staging.filler import SealPolicy

    check_usable(staging, "the staging directory")
    return LauncherConfig(
        slot=slot,
        staging=staging,
        publications=publications,
        connection=connection_arguments(dbname=dbname, host=host, port=port, username=username, params=params),
        create_slot=create_slot,
        tables=tables,
        available_now=available_now,
        seal=SealPolicy(segment_bytes=segment_size, seal_interval_s=seal_interval),
        spill=spill,
        retention=keep_segments or Retention(),
        verbose=verbose,
    )


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        start = "\r\x1b[K" if sys.stderr.isatty() else ""
        click.echo(f"{start}{self.format(record)}", err=True)


def log_to_stderr(*, verbose: bool) -> None:
    """Send what the program says to stderr: warnings, or with ``verbose`` everything."""
    handler = _Handler()
    handler.setFormatter(logging.Formatter("cdcpipe-spark: %(message)s" if not verbose else "cdcpipe-spark: %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO if verbose else logging.WARNING, force=True)
    logging.Formatter.converter = time.gmtime
    if not verbose:  # what py4j logs, with a traceback, it raises as well
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
