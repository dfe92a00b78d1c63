"""When a command has ended, none of its children is left. A signal ends a command in any phase."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import processes
import psutil
import pytest

from spark_sink.schema.table import Table, Version
from spark_sink.staging.log import Epoch
from spark_sink.warehouse.warehouse import Warehouse
from support.children import STUBBORN, python
from support.paths import ROOT
from support.segments import START_LSN, Log
from support.waiting import DEADLINE_S, until


@pytest.fixture
def silent_server() -> Iterator[tuple[str, ...]]:
    """Return the options for a connection to a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield "-h", "127.0.0.1", "-p", str(listener.getsockname()[1]), "-m", "connect_timeout=600"


def family(pid: int) -> dict[str, psutil.Process]:
    """Return a command's processes by their roles."""
    return {processes.role(command): process for process, command in processes.running(pid).items()}


def is_gone(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@contextlib.contextmanager
def started(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program. A failed test does not wait for it."""
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
    [("status", ("--watch",), "slot monitor"), ("land", ("-S", "s", "--publication", "p"), "streamer")],
)
def test_a_signal_ends_a_command_at_a_silent_server(
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
    """A warehouse with the parts that a command reads before it starts Spark."""
    Log(tmp_path / "staging").segment([])
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(Epoch(1, "7", 1, "db", "s", ("p",), {}, START_LSN), tmp_path / "staging")
    house.write_versions(Table("public", "fruit"), [Version(0, 0, 1, ("id",), ("id",))])
    return str(tmp_path / "warehouse")


def spark_jvm(pid: int) -> psutil.Process | None:
    """Return Spark's JVM. An earlier JVM only finds out how to start it."""
    is_spark = "org.apache.spark.deploy.SparkSubmit"
    return next((process for process, command in processes.running(pid).items() if is_spark in command), None)


@pytest.mark.spark
@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (("as-of", "--table", "public.fruit", "--at", "0/1"), signal.SIGINT),
        (("as-of", "--table", "public.fruit", "--at", "0/1"), signal.SIGTERM),
        (("purge", "--before", "0/1"), signal.SIGKILL),
    ],
)
def test_a_signal_while_spark_starts(warehouse: str, arguments: tuple[str, ...], number: signal.Signals) -> None:
    """The JVM has not yet connected to its driver. So it would not notice the driver's end."""
    name, *others = arguments
    with start(name, "--warehouse", warehouse, *others) as process:
        jvm = until(lambda: spark_jvm(process.pid), "the JVM")
        # The JVM of a command that writes keeps the lock of the tables while it lives.
        held = [each.path for each in jvm.open_files() if each.path == f"{warehouse}/_cdcpipe/tables.lock"]
        assert len(held) == (2 if name == "purge" else 0)
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
