"""What to do when the streamer has ended: start it again, and when, or stop. Pure; time and chance are arguments.

| exit code | decision |
|---|---|
| 3 PG_CLOSED (also ended by an administrator), 9 SLOT_IN_USE | again, without limit |
| 5 PG_ERROR | again; not after the same error at the same end of the log for the n-th time (a row that cannot be decoded) |
| 2 INIT_FAILED | stop; but for a while after a lost connection again: the server may be restarting, unless it has gone back |
| killed by a signal, or 0 unasked for | again |
| all others | stop |

The pauses between two starts are those of a `RetryPolicy`. It has no limit: a launcher waits for its server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdcpipe.errors import CdcpipeError, ServerError
from cdcpipe.lsn import format_lsn
from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.retry import RetryPolicy
from spark_sink.client.failure import Failure, error_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RestartPolicy", "final_error"]

_PAUSES = RetryPolicy(first_pause_s=0.2, longest_pause_s=10.0, jitter=0.5)


class RestartPolicy:
    """Remembers how the streamers of one launcher ended."""

    def __init__(
        self,
        chance: Callable[[], float],
        *,
        pauses: RetryPolicy = _PAUSES,
        poison_limit: int = 5,
        reconnect_s: float = 60.0,
    ) -> None:
        self._chance = chance
        self._pauses = pauses
        self._poison_limit = poison_limit
        self._reconnect_s = reconnect_s
        self._failures = 0
        self._end_lsn = -1
        self._lost_at: float | None = None
        self._last_error: Failure | None = None
        self._same_errors = 0

    def delay(self, failure: Failure, end_lsn: int, now: float) -> float | None:
        """Return after how many seconds to start the streamer again, None to stop.

        ``end_lsn`` is the end of the log: a streamer that has moved it forward has been of use, and the pauses begin anew.
        """
        if end_lsn > self._end_lsn:
            self._end_lsn = end_lsn
            self._failures = self._same_errors = 0
            self._lost_at = None
        if failure.code == ExitCode.INIT_FAILED:
            if failure.is_rewound or self._lost_at is None or now - self._lost_at >= self._reconnect_s:
                return None
        elif failure.code == ExitCode.PG_ERROR:
            self._same_errors = self._same_errors + 1 if failure == self._last_error else 1
            self._last_error = failure
            if self._same_errors >= self._poison_limit:
                return None
            self._lost_at = now if self._lost_at is None else self._lost_at
        elif failure.code in (ExitCode.PG_CLOSED, ExitCode.SLOT_IN_USE, ExitCode.SUCCESS) or failure.code < 0:
            self._lost_at = now
        else:
            return None
        self._failures += 1
        return self._pauses.pause_s(self._failures, chance=self._chance())


_POISON_HINT = (
    "the server cannot send the next transaction; the message tells what is in the way. While you look nothing is lost: the slot "
    "keeps it. pg_replication_slot_advance() past it loses all changes of that transaction, and of those that commit before the "
    "position: then copy the tables anew (cdcpipe-spark snapshot --table). To read the changes first: "
    "pg_copy_logical_replication_slot(SLOT, 'look', false, 'test_decoding'), pg_logical_slot_peek_changes('look', NULL, NULL)"
)


def final_error(failure: Failure, end_lsn: int) -> CdcpipeError:
    """Return the error to stop with; ``end_lsn`` is the end of the log, 0 for a failure before there was a stream."""
    if failure.code == ExitCode.PG_ERROR and end_lsn:
        said = failure.message or "it said nothing"
        return ServerError(f"again and again, after {format_lsn(end_lsn)}: {said}", hint=failure.hint or _POISON_HINT)
    return error_of(failure)
