"""Merges changelogs into replicas, in rounds. Micro-batches write only the changelogs.

Each round looks for replicas that are behind their changelogs. It merges all missing changes into each of them, in one merge. The
rounds run in their own thread, every ``interval_s`` seconds; with None as often as is cheap (pipeline/rounds.py). With an interval
of 0, each micro-batch calls ``catch_up``, and the thread runs a round each minute: another process may copy a table while no
changes come. A round merges several tables at the same time. Each thread has its own session, because the settings of a commit
belong to the session.

A round also writes checkpoints of the tables' Delta logs: Delta writes them only with its own commits.

The follower stores no state. Each replica records its own position, and at the start the follower reads these positions.
"""

from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from cdcpipe.retry import RetryPolicy
from spark_sink.delta import log as delta_log
from spark_sink.delta import sql as delta
from spark_sink.delta.comments import set_comments
from spark_sink.delta.file_table import DeltaError
from spark_sink.pipeline.rounds import Rounds
from spark_sink.replica import merge
from spark_sink.schema.table import copies_until, replica_begin
from spark_sink.spark import session
from spark_sink.staging.log import Position
from spark_sink.warehouse import gaps, landed_snapshots
from spark_sink.warehouse.comments import commented_tables
from spark_sink.warehouse.purged_changes import PurgedError
from spark_sink.warehouse.wanted_copies import want_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

    from cdcpipe.measures import Histogram
    from spark_sink.delta.log import TableEnd
    from spark_sink.pipeline.catalog import CatalogDatabase
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.comments import Comments
    from spark_sink.warehouse.lock import TableLock
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["MERGES", "Follower", "is_out_of_date"]

_logger = logging.getLogger(__name__)

_THREADS = 4
"""How many replicas are merged at the same time. A small merge spends most of its time waiting for a task."""

_QUIET_S = 60.0
"""The interval of the thread's rounds if micro-batches run the others."""

_CHANGED = "DELTA_SCHEMA_CHANGE_SINCE_ANALYSIS"
"""Delta's error if a micro-batch widens the changelog's columns between the plan of a merge and its start. The merge is retried."""

MERGES = RetryPolicy(attempts=10)


def is_out_of_date(ex: Exception) -> bool:
    """Tell whether a merge has failed because a micro-batch changed the changelog's columns meanwhile."""
    return _CHANGED in str(ex)


