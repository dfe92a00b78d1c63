"""The names under which a table's rows came before: a mask goes by the name, and must not lose the rows with it. No Spark.

    now = carried(before, now, masks)               # from one look at the catalog to the next
    names = FormerNames(house).of(16391, lsn, [16402])  # of the table with this OID, whose rows are in these relations

Rows are in relations: a table, or the leaves of a partitioned one. They come under another name if the table is renamed, if a
partition is attached or detached, or if a publication publishes partitions as their root, or no longer does. So the record of the
published tables (last_look.py) knows for each relation the names under which a mask was meant for its rows.

Behind a gap of the log to another server the OIDs from before it are those of other tables. There a table is known by its name. The
tables may still get changes from before the gap when the catalog of the other server has been looked at. So the record keeps the
last look at the former server until then.

A server that has lost changes has the tables from before these. Nobody knows whether a look saw a table that was lost. So a look
counts for the server before the loss and for the one after it: a mask may be demanded that is not needed, but none is missed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spark_sink.schema.table import AFTER_ALL
from spark_sink.warehouse import gaps, table_names
from spark_sink.warehouse.last_look import Seen, SeenTable, read

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cdcpipe.masks import Masks
    from spark_sink.schema.table import Table
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["FormerNames", "carried"]


def carried(before: Seen | None, now: Seen, masks: Masks, *, is_at_server_of_now: bool = True) -> Seen:
    """Return the look ``now`` with the former names of relations, as far as ``masks`` name these tables.

    Without ``is_at_server_of_now`` the tables still get changes of a former server: then the last look there is kept, too.
    """
    if before is None or not masks.rules:
        return now
    if before.system_id != now.system_id:
        return now if is_at_server_of_now else replace(now, earlier=before)
    holders = {number: each.table for each in now.tables.values() for number in _relations(each)}
    found: dict[int, dict[Table, None]] = {number: dict.fromkeys(names) for number, names in before.former.items()}
    for each in before.tables.values():
        for number in _relations(each):
            if holders.get(number) != each.table:
                found.setdefault(number, {})[each.table] = None
    named = {name for names in found.values() for name in names}
    masked = {name for name in named if masks.has_table(name.schema, name.name)}
    former = {number: tuple(name for name in names if name in masked) for number, names in found.items()}
    # Relations that no published table has are kept for good: such a partition may be published under its own name after years.
    former = {number: names for number, names in former.items() if names}
    return replace(now, former=former, earlier=None if is_at_server_of_now else before.earlier)


@dataclass(frozen=True, slots=True)
class _Look:
    """A look at the catalog.

    ``servers`` are the numbers of the servers that it may have been at (schema/servers.py). It is empty if nobody knows, because
    pg_upgrade has given the server another system id since. ``names`` has for each relation the names under which it is published,
    and was before.
    """

    seen: Seen
    servers: frozenset[int]
    names: Mapping[int, set[Table]]


class FormerNames:
    """The former names, as the last looks at the catalog and the versions of the tables tell."""

    def __init__(self, house: Warehouse) -> None:
        self._house = house
        self._called = table_names.names(house)
        self._looks: list[_Look] = []
        """The last look, and those at former servers of which changes are still to come."""
        seen, system_ids = read(house), [house.source().system_id]
        for gap in reversed([gap for gap in gaps.read(house) if gap.ends_oids]):
            system_ids.insert(0, gap.former_system_id or system_ids[0])
        while seen is not None:
            servers = frozenset(number for number, system_id in enumerate(system_ids) if system_id == seen.system_id)
            names = {number: set(found) for number, found in seen.former.items()}
            for each in seen.tables.values():
                for number in _relations(each):
                    names.setdefault(number, set()).add(each.table)
            self._looks.append(_Look(seen, servers, names))
            seen = seen.earlier

    def is_plain(self, relation_id: int, lsn: int) -> bool:
        """Tell whether a table is known to have no partitions: then it never gets any.

        Nothing is known behind lost changes that the look may have seen: the OID may be another table's there. A look at an LSN
        beyond them counts as one after them.
        """
        look = self._look_at(lsn)
        if look is not None and any(after < look.seen.lsn <= until for after, until in self._called.servers.lost((lsn, 0))):
            return False
        known = None if look is None else look.seen.tables.get(relation_id)
        return known is not None and known.parts is not None and set(known.parts) == {relation_id}

    def of(self, relation_id: int, lsn: int, parts: Iterable[int] = (), *, is_new: bool = False) -> set[Table]:
        """Return the names under which rows came that the table with this OID has at ``lsn``. Its own name may be among them.

        ``parts`` are the relations that have its rows now, as far as they are known. ``is_new``: the warehouse does not have it.
        """
        numbers, look = {relation_id, *parts}, self._look_at(lsn)
        is_asked = is_new or numbers != {relation_id}
        names: set[Table] = set()
        if look is not None:
            known = look.seen.tables.get(relation_id)
            numbers |= set() if known is None else _relations(known)
            names.update(name for number in numbers for name in look.names.get(number, ()))
        if is_asked:  # the stream may have brought a table since the look
            for home, versions in self._house.all_versions().items():
                here = (each for each in reversed(versions) if self._called.servers.is_one(each.place, (lsn, 0)))
                newest = next(here, None)
                if newest is not None and newest.relation_id in numbers:
                    names |= {home, self._called.name(home), self._called.name(home, (lsn, AFTER_ALL[0]))}
        return names

    def _look_at(self, lsn: int) -> _Look | None:
        """Return the last look at the server that is there at ``lsn``; None if there is none. A look's LSN does not tell this."""
        server = self._called.servers.number((lsn, 0))
        certain = (each for each in self._looks if server in each.servers)
        return next(certain, None) or next((each for each in self._looks if not each.servers), None)


def _relations(table: SeenTable) -> set[int]:
    return {table.relation_id, *(table.parts or ())}
