"""The tables that were dropped on the server, as captured DDL tells: _cdcpipe/dropped/NAME.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_sink.files.places import make_directory, read_json, write_json
from spark_sink.staging.log import Position
from spark_sink.warehouse.warehouse import encode_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from spark_sink.schema.table import Table, Version
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["is_dropped", "record", "where"]


def record(house: Warehouse, table: Table, relation_id: int, position: Position) -> None:
    """Record that the table with this OID was dropped in the transaction that ends at ``position``."""
    path = _path(house, table)
    make_directory(path.parent)
    write_json(path, {**table.to_json(), "relation_id": relation_id, "position": str(position)})


def where(house: Warehouse, table: Table, versions: Sequence[Version]) -> Position | None:
    """Return where the table was dropped; None if it was not, or if there are changes of another table with its name."""
    found = read_json(_path(house, table))
    if found is None or (versions and versions[-1].relation_id != found["relation_id"]):
        return None
    return Position.parse(found["position"])


def is_dropped(house: Warehouse, table: Table, relation_id: int) -> bool:
    """Tell whether the table that was dropped is the one with this OID."""
    found = read_json(_path(house, table))
    return found is not None and found["relation_id"] == relation_id


def _path(house: Warehouse, table: Table) -> Path:
    return house.root / "_cdcpipe/dropped" / f"{encode_name(table)}.json"
