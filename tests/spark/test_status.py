"""`cdcpipe-spark status` and what it is made of; `cdcpipe slot`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pexpect
import postgres
import pytest

from cdcpipe.errors import CdcpipeError, SlotDoesNotExistError
from cdcpipe.lsn import LSN
from cdcpipe.pgoutput.messages import Insert
from spark_sink.client.slot_monitor import Lag, SlotMonitor, SlotReport, WALHistory
from spark_sink.delta import log as delta_log
from spark_sink.delta.log import read_table
from spark_sink.schema.table import Table, Version
from spark_sink.staging import last_error
from spark_sink.staging.commit_times import CommitTimes
from spark_sink.staging.lock import lock
from spark_sink.staging.log import Epoch, Position, list_segments, log_end
from spark_sink.staging.readers import register_reader
from spark_sink.status import ladder
from spark_sink.warehouse.warehouse import Warehouse
from support.blocked_imports import import_without
from support.cli_process import CLI, run_cli, spark_cli
from support.paths import ROOT
from support.pgoutput_build import build
from support.segments import COMMIT_TIME_US, START_LSN, Log, relation
from support.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMMIT_TIME_S = COMMIT_TIME_US / 1e6 + 946_684_800


# --- the ladder ---


class Times(CommitTimes):
    """Transactions by hand: end LSN → commit time."""

    def __init__(self, **transactions: float) -> None:
        super().__init__([])
        self._transactions = {int(end[1:]): at for end, at in transactions.items()}

    def newest(self, lsn: int) -> float | None:
        return max((at for end, at in self._transactions.items() if end <= lsn), default=None)

    def oldest_after(self, lsn: int) -> float | None:
        return min((at for end, at in self._transactions.items() if end > lsn), default=None)


def report(wal: int, sent: int | None = None, confirmed: int | None = None) -> SlotReport:
    return SlotReport({}, wal, sent, confirmed)


TIMES = Times(_100=10.0, _200=20.0, _300=30.0)
NOW = 50.0


@pytest.mark.parametrize(
    ("server", "sealed", "tables", "expected"),
    [
        pytest.param(report(300, 300, 300), 300, (300, 300), (0, 0, 0, 0, 0, 0), id="all are where the server is"),
        pytest.param(report(900, 900, 900), 300, (300, 300), (0, 0, 0, 0, 0, 0), id="idle: only the server goes on"),
        pytest.param(report(900, 900, 900), 300, (200, 100), (0, 0, 0, 0, 700, 800), id="tables lack what the log has"),
        pytest.param(report(900, 900, 300), 300, (200, 200), (0, 0, 600, 600, 700, 700), id="replica as far as changelog"),
        pytest.param(report(400, None, 300), 300, (300, 300), (0, None, 100, 100, 100, 100), id="nobody streams"),
        pytest.param(None, 300, (300, 200), (0, 0, 100), id="nobody was asked"),
        pytest.param(None, 300, (None, None), (0, None, None), id="no tables yet"),
    ],
)
def test_ladder_in_bytes(
    server: SlotReport | None, sealed: int, tables: tuple[int | None, ...], expected: tuple[int | None, ...]
) -> None:
    positions = [None if lsn is None else Position(1, lsn) for lsn in tables]
    rungs = ladder.build(server, Position(1, sealed), zip(("changelog", "replica"), positions, strict=True), TIMES, NOW)
    assert tuple(rung.behind_bytes for rung in rungs) == expected
    assert [rung.name for rung in rungs] == ["server", "sent", "confirmed", "sealed", "changelog", "replica"][-len(expected) :]


def test_ladder_in_seconds() -> None:
    def seconds(server: SlotReport | None, changelog: int) -> dict[str, tuple[float | None, bool]]:
        rungs = ladder.build(server, Position(1, 300), [("changelog", Position(1, changelog))], TIMES, NOW)
        return {rung.name: (rung.behind_seconds, rung.at_most) for rung in rungs}

    # The oldest transaction that it lacks committed at 20, however long before that the one before it was.
    assert seconds(None, 100) == {"sealed": (0.0, False), "changelog": (30.0, False)}
    # What the log lacks is not known, but the newest that it has committed at 30.
    assert seconds(report(900, 900, 300), 300)["sealed"] == (20.0, True)
    # It has everything up to where the server was at 45, whenever the newest commit was.
    rung = ladder.build(report(900, 900, 300), Position(1, 300), [], TIMES, NOW, ladder.Known(600, 45.0))[-1]
    assert (rung.behind_bytes, rung.behind_seconds, rung.at_most) == (300, 5.0, True)
    assert ladder.build(report(9), None, [], TIMES, NOW)[0].behind_bytes == 0


def test_commit_times_come_from_the_segments(tmp_path: Path) -> None:
    log = Log(tmp_path)
    fruit = relation(1, "fruit", ("id", 23))
    log.segment([build(Insert(None, 1, (b"1",)))], before=[fruit])
    log.segment([build(Insert(None, 1, (b"2",)))], before=[fruit])
    times = CommitTimes(list_segments(tmp_path))
    assert times.newest(START_LSN) is None
    assert times.newest(START_LSN + 0x100) == times.oldest_after(START_LSN + 0x100) == COMMIT_TIME_S
    assert times.oldest_after(log.end_lsn) is None


def test_lag_is_measured_on_the_history_of_the_wal() -> None:
    history = WALHistory()
    assert history.lag(5, 1.0) == (0, 0.0, False)
    for lsn, now in ((100, 1.0), (100, 2.0), (200, 3.0), (300, 4.0)):
        history.add(lsn, now)
    assert history.lag(300, 9.0) == Lag(0, 0.0)
    assert history.lag(250, 9.0) == Lag(50, 5.0)
    assert history.lag(100, 9.0) == Lag(200, 6.0)
    assert history.lag(50, 9.0) == Lag(250, 8.0, at_least=True)
    for number in range(20_000):
        history.add(400 + number, 10.0 + number)
    behind = history.lag(100, 20_010.0)
    assert behind.bytes == 20_299
    assert behind.seconds == 20_007.0
    assert 10_000 <= history.lag(10_400, 20_010.0).seconds < 20_007


# --- Delta's log, without Spark ---


def commit(log: Path, version: int, *actions: dict[str, Any]) -> None:
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{version:020d}.json").write_text("\n".join(map(json.dumps, actions)))


def added(path: str, rows: int | None, size: int = 10, vector: dict[str, Any] | None = None) -> dict[str, Any]:
    statistics = {} if rows is None else {"stats": json.dumps({"numRecords": rows})}
    return {"add": {"path": path, "size": size, "deletionVector": vector} | statistics}


def test_a_log_is_replayed(tmp_path: Path) -> None:
    log = tmp_path / "_delta_log"
    assert read_table(tmp_path) is None
    commit(log, 0, {"commitInfo": {"timestamp": 1000}}, {"metaData": {}}, added("a", 10), added("b", 5))
    first = read_table(tmp_path)
    assert first == delta_log.TableState(version=0, lsn=None, written_ms=1000, rows=15, sizes=(10, 10))
    vector = {"storageType": "u", "pathOrInlineDv": "x", "offset": 1, "sizeInBytes": 34, "cardinality": 4}
    commit(
        log,
        1,
        {"commitInfo": {"timestamp": 2000}},
        {"txn": {"appId": "cdcpipe", "version": 77}},
        {"txn": {"appId": "somebody", "version": 99}},
        {"remove": {"path": "a"}},
        added("a", 10, vector=vector),
    )
    assert read_table(tmp_path, first) == delta_log.TableState(1, 77, 2000, 11, (10, 10))
    commit(log, 2, {"remove": {"path": "a", "deletionVector": vector}}, added("c", None))
    state = read_table(tmp_path)
    assert state is not None
    assert (state.files, state.rows, state.lsn) == (2, None, 77)
    assert read_table(tmp_path, state) is state
    (log / f"{3:020d}.json").write_text("{")
    with pytest.raises(ValueError, match="Expecting"):
        read_table(tmp_path)


@pytest.mark.spark
def test_what_spark_writes_is_counted(spark: "SparkSession", tmp_path: Path) -> None:
    path = tmp_path / "t"
    name = f"delta.`{path}`"
    spark.sql(
        f"CREATE TABLE {name} (id int) USING delta TBLPROPERTIES "
        "('delta.enableDeletionVectors' = 'true', 'delta.checkpointInterval' = '3')"
    )
    for statement in (
        f"INSERT INTO {name} SELECT id FROM range(100)",
        f"DELETE FROM {name} WHERE id % 10 = 3",
        f"INSERT INTO {name} SELECT id FROM range(7)",
        f"DELETE FROM {name} WHERE id = 4",
        f"OPTIMIZE {name}",
        f"INSERT INTO {name} VALUES (1)",
    ):
        spark.sql(statement)
        state = read_table(path)
        assert state is not None
        assert state.rows == spark.read.format("delta").load(str(path)).count(), statement
        assert state.files == spark.sql(f"DESCRIBE DETAIL {name}").collect()[0]["numFiles"]
    assert list((path / "_delta_log").glob("*.checkpoint.parquet"))


# --- the last error ---


def test_the_last_error_is_that_of_whoever_has_the_directory(tmp_path: Path) -> None:
    fd = lock(tmp_path)
    last_error.note(tmp_path, "run", CdcpipeError("mine"))
    owner = json.loads((tmp_path / "lock").read_text())
    (tmp_path / "lock").write_text(json.dumps(owner | {"pid": owner["pid"] + 1}))
    last_error.note(tmp_path, "run", CdcpipeError("of one that was refused"))
    last_error.clear(tmp_path)
    found = last_error.read(tmp_path)
    assert found is not None
    assert found["message"] == "mine"
    os.close(fd)
    last_error.clear(tmp_path)
    assert last_error.read(tmp_path) is None


def test_the_last_error_is_kept(tmp_path: Path) -> None:
    last_error.note(tmp_path / "nowhere", "run", ValueError("x"))
    assert not (tmp_path / "nowhere").exists()
    assert last_error.read(tmp_path) is None
    last_error.note(tmp_path, "run", ValueError("a row's value"))
    found = last_error.read(tmp_path)
    assert found is not None
    assert (found["message"], found["exit_code"]) == ("unexpected ValueError", 7)
    last_error.note(tmp_path, "land", SlotDoesNotExistError("no slot", hint="make one"))
    found = last_error.read(tmp_path)
    assert found is not None
    assert (found["command"], found["message"], found["hint"], found["exit_code"]) == ("land", "no slot", "make one", 8)


def test_land_notes_its_error_and_status_shows_it(tmp_path: Path) -> None:
    arguments = ("land", "-h", str(tmp_path), "-S", "s", "--publication", "p", "--staging", str(tmp_path / "staging"))
    said = spark_cli(*arguments, code=2).stderr
    found = json.loads(spark_cli("status", "--staging", str(tmp_path / "staging"), "--json").stdout)
    assert found["last_error"]["message"] in said
    assert (found["last_error"]["command"], found["last_error"]["exit_code"]) == ("land", 2)
    assert "last error 20" in spark_cli("status", "--staging", str(tmp_path / "staging")).stdout


# --- status ---


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A staging directory and a warehouse with a table, made by hand; the replica is one transaction behind."""
    log = Log(tmp_path / "staging")
    fruit = relation(1, "fruit", ("id", 23))
    for number in range(3):
        log.segment([build(Insert(None, 1, (b"%d" % number,)))], before=[fruit])
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(Epoch(1, "7123456789", 1, "db", "s", ("p",), {}, START_LSN), tmp_path / "staging")
    end = log_end(tmp_path / "staging")
    assert end is not None
    house.record(Position(1, START_LSN))
    house.record(end)
    table = Table("public", "fruit")
    house.write_versions(table, [Version(0, 0, 1, ("id",), ("id",))])
    register_reader(tmp_path / "staging", "tables", Position(1, START_LSN + 0x200))
    for path, lsn, rows in ((house.changelog(table), end.lsn, 3), (house.replica(table), START_LSN + 0x200, 2)):
        transaction = {"txn": {"appId": "cdcpipe", "version": int(lsn)}}
        commit(path / "_delta_log", 0, {"commitInfo": {"timestamp": 1_700_000_000_000}}, transaction, added("a", rows))
    return tmp_path


