"""Copies tables anew whose rows the stream cannot tell, while the stream goes on.

    healer = Healer(spark, config, warehouse, schedule)
    healer.start()              # a thread, until stop()
    with healer.paused():       # another snapshot copies tables
        ...
    healer.finish()             # or, without the thread: copy every table that waits, and return

Other parts of the pipeline record with `wanted_copies.want_copy` which tables wait. The healer itself looks at the catalog from
time to time (catalog_look.py), chooses the tables (schedule.py), and copies them as ``cdcpipe-spark snapshot`` does (tables.py). It
holds the same lock as that command, so that no two snapshots copy a table at the same time. If that command was killed amid a
table, the healer finishes the table: until then its replica and its history wait.

An error here does no harm: the table keeps waiting, its record names the error, and it is tried again later. So it is a warning,
and does not end the run. One error does: a column is published that ``--exclude-column`` names, so its values come with the stream.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cdcpipe.errors import ExcludedColumnError
from cdcpipe.logs import Told
from cdcpipe.lsn import format_lsn
from cdcpipe.running_time import RunningTime
from cdcpipe.threads import Worker
from cdcpipe.units import few, format_duration
from spark_sink.client.exported import SnapshotError
from spark_sink.files.lock import hold_alone
from spark_sink.snapshot.catalog_look import CatalogLook
from spark_sink.snapshot.copy import CHUNK_BYTES, FOLLOW_S, finish_killed
from spark_sink.snapshot.homes import Homes
from spark_sink.snapshot.schedule import FAILURES
from spark_sink.snapshot.tables import SNAPSHOT_LOCK, TableSnapshot
from spark_sink.spark.failure import said_of
from spark_sink.warehouse import gaps, landed_snapshots, last_look, wanted_copies
from spark_sink.warehouse.lock import TableLock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from spark_sink.launcher.config import LauncherConfig
    from spark_sink.schema.table import Table
    from spark_sink.snapshot.copy import SnapshotProgress
    from spark_sink.snapshot.schedule import Schedule
    from spark_sink.staging.log import Position
    from spark_sink.warehouse.wanted_copies import WantedCopy
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["Healer"]

_logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S: Final = 60.0
"""How often to look at the catalog."""
_SHORTEST_LOOK_INTERVAL_S: Final = 5.0
"""The same, while tables come that the pipeline did not know."""
_UNABLE_S: Final = 600.0
"""For how long looks may fail before this is said, and how long after that it is said again."""
_UNABLE: Final = (
    "run could not look at the catalog, so it did not notice tables that came, were rewritten, or got a partition or a key"
)
_LOCKED: Final = (
    "look for a lock: SELECT pid, pg_blocking_pids(pid), query FROM pg_stat_activity WHERE cardinality(pg_blocking_pids(pid)) > 0;"
    " run will try the copy again by itself"
)
_AGAIN: Final = "trying again"
_ALONE: Final = "each of them is tried alone now"
_NEXT_RUN: Final = "the next run tries again"
"""What comes after a failure, in words."""
_TICK_S: Final = 1.0
_WAIT_S: Final = 0.2
_STALLED_S: Final = 1800.0
"""A copy that reads nothing for this long is given up for now: its tables may be locked, and others wait."""


class Healer:
    """Copies the tables that wait, one snapshot at a time.

    ``copies_new``: whether a table that comes into a publication is copied. ``on_copied`` is called with the tables that were
    copied. ``is_stopping`` ends `finish` early.
    """

    def __init__(
        self,
        spark: SparkSession,
        config: LauncherConfig,
        warehouse: Warehouse,
        schedule: Schedule,
        *,
        copies_new: bool = True,
        chunk_bytes: int = CHUNK_BYTES,
        hold_s: float = 0.0,
        on_copied: Callable[[Sequence[Table]], None] = lambda _: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._spark = spark
        self._config = replace(config, create_slot=False)  # a slot that is gone is a gap, and not ours to make
        self._warehouse = warehouse
        self._schedule = schedule
        self._catalog = CatalogLook(self._config, warehouse, copies_new=copies_new)
        self._chunk_bytes = chunk_bytes
        self._hold_s = hold_s
        self._on_copied = on_copied
        self._is_stopping = is_stopping
        self._stopping = threading.Event()
        self._pausing = threading.Event()
        self._busy = threading.Lock()
        """Held while the healer looks or copies."""
        self._looked_at: float | None = None
        self._look_took_s = 0.0
        self._unable_since: float | None = None
        """When looks began to fail, or when this was last said; None if the last one did not fail."""
        self._is_look_wanted = False
        self._table_count = 0
        self.has_looked = False
        """Whether the last look at the catalog was possible."""
        self._known: tuple[int, float, list[WantedCopy]] | None = None
        """The result of `count_writes`, the time, and the tables that waited then.

        They are read again after a write of this process, and after a minute: another process can only have copied some of them.
        """
        self._told = Told()
        self._refusal: ExcludedColumnError | None = None
        """The error that has ended the thread."""
        self._thread = Worker(target=self._run, name="cdcpipe-heal", daemon=True)

    # --- for the owner ---

    def start(self) -> None:
        """Start the thread, and return at once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the copy, and end the thread. What is not copied is left to the next run."""
        self._stopping.set()
        self._thread.join_if_started()

    @property
    def waiting(self) -> int | None:
        """How many tables waited when the healer last looked; None before its first look. Any thread may ask."""
        return None if self._known is None else len(self._known[2])

    def check(self) -> None:
        """Raise ExcludedColumnError if the healer has found a published column that is to stay on the server."""
        if self._refusal is not None:
            raise self._refusal

    def count_tables(self, count: int) -> None:
        """Take the number of tables that the stream has brought. Look at the catalog sooner if it has brought a new one."""
        if count > self._table_count:
            self._table_count, self._is_look_wanted = count, True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Copy nothing meanwhile. A copy that is running is stopped first, and done later."""
        self._pausing.set()
        try:
            with self._busy:
                yield
        finally:
            self._pausing.clear()

    def finish(self) -> None:
        """Look at the catalog, and copy each table that waits, in the hours given. A table that can't be copied keeps waiting.

        Call this once the launcher has ended. Raises ExcludedColumnError if a column is published that is to stay on the server.
        """
        with self._busy, self._forgiving(_NEXT_RUN):
            self._look(0.0)
            tried: set[Table] = set()
            while not self._is_interrupted():
                # Tables whose copy failed before this call are tried again now.
                waiting = [replace(each, failures=None) for each in self._waiting() if each.table not in tried]
                tables = self._choose(waiting)
                if not tables:
                    return
                is_free = self._copy(tables, follow_s=0.0, then=_ALONE if len(tables) > 1 else _NEXT_RUN)
                left = {each.table for each in self._waiting()} & set(tables)
                for table in sorted(left) if len(tables) > 1 else ():
                    if is_free and not self._is_interrupted():
                        is_free = self._copy([table], follow_s=0.0, then=_NEXT_RUN)
                if not is_free:
                    names = few([str(each.table) for each in self._waiting()])
                    _logger.warning("not copied: %s; cdcpipe-spark snapshot copies tables now, and %s", names, _NEXT_RUN)
                    return
                tried.update(tables)

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._look_and_copy()
        except ExcludedColumnError as ex:
            self._refusal = ex  # `check` raises it in the owner's thread

    def _look_and_copy(self) -> None:
        while not self._stopping.wait(_TICK_S):
            if self._pausing.is_set():
                continue
            with self._busy, self._forgiving():
                if self._is_look_due() or self._are_new(self._choose(self._waiting())):
                    self._look(_UNABLE_S)
                tables = self._choose(self._waiting())
                if tables:
                    self._copy(tables)

    def _is_interrupted(self) -> bool:
        return self._stopping.is_set() or self._pausing.is_set() or self._is_stopping()

    def _waiting(self) -> list[WantedCopy]:
        """Return the tables that wait. After a gap all tables are copied anyway (gap.py)."""
        now = time.monotonic()
        written = wanted_copies.count_writes()
        if self._known is None or self._known[0] != written or now - self._known[1] >= _LOOK_INTERVAL_S:
            self._known = written, now, wanted_copies.waiting(self._warehouse)
        waiting = self._known[2]
        return [] if waiting and gaps.open_gap(self._warehouse) is not None else waiting

    def _choose(self, waiting: Sequence[WantedCopy]) -> list[Table]:
        here = time.localtime()
        return self._schedule.choose(waiting, time.time(), here.tm_hour * 60 + here.tm_min)

    @contextmanager
    def _forgiving(self, then: str = _AGAIN) -> Iterator[None]:
        """Turn an error into a warning: tables that wait keep waiting, and the stream goes on. ``then`` is what comes next."""
        try:
            yield
        except ExcludedColumnError:
            raise
        except Exception as ex:  # noqa: BLE001
            said = said_of(ex)
            if self._told.is_news(said, time.monotonic()):
                _logger.warning("cannot find out which tables need a copy, %s: %s", then, said)

    # --- the look at the catalog ---

    def _is_look_due(self) -> bool:
        if self._looked_at is None:
            return True
        interval_s = _SHORTEST_LOOK_INTERVAL_S if self._is_look_wanted else _LOOK_INTERVAL_S
        return time.monotonic() - self._looked_at >= max(interval_s, self._look_took_s)  # the server has other work, too

    def _are_new(self, tables: Sequence[Table]) -> bool:
        """Tell whether some of these tables are new since the last look. A look after their copy would have them copied again."""
        seen = last_look.read(self._warehouse) if tables else None
        if seen is None:
            return False
        homes = Homes(self._warehouse)
        known = {homes.table(each.relation_id, each.table) for each in seen.tables.values() if each.undecided_lsn is None}
        return not known.issuperset(tables)

    def _look(self, unable_s: float) -> None:
        """Look at the catalog. Says that looks fail, once they have done so for ``unable_s``."""
        self._looked_at = time.monotonic()
        self._is_look_wanted, self.has_looked = False, False
        self._finish_killed()
        began = time.monotonic()
        self.has_looked = self._catalog.look(self._is_interrupted)
        now = self._looked_at = time.monotonic()
        self._look_took_s = now - began
        if self._catalog.failure is None:
            self._unable_since = None
            return
        if self._unable_since is None:
            self._unable_since = began
        if now - self._unable_since >= unable_s:
            self._unable_since = now
            _logger.warning("%s: %s", _UNABLE, self._catalog.failure)

    def _finish_killed(self) -> None:
        """Finish the tables that a killed ``cdcpipe-spark snapshot`` has left unfinished, unless another one runs."""
        house = self._warehouse
        if not landed_snapshots.unfinished(house):
            return
        begun: list[tuple[Table, Position]] = []
        try:
            with hold_alone(self._lock_file()) as is_alone:
                begun = landed_snapshots.unfinished(house) if is_alone else []
                if begun:
                    with suppress(InterruptedError):
                        lock = TableLock(house.local_root(self._config.staging), self._is_interrupted)
                        finish_killed(self._spark, house, lock)
        finally:  # also after an error: what is finished is told only now
            left = landed_snapshots.unfinished(house)
            self._tell_finished([each for each in begun if each not in left])

    def _tell_finished(self, finished: Sequence[tuple[Table, Position]]) -> None:
        house = self._warehouse
        for table, position in finished:
            if gaps.is_copied_since(house, table, position.lsn):  # otherwise nothing of it is kept
                _logger.warning("table %s: a copy of its rows that was killed is finished", table)
        wanted_copies.settle(house)
        changed = [table for table, _ in finished if house.has_changelog(table)]
        if changed:
            self._on_copied(changed)

    def _lock_file(self) -> Path:
        lock = self._warehouse.local_root(self._config.staging) / SNAPSHOT_LOCK
        lock.parent.mkdir(parents=True, exist_ok=True)
        return lock

    # --- the copy ---

    def _copy(self, tables: Sequence[Table], follow_s: float = FOLLOW_S, then: str | None = None) -> bool:
        """Copy those of these tables that still wait, with one snapshot. Records the failure of those that were not copied.

        Returns False, and does nothing, while ``cdcpipe-spark snapshot`` copies tables: then they go on waiting.
        ``follow_s`` is how long to wait for a launcher that does not read from this server yet. ``then`` is what comes after a
        failure; None: they are tried again after a pause.
        """
        house = self._warehouse
        reasons = {each.table: each.why for each in wanted_copies.waiting(house, tables)}
        if not reasons:
            wanted_copies.settle(house, tables)  # cdcpipe-spark snapshot has copied them
            return True
        tables = sorted(reasons)
        with hold_alone(self._lock_file()) as is_alone:
            if not is_alone:
                return False
            snapshot = TableSnapshot(self._config, house, [str(table) for table in tables], self._chunk_bytes, self._hold_s)
            snapshot.tables_at_once = len(tables)
            snapshot.follow_s = follow_s
            failure: Exception | None = None
            try:
                snapshot.prepare(self._is_interrupted)
                snapshot.start(self._spark, self._is_interrupted)
                self._wait_for(snapshot)
            except InterruptedError:
                pass
            except ExcludedColumnError:
                raise
            except Exception as ex:  # noqa: BLE001 - it is recorded, and the copy is tried again
                failure = ex
            finally:
                snapshot.stop()
        copied = sorted(snapshot.copied)
        for table in copied:
            rows, position = snapshot.copied[table]
            at = format_lsn(position.lsn)
            _logger.warning("table %s was copied (%s rows as of %s): %s", table, f"{rows:,}", at, reasons[table])
        self._schedule.record_copied(copied, time.time())
        wanted_copies.settle(house, tables)
        if copied:
            self._on_copied(copied)
        if failure is not None and not self._is_interrupted():
            self._note_failure([table for table in tables if table not in snapshot.copied], failure, then)
        return True

    def _wait_for(self, snapshot: TableSnapshot) -> None:
        """Wait for the copy. Raises its error, InterruptedError for a stop, SnapshotError if nothing is read any more."""
        last: SnapshotProgress | None = None
        resting = RunningTime()
        while not snapshot.wait(_WAIT_S):
            if self._is_interrupted():
                raise InterruptedError
            progress = replace(snapshot.progress, elapsed_s=0.0)
            # While a table waits for merges or OPTIMIZE, it is not the server that keeps it from reading.
            is_held_here = progress.waits_for_tables or progress.chunks_done >= progress.chunks > 0
            if progress != last or is_held_here:
                last, resting = progress, RunningTime()
            elif resting.seconds() >= _STALLED_S:
                stalled = format_duration(_STALLED_S)
                raise SnapshotError(f"nothing was read from the server for {stalled}", hint=_LOCKED)

    def _note_failure(self, tables: Sequence[Table], failure: Exception, then: str | None) -> None:
        said, now = said_of(failure), time.time()
        for table in tables:
            wanted_copies.record_failure(self._warehouse, table, said, now)
        names = ", ".join(map(str, tables))
        failed = [each.failures for each in wanted_copies.waiting(self._warehouse, tables)]
        count = max((each.count for each in failed if each is not None), default=1)
        pause = format_duration(FAILURES.pause_s(count) or 0.0)
        _logger.warning("not copied: %s; %s: %s", names, then or f"it is tried again in {pause}, and the stream goes on", said)
