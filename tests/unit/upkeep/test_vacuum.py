"""Which right VACUUM holds, and which files it may delete. Without Spark."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from spark_sink.delta import sql as delta
from spark_sink.delta import unused_files as unused_files_module
from spark_sink.delta.log import commit_path, commits
from spark_sink.delta.removed_files import keep_names
from spark_sink.delta.rewrite import Rewrite
from spark_sink.delta.unused_files import unused_files
from spark_sink.files import clock
from spark_sink.replica import merge
from spark_sink.schema.table import NO_COPIES, Table
from spark_sink.staging.log import Epoch, Position
from spark_sink.upkeep import purge, upkeep
from spark_sink.upkeep.recorded_times import RecordedTimes, is_due
from spark_sink.upkeep.upkeep import Upkeep
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.warehouse import Warehouse
from support.descriptions import ID, version

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from spark_sink.files.places import Listed

FRUIT = Table("public", "fruit")
SCHEMA = StructType([StructField("id", LongType())])
DAY_AGO = time.time() - 86_400.0


class Session:
    """In Spark's place."""

    def __init__(self, *_: object) -> None:
        self.conf = type("Conf", (), {"set": lambda *_: None})()
        self.sparkContext = SimpleNamespace(addJobTag=lambda _: None)
        self._jsparkSession = SimpleNamespace(cloneSession=lambda: None)


def observed(monkeypatch: pytest.MonkeyPatch, lock: TableLock, name: str, events: list[str]) -> None:
    """Add to ``events`` when a right is taken and given back."""
    right = getattr(lock, name)

    @contextmanager
    def taken(*given: object) -> Iterator[None]:
        with right(*given):
            events.append(f"{name} taken")
            yield
        events.append(f"{name} free")

    monkeypatch.setattr(lock, name, taken)


@pytest.fixture
def house(tmp_path: Path) -> Warehouse:
    """A changelog and a replica whose VACUUM is due."""
    made = Warehouse(tmp_path, "delta")
    made.open(Epoch(1, "7123456789", 1, "db", "s", ("p",), {}, 0))
    made.write_versions(FRUIT, [version(0, 0, ID)])
    for path in (made.changelog(FRUIT), made.replica(FRUIT)):
        Rewrite.new(path, ("id",), SCHEMA, {}).add({"id": pa.array([1])}, []).commit(Position(1, 10))
        keep_names(path, 3600.0)
        (path / "part-left-over.parquet").write_bytes(b"rows")
        for file in path.glob("*.parquet"):
            os.utime(file, (DAY_AGO, DAY_AGO))
        (path / "part-not-yet-committed.parquet").write_bytes(b"rows")
    times = {"changelog/public.fruit": 0, "replica/public.fruit": 0}
    (tmp_path / "_cdcpipe/vacuumed.json").write_text(json.dumps(times))
    return made


@dataclass
class Vacuums:
    """What VACUUM was asked for: for each table the names of the files that it may delete, and the retention in hours."""

    events: list[str] = field(default_factory=list)
    listed: list[list[str]] = field(default_factory=list)
    hours: list[float] = field(default_factory=list)
    deletes: bool = False

    def vacuum(self, _: Any, path: Path, files: Sequence[Listed], retention_s: float) -> None:
        for file in files if self.deletes else ():
            (path / file.name).unlink()
        self.events.append(f"VACUUM {path.parent.name}")
        self.listed.append([file.name for file in files])
        self.hours.append(retention_s / 3600)


@pytest.fixture
def vacuums(monkeypatch: pytest.MonkeyPatch) -> Vacuums:
    found = Vacuums()
    monkeypatch.setattr(delta, "vacuum", found.vacuum)
    return found


def take_care(house: Warehouse, lock: TableLock | None = None, **options: float) -> None:
    spark: Any = Session()
    settings: dict[str, Any] = {"vacuum_retention_s": 3600.0, **options}
    Upkeep(spark, house, lock or TableLock(house.root), optimize_interval_s=None, **settings).run()


def test_vacuum_may_delete_old_files_that_no_commit_has(house: Warehouse, vacuums: Vacuums) -> None:
    """So it does not matter what is committed while it works, and how long it takes."""
    take_care(house)
    assert vacuums.listed == [["part-left-over.parquet"]] * 2


