"""One process group for all child processes, which a watchdog ends as soon as this process is gone.

    subprocess.Popen(arguments, process_group=guard.group())

Orderly ends stay the callers' work. This is for the others: SIGKILL, a second signal, a crash of the interpreter. A parent-death
signal (prctl) won't do: it comes when the thread that started the child ends, and Linux alone has it.

A terminal's ^C does not reach the group. The command gets it and decides.
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
            # Its own output goes nowhere: a caller that reads our stderr to its end must not wait for the watchdog.
            _watchdog = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_WATCHDOG)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                process_group=0,
            )
        return _watchdog.pid
