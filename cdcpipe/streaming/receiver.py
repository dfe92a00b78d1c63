"""Turns the server's messages into chunks of the pipe's bytes. Only the code in `Receiver.receive` runs for each record.

libpq ─▶ tracker ─▶ (whole transactions) ─▶ (output plugin) ─▶ pieces ─▶ a chunk, with the ends of the transactions in it

If the process reads the socket itself (`DirectCopy`), and much is there, `Receiver.receive` takes many records at once (`Run`).
Then Python code looks only at the records between the changes.
"""

from __future__ import annotations

import logging
import struct
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from cdcpipe.config import StreamOptions
from cdcpipe.errors import ProtocolError
from cdcpipe.libpq.direct_copy import DirectCopy
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.pipe.framing import RecordReader, encode_header
from cdcpipe.replication.boundaries import BoundaryTracker
from cdcpipe.replication.copydata import WAL_DATA, WAL_DATA_HEADER_BYTES, parse_keepalive
from cdcpipe.replication.progress import Progress
from cdcpipe.streaming.notices import check_notices, raise_end
from cdcpipe.threads import Worker, have_no_blas_threads

if TYPE_CHECKING:
    from cdcpipe.streaming.wal_data import Run

__all__ = ["Feeder", "Receiver"]

log = logging.getLogger(__name__)

CHUNK_BYTES = 128 << 10
"""Records are joined up to this size before they are written."""
MAX_CHUNK_RECORDS = 4096

RENDERED_BYTES = 1 << 20
"""An output plugin may write a whole transaction at its commit. These many bytes of it are handed on at a time."""

LONG_RECORD_BYTES = 8 << 10
"""For records longer than this, saving a copy is worth more than saving a call."""

LEAST_RUN_BYTES = 24 << 10
"""With fewer bytes at hand, taking the records one by one is faster than looking for a run."""
LEAST_RUN_RECORDS = 64
"""After a shorter run, the next records are taken one by one."""
ONE_BY_ONE_RECORDS = 512

_SHORT_TURN_S = 0.0002
"""How long a thread may run while another one wants to, during the import of numpy."""


class _Layouts(dict[int, tuple[Callable[[memoryview | bytes], tuple[int, int, int, Any]], bytes]]):
    """Maps the length of a CopyData message to the function that takes it apart, and to the end of its record's header line.

    In one call, the function returns the message's kind, the two halves of walStart that a header prints, and the record. (Slicing
    the message alone costs as much.) The function does not copy a long record: it returns a memoryview.
    """

    def __init__(self, extra: int) -> None:
        super().__init__()
        self._extra = extra  # the number of bytes after the record that the length in its header includes

    def __missing__(self, length: int) -> tuple[Callable[[memoryview | bytes], tuple[int, int, int, Any]], bytes]:
        record_bytes = length - WAL_DATA_HEADER_BYTES
        suffix = b" %d\n" % (record_bytes + self._extra)
        if record_bytes < 0:
            return (lambda data: (data[0] if data[0] != WAL_DATA else 0, 0, 0, b"")), suffix
        if record_bytes > LONG_RECORD_BYTES:
            return (lambda data: (*_WAL_START(data), data[WAL_DATA_HEADER_BYTES:])), suffix
        # WALData: Byte1('w') Int64 walStart Int64 walEnd Int64 sendTime Byten
        layout = self[length] = struct.Struct(f">BII16x{record_bytes}s").unpack, suffix
        return layout


_WAL_START = struct.Struct(">BII").unpack_from


class _BlockSuffixes(dict[int, bytes]):
    """Maps the length of a message with a change in a stream block to the end of its record's header line, without the xid.

    Like `_Layouts`, it remembers only the lengths of records that are not long: a stream that runs for years may have every length.
    """

    def __missing__(self, length: int) -> bytes:
        suffix = b" %d\n" % (length - WAL_DATA_HEADER_BYTES - _XID_BYTES)
        if length - WAL_DATA_HEADER_BYTES <= LONG_RECORD_BYTES:
            self[length] = suffix
        return suffix


_XID_BYTES = 4
_LEAST_BLOCK_BYTES = WAL_DATA_HEADER_BYTES + 1 + _XID_BYTES
"""A message of this length has a kind and an xid, and nothing else."""


class Feeder(Protocol):
    """The interface of an output plugin that runs in this process and renders records."""

    def feed(self, wal_start: int, data: bytes) -> None:
        """Take one raw message, and write its records with the function that was passed when the feeder was made."""

    def close(self) -> None:
        """Release resources. The receiver calls this however the stream ends."""


