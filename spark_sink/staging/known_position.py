"""Records the LSN up to which the staging log is complete, when this is beyond its last segment. No pyspark.

The end of the log moves only with published changes, but the server's WAL also grows with other traffic. When everything published
is sealed, the streamer confirms the server's position, and the slot's ``confirmed_flush_lsn`` moves. The process that streams from
the slot records this LSN here; after ``--available-now`` it records the LSN up to which it has streamed.

    note(staging, lsn)    the log has every published transaction that ends at ``lsn`` or before
    read(staging)         the last recorded LSN, 0 for none; call this before you look for the end of the log

A lost record does no harm: the next one replaces it.
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
    """Record an LSN, unless the recorded one is as high."""
    if lsn <= read(root):
        return
    try:
        write_json(root / _NAME, {"lsn": format_lsn(lsn)})
    except OSError as ex:  # a full disk: nothing depends on the record
        _logger.warning("cannot record the known position of the log in %s: %s", root, ex)


def noted_at(root: Path) -> float | None:
    """Return the time of the last record, in seconds since 1970; None if there is none."""
    try:
        return (root / _NAME).stat().st_mtime
    except OSError:
        return None


def read(root: Path) -> int:
    """Return the last recorded LSN; 0 if there is none."""
    try:
        found = read_json(root / _NAME)
        return 0 if found is None else int(LSN.parse(str(found.get("lsn"))))
    except (DamagedFileError, ValueError) as ex:
        _logger.warning("the known position of the log is lost: %s", ex)
        return 0
