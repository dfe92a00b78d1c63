"""The gaps that a warehouse's tables have had: changes that never came, or that never happened. No pyspark.

    _cdcpipe/gaps.json      each gap of the log (staging/log.py, `Gap`), and whether the tables were copied since

A table is right again from the first snapshot at or after the gap's end. Between the gap's beginning and that snapshot its rows are
not known.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.lsn import LSN, format_lsn
from spark_sink.files.places import make_directory, map_reads, read_json, write_json
from spark_sink.schema.servers import NOTHING, Servers
from spark_sink.schema.table import copies_until
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Position
from spark_sink.warehouse import landed_snapshots
from spark_sink.warehouse.errors import undamaged

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from spark_sink.schema.table import Table, Version
    from spark_sink.staging.log import Epoch
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = [
    "Copies",
    "TablesGap",
    "check_known",
    "complete_copies",
    "is_at_server_of_now",
    "is_copied_since",
    "open_gap",
    "read",
    "record",
    "record_healed",
    "servers",
    "unrecorded",
]


_logger = logging.getLogger(__name__)

_WRITING = threading.Lock()
"""A micro-batch may record a gap while a run records that others are healed."""


@dataclass(frozen=True, slots=True)
class TablesGap:
    """A gap of the log, and the position at which all published tables were copied since; None until that is done."""

    gap: Gap
    start: Position
    """The beginning of the epoch after the gap. A copy at this LSN or later is right."""
    healed_lsn: int | None = None
    former_system_id: str | None = None
    """The server before the gap, if the epoch after it has the changes of another one: there, OIDs mean something else."""

    @property
    def is_other_server(self) -> bool:
        """Tell whether the epoch after the gap has the changes of another server."""
        return self.former_system_id is not None

    @property
    def ends_oids(self) -> bool:
        """Tell whether OIDs may mean something else behind the gap: the server is another one, or has lost changes."""
        return self.is_other_server or self.gap.is_divergence

    def to_json(self) -> dict[str, Any]:
        """Return the gap as a JSON object."""
        healed = None if self.healed_lsn is None else format_lsn(self.healed_lsn)
        other = {} if self.former_system_id is None else {"former_system_id": self.former_system_id}
        return {**self.gap.to_json(), "start": str(self.start), "healed": healed, **other}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TablesGap:
        """Read the object of `to_json`; raise ValueError, KeyError or TypeError for anything else."""
        healed = None if value["healed"] is None else int(LSN.parse(value["healed"]))
        return cls(Gap.from_json(value), Position.parse(value["start"]), healed, value.get("former_system_id"))


def _path(house: Warehouse) -> Path:
    return house.root / "_cdcpipe/gaps.json"


def read(house: Warehouse) -> list[TablesGap]:
    """Return all gaps, the oldest first."""
    found = read_json(_path(house))
    with undamaged(_path(house)):
        return [] if found is None else [TablesGap.from_json(each) for each in found["gaps"]]


def _write(house: Warehouse, gaps: Iterable[TablesGap]) -> None:
    make_directory(_path(house).parent)
    write_json(_path(house), {"gaps": [each.to_json() for each in gaps]})


def record(house: Warehouse, epochs: Iterable[Epoch]) -> None:
    """Record the gaps of the log. Call this before changes from after a gap come to the tables."""
    epochs = list(epochs)
    others = {epoch.start: epoch.former_system_id for epoch in epochs}
    with _WRITING:
        known = read(house)
        # An older cdcpipe has not recorded the former server.
        found = [each if each.is_other_server else replace(each, former_system_id=others.get(each.start)) for each in known]
        found += unrecorded(known, epochs)
        if found != known:
            _write(house, found)


def unrecorded(known: Iterable[TablesGap], epochs: Iterable[Epoch]) -> list[TablesGap]:
    """Return the gaps of the log that are not among the ``known`` ones."""
    starts = {each.start for each in known}
    return [
        TablesGap(epoch.gap, epoch.start, former_system_id=epoch.former_system_id)
        for epoch in epochs
        if epoch.gap is not None and epoch.start not in starts
    ]


def servers(gaps: Iterable[TablesGap]) -> Servers:
    """Return the servers of the log, by all its gaps. One that has lost changes uses their OIDs and numbers again."""
    ends = [each for each in gaps if each.ends_oids]
    common = (NOTHING if each.is_other_server else each.gap.after_lsn for each in ends)
    return Servers((each.start.lsn for each in ends), common)


def is_at_server_of_now(house: Warehouse, epochs: Iterable[Epoch]) -> bool:
    """Tell whether the tables have all changes of former servers: what the server tells of OIDs does not hold for these."""
    by_system_id = Servers(epoch.start_lsn for epoch in epochs if epoch.gap is not None and epoch.former_system_id is not None)
    position = house.source().position
    return by_system_id.is_last(1 if position is None else position.lsn + 1)


def open_gap(house: Warehouse) -> TablesGap | None:
    """Return the newest gap if the tables were not copied since; None if they are right."""
    gaps = read(house)
    return gaps[-1] if gaps and gaps[-1].healed_lsn is None else None


def record_healed(house: Warehouse, lsn: int) -> None:
    """Record that every published table was copied at ``lsn`` or later, so that the gaps up to there are healed.

    A gap that has come during these copies is beyond ``lsn``, and stays open.
    """
    with _WRITING:
        found = read(house)
        healed = [each.healed_lsn is None and each.start.lsn <= lsn for each in found]
        _write(house, [replace(each, healed_lsn=lsn) if is_now else each for each, is_now in zip(found, healed, strict=True)])


@dataclass(frozen=True, slots=True)
class Copies:
    """The versions of some tables, and which of their snapshots are complete. Everything is read once, for all these tables."""

    versions: Mapping[Table, Sequence[Version]]
    unfinished: Collection[tuple[Table, Position]]

    @classmethod
    def read(cls, house: Warehouse, tables: Sequence[Table]) -> Self:
        """Read what the warehouse says of these tables."""
        found = dict(zip(tables, map_reads(house.versions, tables, house.root), strict=True))
        has_copies = any(map(copies_until, found.values()))
        # Read after the versions: a snapshot that begins in between is not among these.
        return cls(found, landed_snapshots.unfinished(house) if has_copies else ())

    def complete(self, table: Table) -> frozenset[int]:
        """Return the LSNs of a table's complete snapshots."""
        return copies_until(self.versions[table]) - {position.lsn for each, position in self.unfinished if each == table}

    def is_since(self, table: Table, lsn: int) -> bool:
        """Tell whether a table has a complete snapshot from ``lsn`` or later, and no other one that is unfinished."""
        is_found = any(copy >= lsn for copy in copies_until(self.versions[table]))
        return is_found and all(each != table for each, _ in self.unfinished)


