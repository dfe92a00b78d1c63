"""What may be shown of an exception that cdcpipe does not expect: always its class and its frames, seldom its text.

    shown(ValueError("invalid literal: 'secret'"))                 # ValueError
    shown(OSError(errno.ENOSPC, "No space left on device"))        # OSError: [Errno 28] No space left on device

The text of an exception may have a value of a row. It is shown only for classes whose texts name files, modules and attributes, and
for errors of ours and of object stores. The environment variable CDCPIPE_ERROR_TEXTS=1 shows all texts: for whoever looks
for a defect, on data that may be seen. Child processes and Spark's Python workers inherit it.

Everything that prints an exception asks this module: the formatters and hooks in `cdcpipe/logs.py`, the two command lines, and
`spark_sink/spark/java_texts.py` for exceptions whose class it knows as a text only.
"""

from __future__ import annotations

import builtins
import os
from contextlib import contextmanager
from traceback import format_tb, walk_tb
from typing import TYPE_CHECKING, Final

from cdcpipe import sqlstate
from cdcpipe.errors import CdcpipeError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SETTING", "TaskError", "are_all_shown", "is_class_shown", "shown", "stack_of", "unexpected", "without_values"]

SETTING: Final = "CDCPIPE_ERROR_TEXTS"

_WITHOUT_VALUES: Final = (OSError, ImportError, AttributeError, NameError, MemoryError, RecursionError)
"""Python's classes whose texts are shown, and their subclasses: the texts name files, hosts, modules, attributes and limits."""
_PACKAGES: Final = ("cdcpipe", "spark_sink", "botocore", "azure", "google", "gcsfs", "aiohttp")
"""The packages all of whose texts are shown: our own, and those of object stores, which name objects and hosts."""

_PLAIN_TEXTS: Final = ("can't start new thread",)
"""Texts of Python's that are shown, of classes whose other texts may have values: they name a limit of the machine."""

_CAUSE: Final = "\n\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT: Final = "\n\nDuring handling of the above exception, another exception occurred:\n\n"


class TaskError(CdcpipeError):
    """A task in another process failed, with an exception that nothing there expects. The message has no text of it."""


def are_all_shown() -> bool:
    """Tell whether the user wants all texts."""
    return os.environ.get(SETTING, "") not in ("", "0")


def is_class_shown(module: str, name: str) -> bool:
    """Tell whether the text of an exception may be shown whose class has this name, in a Python module or in none (``""``)."""
    if module.partition(".")[0] in _PACKAGES or are_all_shown():
        return True
    known = getattr(builtins, name, None) if module in ("", "builtins") else None
    return isinstance(known, type) and issubclass(known, _WITHOUT_VALUES)


def shown(ex: BaseException) -> str:
    """Return the class of an exception, and its text if it may be shown, as Python prints them."""
    kind = type(ex)
    name = kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    text = _text_of(ex)
    return f"{name}: {text}" if text else name


def _text_of(ex: BaseException) -> str:
    if are_all_shown():
        return str(ex)
    if isinstance(ex, CdcpipeError):
        return ex.message
    if isinstance(ex, _WITHOUT_VALUES) or is_class_shown(type(ex).__module__, type(ex).__name__) or str(ex) in _PLAIN_TEXTS:
        return str(ex)
    state = getattr(ex, "sqlstate", None)  # of psycopg; the lines after the first may have values (DETAIL)
    return str(ex).partition("\n")[0] if isinstance(state, str) and sqlstate.withheld(state) is None else ""


def stack_of(ex: BaseException) -> str:
    """Return the frames of an exception, of its causes and of those that it was raised after, as Python prints them."""
    said, seen = "", set()
    each: BaseException | None = ex
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        frames = format_tb(each.__traceback__)
        said = "".join(["Traceback (most recent call last):\n" if frames else "", *frames, shown(each), said])
        if each.__cause__ is not None:
            each, said = each.__cause__, f"{_CAUSE}{said}"
        else:
            each = None if each.__suppress_context__ else each.__context__
            said = f"{_CONTEXT}{said}" if each is not None else said
    return said


def unexpected(ex: BaseException) -> str:
    """Return the message for an exception that nothing expects: ``unexpected ValueError in line 7 of cdcpipe/lsn.py``."""
    kind, _, text = shown(ex).partition(": ")
    place = ""
    for frame, line in walk_tb(ex.__traceback__):
        place = f" in line {line} of {frame.f_code.co_filename}"
    return f"unexpected {kind}{place}{f': {text}' if text else ''}"


@contextmanager
def without_values() -> Iterator[None]:
    """Let what runs in a Python worker of Spark raise errors without values, because Spark logs and repeats their texts.

    An error whose text may be shown stays as it is; a TaskError takes the place of any other. Spark also prints the errors that
    came before one. So these are cut off.
    """
    try:
        yield
    except Exception as ex:
        if are_all_shown():
            raise
        is_shown = isinstance(ex, CdcpipeError) or _text_of(ex) == str(ex)
        raise (ex if is_shown else TaskError(unexpected(ex))) from None
