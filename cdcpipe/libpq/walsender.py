"""A connection to a walsender: replication commands, and CopyData messages in both directions after START_REPLICATION.

`Walsender.receive` is libpq's own ``PQgetCopyData``, bound once, because it runs for each record. If this process reads the socket
itself (`Walsender.start_copy`), it is `DirectCopy.receive`. Of the methods for streaming, only `Walsender.copy_result` and
`Walsender.gather` wait. The streaming loop does its own waiting.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Mapping
from typing import ClassVar

from cdcpipe.errors import ConnectionClosedError, ProtocolError, ServerError
from cdcpipe.libpq.connection import Connection, Rows
from cdcpipe.libpq.direct_copy import DAMAGE_HINT, DirectCopy, Fields, LostError, Message
from cdcpipe.libpq.driver import errors, pq
from cdcpipe.libpq.server_errors import failure_of, loss, server_error
from cdcpipe.libpq.waiting import NO_LIMIT, OverdueError

__all__ = ["Walsender"]


class Walsender(Connection):
    """A connection with ``replication=database``."""

    _MODE: ClassVar[Mapping[str, str]] = {"replication": "database"}

    Lost = (errors.OperationalError, LostError)
    """The exceptions that ``consume_input`` raises when the connection is lost; see ``closed_error``."""
    Damaged = errors.OperationalError
    """What libpq's ``receive`` raises for bytes that it can't take; see ``damage_error``."""

    def __init__(
        self,
        parameters: Mapping[str, str],
        *,
        within_s: float = NO_LIMIT,
        while_waiting: Callable[[], None] | None = None,
        mark: str = "",
    ) -> None:
        super().__init__(parameters, within_s=within_s, while_waiting=while_waiting, mark=mark)
        self.direct: DirectCopy | None = None
        """The copy, if this process reads the socket itself."""
        self.receive: Callable[[int], tuple[int, memoryview | bytes]] = self._pgconn.get_copy_data
        """``receive(1)`` returns ``(length, CopyData)``. Length 0: no complete message has arrived. -1: the copy has ended."""
        self.consume_input: Callable[[], None] = self._pgconn.consume_input
        """Read what the socket has, without waiting; raises ``Walsender.Lost``."""
        self._low_water = 1
        self._to_flush = False
        self._is_completed = False
        """Whether the server has said that the copy's command is complete."""

    def wait(self, events: int, deadline: float) -> bool:
        """Wait as `Connection.wait` does, with a low-water mark of 1, because an answer may be shorter than any other mark."""
        self.set_low_water_mark(1)
        return super().wait(events, deadline)

    def set_low_water_mark(self, size: int) -> bool:
        """Make the kernel report the socket as readable only with ``size`` bytes or more. False if the socket can't do this.

        The mark holds until this object waits again (`wait`). While it holds, a poll of the socket needs a time-out.
        """
        if size == self._low_water:
            return True
        with socket.socket(fileno=os.dup(self.socket)) as duplicate:
            if duplicate.family == socket.AF_UNIX or self._pgconn.ssl_in_use:
                return False
            try:
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            except OSError:
                return False
        self._low_water = size
        return True

    # Streaming

    def start_copy(self, command: str, *, may_be_direct: bool) -> None:
        """Run a command that starts a copy in both directions. Raises as `execute` does.

        With ``may_be_direct``, the stream is read with `DirectCopy` if the connection can have neither TLS nor GSS encryption. This
        is certain only for a Unix socket, because libpq does not tell whether it uses GSS encryption.
        """
        if may_be_direct and self.direct is None and self._is_unencrypted_and_idle():
            self.direct = DirectCopy(self.socket, self._on_notice)
            self.receive, self.consume_input = self.direct.receive, self.direct.consume_input
        self.execute(command)

    def _is_unencrypted_and_idle(self) -> bool:
        pgconn = self._pgconn
        with socket.socket(fileno=os.dup(self.socket)) as duplicate:
            is_local = duplicate.family == socket.AF_UNIX
        return is_local and not pgconn.is_busy() and pgconn.transaction_status == pq.TransactionStatus.IDLE

    def _run(self, sql: str, deadline: float) -> Rows:
        if self.direct is None:
            return super()._run(sql, deadline)
        self.direct.query(sql)
        while not self.direct.flush():
            self._wait_by(select.POLLOUT, deadline)
        return self._rows(deadline)

    def _rows(self, deadline: float) -> Rows:
        """Read the answer to a command. On a direct copy, this is the command that starts it."""
        if self.direct is None:
            return super()._rows(deadline)
        error: ServerError | ConnectionClosedError | None = None
        try:
            while True:
                kind, body = self._next_message(self.direct, deadline)
                if kind == b"W" and error is None:
                    return []
                if kind == b"E":
                    error = error or server_error(Fields(body))
                elif kind == b"Z" and error is not None:
                    raise error
                elif kind != b"C":
                    raise _misplaced(kind, "the answer to START_REPLICATION")
        except ConnectionClosedError as ex:
            raise error or ex from None

    def _next_message(self, direct: DirectCopy, deadline: float) -> Message:
        """Wait for the next message that is not CopyData."""
        while (message := direct.next_message()) is None:
            self._wait_by(select.POLLIN, deadline)
            try:
                direct.consume_input()
            except LostError:
                raise self.closed_error() from None
        return message

    def gather(self, pause_s: float, enough_bytes: int, within_s: float) -> bool:
        """During a burst, let records gather: at most ``within_s``, and until a direct copy has ``enough_bytes`` of them.

        Between two looks at the socket there is a pause of ``pause_s``, in which the server can go on without waking this process.
        Return whether a direct copy has a whole message. Then the socket need not be readable.
        """
        time.sleep(pause_s)
        if self.direct is None:
            return False
        deadline = time.monotonic() + within_s
        while self.direct.fill() and self.direct.buffered_bytes < enough_bytes and time.monotonic() < deadline:
            time.sleep(pause_s)
        return self.direct.has_message

    def send(self, data: bytes) -> bool:
        """Queue a CopyData message. Return False if there is no room: then call this again when the socket is writable."""
        if self.direct is not None:
            if not self.direct.send(data):
                return False
            self._to_flush = True
            self.flush()
            return True
        with self._translating_loss():
            if self._pgconn.put_copy_data(data) == 0:
                return False
        self._to_flush = True
        self.flush()
        return True

    def flush(self) -> bool:
        """Send the queued messages. Return True once nothing is left."""
        if self._to_flush:
            if self.direct is not None:
                self._to_flush = not self.direct.flush()
            else:
                with self._translating_loss():
                    self._to_flush = self._pgconn.flush() != 0
        return not self._to_flush

    def end_copy(self) -> None:
        """Queue CopyDone."""
        if self.direct is not None:
            self.direct.end_copy()
        else:
            with self._translating_loss():
                self._pgconn.put_copy_end()
        self._to_flush = True
        self.flush()

    def copy_result(self, timeout_s: float) -> None:
        """Read the results after the copy has ended.

        Return if the server ended the stream without an error. Raise ServerError if it ended the stream with one. Raise
        ConnectionClosedError if the connection is lost or the server does not answer in time. A server that shuts down closes the
        connection once it has completed the command, and this error says so.
        """
        deadline = time.monotonic() + timeout_s
        try:
            if self.direct is not None:
                self._direct_result(self.direct, deadline)
            else:
                self._libpq_result(deadline)
        except OverdueError:
            msg = f"the server has not answered within {timeout_s:g} s to the end of the stream"
            raise ConnectionClosedError(msg, hint="check the network") from None
        except ConnectionClosedError:
            if not self._is_completed:
                raise
            raise ConnectionClosedError(
                "the server has ended the stream and the connection", hint="it is shutting down: connect again later"
            ) from None

    def _libpq_result(self, deadline: float) -> None:
        ended = (None, pq.ExecStatus.COPY_IN, pq.ExecStatus.COPY_OUT, pq.ExecStatus.COPY_BOTH)
        with self._translating_loss():
            while (result := self._result(deadline)) is not None and result.status not in ended:
                if result.status == pq.ExecStatus.FATAL_ERROR:
                    raise server_error(result, reads_rows=True)
                self._is_completed |= result.status == pq.ExecStatus.COMMAND_OK

    def _direct_result(self, direct: DirectCopy, deadline: float) -> None:
        while True:
            kind, body = self._next_message(direct, deadline)
            if kind == b"E":
                raise server_error(Fields(body), reads_rows=True)
            if kind == b"Z" or (kind == b"c" and not direct.is_ended):
                return
            self._is_completed |= kind == b"C"
            # A server that sends a transaction goes on to its end after its CopyDone. libpq drops such data, too.
            if kind not in (b"c", b"C", b"d"):
                raise _misplaced(kind, "the end of the stream")

    # The end

    def closed_error(self) -> ConnectionClosedError:
        """Return the error for this connection when it is lost."""
        return loss(self.direct.failure) if self.direct is not None and self.direct.failure else super().closed_error()

    def damage_error(self) -> ProtocolError:
        """Return the error for bytes that libpq can't take. libpq has closed the socket then. Raises as `failure_of` does."""
        return ProtocolError(f"the server sent what has no place in a stream: {failure_of(self._pgconn)}", hint=DAMAGE_HINT)

    def close(self) -> None:
        """Close the connection."""
        if self.direct is not None:
            self.direct.close()
        super().close()


def _misplaced(kind: bytes, what: str) -> ProtocolError:
    return ProtocolError(f"the server sent a message of kind {kind.decode()!r} as a part of {what}")
