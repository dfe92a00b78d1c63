"""What is known of a warehouse's initial snapshot: from ``_cdcpipe/snapshot.json``, and from the copies of the tables. No Spark.

snapshot/initial.py writes the file, and says when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_sink.files.places import read_json
from spark_sink.schema.table import copies_until

if TYPE_CHECKING:
    from pathlib import Path

    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["is_begun", "is_due", "is_new", "is_unfinished", "oldest_copy_lsn", "path_in"]


def path_in(warehouse: Warehouse) -> Path:
    """Return the path of the file."""
    return warehouse.root / "_cdcpipe/snapshot.json"


def is_begun(warehouse: Warehouse) -> bool:
    """Tell whether there was an initial snapshot, even an unfinished one."""
    return read_json(path_in(warehouse)) is not None


def is_unfinished(warehouse: Warehouse) -> bool:
    """Tell whether an initial snapshot was begun and is not complete."""
    found = read_json(path_in(warehouse))
    return found is not None and not found["is_complete"]


def is_due(warehouse: Warehouse, mode: str | None, *, creates_slot: bool) -> bool:
    """Tell whether the next run begins an initial snapshot, or goes on with one. ``mode`` is that of ``run --snapshot``.

    A complete one is not taken again, whatever the mode is. With ``-c`` a new warehouse begins with one, also if the slot exists.
    """
    if mode == "never":
        return False
    found = read_json(path_in(warehouse))
    if found is not None:
        return not found["is_complete"]
    return mode == "initial" or (creates_slot and is_new(warehouse))


def is_new(warehouse: Warehouse) -> bool:
    """Tell whether the tables do not follow the log yet: there are none, or only copies, so that the first copy is unfinished.

    Then the other tables have to be copied, also if the file was lost.
    """
    if not warehouse.exists:
        return True
    return warehouse.source().position is None and oldest_copy_lsn(warehouse) is not None


def oldest_copy_lsn(house: Warehouse) -> int | None:
    """Return the LSN of the newest copy of the table whose newest copy is the oldest; None without copies. Reads all versions."""
    copies = (copies_until(versions) for versions in house.all_versions().values())
    return min((max(each) for each in copies if each), default=None)
