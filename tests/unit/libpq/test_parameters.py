"""Connection parameters from the command line: merged, checked, and never shown if they may contain a password."""

import os
from pathlib import Path

import pytest

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.libpq.driver import pq
from cdcpipe.libpq.parameters import connection_parameters, effective_parameters, network_defaults, protection_of

PARAMETERS = [
    ([("dbname", "shop")], {"dbname": "shop"}),
    ([("dbname", "host=a dbname='b c'"), ("host", "x")], {"host": "x", "dbname": "b c"}),
    ([("host", "x"), ("dbname", "host=a")], {"host": "a"}),
    ([("dbname", "postgresql://")], {}),
    (
        [("dbname", "postgresql://h,[::1]:2/d%40e?options=-c%20a%3Db@c")],
        {"host": "h,::1", "port": ",2", "dbname": "d@e", "options": "-c a=b@c"},
    ),
    (
        [("dbname", "postgresql://u@h:1/d?application_name=n")],
        {"user": "u", "host": "h", "port": "1", "dbname": "d", "application_name": "n"},
    ),
]


@pytest.mark.parametrize(("pairs", "expected"), PARAMETERS)
def test_connection_parameters(pairs: list[tuple[str, str]], expected: dict[str, str]) -> None:
    assert connection_parameters(pairs) == expected


@pytest.mark.parametrize(
    "pair",
    [
        ("password", "CANARY"),
        ("sslpassword", "CANARY"),
        ("oauth_client_secret", "CANARY"),
        ("nonsense", "1"),
        ("postgresql://u:CANARY@h?a", "b"),
        *(
            ("dbname", conninfo)
            for conninfo in [
                "password=CANARY",
                "password=CANARY b",
                "host=h pasword=CANARY",
                "host=h port=CANARY",
                "user=r password=two CANARY",
                "user=r password='CANARY",
                "nonsense=1",
                "postgres://u:CANARY@h",
                "postgres:/r:CANARY@h",
                "Postgresql://r:CANARY@h",
                "http://u:CANARY@h",
                "postgresql://r:CANARY%zz@h/db",
                "postgresql://r:CANARY@[h/db",
                "postgresql://r:CANARY/w@h/db",
                "postgresql://r:p/CANARY@h",
                "postgresql://r:1/CANARY@h/db",
                "postgresql://r:p@CANARY@h/db",
                "postgresql://h/db?pasword=CANARY",
            ]
        ),
    ],
)
def test_connection_parameters_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(InvalidArgumentsError) as caught:
        connection_parameters([pair])
    assert "CANARY" not in f"{caught.value} {caught.value.hint}"
    assert caught.value.hint


def test_effective_parameters_include_libpqs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "of.the.environment")
    monkeypatch.setenv("PGPORT", "1")
    found = effective_parameters({"port": "2", "dbname": "d"})
    assert (found["host"], found["port"], found["dbname"]) == ("of.the.environment", "2", "d")


DEFAULTS = {
    "connect_timeout": "30",
    "keepalives_idle": "60",
    "keepalives_interval": "10",
    "keepalives_count": "6",
    "tcp_user_timeout": "120000",
}


def test_network_defaults_only_fill_unset_parameters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parameters may come from the caller, the environment, or a service file."""
    for name in ("PGCONNECT_TIMEOUT", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    service = tmp_path / "service"
    service.write_text("[slow]\nhost=h\nkeepalives_count=3\n")
    monkeypatch.setenv("PGSERVICEFILE", str(service))
    assert network_defaults(effective_parameters({"host": "h"})) == DEFAULTS
    assert network_defaults(effective_parameters(DEFAULTS)) == {}
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "7")
    assert network_defaults(effective_parameters({"service": "slow"})) == {
        "keepalives_idle": "60",
        "keepalives_interval": "10",
        "tcp_user_timeout": "90000",
    }


@pytest.mark.parametrize("idle", ["0", "-1", "x"])
def test_keepalives_of_an_unknown_duration_leave_tcp_user_timeout_alone(idle: str) -> None:
    assert "tcp_user_timeout" not in network_defaults({"keepalives_idle": idle})


@pytest.mark.parametrize(("mode", "expected"), [(None, {}), ("allow", {}), ("disable", {"sslcertmode": "disable"})])
def test_how_a_connection_is_protected(monkeypatch: pytest.MonkeyPatch, mode: str | None, expected: dict[str, str]) -> None:
    """Executors have another environment, or a libpq that does not know a parameter. So a default is not passed on."""
    for name in [name for name in os.environ if name.startswith("PG")]:
        monkeypatch.delenv(name)
    if mode is not None:
        monkeypatch.setenv("PGSSLCERTMODE", mode)
    pgconn = pq.PGconn.connect_start(b"host=/nowhere")
    assert protection_of(pgconn) == expected
    pgconn.finish()
