"""The merges that may be committed and not checked: _cdcpipe/merges/NAME.json exists from before the commit until after the check.

After a merge by Spark its rows are counted: the count may show that the table needs a copy. A process that is killed between commit
and count leaves the file, and the next process finds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdcpipe.lsn import LSN, format_lsn
from spark_sink.warehouse.table_files import TableFiles

if TYPE_CHECKING:
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["record_check", "record_start", "unchecked"]

_FILES: Final = TableFiles("merges", lambda value: int(LSN.parse(value["lsn"])))


def record_start(house: Warehouse, table: Table, lsn: int) -> None:
    """Record that a merge up to an LSN begins. Call this before its commit. Durable at return."""
    _FILES.write(house, table, {"lsn": format_lsn(lsn)})


def record_check(house: Warehouse, table: Table) -> None:
    """Record that the merge is checked."""
    _FILES.remove(house, table)


def unchecked(house: Warehouse) -> list[tuple[Table, int]]:
    """Return the tables with such a merge, each with the LSN up to which it merges."""
    return _FILES.read_all(house)
