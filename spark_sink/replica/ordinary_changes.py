"""Reads the changes that ordinary_merge.py and ordinary_history.py merge, from a changelog's files. No Spark.

    def merge(ranges):
        for keys in ranges:
            events = reader.read(keys).events(keys)
            ...

    reader = ChangeReader(log, ("id",), after_lsn, until_lsn)
    merge_in_ranges(reader, merge)

A few changes are one range: all keys. If that takes too much memory, `merge` is called again with several ranges of keys, each with
about as many changes. The changes of a key are all in one range, so each range can be merged without the others. Each range reads
all files once more. This takes a tenth of the time of Spark's MERGE.
"""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdcpipe.errors import CdcpipeError
from cdcpipe.retry import RetryPolicy
from spark_sink.delta import file_table
from spark_sink.delta.file_table import ChangedError
from spark_sink.delta.rows import (
    Budget,
    ManyBytesError,
    UnsupportedError,
    fields_of,
    files_between,
    joined,
    read_between,
    read_where,
    statistics,
)
from spark_sink.files.places import map_reads
from spark_sink.files.system_hints import is_full
from spark_sink.replica.ends import POSITION
from spark_sink.replica.target import table_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from spark_sink.delta.log import TableLog
    from spark_sink.delta.rows import Flags, Numbers
    from spark_sink.schema.table import Table

__all__ = ["ChangeReader", "Changes", "Events", "KeyRange", "NotOrdinaryError", "merge_in_ranges", "without_spark"]

_MOST_BYTES: Final = 512 << 20
"""The most bytes of changes, in memory, that are read at a time. A merge takes two to three times as much."""
_RANGES: Final = (1, 4, 16)
"""In so many ranges changes are merged: in the first number with which no range takes too much memory."""
_SAMPLES: Final = 100_000
"""About how many keys decide where the ranges begin."""

_logger = logging.getLogger(__name__)

_ATTEMPTS: Final = RetryPolicy(attempts=3)
_LARGE: Final = threading.Lock()
"""Held by a merge of changes in several ranges of keys. It takes much memory. So one such merge runs at a time."""

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


class NotOrdinaryError(Exception):
    """The changes or the table are unusual: Spark has to do the merge or the fill."""


_EXPECTED: Final = (NotOrdinaryError, UnsupportedError, OSError)
"""Errors whose text may be logged. The text of another error may contain values of a row."""


