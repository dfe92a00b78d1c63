"""One run of the Spark stages over a staging directory, in a fresh process; prints one JSON object.

Everything is done twice, and the second time counts: the first one compiles.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from spark_sink import replica, session, source
from spark_sink.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

TABLE = "public.bench_row"


def stages(spark: SparkSession, staging: Path, scratch: Path) -> dict[str, Callable[[], None]]:
    """Return what is measured, in order; each begins where the one before it has ended."""
    warehouse, parquet = scratch / "delta", scratch / "parquet"

    def read() -> None:
        rows = spark.read.format("cdcpipe").option("table", TABLE).load(str(staging))
        rows.write.format("noop").mode("overwrite").save()

    def changelog_parquet() -> None:
        Pipeline(spark, staging, parquet, format="parquet").process_available()

    def tables_delta() -> None:
        Pipeline(spark, staging, warehouse).process_available()

    def replica_delta() -> None:
        # A replica that is not there is made again from its changelog, and from nothing else.
        shutil.rmtree(warehouse / "replica")
        Pipeline(spark, staging, warehouse).process_available()

    return {
        "segments to noop": read,
        "segments to changelog, Parquet": changelog_parquet,
        "segments to changelog and replica, Delta": tables_delta,
        "changelog to replica, Delta": replica_delta,
    }


def main() -> int:
    staging, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    logging.basicConfig(level=logging.ERROR)
    spark = session.build(app_name="bench")
    source.register(spark)
    times: dict[str, float] = {}
    for _ in range(2):
        shutil.rmtree(scratch, ignore_errors=True)
        for name, stage in stages(spark, staging, scratch).items():
            started = time.perf_counter()
            stage()
            times[name] = round(time.perf_counter() - started, 3)
    counts = {
        "segments to noop": spark.read.format("cdcpipe").option("table", TABLE).load(str(staging)).count(),
        "segments to changelog, Parquet": spark.read.parquet(str(scratch / "parquet/changelog" / TABLE)).count(),
        "segments to changelog and replica, Delta": spark.read.format("delta")
        .load(str(scratch / "delta/changelog" / TABLE))
        .count(),
        "changelog to replica, Delta": replica.view(spark, scratch / "delta", TABLE).count(),
    }
    spark.stop()
    print(json.dumps({name: {"wall_s": times[name], "rows": counts[name]} for name in times}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
