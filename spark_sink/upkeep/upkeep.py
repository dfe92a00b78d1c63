"""Upkeep of Delta tables: small files are made into large ones; old changes, old logs, and files that no version needs are deleted.

A micro-batch leaves a file per table, so a changelog gets one a second, and reading it takes longer and longer. ``Upkeep.run``
looks at tables at most once in ``optimize_interval_s`` each, in their logs alone (delta/log.py: no Spark), and has OPTIMIZE put
together what is small where that has become much. What is large already is never rewritten. Once a day, noted in the warehouse,
VACUUM deletes what has not been part of the table for ``vacuum_retention_s``: older versions can't be read from then on. Before
that, and as often, changes that are older than ``keep_changelog_s`` are dropped from the changelogs (upkeep/purge.py). A log,
which has a file for each commit, is cut off before the newest checkpoint that is ``log_retention_s`` old each time that the table
is looked at.

With ``clustering`` OPTIMIZE lays replicas out by key instead, which writes a table up to some size anew as a whole.

All other rows stay what they are, so a reader notices nothing. OPTIMIZE commits, which must not happen beside a micro-batch or a
merge (warehouse/lock.py says why): it holds their right, and they wait. It is begun only where there is much to compact. VACUUM is
told to write no commits of its own, so it needs no right at a changelog, however long it looks for files. A merge may replace a
replica's directory as a whole, so there VACUUM holds the right to merge.

What goes wrong here costs nothing but time, and is tried again: it is a warning.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from pyspark.sql.types import ArrayType, BinaryType, BooleanType, MapType, StructType, VariantType

from cdcpipe.errors import CdcpipeError
from spark_sink.delta import log as delta_log
from spark_sink.delta import sql as delta
from spark_sink.files import places as storage
from spark_sink.files.places import read_json, write_json
from spark_sink.schema.table import MESSAGES
from spark_sink.spark import session
from spark_sink.spark.sql import quote
from spark_sink.upkeep import purge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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
"""A file of this size stays as it is, and those that are made of small ones have up to twice as much."""
_CLUSTERED_BYTES = 16 << 20
"""The same where files are sorted by key: who looks for one has one file to read."""
_MOST_SMALL_FILES = 16
"""So many small files a table may have."""
_CUBE_BYTES = 2 << 30
"""Of a clustered table, rows that are sorted with one another are left as they are from this size on."""
_MOST_CLUSTERING_COLUMNS = 4
_INDEXED_COLUMNS = 32
"""Delta has statistics of so many columns, the first ones, and clusters by no others."""
_NOT_CLUSTERED = (ArrayType, BinaryType, BooleanType, MapType, StructType, VariantType)
_DAY_S = 86_400.0
_LONGEST_PAUSE_S = 3600.0
"""After so long at the latest it is looked whether the day has come for VACUUM, and how long the logs are."""
_PURGE = "purge"
"""Under which it is noted when changes were dropped; a table's name has a slash."""


