"""What a standby does with a slot that became another one while it waited."""

import os
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cdcpipe.config import PollConfig, SlotConfig, StreamConfig, StreamOptions
from cdcpipe.errors import ConnectionClosedError, InitError, OutputError, SlotInUseError
from cdcpipe.lsn import LSN
from cdcpipe.replication.slots import Slot
from cdcpipe.streaming.consumer import CommandsIn
from cdcpipe.subcommands import stream
from support.slots import SLOT

TWO_PHASE = replace(SLOT, two_phase=True)
OTHER_PLUGIN = replace(SLOT, plugin="test_decoding")


class Server:
    """The slot as it is at each look, and the start of the stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: Slot) -> None:
        self.looks = list(looks)
        self.started: list[tuple[int, Mapping[str, str | None]]] = []
        self.failures: list[Exception] = []
        """How the first starts of the stream fail."""
        self.reopened = 0
        system: Any = SimpleNamespace()
        monkeypatch.setattr(stream, "find_or_create_slot", lambda *_, **__: self.looks.pop(0))
        monkeypatch.setattr(stream, "wait_until_free", lambda *_, **__: self.looks.pop(0))
        monkeypatch.setattr(stream, "check_published", lambda *_, **__: [])
        monkeypatch.setattr(stream, "_logged_server", lambda *_: (SimpleNamespace(), system))
        monkeypatch.setattr(stream, "start_stream", self._start_stream)

    def _start_stream(self, _: Any, __: str, lsn: int, options: Mapping[str, str | None], *, may_be_direct: bool) -> None:
        del may_be_direct
        if self.failures:
            raise self.failures.pop(0)
        self.started.append((lsn, options))

    def reopen(self) -> None:
        self.reopened += 1

    def start(self, **changes: Any) -> Any:
        config = StreamConfig(SlotConfig({}, "shop", publications=("p",)), standby=PollConfig(), **changes)
        catalog: Any = SimpleNamespace(connection=SimpleNamespace(server_version=180000))
        nothing: Any = nullcontext()
        opening: Any = self
        return stream._prepare_until_started(config, catalog, opening, nothing, ["p"])


def test_a_slot_that_became_two_phase_is_refused_as_at_an_ordinary_start(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, SLOT, TWO_PHASE, TWO_PHASE)
    with pytest.raises(InitError, match="sends prepared transactions when they are prepared, which was not asked for"):
        server.start()
    assert server.started == []


def test_a_slot_that_became_two_phase_gives_whole_transactions_as_at_an_ordinary_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a stream begins at the slot's position, because a prepared transaction may lie before ``start_lsn``."""
    server = Server(monkeypatch, SLOT, TWO_PHASE, TWO_PHASE, TWO_PHASE)
    started = server.start(whole_transactions=True, start_lsn=7)
    assert started.slot.two_phase
    assert [lsn for lsn, _ in server.started] == [0]


def test_a_slot_with_another_plugin_gets_that_plugins_options(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, SLOT, OTHER_PLUGIN, OTHER_PLUGIN, OTHER_PLUGIN)
    monkeypatch.setattr(stream, "check_plugin", lambda *_: None)
    assert server.start().slot.plugin == "test_decoding"
    assert [options for _, options in server.started] == [{}]


def test_a_slot_that_did_not_change_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, replace(SLOT, active_pid=7), replace(SLOT, confirmed_flush_lsn=LSN(9)))
    server.start()
    assert [lsn for lsn, _ in server.started] == [0]


def test_a_connection_that_was_lost_during_the_wait_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walsender is idle until the slot is free. The takeover failed, and by hand nobody was left."""
    server = Server(monkeypatch, *[SLOT] * 4)
    # Another process takes the slot meanwhile, and the next wait loses the connection, too.
    server.failures = [ConnectionClosedError("lost"), SlotInUseError("taken"), ConnectionClosedError("lost")]
    server.start()
    assert (server.reopened, len(server.started)) == (2, 1)


def test_a_new_connection_that_is_lost_as_well_ends_the_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, SLOT, SLOT)
    server.failures = [ConnectionClosedError("lost")] * 2
    with pytest.raises(ConnectionClosedError):
        server.start()
    assert server.reopened == 1


def test_the_duration_limits_all_waits_of_a_standby_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait counted from its own beginning, so --standby -u 60 could end after two minutes or more."""
    begins: list[float | None] = []

    def wait(*_: Any, started_at: float | None = None, **__: Any) -> Slot:
        begins.append(started_at)
        return TWO_PHASE

    def find(*_: Any, await_copy: Callable[[], None], **__: Any) -> Slot:
        await_copy()
        return SLOT if len(begins) == 1 else TWO_PHASE

    server = Server(monkeypatch)
    for name, replacement in (("wait_for_copy", wait), ("wait_until_free", wait), ("find_or_create_slot", find)):
        monkeypatch.setattr(stream, name, replacement)
    monkeypatch.setattr(stream, "_checked_server", lambda *_: None)
    monkeypatch.setattr(stream, "is_standby", lambda _: True)
    server.start(whole_transactions=True)
    assert len(begins) == 4
    assert len(set(begins)) == 1
    assert begins[0] is not None


@pytest.mark.parametrize("is_stdin_open", [True, False])
def test_a_standby_whose_consumer_has_ended_ends(is_stdin_open: bool) -> None:
    """It waited for months, took the slot over from its active half, and ended only then."""
    (command_fd, feeder), (reader, out_fd) = os.pipe(), os.pipe()
    options = StreamOptions(command_fd=command_fd, out_fd=out_fd, needs_commands=False)
    with closing(CommandsIn(command_fd)) as commands:
        if not is_stdin_open:
            os.close(feeder)
        stream._serve_consumer(commands, options, 0.01)
        os.close(reader)
        with pytest.raises(OutputError, match="the reader has closed the pipe"):
            stream._serve_consumer(commands, options, 0.01)
    for fd in [command_fd, out_fd, *([feeder] if is_stdin_open else [])]:
        os.close(fd)


@pytest.mark.parametrize(
    ("slot", "version", "is_warned"),
    [
        (replace(SLOT, failover=True), 170010, True),
        (replace(SLOT, failover=True), 180000, False),
        (replace(SLOT, failover=True, is_new=True), 170010, False),
        (replace(SLOT, failover=True, two_phase=True), 170010, False),
        (SLOT, 170010, False),
    ],
)
def test_a_slot_that_standbys_of_17_copy_is_switched_to_two_phase_with_a_warning(
    slot: Slot, version: int, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy does not know since when. After a promotion, what was prepared before that came without its rows, without a word."""
    stream._check_two_phase(StreamConfig(SlotConfig({}, "shop")), slot, {"two_phase": "on"}, version)
    assert ("transactions before a failover" in caplog.text) == is_warned
