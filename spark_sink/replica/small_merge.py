"""Merges ordinary changes into a Delta replica without Spark, in this process.

Spark's MERGE takes a second of a core, however few changes it merges. With a hundred tables this would be the limit. This module
reads the changes from the changelog's files, reduces them to the last one of each key, and rewrites the replica (delta/rewrite.py)
in one commit, which also records the position. The rules are those of replica/merge.py.

For unusual changes `merge_without_spark` writes no rows and returns False; Spark does the merge. It does the same after any error,
because other programs may have written something unexpected to these tables. Unusual are

- changes that need other columns of the present rows, like an update that changed a key and left a column out;
- a replica with columns that are gone, or that another program has made wider;
- with ``--deletes soft``, a delete of a row that is deleted already;
- values with exact texts;
- a TRUNCATE, a DROP TABLE, or a snapshot;
- keys of types that PostgreSQL and Arrow may compare in different ways;
- large numbers of changes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdcpipe.errors import CdcpipeError
from cdcpipe.retry import RetryPolicy
from spark_sink.delta import file_table
from spark_sink.delta.file_table import ChangedError
from spark_sink.delta.rewrite import Rewrite
from spark_sink.delta.rows import Budget, UnsupportedError, fields_of, files_between, read_between
from spark_sink.files.places import map_reads
from spark_sink.replica.checks import check_growth
from spark_sink.replica.ends import POSITION
from spark_sink.replica.layout import OPTIONAL, first_columns, replica_properties
from spark_sink.replica.target import key_of, open_target, table_columns
from spark_sink.schema.types import DELETED_AT, replica_schema
from spark_sink.warehouse.wanted_copies import want as want_copy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pyspark.sql.types import StructType

    from spark_sink.delta.log import TableLog
    from spark_sink.delta.rewrite import Found
    from spark_sink.delta.rows import Flags, Numbers
    from spark_sink.replica.pieces import Piece
    from spark_sink.schema.table import Table
    from spark_sink.staging.log import Position
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["merge_without_spark"]

_logger = logging.getLogger(__name__)

_MOST_BYTES: Final = 256 << 20
"""The most bytes of changes, uncompressed, that are read. A multiple of this is in memory."""
_MERGES: Final = RetryPolicy(attempts=3)

_KEY_TYPES: Final = {
    "byte",
    "short",
    "integer",
    "long",
    "string",
    "binary",
    "boolean",
    "date",
    "timestamp",
    "timestamp_ntz",
    "decimal",
}


class _NotOrdinaryError(Exception):
    """The changes or the replica are unusual: Spark has to do the merge."""


_EXPECTED: Final = (_NotOrdinaryError, UnsupportedError, OSError)
"""Errors whose text may be logged. The text of another error may contain values of a row."""


def merge_without_spark(warehouse: Warehouse, table: Table, piece: Piece, position: Position) -> bool:
    """Merge a plain piece of changes into a Delta replica, and record ``position``. Creates the replica if it does not exist.

    The replica gets the columns that it lacks, and wider types. Returns False, and writes no rows, if the changes are unusual.
    Nobody else may merge meanwhile.
    """
    try:
        _MERGES.call(lambda: _merge(warehouse, table, piece, position), ChangedError)
    except CdcpipeError:
        raise
    except Exception as ex:  # noqa: BLE001 - other programs may have written anything to the table; Spark knows more cases
        _logger.debug("%s is left to Spark: %s", table, ex if isinstance(ex, _EXPECTED) else repr(type(ex)))
        return False
    return True


def _merge(warehouse: Warehouse, table: Table, piece: Piece, position: Position) -> None:
    with warehouse.logs.newest(warehouse.changelog(table)) as changelog, warehouse.logs.newest(warehouse.replica(table)) as replica:
        if (replica.lsn or 0) < position.lsn:
            _merge_into(replica, _Changelog(changelog, piece.gone), warehouse, table, piece, position)


def _merge_into(log: TableLog, source: _Changelog, warehouse: Warehouse, table: Table, piece: Piece, position: Position) -> None:
    key = key_of(piece)
    changes = source.read(key, piece.after_lsn, position.lsn)
    keeps_deleted = warehouse.keeps_deleted
    last = _reduce(changes, key, keeps_deleted=keeps_deleted)
    wanted = replica_schema(source.columns, keeps_deleted=keeps_deleted)
    if log.version < 0:
        target = Rewrite.new(log.path, key, wanted, replica_properties(warehouse, piece.key, source.columns.names))
    else:
        target = open_target(log, piece, wanted)
        _check_unsent(log, target.schema, last)
    found = target.find(last.keys)
    if keeps_deleted:
        last, existing = _with_deleted(last, target, found)
    else:
        existing = sum(len(each.rows) for each in found)
    rows = _new_rows(changes, last, target, found)
    grown = int(last.is_live.sum()) - existing
    # Before the commit: a process that is killed in between merges and checks once more.
    check_growth(table, piece, changes.growth, grown, partial(want_copy, warehouse, table, position.lsn))
    target.commit(rows, found, position)


def _check_unsent(log: TableLog, present: StructType, last: _Last) -> None:
    """Raise _NotOrdinaryError unless the replica, with the columns ``present``, has a value for each unsent column."""
    # In a column that was added later, a row may lack its value, or have it as an exact text.
    if (last.known and OPTIONAL.keys() & set(present.names)) or (
        not last.unsent <= set(first_columns(log.metadata.get("configuration", {})))
    ):
        raise _NotOrdinaryError("columns that were not sent, and whose values the replica may lack")


# --- the changes ---


@dataclass(frozen=True, slots=True)
class _Changes:
    """Changes, ordered by their positions."""

    columns: dict[str, pa.Array]
    """The table's own columns."""
    op: pa.Array
    old_key: list[pa.Array]
    has_old: Flags
    unchanged: pa.Array
    commit_time: pa.Array

    def __len__(self) -> int:
        return len(self.op)

    @property
    def growth(self) -> int:
        """The number of inserts minus the number of deletes."""
        return int(_equal(self.op, "insert").sum()) - int(_equal(self.op, "delete").sum())


