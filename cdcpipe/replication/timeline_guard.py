"""Keeps a stream from a standby on one timeline: proves for received records that they belong to it, before they are passed on.

A stream from a standby goes on when that standby is promoted, and when it follows another standby that was promoted. From then on
its records belong to the new timeline, but nothing in the stream says so. The same LSN can mean other changes on each timeline.

A standby sends only what it has replayed. So if it is still on the timeline after a record was received, the record belongs to that
timeline. IDENTIFY_SYSTEM gives the timeline of the last replayed record (``GetStandbyFlushRecPtr`` in PostgreSQL's walsender.c). No
SQL function gives it. So the guard has a walsender's connection of its own, on which it does not stream.
"""

from __future__ import annotations

from collections.abc import Callable

from cdcpipe.errors import ConnectionClosedError, beside_the_stream
from cdcpipe.libpq.connection import Connection
from cdcpipe.replication.server import System, expect_system, identify_system
from cdcpipe.replication.session import connect_walsender

__all__ = ["TimelineGuard", "guard_timeline"]


class TimelineGuard:
    """Checks the timeline of the standby to which ``connection`` is connected. ``expected`` is ``SYSTEM_ID/TIMELINE``."""

    def __init__(self, connection: Connection, expected: str) -> None:
        self._expected = expected
        self._walsender = connect_walsender(connection.parameters_here)
        expect_system(identify_system(self._walsender), expected)

    @beside_the_stream()
    def check(self) -> None:
        """Raise ConnectionClosedError if the standby has left the timeline, or can't be asked."""
        system = identify_system(self._walsender)
        if f"{system.system_id}/{system.timeline}" != self._expected:
            raise ConnectionClosedError(
                f"the standby is on timeline {system.timeline} now: it was promoted, or follows a server that was promoted",
                hint="start again, with the new timeline for --expect; nothing is lost",
            )

    def serve_meanwhile(self, while_waiting: Callable[[], None], answer_timeout_s: float) -> None:
        """From now on, call ``while_waiting`` while a check waits for its answer, and limit this wait."""
        self._walsender.serve_meanwhile(while_waiting, answer_timeout_s)

    def close(self) -> None:
        """Close the connection."""
        self._walsender.close()


def guard_timeline(connection: Connection, system: System, expected: str) -> TimelineGuard | None:
    """Return the guard if the server is a standby, after the stream has begun. ``system`` is what it was before.

    A primary stays on its timeline, so it needs none. Raises InitError if it was promoted meanwhile.
    """
    [(timeline,)] = connection.execute(
        "SELECT CASE WHEN NOT pg_is_in_recovery() THEN substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8) END"
    )
    if timeline is None:
        return TimelineGuard(connection, expected)
    expect_system(System(system.system_id, int(timeline, 16)), expected)
    return None
