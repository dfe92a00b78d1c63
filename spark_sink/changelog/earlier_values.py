"""Finds which values the rows from before a version have in its columns, from the columns' numbers in PostgreSQL. No I/O."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.types import StructField

from cdcpipe.types.pg_type import type_ids_of
from spark_sink.schema.table import Fill
from spark_sink.schema.types import fields_by_name, holds, plain_name, spark_type, versioned_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from pyspark.sql.types import StructType

    from cdcpipe.pgoutput.messages import Column
    from spark_sink.changelog.schema_history import SchemaVersion
    from spark_sink.schema.column_numbers import ColumnFacts
    from spark_sink.schema.table import Version

__all__ = ["fills_after_snapshot", "fills_between", "shared_names"]

[_FLOAT4] = type_ids_of("float4")


def fills_between(
    previous: SchemaVersion,
    version: SchemaVersion,
    columns: StructType,
    dropped: Collection[str] = (),
    shared: Collection[str] = (),
) -> tuple[tuple[Fill, ...], list[str]]:
    """Return the fills of the new version's new columns for rows of the previous version, and the columns without a certain value.

    In a column with the name of a ``dropped`` column, these rows may still have a value of that column. So may those in a column
    whose name is ``shared`` (`shared_names`), if its own earlier values are in another one.
    """
    old, new = fields_by_name(columns, previous.relation), fields_by_name(columns, version.relation)
    used = {*dropped, *old}
    if previous.facts is None or version.facts is None:
        unknown = [name for name in new if name not in old]
        return tuple(Fill(new[name].name) for name in unknown if used & {name, new[name].name}), unknown
    # The changelog's column may be wider by now. But these rows had this type.
    types = {column.name: spark_type(column) for column in previous.relation.columns}
    old_numbers = {fact.number: name for name, fact in zip(old, previous.facts, strict=True)}
    fills, unknown = [], []
    for name, column, fact in zip(new, version.relation.columns, version.facts, strict=True):
        source = old_numbers.get(fact.number)
        if source is not None and old[source].name == new[name].name:
            continue
        former = None if source is None else StructField(old[source].name, types[source])
        fill = _fill(new[name], former, column, fact, is_own=name.lower() not in shared)
        if fill is None and source == name:
            continue  # the column has another type: `_name_retyped` warns of it
        if fill is None:
            unknown.append(name)
            fill = Fill(new[name].name)
        if fill != Fill(fill.column) or used & {name, fill.column}:
            fills.append(fill)
    return tuple(fills), unknown


def fills_after_snapshot(snapshot: Version, version: SchemaVersion, columns: StructType) -> tuple[tuple[Fill, ...], list[str]]:
    """Return the fills of a later version's columns for a snapshot's rows, and the columns without a certain value."""
    new, known = fields_by_name(columns, version.relation), dict(snapshot.snapshot)
    if version.facts is None:
        return (), [name for name, field in new.items() if field.name not in known.values()]
    fills, unknown = [], []
    for (name, field), column, fact in zip(new.items(), version.relation.columns, version.facts, strict=True):
        source = known.get(fact.number)
        if source == field.name:
            continue
        fill = _fill(field, None if source is None else columns[source], column, fact, is_own=True)
        if fill is None and source is None:
            unknown.append(name)
            if field.name in known.values():
                fills.append(Fill(field.name))
        elif fill is not None and (fill.source is not None or fill.value is not None or field.name in known.values()):
            fills.append(fill)
    return tuple(fills), unknown


def shared_names(versions: Iterable[SchemaVersion], known: Sequence[Version]) -> set[str]:
    """Return the names, in lower case, that more than one of the table's columns has had, or may have had."""
    numbers: dict[str, set[int | None]] = {}
    for version in versions:
        for column, number in zip(version.relation.columns, version.numbers, strict=True):
            numbers.setdefault(column.name.lower(), set()).add(number)
        for copied in (each for each in known if each.relation_id == version.relation.relation_id):
            for number, name in copied.snapshot:
                numbers.setdefault(plain_name(name).lower(), set()).add(number)
    return {name for name, found in numbers.items() if None in found or len(found) > 1}


def _fill(field: StructField, source: StructField | None, column: Column, fact: ColumnFacts, *, is_own: bool) -> Fill | None:
    """Return the value of earlier rows in a new ``column``; None if it is not known.

    ``is_own``: no other column has had the name, so what an earlier row has in ``field`` is this column's own value. Rows that are
    older than the narrower column ``source`` have it there.
    """
    if source is not None:
        if not holds(field.dataType, source.dataType):
            return None
        return Fill(field.name, source.name, or_own=is_own and source.name == versioned_name(field.name, source.dataType))
    return None if fact.is_filled else Fill(field.name, value=_exact(fact.missing, column))


def _exact(text: str | None, column: Column) -> str | None:
    """Return a text that means a column's value also in each type to which the changelog's column may be widened.

    As a double, 0.1 is not the value that 0.1 is as a real.
    """
    if text is None or column.type_id != _FLOAT4:
        return text
    value = pa.scalar(text).cast(pa.float32()).as_py()
    return repr(value) if math.isfinite(value) else text
