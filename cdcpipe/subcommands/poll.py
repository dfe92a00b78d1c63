"""Poll mode: waits until a slot is free, without streaming.

The duration limits the wait for the slot. If the server is slow, the last look may exceed the duration by at most `LOOK_S`.

Looking at a slot does not reserve it: two pollers may both see it free. The one that starts its stream second gets SLOT_IN_USE.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from cdcpipe.config import PollConfig, StreamConfig
from cdcpipe.errors import SlotDoesNotExistError, SlotInUseError
from cdcpipe.libpq.connection import ANSWER_TIMEOUT_S, Connection
from cdcpipe.libpq.waiting import NO_LIMIT
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.replication.server import copies_slots
from cdcpipe.replication.session import connected, initialising
from cdcpipe.replication.slots import Slot, check_usable, find_slot, missing_slot_error, slot_in_use_message, what_frees
from cdcpipe.subcommands.creation import asked_publications, check_new_slot, find_or_create_slot

__all__ = ["LOOK_S", "poll_until_free", "wait_for_copy", "wait_until_free"]

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""The server has at least this long to answer, however little of the duration is left."""

_REMAKE_S = 30.0
"""A standby that makes its copy of a slot anew has dropped it for a moment."""

_FIRST_COPY_S = 60.0
"""A standby makes its first copy of a slot within this time: it looks for slots every 30 s or more often."""


def wait_until_free(
    connection: Connection,
    name: str,
    config: PollConfig,
    *,
    started_at: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Slot:
    """Return the slot once a stream from it can start. ``sleep`` makes the pauses between two looks, and may raise.

    The duration is counted from ``started_at``, by ``clock``; by default from now.

    Raises SlotInUseError at the end of the duration. Raises at once SlotDoesNotExistError, and InitError for a slot from which
    this connection can never stream: a loop of a poller and a streamer would never end. But a standby drops its copy of a slot, and
    makes it anew, if the copy is lost and the primary's slot is not.
    """
    started_at = clock() if started_at is None else started_at
    said, copy_seen_at = None, None
    while True:
        remaining_s = NO_LIMIT if config.duration_s is None else config.duration_s - (clock() - started_at)
        slot = find_slot(connection, name, timeout_s=min(max(remaining_s, LOOK_S), ANSWER_TIMEOUT_S))
        if slot is None:
            if remaining_s <= 0 or copy_seen_at is None or clock() - copy_seen_at >= _REMAKE_S:
                raise missing_slot_error(name)
            sleep(min(config.interval_s, remaining_s))
            continue
        copy_seen_at = clock() if slot.is_copy else None
        check_usable(connection, slot)
        if slot.is_free:
            log.info("replication slot %r is free", name)
            return slot
        state = slot_in_use_message(slot)
        if state != said:
            is_in_danger = slot.is_passing_copy or slot.is_lost_copy
            log.log(logging.WARNING if is_in_danger else logging.INFO, "%s; waiting", state)
            said = state
        waited_s = clock() - started_at
        if config.duration_s is not None and waited_s >= config.duration_s:
            raise SlotInUseError(f"{state}; waited {waited_s:.1f} s", hint=f"wait longer (-u), or {what_frees(slot)}")
        remaining_s = config.interval_s if config.duration_s is None else config.duration_s - waited_s
        sleep(max(0.0, min(config.interval_s, remaining_s)))


def wait_for_copy(
    connection: Connection,
    name: str,
    config: PollConfig,
    *,
    started_at: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until a standby has a copy of its primary's slot, or is promoted. The rest is as for `wait_until_free`.

    Raises SlotDoesNotExistError if no copy comes within `_FIRST_COPY_S`. A shorter duration raises SlotInUseError, because the
    copy may still come; a duration of 0 asks only whether the slot is there.
    """
    started_at = clock() if started_at is None else started_at
    limit_s = _FIRST_COPY_S if config.duration_s is None else min(config.duration_s, _FIRST_COPY_S)
    may_still_come = 0 < limit_s < _FIRST_COPY_S
    log.info("this standby copies its primary's slots, and has no copy of replication slot %r yet; waiting", name)
    while copies_slots(connection) and find_slot(connection, name) is None:
        remaining_s = started_at + limit_s - clock()
        if remaining_s <= 0:
            missing = f"replication slot {name!r} does not exist on this standby, which copies its primary's slots"
            if may_still_come:
                hint = f"wait longer (-u): the first copy may take {_FIRST_COPY_S:g} s; or make the slot on the primary"
                raise SlotInUseError(f"{missing}; waited {clock() - started_at:.1f} s", hint=hint)
            raise SlotDoesNotExistError(
                missing,
                hint="make the slot on the primary (-c --failover yes), and see with cdcpipe doctor whether the standby can copy"
                " it; or make a slot for this standby alone, with a name that no slot of the primary has: -c --failover no",
            )
        sleep(min(config.interval_s, remaining_s))


def poll_until_free(config: StreamConfig, poll: PollConfig) -> ExitCode:
    """Run poll mode. It uses no walsender, and needs no special role unless it creates a slot.

    If it creates a slot, the stream of ``config`` has to be able to start from it. The duration then also limits the wait for
    running transactions: the shorter of the rest of the duration and the configuration's limit counts.
    """
    slot = config.slot
    within_s = NO_LIMIT if poll.duration_s is None else max(poll.duration_s, LOOK_S)
    with connected(slot.parameters, within_s=within_s) as connection, initialising():
        started_at = time.monotonic()
        await_copy = partial(wait_for_copy, connection, slot.slot, poll, started_at=started_at)
        if slot.create:
            publications = asked_publications(config)
            find_or_create_slot(
                connection,
                slot,
                publications,
                check=lambda _: check_new_slot(config, publications),
                await_copy=await_copy,
                deadline=None if poll.duration_s is None else started_at + poll.duration_s,
            )
        elif find_slot(connection, slot.slot) is None and copies_slots(connection):
            await_copy()
        wait_until_free(connection, slot.slot, poll, started_at=started_at)
    return ExitCode.SUCCESS
