"""What ``verify`` asks the server while it waits for the log."""

import math
from pathlib import Path
from typing import Any

import pytest

from spark_sink.verify import visibility
from spark_sink.verify.visibility import VerifyError, wait_for_log
from spark_sink.warehouse.warehouse import Source

SOURCE = Source("7123", "shop", "s", ("p",), None, None, None)


class Server:
    """A `ChecksumServer` whose slot nobody uses, and which is at the end of the log after some looks."""

    def __init__(self, looks: int, *, is_pending: bool = True) -> None:
        self.left = looks
        self.is_pending = is_pending
        self.asked: list[str] = []

    def ask(self, request: dict[str, Any]) -> Any:
        self.asked.append(next(iter(request)))
        if "pending" in request:
            return self.is_pending
        self.left -= 1
        return {"active": False, "confirmed_flush_lsn": "0/50" if self.left > 0 else "0/64"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility, "POLL_S", 0.0)


def wait(server: Any, staging: Path, *, until_taken: bool = False) -> None:
    wait_for_log(server, SOURCE, staging, 100, math.inf, lambda *_: None, until_taken=until_taken)


def test_a_launcher_that_is_about_to_take_the_slot_is_not_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """During a look for changes, the server itself uses the slot."""
    monkeypatch.setattr(visibility, "lock_owner", lambda _: {"pid": 1})
    server = Server(20)
    wait(server, tmp_path)
    assert (server.asked.count("slot"), server.asked.count("pending")) == (20, 1)
    server = Server(20)
    wait(server, tmp_path, until_taken=True)
    assert server.asked == ["slot"]


def test_a_launcher_that_has_nothing_to_take_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility, "lock_owner", lambda _: {"pid": 1})
    server = Server(20, is_pending=False)
    wait(server, tmp_path)
    assert server.asked == ["slot", "pending"]


def test_a_run_that_has_ended_its_stream_takes_no_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run --available-now` may merge for hours. `verify` waited for its --timeout meanwhile, with all tables locked."""
    monkeypatch.setattr(visibility, "lock_owner", lambda _: {"pid": 1, "host": "h", "since": "then", "lands": False})
    monkeypatch.setattr(visibility, "_ABSENCE_S", 0.0)
    for until_taken in (True, False):
        said = r"no process takes them: run \(process 1 on h since then\) only brings the tables up to date$"
        with pytest.raises(VerifyError, match=said) as raised:
            wait(Server(20), tmp_path, until_taken=until_taken)
        assert raised.value.hint == "wait until it has ended, and start run again"
    wait(Server(20, is_pending=False), tmp_path)


def test_a_long_look_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that is started after it has to find the slot free."""
    monkeypatch.setattr(visibility, "_ABSENCE_S", 0.0)
    server = Server(20)
    with pytest.raises(VerifyError, match="may have changes that the tables lack, and no process takes them"):
        wait(server, tmp_path)
    assert server.asked == ["slot", "pending", "slot"]
