"""`cdcpipe decode` as a command: usage, stdin and stdout, signals, memory."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from recording import DATA

from cdcpipe.errors import OutputError
from cdcpipe.pipe.framing import RecordReader
from cdcpipe.subcommands.decode import explain
from support.captures import BEGIN, COMMIT, PLAIN, capture, decoded, row
from support.cli_process import COMMAND, run_cli
from support.forked_commands import ForkedCommands
from support.paths import ROOT


def test_no_server_is_asked_unless_it_is_named() -> None:
    """Also if the environment names a server that does not exist."""
    path = str(DATA / "pg15" / "v1.cdc")
    environment = {"PGHOST": "/nonexistent", "PGSERVICE": "none"}
    assert run_cli("decode", "-J", path, env=environment)[0] == 0
    code, out, stderr = run_cli("decode", "-J", "-d", "x", path, env={"PGHOST": "/nonexistent"})
    assert (code, out) == (2, b"")
    assert "no connection to the server: " in stderr
    code, _, stderr = run_cli("decode", "-J", "-m", "password=secret", path)
    assert (code, "secret" in stderr) == (1, False)


def test_a_header_that_lies_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "lies.cdc"
    path.write_bytes(b"w 0/1 1000000000\nB")
    limited = ["bash", "-c", 'ulimit -v 600000; exec "$@"', "bash", *COMMAND]
    done = subprocess.run([*limited, "decode", "--explain", path], capture_output=True, text=True)
    assert done.returncode == 5
    assert "cut off in the middle of a record, after 1 of 1000000000 bytes" in done.stderr


def test_the_warning_reaches_the_user() -> None:
    code, out, stderr = run_cli("decode", "-J", "-N", stdin=capture(*PLAIN[:-1]))
    assert (code, out.count(b'"I"')) == (0, 2)
    assert stderr == "cdcpipe: warning: stdin ends inside transaction 7: its records are not complete\n"


def test_memory_does_not_grow_with_the_capture(tmp_path: Path) -> None:
    """20 MB of small transactions and their output, within the memory that the program needs anyway."""
    path = tmp_path / "long.cdc"
    one = capture(BEGIN, *[row(number, b"z" * 80) for number in range(50)], COMMIT)
    with path.open("wb") as file:
        file.write(capture(*PLAIN))
        for _ in range(20_000_000 // len(one)):
            file.write(one)
    script = "import resource, sys; from cli.invoke import invoke; assert invoke(sys.argv[1:]) == 0;"
    script += " sys.stderr.write(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))"
    peaks = []
    for name in (DATA / "pg18" / "v1.cdc", path):
        command = [COMMAND[0], "-c", script, "decode", "-J", name]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True)
        peaks.append(int(done.stderr))
    assert peaks[1] < peaks[0] + 15_000


def decoding(*args: str, stdin: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen([*COMMAND, "decode", *args], stdin=stdin, stdout=pipe, stderr=pipe, bufsize=0)


def test_available_records_are_rendered_without_waiting_for_more() -> None:
    """As in `cdcpipe … -H | cdcpipe decode …`; also if stdin is non-blocking."""
    for is_blocking in (True, False):
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, is_blocking)
        with decoding("--output", "wal2json", "-o", "format-version=2", "-N", stdin=read_fd) as process:
            os.close(read_fd)
            assert process.stdout is not None
            assert process.stderr is not None
            for part in (PLAIN, (BEGIN, row(3), COMMIT)):
                data = capture(*part)
                os.write(write_fd, data[:50])
                os.write(write_fd, data[50:])
                out = b""
                while not out.endswith(b'{"action":"C"}\n'):
                    piece = os.read(process.stdout.fileno(), 1000)
                    assert piece, process.stderr.read()
                    out += piece
            os.close(write_fd)
            assert process.stdout.read() == b""
            assert process.wait() == 0


def test_ends_of_stdin_and_stdout(tmp_path: Path) -> None:
    assert run_cli("decode", "-J", stdin=b"") == (0, b"", "")
    path = str(DATA / "pg18" / "v1.cdc")
    shell = 'exec "$@"'
    for redirection, code, what in (
        (">&-", 7, "stdout is closed"),
        ("<&-", 7, "stdin can't be read"),
        (">/dev/full", 7, "No space"),
    ):
        files = [] if "<" in redirection else [path]
        done = subprocess.run(
            ["bash", "-c", f"{shell} {redirection}", "bash", *COMMAND, "decode", "-J", *files], capture_output=True
        )
        assert done.returncode == code, redirection
        assert what in done.stderr.decode()
    with decoding("--explain", path, path, path, path) as process:  # more than a pipe holds
        assert process.stdout is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait() == 7
    closed_fd = os.dup(0)
    os.close(closed_fd)
    with pytest.raises(OutputError, match="Bad file descriptor"):
        explain([path], closed_fd)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_does_not_look_like_success(number: signal.Signals) -> None:
    with decoding("-J", "-N") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(capture(*PLAIN))
        assert os.read(process.stdout.fileno(), 100)
        process.send_signal(number)
        assert process.wait() == -number


PATH = str(DATA / "pg18" / "v1.cdc")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([PATH], "--output NAME, -j, -J or --explain has to be given"),
        (["-J", "nonexistent.cdc"], "'nonexistent.cdc' does not exist"),
        (["-J", str(DATA)], "is a directory"),
        (["-J", "-j", PATH], "-j and -J exclude each other"),
        (["-J", "--output", "json", PATH], "-j and -J are --output wal2json, not json"),
        (["--output", "nope", PATH], "there is no output plugin 'nope'"),
        (["--output", "json", "-o", "messages", PATH], "no option 'messages'"),
        (["-J", "-o", "include-lsn=maybe", PATH], "could not parse value 'maybe'"),
        (["--explain", "--output", "json", PATH], "--explain goes with no option of rendering"),
        (["--explain", "--whole-transactions", PATH], "--explain goes with no option of rendering"),
        (["--explain", "-d", "shop", PATH], "--explain asks no server"),
        (["--explain", "-m", "sslmode=require", PATH], "--explain asks no server"),
        (["-J", "-m", "nonsense", PATH], "--param takes KEY=VALUE"),
        (["-J", "-S", "slot", PATH], "No such option"),
    ],
)
def test_usage(arguments: list[str], what: str, commands: ForkedCommands) -> None:
    code, out, stderr = commands.cdcpipe("decode", *arguments)
    assert (code, out) == (1, "")
    assert what.lower() in stderr.lower()


def test_the_example_of_the_help_runs(tmp_path: Path) -> None:
    code, out, _ = run_cli("decode", "--help")
    assert code == 0
    example = out.decode().splitlines()[-1].strip()
    assert example.startswith("cdcpipe decode")
    (tmp_path / "day.cdc").write_bytes(Path(PATH).read_bytes())
    arguments = example.split("cdcpipe ", 1)[1].split()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*COMMAND, *arguments], cwd=tmp_path, capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b'{"action":"B"}') > 30


def test_j_means_what_it_means_live() -> None:
    assert decoded("-j", PATH) == decoded("--output", "wal2json", "-o", "format-version=1", "-o", "include-lsn", PATH)
    assert decoded("-J", PATH) == decoded("--output", "wal2json", "-o", "format-version=2", "-H", PATH)
    with_newline = decoded("-J", "-N", PATH)
    reader = RecordReader()
    reader.feed(with_newline)
    assert b"".join(body for _, body in reader) == decoded("--output", "wal2json", "-o", "format-version=2", "-N", PATH)
