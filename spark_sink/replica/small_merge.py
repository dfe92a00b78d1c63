"""Merges that need no Spark: ordinary changes, not too many of them, brought to a Delta replica by this process.

A MERGE of Spark's costs a second of a core whatever it merges, and with a hundred tables that is what limits. Here the changes are
read from the changelog's files, reduced to the last one of each key, and the keys are looked up in the key columns of the
replica's files. Rows that go are marked in deletion vectors, rows that come are a new file; a small file of which rows go is
written anew together with them, so that small files don't pile up. One commit does it all, and records the position.

The rules are those in replica/merge.py. For what is not ordinary `apply` changes nothing and returns False; Spark does the merge.
The same goes for a log or a file that makes any of this fail, as others write to these tables, too. Not ordinary is what needs to
know more of the rows than their keys, like an update that changed a key and left a column out; what changes the replica's
columns; values that are exact texts; a TRUNCATE; keys that PostgreSQL and Arrow may compare otherwise.
"""

from __future__ import annotations

import json
import logging
import secrets
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdcpipe.errors import CdcpipeError
from cdcpipe.retry import RetryPolicy
from spark_sink.delta import commit as delta_files
from spark_sink.delta import deletion_vector
from spark_sink.delta.commit import ChangedError, FileTable, Replaced
from spark_sink.delta.log import TableLog
from spark_sink.delta.rows import UnreadableError, fields_of, present_rows, read_columns, statistics, uncompressed_bytes
from spark_sink.files import places as storage
from spark_sink.files.parquet import FileWriter
from spark_sink.schema.types import split_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql.types import StructType

    from spark_sink.files.parquet import WrittenFile
    from spark_sink.staging.log import Position

    Flags = np.ndarray[Any, np.dtype[np.bool_]]
    Numbers = np.ndarray[Any, np.dtype[np.int64]]

__all__ = ["apply"]

_logger = logging.getLogger(__name__)

_MOST_BYTES: Final = 256 << 20
"""So much, uncompressed, is read at most of changes, and of a file's values: some times as much is in memory."""
_MOST_ROWS: Final = 20_000_000
"""So many rows of the replica may have to be looked through."""
_SMALL_BYTES: Final = 1 << 20
"""A file of less is written anew when rows of it go."""
_MOST_SMALL_FILES: Final = 8
"""With more of them all are written anew, as one."""
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
_KNOWN_FEATURES: Final = {
    "appendOnly",
    "clustering",
    "columnMapping",
    "deletionVectors",
    "domainMetadata",
    "invariants",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "vacuumProtocolCheck",
}
"""What a table may ask of those who write to it: that is done here, or is refused where it is turned on."""
_FORBIDDEN: Final = ("delta.appendOnly", "delta.enableChangeDataFeed")


class _NotOrdinaryError(Exception):
    """These changes, or this replica, are left to Spark."""


_EXPECTED: Final = (_NotOrdinaryError, UnreadableError, OSError)
"""The text of another error may have a row's values."""


def apply(
    changelog: Path,
    replica: Path,
    key: Sequence[str],
    after_lsn: int,
    position: Position,
    properties: Callable[[Sequence[str]], Mapping[str, str]],
    tell_grown: Callable[[int, int], None],
) -> bool:
    """Bring the replica from ``after_lsn`` to ``position``; return False, with nothing changed, if that is not ordinary.

    ``changelog`` and ``replica`` are the tables' directories, ``key`` the columns that identify a row. A replica that is not there
    is made, with the ``properties`` for its columns. Nobody else merges meanwhile. In the end ``tell_grown`` is called with how
    many more rows there should be, by what the changes are, and how many there are.
    """
    try:
        grown = _MERGES.call(lambda: _merge(changelog, replica, key, after_lsn, position, properties), ChangedError)
    except CdcpipeError:
        raise
    except Exception as ex:  # noqa: BLE001 - whatever others have written into a table, Spark knows more of it
        _logger.debug("%s is left to Spark: %s", replica.name, ex if isinstance(ex, _EXPECTED) else repr(type(ex)))
        return False
    if grown is not None:
        tell_grown(*grown)
    return True


