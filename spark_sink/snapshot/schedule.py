"""Decides which tables are copied anew now: a state machine without I/O; time is an argument.

    schedule = Schedule(parse_hours("22:00-06:00"), tables_at_once=3)
    schedule.choose(waiting, now, minute)       # the tables to copy now; empty: none
    schedule.record_copied(tables, now)

- Tables wait for the hours given. A copy that has begun in them is not cut off at their end.
- Tables whose copy has not failed come first, those that have waited longest before the others, several together.
- A table whose copy has failed is tried again alone, after a pause that grows with each failure. So one table that can't be copied
  does not keep others waiting.
- A table that needs a copy again and again also waits, longer each time. For a copy does not remove every reason: a key that is not
  unique would otherwise have the table copied without end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cdcpipe.retry import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spark_sink.schema.table import Table
    from spark_sink.warehouse.wanted_copies import WantedCopy

__all__ = ["FAILURES", "Hours", "Schedule", "parse_hours"]

FAILURES: Final = RetryPolicy(first_pause_s=30.0, longest_pause_s=3600.0)
"""The pauses after a failed copy. There is no limit: the table waits until it is copied, and `status` names it."""

_AGAIN: Final = RetryPolicy(first_pause_s=60.0, longest_pause_s=6 * 3600.0)
"""The pauses between two copies of one table."""
_FORGOTTEN_S: Final = 86_400.0
"""A table that was not copied for this long begins with the first pause again."""

_DAY_MIN: Final = 24 * 60
_CLOCK: Final = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])")


@dataclass(frozen=True, slots=True)
class Hours:
    """A part of each day, in minutes since midnight; from ``start`` on, before ``end``. It may go past midnight."""

    start: int = 0
    end: int = _DAY_MIN

    def __contains__(self, minute: int) -> bool:
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end


def parse_hours(text: str) -> Hours | None:
    """Read the value of ``--heal``: ``now``, ``off`` (None) or ``HH:MM-HH:MM``. Raises ValueError for anything else."""
    if text == "now":
        return Hours()
    if text == "off":
        return None
    match = _CLOCK.fullmatch(text)
    if match is None or match.group(1, 2) == match.group(3, 4):
        msg = f"{text!r} is neither now nor off nor two times of day like 22:00-06:00"
        raise ValueError(msg)
    first, second, third, fourth = map(int, match.groups())
    return Hours(first * 60 + second, third * 60 + fourth)


class Schedule:
    """Chooses tables in ``hours`` (None: never), at most ``tables_at_once`` together."""

    def __init__(self, hours: Hours | None, tables_at_once: int) -> None:
        self._hours = hours
        self._tables_at_once = tables_at_once
        self._copied: dict[Table, tuple[int, float]] = {}

    def choose(self, waiting: Sequence[WantedCopy], now: float, minute: int) -> list[Table]:
        """Return the tables to copy now. ``now`` is in seconds since 1970, ``minute`` is the local time of day."""
        if self._hours is None or minute not in self._hours:
            return []
        fresh = [each for each in waiting if each.failures is None and self._is_rested(each.table, now)]
        if fresh:
            fresh.sort(key=lambda each: min(reason.found_at for reason in each.reasons))
            return [each.table for each in fresh[: self._tables_at_once]]
        failed = [
            (each.failures.at, each.table)
            for each in waiting
            if each.failures is not None and not _is_within(FAILURES, each.failures.count, each.failures.at, now)
        ]
        return [min(failed)[1]] if failed else []

    def record_copied(self, tables: Iterable[Table], now: float) -> None:
        """Record that these tables were copied."""
        for table in tables:
            count, at = self._copied.get(table, (0, now))
            self._copied[table] = (1 if now - at > _FORGOTTEN_S else count + 1, now)

    def _is_rested(self, table: Table, now: float) -> bool:
        count, at = self._copied.get(table, (0, 0.0))
        return not count or not _is_within(_AGAIN, count, at, now)


def _is_within(policy: RetryPolicy, count: int, at: float, now: float) -> bool:
    """Tell whether the pause that began at ``at`` still lasts. After the clock was set back, it does not."""
    pause_s = policy.pause_s(count)
    return pause_s is None or 0 <= now - at < pause_s
