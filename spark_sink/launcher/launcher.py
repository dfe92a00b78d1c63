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

When a streamer ends, for whatever reason, nothing is lost. The launcher drops an incomplete transaction and seals the rest. The
next streamer starts at the end of the log (`--startpos`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cdcpipe.errors import ProtocolError, RewoundServerError
from cdcpipe.lsn import format_lsn
from cdcpipe.pipe.exitcode import ExitCode
from spark_sink.client.failure import Failure
from spark_sink.client.prepare import Prepared
from spark_sink.client.process import COMMAND, ask, is_report
from spark_sink.files.local import local_directory
from spark_sink.launcher.restart import RestartPolicy, final_error
from spark_sink.launcher.sealer import Sealer
from spark_sink.launcher.streamer import QUIT_TIMEOUT_S, Feedback, Streamer
from spark_sink.staging import known_position
from spark_sink.staging.filler import SealPolicy, SegmentFiller
from spark_sink.staging.log import Position
from spark_sink.staging.readers import Retention
from spark_sink.staging.writer import Failpoint, StagingWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from spark_sink.staging.filler import Operation
    from spark_sink.staging.log import Segment
    from spark_sink.staging.writer import Sealing

__all__ = ["Launcher", "LauncherConfig", "Progress"]

_logger = logging.getLogger(__name__)

_READ_BYTES, _LEAST_READ_BYTES = 1 << 20, 512
_LONGEST_POLL_S = 3600.0

_BULK_BYTES, _BULK_PAUSE_S = 32 << 10, 0.004
"""After a read of at least this size the thread pauses, so that reads are fewer and larger. The pipe holds the data meanwhile."""


@dataclass(frozen=True, slots=True)
class LauncherConfig:
    """What to land, and where. ``connection`` has options of ``cdcpipe``: ``-d -h -p -U -m``, as on its command line."""

    slot: str
    staging: Path
    publications: tuple[str, ...] = ()
    connection: tuple[str, ...] = ()
    create_slot: bool = False
    tables: tuple[str, ...] = ()
    """With ``create_slot``: the tables of a publication that has to be created; empty for all tables."""
    available_now: bool = False
    """Whether to end once the log has everything that was committed when the launcher started."""
    seal: SealPolicy = field(default_factory=SealPolicy)
    spill: Path | None = None
    """The directory for large transactions in progress; None for the staging directory."""
    retention: Retention = field(default_factory=Retention)
    """Which segments are kept although all readers have read them."""
    verbose: bool = False
    command: tuple[str, ...] = COMMAND
    hook: Callable[[Failpoint], None] | None = None
    """A function that is called at each failpoint; for tests."""

    def __post_init__(self) -> None:
        """Raise InvalidArgumentsError for a URL as staging directory, before a slot is created."""
        local_directory(self.staging, "the staging directory")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a launcher is: what it has sealed since its start, and the end of the log (None until the launcher knows it)."""

    position: Position | None = None
    segments: int = 0
    size: int = 0
    records: int = 0
    transactions: int = 0
    open_size: int = 0
    restarts: int = 0
    last_error: str | None = None


class Launcher:
    """Lands one slot in one staging directory, until it is stopped; with ``available_now`` until everything is landed."""

    def __init__(self, config: LauncherConfig) -> None:
        self.config = config
        self.prepared: Prepared | None = None
        self._progress = Progress()
        self._error: BaseException | None = None
        self._is_complete = False
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._progress_lock = threading.Lock()
        self._wakeup = _Wakeup()
        self._thread = threading.Thread(target=self._run, name="cdcpipe-launcher", daemon=True)

    # --- for its owner ---

    def start(self) -> Self:
        """Start the threads. Returns when the slot is prepared and the epoch has begun; raises the error that prevents this."""
        self._thread.start()
        self._ready.wait()
        if self._ended.is_set():
            self._raise_error()
        return self

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the launcher, and raise its error if it has one. Returns False if ``timeout_s`` have passed."""
        if not self._ended.wait(timeout_s):
            return False
        self._raise_error()
        return True

    def request_stop(self) -> None:
        """Ask the launcher to end, and return at once. It first seals and confirms whole transactions. Safe in a signal handler."""
        self._stopping.set()
        self._wakeup.set()

    def stop(self) -> None:
        """Ask the launcher to end, and wait until it has ended. Call ``wait`` to learn whether there was an error."""
        self.request_stop()
        if self._thread.ident is not None:
            self._thread.join()

    def note_confirmed(self, confirmed_lsn: int | None) -> None:
        """Note that the log has all that the slot has confirmed, also where nothing was published; nobody else moves the slot."""
        sealed = self._progress.position
        if confirmed_lsn is not None and sealed is not None and confirmed_lsn > sealed.lsn and not self.has_ended:
            known_position.note(self.config.staging, confirmed_lsn)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, _value: BaseException | None, _tb: TracebackType | None) -> None:
        self.stop()
        if kind is None:
            self._raise_error()

    @property
    def progress(self) -> Progress:
        """How far the launcher is at this moment."""
        return self._progress

    @property
    def has_ended(self) -> bool:
        """Whether the launcher has ended, for whatever reason."""
        return self._ended.is_set()

    @property
    def is_complete(self) -> bool:
        """Whether the launcher has ended because, with ``available_now``, everything is in the log."""
        return self._is_complete

    @property
    def error(self) -> BaseException | None:
        """The error with which the launcher has ended; None if there is none."""
        return self._error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # --- the launcher's thread ---

    def _run(self) -> None:
        try:
            self._land()
        except BaseException as ex:  # noqa: BLE001 - `wait` raises it again in its own thread
            self._error = ex
            self._note(last_error=str(ex))
        finally:
            self._wakeup.close()
            self._ended.set()
            self._ready.set()

    def _note(self, **changes: Any) -> None:
        with self._progress_lock:
            self._progress = replace(self._progress, **changes)

    def _land(self) -> None:
        config = self.config
        policy = RestartPolicy(random.random)
        with StagingWriter(config.staging, slot=config.slot, hook=config.hook) as writer:
            prepared = self._prepare(policy)
            if prepared is None:
                return
            epoch = writer.begin_epoch(
                system_id=prepared.system_id,
                timeline=prepared.timeline,
                database=prepared.database,
                slot=config.slot,
                publications=config.publications,
                options=self._plugin_options(prepared),
                first_lsn=prepared.confirmed_flush_lsn,
            )
            self._note(position=epoch.start)
            self.prepared = prepared
            self._ready.set()
            sealer = Sealer(writer, self._sealed, self._wakeup.set, config.retention)
            try:
                while not self._stopping.is_set():
                    failure = self._stream(writer, sealer, prepared)
                    if failure is None or not self._wait_before_restart(policy, failure, writer.end_lsn):
                        return
            except RewoundServerError as ex:
                writer.end_for_good(ex.message)
                raise
            finally:
                sealer.close()

    def _wait_before_restart(self, policy: RestartPolicy, failure: Failure, end_lsn: int = 0) -> bool:
        """Wait as long as the policy says. Returns False if asked to stop; raises the error if the policy says to give up."""
        delay = policy.delay(failure, end_lsn, time.monotonic())
        if delay is None:
            raise final_error(failure, end_lsn)
        said = failure.message or "it said nothing"
        _logger.warning("the streamer ended with %d: %s; starting it again in %.1f s", failure.code, said, delay)
        self._note(restarts=self._progress.restarts + 1, last_error=said)
        return not self._stopping.wait(delay)

    def _arguments(self) -> list[str]:
        config = self.config
        arguments = [*config.connection, "-S", config.slot]
        for name in config.publications:
            arguments += ["--publication", name]
        return arguments

    def _plugin_options(self, prepared: Prepared) -> dict[str, str]:
        """Return the options for pgoutput, as the server's version allows."""
        if prepared.server_version >= 160000:
            return {"streaming": "parallel", "messages": "true"}
        return {"streaming": "on", "messages": "true"}

    def _prepare(self, policy: RestartPolicy) -> Prepared | None:
        """Run ``cdcpipe prepare`` until it succeeds; return None if asked to stop."""
        arguments = self._arguments()
        if self.config.create_slot:
            arguments.append("-c")
        for table in self.config.tables:
            arguments += ["--table", table]
        while not self._stopping.is_set():
            try:
                answer = ask(
                    ["prepare", "--quiet", *arguments],
                    command=self.config.command,
                    is_stopping=self._stopping.is_set,
                    tell=self._tell,
                )
            except InterruptedError:
                return None
            if answer.code == ExitCode.SUCCESS:
                return Prepared.parse(answer.output)
            if not self._wait_before_restart(policy, answer.failure):
                return None
        return None

    def _stream(self, writer: StagingWriter, sealer: Sealer, prepared: Prepared) -> Failure | None:
        """Run one streamer to its end. Returns its failure, None if it ended as it should."""
        start_lsn = writer.end_lsn
        filler = SegmentFiller(start_lsn, self.config.seal)
        arguments = [*(["-v"] if self.config.verbose else []), *self._arguments(), "-H", "--whole-transactions"]
        for name, value in self._plugin_options(prepared).items():
            arguments += ["-o", f"{name}={value}"]
        arguments += ["--startpos", format_lsn(start_lsn), "--expect", f"{prepared.system_id}/{prepared.timeline}"]
        if self.config.available_now:
            arguments += ["--endpos", format_lsn(prepared.wal_lsn), "--endpos-wait"]
        broken: ProtocolError | None = None
        is_whole = False
        spill = self.config.spill or self.config.staging
        with Streamer(arguments, command=self.config.command, temporary=spill, tell=self._tell) as child:
            feedback = Feedback(child, start_lsn, self.config.hook)
            try:
                self._pump(child, filler, writer, sealer, feedback)
                is_whole = filler.is_whole
                self._apply(filler.finish(), writer, sealer)
            except ProtocolError as ex:
                broken = ex
                writer.discard()
            sealer.drain()
            feedback.send(sealer.sealed_lsn, QUIT_TIMEOUT_S)
            is_asked = self._stopping.is_set()
            at_end = self.config.available_now and is_whole and not is_asked and not child.ends_by_itself()
            child.quit()
            failure = child.failure()
        self._note(open_size=0)
        if broken is not None:
            return Failure(ExitCode.PG_ERROR, broken.message)
        if failure.code == ExitCode.SUCCESS and (at_end or is_asked):
            if at_end:
                known_position.note(self.config.staging, prepared.wal_lsn)
                self._is_complete = True
            return None
        if is_asked:
            _logger.warning("the streamer ended with exit code %d when asked to quit: %s", failure.code, failure.message)
            return None
        return failure

    def _pump(self, child: Streamer, filler: SegmentFiller, writer: StagingWriter, sealer: Sealer, feedback: Feedback) -> None:
        """Move bytes from the streamer to the open segment, until the streamer closes its stdout or the launcher has to stop."""
        # A segment can be cut only between two reads. So a read must not be larger than a segment.
        read_bytes = min(_READ_BYTES, max(self.config.seal.segment_bytes, _LEAST_READ_BYTES))
        poll = select.poll()
        poll.register(child.stdout_fd, select.POLLIN)
        poll.register(self._wakeup.fd, select.POLLIN)
        while not self._stopping.is_set():
            sealer.check()
            feedback.send(sealer.sealed_lsn)
            deadline = filler.deadline
            timeout_s = _LONGEST_POLL_S if deadline is None else min(deadline - time.monotonic(), _LONGEST_POLL_S)
            ready = {fd for fd, _ in poll.poll(max(timeout_s, 0.0) * 1000 + 1)}
            if self._wakeup.fd in ready:
                self._wakeup.clear()
            if child.stdout_fd in ready:
                data = os.read(child.stdout_fd, read_bytes)
                if not data:
                    return
                self._apply(filler.feed(data, time.monotonic()), writer, sealer)
                if len(data) >= _BULK_BYTES:
                    time.sleep(_BULK_PAUSE_S)
            else:
                self._apply(filler.tick(time.monotonic()), writer, sealer)
            if writer.open_size != self._progress.open_size:
                self._note(open_size=writer.open_size)

    def _tell(self, line: str) -> None:
        """Log a line from a child's stderr. Its final error is a mere info here, because it is reported as the child's failure."""
        _streamer_logger.log(logging.INFO if self.config.verbose or is_report(line) else logging.WARNING, "%s", line)

    def _apply(self, operations: list[Operation], writer: StagingWriter, sealer: Sealer) -> None:
        for operation in operations:
            sealing = writer.apply(operation)
            if sealing is not None:
                sealer.submit(sealing)

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


class _Wakeup:
    """Wakes the thread that polls ``fd``. Any thread and a signal handler may call `set`; after `close` it does nothing."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt its own thread inside `set`

    def set(self) -> None:
        with self._lock:
            if self.fd >= 0:
                with contextlib.suppress(BlockingIOError):  # the pipe is full: the thread wakes up anyway
                    os.write(self._write_fd, b"w")

    def clear(self) -> None:
        os.read(self.fd, 4096)

    def close(self) -> None:
        with self._lock:
            os.close(self.fd)
            os.close(self._write_fd)
            self.fd = -1


_streamer_logger = logging.getLogger("cdcpipe.streamer")
