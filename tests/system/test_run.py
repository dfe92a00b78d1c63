"""`cdcpipe-spark run` as a process: killed at any moment, on a terminal, without a privilege."""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import postgres
import processes
import psutil
import pytest
from faulty_proxy import FaultyProxy

from cdcpipe.lsn import LSN
from spark_sink.staging import last_error
from support.paths import ROOT
from support.road import Road
from support.waiting import SPARK_DEADLINE_S, until

pytestmark = pytest.mark.spark


class Writer(threading.Thread):
    """Changes a database continuously until it is stopped."""

    def __init__(self, database: postgres.Database) -> None:
        super().__init__()
        self._database = database
        self._over = threading.Event()
        self.error: BaseException | None = None
        self.count = 0
        self.asides: list[str] = []
        """The LSNs of the messages that do not depend on their transaction."""

    def run(self) -> None:
        try:
            rng = random.Random(5)
            with self._database.connect() as connection:
                while not self._over.wait(0.01):
                    key = rng.randrange(300)
                    connection.execute("begin")
                    connection.execute(
                        "insert into busy values (%s, 1, repeat('b', 4000)) on conflict (id) do update set n = busy.n + 1", [key]
                    )
                    connection.execute("insert into log (key) values (%s)", [key])
                    if rng.random() < 0.3:
                        connection.execute("insert into said values (pg_logical_emit_message(true, 'busy', %s::text))", [key])
                    if rng.random() < 0.3:
                        said = connection.execute("select pg_logical_emit_message(false, 'busy', %s::text)::text", [key])
                        self.asides += [lsn for (lsn,) in said]
                    if rng.random() < 0.2:
                        connection.execute("delete from busy where id = %s", [rng.randrange(300)])
                    connection.execute("rollback" if rng.random() < 0.1 else "commit")
                    self.count += 1
        except BaseException as ex:  # noqa: BLE001 - it is raised again where the writer is stopped
            self.error = ex

    def stop(self) -> None:
        self._over.set()
        self.join()
        if self.error is not None:
            raise self.error


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def command(database: postgres.Database, root: Path, *more: str, dsn: str | None = None) -> list[str]:
    arguments = ["-d", dsn or database.dsn, "-S", "busy", "--publication", "busy", "-c", "--seal-interval", "0.2"]
    arguments += ["--staging", str(root / "staging"), "--warehouse", str(root / "warehouse"), *more]
    arguments += ["--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"]
    return [sys.executable, "-P", "-m", "spark_sink", "run", *arguments]


