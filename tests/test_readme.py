"""The README is true: it has every option, and its examples run and print what it says.

A block ```sh run``` is run by bash, ```python run``` by Python, all in the order of the file, in one directory and on one
database, with stdin open as at a terminal. A ```text``` block right after it is what the block prints; … stands for anything.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import postgres
import pytest

from cli.main import cdcpipe
from spark_sink.__main__ import group

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(
    r"^```(?P<language>sh|python) run(?P<flags>[a-z ]*)\n(?P<code>.*?)^```\n(?:\n^```text\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
TIMEOUT_S = 240


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, f"{path} {name}")


COMMANDS = [*commands(cdcpipe, "cdcpipe"), *commands(group, "cdcpipe-spark")]
OPTIONS = [
    pytest.param(option, id=f"{path} {option.opts[-1]}")
    for path, command in COMMANDS
    for option in command.get_params(click.Context(command))
    if isinstance(option, click.Option)
]


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_documented(option: click.Option) -> None:
    assert option.help
    for name in option.opts:
        assert re.search(rf"`{re.escape(name)}[` =]", README), f"{name} is not in the README"


@pytest.mark.parametrize("path", [path for path, _ in COMMANDS])
def test_every_command_is_documented(path: str) -> None:
    assert path in README


def test_no_example_is_missed() -> None:
    assert len(list(BLOCK.finditer(README))) == len(re.findall(r"^```\w+ run", README, re.MULTILINE))


def test_every_link_leads_somewhere() -> None:
    headings = [re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()) for line in README.splitlines() if line.startswith("#")]
    anchors = {heading.replace(" ", "-") for heading in headings} | {"cdcpipe-1"}
    assert set(re.findall(r"\]\(#([^)]*)\)", README)) <= anchors
    for path in re.findall(r"\]\((?!https?:|#)([^)]*)\)", README):
        assert (ROOT / path.partition("#")[0]).exists(), path


def matches(output: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace("…", ".*?"), output, re.DOTALL) is not None


def run_blocks(flags: str, directory: Path, environment: dict[str, str]) -> None:
    blocks = [block for block in BLOCK.finditer(README) if block["flags"].strip() == flags]
    assert blocks
    for block in blocks:
        command = ["bash", "-euo", "pipefail", "-c"] if block["language"] == "sh" else [sys.executable, "-c"]
        with (directory / "stdout").open("w+") as stdout, (directory / "stderr").open("w+") as stderr:
            with subprocess.Popen(
                [*command, block["code"]], cwd=directory, env=environment, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr
            ) as process:
                try:
                    code = process.wait(TIMEOUT_S)
                finally:
                    process.kill()
            stdout.seek(0)
            stderr.seek(0)
            output = stdout.read()
            assert code == 0, f"{block['code']}\n{output}\n{stderr.read()}"
        if block["output"] is not None:
            assert matches(output, block["output"]), f"{block['code']}\nprinted:\n{output}"


def test_examples_of_cdcpipe(tmp_path: Path, shell: dict[str, str]) -> None:
    run_blocks("", tmp_path, shell)


def test_the_output_plugin(tmp_path: Path, shell: dict[str, str], database: postgres.Database) -> None:
    code = re.search(r"^```python\n# (\w+\.py)(.*?)^```", README, re.DOTALL | re.MULTILINE)
    points = re.search(r'^```toml\n\[project\.entry-points\."(.*?)"\]\n(\w+) = "(.*?)"\n```', README, re.MULTILINE)
    printed = re.search(r"--output keys -N` writes\n\n```text\n(.*?)```", README, re.DOTALL)
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


@pytest.mark.spark
@pytest.mark.slow
def test_examples_of_cdcpipe_spark(tmp_path: Path, shell: dict[str, str]) -> None:
    run_blocks("spark", tmp_path, shell)
