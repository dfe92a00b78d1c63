"""``cdcpipe-spark status``: how far each stage is, what the staging directory and the tables hold, what went wrong last.

Looks at files alone, and at the server by way of ``cdcpipe slot`` if a connection is given: no Spark, no Java, nothing is locked.
The JSON object is a contract (docs/spark/operate.md); the keys that are there stay.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from cdcpipe.lsn import format_lsn
from spark_sink.client.slot_monitor import SlotMonitor
from spark_sink.commands.options import CONTEXT_SETTINGS, DIRECTORY, PLACE, connection_arguments, connection_options, format_size
from spark_sink.commands.signals import on_signals
from spark_sink.staging import known_position, last_error
from spark_sink.staging.lock import lock_owner, owner_text
from spark_sink.staging.log import Position, epoch_directory, list_epochs, list_segments, log_end, read_readers, removed_position
from spark_sink.status import ladder
from spark_sink.warehouse.warehouse import MESSAGES, Warehouse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spark_sink.client.slot_monitor import SlotReport
    from spark_sink.delta.log import TableState
    from spark_sink.staging.log import Segment
    from spark_sink.status.ladder import Rung
    from spark_sink.warehouse.warehouse import Table, Version

__all__ = ["Tables", "command", "describe"]

_SERVER_TIMEOUT_S = 15.0
_CLEAR = "\x1b[H\x1b[2J"

_EXAMPLE = """\b
Example:
  cdcpipe-spark status --warehouse /srv/lake -d shop --watch"""


@click.command("status", context_settings=CONTEXT_SETTINGS, epilog=_EXAMPLE)
@connection_options
@click.option(
    "--staging",
    type=DIRECTORY,
    metavar="DIR",
    help="The staging directory. Left out: the one that the warehouse notes.",
)
@click.option(
    "--warehouse",
    type=PLACE,
    metavar="DIR|URL",
    help="The warehouse: its tables are shown, too.",
)
@click.option(
    "--watch",
    is_flag=False,
    flag_value=2.0,
    type=click.FloatRange(min=0.1),
    metavar="[SECS]",
    help="Show it again and again, this long after the last time (2, if SECS is left out), until SIGINT.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, for programs; with --watch one in each line.")
def command(*, staging: Path | None, warehouse: Path | None, watch: float | None, as_json: bool, **connection: Any) -> None:
    """Show how far each stage is, from the server's WAL to the tables, and what went wrong last. Needs no Spark and no Java.

    The server is asked if one of -d, -h, -p, -U and -m says where it is.
    """
    tables = None if warehouse is None else Tables(Warehouse.existing(warehouse))
    root = staging or _noted(tables)
    arguments = connection_arguments(**connection)
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
    """Return the staging directory that the warehouse notes."""
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
            f"{root} holds no log yet, and so no slot's name", hint="leave the connection out, or start cdcpipe-spark first"
        )
    return epochs[-1].slot


def _ask(monitor: SlotMonitor | None, is_stopping: Callable[[], bool]) -> tuple[SlotReport | None, CdcpipeError | None]:
    if monitor is None:
        return None, None
    try:
        return monitor.wait_for_report(_SERVER_TIMEOUT_S, is_stopping), None
    except CdcpipeError as ex:
        return None, ex


def describe(
    root: Path, tables: Tables | None = None, report: SlotReport | None = None, server_error: CdcpipeError | None = None
) -> dict[str, Any]:
    """Return what `status` shows; StagingError for a directory that is none, or is damaged."""
    now = time.time()
    known = _known(root)  # before the log's end
    epochs, segments, end = list_epochs(root), list_segments(root), log_end(root)
    sizes = {segment.path: _size(segment.path) for segment in segments}
    removed = removed_position(root)
    rows = [] if tables is None else tables.describe()
    rungs = ladder.build(report, end, [] if tables is None else tables.rungs(rows), ladder.CommitTimes(segments), now, known)
    return {
        "time": _iso(now),
        "staging": str(root),
        "warehouse": None if tables is None else tables.house.name,
        "launcher": lock_owner(root),
        "last_error": last_error.read(root),
        "source": None
        if not epochs
        else {
            "system_id": epochs[-1].system_id,
            "timeline": epochs[-1].timeline,
            "database": epochs[-1].database,
            "slot": epochs[-1].slot,
            "publications": list(epochs[-1].publications),
        },
        "server": None if report is None else report.found,
        "server_error": None if server_error is None else server_error.message,
        "ladder": [_rung(rung) for rung in rungs],
        "begin": str(segments[0].start if segments else end) if end is not None else None,
        "end": None if end is None else str(end),
        "removed": None if removed is None else str(removed),
        "segments": len(segments),
        "size": sum(sizes.values()),
        "epochs": [
            {
                "number": epoch.number,
                "start_lsn": format_lsn(epoch.start_lsn),
                "segments": sum(segment.epoch == epoch.number for segment in segments),
                "size": sum(sizes[segment.path] for segment in segments if segment.epoch == epoch.number),
                "open_size": _open_size(epoch_directory(root, epoch.number)),
            }
            for epoch in epochs
        ],
        "readers": {
            name: {"position": str(position), **_behind(position, segments, sizes)} for name, position in read_readers(root).items()
        },
        "tables": rows,
    }


def _known(root: Path) -> ladder.Known | None:
    lsn, at = known_position.read(root), known_position.noted_at(root)
    return ladder.Known(lsn, at) if lsn and at is not None else None


class Tables:
    """The tables of a warehouse, as their own files tell."""

    def __init__(self, house: Warehouse) -> None:
        self.house = house
        self._known: dict[Path, TableState | None] = {}
        self._versions: dict[str, list[Version]] = {}

    def describe(self) -> list[dict[str, Any]]:
        """Return an object for each table, for ``rungs``."""
        tables = self.house.tables()
        self._versions = {str(table): self.house.versions(table) for table in tables}
        if self.house.changelog(MESSAGES).is_dir():
            tables.append(MESSAGES)
        return [
            {
                "table": str(table),
                "versions": len(self._versions.get(str(table), [])),
                "purged": format_lsn(lsn) if (lsn := self.house.purged_lsn(table)) else None,
                "changelog": self._changelog(table),
                "replica": self._delta(self.house.replica(table)) if self.house.format == "delta" else None,
            }
            for table in tables
        ]

    def rungs(self, rows: Sequence[dict[str, Any]]) -> list[tuple[str, Position | None]]:
        """Return how far all changelogs are, and all replicas: as far as the one that lacks most of its changelog."""
        position = self.house.source().position
        replica = position
        for row in rows:
            changelog, own = (Position.parse(row[kind]["position"]) if row[kind] else None for kind in ("changelog", "replica"))
            if own is None and changelog is not None and changelog.lsn:
                own = self._beginning(row["table"])
            if replica is not None and changelog is not None and own is not None and own.lsn < min(changelog.lsn, replica.lsn):
                replica = Position(replica.epoch, own.lsn)
        return [("changelog", position), ("replica", replica)] if self.house.format == "delta" else [("changelog", position)]

    def _beginning(self, name: str) -> Position | None:
        """Return the place before a table's first change: so far is a replica that is not there; None if there is to be none."""
        begin, versions = self.house.source().begin or Position(0, 0), self._versions.get(name, [])
        if not any(version.key for version in versions):
            return None
        return Position(begin.epoch, max(begin.lsn, versions[0].end_lsn - 1))

    def _changelog(self, table: Table) -> dict[str, Any] | None:
        if self.house.format == "delta":
            return self._delta(self.house.changelog(table))
        from spark_sink.changelog import tables as changelog

        lsn = changelog.parquet_lsn(self.house, table)
        return None if lsn is None else self._object(lsn)

    def _delta(self, path: Path) -> dict[str, Any] | None:
        from spark_sink.delta import log as delta_log

        state = self._known[path] = delta_log.read_table(path, self._known.get(path))
        if state is None:
            return None
        return self._object(state.lsn or 0) | {
            "rows": state.rows,
            "files": state.files,
            "size": state.size,
            "version": state.version,
            "written": None if state.written_ms is None else _iso(state.written_ms / 1000),
        }

    def _object(self, lsn: int) -> dict[str, Any]:
        position = self.house.source().position
        unknown: dict[str, Any] = dict.fromkeys(("rows", "files", "size", "version", "written"))
        return {"position": str(Position(0 if position is None else position.epoch, lsn))} | unknown


def _rung(rung: Rung) -> dict[str, Any]:
    return {
        "rung": rung.name,
        "position": rung.position,
        "commit_time": None if rung.commit_time is None else _iso(rung.commit_time),
        "behind_bytes": rung.behind_bytes,
        "behind_seconds": None if rung.behind_seconds is None else round(rung.behind_seconds, 3),
        "at_most": rung.at_most,
    }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _open_size(directory: Path) -> int:
    return sum(_size(path) for path in directory.glob("*.open"))


def _size(path: Path) -> int:
    """Return a file's size, 0 for one that was sealed or removed in this moment."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _behind(position: Position, segments: list[Segment], sizes: dict[Path, int]) -> dict[str, int]:
    """Return how much of the log a reader does not have yet."""
    ahead = [sizes[segment.path] for segment in segments if segment.end_lsn > position.lsn]
    return {"segments_behind": len(ahead), "size_behind": sum(ahead)}


# --- for people ---


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
