"""Tables that need a new copy of their rows, because the stream cannot tell what the rows are. No pyspark.

    want_copy(house, table, since_lsn, "it was renamed from public.old")     # called by micro-batch, merge and catalog look
    waiting(house)                                                      # the tables that wait, and why

    _cdcpipe/copies/NAME.json       the reasons for which a table needs a copy, and how often a copy has failed

A reason has a position. Any complete snapshot of the table from this position or later settles it. So a reason that was noted
before a kill is never lost, and a settled reason never comes back. `run` copies the tables (snapshot/healer.py). The pipeline,
``cdcpipe-spark snapshot`` and ``purge`` write these files, each under the lock ``_cdcpipe/copies.lock``. Every process may read
them.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from cdcpipe.lsn import LSN, format_lsn
from spark_sink.files.lock import open_alone, wait_for_lock
from spark_sink.schema.table import Table
from spark_sink.warehouse import landed_snapshots
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.gaps import Copies, is_copied_since
from spark_sink.warehouse.table_files import TableFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from spark_sink.staging.log import Position
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = [
    "MASKS_CHANGED",
    "SET_BACK",
    "Failures",
    "Reason",
    "WantedCopy",
    "count_writes",
    "give_up",
    "record_failure",
    "settle",
    "take_back_first",
    "waiting",
    "waits_for",
    "want_copy",
]

_logger = logging.getLogger(__name__)

MASKS_CHANGED: Final = "the masks of its columns have changed"
"""The reason for a copy of a table whose replica has rows from before a mask."""

SET_BACK: Final = "RESTORE has set its {} back to an earlier version"
"""The reason for a copy of a table whose "changelog" or "replica" another program has set back."""

_MOST_REASONS: Final = 8
"""More reasons of one table are left out, the oldest first: a copy settles them all."""

_writing = threading.Lock()
_writes = 0


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a table needs a copy, and since which LSN. A copy from this LSN or later is right."""

    text: str
    since_lsn: int
    found_at: float
    """When it was found out, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Failures:
    """How often the copy has failed in a row, when it did last (in seconds since 1970), and with which message."""

    count: int
    at: float
    message: str


@dataclass(frozen=True, slots=True)
class WantedCopy:
    """A table that waits for a copy."""

    table: Table
    reasons: tuple[Reason, ...]
    failures: Failures | None = None

    @property
    def why(self) -> str:
        """All reasons, in one line."""
        return "; ".join(reason.text for reason in self.reasons)

    def to_json(self) -> dict[str, Any]:
        """Return the object that the file has."""
        failures = self.failures
        return {
            **self.table.to_json(),
            "reasons": [
                {"reason": each.text, "since": format_lsn(each.since_lsn), "found_at": each.found_at} for each in self.reasons
            ],
            "failures": None if failures is None else {"count": failures.count, "at": failures.at, "message": failures.message},
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> WantedCopy:
        """Read the object of `to_json`; raise ValueError, KeyError or TypeError for anything else."""
        failures = value["failures"]
        return cls(
            Table.from_json(value),
            tuple(Reason(str(each["reason"]), int(LSN.parse(each["since"])), float(each["found_at"])) for each in value["reasons"]),
            None if failures is None else Failures(int(failures["count"]), float(failures["at"]), str(failures["message"])),
        )


_FILES: Final = TableFiles("copies", WantedCopy.from_json, hint="delete it, and copy the table anew")


def want_copy(house: Warehouse, table: Table, since_lsn: int, reason: str, now: Callable[[], float] = time.time) -> None:
    """Record that the table needs a copy from ``since_lsn`` or later. The reason has no values of rows. Durable at return.

    It does nothing if the table has such a copy, or if the same is recorded already. Any thread of any process may call it.
    """
    with _alone(house):
        if is_copied_since(house, table, since_lsn):
            return
        found = _FILES.read(house, table) or WantedCopy(table, ())
        same = next((each for each in found.reasons if each.text == reason), None)
        if same is not None and same.since_lsn >= since_lsn:
            return
        kept = [each for each in found.reasons if each.text != reason]
        new = Reason(reason, since_lsn, now() if same is None else same.found_at)
        _write(house, replace(found, reasons=tuple(_newest([*kept, new]))))


def take_back_first(house: Warehouse, table: Table, position: Position) -> None:
    """Take back an unfinished first copy (`landed_snapshots.take_back`), and record that the table needs another one.

    The copy may have been in the place of a changelog that had gone. Without a record nothing would tell that there ever was one.
    """
    _logger.warning("a copy of %s ended before its rows were in the changelog: the table waits for another copy", table)
    want_copy(house, table, position.lsn, landed_snapshots.KILLED)
    landed_snapshots.take_back(house, table)


def _newest(reasons: list[Reason]) -> Iterable[Reason]:
    """Return the last reasons. The greatest position is kept: only a copy from there settles all."""
    kept = reasons[-_MOST_REASONS:]
    return [*kept[:-1], replace(kept[-1], since_lsn=max(each.since_lsn for each in reasons))] if reasons[:-_MOST_REASONS] else kept


def waiting(house: Warehouse, tables: Sequence[Table] | None = None) -> list[WantedCopy]:
    """Return the tables that wait for a copy, in order, each with the reasons that no copy has settled yet.

    With ``tables``, only those of these tables: then the files of others are not read.
    """
    return [left for _, left in _unsettled(house, tables) if left.reasons]


def waits_for(house: Warehouse, table: Table, reason: str) -> bool:
    """Tell whether a table waits for a copy for this reason."""
    return any(each.text == reason for wanted in waiting(house, [table]) for each in wanted.reasons)


def settle(house: Warehouse, tables: Sequence[Table] | None = None) -> None:
    """Remove the reasons that a copy has settled, of all tables or of these."""
    with _alone(house):
        for found, left in _unsettled(house, tables):
            if left != found or not left.reasons:
                _write(house, left)


def count_writes() -> int:
    """Return how often this process has written a record. If the number stays the same, nothing new waits."""
    return _writes


def give_up(house: Warehouse, table: Table) -> None:
    """Remove all reasons of a table, which is not published any more."""
    with _alone(house):
        _write(house, WantedCopy(table, ()))


def record_failure(house: Warehouse, table: Table, message: str, now: float) -> None:
    """Record that a copy of the table has failed. The message has no values of rows."""
    with _alone(house):
        found = _FILES.read(house, table)
        if found is not None:
            count = 1 if found.failures is None else found.failures.count + 1
            _write(house, replace(found, failures=Failures(count, now, message)))


@contextmanager
def _alone(house: Warehouse) -> Iterator[None]:
    """Exclude all other writers of these files, so that none overwrites or removes what it has not read."""
    with _writing, ExitStack() as held:
        path = None
        with suppress(WarehouseError):  # the locks of a warehouse in a store are where its staging directory is, which may be away
            path = house.local_root() / "_cdcpipe/copies.lock"
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            wait_for_lock(held.enter_context(open_alone(path)), path)
        yield


def _unsettled(house: Warehouse, tables: Sequence[Table] | None) -> list[tuple[WantedCopy, WantedCopy]]:
    """Return the records of all tables, or of these, each also without the reasons that a copy has settled."""
    if tables is None:
        read = _FILES.read_all(house)
    else:
        read = [(table, each) for table in sorted(tables) if (each := _FILES.read(house, table)) is not None]
    records = [replace(each, table=table) for table, each in read]
    copies = Copies.read(house, [each.table for each in records])
    found = []
    for each in records:
        reasons = tuple(reason for reason in each.reasons if not copies.is_since(each.table, reason.since_lsn))
        left = replace(each, reasons=reasons, failures=each.failures if reasons == each.reasons else None)
        found.append((each, left))
    return found


def _write(house: Warehouse, wanted: WantedCopy) -> None:
    """Replace the table's file. Without reasons there is none."""
    global _writes  # noqa: PLW0603 - the files are written under a lock of this module, too
    if wanted.reasons:
        _FILES.write(house, wanted.table, wanted.to_json())
    else:
        _FILES.remove(house, wanted.table)
    _writes += 1
