"""Runs the Spark stages over a staging directory, in a fresh process, and prints one JSON object.

Every stage runs twice. The second time counts, because the JVM compiles during the first.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import log as delta_log
from spark_sink.pipeline.pipeline import Pipeline
from spark_sink.replica import merge
from spark_sink.replica.current import read_replica
from spark_sink.schema.table import Table
from spark_sink.source import datasource
from spark_sink.spark import session
from spark_sink.staging.log import Position
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

TABLE = Table("public", "bench_row")
NEVER_S = 86400.0


def stages(spark: SparkSession, staging: Path, scratch: Path) -> dict[str, Callable[[], None]]:
    """Return the stages in their order. Each one begins where the previous one ended."""
    warehouse, parquet = Warehouse(scratch / "delta", "delta"), scratch / "parquet"
    started: list[Pipeline] = []

    def read() -> None:
        rows = spark.read.format("cdcpipe").option("table", str(TABLE)).load(str(staging))
        rows.write.format("noop").mode("overwrite").save()

    def changelog_parquet() -> None:
        Pipeline(spark, staging, parquet, format="parquet").process_available()

    def changelog_delta() -> None:
        pipeline = Pipeline(spark, staging, warehouse.root, replica_interval_s=NEVER_S).start(available_now=True)
        assert pipeline.query is not None
        pipeline.query.awaitTermination()  # without a last round of merges
        started.append(pipeline)

    def replica_delta() -> None:
        lsn = delta_log.newest_lsn(warehouse.changelog(TABLE))
        assert lsn is not None
        merge.merge_changes(spark, warehouse, TABLE, Position(1, lsn))
        started.pop().stop()  # there is nothing left to merge

    def tables_delta() -> None:
        shutil.rmtree(warehouse.root)
        Pipeline(spark, staging, warehouse.root, replica_interval_s=NEVER_S).process_available()

    return {
        "segments to noop": read,
        "segments to changelog, Parquet": changelog_parquet,
        "segments to changelog, Delta": changelog_delta,
        "changelog to replica, Delta": replica_delta,
        "segments to changelog and replica, Delta": tables_delta,
    }


def main() -> int:
    staging, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    logging.basicConfig(level=logging.ERROR)
    spark = session.build(app_name="bench")
    datasource.register(spark)
    times: dict[str, float] = {}
    for _ in range(2):
        shutil.rmtree(scratch, ignore_errors=True)
        for name, stage in stages(spark, staging, scratch).items():
            started = time.perf_counter()
            stage()
            times[name] = round(time.perf_counter() - started, 3)
    house = Warehouse(scratch / "delta", "delta")
    changes = changelogs_of(spark, house).read(TABLE).count()
    rows = read_replica(spark, house.root, str(TABLE)).count()
    counts = {
        "segments to noop": spark.read.format("cdcpipe").option("table", str(TABLE)).load(str(staging)).count(),
        "segments to changelog, Parquet": changelogs_of(spark, Warehouse(scratch / "parquet", "parquet")).read(TABLE).count(),
        "segments to changelog, Delta": changes,
        "changelog to replica, Delta": rows,
        "segments to changelog and replica, Delta": changes,
    }
    spark.stop()
    print(json.dumps({name: {"wall_s": times[name], "rows": counts[name]} for name in times}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
