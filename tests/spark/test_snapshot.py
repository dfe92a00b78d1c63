"""The initial snapshot, from a real server into real tables: with the later changes of the stream, a replica equals its table."""

import random
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import postgres
import pytest

from cdcpipe.sql import quote_identifier
from spark_sink.client.exported import SnapshotError
from spark_sink.launcher.launcher import Launcher
from spark_sink.replica.current import read_replica
from spark_sink.schema.table import Table
from spark_sink.snapshot import copy as copy_module
from spark_sink.snapshot import plan as snapshot_plan
from spark_sink.snapshot.initial import InitialSnapshot
from spark_sink.snapshot.plan import TablePlan
from spark_sink.snapshot.table import Copying, copy_table
from spark_sink.staging import copied as copied_record
from spark_sink.staging.log import list_epochs
from spark_sink.warehouse.belonging import copied_lsn
from spark_sink.warehouse.warehouse import Warehouse
from support.snapshots import InitialCopy
from support.typed_values import NEWER_TYPES, TYPES
from support.waiting import SPARK_DEADLINE_S, until

pytestmark = pytest.mark.spark
SEED = random.randrange(10**6)
HOSTILE = "../{a,b}=1\n\"`'"
BIG = 5000
"""Bytes of a value that is stored outside of its row."""
KINDS = [*TYPES, *NEWER_TYPES]
VALUES = [(number, value) for number, (_, _, fit, unfit) in enumerate(KINDS) for value in [*fit, *unfit]]


def typed_inserts(first_id: int) -> str:
    rows = [f"insert into kinds (id) values ({first_id})"]
    for number, value in VALUES:
        escaped = value.replace("'", "''")
        rows.append(f"insert into kinds (id, c{number}) values ({first_id + len(rows)}, '{escaped}')")
    return ";".join(rows)


TABLES = [
    "create table many (id int primary key, v text, amount numeric(12, 2), at timestamptz, n int not null)",
    """insert into many select g, 'value ' || g, g / 100.0, timestamptz '2024-01-01 00:00:00+00' + g * interval '1 s', 0
       from generate_series(1, 5000) g""",
    f"create table kinds (id int, {', '.join(f'c{number} {kind}' for number, (kind, *_) in enumerate(KINDS))})",
    typed_inserts(1),
    "create type mood as enum ('so so')",
    "create domain price as numeric(8, 2)",
    "create domain padded as char(5)",
    "create type pair as (a int, b text)",
    "create table made (id int, m mood, p price, r pair, ms mood[], c padded, i inet, k regclass)",
    "insert into made values (1, 'so so', 1.5, (1, 'x y'), '{so so}', 'ab', '::1', 'made')",
    "insert into made (id, r) values (2, (null, null))",
    "create table large (id int primary key, v text, n int); alter table large alter v set storage external",
    f"insert into large select g, repeat('x', {BIG}) || g, 0 from generate_series(1, 20) g",
    "create table late (id int primary key, v text, n int); alter table late alter v set storage external",
    f"insert into late select g, repeat('x', {BIG}) || g, 0 from generate_series(1, 20) g",
    "create table narrow (id int primary key, secret text, region text not null, g int generated always as (id * 2) stored)",
    "create unique index narrow_index on narrow (id, region)",
    "alter table narrow replica identity using index narrow_index",
    "insert into narrow select g, 'secret', case when g % 2 = 0 then 'eu' else 'us' end from generate_series(1, 10) g",
    "create table rooted (id int primary key, v text) partition by range (id)",
    "create table rooted_1 partition of rooted for values from (0) to (10)",
    "create table rooted_2 (v text, gone int, id int not null)",
    "alter table rooted_2 drop column gone",
    "alter table rooted attach partition rooted_2 for values from (10) to (20)",
    "insert into rooted select g, 'v' || g from generate_series(5, 14) g",
    "create table leaves (id int primary key, v text) partition by list (id)",
    "create table leaves_1 partition of leaves for values in (1)",
    "create table leaves_2 partition of leaves for values in (2)",
    "insert into leaves values (1, 'one'), (2, 'two')",
    "create table nokey (v text)",
    "insert into nokey values ('twice'), ('twice'), (null)",
    "create table nothing (id int primary key, at date)",
    "create table columnless ()",
    "insert into columnless default values",
    f'create table {quote_identifier(HOSTILE)} (id int primary key, "ID" int, "a.b" text, "_cdc_op" text)',
    f"""insert into {quote_identifier(HOSTILE)} values (1, 2, 'x', 'y')""",
    "create table altered (id int primary key, a text, b int)",
    "insert into altered values (1, 'one', 1), (2, 'two', 2)",
    """create publication plain for table altered, many, kinds, made, large, late, leaves, nokey, nothing, columnless,
       narrow (id, region) where (region = 'eu'), """
    + quote_identifier(HOSTILE),
    "create publication rooted for table rooted with (publish_via_partition_root)",
]
SIMPLE = ["altered", "many", "large", "rooted", "leaves_1", "leaves_2", "nothing"]
AFTER = [
    typed_inserts(1001),
    "insert into made select id + 10, m, p, r, ms, c, i, k from made",
    "update large set n = 1 where id <= 10",
    "update large set id = id + 100 where id <= 5",
    "insert into narrow (id, region) values (11, 'us'), (12, 'eu')",
    "update narrow set region = 'us' where id = 2",
    "update rooted set id = id + 10 where id in (6, 7)",
    "update leaves set v = 'zwei' where id = 2",
    "insert into nokey values ('twice')",
    "insert into nothing values (1, 'infinity')",
    # Of the copied rows the first change's description does not tell, but the columns' numbers do.
    "alter table altered rename a to aa; alter table altered add c int default 7, drop b; alter table altered add b int",
    "update altered set c = 8 where id = 1",
    f"""update {quote_identifier(HOSTILE)} set "a.b" = 'z'""",
]


