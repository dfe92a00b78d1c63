"""The launcher and `cdcpipe-spark land` against PostgreSQL: restarts, kills, signals, a server restored to an earlier state."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import pexpect
import postgres
import processes
import psycopg
import pytest

from cdcpipe.errors import (
    CdcpipeError,
    GapError,
    ServerError,
)
from cdcpipe.lsn import LSN
from cdcpipe.retry import RetryPolicy
from spark_sink.launcher import launcher as launcher_module
from spark_sink.launcher.launcher import Launcher
from spark_sink.launcher.restart import RestartPolicy
from spark_sink.staging import account, copied
from spark_sink.staging.gap import LostChanges
from spark_sink.staging.log import list_epochs, list_segments, log_end
from support.cli_process import run_spark_cli
from support.landing import check_tables, config_for, confirmed_lsn, land, replay
from support.paths import ROOT
from support.waiting import until


def test_postgres_until_it_is_stopped_and_then_what_is_available(database: postgres.Database, tmp_path: Path):
    with database.connect() as connection:
        connection.execute("create table t (id int primary key, v text)")
        with Launcher(config_for(database, tmp_path)) as launcher:
            assert [table["name"] for table in launcher.prepared.tables] == ["t"]
            for n in range(50):
                connection.execute("insert into t values (%s, repeat('x', 100))", (n,))
            until(lambda: launcher.progress.transactions == 50)
            connection.execute("update t set id = id + 1000 where id % 2 = 0")
            connection.execute("delete from t where id % 3 = 0")
        check_tables_and_position = partial(check_tables, database, tmp_path, "t")
        connection.execute("insert into t select n, repeat('y', 1000) from generate_series(10000, 12000) n")
        connection.execute("create table u (id int primary key)")
        connection.execute("insert into u values (1), (2)")
        connection.execute("truncate u")
        connection.execute("insert into u values (2)")
        run = Launcher(config_for(database, tmp_path, available_now=True))
        run.start()
        run.wait()
        check_tables_and_position("u")
        end = log_end(tmp_path)
        assert end is not None
        assert confirmed_lsn(database) >= end.lsn
        assert {epoch.number for epoch in list_epochs(tmp_path)} == {1, 2}
        assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*.cdc"))


def test_postgres_idle_runs_move_the_slot_on(database: postgres.Database, tmp_path: Path):
    with database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        connection.execute("create publication pub for table t")
        connection.execute("create unlogged table other (id int)")
        Launcher(config_for(database, tmp_path, available_now=True)).start().wait()
        before = confirmed_lsn(database)
        connection.execute("create table unpublished as select generate_series(1, 20000)")
        with Launcher(config_for(database, tmp_path)):
            until(lambda: confirmed_lsn(database) > before + 100_000)
        connection.execute("insert into t values (1)")
        Launcher(config_for(database, tmp_path, available_now=True)).start().wait()
    check_tables(database, tmp_path, "t")


def test_postgres_what_is_known_of_the_log_follows_other_traffic(database: postgres.Database, tmp_path: Path):
    config = config_for(database, tmp_path)

    def wal_lsn(connection: psycopg.Connection[Any]) -> int:
        return LSN.parse(connection.execute("select pg_current_wal_lsn()::text").fetchall()[0][0])

    with database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        connection.execute("create publication pub for table t")
        with Launcher(config) as launcher:
            connection.execute("insert into t values (1)")
            connection.execute("create table unpublished ()")
            after = wal_lsn(connection)
            until(lambda: account.read(tmp_path).lsn >= after)
            assert launcher.progress.transactions == 1
        connection.execute("create table another ()")
        after = wal_lsn(connection)
        Launcher(replace(config, available_now=True)).start().wait()
        assert account.read(tmp_path).lsn >= after
    (tmp_path / "known.json").write_text("{")
    assert account.read(tmp_path).lsn == 0


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"create_slot": False}, 8, "does not exist"),
        ({"publications": ("nonesuch",), "slot": "other"}, 2, "nonesuch"),
        ({"connection": ("-d", "dbname=nonesuch", "-h", "/nonesuch")}, 2, "connect"),
        ({"connection": ("-d", "x", "-m", "password=SECRET")}, 1, "password"),
    ],
    ids=["slot", "publication", "server", "password"],
)
def test_postgres_bad_input(database: postgres.Database, tmp_path: Path, changes: dict[str, Any], code: int, words: str):
    if "publications" in changes:
        with database.connect() as connection:
            connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (changes["slot"],))
    with pytest.raises(CdcpipeError, match=words) as caught:
        Launcher(config_for(database, tmp_path, **changes)).start()
    assert caught.value.exit_code == code
    assert "SECRET" not in str(caught.value)
    assert list_segments(tmp_path) == []


def test_a_table_without_identity_is_told_of_once(database: postgres.Database, tmp_path: Path) -> None:
    with database.connect() as connection:
        connection.execute("create table keyless (v int)")
        connection.execute("create publication told for table keyless")
    where = ["-d", database.dsn, "-S", f"told_{database.name}"[:63], "--publication", "told", "--staging", str(tmp_path)]
    done = run_spark_cli("land", *where, "-c", "--available-now")
    assert done.returncode == 0, done.stderr
    assert "a changelog and no replica, and the server refuses UPDATE and DELETE on them: public.keyless;" in done.stderr
    assert done.stderr.count("public.keyless") == 1, done.stderr


class Workload:
    """Changes two tables in a thread of its own until it is stopped."""

    def __init__(self, database: postgres.Database, seed: int) -> None:
        self.database, self.random = database, random.Random(seed)
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self.error is None

    def _run(self) -> None:
        try:
            with self.database.connect() as connection:
                count = 0
                while not self._stop.is_set():
                    kind = self.random.random()
                    with connection.transaction():
                        for _ in range(self.random.choice([1, 1, 1, 5, 200])):
                            count += 1
                            connection.execute("insert into t values (%s, %s)", (count, "v" * self.random.randrange(300)))
                        if kind < 0.3:
                            connection.execute("update t set id = -id where id = %s", (self.random.randrange(1, count + 1),))
                        elif kind < 0.4:
                            connection.execute("delete from t where id %% 17 = %s", (self.random.randrange(17),))
                        elif kind < 0.42:
                            connection.execute("truncate u")
                            connection.execute("insert into u select -n, n::text from generate_series(1, 2000) n")
                            connection.execute("insert into u values (%s, 'x')", (count,))
        except psycopg.Error as ex:
            self.error = ex


def test_postgres_kill_loops(database: postgres.Database, tmp_path: Path):
    """Launcher and streamer are killed repeatedly at random moments. The log then has what the tables have."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    with database.connect() as connection:
        connection.execute("create table t (id int primary key, v text)")
        connection.execute("create table u (id int primary key, v text)")
        connection.execute("create publication pub for all tables")
    argv = [sys.executable, "-m", "spark_sink", "land", "-d", database.dsn, "-S", f"slot_{database.name}"[:63]]
    argv += ["--publication", "pub", "-c", "--staging", str(tmp_path), "--segment-size", "20000", "--seal-interval", "0.05"]
    Launcher(config_for(database, tmp_path, available_now=True)).start().wait()
    with Workload(database, seed):
        for turn in range(6):
            with open(tmp_path.parent / "stderr", "ab") as errors, subprocess.Popen(argv, cwd=ROOT, stderr=errors) as process:
                try:
                    before = len(list_segments(tmp_path))
                    until(lambda before=before: len(list_segments(tmp_path)) > before, "a segment")
                    time.sleep(chance.random() * 0.3)
                    if turn % 2:
                        end = log_end(tmp_path)
                        # Its children are those of its main thread or of others; all have it as their parent.
                        for pid in processes.children(process.pid):
                            os.kill(pid, signal.SIGKILL)
                        until(lambda end=end: log_end(tmp_path) > end, "a segment after the streamer was killed")
                finally:
                    process.send_signal(signal.SIGKILL)
    final = run_spark_cli(*argv[3:], "--available-now")
    assert final.returncode == 0, final.stderr
    check_tables(database, tmp_path, "t", "u")
    end = log_end(tmp_path)
    assert end is not None
    assert confirmed_lsn(database) >= end.lsn


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_postgres_signals_end_land_cleanly(database: postgres.Database, tmp_path: Path, number: signal.Signals):
    with database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        argv = [sys.executable, "-m", "spark_sink", "land", "-d", database.dsn, "-S", f"slot_{database.name}"[:63]]
        argv += ["--publication", "pub", "-c", "--staging", str(tmp_path), "--seal-interval", "3600"]
        with subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            until(lambda: log_end(tmp_path) is not None)
            connection.execute("insert into t values (1)")
            # The server has sent it; how far it came by then is chance.
            sent = "select count(*) from pg_stat_replication where sent_lsn = pg_current_wal_lsn()"
            until(lambda: connection.execute(sent).fetchone() == (1,))
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
        end = log_end(tmp_path)
        assert end is not None
        assert confirmed_lsn(database) >= end.lsn
        assert not list(tmp_path.glob("*/*.open"))
        subprocess.run([*argv, "--available-now"], cwd=ROOT, check=True, timeout=60)
        check_tables(database, tmp_path, "t")


