"""The `cdcpipe` command as a child process, and what is left of a command's children when it is gone: nothing."""

import contextlib
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import processes
import psutil
import pytest

from cdcpipe.errors import CdcpipeError, ConnectionClosedError
from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.client.prepare import slot_exists
from spark_sink.client.process import Child, ask
from spark_sink.client.slot_monitor import SlotMonitor
from spark_sink.launcher.launcher import LauncherConfig
from spark_sink.schema.table import Table, Version
from spark_sink.snapshot.initial import InitialSnapshot
from spark_sink.staging.log import Epoch
from spark_sink.warehouse.warehouse import Warehouse
from support.paths import ROOT
from support.segments import START_LSN, Log
from support.waiting import DEADLINE_S, until

MUTE = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
"""A child that hears nothing and says nothing: no end of stdin, no SIGTERM moves it."""
STUBBORN = MUTE.replace("time.sleep", "print('ready', flush=True); time.sleep")


def python(program: str) -> tuple[str, ...]:
    return sys.executable, "-c", program


@pytest.fixture
def silent_server() -> Iterator[tuple[str, ...]]:
    """How to connect to a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield "-h", "127.0.0.1", "-p", str(listener.getsockname()[1]), "-m", "connect_timeout=600"


# --- one child ---


def test_a_command_is_asked() -> None:
    answer = ask(["x"], command=python("import sys; print(sys.argv[1])"))
    assert (answer.code, answer.output) == (0, b"x\n")
    told: list[str] = []
    failing = "import sys; sys.stderr.write('cdcpipe: error: so\\ncdcpipe: hint: go\\n'); sys.exit(8)"
    answer = ask(["x"], command=python(failing), tell=told.append)
    assert (answer.code, answer.failure.message, answer.failure.hint) == (8, "so", "go")
    assert told == ["cdcpipe: error: so", "cdcpipe: hint: go"]


def test_a_command_that_does_not_answer_counts_as_a_lost_connection() -> None:
    answer = ask(["slot"], command=python("import time; time.sleep(600)"), timeout_s=1.0)
    assert (answer.code, answer.failure.message) == (ExitCode.PG_CLOSED, "'cdcpipe slot' has not answered for 1 s")


def test_a_wait_for_an_answer_ends_with_a_stop() -> None:
    asked = iter([False, False, True])
    with pytest.raises(InterruptedError):
        ask(["x"], command=python(STUBBORN), is_stopping=lambda: next(asked))
    config = LauncherConfig("s", Path("staging"), command=python(STUBBORN))
    with pytest.raises(InterruptedError):
        slot_exists(config, lambda: True)


def test_lines_and_requests_of_any_size() -> None:
    echo = "import sys\nfor line in sys.stdin: sys.stdout.write(line * 2); sys.stdout.flush()"
    with Child(["x"], command=python(echo)) as child:
        line = b"x" * 1_000_000 + b"\n"
        assert child.write(line, DEADLINE_S)
        assert [child.read_line(DEADLINE_S) for _ in range(2)] == [line, line]
        with pytest.raises(TimeoutError):
            child.read_line(0.1)
    assert child.code == -signal.SIGTERM


def test_a_child_that_does_not_end_is_killed() -> None:
    with Child(["x"], command=python(STUBBORN)) as child:
        assert child.read_line(DEADLINE_S) == b"ready\n"
    assert child.code == -signal.SIGKILL


def test_a_monitor_of_a_server_that_says_nothing() -> None:
    with SlotMonitor((), "s", command=python(MUTE)) as monitor:
        with pytest.raises(CdcpipeError, match="has not reported the position of the slot yet"):
            monitor.wait_for_report(0.1)
        with pytest.raises(InterruptedError):
            monitor.wait_for_report(DEADLINE_S, lambda: True)
    # Its silence has an end, too.
    with SlotMonitor((), "s", 0.1, command=python(MUTE), silence_s=0.5) as monitor, pytest.raises(ConnectionClosedError):
        monitor.wait_for_report(DEADLINE_S)


def test_what_is_known_of_the_server_grows_old() -> None:
    line = '{"wal_lsn": "0/200", "sent_lsn": null, "confirmed_flush_lsn": "0/100"}'
    once = f"print({line!r}, flush=True); {MUTE}"
    with SlotMonitor((), "s", command=python(once)) as monitor:
        report = monitor.wait_for_report(DEADLINE_S)
        now = time.monotonic()
        assert monitor.report(now) is report
        assert monitor.lag(0x200, now) is not None
        late = now + monitor.stale_s + 1
        assert (monitor.report(late), monitor.lag(0x200, late)) == (None, None)


def test_the_staging_directory_is_private_whoever_makes_it(tmp_path: Path) -> None:
    """With -c the snapshot comes before the launcher."""
    config = LauncherConfig("s", tmp_path / "new/staging", command=python(MUTE))
    InitialSnapshot(config, Warehouse(tmp_path / "warehouse", "delta"), "initial").prepare(lambda: True)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new", config.staging)} == {0o700}


# --- a command and its children ---


def family(pid: int) -> dict[str, psutil.Process]:
    """A command's processes by what they are."""
    return {processes.role(command): process for process, command in processes.running(pid).items()}


