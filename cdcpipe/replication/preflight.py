"""What is asked and made on the server before a stream starts, so that what is wrong is named before anything is sent.

Every function takes a ``Connection``: an ordinary one, but ``identify_system``, ``export_snapshot`` and ``start_stream`` take the
walsender's.
A walsender runs plain SQL as well, but must not run any before it streams: what SQL leaves in its catalog caches is today's
catalog, and the stream would be decoded with it. (Seen: a publication younger than the slot, looked up before, was found for
old WAL as well, and the rows there were skipped without an error.) Errors here end with exit code 2, 8 or 9.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cdcpipe.errors import (
    InitError,
    InvalidArgumentsError,
    RewoundServerError,
    ServerError,
    SlotDoesNotExistError,
    SlotInUseError,
)
from cdcpipe.lsn import LSN, format_lsn
from cdcpipe.replication.commands import IDENTIFY_SYSTEM, create_replication_slot, start_replication
from cdcpipe.replication.connection import NO_LIMIT, Connection
from cdcpipe.sql import quote_identifier, quote_literal

__all__ = [
    "LOCK_TIMEOUT",
    "ExportedSnapshot",
    "Slot",
    "System",
    "check_free",
    "check_publications",
    "check_start",
    "check_usable",
    "check_wal_level",
    "create_publication",
    "create_slot",
    "current_lsn",
    "expect_system",
    "export_snapshot",
    "find_slot",
    "identify_system",
    "missing_publications",
    "missing_slot_error",
    "naming_locks",
    "parse_publication_names",
    "slot_in_use_message",
    "start_stream",
]

_UNDEFINED_OBJECT = "42704"
_DUPLICATE_OBJECT = "42710"
_OBJECT_IN_USE = "55006"
_NOT_IN_PREREQUISITE_STATE = "55000"
_FEATURE_NOT_SUPPORTED = "0A000"
_INVALID_PARAMETER = "22023"
_QUERY_CANCELED = "57014"
_INSUFFICIENT_PRIVILEGE = "42501"
_UNDEFINED_FILE = "58P01"

_LOCK_NOT_AVAILABLE = "55P03"

LOCK_TIMEOUT = "10s"
"""So long a session of ours waits for a lock on a table."""

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
"""The lock that stands in the way of ours most likely: one that is only waited for makes later ones wait, too."""


_PAGE_BYTES = 8192
_LONG_PAGE_HEADER_BYTES = 40


@dataclass(frozen=True, slots=True)
class System:
    """IDENTIFY_SYSTEM: which cluster this is, on which timeline."""

    system_id: str
    timeline: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A row of ``pg_replication_slots``; positions are None while the slot is being created."""

    name: str
    plugin: str | None
    slot_type: str
    database: str | None
    active: bool
    active_pid: int | None
    restart_lsn: LSN | None
    confirmed_flush_lsn: LSN | None
    wal_status: str | None
    two_phase: bool
    """Whether prepared transactions come at their PREPARE, whatever the stream's options say: once on, it stays."""


@dataclass(frozen=True, slots=True)
class ExportedSnapshot:
    """A snapshot that other sessions can use (SET TRANSACTION SNAPSHOT) as long as the connection that exported it does nothing.

    It sees the transactions that end up to ``consistent_point``, and no others; no transaction ends across it.
    """

    name: str
    consistent_point: LSN


def identify_system(connection: Connection) -> System:
    """Run IDENTIFY_SYSTEM."""
    system_id, timeline, *_ = connection.execute(IDENTIFY_SYSTEM)[0]
    return System(system_id or "", int(timeline or 0))


def expect_system(system: System, expected: str) -> None:
    """Raise InitError unless the server is ``SYSTEM_ID/TIMELINE``."""
    found = f"{system.system_id}/{system.timeline}"
    if found != expected:
        msg = f"the server is {found} (system identifier/timeline), not {expected}: its positions can't be compared with ours"
        raise InitError(msg, hint="connect to the server that the data came from")


def check_start(connection: Connection, start_lsn: int) -> None:
    """Raise InitError if the server's WAL ends before ``start_lsn``; on a primary it is a RewoundServerError.

    System identifier and timeline do not tell an older copy of a server's disk from the server: only its WAL does. A standby that
    was restarted replays again what it had replayed before, so there it may help to wait.
    """
    in_recovery, wal_end = connection.execute(
        "SELECT pg_is_in_recovery(),"
        " CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END"
    )[0]
    if start_lsn <= LSN.parse(wal_end or "0/0"):
        return
    where = f"its WAL ends at {wal_end}, before {format_lsn(start_lsn)}, up to which the changes were taken (--startpos)"
    if in_recovery == "t":
        raise InitError(f"the standby has not replayed enough: {where}", hint="wait until it has, and start again")
    raise RewoundServerError(
        RewoundServerError.BEGINNING + where,
        hint="it was restored from an older copy, or the position is another server's. Its new changes have positions that were"
        " used before: to lose none, begin anew, with a new copy of the tables and without that position",
    )


