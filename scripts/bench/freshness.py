"""Measures the time from a commit to its sealed segment, to the changelog and to the replica, with 100 transactions a second.

The clock starts when COMMIT has returned. It stops when a segment that ends beyond the commit has its final name, or when the table
has a Delta commit with a position beyond it. For the replica there are ten tables with a million rows each; every transaction
changes a row of one of them.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import postgres
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cdcpipe.lsn import LSN
from spark_sink.delta.log import TableLog
from spark_sink.staging.changes import count_changes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from psycopg import Connection

__all__ = ["measure"]

PER_SECOND, TRANSACTIONS = 100, 2000
TABLES, TABLE_ROWS = 10, 1_000_000
SEALS_OFTEN = ("--seal-interval", "0.1")
LOOK_S = 0.002
TIMEOUT_S = 300


class _Watch(threading.Thread):
    """Records when each file that `_ends` knows appears: the position up to which the file completes the data, and the time."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self.directory = directory
        self.seen: dict[int, float] = {}
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(LOOK_S):
            for end in self._ends():
                self.seen.setdefault(end, time.perf_counter())

    def _ends(self) -> Iterator[int]:
        raise NotImplementedError


class _Segments(_Watch):
    def _ends(self) -> Iterator[int]:
        for epoch in self.directory.glob("staging/0*"):
            for name in os.listdir(epoch):
                if name.endswith(".cdc"):
                    yield int(name[17:33], 16)


class _Table(_Watch):
    def __init__(self, directory: Path, kind: str, table: str) -> None:
        super().__init__(directory)
        self._log = directory / f"warehouse/{kind}/public.{table}/_delta_log"
        self._next = 0

    def _ends(self) -> Iterator[int]:
        path = self._log / f"{self._next:020d}.json"
        if path.exists():
            self._next += 1
            for line in path.read_text().splitlines():
                if (transaction := json.loads(line).get("txn")) is not None:
                    yield transaction["version"]


@dataclass(frozen=True)
class _Variant:
    name: str
    target: str
    """What has to have a transaction: a sealed ``segment``, the ``changelog`` or the ``replica``."""
    options: tuple[str, ...] = ()

    @property
    def tables(self) -> list[str]:
        return [f"large_row_{number}" for number in range(TABLES)] if self.target == "replica" else ["freshness_row"]

    @property
    def warm_up(self) -> int:
        """How many transactions do not count: the first micro-batches of a session are slow."""
        return 200 if self.target == "segment" else 2000

    def command(self, directory: Path) -> list[str]:
        """Return the arguments of cdcpipe-spark."""
        options = ["-S", "freshness", "--publication", "freshness", "-c", "--staging", str(directory / "staging"), *self.options]
        if self.target == "segment":
            return ["land", *options]
        snapshot = "initial" if self.target == "replica" else "never"
        return ["run", *options, "--warehouse", str(directory / "warehouse"), "--snapshot", snapshot]

    def watches(self, directory: Path) -> list[_Watch]:
        """Return for each table what notes its progress."""
        if self.target == "segment":
            return [_Segments(directory)]
        return [_Table(directory, self.target, table) for table in self.tables]


VARIANTS = [
    _Variant("commit to sealed segment, --seal-interval 0.1", "segment", SEALS_OFTEN),
    _Variant("commit to changelog, --seal-interval 0.1", "changelog", SEALS_OFTEN),
    _Variant("commit to changelog", "changelog"),
    _Variant("commit to replica, ten tables of 1M rows", "replica"),
]


def _prepare(connection: Connection, variant: _Variant) -> None:
    """Make the tables and the publication."""
    for table in variant.tables:
        connection.execute(f"create table {table} (id serial primary key, label text)".encode())
        if variant.target == "replica":
            connection.execute(f"insert into {table} (label) select 'a row ' || g from generate_series(1, {TABLE_ROWS}) g".encode())
    connection.execute(f"create publication freshness for table {', '.join(variant.tables)}".encode())


def _clean(connection: Connection, variant: _Variant) -> None:
    connection.execute("drop publication freshness")
    connection.execute(f"drop table {', '.join(variant.tables)}".encode())


