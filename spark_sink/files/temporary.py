"""One directory in ``$TMPDIR`` for the temporary files of a process and of its JVM, which a killed process does not leave for ever.

Anybody may have a directory named ``cdcpipe-spark-backup`` there, so the name proves nothing. A process puts a file with the
directory's name into each directory that it makes, its mark, and nothing without a mark is removed. It is the last file to go, so
that a removal that was killed goes on later. If a process is killed before it has written the mark, the directory stays.

The process holds a shared lock (flock) of the directory and one of its mark. It removes the directory when it ends. If it is
killed, it leaves the directory behind, and the kernel releases the locks. The next process removes each such directory whose locks
it gets alone. It needs both. The directory's lock also keeps systemd-tmpfiles away, which otherwise removes what nobody has used
for some days. But on a network file system, the kernel does not tell the server of the locks of directories: other machines see
only that of the mark.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import shutil
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from cdcpipe.threads import at_exit
from spark_sink.files.lock import try_lock, wait_for_lock

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
        fd = os.open(made, os.O_RDONLY | os.O_DIRECTORY)  # open until the process ends, as the mark is
        if _share(fd, made) and made.is_dir():
            mark = (made / _MARK).open("x+b")
            at_exit(_remove_at_the_end, made, mark)
            if not _share(mark.fileno(), made):  # another process is just reading it
                wait_for_lock(mark.fileno(), made / _MARK, is_shared=True)
            mark.write(made.name.encode("ascii"))
            mark.flush()
            return made
        os.close(fd)  # another program (systemd-tmpfiles) removes it, or has removed it before we had the lock
        with suppress(OSError):
            made.rmdir()


def _share(fd: int, path: Path) -> bool:
    try:
        return try_lock(fd, is_shared=True)
    except OSError as ex:  # a file system without locks, where no other process gets the lock either
        _logger.info("%s can't be locked: %s", path, ex.strerror)
        return True


def _remove_left() -> None:
    """Remove the directories of this user's processes that have ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            with _held_alone(path) as mark:
                if mark is not None and mark.read() == path.name.encode("ascii"):
                    _remove(path, mark)
                    _logger.info("removed %s, which a process that has ended had left", path)
        except OSError as ex:
            _logger.info("%s stays: %s", path, ex.strerror)


def _remove(path: Path, mark: BinaryIO) -> None:
    """Remove a directory of this program as far as that is possible; its mark, which is open, goes last."""
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        elif entry.name != _MARK:
            with suppress(OSError):
                Path(entry.path).unlink()
    if any(each.name != _MARK for each in path.iterdir()):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    mark.close()  # NFS keeps a file that is open under another name, and then the directory, too
    (path / _MARK).unlink(missing_ok=True)
    path.rmdir()


def _remove_at_the_end(path: Path, mark: BinaryIO) -> None:
    with suppress(OSError):  # a child that still lives writes there, for example: the next process removes it
        _remove(path, mark)


@contextmanager
def _held_alone(path: Path) -> Iterator[BinaryIO | None]:
    """Hold a directory's locks alone. Yields its mark; None if it has none, if its process lives, or if it is another user's."""
    with ExitStack() as held:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        held.callback(os.close, fd)
        mark = None
        if os.fstat(fd).st_uid == os.geteuid() and try_lock(fd):
            with suppress(FileNotFoundError):
                mark_fd = os.open(path / _MARK, os.O_RDWR | os.O_NOFOLLOW)  # NFS gives an exclusive lock only to who may write
                mark = held.enter_context(os.fdopen(mark_fd, "r+b"))
        yield mark if mark is not None and try_lock(mark.fileno()) else None
