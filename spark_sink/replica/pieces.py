"""Cuts the changes of a table into pieces with one key each. A replica takes a piece in one step. No Spark.

A cut is where the key changes, or where another table gets the name, according to the table's versions (schema/table.py).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Self

from spark_sink.schema.table import AFTER_ALL, gone_from

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from spark_sink.schema.table import Fill, Place, Version

__all__ = ["Key", "Piece", "cut_pieces"]

Key = tuple[tuple[str, ...], ...]
"""For each column of the key, the changelog's columns with its values: one for each type that it has had."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Changes with one key: those of the transactions with ``after_lsn`` < end LSN <= ``until_lsn``.

    If the key changes within a transaction: the changes of this transaction with ``first_ordinal`` <= ordinal < ``end_ordinal``.
    """

    key: tuple[str, ...]
    columns: Key
    after_lsn: int
    until_lsn: int
    is_new_table: bool
    """Whether the rows so far belong to another table, which had this name before."""
    first_ordinal: int = 0
    end_ordinal: int | None = None
    fills: tuple[Fill, ...] = ()
    """The fills to apply to the rows so far."""
    is_before_key: bool = False
    """Whether these changes are from before the table had a key."""
    is_new_key: bool = False
    """Whether the rows so far may lack a value for the key."""
    has_all: bool = False
    """Whether a snapshot came before. Then the replica has every row that these changes can affect."""
    gone: frozenset[str] = frozenset()
    """The changelog's columns that the replica does not have after these changes."""

    @property
    def is_plain(self) -> bool:
        """Whether these are only changes with one key, each column of which has one type."""
        is_whole = not self.first_ordinal and self.end_ordinal is None
        has_one_type = all(len(names) == 1 for names in self.columns)
        return is_whole and has_one_type and not (self.is_new_table or self.is_new_key or self.fills or self.is_before_key)


def cut_pieces(versions: Sequence[Version], after_lsn: int, until_lsn: int) -> Iterator[Piece]:
    """Cut the changes in (after_lsn, until_lsn] where the key changes, or where another table gets the name.

    Changes from before the table had a key use the key that it got later. If it has none yet, they are left for later. There are no
    pieces if ``after_lsn`` is beyond ``until_lsn``: a copy may have brought a replica further than the merge that is asked for.

    Takes time in proportion to the number of versions: a table that a job drops and makes again each hour has thousands in a year.
    """
    if after_lsn >= until_lsn:
        return
    known = _Known.of(versions)
    # Cut before and after a transaction in which the key changes, because a replica's position is always the end of a transaction.
    mixed = sorted({version.end_lsn for version in known.versions if version.ordinal})
    edges = sorted({after_lsn, until_lsn, *(edge for lsn in mixed for edge in (lsn - 1, lsn) if after_lsn < edge < until_lsn)})
    number = 0
    for index in range(len(known.versions)):
        begin, end = known.range_of(index)
        while number < len(edges) - 1 and (edges[number] + 1, 0) < end:
            least, greatest = max(begin, (edges[number] + 1, 0)), min(end, (edges[number + 1] + 1, 0))
            if least < greatest and known.keyed[index] is not None:
                yield known.piece(index, least, greatest)
            if greatest == end:
                break  # the following version may begin before the next edge
            number += 1


@dataclass(frozen=True, slots=True)
class _Known:
    """What pieces need to know of all versions of a table. The lists have an entry for each of the ``versions`` that cut."""

    versions: Sequence[Version]
    keyed: Sequence[Version | None]
    """The version whose key tells the rows apart: the version itself, or the next one of the same table with a key."""
    has_all: Sequence[bool]
    """Whether the same table has a snapshot up to this version."""
    columns: Mapping[str, Mapping[str, None]]
    """For each column of some key the changelog's columns that have had its values, the newest first."""
    gone: Sequence[tuple[int, frozenset[str]]]
    """Where the columns change that the replica does not have, and which these are from there on (`gone_columns`)."""

    @classmethod
    def of(cls, versions: Sequence[Version]) -> Self:
        # Leave out the versions in which only columns have gone: their rows need no piece of their own.
        cutting = [*versions[:1], *(after for before, after in pairwise(versions) if not after.cuts_nothing_after(before))]
        columns: dict[str, dict[str, None]] = {}
        keyed: list[Version | None] = []
        next_keyed: dict[int, Version] = {}
        for version in reversed(cutting):
            for name, column in zip(version.key, version.columns, strict=True):
                columns.setdefault(name, {}).setdefault(column)
            if version.key:
                next_keyed[version.relation_id] = version
            keyed.append(next_keyed.get(version.relation_id))
        copied: set[int] = set()
        has_all = []
        for version in cutting:
            if version.snapshot:
                copied.add(version.relation_id)
            has_all.append(version.relation_id in copied)
        return cls(cutting, keyed[::-1], has_all, columns, list(gone_from(versions)))

    def range_of(self, index: int) -> tuple[Place, Place]:
        """Return the place at which a version begins, and that at which it ends."""
        begin = self.versions[index].place if index else (0, 0)
        return begin, self.versions[index + 1].place if index + 1 < len(self.versions) else AFTER_ALL

    def piece(self, index: int, begin: Place, end: Place) -> Piece:
        """Return the piece with the changes in [begin, end): all under this version, of whole transactions or within one."""
        version, keyed = self.versions[index], self.keyed[index]
        assert keyed is not None
        before = self.versions[index - 1] if index and begin == version.place else None
        until_lsn = end[0] if end[1] else end[0] - 1
        return Piece(
            key=keyed.key,
            columns=tuple(
                tuple(dict.fromkeys((column, *self.columns[name]))) for name, column in zip(keyed.key, keyed.columns, strict=True)
            ),
            after_lsn=begin[0] - 1,
            until_lsn=until_lsn,
            is_new_table=before is not None and before.relation_id != version.relation_id,
            first_ordinal=begin[1],
            end_ordinal=end[1] or None,
            fills=version.fills if before is not None else (),
            is_before_key=not version.key,
            is_new_key=not version.key or (before is not None and _is_new_key(before, version)),
            has_all=self.has_all[index],
            gone=self._gone_at(until_lsn),
        )

    def _gone_at(self, lsn: int) -> frozenset[str]:
        at = bisect_right(self.gone, lsn, key=lambda each: each[0])
        return self.gone[at - 1][1] if at else frozenset()


def _is_new_key(before: Version, version: Version) -> bool:
    """Tell whether rows of the previous version may lack a value for this version's key."""
    return before.key != version.key or any(fill.column in version.columns for fill in version.fills)
