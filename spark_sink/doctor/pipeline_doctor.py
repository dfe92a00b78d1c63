"""Examines a pipeline before it runs: collects the findings of server, machine, directories, stores and workers.

    findings = examine(PlannedRun(...), start_spark)

`run` does the parts that take only a moment at its start: see ``at_start``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cdcpipe.doctor.findings import Finding, error, named, ok
from cdcpipe.errors import CdcpipeError
from cdcpipe.publishing import NewPublication
from spark_sink.client.doctor import ask_doctor
from spark_sink.client.process import COMMAND
from spark_sink.doctor import belonging, directories, machine, stores, workers
from spark_sink.files.places import is_local
from spark_sink.spark import session
from spark_sink.warehouse import initial_copy
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["CHECKS", "PlannedRun", "examine", "examine_machine", "examine_server"]

_logger = logging.getLogger(__name__)

CHECKS: Final = (
    "machine.java",
    "machine.packages",
    "machine.jars",
    "pipeline.belonging",
    "pipeline.begin",
    "staging.place",
    "staging.file_system",
    "staging.space",
    "staging.clock",
    "warehouse.place",
    "warehouse.file_system",
    "warehouse.folders",
    "warehouse.space",
    "warehouse.store",
    "warehouse.clock",
    "spark.session",
    "spark.store",
    "spark.workers",
    "spark.directories",
    "spark.clocks",
)
"""The names of findings, in addition to those of ``cdcpipe doctor``."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The run to examine: the options of `run` that matter here. Without a ``warehouse`` it is a `land`, which needs no Spark.

    ``connection`` has the connection options for ``cdcpipe``.
    """

    connection: tuple[str, ...]
    slot: str
    publications: tuple[str, ...]
    staging: Path
    new_publication: NewPublication = field(default_factory=NewPublication)
    create_slot: bool = False
    snapshot: str | None = None
    """``initial`` or ``never``; None: the tables are copied with ``create_slot``."""
    warehouse: Path | None = None
    format: str = "delta"
    jars: Path | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    staging_shared: bool = True

    def copies_tables(self) -> bool:
        """Tell whether the run begins with a copy of the tables' rows. A warehouse that cannot be read counts as a new one."""
        if self.warehouse is None:
            return False
        try:
            return initial_copy.is_due(Warehouse(self.warehouse, self.format), self.snapshot, creates_slot=self.create_slot)
        except (CdcpipeError, OSError):  # other checks say so
            return self.snapshot == "initial" or (self.create_slot and self.snapshot is None)


def examine(planned: PlannedRun, start_spark: Callable[[], AbstractContextManager[SparkSession]] | None) -> list[Finding]:
    """Return all findings. If ``start_spark`` is None, Spark is not started."""
    findings, server = examine_server(planned)
    findings += examine_machine(planned, server)
    known = belonging.begun(planned.staging, planned.warehouse, planned.format)
    findings += named("pipeline.belonging", belonging.right_server(known, planned.slot, server))
    findings += named("pipeline.belonging", belonging.gone_back(planned.staging))
    if planned.warehouse is not None:
        findings += _belonging(planned, planned.warehouse, server)
    if start_spark is not None and planned.warehouse is not None:
        findings += _spark(planned, start_spark)
    return findings


def examine_server(
    planned: PlannedRun, *, quick: bool = False, command: Sequence[str] = COMMAND, is_stopping: Callable[[], bool] | None = None
) -> tuple[list[Finding], Mapping[str, Any]]:
    """Return what ``cdcpipe doctor`` finds, and the facts about the server; raise as `ask_doctor` does."""
    arguments = [*planned.connection, "-S", planned.slot, *(["--quick"] if quick else [])]
    arguments += [word for name in planned.publications for word in ("--publication", name)]
    arguments += planned.new_publication.arguments
    arguments += [*(["-c"] if planned.create_slot else []), *(["--copy"] if planned.copies_tables() else [])]
    findings, server = ask_doctor(arguments, command=command, is_stopping=is_stopping)
    known = belonging.begun(planned.staging, planned.warehouse, planned.format)
    return list(belonging.without_making(findings, known, server)), server


def examine_machine(planned: PlannedRun, server: Mapping[str, Any], *, starts_spark: bool = True) -> list[Finding]:
    """Return what is found on this machine and in the store, given the facts about the server, which may be none."""
    findings: list[Finding] = []
    if planned.warehouse is not None and starts_spark:
        findings += named("machine.java", machine.java())
        findings += named("machine.packages", machine.packages(machine.installed()))
        findings += named("machine.jars", machine.jars(planned.format, planned.jars, planned.conf))
    findings += _directory("staging", planned.staging, 0, server.get("wal_bytes_per_second"))
    if planned.warehouse is not None and is_local(planned.warehouse):
        needed = server.get("table_bytes", 0)
        needed = needed if needed and planned.copies_tables() else 0
        findings += _directory("warehouse", planned.warehouse, needed, None)
    elif planned.warehouse is not None:
        store = stores.probe(planned.warehouse)
        findings += named("warehouse.store", stores.conditional_writes(store))
        findings += named("warehouse.clock", stores.clock(store))
    return findings


def _belonging(planned: PlannedRun, warehouse: Path, server: Mapping[str, Any]) -> Iterator[Finding]:
    yield from named("pipeline.belonging", belonging.together(warehouse, planned.format, planned.staging, planned.slot))
    begins = belonging.begin(warehouse, planned.format, server, creates_slot=planned.create_slot, snapshot=planned.snapshot)
    yield from named("pipeline.begin", begins)


def _directory(name: str, path: Path, needed_bytes: int, bytes_per_s: float | None) -> list[Finding]:
    found = directories.probe(name, path)
    return [
        *named(f"{name}.place", directories.place(found)),
        *named(f"{name}.file_system", directories.file_system(found)),
        *named(f"{name}.folders", directories.folders(found)),
        *named(f"{name}.space", directories.space(found, needed_bytes, bytes_per_s)),
        *named(f"{name}.clock", directories.clock(found)),
    ]


def _spark(planned: PlannedRun, start_spark: Callable[[], AbstractContextManager[SparkSession]]) -> list[Finding]:
    """Start Spark, and examine its workers. Any error that Spark raises becomes a finding."""
    findings: list[Finding] = []
    check, why = "spark.session", "the tables need Spark"
    try:
        with start_spark() as spark:
            findings += named(check, [ok(f"Spark {spark.version} starts, with {spark.sparkContext.master}")])
            if planned.warehouse is not None and not is_local(planned.warehouse):
                check, why = "spark.store", "the tables are in the store"
                session.check_reach(spark, planned.warehouse)
                findings += named(check, [ok("Spark can reach the store")])
            check, why = "spark.workers", "they write the tables' files"
            needed = _seen_by_workers(planned)
            found = workers.look(spark, needed)
            findings += named(check, workers.modules(found))
            findings += named("spark.directories", workers.directories(found, needed))
            findings += named("spark.clocks", workers.clocks(found))
    except Exception as ex:  # any error of Spark is a finding
        _logger.info("Spark", exc_info=True)
        message, fix = workers.reason(ex)
        findings += named(check, [error(message, why, fix)])
    return findings


def _seen_by_workers(planned: PlannedRun) -> list[Path]:
    """Return the directories that workers need, if they exist."""
    needed = [planned.staging] if planned.staging_shared else []
    if planned.warehouse is not None and is_local(planned.warehouse):
        needed.append(planned.warehouse)
    return [path for path in needed if path.is_dir()]
