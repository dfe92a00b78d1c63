"""Checks the server: which server it is, whether its WAL has what logical decoding needs, and where its WAL ends.

`identify_system` takes a walsender's connection, the other functions an ordinary one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cdcpipe.errors import (
    InitError,
    OtherServerError,
    RewoundServerError,
)
from cdcpipe.libpq.connection import Connection
from cdcpipe.libpq.walsender import Walsender
from cdcpipe.lsn import LSN, format_lsn
from cdcpipe.replication.commands import IDENTIFY_SYSTEM
from cdcpipe.sql import quote_literal

__all__ = [
    "WAL_END",
    "System",
    "allows_decoding",
    "check_reaches",
    "check_wal_level",
    "copies_slots",
    "current_lsn",
    "current_time",
    "decoding_problem",
    "existing_roles",
    "expect_system",
    "expect_system_id",
    "identify_system",
    "is_standby",
    "last_end",
]


_WAL_END = "CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.{}() END"
WAL_END = _WAL_END.format("pg_current_wal_lsn")
"""SQL for where the server's WAL ends; on a standby, the WAL that it has replayed."""

_INSERT_END = _WAL_END.format("pg_current_wal_insert_lsn")
"""The same with the WAL that is still in the server's memory, where a transaction's commit may be."""

_PAGE_HEADER_BYTES, _FIRST_PAGE_HEADER_BYTES = 24, 40
"""How long the header of a WAL page is, and that of a segment's first page (access/xlog_internal.h)."""


@dataclass(frozen=True, slots=True)
class System:
    """The answer to IDENTIFY_SYSTEM: the cluster and its timeline."""

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


def expect_system_id(system: System, expected: Collection[str]) -> None:
    """Raise OtherServerError unless the server has one of the ``expected`` system identifiers."""
    if system.system_id not in expected:
        raise OtherServerError(
            f"{OtherServerError.BEGINNING}{system.system_id}",
            hint="connect to the server that the data came from; nothing was made",
        )


def check_reaches(connection: Connection, taken_lsn: int, option: str) -> None:
    """Raise InitError if the server's WAL ends before ``taken_lsn``. On a primary the error is a RewoundServerError.

    ``taken_lsn`` is the position up to which the consumer has the changes. ``option`` gave it.

    An older copy of a server's disk has the same system identifier and timeline. Only the end of its WAL differs. A restarted
    standby replays WAL that it had replayed before, so waiting may help there.
    """
    in_recovery, wal_end = connection.execute(f"SELECT pg_is_in_recovery(), {_INSERT_END}")[0]
    if taken_lsn <= LSN.parse(wal_end or "0/0"):
        return
    where = f"its WAL ends at {wal_end}, before {format_lsn(taken_lsn)}, up to which the changes were taken ({option})"
    if in_recovery == "t":
        raise InitError(f"the standby has not replayed enough: {where}", hint="wait until it has, and start again")
    raise RewoundServerError(
        RewoundServerError.BEGINNING + where,
        hint="it was restored from an older copy, or the position is another server's. Its new changes have positions that were"
        " used before: to lose none, begin anew, with a new copy of the tables and without that position",
    )


def check_wal_level(connection: Connection) -> None:
    """Raise InitError unless a logical slot can be created on the server, as far as its ``wal_level`` tells."""
    problem = decoding_problem(connection)
    if problem is not None:
        message, hint = problem
        raise InitError(message, hint=hint)


def decoding_problem(connection: Connection) -> tuple[str, str] | None:
    """Return why no logical slot can be created on the server, and what to do; None if its ``wal_level`` allows one."""
    ((level, effective, in_recovery),) = connection.execute(
        "SELECT current_setting('wal_level'), current_setting('effective_wal_level', true), pg_is_in_recovery()"
    )
    if allows_decoding(level, effective, is_standby=in_recovery == "t"):
        return None
    if in_recovery == "t" and effective is not None:
        return (
            f"the primary of this standby does not write what logical decoding needs (effective_wal_level is {effective})",
            "on the primary, which needs a restart then: ALTER SYSTEM SET wal_level = logical",
        )
    hint = (
        "set wal_level = logical in postgresql.conf (ALTER SYSTEM SET wal_level = logical), or by the parameter of a"
        " managed service, and restart it"
    )
    return f"the server's wal_level is {level}: it does not write what logical decoding needs", hint


def allows_decoding(level: str | None, effective: str | None, *, is_standby: bool) -> bool:
    """Tell whether a logical slot can be created where ``wal_level`` and ``effective_wal_level`` are these.

    PostgreSQL 19 has the second one. With ``wal_level`` = replica, the first logical slot raises the level of a primary, and its
    standbys follow. https://www.postgresql.org/docs/19/runtime-config-wal.html

    Example:
        >>> allows_decoding("replica", None, is_standby=False), allows_decoding("replica", "replica", is_standby=False)
        (False, True)
    """
    if effective is None:
        return level == "logical"
    return effective == "logical" or (level == "replica" and not is_standby)


def existing_roles(connection: Connection, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of these roles that the server has, in alphabetical order."""
    listed = ", ".join(map(quote_literal, names))
    rows = connection.execute(f"SELECT rolname FROM pg_catalog.pg_roles WHERE rolname IN ({listed}) ORDER BY 1")
    return tuple(name or "" for (name,) in rows)


def is_standby(connection: Connection) -> bool:
    """Tell whether the server is a standby, that is, in recovery."""
    return connection.execute("SELECT pg_is_in_recovery()")[0][0] == "t"


def copies_slots(connection: Connection) -> bool:
    """Tell whether the server is a standby that copies its primary's slots (PostgreSQL 17 or newer)."""
    sql = "SELECT pg_catalog.pg_is_in_recovery() AND pg_catalog.current_setting('sync_replication_slots', true) = 'on'"
    return connection.execute(sql)[0][0] == "t"


def current_lsn(connection: Connection) -> LSN:
    """Return a position after all transactions committed so far. A stream reaches it without further writes."""
    ((text, is_standby, page_bytes, segment_bytes),) = connection.execute(
        f"SELECT {_INSERT_END}, pg_is_in_recovery(),"
        " current_setting('wal_block_size')::int8, pg_size_bytes(current_setting('wal_segment_size'))"
    )
    lsn = LSN.parse(text or "0/0")
    return lsn if is_standby == "t" else last_end(lsn, int(page_bytes or 0), int(segment_bytes or 0))


def current_time(connection: Connection) -> str:
    """Return the time up to which the server has transactions, as in ``2026-11-28T15:54:46.123456Z``.

    On a standby this is the commit time, on the primary's clock, of the last transaction that it has replayed. The standby's own
    clock would be later than the commits that it still has to replay.
    """
    now = "coalesce(CASE WHEN pg_is_in_recovery() THEN pg_last_xact_replay_timestamp() END, clock_timestamp())"
    sql = f"""SELECT to_char({now} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""
    return connection.execute(sql)[0][0] or ""


def last_end(insert_lsn: LSN, page_bytes: int, segment_bytes: int) -> LSN:
    """Return where the last record ends, if the next one is inserted at ``insert_lsn``.

    If a record ends with its page, the next one is inserted after the next page's header. No record ends there, so a stream would
    not reach that position. A record may end a few bytes after a header, too.
    """
    in_page = insert_lsn % page_bytes
    page = insert_lsn - in_page
    header_bytes = _PAGE_HEADER_BYTES if page % segment_bytes else _FIRST_PAGE_HEADER_BYTES
    return LSN(page) if in_page == header_bytes else insert_lsn