class _Changelog:
    """Reads changes from a changelog's files, without the columns ``gone``."""

    def __init__(self, log: TableLog, gone: Collection[str]) -> None:
        if log.version < 0:
            raise _NotOrdinaryError("no changelog")
        self._log = log
        table = file_table.of_log(log)
        self._fields = fields_of(table.physical, table.schema.names)
        self.columns = table_columns(table.schema, gone)
        self._schema = table.schema

    def read(self, key: Sequence[str], after_lsn: int, until_lsn: int) -> _Changes:
        """Read the changes in (after_lsn, until_lsn]."""
        position, old = self._fields["_cdc_end_lsn"].name, self._fields["_cdc_old"]
        # Of an old row read only the key.
        names = self._schema["_cdc_old"].dataType.names
        children = [old.type.field(names.index(name)) for name in key]
        old_key = pa.field(old.name, pa.struct(children))
        wanted = (*self.columns.names, *POSITION, "_cdc_op", "_cdc_commit_time", "_cdc_unchanged", "_cdc_exact")
        fields = {name: self._fields[name] for name in wanted} | {"_cdc_old": old_key}
        files = files_between(self._log.files, position, after_lsn, until_lsn)
        if sum(int(file["size"]) for file in files) > _MOST_BYTES:
            raise _NotOrdinaryError("many changes")
        path, budget = self._log.path, Budget(_MOST_BYTES)
        parts = map_reads(lambda file: read_between(path, file, fields, "_cdc_end_lsn", after_lsn, until_lsn, budget), files, path)
        rows = {name: _joined([part[name] for part in parts], field.type) for name, field in fields.items()}
        return self._checked(_sorted(rows), key)

    def _checked(self, rows: dict[str, pa.Array], key: Sequence[str]) -> _Changes:
        op, exact = rows["_cdc_op"], rows["_cdc_exact"]
        if not set(pc.unique(op).to_pylist()) <= {"insert", "update", "delete"}:
            raise _NotOrdinaryError("a TRUNCATE, or a snapshot")
        if len(exact) != exact.null_count and np.diff(exact.offsets.to_numpy()).any():
            raise _NotOrdinaryError("exact texts")
        others = {self._schema[name].dataType.typeName() for name in key} - _KEY_TYPES
        if others:
            raise _NotOrdinaryError(f"a key of type {min(others)}")
        old = rows["_cdc_old"]
        return _Changes(
            {name: rows[name] for name in self.columns.names},
            op,
            old.flatten(),
            old.is_valid().to_numpy(zero_copy_only=False),
            rows["_cdc_unchanged"],
            rows["_cdc_commit_time"],
        )


