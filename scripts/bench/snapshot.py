"""Compares the initial snapshot of a table into Delta Lake with Spark's own JDBC read into Delta Lake, in one session.

    scripts/bench/run snapshot --rows 5000000 --runs 3

The table has the six columns of the other benchmarks. The snapshot writes a changelog and a replica, with the metadata columns.
JDBC writes the six columns once, and reads in the same number of partitions. They take turns; the first turn is a warm-up. The
clock runs from the start of the copy to its commits: session, slot and export exist before. The rows in the tables are counted.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import postgres

from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import sql as delta
from spark_sink.launcher.config import LauncherConfig
from spark_sink.launcher.launcher import Launcher
from spark_sink.schema.table import Table
from spark_sink.snapshot.copy import CHUNK_BYTES
from spark_sink.snapshot.initial import InitialSnapshot
from spark_sink.spark import session
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JDBC = "org.postgresql:postgresql:42.7.7"
TABLE = Table("public", "bench_row")
CREATE = """
create table bench_row (
    id bigint primary key, account integer not null, note text, amount numeric(12,2), at timestamptz, ok boolean);
insert into bench_row select g, g % 10000, 'note ' || md5(g::text), (g % 1000000) / 100.0,
    timestamptz '2026-01-01 00:00:00+00' + g * interval '1 second', g % 2 = 0 from generate_series(1, {rows}) g;
vacuum analyze bench_row;
create publication bench for table bench_row"""


def ours(spark: SparkSession, cluster: postgres.Cluster, scratch: Path, turn: int) -> tuple[float, int]:
    """Return the seconds that a snapshot took, and the rows of its changelog."""
    warehouse = Warehouse(scratch / f"warehouse{turn}", "delta")
    connection = ("-d", cluster.dsn)
    config = LauncherConfig(
        f"bench{turn}", scratch / f"staging{turn}", ("bench",), connection, create_slot=True, available_now=True
    )
    snapshot = InitialSnapshot(config, warehouse)
    snapshot.prepare(lambda: False)
    try:
        with Launcher(config) as launcher:
            launcher.wait()
        started = time.perf_counter()
        snapshot.start(spark)
        snapshot.wait()
        seconds = time.perf_counter() - started
    finally:
        snapshot.stop()
    rows = changelogs_of(spark, warehouse).read(TABLE).count()
    if delta.read(spark, warehouse.replica(TABLE)).count() != rows:
        msg = "changelog and replica differ"
        raise RuntimeError(msg)
    return seconds, rows


def jdbc(spark: SparkSession, cluster: postgres.Cluster, scratch: Path, turn: int, rows: int) -> tuple[float, int]:
    """Return the seconds that a JDBC read into a Delta table took, and its rows."""
    path = str(scratch / f"jdbc{turn}")
    with cluster.connect() as connection:
        found = connection.execute("select greatest(1, pg_relation_size('bench_row') / %s)", (CHUNK_BYTES,)).fetchone()
    assert found is not None
    options: dict[str, Any] = {
        "url": f"jdbc:postgresql://127.0.0.1:{cluster.port}/postgres",
        "user": "postgres",
        "driver": "org.postgresql.Driver",
        "dbtable": "bench_row",
        "partitionColumn": "id",
        "lowerBound": 1,
        "upperBound": rows,
        "numPartitions": found[0],
        "fetchsize": 10_000,
    }
    started = time.perf_counter()
    spark.read.format("jdbc").options(**options).load().write.format("delta").save(path)
    return time.perf_counter() - started, spark.read.format("delta").load(path).count()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    conf = {
        "spark.jars": "",
        "spark.jars.packages": f"{session.DELTA_PACKAGES},{JDBC}",
        # The session's own list of packages not to fetch has all of org.*.
        "spark.jars.excludes": session.DELTA_EXCLUDES.replace("org.*:*", "org.antlr:*,org.checkerframework:*"),
    }
    scratch = Path(tempfile.mkdtemp(prefix="cdcpipe-bench-"))
    seconds: dict[str, list[float]] = {"snapshot": [], "jdbc": []}
    try:
        with postgres.Cluster("18", settings={"fsync": "off"}) as cluster:
            with cluster.connect() as connection:
                for statement in CREATE.format(rows=arguments.rows).split(";"):
                    connection.execute(statement)
            spark = session.build(app_name="bench", conf=conf)
            for turn in range(arguments.runs + 1):
                results = {
                    "snapshot": ours(spark, cluster, scratch, turn),
                    "jdbc": jdbc(spark, cluster, scratch, turn, arguments.rows),
                }
                for name, (wall_s, rows) in results.items():
                    if rows != arguments.rows:
                        print(f"{name}: {rows} rows instead of {arguments.rows}", file=sys.stderr)
                        return 1
                    if turn:
                        seconds[name].append(wall_s)
            spark.stop()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    ratios = [theirs / mine for mine, theirs in zip(seconds["snapshot"], seconds["jdbc"], strict=True)]
    rates = {name: round(arguments.rows / statistics.median(walls)) for name, walls in seconds.items()}
    print(
        json.dumps(
            {"rows": arguments.rows, "rows_per_s": rates, "times_jdbc": round(statistics.median(ratios), 2), "seconds": seconds}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
