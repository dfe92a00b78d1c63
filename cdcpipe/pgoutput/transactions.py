"""Raw pgoutput messages of any protocol version in; the pipe's bytes of whole committed transactions out, in commit order.

A server that streams sends transactions before they commit, in blocks that interleave, and prepared ones before it is known
whether they will. `Transactions` holds these until their commit, and then gives out what protocol version 1 would have
sent: Begin, the changes without the xid that each carries in a block, Commit. Everything else passes at its place. Records
are never decoded: rows are moved as bytes.

What it rests on (the manual, "Logical Streaming Replication Protocol", and the server's reorder buffer):

- Savepoints nest. When a subtransaction is undone, all that came after its first record is its own or nested in it, so
  the end of what is held is cut off there. Descriptions of relations in that part go with it; the server sends them again.
- A description in a streamed transaction counts for that transaction only, until its commit. The server then takes the
  description that it sent last, wherever it sent it, for known. Here a reader sees them in another order, so where that
  would leave it with an older one, the newer is written again before the next transaction's first change.
- The Begin of a streamed transaction is made from its commit, and has the WAL start of its first block. The server does
  not say where a streamed transaction was replayed from (its Origin is known at the commit only).
- A logical message in a block carries the xid of its top-level transaction. So one that comes before the first change of
  a subtransaction that is undone can't be told from its parent's, and stays.

What is held stays in memory up to ``spill_threshold`` bytes over all transactions; beyond that the largest is moved to a spill
(`cdcpipe.pipe.spill`). What comes out is pulled, so that the commit of a large transaction takes no memory.
No other I/O, no time.
"""

from __future__ import annotations

import logging
import struct
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.decode import decode, malformed
from cdcpipe.pgoutput.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
)
from cdcpipe.pipe.framing import encode_header
from cdcpipe.pipe.spill import Spill, Spills

__all__ = ["SPILL_THRESHOLD", "Transactions"]

log = logging.getLogger(__name__)

SPILL_THRESHOLD: Final = 64 << 20
PIECE_BYTES: Final = 64 << 10

Data: TypeAlias = bytes | memoryview

_XID = struct.Struct(">xI")  # inside a stream block: Byte1 kind, Int32 xid …
_RELATION_ID = struct.Struct(">xI")  # Insert, Update, Delete, Relation: Byte1 kind, Int32 relation id …
_BEGIN = struct.Struct(">cQqI")  # Byte1('B') Int64 final LSN, Int64 commit time, Int32 xid
_COMMIT = struct.Struct(">cBQQq")  # Byte1('C') Int8 flags, Int64 commit LSN, Int64 end LSN, Int64 commit time

_B, _C = b"BC"
_CHANGES = frozenset(b"IUDTM")
_IDLE, _PLAIN, _PREPARING, _BLOCK = range(4)
_KINDS: Final = {
    _IDLE: (frozenset(b"BbScAKrpM"), "outside a transaction"),
    _PLAIN: (frozenset(b"IUDTMRYOC"), "inside a transaction"),
    _PREPARING: (frozenset(b"IUDTMRYOP"), "inside a transaction that is being prepared"),
    _BLOCK: (frozenset(b"IUDTMRYOE"), "inside a stream block"),
}
"""Which messages may come where."""


class _Description:
    """A Relation with the Types before it, as records; ``number`` counts the descriptions in the order they were sent."""

    __slots__ = ("number", "pos", "records", "relation_id")

    def __init__(self, relation_id: int, records: bytes, number: int, pos: int = 0) -> None:
        self.relation_id = relation_id
        self.records = records
        self.number = number
        self.pos = pos