def test_without_such_files_there_is_no_vacuum(house: Warehouse, vacuums: Vacuums) -> None:
    (house.replica(FRUIT) / "part-left-over.parquet").unlink()
    take_care(house)
    assert vacuums.events == ["VACUUM changelog"]
    times = json.loads((house.root / "_cdcpipe/vacuumed.json").read_text())
    assert times.keys() == {"changelog/public.fruit", "replica/public.fruit"}
    assert all(times.values())


@pytest.mark.parametrize("deletes", [True, False])
def test_after_a_full_list_vacuum_takes_the_others_at_the_next_look(
    house: Warehouse, vacuums: Vacuums, monkeypatch: pytest.MonkeyPatch, *, deletes: bool
) -> None:
    """They used to wait for the next day, so a table that left more files than a list has each day grew for ever.

    VACUUM may keep all files of a list, for readers of older versions. Then it comes the next day.
    """
    monkeypatch.setattr(unused_files_module, "_MOST_FILES", 2)
    vacuums.deletes = deletes
    (house.replica(FRUIT) / "part-left-over.parquet").unlink()
    for number in range(4):
        name = house.changelog(FRUIT) / f"part-left-over-{number}.parquet"
        name.write_bytes(b"rows")
        os.utime(name, (DAY_AGO, DAY_AGO))

    def looks() -> list[int]:
        """Let upkeep look once, and return how many files each list had until now."""
        take_care(house)
        return [len(names) for names in vacuums.listed]

    def is_any_due() -> bool:
        return is_due(house, vacuum_retention_s=3600.0, purges=False, purges_histories=False)

    assert looks() == [2]
    assert is_any_due() == deletes  # so the next run with --available-now looks, too
    assert looks() == ([2, 2] if deletes else [2])
    assert looks() == ([2, 2, 1] if deletes else [2])
    assert not is_any_due()
    assert looks() == ([2, 2, 1] if deletes else [2])


def test_vacuum_keeps_files_for_longer_where_new_ones_look_old(
    house: Warehouse, vacuums: Vacuums, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + 7200.0)
    take_care(house)
    assert vacuums.hours == pytest.approx([3.0, 3.0], abs=0.2)
    assert vacuums.listed == [["part-left-over.parquet"]] * 2


def test_a_purge_counts_by_the_earlier_of_two_clocks(house: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a clock that is days ahead would remove is gone for good."""
    house.record(Position(1, 10))
    asked: list[datetime] = []
    monkeypatch.setattr(purge, "purge", lambda _, root, before, **__: asked.append(before) or [])
    monkeypatch.setattr(purge, "purge_histories", lambda _, house, lock, before, __: asked.append(before) or [])
    monkeypatch.setattr(clock, "behind_s", lambda _: 86_400.0)
    spark: Any = Session()
    ages = {"keep_changelog_s": 3600.0, "keep_history_s": 7200.0}
    Upkeep(spark, house, TableLock(house.root), optimize_interval_s=None, vacuum_retention_s=None, **ages).run()
    now = datetime.now(UTC)
    assert [(now - before).total_seconds() for before in asked] == pytest.approx([90_000.0, 93_600.0], abs=600.0)


def test_the_list_is_made_while_nobody_writes_to_the_table(
    house: Warehouse, vacuums: Vacuums, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause of the machine, the files of a writer that has not committed them look like old leftovers.

    VACUUM itself goes on beside the writers. In an object store it may take hours.
    """
    lock, events = TableLock(house.root), vacuums.events
    observed(monkeypatch, lock, "append", events)
    observed(monkeypatch, lock, "merge", events)
    find = unused_files
    monkeypatch.setattr(upkeep, "unused_files", lambda *given: events.append("list") or find(*given))
    take_care(house, lock)
    assert events == [
        *("append taken", "list", "append free", "VACUUM changelog"),
        *("merge taken", "list", "merge free", "VACUUM replica"),
    ]


def test_a_table_to_which_only_spark_can_write_is_vacuumed(
    house: Warehouse, vacuums: Vacuums, caplog: pytest.LogCaptureFixture
) -> None:
    """ALTER TABLE ... ADD CONSTRAINT gives it such a feature. It kept all its files, and grew for ever."""
    features = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["checkConstraints"]}
    path = house.replica(FRUIT)
    commit_path(path, commits(path)[-1] + 1).write_text(json.dumps({"protocol": features}))
    spark: Any = Session()
    made = Upkeep(spark, house, TableLock(house.root), optimize_interval_s=None, vacuum_retention_s=7200.0)
    for _ in range(2):
        made.run()
        (house.root / "_cdcpipe/vacuumed.json").write_text(json.dumps({"replica/public.fruit": 0}))
        made._times = RecordedTimes(house)
    assert vacuums.events == ["VACUUM changelog", "VACUUM replica", "VACUUM replica"]
    (message,) = caplog.messages
    assert message.startswith("the names of deleted files stay in the checkpoints for Delta's own time: the Delta table ")


