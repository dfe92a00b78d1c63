"""Positions: what was received, what the consumer confirmed, and when a status update is due. No I/O; time is an argument.

The rules that this module keeps (the server skips a transaction for ever once its commit lies before the confirmed position):

1.  Only two kinds of position are ever confirmed: the end of a transaction that was written out and that the consumer confirmed,
    and the position of a keepalive once nothing is outstanding, so that an idle slot does not retain WAL. A logical message outside
    of transactions counts as one that ends where its record does, which is what the server gives as its position.
2.  Feedback is cut down to the last transaction end that it covers. Feedback in the middle of a transaction, or from the future,
    can't lose the transactions around it.
3.  The confirmed position never goes back.
4.  No position between a PREPARE and the end of its COMMIT PREPARED is ever confirmed: from there the server would send the
    COMMIT PREPARED alone after a restart, and the changes never again. Feedback in between confirms the last transaction end
    that lies between no such pair; it counts in full once the commits are confirmed, too. A prepared transaction without
    changes has such a pair as well, though nothing comes out for it.

Source: the manual, "Streaming Replication Protocol", Standby status update.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Progress", "Status"]

MIN_REPLY_INTERVAL_S = 0.01
"""A server that shuts down asks for replies without a pause; more answers than this help nobody."""

MAX_UNCONFIRMED = 1 << 20
"""How many transaction ends are remembered; beyond that every other one is forgotten, which only makes feedback coarser."""

NEVER = float("inf")


class Status(NamedTuple):
    """What the next status update says. A ``flush_lsn`` of 0 is "no opinion": the server's confirmed position stays."""

    write_lsn: int
    flush_lsn: int
    reply_requested: bool