class Follower:
    """Keeps the replicas of a warehouse up to date with its changelogs.

    Each round holds the right to merge. After a merge, the replica is registered in ``catalog``. If an error ends the rounds, the
    follower's thread calls ``on_error`` with it. ``merges`` counts how long each merge took.
    """

    def __init__(
        self,
        spark: SparkSession,
        warehouse: Warehouse,
        lock: TableLock,
        catalog: CatalogDatabase | None,
        interval_s: float | None,
        on_error: Callable[[BaseException], None],
        merges: Histogram,
    ) -> None:
        self._warehouse = warehouse
        self._table_lock = lock
        self._catalog = catalog
        self._spark = spark
        self._sessions: queue.SimpleQueue[SparkSession] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._behind: dict[Table, Position] = {}
        self._merges = merges
        self._wanted: dict[Table, int] = {}
        self._reached: dict[Table, int] = {}
        """The LSN that each table's changelog has, and the one that its replica has."""
        self._begins: dict[Table, int | None] = {}
        """Where the replicas begin that do not exist yet; None for a table that has no key, and so no replica."""
        self._refused: dict[Table, int] = {}
        """The replicas that stay as they are until their tables are copied, and the LSNs from which on a copy helps."""
        self._written: set[Path] = set()
        self._comments: dict[Table, Comments] = {}
        self._uncommented: set[Table] = set()
        """The tables whose replicas may lack their comments."""
        self._uncommentable: set[Table] = set()
        """The tables whose replicas can't get comments, and that were named already."""
        self.rounds = Rounds("replicas", self.catch_up, _QUIET_S if interval_s == 0 else interval_s, on_error)

    def look(self, epoch: int, ends: Mapping[Path, TableEnd | None]) -> None:
        """Find the replicas that are behind their changelogs or do not exist, for example because a user deleted them.

        ``ends`` says how far each changelog and each replica is. Also find the tables with comments: a run that was killed may have
        left them without.
        """
        for table, comments in commented_tables(self._warehouse):
            self.comment(table, comments)
        changelogs = {table: ends.get(self._warehouse.changelog(table)) for table in self._warehouse.tables()}
        landed = {table: end for table, end in changelogs.items() if end is not None}
        copies = gaps.Copies.read(self._warehouse, list(landed))
        for table, changelog in landed.items():
            replica = ends.get(self._warehouse.replica(table))
            if replica is None:
                self._begins[table] = replica_begin(copies.versions[table])
            else:
                self._reached[table] = replica.lsn
            # A finished copy may be later than each change. A replica that is before it was put back from a backup.
            lsn = max([changelog.lsn, *copies.complete(table)])
            if lsn > (0 if replica is None else replica.lsn):
                self.record(table, Position(epoch, lsn))

    def record(self, table: Table, position: Position, after_lsn: int = 0) -> None:
        """Record that a changelog has reached a position, with changes after ``after_lsn``.

        A replica that had everything before has all up to there: other tables have had the changes since its last one. A table
        that has no key has no replica: nothing is recorded.
        """
        is_new = table not in self._reached and self._begins.get(table) is None
        begin = replica_begin(self._warehouse.versions(table)) if is_new else None
        if is_new and begin is None:
            return
        with self._lock:
            if is_new:
                self._begins[table] = begin
            elif table in self._reached and self._reached[table] >= self._wanted.get(table, 0):
                self._reached[table] = max(self._reached[table], after_lsn)
            self._behind[table] = position
            self._wanted[table] = position.lsn

    def replicas(self) -> dict[Table, int | None]:
        """Return up to which LSN each replica has all changes; None for one that has all of its changelog. Any thread may ask."""
        with self._lock:
            reached = {**self._begins, **self._reached}.items()
            return {table: lsn if lsn < self._wanted.get(table, 0) else None for table, lsn in reached if lsn is not None}

    def comment(self, table: Table, comments: Comments) -> None:
        """Give a replica these comments in the next round, and whenever it may have lost them."""
        with self._lock:
            self._comments[table] = comments
            self._uncommented.add(table)

    def copied(self, tables: Iterable[Table]) -> None:
        """Take note that these tables were copied anew: they may have lost their comments."""
        with self._lock:
            for table in tables:
                self._uncommented.add(table)
                if (lsn := self._refused.pop(table, None)) is not None:
                    self._reached[table] = max(lsn, self._reached.get(table, 0))

    def _find_copied(self) -> None:
        """Take note of the tables that another process has copied, for example ``cdcpipe-spark snapshot``."""
        with self._lock:
            refused = dict(self._refused)
        copies = gaps.Copies.read(self._warehouse, list(refused))
        self.copied([table for table, lsn in refused.items() if copies.is_since(table, lsn)])

    def record_commit(self, path: Path) -> None:
        """Record that a Delta table has a new commit, so that its log may need a checkpoint."""
        with self._lock:
            self._written.add(path)

    def catch_up(self) -> None:
        """Bring the replicas that are behind to the positions that their changelogs had at the time of the call.

        Replicas of tables whose copy is unfinished stay behind.
        """
        with self._table_lock.merge():
            self._find_copied()
            with self._lock:
                behind, self._behind = self._behind, {}
            if behind:
                self._leave_unfinished(behind)
            if behind:
                self._bring_all(behind)
            with self._lock:
                written, self._written = self._written, set()
                wanted, self._uncommented = self._comments.keys() & (self._uncommented | behind.keys()), set()
                uncommented = {table: self._comments[table] for table in wanted}
            for table, comments in uncommented.items():
                self._set_comments(table, comments)
            for path in written:
                if delta_log.is_long(path):
                    delta.checkpoint(self._spark, path)

    def _leave_unfinished(self, behind: dict[Table, Position]) -> None:
        """Leave the tables with an unfinished copy to a later round.

        A merge would take all rows of the copy for changes, which is slow, and keep the rows that the copy does not have. Who
        finishes the copy makes the replica anew.
        """
        left = {table: behind.pop(table) for table, _ in landed_snapshots.unfinished(self._warehouse) if table in behind}
        with self._lock:
            self._behind = left | self._behind  # what was recorded meanwhile is later

    def _set_comments(self, table: Table, comments: Comments) -> None:
        try:
            set_comments(self._warehouse.replica(table), comments.table, comments.columns)
        except DeltaError as ex:
            # Spark merges into such a table. Comments must not stop it, and all others.
            if table not in self._uncommentable:
                self._uncommentable.add(table)
                _logger.warning("the replica of %s does not get the comments of its table: %s", table, ex.message)

    def _bring_all(self, behind: Mapping[Table, Position]) -> None:
        with ThreadPoolExecutor(min(_THREADS, len(behind)), "replica") as pool:
            merges = [pool.submit(self._bring, table, behind[table]) for table in sorted(behind)]
            try:
                for each in merges:
                    each.result()
                    if self.rounds.is_hurried:
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
            with self._merges.timed():
                self._bring_with(spark, table, position)
        except PurgedError as ex:
            self._refuse(table, position, ex)
            return
        finally:
            self._sessions.put(spark)
        with self._lock:
            self._reached[table] = position.lsn
            self._refused.pop(table, None)
        self.record_commit(self._warehouse.replica(table))
        if self._catalog is not None:
            self._catalog.register([table])

    def _refuse(self, table: Table, position: Position, ex: PurgedError) -> None:
        """Let the table be copied. One table must not stop all."""
        copies = copies_until(self._warehouse.versions(table))  # they were purged, too, or do not help
        lsn = max([position.lsn, *(copy + 1 for copy in copies)])
        with self._lock:
            is_known = table in self._refused
            self._refused[table] = lsn
        if not is_known:
            _logger.warning("the replica of %s stays as it is until the table is copied: %s", table, ex.message)
        want_copy(self._warehouse, table, lsn, "its replica needs changes that were purged")

    def _bring_with(self, spark: SparkSession, table: Table, position: Position) -> None:
        MERGES.call(lambda: merge.bring(spark, self._warehouse, table, position), Exception, where=is_out_of_date)
