"""The rounds that bring the stored histories up to date, without Spark: one history that can't go on does not stop the others."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from spark_sink.delta import file_table
from spark_sink.delta import log as delta_log
from spark_sink.delta import sql as delta
from spark_sink.delta.log import TableLog
from spark_sink.delta.rewrite import Rewrite
from spark_sink.pipeline.histories import Histories
from spark_sink.replica.history import history_schema
from spark_sink.schema.table import Table, copies_until
from spark_sink.staging import account
from spark_sink.staging.log import Epoch, Position
from spark_sink.staging.writer import StagingWriter
from spark_sink.warehouse import stored_histories
from spark_sink.warehouse.belonging import record_staging
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.warehouse import Warehouse
from support.descriptions import ID, version

A, B = Table("public", "a"), Table("public", "b")


@pytest.fixture
def house(tmp_path: Path) -> Warehouse:
    """Return a warehouse with two changelogs that have reached LSN 100."""
    made = Warehouse(tmp_path, "delta")
    made.open(Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0))
    made.record(Position(1, 100))
    for table in (A, B):
        made.write_versions(table, [replace(version(1, 0, ID), relation_id=ord(table.name))])
        changelog = Rewrite.new(made.changelog(table), ID, StructType([StructField("id", LongType())]), {})
        changelog.add({"id": pa.array([1])}, []).commit(Position(1, 100))
    return made


def set_properties(_: Any, path: Path, properties: dict[str, str]) -> None:
    """Do what Spark would do."""

    def changed(log: TableLog) -> dict[str, Any]:
        return {**log.metadata, "configuration": {**log.metadata["configuration"], **properties}}

    file_table.redefine(path, "SET TBLPROPERTIES", changed)


@pytest.mark.parametrize(
    ("copied_lsn", "log_end_lsn", "account_lsn", "expected"),
    [
        (90, 200, 0, []),
        (150, 200, 0, [150]),
        (250, 200, 0, []),
        (250, 200, 249, []),
        (250, 200, 250, [250]),  # the tables have the whole log, and it is complete up to there
        (250, 240, 250, []),
    ],
)
def test_a_copy_counts_when_the_warehouse_has_passed_it(
    house: Warehouse,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    copied_lsn: int,
    log_end_lsn: int,
    account_lsn: int,
    expected: list[int],
) -> None:
    """A copy does not raise the LSN of the changelog, which is the end of its last micro-batch."""
    staging = tmp_path / "staging"
    with StagingWriter(staging, slot="slot") as writer:
        writer.begin_epoch(Epoch(1, "7123", 1, "shop", "slot", ("p",), options={}, start_lsn=log_end_lsn))
    account.record(staging, account_lsn)
    brought: list[Position] = []
    monkeypatch.setattr("spark_sink.replica.history_table.bring", lambda *asked: brought.append(asked[3]))
    monkeypatch.setattr("spark_sink.spark.session.copy", lambda spark: spark)
    house.forget(B)
    schema = history_schema(StructType([StructField("id", LongType())]))
    noted = stored_histories.first_properties(house, A, 0, frozenset({90}))
    Rewrite.new(house.history(A), ID, schema, noted).commit(Position(1, 100))
    copy = replace(version(1, 0, ID), relation_id=ord("a"), end_lsn=copied_lsn, snapshot=((1, "id"),))
    house.write_versions(A, [*house.versions(A), copy])
    house.record(Position(2, 200))
    record_staging(house, staging)
    spark: Any = None
    histories = Histories(spark, house, TableLock(house.root), None, 0, pytest.fail)
    histories.catch_up()
    assert brought == [Position(2, lsn) for lsn in expected]
    assert histories.lsn is not None
    assert (histories.lsn < 200) == bool(expected)  # this `bring` has brought nothing


@pytest.mark.parametrize(("history_lsn", "expected"), [(None, [79]), (70, [79]), (79, [])])
@pytest.mark.parametrize("is_copied", [False, True])
def test_a_history_goes_on_to_the_loss_of_the_key(
    house: Warehouse, monkeypatch: pytest.MonkeyPatch, history_lsn: int | None, expected: list[int], is_copied: bool
) -> None:
    """Nothing can bring it further. Each round asked for that, and Spark opened the changelog."""
    brought: list[Position] = []
    monkeypatch.setattr("spark_sink.replica.history_table.bring", lambda *asked: brought.append(asked[3]))
    monkeypatch.setattr("spark_sink.spark.session.copy", lambda spark: spark)
    house.write_versions(B, [version(1, 0, ())])  # never had a key
    lost = version(80, 0, (), relation_id=9)
    copies = [replace(lost, end_lsn=90, snapshot=((1, "id"),))] if is_copied else []
    house.write_versions(A, [*house.versions(A), lost, *copies])
    if history_lsn is not None:
        schema = history_schema(StructType([StructField("id", LongType())]))
        noted = stored_histories.first_properties(house, A, 0, frozenset())
        Rewrite.new(house.history(A), ID, schema, noted).commit(Position(1, history_lsn))
    spark: Any = None
    Histories(spark, house, TableLock(house.root), None, 0, pytest.fail).catch_up()
    assert brought == [Position(1, lsn) for lsn in expected]


def test_a_history_that_was_set_back_is_named(
    house: Warehouse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its log says that it has all changes. Neither `as-of` nor a purge may rely on this."""
    house.forget(B)
    path, schema = house.history(A), history_schema(StructType([StructField("id", LongType())]))
    Rewrite.new(path, ID, schema, stored_histories.first_properties(house, A, 0, frozenset())).commit(Position(1, 100))
    restore = {"commitInfo": {"operation": "RESTORE", "engineInfo": "Apache-Spark/4.2.0 Delta-Lake/4.4.0"}}
    delta_log.commit_path(path, 1).write_text(json.dumps(restore))
    monkeypatch.setattr("spark_sink.spark.session.copy", lambda spark: spark)
    monkeypatch.setattr(delta, "set_properties", set_properties)
    spark: Any = None
    histories = Histories(spark, house, TableLock(house.root), None, 0, pytest.fail)
    histories.catch_up()
    histories.catch_up()
    (message,) = caplog.messages
    assert message.startswith(
        "the history of public.a stays as it is: RESTORE has set the history of public.a back to an earlier version"
    )
    assert message.endswith(f"; move {path} away: a new history begins with what the changelog has")
    found = stored_histories.facts(house, A)
    assert found is not None
    assert histories.lsn == 0  # metrics say so: nothing of it is right
    assert (found.known_lsn(house.versions(A)), found.has(50, house.versions(A), 100)) == (0, False)
    assert delta_log.commits(path) == [0, 1, 2]  # the second round noted nothing more
    # The commit of RESTORE leaves the log some day: Delta removes it with a checkpoint that is a month younger.
    restore["commitInfo"]["operation"] = "OPTIMIZE"
    delta_log.commit_path(path, 1).write_text(json.dumps(restore))
    assert stored_histories.facts(house, A) == found


