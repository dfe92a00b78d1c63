"""The `cdcpipe` command as a child process."""

import itertools
import os
import select
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cdcpipe import running_time
from cdcpipe.errors import CdcpipeError, ConnectionClosedError, InvalidArgumentsError
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.retry import RetryPolicy
from cdcpipe.threads import Worker
from spark_sink.client import guard, process, slot_monitor
from spark_sink.client.prepare import slot_exists
from spark_sink.client.process import Child, ask
from spark_sink.client.slot_monitor import SlotMonitor
from spark_sink.launcher.config import LauncherConfig
from spark_sink.snapshot.initial import InitialSnapshot
from spark_sink.warehouse.warehouse import Warehouse
from support.children import MUTE, STUBBORN, python
from support.waiting import DEADLINE_S, until

REPORT = '{"wal_lsn": "0/200", "sent_lsn": null, "confirmed_flush_lsn": "0/100"}'


def test_a_command_is_asked() -> None:
    answer = ask(["x"], command=python("import sys; print(sys.argv[1])"))
    assert (answer.code, answer.output) == (0, b"x\n")
    told: list[str] = []
    failing = "import sys; sys.stderr.write('cdcpipe: error: so\\ncdcpipe: hint: go\\n'); sys.exit(8)"
    answer = ask(["x"], command=python(failing), tell=told.append)
    assert (answer.code, answer.failure.message, answer.failure.hint) == (8, "so", "go")
    assert told == ["cdcpipe: error: so", "cdcpipe: hint: go"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("-d", "postgresql://cdc:CANARY@db/shop"),
        ("-dpostgresql://cdc:CANARY@db/shop",),
        ("-d", "postgresql://cdc:CANARY/shop"),
        ("--dbname=host=db password=CANARY",),
        ("--dbname", "postgresql://db/shop?p%61ssword=CANARY"),
        ("-d", "shop", "-m", "sslpassword=CANARY"),
        ("-h", "db", "--param", "scram_client_key=CANARY"),
        ("--param=oauth_client_secret=CANARY",),
    ],
)
def test_a_password_is_in_no_command_line(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """It may be from a file that one user reads, or from a program. Until then it is a secret."""
    started = tmp_path / "started"
    with pytest.raises(InvalidArgumentsError, match=r"is not taken from an option|it is not shown") as refused:
        Child(["slot", *arguments, "-S", "s"], command=python(f"open({str(started)!r}, 'w')"))
    assert "CANARY" not in f"{refused.value.message} {refused.value.hint}"
    assert not started.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("-d", "postgresql://cdc@db:5432/shop?application_name=a:b@c", "-m", "passfile=/etc/pass"),
        ("-d", "host=db", "-m", "application_name=password", "--publication", "password=x", "--publication", "a:b@c", "-d"),
    ],
)
def test_what_looks_like_a_password_and_is_none_is_taken(arguments: tuple[str, ...]) -> None:
    assert ask(["x", *arguments], command=python("import sys; print(*sys.argv[2:])")).output.decode() == " ".join(arguments) + "\n"


def test_a_child_names_tables_in_each_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "iso8859-1")  # as in a locale that has this encoding
    said = "import sys; sys.stderr.write('cdcpipe: error: no table caf\\xe9 \\u2192\\n'); sys.exit(2)"
    assert ask(["x"], command=python(said)).failure.message == "no table caf\xe9 \u2192"


def test_a_command_that_does_not_answer_counts_as_a_lost_connection() -> None:
    answer = ask(["slot"], command=python("import time; time.sleep(600)"), timeout_s=1.0)
    assert (answer.code, answer.failure.message) == (ExitCode.PG_CLOSED, "'cdcpipe slot' has not answered for 1 s")


