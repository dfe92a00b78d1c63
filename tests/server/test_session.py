"""The session of a connection to the server: its settings, and how they are sent."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import postgres
import pytest

from cdcpipe.libpq.connection import Connection
from cdcpipe.libpq.parameters import connection_parameters
from cdcpipe.replication.session import connected, connected_walsender
from cdcpipe.sql import LOGIN_ROLE, NO_SEARCH_PATH, SESSION_SETTINGS, patient
from support.tcp_options import tcp_options


@pytest.mark.parametrize(("opened", "more"), [(connected, NO_SEARCH_PATH), (connected_walsender, LOGIN_ROLE)])
def test_all_settings_are_made_in_one_round_trip(
    any_pg: postgres.Cluster, opened: Callable[..., AbstractContextManager[Connection]], more: dict[str, str]
) -> None:
    parameters = connection_parameters([("dbname", any_pg.dsn), ("application_name", "pinned")])
    with opened(parameters) as connection, any_pg.connect() as other:
        (query,) = other.execute("select query from pg_stat_activity where application_name = 'pinned'").fetchone() or ("",)
        settings = SESSION_SETTINGS | patient(connection.server_version) | more
        assert query.count("SET ") == len(settings)
        for name, value in settings.items():
            assert connection.execute(f"SHOW {name}")[0][0] in (value, f"{value}, MDY", f'"{value}"')


def test_an_older_walsender_gets_its_settings_one_by_one(database: postgres.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "server_version", 140001)
    parameters = connection_parameters([("dbname", database.dsn), ("application_name", "pinned one by one")])
    with connected_walsender(parameters) as connection, database.connect() as other:
        found = other.execute("select query from pg_stat_activity where application_name = 'pinned one by one'").fetchone()
        assert found == ("SET \"role\" = 'none'",)
        assert connection.execute("SHOW extra_float_digits") == [("3",)]


@pytest.mark.parametrize("opened", [connected, connected_walsender])
def test_a_role_whose_transactions_are_deferrable_waits_for_nobody(
    database: postgres.Database, opened: Callable[..., AbstractContextManager[Connection]]
) -> None:
    """Such a transaction begins only when no serializable one of another session could disturb it."""
    defaults = ("isolation=serializable", "read_only=on", "deferrable=on")
    options = " ".join(f"-c default_transaction_{default}" for default in defaults)
    with database.connect() as other, other.transaction():
        other.execute("set transaction isolation level serializable")
        other.execute("create table t (id int)")
        with opened(connection_parameters([("dbname", database.dsn), ("options", options)])) as connection:
            assert connection.execute("SELECT count(*) FROM pg_catalog.pg_class WHERE false", timeout_s=5.0) == [("0",)]


@pytest.mark.parametrize("opened", [connected, connected_walsender])
@pytest.mark.parametrize(
    ("given", "expected"), [("", (60, 10, 6, 120_000)), ("keepalives_idle=20 tcp_user_timeout=5000", (20, 10, 6, 5000))]
)
def test_a_dead_network_is_noticed_after_a_time_that_the_user_can_set(
    database: postgres.Database, opened: Callable[..., AbstractContextManager[Connection]], given: str, expected: tuple[int, ...]
) -> None:
    with opened(connection_parameters([("dbname", f"{database.tcp_dsn} {given}")])):
        assert [tuple(options.values()) for options in tcp_options(database.cluster.port)] == [expected]
