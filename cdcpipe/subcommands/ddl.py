"""``cdcpipe ddl``: installs, removes and examines DDL capture (cdcpipe/ddl/) in a database.

Every function takes an ordinary connection. The capture is found by the names of its event triggers, which exist only once in a
database, or else by its function ``ddl_settings``.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cdcpipe import sqlstate
from cdcpipe.catalog_sql import published
from cdcpipe.ddl import script
from cdcpipe.doctor.findings import Finding, Verdict, error, named, ok, warning
from cdcpipe.doctor.words import EVENT_TRIGGERS_ON
from cdcpipe.errors import InitError, ServerError
from cdcpipe.libpq.server_errors import HINTS
from cdcpipe.replication.publications import check_publications, missing_publications
from cdcpipe.replication.server import decoding_problem, existing_roles, is_standby
from cdcpipe.sql import MANAGED_ROLES
from cdcpipe.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdcpipe.libpq.connection import Connection

__all__ = ["DEFAULT_SCHEMA", "Done", "Installed", "Wanted", "examine", "find", "install", "remove"]

DEFAULT_SCHEMA: Final = "cdcpipe"

_ENABLED: Final = {"O": "origin", "A": "always", "R": "replica", "D": "disabled"}

_FIND_FUNCTIONS: Final = f"""
SELECT n.nspname, {script.SETTINGS}
FROM pg_catalog.pg_proc s JOIN pg_catalog.pg_namespace n ON n.oid = s.pronamespace
WHERE s.proname = 'ddl_settings' AND s.pronargs = 0 ORDER BY 1
"""

_MAY_WRITE: Final = """
SELECT pg_catalog.bool_and(pg_catalog.has_function_privilege(e.evtowner, p.oid, 'EXECUTE'))
FROM pg_catalog.pg_event_trigger e CROSS JOIN pg_catalog.pg_proc p
WHERE e.evtname = 'cdcpipe_ddl_command_end'
AND p.proname = 'pg_logical_emit_message' AND p.pronamespace = 'pg_catalog'::pg_catalog.regnamespace
"""


_BOTH_OPTIONS: Final = "cdcpipe ddl install with --statements or --no-statements, and with --strict or --no-strict"


@dataclass(frozen=True, slots=True)
class Installed:
    """The capture in a database. ``triggers`` maps each event trigger that exists to always, origin, replica or disabled."""

    schema: str
    settings: script.Settings | None
    """None if the functions are not there, or are of no known version."""
    triggers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user asks an installation for. What is None stays as it is installed; a new capture gets the default."""

    schema: str | None = None
    statements: bool | None = None
    strict: bool | None = None

    def over(self, before: script.Settings) -> script.Settings:
        """Return the settings of this program's version. What the user did not ask for is as ``before``."""
        return script.Settings(
            statements=before.statements if self.statements is None else self.statements,
            strict=before.strict if self.strict is None else self.strict,
        )


@dataclass(frozen=True, slots=True)
class Done:
    """What `install` has installed. ``kept`` has the options that nobody gave, because an earlier installation had them."""

    schema: str
    settings: script.Settings
    kept: list[str]


def find(connection: Connection) -> Installed | None:
    """Return what is installed in the database, or None. The functions may be there without event triggers."""
    rows = connection.execute(script.FIND)
    if not rows:
        found = [(schema or "", script.Settings.parse(text)) for schema, text in connection.execute(_FIND_FUNCTIONS)]
        return next((Installed(schema, settings, {}) for schema, settings in found if settings is not None), None)
    return Installed(
        schema=rows[0][2] or "",
        settings=script.Settings.parse(rows[0][3]),
        triggers={name or "": _ENABLED[enabled or "D"] for name, enabled, *_ in rows},
    )


def install(connection: Connection, wanted: Wanted, publications: Sequence[str] = ()) -> Done:
    """Install the capture, over an older version if there is one, in one transaction. Nothing changes if it fails.

    A message of the kind ``installed`` describes the tables of the publications.
    """
    _refuse_standby(connection)
    if publications:
        check_publications(connection, publications)
    found = find(connection)
    if found is not None and wanted.schema not in (None, found.schema):
        msg = f"DDL capture is installed already, in the schema {found.schema!r}"
        raise InitError(msg, hint="without --schema it stays there; cdcpipe ddl remove removes it with its options")
    before = _settings_before(found, wanted)
    if before.version > script.VERSION:
        msg = f"DDL capture of the later version {before.version} is installed; this program has version {script.VERSION}"
        raise InitError(msg, hint="use the later version of cdcpipe, or cdcpipe ddl remove first")
    schema = found.schema if found is not None else wanted.schema or DEFAULT_SCHEMA
    settings = wanted.over(before)
    described = published(publications, connection.server_version) if publications else ""
    tables = f"SELECT t.relation_id FROM {described} t" if described else script.NO_TABLES
    with _naming_privileges(connection):
        connection.execute(script.install(schema, settings, tables, publications))
    return Done(schema, settings, _kept(wanted, schema, settings))


def _settings_before(found: Installed | None, wanted: Wanted) -> script.Settings:
    """Return the settings that stay unless something else is wanted. Raises InitError if nobody knows what would stay."""
    if found is None:
        return script.Settings()
    if found.settings is not None:
        return found.settings
    if wanted.statements is None or wanted.strict is None:  # the default could put texts into the WAL that somebody has excluded
        msg = f"the options of the DDL capture in the schema {found.schema!r} can't be read"
        raise InitError(msg, hint=_BOTH_OPTIONS)
    return script.Settings()


