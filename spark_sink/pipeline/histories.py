"""Brings the stored histories of a warehouse up to date with its changelogs, in rounds of their own (replica/history_table.py).

A round brings each history that is behind to the position of the changelog, or of a snapshot that came later. In a quiet database a
snapshot is later than all changes. Then the account of the staging log tells that it counts.

A warehouse may have many tables that get no changes any more. So a round looks only at

- the tables that the pipeline names, because they have new changes;
- those whose histories the last round left incomplete;
- those with a snapshot that the tables have not reached.

It looks at every table if a writer has had the tables alone meanwhile (a snapshot or a purge, in any process), and once an hour,
because other programs may delete a history or set it back (RESTORE).

The rounds exclude neither micro-batches nor merges, so the first round, which reads whole changelogs, delays neither. No state is
stored: each history records its own position.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from spark_sink.files import places
from spark_sink.pipeline.follower import MERGES, is_out_of_date
from spark_sink.pipeline.rounds import Rounds
from spark_sink.replica import history_table
from spark_sink.schema.table import copies_until
from spark_sink.spark import session
from spark_sink.staging.log import Position
from spark_sink.warehouse import stored_histories
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.reached import reached_lsn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pyspark.sql import SparkSession

    from spark_sink.pipeline.catalog import CatalogDatabase
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.lock import TableLock
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["Histories"]

_logger = logging.getLogger(__name__)

_ALL_TABLES_S: Final = 3600.0
"""How long rounds may go without a look at every table."""


class Histories:
    """Maintains the stored histories. If an error ends the rounds, their thread calls ``on_error`` with it."""

    def __init__(
        self,
        spark: SparkSession,
        warehouse: Warehouse,
        lock: TableLock,
        catalog: CatalogDatabase | None,
        interval_s: float,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._spark = session.copy(spark)
        self._warehouse = warehouse
        self._lock = lock
        self._catalog = catalog
        self._warned: set[Table] = set()
        self._changing = threading.Lock()
        self._changed: set[Table] = set()
        """The tables that were named to `record` since the last round began."""
        self._open: set[Table] = set()
        """The tables whose histories the last round left behind, and those with a snapshot that the tables have not reached."""
        self._lock_state: bytes | None = None
        """The state of the lock when the last round began; None if that round has not ended, and before the first one."""
        self._looked_at = 0.0
        """When the last round began that looked at every table."""
        self.lsn: int | None = None
        """Up to which LSN the histories have all changes, as the last round found or left them. None before the first one."""
        self.rounds = Rounds("histories", self.catch_up, interval_s, on_error)

    def record(self, tables: Iterable[Table]) -> None:
        """Record that these tables have new changes. Call this before the warehouse records the position of the changes.

        A snapshot need not be recorded: it has the tables alone.
        """
        with self._changing:
            self._changed.update(tables)

    def catch_up(self) -> None:
        """Bring the histories to the positions that their changelogs have."""
        source = self._warehouse.source()
        if source.position is None:
            return
        reached = Position(source.position.epoch, reached_lsn(self._warehouse, source))
        with self._lock.reading() as lock_state:
            pass
        tables = self._tables_to_look_at(lock_state)
        self._lock_state, self._open = None, set()  # a round that ends early has not looked at all of them
        behind: dict[Table, int] = {}
        has: dict[Table, int] = {}
        looks = places.map_reads(partial(self._look, reached_lsn=reached.lsn), tables, self._warehouse.root)
        for table, (lsn, is_waiting) in zip(tables, looks, strict=True):
            if self.rounds.is_hurried:
                return
            if lsn is not None:
                behind[table], has[table] = lsn, stored_histories.complete_until(self._warehouse, table)
            if is_waiting:
                self._open.add(table)
        self.lsn = min([reached.lsn, *has.values()])
        for table, lsn in behind.items():
            if self.rounds.is_hurried:
                return
            with self._lock.history():
                self._bring(table, Position(reached.epoch, lsn))
            if stored_histories.missing_until(self._warehouse, table, lsn, lsn) is None:
                del has[table]
            else:  # it can't go on, or another process has not ended its copy of the table
                has[table] = stored_histories.complete_until(self._warehouse, table)
            self.lsn = min([reached.lsn, *has.values()])
            if self._catalog is not None:
                self._catalog.register([table])
        self._open.update(has)
        self._lock_state = lock_state

    def _look(self, table: Table, *, reached_lsn: int) -> tuple[int | None, bool]:
        """Return the LSN to which a history has to be brought, None if it is there; and whether a snapshot has yet to be reached.

        Looks at nothing if the round is to end early.
        """
        changelog_lsn = None if self.rounds.is_hurried else self._warehouse.format.lsn(self._warehouse.changelog(table))
        if not changelog_lsn:
            return None, False
        lsn = stored_histories.missing_until(self._warehouse, table, changelog_lsn, reached_lsn)
        return lsn, any(copy > reached_lsn for copy in copies_until(self._warehouse.versions(table)))

    def _tables_to_look_at(self, lock_state: bytes) -> list[Table]:
        """Return the tables whose histories may be behind."""
        with self._changing:
            changed, self._changed = self._changed, set()
        now = time.monotonic()
        if lock_state == self._lock_state and now < self._looked_at + _ALL_TABLES_S:
            shown = self._warehouse.recorded_names().shown
            return sorted(map(shown, changed | self._open))
        self._looked_at = now
        return self._warehouse.tables()

    def _bring(self, table: Table, until: Position) -> None:
        try:
            MERGES.call(
                lambda: history_table.bring(self._spark, self._warehouse, table, until, self._lock), Exception, where=is_out_of_date
            )
        except WarehouseError as ex:
            # One history must not stop all tables.
            if table not in self._warned:
                self._warned.add(table)
                _logger.warning("the history of %s stays as it is: %s; %s", table, ex.message, ex.hint)
