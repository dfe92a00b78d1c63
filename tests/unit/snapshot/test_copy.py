"""The end of a copy, without Spark and without a server."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdcpipe.lsn import LSN
from spark_sink.client.exported import SnapshotError
from spark_sink.client.prepare import Prepared
from spark_sink.launcher.config import LauncherConfig
from spark_sink.schema.table import Table
from spark_sink.snapshot import copy as module
from spark_sink.snapshot.copy import Snapshot, finish_killed
from spark_sink.snapshot.homes import Homes
from spark_sink.snapshot.plan import Chunk, Plan, StaleSnapshotError, TablePlan
from spark_sink.snapshot.table import Copying
from spark_sink.spark import jobs
from spark_sink.staging import copied
from spark_sink.staging.log import Epoch, OtherSourceError, Position
from spark_sink.warehouse import landed_snapshots
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.warehouse import Warehouse
from support.given_sessions import given_session
from support.segments import relation
from support.waiting import DEADLINE_S, until


class Copy(Snapshot):
    """Its only job begins just after the jobs were cancelled, and runs until they are cancelled again."""

    def __init__(self, directory: Path) -> None:
        super().__init__(LauncherConfig("s", directory / "staging"), Warehouse(directory / "warehouse", "delta"), "copy", 1, 0.0)
        self.cancelled, self.cancelled_later = threading.Event(), threading.Event()

    def cancel(self, _tag: str) -> None:
        (self.cancelled_later if self.cancelled.is_set() else self.cancelled).set()

    def _copy(self) -> None:
        self.cancelled.wait(DEADLINE_S)
        assert self.cancelled_later.wait(DEADLINE_S)


def test_a_stop_cancels_also_a_job_that_is_about_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_CANCEL_INTERVAL_S", 0.01)
    snapshot = Copy(tmp_path)
    monkeypatch.setattr(snapshot, "_spark", given_session(cancelJobsWithTag=snapshot.cancel))
    snapshot._thread.start()
    snapshot.stop()
    assert snapshot.wait(0)


def test_a_stop_cancels_no_copies_of_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both may run in one Spark application. The other run ended with the error that its job was cancelled."""
    monkeypatch.setattr(jobs, "_CANCEL_INTERVAL_S", 0.01)
    tags: set[str] = set()
    for name in ("a", "b"):
        snapshot = Copy(tmp_path / name)

        def cancel(tag: str, snapshot: Copy = snapshot) -> None:
            tags.add(tag)
            snapshot.cancel(tag)

        monkeypatch.setattr(snapshot, "_spark", given_session(cancelJobsWithTag=cancel))
        snapshot._thread.start()
        snapshot.stop()
    assert len(tags) == 2


FIRST = Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0)
SECOND = replace(FIRST, number=2, timeline=2, start_lsn=0x100, timeline_began_lsn=0x180)
PROMOTED = {"timeline": 2, "timeline_history": ((1, 0x180),)}


