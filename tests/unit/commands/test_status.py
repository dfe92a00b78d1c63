"""`cdcpipe-spark status` of a staging directory and a warehouse made by hand."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from spark_sink.schema.names import Naming
from spark_sink.schema.table import Table, Version
from spark_sink.staging.log import Epoch, Position
from spark_sink.warehouse import last_look
from spark_sink.warehouse.warehouse import Warehouse
from support.delta_log import added, commit
from support.forked_commands import ForkedCommands
from support.paths import ROOT
from support.segments import START_LSN
from support.small_pipeline import make_pipeline


def test_land_notes_its_error_and_status_shows_it(tmp_path: Path, commands: ForkedCommands) -> None:
    arguments = ("land", "-h", str(tmp_path), "-S", "s", "--publication", "p", "--staging", str(tmp_path / "staging"))
    said = commands.spark_cli(*arguments, code=2).stderr
    found = json.loads(commands.spark_cli("status", "--staging", str(tmp_path / "staging"), "--json").stdout)
    assert found["last_error"]["message"] in said
    assert (found["last_error"]["command"], found["last_error"]["exit_code"]) == ("land", 2)
    assert "last error 20" in commands.spark_cli("status", "--staging", str(tmp_path / "staging")).stdout


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    return make_pipeline(tmp_path)


def test_status_as_json(pipeline: Path, commands: ForkedCommands) -> None:
    found = json.loads(commands.spark_cli("status", "--warehouse", str(pipeline / "warehouse"), "--json").stdout)
    assert found["staging"] == str(pipeline / "staging")
    assert (found["server"], found["server_error"], found["last_error"], found["launcher"]) == (None, None, None, None)
    rungs = {rung["rung"]: rung for rung in found["ladder"]}
    assert {name: (rung["position"], rung["behind_bytes"]) for name, rung in rungs.items()} == {
        "sealed": ("1:0/1300", 0),
        "changelog": ("1:0/1300", 0),
        "replica": ("1:0/1200", 0x100),
    }
    assert rungs["sealed"]["commit_time"] == "2025-01-01T00:00:00.000Z"
    assert rungs["replica"]["behind_seconds"] > 0
    assert not rungs["replica"]["at_most"]
    (table,) = found["tables"]
    assert (table["table"], table["versions"]) == ("public.fruit", 1)
    assert table["replica"] == {
        "position": "1:0/1200",
        "rows": 2,
        "files": 1,
        "size": 10,
        "version": 0,
        "written": "2023-11-14T22:13:20.000Z",
    }
    assert (table["changelog"]["rows"], table["changelog"]["position"]) == (3, "1:0/1300")


def test_a_table_that_left_the_publication_is_named(pipeline: Path, commands: ForkedCommands) -> None:
    house = Warehouse.existing(pipeline / "warehouse")

    def shown(*options: str) -> str:
        return commands.spark_cli("status", "--warehouse", str(house.root), *options).stdout

    assert json.loads(shown("--json"))["tables"][0]["published"] is None  # nobody has looked
    fruit = last_look.SeenTable("public", "fruit", 1, True, None, None)
    for tables, is_published in (({1: fruit}, True), ({}, False)):
        last_look.write(house, last_look.Seen("7123456789", 0x1000, tables))
        assert json.loads(shown("--json"))["tables"][0]["published"] is is_published
        assert ("left       public.fruit is not published any more" in shown()) is not is_published


def test_a_table_in_directories_of_another_name_is_named(pipeline: Path, commands: ForkedCommands) -> None:
    """Whoever deletes a table's files has to know: these of its name may be those of another one."""
    house = Warehouse.existing(pipeline / "warehouse")
    fruit, produce = Table("public", "fruit"), Table("public", "produce")
    for table in (Table("public", "Mixed case"), Table("public", "fruit", 16500)):
        house.write_versions(table, house.versions(fruit))
    names = house.recorded_names()
    names.add(Naming((1, 0), 1, fruit, produce, fruit))
    house.write_names(names)
    shown = commands.spark_cli("status", "--warehouse", str(house.root)).stdout
    assert [line for line in shown.splitlines() if line.startswith("directory")] == [
        "directory  public.produce is in public.fruit",
        "directory  public.fruit is in public.fruit~16500",
    ]


