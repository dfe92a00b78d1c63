"""`cdcpipe slot`, the monitor that runs it, and `cdcpipe-spark status` of a slot, on a real server."""

import json
import signal
import time
from pathlib import Path

import postgres
import pytest

from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import LSN
from spark_sink.client.slot_monitor import Lag, SlotMonitor
from spark_sink.staging import last_error
from support.blocked_imports import import_without
from support.cli_process import CLI, run_cli, spark_cli
from support.small_pipeline import make_pipeline
from support.waiting import until


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
    assert (found["failover"], found["synced"]) == (False, False)
    assert LSN.parse(found["restart_lsn"]) <= LSN.parse(found["confirmed_flush_lsn"]) <= LSN.parse(found["wal_lsn"])
    with CLI("-d", database.dsn, "-S", slot, "--publication", "p") as stream:
        active = until(lambda: next((one for one in [json.loads(run_cli(*arguments)[1])] if one["sent_lsn"]), None))
        assert active["active"]
        assert stream.quit() == 0
    code, _, err = run_cli("slot", "-d", database.dsn, "-S", "nope")
    assert code == 8
    assert "hint: a stream with -c creates it" in err  # the subcommand has no -c
    assert run_cli("slot", "-d", database.dsn)[0] == 1


def test_the_system_id_is_null_for_a_user_who_may_not_see_it(database: postgres.Database, slot: str) -> None:
    with database.connect() as connection:
        ((system_id,),) = connection.execute("select system_identifier::text from pg_control_system()").fetchall()
        connection.execute("create role slot_watcher login")
        try:
            arguments = ("slot", "-d", database.dsn, "-U", "slot_watcher", "-S", slot)
            assert json.loads(run_cli(*arguments)[1])["system_id"] == system_id
            connection.execute("revoke execute on function pg_control_system() from public")
            code, out, err = run_cli(*arguments)
            assert (code, err, json.loads(out)["system_id"]) == (0, "", None)
        finally:
            connection.execute("drop role slot_watcher")


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


def test_land_and_status_run_where_pyspark_cannot_be_imported(database: postgres.Database, slot: str, tmp_path: Path) -> None:
    pipeline = make_pipeline(tmp_path)

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
    # The end of the log is known to be complete up to where the server was, and only the transaction before it is confirmed.
    assert 0 == rungs["server"]["behind_bytes"] <= rungs["sealed"]["behind_bytes"] <= rungs["confirmed"]["behind_bytes"]
    text = spark_cli("status", *where, "--staging", str(staging)).stdout
    assert "slot       nobody uses the slot, WAL reserved, kept from " in text
    # A server that can't be asked is shown, and so is the rest.
    found = json.loads(spark_cli("status", "-h", str(tmp_path), "--staging", str(staging), "--json").stdout)
    assert found["server_error"]
    assert [rung["rung"] for rung in found["ladder"]] == ["sealed"]
