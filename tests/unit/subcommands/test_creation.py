"""Whether a missing slot is made: not on a standby that copies the slots of its primary."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cdcpipe.config import PollConfig, SlotConfig
from cdcpipe.errors import InitError, SlotDoesNotExistError
from cdcpipe.replication.slots import Slot
from cdcpipe.subcommands import creation, poll
from cdcpipe.subcommands.creation import find_or_create_slot
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

    def find(self, await_copy: Callable[[], None] | None = None, **changes: Any) -> Slot:
        config = SlotConfig({}, "shop", create=True, **changes)
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
    assert "--standby" in (caught.value.hint or "")
    assert "--standby" not in (Failure(2, caught.value.message, caught.value.hint).hint or "")


def test_a_slot_that_is_to_have_no_copy_is_made_there(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    server.find(failover=False)
    assert server.made == 1


def test_other_servers_get_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, copies=False)
    server.find()
    assert server.made == 1


def test_who_waits_for_the_slot_waits_for_the_first_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, None, None, None, COPY, COPY)
    assert server.find(server.wait) == COPY
    assert (server.made, server.pauses) == (0, 2.0)


def test_a_server_that_is_promoted_meanwhile_gets_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)

    def promote() -> None:
        server.copies = False

    server.find(promote)
    assert server.made == 1


@pytest.mark.parametrize(("duration_s", "waited_s"), [(None, 60.0), (90.0, 60.0), (5.5, 5.5), (0.0, 0.0)])
def test_a_copy_that_does_not_come_is_a_missing_slot(
    monkeypatch: pytest.MonkeyPatch, duration_s: float | None, waited_s: float
) -> None:
    server = Server(monkeypatch)
    with pytest.raises(SlotDoesNotExistError, match="which copies its primary's slots"):
        server.find(lambda: server.wait(duration_s))
    assert (server.made, server.pauses) == (0, waited_s)
