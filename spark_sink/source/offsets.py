"""Reads from a stream's checkpoint which range of the log a micro-batch has, and removes what was not finished. No Spark.

Spark writes ``offsets/N`` before micro-batch N runs, so that the micro-batch has the same range after a crash. The file has a
version, a line for Spark itself, then a line with the offset of each source, as the source gave it (Structured Streaming
Programming Guide, "Recovering from Failures with Checkpointing"). Reading the range from the stream's rows instead would cost a
Spark job with Python workers for every micro-batch.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from spark_sink.files.local import NEWER, RESTORE
from spark_sink.files.places import read_lines, remove_tree, sync_directory, sync_file
from spark_sink.staging.log import Position, StagingError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["OFFSET_FORMAT", "is_recorded", "make_durable", "micro_batch", "read_offset", "tidy"]

OFFSET_FORMAT = 1


def micro_batch(checkpoint: Path, batch_id: int) -> tuple[Position | None, Position]:
    """Return the range of a micro-batch: the position after which it begins (None for the first one), and its last position.

    Raises StagingError if the checkpoint can't be read.
    """
    start = _end(checkpoint, batch_id - 1) if batch_id else None
    return start, _end(checkpoint, batch_id)


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
    """Remove what Spark would refuse in a checkpoint.

    - A checkpoint with micro-batches, of which somebody has deleted a part: it has no ``metadata``. All of it is removed. The
      tables know how far they are.
    - The unfinished files of a checkpoint that has no micro-batch yet. A stream that was killed while it began leaves them.

    Spark refuses to begin where one is (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY), although it never reads them: it gives a file
    its name, a number, when the file is complete. Their names begin with a dot. No stream may be running.
    """
    directories = [checkpoint / name for name in ("offsets", "commits")]
    if any(path.name.isdigit() for directory in directories for path in directory.glob("*")):
        if not (checkpoint / "metadata").exists():
            remove_tree(checkpoint)
        return
    for directory in directories:
        for path in directory.glob(".*"):
            path.unlink(missing_ok=True)


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
