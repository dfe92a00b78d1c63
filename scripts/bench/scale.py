"""Measures how the cost of the pipeline grows: with rows, with columns, with the size of transactions, with executors.

    scripts/bench/run scale                          # everything, in about 15 minutes
    scripts/bench/run scale --rows 100000 --runs 1   # a quick look

Each point lands its changes in a staging directory, and a fresh process brings them to changelog and replica, several times. The
first time does not count, because the JVM compiles its code then. One dimension is changed at a time; the others keep their
values of the first point. 60 % of the changes are inserts, 30 % updates, 10 % deletes.

With executors the machine's cores are the limit, not Spark. So the CPU time of the executors and that of the driver are measured
apart: what `local-cluster` shows is how the work divides, and the driver's share is what more executors do not make shorter.
Prints a JSON object for each point.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import postgres
import processes
import psutil
import pyspark

from spark_sink.delta import log as delta_log
from spark_sink.launcher.config import LauncherConfig
from spark_sink.launcher.launcher import Launcher
from spark_sink.pipeline.pipeline import Pipeline
from spark_sink.replica import merge
from spark_sink.schema.table import Table
from spark_sink.spark import session
from spark_sink.staging.log import Position, list_segments
from spark_sink.warehouse.warehouse import Warehouse

TABLE = Table("public", "scale")
NEVER_S = 86400.0
ROOT = Path(__file__).parents[2]

COLUMNS = {
    "integer": "100000 + i % 900000",
    "text": "'row ' || left(md5(i::text), 16)",
    "numeric(12, 2)": "(i % 1000000) / 100.0 + 1000000",
    "timestamptz": "timestamptz '2026-01-01 00:00:00.123456+00' + i * interval '1 second'",
    "boolean": "i % 2 = 0",
}
"""The columns after the key, again and again."""

# Of each transaction 60 % of the changes insert rows, 30 % update rows of the previous transaction, 10 % delete such rows.
INSERT = "insert into scale select i, {values} from generate_series({first}, {last}) i"
LOAD = f"""
do $$
declare new bigint := {{size}} * 6 / 10;
begin
  for batch in 1 .. {{transactions}} loop
    {INSERT.format(values="{values}", first="batch * new + 1", last="(batch + 1) * new")};
    update scale set c1 = c1 + 1 where id > (batch - 1) * new and id <= (batch - 1) * new + {{size}} * 3 / 10;
    delete from scale where id > batch * new - {{size}} / 10 and id <= batch * new;
    commit;
  end loop;
