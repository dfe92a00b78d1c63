"""Sets how long the checkpoints of a Delta table name files that are not part of it any more, without Spark.

    keep_names(path, 86_400.0)      # "delta.deletedFileRetentionDuration" = "interval 86400 seconds"

Delta keeps these names (tombstones) for a week unless this property says otherwise, and reads them with each query. A table with a
commit a second has a million of them after a week.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from spark_sink.delta import file_table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["are_names_kept", "keep_names"]

_RETENTION: Final = "delta.deletedFileRetentionDuration"
_OURS: Final = "cdcpipe.deletedFileRetentionDuration"
"""The value that this module has set. If the table has another one, a user has set it."""


def are_names_kept(metadata: Mapping[str, Any], age_s: float) -> bool:
    """Tell whether a table's metadata says so already, or has a value of the user's."""
    return _changed(metadata, age_s) == metadata


def keep_names(path: Path, age_s: float) -> bool:
    """Let the table's checkpoints name files for ``age_s`` after they have left the table. A value of the user's stays.

    Returns whether a commit was made. Raises DeltaError if the table has a feature that this client does not support.
    """
    return file_table.redefine(path, "SET TBLPROPERTIES", lambda log: _changed(log.metadata, age_s))


def _changed(metadata: Mapping[str, Any], age_s: float) -> Mapping[str, Any]:
    properties = metadata.get("configuration", {})
    if properties.get(_RETENTION) != properties.get(_OURS):
        return metadata
    value = f"interval {round(age_s)} seconds"
    return {**metadata, "configuration": {**properties, _RETENTION: value, _OURS: value}}
