"""Replays a changelog: returns the rows after its changes, from the beginning or from a replica's rows. Writes nothing.

The rules are those of merge.py. Changes are taken piece by piece (pieces.py). Each piece is reduced (reduction.py) together with
the rows so far whose keys it contains.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from spark_sink.replica import reduction, row_keys
from spark_sink.replica.checks import check_growth, keyed_changes, keyed_versions, leave_out_keyless, readable_versions
from spark_sink.replica.ends import ends_all, first_time
from spark_sink.replica.fills import filled
from spark_sink.replica.former_keys import has_uncertain_key
from spark_sink.replica.former_masks import with_new_masks
from spark_sink.replica.layout import OPTIONAL
from spark_sink.replica.pieces import cut_pieces
from spark_sink.schema.table import copies_until
from spark_sink.schema.types import DELETED_AT
from spark_sink.spark.sql import quote
from spark_sink.warehouse import purged_changes
from spark_sink.warehouse.errors import WarehouseError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

    from spark_sink.replica.checks import Wants
    from spark_sink.replica.pieces import Piece
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["LAST_LSN", "as_changes", "changes_of", "is_deleted", "replay", "replay_all", "without_unneeded"]

_logger = logging.getLogger(__name__)

LAST_LSN: Final = (1 << 63) - 1
"""The greatest LSN of a change: that of Spark's bigint."""


def replay(
    warehouse: Warehouse,
    table: Table,
    changes: DataFrame,
    base: DataFrame | None = None,
    *,
    after_lsn: int = 0,
    until_lsn: int = LAST_LSN,
    is_checked: bool = False,
    want: Wants | None = None,
    keeps_deleted: bool = False,
) -> DataFrame:
    """Return the rows after the changes in (after_lsn, until_lsn], in the changelog's layout (see `without_unneeded`).

    ``base`` has the replica's rows at ``after_lsn``. Rows whose keys are in no change are passed on unchanged. The replay begins
    with the last snapshot, if there is one. With ``is_checked`` the rows are computed at once and counted (`check_growth`). Changes
    from before the table had a key are always counted, because nothing kept their rows apart. ``want`` is for a writer of the
    replica (checks.py). With ``keeps_deleted`` the result also has the rows that were deleted since the beginning of the replay
    (`is_deleted`), and ``base`` may have deleted rows.

    Raises WarehouseError if changes that it needs have been purged.
    """
    taken = changes.where((F.col("_cdc_op") == "snapshot") & F.col("_cdc_end_lsn").between(after_lsn + 1, until_lsn))
    snapshot_lsn = taken.agg(F.max("_cdc_end_lsn")).collect()[0][0]
    if snapshot_lsn is not None:
        base, after_lsn = taken.where(F.col("_cdc_end_lsn") == snapshot_lsn), snapshot_lsn
    _check_kept(warehouse, table, changes, after_lsn if snapshot_lsn is None else snapshot_lsn - 1, until_lsn)
    rows = None if base is None else as_changes(base, changes.schema)
    for piece in cut_pieces(keyed_versions(warehouse, table, changes), after_lsn, until_lsn):
        part = changes_of(changes, piece)
        untouched = None
        if rows is not None:
            # Otherwise the plan of each piece contains the plans of all pieces before it, several times.
            rows = rows.localCheckpoint()
        if rows is not None and not piece.is_new_table:
            if piece.fills:
                rows = filled(rows, piece.fills).localCheckpoint()
            if piece.is_new_key:
                rows, untouched = _fitting(rows, piece, table, want, keeps_deleted=keeps_deleted)
            if base is not None and untouched is None:
                rows, untouched = _split(rows, part, piece)
            part = rows.unionByName(part)
        elif rows is not None and keeps_deleted:
            rows, untouched = _fitting(_ended(rows, part), piece, table, want, keeps_deleted=True)
            part = rows.unionByName(part)
        left = _rows_left(part, piece, table, is_checked=is_checked, want=want, keeps_deleted=keeps_deleted)
        rows = as_changes(left, changes.schema)
        if untouched is not None:
            rows = rows.unionByName(untouched)
    # If no change counts, the table is empty.
    return as_changes(changes.limit(0), changes.schema) if rows is None else rows


