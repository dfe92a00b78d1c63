"""A program that ends a command's child processes after the command, however the command ended (SIGKILL included).

    python client/watchdog.py          # started by client/guard.py, never by hand; stdin is a pipe that only the command writes to

The watchdog leads a process group, and the command starts its children in this group. The pipe reaches its end when the command
is gone. The children see the end of their own stdin then, and have a second to end by themselves. After that they get SIGTERM,
and a few seconds later SIGKILL, which ends the watchdog, too.

A group that its leader still lives in keeps its number, so the signals can't reach somebody else's processes.
"""

import os
import signal
import time

_STEPS = ((1.0, signal.SIGTERM), (3.0, signal.SIGKILL))
"""What the group gets, each so many seconds after the one before."""


def main() -> None:
    """Wait for the end of stdin, then end the group."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    for pause_s, number in _STEPS:
        time.sleep(pause_s)
        os.killpg(os.getpgrp(), number)


if __name__ == "__main__":
    main()
