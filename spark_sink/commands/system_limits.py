"""What to say of an error of the operating system, and of a limit of the machine: a message and a hint that fits the cause.

    described(OSError(errno.EMFILE, "Too many open files", "a.json"))
    ('a.json: Too many open files', 'this process may open too few files: raise the limit (ulimit -n, ...); then start again')

A limit of the machine (memory, threads, processes) is no defect of cdcpipe, so no hint says that it is.
"""

from __future__ import annotations

import errno
from typing import Final

__all__ = ["described", "of_system"]

_THEN: Final = "then start again"
_MEMORY: Final = f"the machine, the container or ulimit -v gives this process too little memory: raise the limit; {_THEN}"
_THREADS: Final = (
    f"this user or this container may have too few processes and threads: raise the limit (ulimit -u, TasksMax, pids.max); {_THEN}"
)

_HINTS: Final = {
    errno.EMFILE: f"this process may open too few files: raise the limit (ulimit -n, LimitNOFILE of systemd); {_THEN}",
    errno.ENFILE: f"all programs together have too many open files: raise the limit of the system (sysctl fs.file-max); {_THEN}",
    errno.ENOSPC: f"the file system is full: make room; {_THEN}",
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
    errno.ENOMEM: _MEMORY,
    errno.EAGAIN: _THREADS,
}
_OTHERS: Final = f"-v shows where this happened; {_THEN}"


def described(error: Exception) -> tuple[str, str] | None:
    """Return the message and the hint for an error of the system or a limit of the machine; None for any other error."""
    if isinstance(error, OSError):
        return of_system(error), _HINTS.get(error.errno or 0, _OTHERS)
    if isinstance(error, MemoryError):
        return "out of memory", _MEMORY
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "the system starts no more threads for this process", _THREADS
    return None


def of_system(error: OSError) -> str:
    """Return the message for an error of the operating system: the file, if there is one, and the reason."""
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{error.filename}: {reason}"
