"""The LSN up to which each changelog may lack changes, because a purge has removed them: _cdcpipe/purged/NAME.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdcpipe.lsn import LSN, format_lsn
from spark_sink.schema.table import AFTER_ALL, copies_until
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.table_files import TableFiles

if TYPE_CHECKING:
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["PurgedError", "check", "last_lsn", "record", "record_restored"]

_FILES: Final = TableFiles("purged", lambda value: int(LSN.parse(value["lsn"])))


class PurgedError(WarehouseError):
    """Something needs changes that were purged."""


def record(house: Warehouse, table: Table, lsn: int) -> None:
    """Record that a table's changelog may lack changes up to ``lsn``. Call this before any are removed."""
    _FILES.write(house, table, {"lsn": format_lsn(max(lsn, last_lsn(house, table)))})


def record_restored(house: Warehouse, table: Table, end_lsn: int, before_lsn: int = AFTER_ALL[0]) -> None:
    """Record what a changelog at ``end_lsn`` may lack after RESTORE: changes up to there, and the table's copies.

    A copy may be later than each change. Those from ``before_lsn`` on have come after RESTORE.
    """
    record(house, table, max([end_lsn, *copies_until(house.versions(table), before_lsn - 1)]))


def last_lsn(house: Warehouse, table: Table) -> int:
    """Return the LSN up to which the table's changelog may lack changes; 0 if it is complete."""
    return _FILES.read(house, table) or 0


def check(house: Warehouse, table: Table, after_lsn: int) -> None:
    """Raise PurgedError if changes after ``after_lsn`` were purged from the table's changelog.

    Call this after pinning the changelog version and before using its rows.
    """
    lsn = last_lsn(house, table)
    if after_lsn < lsn:
        raise PurgedError(
            f"this needs changes of {table} that were removed: its changelog was purged up to {format_lsn(lsn)}",
            hint=f"{table.copying} gives the table a new beginning",
        )
