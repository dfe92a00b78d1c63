"""Shares the session that a run has made with the other runs of this process. The last run that leaves it stops it.

| the session                                                       | who takes it for the run         | who stops it             |
|-------------------------------------------------------------------|----------------------------------|--------------------------|
| the program has made it, and gives it                             | `given.take`                     | the program              |
| the program has made it, in any thread                            | `given.take`, or later `entered` | the program              |
| a run has made it, and runs are in it; also if a cell gives it    | `entered`                        | the last run that leaves |
| there is none, or the last run has stopped the one that was given | `entered` has it made            | the last run that leaves |
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from spark_sink.spark import session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark import SparkContext
    from pyspark.sql import SparkSession

__all__ = ["entered", "is_made_by_runs"]

_lock: Final = threading.Lock()
"""Held from the search for a session until the run is noted in it, so that it is not stopped in between."""
_inside: Final[list[SparkContext]] = []
"""For each run that is in a session made by a run: the application of this session."""


class _Build(Protocol):
    """`session.build` with all its other arguments."""

    def __call__(self, *, on_made: Callable[[SparkSession], object]) -> SparkSession: ...


def is_made_by_runs(spark: SparkSession) -> bool:
    """Tell whether a run has made this session, or the one of which it is a copy. Its last run may stop it at any time."""
    return spark.sparkContext in _inside


@contextmanager
def entered(given: SparkSession | None, build: _Build) -> Iterator[SparkSession]:
    """Yield the session of a run: ``given``, or else the one that ``build`` finds or makes. Thread-safe."""
    made: list[SparkSession] = []

    def note_made(spark: SparkSession) -> None:
        made.append(spark)
        _inside.append(spark.sparkContext)  # before another thread finds the session, and asks `is_made_by_runs`

    with _lock:
        spark = build(on_made=note_made) if given is None else given
        is_of_runs = is_made_by_runs(spark)
        if is_of_runs and not made:
            _inside.append(spark.sparkContext)
    try:
        yield spark
    finally:
        if is_of_runs:
            _leave(spark)


def _leave(spark: SparkSession) -> None:
    with _lock:
        try:
            if _inside.count(spark.sparkContext) == 1:
                session.stop(spark)
        finally:  # not before: until the stop is done, other threads find the session
            _inside.remove(spark.sparkContext)
