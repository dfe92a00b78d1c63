"""Finds where transactions begin and end in a stream of records, for any output plugin.

`Progress` needs this to decide which positions may be confirmed. A tracker looks at each record as it passes, reports to
``Progress``, and changes nothing. The tracker for pgoutput is exact. For plugins with a known text format, a tracker recognizes a
transaction by the beginning of its first and last record. For any other plugin every record counts as an end. Then the positions
are as exact as the consumer's feedback. (A whole transaction of wal2json says where it ends.)

Source: the manual, "Logical Replication Message Formats". The header LSN of a Commit is the end of the transaction. The header LSN
of a logical message is the end of its WAL record.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Mapping

from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import CommitPrepared, Prepare, RollbackPrepared, StreamPrepare
from cdcpipe.pgoutput.options import setting
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.pipe.output import EndOfRecord
from cdcpipe.replication.progress import Progress

__all__ = [
    "ROW_KINDS",
    "BoundaryTracker",
    "NextLsnTracker",
    "PgoutputTracker",
    "RecordTracker",
    "TextTracker",
    "WholeTracker",
    "tracker_for",
]

ROW_KINDS = frozenset(b"IUDTROY")
"""Kinds of pgoutput's messages that begin and end no transaction. The loop does not show them to the tracker."""

_FINAL_LSN = struct.Struct(">xQ")  # Begin: Byte1('B') Int64 final_lsn …
_COMMIT = struct.Struct(">xBQQq")  # Commit: Byte1('C') Int8 flags Int64 commit_lsn Int64 end_lsn Int64 time
_PREPARED = struct.Struct(">xBQQqI")  # Prepare: Byte1('P') Int8 flags Int64 Int64 Int64 Int32 xid …; 'p', 'K' alike, 'r' is longer
_XID = struct.Struct(">xI")  # Stream Start: Byte1('S') Int32 xid …
_STREAM_COMMIT = struct.Struct(">xIBQ")  # Stream Commit: Byte1('c') Int32 xid Int8 flags Int64 commit_lsn …
_XID_SUBXID = struct.Struct(">xII")  # Stream Abort: Byte1('A') Int32 xid Int32 subxid …

_NEXT_LSN = re.compile(rb'\{\s*(?:"xid":\s*\d+,\s*)?"nextlsn":\s*"([0-9A-Fa-f]+)/([0-9A-Fa-f]+)"')
_NEXT_LSN_BYTES = 100


class BoundaryTracker:
    """The base class of the trackers. It keeps the ends since the last ``take``, and the position at which to stop.

    The stream leaves out transactions that commit at or after ``end_position`` (None: no end). ``is_finished`` becomes True once
    every transaction that committed before it has passed.
    """

    row_kinds: frozenset[int] = frozenset()
    """Records that begin with one of these bytes need not be passed to ``observe``."""

    def __init__(self, progress: Progress, end_position: int | None = None) -> None:
        self.progress = progress
        self.end_position = float("inf") if end_position is None else end_position
        self.is_finished = False
        self.commit_lsn = 0
        """Where the open transaction commits, if its first record says so; otherwise 0."""
        self.transactions = 0
        """How many transactions have ended; with a plugin whose records do not tell, how many records. Messages do not count. A raw
        two-phase transaction ends twice: with its PREPARE, and when it is committed or rolled back."""
        self._ends: list[int] = []

    def observe(self, wal_start: int, data: bytes | memoryview) -> bool:
        """Look at a record before it is passed on. Return True if it lies beyond the end position and must not be passed on."""
        raise NotImplementedError

    def keepalive(self, wal_end: int) -> None:
        """Note that the server has sent everything up to ``wal_end``."""
        if wal_end >= self.end_position and not self.progress.in_unstreamed_transaction:
            self.is_finished = True

    def take(self) -> list[int]:
        """Return the ends of transactions, and of records outside of transactions, since the last call."""
        taken = self._ends
        if taken:
            self._ends = []
        return taken

    def _end(self, lsn: int, xid: int = 0) -> None:
        self.progress.end(lsn, xid)
        self.transactions += 1
        self._note_end(lsn)

    def _message(self, lsn: int) -> None:
        self.progress.message(lsn)
        self._note_end(lsn)

    def _note_end(self, lsn: int) -> None:
        self._ends.append(lsn)
        if lsn >= self.end_position and not self.progress.in_unstreamed_transaction:
            self.is_finished = True


