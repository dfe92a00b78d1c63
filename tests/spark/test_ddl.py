"""Tables that follow captured DDL. The catalog is never asked: the pipeline has no way to do so."""

import itertools
from pathlib import Path
from typing import Any

import postgres
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import sql as delta
from spark_sink.delta.comments import set_comments
from spark_sink.delta.log import TableLog
from spark_sink.pipeline.failures import PipelineError
from spark_sink.pipeline.follower import Follower
from spark_sink.replica import merge
from spark_sink.replica.as_of import read_as_of
from spark_sink.replica.current import read_replica
from spark_sink.schema.table import DDL, Table
from spark_sink.status.report import Tables
from spark_sink.verify.comparison import verify
from spark_sink.warehouse import dropped_tables
from spark_sink.warehouse.warehouse import Warehouse
from support.captured_road import CapturedRoad
from support.snapshots import TableCopies

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
    "create table restored (id int primary key, a int)",
    "create table undone (id int primary key, a int)",
    "create table computed (id int primary key, a int)",
    "create table widened (id int primary key, a int)",
    "create table reprinted (id int primary key, a json)",
]
TABLES = [
    "renamed",
    "defaulted",
    "swapped",
    "again",
    "rekeyed",
    "dropped",
    "remade",
    "restored",
    "undone",
    "computed",
    "widened",
    "reprinted",
]
ROWS = [
    "insert into renamed select i, 'a' || i, 'b' || i from generate_series(1, 3) i",
    "insert into defaulted select generate_series(1, 3)",
    "insert into swapped select i, i, 100 + i from generate_series(1, 3) i",
    "insert into again select i, i from generate_series(1, 3) i",
    "insert into rekeyed select i, 'c' || i, i from generate_series(1, 3) i",
    "insert into dropped select generate_series(1, 3)",
    "insert into remade select i, i from generate_series(1, 3) i",
    "insert into restored select i, i from generate_series(1, 3) i",
    "insert into undone select i, i from generate_series(1, 3) i",
    "insert into computed select i, i from generate_series(1, 3) i",
    "insert into widened select i, i from generate_series(1, 3) i",
    """insert into reprinted values (1, '{"b":1,  "a":2}')""",
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
    # The change of another table stands before the commands, and that of the table right behind them.
    (
        "begin; update defaulted set a = 9 where id = 4;"
        " alter table swapped rename a to x; alter table swapped rename b to a; alter table swapped rename x to b;"
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
    "begin; alter table dropped drop constraint dropped_pkey; drop table dropped; commit",
    (
        "begin; delete from remade where id = 1; drop table remade; create table remade (id int primary key, a int);"
        " insert into remade values (2, 22), (9, 9); commit"
    ),
    # As pg_restore --clean --single-transaction does.
    (
        "begin; alter table restored drop constraint restored_pkey; drop table restored;"
        " create table restored (id int not null, a int); insert into restored values (2, 22), (9, 9);"
        " alter table restored add primary key (id); commit"
    ),
    (
        "begin; savepoint s; alter table undone rename a to b; drop table undone; rollback to s;"
        " insert into undone values (4, 4); commit"
    ),
    "alter table computed alter a type int using a * 2",
    "insert into computed values (4, 4)",
    "alter table widened alter a type bigint",
    "insert into widened values (4, 1::bigint << 40)",
    "alter table reprinted alter a type jsonb",
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
    road.assert_equal("restored", "id", "a")
    road.assert_equal("undone", "id", "a")
    road.assert_equal("widened", "id", "a")
    assert road.replica("public.dropped").count() == 0
    why = "ALTER TABLE computed the values of a column anew"
    assert road.waiting() == {"public.computed": why, "public.reprinted": why}
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
    assert [row["tables"] for row in rewritten] == [["public.computed"], ["public.widened"], ["public.reprinted"]]
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
    ((before,),) = road.query("select clock_timestamp()")
    road.execute("alter table t rename a to b", "alter table keyless add c int default 3", "alter table t add d int default 7")
    road.run(format=table_format)
    road.assert_equal("t", "id", "b", "d")
    found = read_as_of(road.spark, road.warehouse, "public.t", before).select("id", "a", "b", "d").collect()
    assert sorted(map(tuple, found)) == [(1, "x", None, None), (2, "y", None, None)]
    road.execute("alter table t drop b", "update t set d = 8 where id = 1")
    road.run(format=table_format)
    road.assert_equal("t", "id", "d")
    assert road.waiting() == {}


def lsn_of(road: CapturedRoad) -> str:
    ((lsn,),) = road.query("select pg_current_wal_insert_lsn()::text")
    return str(lsn)


def operations(road: CapturedRoad, name: str) -> list[str]:
    """Return the operations of the replica's commits, the newest first. Those without Spark begin with an asterisk."""
    path = road.house.replica(Table("public", name))
    found = road.spark.sql(f"describe history delta.`{path}`").collect()
    return [f"{'*' if row['engineInfo'] == 'cdcpipe' else ''}{row['operation']}" for row in found]


def test_dropped_columns_leave_the_replica(road: CapturedRoad, monkeypatch: Any, caplog: Any) -> None:
    road.execute("create table t (id int primary key, a int, b text, d int)", "alter table t alter b set storage external")
    road.land()
    road.install()
    road.execute("insert into t select i, i, repeat('x', 3000), i from generate_series(1, 3) i")
    road.run(drops_columns=True)
    before = lsn_of(road)
    road.execute("begin; update t set d = 7 where id = 1; alter table t drop a; update t set d = 8 where id = 2; commit")
    road.run(drops_columns=True)
    assert road.replica("public.t").columns == ["id", "b", "d"]
    road.assert_equal("t", "id", "b", "d")
    assert operations(road, "t")[:2] == ["MERGE", "DROP COLUMNS"]
    rows = read_as_of(road.spark, road.warehouse, "public.t", before).select("id", "a").collect()
    assert sorted(map(tuple, rows)) == [(1, 1), (2, 2), (3, 3)]

    # The next merge is an ordinary one again. A column of the same name is another column.
    road.execute("update t set d = 9 where id = 3")
    road.run(drops_columns=True)
    assert operations(road, "t")[0] == "*MERGE"
    between = lsn_of(road)
    road.execute("alter table t add a int default 5", "insert into t values (4, 'y', 4)", "alter table t rename b to c")
    road.run(drops_columns=True)
    assert sorted(road.replica("public.t").columns) == ["a", "c", "d", "id"]
    road.assert_equal("t", "id", "a", "c", "d")
    assert "a" not in read_as_of(road.spark, road.warehouse, "public.t", between).columns

    # A kill between the two commits of a drop, and a copy of the table.
    road.execute("alter table t drop d", "delete from t where id = 4")
    with monkeypatch.context() as patched:
        patched.setattr(merge, "_run_merge", _killed)
        with pytest.raises(PipelineError):
            road.run(drops_columns=True)
    assert sorted(road.replica("public.t").columns) == ["a", "c", "id"]
    road.run(drops_columns=True)
    road.assert_equal("t", "id", "a", "c")
    TableCopies(road.database, road.spark, road.root).snapshot("t")
    assert sorted(road.replica("public.t").columns) == ["a", "c", "id"]
    (equal,) = verify(road.spark, road.warehouse, ("-d", road.database.dsn), tables=["public.t"])
    assert equal.is_equal

    # What is not captured stays, and so does everything without the option.
    road.execute("alter table t drop c")
    road.run()
    assert sorted(road.replica("public.t").columns) == ["a", "c", "id"]
    road.remove()
    road.execute("alter table t drop a", "insert into t values (9)")
    road.run(drops_columns=True)
    assert "table public.t does not have these columns any more, or they are not published: a, c." in caplog.text
    assert sorted(road.replica("public.t").columns) == ["a", "c", "id"]


def _killed(*_: Any) -> None:
    raise ConnectionError


def test_columns_leave_a_view_over_parquet(road: CapturedRoad) -> None:
    road.execute("create table t (id int primary key, a int, b int)")
    road.land()
    road.install()
    road.execute("insert into t values (1, 1, 1)")
    before = lsn_of(road)
    road.execute("alter table t drop a", "alter table t alter b type bigint", "insert into t values (2, 2)")
    road.run(format="parquet", drops_columns=True)
    assert sorted(map(tuple, road.replica("public.t").collect())) == [(1, 1), (2, 2)]
    assert read_as_of(road.spark, road.warehouse, "public.t", before).collect() == [(1, 1, 1, None)]


def test_a_column_that_was_dropped_and_comes_again_is_null(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "t"
    spark.range(1).selectExpr("id", "id as a").write.format("delta").save(str(path))
    delta.drop_columns(spark, path, ["a", "b"])
    present = delta.read(spark, path).schema
    assert present.names == ["id"]
    delta.add_columns(spark, path, present, StructType([StructField("a", LongType())]))
    assert delta.read(spark, path).collect() == [(0, None)]


def comments(road: CapturedRoad, path: Path) -> tuple[str | None, dict[str, str]]:
    """Return the comments of a Delta table, as Spark shows them: its own, and those of its columns."""
    rows = road.spark.sql(f"describe table extended delta.`{path}`").collect()
    columns = {row["col_name"]: row["comment"] for row in itertools.takewhile(lambda row: row["col_name"], rows)}
    (own,) = road.spark.sql(f"describe detail delta.`{path}`").select("description").collect()[0]
    return own, {name: text for name, text in columns.items() if text is not None}


def test_comments_are_comments(road: CapturedRoad) -> None:
    road.execute("create table t (id int primary key, a int, b int)", "comment on column t.b is 'told at the installation'")
    road.land()
    road.install()
    road.execute("insert into t values (1, 1, 1)", "comment on table t is 'it''s'", "comment on column t.a is 'é\n\"a\"'")
    road.run()
    tables = [place(Table("public", "t")) for place in (road.house.changelog, road.house.replica)]
    for path in tables:
        assert comments(road, path) == ("it's", {"a": 'é\n"a"', "b": "told at the installation"})

    # No change of the table follows. No file is written.
    road.execute("comment on table t is null", "comment on column t.b is null", "alter table t rename a to c")
    road.execute("comment on column t.c is 'c'")
    road.run()
    for path in tables:
        assert comments(road, path) == (None, {"c": "c"})
    files = {path: len(TableLog(path).refresh().files) for path in tables}
    road.execute("comment on column t.id is 'the key'")
    road.run()
    for path in tables:
        assert comments(road, path) == (None, {"id": "the key", "c": "c"})
        assert len(TableLog(path).refresh().files) == files[path]
    # A run that was killed before the replica had the comment.
    set_comments(tables[1], None, {})
    road.execute("insert into t values (2, 2, 2)")
    road.run()
    assert comments(road, tables[1]) == (None, {"id": "the key", "c": "c"})
    road.assert_equal("t", "id", "b", "c")


def test_a_drop_is_known_whenever_the_run_ends(road: CapturedRoad, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a table that has lost its key before: the replica is empty."""
    road.execute("create table t (id int primary key)")
    road.land()
    road.install()
    road.execute("insert into t values (1)", "alter table t drop constraint t_pkey")
    road.run()
    assert road.replica("public.t").count() == 1
    road.execute("drop table t")

    def fail(*_: Any) -> None:
        msg = "the disk is full"
        raise OSError(msg)

    with monkeypatch.context() as patched:
        patched.setattr(dropped_tables, "record", fail)
        with pytest.raises(Exception, match="the disk is full"):
            road.run()
    road.run()
    assert [row["dropped"] is not None for row in Tables(road.house).describe() if row["table"] == "public.t"] == [True]
    assert road.replica("public.t").count() == 0


def test_verify_fills_columns_that_the_replica_does_not_have_yet(road: CapturedRoad, monkeypatch: pytest.MonkeyPatch) -> None:
    """ALTER TABLE has no row change, and the changelog has it before the replica."""
    road.execute("create table t (id int primary key, a int)")
    road.land()
    road.install()
    road.execute("insert into t values (1, 10), (2, 20)")
    road.run()
    road.execute("alter table t rename a to b", "alter table t add c int default 5")
    monkeypatch.setattr(Follower, "catch_up", lambda *_: None)
    road.run()
    replica = TableLog(road.house.replica(Table("public", "t"))).refresh()
    assert (replica.lsn or 0) < road.house.versions(Table("public", "t"))[-1].end_lsn
    found = verify(road.spark, road.warehouse, ("-d", road.database.dsn), timeout_s=60)
    assert [(each.is_equal, each.server_rows, each.problem) for each in found] == [(True, 2, None)]
    road.spark.sql(f"update {delta.table_name(road.house.replica(Table('public', 't')))} set a = 11 where id = 1")
    [changed] = verify(road.spark, road.warehouse, ("-d", road.database.dsn), timeout_s=60)
    assert [(each.kind, each.key) for each in changed.differences] == [("changed", {"id": "1"})]
