"""What ``cdcpipe-spark status`` prints: a result of `describe` as text. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cdcpipe.printable import printable
from cdcpipe.units import counted, format_size
from spark_sink.schema.table import Table
from spark_sink.staging.gap import LostChanges
from spark_sink.staging.lock import owner_text
from spark_sink.status.check import moved_slot
from spark_sink.warehouse.warehouse import encode_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["LADDER_ALIGNMENT", "LADDER_HEAD", "aligned", "ladder_row", "name_of", "number", "render_text", "written_of"]

LADDER_HEAD: Final = ("ladder", "position", "behind", "seconds", "newest commit")
LADDER_ALIGNMENT: Final = "<<>><"


def name_of(row: Mapping[str, Any]) -> str:
    """Return a table's name, and why it gets no changes, if it gets none."""
    why = " (dropped)" if row["dropped"] else " (not published)" if row["published"] is False else ""
    return f"{row['table']}{why}"


def written_of(row: Mapping[str, Any]) -> str:
    """Return when the table's changelog or replica was last written; empty if this is not known."""
    return max((row[kind] or {}).get("written") or "" for kind in ("changelog", "replica"))


def render_text(found: Mapping[str, Any]) -> str:
    """Return all of a result of `describe` as text."""
    lines = [f"staging    {found['staging']}"]
    if found["warehouse"] is not None:
        lines.append(f"warehouse  {found['warehouse']}")
    source = found["source"]
    if source is None:
        return "\n".join([*lines, *_error(found["last_error"]), "log        not begun"])
    owner = found["launcher"]
    lines += [
        f"source     slot {source['slot']}, database {source['database']}, publications {', '.join(source['publications'])}",
        f"           server {source['system_id']}, timeline {source['timeline']}",
        f"launcher   {'none is running' if owner is None else owner_text(owner)}",
        *_error(found["last_error"]),
        *_server(found),
        f"log        {found['begin']} to {found['end']}, {counted(found['segments'], 'segment')}, {format_size(found['size'])}",
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
            failed = f"a copy of it failed {counted(table['failures'], 'time')}, the last time at {table['last_failure']['time']}"
            lines.append(f"           {failed}: {table['last_failure']['message']}")
    lines += [f"dropped    {table['table']} at {table['dropped']}" for table in found["tables"] or () if table["dropped"]]
    lines += [
        f"left       {table['table']} is not published any more, and gets no changes"
        for table in found["tables"] or ()
        if table["published"] is False and not table["dropped"]
    ]
    lines += [f"directory  {each['table']} is in {each['directory']}" for each in found["tables"] or () if _is_elsewhere(each)]
    for name, reader in found["readers"].items():
        behind = f"{counted(reader['segments_behind'], 'segment')}, {format_size(reader['size_behind'])} behind"
        lines.append(f"reader     {name}: {reader['position']}, {behind}")
    ladder_rows: list[tuple[str, ...]] = [LADDER_HEAD]
    ladder_rows += [ladder_row(rung) for rung in found["ladder"]]
    lines += ["", *aligned(ladder_rows, LADDER_ALIGNMENT)]
    epochs: list[tuple[str, ...]] = [("epoch", "start", "segments", "size", "open")]
    for epoch in found["epochs"]:
        open_size = format_size(epoch["open_size"]) if epoch["open_size"] else ""
        epochs.append((str(epoch["number"]), epoch["start_lsn"], str(epoch["segments"]), format_size(epoch["size"]), open_size))
    lines += ["", *aligned(epochs, "<<>>>")]
    if found["tables"]:
        head = ("table", "changes", "files", "changelog", "rows", "files", "replica", "written")
        table_rows, alignment = [head, *map(_table_row, found["tables"])], "<>><>><<"
        if any(row["history"] for row in found["tables"]):
            cells = ["history", *((row["history"] or {}).get("position", "-") for row in found["tables"])]
            table_rows = [(*row, cell) for row, cell in zip(table_rows, cells, strict=True)]
            alignment += "<"
        lines += ["", *aligned(table_rows, alignment)]
    return "\n".join(map(printable, lines))


def _error(error: Mapping[str, Any] | None) -> list[str]:
    if error is None:
        return []
    lines = [f"last error {error['time']}, {error['command']}, exit code {error['exit_code']}: {error['message']}"]
    return lines + ([f"           hint: {error['hint']}"] if error["hint"] else [])


def _server(found: Mapping[str, Any]) -> list[str]:
    server = found["server"]
    if found["server_error"]:
        return [f"server     {found['server_error']}"]
    if server is None:
        return []
    parts = [f"used by server process {server['active_pid']}" if server["active"] else "nobody uses the slot"]
    parts.append(f"WAL {server['wal_status']}, kept from {server['restart_lsn']}")
    if server["safe_wal_bytes"] is not None:
        parts.append(f"{format_size(server['safe_wal_bytes'])} more before the slot may be lost")
    lines = [f"slot       {', '.join(parts)}"]
    return [*lines, f"           {words}"] if (words := moved_slot(found)) else lines


def ladder_row(rung: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a stage, for the columns of `LADDER_HEAD`."""
    if rung["position"] is None:
        return rung["rung"], "-", "", "", ""
    seconds = "" if rung["behind_seconds"] is None else f"{'≤ ' if rung['at_most'] else ''}{rung['behind_seconds']:,.1f}"
    return rung["rung"], rung["position"], format_size(rung["behind_bytes"]), seconds, rung["commit_time"] or ""


def _is_elsewhere(row: Mapping[str, Any]) -> bool:
    """Tell whether a table's directories do not have its name: it was renamed, or another one has these."""
    name = str(row["table"])
    dots = [place for place, letter in enumerate(name) if letter == "."]  # schema and table may have one, too
    return bool(dots) and row["directory"] not in {encode_name(Table(name[:dot], name[dot + 1 :])) for dot in dots}


def _table_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    changelog, replica = row["changelog"] or {}, row["replica"] or {}
    return (
        row["table"],
        number(changelog.get("rows")),
        number(changelog.get("files")),
        changelog.get("position", "-"),
        number(replica.get("rows")),
        number(replica.get("files")),
        replica.get("position", "-"),
        written_of(row) or "-",
    )


def number(count: int | None) -> str:
    """Return a count as text, ``-`` if it is not known."""
    return "-" if count is None else f"{count:,}"


def aligned(rows: Sequence[Sequence[str]], alignment: str) -> list[str]:
    """Return rows of cells as lines, with the columns aligned by ``<`` or ``>``."""
    rows = [[*map(printable, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{text:{align}{width}}" for text, align, width in zip(row, alignment, widths, strict=True)).rstrip()
        for row in rows
    ]
