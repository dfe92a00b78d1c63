"""Opens a replica or a history that is going to be rewritten without Spark, and gives it the columns of its changelog."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.types import StructType

from spark_sink.delta import new_columns, wider_columns
from spark_sink.delta.rewrite import Rewrite
from spark_sink.delta.rows import UnsupportedError
from spark_sink.schema.types import split_schema

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from spark_sink.delta.log import TableLog
    from spark_sink.replica.pieces import Piece

__all__ = ["key_of", "open_target", "table_columns"]


def table_columns(changelog: StructType, gone: Collection[str]) -> StructType:
    """Return the PostgreSQL table's own columns, of those of its ``changelog``, without those that are ``gone``."""
    return StructType([field for field in split_schema(changelog)[0] if field.name not in gone])


def key_of(piece: Piece) -> list[str]:
    """Return the columns of a plain piece's key: each has one type, and so one column."""
    return [names[0] for names in piece.columns]


def open_target(log: TableLog, key: Sequence[str], wanted: StructType, gone: Collection[str] = ()) -> Rewrite:
    """Return the table, after it has got the ``wanted`` columns that it lacks, and their wider types.

    Raises UnsupportedError if it has columns that are ``gone`` or that another program has made wider than the changelog's, or if
    only Spark can add or widen a column.
    """
    target = Rewrite.of_log(log, key)
    types = {field.name: field.dataType for field in target.schema}
    if not types.keys().isdisjoint(gone):
        raise UnsupportedError("columns that are gone")
    there = [field for field in wanted if field.name in types]
    if any(wider_columns.is_wider(types[field.name], field.dataType) for field in there):
        raise UnsupportedError("columns that are wider in the table")
    if len(there) == len(wanted) and all(types[field.name] == field.dataType for field in there):
        return target
    wider_columns.widen(log.path, wanted)
    new_columns.add(log.path, wanted)
    return Rewrite.of_log(log.refresh(), key)
