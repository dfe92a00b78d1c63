"""Connections to the server: ``psycopg.pq`` behind a small surface, with errors of ``cdcpipe.errors``.

Commands use the simple query protocol, because a walsender knows no other. Every wait has a deadline, and wakes for a signal
(libpq/waiting.py). No call of libpq blocks.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, NamedTuple

from cdcpipe import sqlstate
from cdcpipe.errors import CdcpipeError, ConnectionClosedError, InitError, ServerError, SharedSessionError
from cdcpipe.libpq import hosts
from cdcpipe.libpq.connecting import connect, current_host, named_hosts
from cdcpipe.libpq.driver import errors, pq
from cdcpipe.libpq.parameters import effective_parameters, protection_of
from cdcpipe.libpq.server_errors import NO_POOLER, Failure, lost_error, server_error
from cdcpipe.libpq.waiting import NO_LIMIT, OverdueError, wait
from cdcpipe.sql import quote_literal

__all__ = ["ANSWER_TIMEOUT_S", "NO_LIMIT", "Connection", "Notice", "Rows"]

log = logging.getLogger(__name__)

Rows = list[tuple[str | None, ...]]

ANSWER_TIMEOUT_S = 60.0
"""How long a command may take, unless its caller says otherwise."""
CANCEL_TIMEOUT_S = 2.0
"""How long a request to cancel may take."""
CANCELLED_TIMEOUT_S = 5.0
"""How long the server has to confirm a cancellation."""

_SEVERAL_COMMANDS_SINCE = 140002
"""The first version whose walsenders accept several SQL commands in one message. 14.0 and 14.1 accept only one."""

_MARK = "cdcpipe.session"
"""The name of a setting that the server does not know: it keeps its value as it was when the session began."""


class Notice(NamedTuple):
    """A NOTICE or WARNING that the server sent."""

    severity: str
    sqlstate: str
    message: str


class Connection:
    """One libpq connection for commands, in non-blocking mode. Its subclass `Walsender` can stream, too.

    - ``parameters`` are libpq's. Raises InitError if the connection can't be made, ConnectionParameterError if libpq refuses one.
    - ``within_s`` limits the time for all hosts together, and then for each command without a limit of its own. Each host also has
      its own ``connect_timeout``, as in libpq.
    - ``while_waiting`` is called repeatedly during every wait. An exception that it raises ends the wait.
    - ``mark`` is sent with the connection's request for a session. `pin_session` then recognises the session by it.
    """

    _MODE: ClassVar[Mapping[str, str]] = {}
    """libpq's parameter ``replication``, or nothing. It decides whether a walsender or an ordinary backend answers."""

    def __init__(
        self,
        parameters: Mapping[str, str],
        *,
        within_s: float = NO_LIMIT,
        while_waiting: Callable[[], None] | None = None,
        mark: str = "",
    ) -> None:
        given = {name: value for name, value in parameters.items() if name != "replication"}
        if mark:
            given["options"] = f"{effective_parameters(parameters).get('options', '')} -c {_MARK}={mark}"
        self._mark = mark
        self._settings = {"fallback_application_name": "cdcpipe", **given, "client_encoding": "UTF8", **self._MODE}
        self.notices: list[Notice] = []
        self.told_notices: set[str] = set()
        """The texts of notices that the user was told, once."""
        self.reads_rows = False
        """Whether the commands read rows, so that the server's messages may have values: set this before such a command."""
        self.answer_timeout_s = min(within_s, ANSWER_TIMEOUT_S)
        """How long `execute` waits if its caller gives no limit."""
        self._while_waiting = while_waiting
        self._pgconn = connect(self._settings, time.monotonic() + within_s, while_waiting)
        self._pgconn.nonblocking = 1
        self._pgconn.notice_handler = self._on_notice

    def _on_notice(self, result: Failure) -> None:
        fields = [
            (result.error_field(code) or b"").decode("utf-8", "replace")
            for code in (
                pq.DiagnosticField.SEVERITY_NONLOCALIZED,
                pq.DiagnosticField.SQLSTATE,
                pq.DiagnosticField.MESSAGE_PRIMARY,
            )
        ]
        self.notices.append(Notice(*fields))

    # What the server reports about itself

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
        """The connected server, as libpq's parameters. It is one server, even if the user listed several.

        It has an IP address only if the user gave one: then nobody need be able to look up the host's name.
        """
        pgconn = self._pgconn
        values = {"host": pgconn.host, "port": pgconn.port, "user": pgconn.user, "dbname": pgconn.db}
        if effective_parameters(self._settings).get("hostaddr"):
            values["hostaddr"] = pgconn.hostaddr
        return {name: value.decode("utf-8", "replace") for name, value in values.items() if value}

    @property
    def protection(self) -> dict[str, str]:
        """How the connection is protected (TLS, certificates, authentication), as libpq's parameters. No password is among them."""
        return protection_of(self._pgconn)

    @property
    def host(self) -> hosts.Host:
        """The connected server."""
        return current_host(self._pgconn)

    @property
    def parameters_here(self) -> dict[str, str]:
        """Parameters for another connection to the server that this connection uses."""
        return {**self._settings, **hosts.parameters_of([self.host])}

    @property
    def parameters_elsewhere(self) -> list[dict[str, str]]:
        """Parameters for each of the other servers that the user listed, one server each."""
        named = named_hosts(effective_parameters(self._settings))
        here = current_host(self._pgconn)
        return [{**self._settings, **hosts.parameters_of([each])} for each in named if not each.is_at(here)]

    # Commands

    def execute(self, sql: str, *, timeout_s: float | None = None) -> Rows:
        """Run one command and return its rows. Raises ServerError or ConnectionClosedError.

        After ``timeout_s`` (None: `answer_timeout_s`) the command is cancelled. This raises a ServerError with SQLSTATE 57014. If
        the server does not react to the cancellation either, this raises a ConnectionClosedError.
        """
        timeout_s = self.answer_timeout_s if timeout_s is None else timeout_s
        try:
            return self._run(sql, time.monotonic() + timeout_s)
        except OverdueError:
            return self._give_up(timeout_s)
        except CdcpipeError:
            raise
        except BaseException:  # a signal; a command that keeps running without this process could leave a slot behind
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
        """Read all results of a command. Return the rows, or raise the server's error."""
        rows: Rows = []
        error: ServerError | ConnectionClosedError | None = None
        try:
            while (result := self._result(deadline)) is not None:
                if result.status == pq.ExecStatus.TUPLES_OK:
                    rows = _texts(result)
                elif result.status == pq.ExecStatus.COPY_BOTH:
                    break
                elif result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.EMPTY_QUERY):
                    error = error or server_error(result, reads_rows=self.reads_rows)
        except errors.OperationalError as ex:
            if isinstance(error, ServerError) and error.sqlstate is not None:
                raise error from None  # the server has answered before the connection was lost
            raise self.closed_error() from ex
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
        """Cancel the running command, and raise the error for that. Return the rows if the command has finished meanwhile."""
        try:
            if self.cancel():
                return self._rows(time.monotonic() + CANCELLED_TIMEOUT_S)
        except OverdueError:
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
        """Ask the server to cancel the running command. Return False if the request fails or takes more than CANCEL_TIMEOUT_S."""
        deadline = time.monotonic() + CANCEL_TIMEOUT_S
        try:
            canceller = self._pgconn.cancel_conn()
        except errors.NotSupportedError:  # libpq 16 and older can cancel only with a call that may block for ever
            return self._cancel_by_sql(deadline)
        except errors.OperationalError:  # the connection is gone
            return False
        try:
            canceller.start()
            while (state := canceller.poll()) not in (pq.PollingStatus.OK, pq.PollingStatus.FAILED):
                events = select.POLLIN if state == pq.PollingStatus.READING else select.POLLOUT
                if not wait(canceller.socket, events, deadline):
                    return False
            return state == pq.PollingStatus.OK
        except errors.OperationalError as ex:
            log.info("the request to cancel failed: %s", ex)
            return False
        finally:
            canceller.finish()

    def _cancel_by_sql(self, deadline: float) -> bool:
        """Cancel the running command from another connection to the same server."""
        try:
            other = Connection(self.parameters_here, within_s=deadline - time.monotonic())
            try:
                return other._run(f"SELECT pg_catalog.pg_cancel_backend({self._pgconn.backend_pid})", deadline) == [("t",)]
            finally:
                other.close()
        except (CdcpipeError, OverdueError) as ex:
            log.info("the request to cancel failed: %s", ex)
            return False

    def serve_meanwhile(self, while_waiting: Callable[[], None], answer_timeout_s: float) -> None:
        """From now on, call ``while_waiting`` during each wait, and let no command take longer than ``answer_timeout_s``."""
        self._while_waiting = while_waiting
        self.answer_timeout_s = answer_timeout_s

    def pin_session(self, settings: Mapping[str, str]) -> None:
        """Set ``settings`` for this session in one round trip, and check those that the server reports.

        Raises SharedSessionError, and sets nothing, unless the server's session belongs to this connection. A connection pooler
        gives its sessions to other clients, too, and they would get the settings. It makes up the process id that it tells its
        clients. So does a proxy that shares no sessions, as Neon's: there the connection needs a ``mark``.
        """
        is_ours = f"pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) {self._pgconn.backend_pid}"
        if self._mark:
            is_ours += f" OR pg_catalog.current_setting('{_MARK}', true) OPERATOR(pg_catalog.=) '{self._mark}'"
        values = ", ".join(f"({quote_literal(name.lower())}, {quote_literal(value)})" for name, value in settings.items())
        commands = [
            "BEGIN ISOLATION LEVEL READ COMMITTED",  # a standby refuses a SELECT in the isolation that a role may have by default
            f"SELECT pg_catalog.set_config(name, value, false) FROM (VALUES {values}) AS setting (name, value) WHERE {is_ours}",
            "COMMIT",
        ]
        messages = ["; ".join(commands)] if self.server_version >= _SEVERAL_COMMANDS_SINCE else commands
        answers = [self.execute(message) for message in messages]
        if not any(answers):
            raise SharedSessionError(f"{self.host} is a connection pooler, not the server", hint=NO_POOLER)
        for name, value in settings.items():
            reported = self.parameter_status(name)
            if reported is not None and not reported.startswith(value):
                msg = f"the server did not take {name} = {value}, it reports {reported}"
                raise InitError(msg)

    # Waiting, and the end

    @property
    def socket(self) -> int:
        """The socket's descriptor. Raises ConnectionClosedError if the connection is gone."""
        try:
            return self._pgconn.socket
        except errors.OperationalError as ex:
            raise self.closed_error() from ex

    def wait(self, events: int, deadline: float) -> bool:
        """Wait until the socket is ready. Return False if the deadline came first."""
        return wait(self.socket, events, deadline, self._while_waiting)

    def _wait_by(self, events: int, deadline: float) -> None:
        if not self.wait(events, deadline):
            raise OverdueError

    @contextmanager
    def _translating_loss(self) -> Iterator[None]:
        try:
            yield
        except errors.OperationalError as ex:
            raise self.closed_error() from ex

    def closed_error(self) -> ConnectionClosedError:
        """Return the error for this connection when it is lost."""
        return lost_error(self._pgconn)

    def close(self) -> None:
        """Close the connection."""
        self._pgconn.finish()


def _texts(result: pq.abc.PGresult) -> Rows:
    return [
        tuple(
            None if (value := result.get_value(row, column)) is None else value.decode("utf-8", "replace")
            for column in range(result.nfields)
        )
        for row in range(result.ntuples)
    ]
