"""What ``status --watch`` shows on a terminal: what is most important, and as many tables as there is room for. No I/O.

    drawn = draw(found, Size(80, 24), top=0)
    drawn.lines      # at most 24, of at most 80 characters each
    drawn.top        # the first table that is shown, once ``top`` is kept within the tables

From top to bottom: the source and the time, what needs attention, the ladder, the tables, and one line about the other tables. A
small terminal cuts what needs attention first, and always has room for three lines of tables.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cdcpipe.printable import printable
from spark_sink.status.check import Limits, State, judge
from spark_sink.status.text import LADDER_ALIGNMENT, LADDER_HEAD, aligned, ladder_row, name_of, number, written_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Drawn", "Size", "draw", "scroll"]

_LEAST_TABLES: Final = 3
_LEAST_NAME: Final = 20
"""How many characters of a table's name are shown before a column is left out."""

_RED, _YELLOW, _GREEN, _BOLD, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[32m", "\x1b[1m", "\x1b[0m"
_STATES: Final = {State.CRITICAL: _RED, State.WARNING: _YELLOW, State.UNKNOWN: _YELLOW}

_SLOW_S, _LATE_S = 30.0, 300.0
"""A lag of more seconds is yellow, or red. Replicas are up to --replica-interval behind, at most 10 s by default."""


class Size(NamedTuple):
    """The size of a terminal."""

    columns: int
    lines: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """The lines of a screen, and which tables they show."""

    lines: list[str]
    top: int
    page: int
    """How many tables there is room for."""


class _Line(NamedTuple):
    text: str
    color: str = ""


def draw(found: Mapping[str, Any], size: Size, *, top: int = 0, keys: bool = False, color: bool = False) -> Drawn:
    """Return the screen for a result of `describe`. With ``keys`` it names the keys that scroll the tables."""
    tables = found["tables"] or []
    ladder = _ladder(found["ladder"])
    least = min(len(tables) + 1, _LEAST_TABLES) if tables else 0
    # One line for the source, one before the ladder, one before the tables.
    fixed = 1 + (len(ladder) + 1 if ladder else 0) + (least + 1 if tables else 0)
    alerts = _alerts(found, size.columns)[: max(size.lines - fixed, 0)]
    lines = [_Line(_head(found, size.columns), _BOLD), *alerts]
    if ladder:
        lines += [_Line(""), *ladder]
    page = size.lines - len(lines) - 2
    if len(tables) > page:
        page -= 1  # the line about the others
    page = max(page, 1)
    top = max(0, min(top, len(tables) - page))
    if tables:
        shown = _tables(tables[top : top + page], size.columns)
        lines += [_Line(""), _Line(shown[0], _BOLD), *map(_Line, shown[1:])]
        if len(tables) > page:
            lines.append(_Line(_others(len(tables), top, page, keys=keys)))
    return Drawn([_paint(line, size.columns, color=color) for line in lines[: size.lines]], top, page)


def scroll(top: int, key: str, page: int) -> int:
    """Return the first table to show after a key. `draw` keeps it within the tables."""
    steps = {"down": 1, "up": -1, "page down": page, "page up": -page}
    return max(0, top + steps.get(key, 0))


def _paint(line: _Line, columns: int, *, color: bool) -> str:
    text = printable(line.text)
    text = text if len(text) <= columns else f"{text[: columns - 1]}…"
    return f"{line.color}{text}{_PLAIN}" if color and line.color else text


def _head(found: Mapping[str, Any], columns: int) -> str:
    source, time = found["source"], found["time"][11:19]
    name = f"log {found['staging']}" if source is None else f"slot {source['slot']}, database {source['database']}"
    room = max(columns - len(time) - 1, 1)
    return f"{name[:room]:{room}} {time}"


def _alerts(found: Mapping[str, Any], columns: int) -> list[_Line]:
    """Return what `status --check` finds without limits, the worst first, and the last error: at most two lines each."""
    findings = [(state, words) for state, words in judge(found, Limits()).worst_first if state is not State.OK]
    error = found["last_error"]
    if error is not None and not any(error["message"] in words for _, words in findings):
        findings.append((State.WARNING, f"last error, {error['time']}: {error['message']}"))
    return [
        _Line(line, _STATES[state])
        for state, words in findings
        for line in textwrap.wrap(words, max(columns, _LEAST_NAME), max_lines=2, placeholder=" …")
    ]


def _ladder(rungs: Sequence[Mapping[str, Any]]) -> list[_Line]:
    if not rungs:
        return []
    head, *rows = aligned([LADDER_HEAD, *map(ladder_row, rungs)], LADDER_ALIGNMENT)
    return [_Line(head, _BOLD), *(_Line(row, _lag_color(rung)) for row, rung in zip(rows, rungs, strict=True))]


def _lag_color(rung: Mapping[str, Any]) -> str:
    seconds = rung["behind_seconds"]
    if rung["position"] is None or seconds is None:
        return ""
    return _RED if seconds > _LATE_S else _YELLOW if seconds > _SLOW_S else _GREEN


class _Column(NamedTuple):
    head: str
    alignment: str
    cells: list[str]


def _tables(rows: Sequence[Mapping[str, Any]], columns: int) -> list[str]:
    """Return the head and a line for each table: its name, and as many columns as there is room for, from the right."""
    changelogs, replicas = [row["changelog"] or {} for row in rows], [row["replica"] or {} for row in rows]
    others = [
        _Column("changes", ">", [number(each.get("rows")) for each in changelogs]),
        _Column("rows", ">", [number(each.get("rows")) for each in replicas]),
        _Column("replica", "<", [each.get("position", "-") for each in replicas]),
        _Column("written", "<", [written_of(row)[:19].replace("T", " ") or "-" for row in rows]),
        _Column("changelog", "<", [each.get("position", "-") for each in changelogs]),
    ]
    names = [*map(name_of, rows)]
    least = min(_LEAST_NAME, max(map(len, names)))
    while others and least + sum(2 + _width(column) for column in others) > columns:
        others.pop()
    room = max(columns - sum(2 + _width(column) for column in others), 1)
    names = [name if len(name) <= room else f"{name[: room - 1]}…" for name in names]
    lines = [("table", *(column.head for column in others)), *zip(names, *(column.cells for column in others), strict=True)]
    return aligned(lines, "<" + "".join(column.alignment for column in others))


def _width(column: _Column) -> int:
    return max(map(len, [column.head, *column.cells]))


def _others(count: int, top: int, page: int, *, keys: bool) -> str:
    if not keys:
        return f"and {count - page:,} more"
    return f"tables {top + 1:,} to {top + page:,} of {count:,}: j, k, PgDn, PgUp scroll, q ends"
