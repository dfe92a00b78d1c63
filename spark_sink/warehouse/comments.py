"""The comments that tables and columns have in PostgreSQL, according to captured DDL, for the tables of a warehouse. No pyspark.

    _cdcpipe/comments/NAME.json    a table's comment, and those of its columns

The file is written when the changelog has the comments, and before the replica gets them. So a pipeline that was killed in between
gives them at its next start: to the changelog with the same micro-batch, which it repeats, and to the replica from the file.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from spark_sink.warehouse.table_files import TableFiles

if TYPE_CHECKING:
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["Comments", "commented_tables", "forget_comments", "read_comments", "write_comments"]


@dataclass(frozen=True, slots=True)
class Comments:
    """The comments of a table. ``columns`` has the changelog's names of the columns that have one."""

    table: str | None = None
    columns: dict[str, str] = field(default_factory=dict)


def _parse(value: dict[str, Any]) -> Comments:
    said = value["comments"]
    return Comments(said["table"], {str(name): str(text) for name, text in said["columns"].items()})


_FILES: Final = TableFiles("comments", _parse)


def read_comments(house: Warehouse, table: Table) -> Comments | None:
    """Return the recorded comments of a table; None if it never had one."""
    return _FILES.read(house, table)


def write_comments(house: Warehouse, table: Table, comments: Comments) -> None:
    """Record the comments of a table."""
    _FILES.write(house, table, {"comments": asdict(comments)})


def forget_comments(house: Warehouse, table: Table) -> None:
    """Remove the recorded comments of a table, whose changelog begins anew without them."""
    _FILES.remove(house, table)


def commented_tables(house: Warehouse) -> list[tuple[Table, Comments]]:
    """Return the tables that have, or had, comments."""
    return _FILES.read_all(house)
