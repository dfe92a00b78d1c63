"""Small files of a warehouse, each with the JSON object of one table: _cdcpipe/FOLDER/NAME.json. No pyspark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from spark_sink.files.local import RESTORE
from spark_sink.files.places import make_directory, map_reads, read_json, write_json
from spark_sink.schema.table import Table
from spark_sink.warehouse.errors import undamaged
from spark_sink.warehouse.warehouse import encode_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spark_sink.warehouse.warehouse import Warehouse

_Value = TypeVar("_Value")

__all__ = ["TableFiles"]


class TableFiles(Generic[_Value]):
    """The files of one folder. ``parse`` makes a value of an object; ``hint`` says what to do if it can't."""

    def __init__(self, folder: str, parse: Callable[[dict[str, Any]], _Value], hint: str = RESTORE) -> None:
        self._folder, self._parse, self._hint = folder, parse, hint

    def write(self, house: Warehouse, table: Table, value: dict[str, Any]) -> None:
        """Replace the table's file. Durable at return."""
        path = self._path(house, table)
        make_directory(path.parent)
        write_json(path, {**table.to_json(), **value})

    def read(self, house: Warehouse, table: Table) -> _Value | None:
        """Return the value of a table; None if it has no file. Raises WarehouseError if the file is damaged."""
        found = self._read(self._path(house, table))
        return None if found is None else found[1]

    def remove(self, house: Warehouse, table: Table) -> None:
        """Remove the table's file, if there is one."""
        self._path(house, table).unlink(missing_ok=True)

    def read_all(self, house: Warehouse) -> list[tuple[Table, _Value]]:
        """Return the tables with a file, in order, each with its value. Each prints as its name now."""
        directory = house.root / "_cdcpipe" / self._folder
        read = map_reads(self._read, list(directory.glob("*.json")), directory)
        if not (found := [each for each in read if each is not None]):
            return []
        shown = house.recorded_names().shown
        return sorted(((shown(table), value) for table, value in found), key=lambda each: each[0])

    def _path(self, house: Warehouse, table: Table) -> Path:
        return house.root / "_cdcpipe" / self._folder / f"{encode_name(table)}.json"

    def _read(self, path: Path) -> tuple[Table, _Value] | None:
        found = read_json(path)
        with undamaged(path, self._hint):
            return None if found is None else (Table.from_json(found), self._parse(found))
