"""Takes the calls from Spark's JVM, and ends them once this process can't take them any more. Imports py4j only in `taken`.

Spark calls Python for each micro-batch. A thread of py4j accepts the connections for these calls. An error ends this thread for
good:

- No descriptor is left for a new connection (`ulimit -n`).
- Its socket has a descriptor from 1,024 on, which `select` can't take. This happens in a process with more than 1,000 open files.

Nobody would then answer the JVM, which waits without a limit. Here the socket is shut down, so that the call ends with an error.
`failure` tells the cause.
"""

from __future__ import annotations

import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from cdcpipe.errors import CdcpipeError
from cdcpipe.limits import limit_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CallsLostError", "failure", "taken"]

_MANY_FILES: Final = (
    "this process had more than 1,000 open files when Spark's first stream began: start the stream before they are opened, or "
    "start this command from a program that does not pass its open files on"
)

_error: BaseException | None = None


class CallsLostError(CdcpipeError):
    """This process can't take calls of Spark's JVM."""


@contextmanager
def taken(function: Callable[..., None]) -> Iterator[Callable[..., None]]:
    """Yield what the JVM may call as ``function`` until the end of the context. Look at py4j's threads from now on.

    py4j keeps what it has given to the JVM until Java's garbage collector has the other half, which Spark's query holds. If the
    function belongs to the object that holds the query, this object and the query would stay for ever.
    """
    from py4j.java_gateway import server_connection_error

    server_connection_error.connect(_take_error)  # a second call does nothing
    functions = [function]

    def call(*args: object) -> None:
        functions[0](*args)

    try:
        yield call
    finally:
        functions.clear()


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
