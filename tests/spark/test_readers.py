"""Programs other than Spark read the tables: the same rows, or an error. docs/spark/readers.md has the result as a table."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import postgres
import pyarrow as pa
import pytest

from spark_sink.delta import sql as delta
from spark_sink.delta.log import TableLog
from spark_sink.pipeline.beginning import less_readable
from spark_sink.schema.table import Table
from spark_sink.verify.comparison import verify
from spark_sink.warehouse.warehouse import Warehouse
from support.other_readers import READERS, comparable
from support.paths import ROOT
from support.road import Road
from support.typed_values import NEWER_TYPES, TYPES

pytestmark = pytest.mark.spark
KINDS = [*TYPES, *NEWER_TYPES]
PAGE = ROOT / "docs/spark/readers.md"


def outcome(reader: str, spark: Any, path: Path) -> str:
    """Tell whether a reader gives a table's rows, refuses the table, or gives other rows."""
    rows = delta.read(spark, path).toArrow()
    try:
        found = READERS[reader](str(path))
    except Exception:  # noqa: BLE001 - each reader has errors of its own
        return "no"
    expected = rows if isinstance(found, pa.Table) else rows.to_pandas()
    return "yes" if comparable(found, rows.schema) == comparable(expected, rows.schema) else "**wrong rows**"


def typed_inserts() -> Iterator[str]:
    number = 0
    for column, (_, _, fit, unfit) in enumerate(KINDS):
        for value in [*fit, *unfit]:
            number += 1
            escaped = value.replace("'", "''")
            yield f"insert into kinds (id, c{column}) values ({number}, '{escaped}')"


TABLES = [
    f"create table kinds (id int primary key, {', '.join(f'c{number} {kind}' for number, (kind, *_) in enumerate(KINDS))})",
    'create table fruit ("fruit.id" int primary key, name text, "the amount" int, gone text)',
    "create publication everything for all tables",
]
FIRST = [
    ";".join(typed_inserts()),
    "insert into fruit select g, 'fruit ' || g, g, 'gone' from generate_series(1, 200) g",
]
LATER = [
    'update fruit set "the amount" = "the amount" + 1 where "fruit.id" % 3 = 0; delete from fruit where "fruit.id" % 50 = 0',
    'alter table fruit add colour text, alter "the amount" type bigint, drop gone',
    """update fruit set colour = 'red', "the amount" = 5000000000 where "fruit.id" % 7 = 0;
       update fruit set "fruit.id" = 1000 where "fruit.id" = 1""",
    "update kinds set id = id + 10000 where id % 5 = 0; delete from kinds where id % 7 = 0",
]


@pytest.fixture(scope="module")
def road(pg18: postgres.Cluster, spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Road]:
    with pg18.database() as database:
        made = Road(database, spark, tmp_path_factory.mktemp("readers"))
        made.execute("set timezone = 'UTC'", *TABLES)
        made.land()
        for statements in (FIRST, LATER):
            made.execute(*statements)
            made.run(readers="any", column_names="sanitize", replica_interval_s=0)
        for path in tables(made):
            spark.sql(f"OPTIMIZE {delta.table_name(path)}").collect()
        yield made


def tables(road: Road) -> list[Path]:
    """Return the replicas and the changelogs."""
    house = Warehouse.existing(road.warehouse)
    return [place(Table("public", name)) for name in ("kinds", "fruit") for place in (house.replica, house.changelog)]


@pytest.mark.parametrize("reader", READERS)
def test_they_have_the_rows_that_spark_has(road: Road, reader: str) -> None:
    for path in tables(road):
        assert outcome(reader, road.spark, path) == "yes", path
        assert delta.read(road.spark, path).count() > 100


def test_the_tables_need_no_feature_that_a_reader_may_lack(road: Road) -> None:
    features = [TableLog(path).refresh().features("readerFeatures") for path in tables(road)]
    assert features == [{"timestampNtz"}, {"timestampNtz"}, set(), set()]
    assert less_readable(Warehouse.existing(road.warehouse)) == {}
    safe = ["_cdc_column_fruit%2Eid", "name", "_cdc_column_the%20amount", "gone", "colour", "_cdc_column_the%20amount__bigint"]
    assert sorted(road.replica("public.fruit").columns) == sorted(safe)
    found = verify(road.spark, road.warehouse, ("-d", road.database.dsn))
    assert [(str(each.table), each.is_equal, each.problem) for each in found] == [
        ("public.fruit", True, None),
        ("public.kinds", True, None),
    ]


