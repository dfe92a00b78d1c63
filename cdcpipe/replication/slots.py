"""Replication slots: reads their state, checks whether one can be used, and starts a stream from one.

`start_stream` takes a walsender's connection, the other functions an ordinary one. A walsender must run no
SQL before it streams. SQL fills its catalog caches with today's catalog, and the walsender would decode old WAL with them. (This
was seen: SQL had looked up a publication younger than the slot. The walsender then used it for old WAL as well, and skipped the
rows there without an error.)
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cdcpipe import sqlstate
from cdcpipe.errors import GapError, InitError, LostSlotError, ServerError, SlotDoesNotExistError, SlotInUseError
from cdcpipe.libpq.connection import Connection
from cdcpipe.libpq.server_errors import HINTS, NO_REPLICATION
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.lsn import LSN, format_lsn
from cdcpipe.replication.commands import start_replication
from cdcpipe.replication.server import current_lsn
from cdcpipe.sql import quote_literal
from cdcpipe.units import format_size

__all__ = [
    "FAILOVER_SINCE",
    "STANDBYS_DECODE_SINCE",
    "Slot",
    "as_login_role",
    "check_free",
    "check_no_gap",
    "check_no_gap_before",
    "check_usable",
    "drop_lost",
    "find_slot",
    "find_slots",
    "missing_slot_error",
    "slot_columns",
    "slot_in_use_message",
    "start_stream",
    "what_frees",
]


log = logging.getLogger(__name__)

FAILOVER_SINCE = 170000
"""The first server version whose slots have the properties ``failover`` and ``synced``."""

STANDBYS_DECODE_SINCE = 160000
"""The first server version whose standbys have logical slots of their own, and can stream from them."""

_CONFLICTS_SINCE = 160000
_CONFLICT_IN_16 = "CASE WHEN conflicting AND restart_lsn IS NOT NULL THEN 'conflict' END"
"""Version 16 also calls a slot conflicting that is lost because the server removed its WAL. Such a slot has no restart_lsn."""

_KEEP_ROWS = (
    "hot_standby_feedback = on on the standby, with a slot for the standby on the primary (primary_slot_name), keeps such rows"
)
_LOST = {
    None: (
        "the server has removed WAL that it needed",
        "max_slot_wal_keep_size and idle_replication_slot_timeout on the server decide when this happens",
    ),
    "rows_removed": ("the primary has removed rows of the catalog that it needed (rows_removed)", _KEEP_ROWS),
    "wal_level_insufficient": (
        "the primary's wal_level was no longer logical (wal_level_insufficient)",
        "keep wal_level = logical on the primary",
    ),
    "conflict": (
        "the primary has removed rows of the catalog that it needed, or its wal_level was no longer logical (conflicting)",
        _KEEP_ROWS,
    ),
    "idle_timeout": (
        "nobody used it for as long as idle_replication_slot_timeout says (idle_timeout)",
        "the server's idle_replication_slot_timeout decides when this happens",
    ),
}
"""For each reason why a slot is lost: what happened, and how to prevent it. None is for wal_removed and for unknown reasons."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A row of ``pg_replication_slots``. Positions are None while the slot is being created."""

    name: str
    plugin: str | None
    slot_type: str
    database: str | None
    active_pid: int | None
    restart_lsn: LSN | None
    confirmed_flush_lsn: LSN | None
    wal_status: str | None
    safe_wal_bytes: int | None
    """The server can write this much more WAL before the slot may be lost; None if max_slot_wal_keep_size has no limit."""
    two_phase: bool
    """Whether the server sends prepared transactions at their PREPARE. Once on, this stays on, whatever a stream's options are."""
    temporary: bool
    failover: bool | None
    """Whether the server's standbys are to have a copy of the slot; None before PostgreSQL 17."""
    synced: bool | None
    """Whether the slot is, or was before the promotion, a standby's copy of its primary's slot; None before PostgreSQL 17."""
    invalidation_reason: str | None
    """Why the slot is lost, in the server's words (17 and newer); ``conflict`` on a standby of version 16; None if unknown."""
    in_recovery: bool
    """Whether the server is a standby."""
    decodes: bool
    """Whether the server streams from logical slots. A standby before PostgreSQL 16 does not, until it is promoted: a tool, such as
    pg_failover_slots or Patroni, may have copied a slot to it, or it was the primary before."""
    is_new: bool = False
    """Whether this process has just created it (`find_slot` can't know)."""

    @classmethod
    def of(cls, row: Sequence[str | None]) -> Slot:
        """Return the slot that a row with `slot_columns` shows."""
        (
            name, plugin, slot_type, database, active_pid, restart_lsn, confirmed_flush_lsn, wal_status, safe_wal_bytes, two_phase,
            temporary, in_recovery, decodes, failover, synced, invalidation_reason,
        ) = row  # fmt: skip
        return cls(
            name=name or "",
            plugin=plugin,
            slot_type=slot_type or "",
            database=database,
            active_pid=int(active_pid) if active_pid else None,
            restart_lsn=LSN.parse(restart_lsn) if restart_lsn else None,
            confirmed_flush_lsn=LSN.parse(confirmed_flush_lsn) if confirmed_flush_lsn else None,
            wal_status=wal_status,
            safe_wal_bytes=int(safe_wal_bytes) if safe_wal_bytes else None,
            two_phase=two_phase == "t",
            temporary=temporary == "t",
            failover=None if failover is None else failover == "t",
            synced=None if synced is None else synced == "t",
            invalidation_reason=invalidation_reason,
            in_recovery=in_recovery == "t",
            decodes=decodes == "t",
        )

    @property
    def active(self) -> bool:
        """Whether a process uses it. The process that creates it does, too."""
        return self.active_pid is not None

    @property
    def is_copy(self) -> bool:
        """Whether it is a standby's copy of its primary's slot, from which nobody can stream before the standby is promoted."""
        return self.in_recovery and bool(self.synced)

    @property
    def is_passing_copy(self) -> bool:
        """Whether it is such a copy, and a promotion would remove it: the primary's slot has to move before the copy lasts."""
        return self.is_copy and self.temporary

    @property
    def is_lost(self) -> bool:
        """Whether the server will never stream from it."""
        return self._is_invalid and not self.is_copy

    @property
    def is_lost_copy(self) -> bool:
        """Whether it is such a copy, and is lost. If the primary's slot is well, the standby makes the copy anew."""
        return self._is_invalid and self.is_copy

    @property
    def _is_invalid(self) -> bool:
        return self.wal_status == "lost" or self.invalidation_reason is not None

    @property
    def waits_for_promotion(self) -> bool:
        """Whether nobody can stream from the slot before this standby is promoted."""
        return self.is_copy or not self.decodes

    @property
    def is_free(self) -> bool:
        """Whether a stream from the slot can start now, as far as other processes and servers decide it."""
        return not self.waits_for_promotion and not self.active and self.confirmed_flush_lsn is not None