def _merge(
    changelog: Path,
    replica: Path,
    key: Sequence[str],
    after_lsn: int,
    position: Position,
    properties: Callable[[Sequence[str]], Mapping[str, str]],
) -> tuple[int, int] | None:
    """Bring the replica to ``position``; return how many more rows there should be, and are. None if it is there already."""
    source, log = _Source(TableLog(changelog).refresh()), TableLog(replica).refresh()
    if (log.lsn or 0) >= position.lsn:
        return None
    changes = source.read(key, after_lsn, position.lsn)
    last = _reduce(changes, key)
    if log.version < 0:
        target = _Target.new(replica, key, source.columns, properties(source.columns.names))
    else:
        target = _Target.of_log(log, key, source.columns, last)
    touched = [target.find(file, last) for file in target.candidates(last)]
    target.commit(_new_rows(changes, last, target, touched), touched, position)
    return changes.growth, int(last.is_live.sum()) - sum(len(each.rows) for each in touched)


# --- the changes ---


@dataclass(frozen=True, slots=True)
class _Changes:
    """Changes in the order of their positions."""

    columns: dict[str, pa.Array]
    """The table's own."""
    op: pa.Array
    old_key: list[pa.Array]
    has_old: Flags
    unchanged: pa.Array

    def __len__(self) -> int:
        return len(self.op)

    @property
    def growth(self) -> int:
        """How many rows more there are after them, by what they are."""
        return int(_equal(self.op, "insert").sum()) - int(_equal(self.op, "delete").sum())


class _Source:
    """A changelog."""

    def __init__(self, log: TableLog) -> None:
        if log.version < 0:
            raise _NotOrdinaryError("no changelog")
        self._log = log
        table = delta_files.of_log(log)
        self._fields = fields_of(table.physical, table.schema.names)
        self.columns = split_schema(table.schema)[0]
        self._schema = table.schema

    def read(self, key: Sequence[str], after_lsn: int, until_lsn: int) -> _Changes:
        """Read the changes in (after_lsn, until_lsn]."""
        position, old = self._fields["_cdc_end_lsn"].name, self._fields["_cdc_old"]
        # Of old rows the key alone.
        names = self._schema["_cdc_old"].dataType.names
        children = [old.type.field(names.index(name)) for name in key]
        old_key = pa.field(old.name, pa.struct(children))
        wanted = (*self.columns.names, "_cdc_op", "_cdc_epoch", "_cdc_end_lsn", "_cdc_ordinal", "_cdc_unchanged", "_cdc_exact")
        fields = {name: self._fields[name] for name in wanted} | {"_cdc_old": old_key}
        files = []
        for file in self._log.files:
            found = statistics(file)
            least, greatest = (found.get(kind, {}).get(position) for kind in ("minValues", "maxValues"))
            if least is None or (least <= until_lsn and greatest > after_lsn):
                files.append(file)
        if sum(uncompressed_bytes(self._log.path, file) for file in files) > _MOST_BYTES:
            raise _NotOrdinaryError("many changes")
        parts = [self._part(file, fields, after_lsn, until_lsn) for file in files]
        rows = {name: _joined([part[name] for part in parts], field.type) for name, field in fields.items()}
        return self._checked(_sorted(rows), key)

    def _part(self, file: Mapping[str, Any], fields: Mapping[str, pa.Field], after_lsn: int, until_lsn: int) -> dict[str, pa.Array]:
        rows = read_columns(self._log.path, file, fields)
        lsn = rows["_cdc_end_lsn"].to_numpy()
        wanted = (lsn > after_lsn) & (lsn <= until_lsn) & present_rows(self._log.path, file, len(lsn))
        return rows if wanted.all() else {name: values.filter(pa.array(wanted)) for name, values in rows.items()}

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
    """What the changes leave, by key."""

    keys: pa.Table
    """A row per key, columns ``k0``, ``k1``, …"""
    row: Numbers
    """The number of its last change."""
    is_live: Flags
    """Whether there is a row then."""
    known: dict[str, Numbers]
    """For each column that some update did not send, the number of the last change that has its value, -1 for none."""


def _reduce(changes: _Changes, key: Sequence[str]) -> _Last:
    """Find the last change of each key; one that changes the key is the end of the old one."""
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
    # The last event of a key decides; no two of one key have the same number.
    event = 2 * row + ~is_gone
    known = _known(changes, row, is_gone, moves)
    table = {f"k{index}": values for index, values in enumerate(keys)}
    grouped = pa.table(table | {"event": event} | {f"known{i}": values for i, values in enumerate(known.values())})
    aggregates = [("event", "max"), *((f"known{i}", "max") for i in range(len(known)))]
    found = grouped.group_by(list(table)).aggregate(aggregates)
    event = found["event_max"].to_numpy()
    return _Last(
        found.select(list(table)),
        event >> 1,
        (event & 1).astype(bool),
        {name: found[f"known{i}_max"].fill_null(-1).to_numpy() for i, name in enumerate(known)},
    )


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
    """Return, for each column that some update did not send, the number of an event's change, null where it was not sent."""
    if changes.unchanged.null_count == len(changes):
        return {}
    parents = pc.list_parent_indices(changes.unchanged).to_numpy()
    names = pc.list_flatten(changes.unchanged)
    if np.isin(moves, parents).any():
        raise _NotOrdinaryError("an update that changed a key and left a column out")
    found = {}
    for name in sorted(pc.unique(names).to_pylist()):
        is_unknown = is_gone.copy()
        is_unknown[parents[_equal(names, name)]] = True
        found[name] = pa.array(row, mask=is_unknown)
    return found


