"""The one loop: it owns the socket, stdin, stdout and the timer, and moves records from the server to the pipe.

    socket ─▶ libpq ─▶ tracker ─▶ (whole transactions) ─▶ (output plugin) ─▶ chunks ─▶ stdout
    stdin  ─▶ commands ─▶ Progress ─▶ status updates ─▶ socket

What must hold, whatever happens: stdin is read and status updates go out while stdout is blocked; no more than a few chunks
are held; nothing is confirmed that ``Progress`` does not allow; at every way out but a lost connection the last feedback has
reached the server, because closing a socket with unread data on it throws away what was sent last.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from cdcpipe.errors import CdcpipeError, CommandClosedError, ConnectionClosedError, OutputError, ServerError
from cdcpipe.lsn import format_lsn
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.pipe.commands import CommandReader, Feedback
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.pipe.framing import RecordReader
from cdcpipe.pipe.input import Input
from cdcpipe.pipe.output import Output
from cdcpipe.replication.boundaries import BoundaryTracker
from cdcpipe.replication.connection import Connection
from cdcpipe.replication.copydata import WAL_DATA, WAL_DATA_HEADER_BYTES, build_status_update, parse_keepalive
from cdcpipe.replication.progress import Progress
from cdcpipe.sqlstate import NOT_IN_PREREQUISITE_STATE, UNDEFINED_OBJECT

__all__ = ["Feeder", "StreamOptions", "Streamer"]

log = logging.getLogger(__name__)

CHUNK_BYTES = 128 << 10
"""Records are joined up to this size before they are written."""
MAX_PENDING_BYTES = 1 << 20
"""With more than this unwritten the socket is not read any more."""
MAX_CHUNK_RECORDS = 4096

LONG_RECORD_BYTES = 8 << 10
"""From here on a copy less is worth more than a call less."""

BULK_BYTES_PER_S = 8 << 20
"""At this rate more is on its way: to be woken for each message, by a server that sends them one by one, costs both sides."""
LOW_WATER_BYTES = 64 << 10
"""Then the kernel is asked to wake us only for so much (TCP)."""
BULK_WAIT_S = 0.001
"""The longest that a record waits in the socket for company; the rate is taken over no less."""
BULK_PAUSE_S = 0.0002
"""Where there is no low-water mark (Unix sockets, TLS): how long to leave the socket alone. Its buffer holds some 0.7 ms."""

DRAIN_S = 3.0
"""How long the server has for each step of the end: to take the last status update, to end the stream (after that its records are
left unread and its word is asked for instead), to say that it has."""
FLUSH_S = 1.0
"""How long a consumer may pause while the last records are written out."""

_KEEP_STDIN_OPEN = (
    "the stream ends with its commands. Where nobody writes any (cron, systemd, docker run without -i) a named pipe stays open: "
    "mkfifo commands; cdcpipe … <>commands. With -A and --endpos the end of stdin does not matter"
)


class _Layouts(dict[int, tuple[Callable[[memoryview], tuple[int, int, int, Any]], bytes]]):
    """Length of a CopyData message → what takes it apart, and the end of the header line of its record.

    It is taken apart into its kind, the two halves of walStart that a header prints, and the record, in one call. (Taking a slice
    of the message costs as much as all the rest.) A long record is not copied: it stays a memoryview.
    """

    def __init__(self, extra: int) -> None:
        super().__init__()
        self._extra = extra  # what is written after the record and counts

    def __missing__(self, length: int) -> tuple[Callable[[memoryview], tuple[int, int, int, Any]], bytes]:
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
    """Length of a CopyData message with a change in a stream block → the end of the header line of its record, without the xid."""

    def __missing__(self, length: int) -> bytes:
        suffix = self[length] = b" %d\n" % (length - WAL_DATA_HEADER_BYTES - _XID_BYTES)
        return suffix


_XID_BYTES = 4
_LEAST_BLOCK_BYTES = WAL_DATA_HEADER_BYTES + 1 + _XID_BYTES
"""A message of this length has a kind and an xid, and nothing else."""


class _Stopped(BaseException):
    """The stream is to end while a record is being rendered."""


class Feeder(Protocol):
    """What renders records: an output plugin on our side of the wire."""

    def feed(self, wal_start: int, data: bytes) -> None:
        """Take one raw message; the records that it makes are written through the callback that the feeder was made with."""

    def close(self) -> None:
        """End; called on every way out."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How records and feedback travel."""

    out_fd: int = 1
    command_fd: int = 0
    write_header: bool = False
    write_newline: bool = False
    auto_feedback: bool = False
    wait_after_end: bool = False
    """Once the end position is reached: close the output, and go on reading commands until ``q`` or the end of stdin."""
    needs_commands: bool = True
    """False: the end of stdin ends nothing, because the stream ends by itself and no feedback has to come."""


