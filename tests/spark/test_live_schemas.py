"""Tables that change while their changes stream."""

import re
import threading
from pathlib import Path
from typing import Any

import postgres
import pytest

from cdcpipe.lsn import LSN
from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import log as delta_log
from spark_sink.launcher.config import LauncherConfig
from spark_sink.launcher.launcher import Launcher
from spark_sink.pipeline.pipeline import Pipeline
from spark_sink.pipeline.published_now import PublishedNow
from spark_sink.schema.table import SCHEMA_HISTORY, Table
from spark_sink.staging.filler import SealPolicy
from spark_sink.staging.log import Position, list_epochs
from spark_sink.staging.readers import register_reader
from spark_sink.warehouse.warehouse import Warehouse
from support.road import Road
from support.waiting import SPARK_DEADLINE_S, until

KINDS = ("full",)


def transaction(statements: str) -> str:
    return f"begin; {statements}; commit"


MADE = [
    "create table mark (n int)",
    "create schema other",
    *(
        statement.format(t=f"grows_{which}")
        for which in KINDS
        for statement in (
            """create table {t} (id smallint primary key, other int not null, n int, f real, p numeric(8, 2), d date, i int,
               plain text)""",
            "alter table {t} alter plain set storage external",
            f"alter table {{t}} replica identity {which}",
        )
    ),
    "create table narrowed (id bigint primary key, n bigint, f double precision, t text)",
    "create table columned (id int primary key, a int, b text, c date, gone text)",
    "alter table columned alter b set storage external",
    "create table rekeyed (id int primary key, code text not null unique, v int)",
    "create table turned (id int primary key, code text not null unique, v int)",
    "create table silent (id int primary key, code text not null unique, v int)",
    "alter table silent replica identity full",
    "create table deferred (id int primary key deferrable, v int)",
    "alter table deferred replica identity full",
    "create table late (x int)",
    "alter table late replica identity full",
    "create table remade (id int primary key, a text)",
    "create table moved (id int primary key, a text)",
]
BEFORE = [
    *(
        f"""insert into grows_{which} select i, i, 1000 * i, 0.1 * i, 1.1 * i, '2024-02-29'::date + i, i, repeat('x', 5000)
            from generate_series(1, 9) i"""
        for which in KINDS
    ),
    "insert into narrowed select i, i, i / 2.0, i::text from generate_series(1, 5) i",
    """insert into columned select i, i, repeat('x', 5000), case i when 2 then '0044-03-15 BC' else '2024-02-29'::date end, 'gone'
       from generate_series(1, 5) i""",
    "insert into rekeyed select i, 'c' || i, i from generate_series(1, 5) i",
    "insert into turned select i, 'c' || i, i from generate_series(1, 5) i",
    "insert into silent select i, 'c' || i, i from generate_series(1, 5) i",
    "insert into deferred select i, i from generate_series(1, 9) i",
    "insert into late values (1), (2)",
    "insert into remade values (1, 'of the first table'), (2, 'too')",
    "insert into moved values (1, 'before'), (2, 'before')",
]
DURING = [
    *(
        statement.format(t=f"grows_{which}")
        for which in KINDS
        for statement in (
            transaction(
                """update {t} set n = n + 1 where id = 1; delete from {t} where id = 2;
                alter table {t} alter id type bigint, alter n type bigint, alter f type double precision,
                    alter p type numeric(20, 4), alter d type timestamp, alter i type numeric(12, 2);
                update {t} set n = 1::bigint << 40, f = 0.1, p = 123456789.1234, d = '2024-01-01 01:02:03.5', i = 1.5 where id = 3;
                insert into {t} (id, other, n, f, i) values (1000000, 100, 1, 1.5, 2.5);
                update {t} set id = 2000000 where id = 4"""
            ),
            "update {t} set d = 'infinity', p = 'NaN' where id = 5",
            "delete from {t} where id in (5, 6)",
            "update {t} set n = 3 where id = 3",
            "alter table {t} alter n type int",
            "update {t} set n = 7 where id = 7",
        )
    ),
    "alter table narrowed alter n type smallint, alter f type int, alter t type int using t::int",
    "update narrowed set n = 10, f = 11, t = 12 where id = 1",
    "insert into narrowed values (6, 6, 6, 6)",
    # New names, names that change places, and columns with something in rows that nobody wrote.
    transaction(
        """insert into columned values (6, 6, 'b6', '2024-01-01', 'gone'); alter table columned rename b to bb;
        update columned set a = 10 where id = 1; alter table columned add d int default 7, add e text;
        insert into columned values (7, 7, 'b7', null, 'gone', 8, 'e')"""
    ),
    # The key, between two rows; what was one row by the old key are two by the new one.
    transaction(
        """update rekeyed set v = 10 where id = 1; alter table rekeyed drop constraint rekeyed_pkey;
        alter table rekeyed add primary key (code); insert into rekeyed values (1, 'again', 1);
        update rekeyed set v = 20 where code = 'c1'; delete from rekeyed where code = 'c2';
        update rekeyed set code = 'new' where code = 'c3'"""
    ),
    "update rekeyed set id = 7 where code = 'again'",
    # The same where the stream does not tell the key: its description is sent again, and is the one before.
    "alter table silent drop constraint silent_pkey",
    "alter table silent add primary key (code)",
    "insert into silent values (1, 'again', 1)",
    "update silent set id = 1, v = 40 where code = 'c4'",
    "delete from silent where code = 'c1'",
    # Rows that have the same key for a moment, which so is none.
    "update deferred set id = 10 - id",
    # Identities, one after the other.
    transaction(
        """update turned set v = 1 where id = 1; alter table turned replica identity full; update turned set v = 2 where id = 2;
        alter table turned replica identity using index turned_code_key; update turned set code = 'x3' where id = 3;
        alter table turned replica identity default; update turned set id = 40 where id = 4"""
    ),
    "alter table turned replica identity full",
    "update turned set v = 5, id = 50 where id = 5",
    transaction(
        """insert into remade values (3, 'dropped too'); drop table remade; create table remade (code text primary key, b int);
        insert into remade values ('of the second table', 1)"""
    ),
    # A key that what was written before can't have.
    "alter table late add id int generated always as identity primary key",
    "update late set x = 10 where id = 1",
    "insert into late values (3)",
    # A new table, whose key the stream does not tell.
    transaction(
        """create table added (id int primary key, a text); alter table added replica identity full;
        insert into added values (1, 'a'); alter table added add b int default 5; insert into added values (2, 'b', 6)"""
    ),
    "update added set a = 'changed' where id = 1",
    "alter table moved rename to renamed",
    "alter table renamed set schema other",
    "update other.renamed set a = 'after' where id = 1",
]
AFTER = [
    "alter table columned rename a to x",
    "alter table columned rename d to a",
    "alter table columned rename x to d",
    "alter table columned add w int default random()",  # writes the rows anew
    "alter table columned drop gone, add gone text default 'late', add noted timestamp default '2024-01-01 12:00'",
    "update columned set c = null where id = 3",
    "insert into columned (id) values (8)",
]
# The same name again, after a change without it: what rows have from before is another column's. In one wave, the micro-batch with
# the first change could find the second column e in the catalog.
WITHOUT_E = ["alter table columned drop e", "update columned set c = null where id = 8"]
WITH_ANOTHER_E = ["alter table columned add e text", "update columned set e = 'new' where id = 8"]
GROWN = "struct<id:bigint,other:int,n:bigint,f:double,p:decimal(20,4),d:timestamp_ntz,i:decimal(12,2),plain:string>"
COLUMNS = {
    "rekeyed": ("id", "code", "v"),
    "turned": ("id", "code", "v"),
    "silent": ("id", "code", "v"),
    "remade": ("code", "b"),
    "added": ("id", "a", "b"),
}


