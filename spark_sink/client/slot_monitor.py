"""Watches the positions of the server and the slot: a thread reads ``cdcpipe slot --watch``. No pyspark.

    with SlotMonitor(("-d", "shop"), "shop_cdc") as monitor:
        report = monitor.wait_for_report(10)   # the first report; raises the error with which the command ended
        report.wal_lsn, monitor.lag(report.wal_lsn, time.monotonic())

When the command ends, or reports nothing for too long, the monitor starts it again after a pause. So a restart of the server is
only a gap in the reports. ``error`` says why the command ended, until the next report comes. The monitor does not return an old
report: a connection that was cut without notice sends no error.
"""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import threading
import time
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import LSN
from cdcpipe.retry import RetryPolicy
from cdcpipe.threads import Worker
from spark_sink.client.failure import error_of
from spark_sink.client.process import COMMAND, Child, reading, unanswered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

__all__ = ["Lag", "SlotMonitor", "SlotReport", "WALHistory"]

_logger = logging.getLogger(__name__)

_RESTARTS = RetryPolicy(first_pause_s=5.0)
"""Without a limit: a monitor waits for its server until `stop` is called."""
_STALE_S = 10.0
"""How old a report may be to be returned, when reports come about once a second."""
_UNREACHED = "check host and network, and that the server is up; then start the command again"
_LOOK_S = 0.1
_HISTORY_SIZE = 4096


@dataclass(frozen=True, slots=True)
class SlotReport:
    """A line of ``cdcpipe slot``: ``found`` is the parsed line; the other fields are its positions (None if unknown)."""

    found: Mapping[str, Any]
    wal_lsn: int
    sent_lsn: int | None
    confirmed_flush_lsn: int | None

    @classmethod
    def parse(cls, line: bytes) -> SlotReport:
        """Read a line; raise CdcpipeError if it is not a report."""
        with reading("slot"):
            found = json.loads(line)
            sent, confirmed = found["sent_lsn"], found["confirmed_flush_lsn"]
            return cls(
                found,
                LSN.parse(found["wal_lsn"]),
                None if sent is None else LSN.parse(sent),
                None if confirmed is None else LSN.parse(confirmed),
            )


class Lag(NamedTuple):
    """How far a position is behind the server: in bytes of WAL, and in seconds since the server's WAL passed the position."""

    bytes: int
    seconds: float
    at_least: bool = False
    """Whether the position was behind already at the first report: then the seconds are a lower bound."""


class WALHistory:
    """When the server's WAL reached which position. A long history is thinned out: its older part becomes coarser.

    If there was no report for more than ``stale_s``, the WAL may have grown at any time since the one before.
    """

    def __init__(self, stale_s: float = _STALE_S) -> None:
        self._stale_s = stale_s
        self._lsns: list[int] = []
        self._times: list[float] = []
        self._reported_at = 0.0

    def add(self, lsn: int, now: float) -> None:
        """Add the end of the WAL at the time ``now``. Times must not decrease. An end that has not grown is ignored.

        If the end is before an earlier one, this is another server, or an older copy: the history begins anew.
        """
        before, self._reported_at = self._reported_at, now
        if self._lsns and lsn < self._lsns[-1]:
            self._lsns.clear()
            self._times.clear()
        elif self._lsns and lsn == self._lsns[-1]:
            return
        is_late = bool(self._lsns) and now - before > self._stale_s
        self._lsns.append(lsn)
        self._times.append(before if is_late else now)  # a lag may look larger, never smaller
        if len(self._lsns) > _HISTORY_SIZE:
            # Two entries become one with the earlier time and the greater position: here, too, a lag may only look larger.
            half = _HISTORY_SIZE // 2
            self._lsns[1 : half + 1], self._times[1 : half + 1] = self._lsns[2 : half + 1 : 2], self._times[1:half:2]

    def lag(self, lsn: int, now: float) -> Lag:
        """Return how far ``lsn`` is behind the server."""
        if not self._lsns or lsn >= self._lsns[-1]:
            return Lag(0, 0.0)
        beyond = bisect_right(self._lsns, lsn)
        return Lag(self._lsns[-1] - lsn, now - self._times[beyond], at_least=beyond == 0)


