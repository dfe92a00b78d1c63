"""Measures the time from sending COMMIT until the reader of the pipe has the transaction's commit record.

The transactions have one row each and run one after the other. One loop waits for both the server's answer and the pipe, so that
neither delays the other. The figure includes the commit itself, without fsync.
"""

from __future__ import annotations

import os
import select
import statistics
import subprocess
import time
from typing import TYPE_CHECKING, Any

import postgres

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

__all__ = ["measure"]

TRANSACTIONS = 2000
WARM_UP = 200
TIMEOUT_S = 20


class _Program:
    """A streamer under test, and the bytes that it has written."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.fd = self.process.stdout.fileno()
        self._tail = b""

    def read(self) -> bool:
        """Read the available bytes. Tell whether the output now ends with a whole commit record."""
        data = os.read(self.fd, 1 << 16)
        if not data:
            raise SystemExit(f"{self.process.args!r} ended with {self.process.wait()}")
        self._tail = (self._tail + data)[-27:]
        # A commit record is C, flags (0), commit LSN, end LSN, time: 26 bytes. Both programs end a record with a
        # newline, cdcpipe because of -N.
        return self._tail.startswith(b"C\0") and self._tail.endswith(b"\n")

    def forget(self) -> None:
        self._tail = b""

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()


def _one(connection: psycopg.Connection[Any], program: _Program, number: int) -> float:
    """Commit one row; return the milliseconds until its commit record has been read."""
    server = connection.pgconn
    connection.execute("begin")
    connection.execute("insert into latency_row values (%s, 'a row')", [number])
    program.forget()
    poll = select.poll()
    poll.register(server.socket, select.POLLIN)
    poll.register(program.fd, select.POLLIN)
    started = time.perf_counter()
    server.send_query(b"commit")
    server.flush()
    committed, read_at = False, 0.0
    while not (committed and read_at):
        events = poll.poll(TIMEOUT_S * 1000)
        if not events:
            raise SystemExit(f"no commit record within {TIMEOUT_S} s")
        for fd, _ in events:
            if fd == program.fd:
                if program.read():
                    read_at = time.perf_counter()
            else:
                server.consume_input()
                while not server.is_busy() and not committed:
                    committed = server.get_result() is None
    return (read_at - started) * 1000


def _run(cluster: postgres.Cluster, command: list[str]) -> list[float]:
    program = _Program(command)
    try:
        with cluster.connect() as connection:
            connection.execute("truncate latency_row")
            # Once its first transaction arrives, the program is connected.
            times = [_one(connection, program, number) for number in range(WARM_UP + TRANSACTIONS)]
    finally:
        program.close()
    return sorted(times[WARM_UP:])


def measure(runs: int, cdcpipe: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a line for each run of cdcpipe and of pg_recvlogical, in turn."""
    with postgres.Cluster("15") as cluster:
        with cluster.connect() as connection:
            connection.execute("create table latency_row (id integer primary key, label text)")
            connection.execute("create publication latency for table latency_row with (publish = 'insert')")
        for transport in ("unix", "tcp"):
            dsn = cluster.dsn if transport == "unix" else cluster.tcp_dsn
            for run in range(1, runs + 1):
                for variant, command in {
                    "pg_recvlogical": [
                        *(str(cluster.bin("pg_recvlogical")), "-d", dsn, "-S", "latency", "--start", "-f", "-"),
                        *("-o", "proto_version=1", "-o", "publication_names=latency"),
                    ],
                    "cdcpipe": [*cdcpipe, "-d", dsn, "-S", "latency", "--publication", "latency", "-H", "-N"],
                }.items():
                    with cluster.connect() as connection:
                        connection.execute("select pg_create_logical_replication_slot('latency', 'pgoutput')")
                    times = _run(cluster, command)
                    cluster.drop_slot("latency")
                    yield {
                        "benchmark": "latency",
                        "transport": transport,
                        "variant": variant,
                        "reference": variant == "pg_recvlogical",
                        "run": run,
                        "rows": len(times),
                        "rows_wanted": TRANSACTIONS,
                        "p50_ms": round(statistics.median(times), 4),
                        "p99_ms": round(times[int(len(times) * 0.99)], 4),
                        "max_ms": round(times[-1], 4),
                        "server": cluster.version_num,
                    }
