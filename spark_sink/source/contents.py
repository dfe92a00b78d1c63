"""What some segments hold, found from their indexes in the driver: which tables, under which descriptions. No pyspark.

The logical messages are among the tables, under a name that none has (`warehouse.MESSAGES`), with no description.

A description (a Relation message) stands in a segment before the first change that it applies to. What matters is the
position of that change: it is the same wherever segments begin and end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import Relation, Truncate
from cdcpipe.pipe.framing import encode_header
from spark_sink.schema.published import is_key_told
from spark_sink.schema.table import MESSAGES, Table
from spark_sink.staging import index as segment_index
from spark_sink.staging.filler import REPEATED_LSN
from spark_sink.staging.log import StagingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cdcpipe.pgoutput.messages import Message
    from spark_sink.staging.index import SegmentIndex
    from spark_sink.staging.log import Segment

__all__ = ["Contents", "Use", "count_rows", "read_contents"]


@dataclass(frozen=True, slots=True)
class Use:
    """A table's description, with the position of the first change under it."""

    end_lsn: int
    ordinal: int
    relation: Relation
    last_lsn: int
    """The end LSN of the last transaction with a change under it."""
    is_repeated: bool = False
    """Whether the server did not send it there: nothing of the table has changed since the change before."""


@dataclass(slots=True)
class Contents:
    """The changes of one table in some segments."""

    count: int = 0
    last_lsn: int = 0
    """The end LSN of the last transaction that changes the table; of a message outside of transactions, its place among them."""
    uses: list[Use] = field(default_factory=list)
    """The table's descriptions in order, each other than the one before it, or sent anew where the key may be another one."""


def read_contents(segments: Iterable[Segment], after_lsn: int = 0) -> dict[Table, Contents]:
    """Return the tables that have changes in the segments, in transactions that end beyond ``after_lsn``."""
    found: dict[Table, Contents] = {}
    for segment in segments:
        index = segment_index.load(segment.path)
        for count, use in _uses(segment, index, after_lsn):
            contents = found.setdefault(Table(use.relation.namespace, use.relation.name), Contents())
            contents.count += count
            contents.last_lsn = max(contents.last_lsn, use.last_lsn)
            contents.uses.append(use)
        places = index.messages()[1]
        places = places[places > after_lsn]
        if len(places):
            contents = found.setdefault(MESSAGES, Contents())
            contents.count += len(places)
            contents.last_lsn = int(places[-1])
    for contents in found.values():
        contents.uses = _joined(sorted(contents.uses, key=lambda use: (use.end_lsn, use.ordinal)))
    return found


def count_rows(segments: Iterable[Segment], after_lsn: int = 0) -> int:
    """Return how many changes and logical messages there are in transactions that end beyond ``after_lsn``."""
    count = 0
    for segment in segments:
        index = segment_index.load(segment.path)
        count += len(_changes(segment, index, segment_index.map_segment(segment.path), after_lsn)[0])
        count += int((index.messages()[1] > after_lsn).sum())
    return count


def _joined(uses: list[Use]) -> list[Use]:
    """Make one of each description that is there several times running: every segment has it again.

    But one that the server sent again is kept if it does not tell the key: there the table may have got another one.
    """
    joined: list[Use] = []
    for use in uses:
        is_same = bool(joined) and joined[-1].relation == use.relation
        if is_same and (use.is_repeated or is_key_told(use.relation)):
            joined[-1] = replace(joined[-1], last_lsn=max(joined[-1].last_lsn, use.last_lsn))
        else:
            joined.append(use)
    return joined


def _uses(segment: Segment, index: SegmentIndex, after_lsn: int) -> Iterator[tuple[int, Use]]:
    """Yield each description that a segment's changes use, with the number of these changes."""
    data = segment_index.map_segment(segment.path)
    ids, records = _changes(segment, index, data, after_lsn)
    described = np.flatnonzero(index.kind == segment_index.RELATION)
    described_ids = index.relation_id[described]
    for relation_id in np.unique(ids):
        used = records[ids == relation_id]
        descriptions = described[described_ids == relation_id]
        # For each change, the description before it: the index has checked that there is one.
        which = np.searchsorted(descriptions, used) - 1
        for number in np.unique(which):
            under = used[which == number]
            first, last = index.end_lsn[index.transaction[under[[0, -1]]]]
            description = int(descriptions[number])
            message = _message(segment, index, data, description)
            assert isinstance(message, Relation)
            ordinal = _ordinal(segment, index, data, int(under[0]), relation_id)
            yield len(under), Use(int(first), ordinal, message, int(last), _is_repeated(index, data, description))


def _is_repeated(index: SegmentIndex, data: memoryview, record: int) -> bool:
    """Tell by its header whether the launcher has put a description there."""
    start = int(index.offset[record])
    header = encode_header(REPEATED_LSN, int(index.length[record]))
    return data[max(0, start - len(header)) : start] == header


def _ordinal(segment: Segment, index: SegmentIndex, data: memoryview, record: int, relation_id: int) -> int:
    """Return the ordinal of a change; a Truncate is one for each of its relations."""
    ordinal = int(index.ordinal[record])
    if index.kind[record] == segment_index.TRUNCATE:
        message = _message(segment, index, data, record)
        assert isinstance(message, Truncate)
        ordinal += message.relation_ids.index(relation_id)
    return ordinal


def _changes(segment: Segment, index: SegmentIndex, data: memoryview, after_lsn: int) -> tuple[np.ndarray, np.ndarray]:
    """Return relation id and record number of every change, a Truncate once for each of its relations, in order."""
    records = np.flatnonzero(np.isin(index.kind, np.frombuffer(b"IUD", np.uint8)) & (index.transaction >= 0))
    truncates = np.flatnonzero((index.kind == segment_index.TRUNCATE) & (index.transaction >= 0))
    if after_lsn:
        # (A segment may have messages outside of transactions, and no transaction at all.)
        is_after = index.end_lsn > after_lsn
        records, truncates = (some[is_after[index.transaction[some]]] for some in (records, truncates))
    ids = index.relation_id[records]
    if not len(truncates):
        return ids, records
    more_ids, more_records = [], []
    for record in truncates:
        message = _message(segment, index, data, int(record))
        assert isinstance(message, Truncate)
        more_ids += list(message.relation_ids)
        more_records += [record] * len(message.relation_ids)
    ids = np.concatenate([ids, np.array(more_ids, ids.dtype)])
    records = np.concatenate([records, np.array(more_records, records.dtype)])
    order = np.argsort(records, kind="stable")
    return ids[order], records[order]


def _message(segment: Segment, index: SegmentIndex, data: memoryview, record: int) -> Message:
    start = int(index.offset[record])
    raw = bytes(data[start : start + int(index.length[record])])
    try:
        return _decode(raw)
    except ProtocolError as ex:
        msg = f"segment {segment.path} is corrupt at byte {start}: {ex.message}"
        raise StagingError(msg, hint="restore the file from a copy of the staging directory") from ex


@lru_cache(maxsize=4096)
def _decode(raw: bytes) -> Message:
    """Decode a description: every segment has the same ones again."""
    return decode(raw)
