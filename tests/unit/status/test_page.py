"""`status --html`: one page that is whole, loads nothing, and shows what status knows."""

import json
import re
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from spark_sink.staging.samples import Sample
from spark_sink.status.page import render
from support.forked_commands import ForkedCommands
from support.small_pipeline import make_pipeline

VOID = {"meta", "line"}


class Page(HTMLParser):
    """Checks that each element is closed in order, and collects texts and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def found(tmp_path: Path, commands: ForkedCommands) -> dict[str, Any]:
    pipeline = make_pipeline(tmp_path)
    result: dict[str, Any] = json.loads(commands.spark_cli("status", "--warehouse", str(pipeline / "warehouse"), "--json").stdout)
    return result


def samples(*times: float, lag: float | None = 1.0, changes: int | None = 60) -> list[Sample]:
    return [Sample(time, 60.0, 120, 1000, changes, None if lag is None else 100, lag) for time in times]


def test_the_page_is_one_file_that_loads_nothing(found: dict[str, Any]) -> None:
    text = render(found, samples(0.0, 60.0))
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _, _ in page.attributes}
    assert not re.search(r"https?:|url\(|@import|<script", text)
    assert not {name for _, name, _ in page.attributes} & {"src", "href", "onload", "onclick"}


def test_it_has_stages_tables_and_places(found: dict[str, Any]) -> None:
    texts = Page(render(found, [])).texts
    assert {"sealed", "changelog", "replica", "1:0/1300", "1:0/1200", "public.fruit"} <= {*texts}
    assert any(text.startswith(f"{found['staging']}, 3 segments") for text in texts)
    assert "The last day" not in texts
    assert ("meta", "content", "2") in Page(render(found, [], refresh_s=2.0)).attributes
    assert any("no launcher is running" in text for text in texts)
    assert "process ? on ? since ?" in Page(render(found | {"launcher": {}}, [])).texts  # its lock is just being written


def test_what_needs_attention_is_first(found: dict[str, Any]) -> None:
    error = {"time": "2026-03-01T12:00:00Z", "command": "run", "message": "<b>no</b> & room", "hint": None, "exit_code": 7}
    text = render(found | {"last_error": error}, [])
    assert 'class="state CRITICAL"' in text
    assert "<b>no" not in text
    assert any("<b>no</b> & room" in each for each in Page(text).texts)
    waiting = [{"table": 'public."<t>"', "reasons": [{"reason": "it was renamed", "since": "0/1"}], "failures": 0}]
    texts = Page(render(found | {"waiting": waiting}, [])).texts
    assert any('public."<t>": it was renamed' in each for each in texts)
    assert 'class="state UNKNOWN"' in render(found | {"server_error": "gone"}, [])
    texts = Page(render(found | {"server_error": "gone", "last_error": error}, [])).texts
    no_room, gone = (next(i for i, each in enumerate(texts) if words in each) for words in ("& room", "gone"))
    assert no_room < gone


def test_a_log_that_has_not_begun(tmp_path: Path, commands: ForkedCommands) -> None:
    target = tmp_path / "page.html"
    (tmp_path / "staging").mkdir()
    ended = commands.spark_cli("status", "--staging", str(tmp_path / "staging"), "--html", str(target))
    assert ended.stdout == ""
    assert any("has no log yet" in each for each in Page(target.read_text()).texts)


def charts(text: str) -> dict[str, list[str]]:
    """Return the points of each line, by the chart's title."""
    found = re.findall(r'<svg[^>]*aria-label="([^"]*)">(.*?)</svg>', text)
    return {title: re.findall(r'points="([^"]*)"', body) for title, body in found}


def test_the_charts_have_the_samples_and_their_gaps(found: dict[str, Any]) -> None:
    drawn = charts(render(found, samples(0.0, 60.0, 120.0, 1000.0, 1060.0)))
    assert {*drawn} == {
        "lag behind the server",
        "lag in bytes of WAL",
        "changes per second in the tables",
        "records per second in the log",
    }
    for lines in drawn.values():
        assert [len(line.split()) for line in lines] == [4, 3]  # the last point twice
        assert all(0 <= float(part) <= 640 for line in lines for point in line.split() for part in point.split(","))
    first = drawn["lag behind the server"][0].split()
    assert first[0] == "8.0,20.0"
    assert drawn["lag behind the server"][1].split()[-1].startswith("632.0,")


def test_the_charts_end_with_the_last_day(found: dict[str, Any]) -> None:
    (line,) = charts(render(found, samples(0.0, 60.0, 86_460.0, 86_520.0)))["lag behind the server"]
    assert len(line.split()) == 3


def test_a_sample_from_the_future_is_not_drawn(found: dict[str, Any]) -> None:
    """The clock was two days ahead when the machine started. For these two days the charts had this one point."""
    drawn = samples(0.0, 60.0)
    later = samples(datetime.fromisoformat(found["time"]).timestamp() + 2 * 86_400.0)
    assert render(found, [*drawn, *later]) == render(found, drawn)
    assert render(found, later) == render(found, [])


def test_what_is_unknown_has_no_chart(found: dict[str, Any]) -> None:
    assert {*charts(render(found, samples(0.0, lag=None, changes=None)))} == {"records per second in the log"}
    mixed = [*samples(0.0, 60.0), *samples(120.0, lag=None), *samples(180.0)]
    assert [len(line.split()) for line in charts(render(found, mixed))["lag behind the server"]] == [3, 2]
    assert charts(render(found, [Sample(0.0, 0.0, 0, 0, 0, 0, 0.0)]))  # all is 0: no division by it


def test_the_command_writes_the_page_with_the_history(tmp_path: Path, commands: ForkedCommands) -> None:
    pipeline, target = make_pipeline(tmp_path), tmp_path / "page.html"
    sample = {"seconds": 60.0, "records": 1, "bytes": 2, "changes": 3, "lag_bytes": 4, "lag_s": 5.0}
    lines = [json.dumps({"time": 60.0 * number, **sample}) for number in range(5)]
    (pipeline / "staging/history.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "other").write_text("not the page")
    target.with_name("page.html.tmp").symlink_to("other")  # of another user who may write to this directory
    ended = commands.spark_cli("status", "--warehouse", str(pipeline / "warehouse"), "--html", str(target))
    assert ended.stdout == ""
    text = target.read_text()
    assert len(charts(text)) == 4
    assert "refresh" not in text
    assert (tmp_path / "other").read_text() == "not the page"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["other", "page.html", "page.html.tmp"]
    assert target.stat().st_mode == (tmp_path / "other").stat().st_mode  # a web server reads it
    assert commands.cdcpipe_spark("status", "--staging", "x", "--html", str(target), "--json").code == 1
    assert commands.cdcpipe_spark("status", "--staging", "x", "--html", str(target), "--check").code == 3
