"""What goes to stderr, as text for people or as JSON for programs: ``--log-format``. Imports no library for command lines.

With ``json`` each line is an object:

    {"time": "2026-03-01T12:00:00.000Z", "level": "warning", "part": "cdcpipe.streaming.status", "message": "…"}

An error that ends a command has ``hint`` and ``exit_code``, too. Messages and stacks have no values of rows, in either format: see
`cdcpipe/error_texts.py`.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from cdcpipe.error_texts import stack_of, unexpected
from cdcpipe.printable import json_text, printable_lines

__all__ = [
    "FORMATS",
    "JsonFormatter",
    "Told",
    "complain",
    "formatter",
    "hook_exceptions",
    "is_json",
    "line",
    "show",
    "to_stderr",
    "use",
    "write",
]

_TELL_AGAIN_S: Final = 60.0

_UNWRITABLE: Final = (OSError, ValueError, AttributeError)
"""What writing to stderr raises if its file or pipe takes nothing, if it is closed, and if there is none."""

FORMATS: Final = ("text", "json")

_format = "text"


def use(name: str) -> str:
    """Set the format of this process to one of `FORMATS`, and return it. Text is for a terminal of the locale, JSON is in UTF-8."""
    global _format  # noqa: PLW0603 - a process has one stderr
    _format = name
    if is_json() and isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
    return name


def is_json() -> bool:
    """Return whether each line on stderr has to be a JSON object."""
    return _format == "json"


def line(level: str, part: str, message: str, *, at: float | None = None, **more: object) -> str:
    """Return a line of JSON, without a newline. Members that are None are left out."""
    moment = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    time = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    found = {"time": time, "level": level, "part": part, "message": message, **more}
    return json_text({key: value for key, value in found.items() if value is not None})


def write(text: str) -> None:
    """Write text to stderr. Drops what cannot be written: the disk with a log may be full, or nobody reads a pipe any more."""
    with suppress(*_UNWRITABLE):
        sys.stderr.write(text)
        sys.stderr.flush()


def show(text: str) -> None:
    """Write a line to stderr, as `write` does. On a terminal it takes the place of a live line, such as a progress."""
    with suppress(*_UNWRITABLE):
        start = "\r\x1b[K" if sys.stderr.isatty() and not is_json() else ""
        write(f"{start}{text}\n")


def complain(program: str, message: str, hint: str | None, exit_code: int) -> None:
    """Write the error that ends a command to stderr, with its hint."""
    if is_json():
        write(line("error", program, message, hint=hint, exit_code=exit_code) + "\n")
    else:
        write(printable_lines(f"{program}: error: {message}" + (f"\n{program}: hint: {hint}" if hint else "")) + "\n")


class JsonFormatter(logging.Formatter):
    """Formats the records of Python's logging as such lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        stack = stack_of(record.exc_info[1]) if record.exc_info and record.exc_info[1] else None
        return line(record.levelname.lower(), record.name, record.getMessage(), at=record.created, stack=stack)


class _TextFormatter(logging.Formatter):
    """Formats the records of Python's logging as text, which has no control characters but newlines."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return stack_of(ei[1]) if ei[1] is not None else ""


def hook_exceptions(program: str) -> None:
    """Show what no code of ours handles by the same rule: in the main thread, in other threads, and where Python ignores it.

    Python itself would print the texts of these exceptions.
    """

    def tell(ex: BaseException | None, where: str = "") -> None:
        if ex is None:
            return
        message = f"{unexpected(ex)}{where}"
        if is_json():
            show(line("error", program, message, stack=stack_of(ex)))
        else:
            show(printable_lines(f"{program}: error: {message}\n{stack_of(ex)}"))

    def tell_of_thread(found: threading.ExceptHookArgs) -> None:
        if not isinstance(found.exc_value, SystemExit):
            tell(found.exc_value, f", in the thread {found.thread.name}" if found.thread is not None else "")

    sys.excepthook = lambda _kind, ex, _frames: tell(ex)
    threading.excepthook = tell_of_thread
    sys.unraisablehook = lambda found: tell(found.exc_value, ", which Python ignores")


def to_stderr(level: int, text: str) -> None:
    """Let Python's logging write to stderr what has this level or a higher one. ``text`` is as for `formatter`."""
    logging.basicConfig(stream=sys.stderr, level=level, force=True)
    logging.root.handlers[0].setFormatter(formatter(text))


def formatter(text: str) -> logging.Formatter:
    """Return what formats records in the format of this process. ``text`` is the pattern of a line of text."""
    return JsonFormatter() if is_json() else _TextFormatter(text)


class Told:
    """Remembers what was said, so that what stays wrong for hours is a line a minute."""

    def __init__(self) -> None:
        self._text = ""
        self._at = -_TELL_AGAIN_S

    def is_news(self, text: str, now: float) -> bool:
        """Tell whether ``text`` has to be said, because it is new or was last said a minute ago. ``now`` is `time.monotonic()`."""
        if text == self._text and now - self._at < _TELL_AGAIN_S:
            return False
        self._text, self._at = text, now
        return True
