"""The one loop: it owns the socket, stdin, stdout and the timer, and moves records from the server to the pipe.

    socket ─▶ Receiver ─▶ chunks ─▶ RecordsOut ─▶ stdout
    stdin  ─▶ CommandsIn ─▶ Progress ─▶ StatusUpdates ─▶ socket

The loop keeps these rules in every situation:

- While stdout is blocked, the loop reads stdin and sends status updates. It holds no more than a few chunks.
- It confirms only positions that `Progress` allows.
- However the stream ends, unless the connection is lost, the server has read the last feedback (streaming/ending.py).
- A lost connection ends the stream with an error, or if it is lost at the very end and feedback may be lost, with a warning.
"""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from cdcpipe.config import StreamOptions
from cdcpipe.errors import CdcpipeError, CommandClosedError, CommandError, ConnectionClosedError, OutputError, ServerError
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.pipe.output import READER_ENDED
from cdcpipe.replication.boundaries import BoundaryTracker
from cdcpipe.replication.progress import Progress
from cdcpipe.streaming.burst import Burst
from cdcpipe.streaming.consumer import CommandsIn, RecordsOut
from cdcpipe.streaming.ending import end_stream, take_keepalives
from cdcpipe.streaming.receiver import Feeder, Receiver
from cdcpipe.streaming.signals import StopSignals
from cdcpipe.streaming.status import StatusUpdates

__all__ = ["StreamState", "Streamer", "closed_stdin_error", "closed_stdout_error"]

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 1 << 20
"""While at least this many bytes wait to be written, the loop does not read the socket."""


def closed_stdin_error() -> CommandClosedError:
    """Return the error for an end of stdin that ends a stream."""
    hint = (
        "the stream ends with its commands. Where nobody writes any (cron, systemd, docker run without -i) a named pipe stays open:"
        " mkfifo commands; cdcpipe … <>commands. With -A and --endpos the end of stdin does not matter"
    )
    return CommandClosedError("stdin was closed", hint=hint)


def closed_stdout_error() -> OutputError:
    """Return the error for a reader of the records that has ended."""
    return OutputError("records can't be written: the reader has closed the pipe", hint=READER_ENDED)


