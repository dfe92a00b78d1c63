"""The scripts, as far as a test of them is cheap."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import postgres
import psycopg
import pytest
from workload import KEYS, MESSAGES, Workload, make_tables

from support.paths import ROOT


def start_pg(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Run scripts/pg without its virtual environment. Return it and the DSN that it prints."""
    process = subprocess.Popen([sys.executable, ROOT / "scripts/lib/pg.py", *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


CONNECT = """
python -c 'import psycopg; print(psycopg.connect("").info.dbname)'
command -v cdcpipe >/dev/null && psql -Atc "select 'asked'"
"""


def directory_of(dsn: str) -> Path:
    return Path(psycopg.conninfo.conninfo_to_dict(dsn)["host"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_pg_starts_and_stops(pg18: postgres.Cluster, number: signal.Signals) -> None:
    process, dsn = start_pg("18", "log_statement=all")
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        line = process.stdout.readline()  # pasted into a shell, it is enough for libpq, and for the programs
        reached = subprocess.run(["/bin/sh", "-c", line + CONNECT], capture_output=True, text=True, env={"PATH": "/none"})
        assert (line.startswith("export PGHOST="), reached.stdout) == (True, "postgres\nasked\n"), reached.stderr
        with psycopg.connect(dsn) as connection:
            assert connection.execute("show wal_level").fetchone() == ("logical",)
            assert connection.execute("show log_statement").fetchone() == ("all",)
        process.send_signal(number)
        assert process.wait(30) == 0
    assert not directory_of(dsn).exists()


def test_a_server_ends_with_its_owner(pg18: postgres.Cluster) -> None:
    process, dsn = start_pg("18")
    with process:
        assert directory_of(dsn).exists()
        process.kill()
    deadline = time.monotonic() + 30
    while directory_of(dsn).exists():
        assert time.monotonic() < deadline, "the server has outlived its owner"
        time.sleep(0.05)


def test_a_server_of_every_version(any_pg: postgres.Cluster) -> None:
    with any_pg.database() as database, database.connect() as connection:
        assert connection.info.server_version == any_pg.version_num
        assert str(any_pg.version_num // 10000) == any_pg.version
        connection.execute("select pg_create_logical_replication_slot('slot_of_this_version', 'pgoutput')")


def test_the_workload_counts_what_it_commits(database: postgres.Database) -> None:
    with database.connect() as connection, Workload(database.dsn) as workload:
        make_tables(connection)
        connection.execute("create publication everything for all tables")
        connection.execute("select pg_create_logical_replication_slot('workload', 'pgoutput')")
        workload.run(20_000)
        workload.alter()
        workload.truncate()
        messages = connection.execute(
            "select get_byte(data, 0) from pg_logical_slot_get_binary_changes("
            "'workload', null, null, 'proto_version', '1', 'publication_names', 'everything', 'messages', 'true')"
        )
        kinds = Counter(chr(kind) for (kind,) in messages)
    assert kinds["I"] + kinds["U"] + kinds["D"] + kinds["T"] + kinds["M"] == workload.done
    assert kinds["M"]
    assert kinds["T"] == 1
    assert kinds["B"] <= workload.transactions  # one that changed no row has no Begin
    assert workload.rollbacks
    assert set(workload.committed) == {*KEYS, MESSAGES}


def test_the_benchmark_runs_and_reports(pg15: postgres.Cluster, tmp_path: Path) -> None:
    lines = tmp_path / "runs.jsonl"
    command = [sys.executable, ROOT / "scripts/bench/run.py", "stream", "--rows", "2000", "--runs", "1", "--output", lines]
    path = os.pathsep.join([str(ROOT / "scripts/lib"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([*command, "--transport", "unix"], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "cdcpipe -H" in done.stdout
    # A run that had other rows than the rest is not a result.
    lines.write_text(lines.read_text().replace('"rows": 2000', '"rows": 1999'))
    report = subprocess.run([sys.executable, ROOT / "scripts/bench/report.py", lines], capture_output=True, text=True)
    assert report.returncode == 1
    assert "1999 rows of 2000" in report.stderr
