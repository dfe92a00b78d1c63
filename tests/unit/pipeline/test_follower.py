"""Rounds of merges, without Spark: when they run, how far they bring each replica, how they end."""

import json
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from cdcpipe.measures import Histogram
from spark_sink.delta import file_table
from spark_sink.delta import sql as delta
from spark_sink.delta.log import TableEnd, commit_path
from spark_sink.pipeline import follower, rounds
from spark_sink.pipeline.follower import Follower
from spark_sink.pipeline.rounds import own_interval_s
from spark_sink.replica import merge
from spark_sink.schema.table import Table
from spark_sink.spark import session
from spark_sink.staging.log import Position
from spark_sink.warehouse import landed_snapshots
from spark_sink.warehouse.comments import Comments
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.purged_changes import PurgedError
from spark_sink.warehouse.wanted_copies import waiting
from spark_sink.warehouse.warehouse import Warehouse
from support.descriptions import ID, NONE, version

A, B = Table("public", "a"), Table("public", "b")


class Merges:
    """Stands for the merges, and records what the follower asks for."""

    def __init__(self) -> None:
        self.done: list[tuple[Table, Position]] = []
        self.named: list[Table] = []
        self.errors: list[BaseException] = []
        self.error: BaseException | None = None
        self.came = threading.Semaphore(0)
        self.running: set[Table] = set()
        self.lock: TableLock | None = None

    def register(self, tables: list[Table]) -> None:
        self.named += tables

    def apply(self, _spark: Any, _warehouse: Warehouse, table: Table, position: Position) -> set[str]:
        assert table not in self.running
        assert self.lock is not None
        assert self.lock._merging.locked()
        if self.error is not None:
            raise self.error
        self.running.add(table)
        self.done.append((table, position))
        self.running.remove(table)
        self.came.release()
        return set()


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> Merges:
    made = Merges()
    monkeypatch.setattr(merge, "merge_changes", made.apply)
    monkeypatch.setattr(session, "copy", lambda spark: spark)
    return made


def make(merges: Merges, tmp_path: Path, interval_s: float | None, tables: Iterable[Table] = (A, B)) -> Follower:
    """Return a follower. The tables have a key."""
    spark: Any = None
    names: Any = merges
    merges.lock, house = TableLock(tmp_path), Warehouse(tmp_path, "delta")
    for table in tables:
        if not house.versions(table):
            house.write_versions(table, [version(1, 0, ID)])
    return Follower(spark, house, merges.lock, names, interval_s, merges.errors.append, Histogram())


def test_a_round_brings_each_table_once_to_where_it_was_noted_last(merges: Merges, tmp_path: Path) -> None:
    made = make(merges, tmp_path, 0)
    for table, lsn in ((A, 1), (B, 2), (A, 3)):
        made.record(table, Position(1, lsn))
    made.catch_up()
    assert sorted(merges.done) == [(A, Position(1, 3)), (B, Position(1, 2))]
    assert sorted(merges.named) == [A, B]
    made.catch_up()
    assert len(merges.done) == 2


@pytest.mark.parametrize("interval_s", [0, 0.01])
def test_rounds_have_a_thread_of_their_own(merges: Merges, tmp_path: Path, interval_s: float) -> None:
    made = make(merges, tmp_path, interval_s)
    made.record(A, Position(1, 1))
    made.rounds.start()
    merges.came.acquire()  # what is behind at the start is not waited for
    made.record(B, Position(1, 2))
    if interval_s:
        merges.came.acquire()
    assert not made.rounds.wait(0)
    made.rounds.end()
    assert made.rounds.wait()
    assert merges.done == [(A, Position(1, 1)), (B, Position(1, 2))]
    assert not merges.errors


def test_rounds_without_an_interval_take_a_quarter_of_the_time_or_come_every_ten_seconds() -> None:
    assert [own_interval_s(took_s) for took_s in (0.0, 0.25, 0.5, 2.0, 3.0, 60.0)] == [1.0, 1.0, 2.0, 8.0, 10.0, 10.0]


