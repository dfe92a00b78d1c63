"""The rights to write the tables of a warehouse: who may write, and who excludes whom. No pyspark.

    lock = TableLock(warehouse.local_root())    # one in a process: pipeline, follower and upkeep share it
    with lock.append() as state:                # if it differs from the last state: read the tables' columns and versions again
        ...
    with lock.alone():
        ...

Two writers never commit to one Delta table at the same time, wherever the warehouse is. Spark checks that no commit of that number
exists, and then puts its own in place: on a local file system by a rename, in a store by a PUT. Both overwrite. A commit that we
made in between would be lost without an error. So a writer first takes a right:

    ==========  ==========================  =====================================================================
    right       excludes                    who takes it
    ==========  ==========================  =====================================================================
    append      append, alone               a micro-batch; upkeep, for commits to a changelog and to shorten its log
    merge       merge, alone                a round of merges; upkeep, for any change to a replica
    history     history                     a round of histories; upkeep, for any change to a history
    alone       append, merge, alone        a pipeline that opens the warehouse; a snapshot that lands a table; a purge
    ==========  ==========================  =====================================================================

Append, merge and history do not exclude each other: a merge reads a changelog while a micro-batch appends to it. A round of
histories may take long, so ``alone`` does not wait for it; it waits for `reading`, in which the round takes what it works with.
VACUUM takes no right while it deletes: it makes no commit, and gets a list of the files that it may delete (upkeep/upkeep.py).

``alone`` excludes the writers of all processes: on one machine, or on several that share a file system with locks (flock). When a
process ends, for whatever reason, its rights are free again as soon as its JVM has ended, too. After a SIGKILL the JVM lives for up
to four seconds, and may still commit (`lock_file`). The JVM of a session that this program did not start does not hold the rights.
Two appends, or two merges, exclude each other only within one process. So there is one pipeline on a warehouse at a time, which has
another lock, from its start to its end (`TableLock.own`). Other programs, like your own Spark jobs, do not know these rights.

Take one right at a time, so that there is no deadlock. A waiting ``alone`` blocks later appends and merges, so that a busy pipeline
cannot starve it. It waits for the merges first: a round of merges or OPTIMIZE of a replica may take hours, in which appends go on.
So there are two files: a merge shares both, an append only that of the tables. A purge may have the tables alone for long, and a
stopped process for ever. So a wait for ``alone`` itself, or for the end of another process's ``alone``, ends with InterruptedError
once this process is asked to stop. What this process does alone is a copy or a purge of its own, which the stop ends, too: an
append or a merge waits for that, and so a stop does not leave out the last merges. After an error nobody asks the copy to end, and
no last merges are wanted: then each wait ends. A right that is free is given even then.
"""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from spark_sink.files.lock import open_alone, open_shared, try_lock, wait_for_lock
from spark_sink.staging.lock import holder, sign
from spark_sink.warehouse.errors import WarehouseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["TableLock", "lock_file"]

_STATE_BYTES = 16


@contextmanager
def _owned(path: Path, what: str, rule: str) -> Iterator[None]:
    """Hold a lock, and sign it. Raises WarehouseError, which says what another pipeline does, if that one holds it."""
    with open_alone(path) as fd:
        if not try_lock(fd):
            who, hint = holder(path, f"wait until that has ended, or stop it: {rule}")
            raise WarehouseError(f"another pipeline {what}: {who}", hint=hint)
        sign(fd)
        yield


def lock_file(root: Path) -> Path:
    """Return the file whose lock the rights are; ``root`` is `Warehouse.local_root`.

    A program that writes tables passes it to `session.build`, so that the JVM holds the rights until it has ended, too.
    The JVM gets no other lock. So a merge shares this one as well: after a SIGKILL merges.lock is free at once, and the JVM may
    still merge.
    """
    return root / "_cdcpipe" / "tables.lock"


