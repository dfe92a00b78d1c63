"""Measures `cdcpipe-spark run` with many tables, each of which changes now and then: its CPU time, and whether it keeps up.

    scripts/bench/run many --tables 1000 --every 10

Each table gets a transaction of one row in every ten seconds, evenly spread over the tables. The measurement begins when all tables
have a replica and the load has run for a while. At its end the load stops, and the clock runs until every replica has its last
change: a pipeline that keeps up needs about as long as its interval. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import postgres
from idle import memory, percent

from spark_sink.delta import log as delta_log

TIMEOUT_S = 900.0


class Load(threading.Thread):
    """Inserts a row into one table after the other, each ``every_s`` seconds, until `stop`."""

    def __init__(self, cluster: postgres.Cluster, tables: int, every_s: float) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self._tables = tables
        self._every_s = every_s
        self._over = threading.Event()
        self.behind_s = 0.0
        """The most that the load itself was late."""

    def run(self) -> None:
        """Insert until `stop`."""
        began, number = time.monotonic(), 0
        with self._cluster.connect() as connection:
            while not self._over.is_set():
                connection.execute(f"insert into many_{number % self._tables} (label) values ('a row')".encode())
                number += 1
                wait_s = began + number * self._every_s / self._tables - time.monotonic()
                self.behind_s = max(self.behind_s, -wait_s)
                time.sleep(max(0.0, wait_s))

    def stop(self) -> None:
        """End the load."""
        self._over.set()
        self.join()


def wait_for(replicas: list[Path], lsn: int) -> float:
    """Wait until each replica has reached a position. Return how long that took in seconds."""
    started = time.monotonic()
    for path in replicas:
        while (delta_log.newest_lsn(path) or 0) < lsn:
            if time.monotonic() - started > TIMEOUT_S:
                raise SystemExit(f"{path} is behind after {TIMEOUT_S:.0f} s")
            time.sleep(0.05)
    return time.monotonic() - started


def touch_all(cluster: postgres.Cluster, tables: int) -> int:
    """Insert a row into each table in one transaction. Return an LSN that is not after its end."""
    with cluster.connect() as connection:
        found = connection.execute("select pg_current_wal_lsn() - '0/0'").fetchone()
        inserts = "; ".join(f"insert into many_{number} (label) values ('a row')" for number in range(tables))
        connection.execute(f"begin; {inserts}; commit".encode())
    assert found is not None
    return int(found[0])


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="scripts/bench/run many", description=__doc__)
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two transactions of a table")
    parser.add_argument("--warm-up", type=float, default=120.0, help="seconds of load before the measurement")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("options", nargs="*", help="more options for cdcpipe-spark run, after --")
    args = parser.parse_args()
    with postgres.Cluster("18") as cluster, tempfile.TemporaryDirectory() as directory:
        with cluster.connect() as connection:
            for number in range(args.tables):
                connection.execute(f"create table many_{number} (id bigserial primary key, label text)".encode())
            connection.execute("create publication many for all tables")
        root = Path(directory)
        command = [sys.executable, "-m", "spark_sink", "run", "-d", cluster.dsn, "-S", "many", "--publication", "many", "-c"]
        command += ["--staging", str(root / "staging"), "--warehouse", str(root / "warehouse"), *args.options]
        replicas = [root / f"warehouse/replica/public.many_{number}" for number in range(args.tables)]
        with (root / "stderr").open("w") as said:
            process = subprocess.Popen(command, stderr=said)
        load = Load(cluster, args.tables, args.every)
        try:
            first_s = wait_for(replicas, touch_all(cluster, args.tables))
            load.start()
            time.sleep(args.warm_up)
            used = percent(process.pid, args.seconds)
            mib = memory(process.pid)
            load.stop()
            last_s = wait_for(replicas, touch_all(cluster, args.tables))
        finally:
            process.terminate()
            process.wait()
            print((root / "stderr").read_text(), file=sys.stderr, end="")
    given = {"tables": args.tables, "every_s": args.every, "options": args.options}
    times = {"first_s": round(first_s, 1), "last_s": round(last_s, 1), "load_behind_s": round(load.behind_s, 2)}
    print(json.dumps({"benchmark": "many", **given, **times, "percent": used, "mib": mib}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
