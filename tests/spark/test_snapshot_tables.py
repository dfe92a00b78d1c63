"""`cdcpipe-spark snapshot`: copies tables again, whatever the warehouse has of them, while the stream runs or not."""

import json
import random
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import postgres
import pytest

import spark_sink
from cdcpipe.lsn import LSN
from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.changelog.tables import changelogs_of
from spark_sink.client.exported import SnapshotError
from spark_sink.delta import file_table
from spark_sink.files.lock import hold_alone
from spark_sink.launcher.config import LauncherConfig
from spark_sink.launcher.launcher import Launcher
from spark_sink.replica import as_of, merge
from spark_sink.schema.table import Table
from spark_sink.staging.filler import SealPolicy
from spark_sink.warehouse import gaps, landed_snapshots, wanted_copies
from spark_sink.warehouse.wanted_copies import waiting
from spark_sink.warehouse.warehouse import Warehouse
from support.cli_process import run_spark_cli
from support.seeds import SEED
from support.snapshots import TableCopies
from support.waiting import until

pytestmark = pytest.mark.spark

BIG = 5000
"""Bytes of a value that is stored outside of its row."""
TABLES = [
    "create table known (id int primary key, v text, total int); alter table known alter v set storage external",
    f"insert into known select g, repeat('x', {BIG}) || g, g from generate_series(1, 100) g",
    "create table emptied (id int primary key, v text)",
    "create table rekeyed (id int primary key, other int not null unique, v text)",
    "insert into rekeyed select g, -g, 'old' from generate_series(1, 10) g",
    "create table still (id int primary key, d date)",
    "insert into still values (1, '2024-01-01'), (2, 'infinity')",
    "create table nokey (v text)",
    "insert into nokey values ('a'), ('a')",
    "create publication everything for table known, emptied, rekeyed, nokey",
]
FIRST = [
    "update known set total = 0 where id <= 10",
    "insert into emptied values (1, 'x'), (2, 'y')",
    "update rekeyed set v = 'new' where id = 1",
    "insert into nokey values ('b')",
]
COLUMNS = {"known": ["id", "v", "note"], "emptied": ["id", "v"], "rekeyed": ["id", "other", "v"], "still": ["id"]}
"""What is compared, as text. (`known.total` is in several columns.)"""


def assert_all_equal(road: TableCopies) -> None:
    for table, columns in COLUMNS.items():
        road.assert_equal(table, *columns)


