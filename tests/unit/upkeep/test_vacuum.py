"""Which right VACUUM holds, and what it waits for. Without Spark."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from spark_sink.delta import file_table
from spark_sink.delta.removed_files import keep_names
from spark_sink.files import clock
from spark_sink.schema.table import Table
from spark_sink.staging.log import Epoch, Position
from spark_sink.upkeep import purge
from spark_sink.upkeep.upkeep import Upkeep
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.warehouse import Warehouse
from support.descriptions import ID, version

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FRUIT = Table("public", "fruit")
SCHEMA = StructType([StructField("id", LongType())])


class Session:
    """In Spark's place: adds each statement to ``events``."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self.statements: list[str] = []
        self.conf = type("Conf", (), {"set": lambda *_: None})()

    def newSession(self) -> Session:  # noqa: N802 - Spark's name
        return self

    def sql(self, statement: str) -> None:
        self.statements.append(statement)
        self._events.append(statement.partition(" ")[0])


def observed(monkeypatch: pytest.MonkeyPatch, lock: TableLock, name: str, events: list[str]) -> None:
    """Add to ``events`` when a right is taken and given back."""
    right = getattr(lock, name)

    @contextmanager
    def taken() -> Iterator[None]:
        with right():
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
        file_table.commit(file_table.define(path, SCHEMA, {}), [], Position(1, 10))
        keep_names(path, 3600.0)
    times = {"changelog/public.fruit": 0, "replica/public.fruit": 0}
    (tmp_path / "_cdcpipe/vacuumed.json").write_text(json.dumps(times))
    return made


def test_vacuum_keeps_files_for_longer_where_new_ones_look_old(house: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it deletes the files of a micro-batch that has not committed them."""
    spark: Any = Session([])
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + 7200.0)
    Upkeep(spark, house, TableLock(house.root), optimize_interval_s=None, vacuum_retention_s=3600.0).run()
    hours = [float(statement.split()[-2]) for statement in spark.statements]
    assert hours == pytest.approx([3.0, 3.0], abs=0.2)


def test_a_purge_counts_by_the_earlier_of_two_clocks(house: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a clock that is days ahead would remove is gone for good."""
    house.record(Position(1, 10))
    asked: list[datetime] = []
    monkeypatch.setattr(purge, "purge", lambda _, root, before, **__: asked.append(before) or [])
    monkeypatch.setattr(purge, "purge_histories", lambda _, house, lock, before, __: asked.append(before) or [])
    monkeypatch.setattr(clock, "behind_s", lambda _: 86_400.0)
    spark: Any = Session([])
    ages = {"keep_changelog_s": 3600.0, "keep_history_s": 7200.0}
    Upkeep(spark, house, TableLock(house.root), optimize_interval_s=None, vacuum_retention_s=None, **ages).run()
    now = datetime.now(UTC)
    assert [(now - before).total_seconds() for before in asked] == pytest.approx([90_000.0, 93_600.0], abs=600.0)


def test_vacuum_of_a_changelog_begins_between_two_micro_batches(house: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause of the machine, the files of a micro-batch that has not committed them look like old leftovers."""
    lock, events = TableLock(house.root), list[str]()
    observed(monkeypatch, lock, "append", events)
    observed(monkeypatch, lock, "merge", events)
    spark: Any = Session(events)
    Upkeep(spark, house, lock, optimize_interval_s=None, vacuum_retention_s=3600.0).run()
    assert events == ["append taken", "append free", "VACUUM", "merge taken", "VACUUM", "merge free"]
