"""Reads from a stream's checkpoint which range of the log a micro-batch has, and removes what Spark would refuse. No Spark.

Spark writes ``offsets/N`` before micro-batch N runs, so that the micro-batch has the same range after a crash. The file has a
version, a line for Spark itself, then a line with the offset of each source, as the source gave it (Structured Streaming
Programming Guide, "Recovering from Failures with Checkpointing"). Reading the range from the stream's rows instead would cost a
Spark job with Python workers for every micro-batch.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from spark_sink.files.local import NEWER, RESTORE
from spark_sink.files.places import list_names, read_bytes, read_lines, remove_tree, sync_directory, sync_file
from spark_sink.staging.log import Position, StagingError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "OFFSET_FORMAT",
    "discard",
    "is_recorded",
    "make_durable",
    "micro_batch",
    "next_range",
    "next_start",
    "read_offset",
    "tidy",
]

OFFSET_FORMAT = 1

_DIRECTORIES: Final = ("offsets", "commits")
"""Where a checkpoint has a file for each micro-batch."""


def micro_batch(checkpoint: Path, batch_id: int) -> tuple[Position | None, Position]:
    """Return the range of a micro-batch: the position after which it begins (None for the first one), and its last position.

    Raises StagingError if the checkpoint can't be read.
    """
    start = _end(checkpoint, batch_id - 1) if batch_id else None
    return start, _end(checkpoint, batch_id)


def next_range(checkpoint: Path) -> list[Position]:
    """Return the positions from which Spark goes on: the last end, after the start if the last micro-batch will run again.

    Raises StagingError if the checkpoint can't be read.
    """
    offsets, commits = (_micro_batches(checkpoint / name) for name in _DIRECTORIES)
    numbers = offsets[-1:] if offsets[-1:] == commits[-1:] else offsets[-2:]
    return [_end(checkpoint, number) for number in numbers]


def next_start(checkpoint: Path) -> Position | None:
    """Return the position after which the next micro-batch begins; None if that is the first one.

    Raises StagingError if the checkpoint can't be read.
    """
    offsets, commits = (_micro_batches(checkpoint / name) for name in _DIRECTORIES)
    ended = offsets if offsets[-1:] == commits[-1:] else offsets[:-1]
    return _end(checkpoint, ended[-1]) if ended else None


def is_recorded(checkpoint: Path, batch_id: int) -> bool:
    """Tell whether Spark has recorded the end of a micro-batch, and so will not run it again."""
    commits = checkpoint / "commits"
    # Spark writes the file under another name and renames it, then does the same with a file for its checksum.
    being_renamed = [path for dots in (".", "..") for path in commits.glob(f"{dots}{batch_id}.*.tmp*")]
    return (commits / str(batch_id)).exists() and not being_renamed


def make_durable(checkpoint: Path, batch_id: int) -> None:
    """Make Spark's records of a micro-batch that has ended durable. Spark does not.

    After a power cut without them, Spark would run the micro-batch again, and would need its segments.
    """
    for name in ("offsets", "commits"):
        sync_file(checkpoint / name / str(batch_id))
        sync_directory(checkpoint / name)


def tidy(checkpoint: Path) -> None:
    """Remove what Spark would refuse in a checkpoint. No stream may be running.

    - A checkpoint with micro-batches, if Spark could not go on with it: all of it is removed. The tables know how far they are.
    - The unfinished files of a checkpoint that has no micro-batch yet. A stream that was killed while it began leaves them. Spark
      refuses to begin where one is (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY), although it never reads them: it gives a file its
      name, a number, when the file is complete. Their names begin with a dot.
    """
    offsets, commits = (_micro_batches(checkpoint / name) for name in _DIRECTORIES)
    if offsets or commits:
        if not _is_whole(checkpoint, offsets, commits):
            discard(checkpoint)
        return
    for name in _DIRECTORIES:
        for path in (checkpoint / name).glob(".*"):
            path.unlink(missing_ok=True)
    metadata = checkpoint / "metadata"
    if metadata.is_file() and not read_bytes(metadata).strip(b"\0"):
        metadata.unlink()


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint that has micro-batches. Other files in its directory stay: a user may have named the directory.

    Raises StagingError if the checkpoint is that of another program.
    """
    if not any(_micro_batches(checkpoint / name) for name in _DIRECTORIES):
        return
    _check_own(checkpoint)
    # Without it the rest is no checkpoint: if this is interrupted, `tidy` removes the rest.
    (checkpoint / "metadata").unlink(missing_ok=True)
    (checkpoint / ".metadata.crc").unlink(missing_ok=True)
    for name in _DIRECTORIES:
        remove_tree(checkpoint / name)
    with suppress(OSError):  # it has other files, or was not there
        checkpoint.rmdir()


def _check_own(checkpoint: Path) -> None:
    """Raise StagingError if the newest micro-batch whose offsets can be read is another program's."""
    for number in reversed(_micro_batches(checkpoint / "offsets")):
        try:
            _version, _own, *offsets = read_lines(checkpoint / "offsets" / str(number))
            found = [json.loads(offset) for offset in offsets]
        except (OSError, ValueError):  # a power cut has damaged it: an earlier one may tell
            continue
        if not all(isinstance(offset, dict) and "format" in offset for offset in found):
            raise StagingError(
                f"{checkpoint} is the checkpoint of another program", hint="name another directory with --checkpoint"
            )
        if found:
            return


def _micro_batches(directory: Path) -> list[int]:
    """Return the numbers of the micro-batches that Spark has recorded in a directory of a checkpoint, in order."""
    return sorted(int(name) for name in list_names(directory) if name.isdecimal())


def _is_whole(checkpoint: Path, offsets: list[int], commits: list[int]) -> bool:
    """Tell whether a checkpoint has what Spark reads when it goes on: the records of the last two micro-batches.

    Somebody may have deleted a part of it. Spark syncs no file, so a power cut may leave files without contents, or with zeros.
    """
    if not offsets or (commits and commits[-1] > offsets[-1]):
        return False
    needed = [checkpoint / "metadata", checkpoint / "offsets" / str(offsets[-1])]
    if offsets[-1] > 0:
        needed.append(checkpoint / "offsets" / str(offsets[-1] - 1))
    if commits:
        needed.append(checkpoint / "commits" / str(commits[-1]))
    return all(_is_readable(path) for path in needed)


def _is_readable(path: Path) -> bool:
    """Tell whether the last line of a file is a JSON object."""
    try:
        return isinstance(json.loads(read_lines(path)[-1]), dict)
    except (FileNotFoundError, LookupError, ValueError):
        return False


def _end(checkpoint: Path, batch_id: int) -> Position:
    path = checkpoint / "offsets" / str(batch_id)
    try:
        _version, _own, offset = read_lines(path)
        found = json.loads(offset)
    except (OSError, ValueError) as ex:
        raise StagingError(
            f"the checkpoint's {path} can't be read: {ex}",
            hint=f"delete {checkpoint}: each table continues from its own position",
        ) from ex
    return read_offset(found)


def read_offset(offset: Any) -> Position:
    """Return the position in an offset of the data source. Raises StagingError if it has none."""
    found = offset.get("format") if isinstance(offset, dict) else None
    if found != OFFSET_FORMAT:
        msg = f"the checkpoint has an offset of format {found!r}; this program knows {OFFSET_FORMAT}"
        raise StagingError(msg, hint=NEWER)
    try:
        return Position.parse(str(offset.get("position")))
    except ValueError as ex:
        msg = f"the checkpoint has a damaged offset: {ex}"
        raise StagingError(msg, hint=RESTORE) from ex
