"""Decides what the launcher does after the streamer has ended: start it again after a pause, or stop.

| exit code | decision |
|---|---|
| 3 PG_CLOSED (also when an administrator ended the connection) | start again, without limit |
| 9 SLOT_IN_USE | start again, without limit; before the launcher has had the slot, only for a while: another program may keep it |
| 5 PG_ERROR as the server lacks something (`is_shortage`) | start again, for `reconnect_s` if that is set; at first as with 9 |
| 5 PG_ERROR | start again; stop after the n-th equal error in a row at one end of the log (a row that the server cannot decode) |
| 2 INIT_FAILED without a connection | stop at the start; after a lost connection start again, for `reconnect_s` if that is set |
| 2 INIT_FAILED with `is_shortage` | the same |
| 2 INIT_FAILED because the slot is lost | stop: no stream will ever come from it |
| 2 INIT_FAILED for another reason | stop; start again for a while after a lost connection: a server may be in promotion |
| 2 INIT_FAILED because the slot is beyond the log's account | start again: the launcher judges the slot first |
| a signal (also if reported as 130 or 143), or 0 although the launcher did not ask the streamer to end | start again |
| all others | stop |

While the launcher waits for the server's WAL, each answer counts as a connection, which may be lost later.

After a stream that has brought changes, or has lasted a while, the pauses are short again. A `RetryPolicy` gives the pauses. It has
no limit: a launcher waits for its server. What is waited for counts from its beginning, whatever exit codes it comes with. Time and
chance are arguments, so that the decisions depend on nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdcpipe.errors import CdcpipeError, ServerError
from cdcpipe.lsn import format_lsn
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.retry import RetryPolicy
from spark_sink.client.failure import Failure, error_of
from spark_sink.client.own_words import POISON_HINT

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RestartPolicy", "final_error"]

_PAUSES = RetryPolicy(first_pause_s=0.2, longest_pause_s=10.0, jitter=0.5)

_HEALTHY_S = 10.0
"""After a stream that has lasted this long, the server is well again."""

_LONG_S = 3600.0
"""After a stream that has lasted this long, an error is not of the transaction at which the stream before ended."""

_REFUSAL_S = 300.0
"""How long a server that can be reached may refuse the stream after a lost connection: a standby does, until it is promoted.

