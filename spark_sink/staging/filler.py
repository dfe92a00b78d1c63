"""From the pipe's bytes to segments: where to cut, and what to write so that each segment can be decoded alone. No I/O.

Bytes and times come in, operations come out: Write these bytes to the open segment, Cut it here, Discard it. The
invariant: the open segment holds whole transactions in commit order, or the beginning of a single one that is too large
to be held in memory. So a cut never has to move bytes, and when the stream breaks there is nothing to truncate.

A logical message outside of transactions counts as one by itself, which ends at the message's LSN.

A new segment begins without knowing any relation. The server describes one (Type records, then a Relation record) once
per connection, and again after whatever may have changed the relation; what it sent last is kept, and put in right before the
first record of a segment that needs it. Such a repetition has the LSN ``REPEATED_LSN`` in its header; the server's own has 0.

Nothing runs per record but numpy: boundaries (`record_scan`), kinds and relation ids are arrays over what one read brought.
Looked at singly are descriptions, truncates, and where one relation's changes follow another's, unless all are settled.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cdcpipe.errors import ProtocolError
from cdcpipe.lsn import format_lsn
from cdcpipe.pipe.framing import MAX_HEADER_BYTES, encode_header
from spark_sink.staging.scan import scan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["COMMIT", "MESSAGE_HEAD", "REPEATED_LSN", "Cut", "Discard", "Operation", "SealPolicy", "SegmentFiller", "Write"]

REPEATED_LSN: Final = 1
"""In the header of a Relation record that the server did not send there: no record of the server's has it."""

# "Byte1('C'), Int8 flags, Int64 LSN of the commit, Int64 end LSN of the transaction, Int64 commit timestamp"
COMMIT = struct.Struct(">cBQQQ")
# "Byte1('M'), Int8 flags (1: transactional), Int64 LSN of the message": the end of its WAL record
MESSAGE_HEAD = struct.Struct(">cBQ")
# "Byte1('T'), Int32 number of relations, Int8 option bits, Int32 OID of each"
_TRUNCATE_HEAD = struct.Struct(">cIB")

_ORDINARY_KINDS = b"BCIUDRYTOM"
"""What a stream of protocol version 1 consists of; transactions arrive whole and in commit order."""

# Not with possessive quantifiers: before Python 3.11.5 they don't match what they should.
_STREAM = re.compile(rb"(?:M|B[^BC]*C)*(B[^BC]*)?")
"""The kinds of its records from the beginning of a transaction on; the group is the transaction that has not ended."""

_ROW, _DESCRIPTIVE = 1, 2
_CLASS: Final = np.zeros(256, np.uint8)
_CLASS[list(b"IUD")] = _ROW
_CLASS[list(b"YRT")] = _DESCRIPTIVE
"""What a record of each kind may need before it, or give to those after it."""

_PASSED_ON_IN_PARTS = b"IUDM"
"""Kinds that may be large. All others are small and are looked at when they are whole."""

_LARGE_RECORD_BYTES = 1 << 20

_SHORTEST_ROW_BYTES = 5
"""Kind and relation id."""