def find_slot(connection: Connection, name: str, *, timeout_s: float | None = None) -> Slot | None:
    """Return a slot's state, or None if the slot does not exist. ``timeout_s`` is as in `Connection.execute`."""
    return next(iter(find_slots(connection, name, timeout_s=timeout_s)), None)


def find_slots(connection: Connection, name: str | None = None, *, timeout_s: float | None = None) -> list[Slot]:
    """Return the state of all the server's slots, or of the one of this name."""
    rows = connection.execute(
        f"SELECT {slot_columns(connection.server_version)} FROM pg_catalog.pg_replication_slots"
        f"{'' if name is None else f' WHERE slot_name = {quote_literal(name)}'} ORDER BY slot_name",
        timeout_s=timeout_s,
    )
    return [Slot.of(row) for row in rows]


def slot_columns(server_version: int) -> str:
    """Return the columns of ``pg_replication_slots`` from which `Slot.of` makes a slot. Older servers lack some of them."""
    if server_version >= FAILOVER_SINCE:
        newer = "failover, synced, invalidation_reason"
    else:
        newer = f"NULL, NULL, {_CONFLICT_IN_16 if server_version >= _CONFLICTS_SINCE else 'NULL'}"
    decodes = "true" if server_version >= STANDBYS_DECODE_SINCE else "NOT pg_catalog.pg_is_in_recovery()"
    return (
        "slot_name, plugin, slot_type, database, active_pid, restart_lsn, confirmed_flush_lsn, wal_status, safe_wal_size,"
        f" two_phase, temporary, pg_catalog.pg_is_in_recovery(), {decodes}, {newer}"
    )


