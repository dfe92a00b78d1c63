"""The record of the tables that were published when a run last looked at the catalog. No Spark.

    _cdcpipe/published.json     what the last look saw of each published table

snapshot/two_looks.py compares two looks. `cdcpipe-spark status` reads the record alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from cdcpipe.lsn import LSN, format_lsn
from spark_sink.client import keyless
from spark_sink.files.places import make_directory, read_json, write_json
from spark_sink.schema.table import Table
from spark_sink.warehouse import table_names
from spark_sink.warehouse.errors import undamaged

if TYPE_CHECKING:
    from pathlib import Path

    from spark_sink.schema.table import Version
    from spark_sink.staging.log import Epoch
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["Seen", "SeenTable", "follow", "forget", "read", "unpublished", "write"]


@dataclass(frozen=True, slots=True)
class SeenTable:
    """What was seen of a table. What publishes it, its parts and the operations are None if the look did not ask for parts."""

    schema: str
    name: str
    relation_id: int
    has_key: bool
    published_by: tuple[int, ...] | None
    parts: Mapping[int, tuple[int, str]] | None
    """For each relation that holds rows: its file, and the digest of its definition."""
    operations: frozenset[str] | None = None
    """Which changes are published: ``insert``, ``update``, ``delete``, ``truncate``. None also in a record of an older version."""
    undecided_lsn: int | None = None
    """The LSN of the look that first saw another name, if the stream has not told of it yet."""
    is_known: bool = False
    """Whether the warehouse had the table."""
    filters: frozenset[str] | None = None
    """"OPERATION DIGEST" for each row filter. An operation that some publication does not filter has none.

    None also in a record of an older version, whose digests had another form and another name in the record.
    """
    unpublished: frozenset[int] | None = None
    """The numbers of its columns that are not published, and of dropped ones. None also in a record of an older version."""

    @property
    def table(self) -> Table:
        """The table's name."""
        return Table(self.schema, self.name)

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> SeenTable:
        """Return what is kept of a table that ``cdcpipe prepare`` describes."""
        parts = table.get("parts")
        return cls(
            str(table["schema"]),
            str(table["name"]),
            int(table["relation_id"]),
            keyless.has_key(table),
            None if parts is None else tuple(table["published_by"]),
            None if parts is None else {int(each["relation_id"]): (int(each["file"]), str(each["definition"])) for each in parts},
            _texts(table, "operations"),
            filters=_texts(table, "filters"),
            unpublished=_numbers(table, "unpublished"),
        )


def _texts(value: Mapping[str, Any], name: str) -> frozenset[str] | None:
    return None if value.get(name) is None else frozenset(map(str, value[name]))


