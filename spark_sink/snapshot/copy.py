"""Copying tables with one exported snapshot, in a thread of its own: what every snapshot does, whichever tables it takes.

The server exports a snapshot and says where in the WAL it is: what was committed before that position is in the snapshot, all
else is in the stream after it, nothing is in both. That is the position of the snapshot's rows. So there is no window to be
looked at, nothing is locked, and the launcher lands the stream meanwhile.

A table comes to its changelog whole or not at all (snapshot/table.py). What is killed or fails leaves the snapshot to the next
run, for a while (client/exported.py): that one goes on with the chunks that are missing (snapshot/progress.py). A table that was
written anew on the server while it was copied (`RewrittenError`) begins anew, with another snapshot.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cdcpipe.errors import CdcpipeError, ConnectionClosedError
from spark_sink.client.exported import ExportedSnapshot, SnapshotError
from spark_sink.files import places as storage
from spark_sink.snapshot import plan as snapshot_plan
from spark_sink.snapshot.plan import LockedError, RewrittenError
from spark_sink.snapshot.table import Copying, copy_table, table_of
from spark_sink.source import datasource as source
from spark_sink.spark import session
from spark_sink.staging.lock import make_root
from spark_sink.staging.log import Epoch, Position, StagingError, list_epochs
from spark_sink.warehouse.lock import TableLock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from spark_sink.launcher.launcher import LauncherConfig
    from spark_sink.schema.table import Table
    from spark_sink.snapshot.plan import Plan, TablePlan
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["CHUNK_BYTES", "Snapshot", "SnapshotProgress"]

_logger = logging.getLogger(__name__)

CHUNK_BYTES = 32 << 20

_TABLES_AT_ONCE = 3
"""So many tables are under way at a time: while one waits for Spark's driver, the executors have another's chunks."""

_JOB_TAG = "cdcpipe-snapshot"
_CANCEL_INTERVAL_S = 0.5

_ROUNDS = 5
"""So often a table that can't be copied with one snapshot is copied with the next."""


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
    """Copies the tables that a subclass chooses; ``name`` is that of a directory of its own.

    For ``hold_s`` somebody may go on where it has ended before its end. The subclass has it export the snapshot, before `start`.
    """

    def __init__(self, config: LauncherConfig, warehouse: Warehouse, name: str, chunk_bytes: int, hold_s: float) -> None:
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
        self._name = name
        self._scratch = warehouse.root / "_cdcpipe" / name
        self._hold_s = hold_s
        self._names: tuple[str, ...] = ()
        """The tables that it is for, "schema.name"; none: whatever is published."""
        self._is_begun = False

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
        """Give up what is not finished."""
        self._stopping = True
        if self._spark is not None and self._thread.is_alive():
            self._spark.sparkContext.cancelJobsWithTag(_JOB_TAG)
            self._thread.join()
        self._release(is_done=False)

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
            if self._error is None or self._hold_s <= 0:
                storage.remove_tree(self._scratch)
            # As long as it is held VACUUM removes nothing that it sees.
            self._release(is_done=self._error is None)

    def _take(self, is_stopping: Callable[[], bool]) -> ExportedSnapshot:
        """Have the server export a snapshot, or go on with the one that was left; as `ExportedSnapshot`."""
        make_root(self.config.staging)
        directory = self.warehouse.local_root(self.config.staging) / "_cdcpipe" / f"{self._name}_export"
        self._export = ExportedSnapshot(self.config, is_stopping, directory, tables=self._names, hold_s=self._hold_s)
        self._is_begun = self._export.is_left_over
        return self._export

    def _release(self, *, is_done: bool) -> None:
        """Let the snapshot go, or leave it to the next run, if that will find anything that belongs to it."""
        if self._export is not None:
            if is_done or not self._is_begun:
                self._export.close()
            else:
                self._export.leave()
            self._export = None

    def _copy(self) -> None:
        """Copy all tables; those of which one snapshot can't be had with another one."""
        self._begin()
        if not self._is_begun:
            storage.remove_tree(self._scratch)  # of a snapshot that has gone
        rewritten: list[Table] = []
        for number in range(_ROUNDS):
            if number:
                assert self._export is not None
                self._export.close()
                storage.remove_tree(self._scratch)
                self._take(lambda: self._stopping)
            rewritten = self._copy_round(is_first=number == 0)
            if not rewritten:
                self._finish()
                return
        raise SnapshotError(
            f"begun again and again, and not copied: {', '.join(map(str, rewritten))}",
            hint="start again when nothing truncates or rewrites these tables",
        )

    def _copy_round(self, *, is_first: bool) -> list[Table]:
        """Copy the tables that are not there yet; return those that need another snapshot."""
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
            leave_out=self._leave_out,
            is_stopping=lambda: self._stopping,
            lock=TableLock(self.warehouse.local_root(self.config.staging)),
        )
        if is_first:
            self._tables = len(wanted)
            self._row_estimate = sum(table.row_estimate for table in wanted)
        self._chunks += sum(len(table.chunks) for table in wanted)
        self._is_begun = True
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
                    _logger.warning("begun again, with another snapshot: %s", error.message)
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

    def _leave_out(self, chunks: int, rows: int) -> None:
        """Show as to be done only what is: these were copied by a run before."""
        with self._lock:
            self._chunks -= chunks
            self._row_estimate = max(self._row_estimate - rows, 0)

    def _position(self, lsn: int) -> Position:
        """Return an LSN as a position: no change that comes after it is of an earlier epoch, and none before it of a later one.

        What was copied by a run before has the position that it had then. If that won't do any more it is copied again.
        """
        path = self._scratch / "position.json"
        noted = storage.read_json(path)
        if noted is not None:
            if noted["lsn"] == lsn and all(epoch.start_lsn >= lsn for epoch in self._epochs if epoch.number > noted["epoch"]):
                return Position(noted["epoch"], noted["lsn"])
            storage.remove_tree(self._scratch)
        numbers = [epoch.number for epoch in self._epochs if epoch.start_lsn <= lsn]
        number = numbers[-1] if numbers else self._epochs[0].number
        storage.make_directory(self._scratch)
        storage.write_json(path, {"epoch": number, "lsn": lsn})
        return Position(number, int(lsn))

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
        raised = session.raised_of(ex)
        if raised is not None and raised[0] == RewrittenError.__name__:
            return RewrittenError(raised[1])
        if self._export is not None:
            self._export.check()
        said = f"table {table_of(table)} could not be copied: {session.reason_of(ex)}"
        kind = ConnectionClosedError if raised is not None and raised[0] == ConnectionClosedError.__name__ else SnapshotError
        return kind(said, hint="start again: what is done stays")
