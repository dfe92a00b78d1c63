"""Streamed transactions and messages from a real server, landed in the form of protocol version 1."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self

import postgres
import processes
import pytest

from cdcpipe.lsn import LSN
from cdcpipe.pipe.framing import RecordReader
from spark_sink.launcher.launcher import Launcher
from spark_sink.staging.log import list_segments, log_end
from support.landing import config_for, confirmed_lsn
from support.paths import ROOT
from support.waiting import until
from support.whole_transactions import plain

STREAMED = ("-m", "options=-c logical_decoding_work_mem=64kB")
SPILLING = (
    sys.executable,
    "-P",
    "-c",
    """if True:
        import runpy, cli.prepare
        read = cli.prepare.read_stream_arguments
        cli.prepare.read_stream_arguments = lambda fd: [*read(fd), "--spill-threshold", "100kB"]
        runpy.run_module("cli", run_name="__main__")
    """,
)
"""The streamer with less memory than the launcher gives it."""


class Interleaved:
    """Large transactions of three sessions in turn, with savepoints, and small transactions in between. The seed decides every
    step.
    """

    def __init__(self, database: postgres.Database, seed: int) -> None:
        self.random = random.Random(seed)
        self.connections = [database.connect() for _ in range(4)]
        self.depth = [0, 0, 0]
        self.count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for session in range(3):
            self.end(session)
        for connection in self.connections:
            connection.close()

    def end(self, session: int) -> None:
        if self.depth[session]:
            self.connections[session].execute(self.random.choice(["commit", "commit", "rollback"]))
            self.depth[session] = 0

    def step(self) -> None:
        session = self.random.randrange(4)
        connection = self.connections[session]
        self.count += 1
        first = self.count * 1000
        if session == 3:
            connection.execute("insert into t values (%s, 'small')", (first,))
            connection.execute("select pg_logical_emit_message(false, 'p', %s)", (str(first),))
            return
        if self.depth[session] == 0:
            connection.execute("begin")
            connection.execute("select pg_logical_emit_message(true, 'p', 'in')")
            self.depth[session] = 1
        kind = self.random.random()
        rows = "insert into t select %s + n, repeat('x', 200) from generate_series(1, %s) n"
        if kind < 0.6:
            connection.execute(rows, (first, self.random.choice([1, 300, 900])))
        elif kind < 0.75:
            connection.execute(f"savepoint s{self.depth[session]}")
            self.depth[session] += 1
            connection.execute(rows, (first, self.random.choice([1, 600])))
        elif kind < 0.9 and self.depth[session] > 1:
            self.depth[session] -= 1
            how = self.random.choice(["release", "rollback to"])
            connection.execute(f"{how} s{self.depth[session]}")
        else:
            self.end(session)


def version_1(database: postgres.Database, slot: str) -> list[tuple[LSN, bytes]]:
    """Return what the server sends on this slot in version 1, with messages."""
    with database.connect() as connection:
        [(end,)] = connection.execute("select pg_current_wal_insert_lsn()::text").fetchall()
    argv = ["-m", "cli", "-d", database.dsn, "-S", slot, "--publication", "pub", "-H", "--messages", "--endpos", end]
    with subprocess.Popen([sys.executable, *argv], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        reader = RecordReader()
        reader.feed(process.stdout.read())
        assert process.wait() == 0
    return plain(reader)


def landed_records(staging: Path) -> list[tuple[LSN, bytes]]:
    found = []
    for segment in list_segments(staging):
        reader = RecordReader()
        reader.feed(segment.path.read_bytes())
        found += plain(reader)
    return found


def begin_streamed(database: postgres.Database, staging: Path) -> str:
    """Make a table, and two slots that begin here: the launcher's, and one to compare with."""
    with database.connect() as connection:
        connection.execute("create table t (id int primary key, v text)")
        connection.execute("create publication pub for table t")
        Launcher(config_for(database, staging, available_now=True)).start().wait()
        slot = f"plain_{database.name}"[:63]
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    return slot


@pytest.fixture(params=["15", "16", "18"])
def any_database(request: pytest.FixtureRequest) -> Iterator[postgres.Database]:
    cluster: postgres.Cluster = request.getfixturevalue(f"pg{request.param}")
    with cluster.database() as database:
        yield database


