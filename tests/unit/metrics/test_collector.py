"""What a scrape gets while the launcher does not get its slot."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdcpipe.errors import CdcpipeError, InitError, LostSlotError
from cdcpipe.exposition import Address
from cdcpipe.measures import POSITION, Histogram, Metric
from spark_sink.client.slot_monitor import SlotMonitor, SlotReport
from spark_sink.launcher.config import LauncherConfig
from spark_sink.launcher.launcher import Launcher
from spark_sink.metrics import collector, table
from spark_sink.metrics.collector import LandMetrics, RunMetrics
from spark_sink.pipeline import runner
from spark_sink.pipeline.config import RunConfig
from spark_sink.schema.table import Table
from spark_sink.spark import java_home
from spark_sink.staging import last_error
from spark_sink.staging.log import Position, Segment, list_segments
from spark_sink.warehouse.formats import DeltaFormat
from support.small_pipeline import make_pipeline
from support.waiting import until

REPORT = {
    "wal_lsn": "0/500",
    "sent_lsn": "0/400",
    "confirmed_flush_lsn": "0/400",
    "restart_lsn": "0/300",
    "active": True,
    "wal_status": "reserved",
    "safe_wal_bytes": None,
}
BUSY_SLOT = (
    "sh",
    "-c",
    f"case $1 in slot) echo '{json.dumps(REPORT)}'; exec sleep 600;; esac; echo 'cdcpipe: error: the slot is in use' >&2; exit 9",
    "cdcpipe",
)
"""A program that answers as ``cdcpipe`` does where another program uses the slot."""


def read(collected: LandMetrics) -> dict[tuple[Metric, tuple[str, ...]], object]:
    return {(metric, tuple(labels)): value for metric, labels, value in collected.collect()}


def test_a_busy_slot_is_not_taken_for_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(java_home, "find_java", lambda: None)
    monkeypatch.setattr(runner, "_WATCH_AFTER_S", 0.0)
    config = LauncherConfig("s", tmp_path / "staging", ("p",), command=BUSY_SLOT)
    with runner.Runner(RunConfig(config, tmp_path / "warehouse")) as made:
        collected = RunMetrics(made)
        until(lambda: read(collected).get((table.SERVER_UP, ())), "a report of the server")
        until(lambda: read(collected)[table.RESTARTS, ()] == 2, "another attempt")
        found = read(collected)
        assert (found[table.SERVER_UP, ()], found[table.SLOT_ACTIVE, ()]) == (True, True)
        assert (table.LAST_ERROR, ("streamer", "9", "other")) in found
        assert not {metric for metric, _ in found} & {table.STAGING, table.LAG_BYTES}
        made.request_stop()


def test_what_was_not_asked_yet_is_not_told(tmp_path: Path) -> None:
    config = LauncherConfig("s", tmp_path, ("p",))
    found = read(LandMetrics(Launcher(config), SlotMonitor(config.connection, config.slot)))
    assert table.SERVER_UP not in {metric for metric, _ in found}


def test_how_many_tables_wait_is_not_told_before_the_healer_has_looked(tmp_path: Path) -> None:
    """It looks after the copies of a gap, which may take hours. The metric was 0 meanwhile, while `status` named the tables."""
    made: Any = runner.Runner(RunConfig(LauncherConfig("s", tmp_path / "staging", ("p",)), tmp_path / "warehouse"))
    progress = SimpleNamespace(position=None, messages=0)
    made.pipeline = SimpleNamespace(progress=progress, batches=Histogram(), merges=Histogram(), changes={})
    for waiting in (None, 2):
        made._healer = SimpleNamespace(waiting=waiting)
        told = [value for (metric, _), value in read(RunMetrics(made)).items() if metric is table.WAITING]
        assert told == ([] if waiting is None else [waiting])


def test_an_address_at_which_nothing_can_listen_is_the_last_error(tmp_path: Path) -> None:
    """`status` knew no reason why a service did not start."""
    config = LauncherConfig("s", tmp_path, ("p",))
    collected = LandMetrics(Launcher(config), SlotMonitor(config.connection, config.slot))
    elsewhere = Address("203.0.113.1", 9187)  # for documentation: no machine has it
    with pytest.raises(CdcpipeError, match=str(elsewhere)) as raised, collected.served(elsewhere):
        pass
    noted = last_error.read(tmp_path)
    assert noted is not None
    assert (noted["command"], noted["message"], noted["exit_code"]) == ("land", raised.value.message, 7)


def test_a_lost_slot_is_told_apart_from_other_errors_with_its_exit_code(tmp_path: Path) -> None:
    """The process ends some seconds after the loss: only what it leaves tells of it at a later scrape."""
    config = LauncherConfig("s", tmp_path, ("p",))
    collected = LandMetrics(Launcher(config), SlotMonitor(config.connection, config.slot))
    for error, kind in ((LostSlotError("lost"), "lost_slot"), (InitError("no password"), "other")):
        last_error.note(tmp_path, "land", error)
        assert (table.LAST_ERROR, ("command", "2", kind)) in read(collected)
    (tmp_path / "last_error.json").write_text(
        '{"time": "2026-03-01T12:00:00Z", "command": "run", "message": "", "hint": null, "exit_code": 2}'
    )
    assert (table.LAST_ERROR, ("command", "2", "other")) in read(collected)


def test_a_log_that_is_ahead_of_its_server_has_no_lag(tmp_path: Path) -> None:
    """The server has gone back, and the stream waits. All stages seemed to have everything, while applications wrote on."""
    config = LauncherConfig("s", tmp_path, ("p",))
    launcher, monitor = Launcher(config), SlotMonitor(config.connection, config.slot)
    monitor._take(SlotReport.parse(json.dumps(REPORT).encode()))
    for is_ahead, stages in ((False, {"server", "sent", "confirmed", "sealed"}), (True, {"server", "sent", "confirmed"})):
        launcher._note(position=Position(2, 0x600), is_ahead=is_ahead)
        found = read(LandMetrics(launcher, monitor))
        assert {labels[0] for metric, labels in found if metric is table.LAG_BYTES} == stages
        assert {labels[0] for metric, labels in found if metric is table.LAG_SECONDS} == stages
        assert (POSITION, ("sealed",)) in found


def test_segments_are_not_counted_at_each_scrape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With --keep-segments, a log may have hundreds of thousands of them, and a scrape may come every few seconds."""
    staging, now, counts = tmp_path / "staging", [0.0], []

    def count(root: Path) -> list[Segment]:
        counts.append(now[0])
        now[0] += 2.0
        return list_segments(root)

    make_pipeline(tmp_path)
    monkeypatch.setattr(collector, "list_segments", count)
    monkeypatch.setattr(collector, "time", SimpleNamespace(monotonic=lambda: now[0]))
    known = collector._Staging(staging)
    found = []
    for at in (10.0, 20.0, 111.0, 112.0):
        now[0] = at
        found.append([value for _, _, value in known.collect()])
        if at == 10.0:
            list_segments(staging)[-1].path.unlink()
    assert counts == [10.0, 112.0]
    assert [segments for _, segments in found] == [3, 3, 3, 2]
    assert found[0][0] == found[2][0] > found[3][0] > 0


@pytest.mark.parametrize(("history_lsn", "expected"), [(None, None), (40, 40), (150, 100)])
def test_stored_histories_are_a_stage(history_lsn: int | None, expected: int | None) -> None:
    """As in `status`. An alert tells of a history that can't go on."""
    running: Any = SimpleNamespace(warehouse=SimpleNamespace(format=DeltaFormat()), history_lsn=history_lsn)
    found = dict(collector._tables(running, Position(2, 100), {Table("public", "t"): 60}))
    stages = {"changelog": Position(2, 100), "replica": Position(2, 60)}
    assert found == stages | ({} if expected is None else {"history": Position(2, expected)})
