"""A table's versions as they come: what identifies its rows from some change on, and what rows from before have in new columns.

The key is in the stream (schema/keys.py), but for tables with REPLICA IDENTITY FULL or NOTHING: those are asked for in the catalog,
unless the user has named their keys, wherever the server describes the table anew, as it does after each ALTER TABLE. (What the
launcher repeats is no sign of anything: there the key goes on.) The catalog is of today: where its key can't be that of these
changes, the one before goes on.

PostgreSQL rewrites no rows for RENAME COLUMN and ADD COLUMN … DEFAULT, and the stream tells of neither. The catalog numbers the
columns (schema/column_numbers.py): by its number a column under a new name is found again, and of one that was added the catalog
says what rows from before have in it. Where that is not certain, the table and the columns are named.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from spark_sink.schema.keys import identifying_columns, version_of
from spark_sink.schema.table import Fill
from spark_sink.schema.types import as_typed, assign_columns, holds, original_name

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pyspark.sql.types import StructField, StructType

    from spark_sink.changelog.history import SchemaHistory, SchemaVersion
    from spark_sink.schema.column_numbers import ColumnFacts
    from spark_sink.schema.published import PublishedTables
    from spark_sink.schema.table import Table, Version
    from spark_sink.source.contents import Use
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["TableVersions", "fills_between", "insert_snapshot"]

_logger = logging.getLogger(__name__)


def insert_snapshot(
    versions: Sequence[Version], snapshot: Version, history: SchemaHistory, columns: StructType, types: str
) -> list[Version]:
    """Return the versions with that of a snapshot, whose rows may come when the stream is past it already.

    What rows from before have in the columns of the version that follows is a matter of the snapshot's rows then.
    """
    found = _insert(versions, snapshot)
    following = found.index(snapshot) + 1
    if following < len(found) and found[following].relation_id == snapshot.relation_id:
        version = history.version(found[following].relation_id, found[following].place)
        if version is not None and version.facts is not None:
            version = replace(version, relation=as_typed(version.relation, types))
            fills, _ = _fills_after_snapshot(snapshot, version, columns)
            found[following] = replace(found[following], fills=fills)
    return found


def _insert(versions: Sequence[Version], version: Version) -> list[Version]:
    """Return the versions with another one at its place, where what it says is not what the one before it says."""
    before = [known for known in versions if known.place < version.place]
    after = [known for known in versions if known.place > version.place]
    is_new = not before or not version.says_nothing_after(before[-1])
    return [*before, *([version] if is_new else []), *after]


class TableVersions:
    """Writes down in a warehouse what identifies its tables' rows; ``keys`` are those of `pipeline.Pipeline`."""

    def __init__(
        self,
        warehouse: Warehouse,
        history: SchemaHistory,
        published: PublishedTables,
        keys: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._warehouse = warehouse
        self._history = history
        self._published = published
        self._keys = {name: tuple(columns) for name, columns in (keys or {}).items()}

    def record_new(
        self,
        table: Table,
        known: Sequence[Version],
        uses: Sequence[Use],
        done_lsn: int,
        before: StructType | None,
        columns: StructType,
    ) -> list[Version]:
        """Write down what holds beyond ``done_lsn``, before the first change under it; return all versions.

        ``known`` are those written down before; ``columns`` the changelog's, which had ``before`` so far. What is known from
        beyond ``done_lsn`` is of a snapshot, or of an attempt whose changes did not get into the changelog: it is written down
        again when its place comes.
        """
        versions = list(known)
        for preceding, use in zip((None, *uses), uses, strict=False):
            if use.end_lsn <= done_lsn:
                continue
            is_first = preceding is None or preceding.last_lsn < use.end_lsn
            ordinal = 0 if is_first else use.ordinal
            before_it = [version for version in versions if version.place < (use.end_lsn, ordinal)]
            is_remade = bool(before_it) and before_it[-1].relation_id != use.relation.relation_id
            is_same = preceding is not None and preceding.relation == use.relation
            fills = () if is_remade or is_same else self._fills(table, use, before_it, before, columns)
            key = self._key(table, use, before_it)
            relation = as_typed(use.relation, self._warehouse.types)
            versions = _insert(versions, version_of(use.end_lsn, ordinal, relation, columns, key, fills))
        if versions != known:
            self._warehouse.write_versions(table, versions)
        return versions

    def _key(self, table: Table, use: Use, known: Sequence[Version]) -> tuple[str, ...]:
        """Return the names of the columns that identify a row, in PostgreSQL's spelling; none if nothing does."""
        relation = use.relation
        names = {column.name for column in relation.columns}
        key = self._keys.get(str(table))
        if key is not None:
            return key if set(key) <= names else ()

        def primary_key() -> tuple[str, ...]:
            before = known[-1] if known and known[-1].relation_id == relation.relation_id else None
            if before is None or not use.is_repeated:
                found = self._published.primary_key(relation)
                if found is not None and set(found) <= names:
                    return found
                # The table has gone, or has got a key since whose columns these changes lack: what held before goes on.
            return () if before is None else tuple(map(original_name, before.key))

        return identifying_columns(relation, primary_key)

    def _fills(
        self, table: Table, use: Use, known: Sequence[Version], before: StructType | None, columns: StructType
    ) -> tuple[Fill, ...]:
        """Return what is certain of rows from before ``use``, and name what is not; ``known`` are the versions so far."""
        step, place = self._history.step(use), (use.end_lsn, use.ordinal)
        here = self._history.version(use.relation.relation_id, place)
        is_after_snapshot = bool(known and known[-1].snapshot) and (step is None or known[-1].place > step[0].place)
        if is_after_snapshot and here is not None and here.place == place:
            # The rows from before are the snapshot's.
            relation = as_typed(here.relation, self._warehouse.types)
            fills, unknown = _fills_after_snapshot(known[-1], replace(here, relation=relation), columns)
            self._name(table, unknown)
            return fills
        if step is None:
            # What the table began with is not in the history: a snapshot, or an older program's tables.
            old = set() if before is None else set(before.names)
            fields = assign_columns(columns, as_typed(use.relation, self._warehouse.types))
            new = [c.name for c, field in zip(use.relation.columns, fields, strict=True) if before and field.name not in old]
            self._name(table, new)
            return ()
        previous, version = (replace(each, relation=as_typed(each.relation, self._warehouse.types)) for each in step)
        if (previous.relation.namespace, previous.relation.name) != (table.schema, table.name):
            _logger.warning(
                "table %s was %s.%s: its rows from before are in the tables of that name, and in the replica of this one once they "
                "change, or: cdcpipe-spark snapshot --table %s",
                table,
                previous.relation.namespace,
                previous.relation.name,
                table,
            )
            return ()
        self._name_retyped(table, previous, version, columns)
        # (By their names: under another name of the table, or before a snapshot, they need not be the changelog's.)
        before_it = {column.name for each in self._history.before(step[0]) for column in each.relation.columns}
        copied = {name for each in known for _, name in each.snapshot}
        fills, unknown = fills_between(previous, version, columns, before_it | copied)
        self._name(table, unknown)
        return fills

    @staticmethod
    def _name(table: Table, names: Sequence[str]) -> None:
        if names:
            _logger.warning(
                "table %s has new columns: %s. If one was renamed or has a default, the stream does not tell what rows from before "
                "have in it: there it is NULL in the replica until they change, or: cdcpipe-spark snapshot --table %s",
                table,
                ", ".join(names),
                table,
            )

    @staticmethod
    def _name_retyped(table: Table, previous: SchemaVersion, version: SchemaVersion, columns: StructType) -> None:
        old, new = _fields(previous, columns), _fields(version, columns)
        for name in old.keys() & new.keys():
            if old[name].name != new[name].name and not holds(new[name].dataType, old[name].dataType):
                _logger.warning(
                    "table %s, column %s: its new type does not hold every value of the old one exactly; it goes on as column %s, "
                    "what was before is in %s",
                    table,
                    name,
                    new[name].name,
                    old[name].name,
                )


def _fields(version: SchemaVersion, columns: StructType) -> dict[str, StructField]:
    names = [column.name for column in version.relation.columns]
    return dict(zip(names, assign_columns(columns, version.relation), strict=True))


def fills_between(
    previous: SchemaVersion, version: SchemaVersion, columns: StructType, dropped: Collection[str] = ()
) -> tuple[tuple[Fill, ...], list[str]]:
    """Return what rows of the previous version have in the new version's new columns, and the columns where that is unknown.

    In a column that has a name of one ``dropped`` before they may still have a value.
    """
    old, new = _fields(previous, columns), _fields(version, columns)
    used = {*dropped, *old}
    if previous.facts is None or version.facts is None:
        unknown = [name for name in new if name not in old]
        return tuple(Fill(new[name].name) for name in unknown if used & {name, new[name].name}), unknown
    old_numbers = {fact.number: name for name, fact in zip(old, previous.facts, strict=True)}
    fills, unknown = [], []
    for name, fact in zip(new, version.facts, strict=True):
        source = old_numbers.get(fact.number)
        if source is not None and old[source].name == new[name].name:
            continue
        fill = _fill(new[name], None if source is None else old[source], fact)
        if fill is None and source == name:
            continue  # another type: `_name_retyped`
        if fill is None:
            unknown.append(name)
            fill = Fill(new[name].name)
        if fill != Fill(fill.column) or used & {name, fill.column}:
            fills.append(fill)
    return tuple(fills), unknown


def _fills_after_snapshot(snapshot: Version, version: SchemaVersion, columns: StructType) -> tuple[tuple[Fill, ...], list[str]]:
    """Return what a snapshot's rows have in columns of a later version that they lack, and those where that is unknown."""
    new, known = _fields(version, columns), dict(snapshot.snapshot)
    if version.facts is None:
        return (), [name for name, field in new.items() if field.name not in known.values()]
    fills, unknown = [], []
    for (name, field), fact in zip(new.items(), version.facts, strict=True):
        source = known.get(fact.number)
        if source == field.name:
            continue
        fill = _fill(field, None if source is None else columns[source], fact)
        if fill is None and source is None:
            unknown.append(name)
            if field.name in known.values():
                fills.append(Fill(field.name))
        elif fill is not None and (fill.source is not None or fill.value is not None or field.name in known.values()):
            fills.append(fill)
    return tuple(fills), unknown


def _fill(field: StructField, source: StructField | None, fact: ColumnFacts) -> Fill | None:
    """Return what rows from before have in a new column, None if that is not known."""
    if source is not None:
        return Fill(field.name, source.name) if holds(field.dataType, source.dataType) else None
    return None if fact.is_filled else Fill(field.name, value=fact.missing)
