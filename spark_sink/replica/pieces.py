"""Cuts the changes of a table into pieces with one key each. A replica takes a piece in one step. No Spark.

A cut is where the key changes, or where another table gets the name, according to the table's versions (schema/table.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from spark_sink.schema.table import gone_columns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from spark_sink.schema.table import Fill, Version

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
    """
    if after_lsn >= until_lsn:
        return
    known, versions = versions, _cutting(versions)
    # Cut before and after a transaction in which the key changes, because a replica's position is always the end of a transaction.
    mixed = sorted({version.end_lsn for version in versions if version.ordinal})
    edges = sorted({after_lsn, until_lsn, *(edge for lsn in mixed for edge in (lsn - 1, lsn) if after_lsn < edge < until_lsn)})
    for start_lsn, end_lsn in pairwise(edges):
        for piece in _pieces_between(versions, start_lsn, end_lsn):
            yield replace(piece, gone=gone_columns(known, piece.until_lsn))


def _cutting(versions: Sequence[Version]) -> list[Version]:
    """Leave out the versions in which only columns have gone: their rows need no piece of their own."""
    return [*versions[:1], *(after for before, after in pairwise(versions) if not after.cuts_nothing_after(before))]


def _pieces_between(versions: Sequence[Version], after_lsn: int, until_lsn: int) -> Iterator[Piece]:
    """Cut changes that are a single transaction, or in which no key changes within a transaction."""
    for index, version in enumerate(versions):
        following = versions[index + 1 :]
        keyed = next((v for v in (version, *following) if v.key and v.relation_id == version.relation_id), None)
        if keyed is None:
            continue
        begin = (version.end_lsn, version.ordinal) if index else (0, 0)
        end = (following[0].end_lsn, following[0].ordinal) if following else (until_lsn + 1, 0)
        begin, end = max(begin, (after_lsn + 1, 0)), min(end, (until_lsn + 1, 0))
        if begin >= end:
            continue
        is_begin = index > 0 and begin == (version.end_lsn, version.ordinal)
        yield Piece(
            key=keyed.key,
            columns=_key_columns(versions, keyed),
            after_lsn=begin[0] - 1,
            until_lsn=end[0] if end[1] else end[0] - 1,
            is_new_table=is_begin and versions[index - 1].relation_id != version.relation_id,
            first_ordinal=begin[1],
            end_ordinal=end[1] or None,
            fills=version.fills if is_begin else (),
            is_before_key=not version.key,
            is_new_key=not version.key or (is_begin and _is_new_key(versions[index - 1], version)),
            has_all=any(before.snapshot and before.relation_id == version.relation_id for before in versions[: index + 1]),
        )


def _is_new_key(before: Version, version: Version) -> bool:
    """Tell whether rows of the previous version may lack a value for this version's key."""
    return before.key != version.key or any(fill.column in version.columns for fill in version.fills)


def _key_columns(versions: Sequence[Version], version: Version) -> Key:
    """Return, for each column of the version's key, the changelog's columns that have had its values, this version's first."""
    found = []
    for name, column in zip(version.key, version.columns, strict=True):
        same = [dict(zip(v.key, v.columns, strict=True)).get(name) for v in reversed(versions)]
        found.append(tuple(dict.fromkeys([column, *(other for other in same if other is not None)])))
    return tuple(found)
