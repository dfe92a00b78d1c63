"""Finds the messages of captured DDL in segments (schema/ddl_message.py). No pyspark.

A segment may have millions of other logical messages. So the prefixes are compared without decoding the messages.

Any session may write messages with any prefix. So a message that can't be read is named in a warning, and not used.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from cdcpipe.ddl.message import PREFIX
from cdcpipe.lsn import format_lsn
from cdcpipe.pgoutput.messages import UNIX_2000_US, LogicalMessage
from spark_sink.schema.ddl_message import parse
from spark_sink.schema.table import Placed
from spark_sink.source.slices import MESSAGE_PREFIX_POS, OpenSlice, Slice
from spark_sink.staging.index import NO_TRANSACTION

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from spark_sink.schema.ddl_message import DdlMessage
    from spark_sink.staging.log import Segment

__all__ = ["Ddl", "name_unused", "read_ddl"]

_logger = logging.getLogger(__name__)

_PREFIX: Final = np.frombuffer(PREFIX.encode() + b"\0", np.uint8)


@dataclass(frozen=True, slots=True)
class Ddl(Placed):
    """A message with its place. It stands before the change with the same end LSN and ordinal."""

    epoch: int
    lsn: int
    xid: int
    commit_time_us: int
    """Microseconds since 1970-01-01 UTC."""
    content: str
    message: DdlMessage


def name_unused(lsn: int, error: ValueError) -> None:
    """Warn of the message at ``lsn`` that `schema.ddl_message.parse` refuses. It is not used."""
    _logger.warning("a logical message with the prefix of captured DDL, at %s, is not used: %s", format_lsn(lsn), error)


def read_ddl(segments: Iterable[Segment]) -> list[Ddl]:
    """Return the captured DDL of the segments, in order.

    Messages outside of transactions are not part of it, because no command writes such.
    """
    found = []
    for segment in segments:
        opened = OpenSlice(Slice(str(segment.path), segment.epoch, segment.start_lsn, segment.end_lsn))
        index, (records, places) = opened.index, opened.index.messages()
        for number in _captured(opened, records).tolist():
            record, lsn = int(records[number]), int(index.message_lsn[number])
            message = opened.message(record)
            assert isinstance(message, LogicalMessage)
            try:
                captured = parse(message.content)
            except ValueError as ex:
                name_unused(lsn, ex)
                continue
            transaction = int(index.transaction[record])
            found.append(
                Ddl(
                    int(places[number]),
                    int(index.ordinal[record]),
                    segment.epoch,
                    lsn,
                    int(index.xid[transaction]),
                    int(index.commit_time_us[transaction]) + UNIX_2000_US,
                    message.content.decode(),
                    captured,
                )
            )
    return found


def _captured(opened: OpenSlice, records: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return which of the messages have the prefix and are in transactions, as indexes into their ``records``."""
    index = opened.index
    is_wanted = (index.transaction[records] != NO_TRANSACTION) & (index.length[records] >= MESSAGE_PREFIX_POS + len(_PREFIX))
    numbers = np.flatnonzero(is_wanted)
    start = index.offset[records[numbers]] + MESSAGE_PREFIX_POS
    segment = np.frombuffer(opened.segment, np.uint8)
    has_prefix: NDArray[np.bool_] = (segment[start[:, None] + np.arange(len(_PREFIX))] == _PREFIX).all(axis=1)
    return numbers[has_prefix]
