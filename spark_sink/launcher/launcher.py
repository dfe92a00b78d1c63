"""The launcher: runs the streamer, fills the staging log, confirms sealed segments to the server. No pyspark.

    launcher = Launcher(LauncherConfig(slot="s", publications=("p",), staging=Path("staging"), connection=("-d", "dbname=app")))
    with launcher:            # start() ... stop()
        launcher.wait()       # returns when the launcher ends: with available_now, or by an error, which it raises

The launcher has three threads. One reads the streamer's stdout, fills the open segment, and writes `F` and `q` to the streamer's
stdin; it never waits for one pipe while the other is full. One seals segments, so that reading continues while the disk works. One
reads stderr.

The launcher gets only whole transactions, in commit order. The server sends large transactions before they commit, and the streamer
assembles them (`--whole-transactions`). The streamer keeps what exceeds 64 MiB of transactions in progress in files without names
in ``spill``, by default in the staging directory.

When a streamer ends, for whatever reason, nothing is lost. The launcher drops an incomplete transaction and seals the rest. It asks
the server again for the slot, judges whether the slot still continues the log (`continuity`), and starts the next streamer at the
end of the log (`--startpos`). The streamer refuses a slot that is beyond the log's account (`--expect-lsn`).

Nothing is confirmed to the server that is not durable in the staging directory: sealed segments, or a position without published
changes that the launcher has recorded there (`--idle-positions`, staging/account.py).
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from cdcpipe.background import Background
from cdcpipe.error_texts import unexpected
from cdcpipe.errors import CdcpipeError, ProtocolError
from cdcpipe.logs import Told
from cdcpipe.lsn import format_lsn
from cdcpipe.measures import Histogram
from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.client.failure import Failure
from spark_sink.client.prepare import Prepared
from spark_sink.client.process import is_report
from spark_sink.launcher.config import LauncherConfig
from spark_sink.launcher.landing import Landing, Wakeup
from spark_sink.launcher.opening import Opening, plugin_options, slot_arguments
from spark_sink.launcher.restart import RestartPolicy, final_error
from spark_sink.launcher.sealer import Sealer
from spark_sink.staging import account
from spark_sink.staging.filler import SegmentFiller
from spark_sink.staging.log import Position
from spark_sink.staging.readers import remove_consumed
from spark_sink.staging.writer import StagingWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from spark_sink.client.slot_monitor import SlotMonitor
    from spark_sink.launcher.continuity import FedTables
    from spark_sink.launcher.streamer import Streamer
    from spark_sink.staging.lock import StagingLock
    from spark_sink.staging.log import Segment
    from spark_sink.staging.writer import Sealing

__all__ = ["Launcher", "Progress"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a launcher is: what it has sealed since its start, and the end of the log (None until the launcher knows it)."""

    position: Position | None = None
    segments: int = 0
    size: int = 0
    records: int = 0
    transactions: int = 0
    open_size: int = 0
    """What was received, but is not sealed yet: the open segment, and segments that wait for the disk."""
    restarts: int = 0
    last_error: str | None = None
    last_error_at: float | None = None
    """When the last error came, in seconds since 1970."""
    last_error_code: int | None = None
    """The exit code of the streamer that ended with it."""
    gaps: int = 0
    """How many gaps this launcher has found and passed."""
    is_ahead: bool = False
    """Whether the log ends beyond the server's WAL, so that the stream waits: then nobody knows what the log lacks."""

    @property
    def has_received(self) -> bool:
        """Whether the launcher has got changes, or has begun anew."""
        return bool(self.open_size or self.segments or self.restarts or self.gaps)


