"""Compares the clock of a file system or an object store with this machine's. No pyspark.

A file server and a store have clocks of their own, and give files their times. If such a clock is behind, a file written now looks
old already. A program that deletes old files has to keep files for longer by `behind_s`.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from typing import TYPE_CHECKING, Any

from spark_sink.files import places
from spark_sink.files.local import TEMPORARY_PREFIX
from spark_sink.files.stores import StorageError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ahead_s", "behind_s", "difference_s"]


def behind_s(directory: Path) -> float:
    """Return how old a file looks that is written in ``directory`` now; 0 if the clock of this place is not behind.

    Raises the errors of `ahead_s`.
    """
    return max(0.0, -ahead_s(directory))


def ahead_s(directory: Path) -> float:
    """Write a file in ``directory``, and remove it. Returns how far the clock of this place is ahead of this machine's.

    Raises OSError, or another error of the store. Raises StorageError if the store keeps the file: whoever asks for its clock
    is about to delete old files.
    """
    if not places.is_local(directory):
        return _store_ahead_s(directory, f"_cdcpipe_clock-{secrets.token_hex(8)}")
    before = time.time()
    with tempfile.NamedTemporaryFile(dir=directory, prefix=TEMPORARY_PREFIX) as written:
        written.write(b"clock")
        written.flush()
        os.fsync(written.fileno())
        return difference_s(os.fstat(written.fileno()).st_mtime, before, time.time())


def _store_ahead_s(directory: Path, name: str) -> float:
    path: Any = directory / name
    before = time.time()
    path.write_bytes(b"")
    after = time.time()
    try:
        ahead_s = difference_s(path.fs.modified(path.path).timestamp(), before, after)
    finally:
        places.remove_files(directory, [name])
    if path.exists():  # s3fs does not tell that S3 has refused to delete an object
        raise StorageError(
            f"the store of {places.name(directory)} does not delete objects: {name} is still there",
            hint="let the role of these credentials delete objects (at Amazon: s3:DeleteObject)",
        )
    return ahead_s


def difference_s(written_at: float, before: float, after: float) -> float:
    """Return how far a clock is ahead, from the time of a file that was written between two moments of this machine's clock.

    Allows for file systems that store whole seconds.
    """
    return 0.0 if before - 1 <= written_at <= after + 1 else written_at - (before + after) / 2