class _Starts:
    """Where the first record of each subtransaction of ``xid`` stands: 12 bytes for each.

    They get their xids in order, and nearly all their first records come in that order. Those that do not (of one that nests in
    another which had an xid, and no record yet) are in a dictionary.
    """

    __slots__ = ("_ages", "_late", "_positions", "_xid")

    def __init__(self, xid: int) -> None:
        self._xid = xid
        self._ages = array("I")
        self._positions = array("Q")
        self._late: dict[int, int] = {}

    def add(self, xid: int, pos: int) -> None:
        """Note that the next record, at ``pos``, is of this subtransaction, unless it has one already."""
        age = xid - self._xid & 0xFFFFFFFF  # xids wrap
        if not self._ages or age > self._ages[-1]:
            self._ages.append(age)
            self._positions.append(pos)
        elif self.find(xid) is None:
            self._late[age] = pos

    def find(self, xid: int) -> int | None:
        """Return where it begins."""
        age = xid - self._xid & 0xFFFFFFFF
        i = bisect_left(self._ages, age)
        return self._positions[i] if i < len(self._ages) and self._ages[i] == age else self._late.get(age)

    def cut(self, pos: int) -> None:
        """Forget those that begin at ``pos`` or later."""
        i = bisect_left(self._positions, pos)
        del self._ages[i:], self._positions[i:]
        while self._late and next(reversed(self._late.values())) >= pos:
            self._late.popitem()


class _Held:
    """Records of one transaction that has not committed: framed bytes, the older ones in ``spill``, the newer in ``buffer``."""

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
        self.starts = _Starts(xid)
        self.last_xid: bytes | None = None
        """Of the last record, as it stands in the message."""
        self.marks: list[int] = []
        """Ends of records, about ``PIECE_BYTES`` apart: where pieces are cut."""
        self.descriptions: list[_Description] = []
        self.current: dict[int, _Description] = {}
        """For each relation the last of them."""

    @property
    def size(self) -> int:
        return self.spilled_bytes + len(self.buffer)

    def enter(self, data: Data) -> None:
        """Note which subtransaction the next record is of."""
        self.last_xid = bytes(data[1 : _XID.size])
        (xid,) = _XID.unpack_from(data)
        self.starts.add(xid, self.size)

    def cut(self, subxid: int) -> None:
        """Undo the subtransaction; one without records here has nothing to undo."""
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

    def describe(self, description: _Description) -> None:
        """Note a description that stands at the end; one that says nothing new only takes the number of the one before."""
        current = self.current.get(description.relation_id)
        if current is not None and current.records == description.records:
            current.number = description.number
        else:
            self.descriptions.append(description)
            self.current[description.relation_id] = description

    def move_out(self, make_spill: Callable[[], Spill]) -> None:
        """Free the memory."""
        if self.spill is None:
            self.spill = make_spill()
        self.spill.append(self.buffer)
        self.spilled_bytes += len(self.buffer)
        self.buffer = bytearray()

    def pieces(self) -> Iterator[bytes]:
        """Yield all records, in pieces of whole ones."""
        pos = 0
        for end in [*self.marks, self.size]:
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
        if self.spill is not None:
            self.spill.close()


