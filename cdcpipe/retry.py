"""Decides when to try again after a failure, and when to give up. Time and chance are arguments.

    pause_s = RetryPolicy(within_s=60, first_pause_s=1).pause_s(failures, elapsed_s)    # None: give up

    RetryPolicy(attempts=3).call(merge, ChangedError)                                   # raises the last error

Every loop that repeats a failed task takes its limits from a `RetryPolicy`. A policy without a limit is for a service that waits
for its server. The place that creates such a policy says so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RetryPolicy"]

T = TypeVar("T")

_MOST_DOUBLINGS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Limits and pauses for the attempts of one task. Without a limit, the task is repeated for ever."""

    attempts: int | None = None
    """The highest number of attempts, including the first one; None: no such limit."""
    within_s: float | None = None
    """No attempt begins later than this after the first one; None: no such limit."""
    first_pause_s: float = 0.0
    longest_pause_s: float | None = None
    """Each pause is twice as long as the one before, up to this; None: every pause is ``first_pause_s``."""
    jitter: float = 0.0
    """The random share of a pause. With 0.5, a pause takes between half and all of its length."""

    def pause_s(self, failures: int, elapsed_s: float = 0.0, chance: float = 1.0) -> float | None:
        """Return the pause before the next attempt, or None to give up.

        ``failures`` is the number of attempts that have failed, 1 or more; ``elapsed_s`` is the time since the first one;
        ``chance`` is between 0 and 1.
        """
        if self.attempts is not None and failures >= self.attempts:
            return None
        if self.within_s is not None and elapsed_s >= self.within_s:
            return None
        pause_s = self.first_pause_s
        if self.longest_pause_s is not None:
            pause_s = min(self.longest_pause_s, pause_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))
        return pause_s * (1.0 - self.jitter * (1.0 - chance))

    def call(
        self,
        task: Callable[[], T],
        passing: type[Exception],
        *,
        where: Callable[[Exception], bool] = lambda _: True,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> T:
        """Call ``task`` until it succeeds, and return what it returns.

        After a ``passing`` error for which ``where`` is true, the task is tried again. Once the policy gives up, the
        error is raised. Any other error is raised at once.
        """
        failures, began = 0, clock()
        while True:
            try:
                return task()
            except passing as ex:
                failures += 1
                pause_s = self.pause_s(failures, clock() - began) if where(ex) else None
                if pause_s is None:
                    raise
            sleep(pause_s)
