"""Publications: how one is made, and whether those of a stream are there.

The server says late, in mid-stream, that there is none. Every function takes an ordinary connection, not a walsender's
(replication/slots.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cdcpipe import sqlstate
from cdcpipe.errors import InitError, ServerError
from cdcpipe.libpq.connection import Connection
from cdcpipe.replication import table_locks
from cdcpipe.sql import quote_identifier, quote_literal

__all__ = ["check_publications", "create_publication", "missing_publications"]


def create_publication(connection: Connection, name: str, tables: Sequence[tuple[str, str]]) -> None:
    """Create a publication for ``tables`` (schema, name), for all tables if there are none."""
    what = ", ".join(f"{quote_identifier(schema)}.{quote_identifier(table)}" for schema, table in tables)
    target = f"FOR TABLE {what}" if what else "FOR ALL TABLES"
    try:
        with table_locks.naming_locks(connection, tables):
            # The server locks the tables, and everybody who wants one of them later waits for us meanwhile.
            limit = quote_literal(table_locks.LOCK_TIMEOUT)
            connection.execute(f"SET LOCAL lock_timeout = {limit}; CREATE PUBLICATION {quote_identifier(name)} {target}")
    except ServerError as ex:
        if ex.sqlstate == sqlstate.DUPLICATE_OBJECT:
            return
        msg = f"publication {name!r} could not be created: {ex.message}"
        hint = "a publication of all tables takes a superuser: name the tables (--table SCHEMA.NAME)" if not what else ex.hint
        raise InitError(msg, hint=hint) from ex


def missing_publications(connection: Connection, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that are no publications here."""
    existing = {row[0] for row in connection.execute("SELECT pubname FROM pg_catalog.pg_publication")}
    return [name for name in names if name not in existing]


def check_publications(connection: Connection, names: Sequence[str]) -> None:
    """Raise InitError naming what is missing: up to 17 the server fails in mid-stream, from 18 on it skips the rows silently."""
    if not names:
        raise InitError("pgoutput needs a publication", hint="--publication NAME; with -c one that does not exist is created")
    missing = missing_publications(connection, names)
    if missing:
        msg = f"no publication {', '.join(map(repr, missing))} in database {connection.database!r}"
        raise InitError(
            msg,
            hint="CREATE PUBLICATION, or -c with --table; a slot sees only publications that are older than its position",
        )
