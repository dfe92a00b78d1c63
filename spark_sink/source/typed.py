"""A sealed segment -> Arrow record batches of a Spark schema: the part of the data source that runs in executors.

`TypedReader` gives the changes of one table, as columns, with no Python per row; `EnvelopeReader` gives those of all tables in
one shape, row by row; `MessageReader` gives the logical messages. What the rows mean is said in source/datasource.py; here is how
they are made.

Each record is read with the relation that is in force at its place in the segment. What the schema has no place for (a
column, a TOAST value that was not sent, a value that its type cannot hold) is a StagingError; nothing is left out silently.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema, to_arrow_type

from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.binary import row_to_text
from cdcpipe.pgoutput.columnar import Changes, Values, decode_changes, gather
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import UNCHANGED_TOAST, Delete, Insert, Message, Relation, Truncate, Update
from spark_sink.schema.table import EXACT
from spark_sink.schema.types import MESSAGE_SCHEMA, OPS, as_typed, assign_columns, spark_type, split_schema
from spark_sink.source.server import Origin, fetch
from spark_sink.staging import index as segment_index
from spark_sink.staging.index import NO_TRANSACTION, RELATION, SegmentIndex, map_segment
from spark_sink.staging.log import StagingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from pyspark.sql.types import StructField, StructType

    from cdcpipe.pgoutput.messages import Column, Row, Value

    Array = NDArray[Any]

__all__ = [
    "OLD_PREFIX",
    "EnvelopeReader",
    "ExactTexts",
    "MessageReader",
    "OpenSlice",
    "Slice",
    "TypedReader",
    "divide",
    "read_relations",
]

BATCH_ROWS: Final = 1 << 16
BATCH_BYTES: Final = 64 << 20
ENVELOPE_ROWS: Final = 4096
BATCH_SPAN_BYTES: Final = 1 << 30
"""How far apart the first and the last record of a batch may be; columnar.MAX_SPAN_BYTES is the limit, less a record of 1 GiB."""

_OP_NAMES: Final = pa.array(list(OPS.values()))
_OP_CODES: Final = np.zeros(256, np.int8)
_OP_CODES[[ord(kind) for kind in OPS]] = np.arange(len(OPS))

_NO_RECORDS: Final = np.zeros(0, np.int64)
_UNIX_2000_US: Final = 946_684_800_000_000
OLD_PREFIX: Final = "_cdc_old."
"""How the names of an old row's columns begin in ``_cdc_exact``."""

_PREFIX_POS: Final = 10
"""Of a logical message: "Byte1('M'), Int8 flags, Int64 LSN, String prefix, Int32 length of the content, the content"."""
_PREFIX_BYTES: Final = 128
"""Where a prefix ends is looked for in so many bytes first."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What one task reads: of the transactions that end in (after_lsn, until_lsn], the records of one part of the segment.

    So with a logical message outside of transactions whose place is in that range.
    """

    path: str
    """The segment's file; with an ``origin`` what it is called there."""
    epoch: int
    after_lsn: int
    until_lsn: int
    part: int = 0
    part_count: int = 1
    origin: Origin | None = None