def is_gone(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@contextlib.contextmanager
def started(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """A program that a test that fails does not wait for."""
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


OWNER = f"""
import sys, os
from spark_sink.client.process import Child
child = Child(["x"], command=(sys.executable, "-c", {STUBBORN!r}))
child.read_line(60)
print("ready", flush=True)
sys.stdin.read()
os._exit(3)
"""


@pytest.mark.parametrize("is_killed", [True, False])
def test_no_child_outlives_its_owner(is_killed: bool) -> None:
    with started(*python(OWNER)) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        children = psutil.Process(owner.pid).children()
        assert len(children) == 2  # with the watchdog
        if is_killed:
            owner.kill()
        owner.communicate(timeout=DEADLINE_S)
    for child in children:
        until(lambda child=child: is_gone(child), "the child's end")


def test_a_second_signal_ends_a_command_at_once() -> None:
    # The main thread does not hear it at all.
    program = """
import os, signal, time
from spark_sink.commands import signals
signals.listen()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with signals.on_signals(lambda: os.write(1, b"asked\\n")):
    os.write(1, b"ready\\n")
    time.sleep(600)
"""
    with started(*python(program)) as process:
        assert process.stdout is not None
        for said in ("ready\n", "asked\n"):
            assert process.stdout.readline() == said
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (143, "cdcpipe-spark: ended by SIGTERM before it was done\n")


def start(*arguments: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return started(sys.executable, "-m", "spark_sink", *arguments)


@pytest.mark.parametrize(
    ("name", "extra", "child"),
    [("status", ("--watch",), "slot monitor"), ("land", ("-S", "s", "--publication", "p"), "prepare")],
)
def test_a_silent_server_keeps_nobody(
    silent_server: tuple[str, ...], tmp_path: Path, name: str, extra: tuple[str, ...], child: str
) -> None:
    if name == "status":
        Log(tmp_path / "staging").segment([])
    with start(name, *silent_server, "--staging", str(tmp_path / "staging"), *extra) as process:
        found = until(lambda: family(process.pid).get(child), f"the {child}")
        process.terminate()
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, errors
    until(lambda: is_gone(found), f"the end of the {child}")


@pytest.fixture
def warehouse(tmp_path: Path) -> str:
    """A warehouse as far as a command looks at it before Spark has started."""
    Log(tmp_path / "staging").segment([])
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(Epoch(1, "7", 1, "db", "s", ("p",), {}, START_LSN), tmp_path / "staging")
    house.write_versions(Table("public", "fruit"), [Version(0, 0, 1, ("id",), ("id",))])
    return str(tmp_path / "warehouse")


def spark_jvm(pid: int) -> psutil.Process | None:
    """Spark's JVM; another one, before it, only finds out how to start it."""
    is_spark = "org.apache.spark.deploy.SparkSubmit"
    return next((process for process, command in processes.running(pid).items() if is_spark in command), None)


@pytest.mark.spark
@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (("verify", "-d", "nowhere"), signal.SIGINT),
        (("as-of", "--table", "public.fruit", "--at", "0/1"), signal.SIGTERM),
        (("purge", "--before", "0/1"), signal.SIGKILL),
    ],
)
def test_a_signal_while_spark_starts(warehouse: str, arguments: tuple[str, ...], number: signal.Signals) -> None:
    """The JVM has not told its driver yet that it is there, and so nobody looks whether the driver is."""
    name, *others = arguments
    with start(name, "--warehouse", warehouse, *others) as process:
        jvm = until(lambda: spark_jvm(process.pid), "the JVM")
        process.send_signal(number)
        # Of its children none keeps its caller: stderr reaches its end.
        output, errors = process.communicate(timeout=DEADLINE_S)
    until(lambda: is_gone(jvm), "the JVM's end")
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert (process.returncode, output) == (128 + number, "")
        assert [line for line in errors.splitlines() if not line.startswith("WARNING: ")] == [
            f"cdcpipe-spark: ended by {number.name} before it was done"
        ]
