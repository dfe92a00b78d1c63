"""The first copy of a table, without Spark and without a server: the table has no rows."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from spark_sink.changelog.delta_changelogs import DeltaChangelogs
from spark_sink.delta import file_table
from spark_sink.delta import log as delta_log
from spark_sink.delta.log import TableLog
from spark_sink.replica import history_table, merge
from spark_sink.replica.history import history_schema
from spark_sink.replica.ordinary_history import merge_without_spark
from spark_sink.schema.table import Table
from spark_sink.schema.types import merge_columns, typed_schema
from spark_sink.snapshot.plan import StaleSnapshotError, TablePlan
from spark_sink.snapshot.table import Copying, copy_table
from spark_sink.staging.log import Position
from spark_sink.warehouse import landed_snapshots, new_changelogs, purged_changes, stored_histories
from spark_sink.warehouse.comments import Comments, read_comments, write_comments
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import EPOCH
from support.oids import INT4, TEXT
from support.segments import relation

if TYPE_CHECKING:
    from pathlib import Path

FRUIT = Table("public", "fruit")
RELATION = relation(1, "fruit", ("id", INT4), ("name", TEXT))
PLAN = TablePlan(RELATION, (1, 2), ("id",), None, (), 0)


def copy(house: Warehouse, lsn: int, plan: TablePlan = PLAN) -> None:
    """Copy the table at an LSN."""
    nothing: Any = None
    copying = Copying(
        spark=nothing,
        warehouse=house,
        scratch=house.root / "_cdcpipe/snapshot",
        connection="",
        snapshot="s",
        position=Position(1, lsn),
        time_us=0,
        is_utf8=True,
        rows=nothing,
        chunks=nothing,
        leave_out=lambda _chunks, _rows: None,
        is_stopping=threading.Event().is_set,
        lock=TableLock(house.root),
    )
    assert copy_table(copying, plan, FRUIT) == 0


@pytest.fixture
def house(tmp_path: Path) -> Warehouse:
    made = Warehouse(tmp_path, "delta", history="table")
    made.open(EPOCH)
    return made


def test_a_stored_history_does_not_go_on_with_a_changelog_that_begins_anew(
    house: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would show its last versions as valid up to the copy, whatever happened in between."""
    schema = history_schema(typed_schema(merge_columns(None, [RELATION])))
    properties = stored_histories.properties(after_lsn=0, copies=frozenset())
    file_table.commit(file_table.define(house.history(FRUIT), schema, properties), [], Position(1, 20))
    copy(house, 60)
    assert (new_changelogs.begun_lsn(house, FRUIT), purged_changes.last_lsn(house, FRUIT)) == (59, 0)
    known = stored_histories.facts(house, FRUIT)
    assert known is not None
    versions = house.versions(FRUIT)
    assert not merge_without_spark(house, FRUIT, versions, known, Position(1, 60))
    changelogs: Any = SimpleNamespace(read=lambda _: None)
    monkeypatch.setattr(history_table, "changelogs_of", lambda *_: changelogs)
    with pytest.raises(WarehouseError, match="lacks changes that its changelog does not have any more"):
        history_table.bring(changelogs, house, FRUIT, Position(1, 60), TableLock(house.root))
    assert [known.has(lsn, versions, 60) for lsn in (20, 21, 59, 60)] == [True, False, False, False]
    # As the hint says: a new history begins with what the changelog has.
    house.history(FRUIT).rename(house.root / "former")
    assert merge_without_spark(house, FRUIT, versions, None, Position(1, 60))
    known = stored_histories.facts(house, FRUIT)
    assert known is not None
    assert [known.has(lsn, versions, 60) for lsn in (20, 59, 60)] == [False, False, True]


def test_a_first_changelog_lacks_nothing(house: Warehouse) -> None:
    copy(house, 60)
    assert (delta_log.newest_lsn(house.changelog(FRUIT)), purged_changes.last_lsn(house, FRUIT)) == (60, 0)


def test_a_copy_records_when_its_rows_came_to_the_tables(house: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1000.7, 2000.7])
    monkeypatch.setattr(merge, "remake", lambda *_: None)
    monkeypatch.setattr("spark_sink.snapshot.table.time", SimpleNamespace(time=lambda: next(seconds)))
    for lsn in (60, 80):
        copy(house, lsn)
    assert [version.copied_at for version in house.versions(FRUIT)] == [1000, 2000]


def test_a_copy_from_before_purged_changes_needs_another_snapshot(house: Warehouse) -> None:
    """The same one could never give the table, and a server that holds it for a later run would keep what VACUUM removes."""
    copy(house, 60)
    purged_changes.record(house, FRUIT, 80)
    with pytest.raises(StaleSnapshotError, match=r"^changes of public\.fruit from after its copy began were purged meanwhile$"):
        copy(house, 80)
    assert house.versions(FRUIT)[-1].end_lsn == 60


def test_a_changelog_that_begins_anew_has_the_comments(house: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured DDL told them once, and does not tell them again."""
    comments = Comments("a table", {"id": "a number", "former": "a column that has gone"})
    write_comments(house, FRUIT, comments)
    with monkeypatch.context() as patched:
        patched.setattr(DeltaChangelogs, "comment", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            copy(house, 60)
    assert read_comments(house, FRUIT) is None  # so that the next changes give them
    shutil.rmtree(house.changelog(FRUIT))
    write_comments(house, FRUIT, comments)
    copy(house, 80)
    found = TableLog(house.changelog(FRUIT)).refresh().metadata
    fields = {field["name"]: field["metadata"].get("comment") for field in json.loads(found["schemaString"])["fields"]}
    assert (found["description"], fields["id"], fields["name"]) == ("a table", "a number", None)
    assert read_comments(house, FRUIT) == comments


@pytest.mark.parametrize("is_first", [True, False])
def test_a_copy_does_not_come_to_tables_that_are_written_otherwise_by_now(house: Warehouse, *, is_first: bool) -> None:
    """`run --deletes soft` had begun to keep deleted rows meanwhile. The copy made the replica anew without them, for good."""
    if not is_first:
        copy(house, 60)
    Warehouse(house.root, "delta", history="table", deletes="soft").open(EPOCH)
    changed = "a start of run has changed how .* is written since this command began: deletes is soft now, and was hard$"
    with pytest.raises(WarehouseError, match=changed):
        copy(house, 80)
    assert delta_log.newest_lsn(house.changelog(FRUIT)) == (None if is_first else 60)
    assert landed_snapshots.unfinished(house) == []
    # Nor does it finish what another copy has left.
    landed_snapshots.record_start(house, FRUIT, Position(1, 60))
    spark: Any = None
    with pytest.raises(WarehouseError, match=changed):
        merge.finish_snapshots(spark, house)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_copy_that_would_be_refused_in_the_end_reads_nothing_and_adds_no_column(house: Warehouse, *, is_first: bool) -> None:
    """With --readers any, a table that got column mapping or type widening from the former choice would keep it for good."""
    if not is_first:
        copy(house, 60)
    before = delta_log.read_table(house.changelog(FRUIT))
    Warehouse(house.root, "delta", history="table", readers="any").open(EPOCH)
    with pytest.raises(WarehouseError, match="a start of run has changed how"):
        copy(
            house, 80, replace(PLAN, relation=relation(1, "fruit", ("id", INT4), ("name", TEXT), ("a b", TEXT)), numbers=(1, 2, 3))
        )
    assert delta_log.read_table(house.changelog(FRUIT)) == before
    assert not (house.root / "_cdcpipe/snapshot" / ("1" if is_first else "1-later")).exists()