def divide(slices: Iterable[tuple[Slice, int]], part_bytes: int, together_bytes: int) -> list[list[Slice]]:
    """Divide slices, given with their sizes, among tasks: one of more than ``part_bytes`` is cut, small ones go together.

    Several make ``together_bytes`` at most.
    """
    tasks: list[list[Slice]] = []
    room = 0
    for piece, size in slices:
        count = -(-size // part_bytes)
        if count > 1:
            tasks += [[replace(piece, part=number, part_count=count)] for number in range(count)]
            room = 0
            continue
        if size > room:
            tasks.append([])
            room = together_bytes
        tasks[-1].append(piece)
        room -= size
    return tasks


class OpenSlice:
    """A slice with its segment mapped and its index loaded; what several tables' readers need is found once."""

    def __init__(self, piece: Slice) -> None:
        self._piece = piece
        self.path = Path(piece.path) if piece.origin is None else fetch(piece.origin, piece.path)
        self.epoch = piece.epoch
        self.index: SegmentIndex = segment_index.load(self.path)
        self.segment = map_segment(self.path)
        if len(self.segment) != self.index.size:
            self.fail(0, "its size changed while it was read")
        count = len(self.index.kind)
        self.first = count * piece.part // piece.part_count
        self.last = count * (piece.part + 1) // piece.part_count
        self._from_transaction = np.searchsorted(self.index.end_lsn, np.uint64(piece.after_lsn), side="right")
        self._to_transaction = np.searchsorted(self.index.end_lsn, np.uint64(piece.until_lsn), side="right")

    def records(self, kinds: bytes) -> Array:
        """Return the numbers of the slice's records of some kinds."""
        transaction = self.index.transaction[self.first : self.last]
        wanted = (transaction >= self._from_transaction) & (transaction < self._to_transaction)
        wanted &= np.isin(self.index.kind[self.first : self.last], np.frombuffer(kinds, np.uint8))
        return np.flatnonzero(wanted) + self.first

    def messages(self) -> Array:
        """Return the numbers, among the segment's logical messages, of those that are the slice's."""
        record, place = self.index.messages()
        wanted = (record >= self.first) & (record < self.last)
        wanted &= (place > np.uint64(self._piece.after_lsn)) & (place <= np.uint64(self._piece.until_lsn))
        return np.flatnonzero(wanted)

    def chunks(self, records: Array) -> Iterator[slice]:
        """Cut records, in order, into what makes a batch of bounded size."""
        offset = self.index.offset[records]
        byte_count = np.cumsum(self.index.length[records], dtype=np.int64)
        first = 0
        while first < len(records):
            used = byte_count[first - 1] if first else 0
            last = min(
                first + BATCH_ROWS,
                int(np.searchsorted(byte_count, used + BATCH_BYTES, side="right")),
                int(np.searchsorted(offset, offset[first] + BATCH_SPAN_BYTES)),
            )
            last = max(last, first + 1)
            yield slice(first, last)
            first = last

    def message(self, record: int) -> Message:
        """Decode one record."""
        offset = int(self.index.offset[record])
        try:
            return decode(self.segment[offset : offset + int(self.index.length[record])])
        except ProtocolError as ex:
            self.fail(offset, ex.message)

    def fail(self, offset: int, problem: str) -> NoReturn:
        """Raise what says that the segment is corrupt."""
        msg = f"segment {self.path} is corrupt at byte {offset}: {problem}"
        raise StagingError(msg, hint="restore the file from a copy of the staging directory")

    def descriptions(self) -> Iterator[tuple[int, Relation]]:
        """Decode the segment's Relation records, the whole segment's, with their numbers."""
        for record in np.flatnonzero(self.index.kind == RELATION).tolist():
            relation = self.message(record)
            assert isinstance(relation, Relation)
            yield record, relation

    @cached_property
    def versions(self) -> Mapping[tuple[str, str], Sequence[_Version]]:
        """How each table, by schema and name, looked in the segment, and from where to where."""
        found: dict[tuple[str, str], list[_Version]] = {}
        in_force: dict[int, _Version] = {}
        for record, relation in self.descriptions():
            before = in_force.get(relation.relation_id)
            if before is not None:
                if before.relation == relation:  # described again
                    continue
                before.last = record
            version = in_force[relation.relation_id] = _Version(relation, record, len(self.index.kind))
            found.setdefault((relation.namespace, relation.name), []).append(version)
        return found

    @cached_property
    def changes(self) -> Mapping[int, Array]:
        """The numbers of the slice's changed rows, by relation."""
        record = self.records(b"IUD")
        relation_id = self.index.relation_id[record]
        order = np.argsort(relation_id, kind="stable")
        ids, first = np.unique(relation_id[order], return_index=True)
        return dict(zip(ids.tolist(), np.split(record[order], first[1:]), strict=True)) if len(ids) else {}

    @cached_property
    def truncates(self) -> Sequence[tuple[int, Truncate]]:
        """The slice's Truncate records, with their numbers."""
        found = []
        for record in self.records(b"T").tolist():
            message = self.message(record)
            assert isinstance(message, Truncate)
            found.append((record, message))
        return found

    def metadata(self, record: Array) -> dict[str, pa.Array]:
        """Return the columns that say where each change stands, but for its op."""
        index = self.index
        transaction = index.transaction[record]
        time_us = index.commit_time_us[transaction] + _UNIX_2000_US
        return {
            "_cdc_epoch": pa.array(np.full(len(record), self.epoch, np.int32)),
            "_cdc_end_lsn": pa.array(index.end_lsn[transaction].astype(np.int64)),
            "_cdc_ordinal": pa.array(index.ordinal[record]),
            "_cdc_xid": pa.array(index.xid[transaction].astype(np.int64)),
            "_cdc_commit_time": pa.array(time_us).cast(pa.timestamp("us", "UTC")),
        }


def read_relations(path: Path) -> Iterator[Relation]:
    """Yield how the segment describes its relations, in order."""
    for _, relation in OpenSlice(Slice(str(path), 0, 0, 0)).descriptions():
        yield relation


@dataclass(slots=True)
class _Version:
    """A relation, in force for the records of its id from ``first`` up to ``last``."""

    relation: Relation
    first: int
    last: int


class TypedReader:
    """Reads one table's changes from a slice."""

    def __init__(self, piece: Slice | OpenSlice, table: tuple[str, str], schema: StructType, types: str = EXACT) -> None:
        self._slice = piece if isinstance(piece, OpenSlice) else OpenSlice(piece)
        self._table = table
        self._types = types
        self._arrow_schema = to_arrow_schema(schema, timezone="UTC")
        self._columns, self._old_columns = split_schema(schema)

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield the changes, of one relation version at a time."""
        versions = self._slice.versions.get(self._table, ())
        for version in versions:
            records = self._slice.changes.get(version.relation.relation_id, _NO_RECORDS)
            low, high = np.searchsorted(records, [version.first, version.last])
            mine = records[low:high]
            for chunk in self._slice.chunks(mine):
                yield self._batch(mine[chunk], as_typed(version.relation, self._types))
        truncates = self._truncates(versions)
        if truncates is not None:
            yield truncates

    def _batch(self, record: Array, relation: Relation) -> pa.RecordBatch:
        index = self._slice.index
        try:
            changes = decode_changes(self._slice.segment, index.offset[record], index.length[record].astype(np.int64), relation)
            fields = assign_columns(self._columns, relation)
            exact = ExactTexts(len(record))
            arrays = self._convert(changes.columns, relation, fields, self._arrow_schema, exact, "")
            self._add_old(arrays, changes, relation, exact)
        except ProtocolError as ex:
            msg = f"segment {self._slice.path} is corrupt: {ex.message}"
            raise StagingError(msg, hint=ex.hint) from ex
        arrays["_cdc_op"] = _OP_NAMES.take(pa.array(_OP_CODES[changes.kind]))
        arrays |= self._slice.metadata(record)
        self._add_lists(arrays, changes, fields, exact)
        return self._assemble(arrays, len(record))

    @staticmethod
    def _convert(
        columns: Sequence[Values],
        relation: Relation,
        fields: Sequence[StructField],
        types: pa.Schema | pa.StructType,
        exact: ExactTexts,
        prefix: str,
    ) -> dict[str, pa.Array]:
        arrays = {}
        for values, target, column in zip(columns, fields, relation.columns, strict=True):
            converted = values.to_arrow(to_arrow_type(spark_type(column), timezone="UTC"))
            # The same, but for a column that was widened.
            arrays[target.name] = converted.array.cast(types.field(target.name).type)
            exact.add(prefix + target.name, converted.exact_rows, converted.exact)
        return arrays

    def _add_old(self, arrays: dict[str, pa.Array], changes: Changes, relation: Relation, exact: ExactTexts) -> None:
        if self._old_columns is None or changes.old is None:
            return
        old_type = self._arrow_schema.field("_cdc_old").type
        fields = assign_columns(self._old_columns, relation)
        old = self._convert(changes.old, relation, fields, old_type, exact, OLD_PREFIX)
        count = len(changes.kind)
        arrays["_cdc_old"] = pa.StructArray.from_arrays(
            [old[target.name] if target.name in old else pa.nulls(count, target.type) for target in old_type],
            fields=list(old_type),
            mask=pa.array(changes.old_kind == 0),
        )

    def _add_lists(self, arrays: dict[str, pa.Array], changes: Changes, fields: Sequence[StructField], exact: ExactTexts) -> None:
        """Add the two columns of column names; without them in the schema, there must be nothing to say."""
        rows, names = _unchanged(changes.columns, [target.name for target in fields])
        for name, entries, reason in (
            ("_cdc_unchanged", len(rows), "a TOAST value was not sent"),
            ("_cdc_exact", exact.count, "a value does not fit its type"),
        ):
            if entries and name not in self._arrow_schema.names:
                msg = f"segment {self._slice.path}, table {'.'.join(self._table)!r}: {reason}, and the schema has no {name}"
                raise StagingError(msg, hint=f"add {name} to the schema")
        count = len(changes.kind)
        if "_cdc_unchanged" in self._arrow_schema.names:
            list_type = self._arrow_schema.field("_cdc_unchanged").type
            arrays["_cdc_unchanged"] = pa.ListArray.from_arrays(_list_offsets(rows, count), names, type=list_type)
        if "_cdc_exact" in self._arrow_schema.names:
            arrays["_cdc_exact"] = exact.to_arrow(self._arrow_schema.field("_cdc_exact").type)

    def _truncates(self, versions: Sequence[_Version]) -> pa.RecordBatch | None:
        """Return a row for each time that the table was truncated."""
        found: list[int] = []
        steps: list[int] = []
        for record, message in self._slice.truncates:
            for step, relation_id in enumerate(message.relation_ids):
                if any(v.relation.relation_id == relation_id and v.first < record < v.last for v in versions):
                    found.append(record)
                    steps.append(step)
        if not found:
            return None
        records = np.array(found)
        arrays = self._slice.metadata(records)
        arrays["_cdc_ordinal"] = pa.array(self._slice.index.ordinal[records] + np.array(steps, np.int32))
        arrays["_cdc_op"] = pa.array(["truncate"] * len(found))
        for name in ("_cdc_unchanged", "_cdc_exact"):
            if name in self._arrow_schema.names:
                arrays[name] = pa.array([[]] * len(found), self._arrow_schema.field(name).type)
        return self._assemble(arrays, len(found))

    def _assemble(self, arrays: dict[str, pa.Array], count: int) -> pa.RecordBatch:
        """Put the columns in the schema's order; what there is nothing for is null."""
        columns = [arrays[f.name] if f.name in arrays else pa.nulls(count, f.type) for f in self._arrow_schema]
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow_schema)


