"""Decides which position may be confirmed to the server, and when a status update is due. No I/O; time is an argument.

Once the commit of a transaction lies before the confirmed position, the server never sends the transaction again. So this module
keeps five rules:

1.  Only two kinds of positions are confirmed. One is the end of a transaction that was written to stdout and that the consumer has
    confirmed. The other is the position of a keepalive while nothing is outstanding, so that an idle slot does not retain WAL
    (`StrictProgress` asks the consumer first). A logical message outside of transactions counts as a transaction that ends at the
    message's LSN, which is the end of its WAL record. A transaction of which an output plugin writes no record is not outstanding:
    the consumer can't confirm what it does not get.
2.  Feedback is cut down to the last transaction end that it covers. So feedback in the middle of a transaction, or beyond
    everything written, can't lose a transaction.
3.  The confirmed position never goes back.
4.  No position between a PREPARE and the end of its COMMIT PREPARED is confirmed. After a restart from such a position, the server
    would send only the COMMIT PREPARED, and never the changes. Feedback in between confirms the last transaction end that is not
    between such a pair; it counts in full once the COMMIT PREPARED is confirmed, too. This also applies to a prepared transaction
    without changes, for which nothing is written.
5.  Only the end of a transaction may be compared with the position of a keepalive. Of some plugins' records only the beginning is
    known, which may lie before positions that are confirmed already. Such a record is outstanding until feedback for it comes after
    it was written. This is feedback for a position beyond everything that was there before it, or for its own position, unless the
    consumer knows that one from an earlier record (all rows of a COPY have one position). Transactions come in the order of their
    commits, so this feedback is for all records before it, too.

Source: the manual, "Streaming Replication Protocol", Standby status update.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Progress", "Status"]

MIN_REPLY_INTERVAL_S = 0.01
"""The shortest pause between two replies. It is needed because a server that shuts down asks for replies without a pause."""

UNREAD_INTERVAL_S = 1.0
"""The longest time between status updates while the server's questions are not read. Otherwise it would close the connection."""

MAX_UNCONFIRMED = 1 << 20
"""The number of transaction ends to remember. Beyond it every second end is forgotten, which only makes feedback coarser."""

NEVER = float("inf")


class Status(NamedTuple):
    """The positions in a status update. With a ``flush_lsn`` of 0 ("no opinion") the server keeps its confirmed position."""

    write_lsn: int
    flush_lsn: int
    reply_requested: bool


class _Behind(NamedTuple):
    """A record that came after everything up to ``before``. It was the ``number``-th end that was received.

    ``own_lsn`` is its position, or 0 if the consumer knows this position already: feedback for it may be for an earlier record.
    """

    number: int
    own_lsn: int
    before: int


