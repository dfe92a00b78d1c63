"""What is wrong with changes, or with the replica that they come to, is found and named here."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spark_sink.replica import reduction
from spark_sink.schema.table import has_key
from spark_sink.warehouse.warehouse import WarehouseError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from spark_sink.replica.pieces import Piece
    from spark_sink.replica.reduction import Summary
    from spark_sink.schema.table import Table, Version
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["check_growth", "checked_summary", "keyed_versions", "leave_out_keyless"]

_logger = logging.getLogger(__name__)


def keyed_versions(warehouse: Warehouse, table: Table) -> list[Version]:
    """Return a table's versions; WarehouseError for a table without a key, of which there is no replica."""
    versions = warehouse.versions(table)
    if not has_key(versions):
        raise WarehouseError(f"{table} has no key: its rows can't be told apart, and there is its changelog alone")
    return versions


def leave_out_keyless(changes: DataFrame, piece: Piece, table: Table, what: str) -> DataFrame:
    """Leave out changes or rows that have no value for a later key, whose columns came with it; say of ``what`` how many."""
    kept = reduction.with_key(changes, piece.columns)
    left_out = changes.count() - kept.count()
    if left_out:
        _logger.warning(
            "table %s: %d %s from before its key was (%s) have no value for that, and are in the changelog alone; for the "
            "replica: cdcpipe-spark snapshot --table %s",
            table,
            left_out,
            what,
            ", ".join(piece.key),
            table,
        )
    return kept


def checked_summary(changes: DataFrame, piece: Piece, table: Table) -> Summary:
    """Return what `reduction.summarize` finds; WarehouseError if some change has no value for the key."""
    summary = reduction.summarize(changes, piece.columns)
    if summary.keyless:
        raise WarehouseError(
            f"{summary.keyless} changes of {table} have no value for its key ({', '.join(piece.key)})",
            hint="its columns are younger than these changes; the changelog has all of it",
        )
    return summary


def check_growth(table: Table, piece: Piece, wanted: int, grown: int) -> None:
    """Name a table whose rows are fewer than inserts and deletes make them: some had the key of another.

    They are more where changes meet rows that the replica did not have: those from before the slot, and those that were left out.
    After a snapshot it has all, so rows have come to the table without a change: then it is named, too.
    """
    if grown > wanted and piece.has_all:
        _logger.warning(
            "table %s: %d rows that were changed or deleted were not in the replica: they came to the table without a change, as "
            "those of a partition that is attached do. The replica may lack more: cdcpipe-spark snapshot --table %s",
            table,
            grown - wanted,
            table,
        )
    if grown < wanted:
        _logger.warning(
            "table %s: by its key (%s) %d rows that came were there already, and were merged with those. Either that did not tell "
            "its rows apart then, or the replica was not what the table was. A new beginning: cdcpipe-spark snapshot --table %s",
            table,
            ", ".join(piece.key),
            wanted - grown,
            table,
        )