def replay_all(
    warehouse: Warehouse,
    table: Table,
    changes: DataFrame,
    base: DataFrame | None = None,
    *,
    after_lsn: int = 0,
    until_lsn: int = LAST_LSN,
    is_checked: bool = False,
    want: Wants | None = None,
) -> DataFrame:
    """Do the same as `replay`, and also return all deleted rows: those from before the last snapshot, too."""
    lsn = _last_copy(warehouse, table, changes.where(F.col("_cdc_end_lsn").between(after_lsn + 1, until_lsn)))
    rows = replay(
        warehouse,
        table,
        changes if lsn is None else changes.where(F.col("_cdc_end_lsn") >= lsn),  # `replay` does not see a copy without rows
        base if lsn is None else None,  # otherwise it begins with the snapshot
        after_lsn=after_lsn,
        until_lsn=until_lsn,
        is_checked=is_checked,
        want=want,
        keeps_deleted=True,
    )
    return rows if lsn is None else with_former(warehouse, table, changes, rows, base, after_lsn, lsn, until_lsn)


def with_former(
    warehouse: Warehouse,
    table: Table,
    changes: DataFrame,
    rows: DataFrame,
    former: DataFrame | None,
    former_lsn: int,
    snapshot_lsn: int,
    until_lsn: int,
    *,
    is_set_back: bool = False,
) -> DataFrame:
    """Add to the rows since a snapshot those from before it, as deleted rows: the snapshot does not have them.

    ``former`` has the replica's rows at ``former_lsn``. If it is before the snapshot, the changes in between apply, as far as the
    changelog has them. If they cannot be applied, only the rows of ``former`` are added. Masks that have changed before the
    snapshot apply to the rows that are added, too. If RESTORE has set the replica back (``is_set_back``), these are all masks that
    have ever changed, because its rows may be from before any copy. If the table has lost its key, nothing is added. If the key has
    another type, or its values other texts, since a row came, nobody can tell whether the snapshot has the row again: it is added
    only if it was deleted before.
    """
    found = None
    # A replica that was beyond this snapshot before it came lacks it all the same.
    copied_lsn = 0 if is_set_back else snapshot_lsn - 1
    if former_lsn < snapshot_lsn - 1:
        try:
            found = replay_all(warehouse, table, changes, former, after_lsn=former_lsn, until_lsn=snapshot_lsn - 1)
        except WarehouseError as ex:
            _logger.warning("%s: rows that were deleted before the table was copied may be missing: %s", table, ex)
            copied_lsn = min(copied_lsn, former_lsn)
    if found is None:
        if former is None:
            return rows
        found = as_changes(former, changes.schema)
    pieces = [*cut_pieces(readable_versions(warehouse, table, changes), snapshot_lsn - 1, until_lsn)]
    if not pieces:  # the table has no key since before the copy, which would tell whether the copy has a row again
        _logger.warning("%s: rows that were deleted before the table was copied are missing: it has lost its key", table)
        return rows
    piece = pieces[-1]
    found = _without_uncertain(warehouse, table, changes, found, piece, snapshot_lsn)
    found = with_new_masks(warehouse, table, found, copied_lsn)
    found, keyless = _keyed(_ended(found, changes.where(F.col("_cdc_end_lsn") == snapshot_lsn)), piece)
    # Under another key than before, several deleted rows may have the same key.
    newest = Window.partitionBy("_cdc_at").orderBy(F.desc("_cdc_commit_time"))
    found = found.withColumn("_cdc_at", row_keys.key_struct(found, piece.columns))
    found = found.withColumn("_cdc_number", F.row_number().over(newest)).where("_cdc_number = 1")
    rows = rows.localCheckpoint()
    there = rows.select(row_keys.key_struct(rows, piece.columns).alias("_cdc_there"))
    found = found.join(there, F.col("_cdc_at") == F.col("_cdc_there"), "left_anti").drop("_cdc_at", "_cdc_number")
    return rows.unionByName(found).unionByName(keyless)