class Progress:
    """The positions of one stream, and the timer of its status updates. ``now`` is always `time.monotonic()`.

    - ``feedback_interval_s``: the longest time before a newly confirmed position is sent.
    - ``status_interval_s``: the time between status updates without news (0: only when the server asks). While its questions are
      not read (``is_read``), it is `UNREAD_INTERVAL_S` at most.
    - ``silence_limit_s``: how long the server may send nothing (0: for ever). After half of it, cdcpipe asks for a reply.
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
        """The highest position in anything that the server has sent."""
        self.confirmed_lsn = 0
        """The position up to which the server may forget changes; 0 until something is confirmed."""
        self.written_lsn = 0
        """The end of the last transaction that was written completely."""
        self._open: set[int] = set()
        self._last_end = 0
        """The last end that the consumer can confirm: something was written for it."""
        self._end_before = 0
        """The value of ``_last_end`` before the last end."""
        self._unconfirmed: deque[int] = deque()
        self.behind: _Behind | None = None
        """The last record that is outstanding although no comparison of positions tells so (rule 5)."""
        self._previous_lsn = 0
        self._received_count = 0
        """How many ends were received. Their records are written in this order."""
        self._written_count = 0
        self._prepared: dict[int, tuple[int, float]] = {}
        """For each prepared transaction: the LSN of its PREPARE and the end of its COMMIT PREPARED, until this end is confirmed."""
        self._asked_lsn = 0
        """The highest feedback, limited to what was written."""
        self._told_lsn = 0
        """The highest confirmed position in a status update."""
        self._idle_lsn = 0
        self.heard_at = now
        """When the server has last sent something, or the loop was last not reading from it."""
        self._asked_at = NEVER
        """When the server was asked for a sign of life after that."""
        self.is_read = True
        """Whether the loop reads what the server sends. It does not while the consumer stops reading."""
        self._sent_at = now
        self._reply_wanted = False
        self._is_past_end = False
        """Whether the last keepalive came after the stream's end position. Its position is never confirmed."""
        self._feedback_due_at = NEVER

    # Events from the server

    def begin(self, xid: int = 0) -> None:
        """Note that the records of a transaction begin. ``xid`` 0 stands for the transaction that is not streamed."""
        self._open.add(xid)
        self._idle_lsn = 0

    def end(self, lsn: int, xid: int = 0) -> None:
        """Note that a transaction, which ends at ``lsn``, was received completely."""
        self._open.discard(xid)
        self.message(lsn)

    def silent(self, lsn: int) -> None:
        """Note that nothing is written for what has just ended at ``lsn``: the output plugin has no record for it.

        The consumer does not learn of this end, so nothing waits for its confirmation.
        """
        if self._last_end == lsn:
            self._last_end = self._end_before

    def abort(self, xid: int) -> None:
        """Note that a streamed transaction was rolled back."""
        self._open.discard(xid)

    def prepare(self, xid: int, prepare_lsn: int) -> None:
        """Note that a prepared transaction was received completely. It is held back until it commits or rolls back."""
        self._open -= {0, xid}
        self._prepared[xid] = prepare_lsn, NEVER
        self._idle_lsn = 0

    def commit_prepared(self, xid: int, lsn: int) -> None:
        """Note that a prepared transaction was committed, and ends at ``lsn``. If it has changes, call ``end``, too."""
        if xid in self._prepared:
            self._prepared[xid] = self._prepared[xid][0], lsn
        self._idle_lsn = 0

    def forget_prepared(self, xid: int) -> None:
        """Note that a prepared transaction was rolled back. After a restart the server may send only its ROLLBACK PREPARED."""
        self._prepared.pop(xid, None)
        before = self.confirmed_lsn
        self._confirm(self._asked_lsn)
        if self.confirmed_lsn > before:
            self._feedback_due_at = 0.0

    def message(self, lsn: int, *, is_end: bool = True) -> None:
        """Note that a record outside of transactions was received. It ends at ``lsn``.

        With ``is_end`` False, this is where the record begins, and its transaction ends anywhere after that.
        """
        self._received_count += 1
        if not is_end and lsn <= (before := max(self._last_end, self._asked_lsn, self.confirmed_lsn)):
            self.behind = _Behind(self._received_count, 0 if lsn in (self._last_end, self._previous_lsn) else lsn, before)
        self._previous_lsn = lsn
        self._end_before = self._last_end
        self._last_end = max(self._last_end, lsn)
        self.received_lsn = max(self.received_lsn, lsn)
        self._idle_lsn = 0

    def keepalive(self, wal_end: int, *, reply_requested: bool, is_past_end: bool = False) -> None:
        """Note that the server has sent everything up to ``wal_end``. ``is_past_end``: it comes after the end position."""
        self.received_lsn = max(self.received_lsn, wal_end)
        self._reply_wanted |= reply_requested
        self._is_past_end = is_past_end
        if not self._open and not is_past_end:
            self._idle_lsn = wal_end
            self._settle()

    def heard(self, now: float) -> None:
        """Restart the silence timer: the server has sent something, or the loop was not reading from it."""
        self.heard_at = now
        self._asked_at = NEVER

    # Events from the consumer

    def written(self, ends: Iterable[int]) -> None:
        """Note that the transactions that end at ``ends`` were written completely, in this order."""
        for end in map(int, ends):
            self._written_count += 1
            if end > self.written_lsn:
                self.written_lsn = end
                self._unconfirmed.append(end)
        if len(self._unconfirmed) > MAX_UNCONFIRMED:
            last = self._unconfirmed[-1]
            self._unconfirmed = deque(list(self._unconfirmed)[1::2])
            if self._unconfirmed[-1] != last:
                self._unconfirmed.append(last)

    def feedback(self, lsn: int, now: float) -> None:
        """Note that the consumer has everything up to ``lsn``; 0 means nothing."""
        before = self.confirmed_lsn
        behind = self.behind
        if behind is not None and behind.number <= self._written_count and (0 < lsn == behind.own_lsn or lsn > behind.before):
            self.behind = None
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
        """Return the last transaction end up to ``lsn`` that is not between a PREPARE and its commit; 0 if there is none."""
        reached = _last_up_to(lsn, self._unconfirmed)
        while around := [prepare_lsn for prepare_lsn, end in self._prepared.values() if prepare_lsn < reached < end]:
            reached = _last_up_to(min(around), self._unconfirmed)
        return reached

    def _forget_confirmed(self) -> None:
        while self._unconfirmed and self._unconfirmed[0] <= self.confirmed_lsn:
            self._unconfirmed.popleft()
        if self._prepared:
            self._prepared = {xid: pair for xid, pair in self._prepared.items() if pair[1] > self.confirmed_lsn}

    def confirm_written(self, now: float) -> None:
        """Count all written transactions as confirmed (``--auto-feedback``)."""
        behind = self.behind
        if behind is not None and behind.number <= self._written_count:
            self.behind = None
        if self._unconfirmed or behind is not None:
            self.feedback(self.written_lsn, now)

    @property
    def is_outstanding(self) -> bool:
        """Whether the consumer has not confirmed a transaction yet, or will still receive one."""
        held_back = any(end == NEVER for _, end in self._prepared.values())
        is_behind = self.behind is not None
        return bool(self._open) or is_behind or held_back or self._last_end > max(self._asked_lsn, self.confirmed_lsn)

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction has begun and has not ended."""
        return bool(self._open)

    @property
    def in_unstreamed_transaction(self) -> bool:
        """Whether a transaction that is not streamed has begun and has not ended. The server sends it at its commit.

        Streamed transactions do not count, because they may stay open for ever.
        """
        return 0 in self._open

    def _settle(self) -> None:
        # Before a keepalive, the server has sent everything that lies before the keepalive's position. Once the consumer has
        # confirmed all of it, the position itself may be confirmed.
        if self._idle_lsn and not self.is_outstanding:
            self.confirmed_lsn = max(self.confirmed_lsn, self._idle_lsn)
            self._forget_confirmed()

    # Status updates

    def take_idle(self, now: float, *, at_end: bool = False) -> int:  # noqa: ARG002 - `StrictProgress` uses them
        """Return the position that the consumer has to be told and to confirm, or 0. Here there is none: see `_settle`."""
        return 0

    def due_at(self) -> float:
        """Return when the loop has to act next: send a status update, or check for silence."""
        due_at = self._feedback_due_at
        if self._reply_wanted:
            due_at = min(due_at, self._sent_at + MIN_REPLY_INTERVAL_S)
        if self.status_interval_s > 0:
            due_at = min(due_at, self._sent_at + self.status_interval_s)
        if not self.is_read:
            due_at = min(due_at, self._sent_at + UNREAD_INTERVAL_S)
        if self.silence_limit_s > 0 and self.is_read:
            since = self.heard_at if self._asked_at == NEVER else self._asked_at
            due_at = min(due_at, since + self.silence_limit_s / 2)
        return due_at

    def is_lost(self, now: float) -> bool:
        """Tell whether the server has been silent for longer than the limit, the second half of it after it was asked.

        A process that was stopped (^Z, docker pause) may find the limit passed, and has not asked yet.
        """
        return 0 < self.silence_limit_s / 2 <= now - self._asked_at

    def status(self, now: float) -> Status:
        """Return the status update to send now, and restart the timer.

        A server that asks for a reply may be shutting down. It then waits until the flush position reaches the end of its WAL.
        Without a flush position, it waits for the write position. So while a transaction is outstanding, and after the stream's end
        position, this method answers "no opinion". The server can then shut down, and keeps everything that was not confirmed.

        A confirmed position that no update has had yet goes first. The next update then answers the server. Otherwise the last
        update of a stream could leave out the last feedback.
        """
        is_news = self.confirmed_lsn > self._told_lsn
        needs_no_opinion = self._reply_wanted and (self.is_outstanding or self._is_past_end)
        no_opinion = needs_no_opinion and not is_news
        # While nobody reads the socket, the answers to questions would wait at the server.
        silent = self.is_read and self.silence_limit_s > 0 and now - self.heard_at >= self.silence_limit_s / 2
        if silent:
            self._asked_at = min(self._asked_at, now)
        self._sent_at = now
        self._reply_wanted = needs_no_opinion and is_news
        self._told_lsn = self.confirmed_lsn
        self._feedback_due_at = NEVER
        return Status(max(self.received_lsn, self.confirmed_lsn), 0 if no_opinion else self.confirmed_lsn, silent)


def _last_up_to(lsn: int, ends: Sequence[int]) -> int:
    """Return the last of the ends up to ``lsn``; 0 if there is none."""
    count = bisect_right(ends, lsn)
    return ends[count - 1] if count else 0
