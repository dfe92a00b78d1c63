"""Fixtures for the servers and sessions that the tests share.

If a server version is missing, the tests that need it are skipped with the reason. If CI is set, they fail.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import postgres
import pytest
from secure_postgres import SecureCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

from support.forked_sources import forked_sources
from support.paths import ROOT
from support.requirements import missing, need
from support.segments import Log

_MEMORY = Path("/dev/shm")
_MEMORY_BYTES = 8 << 30
"""Several times what the servers of all tests need."""


def _place_of_servers() -> Path:
    """Return the directory of the servers' files: in memory if there is room.

    Each test makes a database and drops it, some 300 files. On ext4 that takes 110 ms of CPU time, in memory 17 ms. After a file
    was removed, ext4 does not use its inode for some seconds, and for each new file it looks at all such inodes.
    """
    has_room = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _MEMORY_BYTES
    return _MEMORY if has_room else postgres.Cluster.parent


postgres.Cluster.parent = _place_of_servers()


_SETTINGS = {"autovacuum": "off"}
"""An ANALYZE of a shared catalog may run in any test's database, at any time. For it, wal2json writes a record without changes."""


def _cluster(version: str) -> Iterator[postgres.Cluster]:
    need(version)
    with postgres.Cluster(version, settings=_SETTINGS) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def pg14() -> Iterator[postgres.Cluster]:
    yield from _cluster("14")


@pytest.fixture(scope="session")
def pg15() -> Iterator[postgres.Cluster]:
    yield from _cluster("15")


@pytest.fixture(scope="session")
def pg16() -> Iterator[postgres.Cluster]:
    yield from _cluster("16")


@pytest.fixture(scope="session")
def pg17() -> Iterator[postgres.Cluster]:
    yield from _cluster("17")


@pytest.fixture(scope="session")
def pg18() -> Iterator[postgres.Cluster]:
    yield from _cluster("18")


@pytest.fixture(scope="session")
def secure_pg() -> Iterator[SecureCluster]:
    """Yield a server with TLS that asks for a password over TCP."""
    need("15")
    with SecureCluster() as cluster:
        yield cluster


@pytest.fixture(params=postgres.REGULAR_VERSIONS)
def pg(request: pytest.FixtureRequest) -> postgres.Cluster:
    """Run the test on each of the regular server versions."""
    return request.getfixturevalue(f"pg{request.param}")


@pytest.fixture(params=postgres.VERSIONS)
def any_pg(request: pytest.FixtureRequest) -> postgres.Cluster:
    """Run the test on each supported server version, because its result depends on the version, as with catalog queries."""
    return request.getfixturevalue(f"pg{request.param}")


@pytest.fixture
def database(pg18: postgres.Cluster) -> Iterator[postgres.Database]:
    """Yield a new database on version 18, and drop it with its slots. For other versions: `with pg15.database() as db:`."""
    with pg18.database() as made:
        yield made


@pytest.fixture
def shell(database: postgres.Database, tmp_path: Path) -> dict[str, str]:
    """Return the environment that the docs' examples assume: the programs are on the PATH, and libpq finds a server."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in {"cdcpipe": "cli", "cdcpipe-spark": "spark_sink"}.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        program.chmod(0o755)
    cluster = database.cluster
    return os.environ | {
        "PATH": f"{programs}:{cluster.bin('psql').parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PGHOST": str(cluster.directory),
        "PGPORT": str(cluster.port),
        "PGUSER": "postgres",
        "PGDATABASE": database.name,
    }


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Return a staging directory to which the test adds segments."""
    return Log(tmp_path / "staging")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator["SparkSession"]:
    """Yield a local Spark session with Delta, the same one for the whole run."""
    from cdcpipe.errors import InitError
    from spark_sink.spark import java_home, session

    try:
        java_home.find_java()
    except InitError as ex:
        missing(f"{ex}: {ex.hint}")
    warehouse = tmp_path_factory.mktemp("spark-warehouse")
    conf = {
        "spark.sql.warehouse.dir": str(warehouse),
        # The session lives long enough for both compilers. C2 compiles only what is really hot (spark/java_options.py).
        # With a larger young generation, the collector runs less often.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=4 -XX:ReservedCodeCacheSize=512m -Xms1g -Xmn500m",
        # For a few rows, to generate and compile code takes longer than to interpret the expressions, and to plan a query anew
        # after each of its stages takes longer than the stage. (The sessions that the commands start plan anew, as by default.)
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        # The tests share this session, so that later tests reuse compiled classes. (By default Spark keeps only 100.)
        "spark.sql.codegen.cache.maxEntries": "10000",
    }
    made = session.build(app_name="tests", master="local[2]", format="delta", conf=conf)
    with forked_sources(tmp_path_factory.mktemp("python")) as python:
        made.sparkContext.pythonExec = str(python)  # spark.pyspark.python would turn off the home without the zip (spark/home.py)
        yield made
        made.stop()
