"""A program that ends the child processes of a command after the command has ended, even by SIGKILL.

    python client/watchdog.py          # started by client/guard.py, never by hand; stdin is a pipe that only the command writes to

The watchdog leads a process group, and the command starts its children in this group. When the command is gone, the watchdog reads
the end of its stdin. The children read the end of theirs, and have a second to end by themselves. Then the watchdog sends SIGTERM
to the group, and a few seconds later SIGKILL, which ends the watchdog, too.

While the leader of a process group lives, the kernel does not give the group's number to another group. So the signals reach no
other processes.
"""

import os
import signal
import time

_STEPS = ((1.0, signal.SIGTERM), (3.0, signal.SIGKILL))
"""The signals for the group, each with the pause in seconds before it."""


def main() -> None:
    """Wait for the end of stdin, then end the group."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Keep nothing of the command open: neither its directory, which could then not be unmounted, nor its pipes, whose readers wait
    # for their end.
    os.chdir("/")
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    while os.read(0, 1):
        pass
    for pause_s, number in _STEPS:
        time.sleep(pause_s)
        os.killpg(os.getpgrp(), number)


if __name__ == "__main__":
    main()
