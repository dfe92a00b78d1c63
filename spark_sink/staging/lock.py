"""Creates a staging directory, checks its file system, and locks it for one launcher. No numpy."""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.retry import RetryPolicy
from spark_sink.files.local import TEMPORARY_PREFIX, DamagedFileError, fsync_directory, open_file, read_json, write_json
from spark_sink.files.lock import release, try_lock
from spark_sink.files.system_hints import disk_hint_of, hint_of, is_full
from spark_sink.staging.log import StagingError

__all__ = ["StagingLock", "holder", "is_own", "lock_owner", "make_root", "owner_text", "read_owner", "sign", "try_file_system"]

_LOCKING = RetryPolicy(attempts=3, first_pause_s=0.03)
"""The lock is tried again because `status` takes it for a moment, to see whether a launcher holds it."""

_POSIX_HINT = (
    "the staging directory must be writable and on a POSIX file system (a local disk, NFS), which can lock, rename and sync files "
    "and directories; a mounted object store cannot"
)

_TOKEN = secrets.token_hex(8)
"""Of this process, apart from its process id. Containers often have the process id 1, and may have one host name in turn."""


def make_root(root: Path) -> None:
    """Create the staging directory if it does not exist. Raises StagingError if it belongs to another user."""
    try:
        for directory in [*reversed(root.absolute().parents), root]:
            if not directory.exists():
                directory.mkdir(mode=0o700, exist_ok=True)
                fsync_directory(directory.parent)
        owner = root.stat().st_uid
    except OSError as ex:
        msg = f"cannot create the staging directory {root}: {ex.strerror or ex}"
        raise StagingError(
            msg, hint=disk_hint_of(ex) or "give a directory that this user may write to, or may create: --staging"
        ) from ex
    if (root / "_cdcpipe").is_dir():
        raise InvalidArgumentsError(f"{root} is a warehouse, and no place for a log", hint="is --staging the right directory?")
    if owner != os.geteuid():
        msg = f"{root} belongs to user id {owner}, this process runs as {os.geteuid()}"
        raise StagingError(msg, hint="run as its owner, or give another --staging directory")


class StagingLock:
    """Holds the lock of a staging directory until `close`, or until this process ends."""

    def __init__(self, root: Path) -> None:
        """Create the directory if it does not exist, lock and sign it. Raises StagingError if another launcher holds the lock."""
        make_root(root)
        self._since = _now()
        self._fd, self._pid = _lock(root, self._since), os.getpid()

    def sign(self) -> None:
        """Sign the lock again, as one that lands: on a full disk it may still lack its owner."""
        sign(self._fd, since=self._since)

    def end_landing(self) -> None:
        """Tell others that the owner lands nothing any more, and goes on with the tables. In a forked child, this does nothing."""
        if self._pid == os.getpid():
            with suppress(OSError):  # `verify` then waits longer, and what has ended the landing is the error to raise
                sign(self._fd, since=self._since, lands=False)

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._fd >= 0:
            release(self._fd, self._pid)
            os.close(self._fd)
            self._fd = -1


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _lock(root: Path, since: str) -> int:
    """Take the directory's lock, and sign it. Raises StagingError if another launcher holds the lock."""
    path = root / "lock"
    try:
        fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except OSError as ex:
        msg = f"cannot open {path}: {ex.strerror or ex}"
        hint = disk_hint_of(ex) or f"this user must be able to write to {root}, and `lock` there must be a file"
        raise StagingError(msg, hint=hint) from ex
    try:
        _LOCKING.call(lambda: _take(fd), _HeldError)
        sign(fd, since=since)
    except _HeldError:
        os.close(fd)
        who, hint = holder(
            path,
            "wait until that has ended (run --available-now goes on after its stream has ended), or stop it; another pipeline needs"
            " its own slot and --staging directory",
        )
        raise StagingError(f"another run or land uses {root}: {who}", hint=hint) from None
    except OSError as ex:
        os.close(fd)
        msg = f"cannot lock {path}: {ex.strerror or ex}"
        raise StagingError(msg, hint=disk_hint_of(ex) or _POSIX_HINT) from ex
    return fd


def sign(fd: int, **said: object) -> None:
    """Write this process's id into the lock that it holds, and what else is ``said`` of it.

    On a full disk the lock keeps what it has: its holder may make room.
    """
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": _now(), "token": _TOKEN} | said
    text = json.dumps(owner).encode()
    try:
        os.pwrite(fd, text, 0)
        os.ftruncate(fd, len(text))
    except OSError as ex:
        if not is_full(ex):
            raise


class _HeldError(Exception):
    """Another process holds the lock."""


def _take(fd: int) -> None:
    if not try_lock(fd):
        raise _HeldError


def try_file_system(root: Path) -> None:
    """Try the operations that sealing needs, so that an unfit file system is reported at the start, not at the first segment."""
    path = root / f"{TEMPORARY_PREFIX}trial"
    try:
        write_json(path, {})
        path.unlink()
    except OSError as ex:
        msg = f"the file system of {root} can't hold a staging log: {ex.strerror or ex}"
        # A file system that lacks an operation may refuse it with EPERM, too.
        raise StagingError(msg, hint=(None if ex.errno == errno.EPERM else hint_of(ex)) or _POSIX_HINT) from ex


def read_owner(path: Path) -> dict[str, Any]:
    """Return the owner from the lock file; empty while the owner is writing the file."""
    try:
        return read_json(path) or {}
    except DamagedFileError:
        return {}


def owner_text(owner: dict[str, Any]) -> str:
    """Return a text that names the owner of a lock."""
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')} since {owner.get('since', '?')}"


def holder(path: Path, advice: str) -> tuple[str, str]:
    """Return who holds the lock in the file ``path``, and the hint: ``advice``, if it is another process."""
    owner = read_owner(path)
    if is_own(owner):
        return "this process", "call its stop(), or wait() for its end; if you no longer have it, end the process"
    return owner_text(owner), advice


def is_own(owner: dict[str, Any]) -> bool:
    """Tell whether ``owner``, from `lock_owner`, is this process. Another one with its process id and host name is not."""
    return (owner.get("pid"), owner.get("token")) == (os.getpid(), _TOKEN)


def lock_owner(root: Path | str) -> dict[str, Any] | None:
    """Return the process that holds the directory's lock (pid, host, since, token); None if no process holds it.

    ``lands`` is False once the process lands nothing any more; before that, it is not there.
    """
    path = Path(root) / "lock"
    try:
        fd = open_file(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return None if try_lock(fd, is_shared=True) else read_owner(path)
    finally:
        release(fd, os.getpid())
        os.close(fd)
