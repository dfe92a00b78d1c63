"""Turns SIGINT and SIGTERM into a descriptor that wakes the loop."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["StopSignals"]

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A context manager that handles SIGINT and SIGTERM. A poll of ``fd`` misses no signal.

    While the context is open, the first signal sets ``is_set`` and makes ``fd`` readable. The second signal ends the process at
    once.
    """

    def __init__(self) -> None:
        self.is_set = False
        self.fd = -1

    def __enter__(self) -> Self:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._old_wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, self._note) for number in _NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self.fd)
        os.close(self._write_fd)

    def clear(self) -> None:
        """Make ``fd`` unreadable again."""
        os.read(self.fd, 4096)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.is_set = True
        for number in _NUMBERS:
            signal.signal(number, signal.SIG_DFL)