@pytest.fixture
def quick_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that ignores SIGTERM is killed soon."""
    monkeypatch.setattr(process, "_END_S", 0.1)


def test_a_wait_for_an_answer_ends_with_a_stop(quick_end: None) -> None:
    asked = iter([False, False, True])
    with pytest.raises(InterruptedError):
        ask(["x"], command=python(STUBBORN), is_stopping=lambda: next(asked))
    config = LauncherConfig("s", Path("staging"), command=python(STUBBORN))
    with pytest.raises(InterruptedError):
        slot_exists(config, lambda: True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_reports_a_signal_counts_as_killed_by_it(number: int) -> None:
    """The command dies by a signal only before it handles signals."""
    assert ask(["x"], command=python(f"import sys; sys.exit({128 + number})")).code == -number
    killed = f"import os, signal; signal.signal({number}, signal.SIG_DFL); os.kill(os.getpid(), {number})"
    assert ask(["x"], command=python(killed)).code == -number


def test_the_end_of_a_child_is_no_answer_once_this_process_is_to_stop() -> None:
    """One signal to both ends the child first: its end would look like an error."""
    with Child(["x"], command=python("import sys; sys.exit(143)")) as child:
        assert child.wait(DEADLINE_S)
        asked = iter([False, True])
        with pytest.raises(InterruptedError):
            child.read_all(DEADLINE_S, lambda: next(asked))


def test_lines_and_requests_of_any_size() -> None:
    echo = "import sys\nfor line in sys.stdin: sys.stdout.write(line * 2); sys.stdout.flush()"
    with Child(["x"], command=python(echo)) as child:
        line = b"x" * 1_000_000 + b"\n"
        assert child.write(line, DEADLINE_S)
        assert [child.read_line(DEADLINE_S) for _ in range(2)] == [line, line]
        with pytest.raises(TimeoutError):
            child.read_line(0.1)
    assert child.code == -signal.SIGTERM


def test_an_answer_that_came_in_a_pause_of_this_process_is_read() -> None:
    """After the pause, the time for the answer has passed."""
    with Child(["x"], command=python("import os; os.write(1, b'ready\\n'); os.read(0, 1)")) as child:
        poll = select.poll()
        poll.register(child.stdout_fd, select.POLLIN)
        assert poll.poll(DEADLINE_S * 1000)
        assert child.read(0.0) == b"ready\n"
        with pytest.raises(TimeoutError):
            child.read(0.0)


def test_a_child_that_was_paused_with_this_process_has_time_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    paused = itertools.count(step=3600)

    def clock() -> float:
        return float(next(paused))

    monkeypatch.setattr(running_time, "monotonic", clock)
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=clock))  # that none of its limits goes by the clock
    with Child(["x"], command=python("print('ready')")) as child:
        assert child.read_line(1000.0) == b"ready\n"


def test_a_child_that_does_not_end_is_killed(quick_end: None) -> None:
    with Child(["x"], command=python(STUBBORN)) as child:
        assert child.read_line(DEADLINE_S) == b"ready\n"
    assert child.code == -signal.SIGKILL


def test_a_monitor_of_a_server_that_says_nothing(quick_end: None) -> None:
    with SlotMonitor((), "s", command=python(MUTE)) as monitor:
        with pytest.raises(CdcpipeError, match="has not reported the position of the slot yet") as raised:
            monitor.wait_for_report(0.1)
        assert "check host and network" in (raised.value.hint or "")
        with pytest.raises(InterruptedError):
            monitor.wait_for_report(DEADLINE_S, lambda: True)
    # Its silence has an end, too.
    with SlotMonitor((), "s", 0.1, command=python(MUTE), silence_s=0.5) as monitor, pytest.raises(ConnectionClosedError):
        monitor.wait_for_report(DEADLINE_S)


def test_a_report_on_the_server_becomes_stale() -> None:
    once = f"print({REPORT!r}, flush=True); {MUTE}"
    with SlotMonitor((), "s", command=python(once)) as monitor:
        report = monitor.wait_for_report(DEADLINE_S)
        now = time.monotonic()
        assert monitor.report(now) is report
        assert monitor.lag(0x200, now) is not None
        late = now + monitor.stale_s + 1
        assert (monitor.report(late), monitor.lag(0x200, late)) == (None, None)


def test_a_monitor_goes_on_after_its_command_could_not_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses a process beyond the limit of this user, for example."""
    monkeypatch.setattr(slot_monitor, "_RESTARTS", RetryPolicy(first_pause_s=0.05))
    command = tmp_path / "command"
    with SlotMonitor((), "s", command=[str(command)]) as monitor:
        with pytest.raises(CdcpipeError, match=r"cannot run 'cdcpipe slot': .* No such file"):
            monitor.wait_for_report(DEADLINE_S)
        made = tmp_path / "made"
        made.write_text(f"#!/bin/sh\necho '{REPORT}'\nexec sleep 1000\n")
        made.chmod(0o755)
        made.rename(command)
        until(lambda: monitor.report(time.monotonic()) is not None, "a report")


