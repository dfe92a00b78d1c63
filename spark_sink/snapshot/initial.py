"""The initial snapshot: copies the rows that the tables had before the stream's first change into changelog and replica.

    snapshot = InitialSnapshot(config, warehouse)
    snapshot.prepare(lambda: False)         # call it before the launcher starts: it creates the slot of a new pipeline
    if snapshot.is_needed:
        snapshot.start(spark)               # returns at once
        snapshot.wait()

If `prepare` creates the slot, the snapshot has the position of the slot's beginning. For a slot that exists, it has a later one, at
which the changelogs begin.

If a pipeline that has begun has no slot any more, changes are missing. Only the launcher may make another slot, because it judges
that (launcher/continuity.py). After the gap every table is copied anyway (gap.py), and so the initial snapshot is left out.

After a crash, the tables that are in the warehouse count as finished. While the server still holds the snapshot, the next run goes
on with the unfinished tables where their copies ended. Once the server holds it no longer, the next run copies them from the
beginning with a new snapshot, and their changelogs begin at that snapshot.

`_cdcpipe/snapshot.json` in the warehouse records that a snapshot has to be taken, before the slot is created. At the end it records
that the snapshot is complete, or was given up (`InitialSnapshot.give_up`). Before that, the published tables that the snapshot left
out are recorded as waiting for a copy.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError, UnreachableError
from spark_sink.client.prepare import slot_exists
from spark_sink.files.local import NEWER
from spark_sink.files.places import make_directory, read_json, write_json
from spark_sink.schema.table import Table, copies_until
from spark_sink.snapshot import two_looks
from spark_sink.snapshot.catalog_look import look_before_copies
from spark_sink.snapshot.copy import CHUNK_BYTES, Snapshot
from spark_sink.snapshot.homes import Homes
from spark_sink.staging.log import former_system_ids, has_log, list_epochs
from spark_sink.warehouse import landed_snapshots, last_look, wanted_copies
from spark_sink.warehouse.belonging import fed_tables, goes_back_to, record_staging
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.gaps import is_copied_since
from spark_sink.warehouse.initial_copy import is_new, is_unfinished, path_in
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spark_sink.client.exported import ExportedSnapshot
    from spark_sink.launcher.config import LauncherConfig
    from spark_sink.snapshot.plan import Plan, TablePlan
    from spark_sink.staging.log import Epoch

__all__ = ["InitialSnapshot"]

_logger = logging.getLogger(__name__)

FORMAT = 1
"""The version of snapshot.json."""


class InitialSnapshot(Snapshot):
    """Copies every published table that has no changelog yet, neither under its name nor, if DDL is captured, under a former one.

    ``mode`` is ``initial``, ``never`` or None. None means ``initial`` for a new warehouse if the slot may be created (``-c``). It
    also means ``initial`` if an initial snapshot is unfinished.
    """

    finishes_killed = False  # the start of the pipeline, which follows, does (beginning.py)

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
        self.is_left = False
        """Whether `prepare` has left the slot, which it did not find, to the launcher."""
        self._mode = mode
        self._on_held = self._record_begin
        self._noted: dict[str, Any] | None = None
        """The contents of snapshot.json that this process has read, or written."""

    def prepare(self, is_stopping: Callable[[], bool]) -> None:
        """Find out whether there is something to copy. If so, export the snapshot, which creates the slot of a new pipeline.

        The caller holds the lock of the staging directory, because this writes in the warehouse. Returns early once ``is_stopping``
        is True; there is nothing to copy then.
        """
        found = self._noted = read_json(path_in(self.warehouse))
        if found is not None and found.get("version") != FORMAT:
            raise WarehouseError(
                f"{path_in(self.warehouse)} has version {found.get('version')!r}; this program knows {FORMAT}", hint=NEWER
            )
        if found is not None and found.get("slot") != self.config.slot:
            raise WarehouseError(
                f"{path_in(self.warehouse)} belongs to the slot {found.get('slot')!r}", hint="give each slot its own warehouse"
            )
        if self._mode == "never" or (found is not None and found["is_complete"]):
            return
        if found is None and self._mode is None and not self._begins():
            return
        try:
            self.is_left = self._has_lost_slot(is_stopping)
            if self.is_left:
                return
            if found is None and self._mode is None and has_log(self.config.staging):
                _logger.warning(
                    "the tables in %s begin with a copy of the rows as they are now. The log in %s has changes from before; they"
                    " are not in the changelogs. With --snapshot never the tables have these changes, and no copy",
                    self.warehouse.name,
                    self.config.staging,
                )
            self._take(is_stopping)
        except InterruptedError:
            return
        except CdcpipeError as ex:
            if found is None and self._noted is not None and self._is_without_slot(ex, is_stopping):
                path_in(self.warehouse).unlink(missing_ok=True)  # a run with another slot's name must find nothing of this one
            raise
        self.is_needed = True

    def give_up(self) -> None:
        """With ``never``, end an unfinished snapshot: until its end, no table can be copied alone. Call this after the first look.

        The tables that it has not copied wait for a copy.
        """
        if self._mode != "never" or not is_unfinished(self.warehouse) or last_look.read(self.warehouse) is None:
            return
        _logger.warning("the initial snapshot is given up: tables that are not copied have only their changes, and wait for a copy")
        self._want_missing(two_looks.NOT_COPIED)
        self._note(is_complete=True)
        self._drop_left()

    def end(self) -> None:
        """End an unfinished snapshot: the copies after a gap have taken its place."""
        if is_unfinished(self.warehouse):
            self._note(is_complete=True)
            self._drop_left()

    def _has_lost_slot(self, is_stopping: Callable[[], bool]) -> bool:
        """Tell whether a pipeline that has begun has no slot any more. From now on, none is created for such a pipeline."""
        staging = self.config.staging
        if not has_log(staging) and fed_tables(self.warehouse, staging) is None:
            return False
        self.config = replace(self.config, create_slot=False)
        return not slot_exists(self.config, is_stopping)

    def _is_without_slot(self, refusal: CdcpipeError, is_stopping: Callable[[], bool]) -> bool:
        """Tell whether it is certain that there is no slot after this error."""
        if isinstance(refusal, (InvalidArgumentsError, UnreachableError)):
            return True  # without a connection, nothing was made
        try:
            return not slot_exists(self.config, is_stopping)
        except (CdcpipeError, InterruptedError):
            return False

    def _begins(self) -> bool:
        """Tell whether the tables of this run begin now, and with a copy of their rows. Warns if they begin without one."""
        if not is_new(self.warehouse):
            return False
        staging = self.config.staging
        has_gap = has_log(staging) and any(epoch.gap is not None for epoch in list_epochs(staging))
        if not self.config.create_slot and not self.warehouse.exists and not has_gap:  # behind a gap, all tables are copied
            _logger.warning(
                "%s is new, and its tables begin without the rows that were in the database before the slot's first change;"
                " with --snapshot initial they begin with a copy of the rows (--snapshot never: without, and without this warning)",
                self.warehouse.name,
            )
        return self.config.create_slot

    def _take(self, is_stopping: Callable[[], bool]) -> ExportedSnapshot:
        """Take care that no look from before the snapshot lacks tables that it copies: the next look would take them for new."""
        if self.warehouse.exists and has_log(self.config.staging) and last_look.read(self.warehouse) is not None:
            look_before_copies(self.config, self.warehouse, is_stopping)
        export = super()._take(is_stopping)
        if export.is_left_over and not goes_back_to(self.config.staging, export.consistent_point):
            _logger.info("the log does not go back to the snapshot of the earlier run")
            self._release(is_done=True)
            export = super()._take(is_stopping)
        self.config = replace(self.config, create_slot=False)  # the pipeline has begun: a slot that goes is a gap
        if not self.warehouse.exists:
            # A killed run has left it; the next look comes after the snapshot.
            last_look.forget(self.warehouse)
        return export

    def _record_begin(self) -> None:
        """Record that a snapshot has to be taken. A later run that finds the slot could not tell whether it was new.

        Two runs with different staging directories may have begun at one moment. The later one leaves the other's record alone.
        """
        if read_json(path_in(self.warehouse)) != self._noted:
            raise WarehouseError(
                f"another run has just begun with {self.warehouse.name}",
                hint="wait until it has ended, or give each its own --warehouse",
            )
        if self._noted is None:
            self._note(is_complete=False)

    def _bind(self, epoch: Epoch) -> None:
        self.warehouse.open(epoch, former_system_ids(self._epochs))
        record_staging(self.warehouse, self.config.staging)

    def _choose(self, plan: Plan, homes: Homes) -> list[TablePlan]:
        lacking = [table for table in plan.tables if not self.warehouse.has_changelog(homes.of(table.relation))]
        # A table that may have been renamed can't be waited for here: the stream comes to the tables only after this snapshot.
        chosen = [each for each in lacking if homes.is_certain(each.relation.relation_id, Table.of(each.relation))]
        self._forget_later_parts(chosen)
        return chosen

    def _forget_later_parts(self, tables: Sequence[TablePlan]) -> None:
        """Let the next look at the catalog find the partitions that were attached after the snapshot: the copy lacks their rows.

        The first look comes after the snapshot, so it may have recorded them as known.
        """
        seen = last_look.read(self.warehouse)
        known = {} if seen is None else dict(seen.tables)
        for table in tables:
            then = known.get(table.relation.relation_id)
            if then is not None and then.parts is not None:
                # An empty partition has a chunk, too. What an earlier snapshot lacked may be in this one.
                parts = {chunk.relation_id: then.parts.get(chunk.relation_id, (chunk.file, "")) for chunk in table.chunks}
                known[then.relation_id] = replace(then, parts=parts)
        if seen is not None and known != seen.tables:
            last_look.write(self.warehouse, replace(seen, tables=known))

    def _finish(self) -> None:
        self._want_missing()
        self._note(is_complete=True)

    def _want_missing(self, came: str = two_looks.CAME) -> None:
        """Have the tables copied that this snapshot does not have. Recorded before the end, so that a kill can't lose it.

        They came into the publication after it was taken, or they had changes before a run was asked for it. Tables that came after
        the last look at the catalog are found by the next look. So are those that may have been renamed, once the stream has told.
        ``came`` is why a table without changes waits.
        """
        seen, homes = last_look.read(self.warehouse), Homes(self.warehouse)
        if seen is None:
            return
        known = dict(seen.tables)
        for each in seen.tables.values():
            table = homes.table(each.relation_id, each.table)
            has_changelog = self.warehouse.has_changelog(table)
            if not has_changelog and not homes.is_certain(each.relation_id, each.table):
                known[each.relation_id] = replace(each, undecided_lsn=each.undecided_lsn or seen.lsn)
            elif not self._is_copied(table):
                why = two_looks.NOT_COPIED if has_changelog else came
                wanted_copies.want_copy(self.warehouse, table, seen.lsn, why)
        if known != seen.tables:
            last_look.write(self.warehouse, replace(seen, tables=known))

    def _is_copied(self, table: Table) -> bool:
        """Tell whether the table has a copy, if only a first one that was killed after its changelog was there.

        The next start of the pipeline makes the replica from the changelog (`merge.finish_snapshots`).
        """
        house = self.warehouse
        is_first_there = house.has_changelog(table) and not landed_snapshots.adds_rows(house, table)
        return is_copied_since(house, table, 0) or (is_first_there and bool(copies_until(house.versions(table))))

    def _note(self, *, is_complete: bool) -> None:
        path = path_in(self.warehouse)
        make_directory(path.parent)
        self._noted = {"version": FORMAT, "slot": self.config.slot, "is_complete": is_complete}
        write_json(path, self._noted)
