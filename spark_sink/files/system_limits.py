"""What to say of an error of the operating system, and of a limit of the machine: a message and a hint that fits the cause.

    described(OSError(errno.ENOSPC, "No space left on device", "a.json"))
    ('a.json: No space left on device', 'the file system is full, of bytes (df) or of files (df -i): make room; then start again')

A limit of the machine (open files, memory, threads) is no defect of cdcpipe, so no hint says that it is (cdcpipe/limits.py).
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from cdcpipe.limits import limit_hint
from spark_sink.files.system_hints import THEN, hint_of

__all__ = ["described", "of_system"]

_OTHERS: Final = f"-v shows where this happened; {THEN}"


def described(error: Exception) -> tuple[str, str] | None:
    """Return the message and the hint for an error of the system or a limit of the machine; None for any other error."""
    if isinstance(error, OSError):
        if error.errno == errno.ENOENT and error.filename is None and not _has_directory():
            return "the current directory does not exist any more", f"change to one that exists; {THEN}"
        return of_system(error), hint_of(error) or _OTHERS
    hint = limit_hint(error)
    if hint is None:
        return None
    return str(error) or "out of memory", hint


def of_system(error: OSError) -> str:
    """Return the message for an error of the operating system: the file, if there is one, and the reason."""
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{error.filename}: {reason}"


def _has_directory() -> bool:
    """Tell whether the current directory exists: a relative path in it has no absolute one otherwise."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True
