"""The SQL view with a table's history: it has the rows of `read_history`, whatever has happened to the table."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.lsn import LSN
from cdcpipe.pgoutput.messages import UNCHANGED_TOAST, Update
from spark_sink.changelog.tables import changelogs_of
from spark_sink.pipeline import history_views
from spark_sink.pipeline.catalog import CatalogDatabase
from spark_sink.pipeline.history_views import HistoryViews
from spark_sink.pipeline.micro_batch import MicroBatch
from spark_sink.pipeline.pipeline import Pipeline
from spark_sink.replica import merge
from spark_sink.replica.history import read_history
from spark_sink.replica.history_view import Known, history_shape, known_sql, view_sql
from spark_sink.schema.table import Fill, Table, Version
from spark_sink.staging.log import Position
from spark_sink.upkeep.purge import purge
from spark_sink.warehouse import purged_changes
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import (
    EPOCH,
    KEY,
    TABLE,
    TIME_KEYS,
    Source,
    add,
    add_copy,
    append,
    keys_of_the_hour_that_comes_twice,
    schema_of,
)
from support.segments import Log, into, relation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

NAMES = ("case", "id", "a", "blob", "other")


@pytest.fixture
def database(spark: SparkSession) -> Iterator[str]:
    name = f"shop_{uuid.uuid4().hex}"
    yield name
    spark.sql(f"drop database if exists {name} cascade")


def counted(rows: DataFrame) -> Counter[str]:
    """Return how often each row is there, as text."""
    return Counter(repr(tuple(sorted(v.items()) if isinstance(v, dict) else v for v in row)) for row in rows.collect())


def made_by_sql(spark: SparkSession, house: Warehouse, table: Table = TABLE) -> DataFrame:
    """Return the rows of a view that is made now."""
    path = house.changelog(table)
    source = f"delta.`{path}`" if house.format.name == "delta" else f"parquet.`{path}` WITH (recursiveFileLookup = 'true')"
    shape = history_shape(house.versions(table), purged_changes.last_lsn(house, table))
    known = Known.of(spark.sql(known_sql(source, shape)).collect())
    assert known is not None
    return spark.sql(view_sql(source, changelogs_of(spark, house).read(table).schema, shape, known))


def assert_same(spark: SparkSession, house: Warehouse) -> Counter[str]:
    expected, found = read_history(spark, house.root, str(TABLE)), made_by_sql(spark, house)
    assert found.columns == expected.columns
    assert found.schema.simpleString() == expected.schema.simpleString()
    rows = counted(found)
    assert rows == counted(expected)
    return rows


@dataclass
class Noisy(Source):
    """Also sends texts of values that their type can't hold, and DROP TABLE."""

    def _emit(self, op: str, row: Any, unchanged: list[str] | None = None, old: Any = None) -> None:
        super()._emit(op, row, unchanged, old)
        if op == "truncate" and self.rng.random() < 0.5:
            change = self.changes.pop()
            self.changes.append((*change[:5], "drop", *change[6:]))
        elif op in ("insert", "update", "snapshot") and self.rng.random() < 0.3:
            change = self.changes.pop()
            texts = {"_cdc_old.id": "no"} if op == "update" and old is not None else {}
            texts |= {name: f"text {self.rng.randrange(99)}" for name in ("a", "other") if name not in (unchanged or ())}
            self.changes.append((*change[:2], None, change[3], None, *change[5:-1], texts))


