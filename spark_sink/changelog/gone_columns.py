"""Finds the columns of a changelog that the table does not have any more, for `run --dropped-columns drop`. No I/O.

The stream alone does not say whether a column was dropped or the publication leaves it out. So columns go only where captured DDL
describes the whole table. Then these go:

- a column that was dropped, or whose table was dropped;
- a column that was renamed, or got another type, if the replica's rows have all its values in the new column.

A column stays if its earlier values do not fit the new type, and if it is not certain what it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_sink.schema.table import gone_columns
from spark_sink.schema.types import fields_by_name, find_columns, holds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql.types import StructType

    from cdcpipe.pgoutput.messages import Relation
    from spark_sink.changelog.schema_history import SchemaHistory
    from spark_sink.schema.table import Version
    from spark_sink.source.contents import Use

__all__ = ["find_gone"]


def find_gone(
    use: Use, before: Sequence[Version], columns: StructType, schemas: SchemaHistory, typed: Callable[[Relation], Relation]
) -> tuple[tuple[str, ...], list[str]]:
    """Return the names of the columns that are gone with ``use``, and of those that may be gone, but stay.

    ``before`` are the table's versions so far, and ``columns`` the changelog's columns.
    """
    place, relation = use.place, use.relation
    present = fields_by_name(columns, typed(relation))
    names = {field.name for field in present.values()}
    gone = gone_columns(before, use.end_lsn) - names
    owners: dict[str, set[tuple[int, int | None]]] = {}
    for name, owner in _owners(use, before, columns, schemas, typed):
        if name not in names and name not in gone:
            owners.setdefault(name, set()).add(owner)
    if (told := schemas.captured.of_stream(relation, place)) is None:
        here = schemas.version(relation.relation_id, place)
        left = set() if here is None or here.facts is None else {fact.number for fact in here.facts}
        uncertain = [name for name, of_name in owners.items() if left.isdisjoint(number for _, number in of_name)]
        return tuple(sorted(gone)), sorted(uncertain)
    described, known = told
    now = {column.facts.number: present[column.name] for column in known}
    numbers = {column.facts.number for column in described.columns}
    kinds = {field.name: field.dataType for field in columns}

    def is_gone(name: str, relation_id: int, number: int | None) -> bool:
        if relation_id != relation.relation_id:
            return True
        if number is None:
            return False
        return number not in numbers or (number in now and holds(now[number].dataType, kinds[name]))

    found = {name for name, of_name in owners.items() if all(is_gone(name, *owner) for owner in of_name)}
    unknown = [name for name, of_name in owners.items() if any(number is None for _, number in of_name)]
    return tuple(sorted(gone | found)), sorted(set(unknown) - found)


def _owners(
    use: Use, before: Sequence[Version], columns: StructType, schemas: SchemaHistory, typed: Callable[[Relation], Relation]
) -> Iterator[tuple[str, tuple[int, int | None]]]:
    """Yield each column of the changelog that the table has had, with the table's OID and the number that the column had.

    The number is None if it is not certain.
    """
    kept = set(columns.names)
    for version in before:
        yield from ((name, (version.relation_id, number)) for number, name in version.snapshot if name in kept)
    for relation_id in dict.fromkeys([*(version.relation_id for version in before), use.relation.relation_id]):
        for known in schemas.until(relation_id, use.place):
            fields = find_columns(columns, typed(known.relation))
            for field, number in zip(fields, known.numbers, strict=True):
                if field is not None:
                    yield field.name, (relation_id, number)