def without_spark(table: Table, work: Callable[[], None]) -> bool:
    """Call ``work``, a merge or a fill, and again if another program has committed meanwhile. Return whether it is done.

    If not, Spark has to do it. A CdcpipeError passes through, and so does an OSError that says that the disk is full: Spark would
    not succeed either.
    """
    try:
        _ATTEMPTS.call(work, ChangedError)
    except CdcpipeError:
        raise
    except Exception as ex:  # other programs may have written anything to the table; Spark knows more cases
        if isinstance(ex, OSError) and is_full(ex):
            raise
        _logger.debug("%s is left to Spark: %s", table, ex if isinstance(ex, _EXPECTED) else repr(type(ex)))
        return False
    return True


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys whose first column has a value in [``first``, ``end``). None is no limit."""

    first: pa.Scalar | None = None
    end: pa.Scalar | None = None

    @property
    def is_all(self) -> bool:
        """Whether it has all keys."""
        return self.first is None and self.end is None

    def has(self, values: pa.Array) -> Flags:
        """Tell for each value of the key's first column whether it is in the range. Null is not."""
        flags = np.ones(len(values), dtype=bool)
        if self.first is not None:
            flags &= _flags(pc.greater_equal(values, self.first))
        if self.end is not None:
            flags &= _flags(pc.less(values, self.end))
        return flags


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes, ordered by their positions: those of the keys in a range, and the updates that changed such a key to another one."""

    columns: dict[str, pa.Array]
    """The table's own columns."""
    end_lsn: Numbers
    op: pa.Array
    keys: list[pa.Array]
    """The key of each change: of a delete the old one, otherwise the new one."""
    old_key: list[pa.Array]
    has_old: Flags
    unchanged: pa.Array
    commit_time: pa.Array
    ends_earlier: bool
    """Whether a TRUNCATE, right before these changes, has ended all rows."""

    def __len__(self) -> int:
        return len(self.op)

    @property
    def growth(self) -> int:
        """The number of inserts minus the number of deletes."""
        return int(_equal(self.op, "insert").sum()) - int(_equal(self.op, "delete").sum())

    def events(self, wanted: KeyRange) -> Events:
        """Return what the changes do to the keys in a range. Raises NotOrdinaryError for an old row without a value for its key."""
        count, moves = len(self), self._moves()
        keys = self.keys
        if len(moves):
            moved = pa.array(moves)
            keys = [pa.concat_arrays([values, old.take(moved)]) for values, old in zip(keys, self.old_key, strict=True)]
        row = np.concatenate([np.arange(count), moves])
        is_gone = np.concatenate([_equal(self.op, "delete"), np.ones(len(moves), dtype=bool)])
        named = pa.table({f"k{index}": values for index, values in enumerate(keys)})
        found = Events(named, row, is_gone, self._unsent(row, is_gone, moves))
        # A change of the key has an old and a new key, and one of them may be in another range.
        return found if wanted.is_all else found.where(wanted.has(keys[0]))

    def _moves(self) -> Numbers:
        """Return the numbers of the updates that changed the key."""
        candidates = np.flatnonzero(self.has_old & _equal(self.op, "update"))
        numbers, differs = pa.array(candidates), np.zeros(len(candidates), dtype=bool)
        for old, values in zip(self.old_key, self.keys, strict=True):
            before = old.take(numbers)
            if before.null_count:
                raise NotOrdinaryError("an old row without a value for its key")
            differs |= pc.not_equal(before, values.take(numbers)).fill_null(True).to_numpy(zero_copy_only=False)
        return candidates[differs]

    def _unsent(self, row: Numbers, is_gone: Flags, moves: Numbers) -> dict[str, Flags]:
        """Return `Events.unsent`."""
        if self.unchanged.null_count == len(self):
            return {}
        parents = pc.list_parent_indices(self.unchanged).to_numpy()
        names = pc.list_flatten(self.unchanged)
        if np.isin(moves, parents).any() or _equal(self.op, "insert")[parents].any():
            raise NotOrdinaryError("a row that begins with an insert or a change of its key, and without a value of a column")
        found = {}
        for name in sorted(set(pc.unique(names).to_pylist()) & self.columns.keys()):
            is_unsent = np.zeros(len(self), dtype=bool)
            is_unsent[parents[_equal(names, name)]] = True
            found[name] = is_gone | is_unsent[row]
        return found


@dataclass(frozen=True, slots=True)
class Events:
    """What changes do to keys. An update that changed the key is two events: the old key has no row any more, the new one has."""

    keys: pa.Table
    """The key of each event, with the columns ``k0``, ``k1``, …"""
    row: Numbers
    """The number of the change."""
    is_gone: Flags
    """Whether the key has no row then."""
    unsent: dict[str, Flags]
    """For each column that some update did not send: whether the event has no value for it."""

    @property
    def number(self) -> Numbers:
        """A number for each event, in their order. Two events of one key never have the same number."""
        return 2 * self.row + ~self.is_gone

    def where(self, wanted: Flags) -> Events:
        """Return some of the events."""
        unsent = {name: flags[wanted] for name, flags in self.unsent.items()}
        return Events(self.keys.filter(pa.array(wanted)), self.row[wanted], self.is_gone[wanted], unsent)


