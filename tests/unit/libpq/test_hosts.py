"""libpq's three lists of servers, split and joined."""

import pytest

from cdcpipe.libpq.hosts import Host, parameters_of, split_hosts


@pytest.mark.parametrize(
    ("host", "hostaddr", "port", "expected"),
    [
        ("", "", "", [Host("", "", "")]),
        ("a,b", "", "1", [Host("a", "", "1"), Host("b", "", "1")]),
        ("a,b", "", "1,", [Host("a", "", "1"), Host("b", "", "")]),
        ("a,b", "::1,", "", [Host("a", "::1", ""), Host("b", "", "")]),
        ("", "::1", "2", [Host("", "::1", "2")]),
        ("a,b", "", "1,2,3", []),
        ("a,b", "::1", "", []),
    ],
)
def test_lists_are_split_as_libpq_does(host: str, hostaddr: str, port: str, expected: list[Host]) -> None:
    assert split_hosts(host, hostaddr, port) == expected


def test_servers_are_put_together_again() -> None:
    servers = [Host("a", "::1", "1"), Host("b", "", "2")]
    assert parameters_of(servers) == {"host": "a,b", "hostaddr": "::1,", "port": "1,2"}
    assert split_hosts(*parameters_of(servers).values()) == servers
    assert parameters_of([]) == {}


@pytest.mark.parametrize(
    ("server", "other", "expected"),
    [
        (Host("a", "", ""), Host("a", "::1", "5432"), True),
        (Host("a", "", "1"), Host("a", "", "2"), False),
        (Host("a", "::1", "1"), Host("b", "::1", "1"), True),
        (Host("a", "::1", "1"), Host("a", "::2", "1"), False),
    ],
)
def test_an_address_says_more_than_a_name(server: Host, other: Host, expected: bool) -> None:
    assert server.is_at(other) is expected
