"""Locks of files (flock). The kernel releases a process's locks when the process ends, for whatever reason.

A lock belongs to an open file, and a child process may inherit the open file. Then the kernel keeps the lock until the child has
ended, too. A command needs this for a lock under which its JVM writes: after a SIGKILL of the command, the JVM lives for some
seconds (`share_with_child`).

Only the process that took a lock releases it. A forked child leaves the ``with`` blocks of its parent when it ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from spark_sink.files.local import open_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["hold_alone", "open_alone", "open_shared", "release", "share_with_child", "try_lock", "wait_for_lock"]

_logger = logging.getLogger(__name__)

_POLL_S = 0.05
_PATIENCE_S = 30.0
"""How long a wait for a lock may take before the log tells which process has the lock."""


@contextmanager
def hold_alone(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock of the file ``path``, which is created. Yields False if another process holds it."""
    with _opened(path) as fd:
        yield try_lock(fd)


def try_lock(fd: int, *, is_shared: bool = False) -> bool:
    """Take the exclusive or shared lock of an open file without waiting; return False if another process's lock prevents it."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(
    fd: int,
    path: Path,
    *,
    is_shared: bool = False,
    is_stopping: Callable[[], bool] = lambda: False,
    gives_up: Callable[[], bool] = lambda: False,
) -> None:
    """Take the exclusive or shared lock of the open file ``path``. If another process keeps it for long, log this once.

    Raises InterruptedError once ``gives_up`` is True while it waits; also once ``is_stopping`` is True while it waits for another
    process. What a thread of this process does with the lock, the stop ends, and the lock is free then.
    """
    look_at = time.monotonic() + _PATIENCE_S
    while not try_lock(fd, is_shared=is_shared):
        if gives_up() or (is_stopping() and _other_holder(fd) is not None):
            # Once more: if a thread of this process had it, and has ended just before the look, it is free now.
            if try_lock(fd, is_shared=is_shared):
                return
            raise InterruptedError
        if time.monotonic() >= look_at:
            holder = _other_holder(fd)
            if holder is not None:
                _logger.warning("still waiting for the lock %s: %s has it (is it busy? stopped? does it hang?)", path, holder)
            look_at = look_at + _PATIENCE_S if holder is None else float("inf")
        time.sleep(_POLL_S)


def _other_holder(fd: int) -> str | None:
    """Return which other process has the lock of an open file; None if it is this process."""
    file = os.fstat(fd)
    device, inode = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}", str(file.st_ino)
    found: dict[str, set[int]] = {}
    with suppress(OSError), open("/proc/locks", encoding="ascii") as locks:
        for line in locks:
            # 1: FLOCK ADVISORY WRITE 4711 fe:01:393225 0 EOF. If a process waits for a lock, its line has "->" after the number.
            match line.split():
                case [_, "FLOCK", _, _, pid, at, *_] if at.endswith(f":{inode}"):
                    found.setdefault(at.removesuffix(f":{inode}"), set()).add(int(pid))
    # On some file systems (btrfs) stat tells another device than this list.
    pids = found.get(device) or {pid for each in found.values() for pid in each}
    if not pids:
        return "another process, on this machine or another one,"
    others = pids - {os.getpid()}
    return f"process {', '.join(map(str, sorted(others)))}" if others else None


class _Inherited:
    """The open files of one lock that a child process has inherited: one to share the lock, one to have it alone."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._pid = os.getpid()
        self.shared, self.alone = (open_file(path, os.O_RDWR | os.O_CREAT, 0o644) for _ in range(2))
        self._counting = threading.Lock()
        self._sharing = 0

    def is_of(self, path: Path) -> bool:
        """Tell whether these are still the file ``path``: somebody may have removed the directory since.

        In a forked child they never are: with these files it would take and release its parent's lock.
        """
        try:
            return self._pid == os.getpid() and os.path.samestat(os.fstat(self.alone), path.stat())
        except FileNotFoundError:
            return False

    @contextmanager
    def hold_shared(self, is_stopping: Callable[[], bool], gives_up: Callable[[], bool]) -> Iterator[int]:
        """Share the lock; the first thread of this process takes it, and the last one releases it."""
        with self._counting:
            if not self._sharing:
                wait_for_lock(self.shared, self._path, is_shared=True, is_stopping=is_stopping, gives_up=gives_up)
            self._sharing += 1
        try:
            yield self.shared
        finally:
            if self._pid == os.getpid():  # in a forked child, a thread that is not there may hold `_counting`
                with self._counting:
                    self._sharing -= 1
                    if not self._sharing:
                        fcntl.flock(self.shared, fcntl.LOCK_UN)


_inherited: dict[Path, _Inherited] = {}


def share_with_child(path: Path) -> tuple[int, int]:
    """Return two descriptors for a child process to inherit. What this process has of the lock when it is killed, the child keeps.

    From now on `open_shared` and `open_alone` take the lock with these open files.
    """
    found = _inherited[path.absolute()] = _Inherited(path)
    return found.shared, found.alone


@contextmanager
def open_shared(
    path: Path, is_stopping: Callable[[], bool] = lambda: False, gives_up: Callable[[], bool] = lambda: False
) -> Iterator[int]:
    """Share the lock of the file ``path``, which is created, with others. Waits for it. Yields a descriptor of the file.

    Raises InterruptedError once ``is_stopping`` is True while it waits for another process, or ``gives_up`` while it waits.
    """
    if (found := _inherited.get(path.absolute())) is not None and found.is_of(path):
        with found.hold_shared(is_stopping, gives_up) as fd:
            yield fd
    else:
        with _opened(path) as fd:
            wait_for_lock(fd, path, is_shared=True, is_stopping=is_stopping, gives_up=gives_up)
            yield fd


@contextmanager
def open_alone(path: Path) -> Iterator[int]:
    """Open the file ``path``, which is created, for `try_lock`; release the lock at the end. One thread at a time may do this."""
    if (found := _inherited.get(path.absolute())) is not None and found.is_of(path):
        pid = os.getpid()
        try:
            yield found.alone
        finally:
            release(found.alone, pid)
    else:
        with _opened(path) as fd:
            yield fd


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd, pid = open_file(path, os.O_RDWR | os.O_CREAT, 0o644), os.getpid()
    try:
        yield fd
    finally:
        release(fd, pid)
        os.close(fd)


def release(fd: int, pid: int) -> None:
    """Release the lock of an open file, also for a child process that has been forked meanwhile, and has the file open.

    Does nothing unless ``pid``, the process that took the lock, is this one.
    """
    if pid == os.getpid():
        fcntl.flock(fd, fcntl.LOCK_UN)
