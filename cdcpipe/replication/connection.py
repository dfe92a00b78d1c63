"""The one module that touches psycopg: ``psycopg.pq`` behind a small surface, and SQLSTATE → errors.

A ``Connection`` is libpq's, non-blocking. Commands wait (``execute``); the stream does not: ``receive`` is libpq's own
``PQgetCopyData``, bound once, because it runs per record. Errors of psycopg and of the server end here: everything that
leaves is an error of ``cdcpipe.errors``. The simple query protocol only: a walsender knows no other.
"""

from __future__ import annotations

import os
import re
import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import psycopg
from psycopg import conninfo as psycopg_conninfo
from psycopg import pq

from cdcpipe.errors import ConnectionClosedError, InitError, InvalidArgumentsError, ServerError
from cdcpipe.sql import quote_identifier, quote_literal

__all__ = ["Connection", "Notice", "Rows", "connection_parameters"]

Rows = list[tuple[str | None, ...]]

_SECRETS = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")

_URI = re.compile(r"\s*(postgres(ql)?:|\w+://)", re.IGNORECASE)
_BEFORE_PATH = re.compile(r"\s*\w+:/*[^/?]*")
_URI_HINT = "it is postgresql://user@host:port/database?name=value, with %-codes for : / @ ? # [ ] % inside a part of it"
_STRING_HINT = "it is name=value name='a value with spaces', with \\' for a quote character and \\\\ for a backslash in a value"

_HINTS = {
    "28P01": "set PGPASSWORD, or use a password file or a service file",
    "28000": "check pg_hba.conf: the role needs a line for this database (and 'replication=database' uses the database's lines)",
    "3D000": "check the database's name (-d, PGDATABASE)",
    "42883": "where a type has no binary form, its values come only as text: leave the option 'binary' out",
    "42501": "see the server's message; streaming needs a role with the REPLICATION attribute: ALTER ROLE name REPLICATION",
    "53300": "raise max_wal_senders or max_connections on the server",
    "53400": "raise max_replication_slots or max_wal_senders on the server",
    "57P01": "an administrator ended it, or the server is shutting down: connect again later",
    "57P03": "the server is starting up or shutting down; try again",
}
"""SQLSTATE → what the user can do."""

_SESSION_ENDED = "57P"
"""Beginning of the SQLSTATEs with which a server ends a session: an administrator's order, a shutdown, a crash, a time-out."""


class Notice(NamedTuple):
    """A NOTICE or WARNING that the server sent."""

    severity: str
    sqlstate: str
    message: str