# --- the replica ---


@dataclass(frozen=True, slots=True)
class _Touched:
    """A file with rows that some key's last change ends or replaces."""

    file: Mapping[str, Any]
    rows: Numbers
    groups: Numbers
    """For each of the rows the number of its key in `_Last`."""
    present: Flags
    """Of each row of the file, whether it is part of the table so far."""

    def left(self) -> Flags:
        """Return the same without the rows."""
        left = self.present.copy()
        left[self.rows] = False
        return left


class _Target:
    """A replica, and the files that it has."""

    def __init__(self, table: FileTable, key: Sequence[str], files: Sequence[Mapping[str, Any]] = ()) -> None:
        self._table = table
        self.files = files
        self._fields = fields_of(table.physical, table.schema.names)
        self._key = {f"k{index}": self._fields[name] for index, name in enumerate(key)}

    @classmethod
    def new(cls, path: Path, key: Sequence[str], columns: StructType, properties: Mapping[str, str]) -> _Target:
        """Return a replica that its first commit will make."""
        # What an attempt left that did not come to its end.
        storage.remove_tree(path)
        storage.make_directory(path)
        return cls(delta_files.define(path, columns, properties), key)

    @classmethod
    def of_log(cls, log: TableLog, key: Sequence[str], columns: StructType, last: _Last) -> _Target:
        """Return the replica; _NotOrdinaryError if what is wanted of it is more than is done here."""
        configuration, features = log.metadata.get("configuration", {}), set(log.protocol.get("writerFeatures", ()))
        if not features <= _KNOWN_FEATURES or log.metadata.get("partitionColumns"):
            raise _NotOrdinaryError(f"a replica with {features - _KNOWN_FEATURES or 'partitions'}")
        is_on = {name for name in _FORBIDDEN if configuration.get(name, "false") != "false"}
        if is_on or configuration.get("delta.enableDeletionVectors") != "true":
            raise _NotOrdinaryError(f"a replica with {is_on or 'no deletion vectors'}")
        table = delta_files.of_log(log)
        present = {field.name: field.dataType for field in table.schema}
        if any(present.get(field.name) != field.dataType for field in columns):
            raise _NotOrdinaryError("columns that the replica has not, or has with another type")
        if last.known:
            # A row may lack what it has in a column that came later, or have it as an exact text.
            first = json.loads(configuration.get("cdcpipe.first_columns", "[]"))
            if not last.known.keys() <= set(first) or {"_cdc_unchanged", "_cdc_exact"} & present.keys():
                raise _NotOrdinaryError("columns that were not sent, and may not be known")
        return cls(table, key, list(log.files))

    def candidates(self, last: _Last) -> list[Mapping[str, Any]]:
        """Return the files that may have one of the keys, by their least and greatest values."""
        sought = {}
        for name, field in self._key.items():
            if pa.types.is_integer(field.type) or pa.types.is_string(field.type):
                values = last.keys[name].combine_chunks()
                sought[field.name] = values.take(pc.sort_indices(values))
        found, count = [], 0
        for file in self.files:
            known = statistics(file)
            least, greatest = (known.get(kind, {}) for kind in ("minValues", "maxValues"))
            if all(
                name not in least or name not in greatest or _has_between(values, least[name], greatest[name])
                for name, values in sought.items()
            ):
                found.append(file)
                count += known["numRecords"]
        if count > _MOST_ROWS:
            raise _NotOrdinaryError("many rows to look through")
        return found

    def find(self, file: Mapping[str, Any], last: _Last) -> _Touched:
        """Look the keys up in a file."""
        keys = read_columns(self._table.path, file, self._key)
        present = present_rows(self._table.path, file, len(keys["k0"]))
        if len(keys) == 1:
            found = pc.index_in(keys["k0"], value_set=last.keys["k0"])
            rows = np.flatnonzero(found.is_valid().to_numpy(zero_copy_only=False))
            groups = found.drop_null().to_numpy().astype(np.int64)
        else:
            there = pa.table(keys | {"row": np.arange(len(present))})
            numbered = last.keys.append_column("group", pa.array(np.arange(len(last.row))))
            joined = there.join(numbered, list(keys), join_type="inner")
            rows, groups = joined["row"].to_numpy(), joined["group"].to_numpy()
        is_present = present[rows]
        return _Touched(file, rows[is_present], groups[is_present], present)

    def values(self, file: Mapping[str, Any], name: str, rows: Numbers) -> pa.Array:
        """Return what some rows of a file have in a column."""
        if uncompressed_bytes(self._table.path, file) > _MOST_BYTES:
            raise _NotOrdinaryError("much to read for columns that were not sent")
        return read_columns(self._table.path, file, {name: self._fields[name]})[name].take(pa.array(rows))

    def commit(self, new: Mapping[str, pa.Array], touched: Sequence[_Touched], position: Position) -> None:
        """Add new rows, end those that were touched, and record the position, in one commit."""
        writer = _Writer(self._table)
        writer.add(new)
        replaced, vectors = [], []
        are_many = sum(map(_is_small, self.files)) > _MOST_SMALL_FILES
        by_path = {each.file["path"]: each for each in touched if len(each.rows)}
        for file in self.files:
            each = by_path.get(file["path"])
            if _is_small(file) and (each is not None or are_many):
                rows = read_columns(self._table.path, file, self._fields)
                left = present_rows(self._table.path, file, len(next(iter(rows.values())))) if each is None else each.left()
                writer.add({name: values.filter(pa.array(left)) for name, values in rows.items()})
                replaced.append(Replaced(file))
            elif each is not None:
                gone = np.flatnonzero(~each.left())
                if len(gone) == len(each.present):
                    replaced.append(Replaced(file))
                else:
                    vectors.append((file, gone))
        if vectors:
            descriptors = deletion_vector.write(self._table.path, [gone for _, gone in vectors])
            replaced += [Replaced(file, vector) for (file, _), vector in zip(vectors, descriptors, strict=True)]
        delta_files.commit(self._table, writer.close(), position, replaced=replaced)


