"""The proxy that other tests and the soak trust: each fault does what it says, and no more."""

import threading
import time

import postgres
import psycopg
import pytest
from faulty_proxy import CONNECT, FaultyProxy
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


def test_what_is_throttled_and_delayed_takes_its_time(database: postgres.Database) -> None:
    with FaultyProxy(database.cluster.port) as proxy, psycopg.connect(proxy.dsn(database.tcp_dsn)) as client:
        for fault, least_s in ((lambda: proxy.throttle(400_000), 0.2), (lambda: proxy.delay(0.15), 0.3)):
            fault()
            began_at = time.monotonic()
            assert client.execute("select repeat('x', 100000)").fetchone() == ("x" * 100_000,)
            assert time.monotonic() - began_at >= least_s
            proxy.throttle(None)


def test_weather_is_made_from_its_seed_and_ends_in_a_calm(database: postgres.Database) -> None:
    """What scripts/soak --network has between its runs and the server."""
    said: list[list[str]] = []
    for _ in range(2):
        with FaultyProxy(database.cluster.port) as proxy:
            lines: list[str] = []
            said.append(lines)
            with Weather(proxy, 7, lines.append):
                until(lambda: len(lines) >= 2)  # noqa: B023 - called at once
            with psycopg.connect(proxy.dsn(database.tcp_dsn), connect_timeout=60) as client:
                assert client.execute("select 7").fetchone() == (7,)
    count = min(map(len, said))
    assert said[0][:count] == said[1][:count]
