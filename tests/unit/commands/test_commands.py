"""`cdcpipe-spark` where neither Spark nor a server is needed: usage, help, mistakes."""

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import spark_sink.__main__ as main_module
from cdcpipe.errors import CdcpipeError
from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.commands import land, run
from spark_sink.commands.parameters import DIRECTORY
from spark_sink.files import system_limits
from spark_sink.launcher.config import LauncherConfig
from spark_sink.staging import last_error
from support.cli_process import SPARK_COMMAND, run_spark_cli
from support.forked_commands import ForkedCommands
from support.paths import ROOT


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--conf", "novalue"), "--conf takes KEY=VALUE"),
        (("--warehouse", "hdfs://node/lake", "--available-now"), "--warehouse can't be there"),
        (("--warehouse", "s3a://bucket/lake", "--format", "parquet"), "Parquet tables can't be in an object store"),
        (("--staging", "s3a://bucket/staging"), "--staging must be a directory"),
        (("--checkpoint", "abfss://lake@account/checkpoint"), "--checkpoint must be a directory"),
        (("--format", "iceberg"), "iceberg"),
        (("--optimize-interval", "30s"), "less than 1min"),
        (("--vacuum-retention", "7"), "not a duration"),
        (("--log-retention", "59min"), "less than 60min"),
        (("--types", "spark"), "spark"),
        (("--warehouse", "/etc/passwd/lake"), "the warehouse can't be there: /etc/passwd is no directory"),
        (("--staging", "/etc/passwd/staging"), "the staging directory can't be there"),
    ],
)
def test_options_that_a_run_refuses_before_it_asks_the_server(
    tmp_path: Path, commands: ForkedCommands, options: tuple[str, ...], message: str
) -> None:
    pipeline = ("-S", "busy", "--publication", "busy", "-c", "--staging", str(tmp_path / "staging"))
    ended = commands.cdcpipe_spark("run", *pipeline, "--warehouse", str(tmp_path / "warehouse"), *options)
    assert ended.code == 1, ended.stderr  # not 2: it has not tried to connect
    assert message in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # as root, who runs the tests in a container, may read all
    with pytest.raises(CdcpipeError, match="can't be read by this user") as raised:
        DIRECTORY.convert(str(tmp_path), None, None)
    assert raised.value.exit_code == ExitCode.SYSTEM_ERROR  # its file system may not be mounted yet
    assert str(raised.value.hint).startswith("let this user read and write there")


def test_a_spill_directory_that_cannot_be_read_may_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount point of another user, before its mount. The start refuses it, and `status` shows that; the options did before."""
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.R_OK)
    for command in (land.command, run.command):
        [spill] = [each for each in command.params if each.name == "spill"]
        assert spill.type.convert(str(tmp_path), None, None) == tmp_path
    config = LauncherConfig("s", tmp_path / "staging", ("p",), spill=tmp_path)
    with pytest.raises(CdcpipeError, match="the spill directory can't be read by this user"):
        config.check_spill()


@pytest.mark.parametrize("command", [["land"], ["run", "--warehouse", "lake"]])
def test_a_spill_directory_that_is_not_there_may_come(command: list[str], tmp_path: Path, commands: ForkedCommands) -> None:
    """A service manager starts the command again and again, and `status` shows why it ends."""
    staging, message = tmp_path / "staging", f"{tmp_path}/spill: the spill directory is not there"
    staging.mkdir()
    arguments = [each.replace("lake", str(tmp_path / "lake")) for each in command]
    directories = ("--staging", str(staging), "--spill", str(tmp_path / "spill"))
    ended = commands.cdcpipe_spark(*arguments, "-S", "s", "--publication", "p", *directories)
    assert ended.code == ExitCode.SYSTEM_ERROR
    assert message in ended.stderr
    recorded = last_error.read(staging)
    assert recorded is not None
    assert (recorded["command"], recorded["message"]) == (command[0], message)


def test_a_long_option_with_one_hyphen_is_named(commands: ForkedCommands) -> None:
    ended = commands.cdcpipe_spark("land", "-S", "s", "-publication", "p", "--staging", "/nowhere/x")
    assert ended.code == 1
    assert ended.stderr.endswith("hint: --publication has two hyphens\n")


@pytest.mark.parametrize("arguments", [["--help"], ["-?"], ["land", "--help"], ["land", "-?"], ["status", "-?"], ["--version"]])
def test_help(arguments: list[str], commands: ForkedCommands):
    ended = commands.cdcpipe_spark(*arguments)
    assert ended.code == 0
    assert ended.stderr == ""
    assert arguments == ["--version"] or "Example:" in ended.stdout


@pytest.mark.parametrize("closed", ["<&- 2>&-", "2>&-", "2>/dev/full"])
def test_a_stderr_that_takes_nothing_only_hides_what_is_said(tmp_path: Path, closed: str):
    """The command itself runs: it fails where it would fail anyway, here at the server."""
    away = ["-d", f"host={tmp_path} port=1", "-S", "s", "--publication", "p", "--staging", str(tmp_path / "staging")]
    command = shlex.join([*SPARK_COMMAND, "land", *away, "--available-now"])
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["sh", "-c", f"exec {command} {closed}"], stdout=subprocess.PIPE, env=buffered, timeout=60)
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.parametrize("arguments", [["status", "--staging", "{staging}"], ["--help"]], ids=" ".join)
def test_a_stdout_that_is_closed_at_the_start_is_named(tmp_path: Path, arguments: list[str]):
    words = [each.format(staging=tmp_path) for each in arguments]
    command = shlex.join([*SPARK_COMMAND, *words])
    done = subprocess.run(["sh", "-c", f"exec {command} >&-"], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 7
    assert done.stderr.startswith("cdcpipe-spark: error: stdout is closed")
    assert done.stderr.count("\n") == 2  # the error and its hint, and nothing of Python's own at the exit


def test_status_of_nothing(tmp_path: Path):
    ended = run_spark_cli("status", "--staging", str(tmp_path / "nowhere"))
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"cdcpipe-spark: error: --staging {tmp_path}/nowhere: there is no such directory\n")
    assert "cdcpipe-spark: hint: " in ended.stderr
    assert run_spark_cli("status", "--staging", str(tmp_path)).stdout.endswith("not begun\n")


@pytest.mark.parametrize("uri", ["postgresql://r:CANARY%zz@h/db", "postgresql://r:p/CANARY@h/db", "postgres:/r:CANARY@h/db"])
def test_a_mistake_in_a_uri_shows_no_password(tmp_path: Path, uri: str, commands: ForkedCommands) -> None:
    where = ["-d", uri, "-S", "s", "--publication", "p", "--staging", str(tmp_path)]
    done = commands.cdcpipe_spark("land", *where)
    assert done.code == 1
    assert "can't be read (it is not shown)" in done.stderr
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert "CANARY" not in done.stderr + done.stdout + "".join(written)


def test_a_full_disk_is_said() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([*SPARK_COMMAND, "config", "show", "land"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stderr.splitlines()) == (
        7,
        [
            "cdcpipe-spark: error: the answer can't be written to stdout: No space left on device",
            "cdcpipe-spark: hint: make room where stdout goes, or write it elsewhere",
        ],
    )


def test_the_end_of_a_file_is_no_interruption(tmp_path: Path) -> None:
    """click turns each EOFError into Abort, as if somebody had typed Ctrl-C. Here it is from a damaged file of Python's own."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path / "bytecode")
    assert run_spark_cli("status", "--staging", str(tmp_path), env=environment).returncode == 0
    (compiled,) = tmp_path.glob("bytecode/**/spark_sink/commands/status.*.pyc")
    os.truncate(compiled, 1000)
    ended = run_spark_cli("status", "--staging", str(tmp_path), env=environment)
    assert ended.returncode == 7
    assert ended.stderr.strip().startswith("cdcpipe-spark: error: unexpected EOFError in line ")


