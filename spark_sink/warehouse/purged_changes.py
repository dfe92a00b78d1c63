"""The LSN up to which each changelog may lack changes, because a purge has removed them: _cdcpipe/purged/NAME.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdcpipe.lsn import LSN, format_lsn
from spark_sink.files.places import make_directory, read_json, write_json
from spark_sink.warehouse.warehouse import WarehouseError, encode_name

if TYPE_CHECKING:
    from pathlib import Path

    from spark_sink.schema.table import Table
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["PurgedError", "check", "last_lsn", "record"]


class PurgedError(WarehouseError):
    """Something needs changes that were purged."""


def record(house: Warehouse, table: Table, lsn: int) -> None:
    """Record that a table's changelog may lack changes up to ``lsn``. Call this before any are removed."""
    path = _path(house, table)
    make_directory(path.parent)
    write_json(path, {**table.to_json(), "lsn": format_lsn(max(lsn, last_lsn(house, table)))})


def last_lsn(house: Warehouse, table: Table) -> int:
    """Return the LSN up to which the table's changelog may lack changes; 0 if it is complete."""
    found = read_json(_path(house, table))
    return 0 if found is None else int(LSN.parse(found["lsn"]))


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


def _path(house: Warehouse, table: Table) -> Path:
    return house.root / "_cdcpipe/purged" / f"{encode_name(table)}.json"