@pytest.fixture(scope="module")
def copied(pg18: postgres.Cluster, spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InitialCopy]:
    """A snapshot while another session writes, the later changes, and then a second warehouse from the existing slot."""
    with pg18.database() as database:
        made = InitialCopy(database, spark, tmp_path_factory.mktemp("copied"))
        made.execute("set timezone = 'UTC'", *TABLES)
        writer = threading.Thread(target=write, args=(database, random.Random(SEED)))
        snapshot = made.run(delta_warehouse(made), while_copying=writer.start)
        writer.join()
        assert snapshot.is_needed
        made.execute(*AFTER)
        made.execute("update many set n = n + 1 where id % 10 = 0", "update large set n = 2 where id > 15")
        assert not made.run(delta_warehouse(made)).is_needed
        assert made.run(Warehouse(made.root / "parquet", "parquet"), "initial", create_slot=False).is_needed
        made.execute("update late set n = 1 where id < 10", "delete from late where id = 3", "insert into late values (50, 'x', 0)")
        made.run(Warehouse(made.root / "parquet", "parquet"))
        yield made
        made.connection.close()


def delta_warehouse(copied: InitialCopy) -> Warehouse:
    return Warehouse(copied.root / "delta", "delta")


def write(database: postgres.Database, chance: random.Random) -> None:
    """Make changes of every kind while the snapshot runs."""
    with database.connect() as connection:
        for number in range(150):
            row = chance.randint(1, 5000)
            statement = chance.choice(
                [
                    f"update many set n = n + 1, v = 'changed ' || n where id between {row} and {row + 20}",
                    f"delete from many where id = {row}",
                    f"insert into many values ({10000 + number}, 'new', 1, '2024-01-01 00:00:00+00', 0)",
                    f"update many set id = id + 100000 where id = {row}",
                    f"update large set n = n + 1 where id = {row % 20}",
                    f"begin; delete from many where id < {row % 50}; rollback",
                ]
            )
            connection.execute(statement)


@pytest.mark.parametrize("name", SIMPLE)
def test_a_replica_is_its_table(copied: InitialCopy, name: str) -> None:
    copied.assert_equal(delta_warehouse(copied), name)


@pytest.mark.parametrize("name", [*SIMPLE, "late"])
def test_so_is_the_view_of_a_parquet_warehouse(copied: InitialCopy, name: str) -> None:
    copied.assert_equal(Warehouse(copied.root / "parquet", "parquet"), name)


