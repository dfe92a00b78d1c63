"""What to do when the streamer has ended: start it again, and when, or stop. Pure; time and chance are arguments.

| exit code | decision |
|---|---|
| 3 PG_CLOSED (also ended by an administrator), 9 SLOT_IN_USE | again, without limit |
| 5 PG_ERROR | again; not after the same error at the same end of the log for the n-th time (a row that cannot be decoded) |
| 2 INIT_FAILED | stop; but for a while after a lost connection again: the server may be restarting, unless it has gone back |
| killed by a signal, or 0 unasked for | again |
| all others | stop |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdcpipe.errors import (
    CdcpipeError,
    ConnectionClosedError,
    InitError,
    InvalidArgumentsError,
    RewoundServerError,
    ServerError,
    SlotDoesNotExistError,
    SlotInUseError,
)
from cdcpipe.lsn import format_lsn
from cdcpipe.pipe.exitcode import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Failure", "RestartPolicy", "error_of"]


@dataclass(frozen=True, slots=True)
class Failure:
    """How a streamer ended, at which end of the log, and what it said; ``code`` is negative for a signal."""

    code: int
    end_lsn: int
    message: str
    hint: str | None = None

    @property
    def is_rewound(self) -> bool:
        """Whether the server was found to have gone back (`RewoundServerError`): it must not be tried until it has come further."""
        return self.code == ExitCode.INIT_FAILED and self.message.startswith(RewoundServerError.BEGINNING)


class RestartPolicy:
    """Remembers how the streamers of one launcher ended."""

    def __init__(
        self,
        chance: Callable[[], float],
        *,
        first_delay_s: float = 0.2,
        longest_delay_s: float = 10.0,
        poison_limit: int = 5,
        reconnect_s: float = 60.0,
    ) -> None:
        self._chance = chance
        self._first_delay_s = first_delay_s
        self._longest_delay_s = longest_delay_s
        self._poison_limit = poison_limit
        self._reconnect_s = reconnect_s
        self._attempts = 0
        self._end_lsn = -1
        self._lost_at: float | None = None
        self._last_error: Failure | None = None
        self._same_errors = 0

    def delay(self, failure: Failure, now: float) -> float | None:
        """Return after how many seconds to start the streamer again, None to stop."""
        if failure.end_lsn > self._end_lsn:
            self._end_lsn = failure.end_lsn
            self._attempts = self._same_errors = 0
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
        delay_s = min(self._longest_delay_s, self._first_delay_s * 2.0**self._attempts)
        self._attempts = min(self._attempts + 1, 20)
        return delay_s * (0.5 + self._chance() / 2)


_POISON_HINT = (
    "the server cannot send the next transaction; the message tells what is in the way. While you look nothing is lost: the slot "
    "keeps it. pg_replication_slot_advance() past it loses all changes of that transaction, and of those that commit before the "
    "position: then copy the tables anew (cdcpipe-spark snapshot --table). To read the changes first: "
    "pg_copy_logical_replication_slot(SLOT, 'look', false, 'test_decoding'), pg_logical_slot_peek_changes('look', NULL, NULL)"
)
_ERRORS: dict[int, type[CdcpipeError]] = {
    error.exit_code: error
    for error in (InvalidArgumentsError, InitError, ConnectionClosedError, ServerError, SlotDoesNotExistError, SlotInUseError)
}


def error_of(failure: Failure) -> CdcpipeError:
    """Return the error that ``failure`` is to whoever ran the command; its exit code is the command's, or 7."""
    said = failure.message or "it said nothing"
    if failure.is_rewound:
        return RewoundServerError(said, hint=failure.hint)
    if failure.code == ExitCode.PG_ERROR and failure.end_lsn:
        return ServerError(f"again and again, after {format_lsn(failure.end_lsn)}: {said}", hint=failure.hint or _POISON_HINT)
    error = _ERRORS.get(failure.code)
    if error is not None:
        return error(said, hint=failure.hint)
    try:
        name = ExitCode(failure.code).name
    except ValueError:
        name = "no exit code of its own"
    return CdcpipeError(
        f"cdcpipe ended with {failure.code} ({name}), which is unexpected: {said}",
        hint=failure.hint or "start again; nothing is lost. If it happens again, please report it",
    )