@pytest.mark.parametrize(("seed", "table_format"), [(None, "delta"), pytest.param(2, "parquet", marks=pytest.mark.slow)])
def test_random_changes(spark: Any, tmp_path: Path, seed: int | None, table_format: str) -> None:
    """Keys that change with unsent values, exchanged keys, TRUNCATE, DROP, copies, another table, defaults, unknown rows."""
    chosen = random.randrange(10**6) if seed is None else seed
    print("seed", chosen)
    source = Noisy(random.Random(chosen))
    versions = [Version(0, 0, 7, KEY, KEY)]
    for number in range(100):
        for _ in range(source.rng.randint(1, 4)):
            source.step(8)
        if number % 40 == 39:
            source.truncate()
            source.insert(3)
        if number in (25, 70):  # also amid a transaction
            fills = Fill("a", None, str(number)), Fill("other", None, "\\x00ff")
            versions.append(Version(source.lsn + 1, source.ordinal if number == 70 else 0, 7, KEY, KEY, fills[: number // 25 - 1]))
        if number == 85:
            source.rows.clear()
            source.insert(1)
            versions.append(Version(source.lsn + 1, source.ordinal - 1, 8, KEY, KEY))
        source.commit()
        if number in (30, 60):
            if not source.rows:
                source.insert(0)
                source.commit()
            versions.append(Version(source.snapshot(), 0, 7, KEY, KEY, snapshot=tuple(enumerate(NAMES, 1))))
    house = Warehouse(tmp_path / "warehouse", table_format)
    house.open(EPOCH)
    house.write_versions(TABLE, versions)
    known_since = source.changes[20][7] - 1  # the rows of the first changes are unknown
    add(spark, house, source.changes, known_since, source.lsn + 1)
    rows = assert_same(spark, house)
    assert sum(rows.values()) > 100
    assert any("text" in row for row in rows)
    if seed is not None:
        assert any("'blob']" in row or "'other']" in row for row in rows)  # unknown values are marked


TEXT_KEY = "at timestamp, tags array<string>, n decimal(5,2), word string"


def test_keys_that_are_compared_as_texts(spark: Any, tmp_path: Path) -> None:
    """A key with infinity, an array and a numeric; a chain of updates of the key; a change without a value for the key."""
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(EPOCH)
    key = ("at", "tags", "n")
    house.write_versions(TABLE, [Version(0, 0, 7, key, key)])
    time, schema = datetime(2024, 1, 1, tzinfo=UTC), schema_of(TEXT_KEY)
    infinite = {"at": "infinity", "n": "NaN"}
    keys: list[tuple[Any, ...]] = [(None, ["a,b"], None)]
    keys += [(time + timedelta(microseconds=n), ["a", None], Decimal(n)) for n in range(1, 40)]

    def change(place: int, op: str, values: Sequence[Any], old: Any, exact: Any, unchanged: Any = None) -> tuple[Any, ...]:
        return (*values, op, 1, 10 * place + 1, 0, 1, time + timedelta(seconds=place), unchanged, old, exact)

    changes = [change(1, "insert", (*keys[0], "long"), None, infinite)]
    for place, (before, after) in enumerate(pairwise(keys), 2):
        old = infinite if before is keys[0] else {}
        exact = {f"_cdc_old.{name}": text for name, text in old.items()} or None
        changes.append(change(place, "update", (*after, None), (*before, None), exact, ["word"]))
    append(spark, house, changes, schema, Position(1, 0), Position(1, 1000))
    rows = made_by_sql(spark, house)
    assert assert_same(spark, house).total() == 40
    assert rows.where("word = 'long' and _cdc_unchanged is null").count() == 40
    keyless = change(101, "insert", (None, ["x"], Decimal(1), "keyless"), None, None)
    append(spark, house, [keyless], schema, Position(1, 1000), Position(1, 2000))
    with pytest.raises(Exception, match="no value for the key"):
        made_by_sql(spark, house).collect()


def test_updates_with_a_part_of_the_old_key(spark: Any, tmp_path: Path) -> None:
    """Only the values that the old key has can tell that the key has changed. They do so for the second update."""
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(EPOCH)
    house.write_versions(TABLE, [Version(0, 0, 7, KEY, KEY)])
    changes: list[tuple[Any, ...]] = []
    for place, (key, old, unsent) in enumerate([(1, None, None), (1, (0, None), ["blob"]), (2, (None, 1), ["blob"])], 1):
        time = datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=place)
        old_row = None if old is None else (*old, None, None, None)
        op, blob = ("insert", "long") if unsent is None else ("update", None)
        changes.append((0, key, place, blob, None, op, 1, 10 * place, 0, 1, time, unsent, old_row, None))
    add(spark, house, changes, 0, 100)
    assert_same(spark, house)
    rows = made_by_sql(spark, house).select("id", "a", "blob", "_cdc_unchanged").collect()
    assert sorted(map(tuple, rows)) == [(1, 1, "long", None), (1, 2, "long", None), (2, 3, None, ["blob"])]


@pytest.mark.parametrize("columns", TIME_KEYS)
def test_times_in_the_hour_when_the_clocks_go_back(spark: Any, tmp_path: Path, columns: str) -> None:
    """As text of the session's time zone, two keys would be one."""
    session, house = keys_of_the_hour_that_comes_twice(spark, tmp_path / "warehouse", columns)
    assert made_by_sql(session, house).where("is_current").count() == 2


def test_a_purge_after_the_view_was_made(spark: Any, tmp_path: Path, database: str) -> None:
    """The view begins with the first copy that is left, as `read_history` does; without one there is an error."""
    source = Source(random.Random(3))
    for key in range(4):
        source.insert(key)
        source.commit()
    first_lsn = source.lsn
    copied = source.snapshot()
    versions = [Version(0, 0, 7, KEY, KEY), Version(copied, 0, 7, KEY, KEY, snapshot=tuple(enumerate(NAMES, 1)))]
    source.update(1, 7)
    source.commit()
    end = Position(1, source.lsn + 1)
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(EPOCH)
    house.record(end)
    house.write_versions(TABLE, versions)
    add(spark, house, source.changes, 0, end.lsn)
    merge.bring(spark, house, TABLE, end)
    CatalogDatabase(spark, database, house, history_views=True).register([TABLE])
    view = spark.table(f"{database}.public__t__history")
    whole = counted(view)
    assert whole == counted(read_history(spark, house.root, str(TABLE)))
    purge(spark, house.root, LSN(first_lsn - 1))
    assert purged_changes.last_lsn(house, TABLE) < copied
    left = counted(spark.table(f"{database}.public__t__history"))
    assert left == counted(read_history(spark, house.root, str(TABLE)))
    assert 0 < left.total() < whole.total()
    purge(spark, house.root, LSN(copied + 1))
    for _ in range(2):
        with pytest.raises(Exception, match="old changes were purged"):
            spark.table(f"{database}.public__t__history").collect()
        CatalogDatabase(spark, database, house, history_views=True).register([TABLE])  # the next time, its text tells of the purge
    purge(spark, house.root, LSN(end.lsn))
    assert changelogs_of(spark, house).read(TABLE).isEmpty()
    with pytest.raises(Exception, match="old changes were purged"):
        spark.table(f"{database}.public__t__history").collect()


def test_a_purge_takes_a_copy_from_between_the_appends(spark: Any, tmp_path: Path, database: str) -> None:
    """With Parquet, changes from before a purged copy can be left. They are no part of the history."""
    source = Source(random.Random(4))
    for key in range(4):
        source.insert(key)
        source.commit()
    house = Warehouse(tmp_path / "warehouse", "parquet")
    house.open(EPOCH)
    copies = []
    for _ in range(2):
        copies.append(source.snapshot())
        source.update(1)
        source.commit()
    streamed = [change for change in source.changes if change[5] != "snapshot"]
    versions = [Version(lsn, 0, 7, KEY, KEY, snapshot=tuple(enumerate(NAMES, 1))) for lsn in copies]
    house.write_versions(TABLE, [Version(0, 0, 7, KEY, KEY), *versions])
    add(spark, house, streamed, 0, source.lsn + 1)
    for lsn in copies:
        add_copy(spark, house, source.changes, lsn)
    house.record(Position(1, source.lsn + 1))
    CatalogDatabase(spark, database, house, history_views=True).register([TABLE])
    view = f"{database}.public__t__history"
    whole = counted(spark.table(view))
    assert whole == counted(read_history(spark, house.root, str(TABLE)))
    purge(spark, house.root, LSN(copies[0] + 1))
    assert purged_changes.last_lsn(house, TABLE) == copies[0]
    left = counted(spark.table(view))
    assert left == counted(read_history(spark, house.root, str(TABLE)))
    assert 0 < left.total() < whole.total()


def test_a_copy_that_the_view_does_not_know(spark: Any, tmp_path: Path, database: str) -> None:
    """It may have another key."""
    source = Source(random.Random(1))
    source.insert(1)
    source.commit()
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(EPOCH)
    versions = [Version(0, 0, 7, KEY, KEY)]
    house.write_versions(TABLE, versions)
    add(spark, house, source.changes, 0, source.lsn)
    names = CatalogDatabase(spark, database, house, history_views=True)
    names.register([TABLE])
    start = source.lsn
    versions.append(Version(source.snapshot(), 0, 7, KEY, KEY, snapshot=tuple(enumerate(NAMES, 1))))
    house.write_versions(TABLE, versions)
    add(spark, house, source.changes, start, source.lsn)
    names.register([TABLE])
    with pytest.raises(Exception, match="start cdcpipe-spark run, which makes the view again"):
        spark.table(f"{database}.public__t__history").collect()
    names.forget_histories([TABLE])
    names.register([TABLE])
    assert spark.table(f"{database}.public__t__history").count() == 2


def test_a_text_that_the_catalog_refuses(
    spark: Any, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An older view would be wrong: it is dropped. Everything else goes on."""
    source = Source(random.Random(1))
    source.insert(1)
    source.commit()
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(EPOCH)
    house.write_versions(TABLE, [Version(0, 0, 7, KEY, KEY)])
    add(spark, house, source.changes, 0, source.lsn)
    names = CatalogDatabase(spark, database, house, history_views=True)
    names.register([TABLE])
    assert spark.table(f"{database}.public__t__history").count() == 1
    monkeypatch.setattr(history_views, "view_sql", lambda *_: "select * from nowhere")
    names.forget_histories()
    names.register([TABLE])
    assert not spark.catalog.tableExists(f"{database}.public__t__history")
    assert "public.t has no view with its history: the catalog does not take its text of 21 characters: [TABLE_OR" in caplog.text


INT, TEXT = 23, 25
FRUIT = relation(1, "fruit", ("id", INT), ("name", TEXT))
WIDER = relation(1, "fruit", ("id", INT), ("name", TEXT), ("valid_from", INT))
KEYED_BY_NAME = replace(WIDER, columns=tuple(replace(c, flags=int(c.name == "name")) for c in WIDER.columns))
KEYLESS = relation(4, "keyless", ("id", INT), identity="n")


@pytest.mark.parametrize("table_format", ["delta", pytest.param("parquet", marks=pytest.mark.slow)])
def test_in_the_catalog(
    spark: SparkSession,
    database: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    table_format: str,
) -> None:
    """The view keeps up with the table's columns. It goes before a change is there that it would get wrong."""
    log, root, view = Log(tmp_path / "staging"), tmp_path / "warehouse", f"{database}.public__fruit__history"

    def run(**options: Any) -> None:
        usual = dict[str, Any](format=table_format, catalog_database=database, history="view")
        Pipeline(spark, log.root, root, **usual | options).process_available()

    def check() -> DataFrame:
        found = spark.table(view)
        expected = read_history(spark, root, "public.fruit")
        assert found.columns == expected.columns
        assert counted(found) == counted(expected)
        return found

    with pytest.raises(InvalidArgumentsError, match="--history view"):
        run(catalog_database=None)
    log.segment([FRUIT, into(FRUIT, b"1", b"fig")], [KEYLESS, into(KEYLESS, b"5")])
    run()
    assert check().count() == 1
    assert not spark.catalog.tableExists(f"{database}.public__keyless__history")
    log.segment([FRUIT, Update(None, 1, (b"1", None), None, (b"2", UNCHANGED_TOAST)), into(FRUIT, b"1", b"pear")])
    with monkeypatch.context() as patched:
        patched.setattr(HistoryViews, "_make", lambda *_: pytest.fail("the view still fits"))
        run()
    assert {(row["id"], row["name"]) for row in check().where("is_current").collect()} == {(1, "pear"), (2, "fig")}

    log.segment([WIDER, into(WIDER, b"3", b"plum", b"7")])
    run()
    assert check().where("id = 3").select("valid_from", "to_lsn").first() == (7, None)
    assert "_cdc_valid_from" in check().columns

    seen = []

    def listened(*arguments: Any, **options: Any) -> Any:
        seen.append(spark.catalog.tableExists(view))
        return commit(*arguments, **options)

    commit = MicroBatch._commit
    monkeypatch.setattr(MicroBatch, "_commit", listened)
    log.segment([WIDER, into(WIDER, b"4", b"fig", b"8")])
    run()
    check()
    log.segment([KEYED_BY_NAME, into(KEYED_BY_NAME, b"4", b"kiwi", b"8")])
    for _ in range(2):
        caplog.clear()
        run()
        assert seen == [True, False]
        assert not spark.catalog.tableExists(view)
        [told] = [record.getMessage() for record in caplog.records if "has no view with its history" in record.getMessage()]
        assert told.startswith("public.fruit has no view with its history: its key has changed. read_history in Python has it")

    spark.sql(f"create view {view} as select 1 as theirs")
    caplog.clear()
    run()
    assert spark.table(view).columns == ["theirs"]
    assert f"`{database}`.`public__fruit__history` in the catalog is something else" in caplog.text


def test_without_the_option_an_older_view_is_dropped(spark: SparkSession, database: str, tmp_path: Path) -> None:
    """Nobody would keep it right. A table takes the name of a view.

    Spark's SQL hides a property of a view that has a word like "url" or "token".
    """
    log, options = Log(tmp_path / "staging"), dict[str, Any](catalog_database=database, format="delta")
    log.segment([FRUIT, into(FRUIT, b"1", b"fig")])
    view = f"{database}.public__fruit__history"
    for is_wanted in (True, False, True):
        Pipeline(spark, log.root, tmp_path / "url-tokens", **options, history="view" if is_wanted else "off").process_available()
        assert spark.catalog.tableExists(view) == is_wanted
    same_name = relation(9, "fruit__history", ("id", INT))
    log.segment([same_name, into(same_name, b"1")])
    for _ in range(2):
        Pipeline(spark, log.root, tmp_path / "url-tokens", **options, history="view").process_available()
        assert spark.table(view).columns == ["id"]
        assert spark.table(f"{view}__history").count() == 1
