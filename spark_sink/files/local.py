"""Directories on a local or mounted file system: the staging log and the checkpoint are such, and most warehouses. No pyspark."""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError

__all__ = ["TEMPORARY_PREFIX", "DamagedFileError", "check_usable", "fsync_directory", "local_directory", "read_json", "write_json"]

# Two letters at least. One slash: a Path keeps no more of them.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


class DamagedFileError(CdcpipeError):
    """A file of ours does not hold what it should. Exit code 7, SYSTEM_ERROR."""


def local_directory(path: Path | str, what: str) -> Path:
    """Return the absolute path of ``what``, a directory; raise InvalidArgumentsError if ``path`` is a URL.

    As a path ``s3a://bucket/lake`` would be a directory ``s3a:`` of this machine.
    """
    if _URL.match(str(path)):
        raise InvalidArgumentsError(
            f"{path}: {what} is a directory of a local or mounted file system, not a URL",
            hint="give a path; a warehouse can be in an object store, with all else in a file system",
        )
    return Path(path).absolute()


def check_usable(path: Path, what: str) -> None:
    """Raise InvalidArgumentsError unless ``path`` is a directory that this user may write, or may make."""
    existing = next(each for each in (path, *path.parents) if os.path.lexists(each))
    problem = "no directory" if not existing.is_dir() else None if os.access(existing, os.W_OK | os.X_OK) else "not writable"
    if problem:
        raise InvalidArgumentsError(
            f"{path}: {what} can't be there: {existing} is {problem}", hint="give a directory that this user may write, or may make"
        )


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a small JSON file, None if it is not there; DamagedFileError for one that is no object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as ex:
        msg = f"{path} is damaged: not JSON"
        raise DamagedFileError(msg) from ex
    if not isinstance(value, dict):
        msg = f"{path} is damaged: not a JSON object"
        raise DamagedFileError(msg)
    return value


def fsync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


TEMPORARY_PREFIX = ".tmp-"
"""How the names of half-written files begin; a launcher that starts deletes them."""


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Put a small JSON file in place, whole and durable when this returns. Its directory must exist."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "wb") as stream:
            stream.write(json.dumps(value, indent=1).encode() + b"\n")
            stream.flush()
            os.fsync(fd)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)
