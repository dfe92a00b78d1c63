"""All of `cdcpipe-spark run` on clusters whose executors are separate processes: snapshot, stream, tables."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import processes
import pyspark
import pytest

from spark_sink.changelog.tables import changelogs_of
from spark_sink.replica.current import read_replica
from spark_sink.schema.table import Table
from spark_sink.spark import java_home, session
from spark_sink.warehouse.warehouse import Warehouse
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import postgres

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SPARK_HOME = Path(pyspark.__file__).parent
TIMEOUT_S = 600

# One small executor on a small machine: what is started for one test should not take long to start.
SETTINGS = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.executor.memory": "1g",
    # No package of ours is to be found there.
    "spark.executorEnv.PYTHONPATH": "/nowhere",
}
CONF = [argument for key, value in SETTINGS.items() for argument in ("--conf", f"{key}={value}")]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[Any], log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode}:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"too late:\n{log.read_text()}"
        time.sleep(0.1)


@contextmanager
def started(command: list[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with its output in a file. At the end of the block the command is killed if it still runs."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, **options
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def plain_environment(**more: str) -> dict[str, str]:
    """Return the environment of a daemon on another machine: nothing of this project."""
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return inherited | {"JAVA_HOME": str(java_home.find_java()), "SPARK_LOCAL_IP": "127.0.0.1"} | more


@contextmanager
def standalone(directory: Path) -> Iterator[str]:
    """Start a master and a worker, each a process in its own directory. Yield the master's URL."""
    environment = plain_environment(SPARK_DAEMON_JAVA_OPTS="-XX:TieredStopAtLevel=1", SPARK_DAEMON_MEMORY="256m")
    daemon = [str(SPARK_HOME / "bin/spark-class")]
    for name in ("master", "worker"):
        (directory / name).mkdir()
    log = directory / "master/log"
    master = [*daemon, "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    with started(master, log, env=environment, cwd=log.parent) as process:
        wait_until(lambda: "New state: ALIVE" in log.read_text(), process, log)
        found = re.search(r"Starting Spark master at (spark://\S+)", log.read_text())
        assert found
        worker = [*daemon, "org.apache.spark.deploy.worker.Worker", found[1], "--host", "127.0.0.1", "--webui-port", "0"]
        worker += ["--cores", "2", "--memory", "1g", "--work-dir", str(directory / "worker/work")]
        log = directory / "worker/log"
        with started(worker, log, env=environment, cwd=log.parent) as process:
            wait_until(lambda: "Successfully registered with master" in log.read_text(), process, log)
            yield found[1]


def follow(
    command: list[str],
    database: postgres.Database,
    spark: Any,
    root: Path,
    *more: str,
    staging: str = "staging",
    in_between: Callable[[int], None] = lambda _: None,
    **options: Any,
) -> str:
    """Let a pipeline take a snapshot and then changes. Stop it, compare, and return its output.

    ``in_between`` is called with the process between snapshot and changes.
    """
    log, warehouse = root / "log", root / "warehouse"

    def rows() -> list[tuple[Any, ...]]:
        return [tuple(row) for row in read_replica(spark, warehouse, "public.fruit").orderBy("id").collect()]

    with database.connect() as connection:
        connection.execute("create table fruit (id int primary key, name text, price numeric(8,2))")
        connection.execute("insert into fruit select i, 'fruit ' || i, i / 100.0 from generate_series(1, 1000) i")
        command = [*command, "run", "-d", database.dsn, "-S", "cluster", "--publication", "cluster", "-c", "--seal-interval", "0.2"]
        command += ["--staging", staging, "--warehouse", str(warehouse), "--snapshot-chunk-size", "32KiB", *more]
        with started(command, log, cwd=root, **options) as process:
            snapshot = warehouse / "_cdcpipe/snapshot.json"
            wait_until(lambda: snapshot.exists() and json.loads(snapshot.read_text())["is_complete"], process, log)
            in_between(process.pid)
            connection.execute("update fruit set price = 0 where id <= 10")
            connection.execute("delete from fruit where id > 990")
            # As much as no driver does itself.
            connection.execute("insert into fruit select i, repeat(md5(i::text), 100), null from generate_series(2001, 3000) i")
            row = connection.execute("select pg_current_wal_insert_lsn() - '0/0'").fetchone()
            assert row
            # Something that comes after it, and changes nothing.
            connection.execute("insert into fruit values (0, 'in between', null); delete from fruit where id = 0")
            identity = warehouse / "_cdcpipe/warehouse.json"

            def is_there() -> bool:
                position = Warehouse.existing(warehouse).source().position if identity.exists() else None
                return position is not None and position.lsn > row[0]

            wait_until(is_there, process, log)
            # The JVM may get the signal, too: then there is no last round of merges.
            expected = connection.execute("select id, name, price from fruit order by id").fetchall()
            wait_until(lambda: rows() == expected, process, log)
            process.send_signal(signal.SIGTERM)
            process.wait(TIMEOUT_S)
            # Whatever it is that gets the signal, nobody goes on holding the slot.
            deadline = time.monotonic() + TIMEOUT_S
            while connection.execute("select from pg_replication_slots where active").fetchone():
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
    assert rows() == expected
    changes = changelogs_of(spark, Warehouse.existing(warehouse)).read(Table("public", "fruit"))
    counts = {row["_cdc_op"]: row["count"] for row in changes.groupBy("_cdc_op").count().collect()}
    after = counts["delete"] - 10  # what comes after it may be there
    assert after in (0, 1)
    assert counts == {"snapshot": 1000, "update": 10, "delete": 10 + after, "insert": 1000 + after}
    return log.read_text()


def test_spark_submit_to_a_standalone_cluster(database: postgres.Database, spark: Any, tmp_path: Path) -> None:
    """The example is submitted to a master and a worker without this project. The driver is on the machine with the staging
    directory.
    """
    with standalone(tmp_path) as master:
        jars = session._jar_settings("delta", None)["spark.jars"]
        command = [str(SPARK_HOME / "bin/spark-submit"), "--master", master, "--jars", jars, *CONF]
        environment = plain_environment(PYTHONPATH=str(ROOT), PYSPARK_PYTHON=sys.executable)
        said = follow([*command, str(ROOT / "examples/spark_submit.py")], database, spark, tmp_path, env=environment)
        assert "cdcpipe-spark: error" not in said


def kill_executors(pid: int) -> None:
    """Send SIGKILL to all executors of a local cluster. Spark starts others."""
    assert processes.kill(pid, "executor") == 2


def test_a_local_cluster_that_does_not_see_the_staging_directory(database: postgres.Database, spark: Any, tmp_path: Path) -> None:
    """The executors are processes in their own directories. They get segments of the log from the driver.

    They are killed once. No change is lost, and none comes twice.
    """
    # Executors work below SPARK_HOME, whatever they are told: not in the installed package.
    home = tmp_path / "spark"
    home.mkdir()
    for path in SPARK_HOME.iterdir():
        if path.name != "work":
            (home / path.name).symlink_to(path)
    command = [sys.executable, "-P", "-m", "spark_sink"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SPARK_HOME": str(home)}
    options = ["--master", "local-cluster[2,1,1024]", "--staging-shared", "no", *CONF]
    # This path leads to the staging directory only from where the driver was started.
    staging = "/proc/self/cwd/staging"
    said = follow(command, database, spark, tmp_path, *options, staging=staging, in_between=kill_executors, env=environment)
    assert "cdcpipe-spark: error" not in said
    assert list(home.glob("work/*/*/stderr"))