def _numbers(value: Mapping[str, Any], name: str) -> frozenset[int] | None:
    return None if value.get(name) is None else frozenset(map(int, value[name]))


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look saw: the tables by their OIDs, as of ``lsn`` on the server ``system_id``."""

    system_id: str
    lsn: int
    tables: Mapping[int, SeenTable]
    former: Mapping[int, tuple[Table, ...]] = field(default_factory=dict)
    """For relations that hold rows: the names, with masks, under which these were published before (former_names.py)."""
    earlier: Seen | None = None
    """The last look at the server before a gap, while the tables still get changes of that one; only with masks."""
    epoch: int = 0
    """The last epoch that `follow` has taken; 0 for none, and in a record of an older version."""
    left_out: frozenset[str] = frozenset()
    """The publications that launchers have left out since the look."""


def _path(house: Warehouse) -> Path:
    return house.root / "_cdcpipe/published.json"


def read(house: Warehouse) -> Seen | None:
    """Return what the last look saw; None before the first one."""
    value = read_json(_path(house))
    with undamaged(_path(house), "delete it: the next look begins a new record, and finds only what changes from then on"):
        return None if value is None else _seen(value)


def _seen(value: Mapping[str, Any]) -> Seen:
    tables = (
        SeenTable(
            str(each["schema"]),
            str(each["name"]),
            int(each["relation_id"]),
            bool(each["has_key"]),
            None if each["published_by"] is None else tuple(map(int, each["published_by"])),
            None if each["parts"] is None else {int(part): (int(file), str(text)) for part, file, text in each["parts"]},
            _texts(each, "operations"),
            int(LSN.parse(each["undecided"])) if "undecided" in each else None,
            bool(each.get("known")),
            _texts(each, "filter_digests"),
            _numbers(each, "unpublished"),
        )
        for each in value["tables"]
    )
    former = {int(number): tuple(map(Table.from_json, names)) for number, names in value.get("former", ())}
    known, earlier = {each.relation_id: each for each in tables}, value.get("earlier")
    epoch, left_out = int(value.get("epoch", 0)), frozenset(map(str, value.get("left_out", ())))
    return Seen(str(value["system_id"]), int(LSN.parse(value["lsn"])), known, former, earlier and _seen(earlier), epoch, left_out)


def write(house: Warehouse, now: Seen) -> None:
    """Record what a look saw."""
    make_directory(_path(house).parent)
    write_json(_path(house), _to_json(now))


def forget(house: Warehouse) -> None:
    """Remove the record."""
    _path(house).unlink(missing_ok=True)


def _to_json(now: Seen) -> dict[str, Any]:
    tables = [
        {
            "schema": each.schema,
            "name": each.name,
            "relation_id": each.relation_id,
            "has_key": each.has_key,
            "published_by": None if each.published_by is None else list(each.published_by),
            "parts": None if each.parts is None else [[part, *facts] for part, facts in each.parts.items()],
        }
        | ({} if each.operations is None else {"operations": sorted(each.operations)})
        | ({} if each.undecided_lsn is None else {"undecided": format_lsn(each.undecided_lsn)})
        | ({"known": True} if each.is_known else {})
        | ({} if each.filters is None else {"filter_digests": sorted(each.filters)})
        | ({} if each.unpublished is None else {"unpublished": sorted(each.unpublished)})
        for each in now.tables.values()
    ]
    former = [[number, [name.to_json() for name in names]] for number, names in now.former.items()]
    found: dict[str, Any] = {"system_id": now.system_id, "lsn": format_lsn(now.lsn), "tables": tables}
    found |= {"former": former} if former else {}
    found |= ({"epoch": now.epoch} if now.epoch else {}) | ({"left_out": sorted(now.left_out)} if now.left_out else {})
    return found if now.earlier is None else found | {"earlier": _to_json(now.earlier)}


def follow(house: Warehouse, epochs: Sequence[Epoch]) -> Seen | None:
    """Let the record go on with the epochs that launchers have begun since the look. Returns the record as it is then."""
    before = read(house)
    if before is None or not epochs:
        return before
    seen = _without_left_out(_upgraded(before, epochs), epochs)
    if seen != before:
        write(house, seen)
    return seen


def _upgraded(seen: Seen, epochs: Sequence[Epoch]) -> Seen:
    """Let the record go on if pg_upgrade has taken the slot along: the tables have their OIDs and files, and no change is missing.

    Publications have other OIDs, and row filters other digests. After a gap the record does not go on: all tables are copied, and
    the server may be another one.
    """
    if seen.system_id == epochs[-1].system_id:
        return seen
    system_id = seen.system_id
    for epoch in epochs:
        if epoch.former_system_id == system_id and epoch.gap is None:
            system_id = epoch.system_id
    if system_id != epochs[-1].system_id:
        return seen
    tables = {number: replace(each, published_by=None, filters=None) for number, each in seen.tables.items()}
    return replace(seen, system_id=system_id, tables=tables)


def _without_left_out(seen: Seen, epochs: Sequence[Epoch]) -> Seen:
    """Let no change count as published that came while a launcher did not ask for its publication: the log does not have it.

    This matters once a launcher asks for the publication again: the tables then look as if nothing had happened. Nobody knows which
    of them it publishes, so all count. If nobody asks for it again (it was renamed, or is not wanted any more), nothing changes.
    """
    left_out, tables = seen.left_out, seen.tables
    for epoch in epochs:
        if epoch.number > seen.epoch:
            if left_out.intersection(epoch.publications):
                tables = {number: replace(each, operations=frozenset()) for number, each in tables.items()}
            left_out = left_out.difference(epoch.publications).union(epoch.left_out)
    return replace(seen, tables=tables, epoch=max(seen.epoch, epochs[-1].number), left_out=left_out)


def unpublished(house: Warehouse, tables: Mapping[Table, Sequence[Version]]) -> set[Table] | None:
    """Return those of a warehouse's ``tables`` that were not published at the last look: they get no changes.

    ``tables`` are given with their versions. Returns None if nobody has looked. Tables that were dropped are among those returned.
    """
    seen = read(house)
    if seen is None:
        return None
    names = table_names.names(house)
    published = {names.shown(names.home(each.relation_id, each.table)) for each in seen.tables.values()}
    # The stream may tell of a new table before the next look.
    known = {table for table, versions in tables.items() if versions and versions[0].end_lsn <= seen.lsn}
    return known - published
