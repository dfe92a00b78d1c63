"""Copying tables with one exported snapshot, in a thread of its own: what every snapshot does, whichever tables it takes.

The server exports a snapshot and says where in the WAL it is: what was committed before that position is in the snapshot, all
else is in the stream after it, nothing is in both. That is the position of the snapshot's rows. So there is no window to be
looked at, nothing is locked, and the launcher lands the stream meanwhile.

A table comes to its changelog whole or not at all (snapshot_table.py). One that was written anew on the server while it was copied
(`RewrittenError`) begins anew, with another snapshot.
"""

from __future__ import annotations

import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cdcpipe.errors import CdcpipeError
from spark_sink import snapshot_plan, source, storage
from spark_sink.exported import ExportedSnapshot
from spark_sink.snapshot_plan import LockedError, RewrittenError, SnapshotError
from spark_sink.snapshot_table import Copying, copy_table, table_of
from spark_sink.staging import Epoch, Position, StagingError, list_epochs
from spark_sink.table_lock import TableLock

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from spark_sink.launcher import LauncherConfig
    from spark_sink.snapshot_plan import Plan, TablePlan
    from spark_sink.warehouse import Table, Warehouse

__all__ = ["CHUNK_BYTES", "Snapshot", "SnapshotProgress"]

_logger = logging.getLogger(__name__)

CHUNK_BYTES = 32 << 20

_TABLES_AT_ONCE = 3
"""So many tables are under way at a time: while one waits for Spark's driver, the executors have another's chunks."""

_JOB_TAG = "cdcpipe-snapshot"
_CANCEL_INTERVAL_S = 0.5

_ROUNDS = 5
"""So often a table that is written anew while it is copied is begun again."""


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """How far a snapshot is; rows and chunks are of this run."""

    tables: int = 0
    tables_done: int = 0
    rows: int = 0
    row_estimate: int = 0
    chunks: int = 0
    chunks_done: int = 0


