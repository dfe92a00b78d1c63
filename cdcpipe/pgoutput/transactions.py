"""Assembles whole committed transactions: takes raw pgoutput messages of any protocol version, returns records in commit order.

With streaming, the server sends transactions before they commit, in interleaved blocks. It sends prepared transactions before it is
known whether they will commit. `Transactions` holds these until their commit. Then it returns what the server would have sent with
protocol version 1: Begin, the changes without the xid that they have in a block, Commit. All other messages keep their place. Rows
are moved as bytes and never decoded.

Two facts about the server (the manual, "Logical Streaming Replication Protocol", and its reorder buffer) have consequences:

- The commit of a streamed transaction gives the contents of its Begin, which gets the WAL start of its first block. The server does
  not send the Origin of a streamed transaction.
- A logical message in a block has the xid of its top-level transaction. So a message before the first change of a subtransaction
  can't be distinguished from a message of the parent. It stays if the subtransaction is undone. Only messages of DDL capture
  (cdcpipe/ddl/) say to which subtransaction they belong.

held.py holds the records of transactions that have not committed, in at most ``spill_threshold`` bytes of memory. descriptions.py
keeps the relations' descriptions correct, because the reader gets transactions in another order than the server sent them. The
caller pulls the records, so that the commit of a large transaction takes no memory. No I/O except spills; no clock.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from cdcpipe.ddl.message import subtransaction
from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.decode import decode, malformed
from cdcpipe.pgoutput.descriptions import RELATION_ID, Description, Descriptions, frame
from cdcpipe.pgoutput.held import XID, Data, HeldTransaction, HeldTransactions
from cdcpipe.pgoutput.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    LogicalMessage,
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

_BEGIN = struct.Struct(">cQqI")  # Byte1('B') Int64 final LSN, Int64 commit time, Int32 xid
_COMMIT = struct.Struct(">cBQQq")  # Byte1('C') Int8 flags, Int64 commit LSN, Int64 end LSN, Int64 commit time

_B, _C = b"BC"
_CHANGES = frozenset(b"IUDT")
_IDLE, _PLAIN, _PREPARING, _BLOCK, _SKIPPED = range(5)
_KINDS: Final = {
    _IDLE: (frozenset(b"BbScAKrpM"), "outside a transaction"),
    _PLAIN: (frozenset(b"IUDTMRYOC"), "inside a transaction"),
    _PREPARING: (frozenset(b"IUDTMRYOP"), "inside a transaction that is being prepared"),
    _BLOCK: (frozenset(b"IUDTMRYOE"), "inside a stream block"),
    _SKIPPED: (frozenset(b"IUDTMRYOC"), "inside a transaction"),
}
"""Which messages are allowed in which state."""


class Transactions:
    """`feed` takes the server's messages; `take` returns the records of committed transactions, with headers, as on the pipe.

    Raises ProtocolError for what the protocol does not allow. ``streaming_parallel`` as in `cdcpipe.pgoutput.decode`.
    Prepared transactions are held until they are committed, and are lost with this object. So no position after a PREPARE may be
    confirmed to the server before the COMMIT PREPARED is safe (see ``Progress.prepare``).

    What ended before ``start_lsn`` is dropped (`is_before_start`), as the server does with the position where a stream starts. But
    the server then also leaves out what was prepared before it. So a stream with prepared transactions starts at the slot's
    position, and drops the rest here.
    """

    def __init__(
        self,
        *,
        streaming_parallel: bool | None = False,
        spill_threshold: int = SPILL_THRESHOLD,
        make_spill: Callable[[], Spill] | None = None,
        start_lsn: int = 0,
    ) -> None:
        self._start_lsn = start_lsn
        self._streaming_parallel = streaming_parallel
        self._state = _IDLE
        self._held = HeldTransactions(spill_threshold, make_spill or Spills().open)
        self._current: HeldTransaction | None = None
        """The transaction of the open block, or the one that is being prepared."""
        self._output: deque[bytearray | Iterator[bytes]] = deque()
        self._committing: deque[HeldTransaction] = deque()
        self._descriptions = Descriptions()

    # Input

    def feed(self, wal_start: int, data: Data) -> None:
        """Take one message. ``wal_start`` comes from its WALData."""
        if self._state == _BLOCK and len(data) > XID.size and data[0] in _CHANGES:
            held = self._current
            assert held is not None
            if data[1 : XID.size] != held.last_xid:
                held.enter(data)
            # The same as HeldTransactions.keep, without a call for each change.
            held.buffer += encode_header(wal_start, len(data) - 4) + data[:1] + data[XID.size :]
            if len(held.buffer) > self._held.room:
                self._held.make_room(held)
            return
        data = bytes(data)
        try:
            kinds, where = _KINDS[self._state]
            if not data or data[0] not in kinds:
                raise malformed(data, 0, f"it does not belong here, {where}")
            if self._state in (_PLAIN, _SKIPPED):
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
        """Return True for a Begin or a Commit that `take` would return unchanged and at once: write it directly, don't feed it."""
        if self._output:
            return False
        if self._state == _IDLE and len(data) == _BEGIN.size and data[0] == _B:
            if self._start_lsn and self.is_before_start(_BEGIN.unpack(data)[1]):
                return False
            self._state = _PLAIN
            return True
        if self._state == _PLAIN and len(data) == _COMMIT.size and data[0] == _C and data[1] == 0:  # no flags
            self._state = _IDLE
            return True
        return False

    def is_before_start(self, commit_lsn: int) -> bool:
        """Whether a transaction with this commit record is dropped: the consumer has it from an earlier stream."""
        return commit_lsn < self._start_lsn

    def _feed_idle(self, wal_start: int, data: bytes) -> None:
        match message := decode(data, streaming_parallel=self._streaming_parallel):
            case Begin() if self.is_before_start(message.final_lsn):
                self._state = _SKIPPED
            case Begin():
                self._put(wal_start, data)
                self._state = _PLAIN
            case BeginPrepare():
                if message.gid in self._held.prepared:
                    raise ProtocolError(f"the server prepared the transaction {message.gid!r} twice")
                self._hold(_PREPARING, HeldTransaction(message.xid, wal_start))
                self._held.prepared[message.gid] = self._current_held
            case StreamStart():
                held = self._held.streamed.get(message.xid)
                if message.first_segment == (held is not None):
                    what = "first stream block came twice" if held is not None else "first stream block is missing"
                    raise ProtocolError(f"transaction {message.xid}: the {what}")
                if held is None:
                    held = self._held.streamed[message.xid] = HeldTransaction(message.xid, wal_start)
                self._hold(_BLOCK, held)
            case StreamCommit():
                self._commit(self._pop_streamed(message.xid), wal_start, message)
            case StreamAbort():
                self._abort(message)
            case StreamPrepare():
                if message.gid in self._held.prepared:
                    raise ProtocolError(f"the server prepared the transaction {message.gid!r} twice")
                self._held.prepared[message.gid] = self._pop_streamed(message.xid)
            case CommitPrepared():
                if message.gid not in self._held.prepared:
                    if self.is_before_start(message.commit_lsn):
                        return
                    raise ProtocolError(
                        f"the prepared transaction {message.gid!r} is committed, but its changes came in an earlier stream",
                        hint="the slot was confirmed after its PREPARE; or the slot did not send such transactions yet at its"
                        " PREPARE, and a standby of PostgreSQL 17 was promoted since: its tables have to be copied again",
                    )
                self._commit(self._held.prepared.pop(message.gid), wal_start, message)
            case RollbackPrepared():
                if message.gid in self._held.prepared:
                    self._held.prepared.pop(message.gid).close()
            case _:  # it is a logical message
                if data[1] & 1:
                    raise malformed(data, 1, "a transactional message can't come outside a transaction")
                if wal_start > self._start_lsn:
                    self._put(wal_start, data)

    def _feed_plain(self, wal_start: int, data: bytes) -> None:
        is_skipped = self._state == _SKIPPED
        match chr(data[0]):
            case "C":
                assert isinstance(decode(data), Commit)
                self._state = _IDLE
            case "R" if is_skipped:
                self._descriptions.record_sent(self._descriptions.add(data))
            case "R":
                self._descriptions.record_sent_and_written(self._descriptions.add(data))
            case "Y":
                self._descriptions.add_type(data)
            case "O":
                decode(data)
            case _ if not is_skipped:
                for relation_id in sorted(self._descriptions.stale):
                    description = self._descriptions.sent[relation_id]
                    self._put_records(description.records)
                    self._descriptions.record_written(description)
        if not is_skipped:
            self._put(wal_start, data)

    def _feed_preparing(self, wal_start: int, data: bytes) -> None:
        held = self._current_held
        match chr(data[0]):
            case "P":
                assert isinstance(decode(data), Prepare)
                self._release()
                return
            case "R":
                # From here on the server assumes that this description is known, even if the transaction rolls back.
                description = self._descriptions.add(data, held.size)
                held.describe(description)
                self._descriptions.record_sent(description)
            case "Y":
                self._descriptions.add_type(data)
            case "O":
                decode(data)
                held.origin = frame(wal_start, data)
                return
            case "M":
                pass
            case _:
                # Other descriptions may apply when it commits. So it keeps those that apply now.
                for relation_id in _relation_ids(data):
                    known = self._descriptions.sent.get(relation_id)
                    if known is not None and relation_id not in held.current:
                        held.describe(Description(relation_id, known.records, known.number, held.size))
                        held.buffer += known.records
        self._held.keep(held, frame(wal_start, data))

    def _feed_block(self, wal_start: int, data: bytes) -> None:
        held = self._current_held
        kind = data[:1]
        if kind == b"E":
            decode(data, in_stream=True)
            self._release()
            return
        if kind == b"O":
            decode(data, in_stream=True)
            held.origin = frame(wal_start, data)
            return
        if len(data) <= XID.size:
            raise malformed(data, len(data), "it is cut short")
        if data[1 : XID.size] != held.last_xid:
            held.enter(data)
        if kind == b"M":
            message = decode(data, in_stream=True)
            assert isinstance(message, LogicalMessage)
            if (xid := subtransaction(message.prefix, message.content)) is not None:
                held.starts.add(xid, held.size)
        data = kind + data[XID.size :]
        if kind == b"R":
            held.describe(self._descriptions.add(data, held.size))
        elif kind == b"Y":
            self._descriptions.add_type(data)
        self._held.keep(held, frame(wal_start, data))

    @property
    def block_xid(self) -> bytes | None:
        """The xid (as bytes of the message) whose changes `keep` takes; None if there is none.

        It is the xid of the last change in the open stream block. Most often the next record has it, too.
        """
        return self._current_held.last_xid if self._state == _BLOCK else None

    def keep(self, records: bytes) -> None:
        """Take changes of ``block_xid`` as records, with headers and without the xid, as `feed` would make them."""
        self._held.keep(self._current_held, records)

    # Held transactions

    @property
    def _current_held(self) -> HeldTransaction:
        assert self._current is not None
        return self._current

    def _hold(self, state: int, held: HeldTransaction) -> None:
        self._state = state
        self._current = held
        self._held.open(held)

    def _release(self) -> None:
        self._state = _IDLE
        self._current = None

    def _pop_streamed(self, xid: int) -> HeldTransaction:
        try:
            return self._held.streamed.pop(xid)
        except KeyError:
            raise ProtocolError(f"the streamed transaction {xid} ends, but none of its stream blocks came") from None

    def _abort(self, message: StreamAbort) -> None:
        held = self._held.streamed.get(message.xid)
        if held is None:
            # Some servers send this without a stream block before it.
            log.warning("the server rolled back transaction %d, of which it has sent nothing", message.xid)
        elif message.subxid == message.xid:
            del self._held.streamed[message.xid]
            held.close()
        else:
            held.cut(message.subxid)

    # Output

    @property
    def is_direct(self) -> bool:
        """Whether the caller may write changes directly, up to the next message of another kind: `take` would not change them."""
        return self._state == _PLAIN and not self._descriptions.stale

    @property
    def has_pending(self) -> bool:
        """Whether `take` has records to return."""
        return bool(self._output)

    def is_empty(self, key: int | str) -> bool:
        """Tell whether the streamed transaction with this xid, or the prepared one with this gid, has no record."""
        held = self._held.streamed.get(key) if isinstance(key, int) else self._held.prepared.get(key)
        return held is not None and held.size == 0

    def take(self, max_bytes: int) -> bytes:
        r"""Return the next records, each as ``w LSN LENGTH\n`` and its bytes; b"" if there are none.

        They exceed ``max_bytes`` by at most one piece. Records that do not belong to a held transaction are returned all at once.
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

    @property
    def sizes(self) -> tuple[int, int]:
        """How many bytes of transactions in progress are in memory, and how many in files. Another thread may ask."""
        return self._held.sizes()

    def close(self) -> None:
        """Drop all held transactions."""
        self._held.close()
        for held in self._committing:
            held.close()
        self._committing.clear()
        self._output.clear()

    def _put(self, wal_start: int, data: bytes) -> None:
        self._put_records(frame(wal_start, data))

    def _put_records(self, records: bytes) -> None:
        if self._output and isinstance(self._output[-1], bytearray):
            self._output[-1] += records
        else:
            self._output.append(bytearray(records))

    def _commit(self, held: HeldTransaction, wal_start: int, message: StreamCommit | CommitPrepared) -> None:
        """Queue the transaction for `take`, unless it has no records left: then the server would have sent nothing, either."""
        is_dropped = self.is_before_start(message.commit_lsn)
        if is_dropped:
            for description in held.current.values():
                self._descriptions.record_sent(description)
        if is_dropped or held.size == 0:
            held.close()
            return
        for description in held.current.values():
            self._descriptions.record_sent_and_written(description)
        commit = _COMMIT.pack(b"C", 0, message.commit_lsn, message.end_lsn, message.commit_time_us)
        self._put(held.wal_start, _BEGIN.pack(b"B", message.commit_lsn, message.commit_time_us, held.xid))
        self._put_records(held.origin)
        self._committing.append(held)
        self._output.append(self._pieces(held))
        self._put(wal_start, commit)

    def _pieces(self, held: HeldTransaction) -> Iterator[bytes]:
        yield from held.pieces()
        self._committing.remove(held)
        held.close()


def _relation_ids(data: bytes) -> tuple[int, ...]:
    """Return the ids of the relations of a change."""
    try:
        if data[0] == ord("T"):
            count = RELATION_ID.unpack_from(data)[0]
            if count > len(data) // 4:
                raise malformed(data, 1, f"{count} relations do not fit")
            return struct.unpack_from(f">{count}I", data, 6)
        return RELATION_ID.unpack_from(data)
    except struct.error:
        raise malformed(data, len(data), "it is cut short") from None
