"""Cuts segments into slices, one or several for each task, and finds a slice's records by table with the segment's index."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
import pyarrow as pa

from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import UNIX_2000_US, Message, Relation, Truncate
from spark_sink.source.server import SegmentAddress, fetch
from spark_sink.staging import index as segment_index
from spark_sink.staging.changes import by_relation
from spark_sink.staging.index import RELATION, SegmentIndex, map_segment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Array = NDArray[Any]
    from collections.abc import Iterable, Mapping


__all__ = [
    "BATCH_BYTES",
    "BATCH_ROWS",
    "BATCH_SPAN_BYTES",
    "MESSAGE_PREFIX_POS",
    "TOGETHER",
    "OpenSlice",
    "RelationVersion",
    "Slice",
    "divide",
    "read_relations",
]


BATCH_ROWS: Final = 1 << 16
BATCH_BYTES: Final = 64 << 20
BATCH_SPAN_BYTES: Final = 1 << 30
"""The most bytes between the first and the last record of a batch: buffers.MAX_SPAN_BYTES minus one record of 1 GiB."""
TOGETHER: Final = 8192
"""The most slices of one task. Each open slice takes some KiB of memory, however small its segment is."""
MESSAGE_PREFIX_POS: Final = 10
"""Where the prefix begins in "Byte1('M'), Int8 flags, Int64 LSN, String prefix, Int32 length of the content, the content"."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a segment that a task reads: its records of the transactions that end in (after_lsn, until_lsn].

    A logical message outside of transactions belongs to the slice if its place is in this range.
    """

    path: str
    """The segment's file; with an ``address``, its name on that server."""
    epoch: int
    after_lsn: int
    until_lsn: int
    part: int = 0
    part_count: int = 1
    address: SegmentAddress | None = None


def divide(slices: Iterable[tuple[Slice, int]], part_bytes: int, together_bytes: int) -> list[list[Slice]]:
    """Divide slices among tasks. ``slices`` has each slice with its size.

    A slice larger than ``part_bytes`` is cut. Small slices share a task, at most ``together_bytes`` and `TOGETHER` slices in one.
    """
    tasks: list[list[Slice]] = []
    room = 0
    for piece, size in slices:
        count = -(-size // part_bytes)
        if count > 1:
            tasks += [[replace(piece, part=number, part_count=count)] for number in range(count)]
            room = 0
            continue
        if size > room or len(tasks[-1]) == TOGETHER:
            tasks.append([])
            room = together_bytes
        tasks[-1].append(piece)
        room -= size
    return tasks


class OpenSlice:
    """A slice whose segment is there to read, and whose index is loaded. Several readers share it, and what it has looked up."""

    def __init__(self, piece: Slice) -> None:
        self._piece = piece
        self.path = Path(piece.path) if piece.address is None else fetch(piece.address, piece.path)
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
        """Return the numbers of the slice's records whose kind is in ``kinds``."""
        transaction = self.index.transaction[self.first : self.last]
        wanted = (transaction >= self._from_transaction) & (transaction < self._to_transaction)
        wanted &= np.isin(self.index.kind[self.first : self.last], np.frombuffer(kinds, np.uint8))
        return np.flatnonzero(wanted) + self.first

    def messages(self) -> Array:
        """Return which of the segment's logical messages belong to the slice, as indexes."""
        record, place = self.index.messages()
        wanted = (record >= self.first) & (record < self.last)
        wanted &= (place > np.uint64(self._piece.after_lsn)) & (place <= np.uint64(self._piece.until_lsn))
        return np.flatnonzero(wanted)

    def chunks(self, records: Array) -> Iterator[slice]:
        """Cut ordered records into batches of bounded size."""
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
        """Raise the StagingError that says that the segment is corrupt."""
        raise segment_index.corrupt(self.path, offset, problem)

    def descriptions(self) -> Iterator[tuple[int, Relation]]:
        """Decode all Relation records of the segment, also those outside of the slice; yield each with its number."""
        for record in np.flatnonzero(self.index.kind == RELATION).tolist():
            relation = self.message(record)
            assert isinstance(relation, Relation)
            yield record, relation

    @cached_property
    def versions(self) -> Mapping[tuple[str, str], Sequence[RelationVersion]]:
        """The versions of each table in the segment, by schema and name, with the records to which each applies."""
        found: dict[tuple[str, str], list[RelationVersion]] = {}
        in_force: dict[int, RelationVersion] = {}
        for record, relation in self.descriptions():
            before = in_force.get(relation.relation_id)
            if before is not None:
                if before.relation == relation:  # the same description again
                    continue
                before.last = record
            version = in_force[relation.relation_id] = RelationVersion(relation, record, len(self.index.kind))
            found.setdefault((relation.namespace, relation.name), []).append(version)
        return found

    def describes(self, tables: Iterable[tuple[str, str]]) -> bool:
        """Tell whether the segment describes one of these tables, given by schema and name. It has no changes of any other."""
        return any(table in self.versions for table in tables)

    @cached_property
    def changes(self) -> Mapping[int, Array]:
        """The numbers of the slice's Insert, Update and Delete records, by relation id."""
        record = self.records(b"IUD")
        return by_relation(self.index.relation_id[record], record)

    @cached_property
    def truncates(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        """The numbers of the slice's Truncate records by relation id, each with the relation's place in it."""
        found: dict[int, list[tuple[int, int]]] = {}
        for record in self.records(b"T").tolist():
            message = self.message(record)
            assert isinstance(message, Truncate)
            for step, relation_id in enumerate(message.relation_ids):
                found.setdefault(relation_id, []).append((record, step))
        return found

    def metadata(self, record: Array) -> dict[str, pa.Array]:
        """Return the ``_cdc_`` columns with position and transaction of the changes, without ``_cdc_op``."""
        index = self.index
        transaction = index.transaction[record]
        time_us = index.commit_time_us[transaction] + UNIX_2000_US
        return {
            "_cdc_epoch": pa.array(np.full(len(record), self.epoch, np.int32)),
            "_cdc_end_lsn": pa.array(index.end_lsn[transaction].astype(np.int64)),
            "_cdc_ordinal": pa.array(index.ordinal[record]),
            "_cdc_xid": pa.array(index.xid[transaction].astype(np.int64)),
            "_cdc_commit_time": pa.array(time_us).cast(pa.timestamp("us", "UTC")),
        }


def read_relations(path: Path) -> Iterator[Relation]:
    """Yield the segment's descriptions of relations, in order."""
    for _, relation in OpenSlice(Slice(str(path), 0, 0, 0)).descriptions():
        yield relation


@dataclass(slots=True)
class RelationVersion:
    """A relation's description. It applies to the records of its id from ``first`` up to ``last``."""

    relation: Relation
    first: int
    last: int
