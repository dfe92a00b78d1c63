"""The account of the slot: the LSN up to which every published change is durable in the staging directory. No pyspark.

    read(staging).of_log(end_lsn)     the account; a slot whose confirmed position is beyond it has lost changes for this log
    record(staging, lsn, end_lsn)     call this before the server may confirm ``lsn``; the log's segments end at ``end_lsn``
    settle(staging, end_lsn)          call this before the log goes on at ``end_lsn``
    cut(staging, lsn)                 call this when the server went back to ``lsn``, before the log goes on

The end of the log moves only with published changes, but the server's WAL also grows with other traffic. When everything published
is sealed, the streamer tells the server's position as an empty record (``--idle-positions``). The launcher records this position
here, and only then lets the streamer confirm it. So the server never gets a confirmation beyond the account. If a slot is
further than that, another program has moved it.

If the segments end before ``end_lsn``, the directory lacks its newest ones: it is a copy that was made while the launcher was
writing, or files were lost. Then the account says nothing of what the log has, and `Account.of_log` returns an empty one. Call
`read` before you look where the log ends, which may grow meanwhile.

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

__all__ = ["Account", "cut", "read", "record", "settle"]

_logger = logging.getLogger(__name__)

_NAME = "known.json"


@dataclass(frozen=True, slots=True)
class Account:
    """What is recorded. All fields are 0 if nothing is."""

    lsn: int = 0
    time: float = 0.0
    """When the server's WAL ended at the LSN or before, in seconds since 1970; 0 if no such time is known.

    It is later if WAL that is not published came faster than the walsender decodes it, and the launcher did not watch the server:
    such a walsender tells its own place as the end of the WAL.
    """
    end_lsn: int = 0
    """The end of the log's segments at that time; 0 if it is not recorded, as by older versions."""

    def of_log(self, end_lsn: int) -> Account:
        """Return what this says of a log that ends at ``end_lsn``: nothing if the log lacks segments that it had at that time."""
        return Account() if self.end_lsn > end_lsn else self


def record(root: Path, lsn: int, end_lsn: int = 0, at: float | None = None) -> bool:
    """Record durably that the log is complete up to ``lsn``. If this returns False, ``lsn`` must not be confirmed.

    ``end_lsn`` is the end of the log's segments; 0 if it is not known now. ``at`` is the account's time; None if it is
    not known: the account keeps the time that it has, which is an earlier one.
    """
    try:
        found = read(root)
        if lsn > found.lsn:
            _write(root, lsn, max(end_lsn, found.end_lsn), found.time if at is None else at)
    except OSError as ex:
        _logger.warning("cannot record the known position of the log in %s: %s", root, ex)
        return False
    return True


def cut(root: Path, lsn: int) -> None:
    """Lower the account to ``lsn``, if it is beyond: what the server wrote after ``lsn`` has not happened. Raises OSError."""
    found = read(root)
    if found.lsn > lsn:
        _write(root, lsn, found.end_lsn, found.time)


def settle(root: Path, end_lsn: int) -> None:
    """Replace an account of a log that had more, before the log goes on at ``end_lsn``. Raises OSError.

    Otherwise it would count again as soon as the log is as long as the other one was, which may have had other changes.
    """
    found = read(root)
    if found.end_lsn > end_lsn:
        _write(root, end_lsn, end_lsn, found.time)


def _write(root: Path, lsn: int, end_lsn: int, at: float) -> None:
    write_json(root / _NAME, {"lsn": format_lsn(lsn), "end": format_lsn(end_lsn), "time": round(at, 3)})


def read(root: Path) -> Account:
    """Return what is recorded. A damaged file counts as lost: there is nothing recorded.

    Raises OSError if the file can't be read now. This is no lost account: it would make the launcher see a gap in the log.
    """
    path = root / _NAME
    try:
        found = read_json(path)
        if found is None:
            return Account()
        at = float(str(found.get("time", path.stat().st_mtime)))  # an older version has written no time
        return Account(_parse(found.get("lsn")), at, _parse(found.get("end", "0/0")))
    except (DamagedFileError, ValueError) as ex:
        _warn(str(ex))
        return Account()


def _parse(text: object) -> int:
    return int(LSN.parse(str(text)))


@cache
def _warn(problem: str) -> None:
    """Log a warning, once in a process: it reads the file many times."""
    _logger.warning("the known position of the log is lost: %s", problem)