def test_status_as_json(pipeline: Path) -> None:
    found = json.loads(spark_cli("status", "--warehouse", str(pipeline / "warehouse"), "--json").stdout)
    assert found["staging"] == str(pipeline / "staging")
    assert (found["server"], found["server_error"], found["last_error"], found["launcher"]) == (None, None, None, None)
    rungs = {rung["rung"]: rung for rung in found["ladder"]}
    assert {name: (rung["position"], rung["behind_bytes"]) for name, rung in rungs.items()} == {
        "sealed": ("1:0/1300", 0),
        "changelog": ("1:0/1300", 0),
        "replica": ("1:0/1200", 0x100),
    }
    assert rungs["sealed"]["commit_time"] == "2025-01-01T00:00:00.000Z"
    assert rungs["replica"]["behind_seconds"] > 0
    assert not rungs["replica"]["at_most"]
    (table,) = found["tables"]
    assert (table["table"], table["versions"]) == ("public.fruit", 1)
    assert table["replica"] == {
        "position": "1:0/1200",
        "rows": 2,
        "files": 1,
        "size": 10,
        "version": 0,
        "written": "2023-11-14T22:13:20.000Z",
    }
    assert (table["changelog"]["rows"], table["changelog"]["position"]) == (3, "1:0/1300")


