"""Finds the columns whose new type does not hold every earlier value exactly. No I/O.

Their earlier values are in another column of the changelog. Or they are in the same one, if this one is wider: a later version
of the table has its type again (schema/types.py). PostgreSQL has rounded them, and the stream does not say so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql.types import IntegralType

from cdcpipe.pgoutput.messages import Column
from spark_sink.schema.types import assign_columns, holds, spark_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql.types import DataType, StructField, StructType

    from cdcpipe.pgoutput.messages import Relation
    from spark_sink.changelog.schema_history import SchemaVersion
    from spark_sink.schema.table import Version

__all__ = ["Retyped", "retyped", "retyped_since_copy"]


class Retyped(NamedTuple):
    """A column with another type: its name, and the changelog's columns with its earlier and its new values."""

    name: str
    old: str
    new: str


def retyped(previous: SchemaVersion, version: SchemaVersion, columns: StructType) -> Iterator[Retyped]:
    """Yield the columns of this kind. The versions have the types of the warehouse; ``columns`` are those of the changelog."""
    before = {column.name: (field, kind) for column, field, kind in _placed(previous.relation, columns)}
    for column, field, kind in _placed(version.relation, columns):
        old, old_kind = before.get(column.name, (field, kind))
        if _loses(old, field, old_kind, kind):
            yield Retyped(column.name, old.name, field.name)


def retyped_since_copy(
    snapshot: Version, version: SchemaVersion, columns: StructType, typed: Callable[[Relation], Relation]
) -> Iterator[Retyped]:
    """Yield the columns of this kind that the snapshot has, too. ``typed`` gives a relation the types of the warehouse."""
    known = dict(snapshot.snapshot)
    described = tuple(Column(0, name, type_id, modifier) for _, name, type_id, modifier in snapshot.described)
    then = typed(replace(version.relation, columns=described)).columns
    kinds = {number: spark_type(column) for (number, *_), column in zip(snapshot.described, then, strict=True)}
    for (column, field, kind), fact in zip(_placed(version.relation, columns), version.facts or (), strict=False):
        if fact.number in known:
            old = columns[known[fact.number]]
            if _loses(old, field, kinds.get(fact.number, old.dataType), kind):
                yield Retyped(column.name, old.name, field.name)


def _placed(relation: Relation, columns: StructType) -> Iterator[tuple[Column, StructField, DataType]]:
    for column, field in zip(relation.columns, assign_columns(columns, relation), strict=True):
        yield column, field, spark_type(column)


def _loses(old: StructField, new: StructField, old_kind: DataType, new_kind: DataType) -> bool:
    if old.name != new.name:
        return not holds(new.dataType, old.dataType)
    # PostgreSQL rounds no integer.
    is_integer = isinstance(old_kind, IntegralType) and isinstance(new_kind, IntegralType)
    return not is_integer and not holds(new_kind, old_kind)
