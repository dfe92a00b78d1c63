"""Directories and small JSON files on a local or mounted file system. No pyspark.

The staging directory and Spark's checkpoint must be on such a file system. A warehouse may be in an object store (`files.places`).
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from spark_sink.files.system_hints import disk_hint_of, hint_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "NEWER",
    "RESTORE",
    "TEMPORARY_PREFIX",
    "DamagedFileError",
    "check_readable",
    "check_there",
    "check_usable",
    "fsync_directory",
    "local_directory",
    "nameable_directory",
    "named",
    "open_file",
    "parse_json",
    "private_opener",
    "read_file",
    "read_json",
    "replacing",
    "write_json",
]

# At least two letters before the colon, so that "C:/" is no URL. One slash, because a Path turns two into one.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


RESTORE = "restore the file from a copy of its directory"
"""The hint for a damaged file."""
NEWER = "use the version of cdcpipe that wrote it, or a newer one"
"""The hint for a file of an unknown version."""


class DamagedFileError(CdcpipeError):
    """A file that cdcpipe wrote has other contents than expected. Exit code 7, SYSTEM_ERROR."""


def local_directory(path: Path | str, what: str) -> Path:
    """Return the absolute path of ``what``, a directory; raise InvalidArgumentsError if ``path`` is empty or a URL.

    Taken as a path, ``s3a://bucket/lake`` would be a directory ``s3a:`` of this machine. An empty text, often a shell variable that
    is not set, would be the current directory. The returned path has no ``..``, which Hadoop removes from the text, also behind a
    symbolic link. It begins with one slash: after two, Hadoop reads the name of a machine.
    """
    if not str(path).strip():
        raise InvalidArgumentsError(f"{what} is empty", hint="give a path; is the variable set from which it comes?")
    if _URL.match(str(path)):
        raise InvalidArgumentsError(
            f"{path}: {what} must be a directory of a local or mounted file system, not a URL",
            hint="give a path; only a warehouse can be in an object store",
        )
    absolute = Path(path).absolute()
    if ".." not in absolute.parts and absolute.root == "/":
        return absolute
    shortened, resolved = Path(os.path.normpath(f"/{absolute.relative_to(absolute.root)}")), absolute.resolve()
    return shortened if shortened.resolve() == resolved else resolved


def nameable_directory(path: Path | str, what: str) -> Path:
    """Return `local_directory`. Raises InvalidArgumentsError, too, if Arrow and Java would not name it as Python does.

    They take paths as UTF-8. Python has stand-ins (surrogates) for bytes that are not.
    """
    found, encoding = local_directory(path, what), sys.getfilesystemencoding()
    text = str(found)
    is_taken_otherwise = encoding != "utf-8" and not text.isascii()
    if not is_taken_otherwise and text.encode(errors="ignore").decode() == text:
        return found
    hint = "give another path"
    if is_taken_otherwise:
        hint = f"set LC_ALL=C.UTF-8 and PYTHONUTF8=1; Python takes the names of files as {encoding} here"
    raise InvalidArgumentsError(f"{text!a}: the path of {what} is not UTF-8 text", hint=hint)


def check_usable(path: Path, what: str) -> None:
    """Raise an error unless ``path`` is a directory that this user may write to, or may create.

    The error is an InvalidArgumentsError only if ``path`` itself is wrong. A disk or a mount that is away, or not writable yet, may
    come back: then it is a CdcpipeError, after which a service manager starts the command again.
    """
    try:
        existing = next(each for each in (path, *path.parents) if _is_there(each))
        is_directory, is_writable = existing.is_dir(), os.access(existing, os.W_OK | os.X_OK)
        is_read_only = not is_writable and bool(os.statvfs(existing).f_flag & os.ST_RDONLY)
    except OSError as ex:
        raise CdcpipeError(f"{path}: {what} can't be there: {ex.strerror or ex}", hint=hint_of(ex)) from ex
    begin, hint = f"{path}: {what} can't be there: {existing} is", "give a directory that this user may write to, or may create"
    if not is_directory:
        raise InvalidArgumentsError(f"{begin} no directory", hint=hint)
    if is_read_only:  # also how Linux answers an error of the disk
        raise CdcpipeError(f"{begin} on a file system that is mounted read-only", hint=hint_of(OSError(errno.EROFS, "")))
    if not is_writable:
        raise CdcpipeError(f"{begin} not writable", hint=f"{hint}; or is its file system not mounted yet?")


def check_there(path: Path, what: str) -> None:
    """Raise an error unless ``path`` is a directory that is there, and that this user may read and write. See `check_usable`."""
    check_usable(path, what)
    if not path.exists():
        raise CdcpipeError(f"{path}: {what} is not there", hint="create it; or is its file system not mounted yet?")
    check_readable(path, what)


def check_readable(path: Path, what: str) -> None:
    """Raise an error if ``path`` is a directory that this user can't read.

    It is no InvalidArgumentsError: a mount point often can't be read before its file system is mounted.
    """
    if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK):  # noqa: PTH112 - Path's raises PermissionError
        raise CdcpipeError(f"{path}: {what} can't be read by this user", hint=hint_of(PermissionError(errno.EACCES, "")))


def _is_there(path: Path) -> bool:
    """Tell whether ``path`` is there. Raises the error of a disk or a mount that can't tell."""
    try:
        path.lstat()
    except OSError as ex:
        if disk_hint_of(ex) is not None:
            raise
        return False
    return True


