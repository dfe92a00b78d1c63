"""Whether a new slot gets the property failover."""

from typing import Any

import pytest

from cdcpipe.errors import InitError
from cdcpipe.replication.commands import create_replication_slot, enable_failover
from cdcpipe.replication.failover import failover_of_new_slot


class Server:
    """The part of a connection that the decision needs."""

    def __init__(self, version: int, *, is_standby: bool) -> None:
        self.server_version = version
        self.is_standby = is_standby

    def execute(self, sql: str) -> list[tuple[str]]:
        assert "pg_is_in_recovery" in sql
        return [("t" if self.is_standby else "f",)]


PRIMARY: Any = Server(170000, is_standby=False)
STANDBY: Any = Server(180004, is_standby=True)
OLD: Any = Server(160014, is_standby=False)


@pytest.mark.parametrize(
    ("server", "plugin", "asked", "expected"),
    [
        (PRIMARY, "pgoutput", None, True),
        (PRIMARY, "wal2json", None, False),
        (PRIMARY, "wal2json", True, True),
        (PRIMARY, "pgoutput", False, False),
        (STANDBY, "pgoutput", None, False),
        (OLD, "pgoutput", None, False),
        (OLD, "pgoutput", False, False),
    ],
)
def test_the_property_of_a_new_slot(server: Any, plugin: str, asked: bool | None, expected: bool) -> None:
    assert failover_of_new_slot(server, plugin, asked) == expected


@pytest.mark.parametrize(("server", "what"), [(OLD, "PostgreSQL 16"), (STANDBY, "standby")])
def test_what_the_server_lacks_is_named(server: Any, what: str) -> None:
    with pytest.raises(InitError, match=what):
        failover_of_new_slot(server, "pgoutput", True)


def test_commands() -> None:
    made = 'CREATE_REPLICATION_SLOT "s" LOGICAL "pgoutput" '
    assert create_replication_slot("s", "pgoutput", is_temporary=False) == made + "EXPORT_SNAPSHOT"
    assert (
        create_replication_slot("s", "pgoutput", is_temporary=False, failover=True) == made + "(SNAPSHOT 'export', FAILOVER true)"
    )
    assert enable_failover('s"') == 'ALTER_REPLICATION_SLOT "s""" (FAILOVER true)'
