"""Creates publications, and checks that the publications of a stream exist.

Without this check, the server reports a missing publication only late, in mid-stream. Every function takes an ordinary connection,
not a walsender's (replication/slots.py says why).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cdcpipe import sqlstate
from cdcpipe.errors import InitError, ServerError
from cdcpipe.libpq.connection import Connection
from cdcpipe.replication import table_locks
from cdcpipe.replication.server import is_standby
from cdcpipe.sql import quote_identifier, quote_literal

__all__ = ["check_publications", "create_publication", "missing_publications"]


def create_publication(connection: Connection, name: str, tables: Sequence[tuple[str, str]]) -> None:
    """Create a publication for ``tables`` (schema, name). If ``tables`` is empty, it is for all tables."""
    what = ", ".join(f"{quote_identifier(schema)}.{quote_identifier(table)}" for schema, table in tables)
    target = f"FOR TABLE {what}" if what else "FOR ALL TABLES"
    try:
        with table_locks.naming_locks(connection, tables):
            # The command locks the tables. While it waits for a lock, every later request for that table waits behind it.
            limit = quote_literal(table_locks.LOCK_TIMEOUT)
            connection.execute(f"SET LOCAL lock_timeout = {limit}; CREATE PUBLICATION {quote_identifier(name)} {target}")
    except ServerError as ex:
        if ex.sqlstate == sqlstate.DUPLICATE_OBJECT:
            return
        if ex.sqlstate == sqlstate.READ_ONLY_SQL_TRANSACTION and is_standby(connection):
            raise InitError(
                f"there is no publication {name!r}, and a standby can't make one",
                hint=f"on the primary: CREATE PUBLICATION {quote_identifier(name)} {target}; start again once the standby has it",
            ) from ex
        msg = f"publication {name!r} could not be created: {ex.message}"
        hint = "a publication of all tables takes a superuser: name the tables (--table SCHEMA.NAME)" if not what else ex.hint
        raise InitError(msg, hint=hint) from ex


def missing_publications(connection: Connection, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that are not the name of a publication in this database."""
    existing = {row[0] for row in connection.execute("SELECT pubname FROM pg_catalog.pg_publication")}
    return [name for name in names if name not in existing]


def check_publications(connection: Connection, names: Sequence[str]) -> None:
    """Raise an InitError that names the missing publications.

    For a missing publication, a server up to 17 fails in mid-stream; a server from 18 on silently skips the rows.
    """
    if not names:
        raise InitError("pgoutput needs a publication", hint="--publication NAME; with -c one that does not exist is created")
    missing = missing_publications(connection, names)
    if missing:
        msg = f"no publication {', '.join(map(repr, missing))} in database {connection.database!r}"
        raise InitError(
            msg,
            hint="CREATE PUBLICATION, or -c with --table; a slot sees only publications that are older than its position",
        )
