"""Takes what Spark's JVM writes to its stderr: shows what concerns people, and holds the rest back.

The JVM, the scripts that start it, Ivy, the Python workers and Spark's log share one stderr:

| line | what happens to it |
|---|---|
| an entry of Spark's log (log4j2.properties: warnings and errors) | shown at once |
| an exception in Java with its stack, once the session is ready | shown at once |
| any other line: Ivy's report, ``WARNING: Using incubator modules``, a Python worker that a query has left | held back |

If Spark does not start, or an error ends the command, `show_held` shows the last lines that were held back. With ``-v`` none is
held back. Once the session is ready, values of rows are left out of all lines (`java_texts.py`). Java begins with the value of
JAVA_TOOL_OPTIONS, which may have the password of a proxy: it is left out, too.

A thread takes the lines as they come, whatever happens to them, so that the JVM never waits for a full pipe.
"""

from __future__ import annotations

import os
import re
import select
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from cdcpipe import logs
from cdcpipe.printable import printable_json, printable_lines
from cdcpipe.threads import Worker
from spark_sink.spark.java_texts import Lines
from spark_sink.spark.secret_settings import NOT_SHOWN

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["JvmOutput"]

_HELD_LINES: Final = 200
_HELD_LENGTH: Final = 2000
"""How many lines are kept while they are held back, and how many characters of each."""

_LONGEST: Final = 1 << 20
"""A line without an end is cut here."""

_LOG_ENTRY: Final = re.compile(r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z]+ |\{"time": "')
_OF_JAVA: Final = re.compile(
    r"Exception in thread |\tat |\t\.\.\. \d+ more|Caused by: |(?:[a-z]\w*\.)+[A-Z]\w*(?:Error|Exception)\b"
)
_PICKED_UP: Final = re.compile(r"((?:NOTE: )?Picked up \w+: ).*")
"""Java says which options it has from the environment (JAVA_TOOL_OPTIONS, JDK_JAVA_OPTIONS, _JAVA_OPTIONS)."""
_FETCHING: Final = re.compile(r"downloading \S*/(\S+)")


class JvmOutput:
    """The reading end of the pipe that is the stderr of a JVM. ``writer`` is the other end, for the JVM alone.

    ``on_step`` is called with a text for people when Ivy fetches a jar.
    """

    def __init__(self, *, holds: bool, on_step: Callable[[str], None] | None = None) -> None:
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        self._holds = holds
        self._on_step = on_step
        self._is_ready = False
        self._held: deque[str] = deque(maxlen=_HELD_LINES)
        self._held_count = 0
        self._at_start: deque[str] = deque(maxlen=_HELD_LINES)
        self._begun = b""
        self._lines = Lines()
        self.has_ended = False
        """Whether nobody has the writing end any more, and all is taken."""
        self._lock = threading.RLock()
        Worker(target=self._run, name="cdcpipe-jvm-output", daemon=True).start()

    def close_writer(self) -> None:
        """Close this process's copy of the writing end, once the JVM has its own."""
        os.close(self.writer)

    def session_is_ready(self) -> None:
        """Forget what was held back, and show exceptions in Java from now on."""
        self.take()
        with self._lock:
            self._is_ready = True
            self._at_start.clear()
            self._held.clear()
            self._held_count = 0

    def show_held(self) -> None:
        """Show the last lines that were held back: there is an error, and they may say why."""
        self.take()
        with self._lock:
            held, left_out = [*self._held], self._held_count - len(self._held)
            self._held.clear()
            self._held_count = 0
        if left_out:
            _show(f"({left_out:,} lines before these are left out)")
        for line in held:
            _show(line)

    def at_start(self) -> list[str]:
        """Return the last lines from before the session was ready, whether they were shown or held back."""
        self.take()
        with self._lock:
            return [*self._at_start]

    def take(self) -> None:
        """Take what the JVM has written by now. Returns at once."""
        with self._lock:
            while not self.has_ended:
                try:
                    data = os.read(self._reader, 1 << 16)
                except BlockingIOError:
                    return
                self.has_ended = not data
                *lines, self._begun = (self._begun + data).split(b"\n")
                if self._begun and (self.has_ended or len(self._begun) > _LONGEST):
                    lines, self._begun = [*lines, self._begun], b""
                for line in lines:
                    self._take_line(line.decode(errors="replace").rstrip("\r"))
            if self._reader >= 0:
                os.close(self._reader)
                self._reader = -1

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        while not self.has_ended:
            poll.poll()
            self.take()

    def _take_line(self, line: str) -> None:
        if self._on_step is not None and (found := _FETCHING.match(line)) is not None:
            self._on_step(f"fetching {found[1]}")
        line = _PICKED_UP.sub(rf"\1{NOT_SHOWN}", line)
        if not self._is_ready:
            self._at_start.append(line[:_HELD_LENGTH])
        elif (said := self._lines.take(line)) is None:
            return
        else:
            line = said
        if not self._holds or _LOG_ENTRY.match(line) or (self._is_ready and _OF_JAVA.match(line)):
            _show(line)
        else:
            self._held.append(line[:_HELD_LENGTH])
            self._held_count += 1


def _show(line: str) -> None:
    if not logs.is_json():
        logs.show(printable_lines(line))
    elif line.startswith("{"):  # an entry of Spark's log
        logs.show(printable_json(line))
    else:
        logs.show(logs.line("warning", "spark.jvm", line))
