"""Networks that go silent without closing anything, and whoever never pauses: every wait ends, and signals end any of them.

That a command ends at all is what these tests see. Those that wait for nothing but a deadline run side by side.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from faulty_proxy import CANCEL, CONNECT, END_OF_COPY, FaultyProxy

from support.cli_process import CLI, SPARK_COMMAND
from support.published_database import PublishedDatabase, backlog
from support.waiting import until


@dataclass
class Network:
    """Each command that runs through it has a proxy of its own; all are ended together."""

    on: PublishedDatabase
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def proxy(self) -> FaultyProxy:
        return self.stack.enter_context(FaultyProxy(self.on.database.cluster.port))

    def run(self, proxy: FaultyProxy, *args: str, slot: str | None = None, header: bool = False) -> CLI:
        dsn = proxy.dsn(self.on.database.tcp_dsn)
        return self.stack.enter_context(CLI(*args, "-d", dsn, "-S", slot or self.on.slot, header=header))

    def stream(self, proxy: FaultyProxy, *args: str, slot: str | None = None) -> CLI:
        return self.run(proxy, "--publication", "p", *args, slot=slot, header=True)


@pytest.fixture
def network(on18: PublishedDatabase) -> Iterator[Network]:
    made = Network(on18)
    with made.stack:
        yield made


STREAM = ("--publication", "p")
PHASES = [
    (CONNECT, STREAM, 0),
    ("set_config", STREAM, 0),
    ("pg_replication_slots", STREAM, 0),
    ("pg_create_logical_replication_slot", (*STREAM, "-c"), 0),
    ("IDENTIFY_SYSTEM", STREAM, 0),
    ("START_REPLICATION", STREAM, 0),
    ("pg_replication_slots", ("-L",), 143),
    ("pg_replication_slots", ("slot", "--watch", "1"), 143),
    ("IDENTIFY_SYSTEM", ("prepare", *STREAM), 143),
    ("CREATE_REPLICATION_SLOT", ("prepare", "--export-snapshot", *STREAM), 143),
]


def test_a_signal_ends_what_waits_for_a_silent_server(network: Network) -> None:
    """One is enough in every phase, the request to cancel being just as silent; a command that is no stream has not succeeded."""
    runs = []
    for phase, args, code in PHASES:
        proxy = network.proxy()
        reached = proxy.at(phase, proxy.silence)
        slot = f"{network.on.slot}_new" if "-c" in args else None
        runs.append((reached, network.run(proxy, *args, slot=slot), code, phase))
    for reached, cli, _, phase in runs:
        assert reached.wait(60), (phase, cli.stderr)
        cli.signal(signal.SIGTERM)
    assert [(phase, cli.wait()) for _, cli, _, phase in runs] == [(phase, code) for _, _, code, phase in runs]


def test_a_second_signal_kills_whatever_the_first_one_waits_for(network: Network) -> None:
    proxies = [network.proxy(), network.proxy()]
    canceling = proxies[0].at(CANCEL, proxies[0].silence)
    reached = proxies[0].at("IDENTIFY_SYSTEM", lambda link: link.silence())
    before = network.stream(proxies[0])
    assert reached.wait(60)
    before.signal(signal.SIGTERM)
    assert canceling.wait(60)
    before.signal(signal.SIGINT)
    assert before.wait() == -signal.SIGINT

    ending = proxies[1].at(END_OF_COPY, proxies[1].silence)
    network.on.sql("insert into t values (99, 'z')")
    during = network.stream(proxies[1])
    assert during.take(1)  # only now the stream has begun for certain, and its end has an end of copy
    during.signal(signal.SIGINT)
    assert ending.wait(60)
    during.signal(signal.SIGTERM)
    assert during.wait() == -signal.SIGTERM


def test_deadlines_end_waits(network: Network) -> None:
    """The last two are ways out: what they could not confirm comes again, and a warning says so."""
    start, poll, end, closed = (network.proxy() for _ in range(4))
    start.at("START_REPLICATION", start.silence)
    poll.at("pg_replication_slots", poll.silence)
    ending = end.at(END_OF_COPY, end.silence)
    slots = [network.on.make_slot(suffix=f"_{number}") for number in range(3)]
    network.on.sql("insert into t values (1, 'a')", "create table flush (); drop table flush")
    end_position = str(network.on.value("select pg_current_wal_insert_lsn()"))

    starting = network.stream(start, "--receive-timeout", "1", slot=slots[0])
    polling = network.run(poll, "-L", "-u", "1")
    reaching = network.stream(end, "-A", "--endpos", end_position, slot=slots[1])
    losing = network.stream(closed, slot=slots[2])
    position, _ = losing.transactions(1)[0]
    closed.silence()
    losing.say(f"F {position}\n")
    losing.close_stdin()

    assert (starting.wait(), polling.wait(), losing.wait()) == (2, 2, 4)
    assert "has not answered" in starting.stderr
    assert "has not answered" in polling.stderr
    assert "has not confirmed" in losing.stderr
    assert ending.wait(60)
    assert reaching.wait() == 0
    assert "has not confirmed" in reaching.stderr


def test_quit_after_bulk_over_tcp(network: Network) -> None:
    """While there is bulk the kernel wakes us for 64 KiB: the end of the stream is shorter."""
    backlog(network.on, rows=150_000, per_transaction=5000, width=500)
    for _ in range(3):
        with CLI("-d", network.on.database.tcp_dsn, "-S", network.on.slot, *STREAM) as cli:
            cli.transactions(8)
            cli.say("q\n")
            assert cli.wait_without_reading() == 0
        network.on.released()


# The catalog's connection, idle for as long as no unknown type comes


def domain(number: int) -> tuple[str, ...]:
    """Return what makes the output plugin ask the catalog."""
    return f"create domain d{number} as text", f"alter table t add v{number} d{number}", f"insert into t values ({number}, 'x')"


def pid_of_catalog(on: PublishedDatabase) -> object:
    return on.value(
        "select pid from pg_stat_activity where application_name = 'cdcpipe' and backend_type = 'client backend' and datname = %s",
        on.database.name,
    )


def test_a_catalog_connection_that_is_closed_is_opened_again(network: Network) -> None:
    on = network.on
    with network.run(network.proxy(), *STREAM, "-J") as cli:
        on.sql(*domain(1))
        assert b'"d1"' in b"".join(record for _, record in cli.take(3))
        assert on.value("select pg_terminate_backend(%s, 60000)", pid_of_catalog(on))
        on.sql(*domain(2))
        assert b'"d2"' in b"".join(record for _, record in cli.take(3))
        assert cli.quit() == 0
        assert cli.stderr == ""


def test_a_catalog_connection_that_goes_silent(network: Network) -> None:
    """It is opened again; while it is waited for, ``q`` is heard."""
    on = network.on
    proxy = network.proxy()
    with network.run(proxy, *STREAM, "-J", "--receive-timeout", "2") as cli:
        reached = proxy.at("format_type", lambda link: link.silence())
        on.sql(*domain(1))
        assert reached.wait(60)
        assert b'"d1"' in b"".join(record for _, record in cli.take(3))
        assert cli.quit() == 0
    on.released()
    with network.run(proxy, *STREAM, "-J", "--receive-timeout", "0") as cli:
        reached = proxy.at("format_type", lambda link: link.silence())
        on.sql(*domain(2))
        assert reached.wait(60)
        assert cli.quit() == 0
        assert "catalog" not in cli.stderr


# The commands of cdcpipe-spark: they ask the server through cdcpipe, and end with its code and its words


def spark_command(network: Network, proxy: FaultyProxy, *args: str, parameters: str = "") -> CLI:
    arguments = (*args, "-d", f"{proxy.dsn(network.on.database.tcp_dsn)} {parameters}")
    return network.stack.enter_context(CLI(*arguments, command=SPARK_COMMAND, header=False))


def run_of(network: Network, proxy: FaultyProxy, root: Path, *args: str, parameters: str = "") -> CLI:
    places = ("--staging", str(root / "staging"), "--warehouse", str(root / "warehouse"))
    args += ("--format", "parquet", "--snapshot", "never")
    return spark_command(network, proxy, "run", "-S", network.on.slot, *STREAM, *places, *args, parameters=parameters)


def test_run_ends_where_its_server_is_silent_or_cuts_it_off(network: Network, tmp_path: Path) -> None:
    """Before there are tables: with a signal at once, otherwise at the deadline, or when the connection is cut."""
    told, unfinished, alone, cut = (network.proxy() for _ in range(4))
    phases = [told.at("IDENTIFY_SYSTEM", told.silence), unfinished.at("IDENTIFY_SYSTEM", unfinished.silence)]
    alone.silence()
    cut.at("IDENTIFY_SYSTEM", lambda link: link.reset())  # the other connection may still be on its way
    signalled = [
        run_of(network, told, tmp_path / "told"),
        run_of(network, unfinished, tmp_path / "unfinished", "--available-now"),
    ]
    timed_out = run_of(network, alone, tmp_path / "alone", parameters="connect_timeout=1")
    cut_off = run_of(network, cut, tmp_path / "cut")
    for phase, cli in zip(phases, signalled, strict=True):
        assert phase.wait(60), cli.stderr
        cli.signal(signal.SIGTERM)
    assert [(cli.wait(), cli.stderr) for cli in signalled] == [(0, ""), (143, "")]
    assert timed_out.wait() == 2
    assert "did not answer in time" in timed_out.stderr
    assert cut_off.wait() == 2
    assert "error: the connection to the server was lost" in cut_off.stderr
    assert "Traceback" not in timed_out.stderr + cut_off.stderr


def test_status_says_that_a_silent_server_is_not_known(network: Network, tmp_path: Path) -> None:
    known, silent = network.proxy(), network.proxy()
    staging = ("--staging", str(tmp_path / "staging"))
    land = spark_command(network, known, "land", "-S", network.on.slot, *STREAM, *staging, "--available-now")
    assert land.wait() == 0, land.stderr
    silent.silence()
    once = spark_command(network, silent, "status", *staging, "--json")
    watching = spark_command(network, known, "status", *staging, "--json", "--watch", "0.2")
    assert watching.process.stdout is not None

    def found() -> dict[str, object]:
        assert watching.process.stdout is not None
        return json.loads(watching.process.stdout.readline())

    assert found()["server"] is not None
    known.silence()
    seen = until(lambda: (last := found())["server"] is None and last)
    assert "has not reported the position of the slot for" in seen["server_error"]
    assert [rung["rung"] for rung in seen["ladder"]] == ["sealed"]
    known.resume()
    until(lambda: found()["server"] is not None)
    known.reset()
    seen = until(lambda: (last := found())["server"] is None and last)
    assert "the connection to the server was lost" in seen["server_error"]
    watching.signal(signal.SIGINT)
    assert watching.wait() == 0
    assert watching.stderr == ""

    assert once.process.stdout is not None
    assert "has not reported the position of the slot yet" in json.loads(once.process.stdout.read())["server_error"]
    assert once.wait() == 0


# Whoever never pauses


def test_a_flood_of_feedback_holds_nothing_up(network: Network) -> None:
    with network.on.cli() as cli:
        assert cli.process.stdin is not None
        commands = b"F 0/1\n" * 100_000
        fd = cli.process.stdin.fileno()
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 1 << 20)  # never empty, whoever runs first

        def flood() -> None:
            with contextlib.suppress(BrokenPipeError):
                while True:
                    os.write(fd, commands)

        flooding = threading.Thread(target=flood)
        flooding.start()
        for number in range(3):
            network.on.sql(f"insert into t values ({number}, 'a')")
            assert cli.transactions(1)[0][1] == [str(number).encode()]
        cli.signal(signal.SIGTERM)
        assert cli.wait() == 0
        flooding.join(60)
        assert not flooding.is_alive()


# Several hosts


def test_each_host_has_its_own_time(network: Network, tmp_path: Path) -> None:
    """Names, addresses and ports from a service file: the silent hosts are left out one by one, in libpq's order."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as mute:
        ports = f"{mute.getsockname()[1]},{mute.getsockname()[1]},{network.on.database.cluster.port}"
        service = tmp_path / "service"
        service.write_text(f"[s]\nhost=127.0.0.1,localhost,127.0.0.1\nport={ports}\nconnect_timeout=1\nsslmode=disable\n")
        parameters = ["-d", f"service=s user=postgres dbname={network.on.database.name}"]
        with CLI("slot", *parameters, "-S", network.on.slot, env={"PGSERVICEFILE": str(service)}, header=False) as cli:
            assert cli.wait() == 0, cli.stderr
        service.write_text(f"[s]\nhost=127.0.0.1,no.such.host.invalid\nport={mute.getsockname()[1]}\nconnect_timeout=1\n")
        with CLI("slot", *parameters, "-S", network.on.slot, env={"PGSERVICEFILE": str(service)}, header=False) as cli:
            assert cli.wait() == 2
            assert "did not answer in time" in cli.stderr
            assert '"no.such.host.invalid"' in cli.stderr