def private_opener(path: str, flags: int) -> int:
    """Open a file that only this user may read, as an ``opener``. Follows no symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Give ``path`` to an error of the system that names no file. The system names the file only where it is opened."""
    try:
        yield
    except OSError as ex:
        if ex.filename is None:
            ex.filename = str(path)
        raise


def open_file(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a file, never anything else: to open a named pipe would wait, for ever and deaf to signals. Returns the descriptor.

    Raises DamagedFileError if ``path`` is a directory, a pipe or a device, and OSError.
    """
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except IsADirectoryError as ex:
        raise DamagedFileError(f"{path} is no file", hint=_MOVE_AWAY) from ex
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedFileError(f"{path} is no file", hint=_MOVE_AWAY)
    return fd


_MOVE_AWAY = "cdcpipe has a file of this name: move away what is there"


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a small JSON file, None if there is no file. Raises DamagedFileError if it contains no JSON object."""
    data = read_file(path)
    return None if data is None else parse_json(path, data)


def read_file(path: Path) -> bytes | None:
    """Return the contents of a small file, None if there is no file. Raises DamagedFileError if something else has this name."""
    try:
        fd = open_file(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(fd, "rb") as stream, named(path):
        return stream.read()


def parse_json(path: Path, data: bytes) -> dict[str, Any]:
    """Return the object in the ``data`` of a small JSON file. Raises DamagedFileError if it contains no JSON object."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as ex:
        raise DamagedFileError(f"{path} is damaged: not JSON", hint=RESTORE) from ex
    if not isinstance(value, dict):
        raise DamagedFileError(f"{path} is damaged: not a JSON object", hint=RESTORE)
    return value


def fsync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with named(directory):
            os.fsync(fd)
    finally:
        os.close(fd)


TEMPORARY_PREFIX = ".tmp-"
"""The names of half-written files begin with this. A launcher that starts deletes those that are left."""


def write_json(path: Path, value: dict[str, Any], mode: int = 0o600) -> None:
    """Write a small JSON file atomically. The file and its name are durable when this returns. Its directory must exist.

    The file has the permissions of ``mode`` that the umask leaves: nobody else reads it unless the caller says so.
    """
    with replacing(path, mode) as stream:
        stream.write(json.dumps(value, indent=1).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
    fsync_directory(path.parent)


@contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Write a file that takes the place of ``path`` when the context is left, in one step. An error leaves ``path`` as it is.

    The file is new and has a name that nobody can know before. So two writers do not write into one file, and neither follows a
    symbolic link that another user has put there. Its permissions are those of ``mode`` that the umask leaves.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with named(path), open(fd, "wb") as stream:
            yield stream
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
