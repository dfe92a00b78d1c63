"""Upkeep of Delta tables: small files are made into large ones, and files that no version needs any more are deleted.

A micro-batch leaves a file per table, so a changelog gets one a second, and reading it takes longer and longer. ``Upkeep.run``
looks at tables at most once in ``optimize_interval_s`` each, in their logs alone (delta_log.py: no Spark), and has OPTIMIZE put
together what is small where that has become much. What is large already is never rewritten. Once a day, noted in the warehouse,
VACUUM deletes what has not been part of the table for ``vacuum_retention_s``: older versions can't be read from then on.

Rows stay what they are, so a reader notices nothing. Appends to a changelog may happen meanwhile: Delta lets both commit. A
MERGE may not: whichever commits second fails. So a replica is looked after under the lock that whoever merges holds meanwhile.

What goes wrong here costs nothing but time, and is tried again: it is a warning.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from cdcpipe.errors import CdcpipeError
from spark_sink import delta, delta_log
from spark_sink.staging import read_json, write_json
from spark_sink.warehouse import MESSAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from spark_sink.delta_log import TableState
    from spark_sink.warehouse import Warehouse

__all__ = ["Upkeep"]

_logger = logging.getLogger(__name__)

_LARGE_BYTES = 64 << 20
"""A file of this size stays as it is."""
_MOST_SMALL_FILES = 16
"""So many small files a table may have."""
_VACUUM_INTERVAL_S = 86_400.0
_LONGEST_PAUSE_S = 3600.0
"""After so long at the latest it is looked whether the day has come for VACUUM."""


class Upkeep:
    """Looks after the tables of one warehouse. None for an interval or a retention: not at all.

    ``start`` does so in a thread until ``stop``, ``run`` looks at each table once. ``merging`` is held around replicas.
    """

    def __init__(
        self,
        spark: SparkSession,
        warehouse: Warehouse,
        *,
        optimize_interval_s: float | None,
        vacuum_retention_s: float | None,
        merging: AbstractContextManager[Any] | None = None,
    ) -> None:
        # A session of its own: the settings below are not for those who write.
        self._spark = spark.newSession()
        self._warehouse = warehouse
        self._optimize_interval_s = optimize_interval_s
        self._vacuum_retention_s = vacuum_retention_s
        self._merging: AbstractContextManager[Any] = nullcontext() if merging is None else merging
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
        self._states: dict[Path, TableState | None] = {}
        self._vacuumed: dict[str, Any] | None = None
        settings = {
            "spark.databricks.delta.optimize.minFileSize": _LARGE_BYTES,
            "spark.databricks.delta.optimize.maxFileSize": 2 * _LARGE_BYTES,
            # RETAIN is to be heeded, also below a week: unfinished appends are minutes old at most.
            "spark.databricks.delta.vacuum.retentionWindowIgnore.enabled": "false",
            "spark.databricks.delta.retentionDurationCheck.enabled": "false",
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
        with _forgiving(self._warehouse.root):
            for path, lock in self._paths():
                if self._stopping.is_set() or is_stopping():
                    return
                with _forgiving(path), lock:
                    if self._optimize_interval_s is not None:
                        self._optimize(path)
                    if self._vacuum_retention_s is not None:
                        self._vacuum(path, self._vacuum_retention_s)

    def _paths(self) -> Iterator[tuple[Path, AbstractContextManager[Any]]]:
        """Yield the tables, each with what is to be held meanwhile."""
        for table in [*self._warehouse.tables(), MESSAGES]:
            for path, lock in ((self._warehouse.changelog(table), nullcontext()), (self._warehouse.replica(table), self._merging)):
                if delta.exists(path):
                    yield path, lock

    def _optimize(self, path: Path) -> None:
        state = self._states[path] = delta_log.read_table(path, self._states.get(path))
        if state is not None and state.small_files(_LARGE_BYTES) > _MOST_SMALL_FILES:
            started = time.monotonic()
            self._spark.sql(f"OPTIMIZE {delta.table_name(path)}")
            _logger.info("%s: %d files compacted in %.1f s", path, state.files, time.monotonic() - started)

    def _vacuum(self, path: Path, retention_s: float) -> None:
        noted, now = self._warehouse.root / "_cdcpipe/vacuumed.json", round(time.time())
        if self._vacuumed is None:
            self._vacuumed = read_json(noted) or {}
        name = f"{path.parent.name}/{path.name}"
        before = self._vacuumed.get(name)
        if before is None or now - before >= _VACUUM_INTERVAL_S:
            if before is not None:  # a new table has nothing to delete
                self._spark.sql(f"VACUUM {delta.table_name(path)} RETAIN {retention_s / 3600:.6f} HOURS")
            self._vacuumed[name] = now
            write_json(noted, self._vacuumed)


@contextmanager
def _forgiving(path: Path) -> Iterator[None]:
    """Make a warning of an error: whatever it is, the tables are as good as before."""
    try:
        yield
    except Exception as ex:  # noqa: BLE001
        said = ex.message if isinstance(ex, CdcpipeError) else str(ex).strip().partition("\n")[0]
        _logger.warning("%s was not compacted this time: %s", path, said)
