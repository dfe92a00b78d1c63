"""Saves wake-ups while records come fast (docs/decisions/0006).

In a burst the server sends its messages one by one. To wake up for each of them costs both sides more than the messages themselves.
"""

from __future__ import annotations

import time

from cdcpipe.libpq.walsender import Walsender

__all__ = ["Burst"]

BULK_BYTES_PER_S = 8 << 20
"""From this rate on it is a burst: more records are on their way."""
LOW_WATER_BYTES = 64 << 10
"""During a burst the kernel wakes the loop only for this much (TCP)."""
BULK_WAIT_S = 0.001
"""The longest that a record waits in the socket for more records. The rate is measured over at least this time."""
BULK_PAUSE_S = 0.0002
"""Unix sockets and TLS have no low-water mark: the loop does not read for this long. The socket's buffer holds about 0.7 ms."""


class Burst:
    """Measures how fast records come. During a burst it lets them gather in the socket."""

    def __init__(self, walsender: Walsender, now: float) -> None:
        self._walsender = walsender
        self._is_bulk = False
        self._recent_bytes = 0
        self._recent_since = now
        self._has_low_water_mark = True
        """False once the socket has refused a low-water mark."""
        self._low_water = 1

    @property
    def is_holding_back(self) -> bool:
        """Whether the socket may have records although it is not readable. Then read it after each wait."""
        return self._low_water > 1

    def measure(self, received_bytes: int, now: float) -> None:
        """Add what has come since the last call, and decide whether this is a burst."""
        self._recent_bytes += received_bytes
        if now - self._recent_since >= BULK_WAIT_S:
            self._is_bulk = self._recent_bytes >= BULK_BYTES_PER_S * (now - self._recent_since)
            self._recent_bytes, self._recent_since = 0, now

    def gather(self, timeout_s: float) -> float:
        """Prepare a wait for records, or in a burst make it; return how long to wait at most, ``timeout_s`` or less."""
        if self._has_low_water_mark:
            wanted = LOW_WATER_BYTES if self._is_bulk else 1
            if wanted != self._low_water:
                self._has_low_water_mark = self._walsender.set_low_water_mark(wanted)
                self._low_water = wanted if self._has_low_water_mark else 1
            if self._low_water > 1:
                return min(timeout_s, BULK_WAIT_S)
        if self._is_bulk and not self._has_low_water_mark:
            time.sleep(BULK_PAUSE_S)
        return timeout_s