@pytest.mark.parametrize("table", NO_COPIES)
def test_what_only_another_restore_brings_back_is_not_deleted(house: Warehouse, vacuums: Vacuums, table: Table) -> None:
    """No copy makes up for it. The next start of `run` says how to set the table to the version that has it."""
    path = house.changelog(table)
    Rewrite.new(path, ("id",), SCHEMA, {}).add({"id": pa.array([1])}, []).commit(Position(1, 10))
    (path / "part-that-restore-has-removed.parquet").write_bytes(b"rows")
    os.utime(path / "part-that-restore-has-removed.parquet", (DAY_AGO, DAY_AGO))
    restore, times = {"operation": "RESTORE", "operationParameters": {"version": None}}, house.root / "_cdcpipe/vacuumed.json"
    commit_path(path, commits(path)[-1] + 1).write_text(json.dumps({"commitInfo": restore}))
    before = commits(path)
    times.write_text(json.dumps({f"changelog/{path.name}": 0}))
    take_care(house)
    assert (vacuums.events, commits(path)) == ([], before)
    restore["operationParameters"] = {"version": before[-2]}
    commit_path(path, before[-1] + 1).write_text(json.dumps({"commitInfo": restore}))
    take_care(house)
    assert vacuums.listed == [["part-that-restore-has-removed.parquet"]]


def test_a_vacuum_that_fails_is_named_as_one(
    house: Warehouse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(delta, "vacuum", failing)
    take_care(house)
    assert [each.partition(" was not ")[2][:9] for each in caplog.messages] == ["vacuumed "] * 2


@pytest.mark.parametrize(
    ("stops_after", "expected"),
    [
        ("look at fruit", ["look at fruit"]),
        ("purge fruit", ["look at fruit", "look at basket", "alone taken", "purge fruit", "alone free"]),
    ],
)
def test_a_purge_that_is_to_stop_goes_on_with_no_further_table(
    house: Warehouse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stops_after: str, expected: list[str]
) -> None:
    """With a thousand tables it takes many minutes, and the supervisor kills. What was removed until then is in the log."""
    events: list[str] = []
    lock = TableLock(house.root)
    observed(monkeypatch, lock, "alone", events)

    class Old:
        def __init__(self, table: Table, lsn: int) -> None:
            self.table, self.lsn, self.rows, self.kept, self.reason = table, lsn, 2, 0, ""
            events.append(f"look at {table.name}")

        def check(self) -> None:
            pass

        def remove(self) -> None:
            events.append(f"purge {self.table.name}")

    monkeypatch.setattr(purge, "TableLock", lambda _: lock)
    monkeypatch.setattr(purge, "_all", lambda _: [FRUIT, Table("public", "basket")])
    monkeypatch.setattr(purge, "_place", lambda *_: 10)
    monkeypatch.setattr(purge, "changelogs_of", lambda *_: SimpleNamespace(old_changes=Old))
    monkeypatch.setattr(merge, "finish_snapshots", lambda *_: None)
    monkeypatch.setattr(Warehouse, "has_changelog", lambda *_: True)
    caplog.set_level("INFO", "spark_sink.upkeep.purge")
    spark: Any = Session()
    with pytest.raises(InterruptedError):
        purge.purge(spark, house.root, datetime(2026, 3, 1, tzinfo=UTC), is_stopping=lambda: stops_after in events)
    assert events == expected
    said = [each for each in caplog.messages if each.endswith("removed")]
    assert said == ["public.fruit: 2 changes from before 2026-03-01 00:00:00+00:00 removed"] * ("purge fruit" in events)
