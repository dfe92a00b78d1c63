"""Turns errors of the server and of libpq into errors of ``cdcpipe.errors``, with a hint that says what the user can do.

What the server says while it reads rows may have their values. Of an error about a value, only the SQLSTATE and the place are told.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

from cdcpipe import sqlstate
from cdcpipe.errors import ConnectionClosedError, ServerError
from cdcpipe.libpq.driver import pq

__all__ = ["HINTS", "NO_POOLER", "NO_REPLICATION", "Failure", "failure_of", "loss", "lost_error", "server_error"]


class Failure(Protocol):
    """What the server says of an error: a result of libpq, or `cdcpipe.libpq.direct_copy.Fields`."""

    @property
    def error_message(self) -> bytes:
        """The text if there are no fields."""

    def error_field(self, code: pq.DiagnosticField, /) -> bytes | None:
        """Return a field."""


HINTS = {
    sqlstate.INVALID_PASSWORD: "set PGPASSWORD, or use a password file or a service file",
    sqlstate.INVALID_AUTHORIZATION: "add a line for this database and role to pg_hba.conf (host DATABASE ROLE ADDRESS"
    " scram-sha-256) and reload it; lines for the database 'replication' do not count",
    sqlstate.INVALID_CATALOG_NAME: "check the database's name (-d, PGDATABASE)",
    sqlstate.UNDEFINED_FUNCTION: "where a type has no binary form, its values come only as text: leave the option 'binary' out",
    sqlstate.INSUFFICIENT_PRIVILEGE: "grant this user the privilege that the message names (for a table: SELECT), or connect"
    " as a user that has it",
    sqlstate.TOO_MANY_CONNECTIONS: "raise max_wal_senders or max_connections on the server",
    sqlstate.CONFIGURATION_LIMIT_EXCEEDED: "raise max_replication_slots or max_wal_senders on the server",
    sqlstate.DISK_FULL: "make room on the server's disk",
    sqlstate.OUT_OF_MEMORY: "give the server more memory, or let fewer processes use it; logical_decoding_work_mem limits a stream",
    sqlstate.INSUFFICIENT_RESOURCES: "raise the limit on the server that the message names (of open files: ulimit -n)",
    sqlstate.IO_ERROR: "the server cannot read or write its disk: look into its log and that of its machine",
    sqlstate.TERMINATED_BY_ADMINISTRATOR: "an administrator ended it, or the server is shutting down: connect again later",
    sqlstate.READ_ONLY_SQL_TRANSACTION: "set PGOPTIONS='-c default_transaction_read_only=off', or reset that setting of the role or"
    " the database; if the server is a standby, connect to the primary",
    sqlstate.CANNOT_CONNECT_NOW: "the server is starting up or shutting down; try again",
}
"""SQLSTATE → what the user can do about an error for which the server gives no hint itself."""

NO_REPLICATION: Final = (
    "streaming needs a role with the REPLICATION attribute: ALTER ROLE name REPLICATION"
    " (on Amazon RDS: GRANT rds_replication TO name)"
)
"""The hint if the server refuses a walsender, or a command on slots, because of the role.

`cdcpipe.doctor.server_checks` and `cdcpipe.replication.slot_creation` recognise this refusal by it.
"""

NO_POOLER: Final = (
    "name the host and port of the server itself (-h, -p): a pooler gives cdcpipe's session to your applications, too"
)
"""The hint if the server turns out to be a connection pooler."""

_OF_THE_DECODER = re.compile(r"LSN:? [0-9A-F]+/[0-9A-F]+$")
"""The end of the context's last line for an error in decoding, in all languages: the line has slot, plugin, callback and LSN."""


def server_error(result: Failure, *, reads_rows: bool = False) -> ServerError | ConnectionClosedError:
    """Return the error for a failed result. ``reads_rows``: the server was reading rows, so what it says may have their values.

    If the server has ended the session, this is a ConnectionClosedError, because the data has no error.
    """
    state = _field(result, pq.DiagnosticField.SQLSTATE)
    primary = _field(result, pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message.decode("utf-8", "replace").strip()
    context = _field(result, pq.DiagnosticField.CONTEXT)
    hint = _field(result, pq.DiagnosticField.MESSAGE_HINT)
    if reads_rows:
        last = context.rpartition("\n")[2]
        context = last if _OF_THE_DECODER.search(last) else ""
        if state and (instead := sqlstate.withheld(state)):
            primary, hint = instead, ""
    parts = [primary, f"({state})" if state else "", f"[{context}]" if context else ""]
    hint = hint or HINTS.get(state, "")
    message = " ".join(part for part in parts if part)
    if state.startswith(sqlstate.SESSION_ENDED):
        return ConnectionClosedError(f"the server ended the connection: {message}", hint=hint or None)
    if state in sqlstate.SHORTAGES:
        message = ServerError.SHORTAGE + message
    return ServerError(message, sqlstate=state or None, hint=hint or None)


def _field(result: Failure, code: pq.DiagnosticField) -> str:
    return (result.error_field(code) or b"").decode("utf-8", "replace").strip()


def lost_error(pgconn: pq.abc.PGconn) -> ConnectionClosedError:
    """Return the error for a lost connection. Raises as `failure_of` does."""
    return loss(failure_of(pgconn))


_NO_MEMORY = frozenset(
    ("out of memory", "cannot allocate memory for input buffer", "cannot allocate memory for output buffer"),
)
"""libpq's own messages. One that the server has sent begins with its severity."""


def failure_of(pgconn: pq.abc.PGconn) -> str:
    """Return libpq's first message since its last command. Raises MemoryError if libpq had no memory: the server did nothing."""
    message = pgconn.get_error_message().strip()
    first = message.splitlines()[0] if message else "connection lost"
    if first in _NO_MEMORY:
        raise MemoryError(f"libpq: {first}")
    return first


def loss(how: str) -> ConnectionClosedError:
    """Return the error for a connection that was lost in this way."""
    return ConnectionClosedError(f"the connection to the server was lost: {how}")
