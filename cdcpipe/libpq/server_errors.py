"""Turns errors of the server and of libpq into errors of ``cdcpipe.errors``, with a hint that says what the user can do."""

from __future__ import annotations

from typing import Protocol

from cdcpipe import sqlstate
from cdcpipe.errors import ConnectionClosedError, ServerError
from cdcpipe.libpq.driver import pq

__all__ = ["HINTS", "Failure", "loss", "lost_error", "server_error"]


class Failure(Protocol):
    """What the server says of an error: a result of libpq, or `cdcpipe.libpq.direct_copy.Fields`."""

    @property
    def error_message(self) -> bytes:
        """The text if there are no fields."""

    def error_field(self, code: pq.DiagnosticField, /) -> bytes | None:
        """Return a field."""


HINTS = {
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


def server_error(result: Failure) -> ServerError | ConnectionClosedError:
    """Return the error for a failed result.

    If the server has ended the session, this is a ConnectionClosedError, because the data has no error.
    """
    state = _field(result, pq.DiagnosticField.SQLSTATE) or None
    primary = _field(result, pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message.decode("utf-8", "replace").strip()
    # For an error in decoding, the context names the slot, the plugin's callback and the LSN. The detail may have values of rows.
    context = _field(result, pq.DiagnosticField.CONTEXT)
    parts = [primary, f"({state})" if state else "", f"[{context}]" if context else ""]
    hint = _field(result, pq.DiagnosticField.MESSAGE_HINT) or HINTS.get(state or "")
    message = " ".join(part for part in parts if part)
    if state and state.startswith(sqlstate.SESSION_ENDED):
        return ConnectionClosedError(f"the server ended the connection: {message}", hint=hint or None)
    return ServerError(message, sqlstate=state, hint=hint or None)


def _field(result: Failure, code: pq.DiagnosticField) -> str:
    return (result.error_field(code) or b"").decode("utf-8", "replace").strip()


def lost_error(pgconn: pq.abc.PGconn) -> ConnectionClosedError:
    """Return the error for a lost connection."""
    message = pgconn.get_error_message().strip()
    return loss(message.splitlines()[0] if message else "connection lost")


def loss(how: str) -> ConnectionClosedError:
    """Return the error for a connection that was lost in this way."""
    return ConnectionClosedError(f"the connection to the server was lost: {how}")
