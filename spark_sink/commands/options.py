"""What the commands of cdcpipe-spark share: the launcher's options, sizes, logging, the progress line."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import click

from cdcpipe.units import has_size_unit, parse_duration, parse_seconds, parse_size
from spark_sink.files.local import check_usable, local_directory
from spark_sink.files.places import place
from spark_sink.staging.log import Retention

if TYPE_CHECKING:
    from spark_sink.client.slot_monitor import Lag
    from spark_sink.launcher.launcher import LauncherConfig, Progress
    from spark_sink.pipeline.pipeline import PipelineProgress
    from spark_sink.snapshot.copy import SnapshotProgress

__all__ = [
    "CONTEXT_SETTINGS",
    "DIRECTORY",
    "HOUR_OR_OFF",
    "MINUTE_OR_OFF",
    "PLACE",
    "SIZE",
    "Command",
    "ProgressLine",
    "SnapshotLine",
    "connection_arguments",
    "connection_options",
    "format_size",
    "launcher_config",
    "launcher_options",
    "log_to_stderr",
    "snapshot_hold_option",
    "staging_option",
    "together",
]

CONTEXT_SETTINGS = {"help_option_names": ["-?", "--help"], "max_content_width": 120}
"""``-h`` is the host, as in all of PostgreSQL's programs."""

_LOG_INTERVAL_S = 10.0
_TERMINAL_INTERVAL_S = 0.2
_LOOK_INTERVAL_S = 1.0
"""Where a line is due more seldom: somebody who waits between two looks still has to notice a signal."""

T = TypeVar("T")
Command: TypeAlias = Callable[..., Any]
Decorator: TypeAlias = Callable[[Command], Command]