def test_a_monitor_goes_on_after_a_thread_could_not_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of processes counts threads, too. The child of such an attempt has ended."""
    monkeypatch.setattr(slot_monitor, "_RESTARTS", RetryPolicy(first_pause_s=0.05))
    pids, is_full = tmp_path / "pids", True

    class Limited(Worker):
        def start(self) -> None:
            if is_full:
                until(pids.exists, "the child runs")
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(process, "Worker", Limited)
    program = f"echo $$ >{pids}.new; mv {pids}.new {pids}; echo '{REPORT}'; exec sleep 1000"
    with SlotMonitor((), "s", command=["sh", "-c", program]) as monitor:
        with pytest.raises(CdcpipeError, match=r"cannot run 'cdcpipe slot': .*can't start new thread"):
            monitor.wait_for_report(DEADLINE_S)
        until(lambda: not Path(f"/proc/{pids.read_text().strip()}").exists(), "the child has ended")
        is_full = False
        until(lambda: monitor.report(time.monotonic()) is not None, "a report")


def test_the_snapshot_makes_a_private_staging_directory(tmp_path: Path) -> None:
    """With -c the snapshot makes it, before the launcher starts."""
    config = LauncherConfig("s", tmp_path / "new/staging", command=python(MUTE))
    InitialSnapshot(config, Warehouse(tmp_path / "warehouse", "delta"), "initial").prepare(lambda: True)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new", config.staging)} == {0o700}


def test_the_watchdog_leaves_nothing_that_the_end_of_a_program_warns_about() -> None:
    program = """
from spark_sink.client import guard
group = guard.group()
assert guard.group() == group
"""
    done = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_watchdog_closes_what_is_open_and_does_not_count_to_the_limit() -> None:
    """In a container the limit may be a billion, and an older C library tries each number."""
    theirs, ours = os.pipe()
    program = "import os, runpy, sys; os.closerange = sys.exit; runpy.run_path(sys.argv[1], run_name='__main__')"
    command = [sys.executable, "-I", "-S", "-c", program, str(guard._WATCHDOG)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[ours], process_group=0) as watchdog:
        os.close(ours)
        with os.fdopen(theirs, "rb") as reader:
            assert reader.read() == b""
        assert watchdog.poll() is None  # it has closed the pipe, and not ended
        watchdog.kill()


def test_a_forked_child_does_not_keep_the_watchdog_waiting() -> None:
    """After a SIGKILL of a program, the workers of its pool lived on, and so the slot stayed in use."""
    program = """
import os
from spark_sink.client import guard

group, ours = guard.group(), guard._watchdog[1]
if os.fork() == 0:
    try:
        os.fstat(ours)
    except OSError:
        os._exit(guard.group() != group)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.wait()[1]), guard.group() == group)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.stdout, done.stderr) == ("1 True\n", "")


def test_a_watchdog_that_another_thread_replaces_meanwhile() -> None:
    """The group of the first one is gone when the child is to join it. In a process of its own, which has no other children."""
    program = """
import os, signal, subprocess
from spark_sink.client import guard

numbers = []

def start(number):
    numbers.append(number)
    if len(numbers) == 1:
        os.kill(number, signal.SIGKILL)
        while guard.group() == number:
            pass
    return subprocess.Popen(["true"], process_group=number)

assert guard.start_in_group(start).wait() == 0
assert len(numbers) == 2 and numbers[1] == guard.group() != numbers[0], numbers

def refuse(number):
    numbers.append(number)
    raise PermissionError

try:
    guard.start_in_group(refuse)
except PermissionError:
    print("refused", len(numbers))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused 3\n", "")


def test_a_watchdog_that_was_killed_is_replaced() -> None:
    before = guard.group()
    os.kill(before, signal.SIGKILL)
    until(lambda: guard.group() != before, "another watchdog")
    with Child(["x"], command=python(STUBBORN)) as child:
        assert child.read_line(DEADLINE_S) == b"ready\n"
        child.kill()
