"""`describe`: what status says of the server and the log together."""

import json
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.lsn import format_lsn
from spark_sink.client.slot_monitor import SlotReport
from spark_sink.staging import account
from spark_sink.staging.lock import StagingLock
from spark_sink.status.check import Limits, State, judge
from spark_sink.status.report import Tables, describe
from spark_sink.status.text import render_text
from spark_sink.warehouse import purged_changes
from spark_sink.warehouse.warehouse import Warehouse
from support.delta_log import commit
from support.segments import START_LSN
from support.small_pipeline import make_pipeline

END = 0x1300
"""Where the log of `make_pipeline` ends."""


def report(wal_lsn: int, confirmed_lsn: int, **changes: Any) -> SlotReport:
    """Return what ``cdcpipe slot`` says of the slot while nobody streams."""
    found: dict[str, Any] = {
        "system_id": "7123456789",
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
    return make_pipeline(tmp_path)


def status(pipeline: Path, server: SlotReport | None = None, **options: Any) -> dict[str, Any]:
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


def test_the_launcher_has_the_documented_fields(pipeline: Path) -> None:
    with closing(StagingLock(pipeline / "staging")):
        launcher = status(pipeline)["launcher"]
        assert list(launcher) == ["pid", "host", "since"]
    ended = status(pipeline)
    assert (ended["launcher"], ended["last_start"]) == (None, launcher["since"])


def test_for_how_long_open_segments_have_waited(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several are open if they wait for the disk. The one with the oldest changes tells."""
    epoch = status(pipeline)["epochs"][-1]
    assert (epoch["open_size"], epoch["open_seconds"]) == (0, None)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    for name, age_s in (("1300.open", 580), ("1400.open", 7)):
        path = pipeline / "staging/000001" / name
        path.write_bytes(b"data")
        os.utime(path, (now - age_s, now - age_s))
    epoch = status(pipeline)["epochs"][-1]
    assert (epoch["open_size"], round(epoch["open_seconds"])) == (8, 580)


def test_an_account_of_segments_that_are_not_there_says_nothing(pipeline: Path) -> None:
    """The staging directory is a copy that was made while a launcher wrote: the launcher, too, ignores such an account."""
    account.record(pipeline / "staging", 0x1600, END + 1)
    found = status(pipeline, report(0x1600, 0x1600))
    assert (found["account"], behind(found)["sealed"]) == (format_lsn(END), 0x300)
    assert judge(found, Limits()).state == State.CRITICAL


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"system_id": "8"}, "this one has system id 8, but the log comes from 7123456789"),
        ({"database": "other"}, "slot 's' is of database 'other', but the log comes from database 'db'"),
        ({"database": None}, "slot 's' is a physical one"),
    ],
)
def test_a_server_that_the_log_does_not_come_from_tells_nothing(pipeline: Path, changes: dict[str, Any], words: str) -> None:
    """It has a slot of this name, too. Its positions say nothing of this log, and may well look complete."""
    found = status(pipeline, report(END, END, **changes))
    assert (found["server"], found["ladder"][0]["rung"]) == (None, "sealed")
    alert = judge(found, Limits())
    assert (alert.state, f"the server can't be asked: {words}" in alert.line) == (State.UNKNOWN, True)
    assert f"server     {words}" in render_text(found)


def test_a_server_without_the_end_of_the_log_tells_nothing(pipeline: Path) -> None:
    """It is a copy of the server: the system id is the same. All stages were complete until its WAL passed the log's end."""
    copy = report(END - 1, START_LSN)
    assert behind(status(pipeline, copy))["sealed"] == 0  # the log has grown since the server was asked
    found = status(pipeline, copy, least_lsn=END)
    assert judge(found, Limits()).state == State.UNKNOWN
    assert "the WAL of this one ends at 0/12FF, before the log's end at 0/1300" in found["server_error"]


def test_a_system_id_that_is_not_known_is_no_reason(pipeline: Path) -> None:
    """A superuser may have revoked the function that tells the system id."""
    found = status(pipeline, report(END, END, system_id=None), least_lsn=END)
    assert (found["server_error"], judge(found, Limits()).state) == (None, State.OK)


@pytest.mark.parametrize(("name", "value"), [("system_id", "8"), ("database", "other"), ("slot", "s2")])
def test_a_warehouse_of_another_log_is_refused(pipeline: Path, name: str, value: str) -> None:
    epoch = pipeline / "staging/000001/epoch.json"
    epoch.write_text(json.dumps(json.loads(epoch.read_text()) | {name: value}))
    with pytest.raises(InvalidArgumentsError, match=f"warehouse has the changes of {name} '.*', but .*staging has '{value}'"):
        status(pipeline)


def test_a_warehouse_from_before_pg_upgrade_is_that_of_the_log(pipeline: Path) -> None:
    """The launcher has begun its epoch, and `run` has not opened the warehouse yet."""
    epoch = json.loads((pipeline / "staging/000001/epoch.json").read_text())
    (pipeline / "staging/000002").mkdir()
    epoch |= {"system_id": "8", "former_system_id": epoch["system_id"], "start_lsn": format_lsn(END)}
    (pipeline / "staging/000002/epoch.json").write_text(json.dumps(epoch))
    assert status(pipeline, report(END, END, system_id="8"))["server_error"] is None


@pytest.mark.parametrize(
    ("new", "lsn"),
    [
        ({"minValues": {"_cdc_end_lsn": END - 100}, "maxValues": {"_cdc_end_lsn": END}}, END - 101),
        ({"minValues": {"_cdc_end_lsn": START_LSN}, "maxValues": {"_cdc_end_lsn": END}}, START_LSN),  # after a compaction
        ({}, START_LSN),
    ],
)
def test_a_replica_of_a_quiet_table_lacks_only_what_has_come_since(pipeline: Path, new: dict[str, Any], lsn: int) -> None:
    """Other tables have had the changes since its last one. The files of its changelog may tell where the new ones begin."""
    house = Warehouse.existing(pipeline / "warehouse")
    (table,) = house.tables()
    old = {"minValues": {"_cdc_end_lsn": 1}, "maxValues": {"_cdc_end_lsn": START_LSN}}
    commit(house.replica(table) / "_delta_log", 1, {"txn": {"appId": "cdcpipe", "version": int(START_LSN)}})
    files = [{"add": {"path": name, "size": 1, "stats": json.dumps(found)}} for name, found in (("a", old), ("b", new))]
    commit(house.changelog(table) / "_delta_log", 1, *files)
    rungs = {rung["rung"]: rung["position"] for rung in status(pipeline)["ladder"]}
    assert rungs["replica"] == f"1:{format_lsn(lsn)}"
    purged_changes.record(house, table, START_LSN + 1)  # of a replica that was put back from before the purge
    rungs = {rung["rung"]: rung["position"] for rung in status(pipeline)["ladder"]}
    assert rungs["replica"] == f"1:{format_lsn(START_LSN)}"
