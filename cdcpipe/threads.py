"""The thread class of all our packages, what a process does at its end, and how many threads numpy may start.

    worker = Worker(target=copy, name="cdcpipe-snapshot", daemon=True)
    worker.start()
    worker.join()       # Ctrl+C here raises KeyboardInterrupt
    worker.is_alive()   # still True

A signal may interrupt a wait for a thread's end. The thread goes on, and can be waited for again.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Worker", "at_exit", "have_no_blas_threads"]


def at_exit(function: Callable[..., object], *arguments: Any) -> None:
    """Call a function when this process ends by itself. A child process that was forked from it does not call it."""
    atexit.register(_call_in, os.getpid(), function, arguments)


def _call_in(pid: int, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    if pid == os.getpid():
        function(*arguments)


def have_no_blas_threads() -> None:
    """Let numpy start no threads for linear algebra, in this process and its children. Call it before numpy is imported.

    Nothing here does linear algebra, and to start the threads takes as much CPU time as to import numpy (70 ms on two cores). A
    user's own setting counts.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


class Worker(threading.Thread):  # noqa: TID251 - the one subclass that the rule recommends
    """A thread that ends for its waiters when its target has ended, and never before.

    In Python 3.11 and 3.12, `threading.Thread` counts as ended when an exception of a signal handler interrupts ``join``
    (https://github.com/python/cpython/issues/90882). Its owner then releases what the thread still uses, or does not stop it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._has_ended = threading.Event()

    def run(self) -> None:
        """Call the target."""
        try:
            super().run()
        finally:
            self._has_ended.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the target has ended, or until ``timeout`` seconds have passed. Raises RuntimeError before ``start``."""
        if self.ident is None:
            raise RuntimeError("cannot join a thread before it is started")
        if self is threading.current_thread():
            raise RuntimeError("cannot join the current thread")
        self._has_ended.wait(timeout)

    def join_if_started(self) -> None:
        """Wait until the target has ended. Return at once before ``start``."""
        if self.ident is not None:
            self.join()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait as `join` does. Return whether the target has ended, also before ``start``."""
        if self.ident is not None:
            self.join(timeout_s)
        return not self.is_alive()

    def is_alive(self) -> bool:
        """Return whether the target is running."""
        return self.ident is not None and not self._has_ended.is_set()