def test_without_an_interval_a_wanted_round_comes_at_once_and_the_next_one_after_the_interval(
    merges: Merges, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "own_interval_s", lambda _took_s: 86400.0)
    made = make(merges, tmp_path, None)
    made.record(A, Position(1, 1))
    made.rounds.start()
    merges.came.acquire()
    made.record(B, Position(1, 2))
    made.rounds.want()
    merges.came.acquire()
    made.record(A, Position(1, 3))
    made.rounds.want()  # for tomorrow
    assert made.rounds._due(1.0, 9.0) == 1.0
    made.rounds.end(is_last_round_wanted=False)
    assert made.rounds.wait()
    assert merges.done == [(A, Position(1, 1)), (B, Position(1, 2))]


def test_with_an_interval_a_wanted_round_waits_for_it(merges: Merges, tmp_path: Path) -> None:
    made = make(merges, tmp_path, 86400)
    made.record(A, Position(1, 1))
    made.rounds.start()
    merges.came.acquire()
    made.record(B, Position(1, 2))
    made.rounds.want()
    assert made.rounds._due(1.0, 9.0) == 9.0
    made.rounds.end(is_last_round_wanted=False)
    assert made.rounds.wait()
    assert merges.done == [(A, Position(1, 1))]


def test_long_logs_get_a_checkpoint(merges: Merges, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[Path] = []
    monkeypatch.setattr(delta, "checkpoint", lambda _spark, path: paths.append(path))
    made = make(merges, tmp_path, 0)
    for name, commits, checkpoint in (("a", 200, None), ("b", 199, None), ("c", 250, 50), ("d", 250, 49)):
        log = tmp_path / name / "_delta_log"
        log.mkdir(parents=True)
        for number in range(commits):
            (log / f"{number:020d}.json").touch()
        if checkpoint is not None:
            (log / f"{checkpoint:020d}.checkpoint.parquet").touch()
        made.record_commit(tmp_path / name)
        made.record_commit(tmp_path / name)
    made.catch_up()
    made.catch_up()
    assert sorted(paths) == [tmp_path / "a", tmp_path / "d"]


def test_an_end_without_a_last_round(merges: Merges, tmp_path: Path) -> None:
    made = make(merges, tmp_path, 86400)
    made.record(A, Position(1, 1))
    made.rounds.start()
    merges.came.acquire()
    assert merges.lock is not None
    with merges.lock.merge():  # the first round is over
        made.record(B, Position(1, 2))
    made.rounds.end(is_last_round_wanted=False)
    assert made.rounds.wait()
    assert merges.done == [(A, Position(1, 1))]


def test_a_stop_while_another_process_has_the_tables_ends_the_rounds_without_an_error(merges: Merges, tmp_path: Path) -> None:
    merges.error = InterruptedError()
    made = make(merges, tmp_path, 0.01)
    made.record(A, Position(1, 1))
    made.rounds.start()
    assert made.rounds.wait()
    assert not merges.errors


def test_an_error_ends_the_rounds_and_is_passed_on(merges: Merges, tmp_path: Path) -> None:
    merges.error = ValueError("no")
    made = make(merges, tmp_path, 0.01)
    made.record(A, Position(1, 1))
    made.rounds.start()
    assert made.rounds.wait()
    assert merges.errors == [merges.error]


def test_replicas_that_are_behind_are_found_in_the_tables(merges: Merges, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    even, behind, gone = A, B, Table("public", "c")
    made = make(merges, tmp_path, 0, [gone])
    house = Warehouse(tmp_path, "delta")
    reached = {house.changelog(even): 5, house.replica(even): 5, house.changelog(behind): 5, house.replica(behind): 4}
    reached |= {house.changelog(gone): 3}
    monkeypatch.setattr(Warehouse, "tables", lambda _self: [even, behind, gone, Table("public", "d")])
    made.look(7, {path: TableEnd(lsn, is_restored=False) for path, lsn in reached.items()})
    made.catch_up()
    assert sorted(merges.done) == [(behind, Position(7, 5)), (gone, Position(7, 3))]


def test_a_replica_that_is_before_the_copy_of_its_table_is_behind(
    merges: Merges, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has put it back from a backup. In a quiet database the copy is later than each change."""
    monkeypatch.setattr(merge, "remake", merges.apply)
    made = make(merges, tmp_path, 0)
    house = Warehouse(tmp_path, "delta")
    ends: dict[Path, TableEnd | None] = {}
    for table, lsn in ((A, 30), (B, 20)):
        house.write_versions(table, [version(0, 0, ID), replace(version(30, 0, ID), snapshot=((1, "id"),))])
        file_table.commit(
            file_table.define(house.replica(table), StructType([StructField("id", LongType())]), {}), [], Position(1, lsn)
        )
        ends |= {house.changelog(table): TableEnd(20, is_restored=False), house.replica(table): TableEnd(lsn, is_restored=False)}
    unfinished, reads = landed_snapshots.unfinished, list[Warehouse]()
    monkeypatch.setattr(landed_snapshots, "unfinished", lambda asked: reads.append(asked) or unfinished(asked))
    made.look(1, ends)
    assert len(reads) == 1  # a start with thousands of tables in a store took minutes
    made.catch_up()
    assert merges.done == [(B, Position(1, 30))]


def test_a_replica_whose_copy_was_purged_waits_for_another_copy(
    merges: Merges, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = Warehouse(tmp_path, "delta")
    house.write_versions(A, [version(0, 0, ID), replace(version(30, 0, ID), snapshot=((1, "id"),))])
    merges.error = PurgedError("no")
    made = make(merges, tmp_path, 0)
    file_table.commit(file_table.define(house.replica(A), StructType([StructField("id", LongType())]), {}), [], Position(1, 30))
    made.record(A, Position(1, 30))
    made.catch_up()
    assert "stays as it is until the table is copied" in caplog.text
    assert [(each.table, each.reasons[0].since_lsn) for each in waiting(house)] == [(A, 31)]


def test_a_table_that_another_process_has_copied_is_not_behind(merges: Merges, tmp_path: Path) -> None:
    """The run is not told of such a copy. The lag of a quiet table used to grow until its next change."""
    house = Warehouse(tmp_path, "delta")
    file_table.commit(file_table.define(house.replica(A), StructType([StructField("id", LongType())]), {}), [], Position(1, 20))
    made = make(merges, tmp_path, 0)
    merges.error = PurgedError("no")
    house.write_versions(A, [version(1, 0, ID)])
    for _ in range(2):
        made.record(A, Position(1, 30))
        made.catch_up()
        assert made.replicas() == {A: 0}
    house.write_versions(A, [version(1, 0, ID), replace(version(40, 0, ID), snapshot=((1, "id"),))])
    made.catch_up()
    assert made.replicas() == {A: None}
    assert not merges.done


def test_such_a_copy_is_found_while_no_micro_batches_come(merges: Merges, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an interval micro-batches run the rounds. So a quiet stream used to have none."""
    monkeypatch.setattr(follower, "_QUIET_S", 0.01)
    made, found = make(merges, tmp_path, 0), threading.Semaphore(0)
    monkeypatch.setattr(made, "_find_copied", found.release)
    made.rounds.start()
    for _ in range(3):
        assert found.acquire(timeout=60)
    made.rounds.end()
    assert made.rounds.wait()


def test_a_replica_waits_until_a_copy_of_its_table_is_finished(merges: Merges, tmp_path: Path) -> None:
    """A stop that ended such a copy used to merge all its rows, and to find that the replica had them already."""
    house = Warehouse(tmp_path, "delta")
    made = make(merges, tmp_path, 86400)
    landed_snapshots.record_start(house, A, Position(1, 20), adds_rows=True)
    for table in (A, B):
        made.record(table, Position(1, 30))
    made.rounds.start()
    made.rounds.end()
    assert made.rounds.wait()
    assert merges.done == [(B, Position(1, 30))]
    landed_snapshots.record_end(house, A)
    made.catch_up()
    assert merges.done[1:] == [(A, Position(1, 30))]


def test_a_copy_does_not_set_back_a_replica_that_needed_none_any_more(
    merges: Merges, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = Warehouse(tmp_path, "delta")
    house.write_versions(A, [version(1, 0, ID)])
    file_table.commit(file_table.define(house.replica(A), StructType([StructField("id", LongType())]), {}), [], Position(1, 20))
    made = make(merges, tmp_path, 0)
    for lsn, error in ((30, PurgedError("no")), (50, None)):
        merges.error = error
        made.record(A, Position(1, lsn), lsn - 1)
        made.catch_up()
    made.record(A, Position(1, 9010), 9000)
    made.copied([A])
    assert made.replicas() == {A: 9000}
    caplog.clear()
    merges.error = PurgedError("no")
    made.catch_up()
    assert "stays as it is until the table is copied" in caplog.text  # another reason, so it is told again


def test_a_replica_that_does_not_exist_yet_lacks_what_came_since_its_table_began(
    merges: Merges, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to count from the LSN 0: terabytes behind. A table without a key has no replica, and so no lag."""
    made = make(merges, tmp_path, 0)
    house = Warehouse(tmp_path, "delta")
    keyless = Table("public", "keyless")
    for table, each in ((A, version(1000, 0, ID)), (B, version(2000, 0, ID)), (keyless, version(3000, 0, NONE))):
        house.write_versions(table, [each])
    monkeypatch.setattr(Warehouse, "tables", lambda _self: [A, keyless])
    made.look(1, {house.changelog(table): TableEnd(5000, is_restored=False) for table in (A, keyless)})
    made.record(B, Position(1, 5000))
    assert made.replicas() == {A: 999, B: 1999}
    made.catch_up()
    assert made.replicas() == {A: None, B: None}
    assert {table for table, _ in merges.done} == {A, B}


def test_a_replica_of_a_quiet_table_lacks_only_what_has_come_since(
    merges: Merges, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tables have had all the changes since its last one. It used to look as old as its last merge."""
    house = Warehouse(tmp_path, "delta")
    for table in (A, B):
        house.write_versions(table, [version(1, 0, ID)])
    made = make(merges, tmp_path, 0)
    monkeypatch.setattr(Warehouse, "tables", lambda _self: [A, B])
    lsns = {A: (20, 20), B: (20, 10)}  # B is behind since the last run
    ends = {
        path(table): TableEnd(lsn, is_restored=False)
        for table in (A, B)
        for path, lsn in zip((house.changelog, house.replica), lsns[table], strict=True)
    }
    made.look(1, ends)
    for begin, end in ((5000, 5010), (6000, 6010)):
        for table in (A, B):
            made.record(table, Position(1, end), begin)
        assert made.replicas() == {A: 5000, B: 10}  # until a merge
    made.catch_up()
    assert made.replicas() == {A: None, B: None}
    made.record(B, Position(1, 9010), 9000)
    assert made.replicas() == {A: None, B: 9000}


def test_merges_are_made_side_by_side(merges: Merges, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)

    def apply(*arguments: Any) -> set[str]:
        both.wait()
        return merges.apply(*arguments)

    monkeypatch.setattr(merge, "merge_changes", apply)
    made = make(merges, tmp_path, 0)
    made.record(A, Position(1, 1))
    made.record(B, Position(1, 1))
    made.catch_up()
    assert len(merges.done) == 2


def test_a_merge_is_planned_anew_when_its_changelog_was_widened(
    merges: Merges, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = [RuntimeError("[DELTA_SCHEMA_CHANGE_SINCE_ANALYSIS] The schema"), RuntimeError("[ANOTHER] thing")]

    def bring(*_: Any) -> None:
        if problems:
            raise problems.pop(0)

    monkeypatch.setattr(merge, "bring", bring)
    made = make(merges, tmp_path, 0)
    made.record(A, Position(1, 1))
    with pytest.raises(RuntimeError, match="ANOTHER"):
        made.catch_up()
    made.record(A, Position(1, 1))
    made.catch_up()
    assert merges.named == [A]


def test_a_replica_to_which_only_spark_can_write_stops_no_round(
    merges: Merges, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = make(merges, tmp_path, 0)
    path = Warehouse(tmp_path, "delta").replica(A)
    file_table.commit(file_table.define(path, StructType([StructField("id", LongType())]), {}), [], Position(1, 10))
    features = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["checkConstraints"]}
    commit_path(path, 1).write_text(json.dumps({"protocol": features}))
    for lsn in (20, 30):
        made.comment(A, Comments("a table", {}))
        made.record(B, Position(1, lsn))
        made.catch_up()
    assert merges.done == [(B, Position(1, 20)), (B, Position(1, 30))]
    (message,) = caplog.messages
    assert message.startswith("the replica of public.a does not get the comments of its table: the Delta table ")
