"""Finds the positions of a slot and of its server at one moment. The user needs no REPLICATION or other attribute.

A fact that the server does not show to this user is None. (Without pg_read_all_stats, pg_stat_replication hides other users' rows.)
"""

from __future__ import annotations

from dataclasses import dataclass

from cdcpipe.libpq.connection import Connection
from cdcpipe.lsn import LSN
from cdcpipe.replication.server import WAL_END
from cdcpipe.replication.slots import Slot, missing_slot_error, slot_columns
from cdcpipe.sql import quote_literal

__all__ = ["SlotPosition", "find_position", "find_system_id"]


@dataclass(frozen=True, slots=True)
class SlotPosition:
    """A slot, and the server's WAL at the same moment. A field is None if its value is unknown or does not exist."""

    wal_lsn: LSN
    """The end of the WAL; on a standby, the end of the replayed WAL."""
    sent_lsn: LSN | None
    """The position up to which the slot's current walsender has sent the WAL."""
    slot: Slot


def find_system_id(connection: Connection) -> str | None:
    """Return the server's system identifier; None if the superuser has revoked the function that tells it."""
    function = "pg_catalog.pg_control_system()"
    if connection.execute(f"SELECT pg_catalog.has_function_privilege('{function}', 'EXECUTE')") != [("t",)]:
        return None
    return connection.execute(f"SELECT system_identifier FROM {function}")[0][0]


def find_position(connection: Connection, name: str) -> SlotPosition:
    """Return a slot's positions. Raises SlotDoesNotExistError if the slot does not exist."""
    rows = connection.execute(
        f"SELECT {WAL_END}, (SELECT sent_lsn FROM pg_catalog.pg_stat_replication WHERE pid = active_pid),"
        f" {slot_columns(connection.server_version)} FROM pg_catalog.pg_replication_slots WHERE slot_name = {quote_literal(name)}"
    )
    if not rows:
        raise missing_slot_error(name)
    wal_lsn, sent_lsn, *slot = rows[0]
    return SlotPosition(LSN.parse(wal_lsn or "0/0"), LSN.parse(sent_lsn) if sent_lsn else None, Slot.of(slot))
