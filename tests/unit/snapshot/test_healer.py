"""The healer without Spark and without a server: what it copies together, what it does after failures, who excludes whom."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdcpipe import running_time
from cdcpipe.errors import CdcpipeError, ExcludedColumnError
from cdcpipe.lsn import LSN
from cdcpipe.publishing import NewPublication
from spark_sink.client.prepare import Prepared
from spark_sink.files.lock import hold_alone
from spark_sink.launcher.config import LauncherConfig
from spark_sink.replica import merge
from spark_sink.schema.table import Table
from spark_sink.snapshot import healer as module
from spark_sink.snapshot import two_looks
from spark_sink.snapshot.copy import SnapshotProgress
from spark_sink.snapshot.healer import Healer
from spark_sink.snapshot.initial import InitialSnapshot
from spark_sink.snapshot.schedule import Hours, Schedule
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Epoch, Position
from spark_sink.warehouse import gaps, landed_snapshots, last_look, wanted_copies
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.initial_copy import is_unfinished
from spark_sink.warehouse.wanted_copies import WantedCopy, waiting, want_copy
from spark_sink.warehouse.warehouse import Warehouse
from support.delta_log import commit
from support.descriptions import ID, version
from support.given_sessions import given_session
from support.staged import make_epoch
from support.waiting import DEADLINE_S, until

EPOCH = Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0)
A, B, C, D = TABLES = [Table("public", name) for name in "abcd"]
COPY_LSN = 1000


class Server:
    """Stands in for PostgreSQL and Spark: what is published, and snapshots that succeed, fail or never end."""

    def __init__(self, house: Warehouse) -> None:
        self.house = house
        self.published = [str(table) for table in TABLES]
        self.failing: set[str] = set()
        self.is_excluded = False
        """Whether a column has come into the publication since the look that is to stay on the server."""
        self.is_locked = threading.Event()
        self.is_merging = False
        """Whether a copy waits for merges while its table is locked."""
        self.begun: list[list[str]] = []
        self.waits: list[float] = []
        """For how long each snapshot waits for the launcher."""
        self.lsn = 100

    def look(self, config: LauncherConfig, _is_stopping: Callable[[], bool]) -> Prepared:
        assert not config.create_slot
        names = [name.split(".") for name in self.published]
        tables = tuple(
            {
                "schema": s,
                "name": n,
                "relation_id": ord(n[0]),
                "replica_identity": "d",
                "primary_key": ["id"],
                "columns": [{"name": "id"}],
            }
            for s, n in names
        )
        return Prepared(180000, "7123", 1, "shop", LSN(self.lsn), LSN(0), tables)

    def snapshot(self, _config: Any, _house: Any, names: list[str], _chunk_bytes: int, _hold_s: float) -> Any:
        return Snapshot(self, names)


class Snapshot:
    """A snapshot whose copies take no time; while a table is locked it goes on for ever."""

    def __init__(self, server: Server, names: list[str]) -> None:
        self._server, self._names = server, names
        self.copied: dict[Table, tuple[int, Position]] = {}
        self.tables_at_once = 0
        self.follow_s = 300.0
        self.progress = SnapshotProgress(chunks=1, waits_for_tables=server.is_merging)

    def prepare(self, _is_stopping: Callable[[], bool]) -> None:
        self._server.begun.append(self._names)
        if self._server.is_excluded:
            raise ExcludedColumnError("--exclude-column does not hold")
        if self._server.failing & set(self._names):
            raise CdcpipeError("it can't be read")

    def start(self, *_: Any) -> None:
        assert self.tables_at_once == len(self._names)
        self._server.waits.append(self.follow_s)

    def wait(self, timeout_s: float) -> bool:
        if self._server.is_locked.is_set():
            threading.Event().wait(min(timeout_s, 0.01))
            return False
        for name in self._names:
            table = Table(*name.split("."))
            self._server.house.write_versions(table, [replace(version(COPY_LSN, 0, ID), snapshot=((1, "id"),))])
            self.copied[table] = 7, Position(1, COPY_LSN)
        return True

    def stop(self) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(EPOCH)
    made = Server(house)
    monkeypatch.setattr(module, "TableSnapshot", made.snapshot)
    monkeypatch.setattr(two_looks, "look", made.look)
    last_look.write(house, two_looks.seen(made.look(LauncherConfig("slot", tmp_path), lambda: False)))
    return made


def healer(
    server: Server,
    hours: Hours | None = Hours(),  # noqa: B008 - it is frozen
    tables_at_once: int = 3,
    new_publication: NewPublication = NewPublication(),  # noqa: B008 - it is frozen
    **options: Any,
) -> Healer:
    config = LauncherConfig("slot", server.house.root, create_slot=True, new_publication=new_publication)
    spark: Any = given_session(addJobTag=lambda _: None)
    return Healer(spark, config, server.house, Schedule(hours, tables_at_once), **options)


def wait_for(server: Server, *tables: Table) -> None:
    for number, table in enumerate(tables):
        want_copy(server.house, table, 100, "it was renamed", lambda at=float(number): at)


def test_all_that_wait_are_copied_so_many_at_a_time(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    wait_for(server, C, A, D, B)
    copied: list[Table] = []
    made = healer(server, on_copied=copied.extend)
    assert made.waiting is None  # it has not looked yet
    made.finish()
    assert made.waiting == 0
    assert server.begun == [["public.a", "public.c", "public.d"], ["public.b"]]
    assert copied == [A, C, D, B]
    assert waiting(server.house) == []
    assert caplog.messages[0] == "table public.a was copied (7 rows as of 0/3E8): it was renamed"
    healer(server).finish()
    assert len(server.begun) == 2


def test_a_table_that_fails_keeps_no_other_waiting(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    wait_for(server, A, B, C, D)
    server.failing = {"public.b"}
    healer(server).finish()
    assert server.begun == [["public.a", "public.b", "public.c"], ["public.a"], ["public.b"], ["public.c"], ["public.d"]]
    [left] = waiting(server.house)
    assert left.failures is not None
    assert (left.table, left.failures.count, left.failures.message) == (B, 2, "it can't be read")
    # The run ends then: nothing is tried again after a pause.
    assert [each for each in caplog.messages if each.startswith("not copied")] == [
        "not copied: public.a, public.b, public.c; each of them is tried alone now: it can't be read",
        "not copied: public.b; the next run tries again: it can't be read",
    ]
    # The next run begins with it at once.
    server.failing = set()
    healer(server).finish()
    assert waiting(server.house) == []


@pytest.mark.parametrize("hours", [None, "closed"])
def test_outside_of_the_hours_tables_wait(server: Server, hours: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_sink.snapshot.healer.time.localtime", lambda: type("Noon", (), {"tm_hour": 12, "tm_min": 30}))
    wait_for(server, A)
    healer(server, None if hours is None else Hours(13 * 60, 12 * 60)).finish()
    assert (server.begun, [each.table for each in waiting(server.house)]) == ([], [A])
    healer(server, Hours(12 * 60, 13 * 60)).finish()
    assert waiting(server.house) == []


def test_beside_another_snapshot_nothing_is_copied(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    wait_for(server, A, B)
    with hold_alone(server.house.root / "_cdcpipe/snapshot.lock") as is_alone:
        assert is_alone
        healer(server).finish()
    assert ([each.failures for each in waiting(server.house)], server.begun) == ([None, None], [])
    assert caplog.messages == [
        "not copied: public.a, public.b; cdcpipe-spark snapshot copies tables now, and the next run tries again"
    ]


def test_a_table_that_a_killed_snapshot_left_is_finished(server: Server) -> None:
    """Amid a run: until then its history waits. Here the snapshot was killed before the table had a changelog."""
    server.house.write_versions(A, [version(50, 0, ID)])
    landed_snapshots.record_start(server.house, A, Position(1, 50))
    server.house.replica(A).mkdir(parents=True)
    with hold_alone(server.house.root / "_cdcpipe/snapshot.lock") as is_alone:
        assert is_alone
        healer(server).finish()
    assert landed_snapshots.unfinished(server.house) == [(A, Position(1, 50))]
    copied: list[Table] = []
    healer(server, None, on_copied=copied.extend).finish()
    assert (landed_snapshots.unfinished(server.house), server.house.tables(), copied, server.begun) == ([], [], [], [])
    assert not server.house.replica(A).exists()


@pytest.mark.parametrize("has_rows", [True, False])
def test_a_killed_copy_is_called_finished_only_if_its_rows_are_there(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, has_rows: bool
) -> None:
    """Its history goes on in both cases."""
    commit(server.house.changelog(A) / "_delta_log", 0, {"txn": {"appId": "cdcpipe", "version": 40}})
    server.house.write_versions(A, [version(40, 0, ID), replace(version(50, 0, ID), snapshot=((1, "id"),))])
    landed_snapshots.record_start(server.house, A, Position(1, 50), adds_rows=True)
    monkeypatch.setattr(merge, "_has_rows_of", lambda *_: has_rows)
    monkeypatch.setattr(merge, "remake", lambda *_: None)
    copied: list[Table] = []
    healer(server, None, on_copied=copied.extend).finish()
    assert ("is finished" in caplog.text, "nothing of it is kept" in caplog.text, copied) == (has_rows, not has_rows, [A])


def test_a_stop_waits_for_no_replica_of_a_killed_copy(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take an hour. Until it had ended, `run` did not begin its own end, and systemd killed it.

    What is finished by then is told. After a pause nothing told it, and the catalog lacked names and comments of the table.
    """
    for table in (A, B):
        commit(server.house.changelog(table) / "_delta_log", 0, {"txn": {"appId": "cdcpipe", "version": 50}})
        server.house.write_versions(table, [replace(version(50, 0, ID), snapshot=((1, "id"),))])
        landed_snapshots.record_start(server.house, table, Position(1, 50))
    begun, cancelled = threading.Event(), threading.Event()
    copied: list[Table] = []

    def remake(_spark: Any, _house: Any, table: Table, _position: Any) -> None:
        if table == A:
            return
        begun.set()
        assert cancelled.wait(DEADLINE_S)
        raise RuntimeError("[SPARK_JOB_CANCELLED]")

    monkeypatch.setattr(merge, "_has_rows_of", lambda *_: True)
    monkeypatch.setattr(merge, "remake", remake)
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    made = healer(server, on_copied=copied.extend)
    spark: Any = given_session(addJobTag=lambda _: None, cancelJobsWithTag=lambda _: cancelled.set())
    made._spark = spark
    made.start()
    assert begun.wait(DEADLINE_S)
    made.stop()
    assert (landed_snapshots.unfinished(server.house), copied) == ([(B, Position(1, 50))], [A])  # the next start makes it


