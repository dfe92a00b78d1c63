"""Ends the calls from Spark's JVM to this process once this process can't take them any more. Imports py4j only in `watch`.

Spark calls Python for each micro-batch. A thread of py4j accepts the connections for these calls. An error ends this thread for
good:

- No descriptor is left for a new connection (`ulimit -n`).
- Its socket has a descriptor from 1,024 on, which `select` can't take. This happens in a process with more than 1,000 open files.

Nobody would then answer the JVM, which waits without a limit. Here the socket is shut down, so that the call ends with an error.
`failure` tells the cause.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any, Final

from cdcpipe.errors import CdcpipeError
from cdcpipe.limits import limit_hint

__all__ = ["CallsLostError", "failure", "watch"]

_MANY_FILES: Final = (
    "this process had more than 1,000 open files when Spark's first stream began: start the stream before they are opened, or "
    "start this command from a program that does not pass its open files on"
)

_error: BaseException | None = None


class CallsLostError(CdcpipeError):
    """This process can't take calls of Spark's JVM."""


def watch() -> None:
    """Begin to look at py4j's threads. A second call does nothing."""
    from py4j.java_gateway import server_connection_error

    server_connection_error.connect(_take_error)


def failure() -> CallsLostError | None:
    """Return why this process can't take the JVM's calls; None if it can."""
    if _error is None:
        return None
    error = CallsLostError(f"this process can't take Spark's calls any more: {_error}", hint=limit_hint(_error) or _MANY_FILES)
    error.__cause__ = _error
    return error


def _take_error(sender: Any, error: BaseException, **_: object) -> None:
    global _error  # noqa: PLW0603 - a process has one JVM
    _error = error
    with suppress(OSError):
        sender.server_socket.shutdown(socket.SHUT_RDWR)  # not `close`: pyspark may be about to ask for the port
