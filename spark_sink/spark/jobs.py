"""Cancels Spark jobs: those of a copy or of the upkeep, but none of the other runs in the same Spark application."""

from __future__ import annotations

import logging
import secrets
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from spark_sink.spark import session

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

__all__ = ["Jobs"]

_logger = logging.getLogger(__name__)

_CANCEL_INTERVAL_S = 0.5
_LOOK_S = 0.2
"""How often `Jobs.run` asks whether to stop."""


class Jobs:
    """The jobs of some threads of this process. ``name`` says in Spark's UI what they belong to."""

    def __init__(self, name: str) -> None:
        # Spark cancels the jobs with a tag in all sessions. So the same work of other runs has other tags.
        self._tag = f"cdcpipe-{name}-{secrets.token_hex(8)}"

    def include_mine(self, spark: SparkSession) -> None:
        """Count the jobs that the calling thread starts from now on as some of these."""
        spark.sparkContext.addJobTag(self._tag)

    def run(self, spark: SparkSession, work: Callable[[], object], is_stopping: Callable[[], bool]) -> None:
        """Do ``work`` in a thread, and wait for its end. Once ``is_stopping`` is True, cancel it, and raise InterruptedError."""

        def work_as_mine() -> None:
            self.include_mine(spark)
            work()

        with ThreadPoolExecutor(1, "cdcpipe-jobs") as pool:
            done = pool.submit(work_as_mine)

            def has_ended(timeout_s: float) -> bool:
                return not wait([done], timeout_s).not_done

            try:
                while not has_ended(_LOOK_S):
                    if is_stopping():
                        raise InterruptedError
            except BaseException:  # ^C, too: the end of the pool waits for the work
                self.cancel_until(spark, has_ended)
                raise
            done.result()

    def cancel_until(self, spark: SparkSession, has_ended: Callable[[float], bool]) -> None:
        """Cancel the jobs until their threads have ended.

        ``has_ended`` waits for that, at most as many seconds as it is given. The jobs are cancelled again and again, because a
        thread may be about to start one.
        """
        while not has_ended(0.0):
            try:
                if not session.is_stopped(spark):
                    spark.sparkContext.cancelJobsWithTag(self._tag)
            except Exception:
                _logger.debug("cannot cancel jobs", exc_info=True)
            has_ended(_CANCEL_INTERVAL_S)