def test_killed_at_any_moment(database: postgres.Database, spark: Any, tmp_path: Path) -> None:
    """SIGKILL for Spark's JVM, then for the streamer, then a clean stop, then a lost checkpoint: no change is lost, and none comes
    twice.
    """
    road = Road(database, spark, tmp_path)
    road.execute(
        "create table busy (id int primary key, n int, b text)",
        "alter table busy alter b set storage external",
        "create table log (id bigint generated always as identity primary key, key int)",
        "create table said (lsn pg_lsn primary key)",
    )
    position = tmp_path / "warehouse/_cdcpipe/warehouse.json"

    def moves_on(process: subprocess.Popen[bytes]) -> Callable[[], bool]:
        before = position.read_text() if position.exists() else ""

        def check() -> bool:
            assert process.poll() is None, process.communicate()
            return position.exists() and '"position"' in position.read_text() and position.read_text() != before

        return check

    process = subprocess.Popen(command(database, tmp_path), env=environment(), stderr=subprocess.PIPE)
    until(
        lambda: bool(road.query("select from pg_replication_slots where active and confirmed_flush_lsn is not null")),
        deadline_s=SPARK_DEADLINE_S,
    )
    writer = Writer(database)
    writer.start()
    try:
        until(moves_on(process), deadline_s=SPARK_DEADLINE_S)
        until(moves_on(process), deadline_s=SPARK_DEADLINE_S)
        assert processes.kill(process.pid, "JVM") == 1
        errors = process.communicate(timeout=300)[1].decode()
        assert process.returncode == 7, errors
        assert "error: Spark's JVM has ended while it was needed" in errors
        assert "this is a defect" not in errors

        process = subprocess.Popen(command(database, tmp_path), env=environment(), stderr=subprocess.PIPE)
        until(moves_on(process), deadline_s=SPARK_DEADLINE_S)
        assert processes.kill(process.pid, "streamer") == 1
        until(moves_on(process), deadline_s=SPARK_DEADLINE_S)
        until(moves_on(process), deadline_s=SPARK_DEADLINE_S)
    finally:
        writer.stop()
        process.send_signal(signal.SIGTERM)
    errors = process.communicate()[1].decode()
    assert process.returncode == 0, errors
    assert "the streamer ended with" in errors
    assert "Traceback" not in errors

    shutil.rmtree(tmp_path / "warehouse/_cdcpipe/checkpoint")
    road.execute("insert into log (key) values (0)")  # a commit flushes the WAL, a message does not
    done = subprocess.run(command(database, tmp_path, "--available-now"), env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ", lag 0 B 0.0 s, " in done.stderr.splitlines()[-1]
    assert writer.count > 50
    road.assert_equal("busy", "id", "n", "b")
    road.assert_equal("log", "id", "key")
    changes = road.changelog("public", "log")
    assert changes.count() == road.query("select count(*) from log")[0][0]
    assert changes.select("id").distinct().count() == changes.count()
    found = sorted((row["transactional"], row["_cdc_lsn"]) for row in road.messages().collect())
    inside = [lsn for (lsn,) in road.query("select lsn::text from said")]
    assert found == sorted([(True, LSN.parse(lsn)) for lsn in inside] + [(False, LSN.parse(lsn)) for lsn in writer.asides])
    road.connection.close()


def test_progress_on_a_terminal_and_a_signal_to_all_processes(database: postgres.Database, tmp_path: Path) -> None:
    """systemd stops a service in this way: Spark's JVM gets the signal, too. That is no error. The remaining changes come later.

    Before that the server falls silent: the progress line says so, and the command still ends. The line fits a small terminal.
    """
    said = io.StringIO()
    with database.connect() as connection, FaultyProxy(database.cluster.port) as proxy:
        argv = command(database, tmp_path, "--snapshot", "never", dsn=proxy.dsn(database.tcp_dsn))
        connection.execute(
            "create table t (id int primary key); create table keyless (v int); create publication busy for all tables"
        )
        dimensions = (24, 80)
        terminal = pexpect.spawn(argv[0], argv[1:], env=environment(), timeout=240, dimensions=dimensions, encoding="utf-8")
        terminal.logfile_read = said
        terminal.expect(r"\r\x1b\[Kstarting, 0 s\r\x1b\[Kasking the server, 0 s.*\r\x1b\[Kstarting Spark, [1-9]")
        terminal.expect(r"\r\x1b\[Ktables 1:0/[0-9A-F]+, 0 rows/s, lag [0-9.]+ [KMGi]*B (≥ )?[0-9.]+ s(, 0 changes in 0 tables)?\r")
        terminal.setwinsize(24, 400)
        connection.execute("insert into t select generate_series(1, 7); insert into keyless values (1)")
        terminal.expect(r"\r\x1b\[Ktables 1:0/[0-9A-F]+, [0-9,]+ rows/s, lag 0 B 0.0 s, 8 changes in 2 tables, log 1:0/")
        proxy.silence()
        terminal.expect(r"\r\x1b\[Ktables 1:0/[0-9A-F]+, 0 rows/s, lag unknown, 8 changes in 2 tables")
        for process in processes.running(terminal.pid):
            with contextlib.suppress(psutil.NoSuchProcess):  # the first of them ends others
                process.terminate()
        terminal.expect(pexpect.EOF)
        terminal.close()
    assert terminal.exitstatus == 0, terminal.before
    assert "cdcpipe-spark: error" not in terminal.before
    small = said.getvalue()[: said.getvalue().index(", log 1:0/")].split("\r\x1b[K")[:-1]
    assert all(len(line) < 80 for line in small if not line.endswith("\n")), small
    assert "incubator" not in said.getvalue()
    assert said.getvalue().count("public.keyless") == 1, said.getvalue()
    assert "a changelog and no replica, and the server refuses UPDATE and DELETE on them: public.keyless;" in said.getvalue()
    assert last_error.read(tmp_path / "staging") is None


def test_a_missing_privilege_shows_before_there_is_a_slot(database: postgres.Database, tmp_path: Path) -> None:
    role = f"reader_{database.name}"
    with database.connect() as connection:
        connection.execute("create table t (id int primary key, v text); create table u (id int primary key, v text)")
        connection.execute(f"create role {role} login replication; create publication busy for table t, u (id)")
        connection.execute(f"grant select (id) on u to {role}")
        argv = [*command(database, tmp_path), "-U", role]
        done = subprocess.run(argv, env=environment(), capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.splitlines() == [
            f"cdcpipe-spark: error: user '{role}' may not read public.t",
            f'cdcpipe-spark: hint: GRANT SELECT ON "public"."t" TO "{role}"',
        ]
        assert connection.execute("select count(*) from pg_replication_slots where slot_name = 'busy'").fetchone() == (0,)
        connection.execute(f"grant select on t to {role}")
        arguments = [*argv[argv.index("run") + 1 : argv.index("--seal-interval")], "--export-snapshot", "--check-select", "*"]
        made = subprocess.run(
            [sys.executable, "-m", "cli", "prepare", *arguments, "-U", role],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert (made.returncode, json.loads(made.stdout)["slot_created"]) == (0, True), made.stderr
        connection.execute(f"drop owned by {role}; drop role {role}")
