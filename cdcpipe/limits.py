"""Recognizes errors whose cause is a limit of the machine or of the process: open files, threads, memory. Does no I/O.

    limit_hint(OSError(errno.EMFILE, "Too many open files"))    # raise the limit of open files: ulimit -n (now 256)
    limit_hint(OSError(errno.ENOENT, "No such file or directory"))    # None

libpq, the dynamic linker and Arrow say such things in a text only.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator

from cdcpipe.errors import UnreachableError

__all__ = ["limit_hint"]

_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_NO_THREAD = "can't start new thread"
_NO_MEMORY = "out of memory"
_FROM_SERVER = "FATAL:"
"""libpq's message contains this word if the server has refused the connection. A limit that it names is then the server's."""


def limit_hint(error: BaseException) -> str | None:
    """Return how to raise the limit that an error or one of its causes names; None if it names no limit."""
    for each in _with_causes(error):
        if isinstance(each, MemoryError):
            return _memory()
        if isinstance(each, OSError) and each.errno in _LIMITS:
            return _hint_of(each.errno)
        if isinstance(each, RuntimeError) and _NO_THREAD in str(each):
            threads = f"ulimit -u (now {_now(resource.RLIMIT_NPROC)}), or the limit of the container"
            return f"raise the limit of processes and threads: {threads}; or {_memory()}"
        # libpq and the dynamic linker give a text only, and so does Arrow for a file that it cannot map.
        is_text = isinstance(each, (ImportError, UnreachableError)) or (isinstance(each, OSError) and each.errno is None)
        if is_text and (number := _named_in(str(each))):
            return _hint_of(number)
    return None


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__


def _named_in(text: str) -> int | None:
    if _FROM_SERVER in text:
        return None
    if _NO_MEMORY in text:
        return errno.ENOMEM
    # ENFILE's text begins with EMFILE's, so it comes first.
    return next((number for number in (errno.ENFILE, errno.EMFILE, errno.ENOMEM) if os.strerror(number) in text), None)


def _hint_of(number: int) -> str:
    if number == errno.EMFILE:
        return f"raise the limit of open files: ulimit -n (now {_now(resource.RLIMIT_NOFILE)})"
    if number == errno.ENFILE:
        return "raise the machine's limit of open files: sysctl fs.file-max"
    return _memory()


def _memory() -> str:
    return f"give the process more memory: ulimit -v (now {_now(resource.RLIMIT_AS)}, in KiB), or the limit of the container"


def _now(which: int) -> str:
    soft, _ = resource.getrlimit(which)
    if soft == resource.RLIM_INFINITY:
        return "unlimited"
    return str(soft // 1024 if which == resource.RLIMIT_AS else soft)
