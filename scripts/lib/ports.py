"""Chooses ports for servers on this machine."""

from __future__ import annotations

import contextlib
import random
import socket

__all__ = ["free_port"]

_PORTS = range(20000, 32000)
"""Below those of outgoing connections (32768 and up on Linux). So a server that restarts finds its port free."""


def free_port() -> int:
    """Return a port that nobody listens on, and that no outgoing connection gets. Raises OSError if there is none."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    msg = "no free port below 32000"
    raise OSError(msg)
