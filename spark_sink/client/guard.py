"""One process group for all child processes. A watchdog ends the group as soon as this process is gone.

    subprocess.Popen(arguments, process_group=guard.group())

In an orderly end the callers end their children themselves. The watchdog is for the other ends: SIGKILL, a second signal, a crash
of the interpreter. A parent-death signal (prctl) does not work here: the kernel sends it when the thread that started the child
ends, and only Linux has it.

^C at a terminal does not reach the group. Only the command gets it, and decides what to do with its children.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

__all__ = ["group"]

_WATCHDOG = Path(__file__).with_name("watchdog.py")

_lock = threading.Lock()
_watchdog: subprocess.Popen[bytes] | None = None


def group() -> int:
    """Return the number of the process group; the first call starts the watchdog, which leads it."""
    global _watchdog  # noqa: PLW0603 - one for the process
    with _lock:
        if _watchdog is None or _watchdog.poll() is not None:
            # The watchdog inherits no stderr: a program that reads ours to its end would wait for the watchdog, too.
            _watchdog = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_WATCHDOG)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                process_group=0,
            )
        return _watchdog.pid
