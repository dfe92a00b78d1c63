"""Progress for a consumer that keeps account of the slot (``--idle-positions``): nothing is confirmed that it has not confirmed.

While the stream is idle, `Progress` confirms the server's position by itself. The consumer does not hear of it. So the slot may be
beyond everything that the consumer knows, and it can't tell whether another program has moved the slot.

`StrictProgress` tells the consumer instead. The loop writes an empty record at the idle position. The consumer confirms this
position like the end of a transaction. Until then, it counts as outstanding. No I/O; time is an argument.
"""

from __future__ import annotations

from cdcpipe.replication.progress import NEVER, Progress

__all__ = ["StrictProgress"]

DEFAULT_INTERVAL_S = 1.0
"""The shortest time between two idle positions where there is no interval of status updates."""


class StrictProgress(Progress):
    """The positions of one stream. The arguments are those of `Progress`.

    The time between two idle positions that the consumer is told is at least ``status_interval_s``.
    """

    def __init__(
        self, now: float, *, feedback_interval_s: float = 0.0, status_interval_s: float = 1.0, silence_limit_s: float = 0.0
    ) -> None:
        super().__init__(
            now, feedback_interval_s=feedback_interval_s, status_interval_s=status_interval_s, silence_limit_s=silence_limit_s
        )
        self._told_at = -NEVER

    def _settle(self) -> None:
        """Confirm nothing: the consumer has to confirm an idle position."""

    @property
    def _untold_lsn(self) -> int:
        """The idle position if it is beyond everything that the consumer was told; otherwise 0.

        It is also 0 while a prepared transaction is held back: a stream that starts after its PREPARE never gets its changes.
        """
        is_held_back = any(end == NEVER for _, end in self._prepared.values())
        return self._idle_lsn if self._idle_lsn > self._last_end and not is_held_back else 0

    @property
    def is_outstanding(self) -> bool:
        """Whether the consumer has not confirmed a transaction or an idle position yet, or will still receive one."""
        return super().is_outstanding or self._untold_lsn > 0

    def take_idle(self, now: float, *, at_end: bool = False) -> int:
        """Return the position for an empty record to write now, or 0. The position is outstanding from now on.

        While anything else is outstanding, the answer is 0. At the end of the stream (``at_end``), an idle position that the
        consumer was not told is returned in any case: its record comes after everything else.
        """
        lsn = self._untold_lsn
        if not lsn or not (at_end or self._idle_due_at() <= now):
            return 0
        self._told_at = now
        self._received_count += 1
        self._last_end = lsn
        return lsn

    def due_at(self) -> float:
        """Return when the loop has to act next, as in `Progress`, or to take an idle position."""
        return min(super().due_at(), self._idle_due_at())

    def _idle_due_at(self) -> float:
        if not self._untold_lsn or super().is_outstanding:
            return NEVER
        return self._told_at + (self.status_interval_s or DEFAULT_INTERVAL_S)
