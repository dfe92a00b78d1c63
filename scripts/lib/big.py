"""scripts/soak --big CASE: takes large data of one kind to the tables. Measures, prints and limits the memory that this needs.

    transaction   one transaction of millions of rows, which the server streams before it commits
    columns       a table of 1,600 columns, as many as PostgreSQL allows
    tables        hundreds of tables, all changed in one transaction and in many
    value         a value of 200 MB, then an update that does not change it

`cdcpipe-spark land` takes everything to the staging log. Then `cdcpipe-spark run` takes it to the tables. So the memory of each is
measured apart. At the end `cdcpipe-spark verify` compares. The figure is the memory of all processes at the moment when their sum
is largest. Memory that several processes share, such as segments of the staging log, counts in parts (the kernel's PSS).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import postgres
import processes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CASES", "Case", "play"]

_MB = 1_000_000
_SAMPLE_S = 0.2

_VALUE_BYTES = 200 * _MB


@dataclass(frozen=True)
class Case:
    """A case at a scale of 1: statements, each of which is a transaction, and the limits for memory in MB.

    ``launcher_mb`` is for the streamer and the launcher together, ``driver_mb`` for all of `cdcpipe-spark run`: Python, JVM,
    workers.
    """

    make: Callable[[float], tuple[list[str], list[str]]]
    launcher_mb: int
    driver_mb: int


def _transaction(scale: float) -> tuple[list[str], list[str]]:
    rows = int(10_000_000 * scale)
    return (
        ["create table app.big (id bigint primary key, at timestamptz, n integer, name text)"],
        [f"insert into app.big select i, now(), i % 1000, 'name ' || i from generate_series(1, {rows}) i"],
    )


def _columns(scale: float) -> tuple[list[str], list[str]]:
    rows = max(2, int(1000 * scale))
    # Most columns are small, because a row must fit into a page.
    kinds = ["smallint", "boolean", "integer", "date"]
    columns = [f"c{number} {kinds[number % len(kinds)]}" for number in range(1599)]
    values = {"smallint": "i % 99", "boolean": "i % 2 = 0", "integer": "i", "date": "date '2026-01-01' + i % 99"}
    listed = ", ".join(values[kinds[number % len(kinds)]] for number in range(1599))
    return (
        [f"create table app.wide (id integer primary key, {', '.join(columns)})"],
        [
            f"insert into app.wide select i, {listed} from generate_series(1, {rows}) i",
            "update app.wide set c0 = 0, c1598 = c1598 + 1 where id % 2 = 0",
        ],
    )


def _tables(scale: float) -> tuple[list[str], list[str]]:
    names = [f"app.t{number}" for number in range(max(2, int(2000 * scale)))]
    return (
        [f"create table {name} (id integer primary key, a text)" for name in names],
        [
            "; ".join(["begin", *(f"insert into {name} values (1, 'a'), (2, 'b')" for name in names), "commit"]),
            *(f"update {name} set a = a || a where id = 1" for name in names),
        ],
    )


def _value(scale: float) -> tuple[list[str], list[str]]:
    size = int(_VALUE_BYTES * scale)
    return (
        [
            "create table app.values (id integer primary key, a integer, t text)",
            "alter table app.values alter t set storage external",
        ],
        [
            f"insert into app.values values (1, 1, repeat('0123456789', {size // 10})), (2, 1, 'small')",
            "update app.values set a = a + 1",
        ],
    )


CASES = {
    # Most of it is Spark's JVM, which takes all the memory that it is given.
    "transaction": Case(_transaction, launcher_mb=250, driver_mb=4000),
    "columns": Case(_columns, launcher_mb=250, driver_mb=3000),
    "tables": Case(_tables, launcher_mb=250, driver_mb=3000),
    # A value is one record. The connection, the streamer and the launcher each hold all of it.
    "value": Case(_value, launcher_mb=250 + 6 * _VALUE_BYTES // _MB, driver_mb=6000),
}


class _Memory(threading.Thread):
    """Samples the memory of a process and its descendants by role, and keeps the largest sum."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root = pid
        self._over = threading.Event()
        self._most: Counter[str] = Counter()

    def run(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            self._most = max(self._most, self._now(), key=Counter.total)

    def _now(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for process, command in processes.running(self._root).items():
            # A process that has just ended must not hide the processes after it.
            with contextlib.suppress(OSError):
                rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
                share = sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))
                found[processes.role(command)] += share
        return found

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def most(self) -> dict[str, int]:
        """Return the memory in MB by role. Several processes of one role are added up."""
        return {role: size // _MB for role, size in self._most.items()}


def _run(log: Path, *arguments: str) -> tuple[float, dict[str, int]]:
    """Run a subcommand until it ends. Return its seconds and its memory in MB."""
    started = time.monotonic()
    with log.open("ab") as stream:
        command = [sys.executable, "-P", "-m", "spark_sink", *arguments]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=processes.environment())
        with _Memory(process.pid) as memory:
            code = process.wait()
    if code != 0:
        raise BigError(f"cdcpipe-spark {arguments[0]} ended with {code}; the end of {log}:\n{log.read_text()[-4000:]}")
    return time.monotonic() - started, memory.most()


class BigError(Exception):
    """A case failed or exceeded its limit for memory."""


def play(name: str, scale: float, cluster: postgres.Cluster, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Play a case in a database of its own, and return its figures. Raises BigError if it fails or exceeds its limits."""
    case = CASES[name]
    setup, statements = case.make(scale)
    log, staging, warehouse = directory / "log", directory / "staging", directory / "warehouse"
    with cluster.database() as database, database.connect() as connection:
        connection.execute("create schema app; create publication big for tables in schema app")
        for statement in setup:
            connection.execute(statement.encode())
        options = ["-d", database.dsn, "-S", f"big_{database.name}", "--publication", "big", "--staging", str(staging)]
        _run(log, "land", *options, "-c", "--available-now")  # this run makes the slot, before the changes
        for statement in statements:
            connection.execute(statement.encode())
        say(f"{name}: committed on the server; landing")
        land_s, land = _run(log, "land", *options, "--available-now")
        say(f"landed in {land_s:.0f} s, {_shown(land)}")
        run_s, run = _run(log, "run", *options, "--warehouse", str(warehouse), "--snapshot", "never", "--available-now")
        say(f"in the tables after {run_s:.0f} s, {_shown(run)}")
        verify_s, _ = _run(log, "verify", "-d", database.dsn, "--warehouse", str(warehouse))
        say(f"verify: all equal, {verify_s:.0f} s")
    for what, used, bound in (("land", sum(land.values()), case.launcher_mb), ("run", sum(run.values()), case.driver_mb)):
        if used > bound:
            raise BigError(f"{what} took {used} MB, and its bound is {bound} MB")
    return {"case": name, "scale": scale, "land_s": land_s, "land_mb": land, "run_s": run_s, "run_mb": run}


def _shown(memory: dict[str, int]) -> str:
    return f"{sum(memory.values())} MB ({', '.join(f'{role} {size}' for role, size in sorted(memory.items()))})"
