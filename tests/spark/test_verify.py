"""Replicas compared with PostgreSQL: equal tables are never reported as different, and differences are found under any load."""

import json
import random
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import postgres
import pytest
from psycopg import sql

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.lsn import LSN
from cdcpipe.sql import quote_identifier
from spark_sink.commands.verify import exit_code
from spark_sink.delta import log as delta_log
from spark_sink.delta import sql as delta
from spark_sink.delta.log import TableLog
from spark_sink.launcher.config import LauncherConfig
from spark_sink.launcher.launcher import Launcher
from spark_sink.replica.as_of import read_as_of
from spark_sink.replica.current import register_views
from spark_sink.schema.table import Table
from spark_sink.staging.filler import SealPolicy
from spark_sink.staging.lock import StagingLock
from spark_sink.staging.log import Position, list_epochs
from spark_sink.verify import comparison, differences
from spark_sink.verify.canonical import Canonical
from spark_sink.verify.comparison import (
    DIFFERENT,
    NOT_COMPARED,
    Difference,
    TableResult,
    VerifyError,
    verify,
)
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.warehouse import Warehouse
from support.cli_process import run_spark_cli, spark_cli
from support.road import HOSTILE, Road
from support.snapshots import InitialCopy
from support.typed_values import INFINITE_NUMERICS, NEWER_TYPES, TYPES
from support.waiting import SPARK_DEADLINE_S, until

pytestmark = pytest.mark.spark
KINDS = [*TYPES, *NEWER_TYPES, ("mood", None, ["so so"], []), ("price", None, ["1.5"], []), ("pair", None, ["(,)"], [])]
COLUMNS = [f"c{number}" for number in range(len(KINDS))]
SETUP = [
    "create type mood as enum ('so so')",
    "create domain price as numeric(8,2)",
    "create type pair as (a int, b text)",
    f"create table kinds (id int primary key, {', '.join(f'{n} {kind}' for n, (kind, *_) in zip(COLUMNS, KINDS, strict=True))})",
    f"create table plain (id int primary key, {', '.join(f'{n} {kind}' for n, (kind, *_) in zip(COLUMNS, KINDS, strict=True))})",
    "create table floats (id float8 primary key, f float4)",
    "create table big (id int, part text, a int, b text, primary key (part, id))",
    "alter table big alter b set storage external",
    "create table tampered (id int primary key, name text, day date)",
    "create table doubled (id text primary key)",
    "create table widened (id int primary key, total int, gone text, list int[], tags text)",
    "create table listed (tags text[], days date[], n int, primary key (tags, days))",
    "create table keyless (x int)",
    f'create table {quote_identifier(HOSTILE[-1])} (id int primary key, "ID" int, "a.b" text, _cdc_op int)',
]
FIRST = [
    "insert into kinds values (0)",
    "insert into floats values (0.1, 0.1), ('-0', '-0'), ('NaN', 'NaN'), ('infinity', '-infinity'), (5e-324, 1e-45), (-1e99, null)",
    "insert into big select i, 'p' || i % 3, i, repeat(md5(i::text), 200) from generate_series(1, 60) i",
    "insert into tampered select i, 'name ' || i, case when i % 10 = 0 then 'infinity' end::date from generate_series(1, 100) i",
    "insert into doubled values ('a'), ('b'), ('ü')",
    "insert into widened select i, i, 'x', array[i, null], '{a,\"b c\"}' from generate_series(1, 5) i",
    """insert into listed values ('{a,"b, c"}', '{}', 1), ('{"a,b",c}', '{}', 2), ('{{a},{b}}', '{2024-02-29}', 3),
       ('{a,b}', '{infinity}', 4), ('{a,b}', '{2024-02-29}', 5), ('{"\\\\"}', '{NULL}', 6), ('[0:0]={a}', '{}', 7)""",
    "insert into listed values (array[E'\\u0085', E'null\\u2029'], '{}', 8)",  # the ends of lines for Java's $, not for \\z
    "insert into keyless values (1)",
    f"insert into {quote_identifier(HOSTILE[-1])} values (1, 2, 'x', 5)",
]
SECOND = [
    "update big set a = a + 1 where id < 10",
    "update big set id = id + 1000, a = 0 where id between 20 and 30",
    "delete from big where id between 40 and 45",
    "alter table widened alter total type bigint, alter list type bigint[], alter tags type text[] using tags::text[]",
    "alter table widened drop gone, add later int",
    "insert into widened values (6, 6000000000, '{6000000000}', '{x}', 1)",
    "update listed set n = n + 10 where n % 2 = 0",
    "update listed set tags = tags || '{z}' where n in (1, 14)",
    "update listed set days = '{-infinity}' where n in (5, 12)",
    "delete from listed where n in (3, 16)",
    "update widened set total = 7000000000 where id = 1",
    "alter table widened add last text",
]


