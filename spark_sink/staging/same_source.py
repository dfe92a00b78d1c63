"""Compares a log, or the tables that it fed, with a server and a slot: can they go on together, and is it their server? No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cdcpipe.sql import quote_identifier
from spark_sink.staging.log import OtherSourceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from spark_sink.staging.log import Epoch

__all__ = [
    "OTHER_HINT",
    "Server",
    "check_source",
    "check_timeline",
    "common_history_lsn",
    "is_elsewhere",
    "parted_lsn",
    "upgrade_hint",
]

OTHER_HINT = "give each slot its own --staging directory and its own warehouse, or connect to the server and slot of this directory"


class Server(Protocol):
    """What a server has told of itself, such as `spark_sink.client.prepare.Prepared`."""

    @property
    def system_id(self) -> str:
        """What its cluster has got when it was made."""
        ...

    @property
    def timeline(self) -> int:
        """The timeline that it writes or, a standby, follows."""
        ...

    @property
    def timeline_history(self) -> Sequence[tuple[int, int]]:
        """Its earlier timelines, in order: each with the LSN at which it was left."""
        ...

    @property
    def timeline_began_at(self) -> Mapping[int, int]:
        """Where each of its timelines branched off the one before."""
        ...


def check_source(
    root: Path, epoch: Epoch, system_id: str, timeline: int, database: str, slot: str, *, is_accepted: bool = False
) -> None:
    """Raise OtherSourceError unless the log, whose last epoch is ``epoch``, can go on with this server and slot.

    ``is_accepted``: the user has accepted another system id. Its timelines are not those of the log: pg_upgrade begins at 1.
    """
    if epoch.system_id != system_id and not is_accepted:
        msg = f"{root} has the log of the server with system id {epoch.system_id}; this server has system id {system_id}"
        raise OtherSourceError(msg, hint=f"{OTHER_HINT}; {upgrade_hint(system_id)}")
    if epoch.system_id == system_id:
        check_timeline(f"{root} has", epoch.timeline, timeline)
    if epoch.database != database or epoch.slot != slot:
        msg = f"{root} has the log of slot {epoch.slot!r} in database {epoch.database!r}, not of {slot!r} in {database!r}"
        renamed = f". If the database was renamed, name it back: ALTER DATABASE … RENAME TO {quote_identifier(epoch.database)}"
        raise OtherSourceError(msg, hint=OTHER_HINT + ("" if epoch.database == database else renamed))


def upgrade_hint(system_id: str, *, is_log_lost: bool = False) -> str:
    """Say how to go on with the same server after pg_upgrade, which gives it another system id."""
    if is_log_lost:  # nobody knows which changes the log had: always a gap, also with a slot that was taken along
        return f"after a pg_upgrade: --accept-system-id {system_id} --on-gap resnapshot, because the log is not there"
    again = f"after a pg_upgrade that took the slot along: --accept-system-id {system_id}"
    otherwise = "if the slot was made after the upgrade, or the log is a copy from before it"
    return f"{again}; {otherwise}, drop the slot, and add -c --on-gap resnapshot"


def check_timeline(it_has: str, known: int, timeline: int) -> None:
    """Raise OtherSourceError if the server, on ``timeline``, is behind that of the log or the tables, ``known``.

    ``it_has`` names these in the message.
    """
    if known > timeline:
        msg = (
            f"the server is on timeline {timeline}, but {it_has} changes of timeline {known}: this server is an old primary,"
            " or a standby that does not follow the new one yet"
        )
        hint = (
            "connect to the server that was promoted, or wait until this one follows it. If that server is gone, and this one was"
            f" restored from before that promotion: promote this one until its timeline is above {known} (restart it with"
            " standby.signal, then SELECT pg_promote()), and start run or land once with -c --on-gap resnapshot"
        )
        raise OtherSourceError(msg, hint=hint)


def parted_lsn(timeline: int, began_lsn: int, server: Server) -> int | None:
    """Return where two timelines with this number parted: the log's, which began at ``began_lsn`` (0 if unknown), and the server's.

    None if they are one. A promoted server takes the next number that it knows to be free. So two standbys of one primary can take
    the same number.
    """
    theirs = server.timeline_began_at.get(timeline, 0)
    return min(theirs, began_lsn) if theirs and began_lsn and theirs != began_lsn else None


def is_elsewhere(epoch: Epoch, server: Server) -> bool:
    """Tell whether the server is another one than that of ``epoch``, or on another timeline. Positions mean other changes there."""
    is_same = (server.system_id, server.timeline) == (epoch.system_id, epoch.timeline)
    return not is_same or parted_lsn(epoch.timeline, epoch.timeline_began_lsn, server) is not None


def common_history_lsn(epochs: Sequence[Epoch], server: Server) -> int:
    """Return the LSN up to which the log and the server's timeline, a later one than the log's, have the same history.

    The history of the server's timeline names its ancestors, each with the LSN at which it was left. The log's epochs name the
    timelines that it followed. It left one at the latest where the first epoch on the next one starts. What came before the last
    gap does not count, because the tables were copied since. Timelines from before pg_upgrade are another server's.
    """
    left_at = dict(server.timeline_history)
    breaks = [number for number, epoch in enumerate(epochs) if epoch.is_break]
    epochs = epochs[breaks[-1] :] if breaks else epochs
    common = 0
    for number, epoch in enumerate(epochs):
        end = left_at.get(epoch.timeline)
        if end is None:
            return common
        following = epochs[number + 1] if number + 1 < len(epochs) else None
        parted = parted_lsn(epoch.timeline, epoch.timeline_began_lsn, server)
        if parted is not None and (following is None or parted < following.start_lsn):
            return parted
        if following is not None and following.timeline != epoch.timeline and end < following.start_lsn:
            return end
        common = end if following is None else following.start_lsn
    return common
