"""The walsender that is connected beside another connection is at the same server."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from cdcpipe.errors import ConnectionClosedError
from cdcpipe.libpq.hosts import Host
from cdcpipe.replication import opening
from cdcpipe.replication.opening import OpeningWalsender

A, B = Host("a", "10.0.0.1", "5432"), Host("b", "10.0.0.2", "5432")
BESIDE: Any = SimpleNamespace(host=A, parameters_here={"host": "a"})


class Made(SimpleNamespace):
    """A walsender's connection, and whether it was closed."""

    answer_timeout_s = 60.0
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def connecting(monkeypatch: pytest.MonkeyPatch, *found: Host | Exception) -> list[Made]:
    """Let the connections be made to these servers, one after the other; return them."""
    made: list[Made] = []

    def connect(parameters: Mapping[str, str], *_: object, **__: object) -> Made:
        host = found[len(made)]
        if isinstance(host, Exception):
            raise host
        made.append(Made(host=host, parameters=parameters))
        return made[-1]

    monkeypatch.setattr(opening, "connect_walsender", connect)
    monkeypatch.setattr(opening, "identify_system", lambda walsender: walsender.host)
    return made


def test_another_server_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made = connecting(monkeypatch, B, A)
    with OpeningWalsender({"host": "a,b"}) as found:
        assert found.wait(BESIDE) == (made[1], A)
        assert [(each.parameters["host"], each.is_closed) for each in made] == [("a,b", True), ("a", False)]
        assert found.wait(BESIDE) == (made[1], A)


def test_the_same_server_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = connecting(monkeypatch, A)
    with OpeningWalsender({"host": "a,b"}) as found:
        assert found.wait(BESIDE) == (made[0], A)


def test_a_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    connecting(monkeypatch, B, ConnectionClosedError("gone"))
    with OpeningWalsender({"host": "a,b"}) as found, pytest.raises(ConnectionClosedError, match="gone"):
        found.wait(BESIDE)