end $$
"""


@dataclass(frozen=True, slots=True)
class Point:
    """What is brought to the tables, and by which Spark."""

    rows: int
    columns: int = 6
    transaction: int = 1000
    """Changes in each."""
    master: str = "local[2]"


def points(rows: int) -> dict[str, list[Point]]:
    """Return the points of each dimension."""
    first = Point(rows)
    large = replace(first, rows=4 * rows)
    return {
        "rows": [replace(first, rows=each) for each in (rows // 4, rows, 4 * rows)],
        "columns": [replace(first, columns=each) for each in (6, 24, 96)],
        "transaction": [replace(first, transaction=each) for each in (10, 1000, rows // 10, rows)],
        "executors": [replace(large, master=f"local-cluster[{each},1,1024]") for each in (1, 2, 3, 4)],
    }


def land(point: Point, staging: Path) -> dict[str, float]:
    """Let a new server write the changes, and land them. Return the bytes of the segments and the seconds that landing took."""
    kinds = list(itertools.islice(itertools.cycle(COLUMNS.items()), point.columns - 1))
    columns = ", ".join(f"c{number} {kind}" for number, (kind, _) in enumerate(kinds, 1))
    values = ", ".join(value for _, value in kinds)
    former = INSERT.format(values=values, first=1, last=point.transaction * 6 // 10)
    load = LOAD.format(size=point.transaction, transactions=point.rows // point.transaction, values=values)
    with postgres.Cluster("18", settings={"max_wal_size": "32GB"}) as cluster, cluster.connect() as connection:
        connection.execute(f"create table scale (id bigint primary key, {columns})".encode())
        connection.execute("create publication scale for table scale")
        connection.execute(former.encode())  # what the first transaction updates and deletes
        connection.execute("select pg_create_logical_replication_slot('scale', 'pgoutput')")
        connection.execute(load.encode())
        config = LauncherConfig("scale", staging, ("scale",), ("-d", cluster.dsn), available_now=True)
        started = time.perf_counter()
        with Launcher(config) as launcher:
            launcher.wait()
        took_s = time.perf_counter() - started
    return {"land_s": round(took_s, 2), "mib": round(sum(each.size() for each in list_segments(staging)) / (1 << 20), 1)}


def used() -> Counter[str]:
    """Return the CPU seconds of this process and its children so far: those of the driver, and those of its executors.

    In `local` mode the executors are the driver's JVM and its Python workers; only the workers count as executors.
    """
    found: Counter[str] = Counter()
    for process, command in processes.running(os.getpid()).items():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            is_driver = process.pid == os.getpid() or processes.role(command) == "JVM"
            found["driver" if is_driver else "executors"] += sum(times[:2] if is_driver else times[:4])
    return found


def spark_home(directory: Path) -> Path:
    """Return a SPARK_HOME below which executors of a local cluster can write."""
    directory.mkdir()
    for path in Path(pyspark.__file__).parent.iterdir():
        if path.name != "work":
            (directory / path.name).symlink_to(path)
    return directory


def bring(point: Point, staging: Path, scratch: Path, runs: int) -> dict[str, float]:
    """Bring the changes to changelog and replica, ``runs`` times and once before. Return the medians, in seconds."""
    os.environ["SPARK_HOME"] = str(spark_home(scratch / "spark"))
    os.environ["PYTHONPATH"] = str(ROOT)
    logging.basicConfig(level=logging.ERROR)
    spark = session.build(app_name="bench", master=point.master, conf={"spark.executor.memory": "1g"})
    house = Warehouse(scratch / "warehouse", "delta")
    all_found: list[dict[str, float]] = []
    for _ in range(runs + 1):
        shutil.rmtree(house.root, ignore_errors=True)
        before, started = used(), time.perf_counter()
        pipeline = Pipeline(spark, staging, house.root, replica_interval_s=NEVER_S).start(available_now=True)
        assert pipeline.query is not None
        pipeline.query.awaitTermination()
        changelog_s, after = time.perf_counter() - started, used()
        lsn = delta_log.newest_lsn(house.changelog(TABLE))
        assert lsn is not None
        started = time.perf_counter()
        merge.merge_changes(spark, house, TABLE, Position(1, lsn))
        all_found.append(
            {
                "changelog_s": changelog_s,
                "driver_cpu_s": after["driver"] - before["driver"],
                "executors_cpu_s": after["executors"] - before["executors"],
                "replica_s": time.perf_counter() - started,
            }
        )
        pipeline.stop()
    rows = delta_log.read_table(house.changelog(TABLE))
    if rows is None or rows.rows != point.rows:
        raise SystemExit(f"the changelog has {rows and rows.rows} rows, not {point.rows}")
    spark.stop()
    return {name: round(statistics.median(each[name] for each in all_found[1:]), 2) for name in all_found[0]}


def measured(point: Point, runs: int) -> dict[str, float]:
    """Return the figures of a point."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        landed = land(point, root / "staging")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            brought = pool.submit(bring, point, root / "staging", root, runs).result()
    return landed | brought


def main() -> int:
    """Measure each point once, and print it for each dimension that it is in."""
    parser = argparse.ArgumentParser(prog="scripts/bench/run scale", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="changes of the first point; in multiples of 1000")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--dimension", choices=sorted(points(1000)), action="append", help="only this one")
    args = parser.parse_args()
    found: dict[Point, dict[str, float]] = {}
    for dimension, of_dimension in points(args.rows).items():
        if args.dimension and dimension not in args.dimension:
            continue
        for point in of_dimension:
            if point not in found:
                found[point] = measured(point, args.runs)
            print(json.dumps({"benchmark": "scale", "dimension": dimension, **asdict(point), **found[point]}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
