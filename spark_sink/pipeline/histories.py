"""Brings the stored histories of a warehouse up to date with its changelogs, in rounds of their own (replica/history_table.py).

A round looks at every table, and brings each history that is behind to the position of the changelog, or of a snapshot that came
later. In a quiet database a snapshot is later than all changes. Then the account of the staging log tells that it counts.

The rounds exclude neither micro-batches nor merges, so the first round, which reads whole changelogs, delays neither. No state is
stored: each history records its own position.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spark_sink.pipeline.follower import MERGES, is_out_of_date
from spark_sink.pipeline.rounds import Rounds
from spark_sink.replica import history_table
from spark_sink.spark import session
from spark_sink.staging.log import Position
from spark_sink.warehouse import stored_histories
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.reached import reached_lsn

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from spark_sink.pipeline.catalog import CatalogDatabase
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.lock import TableLock
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["Histories"]

_logger = logging.getLogger(__name__)


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
        self.lsn: int | None = None
        """Up to which LSN the histories have all changes, as the last round found or left them. None before the first one."""
        self.rounds = Rounds("histories", self.catch_up, interval_s, on_error)

    def catch_up(self) -> None:
        """Bring the histories to the positions that their changelogs have."""
        source = self._warehouse.source()
        if source.position is None:
            return
        reached = Position(source.position.epoch, reached_lsn(self._warehouse, source))
        behind: dict[Table, int] = {}
        has: dict[Table, int] = {}
        for table in self._warehouse.tables():
            if self.rounds.is_hurried:
                return
            changelog_lsn = self._warehouse.format.lsn(self._warehouse.changelog(table))
            lsn = stored_histories.missing_until(self._warehouse, table, changelog_lsn, reached.lsn) if changelog_lsn else None
            if lsn is not None:
                behind[table], has[table] = lsn, stored_histories.complete_until(self._warehouse, table)
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
