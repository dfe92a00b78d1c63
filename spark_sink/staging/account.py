"""The account of the slot: the LSN up to which every published change is durable in the staging directory. No pyspark.

    read(staging).lsn        the account; a slot whose confirmed position is beyond it has lost changes for this log
    record(staging, lsn)     call this before the server may confirm ``lsn``
    cut(staging, lsn)        call this when the server went back to ``lsn``, before the log goes on

The end of the log moves only with published changes, but the server's WAL also grows with other traffic. When everything published
is sealed, the streamer tells the server's position as an empty record (``--idle-positions``). The launcher records this position
here, and only then lets the streamer confirm it. So the server never gets a confirmation beyond the account. If a slot is
further than that, another program has moved it.

The account is also what ``as-of`` and ``status`` know about a log that is complete beyond its last segment.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from cdcpipe.lsn import LSN, format_lsn
from spark_sink.files.local import DamagedFileError, read_json, write_json

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Account", "cut", "read", "record"]

_logger = logging.getLogger(__name__)

_NAME = "known.json"


@dataclass(frozen=True, slots=True)
class Account:
    """What is recorded: the LSN, and when it was recorded (seconds since 1970). Both are 0 if nothing is recorded."""

    lsn: int = 0
    time: float = 0.0


def record(root: Path, lsn: int) -> bool:
    """Record durably that the log is complete up to ``lsn``. If this returns False, ``lsn`` must not be confirmed."""
    try:
        if lsn > read(root).lsn:
            write_json(root / _NAME, {"lsn": format_lsn(lsn)})
    except OSError as ex:
        _logger.warning("cannot record the known position of the log in %s: %s", root, ex)
        return False
    return True


def cut(root: Path, lsn: int) -> None:
    """Lower the account to ``lsn``, if it is beyond: what the server wrote after ``lsn`` has not happened. Raises OSError."""
    if read(root).lsn > lsn:
        write_json(root / _NAME, {"lsn": format_lsn(lsn)})


def read(root: Path) -> Account:
    """Return what is recorded. A damaged file counts as lost: there is nothing recorded.

    Raises OSError if the file can't be read now. This is no lost account: it would make the launcher see a gap in the log.
    """
    path = root / _NAME
    try:
        found = read_json(path)
        return Account() if found is None else Account(int(LSN.parse(str(found.get("lsn")))), path.stat().st_mtime)
    except (DamagedFileError, ValueError) as ex:
        _warn(str(ex))
        return Account()


@cache
def _warn(problem: str) -> None:
    """Log a warning, once in a process: it reads the file many times."""
    _logger.warning("the known position of the log is lost: %s", problem)
