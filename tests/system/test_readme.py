"""The examples in the pages run and print what the pages show, and the links of the pages lead somewhere.

tests/unit/test_help.py checks that the pages have every option.

bash runs each block ```sh run```, and Python each block ```python run```: all blocks of a page in order, in one directory and on
one database, with stdin open as at a terminal. A ```text``` block right after a block is its expected output; … stands for any
text.

The pages of `CHAIN` run one after the other on one database, beginning with the README. Each page of `ALONE` begins anew. All
Python blocks of a chain are one Python program, so that they share a Spark session.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import postgres
import pytest

from support.command_lines import example
from support.pages import ALONE, BLOCK, CHAIN, PAGES
from support.paths import ROOT
from support.waiting import SPARK_DEADLINE_S


def matches(output: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace("…", ".*?"), output, re.DOTALL) is not None


PYTHON = """
import contextlib, io, json, sys, traceback

for line in sys.stdin:
    output, error = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(json.loads(line), "page", "exec"), {"__name__": "__main__"})
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps([output.getvalue(), error]), flush=True)
"""


class Session:
    """What a reader has open: a directory, an environment and, from the first Python block on, one Python."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._directory = directory
        self._environment = environment
        self._python: subprocess.Popen[str] | None = None

    def close(self) -> None:
        if self._python is not None:
            self._python.communicate()

    def run_page(self, page: str) -> None:
        for block in BLOCK.finditer(PAGES[page]):
            run = self._run_shell if block["language"] == "sh" else self._run_python
            output, error = run(block["code"])
            assert error is None, f"{page}:\n{block['code']}\n{output}\n{error}"
            if block["output"] is not None:
                assert matches(output, block["output"]), f"{page}:\n{block['code']}\nprinted:\n{output}"

    def run_shell(self, code: str) -> str:
        output, error = self._run_shell(code)
        assert error is None, f"{code}\n{output}\n{error}"
        return output

    def _run_shell(self, code: str) -> tuple[str, str | None]:
        with (self._directory / "stdout").open("w+") as stdout, (self._directory / "stderr").open("w+") as stderr:
            with subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", code],
                cwd=self._directory,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            ) as process:
                try:
                    returncode = process.wait(SPARK_DEADLINE_S)
                finally:
                    if process.returncode is None:  # bash's child would go on, and keep the database
                        os.killpg(process.pid, signal.SIGKILL)
            stdout.seek(0)
            stderr.seek(0)
            return stdout.read(), stderr.read() if returncode else None

    def _run_python(self, code: str) -> tuple[str, str | None]:
        if self._python is None:
            self._python = subprocess.Popen(
                [sys.executable, "-c", PYTHON],
                cwd=self._directory,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._python.stdin
        assert self._python.stdout
        self._python.stdin.write(json.dumps(code) + "\n")
        self._python.stdin.flush()
        output, error = json.loads(self._python.stdout.readline())
        return output, error


@pytest.fixture
def session(tmp_path: Path, shell: dict[str, str]) -> Iterator[Session]:
    # Few rows in many short-lived JVMs: the second compiler would take most of the time.
    made = Session(tmp_path, shell | {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1"})
    yield made
    made.close()


def test_the_examples_that_help_ends_with(session: Session, database: postgres.Database) -> None:
    """The examples that need Spark are in the pages: tests/unit/test_help.py."""
    capture = (
        'now=$(psql -Atc "select pg_current_wal_lsn()"); cdcpipe -S shop_cdc --publication shop -H -A --endpos "$now" >day.cdc'
    )
    setup = 'psql -q -c "create table fruit (id int primary key, name text)"'
    change = "psql -q -c \"insert into fruit values (1, 'apple')\""

    def run(path: str) -> str:
        return session.run_shell(example(path).replace("-d shop", f"-d {database.name}"))

    session.run_shell(setup)
    assert json.loads(run("cdcpipe prepare"))["tables"][0]["name"] == "fruit"
    session.run_shell(change)
    assert '"action":"I"' in run("cdcpipe")
    assert json.loads(run("cdcpipe slot"))["slot"] == "shop_cdc"
    assert "error" not in run("cdcpipe doctor").partition("errors: 0")[0]
    assert json.loads(run("cdcpipe checksum"))["tables"][0]["name"] == "fruit"
    session.run_shell(f"{change.replace('1', '2')}; {capture}")
    assert '"action":"I"' in run("cdcpipe decode")
    run("cdcpipe-spark land")
    assert "slot shop_cdc" in session.run_shell("cdcpipe-spark status --staging staging")


@pytest.mark.parametrize("page", [*ALONE[:2], *(pytest.param(page, marks=pytest.mark.spark) for page in ALONE[2:])])
def test_examples(page: str, session: Session) -> None:
    session.run_page(page)


@pytest.mark.spark
def test_examples_from_the_readme_on(session: Session) -> None:
    for page in CHAIN:
        session.run_page(page)


def test_the_output_plugin(tmp_path: Path, shell: dict[str, str], database: postgres.Database) -> None:
    page = PAGES["docs/output-plugins.md"]
    code = re.search(r"^```python\n# (\w+\.py)(.*?)^```", page, re.DOTALL | re.MULTILINE)
    points = re.search(r'^\[project\.entry-points\."(.*?)"\]\n(\w+) = "(.*?)"\n```', page, re.MULTILINE)
    printed = re.search(r"--output keys -N` writes\n\n```text\n(.*?)```", page, re.DOTALL)
    assert code
    assert points
    assert printed
    (tmp_path / code[1]).write_text(f"#{code[2]}")
    # What an installer writes.
    installed = tmp_path / "keys-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: keys\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{points[1]}]\n{points[2]} = {points[3]}\n")
    shell |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    cdcpipe = [str(tmp_path / "bin/cdcpipe")]
    slot = ["-S", "keys", "--publication", "shop"]
    with database.connect() as connection:
        connection.execute("create table fruit (id int primary key, name text)")
        subprocess.run([*cdcpipe, "prepare", *slot, "-c"], env=shell, check=True, stdout=subprocess.DEVNULL)
        connection.execute("insert into fruit values (1, 'apple'); delete from fruit")
        row = connection.execute("select pg_current_wal_lsn()::text").fetchone()
    assert row
    command = [*cdcpipe, *slot, "--output", points[2], "-N", "--endpos", row[0]]
    with subprocess.Popen(command, env=shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        output = process.stdout.read()
    assert process.returncode == 0
    assert matches(output, printed[1]), output
