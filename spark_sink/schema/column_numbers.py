"""Which column of a table's description is which column of the catalog: by their numbers. No I/O.

PostgreSQL numbers a table's columns as they are added; a column keeps its number when it is renamed, and no other gets it. A
description has names and types in the order of the numbers. So each column of one is found in the catalog of that time; and in
a later catalog, together with the version before, if there is one way only in which the columns can have come from that one and
become the catalog's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cdcpipe.pgoutput.messages import Relation

__all__ = ["ColumnFacts", "numbered"]

_Look = tuple[str, int, int]
"""A column's name, type id and type modifier."""


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """What the catalog says of a column; see `preflight.TableColumn`."""

    number: int
    missing: str | None
    is_filled: bool


def numbered(
    relation: Relation, catalog: Sequence[Mapping[str, Any]], before: tuple[Relation, Sequence[ColumnFacts]] | None
) -> tuple[ColumnFacts, ...] | None:
    """Return the facts of each of the relation's columns, None if they are not certain.

    ``catalog`` are the table's columns as ``cdcpipe prepare`` prints them, of that time or later; ``before`` is the version
    before with its facts, if these are known.
    """
    facts = {column["number"]: ColumnFacts(column["number"], column["missing"], column["is_filled"]) for column in catalog}
    later = {column["number"]: (column["name"], column["type_id"], column["type_modifier"]) for column in catalog}
    if list(later.values()) == _looks(relation):
        return tuple(facts.values())
    if before is None or not catalog:
        return None
    earlier = dict(zip((fact.number for fact in before[1]), _looks(before[0]), strict=True))
    numbers = _only_way(_looks(relation), earlier, later)
    if numbers is None or not earlier.keys() & later.keys() <= set(numbers):
        return None
    return tuple(facts.get(number, ColumnFacts(number, None, is_filled=True)) for number in numbers)


def _looks(relation: Relation) -> list[_Look]:
    return [(column.name, column.type_id, column.type_modifier) for column in relation.columns]


def _only_way(columns: Sequence[_Look], earlier: Mapping[int, _Look], later: Mapping[int, _Look]) -> list[int] | None:
    """Return the rising numbers under which the columns look as in the earlier or the later version; None if not just one way."""
    # Of the ways to number the columns so far, by the last number: one, and whether it is the only one.
    ways: dict[int, tuple[list[int], bool]] = {0: ([], True)}
    for look in columns:
        ends = {number for version in (earlier, later) for number, known in version.items() if known == look}
        following = {}
        for number in ends:
            found = [way for last, way in ways.items() if last < number]
            if found:
                following[number] = ([*found[0][0], number], len(found) == 1 and found[0][1])
        ways = following
    return next(iter(ways.values()))[0] if len(ways) == 1 and next(iter(ways.values()))[1] else None
