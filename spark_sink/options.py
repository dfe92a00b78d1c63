"""What the commands of cdcpipe-spark share: the launcher's options, sizes, logging, signals, the progress line."""

from __future__ import annotations

import logging
import math
import re
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from spark_sink.directories import local_directory
from spark_sink.launcher import LauncherConfig
from spark_sink.segment_filler import SealPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from spark_sink.launcher import Progress
    from spark_sink.snapshot import SnapshotProgress

__all__ = [
    "CONTEXT_SETTINGS",
    "DIRECTORY",
    "SIZE",
    "ProgressLine",
    "SnapshotLine",
    "connection_arguments",
    "connection_options",
    "format_size",
    "launcher_config",
    "launcher_options",
    "log_to_stderr",
    "on_signals",
    "staging_option",
]

CONTEXT_SETTINGS = {"help_option_names": ["-?", "--help"], "max_content_width": 120}
"""``-h`` is the host, as in all of PostgreSQL's programs."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE_TEXT = re.compile(r"([0-9]{1,15}) ?([A-Za-z]*)", re.ASCII)

_LOG_INTERVAL_S = 10.0
_TERMINAL_INTERVAL_S = 0.2

Command = TypeVar("Command", bound="Callable[..., Any]")


class _Size(click.ParamType[int]):
    """A number of bytes: 1048576, 1MiB, 64MB."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE_TEXT.fullmatch(value.strip())
        unit = _UNITS.get(match[2].upper()) if match is not None else None
        if match is None or unit is None or int(match[1]) == 0:
            self.fail(f"{value!r} is not a size (like 64MiB, 1GiB, or a number of bytes)", param, ctx)
        return int(match[1]) * unit


class _Seconds(click.ParamType[float]):
    name = "SECS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


class _Directory(click.Path):
    """A directory of a local or mounted file system."""

    def __init__(self, *, exists: bool = False) -> None:
        super().__init__(exists=exists, file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        local_directory(value, "this" if param is None else param.opts[-1])
        return super().convert(value, param, ctx)


SIZE = _Size()
DIRECTORY = _Directory()
_SECONDS = _Seconds()


def format_size(size: float) -> str:
    """Return a number of bytes for people: 1.5 MiB."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def staging_option(command: Command) -> Command:
    """Add ``--staging``."""
    return click.option(
        "--staging",
        required=True,
        type=DIRECTORY,
        metavar="DIR",
        help="The staging directory: the log of this slot.",
    )(command)


def connection_options(command: Command) -> Command:
    """Add libpq's: ``-d -h -p -U -m``, as `connection_arguments` takes them."""
    options = [
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
    ]
    for option in reversed(options):
        command = option(command)
    return command


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


def launcher_options(command: Command) -> Command:
    """Add everything that `launcher_config` takes."""
    options = [
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
            "--available-now",
            is_flag=True,
            help="Take all that is committed on the server now, then end.",
        ),
        click.option("-v", "--verbose", is_flag=True, help="Say on stderr what happens."),
    ]
    for option in reversed(options):
        command = option(command)
    return connection_options(command)


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
    available_now: bool,
    verbose: bool,
) -> LauncherConfig:
    """Build the configuration from the values of `launcher_options`. The connection goes to the streamer as it is."""
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
        verbose=verbose,
    )


@contextmanager
def on_signals(request_stop: Callable[[], None]) -> Iterator[None]:
    """Call ``request_stop`` at SIGINT and SIGTERM. For the main thread."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        request_stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class ProgressLine:
    """Shows how far a launcher is on stderr: on a terminal in one line that changes, elsewhere in a line now and then."""

    def __init__(self, now: float) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown_at = self._began_at = now
        self._shown = ""
        self._records = 0
        self._rate = 0.0

    @property
    def interval_s(self) -> float:
        """How often `update` has something to do."""
        return _TERMINAL_INTERVAL_S if self._is_terminal else _LOG_INTERVAL_S

    def update(self, progress: Progress, now: float, *, note: str = "", is_last: bool = False) -> None:
        """Show the progress if that is due."""
        elapsed_s = now - self._shown_at
        if elapsed_s < self.interval_s and not is_last:
            return
        if elapsed_s > 0:
            self._rate = (progress.records - self._records) / elapsed_s
        if is_last:
            self._rate = progress.records / max(now - self._began_at, 1e-3)
        self._shown_at, self._records = now, progress.records
        text = self._text(progress) + note
        if self._is_terminal:
            self.clear()
            click.echo(text, err=True, nl=is_last)
        elif is_last or text != self._shown:
            click.echo(text, err=True)
        self._shown = text

    def _text(self, progress: Progress) -> str:
        parts = [
            f"position {progress.position or '-'}",
            f"{progress.transactions:,} transactions",
            f"{progress.records:,} records",
            format_size(progress.size),
            f"{self._rate:,.0f} records/s",
        ]
        if progress.open_size:
            parts.append(f"open {format_size(progress.open_size)}")
        if progress.restarts:
            parts.append(f"{progress.restarts} restarts")
        return ", ".join(parts)

    def clear(self) -> None:
        """Make room on a terminal for something else."""
        if self._is_terminal:
            click.echo("\r\x1b[K", err=True, nl=False)


class SnapshotLine:
    """Shows how far a snapshot is on stderr, in the same way."""

    def __init__(self, now: float) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._began_at = self._shown_at = now

    @property
    def interval_s(self) -> float:
        """How often `update` is to be called."""
        return _TERMINAL_INTERVAL_S

    def update(self, progress: SnapshotProgress, now: float, *, is_last: bool = False) -> None:
        """Show the progress if that is due."""
        if not is_last and not self._is_terminal and now - self._shown_at < _LOG_INTERVAL_S:
            return
        self._shown_at = now
        self.clear()
        click.echo(self._text(progress, max(now - self._began_at, 1e-3)), err=True, nl=is_last or not self._is_terminal)

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

    def clear(self) -> None:
        """Make room on a terminal for something else."""
        if self._is_terminal:
            click.echo("\r\x1b[K", err=True, nl=False)


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
