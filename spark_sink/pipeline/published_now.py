"""Asks the log's server which tables are published now, for `spark_sink.schema.catalog_answers`: ``describe`` of a pipeline.

The pipeline takes an answer for newer than the log. So an answer counts only if its server has all changes of the log: it is the
one of the log's last epoch, or was promoted with them. With several hosts, the connection may come to an old primary, or to a
standby that lags.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from cdcpipe.errors import CdcpipeError, ConnectionClosedError, InitError, UnreachableError
from cdcpipe.lsn import format_lsn
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.retry import RetryPolicy
from spark_sink.client.failure import error_of
from spark_sink.client.prepare import Prepared, ask_published
from spark_sink.staging.log import list_epochs, log_end
from spark_sink.staging.same_source import common_history_lsn, is_elsewhere

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Mapping

    from spark_sink.launcher.config import LauncherConfig

__all__ = ["PublishedNow"]

_RECONNECT = RetryPolicy(within_s=60.0, first_pause_s=1.0)
"""A server that is asked for its tables may be restarting."""
_NEEDED = RetryPolicy(within_s=600.0, first_pause_s=1.0)
"""With masks, nothing can be written without the answer. So a failover may take longer.

After one that has lost changes, the launcher has to find the gap first. It may take minutes to notice that the old primary is dead.
"""

_REACHED = "start again once the server of the log can be reached"
_PROMOTED = "start again: run then begins to read from the server that was promoted"

_AWAY = (ExitCode.INIT_FAILED, ExitCode.PG_CLOSED, ExitCode.PG_ERROR)


class PublishedNow:
    """The published tables with their keys and columns, as of each request. Setting ``stopping`` ends a request that waits."""

    def __init__(self, config: LauncherConfig, stopping: threading.Event) -> None:
        self._config = config
        self._stopping = stopping
        self.with_parts = False
        """Whether to ask for the tables' parts, too. A pipeline with masks needs them."""
        self.is_interrupted = False
        """Whether a stop has ended a request. Its caller got an error."""

    def describe(self) -> Iterable[Mapping[str, Any]]:
        """Return the tables. Waits for a server that is away: it may be restarting, or another one is being promoted."""
        try:
            return self._await_answer().tables
        except InterruptedError:
            self.is_interrupted = True
            raise

    def _await_answer(self) -> Prepared:
        # With on_gap "stop" the launcher ends at a gap. With available_now it may have ended already.
        finds_gap = self._config.on_gap == "resnapshot" and not self._config.available_now
        began, failures = time.monotonic(), 0
        while True:
            try:
                return self._ask()
            except CdcpipeError as ex:
                failures += 1
                policy = _NEEDED if self.with_parts or (finds_gap and isinstance(ex, _LostTailError)) else _RECONNECT
                pause_s = policy.pause_s(failures, time.monotonic() - began) if ex.exit_code in _AWAY else None
                if pause_s is None:
                    is_gone = isinstance(ex, UnreachableError | ConnectionClosedError)
                    cure = _REACHED if is_gone else ex.hint or "start again once this is mended"
                    raise CdcpipeError(
                        f"tables that are new or have changed could not be looked up: {ex.message}",
                        hint=f"{cure}; nothing is lost",
                    ) from ex
            if self._stopping.wait(pause_s):
                raise InterruptedError

    def _ask(self) -> Prepared:
        """Return the answer of a server that has all changes of the log. Raises InitError if another server has answered."""
        # A standby may lag behind the log. A primary of its timeline does not: what it lacks, it has lost, and the log says so.
        end = log_end(self._config.staging)
        answer = ask_published(self._config, self._stopping.is_set, parts=self.with_parts)
        if answer.code != ExitCode.SUCCESS:
            raise error_of(answer.failure)
        found, epochs = Prepared.parse(answer.output), list_epochs(self._config.staging)
        who = f"the server at {found.connection.get('host')}, port {found.connection.get('port')},"
        if epochs and is_elsewhere(epochs[-1], found):
            theirs = f"timeline {found.timeline} of system {found.system_id}"
            ours = f"timeline {epochs[-1].timeline} of system {epochs[-1].system_id}"
            said = f"{who} is on {theirs}; the log is of {ours}"
            if found.system_id != epochs[-1].system_id or found.timeline <= epochs[-1].timeline:
                raise InitError(said, hint=_REACHED)
            if end is not None and common_history_lsn(epochs, found) < end.lsn:
                raise _LostTailError(f"{said}, and has changes that this server never had", hint=_PROMOTED)
        if found.is_standby and end is not None and found.wal_lsn < end.lsn:
            raise InitError(
                f"{who} is a standby at {found.wal_lsn}, behind the log, which ends at {format_lsn(end.lsn)}", hint=_REACHED
            )
        return found


class _LostTailError(InitError):
    """The server was promoted without the last changes of the log: a gap, which the launcher has not found yet."""
