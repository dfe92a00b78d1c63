"""Which range of the log a micro-batch is, as Spark notes it in the stream's checkpoint. No Spark.

``offsets/N`` is there before micro-batch N runs, and makes it the same one after a crash: a version, a line of Spark's own, then a
line with the offset of each source, as the source gave it (Structured Streaming Programming Guide, "Recovering from Failures
with Checkpointing"). To ask the stream's rows would be a Spark job for every micro-batch, with Python on both sides.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from spark_sink.files.places import read_lines
from spark_sink.staging.log import Position, StagingError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["OFFSET_FORMAT", "is_noted", "micro_batch", "read_offset"]

OFFSET_FORMAT = 1


def micro_batch(checkpoint: Path, batch_id: int) -> tuple[Position | None, Position]:
    """Return the position after which a micro-batch begins, None for the first one, and the one up to which it goes.

    Raises StagingError for a checkpoint that can't be read.
    """
    start = _end(checkpoint, batch_id - 1) if batch_id else None
    return start, _end(checkpoint, batch_id)


def is_noted(checkpoint: Path, batch_id: int) -> bool:
    """Tell whether Spark has noted that a micro-batch is done, so that it will not ask for it again."""
    commits = checkpoint / "commits"
    # Written under another name and renamed, and after it the file with its checksum.
    being_renamed = [path for dots in (".", "..") for path in commits.glob(f"{dots}{batch_id}.*.tmp*")]
    return (commits / str(batch_id)).exists() and not being_renamed


def _end(checkpoint: Path, batch_id: int) -> Position:
    path = checkpoint / "offsets" / str(batch_id)
    try:
        _version, _own, offset = read_lines(path)
        found = json.loads(offset)
    except (OSError, ValueError) as ex:
        raise StagingError(
            f"the checkpoint's {path} can't be read: {ex}",
            hint=f"delete {checkpoint}: the tables go on from where they are",
        ) from ex
    return read_offset(found)


def read_offset(offset: Any) -> Position:
    """Return the position that an offset of the data source is; StagingError if it is none."""
    found = offset.get("format") if isinstance(offset, dict) else None
    if found != OFFSET_FORMAT:
        msg = f"the checkpoint has an offset of format {found!r}; this program knows {OFFSET_FORMAT}"
        raise StagingError(msg, hint="use the version of cdcpipe that wrote it, or a newer one")
    try:
        return Position.parse(str(offset.get("position")))
    except ValueError as ex:
        msg = f"the checkpoint has a damaged offset: {ex}"
        raise StagingError(msg) from ex
