"""Servers and sessions that the tests share.

A server version that is missing skips the tests that need it, with the reason; where CI is set it is an error.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import postgres
import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

from support.paths import ROOT
from support.requirements import missing, need
from support.segments import Log


def _cluster(version: str) -> Iterator[postgres.Cluster]:
    need(version)
    with postgres.Cluster(version) as cluster:
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


@pytest.fixture(params=postgres.REGULAR_VERSIONS)
def pg(request: pytest.FixtureRequest) -> postgres.Cluster:
    """Each of the regular server versions in turn."""
    return request.getfixturevalue(f"pg{request.param}")


@pytest.fixture(params=postgres.VERSIONS)
def any_pg(request: pytest.FixtureRequest) -> postgres.Cluster:
    """Each supported server version in turn: for what depends on the version, such as questions to the catalog."""
    return request.getfixturevalue(f"pg{request.param}")


@pytest.fixture
def database(pg18: postgres.Cluster) -> Iterator[postgres.Database]:
    """A new database on 18, dropped afterwards with its slots. `with pg15.database() as db:` is the same elsewhere."""
    with pg18.database() as made:
        yield made


@pytest.fixture
def shell(database: postgres.Database, tmp_path: Path) -> dict[str, str]:
    """The environment that pages and examples assume: the programs on the PATH, a server that libpq finds."""
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
    """A staging directory to which a test adds segments."""
    return Log(tmp_path / "staging")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator["SparkSession"]:
    """One local Spark session with Delta for the whole run."""
    from cdcpipe.errors import InitError
    from spark_sink.spark import session

    try:
        session.find_java()
    except InitError as ex:
        missing(f"{ex}: {ex.hint}")
    warehouse = tmp_path_factory.mktemp("spark-warehouse")
    conf = {
        "spark.sql.warehouse.dir": str(warehouse),
        # Few rows in many different plans: without these, two thirds of the time would go into compiling code.
        # (With one compiler Java sets 48 MB apart for code, which the whole run outgrows.)
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=512m",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.shuffle.partitions": "2",
        # The tests share this session: what one has compiled serves the next (Spark keeps 100 classes by default).
        "spark.sql.codegen.cache.maxEntries": "10000",
    }
    made = session.build(app_name="tests", master="local[2]", format="delta", conf=conf)
    yield made
    made.stop()
