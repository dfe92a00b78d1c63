"""A connection that can't be made: whether a parameter is wrong for every server, and what the hint names."""

import pytest

from cdcpipe.errors import ConnectionParameterError, UnreachableError
from cdcpipe.replication.session import connect, initialising

NOBODY = {"host": "127.0.0.1", "port": "1", "dbname": "d", "user": "u"}

REFUSED = [
    ({"sslmode": "Mars"}, "correct sslmode, which -m or -d gives"),
    ({"port": "Mars"}, "correct -p, or port in -d or -m"),
    ({"port": "99999"}, "correct -p, or port in -d or -m"),
    ({"port": "1,2"}, "correct -h, or host in -d or -m"),
    ({"service": "Mars"}, "correct service, which -m or -d gives"),
    ({"connect_timeout": "Mars"}, "correct connect_timeout, which -m or -d gives"),
    ({"keepalives_idle": "Mars"}, "correct keepalives_idle, which -m or -d gives"),
    ({"target_session_attrs": "Mars"}, "correct target_session_attrs, which -m or -d gives"),
    ({"ssl_min_protocol_version": "Mars"}, "correct ssl_min_protocol_version, which -m or -d gives"),
]


@pytest.mark.parametrize(("wrong", "hint"), REFUSED)
def test_a_value_that_libpq_refuses_is_a_wrong_argument(wrong: dict[str, str], hint: str) -> None:
    """Nobody should try again, also where other wrong arguments are errors of the server."""
    with pytest.raises(ConnectionParameterError) as caught, initialising():
        connect(NOBODY | wrong)
    assert hint in (caught.value.hint or "")


def test_a_value_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGSSLMODE", "Mars")
    with pytest.raises(ConnectionParameterError, match="invalid sslmode value") as caught:
        connect(NOBODY)
    assert caught.value.hint == "correct the environment variable PGSSLMODE"


def test_a_server_that_does_not_listen_is_no_wrong_argument() -> None:
    with pytest.raises(UnreachableError, match=f"^{UnreachableError.BEGINNING}"):
        connect(NOBODY)