def test_every_change_is_there_once(copied: InitialCopy) -> None:
    (epoch, *_) = list_epochs(copied.root / "staging")
    for warehouse in (delta_warehouse(copied), Warehouse(copied.root / "parquet", "parquet")):
        rows = copied.changes(warehouse, "many").select("_cdc_op", "_cdc_epoch", "_cdc_end_lsn", "_cdc_ordinal", "id").collect()
        assert len({(r["_cdc_end_lsn"], r["_cdc_ordinal"]) for r in rows}) == len(rows), SEED
        taken = [r for r in rows if r["_cdc_op"] == "snapshot"]
        assert len({r["id"] for r in taken}) == len(taken)
        assert len({(r["_cdc_epoch"], r["_cdc_end_lsn"]) for r in taken}) == 1
        assert all(r["_cdc_end_lsn"] > taken[0]["_cdc_end_lsn"] for r in rows if r["_cdc_op"] != "snapshot")
        if warehouse.format.keeps_replicas:
            assert (taken[0]["_cdc_epoch"], taken[0]["_cdc_end_lsn"]) == (epoch.number, epoch.start_lsn)
            assert len(taken) == 5000
            files = warehouse.changelog(Table("public", "many"))
            assert any(files.glob("part-000001-*.parquet")), "one chunk: nothing was cut"


def test_a_value_is_the_same_from_the_snapshot_and_from_the_stream(copied: InitialCopy) -> None:
    names = [f"c{number}" for number in range(len(KINDS))]
    # As text where there is one: Python's own times end where its local year does.
    changes = copied.changes(delta_warehouse(copied), "kinds")
    rows = changes.withColumns(
        {name: changes[name].cast("string") for name in names if "time" in changes.schema[name].dataType.simpleString()}
    ).collect()
    values = {
        row["id"]: (row["_cdc_op"], repr([row[name] for name in names]), row["_cdc_exact"], row["_cdc_unchanged"]) for row in rows
    }
    assert len(values) == 2 * (len(VALUES) + 1)
    for number in range(1, len(VALUES) + 2):
        kind = "none" if number == 1 else (KINDS[VALUES[number - 2][0]][0], VALUES[number - 2][1])
        assert values[number][0] == "snapshot"
        assert values[1000 + number][0] == "insert"
        assert values[number][1:] == values[1000 + number][1:], kind


def test_a_value_of_a_type_that_is_not_built_in_is_its_text(copied: InitialCopy) -> None:
    rows = {row["id"]: row for row in copied.changes(delta_warehouse(copied), "made").collect()}
    names = ["m", "p", "r", "ms", "c", "i", "k"]
    assert [rows[1][name] for name in names] == ["so so", "1.50", '(1,"x y")', '{"so so"}', "ab   ", "::1", "public.made"]
    for number in (1, 2):
        assert [rows[number][name] for name in names] == [rows[10 + number][name] for name in names]


def test_only_what_is_published_is_copied(copied: InitialCopy) -> None:
    warehouse = delta_warehouse(copied)
    taken = copied.changes(warehouse, "narrow").where("_cdc_op = 'snapshot'")
    assert taken.columns[:2] == ["id", "region"]
    assert "secret" not in taken.columns
    assert sorted((r["id"], r["region"]) for r in taken.collect()) == [(number, "eu") for number in (2, 4, 6, 8, 10)]
    copied.assert_equal(warehouse, "narrow", "id region", "region = 'eu'")
    tables = {table.name for table in warehouse.tables()}
    assert {"rooted", "leaves_1", "leaves_2"} <= tables
    assert not {"rooted_1", "rooted_2", "leaves"} & tables


def test_the_log_knows_the_position_of_the_copies(copied: InitialCopy) -> None:
    """Otherwise `land` would not notice a server that was restored to before them (launcher/continuity.py)."""
    houses = (delta_warehouse(copied), Warehouse(copied.root / "parquet", "parquet"))
    assert copied_record.read(copied.config().staging) == max(map(copied_lsn, houses)) > 0


def test_tables_without_a_key_have_a_changelog_alone(copied: InitialCopy) -> None:
    warehouse = delta_warehouse(copied)
    found = Counter((r["_cdc_op"], r["v"]) for r in copied.changes(warehouse, "nokey").collect())
    assert found == {("snapshot", "twice"): 2, ("snapshot", None): 1, ("insert", "twice"): 1}
    assert [r["_cdc_op"] for r in copied.changes(warehouse, "columnless").collect()] == ["snapshot"]
    assert not warehouse.replica(Table("public", "nokey")).exists()