def history_of(spark: Any, warehouse: Path) -> list[tuple[Any, ...]]:
    """Return the versions in order. Each column has its name, its type, and whether it belongs to the key."""
    rows = (
        changelogs_of(spark, Warehouse.existing(warehouse)).read(SCHEMA_HISTORY).orderBy("_cdc_end_lsn", "_cdc_ordinal").collect()
    )
    names = ("table_schema", "table_name", "relation_id", "replica_identity", "_cdc_epoch", "_cdc_end_lsn", "_cdc_ordinal")
    return [(*(row[name] for name in names), [(c["name"], c["type"], c["is_key"]) for c in row["columns"]]) for row in rows]


@pytest.mark.spark
def test_tables_change_under_a_running_pipeline(
    database: postgres.Database, spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    road = Road(database, spark, tmp_path)
    road.execute(*MADE)
    road.publish()
    config = LauncherConfig(
        slot=road.slot,
        staging=road.staging,
        publications=(road.publication,),
        connection=("-d", database.dsn),
        create_slot=True,
        seal=SealPolicy(seal_interval_s=0.2),
    )
    with Launcher(config):
        until(lambda: road.staging.exists() and bool(list_epochs(road.staging)), deadline_s=SPARK_DEADLINE_S)
        register_reader(road.staging, "test", Position(0, 0))
        describe = PublishedNow(config, threading.Event()).describe
        with Pipeline(spark, road.staging, road.warehouse, describe=describe, trigger_interval_s=0.2) as pipeline:
            for wave in (BEFORE, DURING, AFTER, WITHOUT_E, WITH_ANOTHER_E):
                road.execute(*wave)
                end = LSN.parse(road.query("select pg_current_wal_insert_lsn()::text")[0][0])
                road.execute("insert into mark values (1)")
                until(lambda end=end: not pipeline.wait(0.01) and pipeline.progress.position.lsn >= end, deadline_s=600)
    streamed = caplog.text
    Pipeline(spark, road.staging, tmp_path / "parquet", format="parquet", describe=describe).process_available()

    for which in KINDS:
        road.assert_equal(f"grows_{which}", "id", "other", "n", "f", "p", "d", "i", "plain")
        rows, changes = road.replica(f"public.grows_{which}"), road.changelog("public", f"grows_{which}")
        assert rows.drop("_cdc_exact").schema.simpleString() == GROWN
        assert changes.schema["_cdc_old"].dataType.simpleString() == GROWN
        found = (
            changes.orderBy("_cdc_end_lsn", "_cdc_ordinal").where("_cdc_op = 'update'").select("id", "n", "_cdc_exact").collect()
        )
        assert [tuple(row) for row in found] == [
            (1, 1001, {}), (3, 1 << 40, {}), (2000000, 4000, {}), (5, 5000, {"p": "NaN", "d": "infinity"}), (3, 3, {}), (7, 7, {}),
        ]  # fmt: skip
    old = (
        road.changelog("public", "grows_full").where("_cdc_op = 'update' and id = 3").selectExpr("_cdc_old.n", "string(_cdc_old.f)")
    )
    assert sorted(map(tuple, old.collect())) == [(3000, "0.30000001192092896"), (1 << 40, "0.1")]

    road.assert_equal("columned", "id", "a", "bb", "d", "e", "gone", "noted")
    exact = road.replica("public.columned").where("c is null").select("id", "_cdc_exact").collect()
    assert {row["id"]: row["_cdc_exact"] for row in exact} == {2: {"c": "0044-03-15 BC"}, 3: None, 7: None, 8: None}
    rows = road.replica("public.narrowed").where("id in (1, 5, 6)").selectExpr("id", "n", "f", "t", "f__int", "t__int").collect()
    assert sorted(map(tuple, rows)) == [(1, 10, None, None, 11, 12), (5, 5, 2.5, "5", None, None), (6, 6, None, None, 6, 6)]
    for warehouse in (road.warehouse, tmp_path / "parquet"):
        for name in ("rekeyed", "turned", "silent", "remade", "added"):
            road.assert_equal(name, *COLUMNS[name], warehouse=warehouse)
    assert sorted(map(tuple, road.replica("public.late").collect())) == [(3, 3), (10, 1)]
    rows = road.replica("other.renamed").collect()
    assert [tuple(row) for row in rows] == [(1, "after")]

    assert "get a changelog and no replica: public.deferred;" in streamed
    assert not delta_log.exists(Warehouse.existing(road.warehouse).replica(Table("public", "deferred")))

    assert "the replica had already" not in streamed
    told = set(re.findall(r"table (\S+) has (new columns: [\w, ]+)|column (\w+): its new|(\S+ was renamed from [\w.]+):", streamed))
    assert {"".join(groups) for groups in told} == {
        "public.addednew columns: b", "public.columnednew columns: w", "public.latenew columns: id",
        "f", "t", "other.renamed was renamed from public.moved",
    }  # fmt: skip
    history = history_of(spark, road.warehouse)
    assert [(version[3], version[7]) for version in history if version[1] == "rekeyed"] == [
        ("default", [("id", "integer", True), ("code", "text", False), ("v", "integer", False)]),
        ("default", [("id", "integer", False), ("code", "text", True), ("v", "integer", False)]),
    ]
    assert [version[3] for version in history if version[1] == "turned"] == ["default", "full", "index", "default", "full"]
    assert len({version[4:7] for version in history}) == len(history)
    assert history_of(spark, tmp_path / "parquet") == history
