"""The session of a connection to the server: its settings, and how they are sent."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import postgres
import pytest

from cdcpipe.errors import ServerError
from cdcpipe.libpq.connection import Connection
from cdcpipe.libpq.parameters import connection_parameters
from cdcpipe.replication.session import connected, connected_walsender
from cdcpipe.sql import LOGIN_ROLE, NO_SEARCH_PATH, SESSION_SETTINGS, patient, reading_rows
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


def test_a_session_that_reads_rows_takes_no_view_for_a_table(any_pg: postgres.Cluster) -> None:
    """Its owner may put a view in the place of a table, whose functions would run with the rights of who reads."""
    with connected(connection_parameters([("dbname", any_pg.dsn)])) as connection:
        connection.pin_session(reading_rows(connection.server_version))
        connection.execute("CREATE TEMP VIEW evil AS SELECT 1 AS id")
        connection.execute("CREATE TEMP TABLE good AS SELECT 1 AS id")
        assert connection.execute("SELECT id FROM pg_temp.good") == [("1",)]
        with pytest.raises(ServerError, match='access to non-system view "evil" is restricted'):
            connection.execute("SELECT id FROM pg_temp.evil")


@pytest.mark.parametrize(
    ("server_version", "has_setting"),
    [(140012, False), (140013, True), (150007, False), (150008, True), (160004, True), (180000, True)],
)
def test_minor_releases_without_the_setting_are_not_asked_for_it(server_version: int, has_setting: bool) -> None:
    assert ("restrict_nonsystem_relation_kind" in reading_rows(server_version)) is has_setting


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
