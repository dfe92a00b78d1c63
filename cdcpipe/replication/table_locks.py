"""Locks on tables: how long a session waits for one, the error that names the session that holds it, and how many it may hold.

All sessions of a server share one table of locks. Whoever finds it full gets an error ("out of shared memory"), whatever it does.
So a session that only reads must not fill it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from cdcpipe import sqlstate
from cdcpipe.errors import InitError, ServerError
from cdcpipe.libpq.connection import Connection
from cdcpipe.sql import quote_literal
from cdcpipe.units import counted

__all__ = ["LOCK_TIMEOUT", "check_room", "most_locks", "naming_locks", "needed_locks", "pairs"]

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
        found = connection.execute(_LOCKS.format(names=pairs(tables)))
        table, pid = found[0] if found else ("a table", None)
        if not found:
            who, hint = "somebody", "start again"
        elif pid is None:
            who, hint = "a prepared transaction", "COMMIT PREPARED or ROLLBACK PREPARED ends it: SELECT * FROM pg_prepared_xacts"
        else:
            who = f"server process {pid}"
            hint = f"wait for the end of its transaction, or end it: SELECT pg_terminate_backend({pid})"
        raise InitError(f"{table} is locked by {who}, for longer than {LOCK_TIMEOUT}", hint=hint) from ex


_ROOM = """
SELECT current_setting('max_locks_per_transaction')::int8
    * (current_setting('max_connections')::int8 + current_setting('max_prepared_transactions')::int8)
"""
"""How many objects all sessions can lock. The server has room for some more, which it promises to nobody."""

_NEEDED = """
WITH RECURSIVE part (root, oid) AS (
    SELECT c.oid, c.oid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND (n.nspname, c.relname) IN ({names})
    UNION
    SELECT part.root, i.inhrelid FROM part JOIN pg_catalog.pg_inherits i ON i.inhparent = part.oid)
SELECT n.nspname, c.relname, sum(1 + (SELECT count(*) FROM pg_catalog.pg_index x WHERE x.indrelid = part.oid))
FROM part JOIN pg_catalog.pg_class c ON c.oid = part.root JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
GROUP BY 1, 2
"""
"""LOCK TABLE also locks what inherits from a table. A query of a table also locks its indexes, whether it uses them or not."""


def most_locks(connection: Connection) -> int:
    """Return how many locks one session that only reads may hold: half of those for which the server has room."""
    return int(connection.execute(_ROOM)[0][0] or 0) // 2


def needed_locks(connection: Connection, tables: Collection[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Return for each table that exists how many locks a session holds that has locked it and reads it.

    A few of them take no room: a session has 16 places of its own, from PostgreSQL 18 on as many as ``max_locks_per_transaction``.
    """
    rows = connection.execute(_NEEDED.format(names=pairs(tables))) if tables else []
    return {(schema or "", name or ""): int(count or 0) for schema, name, count in rows}


def check_room(connection: Connection, tables: Collection[tuple[str, str]]) -> None:
    """Raise InitError if to lock and read these tables in one transaction takes more than `most_locks`."""
    needed, most = sum(needed_locks(connection, tables).values()), most_locks(connection)
    if needed > most:
        raise InitError(
            f"to read {counted(len(tables), 'table')} at one time takes {needed:,} locks on tables, partitions and indexes."
            f" More than {most:,} would leave too few for other sessions",
            hint="ask for fewer tables at one time, or raise max_locks_per_transaction on the server",
        )


def pairs(tables: Collection[tuple[str, str]]) -> str:
    """Return the tables as SQL: pairs of a schema and a name."""
    return ", ".join(f"({quote_literal(schema)}, {quote_literal(name)})" for schema, name in tables)
