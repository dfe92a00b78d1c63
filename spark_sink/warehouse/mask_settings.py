"""Notes in the warehouse which columns are masked since when, and what has data from before a change.

    check_new(house, tables)    # before a new mask is noted: refuses a wrong name of a column, warns of one that masks nothing
    check_kept(house, staging)  # before a new warehouse begins: refuses one that lacks masks of the former one on this log
    settle(house, lock, staging)  # before the first row is written: notes the masks in force, refuses what can't be changed
    check_unchanged(house)      # before rows with these masks come to the tables, or are compared with them
    check_key(house)            # before hashes are compared: the key is that of the hashes in the tables

    _cdcpipe/masks.json     the masks, what tells the key of hashes from another key, and the earlier masks with their ends, and the
                            tables that had rows then

A warehouse keeps its masks: a start without ``--mask`` uses those of the file, and ``--mask NAME=off`` takes one back. The log has
a copy of the masks in force (staging/table_masks.py). So a warehouse that is made anew has all of them, or the start names those
that it would lose.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.lsn import format_lsn
from cdcpipe.masks import HASH, KEY_VARIABLE, OFF, Masks, mask_options
from cdcpipe.publishing import ColumnPattern, exactly
from spark_sink.files.places import make_directory, write_json
from spark_sink.schema.table import copies_until
from spark_sink.schema.types import original_name
from spark_sink.staging import table_masks
from spark_sink.staging.log import list_epochs
from spark_sink.warehouse import landed_snapshots, stored_histories, table_names
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.wanted_copies import MASKS_CHANGED, want_copy
from spark_sink.warehouse.warehouse import MASKS_VERSION, another, masks_path, noted_masks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from spark_sink.schema.table import Table
    from spark_sink.staging.log import Epoch
    from spark_sink.warehouse.lock import TableLock
    from spark_sink.warehouse.warehouse import Warehouse

    _Names = Collection[tuple[str, str]]

__all__ = ["check_kept", "check_key", "check_new", "check_unchanged", "settle"]

_logger = logging.getLogger(__name__)


def check_new(house: Warehouse, tables: Collection[Mapping[str, Any]]) -> None:
    """Check the masks with the published ``tables`` (`Prepared.tables`). Warns of one that is not noted yet and masks nothing.

    Raises InvalidArgumentsError if a column is masked in a table, but not in one of its partitions, or of the tables that inherit
    from it, which is published under its own name. Also raises it for a mask that is not noted yet with a column that its table
    does not have. If it were noted, a start without it would fail, too.
    """
    columns = {(str(each["schema"]), str(each["name"])): [str(c["name"]) for c in each.get("columns", ())] for each in tables}
    for each in tables:
        own = str(each["schema"]), str(each["name"])
        for parent in each.get("parents", ()):
            house.masks.check_renamed((parent["schema"], parent["name"]), own, columns[own])
    noted = noted_masks(house.root).get("masks", {})
    new = {pattern: kind for pattern, kind in house.masks.as_kinds.items() if pattern not in noted}
    for table, names in columns.items():
        Masks.of(new).check_there(*table, names)
    for pattern, kind in new.items():
        if not any(Masks.of({pattern: kind}).kinds(*table, names) for table, names in columns.items()):
            _logger.warning("--mask %s masks no column of a published table", pattern)


def check_kept(house: Warehouse, staging: Path) -> None:
    """Raise InvalidArgumentsError if the tables that the log in ``staging`` has fed had a mask of which ``house`` knows nothing.

    It was deleted, or is a copy from before the mask. A mask that a start names counts, also one that it takes back.
    """
    known = {*noted_masks(house.root).get("masks", {}), *house.new_masks}
    lost = {pattern: kind for pattern, kind in table_masks.read(staging).items() if pattern not in known}
    if lost:
        which = house.name if house.exists else f"{house.name}, which is new,"
        raise InvalidArgumentsError(
            f"the tables that the log in {staging} has fed had masks that {which} does not have:"
            f" {', '.join(f'{pattern}={kind}' for pattern, kind in sorted(lost.items()))}",
            hint=f"start run with {mask_options(lost)}; or to show the values from now on, with"
            f" {mask_options(dict.fromkeys(lost, OFF))}",
        )


def check_key(house: Warehouse) -> None:
    """Raise WarehouseError if the key of hashes is not that of the tables, InvalidArgumentsError if it is needed and not there."""
    _check_key(house, noted_masks(house.root).get("key"))


def _check_key(house: Warehouse, known: str | None) -> None:
    key = house.masks.fingerprint
    if None not in (key, known) and key != known:
        raise WarehouseError(
            f"{KEY_VARIABLE} is not the key with which {house.name} has hashed its columns",
            hint=f"set the former key: with another one the same value has another hash; or {another(house.root)}",
        )


def check_unchanged(house: Warehouse) -> None:
    """Raise WarehouseError if a start of `run` has noted other masks than those of ``house``. A writer holds the tables' lock."""
    if noted_masks(house.root).get("masks", {}) != house.masks.as_kinds:
        raise WarehouseError(
            f"a start of run has changed the masks of {house.name} since this command began",
            hint="start the command again: it then has the new masks",
        )


