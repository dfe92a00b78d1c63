"""Checks that a slot, a staging directory and a warehouse belong together, before anything is streamed or recorded. No pyspark.

A misspelt ``--staging`` or ``--warehouse`` names a directory that does not exist yet. Without this check, a run would begin there
anew: another log for the same tables, or other tables that lack all earlier rows. So each side records the other. The warehouse
records the path of its staging directory (warehouse.json), the log the place of its tables (readers/tables.json). If a recorded
directory does not exist any more, it was moved or lost, and the given one counts.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from spark_sink.files.places import is_local, place, read_json, write_json
from spark_sink.launcher.continuity import FedTables
from spark_sink.schema.table import copies_until
from spark_sink.staging import copied
from spark_sink.staging.log import (
    Position,
    StagingError,
    begin_lsn,
    former_system_ids,
    has_log,
    list_epochs,
    log_end,
    removed_position,
)
from spark_sink.staging.readers import read_readers, reader_place, register_reader
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.initial_copy import is_begun, oldest_copy_lsn
from spark_sink.warehouse.local_root import check_locks
from spark_sink.warehouse.warehouse import READER, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spark_sink.staging.log import Epoch
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = [
    "check_belonging",
    "check_locks_in",
    "check_log_of_tables",
    "copied_lsn",
    "fed_tables",
    "goes_back_to",
    "keep_segments",
    "record_staging",
    "register_tables",
]

_logger = logging.getLogger(__name__)

_OWN_FOLDERS = ("_cdcpipe", "changelog", "replica", "history")
"""The folders of a warehouse: no place for a staging directory."""


def check_belonging(house: Warehouse, staging: Path, slot: str, *, begins_anew: bool = False) -> None:
    """Raise InvalidArgumentsError if ``house``, ``staging`` and ``slot`` do not belong together.

    Raises WarehouseError or StagingError if what one of the two records can't be read.

    With ``begins_anew``, the user has said how the tables begin (``--snapshot``): then a new warehouse may replace another one as
    the place of the log's tables.
    """
    _check_places(house, staging)
    found, source = read_json(house.identity_path), None
    if found is not None:
        house.check_choices(found)
        source = Source.of(found, house.identity_path)
        source.check(house.name, "but -S is", "give each slot its own warehouse and its own staging directory", slot=slot)
        _check_staging(house.name, source, staging)
    if has_log(staging):
        _check_slot(staging, slot)
        is_new = source is None or source.position is None
        _check_reader(house, staging, is_new=is_new, begins_anew=begins_anew)


def check_log_of_tables(house: Warehouse, staging: Path, epochs: Sequence[Epoch]) -> None:
    """Raise InvalidArgumentsError if the tables have the changes of another source than the log in ``staging`` with ``epochs``."""
    last, hint = epochs[-1], "leave --staging out, or give the staging directory that cdcpipe-spark run has with this warehouse"
    values = {"database": last.database, "slot": last.slot}
    if house.source().system_id not in former_system_ids(epochs):  # `run` notes the new one soon after pg_upgrade
        values["system_id"] = last.system_id
    house.check_source(f"but {staging} has", hint, **values)


def check_locks_in(staging: Path, house: Warehouse) -> None:
    """Raise WarehouseError if ``staging`` should have the locks of ``house``, and is not the staging directory of `run`."""
    if not is_local(house.root):
        source = house.source()
        check_locks(house.name, staging, source.position, source.epoch_token)


def record_staging(house: Warehouse, staging: Path) -> None:
    """Record in an existing warehouse the path of its staging directory, once the two are known to fit."""
    found = read_json(house.identity_path) or {}
    if found.get("staging") != str(staging):
        write_json(house.identity_path, found | {"staging": str(staging)})


def fed_tables(house: Warehouse, staging: Path) -> FedTables | None:
    """Return what the launcher needs to know of the tables; None if it has to know nothing of them.

    They have no position until all of them are copied. Until then, those that are copied need all changes since their copies. So
    if the log does not have these, because it was lost and perhaps begun anew, the oldest copy counts as the position.
    """
    source = house.source() if house.exists else None
    if source is None:
        return None
    position, token, reached_lsn = source.position, source.epoch_token, 0
    if position is None:
        oldest_lsn = oldest_copy_lsn(house)
        if oldest_lsn is None or goes_back_to(staging, oldest_lsn):
            return None
        epochs = list_epochs(staging) if has_log(staging) else []
        numbers = [epoch.number for epoch in epochs if epoch.start_lsn <= oldest_lsn]
        position, token = Position(max(numbers, default=0), oldest_lsn), ""
    elif (reached := read_readers(staging).get(READER)) is not None:
        reached_lsn = reached.lsn
    return FedTables(
        house.name,
        source.system_id,
        source.database,
        source.staging,
        position,
        token,
        reached_lsn,
        source.timeline,
        source.timeline_began_lsn,
    )


def goes_back_to(staging: Path, lsn: int) -> bool:
    """Tell whether there is a log, and it has all changes after ``lsn`` but those in its gaps."""
    return has_log(staging) and begin_lsn(staging, list_epochs(staging)) <= lsn


def copied_lsn(house: Warehouse) -> int:
    """Return the LSN of the newest copy of a table; 0 if there is none. Reads the versions of all tables."""
    versions = house.all_versions().values()
    return max((max(copies_until(each), default=0) for each in versions), default=0)


def register_tables(house: Warehouse, staging: Path) -> None:
    """Let the log keep the segments that the tables need, if it does not know them: they are new, or it was lost.

    New tables that begin with copies need all changes since these. The copies may take hours, and the log's other readers go on
    meanwhile. So they are registered before they have a position. Only the launcher that owns the directory calls this: a start
    that is refused must hold no segments.
    """
    position = house.source().position if house.exists else None
    if READER not in read_readers(staging) and (position is not None or is_begun(house)):
        register_reader(staging, READER, position or removed_position(staging) or Position(0, 0), house.name)


def keep_segments(house: Warehouse, staging: Path) -> None:
    """Let the log keep the segments that ``house`` still needs. Call this before segments are removed.

    It may be an older copy. The log remembers how far the newer one was.
    """
    position = house.source().position if house.exists else None
    reached, removed = read_readers(staging).get(READER), removed_position(staging)
    if position is None or reached is None or reached.lsn <= position.lsn:
        return
    if copied.read(staging) > max(position.lsn, copied_lsn(house)):
        _logger.warning(
            "%s is an older copy, and tables were copied since it was made. run makes those copies again for which it finds the"
            " reason again, for instance none of cdcpipe-spark snapshot: see with cdcpipe-spark verify which tables differ",
            house.name,
        )
    if removed is None or removed.lsn <= position.lsn:
        register_reader(staging, READER, position, reader_place(staging, READER))


def _check_places(house: Warehouse, staging: Path) -> None:
    """Refuse one directory for both, a staging directory in a folder of the warehouse, and the two swapped."""
    if (staging / "_cdcpipe").is_dir():
        raise InvalidArgumentsError(f"--staging {staging} is a warehouse", hint="give the warehouse as --warehouse")
    if not is_local(house.root):
        return
    if has_log(house.root):
        raise InvalidArgumentsError(
            f"--warehouse {house.name} is a staging directory", hint="give the staging directory as --staging"
        )
    root, path = house.root.resolve(), staging.resolve()
    if path == root or any(path.is_relative_to(root / folder) for folder in _OWN_FOLDERS):
        where = "the same directory" if path == root else "in the warehouse"
        raise InvalidArgumentsError(
            f"--staging {staging} is {where}: {house.name}", hint="give the staging directory a place of its own"
        )


def _check_staging(warehouse: str, source: Source, staging: Path) -> None:
    """Refuse a staging directory that has less than the tables, if the one that the warehouse records still has it."""
    recorded = source.staging
    if recorded is None or not _is_other(recorded, staging) or not _has_recorded_log(warehouse, recorded, staging):
        return
    end = log_end(staging) if has_log(staging) else None
    if list_epochs(recorded)[-1].slot != source.slot:
        return
    if end is not None and (source.position is None or end.lsn >= source.position.lsn):
        return  # a copy, or moved back
    ends = "has no log" if end is None else f"ends at {end}, before the tables ({source.position})"
    raise InvalidArgumentsError(
        f"the tables in {warehouse} come from the log in {recorded}; {staging} {ends}",
        hint=f"use --staging {recorded}. To move a log, move its directory while nothing runs",
    )


def _has_recorded_log(warehouse: str, recorded: Path, staging: Path) -> bool:
    """Tell whether there is a log in the directory that the warehouse records. ``staging`` is the one that was given."""
    try:
        return has_log(recorded)
    except OSError as ex:  # such as the home of another user
        raise StagingError(
            f"the tables in {warehouse} come from the log in {recorded}, which can't be read: {ex}",
            hint=f"if {staging} is what was moved from there, delete the key staging in {warehouse}/_cdcpipe/warehouse.json",
        ) from ex


def _check_slot(staging: Path, slot: str) -> None:
    found = list_epochs(staging)[-1].slot
    if found != slot:
        raise InvalidArgumentsError(
            f"{staging} has the log of slot {found!r}, not of {slot!r}",
            hint=f"use -S {found}, or give the slot its own staging directory and its own warehouse",
        )


def _check_reader(house: Warehouse, staging: Path, *, is_new: bool, begins_anew: bool) -> None:
    """Refuse another warehouse than that of the log, while that one is still there."""
    recorded = reader_place(staging, READER)
    if recorded is None or _is_same(recorded, house) or (begins_anew and is_new) or not _feeds(staging, recorded, house):
        return
    if is_new:
        which, otherwise = ", which is new,", "To begin new tables in place of the former ones, add --snapshot initial"
    else:
        which, otherwise = "", "If this one is a copy that is to take its place, move the former one away"
    raise InvalidArgumentsError(
        f"the log in {staging} belongs to the tables in {recorded}; {house.name}{which} would not have all of its changes",
        hint=f"use --warehouse {recorded}. Another warehouse needs its own slot and its own staging directory. {otherwise}",
    )


def _is_same(recorded: str, house: Warehouse) -> bool:
    if is_local(house.root) and "://" not in recorded:
        return not _is_other(Path(recorded), house.root)
    return recorded.partition("://")[2].rstrip("/") == house.name.partition("://")[2].rstrip("/")  # s3a and s3 are the same store


def _feeds(staging: Path, warehouse: str, given: Warehouse) -> bool:
    """Tell whether a recorded warehouse is still there, and has its changes from the log in ``staging``."""
    try:
        found = read_json(place(warehouse, "the warehouse of this log") / "_cdcpipe/warehouse.json")
    except (CdcpipeError, OSError) as ex:  # such as a bucket that the credentials of the new one do not open
        raise WarehouseError(
            f"the log in {staging} belongs to the tables in {warehouse}, which can't be read: {ex}",
            hint=f"if {given.name} is what was moved from there, delete the key place in {staging}/readers/tables.json",
        ) from ex
    return found is not None and "staging" in found and not _is_other(Path(str(found["staging"])), staging)


def _is_other(recorded: Path, given: Path) -> bool:
    return recorded.resolve() != given.resolve()