@pytest.mark.parametrize(
    ("properties", "is_lost", "said"),
    [
        (
            {"delta.setTransactionRetentionDuration": "interval 1 hours"},
            False,
            r"has the property delta\.setTransactionRetentionDuration, .*; ALTER TABLE .* UNSET TBLPROPERTIES",
        ),
        ({}, True, "has lost the place up to which it has the changes; move .* away"),
    ],
)
def test_a_history_that_forgets_its_position_is_named(
    house: Warehouse,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    properties: dict[str, str],
    is_lost: bool,
    said: str,
) -> None:
    """All changes would come to it again, and each version that has ended would be there twice."""
    house.forget(B)
    path, schema = house.history(A), history_schema(StructType([StructField("id", LongType())]))
    first = stored_histories.first_properties(house, A, 0, frozenset())
    Rewrite.new(path, ID, schema, {**first, **properties}).commit(Position(1, 100))
    if is_lost:
        commit = delta_log.commit_path(path, 0)
        commit.write_text("\n".join(line for line in commit.read_text().splitlines() if '"txn"' not in line))
    monkeypatch.setattr("spark_sink.spark.session.copy", lambda spark: spark)
    spark: Any = None
    Histories(spark, house, TableLock(house.root), None, 0, pytest.fail).catch_up()
    (message,) = caplog.messages
    assert re.match(f"the history of public.a stays as it is: the history of public.a {said}", message)
    assert delta_log.commits(path) == [0]


