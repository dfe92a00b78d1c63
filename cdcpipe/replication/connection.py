"""The one module that touches psycopg: ``psycopg.pq`` behind a small surface, and SQLSTATE → errors.

A ``Connection`` is libpq's, non-blocking. Commands wait (``execute``); the stream does not: ``receive`` is libpq's own
``PQgetCopyData``, bound once, because it runs per record. Errors of psycopg and of the server end here: everything that
leaves is an error of ``cdcpipe.errors``. The simple query protocol only: a walsender knows no other.

Every wait has a deadline, is done in short slices, and so wakes for a signal: see `_wait`. No call of libpq's blocks.
"""

from __future__ import annotations

import logging
import os
import re
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import psycopg
from psycopg import conninfo as psycopg_conninfo
from psycopg import pq

from cdcpipe import sqlstate
from cdcpipe.errors import CdcpipeError, ConnectionClosedError, InitError, InvalidArgumentsError, ServerError
from cdcpipe.replication import hosts
from cdcpipe.sql import quote_identifier, quote_literal

__all__ = ["ANSWER_TIMEOUT_S", "NO_LIMIT", "Connection", "Notice", "Rows", "connection_parameters"]

log = logging.getLogger(__name__)

Rows = list[tuple[str | None, ...]]

NO_LIMIT = float("inf")
"""For commands that take as long as there is data, or as somebody else's transaction. TCP's keepalives find out a dead network."""

CONNECT_TIMEOUT_S = 30.0
"""For each host, unless connect_timeout says otherwise (0 there: no limit)."""
ANSWER_TIMEOUT_S = 60.0
"""How long a command may take, unless its caller says otherwise."""
CANCEL_TIMEOUT_S = 2.0
"""How long a request to cancel may take."""
CANCELLED_TIMEOUT_S = 5.0
"""How long a server that was asked to cancel has to say that it did."""

_KEEPALIVES = {"keepalives_idle": "60", "keepalives_interval": "10", "keepalives_count": "6"}
"""In place of the system's two hours, unless the user has a number for any."""

_SLICE_S = 0.2
"""The longest that a wait is deaf: a signal that comes right before the kernel's wait does not end it."""

_SEVERAL_COMMANDS_SINCE = 140002
"""The walsenders of 14.0 and 14.1 take one SQL command in a message, and no more."""

_SECRETS = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")

_URI = re.compile(r"\s*(postgres(ql)?:|\w+://)", re.IGNORECASE)
_BEFORE_PATH = re.compile(r"\s*\w+:/*[^/?]*")
_URI_HINT = "it is postgresql://user@host:port/database?name=value, with %-codes for : / @ ? # [ ] % inside a part of it"
_STRING_HINT = "it is name=value name='a value with spaces', with \\' for a quote character and \\\\ for a backslash in a value"