class Launcher(Background):
    """Lands one slot in one staging directory, until it is stopped; with ``available_now`` until everything is landed.

    ``monitor``, if it runs, tells when the server's WAL passed an idle position.
    """

    _spoken_name = "the launcher"

    def __init__(self, config: LauncherConfig, monitor: SlotMonitor | None = None) -> None:
        super().__init__("cdcpipe-launcher")
        self.config = config
        self._monitor = monitor
        self.prepared: Prepared | None = None
        """What the server said when the slot was last prepared, which is done anew after each lost stream."""
        self.lock: StagingLock | None = None
        """The lock of the staging directory, if the owner has taken it. Then the owner also releases it."""
        self.tables: FedTables | None = None
        """The tables that are fed from this log, if the owner knows them. A log that ends before them is an older copy."""
        self.read_copied_lsn: Callable[[], int] = lambda: 0
        """Reads the LSN of the newest copy of a table, if the owner knows the tables. New tables may be copied at any time."""
        self.register: Callable[[], None] = lambda: None
        """Registers the owner as a reader of the log, before segments are removed. A start that is refused registers none."""
        self.seals = Histogram()
        """How long it took to make each segment durable."""
        self._progress = Progress()
        self._child: Streamer | None = None
        self._asked_at = 0.0
        """When the server was first asked for its position, in seconds since 1970: with available_now the log ends there."""
        self._backlog_lsn = 0
        """Where the server's WAL ended before the stream began."""
        self._is_complete = False
        self._ready = threading.Event()
        self._progress_lock = threading.Lock()
        self._wakeup = Wakeup()
        self._told = Told()

    # --- for its owner ---

    def start(self) -> Self:
        """Start the threads. Returns when the slot is prepared and the epoch has begun; raises the error that prevents this.

        If ^C interrupts it, which may be while the slot is in use, it first stops the launcher: nobody has it yet.
        """
        self.config.check_spill()
        try:
            super().start()
            self._ready.wait()
        except BaseException:
            self.stop()
            raise
        if self.has_ended:
            self._raise_error()
        return self

    def request_stop(self) -> None:
        """Ask the launcher to end, and return at once. It first seals and confirms whole transactions. Safe in a signal handler."""
        super().request_stop()
        self._wakeup.set()

    @property
    def progress(self) -> Progress:
        """How far the launcher is at this moment."""
        return self._progress

    @property
    def is_complete(self) -> bool:
        """Whether the launcher has ended because, with ``available_now``, everything is in the log."""
        return self._is_complete

    def spilled_bytes(self) -> int:
        """Return how many bytes of transactions in progress the streamer holds in files. Any thread may ask."""
        child = self._child
        return 0 if child is None else child.spilled_bytes()

    # --- the launcher's thread ---

    def _run(self) -> None:
        super()._run()
        self._ready.set()  # after the end: `start` raises the error then

    def _work(self) -> None:
        try:
            self._land()
        finally:
            self._wakeup.close()

    def _take_error(self, ex: BaseException) -> None:
        if not self._ready.is_set():
            self.logs_error = False  # `start` raises it
        super()._take_error(ex)
        self._note(last_error=ex.message if isinstance(ex, CdcpipeError) else unexpected(ex))

    def _note(self, **changes: Any) -> None:
        with self._progress_lock:
            self._progress = replace(self._progress, **changes)

    def _land(self) -> None:
        config = self.config
        policy = RestartPolicy(random.random, reconnect_s=config.reconnect_s)
        with contextlib.ExitStack() as stack:
            writer = stack.enter_context(
                StagingWriter(config.staging, slot=config.slot, retention=config.retention, hook=config.hook, lock=self.lock)
            )
            opening = Opening(
                config,
                writer,
                lambda failure, end_lsn: self._wait_before_restart(policy, failure, end_lsn),
                self._stopping,
                self._tell,
                tables=self.tables,
                read_copied_lsn=self.read_copied_lsn,
            )
            stack.callback(opening.close)
            self._asked_at = time.time()
            prepared = opening.open()
            if prepared is None:
                return
            policy.has_had_slot = True
            self.register()
            # Only now: the opening counts changes in segments if the server has gone back.
            remove_consumed(config.staging, config.retention)
            self._note(position=opening.position, gaps=opening.gaps, is_ahead=opening.is_ahead(prepared))
            self.prepared = prepared
            self._ready.set()
            sealer = Sealer(writer, self._sealed, self._wakeup.set, config.retention, self.seals)
            try:
                while prepared is not None:
                    policy.begin_at(writer.end_lsn)
                    prepared = opening.await_wal(prepared, lambda: policy.note_answer(time.monotonic()))
                    if prepared is None:
                        return
                    if not opening.has_moved(prepared):
                        self._note(is_ahead=False)
                        failure = self._stream(writer, sealer, prepared, opening.take_streamer())
                        sealer.rest()
                        if failure is not None and failure.is_rewound:
                            opening.record_gone_back(prepared, failure.message)
                        elif failure is None or not self._wait_before_restart(policy, failure, writer.end_lsn):
                            return
                    prepared = opening.reopen(prepared)
                    if prepared is not None:
                        # Before the gap counts: whether it is healed depends on the tables that are published behind it.
                        self.prepared = prepared
                    position = max(opening.position, self._progress.position or opening.position)
                    is_ahead = prepared is not None and opening.is_ahead(prepared)
                    self._note(position=position, gaps=opening.gaps, is_ahead=is_ahead)
            finally:
                sealer.close()

    def _wait_before_restart(self, policy: RestartPolicy, failure: Failure, end_lsn: int = 0) -> bool:
        """Wait as long as the policy says. Returns False if asked to stop; raises the error if the policy says to give up.

        What asks the launcher to stop may have ended the streamer, too: systemd signals all processes of a service.
        """
        if self._stopping.is_set():
            return False
        now = time.monotonic()
        delay = policy.delay(failure, end_lsn, now)
        if delay is None:
            raise final_error(failure, end_lsn)
        said = failure.message or "it said nothing"
        level = logging.WARNING if self._told.is_news(said, now) else logging.INFO
        advice = f" (hint: {failure.hint})" if failure.hint else ""
        _logger.log(level, "the streamer ended with %d: %s%s; starting it again in %.1f s", failure.code, said, advice, delay)
        self._note(restarts=self._progress.restarts + 1, last_error=said, last_error_at=time.time(), last_error_code=failure.code)
        return not self._stopping.wait(delay)

    def _stream(self, writer: StagingWriter, sealer: Sealer, prepared: Prepared, streamer: Streamer) -> Failure | None:
        """Begin a stream, and take it to its end. Returns the streamer's failure, None if it ended as it should."""
        start_lsn, self._backlog_lsn = writer.end_lsn, prepared.wal_lsn
        filler = SegmentFiller(start_lsn, self.config.seal, backlog_lsn=prepared.wal_lsn)
        arguments = [*(["-v"] if self.config.verbose else []), *slot_arguments(self.config), "-H", "--whole-transactions"]
        for name, value in plugin_options(prepared).items():
            arguments += ["-o", f"{name}={value}"]
        account_lsn = max(start_lsn, account.read(self.config.staging).of_log(start_lsn).lsn)
        arguments += ["--startpos", format_lsn(start_lsn), "--expect", f"{prepared.system_id}/{prepared.timeline}"]
        arguments += ["--expect-lsn", format_lsn(account_lsn), "--idle-positions"]
        if self.config.available_now:
            arguments += ["--endpos", format_lsn(prepared.wal_lsn), "--endpos-wait"]
        broken: ProtocolError | None = None
        is_whole = False
        with streamer as child:
            self._child = child
            child.begin(arguments)
            landing = Landing(child, filler, writer, sealer, self.config, self._passed_at)
            try:
                landing.pump(self._stopping, self._wakeup, lambda open_size: self._note(open_size=open_size))
                is_whole = filler.is_whole
                landing.finish()
            except ProtocolError as ex:
                broken = ex
                writer.discard()
            landing.confirm_rest()
            is_asked = self._stopping.is_set()
            at_end = self.config.available_now and is_whole and not is_asked and not child.ends_by_itself()
            child.quit()
            self._child = None
            failure = child.failure()
        self._note(open_size=0)
        if broken is not None:
            return Failure(ExitCode.PG_ERROR, broken.message)
        if failure.code == ExitCode.SUCCESS and (at_end or is_asked):
            if at_end:
                account.record(self.config.staging, prepared.wal_lsn, writer.end_lsn, self._asked_at)
                self._is_complete = True
            return None
        if is_asked:
            _logger.warning("the streamer ended with exit code %d when asked to quit: %s", failure.code, failure.message)
            return None
        return failure

    def _passed_at(self, lsn: int) -> float | None:
        """Return when the server's WAL passed an idle position, for the account; None if that was before the stream began.

        While the walsender works through old WAL, it tells its own place, which the server has passed long before.
        """
        if lsn < self._backlog_lsn:
            return None
        if self.config.available_now:
            return self._asked_at
        lag = None if self._monitor is None else self._monitor.lag(lsn, time.monotonic())
        return time.time() - (0.0 if lag is None else lag.seconds)

    def _tell(self, line: str) -> None:
        """Log a line from a child's stderr. Its final error is a mere info here, because it is reported as the child's failure."""
        _streamer_logger.log(logging.INFO if self.config.verbose or is_report(line) else logging.WARNING, "%s", line)

    def _sealed(self, segment: Segment, sealing: Sealing) -> None:
        """Count a sealed segment. The sealer's thread calls this."""
        progress, cut = self._progress, sealing.cut
        self._note(
            position=segment.end,
            segments=progress.segments + 1,
            size=progress.size + cut.size,
            records=progress.records + cut.records,
            transactions=progress.transactions + cut.transactions,
        )


_streamer_logger = logging.getLogger("cdcpipe.streamer")
