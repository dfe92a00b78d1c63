"""The comments that tables and columns have in PostgreSQL, according to captured DDL, for the tables of a warehouse. No pyspark.

    _cdcpipe/comments/NAME.json    a table's comment, and those of its columns

The file is written before the tables get the comments. So a pipeline that was killed in between gives them at its next start.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from spark_sink.files.places import make_directory, read_json, write_json
from spark_sink.schema.table import Table
from spark_sink.warehouse.warehouse import encode_name

if TYPE_CHECKING:
    from pathlib import Path

    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["Comments", "commented_tables", "read_comments", "write_comments"]


@dataclass(frozen=True, slots=True)
class Comments:
    """The comments of a table. ``columns`` has the changelog's names of the columns that have one."""

    table: str | None = None
    columns: dict[str, str] = field(default_factory=dict)


def _directory(house: Warehouse) -> Path:
    return house.root / "_cdcpipe/comments"


def read_comments(house: Warehouse, table: Table) -> Comments | None:
    """Return the recorded comments of a table; None if it never had one."""
    found = read_json(_directory(house) / f"{encode_name(table)}.json")
    return None if found is None else _comments(found)


def write_comments(house: Warehouse, table: Table, comments: Comments) -> None:
    """Record the comments of a table."""
    make_directory(_directory(house))
    value = {**table.to_json(), "comments": asdict(comments)}
    write_json(_directory(house) / f"{encode_name(table)}.json", value)


def commented_tables(house: Warehouse) -> dict[Table, Comments]:
    """Return the tables that have, or had, comments."""
    found = (read_json(path) for path in _directory(house).glob("*.json"))
    return {Table.from_json(value): _comments(value) for value in found if value is not None}


def _comments(value: dict[str, Any]) -> Comments:
    said = value["comments"]
    return Comments(said["table"], {str(name): str(text) for name, text in said["columns"].items()})