@dataclass(slots=True)
class ExactTexts:
    """The texts of values that their type cannot hold, gathered column by column, given row by row."""

    row_count: int
    count: int = 0
    _rows: list[Array] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _texts: list[pa.StringArray] = field(default_factory=list)

    def add(self, name: str, rows: Array, texts: pa.StringArray) -> None:
        """Add a column's."""
        if len(rows):
            self.count += len(rows)
            self._rows.append(rows)
            self._names.append(name)
            self._texts.append(texts)

    def to_arrow(self, map_type: pa.MapType) -> pa.MapArray:
        """Return a map of column -> text for each row."""
        if not self.count:
            offsets, empty = _list_offsets(np.zeros(0, np.int64), self.row_count), pa.array([], pa.string())
            return pa.MapArray.from_arrays(offsets, empty, empty, type=map_type)
        rows = np.concatenate(self._rows)
        order = np.argsort(rows, kind="stable")
        of_column = np.repeat(np.arange(len(self._rows)), [len(some) for some in self._rows])
        keys = pa.array(self._names).take(pa.array(of_column[order]))
        items = pa.concat_arrays(self._texts).take(pa.array(order))
        return pa.MapArray.from_arrays(_list_offsets(rows, self.row_count), keys, items, type=map_type)


def _list_offsets(rows: Array, row_count: int) -> pa.Int32Array:
    """Return the offsets of a list array that has an item for each of ``rows``, in order."""
    offsets = np.zeros(row_count + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=row_count), out=offsets[1:])
    return pa.array(offsets)


