"""Measures a merge of many changes that are spread over a large replica or history, beside Spark's MERGE of the same changes.

    scripts/bench/run merge --rows 50000000 --changes 1000000
    scripts/bench/run merge --key uuid --cluster
    scripts/bench/run merge --rows 1000000 --changes 1000 --into history

A snapshot makes the replica, and the first round the history. One UPDATE changes every so many-th row, and a pipeline takes the
changes to the changelog. The clock runs while they are merged from there into the table: first on a copy of the warehouse with
Delta's MERGE, for which Spark has to reduce the changes as well, then as `run` does it. In each turn another UPDATE follows. Prints
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import postgres

from spark_sink.launcher.config import LauncherConfig
from spark_sink.pipeline.config import RunConfig
from spark_sink.pipeline.runner import run
from spark_sink.replica import history_table, merge
from spark_sink.schema.table import Table
from spark_sink.spark import session
from spark_sink.staging.log import Position
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEYS = {"integer": "i", "uuid": "md5(i::text)::uuid"}
TABLE = Table("public", "large")
NEVER_S = 86400.0


def copy_of(house: Warehouse, target: Path) -> Warehouse:
    """Return a copy of a warehouse. Its data files are the same ones, because nobody writes into a data file."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(house.root, target, copy_function=lambda old, new: _link_or_copy(Path(old), Path(new)))
    return Warehouse(target, "delta")


def _link_or_copy(old: Path, new: Path) -> None:
    if old.suffix == ".parquet":
        os.link(old, new)
    else:
        shutil.copy2(old, new)


def path_of(house: Warehouse, into: str) -> Path:
    """Return the directory of the table to merge into."""
    return house.replica(TABLE) if into == "replica" else house.history(TABLE)


def bring(spark: SparkSession, house: Warehouse, until: Position, into: str) -> float:
    """Bring the replica or the history to a position. Return the seconds that took."""
    started = time.perf_counter()
    if into == "replica":
        merge.bring(spark, house, TABLE, until)
    else:
        history_table.bring(spark, house, TABLE, until, TableLock(house.root))
    took_s = time.perf_counter() - started
    reached = house.format.lsn(path_of(house, into))
    if reached != until.lsn:
        raise SystemExit(f"the {into} is at {reached}, not at {until.lsn}")
    return took_s


def digest(spark: SparkSession, house: Warehouse, into: str) -> tuple[int, int]:
    """Return the number of rows and a sum over their values."""
    values = "id, n" if into == "replica" else "id, n, from_lsn, to_lsn"
    rows = spark.read.format("delta").load(str(path_of(house, into)))
    row = rows.selectExpr("count(*)", f"sum(xxhash64({values}) % 1000003)").collect()[0]
    return row[0], row[1]


def main() -> int:
    """Run the turns."""
    parser = argparse.ArgumentParser(prog="scripts/bench/run merge", description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000_000)
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--key", choices=sorted(KEYS), default="integer")
    parser.add_argument("--cluster", action="store_true", help="sort the replica by key first, as run --cluster-replicas does")
    parser.add_argument("--into", choices=["replica", "history"], default="replica")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    step = args.rows // args.changes
    kind = "bigint" if args.key == "integer" else "uuid"
    times: dict[str, list[float]] = {"spark": [], "cdcpipe": []}
    with postgres.Cluster("18") as cluster, tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        launcher = LauncherConfig("large", root / "staging", ("large",), ("-d", cluster.dsn), create_slot=True, available_now=True)
        config = RunConfig(
            launcher,
            root / "warehouse",
            snapshot="initial",
            replica_interval_s=NEVER_S,
            cluster_replicas=args.cluster,
            history="off" if args.into == "replica" else "table",
        )
        house = config.house()
        spark = session.build(app_name="bench", conf={"spark.driver.memory": "6g"})
        with cluster.connect() as connection:
            connection.execute(f"create table large (id {kind} primary key, n integer, label text, price numeric(12, 2))".encode())
            values = f"select {KEYS[args.key]}, i, 'row ' || i, i / 100.0 from generate_series(1, {args.rows}) i"
            connection.execute(f"insert into large {values}; create publication large for table large".encode())
            run(config, spark)
            for turn in range(args.runs + 1):
                change = f"update large set n = n + 1, label = label || '!' where (n + {turn * 7}) % {step} = 0"
                connection.execute(change.encode())
                with mock.patch.object(merge, "bring"), mock.patch.object(history_table, "bring"):  # the changelog alone
                    run(config, spark)
                position = house.source().position
                lsn = house.format.lsn(house.changelog(TABLE))
                assert position is not None
                assert lsn is not None
                until = Position(position.epoch, lsn)
                other = copy_of(house, root / "other")
                module = merge if args.into == "replica" else history_table
                with mock.patch.object(module, "merge_without_spark", return_value=False):
                    spark_s = bring(spark, other, until, args.into)
                own_s = bring(spark, house, until, args.into)
                if digest(spark, house, args.into) != digest(spark, other, args.into):
                    raise SystemExit("the two tables are not the same")
                if turn:
                    times["spark"].append(spark_s)
                    times["cdcpipe"].append(own_s)
        spark.stop()
    medians = {f"{name}_s": round(statistics.median(found), 2) for name, found in times.items()}
    ratio = statistics.median(own / other for own, other in zip(times["cdcpipe"], times["spark"], strict=True))
    given = {"rows": args.rows, "changes": args.changes, "key": args.key, "cluster": args.cluster, "into": args.into}
    print(json.dumps({"benchmark": "merge", **given, **medians, "ratio": round(ratio, 2)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
