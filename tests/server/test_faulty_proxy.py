"""The proxy that other tests and the soak use: each fault has exactly its documented effect."""

import threading
import time

import postgres
import psycopg
import pytest
from faulty_proxy import AUTHENTICATION, CONNECT, PIECE_BYTES, TLS, FaultyProxy
from secure_postgres import PASSWORD, SecureCluster
from soak_options import NETWORK_KINDS
from weather import Weather

from support.waiting import until


def test_silence_holds_everything_back_until_it_ends(database: postgres.Database) -> None:
    with FaultyProxy(database.cluster.port) as proxy, psycopg.connect(proxy.dsn(database.tcp_dsn), autocommit=True) as client:
        proxy.silence()
        answers: list[object] = []
        asking = threading.Thread(target=lambda: answers.append(client.execute("select 7").fetchone()))
        asking.start()
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            psycopg.connect(proxy.dsn(database.tcp_dsn), connect_timeout=2)
        assert not answers
        proxy.resume()
        asking.join(60)
        assert answers == [(7,)]


def test_a_fault_at_a_command_concerns_the_connection_it_is_given(database: postgres.Database) -> None:
    with FaultyProxy(database.cluster.port) as proxy, psycopg.connect(proxy.dsn(database.tcp_dsn)) as other:
        reached = proxy.at("select 'this", lambda link: link.reset())
        with psycopg.connect(proxy.dsn(database.tcp_dsn)) as client:
            cursor = psycopg.ClientCursor(client)  # its commands are a server's, not prepared ones
            cursor.execute("select 'another'")
            assert not reached.is_set()
            with pytest.raises(psycopg.OperationalError):
                cursor.execute("select 'this one'")
            assert reached.wait(60)
        assert other.execute("select 7").fetchone() == (7,)


def test_a_reset_while_connecting(database: postgres.Database) -> None:
    with FaultyProxy(database.cluster.port) as proxy:
        proxy.at(CONNECT, proxy.reset)
        with pytest.raises(psycopg.OperationalError, match=r"reset|closed"):
            psycopg.connect(proxy.dsn(database.tcp_dsn))
        psycopg.connect(proxy.dsn(database.tcp_dsn)).close()  # a fault happens once


def test_throttled_and_delayed_data_arrives_late(database: postgres.Database) -> None:
    with FaultyProxy(database.cluster.port) as proxy, psycopg.connect(proxy.dsn(database.tcp_dsn)) as client:
        for fault, least_s in ((lambda: proxy.throttle(400_000), 0.2), (lambda: proxy.delay(0.15), 0.3)):
            fault()
            began_at = time.monotonic()
            assert client.execute("select repeat('x', 100000)").fetchone() == ("x" * 100_000,)
            assert time.monotonic() - began_at >= least_s
            proxy.throttle(None)


def test_an_encrypted_connection_passes_and_can_be_broken_off(secure_pg: SecureCluster) -> None:
    """What is encrypted is not looked at: the command in it comes to no phase."""
    secure = {"sslmode": "verify-full", "sslrootcert": str(secure_pg.certificate)}
    with FaultyProxy(secure_pg.port) as proxy:
        plain, encrypted = proxy.dsn(secure_pg.tcp_dsn), proxy.dsn(secure_pg.tcp_dsn, **secure)
        unseen = proxy.at("select", proxy.reset)
        with psycopg.connect(encrypted, password=PASSWORD) as client:
            assert client.execute("select ssl from pg_stat_ssl where pid = pg_backend_pid()").fetchone() == (True,)
        assert not unseen.is_set()
        for phase, dsn in ((CONNECT, encrypted), (TLS, encrypted), (AUTHENTICATION, plain)):
            reached = proxy.at(phase, lambda link: link.reset())
            with pytest.raises(psycopg.OperationalError, match=r"reset|closed|EOF"):
                psycopg.connect(dsn, password=PASSWORD)
            assert reached.wait(60)


def test_a_fault_after_so_many_bytes(database: postgres.Database) -> None:
    with FaultyProxy(database.cluster.port) as proxy:
        carried: list[int] = []
        reached = proxy.after(100_000, lambda link: (carried.append(link.carried_bytes), link.reset()))
        with psycopg.connect(proxy.dsn(database.tcp_dsn)) as client:
            client.execute("select 1")
            with pytest.raises(psycopg.OperationalError):
                client.execute("select repeat('x', 1000000)")
        assert reached.wait(60)
        assert carried == [100_000]


def test_random_resets_are_made_from_their_seed(database: postgres.Database) -> None:
    sizes: list[list[int]] = []
    for _ in range(2):
        with FaultyProxy(database.cluster.port) as proxy:
            proxy.reset_at_random(0.5, seed=7)
            for number in range(1, 4):
                with psycopg.connect(proxy.dsn(database.tcp_dsn)) as client, pytest.raises(psycopg.OperationalError):
                    client.execute("select repeat('x', 10000000)")
                assert len(proxy.random_resets) == number
            proxy.reset_at_random(0, seed=7)
            psycopg.connect(proxy.dsn(database.tcp_dsn)).close()
            sizes.append(proxy.random_resets)
    assert sizes[0] == sizes[1]
    assert len(set(sizes[0])) == 3
    assert min(sizes[0]) >= PIECE_BYTES


@pytest.mark.parametrize("kind", NETWORK_KINDS)
def test_weather_is_made_from_its_seed_and_ends_in_a_calm(database: postgres.Database, kind: str) -> None:
    """scripts/soak --network puts this between its runs and the server. (This seed begins with short silences.)"""
    said: list[list[str]] = []
    for _ in range(2):
        with FaultyProxy(database.cluster.port) as proxy:
            lines: list[str] = []
            said.append(lines)
            with Weather(proxy, 1889, lines.append, kind):
                until(lambda: len(lines) >= (2 if kind in ("mixed", "silence") else 1))  # noqa: B023 - called at once
            with psycopg.connect(proxy.dsn(database.tcp_dsn), connect_timeout=60) as client:
                assert client.execute("select 7").fetchone() == (7,)
    count = min(map(len, said))
    assert said[0][:count] == said[1][:count]
