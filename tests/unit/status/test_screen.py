"""`status --watch`: what fits a terminal, which tables it shows, and the keys."""

import io
import re
from typing import Any

import pytest

from spark_sink.commands import watch
from spark_sink.commands.watch import keys_of
from spark_sink.status.screen import Size, draw, scroll

TIME = "2026-03-01T12:30:00.190Z"


def rung(name: str, seconds: float | None, position: str | None = "1:16/B374D7F0") -> dict[str, Any]:
    return {
        "rung": name,
        "position": position,
        "commit_time": TIME,
        "behind_bytes": 123_456_789,
        "behind_seconds": seconds,
        "at_most": False,
    }


def table(number: int) -> dict[str, Any]:
    return {
        "table": f"public.table_{number:03}",
        "dropped": None,
        "published": True,
        "changelog": {"rows": 1000 + number, "files": 3, "position": "1:16/B374D7F0", "written": TIME},
        "replica": {"rows": number, "files": 3, "position": "1:16/B374D000", "written": "2026-03-01T12:29:00.190Z"},
    }


def found(tables: int = 40, **other: Any) -> dict[str, Any]:
    rungs = [rung("server", 0.0), rung("sealed", 31.0), rung("changelog", 301.5), rung("replica", None, None)]
    return {
        "time": TIME,
        "staging": "/data/staging",
        "warehouse": "warehouse",
        "launcher": None,
        "last_start": TIME,
        "last_error": None,
        "source": {"system_id": "7", "timeline": 1, "database": "shop", "slot": "shop_cdc", "publications": ["shop"]},
        "server": None,
        "server_error": None,
        "server_error_code": None,
        "ladder": rungs,
        "gaps": [],
        "waiting": [],
        "tables": [table(number) for number in range(tables)],
    } | other


def shown(lines: list[str]) -> list[int]:
    return [int(name) for line in lines for name in re.findall(r"public\.table_(\d+)", line)]


def test_a_small_terminal() -> None:
    drawn = draw(found(), Size(80, 24), keys=True)
    assert drawn.lines[0].startswith("slot shop_cdc, database shop  ")
    assert drawn.lines[0].endswith(" 12:30:00")
    assert "ladder     position          behind  seconds  newest commit" in drawn.lines
    assert "changelog  1:16/B374D7F0  117.7 MiB    301.5  2026-03-01T12:30:00.190Z" in drawn.lines
    assert "table             changes  rows  replica        written" in drawn.lines
    assert "public.table_000    1,000     0  1:16/B374D000  2026-03-01 12:30:00" in drawn.lines
    assert shown(drawn.lines) == list(range(drawn.page))
    assert drawn.lines[-1] == f"tables 1 to {drawn.page} of 40: j, k, PgDn, PgUp scroll, q ends"
    assert len(drawn.lines) == 24


def test_no_line_is_too_long_and_no_screen_too_high() -> None:
    error = {"message": 200 * "x", "time": TIME, "command": "run", "exit_code": 3, "hint": None}
    for facts in (found(), found(0), found(2), found(last_error=error), found(0, ladder=[], source=None)):
        for columns in (1, 10, 40, 79, 80, 81, 200):
            for lines in (1, 2, 5, 10, 23, 24, 60):
                drawn = draw(facts, Size(columns, lines), top=1000, keys=True)
                assert 0 < len(drawn.lines) <= lines
                assert max(map(len, drawn.lines)) <= columns
                assert 0 <= drawn.top <= 40


def test_what_does_not_fit_is_counted() -> None:
    drawn = draw(found(), Size(80, 24))
    assert drawn.lines[-1] == f"and {40 - drawn.page} more"
    all_of_them = draw(found(3), Size(80, 24))
    assert shown(all_of_them.lines) == [0, 1, 2]
    assert "more" not in all_of_them.lines[-1]


def test_a_wide_terminal_shows_more_columns_and_a_narrow_one_cuts_names() -> None:
    assert "table             changes  rows  replica        written              changelog" in draw(found(), Size(120, 24)).lines
    facts = found(0) | {"tables": [table(1) | {"table": "public." + 60 * "n"}]}
    *_, head, row = draw(facts, Size(50, 24)).lines
    assert head.split() == ["table", "changes", "rows", "replica"]
    assert row == f"public.{12 * 'n'}…    1,001     1  1:16/B374D000"


def test_what_needs_attention_is_above_the_ladder() -> None:
    lines = draw(found(server_error="the server does not answer"), Size(80, 24)).lines
    assert any("the server does not answer" in line for line in lines[1 : lines.index("")])
    error = {"message": "the slot is in use", "time": TIME, "command": "run", "exit_code": 3, "hint": None}
    assert sum("the slot is in use" in line for line in draw(found(last_error=error), Size(80, 24)).lines) == 1


def test_the_lag_has_a_color() -> None:
    lines = draw(found(), Size(80, 24), color=True).lines
    colors = {line.split()[0].rpartition("m")[2]: line[:5] for line in lines if "B374D7F0" in line and "table" not in line}
    assert colors == {"server": "\x1b[32m", "sealed": "\x1b[33m", "changelog": "\x1b[31m"}
    plain = [re.sub(r"\x1b\[\d+m", "", line) for line in lines]
    assert plain == draw(found(), Size(80, 24)).lines
    assert not any("\x1b" in line for line in plain)


def test_scrolling_stays_within_the_tables() -> None:
    page = draw(found(), Size(80, 24)).page
    assert [scroll(5, key, page) for key in ("down", "up", "page down", "")] == [6, 4, 5 + page, 5]
    assert scroll(0, "up", page) == scroll(1, "page up", page) == 0
    last = draw(found(), Size(80, 24), top=1000)
    assert (last.top, shown(last.lines)) == (40 - page, list(range(40 - page, 40)))


def test_keys() -> None:
    assert keys_of(b"jk\x1b[A\x1bOB\x1b[6~\x1b[5~ xq\x1b[1;5C") == [
        "down", "up", "up", "down", "page down", "page up", "page down", "quit",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "is_terminal", "has"),
    [
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({}, False, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_colors_are_only_for_terminals(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], is_terminal: bool, has: bool
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stdout = io.StringIO()
    monkeypatch.setattr(stdout, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stdout", stdout)
    assert watch.has_color() is has