def test_a_replica_that_is_not_there_is_behind(pipeline: Path, commands: ForkedCommands) -> None:
    """It lacks all changes from its table's first one on. A table without a key, or without changes, needs no replica."""
    house = Warehouse.existing(pipeline / "warehouse")

    def rung() -> tuple[str, int]:
        found = json.loads(commands.spark_cli("status", "--warehouse", str(house.root), "--json").stdout)
        replica = found["ladder"][-1]
        assert replica["rung"] == "replica"
        return replica["position"], replica["behind_bytes"]

    keyless, new = Table("public", "keyless"), Table("public", "new")
    house.write_versions(keyless, [Version(0x1100, 0, 2, (), ())])
    house.write_versions(new, [Version(0x1180, 0, 3, (), ()), Version(0x1280, 0, 3, ("id",), ("id",))])
    commit(house.changelog(keyless) / "_delta_log", 0, {"txn": {"appId": "cdcpipe", "version": 0x1300}}, added("a", 1))
    assert rung() == ("1:0/1200", 0x100)
    commit(house.changelog(new) / "_delta_log", 0, {"txn": {"appId": "cdcpipe", "version": 0x1300}}, added("a", 1))
    assert rung() == ("1:0/117F", 0x181)
    shutil.rmtree(house.replica(Table("public", "fruit")))
    assert rung() == ("1:0/1000", 0x300)


def test_a_stored_history_has_a_stage_of_its_own(pipeline: Path, commands: ForkedCommands) -> None:
    house = Warehouse.existing(pipeline / "warehouse")
    commit(
        house.history(Table("public", "fruit")) / "_delta_log", 0, {"txn": {"appId": "cdcpipe", "version": 0x1180}}, added("a", 1)
    )
    arguments = ("status", "--warehouse", str(house.root))
    found = json.loads(commands.spark_cli(*arguments, "--json").stdout)
    assert found["tables"][0]["history"]["position"] == "1:0/1180"
    assert [rung["rung"] for rung in found["ladder"]][-1] == "replica"  # nobody maintains the history
    assert "history" in commands.spark_cli(*arguments).stdout
    kept = Warehouse(house.root, "delta", history="table")
    kept.open(Epoch(1, "7123456789", 1, "db", "s", ("p",), {}, START_LSN))
    rung = json.loads(commands.spark_cli(*arguments, "--json").stdout)["ladder"][-1]
    assert (rung["rung"], rung["position"]) == ("history", "1:0/1180")


def test_status_of_parquet_tables(pipeline: Path, commands: ForkedCommands) -> None:
    house = Warehouse(pipeline / "parquet", "parquet")
    house.open(Epoch(1, "7123456789", 1, "db", "s", ("p",), {}, START_LSN))
    house.record(Position(1, 0x1200))
    house.write_versions(Table("public", "fruit"), [])
    (house.changelog(Table("public", "fruit")) / "cdc_append=000001-0000000000001000-0000000000001200").mkdir(parents=True)
    arguments = ("status", "--warehouse", str(house.root), "--json")
    assert "hint: name it: --staging DIR" in commands.spark_cli(*arguments, code=1).stderr
    found = json.loads(commands.spark_cli(*arguments, "--staging", str(pipeline / "staging")).stdout)
    assert [(rung["rung"], rung["behind_bytes"]) for rung in found["ladder"]] == [("sealed", 0), ("changelog", 0x100)]
    (table,) = found["tables"]
    assert (table["changelog"]["position"], table["changelog"]["rows"], table["replica"]) == ("1:0/1200", None, None)


def watch(pipeline: Path, *arguments: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "spark_sink", "status", "--warehouse", str(pipeline / "warehouse"), *arguments]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_status_again_and_again(pipeline: Path, number: signal.Signals) -> None:
    with watch(pipeline, "--watch", "0.1", "--json") as process:
        assert process.stdout is not None
        times = [json.loads(process.stdout.readline())["time"] for _ in range(2)]
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert times[0] < times[1]
    assert (process.returncode, errors) == (0, "")


