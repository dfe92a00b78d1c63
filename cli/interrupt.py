"""Handles SIGINT and SIGTERM outside of a stream: the first one ends the command in order, the next one kills it."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["Interrupted", "interrupt"]


class Interrupted(BaseException):
    """Raised for SIGINT or SIGTERM (``number``) outside of a stream. A stream's loop handles these signals itself."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def interrupt(number: int, _frame: FrameType | None) -> None:
    """Handle a signal: the first one raises Interrupted, the next one kills the process even during a wait."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    raise Interrupted(number)
