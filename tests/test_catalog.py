"""Tables in the session's catalog, and sessions that somebody else made."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from segments import Log, relation

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.pgoutput.messages import Insert, LogicalMessage, Update
from spark_sink.catalog import CatalogDatabase, parse_database
from spark_sink.pipeline import Pipeline
from spark_sink.warehouse import Table, Warehouse, WarehouseError

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

INT, TEXT, TIMESTAMPTZ = 23, 25, 1184
FRUIT = relation(1, "fruit", ("id", INT), ("at", TIMESTAMPTZ))
FRUIT_LATER = relation(1, "fruit", ("id", INT), ("at", TIMESTAMPTZ), ("colour", TEXT))
ODD = relation(2, "Größe.x", ("id", INT))
ODD_TOO = relation(3, "gr__e_x", ("id", INT))
KEYLESS = relation(4, "keyless", ("id", INT), identity="n")


def into(rel: Any, *row: bytes | None) -> Insert:
    return Insert(None, rel.relation_id, row)


@pytest.fixture
def database(spark: SparkSession) -> Any:
    name = f"shop_{uuid.uuid4().hex}"
    yield name
    spark.sql(f"drop database if exists {name} cascade")


def names(spark: SparkSession, database: str) -> set[str]:
    # The session's temporary views, which other tests make, are shown in every database.
    return {row["tableName"] for row in spark.sql(f"show tables in {database}").collect() if not row["isTemporary"]}


def test_delta_tables(spark: SparkSession, database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Names come with the tables; what they show is what is in the tables, by SQL, in any session."""
    log = Log(tmp_path / "staging")
    log.segment(
        [FRUIT, into(FRUIT, b"1", b"2025-01-01 12:00:00+00"), LogicalMessage(None, 1, 0x1050, "p", b"said")],
        [KEYLESS, into(KEYLESS, b"5")],
    )
    # A notebook's session: settings of its own, which are not those that suit.
    notebook = spark.newSession()
    for key, value in {"session.timeZone": "America/New_York", "caseSensitive": "true", "ansi.enabled": "false"}.items():
        notebook.conf.set(f"spark.sql.{key}", value)

    def run() -> None:
        Pipeline(notebook, log.root, tmp_path / "warehouse", catalog_database=database).process_available()

    run()
    assert "is in memory" in caplog.text
    assert names(spark, database) == {
        "_cdc_message",
        "_cdc_schema_history",
        "public__fruit",
        "public__fruit__changelog",
        "public__keyless__changelog",
    }
    assert spark.table(f"{database}._cdc_schema_history").count() == 2
    assert [tuple(row) for row in spark.sql(f"select id, string(at) from {database}.public__fruit").collect()] == [
        (1, "2025-01-01 12:00:00")
    ]
    assert spark.table(f"{database}.public__fruit__changelog").first()["_cdc_commit_time"].astimezone(UTC) == datetime(
        2025, 1, 1, tzinfo=UTC
    )
    assert spark.sql(f"select string(content) from {database}._cdc_message").first()[0] == "said"

    log.segment(
        [FRUIT_LATER, Update(None, 1, None, None, (b"1", b"2025-01-02 12:00:00+00", b"red")), ODD, into(ODD, b"7")],
    )
    spark.sql(f"drop table {database}.public__fruit")
    run()  # what is there is named again, what is new is named
    assert {"public__gr__e_x", "public__gr__e_x__changelog"} <= names(spark, database)
    assert spark.sql(f"select string(at), colour from {database}.public__fruit").first() == ("2025-01-02 12:00:00", "red")
    assert spark.table(f"{database}.public__gr__e_x").first() == (7,)

    log.segment([ODD_TOO, into(ODD_TOO, b"1")])
    for _ in range(2):  # with the change, and then at the start
        with pytest.raises(
            WarehouseError, match=rf"of public\.(\S+) and .* of public\.(\S+) would both be {database}\.public__gr__e_x"
        ):
            run()


def test_a_name_that_something_else_has(spark: SparkSession, database: str, tmp_path: Path) -> None:
    log = Log(tmp_path / "staging")
    log.segment([FRUIT, into(FRUIT, b"1", None)])
    other = tmp_path / "other"
    spark.sql(f"create database {database}")
    spark.sql(f"create table {database}.public__fruit (id int) using delta location '{other}'")
    with pytest.raises(
        WarehouseError, match=rf"public__fruit in the catalog is not the replica of public\.fruit, but .* at {other}$"
    ):
        Pipeline(spark, log.root, tmp_path / "warehouse", catalog_database=database).process_available()
    assert spark.table(f"{database}.public__fruit").isEmpty()
    spark.sql(f"drop table {database}.public__fruit")
    spark.sql(f"create view {database}.public__fruit as select 'delta' as id")
    with pytest.raises(WarehouseError, match="but something else"):
        Pipeline(spark, log.root, tmp_path / "warehouse", catalog_database=database).process_available()
    spark.sql(f"drop view {database}.public__fruit")
    Pipeline(spark, log.root, tmp_path / "warehouse", catalog_database=database).process_available()
    assert spark.table(f"{database}.public__fruit").count() == 1


def test_a_parquet_changelog_is_a_view(spark: SparkSession, database: str, tmp_path: Path) -> None:
    log = Log(tmp_path / "staging")
    options: dict[str, Any] = {"format": "parquet", "catalog_database": database}
    log.segment([FRUIT, into(FRUIT, b"1", None)])
    Pipeline(spark, log.root, tmp_path / "warehouse", **options).process_available()
    changes = spark.table(f"{database}.public__fruit__changelog")
    assert "_cdc_batch" not in changes.columns
    assert changes.count() == 1
    log.segment([FRUIT_LATER, into(FRUIT_LATER, b"2", None, b"red")])
    Pipeline(spark, log.root, tmp_path / "warehouse", **options).process_available()
    assert names(spark, database) == {"public__fruit__changelog", "_cdc_schema_history"}
    assert spark.table(f"{database}._cdc_schema_history").selectExpr("size(columns)").orderBy(1).collect() == [(2,), (3,)]
    found = spark.sql(f"select id, colour from {database}.public__fruit__changelog order by id").collect()
    assert [tuple(row) for row in found] == [(1, None), (2, "red")]


@pytest.mark.parametrize("name", ["", ".", "a.", ".b", "a.b.c"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(InvalidArgumentsError, match="--catalog-database takes"):
        parse_database(name)


def test_a_database_of_another_catalog(spark: SparkSession, database: str, tmp_path: Path) -> None:
    """The session's own, by its name; one that is not there is Spark's error."""
    made = CatalogDatabase(spark, f"spark_catalog.{database}", Warehouse(tmp_path, "delta"))
    made.register([Table("public", "not_there_yet")])
    assert spark.catalog.databaseExists(database)
    assert names(spark, database) == set()
    with pytest.raises(Exception, match="nowhere"):
        CatalogDatabase(spark, f"nowhere.{database}", Warehouse(tmp_path, "delta"))