def named(results: list[TableResult]) -> dict[str, TableResult]:
    return {str(result.table): result for result in results}


class Verified(Road):
    """A `Road` whose replicas are compared. ``verified`` is the result of one comparison."""

    verified: dict[str, TableResult]

    def verify(self, *tables: str, **options: Any) -> dict[str, TableResult]:
        options = {"timeout_s": 300} | options
        names = [f"public.{table}" for table in tables]
        return named(verify(self.spark, self.warehouse, ("-d", self.database.dsn), tables=names, **options))

    def replica_path(self, table: str) -> str:
        return delta.table_name(Warehouse.existing(self.warehouse).replica(Table("public", table)))


@pytest.fixture(scope="module")
def road(pg18: postgres.Cluster, spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verified]:
    with pg18.database() as database:
        made = Verified(database, spark, tmp_path_factory.mktemp("verified"), slot="verified")
        made.execute(*SETUP)
        made.land()
        made.execute(*FIRST)
        number = 0
        for name, (kind, _, fit, unfit) in zip(COLUMNS, KINDS, strict=True):
            for value in [*fit, *unfit, *(INFINITE_NUMERICS if kind == "numeric" else [])]:
                number += 1
                insert = sql.SQL("insert into kinds (id, {}) values ({}, {})").format(sql.Identifier(name), number, value)
                made.connection.execute(insert)
            for value in fit:
                number += 1
                insert = sql.SQL("insert into plain (id, {}) values ({}, {})").format(sql.Identifier(name), number, value)
                made.connection.execute(insert)
        made.run()
        made.execute(*SECOND)
        made.run()
        made.verified = made.verify()
        yield made
        made.connection.close()


def test_values_of_every_type_are_equal(road: Verified) -> None:
    count = road.query("select count(*) from kinds")[0][0]
    assert count > 100
    assert road.verified["public.kinds"] == TableResult(Table("public", "kinds"), count, count, is_equal=True)
    assert road.verified["public.floats"] == TableResult(Table("public", "floats"), 6, 6, is_equal=True)