def test_postgres_progress_on_a_terminal_and_control_c(database: postgres.Database, tmp_path: Path):
    argv = ["-m", "spark_sink", "land", "-d", database.dsn, "-S", f"slot_{database.name}"[:63], "--publication", "pub", "-c"]
    argv += ["--staging", str(tmp_path), "--seal-interval", "0.05"]
    with database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        terminal = pexpect.spawn(sys.executable, argv, cwd=str(ROOT), timeout=60, dimensions=(24, 200), encoding="utf-8")
        terminal.expect(r"position 1:0/")
        connection.execute("insert into t values (1)")
        terminal.expect(r"\r\x1b\[Kposition 1:0/[0-9A-F]+, 1 transaction, [0-9]+ records")
        terminal.sendintr()  # to the whole foreground process group; the streamer is not in it
        terminal.expect(pexpect.EOF)
        terminal.close()
    assert terminal.exitstatus == 0
    assert "Traceback" not in terminal.before
    check_tables(database, tmp_path, "t")


def test_postgres_a_signal_before_everything_is_landed(database: postgres.Database, tmp_path: Path):
    waiting = "select count(*) from pg_stat_activity where query like '%pg_create_logical%' and wait_event_type = 'Lock'"
    argv = [sys.executable, "-m", "spark_sink", "land", "-d", database.dsn, "-S", f"slot_{database.name}"[:63], "-c"]
    argv += ["--publication", "pub", "--staging", str(tmp_path), "--available-now"]
    with database.connect() as writer, database.connect() as connection:
        writer.execute("create table t (id int primary key)")
        writer.execute("begin")
        writer.execute("insert into t values (1)")  # the server makes no slot before this has ended
        with subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
            until(lambda: connection.execute(waiting).fetchone() == (1,), "the slot's creation")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
        writer.execute("rollback")
    assert run_spark_cli(*argv[3:]).returncode == 0


