"""What to do after an error of the operating system.

The error has a number, or another program repeats its words:

    hint_of(OSError(errno.ENOSPC, "No space left on device"))    # "the file system is full, of bytes (df) or of files (df -i): …"
    hint_in("[Errno 28] Error writing: No space left on device")    # the same
"""

from __future__ import annotations

import errno
import os
from typing import Final

from cdcpipe.limits import limit_hint

__all__ = ["THEN", "WORKER_ENDED", "disk_hint_of", "hint_in", "hint_of", "is_full"]

THEN: Final = "then start again"
WORKER_ENDED: Final = "Python worker exited unexpectedly"
"""Spark's words if a Python worker of an executor has ended without an error of its own: it was killed, or it crashed."""

_DAEMON_ENDED: Final = "Stream closed"
"""Java's words if the process has ended from which Spark forks its Python workers: its stdin is closed."""

_NOT_EXECUTABLE: Final = "failed to map segment from shared object"
"""The dynamic linker's words for a library in a directory that is mounted with noexec. Java puts its libraries into $TMPDIR."""

_HINTS: Final = {
    errno.ENOSPC: f"the file system is full, of bytes (df) or of files (df -i): make room; {THEN}",
    errno.EDQUOT: f"this user's disk quota is used up: make room, or raise the quota; {THEN}",
    errno.EFBIG: f"the file is larger than this user or this file system allows: raise the limit (ulimit -f); {THEN}",
    errno.EACCES: f"let this user read and write there, or run cdcpipe-spark as the owner; {THEN}",
    errno.EPERM: f"let this user read and write there, or run cdcpipe-spark as the owner; {THEN}",
    errno.EROFS: f"the file system is mounted read-only: mount it for writing, or name another directory; {THEN}",
    errno.ENOENT: "something in the path is not there: create it, or name another path",
    errno.ENOTDIR: "something in the path is no directory: name another path",
    errno.EISDIR: "the path is a directory, not a file: name another path",
    errno.ENAMETOOLONG: "the path is too long: name a shorter one",
    errno.EIO: f"the disk or its connection fails: look at the system's log (dmesg); {THEN}",
    errno.EXDEV: f"the folders of a warehouse have to be on one file system, without mounts within: bring them together; {THEN}",
    errno.ESTALE: f"the mounted file system has changed on its server: mount it again; {THEN}",
    errno.EAGAIN: f"this user or this container may have too few processes: raise ulimit -u, TasksMax or pids.max; {THEN}",
}

_DISKS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
_SAID: Final = (*_DISKS, errno.EACCES, errno.EXDEV)
"""Errors of disks and mounts. Their words mean nothing else, also in a message of Java or of a Python worker."""


def hint_of(error: OSError) -> str | None:
    """Return the hint for an error of the system, or for the limit of the machine that it names; None if none fits."""
    return limit_hint(error) or _HINTS.get(error.errno or 0)


def disk_hint_of(error: OSError) -> str | None:
    """Return the hint for an error of a disk or a mount; None for any other one, such as a missing right."""
    return _HINTS[error.errno] if error.errno in _DISKS else None


def is_full(error: BaseException) -> bool:
    """Tell whether a disk without room caused the error, in this process or in another one whose words the error repeats."""
    return any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))


def hint_in(text: str) -> str | None:
    """Return the hint for an error whose words ``text`` repeats: of a disk, a mount, a library or a Python worker; None if none."""
    if WORKER_ENDED in text or text.endswith(_DAEMON_ENDED):
        return f"its machine's log tells whether the system killed it for lack of memory (dmesg): if so, give it more; {THEN}"
    if _NOT_EXECUTABLE in text:
        return f"the directory is mounted with noexec: set TMPDIR to one that is not; {THEN}"
    return next((_HINTS[number] for number in _SAID if os.strerror(number) in text), None)
