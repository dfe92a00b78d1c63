"""What a pipeline checks of its warehouse, its staging log and its checkpoint.

They must fit together: neither may be an older copy, or lack a part. Nor may a table: another program may have set it back to an
earlier version.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from cdcpipe.lsn import format_lsn
from spark_sink.delta import sql as delta
from spark_sink.files import places
from spark_sink.schema.table import MESSAGES, NO_COPIES, copies_until
from spark_sink.source.offsets import discard, next_range, next_start, tidy
from spark_sink.staging.log import (
    StagingError,
    anew,
    begin_lsn,
    left_lsn,
    list_epochs,
    list_segments,
    log_end,
    passing_lsn,
)
from spark_sink.warehouse import gaps, purged_changes
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.initial_copy import is_begun, oldest_copy_lsn
from spark_sink.warehouse.mask_settings import check_kept
from spark_sink.warehouse.wanted_copies import SET_BACK, want_copy
from spark_sink.warehouse.warehouse import CHECKPOINT, another

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from spark_sink.delta.log import TableEnd
    from spark_sink.schema.table import Table
    from spark_sink.staging.log import Epoch, Position
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = [
    "check_checkpoint",
    "check_copies",
    "check_log",
    "check_tables",
    "first_position",
    "gone",
    "tidy_checkpoint",
]

_logger = logging.getLogger(__name__)


def check_log(house: Warehouse, staging: Path) -> list[Epoch]:
    """Check that the log has begun, and that the warehouse knows the masks of the tables that the log has fed. Returns its epochs.

    Works before the warehouse exists.
    """
    epochs = list_epochs(staging)
    if not epochs:
        raise StagingError(f"{staging} holds no log yet", hint="start a launcher on it first")
    check_kept(house, staging)
    return epochs


def check_copies(house: Warehouse, staging: Path, position: Position, reached: Position | None, removed: Position | None) -> None:
    """Raise WarehouseError if either the warehouse or the staging directory is an older copy, and they don't fit together.

    The log remembers how far the tables were (``reached``), and the tables remember how far the log was (``position``).
    """
    end = log_end(staging)
    if end is not None and position.lsn > end.lsn:
        raise WarehouseError(
            f"{house.name} is at {position}, but the log in {staging} ends at {end}: the staging directory is an"
            " older copy, or another one",
            hint=_OLDER_STAGING,
        )
    if left_lsn(list_epochs(staging), position, house.source().epoch_token) is not None:
        raise WarehouseError(
            f"{house.name} is at {position}, and the log in {staging} has other changes there: the staging directory is an older"
            " copy, with which a launcher has gone on",
            hint=_OLDER_STAGING,
        )
    if reached is not None and removed is not None and position.lsn < min(reached.lsn, removed.lsn):
        raise WarehouseError(
            f"{house.name} is at {position}, but was at {reached} before, and the log in {staging} goes back only"
            f" to {removed}: the warehouse is an older copy",
            hint=f"restore a newer copy of the warehouse. To keep what this one has, {anew(staging)}. To begin the tables anew with"
            " a copy of their rows, move this one away: --snapshot initial",
        )


def check_checkpoint(house: Warehouse, checkpoint: Path, start: Position | None, position: Position) -> None:
    """Raise WarehouseError if a micro-batch of the checkpoint begins beyond the position of the tables."""
    if start is not None and start.lsn > position.lsn:
        raise WarehouseError(
            f"the checkpoint {checkpoint} is at {start}, the tables in {house.name} at {position}",
            hint="the checkpoint is another warehouse's, or newer than this one: delete it, and what is there goes on from where"
            " the tables are",
        )


def tidy_checkpoint(house: Warehouse, checkpoint: Path, staging: Path, position: Position) -> None:
    """Remove a checkpoint if Spark could not go on with it; otherwise only the files in it that Spark would refuse.

    No stream may be running.

    A checkpoint in the warehouse's own place that is beyond the tables is removed, too. They were restored, and in an object store
    it was not restored with them. Raises WarehouseError for one that the user has named: it may be another warehouse's.

    A checkpoint that is behind the tables is of use only if the log goes on from there. It is behind if another one was used for a
    while (``--checkpoint``).
    """
    tidy(checkpoint)
    start: Position | None = None
    passed: list[Position] = []
    with suppress(StagingError):  # not one of ours: Spark says what is wrong
        start = next_start(checkpoint)
        passed = [each for each in next_range(checkpoint) if each.lsn <= position.lsn]
    if start is not None and start.lsn > position.lsn:
        if checkpoint != house.local_root(staging) / CHECKPOINT:
            check_checkpoint(house, checkpoint, start, position)
        _logger.info("%s is at %s, and is removed: the tables are an older copy, and go on from %s", checkpoint, start, position)
        discard(checkpoint)
        return
    for each in passed:
        try:
            list_segments(staging, each)
        except StagingError:
            _logger.info("the log does not go back to %s, where %s is: the tables go on from %s", each, checkpoint, position)
            discard(checkpoint)
            return


_OLDER_STAGING = "restore the newer copy of the staging directory; without one, run --on-gap resnapshot copies the tables anew"


def first_position(house: Warehouse, staging: Path, start: Position, removed: Position | None) -> Position:
    """Return the position at which a new warehouse begins: the beginning of the log, ``start``, if it is still there.

    If the first segments were removed, the tables need a copy of their rows: an initial snapshot, which is later than these. After
    a gap in the log, run copies all of them, so they may also begin there. Raises WarehouseError if neither is so, or if the log
    begins after a copy: then the tables would lack the changes between. A log that was lost begins anew.
    """
    epochs = list_epochs(staging)
    if removed is not None and not is_begun(house):
        behind_gaps = [epoch.start for epoch in epochs if epoch.gap is not None and epoch.start_lsn >= removed.lsn]
        if behind_gaps:
            return behind_gaps[-1]
        raise WarehouseError(
            f"{house.name} is new, and the log in {staging} does not go back to its beginning",
            hint="restore the warehouse; or let run copy the tables anew: --snapshot initial",
        )
    begin, oldest = begin_lsn(staging, epochs), oldest_copy_lsn(house)
    if oldest is not None and oldest < begin and passing_lsn(epochs, oldest, begin) is None:
        raise WarehouseError(
            f"{house.name} has copies of its tables from {format_lsn(oldest)}, but the log in {staging} goes back only to"
            f" {format_lsn(begin)}: it lacks the changes between",
            hint="run --on-gap resnapshot copies the tables anew",
        )
    return removed or start


def check_tables(house: Warehouse, position: Position) -> dict[Path, TableEnd | None]:
    """Check that each table has what it had. Returns how far each changelog and each replica is; None for one that does not exist.

    Call this once the copies are finished that a killed process has left.

    Raises WarehouseError if a changelog has disappeared, because its changes cannot be recovered. One that was about to be made
    has versions from beyond ``position``: the next micro-batch writes them again, and makes it. If its changes were lost with the
    log, nothing does. Such a table is forgotten, so that it does not count as lost once the tables are behind the gap.

    Lets a table be copied whose changelog or replica another program has set back with RESTORE: it lacks changes since. Raises
    WarehouseError, too, if RESTORE has set back the history of the tables' schemas, or the captured DDL: these tell what a later
    description of a table changes.
    """
    tables = house.tables()
    paths = [path for table in tables for path in (house.changelog(table), house.replica(table))]
    paths += map(house.changelog, NO_COPIES)
    ends = dict(zip(paths, places.map_reads(house.format.end, paths, house.root), strict=True))
    _check_without_copies(house, {table: ends.pop(house.changelog(table)) for table in NO_COPIES})
    recorded, lost = gaps.read(house), []
    for table in tables:
        changelog, replica = house.changelog(table), house.replica(table)
        versions = house.versions(table)
        copies = copies_until(versions)  # complete ones: those of a killed process were finished, or taken back
        if ends[changelog] is None:
            if copies or versions[0].end_lsn <= position.lsn:
                raise gone(house, table)
            # The later versions may be from beyond the gap: the stream describes the table there again.
            is_in_gap = any(each.gap.after_lsn < versions[0].end_lsn <= each.start.lsn for each in recorded)
            if is_in_gap and ends[replica] is None:
                lost.append(table)
        for path in (changelog, replica):
            end = ends[path]
            if end is not None and end.is_restored:
                if path == changelog:
                    purged_changes.record_restored(house, table, end.lsn)
                # The newest copy may be beyond the position, and may be what RESTORE has taken.
                since_lsn = max(position.lsn, end.lsn, *copies) + 1
                want_copy(house, table, since_lsn, SET_BACK.format(path.parent.name))
    for table in lost:  # only now: an error for another table may tell that files are missing that come back
        house.forget(table)
    return ends


def _check_without_copies(house: Warehouse, ends: Mapping[Table, TableEnd | None]) -> None:
    for table, end in ends.items():
        if end is None or not end.is_restored:
            continue
        if table != MESSAGES:
            raise WarehouseError(
                f"RESTORE has set {table} back to an earlier version, and what it has lost is needed to read later changes",
                hint=f"set it to the version from before that, which DESCRIBE HISTORY tells: RESTORE TABLE"
                f" {delta.table_name(house.changelog(table))} TO VERSION AS OF ...; if the files of that version are gone:"
                f" {another(house.root)}",
            )
        _logger.warning("RESTORE has set %s back to an earlier version: it lacks the logical messages since then", table)
        purged_changes.record(house, table, end.lsn)


def gone(house: Warehouse, table: Table) -> WarehouseError:
    """Return the error for a table whose changelog has disappeared. A new one in its place would lack the changes before."""
    changelog = house.changelog(table)
    message = f"the changelog of {table}, {changelog}, has gone, and with it what was in it"
    if table == MESSAGES:
        return WarehouseError(message, hint="restore it; or start again: a new one begins, with the messages from now on")
    return WarehouseError(
        message,
        hint="restore it as it was last (run does not see what an older copy of it lacks); or copy the table's rows anew:"
        f" {table.copying}; or, if it is not published any more and you do not want its tables, delete"
        f" _cdcpipe/tables/{changelog.name}.json, too",
    )
