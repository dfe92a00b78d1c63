"""A Parquet table as a directory of appends. Each append is a directory, which appears by one rename. No Spark.

    cdc_append=EPOCH-START-END/           the changes in (START, END]; the newest name records the position of the table
    cdc_append=EPOCH-LSN-LSN-snapshot/    a snapshot that was added to the table later
    _writing/                             files that tasks are writing
    _gathered/                            the files of the next append

Programs that read the whole directory, such as Spark and pandas, take ``cdc_append`` for a partition column. They skip names that
begin with ``_``. Earlier versions of cdcpipe named appends ``_cdc_batch=EPOCH-START-END``, which only Spark finds. A table that has
such appends goes on with this name, because other programs must see all of its appends or none.

An append is assembled in a hidden directory, which is then renamed. It contains only the files that the successful tasks have
named. Spark may run a task twice, and the second attempt may still be writing a file beside the first one's when the append is
made.
"""

from __future__ import annotations

import functools
import re
import shutil
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import format_lsn
from spark_sink.files import places
from spark_sink.files.local import fsync_directory

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from spark_sink.staging.log import Position

__all__ = [
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

_PREFIX, _OLD_PREFIX = "cdc_append=", "_cdc_batch="
_APPEND_NAME = re.compile(rf"(?:{_PREFIX}|{_OLD_PREFIX})[0-9]{{6,9}}-([0-9A-F]{{16}})-([0-9A-F]{{16}})", re.ASCII)
_SNAPSHOT_SUFFIX = "-snapshot"
_WRITING, _GATHERED = "_writing", "_gathered"


class AppendError(CdcpipeError):
    """Two appends have the same changes: a directory was renamed or copied."""


class Append(NamedTuple):
    """The directory of an append or of a snapshot, with its range."""

    start_lsn: int
    end_lsn: int
    path: Path


def append_name(start: Position, end: Position) -> str:
    """Return the name of an append's directory."""
    return f"{_PREFIX}{end.epoch:06d}-{start.lsn:016X}-{end.lsn:016X}"


def snapshot_name(position: Position) -> str:
    """Return the name of the directory of a snapshot that is added to an existing table."""
    return append_name(position, position) + _SNAPSHOT_SUFFIX


def list_appends(path: Path) -> list[Append]:
    """Return a table's appends in order. Raises AppendError if two overlap."""
    if not path.is_dir():
        return []
    found = sorted(
        Append(int(match[1], 16), int(match[2], 16), entry)
        for entry in path.iterdir()
        if (match := _APPEND_NAME.fullmatch(entry.name)) is not None
    )
    for before, append in pairwise(found):
        if append.start_lsn < before.end_lsn:
            raise AppendError(
                f"{append.path} begins before {format_lsn(before.end_lsn)}, the end of the previous append",
                hint="a directory was renamed or copied: restore its name, or move it away",
            )
    return found


def list_snapshots(path: Path) -> list[Path]:
    """Return the directories of snapshots that were added to a table later."""
    return sorted(entry for entry in _entries(path) if entry.name.endswith(_SNAPSHOT_SUFFIX))


def list_before(path: Path, lsn: int) -> list[Append]:
    """Return the appends and snapshots that end at or before an LSN, ordered by their ends.

    Leaves out the newest append in any case, because its name records the position of the table.
    """
    newest = [append.path for append in list_appends(path)[-1:]]
    matches = [(_APPEND_NAME.match(entry.name), entry) for entry in _entries(path) if entry not in newest]
    found = [Append(int(match[1], 16), int(match[2], 16), entry) for match, entry in matches if match is not None]
    return sorted((append for append in found if append.end_lsn <= lsn), key=lambda append: (append.end_lsn, append.path))


def _entries(path: Path) -> list[Path]:
    """Return the directories of a table's appends and snapshots."""
    return [entry for prefix in (_PREFIX, _OLD_PREFIX) for entry in path.glob(f"{prefix}*")]


def make_writing_directory(path: Path) -> Path:
    """Create an empty directory for the files that tasks write. Removes files of a killed append, or of a task that ran twice."""
    writing = path / _WRITING
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True, exist_ok=True)
    return writing


def add_append(path: Path, name: str, source: Path, files: Iterable[str]) -> None:
    """Add the named files of a directory to a table as one append, in one step. ``name`` is of `append_name` or `snapshot_name`.

    The files also stay in the directory, so that the step can be repeated after a kill.
    """
    gathered = path / _GATHERED
    shutil.rmtree(gathered, ignore_errors=True)  # left by an attempt that did not finish
    gathered.mkdir(parents=True)
    places.copy_files(source, gathered, files)
    fsync_directory(gathered)
    gathered.rename(path / (name.replace(_PREFIX, _OLD_PREFIX, 1) if _has_old_names(path) else name))
    fsync_directory(path)
    fsync_directory(path.parent)  # the table may be new


@functools.cache
def _has_old_names(path: Path) -> bool:
    """Tell whether a table's appends have the name that earlier versions gave them. This never changes.

    It is asked once: to list the directory takes longer with each append.
    """
    return any(path.glob(f"{_OLD_PREFIX}*"))
