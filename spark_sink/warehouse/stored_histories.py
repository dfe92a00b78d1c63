"""What a stored history (replica/history_table.py) says of itself in its Delta log: which changes and versions it has. No Spark."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cdcpipe.lsn import LSN, format_lsn
from spark_sink.delta import log as delta_log
from spark_sink.schema.table import copies_until, mergeable_lsn, replica_begin
from spark_sink.warehouse import new_changelogs
from spark_sink.warehouse.formats import SPARK
from spark_sink.warehouse.quiet import quiet_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spark_sink.delta.log import TableLog
    from spark_sink.schema.table import Table, Version
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = [
    "HistoryFacts",
    "complete_until",
    "facts",
    "facts_in",
    "first_properties",
    "missing_until",
    "properties",
    "wanted_lsn",
]

_COPIES: Final = "cdcpipe.copies"
"""The property with the LSNs of the table's snapshots that the history knows."""
_AFTER: Final = "cdcpipe.history_after"
"""The property with the LSN after which the history has the rows of each moment."""


@dataclass(frozen=True, slots=True)
class HistoryFacts:
    """A history has the versions of all changes up to ``lsn``, and at each LSN after ``after_lsn`` all rows of that moment.

    ``copies`` are the LSNs of the table's snapshots that were taken into account.
    """

    lsn: int
    after_lsn: int
    copies: frozenset[int]
    is_restored: bool = False
    """Whether another program has set the history back (RESTORE): it lacks versions, and its log does not say which."""
    is_noted: bool = False
    """Whether the history says so in a property, too (`properties`)."""
    forgets_lsn: bool = False
    """Whether it has the property with which Delta's checkpoints leave out its ``lsn`` some day. Then this is 0."""

    def known_lsn(self, versions: Sequence[Version]) -> int:
        """Return the LSN up to which the history is right.

        A snapshot may come to the changelog after later changes have come to the history. Then the history is right up to the
        snapshot only. One that was set back is right nowhere.
        """
        if self.is_restored:
            return 0
        return min([self.lsn, *(copy - 1 for copy in copies_until(versions, self.lsn) - self.copies)])

    def has(self, lsn: int, versions: Sequence[Version], changelog_lsn: int) -> bool:
        """Tell whether the rows at an LSN are those of the versions that are valid there.

        The table's last change up to there is in the changelog at ``changelog_lsn`` or before. A history that is as far as it can
        be also has the moments after that. The rows are not known if an ALTER TABLE has put values into versions of an earlier
        moment, or has yet to put values into those of the history.
        """
        known_lsn = self.known_lsn(versions)
        is_filled = any(version.fills for version in versions if version.end_lsn > min(lsn, known_lsn))
        return self.after_lsn < lsn and known_lsn >= min(lsn, wanted_lsn(versions, changelog_lsn, lsn)) and not is_filled


def wanted_lsn(versions: Sequence[Version], changelog_lsn: int, reached_lsn: int) -> int:
    """Return the LSN that a table's history should have: that of the changelog, or of a snapshot that came later.

    A snapshot may be later than each change in the changelog. It counts once the tables have all changes up to there
    (``reached_lsn``): until then, changes from before the snapshot may come.
    """
    return max([changelog_lsn, *copies_until(versions, reached_lsn)])


def missing_until(house: Warehouse, table: Table, changelog_lsn: int, reached_lsn: int) -> int | None:
    """Return the LSN to which a table's history has to be brought; None if it is there, or can get no further (a lost key)."""
    found, versions = facts(house, table), house.versions(table)
    lsn = mergeable_lsn(versions, wanted_lsn(versions, changelog_lsn, reached_lsn))
    is_there = found is not None and found.known_lsn(versions) >= lsn and not found.forgets_lsn  # else warn before it forgets
    return None if not lsn or is_there else lsn


def complete_until(house: Warehouse, table: Table) -> int:
    """Return the LSN before the first change that a table's history lacks, as far as the files of the changelog tell."""
    found, versions = facts(house, table), house.versions(table)
    known_lsn = (replica_begin(versions) or 0) if found is None else found.known_lsn(versions)
    return quiet_until(house, table, known_lsn)


def facts(house: Warehouse, table: Table) -> HistoryFacts | None:
    """Return the facts about a table's stored history; None if there is none."""
    with house.logs.newest(house.history(table)) as log:
        return facts_in(log)


def facts_in(log: TableLog) -> HistoryFacts | None:
    """Return the facts about a history in the version up to which its log was read; None if there is no history.

    Who reads rows by these facts reads them in this version: a purge may remove versions from the next one.
    """
    if log.version < 0:
        return None
    found = log.metadata["configuration"]
    copies = frozenset(int(LSN.parse(text)) for text in json.loads(found.get(_COPIES, "[]")))
    end = delta_log.table_end(log.path)
    is_noted = delta_log.RESTORED in found
    is_restored = is_noted or (end is not None and end.is_restored)
    after_lsn, forgets_lsn = int(LSN.parse(found.get(_AFTER, "0/0"))), delta_log.POSITION_RETENTION in found
    return HistoryFacts(log.lsn or 0, after_lsn, copies, is_restored, is_noted, forgets_lsn)


def first_properties(house: Warehouse, table: Table, after_lsn: int, copies: frozenset[int]) -> dict[str, str]:
    """Return the properties of a new history. What an earlier changelog had, it does not know."""
    after_lsn = max(after_lsn, new_changelogs.begun_lsn(house, table))
    vectors = {"delta.enableDeletionVectors": "true"} if house.readers == SPARK else {}
    return {"cdcpipe.table": str(table), **vectors, **properties(after_lsn=after_lsn, copies=copies)}


def properties(*, after_lsn: int | None = None, copies: frozenset[int] | None = None, is_restored: bool = False) -> dict[str, str]:
    """Return the properties of a history's table that record these facts."""
    found = {} if after_lsn is None else {_AFTER: format_lsn(after_lsn)}
    if is_restored:
        found[delta_log.RESTORED] = "true"
    return found if copies is None else found | {_COPIES: json.dumps([format_lsn(lsn) for lsn in sorted(copies)])}
