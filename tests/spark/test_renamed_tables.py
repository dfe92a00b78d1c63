"""Tables that PostgreSQL renames go on in their tables, under the new names, if the DDL is captured. No table is copied anew."""

from pathlib import Path
from typing import Any

import postgres
import pytest

import spark_sink
from cdcpipe.errors import CdcpipeError
from spark_sink.changelog import writer as segment_writer
from spark_sink.changelog.tables import changelogs_of
from spark_sink.client.exported import SnapshotError
from spark_sink.replica.as_of import read_as_of
from spark_sink.replica.current import register_views
from spark_sink.status.report import Tables
from spark_sink.verify.comparison import verify
from spark_sink.warehouse.warehouse import Warehouse
from support.captured_road import CapturedRoad
from support.snapshots import TableCopies

pytestmark = pytest.mark.spark


@pytest.fixture
def road(database: postgres.Database, spark: Any, tmp_path: Path) -> CapturedRoad:
    made = CapturedRoad(database, spark, tmp_path)
    made.execute("create publication everything for all tables with (publish_via_partition_root)")
    return made


def rows(table: str, first: int = 1, last: int = 3) -> str:
    return f"insert into {table} select i, '{table} ' || i from generate_series({first}, {last}) i"


PLAIN = ["one", "other", "old", "brief", "undone", "back", "quiet", "moved", "s1.inside", "columns", "full_identity"]
BEFORE = [
    "create schema s1",
    *(f"create table {name} (id int primary key, v text)" for name in PLAIN),
    "create table keyless (id int, v text)",
    "create table parts (id int primary key, v text) partition by range (id)",
    "create table low partition of parts for values from (0) to (100)",
    "create table high partition of parts for values from (100) to (200)",
    "alter table full_identity replica identity full",
]
FIRST = [
    # Two tables change their names; changes come before, between and after.
    (
        f"begin; {rows('one', 4, 4)}; alter table one rename to tmp; insert into tmp values (5, 'tmp');"
        " alter table other rename to one; update one set v = 'was other' where id = 1;"
        " alter table tmp rename to other; delete from other where id = 2; commit"
    ),
    # A new table under the old name.
    "alter table old rename to new",
    "create table old (id int primary key, w int)",
    "insert into old values (1, 10), (2, 20)",
    "update new set v = 'n' where id = 1",
    # The table is gone at the end; another one takes the name.
    "alter table brief rename to briefer",
    "drop table briefer",
    "begin; savepoint s; alter table undone rename to done; insert into done values (9, 'x'); rollback to s; commit",
    rows("undone", 4, 4),
    "begin; alter table back rename to there; insert into there values (4, 'there'); alter table there rename to back; commit",
    "alter table quiet rename to silent",
    "alter table moved set schema s1",
    "alter table s1.inside rename to insider",
]
SECOND = [
    "alter schema s1 rename to s2",
    "insert into s2.moved values (4, 'x')",
    "insert into s2.insider values (4, 'x')",
    # With other commands on the way.
    "alter table columns rename to fields; alter table fields rename v to w; alter table fields add n int default 7",
    "delete from fields where id = 1",
    (
        "begin; alter table full_identity drop constraint full_identity_pkey; alter table full_identity rename to whole;"
        " alter table whole add primary key (v); update whole set id = 50 where v = 'full_identity 1'; commit"
    ),
    "alter table keyless rename to unkeyed",
    "insert into unkeyed values (4, 'x')",
    # The root is published. The partitions' names do not matter.
    "alter table low rename to lowest",
    "alter table parts rename to pieces",
    "insert into pieces values (5, 'x'), (150, 'y')",
    # A dropped table's name is taken by a rename; then its first table is there again, with another OID.
    "alter table old rename to older",
    "drop table silent",
    "alter table older rename to silent",
    "create table older (id int primary key)",
    "insert into older values (1)",
    "drop table older",
    "create table older (id int primary key)",
    "insert into older values (2)",
]
NAMES = {
    "public.back",
    "public.brief",
    "public.briefer",
    "public.fields",
    "public.new",
    "public.older",
    "public.one",
    "public.other",
    "public.pieces",
    "public.silent",
    "public.undone",
    "public.unkeyed",
    "public.whole",
    "s2.insider",
    "s2.moved",
}