def test_status_in_blocks(pipeline: Path) -> None:
    with watch(pipeline, "--watch", "0.1") as process:
        assert process.stdout is not None
        seen = ""
        while seen.count("\n\nstaging ") < 1:
            seen += process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert "\x1b" not in seen
    lines = [line.split() for line in seen.splitlines()]
    assert ["sealed", "1:0/1300", "0", "B", "0.0", "2025-01-01T00:00:00.000Z"] in lines
    assert any(line[:4] == ["replica", "1:0/1200", "256", "B"] for line in lines)
    assert ["public.fruit", "3", "1", "1:0/1300", "2", "1", "1:0/1200", "2023-11-14T22:13:20.000Z"] in lines


@pytest.mark.parametrize("end", ["q", "\x03"])
def test_status_on_a_terminal_is_drawn_again_and_takes_keys(pipeline: Path, end: str) -> None:
    house = Warehouse.existing(pipeline / "warehouse")
    for number in range(30):
        table = Table("public", f"t{number:02}")
        house.write_versions(table, [Version(0, 0, 1, ("id",), ("id",))])
        commit(house.changelog(table) / "_delta_log", 0, {"txn": {"appId": "cdcpipe", "version": 0x1300}}, added("a", 1))
    argv = ["-m", "spark_sink", "status", "--warehouse", str(house.root), "--watch", "0.5"]
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": ""}
    terminal = pexpect.spawn(
        sys.executable, argv, cwd=str(ROOT), env=environment, timeout=60, dimensions=(24, 80), encoding="utf-8"
    )
    for _ in range(2):
        terminal.expect_exact("\x1b[H\x1b[K\x1b[1mslot s, database db")
        terminal.expect_exact("public.fruit")
    terminal.expect("tables 1 to ([0-9]+) of 31: ")
    page = int(terminal.match[1])
    terminal.send("jj\x1b[Bk\x1b[6~")
    terminal.expect_exact(f"tables {page + 3} to {2 * page + 2} of 31: ")
    terminal.send(end)
    terminal.expect("\r\n$")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


@pytest.mark.parametrize("arguments", [[], ["--watch", "--json"], ["--staging", "x", "--watch", "0"]])
def test_usage_errors(arguments: list[str], commands: ForkedCommands) -> None:
    assert "cdcpipe-spark: error: " in commands.spark_cli("status", *arguments, code=1).stderr


def test_a_place_that_is_not_there_is_a_mistake(pipeline: Path, commands: ForkedCommands) -> None:
    warehouse = ("status", "--warehouse", str(pipeline / "warehouse"))
    said = commands.spark_cli(*warehouse, "--html", str(pipeline / "no/shop.html"), code=1).stderr
    assert f"--html {pipeline}/no/shop.html: there is no directory {pipeline}/no\n" in said
    assert "there is no such directory" in commands.spark_cli(*warehouse, "--staging", str(pipeline / "no"), code=1).stderr
    said = commands.spark_cli("status", "--staging", str(pipeline / "warehouse"), code=1).stderr
    assert f"--staging {pipeline}/warehouse is a warehouse\n" in said
    (pipeline / "staging").rename(pipeline / "moved")
    said = commands.spark_cli(*warehouse, code=1).stderr
    assert f"records the staging directory {pipeline}/staging, which is not here\n" in said
    assert "Name its place: --staging DIR" in said
    commands.spark_cli(*warehouse, "--staging", str(pipeline / "moved"))
    said = commands.spark_cli(*warehouse, "--check", code=3).stdout
    assert said.startswith("CDCPIPE UNKNOWN: ")
    assert "which is not here" in said


def test_the_page_shows_a_path_that_is_not_utf_8(pipeline: Path, commands: ForkedCommands) -> None:
    moved = os.fsdecode(os.fsencode(pipeline) + b"/moved\xff")
    (pipeline / "staging").rename(moved)
    commands.spark_cli("status", "--staging", moved, "--html", str(pipeline / "shop.html"))
    assert "/moved\\xff" in (pipeline / "shop.html").read_text("utf-8")
    assert not list(pipeline.glob("*.tmp"))


def test_a_directory_that_is_refused_is_unknown(tmp_path: Path, commands: ForkedCommands) -> None:
    """So is one that this user cannot read, but root can read all. Exit code 1 would be WARNING for a monitoring system."""
    ended = commands.cdcpipe_spark("status", "--check", "--staging", "s3a://bucket/log")
    assert (ended.code, ended.stderr) == (3, "")
    assert ended.stdout.startswith(
        "CDCPIPE UNKNOWN: s3a://bucket/log: --staging must be a directory of a local or mounted file system"
    )
    (tmp_path / "shop.toml").write_text("[status]\ncheck = true\nstaging = 's3a://bucket/log'\n")
    assert commands.spark_cli("status", "--config", str(tmp_path / "shop.toml"), code=3).stdout == ended.stdout
    commands.spark_cli("status", "--staging", "s3a://bucket/log", code=1)