def missing_slot_error(name: str) -> SlotDoesNotExistError:
    """Return the error for a slot that does not exist. Commands that have no option ``-c`` report it, too."""
    return SlotDoesNotExistError(
        f"replication slot {name!r} does not exist",
        hint="a stream with -c creates it (cdcpipe, cdcpipe-spark land or run);"
        " SELECT slot_name FROM pg_replication_slots lists those that exist",
    )


def check_usable(connection: Connection, slot: Slot) -> None:
    """Raise InitError for a slot that can't be streamed from this connection, even if it were free.

    A standby's copy of its primary's slot is not refused for being lost: the standby makes a lost copy anew.
    """
    if slot.slot_type != "logical":
        msg = f"replication slot {slot.name!r} is a {slot.slot_type} slot, not a logical one"
        raise InitError(msg, hint="name another slot; cdcpipe -c creates one if there is none of its name")
    if slot.database != connection.database:
        msg = f"replication slot {slot.name!r} belongs to database {slot.database!r}, the connection is to {connection.database!r}"
        raise InitError(msg, hint=f"connect to it: -d {shlex.quote(slot.database or '')}")
    _check_not_lost(slot)


def _check_not_lost(slot: Slot) -> None:
    """Raise LostSlotError for a slot from which the server will never stream again."""
    if slot.is_lost:
        what, prevention = _LOST.get(slot.invalidation_reason, _LOST[None])
        msg = f"{LostSlotError.BEGINNING}replication slot {slot.name!r} is lost: {what}"
        drop = f"SELECT pg_drop_replication_slot({quote_literal(slot.name)})"
        raise LostSlotError(msg, hint=f"drop the slot ({drop}), create a new one and copy the tables anew; {prevention}")


@contextmanager
def as_login_role(connection: Connection) -> Iterator[None]:
    """Run commands on slots as the role that has connected, which has REPLICATION. `cdcpipe.sql.LOGIN_ROLE` says why.

    If the server refuses them for a missing privilege, and gives no hint itself, the role lacks REPLICATION.
    """
    connection.execute("SET role = none")
    try:
        yield
    except ServerError as ex:
        connection.execute("RESET role")
        # The server's message says which privilege, but perhaps in another language. For a table, REPLICATION is no remedy.
        if ex.sqlstate == sqlstate.INSUFFICIENT_PRIVILEGE and ex.hint == HINTS[sqlstate.INSUFFICIENT_PRIVILEGE]:
            raise ServerError(ex.message, sqlstate=ex.sqlstate, hint=NO_REPLICATION) from ex
        raise
    connection.execute("RESET role")


def drop_lost(connection: Connection, slot: Slot) -> None:
    """Drop a slot that is lost. Raises InitError if the server refuses it."""
    log.warning("replication slot %r is lost: it is dropped and made anew", slot.name)
    try:
        with as_login_role(connection):
            connection.execute(f"SELECT pg_drop_replication_slot({quote_literal(slot.name)})")
    except ServerError as ex:
        raise InitError(f"replication slot {slot.name!r} is lost and could not be dropped: {ex.message}", hint=ex.hint) from ex


def check_free(slot: Slot) -> None:
    """Raise SlotInUseError if another connection uses the slot, and InitError if nobody can before the standby is promoted."""
    if slot.waits_for_promotion:
        hint = "connect to the primary; or wait for the promotion (cdcpipe --poll-mode, cdcpipe --standby)"
        hint += "; or make another slot here: -S NAME -c --failover no" if slot.decodes else ""
        raise InitError(slot_in_use_message(slot), hint=hint)
    if not slot.is_free:
        raise SlotInUseError(slot_in_use_message(slot), hint=f"{what_frees(slot)}, or wait for it: --poll-mode, --standby")


