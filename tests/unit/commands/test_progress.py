"""The progress lines: what they say at which width, and what a terminal shows of them."""

import io
import re
import sys
import time
from typing import Any

import pytest

from spark_sink.client.slot_monitor import Lag
from spark_sink.commands import progress as lines
from spark_sink.commands.progress import ProgressLine, RunLine
from spark_sink.commands.progress_text import Part, Rates, bar, fit, log_text, snapshot_text, step_text, tables_text
from spark_sink.launcher.launcher import Progress
from spark_sink.pipeline.pipeline import PipelineProgress
from spark_sink.pipeline.runner import RunProgress
from spark_sink.snapshot.copy import SnapshotProgress
from spark_sink.staging.log import Position

LOG = Progress(Position(1, 0x16_B374_D848), size=3 << 30, records=81_000_000, transactions=1_234_567, open_size=5, restarts=2)
TABLES = PipelineProgress(Position(1, 0x16_B374_D7F0), 9, 80_999_999, 120, 7)
LAG = Lag(123_456_789, 123.4, at_least=True)
RATES = Rates(12_345.6, 54_321.0)
COPY = SnapshotProgress(12, 2, 1_234_567, 2_000_000, 40, 18, 10.0)


def test_the_least_important_parts_are_left_out_first() -> None:
    parts = [Part("aaaa"), Part("bbbb", 2), Part("cccc", 1), Part("dddd", 2)]
    assert fit(parts, None) == "aaaa, bbbb, cccc, dddd" == fit(parts, 22)
    assert fit(parts, 21) == "aaaa, bbbb, cccc"
    assert fit(parts, 15) == "aaaa, cccc"
    assert fit(parts, 9) == "aaaa"
    assert fit(parts, 3) == "aaa"
    assert fit([], 3) == ""


def test_the_tables_line() -> None:
    assert tables_text(LOG, TABLES, LAG, RATES, None) == (
        "tables 1:16/B374D7F0, 12,346 rows/s, lag 117.7 MiB ≥ 123.4 s, 80,999,999 changes in 120 tables, 7 messages,"
        " log 1:16/B374D848, 1,234,567 transactions, 81,000,000 records, 3.0 GiB, 54,321 records/s, open 5 B, 2 restarts"
    )
    assert tables_text(LOG, TABLES, LAG, RATES, 79) == "tables 1:16/B374D7F0, 12,346 rows/s, lag 117.7 MiB ≥ 123.4 s"
    assert tables_text(LOG, TABLES, LAG, RATES, 50) == "tables 1:16/B374D7F0, lag 117.7 MiB ≥ 123.4 s"
    assert tables_text(LOG, TABLES, None, RATES, 40) == "tables 1:16/B374D7F0, lag unknown"


def test_the_log_line() -> None:
    assert log_text(LOG, LAG, 54_321.0, None) == (
        "position 1:16/B374D848, lag 117.7 MiB ≥ 123.4 s, 1,234,567 transactions, 81,000,000 records, 3.0 GiB, 54,321 records/s,"
        " open 5 B, 2 restarts"
    )
    assert log_text(LOG, None, 54_321.0, 79) == ("position 1:16/B374D848, 1,234,567 transactions, 54,321 records/s, 2 restarts")


def test_the_snapshot_line() -> None:
    assert snapshot_text(COPY, None) == "snapshot: 2 of 12 tables, 1,234,567 rows of about 2,000,000, 123,457 rows/s, 12 s left"
    assert snapshot_text(COPY, 79) == "snapshot: table 3 of 12, [#########-----------]  45%, 123,457 rows/s, 12 s left"
    assert snapshot_text(COPY, 65) == "snapshot: table 3 of 12, [#########-----------]  45%, 12 s left"
    done = SnapshotProgress(12, 12, 2_000_000, 1_900_000, 40, 40, 20.0)
    assert snapshot_text(done, 79) == "snapshot: table 12 of 12, [####################] 100%, 100,000 rows/s"
    assert snapshot_text(SnapshotProgress(1, 0, 0, 5, 3, 0, 0.0), 79).startswith("snapshot: table 1 of 1, [-------")


def test_a_line_is_never_wider_than_the_terminal() -> None:
    for width in range(1, 200):
        for text in (
            tables_text(LOG, TABLES, LAG, RATES, width),
            log_text(LOG, LAG, 1.0, width),
            snapshot_text(COPY, width),
            step_text("fetching delta-spark_4.2_2.13-4.4.0.jar", 3.0, width),
        ):
            assert 0 < len(text) <= width


@pytest.mark.parametrize(
    ("part", "text"), [(-1.0, "[----]   0%"), (0.5, "[##--]  50%"), (0.999, "[###-]  99%"), (2.0, "[####] 100%")]
)
def test_a_bar(part: float, text: str) -> None:
    assert bar(part, 4) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        return re.split(r"\r\x1b\[K", self.getvalue())


def test_a_run_on_a_terminal_says_something_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, clock = Terminal(), [100.0]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(lines, "terminal_width", lambda: 79)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def at(now: float, **progress: Any) -> None:
        clock[0] = now
        line.update(
            RunProgress(**{"launcher": LOG, "snapshot": None, "tables": None, "lag": LAG, "step": "starting Spark"} | progress)
        )

    with RunLine() as line:
        line.say("starting")
        at(101.0)
        at(101.1)  # not due yet
        at(103.0, snapshot=SnapshotProgress())
        at(104.0, snapshot=COPY)
        at(105.0, snapshot=COPY, tables=TABLES, step="")
        at(106.0, snapshot=COPY, tables=TABLES, step="")
        at(107.0, snapshot=COPY, tables=TABLES, step="compacting tables")
    assert terminal.shown() == [
        "",
        "starting, 0 s",
        "starting Spark, 0 s",
        "starting Spark, 2 s",
        snapshot_text(COPY, 79),
        f"{snapshot_text(COPY, None)}\n",
        "tables 1:16/B374D7F0, 16,200,001 rows/s, lag 117.7 MiB ≥ 123.4 s",
        "tables 1:16/B374D7F0, 0 rows/s, lag 117.7 MiB ≥ 123.4 s",
        "tables 1:16/B374D7F0, compacting tables, 0 rows/s, lag 117.7 MiB ≥ 123.4 s",
        "",
    ]


def test_in_a_log_the_last_line_is_not_there_twice(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine(100.0)
    line.update(LOG, 111.0, tables=TABLES, lag=LAG)
    line.update(LOG, 111.0, tables=TABLES, lag=LAG, is_last=True)
    assert len(capsys.readouterr().err.splitlines()) == 1
    line.update(LOG, 112.0, tables=TABLES, lag=None, is_last=True)
    assert "lag unknown" in capsys.readouterr().err
