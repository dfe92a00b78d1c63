"""Checks Spark: whether a session starts with its jars, and what its Python workers have on their machines."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cdcpipe.doctor.findings import Verdict, error, ok, warning
from cdcpipe.errors import CdcpipeError
from cdcpipe.units import format_duration
from spark_sink.doctor.machine import INSTALL
from spark_sink.spark.failure import reason_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Worker", "clocks", "directories", "look", "modules"]

_MODULES: Final = ("cdcpipe", "spark_sink", "pyarrow", "numpy", "adbc_driver_manager", "adbc_driver_postgresql")
_CLOCK_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Worker:
    """The facts about one Python worker.

    ``unseen`` has the directories that it does not see. ``clock_ahead_s`` says how far its clock is ahead of the driver's.
    """

    host: str
    python: str
    missing: tuple[str, ...]
    unseen: tuple[str, ...]
    clock_ahead_s: float


def look(spark: SparkSession, needed: Sequence[Path]) -> list[Worker]:
    """Examine a worker of each executor, as far as Spark spreads the tasks. Raises InitError if the workers can't run at all."""
    context = spark.sparkContext
    names, paths = _MODULES, [str(path) for path in needed]

    # Spark sends a local function to the workers as code. They could not import one by its name if they lack this package.
    def examine(_: Any) -> Iterator[tuple[str, str, list[str], list[str], float]]:
        import importlib.util
        import os
        import platform
        import socket
        import time

        missing = [name for name in names if importlib.util.find_spec(name) is None]
        unseen = [path for path in paths if not os.access(path, os.R_OK | os.X_OK)]
        yield socket.gethostname(), platform.python_version(), missing, unseen, time.time()

    before = time.time()
    tasks = max(2, context.defaultParallelism)
    found = context.parallelize(range(tasks), tasks).mapPartitions(examine).collect()
    after = time.time()
    workers = {
        host: Worker(host, python, tuple(missing), tuple(unseen), max(now - after, 0.0) + min(now - before, 0.0))
        for host, python, missing, unseen, now in found
    }
    return list(workers.values())


def modules(found: Sequence[Worker]) -> Iterator[Verdict]:
    """Judge whether the workers have the same Python as the driver, and the packages."""
    for worker in found:
        if worker.missing:
            fix = f"on {worker.host}, for the Python of PYSPARK_PYTHON: {INSTALL}"
            yield error(f"workers on {worker.host} lack {', '.join(worker.missing)}", "they write the tables' files", fix)
        elif worker.python.rpartition(".")[0] != platform.python_version().rpartition(".")[0]:
            message = f"workers on {worker.host} have Python {worker.python}, and the driver {platform.python_version()}"
            yield error(message, "Spark refuses that", "give both the same: PYSPARK_PYTHON")
        else:
            yield ok(f"workers on {worker.host} have Python {worker.python} and all packages")


def directories(found: Sequence[Worker], needed: Sequence[Path]) -> Iterator[Verdict]:
    """Judge whether the workers see the needed directories, as the driver does."""
    for worker in found:
        for path in worker.unseen:
            yield error(
                f"workers on {worker.host} do not see {path}",
                "they read segments and write tables there",
                "mount it there, at the same path; or use --staging-shared no, and a warehouse in an object store",
            )
    if needed and not any(worker.unseen for worker in found):
        yield ok(f"the workers see {' and '.join(map(str, needed))}")


def clocks(found: Sequence[Worker]) -> Iterator[Verdict]:
    """Judge whether the workers' clocks agree with the driver's."""
    wrong = [worker for worker in found if abs(worker.clock_ahead_s) > _CLOCK_S]
    for worker in wrong:
        how = f"{format_duration(abs(worker.clock_ahead_s))} {'ahead of' if worker.clock_ahead_s > 0 else 'behind'} the driver's"
        why = "files that workers write are deleted by their age"
        yield warning(f"the clock of {worker.host} is {how}", why, f"timedatectl set-ntp true, on {worker.host}")
    if found and not wrong:
        yield ok("the workers' clocks and the driver's agree")


def reason(ex: Exception) -> tuple[str, str]:
    """Return the message and the hint for an error of a session or its workers."""
    if isinstance(ex, CdcpipeError):
        return ex.message, ex.hint or "see what Spark says above"
    return reason_of(ex), "see what Spark says above"
