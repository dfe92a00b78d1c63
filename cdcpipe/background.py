"""Work in the background: how its owner starts and stops it, and how it learns of an error that ends it."""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Self

from cdcpipe.error_texts import unexpected
from cdcpipe.errors import CdcpipeError
from cdcpipe.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

__all__ = ["Background", "Startable"]


class Startable(ABC):
    """What a ``with`` starts, and stops at its end. The end then raises the error of the work, unless the block has raised one.

    In a child process that was forked in the block, the end does nothing, as after `sys.exit`: the work is its parent's.

    An error that ends the work is logged, to the logger of the subclass's module: nobody may be in `wait`.
    """

    logs_error = True
    """Whether an error that ends the work is logged. An owner that shows or raises the error turns this off."""

    _spoken_name: ClassVar[str] = "the work"
    _error: BaseException | None = None
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

    def _end_with(self, ex: BaseException) -> None:
        """Keep the error that ends the work, and log it unless the owner does something else with it. The first error counts."""
        if self._error is not None:
            return
        self._error = ex
        if self.logs_error:
            said = ex.message if isinstance(ex, CdcpipeError) else unexpected(ex)
            advice = f" (hint: {ex.hint})" if isinstance(ex, CdcpipeError) and ex.hint else ""
            logging.getLogger(type(self).__module__).error("%s has ended: %s%s", self._spoken_name, said, advice)

    @contextmanager
    def _raising_error(self) -> Iterator[None]:
        """Log no error meanwhile: the caller of the method that does the work in this context gets it."""
        before, self.logs_error = self.logs_error, False
        try:
            yield
        finally:
            self.logs_error = before


class Background(Startable):
    """Work in a thread of its own. It ends by itself, with an error, or soon after `request_stop`.

    A subclass does the work in `_work`, and ends it early once ``self._stopping`` is set. Its owner writes:

        with Launcher(config) as launcher:      # starts it; stops it at the end
            while not launcher.wait(1.0):       # raises the error that has ended it
                print(launcher.progress)
    """

    def __init__(self, name: str) -> None:
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
        """Call `_end_with`. A subclass may note the error elsewhere, too, or drop it."""
        self._end_with(ex)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as ex:  # noqa: BLE001 - `wait` raises it again in its own thread
            self._take_error(ex)
        finally:
            self._ended.set()
