"""Where a changelog begins anew, because an earlier one of its table was lost or deleted: _cdcpipe/begun/NAME.json. No pyspark.

It takes nothing over from the earlier one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdcpipe.lsn import LSN, format_lsn
from spark_sink.warehouse.comments import forget_comments
from spark_sink.warehouse.table_files import TableFiles

if TYPE_CHECKING:
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["begun_lsn", "record_begin"]

_FILES: Final = TableFiles("begun", lambda value: int(LSN.parse(value["lsn"])))


def record_begin(house: Warehouse, table: Table, lsn: int) -> None:
    """Record that a table gets a changelog, which lacks everything up to ``lsn``. Call this before the changelog exists.

    A stored history of an earlier changelog ends with that one. It must not go on with the new one, as if nothing had happened in
    between (replica/history_table.py). Nothing was purged: the replica and a new history begin with what the new one has.

    The recorded comments go, too: the new changelog does not have them yet.
    """
    forget_comments(house, table)
    if house.format.exists(house.history(table)):
        _FILES.write(house, table, {"lsn": format_lsn(lsn)})


def begun_lsn(house: Warehouse, table: Table) -> int:
    """Return the LSN up to which the table's changelog lacks what an earlier one had; 0 if there was none that is known."""
    return _FILES.read(house, table) or 0
