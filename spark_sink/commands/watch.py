"""``status --watch`` on a terminal: draws the screen, and takes the keys that scroll it. status/screen.py says what it shows."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from spark_sink.commands.signals import restored_by
from spark_sink.status.screen import Size, draw, scroll

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["Watch", "has_color", "keys_of", "watching"]

_LOOK_S = 0.2
"""How long a signal may wait to be noticed."""

_KEYS = {
    b"j": "down",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"k": "up",
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b" ": "page down",
    b"\x1b[6~": "page down",
    b"\x1b[5~": "page up",
    b"q": "quit",
}
_KEY = re.compile(rb"\x1b\[[0-9;]*[A-Za-z~]|\x1bO.|.", re.DOTALL)


def keys_of(data: bytes) -> list[str]:
    """Return the names of the keys that a terminal sends as these bytes, without other keys."""
    return [_KEYS[key] for key in _KEY.findall(data) if key in _KEYS]


def has_color() -> bool:
    """Tell whether stdout is a terminal that shows colors, and the user wants them (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Make the screen. Meanwhile the terminal passes on each key at once, and does not show it; afterwards it is as it was."""
    has_keys = sys.stdin.isatty()
    with contextlib.ExitStack() as stack:
        stack.callback(click.echo)
        if has_keys:
            stack.enter_context(restored_by(partial(termios.tcsetattr, 0, termios.TCSANOW, termios.tcgetattr(0))))
            tty.setcbreak(0)
        yield Watch(has_keys=has_keys, has_color=has_color())


class Watch:
    """The screen, and which tables it shows. `watching` makes it. If stdin is no terminal, there are no keys."""

    def __init__(self, *, has_keys: bool, has_color: bool) -> None:
        self._has_keys = has_keys
        self._has_color = has_color
        self._top = 0
        self._page = 1

    def show(self, found: Mapping[str, Any], pause_s: float, is_stopping: Callable[[], bool]) -> bool:
        """Show a result of `describe` for ``pause_s`` seconds. Returns False once the user or a signal wants the end."""
        ends = time.monotonic() + pause_s
        self._draw(found)
        while (left_s := ends - time.monotonic()) > 0 and not is_stopping():
            keys = self._wait_for_keys(min(left_s, _LOOK_S))
            if "quit" in keys:
                return False
            for key in keys:
                self._top = scroll(self._top, key, self._page)
            if keys:
                self._draw(found)
        return not is_stopping()

    def _draw(self, found: Mapping[str, Any]) -> None:
        size = os.get_terminal_size(1)
        drawn = draw(found, Size(size.columns or 80, size.lines or 24), top=self._top, keys=self._has_keys, color=self._has_color)
        self._top, self._page = drawn.top, drawn.page
        *lines, last = drawn.lines
        # The last line has no newline, so that nothing scrolls. All below it is cleared.
        click.echo("\x1b[H" + "".join(f"\x1b[K{line}\n" for line in lines) + f"\x1b[J{last}", nl=False)

    def _wait_for_keys(self, timeout_s: float) -> list[str]:
        if not self._has_keys:
            time.sleep(timeout_s)
            return []
        if not select.select([0], [], [], timeout_s)[0]:
            return []
        data = os.read(0, 64)
        if not data:  # the terminal is gone
            self._has_keys = False
        return keys_of(data)
