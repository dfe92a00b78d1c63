"""Merges ordinary changes into a Delta replica without Spark, in this process.

Spark's MERGE takes a second of a core, however few changes it merges. With a hundred tables this would be the limit. This module
reads the changes from the changelog's files (ordinary_changes.py), reduces them to the last one of each key, and rewrites the
replica (delta/rewrite.py) in one commit, which also records the position. The rules are those of replica/merge.py.

For unusual changes `merge_without_spark` writes no rows and returns False; Spark does the merge. It does the same after any error,
because other programs may have written something unexpected to these tables. Unusual are

- changes that need other columns of the present rows, like an update that changed a key and left a column out;
- an insert that left a column out;
- an update that left out a column whose value is not known;
- a replica with columns that are gone, or that another program has made wider;
- with ``--deletes soft``, a delete of a row that is deleted already, and a TRUNCATE;
- values with exact texts;
- a DROP TABLE, or a snapshot;
- keys of types that PostgreSQL and Arrow may compare in different ways;
- changes that take more than some 8 GiB of memory (16 ranges of 512 MiB), or of which very many have the same value in the first
  column of the key. Values that updates did not send, and that the replica has, count in the same way.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_sink.delta.rewrite import Rewrite
from spark_sink.replica.checks import check_growth
from spark_sink.replica.layout import OPTIONAL, first_columns, replica_properties
from spark_sink.replica.ordinary_changes import ChangeReader, NotOrdinaryError, merge_in_ranges, without_spark
from spark_sink.replica.target import key_of, open_target
from spark_sink.schema.types import DELETED_AT, replica_schema
from spark_sink.warehouse.wanted_copies import want_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql.types import StructType

    from spark_sink.delta.log import TableLog
    from spark_sink.delta.rewrite import Found
    from spark_sink.delta.rows import Flags, Numbers
    from spark_sink.replica.ordinary_changes import Changes, KeyRange
    from spark_sink.replica.pieces import Piece
    from spark_sink.schema.table import Table
    from spark_sink.staging.log import Position
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["merge_without_spark"]


def merge_without_spark(warehouse: Warehouse, table: Table, piece: Piece, position: Position) -> bool:
    """Merge a plain piece of changes into a Delta replica, and record ``position``. Creates the replica if it does not exist.

    The replica gets the columns that it lacks, and wider types. Returns False, and writes no rows, if the changes are unusual.
    Nobody else may merge meanwhile.
    """
    return without_spark(table, lambda: _merge(warehouse, table, piece, position))


def _merge(warehouse: Warehouse, table: Table, piece: Piece, position: Position) -> None:
    with warehouse.logs.newest(warehouse.changelog(table)) as changelog, warehouse.logs.newest(warehouse.replica(table)) as replica:
        if (replica.lsn or 0) < position.lsn:
            reader = ChangeReader(changelog, key_of(piece), piece.after_lsn, position.lsn, piece.gone)
            merge_in_ranges(reader, lambda ranges: _merge_into(replica, reader, ranges, warehouse, table, piece, position))


def _merge_into(
    log: TableLog,
    reader: ChangeReader,
    ranges: Sequence[KeyRange],
    warehouse: Warehouse,
    table: Table,
    piece: Piece,
    position: Position,
) -> None:
    target: Rewrite | None = None
    expected = grown = 0
    with ExitStack() as undone:
        for keys in ranges:
            changes = reader.read(keys)
            last = _reduce(changes, keys, keeps_deleted=warehouse.keeps_deleted)
            if changes.ends_earlier and warehouse.keeps_deleted:
                raise NotOrdinaryError("a TRUNCATE, whose rows are kept")
            if target is None:  # not earlier: with unusual changes, the replica stays as it is
                target = undone.enter_context(_opened(log, warehouse, piece, reader.columns))
                if changes.ends_earlier:
                    target.remove_all()
            if log.version >= 0:
                _check_unsent(log, target.schema, last)
            expected += changes.growth
            grown += _add(changes, last, target, keeps_deleted=warehouse.keeps_deleted)
            del changes, last  # before the next range is read
        # Before the commit: a process that is killed in between merges and checks once more.
        check_growth(table, piece, expected, grown, partial(want_copy, warehouse, table, position.lsn))
    if target is not None:
        target.commit(position)


def _opened(log: TableLog, warehouse: Warehouse, piece: Piece, columns: StructType) -> Rewrite:
    """Return the replica, to be rewritten: a new one, if there is none."""
    wanted = replica_schema(columns, keeps_deleted=warehouse.keeps_deleted)
    if log.version >= 0:
        return open_target(log, key_of(piece), wanted, piece.gone)
    return Rewrite.new(log.path, key_of(piece), wanted, replica_properties(warehouse, piece.key, columns.names))


def _add(changes: Changes, last: _Last, target: Rewrite, *, keeps_deleted: bool) -> int:
    """Add the result of some changes to the rewrite; return by how many rows the replica grows."""
    found = target.find(last.keys)
    if keeps_deleted:
        last, existing = _with_deleted(last, target, found)
    else:
        existing = sum(len(each.rows) for each in found)
    target.add(_new_rows(changes, last, target, found), found)
    return int(last.is_live.sum()) - existing


def _check_unsent(log: TableLog, present: StructType, last: _Last) -> None:
    """Raise NotOrdinaryError unless the replica, with the columns ``present``, has a value for each unsent column."""
    # In a column that was added later, a row may lack its value, or have it as an exact text.
    if (last.known and OPTIONAL.keys() & set(present.names)) or (
        not last.unsent <= set(first_columns(log.metadata.get("configuration", {})))
    ):
        raise NotOrdinaryError("columns that were not sent, and whose values the replica may lack")


# --- what the changes amount to ---


@dataclass(frozen=True, slots=True)
class _Last:
    """The result of the changes for each key."""

    keys: pa.Table
    """One row for each key, with the columns ``k0``, ``k1``, …"""
    row: Numbers
    """For each key, the number of its last change."""
    is_live: Flags
    """For each key, whether it has a row then."""
    known: dict[str, Numbers]
    """For each column that some update did not send, or for all columns if deleted rows are kept: for each key, the number of the
    last change with its value; -1 for none."""
    unsent: frozenset[str]
    """The columns that some update did not send."""
    told_by: Numbers
    """For each key, the number of its last change with a row; -1 for none."""
    is_kept: Flags
    """For each key, whether the replica has a row then: a live one, or one that is deleted."""


def _reduce(changes: Changes, wanted: KeyRange, *, keeps_deleted: bool) -> _Last:
    """Find the last change of each wanted key. A change of the key ends the old key."""
    events = changes.events(wanted)
    row, is_gone = events.row, events.is_gone
    known = {name: pa.array(row, mask=is_unsent) for name, is_unsent in events.unsent.items()}
    unsent, told_by = frozenset(known), None
    if keeps_deleted and is_gone.any():
        # A deleted row has the values of the last change with a row, else those of the replica's row.
        told_by = pa.array(row, mask=is_gone)
        known = {name: known.get(name, told_by) for name in changes.columns}
    names, grouped = events.keys.column_names, events.keys.append_column("event", pa.array(events.number))
    for index, values in enumerate(known.values()):
        grouped = grouped.append_column(f"known{index}", values)
    if told_by is not None:
        grouped = grouped.append_column("told_by", told_by)
    # The last event of a key decides.
    found = grouped.group_by(names).aggregate([(name, "max") for name in grouped.column_names[len(names) :]])
    event = found["event_max"].to_numpy()
    is_live = (event & 1).astype(bool)
    return _Last(
        found.select(names),
        event >> 1,
        is_live,
        {name: found[f"known{i}_max"].fill_null(-1).to_numpy() for i, name in enumerate(known)},
        unsent,
        event >> 1 if told_by is None else found["told_by_max"].fill_null(-1).to_numpy(),
        is_live,
    )


def _with_deleted(last: _Last, target: Rewrite, found: Sequence[Found]) -> tuple[_Last, int]:
    """Return the result with the keys of which a deleted row is kept, and how many of the rows found exist."""
    has_row = np.max(list(last.known.values()), axis=0) >= 0 if last.known else last.is_live
    is_kept, existing = last.is_live | has_row, 0
    for each in found:
        is_deleted = target.values(each.file, [DELETED_AT], each.rows)[DELETED_AT].is_valid().to_numpy(zero_copy_only=False)
        if (is_deleted & ~is_kept[each.keys]).any():
            raise NotOrdinaryError("a delete of a row that is deleted already")
        existing += int((~is_deleted).sum())
    for each in found:
        is_kept[each.keys] = True
    return replace(last, is_kept=is_kept), existing


# --- the new rows ---


def _new_rows(changes: Changes, last: _Last, target: Rewrite, found: Sequence[Found]) -> dict[str, pa.Array]:
    """Return the rows after the changes, sorted by key, so that a search for a key reads few row groups."""
    kept = np.flatnonzero(last.is_kept)
    order = pc.sort_indices(last.keys.take(pa.array(kept)), sort_keys=[(name, "ascending") for name in last.keys.column_names])
    groups = kept[order.to_numpy()]
    rows = pa.array(last.row[groups])
    new = {name: values.take(rows) for name, values in changes.columns.items() if name not in last.known}
    for name, known in last.known.items():
        parts, at, count = [changes.columns[name]], known.copy(), len(changes)
        for each in found:
            is_wanted = last.is_kept[each.keys] & (at[each.keys] < 0)
            if is_wanted.any():
                parts.append(target.values(each.file, [name], each.rows[is_wanted])[name])
                at[each.keys[is_wanted]] = count + np.arange(len(parts[-1]))
                count += len(parts[-1])
        if (at[groups] < 0).any():
            raise NotOrdinaryError("a column that was not sent, and whose value is not known")
        new[name] = pa.concat_arrays(parts).take(pa.array(at[groups]))
        # Only a value that is not NULL is left out. So a NULL is from before the column, in a change or in the replica.
        if name in last.unsent and (new[name].is_null().to_numpy(zero_copy_only=False) & (known < last.told_by)[groups]).any():
            raise NotOrdinaryError("a column that was not sent, and whose value is not known")
    if DELETED_AT in target.schema.names:
        times = changes.commit_time.take(rows)
        new[DELETED_AT] = pc.if_else(pa.array(last.is_live[groups]), pa.scalar(None, times.type), times)
    return new
