"""The changes in segments, by their indexes: which records they are and of which tables. No pyspark.

`count_changes` counts those that a log has beyond an LSN, for a gap of changes that never happened (gap.py).
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import Relation, Truncate
from spark_sink.staging import index as segment_index
from spark_sink.staging.gap import LostChanges
from spark_sink.staging.log import list_segments, removed_position

if TYPE_CHECKING:
    from pathlib import Path

    from cdcpipe.pgoutput.messages import Message
    from spark_sink.staging.index import SegmentIndex
    from spark_sink.staging.log import Segment

__all__ = ["by_relation", "changes_of", "count_changes", "message_of"]


def count_changes(root: Path, after_lsn: int) -> LostChanges:
    """Count what the log in ``root`` has beyond ``after_lsn``: transactions, and changes of each table.

    Segments that all readers have read may be removed already. Then the count is incomplete, and says so.
    """
    transactions, end_lsn = 0, after_lsn
    rows: Counter[str] = Counter()
    for segment in list_segments(root):
        if segment.end_lsn <= after_lsn:
            continue
        index, data = segment_index.load(segment.path), segment_index.map_segment(segment.path)
        transactions += int((index.end_lsn > after_lsn).sum())
        end_lsn = segment.end_lsn
        ids, _ = changes_of(segment, index, data, after_lsn)
        names = {}
        for record in np.flatnonzero(index.kind == segment_index.RELATION):
            relation = message_of(segment, index, data, int(record))
            assert isinstance(relation, Relation)
            names[relation.relation_id] = f"{relation.namespace}.{relation.name}"
        for relation_id, count in zip(*np.unique(ids, return_counts=True), strict=True):
            rows[names[int(relation_id)]] += int(count)
    removed = removed_position(root)
    return LostChanges(transactions, dict(sorted(rows.items())), end_lsn, removed is None or removed.lsn <= after_lsn)


def changes_of(segment: Segment, index: SegmentIndex, data: memoryview, after_lsn: int) -> tuple[np.ndarray, np.ndarray]:
    """Return relation id and record number of every change, in order. A Truncate is there once for each of its relations."""
    records = np.flatnonzero(np.isin(index.kind, np.frombuffer(b"IUD", np.uint8)) & (index.transaction >= 0))
    truncates = np.flatnonzero((index.kind == segment_index.TRUNCATE) & (index.transaction >= 0))
    if after_lsn:
        # A segment may have only messages outside of transactions, and no transaction at all.
        is_after = index.end_lsn > after_lsn
        records, truncates = (some[is_after[index.transaction[some]]] for some in (records, truncates))
    ids = index.relation_id[records]
    if not len(truncates):
        return ids, records
    more_ids, more_records = [], []
    for record in truncates:
        message = message_of(segment, index, data, int(record))
        assert isinstance(message, Truncate)
        more_ids += list(message.relation_ids)
        more_records += [record] * len(message.relation_ids)
    ids = np.concatenate([ids, np.array(more_ids, ids.dtype)])
    records = np.concatenate([records, np.array(more_records, records.dtype)])
    order = np.argsort(records, kind="stable")
    return ids[order], records[order]


def by_relation(ids: np.ndarray, records: np.ndarray) -> dict[int, np.ndarray]:
    """Return the records of each relation, in their order. It takes no longer for many relations than for few."""
    if not len(ids):
        return {}
    order = np.argsort(ids, kind="stable")
    ids, records = ids[order], records[order]
    first = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    return dict(zip(ids[first].tolist(), np.split(records, first[1:]), strict=True))


def message_of(segment: Segment, index: SegmentIndex, data: memoryview, record: int) -> Message:
    """Decode a record of a segment. Raises StagingError if it is corrupt."""
    start = int(index.offset[record])
    raw = bytes(data[start : start + int(index.length[record])])
    try:
        return _decode(raw)
    except ProtocolError as ex:
        raise segment_index.corrupt(segment.path, start, ex.message) from ex


@lru_cache(maxsize=4096)
def _decode(raw: bytes) -> Message:
    """Decode a description. It is cached, because every segment has the same descriptions again."""
    return decode(raw)
