"""SIGINT and SIGTERM, outside of a stream: the first one ends the command in order, the next one kills it."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["Interrupted", "interrupt"]


class Interrupted(BaseException):
    """SIGINT or SIGTERM, ``number``, outside of a stream, whose loop handles them itself."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def interrupt(number: int, _frame: FrameType | None) -> None:
    """End in order at the first signal; the next one kills, whatever is being waited for."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    raise Interrupted(number)
