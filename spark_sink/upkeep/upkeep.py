"""Keeps Delta tables small and fast: compacts small files, and deletes old changes, old commits and unused files.

Each micro-batch writes a file per table. So a changelog gets about one file a second, and reading it becomes slower. Upkeep looks
at each table at least once an hour, and reads only its log (delta/log.py: no Spark).

- Once in ``optimize_interval_s``, if a table has many small files, they are put together. For a changelog delta/compaction.py does
  this, while micro-batches go on; for the others OPTIMIZE. Large files are never rewritten. With ``clustering`` OPTIMIZE sorts
  replicas by key instead, which rewrites a whole table up to some size. Histories are always sorted by key.
- Commits: a log has a file for each commit. A log with many commits after its newest checkpoint gets another one. (For tables that
  change all the time, pipeline/follower.py has done that before.) Commits before the newest checkpoint that is older than
  ``log_retention_s`` are deleted whenever the table is looked at.
- Once a day, changes older than ``keep_changelog_s`` are removed from the changelogs, and versions of rows that ended longer ago
  than ``keep_history_s`` from the histories (upkeep/purge.py).
- VACUUM deletes files that have not been part of the table for ``vacuum_retention_s``; older versions of the table can't be read
  after that. It runs once in this time, but at least once a day, and only where there are old files that are not part of the
  table (delta/unused_files.py). If they are too many for one list, it runs again at the next look. Checkpoints do not name such
  files for longer (delta/removed_files.py).

The warehouse records when the last two were done (recorded_times.py).

No other rows change, so a reader notices nothing. OPTIMIZE commits, and must not commit at the same time as a merge or a
micro-batch (warehouse/lock.py says why). So it holds their right while they wait, and runs only if there is much to compact.
VACUUM is set to write no commits. So it needs no right, however long it takes: in an object store it deletes a file at a time. But
it gets a list of the files that it may delete, and this list is made while nobody writes to the table. For VACUUM deletes old files
that are in no commit that it knows. After a pause of the machine, these may be the files of the running micro-batch, or of one that
has committed since VACUUM read the log. A file that is written later has a new name, also if a merge makes the replica anew.

An error here does no harm, and upkeep tries again later. So it is only a warning. A stop cancels the jobs of Spark that upkeep
runs: what only makes tables smaller must not hold up the end of a run, and the next one does it again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from pyspark.sql.types import ArrayType, BinaryType, BooleanType, MapType, StructType, VariantType

from cdcpipe.threads import Worker
from cdcpipe.units import few, format_duration
from spark_sink.delta import log as delta_log
from spark_sink.delta import sql as delta
from spark_sink.delta.compaction import compact
from spark_sink.delta.file_table import ChangedError, DeltaError
from spark_sink.delta.removed_files import are_names_kept, keep_names
from spark_sink.delta.rows import UnsupportedError
from spark_sink.delta.schema import INDEXED_COLUMNS
from spark_sink.delta.unused_files import is_unfinished, unused_files
from spark_sink.files import clock, places
from spark_sink.schema.table import NO_COPIES, has_key
from spark_sink.spark import session
from spark_sink.spark.failure import said_of
from spark_sink.spark.jobs import Jobs
from spark_sink.spark.sql import quote
from spark_sink.upkeep import purge
from spark_sink.upkeep.recorded_times import HISTORIES, PURGE, RecordedTimes, places_of, vacuum_interval_s, vacuum_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from pyspark.sql import SparkSession

    from spark_sink.delta.log import TableState
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.lock import TableLock
    from spark_sink.warehouse.warehouse import Warehouse

    Right: TypeAlias = Callable[[], AbstractContextManager[object]]

__all__ = ["Upkeep"]

_logger = logging.getLogger(__name__)

_LARGE_BYTES = 64 << 20
"""A file of this size is not rewritten. Files that OPTIMIZE makes from small ones have up to twice this size."""
_CLUSTERED_BYTES = 16 << 20
"""The same for files that are sorted by key: smaller, because a search for a key reads one whole file."""
_MOST_SMALL_FILES = 16
"""A table with more small files than this is compacted."""
_CUBE_BYTES = 2 << 30
"""In a clustered table, a group of files sorted together is not rewritten once it has this size."""
_MOST_CLUSTERING_COLUMNS = 4
_NOT_CLUSTERED = (ArrayType, BinaryType, BooleanType, MapType, StructType, VariantType)
_LOOK_S = 0.2
"""How often to check whether a run that waits for its upkeep is asked to stop."""
_SHORTEST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 3600.0
"""The longest pause before upkeep checks again whether VACUUM is due and whether logs are too long."""
_LOSING = (
    "--keep-changelog removes the rows of these tables once they are %s old, copied ones, too, and no other table has them, because"
    " without a key there is no replica: %s"
)
_KEEPING = (
    "changes that are older than %s stay in the changelogs of these tables, because a replica or a stored history does not have"
    " them; cdcpipe-spark purge --dry-run says which: %s"
)


class Upkeep:
    """Does the upkeep of one warehouse's tables. None for an interval, a retention or an age turns that part off.

    ``start`` runs it in a thread until ``stop``; ``run`` looks at each table once. ``lock`` must be the lock of this process's
    pipeline.
    """

    def __init__(
        self,
        spark: SparkSession,
        warehouse: Warehouse,
        lock: TableLock,
        *,
        optimize_interval_s: float | None,
        vacuum_retention_s: float | None,
        log_retention_s: float | None = None,
        keep_changelog_s: float | None = None,
        keep_history_s: float | None = None,
        clustering: bool = False,
    ) -> None:
        # A separate session, so that the settings below do not affect the session that writes. It keeps that one's own settings: a
        # notebook may have given it Delta Lake, or the credentials of a store, after its start.
        self._spark = session.copy(spark)
        self._warehouse = warehouse
        self._optimize_interval_s = optimize_interval_s
        self._vacuum_retention_s = vacuum_retention_s
        self._log_retention_s = log_retention_s
        self._keep_changelog_s = keep_changelog_s
        self._keep_history_s = keep_history_s
        self._clustering = clustering
        self._lock = lock
        self._stopping = threading.Event()
        self._jobs = Jobs("upkeep")
        self._thread = Worker(target=self._run, name="upkeep", daemon=True)
        self._states: dict[Path, TableState | None] = {}
        self._refusing: set[Path] = set()
        """The tables to which only Spark can write, and that were named already."""
        self._named: set[tuple[str, Table]] = set()
        """The tables that each warning has named."""
        self._times = RecordedTimes(warehouse)
        settings = {
            "spark.databricks.delta.optimize.minFileSize": _LARGE_BYTES,
            "spark.databricks.delta.optimize.clustering.mergeStrategy.minCubeSize.threshold": _CUBE_BYTES,
            "spark.databricks.delta.optimize.clustering.mergeStrategy.minCubeSize.targetCubeSize": _CUBE_BYTES,
            # The same compression as in the files to compact.
            "spark.sql.parquet.compression.codec": "zstd",
            # Let VACUUM obey RETAIN, also below a week. This is safe, because unfinished appends are at most minutes old.
            "spark.databricks.delta.vacuum.retentionWindowIgnore.enabled": "false",
            "spark.databricks.delta.retentionDurationCheck.enabled": "false",
            # Its commits (VACUUM START, VACUUM END) are only for information, and each might overwrite a commit of ours.
            "spark.databricks.delta.vacuum.logging.enabled": "false",
        }
        for key, value in settings.items():
            self._spark.conf.set(key, value)

    def start(self) -> None:
        """Look at the tables now, and again after each interval, in a thread. Returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Cancels the jobs that it runs: the next start does again what it has not finished."""
        self._stopping.set()
        self._jobs.cancel_until(self._spark, self._thread.wait)

    def _run(self) -> None:
        interval_s = self._optimize_interval_s
        due_s = math.inf if interval_s is None else time.monotonic()
        while not self._stopping.is_set():
            if interval_s is None or time.monotonic() < due_s:
                self._look(lambda: False, compacts=False)
            else:
                self._look(lambda: False, compacts=True)
                due_s = time.monotonic() + interval_s
            self._stopping.wait(min(max(_SHORTEST_PAUSE_S, due_s - time.monotonic()), _LONGEST_PAUSE_S))

    def run(self, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """Do the upkeep of each table once. As soon as ``is_stopping`` is True, cancels it as ``stop`` does."""
        compacts = self._optimize_interval_s is not None
        thread = Worker(target=lambda: self._look(is_stopping, compacts=compacts), name="upkeep", daemon=True)
        thread.start()
        while not thread.wait(_LOOK_S):
            if is_stopping():
                self._jobs.cancel_until(self._spark, thread.wait)

    def _look(self, is_stopping: Callable[[], bool], *, compacts: bool) -> None:
        """Do the upkeep of each table in turn. With ``compacts``, also put small files together."""
        if not self._warehouse.format.has_upkeep:
            return

        def is_ending() -> bool:
            return self._stopping.is_set() or is_stopping()

        with _forgiving(self._warehouse.root, "compacted", is_ending), ExitStack() as ending:
            ending.callback(self._times.flush)
            self._jobs.include_mine(self._spark)
            for path, done, work in self._steps(is_ending, compacts=compacts):
                if is_ending():
                    return
                with _forgiving(path, done, is_ending):
                    work()

    def _steps(self, is_stopping: Callable[[], bool], *, compacts: bool) -> Iterator[tuple[Path, str, Callable[[], None]]]:
        """Yield what there is to do, in order: where, what a warning calls it, and the function that does it."""
        root = self._warehouse.root
        if self._keep_changelog_s is not None:
            yield root / "changelog", "purged", partial(self._purge, self._keep_changelog_s, is_stopping)
        if self._keep_history_s is not None:
            yield root / "history", "purged", partial(self._purge_histories, self._keep_history_s, is_stopping)
        for table, path, right in self._paths():
            log = path / "_delta_log"
            yield log, "given a checkpoint", partial(self._checkpoint, path, right)
            if self._log_retention_s is not None:
                yield log, "shortened", partial(self._shorten, path, right, self._log_retention_s)
            if compacts:
                yield path, "compacted", partial(self._optimize, table, path, right, is_stopping)
            if self._vacuum_retention_s is not None:
                yield path, "vacuumed", partial(self._vacuum, table, path, right, self._vacuum_retention_s)

    def _paths(self) -> Iterator[tuple[Table, Path, Right]]:
        """Yield the tables, each with the right that its writer has to hold."""
        rights = {"changelog": self._lock.append, "replica": self._lock.merge, "history": self._lock.history}
        for table, path in places_of(self._warehouse):
            yield table, path, rights[path.parent.name]

    def _optimize(self, table: Table, path: Path, right: Right, is_stopping: Callable[[], bool]) -> None:
        state = self._states[path] = delta_log.read_table(path, self._states.get(path), self._warehouse.logs)
        if state is None:
            return
        sorts = path == self._warehouse.history(table) or (self._clustering and path == self._warehouse.replica(table))
        # A table that was sorted before, or by its user, has files of that size, and OPTIMIZE goes on to sort it. Small files of
        # changelogs are put together without Spark, unsorted.
        is_sorted = sorts or (state.is_clustered and path != self._warehouse.changelog(table))
        large = _CLUSTERED_BYTES if is_sorted else _LARGE_BYTES
        if state.small_files(large) <= _MOST_SMALL_FILES:
            return
        started = time.monotonic()
        if path != self._warehouse.changelog(table) or not _compact(path, large, right, is_stopping):
            with right():
                # FULL: files that are sorted by an earlier key are rewritten, too. Others are not, as without it.
                files = "FULL" if sorts and self._cluster(table, path) else ""
                self._spark.conf.set("spark.databricks.delta.optimize.maxFileSize", 2 * large)
                self._spark.sql(f"OPTIMIZE {delta.table_name(path)} {files}")
        _logger.info("%s: %d files compacted in %.1f s", path, state.files, time.monotonic() - started)

    def _cluster(self, table: Table, path: Path) -> bool:
        """Set a table's clustering columns to its present key. Returns False if no column of the key can be one."""
        key = [version.columns for version in self._warehouse.versions(table) if version.key][-1]
        fields = delta.read(self._spark, path).schema.fields[:INDEXED_COLUMNS]  # Delta can cluster only by columns with statistics
        possible = {field.name for field in fields if not isinstance(field.dataType, _NOT_CLUSTERED)}
        wanted = [name for name in key if name in possible][:_MOST_CLUSTERING_COLUMNS]
        name = delta.table_name(path)
        found = self._spark.sql(f"DESCRIBE DETAIL {name}").collect()[0].clusteringColumns
        # Delta quotes a name where it has to.
        is_as_wanted = len(found) == len(wanted) and all(map(_is_name, found, wanted))
        if wanted and not is_as_wanted:
            self._spark.sql(f"ALTER TABLE {name} CLUSTER BY ({', '.join(map(quote, wanted))})")
        return bool(wanted)

    def _checkpoint(self, path: Path, right: Right) -> None:
        if delta_log.is_long(path):
            with right():
                delta.checkpoint(self._spark, path)

    def _shorten(self, path: Path, right: Right, retention_s: float) -> None:
        with right():
            count = delta_log.shorten(path, retention_s)
        if count:
            _logger.debug("%s: %d commits removed from the log", path, count)

    def _vacuum(self, table: Table, path: Path, right: Right, retention_s: float) -> None:
        name = vacuum_of(path)
        if not self._times.is_due(name, vacuum_interval_s(retention_s)):
            return
        if table in NO_COPIES and (end := delta_log.table_end(path)) is not None and end.is_restored:
            return  # only another RESTORE brings back what it has lost, and needs the files
        if self._times.is_known(name):  # a new table has nothing to delete, and nothing to forget
            self._forget_removed(path, right, retention_s)
            with right():
                # If the clock of the file system or the store is behind, new files look old.
                kept_s = retention_s + clock.behind_s(path)
                with self._warehouse.logs.newest(path) as log:
                    unused = unused_files(log, time.time() - kept_s)
            if unused:
                delta.vacuum(self._spark, path, unused, kept_s)
            if is_unfinished(path, unused):
                _logger.info("%s: VACUUM looked at %d files; the next look takes the others", path, len(unused))
                return
        self._times.note(name)

    def _forget_removed(self, path: Path, right: Right, retention_s: float) -> None:
        """Let checkpoints forget files when VACUUM deletes them. Where only Spark can set this, Delta's own time holds."""
        with self._warehouse.logs.newest(path) as log:
            is_done = are_names_kept(log.metadata, retention_s)
        if not is_done:
            try:
                with right():
                    keep_names(path, retention_s)
            except DeltaError as ex:
                if path not in self._refusing:
                    self._refusing.add(path)
                    _logger.warning("the names of deleted files stay in the checkpoints for Delta's own time: %s", ex.message)

    def _before(self, age_s: float) -> datetime:
        """Return the time before which a change is older than ``age_s``.

        If this machine's clock is ahead of that of the warehouse's place, the latter counts: what is removed too early is gone.
        """
        return datetime.now(UTC) - timedelta(seconds=age_s + clock.behind_s(self._warehouse.root))

    def _purge(self, age_s: float, is_stopping: Callable[[], bool]) -> None:
        """Purge the changelogs once a day. Raises InterruptedError for a stop: then the next start goes on with it."""
        house = self._warehouse
        if self._times.is_due(PURGE) and house.source().position is not None:
            keyless = [table for table in house.tables() if not has_key(house.versions(table)) and house.has_changelog(table)]
            self._name(_LOSING, keyless, age_s)
            purged = purge.purge(self._spark, house.root, self._before(age_s), is_stopping=is_stopping)
            self._times.record(PURGE)
            self._name(_KEEPING, [each.table for each in purged if each.kept], age_s)

    def _purge_histories(self, age_s: float, is_stopping: Callable[[], bool]) -> None:
        """Do the same with the histories."""
        if self._times.is_due(HISTORIES):
            purge.purge_histories(self._spark, self._warehouse, self._lock, self._before(age_s), is_stopping)
            self._times.record(HISTORIES)

    def _name(self, text: str, tables: Collection[Table], age_s: float) -> None:
        """Log a warning with the tables that it has not named yet."""
        names = sorted(str(table) for table in tables if (text, table) not in self._named)
        if names:
            self._named.update((text, table) for table in tables)
            _logger.warning(text, format_duration(age_s), few(names))


def _compact(path: Path, size: int, right: Right, is_stopping: Callable[[], bool]) -> bool:
    """Put the small files of a changelog together, while micro-batches go on. Returns False if Spark has to do it."""
    try:
        compact(path, size, right, is_stopping)
    except UnsupportedError as ex:
        _logger.debug("%s: Spark compacts %s", path, ex)
        return False
    except ChangedError:
        _logger.debug("%s has changed while it was compacted; upkeep tries again later", path)
    return True


def _is_name(told: str, name: str) -> bool:
    """Tell whether ``told`` is the column ``name``, with or without quotes."""
    return told in (name, quote(name))


@contextmanager
def _forgiving(path: Path, done: str, is_stopping: Callable[[], bool]) -> Iterator[None]:
    """Turn any error into a warning: the tables are still intact. What a stop has cancelled is not worth one."""
    try:
        yield
    except InterruptedError:
        _logger.info("stopped before %s was %s", places.name(path), done)
    except Exception as ex:
        if is_stopping():
            _logger.info("stopped before %s was %s", places.name(path), done, exc_info=True)
            return
        _logger.warning("%s was not %s this time, upkeep tries again later: %s", places.name(path), done, said_of(ex))
