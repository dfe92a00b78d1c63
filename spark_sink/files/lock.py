"""Locks of files (flock): the end of a process, however it comes, lets go of what it holds."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["hold_alone", "try_lock"]


@contextmanager
def hold_alone(path: Path) -> Iterator[bool]:
    """Hold a lock of one's own, in a file that is made for it; yield False if somebody else does."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield try_lock(fd)
    finally:
        os.close(fd)


def try_lock(fd: int, *, is_shared: bool = False) -> bool:
    """Take the lock of an open file, alone or shared with others, if nobody is in the way; tell whether it is ours."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
