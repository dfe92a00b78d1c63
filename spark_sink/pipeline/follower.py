"""Merges changelogs into replicas, in rounds. Micro-batches write only the changelogs.

Each round looks for replicas that are behind their changelogs. It merges all missing changes into each of them, in one merge. The
rounds run in their own thread, every ``interval_s`` seconds. With an interval of 0 the thread runs only the first and the last
round, and calls of ``catch_up`` run the others. A round merges several tables at the same time. Each thread has its own session,
because the settings of a commit belong to the session.

A round also writes checkpoints of the tables' Delta logs: Delta writes them only with its own commits.

The follower stores no state. Each replica records its own position, and at the start the follower reads these positions.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from cdcpipe.retry import RetryPolicy
from cdcpipe.threads import Worker
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
"""How many replicas are merged at the same time. A small merge spends most of its time waiting for a task."""


_CHANGED = "DELTA_SCHEMA_CHANGE_SINCE_ANALYSIS"
"""Delta's error if a micro-batch widens the changelog's columns between the plan of a merge and its start. The merge is retried."""

_MERGES = RetryPolicy(attempts=10)


class Follower:
    """Keeps the replicas of a warehouse up to date with its changelogs.

    Each round holds the right to merge. After a merge, the replica is registered in ``names``. If an error ends the rounds, the
    follower's thread calls ``on_error`` with it.
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
        self._thread: Worker | None = None

    def look(self, epoch: int) -> None:
        """Find the replicas that are behind their changelogs or do not exist, for example because a user deleted them."""
        for table in self._warehouse.tables():
            lsn = self._warehouse.format.lsn(self._warehouse.changelog(table))
            if lsn is not None and lsn > (self._warehouse.format.lsn(self._warehouse.replica(table)) or 0):
                self.record(table, Position(epoch, lsn))

    def record(self, table: Table, position: Position) -> None:
        """Record that a changelog has reached a position."""
        with self._lock:
            self._behind[table] = position

    def record_commit(self, path: Path) -> None:
        """Record that a Delta table has a new commit, so that its log may need a checkpoint."""
        with self._lock:
            self._written.add(path)

    def start(self) -> None:
        """Start the thread that runs the rounds."""
        self._thread = Worker(target=self._run, name="replicas", daemon=True)
        self._thread.start()

    def end(self, *, is_last_round_wanted: bool = True) -> None:
        """Ask the thread to end after a last round, or after the merges that are running. Returns at once."""
        self._is_last_round_wanted = is_last_round_wanted
        self._ending.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait, after ``end``, for the last round. Returns False if the time runs out first."""
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
        except BaseException as ex:  # noqa: BLE001 - the error ends the pipeline, which raises it
            self._on_error(ex)

    def _pause_s(self, started: float) -> float | None:
        return max(0.0, started + self._interval_s - time.monotonic()) if self._interval_s else None

    def catch_up(self) -> None:
        """Bring the replicas that are behind to the positions that their changelogs had at the time of the call."""
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
        self.record_commit(self._warehouse.replica(table))
        if self._names is not None:
            self._names.register([table])

    def _bring_with(self, spark: SparkSession, table: Table, position: Position) -> None:
        _MERGES.call(lambda: merge.bring(spark, self._warehouse, table, position), Exception, where=lambda ex: _CHANGED in str(ex))
