"""The initial snapshot: what the tables held before the first change of the stream, as the beginning of changelog and replica.

    snapshot = InitialSnapshot(config, warehouse)
    snapshot.prepare(lambda: False)         # makes the slot, if there is none: before the launcher starts
    if snapshot.is_needed:
        snapshot.start(spark, staging)      # returns at once
        snapshot.wait()

The server exports a snapshot and says where in the WAL it is: what was committed before that position is in the snapshot, all
else is in the stream after it, nothing is in both. That is the position of the snapshot's rows, and where the changelog of
their table begins. So there is no window to be looked at, nothing is locked, and the launcher lands the stream meanwhile.

A table appears whole or not at all: executors write its files into a directory that nobody reads, which becomes the table by
being renamed. What is there after a crash is done; a table that was not finished begins anew, with a snapshot of then, and
its changelog begins there. So does one that was written anew on the server while it was copied (`RewrittenError`).

`_cdcpipe/snapshot.json` in the warehouse says that a snapshot is to be taken, before the slot is made, and when all is done.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cdcpipe.errors import CdcpipeError
from spark_sink import changelog, snapshot_plan, source
from spark_sink.exported import ExportedSnapshot, slot_exists
from spark_sink.snapshot_plan import LockedError, RewrittenError, SnapshotError
from spark_sink.snapshot_table import Copying, copy_table, table_of
from spark_sink.staging import Position, StagingError, list_epochs, read_json, write_json
from spark_sink.warehouse import Table, Warehouse, WarehouseError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from spark_sink.launcher import LauncherConfig
    from spark_sink.snapshot_plan import Plan, TablePlan

__all__ = ["CHUNK_BYTES", "InitialSnapshot", "SnapshotProgress"]

_logger = logging.getLogger(__name__)

FORMAT = 1
"""The version of snapshot.json."""

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


class InitialSnapshot:
    """Copies every published table that has no changelog yet.

    ``mode`` is ``initial``, ``never``, or None: initial where the slot is made now. One that was begun is gone on with,
    unless it is ``never``.
    """

    def __init__(
        self, config: LauncherConfig, warehouse: Warehouse, mode: str | None = None, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.config = config
        self.warehouse = warehouse
        self.is_needed = False
        self._mode = mode
        self._chunk_bytes = chunk_bytes
        self._export: ExportedSnapshot | None = None
        self._spark: SparkSession | None = None
        self._thread = threading.Thread(target=self._run, name="cdcpipe-snapshot", daemon=True)
        self._error: BaseException | None = None
        self._stopping = False
        self._lock = threading.Lock()
        self._epoch = 0
        self._tables = self._tables_done = self._row_estimate = self._chunks = 0
        self._counts: tuple[Any, Any] | None = None
        self._scratch = warehouse.root / "_cdcpipe/snapshot"

    # --- for its owner ---

    def prepare(self, is_stopping: Callable[[], bool]) -> None:
        """Find out whether there is something to copy, and get the snapshot then, which may make the slot.

        Returns early, with nothing to do, once ``is_stopping`` says so.
        """
        found = read_json(self._path)
        if found is not None and found.get("version") != FORMAT:
            raise WarehouseError(f"{self._path} has version {found.get('version')!r}; this program knows {FORMAT}")
        if found is not None and found.get("slot") != self.config.slot:
            raise WarehouseError(f"{self._path} is the slot {found.get('slot')!r}'s", hint="give each slot a warehouse of its own")
        is_unfinished = found is not None and not found["is_complete"]
        if self._mode == "never":
            if is_unfinished:
                _logger.warning("the initial snapshot was not finished, and is left so: tables without it have changes alone")
            return
        if found is None:
            is_unfinished = self._mode == "initial" or (self.config.create_slot and not slot_exists(self.config))
            if is_unfinished:
                # Before there is a slot: whoever finds that one later can't tell any more whether it was new.
                self._note(is_complete=False)
        if is_unfinished:
            try:
                self._export = ExportedSnapshot(self.config, is_stopping)
            except InterruptedError:
                return
            self.is_needed = True

    def start(self, spark: SparkSession, staging: Path | str) -> None:
        """Begin to copy; return at once. The launcher has begun its epoch."""
        assert self._export is not None
        epochs = list_epochs(staging)
        if not epochs:
            raise StagingError(f"{staging} holds no log yet", hint="start a launcher on it first")
        self.warehouse.open(epochs[-1])
        self._epoch = epochs[-1].number
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
        if self._export is not None:
            self._export.close()
            self._export = None

    @property
    def progress(self) -> SnapshotProgress:
        """How far it is, at this moment."""
        rows, chunks = (0, 0) if self._counts is None else (self._counts[0].value, self._counts[1].value)
        return SnapshotProgress(self._tables, self._tables_done, rows, self._row_estimate, self._chunks, chunks)

    # --- the snapshot's thread ---

    @property
    def _path(self) -> Path:
        return self.warehouse.root / "_cdcpipe/snapshot.json"

    def _note(self, *, is_complete: bool) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {"version": FORMAT, "slot": self.config.slot, "is_complete": is_complete})

    def _run(self) -> None:
        try:
            self._copy()
        except BaseException as ex:  # noqa: BLE001 - it is raised again in the thread that waits
            self._error = ex
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _copy(self) -> None:
        """Copy all tables; those that were written anew meanwhile again, with another snapshot."""
        shutil.rmtree(self._scratch, ignore_errors=True)  # a killed run's
        rewritten: list[Table] = []
        for number in range(_ROUNDS):
            if number:
                assert self._export is not None
                self._export.close()
                self._export = ExportedSnapshot(self.config, lambda: self._stopping)
            rewritten = self._copy_round(is_first=number == 0)
            if not rewritten:
                self._note(is_complete=True)
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
        wanted = [table for table in plan.tables if not changelog.exists(self.warehouse, table_of(table))]
        copying = Copying(
            spark=self._spark,
            warehouse=self.warehouse,
            scratch=self._scratch,
            connection=connection,
            snapshot=export.name,
            position=Position(self._epoch, int(export.consistent_point)),
            time_us=plan.time_us,
            is_utf8=plan.is_utf8,
            rows=self._counts[0],
            chunks=self._counts[1],
            is_stopping=lambda: self._stopping,
        )
        if is_first:
            self._tables, self._tables_done = len(plan.tables), len(plan.tables) - len(wanted)
            self._row_estimate = sum(table.row_estimate for table in wanted)
        self._chunks += sum(len(table.chunks) for table in wanted)
        rewritten = []

        def copy(table: TablePlan) -> Table | None:
            if self._stopping:
                return None
            copying.spark.sparkContext.addJobTag(_JOB_TAG)
            try:
                copy_table(copying, table)
            except Exception as ex:
                error = self._error_of(ex, table)
                if isinstance(error, RewrittenError):
                    return table_of(table)
                raise error from ex
            with self._lock:
                self._tables_done += 1
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
