"""Time for which this process has run. A pause of the process (^Z, docker pause, a frozen container) does not count.

    running, limit_s = RunningTime(), 30.0
    while not is_there():                       # a turn of less than a second
        if running.seconds() >= limit_s:
            raise TimeoutError

After a pause, a limit by the clock would have passed although nobody had the time to answer.
"""

from __future__ import annotations

from time import monotonic
from typing import Final

__all__ = ["RunningTime"]

_LONGEST_TURN_S: Final = 1.0
"""How much of the time between two questions counts at most. Who waits has to ask more often."""


class RunningTime:
    """Counts from its creation."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._asked_at = monotonic()

    def seconds(self) -> float:
        """Return for how long this process has run. Of the time since the last call, at most a second counts."""
        now = monotonic()
        self._seconds += min(now - self._asked_at, _LONGEST_TURN_S)
        self._asked_at = now
        return self._seconds
