"""Creates publications, and checks that the publications of a stream exist.

Without this check, the server reports a missing publication only late, in mid-stream. Every function takes an ordinary connection,
not a walsender's (replication/slots.py says why).
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable, Sequence

from cdcpipe import sqlstate
from cdcpipe.errors import InitError, ServerError
from cdcpipe.libpq.connection import Connection
from cdcpipe.publishing import FULL, INSERT_ONLY, NewPublication
from cdcpipe.replication import table_locks
from cdcpipe.replication.new_publications import contents, identity_statements, split_note, unnamed_companion
from cdcpipe.replication.selected import Selection
from cdcpipe.replication.server import is_standby
from cdcpipe.sql import quote_identifier, quote_literal
from cdcpipe.units import few

__all__ = ["check_companion", "check_existing", "check_named", "check_publications", "create_publication", "missing_publications"]

log = logging.getLogger(__name__)


def create_publication(connection: Connection, name: str, selection: Selection, wanted: NewPublication) -> None:
    """Create a publication, with its companion if it gets one, and set replica identities if asked to, in one transaction."""
    made = contents(name, selection, wanted)
    statements = [*identity_statements(selection, wanted), *(each.statement for each in made)]
    try:
        with table_locks.naming_locks(connection, [(each.schema, each.name) for each in selection.tables]):
            # The commands lock the tables. While they wait for a lock, every later request for that table waits behind them.
            limit = quote_literal(table_locks.LOCK_TIMEOUT)
            connection.execute(f"SET LOCAL lock_timeout = {limit}; {'; '.join(statements)}")
    except ServerError as ex:
        if ex.sqlstate == sqlstate.DUPLICATE_OBJECT:
            return
        if ex.sqlstate == sqlstate.READ_ONLY_SQL_TRANSACTION and is_standby(connection):
            raise InitError(
                f"there is no publication {name!r}, and a standby can't make one",
                hint=f"on the primary: {'; '.join(statements)}; start again once the standby has it",
            ) from ex
        msg = f"publication {name!r} could not be created: {ex.message}"
        raise InitError(msg, hint=_creation_hint(ex, is_all=made[0].is_all)) from ex
    keyless = ", ".join(selection.lacking)
    if wanted.keyless == FULL and keyless:
        log.warning("REPLICA IDENTITY FULL is set now on the tables that have no key: %s", keyless)
    if wanted.keyless == INSERT_ONLY and keyless:
        log.warning("publication %r has only INSERT and TRUNCATE of the tables that have no key: %s", made[1].name, keyless)
    if wanted.keyless == INSERT_ONLY and selection.with_generated_identity:
        log.warning(
            "publication %r has only INSERT and TRUNCATE of the tables that have generated columns in their replica identity: %s",
            made[1].name,
            ", ".join(selection.with_generated_identity),
        )
    if (note := split_note(selection, wanted)) is not None:
        log.warning("%s", note)


def _creation_hint(ex: ServerError, *, is_all: bool) -> str | None:
    if is_all and ex.sqlstate == sqlstate.INSUFFICIENT_PRIVILEGE:
        return (
            "a publication of all tables takes a superuser; one of your own tables (--table SCHEMA.NAME, or --table 'SCHEMA.*')"
            " takes CREATE on the database"
        )
    return ex.hint


def missing_publications(connection: Connection, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that are not the name of a publication in this database."""
    existing = set(_existing(connection))
    return [name for name in names if name not in existing]


def _existing(connection: Connection) -> list[str]:
    return [name or "" for (name,) in connection.execute("SELECT pubname FROM pg_catalog.pg_publication ORDER BY 1")]


def check_named(names: Sequence[str]) -> None:
    """Raise InitError if no publication is named."""
    if not names:
        raise InitError("pgoutput needs a publication", hint="--publication NAME; with a new slot, -c makes one that is missing")


def check_publications(connection: Connection, names: Sequence[str]) -> None:
    """Raise an InitError that names the missing publications.

    For a missing publication, a server up to 17 fails in mid-stream; a server from 18 on silently skips the rows.
    """
    check_named(names)
    check_existing(
        connection,
        names,
        ". To make one: CREATE PUBLICATION {} FOR TABLE …; a slot has no changes from before its publication, so a slot that is"
        " older has to be dropped and made anew (-c makes both, if both are missing)",
    )
    check_companion(connection, names)


def check_existing(connection: Connection, names: Sequence[str], advice: str = "") -> None:
    """Raise an InitError that names the missing publications. ``advice`` ends its hint; ``{}`` in it is the first one, quoted."""
    existing = _existing(connection)
    missing = [name for name in names if name not in existing]
    if missing:
        there = f"it has {few([repr(name) for name in existing])}" if existing else "it has none"
        raise InitError(
            f"no publication {', '.join(map(repr, missing))} in database {connection.database!r}",
            hint=there + advice.replace("{}", quote_identifier(missing[0])),
        )


def check_companion(connection: Connection, names: Sequence[str]) -> None:
    """Raise InitError if one of these publications has a companion that is not among them."""
    if (second := unnamed_companion(connection, names)) is not None:
        raise InitError(
            f"publication {second!r}, which has tables without a key, belongs to a publication of this stream, and is not named",
            hint=f"name it: --publication {shlex.quote(second)}; for a stream without these tables: COMMENT ON PUBLICATION"
            f" {quote_identifier(second)} IS NULL",
        )
