"""Tables that follow captured DDL. The catalog is never asked: the pipeline has no way to do so."""

from pathlib import Path
from typing import Any

import postgres
import pytest

from spark_sink.changelog.tables import changelogs_of
from spark_sink.replica.current import read_replica
from spark_sink.schema.table import DDL
from spark_sink.status.report import Tables
from spark_sink.verify.comparison import verify
from spark_sink.warehouse.warehouse import Warehouse
from support.captured_road import CapturedRoad

pytestmark = pytest.mark.spark


@pytest.fixture
def road(database: postgres.Database, spark: Any, tmp_path: Path) -> CapturedRoad:
    made = CapturedRoad(database, spark, tmp_path)
    made.execute("create publication everything for all tables")
    return made


BEFORE = [
    "create table renamed (id int primary key, a text, b text)",
    "create table defaulted (id int primary key)",
    "create table swapped (id int primary key, a int, b int)",
    "create table again (id int primary key, a int)",
    "create table rekeyed (id int primary key, code text not null unique, v int)",
    "alter table rekeyed replica identity full",
    "create table dropped (id int primary key)",
    "create table remade (id int primary key, a int)",
    "create table undone (id int primary key, a int)",
    "create table computed (id int primary key, a int)",
    "create table widened (id int primary key, a int)",
]
TABLES = ["renamed", "defaulted", "swapped", "again", "rekeyed", "dropped", "remade", "undone", "computed", "widened"]
ROWS = [
    "insert into renamed select i, 'a' || i, 'b' || i from generate_series(1, 3) i",
    "insert into defaulted select generate_series(1, 3)",
    "insert into swapped select i, i, 100 + i from generate_series(1, 3) i",
    "insert into again select i, i from generate_series(1, 3) i",
    "insert into rekeyed select i, 'c' || i, i from generate_series(1, 3) i",
    "insert into dropped select generate_series(1, 3)",
    "insert into remade select i, i from generate_series(1, 3) i",
    "insert into undone select i, i from generate_series(1, 3) i",
    "insert into computed select i, i from generate_series(1, 3) i",
    "insert into widened select i, i from generate_series(1, 3) i",
]
CHANGES = [
    (
        "begin; update renamed set b = 'new' where id = 1; alter table renamed rename a to c; alter table renamed rename b to a;"
        " insert into renamed values (4, 'x', 'y'); commit"
    ),
    # The default is gone, and the table was written anew, before the first change: the catalog does not know the value any more.
    "alter table defaulted add a int default 7, add b text default 'it''s'",
    "alter table defaulted alter a set default 8",
    "alter table defaulted alter b drop default",
    "vacuum full defaulted",
    "insert into defaulted (id) values (4)",
    (
        "begin; alter table swapped rename a to x; alter table swapped rename b to a; alter table swapped rename x to b;"
        " insert into swapped values (4, 4, 104); commit"
    ),
    # The same description before and after.
    "begin; alter table again drop a; alter table again add a int; commit; insert into again values (4, 4)",
    # The stream does not name the key.
    (
        "begin; delete from rekeyed where id = 3; alter table rekeyed drop constraint rekeyed_pkey;"
        " alter table rekeyed add primary key (code); update rekeyed set id = 50, v = 50 where code = 'c1';"
        " insert into rekeyed values (50, 'c9', 9); commit"
    ),
    "alter table rekeyed drop constraint rekeyed_pkey",
    "alter table rekeyed add primary key (code)",
    "drop table dropped",
    (
        "begin; delete from remade where id = 1; drop table remade; create table remade (id int primary key, a int);"
        " insert into remade values (2, 22), (9, 9); commit"
    ),
    (
        "begin; savepoint s; alter table undone rename a to b; drop table undone; rollback to s;"
        " insert into undone values (4, 4); commit"
    ),
    "alter table computed alter a type int using a * 2",
    "insert into computed values (4, 4)",
    "alter table widened alter a type bigint",
    "insert into widened values (4, 1::bigint << 40)",
]


def test_tables_follow(road: CapturedRoad) -> None:
    road.execute(*BEFORE)
    road.land()
    road.install()
    road.execute(*ROWS)
    road.run()
    road.execute(*CHANGES)
    road.run()

    road.assert_equal("renamed", "id", "c", "a")
    road.assert_equal("defaulted", "id", "a", "b")
    road.assert_equal("swapped", "id", "a", "b")
    road.assert_equal("again", "id", "a")
    road.assert_equal("rekeyed", "id", "code", "v")
    road.assert_equal("remade", "id", "a")
    road.assert_equal("undone", "id", "a")
    road.assert_equal("widened", "id", "a")
    assert road.replica("public.dropped").count() == 0
    assert road.waiting() == {"public.computed": "ALTER TABLE computed the values of a column anew"}
    (gone,) = verify(road.spark, road.warehouse, ("-d", road.database.dsn), tables=["public.dropped"])
    assert (gone.is_equal, gone.replica_rows, gone.problem) == (True, 0, None)

    ops = [row["_cdc_op"] for row in road.changelog("public", "dropped").orderBy("_cdc_end_lsn", "_cdc_ordinal").collect()]
    assert ops == ["insert"] * 3 + ["drop"]
    ops = [row["_cdc_op"] for row in road.changelog("public", "remade").where("_cdc_op in ('drop', 'delete')").collect()]
    assert sorted(ops) == ["delete", "drop"]
    dropped = {row["table"]: row["dropped"] for row in Tables(road.house).describe()}
    assert {name for name, position in dropped.items() if position} == {"public.dropped"}

    # Every message is there once, also after a replay of the log from its beginning.
    rows = changelogs_of(road.spark, road.house).read(DDL)
    kinds = {row["kind"]: row["count"] for row in rows.groupBy("kind").count().collect()}
    assert kinds["installed"] == 1
    rewritten = rows.where("kind = 'rewrite'").orderBy("_cdc_lsn").collect()
    assert [row["tables"] for row in rewritten] == [["public.computed"], ["public.widened"]]
    statements = [row["statement"] for row in rows.where("kind = 'command'").orderBy("_cdc_lsn").collect()]
    assert CHANGES[2] in statements
    assert not any("undone" in row["content"] for row in rows.where("kind <> 'installed'").select("content").collect())
    count = rows.count()
    again = road.root / "again"
    road.pipeline(again).process_available()
    assert changelogs_of(road.spark, Warehouse.existing(again)).read(DDL).count() == count
    for name in TABLES:
        first, second = (read_replica(road.spark, house, f"public.{name}") for house in (road.warehouse, again))
        assert sorted(map(str, first.collect())) == sorted(map(str, second.select(first.columns).collect())), name


@pytest.mark.parametrize("table_format", ["delta", "parquet"])
def test_a_command_counts_without_a_change_after_it(road: CapturedRoad, table_format: str) -> None:
    road.execute("create table t (id int primary key, a text)", "create table keyless (a text)")
    road.land()
    road.install()
    road.execute("insert into t values (1, 'x'), (2, 'y')", "insert into keyless values ('z')")
    road.run(format=table_format)
    road.execute("alter table t rename a to b", "alter table keyless add c int default 3", "alter table t add d int default 7")
    road.run(format=table_format)
    road.assert_equal("t", "id", "b", "d")
    road.execute("alter table t drop b", "update t set d = 8 where id = 1")
    road.run(format=table_format)
    road.assert_equal("t", "id", "d")
    assert road.waiting() == {}
