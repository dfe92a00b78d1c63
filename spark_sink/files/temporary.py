"""One directory in ``$TMPDIR`` for the temporary files of a process and of its JVM, which a killed process does not leave for ever.

The process holds a shared lock (flock) of the directory. It removes the directory when it ends. If it is killed, it leaves the
directory behind, and the kernel releases the lock. The next process removes each directory whose lock it gets alone.

The lock also keeps systemd-tmpfiles away, which otherwise removes what nobody has used for some days.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spark_sink.files.lock import try_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["directory_of_process"]

_logger = logging.getLogger(__name__)

_PREFIX: Final = "cdcpipe-spark-"


@functools.cache
def directory_of_process() -> Path:
    """Return the directory, which exists until this process ends. The first call makes it, and removes those of ended processes."""
    _remove_left()
    while True:
        made = Path(tempfile.mkdtemp(prefix=_PREFIX))
        fd = os.open(made, os.O_RDONLY | os.O_DIRECTORY)  # open until the process ends
        try:
            is_ours = try_lock(fd, is_shared=True)
        except OSError as ex:  # a file system without locks, where no other process gets the lock either
            _logger.info("%s can't be locked: %s", made, ex.strerror)
            is_ours = True
        if is_ours and made.is_dir():
            atexit.register(shutil.rmtree, made, ignore_errors=True)
            return made
        os.close(fd)  # another process has removed it before we had the lock


def _remove_left() -> None:
    """Remove the directories of this user's processes that have ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            with _held_alone(path) as is_left:
                if is_left:
                    shutil.rmtree(path)
                    _logger.info("removed %s, which a process that has ended had left", path)
        except OSError as ex:
            _logger.info("%s stays: %s", path, ex.strerror)


@contextmanager
def _held_alone(path: Path) -> Iterator[bool]:
    """Hold the directory's lock alone; yields False if its process lives, or if it is another user's."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield os.fstat(fd).st_uid == os.geteuid() and try_lock(fd)
    finally:
        os.close(fd)
