"""A backlog from the slot to the tables: `cdcpipe-spark run --available-now`, with Spark's start left out of the clock.

As a program it is one run, in a process of its own: it starts Spark, starts the clock, and calls the command, which finds that
session. A table's rows are visible when Delta Lake's commit is there, so the clock is read off the commits' files. Prints
one JSON object.
"""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backlog import Backlog

__all__ = ["measure"]

TABLE = "public.bench_row"


def measure(made: Backlog, runs: int) -> Iterator[dict[str, Any]]:
    """Yield a line per run."""
    for run in range(1, runs + 1):
        with made.slot("pgoutput") as slot, tempfile.TemporaryDirectory() as scratch:
            done = subprocess.run([sys.executable, __file__, made.cluster.dsn, slot, scratch], stdout=subprocess.PIPE, check=True)
        line = json.loads(done.stdout.splitlines()[-1])
        fits = line.pop("replica_rows") - 1 == made.replica_rows
        rows = line.pop("changelog_rows") - 1  # the row beyond the end
        yield {
            "benchmark": "backlog",
            "transport": "unix",
            "variant": "cdcpipe-spark run --available-now",
            "reference": False,
            "run": run,
            "rows_wanted": made.rows,
            "rows": rows if fits else -1,
            **line,
        }


def _visible_s(table: Path, started_at: float) -> float:
    """Return when the table's last commit was there."""
    return round(max(path.stat().st_mtime for path in (table / "_delta_log").glob("*.json")) - started_at, 3)


def main() -> int:
    """Run the command once."""
    from backlog import PUBLICATION

    from spark_sink import run, session

    dsn, slot, scratch = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    logging.basicConfig(level=logging.ERROR)
    spark = session.build(app_name="bench")
    spark.range(1).write.format("delta").save(str(scratch / "warm-up"))
    stop, build = spark.stop, session.build
    spark.stop = lambda: None
    session.build = lambda **_: spark
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arguments = ["-d", dsn, "-S", slot, "--publication", PUBLICATION, "--available-now"]
    arguments += ["--staging", str(scratch / "staging"), "--warehouse", str(scratch / "warehouse")]
    started_at, started = time.time(), time.process_time()
    run.command.main(arguments, standalone_mode=False)
    cpu_s = time.process_time() - started
    session.build = build
    tables = {name: scratch / "warehouse" / name / TABLE for name in ("changelog", "replica")}
    result = {
        "changelog_s": _visible_s(tables["changelog"], started_at),
        "wall_s": max(_visible_s(table, started_at) for table in tables.values()),
        "driver_cpu_s": round(cpu_s, 3),
        "driver_peak_rss_kib": [before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss],
        "streamer_peak_rss_kib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
        **{f"{name}_rows": spark.read.format("delta").load(str(path)).count() for name, path in tables.items()},
    }
    stop()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
