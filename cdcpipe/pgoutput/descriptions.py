"""Keeps descriptions of relations correct although transactions are written in another order than the server sent them.

The server sends a relation's description (a Relation message, with the Types before it) before the first change that needs it.
After that it assumes that the reader knows this description. A description in a streamed transaction counts only for that
transaction, until its commit. But the reader gets transactions in commit order. So its last description may be older than the
server assumes. Then the newer one is written again before the first change of the next transaction: `Descriptions.stale` has these
relations.
"""

from __future__ import annotations

import struct
from typing import Final

from cdcpipe.pgoutput.decode import decode
from cdcpipe.pipe.framing import encode_header

__all__ = ["RELATION_ID", "Description", "Descriptions", "frame"]

RELATION_ID: Final = struct.Struct(">xI")
"""The beginning of Insert, Update, Delete and Relation: Byte1 kind, Int32 relation id …"""


def frame(wal_start: int, data: bytes) -> bytes:
    """Return the message as a record of the pipe."""
    return encode_header(wal_start, len(data)) + data


class Description:
    """A Relation with the Types before it, as records; ``number`` counts the descriptions in the order they were sent."""

    __slots__ = ("number", "pos", "records", "relation_id")

    def __init__(self, relation_id: int, records: bytes, number: int, pos: int = 0) -> None:
        self.relation_id = relation_id
        self.records = records
        self.number = number
        self.pos = pos


class Descriptions:
    """The descriptions that the server assumes to be known, and those that were written."""

    def __init__(self) -> None:
        self.sent: dict[int, Description] = {}
        """For each relation, the description that the server assumes to be known outside of stream blocks."""
        self.stale: set[int] = set()
        """The relations for which another description was written last."""
        self._written: dict[int, bytes] = {}
        """For each relation, the description that was written last."""
        self._types = bytearray()
        self._count = 0

    def add_type(self, data: bytes) -> None:
        """Take a Type message. It belongs to the next Relation."""
        decode(data)
        self._types += frame(0, data)

    def add(self, data: bytes, pos: int = 0) -> Description:
        """Return the description from a Relation and the Types before it. ``pos`` is its place among held records."""
        decode(data)
        records = bytes(self._types) + frame(0, data)
        self._types.clear()
        self._count += 1
        return Description(RELATION_ID.unpack_from(data)[0], records, self._count, pos)

    def record_written(self, description: Description) -> None:
        """Record that this description is written now."""
        self._written[description.relation_id] = description.records
        self._compare(description.relation_id)

    def record_sent_and_written(self, description: Description) -> None:
        """Record that the server has sent this description, and that it is written now."""
        self._written[description.relation_id] = description.records
        self.record_sent(description)

    def record_sent(self, description: Description) -> None:
        """Record that the server assumes this description to be known, unless it has sent a later one."""
        known = self.sent.get(description.relation_id)
        if known is None or known.number < description.number:
            self.sent[description.relation_id] = description
        self._compare(description.relation_id)

    def _compare(self, relation_id: int) -> None:
        if self.sent[relation_id].records == self._written.get(relation_id):
            self.stale.discard(relation_id)
        else:
            self.stale.add(relation_id)
