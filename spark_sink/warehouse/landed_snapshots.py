"""The snapshots that are being landed: _cdcpipe/snapshots/NAME.json exists while a table may have a part of its snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spark_sink.files import places
from spark_sink.staging.log import Position
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.table_files import TableFiles

if TYPE_CHECKING:
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["KILLED", "adds_rows", "record_end", "record_start", "take_back", "unfinished"]

KILLED: Final = "a copy of its rows was killed"
"""Why a table needs another copy after an unfinished snapshot was taken back."""

_FILES: Final = TableFiles("snapshots", lambda value: (Position.parse(value["position"]), bool(value.get("adds_rows", False))))


def record_start(house: Warehouse, table: Table, position: Position, *, adds_rows: bool = False) -> None:
    """Record the start of landing a table's snapshot. Call this before any of its rows are in the tables.

    With ``adds_rows`` the changelog exists, and gets at least one row with the snapshot's LSN: of an empty table a TRUNCATE.
    """
    _FILES.write(house, table, {"position": str(position), "adds_rows": adds_rows})


def adds_rows(house: Warehouse, table: Table) -> bool:
    """Tell whether the table's unfinished snapshot adds rows to a changelog that existed before."""
    found = _FILES.read(house, table)
    return found is not None and found[1]


def record_end(house: Warehouse, table: Table) -> None:
    """Record that a snapshot is complete in changelog and replica."""
    _FILES.remove(house, table)


def take_back(house: Warehouse, table: Table) -> None:
    """Remove what an unfinished snapshot has left of a table without a changelog: a replica, and the version.

    Call this before anything else makes a changelog: it would make the table count as copied, without the copied rows. Raises
    WarehouseError if the replica can't be removed; then it is still known that the snapshot is unfinished.
    """
    replica = house.replica(table)
    places.remove_tree(replica)
    if places.list_names(replica):
        raise WarehouseError(
            f"{places.name(replica)} is left from a copy that ended before its time, and can't be removed",
            hint="let this program delete the directory, and start again: nothing is lost",
        )
    house.forget(table)
    record_end(house, table)


def unfinished(house: Warehouse) -> list[tuple[Table, Position]]:
    """Return the tables whose snapshot may be incomplete, each with the position of the snapshot."""
    return [(table, position) for table, (position, _) in _FILES.read_all(house)]