def check_wal_level(connection: Connection) -> None:
    """Raise InitError unless the server decodes logically."""
    level = connection.execute("SELECT current_setting('wal_level')")[0][0]
    if level != "logical":
        msg = f"the server's wal_level is {level}: it does not write what logical decoding needs"
        raise InitError(
            msg,
            hint="set wal_level = logical in postgresql.conf (ALTER SYSTEM SET wal_level = logical), and restart it",
        )


def find_slot(connection: Connection, name: str, *, timeout_s: float | None = None) -> Slot | None:
    """Read a slot's state; None if there is no such slot. ``timeout_s`` as in `Connection.execute`."""
    rows = connection.execute(
        "SELECT plugin, slot_type, database, active, active_pid, restart_lsn, confirmed_flush_lsn, wal_status, two_phase"
        f" FROM pg_catalog.pg_replication_slots WHERE slot_name = {quote_literal(name)}",
        timeout_s=timeout_s,
    )
    if not rows:
        return None
    plugin, slot_type, database, active, active_pid, restart_lsn, confirmed_flush_lsn, wal_status, two_phase = rows[0]
    return Slot(
        name=name,
        plugin=plugin,
        slot_type=slot_type or "",
        database=database,
        active=active == "t",
        active_pid=int(active_pid) if active_pid else None,
        restart_lsn=LSN.parse(restart_lsn) if restart_lsn else None,
        confirmed_flush_lsn=LSN.parse(confirmed_flush_lsn) if confirmed_flush_lsn else None,
        wal_status=wal_status,
        two_phase=two_phase == "t",
    )


def missing_slot_error(name: str) -> SlotDoesNotExistError:
    """Return the error for a slot that is not there."""
    return SlotDoesNotExistError(
        f"replication slot {name!r} does not exist",
        hint="-c creates it; SELECT slot_name FROM pg_replication_slots lists those that exist",
    )


def check_usable(connection: Connection, slot: Slot) -> None:
    """Raise InitError for a slot that can't be streamed here, whoever uses it now."""
    if slot.slot_type != "logical":
        msg = f"replication slot {slot.name!r} is a {slot.slot_type} slot, not a logical one"
        raise InitError(msg, hint="name another slot, or create one with -c")
    if slot.database != connection.database:
        msg = f"replication slot {slot.name!r} belongs to database {slot.database!r}, the connection is to {connection.database!r}"
        raise InitError(msg, hint=f"connect to it: -d {slot.database}")
    if slot.wal_status == "lost":
        msg = f"replication slot {slot.name!r} is lost: the server has removed WAL that it needed, so changes are missing for good"
        raise InitError(
            msg,
            hint="drop the slot, create a new one and copy the tables anew; max_slot_wal_keep_size and"
            " idle_replication_slot_timeout on the server decide when this happens",
        )


def check_free(slot: Slot) -> None:
    """Raise SlotInUseError for a slot that is taken."""
    if slot.active or slot.confirmed_flush_lsn is None:
        raise SlotInUseError(slot_in_use_message(slot), hint="stop that consumer, or wait for it: --poll-mode, --standby")


def slot_in_use_message(slot: Slot) -> str:
    """Say who uses the slot."""
    if slot.confirmed_flush_lsn is None and not slot.active:
        return f"replication slot {slot.name!r} is still being created"
    return f"replication slot {slot.name!r} is in use by server process {slot.active_pid}"


def create_slot(connection: Connection, name: str, plugin: str, *, timeout_s: float | None) -> None:
    """Create a logical slot if it does not exist.

    The server waits for every running write transaction to end; beyond ``timeout_s`` it is told to give up, which leaves no slot.
    Raise InitError.
    """
    started_at = time.monotonic()
    try:
        connection.execute(
            f"SELECT pg_create_logical_replication_slot({quote_literal(name)}, {quote_literal(plugin)})",
            timeout_s=NO_LIMIT if timeout_s is None else timeout_s,
        )
    except ServerError as ex:
        if ex.sqlstate == _DUPLICATE_OBJECT:
            return
        raise _creation_error(ex, name, plugin, timeout_s, time.monotonic() - started_at) from ex


def export_snapshot(connection: Connection, slot: str, *, is_temporary: bool, timeout_s: float | None) -> ExportedSnapshot:
    """Make a pgoutput slot and export the snapshot of its beginning, on the walsender's connection. Raise InitError.

    A temporary slot is gone with the connection: it serves to get a snapshot whose place in the WAL is known.
    """
    command = create_replication_slot(slot, "pgoutput", is_temporary=is_temporary)
    started_at = time.monotonic()
    try:
        _, consistent_point, name, *_ = connection.execute(command, timeout_s=NO_LIMIT if timeout_s is None else timeout_s)[0]
    except ServerError as ex:
        raise _creation_error(ex, slot, "pgoutput", timeout_s, time.monotonic() - started_at) from ex
    return ExportedSnapshot(name or "", LSN.parse(consistent_point or ""))


