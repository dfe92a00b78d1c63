"""Where a warehouse's files are, and what is done there in the file system's own way. No pyspark.

A commit is a file that is there whole or not at all, and never in the place of another one; a file is durable before anything
says that it is there.
"""

from __future__ import annotations

import os
import secrets
import shutil
from typing import TYPE_CHECKING, Any

from spark_sink.staging import fsync_directory

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pyarrow.parquet as pq

__all__ = [
    "copy_files",
    "make_directory",
    "move_files",
    "parquet_reader",
    "parquet_writer",
    "put_if_absent",
    "remove_tree",
    "sync_directory",
    "sync_file",
    "write_file",
]


def make_directory(path: Path) -> None:
    """Make a directory, and those above it, where they are not there."""
    path.mkdir(parents=True, exist_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a directory with all that is in it, if it is there; what can't be removed stays."""
    shutil.rmtree(path, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fsync_directory(path)


def sync_file(path: Path) -> None:
    """Make what was written to a file durable."""
    with path.open("rb") as written:
        os.fsync(written.fileno())


def write_file(path: Path, data: bytes) -> None:
    """Write a new file, which is durable then; its name is once its directory is (`sync_directory`)."""
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def put_if_absent(path: Path, data: bytes) -> None:
    """Put a file in its place, whole and durable; FileExistsError if there is one."""
    temporary = path.with_name(f".cdcpipe-{secrets.token_hex(8)}.tmp")
    try:
        write_file(temporary, data)
        # Unlike a rename a link fails where something is.
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Give files of one directory to another one, too. Nobody writes to them after that."""
    for name in names:
        os.link(source / name, target / name)


def move_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Take files of one directory to another one, where they are new: for VACUUM, which knows nothing of locks."""
    for name in names:
        (source / name).touch()
        (source / name).rename(target / name)


def parquet_reader(path: Path, **options: Any) -> pq.ParquetFile:
    """Open a Parquet file."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, **options)


def parquet_writer(path: Path, schema: Any, **options: Any) -> pq.ParquetWriter:
    """Begin a Parquet file."""
    import pyarrow.parquet as pq

    return pq.ParquetWriter(path, schema, **options)
