"""``cdcpipe-spark status``: shows how far each stage is, once or repeatedly, or judges it like a monitoring plugin."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import cloup
from click.core import ParameterSource

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from cdcpipe.printable import printable_lines
from cdcpipe.units import parse_seconds, parse_size, seconds_from
from spark_sink.client.connection import connection_arguments
from spark_sink.client.slot_monitor import SlotMonitor
from spark_sink.commands.configured import ConfiguredCommand, long_name
from spark_sink.commands.options import CONTEXT_SETTINGS, connection_options, noted_staging_option
from spark_sink.commands.parameters import PLACE, limit
from spark_sink.commands.signals import on_signals
from spark_sink.commands.watch import watching
from spark_sink.files.local import replacing
from spark_sink.files.system_limits import of_system
from spark_sink.staging import samples
from spark_sink.staging.log import read_chain
from spark_sink.status.check import Limit, Limits, State, judge, unknown
from spark_sink.status.page import render as render_page
from spark_sink.status.report import Tables, describe
from spark_sink.status.staging_directory import staging_directory
from spark_sink.status.text import render_text
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Callable

    from spark_sink.client.slot_monitor import SlotReport


_SERVER_TIMEOUT_S = 15.0

_EXAMPLE = """\b
Example:
  cdcpipe-spark status -d shop --warehouse warehouse
"""


class _Command(ConfiguredCommand):
    """With --check, a usage error has exit code 3 (UNKNOWN) instead of 1, as monitoring systems expect."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_check = "--check" in args
        try:
            return super().parse_args(ctx, args)
        except (
            click.UsageError,
            CdcpipeError,
        ) as ex:  # the latter for a directory that cannot be one, or that this user can't read
            if not is_check and not self._is_check_configured(ctx):
                raise
            click.echo(unknown(ex.format_message() if isinstance(ex, click.UsageError) else ex.message).line)
            ctx.exit(State.UNKNOWN)

    def _is_check_configured(self, ctx: click.Context) -> bool:
        """Tell whether a file or a variable sets --check."""
        check = next(option for option in self.configurable() if long_name(option) == "check")
        try:
            return bool(check.process_value(ctx, check.consume_value(ctx, {})[0]))
        except click.UsageError:
            return False


@cloup.command("status", cls=_Command, context_settings=CONTEXT_SETTINGS, epilog=_EXAMPLE)
@connection_options
@cloup.option_group(
    "Warehouse",
    cloup.option("--warehouse", type=PLACE, metavar="DIR|URL", help="Show the tables in this warehouse, too."),
    noted_staging_option,
)
@cloup.option_group(
    "Output",
    cloup.option(
        "--watch",
        is_flag=False,
        flag_value=2.0,
        type=seconds_from(0.1),
        metavar="[SECS]",
        help="Repeat until SIGINT, with a pause of this length (at least 0.1), or of 2 seconds.",
    ),
    cloup.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs; with --watch one on each line."),
    cloup.option(
        "--html",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Write one page with charts of the last day to this file, and print nothing; with --watch again and again.",
    ),
)
@cloup.option_group(
    "Monitoring",
    cloup.option(
        "--check",
        is_flag=True,
        help="Print one line and exit with 0 (OK), 1 (WARNING), 2 (CRITICAL) or 3 (UNKNOWN), as Nagios plugins do.",
    ),
    cloup.option(
        "--max-lag",
        type=limit(parse_seconds),
        metavar="[SECS,]SECS",
        help="With --check, report CRITICAL beyond this lag; of two values, the first one is the limit for WARNING.",
    ),
    cloup.option(
        "--max-lag-bytes",
        type=limit(parse_size),
        metavar="[SIZE,]SIZE",
        help="With --check, apply such limits to the lag in bytes of WAL.",
    ),
    cloup.option(
        "--max-wal",
        type=limit(parse_size),
        metavar="[SIZE,]SIZE",
        help="With --check, apply such limits to the WAL that the server keeps for the slot.",
    ),
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    staging: Path | None,
    warehouse: Path | None,
    watch: float | None,
    as_json: bool,
    html: Path | None,
    check: bool,
    max_lag: Limit | None,
    max_lag_bytes: Limit | None,
    max_wal: Limit | None,
    **connection: Any,
) -> None:
    """Show how far each stage is, from the server's WAL to the tables, and the last error. Needs no Spark and no Java.

    With connection options, the command also asks the server.
    """
    limits = Limits(max_lag, max_lag_bytes, max_wal)
    # A file or a variable may set options for another use of the command. Only the command line asks for this one.
    typed = {name for name in ctx.params if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE}
    if check and ("check" in typed or not typed & {"watch", "as_json", "html"}):
        if watch is not None or as_json or html is not None:
            click.echo(unknown("--check goes without --watch, --json and --html").line)
            ctx.exit(State.UNKNOWN)
        ctx.exit(_check(staging, warehouse, limits, connection_arguments(**connection)))
    if typed & {"max_lag", "max_lag_bytes", "max_wal"}:
        raise click.UsageError("--max-lag, --max-lag-bytes and --max-wal go with --check")
    if as_json and html is not None:
        raise click.UsageError("--json and --html exclude each other")
    _show(staging, warehouse, watch, connection_arguments(**connection), as_json=as_json, html=html)