def _unchanged(columns: Sequence[Values], names: Sequence[str]) -> tuple[Array, pa.StringArray]:
    """Return the row and the column name of each value that was not sent, row by row."""
    found = [(name, values.unchanged) for name, values in zip(names, columns, strict=True)]
    found = [(name, mask) for name, mask in found if mask.any()]
    if not found:
        return np.zeros(0, np.int64), pa.array([], pa.string())
    rows, numbers = np.nonzero(np.stack([mask for _, mask in found], axis=1))
    return rows, pa.array([name for name, _ in found]).take(pa.array(numbers))


class EnvelopeReader:
    """Reads the changes of all tables from a slice, row by row, in the same columns for every table."""

    def __init__(self, piece: Slice, schema: StructType) -> None:
        self._slice = OpenSlice(piece)
        self._arrow_schema = to_arrow_schema(schema, timezone="UTC")

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield the changes, in order."""
        records = self._slice.records(b"IUDT").tolist()
        descriptions = deque(self._slice.descriptions())
        relations: dict[int, Relation] = {}
        rows: list[_EnvelopeRow] = []
        for record in records:
            while descriptions and descriptions[0][0] < record:
                relation = descriptions.popleft()[1]
                relations[relation.relation_id] = relation
            try:
                rows += self._rows(record, relations)
            except ProtocolError as ex:
                self._slice.fail(int(self._slice.index.offset[record]), ex.message)
            if len(rows) >= ENVELOPE_ROWS:
                yield self._batch(rows)
                rows = []
        if rows:
            yield self._batch(rows)

    def _rows(self, record: int, relations: dict[int, Relation]) -> Iterator[_EnvelopeRow]:
        match self._slice.message(record):
            case Insert(_, relation_id, new):
                yield _EnvelopeRow.of(record, "insert", relations[relation_id], new)
            case Update(_, relation_id, key, old, new):
                yield _EnvelopeRow.of(record, "update", relations[relation_id], new, old, key)
            case Delete(_, relation_id, key, old):
                yield _EnvelopeRow.of(record, "delete", relations[relation_id], None, old, key)
            case Truncate(_, _, relation_ids):
                for step, relation_id in enumerate(relation_ids):
                    yield _EnvelopeRow.of(record, "truncate", relations[relation_id], step=step)

    def _batch(self, rows: list[_EnvelopeRow]) -> pa.RecordBatch:
        record = np.array([row.record for row in rows])
        arrays = self._slice.metadata(record)
        arrays["_cdc_ordinal"] = pa.array(self._slice.index.ordinal[record] + np.array([r.step for r in rows], np.int32))
        values = {
            "_cdc_op": [row.op for row in rows],
            "_cdc_unchanged": [row.unchanged for row in rows],
            "table_schema": [row.relation.namespace for row in rows],
            "table_name": [row.relation.name for row in rows],
            "relation_id": [row.relation.relation_id for row in rows],
            "new": [row.new for row in rows],
            "old": [row.old for row in rows],
        }
        for name in values.keys() & set(self._arrow_schema.names):
            arrays[name] = pa.array(values[name], self._arrow_schema.field(name).type)
        return pa.RecordBatch.from_arrays([arrays[name] for name in self._arrow_schema.names], schema=self._arrow_schema)


class MessageReader:
    """Reads the logical messages from a slice."""

    def __init__(self, piece: Slice | OpenSlice, schema: StructType) -> None:
        self._slice = piece if isinstance(piece, OpenSlice) else OpenSlice(piece)
        self._arrow_schema = to_arrow_schema(schema, timezone="UTC")
        for wanted in schema:
            if wanted.name not in MESSAGE_SCHEMA.names or MESSAGE_SCHEMA[wanted.name].dataType != wanted.dataType:
                msg = f"the schema given has a column {wanted.name} of type {wanted.dataType.simpleString()}: messages have none"
                raise StagingError(msg, hint=f"their columns are {', '.join(MESSAGE_SCHEMA.names)}")

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield the messages, in order."""
        numbers = self._slice.messages()
        records, places = (found[numbers] for found in self._slice.index.messages())
        for chunk in self._slice.chunks(records):
            yield self._batch(records[chunk], places[chunk], self._slice.index.message_lsn[numbers[chunk]])

    def _batch(self, record: Array, place: Array, lsn: Array) -> pa.RecordBatch:
        index = self._slice.index
        transaction = index.transaction[record]
        is_outside = transaction == NO_TRANSACTION
        inside = transaction[~is_outside]
        xid, time_us = np.zeros(len(record), np.int64), np.zeros(len(record), np.int64)
        xid[~is_outside], time_us[~is_outside] = index.xid[inside], index.commit_time_us[inside] + _UNIX_2000_US
        prefix, content = self._gather(record)
        arrays = {
            "prefix": prefix,
            "content": content,
            "transactional": pa.array(~is_outside),
            "_cdc_epoch": pa.array(np.full(len(record), self._slice.epoch, np.int32)),
            "_cdc_end_lsn": pa.array(place.astype(np.int64)),
            "_cdc_ordinal": pa.array(index.ordinal[record]),
            "_cdc_lsn": pa.array(lsn.astype(np.int64)),
            "_cdc_xid": pa.array(xid, mask=is_outside),
            "_cdc_commit_time": pa.array(time_us, mask=is_outside).cast(pa.timestamp("us", "UTC")),
        }
        return pa.RecordBatch.from_arrays([arrays[name] for name in self._arrow_schema.names], schema=self._arrow_schema)

    def _gather(self, record: Array) -> tuple[pa.StringArray, pa.BinaryArray]:
        """Return the prefixes and the contents. These may be large: they are copied once, from the mapped segment to Arrow."""
        segment, index = self._slice.segment, self._slice.index
        start = index.offset[record] + _PREFIX_POS
        end = index.offset[record] + index.length[record]
        prefix_end = np.array([self._prefix_end(*ends) for ends in zip(start.tolist(), end.tolist(), strict=True)], np.int64)
        content = prefix_end + 5
        return gather(segment, start, prefix_end - start).cast(pa.string()), gather(segment, content, end - content)

    def _prefix_end(self, start: int, end: int) -> int:
        """Return where the prefix that begins at ``start`` ends, having checked it and the length of the content after it."""
        segment, size = self._slice.segment, _PREFIX_BYTES
        while (prefix := bytes(segment[start : min(start + size, end)])).find(0) < 0:
            if start + size >= end:
                self._slice.fail(start, "the prefix of a logical message has no end")
            size *= 8
        prefix = prefix[: prefix.find(0)]
        try:
            prefix.decode()
        except UnicodeDecodeError:
            msg = f"segment {self._slice.path}: the prefix of a logical message, at byte {start}, is not UTF-8"
            raise StagingError(msg, hint="is the database's encoding SQL_ASCII? its bytes come as they are") from None
        content = start + len(prefix) + 5
        if content + int.from_bytes(segment[content - 4 : content]) != end:
            self._slice.fail(content - 4, "the content of a logical message is not as long as it says")
        return start + len(prefix)