def _without_uncertain(
    warehouse: Warehouse, table: Table, changes: DataFrame, former: DataFrame, piece: Piece, snapshot_lsn: int
) -> DataFrame:
    """Leave out the existing rows of which a snapshot may have the key in another form. Warns if there are any."""
    is_uncertain = has_uncertain_key(warehouse, table, changes, piece, snapshot_lsn)
    if is_uncertain is None:
        return former
    uncertain = is_uncertain & ~is_deleted()
    if former.where(uncertain).isEmpty():
        return former
    _logger.warning(
        "%s: rows that were deleted before the table was copied may be missing: the key has another type since they came, "
        "or its values have other texts, and nothing tells which of them the copy has again",
        table,
    )
    return former.where(~uncertain)


def _last_copy(warehouse: Warehouse, table: Table, changes: DataFrame) -> int | None:
    """Return the position of the last snapshot among these changes. That of an empty table is a TRUNCATE."""
    copies = list(copies_until(warehouse.versions(table)))
    is_empty_copy = (F.col("_cdc_op") == "truncate") & F.col("_cdc_end_lsn").isin(copies)
    lsn: int | None = changes.where((F.col("_cdc_op") == "snapshot") | is_empty_copy).agg(F.max("_cdc_end_lsn")).collect()[0][0]
    return lsn


def is_deleted() -> Column:
    """Return an expression: whether a row of `replay` is deleted. Its ``_cdc_commit_time`` says when."""
    return F.col("_cdc_op") == "delete"


def _ended(rows: DataFrame, changes: DataFrame) -> DataFrame:
    """Return the rows as deleted ones. Those that exist are deleted by the first of these changes."""
    time = first_time(changes)
    ended = {
        "_cdc_commit_time": F.when(is_deleted(), F.col("_cdc_commit_time")).otherwise(time),
        "_cdc_op": F.lit("delete"),
        "_cdc_ordinal": F.lit(-1),
    }
    return rows.withColumns(ended).localCheckpoint()


def _keyed(rows: DataFrame, piece: Piece) -> tuple[DataFrame, DataFrame]:
    """Divide rows into those that have a value for the piece's key, and the others."""
    keyed, lacks = reduction.with_keys(rows, piece.columns), reduction.lacks_key(piece.columns)
    names = [*map(quote, rows.columns)]
    return keyed.where(~lacks).select(*names), keyed.where(lacks).select(*names)


def _fitting(
    rows: DataFrame, piece: Piece, table: Table, want: Wants | None, *, keeps_deleted: bool
) -> tuple[DataFrame, DataFrame | None]:
    """Return the rows that have a value for the piece's key, and the deleted ones that lack it and stay as they are."""
    if not keeps_deleted:
        return leave_out_keyless(rows, piece, table, want), None
    deleted, keyless = _keyed(rows.where(is_deleted()), piece)
    return leave_out_keyless(rows.where(~is_deleted()), piece, table, want).unionByName(deleted), keyless


def _check_kept(warehouse: Warehouse, table: Table, changes: DataFrame, after_lsn: int, until_lsn: int) -> None:
    """Raise WarehouseError if changes in (after_lsn, until_lsn] were purged, unless a later TRUNCATE or DROP ends their rows."""
    purged_lsn = purged_changes.last_lsn(warehouse, table)
    if after_lsn < purged_lsn:
        is_kept = F.col("_cdc_end_lsn").between(purged_lsn + 1, until_lsn)
        if changes.where(ends_all() & is_kept).isEmpty():
            purged_changes.check(warehouse, table, after_lsn)


def _split(rows: DataFrame, changes: DataFrame, piece: Piece) -> tuple[DataFrame, DataFrame | None]:
    """Divide rows into those whose key is in some change, and the others. A TRUNCATE affects all rows."""
    if not changes.where(ends_all()).isEmpty():
        return rows, None
    touched = reduction.touched_keys(changes, piece.columns)
    key = row_keys.key_struct(rows, piece.columns)
    return (
        rows.join(touched, key == F.col("_cdc_touched"), "left_semi"),
        rows.join(touched, key == F.col("_cdc_touched"), "left_anti"),
    )


