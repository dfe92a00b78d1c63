"""A Parquet table as a directory of appends, each of which is a directory that is there whole or not at all. No Spark.

    _cdc_batch=EPOCH-START-END/           the changes in (START, END]: the name is the record of how far the table is
    _cdc_batch=EPOCH-LSN-LSN-snapshot/    a snapshot that came to the table later
    _writing/, _gathered/                 files that tasks write, and files that are to be an append

An append is put together under a hidden name, and renamed. It has the files that were named by those who wrote them, and no others:
Spark may run a task twice, and the second attempt may still be writing, next to the first one's file, when the append is made.
"""

from __future__ import annotations

import re
import shutil
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import format_lsn
from spark_sink.files import places as storage
from spark_sink.files.local import fsync_directory

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from spark_sink.staging.log import Position

__all__ = [
    "APPEND_COLUMN",
    "Append",
    "AppendError",
    "add_append",
    "append_name",
    "list_appends",
    "list_before",
    "list_snapshots",
    "make_writing_directory",
    "snapshot_name",
]

APPEND_COLUMN = "_cdc_batch"
"""The column that Spark makes of the names of appends."""
_APPEND_NAME = re.compile(rf"{APPEND_COLUMN}=([0-9]{{6,9}})-([0-9A-F]{{16}})-([0-9A-F]{{16}})", re.ASCII)
_SNAPSHOT_SUFFIX = "-snapshot"
_WRITING, _GATHERED = "_writing", "_gathered"


class AppendError(CdcpipeError):
    """Two appends have the same changes: somebody has renamed or copied one."""


class Append(NamedTuple):
    """An append, or a snapshot."""

    start_lsn: int
    end_lsn: int
    path: Path


def append_name(start: Position, end: Position) -> str:
    """Return the name of an append's directory."""
    return f"{APPEND_COLUMN}={end.epoch:06d}-{start.lsn:016X}-{end.lsn:016X}"


def snapshot_name(position: Position) -> str:
    """Return the name of the directory of a snapshot that came to a table later."""
    return append_name(position, position) + _SNAPSHOT_SUFFIX


def list_appends(path: Path) -> list[Append]:
    """Return a table's appends in order; AppendError where two overlap."""
    if not path.is_dir():
        return []
    found = sorted(
        Append(int(match[2], 16), int(match[3], 16), entry)
        for entry in path.iterdir()
        if (match := _APPEND_NAME.fullmatch(entry.name)) is not None
    )
    for before, append in pairwise(found):
        if append.start_lsn < before.end_lsn:
            raise AppendError(
                f"{append.path} begins before {format_lsn(before.end_lsn)}, where the append before it ends",
                hint="a directory was renamed or copied: restore its name, or move it away",
            )
    return found


def list_snapshots(path: Path) -> list[Path]:
    """Return the directories of snapshots that came to a table later."""
    return sorted(path.glob(f"{APPEND_COLUMN}=*{_SNAPSHOT_SUFFIX}"))


def list_before(path: Path, lsn: int) -> list[Append]:
    """Return the appends and snapshots that end at or before an LSN, in the order of their ends.

    Not the newest append, whatever its end: it says how far the table is.
    """
    newest = [append.path for append in list_appends(path)[-1:]]
    matches = [(_APPEND_NAME.match(entry.name), entry) for entry in path.glob(f"{APPEND_COLUMN}=*") if entry not in newest]
    found = [Append(int(match[2], 16), int(match[3], 16), entry) for match, entry in matches if match is not None]
    return sorted((append for append in found if append.end_lsn <= lsn), key=lambda append: (append.end_lsn, append.path))


def make_writing_directory(path: Path) -> Path:
    """Make an empty directory where tasks write a table's files; what a killed append, or a task run twice, has left there goes."""
    writing = path / _WRITING
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True, exist_ok=True)
    return writing


def add_append(path: Path, name: str, source: Path, files: Iterable[str]) -> None:
    """Make files of a directory, no others that lie there, an append of a table, all at once.

    They stay where they were, too, so that an attempt that is killed here can be made again.
    """
    gathered = path / _GATHERED
    shutil.rmtree(gathered, ignore_errors=True)  # of an attempt that did not come to its end
    gathered.mkdir(parents=True)
    storage.copy_files(source, gathered, files)
    fsync_directory(gathered)
    gathered.rename(path / name)
    fsync_directory(path)
