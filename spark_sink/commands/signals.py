"""Handles SIGINT and SIGTERM for all commands: the first signal asks the command to end, the second one ends it at once.

If the command has not ended 30 seconds after the first signal, a line on stderr says what the second one does. The end may wait for
a long merge, or for a JVM that hangs.

A command that only reads ends at once at the first signal. It has nothing to clean up, and an exception within a call to Spark
would leave the connection of that call unusable. Commands that have to clean up use `on_signals`.

A separate thread acts on signals. Python runs signal handlers in the main thread, which may not respond for a long time: it may be
in a library, or have begun to wait for a lock just when the signal came.

However the command ends, client/guard.py ends its child processes.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from cdcpipe import logs
from cdcpipe.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = ["Asked", "kept", "listen", "on_signals", "restored_by"]

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE_S = 30.0
"""How long a command may take to end before a line on stderr says so."""


def listen() -> None:
    """Start to handle signals. They end the process, except within `on_signals`. Call this in the main thread."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _NUMBERS:
        signal.signal(number, _ignore)
    Worker(target=_act, args=(reader,), name="cdcpipe-signals", daemon=True).start()


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing. Python writes the signal's number to the pipe only if the signal has a handler."""


def _act(reader: int) -> None:
    coming = select.poll()  # not `select`, which can't take a descriptor from 1,024 on
    coming.register(reader, select.POLLIN)
    while True:
        if coming.poll(_PATIENCE_S * 1000 if _is_ending.is_set() else None):
            for number in os.read(reader, 64):
                if number in _NUMBERS:
                    _action(number)
        elif _is_ending.is_set():
            _is_ending.clear()
            _tell("warning", "still ending; another signal ends it at once")


def _end_at_once(number: int) -> None:
    """End the process with exit code 130 or 143, after one line on stderr."""
    try:
        for restore in _restores:
            restore()
        _tell("error", f"ended by {signal.Signals(number).name} before it was done", exit_code=128 + number)
    finally:
        os._exit(128 + number)


def _tell(level: str, message: str, exit_code: int | None = None) -> None:
    """Write a line to stderr, unless that would wait. While this thread waits, no signal ends the process.

    A pipe may be full, and then another thread may hold the lock of `sys.stderr`, which `logs.show` would wait for.
    """
    if logs.is_json():
        line = logs.line(level, "cdcpipe-spark", message, exit_code=exit_code)
    else:
        line = ("\r\x1b[K" if os.isatty(2) else "") + f"cdcpipe-spark: {message}"
    with suppress(OSError):  # as in `logs.write`: the disk with a log may be full, or nobody reads a pipe any more
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{line}\n".encode())


_action: Callable[[int], None] = _end_at_once
_is_ending = threading.Event()
"""Set from the signal that asks the command to end, until the command has ended, or a line has said that it is still ending."""
_restores: list[Callable[[], None]] = []
"""What to call before the process ends at once."""


@contextmanager
def restored_by(restore: Callable[[], None]) -> Iterator[None]:
    """Call ``restore`` at the end of the context, and also if a signal ends the process at once before. It must not wait."""
    _restores.append(restore)
    try:
        yield
    finally:
        _restores.remove(restore)
        restore()


class Asked:
    """The signal that has come; ``number`` is 0 if none has."""

    number = 0

    @property
    def exit_code(self) -> int:
        """The exit code of a command that did not finish: 130 or 143, or 0 if no signal came."""
        return 128 + self.number if self.number else 0


@contextmanager
def on_signals(request_stop: Callable[[], None]) -> Iterator[Asked]:
    """Call ``request_stop``, in another thread, at the first SIGINT or SIGTERM. The next signal ends the process at once."""
    global _action  # noqa: PLW0603 - a process has one way to act on signals
    asked = Asked()

    def act(number: int) -> None:
        if asked.number:
            _end_at_once(number)
        asked.number = number
        _is_ending.set()
        request_stop()

    before, _action = _action, act
    try:
        yield asked
    finally:
        _action = before
        _is_ending.clear()


@contextmanager
def kept() -> Iterator[None]:
    """Restore the signal handlers at the end. Spark replaces the handler of SIGINT when it starts."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers, so Spark can't either
        return
    before = [(number, signal.getsignal(number)) for number in _NUMBERS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
