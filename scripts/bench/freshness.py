"""Measures the time from a commit to its sealed segment and to the changelog: 100 transactions a second, --seal-interval 0.1.

The clock starts when COMMIT has returned. It stops when a segment that ends beyond the commit has its final name, or when the
changelog has a Delta commit with a position beyond it.
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

from cdcpipe.lsn import LSN

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["measure"]

PER_SECOND, TRANSACTIONS = 100, 2000
SEAL_INTERVAL_S = "0.1"
LOOK_S = 0.002
TIMEOUT_S = 120


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


class _Changelog(_Watch):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._log = directory / "warehouse/changelog/public.freshness_row/_delta_log"
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
    command: str
    watch: type[_Watch]
    warm_up: int


VARIANTS = [
    _Variant("commit to sealed segment", "land", _Segments, 200),
    # The first micro-batches of a session are slow. So the first 20 seconds do not count.
    _Variant("commit to changelog", "run", _Changelog, 2000),
]


def _run(cluster: postgres.Cluster, directory: Path, variant: _Variant) -> list[float]:
    """Return how many milliseconds each transaction took, sorted."""
    options = ["--publication", "freshness", "-c", "--staging", str(directory / "staging"), "--seal-interval", SEAL_INTERVAL_S]
    if variant.command == "run":
        options += ["--warehouse", str(directory / "warehouse"), "--snapshot", "never"]
    command = [sys.executable, "-m", "spark_sink", variant.command, "-d", cluster.dsn, "-S", "freshness", *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    watch = variant.watch(directory)
    watch.start()
    commits = []
    try:
        with cluster.connect() as connection:
            deadline = time.monotonic() + TIMEOUT_S
            while not watch.seen:  # until the pipeline works
                connection.execute("insert into freshness_row (label) values ('first')")
                time.sleep(0.1)
                if time.monotonic() > deadline:
                    raise SystemExit(f"nothing arrived within {TIMEOUT_S} s")
            begun = time.perf_counter()
            for number in range(variant.warm_up + TRANSACTIONS):
                time.sleep(max(0.0, begun + number / PER_SECOND - time.perf_counter()))
                connection.execute("insert into freshness_row (label) values ('a row')")
                now = time.perf_counter()
                row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
                assert row is not None
                commits.append((LSN.parse(row[0]), now))
            deadline = time.monotonic() + TIMEOUT_S
            while max(watch.seen) < commits[-1][0] - 1000:  # the message after a commit is not a transaction
                time.sleep(0.1)
                if time.monotonic() > deadline:
                    raise SystemExit(f"not all of it arrived within {TIMEOUT_S} s")
    finally:
        process.terminate()
        process.wait()
        watch.stopped.set()
        watch.join()
    ends = sorted(watch.seen)
    times, i = [], 0
    for lsn, committed_at in commits[variant.warm_up : -1]:
        # The record of this commit ends at or before this position. The next transaction's record lies beyond it.
        while i < len(ends) - 1 and ends[i] < lsn - 64:
            i += 1
        times.append((watch.seen[ends[i]] - committed_at) * 1000)
    return sorted(times)


def measure(runs: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each run."""
    with postgres.Cluster("15") as cluster:
        with cluster.connect() as connection:
            connection.execute("create table freshness_row (id serial primary key, label text)")
            connection.execute("create publication freshness for table freshness_row")
        for run, variant in itertools.product(range(1, runs + 1), VARIANTS):
            with tempfile.TemporaryDirectory() as directory:
                times = _run(cluster, Path(directory), variant)
            cluster.drop_slot("freshness")
            yield {
                "benchmark": "freshness",
                "transport": "unix",
                "variant": f"{variant.name}, --seal-interval {SEAL_INTERVAL_S}",
                "reference": False,
                "run": run,
                "rows": len(times) + 1,
                "rows_wanted": TRANSACTIONS,
                "p50_ms": round(statistics.median(times), 2),
                "p99_ms": round(times[int(len(times) * 0.99)], 2),
                "max_ms": round(times[-1], 2),
                "server": cluster.version_num,
            }
