"""The snapshots that are being landed: _cdcpipe/snapshots/NAME.json exists while a table may have a part of its snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_sink.files.places import make_directory, read_json, write_json
from spark_sink.schema.table import Table
from spark_sink.staging.log import Position
from spark_sink.warehouse.warehouse import encode_name

if TYPE_CHECKING:
    from pathlib import Path

    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["record_end", "record_start", "unfinished"]


def record_start(house: Warehouse, table: Table, position: Position) -> None:
    """Record the start of landing a table's snapshot. Call this before any of its rows are in the tables."""
    path = _path(house, table)
    make_directory(path.parent)
    write_json(path, {**table.to_json(), "position": str(position)})


def record_end(house: Warehouse, table: Table) -> None:
    """Record that a snapshot is complete in changelog and replica."""
    _path(house, table).unlink(missing_ok=True)


def unfinished(house: Warehouse) -> list[tuple[Table, Position]]:
    """Return the tables whose snapshot may be incomplete, each with the position of the snapshot."""
    found = [value for path in (house.root / "_cdcpipe/snapshots").glob("*.json") if (value := read_json(path)) is not None]
    shown = house.names().shown
    return sorted((shown(Table.from_json(value)), Position.parse(value["position"])) for value in found)


def _path(house: Warehouse, table: Table) -> Path:
    return house.root / "_cdcpipe/snapshots" / f"{encode_name(table)}.json"
