"""Every version of a table's rows: at each LSN, those that are valid are the rows that the table had."""

import itertools
import random
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import postgres
import pytest

from spark_sink.changelog.tables import changelogs_of
from spark_sink.replica import merge
from spark_sink.replica.as_of import read_as_of
from spark_sink.replica.current import read_replica
from spark_sink.replica.history import read_history
from spark_sink.replica.replay import replay
from spark_sink.schema.table import Table, Version
from spark_sink.staging.log import Position
from spark_sink.warehouse import purged_changes
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import (
    EPOCH,
    KEY,
    TABLE,
    TIME_KEYS,
    Source,
    add,
    append,
    comparable,
    keys_of_the_hour_that_comes_twice,
    schema_of,
)
from support.road import Road

pytestmark = pytest.mark.spark


NAMES = ("case", "id", "a", "blob", "other")


def valid_at(versions: Any, lsn: int) -> Any:
    return versions.where(f"from_lsn <= {lsn} and (to_lsn is null or {lsn} < to_lsn)")


@pytest.mark.parametrize("seed", range(2))
def test_random_changes(spark: Any, tmp_path: Path, seed: int) -> None:
    """Keys that change with unsent values, exchanged keys, TRUNCATE, several changes of a row in a transaction, and copies.

    Before a copy a delete gets lost: the row ends there.
    """
    source = Source(random.Random(seed))
    states: list[tuple[int, list[Any]]] = []
    versions_of_table = [Version(0, 0, 7, KEY, KEY)]
    for number in range(120):
        for _ in range(source.rng.randint(1, 4)):
            source.step(8)
        if number % 40 == 39:
            source.truncate()
            source.insert(3)
        end_lsn = source.lsn + 1
        source.commit()
        states.append((end_lsn, sorted(source.rows.values())))
        if number % 50 == 30:
            if len(source.rows) > 1:  # the copy of an empty table would be a TRUNCATE
                source.rows.pop(source.rng.choice(sorted(source.rows)))
            elif not source.rows:
                source.insert(0)
                source.commit()
            lsn = source.snapshot()
            states.append((lsn, sorted(source.rows.values())))
            versions_of_table.append(Version(lsn, 0, 7, KEY, KEY, snapshot=tuple(enumerate(NAMES, 1))))
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(EPOCH)
    house.write_versions(TABLE, versions_of_table)
    add(spark, house, source.changes, 0, source.lsn + 1)
    versions = read_history(spark, house.root, str(TABLE)).localCheckpoint()
    assert versions.where("to_lsn <= from_lsn or is_current <> (to_lsn is null) or _cdc_unchanged is not null").count() == 0
    found = versions.drop("valid_from", "valid_to", "is_current", "_cdc_exact", "_cdc_unchanged").collect()
    for lsn, expected in states:
        valid = [row for row in found if row["from_lsn"] <= lsn and (row["to_lsn"] is None or lsn < row["to_lsn"])]
        assert comparable(tuple(row)[:5] for row in valid) == comparable(expected), lsn


def comparable_with_null(versions: Any) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, versions.collect()), key=repr)


STEPS = [
    "insert into t select g, 'first', repeat('x', 3000) from generate_series(1, 6) g",
    "update t set name = 'second' where id < 3; update t set name = 'third' where id = 1",
    "update t set id = id + 10 where id > 4",
    "alter table t add price int default 7",
    "update t set price = 8 where id = 2; delete from t where id = 3",
    "alter table t drop constraint t_pkey; alter table t add primary key (id, name)",
    "update t set name = 'fourth' where id = 1; insert into t values (1, 'twin', 'y', 9)",
    "truncate t; insert into t values (1, 'new', 'z', 1)",
    "drop table t; create table t (id int primary key, name text, blob text, valid_to date)",
    "insert into t values (1, 'another', null, '2024-01-01')",
    "update t set name = 'last'",
]


