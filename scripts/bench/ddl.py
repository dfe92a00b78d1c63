"""Measures what captured DDL costs a statement: its median with the event triggers of `cdcpipe ddl install` and without.

    scripts/bench/run ddl --turns 200

The statements run in one session, in turns with ``event_triggers = on`` and ``off`` (PostgreSQL 17 and newer). The database has 200
other tables. Prints a JSON object for each statement, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import postgres

from cdcpipe.ddl import script

if TYPE_CHECKING:
    import psycopg

OTHERS = 200
PARTITIONS = 20
WARM_UP = 10

_COLUMNS = "id int primary key, a int, b text, c numeric(12,2), d timestamptz"
STATEMENTS = {
    "alter column set default": ("alter table plain alter a set default 1", "alter table plain alter a drop default"),
    "add and drop column": ("alter table plain add e int default 7", "alter table plain drop e"),
    "create and drop table": (f"create table made ({_COLUMNS})", "drop table made"),
    f"alter column set default, {PARTITIONS} partitions": (
        "alter table parts alter a set default 1",
        "alter table parts alter a drop default",
    ),
    "create and drop temporary table": ("create temp table made (id int)", "drop table made"),
    "create and drop function": ("create function f() returns int language sql as 'select 1'", "drop function f()"),
    "insert, no DDL": ("insert into plain values (1)", "delete from plain"),
}


def prepare(connection: psycopg.Connection[Any]) -> None:
    """Create the tables, and install the capture."""
    for number in range(OTHERS):
        connection.execute(f"create table other_{number} ({_COLUMNS})")
    connection.execute(f"create table plain ({_COLUMNS})")
    connection.execute(f"create table parts ({_COLUMNS}) partition by range (id)")
    for number in range(PARTITIONS):
        connection.execute(f"create table parts_{number} partition of parts for values from ({number}) to ({number + 1})")
    with connection.transaction():
        connection.execute(script.install("cdcpipe", script.Settings()))


def measure(connection: psycopg.Connection[Any], statements: tuple[str, ...], turns: int) -> dict[str, float]:
    """Return the medians of a statement's time with and without the triggers, and the median ratio of two neighbours."""
    taken: dict[str, list[float]] = {"on": [], "off": []}
    for _ in range(turns):
        for setting, times in taken.items():
            connection.execute(f"set event_triggers = {setting}")
            for statement in statements:
                started = time.perf_counter()
                connection.execute(statement)
                times.append(1000 * (time.perf_counter() - started))
    skipped = WARM_UP * len(statements)
    on, off = (statistics.median(times[skipped:]) for times in taken.values())
    ratio = statistics.median(one / other for one, other in zip(taken["on"][skipped:], taken["off"][skipped:], strict=True))
    return {"with_ms": round(on, 3), "without_ms": round(off, 3), "more_ms": round(on - off, 3), "ratio": round(ratio, 2)}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="scripts/bench/run ddl", description=__doc__)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--postgres", choices=("17", "18"), default="18")
    args = parser.parse_args()
    with postgres.Cluster(args.postgres) as cluster, cluster.connect() as connection:
        connection.prepare_threshold = None
        prepare(connection)
        for name, statements in STATEMENTS.items():
            found = measure(connection, statements, args.turns + WARM_UP)
            print(json.dumps({"benchmark": "ddl", "statement": name} | found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
