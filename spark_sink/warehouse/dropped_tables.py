"""The tables that were dropped on the server, as captured DDL tells: _cdcpipe/dropped/NAME.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spark_sink.staging.log import Position
from spark_sink.warehouse.table_files import TableFiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spark_sink.schema.table import Table, Version
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["is_dropped", "record", "where"]

_FILES: Final = TableFiles("dropped", lambda value: (int(value["relation_id"]), Position.parse(value["position"])))


def record(house: Warehouse, table: Table, relation_id: int, position: Position) -> None:
    """Record that the table with this OID was dropped in the transaction that ends at ``position``."""
    _FILES.write(house, table, {"relation_id": relation_id, "position": str(position)})


def where(house: Warehouse, table: Table, versions: Sequence[Version]) -> Position | None:
    """Return where the table was dropped; None if it was not, or if there are changes of another table with its name."""
    found = _FILES.read(house, table)
    return None if found is None or (versions and versions[-1].relation_id != found[0]) else found[1]


def is_dropped(house: Warehouse, table: Table, relation_id: int) -> bool:
    """Tell whether the table that was dropped is the one with this OID."""
    found = _FILES.read(house, table)
    return found is not None and found[0] == relation_id