def settle(house: Warehouse, lock: TableLock, staging: Path) -> None:
    """Note the masks in force. Where they have changed, name the data from before, and let the tables be copied anew.

    Nobody else writes the tables while masks change (``lock``): rows that come later have the new masks. The log in ``staging``
    loses masks before the warehouse does, and gets new ones after it. So if the process ends in between, the log has none of which
    the warehouse does not know, and the next start adds the others.

    Raises WarehouseError for another key of hashes than before, and for a column of a key whose mask has changed: its rows could
    not be found any more. Raises InvalidArgumentsError if the key is needed and not there, and what `check_kept` raises.
    """
    check_kept(house, staging)
    found, masks, recorded = noted_masks(house.root), house.masks.as_kinds, table_masks.read(staging)
    _check_key(house, found.get("key"))
    is_lost = bool(recorded) and not found and house.source().position is not None
    if is_lost or found.get("masks", {}) != masks:
        with lock.alone():
            # The gaps of these epochs may not be recorded yet.
            epochs = list_epochs(staging)
            if is_lost:
                before, tables = _without_note(house, recorded, epochs)
            else:
                before, tables = _with_changes(house, found.get("masks", {}), epochs)
            for table, names in tables.items():
                _check_key_columns(house, table, names, Masks.of(before))
            key = table_masks.read_key(staging)
            if is_lost and HASH in before.values():  # of columns of keys, which no copy can give another hash
                _check_key(house, key)
            lsns = _want_copies(house, tables)
            # Not before: a change that is refused leaves the record as it is. And if the note is lost, and the process is killed
            # before this, only the record tells the next start that the tables need copies.
            table_masks.record(staging, {pattern: kind for pattern, kind in recorded.items() if pattern in masks}, key)
            _change(house, found, before, lsns)
    table_masks.record(staging, masks, noted_masks(house.root).get("key"))


def _with_changes(
    house: Warehouse, before: Mapping[str, str], epochs: Sequence[Epoch]
) -> tuple[Mapping[str, str], Mapping[Table, _Names]]:
    """Return the masks before, and the tables whose masks change, each with its names."""
    now = house.masks.as_kinds
    return before, _named(house, {text for text in {*before, *now} if before.get(text) != now.get(text)}, epochs)


def _without_note(
    house: Warehouse, recorded: Mapping[str, str], epochs: Sequence[Epoch]
) -> tuple[Mapping[str, str], Mapping[Table, _Names]]:
    """Return the same for a warehouse without a note, whose log has ``recorded`` masks.

    It has lost the note, or is a copy from before its first mask. So its values count as not masked: the worst is a copy too many.
    The columns of a key count as masked as recorded, because a key's mask can't have changed since.
    """
    _logger.warning(
        "%s has no _cdcpipe/masks.json: it has lost this file, or is a copy from before its first mask. So its values count as not"
        " masked",
        house.name,
    )
    tables = _named(house, {*recorded, *house.masks.as_kinds}, epochs)
    masks = Masks.of(recorded)
    before: dict[str, str] = {}
    for table, names in tables.items():
        for name in names:
            before |= {exactly(*name, column): kind for column, kind in masks.kinds(*name, _key(house, table)).items()}
    return before, tables