def test_postgres_streamed_transactions_are_landed_as_version_1_sends_them(any_database: postgres.Database, tmp_path: Path):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    slot = begin_streamed(any_database, tmp_path)
    config = config_for(any_database, tmp_path, command=SPILLING)
    with Launcher(replace(config, connection=(*config.connection, *STREAMED))) as launcher:
        with Interleaved(any_database, seed) as work:
            for _ in range(80):
                work.step()
        with any_database.connect() as connection:  # large whatever the seed
            connection.execute("insert into t select g, repeat('v', 200) from generate_series(-1000, -1) g")
        expected = version_1(any_database, slot)
        assert len(expected) > 1000
        until(lambda: launcher.progress.position is not None and launcher.progress.position.lsn >= expected[-1][0])
    assert landed_records(tmp_path) == expected
    assert not list(tmp_path.glob(".tmp-*"))


LAND = """
    import json, signal, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from spark_sink.launcher.config import LauncherConfig
    from spark_sink.launcher.launcher import Launcher
    from spark_sink.staging.filler import SealPolicy

    staging, slot, connection, command = sys.argv[2:]
    launcher = Launcher(
        LauncherConfig(
            slot=slot,
            staging=Path(staging),
            publications=("pub",),
            connection=json.loads(connection),
            seal=SealPolicy(segment_bytes=100_000, seal_interval_s=0.05, held_bytes=50_000),
            command=json.loads(command),
        )
    )
    signal.signal(signal.SIGTERM, lambda *_: launcher.request_stop())
    launcher.start()
    while not launcher.wait(0.1):
        pass
"""


def holds_a_file(pid: int) -> bool:
    """Tell whether a process has an unnamed file open."""
    try:
        return any("(deleted)" in os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        return False


def test_postgres_kills_in_the_middle_of_streamed_transactions(database: postgres.Database, tmp_path: Path):
    """Streamer or launcher is killed, or the launcher stopped, mostly while large transactions are held. Every change is there
    once.
    """
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    staging = tmp_path / "staging"
    slot = begin_streamed(database, staging)
    argv = [sys.executable, "-c", textwrap.dedent(LAND), str(ROOT), str(staging), f"slot_{database.name}"[:63]]
    argv += [json.dumps(["-d", database.dsn, *STREAMED]), json.dumps(SPILLING)]
    with Interleaved(database, seed) as work:
        for turn in range(6):
            with open(tmp_path / "stderr", "ab") as errors, subprocess.Popen(argv, cwd=ROOT, stderr=errors) as process:
                try:
                    for _ in range(chance.randrange(1, 4)):
                        until(
                            lambda pid=process.pid: work.step() or any(map(holds_a_file, processes.children(pid))),
                            "a held transaction",
                        )
                        for _ in range(chance.randrange(8)):
                            work.step()
                        for pid in processes.children(process.pid):
                            os.kill(pid, signal.SIGKILL)
                        assert process.poll() is None
                finally:
                    process.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM]))
            assert process.returncode in (0, -signal.SIGKILL), (turn, (tmp_path / "stderr").read_text())
    expected = version_1(database, slot)
    config = config_for(database, staging, available_now=True)
    Launcher(replace(config, connection=(*config.connection, *STREAMED))).start().wait()
    assert landed_records(staging) == expected
    assert not list(staging.glob(".tmp-*"))


def test_postgres_messages_alone_are_landed_and_confirmed(any_database: postgres.Database, tmp_path: Path):
    """Nothing commits. The messages keep neither WAL nor memory. The next run begins right after the last message."""
    slot = begin_streamed(any_database, tmp_path)
    emit = "select pg_logical_emit_message(false, 'p', repeat('x', %s))"
    with any_database.connect() as connection:
        with Launcher(config_for(any_database, tmp_path)) as launcher:
            for n in (10, 3_000_000, 30):
                connection.execute(emit, (n,))
            until(lambda: len(landed_records(tmp_path)) == 3)
            end = log_end(tmp_path)
            assert end is not None
            until(lambda: confirmed_lsn(any_database) >= end.lsn, "the confirmation")
            assert launcher.progress.restarts == 0
        connection.execute(emit, (40,))
        Launcher(config_for(any_database, tmp_path, available_now=True)).start().wait()
        connection.execute("insert into t values (1)")
        connection.execute(emit, (50,))
        Launcher(config_for(any_database, tmp_path, available_now=True)).start().wait()
    assert landed_records(tmp_path) == version_1(any_database, slot)
    assert [len(data) for _, data in landed_records(tmp_path) if data[:1] == b"M"] == [16 + n for n in (10, 3_000_000, 30, 40, 50)]