def test_a_table_of_any_name(copied: InitialCopy) -> None:
    for warehouse in (delta_warehouse(copied), Warehouse(copied.root / "parquet", "parquet")):
        rows = read_replica(copied.spark, warehouse.root, f"public.{HOSTILE}")
        assert [tuple(row) for row in rows.collect()] == [(1, 2, "z", "y")]


def test_a_replica_is_made_again_from_a_changelog_that_begins_with_a_snapshot(copied: InitialCopy) -> None:
    shutil.rmtree(delta_warehouse(copied).replica(Table("public", "large")))
    copied.run(delta_warehouse(copied))
    copied.assert_equal(delta_warehouse(copied), "large")


@pytest.mark.parametrize("version", ["pg14", "pg17"])
def test_on_other_server_versions(request: pytest.FixtureRequest, spark: Any, tmp_path: Path, version: str) -> None:
    """A snapshot and the changes after it. These versions have no other test with Spark."""
    with request.getfixturevalue(version).database() as database:
        copied = InitialCopy(database, spark, tmp_path, f"s_{database.name}"[:63])
        copied.execute(
            "create table t (id int, v text, g int generated always as (id + 1) stored, primary key (id) include (v))",
            "insert into t values (1, 'x'), (2, null), (3, 'z')",
            "create publication p for table t",
        )

        def change() -> None:
            copied.execute("update t set v = 'y' where id = 2", "delete from t where id = 1", "insert into t values (4, null)")

        warehouse = Warehouse(tmp_path / "delta", "delta")
        assert copied.run(warehouse, while_copying=change, publications=("p",), create_slot=True).is_needed
        ops = Counter(row["_cdc_op"] for row in copied.changes(warehouse, "t").collect())
        assert ops == {"snapshot": 3, "update": 1, "delete": 1, "insert": 1}
        replica_rows = spark.read.format("delta").load(str(warehouse.replica(Table("public", "t")))).collect()
        assert sorted((row["id"], row["v"]) for row in replica_rows) == [(2, "y"), (3, "z"), (4, None)]
        copied.connection.close()