class Transactions:
    """`feed` takes the server's messages, `take` gives the records of committed transactions, as they stand on the pipe.

    Raises ProtocolError for what the protocol does not allow. ``streaming_parallel`` as in `cdcpipe.pgoutput.decode`.
    Prepared transactions are held until they are committed, and are lost with this object, so the server must be told
    of nothing after a PREPARE before the COMMIT PREPARED is safe (see ``Progress.prepare``).
    """

    def __init__(
        self,
        *,
        streaming_parallel: bool | None = False,
        spill_threshold: int = SPILL_THRESHOLD,
        make_spill: Callable[[], Spill] | None = None,
    ) -> None:
        self._streaming_parallel = streaming_parallel
        self._spill_threshold = spill_threshold
        self._make_spill = make_spill or Spills().open
        self._state = _IDLE
        self._streamed: dict[int, _Held] = {}
        self._prepared: dict[str, _Held] = {}
        self._current: _Held | None = None
        """The transaction of the block that is open, or that is being prepared."""
        self._room = 0
        """How large its buffer may become before something is to be done."""
        self._output: deque[bytearray | Iterator[bytes]] = deque()
        self._committing: deque[_Held] = deque()
        self._types = bytearray()
        self._described_count = 0
        self._sent: dict[int, _Description] = {}
        """For each relation the description that the server believes to be known outside of stream blocks."""
        self._written: dict[int, bytes] = {}
        """For each relation the description that came out last."""
        self._stale: set[int] = set()
        """The relations for which the two differ."""

    # What comes in

    def feed(self, wal_start: int, data: Data) -> None:
        """Take one message; ``wal_start`` is what its WALData said."""
        if self._state == _BLOCK and len(data) > _XID.size and data[0] in _CHANGES:
            held = self._current
            assert held is not None
            if data[1 : _XID.size] != held.last_xid:
                held.enter(data)
            self._keep(held, encode_header(wal_start, len(data) - 4) + data[:1] + data[_XID.size :])
            return
        data = bytes(data)
        try:
            kinds, where = _KINDS[self._state]
            if not data or data[0] not in kinds:
                raise malformed(data, 0, f"it does not belong here, {where}")
            if self._state == _PLAIN:
                self._feed_plain(wal_start, data)
            elif self._state == _IDLE:
                self._feed_idle(wal_start, data)
            elif self._state == _BLOCK:
                self._feed_block(wal_start, data)
            else:
                self._feed_preparing(wal_start, data)
        except ProtocolError as ex:
            ex.locate(wal_start)
            raise

    def lets_by(self, data: Data) -> bool:
        """Take a Begin or a Commit that would come out as it is, and at once: it may be written then, and is not to be fed."""
        if self._output:
            return False
        if self._state == _IDLE and len(data) == _BEGIN.size and data[0] == _B:
            self._state = _PLAIN
            return True
        if self._state == _PLAIN and len(data) == _COMMIT.size and data[0] == _C and data[1] == 0:  # no flags
            self._state = _IDLE
            return True
        return False

    def _feed_idle(self, wal_start: int, data: bytes) -> None:
        match message := decode(data, streaming_parallel=self._streaming_parallel):
            case Begin():
                self._put(wal_start, data)
                self._state = _PLAIN
            case BeginPrepare():
                if message.gid in self._prepared:
                    raise ProtocolError(f"the server prepared the transaction {message.gid!r} twice")
                self._hold(_PREPARING, _Held(message.xid, wal_start))
                self._prepared[message.gid] = self._current_held
            case StreamStart():
                held = self._streamed.get(message.xid)
                if message.first_segment == (held is not None):
                    what = "first stream block came twice" if held is not None else "first stream block is missing"
                    raise ProtocolError(f"transaction {message.xid}: the {what}")
                if held is None:
                    held = self._streamed[message.xid] = _Held(message.xid, wal_start)
                self._hold(_BLOCK, held)
            case StreamCommit():
                self._commit(self._pop_streamed(message.xid), wal_start, message)
            case StreamAbort():
                self._abort(message)
            case StreamPrepare():
                if message.gid in self._prepared:
                    raise ProtocolError(f"the server prepared the transaction {message.gid!r} twice")
                self._prepared[message.gid] = self._pop_streamed(message.xid)
            case CommitPrepared():
                if message.gid not in self._prepared:
                    raise ProtocolError(
                        f"the prepared transaction {message.gid!r} is committed, but its changes came in an earlier stream",
                        hint="the slot was confirmed, or the stream started, after its PREPARE: its tables have to be copied again",
                    )
                self._commit(self._prepared.pop(message.gid), wal_start, message)
            case RollbackPrepared():
                if message.gid in self._prepared:
                    self._prepared.pop(message.gid).close()
            case _:  # a logical message
                if data[1] & 1:
                    raise malformed(data, 1, "a transactional message can't come outside a transaction")
                self._put(wal_start, data)

    def _feed_plain(self, wal_start: int, data: bytes) -> None:
        match chr(data[0]):
            case "C":
                assert isinstance(decode(data), Commit)
                self._state = _IDLE
            case "R":
                description = self._describe(data)
                self._sent[description.relation_id] = description
                self._note_written(description)
            case "Y":
                self._describe_type(data)
            case "O":
                decode(data)
            case _:
                for relation_id in sorted(self._stale):
                    self._put_records(self._sent[relation_id].records)
                    self._note_written(self._sent[relation_id])
        self._put(wal_start, data)

    def _feed_preparing(self, wal_start: int, data: bytes) -> None:
        held = self._current_held
        match chr(data[0]):
            case "P":
                assert isinstance(decode(data), Prepare)
                self._release()
                return
            case "R":
                # The server counts it as known from here on, whatever becomes of the transaction.
                description = self._describe(data, held.size)
                held.describe(description)
                self._note_sent(description)
            case "Y":
                self._describe_type(data)
            case "O":
                decode(data)
                held.origin = _frame(wal_start, data)
                return
            case "M":
                pass
            case _:
                # By its commit another description may hold: it takes those along that hold now.
                for relation_id in _relation_ids(data):
                    known = self._sent.get(relation_id)
                    if known is not None and relation_id not in held.current:
                        held.describe(_Description(relation_id, known.records, known.number, held.size))
                        held.buffer += known.records
        self._keep(held, _frame(wal_start, data))

    def _feed_block(self, wal_start: int, data: bytes) -> None:
        held = self._current_held
        kind = data[:1]
        if kind == b"E":
            decode(data, in_stream=True)
            self._release()
            return
        if kind == b"O":
            decode(data, in_stream=True)
            held.origin = _frame(wal_start, data)
            return
        if len(data) <= _XID.size:
            raise malformed(data, len(data), "it is cut short")
        if data[1 : _XID.size] != held.last_xid:
            held.enter(data)
        data = kind + data[_XID.size :]
        if kind == b"R":
            held.describe(self._describe(data, held.size))
        else:
            self._describe_type(data)
        self._keep(held, _frame(wal_start, data))

    @property
    def block_xid(self) -> bytes | None:
        """The xid, as it stands in the message, whose changes `keep` takes; None if there is none.

        It is that of the last change of the stream block that is open, so the next record is most often of it, too.
        """
        return self._current_held.last_xid if self._state == _BLOCK else None

    def keep(self, records: bytes) -> None:
        """Take changes of ``block_xid`` as records, with headers and without the xid: what `feed` would make of them."""
        self._keep(self._current_held, records)

    # What is held

    @property
    def _current_held(self) -> _Held:
        assert self._current is not None
        return self._current

    def _hold(self, state: int, held: _Held) -> None:
        self._state = state
        self._current = held
        self._room = self._room_for(held)

    def _release(self) -> None:
        self._state = _IDLE
        self._current = None

    def _keep(self, held: _Held, record: bytes) -> None:
        held.buffer += record
        if len(held.buffer) > self._room:
            self._mark(held)

    def _all_held(self) -> list[_Held]:
        return [*self._streamed.values(), *self._prepared.values()]

    def _free_bytes(self) -> int:
        return self._spill_threshold - sum(len(held.buffer) for held in self._all_held())

    def _room_for(self, held: _Held) -> int:
        mark = held.marks[-1] if held.marks else 0
        until_mark = max(0, mark + PIECE_BYTES - held.size)
        return len(held.buffer) + max(0, min(until_mark, self._free_bytes()))

    def _mark(self, held: _Held) -> None:
        """Note where a piece may end; move the largest ones out until the rest is within the threshold."""
        if held.size >= (held.marks[-1] if held.marks else 0) + PIECE_BYTES:
            held.marks.append(held.size)
        while self._free_bytes() < 0:
            max(self._all_held(), key=lambda other: len(other.buffer)).move_out(self._make_spill)
        self._room = self._room_for(held)

    def _pop_streamed(self, xid: int) -> _Held:
        try:
            return self._streamed.pop(xid)
        except KeyError:
            raise ProtocolError(f"the streamed transaction {xid} ends, but none of its stream blocks came") from None

    def _abort(self, message: StreamAbort) -> None:
        held = self._streamed.get(message.xid)
        if held is None:
            # Servers have been seen to send this without any stream block before it.
            log.warning("the server says that transaction %d was rolled back, which it has sent nothing of", message.xid)
        elif message.subxid == message.xid:
            del self._streamed[message.xid]
            held.close()
        else:
            held.cut(message.subxid)

    # Descriptions

    def _describe_type(self, data: bytes) -> None:
        decode(data)
        self._types += _frame(0, data)

    def _describe(self, data: bytes, pos: int = 0) -> _Description:
        decode(data)
        records = bytes(self._types) + _frame(0, data)
        self._types.clear()
        self._described_count += 1
        return _Description(_RELATION_ID.unpack_from(data)[0], records, self._described_count, pos)

    def _note_written(self, description: _Description) -> None:
        self._written[description.relation_id] = description.records
        self._compare(description.relation_id)

    def _note_sent(self, description: _Description) -> None:
        known = self._sent.get(description.relation_id)
        if known is None or known.number < description.number:
            self._sent[description.relation_id] = description
        self._compare(description.relation_id)

    def _compare(self, relation_id: int) -> None:
        if self._sent[relation_id].records == self._written.get(relation_id):
            self._stale.discard(relation_id)
        else:
            self._stale.add(relation_id)

    # What goes out

    @property
    def is_direct(self) -> bool:
        """Whether changes, until the next message of another kind, may pass this object by: they would come out as they are."""
        return self._state == _PLAIN and not self._stale

    @property
    def has_pending(self) -> bool:
        """Whether `take` has something to give."""
        return bool(self._output)

    def is_empty(self, key: int | str) -> bool:
        """Whether the streamed transaction with this xid, or the prepared one with this gid, would commit without any record."""
        held = self._streamed.get(key) if isinstance(key, int) else self._prepared.get(key)
        return held is not None and held.size == 0

    def take(self, max_bytes: int) -> bytes:
        r"""Return the next records, each as ``w LSN LENGTH\n`` and its bytes; nothing if there are none.

        They are more than ``max_bytes`` by at most a piece. What is not of a transaction that was held comes all at once.
        """
        taken = bytearray()
        while self._output and (len(taken) < max_bytes or isinstance(self._output[0], bytearray)):
            head = self._output[0]
            piece = self._output.popleft() if isinstance(head, bytearray) else next(head, None)
            if piece is None:
                self._output.popleft()
            else:
                assert isinstance(piece, bytes | bytearray)
                taken += piece
        return bytes(taken)

    def close(self) -> None:
        """Drop everything that is held."""
        for held in [*self._all_held(), *self._committing]:
            held.close()
        for each in (self._streamed, self._prepared, self._committing, self._output):
            each.clear()

    def _put(self, wal_start: int, data: bytes) -> None:
        self._put_records(_frame(wal_start, data))

    def _put_records(self, records: bytes) -> None:
        if self._output and isinstance(self._output[-1], bytearray):
            self._output[-1] += records
        else:
            self._output.append(bytearray(records))

    def _commit(self, held: _Held, wal_start: int, message: StreamCommit | CommitPrepared) -> None:
        """Let the transaction out, unless nothing of it is left: then the server, too, would have sent nothing."""
        if held.size == 0:
            held.close()
            return
        for description in held.current.values():
            self._written[description.relation_id] = description.records
            self._note_sent(description)
        commit = _COMMIT.pack(b"C", 0, message.commit_lsn, message.end_lsn, message.commit_time_us)
        self._put(held.wal_start, _BEGIN.pack(b"B", message.commit_lsn, message.commit_time_us, held.xid))
        self._put_records(held.origin)
        self._committing.append(held)
        self._output.append(self._pieces(held))
        self._put(wal_start, commit)

    def _pieces(self, held: _Held) -> Iterator[bytes]:
        yield from held.pieces()
        self._committing.remove(held)
        held.close()


def _frame(wal_start: int, data: bytes) -> bytes:
    return encode_header(wal_start, len(data)) + data


def _relation_ids(data: bytes) -> tuple[int, ...]:
    """Return the relations that a change is about."""
    try:
        if data[0] == ord("T"):
            count = _RELATION_ID.unpack_from(data)[0]
            if count > len(data) // 4:
                raise malformed(data, 1, f"{count} relations do not fit")
            return struct.unpack_from(f">{count}I", data, 6)
        return _RELATION_ID.unpack_from(data)
    except struct.error:
        raise malformed(data, len(data), "it is cut short") from None