class SlotMonitor:
    """Has the newest report on a slot. Any thread may ask it.

    A report older than ``stale_s`` is not returned. The argument ``now`` of the methods is `time.monotonic()`. The command is first
    started ``delay_s`` after the monitor.
    """

    def __init__(
        self,
        connection: Sequence[str],
        slot: str,
        interval_s: float = 1.0,
        *,
        command: Sequence[str] = COMMAND,
        silence_s: float = 30.0,
        delay_s: float = 0.0,
    ) -> None:
        self._delay_s = delay_s
        self.stale_s = max(_STALE_S, 3 * interval_s)
        self._arguments = ["slot", *connection, "-S", slot, "--watch", str(interval_s)]
        self._command = command
        self._silence_s = max(silence_s, 3 * interval_s)
        self._report: SlotReport | None = None
        self._reported_at = 0.0
        self._error: CdcpipeError | None = None
        self._history = WALHistory(self.stale_s)
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._child: Child | None = None
        self._thread = Worker(target=self._run, name="cdcpipe-slot-monitor", daemon=True)

    def start(self) -> Self:
        """Start the monitor's thread, and return at once."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the monitor, and kill its command: the command changes nothing on the server."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
            if self._child is not None:
                self._child.kill()
        self._thread.join_if_started()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, _kind: type[BaseException] | None, _value: BaseException | None, _tb: TracebackType | None) -> None:
        self.stop()

    def wait_for_report(self, timeout_s: float, is_stopping: Callable[[], bool] = lambda: False) -> SlotReport:
        """Wait for a report that is not stale, and return it.

        Raises the error with which the command ended, CdcpipeError after ``timeout_s``, InterruptedError once ``is_stopping`` is
        True (asked ten times a second).
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                now = time.monotonic()
                if self._error is not None:
                    raise self._error
                if (report := self._fresh(now)) is not None:
                    return report
                if is_stopping():
                    raise InterruptedError
                if now >= deadline:
                    raise CdcpipeError(self._silence(now), hint=_UNREACHED)
                self._changed.wait(min(_LOOK_S, deadline - now))

    def report(self, now: float) -> SlotReport | None:
        """Return the newest report; None before the first one, while the server can't be asked, or if the newest is stale."""
        with self._changed:
            return self._fresh(now)

    @property
    def has_asked(self) -> bool:
        """Whether the server has been asked: there was a report or an error. Until then it is unknown whether it answers."""
        return self._report is not None or self._error is not None

    @property
    def error(self) -> CdcpipeError | None:
        """Why the server can't be asked at present; None if it can."""
        return self._error

    def lag(self, lsn: int, now: float) -> Lag | None:
        """Return how far a position is behind the server; None while there is no fresh report."""
        with self._changed:
            return self._history.lag(lsn, now) if self._fresh(now) is not None else None

    def _fresh(self, now: float) -> SlotReport | None:
        is_known = self._error is None and now - self._reported_at <= self.stale_s
        return self._report if is_known else None

    def _silence(self, now: float) -> str:
        if self._report is None:
            return "the server has not reported the position of the slot yet"
        return f"the server has not reported the position of the slot for {now - self._reported_at:.0f} s"

    def _run(self) -> None:
        if self._stopping.wait(self._delay_s):
            return
        for ends in itertools.count(1):
            try:
                self._watch()
            except CdcpipeError as ex:
                self._take_error(ex)
            except OSError as ex:  # a limit of the system, which may pass
                self._take_error(CdcpipeError(f"cannot run 'cdcpipe slot': {ex}"))
            if self._stopping.wait(_RESTARTS.pause_s(ends)):
                return

    def _take_error(self, error: CdcpipeError) -> None:
        if self._stopping.is_set():
            return
        _logger.info("cannot ask the server for the position of the slot: %s", error.message)
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _watch(self) -> None:
        """Run the command and take its reports. Always raises: the end of the command is an error, and so is its silence."""
        with self._changed:
            if self._stopping.is_set():
                return
            self._child = Child(self._arguments, command=self._command, stdin=subprocess.DEVNULL)
        with self._child as child:
            try:
                while line := child.read_line(self._silence_s):
                    self._take(SlotReport.parse(line))
            except TimeoutError:
                raise error_of(unanswered("slot", self._silence_s)) from None
            raise error_of(child.failure())

    def _take(self, report: SlotReport) -> None:
        now = time.monotonic()
        with self._changed:
            self._report, self._reported_at, self._error = report, now, None
            self._history.add(report.wal_lsn, now)
            self._changed.notify_all()