class Progress:
    """The positions of one stream, and its timer.

    ``feedback_interval_s`` is the longest that confirmed feedback waits before it is sent; ``status_interval_s`` the time between
    status updates when there is nothing to say (0: only when the server asks); ``silence_limit_s`` how long the server may say
    nothing (0: for ever): at half of it a reply is asked for. ``now`` is monotonic seconds everywhere.
    """

    def __init__(
        self,
        now: float,
        *,
        feedback_interval_s: float = 0.0,
        status_interval_s: float = 1.0,
        silence_limit_s: float = 0.0,
    ) -> None:
        self.feedback_interval_s = feedback_interval_s
        self.status_interval_s = status_interval_s
        self.silence_limit_s = silence_limit_s
        self.received_lsn = 0
        """The furthest position that the server has sent anything about."""
        self.confirmed_lsn = 0
        """What the server may forget; 0 until something was confirmed."""
        self.written_lsn = 0
        """The end of the last transaction that was written out whole."""
        self._open: set[int] = set()
        self._last_end = 0
        self._unconfirmed: deque[int] = deque()
        self._prepared: dict[int, tuple[int, float]] = {}
        """For each prepared transaction: where it was prepared, and the end of its commit; until that end is confirmed."""
        self._asked_lsn = 0
        """The highest feedback, as far as it was written out."""
        self._idle_lsn = 0
        self._heard_at = now
        self._sent_at = now
        self._reply_wanted = False
        self._feedback_due_at = NEVER

    # What the server sends

    def begin(self, xid: int = 0) -> None:
        """The records of a transaction begin (0: the one that is not streamed)."""
        self._open.add(xid)
        self._idle_lsn = 0

    def end(self, lsn: int, xid: int = 0) -> None:
        """The records of a transaction were received whole; it ends at ``lsn``."""
        self._open.discard(xid)
        self._last_end = max(self._last_end, lsn)
        self.received_lsn = max(self.received_lsn, lsn)
        self._idle_lsn = 0

    def abort(self, xid: int) -> None:
        """A streamed transaction was rolled back."""
        self._open.discard(xid)

    def prepare(self, xid: int, prepare_lsn: int) -> None:
        """A transaction was received whole and is held back until it is known whether it commits."""
        self._open -= {0, xid}
        self._prepared[xid] = prepare_lsn, NEVER
        self._idle_lsn = 0

    def commit_prepared(self, xid: int, lsn: int) -> None:
        """What was held back is committed, and ends at ``lsn``. ``end`` is told as well, unless there were no changes."""
        if xid in self._prepared:
            self._prepared[xid] = self._prepared[xid][0], lsn
        self._idle_lsn = 0

    def forget_prepared(self, xid: int) -> None:
        """What was held back was rolled back: a restart may bring its ROLLBACK PREPARED alone."""
        self._prepared.pop(xid, None)
        before = self.confirmed_lsn
        self._confirm(self._asked_lsn)
        if self.confirmed_lsn > before:
            self._feedback_due_at = 0.0

    def message(self, lsn: int) -> None:
        """A record that belongs to no transaction was received; it ends at ``lsn``."""
        self._last_end = max(self._last_end, lsn)
        self.received_lsn = max(self.received_lsn, lsn)
        self._idle_lsn = 0

    def keepalive(self, wal_end: int, *, reply_requested: bool) -> None:
        """The server has sent everything up to ``wal_end``."""
        self.received_lsn = max(self.received_lsn, wal_end)
        self._reply_wanted |= reply_requested
        if not self._open:
            self._idle_lsn = wal_end
            self._settle()

    def heard(self, now: float) -> None:
        """The server is alive, or nobody listened to it."""
        self._heard_at = now

    # What the consumer does

    def written(self, ends: Iterable[int]) -> None:
        """The transactions that end at ``ends`` (and records without one) were written out whole, in that order."""
        for end in ends:
            if end > self.written_lsn:
                self.written_lsn = end
                self._unconfirmed.append(end)
        if len(self._unconfirmed) > MAX_UNCONFIRMED:
            last = self._unconfirmed[-1]
            self._unconfirmed = deque(list(self._unconfirmed)[1::2])
            if self._unconfirmed[-1] != last:
                self._unconfirmed.append(last)

    def feedback(self, lsn: int, now: float) -> None:
        """Note that the consumer holds everything up to ``lsn`` (0 says nothing)."""
        before = self.confirmed_lsn
        self._confirm(lsn)
        self._settle()
        if self.confirmed_lsn > before:
            self._feedback_due_at = min(self._feedback_due_at, now + self.feedback_interval_s)

    def _confirm(self, lsn: int) -> None:
        lsn = self._asked_lsn = max(self._asked_lsn, min(lsn, self.written_lsn))
        if self._prepared:
            lsn = self._outside_of_prepared(lsn)
        while self._unconfirmed and self._unconfirmed[0] <= lsn:
            self.confirmed_lsn = max(self.confirmed_lsn, self._unconfirmed.popleft())
        self._forget_confirmed()

    def _outside_of_prepared(self, lsn: int) -> int:
        """Return the last transaction end up to ``lsn`` that lies between no PREPARE and its commit; 0 if there is none."""
        reached = self._last_unconfirmed(lsn)
        while around := [prepare_lsn for prepare_lsn, end in self._prepared.values() if prepare_lsn < reached < end]:
            reached = self._last_unconfirmed(min(around))
        return reached

    def _last_unconfirmed(self, lsn: int) -> int:
        count = bisect_right(self._unconfirmed, lsn)
        return self._unconfirmed[count - 1] if count else 0

    def _forget_confirmed(self) -> None:
        if self._prepared:
            self._prepared = {xid: pair for xid, pair in self._prepared.items() if pair[1] > self.confirmed_lsn}

    def confirm_written(self, now: float) -> None:
        """Count everything that was written out as confirmed (``--auto-feedback``)."""
        if self._unconfirmed:
            self.feedback(self.written_lsn, now)

    @property
    def is_outstanding(self) -> bool:
        """Whether the consumer was sent something, or is about to be, that it has not confirmed."""
        held_back = any(end == NEVER for _, end in self._prepared.values())
        return bool(self._open) or held_back or self._last_end > max(self._asked_lsn, self.confirmed_lsn)

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction has begun and not ended."""
        return bool(self._open)

    @property
    def in_unstreamed_transaction(self) -> bool:
        """Whether a transaction that comes at its commit has begun and not ended (a streamed one may stay open for ever)."""
        return 0 in self._open

    def _settle(self) -> None:
        # Everything before the keepalive's position was sent before it; once all of that is confirmed, so is the position.
        if self._idle_lsn and not self.is_outstanding:
            self.confirmed_lsn = max(self.confirmed_lsn, self._idle_lsn)
            self._forget_confirmed()

    # Status updates

    def due_at(self) -> float:
        """When the next status update is due, and when silence has to be looked at."""
        due_at = self._feedback_due_at
        if self._reply_wanted:
            due_at = min(due_at, self._sent_at + MIN_REPLY_INTERVAL_S)
        if self.status_interval_s > 0:
            due_at = min(due_at, self._sent_at + self.status_interval_s)
        if self.silence_limit_s > 0:
            half = self._heard_at + self.silence_limit_s / 2
            due_at = min(due_at, half if self._sent_at < half else self._heard_at + self.silence_limit_s)
        return due_at

    def is_lost(self, now: float) -> bool:
        """Whether the server has been silent for longer than it may be."""
        return 0 < self.silence_limit_s <= now - self._heard_at

    def status(self, now: float) -> Status:
        """Return the status update to send now, and start the timer anew.

        A server that asks for a reply may be shutting down, and then waits until the flush position, or in its absence the write
        position, is its own last one. While something is outstanding the answer is "no opinion": the server can stop, and keeps
        what was not confirmed.
        """
        no_opinion = self._reply_wanted and self.is_outstanding
        silent = self.silence_limit_s > 0 and now - self._heard_at >= self.silence_limit_s / 2
        self._sent_at = now
        self._reply_wanted = False
        self._feedback_due_at = NEVER
        return Status(max(self.received_lsn, self.confirmed_lsn), 0 if no_opinion else self.confirmed_lsn, silent)