def test_the_versions_at_an_lsn_are_the_rows_as_of_this_lsn(pg18: postgres.Cluster, spark: Any, tmp_path: Path) -> None:
    """The same with the stored history, whose own columns get other names when the table gets a column ``valid_to``."""
    with pg18.database() as database:
        road = Road(database, spark, tmp_path, slot=f"s_{database.name}")
        road.execute(
            "create table t (id int primary key, name text, blob text); alter table t alter blob set storage external",
            "create publication everything for all tables",
        )
        road.land()
        for statements in (STEPS[:4], STEPS[4:6], STEPS[6:8], STEPS[8:]):  # the catalog tells of each ALTER TABLE in time
            road.execute(*statements)
            road.run(history="table", catalog_database="histories")
        stored = spark.table("histories.public__t__history")
        assert stored.columns == read_history(spark, road.warehouse, "public.t").columns
        assert comparable_with_null(stored) == comparable_with_null(read_history(spark, road.warehouse, "public.t"))
        versions = read_history(spark, road.warehouse, "public.t").localCheckpoint()
        house = Warehouse.existing(road.warehouse)
        changes = changelogs_of(spark, house).read(Table("public", "t"))
        places = [row[0] for row in changes.select("_cdc_end_lsn").distinct().orderBy("_cdc_end_lsn").collect()]
        assert len(places) == 8
        names = ["id", "name", "blob", "price"]
        for lsn in places[1::2]:
            expected = replay(house, Table("public", "t"), changes, until_lsn=lsn).select(*names).collect()
            assert comparable(valid_at(versions, lsn).select(*names).collect()) == comparable(expected), lsn
            found = read_as_of(spark, road.warehouse, "public.t", f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}").select(*names).collect()
            assert comparable(found) == comparable(expected), lsn
        assert versions.where("is_current").select("name", "valid_to", "_cdc_valid_to").collect()[0][0] == "last"
        assert versions.where("valid_from is null or (is_current <> (_cdc_valid_to is null))").count() == 0
        two = versions.where("id = 2").orderBy("from_lsn").select("name", "valid_from", "_cdc_valid_to").collect()
        assert [row["name"] for row in two] == ["first", "second", "second"]
        assert all(before["_cdc_valid_to"] == after["valid_from"] for before, after in itertools.pairwise(two))


@pytest.mark.parametrize("columns", TIME_KEYS)
def test_times_as_keys_in_the_hour_when_the_clocks_go_back(spark: Any, tmp_path: Path, columns: str) -> None:
    """As text of the session's time zone, two keys would be one."""
    session, house = keys_of_the_hour_that_comes_twice(spark, tmp_path / "warehouse", columns)
    assert read_history(session, house.root, str(TABLE)).where("is_current").count() == 2
    merge.bring(session, house, TABLE, Position(1, 20))
    assert read_replica(spark, house.root, str(TABLE)).count() == 2


def test_the_end_of_a_table_in_the_hour_when_the_clocks_go_back(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another table gets the name at 1:30, for the second time in this night."""
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(EPOCH)
    house.write_versions(TABLE, [Version(0, 0, 7, ("id",), ("id",)), Version(20, 0, 8, ("id",), ("id",))])
    times = [datetime(2024, 11, 3, hour, 30, tzinfo=UTC) for hour in (5, 6)]
    changes = [(n, "insert", 1, 10 + 10 * n, 0, 1, at, None, None, None) for n, at in enumerate(times)]
    append(spark, house, changes, schema_of("id int"), Position(1, 0), Position(1, 20))
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        found = read_history(spark, house.root, str(TABLE)).selectExpr("id", "unix_seconds(valid_to) as until").collect()
    finally:
        monkeypatch.undo()
        time.tzset()
    assert sorted(map(tuple, found), key=str) == [(0, int(times[1].timestamp())), (1, None)]


def test_what_a_purge_has_removed_is_not_invented(spark: Any, tmp_path: Path) -> None:
    source = Source(random.Random(5))
    for _ in range(3):
        source.insert(len(source.rows))
        source.commit()
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(EPOCH)
    house.write_versions(TABLE, [Version(0, 0, 7, KEY, KEY)])
    add(spark, house, source.changes, 0, source.lsn + 1)
    purged_changes.record(house, TABLE, source.changes[0][7])
    with pytest.raises(WarehouseError, match="purged"):
        read_history(spark, house.root, str(TABLE))
