"""Connection parameters from the command line: merged, checked, and never shown when they may have a password."""

import pytest

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.libpq.parameters import connection_parameters, effective_parameters

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


def test_what_libpq_would_use_has_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "of.the.environment")
    monkeypatch.setenv("PGPORT", "1")
    found = effective_parameters({"port": "2", "dbname": "d"})
    assert (found["host"], found["port"], found["dbname"]) == ("of.the.environment", "2", "d")
