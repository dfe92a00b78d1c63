"""Time from a commit to its place in a sealed segment: 100 transactions a second of one row, --seal-interval 0.1.

The clock starts when COMMIT has returned and stops when a segment that ends beyond it has its name.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import postgres

from cdcpipe.lsn import LSN

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["measure"]

PER_SECOND, TRANSACTIONS, WARM_UP = 100, 2000, 200
SEAL_INTERVAL_S = "0.1"
LOOK_S = 0.002
TIMEOUT_S = 60


class _Watch(threading.Thread):
    """Notes when each segment appears: its end and the time."""

    def __init__(self, staging: Path) -> None:
        super().__init__(daemon=True)
        self.staging = staging
        self.seen: dict[int, float] = {}
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(LOOK_S):
            for epoch in self.staging.glob("0*"):
                for name in os.listdir(epoch):
                    if name.endswith(".cdc"):
                        self.seen.setdefault(int(name[17:33], 16), time.perf_counter())


def _run(cluster: postgres.Cluster, staging: Path) -> list[float]:
    """Return the milliseconds that each transaction took, in order of size."""
    options = ["--publication", "freshness", "-c", "--staging", str(staging), "--seal-interval", SEAL_INTERVAL_S]
    command = [sys.executable, "-m", "spark_sink", "land", "-d", cluster.dsn, "-S", "freshness", *options]
    launcher = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    watch = _Watch(staging)
    watch.start()
    commits = []
    try:
        with cluster.connect() as connection:
            deadline = time.monotonic() + TIMEOUT_S
            while not watch.seen:  # until the launcher is at work
                connection.execute("insert into freshness_row (label) values ('first')")
                time.sleep(0.1)
                if time.monotonic() > deadline:
                    raise SystemExit(f"no segment within {TIMEOUT_S} s")
            begun = time.perf_counter()
            for number in range(WARM_UP + TRANSACTIONS):
                time.sleep(max(0.0, begun + number / PER_SECOND - time.perf_counter()))
                connection.execute("insert into freshness_row (label) values ('a row')")
                now = time.perf_counter()
                row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
                assert row is not None
                commits.append((LSN.parse(row[0]), now))
            deadline = time.monotonic() + TIMEOUT_S
            while max(watch.seen) < commits[-1][0] - 1000:  # what comes after a commit is no transaction
                time.sleep(0.1)
                if time.monotonic() > deadline:
                    raise SystemExit(f"not all of it was sealed within {TIMEOUT_S} s")
    finally:
        launcher.terminate()
        launcher.wait()
        watch.stopped.set()
        watch.join()
    ends = sorted(watch.seen)
    times, i = [], 0
    for lsn, committed_at in commits[WARM_UP:-1]:
        # The commit's record ends at or before this position; the next transaction's lies beyond it.
        while i < len(ends) - 1 and ends[i] < lsn - 64:
            i += 1
        times.append((watch.seen[ends[i]] - committed_at) * 1000)
    return sorted(times)


def measure(runs: int) -> Iterator[dict[str, Any]]:
    """Yield a line per run."""
    with postgres.Cluster("15") as cluster:
        with cluster.connect() as connection:
            connection.execute("create table freshness_row (id serial primary key, label text)")
            connection.execute("create publication freshness for table freshness_row")
        for run in range(1, runs + 1):
            with tempfile.TemporaryDirectory() as directory:
                times = _run(cluster, Path(directory) / "staging")
            cluster.drop_slot("freshness")
            yield {
                "benchmark": "freshness",
                "transport": "unix",
                "variant": "commit to sealed segment, --seal-interval 0.1",
                "reference": False,
                "run": run,
                "rows": len(times) + 1,
                "rows_wanted": TRANSACTIONS,
                "p50_ms": round(statistics.median(times), 2),
                "p99_ms": round(times[int(len(times) * 0.99)], 2),
                "max_ms": round(times[-1], 2),
                "server": cluster.version_num,
            }
