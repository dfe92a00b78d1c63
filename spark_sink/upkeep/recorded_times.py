"""When VACUUM and the daily parts of the upkeep were last done: _cdcpipe/vacuumed.json. No Spark."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from spark_sink.delta import log as delta_log
from spark_sink.files.places import read_known, write_json
from spark_sink.schema.table import NO_COPIES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spark_sink.schema.table import Table
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["HISTORIES", "PURGE", "RecordedTimes", "is_due", "places_of", "vacuum_interval_s", "vacuum_of"]

_DAY_S = 86_400.0
_WRITE_S = 60.0

PURGE: Final = "purge"
"""The name of the last purge. It can't be a table's name, which has a slash."""
HISTORIES: Final = "histories"
"""The same for the last purge of the histories."""


class RecordedTimes:
    """The recorded times of one warehouse. One process at a time writes them."""

    def __init__(self, house: Warehouse) -> None:
        self._path = house.root / "_cdcpipe/vacuumed.json"
        self._times: dict[str, Any] | None = None
        self._is_written = True
        self._written_s = time.monotonic()

    def is_known(self, name: str) -> bool:
        """Tell whether ``name`` has a recorded time."""
        return name in self._read()

    def is_due(self, name: str, interval_s: float = _DAY_S) -> bool:
        """Tell whether ``interval_s`` have passed since the recorded time of ``name``, or whether there is none.

        A time that is further ahead than that comes from a clock that was wrong, and does not count.
        """
        before = self._read().get(name)
        return before is None or abs(time.time() - before) >= interval_s

    def record(self, name: str) -> None:
        """Record that ``name`` was done now."""
        self._read()[name] = round(time.time())
        self._write()

    def note(self, name: str) -> None:
        """Note that ``name`` was done now. It is written within a minute of others, or by `flush`: the file has all tables."""
        self._read()[name] = round(time.time())
        self._is_written = False
        if time.monotonic() - self._written_s >= _WRITE_S:
            self._write()

    def flush(self) -> None:
        """Write what was noted."""
        if not self._is_written:
            self._write()

    def _write(self) -> None:
        write_json(self._path, self._read())
        self._is_written, self._written_s = True, time.monotonic()

    def _read(self) -> dict[str, Any]:
        if self._times is None:
            self._times = read_known(self._path)
        return self._times


def places_of(house: Warehouse) -> Iterator[tuple[Table, Path]]:
    """Yield the Delta tables of a warehouse: changelogs, replicas and stored histories.

    Among the changelogs are those of the logical messages, of the captured DDL and of the tables' schemas.
    """
    for table, path in _possible_places(house):
        if delta_log.exists(path):
            yield table, path


def _possible_places(house: Warehouse) -> Iterator[tuple[Table, Path]]:
    for table in [*house.tables(), *NO_COPIES]:
        for path in (house.changelog(table), house.replica(table), house.history(table)):
            yield table, path


def vacuum_of(path: Path) -> str:
    """Return the name of a table's VACUUM."""
    return f"{path.parent.name}/{path.name}"


def vacuum_interval_s(retention_s: float) -> float:
    """Return how often VACUUM runs: once in the time for which it keeps files, but at least once a day."""
    return min(_DAY_S, retention_s)


def is_due(house: Warehouse, *, vacuum_retention_s: float | None, purges: bool, purges_histories: bool) -> bool:
    """Tell whether VACUUM or a daily part of the upkeep is due, of those that the options ask for.

    A table without a recorded time is new, and has nothing to vacuum yet.
    """
    if not house.format.has_upkeep:
        return False
    times = RecordedTimes(house)
    if (purges and times.is_due(PURGE)) or (purges_histories and times.is_due(HISTORIES)):
        return True
    if vacuum_retention_s is None:
        return False
    interval_s = vacuum_interval_s(vacuum_retention_s)
    # To look whether a table exists is slow in an object store. So this looks only for tables whose time has come.
    due = (
        path for _, path in _possible_places(house) if times.is_known(vacuum_of(path)) and times.is_due(vacuum_of(path), interval_s)
    )
    return any(map(delta_log.exists, due))
