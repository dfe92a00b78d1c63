"""`run --catalog-database` with a Hive metastore (embedded Derby): the names outlive the session, and follow the tables."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import postgres
import pytest

from support.cli_process import SPARK_COMMAND

pytestmark = [pytest.mark.spark, pytest.mark.slow]

READER = """
import json, sys
from pathlib import Path
import psycopg
from spark_sink import LauncherConfig, RunConfig, build_session, run

dsn, conf = sys.argv[1], json.loads(sys.argv[2])
spark = build_session(conf=conf)


def rows(query):
    return [list(row) for row in spark.newSession().sql(query).collect()]


found = [
    rows("show tables in shop"),
    rows("select * from shop.public__fruit order by id"),
    rows("select _cdc_op, id from shop.public__fruit__changelog order by id"),
    rows("select id, name, is_current from shop.public__fruit__history order by id"),
]
with psycopg.connect(dsn, autocommit=True) as connection:
    connection.execute("alter table fruit add colour text default 'red'")
    connection.execute("insert into fruit values (3, 'plum', 'blue')")
    connection.execute("create table veg (id int primary key)")
    connection.execute("insert into veg values (7)")
spark.sql("drop table shop.public__fruit__changelog")
source = LauncherConfig("shop", Path("staging"), ("shop",), connection=("-d", dsn), available_now=True)
run(RunConfig(source, "warehouse", catalog_database="shop", snapshot="never", optimize_interval_s=None, history="view"), spark)
found += [
    rows("select * from shop.public__fruit order by id"),
    rows("describe shop.public__fruit"),
    rows("select _cdc_op, id from shop.public__fruit__changelog order by id"),
    rows("select * from shop.public__veg"),
    rows("show tables in shop"),
    rows("select id, colour, is_current from shop.public__fruit__history order by id"),
]
print(json.dumps(found))
"""


def test_names_outlive_the_session_and_follow_the_tables(database: postgres.Database, tmp_path: Path) -> None:
    conf = {
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": str(tmp_path / "databases"),
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={tmp_path / 'metastore'};create=true",
        # With one compiler the JVM has less room for code, and would say on stdout that it is full.
        "spark.driver.extraJavaOptions": f"-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -Dderby.system.home={tmp_path}",
    }
    with database.connect() as connection:
        connection.execute("create table fruit (id int primary key, name text); create publication shop for all tables")
        connection.execute("select pg_create_logical_replication_slot('shop', 'pgoutput')")
        connection.execute("insert into fruit values (1, 'fig'), (2, 'pear')")
    try:
        arguments = ["-d", database.dsn, "-S", "shop", "--publication", "shop", "--staging", "staging", "--warehouse", "warehouse"]
        arguments += ["--catalog-database", "shop", "--snapshot", "never", "--available-now", "--history", "view"]
        settings = [part for key, value in conf.items() for part in ("--conf", f"{key}={value}")]
        ended = said([*SPARK_COMMAND, "run", *arguments, *settings], tmp_path)
        assert "WARN" not in ended.stderr  # Hive warns of much that is meant
        found: list[list[Any]] = json.loads(said([sys.executable, "-c", READER, database.dsn, json.dumps(conf)], tmp_path).stdout)
    finally:
        with database.connect() as connection:
            connection.execute("select pg_drop_replication_slot('shop')")
    tables, fruit, changes, history, later, columns, changes_later, veg, tables_later, history_later = found
    assert {name for _, name, _ in tables} == {
        "public__fruit",
        "public__fruit__changelog",
        "public__fruit__history",
        "_cdc_schema_history",
    }
    assert fruit == [[1, "fig"], [2, "pear"]]
    assert changes == [["insert", 1], ["insert", 2]]
    assert history == [[1, "fig", True], [2, "pear", True]]
    assert later == [[1, "fig", "red"], [2, "pear", "red"], [3, "plum", "blue"]]
    assert [name for name, _, _ in columns] == ["id", "name", "colour"]
    assert changes_later == [*changes, ["insert", 3]]  # a name that was dropped is there again
    assert veg == [[7]]
    assert {name for _, name, _ in tables_later} - {name for _, name, _ in tables} == {
        "public__veg",
        "public__veg__changelog",
        "public__veg__history",
    }
    assert history_later == [[1, "red", True], [2, "red", True], [3, "blue", True]]


def said(argv: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(argv, cwd=directory, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done
