"""Finds for each column of a table's description the column of the catalog, by its number. No I/O.

PostgreSQL numbers a table's columns as they are added. A column keeps its number when it is renamed, and no other column gets the
number. A description has names and types in the order of these numbers. So its columns can be found in the catalog of the same
time. In a later catalog they can be found with the help of the previous version, if there is only one way in which the columns can
have changed from that version to this one and to the catalog.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cdcpipe.pgoutput.messages import Relation

__all__ = ["ColumnFacts", "looks", "numbered"]

_Look = tuple[str, int, int]
"""A column's name, type id and type modifier."""


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """What the catalog says about a column; see `replication.tables.TableColumn`."""

    number: int
    missing: str | None
    is_filled: bool


def numbered(
    relation: Relation, catalog: Sequence[Mapping[str, Any]], before: tuple[Relation, Sequence[ColumnFacts]] | None
) -> tuple[ColumnFacts, ...] | None:
    """Return the facts of each of the relation's columns; None if they are not certain.

    ``catalog`` has the table's columns as ``cdcpipe prepare`` prints them, at the time of the description or later. ``before`` is
    the previous version with its facts, if these are known.
    """
    facts = {column["number"]: ColumnFacts(column["number"], column["missing"], column["is_filled"]) for column in catalog}
    later = {column["number"]: (column["name"], column["type_id"], column["type_modifier"]) for column in catalog}
    if list(later.values()) == looks(relation):
        return tuple(facts.values())
    if before is None or not catalog:
        return None
    earlier = dict(zip((fact.number for fact in before[1]), looks(before[0]), strict=True))
    numbers = _only_way(looks(relation), earlier, later)
    if numbers is None or not earlier.keys() & later.keys() <= set(numbers):
        return None
    return tuple(facts.get(number, ColumnFacts(number, None, is_filled=True)) for number in numbers)


def looks(relation: Relation) -> list[_Look]:
    """Return the name, the type id and the type modifier of each column."""
    return [(column.name, column.type_id, column.type_modifier) for column in relation.columns]


def _only_way(columns: Sequence[_Look], earlier: Mapping[int, _Look], later: Mapping[int, _Look]) -> list[int] | None:
    """Return ascending numbers such that each column equals the column of its number in the earlier or the later version.

    Returns None unless there is exactly one way.
    """
    # By the last number: one way to number the columns so far, and whether it is the only way.
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
