"""Programs that tests run as child processes."""

import sys

MUTE = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
"""A child process without output that ignores the end of stdin and SIGTERM."""
STUBBORN = MUTE.replace("time.sleep", "print('ready', flush=True); time.sleep")


def python(program: str) -> tuple[str, ...]:
    return sys.executable, "-c", program