def complete_copies(house: Warehouse, table: Table) -> frozenset[int]:
    """Return the LSNs of the table's complete snapshots."""
    return Copies.read(house, [table]).complete(table)


def is_copied_since(house: Warehouse, table: Table, lsn: int) -> bool:
    """Tell whether the table has a complete snapshot from ``lsn`` or later, and no other one that is unfinished."""
    return Copies.read(house, [table]).is_since(table, lsn)


def check_known(house: Warehouse, table: Table, lsn: int, copies: Collection[int]) -> None:
    """Raise InvalidArgumentsError if the table's rows at ``lsn`` are not known, because of a gap.

    ``copies`` are the table's complete snapshots (`complete_copies`) from before its changelog was read: the rows have these.
    """
    for each in read(house):
        if each.gap.after_lsn < lsn and not any(each.start.lsn <= copy <= lsn for copy in copies):
            later = min((copy for copy in copies if copy >= each.start.lsn), default=None)
            since = "it was not copied since" if later is None else f"they are known again since its copy at {format_lsn(later)}"
            after = format_lsn(each.gap.after_lsn)
            raise InvalidArgumentsError(
                f"the rows of {table} at {format_lsn(lsn)} are not known: changes are missing after {after} ({each.gap.cause});"
                f" {since}",
                hint=f"ask for {after} or earlier, or for a position after the copy",
            )