def _creation_error(ex: ServerError, name: str, plugin: str, timeout_s: float | None, waited_s: float) -> InitError:
    """Translate what the server says to the creation of a slot, after ``waited_s``."""
    if ex.sqlstate == _QUERY_CANCELED and timeout_s is not None and waited_s >= timeout_s:
        return InitError(
            f"replication slot {name!r} was not created within {timeout_s:g} s (--create-timeout, in poll mode --poll-duration):"
            " the server waits for running transactions to end",
            hint="find them: SELECT pid, state, xact_start, query FROM pg_stat_activity WHERE backend_xid IS NOT NULL",
        )
    if ex.sqlstate == _INSUFFICIENT_PRIVILEGE and "output" in ex.message:
        return InitError(
            f"the server does not allow the output plugin {plugin!r}: {ex.message}",
            hint=f"its administrator has to list it: output_plugin_libraries = 'pgoutput, {plugin}'; or use -P pgoutput",
        )
    if ex.sqlstate == _UNDEFINED_FILE:
        return InitError(
            f"the server has no output plugin {plugin!r}: {ex.message}",
            hint="pgoutput is always there (-P pgoutput); -J and -j render wal2json's records from it",
        )
    return InitError(f"replication slot {name!r} could not be created: {ex.message}", hint=ex.hint)


def create_publication(connection: Connection, name: str, tables: Sequence[tuple[str, str]]) -> None:
    """Create a publication for ``tables`` (schema, name), for all tables if there are none."""
    what = ", ".join(f"{quote_identifier(schema)}.{quote_identifier(table)}" for schema, table in tables)
    target = f"FOR TABLE {what}" if what else "FOR ALL TABLES"
    try:
        with naming_locks(connection, tables):
            # The server locks the tables, and everybody who wants one of them later waits for us meanwhile.
            connection.execute(
                f"SET LOCAL lock_timeout = {quote_literal(LOCK_TIMEOUT)}; CREATE PUBLICATION {quote_identifier(name)} {target}"
            )
    except ServerError as ex:
        if ex.sqlstate == _DUPLICATE_OBJECT:
            return
        msg = f"publication {name!r} could not be created: {ex.message}"
        hint = "a publication of all tables takes a superuser: name the tables (--table SCHEMA.NAME)" if not what else ex.hint
        raise InitError(msg, hint=hint) from ex


@contextmanager
def naming_locks(connection: Connection, tables: Collection[tuple[str, str]]) -> Iterator[None]:
    """Where the server gives up waiting for a lock (``lock_timeout``), raise InitError: which of the tables, and who has it."""
    try:
        yield
    except ServerError as ex:
        if ex.sqlstate != _LOCK_NOT_AVAILABLE:
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


def parse_publication_names(value: str) -> list[str]:
    """Read a list of identifiers as the server does: folded to lower case unless quoted, a doubled quote stands for one."""
    names: list[str] = []
    pos = 0
    while True:
        while pos < len(value) and value[pos].isspace():
            pos += 1
        if value[pos : pos + 1] == '"':
            name = ""
            while True:
                end = value.find('"', pos + 1)
                if end < 0:
                    break
                name += value[pos + 1 : end]
                pos = end + 1
                if value[pos : pos + 1] != '"':
                    break
                name += '"'
            if end < 0 or not name:
                break
        else:
            end = pos
            while end < len(value) and value[end] != "," and not value[end].isspace():
                end += 1
            name, pos = value[pos:end].lower(), end
            if not name:
                break
        names.append(name)
        while pos < len(value) and value[pos].isspace():
            pos += 1
        if pos == len(value):
            return names
        if value[pos] != ",":
            break
        pos += 1
    msg = f"publication_names is not a list of identifiers: {value!r}"
    raise InvalidArgumentsError(msg, hint="name each with --publication, which quotes it")


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


def current_lsn(connection: Connection) -> LSN:
    """Return a position that everything committed by now lies before, and that a stream reaches without further writes."""
    text = connection.execute(
        "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END"
    )[0][0]
    lsn = LSN.parse(text or "0/0")
    # Right after a page's end the insert position stands behind the next page's header, which no record's end ever does.
    in_page = lsn % _PAGE_BYTES
    return LSN(lsn - in_page) if in_page <= _LONG_PAGE_HEADER_BYTES else lsn


def start_stream(connection: Connection, slot: str, start_lsn: int, options: Mapping[str, str | None]) -> None:
    """Run START_REPLICATION; raise SlotDoesNotExistError, SlotInUseError or InitError."""
    try:
        connection.execute(start_replication(slot, start_lsn, options))
    except ServerError as ex:
        if ex.sqlstate == _UNDEFINED_OBJECT:
            raise missing_slot_error(slot) from ex
        if ex.sqlstate == _OBJECT_IN_USE:
            raise SlotInUseError(ex.message, hint="stop that consumer, or wait for it: --poll-mode, --standby") from ex
        hints = {
            _NOT_IN_PREREQUISITE_STATE: "look at the slot: SELECT * FROM pg_replication_slots",
            _FEATURE_NOT_SUPPORTED: "ask for less: the server's message names the highest protocol version that it has",
            _INVALID_PARAMETER: "check the plugin's options (-o)",
            "XX000": "check the plugin's options (-o): this server may be too old for one of them",
        }
        hint = ex.hint or hints.get(ex.sqlstate or "")
        raise InitError(f"the stream could not be started: {ex.message}", hint=hint) from ex
