"""Copies all published tables anew after a gap in the log, so that the tables are right again.

    snapshot = GapSnapshot(config, warehouse)
    if not snapshot.record_if_healed(prepared.tables):
        snapshot.prepare(lambda: False)
        snapshot.start(spark)       # returns at once
        snapshot.wait()

The pipeline may run meanwhile. After a kill the next run goes on with the tables that were not copied since the gap.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from cdcpipe.units import counted
from spark_sink.client.prepare import look_up
from spark_sink.schema.table import Table
from spark_sink.snapshot import two_looks
from spark_sink.snapshot.catalog_look import look_before_copies
from spark_sink.snapshot.copy import CHUNK_BYTES, Snapshot, when_back
from spark_sink.snapshot.homes import Homes
from spark_sink.snapshot.initial import InitialSnapshot
from spark_sink.staging.log import former_system_ids
from spark_sink.warehouse import gaps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from spark_sink.client.exported import ExportedSnapshot
    from spark_sink.launcher.config import LauncherConfig
    from spark_sink.snapshot.copy import SnapshotProgress
    from spark_sink.snapshot.plan import Plan, TablePlan
    from spark_sink.staging.log import Epoch
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["GapSnapshot", "in_words"]

_logger = logging.getLogger(__name__)

_LOOK_S = 1.0


class GapSnapshot(Snapshot):
    """Copies every published table that was not copied since the last gap, and has columns.

    A copy goes to the tables of the name that the table has now: nothing ever tells of a rename in the gap.
    """

    waits_for_names = False

    def __init__(
        self,
        config: LauncherConfig,
        warehouse: Warehouse,
        chunk_bytes: int = CHUNK_BYTES,
        hold_s: float = 0.0,
        *,
        is_ahead: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make the copy for a warehouse. ``is_ahead`` tells whether the launcher waits for the server's WAL (`Progress`)."""
        config = replace(config, create_slot=False)  # the launcher has made it; one that is gone is another gap
        super().__init__(config, warehouse, "snapshot_gap", chunk_bytes, hold_s)
        self._is_ahead = is_ahead
        found = gaps.open_gap(warehouse)
        self._gap_end_lsn = 0 if found is None else found.start.lsn
        self._cause = "" if found is None else found.gap.cause

    def record_if_healed(self, published: Iterable[Mapping[str, Any]]) -> bool:
        """Record that the gap is healed if every published table was copied since. Return False if one has to be copied."""
        if self._gap_end_lsn:
            homes, wanted = Homes(self.warehouse), two_looks.published(published)
            tables = (homes.table(int(each["relation_id"]), Table(str(each["schema"]), str(each["name"]))) for each in wanted)
            if any(map(self._lacks, tables)):
                return False
            self._finish()
        return True

    def prepare(self, is_stopping: Callable[[], bool]) -> None:
        """Export a snapshot from after the gap. Raises InterruptedError once ``is_stopping`` is True."""
        _logger.warning("copying all tables anew: %s", self._cause)
        self._take(is_stopping)

    def _take(self, is_stopping: Callable[[], bool]) -> ExportedSnapshot:
        while self._is_behind_gap(is_stopping):
            if is_stopping():
                raise InterruptedError
            time.sleep(_LOOK_S)
        look_before_copies(self.config, self.warehouse, is_stopping)
        export = super()._take(is_stopping)
        if export.consistent_point < self._gap_end_lsn:  # an earlier run has taken it after an earlier gap
            _logger.info("the snapshot of the earlier run lacks what this gap has lost")
            self._release(is_done=True)
            export = super()._take(is_stopping)
        return export

    def _is_behind_gap(self, is_stopping: Callable[[], bool]) -> bool:
        """Tell whether the server's WAL ends before the end of the gap, as that of one that was promoted may for hours.

        While the launcher waits for it, the server is left to the launcher, which waits longer for one that is away or lacks
        something, and makes a slot that is missing. (Each snapshot moves the WAL on.)
        """
        if self._is_ahead():
            return True
        found = when_back(lambda: look_up(self.config, is_stopping), is_stopping)
        if found.wal_lsn >= self._gap_end_lsn:
            return False
        self._refuse_other_server(found)  # the WAL of an old primary may never get there
        return True

    def _lacks(self, table: Table) -> bool:
        return table not in self.copied and not gaps.is_copied_since(self.warehouse, table, self._gap_end_lsn)

    def _bind(self, epoch: Epoch) -> None:
        self.warehouse.open(epoch, former_system_ids(self._epochs))

    def _choose(self, plan: Plan, homes: Homes) -> list[TablePlan]:
        return [table for table in plan.tables if table.relation.columns and self._lacks(homes.of(table.relation))]

    def _finish(self) -> None:
        gaps.record_healed(self.warehouse, self._gap_end_lsn)
        InitialSnapshot(self.config, self.warehouse).end()  # while it counts as unfinished, no table can be copied alone


def in_words(copies: SnapshotProgress) -> str:
    """Return in words how far the copies after a gap are."""
    done = f": {copies.chunks_done} of {counted(copies.chunks, 'chunk')}" if copies.chunks else ""
    return f"copying the tables after a gap{done}"