def connection_parameters(parameters: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Merge libpq parameters in the order given; ``dbname`` may be a conninfo string or a URI, as libpq has it.

    Raise InvalidArgumentsError for a parameter that libpq does not know, and for a password: a command line is there for every
    user of the machine to read.
    """
    merged: dict[str, str] = {}
    for key, value in parameters:
        if key in _SECRETS:
            _refuse_secret(key)
        expanded = _parse_conninfo(value) if key == "dbname" and _is_conninfo(value) else _checked(key, value)
        for secret in _SECRETS:
            if expanded.get(secret):
                _refuse_secret(secret)
        merged.update({name: str(setting) for name, setting in expanded.items() if setting is not None})
    return merged


def _is_conninfo(dbname: str) -> bool:
    """Tell whether libpq takes it for a connection string, or its writer meant one (``postgres:/user:…``)."""
    return "=" in dbname or _is_uri(dbname)


def _parse_conninfo(text: str) -> dict[str, Any]:
    """Split a connection string into parameters; no error shows a part of it.

    A character that belongs to a password may have ended it (``/`` and ``@`` in a URI, a space in the other form), and what libpq
    complains of, or takes for another parameter, is then the rest of the password.
    """
    try:
        expanded: dict[str, Any] | None = psycopg_conninfo.conninfo_to_dict(text)
    except psycopg.Error:
        expanded = None
    if expanded is not None and not _has_misplaced_rest(text, expanded):
        return expanded
    what, hint = ("URI", _URI_HINT) if _is_uri(text) else ("connection string", _STRING_HINT)
    raise InvalidArgumentsError(f"the {what} that was given as database can't be read (it is not shown)", hint=hint)


def _has_misplaced_rest(text: str, expanded: Mapping[str, Any]) -> bool:
    """Tell whether a port is no number, or an ``@`` is where a URI has the database's name."""
    ports = str(expanded.get("port") or "").split(",")
    path = _BEFORE_PATH.sub("", text).partition("?")[0] if _is_uri(text) else ""
    return "@" in path or not all(port.strip().isdecimal() or not port for port in ports)


def _is_uri(text: str) -> bool:
    return _URI.match(text) is not None


def _checked(key: str, value: str) -> dict[str, str]:
    """Return one parameter; raise InvalidArgumentsError if libpq has none of this name."""
    try:
        psycopg_conninfo.make_conninfo(**{key: value})
    except psycopg.Error:
        # A text that is no name may be the beginning of a connection string.
        named = f"connection parameter {key!r}" if key.isidentifier() else "a connection parameter"
        msg = f"{named} can't be used: libpq has none of this name"
        raise InvalidArgumentsError(
            msg, hint="PostgreSQL's manual lists them: Parameter Key Words, in the chapter on libpq"
        ) from None
    return {key: value}


def _refuse_secret(key: str) -> None:
    msg = f"{key} is not taken from the command line, where every user of this machine could read it"
    raise InvalidArgumentsError(msg, hint="set PGPASSWORD, or use a password file (PGPASSFILE) or a service file")


class Connection:
    """One libpq connection, in non-blocking mode.

    ``parameters`` are libpq's. Raise InitError if the connection can't be made; ``connect_timeout`` is honoured.
    """

    def __init__(self, parameters: Mapping[str, str], *, replication: bool) -> None:
        settings = {"fallback_application_name": "cdcpipe", **parameters, "client_encoding": "UTF8"}
        if replication:
            settings["replication"] = "database"
        else:
            settings.pop("replication", None)
        self.notices: list[Notice] = []
        self._pgconn = self._connect(settings)
        self._pgconn.nonblocking = 1
        self._pgconn.notice_handler = self._on_notice
        self.receive: Callable[[int], tuple[int, memoryview]] = self._pgconn.get_copy_data
        """``receive(1)``: ``(length, CopyData)``; length 0 = nothing whole is here, -1 = the copy has ended."""
        self.consume_input: Callable[[], None] = self._pgconn.consume_input
        """Read what the socket has, without waiting; raises ``Connection.Lost``."""
        self._to_flush = False

    Lost = psycopg.OperationalError
    """What ``consume_input`` raises when the connection is gone; see ``closed_error``."""

    @staticmethod
    def _connect(settings: Mapping[str, str]) -> pq.abc.PGconn:
        timeout_s = float(settings.get("connect_timeout") or os.environ.get("PGCONNECT_TIMEOUT") or 0)
        deadline = time.monotonic() + max(timeout_s, 2.0) if timeout_s > 0 else None
        conninfo = psycopg_conninfo.make_conninfo(**dict(settings))
        pgconn = pq.PGconn.connect_start(conninfo.encode())
        while True:
            if pgconn.status == pq.ConnStatus.BAD:
                break
            state = pgconn.connect_poll()
            if state == pq.PollingStatus.OK:
                return pgconn
            if state == pq.PollingStatus.FAILED:
                break
            events = select.POLLIN if state == pq.PollingStatus.READING else select.POLLOUT
            if not _wait(pgconn.socket, events, deadline):
                msg = f"no connection to the server within {timeout_s:g} s (connect_timeout)"
                raise InitError(msg, hint="check host and port, and that the server is up")
        message = pgconn.get_error_message().strip()
        pgconn.finish()
        msg = f"connection to the server failed: {message}"
        raise InitError(msg, hint=_connection_hint(message))

    def _on_notice(self, result: pq.abc.PGresult) -> None:
        fields = [
            (result.error_field(code) or b"").decode("utf-8", "replace")
            for code in (
                pq.DiagnosticField.SEVERITY_NONLOCALIZED,
                pq.DiagnosticField.SQLSTATE,
                pq.DiagnosticField.MESSAGE_PRIMARY,
            )
        ]
        self.notices.append(Notice(*fields))

    # What the server says of itself

    def parameter_status(self, name: str) -> str | None:
        """Return the server's report of one of its settings."""
        value = self._pgconn.parameter_status(name.encode())
        return None if value is None else value.decode("utf-8", "replace")

    @property
    def server_version(self) -> int:
        """The server's version as a number, ``180004`` for 18.4."""
        return self._pgconn.server_version

    @property
    def database(self) -> str:
        """The name of the database."""
        return self._pgconn.db.decode("utf-8", "replace")

    @property
    def address(self) -> dict[str, str]:
        """Where the connection leads, as libpq's parameters: one server, also where several were given to try."""
        pgconn = self._pgconn
        values = {"host": pgconn.host, "port": pgconn.port, "user": pgconn.user, "dbname": pgconn.db}
        return {name: value.decode("utf-8", "replace") for name, value in values.items() if value}

    # Commands

    def execute(self, sql: str, *, timeout_s: float | None = None) -> Rows:
        """Run one command and return its rows; raise ServerError, or ConnectionClosedError.

        Beyond ``timeout_s`` the command is cancelled, and the server's answer to that (57014) is raised.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pgconn = self._pgconn
        try:
            pgconn.send_query(sql.encode())
            while pgconn.flush():
                _wait(pgconn.socket, select.POLLIN | select.POLLOUT, None)
                pgconn.consume_input()
            rows: Rows = []
            error: ServerError | ConnectionClosedError | None = None
            while True:
                while pgconn.is_busy():
                    if not _wait(pgconn.socket, select.POLLIN, deadline):
                        deadline = None
                        self.cancel()
                    pgconn.consume_input()
                result = pgconn.get_result()
                if result is None:
                    break
                if result.status == pq.ExecStatus.TUPLES_OK:
                    rows = [
                        tuple(
                            None if (value := result.get_value(row, column)) is None else value.decode("utf-8", "replace")
                            for column in range(result.nfields)
                        )
                        for row in range(result.ntuples)
                    ]
                elif result.status == pq.ExecStatus.COPY_BOTH:
                    break
                elif result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.EMPTY_QUERY):
                    error = error or self._server_error(result)
        except psycopg.OperationalError as ex:
            raise self.closed_error() from ex
        except BaseException:  # a signal: what runs must not go on without us, and leave a slot behind
            self.cancel()
            raise
        if error is not None:
            raise error
        return rows

    def cancel(self) -> None:
        """Ask the server to cancel what runs on this connection."""
        try:
            self._pgconn.get_cancel().cancel()
        except psycopg.OperationalError as ex:
            raise self.closed_error() from ex

    def pin_session(self, settings: Mapping[str, str]) -> None:
        """Set ``settings`` for this session, and check those that the server reports."""
        for name, value in settings.items():
            self.execute(f"SET {quote_identifier(name.lower())} = {quote_literal(value)}")
        for name, value in settings.items():
            reported = self.parameter_status(name)
            if reported is not None and not reported.startswith(value):
                msg = f"the server did not take {name} = {value}, it reports {reported}"
                raise InitError(msg)

    def _server_error(self, result: pq.abc.PGresult) -> ServerError | ConnectionClosedError:
        """Return the error that a result is; a session that the server has ended is a lost connection, not an error in the data."""

        def field(code: pq.DiagnosticField) -> str:
            return (result.error_field(code) or b"").decode("utf-8", "replace").strip()

        sqlstate = field(pq.DiagnosticField.SQLSTATE) or None
        primary = field(pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message.decode("utf-8", "replace").strip()
        # The context of an error in decoding names the slot, the plugin's callback and the LSN; the detail may hold values.
        context = field(pq.DiagnosticField.CONTEXT)
        parts = [primary, f"({sqlstate})" if sqlstate else "", f"[{context}]" if context else ""]
        server_hint = field(pq.DiagnosticField.MESSAGE_HINT)
        hint = server_hint or _HINTS.get(sqlstate or "")
        message = " ".join(part for part in parts if part)
        if sqlstate and sqlstate.startswith(_SESSION_ENDED):
            return ConnectionClosedError(f"the server ended the connection: {message}", hint=hint or None)
        return ServerError(message, sqlstate=sqlstate, hint=hint or None)

    # The stream

    @property
    def socket(self) -> int:
        """The socket's descriptor; raise ConnectionClosedError if there is none any more."""
        try:
            return self._pgconn.socket
        except psycopg.OperationalError as ex:
            raise self.closed_error() from ex

    def set_low_water_mark(self, size: int) -> bool:
        """Ask the kernel to call the socket readable only from ``size`` bytes on; False where that is not to be had."""
        with socket.socket(fileno=os.dup(self.socket)) as duplicate:
            if duplicate.family == socket.AF_UNIX or self._pgconn.ssl_in_use:
                return False
            try:
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            except OSError:
                return False
            return True

    def send(self, data: bytes) -> bool:
        """Queue a CopyData message; False if libpq has no room, and it has to be sent again when the socket is writable."""
        try:
            if self._pgconn.put_copy_data(data) == 0:
                return False
        except psycopg.OperationalError as ex:
            raise self.closed_error() from ex
        self._to_flush = True
        self.flush()
        return True

    def flush(self) -> bool:
        """Send what is queued; True once nothing is left."""
        if self._to_flush:
            try:
                self._to_flush = self._pgconn.flush() != 0
            except psycopg.OperationalError as ex:
                raise self.closed_error() from ex
        return not self._to_flush

    def end_copy(self) -> None:
        """Queue CopyDone."""
        try:
            self._pgconn.put_copy_end()
        except psycopg.OperationalError as ex:
            raise self.closed_error() from ex
        self._to_flush = True
        self.flush()

    def copy_result(self) -> None:
        """Take the results after the copy has ended; raise ServerError if the server ended it with one.

        Return if the server ended the stream in order, ConnectionClosedError is raised if the connection is gone.
        """
        try:
            while True:
                while self._pgconn.is_busy():
                    _wait(self._pgconn.socket, select.POLLIN, None)
                    self._pgconn.consume_input()
                result = self._pgconn.get_result()
                if result is None:
                    return
                if result.status == pq.ExecStatus.FATAL_ERROR:
                    raise self._server_error(result)
                if result.status in (pq.ExecStatus.COPY_IN, pq.ExecStatus.COPY_OUT, pq.ExecStatus.COPY_BOTH):
                    return
        except psycopg.OperationalError as ex:
            raise self.closed_error() from ex

    def closed_error(self) -> ConnectionClosedError:
        """Return the error for a connection that is gone."""
        message = self._pgconn.get_error_message().strip()
        first_line = message.splitlines()[0] if message else "connection lost"
        return ConnectionClosedError(f"the connection to the server was lost: {first_line}")

    def close(self) -> None:
        """Close the connection."""
        self._pgconn.finish()


def _wait(fd: int, events: int, deadline: float | None) -> bool:
    """Wait until ``fd`` is ready; False if the deadline came first."""
    poll = select.poll()
    poll.register(fd, events)
    if deadline is None:
        poll.poll()
        return True
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def _connection_hint(message: str) -> str | None:
    if "password" in message:
        return _HINTS["28P01"]
    if "does not exist" in message and "database" in message:
        return _HINTS["3D000"]
    if "WAL sender" in message or "replication role" in message:
        return _HINTS["42501"]
    if "pg_hba" in message:
        return _HINTS["28000"]
    return "check host, port, user and database (-h -p -U -d, or libpq's environment variables), and that the server is up"
