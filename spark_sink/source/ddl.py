"""Finds the messages of captured DDL in segments (schema/ddl.py). No pyspark.

A segment may have millions of other logical messages. So the prefixes are compared without decoding the messages.

Any session may write messages with any prefix. So a message that can't be read is named in a warning, and not used.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from cdcpipe.ddl.message import PREFIX
from cdcpipe.errors import ProtocolError
from cdcpipe.lsn import format_lsn
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import LogicalMessage
from spark_sink.schema.ddl import parse
from spark_sink.source.slices import UNIX_2000_US
from spark_sink.staging import index as segment_index
from spark_sink.staging.index import NO_TRANSACTION
from spark_sink.staging.log import StagingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from spark_sink.schema.ddl import DdlMessage
    from spark_sink.staging.index import SegmentIndex
    from spark_sink.staging.log import Segment

__all__ = ["Ddl", "read_ddl"]

_logger = logging.getLogger(__name__)

_PREFIX: Final = np.frombuffer(PREFIX.encode() + b"\0", np.uint8)
_PREFIX_POS: Final = 10
"""Where the prefix begins in "Byte1('M'), Int8 flags, Int64 LSN, String prefix, Int32 length of the content, the content"."""


@dataclass(frozen=True, slots=True)
class Ddl:
    """A message with its place. It stands before the change with the same end LSN and ordinal."""

    epoch: int
    end_lsn: int
    ordinal: int
    lsn: int
    xid: int
    commit_time_us: int
    """Microseconds since 1970-01-01 UTC."""
    content: str
    message: DdlMessage

    @property
    def place(self) -> tuple[int, int]:
        """The place among the changes."""
        return self.end_lsn, self.ordinal


def read_ddl(segments: Iterable[Segment]) -> list[Ddl]:
    """Return the captured DDL of the segments, in order."""
    found = []
    for segment, index, number, raw in _messages(segments):
        record = int(index.messages()[0][number])
        transaction, lsn = int(index.transaction[record]), int(index.message_lsn[number])
        try:
            message = parse(raw)
        except ValueError as ex:
            _logger.warning("a logical message with the prefix of captured DDL, at %s, is not used: %s", format_lsn(lsn), ex)
            continue
        found.append(
            Ddl(
                segment.epoch,
                int(index.end_lsn[transaction]),
                int(index.ordinal[record]),
                lsn,
                int(index.xid[transaction]),
                int(index.commit_time_us[transaction]) + UNIX_2000_US,
                raw.decode(),
                message,
            )
        )
    return found


def _messages(segments: Iterable[Segment]) -> Iterator[tuple[Segment, SegmentIndex, int, bytes]]:
    """Yield the content of each message with the prefix, with its number among the segment's messages.

    Messages outside of transactions are not among them, because no command writes such.
    """
    for segment in segments:
        index = segment_index.load(segment.path)
        records = index.messages()[0]
        inside = np.flatnonzero(index.transaction[records] != NO_TRANSACTION)
        if not len(inside):
            continue
        data = segment_index.map_segment(segment.path)
        for number in inside[_has_prefix(index, data, records[inside])].tolist():
            start = int(index.offset[records[number]])
            try:
                message = decode(bytes(data[start : start + int(index.length[records[number]])]))
            except ProtocolError as ex:
                msg = f"segment {segment.path} is corrupt at byte {start}: {ex.message}"
                raise StagingError(msg, hint="restore the file from a copy of the staging directory") from ex
            assert isinstance(message, LogicalMessage)
            yield segment, index, number, message.content


def _has_prefix(index: SegmentIndex, data: memoryview, records: NDArray[np.int64]) -> NDArray[np.bool_]:
    found = index.length[records] >= _PREFIX_POS + len(_PREFIX)
    start = index.offset[records[found]] + _PREFIX_POS
    found[found] = (np.frombuffer(data, np.uint8)[start[:, None] + np.arange(len(_PREFIX))] == _PREFIX).all(axis=1)
    return found
