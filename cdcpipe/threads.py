"""The thread class of all our packages, what a ``with`` and a process do at their end, and how many threads numpy may start.

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
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["Background", "Startable", "Worker", "at_exit", "have_no_blas_threads"]


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

    def wait(self, timeout_s: float) -> bool:
        """Wait as `join` does. Return whether the target has ended, also before ``start``."""
        if self.ident is not None:
            self.join(timeout_s)
        return not self.is_alive()

    def is_alive(self) -> bool:
        """Return whether the target is running."""
        return self.ident is not None and not self._has_ended.is_set()


class Startable(ABC):
    """What a ``with`` starts, and stops at its end. The end then raises the error of the work, unless the block has raised one.

    In a child process that was forked in the block, the end does nothing, as after `sys.exit`: the work is its parent's.
    """

    _pid = 0

    @abstractmethod
    def start(self) -> Self:
        """Start the work."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, and raise the error that ended the work, if any. Returns False if ``timeout_s`` have passed."""

    @abstractmethod
    def stop(self) -> None:
        """End the work, and wait for its end."""

    def __enter__(self) -> Self:
        self._pid = os.getpid()
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, _value: BaseException | None, _tb: TracebackType | None) -> None:
        if self._pid != os.getpid():
            return
        self.stop()
        if kind is None:
            self.wait()


class Background(Startable):
    """Work in a thread of its own. It ends by itself, with an error, or soon after `request_stop`.

    A subclass does the work in `_work`, and ends it early once ``self._stopping`` is set. Its owner writes:

        with Launcher(config) as launcher:      # starts it; stops it at the end
            while not launcher.wait(1.0):       # raises the error that has ended it
                print(launcher.progress)
    """

    def __init__(self, name: str) -> None:
        self._error: BaseException | None = None
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._thread = Worker(target=self._run, name=name, daemon=True)

    # --- for its owner ---

    def start(self) -> Self:
        """Start the work, and return at once."""
        self._thread.start()
        return self

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, and raise the error that ended the work, if any. Returns False if ``timeout_s`` have passed."""
        if not self._ended.wait(timeout_s):
            return False
        self._raise_error()
        return True

    def request_stop(self) -> None:
        """Ask for a clean end, and return at once. Any thread and a signal handler may call it."""
        self._stopping.set()

    def stop(self) -> None:
        """Ask for a clean end, and wait for it. Call `wait` to learn whether there was an error."""
        self.request_stop()
        self._thread.join_if_started()

    @property
    def has_ended(self) -> bool:
        """Whether the work has ended, for whatever reason."""
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """The error that has ended the work; None if there is none."""
        return self._error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # --- the thread ---

    def _work(self) -> None:
        """Do the work."""
        raise NotImplementedError

    def _take_error(self, ex: BaseException) -> None:
        """Keep the error that has ended the work. A subclass may note it elsewhere, too, or drop it."""
        self._error = ex

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as ex:  # noqa: BLE001 - `wait` raises it again in its own thread
            self._take_error(ex)
        finally:
            self._ended.set()
