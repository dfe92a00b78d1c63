"""Who may write the tables of a warehouse: those that follow the log, together, or one that changes what they rely on. No pyspark.

    lock = TableLock(warehouse.root)
    with lock.shared() as state:        # the pipeline, around each micro-batch and each merge
        ...                             # another state than the last time: read the tables' columns and versions again
    with lock.exclusive():              # a snapshot, while it lands a table; whoever drops old changes
        ...

Between processes of one machine, or of several that share a file system with locks (flock); the end of a process, however it
comes, ends what it holds. Whoever wants the tables alone is let in before those who come after: without that, a pipeline that is
always at work would keep it out for ever. Not to be nested.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["TableLock", "hold_alone"]

_POLL_S = 0.05
_STATE_BYTES = 16


class TableLock:
    """The lock of one warehouse."""

    def __init__(self, root: Path) -> None:
        self._directory = root / "_cdcpipe"

    @contextmanager
    def shared(self) -> Iterator[bytes]:
        """Hold the lock with others; what is yielded has changed when somebody has held it alone since."""
        with self._open("tables.lock") as fd:
            with self._open("tables-wanted.lock") as wanted:
                fcntl.flock(wanted, fcntl.LOCK_SH)
                fcntl.flock(fd, fcntl.LOCK_SH)
            yield os.pread(fd, _STATE_BYTES, 0)

    @contextmanager
    def exclusive(self, is_stopping: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Hold the lock alone; InterruptedError if ``is_stopping`` says so while it waits for the others."""
        with self._open("tables-wanted.lock") as wanted, self._open("tables.lock") as fd:
            for each in (wanted, fd):
                while not _try_lock(each):
                    if is_stopping():
                        raise InterruptedError
                    time.sleep(_POLL_S)
            # First: who dies in the middle has changed something, too.
            os.pwrite(fd, secrets.token_hex(_STATE_BYTES // 2).encode(), 0)
            yield

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        self._directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._directory / name, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            yield fd
        finally:
            os.close(fd)


@contextmanager
def hold_alone(path: Path) -> Iterator[bool]:
    """Hold a lock of one's own, in a file that is made for it; yield False if somebody else does."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield _try_lock(fd)
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
