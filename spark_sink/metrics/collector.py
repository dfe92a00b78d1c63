"""Reads the metrics of a launcher and of a run at a scrape. Nothing here runs between scrapes, and nothing asks the server.

The positions are the rungs of ``status`` (status/ladder.py), from what this process knows. The lag in seconds is that of the live
line: the time since the server's WAL passed the position, from the reports of the `SlotMonitor`.
"""

from __future__ import annotations

import contextlib
import time
from datetime import datetime
from typing import TYPE_CHECKING

from cdcpipe.errors import CdcpipeError
from cdcpipe.exposition import pipeline, serving
from cdcpipe.lsn import LSN
from cdcpipe.measures import POSITION, SPILL, STREAM_BYTES, STREAM_RECORDS, STREAM_TRANSACTIONS
from spark_sink.metrics import table as metrics
from spark_sink.staging import account, last_error
from spark_sink.staging.commit_times import CommitTimes
from spark_sink.staging.log import Position, list_segments
from spark_sink.status import ladder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cdcpipe.exposition import Address
    from cdcpipe.measures import Reading
    from spark_sink.client.slot_monitor import SlotMonitor, SlotReport
    from spark_sink.launcher.launcher import Launcher
    from spark_sink.pipeline.pipeline import Pipeline
    from spark_sink.pipeline.runner import Runner
    from spark_sink.schema.table import Table

__all__ = ["LandMetrics", "RunMetrics"]

_WAL_STATUS = ("reserved", "extended", "unreserved", "lost")
_OF_SERVER = ("server", "sent", "confirmed")
_SHORT_S, _REST = 0.05, 50
"""A count of the segments that takes longer is not repeated for this many times as long: so counts take at most 2 % of a CPU."""