def _named(house: Warehouse, patterns: Collection[str], epochs: Sequence[Epoch]) -> dict[Table, _Names]:
    """Return the tables for which these masks are, each with its names (`table_names.mask_names`)."""
    parsed = [ColumnPattern.parse(text, "--mask").table for text in patterns]
    called = table_names.mask_names(house, house.tables(), epochs)
    return {table: names for table, names in called.items() if any(each.matches(*name) for each in parsed for name in names)}


def _want_copies(house: Warehouse, tables: Collection[Table]) -> dict[Table, int]:
    """Let the tables be copied anew. Returns up to where each may have rows with the former masks."""
    position = house.source().position
    lsns = {table: _masked_lsn(house, table, 0 if position is None else position.lsn) for table in tables}
    for table, lsn in lsns.items():
        want_copy(house, table, lsn + 1, MASKS_CHANGED)  # a copy at ``lsn`` has the former masks, too
    return lsns


def _change(house: Warehouse, found: Mapping[str, Any], before: Mapping[str, str], lsns: Mapping[Table, int]) -> None:
    path, masks = masks_path(house.root), house.masks
    now, key = masks.as_kinds, masks.fingerprint
    position = house.source().position
    make_directory(path.parent)
    noted = [{**table.to_json(), "until": format_lsn(lsn)} for table, lsn in lsns.items()]
    past = {"until": None if position is None else str(position), "masks": dict(before), "tables": noted}
    changes = [*found.get("changes", []), *([past] if lsns else [])]
    write_json(path, {"version": MASKS_VERSION, "masks": now, "key": key or found.get("key"), "changes": changes})
    if lsns:
        _name_old_masks(house, lsns, max(lsns.values()))


def _name_old_masks(house: Warehouse, tables: Collection[Table], until_lsn: int) -> None:
    """Warn of what keeps the old masks in the tables' files."""
    _logger.warning(
        "the masks have changed. Changes up to %s have the old masks, in the changelogs of %s; the replicas get the new ones"
        " when the tables are copied anew (run --heal). cdcpipe-spark purge removes the older changes; earlier versions of the"
        " tables' files go with --vacuum-retention. Stored histories keep the old masks in versions that have ended."
        " _cdcpipe/masks.json notes this",
        format_lsn(until_lsn),
        ", ".join(map(str, tables)),
    )
    left = [] if house.keeps_history else [table for table in tables if stored_histories.facts(house, table) is not None]
    if left:
        _logger.warning(
            "the stored histories of %s keep the old masks in all their versions: run adds nothing to them without --history"
            " table. Start it with this option before you purge old changes, or delete these histories",
            ", ".join(map(str, left)),
        )


def _masked_lsn(house: Warehouse, table: Table, lsn: int) -> int:
    """Return up to where the table may have rows with the masks that are noted now. ``lsn`` is the warehouse's position.

    It may be beyond that: because of a copy of the table, or a micro-batch that was killed.
    """
    begun = [position.lsn for each, position in landed_snapshots.unfinished(house) if each == table]
    return max(lsn, house.format.lsn(house.changelog(table)) or 0, *begun, *copies_until(house.versions(table)))


def _key(house: Warehouse, table: Table) -> list[str]:
    versions = house.versions(table)
    return [original_name(name) for name in versions[-1].key] if versions else []


def _check_key_columns(house: Warehouse, table: Table, names: _Names, before: Masks) -> None:
    """Raise WarehouseError if the mask of a key's column changes."""
    key = _key(house, table)
    then, now = ({column for name in names for column in masks.kinds(*name, key)} for masks in (before, house.masks))
    for column in sorted(then ^ now):
        raise WarehouseError(
            f"the mask of {table}.{column} can't be changed: it is part of the key, and {house.name} has rows of this table",
            hint=f"keep it ({HASH if column in then else OFF}), or {another(house.root)}",
        )