def test_a_history_that_cannot_go_on_stays_as_it_is(
    house: Warehouse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    brought: list[tuple[Table, Position]] = []

    def bring(_spark: Any, _house: Warehouse, table: Table, until: Position, _lock: TableLock) -> None:
        if table == A:
            raise WarehouseError("changes were purged", hint="move it away")
        brought.append((table, until))

    monkeypatch.setattr("spark_sink.replica.history_table.bring", bring)
    monkeypatch.setattr("spark_sink.spark.session.copy", lambda spark: spark)
    spark: Any = None
    histories = Histories(spark, house, TableLock(house.root), None, 0, pytest.fail)
    assert histories.lsn is None
    histories.catch_up()
    assert histories.lsn == 0  # what comes before the first change of A
    histories.catch_up()
    assert brought == [(B, Position(1, 100))] * 2
    assert caplog.messages == ["the history of public.a stays as it is: changes were purged; move it away"]


def test_a_round_looks_at_the_tables_that_may_be_behind(house: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round looked at each table, with eight requests for each: minutes with 1,000 tables in a store."""
    looked: list[Table] = []
    brought: list[Table] = []
    known = stored_histories.missing_until

    def missing_until(*asked: Any) -> int | None:
        looked.append(asked[1])
        return known(*asked)

    def bring(_spark: Any, _house: Warehouse, table: Table, until: Position, _lock: TableLock) -> None:
        brought.append(table)
        make_history(house, table, until)

    monkeypatch.setattr("spark_sink.warehouse.stored_histories.missing_until", missing_until)
    monkeypatch.setattr("spark_sink.replica.history_table.bring", bring)
    monkeypatch.setattr("spark_sink.spark.session.copy", lambda spark: spark)
    spark: Any = None
    lock = TableLock(house.root)
    histories = Histories(spark, house, lock, None, 0, pytest.fail)

    def round_() -> tuple[list[Table], list[Table]]:
        looked.clear()
        brought.clear()
        histories.catch_up()
        return looked.copy(), brought.copy()

    assert round_() == ([A, B, A, B], [A, B])
    assert round_() == ([], [])
    histories.record([A])
    assert round_() == ([A], [])
    assert round_() == ([], [])

    # A snapshot or a purge, perhaps by another process.
    with TableLock(house.root).alone():
        copy = replace(version(1, 0, ID), relation_id=ord("b"), end_lsn=150, snapshot=((1, "id"),))
        house.write_versions(B, [*house.versions(B), copy])
    assert round_() == ([A, B], [])
    assert round_() == ([B], [])  # the tables have not reached it
    house.record(Position(1, 200))
    assert round_()[1] == [B]
    assert histories.lsn == 200

    # Another program sets a history back, or somebody moves it away.
    shutil.rmtree(house.history(A))
    monkeypatch.setattr("spark_sink.pipeline.histories._ALL_TABLES_S", 0.0)
    assert round_()[1] == [A]


def make_history(house: Warehouse, table: Table, until: Position) -> None:
    """Write a history that has everything up to a position."""
    shutil.rmtree(house.history(table), ignore_errors=True)
    schema = history_schema(StructType([StructField("id", LongType())]))
    copies = copies_until(house.versions(table), until.lsn)
    Rewrite.new(house.history(table), ID, schema, stored_histories.first_properties(house, table, 0, copies)).commit(until)


def test_a_round_after_an_error_looks_at_every_table(house: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    brought: list[Table] = []

    def bring(_spark: Any, _house: Warehouse, table: Table, *_: Any) -> None:
        if len(brought) == 1:
            brought.append(table)
            raise KeyError
        brought.append(table)

    monkeypatch.setattr("spark_sink.replica.history_table.bring", bring)
    monkeypatch.setattr("spark_sink.spark.session.copy", lambda spark: spark)
    spark: Any = None
    histories = Histories(spark, house, TableLock(house.root), None, 0, pytest.fail)
    with pytest.raises(KeyError):
        histories.catch_up()
    histories.catch_up()
    assert brought == [A, B, A, B]
