"""Replays a changelog: returns the rows after its changes, from the beginning or from a replica's rows. Writes nothing.

The rules are those of merge.py. Changes are taken piece by piece (pieces.py). Each piece is reduced (reduction.py) together with
the rows so far whose keys it contains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from spark_sink.replica import reduction
from spark_sink.replica.checks import check_growth, checked_summary, keyed_versions, leave_out_keyless
from spark_sink.replica.fills import filled
from spark_sink.replica.layout import OPTIONAL
from spark_sink.replica.pieces import cut_pieces
from spark_sink.spark.sql import quote

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from spark_sink.replica.checks import Wants
    from spark_sink.replica.pieces import Piece
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["LAST_LSN", "as_changes", "changes_of", "replay", "without_unneeded"]

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
) -> DataFrame:
    """Return the rows after the changes in (after_lsn, until_lsn], in the changelog's layout (see `without_unneeded`).

    ``base`` has the replica's rows at ``after_lsn``. Rows whose keys are in no change are passed on unchanged. The replay begins
    with the last snapshot, if there is one. With ``is_checked`` the rows are computed at once and counted (`check_growth`). Changes
    from before the table had a key are always counted, because nothing kept their rows apart. ``want`` is for a writer of the
    replica (checks.py).

    Raises WarehouseError if changes that it needs have been purged.
    """
    taken = changes.where((F.col("_cdc_op") == "snapshot") & F.col("_cdc_end_lsn").between(after_lsn + 1, until_lsn))
    snapshot_lsn = taken.agg(F.max("_cdc_end_lsn")).collect()[0][0]
    if snapshot_lsn is not None:
        base, after_lsn = taken.where(F.col("_cdc_end_lsn") == snapshot_lsn), snapshot_lsn
    _check_kept(warehouse, table, changes, after_lsn if snapshot_lsn is None else snapshot_lsn - 1, until_lsn)
    rows = None if base is None else as_changes(base, changes.schema)
    for piece in cut_pieces(keyed_versions(warehouse, table), after_lsn, until_lsn):
        part = changes_of(changes, piece)
        untouched = None
        if rows is not None:
            # Otherwise the plan of each piece contains the plans of all pieces before it, several times.
            rows = rows.localCheckpoint()
        if rows is not None and not piece.is_new_table:
            if piece.fills:
                rows = filled(rows, piece.fills).localCheckpoint()
            if piece.is_new_key:
                rows = leave_out_keyless(rows, piece, table, "rows", want)
            if base is not None:
                rows, untouched = _split(rows, part, piece)
            part = rows.unionByName(part)
        rows = as_changes(_rows_left(part, piece, table, is_checked=is_checked, want=want), changes.schema)
        if untouched is not None:
            rows = rows.unionByName(untouched)
    # If no change counts, the table is empty.
    return as_changes(changes.limit(0), changes.schema) if rows is None else rows


def _check_kept(warehouse: Warehouse, table: Table, changes: DataFrame, after_lsn: int, until_lsn: int) -> None:
    """Raise WarehouseError if changes in (after_lsn, until_lsn] were purged, unless a later TRUNCATE or DROP ends their rows."""
    purged_lsn = warehouse.purged_lsn(table)
    if after_lsn < purged_lsn:
        is_kept = F.col("_cdc_end_lsn").between(purged_lsn + 1, until_lsn)
        if changes.where(reduction.ends_all() & is_kept).isEmpty():
            warehouse.check_changes(table, after_lsn)


def _split(rows: DataFrame, changes: DataFrame, piece: Piece) -> tuple[DataFrame, DataFrame | None]:
    """Divide rows into those whose key is in some change, and the others. A TRUNCATE affects all rows."""
    if not changes.where(reduction.ends_all()).isEmpty():
        return rows, None
    touched = reduction.touched_keys(changes, piece.columns)
    key = reduction.key_struct(rows, piece.columns)
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


def _rows_left(changes: DataFrame, piece: Piece, table: Table, *, is_checked: bool, want: Wants | None) -> DataFrame:
    """Return the rows after the changes of a piece."""
    if piece.is_before_key:
        changes = leave_out_keyless(changes, piece, table, "changes", want)
    summary = checked_summary(changes, piece, table)
    rows = reduction.reduce(changes, piece.columns, reduction.data_columns(changes.schema), summary)
    rows = rows.where(~F.col("_cdc_gone")).withColumn("_cdc_unchanged", F.array_union("_cdc_missing", "_cdc_moved"))
    if (is_checked or piece.is_before_key) and summary.truncated_at is None:
        rows = rows.localCheckpoint()
        check_growth(table, piece, summary.growth, rows.count(), want)
    return rows


def as_changes(rows: DataFrame, schema: StructType) -> DataFrame:
    """Return a replica's rows, or reduced rows, in a changelog's layout, as updates before every change.

    Unknown values stay marked as unsent.
    """
    first = {"_cdc_op": F.lit("update"), "_cdc_epoch": F.lit(0), "_cdc_end_lsn": F.lit(0), "_cdc_ordinal": F.lit(0)}
    names = (*reduction.data_columns(schema), *OPTIONAL)
    kept = {name: F.col(quote(name)) for name in names if name in rows.columns} | first
    return rows.select(*(kept.get(field.name, F.lit(None)).cast(field.dataType).alias(field.name) for field in schema.fields))


def without_unneeded(rows: DataFrame) -> DataFrame:
    """Return only the table's columns, and ``_cdc_exact`` and ``_cdc_unchanged`` if they are not empty in all rows."""
    unknown = F.when(F.size("_cdc_unchanged") > 0, F.col("_cdc_unchanged"))
    exact = F.when(F.size("_cdc_exact") > 0, F.col("_cdc_exact"))
    used = rows.agg(F.count(exact).alias("_cdc_exact"), F.count(unknown).alias("_cdc_unchanged")).collect()[0]
    kept = [name for name in OPTIONAL if used[name]]
    columns = reduction.data_columns(rows.schema)
    rows = rows.withColumns({"_cdc_exact": exact, "_cdc_unchanged": unknown})
    return rows.select(*(F.col(quote(name)) for name in (*columns, *kept)))
