"""Programs that play a child process."""

import sys

MUTE = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
"""A child that hears nothing and says nothing: no end of stdin, no SIGTERM moves it."""
STUBBORN = MUTE.replace("time.sleep", "print('ready', flush=True); time.sleep")


def python(program: str) -> tuple[str, ...]:
    return sys.executable, "-c", program
