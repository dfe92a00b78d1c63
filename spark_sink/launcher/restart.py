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

from cdcpipe.pipe.exitcode import ExitCode
from cdcpipe.retry import RetryPolicy
from spark_sink.client.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RestartPolicy"]

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

    def delay(self, failure: Failure, now: float) -> float | None:
        """Return after how many seconds to start the streamer again, None to stop."""
        if failure.end_lsn > self._end_lsn:
            self._end_lsn = failure.end_lsn
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
