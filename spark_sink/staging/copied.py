"""The position of the newest copy of a table (``copied.json``), as the log's launchers know it. No pyspark.

    record(staging, lsn)     call this before a copy with the position ``lsn`` begins
    read(staging)            the newest of these positions; 0 if there is none

A copy may be later than the end of the log, because it does not go through the log. So the log alone does not show that a server
has gone back behind a copy. ``land`` does not know the tables, so the log has this record.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cdcpipe.lsn import LSN, format_lsn
from spark_sink.files.local import DamagedFileError, read_json, write_json
from spark_sink.files.system_hints import hint_of
from spark_sink.staging.log import StagingError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read", "record"]

_logger = logging.getLogger(__name__)

_NAME = "copied.json"


def record(root: Path, lsn: int) -> None:
    """Record durably that tables are copied at ``lsn``. Raises StagingError if the file system refuses it."""
    try:
        if lsn > read(root):
            write_json(root / _NAME, {"lsn": format_lsn(lsn)})
    except OSError as ex:
        msg = f"cannot record the position of the tables' copy in {root}: {ex}"
        raise StagingError(msg, hint=hint_of(ex)) from ex


def read(root: Path) -> int:
    """Return what is recorded. A damaged file counts as lost: there is nothing recorded. Raises OSError."""
    path = root / _NAME
    try:
        found = read_json(path)
        return 0 if found is None else int(LSN.parse(str(found.get("lsn"))))
    except (DamagedFileError, ValueError) as ex:
        _logger.warning("the position of the newest copy is lost: %s", ex)
        return 0
