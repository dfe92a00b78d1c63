"""Finds changes that do not fit a table's key or its replica, and reports them.

A writer of the replica passes a function `Wants`, which records that the table needs a copy. A reader passes none.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from cdcpipe.lsn import format_lsn
from spark_sink.replica import reduction
from spark_sink.schema.table import has_key, key_lost_at
from spark_sink.warehouse.errors import WarehouseError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from pyspark.sql import DataFrame

    from spark_sink.replica.pieces import Piece
    from spark_sink.replica.reduction import Summary
    from spark_sink.schema.table import Table, Version
    from spark_sink.warehouse.warehouse import Warehouse

    Wants: TypeAlias = Callable[[str], None]
    """Records that the table needs a copy, for the reason given."""

__all__ = [
    "Wants",
    "check_growth",
    "check_key_kept",
    "keyed_changes",
    "keyed_versions",
    "leave_out_keyless",
    "readable_versions",
]

_logger = logging.getLogger(__name__)


def check_key_kept(warehouse: Warehouse, table: Table, changes: DataFrame, until_lsn: int) -> None:
    """Raise WarehouseError if there are changes up to ``until_lsn`` without a key: a replay would leave them out."""
    place = key_lost_at(readable_versions(warehouse, table, changes), until_lsn)
    if place is None:
        return
    lsn, ordinal = F.col("_cdc_end_lsn"), F.col("_cdc_ordinal")
    is_later = (lsn > place[0]) | ((lsn == place[0]) & (ordinal >= place[1]))
    if not changes.where(is_later & (lsn <= until_lsn)).isEmpty():
        raise WarehouseError(
            f"{table} has no key since {format_lsn(place[0])}, and has changed since: no key tells its rows apart",
            hint="its changelog has the changes; give it a primary key on the server, or ask for an earlier position",
        )


def readable_versions(warehouse: Warehouse, table: Table, changes: DataFrame) -> list[Version]:
    """Return a table's versions without those of which the changelog ``changes`` lacks columns: it has no change under them.

    A micro-batch records a version before the changes. With Parquet, only these bring the columns.
    """
    there = set(changes.columns)
    return [version for version in warehouse.versions(table) if version.named <= there]


def keyed_versions(warehouse: Warehouse, table: Table, changes: DataFrame | None = None) -> list[Version]:
    """Return a table's versions, of its changelog ``changes`` the `readable_versions`.

    Raises WarehouseError for a table without a key, which has no replica, and may have no changelog.
    """
    versions = warehouse.versions(table) if changes is None else readable_versions(warehouse, table, changes)
    if not has_key(versions):
        raise WarehouseError(
            f"{table} has no key, which identifies its rows: it has a changelog, but no replica",
            hint="read its changelog; or give it a primary key on the server: cdcpipe-spark run then copies it",
        )
    return versions


def leave_out_keyless(rows: DataFrame, piece: Piece, table: Table, want: Wants | None = None) -> DataFrame:
    """Leave out the replica's rows that have no value for the piece's key. Warns how many."""
    kept = reduction.with_key(rows, piece.columns)
    left_out = rows.count() - kept.count()
    if left_out:
        _name_keyless(table, piece, left_out, "rows", want)
    return kept


def keyed_changes(changes: DataFrame, piece: Piece, table: Table, want: Wants | None = None) -> tuple[DataFrame, Summary]:
    """Return the changes that have a value for the piece's key, and their summary. Warns how many are left out.

    The others are from before the key, or from a time when its columns took NULL: the catalog knows only the key of today.
    Also warns of updates that have only a part of the old key. They stay: their new key is whole.
    """
    summary = reduction.summarize(changes, piece.columns)
    if summary.keyless:
        _name_keyless(table, piece, summary.keyless, "changes", want)
        changes = reduction.with_key(changes, piece.columns)
        summary = reduction.summarize(changes, piece.columns)
    if summary.partial_old_keys:
        _name_partial_old_keys(table, piece, summary.partial_old_keys, want)
    return changes, summary


def _name_keyless(table: Table, piece: Piece, count: int, what: str, want: Wants | None) -> None:
    """Warn of changes or rows without a value for the key; ``what`` says of which."""
    key = ", ".join(piece.key)
    _logger.warning(
        "table %s: %d %s have no value for its key (%s), and are only in the changelog; to copy their rows to the replica, the "
        "table is copied anew: by run --heal, or %s",
        table,
        count,
        what,
        key,
        table.copying,
    )
    if want is not None:
        want(f"{what} have no value for its key ({key})")


def _name_partial_old_keys(table: Table, piece: Piece, count: int, want: Wants | None) -> None:
    """Warn of updates that may have changed the key of a row that nothing tells."""
    key = ", ".join(piece.key)
    _logger.warning(
        "table %s: %d updates have only a part of the key (%s) that their rows had before, so nothing tells which rows these were. "
        "The replica may have rows twice, or lack values. A reason may be that a partition's replica identity is another one than "
        "the table's: cdcpipe doctor names it. Repair: run --heal, or %s",
        table,
        count,
        key,
        table.copying,
    )
    if want is not None:
        want(f"updates have only a part of the key ({key}) that their rows had before")


def check_growth(table: Table, piece: Piece, wanted: int, grown: int, want: Wants | None = None) -> None:
    """Warn if the replica's number of rows does not fit the inserts and deletes. It should have grown by ``wanted`` rows.

    If it grew less, some rows had the key of another row. If it grew more, changes met rows that the replica lacks: rows from
    before the slot, and rows that were left out. After a snapshot the replica lacks no rows. So some came to the table without a
    change, or their key has changed, and the server did not send the old one. Only then this is a warning, too.
    """
    if grown > wanted and piece.has_all:
        _logger.warning(
            "table %s: %d rows that were changed or deleted were not in the replica: they came to the table without a change, for "
            "example with a partition that was attached; or their key changed, and the server did not send the old one, because "
            "a partition's replica identity is another one than the table's (cdcpipe doctor names it). The replica may lack more "
            "rows, or have some twice. Repair: run --heal, or %s",
            table,
            grown - wanted,
            table.copying,
        )
        if want is not None:
            want("rows were changed or deleted that the replica did not have")
    if grown < wanted:
        _logger.warning(
            "table %s: by its key (%s), %d new rows are rows that the replica had already, and were merged with them. Either the "
            "key was not unique at that time, or the replica differed from the table. Repair: run --heal, "
            "or %s",
            table,
            ", ".join(piece.key),
            wanted - grown,
            table.copying,
        )
        if want is not None:
            want(f"by its key ({', '.join(piece.key)}), new rows were rows that the replica had already")
