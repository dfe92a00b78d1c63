"""The contents of the wheel, and the demo's first steps with the installed wheel alone in an empty environment.

pip fetches setuptools and the dependencies from the package registry.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import postgres
import pytest

from support.paths import ROOT

PACKAGES = ["cdcpipe", "cli", "spark_sink"]


def own_environment() -> dict[str, str]:
    """Return the environment without a PYTHONPATH to the checkout. With it, pip would take cdcpipe for installed."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet"]
    done = subprocess.run(command, env=own_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the checkout, because setuptools leaves files in the folder that it builds from."""
    checkout, built = tmp_path_factory.mktemp("source") / "checkout", tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "*.egg-info", "build", "site", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, checkout, ignore=left_out, symlinks=True)
    pip("wheel", "--no-deps", "--wheel-dir", built, checkout)
    return next(built.glob("cdcpipe-*.whl"))


def test_the_wheel_has_the_packages_whole_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as contents:
        files = {name for name in contents.namelist() if ".dist-info/" not in name}
        (info,) = {name.partition("/")[0] for name in contents.namelist()} - {*PACKAGES}
        top_level = contents.read(f"{info}/top_level.txt").decode().split()
        commands = contents.read(f"{info}/entry_points.txt").decode()
        licence = contents.read(f"{info}/licenses/LICENSE")
    in_checkout = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files == in_checkout
    assert {path for path in files if not path.endswith(".py")} == {
        "cdcpipe/ddl/capture.sql",
        "cdcpipe/ddl/message.schema.json",
        "cdcpipe/plugins/json.schema.json",
        "cdcpipe/py.typed",
        "spark_sink/py.typed",
        "spark_sink/spark/log4j2.properties",
    }
    assert "spark_sink/client/watchdog.py" in files  # started by its path
    assert top_level == PACKAGES
    assert commands.split() == [
        "[console_scripts]",
        "cdcpipe",
        "=",
        "cli.__main__:main",
        "cdcpipe-spark",
        "=",
        "spark_sink.console:main",
    ]
    assert licence == (ROOT / "LICENSE").read_bytes()


class Installed:
    """The commands of an environment with the wheel, run outside of the checkout."""

    def __init__(self, directory: Path, database: postgres.Database) -> None:
        self._directory = directory
        self._bin = directory / "venv/bin"
        cluster = database.cluster
        self._environment = own_environment() | {
            "PGHOST": str(cluster.directory),
            "PGPORT": str(cluster.port),
            "PGUSER": "postgres",
            "PGDATABASE": database.name,
        }
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self._bin.parent], check=True)

    def install(self, *requirements: str | Path) -> None:
        pip("--python", self._bin / "python", "install", "--no-compile", *requirements)

    def run(self, program: str, *arguments: str, code: int = 0) -> str:
        """Return the program's stdout, or its stderr if it is expected to fail. stdin stays open, as at a terminal."""
        with subprocess.Popen(
            [self._bin / program, *arguments],
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout
            assert process.stderr
            out, err = process.stdout.read(), process.stderr.read()
        assert process.returncode == code, err
        return err if code else out


def test_the_installed_commands_stream_and_land(wheel: Path, tmp_path: Path, database: postgres.Database) -> None:
    installed = Installed(tmp_path, database)
    installed.install(wheel)
    slot = ("-S", "shop_cdc", "--publication", "shop")
    with database.connect() as connection:
        connection.execute("create table fruit (id int primary key, name text)")
        prepared = json.loads(installed.run("cdcpipe", "prepare", *slot, "-c"))
        connection.execute("insert into fruit values (1, 'apple'), (2, 'pear')")
        connection.execute("delete from fruit where id = 1")
        now = connection.execute("select pg_current_wal_lsn()::text").fetchone()
    assert now is not None
    assert [table["name"] for table in prepared["tables"]] == ["fruit"]

    raw = installed.run("cdcpipe", *slot, "-J", "-N", "--endpos", now[0])
    records = [json.loads(line) for line in raw.splitlines() if line.startswith("{")]
    assert [record["action"] for record in records] == ["B", "I", "I", "C", "B", "D", "C"]
    assert records[1]["columns"] == [
        {"name": "id", "type": "integer", "value": 1},
        {"name": "name", "type": "text", "value": "apple"},
    ]

    assert "pip install 'cdcpipe[spark]'" in installed.run("cdcpipe-spark", "land", *slot, "--staging", "staging", code=2)
    # All of [spark] but Spark itself, which is large.
    installed.install(f"numpy=={version('numpy')}", f"pyarrow=={version('pyarrow')}")
    installed.run("python", "-c", "import pyspark", code=1)
    installed.run("cdcpipe-spark", "land", *slot, "--staging", "staging", "--available-now")
    status = json.loads(installed.run("cdcpipe-spark", "status", "--staging", "staging", "--json"))
    assert (status["source"]["slot"], status["segments"], status["last_error"]) == ("shop_cdc", 1, None)
    with_server = json.loads(installed.run("cdcpipe-spark", "status", "--staging", "staging", "-d", database.name, "--json"))
    assert with_server["server_error"] is None
    assert with_server["server"]["confirmed_flush_lsn"] >= now[0]
