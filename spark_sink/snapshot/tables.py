"""Copies chosen tables, again or for the first time, whether the pipeline runs or not.

    # hold SNAPSHOT_LOCK
    snapshot = TableSnapshot(config, warehouse, ["public.fruit"])
    snapshot.prepare(lambda: False)
    snapshot.start(spark)                   # returns at once
    snapshot.wait()

This is for tables that were added to the publication later, for slots that were created without a snapshot, and for tables whose
old rows lack values that the stream does not have (ADD COLUMN … DEFAULT). The rows get the position of the snapshot. The tables of
the warehouse may be before or after this position.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.client.keyless import table_name
from spark_sink.launcher.config import LauncherConfig
from spark_sink.schema.table import Table
from spark_sink.snapshot.copy import CHUNK_BYTES, Snapshot
from spark_sink.warehouse.belonging import check_locks_in
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.initial_copy import is_unfinished
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence, Sized

    from spark_sink.snapshot.homes import Homes
    from spark_sink.snapshot.plan import Plan, TablePlan
    from spark_sink.staging.log import Epoch

__all__ = ["SNAPSHOT_LOCK", "TableSnapshot"]

SNAPSHOT_LOCK = "_cdcpipe/snapshot.lock"
"""The lock below `Warehouse.local_root` that the owner of a `TableSnapshot` holds, so that no two copy tables at the same time."""

_logger = logging.getLogger(__name__)


class TableSnapshot(Snapshot):
    """Copies the tables named "schema.name", whether the warehouse has them or not. Only one per warehouse may run at a time."""

    def __init__(
        self,
        config: LauncherConfig,
        warehouse: Warehouse,
        tables: Sequence[str],
        chunk_bytes: int = CHUNK_BYTES,
        hold_s: float = 0.0,
    ) -> None:
        super().__init__(config, warehouse, "snapshot_tables", chunk_bytes, hold_s)
        self._names = tuple(dict.fromkeys(tables))

    def prepare(self, is_stopping: Callable[[], bool]) -> None:
        """Export the snapshot, and check what can be checked before the copy.

        Raises InterruptedError once ``is_stopping`` is True.
        """
        check_locks_in(self.config.staging, self.warehouse)
        if is_unfinished(self.warehouse):
            raise WarehouseError(
                f"the initial snapshot of {self.warehouse.name} is not finished",
                hint="wait until cdcpipe-spark run has finished it, or start run again; with --snapshot never run gives it up",
            )
        export = self._take(is_stopping)
        self._check_source("but the server has", system_id=export.prepared.system_id, database=export.prepared.database)
        self._check_published({table_name(table): table["columns"] for table in export.prepared.tables})

    def _bind(self, epoch: Epoch) -> None:
        self._check_source(f"but {self.config.staging} has", system_id=epoch.system_id, database=epoch.database, slot=epoch.slot)

    def _check_source(self, theirs: str, **values: str) -> None:
        hint = "connect to the server and database of these changes, and give their staging directory"
        self.warehouse.check_source(theirs, hint, **values)

    def _choose(self, plan: Plan, homes: Homes) -> list[TablePlan]:
        published = {str(Table.of(table.relation)): table for table in plan.tables}
        self._check_published({name: table.relation.columns for name, table in published.items()})
        return [published[name] for name in self._names if homes.of(published[name].relation) not in self.copied]

    def _check_published(self, published: Mapping[str, Sized]) -> None:
        """Raise InvalidArgumentsError unless each table to copy is published, and has columns: ``published`` has those of each."""
        missing = [name for name in self._names if name not in published]
        if missing:
            assert self._export is not None
            others = sorted({table_name(each) for each in self._export.prepared.tables}.difference(missing))
            raise InvalidArgumentsError(
                f"not published: {', '.join(missing)}; the published tables are: {', '.join(others) or 'none'}",
                hint="ALTER PUBLICATION … ADD TABLE; of a partitioned table, either the root or the leaves are published",
            )
        empty = [name for name in self._names if not published[name]]
        if empty:
            raise InvalidArgumentsError(
                f"no column is published of: {', '.join(empty)}; so their rows have nothing to copy", hint="leave these tables out"
            )