@dataclass(frozen=True, slots=True)
class Write:
    """Append ``data`` to the open segment.

    A record begins at each of ``starts`` and ends at each of ``ends`` (int64); ``data`` begins at ``base`` in their count.
    """

    data: bytes
    starts: Array
    ends: Array
    base: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The open segment ends here and is to be sealed; the next begins."""

    start_lsn: int
    end_lsn: int
    size: int
    records: int
    transactions: int


@dataclass(frozen=True, slots=True)
class Discard:
    """The open segment holds a part of a transaction, the rest of which will not come: delete it."""


Operation = Write | Cut | Discard


@dataclass(frozen=True, slots=True)
class SealPolicy:
    """When a segment is to be sealed: once it is large enough, or its oldest transaction has waited long enough."""

    segment_bytes: int = 64 << 20
    seal_interval_s: float = 1.0
    held_bytes: int = 8 << 20
    """A transaction of which more than this came without its end begins a segment and goes to disk as it comes."""

    def is_due(self, size: int, since: float, now: float) -> bool:
        """Say whether a segment of ``size`` bytes whose first transaction came at ``since`` is to be sealed."""
        return size >= self.segment_bytes or now >= self.deadline(since)

    def deadline(self, since: float) -> float:
        """Return when a segment whose first transaction came at ``since`` is to be sealed, whatever its size."""
        return since + self.seal_interval_s


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
    """Takes the streamer's output and says what goes to which segment.

    ``start_lsn`` is where the log ends; transactions must end beyond it. After a ProtocolError the filler is of no use:
    what it had not cut is to be discarded, and sent again to a new one.
    """

    def __init__(self, start_lsn: int, policy: SealPolicy) -> None:
        self._policy = policy
        self._start_lsn = self._end_lsn = start_lsn
        # Of the stream: bytes that are no whole record yet, what is missing of a record that was passed on in parts.
        self._held = b""
        self._missing = 0
        self._message_lsn = 0  # of that record, if it is a message outside of transactions
        self._in_transaction = False
        self._tail: list[_Piece] = []  # of the transaction that has not ended
        self._tail_bytes = 0
        self._described_by: dict[int, bytes] = {}  # relation id -> its Type and Relation records, to be repeated
        self._type_records = b""  # those that the next Relation record refers to
        # Of the open segment.
        self._size = self._records = self._transactions = 0
        self._since: float | None = None  # when its first whole transaction came
        self._settled: set[int] = set()  # relations that are described in this segment

    @property
    def end_lsn(self) -> int:
        """The end of the last whole transaction taken."""
        return self._end_lsn

    @property
    def is_whole(self) -> bool:
        """Whether the stream could end here: nothing was taken of a record or a transaction without its end."""
        return not (self._held or self._missing or self._in_transaction)

    @property
    def deadline(self) -> float | None:
        """When ``tick`` has something to do, None if nothing waits."""
        return None if self._since is None else self._policy.deadline(self._since)

    def feed(self, data: bytes, now: float) -> list[Operation]:
        """Take the next bytes of the stream; raise ProtocolError for what is not a stream of whole transactions."""
        operations: list[Operation] = []
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
        if (starts == ends).any():
            raise _unexpected(b"", 0)
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
        operations += self.tick(now)
        if next_pos > pos:
            self._add_to_tail(piece)
        self._held = buffer[next_pos:]
        self._pass_on_large_record()
        if self._tail_bytes > self._policy.held_bytes:
            if self._since is not None:
                operations.append(self._cut())
            self._append_tail(operations)
        return operations

    def tick(self, now: float) -> list[Operation]:
        """Cut the open segment if that is due."""
        if self._since is not None and self._policy.is_due(self._size, self._since, now):
            return [self._cut()]
        return []

    def finish(self) -> list[Operation]:
        """End the stream, whole or broken: cut after the last whole transaction, forget the rest.

        The next ``feed`` begins another stream, which describes its relations anew.
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
        """Return how many of the next records, of these kinds, belong to transactions that are whole with them."""
        opened = b"B" * self._in_transaction
        match = _STREAM.fullmatch(opened + kinds)
        if match is None:
            msg = "the stream does not consist of whole transactions: Begin and Commit do not alternate, or a change is outside"
            raise ProtocolError(msg)
        self._in_transaction = match[1] is not None
        return max(0, (match.start(1) if self._in_transaction else match.end()) - len(opened))

    def _end_of(self, record: bytes) -> int:
        """Return where a transaction ends, from its Commit, or a message outside of transactions; raise if that was passed."""
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
            msg = f"a {what} that ends at {format_lsn(end_lsn)} came when {format_lsn(self._end_lsn)} was passed"
            raise ProtocolError(msg, hint="was the slot made anew, or moved back, or is it another server's?")
        return int(end_lsn)

    def _wait_from(self, now: float) -> None:
        """Note when the first transaction of the open segment came."""
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
        """Move a record that is larger than one read from what is held to the tail, so that it does not grow in memory."""
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
        """Add a piece to the open segment, with the descriptions that it lacks there."""
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
        """Return the numbers of the records to be looked at: descriptive ones, and those that may need a description."""
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
        is_other = np.ones(len(row), np.bool_)  # than that of the change before
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
        """Look at one record: learn what it describes, return the descriptions that have to stand before it."""
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
                msg = f"a {kind.decode()} record of relation {relation_id}, which was never described"
                raise ProtocolError(msg)
            self._settled.add(relation_id)
        return b"".join(self._described_by[relation_id] for relation_id in missing)


_NONE: Final = np.zeros(0, np.int64)


def _unexpected(kind: bytes, count: int) -> ProtocolError:
    what = f"records of kind {kind!r} ({count} of them)" if kind else "an empty record"
    return ProtocolError(
        f"the streamer sent {what}; a staging log takes pgoutput's protocol version 1",
        hint="are cdcpipe and cdcpipe-spark of the same version?",
    )
