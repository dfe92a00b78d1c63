"""The session of a connection to the server: its settings, and how they are sent."""

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Thread

import postgres
import pytest

from cdcpipe.errors import ServerError, SharedSessionError
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
        assert all(f"('{name.lower()}', '{value}')" in query for name, value in settings.items())
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
        assert found == ("COMMIT",)
        assert connection.execute("SHOW role") == [("none",)]
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


@contextmanager
def proxy_with_own_keys(port: int, *, passes_options: bool) -> Iterator[int]:
    """Run a proxy on the port that this yields. As Neon's, it tells its clients a process id that it has made up.

    One that does not pass options is as a connection pooler, whose server sessions began before the client came.
    """

    def pass_on(source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
        while data := source.recv(65536):
            target.sendall(change(data))
        target.shutdown(socket.SHUT_WR)

    def other_key(data: bytes) -> bytes:
        return re.sub(rb"K\0\0\0\x0c.{8}", b"K\0\0\0\x0c" + bytes(8), data, flags=re.DOTALL)

    def options(data: bytes) -> bytes:
        return data if passes_options else data.replace(b"-c cdcpipe.session=", b"-c cdcpipe.another=")

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # closed: the test has ended
                return
            server = socket.create_connection(("127.0.0.1", port))
            Thread(target=pass_on, args=(client, server, options), daemon=True).start()
            Thread(target=pass_on, args=(server, client, other_key), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("opened", [connected, connected_walsender])
def test_a_proxy_with_its_own_process_ids_is_no_pooler(
    pg: postgres.Cluster, opened: Callable[..., AbstractContextManager[Connection]]
) -> None:
    with proxy_with_own_keys(pg.port, passes_options=True) as port:
        parameters = connection_parameters([("dbname", pg.tcp_dsn), ("port", str(port)), ("options", "-c work_mem=7MB")])
        with opened({**parameters, "sslmode": "disable"}) as connection:
            assert connection.execute("SHOW timezone") == [("UTC",)]
            assert connection.execute("SHOW work_mem") == [("7MB",)], "the user's own options count, too"
            connection.pin_session({"work_mem": "8MB"})
            assert connection.execute("SHOW work_mem") == [("8MB",)]


@pytest.mark.parametrize("opened", [connected, connected_walsender])
def test_a_pooler_is_refused_and_its_session_keeps_its_settings(
    pg: postgres.Cluster, opened: Callable[..., AbstractContextManager[Connection]], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []
    close = Connection.close

    def look_and_close(self: Connection) -> None:
        left.append(
            self.execute("SELECT setting FROM pg_settings WHERE name IN ('search_path', 'bytea_output') AND source = 'session'")
        )
        close(self)

    monkeypatch.setattr(Connection, "close", look_and_close)
    with proxy_with_own_keys(pg.port, passes_options=False) as port:
        parameters = connection_parameters([("dbname", pg.tcp_dsn), ("port", str(port))])
        with pytest.raises(SharedSessionError, match="is a connection pooler, not the server") as caught:  # noqa: SIM117
            with opened({**parameters, "sslmode": "disable"}):
                pass
    assert left == [[], []]
    assert "name the host and port of the server itself" in (caught.value.hint or "")