def test_a_replica_that_is_not_there_is_behind(pipeline: Path) -> None:
    """It lacks all from its table's first change on; a table without a key, or without changes, is to have none."""
    house = Warehouse.existing(pipeline / "warehouse")

    def rung() -> tuple[str, int]:
        found = json.loads(spark_cli("status", "--warehouse", str(house.root), "--json").stdout)
        replica = found["ladder"][-1]
        assert replica["rung"] == "replica"
        return replica["position"], replica["behind_bytes"]

    keyless, new = Table("public", "keyless"), Table("public", "new")
    house.write_versions(keyless, [Version(0x1100, 0, 2, (), ())])
    house.write_versions(new, [Version(0x1180, 0, 3, (), ()), Version(0x1280, 0, 3, ("id",), ("id",))])
    commit(house.changelog(keyless) / "_delta_log", 0, {"txn": {"appId": "cdcpipe", "version": 0x1300}}, added("a", 1))
    assert rung() == ("1:0/1200", 0x100)
    commit(house.changelog(new) / "_delta_log", 0, {"txn": {"appId": "cdcpipe", "version": 0x1300}}, added("a", 1))
    assert rung() == ("1:0/117F", 0x181)
    shutil.rmtree(house.replica(Table("public", "fruit")))
    assert rung() == ("1:0/1000", 0x300)


