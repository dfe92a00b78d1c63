"""Locks of files (flock). The kernel releases a process's locks when the process ends, for whatever reason.

A lock belongs to an open file, and a child process may inherit the open file. Then the kernel keeps the lock until the child has
ended, too. A command needs this for a lock under which its JVM writes: after a SIGKILL of the command, the JVM lives for some
seconds (`share_with_child`).
"""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from spark_sink.files.local import open_file

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["hold_alone", "open_alone", "open_shared", "share_with_child", "try_lock"]


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


class _Inherited:
    """The open files of one lock that a child process has inherited: one to share the lock, one to have it alone."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.shared, self.alone = (open_file(path, os.O_RDWR | os.O_CREAT, 0o644) for _ in range(2))
        self._counting = threading.Lock()
        self._sharing = 0

    def is_of(self, path: Path) -> bool:
        """Tell whether these are still the file ``path``: somebody may have removed the directory since."""
        try:
            return os.path.samestat(os.fstat(self.alone), path.stat())
        except FileNotFoundError:
            return False

    @contextmanager
    def hold_shared(self) -> Iterator[int]:
        """Share the lock; the first thread of this process takes it, and the last one releases it."""
        with self._counting:
            if not self._sharing:
                fcntl.flock(self.shared, fcntl.LOCK_SH)
            self._sharing += 1
        try:
            yield self.shared
        finally:
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
def open_shared(path: Path) -> Iterator[int]:
    """Share the lock of the file ``path``, which is created, with others. Waits for it. Yields a descriptor of the file."""
    if (found := _inherited.get(path.absolute())) is not None and found.is_of(path):
        with found.hold_shared() as fd:
            yield fd
    else:
        with _opened(path) as fd:
            fcntl.flock(fd, fcntl.LOCK_SH)
            yield fd


@contextmanager
def open_alone(path: Path) -> Iterator[int]:
    """Open the file ``path``, which is created, for `try_lock`; release the lock at the end. One thread at a time may do this."""
    if (found := _inherited.get(path.absolute())) is not None and found.is_of(path):
        try:
            yield found.alone
        finally:
            fcntl.flock(found.alone, fcntl.LOCK_UN)
    else:
        with _opened(path) as fd:
            yield fd


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = open_file(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)
