"""Up to which LSN a staging log is known to have everything, beyond its last segment. Kept in the staging directory. No pyspark.

A log's end moves with its changes only, and the server's WAL goes on with other traffic. The slot's ``confirmed_flush_lsn`` follows
it: when all that is published has been sealed, the streamer confirms the server's position. So whoever streams from the slot
may note that LSN here, and after ``--available-now`` the one up to which it has streamed.

    note(staging, lsn)    the log has everything that is published and ends at the LSN or before it
    read(staging)         the last LSN that was noted, 0 for none; look for the log's end after this, not before

A note that is lost does no harm: what it said is unknown until the next one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cdcpipe.lsn import LSN, format_lsn
from spark_sink.files.local import DamagedFileError, read_json, write_json

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["note", "noted_at", "read"]

_logger = logging.getLogger(__name__)

_NAME = "known.json"


def note(root: Path, lsn: int) -> None:
    """Write an LSN down, unless one as high is noted."""
    if lsn <= read(root):
        return
    try:
        write_json(root / _NAME, {"lsn": format_lsn(lsn)})
    except OSError as ex:  # a full disk: nothing depends on the note
        _logger.warning("what is known of the log could not be noted in %s: %s", root, ex)


def noted_at(root: Path) -> float | None:
    """Return when the LSN was noted that was noted last, in seconds since 1970; None if there is none."""
    try:
        return (root / _NAME).stat().st_mtime
    except OSError:
        return None


def read(root: Path) -> int:
    """Return the LSN that was noted last, 0 if there is none."""
    try:
        found = read_json(root / _NAME)
        return 0 if found is None else int(LSN.parse(str(found.get("lsn"))))
    except (DamagedFileError, ValueError) as ex:
        _logger.warning("what was noted of the log is not known any more: %s", ex)
        return 0