def _kept(wanted: Wanted, schema: str, settings: script.Settings) -> list[str]:
    """Return the options that give what was not asked for and is not the default."""
    options = []
    if wanted.schema is None and schema != DEFAULT_SCHEMA:
        options += ["--schema", shlex.quote(schema)]
    if wanted.statements is None and not settings.statements:
        options.append("--no-statements")
    if wanted.strict is None and settings.strict:
        options.append("--strict")
    return options


def remove(connection: Connection) -> str | None:
    """Remove the capture, and return its schema. Return None if there is none.

    The event triggers go first, in a transaction of their own, so that no DDL of another session fails meanwhile. If the program is
    killed between the two transactions, the next call removes the rest.
    """
    _refuse_standby(connection)
    found = find(connection)
    if found is None:
        return None
    with _naming_privileges(connection):
        if found.triggers:
            announcement = script.announce(found.schema, "removed") if found.settings is not None else ""
            connection.execute(f"{announcement};\n{script.disarm()}")
        connection.execute(script.remove(found.schema))
    return found.schema


def _refuse_standby(connection: Connection) -> None:
    if is_standby(connection):
        raise InitError("a standby takes no DDL", hint="connect to the primary; the standby gets what is installed there")


@contextmanager
def _naming_privileges(connection: Connection) -> Iterator[None]:
    """Turn the server's refusal into an InitError that says which role could do it."""
    try:
        yield
    except ServerError as ex:
        if ex.sqlstate != sqlstate.INSUFFICIENT_PRIVILEGE:
            raise
        managed = existing_roles(connection, MANAGED_ROLES)
        who = f"as a member of {', '.join(managed)}" if managed else "as a superuser"
        own_hint = f"event triggers take more privileges than a table's owner has: connect {who}"
        hint = own_hint if ex.hint == HINTS[sqlstate.INSUFFICIENT_PRIVILEGE] else ex.hint  # the server may have given a hint
        raise InitError(f"DDL capture can't be changed: {ex.message}", hint=hint) from ex


def examine(connection: Connection, publications: Sequence[str] = ()) -> tuple[Installed | None, list[Finding]]:
    """Return what is installed, and the findings about it. Without errors among them, every DDL statement is captured."""
    found = find(connection)
    if found is None:
        problem = error("DDL capture is not installed", "the stream does not tell of DDL", "cdcpipe ddl install")
        return None, list(named("ddl.installed", [problem]))
    return found, [
        *named("ddl.installed", _examine_functions(found)),
        *named("ddl.version", _examine_version(found)),
        *named("ddl.trigger", _examine_triggers(found)),
        *named("ddl.server", _examine_server(connection)),
        *named("ddl.publication", _examine_publications(connection, publications)),
    ]


def _examine_functions(found: Installed) -> Iterator[Verdict]:
    if found.settings is None:
        yield error(f"the functions in {found.schema!r} are not those of cdcpipe", "DDL fails", _BOTH_OPTIONS)
        return
    yield ok(f"version {found.settings.version} in the schema {found.schema!r}, {found.settings.description}")


def _examine_version(found: Installed) -> Iterator[Verdict]:
    if found.settings is not None and found.settings.version < script.VERSION:
        why = f"this program has version {script.VERSION}"
        yield warning(f"version {found.settings.version} is installed", why, "cdcpipe ddl install")


def _examine_triggers(found: Installed) -> Iterator[Verdict]:
    for name in script.TRIGGERS:
        state = found.triggers.get(name)
        if state is None:
            yield error("it does not exist", "its part of DDL is not captured", "cdcpipe ddl install", subject=name)
        elif state == "always":
            yield ok("enabled", subject=name)
        else:
            when = {
                "origin": "sessions with session_replication_role = replica",
                "replica": "ordinary sessions",
                "disabled": "any session",
            }[state]
            fix = f"ALTER EVENT TRIGGER {name} ENABLE ALWAYS"
            make = warning if state == "origin" else error
            yield make(f"its state is {state}", f"its part of the DDL of {when} is not captured", fix, subject=name)


def _examine_server(connection: Connection) -> Iterator[Verdict]:
    ((setting,),) = connection.execute("SELECT current_setting('event_triggers', true)")
    if setting == "off":
        yield error("event_triggers is off", "no event trigger fires", EVENT_TRIGGERS_ON)
    if problem := decoding_problem(connection):
        message, fix = problem
        yield warning(message, "there is no stream that the messages could be in", fix)
    if connection.execute(_MAY_WRITE) == [("f",)]:
        fix = "GRANT EXECUTE ON FUNCTION pg_logical_emit_message … to the triggers' owner"
        yield error("the triggers' owner may not call pg_logical_emit_message", "nothing is captured", fix)


def _examine_publications(connection: Connection, publications: Sequence[str]) -> Iterator[Verdict]:
    missing = missing_publications(connection, publications)
    for name in publications:
        if name in missing:
            yield error("it does not exist", "nothing is streamed", "CREATE PUBLICATION …", subject=name)
        else:
            ((tables,),) = connection.execute(f"SELECT count(*) FROM {published([name], connection.server_version)} t")
            yield ok(f"it has {counted(int(tables or 0), 'table')}", subject=name)
