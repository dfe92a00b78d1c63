"""The names under which a table's rows came before: a mask goes by the name, and must not lose the rows with it. No Spark.

    now = carried(before, now, masks)               # from one look at the catalog to the next
    names = FormerNames(house).of(16391, lsn, [16402])  # of the table with this OID, whose rows are in these relations

Rows are in relations: a table, or the leaves of a partitioned one. They come under another name if the table is renamed, if a
partition is attached or detached, or if a publication publishes partitions as their root, or no longer does. So the record of the
published tables (published_tables.py) knows for each relation the names under which a mask was meant for its rows.

Behind a gap of the log to another server the OIDs from before it are those of other tables. There a table is known by its name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from spark_sink.warehouse import gaps
from spark_sink.warehouse.published_tables import Seen, SeenTable, read

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdcpipe.masks import Masks
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["FormerNames", "carried"]

_MOST_GONE: Final = 1000
"""How many relations are known that no published table has: they were dropped, or may be published again."""


def carried(before: Seen | None, now: Seen, masks: Masks) -> Seen:
    """Return the look ``now`` with the former names of relations, as far as ``masks`` name these tables."""
    if before is None or before.system_id != now.system_id or not masks.rules:
        return now
    holders = {number: each.table for each in now.tables.values() for number in _relations(each)}
    found: dict[int, dict[Table, None]] = {number: dict.fromkeys(names) for number, names in before.former.items()}
    for each in before.tables.values():
        for number in _relations(each):
            if holders.get(number) != each.table:
                found.setdefault(number, {})[each.table] = None
    masked = {number: tuple(name for name in names if masks.has_table(name.schema, name.name)) for number, names in found.items()}
    forgotten = set([number for number, names in masked.items() if names and number not in holders][:-_MOST_GONE])
    return replace(now, former={number: names for number, names in masked.items() if names and number not in forgotten})


class FormerNames:
    """The former names, as the last look at the catalog and the versions of the tables tell."""

    def __init__(self, house: Warehouse) -> None:
        self._house = house
        self._seen = read(house)
        self._ends = [each for each in gaps.read(house) if each.is_other_server]
        self._names: dict[int, set[Table]] = {}
        """For each relation the names under which it is published, and was before."""
        if self._seen is not None:
            self._names = {number: set(names) for number, names in self._seen.former.items()}
            for each in self._seen.tables.values():
                for number in _relations(each):
                    self._names.setdefault(number, set()).add(each.table)

    def is_plain(self, relation_id: int, lsn: int) -> bool:
        """Tell whether a table is known to have no partitions: then it never gets any."""
        seen = self._seen_at(lsn)
        known = None if seen is None else seen.tables.get(relation_id)
        return known is not None and known.parts is not None and set(known.parts) == {relation_id}

    def of(self, relation_id: int, lsn: int, parts: Iterable[int] = (), *, is_new: bool = False) -> set[Table]:
        """Return the names under which rows came that the table with this OID has at ``lsn``. Its own name may be among them.

        ``parts`` are the relations that have its rows now, as far as they are known. ``is_new``: the warehouse does not have it.
        """
        numbers, seen = {relation_id, *parts}, self._seen_at(lsn)
        is_asked = is_new or numbers != {relation_id}
        names: set[Table] = set()
        if seen is not None:
            known = seen.tables.get(relation_id)
            numbers |= set() if known is None else _relations(known)
            names.update(name for number in numbers for name in self._names.get(number, ()))
        if is_asked:  # the stream may have brought a table since the look
            called, end_lsn = self._house.names(), max((each.start.lsn for each in self._passed(lsn)), default=-1)
            newest = {table: versions[-1] for table, versions in self._house.all_versions().items()}
            # Copies and changes of the server behind a gap are beyond the gap's end, and all earlier ones are not.
            homes = [home for home, each in newest.items() if each.relation_id in numbers and each.end_lsn > end_lsn]
            names.update(name for home in homes for name in (home, called.name(home)))
        return names

    def _seen_at(self, lsn: int) -> Seen | None:
        """Return the last look; None if it was at a server that is another one at ``lsn``. A look's LSN does not tell this."""
        seen, former = self._seen, {each.former_system_id for each in self._passed(lsn)}
        if seen is None or seen.system_id not in former or seen.system_id == self._house.source().system_id:
            return seen
        return None

    def _passed(self, lsn: int) -> list[gaps.TablesGap]:
        return [each for each in self._ends if each.start.lsn < lsn]


def _relations(table: SeenTable) -> set[int]:
    return {table.relation_id, *(table.parts or ())}
