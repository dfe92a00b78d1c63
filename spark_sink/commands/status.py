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

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from cdcpipe.units import format_size, parse_seconds, parse_size
from spark_sink.client.connection import connection_arguments
from spark_sink.client.slot_monitor import SlotMonitor
from spark_sink.commands.options import CONTEXT_SETTINGS, connection_options, noted_staging_option
from spark_sink.commands.parameters import PLACE, limit
from spark_sink.commands.signals import on_signals
from spark_sink.staging.gap import LostChanges
from spark_sink.staging.lock import owner_text
from spark_sink.staging.log import list_epochs
from spark_sink.status.check import Limit, Limits, State, judge, unknown
from spark_sink.status.report import Tables, describe
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spark_sink.client.slot_monitor import SlotReport


_SERVER_TIMEOUT_S = 15.0
_CLEAR = "\x1b[H\x1b[2J"

_EXAMPLE = """\b
Example:
  cdcpipe-spark status -d shop --warehouse warehouse
"""


class _Command(cloup.Command):
    """With --check, a usage error has exit code 3 (UNKNOWN) instead of 1, as monitoring systems expect."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_check = "--check" in args
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as ex:
            if not is_check:
                raise
            click.echo(unknown(ex.format_message()).line)
            ctx.exit(State.UNKNOWN)


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
        type=click.FloatRange(min=0.1),
        metavar="[SECS]",
        help="Repeat until SIGINT, with a pause of this length, or of 2 seconds.",
    ),
    cloup.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs; with --watch one on each line."),
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
    if check:
        if watch is not None or as_json:
            click.echo(unknown("--check goes without --watch and --json").line)
            ctx.exit(State.UNKNOWN)
        ctx.exit(_check(staging, warehouse, limits, connection_arguments(**connection)))
    if limits != Limits():
        raise click.UsageError("--max-lag, --max-lag-bytes and --max-wal go with --check")
    _show(staging, warehouse, watch, connection_arguments(**connection), as_json=as_json)


def _check(staging: Path | None, warehouse: Path | None, limits: Limits, arguments: tuple[str, ...]) -> State:
    """Print the line of a monitoring plugin, and return its exit code."""
    try:
        tables = None if warehouse is None else Tables(Warehouse.existing(warehouse))
        root = staging or _noted(tables)
        with SlotMonitor(arguments, _slot(root)) if arguments else contextlib.nullcontext() as monitor:
            alert = judge(describe(root, tables, *_ask(monitor, lambda: False)), limits)
    except click.UsageError as ex:
        alert = unknown(ex.format_message())
    except CdcpipeError as ex:
        alert = unknown(ex.message)
    except OSError as ex:
        alert = unknown(f"{ex.filename or 'a file'}: {ex.strerror or ex}")
    click.echo(alert.line)
    return alert.state


def _show(staging: Path | None, warehouse: Path | None, watch: float | None, arguments: tuple[str, ...], *, as_json: bool) -> None:
    """Print how far each stage is, once or repeatedly."""
    tables = None if warehouse is None else Tables(Warehouse.existing(warehouse))
    root = staging or _noted(tables)
    stopping = threading.Event()
    with contextlib.ExitStack() as stack:
        if watch is not None:
            stack.enter_context(on_signals(stopping.set))
        monitor = None
        if arguments:
            monitor = stack.enter_context(SlotMonitor(arguments, _slot(root), watch or 1.0))
        while not stopping.is_set():
            try:
                found = describe(root, tables, *_ask(monitor, stopping.is_set))
            except InterruptedError:
                return
            if as_json:
                click.echo(json.dumps(found, indent=None if watch else 1))
            else:
                is_redrawn = watch is not None and sys.stdout.isatty()
                click.echo((_CLEAR if is_redrawn else "") + _render(found) + ("\n" if watch and not is_redrawn else ""))
            if watch is None:
                return
            stopping.wait(watch)


def _noted(tables: Tables | None) -> Path:
    """Return the staging directory that the warehouse has recorded."""
    if tables is None:
        raise click.UsageError("--staging DIR or --warehouse DIR has to be given")
    root = tables.house.source().staging
    if root is None:
        raise InvalidArgumentsError(f"{tables.house.name} does not say where its staging directory is", hint="--staging DIR does")
    return root


def _slot(root: Path) -> str:
    epochs = list_epochs(root)
    if not epochs:
        raise InvalidArgumentsError(
            f"{root} has no log yet, so the name of its slot is not known",
            hint="leave the connection out, or start cdcpipe-spark first",
        )
    return epochs[-1].slot


def _ask(monitor: SlotMonitor | None, is_stopping: Callable[[], bool]) -> tuple[SlotReport | None, CdcpipeError | None]:
    if monitor is None:
        return None, None
    try:
        return monitor.wait_for_report(_SERVER_TIMEOUT_S, is_stopping), None
    except CdcpipeError as ex:
        return None, ex


def _render(found: dict[str, Any]) -> str:
    lines = [f"staging    {found['staging']}"]
    if found["warehouse"] is not None:
        lines.append(f"warehouse  {found['warehouse']}")
    source = found["source"]
    if source is None:
        return "\n".join([*lines, *_render_error(found["last_error"]), "log        not begun"])
    owner = found["launcher"]
    lines += [
        f"source     slot {source['slot']}, database {source['database']}, publications {', '.join(source['publications'])}",
        f"           server {source['system_id']}, timeline {source['timeline']}",
        f"launcher   {'none is running' if owner is None else owner_text(owner)}",
        *_render_error(found["last_error"]),
        *_render_server(found),
        f"log        {found['begin']} to {found['end']}, {found['segments']} segments, {format_size(found['size'])}",
    ]
    if found["removed"]:
        lines.append(f"removed    up to {found['removed']}")
    for gap in found["gaps"]:
        state = "tables not copied since" if gap["healed"] is None else "tables copied since"
        lines.append(f"gap        from {gap['after']} to {gap['start']}, {state}: {gap['cause']}")
        if gap.get("lost"):
            lines.append(f"           never happened: {LostChanges.from_json(gap['lost'])}")
    for table in found["waiting"]:
        lines += [f"waiting    {table['table']} needs a copy since {each['since']}: {each['reason']}" for each in table["reasons"]]
        if table["last_failure"]:
            failed = f"a copy of it failed {table['failures']} times, the last time at {table['last_failure']['time']}"
            lines.append(f"           {failed}: {table['last_failure']['message']}")
    lines += [f"dropped    {table['table']} at {table['dropped']}" for table in found["tables"] or () if table["dropped"]]
    for name, reader in found["readers"].items():
        behind = f"{reader['segments_behind']} segments, {format_size(reader['size_behind'])} behind"
        lines.append(f"reader     {name}: {reader['position']}, {behind}")
    ladder_rows: list[tuple[str, ...]] = [("ladder", "position", "behind", "seconds", "newest commit")]
    ladder_rows += [_ladder_row(rung) for rung in found["ladder"]]
    lines += ["", *_aligned(ladder_rows, "<<>><")]
    epochs: list[tuple[str, ...]] = [("epoch", "start", "segments", "size", "open")]
    for epoch in found["epochs"]:
        open_size = format_size(epoch["open_size"]) if epoch["open_size"] else ""
        epochs.append((str(epoch["number"]), epoch["start_lsn"], str(epoch["segments"]), format_size(epoch["size"]), open_size))
    lines += ["", *_aligned(epochs, "<<>>>")]
    if found["tables"]:
        head = ("table", "changes", "files", "changelog", "rows", "files", "replica", "written")
        lines += ["", *_aligned([head, *map(_table_row, found["tables"])], "<>><>><<")]
    return "\n".join(lines)


def _render_error(error: dict[str, Any] | None) -> list[str]:
    if error is None:
        return []
    lines = [f"last error {error['time']}, {error['command']}, exit code {error['exit_code']}: {error['message']}"]
    return lines + ([f"           hint: {error['hint']}"] if error["hint"] else [])


def _render_server(found: dict[str, Any]) -> list[str]:
    server = found["server"]
    if found["server_error"]:
        return [f"server     {found['server_error']}"]
    if server is None:
        return []
    parts = [f"used by server process {server['active_pid']}" if server["active"] else "nobody uses the slot"]
    parts.append(f"WAL {server['wal_status']}, kept from {server['restart_lsn']}")
    if server["safe_wal_bytes"] is not None:
        parts.append(f"{format_size(server['safe_wal_bytes'])} more before the slot may be lost")
    return [f"slot       {', '.join(parts)}"]


def _ladder_row(rung: dict[str, Any]) -> tuple[str, ...]:
    if rung["position"] is None:
        return rung["rung"], "-", "", "", ""
    seconds = "" if rung["behind_seconds"] is None else f"{'≤ ' if rung['at_most'] else ''}{rung['behind_seconds']:,.1f}"
    return rung["rung"], rung["position"], format_size(rung["behind_bytes"]), seconds, rung["commit_time"] or ""


def _table_row(row: dict[str, Any]) -> tuple[str, ...]:
    changelog, replica = row["changelog"] or {}, row["replica"] or {}
    return (
        row["table"],
        _number(changelog.get("rows")),
        _number(changelog.get("files")),
        changelog.get("position", "-"),
        _number(replica.get("rows")),
        _number(replica.get("files")),
        replica.get("position", "-"),
        max(changelog.get("written") or "", replica.get("written") or "") or "-",
    )


def _number(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _aligned(rows: Sequence[Sequence[str]], alignment: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{text:{align}{width}}" for text, align, width in zip(row, alignment, widths, strict=True)).rstrip()
        for row in rows
    ]