def test_small_replicas_need_no_spark(road: Verified, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of every type, columns that only the server has, and rows in deletion vectors."""
    road.spark.sql(f"update {road.replica_path('plain')} set id = id where id % 3 = 0")
    log = TableLog(Warehouse.existing(road.warehouse).replica(Table("public", "plain"))).refresh()
    assert any(file.get("deletionVector") for file in log.files)
    road.execute("alter table plain add later int")
    monkeypatch.setattr(Canonical, "checksums", lambda *_: pytest.fail("made by Spark"))
    results = road.verify("plain", "floats", "big", HOSTILE[-1])
    assert [result.server_rows for result in results.values()] == [
        road.query(f"select count(*) from {quote_identifier(table)}")[0][0] for table in ("plain", "floats", "big", HOSTILE[-1])
    ]
    assert all(result.is_equal for result in results.values())


@pytest.mark.parametrize("later", [[], ["insert into behind values (3)"]])
def test_a_replica_that_comes_further_meanwhile(
    database: postgres.Database, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: list[str]
) -> None:
    """Its new state is compared, without Spark, unless it has changes that the server's snapshot does not see."""
    road = Verified(database, spark, tmp_path)
    road.execute("create table behind (id int primary key)")
    road.land()
    road.execute("insert into behind values (1)")
    road.run()
    road.execute("insert into behind values (2)")
    road.land()

    def go_on(text: str, _part: float) -> None:
        if text.startswith("waiting for the tables"):
            road.execute(*later)
            road.run()

    made_by_spark = []
    checksums = Canonical.checksums
    monkeypatch.setattr(Canonical, "checksums", lambda *args: made_by_spark.append(1) or checksums(*args))
    results = road.verify(tell=go_on)
    assert results == {"public.behind": TableResult(Table("public", "behind"), 2, 2, is_equal=True)}
    assert len(made_by_spark) == len(later)
    assert spark.read.format("delta").load(str(road.warehouse / "replica/public.behind")).count() == 2 + len(later)
    road.connection.close()


def test_all_tables(road: Verified) -> None:
    """Unsent TOAST values, changed keys, hostile names, changed columns. A table without a key is left out."""
    assert {str(result.table) for result in road.verified.values() if not result.is_equal} == set()
    assert {"public.big", "public.widened", "public.listed", f"public.{HOSTILE[-1]}"} < set(road.verified)
    assert "public.keyless" not in road.verified
    assert road.verified["public.big"].server_rows == 54
    with pytest.raises(InvalidArgumentsError, match=r"public\.keyless has no key"):
        road.verify("keyless")
    with pytest.raises(InvalidArgumentsError, match=r"has no table 'public\.nowhere'"):
        road.verify("nowhere")


def test_native_types(pg18: postgres.Cluster, spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Snapshot, changes, replica and verify with native types, in which numbers lose their trailing zeros."""
    numbers = ["1.50", "0", "NaN", "1e40", "100", "-0.10", "12345678901234567890.5"]
    rows = ", ".join(f"(%s + {number}, '{text}', '{{{text},NULL}}', '{{{{{text}}}}}')" for number, text in enumerate(numbers))
    with pg18.database() as database:
        made = InitialCopy(database, spark, tmp_path, "native")
        made.execute(
            "create table n (id int primary key, free numeric, list numeric[], matrix numeric[])",
            "create table keyed (k numeric primary key, v int)",
            "create publication native for all tables",
            f"insert into n values {rows % ((100,) * len(numbers))}",
            "insert into keyed values (1.50, 1), ('NaN', 2)",
        )
        house = Warehouse(tmp_path / "warehouse", "delta", types="native")
        made.run(house, publications=("native",))
        made.execute(
            f"insert into n values {rows % ((200,) * len(numbers))}",
            "update keyed set v = v + 1",
            "update keyed set k = 1.5000 where k = 1.5",
            "insert into keyed values (1e40, 3)",
        )
        made.run(house, publications=("native",))
        replicas = spark.read.format("delta").load(str(house.replica(Table("public", "n"))))
        assert replicas.drop("_cdc_exact").schema.simpleString() == (
            "struct<id:int,free:decimal(38,18),list:array<decimal(38,18)>,matrix:array<decimal(38,18)>>"
        )
        assert "public.n, column free: values that its type can't hold, 2 so far" in caplog.text
        results = named(verify(spark, house.root, ("-d", database.dsn), timeout_s=300))
        assert {name: result.is_equal for name, result in results.items()} == {"public.n": True, "public.keyed": True}
        made.connection.close()
        with pytest.raises(InvalidArgumentsError, match="have native types, not exact ones"):
            Warehouse(house.root, "delta").open(list_epochs(tmp_path / "staging")[-1])


def test_rows_changed_behind_our_back_are_named(road: Verified, monkeypatch: pytest.MonkeyPatch) -> None:
    path = road.replica_path("tampered")
    # In row 11 the value is right, but it stands beside a text that says that the column can't hold it.
    exact = "case id when 11 then map('name', 'name 11') when 20 then map('day', '-infinity') else _cdc_exact end"
    for statement in (
        f"""update {path} set name = if(id = 3, 'another', name), day = if(id = 7, current_date(), day), _cdc_exact = {exact}
            where id in (3, 7, 11, 20)""",
        f"delete from {path} where id = 50",
        f"insert into {path} (id, name) values (777, 'nobody')",
    ):
        road.spark.sql(statement)
    result = road.verify("tampered")["public.tampered"]
    assert (result.is_equal, result.server_rows, result.replica_rows) == (False, 100, 100)
    kinds = {3: "changed", 7: "changed", 11: "changed", 20: "changed", 50: "missing", 777: "surplus"}
    assert result.differences == [Difference(kind, {"id": str(key)}) for key, kind in kinds.items()]
    monkeypatch.setattr(differences, "_MANY_ROWS", 0)  # as for a large table
    assert road.verify("tampered")["public.tampered"].differences == result.differences
    few = road.verify("tampered", max_keys=2)["public.tampered"]
    assert len(few.differences) == 2
    assert {difference.key["id"] for difference in few.differences} <= {str(key) for key in kinds}
    assert road.verify("tampered", max_keys=0)["public.tampered"].differences == []


def test_a_row_that_is_there_twice_is_found(road: Verified) -> None:
    road.spark.sql(f"insert into {road.replica_path('doubled')} (id) values ('ü')")
    assert road.verify("doubled")["public.doubled"].differences == [Difference("surplus", {"id": "ü"})]


def test_the_command(road: Verified) -> None:
    """Exit codes. Of all values, only keys are printed."""
    road.execute("create table told (id int primary key, secret text)", "insert into told values (1, 'hush'), (2, 'hush too')")
    road.run()
    road.spark.sql(f"update {road.replica_path('told')} set secret = 'hushed' where id = 2")
    arguments = [
        "verify",
        "-d",
        road.database.dsn,
        "--warehouse",
        str(road.warehouse),
        "--table",
        "public.told",
        "--table",
        "public.floats",
    ]
    arguments += ["--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1", "-v"]
    done = run_spark_cli(*arguments)
    assert done.returncode == DIFFERENT, done.stderr
    assert done.stdout == (
        'public.told: DIFFERENT, 2 rows in PostgreSQL, 2 in the replica\n  changed {"id": "2"}\npublic.floats: equal, 6 rows\n'
    )
    assert "hush" not in done.stderr


@pytest.mark.parametrize("table_format", ["delta", "parquet"])
def test_while_it_is_written_to(pg18: postgres.Cluster, spark: Any, tmp_path: Path, table_format: str) -> None:
    """Writers, launcher and tables are at work: all is equal. Then a row is changed by hand, and is found among all changes."""
    with pg18.database() as database:
        road = Verified(database, spark, tmp_path)
        road.execute(
            "create table busy (id int primary key, n int, b text)",
            "alter table busy alter b set storage external",
            "create table still (id int primary key)",
        )
        config = LauncherConfig(
            slot="busy",
            staging=road.staging,
            publications=("busy",),
            connection=("-d", database.dsn),
            create_slot=True,
            seal=SealPolicy(seal_interval_s=1),
        )
        with Launcher(config) as launcher:
            road.prepared = launcher.prepared
            road.execute("insert into busy select i, 0, 'b' from generate_series(1000, 1010) i", "insert into still values (1)")
            until(
                lambda: launcher.progress.position is not None and launcher.progress.transactions >= 2, deadline_s=SPARK_DEADLINE_S
            )
            pipeline = road.pipeline(format=table_format)
            pipeline.process_available()

            def drive(text: str, _part: float) -> None:
                """Each time the comparison waits for the tables, let them progress to a position beyond the one it has seen."""
                if text.startswith("waiting for the tables"):
                    pipeline.process_available()

            with Writers(database, 2) as writers:
                for number in range(2):
                    before = writers.count
                    until(lambda before=before: writers.count > before + 10, deadline_s=SPARK_DEADLINE_S)
                    if number == 1 and table_format == "delta":
                        road.spark.sql(f"update {road.replica_path('busy')} set n = -5 where id = 1005")
                    position = pipeline.progress.position
                    results = road.verify(tell=drive, timeout_s=600)
                    assert pipeline.progress.position > position
                    expected = [Difference("changed", {"id": "1005"})] if number == 1 and table_format == "delta" else []
                    assert results["public.busy"].differences == expected
                    assert results["public.busy"].is_equal == (not expected)
                    assert results["public.still"] == TableResult(Table("public", "still"), 1, 1, is_equal=True)
        road.connection.close()


class Writers:
    """Change the table ``busy`` continuously, except the keys from 1000 on."""

    def __init__(self, database: postgres.Database, count: int) -> None:
        self._database = database
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]
        self._error: BaseException | None = None
        self.count = 0

    def _run(self, number: int) -> None:
        try:
            rng = random.Random(number)
            with self._database.connect() as connection:
                while not self._over.wait(0.05):
                    key, other = sorted(rng.sample(range(100), 2))  # in order: no deadlocks
                    connection.execute("begin")
                    connection.execute(
                        "insert into busy values (%s, 1, repeat('b', 4000)) on conflict (id) do update set n = busy.n + 1", [key]
                    )
                    if rng.random() < 0.3:
                        connection.execute("delete from busy where id = %s", [other])
                    if rng.random() < 0.02 and number == 0:
                        connection.execute("delete from busy where id < 1000")
                    connection.execute("rollback" if rng.random() < 0.1 else "commit")
                    self.count += 1
        except BaseException as ex:  # noqa: BLE001 - it is raised again where they are stopped
            self._error = ex

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error


def test_the_order_of_commits_is_not_that_of_their_visibility(spark: Any, tmp_path: Path) -> None:
    """A commit that waits for a synchronous standby is in the WAL and in the tables, but not yet visible on the server."""
    settings = {"synchronous_standby_names": "nobody", "synchronous_commit": "local"}
    with postgres.Cluster("18", settings=settings) as cluster, cluster.database() as database:
        road = Verified(database, spark, tmp_path)
        road.execute("create table t (id int primary key, n int)")
        road.land()
        road.execute("insert into t values (1, 1), (2, 2)")
        road.run()
        with database.connect() as local, database.connect() as waiting:
            waiting.execute("set synchronous_commit = on")
            thread = threading.Thread(target=waiting.execute, args=("update t set n = 10 where id = 1",))
            thread.start()
            try:
                stuck = "select count(*) from pg_stat_activity where wait_event = 'SyncRep' and query like 'update%'"
                until(lambda: local.execute(stuck).fetchone() == (1,), deadline_s=SPARK_DEADLINE_S)
                local.execute("update t set n = 20 where id = 2")
                assert local.execute("select n from t order by id").fetchall() == [(1,), (20,)]
                # The changelog gets both after the replica was looked at: one of them counts.
                road.prepared = road.land().prepared
                base = delta_log.pin(Warehouse.existing(road.warehouse).replica(Table("public", "t")))
                assert base is not None
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(comparison, "pin", lambda *_: base)
                    road.pipeline().process_available()
                    assert road.verify("t")["public.t"].is_equal
                # The replica itself has what the server does not show.
                with pytest.raises(VerifyError, match=r"public\.t has a transaction that has committed in the WAL"):
                    road.verify("t", timeout_s=3)
            finally:
                local.execute("select pg_cancel_backend(%s)", [waiting.info.backend_pid])  # it ends the wait, not the commit
                thread.join()
        assert road.verify("t")["public.t"].is_equal
        road.connection.close()


def test_published_rows_and_columns_are_compared(database: postgres.Database, spark: Any, tmp_path: Path) -> None:
    """Row filters, column lists, generated columns, partitions, parents of other tables."""
    road = Verified(database, spark, tmp_path, publication="published", slot="published")
    road.execute(
        "create table filtered (id int primary key, a int, hidden text, twice int generated always as (a * 2) stored)",
        "create table parts (id int primary key, a int) partition by range (id)",
        "create table part_1 partition of parts for values from (0) to (100)",
        "create table part_2 partition of parts for values from (100) to (200)",
        "create table parent (id int primary key)",
        "create table child () inherits (parent)",
        "create publication published for table filtered (id, a) where (id < 10), table parts, table only parent"
        " with (publish_via_partition_root)",
    )
    road.land()
    road.execute(
        "insert into filtered select i, i, 'hidden' from generate_series(1, 20) i",
        "insert into parts values (1, 1), (150, 2)",
        "insert into parent values (1)",
        "insert into child values (2)",
    )
    road.run()
    results = road.verify()
    assert {name: (r.is_equal, r.server_rows) for name, r in results.items()} == {
        "public.filtered": (True, 9),
        "public.parts": (True, 2),
        "public.parent": (True, 1),
    }
    road.connection.close()


def test_a_partition_that_is_not_published_as_itself_any_more(
    database: postgres.Database, spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left out. The message names it, and the table whose replica lacks its rows."""
    road = Verified(database, spark, tmp_path, publication="rooted", slot="rooted")
    road.execute(
        "create table parts (id int primary key, a int) partition by range (id)",
        "create table part_1 partition of parts for values from (0) to (100)",
        "create publication rooted for all tables with (publish_via_partition_root)",
    )
    road.land()
    road.execute(
        "insert into parts values (1, 1), (2, 2)",
        "alter table parts detach partition part_1",
        "insert into part_1 values (3, 3)",
        "alter table parts attach partition part_1 for values from (0) to (100)",
        "update parts set a = 10 where id = 1",
    )
    road.run()
    results = road.verify()
    assert {name: (result.is_equal, result.differences) for name, result in results.items()} == {
        "public.parts": (False, [Difference("missing", {"id": "3"})])
    }
    assert exit_code(list(results.values())) == DIFFERENT
    assert "public.part_1 is a partition now, and its changes come as those of public.parts: not compared" in caplog.text
    assert "cdcpipe-spark snapshot --table public.parts" in caplog.text
    with pytest.raises(InvalidArgumentsError, match=r"public\.part_1 is a partition now"):
        road.verify("part_1")
    road.connection.close()


def test_a_published_table_that_the_warehouse_lacks_is_named(
    database: postgres.Database, spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no table that was compared, so the exit code does not say that all are equal."""
    road = Verified(database, spark, tmp_path, publication="lacking", slot="lacking")
    road.execute("create table t (id int primary key)", "create publication lacking for all tables")
    road.land()
    road.execute("insert into t values (1)")
    road.run()
    road.execute("create table late (id int primary key)", "create table late_heap (id int)")
    results = road.verify()
    assert {name: result.is_equal for name, result in results.items()} == {"public.t": True, "public.late": False}
    assert "the warehouse has no such table" in str(results["public.late"].problem)
    assert "public.late_heap has no key" in caplog.text
    assert exit_code(list(results.values())) == NOT_COMPARED
    assert list(road.verify("t")) == ["public.t"]
    road.execute("alter table t rename to renamed")  # it is there under another name
    assert set(road.verify()) == {"public.t", "public.late"}
    for directory in ("changelog", "replica"):
        shutil.rmtree(road.warehouse / directory / "public.t")
    assert "has gone; cdcpipe-spark snapshot --table public.t" in str(road.verify()["public.t"].problem)
    road.connection.close()


def test_what_can_not_be_compared_is_said_before_spark_is_started(
    database: postgres.Database, pg18: postgres.Cluster, spark: Any, tmp_path: Path
) -> None:
    road = Verified(database, spark, tmp_path, slot="unready")
    road.execute("create table t (id int primary key)")
    road.land()
    road.execute("insert into t values (1)")
    road.run()
    (tmp_path / "empty").mkdir()
    command = ["verify", "--warehouse", str(road.warehouse), "--master", "local[no]"]
    with pg18.database() as other:
        said = spark_cli(*command, "-d", other.dsn, code=1).stderr
    assert "has the changes of database" in said
    command += ["-d", database.dsn]
    assert "there is no such directory" in spark_cli(*command, "--staging", str(tmp_path / "no"), code=1).stderr
    assert "has no log" in spark_cli(*command, "--staging", str(tmp_path / "empty"), code=1).stderr
    road.execute("insert into t values (2)")
    said = spark_cli(*command, code=2).stderr
    assert "slot unready may have changes that the tables lack, and no process takes them" in said
    assert "hint: start cdcpipe-spark run, or run --available-now" in said
    road.connection.close()


@pytest.mark.parametrize("table_format", ["delta", "parquet"])
def test_a_table_that_has_lost_its_key_is_not_said_to_be_right(
    database: postgres.Database, spark: Any, tmp_path: Path, table_format: str
) -> None:
    """Its replica has the rows from before. Nobody may take them for the present ones."""
    road = Verified(database, spark, tmp_path)
    road.execute("create table t (id int primary key)")
    road.land()
    road.execute("insert into t values (1)")
    road.run(format=table_format)
    before = road.query("select pg_current_wal_lsn()::text")[0][0]
    road.execute("alter table t drop constraint t_pkey", "insert into t values (2)")
    road.run(format=table_format)
    for names in ([], ["t"]):
        [found] = road.verify(*names).values()
        assert re.match(r"it has no key since \w+/\w+, and its replica has only the rows from before", found.problem or "")
        assert exit_code([found]) == NOT_COMPARED
    assert [tuple(row) for row in read_as_of(spark, road.warehouse, "public.t", before).collect()] == [(1,)]
    for at in (datetime.now(UTC), Warehouse.existing(road.warehouse).source().position):
        with pytest.raises(WarehouseError, match=r"public\.t has no key since .*, and has changed since"):
            read_as_of(spark, road.warehouse, "public.t", at)
    if table_format == "parquet":
        with pytest.raises(WarehouseError, match=r"public\.t has no key since"):
            road.replica("public.t")
        assert register_views(spark, road.warehouse) == []
    road.connection.close()


def test_refusals(database: postgres.Database, pg18: postgres.Cluster, spark: Any, tmp_path: Path) -> None:
    """A table that can't be compared is not reported as equal."""
    road = Verified(database, spark, tmp_path, slot="refusing")
    road.execute("create table gone (id int primary key)", "create table t (id int primary key)")
    road.land()
    road.execute("insert into gone values (1)", "insert into t values (1)")
    road.run()
    road.execute("drop table gone")
    result = road.verify("gone")["public.gone"]
    assert not result.is_equal
    assert result.problem is not None
    road.execute("create table gone (id int primary key)")
    result = road.verify("gone")["public.gone"]
    assert not result.is_equal
    assert "another table of this name" in str(result.problem)

    with pg18.database() as other, pytest.raises(InvalidArgumentsError, match="has the changes of database"):
        verify(spark, road.warehouse, ("-d", other.dsn))
    road.execute("insert into t values (2)")
    with pytest.raises(VerifyError, match=r"slot refusing (may have changes that the tables lack|did not reach)"):
        road.verify("t")
    with closing(StagingLock(road.staging)), pytest.raises(VerifyError, match="did not reach") as raised:
        road.verify("t", timeout_s=0.5)
    assert "does not use the slot now" in str(raised.value.hint)
    road.prepared = road.land().prepared
    with pytest.raises(VerifyError, match="the tables are at"):
        road.verify("t", timeout_s=0.5)
    road.pipeline().process_available()
    assert road.verify("t")["public.t"] == TableResult(Table("public", "t"), 2, 2, is_equal=True)
    with pytest.raises(InvalidArgumentsError, match="not a warehouse"):
        verify(spark, tmp_path / "nowhere", ("-d", database.dsn))
    assert json.loads((road.warehouse / "_cdcpipe/warehouse.json").read_text())["staging"] == str(road.staging)
    assert Position.parse(json.loads((road.warehouse / "_cdcpipe/warehouse.json").read_text())["begin"]).lsn > LSN(0)
    road.connection.close()
