"""Where the server and the slot are, again and again: the command ``cdcpipe slot --watch``, read by a thread. No pyspark.

    with SlotMonitor(("-d", "shop"), "shop_cdc") as monitor:
        report = monitor.wait_for_report(10)   # the first one; raises what the command ended with
        report.wal_lsn, monitor.lag(report.wal_lsn, time.monotonic())

A command that ends, or falls silent, is started again after a pause: a server that restarts costs nothing but a gap. What it ended
with is in ``error`` until there is a report again. A report grows old, and then nothing is known: a connection that was cut tells
nobody.
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
from spark_sink.client.failure import error_of
from spark_sink.client.process import COMMAND, Child, unanswered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

__all__ = ["Lag", "SlotMonitor", "SlotReport", "WALHistory"]

_logger = logging.getLogger(__name__)

_RESTARTS = RetryPolicy(first_pause_s=5.0)
"""Without a limit: a monitor waits for its server as long as it is wanted."""
_STALE_S = 10.0
"""How old a report may be and still be shown, where reports come every second or so."""
_LOOK_S = 0.1
_HISTORY_SIZE = 4096


@dataclass(frozen=True, slots=True)
class SlotReport:
    """A line of ``cdcpipe slot``: ``found`` as it is, and the positions in it (None for what is not known)."""

    found: Mapping[str, Any]
    wal_lsn: int
    sent_lsn: int | None
    confirmed_flush_lsn: int | None

    @classmethod
    def parse(cls, line: bytes) -> SlotReport:
        """Read a line; raise CdcpipeError for one that is none."""
        try:
            found = json.loads(line)
            sent, confirmed = found["sent_lsn"], found["confirmed_flush_lsn"]
            return cls(
                found,
                LSN.parse(found["wal_lsn"]),
                None if sent is None else LSN.parse(sent),
                None if confirmed is None else LSN.parse(confirmed),
            )
        except (ValueError, KeyError, TypeError) as ex:
            msg = f"cannot read what 'cdcpipe slot' printed: {ex!r}"
            raise CdcpipeError(msg, hint="are cdcpipe and cdcpipe-spark of the same version?") from ex


class Lag(NamedTuple):
    """How far a position is behind the server: bytes of WAL, and seconds since the server had no more than that."""

    bytes: int
    seconds: float
    at_least: bool = False
    """Whether it was behind before anybody looked."""


class WALHistory:
    """When the server's WAL had grown beyond which position. Thinned out when it is long: older moments become coarser."""

    def __init__(self) -> None:
        self._lsns: list[int] = []
        self._times: list[float] = []

    def add(self, lsn: int, now: float) -> None:
        """Note the WAL's end at a moment; later ones have to come later. One that has not grown is not noted."""
        if self._lsns and lsn <= self._lsns[-1]:
            return
        self._lsns.append(lsn)
        self._times.append(now)
        if len(self._lsns) > _HISTORY_SIZE:
            # Of two moments, the earlier time and the greater position: a lag is never shown smaller than it is.
            half = _HISTORY_SIZE // 2
            self._lsns[1 : half + 1], self._times[1 : half + 1] = self._lsns[2 : half + 1 : 2], self._times[1:half:2]

    def lag(self, lsn: int, now: float) -> Lag:
        """Return how far ``lsn`` is behind."""
        if not self._lsns or lsn >= self._lsns[-1]:
            return Lag(0, 0.0)
        beyond = bisect_right(self._lsns, lsn)
        return Lag(self._lsns[-1] - lsn, now - self._times[beyond], at_least=beyond == 0)


class SlotMonitor:
    """Knows the newest report on a slot, and for how long. Safe to ask from any thread.

    What is known of the server is true for a while only: a report that is older than ``stale_s`` is not given any more.
    ``now`` is `time.monotonic`'s. ``on_report`` is called with each report, by the monitor's thread.
    """

    def __init__(
        self,
        connection: Sequence[str],
        slot: str,
        interval_s: float = 1.0,
        *,
        command: Sequence[str] = COMMAND,
        on_report: Callable[[SlotReport], None] | None = None,
        silence_s: float = 30.0,
    ) -> None:
        self.stale_s = max(_STALE_S, 3 * interval_s)
        self._arguments = ["slot", *connection, "-S", slot, "--watch", str(interval_s)]
        self._command = command
        self._silence_s = max(silence_s, 3 * interval_s)
        self._on_report = on_report
        self._report: SlotReport | None = None
        self._reported_at = 0.0
        self._error: CdcpipeError | None = None
        self._history = WALHistory()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._child: Child | None = None
        self._thread = threading.Thread(target=self._run, name="cdcpipe-slot-monitor", daemon=True)

    def start(self) -> Self:
        """Begin, and return at once."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End; the command, which only looks, is killed."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
            if self._child is not None:
                self._child.kill()
        if self._thread.ident is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, _kind: type[BaseException] | None, _value: BaseException | None, _tb: TracebackType | None) -> None:
        self.stop()

    def wait_for_report(self, timeout_s: float, is_stopping: Callable[[], bool] = lambda: False) -> SlotReport:
        """Return the newest report once there is one that is not stale.

        Raise what prevents it, CdcpipeError when it takes too long, InterruptedError once ``is_stopping`` says so, which is
        asked ten times a second.
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
                    raise CdcpipeError(self._silence(now), hint="is it reachable?")
                self._changed.wait(min(_LOOK_S, deadline - now))

    def report(self, now: float) -> SlotReport | None:
        """Return the newest report; None as long as there is none, while the server can't be asked, and for a stale one."""
        with self._changed:
            return self._fresh(now)

    @property
    def error(self) -> CdcpipeError | None:
        """Why the server can't be asked at present."""
        return self._error

    def lag(self, lsn: int, now: float) -> Lag | None:
        """Return how far a position is behind the server, None where that is not known."""
        with self._changed:
            return self._history.lag(lsn, now) if self._fresh(now) is not None else None

    def _fresh(self, now: float) -> SlotReport | None:
        is_known = self._error is None and now - self._reported_at <= self.stale_s
        return self._report if is_known else None

    def _silence(self, now: float) -> str:
        if self._report is None:
            return "the server has not said yet where its slot is"
        return f"the server has not said for {now - self._reported_at:.0f} s where its slot is"

    def _run(self) -> None:
        for ends in itertools.count(1):
            try:
                self._watch()
            except CdcpipeError as ex:
                if self._stopping.is_set():
                    return
                _logger.info("the server can't be asked where its slot is: %s", ex.message)
                with self._changed:
                    self._error = ex
                    self._changed.notify_all()
            if self._stopping.wait(_RESTARTS.pause_s(ends)):
                return

    def _watch(self) -> None:
        """Run the command to its end, which is an error, as is its silence."""
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
        if self._on_report is not None:
            self._on_report(report)