class LandMetrics:
    """The metrics of a launcher. ``monitor`` knows the server and the slot; its owner starts it."""

    command = "land"

    def __init__(self, launcher: Launcher, monitor: SlotMonitor) -> None:
        self._launcher = launcher
        self._monitor = monitor
        self._staging = _Staging(launcher.config.staging)

    @contextlib.contextmanager
    def served(self, address: Address | None) -> Iterator[None]:
        """Serve the metrics if there is an address. If nothing can listen there, record the error for ``status``, and raise it."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(serving(address, self.collect))
            except CdcpipeError as ex:
                last_error.note(self._launcher.config.staging, self.command, ex)
                raise
            yield

    def collect(self) -> Iterator[Reading]:
        """Yield the values at this moment."""
        launcher, now = self._launcher, time.monotonic()
        report = self._monitor.report(now)
        yield pipeline(self.command, launcher.config.slot)
        if self._monitor.has_asked:
            yield metrics.SERVER_UP.reading(report is not None)
        if report is not None:
            yield from _slot(report)
        yield from _launcher(launcher)
        yield from _last_command(launcher.config.staging)
        if launcher.progress.position is None:  # the launcher has not opened the log yet, or tries to
            return
        yield from self._stages(report, now)
        yield from self._staging.collect()

    def _stages(self, report: SlotReport | None, now: float) -> Iterator[Reading]:
        yield from self._rungs(report, now, [])[0]

    def _rungs(
        self, report: SlotReport | None, now: float, tables: list[tuple[str, Position | None]]
    ) -> tuple[list[Reading], dict[str, int]]:
        """Return the positions and lags of all stages, and up to which LSN each stage has everything.

        There are no lags without a report, and none of a log that is ahead of the server: it lacks what the server writes now.
        """
        recorded = account.read(self._launcher.config.staging)
        sealed = self._launcher.progress.position
        recorded = recorded.of_log(0 if sealed is None else sealed.lsn)
        found, reached = [], {}
        for rung in ladder.build(report, sealed, tables, CommitTimes([]), time.time(), recorded):
            if rung.position is None:
                continue
            found.append(POSITION.reading(LSN.parse(rung.position.rpartition(":")[2]), rung.name))
            is_known = rung.name in _OF_SERVER or not self._launcher.progress.is_ahead
            if report is not None and rung.behind_bytes is not None and is_known:
                reached[rung.name] = report.wal_lsn - rung.behind_bytes
                found.append(metrics.LAG_BYTES.reading(rung.behind_bytes, rung.name))
                if (lag := self._monitor.lag(reached[rung.name], now)) is not None:
                    found.append(metrics.LAG_SECONDS.reading(lag.seconds, rung.name))
        return found, reached


class RunMetrics(LandMetrics):
    """The metrics of a run."""

    command = "run"

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.launcher, runner.monitor)
        self._runner = runner

    def collect(self) -> Iterator[Reading]:
        """Yield the values at this moment."""
        yield from super().collect()
        runner = self._runner
        snapshot, running = runner.progress.snapshot, runner.pipeline
        if snapshot is not None:
            yield metrics.SNAPSHOT_TABLES.reading(snapshot.tables, "all")
            yield metrics.SNAPSHOT_TABLES.reading(snapshot.tables_done, "done")
            yield metrics.SNAPSHOT_ROWS.reading(snapshot.rows)
        if runner.has_open_gap is not None:
            yield metrics.GAP_OPEN.reading(runner.has_open_gap)
        if runner.waiting is not None:
            yield metrics.WAITING.reading(runner.waiting)
        if running is not None:
            yield metrics.MESSAGES.reading(running.progress.messages)
            yield metrics.BATCHES.reading(running.batches)
            yield metrics.MERGES.reading(running.merges)
            for table, count in dict(running.changes).items():
                yield metrics.CHANGES.reading(count, str(running.shown(table)))

    def _stages(self, report: SlotReport | None, now: float) -> Iterator[Reading]:
        running = self._runner.pipeline
        position = None if running is None else running.progress.position
        if running is None or position is None:
            yield from super()._stages(report, now)
            return
        replicas = running.replicas()
        found, reached = self._rungs(report, now, _tables(running, position, replicas))
        yield from found
        if report is None or "changelog" not in reached:
            return
        for table, lsn in replicas.items():
            name = str(running.shown(table))
            own = reached["changelog"] if lsn is None else min(lsn, reached["changelog"])
            lag = self._monitor.lag(own, now)
            yield metrics.TABLE_LAG_BYTES.reading(max(0, report.wal_lsn - own), name)
            if lag is not None:
                yield metrics.TABLE_LAG_SECONDS.reading(lag.seconds, name)


def _tables(running: Pipeline, position: Position, replicas: dict[Table, int | None]) -> list[tuple[str, Position | None]]:
    """Return the rungs of the tables: the position of all changelogs, and that of the replica and history that lack most."""
    rungs: list[tuple[str, Position | None]] = [("changelog", position)]
    if running.warehouse.format.keeps_replicas:
        lowest = min([position.lsn, *(lsn for lsn in replicas.values() if lsn is not None)])
        rungs.append(("replica", Position(position.epoch, lowest)))
    if (history_lsn := running.history_lsn) is not None:
        rungs.append(("history", Position(position.epoch, min(position.lsn, history_lsn))))
    return rungs


def _slot(report: SlotReport) -> Iterator[Reading]:
    found = report.found
    yield metrics.SLOT_ACTIVE.reading(bool(found["active"]))
    for status in _WAL_STATUS:
        yield metrics.SLOT_STATUS.reading(found["wal_status"] == status, status)
    if found["restart_lsn"] is not None:
        yield metrics.SLOT_RETAINED.reading(max(0, report.wal_lsn - LSN.parse(found["restart_lsn"])))
    if found["safe_wal_bytes"] is not None:
        yield metrics.SLOT_SAFE.reading(found["safe_wal_bytes"])


def _launcher(launcher: Launcher) -> Iterator[Reading]:
    progress = launcher.progress
    yield STREAM_RECORDS.reading(progress.records)
    yield STREAM_TRANSACTIONS.reading(progress.transactions)
    yield STREAM_BYTES.reading(progress.size)
    yield metrics.SEGMENTS.reading(progress.segments)
    yield metrics.SEALS.reading(launcher.seals)
    yield metrics.OPEN_SEGMENT.reading(progress.open_size)
    yield SPILL.reading(launcher.spilled_bytes())
    yield metrics.RESTARTS.reading(progress.restarts)
    yield metrics.GAPS.reading(progress.gaps)
    if progress.last_error_at is not None:
        yield metrics.LAST_ERROR.reading(progress.last_error_at, "streamer", str(progress.last_error_code), last_error.OTHER)


class _Staging:
    """The size and the number of the segments in a staging directory. To count them takes long if many are kept.

    Then a scrape gets what was counted last.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._found = 0, 0
        self._until = 0.0

    def collect(self) -> Iterator[Reading]:
        """Yield both values."""
        if (now := time.monotonic()) >= self._until:
            self._found = self._count()
            took_s = time.monotonic() - now
            self._until = now if took_s < _SHORT_S else now + took_s + _REST * took_s
        size, segments = self._found
        yield metrics.STAGING.reading(size)
        yield metrics.STAGING_SEGMENTS.reading(segments)

    def _count(self) -> tuple[int, int]:
        size, segments = 0, list_segments(self._root)
        for segment in segments:
            with contextlib.suppress(FileNotFoundError):  # removed just now
                size += segment.path.stat().st_size
        return size, len(segments)


def _last_command(root: Path) -> Iterator[Reading]:
    error = last_error.read(root)
    if error is not None:
        at = datetime.fromisoformat(error["time"]).timestamp()
        # An older version has recorded no kind.
        yield metrics.LAST_ERROR.reading(at, "command", str(error["exit_code"]), error.get("kind", last_error.OTHER))
