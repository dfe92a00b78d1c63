"""Keeps a gap that a later launcher could not see any more, until an epoch of the log names it. No pyspark.

A server that was restored from an older copy of its disk keeps its system identifier and timeline, and uses positions of the log
again for other changes. This shows only until its WAL has passed the end of the log. So the launcher that sees it records the gap,
and no launcher goes on before the gap is a part of the log.

A slot on another server, as after pg_upgrade, does not show whether pg_upgrade took it along. So a launcher that has to create it
records the gap first. It may be killed before the log has an epoch with this gap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_sink.files.local import fsync_directory, read_json, write_json
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import StagingError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["NAME", "read", "record", "remove"]

NAME = "diverged.json"


def record(root: Path, gap: Gap) -> None:
    """Record the gap durably. Raises OSError."""
    write_json(root / NAME, gap.to_json())


def read(root: Path) -> Gap | None:
    """Return the gap that is recorded, or None."""
    path = root / NAME
    found = read_json(path)
    try:
        return None if found is None else Gap.from_json(found)
    except (KeyError, TypeError, ValueError) as ex:
        raise StagingError(f"{path} is damaged: {ex!r}", hint="restore it from a copy of the staging directory") from ex


def remove(root: Path) -> None:
    """Remove the record durably, once an epoch has the gap. Raises OSError."""
    (root / NAME).unlink(missing_ok=True)
    fsync_directory(root)
