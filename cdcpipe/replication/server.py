"""The server: which one it is, whether it writes the WAL that is needed, and where its WAL ends.

`identify_system` takes a walsender's connection, the other functions an ordinary one.
"""

from __future__ import annotations

from dataclasses import dataclass

from cdcpipe.errors import (
    InitError,
    RewoundServerError,
)
from cdcpipe.libpq.connection import Connection
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.lsn import LSN, format_lsn
from cdcpipe.replication.commands import IDENTIFY_SYSTEM

__all__ = ["System", "check_start", "check_wal_level", "current_lsn", "expect_system", "identify_system"]


_PAGE_BYTES = 8192


_LONG_PAGE_HEADER_BYTES = 40


@dataclass(frozen=True, slots=True)
class System:
    """IDENTIFY_SYSTEM: which cluster this is, on which timeline."""

    system_id: str
    timeline: int


def identify_system(walsender: Walsender) -> System:
    """Run IDENTIFY_SYSTEM."""
    system_id, timeline, *_ = walsender.execute(IDENTIFY_SYSTEM)[0]
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


def current_lsn(connection: Connection) -> LSN:
    """Return a position that everything committed by now lies before, and that a stream reaches without further writes."""
    text = connection.execute(
        "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END"
    )[0][0]
    lsn = LSN.parse(text or "0/0")
    # Right after a page's end the insert position stands behind the next page's header, which no record's end ever does.
    in_page = lsn % _PAGE_BYTES
    return LSN(lsn - in_page) if in_page <= _LONG_PAGE_HEADER_BYTES else lsn
