"""Tables in the catalog of the session, and sessions that another program has made."""

from __future__ import annotations

import shutil
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import VariantType

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.pgoutput.messages import LogicalMessage, Update
from spark_sink.pipeline.catalog import CatalogDatabase
from spark_sink.pipeline.pipeline import Pipeline
from spark_sink.schema.table import Table
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.warehouse import Warehouse
from support.segments import Log, into, relation

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


@pytest.fixture
def database(spark: SparkSession) -> Any:
    name = f"shop_{uuid.uuid4().hex}"
    yield name
    spark.sql(f"drop database if exists {name} cascade")


def names(spark: SparkSession, database: str) -> set[str]:
    # The session's temporary views, which other tests make, are shown in every database.
    return {row["tableName"] for row in spark.sql(f"show tables in {database}").collect() if not row["isTemporary"]}


def test_delta_tables(spark: SparkSession, database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each table gets its names. In any session, SQL shows the rows of the tables."""
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


def test_a_name_of_another_table(spark: SparkSession, database: str, tmp_path: Path) -> None:
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


def test_a_moved_warehouse(spark: SparkSession, database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The names and the views show the tables where they are now. A name of another table that is gone is left alone."""
    log = Log(tmp_path / "staging")
    options: dict[str, Any] = {"catalog_database": database, "json_variants": True, "history": "view"}
    log.segment([DOCS, into(DOCS, b"1", b"{}", None, None)])
    Pipeline(spark, log.root, tmp_path / "warehouse", **options).process_available()
    before = names(spark, database)
    (tmp_path / "warehouse").rename(tmp_path / "moved")
    log.segment([DOCS, into(DOCS, b"2", b"{}", None, None)])
    Pipeline(spark, log.root, tmp_path / "moved", **options).process_available()
    assert names(spark, database) == before
    for name in ("public__docs", "public__docs__changelog", "public__docs__history", "public__docs_variant"):
        assert spark.table(f"{database}.{name}").count() == 2
    assert "something else" not in caplog.text

    spark.sql(f"drop table {database}.public__docs")
    spark.sql(f"create table {database}.public__docs (id int) using delta location '{tmp_path / 'other'}'")
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(WarehouseError, match=f"is not the replica of public.docs, but something else, at {tmp_path / 'other'}"):
        Pipeline(spark, log.root, tmp_path / "moved", **options).process_available()


def test_stored_histories_that_are_not_at_their_place(
    spark: SparkSession, database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The warehouse was moved, or the history was moved away: each run ended with an error of Delta Lake."""
    log, house = Log(tmp_path / "staging"), tmp_path / "moved"

    def run(root: Path, history: str) -> None:
        log.segment([FRUIT, into(FRUIT, b"%d" % log.end_lsn, None)])
        Pipeline(spark, log.root, root, catalog_database=database, history=history).process_available()

    name = f"{database}.public__fruit__history"
    run(tmp_path / "warehouse", "table")
    before = names(spark, database)
    assert "public__fruit__history" in before
    (tmp_path / "warehouse").rename(house)
    run(house, "table")
    assert names(spark, database) == before
    assert spark.table(name).count() == 2
    (house / "history/public.fruit").rename(tmp_path / "away")
    run(house, "table")  # a new history begins
    assert spark.table(name).count() == 3
    shutil.rmtree(house / "history")
    run(house, "view")
    assert spark.sql(f"show create table {name}").first()[0].startswith("CREATE VIEW")
    assert spark.table(name).count() == 4
    assert "something else" not in caplog.text


def test_a_parquet_changelog_is_a_view(spark: SparkSession, database: str, tmp_path: Path) -> None:
    """Its directory's name is a pattern for Spark."""
    log, first = Log(tmp_path / "staging"), tmp_path / "warehouse[1]"
    options: dict[str, Any] = {"format": "parquet", "catalog_database": database}
    log.segment([FRUIT, into(FRUIT, b"1", None)])
    Pipeline(spark, log.root, first, **options).process_available()
    changes = spark.table(f"{database}.public__fruit__changelog")
    assert "_cdc_batch" not in changes.columns
    assert changes.count() == 1
    log.segment([FRUIT_LATER, into(FRUIT_LATER, b"2", None, b"red")])
    first.rename(tmp_path / "moved*[2]")
    Pipeline(spark, log.root, tmp_path / "moved*[2]", **options).process_available()
    assert names(spark, database) == {"public__fruit__changelog", "_cdc_schema_history"}
    assert spark.table(f"{database}._cdc_schema_history").selectExpr("size(columns)").orderBy(1).collect() == [(2,), (3,)]
    found = spark.sql(f"select id, colour from {database}.public__fruit__changelog order by id").collect()
    assert [tuple(row) for row in found] == [(1, None), (2, "red")]


JSON, JSONB, JSON_ARRAY = 114, 3802, 199
DOCS = relation(5, "docs", ("id", INT), ("doc", JSONB), ("list", JSON_ARRAY), ("text", TEXT))
DOCS_LATER = relation(5, "docs", ("id", INT), ("doc", JSONB), ("list", JSON_ARRAY), ("text", TEXT), ("n", INT), ("More", JSON))
DOCS_VARIANT = relation(6, "docs_variant", ("id", INT))


@pytest.mark.parametrize("table_format", ["delta", "parquet"])
def test_json_as_variant(
    spark: SparkSession, database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, table_format: str
) -> None:
    """Views with VARIANT columns. They follow changes of their tables, and give way to a table of the same name."""
    log = Log(tmp_path / "staging")
    described = {"relation_id": 5, "schema": "public", "name": "docs", "primary_key": ["id"]}
    columns = [
        {"name": c.name, "type_id": c.type_id, "type_modifier": -1, "number": n, "missing": None, "is_filled": False}
        for n, c in enumerate(DOCS.columns, 1)
    ]
    table = f"{database}.public__docs" + ("__changelog" if table_format == "parquet" else "")

    def run(**options: Any) -> None:
        Pipeline(
            spark,
            log.root,
            tmp_path / "warehouse",
            format=table_format,
            describe=lambda: [described | {"columns": columns}],
            **{"catalog_database": database, "json_variants": True} | options,
        ).process_available()

    with pytest.raises(InvalidArgumentsError, match="in the catalog"):
        run(catalog_database=None)
    log.segment([DOCS, into(DOCS, b"1", b'{"a": [1.5, 1e400]}', b'{"{\\"b\\": 1}",NULL}', b"[")])
    run()
    found = spark.sql(f"select doc:a[0]::double, list[0]:b::int, list[1], text from {table}_variant").collect()
    assert [tuple(row) for row in found] == [(1.5, 1, None, "[")]
    assert spark.table(table).select("doc").first() == ('{"a": [1.5, 1e400]}',)

    # The stream has not told of it: the catalog does.
    spark.sql(f"drop view {table}_variant")
    shutil.rmtree(tmp_path / "warehouse/changelog/_cdc_schema_history")
    run()
    assert spark.table(f"{table}_variant").schema["doc"].dataType == VariantType()

    log.segment([DOCS_LATER, into(DOCS_LATER, b"2", b"1", None, b"]", b"3", b'{"k": 1, "k": 2}')])
    run()
    view = spark.sql(f"select n, text, doc::int, `More` from {table}_variant where id = 2")
    with pytest.raises(Exception, match="MALFORMED_RECORD"):
        view.collect()
    # A view goes by the settings of the session that made it.
    spark.conf.set("spark.sql.variant.allowDuplicateKeys", "true")
    try:
        run()
    finally:
        spark.conf.unset("spark.sql.variant.allowDuplicateKeys")
    n, text, doc, more = spark.sql(f"select n, text, doc::int, to_json(`More`) from {table}_variant where id = 2").first()
    assert (n, text, doc, more) == (3, "]", 1, '{"k":2}')

    # Somebody else's is left alone; a table has its name, whoever had it.
    view = f"{table}_variant"
    spark.sql(f"drop view {view}")
    spark.sql(f"create view {view} as select 1 as theirs")
    run()
    assert spark.table(view).columns == ["theirs"]
    assert f"{view} in the catalog is something else" in caplog.text
    if table_format == "delta":
        spark.sql(f"drop view {view}")
        run()
        log.segment([DOCS_VARIANT, into(DOCS_VARIANT, b"8")])
        caplog.clear()
        for _ in range(2):
            run()
            assert spark.table(view).first() == (8,)
            assert f"{view} in the catalog is something else" in caplog.text


def test_a_view_with_variants_goes_with_the_json(spark: SparkSession, database: str, tmp_path: Path) -> None:
    """Reads of it failed: it parsed what is no json any more."""
    log, table = Log(tmp_path / "staging"), f"{database}.public__docs"
    views = {"public__docs_variant", "public__docs__changelog_variant"}

    def run(type_id: int, value: bytes, *, json_variants: bool = True) -> set[str]:
        docs = relation(5, "docs", ("id", INT), ("doc", type_id))
        log.segment([docs, into(docs, b"%d" % log.end_lsn, value)])
        Pipeline(
            spark, log.root, tmp_path / "url-tokens", catalog_database=database, json_variants=json_variants
        ).process_available()
        assert spark.table(table).where(f"doc = '{value.decode()}'").count() > 0
        return names(spark, database) & views

    assert run(JSONB, b"[1]") == views
    assert run(TEXT, b"no json") == set()
    assert run(JSONB, b"[2]") == views
    assert run(JSONB, b"[3]", json_variants=False) == set()


def test_a_database_of_another_catalog(spark: SparkSession, database: str, tmp_path: Path) -> None:
    """A catalog of the session, by its name. For an unknown catalog, Spark raises its error."""
    made = CatalogDatabase(spark, f"spark_catalog.{database}", Warehouse(tmp_path, "delta"))
    made.register([Table("public", "not_there_yet")])
    assert spark.catalog.databaseExists(database)
    assert names(spark, database) == set()
    with pytest.raises(Exception, match="nowhere"):
        CatalogDatabase(spark, f"nowhere.{database}", Warehouse(tmp_path, "delta"))
