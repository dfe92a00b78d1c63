"""A connection to a walsender: replication commands, and CopyData messages in both directions after START_REPLICATION.

`Walsender.receive` is libpq's own ``PQgetCopyData``, bound once, because it runs for each record. Of the methods for streaming,
only `Walsender.copy_result` waits. The streaming loop does its own waiting.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import ClassVar

import psycopg
from psycopg import pq

from cdcpipe.errors import ConnectionClosedError
from cdcpipe.libpq.connection import Connection
from cdcpipe.libpq.server_errors import server_error
from cdcpipe.libpq.waiting import NO_LIMIT, OverdueError

__all__ = ["Walsender"]


class Walsender(Connection):
    """A connection with ``replication=database``."""

    _MODE: ClassVar[Mapping[str, str]] = {"replication": "database"}

    Lost = psycopg.OperationalError
    """The exception that ``consume_input`` raises when the connection is lost; see ``closed_error``."""

    def __init__(
        self,
        parameters: Mapping[str, str],
        *,
        within_s: float = NO_LIMIT,
        while_waiting: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(parameters, within_s=within_s, while_waiting=while_waiting)
        self.receive: Callable[[int], tuple[int, memoryview]] = self._pgconn.get_copy_data
        """``receive(1)`` returns ``(length, CopyData)``. Length 0: no complete message has arrived. -1: the copy has ended."""
        self.consume_input: Callable[[], None] = self._pgconn.consume_input
        """Read what the socket has, without waiting; raises ``Walsender.Lost``."""
        self._low_water = 1
        self._to_flush = False

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

    def send(self, data: bytes) -> bool:
        """Queue a CopyData message. Return False if libpq has no room: then call this again when the socket is writable."""
        with self._translating_loss():
            if self._pgconn.put_copy_data(data) == 0:
                return False
        self._to_flush = True
        self.flush()
        return True

    def flush(self) -> bool:
        """Send the queued messages. Return True once nothing is left."""
        if self._to_flush:
            with self._translating_loss():
                self._to_flush = self._pgconn.flush() != 0
        return not self._to_flush

    def end_copy(self) -> None:
        """Queue CopyDone."""
        with self._translating_loss():
            self._pgconn.put_copy_end()
        self._to_flush = True
        self.flush()

    def copy_result(self, timeout_s: float) -> None:
        """Read the results after the copy has ended.

        Return if the server ended the stream without an error. Raise ServerError if it ended the stream with one. Raise
        ConnectionClosedError if the connection is lost or the server does not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        ended = (None, pq.ExecStatus.COPY_IN, pq.ExecStatus.COPY_OUT, pq.ExecStatus.COPY_BOTH)
        try:
            with self._translating_loss():
                while (result := self._result(deadline)) is not None and result.status not in ended:
                    if result.status == pq.ExecStatus.FATAL_ERROR:
                        raise server_error(result)
        except OverdueError:
            msg = f"the server has not answered within {timeout_s:g} s to the end of the stream"
            raise ConnectionClosedError(msg, hint="check the network") from None
