"""Replicas on a rhythm of their own: micro-batches write changelogs, and this brings the replicas after them.

Each round merges, into every replica that stands behind, all that its changelog has beyond it, in one go. Rounds have a
thread of their own, ``interval_s`` after one another; with an interval of 0 it makes but the first and the last, and others are
made by ``catch_up``. In a round tables are merged side by side, each thread in a session of its own: a commit's settings are a
session's.

The tables' logs, too, are looked after here: Delta makes checkpoints of them with its own commits only.

Nothing here has to be kept: how far a replica is, it records itself. What is behind at the start is seen in the tables.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from cdcpipe.retry import RetryPolicy
from spark_sink.delta import log as delta_log
from spark_sink.delta import sql as delta
from spark_sink.replica import merge
from spark_sink.spark import session
from spark_sink.staging.log import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

    from spark_sink.pipeline.catalog import CatalogDatabase
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.lock import TableLock
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["Follower"]

_THREADS = 4
"""So many replicas are merged at the same time: most of a small merge is waiting for one task or another."""


_CHANGED = "DELTA_SCHEMA_CHANGE_SINCE_ANALYSIS"
"""A micro-batch has widened the changelog's columns between the plan of a merge and its start: it is planned anew."""

_MERGES = RetryPolicy(attempts=10)


class Follower:
    """Keeps a warehouse's replicas after its changelogs.

    Each round holds the right to merge. A replica that has been brought further gets its name in ``names``. ``on_error`` is called
    with the error that ended the rounds, in the follower's thread.
    """

    def __init__(
        self,
        spark: SparkSession,
        warehouse: Warehouse,
        lock: TableLock,
        names: CatalogDatabase | None,
        interval_s: float,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._warehouse = warehouse
        self._interval_s = interval_s
        self._tables = lock
        self._names = names
        self._on_error = on_error
        self._spark = spark
        self._sessions: queue.SimpleQueue[SparkSession] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._behind: dict[Table, Position] = {}
        self._written: set[Path] = set()
        self._ending = threading.Event()
        self._is_last_round_wanted = True
        self._thread: threading.Thread | None = None

    def look(self, epoch: int) -> None:
        """Find the replicas that stand behind their changelogs, or are not there at all, whoever deleted them."""
        for table in self._warehouse.tables():
            lsn = self._warehouse.format.lsn(self._warehouse.changelog(table))
            if lsn is not None and lsn > (self._warehouse.format.lsn(self._warehouse.replica(table)) or 0):
                self.note(table, Position(epoch, lsn))

    def note(self, table: Table, position: Position) -> None:
        """Take note of a changelog that has reached a position."""
        with self._lock:
            self._behind[table] = position

    def note_log(self, path: Path) -> None:
        """Take note of a Delta table that has got a commit: its log may be long by now."""
        with self._lock:
            self._written.add(path)

    def start(self) -> None:
        """Begin with the rounds."""
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True)
        self._thread.start()

    def end(self, *, is_last_round_wanted: bool = True) -> None:
        """Ask for a last round, or for an end after the merges that run; return at once."""
        self._is_last_round_wanted = is_last_round_wanted
        self._ending.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait, after ``end``, for the last round; return False if it has not come to its end in time."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            started = time.monotonic()
            self.catch_up()
            while not self._ending.wait(self._pause_s(started)):
                started = time.monotonic()
                self.catch_up()
            if self._is_last_round_wanted:
                self.catch_up()
        except BaseException as ex:  # noqa: BLE001 - it ends the pipeline, which raises it
            self._on_error(ex)

    def _pause_s(self, started: float) -> float | None:
        return max(0.0, started + self._interval_s - time.monotonic()) if self._interval_s else None

    def catch_up(self) -> None:
        """Bring the replicas that stand behind to where their changelogs were when this was called."""
        with self._tables.merge():
            with self._lock:
                behind, self._behind = self._behind, {}
            if behind:
                self._bring_all(behind)
            with self._lock:
                written, self._written = self._written, set()
            for path in written:
                if delta_log.is_long(path):
                    delta.checkpoint(self._spark, path)

    def _bring_all(self, behind: Mapping[Table, Position]) -> None:
        with ThreadPoolExecutor(min(_THREADS, len(behind)), "replica") as pool:
            merges = [pool.submit(self._bring, table, behind[table]) for table in sorted(behind)]
            try:
                for each in merges:
                    each.result()
                    if self._ending.is_set() and not self._is_last_round_wanted:
                        break
            finally:
                for each in merges:
                    each.cancel()

    def _bring(self, table: Table, position: Position) -> None:
        try:
            spark = self._sessions.get_nowait()
        except queue.Empty:
            spark = session.copy(self._spark)
        try:
            self._bring_with(spark, table, position)
        finally:
            self._sessions.put(spark)
        self.note_log(self._warehouse.replica(table))
        if self._names is not None:
            self._names.register([table])

    def _bring_with(self, spark: SparkSession, table: Table, position: Position) -> None:
        _MERGES.call(lambda: merge.bring(spark, self._warehouse, table, position), Exception, where=lambda ex: _CHANGED in str(ex))
