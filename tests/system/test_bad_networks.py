"""Slow and broken networks: a consumer gets each transaction once, and the staging log has it once, whatever breaks and when.

Each program has a proxy of its own before the server, and a slot of its own. They run side by side.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
from faulty_proxy import AUTHENTICATION, CANCEL, CONNECT, END_OF_COPY, TLS, FaultyProxy, Link
from secure_postgres import PASSWORD, SecureCluster

from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import Commit, Insert
from support.cli_process import CLI, SPARK_COMMAND
from support.landing import replay
from support.published_database import PublishedDatabase, backlog

ROWS, PER_TRANSACTION, WIDTH = 2000, 20, 200
MIDDLE = 300_000
"""This byte is in the middle of the stream. No other connection carries so many."""

DELAY_S = 0.05
RESET_SHARE = 0.01

ENVIRONMENT = {"PGPASSWORD": PASSWORD}


class Fault(NamedTuple):
    """``phase`` is one of the proxy's, or a number of bytes; ``code`` is how `cdcpipe` ends after a reset there."""

    phase: str | int
    code: int
    tls: bool = False

    def __str__(self) -> str:
        return f"{self.phase}{' with TLS' if self.tls else ''}"


FAULTS = [
    Fault(CONNECT, 2),
    Fault(TLS, 2, tls=True),
    Fault(AUTHENTICATION, 2),
    Fault("pg_replication_slots", 2),
    Fault("IDENTIFY_SYSTEM", 2),
    Fault("START_REPLICATION", 2),
    Fault(MIDDLE, 3),
    Fault(MIDDLE, 3, tls=True),
    Fault(END_OF_COPY, 0),
]


@dataclass
class Network:
    """A server with TLS and a published table, which programs reach through proxies."""

    on: PublishedDatabase
    cluster: SecureCluster
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def proxy(self) -> FaultyProxy:
        return self.stack.enter_context(FaultyProxy(self.cluster.port))

    def dsn(self, proxy: FaultyProxy, *, tls: bool = False) -> str:
        secure = {"sslmode": "verify-full", "sslrootcert": str(self.cluster.certificate)} if tls else {}
        return proxy.dsn(self.on.database.tcp_dsn, **secure)

    def slots(self, count: int, rows: int = ROWS) -> list[str]:
        """Make slots, and then the rows that come out of each of them."""
        made = [self.on.make_slot(suffix=f"_{number}") for number in range(count)]
        backlog(self.on, rows, PER_TRANSACTION, WIDTH)
        self.on.sql("create table flush (); drop table flush")
        return made

    def keys(self) -> list[bytes | None]:
        """Return the keys of the table's rows, in the order in which they were committed."""
        return [str(key).encode() for (key,) in self.on.connection.execute("select id from t order by id")]

    def cli(self, dsn: str, slot: str, *args: str) -> CLI:
        return CLI("-d", dsn, "-S", slot, "--publication", "p", *args, env=ENVIRONMENT)

    def land(self, dsn: str, slot: str, staging: Path, *args: str) -> CLI:
        arguments = ("land", "-d", dsn, "-S", slot, "--publication", "p", "--staging", str(staging), *args)
        return CLI(*arguments, command=SPARK_COMMAND, env=ENVIRONMENT, header=False)

    def has_landed(self, staging: Path) -> bool:
        """Tell whether the log has the rows of the table. `replay` asserts that it has none of them twice."""
        tables, _ = replay(staging)
        return sorted(tables["t"], key=int) == self.keys()


@pytest.fixture
def network(secure_pg: SecureCluster) -> Iterator[Network]:
    with secure_pg.database() as database, contextlib.closing(PublishedDatabase(database)) as on:
        made = Network(on, secure_pg)
        with made.stack:
            yield made


Result = TypeVar("Result")


class Run(NamedTuple):
    """What a program has done, with one more start after each end in failure."""

    codes: list[int]
    said: str


def consume(network: Network, dsn: str, slot: str, end: str) -> tuple[Run, list[bytes | None]]:
    """Stream to the end as a consumer that knows the last transaction it has got. Return the keys of all rows."""
    codes: list[int] = []
    said: list[str] = []
    keys: list[bytes | None] = []
    position = "0/0"
    while codes[-1:] != [0]:
        with network.cli(dsn, slot, "-A", "--endpos", end, "--startpos", position) as cli:
            rows: list[bytes | None] = []
            for lsn, record in cli.records():
                message = decode(record)
                if isinstance(message, Insert):
                    rows.append(message.new[0])
                elif isinstance(message, Commit):
                    keys += rows
                    rows, position = [], str(lsn)
            codes.append(cli.wait())
            said.append(cli.stderr)
        assert len(codes) < 5, said
    return Run(codes, "".join(said)), keys


def land(network: Network, dsn: str, slot: str, staging: Path) -> Run:
    codes: list[int] = []
    said: list[str] = []
    while codes[-1:] != [0]:
        with network.land(dsn, slot, staging, "--available-now") as cli:
            codes.append(cli.wait())
            said.append(cli.stderr)
        assert len(codes) < 5, said
    return Run(codes, "".join(said))


