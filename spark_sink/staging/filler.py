"""Cuts the stream from the pipe into segments that can be decoded alone. No I/O.

Bytes and times come in, operations come out: Write these bytes to the open segment, Cut it here, Discard it; the server is Idle.
The open segment always contains whole transactions in commit order, or the beginning of a single transaction that is too large for
memory. So a cut never moves bytes, and a broken stream leaves nothing to truncate. A logical message outside of transactions counts
as a transaction that ends at the message's LSN. An empty record is no part of a segment: with it the streamer says that it has sent
every change up to an LSN (``--idle-positions``).

Each segment has to describe its relations itself. The server describes a relation (Type records, then a Relation record) once per
connection, and again after a possible change. The filler keeps the last description, and writes it before the first record of a
segment that needs it. Such a repeated description has the LSN ``REPEATED_LSN`` in its header; the server's own has 0.

The filler works on numpy arrays over one read: record boundaries (`scan`), kinds and relation ids. Python code looks at single
records only where it must: at descriptions, at truncates, and where the relation changes from one change to the next, unless the
open segment has described all these relations already.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cdcpipe.errors import ProtocolError
from cdcpipe.lsn import format_lsn
from cdcpipe.pipe.framing import MAX_HEADER_BYTES, RecordReader, encode_header
from spark_sink.staging.scan import scan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["COMMIT", "MESSAGE_HEAD", "REPEATED_LSN", "Cut", "Discard", "Idle", "Operation", "SealPolicy", "SegmentFiller", "Write"]

REPEATED_LSN: Final = 1
"""The LSN in the header of a repeated Relation record. The server sends no record with this LSN."""

# "Byte1('C'), Int8 flags, Int64 LSN of the commit, Int64 end LSN of the transaction, Int64 commit timestamp"
COMMIT = struct.Struct(">cBQQQ")
# "Byte1('M'), Int8 flags (1: transactional), Int64 LSN of the message": the end of its WAL record
MESSAGE_HEAD = struct.Struct(">cBQ")
# "Byte1('T'), Int32 number of relations, Int8 option bits, Int32 OID of each"
_TRUNCATE_HEAD = struct.Struct(">cIB")

_ORDINARY_KINDS = b"BCIUDRYTOM"
"""The kinds of records in a stream of protocol version 1. Transactions arrive whole and in commit order."""

# No possessive quantifiers: before Python 3.11.5 they have a bug.
_STREAM = re.compile(rb"(?:M|B[^BC]*C)*(B[^BC]*)?")
"""Matches the kinds of a stream's records from the beginning of a transaction. The group is the transaction that has not ended."""

_ROW, _DESCRIPTIVE = 1, 2
_CLASS: Final = np.zeros(256, np.uint8)
_CLASS[list(b"IUD")] = _ROW
_CLASS[list(b"YRT")] = _DESCRIPTIVE
"""By kind: a row needs a description before it; a descriptive record may give one to later records. All others are 0."""

_PASSED_ON_IN_PARTS = b"IUDM"
"""Kinds whose records may be large. Records of other kinds are small; the filler waits until they are whole."""

_LARGE_RECORD_BYTES = 1 << 20

_SHORTEST_ROW_BYTES = 5
"""Kind and relation id."""


@dataclass(frozen=True, slots=True)
class Write:
    """Append ``data`` to the open segment.

    The records in it begin at ``starts`` and end at ``ends`` (int64). Both count from a place ``base`` bytes before ``data``.
    """

    data: bytes
    starts: Array
    ends: Array
    base: int