def test_a_mistake_is_unknown_also_where_a_file_asks_for_a_check(tmp_path: Path, commands: ForkedCommands) -> None:
    file = tmp_path / "shop.toml"
    file.write_text("[status]\ncheck = true\nmax-lag = 'soon'\n")
    ended = commands.cdcpipe_spark("status", "--config", str(file))
    assert (ended.code, ended.stderr) == (3, "")
    assert ended.stdout.startswith(f"CDCPIPE UNKNOWN: {file}: status.max-lag: 'soon' is not a number of seconds")
    for text in (
        "check = true\n[status]\nnonsense = 1\n",
        "nonsense = 1\n[status]\ncheck = true\n",
        "[status]\nstaging = 1.0\nmax-lag = true\ncheck = true\n",
    ):
        file.write_text(text)
        ended = commands.cdcpipe_spark("status", "--config", str(file))
        assert (ended.code, ended.stderr) == (3, ""), text
        assert ended.stdout.startswith(f"CDCPIPE UNKNOWN: {file}: "), text
    for text in (
        "[status]\nmax-lag = 'soon'\n",
        "[status]\nnonsense = 1\n",
        "[status]\ncheck = false\nmax-lag = true\n",
        "check = true\n=",
    ):
        file.write_text(text)
        assert commands.cdcpipe_spark("status", "--config", str(file)).code == 1, text


@pytest.mark.parametrize("setting", ["max-lag = '300,3600'", "check = true\nmax-wal = '16G'"])
@pytest.mark.parametrize("use", [[], ["--json"], ["--html", "shop.html"]])
def test_a_file_for_checks_is_also_a_file_for_the_other_uses(
    pipeline: Path, commands: ForkedCommands, setting: str, use: list[str]
) -> None:
    """An option of a file needs no --check, and counts less than an option of the command line."""
    file = pipeline / "shop.toml"
    file.write_text(f"[status]\n{setting}\n")
    use = [str(pipeline / word) if word.endswith(".html") else word for word in use]
    ended = commands.cdcpipe_spark("status", "--config", str(file), "--warehouse", str(pipeline / "warehouse"), *use)
    is_check = setting.startswith("check") and not use
    assert ended.stdout.startswith("CDCPIPE ") == is_check
    assert is_check or ended.code == 0, ended.stderr


def test_a_check_of_a_command_that_ended_with_an_error(tmp_path: Path, commands: ForkedCommands) -> None:
    staging = str(tmp_path / "staging")
    commands.spark_cli("land", "-h", str(tmp_path), "-S", "s", "--publication", "p", "--staging", staging, code=2)
    ended = commands.cdcpipe_spark("status", "--check", "--staging", staging)
    assert ended == (3, f"CDCPIPE UNKNOWN: {staging} has no log yet\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--staging DIR or --warehouse DIR has to be given"),
        (["--staging", "/nowhere"], "/nowhere"),
        (["--warehouse", "/nowhere"], "is not a warehouse"),
        (["--staging", "x", "--json"], "goes without --watch, --json and --html"),
        (["--staging", "x", "--max-lag", "fast"], "not a number of seconds"),
        (["--staging", "x", "--max-lag-bytes", "2G,1G"], "WARNING,CRITICAL"),
        (["--staging", "x", "--nonsense"], "--nonsense"),
    ],
)
def test_a_failed_check_is_unknown(arguments: list[str], words: str, commands: ForkedCommands) -> None:
    """Its line is the only output."""
    ended = commands.cdcpipe_spark("status", "--check", *arguments)
    assert (ended.code, ended.stderr, ended.stdout.count("\n")) == (3, "", 1)
    assert ended.stdout.startswith("CDCPIPE UNKNOWN: ")
    assert words in ended.stdout


def test_limits_are_for_checks(commands: ForkedCommands) -> None:
    ended = commands.cdcpipe_spark("status", "--staging", "x", "--max-lag", "60")
    assert (ended.code, ended.stdout) == (1, "")
    assert "go with --check" in ended.stderr
