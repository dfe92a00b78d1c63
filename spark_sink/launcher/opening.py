"""Opens the log: prepares the slot, judges whether it continues the log, and begins an epoch. Done anew after each lost stream.

The process that has prepared the slot is the streamer of the next stream: `Opening.take_streamer`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from cdcpipe.logs import Told
from cdcpipe.lsn import format_lsn
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.units import format_size
from spark_sink.client.prepare import Prepared, creation_arguments, later_arguments
from spark_sink.launcher.continuity import (
    FedTables,
    Log,
    Verdict,
    awaited_gap,
    check_tables,
    gap_error,
    gone_back,
    gone_back_behind_copy,
    judge,
    judge_lost_log,
    judge_own_history,
    missing_slot,
    tables_gone_back,
    taken_along,
)
from spark_sink.launcher.streamer import Streamer
from spark_sink.staging import account, copied, recorded_gap
from spark_sink.staging.log import Epoch, Position, StagingError, begin_lsn, epoch_directory, list_epochs, log_end
from spark_sink.staging.same_source import check_source, is_elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from threading import Event

    from spark_sink.client.failure import Failure
    from spark_sink.launcher.config import LauncherConfig
    from spark_sink.staging.gap import Gap
    from spark_sink.staging.writer import StagingWriter

__all__ = ["Opening", "plugin_options", "slot_arguments"]

_logger = logging.getLogger(__name__)

_AWAIT_WAL_S = 1.0

_QUIET_HINT = (
    "a quiet server may take days for that; on the primary, SELECT pg_create_restore_point('cdcpipe'), pg_switch_wal() takes its"
    " WAL to the next file at once, which is usually 16 MiB further at most"
)
"""The restore point is a record: after a switch, the server does not switch again before something was written."""


class Opening:
    """Begins the epochs of one launcher.

    - ``wait_before_restart`` gets a failure and the end of the log. It waits, and returns False if the launcher has to stop.
    - ``stopping`` is set once the launcher has to stop.
    - ``tables`` are the tables that are fed from the log, if there are any.
    - ``read_copied_lsn`` reads the LSN of the newest copy of one of them; 0 if there is none.
    """

    def __init__(
        self,
        config: LauncherConfig,
        writer: StagingWriter,
        wait_before_restart: Callable[[Failure, int], bool],
        stopping: Event,
        tell: Callable[[str], None],
        *,
        tables: FedTables | None,
        read_copied_lsn: Callable[[], int],
    ) -> None:
        self._config = config
        self._writer = writer
        self._wait_before_restart = wait_before_restart
        self._stopping = stopping
        self._tell = tell
        self._tables = tables
        self._read_copied_lsn = read_copied_lsn
        self.position = Position(0, 0)
        """Where the last epoch begins."""
        self.gaps = 0
        """How many gaps were found and passed."""
        self._streamer: Streamer | None = None
        self._copied_lsn = 0
        """The newest copy that was recorded before the server was asked."""
        self._told = Told()

    def take_streamer(self) -> Streamer:
        """Return the process that has prepared the slot last. The caller begins the stream, and ends the process."""
        streamer, self._streamer = self._streamer, None
        assert streamer is not None
        return streamer

    def close(self) -> None:
        """End the process that has prepared the slot, unless it was taken."""
        if self._streamer is not None:
            with self.take_streamer():
                pass

    def open(self) -> Prepared | None:
        """Prepare the slot, and begin an epoch. Returns None if asked to stop.

        Raises GapError for a gap that the user does not want to pass, and StagingError if the log belongs to another slot.
        """
        # Server and log may have been restored together. Then only the tables know of their newest copies.
        self._copied_lsn = self._read_copied_lsn()
        prepared = self._prepare()
        if prepared is not None:
            self._begin_epoch(prepared, self._judge(prepared))
        return prepared

    def reopen(self, before: Prepared) -> Prepared | None:
        """Prepare the slot again after a stream. Begins another epoch only after a gap, or on another timeline or system id."""
        prepared = self._prepare()
        if prepared is None:
            return None
        verdict = self._judge(prepared)
        if verdict.is_new_epoch:
            self._begin_epoch(prepared, verdict)
            return prepared
        return replace(prepared, wal_lsn=before.wal_lsn) if self._config.available_now else prepared  # the end stays where it was

    def record_gone_back(self, prepared: Prepared, cause: str) -> None:
        """Record that the server has gone back behind the end of the log. The next `open` or `reopen` takes it as a gap."""
        log = self._log()
        assert log is not None
        self._record_gone_back(log, prepared, cause)

    def _record_gone_back(self, log: Log, prepared: Prepared, cause: str) -> Gap:
        gap = self._counted(gone_back(log, prepared, cause, time.time()))
        recorded_gap.record(self._config.staging, gap)
        return gap

    def _counted(self, gap: Gap, after_lsn: int | None = None) -> Gap:
        """Return a gap of changes that never happened with their number, if the log has some: those after ``after_lsn``.

        None: those after the beginning of the gap.
        """
        try:
            from spark_sink.staging.changes import count_changes
        except ImportError:  # pyarrow is not installed: landing does not need it
            return gap
        try:
            found = count_changes(self._config.staging, gap.after_lsn if after_lsn is None else after_lsn)
            return replace(gap, lost=found) if found.transactions else gap
        except StagingError as ex:  # it must not hide the gap
            _logger.warning("the changes that never happened can't be counted: %s", ex)
            return gap

    def await_wal(self, prepared: Prepared, tell_answer: Callable[[], None]) -> Prepared | None:
        """Wait until the WAL of a server that was promoted has passed the end of the log. Returns None if asked to stop.

        Before that, its transactions have positions that the log has used for changes that never happened there. The wait may take
        days. ``tell_answer`` is called for each answer after which it waits. Returns the last answer, at once if the server
        `has_moved`.
        """
        found, told = prepared, Told()
        while (lsn := self._resume_lsn()) > found.wal_lsn and not self.has_moved(found):
            tell_answer()
            if told.is_news(format_lsn(lsn), time.monotonic()):
                _logger.warning(
                    "the server's WAL is at %s; the stream begins when it has passed %s, after %s of WAL (hint: %s)",
                    *(found.wal_lsn, format_lsn(lsn), format_size(lsn - found.wal_lsn), _QUIET_HINT),
                )
            if self._stopping.wait(_AWAIT_WAL_S) or (answer := self._prepare()) is None:
                return None
            found = answer
        return None if self._stopping.is_set() else found

    def has_moved(self, prepared: Prepared) -> bool:
        """Tell whether the server is another one than that of the last epoch, or on another timeline: `reopen` judges it."""
        return is_elsewhere(list_epochs(self._config.staging)[-1], prepared)

    def is_ahead(self, prepared: Prepared) -> bool:
        """Tell whether the stream has to wait as in `await_wal`: the log ends beyond the WAL of a server that was promoted."""
        return self._resume_lsn() > prepared.wal_lsn

    def _resume_lsn(self) -> int:
        """Return the end of the log if its last changes never happened on this server, and nothing has come since; else 0."""
        epochs, end = list_epochs(self._config.staging), log_end(self._config.staging)
        return 0 if end is None or awaited_gap(epochs, end.lsn) is None else end.lsn

    def _prepare(self) -> Prepared | None:
        """Start streamers until one has prepared the slot; return None if asked to stop.

        A slot that is gone or lost although there is a log is a gap. It is created anew only if the user wants to go on after it.
        Its position tells later that it is a new one, but not on another server. There the gap is recorded before it is created.
        """
        config = self._config
        self.close()
        while not self._stopping.is_set():
            log = self._log()
            # A later one may be beyond what the server says of its WAL.
            self._copied_lsn = max(self._copied_lsn, copied.read(config.staging))
            is_new = log is None and self._tables is None
            is_creating = config.create_slot and (is_new or config.on_gap == "resnapshot")
            is_looking = is_creating and log is not None and log.recorded_gap is None and self._expects_other_server(log)
            is_creating = is_creating and not is_looking
            arguments = [*slot_arguments(config), *(creation_arguments if is_creating else later_arguments)(config)]
            if is_creating and config.on_gap == "resnapshot":
                arguments.append("--replace-lost")
            for system_id in self._expected(log):
                arguments += ["--expect-system-id", system_id]
            with contextlib.ExitStack() as stack:
                streamer = stack.enter_context(
                    Streamer(
                        ["prepare", "--then-stream", "--quiet", *arguments],
                        command=config.command,
                        temporary=config.spill or config.staging,
                        tell=self._tell,
                    )
                )
                try:
                    found = streamer.prepared(self._stopping.is_set)
                except InterruptedError:
                    return None
                if isinstance(found, Prepared):
                    stack.pop_all()
                    self._streamer = streamer
                    return found
            if found.other_system_id is not None:
                self._refuse(log, found.other_system_id)
            if is_looking and (found.code == ExitCode.SLOT_NOT_EXIST or found.is_lost_slot):
                missing = missing_slot(log, self._tables, config.slot, time.time())
                assert missing is not None
                # The other server's WAL may be behind the end of the log.
                recorded_gap.record(config.staging, replace(missing, is_divergence=True))
                continue
            if found.code == ExitCode.SLOT_NOT_EXIST and config.create_slot:
                gap = missing_slot(log, self._tables, config.slot, time.time())
                if gap is not None:
                    self._take_gap(gap, 0)
            if not self._wait_before_restart(found, 0 if log is None else log.end_lsn):
                return None
        return None

    def _expected(self, log: Log | None) -> list[str]:
        """Return the system ids that the server may have; none if any will do."""
        known = log.epochs[-1] if log is not None else self._tables
        return [] if known is None else list(filter(None, (known.system_id, self._config.accept_system_id)))

    def _refuse(self, log: Log | None, system_id: str) -> None:
        """Raise StagingError for a server that is none of the expected ones."""
        if log is not None:
            last = log.epochs[-1]
            check_source(self._config.staging, last, system_id, last.timeline, last.database, last.slot)
        elif self._tables is not None:
            check_tables(self._tables, system_id, None)

    def _expects_other_server(self, log: Log) -> bool:
        return self._config.accept_system_id not in (None, log.epochs[-1].system_id)

    def _log(self) -> Log | None:
        """Return what the staging directory says of the log; None if there is no log yet."""
        root = self._config.staging
        recorded, epochs, end = account.read(root), list_epochs(root), log_end(root)
        if end is None:
            return None
        if recorded.end_lsn > end.lsn:
            missing = f"from {format_lsn(end.lsn)} to {format_lsn(recorded.end_lsn)}"
            text = f"{root} lacks its newest segments, {missing}: they were lost, or it was copied while a launcher wrote"
            if self._told.is_news(text, time.monotonic()):
                _logger.warning("%s", text)
        recorded = recorded.of_log(end.lsn)
        if recorded.lsn < end.lsn:
            recorded = account.Account(end.lsn, _written_at(root, end))
        # Later the tables are further, and what they have read is removed.
        begin = 0 if self.position.epoch else begin_lsn(root, epochs)
        return Log(epochs, end.lsn, recorded, self._tables, self._recorded_gap(epochs), begin_lsn=begin)

    def _recorded_gap(self, epochs: Sequence[Epoch]) -> Gap | None:
        """Return the recorded gap that no epoch has; None if there is none. Removes the record of a gap that an epoch has."""
        root = self._config.staging
        found = recorded_gap.read(root)
        if found is None or all(epoch.gap != found for epoch in epochs):
            return found
        # The launcher that has begun the epoch was killed before it removed the record. Once the tables have passed the gap, the
        # epoch is removed, and the record would count as another gap.
        recorded_gap.remove(root)
        return None

    def _judge(self, prepared: Prepared) -> Verdict:
        """Decide how the log goes on with the slot. Raises GapError for a gap that the user does not want to pass."""
        log = self._log()
        verdict = self._judge_new(prepared) if log is None else self._judge_next(log, prepared)
        gap = verdict.gap
        if gap is None:
            if log is not None and verdict.former_system_id is not None:
                _logger.warning("%s", taken_along(log, prepared, str(self._config.staging)))
            return verdict
        known = self._recorded_gap(list_epochs(self._config.staging))
        if gap.is_divergence and gap.lost is None and gap != known:  # what is recorded was counted, or has nothing to count
            gap = self._counted(gap, verdict.lost_after_lsn)
        if known not in (None, gap):
            recorded_gap.record(self._config.staging, gap)  # the tables or the count have made it another one
        self._take_gap(gap, verdict.resume_lsn)
        return replace(verdict, gap=gap)

    def _judge_next(self, log: Log, prepared: Prepared) -> Verdict:
        config = self._config
        check_source(
            config.staging,
            log.epochs[-1],
            prepared.system_id,
            prepared.timeline,
            prepared.database,
            config.slot,
            is_accepted=config.accept_system_id == prepared.system_id,
        )
        if cause := gone_back_behind_copy(log, prepared, self._copied_lsn):
            log = replace(log, recorded_gap=self._record_gone_back(log, prepared, cause))
        now = time.time()
        verdict = judge(log, prepared, config.accept_system_id, now)
        is_plain_gap = verdict.gap is not None and not verdict.gap.is_divergence
        is_here = not verdict.is_new_epoch or (is_plain_gap and not is_elsewhere(log.epochs[-1], prepared))
        if is_here and log.fed_by_another is None:
            return verdict
        # On another timeline or server, copies count, too: one may be of transactions that never happened there. Whatever gap the
        # look without them has found, a copy from after its end would count as one that was made after it. Only the tables know of
        # their newest copies if the staging directory is an older copy.
        copied_lsn = max(copied.read(config.staging), self._read_copied_lsn())
        if not is_here:
            verdict = judge(replace(log, copied_lsn=copied_lsn), prepared, config.accept_system_id, now)
        return judge_own_history(log, verdict, prepared, copied_lsn, now)

    def _judge_new(self, prepared: Prepared) -> Verdict:
        """Decide how a new log begins. Logs a warning if there are tables, whose log is then not there any more."""
        tables = self._tables
        if tables is None:
            return Verdict()
        root, now = self._config.staging, time.time()
        known_gap = recorded_gap.read(root)
        if known_gap is None and (known_gap := tables_gone_back(tables, prepared, self._copied_lsn, now)) is not None:
            recorded_gap.record(root, known_gap)
        verdict = judge_lost_log(tables, prepared, self._config.accept_system_id, self._read_copied_lsn(), now, known_gap)
        if verdict.gap is None:
            log, at = tables.staging or "the log", tables.at
            _logger.warning("%s is not there any more: a new log begins at %s, where the tables in %s are", log, at, tables.name)
        return verdict

    def _take_gap(self, gap: Gap, resume_lsn: int) -> None:
        """Raise GapError, or count the gap if the user wants to go on after it."""
        root = self._config.staging
        error = gap_error(gap, str(root), resume_lsn, str(root / recorded_gap.NAME) if recorded_gap.read(root) == gap else None)
        if self._config.on_gap == "stop":
            raise error
        _logger.warning("%s; going on after the gap", error.message)
        self.gaps += 1

    def _begin_epoch(self, prepared: Prepared, verdict: Verdict) -> None:
        config = self._config
        if verdict.gap is not None and verdict.former_system_id is not None:
            recorded_gap.record(config.staging, verdict.gap)  # with a smaller account, the slot would look like the former one
        if (end := log_end(config.staging)) is not None:
            account.settle(config.staging, end.lsn)
        if verdict.account_lsn is not None:
            account.cut(config.staging, verdict.account_lsn)
            account.record(config.staging, verdict.account_lsn)
        wanted = Epoch(
            number=1 if self._tables is None else self._tables.position.epoch + 1,
            system_id=prepared.system_id,
            timeline=prepared.timeline,
            database=prepared.database,
            slot=config.slot,
            publications=config.publications,
            options=plugin_options(prepared),
            start_lsn=int(max(prepared.confirmed_flush_lsn, verdict.resume_lsn)),
            gap=verdict.gap,
            former_system_id=verdict.former_system_id,
            timeline_began_lsn=prepared.timeline_began_at.get(prepared.timeline, 0),
        )
        epoch = self._writer.begin_epoch(wanted)
        if verdict.gap is not None:
            recorded_gap.remove(config.staging)
        if epoch.left_out:
            _logger.warning(
                "--publication: the last start had %s, too, and this one does not: the log gets no changes of tables that nothing"
                " else publishes, and the server forgets them. Once a later start has %s again, run copies its tables anew"
                " (with --snapshot never: copy them with cdcpipe-spark snapshot)",
                *[" and ".join(epoch.left_out)] * 2,
            )
        self.position = epoch.start


def slot_arguments(config: LauncherConfig) -> list[str]:
    """Return the options of ``cdcpipe`` for the server, the slot and its publications."""
    arguments = [*config.connection, "-S", config.slot]
    for name in config.publications:
        arguments += ["--publication", name]
    return arguments


def plugin_options(prepared: Prepared) -> dict[str, str]:
    """Return the options for pgoutput, as the server's version allows."""
    if prepared.server_version >= 160000:
        return {"streaming": "parallel", "messages": "true"}
    return {"streaming": "on", "messages": "true"}


def _written_at(root: Path, end: Position) -> float:
    """Return when the epoch at the end of the log was last written to, in seconds since 1970; 0 if that is unknown."""
    try:
        return epoch_directory(root, end.epoch).stat().st_mtime
    except OSError:
        return 0.0