def changes_of(changes: DataFrame, piece: Piece) -> DataFrame:
    """Return the changes of a changelog that belong to a piece."""
    wanted = (F.col("_cdc_end_lsn") > piece.after_lsn) & (F.col("_cdc_end_lsn") <= piece.until_lsn)
    if piece.first_ordinal:
        wanted &= F.col("_cdc_ordinal") >= piece.first_ordinal
    if piece.end_ordinal is not None:
        wanted &= F.col("_cdc_ordinal") < piece.end_ordinal
    return changes.where(wanted)


def _rows_left(
    changes: DataFrame, piece: Piece, table: Table, *, is_checked: bool, want: Wants | None, keeps_deleted: bool
) -> DataFrame:
    """Return the rows after the changes of a piece."""
    changes, summary = keyed_changes(changes, piece, table, want)
    columns = reduction.data_columns(changes.schema)
    rows = reduction.reduce(changes, piece.columns, columns, summary, keeps_deleted=keeps_deleted)
    exists = ~F.col("_cdc_gone")
    rows = rows.where(F.col("_cdc_has_row") if keeps_deleted else exists).withColumn(
        "_cdc_unchanged", F.array_union(F.array_union("_cdc_missing", "_cdc_moved"), "_cdc_unknown")
    )
    if is_checked or piece.is_before_key:
        rows = rows.localCheckpoint()
        check_growth(table, piece, reduction.growth(changes, summary), rows.where(exists).count(), want)
    return rows


def as_changes(rows: DataFrame, schema: StructType, also: Sequence[str] = ()) -> DataFrame:
    """Return a replica's rows, or reduced rows, in a changelog's layout, as updates before every change.

    Unknown values stay marked as unsent. A deleted row becomes a delete with the row's values and the time of its deletion. The
    columns ``also`` stay, too.
    """
    first = {"_cdc_op": F.lit("update"), "_cdc_epoch": F.lit(0), "_cdc_end_lsn": F.lit(0), "_cdc_ordinal": F.lit(0)}
    if DELETED_AT in rows.columns:
        is_gone = F.col(DELETED_AT).isNotNull()
        first["_cdc_op"] = F.when(is_gone, F.lit("delete")).otherwise(F.lit("update"))
        first["_cdc_commit_time"] = F.col(DELETED_AT)
        first["_cdc_ordinal"] = F.when(is_gone, F.lit(-1)).otherwise(F.lit(0))  # a row that exists comes after a deleted one
    names = (*reduction.data_columns(schema), *OPTIONAL)
    kept = {name: F.col(quote(name)) for name in names if name in rows.columns} | first
    return rows.select(
        *(kept.get(field.name, F.lit(None)).cast(field.dataType).alias(field.name) for field in schema.fields), *also
    )


def without_unneeded(rows: DataFrame, gone: Collection[str] = (), *, keeps_deleted: bool = False) -> DataFrame:
    """Return only the table's columns, and ``_cdc_exact`` and ``_cdc_unchanged`` if they are not empty in all rows.

    The columns ``gone`` (`schema.table.gone_columns`) are left out. With ``keeps_deleted`` the result has the column
    ``_cdc_deleted_at``.
    """
    rows = reduction.without_marks(rows, gone)
    unknown = F.when(F.size("_cdc_unchanged") > 0, F.col("_cdc_unchanged"))
    exact = F.when(F.size("_cdc_exact") > 0, F.col("_cdc_exact"))
    used = rows.agg(F.count(exact).alias("_cdc_exact"), F.count(unknown).alias("_cdc_unchanged")).collect()[0]
    kept = [name for name in OPTIONAL if used[name]]
    columns = [name for name in reduction.data_columns(rows.schema) if name not in gone]
    rows = rows.withColumns({"_cdc_exact": exact, "_cdc_unchanged": unknown})
    deleted_at = [F.when(is_deleted(), F.col("_cdc_commit_time")).alias(DELETED_AT)] if keeps_deleted else []
    return rows.select(*map(quote, columns), *deleted_at, *kept)
