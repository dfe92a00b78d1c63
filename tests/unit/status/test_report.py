"""`describe`: what status says of the server and the log together."""

import json
from pathlib import Path
from typing import Any

import pytest

from cdcpipe.lsn import format_lsn
from spark_sink.client.slot_monitor import SlotReport
from spark_sink.staging import account
from spark_sink.status.check import Limits, State, judge
from spark_sink.status.report import Tables, describe
from spark_sink.status.text import render_text
from spark_sink.warehouse.warehouse import Warehouse
from support.small_pipeline import make_pipeline

END = 0x1300
"""Where the log of `make_pipeline` ends."""


def report(wal_lsn: int, confirmed_lsn: int, **changes: Any) -> SlotReport:
    """Return what ``cdcpipe slot`` says of the slot while nobody streams."""
    found: dict[str, Any] = {
        "slot": "s",
        "plugin": "pgoutput",
        "database": "db",
        "active": False,
        "active_pid": None,
        "wal_lsn": format_lsn(wal_lsn),
        "sent_lsn": None,
        "confirmed_flush_lsn": format_lsn(confirmed_lsn),
        "restart_lsn": format_lsn(confirmed_lsn),
        "wal_status": "reserved",
        "safe_wal_bytes": None,
    }
    return SlotReport(found | changes, wal_lsn, None, confirmed_lsn)


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    epoch = make_pipeline(tmp_path) / "staging/000001/epoch.json"
    epoch.write_text(json.dumps(json.loads(epoch.read_text()) | {"keeps_account": True}))
    return tmp_path


def status(pipeline: Path, server: SlotReport, **options: Any) -> dict[str, Any]:
    tables = Tables(Warehouse.existing(pipeline / "warehouse"))
    return describe(pipeline / "staging", tables, server, **options)


def behind(found: dict[str, Any]) -> dict[str, int]:
    return {rung["rung"]: rung["behind_bytes"] for rung in found["ladder"]}


def test_a_slot_that_is_beyond_the_account_was_moved(pipeline: Path) -> None:
    """Somebody has dropped it and made it again, or advanced it, while no launcher ran. All rungs were at 0."""
    account.record(pipeline / "staging", 0x1600, END)
    idle = status(pipeline, report(0x1600, 0x1600))
    assert (idle["account"], behind(idle)["sealed"], judge(idle, Limits()).state) == ("0/1600", 0, State.OK)
    moved = status(pipeline, report(0x9000, 0x9000))
    assert (behind(moved)["confirmed"], behind(moved)["sealed"]) == (0, 0x9000 - 0x1600)
    alert = judge(moved, Limits())
    words = "slot s is at 0/9000, but the log has everything only up to 0/1600"
    assert (alert.state, words in alert.line, words in render_text(moved)) == (State.CRITICAL, True, True)


def test_an_account_of_segments_that_are_not_there_says_nothing(pipeline: Path) -> None:
    """The staging directory is a copy that was made while a launcher wrote: the launcher, too, ignores such an account."""
    account.record(pipeline / "staging", 0x1600, END + 1)
    found = status(pipeline, report(0x1600, 0x1600))
    assert (found["account"], behind(found)["sealed"]) == (format_lsn(END), 0x300)
    assert judge(found, Limits()).state == State.CRITICAL