def _check(staging: Path | None, warehouse: Path | None, limits: Limits, arguments: tuple[str, ...]) -> State:
    """Print the line of a monitoring plugin, and return its exit code."""
    try:
        tables = None if warehouse is None else Tables(Warehouse.existing(warehouse))
        root = staging_directory(staging, None if tables is None else tables.house)
        with contextlib.ExitStack() as stack:
            monitor, least_lsn = _monitor(stack, root, arguments)
            alert = judge(describe(root, tables, *_ask(monitor, lambda: False), least_lsn=least_lsn), limits)
    except click.UsageError as ex:
        alert = unknown(ex.format_message())
    except CdcpipeError as ex:
        alert = unknown(ex.message)
    except OSError as ex:
        alert = unknown(of_system(ex))
    click.echo(alert.line)
    return alert.state


def _show(
    staging: Path | None,
    warehouse: Path | None,
    watch: float | None,
    arguments: tuple[str, ...],
    *,
    as_json: bool,
    html: Path | None,
) -> None:
    """Print how far each stage is, or write it to ``html``, once or repeatedly."""
    if html is not None and not html.absolute().parent.is_dir():
        raise InvalidArgumentsError(f"--html {html}: there is no directory {html.parent}", hint="create it, or name another file")
    tables = None if warehouse is None else Tables(Warehouse.existing(warehouse))
    root = staging_directory(staging, None if tables is None else tables.house)
    stopping = threading.Event()
    screen = None
    with contextlib.ExitStack() as stack:
        if watch is not None:
            stack.enter_context(on_signals(stopping.set))
            if html is None and not as_json and sys.stdout.isatty():
                screen = stack.enter_context(watching())
        monitor, least_lsn = _monitor(stack, root, arguments, watch or 1.0)
        while not stopping.is_set():
            try:
                found = describe(root, tables, *_ask(monitor, stopping.is_set), least_lsn=least_lsn)
            except InterruptedError:
                return
            if html is not None:
                _write_page(html, render_page(found, samples.read(root), refresh_s=watch))
            elif as_json:
                click.echo(json.dumps(found, indent=None if watch else 1))
            elif screen is not None and watch is not None:
                if not screen.show(found, watch, stopping.is_set):
                    return
                continue
            else:
                click.echo(render_text(found) + ("\n" if watch else ""))
            if watch is None:
                return
            stopping.wait(watch)


def _write_page(path: Path, page: str) -> None:
    """Write the page in one step: a browser never loads half of it. A path in it may have bytes that are not UTF-8."""
    with replacing(path, 0o666) as stream:  # a web server reads it
        stream.write(printable_lines(page).encode())


def _monitor(
    stack: contextlib.ExitStack, root: Path, arguments: tuple[str, ...], interval_s: float = 1.0
) -> tuple[SlotMonitor | None, int]:
    """Start to ask the server, if ``arguments`` name one. Return the monitor, and the LSN where the log ended before it asked."""
    if not arguments:
        return None, 0
    epochs, _, end = read_chain(root)
    if end is None:
        raise InvalidArgumentsError(
            f"{root} has no log yet, so the name of its slot is not known",
            hint="leave out -d, -h, -p, -U and -m; or start cdcpipe-spark run or land first",
        )
    return stack.enter_context(SlotMonitor(arguments, epochs[-1].slot, interval_s)), end.lsn


def _ask(monitor: SlotMonitor | None, is_stopping: Callable[[], bool]) -> tuple[SlotReport | None, CdcpipeError | None]:
    if monitor is None:
        return None, None
    try:
        return monitor.wait_for_report(_SERVER_TIMEOUT_S, is_stopping), None
    except CdcpipeError as ex:
        return None, ex
