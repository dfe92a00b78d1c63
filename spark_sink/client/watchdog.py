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
from contextlib import suppress

_STEPS = ((1.0, signal.SIGTERM), (3.0, signal.SIGKILL))
"""The signals for the group, each with the pause in seconds before it."""


def main() -> None:
    """Wait for the end of stdin, then end the group."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Keep nothing of the command open: neither its directory, which could then not be unmounted, nor its pipes, whose readers wait
    # for their end.
    os.chdir("/")
    for fd in _open_files():
        if fd > 2:
            with suppress(OSError):  # the listing itself
                os.close(fd)
    while os.read(0, 1):
        pass
    for pause_s, number in _STEPS:
        time.sleep(pause_s)
        os.killpg(os.getpgrp(), number)


def _open_files() -> list[int]:
    """Return the numbers of all open files.

    With an older C library or kernel, `os.closerange` tries each number up to the limit, one by one. The limit of a container may
    be a billion (LimitNOFILE=infinity), which takes minutes.
    """
    try:
        return [int(name) for name in os.listdir("/dev/fd")]  # noqa: PTH208 - pathlib would only make the start slower
    except OSError:  # no /proc
        return list(range(1024))


if __name__ == "__main__":
    main()
