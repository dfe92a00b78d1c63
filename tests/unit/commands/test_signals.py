"""What a second signal does, in a process of its own: it ends the process at once, and leaves the terminal as it was."""

import subprocess
import sys

from support.paths import ROOT
from support.waiting import DEADLINE_S

PROGRAM = """
import os, signal, sys, threading
from spark_sink.commands.signals import listen, on_signals, restored_by

listen()
asked = threading.Event()
with restored_by(lambda: print("restored", flush=True)), on_signals(asked.set):
    os.kill(os.getpid(), signal.SIGINT)
    assert asked.wait(60)
    if sys.argv[1] == "twice":
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(60)
print("done")
"""


def ended(times: str) -> tuple[int, str, str]:
    argv = [sys.executable, "-c", PROGRAM, times]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return done.returncode, done.stdout, done.stderr


def test_the_first_signal_asks_for_the_end() -> None:
    assert ended("once") == (0, "restored\ndone\n", "")


def test_the_second_signal_ends_at_once_and_restores_first() -> None:
    assert ended("twice") == (130, "restored\n", "cdcpipe-spark: ended by SIGINT before it was done\n")
