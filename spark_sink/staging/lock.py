"""The staging directory itself: that there is one, on a file system that can hold a log, and who writes to it. No numpy."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from cdcpipe.retry import RetryPolicy
from spark_sink.files.local import TEMPORARY_PREFIX, DamagedFileError, fsync_directory, read_json, write_json
from spark_sink.files.lock import try_lock
from spark_sink.staging.log import StagingError

__all__ = ["lock", "lock_owner", "make_root", "owner_text", "try_file_system"]

_LOCKING = RetryPolicy(attempts=3, first_pause_s=0.03)
"""`status` holds the lock for a moment to see whether anybody else does."""

_POSIX_HINT = (
    "staging has to be on a POSIX file system, which locks, renames and syncs files and directories (a local disk, NFS), and be "
    "writable; a mounted object store is none"
)


def make_root(root: Path) -> None:
    """Make the staging directory unless it is there; refuse somebody else's."""
    try:
        for directory in [*reversed(root.absolute().parents), root]:
            if not directory.exists():
                directory.mkdir(mode=0o700, exist_ok=True)
                fsync_directory(directory.parent)
        owner = root.stat().st_uid
    except OSError as ex:
        msg = f"cannot make the staging directory {root}: {ex.strerror or ex}"
        raise StagingError(msg) from ex
    if owner != os.geteuid():
        msg = f"{root} belongs to user id {owner}, this process runs as {os.geteuid()}"
        raise StagingError(msg, hint="run as its owner, or give another --staging directory")


def lock(root: Path) -> int:
    """Take the directory's lock and note who has it; raise StagingError at once if somebody has."""
    path = root / "lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as ex:
        msg = f"cannot open {path}: {ex.strerror or ex}"
        raise StagingError(msg) from ex
    try:
        _LOCKING.call(lambda: _take(fd), _HeldError)
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(owner).encode(), 0)
    except _HeldError:
        os.close(fd)
        msg = f"another launcher uses {root}: {owner_text(_read_owner(path))}"
        raise StagingError(msg, hint="stop it first, or give this one a slot and a --staging directory of its own") from None
    except OSError as ex:
        os.close(fd)
        msg = f"cannot lock {path}: {ex.strerror or ex}"
        raise StagingError(msg, hint=_POSIX_HINT) from ex
    return fd


class _HeldError(Exception):
    """Another process has the lock."""


def _take(fd: int) -> None:
    if not try_lock(fd):
        raise _HeldError


def try_file_system(root: Path) -> None:
    """Do once what sealing depends on: a file system that can't had better say so now than at the first segment."""
    path = root / f"{TEMPORARY_PREFIX}trial"
    try:
        write_json(path, {})
        path.unlink()
    except OSError as ex:
        msg = f"the file system of {root} can't hold a staging log: {ex.strerror or ex}"
        raise StagingError(msg, hint=_POSIX_HINT) from ex


def _read_owner(path: Path) -> dict[str, Any]:
    """Return what the lock file says of its owner, which may be nothing for the moment in which it is written."""
    try:
        return read_json(path) or {}
    except DamagedFileError:
        return {}


def owner_text(owner: dict[str, Any]) -> str:
    """Say who holds a lock."""
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')} since {owner.get('since', '?')}"


def lock_owner(root: Path | str) -> dict[str, Any] | None:
    """Return who holds the directory's lock (pid, host, since), or None if nobody does."""
    path = Path(root) / "lock"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return None if try_lock(fd, is_shared=True) else _read_owner(path)
    finally:
        os.close(fd)