class Round:
    """A round of a copy with nothing to copy. The snapshot is of the position 0/200 of a server."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **server: Any) -> None:
        self.staging = directory / "staging"
        self.looks: list[list[Epoch]] = []
        """The epochs of the log at each look; the last ones stay."""
        house = Warehouse(directory / "warehouse", "delta")
        house.open(FIRST)
        made: Any = Snapshot(LauncherConfig("slot", self.staging), house, "snapshot", 1, 0.0)
        self.prepared = replace(Prepared(180000, "7123", 1, "shop", LSN(0x200), LSN(0), ()), **server)
        made._export = SimpleNamespace(connection={}, prepared=self.prepared, name="x", consistent_point=0x200, time_us=7)
        made._spark, made._epochs = SimpleNamespace(), [FIRST]
        made._counts = SimpleNamespace(value=0), SimpleNamespace(value=0)
        made._tables_lock = TableLock(house.root)
        made._plan = lambda *_: SimpleNamespace(is_utf8=True)
        made._choose = lambda *_: []
        self.snapshot = made
        self.recorded: list[tuple[int, list[Epoch]]] = []
        monkeypatch.setattr(module, "list_epochs", lambda _: self.looks.pop(0) if self.looks[1:] else self.looks[0])
        monkeypatch.setattr(copied, "record", lambda _, lsn: self.recorded.append((lsn, self.looks[0])))
        monkeypatch.setattr(module, "_FOLLOW_POLL_S", 0.0)

    def copy(self, *looks: list[Epoch]) -> dict[str, int]:
        """Return the position of the copy."""
        self.looks = list(looks)
        assert self.snapshot._copy_round() == []
        position: dict[str, int] = json.loads((self.snapshot._scratch / "position.json").read_text())
        return position


@pytest.mark.parametrize("server", [PROMOTED, {**PROMOTED, "timeline_history": ()}], ids=["", "without a history"])
def test_a_later_snapshot_has_the_epoch_that_the_launcher_has_begun_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: dict[str, Any]
) -> None:
    """As after a failover. In the epoch before, its rows would come before changes that they have already."""
    assert Round(tmp_path, monkeypatch, **server).copy([FIRST, SECOND]) == {"epoch": 2, "lsn": 0x200}


def test_a_copy_waits_for_the_launcher_on_a_new_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its position, recorded before, would be one of the old timeline for the launcher: a gap where nothing is missing."""
    made = Round(tmp_path, monkeypatch, **PROMOTED)
    assert made.copy([FIRST], [FIRST], [FIRST, SECOND]) == {"epoch": 2, "lsn": 0x200}
    assert made.recorded == [(0x200, [FIRST, SECOND])]
    said = "waiting until run or land has begun to read from timeline 2 of the server with system id 7123"
    assert caplog.messages == [said]


@pytest.mark.parametrize(
    ("server", "last"),
    [
        (PROMOTED, FIRST),
        ({"timeline": 2, "timeline_history": ((1, 0x170),)}, SECOND),  # another standby, which also called its timeline 2
    ],
)
def test_the_wait_for_the_launcher_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: dict[str, Any], last: Epoch
) -> None:
    made = Round(tmp_path, monkeypatch, **server)
    made.snapshot.follow_s = 0.01
    with pytest.raises(SnapshotError, match=r"^not copied, because .* has nothing from timeline 2 of the server"):
        made.copy([last])
    made.snapshot._stopping = True
    with pytest.raises(SnapshotError, match="stopped before its end"):
        made.copy([last])
    assert made.recorded == []


@pytest.mark.parametrize("server", [{}, {"system_id": "7999", "timeline": 9}])
def test_a_copy_from_an_old_primary_or_another_server_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: dict[str, Any]
) -> None:
    """The launcher streams from the one that was promoted, and a new connection finds the old one."""
    made = Round(tmp_path, monkeypatch, **server)
    with pytest.raises(OtherSourceError, match="system id 7999$" if server else "this server is an old primary"):
        made.copy([FIRST, SECOND])
    assert made.recorded == []


def test_an_accepted_server_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Round(tmp_path, monkeypatch, system_id="7999")
    made.snapshot.config = replace(made.snapshot.config, accept_system_id="7999")
    assert made.copy([FIRST], [FIRST, replace(FIRST, number=2, system_id="7999")])["epoch"] == 2


@pytest.mark.parametrize("later", [PROMOTED, {}], ids=["the server was promoted since", "an old primary"])
def test_a_snapshot_from_before_a_promotion_is_taken_again_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: dict[str, Any]
) -> None:
    """A standby keeps its snapshots when it is promoted."""
    made, taken = Round(tmp_path, monkeypatch), []
    made.looks = [[FIRST, SECOND]]
    made.snapshot._export.is_lost = lambda _: False

    def take_another() -> None:
        taken.append(later)
        made.snapshot._export.prepared = replace(made.prepared, **later)

    made.snapshot._take_another = take_another
    if later:
        made.snapshot._copy()
    else:
        with pytest.raises(OtherSourceError, match="this server is an old primary"):
            made.snapshot._copy()
    assert taken == [later]
    assert [lsn for lsn, _ in made.recorded] == ([0x200] if later else [])


