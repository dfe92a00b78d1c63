"""Copies tables with an exported snapshot, in a thread. The base of the three kinds of snapshot (initial.py, tables.py, gap.py).

The server exports a snapshot, and tells its position in the WAL. Everything committed before that position is in the snapshot;
everything else is in the stream after it; nothing is in both. The snapshot's rows get this position. So nothing has to be compared
or locked, and the launcher lands the stream meanwhile.

A table is added to its changelog completely or not at all (snapshot/table.py). After a kill or an error the server holds the
snapshot for a while (client/exported.py), and the next run continues with the missing chunks (snapshot/progress.py).

Only the server that the log follows counts, on the timeline of the log's last epoch. An old primary that has come back is refused.
A copy that reaches a server that was promoted before the launcher does waits for the launcher.

Two things make another snapshot necessary. During a table's copy the server has rewritten the table, or changes from after its
position were purged (`StaleSnapshotError`): this table is copied from its beginning. Or the server has restarted, and so has
dropped the snapshot: then all tables that are not finished are copied from their beginning.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from cdcpipe.errors import CdcpipeError, ConnectionClosedError, UnreachableError
from cdcpipe.retry import RetryPolicy
from cdcpipe.threads import Worker
from spark_sink.client.exported import STOPPED, ExportedSnapshot, SnapshotError, drop_left
from spark_sink.files import places
from spark_sink.files.system_hints import hint_in
from spark_sink.replica import merge
from spark_sink.schema.table import Table
from spark_sink.snapshot import plan as snapshot_plan
from spark_sink.snapshot.chunk import NOT_UTF8, NOT_UTF8_HINT
from spark_sink.snapshot.homes import Homes
from spark_sink.snapshot.plan import LockedError, StaleSnapshotError
from spark_sink.snapshot.table import Copying, copy_table
from spark_sink.source import datasource
from spark_sink.spark.failure import raised_of, reason_of
from spark_sink.spark.jobs import Jobs
from spark_sink.staging import copied
from spark_sink.staging.lock import make_root
from spark_sink.staging.log import Epoch, OtherSourceError, Position, StagingError, list_epochs
from spark_sink.staging.same_source import check_source, is_elsewhere
from spark_sink.warehouse import landed_snapshots
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.mask_settings import settle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from spark_sink.client.prepare import Prepared
    from spark_sink.launcher.config import LauncherConfig
    from spark_sink.snapshot.plan import Plan, TablePlan
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["CHUNK_BYTES", "FOLLOW_S", "Snapshot", "SnapshotProgress", "finish_killed", "when_back"]

_logger = logging.getLogger(__name__)

T = TypeVar("T")

CHUNK_BYTES = 32 << 20

_TABLES_AT_ONCE = 3
"""The default number of tables copied at a time. While one table waits for Spark's driver, the executors copy another's chunks."""

_ROUNDS = 5
"""How often a table that could not be copied with one snapshot is tried with the next one."""

_LOSS_S = 2.0
_RESTART = RetryPolicy(within_s=300.0, first_pause_s=1.0, longest_pause_s=5.0)
"""How long a snapshot waits for a server that is away. The launcher, which waits for longer, ends the run if it gives up."""
FOLLOW_S = 300.0
"""How long a snapshot of a server that was promoted waits by default until the launcher has begun to read from it."""
_FOLLOW_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """How far a snapshot is. Rows and chunks are those that this run has read, also for a snapshot that was lost."""

    tables: int = 0
    tables_done: int = 0
    rows: int = 0
    row_estimate: int = 0
    chunks: int = 0
    chunks_done: int = 0
    elapsed_s: float = 0.0
    """The time since the start, once it has ended until then."""
    waits_for_tables: bool = False
    """Whether a table waits until the copy has the tables alone: for merges, OPTIMIZE or a purge, which may take hours."""


class Snapshot:
    """Copies the tables that a subclass chooses, with files in the directory ``_cdcpipe/NAME``.

    If the copy stops early, the next run can resume within ``hold_s`` seconds. The subclass must call `_take`, which exports the
    snapshot, before its owner calls `start`.
    """

    waits_for_names: ClassVar[bool] = True
    """Whether a table is refused if the stream may still tell that it was renamed (homes.py)."""
    finishes_killed: ClassVar[bool] = True
    """Whether snapshots that killed processes have left unfinished are finished before the first table is copied."""

    def __init__(self, config: LauncherConfig, warehouse: Warehouse, name: str, chunk_bytes: int, hold_s: float) -> None:
        self.config = config
        self.warehouse = warehouse
        self.copied: dict[Table, tuple[int, Position]] = {}
        """For each finished table: the number of its rows, and its position."""
        self.tables_at_once = _TABLES_AT_ONCE
        self.follow_s = FOLLOW_S
        """How long to wait until the launcher reads from the server that the snapshot is of."""
        self._chunk_bytes = chunk_bytes
        self._export: ExportedSnapshot | None = None
        self._spark: SparkSession | None = None
        self._thread = Worker(target=self._run, name="cdcpipe-snapshot", daemon=True)
        self._jobs = Jobs("snapshot")
        self._tables_lock: TableLock | None = None
        """Made by `start`: with a warehouse in an object store it is in the staging directory, which a launcher has made."""
        self._error: BaseException | None = None
        self._stopping = False
        self._lock = threading.Lock()
        self._epochs: list[Epoch] = []
        self._tables = self._row_estimate = self._chunks = 0
        self._counts: tuple[Any, Any] | None = None
        self._name = name
        self._scratch = warehouse.root / "_cdcpipe" / name
        self._hold_s = hold_s
        self._names: tuple[str, ...] = ()
        """The tables to copy, as "schema.name"; empty for all published tables."""
        self._on_held: Callable[[], None] = lambda: None
        """Called before a snapshot is taken, as soon as no other process can take it."""
        self._is_begun = False
        self._started_at: float | None = None
        self._ended_at: float | None = None

    # --- for its owner ---

    def start(self, spark: SparkSession, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """Start the copying thread, and return at once. The launcher must have begun its epoch.

        If the masks have changed, wait for a process that has the tables alone. Raises InterruptedError once ``is_stopping`` is
        True.
        """
        assert self._export is not None
        staging = self.config.staging
        epochs = list_epochs(staging)
        if not epochs:
            raise StagingError(f"{staging} has no log yet", hint="start a launcher on it first")
        self._epochs = epochs
        self._bind(epochs[-1])
        root = self.warehouse.local_root(staging)
        settle(self.warehouse, TableLock(root, is_stopping), staging)
        self._tables_lock = TableLock(root, lambda: self._stopping)
        self._spark = spark
        datasource.register(spark)  # executors need this code
        self._counts = (spark.sparkContext.accumulator(0), spark.sparkContext.accumulator(0))
        self._started_at = time.monotonic()
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the copy, and raise its error if it has one. Returns False if ``timeout_s`` have passed."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """Stop the copy. Unfinished tables are left to the next run."""
        self._stopping = True
        if self._spark is not None:
            self._jobs.cancel_until(self._spark, self._thread.wait)
        self._release(is_done=False)

    @property
    def progress(self) -> SnapshotProgress:
        """How far the copy is at this moment."""
        rows, chunks = (0, 0) if self._counts is None else (self._counts[0].value, self._counts[1].value)
        elapsed_s = 0.0 if self._started_at is None else (self._ended_at or time.monotonic()) - self._started_at
        waits = self._tables_lock is not None and self._tables_lock.is_waiting
        return SnapshotProgress(self._tables, len(self.copied), rows, self._row_estimate, self._chunks, chunks, elapsed_s, waits)

    # --- the snapshot's thread ---

    def _bind(self, epoch: Epoch) -> None:
        """Raise WarehouseError unless the warehouse belongs to the log."""
        raise NotImplementedError

    def _choose(self, plan: Plan, homes: Homes) -> list[TablePlan]:
        """Return the published tables that still have to be copied. ``homes`` has their tables in the warehouse."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Record the end, after all tables are copied."""

    def _run(self) -> None:
        try:
            self._copy()
        except BaseException as ex:  # noqa: BLE001 - `wait` raises it again in its own thread
            self._error = ex
        finally:
            if self._error is None or self._hold_s <= 0:
                places.remove_tree(self._scratch)
            # Release the snapshot in any case: while the server holds it, PostgreSQL's VACUUM cannot remove rows that it sees.
            self._release(is_done=self._error is None)
            self._ended_at = time.monotonic()

    def _take(self, is_stopping: Callable[[], bool]) -> ExportedSnapshot:
        """Let the server export a snapshot, or continue with the snapshot of an earlier run (see `ExportedSnapshot`)."""
        make_root(self.config.staging)
        directory, tables = _export_directory(self.warehouse, self.config.staging, self._name), self._names
        self._export = ExportedSnapshot(
            self.config, is_stopping, directory, tables=tables, hold_s=self._hold_s, on_held=self._on_held
        )
        self._is_begun = self._export.is_left_over
        return self._export

    def _drop_left(self) -> None:
        """Remove what an earlier process has left, and let the server drop its snapshot."""
        drop_left(_export_directory(self.warehouse, self.config.staging, self._name))
        places.remove_tree(self._scratch)

    def _release(self, *, is_done: bool) -> None:
        """Let the server drop the snapshot; or leave it to the next run, if there are chunks with which that can continue."""
        if self._export is not None:
            if is_done or not self._is_begun:
                self._export.close()
            else:
                self._export.leave()
            self._export = None

    def _copy(self) -> None:
        """Copy all tables. Those that this snapshot can't give are copied with another one."""
        assert self._spark is not None
        assert self._tables_lock is not None
        if self.finishes_killed:
            finish_killed(self._spark, self.warehouse, self._tables_lock)
        if not self._is_begun:
            places.remove_tree(self._scratch)  # files of an earlier snapshot, which the server does not hold any more
        losses = rewrites = 0
        while True:
            try:
                rewritten = self._copy_round()
            except CdcpipeError as ex:
                losses += 1
                # A standby keeps its snapshots when it is promoted: the first one may only be from before that.
                is_older = losses == 1 and isinstance(ex, OtherSourceError) and not self._stopping
                if losses == _ROUNDS or not (is_older or self._is_lost(ex)):
                    raise
                _logger.warning("%s; the tables that are not finished are copied with another snapshot", ex.message)
            else:
                if not rewritten:
                    self._finish()
                    return
                rewrites += 1
                if rewrites == _ROUNDS:
                    raise SnapshotError(
                        f"not copied, because none of {_ROUNDS} snapshots could give them: {', '.join(map(str, rewritten))}",
                        hint="start again when nothing truncates, rewrites or purges these tables: the warnings above say what did",
                    )
            self._take_another()

    def _is_lost(self, error: CdcpipeError) -> bool:
        """Tell whether the server has dropped the snapshot. If ``error`` is a lost connection, others may end a moment later."""
        if self._stopping or self._export is None:
            return False
        return self._export.is_lost(_LOSS_S if isinstance(error, ConnectionClosedError) else 0.0)

    def _take_another(self) -> None:
        """Take another snapshot. Waits a while for a server that restarts."""
        self._release(is_done=True)
        places.remove_tree(self._scratch)
        when_back(lambda: self._take(lambda: self._stopping), lambda: self._stopping)

    def _copy_round(self) -> list[Table]:
        """Copy the tables that are not copied yet; return those that need another snapshot."""
        export = self._export
        assert export is not None
        assert self._counts is not None
        connection = snapshot_plan.conninfo(export.connection, export.prepared.server_version)
        plan = self._plan(connection, export.name)
        self._epochs = self._await_epoch(export.prepared)
        copied.record(self.config.staging, int(export.consistent_point))
        homes = Homes(self.warehouse)
        wanted = self._choose(plan, homes)
        copying = self._copying(export, connection, is_utf8=plan.is_utf8)
        if self.waits_for_names:
            for each in wanted:
                homes.check(each.relation, copying.position.lsn)
        rows, chunks = self._counts
        self._tables = len(self.copied) + len(wanted)
        self._row_estimate = rows.value + sum(table.row_estimate for table in wanted)
        self._chunks = chunks.value + sum(len(table.chunks) for table in wanted)
        self._is_begun = True
        rewritten = self._copy_all(copying, wanted, homes)
        if self._stopping:
            raise SnapshotError(STOPPED, hint="start again: it continues with the other tables")
        return rewritten

    def _copying(self, export: ExportedSnapshot, connection: str, *, is_utf8: bool) -> Copying:
        """Return what the copies of all tables share. This notes the position, which the log's epochs must cover already."""
        assert self._spark is not None
        assert self._counts is not None
        assert self._tables_lock is not None
        rows, chunks = self._counts
        return Copying(
            spark=self._spark,
            warehouse=self.warehouse,
            scratch=self._scratch,
            connection=connection,
            snapshot=export.name,
            position=self._position(int(export.consistent_point)),
            time_us=export.time_us,
            is_utf8=is_utf8,
            rows=rows,
            chunks=chunks,
            leave_out=self._leave_out,
            is_stopping=lambda: self._stopping,
            lock=self._tables_lock,
        )

    def _copy_all(self, copying: Copying, wanted: Sequence[TablePlan], homes: Homes) -> list[Table]:
        """Copy some tables at the same time; return those that need another snapshot. An error cancels the other copies."""
        with ThreadPoolExecutor(self.tables_at_once, "cdcpipe-snapshot") as pool:
            # Start with the large tables, so that at the end no single thread copies a large one alone.
            ordered = sorted(wanted, key=lambda table: -len(table.chunks))
            futures = [pool.submit(self._copy_one, copying, table, homes) for table in ordered]
            try:
                return [name for name in (future.result() for future in futures) if name is not None]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                # A future that was cancelled before it began never counts as done, so it is left out.
                begun = [future for future in futures if not future.cancelled()]
                self._jobs.cancel_until(copying.spark, lambda timeout_s: not wait(begun, timeout_s).not_done)
                raise

    def _copy_one(self, copying: Copying, plan: TablePlan, homes: Homes) -> Table | None:
        """Copy a table, unless the copy is to stop. Returns the table if it needs another snapshot."""
        if self._stopping:
            return None
        self._jobs.include_mine(copying.spark)
        table = homes.of(plan.relation)
        try:
            count = copy_table(copying, plan, table)
        except Exception as ex:
            error = self._error_of(ex, plan)
            if isinstance(error, StaleSnapshotError):
                _logger.warning("copying the table again, with another snapshot: %s", error.message)
                return table
            if error is ex:  # its cause stays
                raise
            raise error from ex
        with self._lock:
            self.copied[table] = count, copying.position
        return None

    def _refuse_other_server(self, prepared: Prepared) -> list[Epoch]:
        """Return the log's epochs. Raises OtherSourceError if the server is an old primary, or none that the log may go on with."""
        config, epochs = self.config, list_epochs(self.config.staging)
        server = prepared.system_id, prepared.timeline, prepared.database
        is_accepted = config.accept_system_id == prepared.system_id
        check_source(config.staging, epochs[-1], *server, config.slot, is_accepted=is_accepted)
        return epochs

    def _await_epoch(self, prepared: Prepared) -> list[Epoch]:
        """Return the log's epochs once the last one is of the server, and of the timeline, that ``prepared`` describes.

        A position means something only there. Nothing is recorded before: after a failover, the launcher would take the position of
        a copy from the new timeline for one from the old timeline, and so for rows that the new primary never had.
        """
        ends_at, is_told = time.monotonic() + self.follow_s, False
        while is_elsewhere((epochs := self._refuse_other_server(prepared))[-1], prepared):
            there = f"timeline {prepared.timeline} of the server with system id {prepared.system_id}"
            if self._stopping:
                raise SnapshotError(STOPPED)
            if time.monotonic() >= ends_at:
                raise SnapshotError(
                    f"not copied, because {self.config.staging} has nothing from {there} yet",
                    hint="let cdcpipe-spark run or land begin to read from this server, and start again",
                )
            if not is_told:
                _logger.warning("waiting until run or land has begun to read from %s", there)
            is_told = True
            time.sleep(_FOLLOW_POLL_S)
        return epochs

    def _leave_out(self, chunks: int, rows: int) -> None:
        """Subtract chunks and rows that an earlier run has copied from the work to do."""
        with self._lock:
            self._chunks -= chunks
            self._row_estimate = max(self._row_estimate - rows, 0)

    def _position(self, lsn: int) -> Position:
        """Return the position of an LSN, in the epoch that covers it: changes after it are in this epoch or a later one.

        The chunks of an earlier run have the position of that run. If the position is another one now, they are copied again.
        """
        path = self._scratch / "position.json"
        noted = places.read_json(path)
        if noted is not None:
            if noted["lsn"] == lsn and all(epoch.start_lsn >= lsn for epoch in self._epochs if epoch.number > noted["epoch"]):
                return Position(noted["epoch"], noted["lsn"])
            places.remove_tree(self._scratch)
        numbers = [epoch.number for epoch in self._epochs if epoch.start_lsn <= lsn]
        number = numbers[-1] if numbers else self._epochs[0].number
        places.make_directory(self._scratch)
        places.write_json(path, {"epoch": number, "lsn": lsn})
        return Position(number, int(lsn))

    def _plan(self, connection: str, snapshot: str) -> Plan:
        """Look up the tables to copy. Waits while one of them is locked, and the server can't tell its row filter."""
        is_told = False
        while True:
            try:
                return snapshot_plan.make_plan(connection, snapshot, self.config.publications, self._chunk_bytes, self._names)
            except LockedError as ex:
                if self._stopping:
                    raise
                if not is_told:
                    _logger.warning("waiting: %s", ex.message)
                is_told = True

    def _error_of(self, ex: Exception, table: TablePlan) -> CdcpipeError:
        """Return the error to raise for an error of the table's Spark job. Spark may have wrapped an error of a task."""
        if isinstance(ex, CdcpipeError):
            return ex
        if self._stopping:
            return SnapshotError(STOPPED)
        raised = raised_of(ex)
        if raised is not None and raised[0] == StaleSnapshotError.__name__:
            return StaleSnapshotError(raised[1])
        if self._export is not None:
            self._export.check()
        if raised is not None and NOT_UTF8 in raised[1]:
            return SnapshotError(raised[1], hint=NOT_UTF8_HINT)
        said = f"cannot copy table {Table.of(table.relation)}: {reason_of(ex)}"
        kind = ConnectionClosedError if raised is not None and raised[0] == ConnectionClosedError.__name__ else SnapshotError
        return kind(said, hint=f"{hint_in(said) or snapshot_plan.service_hint(said) or 'start again'}: finished tables stay")


def when_back(ask: Callable[[], T], is_stopping: Callable[[], bool]) -> T:
    """Call ``ask``, which asks the server, and return its answer. While the server is away, call it again for some minutes."""

    def is_away(ex: Exception) -> bool:
        return isinstance(ex, (UnreachableError, ConnectionClosedError)) and not is_stopping()

    return _RESTART.call(ask, CdcpipeError, where=is_away)


def _export_directory(warehouse: Warehouse, staging: Path, name: str) -> Path:
    return warehouse.local_root(staging) / "_cdcpipe" / f"{name}_export"


def finish_killed(spark: SparkSession, warehouse: Warehouse, lock: TableLock) -> None:
    """Finish the snapshots that killed processes have left unfinished. Raises InterruptedError for a stop (`TableLock`).

    If there is none, this does not wait for merges, which may take hours.
    """
    if landed_snapshots.unfinished(warehouse):
        with lock.alone():
            merge.finish_snapshots(spark, warehouse, lock.is_stopping)
