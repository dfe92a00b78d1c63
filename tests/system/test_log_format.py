"""--log-format json of `cdcpipe` and `land` at work: what stderr has. (test_metrics.py has `run`.)"""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import postgres
import pytest

from support.cli_process import CLI, SPARK_COMMAND


@pytest.fixture
def slot(database: postgres.Database) -> str:
    with database.connect() as connection:
        connection.execute("create table fruit (id int primary key, name text)")
        connection.execute("create table keyless (name text)")
        connection.execute("create publication p for table fruit")
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (database.name,))
        connection.execute("insert into fruit values (1, 'CANARY')")
    return database.name


def test_a_stream_says_objects(database: postgres.Database, slot: str) -> None:
    with CLI("-d", database.dsn, "-S", slot, "--publication", "p", "-vv", "--log-format", "json") as stream:
        stream.take(3)
        assert stream.quit() == 0
        said = [json.loads(line) for line in stream.stderr.splitlines()]
    assert {each["level"] for each in said} == {"info", "debug"}
    assert "CANARY" not in stream.stderr


def spark(database: postgres.Database, slot: str, *arguments: str) -> tuple[int, list[str]]:
    """Run a command of cdcpipe-spark; return its exit code and the lines on stderr."""
    options = ["-d", database.dsn, "-S", slot, "--publication", "p", "--log-format", "json"]
    done = subprocess.run([*SPARK_COMMAND, *arguments, *options], stderr=subprocess.PIPE, text=True, timeout=300)
    return done.returncode, done.stderr.splitlines()


def test_a_launcher_says_objects(database: postgres.Database, slot: str, tmp_path: Path) -> None:
    code, lines = spark(database, slot, "land", "--staging", str(tmp_path), "--available-now", "-v")
    said: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert code == 0
    assert "1 transaction" in said[-1]["message"]
    assert said[-1]["part"] == "progress"
    assert {"cdcpipe.streamer"} <= {each["part"] for each in said}
    code, lines = spark(database, "other", "land", "--staging", str(tmp_path), "--available-now")
    assert code == 7
    assert "not of 'other'" in json.loads(lines[-1])["message"]


def test_a_signal_before_the_end_is_an_object(database: postgres.Database, slot: str, tmp_path: Path) -> None:
    options = ["-d", database.dsn, "-S", slot, "--publication", "p", "--log-format", "json", "--staging", str(tmp_path)]
    with subprocess.Popen([*SPARK_COMMAND, "land", *options, "-v"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = json.loads(process.stderr.readline())
        assert first["level"] == "info"
        process.send_signal(signal.SIGTERM)
        rest = [json.loads(line) for line in process.stderr]
        assert process.wait(60) == 0
    assert rest[-1]["part"] == "progress"
