"""Saves wake-ups while records come fast (docs/decisions/0006).

In a burst the server sends its messages one by one. A wake-up for each message costs both sides more than the message itself.
"""

from __future__ import annotations

from cdcpipe.libpq.walsender import Walsender

__all__ = ["Burst"]

BULK_BYTES_PER_S = 8 << 20
"""At this rate or above, the loop assumes a burst: more records are on their way."""
BULK_MEMORY_S = 0.02
"""How long a burst counts after the rate was last as high: a server that shares its core pauses for some milliseconds."""
LOW_WATER_BYTES = 64 << 10
"""During a burst on a TCP socket, the kernel wakes the loop only once this many bytes are there."""
BULK_WAIT_S = 0.001
"""The longest time that a record waits in the socket for more records. The rate is measured over at least this time."""
BULK_PAUSE_S = 0.0002
"""How long the loop pauses instead on Unix sockets and with TLS, which have no low-water mark.

The socket's buffer holds what the server sends in about 0.7 ms.
"""
GATHER_BYTES = 128 << 10
GATHER_S = 0.004
"""If the process reads the socket itself, it repeats the pause until it has this many bytes, for at most this time."""


class Burst:
    """Measures how fast records arrive. During a burst it lets them gather in the socket."""

    def __init__(self, walsender: Walsender, now: float) -> None:
        self._walsender = walsender
        self._is_bulk = False
        self._bulk_until = now
        self._recent_bytes = 0
        self._recent_since = now
        self._has_low_water_mark = True
        """False once the socket has refused a low-water mark."""
        self._low_water = 1
        self._has_gathered = False

    @property
    def is_holding_back(self) -> bool:
        """Whether there may be records although the socket is not readable. If so, receive after each wait."""
        return self._low_water > 1 or self._has_gathered

    def measure(self, received_bytes: int, now: float) -> None:
        """Add the bytes received since the last call, and decide whether this is a burst."""
        self._recent_bytes += received_bytes
        if now - self._recent_since >= BULK_WAIT_S:
            if self._recent_bytes >= BULK_BYTES_PER_S * (now - self._recent_since):
                self._bulk_until = now + BULK_MEMORY_S
            self._is_bulk = now < self._bulk_until
            self._recent_bytes, self._recent_since = 0, now

    def gather(self, timeout_s: float) -> float:
        """Prepare a wait for records, and return its longest duration: ``timeout_s`` or less.

        In a burst on a socket without a low-water mark, this call itself waits a moment.
        """
        self._has_gathered = False
        if self._has_low_water_mark:
            wanted = LOW_WATER_BYTES if self._is_bulk else 1
            if wanted != self._low_water:
                self._has_low_water_mark = self._walsender.set_low_water_mark(wanted)
                self._low_water = wanted if self._has_low_water_mark else 1
            if self._low_water > 1:
                return min(timeout_s, BULK_WAIT_S)
        if self._is_bulk and not self._has_low_water_mark:
            self._has_gathered = self._walsender.gather(BULK_PAUSE_S, GATHER_BYTES, GATHER_S)
            if self._has_gathered:
                return 0.0
        return timeout_s
