"""Who may write the tables of a warehouse, and who excludes whom. No pyspark.

    lock = TableLock(warehouse.local_root())
    with lock.shared() as state:        # the pipeline, around each micro-batch and each merge
        ...                             # another state than the last time: read the tables' columns and versions again
    with lock.exclusive():              # a snapshot, while it lands a table; a purge
        ...

Never do two writers commit to one Delta table at a time, wherever the warehouse is. Spark looks whether a commit of that number
is there, and then puts its own in place, on a local file system by a rename, in a store by a PUT, and both overwrite: a commit
that we made in between is lost without an error.

    ======================================  =====================  =======
    who writes                              lock in this process   tables
    ======================================  =====================  =======
    a micro-batch (changelogs)              ``Pipeline._running``  shared
    upkeep: OPTIMIZE, log of a changelog    ``Pipeline._running``  shared   (`Pipeline.appending`)
    a round of merges (replicas)            ``Pipeline._merging``  shared
    upkeep: whatever it does to a replica   ``Pipeline._merging``  shared   (`Pipeline.merging`)
    a pipeline that opens the warehouse     none                   alone
    a snapshot that lands a table           none                   alone
    a purge, upkeep's own among them        none                   alone
    upkeep: VACUUM of a changelog           none                   none
    ======================================  =====================  =======

Two rows with the same lock exclude each other; "alone" excludes every "shared" and every other "alone", of any process. VACUUM
makes no commit (upkeep/upkeep.py), and deletes only what no version has had for a while. A merge reads a changelog while a
micro-batch appends to it.

Nobody waits in a circle: the lock in the process is taken first, then the tables; a micro-batch that merges itself lets go of
the tables, keeps ``_running`` and takes ``_merging``, and nobody takes these two the other way round. The tables' lock must not
be nested: a waiting exclusive request blocks later shared ones, so that a busy pipeline cannot starve it.

The tables' lock holds between processes of one machine, or of several that share a file system with locks (flock); the end of a
process, however it comes, ends what it holds. Other programs, Spark of your own among them, do not know these locks.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spark_sink.files.lock import try_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["TableLock"]

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
                while not try_lock(each):
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
