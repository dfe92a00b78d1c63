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

    Raises OSError, or another error of the store.
    """
    if not places.is_local(directory):
        return _store_ahead_s(directory / f"_cdcpipe_clock-{secrets.token_hex(8)}")
    before = time.time()
    with tempfile.NamedTemporaryFile(dir=directory, prefix=TEMPORARY_PREFIX) as written:
        written.write(b"clock")
        written.flush()
        os.fsync(written.fileno())
        return difference_s(os.fstat(written.fileno()).st_mtime, before, time.time())


def _store_ahead_s(path: Any) -> float:
    before = time.time()
    path.write_bytes(b"")
    after = time.time()
    try:
        return difference_s(path.fs.modified(path.path).timestamp(), before, after)
    finally:
        path.unlink(missing_ok=True)


def difference_s(written_at: float, before: float, after: float) -> float:
    """Return how far a clock is ahead, from the time of a file that was written between two moments of this machine's clock.

    Allows for file systems that store whole seconds.
    """
    return 0.0 if before - 1 <= written_at <= after + 1 else written_at - (before + after) / 2
