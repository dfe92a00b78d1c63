"""Small tables, which Spark reads by the names of their files (`plain_files`), because Delta plans a query with jobs of its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from spark_sink.files import places

if TYPE_CHECKING:
    from pathlib import Path

    from spark_sink.delta.log import TableLog

__all__ = ["plain_files"]

_MOST_FILES: Final = 32
"""Spark lists up to this many paths without a job (spark.sql.sources.parallelPartitionDiscovery.threshold)."""
_KNOWN_FEATURES: Final = {"deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}


def plain_files(log: TableLog) -> list[Path]:
    """Return the files of a table that has few, if they have exactly its rows, under its columns' names. Otherwise nothing.

    A file may lack a column that the table got later: Spark reads NULL then, as Delta does.
    """
    is_few = places.is_local(log.path) and len(log.files) <= _MOST_FILES
    if not is_few or log.obstacle("readerFeatures", _KNOWN_FEATURES):
        return []
    found = []
    for file in log.files:
        name = unquote(file["path"])
        # Another directory is that of a shallow clone's source. Spark would leave out hidden files.
        if file.get("deletionVector") or not re.match(r"[^_./:][^/:]*$", name):
            return []
        found.append(log.path / name)
    return found