def check_no_gap(connection: Connection, name: str, expected_lsn: int) -> None:
    """Raise GapError if the slot is beyond ``expected_lsn``: the server will not send what committed in between.

    Call this after the stream has been started, and before anything is written or confirmed. Until the stream has been started,
    another process could still move the slot.
    """
    slot = find_slot(connection, name)
    if slot is None:
        raise missing_slot_error(name)
    confirmed_lsn = slot.confirmed_flush_lsn or LSN(0)
    if confirmed_lsn <= expected_lsn:
        return
    raise _gap_error(
        f"replication slot {name!r} is at",
        confirmed_lsn,
        expected_lsn,
        hint="the slot was dropped and made again, or moved by pg_replication_slot_advance, or another consumer took the changes"
        " (another cdcpipe, pg_logical_slot_get_changes; also an idle one without --idle-positions), or the expected position is"
        " from an older copy of your data. Copy the tables anew; or go on without these changes: leave --expect-lsn out, or give"
        f" --expect-lsn {confirmed_lsn}",
    )


def check_no_gap_before(connection: Connection, name: str, expected_lsn: int) -> None:
    """Raise GapError if a slot that is made now would be beyond ``expected_lsn``."""
    beginning_lsn = current_lsn(connection)
    if beginning_lsn > expected_lsn:
        raise _gap_error(
            f"there is no replication slot {name!r}, and a new one would begin at",
            beginning_lsn,
            expected_lsn,
            hint="the slot was dropped. Copy the tables anew; or go on without the changes: leave --expect-lsn out, and -c makes"
            " a slot",
        )


def _gap_error(found: str, slot_lsn: LSN, expected_lsn: int, hint: str) -> GapError:
    return GapError(
        f"{GapError.BEGINNING}{found} {slot_lsn}, {format_size(slot_lsn - expected_lsn)} of WAL beyond"
        f" {format_lsn(expected_lsn)} (--expect-lsn), and the server no longer sends what committed in between",
        hint=hint,
    )


def slot_in_use_message(slot: Slot) -> str:
    """Return a message that says why a slot is not free: which process uses it, or that the standby must be promoted first."""
    if slot.is_copy:
        what = "this standby's copy of its primary's slot: nobody can stream from it before the standby is promoted"
        end = ", so a promotion now would lose the slot"
        passing = f"; the copy does not last yet{end}" if slot.is_passing_copy else ""
        if slot.is_lost_copy:
            cause, _ = _LOST.get(slot.invalidation_reason, _LOST[None])
            passing = f"; the copy is lost ({cause}){end}; the standby makes it anew if the primary's slot is well"
        return f"replication slot {slot.name!r} is {what}{passing}"
    if not slot.decodes:
        what = f"on a standby older than PostgreSQL {STANDBYS_DECODE_SINCE // 10000}"
        return f"replication slot {slot.name!r} is {what}: nobody can stream from it before the standby is promoted"
    if slot.confirmed_flush_lsn is None:
        return f"replication slot {slot.name!r} is still being created, by server process {slot.active_pid}"
    return f"replication slot {slot.name!r} is in use by server process {slot.active_pid}"


def what_frees(slot: Slot) -> str:
    """Return what to do so that a slot becomes free. A slot that is being created has no consumer that could be stopped."""
    if slot.is_lost_copy:
        return "look at the slot on the primary: SELECT * FROM pg_replication_slots"
    if slot.is_passing_copy:
        return "let the slot's consumer at the primary go on: once the primary's slot has moved, the copy lasts"
    if slot.waits_for_promotion:
        return "promote this standby"
    if slot.confirmed_flush_lsn is None:
        end = "let the running transactions end, for which its creation waits"
        return f"SELECT pg_log_standby_snapshot() on the primary, and {end}" if slot.in_recovery else end
    return "stop that consumer"


def start_stream(
    walsender: Walsender, slot: str, start_lsn: int, options: Mapping[str, str | None], *, may_be_direct: bool = False
) -> None:
    """Run START_REPLICATION. Raises SlotDoesNotExistError, SlotInUseError or InitError. ``may_be_direct``: see `Walsender`."""
    try:
        walsender.start_copy(start_replication(slot, start_lsn, options), may_be_direct=may_be_direct)
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