# An older libpq, which can't ask for a cancellation without blocking


def test_cancelling_with_an_older_libpq(network: Network) -> None:
    environment = {"PSYCOPG_IMPL": "python"}
    ask = [sys.executable, "-c", "from psycopg import pq; print(pq.version())"]
    asked = subprocess.run(ask, env={**os.environ, **environment}, capture_output=True, check=False)
    if asked.returncode or int(asked.stdout) >= 170000:
        pytest.skip("no libpq before 17 on this machine")
    on, names = network.on, [f"{network.on.slot}_{number}" for number in range(2)]
    count = "select count(*) from pg_replication_slots where slot_name = any(%s)"
    with on.database.connect() as other:
        other.execute("begin")
        other.execute("insert into t values (1)")
        cli, timed_out = (
            network.stack.enter_context(CLI("-d", on.database.dsn, "-S", name, *STREAM, "-c", *args, env=environment))
            for name, args in zip(names, ([], ["--create-timeout", "1"]), strict=True)
        )
        until(lambda: on.value(count, names[:1]))
        cli.signal(signal.SIGTERM)
        assert (cli.wait(), timed_out.wait()) == (0, 2)
        assert "running transactions" in timed_out.stderr
        until(lambda: on.value(count, names) == 0)
        other.execute("rollback")
