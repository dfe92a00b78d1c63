"""Locks on tables: limits how long a session waits for one, and makes the error that names the session that holds it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from cdcpipe import sqlstate
from cdcpipe.errors import InitError, ServerError
from cdcpipe.libpq.connection import Connection
from cdcpipe.sql import quote_literal

__all__ = ["LOCK_TIMEOUT", "naming_locks"]

LOCK_TIMEOUT = "10s"
"""How long a session of cdcpipe waits for a lock on a table."""

_LOCKS = """
SELECT 'table ' || n.nspname || '.' || c.relname, l.pid FROM pg_catalog.pg_locks l
JOIN pg_catalog.pg_database d ON d.oid = l.database AND d.datname = current_database()
JOIN pg_catalog.pg_class c ON c.oid = l.relation JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE l.locktype = 'relation' AND l.pid IS DISTINCT FROM pg_backend_pid()
AND l.mode LIKE '%Exclusive%' AND l.mode <> 'RowExclusiveLock'
AND EXISTS (SELECT FROM pg_catalog.pg_class t JOIN pg_catalog.pg_namespace m ON m.oid = t.relnamespace
    WHERE (t.oid = c.oid OR t.oid IN (SELECT relid FROM pg_catalog.pg_partition_ancestors(c.oid)))
    AND (m.nspname, t.relname) IN ({names}))
ORDER BY (n.nspname, c.relname) IN ({names}) DESC, l.mode = 'AccessExclusiveLock' DESC, l.granted DESC, 1 LIMIT 1
"""
"""Finds the lock that most likely blocks ours. A lock that was requested and not yet granted blocks later requests, too."""


@contextmanager
def naming_locks(connection: Connection, tables: Collection[tuple[str, str]]) -> Iterator[None]:
    """Raise InitError if the server gives up waiting for a lock (``lock_timeout``). It names the table and the lock's holder."""
    try:
        yield
    except ServerError as ex:
        if ex.sqlstate != sqlstate.LOCK_NOT_AVAILABLE:
            raise
        connection.execute("ROLLBACK")
        found = connection.execute(_LOCKS.format(names=_pairs(tables)))
        table, pid = found[0] if found else ("a table", None)
        if not found:
            who, hint = "somebody", "start again"
        elif pid is None:
            who, hint = "a prepared transaction", "COMMIT PREPARED or ROLLBACK PREPARED ends it: SELECT * FROM pg_prepared_xacts"
        else:
            who = f"server process {pid}"
            hint = f"wait for the end of its transaction, or end it: SELECT pg_terminate_backend({pid})"
        raise InitError(f"{table} is locked by {who}, for longer than {LOCK_TIMEOUT}", hint=hint) from ex


def _pairs(tables: Collection[tuple[str, str]]) -> str:
    return ", ".join(f"({quote_literal(schema)}, {quote_literal(name)})" for schema, name in tables)
