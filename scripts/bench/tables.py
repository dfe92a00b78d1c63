"""What a micro-batch costs that touches many tables: from sealed segments to their changelogs, then to their replicas.

    scripts/bench/run tables --tables 200 --touched 100 --runs 3

Each turn changes ten rows in each of the tables that are touched, in one transaction, lands that, and takes it to the tables with
a pipeline of its own, in one session; the first turn makes the tables and is not counted. Clock: from the pipeline's start to its
end, without and with replicas, in turns. Prints one JSON object.
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

from spark_sink import delta, session
from spark_sink.launcher import Launcher, LauncherConfig
from spark_sink.pipeline import Pipeline
from spark_sink.warehouse import Table, Warehouse

CREATE = "create table many_{number} (id bigint generated always as identity primary key, number integer, label text)"
CHANGE = "insert into many_{number} (number, label) select i, 'row ' || i from generate_series(1, 10) i"
NEVER_S = 86400.0


def land(dsn: str, staging: Path) -> None:
    """Bring what has been committed to the staging directory."""
    config = LauncherConfig("many", staging, ("many",), ("-d", dsn), create_slot=True, available_now=True)
    with Launcher(config) as launcher:
        launcher.wait()


def main() -> int:
    """Run the turns."""
    parser = argparse.ArgumentParser(prog="scripts/bench/run tables", description=__doc__)
    parser.add_argument("--tables", type=int, default=200)
    parser.add_argument("--touched", type=int, default=100)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    times: dict[str, list[float]] = {"changelogs": [], "changelogs and replicas": []}
    with postgres.Cluster("18") as cluster, tempfile.TemporaryDirectory() as directory:
        staging, warehouse = Path(directory) / "staging", Path(directory) / "warehouse"
        spark = session.build(app_name="bench")
        with cluster.connect() as connection:
            for number in range(args.tables):
                connection.execute(CREATE.format(number=number).encode())
            connection.execute("create publication many for all tables")
            land(cluster.dsn, staging)
            for turn in range(args.runs + 1):
                for name, found in times.items():
                    changes = [CHANGE.format(number=number) for number in range(args.touched)]
                    connection.execute(f"begin; {'; '.join(changes)}; commit".encode())
                    land(cluster.dsn, staging)
                    started = time.perf_counter()
                    pipeline = Pipeline(spark, staging, warehouse, replica_interval_s=NEVER_S).start(available_now=True)
                    assert pipeline.query is not None
                    pipeline.query.awaitTermination()
                    seconds = time.perf_counter() - started
                    pipeline.wait()
                    if name == "changelogs and replicas":
                        seconds = time.perf_counter() - started
                    if turn:
                        found.append(seconds)
        house = Warehouse(warehouse, "delta")
        paths = [
            of_table(Table("public", f"many_{n}")) for n in range(args.touched) for of_table in (house.changelog, house.replica)
        ]
        wanted = 10 * len(times) * (args.runs + 1)
        wrong = [str(path) for path in paths if delta.read(spark, path).count() != wanted]
        spark.stop()
    if wrong:
        raise SystemExit(f"not {wanted} rows in {', '.join(wrong)}")
    medians = {name: round(statistics.median(found), 3) for name, found in times.items()}
    per_table = {f"{name}, ms per table": round(1000 * median / args.touched, 1) for name, median in medians.items()}
    print(json.dumps({"tables": args.tables, "touched": args.touched, **medians, **per_table}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
