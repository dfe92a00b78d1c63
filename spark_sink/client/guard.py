"""One process group for all child processes. A watchdog ends the group as soon as this process is gone.

    child = guard.start_in_group(lambda group: subprocess.Popen(arguments, process_group=group))

In an orderly end the callers end their children themselves. The watchdog is for the other ends: SIGKILL, a second signal, a crash
of the interpreter. A parent-death signal (prctl) does not work here: the kernel sends it when the thread that started the child
ends, and only Linux has it.

^C at a terminal does not reach the group. Only the command gets it, and decides what to do with its children.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["group", "start_in_group"]

T = TypeVar("T")

_WATCHDOG = Path(__file__).with_name("watchdog.py")

_lock = threading.Lock()
_watchdog: tuple[int, int] | None = None
"""The process id of the watchdog, which is also the number of its group, and our end of its stdin."""


def group() -> int:
    """Return the number of the process group; the first call starts the watchdog, which leads it."""
    global _watchdog  # noqa: PLW0603 - one for the process
    with _lock:
        if _watchdog is not None and _has_ended(_watchdog[0]):
            os.close(_watchdog[1])
            _watchdog = None
        if _watchdog is None:
            _watchdog = _start()
        return _watchdog[0]


def start_in_group(start: Callable[[int], T]) -> T:
    """Call ``start`` with the number of the group, which starts a child process in it. Returns what that returns.

    Someone may have killed the watchdog in between, and another thread may have replaced it. Then the old group is gone, the
    system refuses the child with EPERM, and ``start`` is called again with the new group.
    """
    number = group()
    while True:
        try:
            return start(number)
        except PermissionError:
            before, number = number, group()
            if number == before:
                raise


def _start() -> tuple[int, int]:
    # Not by subprocess.Popen: the watchdog runs on when the interpreter ends, and a Popen object would warn about that.
    theirs, ours = os.pipe()
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", str(_WATCHDOG)],
            os.environ,
            # The watchdog inherits no stderr: a program that reads ours to its end would wait for the watchdog, too.
            file_actions=[
                (os.POSIX_SPAWN_DUP2, theirs, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
            setpgroup=0,
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return pid, ours


def _leave_to_parent() -> None:
    """Close what a forked child has of the watchdog: while the child lived, the watchdog would not see that its parent is gone."""
    global _watchdog  # noqa: PLW0603 - one for the process
    if _watchdog is not None:
        os.close(_watchdog[1])
        _watchdog = None


os.register_at_fork(after_in_child=_leave_to_parent)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # another part of the program has waited for it
        return True
