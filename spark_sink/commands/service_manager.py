"""Tells systemd how a command is: a service with ``Type=notify`` and a watchdog (examples/systemd). Elsewhere it does nothing.

    service = ServiceManager()
    service.tick(is_streaming=True)     # at each turn of the loop: READY=1 at the first one that streams, and WATCHDOG=1
    service.stopping()

A message is a datagram to ``$NOTIFY_SOCKET`` (sd_notify(3)). A service manager that does not listen changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ServiceManager"]


class ServiceManager:
    """The service manager that has started this process, if there is one."""

    def __init__(self) -> None:
        # An address that begins with @ is abstract: its first byte is 0.
        self._address = os.environ.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        self._has_watchdog = "WATCHDOG_USEC" in os.environ and os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._is_ready = False

    def tick(self, *, is_streaming: bool) -> None:
        """Say that the loop is alive, and once that the stream has begun."""
        if is_streaming and not self._is_ready:
            self._is_ready = True
            self._send("READY=1")
        if self._has_watchdog:
            self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """Say that the command ends. Any thread may call this."""
        self._send("STOPPING=1")

    def told_before(self, stop: Callable[[], None]) -> Callable[[], None]:
        """Return a function that says that the command ends, and then calls ``stop``."""

        def tell_and_stop() -> None:
            self.stopping()
            stop()

        return tell_and_stop

    def _send(self, message: str) -> None:
        if self._address:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)  # a full queue must not hold up the loop
                sender.sendto(message.encode(), self._address)
