"""Up to where a table had no change. No pyspark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_sink.warehouse import new_changelogs, purged_changes

if TYPE_CHECKING:
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["quiet_until"]


def quiet_until(house: Warehouse, table: Table, lsn: int) -> int:
    """Return up to where a table's changelog has no change after ``lsn``, as far as its files tell; otherwise ``lsn``.

    A changelog that lacks changes after ``lsn``, because they were purged or were in an earlier changelog, does not tell.
    """
    if max(purged_changes.last_lsn(house, table), new_changelogs.begun_lsn(house, table)) > lsn:
        return lsn
    return house.format.quiet_until(house.changelog(table), lsn, house.logs)
