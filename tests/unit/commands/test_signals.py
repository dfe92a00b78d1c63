"""What signals do, in a process of its own: the second one ends the process at once, and leaves the terminal as it was."""

import os
import resource
import subprocess
import sys
from contextlib import suppress

import pytest

from support.paths import ROOT
from support.waiting import DEADLINE_S

PROGRAM = """
import os, resource, signal, sys, threading
from spark_sink.commands import signals
from spark_sink.commands.signals import listen, on_signals, restored_by

signals._PATIENCE_S = float(sys.argv[2])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
for _ in range(int(sys.argv[3])):
    os.dup(0)
listen()
asked = threading.Event()
with restored_by(lambda: print("restored", flush=True)), on_signals(asked.set):
    os.kill(os.getpid(), signal.SIGINT)
    assert asked.wait(60)
    while sys.argv[1] == "twice, late" and signals._is_ending.is_set():
        threading.Event().wait(0.01)
    if "twice" in sys.argv[1]:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(60)
    if sys.argv[1] == "late":
        sys.stdin.readline()
print("done")
"""


def ended(times: str, open_files: int = 0) -> tuple[int, str, str]:
    argv = [sys.executable, "-c", PROGRAM, times, "60", str(open_files)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return done.returncode, done.stdout, done.stderr


def test_the_first_signal_asks_for_the_end() -> None:
    assert ended("once") == (0, "restored\ndone\n", "")


def test_the_second_signal_ends_at_once_and_restores_first() -> None:
    assert ended("twice") == (130, "restored\n", "cdcpipe-spark: ended by SIGINT before it was done\n")


def test_a_process_with_many_open_files_takes_the_second_signal_too() -> None:
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1200:
        pytest.skip("this machine has no descriptors beyond 1,024")
    assert ended("twice", 1100) == (130, "restored\n", "cdcpipe-spark: ended by SIGINT before it was done\n")


def test_a_command_that_takes_long_to_end_says_what_another_signal_does() -> None:
    argv = [sys.executable, "-c", PROGRAM, "late", "0.01", "0"]
    with subprocess.Popen(
        argv, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "cdcpipe-spark: still ending; another signal ends it at once\n"
        assert process.communicate("\n", DEADLINE_S) == ("restored\ndone\n", "")
    assert process.returncode == 0


def test_a_full_pipe_does_not_keep_the_second_signal_from_ending_it() -> None:
    """The line that says what this signal does waited for a reader of the pipe, and so this signal did nothing."""
    reader, full = os.pipe()
    try:
        os.set_blocking(full, False)
        with suppress(BlockingIOError):
            while True:
                os.write(full, b"x" * 4096)
        os.set_blocking(full, True)
        argv = [sys.executable, "-c", PROGRAM, "twice, late", "0.01", "0"]
        done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=full, timeout=DEADLINE_S, check=False)
    finally:
        os.close(reader)
        os.close(full)
    assert (done.returncode, done.stdout) == (130, b"restored\n")