def test_status_of_parquet_tables(pipeline: Path) -> None:
    house = Warehouse(pipeline / "parquet", "parquet")
    house.open(Epoch(1, "7123456789", 1, "db", "s", ("p",), {}, START_LSN))
    house.record(Position(1, 0x1200))
    house.write_versions(Table("public", "fruit"), [])
    (house.changelog(Table("public", "fruit")) / "_cdc_batch=000001-0000000000001000-0000000000001200").mkdir(parents=True)
    arguments = ("status", "--warehouse", str(house.root), "--json")
    assert "--staging DIR does" in spark_cli(*arguments, code=1).stderr
    found = json.loads(spark_cli(*arguments, "--staging", str(pipeline / "staging")).stdout)
    assert [(rung["rung"], rung["behind_bytes"]) for rung in found["ladder"]] == [("sealed", 0), ("changelog", 0x100)]
    (table,) = found["tables"]
    assert (table["changelog"]["position"], table["changelog"]["rows"], table["replica"]) == ("1:0/1200", None, None)


def watch(pipeline: Path, *arguments: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "spark_sink", "status", "--warehouse", str(pipeline / "warehouse"), *arguments]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_status_again_and_again(pipeline: Path, number: signal.Signals) -> None:
    with watch(pipeline, "--watch", "0.1", "--json") as process:
        assert process.stdout is not None
        times = [json.loads(process.stdout.readline())["time"] for _ in range(2)]
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert times[0] < times[1]
    assert (process.returncode, errors) == (0, "")