def _commit(connection: Connection, variant: _Variant, number: int) -> int:
    """Commit one change. Return an LSN that is at or after its end, and before the end of the next one."""
    table = variant.tables[number % len(variant.tables)]
    if variant.target == "replica":
        connection.execute(f"update {table} set label = 'changed' where id = %s".encode(), [number * 7919 % TABLE_ROWS + 1])
    else:
        connection.execute(f"insert into {table} (label) values ('a row')".encode())
    row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return LSN.parse(row[0])


def _changes(directory: Path, variant: _Variant, after_lsn: int) -> int:
    """Count the changes beyond ``after_lsn`` in the segments, or in the changelogs."""
    if variant.target == "segment":
        return sum(count_changes(directory / "staging", after_lsn).rows.values())
    paths = [directory / f"warehouse/changelog/public.{table}" for table in variant.tables]
    files = [path / file["path"] for path in paths for file in TableLog(path).refresh().files]
    return sum(pc.sum(pc.greater(column, after_lsn), min_count=0).as_py() for column in map(_end_lsn, files))


def _end_lsn(file: Path) -> Any:
    return pq.read_table(file, columns=["_cdc_end_lsn"], partitioning=None).column(0)


def _run(cluster: postgres.Cluster, directory: Path, variant: _Variant) -> tuple[list[float], int]:
    """Return how many milliseconds each transaction took, sorted, and how many of their changes have arrived."""
    command = [sys.executable, "-m", "spark_sink", *variant.command(directory), "-d", cluster.dsn]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    watches = variant.watches(directory)
    for watch in watches:
        watch.start()
    commits: list[tuple[int, float]] = []
    try:
        with cluster.connect() as connection:
            numbers = itertools.count()
            deadline = time.monotonic() + TIMEOUT_S
            first = None
            while first is None or not all(watch.seen and max(watch.seen) >= first for watch in watches):  # until it works
                for _ in watches:
                    first = _commit(connection, variant, next(numbers)) if first is None else first
                    _commit(connection, variant, next(numbers))
                time.sleep(0.1)
                if time.monotonic() > deadline:
                    raise SystemExit(f"nothing arrived within {TIMEOUT_S} s")
            skipped, begun = next(numbers), time.perf_counter()
            for number in range(variant.warm_up + TRANSACTIONS):
                time.sleep(max(0.0, begun + number / PER_SECOND - time.perf_counter()))
                lsn = _commit(connection, variant, skipped + number)
                commits.append((lsn, time.perf_counter()))
            deadline = time.monotonic() + TIMEOUT_S
            # The message after a commit is not a transaction.
            while any(max(watch.seen) < commits[-1][0] - 1000 * len(watches) for watch in watches):
                time.sleep(0.1)
                if time.monotonic() > deadline:
                    raise SystemExit(f"not all of it arrived within {TIMEOUT_S} s")
            while (arrived := _changes(directory, variant, commits[variant.warm_up - 1][0])) < TRANSACTIONS:
                time.sleep(0.1)
                if time.monotonic() > deadline:
                    break  # report.py says so
    finally:
        process.terminate()
        process.wait()
        for watch in watches:
            watch.stopped.set()
            watch.join()
    times = []
    for which, watch in enumerate(watches):
        ends, i = sorted(watch.seen), 0
        for number in range(variant.warm_up, len(commits) - len(watches)):
            if (skipped + number) % len(watches) != which:
                continue
            lsn, committed_at = commits[number]
            # The record of this commit ends at or before this position. The next transaction's record lies beyond it.
            while i < len(ends) - 1 and ends[i] < lsn - 64:
                i += 1
            times.append((watch.seen[ends[i]] - committed_at) * 1000)
    return sorted(times), arrived


def measure(runs: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each run."""
    with postgres.Cluster("15") as cluster:
        for run, variant in itertools.product(range(1, runs + 1), VARIANTS):
            with cluster.connect() as connection:
                _prepare(connection, variant)
            with tempfile.TemporaryDirectory() as directory:
                times, arrived = _run(cluster, Path(directory), variant)
            cluster.drop_slot("freshness")
            with cluster.connect() as connection:
                _clean(connection, variant)
            yield {
                "benchmark": "freshness",
                "transport": "unix",
                "variant": variant.name,
                "reference": False,
                "run": run,
                "rows": arrived,
                "rows_wanted": TRANSACTIONS,
                "p50_ms": round(statistics.median(times), 2),
                "p99_ms": round(times[int(len(times) * 0.99)], 2),
                "max_ms": round(times[-1], 2),
                "server": cluster.version_num,
            }