@dataclass(slots=True)
class _EnvelopeRow:
    record: int
    step: int
    op: str
    relation: Relation
    unchanged: list[str]
    new: list[tuple[str, str | None]] | None
    old: list[tuple[str, str | None]] | None

    @classmethod
    def of(
        cls,
        record: int,
        op: str,
        relation: Relation,
        new: Row | None = None,
        old: Row | None = None,
        key: Row | None = None,
        step: int = 0,
    ) -> _EnvelopeRow:
        """Read a change's rows; as in the typed rows, an unchanged TOAST value is filled in from the old row or key."""
        after, before = _pairs(relation, new), _pairs(relation, key if old is None else old)
        if before:
            known = [n if o is None or n is not UNCHANGED_TOAST else o for (_, n), (_, o) in zip(after, before, strict=False)]
            after = [(column, value) for (column, _), value in zip(after, known, strict=True)]
        if old is None:
            before = [(column, value) for column, value in before if column.is_key]
        return cls(
            record,
            step,
            op,
            relation,
            [column.name for column, value in after if value is UNCHANGED_TOAST],
            None if new is None else _texts(after),
            None if old is None and key is None else _texts(before),
        )


def _pairs(relation: Relation, row: Row | None) -> list[tuple[Column, Value]]:
    if row is None:
        return []
    if len(row) != len(relation.columns):
        msg = f"a row of {len(row)} columns, its relation has {len(relation.columns)}"
        raise ProtocolError(msg)
    return list(zip(relation.columns, row_to_text(relation, row), strict=True))


def _texts(pairs: list[tuple[Column, Value]]) -> list[tuple[str, str | None]]:
    """Return what a map column is made of; a value that was not sent is left out."""
    texts: list[tuple[str, str | None]] = []
    for column, value in pairs:
        if value is UNCHANGED_TOAST:
            continue
        try:
            texts.append((column.name, None if value is None else value.decode()))
        except UnicodeDecodeError:
            msg = f"a value of column {column.name!r} is not UTF-8"
            raise ProtocolError(msg) from None
    return texts
