"""Where transactions begin and end in a stream of records, whichever output plugin wrote them.

What may be confirmed depends on it (see ``progress``). A tracker looks at records as they pass and tells ``Progress``; it changes
nothing. pgoutput's is exact. For the plugins whose text we know, a transaction is recognised by how its first and last records
begin. For any other plugin every record counts as an end: feedback is then as exact as the consumer's.

Source: the manual, "Logical Replication Message Formats"; the header LSN of a Commit is the end of the transaction, that of a
logical message the end of its record.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import CommitPrepared, Prepare, RollbackPrepared, StreamPrepare
from cdcpipe.pgoutput.options import setting
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.replication.progress import Progress

__all__ = ["ROW_KINDS", "BoundaryTracker", "PgoutputTracker", "RecordTracker", "TextTracker", "WholeTracker", "tracker_for"]

ROW_KINDS = frozenset(b"IUDTROY")
"""pgoutput's messages that begin and end nothing; the loop does not show them to the tracker."""

_FINAL_LSN = struct.Struct(">xQ")  # Begin: Byte1('B') Int64 final_lsn …
_COMMIT = struct.Struct(">xBQQq")  # Commit: Byte1('C') Int8 flags Int64 commit_lsn Int64 end_lsn Int64 time
_PREPARED = struct.Struct(">xBQQqI")  # Prepare: Byte1('P') Int8 flags Int64 Int64 Int64 Int32 xid …; 'p', 'K' alike, 'r' is longer
_XID = struct.Struct(">xI")  # Stream Start: Byte1('S') Int32 xid …
_STREAM_COMMIT = struct.Struct(">xIBQ")  # Stream Commit: Byte1('c') Int32 xid Int8 flags Int64 commit_lsn …
_XID_SUBXID = struct.Struct(">xII")  # Stream Abort: Byte1('A') Int32 xid Int32 subxid …


class BoundaryTracker:
    """What the trackers share: the ends met since the last ``take``, and the position at which to stop.

    ``end_position``: nothing that committed at or after it is wanted (None: no end). ``is_finished`` becomes true once every
    transaction that committed before it has passed.
    """

    row_kinds: frozenset[int] = frozenset()
    """First bytes of records that need not be shown to ``observe``."""

    def __init__(self, progress: Progress, end_position: int | None = None) -> None:
        self.progress = progress
        self.end_position = float("inf") if end_position is None else end_position
        self.is_finished = False
        self._ends: list[int] = []

    def observe(self, wal_start: int, data: bytes | memoryview) -> bool:
        """Look at a record before it is passed on; True means that it lies beyond the end and must not be."""
        raise NotImplementedError

    def keepalive(self, wal_end: int) -> None:
        """The server has sent everything up to ``wal_end``."""
        if wal_end >= self.end_position and not self.progress.in_unstreamed_transaction:
            self.is_finished = True

    def take(self) -> list[int]:
        """Return the ends of transactions, and of records without one, observed since the last call."""
        taken = self._ends
        if taken:
            self._ends = []
        return taken

    def _end(self, lsn: int, xid: int = 0) -> None:
        self.progress.end(lsn, xid)
        self._note_end(lsn)

    def _message(self, lsn: int) -> None:
        self.progress.message(lsn)
        self._note_end(lsn)

    def _note_end(self, lsn: int) -> None:
        self._ends.append(lsn)
        if lsn >= self.end_position and not self.progress.in_unstreamed_transaction:
            self.is_finished = True


class PgoutputTracker(BoundaryTracker):
    """Reads just enough of pgoutput's messages: kinds, xids, and the commit's position in Begin."""

    row_kinds = ROW_KINDS

    def __init__(self, progress: Progress, end_position: int | None = None) -> None:
        super().__init__(progress, end_position)
        self._in_block = False

    def observe(self, wal_start: int, data: bytes | memoryview) -> bool:
        """Raise ProtocolError for a message that is cut short or of a kind that pgoutput does not have."""
        kind = chr(data[0]) if len(data) else ""
        try:
            match kind:
                case "B":
                    if _FINAL_LSN.unpack_from(data)[0] >= self.end_position:
                        self.is_finished = True
                        return True
                    self.progress.begin()
                case "b":
                    self.progress.begin()
                case "C":
                    _COMMIT.unpack_from(data)
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
    """pgoutput's boundaries where `Transactions` come between the server and the consumer.

    It is shown each message before they are. A transaction without changes ends without a record, so there is nothing that
    the consumer could confirm; and what is prepared counts only with its commit.
    """

    row_kinds = frozenset(b"IUDT")

    def __init__(self, progress: Progress, end_position: int | None, transactions: Transactions) -> None:
        super().__init__(progress, end_position)
        self._transactions = transactions

    def observe(self, wal_start: int, data: bytes | memoryview) -> bool:
        """Tell prepared transactions by their gid and position; all else as without `Transactions`."""
        if not len(data) or data[0] not in b"PpKr":
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
                if not self._transactions.is_empty(message.gid):
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
    """For plugins that write a record for each begin and commit: known by the bytes they start with."""

    def __init__(self, progress: Progress, end_position: int | None, begin: bytes, commit: bytes) -> None:
        super().__init__(progress, end_position)
        self._begin, self._commit = begin, commit
        self._longest = max(len(begin), len(commit))

    def observe(self, wal_start: int, data: bytes | memoryview) -> bool:
        """Tell begin, commit, and what comes outside of both (a message that belongs to no transaction)."""
        head = bytes(data[: self._longest])
        if head.startswith(self._begin):
            self.progress.begin()
        elif head.startswith(self._commit):
            self._end(wal_start)
        elif not self.progress.in_transaction:
            self._message(wal_start)
        return False


class RecordTracker(BoundaryTracker):
    """For plugins that write a record per transaction, and for those that are not known: every record is an end."""

    def observe(self, wal_start: int, data: bytes | memoryview) -> bool:  # noqa: ARG002 - what is in it is not known
        """Stop as pg_recvlogical does: at the first record that begins after the end position."""
        if wal_start > self.end_position:
            self.is_finished = True
            return True
        self._end(wal_start)
        return False


def tracker_for(
    plugin: str,
    options: Mapping[str, str | None],
    progress: Progress,
    end_position: int | None,
    transactions: Transactions | None = None,
) -> BoundaryTracker:
    """Return the tracker for a slot's output plugin and the options that it runs with."""
    if plugin == "pgoutput":
        return (
            PgoutputTracker(progress, end_position) if transactions is None else WholeTracker(progress, end_position, transactions)
        )
    if plugin == "test_decoding":
        return TextTracker(progress, end_position, b"BEGIN", b"COMMIT")
    has_transactions = setting({"include-transaction": "on", **options}, "include-transaction") == "on"
    if plugin == "wal2json" and options.get("format-version") == "2" and has_transactions:
        return TextTracker(progress, end_position, b'{"action":"B"', b'{"action":"C"')
    return RecordTracker(progress, end_position)


def _error(what: str, wal_start: int, hint: str | None = None) -> ProtocolError:
    error = ProtocolError(what, hint=hint)
    error.locate(wal_start)
    return error