def test_postgres_a_killed_launcher_frees_the_slot(database: postgres.Database, tmp_path: Path):
    argv = [sys.executable, "-m", "spark_sink", "land", "-d", database.dsn, "-S", f"slot_{database.name}"[:63], "-c"]
    argv += ["--publication", "pub", "--staging", str(tmp_path)]
    active = "select count(*) from pg_replication_slots where active and database = current_database()"
    with database.connect() as connection, subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        until(lambda: connection.execute(active).fetchone() == (1,))
        process.send_signal(signal.SIGKILL)
        process.wait()
        until(lambda: connection.execute(active).fetchone() == (0,), "the end of the streamer")


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_postgres_a_server_that_restarts(pg18: postgres.Cluster, tmp_path: Path, mode: str):
    del pg18  # it skips the test where there is no 18
    with postgres.Cluster("18") as cluster, cluster.database() as database:
        with database.connect() as connection:
            connection.execute("create table t (id int primary key)")
            with Launcher(config_for(database, tmp_path)) as launcher:
                connection.execute("insert into t select generate_series(1, 1000)")
                until(lambda: launcher.progress.transactions == 1)
                cluster.restart(mode)
                with database.connect() as again:
                    again.execute("insert into t select generate_series(1001, 2000)")
                until(lambda: launcher.progress.transactions == 2, "the transaction after the restart")
                assert launcher.progress.restarts >= 1
        check_tables(database, tmp_path, "t")


def test_postgres_an_administrator_who_ends_the_stream_again_and_again(
    database: postgres.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        launcher_module, "RestartPolicy", partial(RestartPolicy, pauses=RetryPolicy(first_pause_s=0.01), poison_limit=2)
    )
    active = "select active_pid from pg_replication_slots where active and database = current_database()"
    with database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        with Launcher(config_for(database, tmp_path)) as launcher:
            for count in range(3):
                until(lambda: launcher.has_ended or connection.execute(active).fetchone(), "the stream")
                connection.execute(f"select pg_terminate_backend(active_pid) from ({active}) s")
                until(lambda count=count: launcher.has_ended or launcher.progress.restarts > count, "the restart")
            connection.execute("insert into t values (1)")
            until(lambda: launcher.has_ended or launcher.progress.transactions == 1)
    check_tables(database, tmp_path, "t")