class Snapshot:
    """Copies the tables that a subclass chooses; ``scratch`` is a directory of its own on the warehouse's file system.

    The subclass gets the exported snapshot, too, before `start`.
    """

    def __init__(self, config: LauncherConfig, warehouse: Warehouse, scratch: Path, chunk_bytes: int) -> None:
        self.config = config
        self.warehouse = warehouse
        self.copied: dict[Table, tuple[int, Position]] = {}
        """The tables that are done: how many rows, as of which position."""
        self._chunk_bytes = chunk_bytes
        self._export: ExportedSnapshot | None = None
        self._spark: SparkSession | None = None
        self._thread = threading.Thread(target=self._run, name="cdcpipe-snapshot", daemon=True)
        self._error: BaseException | None = None
        self._stopping = False
        self._lock = threading.Lock()
        self._epochs: list[Epoch] = []
        self._tables = self._tables_done = self._row_estimate = self._chunks = 0
        self._counts: tuple[Any, Any] | None = None
        self._scratch = scratch

    # --- for its owner ---

    def start(self, spark: SparkSession, staging: Path | str) -> None:
        """Begin to copy; return at once. The launcher has begun its epoch."""
        assert self._export is not None
        epochs = list_epochs(staging)
        if not epochs:
            raise StagingError(f"{staging} holds no log yet", hint="start a launcher on it first")
        self._bind(epochs[-1])
        self._epochs = epochs
        self._spark = spark
        source.register(spark)  # executors need this code
        self._counts = (spark.sparkContext.accumulator(0), spark.sparkContext.accumulator(0))
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, and raise the error if there was one; return False if it has not ended in time."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """Give up what is not finished, and let the snapshot go."""
        self._stopping = True
        if self._spark is not None and self._thread.is_alive():
            self._spark.sparkContext.cancelJobsWithTag(_JOB_TAG)
            self._thread.join()
        self._release()

    @property
    def progress(self) -> SnapshotProgress:
        """How far it is, at this moment."""
        rows, chunks = (0, 0) if self._counts is None else (self._counts[0].value, self._counts[1].value)
        return SnapshotProgress(self._tables, self._tables_done, rows, self._row_estimate, self._chunks, chunks)

    # --- the snapshot's thread ---

    def _bind(self, epoch: Epoch) -> None:
        """See to it that the warehouse is that of the log."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Do what there is to do before a table is copied."""

    def _choose(self, plan: Plan) -> list[TablePlan]:
        """Return the published tables that are to be copied and have not been."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Do what there is to do when all tables are copied."""

    def _run(self) -> None:
        try:
            self._copy()
        except BaseException as ex:  # noqa: BLE001 - it is raised again in the thread that waits
            self._error = ex
        finally:
            storage.remove_tree(self._scratch)
            # As long as it is held VACUUM removes nothing that it sees.
            self._release()

    def _release(self) -> None:
        if self._export is not None:
            self._export.close()
            self._export = None

    def _copy(self) -> None:
        """Copy all tables; those that were written anew meanwhile again, with another snapshot."""
        self._begin()
        storage.remove_tree(self._scratch)  # a killed run's
        rewritten: list[Table] = []
        for number in range(_ROUNDS):
            if number:
                assert self._export is not None
                self._export.close()
                self._export = ExportedSnapshot(self.config, lambda: self._stopping)
            rewritten = self._copy_round(is_first=number == 0)
            if not rewritten:
                self._finish()
                return
            _logger.warning(
                "begun again, because they were written anew while they were copied: %s", ", ".join(map(str, rewritten))
            )
        raise SnapshotError(
            f"written anew on the server, again and again, while they were copied: {', '.join(map(str, rewritten))}",
            hint="start again when nothing truncates or rewrites these tables",
        )

    def _copy_round(self, *, is_first: bool) -> list[Table]:
        """Copy the tables that are not there yet; return those that were written anew meanwhile."""
        export = self._export
        assert export is not None
        assert self._spark is not None
        assert self._counts is not None
        connection = snapshot_plan.conninfo(export.connection, export.prepared.server_version)
        plan = self._plan(connection, export.name)
        wanted = self._choose(plan)
        copying = Copying(
            spark=self._spark,
            warehouse=self.warehouse,
            scratch=self._scratch,
            connection=connection,
            snapshot=export.name,
            position=self._position(int(export.consistent_point)),
            time_us=plan.time_us,
            is_utf8=plan.is_utf8,
            rows=self._counts[0],
            chunks=self._counts[1],
            is_stopping=lambda: self._stopping,
            lock=TableLock(self.warehouse.local_root(self.config.staging)),
        )
        if is_first:
            self._tables = len(wanted)
            self._row_estimate = sum(table.row_estimate for table in wanted)
        self._chunks += sum(len(table.chunks) for table in wanted)
        rewritten = []

        def copy(table: TablePlan) -> Table | None:
            if self._stopping:
                return None
            copying.spark.sparkContext.addJobTag(_JOB_TAG)
            try:
                count = copy_table(copying, table)
            except Exception as ex:
                error = self._error_of(ex, table)
                if isinstance(error, RewrittenError):
                    return table_of(table)
                raise error from ex
            with self._lock:
                self._tables_done += 1
                self.copied[table_of(table)] = count, copying.position
            return None

        with ThreadPoolExecutor(_TABLES_AT_ONCE, "cdcpipe-snapshot") as pool:
            # The large ones first: what comes last is done by one thread alone.
            futures = [pool.submit(copy, table) for table in sorted(wanted, key=lambda table: -len(table.chunks))]
            try:
                rewritten = [name for name in (future.result() for future in futures) if name is not None]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                # One that is just about to start a job is caught the next time.
                # (What was cancelled before it began never counts as done.)
                begun = [future for future in futures if not future.cancelled()]
                while wait(begun, _CANCEL_INTERVAL_S).not_done:
                    copying.spark.sparkContext.cancelJobsWithTag(_JOB_TAG)
                raise
        if self._stopping:
            raise SnapshotError(
                "the snapshot was not finished: it was stopped", hint="start again: it goes on with the other tables"
            )
        return rewritten

    def _position(self, lsn: int) -> Position:
        """Return an LSN as a position: no change that comes after it is of an earlier epoch."""
        numbers = [epoch.number for epoch in self._epochs if epoch.start_lsn <= lsn]
        return Position(numbers[-1] if numbers else self._epochs[0].number, lsn)

    def _plan(self, connection: str, snapshot: str) -> Plan:
        """Look the tables up; wait for one that is locked."""
        is_told = False
        while True:
            try:
                return snapshot_plan.make_plan(connection, snapshot, self.config.publications, self._chunk_bytes)
            except LockedError as ex:
                if self._stopping:
                    raise
                if not is_told:
                    _logger.warning("waiting: %s", ex.message)
                is_told = True

    def _error_of(self, ex: Exception, table: TablePlan) -> CdcpipeError:
        """Return an error of ours for one that Spark wrapped, in one line."""
        if isinstance(ex, CdcpipeError):
            return ex
        if self._stopping:
            return SnapshotError("the snapshot was not finished: it was stopped")
        raised = re.findall(r"^(?:[a-z_]+\.)*([A-Z]\w*Error): (.+)$", str(ex), re.MULTILINE)
        if raised and raised[-1][0] == RewrittenError.__name__:
            return RewrittenError(raised[-1][1])
        if self._export is not None:
            self._export.check()
        detail = raised[-1][1] if raised else str(ex).strip().partition("\n")[0]
        return SnapshotError(f"table {table_of(table)} could not be copied: {detail}", hint="start again: what is done stays")
