"""Waits for the end of Spark's query, or of its micro-batch."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

from spark_sink.pipeline.failures import stopped_elsewhere
from spark_sink.spark import jvm, session

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

__all__ = ["await_end", "is_running", "wait_until"]

_LEAST_WAIT_S: Final = 0.001
"""The shortest time that Spark accepts for a wait."""

_LOOK_S: Final = 5.0
"""How often to look whether the session was stopped."""

_NOTING_S: Final = 5.0
"""How long to wait for Spark to record the end of a micro-batch, and for its query to stop."""


def await_end(query: StreamingQuery, spark: SparkSession, deadline: float | None) -> bool:
    """Wait for a query's end, and raise its error. Returns False if it goes on at ``deadline``, a time of `time.monotonic`.

    Raises PipelineError if the application of ``spark`` was stopped: a query that waited for data then never ends by itself.
    """
    while True:
        left_s = math.inf if deadline is None else deadline - time.monotonic()
        if query.awaitTermination(max(_LEAST_WAIT_S, min(left_s, _LOOK_S))):
            return True
        if session.is_stopped(spark):
            raise stopped_elsewhere("the Spark session", "its Pipeline or Runner")
        if left_s <= _LOOK_S:
            return False


def is_running(query: StreamingQuery, spark: SparkSession) -> bool:
    """Tell whether a query has to be stopped: it runs, and Spark is there."""
    return not jvm.has_ended(0) and not session.is_stopped(spark) and bool(query.isActive)


def wait_until(query: StreamingQuery | None, is_over: Callable[[], bool]) -> None:
    """Wait while a query is running until something is over, but not for ever."""
    until = time.monotonic() + _NOTING_S
    while query is not None and query.isActive and not is_over() and time.monotonic() < until:
        time.sleep(0.01)