def _joined(arrays: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    return pa.concat_arrays(arrays) if arrays else pa.nulls(0, kind)


def _sorted(rows: dict[str, pa.Array]) -> dict[str, pa.Array]:
    epoch, lsn, ordinal = (rows[name].to_numpy() for name in ("_cdc_epoch", "_cdc_end_lsn", "_cdc_ordinal"))
    step = np.diff(lsn)
    if ((step > 0) | ((step == 0) & (np.diff(ordinal) > 0))).all():
        return rows
    order = pa.array(np.lexsort((ordinal, lsn, epoch)))
    return {name: values.take(order) for name, values in rows.items()}


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
    is_kept: Flags
    """For each key, whether the replica has a row then: a live one, or one that is deleted."""


def _reduce(changes: _Changes, key: Sequence[str], *, keeps_deleted: bool) -> _Last:
    """Find the last change of each key. A change of the key ends the old key."""
    count = len(changes)
    is_delete = _equal(changes.op, "delete")
    new = [changes.columns[name] for name in key]
    of_old = pa.array(is_delete & changes.has_old)
    keys = [pc.if_else(of_old, old, values) for old, values in zip(changes.old_key, new, strict=True)]
    moves = _moves(changes, new)
    if any(values.null_count for values in keys):
        raise _NotOrdinaryError("a change without a value for its key")
    if len(moves):
        moved = pa.array(moves)
        keys = [pa.concat_arrays([values, old.take(moved)]) for values, old in zip(keys, changes.old_key, strict=True)]
    row = np.concatenate([np.arange(count), moves])
    is_gone = np.concatenate([is_delete, np.ones(len(moves), dtype=bool)])
    # The last event of a key decides. Two events of one key never have the same number.
    event = 2 * row + ~is_gone
    known = _known(changes, row, is_gone, moves)
    unsent = frozenset(known)
    if keeps_deleted and is_gone.any():
        # A deleted row has the values of the last change with a row, else those of the replica's row.
        rows_only = pa.array(row, mask=is_gone)
        known = {name: known.get(name, rows_only) for name in changes.columns}
    table = {f"k{index}": values for index, values in enumerate(keys)}
    grouped = pa.table(table | {"event": event} | {f"known{i}": values for i, values in enumerate(known.values())})
    aggregates = [("event", "max"), *((f"known{i}", "max") for i in range(len(known)))]
    found = grouped.group_by(list(table)).aggregate(aggregates)
    event = found["event_max"].to_numpy()
    is_live = (event & 1).astype(bool)
    return _Last(
        found.select(list(table)),
        event >> 1,
        is_live,
        {name: found[f"known{i}_max"].fill_null(-1).to_numpy() for i, name in enumerate(known)},
        unsent,
        is_live,
    )


def _with_deleted(last: _Last, target: Rewrite, found: Sequence[Found]) -> tuple[_Last, int]:
    """Return the result with the keys of which a deleted row is kept, and how many of the rows found exist."""
    has_row = np.max(list(last.known.values()), axis=0) >= 0 if last.known else last.is_live
    is_kept, existing = last.is_live | has_row, 0
    for each in found:
        is_deleted = target.values(each.file, DELETED_AT, each.rows).is_valid().to_numpy(zero_copy_only=False)
        if (is_deleted & ~is_kept[each.keys]).any():
            raise _NotOrdinaryError("a delete of a row that is deleted already")
        existing += int((~is_deleted).sum())
    for each in found:
        is_kept[each.keys] = True
    return replace(last, is_kept=is_kept), existing


def _equal(values: pa.Array, text: str) -> Flags:
    found: Flags = pc.equal(values, text).to_numpy(zero_copy_only=False)
    return found


def _moves(changes: _Changes, new: Sequence[pa.Array]) -> Numbers:
    """Return the numbers of the updates that changed the key."""
    candidates = np.flatnonzero(changes.has_old & _equal(changes.op, "update"))
    numbers, differs = pa.array(candidates), np.zeros(len(candidates), dtype=bool)
    for old, values in zip(changes.old_key, new, strict=True):
        before = old.take(numbers)
        if before.null_count:
            raise _NotOrdinaryError("an old row without a value for its key")
        differs |= pc.not_equal(before, values.take(numbers)).fill_null(True).to_numpy(zero_copy_only=False)
    return candidates[differs]


def _known(changes: _Changes, row: Numbers, is_gone: Flags, moves: Numbers) -> dict[str, pa.Array]:
    """Return, for each column that some update did not send, the number of each event's change; null if that did not send it."""
    if changes.unchanged.null_count == len(changes):
        return {}
    parents = pc.list_parent_indices(changes.unchanged).to_numpy()
    names = pc.list_flatten(changes.unchanged)
    if np.isin(moves, parents).any():
        raise _NotOrdinaryError("an update that changed a key and left a column out")
    found = {}
    for name in sorted(set(pc.unique(names).to_pylist()) & changes.columns.keys()):
        is_unknown = is_gone.copy()
        is_unknown[parents[_equal(names, name)]] = True
        found[name] = pa.array(row, mask=is_unknown)
    return found


# --- the new rows ---


def _new_rows(changes: _Changes, last: _Last, target: Rewrite, found: Sequence[Found]) -> dict[str, pa.Array]:
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
                parts.append(target.values(each.file, name, each.rows[is_wanted]))
                at[each.keys[is_wanted]] = count + np.arange(len(parts[-1]))
                count += len(parts[-1])
        if (at[groups] < 0).any():
            raise _NotOrdinaryError("a column that was not sent, and whose value is not known")
        new[name] = pa.concat_arrays(parts).take(pa.array(at[groups]))
    if DELETED_AT in target.schema.names:
        times = changes.commit_time.take(rows)
        new[DELETED_AT] = pc.if_else(pa.array(last.is_live[groups]), pa.scalar(None, times.type), times)
    return new
