"""What to say of an error of the operating system, and of a limit of the machine: a message and a hint that fits the cause.

    described(OSError(errno.ENOSPC, "No space left on device", "a.json"))
    ('a.json: No space left on device', 'the file system is full, of bytes (df) or of files (df -i): make room; then start again')

A limit of the machine (open files, memory, threads) is no defect of cdcpipe, so no hint says that it is (cdcpipe/limits.py).
"""

from __future__ import annotations

import errno
from typing import Final

from cdcpipe.limits import limit_hint

__all__ = ["described", "of_system"]

_THEN: Final = "then start again"

_HINTS: Final = {
    errno.ENOSPC: f"the file system is full, of bytes (df) or of files (df -i): make room; {_THEN}",
    errno.EDQUOT: f"this user's disk quota is used up: make room, or raise the quota; {_THEN}",
    errno.EFBIG: f"the file is larger than this user or this file system allows: raise the limit (ulimit -f); {_THEN}",
    errno.EACCES: f"let this user read and write there, or run cdcpipe-spark as the owner; {_THEN}",
    errno.EPERM: f"let this user read and write there, or run cdcpipe-spark as the owner; {_THEN}",
    errno.EROFS: f"the file system is mounted read-only: mount it for writing, or name another directory; {_THEN}",
    errno.ENOENT: "something in the path is not there: create it, or name another path",
    errno.ENOTDIR: "something in the path is no directory: name another path",
    errno.EISDIR: "the path is a directory, not a file: name another path",
    errno.ENAMETOOLONG: "the path is too long: name a shorter one",
    errno.EIO: f"the disk or its connection fails: look at the system's log (dmesg); {_THEN}",
    errno.ESTALE: f"the mounted file system has changed on its server: mount it again; {_THEN}",
    errno.EAGAIN: f"this user or this container may have too few processes: raise ulimit -u, TasksMax or pids.max; {_THEN}",
}
_OTHERS: Final = f"-v shows where this happened; {_THEN}"


def described(error: Exception) -> tuple[str, str] | None:
    """Return the message and the hint for an error of the system or a limit of the machine; None for any other error."""
    hint = limit_hint(error)
    if isinstance(error, OSError):
        return of_system(error), hint or _HINTS.get(error.errno or 0, _OTHERS)
    if hint is None:
        return None
    return str(error) or "out of memory", hint


def of_system(error: OSError) -> str:
    """Return the message for an error of the operating system: the file, if there is one, and the reason."""
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{error.filename}: {reason}"