def test_what_is_finished_is_told_also_if_another_copy_cannot_be_finished(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (A, B):
        commit(server.house.changelog(table) / "_delta_log", 0, {"txn": {"appId": "cdcpipe", "version": 50}})
        server.house.write_versions(table, [replace(version(50, 0, ID), snapshot=((1, "id"),))])
        landed_snapshots.record_start(server.house, table, Position(1, 50))

    def remake(_spark: Any, _house: Any, table: Table, _position: Any) -> None:
        if table == B:
            raise OSError("disk full")

    monkeypatch.setattr(merge, "_has_rows_of", lambda *_: True)
    monkeypatch.setattr(merge, "remake", remake)
    copied: list[Table] = []
    healer(server, None, on_copied=copied.extend).finish()
    assert (landed_snapshots.unfinished(server.house), copied) == ([(B, Position(1, 50))], [A])


def test_after_a_gap_the_other_snapshot_copies_all_tables(server: Server) -> None:
    wait_for(server, A)
    gaps.record(server.house, [replace(EPOCH, gap=Gap(50, "it was moved", 1.0, 2.0))])
    healer(server).finish()
    assert server.begun == []
    gaps.record_healed(server.house, 60)
    healer(server).finish()
    assert server.begun == [["public.a"]]


def test_the_catalog_brings_tables_and_takes_them_away(server: Server) -> None:
    wait_for(server, A)
    server.published = ["public.b", "public.c", "public.d", "public.new"]
    healer(server, None).finish()
    assert [(str(each.table), each.why) for each in waiting(server.house)] == [("public.new", two_looks.CAME)]
    server.published.append("public.later")
    healer(server, copies_new=False).finish()
    assert server.begun == [["public.new"]]


def test_a_new_table_that_waits_already_is_looked_at_before_its_copy(server: Server) -> None:
    """A merge asks for the copy as soon as a change of an earlier row comes. The next look had it copied once more."""
    running = healer(server)
    running.start()
    until(lambda: running.has_looked, "the first look")
    server.published.append("public.new")
    want_copy(server.house, Table("public", "new"), 100, "rows were changed or deleted that the replica did not have")
    until(lambda: server.begun == [["public.new"]], "the copy")
    running.stop()
    server.lsn = 2 * COPY_LSN
    healer(server).finish()
    assert server.begun == [["public.new"]]


def test_a_table_with_a_column_that_is_to_stay_on_the_server_ends_the_run(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came later. A start would refuse the publication; a copy would bring all values of the column."""
    monkeypatch.setattr(module, "_TICK_S", 0.001)
    running = healer(server, new_publication=NewPublication.of(exclude_columns=["public.new.*"]))
    running.start()
    until(lambda: running.has_looked, "the first look")
    running.check()
    server.published.append("public.new")
    running.count_tables(1)
    monkeypatch.setattr(module, "_SHORTEST_LOOK_INTERVAL_S", 0.0)
    until(lambda: running._refusal is not None, "the second look")
    for ending in (running.check, running.finish):
        with pytest.raises(ExcludedColumnError, match=r"an existing publication has public\.new\.id"):
            ending()
    running.stop()
    assert (server.begun, waiting(server.house)) == ([], [])


def test_such_a_column_that_the_snapshot_shows_ends_the_run(server: Server) -> None:
    """It has come since the look."""
    wait_for(server, A)
    server.is_excluded = True
    with pytest.raises(ExcludedColumnError):
        healer(server).finish()
    assert [(each.table, each.failures) for each in waiting(server.house)] == [(A, None)]


def test_what_the_initial_snapshot_lacks_is_recorded_before_it_counts_as_complete(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a kill between the two can't lose it: the next run goes on with the snapshot, and records it then."""
    server.house.write_versions(A, [replace(version(90, 0, ID), snapshot=((1, "id"),))])
    snapshot = InitialSnapshot(LauncherConfig("slot", server.house.root), server.house, "initial")
    snapshot._note(is_complete=False)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wanted_copies, "want_copy", killed)
        with pytest.raises(KeyboardInterrupt):
            snapshot._finish()
    assert is_unfinished(server.house)
    snapshot._finish()
    assert not is_unfinished(server.house)
    healer(server).finish()
    assert server.begun == [["public.b", "public.c", "public.d"]]


def test_a_pause_stops_a_copy_that_is_made_afterwards(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    server.is_locked.set()
    wait_for(server, A)
    made = healer(server)
    made.start()
    try:
        until(lambda: server.begun, "the copy's begin")
        with made.paused():
            begun = len(server.begun)
            server.is_locked.clear()
            assert [(each.table, each.failures) for each in waiting(server.house)] == [(A, None)]
        until(lambda: not waiting(server.house), "the copy's end")
        assert len(server.begun) == begun + 1
        # The stream brings a reason while nobody waits.
        want_copy(server.house, B, 200, "a column was computed")
        until(lambda: not waiting(server.house), "the next copy")
    finally:
        made.stop()


def test_amid_a_run_a_copy_that_fails_is_tried_again(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    wait_for(server, A)
    server.failing = {"public.a"}
    made = healer(server)
    made.start()
    try:
        until(lambda: caplog.messages, "the warning")
    finally:
        made.stop()
    assert caplog.messages == ["not copied: public.a; it is tried again in 30 s, and the stream goes on: it can't be read"]


def test_a_copy_that_reads_nothing_is_given_up_for_now(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STALLED_S", 0.0)
    server.is_locked.set()
    wait_for(server, A)
    healer(server).finish()
    [left] = waiting(server.house)
    assert left.failures is not None
    assert left.failures.message.startswith("nothing was read from the server for")


def test_a_copy_that_waits_for_merges_is_not_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """OPTIMIZE of a large replica takes hours. The failure named a lock on the server."""
    monkeypatch.setattr(module, "_STALLED_S", 0.0)
    server.is_locked.set()
    server.is_merging = True
    looks: list[None] = []

    def is_stopping() -> bool:
        looks.append(None)
        if len(looks) > 20:
            server.is_locked.clear()
        return False

    wait_for(server, A)
    healer(server, is_stopping=is_stopping).finish()
    assert (server.begun, waiting(server.house)) == ([["public.a"]], [])


def test_a_pause_of_the_process_does_not_end_a_copy(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock, nothing was read for hours."""
    asked: list[float] = []

    def monotonic() -> float:
        asked.append(3600.0 * len(asked))
        if len(asked) == 3:
            server.is_locked.clear()
        return asked[-1]

    monkeypatch.setattr(running_time, "monotonic", monotonic)
    server.is_locked.set()
    wait_for(server, A)
    healer(server).finish()
    assert (server.begun, waiting(server.house)) == ([["public.a"]], [])


def test_a_stop_is_no_failure(server: Server) -> None:
    server.is_locked.set()
    wait_for(server, A)
    healer(server, is_stopping=lambda: bool(server.begun)).finish()
    [left] = waiting(server.house)
    assert (server.begun, left.failures) == ([["public.a"]], None)


def test_a_server_that_cannot_be_asked_ends_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def look(*_: Any) -> Prepared:
        raise CdcpipeError("the server is away")

    monkeypatch.setattr(two_looks, "look", look)
    wait_for(server, A)
    made = healer(server)
    made.finish()
    assert (waiting(server.house), made.has_looked) == ([], False)
    # It is the last look of the run, so nobody else says what was not looked at.
    assert [each for each in caplog.messages if "the server is away" in each] == [f"{module._UNABLE}: the server is away"]


def test_looks_that_fail_for_long_are_said(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_TICK_S", 0.001)
    monkeypatch.setattr(module, "_LOOK_INTERVAL_S", 0.0)
    looks: list[bool] = []
    is_away = threading.Event()
    is_away.set()

    def look(config: LauncherConfig, is_stopping: Callable[[], bool]) -> Prepared:
        looks.append(is_away.is_set())
        if looks[-1]:
            raise CdcpipeError("it takes too long")
        return server.look(config, is_stopping)

    monkeypatch.setattr(two_looks, "look", look)
    made = healer(server)
    made.start()
    try:
        until(lambda: len(looks) > 5, "looks")
        assert caplog.messages == []  # the server may be restarting
        monkeypatch.setattr(module, "_UNABLE_S", 0.0)
        until(lambda: caplog.messages, "the warning")
        assert caplog.messages[0] == f"{module._UNABLE}: it takes too long"
        is_away.clear()
        until(lambda: made.has_looked, "a look")
    finally:
        made.stop()
    caplog.clear()
    assert (made._unable_since, caplog.messages) == (None, [])


def test_the_last_copies_wait_for_no_launcher(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has ended, so it begins with no other timeline. Each table would wait for five minutes."""
    monkeypatch.setattr(module, "_TICK_S", 0.001)
    wait_for(server, A)
    healer(server).finish()
    wait_for(server, B)
    made = healer(server)
    made.start()
    until(lambda: len(server.waits) > 1, "a copy")
    made.stop()
    assert server.waits == [0.0, 300.0]


def test_looks_at_another_server_are_said_too(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With several hosts, new connections may come to an old primary for ever. A launcher that is a moment late is not said."""
    make_epoch(server.house.root, 1, 0x100, system_id="8")
    made = healer(server)
    made._look(module._UNABLE_S)
    assert (made.has_looked, caplog.messages) == (False, [])
    monkeypatch.setattr(module, "_UNABLE_S", 0.0)
    made._look(module._UNABLE_S)
    assert [each.startswith(f"{module._UNABLE}: the launcher does not read from the server") for each in caplog.messages] == [True]
    made._look(module._UNABLE_S)
    made.finish()
    assert (made.has_looked, len(caplog.messages)) == (False, 3)


def test_what_stays_wrong_is_said_once_a_minute(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here a file is damaged. The thread looks at it each second."""
    monkeypatch.setattr(module, "_TICK_S", 0.001)
    looks: list[int] = []

    def look(_house: Warehouse) -> list[WantedCopy]:
        looks.append(1)
        raise WarehouseError("the file is damaged")

    monkeypatch.setattr(wanted_copies, "waiting", look)
    healing = healer(server)
    healing.start()
    until(lambda: len(looks) > 5, "looks")
    healing.stop()
    assert caplog.messages == ["cannot find out which tables need a copy, trying again: the file is damaged"]
