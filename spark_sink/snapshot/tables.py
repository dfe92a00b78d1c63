"""Copies tables anew, or for the first time, while the stream goes on or stands still.

    with hold_alone(...):
    snapshot = TableSnapshot(config, warehouse, ["public.fruit"])
    snapshot.prepare(lambda: False)
    snapshot.start(spark, staging)          # returns at once
    snapshot.wait()

For tables that came into the publication later, whose slot was made without a snapshot, or in which old rows lack what the stream
does not say (ADD COLUMN … DEFAULT). The rows have the position of the snapshot, and the tables of the warehouse may be before
it or past it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spark_sink.client.exported import SnapshotError
from spark_sink.launcher.launcher import LauncherConfig
from spark_sink.replica import merge as replica
from spark_sink.snapshot.copy import CHUNK_BYTES, Snapshot
from spark_sink.snapshot.initial import is_unfinished
from spark_sink.snapshot.table import table_of
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.warehouse import Warehouse, WarehouseError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from spark_sink.snapshot.plan import Plan, TablePlan
    from spark_sink.staging.log import Epoch

__all__ = ["TableSnapshot"]

_logger = logging.getLogger(__name__)


class TableSnapshot(Snapshot):
    """Copies the tables named "schema.name", whatever the warehouse has of them. One at a time in a warehouse."""

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
        """Get the snapshot; InterruptedError once ``is_stopping`` says so. Raise for what is certain to fail."""
        if is_unfinished(self.warehouse):
            raise WarehouseError(
                f"the initial snapshot of {self.warehouse.name} is not finished",
                hint="wait for cdcpipe-spark run, or start it again; or give it up there with --snapshot never",
            )
        export = self._take(is_stopping)
        self._check_source("the server is", system_id=export.prepared.system_id, database=export.prepared.database)
        self._check_published([f"{table['schema']}.{table['name']}" for table in export.prepared.tables])

    def _bind(self, epoch: Epoch) -> None:
        self._check_source(f"{self.config.staging} those of", system_id=epoch.system_id, database=epoch.database, slot=epoch.slot)

    def _check_source(self, theirs: str, **values: str) -> None:
        source = self.warehouse.source()
        for name, value in values.items():
            if getattr(source, name) != value:
                raise WarehouseError(
                    f"{self.warehouse.name} holds the changes of {name} {getattr(source, name)!r}, {theirs} {value!r}",
                    hint="connect to the server and the database that the changes come from, and name their staging directory",
                )

    def _begin(self) -> None:
        assert self._spark is not None
        with TableLock(self.warehouse.local_root(self.config.staging)).alone(lambda: self._stopping):
            replica.finish_snapshots(self._spark, self.warehouse)

    def _choose(self, plan: Plan) -> list[TablePlan]:
        published = {str(table_of(table)): table for table in plan.tables}
        self._check_published(published)
        return [published[name] for name in self._names if name not in map(str, self.copied)]

    def _check_published(self, published: Collection[str]) -> None:
        missing = [name for name in self._names if name not in published]
        if missing:
            raise SnapshotError(
                f"not published: {', '.join(missing)}; what is: {', '.join(sorted(published)) or 'nothing'}",
                hint="ALTER PUBLICATION … ADD TABLE; of a partitioned table the root or the leaves are published",
            )