@dataclass(frozen=True, slots=True)
class Cut:
    """End the open segment here, to be sealed, and begin the next one."""

    start_lsn: int
    end_lsn: int
    size: int
    records: int
    transactions: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Delete the open segment: it has a part of a transaction whose rest will not come."""


@dataclass(frozen=True, slots=True)
class Idle:
    """The server has sent every published change up to ``lsn``. It may be confirmed once the open segment is sealed."""

    lsn: int


Operation = Write | Cut | Discard | Idle


@dataclass(frozen=True, slots=True)
class SealPolicy:
    """When to seal a segment: once it is large enough, or its first transaction has waited long enough."""

    segment_bytes: int = 64 << 20
    seal_interval_s: float = 1.0
    held_bytes: int = 8 << 20
    """A transaction larger than this gets its own segment, and goes to disk while it arrives."""
    backlog_interval_s: float = 2.0
    """The least seal interval while the stream has changes from before its start. They are old, and fewer segments cost less."""

    def is_due(self, size: int, since: float, now: float, *, is_backlog: bool = False) -> bool:
        """Tell whether to seal a segment of ``size`` bytes whose first transaction came at ``since``."""
        return size >= self.segment_bytes or now >= self.deadline(since, is_backlog=is_backlog)

    def deadline(self, since: float, *, is_backlog: bool = False) -> float:
        """Return when to seal a segment whose first transaction came at ``since``, whatever its size."""
        return since + (max(self.seal_interval_s, self.backlog_interval_s) if is_backlog else self.seal_interval_s)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive bytes of one buffer, ``begin:end``, and the records that begin in them: boundaries and kinds."""

    buffer: bytes
    begin: int
    end: int
    starts: Array
    ends: Array
    kinds: bytes

    def part(self, begin: int, end: int, records: slice) -> _Piece:
        """Return ``begin:end`` with the ``records`` in it."""
        return _Piece(self.buffer, begin, end, self.starts[records], self.ends[records], self.kinds[records])


