"""Finds the positions of a slot and of its server at one moment. The user needs no REPLICATION or other attribute.

A fact that the server does not show to this user is None. (Without pg_read_all_stats, pg_stat_replication hides other users' rows.)
"""

from __future__ import annotations

from dataclasses import dataclass

from cdcpipe.libpq.connection import Connection
from cdcpipe.lsn import LSN
from cdcpipe.replication.slots import FAILOVER_SINCE, missing_slot_error
from cdcpipe.sql import quote_literal

__all__ = ["SlotPosition", "find_position", "find_system_id"]


@dataclass(frozen=True, slots=True)
class SlotPosition:
    """A slot's positions in the server's WAL. A field is None if its value is unknown or does not exist."""

    wal_lsn: LSN
    """The end of the WAL; on a standby, the end of the replayed WAL."""
    sent_lsn: LSN | None
    """The position up to which the slot's current walsender has sent the WAL."""
    confirmed_flush_lsn: LSN | None
    restart_lsn: LSN | None
    """The server keeps the WAL from this position on for the slot."""
    active: bool
    active_pid: int | None
    wal_status: str | None
    safe_wal_bytes: int | None
    """The server can write this much more WAL before the slot may be lost; None if max_slot_wal_keep_size has no limit."""
    plugin: str | None
    database: str | None
    failover: bool | None
    """Whether the server's standbys are to have a copy of the slot; None before PostgreSQL 17."""
    synced: bool | None
    """Whether the slot is, or was before the promotion, a standby's copy of its primary's slot; None before PostgreSQL 17."""


def find_system_id(connection: Connection) -> str | None:
    """Return the server's system identifier; None if the superuser has revoked the function that tells it."""
    function = "pg_catalog.pg_control_system()"
    if connection.execute(f"SELECT pg_catalog.has_function_privilege('{function}', 'EXECUTE')") != [("t",)]:
        return None
    return connection.execute(f"SELECT system_identifier FROM {function}")[0][0]


def find_position(connection: Connection, name: str) -> SlotPosition:
    """Return a slot's positions. Raises SlotDoesNotExistError if the slot does not exist."""
    rows = connection.execute(
        "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()"
        " ELSE pg_catalog.pg_current_wal_lsn() END,"
        " r.sent_lsn, s.confirmed_flush_lsn, s.restart_lsn, s.active, s.active_pid, s.wal_status, s.safe_wal_size, s.plugin,"
        f" s.database, {'s.failover, s.synced' if connection.server_version >= FAILOVER_SINCE else 'NULL, NULL'}"
        " FROM pg_catalog.pg_replication_slots s"
        " LEFT JOIN pg_catalog.pg_stat_replication r ON r.pid = s.active_pid"
        f" WHERE s.slot_name = {quote_literal(name)}"
    )
    if not rows:
        raise missing_slot_error(name)
    (
        wal_lsn, sent_lsn, confirmed_flush_lsn, restart_lsn, active, active_pid, wal_status, safe_wal_bytes, plugin, database,
        failover, synced,
    ) = rows[0]  # fmt: skip
    return SlotPosition(
        wal_lsn=LSN.parse(wal_lsn or "0/0"),
        sent_lsn=LSN.parse(sent_lsn) if sent_lsn else None,
        confirmed_flush_lsn=LSN.parse(confirmed_flush_lsn) if confirmed_flush_lsn else None,
        restart_lsn=LSN.parse(restart_lsn) if restart_lsn else None,
        active=active == "t",
        active_pid=int(active_pid) if active_pid else None,
        wal_status=wal_status,
        safe_wal_bytes=int(safe_wal_bytes) if safe_wal_bytes else None,
        plugin=plugin,
        database=database,
        failover=None if failover is None else failover == "t",
        synced=None if synced is None else synced == "t",
    )