def _publication_gap(message: str, sqlstate: str) -> ServerError:
    """Return the error for changes that were made while a publication did not exist, as the server, up to 17 or later, tells it.

    The server looks for the publication in the catalog as it was then, so making it now does not help.
    """
    return ServerError(
        f"{message}: the next change was made while no publication had this name, because it was dropped, renamed, or made later",
        sqlstate=sqlstate,
        hint="if a publication of another name held the tables then, nothing is lost: go on from the last transaction's end"
        " (--startpos) with --publication THAT_NAME until this error comes again, then with this name (where there is none of that"
        " name now, make an empty one). Otherwise read these changes beside the stream: pg_copy_logical_replication_slot(SLOT,"
        " 'gap', false, 'test_decoding'), pg_logical_slot_peek_changes('gap', NULL, NULL). pg_replication_slot_advance() past them"
        " loses them: then copy the tables anew",
    )


class Streamer:
    """Streams from ``connection``, on which the copy has been started, until something ends it.

    ``confirmed_on_server`` is asked, on a connection of its own, for the slot's confirmed position when the server does not end the
    stream in time; it gets the seconds that it may take, and returns 0 for what is not known. ``make_feeder`` gets the function
    that writes a record. ``transactions`` puts together what the server streams; the tracker is then a `WholeTracker` with the same
    one.
    """

    def __init__(
        self,
        connection: Connection,
        progress: Progress,
        tracker: BoundaryTracker,
        options: StreamOptions,
        *,
        confirmed_on_server: Callable[[float], int],
        make_feeder: Callable[[Callable[[int, bytes], None]], Feeder] | None = None,
        transactions: Transactions | None = None,
    ) -> None:
        self._connection = connection
        self._progress = progress
        self._tracker = tracker
        self._options = options
        self._confirmed_on_server = confirmed_on_server
        self._commands = CommandReader()
        self._output = Output(options.out_fd)
        self._input = Input(options.command_fd)
        self._pieces: list[bytes | memoryview] = []
        self._feeder = make_feeder(self._add) if make_feeder else None
        self._transactions = transactions
        self._reader = RecordReader()
        self._withheld_ends: list[int] = []
        """The end of the transaction that is being taken out of ``transactions``."""
        self._quit = False
        self._signalled = False
        self._stdin_closed = False
        self._output_closed = False
        self._unsent: bytes | None = None
        self._has_more = True
        self._is_bulk = False
        self._recent_bytes = 0
        self._recent_since = time.monotonic()
        self._layouts = _Layouts(int(options.write_newline))
        self._block_suffixes = _BlockSuffixes()
        self._can_wait_for_more = True
        self._low_water = 1
        self._hung_up = False
        self._is_ending = False

    def run(self) -> ExitCode:
        """Return SUCCESS for ``q``, a signal or the end position; every other end is an error that is raised."""
        with self._signals() as wake_fd:
            try:
                try:
                    self._loop(wake_fd)
                except _Stopped:
                    self._queue_before_failure()
                except (ConnectionClosedError, ServerError):
                    self._queue()
                    self._flush_output()
                    raise
                except CdcpipeError:
                    self._queue_before_failure()
                    self._finish()
                    raise
                self._finish()
                if self._is_abandoned and not self._quit and not self._signalled and not self._tracker.is_finished:
                    raise CommandClosedError("stdin was closed", hint=_KEEP_STDIN_OPEN)
            finally:
                if self._feeder is not None:
                    self._feeder.close()
                if self._transactions is not None:
                    self._transactions.close()
                self._output.close()
                self._input.close()
        return ExitCode.SUCCESS

    def keep_serving(self) -> None:
        """Do what can't wait while a record waits for an answer of the catalog; raise what ends the stream.

        To be called now and then during such a wait: commands, output and status updates go on.
        """
        if self._is_ending:
            return
        if not self._stdin_closed:
            self._read_commands()
        if self._is_to_end:
            raise _Stopped
        self._write()
        now = time.monotonic()
        if self._progress.due_at() <= now or self._unsent is not None:
            self._send_status(now)

    # The loop

    def _loop(self, wake_fd: int) -> None:
        progress, output = self._progress, self._output
        while not self._is_to_end:
            if self._has_more and self._is_reading:
                self._receive()
            elif output.pending_bytes:
                progress.heard(time.monotonic())  # nobody listened
            self._write()
            now = time.monotonic()
            if self._tracker.is_finished and not output.pending_bytes and not self._is_taking and not self._close_output():
                return
            if progress.due_at() <= now or self._unsent is not None:
                self._send_status(now)
            if progress.is_lost(now):
                raise ConnectionClosedError(
                    f"the server has said nothing for {progress.silence_limit_s:g} s, and did not answer when asked",
                    hint="check the network, and the walsender on the server (pg_stat_replication)",
                )
            self._wait(wake_fd, now)

    @property
    def _is_to_end(self) -> bool:
        return self._quit or self._signalled or self._is_abandoned

    @property
    def _is_abandoned(self) -> bool:
        """Whether nobody can give commands any more to a stream that needs them."""
        return self._stdin_closed and self._options.needs_commands

    @property
    def _is_taking(self) -> bool:
        """Whether a committed transaction is on its way out: until all of it is queued, nothing is received."""
        return self._transactions is not None and self._transactions.has_pending

    @property
    def _is_reading(self) -> bool:
        return self._output.pending_bytes < MAX_PENDING_BYTES and (self._is_taking or not self._tracker.is_finished)

    def _receive(self) -> None:
        """Queue what libpq and the socket have, up to a chunk, as the pipe's bytes. The only code that runs per record."""
        receive, consume_input, notices = self._connection.receive, self._connection.consume_input, self._connection.notices
        if self._is_taking:
            self._take()
            self._progress.heard(time.monotonic())  # nobody listened
            self._queue()
            return
        tracker, feeder, options, transactions = self._tracker, self._feeder, self._options, self._transactions
        row_kinds, observe, add, feed = tracker.row_kinds, tracker.observe, self._add, feeder.feed if feeder else None
        append, layouts, suffixes = self._pieces.append, self._layouts, self._block_suffixes
        prefix, prefix_high = b"", -1
        plain = feed is None and options.write_header and not options.write_newline
        is_direct = transactions is None or transactions.is_direct
        block_xid = None if transactions is None else transactions.block_xid
        block: list[bytes] = []
        hold = block.append
        size = count = 0
        self._has_more = True
        while size < CHUNK_BYTES and count < MAX_CHUNK_RECORDS:
            length, data = receive(1)
            if length <= 0:
                if length == 0:
                    try:
                        consume_input()
                    except Connection.Lost:
                        raise self._connection.closed_error() from None
                    length, data = receive(1)
                if length == 0:
                    self._has_more = False
                    break
                if length < 0:
                    self._copy_ended()
            if notices:  # the server sent them before this record
                self._keep(block)
                self._check_notices()
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
                    self._keep(block)
                    transactions.feed(high << 32 | low, body)
                    size += self._take()
                    block_xid = transactions.block_xid
                    if transactions.has_pending:
                        break
                elif feed is not None:
                    feed(high << 32 | low, bytes(body))
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
                self._keep(block)
                transactions.feed(high << 32 | low, body)
                block_xid = transactions.block_xid
                if transactions.has_pending:
                    size += self._take()
                    is_direct = transactions.is_direct
            elif plain:
                if high != prefix_high:
                    prefix, prefix_high = b"w %X/" % high, high
                append(b"%b%X%b%b" % (prefix, low, suffix, body))
            elif feed is not None:
                feed(high << 32 | low, bytes(body))
            else:
                add(high << 32 | low, body)
        self._keep(block)
        if size:
            self._progress.heard(time.monotonic())
        self._recent_bytes += size
        self._queue()

    def _add(self, lsn: int, record: bytes | memoryview) -> None:
        """Add a record to the chunk (OutputPluginWrite, where there is an output plugin)."""
        options = self._options
        if options.write_header:
            self._pieces.append(b"w %X/%X %d\n" % (lsn >> 32, lsn & 0xFFFFFFFF, len(record) + options.write_newline))
        self._pieces.append(record)
        if options.write_newline:
            self._pieces.append(b"\n")

    def _keep(self, block: list[bytes]) -> None:
        """Hand over the changes of a stream block gathered so far."""
        if block:
            assert self._transactions is not None
            self._transactions.keep(b"".join(block))
            block.clear()

    def _take(self) -> int:
        """Take up to a chunk of the transactions that are whole; return its size."""
        assert self._transactions is not None
        taken = self._transactions.take(CHUNK_BYTES)
        if self._feeder is None and self._options.write_header and not self._options.write_newline:
            self._pieces.append(taken)
        elif taken:
            self._reader.feed(taken)
            for lsn, record in self._reader:
                if self._feeder is not None:
                    self._feeder.feed(lsn, record)
                else:
                    self._add(lsn, record)
        return len(taken)

    def _queue(self) -> None:
        """Hand the pieces to the output as one chunk."""
        ends = self._tracker.take()
        if self._withheld_ends or self._is_taking:
            # The last end is that of the transaction that is on its way: it goes with the last of its records.
            ends = self._withheld_ends + ends
            self._withheld_ends = [ends.pop()] if self._is_taking else []
        if self._pieces or ends:
            self._output.put(b"".join(self._pieces), ends)
            self._pieces.clear()

    def _queue_before_failure(self) -> None:
        """Hand on what came before a record that can't be: it would never come out otherwise.

        No end of this chunk counts as written, lest it is confirmed: the record may be the one that ends its transaction.
        """
        self._tracker.take()
        self._withheld_ends.clear()
        self._output.put(b"".join(self._pieces), [])
        self._pieces.clear()

    def _keepalive(self, data: memoryview) -> None:
        message = parse_keepalive(data)
        self._queue()
        self._progress.heard(time.monotonic())
        self._progress.keepalive(message.wal_end, reply_requested=message.reply_requested)
        self._tracker.keepalive(message.wal_end)

    def _copy_ended(self) -> None:
        """Tell an error from an end in order: both show as -1."""
        self._check_notices()
        try:
            self._connection.copy_result(DRAIN_S)
        except ServerError as ex:
            if ex.sqlstate == UNDEFINED_OBJECT:
                raise _publication_gap(ex.message, ex.sqlstate) from ex
            raise
        raise ConnectionClosedError(
            "the server has ended the stream", hint="it is shutting down, or was told to; connect again later"
        )

    def _check_notices(self) -> None:
        """Stop at the warning with which a server from 18 on skips a publication that its catalog, as of then, does not have."""
        for notice in self._connection.notices:
            if notice.severity == "WARNING" and notice.sqlstate == NOT_IN_PREREQUISITE_STATE:
                raise _publication_gap(f"the server skips changes: {notice.message}", notice.sqlstate)
            log.info("%s from the server: %s", notice.severity.lower(), notice.message)
        self._connection.notices.clear()

    def _write(self) -> None:
        ends = self._output.write()
        if ends:
            self._progress.written(ends)
            if self._options.auto_feedback:
                self._progress.confirm_written(time.monotonic())

    def _close_output(self) -> bool:
        """At the end position: close the output and stay for feedback, if that is wanted; False to end."""
        if not self._options.wait_after_end:
            return False
        if not self._output_closed:
            self._output.close()
            os.close(self._options.out_fd)
            self._output_closed = True
            log.info("the end position is reached; waiting for the last feedback")
        return True

    def _send_status(self, now: float) -> None:
        if self._unsent is None:
            if self._connection.notices:
                self._check_notices()
            status = self._progress.status(now)
            self._unsent = build_status_update(
                status.write_lsn, status.flush_lsn, unix_time_s=time.time(), reply_requested=status.reply_requested
            )
            log.debug("status update: write %s, flush %s", format_lsn(status.write_lsn), format_lsn(status.flush_lsn))
        if self._connection.send(self._unsent):
            self._unsent = None

    def _wait(self, wake_fd: int, now: float) -> None:
        """Wait for the server, a command, room in the pipe, a signal or the timer; with records at hand only look."""
        connection, output = self._connection, self._output
        reading = self._is_reading
        has_more = self._has_more and reading
        timeout_s = 0.0 if has_more else max(0.0, self._progress.due_at() - now)
        if now - self._recent_since >= BULK_WAIT_S:
            self._is_bulk = self._recent_bytes >= BULK_BYTES_PER_S * (now - self._recent_since)
            self._recent_bytes, self._recent_since = 0, now
        if not has_more and reading and self._can_wait_for_more:
            wanted = LOW_WATER_BYTES if self._is_bulk else 1
            if wanted != self._low_water:
                self._can_wait_for_more = connection.set_low_water_mark(wanted)
                self._low_water = wanted if self._can_wait_for_more else 1
            if self._low_water > 1:
                timeout_s = min(timeout_s, BULK_WAIT_S)
        if self._is_bulk and not has_more and reading and not self._can_wait_for_more:
            time.sleep(BULK_PAUSE_S)
        poll = select.poll()
        socket_fd = connection.socket
        if reading or not self._hung_up:
            poll.register(socket_fd, (select.POLLIN if reading else 0) | (0 if connection.flush() else select.POLLOUT))
        poll.register(wake_fd, select.POLLIN)
        if not self._stdin_closed:
            poll.register(self._input.fd, select.POLLIN)
        if not self._output_closed:
            poll.register(output.fd, select.POLLOUT if output.pending_bytes else 0)
        ready = dict(poll.poll(None if timeout_s == float("inf") else timeout_s * 1000))
        if wake_fd in ready:
            os.read(wake_fd, 4096)
        if self._input.fd in ready or self._signalled:
            self._read_commands()
        if socket_fd in ready or self._low_water > 1:
            self._has_more = True
            if not reading and ready.get(socket_fd, 0) & (select.POLLHUP | select.POLLERR):
                # The records that came before are wanted still: the loss shows when the consumer lets us read on.
                self._hung_up = True
                if self._output_closed:
                    raise ConnectionClosedError("the connection to the server was lost")
        if ready.get(output.fd, 0) & (select.POLLERR | select.POLLNVAL) and not self._output_closed:
            raise OutputError("records can't be written: the reader has closed the pipe")

    def _read_commands(self) -> None:
        """Read from stdin once: who writes there without a pause keeps nothing else waiting. The highest feedback counts."""
        feedback = 0
        try:
            data = self._input.read()
            if data == b"":
                self._stdin_closed = True
            for command in self._commands.feed(data or b""):
                if isinstance(command, Feedback):
                    feedback = max(feedback, command.lsn)
                else:
                    self._quit = True
                    return
        except OSError as ex:
            log.info("stdin can't be read: %s", ex.strerror)
            self._stdin_closed = True
        finally:
            if feedback:
                self._progress.feedback(feedback, time.monotonic())

    # The end

    def _finish(self) -> None:
        """Write out what is held, send the last feedback, and end the stream so that the server has read it."""
        self._is_ending = True
        self._flush_output()
        connection = self._connection
        self._send_last_status()
        flush_lsn = self._progress.confirmed_lsn
        connection.end_copy()
        deadline = time.monotonic() + DRAIN_S
        while not self._is_drained():
            if time.monotonic() >= deadline:
                # In the middle of a large transaction the server looks at us only when it can't send: so stop reading.
                self._await_confirmation(flush_lsn)
                return
            self._wait_for_socket(deadline)
        try:
            connection.copy_result(DRAIN_S)
        except (ConnectionClosedError, ServerError) as ex:
            log.info("after the end of the stream: %s", ex)

    def _send_last_status(self) -> None:
        deadline = time.monotonic() + DRAIN_S
        self._retry_status(deadline)  # an older one that libpq had no room for
        self._send_status(time.monotonic())
        self._retry_status(deadline)

    def _retry_status(self, deadline: float) -> None:
        while self._unsent is not None:
            if time.monotonic() >= deadline:
                raise ConnectionClosedError(
                    "the server does not take the last status update", hint="it will send again what followed"
                )
            self._wait_for_socket(deadline)
            self._send_status(time.monotonic())

    def _wait_for_socket(self, deadline: float) -> None:
        is_flushed = self._connection.flush()
        self._connection.wait(select.POLLIN | (0 if is_flushed else select.POLLOUT), min(deadline, time.monotonic() + 0.1))

    def _is_drained(self) -> bool:
        """Drop what the server still sends; it will send it again. True at the end of the copy."""
        try:
            self._connection.consume_input()
        except Connection.Lost:
            return True
        self._connection.flush()
        for _ in range(10_000):
            length, _data = self._connection.receive(1)
            if length < 0:
                return True
            if length == 0:
                break
        return False

    def _await_confirmation(self, flush_lsn: int) -> None:
        deadline = time.monotonic() + DRAIN_S
        while flush_lsn and self._confirmed_on_server(deadline - time.monotonic()) < flush_lsn:
            if time.monotonic() >= deadline:
                log.warning("the server has not confirmed %s yet; it may send again what followed", format_lsn(flush_lsn))
                return
            time.sleep(0.05)

    def _flush_output(self) -> None:
        """Give a consumer that reads the rest of what was received; one that does not read can't hold us up."""
        if self._output_closed:
            return
        deadline = time.monotonic() + FLUSH_S
        try:
            self._write()
            while self._output.pending_bytes and time.monotonic() < deadline:
                before = self._output.pending_bytes
                poll = select.poll()
                poll.register(self._output.fd, select.POLLOUT)
                poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
                self._write()
                if self._output.pending_bytes < before:
                    deadline = time.monotonic() + FLUSH_S
        except OutputError as ex:
            log.debug("while ending: %s", ex)

    @contextmanager
    def _signals(self) -> Iterator[int]:
        """SIGINT and SIGTERM mean ``q``; they wake the loop through a pipe, so that none is lost between two looks.

        The next one kills: whatever the end is waiting for, it is not wanted that much any more.
        """
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

        def note(_number: int, _frame: FrameType | None) -> None:
            self._signalled = True
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)

        numbers = (signal.SIGINT, signal.SIGTERM)
        old_wakeup = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        old_handlers = {number: signal.signal(number, note) for number in numbers}
        try:
            yield read_fd
        finally:
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old_wakeup)
            os.close(read_fd)
            os.close(write_fd)
