"""The readers of a staging log: registers their positions, and removes the segments that all of them have read. No pyspark."""

from __future__ import annotations

import errno
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spark_sink.files import clock
from spark_sink.files.local import fsync_directory, read_json, write_json
from spark_sink.files.system_hints import hint_of
from spark_sink.staging.log import (
    Position,
    Segment,
    StagingError,
    epoch_directory,
    epoch_segments,
    read_chain,
    read_position,
    removed_position,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Retention", "read_readers", "reader_place", "register_reader", "remove_consumed", "remove_epoch"]


_READER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", re.ASCII)


def _reader_path(root: Path, name: str) -> Path:
    if _READER_NAME.fullmatch(name) is None:
        msg = f"not a reader's name: {name!r}"
        raise StagingError(msg, hint="use at most 100 letters, digits, '_', '-' and '.'")
    return root / "readers" / f"{name}.json"


def register_reader(root: Path | str, name: str, position: Position, place: str | None = None) -> None:
    """Record durably that the reader ``name`` has everything up to ``position`` and does not need it again.

    "Everything" includes what the epochs up to that of ``position`` name: gaps, other system ids, publications that were left out.
    ``place`` says where the reader puts the changes. `reader_place` returns it.
    """
    root = Path(root)
    path = _reader_path(root, name)
    if not path.parent.is_dir():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fsync_directory(root)
    write_json(path, {"position": str(position)} | ({} if place is None else {"place": place}))


def reader_place(root: Path | str, name: str) -> str | None:
    """Return where the reader ``name`` puts the changes; None if that is not recorded."""
    found = (read_json(_reader_path(Path(root), name)) or {}).get("place")
    return None if found is None else str(found)


def read_readers(root: Path | str) -> dict[str, Position]:
    """Return the registered readers and their positions."""
    readers = {}
    for path in sorted((Path(root) / "readers").glob("*.json")):
        if not path.name.startswith("."):
            value = read_json(path)
            if value is not None:
                readers[path.stem] = read_position(path, value)
    return readers


@dataclass(frozen=True, slots=True)
class Retention:
    """Which segments are kept although all readers have read them: those of the last ``seconds``, and the last ``size`` bytes."""

    seconds: float = 0.0
    size: int = 0

    def first_to_keep(self, root: Path, consumed: Sequence[Segment]) -> int:
        """Return the number of the first segment to keep. ``consumed`` is ordered from old to new, in the directory ``root``.

        May write a file there. For this it deletes the indexes of segments that are old by this machine's clock.
        """
        now, size = time.time(), 0
        behind_s: float | None = None
        for number in range(len(consumed) - 1, -1, -1):
            stat = consumed[number].path.stat()
            size += stat.st_size
            if size <= self.size:
                continue
            if self.seconds:
                if now - stat.st_mtime <= self.seconds:
                    continue
                if behind_s is None:  # a file server has its own clock, which is compared only now: that writes a file
                    _remove_indexes(consumed[: number + 1])
                    behind_s = clock.behind_s(root)
                if now - stat.st_mtime <= self.seconds + behind_s:
                    continue
            return number + 1
        return 0


def remove_consumed(root: Path | str, retention: Retention | None = None) -> list[Segment]:
    """Delete the segments that every registered reader has read, and return them. Without readers it deletes nothing.

    It keeps the segments that ``retention`` protects, and the last segment, which marks the end of the log. It keeps a segment
    that a reader has read only in part. An older epoch is deleted with its last segment. An epoch that names a gap, another
    system id or publications that it leaves out stays until every reader has passed into it, and the epochs after it stay with it.
    After a crash, the next call completes the work. Raises StagingError if the file system refuses it.
    """
    try:
        return _remove_consumed(Path(root), retention)
    except OSError as ex:
        msg = f"cannot remove segments that all readers have read: {ex}"
        raise StagingError(msg, hint=hint_of(ex)) from ex


def _remove_consumed(root: Path, retention: Retention | None) -> list[Segment]:
    readers = read_readers(root)
    if not readers:
        return []
    epochs, segments, _ = read_chain(root)
    reached_lsn = min(position.lsn for position in readers.values())
    consumed = [segment for segment in segments[:-1] if segment.end_lsn <= reached_lsn]
    if retention is not None:
        consumed = consumed[: retention.first_to_keep(root, consumed)]
    if consumed:
        _remove_indexes(consumed)
        write_json(root / "removed.json", {"position": str(consumed[-1].end)})
    removed = removed_position(root)
    if removed is None or not epochs:
        return []
    first_kept = segments[len(consumed)].epoch if segments else epochs[-1].number
    # A reader that has not passed into such an epoch may not know yet what it says. The next changes may come in a later one.
    reached_epoch = min(position.epoch for position in readers.values())
    first_kept = min([first_kept, *(epoch.number for epoch in epochs if epoch.is_news and epoch.number > reached_epoch)])
    for epoch in epochs:
        if epoch.number < first_kept:
            remove_epoch(root, epoch.number)
        else:
            for segment in epoch_segments(root, epoch.number):
                if segment.end_lsn <= removed.lsn:
                    segment.index_path.unlink(missing_ok=True)
                    segment.path.unlink(missing_ok=True)
    return consumed


def _remove_indexes(segments: Sequence[Segment]) -> None:
    """Delete the indexes, which anyone may do: on a full disk, this makes the room for the next file."""
    for segment in segments:
        segment.index_path.unlink(missing_ok=True)


def remove_epoch(root: Path, number: int) -> None:
    """Delete an epoch that is not part of the log any more. epoch.json is deleted last, so a crash leaves a readable directory.

    Other processes may make an index there meanwhile, and NFS keeps files that are open. The next launcher deletes what is left.
    """
    directory = epoch_directory(root, number)
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries]
    except FileNotFoundError:
        return
    for name in sorted(names, key=lambda name: name == "epoch.json"):
        (directory / name).unlink(missing_ok=True)
    try:
        directory.rmdir()
    except FileNotFoundError:
        return
    except OSError as ex:
        if ex.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            raise
