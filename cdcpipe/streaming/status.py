"""Sends status updates to the server when `Progress` says that one is due."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from cdcpipe.libpq.walsender import Walsender
from cdcpipe.lsn import format_lsn
from cdcpipe.replication.copydata import build_status_update
from cdcpipe.replication.progress import Progress
from cdcpipe.streaming.notices import check_notices

__all__ = ["StatusUpdates"]

log = logging.getLogger(__name__)


class StatusUpdates:
    """The status updates of one stream.

    ``is_at_end`` tells whether the stream is at its end position. From then on, the server's notices are about changes that this
    stream neither writes nor confirms, so they end nothing.
    """

    def __init__(self, walsender: Walsender, progress: Progress, *, is_at_end: Callable[[], bool] = lambda: False) -> None:
        self._walsender = walsender
        self._progress = progress
        self._is_at_end = is_at_end
        self._unsent: bytes | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether libpq had no room for the last update. The next `send` tries to send it again."""
        return self._unsent is not None

    def send_if_due(self, now: float) -> None:
        """Send an update if one is due, or if the last one is stuck."""
        if self._progress.due_at() <= now or self._unsent is not None:
            self.send(now)

    def send(self, now: float) -> None:
        """Send the update that is stuck. If there is none, send a new update."""
        if self._unsent is None:
            if self._is_at_end():
                self._walsender.notices.clear()
            elif self._walsender.notices:
                check_notices(self._walsender)
            status = self._progress.status(now)
            self._unsent = build_status_update(
                status.write_lsn, status.flush_lsn, unix_time_s=time.time(), reply_requested=status.reply_requested
            )
            log.debug("status update: write %s, flush %s", format_lsn(status.write_lsn), format_lsn(status.flush_lsn))
        if self._walsender.send(self._unsent):
            self._unsent = None
