"""Locks of files (flock). The kernel releases a process's locks when the process ends, for whatever reason."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spark_sink.files.local import open_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["hold_alone", "try_lock"]


@contextmanager
def hold_alone(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock of the file ``path``, which is created. Yields False if another process holds it."""
    fd = open_file(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield try_lock(fd)
    finally:
        os.close(fd)


def try_lock(fd: int, *, is_shared: bool = False) -> bool:
    """Take the exclusive or shared lock of an open file without waiting; return False if another process's lock prevents it."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