FEATURES = {
    "none": "SELECT id, name FROM rows",
    "`timestampNtz`": "SELECT id, timestamp_ntz'2024-01-01' AS at FROM rows",
    "`deletionVectors`": "TBLPROPERTIES ('delta.enableDeletionVectors' = 'true') AS SELECT id, name FROM rows",
    "`columnMapping`": "TBLPROPERTIES ('delta.columnMapping.mode' = 'name') AS SELECT id, name AS `a name` FROM rows",
    "`typeWidening`": "TBLPROPERTIES ('delta.enableTypeWidening' = 'true') AS SELECT id, CAST(id AS SMALLINT) AS amount FROM rows",
}
THEN = {
    "`deletionVectors`": "DELETE FROM {} WHERE id = 7",
    "`typeWidening`": "ALTER TABLE {} ALTER COLUMN amount TYPE INT",
}


@pytest.fixture(scope="module")
def featured(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A table for each feature that a table of ours may have."""
    root = tmp_path_factory.mktemp("features")
    spark.range(1, 100).selectExpr("id", "'fruit' AS name").createOrReplaceTempView("rows")
    paths = {feature: root / str(number) for number, feature in enumerate(FEATURES)}
    for feature, query in FEATURES.items():
        as_query = query if query.startswith("TBL") else f"AS {query}"
        spark.sql(f"CREATE TABLE {delta.table_name(paths[feature])} USING delta {as_query}")
        if feature in THEN:
            spark.sql(THEN[feature].format(delta.table_name(paths[feature]))).collect()
    spark.catalog.dropTempView("rows")
    return paths


def test_the_page_says_which_reader_knows_which_feature(spark: Any, featured: dict[str, Path]) -> None:
    made = ["| reader | " + " | ".join(FEATURES) + " |", "|---" * (len(FEATURES) + 1) + "|"]
    for reader in READERS:
        marks = [outcome(reader, spark, path) for path in featured.values()]
        made.append(f"| {reader} | {' | '.join(marks)} |")
    assert "\n\n" + "\n".join(made) + "\n\n" in PAGE.read_text(), "\n".join(made)


def test_a_warehouse_from_before_goes_on_and_names_what_some_readers_refuse(
    pg18: postgres.Cluster, spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pg18.database() as database:
        road = Road(database, spark, tmp_path, slot=f"s_{database.name}")
        road.execute("create table old (id int primary key, n int)", "create publication everything for all tables")
        road.land()
        road.execute("insert into old values (1, 1), (2, 2)")
        road.run(replica_interval_s=0)
        road.execute('create table new (id int primary key, "unit price" int)', "alter table old alter n type bigint")
        road.execute("insert into new values (1, 5)", "update old set n = 5000000000 where id = 1")
        road.run(replica_interval_s=0)
        caplog.clear()
        road.execute('alter table new add "at night" timestamp', "update new set \"at night\" = '2024-01-01 02:03:04'")
        road.run(readers="any", replica_interval_s=0)
        (warning,) = [record.getMessage() for record in caplog.records if "--readers any" in record.getMessage()]
        assert warning.startswith("--readers any: 4 tables have features from before that some readers refuse: ")
        assert "replica/public.old (deletionVectors, typeWidening)" in warning
        assert "changelog/public.new (columnMapping)" in warning
        road.assert_equal("old", "id", "n")
        road.assert_equal("new", "id", "unit price", "at night")


def test_a_column_that_needs_a_feature_may_come_later(pg18: postgres.Cluster, spark: Any, tmp_path: Path) -> None:
    with pg18.database() as database:
        road = Road(database, spark, tmp_path, slot=f"s_{database.name}")
        road.execute("create table plain (id int primary key, d date)", "create publication everything for all tables")
        road.land()
        road.execute("insert into plain select g, '2024-01-01' from generate_series(1, 5) g")
        road.run(replica_interval_s=0)
        assert road.features("plain") == {"deletionVectors"}
        road.execute(
            'alter table plain add "unit price" int, alter d type timestamp', 'update plain set "unit price" = 7 where id < 3'
        )
        road.run(replica_interval_s=0)
        assert road.features("plain") == {"deletionVectors", "columnMapping", "timestampNtz", "typeWidening"}
        road.assert_equal("plain", "id", "unit price", "d")
