"""Creates replication slots, with or without the snapshot at their beginning.

`create_slot` takes an ordinary connection, `export_snapshot` a walsender's: replication/slots.py says why they are kept apart.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cdcpipe import sqlstate
from cdcpipe.errors import InitError, ServerError
from cdcpipe.libpq.connection import Connection
from cdcpipe.libpq.server_errors import HINTS, NO_REPLICATION
from cdcpipe.libpq.waiting import NO_LIMIT
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.lsn import LSN
from cdcpipe.replication.commands import create_replication_slot
from cdcpipe.replication.slots import as_login_role
from cdcpipe.sql import quote_literal

__all__ = ["ExportedSnapshot", "NewSlot", "check_creatable", "create_slot", "export_snapshot"]

log = logging.getLogger(__name__)

ADVICE_AFTER_S = 2.0
"""How long a standby may take to make a slot before the user is told what it waits for."""

_ADVICE = "SELECT pg_log_standby_snapshot() on the primary"


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A logical slot to create.

    After ``timeout_s`` (None: no limit) the command is cancelled, and no slot is left behind. A primary waits until all
    transactions that are writing have ended. A standby (``is_on_standby``) waits for a record of its primary that names such
    transactions; an idle primary does not write one.
    """

    name: str
    plugin: str
    failover: bool
    is_on_standby: bool
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class ExportedSnapshot:
    """A snapshot that other sessions can use (SET TRANSACTION SNAPSHOT) until the exporting connection runs its next command.

    The snapshot sees exactly the transactions that end at or before ``consistent_point``.
    """

    name: str
    consistent_point: LSN


def check_creatable(connection: Connection, name: str) -> None:
    """Raise InitError if the server would refuse a new slot for its name, or because it has no room for one more."""
    what = f"replication slot {name!r} could not be created"
    if not re.fullmatch("[a-z0-9_]+", name):
        raise InitError(f"{what}: its name has other characters", hint="use lower case letters, digits and underscores only")
    ((room, limit),) = connection.execute(
        "SELECT current_setting('max_replication_slots')::integer - count(*), current_setting('max_replication_slots')"
        " FROM pg_catalog.pg_replication_slots"
    )
    if int(room or 0) <= 0:
        raise InitError(
            f"{what}: all {limit} replication slots are in use",
            hint="drop one that nobody needs (SELECT * FROM pg_replication_slots), or raise max_replication_slots on the server",
        )


def create_slot(connection: Connection, new: NewSlot) -> bool:
    """Create a slot if it does not exist. Return whether it was created. Raises InitError."""
    failover = ", failover => true" if new.failover else ""
    sql = f"SELECT pg_create_logical_replication_slot({quote_literal(new.name)}, {quote_literal(new.plugin)}{failover})"
    started_at = time.monotonic()
    try:
        with _advising(new), as_login_role(connection):
            connection.execute(sql, timeout_s=NO_LIMIT if new.timeout_s is None else new.timeout_s)
    except ServerError as ex:
        if ex.sqlstate == sqlstate.DUPLICATE_OBJECT:
            return False
        raise _creation_error(ex, new, time.monotonic() - started_at) from ex
    return True


def export_snapshot(walsender: Walsender, new: NewSlot, *, is_temporary: bool) -> ExportedSnapshot:
    """Create a slot on the walsender's connection, and export the snapshot at its beginning. Raises InitError.

    A temporary slot disappears with the connection. It serves to get a snapshot whose position in the WAL is known.
    """
    command = create_replication_slot(new.name, new.plugin, is_temporary=is_temporary, failover=new.failover)
    started_at = time.monotonic()
    try:
        with _advising(new):
            rows = walsender.execute(command, timeout_s=NO_LIMIT if new.timeout_s is None else new.timeout_s)
    except ServerError as ex:
        raise _creation_error(ex, new, time.monotonic() - started_at) from ex
    _, consistent_point, name, *_ = rows[0]
    return ExportedSnapshot(name or "", LSN.parse(consistent_point or ""))


@contextmanager
def _advising(new: NewSlot) -> Iterator[None]:
    """If a standby takes long to make the slot, say once what it waits for."""
    if not new.is_on_standby:
        yield
        return
    advice = "replication slot %r waits for a record that an idle primary does not write; to have it now: %s"
    timer = threading.Timer(ADVICE_AFTER_S, log.warning, (advice, new.name, _ADVICE))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _creation_error(ex: ServerError, new: NewSlot, waited_s: float) -> InitError:
    """Return the error for the server's error when it was to create a slot. ``waited_s`` is how long the command ran."""
    if ex.sqlstate == sqlstate.QUERY_CANCELED and new.timeout_s is not None and waited_s >= new.timeout_s:
        what = "running transactions to end"
        hint = (
            "find them: SELECT pid, state, xact_start, query FROM pg_stat_activity WHERE backend_xid IS NOT NULL; and prepared"
            " ones: SELECT gid, prepared, database FROM pg_prepared_xacts"
        )
        if new.is_on_standby:
            what = "its primary to say which transactions are running, and for these to end"
            hint = f"{_ADVICE} makes it say so; there, {hint}"
        return InitError(
            f"replication slot {new.name!r} was not created within {round(new.timeout_s, 1):g} s"
            f" (--create-timeout, in poll mode also --poll-duration): the server waits for {what}",
            hint=hint,
        )
    # The server has a hint of its own for a plugin. The role's privileges are another matter.
    if ex.sqlstate == sqlstate.INSUFFICIENT_PRIVILEGE and ex.hint not in (NO_REPLICATION, HINTS[sqlstate.INSUFFICIENT_PRIVILEGE]):
        return InitError(
            f"the server does not allow the output plugin {new.plugin!r}: {ex.message}",
            hint=f"its administrator has to list it: output_plugin_libraries = 'pgoutput, {new.plugin}'; or use -P pgoutput",
        )
    if ex.sqlstate == sqlstate.UNDEFINED_FILE:
        return InitError(
            f"the server has no output plugin {new.plugin!r}: {ex.message}",
            hint="pgoutput is always there: leave -P out, and name a publication (--publication NAME); -J and -j render wal2json's"
            " records from it",
        )
    advice = None
    if new.is_on_standby and ex.sqlstate == sqlstate.FEATURE_NOT_SUPPORTED:
        advice = "logical slots on a standby take PostgreSQL 16 or newer: connect to the primary"
    elif new.is_on_standby and ex.sqlstate == sqlstate.NOT_IN_PREREQUISITE_STATE and "wal_level" in ex.message:
        advice = "on the primary: ALTER SYSTEM SET wal_level = logical, and restart it; the standby follows within seconds"
    return InitError(f"replication slot {new.name!r} could not be created: {ex.message}", hint=ex.hint or advice)
