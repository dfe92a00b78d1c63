"""The merges that may be committed and not checked: _cdcpipe/merges/NAME.json exists from before the commit until after the check.

After a merge by Spark its rows are counted: the count may show that the table needs a copy. A process that is killed between commit
and count leaves the file, and the next process finds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdcpipe.lsn import LSN, format_lsn
from spark_sink.files.places import make_directory, read_json, write_json
from spark_sink.schema.table import Table
from spark_sink.warehouse.warehouse import encode_name

if TYPE_CHECKING:
    from pathlib import Path

    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["record_check", "record_start", "unchecked"]


def record_start(house: Warehouse, table: Table, lsn: int) -> None:
    """Record that a merge up to an LSN begins. Call this before its commit. Durable at return."""
    path = _path(house, table)
    make_directory(path.parent)
    write_json(path, {**table.to_json(), "lsn": format_lsn(lsn)})


def record_check(house: Warehouse, table: Table) -> None:
    """Record that the merge is checked."""
    _path(house, table).unlink(missing_ok=True)


def unchecked(house: Warehouse) -> list[tuple[Table, int]]:
    """Return the tables with such a merge, each with the LSN up to which it merges."""
    found = [value for path in (house.root / "_cdcpipe/merges").glob("*.json") if (value := read_json(path)) is not None]
    shown = house.names().shown
    return sorted((shown(Table.from_json(value)), int(LSN.parse(value["lsn"]))) for value in found)


def _path(house: Warehouse, table: Table) -> Path:
    return house.root / "_cdcpipe/merges" / f"{encode_name(table)}.json"
