"""Whether a missing slot is made: not on a standby that copies the slots of its primary. A new slot is named at an early end."""

import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cdcpipe.config import PollConfig, SlotConfig, StreamConfig
from cdcpipe.errors import InitError, SlotDoesNotExistError, SlotInUseError
from cdcpipe.replication.slot_creation import NewSlot
from cdcpipe.replication.slots import Slot
from cdcpipe.subcommands import creation, poll
from cdcpipe.subcommands.creation import find_or_create_slot, telling_of_new_slot
from cli.interrupt import Interrupted
from spark_sink.client.failure import Failure
from support.slots import SLOT

COPY = replace(SLOT, failover=True, synced=True, in_recovery=True)


class Server:
    """A server of which each look for the slot finds the next of ``looks``, then None."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: Slot | None, copies: bool = True) -> None:
        self.copies, self.looks, self.made, self.pauses = copies, list(looks), 0, 0.0
        for module in (creation, poll):
            monkeypatch.setattr(module, "find_slot", lambda *_, **__: self.looks.pop(0) if self.looks else None)
            monkeypatch.setattr(module, "copies_slots", lambda _: self.copies)
        monkeypatch.setattr(creation, "create_slot", self._create)
        monkeypatch.setattr(creation, "check_wal_level", lambda _: None)
        monkeypatch.setattr(creation, "check_creatable", lambda *_: None)
        monkeypatch.setattr(creation, "is_standby", lambda _: self.copies)
        monkeypatch.setattr(creation, "_create_publications", lambda *_: None)

    def _create(self, *_: Any) -> bool:
        self.made += 1
        self.looks.append(SLOT)
        return True

    def find(self, await_copy: Callable[[], None] | None = None, *, create: bool = True, **changes: Any) -> Slot:
        config = SlotConfig({}, "shop", create=create, **changes)
        connection: Any = SimpleNamespace(server_version=160000, database="shop")
        return find_or_create_slot(connection, config, [], await_copy=await_copy)

    def wait(self, duration_s: float | None = None) -> None:
        def sleep(pause_s: float) -> None:
            self.pauses += pause_s

        poll.wait_for_copy(SimpleNamespace(), "shop", PollConfig(duration_s), clock=lambda: self.pauses, sleep=sleep)


def test_a_standby_that_copies_slots_gets_none_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with the name of the primary's slot would stop the copying of all slots."""
    server = Server(monkeypatch)
    with pytest.raises(InitError, match="would stop the copying of all slots") as caught:
        server.find()
    assert server.made == 0
    hint = caught.value.hint or ""
    assert "cdcpipe --poll-mode, cdcpipe --standby" in hint  # `cdcpipe prepare` has no such options
    assert "or start again after the promotion; or make" in (Failure(2, caught.value.message, hint).hint or "")


def test_a_slot_that_is_to_have_no_copy_is_made_there(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    server.find(failover=False)
    assert server.made == 1


def test_other_servers_get_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, copies=False)
    server.find()
    assert server.made == 1


@pytest.mark.parametrize("create", [True, False])
def test_who_waits_for_the_slot_waits_for_the_first_copy(create: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A former primary that has just joined again as a standby has no copies for a moment."""
    server = Server(monkeypatch, None, None, None, COPY, COPY)
    assert server.find(server.wait, create=create) == COPY
    assert (server.made, server.pauses) == (0, 2.0)


@pytest.mark.parametrize("create", [True, False])
def test_poll_mode_waits_for_the_first_copy(create: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    monkeypatch.setattr(poll, "connected", lambda *_, **__: nullcontext(SimpleNamespace(server_version=170000, database="shop")))
    monkeypatch.setattr(poll, "wait_for_copy", lambda *_, **__: server.looks.extend([COPY, replace(SLOT, is_new=False)]))
    assert poll.poll_until_free(StreamConfig(SlotConfig({}, "shop", create=create)), PollConfig()) == 0
    assert server.made == 0


def test_a_missing_slot_without_a_wait_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    with pytest.raises(SlotDoesNotExistError):
        server.find(create=False)


def test_a_server_that_is_promoted_meanwhile_gets_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)

    def promote() -> None:
        server.copies = False

    server.find(promote)
    assert server.made == 1


@pytest.mark.parametrize(("duration_s", "waited_s"), [(None, 60.0), (90.0, 60.0), (60.0, 60.0), (0.0, 0.0)])
def test_a_copy_that_does_not_come_is_a_missing_slot(
    monkeypatch: pytest.MonkeyPatch, duration_s: float | None, waited_s: float
) -> None:
    """A poller with -u 60 ends for a slot that nobody has. With -u 0 it only looks."""
    server = Server(monkeypatch)
    with pytest.raises(SlotDoesNotExistError, match="which copies its primary's slots"):
        server.find(lambda: server.wait(duration_s))
    assert (server.made, server.pauses) == (0, waited_s)


def test_a_wait_that_ends_before_a_copy_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits with -u gets 9, and may try again: the standby looks for slots every 30 s."""
    server = Server(monkeypatch)
    with pytest.raises(SlotInUseError, match=r"which copies its primary's slots; waited 5\.5 s"):
        server.find(lambda: server.wait(5.5))
    assert (server.made, server.pauses) == (0, 5.5)


@pytest.mark.parametrize(
    ("duration_s", "create_timeout_s", "limit_s"),
    [(60.0, 5.0, 5.0), (5.0, 60.0, 5.0), (0.0, 60.0, 0.1), (5.0, None, 5.0), (None, 60.0, 60.0), (None, None, None)],
)
@pytest.mark.parametrize("waited_s", [0.0, 3.0])
def test_a_slot_is_made_within_the_shorter_of_both_limits(
    duration_s: float | None,
    create_timeout_s: float | None,
    limit_s: float | None,
    waited_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """-u does not lengthen what --create-timeout allows, and the wait for a copy is a part of it."""
    server, made, told = Server(monkeypatch), [], []
    now = 1000.0

    def promote(*_: Any, started_at: float, **__: Any) -> None:
        nonlocal now
        assert started_at == 1000.0
        now += waited_s
        server.copies = False

    def create(_: object, new: NewSlot) -> bool:
        made.append(new.timeout_s)
        return server._create()

    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(poll, "time", clock)
    monkeypatch.setattr(creation, "time", clock)
    monkeypatch.setattr(creation, "create_slot", create)
    monkeypatch.setattr(poll, "connected", lambda *_, **__: nullcontext(SimpleNamespace(server_version=160000, database="shop")))
    monkeypatch.setattr(poll, "wait_for_copy", promote)
    monkeypatch.setattr(poll, "wait_until_free", lambda *_, **more: told.append(more["started_at"]))
    slot = SlotConfig({}, "shop", create=True, publications=("shop",), create_timeout_s=create_timeout_s)
    poll.poll_until_free(StreamConfig(slot), PollConfig(duration_s))
    if duration_s is not None and limit_s is not None:
        limit_s = min(limit_s, max(duration_s - waited_s, 0.1))
    assert made == [limit_s]
    assert told == [1000.0]


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("end", [BrokenPipeError(), Interrupted(signal.SIGINT)], ids=["closed pipe", "signal"])
def test_an_end_without_a_message_names_a_new_slot(caplog: pytest.LogCaptureFixture, end: BaseException, is_new: bool) -> None:
    with pytest.raises(type(end)), telling_of_new_slot(replace(SLOT, is_new=is_new)):
        raise end
    assert ("SELECT pg_drop_replication_slot('shop')" in caplog.text) == is_new
