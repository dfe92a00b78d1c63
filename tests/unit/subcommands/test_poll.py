"""What poll mode says of a slot for which it waits."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cdcpipe.config import PollConfig
from cdcpipe.errors import LostSlotError, SlotDoesNotExistError, SlotInUseError
from cdcpipe.replication.slots import Slot, check_free
from cdcpipe.subcommands import poll
from spark_sink.client.failure import Failure
from support.slots import SLOT

COPY = replace(SLOT, active_pid=7, temporary=True, failover=True, synced=True, in_recovery=True)


@pytest.mark.parametrize(
    ("slot", "is_warned", "hint"),
    [
        (COPY, True, "let the slot's consumer at the primary go on"),
        (replace(COPY, temporary=False), False, "promote this standby"),
        (replace(COPY, temporary=False, wal_status="lost"), True, "look at the slot on the primary"),
        (replace(COPY, temporary=False, synced=False), False, "stop that consumer"),
        (replace(SLOT, synced=None, in_recovery=True, decodes=False), False, "promote this standby"),
        (replace(SLOT, active_pid=7, confirmed_flush_lsn=None), False, "(-u), or let the running transactions end"),
        (replace(SLOT, active_pid=7, confirmed_flush_lsn=None, in_recovery=True), False, "on the primary, and let the running"),
    ],
)
def test_a_copy_that_a_promotion_would_lose_is_a_warning(
    slot: Slot, is_warned: bool, hint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(poll, "find_slot", lambda *_, **__: slot)
    with pytest.raises(SlotInUseError) as caught, caplog.at_level(logging.INFO):
        poll.wait_until_free(cast("Any", SimpleNamespace(database="shop")), "shop", PollConfig(0.0, 1.0))
    assert hint in str(caught.value.hint)
    (record,) = caplog.records
    assert (record.levelno == logging.WARNING) == is_warned == ("a promotion now would lose the slot" in caught.value.message)


def test_a_slot_in_creation_has_no_consumer() -> None:
    """The process that makes it uses it, too. Whoever stopped it would stop the creation."""
    with pytest.raises(SlotInUseError) as caught:
        check_free(replace(SLOT, active_pid=7, confirmed_flush_lsn=None))
    assert caught.value.message == "replication slot 'shop' is still being created, by server process 7"
    hint = "let the running transactions end, for which its creation waits"
    assert caught.value.hint == f"{hint}, or wait for it: --poll-mode, --standby"
    assert Failure(9, caught.value.message, caught.value.hint).hint == hint


def test_a_slot_in_use_has_a_consumer() -> None:
    with pytest.raises(SlotInUseError) as caught:
        check_free(replace(SLOT, active_pid=7))
    assert caught.value.hint == "stop that consumer, or wait for it: --poll-mode, --standby"


LOST = replace(COPY, temporary=False, wal_status="lost", invalidation_reason="wal_removed")
PROMOTED = replace(SLOT, synced=True, failover=True)


class Time:
    """A clock that a sleep moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, pause_s: float) -> None:
        self.now += pause_s


def wait(monkeypatch: pytest.MonkeyPatch, looks: list[Slot | None], duration_s: float | None = None) -> Slot:
    """Wait for a slot that is as ``looks`` says, and then stays as in the last one."""
    time = Time()
    monkeypatch.setattr(poll, "find_slot", lambda *_, **__: looks.pop(0) if len(looks) > 1 else looks[0])
    connection = cast("Any", SimpleNamespace(database="shop"))
    return poll.wait_until_free(connection, "shop", PollConfig(duration_s, 1.0), clock=time.clock, sleep=time.sleep)


def test_a_copy_that_is_lost_here_is_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The standby drops it and makes it anew, because the primary's slot is well."""
    remade = replace(COPY, active_pid=None, temporary=False)
    assert wait(monkeypatch, [remade, LOST, LOST, None, COPY, remade, PROMOTED]) == PROMOTED
    [warning] = [record.getMessage() for record in caplog.records if "the copy is lost" in record.getMessage()]
    assert "the server has removed WAL that it needed" in warning
    assert "the standby makes it anew" in warning


def test_a_copy_that_is_lost_at_the_promotion_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LostSlotError):
        wait(monkeypatch, [LOST, replace(LOST, in_recovery=False)])


@pytest.mark.parametrize("duration_s", [None, 5.0])
def test_a_copy_that_is_not_made_anew_ends_the_wait(monkeypatch: pytest.MonkeyPatch, duration_s: float | None) -> None:
    """The slot was dropped on the primary, or a promotion has removed the copy."""
    with pytest.raises(SlotDoesNotExistError):
        wait(monkeypatch, [LOST, None], duration_s)


@pytest.mark.parametrize("looks", [[None], [replace(SLOT, active_pid=7), None, SLOT]])
def test_a_slot_that_is_no_copy_is_missing_at_once(monkeypatch: pytest.MonkeyPatch, looks: list[Slot | None]) -> None:
    with pytest.raises(SlotDoesNotExistError):
        wait(monkeypatch, looks)


def test_the_wait_before_is_a_part_of_the_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poll, "find_slot", lambda *_, **__: replace(SLOT, active_pid=7))
    connection = cast("Any", SimpleNamespace(database="shop"))
    with pytest.raises(SlotInUseError, match=r"waited 60\.0 s"):
        poll.wait_until_free(connection, "shop", PollConfig(50.0, 1.0), started_at=10.0, clock=lambda: 70.0)
