"""The ladder: how far each stage is, from the server's WAL down to the replicas and histories, in bytes and seconds. No pyspark.

    server      the end of the server's WAL
    sent        what the walsender has sent to the streamer
    confirmed   the slot's confirmed_flush_lsn: the server need not keep earlier changes
    sealed      the end of the staging log, which is durable
    changelog   what all changelogs have
    replica     what all replicas have; a replica that does not exist yet counts as being before its table's first change
    history     what all stored histories have, likewise; this stage is missing without --history table

A stage stands still while there are no changes for it, even if the WAL grows with other traffic. So a stage that has everything
that the stage above it has counts as being at the same position: an idle pipeline is not behind.

``behind_bytes`` is the WAL between a stage and the top of the ladder. ``behind_seconds`` is the age of the oldest transaction in
the staging log that the stage lacks. If the staging log lacks it, too, its age is not known. Then ``behind_seconds`` is the time
since the newest transaction in the log, or since the log was known to be complete, whichever is shorter; ``at_most`` says that this
is an upper bound. For a stage that is not behind it is 0.

The second time may be too short for a launcher whose owner does not watch the server (`Account.time`). ``behind_bytes`` is right
all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdcpipe.lsn import format_lsn
from spark_sink.staging.commit_times import CommitTimes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spark_sink.client.slot_monitor import SlotReport
    from spark_sink.staging.account import Account
    from spark_sink.staging.log import Position

__all__ = ["Rung", "build"]


@dataclass(frozen=True, slots=True)
class Rung:
    """One stage. All fields are None while its position is not known. ``commit_time`` is in seconds since 1970."""

    name: str
    position: str | None
    commit_time: float | None = None
    """The commit time of the newest transaction in the staging log that the stage has."""
    behind_bytes: int | None = None
    behind_seconds: float | None = None
    at_most: bool = False


def build(
    report: SlotReport | None,
    sealed: Position | None,
    tables: Iterable[tuple[str, Position | None]],
    times: CommitTimes,
    now: float,
    known: Account,
) -> list[Rung]:
    """Return the rungs from the top down. ``tables`` are the lowest rungs. Without a ``report`` the top is the staging log.

    ``known`` is what the account says of this log (`Account.of_log`).
    """
    rungs: list[Rung] = []
    received_lsn, top = 0, sealed.lsn if sealed is not None else 0
    if report is not None:
        # An idle slot confirms the end of the server's WAL, so what is known of the log beyond its end counts as received. What the
        # slot says does not count: another program may have moved it.
        received_lsn, top = known.lsn, report.wal_lsn
        for name, lsn in (("server", report.wal_lsn), ("sent", report.sent_lsn), ("confirmed", report.confirmed_flush_lsn)):
            rungs.append(Rung(name, None) if lsn is None else _rung(name, format_lsn(lsn), lsn, lsn, top, times, now, known))
    if sealed is None:
        return rungs
    above, counted = sealed.lsn, max(sealed.lsn, received_lsn)
    rungs.append(_rung("sealed", str(sealed), sealed.lsn, counted, top, times, now, known))
    for name, position in tables:
        if position is None:
            rungs.append(Rung(name, None))
            continue
        counted = counted if position.lsn >= above else position.lsn
        above = position.lsn
        rungs.append(_rung(name, str(position), position.lsn, counted, top, times, now, known))
    return rungs


def _rung(name: str, text: str, lsn: int, counted: int, top: int, times: CommitTimes, now: float, known: Account) -> Rung:
    commit_time = times.newest(lsn)
    if counted >= top:
        return Rung(name, text, commit_time, 0, 0.0)
    missing = times.oldest_after(lsn)
    since = commit_time if missing is None else missing
    if missing is None and known.time and counted >= known.lsn:
        since = max(since or 0.0, known.time)
    seconds = None if since is None else max(0.0, now - since)
    return Rung(name, text, commit_time, top - counted, seconds, at_most=missing is None and since is not None)
