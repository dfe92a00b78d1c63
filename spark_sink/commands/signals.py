"""SIGINT and SIGTERM. One rule for all commands: the first ends the command, a second one ends it at once.

A command that only reads ends at once at the first signal, too: nothing has to be put in order, and an exception in the midst of
a call to Spark would leave that call's connection unusable. Commands that have something to put in order use `on_signals`.

A thread of its own acts on signals. Python's handlers run in the main thread, and that may not hear for a long time: it is in
a library, or it began to wait for a lock in the very moment in which the signal came.

Whatever ends the command, client/guard.py ends its child processes.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = ["Asked", "kept", "listen", "on_signals"]

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def listen() -> None:
    """Begin to act on signals: they end the process, except inside of `on_signals`. For the main thread."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _NUMBERS:
        signal.signal(number, _ignore)
    threading.Thread(target=_act, args=(reader,), name="cdcpipe-signals", daemon=True).start()


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: that there is a handler makes Python write the signal's number to the pipe."""


def _act(reader: int) -> None:
    while data := os.read(reader, 64):
        for number in data:
            if number in _NUMBERS:
                _action(number)


def _end_at_once(number: int) -> None:
    """End the process with 130 or 143 and one line on stderr."""
    start = "\r\x1b[K" if os.isatty(2) else ""
    line = f"{start}cdcpipe-spark: ended by {signal.Signals(number).name} before it was done\n"
    try:
        if select.select([], [2], [], 0)[1]:  # a full pipe must not keep us
            os.write(2, line.encode())
    finally:
        os._exit(128 + number)


_action: Callable[[int], None] = _end_at_once


class Asked:
    """Which signal has come, 0 if none."""

    number = 0

    @property
    def exit_code(self) -> int:
        """The exit code of a command that did not finish: 130 or 143, and 0 if no signal came."""
        return 128 + self.number if self.number else 0


@contextmanager
def on_signals(request_stop: Callable[[], None]) -> Iterator[Asked]:
    """Call ``request_stop``, in another thread, at the first SIGINT or SIGTERM; the next one ends the process at once."""
    global _action  # noqa: PLW0603 - a process has one way to act on signals
    asked = Asked()

    def act(number: int) -> None:
        if asked.number:
            _end_at_once(number)
        asked.number = number
        request_stop()

    before, _action = _action, act
    try:
        yield asked
    finally:
        _action = before


@contextmanager
def kept() -> Iterator[None]:
    """Put the handlers back at the end: Spark puts one of its own in the place of SIGINT's when it starts."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where no handler can be set, by Spark neither
        return
    before = [(number, signal.getsignal(number)) for number in _NUMBERS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
