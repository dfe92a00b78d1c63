"""`cdcpipe-spark doctor`: the command, object stores, and Spark's workers. The cases of each check: tests/unit/doctor."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import postgres
import pytest

from cdcpipe.doctor.findings import Finding, Level, parse
from cdcpipe.subcommands.doctor import CHECKS as SERVER_CHECKS
from cdcpipe.subcommands.doctor import CONNECTION
from spark_sink.doctor import stores, workers
from spark_sink.doctor.pipeline_doctor import CHECKS
from spark_sink.files.places import place
from support import object_stores
from support.paths import ROOT

TIMEOUT_S = 240


def doctor(*arguments: str, environment: dict[str, str] | None = None) -> tuple[int, list[Finding], str]:
    """Return exit code, findings, stderr."""
    command = [sys.executable, "-m", "spark_sink", "doctor", "--json", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT, env=os.environ | (environment or {})
    )
    return done.returncode, parse(json.loads(done.stdout)) if done.stdout else [], done.stderr


def errors(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.line for finding in findings if finding.level is Level.ERROR}


@pytest.fixture
def pipeline(database: postgres.Database, tmp_path: Path) -> list[str]:
    """Return the options of a pipeline that could be started."""
    with database.connect() as connection:
        connection.execute("create table fruit (id int primary key)")
    asked = ["-d", database.dsn, "-S", "doctor_p", "--publication", "shop", "-c"]
    return [*asked, "--staging", str(tmp_path / "staging"), "--warehouse", str(tmp_path / "warehouse")]


def test_without_spark(pipeline: list[str], tmp_path: Path) -> None:
    code, findings, stderr = doctor(*pipeline, "--no-spark")
    assert (code, errors(findings), stderr) == (0, {}, "")
    found = {finding.check for finding in findings}
    assert found >= {"server.wal_level", "tables.keys", "machine.java", "staging.file_system", "warehouse.space"}
    assert found <= {CONNECTION, *SERVER_CHECKS, *CHECKS}
    assert not [check for check in found if check.startswith("spark.")]
    assert list(tmp_path.glob("*[!n]")) == []  # the programs of `shell` aside, nothing was made

    # What land needs: no Spark, no Java, no warehouse.
    code, findings, _ = doctor(*pipeline[:-2], environment={"JAVA_HOME": "/nowhere", "PATH": "/nowhere"})
    assert (code, errors(findings)) == (0, {})
    assert not [finding for finding in findings if finding.check.startswith(("spark.", "machine.", "warehouse."))]


def test_problems_are_found(pipeline: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "jars").mkdir()
    places = [str(tmp_path / "file/staging"), "--warehouse", str(tmp_path / "file/warehouse")]
    code, findings, _ = doctor(*pipeline[:-3], *places, "--jars", str(tmp_path / "jars"), "--no-spark")
    assert code == 1
    assert errors(findings).keys() == {"machine.jars", "staging.place", "warehouse.place"}


def test_the_server_is_judged_as_for_a_copy(pipeline: list[str], database: postgres.Database) -> None:
    """A role that may not read. With -c and a warehouse the tables are copied, with `land` they are not."""
    with database.connect() as connection:
        connection.execute("create publication shop for table fruit; create role doctor_reader login replication")
        try:
            role = ["-U", "doctor_reader"]
            for options, expected in ((pipeline, {"tables.readable"}), (pipeline[:-2], set[str]())):
                code, findings, _ = doctor(*options, *role, "--no-spark")
                assert (code, errors(findings).keys()) == (int(bool(expected)), expected)
        finally:
            connection.execute("drop role doctor_reader")


def test_a_server_that_is_not_there(pipeline: list[str]) -> None:
    code, findings, _ = doctor(*pipeline, "--no-spark", "-m", "port=1")
    assert (code, errors(findings).keys()) == (1, {CONNECTION})


def test_a_wrong_option(pipeline: list[str]) -> None:
    code, findings, stderr = doctor(*pipeline, "--table", "fruit", "--no-spark")
    assert (code, findings) == (1, [])
    assert "--table takes SCHEMA.NAME" in stderr


# --- object stores ---


@pytest.fixture(scope="module")
def store() -> Iterator[object_stores.Store]:
    with object_stores.started("s3") as made:
        yield made


@pytest.fixture
def bucket(store: object_stores.Store, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    made: Any = place(store.url.format(f"doctor{random.randrange(10**9)}"))
    made.fs.mkdir(made.path.partition("/")[0])
    return made


def words(verdicts: Iterator[Any]) -> list[tuple[str, str]]:
    return [(verdict.level, verdict.message) for verdict in verdicts]


def test_a_store_is_tried(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        found = stores.probe(bucket)
        assert words(stores.conditional_writes(found)) == [
            ("ok", f"{bucket} can be reached, and its conditional writes never overwrite; it deletes objects")
        ]
        assert words(stores.clock(found)) == [("ok", "the clock of the store and this machine's agree")]
    assert [path.name for path in (bucket / "_cdcpipe").iterdir()] == ["store_check"]

    with monkeypatch.context() as patched:
        patched.setattr(bucket.fs, "rm", lambda *_args, **_options: None)  # so do S3, which refuses, and s3fs, which does not tell
        found = stores.probe(bucket)
    [(level, message)] = words(stores.conditional_writes(found))
    assert (level, "does not delete objects" in message) == ("error", True)
    assert words(stores.clock(found)) == []

    put = bucket.fs.pipe_file
    monkeypatch.setattr(bucket.fs, "pipe_file", lambda path, data, **_: put(path, data))
    found = stores.probe(bucket)
    [(level, message)] = words(stores.conditional_writes(found))
    assert (level, "no conditional writes" in message) == ("error", True)
    assert words(stores.clock(found)) == []


def test_a_store_that_is_not_there(bucket: Any) -> None:
    [(level, message)] = words(stores.conditional_writes(stores.probe(place("s3a://no-such-bucket-here/shop"))))
    assert (level, "s3a://no-such-bucket-here/shop" in message) == ("error", True)


def test_a_pipeline_with_a_store(pipeline: list[str], bucket: Any) -> None:
    code, findings, _ = doctor(*pipeline[:-1], str(bucket), "--no-spark")
    assert (code, errors(findings)) == (0, {})
    assert {finding.check for finding in findings if finding.check.startswith("warehouse.")} == {
        "warehouse.store",
        "warehouse.clock",
    }


# --- Spark ---


@pytest.mark.spark
def test_workers_are_looked_at(spark: Any, tmp_path: Path) -> None:
    found = workers.look(spark, [tmp_path, tmp_path / "unseen"])
    [worker] = found  # one machine
    assert (worker.missing, worker.unseen, worker.clock_ahead_s) == ((), (str(tmp_path / "unseen"),), 0.0)
    assert [verdict.level for verdict in workers.modules(found)] == ["ok"]


@pytest.mark.spark
def test_workers_without_packages(pipeline: list[str], tmp_path: Path) -> None:
    """An interpreter without any packages, as on an unprepared machine of an executor."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    code, findings, _ = doctor(*pipeline, "--conf", f"spark.pyspark.python={bare}/bin/python")
    assert code == 1
    found = errors(findings)
    assert found.keys() == {"spark.workers"}
    assert "lack" in found["spark.workers"]
    assert "pyarrow" in found["spark.workers"]