def test_status_in_blocks(pipeline: Path) -> None:
    with watch(pipeline, "--watch", "0.1") as process:
        assert process.stdout is not None
        seen = ""
        while seen.count("\n\nstaging ") < 1:
            seen += process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert "\x1b" not in seen
    lines = [line.split() for line in seen.splitlines()]
    assert ["sealed", "1:0/1300", "0", "B", "0.0", "2025-01-01T00:00:00.000Z"] in lines
    assert any(line[:4] == ["replica", "1:0/1200", "256", "B"] for line in lines)
    assert ["public.fruit", "3", "1", "1:0/1300", "2", "1", "1:0/1200", "2023-11-14T22:13:20.000Z"] in lines


def test_status_on_a_terminal_is_drawn_again(pipeline: Path) -> None:
    argv = ["-m", "spark_sink", "status", "--warehouse", str(pipeline / "warehouse"), "--watch"]
    terminal = pexpect.spawn(sys.executable, argv, cwd=str(ROOT), timeout=60, dimensions=(40, 200), encoding="utf-8")
    for _ in range(2):
        terminal.expect_exact("\x1b[H\x1b[2Jstaging ")
    terminal.sendintr()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


@pytest.mark.parametrize("arguments", [[], ["--watch", "--json"], ["--staging", "x", "--watch", "0"]])
def test_usage_errors(arguments: list[str]) -> None:
    assert "cdcpipe-spark: error: " in spark_cli("status", *arguments, code=1).stderr


@pytest.mark.parametrize("module", ["commands.status", "status.report", "client.slot_monitor", "delta.log", "status.ladder"])
def test_status_needs_no_spark(module: str) -> None:
    done = import_without({"pyspark", "pandas", "py4j"}, f"spark_sink.{module}")
    assert done.returncode == 0, done.stderr


def test_status_of_a_staging_directory_needs_nothing() -> None:
    done = import_without({"pyspark", "pandas", "py4j", "numpy", "pyarrow"}, "spark_sink.status.report")
    assert done.returncode == 0, done.stderr


# --- the server's rungs ---


@pytest.fixture
def slot(database: postgres.Database) -> str:
    with database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        connection.execute("create publication p for all tables")
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (database.name,))
    return database.name


def test_slot_says_where_it_is(database: postgres.Database, slot: str) -> None:
    arguments = ("slot", "-d", database.dsn, "-S", slot)
    code, out, err = run_cli(*arguments)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["slot"], found["plugin"], found["database"]) == (slot, "pgoutput", database.name)
    assert (found["active"], found["active_pid"], found["sent_lsn"], found["wal_status"]) == (False, None, None, "reserved")
    assert LSN.parse(found["restart_lsn"]) <= LSN.parse(found["confirmed_flush_lsn"]) <= LSN.parse(found["wal_lsn"])
    with CLI("-d", database.dsn, "-S", slot, "--publication", "p") as stream:
        active = until(lambda: next((one for one in [json.loads(run_cli(*arguments)[1])] if one["sent_lsn"]), None))
        assert active["active"]
        assert stream.quit() == 0
    assert run_cli("slot", "-d", database.dsn, "-S", "nope")[0] == 8
    assert run_cli("slot", "-d", database.dsn)[0] == 1


