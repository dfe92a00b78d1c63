"""How much one micro-batch of a stream takes, and when the next one may begin, by the monotonic clock, which nobody can set.

    pace = Pace(0.1)
    query = pace.start(spark, writer)   # looks for segments once in the interval
    pace.rest(began_at, stopping.wait)  # at the end of each micro-batch

Spark's own trigger interval waits until the system's clock shows a time. After the clock was set back by an hour, it waits for an
hour. So the query gets no interval. Between two micro-batches this module waits, and while there are no segments Spark sleeps.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

__all__ = ["MICRO_BATCH_BYTES", "Pace"]

MICRO_BATCH_BYTES: Final = 256 << 20
"""The default for the largest total size of a micro-batch's segments. A long backlog would be one micro-batch without it."""
_POLLING: Final = "spark.sql.streaming.pollingDelay"
"""How long Spark sleeps after it has found no segments."""
_SHORTEST_POLLING_S: Final = 0.01
"""Spark's default."""


class Pace:
    """The shortest time from the beginning of one micro-batch to the beginning of the next."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._ended_at = -math.inf

    def start(self, spark: SparkSession, writer: DataStreamWriter) -> StreamingQuery:
        """Start a query that looks for new segments without Spark's trigger interval. ``spark`` is the pipeline's own session."""
        spark.conf.set(_POLLING, f"{round(1000 * max(self._interval_s, _SHORTEST_POLLING_S))}ms")
        return writer.trigger(processingTime="0 seconds").start()

    def rest(self, began_at: float, wait: Callable[[float], object]) -> None:
        """At the end of a micro-batch, ``wait`` for the rest of the interval. ``began_at`` is of `time.monotonic()`."""
        # Spark begins the next micro-batch right after this one, or has found no segments and slept for an interval.
        if began_at - self._ended_at < self._interval_s:
            began_at = self._ended_at
        left_s = began_at + self._interval_s - time.monotonic()
        if left_s > 0:
            wait(left_s)
        self._ended_at = time.monotonic()