class Receiver:
    """Receives from ``walsender`` and hands chunks to ``put``. The other arguments are those of `Streamer`.

    ``make_room`` is called while an output plugin writes more for one message than is held. It waits for the consumer.
    """

    def __init__(
        self,
        walsender: Walsender,
        progress: Progress,
        tracker: BoundaryTracker,
        options: StreamOptions,
        put: Callable[[bytes, list[int], bool], None],
        make_room: Callable[[], None],
        *,
        make_feeder: Callable[[Callable[[int, bytes], None]], Feeder] | None,
        transactions: Transactions | None,
    ) -> None:
        self._walsender = walsender
        self._progress = progress
        self._tracker = tracker
        self._options = options
        self._put = put
        self._make_room = make_room
        self._pieces: list[bytes | memoryview] = []
        self._rendered_bytes = 0
        """How many bytes an output plugin has written to the pieces."""
        self._is_silent = False
        """Whether an output plugin has written nothing since the last Begin, or since it was given what stands alone."""
        self._feeder = make_feeder(self._add_rendered) if make_feeder else None
        self._transactions = transactions
        self._reader = RecordReader()
        self._withheld_ends: list[int] = []
        """The end of the transaction whose records are being taken out of ``transactions``."""
        self._is_plain = self._feeder is None and options.is_plain
        """Whether the pipe's bytes are a header line and the record, as in `Transactions`."""
        self._begins_with_header = options.write_header
        """Whether the next chunk begins with a record's header. The pieces of a held transaction are cut anywhere."""
        self._layouts = _Layouts(int(options.write_newline))
        self._block_suffixes = _BlockSuffixes()
        self._run_class: type[Run] | None = None
        self._can_load = True
        self.has_more = True
        """Whether libpq or the socket may have another message."""
        self.records = 0
        """How many records the server has sent."""

    @property
    def is_taking(self) -> bool:
        """Whether a committed transaction is being queued. Until all of it is queued, nothing is received."""
        return self._transactions is not None and self._transactions.has_pending

    def receive(self) -> int:
        """Queue the messages that libpq and the socket have, up to a chunk. Return the number of bytes received."""
        if self.is_taking:
            self._take()
            self._progress.heard(time.monotonic())  # the loop did not read meanwhile, so the silence does not count
            self.queue()
            return 0
        most = MAX_CHUNK_RECORDS
        if self._walsender.direct is not None and not self._walsender.notices:
            size, most = self._receive_run(self._walsender.direct)
            if not most:
                return size
        return self._receive_each(most)

    def _receive_each(self, most: int) -> int:
        """Queue messages one by one: up to a chunk, and up to ``most`` records. Return the number of bytes received."""
        receive, notices, add, append = self._walsender.receive, self._walsender.notices, self._add, self._pieces.append
        tracker, transactions, is_plain = self._tracker, self._transactions, self._is_plain
        row_kinds, observe, feed = tracker.row_kinds, tracker.observe, self._feeder.feed if self._feeder else None
        layouts, suffixes = self._layouts, self._block_suffixes
        is_direct, block_xid = (True, None) if transactions is None else (transactions.is_direct, transactions.block_xid)
        prefix, prefix_high = b"", -1
        block: list[bytes] = []
        hold = block.append
        size = count = 0
        self.has_more = True
        while size < CHUNK_BYTES and count < most:
            try:
                length, data = receive(1)
                if length <= 0:
                    length, data = self._read_on(length, has_taken=count > 0)
                    if not length:
                        self.has_more = False
                        break
            except Walsender.Damaged:
                raise self._walsender.damage_error() from None
            if notices:  # the server sent them before this record
                self._keep(block)
                check_notices(self._walsender)
            unpack, suffix = layouts[length]
            kind, high, low, body = unpack(data)
            if kind != WAL_DATA:
                self._keepalive(data)
                if tracker.is_finished:
                    break
                continue
            count += 1
            size += length
            if not body or body[0] not in row_kinds:
                if observe(high << 32 | low, body):
                    break
                if transactions is not None and not transactions.lets_by(body):
                    size += self._hand_over(block, high << 32 | low, body)
                    block_xid = transactions.block_xid
                    if transactions.has_pending:
                        break
                elif feed is not None:
                    self._feed_boundary(high << 32 | low, bytes(body))
                else:
                    add(high << 32 | low, body)
                if transactions is not None:
                    is_direct = transactions.is_direct
                if tracker.is_finished:
                    break
            elif not is_direct:
                if body[1:5] == block_xid and length > _LEAST_BLOCK_BYTES:
                    if high != prefix_high:
                        prefix, prefix_high = b"w %X/" % high, high
                    hold(b"%b%X%b%c%b" % (prefix, low, suffixes[length], body[0], body[5:]))
                    continue
                assert transactions is not None
                size += self._hand_over(block, high << 32 | low, body)
                is_direct, block_xid = transactions.is_direct, transactions.block_xid
            elif is_plain:
                if high != prefix_high:
                    prefix, prefix_high = b"w %X/" % high, high
                append(b"%b%X%b%b" % (prefix, low, suffix, body))
            elif feed is not None:
                feed(high << 32 | low, bytes(body))
            else:
                add(high << 32 | low, body)
        self._keep(block)
        self.records += count
        if size:
            self._progress.heard(time.monotonic())
        self.queue()
        return size

    def _receive_run(self, direct: DirectCopy) -> tuple[int, int]:
        """Queue many records at once. Return their size in bytes, and how many records to take one by one before the next run.

        Nothing is to be taken one by one if the run was long. `_take_run` and `_keep_run` leave the other records in the buffer.
        """
        if direct.buffered_bytes < LEAST_RUN_BYTES:
            direct.fill()
        if direct.buffered_bytes < LEAST_RUN_BYTES:
            return 0, MAX_CHUNK_RECORDS
        if self._run_class is None:
            if self._can_load:
                self._load()
            return 0, MAX_CHUNK_RECORDS
        begin = direct.begin
        run = self._run_class(direct.buffer, begin, direct.end)
        if not len(run):
            return 0, 1
        is_block = self._transactions is not None and self._transactions.block_xid is not None
        try:
            count = self._keep_run(run, direct) if is_block else self._take_run(run, direct)
        finally:
            size = direct.begin - begin
        self.records += count
        if size:
            self._progress.heard(time.monotonic())
            self.queue()
        # Before the next records are read, they should gather again.
        self.has_more = self.is_taking or direct.has_message
        is_long = count >= LEAST_RUN_RECORDS or self.is_taking or self._tracker.is_finished
        return size, 0 if is_long else ONE_BY_ONE_RECORDS

    def _load(self) -> Worker:
        """Import numpy in a thread, once a stream has many records. Until it is there, records are taken one by one.

        The import takes 0.1 s of CPU time. A server whose socket is not read is blocked after 0.5 ms, so the threads take turns
        that are shorter.
        """
        self._can_load = False
        have_no_blas_threads()
        loader = Worker(target=self._import_runs, args=(sys.getswitchinterval(),), name="cdcpipe-numpy", daemon=True)
        sys.setswitchinterval(_SHORT_TURN_S)
        loader.start()
        return loader

    def _import_runs(self, turn_s: float) -> None:
        try:
            from cdcpipe.streaming.wal_data import Run
        except ImportError as ex:
            log.info("records are taken one by one: %s", ex)
        else:
            self._run_class = Run
        finally:
            sys.setswitchinterval(turn_s)

    def _take_run(self, run: Run, direct: DirectCopy) -> int:
        """Queue records that need not be held. Return how many of the run were taken."""
        tracker, transactions = self._tracker, self._transactions
        passed = 0
        for i in run.others(tracker.row_kinds):
            if passed < i and not (transactions is None or transactions.is_direct):
                break
            lsn, body = run.record(i)
            try:
                is_beyond = tracker.observe(lsn, body)
            except ProtocolError:
                self._add_run(run, i, direct, i + 1)
                raise
            if is_beyond or not (transactions is None or transactions.lets_by(body)):
                self._add_run(run, i, direct, i + 1)
                if not is_beyond:
                    self._hand_over([], lsn, body)
                return i + 1
            passed = i + 1
            if tracker.is_finished:
                break
        else:
            if transactions is None or transactions.is_direct:
                passed = len(run)
        self._add_run(run, passed, direct, passed)
        return passed

    def _add_run(self, run: Run, count: int, direct: DirectCopy, taken: int) -> None:
        """Add the first ``count`` records of a run to the chunk. ``taken`` of the run are taken out of the buffer."""
        if taken:
            direct.begin = int(run.ends[taken - 1])
        self._pieces.append(run.framed(count))

    def _keep_run(self, run: Run, direct: DirectCopy) -> int:
        """Hand over changes of a stream block. Return how many of the run were taken."""
        assert self._transactions is not None
        xid = self._transactions.block_xid
        assert xid is not None
        count = run.count_of_xid(xid, self._tracker.row_kinds)
        if count:
            direct.begin = int(run.ends[count - 1])
            self._transactions.keep(bytes(run.framed(count, without_xid=True)))
        return count

    def _read_on(self, length: int, *, has_taken: bool) -> tuple[int, Any]:
        """Read the socket if ``length`` is 0, and return as libpq does. If it is -1, raise the error that ended the copy.

        A direct copy was read just before. After the records from then, others should gather.
        """
        data: Any = None
        if length == 0:
            if has_taken and self._walsender.direct is not None:
                return 0, None
            try:
                self._walsender.consume_input()
            except Walsender.Lost:
                error = self._walsender.closed_error()
                error.hint = "the server's log says why, if it is not the network; a wal_sender_timeout of 1 s or less is too short"
                raise error from None
            length, data = self._walsender.receive(1)
        if length < 0:
            raise_end(self._walsender, self._tracker.commit_lsn)
        return length, data

    def _add(self, lsn: int, record: bytes | memoryview) -> None:
        """Add a record to the chunk."""
        options = self._options
        if options.write_header:
            self._pieces.append(encode_header(lsn, len(record) + options.write_newline))
        self._pieces.append(record)
        if options.write_newline:
            self._pieces.append(b"\n")

    def _add_rendered(self, lsn: int, record: bytes) -> None:
        """Add a record of an output plugin. Hand the pieces on if there are many: their transaction has not ended yet."""
        self._add(lsn, record)
        self._is_silent = False
        self._rendered_bytes += len(record)
        if self._rendered_bytes > RENDERED_BYTES:
            self._put_pieces([])
            self._make_room()

    def _feed_boundary(self, lsn: int, record: bytes) -> None:
        """Render a record that is no change. Tell ``progress`` if it ends something of which the plugin has written nothing.

        What a plugin writes in a stream block is not looked at. So a transaction that it takes in blocks is never silent.
        """
        assert self._feeder is not None
        kind = record[:1]
        # Byte1('M') Int8 flags (1: transactional). In a stream block that `Transactions` has not taken, an xid comes first.
        is_alone = kind == b"M" and not record[1] & 1 and (self._transactions is not None or not self._progress.in_transaction)
        is_alone = is_alone or kind in (b"K", b"r")  # what becomes of a prepared transaction
        if kind in (b"B", b"b") or is_alone:
            self._is_silent = True
        self._feeder.feed(lsn, record)
        if self._is_silent and (kind in (b"C", b"P") or is_alone):
            self._progress.silent(lsn)

    def _put_pieces(self, ends: list[int]) -> None:
        self._put(b"".join(self._pieces), ends, self._begins_with_header)
        self._pieces.clear()
        self._rendered_bytes = 0
        self._begins_with_header = self._options.write_header and not (self._is_plain and self.is_taking)

    def _keep(self, block: list[bytes]) -> None:
        """Hand over the changes gathered so far from a stream block."""
        if block:
            assert self._transactions is not None
            self._transactions.keep(b"".join(block))
            block.clear()

    def _hand_over(self, block: list[bytes], lsn: int, body: bytes | memoryview) -> int:
        """Hand over the changes gathered so far, then a message. Take the records that come out, and return their size."""
        assert self._transactions is not None
        self._keep(block)
        self._transactions.feed(lsn, body)
        return self._take() if self._transactions.has_pending else 0

    def _take(self) -> int:
        """Take up to a chunk of records from complete transactions. Return their size."""
        assert self._transactions is not None
        taken = self._transactions.take(CHUNK_BYTES)
        if self._is_plain:
            self._pieces.append(taken)
        elif taken:
            self._reader.feed(taken)
            for lsn, record in self._reader:
                if self._feeder is None:
                    self._add(lsn, record)
                elif record[:1] in (b"B", b"C", b"M"):
                    self._feed_boundary(lsn, record)
                else:
                    self._feeder.feed(lsn, record)
        return len(taken)

    def _keepalive(self, data: memoryview | bytes) -> None:
        message = parse_keepalive(data)
        self.queue()
        self._progress.heard(time.monotonic())
        self._progress.keepalive(message.wal_end, reply_requested=message.reply_requested)
        self._tracker.keepalive(message.wal_end)

    def queue(self) -> None:
        """Hand on the pieces as one chunk, with the ends of the transactions in it."""
        ends = self._tracker.take()
        if self._withheld_ends or self.is_taking:
            # The last end belongs to the transaction that is being queued. It goes out with that transaction's last record.
            ends = self._withheld_ends + ends
            self._withheld_ends = [ends.pop()] if self.is_taking else []
        if self._pieces or ends:
            self._put_pieces(ends)

    def queue_idle(self, lsn: int) -> None:
        """Hand on an empty record for an idle position. Nothing else may be waiting here."""
        self._add(lsn, b"")
        self._put_pieces([lsn])

    def queue_before_failure(self) -> None:
        """Hand on the records before the failed one. Otherwise they would never be written.

        The failed record may end its transaction. So no end of this chunk counts as written, and none is confirmed.
        """
        self._tracker.take()
        self._withheld_ends.clear()
        if self._pieces:
            self._put_pieces([])

    def close(self) -> None:
        """Close the output plugin, and drop the transactions that are held.

        A plugin may write a record that it still has. Nobody waits for room, because nobody takes this record any more.
        """
        self._make_room = lambda: None
        if self._feeder is not None:
            self._feeder.close()
        if self._transactions is not None:
            self._transactions.close()
