"""Measures what a micro-batch costs that touches many tables: from sealed segments to the changelogs, then to the replicas.

    scripts/bench/run tables --tables 200 --touched 100 --runs 3
    scripts/bench/run tables --tables 1 --touched 1 --rows 5000000

In each turn one transaction inserts, updates and deletes ten rows in each touched table. The launcher lands it, and a running
pipeline takes it to the tables. The clock runs from the end of landing until the last table has the changes: first only in the
changelogs, then with a pipeline that merges each micro-batch into the replicas. The first turn of each is not counted, because it
creates the tables. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

import postgres

from spark_sink.delta import log as delta_log
from spark_sink.delta.log import read_table
from spark_sink.launcher.config import LauncherConfig
from spark_sink.launcher.launcher import Launcher
from spark_sink.pipeline.pipeline import Pipeline
from spark_sink.schema.table import Table
from spark_sink.spark import session
from spark_sink.staging.log import log_end
from spark_sink.warehouse.warehouse import Warehouse

CREATE = "create table many_{number} (id bigint generated always as identity primary key, number integer, label text)"
INSERT = "insert into many_{number} (number, label) select i, 'row ' || i from generate_series(1, {rows}) i"
CHANGE = (
    "insert into many_{number} (number, label) select i, 'row ' || i from generate_series(1, 6) i; "
    "update many_{number} set number = number + 1 where id in (select id from many_{number} order by id desc limit 3); "
    "delete from many_{number} where id = (select min(id) from many_{number})"
)
CHANGES, MORE_ROWS = 10, 5
"""What that is, and leaves."""
NEVER_S = 86400.0
MODES = {"changelogs": NEVER_S, "changelogs and replicas": 0.0}
"""The replicas' interval."""


def land(dsn: str, staging: Path) -> int:
    """Land everything committed so far in the staging directory. Return the log's end."""
    config = LauncherConfig("many", staging, ("many",), ("-d", dsn), create_slot=True, available_now=True)
    with Launcher(config) as launcher:
        launcher.wait()
    end = log_end(staging)
    assert end is not None
    return int(end.lsn)


def wait_for(paths: list[Path], lsn: int) -> None:
    """Wait until each of the tables has reached a position."""
    for path in paths:
        while (delta_log.newest_lsn(path) or 0) < lsn:
            time.sleep(0.005)


def main() -> int:
    """Run the turns."""
    parser = argparse.ArgumentParser(prog="scripts/bench/run tables", description=__doc__)
    parser.add_argument("--tables", type=int, default=200)
    parser.add_argument("--touched", type=int, default=100)
    parser.add_argument("--rows", type=int, default=10, help="that each table has before")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    times: dict[str, list[float]] = {name: [] for name in MODES}
    with postgres.Cluster("18") as cluster, tempfile.TemporaryDirectory() as directory:
        staging, warehouse = Path(directory) / "staging", Path(directory) / "warehouse"
        house = Warehouse(warehouse, "delta")
        touched = [Table("public", f"many_{number}") for number in range(args.touched)]
        changes = "; ".join(CHANGE.format(number=number) for number in range(args.touched))
        spark = session.build(app_name="bench")
        with cluster.connect() as connection:
            for number in range(args.tables):
                connection.execute(CREATE.format(number=number).encode())
            connection.execute("create publication many for all tables")
            land(cluster.dsn, staging)
            for number in range(args.touched):
                connection.execute(INSERT.format(number=number, rows=args.rows).encode())
            for name, interval_s in MODES.items():
                of_table = house.replica if name.endswith("replicas") else house.changelog
                with Pipeline(spark, staging, warehouse, replica_interval_s=interval_s, trigger_interval_s=0.05):
                    for turn in range(args.runs + 1):
                        connection.execute(f"begin; {changes}; commit".encode())
                        end = land(cluster.dsn, staging)
                        started = time.perf_counter()
                        wait_for([of_table(table) for table in touched], end)
                        if turn:
                            times[name].append(time.perf_counter() - started)
        spark.stop()
        turns = len(MODES) * (args.runs + 1)
        wanted = {house.changelog: args.rows + CHANGES * turns, house.replica: args.rows + MORE_ROWS * turns}
        wrong = []
        for of_table, rows in wanted.items():
            for path in map(of_table, touched):
                state = read_table(path)
                if state is None or state.rows != rows:
                    wrong.append(f"{path} has not {rows} rows")
    if wrong:
        raise SystemExit("; ".join(wrong))
    medians = {name: round(statistics.median(found), 3) for name, found in times.items()}
    per_table = {f"{name}, ms per table": round(1000 * median / args.touched, 1) for name, median in medians.items()}
    print(json.dumps({"tables": args.tables, "touched": args.touched, "rows": args.rows, **medians, **per_table}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
