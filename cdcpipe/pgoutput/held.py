"""Holds the records of transactions that have not committed yet: in memory up to a limit, beyond it in spills.

`HeldTransactions` has the streamed and the prepared transactions, and enforces the limit: when all together take more memory, it
moves the largest one to a spill (`cdcpipe.pipe.spill`). A `HeldTransaction` has the records of one transaction, and can undo
subtransactions.

Savepoints nest. So all records after the first record of a subtransaction belong to it, or to subtransactions inside it. Undoing it
cuts these records off. This removes descriptions of relations in that part, too; the server sends them again.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cdcpipe.pgoutput.descriptions import Description
    from cdcpipe.pipe.spill import Spill

__all__ = ["PIECE_BYTES", "XID", "Data", "HeldTransaction", "HeldTransactions"]

Data: TypeAlias = bytes | memoryview

PIECE_BYTES: Final = 64 << 10

XID: Final = struct.Struct(">xI")
"""The beginning of a message inside a stream block: Byte1 kind, Int32 xid …"""


class Starts:
    """Where the first record of each subtransaction of ``xid`` is. Takes 12 bytes for each.

    Subtransactions get their xids in order, and nearly all their first records come in this order. The others are in a dictionary:
    a subtransaction inside another one that had an xid, but no record yet.
    """

    __slots__ = ("_ages", "_late", "_positions", "_xid")

    def __init__(self, xid: int) -> None:
        self._xid = xid
        self._ages = array("I")
        self._positions = array("Q")
        self._late: dict[int, int] = {}

    def add(self, xid: int, pos: int) -> None:
        """Note that the next record, at ``pos``, belongs to this subtransaction, unless it has an earlier record."""
        age = xid - self._xid & 0xFFFFFFFF  # xids wrap
        if not self._ages or age > self._ages[-1]:
            self._ages.append(age)
            self._positions.append(pos)
        elif self.find(xid) is None:
            self._late[age] = pos

    def find(self, xid: int) -> int | None:
        """Return where the first record of a subtransaction is; None if it has none."""
        age = xid - self._xid & 0xFFFFFFFF
        i = bisect_left(self._ages, age)
        return self._positions[i] if i < len(self._ages) and self._ages[i] == age else self._late.get(age)

    def cut(self, pos: int) -> None:
        """Forget the subtransactions that begin at ``pos`` or later."""
        i = bisect_left(self._positions, pos)
        del self._ages[i:], self._positions[i:]
        while self._late and next(reversed(self._late.values())) >= pos:
            self._late.popitem()


class HeldTransaction:
    """The framed records of one transaction that has not committed: older ones in ``spill``, newer ones in ``buffer``."""

    __slots__ = (
        "buffer",
        "current",
        "descriptions",
        "last_xid",
        "marks",
        "origin",
        "spill",
        "spilled_bytes",
        "starts",
        "wal_start",
        "xid",
    )

    def __init__(self, xid: int, wal_start: int) -> None:
        self.xid = xid
        self.wal_start = wal_start
        self.origin = b""
        self.buffer = bytearray()
        self.spill: Spill | None = None
        self.spilled_bytes = 0
        self.starts = Starts(xid)
        self.last_xid: bytes | None = None
        """The xid of the last record, as bytes of the message."""
        self.marks = array("Q")
        """Ends of records, about ``PIECE_BYTES`` apart, at which pieces are cut."""
        self.descriptions: list[Description] = []
        self.current: dict[int, Description] = {}
        """For each relation its last description here."""

    @property
    def size(self) -> int:
        """The size of the records in bytes."""
        return self.spilled_bytes + len(self.buffer)

    def enter(self, data: Data) -> None:
        """Note the subtransaction of the next record."""
        self.last_xid = bytes(data[1 : XID.size])
        (xid,) = XID.unpack_from(data)
        self.starts.add(xid, self.size)

    def cut(self, subxid: int) -> None:
        """Undo the subtransaction. Does nothing if it has no records here."""
        pos = self.starts.find(subxid)
        if pos is None:
            return
        if pos < self.spilled_bytes:
            assert self.spill is not None
            self.spill.truncate(pos)
            self.spilled_bytes = pos
            self.buffer.clear()
        else:
            del self.buffer[pos - self.spilled_bytes :]
        self.starts.cut(pos)
        is_redescribed = False
        while self.descriptions and self.descriptions[-1].pos >= pos:
            self.descriptions.pop()
            is_redescribed = True
        if is_redescribed:
            self.current = {known.relation_id: known for known in self.descriptions}
        while self.marks and self.marks[-1] > pos:
            self.marks.pop()
        self.last_xid = None

    def describe(self, description: Description) -> None:
        """Note a description at the end of the records. If it equals the one before, it only replaces its number."""
        current = self.current.get(description.relation_id)
        if current is not None and current.records == description.records:
            current.number = description.number
        else:
            self.descriptions.append(description)
            self.current[description.relation_id] = description

    def move_out(self, make_spill: Callable[[], Spill]) -> None:
        """Move the records from memory to the spill."""
        if self.spill is None:
            self.spill = make_spill()
        self.spill.append(self.buffer)
        self.spilled_bytes += len(self.buffer)
        self.buffer = bytearray()

    def pieces(self) -> Iterator[bytes]:
        """Yield all records, in pieces that have whole records."""
        pos = 0
        for end in chain(self.marks, (self.size,)):
            piece = b""
            if pos < self.spilled_bytes:
                assert self.spill is not None
                piece = self.spill.read(pos, min(end, self.spilled_bytes) - pos)
            if end > self.spilled_bytes:
                piece += self.buffer[max(0, pos - self.spilled_bytes) : end - self.spilled_bytes]
            if piece:
                yield piece
            pos = end

    def close(self) -> None:
        """Drop the records."""
        if self.spill is not None:
            self.spill.close()


class HeldTransactions:
    """The held transactions: ``streamed`` by xid, ``prepared`` by gid. `open` chooses the one to which `keep` adds records."""

    def __init__(self, spill_threshold: int, make_spill: Callable[[], Spill]) -> None:
        self.streamed: dict[int, HeldTransaction] = {}
        self.prepared: dict[str, HeldTransaction] = {}
        self._spill_threshold = spill_threshold
        self._make_spill = make_spill
        self.room = 0
        """How large the buffer of the opened transaction may become before `make_room` has to be called."""

    def open(self, held: HeldTransaction) -> None:
        """Choose the transaction to which `keep` adds records from now on."""
        self.room = self._room_for(held)

    def keep(self, held: HeldTransaction, record: bytes) -> None:
        """Add to the records of the transaction that was opened last."""
        held.buffer += record
        if len(held.buffer) > self.room:
            self.make_room(held)

    def all(self) -> list[HeldTransaction]:
        """Return all of them."""
        return [*self.streamed.values(), *self.prepared.values()]

    def free_bytes(self) -> int:
        """Return how many bytes of memory are left; negative if there are too many."""
        return self._spill_threshold - sum(len(held.buffer) for held in self.all())

    def sizes(self) -> tuple[int, int]:
        """Return how many bytes are in memory, and how many in spills. Another thread may ask."""
        spills = [held.spill for held in self.all()]
        return self._spill_threshold - self.free_bytes(), sum(spill.size for spill in spills if spill is not None)

    def close(self) -> None:
        """Drop all of them."""
        for held in self.all():
            held.close()
        self.streamed.clear()
        self.prepared.clear()

    def make_room(self, held: HeldTransaction) -> None:
        """Note the end of a piece, and move the largest transactions to spills until the rest is within the threshold.

        Call this when the buffer of the opened transaction is larger than ``room``.
        """
        if held.size >= (held.marks[-1] if held.marks else 0) + PIECE_BYTES:
            held.marks.append(held.size)
        while self.free_bytes() < 0:
            max(self.all(), key=lambda other: len(other.buffer)).move_out(self._make_spill)
        self.room = self._room_for(held)

    def _room_for(self, held: HeldTransaction) -> int:
        mark = held.marks[-1] if held.marks else 0
        until_mark = max(0, mark + PIECE_BYTES - held.size)
        return len(held.buffer) + max(0, min(until_mark, self.free_bytes()))