def test_slot_is_watched_until_a_signal(database: postgres.Database, slot: str) -> None:
    with CLI("slot", "-d", database.dsn, "-S", slot, "--watch", "0.1", header=False) as cli:
        assert cli.process.stdout is not None
        for _ in range(3):
            assert json.loads(cli.process.stdout.readline())["slot"] == slot
        cli.process.send_signal(signal.SIGINT)
        assert cli.wait() == 0
        assert cli.stderr == ""


def test_the_monitor_measures_lag_and_outlives_the_server(pg18: postgres.Cluster) -> None:
    del pg18  # it skips the test where there is no 18
    with postgres.Cluster("18") as cluster, cluster.database() as made, made.connect() as connection:
        connection.execute("create table t (id int)")
        connection.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
        with SlotMonitor(("-d", made.dsn), "s", 0.1) as monitor:
            first = monitor.wait_for_report(60)
            assert first.confirmed_flush_lsn is not None
            assert monitor.lag(first.wal_lsn + (1 << 40), time.monotonic()) == Lag(0, 0.0)
            connection.execute("insert into t select generate_series(1, 1000)")
            lag = until(lambda: (found := monitor.lag(first.wal_lsn, time.monotonic())) is not None and found.bytes and found)
            assert lag.bytes > 1000
            connection.close()
            cluster.restart("fast")
            until(lambda: monitor.error is not None, "the server's end")
            assert (monitor.report(time.monotonic()), monitor.lag(0, time.monotonic())) == (None, None)
            until(lambda: monitor.report(time.monotonic()), "the server's return")
    with SlotMonitor(("-d", made.dsn), "s") as monitor, pytest.raises(CdcpipeError):
        monitor.wait_for_report(60)


def test_land_and_status_run_where_pyspark_cannot_be_imported(database: postgres.Database, slot: str, pipeline: Path) -> None:
    def run(*arguments: str) -> str:
        command = f"spark_sink.__main__ as command; sys.exit(command.invoke({[*arguments]!r}))"
        done = import_without({"pyspark", "pandas", "py4j"}, command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    staging, connection = ("--staging", str(pipeline.with_name("landed"))), ("-d", database.dsn)
    run("land", *connection, "-S", slot, "--publication", "p", *staging, "--available-now")
    assert f"slot {slot}" in run("status", *connection, *staging)
    assert "public.fruit" in run("status", "--warehouse", str(pipeline / "warehouse"))


def test_status_asks_the_server(database: postgres.Database, slot: str, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    where = ("-d", database.dsn)
    spark_cli("land", *where, "-S", slot, "--publication", "p", "--staging", str(staging), "--available-now")
    with database.connect() as connection:
        connection.execute("insert into t values (1)")
    last_error.note(staging, "land", CdcpipeError("out of luck"))
    spark_cli("land", *where, "-S", slot, "--publication", "p", "--staging", str(staging), "--available-now")
    found = json.loads(spark_cli("status", *where, "--staging", str(staging), "--json").stdout)
    assert found["server"]["slot"] == slot
    assert found["last_error"] is None
    rungs = {rung["rung"]: rung for rung in found["ladder"]}
    assert list(rungs) == ["server", "sent", "confirmed", "sealed"]
    assert rungs["sent"]["position"] is None
    assert rungs["confirmed"]["behind_bytes"] == rungs["sealed"]["behind_bytes"]
    text = spark_cli("status", *where, "--staging", str(staging)).stdout
    assert "slot       nobody uses the slot, WAL reserved, kept from " in text
    # A server that can't be asked is shown, and so is the rest.
    found = json.loads(spark_cli("status", "-h", str(tmp_path), "--staging", str(staging), "--json").stdout)
    assert found["server_error"]
    assert [rung["rung"] for rung in found["ladder"]] == ["sealed"]
