"""What a Delta table's files tell of the least values of a column: their statistics in the log, or else their footers. No Spark."""

from __future__ import annotations

import json
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from spark_sink.delta.rows import UnsupportedError, opened_file
from spark_sink.delta.schema import columns, physical_columns
from spark_sink.files import places

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from spark_sink.delta.log import TableLog

__all__ = ["has_none_before"]

_MOST_FOOTERS: Final = 32
"""The most footers to read. A table with more files has new changes all the time, and likely old ones, too."""


def has_none_before(log: TableLog, column: str, before: int | datetime) -> bool:
    """Tell whether no row of the table has a number or time less than ``before`` in a column, as far as its files tell.

    False means that there may be one. Rows in deletion vectors count, because they are still in the files.
    """
    name = dict(zip(columns(log.metadata).names, physical_columns(log.metadata).names, strict=True))[column]
    files = list(log.files)
    told = [_may_log_have(file, name, before) for file in files]
    if any(told):
        return False
    others = [file for file, each in zip(files, told, strict=True) if each is None]
    if len(others) > _MOST_FOOTERS:
        return False
    return not any(places.map_reads(partial(_may_file_have, log.path, name, before), others, log.path))


def _may_log_have(file: Mapping[str, Any], name: str, before: int | datetime) -> bool | None:
    """Tell from a file's statistics in the log whether it may have such a row; None if they do not tell."""
    try:
        stats = json.loads(file.get("stats") or "{}")
        least = stats.get("minValues", {}).get(name)
        if least is None:
            is_all_null = "numRecords" in stats and stats.get("nullCount", {}).get(name) == stats["numRecords"]
            return False if is_all_null else None
        known: Any = datetime.fromisoformat(least) if isinstance(before, datetime) else least
        return bool(known < before)
    except (AttributeError, TypeError, ValueError):  # other programs may write anything
        return None


def _may_file_have(directory: Path, name: str, before: int | datetime, file: Mapping[str, Any]) -> bool:
    """Tell from the footer of a file whether it may have such a row."""
    try:
        with opened_file(directory, file) as opened:
            groups = [opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups)]
        return any(_may_group_have(group, name, before) for group in groups)
    except (UnsupportedError, OSError, OverflowError, TypeError, ValueError):  # a file of another program: Spark may know more
        return True


def _may_group_have(group: Any, name: str, before: int | datetime) -> bool:
    """Do the same for a row group of a Parquet file."""
    for column in (group.column(number) for number in range(group.num_columns)):
        found = column.statistics
        if column.path_in_schema != name or (found is not None and found.null_count == group.num_rows):
            continue
        if found is None or not found.has_min_max or found.min < before:
            return True
    return False