class PgoutputTracker(BoundaryTracker):
    """The tracker for pgoutput. It reads only the kinds, xids and positions of messages."""

    row_kinds = ROW_KINDS

    def __init__(self, progress: Progress, end_position: int | None = None) -> None:
        super().__init__(progress, end_position)
        self._in_block = False

    def observe(self, wal_start: int, data: bytes | memoryview) -> bool:
        """Look at a message. Raises ProtocolError if the message is cut short, or has a kind that pgoutput does not define."""
        kind = chr(data[0]) if len(data) else ""
        try:
            match kind:
                case "B":
                    commit_lsn = _FINAL_LSN.unpack_from(data)[0]
                    if commit_lsn >= self.end_position:
                        self.is_finished = True
                        return True
                    self.commit_lsn = commit_lsn
                    self.progress.begin()
                case "b":
                    self.progress.begin()
                case "C":
                    _COMMIT.unpack_from(data)
                    self.commit_lsn = 0
                    self._end(wal_start)
                case "P" | "K" | "r":
                    _PREPARED.unpack_from(data)
                    self._end(wal_start)
                case "S":
                    self._in_block = True
                    self.progress.begin(_XID.unpack_from(data)[0])
                case "E":
                    self._in_block = False
                case "c":
                    xid, _, commit_lsn = _STREAM_COMMIT.unpack_from(data)
                    if commit_lsn >= self.end_position:
                        self.is_finished = True
                        return True
                    self._end_streamed(wal_start, xid)
                case "p":
                    self._end(wal_start, _PREPARED.unpack_from(data)[-1])
                case "A":
                    xid, subxid = _XID_SUBXID.unpack_from(data)
                    if xid == subxid:
                        self.progress.abort(xid)
                case "M":
                    # Byte1('M'), in a stream block Int32 xid, Int8 flags (1: transactional) …
                    if not self._in_block and not data[1] & 1:
                        if wal_start > self.end_position:
                            self.is_finished = True
                            return True
                        self._message(wal_start)
                case _ if len(data) and data[0] in ROW_KINDS:
                    pass
                case _:
                    what = f"pgoutput has no message of kind {kind!r} ({len(data)} bytes)"
                    raise _error(what, wal_start, "the server is newer than this program, or the slot's plugin is not pgoutput")
        except (struct.error, IndexError):
            raise _error(f"pgoutput message {kind!r} is cut short: {len(data)} bytes", wal_start) from None
        return False

    def _end_streamed(self, lsn: int, xid: int) -> None:
        self._end(lsn, xid)


class WholeTracker(PgoutputTracker):
    """The tracker for pgoutput if `Transactions` assembles whole transactions between the server and the consumer.

    It sees each message before `Transactions` does. A transaction without changes ends without a record, so the consumer can't
    confirm it. Neither can it confirm what `Transactions` drops. A prepared transaction counts only with its commit.
    """

    row_kinds = frozenset(b"IUDT")

    def __init__(self, progress: Progress, end_position: int | None, transactions: Transactions) -> None:
        super().__init__(progress, end_position)
        self._transactions = transactions
        self._is_dropped = False

    def _drops(self, wal_start: int, data: bytes | memoryview) -> bool:
        """Tell whether the message begins, ends or is something that ended before the start of the stream."""
        is_before_start = self._transactions.is_before_start
        match chr(data[0]):
            case "B":
                self._is_dropped = is_before_start(_FINAL_LSN.unpack_from(data)[0])
                return self._is_dropped
            case "C" if self._is_dropped:
                self._is_dropped = False
                return True
            case "c":
                xid, _, commit_lsn = _STREAM_COMMIT.unpack_from(data)
                if is_before_start(commit_lsn):
                    self.progress.abort(xid)
                return is_before_start(commit_lsn)
            case "M":
                return not self._in_block and not data[1] & 1 and is_before_start(wal_start - 1)
        return False

    def observe(self, wal_start: int, data: bytes | memoryview) -> bool:
        """Look at a message. Identifies prepared transactions by gid and position; otherwise as `PgoutputTracker`."""
        if not len(data) or data[0] not in b"PpKr":
            with contextlib.suppress(struct.error, IndexError):  # it is cut short
                if self._drops(wal_start, data):
                    return False
            return super().observe(wal_start, data)
        try:
            message = decode(data)
        except ProtocolError as ex:
            ex.locate(wal_start)
            raise
        match message:
            case Prepare() | StreamPrepare():
                self.progress.prepare(message.xid, message.prepare_lsn)
            case CommitPrepared() if message.commit_lsn >= self.end_position:
                self.is_finished = True
                return True
            case CommitPrepared():
                self.progress.commit_prepared(message.xid, wal_start)
                if not self._transactions.is_empty(message.gid) and not self._transactions.is_before_start(message.commit_lsn):
                    self._end(wal_start, message.xid)
            case RollbackPrepared():
                self.progress.forget_prepared(message.xid)
        return False

    def _end_streamed(self, lsn: int, xid: int) -> None:
        if self._transactions.is_empty(xid):
            self.progress.abort(xid)
        else:
            super()._end_streamed(lsn, xid)