@pytest.mark.parametrize("table_format", ["delta", pytest.param("parquet", marks=pytest.mark.slow)])
def test_tables_go_on_under_their_new_names(
    road: CapturedRoad, table_format: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The views with the histories are made in the same way for both formats, and take long for so many tables.
    history = "view" if table_format == "parquet" else "off"
    options = {"format": table_format, "catalog_database": f"kept_{table_format}", "history": history, "replica_interval_s": 0.0}
    road.execute(*BEFORE)
    road.land()
    road.install()
    road.execute(*map(rows, [*PLAIN, "keyless", "parts"]))
    road.run(**options)
    ((lsn,),) = road.query("select pg_current_wal_insert_lsn()::text")
    old = {path.name for path in (road.warehouse / "changelog").iterdir()}
    road.execute(*FIRST)
    with monkeypatch.context() as patched:  # it ends after the names are recorded, before any change is in the tables
        patched.setattr(segment_writer, "write", fail)
        with pytest.raises(CdcpipeError, match="no room"):
            road.run(**options)
    road.run(**options)
    road.execute(*SECOND)
    road.run(**options)

    assert road.waiting() == {}
    results = verify(road.spark, road.warehouse, ("-d", road.database.dsn))
    assert {str(each.table): each.problem for each in results if not each.is_equal} == {}
    names = {str(table) for table in road.house.tables()}
    gone = {name for name in names if "~" in name}
    assert names - gone == NAMES - {"public.brief"}
    assert [name.partition("~")[0] for name in gone] == ["public.silent"]
    assert set(register_views(road.spark, road.warehouse)) == {name for name in names if name != "public.unkeyed"}

    # The directories are those of the first names.
    new = {path.name for path in (road.warehouse / "changelog").iterdir()} - old
    assert {name.partition("~")[0] for name in new} == {"public.old", "public.older"}
    assert sorted("~" in name for name in new) == [False, True]

    # The past is there under the present name.
    assert as_of(road, "public.other", lsn) == [(1, "one 1"), (2, "one 2"), (3, "one 3")]
    assert as_of(road, "public.one", lsn) == [(1, "other 1"), (2, "other 2"), (3, "other 3")]
    with pytest.raises(CdcpipeError, match=r"has no table 'public\.columns'") as raised:
        as_of(road, "public.columns", lsn)
    assert raised.value.hint == "public.columns was renamed: it is public.fields now"

    said = [record.getMessage() for record in caplog.records if " now: " in record.getMessage()]
    assert "public.one is public.other now: its tables go on under the new name" in said
    assert "s1.moved is s2.moved now: its tables go on under the new name" in said
    assert not any("tmp" in line or "public.back" in line or "undone" in line for line in said)

    # Each change is there once. A warehouse that is made anew from the log has the same.
    again = road.root / "again"
    road.pipeline(again, format=table_format).process_available()
    for table in road.house.tables():
        first, second = (changes(road, house, str(table)) for house in (road.warehouse, again))
        assert len(first) == len(set(first)), table
        assert first == second, table
    assert_catalog(road, table_format)
    if table_format == "delta":
        assert_copies(road)


def assert_copies(road: CapturedRoad) -> None:
    """A renamed table waits for a copy, and gets it, under its new name."""
    road.execute("alter table fields alter n type int using n + 1")
    road.run()
    assert list(road.waiting()) == ["public.fields"]
    copies = TableCopies(road.database, road.spark, road.root)
    copies.snapshot("fields")
    assert road.waiting() == {}
    copies.assert_verified("public.fields")
    assert {row["table"]: row["directory"] for row in Tables(road.house).describe()}["public.fields"] == "public.columns"
    # The tables do not know the new name yet. A copy would go to other tables.
    road.execute("alter table fields rename to plots")
    with pytest.raises(SnapshotError, match=r"public\.plots is another table on the server than in the warehouse"):
        copies.snapshot("plots")
    road.run()
    copies.snapshot("plots")
    copies.assert_verified("public.plots")


def fail(*_: Any) -> None:
    raise OSError("no room")


def as_of(road: CapturedRoad, name: str, lsn: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in read_as_of(road.spark, road.warehouse, name, lsn).collect())


def changes(road: CapturedRoad, warehouse: Path, name: str) -> list[tuple[int, int, str]]:
    house = Warehouse.existing(warehouse)
    found = changelogs_of(road.spark, house).read(house.find(name)).select("_cdc_end_lsn", "_cdc_ordinal", "_cdc_op")
    return sorted(tuple(row) for row in found.collect())


def assert_catalog(road: CapturedRoad, table_format: str) -> None:
    """Every table has its present name in the catalog, and no table an old one."""
    kept = f"kept_{table_format}"
    found = {row["tableName"] for row in road.spark.sql(f"show tables in {kept}").collect() if not row["isTemporary"]}
    expected = {str(table).replace(".", "__").replace("~", "_") for table in road.house.tables()}
    ours = {"_cdc_ddl", "_cdc_schema_history", "_cdc_message"}
    keyed = {name for name in expected if name != "public__unkeyed"} if table_format == "delta" else set()
    # The histories of tables with another key or with a renamed column are no views.
    unfit = {"public__unkeyed", "public__whole", "public__fields"}
    histories = {f"{name}__history" for name in expected - unfit} if table_format == "parquet" else set()
    assert found - ours == {f"{name}__changelog" for name in expected} | keyed | histories
    assert road.spark.table(f"{kept}.public__older__changelog").where("_cdc_op = 'insert'").count() == 2


def test_the_choice_and_what_is_not_captured(road: CapturedRoad, caplog: pytest.LogCaptureFixture) -> None:
    """With ``apart``, and before the capture, a renamed table goes on in tables of its own, which need a copy."""
    road.execute("create table a (id int primary key, v text)", "create table b (id int primary key, v text)")
    road.land()
    road.execute(rows("a"), rows("b"))
    road.run()
    road.execute("alter table a rename to c", rows("c", 4, 4))
    road.run()
    assert road.waiting() == {"public.c": "it was renamed from public.a, which has its earlier rows"}
    road.install()
    road.execute("alter table b rename to d", rows("d", 4, 4))
    road.run(follows_renames=False)
    assert road.waiting()["public.d"] == "it was renamed from public.b, which has its earlier rows"
    caplog.clear()
    road.execute("alter table d rename to e", rows("e", 5, 5))
    road.run()
    assert "--renamed is follow now, it was apart: it counts for tables that are renamed from now on" in caplog.text
    assert {each["table"] for each in Tables(road.house).describe()} == {
        "public.a",
        "public.b",
        "public.c",
        "public.e",
        "_cdc_message",
    }
    assert road.replica("public.e").count() == 2


def test_a_run_takes_no_renamed_table_for_a_new_one(road: CapturedRoad, caplog: pytest.LogCaptureFixture) -> None:
    """Neither what the catalog says nor the initial snapshot has the tables under other names copied again."""
    road.execute(*(f"create table {name} (id int primary key, v text)" for name in "abc"), *map(rows, "abc"))
    road.install()
    connection = ("-d", road.database.dsn)
    launcher = spark_sink.LauncherConfig(road.slot, road.staging, ("everything",), connection, create_slot=True, available_now=True)
    config = spark_sink.RunConfig(launcher, road.warehouse, snapshot="initial", optimize_interval_s=None)
    spark_sink.run(config, road.spark)
    # No change follows in c, which the stream has never described.
    road.execute(
        "begin; alter table a rename to tmp; alter table b rename to a; alter table tmp rename to b; commit",
        "update b set v = 'x' where id = 1",
        "alter table c rename to d",
    )
    for _ in range(2):
        spark_sink.run(config, road.spark)
    assert road.waiting() == {}
    assert not [record for record in caplog.records if "was copied" in record.getMessage()]
    found = verify(road.spark, road.warehouse, connection)
    assert {str(each.table): each.is_equal for each in found} == dict.fromkeys(("public.a", "public.b", "public.d"), True)
