"""Replication slots: their state, whether one can be used, how one is made, and the start of a stream from one.

`export_snapshot` and `start_stream` take a walsender's connection, the other functions an ordinary one. A walsender must run no
SQL before it streams: what SQL leaves in its catalog caches is today's catalog, and the stream would be decoded with it. (Seen: a
publication younger than the slot, looked up before, was found for old WAL as well, and the rows there were skipped without an
error.)
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from cdcpipe import sqlstate
from cdcpipe.errors import InitError, ServerError, SlotDoesNotExistError, SlotInUseError
from cdcpipe.libpq.connection import Connection
from cdcpipe.libpq.waiting import NO_LIMIT
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.lsn import LSN
from cdcpipe.replication.commands import create_replication_slot, start_replication
from cdcpipe.sql import quote_literal

__all__ = [
    "ExportedSnapshot",
    "Slot",
    "check_free",
    "check_usable",
    "create_slot",
    "export_snapshot",
    "find_slot",
    "missing_slot_error",
    "slot_in_use_message",
    "start_stream",
]


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
        if ex.sqlstate == sqlstate.DUPLICATE_OBJECT:
            return
        raise _creation_error(ex, name, plugin, timeout_s, time.monotonic() - started_at) from ex


def export_snapshot(walsender: Walsender, slot: str, *, is_temporary: bool, timeout_s: float | None) -> ExportedSnapshot:
    """Make a pgoutput slot and export the snapshot of its beginning, on the walsender's connection. Raise InitError.

    A temporary slot is gone with the connection: it serves to get a snapshot whose place in the WAL is known.
    """
    command = create_replication_slot(slot, "pgoutput", is_temporary=is_temporary)
    started_at = time.monotonic()
    try:
        _, consistent_point, name, *_ = walsender.execute(command, timeout_s=NO_LIMIT if timeout_s is None else timeout_s)[0]
    except ServerError as ex:
        raise _creation_error(ex, slot, "pgoutput", timeout_s, time.monotonic() - started_at) from ex
    return ExportedSnapshot(name or "", LSN.parse(consistent_point or ""))


def _creation_error(ex: ServerError, name: str, plugin: str, timeout_s: float | None, waited_s: float) -> InitError:
    """Translate what the server says to the creation of a slot, after ``waited_s``."""
    if ex.sqlstate == sqlstate.QUERY_CANCELED and timeout_s is not None and waited_s >= timeout_s:
        return InitError(
            f"replication slot {name!r} was not created within {timeout_s:g} s (--create-timeout, in poll mode --poll-duration):"
            " the server waits for running transactions to end",
            hint="find them: SELECT pid, state, xact_start, query FROM pg_stat_activity WHERE backend_xid IS NOT NULL",
        )
    if ex.sqlstate == sqlstate.INSUFFICIENT_PRIVILEGE and "output" in ex.message:
        return InitError(
            f"the server does not allow the output plugin {plugin!r}: {ex.message}",
            hint=f"its administrator has to list it: output_plugin_libraries = 'pgoutput, {plugin}'; or use -P pgoutput",
        )
    if ex.sqlstate == sqlstate.UNDEFINED_FILE:
        return InitError(
            f"the server has no output plugin {plugin!r}: {ex.message}",
            hint="pgoutput is always there (-P pgoutput); -J and -j render wal2json's records from it",
        )
    return InitError(f"replication slot {name!r} could not be created: {ex.message}", hint=ex.hint)


def start_stream(walsender: Walsender, slot: str, start_lsn: int, options: Mapping[str, str | None]) -> None:
    """Run START_REPLICATION; raise SlotDoesNotExistError, SlotInUseError or InitError."""
    try:
        walsender.execute(start_replication(slot, start_lsn, options))
    except ServerError as ex:
        if ex.sqlstate == sqlstate.UNDEFINED_OBJECT:
            raise missing_slot_error(slot) from ex
        if ex.sqlstate == sqlstate.OBJECT_IN_USE:
            raise SlotInUseError(ex.message, hint="stop that consumer, or wait for it: --poll-mode, --standby") from ex
        hints = {
            sqlstate.NOT_IN_PREREQUISITE_STATE: "look at the slot: SELECT * FROM pg_replication_slots",
            sqlstate.FEATURE_NOT_SUPPORTED: "ask for less: the server's message names the highest protocol version that it has",
            sqlstate.INVALID_PARAMETER_VALUE: "check the plugin's options (-o)",
            sqlstate.INTERNAL_ERROR: "check the plugin's options (-o): this server may be too old for one of them",
        }
        hint = ex.hint or hints.get(ex.sqlstate or "")
        raise InitError(f"the stream could not be started: {ex.message}", hint=hint) from ex