def test_waiting_for_a_lock(
    database: postgres.Database, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The snapshot waits before it knows a row filter, and while it reads a table. It can be stopped, says what it waits for, and
    then continues.
    """
    monkeypatch.setattr(snapshot_plan, "_CHUNK_LOCK_TIMEOUT_MS", 500)
    copied = InitialCopy(database, spark, tmp_path, f"s_{database.name}"[:63])
    copied.execute(
        "create table t (id int primary key); insert into t values (1)", "create publication p for table t where (id > 0)"
    )
    warehouse = Warehouse(tmp_path / "delta", "delta")
    config = copied.config(publications=("p",), create_slot=True)
    waiting = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    other = database.connect()
    other.autocommit = False
    said = f"waiting: table public.t is locked exclusively by server process {other.info.backend_pid}"

    def lock() -> None:
        other.execute("lock table t in access exclusive mode")

    for is_planned, is_stopped in ((False, True), (True, True), (True, False)):
        snapshot = InitialSnapshot(config, warehouse)
        snapshot.prepare(lambda: False)
        with Launcher(config) as launcher:
            launcher.wait()
        if is_planned:
            planned = snapshot._plan

            def plan_then_lock(*arguments: Any, planned: Any = planned) -> Any:
                found = planned(*arguments)
                lock()
                return found

            snapshot._plan = plan_then_lock
        else:
            lock()
        snapshot.start(spark)
        until(lambda: copied.query(waiting), "the wait for the lock")
        assert not snapshot.wait(0)
        if not is_stopped:
            until(lambda: said in caplog.messages, "what it waits for", SPARK_DEADLINE_S)
            other.rollback()
            assert snapshot.wait(SPARK_DEADLINE_S)
            break
        snapshot.stop()
        other.rollback()
        with pytest.raises(SnapshotError):
            snapshot.wait()
        assert not warehouse.has_changelog(Table("public", "t"))
    assert not copied.run(warehouse, publications=("p",)).is_needed
    copied.assert_equal(warehouse, "t")
    other.close()
    copied.connection.close()


def test_a_table_that_is_written_anew_or_altered_is_begun_again(
    database: postgres.Database, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = InitialCopy(database, spark, tmp_path, f"s_{database.name}"[:63])
    copied.execute("create table t (id int primary key, v text); insert into t values (1)", "create publication p for table t")
    warehouse = Warehouse(tmp_path / "delta", "delta")
    planned, plans = InitialSnapshot._plan, []

    def plan_then_write(*arguments: Any) -> Any:
        plans.append(planned(*arguments))
        if len(plans) == 1:
            copied.execute("truncate t", "insert into t values (2)")
        elif len(plans) == 2:
            copied.execute("alter table t rename v to w")
        return plans[-1]

    monkeypatch.setattr(InitialSnapshot, "_plan", plan_then_write)
    copied.run(warehouse, publications=("p",))
    assert len(plans) == 3
    assert [(row["_cdc_op"], row["id"]) for row in copied.changes(warehouse, "t").collect()] == [("snapshot", 2)]
    copied.execute("insert into t values (3)")
    copied.run(warehouse, publications=("p",))
    copied.assert_equal(warehouse, "t")
    copied.connection.close()


def test_after_the_server_has_dropped_the_snapshot_the_other_tables_are_copied_with_another_one(
    database: postgres.Database, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart of the server ends the connection that holds the snapshot, and the connections that read the tables."""
    copied = InitialCopy(database, spark, tmp_path, f"s_{database.name}"[:63])
    copied.execute(
        *(f"create table t{number} (id int primary key); insert into t{number} values (1)" for number in range(3)),
        "create publication p for all tables",
    )
    others = "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    tables = list[Table]()

    def copy(copying: Copying, plan: TablePlan, table: Table) -> int:
        tables.append(table)
        if len(tables) == 2:
            copied.execute("insert into t0 values (2)", "insert into t1 values (2)", "insert into t2 values (2)", others)
        return copy_table(copying, plan, table)

    monkeypatch.setattr(copy_module, "copy_table", copy)
    monkeypatch.setattr(copy_module, "_TABLES_AT_ONCE", 1)
    warehouse = Warehouse(tmp_path / "delta", "delta")
    copied.run(warehouse, publications=("p",))
    copied.run(warehouse, publications=("p",))  # the stream of the first run had ended before the inserts
    assert any("the tables that are not finished are copied with another snapshot" in each for each in caplog.messages)
    first, *rest = dict.fromkeys(tables)
    ops = {table: Counter(row["_cdc_op"] for row in copied.changes(warehouse, table.name).collect()) for table in (first, *rest)}
    assert ops == {first: {"snapshot": 1, "insert": 1}, **{table: {"snapshot": 2} for table in rest}}
    for table in ops:
        copied.assert_equal(warehouse, table.name)
    copied.connection.close()


def test_one_table_that_fails_ends_it(
    database: postgres.Database, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While other tables are being copied, and others wait for their turn."""
    copied = InitialCopy(database, spark, tmp_path, f"s_{database.name}"[:63])
    copied.execute(*(f"create table t{number} (id int primary key)" for number in range(10)), "create publication p for all tables")
    config = copied.config(publications=("p",), create_slot=True)
    failed = threading.Event()

    def fail(*_arguments: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise SnapshotError("as it happens")
        threading.Event().wait(0.5)

    monkeypatch.setattr(copy_module, "copy_table", fail)
    snapshot = InitialSnapshot(config, Warehouse(tmp_path / "delta", "delta"))
    snapshot.prepare(lambda: False)
    with Launcher(config) as launcher:
        launcher.wait()
    snapshot.start(spark)
    try:
        with pytest.raises(SnapshotError, match="as it happens"):
            snapshot.wait(120)
    finally:
        snapshot.stop()
    copied.connection.close()


def test_a_slot_that_exists_gets_no_snapshot_unasked(database: postgres.Database, tmp_path: Path) -> None:
    copied = InitialCopy(database, None, tmp_path, f"s_{database.name}"[:63])
    copied.execute("create table t (id int primary key)", "create publication p for table t")
    copied.execute(f"select pg_create_logical_replication_slot('{copied.slot}', 'pgoutput')")
    for mode, creates in ((None, False), ("never", True), ("never", False)):
        config = copied.config(publications=("p",), create_slot=creates)
        snapshot = InitialSnapshot(config, Warehouse(tmp_path / "delta", "delta"), mode)
        snapshot.prepare(lambda: False)
        assert not snapshot.is_needed
        assert not (tmp_path / "delta").exists()
    copied.connection.close()
