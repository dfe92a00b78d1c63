"""Brings a stored history up to date with ordinary changes without Spark, in this process.

Spark's MERGE takes seconds of a core for a few changes, and it reads each file that may have one of their keys. This module reads
the changes from the changelog's files (ordinary_changes.py), makes the versions that they begin and end, and rewrites the history
(delta/rewrite.py) in one commit, which also records the position. The rules are those of replica/history.py.

A version that ends is removed and added again with its end. So the history gets one new file in a round.

For unusual changes `merge_without_spark` writes no rows and returns False; Spark does the merge (history_table.py). Those that
ordinary_merge.py leaves to Spark are unusual here, too. So are

- a TRUNCATE: it ends all current versions;
- changes after which the history knows another snapshot, or has changes to take back. A new history may begin with a snapshot;
- an update that left out a column, if the row's value is not known, or has an exact text;
- a history whose own columns have to get other names.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_sink.delta import file_table
from spark_sink.delta.rewrite import Rewrite
from spark_sink.replica.history import history_schema, own_names
from spark_sink.replica.layout import OPTIONAL
from spark_sink.replica.ordinary_changes import ChangeReader, NotOrdinaryError, merge_in_ranges, without_spark
from spark_sink.replica.pieces import cut_pieces
from spark_sink.replica.target import key_of, open_target
from spark_sink.schema.table import copies_until
from spark_sink.staging.log import Position
from spark_sink.warehouse import new_changelogs, purged_changes
from spark_sink.warehouse.stored_histories import first_properties

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from spark_sink.delta.rewrite import Found
    from spark_sink.delta.rows import Flags, Numbers
    from spark_sink.replica.ordinary_changes import Changes, KeyRange
    from spark_sink.replica.pieces import Piece
    from spark_sink.schema.table import Table, Version
    from spark_sink.warehouse.stored_histories import HistoryFacts
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["merge_without_spark"]


def merge_without_spark(
    house: Warehouse, table: Table, versions: Sequence[Version], known: HistoryFacts | None, until: Position
) -> bool:
    """Bring a table's history, of which the facts ``known`` are true, to the position ``until`` of its changelog.

    Creates the history if it does not exist. Otherwise it gets the columns that it lacks, and wider types. Returns False, and
    writes no rows, if the changes are unusual. The caller holds the right to write histories.
    """
    piece = _first_piece(versions, until) if known is None else _only_piece(versions, known, until)
    if piece is None or (0 if known is None else known.lsn) < purged_changes.last_lsn(house, table):
        return False
    if known is not None and known.lsn < new_changelogs.begun_lsn(house, table):
        return False
    copies, position = copies_until(versions, until.lsn), Position(until.epoch, piece.until_lsn)
    return without_spark(table, lambda: _merge(house, table, piece, position, copies, is_new=known is None))


def _only_piece(versions: Sequence[Version], known: HistoryFacts, until: Position) -> Piece | None:
    """Return the changes to merge, if they are one plain piece, and nothing else is to be done."""
    pieces = list(cut_pieces(versions, known.lsn, until.lsn))
    is_right = known.known_lsn(versions) == known.lsn and copies_until(versions, until.lsn) == known.copies
    return pieces[0] if is_right and len(pieces) == 1 and pieces[0].is_plain else None


def _first_piece(versions: Sequence[Version], until: Position) -> Piece | None:
    """Return the changes that a new history begins with, if they are one plain piece, which may begin with a snapshot."""
    pieces, copies = list(cut_pieces(versions, 0, until.lsn)), copies_until(versions, until.lsn)
    # A snapshot cuts. There must be no changes from before it: `ChangeReader` refuses them.
    if len(copies) > 1 or not 0 < len(pieces) <= 1 + len(copies):
        return None
    piece = pieces[-1]
    return piece if piece.is_plain and all(piece.after_lsn < lsn for lsn in copies) else None


def _merge(house: Warehouse, table: Table, piece: Piece, position: Position, copies: frozenset[int], *, is_new: bool) -> None:
    with house.logs.newest(house.changelog(table)) as changelog, house.logs.newest(house.history(table)) as history:
        if is_new != (history.version < 0):
            raise NotOrdinaryError("a history that somebody has removed or made meanwhile")
        key = key_of(piece)
        copy_lsn = min(copies, default=None) if is_new else None
        reader = ChangeReader(changelog, key, 0 if is_new else piece.after_lsn, position.lsn, copy_lsn=copy_lsn)
        wanted = history_schema(file_table.of_log(changelog).schema)

        def opened() -> Rewrite:
            if is_new:
                # Before a snapshot with which the changelog begins, the rows are not known.
                noted = first_properties(house, table, 0 if copy_lsn is None else copy_lsn - 1, copies)
                return Rewrite.new(history.path, key, wanted, noted)
            if own_names(file_table.of_log(history).schema.names) != own_names(wanted.names):
                raise NotOrdinaryError("other names for the history's own columns")
            return open_target(history, key, wanted)

        merge_in_ranges(reader, lambda ranges: _merge_into(opened, reader, ranges, key, position))


def _merge_into(
    opened: Callable[[], Rewrite], reader: ChangeReader, ranges: Sequence[KeyRange], key: Sequence[str], position: Position
) -> None:
    target: Rewrite | None = None
    with ExitStack() as undone:
        for keys in ranges:
            changes = reader.read(keys)
            if changes.ends_earlier:
                raise NotOrdinaryError("a TRUNCATE")
            made = _Versions.of(changes, keys)
            if target is None:  # not earlier: with unusual changes, the history stays as it is
                target = undone.enter_context(opened())
            _add(changes, made, target, key)
            del changes, made  # before the next range is read
    if target is not None:
        target.commit(position)


# --- what the changes amount to ---


@dataclass(frozen=True, slots=True)
class _Versions:
    """The versions that some changes begin, and those that they end. Changes have their numbers; -1 stands for none."""

    keys: pa.Table
    """Each key once, with the columns ``k0``, ``k1``, …"""
    ended_by: Numbers
    """For each key, the change that ends its version in the history."""
    key: Numbers
    """For each version that begins, the number of its key."""
    begun_by: Numbers
    """For each of these versions, the change that begins it."""
    next: Numbers
    """For each of these versions, the change that ends it."""
    known: dict[str, Numbers]
    """For each column that some update did not send: for each of these versions, the last change with its value. Without one, the
    version in the history has it."""

    @classmethod
    def of(cls, changes: Changes, wanted: KeyRange) -> Self:
        """Make the versions of the keys in a range."""
        events = changes.events(wanted)
        count = len(events.row)
        numbered = events.keys.append_column("event", pa.array(events.number))
        order = pc.sort_indices(numbered, sort_keys=[(name, "ascending") for name in numbered.column_names])
        keys, at = events.keys.take(order), order.to_numpy()
        row, is_gone = events.row[at], events.is_gone[at]
        begins = _begins(keys)
        number, first = np.cumsum(begins) - 1, np.flatnonzero(begins)
        # What a transaction changes again is no version.
        lsn = changes.end_lsn[row]
        is_last = np.ones(count, dtype=bool)
        is_last[:-1] = begins[1:] | (lsn[1:] != lsn[:-1])
        following = np.full(count, -1)
        following[:-1] = np.where(begins[1:], -1, row[1:])
        versions = is_last & ~is_gone
        gone = _last_place(is_gone, first[number])
        known = {}
        for name, is_unsent in events.unsent.items():
            last = _last_place(~is_unsent[at], first[number])
            if (versions & (gone > last)).any():
                raise NotOrdinaryError("an update of a row that was deleted")
            known[name] = np.where(last < 0, -1, row[last])[versions]
        return cls(keys.take(pa.array(first)), row[first], number[versions], row[versions], following[versions], known)


def _begins(keys: pa.Table) -> Flags:
    """Tell for each of some keys, which are in order, whether it differs from the one before."""
    begins = np.zeros(len(keys), dtype=bool)
    begins[:1] = True
    for column in keys.columns:
        values = column.combine_chunks()
        begins[1:] |= pc.not_equal(values[1:], values[:-1]).to_numpy(zero_copy_only=False)
    return begins


def _last_place(flags: Flags, first: Numbers) -> Numbers:
    """Return for each place the last one up to it, and not before its ``first`` one, that has a flag; -1 for none."""
    last = np.maximum.accumulate(np.where(flags, np.arange(len(flags)), -1))
    return np.where(last < first, -1, last)


# --- the new rows ---


@dataclass(frozen=True, slots=True)
class _Current:
    """The current versions that the history has of some keys."""

    found: Sequence[Found]
    key: Numbers
    """For each version, the number of its key."""
    place: Numbers
    """For each key, the place of its version among these; -1 for none."""
    columns: Mapping[str, Sequence[pa.Array]]
    """The values of each column, in one part for each file. No parts if there are no versions."""
    is_marked: Flags
    """For each version, whether it has unknown values, or exact texts."""

    @classmethod
    def find(cls, target: Rewrite, keys: pa.Table) -> Self:
        """Find the versions of these keys."""
        names = target.schema.names
        found = target.find(keys, unset=own_names(names)["to_lsn"])
        parts = [target.values(each.file, names, each.rows) for each in found]
        key = np.concatenate([np.zeros(0, dtype=np.int64), *(each.keys for each in found)])
        place, is_marked = np.full(len(keys), -1), np.zeros(len(key), dtype=bool)
        place[key] = np.arange(len(key))
        if np.count_nonzero(place >= 0) < len(key):
            raise NotOrdinaryError("two current versions of a row")
        for mark in OPTIONAL if parts else ():
            is_marked |= pa.concat_arrays([part[mark] for part in parts]).is_valid().to_numpy(zero_copy_only=False)
        return cls(found, key, place, {name: [part[name] for part in parts] for name in names}, is_marked)


def _add(changes: Changes, made: _Versions, target: Rewrite, key: Sequence[str]) -> None:
    """Add the versions that begin, and those that end, to the rewrite."""
    current, own = _Current.find(target, made.keys), own_names(target.schema.names)
    begun, lsns = pa.array(made.begun_by), pa.array(changes.end_lsn)
    ended_by = np.concatenate([made.next, made.ended_by[current.key]])
    ends = pa.array(ended_by, mask=ended_by < 0)
    begins = {own["valid_from"]: changes.commit_time.take(begun), own["from_lsn"]: lsns.take(begun)}
    rows = {
        name: pa.concat_arrays([new, *current.columns[name]]) for name, new in (_values(changes, made, current) | begins).items()
    }
    rows |= {own["valid_to"]: changes.commit_time.take(ends), own["to_lsn"]: lsns.take(ends), own["is_current"]: ends.is_null()}
    for name, parts in current.columns.items():
        if parts and name not in rows:  # a new version has no value in it
            rows[name] = pa.concat_arrays([pa.nulls(len(begun), parts[0].type), *parts])
    # Sorted by key, so that a search for a key reads few row groups.
    order = pc.sort_indices(pa.table(rows), sort_keys=[(name, "ascending") for name in (*key, own["from_lsn"])])
    target.add({name: values.take(order) for name, values in rows.items()}, current.found)


def _values(changes: Changes, made: _Versions, current: _Current) -> dict[str, pa.Array]:
    """Return the values of the versions that begin, in the table's own columns."""
    begun, place = pa.array(made.begun_by), current.place[made.key]
    values = {name: column.take(begun) for name, column in changes.columns.items() if name not in made.known}
    for name, known in made.known.items():
        is_stored = known < 0
        if (place[is_stored] < 0).any():
            raise NotOrdinaryError("a column that was not sent, and whose value is not known")
        if current.is_marked[place[is_stored]].any():
            raise NotOrdinaryError("a column that was not sent, of a row with unknown values or exact texts")
        source = pa.concat_arrays([changes.columns[name], *current.columns[name]])
        values[name] = source.take(pa.array(np.where(is_stored, len(changes) + place, known)))
        # Only a value that is not NULL is left out. So a NULL is from before the column, in a change or in the history.
        if (values[name].is_null().to_numpy(zero_copy_only=False) & (known < made.begun_by)).any():
            raise NotOrdinaryError("a column that was not sent, and whose value is not known")
    return values