class ChangeReader:
    """Reads the changes in (after_lsn, until_lsn] from a changelog's files, without the columns ``gone``.

    With ``copy_lsn`` they begin with the rows of the snapshot at this LSN, which come like inserts.
    """

    def __init__(
        self,
        log: TableLog,
        key: Sequence[str],
        after_lsn: int,
        until_lsn: int,
        gone: Collection[str] = (),
        copy_lsn: int | None = None,
    ) -> None:
        if log.version < 0:
            raise NotOrdinaryError("no changelog")
        table = file_table.of_log(log)
        others = {table.schema[name].dataType.typeName() for name in key} - _KEY_TYPES
        if others:
            raise NotOrdinaryError(f"a key of type {min(others)}")
        self.columns = table_columns(table.schema, gone)
        self._path = log.path
        self._key = key
        self._limits = after_lsn, until_lsn
        self._copy_lsn = copy_lsn
        self._fields = fields_of(table.physical, table.schema.names)
        old, names = self._fields["_cdc_old"], table.schema["_cdc_old"].dataType.names
        # Of an old row read only the key.
        self._fields["_cdc_old"] = pa.field(old.name, pa.struct([old.type.field(names.index(name)) for name in key]))
        self._files = files_between(log.files, self._fields["_cdc_end_lsn"].name, after_lsn, until_lsn)
        self._samples: pa.Array | None = None
        """Values of the key's first column, in order. Known once several ranges are wanted."""
        self._truncated_at: tuple[int, int] | None = None
        """LSN and ordinal of the last TRUNCATE. Known with the samples."""

    def ranges(self, count: int) -> list[KeyRange]:
        """Return at most ``count`` ranges of keys. Together they have all keys.

        For several ranges this looks at all changes. Raises NotOrdinaryError if some are unusual.
        """
        if count == 1:
            return [KeyRange()]
        if self._samples is None:
            step = max(1, sum(statistics(file)["numRecords"] for file in self._files) // _SAMPLES)
            values = pa.concat_arrays([self._sample(file, step) for file in self._files])
            self._samples = values.take(pc.sort_indices(values))
        ordered = self._samples
        if not len(ordered):
            return [KeyRange()]
        starts = [ordered[len(ordered) * number // count] for number in range(1, count)]
        distinct = [start for before, start in pairwise([ordered[0], *starts]) if start != before]
        return [KeyRange(*limits) for limits in pairwise([None, *distinct, None])]

    def _sample(self, file: Mapping[str, Any], step: int) -> pa.Array:
        """Return each ``step``-th value of the key's first column in a file, after a look at all its changes."""
        names = ("_cdc_end_lsn", "_cdc_ordinal", "_cdc_op", "_cdc_exact", "_cdc_old", *self._key)
        rows = read_between(self._path, file, {name: self._fields[name] for name in names}, "_cdc_end_lsn", *self._limits)
        is_truncate = _equal(rows["_cdc_op"], "truncate")
        if is_truncate.any():
            places = zip(*(rows[name].to_numpy()[is_truncate].tolist() for name in ("_cdc_end_lsn", "_cdc_ordinal")), strict=True)
            self._truncated_at = max([*places, self._truncated_at or (0, 0)])
            rows = {name: values.filter(pa.array(~is_truncate)) for name, values in rows.items()}
        _check(rows, self._copy_lsn)
        (values, *_) = self._keys(rows)
        return values.take(pa.array(np.arange(0, len(values), step)))

    def read(self, keys: KeyRange) -> Changes:
        """Read the changes of keys in a range, after the last TRUNCATE. Raises ManyBytesError if they take too much memory."""
        wanted = (*self.columns.names, *POSITION, "_cdc_op", "_cdc_commit_time", "_cdc_unchanged", "_cdc_exact", "_cdc_old")
        fields = {name: self._fields[name] for name in wanted}
        budget = Budget(_MOST_BYTES)
        tested = ("_cdc_end_lsn", "_cdc_ordinal", "_cdc_old", self._key[0])

        def read_file(file: Mapping[str, Any]) -> dict[str, pa.Array]:
            if keys.is_all:
                return read_between(self._path, file, fields, "_cdc_end_lsn", *self._limits, budget)
            return read_where(self._path, file, fields, tested, lambda rows: self._is_in(rows, keys), budget)

        parts = map_reads(read_file, self._files, self._path)
        # The parts are given away column by column. So the values of one column at a time are in memory twice.
        rows = _sorted({name: joined([part.pop(name) for part in parts], field.type) for name, field in fields.items()})
        truncates = np.flatnonzero(_equal(rows["_cdc_op"], "truncate"))
        if len(truncates):
            rows = {name: values.slice(int(truncates[-1]) + 1) for name, values in rows.items()}
        _check(rows, self._copy_lsn)
        return Changes(
            {name: rows[name] for name in self.columns.names},
            rows["_cdc_end_lsn"].to_numpy(),
            rows["_cdc_op"],
            self._keys(rows),
            rows["_cdc_old"].flatten(),
            _has_old(rows),
            rows["_cdc_unchanged"],
            rows["_cdc_commit_time"],
            len(truncates) > 0 or self._truncated_at is not None,
        )

    def _is_in(self, rows: Mapping[str, pa.Array], keys: KeyRange) -> Flags:
        """Tell for each row whether it is a change to read, and whether its key, or the key that it had before, is in the range."""
        after_lsn, until_lsn = self._limits
        number, ordinal = rows["_cdc_end_lsn"].to_numpy(), rows["_cdc_ordinal"].to_numpy()
        is_of_range = keys.has(rows[self._key[0]]) | (_has_old(rows) & keys.has(rows["_cdc_old"].flatten()[0]))
        wanted: Flags = is_of_range & (number > after_lsn) & (number <= until_lsn)
        if self._truncated_at is not None:
            lsn, last = self._truncated_at
            wanted &= (number > lsn) | ((number == lsn) & (ordinal > last))
        return wanted

    def _keys(self, rows: Mapping[str, pa.Array]) -> list[pa.Array]:
        """Return the columns of the changes' keys, as `Changes` has them. Raises NotOrdinaryError if a key lacks a value."""
        of_old = pa.array(_equal(rows["_cdc_op"], "delete") & _has_old(rows))
        keys = [pc.if_else(of_old, old, rows[name]) for old, name in zip(rows["_cdc_old"].flatten(), self._key, strict=True)]
        if any(values.null_count for values in keys):
            raise NotOrdinaryError("a change without a value for its key")
        return keys


def merge_in_ranges(reader: ChangeReader, merge: Callable[[Sequence[KeyRange]], None]) -> None:
    """Call ``merge`` with one range of all keys. If that takes too much memory, call it again with more ranges.

    ``merge`` raises ManyBytesError then, and has changed no row. It may need memory for values of the table, too. So only an
    attempt tells. Several ranges wait for the end of other such merges. Raises NotOrdinaryError if 16 ranges still take too much.
    """
    for count in _RANGES:
        with nullcontext() if count == 1 else _LARGE, suppress(ManyBytesError):
            merge(reader.ranges(count))
            return
    raise NotOrdinaryError("many changes")


def _equal(values: pa.Array, text: str) -> Flags:
    """Tell for each value whether it is this text. The values have no nulls."""
    return _flags(pc.equal(values, text))


def _flags(values: pa.Array | pa.ChunkedArray) -> Flags:
    found: Flags = values.fill_null(False).to_numpy(zero_copy_only=False)
    return found


def _has_old(rows: Mapping[str, pa.Array]) -> Flags:
    found: Flags = rows["_cdc_old"].is_valid().to_numpy(zero_copy_only=False)
    return found


def _check(rows: Mapping[str, pa.Array], copy_lsn: int | None) -> None:
    exact, ops = rows["_cdc_exact"], {"insert", "update", "delete"}
    if copy_lsn is not None:
        ops.add("snapshot")
        end_lsn = rows["_cdc_end_lsn"].to_numpy()
        if ((end_lsn < copy_lsn) | (_equal(rows["_cdc_op"], "snapshot") != (end_lsn == copy_lsn))).any():
            raise NotOrdinaryError("changes from before a snapshot, or two snapshots")
    if not set(pc.unique(rows["_cdc_op"]).to_pylist()) <= ops:
        raise NotOrdinaryError("a DROP TABLE, or a snapshot")
    if len(exact) != exact.null_count and np.diff(exact.offsets.to_numpy()).any():
        raise NotOrdinaryError("exact texts")


def _sorted(rows: dict[str, pa.Array]) -> dict[str, pa.Array]:
    lsn, ordinal = (rows[name].to_numpy() for name in POSITION)
    step = np.diff(lsn)
    if ((step > 0) | ((step == 0) & (np.diff(ordinal) > 0))).all():
        return rows
    order = pa.array(np.lexsort((ordinal, lsn)))
    return {name: rows.pop(name).take(order) for name in list(rows)}