class SegmentFiller:
    """Takes the streamer's output, and returns the operations that write it to segments.

    ``start_lsn`` is the end of the log; transactions must end beyond it. Those that end before ``backlog_lsn`` had committed before
    the stream began. After a ProtocolError, discard the open segment and use a new filler, to which the server's next stream goes.
    """

    def __init__(self, start_lsn: int, policy: SealPolicy, backlog_lsn: int = 0) -> None:
        self._policy = policy
        self._backlog_lsn = backlog_lsn
        self._start_lsn = self._end_lsn = start_lsn
        # State of the stream: the bytes of an incomplete record, or how many bytes are missing of a record passed on in parts.
        self._held = b""
        self._missing = 0
        self._message_lsn = 0  # of the record passed on in parts, if it is a message outside of transactions
        self._in_transaction = False
        self._tail: list[_Piece] = []  # the transaction that has not ended
        self._tail_bytes = 0
        self._described_by: dict[int, bytes] = {}  # relation id -> its Type and Relation records, to repeat
        self._type_records = b""  # the Type records for the next Relation record
        # Of the open segment.
        self._size = self._records = self._transactions = 0
        self._since: float | None = None  # when its first whole transaction came
        self._settled: set[int] = set()  # relations that are described in this segment

    @property
    def end_lsn(self) -> int:
        """The end of the last whole transaction."""
        return self._end_lsn

    @property
    def is_whole(self) -> bool:
        """Whether the stream could end here: no record and no transaction is incomplete."""
        return not (self._held or self._missing or self._in_transaction)

    @property
    def deadline(self) -> float | None:
        """When ``tick`` has to cut the open segment; None if it has no transaction."""
        return None if self._since is None else self._policy.deadline(self._since, is_backlog=self._is_backlog)

    @property
    def _is_backlog(self) -> bool:
        return self._end_lsn < self._backlog_lsn

    def feed(self, data: bytes, now: float) -> list[Operation]:
        """Take the next bytes of the stream. Raises ProtocolError if they are not a stream of whole transactions."""
        operations: list[Operation] = []
        while data:
            data = self._feed_until_idle(data, now, operations)
        return operations

    def _feed_until_idle(self, data: bytes, now: float, operations: list[Operation]) -> bytes:
        """Take the bytes up to the first empty record, the streamer's word that it is idle. Returns the bytes after it."""
        pos = 0
        if self._missing:
            pos = min(self._missing, len(data))
            self._missing -= pos
            self._add_to_tail(_Piece(data, 0, pos, _NONE, _NONE, b""))
            if not self._missing and not self._in_transaction:
                self._end_lsn = self._message_lsn
                self._append_tail(operations)
                self._wait_from(now)
        buffer = self._held + data if self._held else data
        starts, ends, next_pos = scan(buffer, pos)
        empty = np.flatnonzero(starts == ends)
        if len(empty):
            i = int(empty[0])
            header_pos = int(ends[i - 1]) if i else pos
            self._held = b""
            if header_pos > pos:
                self._feed_until_idle(buffer[pos:header_pos], now, operations)
            operations.append(self._idle(buffer[header_pos : ends[i]]))
            return buffer[ends[i] :]
        kinds = np.frombuffer(buffer, np.uint8)[starts].tobytes()
        if unknown := kinds.translate(None, _ORDINARY_KINDS):
            raise _unexpected(unknown[:1], kinds.count(unknown[:1]))
        piece = _Piece(buffer, pos, next_pos, starts, ends, kinds)
        first_end = kinds.find(b"C") if self._in_transaction or not kinds.startswith(b"M") else 0
        if count := self._count_whole(kinds):
            for i in sorted({first_end, count - 1}):
                self._end_lsn = self._end_of(buffer[starts[i] : ends[i]])
            pos = int(ends[count - 1])
            self._append_tail(operations)
            self._append(piece.part(piece.begin, pos, slice(count)), operations)
            self._transactions += kinds.count(b"C")
            self._wait_from(now)
            piece = piece.part(pos, next_pos, slice(count, None))
        operations.extend(self.tick(now))
        if next_pos > pos:
            self._add_to_tail(piece)
        self._held = buffer[next_pos:]
        self._pass_on_large_record()
        if self._tail_bytes > self._policy.held_bytes:
            if self._since is not None:
                operations.append(self._cut())
            self._append_tail(operations)
        return b""

    def _idle(self, data: bytes) -> Idle:
        if self._in_transaction:
            msg = "the streamer sent an empty record amid a transaction"
            raise ProtocolError(msg)
        reader = RecordReader()
        reader.feed(data)
        ((lsn, _),) = reader
        return Idle(lsn)

    def tick(self, now: float) -> list[Operation]:
        """Cut the open segment if it is due."""
        if self._since is not None and self._policy.is_due(self._size, self._since, now, is_backlog=self._is_backlog):
            return [self._cut()]
        return []

    def finish(self) -> list[Operation]:
        """End the stream, also a broken one: cut after the last whole transaction, drop the rest.

        The next ``feed`` begins another stream, which describes its relations again.
        """
        self._held, self._missing, self._in_transaction = b"", 0, False
        self._tail, self._tail_bytes = [], 0
        self._described_by.clear()
        self._type_records = b""
        if self._since is not None:
            return [self._cut()]
        if self._size:
            self._begin_segment()
            return [Discard()]
        return []

    def _count_whole(self, kinds: bytes) -> int:
        """Return how many of the next records, whose kinds are ``kinds``, complete the last whole transaction among them."""
        opened = b"B" * self._in_transaction
        match = _STREAM.fullmatch(opened + kinds)
        if match is None:
            msg = "the stream has broken transactions: Begin and Commit do not alternate, or a change is outside of a transaction"
            raise ProtocolError(msg)
        self._in_transaction = match[1] is not None
        return max(0, (match.start(1) if self._in_transaction else match.end()) - len(opened))

    def _end_of(self, record: bytes) -> int:
        """Return the end LSN from a Commit record, or from a message outside of transactions.

        Raises ProtocolError if the stream has passed this LSN already.
        """
        is_commit = record.startswith(b"C")
        layout = COMMIT if is_commit else MESSAGE_HEAD
        if len(record) < layout.size or (is_commit and len(record) > layout.size):
            msg = f"a {'Commit' if is_commit else 'Message'} record of {len(record)} bytes"
            raise ProtocolError(msg)
        _, flags, *_, end_lsn = layout.unpack_from(record)[:4]
        if not is_commit and flags & 1:
            msg = "a transactional message came outside of a transaction"
            raise ProtocolError(msg)
        if end_lsn <= self._end_lsn:
            what = "transaction" if is_commit else "message"
            passed = format_lsn(self._end_lsn)
            msg = f"the server sent a {what} that ends at {format_lsn(end_lsn)} after the stream had passed {passed}"
            raise ProtocolError(msg, hint="was the slot recreated, or moved back? Is it the slot of another server?")
        return int(end_lsn)

    def _wait_from(self, now: float) -> None:
        """Remember ``now`` as the time of the open segment's first transaction, unless one came before."""
        if self._since is None:
            self._since = now

    def _add_to_tail(self, piece: _Piece) -> None:
        self._tail.append(piece)
        self._tail_bytes += piece.end - piece.begin

    def _append_tail(self, operations: list[Operation]) -> None:
        for piece in self._tail:
            self._append(piece, operations)
        self._tail, self._tail_bytes = [], 0

    def _pass_on_large_record(self) -> None:
        """Move the bytes of a large incomplete record from ``_held`` to the tail, so that they can go to disk."""
        if len(self._held) <= _LARGE_RECORD_BYTES:
            return
        start = self._held.find(b"\n", 0, MAX_HEADER_BYTES) + 1
        if self._held[start] not in _PASSED_ON_IN_PARTS:
            return
        if not self._in_transaction:
            self._count_whole(self._held[start : start + 1])
            self._message_lsn = self._end_of(self._held[start : start + MESSAGE_HEAD.size])
        end = start + int(self._held[:start].split(b" ")[2])
        self._missing = end - len(self._held)
        kind = self._held[start : start + 1]
        self._add_to_tail(_Piece(self._held, 0, len(self._held), np.array([start]), np.array([end]), kind))
        self._held = b""

    def _begin_segment(self) -> None:
        self._start_lsn = self._end_lsn
        self._size = self._records = self._transactions = 0
        self._since = None
        self._settled = set()

    def _cut(self) -> Cut:
        cut = Cut(self._start_lsn, self._end_lsn, self._size, self._records, self._transactions)
        self._begin_segment()
        return cut

    def _append(self, piece: _Piece, operations: list[Operation]) -> None:
        """Add a piece to the open segment, and before its records the descriptions that the segment lacks."""
        self._records += len(piece.starts)
        pos, first = piece.begin, 0
        for i in self._unsettled(piece):
            header_pos = int(piece.ends[i - 1]) if i else piece.begin
            description = self._describe(piece, i, header_pos)
            if description:
                self._write(piece.part(pos, header_pos, slice(first, i)), operations)
                starts, ends, _ = scan(description)
                self._write(_Piece(description, 0, len(description), starts, ends, b""), operations)
                self._records += len(starts)
                pos, first = header_pos, i
        self._write(piece.part(pos, piece.end, slice(first, None)), operations)

    def _unsettled(self, piece: _Piece) -> list[int]:
        """Return the indexes of the records to look at: descriptive ones, and those that may need a description."""
        classes = _CLASS[np.frombuffer(piece.kinds, np.uint8)]
        row = np.flatnonzero(classes == _ROW)
        descriptive = np.flatnonzero(classes == _DESCRIPTIVE).tolist()
        if not len(row):
            return descriptive
        if (piece.ends[row] - piece.starts[row]).min() < _SHORTEST_ROW_BYTES:
            msg = "a change without a relation"
            raise ProtocolError(msg)
        view = np.ndarray(len(piece.buffer) - 3, ">u4", piece.buffer, strides=(1,))
        relation_id = view[piece.starts[row] + 1]
        is_other = np.ones(len(row), np.bool_)  # whether the relation differs from that of the change before
        np.not_equal(relation_id[1:], relation_id[:-1], out=is_other[1:])
        if not descriptive and self._settled.issuperset(relation_id[is_other].tolist()):
            return []
        return sorted(descriptive + row[is_other].tolist())

    def _write(self, piece: _Piece, operations: list[Operation]) -> None:
        size = piece.end - piece.begin
        if size:
            data = piece.buffer if size == len(piece.buffer) else piece.buffer[piece.begin : piece.end]
            operations.append(Write(data, piece.starts, piece.ends, piece.begin))
            self._size += size

    def _describe(self, piece: _Piece, i: int, header_pos: int) -> bytes:
        """Look at one record: learn the description in it, and return the descriptions that have to come before it."""
        kind, start, end = piece.kinds[i : i + 1], int(piece.starts[i]), int(piece.ends[i])
        relation_id = int.from_bytes(piece.buffer[start + 1 : start + 5])
        if kind == b"Y":
            self._type_records += piece.buffer[header_pos:end]
            return b""
        if kind == b"R":
            self._described_by[relation_id] = (
                self._type_records + encode_header(REPEATED_LSN, end - start) + piece.buffer[start:end]
            )
            self._type_records = b""
            self._settled.add(relation_id)
            return b""
        relation_ids = [relation_id]
        if kind == b"T":
            relation_ids = list(map(int.from_bytes, re.findall(rb"(?s)....", piece.buffer[start + _TRUNCATE_HEAD.size : end])))
        missing = [relation_id for relation_id in relation_ids if relation_id not in self._settled]
        for relation_id in missing:
            if relation_id not in self._described_by:
                msg = f"a {kind.decode()} record of relation {relation_id}, which the stream did not describe"
                raise ProtocolError(msg)
            self._settled.add(relation_id)
        return b"".join(self._described_by[relation_id] for relation_id in missing)


_NONE: Final = np.zeros(0, np.int64)


def _unexpected(kind: bytes, count: int) -> ProtocolError:
    return ProtocolError(
        f"the streamer sent records of kind {kind!r} ({count} of them); a staging log accepts only pgoutput's protocol version 1",
        hint="are cdcpipe and cdcpipe-spark of the same version?",
    )