def broken(network: Network, faults: list[Fault], run: Callable[[str, Fault], Result]) -> list[tuple[Fault, bool, Result]]:
    """Run a program for each fault twice, all side by side: once with a reset there, once with a silence that ends.

    ``run`` gets the connection string. Return its results, and whether there was a reset.
    """
    cases = [(fault, is_reset) for fault in faults for is_reset in (True, False)]
    met = []
    with ThreadPoolExecutor(len(cases)) as pool:
        for fault, is_reset in cases:
            proxy, act = network.proxy(), Link.reset if is_reset else Link.silence
            reached = proxy.after(fault.phase, act) if isinstance(fault.phase, int) else proxy.at(fault.phase, act)
            met.append((proxy, reached, pool.submit(run, network.dsn(proxy, tls=fault.tls), fault)))
        for (fault, _), (proxy, reached, _) in zip(cases, met, strict=True):
            assert reached.wait(60), str(fault)
            proxy.resume()
        return [(*case, future.result()) for case, (_, _, future) in zip(cases, met, strict=True)]


def test_a_consumer_gets_each_row_once_whatever_is_broken_off_or_held_up(network: Network) -> None:
    """A reset ends `cdcpipe` with a code and an error; it goes on after a silence as if there had been none."""
    slots = iter(network.slots(2 * len(FAULTS)))
    end = str(network.on.value("select pg_current_wal_insert_lsn()"))
    for fault, is_reset, (run, keys) in broken(network, FAULTS, lambda dsn, _: consume(network, dsn, next(slots), end)):
        assert (str(fault), run.codes) == (str(fault), [fault.code, 0] if is_reset and fault.code else [0])
        assert keys == network.keys(), str(fault)
        assert ("cdcpipe: error: " in run.said) == (len(run.codes) > 1), run.said


def test_the_log_has_each_row_once_whatever_is_broken_off_or_held_up(network: Network, tmp_path: Path) -> None:
    """What `land` can't mend by itself ends it with an error, and the next one goes on."""
    faults = [fault for fault in FAULTS if fault.phase in (CONNECT, AUTHENTICATION, "START_REPLICATION", MIDDLE, END_OF_COPY)]
    slots = network.slots(2 * len(faults))
    free = iter(slots)

    def run(dsn: str, _: Fault) -> tuple[Run, Path]:
        slot = next(free)
        return land(network, dsn, slot, tmp_path / slot), tmp_path / slot

    for fault, is_reset, (ended, staging) in broken(network, faults, run):
        assert set(ended.codes[:-1]) <= ({2, 3} if is_reset else set()), (str(fault), ended)
        assert ("cdcpipe-spark: error: " in ended.said) == (len(ended.codes) > 1), ended.said
        assert network.has_landed(staging), str(fault)


@pytest.mark.parametrize("tls", [False, True])
def test_the_log_has_each_row_once_over_a_slow_link_with_resets(network: Network, tmp_path: Path, *, tls: bool) -> None:
    (slot,) = network.slots(1, rows=8_000)
    proxy = network.proxy()
    proxy.delay(DELAY_S)
    proxy.throttle(2_000_000)  # or a reset would drop what the proxy's kernel has not sent, and few rows would arrive in between
    proxy.reset_at_random(RESET_SHARE, seed=7)
    land(network, network.dsn(proxy, tls=tls), slot, tmp_path)
    assert len(proxy.random_resets) > 1
    assert network.has_landed(tmp_path)


# The end, while the server is silent


def test_a_signal_ends_land_in_order_while_the_server_is_silent(network: Network, tmp_path: Path) -> None:
    """Its streamer hears the signal before it reads commands, too. What could not be confirmed is landed already."""
    starting, streaming = network.slots(2)
    for slot, phase in ((starting, "START_REPLICATION"), (streaming, MIDDLE)):
        proxy = network.proxy()
        reached = proxy.at(phase, proxy.silence) if isinstance(phase, str) else proxy.after(phase, proxy.silence)
        with network.land(network.dsn(proxy), slot, tmp_path / slot) as cli:
            assert reached.wait(60), cli.stderr
            cli.signal(signal.SIGTERM)
            assert cli.wait() == 0
            assert "killing it" not in cli.stderr
        proxy.resume()
        assert land(network, network.dsn(proxy), slot, tmp_path / slot).codes == [0]
        assert network.has_landed(tmp_path / slot)


def test_one_deadline_for_the_question_what_the_server_has_confirmed(network: Network) -> None:
    """The stream is not ended, and a second connection is made and then silent: nobody waits for a cancellation, too."""
    (slot,) = network.slots(1)
    proxy = network.proxy()
    with network.cli(network.dsn(proxy), slot) as cli:
        position, _ = cli.transactions(1)[0]
        ending = proxy.at(END_OF_COPY, Link.silence)
        asking = proxy.at("set_config", Link.silence)
        canceling = proxy.at(CANCEL, Link.silence)
        cli.say(f"F {position}\nq\n")
        assert ending.wait(60)
        assert asking.wait(60)
        assert cli.wait() == 0
        assert "has not confirmed" in cli.stderr
    assert not canceling.is_set()


# The start, over a slow link


def test_both_connections_are_made_at_the_same_time(network: Network) -> None:
    (slot,) = network.slots(1)
    proxy = network.proxy()
    met = [proxy.at(CONNECT, Link.silence) for _ in range(2)]
    with network.cli(network.dsn(proxy), slot) as cli:
        assert [reached.wait(60) for reached in met] == [True, True]
        proxy.resume()
        assert len(cli.transactions(1)) == 1
        assert cli.quit() == 0


def test_an_error_in_the_catalog_does_not_wait_for_the_other_connection(network: Network) -> None:
    proxy = network.proxy()
    proxy.at("IDENTIFY_SYSTEM", Link.silence)
    with network.cli(network.dsn(proxy), "no_such_slot", "--receive-timeout", "0") as cli:
        assert cli.wait() == 8
        assert "does not exist" in cli.stderr
