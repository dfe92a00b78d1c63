"""What a changelog takes over from an earlier one of its table, which was lost or deleted: nothing. No pyspark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_sink.warehouse import purged_changes
from spark_sink.warehouse.comments import forget_comments

if TYPE_CHECKING:
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["record_begin"]


def record_begin(house: Warehouse, table: Table, lsn: int) -> None:
    """Record that a table gets a changelog, which lacks everything up to ``lsn``. Call this before the changelog exists.

    A stored history of an earlier changelog ends with that one. It must not go on with the new one, as if nothing had happened in
    between. What counts as purged, it does not pass (replica/history_table.py).

    The recorded comments go, too: the new changelog does not have them yet.
    """
    forget_comments(house, table)
    if house.format.exists(house.history(table)):
        purged_changes.record(house, table, lsn)
