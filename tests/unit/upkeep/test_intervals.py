"""When upkeep looks at a table, compacts its files, purges, and ends. Without Spark."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from spark_sink.delta import log as delta_log
from spark_sink.delta.log import TableState
from spark_sink.schema.table import Table
from spark_sink.spark import jobs
from spark_sink.upkeep import purge, upkeep
from spark_sink.upkeep.purge import Purged
from spark_sink.upkeep.recorded_times import RecordedTimes
from spark_sink.upkeep.upkeep import Upkeep
from spark_sink.warehouse.lock import TableLock, lock_file
from spark_sink.warehouse.warehouse import Warehouse
from support.descriptions import ID, NONE, version
from support.locks import held_elsewhere
from support.waiting import DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HOURS = 6


class Clock:
    """In the place of the module ``time``, and of the event that ends upkeep: each wait lasts as long as it is asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, pause_s: float) -> None:
        self.now_s += pause_s

    def is_set(self) -> bool:
        return self.now_s > HOURS * 3600.0


@pytest.mark.parametrize(
    ("interval_s", "compacted", "looked"),
    [
        (7200.0, [0, 2, 4, 6], [0, 1, 2, 3, 4, 5, 6]),
        (5400.0, [0, 1.5, 3, 4.5, 6], [0, 1, 1.5, 2.5, 3, 4, 4.5, 5.5, 6]),
        (10_800.0, [0, 3, 6], [0, 1, 2, 3, 4, 5, 6]),
        (86_400.0, [0], [0, 1, 2, 3, 4, 5, 6]),
        (None, [], [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_files_are_compacted_once_in_the_interval(
    interval_s: float | None, compacted: list[float], looked: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of a table is looked at every hour even so."""
    house, clock = Warehouse(tmp_path, "delta"), Clock()
    found: list[tuple[str, float]] = []

    def noting(what: str) -> Any:
        return lambda *_: found.append((what, clock.now_s / 3600.0))

    table = Table("public", "fruit")
    monkeypatch.setattr(upkeep, "places_of", lambda _: [(table, house.changelog(table))])
    monkeypatch.setattr(upkeep, "time", clock)
    monkeypatch.setattr("spark_sink.spark.session.copy", lambda spark: spark)
    monkeypatch.setattr(Upkeep, "_shorten", noting("looked"))
    monkeypatch.setattr(Upkeep, "_optimize", noting("compacted"))
    care = Upkeep(
        Mock(), house, TableLock(tmp_path), optimize_interval_s=interval_s, vacuum_retention_s=None, log_retention_s=86_400.0
    )
    monkeypatch.setattr(care, "_stopping", clock)
    care._run()
    for what, times in (("looked", looked), ("compacted", compacted)):
        assert [at for kind, at in found if kind == what] == times


@pytest.mark.parametrize(("small", "statements"), [(16, 0), (17, 1)])
def test_a_replica_that_was_sorted_once_has_many_files_of_the_size_that_sorting_makes(
    small: int, statements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --cluster-replicas all of these counted as small, and each look sorted up to 2 GiB anew."""
    house, table, spark = Warehouse(tmp_path, "delta"), Table("public", "fruit"), Mock()
    state = TableState(7, 7, 0, None, (32 << 20,) * 100 + (1 << 20,) * small, is_clustered=True)
    monkeypatch.setattr(upkeep, "places_of", lambda _: [(table, house.replica(table))])
    monkeypatch.setattr("spark_sink.spark.session.copy", lambda spark: spark)
    monkeypatch.setattr(delta_log, "read_table", lambda *_: state)
    monkeypatch.setattr(delta_log, "is_long", lambda _: False)
    Upkeep(spark, house, TableLock(tmp_path), optimize_interval_s=3600.0, vacuum_retention_s=None).run()
    assert spark.sql.call_count == statements


class Optimizing:
    """In Spark's place: OPTIMIZE runs until its jobs are cancelled."""

    def __init__(self) -> None:
        self.session, self.tags = Mock(), set[str]()
        self.begun, self.cancelled = threading.Event(), threading.Event()
        self.session.sql = self.optimize
        context = self.session.sparkContext
        context._jsc.sc().isStopped.return_value = False
        context.addJobTag, context.cancelJobsWithTag = self.tags.add, self.cancel

    def optimize(self, _statement: str) -> None:
        self.begun.set()
        assert self.cancelled.wait(DEADLINE_S)
        raise RuntimeError("[SPARK_JOB_CANCELLED]")

    def cancel(self, tag: str) -> None:
        if self.begun.is_set() and tag in self.tags:
            self.cancelled.set()


@pytest.mark.parametrize("is_in_thread", [True, False], ids=["run", "--available-now"])
def test_a_stop_waits_for_no_optimize(
    is_in_thread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may take hours. Until it had ended, `run` did not begin its own end, and systemd killed it."""
    house, table, spark = Warehouse(tmp_path, "delta"), Table("public", "fruit"), Optimizing()
    state = TableState(7, 7, 0, None, (1 << 20,) * 17, is_clustered=True)
    monkeypatch.setattr(upkeep, "places_of", lambda _: [(table, house.replica(table))])
    monkeypatch.setattr("spark_sink.spark.session.copy", lambda spark: spark)
    monkeypatch.setattr(delta_log, "read_table", lambda *_: state)
    monkeypatch.setattr(delta_log, "is_long", lambda _: False)
    monkeypatch.setattr(jobs, "_CANCEL_INTERVAL_S", 0.01)
    vacuumed: list[object] = []
    monkeypatch.setattr(Upkeep, "_vacuum", lambda *given: vacuumed.append(given))
    care = Upkeep(spark.session, house, TableLock(tmp_path), optimize_interval_s=3600.0, vacuum_retention_s=3600.0)
    if is_in_thread:
        care.start()
        assert spark.begun.wait(DEADLINE_S)
        care.stop()
    else:
        care.run(spark.begun.is_set)
    assert spark.cancelled.is_set()
    assert (vacuumed, caplog.messages) == ([], [])


def test_a_purge_of_histories_that_a_stop_has_ended_goes_on_after_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It counted as done for a day. So a run that is stopped every day would never come to the last tables."""
    caplog.set_level(logging.INFO)
    house, purged = Warehouse(tmp_path, "delta"), []
    (tmp_path / "_cdcpipe").mkdir()
    tables = [Table("public", "apple"), Table("public", "pear")]
    for table in tables:
        house.write_versions(table, [version(0, 0, ID)])
    monkeypatch.setattr(purge, "_purge_history", lambda *given: purged.append(given[2]) or 0)
    monkeypatch.setattr("spark_sink.spark.session.copy", lambda spark: spark)

    def take_care(is_stopping: Callable[[], bool]) -> None:
        lock = TableLock(tmp_path)
        Upkeep(Mock(), house, lock, optimize_interval_s=None, vacuum_retention_s=None, keep_history_s=3600.0).run(is_stopping)

    take_care(lambda: bool(purged))
    assert purged == tables[:1]
    assert caplog.messages == [f"stopped before {tmp_path / 'history'} was purged"]  # there is no other process
    take_care(lambda: False)
    assert purged == [*tables[:1], *tables]
    take_care(lambda: False)
    assert purged == [*tables[:1], *tables]


def test_a_stop_while_another_process_has_the_tables_is_worth_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that is asked to stop ends this wait before it stops its upkeep."""
    house, looks = Warehouse(tmp_path, "delta"), []
    monkeypatch.setattr(upkeep, "places_of", lambda _: [(Table("public", "fruit"), house.changelog(Table("public", "fruit")))])
    monkeypatch.setattr("spark_sink.spark.session.copy", lambda spark: spark)
    lock = TableLock(tmp_path, lambda: looks.append("waited") or True)
    with held_elsewhere(lock_file(tmp_path)):
        Upkeep(Mock(), house, lock, optimize_interval_s=None, vacuum_retention_s=None, log_retention_s=86_400.0).run()
    assert looks
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_purge_by_age_names_whose_rows_go_and_whose_changes_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows of a table without a key went without a word, and so did the changes that a history kept for ever."""
    house, fruit, log = Warehouse(tmp_path, "delta"), Table("public", "fruit"), Table("public", "log")
    (tmp_path / "_cdcpipe").mkdir()
    for table, key in ((fruit, ID), (log, NONE)):
        house.write_versions(table, [version(0, 0, key)])
    kept = [Purged(fruit, 0, 12, "the history is at 0/7"), Purged(log, 5)]
    monkeypatch.setattr(purge, "purge", lambda *_, **__: kept)
    monkeypatch.setattr("spark_sink.spark.session.copy", lambda spark: spark)
    monkeypatch.setattr(Warehouse, "has_changelog", lambda *_: True)
    monkeypatch.setattr(Warehouse, "source", lambda _: Mock())
    care = Upkeep(
        Mock(), house, TableLock(tmp_path), optimize_interval_s=None, vacuum_retention_s=None, keep_changelog_s=86400 * 30
    )
    monkeypatch.setattr(RecordedTimes, "is_due", lambda *_: True)
    care.run()
    care.run()  # it names each table once
    losing, keeping = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert losing.startswith("--keep-changelog removes the rows of these tables once they are 30 days old, ")
    assert losing.endswith(": public.log")
    assert keeping.startswith("changes that are older than 30 days stay in the changelogs of these tables, ")
    assert keeping.endswith(": public.fruit")
