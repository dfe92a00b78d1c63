"""Measures a backlog from the slot to the tables: `cdcpipe-spark run --available-now` without the time that Spark takes to start.

Run as a program, this starts Spark in a process of its own and calls the command twice in that session. In the first call the JVM
compiles code that the second call reuses. Rows of a table are visible once Delta Lake's commit exists. So the time of that file
stops the clock. The program prints a JSON object for each call.
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
    """Yield a line for each run."""
    for run in range(1, runs + 1):
        with made.slot("pgoutput", 1) as first, made.slot("pgoutput", 2) as second, tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, __file__, made.cluster.dsn, scratch, first, second]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
        for name, line in zip(("first", "second"), lines, strict=True):
            fits = line.pop("replica_rows") - 1 == made.replica_rows
            rows = line.pop("changelog_rows") - 1  # the row beyond the backlog's end
            yield {
                "benchmark": "backlog",
                "transport": "unix",
                "variant": f"cdcpipe-spark run --available-now, {name} of a session",
                "reference": False,
                "run": run,
                "rows_wanted": made.rows,
                "rows": rows if fits else -1,
                **line,
            }


def _visible_s(table: Path, started_at: float) -> float:
    """Return when the table's last commit appeared."""
    return round(max(path.stat().st_mtime for path in (table / "_delta_log").glob("*.json")) - started_at, 3)


def main() -> int:
    """Run the command on each slot."""
    from cdcpipe.threads import have_no_blas_threads
    from spark_sink.spark import session, without_pandas

    have_no_blas_threads()  # these two as `cdcpipe-spark` does at its start
    without_pandas.want()
    dsn, scratch, *slots = sys.argv[1:]
    logging.basicConfig(level=logging.ERROR)
    spark = session.build(app_name="bench")
    spark.range(1).write.format("delta").save(f"{scratch}/warm-up")
    stop, build = spark.stop, session.build
    spark.stop = lambda: None
    session.build = lambda **_: spark
    for slot in slots:
        print(json.dumps(_run(spark, dsn, slot, Path(scratch) / slot)), flush=True)
    session.build = build
    stop()
    return 0


def _run(spark: Any, dsn: str, slot: str, directory: Path) -> dict[str, Any]:
    from backlog import PUBLICATION

    from spark_sink.commands import run

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arguments = ["-d", dsn, "-S", slot, "--publication", PUBLICATION, "--snapshot", "never", "--available-now"]
    arguments += ["--staging", str(directory / "staging"), "--warehouse", str(directory / "warehouse")]
    started_at, started = time.time(), time.process_time()
    run.command.main(arguments, standalone_mode=False)
    cpu_s = time.process_time() - started
    tables = {name: directory / "warehouse" / name / TABLE for name in ("changelog", "replica")}
    return {
        "changelog_s": _visible_s(tables["changelog"], started_at),
        "wall_s": max(_visible_s(table, started_at) for table in tables.values()),
        "driver_cpu_s": round(cpu_s, 3),
        "driver_peak_rss_kib": [before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss],
        "streamer_peak_rss_kib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
        **{f"{name}_rows": spark.read.format("delta").load(str(path)).count() for name, path in tables.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
