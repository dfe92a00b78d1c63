"""Looks at the TCP options of this process's sockets, also those that a C library has opened."""

import contextlib
import os
import socket

OPTIONS = {
    "keepalives_idle": socket.TCP_KEEPIDLE,
    "keepalives_interval": socket.TCP_KEEPINTVL,
    "keepalives_count": socket.TCP_KEEPCNT,
    "tcp_user_timeout": socket.TCP_USER_TIMEOUT,
}
"""libpq's parameters, and the options of a socket that they set."""


def tcp_options(port: int) -> list[dict[str, int]]:
    """Return the options of each of our sockets that is connected to this port of 127.0.0.1."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, no socket, or not connected
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as duplicate:
                if duplicate.family == socket.AF_INET and duplicate.getpeername() == ("127.0.0.1", port):
                    found.append({key: duplicate.getsockopt(socket.IPPROTO_TCP, option) for key, option in OPTIONS.items()})
    return found