class Upkeep:
    """Looks after the tables of one warehouse. None for an interval, a retention or an age: not at all.

    ``start`` does so in a thread until ``stop``, ``run`` looks at each table once. ``lock`` is the one that the pipeline of this
    process has.
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
        clustering: bool = False,
    ) -> None:
        # A session of its own: the settings below are not for those who write.
        self._spark = spark.newSession()
        self._warehouse = warehouse
        self._optimize_interval_s = optimize_interval_s
        self._vacuum_retention_s = vacuum_retention_s
        self._log_retention_s = log_retention_s
        self._keep_changelog_s = keep_changelog_s
        self._clustering = clustering
        self._lock = lock
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
        self._states: dict[Path, TableState | None] = {}
        self._noted: dict[str, Any] | None = None
        settings = {
            "spark.databricks.delta.optimize.minFileSize": _LARGE_BYTES,
            "spark.databricks.delta.optimize.clustering.mergeStrategy.minCubeSize.threshold": _CUBE_BYTES,
            "spark.databricks.delta.optimize.clustering.mergeStrategy.minCubeSize.targetCubeSize": _CUBE_BYTES,
            # As small as the files that were there.
            "spark.sql.parquet.compression.codec": "zstd",
            # RETAIN is to be heeded, also below a week: unfinished appends are minutes old at most.
            "spark.databricks.delta.vacuum.retentionWindowIgnore.enabled": "false",
            "spark.databricks.delta.retentionDurationCheck.enabled": "false",
            # Its commits (VACUUM START, VACUUM END) only tell of it, and each might overwrite one of ours.
            "spark.databricks.delta.vacuum.logging.enabled": "false",
        }
        for key, value in settings.items():
            self._spark.conf.set(key, value)

    def start(self) -> None:
        """Look at the tables now, and then in the interval; return at once."""
        self._thread.start()

    def stop(self) -> None:
        """End, once the table that is being looked after is done."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.run()
            self._stopping.wait(min(self._optimize_interval_s or _LONGEST_PAUSE_S, _LONGEST_PAUSE_S))

    def run(self, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """Look after each table, one after the other, until ``is_stopping`` says so or ``stop`` is called."""
        if self._warehouse.format != "delta":
            return

        def is_ending() -> bool:
            return self._stopping.is_set() or is_stopping()

        with _forgiving(self._warehouse.root):
            if self._keep_changelog_s is not None and not is_ending():
                with _forgiving(self._warehouse.root / "changelog", "purged"):
                    self._purge(self._keep_changelog_s, is_ending)
            for table, path, right in self._paths():
                if is_ending():
                    return
                if self._log_retention_s is not None:
                    with _forgiving(path / "_delta_log", "shortened"), right():
                        self._shorten(path, self._log_retention_s)
                with _forgiving(path):
                    if self._optimize_interval_s is not None:
                        self._optimize(table, path, right)
                    if self._vacuum_retention_s is not None:
                        with self._lock.merge() if path == self._warehouse.replica(table) else nullcontext():
                            self._vacuum(path, self._vacuum_retention_s)

    def _paths(self) -> Iterator[tuple[Table, Path, Right]]:
        """Yield the tables, each with the right that whoever writes it has to hold."""
        for table in [*self._warehouse.tables(), MESSAGES]:
            for path, right in (
                (self._warehouse.changelog(table), self._lock.append),
                (self._warehouse.replica(table), self._lock.merge),
            ):
                if delta.exists(path):
                    yield table, path, right

    def _optimize(self, table: Table, path: Path, right: Right) -> None:
        state = self._states[path] = delta_log.read_table(path, self._states.get(path))
        is_clustered = self._clustering and path == self._warehouse.replica(table)
        large = _CLUSTERED_BYTES if is_clustered else _LARGE_BYTES
        if state is not None and state.small_files(large) > _MOST_SMALL_FILES:
            with right():
                started = time.monotonic()
                files = self._cluster(table, path) if is_clustered else ""
                self._spark.conf.set("spark.databricks.delta.optimize.maxFileSize", 2 * large)
                self._spark.sql(f"OPTIMIZE {delta.table_name(path)} {files}")
            _logger.info("%s: %d files compacted in %.1f s", path, state.files, time.monotonic() - started)

    def _cluster(self, table: Table, path: Path) -> str:
        """Have a replica clustered by its key as it is now; return what OPTIMIZE is to be told of the files that it writes anew."""
        key = [version.columns for version in self._warehouse.versions(table) if version.key][-1]
        fields = delta.read(self._spark, path).schema.fields[:_INDEXED_COLUMNS]
        possible = {field.name for field in fields if not isinstance(field.dataType, _NOT_CLUSTERED)}
        wanted = [name for name in key if name in possible][:_MOST_CLUSTERING_COLUMNS]
        name = delta.table_name(path)
        found = self._spark.sql(f"DESCRIBE DETAIL {name}").collect()[0].clusteringColumns
        if wanted and wanted != [each.strip("`") for each in found]:
            self._spark.sql(f"ALTER TABLE {name} CLUSTER BY ({', '.join(map(quote, wanted))})")
            return "FULL" if found else ""  # those that another key has sorted, too
        return ""

    def _shorten(self, path: Path, retention_s: float) -> None:
        count = delta_log.shorten(path, retention_s)
        if count:
            _logger.debug("%s: %d commits removed from the log", path, count)

    def _vacuum(self, path: Path, retention_s: float) -> None:
        name = f"{path.parent.name}/{path.name}"
        is_known = name in self._noted_times()
        if self._is_due(name):
            if is_known:  # a new table has nothing to delete
                self._spark.sql(f"VACUUM {delta.table_name(path)} RETAIN {retention_s / 3600:.6f} HOURS")
            self._note(name)

    def _purge(self, age_s: float, is_stopping: Callable[[], bool]) -> None:
        if self._is_due(_PURGE) and self._warehouse.source().position is not None:
            before = datetime.now(UTC) - timedelta(seconds=age_s)
            try:
                found = purge.purge(self._spark, self._warehouse.root, before, is_stopping=is_stopping)
            except InterruptedError:
                return
            for each in found:
                if each.rows:
                    _logger.info("%s: %d changes from before %s removed", each.table, each.rows, before.isoformat(" "))
            self._note(_PURGE)

    def _is_due(self, name: str) -> bool:
        """Tell whether a day has gone since this was noted."""
        before = self._noted_times().get(name)
        return before is None or time.time() - before >= _DAY_S

    def _note(self, name: str) -> None:
        self._noted_times()[name] = round(time.time())
        write_json(self._noted_path, self._noted_times())

    def _noted_times(self) -> dict[str, Any]:
        if self._noted is None:
            self._noted = read_json(self._noted_path) or {}
        return self._noted

    @property
    def _noted_path(self) -> Path:
        return self._warehouse.root / "_cdcpipe/vacuumed.json"


@contextmanager
def _forgiving(path: Path, done: str = "compacted") -> Iterator[None]:
    """Make a warning of an error: whatever it is, the tables are as good as before."""
    try:
        yield
    except Exception as ex:  # noqa: BLE001
        said = ex.message if isinstance(ex, CdcpipeError) else session.reason_of(ex)
        _logger.warning("%s was not %s this time: %s", storage.name(path), done, said)
