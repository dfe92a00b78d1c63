"""Finds the table of the warehouse to which a snapshot copies a table of the server. Reads small files only.

    homes = Homes(warehouse)
    table = homes.of(relation)
    homes.check(relation, snapshot_lsn)

Tables keep their directories when they are renamed (schema/names.py). The server is further than the stream: it may have renamed
tables that the warehouse does not know by these names yet. A copy then would go to the wrong tables. So it waits until the stream
has told, if DDL is captured at all. Without captured DDL the name decides.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from cdcpipe.lsn import format_lsn
from spark_sink.client.exported import SnapshotError
from spark_sink.files import places
from spark_sink.schema.table import DDL, Table
from spark_sink.warehouse import table_names
from spark_sink.warehouse.reached import reached_lsn
from spark_sink.warehouse.warehouse import encode_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cdcpipe.pgoutput.messages import Relation
    from spark_sink.warehouse.last_look import SeenTable
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["Homes"]


class Homes:
    """The tables of a warehouse, as of the time at which this is made."""

    def __init__(self, house: Warehouse) -> None:
        self._house = house
        self._names = table_names.names(house)
        self._files = frozenset(places.list_names(house.root / "_cdcpipe/tables"))

    def table(self, relation_id: int, name: Table) -> Table:
        """Return the table of the warehouse that has the changes of the table with this OID and name."""
        return self._names.shown(self._names.home(relation_id, name))

    def has(self, relation_id: int, name: Table) -> bool:
        """Tell whether the warehouse has the table with this OID and name."""
        return f"{encode_name(self.table(relation_id, name))}.json" in self._files

    def of(self, relation: Relation) -> Table:
        """Return the same for a description."""
        return self.table(relation.relation_id, Table.of(relation))

    def check(self, relation: Relation, lsn: int) -> None:
        """Raise SnapshotError if a copy as of ``lsn`` has to wait until the stream has told of names."""
        name = Table.of(relation)
        if self.is_certain(relation.relation_id, name) or self.knows(lsn):
            return
        raise SnapshotError(
            f"{name} is another table on the server than in the warehouse: it was renamed or made anew, and the tables"
            f" have not come to {format_lsn(lsn)} yet",
            hint="wait until cdcpipe-spark run has brought the tables there, and try again",
        )

    @property
    def _goes_by_name(self) -> bool:
        return self._names.is_following is False or not self._house.has_changelog(DDL)

    def is_certain(self, relation_id: int, name: Table) -> bool:
        """Tell whether the stream can't have another name for the table with this OID than the warehouse has."""
        if self._goes_by_name:
            return True
        versions = self._house.versions(self.table(relation_id, name))
        if versions:
            return versions[-1].relation_id == relation_id or self._names.is_called(relation_id, name)
        return relation_id not in self._relation_ids

    def changed_elsewhere(self, tables: Iterable[SeenTable]) -> Iterator[tuple[Table, int]]:
        """Yield those of the server's ``tables`` that have changes under another name, so in other tables of the warehouse.

        Also yields the LSN from which on a copy has these changes. This reads each table's file.
        """
        if not self._goes_by_name:
            return
        own, known = {each.relation_id: self.table(each.relation_id, each.table) for each in tables}, self._house.all_versions()
        for home, versions in known.items():
            pairs = zip(versions, [*versions[1:], None], strict=True)
            for relation_id, (last, following) in {pair[0].relation_id: pair for pair in pairs}.items():
                table = own.get(relation_id, home)
                if table != home and table in known and self._names.servers.is_last(last.end_lsn):
                    # Later changes under a version add no version: they may come up to the next one. A table that was renamed for
                    # good may have none. It is copied once for nothing then: `want_copy` asks for no copy that there is.
                    lsn = self._house.format.lsn(self._house.changelog(home)) if following is None else following.end_lsn
                    yield table, max(last.end_lsn, lsn or 0)

    @cached_property
    def _relation_ids(self) -> frozenset[int]:
        """The OIDs of all tables. To find them, each table's file is read, so this is not done for each table that is new."""
        return frozenset(versions[-1].relation_id for versions in self._house.all_versions().values())

    def knows(self, lsn: int) -> bool:
        """Tell whether the tables know everything that the stream tells up to ``lsn``."""
        return reached_lsn(self._house, self._house.source()) >= lsn