class TextTracker(BoundaryTracker):
    """The tracker for plugins that write a record for each begin and end, recognized by their first bytes.

    As for raw pgoutput, a PREPARE is an end: the consumer has the changes. So is what becomes of the transaction later.
    """

    def __init__(self, progress: Progress, end_position: int | None, begin: bytes, ends: tuple[bytes, ...]) -> None:
        super().__init__(progress, end_position)
        self._begin, self._end_texts = begin, ends
        self._longest = max(map(len, (begin, *ends)))

    def observe(self, wal_start: int, data: bytes | memoryview) -> bool:
        """Look at a record: a begin, an end, a change, or a message outside of transactions."""
        head = bytes(data[: self._longest])
        if head.startswith(self._begin):
            self.progress.begin()
        elif head.startswith(self._end_texts):
            self._end(wal_start)
        elif not self.progress.in_transaction:
            self._message(wal_start)
        return False


class RecordTracker(BoundaryTracker):
    """The tracker for plugins that write one record per transaction, and for unknown plugins. Every record counts as an end."""

    def observe(self, wal_start: int, data: bytes | memoryview) -> bool:
        """Look at a record. As in pg_recvlogical, the stream ends before the first record that begins after the end position."""
        if wal_start > self.end_position:
            self.is_finished = True
            return True
        self._record(wal_start, data)
        return False

    def _record(self, wal_start: int, data: bytes | memoryview) -> None:  # noqa: ARG002 - what is in it is not known
        self.progress.message(wal_start, is_end=False)
        self.transactions += 1
        self._note_end(wal_start)


class NextLsnTracker(RecordTracker):
    """The tracker for wal2json's version 1 with ``include-lsn``, which writes a transaction as one record.

    The record's position is that of the transaction's first change. Its member ``nextlsn`` is where the transaction ends.
    """

    def _record(self, wal_start: int, data: bytes | memoryview) -> None:
        match = _NEXT_LSN.match(bytes(data[:_NEXT_LSN_BYTES]))
        if match is None:  # a message that is not transactional
            super()._record(wal_start, data)
            return
        self._end(EndOfRecord.of(int(match[1], 16) << 32 | int(match[2], 16), wal_start))


def tracker_for(
    plugin: str,
    options: Mapping[str, str | None],
    progress: Progress,
    end_position: int | None,
    transactions: Transactions | None = None,
) -> BoundaryTracker:
    """Return the tracker for a slot's output plugin, which the server runs with these options."""
    if plugin == "pgoutput":
        return (
            PgoutputTracker(progress, end_position) if transactions is None else WholeTracker(progress, end_position, transactions)
        )
    if plugin == "test_decoding":
        return TextTracker(progress, end_position, b"BEGIN", (b"COMMIT", b"PREPARE TRANSACTION", b"ROLLBACK PREPARED"))
    has_transactions = setting({"include-transaction": "on", **options}, "include-transaction") == "on"
    if plugin == "wal2json" and options.get("format-version") == "2" and has_transactions:
        return TextTracker(progress, end_position, b'{"action":"B"', (b'{"action":"C"',))
    if plugin == "wal2json" and options.get("format-version") != "2" and setting(options, "write-in-chunks") == "off":
        return NextLsnTracker(progress, end_position)
    return RecordTracker(progress, end_position)


def _error(what: str, wal_start: int, hint: str | None = None) -> ProtocolError:
    error = ProtocolError(what, hint=hint)
    error.locate(wal_start)
    return error
