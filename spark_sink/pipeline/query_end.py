"""Waits for the end of Spark's query, or of its micro-batch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql.streaming import StreamingQuery

__all__ = ["await_end", "wait_until"]

_LEAST_WAIT_S: Final = 0.001
"""The shortest time that Spark accepts for a wait."""

_NOTING_S: Final = 5.0
"""How long to wait for Spark to record the end of a micro-batch, and for its query to stop."""


def await_end(query: StreamingQuery, deadline: float | None) -> bool:
    """Wait for a query's end, and raise its error. Returns False if it goes on at ``deadline``, a time of `time.monotonic`."""
    if deadline is None:
        query.awaitTermination()
        return True
    return bool(query.awaitTermination(max(_LEAST_WAIT_S, deadline - time.monotonic())))


def wait_until(query: StreamingQuery | None, is_over: Callable[[], bool]) -> None:
    """Wait while a query is running until something is over, but not for ever."""
    until = time.monotonic() + _NOTING_S
    while query is not None and query.isActive and not is_over() and time.monotonic() < until:
        time.sleep(0.01)
