"""Directories on a local or mounted file system: the staging log and the checkpoint are such, and most warehouses. No pyspark."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cdcpipe.errors import InvalidArgumentsError

__all__ = ["check_usable", "local_directory"]

# Two letters at least. One slash: a Path keeps no more of them.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


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