def _has_between(ordered: pa.Array, least: Any, greatest: Any) -> bool:
    """Tell whether one of some values is one of these or between them; texts are in the order of their code points everywhere."""
    at = bisect_left(range(len(ordered)), least, key=lambda index: ordered[index].as_py())
    return at < len(ordered) and bool(ordered[at].as_py() <= greatest)


def _is_small(file: Mapping[str, Any]) -> bool:
    return int(file["size"]) < _SMALL_BYTES


class _Writer:
    """The file that a merge adds, if there are rows for it."""

    def __init__(self, table: FileTable) -> None:
        self._directory = storage.name(table.path)
        self._layout = table.layout()
        self._writer: FileWriter | None = None

    def add(self, rows: Mapping[str, pa.Array]) -> None:
        count = len(next(iter(rows.values())))
        if count:
            if self._writer is None:
                self._writer = FileWriter(self._directory, f"part-{secrets.token_hex(16)}.parquet", self._layout)
            self._writer.write(dict(rows), count)

    def close(self) -> list[WrittenFile]:
        return [] if self._writer is None else [self._writer.close()]


def _new_rows(changes: _Changes, last: _Last, target: _Target, touched: Sequence[_Touched]) -> dict[str, pa.Array]:
    """Return the rows that the changes leave, sorted by key: so whoever looks for one has few row groups to read."""
    live = np.flatnonzero(last.is_live)
    order = pc.sort_indices(last.keys.take(pa.array(live)), sort_keys=[(name, "ascending") for name in last.keys.column_names])
    groups = live[order.to_numpy()]
    rows = pa.array(last.row[groups])
    new = {name: values.take(rows) for name, values in changes.columns.items() if name not in last.known}
    for name, known in last.known.items():
        parts, at, count = [changes.columns[name]], known.copy(), len(changes)
        for each in touched:
            is_wanted = last.is_live[each.groups] & (at[each.groups] < 0)
            if is_wanted.any():
                parts.append(target.values(each.file, name, each.rows[is_wanted]))
                at[each.groups[is_wanted]] = count + np.arange(len(parts[-1]))
                count += len(parts[-1])
        if (at[groups] < 0).any():
            raise _NotOrdinaryError("a column that was not sent, and is not known")
        new[name] = pa.concat_arrays(parts).take(pa.array(at[groups]))
    return new
