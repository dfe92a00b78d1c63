"""Finds the Spark session that this process has already. Only a session that cdcpipe has made may be changed or stopped."""

from __future__ import annotations

from pyspark import SparkContext
from pyspark.sql import SparkSession

__all__ = ["existing"]


def existing() -> SparkSession | None:
    """Return the active session of this thread, or else the one that another thread has made; None if there is none.

    Waits for a thread that is making one with the builder, or stopping one that a run has made. Spark's builder would return the
    new one, too, but with our settings in it, as if it had been made here.
    """
    with SparkSession.Builder._lock:  # noqa: SLF001 - who makes or stops one holds it; pyspark shows a context before it can be used
        active = SparkSession.getActiveSession()
        if active is not None:
            return active
        context = SparkContext._active_spark_context  # noqa: SLF001 - Spark tells of a thread's active session only
        if context is None:
            return None
        made = SparkSession._instantiatedSession  # noqa: SLF001
        return SparkSession(context) if made is None or made.sparkContext is not context else made
