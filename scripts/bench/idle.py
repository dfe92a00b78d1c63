"""Measures an idle `cdcpipe-spark run`: the CPU time of all its processes, in percent of one core, and their memory.

    scripts/bench/run idle --seconds 60

First the pipeline works: it takes some transactions to the replica. Then it idles for two minutes before the measurement. By then
Spark has ended the Python processes that it keeps for a minute, and the JVM has finished compiling. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import postgres
import processes
import psutil

from spark_sink.delta import log as delta_log

REST_S = 120.0
TRANSACTIONS = 500
TIMEOUT_S = 600.0


def times(root: int) -> dict[psutil.Process, tuple[str, float]]:
    """Return the role and the CPU time in seconds of each process."""
    found = {}
    for process, command in processes.running(root).items():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process] = processes.role(command), sum(process.cpu_times()[:2])
    return found


def memory(root: int) -> dict[str, float]:
    """Return the memory of each role in MiB. Each of N processes that share a page counts a N-th of it (Linux's PSS)."""
    found: dict[str, float] = defaultdict(float)
    for process, command in processes.running(root).items():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[processes.role(command)] += process.memory_full_info().pss / (1 << 20)
    return {name: round(size, 1) for name, size in found.items()} | {"all": round(sum(found.values()), 1)}


def measure(
    cluster: postgres.Cluster, directory: Path, seconds: float, more: list[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the CPU time of each role in percent of one core, and its memory in MiB."""
    options = ["--staging", str(directory / "staging"), "--warehouse", str(directory / "warehouse"), "--seal-interval", "0.1"]
    command = [
        sys.executable,
        "-m",
        "spark_sink",
        "run",
        "-d",
        cluster.dsn,
        "-S",
        "idle",
        "--publication",
        "idle",
        "-c",
        *options,
        *more,
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        with cluster.connect() as connection:
            for _ in range(TRANSACTIONS):
                connection.execute("insert into idle (label) values ('a row')")
        while (delta_log.newest_lsn(directory / "warehouse/replica/public.idle") or 0) <= 0:
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit(f"nothing arrived in the replica within {TIMEOUT_S:.0f} s")
            time.sleep(1)
        time.sleep(REST_S)
        return percent(process.pid, seconds), memory(process.pid)
    finally:
        process.terminate()
        process.wait()


def percent(root: int, seconds: float) -> dict[str, float]:
    """Return the CPU time of each role in the next ``seconds``, in percent of one core, without processes that end meanwhile."""
    before, started = times(root), time.monotonic()
    time.sleep(seconds)
    after, took_s = times(root), time.monotonic() - started
    found: dict[str, float] = defaultdict(float)
    for each, (name, used_s) in after.items():
        found[name] += 100 * (used_s - before.get(each, (name, 0.0))[1]) / took_s
    return {name: round(share, 2) for name, share in found.items()} | {"all": round(sum(found.values()), 2)}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="scripts/bench/run idle", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--postgres", choices=postgres.VERSIONS, default="18")
    parser.add_argument("options", nargs="*", help="more options for cdcpipe-spark run, after --")
    args = parser.parse_args()
    with postgres.Cluster(args.postgres) as cluster, tempfile.TemporaryDirectory() as directory:
        with cluster.connect() as connection:
            connection.execute("create table idle (id bigint generated always as identity primary key, label text)")
            connection.execute("create publication idle for table idle")
        used, mib = measure(cluster, Path(directory), args.seconds, args.options)
        print(json.dumps({"benchmark": "idle", "options": args.options, "percent": used, "mib": mib}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