def test_a_copy_has_the_time_of_its_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy may be planned hours after the snapshot, when a later run goes on with it: changes after it have earlier times."""
    made, times = Round(tmp_path, monkeypatch), []
    made.snapshot._choose = lambda *_: [TablePlan(relation(1, "a", ("id", 23)), (1,), (), None, (), 0)]
    made.snapshot._jobs = SimpleNamespace(include_mine=lambda _: None)
    monkeypatch.setattr(module, "copy_table", lambda copying, *_: times.append(copying.time_us) or 0)
    made.copy([FIRST])
    assert times == [made.snapshot._export.time_us]


def test_the_totals_are_what_was_read_and_what_is_left_in_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first snapshot is lost before the tables are known, and table b is rewritten while the second one is copied."""
    made, seen = Round(tmp_path, monkeypatch), []
    made.looks = [[FIRST, SECOND]]
    snapshot, sizes = made.snapshot, {"a": 3, "b": 5}
    snapshot.tables_at_once = 1
    snapshot._jobs = SimpleNamespace(include_mine=lambda _: None)
    snapshot._export.is_lost = lambda _: False

    def take_another() -> None:
        snapshot._export.prepared = replace(made.prepared, **PROMOTED)

    def choose(_plan: Plan, homes: Homes) -> list[TablePlan]:
        tables = [
            TablePlan(relation(number, name, ("id", 23)), (1,), (), None, (Chunk(number, name, 1, 0, None, 0),) * size, 10 * size)
            for number, (name, size) in enumerate(sizes.items())
        ]
        return [each for each in tables if homes.of(each.relation) not in snapshot.copied]

    def copy_table(_copying: Copying, plan: TablePlan, table: Table) -> int:
        read = 2 if sizes["b"] == 5 and table.name == "b" else len(plan.chunks)
        for count, each in zip(snapshot._counts, (10 * read, read), strict=True):
            count.value += each
        seen.append(snapshot.progress)
        if read < len(plan.chunks):
            sizes["b"] = 4
            raise StaleSnapshotError("b was rewritten")
        return 10 * read

    snapshot._take_another, snapshot._choose = take_another, choose
    monkeypatch.setattr(module, "copy_table", copy_table)
    snapshot._copy()
    assert [(each.tables, each.chunks, each.chunks_done, each.row_estimate, each.rows) for each in seen] == [
        (2, 8, 2, 80, 20),
        (2, 8, 5, 80, 50),
        (2, 9, 9, 90, 90),
    ]
    assert snapshot.progress.tables_done == 2


def test_a_copy_tells_that_it_waits_for_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Round(tmp_path, monkeypatch)
    snapshot = made.snapshot
    snapshot._choose = lambda *_: [TablePlan(relation(1, "a", ("id", 23)), (1,), (), None, (), 0)]
    snapshot._jobs = SimpleNamespace(include_mine=lambda _: None)

    def copy_table(copying: Copying, *_: object) -> int:
        with copying.lock.alone():
            assert not snapshot.progress.waits_for_tables
        return 0

    monkeypatch.setattr(module, "copy_table", copy_table)
    thread = threading.Thread(target=made.copy, args=([FIRST],))
    with TableLock(tmp_path / "warehouse").merge():
        thread.start()
        until(lambda: snapshot.progress.waits_for_tables, "the copy's wait")
    thread.join(DEADLINE_S)
    assert (len(snapshot.copied), snapshot.progress.waits_for_tables) == (1, False)


def test_a_copy_waits_for_merges_only_if_a_killed_one_has_to_be_finished(tmp_path: Path) -> None:
    """Each copy waited before its first row, while the server held its snapshot."""
    house, lock = Warehouse(tmp_path, "delta"), TableLock(tmp_path, lambda: True)
    house.open(FIRST)
    spark: Any = None
    with TableLock(tmp_path).merge():
        finish_killed(spark, house, lock)
        landed_snapshots.record_start(house, Table("public", "a"), Position(1, 50))
        with pytest.raises(InterruptedError):
            finish_killed(spark, house, lock)
