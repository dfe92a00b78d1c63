"""Waits for a descriptor until a deadline, in short slices. No other wait in this folder is longer than one slice."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

__all__ = ["NO_LIMIT", "OverdueError", "wait"]

NO_LIMIT = float("inf")
"""For commands that may take as long as the data or another transaction requires. TCP's keepalives detect a dead network."""

_SLICE_S = 0.2
"""The longest time until a signal is noticed. A signal that arrives right before the kernel's wait does not end that wait."""


class OverdueError(Exception):
    """A deadline has passed."""


def wait(fd: int, events: int, deadline: float, while_waiting: Callable[[], None] | None = None) -> bool:
    """Wait until ``fd`` is ready; return False if the deadline came first.

    Signal handlers run within a slice of the wait, and may raise. ``while_waiting`` is called after each slice, and may raise, too.
    """
    poll = select.poll()
    poll.register(fd, events)
    while True:
        left_s = deadline - time.monotonic()
        if poll.poll(max(0.0, min(left_s, _SLICE_S)) * 1000):
            return True
        if left_s <= 0:
            return False
        if while_waiting is not None:
            while_waiting()
