"""Finds the files in a Delta table's directory that are not part of the table, without Spark.

    unused_files(log, time.time() - 86_400.0)      # [Listed("part-….parquet", 4711, 1792000000.0)]

A file is not part of the table if a commit has removed it, or if the commit that was to add it was never made.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from spark_sink.delta import deletion_vector
from spark_sink.files.places import list_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from spark_sink.delta.log import TableLog
    from spark_sink.files.places import Listed

__all__ = ["is_unfinished", "unused_files"]

_MOST_FILES: Final = 200_000
"""The most files that are returned. A table that nobody has vacuumed for a year may have millions."""


def unused_files(log: TableLog, before_s: float) -> list[Listed]:
    """Return files that the commits of ``log`` do not have, and that were written before a time, in seconds since 1970.

    Returns at most 200,000 of them; `is_unfinished` tells whether there may be more. Read the log and call this while nobody else
    may write to the table. Otherwise a file that a later commit adds looks unused.
    """
    used = set(_used(log))
    return list(islice((file for file in list_files(log.path, used) if file.written_s < before_s), _MOST_FILES))


def is_unfinished(path: Path, listed: Sequence[Listed]) -> bool:
    """Tell, after VACUUM was given a list, whether it is worth giving it another one soon.

    This is so if the list was full, and VACUUM has deleted some of its files. VACUUM keeps files that readers of older versions
    need. If it has kept all, the next list would be the same.
    """
    if len(listed) < _MOST_FILES:
        return False
    names = {file.name for file in listed}
    return sum(file.name in names for file in list_files(path)) < len(names)


def _used(log: TableLog) -> Iterator[str]:
    for file in log.files:
        yield unquote(file["path"])
        if (vector := file.get("deletionVector")) is not None and (name := deletion_vector.file_name(vector)) is not None:
            yield name