def test_postgres_nothing_behind_a_publications_absence_is_landed(
    database: postgres.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        launcher_module, "RestartPolicy", partial(RestartPolicy, pauses=RetryPolicy(first_pause_s=0.01), poison_limit=2)
    )
    config = config_for(database, tmp_path, available_now=True)
    with database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        land(config)
        connection.execute("insert into t values (1)")
        connection.execute("alter publication pub rename to away")
        connection.execute("insert into t values (2)")
        connection.execute("alter publication away rename to pub")
        connection.execute("insert into t values (3)")
        for _ in range(2):
            with pytest.raises(ServerError, match="no publication had this name") as caught:
                land(config)
            assert "--publication THAT_NAME" in str(caught.value.hint)
            assert replay(tmp_path) == ({"t": {b"1": (b"1",)}}, 1)
        connection.execute("create publication away")
        with pytest.raises(ServerError, match="no publication had this name"):
            land(replace(config, publications=("away",)))
        land(config)
        check_tables(database, tmp_path, "t")


def take_copy(cluster: postgres.Cluster, copy: Path) -> None:
    """Copy the disk of a server, which is stopped meanwhile."""
    cluster.stop()
    subprocess.run(["cp", "-a", cluster.data, copy], check=True)
    cluster.start()


def put_back(cluster: postgres.Cluster, copy: Path) -> None:
    """Restore a server from the copy of its disk."""
    cluster.stop("immediate")
    shutil.rmtree(cluster.data)
    subprocess.run(["cp", "-a", copy, cluster.data], check=True)
    cluster.start()


def test_postgres_a_server_restored_from_an_older_copy(pg18: postgres.Cluster, tmp_path: Path):
    """The server has the same system identifier and timeline, and writes other changes at the same positions."""
    del pg18  # it skips the test where there is no 18
    with tempfile.TemporaryDirectory(prefix="cdcpipe-copy-", dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        with postgres.Cluster("18", Path(directory) / "server") as cluster:
            copy = Path(directory) / "copy"
            database = postgres.Database(cluster, "postgres")
            config = config_for(database, tmp_path, available_now=True)
            with database.connect() as connection:
                connection.execute("create table t (id int primary key)")
            land(config)
            take_copy(cluster, copy)
            with database.connect() as connection:
                connection.execute("insert into t select generate_series(1, 5000)")
            land(config)
            check_tables(database, tmp_path, "t")
            put_back(cluster, copy)
            with database.connect() as connection:
                connection.execute("insert into t values (5001)")
                with pytest.raises(GapError, match=r"its WAL ends at .* before .* 1 transaction up to .* public\.t: 5000"):
                    land(config)
                connection.execute("insert into t select generate_series(6001, 14000)")
                with pytest.raises(GapError, match=r"its WAL ends at"):  # although it has passed the end of the log
                    land(config)
                end = log_end(tmp_path)
                assert end is not None
                assert confirmed_lsn(database) < end.lsn
                land(replace(config, on_gap="resnapshot"))
                connection.execute("insert into t values (20000)")
                land(config)
            tables, _ = replay(tmp_path)
            assert b"20000" in tables["t"]
            [gap] = [epoch.gap for epoch in list_epochs(tmp_path) if epoch.gap is not None]
            assert gap.lost == LostChanges(1, {"public.t": 5000}, end.lsn)
            assert gap.after_lsn < end.lsn


def test_postgres_a_server_restored_from_a_copy_older_than_a_tables_copy(tmp_path: Path):
    """Its WAL has the end of the log, but not the position at which a table was copied. `land` does not know the tables."""
    staging = tmp_path / "staging"
    with tempfile.TemporaryDirectory(prefix="cdcpipe-copy-", dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        with postgres.Cluster("18", Path(directory) / "server") as cluster:
            copy = Path(directory) / "copy"
            database = postgres.Database(cluster, "postgres")
            config = config_for(database, staging, available_now=True)
            with database.connect() as connection:
                connection.execute("create table t (id int primary key)")
                land(config)
            take_copy(cluster, copy)
            with database.connect() as connection:
                connection.execute("insert into t select generate_series(1, 5000)")
                [(text,)] = connection.execute("select pg_current_wal_flush_lsn()::text").fetchall()
                copied.record(staging, LSN.parse(text))
            put_back(cluster, copy)
            with database.connect() as connection:
                with pytest.raises(GapError, match=f"gone back: its WAL ends at .*, before {text}, where tables were copied"):
                    land(config)
                connection.execute("insert into t select generate_series(6001, 14000)")
                with pytest.raises(GapError, match=r"where tables were copied"):  # although its WAL has passed the copy
                    land(config)
                land(replace(config, on_gap="resnapshot"))
                connection.execute("insert into t values (20000)")
                land(config)
            [gap] = [epoch.gap for epoch in list_epochs(staging) if epoch.gap is not None]
            assert gap.is_divergence
            # What `run` copies after the gap has a later position than the former copy.
            assert all(epoch.start_lsn > LSN.parse(text) for epoch in list_epochs(staging) if epoch.gap is not None)
            assert b"20000" in replay(staging)[0]["t"]
