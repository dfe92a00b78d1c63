"""A stream from a standby that changes its timeline: the log goes on in a new epoch, with nothing missing and nothing twice."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import postgres
import psycopg
import pytest
from standbys import follow, kill, wait_for_replay

from spark_sink.launcher.config import LauncherConfig
from spark_sink.launcher.launcher import Launcher
from spark_sink.staging.filler import SealPolicy
from spark_sink.staging.log import list_epochs, list_segments
from support.cli_process import CLI
from support.landing import replay
from support.waiting import until

FEEDBACK = {"hot_standby_feedback": "on"}


class Servers:
    """A primary with two standbys. The log comes from ``near``."""

    def __init__(self, stack: contextlib.ExitStack, staging: Path) -> None:
        self.primary = stack.enter_context(postgres.Cluster("18"))
        with self.primary.connect() as connection:
            connection.execute("create table t (id int primary key)")
            connection.execute("create publication pub for table t")
        self.near = stack.enter_context(postgres.Cluster("18", settings=FEEDBACK, standby_of=self.primary, standby_slot="near"))
        self.far = stack.enter_context(postgres.Cluster("18", standby_of=self.primary, standby_slot="far"))
        self.config = LauncherConfig(
            "s", staging, ("pub",), ("-d", self.near.dsn), create_slot=True, seal=SealPolicy(seal_interval_s=0.05)
        )

    def create_slot(self) -> None:
        """Land once. A standby makes a slot when the primary has said which transactions are running."""
        done = threading.Event()

        def advise() -> None:
            with self.primary.connect() as connection:
                while not done.wait(0.2):
                    connection.execute("select pg_log_standby_snapshot()")

        with contextlib.ExitStack() as stack:
            thread = threading.Thread(target=advise)
            thread.start()
            stack.callback(thread.join)
            stack.callback(done.set)
            with Launcher(replace(self.config, available_now=True)) as launcher:
                launcher.wait()

    def check(self) -> None:
        """The log has each row once, its timelines part where the server's do, and the next start finds no gap."""
        for _ in range(2):
            with Launcher(replace(self.config, available_now=True)) as launcher:
                launcher.wait()
            assert launcher.prepared is not None
            tables, _ = replay(self.config.staging)
            with self.near.connect() as connection:
                rows = connection.execute("select id from t order by id").fetchall()
            assert sorted(int(key) for key in tables["t"]) == [row for (row,) in rows]
        epochs = {epoch.number: epoch for epoch in list_epochs(self.config.staging)}
        assert not any(epoch.gap for epoch in epochs.values())
        assert [epoch.timeline for epoch in epochs.values()][-1] == 2
        [(_, branch_lsn)] = launcher.prepared.timeline_history
        for segment in list_segments(self.config.staging):
            assert (segment.end_lsn <= branch_lsn) == (epochs[segment.epoch].timeline == 1), segment


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with contextlib.ExitStack() as stack:
        made = Servers(stack, tmp_path / "staging")
        made.create_slot()
        yield made


def write_on(server: postgres.Cluster, first: int, stopping: threading.Event) -> None:
    """Insert rows from ``first`` on as soon as the server takes them, each in its own transaction."""
    with server.connect() as connection:
        while not stopping.is_set():
            try:
                connection.execute("insert into t values (%s)", [first])
                first += 1
            except psycopg.errors.ReadOnlySqlTransaction:
                continue


def end_primary(servers: Servers) -> None:
    for standby in (servers.near, servers.far):
        wait_for_replay(standby, servers.primary)
    kill(servers.primary)


def promote(servers: Servers) -> postgres.Cluster:
    end_primary(servers)
    threading.Thread(target=servers.near.promote).start()
    return servers.near


def follow_a_promoted_one(servers: Servers) -> postgres.Cluster:
    end_primary(servers)
    servers.far.promote()
    follow(servers.near, servers.far, "near")
    return servers.far


@pytest.mark.parametrize("change", [promote, follow_a_promoted_one])
def test_the_log_goes_on_in_a_new_epoch(servers: Servers, change: Any) -> None:
    stopping = threading.Event()
    with contextlib.ExitStack() as stack:
        launcher = stack.enter_context(Launcher(servers.config))
        with servers.primary.connect() as connection:
            for number in range(1, 21):
                connection.execute("insert into t values (%s)", [number])
        until(lambda: launcher.progress.transactions)
        new = change(servers)
        thread = threading.Thread(target=write_on, args=(new, 1000, stopping))
        thread.start()
        stack.callback(thread.join)
        stack.callback(stopping.set)
        until(lambda: list_epochs(servers.config.staging)[-1].timeline == 2)
        landed = launcher.progress.transactions
        until(lambda: launcher.progress.transactions > landed + 20)
    wait_until_replayed(servers.near, new)
    servers.check()


def wait_until_replayed(standby: postgres.Cluster, primary: postgres.Cluster) -> None:
    if standby is not primary:
        wait_for_replay(standby, primary)


def test_without_expect_the_stream_goes_on(servers: Servers) -> None:
    """As pg_recvlogical's does. A consumer that compares positions gives --expect."""
    with CLI("-d", servers.near.dsn, "-S", "s", "--publication", "pub", "-J", "-N", "-A") as cli:
        until(lambda: is_streaming(servers.near), "the stream")
        end_primary(servers)
        servers.near.promote()
        with servers.near.connect() as connection:
            connection.execute("insert into t values (7)")
        printed = b""
        while b'"value":7' not in printed:
            printed += cli.read_bytes()
        assert cli.process.poll() is None


def is_streaming(server: postgres.Cluster) -> bool:
    with server.connect() as connection:
        return connection.execute("select active from pg_replication_slots where slot_name = 's'").fetchall() == [(True,)]