class _Stopped(BaseException):
    """Ends the stream while a record is being rendered."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """How far a stream is. Counts are since its start.

    ``records`` and ``transactions`` are the server's, before an output plugin; ``bytes`` go to the pipe.
    """

    received_lsn: int
    written_lsn: int
    confirmed_lsn: int
    records: int
    transactions: int
    bytes: int
    pending_bytes: int
    held_bytes: int
    spilled_bytes: int
    heard_at: float


class Streamer:
    """Streams from ``walsender``, on which the stream has been started, until something ends it. Closes ``commands``.

    - ``confirmed_on_server`` asks for the slot's confirmed position on another connection. The streamer calls it if the server does
      not end the stream in time. Its argument is the number of seconds that it may take. It returns 0 if the position is unknown.
    - ``make_feeder`` gets the function that writes a record, and returns the feeder.
    - ``transactions`` assembles the transactions that the server streams. The tracker is then a `WholeTracker` with this object.
    - ``check`` is called after records were received and before they are written. If it raises an error, they are not written.
    """

    def __init__(
        self,
        walsender: Walsender,
        progress: Progress,
        tracker: BoundaryTracker,
        options: StreamOptions,
        commands: CommandsIn,
        *,
        confirmed_on_server: Callable[[float], int],
        make_feeder: Callable[[Callable[[int, bytes], None]], Feeder] | None = None,
        transactions: Transactions | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._walsender = walsender
        self._progress = progress
        self._tracker = tracker
        self._options = options
        self._transactions = transactions
        self._confirmed_on_server = confirmed_on_server
        self._records = RecordsOut(options.out_fd, progress, auto_feedback=options.auto_feedback, check=check)
        self._commands = commands
        self._receiver = Receiver(
            walsender,
            progress,
            tracker,
            options,
            self._records.put,
            self._make_room,
            make_feeder=make_feeder,
            transactions=transactions,
        )
        self._status = StatusUpdates(walsender, progress, is_at_end=lambda: tracker.is_finished)
        self._burst = Burst(walsender, time.monotonic())
        self._signals = StopSignals()
        self._hung_up = False
        """Whether the connection is lost. The streamer raises this only after it has written the records received before: when the
        loop reads again, or at the end position, after which it reads no more."""
        self._is_ending = False
        self._takes_keepalives = False
        """Whether the loop waits for feedback at the end position, and the server has sent nothing but keepalives since."""

    def run(self) -> ExitCode:
        """Stream until the end. Return SUCCESS for ``q``, a signal or the end position, and raise an error for any other end."""
        is_cut = False
        with self._signals:
            try:
                try:
                    self._loop()
                except _Stopped:
                    is_cut = True
                    self._receiver.queue_before_failure()
                except (ConnectionClosedError, ServerError) as ex:
                    if ex.is_beside_stream:
                        self._finish_after_failure()
                        raise
                    self._receiver.queue()
                    with contextlib.suppress(CdcpipeError):  # what can't be checked is not written: the server sends it again
                        self._records.release()
                    self._records.drain()
                    raise
                except Exception:  # of this program, of an output plugin, of the consumer: the connection is well
                    self._finish_after_failure()
                    raise
                self._finish()
                is_cut = is_cut or self._receiver.is_taking or self._records.pending_bytes > 0
                if self._is_abandoned and not self._is_asked_to_end and (is_cut or not self._tracker.is_finished):
                    raise closed_stdin_error()
            finally:
                self._receiver.close()
                self._records.close()
                self._commands.close()
        return ExitCode.SUCCESS

    def keep_serving(self) -> None:
        """Read commands, write output and send status updates while a record waits for an answer from the catalog.

        Call this repeatedly during such a wait. It raises an error if something ends the stream.
        """
        if self._is_ending:
            return
        if not self._commands.is_closed:
            self._commands.read(self._records.confirm)
        if self._is_asked_to_end or self._is_abandoned:
            raise _Stopped
        self._records.write()
        self._status.send_if_due(time.monotonic())

    def _make_room(self) -> None:
        """Do as `keep_serving` until the consumer has taken most of what is queued. An output plugin is writing meanwhile."""
        self._progress.is_read = False
        self._records.release()
        self.keep_serving()
        while self._records.pending_bytes >= MAX_PENDING_BYTES:
            poll = self._poll_of_consumer()
            poll.poll(max(0.0, self._progress.due_at() - time.monotonic()) * 1000)
            self.keep_serving()

    def stay_alive(self) -> None:
        """Send status updates while a check waits for its answer."""
        self._status.send_if_due(time.monotonic())

    def state(self) -> StreamState:
        """Return how far the stream is. Another thread may ask: each number is right, but they may be a moment apart."""
        progress, records = self._progress, self._records
        held, spilled = (0, 0) if self._transactions is None else self._transactions.sizes
        return StreamState(
            progress.received_lsn,
            progress.written_lsn,
            progress.confirmed_lsn,
            self._receiver.records,
            self._tracker.transactions,
            records.bytes,
            records.pending_bytes,
            held,
            spilled,
            progress.heard_at,
        )

    def _finish(self) -> None:
        """Write the records that are held, send the last feedback, and end the stream so that the server has read the feedback."""
        self._is_ending = True
        self._progress.is_read = False
        try:
            self._records.release()
        finally:
            self._records.drain(self._serve_to_the_end)
            self._take_last_feedback()
            end_stream(self._walsender, self._status, lambda: self._progress.confirmed_lsn, self._confirmed_on_server)

    def _finish_after_failure(self) -> None:
        """Do as `_finish`, with the records before the one that failed. The error that ended the stream is to be raised then."""
        try:
            try:
                self._receiver.queue_before_failure()
            finally:
                self._finish()
        except Exception as ex:  # noqa: BLE001 - such as the loss of the connection: libpq closes the socket after damaged bytes
            log.info("after the error: %s", ex if isinstance(ex, CdcpipeError) else type(ex).__name__)

    def _serve_to_the_end(self) -> None:
        """Take feedback and send status updates while the last records are written: a slow consumer may take minutes.

        If the connection is lost, `end_stream` reports it.
        """
        self._take_last_feedback()
        with contextlib.suppress(ConnectionClosedError, ServerError):
            self._status.send_if_due(time.monotonic())

    def _take_last_feedback(self) -> None:
        """Read commands once, unless the consumer has sent its last one. A bad command changes nothing: the stream ends anyway."""
        if not (self._commands.is_quit or self._commands.is_closed):
            with contextlib.suppress(CommandError):
                self._commands.read(self._records.confirm)

    # The loop

    def _loop(self) -> None:
        progress, records, receiver = self._progress, self._records, self._receiver
        received = 0
        while not (self._is_asked_to_end or self._is_abandoned):
            if receiver.has_more and self._is_reading:
                received = receiver.receive()
            elif records.pending_bytes or not self._is_reading:
                progress.heard(time.monotonic())  # the loop did not read meanwhile, so the silence does not count
            self._tell_idle_position(time.monotonic())
            if not (receiver.has_more and self._is_reading):
                records.release()
            records.write()
            now = time.monotonic()
            if self._tracker.is_finished and not records.pending_bytes and not receiver.is_taking:
                if self._hung_up:
                    raise ConnectionClosedError("the connection to the server was lost before the last feedback")
                if not self._stays_after_end():
                    return
            self._status.send_if_due(now)
            if progress.is_lost(now):
                raise ConnectionClosedError(
                    f"the server has said nothing for {progress.silence_limit_s:g} s, and did not answer when asked",
                    hint="check the network, and the walsender on the server (pg_stat_replication)",
                )
            self._burst.measure(received, now)
            received = 0
            self._wait(now)

    def _tell_idle_position(self, now: float) -> None:
        """Write an empty record if the consumer has to confirm an idle position, and is due to be told of it."""
        is_last = self._tracker.is_finished and not self._receiver.is_taking
        lsn = self._progress.take_idle(now, at_end=is_last)
        if lsn:
            self._receiver.queue_idle(lsn)

    @property
    def _is_asked_to_end(self) -> bool:
        return self._commands.is_quit or self._signals.is_set

    @property
    def _is_abandoned(self) -> bool:
        """Whether the stream needs commands, and no more can come."""
        return self._commands.is_closed and self._options.needs_commands

    @property
    def _is_reading(self) -> bool:
        """Whether the loop reads the socket: it has room for records, and the stream is not at its end."""
        return self._records.pending_bytes < MAX_PENDING_BYTES and (self._receiver.is_taking or not self._tracker.is_finished)

    def _stays_after_end(self) -> bool:
        """Return whether the loop stays for feedback at the end position. If so, close the output, and answer the server."""
        if not self._options.wait_after_end:
            return False
        if not self._records.is_closed:
            self._records.close_descriptor(self._options.command_fd)
            self._walsender.set_low_water_mark(1)
            self._takes_keepalives = True
            log.info("the end position is reached; waiting for the last feedback")
        if self._takes_keepalives:
            self._takes_keepalives = take_keepalives(self._walsender, self._progress)
        return True

    def _wait(self, now: float) -> None:
        """Wait for the server, a command, room in the pipe, a signal or the timer. If records are at hand, do not wait."""
        walsender, records, commands = self._walsender, self._records, self._commands
        is_reading = self._is_reading
        # While the receiver hands a transaction on, nobody reads the socket.
        self._progress.is_read = is_reading and not self._receiver.is_taking
        timeout_s = max(0.0, self._progress.due_at() - now)
        if is_reading:
            timeout_s = 0.0 if self._receiver.has_more else self._burst.gather(timeout_s)
        poll = self._poll_of_consumer()
        socket_fd = walsender.socket
        wants_input = is_reading or self._takes_keepalives
        if is_reading or not self._hung_up:
            poll.register(socket_fd, (select.POLLIN if wants_input else 0) | (0 if walsender.flush() else select.POLLOUT))
        ready = dict(poll.poll(None if timeout_s == float("inf") else timeout_s * 1000))
        if self._signals.fd in ready:
            self._signals.clear()
        if commands.fd in ready or self._signals.is_set:
            commands.read(records.confirm)
        if is_reading and ready.get(socket_fd, 0) & select.POLLIN:
            self._progress.heard(time.monotonic())  # a part of a long record: no message can come before its end
        if socket_fd in ready or self._burst.is_holding_back:
            self._receiver.has_more = True
            if not wants_input and ready.get(socket_fd, 0) & (select.POLLHUP | select.POLLERR):
                # The consumer still needs the records received before.
                self._hung_up = True
        # A pipe without a reader gives POLLERR, a socket POLLHUP.
        if ready.get(records.fd, 0) & (select.POLLERR | select.POLLHUP | select.POLLNVAL) and not records.is_closed:
            raise closed_stdout_error()

    def _poll_of_consumer(self) -> select.poll:
        """Return what wakes for a command, room in the pipe, or a signal."""
        poll = select.poll()
        poll.register(self._signals.fd, select.POLLIN)
        if not self._commands.is_closed:
            poll.register(self._commands.fd, select.POLLIN)
        if not self._records.is_closed:
            poll.register(self._records.fd, select.POLLOUT if self._records.pending_bytes else 0)
        return poll