_HINTS = {
    sqlstate.INVALID_PASSWORD: "set PGPASSWORD, or use a password file or a service file",
    sqlstate.INVALID_AUTHORIZATION: "check pg_hba.conf: the role needs a line for this database (and 'replication=database' "
    "uses the database's lines)",
    sqlstate.INVALID_CATALOG_NAME: "check the database's name (-d, PGDATABASE)",
    sqlstate.UNDEFINED_FUNCTION: "where a type has no binary form, its values come only as text: leave the option 'binary' out",
    sqlstate.INSUFFICIENT_PRIVILEGE: "see the server's message; streaming needs a role with the REPLICATION attribute: "
    "ALTER ROLE name REPLICATION",
    sqlstate.TOO_MANY_CONNECTIONS: "raise max_wal_senders or max_connections on the server",
    sqlstate.CONFIGURATION_LIMIT_EXCEEDED: "raise max_replication_slots or max_wal_senders on the server",
    sqlstate.TERMINATED_BY_ADMINISTRATOR: "an administrator ended it, or the server is shutting down: connect again later",
    sqlstate.CANNOT_CONNECT_NOW: "the server is starting up or shutting down; try again",
}
"""SQLSTATE → what the user can do."""


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

    ``parameters`` are libpq's. Raise InitError if the connection can't be made; each host has its own ``connect_timeout``, as in
    libpq. ``within_s`` bounds all hosts together, and then each command that has no limit of its own. ``while_waiting`` is called
    again and again during every wait; what it raises ends the wait.
    """

    def __init__(
        self,
        parameters: Mapping[str, str],
        *,
        replication: bool,
        within_s: float = NO_LIMIT,
        while_waiting: Callable[[], None] | None = None,
    ) -> None:
        settings = {"fallback_application_name": "cdcpipe", **parameters, "client_encoding": "UTF8"}
        if replication:
            settings["replication"] = "database"
        else:
            settings.pop("replication", None)
        self.notices: list[Notice] = []
        self.answer_timeout_s = min(within_s, ANSWER_TIMEOUT_S)
        """How long `execute` waits, unless it is told otherwise."""
        self._while_waiting = while_waiting
        self._settings = settings
        self._low_water = 1
        self._pgconn = self._connect(settings, time.monotonic() + within_s)
        self._pgconn.nonblocking = 1
        self._pgconn.notice_handler = self._on_notice
        self.receive: Callable[[int], tuple[int, memoryview]] = self._pgconn.get_copy_data
        """``receive(1)``: ``(length, CopyData)``; length 0 = nothing whole is here, -1 = the copy has ended."""
        self.consume_input: Callable[[], None] = self._pgconn.consume_input
        """Read what the socket has, without waiting; raises ``Connection.Lost``."""
        self._to_flush = False

    Lost = psycopg.OperationalError
    """What ``consume_input`` raises when the connection is gone; see ``closed_error``."""

    def _connect(self, settings: Mapping[str, str], deadline: float) -> pq.abc.PGconn:
        """Let libpq choose among the hosts; one that does not answer in time is left out, and it chooses among the rest."""
        effective = _effective(settings)
        timeout_s = _connect_timeout_s(effective.get("connect_timeout"))
        keepalives = {} if effective.keys() & _KEEPALIVES.keys() else _KEEPALIVES
        named = hosts.split_hosts(*(effective.get(name, "") for name in ("host", "hostaddr", "port")))
        left, failures = hosts.look_up(named, min(deadline, time.monotonic() + timeout_s))
        while left or not named:  # of lists that do not fit together libpq says so
            parameters = {**keepalives, **settings, **hosts.parameters_of(left)}
            pgconn = pq.PGconn.connect_start(psycopg_conninfo.make_conninfo(**parameters).encode())
            if self._poll_connection(pgconn, timeout_s, deadline):
                return pgconn
            message = pgconn.get_error_message().strip() if pgconn.status == pq.ConnStatus.BAD else ""
            silent = _current_host(pgconn)
            pgconn.finish()
            if message:
                msg = "; ".join([f"connection to the server failed: {message}", *failures])
                raise InitError(msg, hint=_connection_hint(message))
            failures.append(f"{silent} did not answer in time (connect_timeout)")
            rest = [each for each in left if not each.is_at(silent)]
            if rest == left or time.monotonic() >= deadline:
                break
            left = rest
        msg = f"no connection to the server: {'; '.join(failures)}"
        raise InitError(msg, hint="check host and port, and that the server is up")

    def _poll_connection(self, pgconn: pq.abc.PGconn, timeout_s: float, deadline: float) -> bool:
        """Return True once connected; False if libpq has given up (its status is BAD), or if the host that it is at is silent."""
        host, host_deadline = None, deadline
        while pgconn.status != pq.ConnStatus.BAD:
            state = pgconn.connect_poll()
            if state == pq.PollingStatus.OK:
                return True
            if state == pq.PollingStatus.FAILED:
                return False
            if host != (host := _current_host(pgconn)):
                host_deadline = min(deadline, time.monotonic() + timeout_s)
            events = select.POLLIN if state == pq.PollingStatus.READING else select.POLLOUT
            if not _wait(pgconn.socket, events, host_deadline, self._while_waiting):
                return False
        return False

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

    @property
    def parameters_here(self) -> dict[str, str]:
        """Parameters for another connection to the very server that this one leads to."""
        return {**self._settings, **hosts.parameters_of([_current_host(self._pgconn)])}

    @property
    def parameters_elsewhere(self) -> list[dict[str, str]]:
        """Parameters for each other server that was given to try, one server each."""
        effective = _effective(self._settings)
        named = hosts.split_hosts(*(effective.get(name, "") for name in ("host", "hostaddr", "port")))
        here = _current_host(self._pgconn)
        return [{**self._settings, **hosts.parameters_of([each])} for each in named if not each.is_at(here)]

    # Commands

    def execute(self, sql: str, *, timeout_s: float | None = None) -> Rows:
        """Run one command and return its rows; raise ServerError, or ConnectionClosedError.

        After ``timeout_s`` (None: `answer_timeout_s`) the command is cancelled. That is a ServerError with 57014, or a
        ConnectionClosedError if the server does not react to that either.
        """
        timeout_s = self.answer_timeout_s if timeout_s is None else timeout_s
        try:
            return self._run(sql, time.monotonic() + timeout_s)
        except _OverdueError:
            return self._give_up(timeout_s)
        except CdcpipeError:
            raise
        except BaseException:  # a signal: what runs must not go on without us, and leave a slot behind
            self.cancel()
            raise

    def _run(self, sql: str, deadline: float) -> Rows:
        with self._translating_loss():
            self._pgconn.send_query(sql.encode())
            while self._pgconn.flush():
                self._wait_by(select.POLLIN | select.POLLOUT, deadline)
                self._pgconn.consume_input()
        return self._rows(deadline)

    def _rows(self, deadline: float) -> Rows:
        """Take the results of a command; return the rows, or raise the server's error."""
        rows: Rows = []
        error: ServerError | ConnectionClosedError | None = None
        with self._translating_loss():
            while (result := self._result(deadline)) is not None:
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
        if error is None:
            return rows
        if isinstance(error, ServerError) and error.sqlstate is None and self._pgconn.status == pq.ConnStatus.BAD:
            raise self.closed_error()
        raise error

    def _result(self, deadline: float) -> pq.abc.PGresult | None:
        """Return the next result of a command, None after the last one."""
        while self._pgconn.is_busy():
            self._wait_by(select.POLLIN, deadline)
            self._pgconn.consume_input()
        return self._pgconn.get_result()

    def _give_up(self, timeout_s: float) -> Rows:
        """Cancel what runs, and raise what comes of that; return the rows if they were on their way."""
        try:
            if self.cancel():
                return self._rows(time.monotonic() + CANCELLED_TIMEOUT_S)
        except _OverdueError:
            log.debug("no answer to the request to cancel")
        except ServerError as ex:
            if ex.sqlstate != sqlstate.QUERY_CANCELED:
                raise
            raise ServerError(
                f"the server had not finished a command after {timeout_s:g} s, and was told to cancel it",
                sqlstate=ex.sqlstate,
                hint="it may be waiting for a lock: SELECT pid, query FROM pg_stat_activity WHERE wait_event_type = 'Lock'",
            ) from ex
        msg = f"the server has not answered a command within {timeout_s:g} s"
        raise ConnectionClosedError(msg, hint="check the network, and that the server is not overloaded; then start again")

    def cancel(self) -> bool:
        """Ask the server to cancel what runs on this connection; False if it could not be asked within CANCEL_TIMEOUT_S."""
        deadline = time.monotonic() + CANCEL_TIMEOUT_S
        try:
            canceller = self._pgconn.cancel_conn()
        except psycopg.NotSupportedError:  # libpq 16 and older: what it has waits without end
            return self._cancel_by_sql(deadline)
        except psycopg.OperationalError:  # there is no connection any more
            return False
        try:
            canceller.start()
            while (state := canceller.poll()) not in (pq.PollingStatus.OK, pq.PollingStatus.FAILED):
                events = select.POLLIN if state == pq.PollingStatus.READING else select.POLLOUT
                if not _wait(canceller.socket, events, deadline):
                    return False
            return state == pq.PollingStatus.OK
        except psycopg.OperationalError as ex:
            log.info("the request to cancel failed: %s", ex)
            return False
        finally:
            canceller.finish()

    def _cancel_by_sql(self, deadline: float) -> bool:
        """Ask for the cancellation on another connection to the same server."""
        try:
            other = Connection(self.parameters_here, replication=False, within_s=deadline - time.monotonic())
            try:
                return other._run(f"SELECT pg_cancel_backend({self._pgconn.backend_pid})", deadline) == [("t",)]
            finally:
                other.close()
        except (CdcpipeError, _OverdueError) as ex:
            log.info("the request to cancel failed: %s", ex)
            return False

    def wait(self, events: int, deadline: float) -> bool:
        """Wait until the socket is ready; False if the deadline came first.

        The low-water mark is 1 for that: what is waited for may be shorter than any other mark.
        """
        self.set_low_water_mark(1)
        return _wait(self.socket, events, deadline, self._while_waiting)

    def _wait_by(self, events: int, deadline: float) -> None:
        if not self.wait(events, deadline):
            raise _OverdueError

    @contextmanager
    def _translating_loss(self) -> Iterator[None]:
        try:
            yield
        except psycopg.OperationalError as ex:
            raise self.closed_error() from ex

    def serve_meanwhile(self, while_waiting: Callable[[], None], answer_timeout_s: float) -> None:
        """Call ``while_waiting`` during each wait from now on, and let no command take longer than ``answer_timeout_s``."""
        self._while_waiting = while_waiting
        self.answer_timeout_s = answer_timeout_s

    def pin_session(self, settings: Mapping[str, str]) -> None:
        """Set ``settings`` for this session in one round trip, and check those that the server reports."""
        commands = [f"SET {quote_identifier(name.lower())} = {quote_literal(value)}" for name, value in settings.items()]
        for command in ["; ".join(commands)] if self.server_version >= _SEVERAL_COMMANDS_SINCE else commands:
            self.execute(command)
        for name, value in settings.items():
            reported = self.parameter_status(name)
            if reported is not None and not reported.startswith(value):
                msg = f"the server did not take {name} = {value}, it reports {reported}"
                raise InitError(msg)

    def _server_error(self, result: pq.abc.PGresult) -> ServerError | ConnectionClosedError:
        """Return the error that a result is; a session that the server has ended is a lost connection, not an error in the data."""

        def field(code: pq.DiagnosticField) -> str:
            return (result.error_field(code) or b"").decode("utf-8", "replace").strip()

        state = field(pq.DiagnosticField.SQLSTATE) or None
        primary = field(pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message.decode("utf-8", "replace").strip()
        # The context of an error in decoding names the slot, the plugin's callback and the LSN; the detail may hold values.
        context = field(pq.DiagnosticField.CONTEXT)
        parts = [primary, f"({state})" if state else "", f"[{context}]" if context else ""]
        server_hint = field(pq.DiagnosticField.MESSAGE_HINT)
        hint = server_hint or _HINTS.get(state or "")
        message = " ".join(part for part in parts if part)
        if state and state.startswith(sqlstate.SESSION_ENDED):
            return ConnectionClosedError(f"the server ended the connection: {message}", hint=hint or None)
        return ServerError(message, sqlstate=state, hint=hint or None)

    # The stream

    @property
    def socket(self) -> int:
        """The socket's descriptor; raise ConnectionClosedError if there is none any more."""
        try:
            return self._pgconn.socket
        except psycopg.OperationalError as ex:
            raise self.closed_error() from ex

    def set_low_water_mark(self, size: int) -> bool:
        """Ask the kernel to call the socket readable only from ``size`` bytes on; False where that is not to be had.

        It holds until the next `wait`, or whatever else here waits. Who polls the socket with it must poll with a time-out.
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

    def copy_result(self, timeout_s: float) -> None:
        """Take the results after the copy has ended; raise ServerError if the server ended it with one.

        Return if the server ended the stream in order. Raise ConnectionClosedError if the connection is gone, or nothing comes.
        """
        deadline = time.monotonic() + timeout_s
        ended = (None, pq.ExecStatus.COPY_IN, pq.ExecStatus.COPY_OUT, pq.ExecStatus.COPY_BOTH)
        try:
            with self._translating_loss():
                while (result := self._result(deadline)) is not None and result.status not in ended:
                    if result.status == pq.ExecStatus.FATAL_ERROR:
                        raise self._server_error(result)
        except _OverdueError:
            msg = f"the server has not answered within {timeout_s:g} s to the end of the stream"
            raise ConnectionClosedError(msg, hint="check the network") from None

    def closed_error(self) -> ConnectionClosedError:
        """Return the error for a connection that is gone."""
        message = self._pgconn.get_error_message().strip()
        first_line = message.splitlines()[0] if message else "connection lost"
        return ConnectionClosedError(f"the connection to the server was lost: {first_line}")

    def close(self) -> None:
        """Close the connection."""
        self._pgconn.finish()


class _OverdueError(Exception):
    """A deadline has passed."""


def _wait(fd: int, events: int, deadline: float, while_waiting: Callable[[], None] | None = None) -> bool:
    """Wait until ``fd`` is ready; False if the deadline came first. A signal's handler runs soon, and may raise."""
    poll = select.poll()
    poll.register(fd, events)
    while True:
        left_s = deadline - time.monotonic()
        if poll.poll(max(0.0, min(left_s, _SLICE_S)) * 1000):
            return True
        if left_s <= 0:
            return False
        if while_waiting is not None:
            while_waiting()


def _effective(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters that libpq would use, those of its environment and of a service file included."""
    # Of one value that it does not know libpq connects to nobody, and looks no name up.
    pgconn = pq.PGconn.connect_start(psycopg_conninfo.make_conninfo(**{**settings, "sslmode": "none"}).encode())
    try:
        return {each.keyword.decode(): each.val.decode("utf-8", "replace") for each in pgconn.info if each.val}
    finally:
        pgconn.finish()


def _connect_timeout_s(value: str | None) -> float:
    """Return the time for each host; as in libpq 0 is no limit, and 1 is 2."""
    if value is None:
        return CONNECT_TIMEOUT_S
    try:
        seconds = int(value)
    except ValueError:
        msg = f"connect_timeout takes a number of seconds, not {value!r}"
        raise InvalidArgumentsError(msg) from None
    return max(seconds, 2) if seconds > 0 else NO_LIMIT


def _current_host(pgconn: pq.abc.PGconn) -> hosts.Host:
    """Return the server that libpq is connecting to, or connected to."""
    return hosts.Host(*(value.decode("utf-8", "replace") for value in (pgconn.host, pgconn.hostaddr, pgconn.port)))


def _connection_hint(message: str) -> str | None:
    if "password" in message:
        return _HINTS[sqlstate.INVALID_PASSWORD]
    if "does not exist" in message and "database" in message:
        return _HINTS[sqlstate.INVALID_CATALOG_NAME]
    if "WAL sender" in message or "replication role" in message:
        return _HINTS[sqlstate.INSUFFICIENT_PRIVILEGE]
    if "pg_hba" in message:
        return _HINTS[sqlstate.INVALID_AUTHORIZATION]
    return "check host, port, user and database (-h -p -U -d, or libpq's environment variables), and that the server is up"
