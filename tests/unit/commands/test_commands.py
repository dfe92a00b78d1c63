"""`cdcpipe-spark` where neither Spark nor a server is needed: usage, help, mistakes."""

from pathlib import Path

import pytest

from support.cli_process import run_spark_cli
from support.forked_commands import ForkedCommands


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["land"],
        ["land", "-S", "s", "--publication", "p"],
        ["land", "-S", "s", "--staging", "/nowhere/x"],
        ["land", "-S", "s", "--publication", "p", "--staging", "/nowhere/x", "--segment-size", "0"],
        ["land", "-S", "s", "--publication", "p", "--staging", "/nowhere/x", "--segment-size", "64 potatoes"],
        ["land", "-S", "s", "--publication", "p", "--staging", "/nowhere/x", "--seal-interval", "-1"],
        ["land", "-S", "s", "--publication", "p", "--staging", "/nowhere/x", "--seal-interval", "nan"],
        ["land", "-S", "s", "--publication", "p", "--staging", "/nowhere/x", "--keep-segments", "100"],
        ["land", "-S", "s", "--publication", "p", "--staging", "/nowhere/x", "--keep-segments", "3 fortnights"],
        ["land", "-S", "s", "--publication", "p", "--staging", ""],
        ["run", "-S", "s", "--publication", "p", "--staging", "/nowhere/x", "--warehouse", ""],
        ["status"],
        ["status", "--staging", "pyproject.toml"],
    ],
)
def test_usage_errors_exit_with_1(arguments: list[str], commands: ForkedCommands):
    ended = commands.cdcpipe_spark(*arguments)
    assert ended.code == 1
    assert ended.stdout == ""
    assert ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["-?"], ["land", "--help"], ["land", "-?"], ["status", "-?"], ["--version"]])
def test_help(arguments: list[str], commands: ForkedCommands):
    ended = commands.cdcpipe_spark(*arguments)
    assert ended.code == 0
    assert ended.stderr == ""
    assert arguments == ["--version"] or "Example:" in ended.stdout


def test_status_of_nothing(tmp_path: Path):
    ended = run_spark_cli("status", "--staging", str(tmp_path / "nowhere"))
    assert ended.returncode == 7
    assert ended.stderr.startswith("cdcpipe-spark: error: ")
    assert run_spark_cli("status", "--staging", str(tmp_path)).stdout.endswith("not begun\n")


@pytest.mark.parametrize("uri", ["postgresql://r:CANARY%zz@h/db", "postgresql://r:p/CANARY@h/db", "postgres:/r:CANARY@h/db"])
def test_a_mistake_in_a_uri_shows_no_password(tmp_path: Path, uri: str, commands: ForkedCommands) -> None:
    where = ["-d", uri, "-S", "s", "--publication", "p", "--staging", str(tmp_path)]
    done = commands.cdcpipe_spark("land", *where)
    assert done.code == 1
    assert "can't be read (it is not shown)" in done.stderr
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert "CANARY" not in done.stderr + done.stdout + "".join(written)