LIMITED = """
import resource, sys
import spark_sink.__main__ as command, spark_sink.commands.status
resource.setrlimit(getattr(resource, sys.argv.pop(1)), (int(sys.argv.pop(1)),) * 2)
command.main()
"""
"""The command with a limit of the system that begins after its imports."""


@pytest.mark.parametrize(
    ("limit", "value", "said", "hint"),
    [("RLIMIT_NOFILE", 3, "Too many open files", "ulimit -n"), ("RLIMIT_AS", 1 << 31, "out of memory", "ulimit -v")],
)
def test_a_limit_of_the_machine_is_no_defect(tmp_path: Path, limit: str, value: int, said: str, hint: str) -> None:
    config = tmp_path / "shop.toml"
    with config.open("wb") as file:
        file.truncate(1 << 40)  # it takes no room on the disk, but does not fit into the memory
    command = [sys.executable, "-c", LIMITED, limit, str(value), "status", "--staging", str(tmp_path)]
    if limit == "RLIMIT_AS":
        command += ["--config", str(config)]
    # Measured coverage would need files and memory of its own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert ended.returncode == 7, ended.stderr
    error, told = ended.stderr.splitlines()
    assert error.startswith("cdcpipe-spark: error: ")
    assert error.endswith(said)
    assert told.startswith("cdcpipe-spark: hint: ")
    assert hint in told


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "quota"),
        (OSError(errno.ENFILE, "Too many open files in system"), "fs.file-max"),
        (PermissionError(errno.EACCES, "Permission denied", "a.json"), "run cdcpipe-spark as the owner"),
        (OSError(errno.EROFS, "Read-only file system", "a.json"), "mounted read-only"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
    ],
)
def test_each_error_of_the_system_has_its_hint(error: Exception, hint: str) -> None:
    found = system_limits.described(error)
    assert found is not None
    assert hint in found[1]
    assert "make room" not in found[1] or "quota" in found[1]


def test_a_current_directory_that_was_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError) as raised:
        Path("staging").absolute()
    assert system_limits.described(raised.value) == (
        "the current directory does not exist any more",
        "change to one that exists; then start again",
    )


def test_other_errors_are_no_errors_of_the_system() -> None:
    assert system_limits.described(RuntimeError("deque mutated during iteration")) is None


def test_another_system_than_linux_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert main_module.invoke(["--help"]) == ExitCode.INIT_FAILED
    assert "cdcpipe-spark needs Linux" in capsys.readouterr().err