A first start waits as long for a slot in use: a server takes a minute (wal_sender_timeout) to notice that a machine is gone.
It waits no longer for a server that lacks something.
"""

_PASSING = (ExitCode.PG_CLOSED, ExitCode.SLOT_IN_USE, ExitCode.SUCCESS)


class RestartPolicy:
    """Remembers how the streamers of one launcher ended, and decides what to do next."""

    def __init__(
        self,
        chance: Callable[[], float],
        *,
        pauses: RetryPolicy = _PAUSES,
        poison_limit: int = 5,
        reconnect_s: float | None = None,
    ) -> None:
        self._chance = chance
        self._pauses = pauses
        self._poison_limit = poison_limit
        self._reconnect_s = reconnect_s
        self._failures = 0
        self._end_lsn = -1
        self._started_at: float | None = None
        """When the streamer was to start that has ended now."""
        self._lost_at: float | None = None
        """When the last connection was lost. After errors of streams that did not last: when the first of them was."""
        self._refused_at: float | None = None
        """When a server that can be reached first refused the stream. How long it was away before does not count."""
        self.has_had_slot = False
        """Whether the launcher has had the slot since its start. The launcher sets this."""
        self._busy_at: float | None = None
        """When a start first found the slot in use, or a server that lacks something. Other failures do not end this wait."""
        self._last_error: Failure | None = None
        self._same_errors = 0

    def begin_at(self, end_lsn: int) -> None:
        """Take note of where the log goes on. Behind a gap this is beyond its former end, although no change has come."""
        self._end_lsn = max(self._end_lsn, end_lsn)

    def note_answer(self, now: float) -> None:
        """Take note that the server has answered while the launcher waits for its WAL: if it is away then, that begins now."""
        self._failures = 0
        self._lose(now)

    def delay(self, failure: Failure, end_lsn: int, now: float) -> float | None:
        """Return the pause in seconds before the next start; None to stop.

        ``end_lsn`` is the end of the log.
        """
        pause_s = self._pause_s(failure, end_lsn, now)
        self._started_at = None if pause_s is None else now + pause_s
        return pause_s

    def _pause_s(self, failure: Failure, end_lsn: int, now: float) -> float | None:
        lasted_s = 0.0 if self._started_at is None else now - self._started_at
        has_lasted = lasted_s >= _HEALTHY_S
        if failure.code == ExitCode.PG_CLOSED and has_lasted:
            self._failures = 0
        if not self.has_had_slot and (failure.code == ExitCode.SLOT_IN_USE or failure.is_shortage):
            if self._busy_at is None:
                self._busy_at = now
            elif now - self._busy_at >= _REFUSAL_S:
                return None
        if end_lsn > self._end_lsn:
            self._end_lsn = end_lsn
            self._failures = self._same_errors = 0
            self._lose(None)
        if failure.is_lost_slot:
            return None
        if failure.code == ExitCode.INIT_FAILED:
            if not failure.is_gap and (self._lost_at is None or self._gives_up(failure, self._lost_at, now)):
                return None
        elif failure.is_shortage:
            # A stream may fill the disk for minutes until it fails, and the server then removes what it has written.
            if self._lost_at is None or lasted_s >= max(_HEALTHY_S, self._reconnect_s or 0.0):
                self._lose(now)
            elif self._gives_up(failure, self._lost_at, now):
                return None
        elif failure.code == ExitCode.PG_ERROR:
            is_again = failure == self._last_error and lasted_s < _LONG_S
            self._same_errors = self._same_errors + 1 if is_again else 1
            self._last_error = failure
            if self._same_errors >= self._poison_limit:
                return None
            if self._lost_at is None or has_lasted:
                self._lose(now)
        elif failure.code in _PASSING or failure.code < 0:
            self._lose(now)
        else:
            return None
        self._failures += 1
        return self._pauses.pause_s(self._failures, chance=self._chance())

    def _lose(self, at: float | None) -> None:
        self._lost_at, self._refused_at = at, None

    def _gives_up(self, failure: Failure, lost_at: float, now: float) -> bool:
        """Take note of a start without a stream, and tell whether it was the last one."""
        if failure.is_unreachable or failure.is_shortage:
            self._refused_at = None
        elif self._refused_at is None:
            self._refused_at = now
        is_refused = self._refused_at is not None and now - self._refused_at >= _REFUSAL_S
        return is_refused or (self._reconnect_s is not None and now - lost_at >= self._reconnect_s)


_LOST_SLOT_HINT = (
    "start run once with -c --on-gap resnapshot: it drops the slot, makes a new one and copies all tables anew (after land, the"
    " next run copies them)"
)

_GONE_SLOT_HINT = (
    "the log has everything up to {lsn}, and the changes after it went with the slot. Is this the right server, and the right name?"
    " SELECT slot_name FROM pg_replication_slots lists those that exist. Otherwise start run once with -c --on-gap resnapshot: it"
    " makes a new slot and copies all tables anew (after land, the next run copies them). If a former server goes on and still has"
    " the slot, drop it there: it keeps WAL"
)


def final_error(failure: Failure, end_lsn: int) -> CdcpipeError:
    """Return the error with which the launcher stops. ``end_lsn`` is the end of the log, 0 for a failure before the stream."""
    if failure.code == ExitCode.PG_ERROR and end_lsn and not failure.is_shortage:
        said = failure.message or "it said nothing"
        return ServerError(f"again and again, after {format_lsn(end_lsn)}: {said}", hint=failure.hint or POISON_HINT)
    error = error_of(failure)
    if failure.is_lost_slot:
        error.hint = f"{_LOST_SLOT_HINT}; or by hand: {failure.hint}"
    elif failure.is_shortage:
        error.hint = f"{failure.hint or 'give the server what it lacks'}; then start again: nothing is lost, the slot keeps the WAL"
    elif failure.code == ExitCode.SLOT_NOT_EXIST and end_lsn:  # the streamer's hint is for a slot that never existed
        error.hint = _GONE_SLOT_HINT.format(lsn=format_lsn(end_lsn))
    return error