class TableLock:
    """The rights to write one warehouse's tables; ``root`` is `Warehouse.local_root`. Thread-safe.

    Once ``is_stopping`` is True, a wait for another process raises InterruptedError, and so does each wait for `alone`. Once
    ``has_failed`` is True, each wait does.
    """

    def __init__(
        self, root: Path, is_stopping: Callable[[], bool] = lambda: False, has_failed: Callable[[], bool] = lambda: False
    ) -> None:
        self.is_stopping, self._has_failed = is_stopping, has_failed
        self._file = lock_file(root)
        self._merges = self._file.with_name("merges.lock")
        self._owner = self._file.with_name("pipeline.lock")
        self._appending = threading.Lock()
        self._merging = threading.Lock()
        self._recording_history = threading.Lock()
        self._waiting: set[int] = set()
        """The threads that wait in `alone`."""

    @property
    def is_waiting(self) -> bool:
        """Whether a thread waits in `alone` for the others to end. Any thread may ask."""
        return bool(self._waiting)

    @contextmanager
    def own(self, name: str, staging: Path) -> Iterator[None]:
        """Be the one pipeline of the warehouse ``name``, and of the log in ``staging``, which keeps segments for one warehouse.

        Raises WarehouseError if there is another one, in any process.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)  # others may read the tables, but the log only if they are let
        (staging / "readers").mkdir(mode=0o700, parents=True, exist_ok=True)
        with (
            _owned(self._owner, f"writes the tables in {name}", "one pipeline at a time writes the tables of a warehouse"),
            _owned(staging / "readers/tables.lock", f"reads the log in {staging}", "another warehouse needs its own slot and log"),
        ):
            yield

    @contextmanager
    def append(self) -> Iterator[bytes]:
        """Hold the right to commit to changelogs. Yields a state, which changes whenever a writer takes ``alone``."""
        with self._appending, self._shared(self._file) as state:
            yield state

    @contextmanager
    def merge(self) -> Iterator[None]:
        """Hold the right to commit to replicas."""
        with self._merging, self._shared(self._merges), self._shared(self._file):
            yield

    @contextmanager
    def history(self) -> Iterator[None]:
        """Hold the right to commit to histories."""
        with self._recording_history:
            yield

    @contextmanager
    def reading(self) -> Iterator[bytes]:
        """Exclude ``alone`` for a moment, so that a changelog and the table's versions fit together. Yields `append`'s state."""
        with self._shared(self._file) as state:
            yield state

    @contextmanager
    def alone(self, is_stopping: Callable[[], bool] | None = None) -> Iterator[None]:
        """Hold the right to write all tables alone. If given, ``is_stopping`` counts instead of the lock's own."""
        is_stopping = is_stopping or self.is_stopping
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            self._waiting.add(threading.get_ident())
            try:
                held.enter_context(_exclusive(self._merges, is_stopping))
                fd = held.enter_context(_exclusive(self._file, is_stopping))
            finally:
                self._waiting.remove(threading.get_ident())
            # Change the state first: a holder that is killed may have changed the tables, too.
            os.pwrite(fd, secrets.token_hex(_STATE_BYTES // 2).encode(), 0)
            yield

    @contextmanager
    def _shared(self, path: Path) -> Iterator[bytes]:
        """Share the lock of a file with others, but not with `alone`; yield the file's state."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            with open_shared(_wanted(path), self.is_stopping, self._has_failed):
                fd = held.enter_context(open_shared(path, self.is_stopping, self._has_failed))
            yield os.pread(fd, _STATE_BYTES, 0)


@contextmanager
def _exclusive(path: Path, is_stopping: Callable[[], bool]) -> Iterator[int]:
    """Wait until nobody shares the lock of a file, and let nobody new share it meanwhile. Yields a descriptor of the file."""
    with open_alone(_wanted(path)) as wanted:
        wait_for_lock(wanted, _wanted(path), gives_up=is_stopping)
        # Only now: this file may be the process's only one, and a thread that gave up would release what another thread has.
        with open_alone(path) as fd:
            wait_for_lock(fd, path, gives_up=is_stopping)
            yield fd


def _wanted(path: Path) -> Path:
    """Return the file whose lock a writer passes before it shares that of ``path``: who waits for the latter alone holds it."""
    return path.with_name(f"{path.stem}-wanted.lock")
