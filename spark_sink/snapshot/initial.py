"""The initial snapshot: what the tables held before the first change of the stream, as the beginning of changelog and replica.

    snapshot = InitialSnapshot(config, warehouse)
    snapshot.prepare(lambda: False)         # makes the slot, if there is none: before the launcher starts
    if snapshot.is_needed:
        snapshot.start(spark, staging)      # returns at once
        snapshot.wait()

Where the slot is made now, the snapshot is that of its beginning. What is there after a crash is done. A table that was not
finished is gone on with as long as the server still holds the snapshot; after that it begins anew, with a snapshot of then, and its
changelog begins there.

`_cdcpipe/snapshot.json` in the warehouse says that a snapshot is to be taken, before the slot is made, and when all is done.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spark_sink.changelog import tables as changelog
from spark_sink.client.prepare import slot_exists
from spark_sink.files.places import make_directory, read_json, write_json
from spark_sink.snapshot.copy import CHUNK_BYTES, Snapshot
from spark_sink.snapshot.table import table_of
from spark_sink.warehouse.warehouse import Warehouse, WarehouseError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spark_sink.launcher.launcher import LauncherConfig
    from spark_sink.snapshot.plan import Plan, TablePlan
    from spark_sink.staging.log import Epoch

__all__ = ["InitialSnapshot", "is_unfinished"]

_logger = logging.getLogger(__name__)

FORMAT = 1
"""The version of snapshot.json."""


def _path(warehouse: Warehouse) -> Path:
    return warehouse.root / "_cdcpipe/snapshot.json"


def is_unfinished(warehouse: Warehouse) -> bool:
    """Tell whether an initial snapshot was begun, and is under way or to be gone on with."""
    found = read_json(_path(warehouse))
    return found is not None and not found["is_complete"]


class InitialSnapshot(Snapshot):
    """Copies every published table that has no changelog yet.

    ``mode`` is ``initial``, ``never``, or None: initial where the slot is made now. One that was begun is gone on with,
    unless it is ``never``.
    """

    def __init__(
        self,
        config: LauncherConfig,
        warehouse: Warehouse,
        mode: str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        hold_s: float = 0.0,
    ) -> None:
        super().__init__(config, warehouse, "snapshot", chunk_bytes, hold_s)
        self.is_needed = False
        self._mode = mode

    def prepare(self, is_stopping: Callable[[], bool]) -> None:
        """Find out whether there is something to copy, and get the snapshot then, which may make the slot.

        Returns early, with nothing to do, once ``is_stopping`` says so.
        """
        found = read_json(_path(self.warehouse))
        if found is not None and found.get("version") != FORMAT:
            raise WarehouseError(f"{_path(self.warehouse)} has version {found.get('version')!r}; this program knows {FORMAT}")
        if found is not None and found.get("slot") != self.config.slot:
            raise WarehouseError(
                f"{_path(self.warehouse)} is the slot {found.get('slot')!r}'s", hint="give each slot a warehouse of its own"
            )
        is_unfinished = found is not None and not found["is_complete"]
        if self._mode == "never":
            if is_unfinished:
                _logger.warning("the initial snapshot was not finished, and is left so: tables without it have changes alone")
            return
        if found is None:
            try:
                is_unfinished = self._mode == "initial" or (self.config.create_slot and not slot_exists(self.config, is_stopping))
            except InterruptedError:
                return
            if is_unfinished:
                # Before there is a slot: whoever finds that one later can't tell any more whether it was new.
                self._note(is_complete=False)
        if is_unfinished:
            try:
                self._take(is_stopping)
            except InterruptedError:
                return
            self.is_needed = True

    def _bind(self, epoch: Epoch) -> None:
        self.warehouse.open(epoch)

    def _choose(self, plan: Plan) -> list[TablePlan]:
        return [table for table in plan.tables if not changelog.exists(self.warehouse, table_of(table))]

    def _finish(self) -> None:
        self._note(is_complete=True)

    def _note(self, *, is_complete: bool) -> None:
        path = _path(self.warehouse)
        make_directory(path.parent)
        write_json(path, {"version": FORMAT, "slot": self.config.slot, "is_complete": is_complete})
