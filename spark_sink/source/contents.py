"""Finds which tables have changes in some segments, and with which descriptions. Reads the segments' indexes. No pyspark.

Logical messages count as a table with the reserved name `schema.table.MESSAGES`, without a description.

A description (a Relation message) comes in a segment before the first change to which it applies. A `Use` has the position of that
change, because this position does not depend on where segments begin and end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from cdcpipe.pgoutput.messages import Relation, Truncate
from cdcpipe.pipe.framing import encode_header
from spark_sink.schema.table import MESSAGES, Placed, Table
from spark_sink.staging import index as segment_index
from spark_sink.staging.changes import by_relation, changes_of, message_of
from spark_sink.staging.filler import REPEATED_LSN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from spark_sink.staging.index import SegmentIndex
    from spark_sink.staging.log import Segment

__all__ = ["Contents", "Found", "Use", "count_rows", "find"]


@dataclass(frozen=True, slots=True)
class Use(Placed):
    """A table's description, with the position of the first change to which it applies."""

    relation: Relation
    last_lsn: int
    """The end LSN of the last transaction with such a change."""
    is_repeated: bool = False
    """Whether the launcher repeated the description there. Then the table has not changed since the previous description."""

    @property
    def name(self) -> Table:
        """The table's name in the description."""
        return Table.of(self.relation)


@dataclass(slots=True)
class Contents:
    """The changes of one table in some segments."""

    count: int = 0
    last_lsn: int = 0
    """The end LSN of the last transaction that changes the table; for a message outside of transactions, its place."""
    uses: list[Use] = field(default_factory=list)
    """The table's descriptions in order. Each differs from the one before it, or the server sent it again after a change."""


@dataclass(frozen=True, slots=True)
class Found:
    """The changes in some segments: each description that applies to changes, with the number of these; and the messages."""

    uses: list[tuple[int, Use]]
    messages: Contents

    def by_table(self, home_of: Callable[[Use], Table] | None = None) -> dict[Table, Contents]:
        """Return the tables with changes. By default a table is known by its name in the stream."""
        found: dict[Table, Contents] = {}
        for count, use in self.uses:
            contents = found.setdefault(use.name if home_of is None else home_of(use), Contents())
            contents.count += count
            contents.last_lsn = max(contents.last_lsn, use.last_lsn)
            contents.uses.append(use)
        for contents in found.values():
            contents.uses = _joined(sorted(contents.uses, key=lambda use: use.place))
        if self.messages.count:
            found[MESSAGES] = replace(self.messages)
        return found


def find(segments: Iterable[Segment], after_lsn: int = 0) -> Found:
    """Return the changes in the segments. Only transactions that end beyond ``after_lsn`` count."""
    found = Found([], Contents())
    for segment in segments:
        index = segment_index.load(segment.path)
        found.uses.extend(_uses(segment, index, after_lsn))
        places = index.messages()[1]
        places = places[places > after_lsn]
        if len(places):
            found.messages.count += len(places)
            found.messages.last_lsn = int(places[-1])
    return found


def count_rows(segments: Iterable[Segment], after_lsn: int = 0) -> int:
    """Return how many changes and logical messages there are in transactions that end beyond ``after_lsn``."""
    count = 0
    for segment in segments:
        index = segment_index.load(segment.path)
        count += len(changes_of(segment, index, segment_index.map_segment(segment.path), after_lsn)[0])
        count += int((index.messages()[1] > after_lsn).sum())
    return count


def _joined(uses: list[Use]) -> list[Use]:
    """Join equal descriptions that follow one another, because each segment repeats them.

    A description that the server itself sent again is kept: the table may have got another key there, or another column of the
    same name.
    """
    joined: list[Use] = []
    for use in uses:
        is_same = bool(joined) and joined[-1].relation == use.relation
        if is_same and use.is_repeated:
            joined[-1] = replace(joined[-1], last_lsn=max(joined[-1].last_lsn, use.last_lsn))
        else:
            joined.append(use)
    return joined


def _uses(segment: Segment, index: SegmentIndex, after_lsn: int) -> Iterator[tuple[int, Use]]:
    """Yield each description that applies to changes of the segment, with the number of these changes."""
    data = segment_index.map_segment(segment.path)
    ids, records = changes_of(segment, index, data, after_lsn)
    described = np.flatnonzero(index.kind == segment_index.RELATION)
    descriptions_of = by_relation(index.relation_id[described], described)
    for relation_id, used in by_relation(ids, records).items():
        descriptions = descriptions_of[relation_id]
        # For each change, find the description before it. The index has checked that there is one.
        which = np.searchsorted(descriptions, used) - 1
        for number in np.unique(which):
            under = used[which == number]
            first, last = index.end_lsn[index.transaction[under[[0, -1]]]]
            description = int(descriptions[number])
            message = message_of(segment, index, data, description)
            assert isinstance(message, Relation)
            ordinal = _ordinal(segment, index, data, int(under[0]), relation_id)
            yield len(under), Use(int(first), ordinal, message, int(last), _is_repeated(index, data, description))


def _is_repeated(index: SegmentIndex, data: memoryview, record: int) -> bool:
    """Tell by the header of a description whether the launcher repeated it there."""
    start = int(index.offset[record])
    header = encode_header(REPEATED_LSN, int(index.length[record]))
    return data[max(0, start - len(header)) : start] == header


def _ordinal(segment: Segment, index: SegmentIndex, data: memoryview, record: int, relation_id: int) -> int:
    """Return the ordinal of a change. A Truncate has one for each of its relations."""
    ordinal = int(index.ordinal[record])
    if index.kind[record] == segment_index.TRUNCATE:
        message = message_of(segment, index, data, record)
        assert isinstance(message, Truncate)
        ordinal += message.relation_ids.index(relation_id)
    return ordinal
