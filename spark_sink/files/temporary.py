"""One directory in ``$TMPDIR`` for the temporary files of a process and of its JVM, which a killed process does not leave for ever.

The process holds a shared lock (flock) of the directory. It removes the directory when it ends. If it is killed, it leaves the
directory behind, and the kernel releases the lock. The next process removes each such directory whose lock it gets alone.

Anybody may have a directory named ``cdcpipe-spark-backup`` there, so the name proves nothing. A process puts a file with the
directory's name into each directory that it makes, and nothing without this file is removed. It is the last file to go, so that a
removal that was killed goes on later. A process that is killed before it has written the file leaves an empty directory: it stays.

The lock also keeps systemd-tmpfiles away, which otherwise removes what nobody has used for some days.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cdcpipe.threads import at_exit
from spark_sink.files.lock import try_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["directory_of_process"]

_logger = logging.getLogger(__name__)

_PREFIX: Final = "cdcpipe-spark-"
_NAME: Final = re.compile(_PREFIX + "[a-z0-9_]{8}")
"""The names that `tempfile.mkdtemp` makes."""
_MARK: Final = "made-by-cdcpipe-spark"
"""The file with which a process of this program marks its directory. It has the directory's name, so that a copy is not marked."""


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
            at_exit(_remove_at_the_end, made)
            (made / _MARK).write_text(made.name, "ascii")
            return made
        os.close(fd)  # another program (systemd-tmpfiles) removes it, or has removed it before we had the lock
        with suppress(OSError):
            made.rmdir()


def _remove_left() -> None:
    """Remove the directories of this user's processes that have ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            with _held_alone(path) as is_left:
                if is_left and _is_made_here(path):
                    _remove(path)
                    _logger.info("removed %s, which a process that has ended had left", path)
        except OSError as ex:
            _logger.info("%s stays: %s", path, ex.strerror)


def _is_made_here(path: Path) -> bool:
    try:
        return (path / _MARK).read_bytes() == path.name.encode("ascii")
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    """Remove a directory of this program as far as that is possible; the file that says that it is one goes last."""
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        elif entry.name != _MARK:
            with suppress(OSError):
                Path(entry.path).unlink()
    if any(each.name != _MARK for each in path.iterdir()):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    (path / _MARK).unlink(missing_ok=True)
    path.rmdir()


def _remove_at_the_end(path: Path) -> None:
    with suppress(OSError):  # a child that still lives writes there, for example: the next process removes it
        _remove(path)


@contextmanager
def _held_alone(path: Path) -> Iterator[bool]:
    """Hold the directory's lock alone; yields False if its process lives, or if it is another user's."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield os.fstat(fd).st_uid == os.geteuid() and try_lock(fd)
    finally:
        os.close(fd)