@pytest.mark.parametrize("table_format", ["delta", pytest.param("parquet", marks=pytest.mark.slow)])
def test_a_replica_is_its_table_whatever_was_known_of_it(
    database: postgres.Database, spark: Any, tmp_path: Path, table_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    road = TableCopies(database, spark, tmp_path, f"s_{database.name}"[:63])
    road.format = table_format
    road.execute("set timezone = 'UTC'", *TABLES)
    road.land()
    road.execute(*FIRST)
    road.run()
    assert road.replica("public.known").count() == 10
    ((before,),) = road.query("select pg_current_wal_insert_lsn()::text")

    # The tables have not come to the snapshot yet.
    road.execute(
        "alter table known add note text default 'told nobody', alter total type bigint using total * 3000000000",
        "delete from emptied",
        "alter table rekeyed drop constraint rekeyed_pkey, add primary key (other)",
        "alter publication everything add table still",
    )
    taken = road.snapshot("known", "emptied", "rekeyed", "still", "nokey")
    assert {table.name: rows for table, (rows, _) in taken.copied.items()} == {
        "known": 100,
        "emptied": 0,
        "rekeyed": 10,
        "still": 2,
        "nokey": 2 + 1,
    }
    assert_all_equal(road)
    road.execute("update known set total = total + 1 where id > 90", "delete from known where id = 50")
    road.execute(
        "insert into emptied values (3, 'z')",
        "update rekeyed set other = 77 where id = 3",
        "update still set d = null where id = 1",
    )
    road.run()
    assert_all_equal(road)
    road.assert_verified()

    # Now they are past it; nothing of what comes after it is lost, and nothing of it comes back.
    def go_on() -> None:
        road.execute("update known set note = 'late' where id = 7", "delete from known where id between 20 and 29")
        road.execute(
            "insert into known values (500, 'new', 1, 'late')", "update known set id = 501 where id = 30", "truncate emptied"
        )
        road.execute("insert into emptied values (4, 'after')", "alter table known add later int default 7")
        road.execute("insert into emptied values (5, 'first'); update known set total = 5 where id = 40")
        road.run()

    if table_format == "delta":
        # Killed between changelog and replica: the next start makes the replica anew.
        with monkeypatch.context() as patched:

            def go_on_then_fail() -> None:
                go_on()
                patched.setattr(merge, "remake", raise_interrupted)

            with pytest.raises(Exception, match="unexpected RuntimeError in line"):
                road.snapshot("known", while_held=go_on_then_fail)
        assert [table.name for table, _ in landed_snapshots.unfinished(road.house)] == ["known"]
        road.run()
        assert not landed_snapshots.unfinished(road.house)
    else:
        road.snapshot("known", while_held=go_on)
    assert_all_equal(road)
    road.assert_equal("known", "id", "later")
    road.snapshot("known", "emptied")
    road.assert_equal("known", "id", "v", "note", "later")
    road.assert_verified()

    assert as_of.read_as_of(spark, road.warehouse, "public.known", LSN.parse(before)).count() == 10
    for table in (*COLUMNS, "nokey"):
        road.assert_once(table)
    assert {row["_cdc_op"] for row in road.changes("emptied").where("id is null").collect()} == {"truncate"}
    if table_format == "delta":
        # From the changelog alone.
        for table in COLUMNS:
            delta_path = road.house.replica(Table("public", table))
            delta_path.rename(tmp_path / f"{table}.away")
        road.run()
        assert_all_equal(road)
    road.connection.close()


@pytest.mark.parametrize("table_format", ["delta", "parquet"])
def test_a_copy_that_ended_before_its_rows_were_there_is_none(
    database: postgres.Database, spark: Any, tmp_path: Path, table_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the table would count as copied, and nothing would ever copy it."""
    road = TableCopies(database, spark, tmp_path, f"s_{database.name}"[:63])
    road.format = table_format
    road.execute(
        "create table t (id int primary key, v text); insert into t values (1, 'a'), (2, 'b')",
        "create table bare (id int primary key)",
        "create publication everything for table t, bare",
    )
    road.land()
    road.execute("update t set v = 'c' where id = 1")
    road.run()
    table, bare, house = Table("public", "t"), Table("public", "bare"), road.house
    versions = house.versions(table)

    def fail() -> None:
        patched.setattr(type(changelogs_of(spark, house)), "add_snapshot", raise_interrupted)

    def go_on_and_fail() -> None:
        road.execute("alter table t add n int default 7", "update t set v = 'd' where id = 1")
        road.run()
        fail()

    for while_held, reasons in ((fail, {"before"}), (go_on_and_fail, {"before", "a copy of its rows was killed"})):
        ((now,),) = road.query("select pg_current_wal_insert_lsn()::text")
        wanted_copies.want_copy(house, table, LSN.parse(now), "before")
        with monkeypatch.context() as patched, pytest.raises(Exception, match="unexpected RuntimeError in line"):
            road.snapshot("t", while_held=while_held)
        [(unfinished, position)] = landed_snapshots.unfinished(house)
        assert unfinished == table
        merge.finish_snapshots(spark, house)
        assert not landed_snapshots.unfinished(house)
        [waiting] = wanted_copies.waiting(house)
        assert {reason.text for reason in waiting.reasons} == reasons
        assert not any(version.snapshot for version in house.versions(table))
        assert not gaps.is_copied_since(house, table, position.lsn)
    assert house.versions(table)[: len(versions)] == versions

    # The first copy of an empty table is whole without a row.
    with monkeypatch.context() as patched:
        patched.setattr(landed_snapshots, "record_end", raise_interrupted)
        with pytest.raises(Exception, match="unexpected RuntimeError in line"):
            road.snapshot("bare")
    merge.finish_snapshots(spark, house)
    assert gaps.is_copied_since(house, bare, 1)

    road.snapshot("t")
    road.run()
    road.assert_equal("t", "id", "v", "n")
    road.assert_once("t")
    assert not wanted_copies.waiting(house)
    road.connection.close()


def test_killed_while_its_files_come_to_the_changelog_a_copy_is_read_again(
    database: postgres.Database, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server still holds the snapshot, but the files are no longer where the finished chunks say."""
    road = TableCopies(database, spark, tmp_path, f"s_{database.name}"[:63])
    road.execute(
        "create table t (id int primary key, v text); insert into t select g, 'a' || g from generate_series(1, 500) g",
        "create table nokey (v text); insert into nokey values ('a'), ('a')",
        "create publication everything for table t, nokey",
    )
    road.land()
    road.execute("update t set v = 'c' where id = 1", "insert into nokey values ('b')")
    road.run()
    with monkeypatch.context() as patched:
        patched.setattr(file_table, "commit", raise_interrupted)
        with pytest.raises(Exception, match="unexpected RuntimeError in line"):
            road.snapshot("t", "nokey", hold_s=60.0)
    assert landed_snapshots.unfinished(road.house)
    again = road.snapshot("t", "nokey", hold_s=60.0)
    assert {table.name: rows for table, (rows, _) in again.copied.items()} == {"t": 500, "nokey": 3}
    assert Counter(row["v"] for row in road.changes("nokey").where("_cdc_op = 'snapshot'").collect()) == {"a": 2, "b": 1}
    road.execute("delete from t where id = 2")
    road.run()
    road.assert_equal("t", "id", "v")
    for table in ("t", "nokey"):
        road.assert_once(table)
    road.connection.close()


def raise_interrupted(*_arguments: Any, **_options: Any) -> None:
    msg = "interrupted"
    raise RuntimeError(msg)


KILLED = """
import os, signal, sys
from spark_sink import __main__
from spark_sink.replica import merge

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if {kills}:
    merge.remake = kill
sys.exit(__main__.invoke(sys.argv[1:]))
"""


BUSY_ROWS = 600


def test_while_another_process_keeps_the_tables_in_step(database: postgres.Database, spark: Any, tmp_path: Path) -> None:
    """It is killed once and started again, while writers run all the time. The tables may be ahead of the snapshot or behind it."""
    road = TableCopies(database, spark, tmp_path, f"s_{database.name}"[:63])
    road.execute(
        "create table busy (id int primary key, v text, n int); alter table busy alter v set storage external",
        f"insert into busy select g, repeat('x', {BIG}) || g, 0 from generate_series(1, {BUSY_ROWS}) g",
        "create publication everything for table busy",
    )
    road.prepared = road.land().prepared
    stopping = threading.Event()
    print(f"CDCPIPE_TEST_SEED={SEED}")
    writer = threading.Thread(target=write, args=(database, random.Random(SEED), stopping))
    config = LauncherConfig(
        road.slot, road.staging, (road.publication,), ("-d", database.dsn), seal=SealPolicy(seal_interval_s=0.2)
    )
    arguments = ["snapshot", "-d", database.dsn, "--warehouse", str(road.warehouse), "--table", "public.busy"]
    arguments += ["--snapshot-chunk-size", "256KiB"]
    with Launcher(config), road.pipeline(trigger_interval_s=2) as pipeline:
        writer.start()
        try:
            until(lambda: pipeline.progress.changes, "the first changes", 300)
            for kills in (True, False):
                program = [sys.executable, "-c", KILLED.format(kills=kills), *arguments]
                done = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, text=True)
                assert done.returncode == (-signal.SIGKILL if kills else ExitCode.SUCCESS), done.stderr
            assert done.stdout.startswith("public.busy: ")
        finally:
            stopping.set()
            writer.join()
        road.assert_verified("public.busy")
    road.assert_once("busy")
    assert not landed_snapshots.unfinished(road.house)
    road.connection.close()


def test_stopped_in_the_middle_it_goes_on_with_the_next_chunk(
    database: postgres.Database, spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It uses the snapshot that the server still holds, for the same tables, once."""
    road = TableCopies(database, spark, tmp_path, f"s_{database.name}"[:63])
    road.execute(
        "create table busy (id int primary key, v text, n int) partition by range (id); alter table busy alter v set storage plain",
        "create table most partition of busy default; create table rest partition of busy for values from (401) to (501)",
        f"insert into busy select g, repeat('x', {BIG}) || g, 0 from generate_series(1, 500) g",
        "create publication everything for table busy with (publish_via_partition_root)",
    )
    road.land()
    road.execute("update busy set n = 1 where id = 1")
    road.run()
    notes = road.house.root / "_cdcpipe/snapshot_tables"
    blocker = database.connect()
    blocker.autocommit = False

    def done() -> int:
        return len(list(notes.glob("*/notes/[0-9]*.json")))

    snapshot = road.table_snapshot("busy", hold_s=60.0)
    snapshot.prepare(lambda: False)
    blocker.execute("lock table rest in access exclusive mode")  # so that the copy does not come to its end
    snapshot.start(spark)
    until(lambda: done() >= 3 or snapshot.wait(0), "three chunks")
    snapshot.stop()
    blocker.rollback()
    with pytest.raises(SnapshotError, match="stopped"):
        snapshot.wait()
    road.execute("update busy set n = n + 1, id = -id where id % 3 = 0", "delete from busy where id % 5 = 0", "vacuum busy")
    caplog.clear()
    with caplog.at_level("INFO", "spark_sink"):
        again = road.snapshot("busy", hold_s=60.0)
    (there,) = [
        found[1] for text in caplog.messages if (found := re.match(r"public.busy: an earlier run has copied (\d+) of", text))
    ]
    assert int(there) >= 3
    assert [rows for rows, _ in again.copied.values()] == [500]
    road.run()
    road.assert_equal("busy", "id", "v", "n")
    road.assert_once("busy")
    # What has come to its end leaves nothing: the next one is of now.
    assert road.snapshot("busy", hold_s=60.0).copied[Table("public", "busy")][1] > again.copied[Table("public", "busy")][1]
    blocker.close()
    road.connection.close()


def write(database: postgres.Database, chance: random.Random, stopping: threading.Event) -> None:
    with database.connect() as connection:
        number = 0
        while not stopping.wait(0.05):
            number += 1
            row = chance.randint(1, BUSY_ROWS)
            statement = chance.choice(
                [
                    f"update busy set n = n + 1 where id between {row} and {row + 20}",
                    f"delete from busy where id = {row}",
                    f"insert into busy values ({10000 + number}, repeat('y', {BIG}), 0)",
                    f"update busy set id = id + 1000000 where id = {row}",
                    f"update busy set v = 'short' where id = {row}",
                ]
            )
            connection.execute(statement)


def test_certain_failures_show_at_once(
    database: postgres.Database, spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    road = TableCopies(database, spark, tmp_path, f"s_{database.name}"[:63])
    road.execute("create table t (id int primary key)", "create table other (id int)", "create publication everything for table t")
    road.land()
    road.execute("insert into t values (1)")
    road.run()
    common = ["-d", database.dsn, "--warehouse", str(road.warehouse)]
    named = run_spark_cli("snapshot", *common)
    assert (named.returncode, "--table SCHEMA.NAME; " in named.stderr) == (ExitCode.INVALID_ARGS, True)
    unpublished = run_spark_cli("snapshot", *common, "--table", "public.other")
    assert "not published: public.other; the published tables are: public.t" in unpublished.stderr
    assert unpublished.returncode == ExitCode.INVALID_ARGS
    with hold_alone(road.warehouse / "_cdcpipe/snapshot.lock") as is_alone:
        assert is_alone
        assert "another cdcpipe-spark snapshot" in run_spark_cli("snapshot", *common, "--table", "public.t").stderr
    state = json.dumps({"version": 1, "slot": road.slot, "is_complete": False})
    (road.warehouse / "_cdcpipe/snapshot.json").write_text(state)
    assert "with --snapshot never run gives it up" in run_spark_cli("snapshot", *common, "--table", "public.t").stderr
    config = LauncherConfig(road.slot, road.staging, (road.publication,), ("-d", database.dsn), available_now=True)
    spark_sink.run(spark_sink.RunConfig(config, road.warehouse, snapshot="never"), spark)
    assert "the initial snapshot is given up" in caplog.text
    assert [str(each.table) for each in waiting(Warehouse.existing(road.warehouse))] == ["public.t"]
    road.snapshot("t")
    assert waiting(Warehouse.existing(road.warehouse)) == []
    road.connection.close()