class _Parsed(click.ParamType[T]):
    """What a function of the core makes of a text; its ValueError says what is wrong."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        if not isinstance(value, str):
            return cast("T", value)  # a default
        try:
            return self._parse(value)
        except ValueError as ex:
            self.fail(str(ex), param, ctx)


class _Directory(click.Path):
    """A directory of a local or mounted file system."""

    def __init__(self, *, exists: bool = False) -> None:
        super().__init__(exists=exists, file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        local_directory(value, "this" if param is None else param.opts[-1])
        return super().convert(value, param, ctx)


def _parse_size(text: str) -> int:
    size = parse_size(text)
    if size == 0:
        raise ValueError("it has to be more than 0")
    return size


def _duration_or_off(least_s: float) -> _Parsed[float | None]:
    """Return the type of a duration that is not below ``least_s``, or the word off: None."""

    def parse(text: str) -> float | None:
        if text == "off":
            return None
        try:
            seconds = parse_duration(text)
        except ValueError as ex:
            msg = f"{ex}; or it can be off"
            raise ValueError(msg) from ex
        if seconds < least_s:
            msg = f"{text!r} is less than {least_s / 60:.0f}min; or it can be off"
            raise ValueError(msg)
        return seconds

    return _Parsed("DURATION", parse)


def _parse_retention(text: str) -> Retention:
    """Take a duration, or a size: one with a unit, since a number alone says neither."""
    if has_size_unit(text):
        return Retention(size=_parse_size(text))
    try:
        return Retention(seconds=parse_duration(text))
    except ValueError as ex:
        msg = f"{ex}; nor is it a size with a unit, like 10GiB"
        raise ValueError(msg) from ex


class _Place(click.ParamType[Path]):
    """A directory, or a place in an object store."""

    name = "DIR|URL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if isinstance(value, str) and "://" not in value:
            return Path(DIRECTORY.convert(value, param, ctx))
        return place(value, "this" if param is None else param.opts[-1])


SIZE = _Parsed("SIZE", _parse_size)
MINUTE_OR_OFF, HOUR_OR_OFF = _duration_or_off(60.0), _duration_or_off(3600.0)
DIRECTORY = _Directory()
PLACE = _Place()
_SECONDS = _Parsed("SECS", parse_seconds)


def format_size(size: float) -> str:
    """Return a number of bytes for people: 1.5 MiB."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


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
        type=_SECONDS,
        default=1.0,
        show_default=True,
        help="or when its oldest transaction has waited this long.",
    ),
    click.option(
        "--spill",
        type=_Directory(exists=True),
        metavar="DIR",
        help="Where transactions in progress that are too large for memory are held, in files without names. "
        "Left out: the staging directory.",
    ),
    click.option(
        "--keep-segments",
        type=_Parsed("DURATION|SIZE", _parse_retention),
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


class _LiveLine:
    """A line on stderr that says how far something is: on a terminal in place, elsewhere a new one now and then if it differs."""

    def __init__(self, now: float) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._began_at = self._shown_at = now
        self._shown = ""

    @property
    def interval_s(self) -> float:
        """How often to call ``update``; it shows something when that is due."""
        return _TERMINAL_INTERVAL_S if self._is_terminal else _LOOK_INTERVAL_S

    def _is_due(self, now: float) -> bool:
        return now - self._shown_at >= (_TERMINAL_INTERVAL_S if self._is_terminal else _LOG_INTERVAL_S)

    def _show(self, text: str, now: float, *, is_last: bool) -> None:
        self._shown_at = now
        if self._is_terminal:
            self.clear()
            click.echo(text if is_last else text[: os.get_terminal_size(2).columns - 1], err=True, nl=is_last)
        elif is_last or text != self._shown:
            click.echo(text, err=True)
        self._shown = text

    def clear(self) -> None:
        """Make room on a terminal for something else."""
        if self._is_terminal:
            click.echo("\r\x1b[K", err=True, nl=False)


class _Rate:
    """How fast a count grows: since the last time that it was asked for, or since the beginning."""

    def __init__(self, now: float) -> None:
        self._began_at = self._at = now
        self._count = 0
        self._rate = 0.0

    def update(self, count: int, now: float, *, is_last: bool) -> float:
        """Return what it is per second; ``is_last``: over all."""
        if is_last:
            return count / max(now - self._began_at, 1e-3)
        if now > self._at:
            self._rate = (count - self._count) / (now - self._at)
            self._at, self._count = now, count
        return self._rate


class ProgressLine(_LiveLine):
    """Shows how far a launcher is, and if there are tables, how far they are."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self._records, self._rows = _Rate(now), _Rate(now)

    def update(
        self,
        progress: Progress,
        now: float,
        *,
        tables: PipelineProgress | None = None,
        lag: Lag | None = None,
        is_last: bool = False,
    ) -> None:
        """Show the progress if that is due. ``lag`` is the tables', None where it is not known; without tables the log's."""
        if not is_last and not self._is_due(now):
            return
        parts = []
        if tables is not None:
            rows = tables.changes + tables.messages
            parts += [
                f"tables {tables.position or '-'}",
                f"{self._rows.update(rows, now, is_last=is_last):,.0f} rows/s",
                "lag unknown" if lag is None else _lag_text(lag),
                f"{tables.changes:,} changes in {tables.tables} tables",
                *([f"{tables.messages:,} messages"] if tables.messages else []),
            ]
        parts += [
            f"{'position' if tables is None else 'log'} {progress.position or '-'}",
            *([] if lag is None or tables is not None else [_lag_text(lag)]),
            f"{progress.transactions:,} transactions",
            f"{progress.records:,} records",
            format_size(progress.size),
            f"{self._records.update(progress.records, now, is_last=is_last):,.0f} records/s",
        ]
        if progress.open_size:
            parts.append(f"open {format_size(progress.open_size)}")
        if progress.restarts:
            parts.append(f"{progress.restarts} restarts")
        self._show(", ".join(parts), now, is_last=is_last)


def _lag_text(lag: Lag) -> str:
    return f"lag {format_size(lag.bytes)} {'≥ ' if lag.at_least else ''}{lag.seconds:.1f} s"


class SnapshotLine(_LiveLine):
    """Shows how far a snapshot is."""

    def update(self, progress: SnapshotProgress, now: float, *, is_last: bool = False) -> None:
        """Show the progress if that is due."""
        if is_last or self._is_due(now):
            self._show(self._text(progress, max(now - self._began_at, 1e-3)), now, is_last=is_last)

    def _text(self, progress: SnapshotProgress, elapsed_s: float) -> str:
        parts = [f"snapshot: {progress.tables_done} of {progress.tables} tables", f"{progress.rows:,} rows"]
        if progress.row_estimate > progress.rows:
            parts[-1] += f" of about {progress.row_estimate:,}"
        parts.append(f"{progress.rows / elapsed_s:,.0f} rows/s")
        left = progress.chunks - progress.chunks_done
        if left and progress.chunks_done:
            left_s = elapsed_s * left / progress.chunks_done
            parts.append(f"{left_s / 60:.0f} min left" if left_s >= 120 else f"{left_s:.0f} s left")
        return ", ".join(parts)


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
