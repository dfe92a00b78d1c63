"""Finds the versions of tables: from which change on which columns are the key, and which values earlier rows have in new columns.

**Keys.** The stream names the key (schema/keys.py), except for tables with REPLICA IDENTITY FULL or NOTHING. For these, unless the
user has named the key, captured DDL says it (schema/ddl.py). Without captured DDL the catalog is asked whenever the server
describes the table again, as it does after each ALTER TABLE. (A description that the launcher repeats changes nothing.) The catalog
is of today. If its key can't be the key of these changes, the previous key is kept.

**Earlier rows.** PostgreSQL rewrites no rows for RENAME COLUMN and ADD COLUMN … DEFAULT, and the stream does not contain these
commands, unless they are captured. But the catalog numbers columns (schema/column_numbers.py). The number identifies a renamed
column. For an added column, the catalog has the value of earlier rows. If this is not certain, a warning names the table and the
columns, and the table is recorded as one that needs a copy (warehouse/wanted_copies.py). If a rename brings a column into the
pattern of a mask, its earlier values are NULL, and the table needs a copy. If a rename takes a column out of the pattern, the run
ends before a value is written.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

import pyarrow as pa

from cdcpipe.masks import HASH
from spark_sink.changelog.earlier_values import fills_after_snapshot, fills_between, shared_names
from spark_sink.changelog.gone_columns import find_gone
from spark_sink.changelog.retyped import retyped, retyped_since_copy
from spark_sink.schema.casts import is_printed_otherwise
from spark_sink.schema.catalog_answers import is_key_told
from spark_sink.schema.column_numbers import looks
from spark_sink.schema.keys import identifying_columns, marked, version_of
from spark_sink.schema.masking import masked
from spark_sink.schema.names import Names
from spark_sink.schema.table import AFTER_ALL, Fill, Table, gone_columns
from spark_sink.schema.types import assign_columns, fields_by_name, original_name, plain_name
from spark_sink.warehouse import table_names
from spark_sink.warehouse.wanted_copies import want_copy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql.types import StructType

    from cdcpipe.pgoutput.messages import Column, Relation
    from spark_sink.changelog.retyped import Retyped
    from spark_sink.changelog.schema_history import SchemaHistory, SchemaVersion
    from spark_sink.schema.catalog_answers import CatalogAnswers
    from spark_sink.schema.table import Place, Version
    from spark_sink.source.contents import Use
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["TableVersions", "check_masked", "insert_snapshot"]

_logger = logging.getLogger(__name__)

_Former: TypeAlias = tuple[int | None, str, str]
"""A column of earlier rows: its number in PostgreSQL, None if it is not certain; its name there; and its name in the changelog."""

_CAME_BACK: Final = "another table had its name for a while"
_AGAIN: Final = "a column may have been dropped, and another one added with its name"


def insert_snapshot(
    versions: Sequence[Version], snapshot: Version, schemas: SchemaHistory, columns: StructType, warehouse: Warehouse, table: Table
) -> list[Version]:
    """Return the versions with the version of a snapshot inserted. The stream may be past the snapshot already.

    The next version's fills are computed again: they then apply to the snapshot's rows. If these rows have values that are masked
    from the next version on, ``table`` needs another copy.
    """
    found = _insert(versions, snapshot)
    following = found.index(snapshot) + 1
    if following < len(found) and found[following].relation_id == snapshot.relation_id:
        end = found[following + 1].place if following + 1 < len(found) else AFTER_ALL
        version = schemas.description_of(found[following], end)
        if version is not None and version.facts is not None:
            version = _typed(warehouse, version)
            fills, _ = fills_after_snapshot(snapshot, version, columns)
            then = table_names.names(warehouse).name(table, snapshot.place)
            fills = _hide(warehouse, table, version, columns, fills, then, _columns_of(snapshot))
            found[following] = replace(found[following], fills=fills)
    return found


def _insert(versions: Sequence[Version], version: Version) -> list[Version]:
    """Return the versions with ``version`` inserted at its place, unless it changes nothing compared with the one before."""
    before = [known for known in versions if known.place < version.place]
    after = [known for known in versions if known.place > version.place]
    is_new = not before or not version.says_nothing_after(before[-1])
    return [*before, *([version] if is_new else []), *after]


class TableVersions:
    """Finds the versions of a warehouse's tables.

    ``keys`` are the keys that the user has named (`pipeline.Pipeline`). With ``drops_columns`` a version names the columns that are
    gone (changelog/gone_columns.py). Without it no more columns go.
    """

    def __init__(
        self,
        warehouse: Warehouse,
        schemas: SchemaHistory,
        answers: CatalogAnswers,
        keys: Mapping[str, Sequence[str]] | None = None,
        *,
        drops_columns: bool = False,
    ) -> None:
        self._warehouse = warehouse
        self._drops_columns = drops_columns
        self._kept: set[tuple[Table, str]] = set()
        """The columns of which a warning has said that they stay."""
        self._schemas = schemas
        self._answers = answers
        self._keys = {name: tuple(columns) for name, columns in (keys or {}).items()}
        self.names = Names()
        """The names of the tables, in the last micro-batch."""

    def with_new(
        self,
        table: Table,
        known: Sequence[Version],
        uses: Sequence[Use],
        done_lsn: int,
        before: StructType | None,
        columns: StructType,
    ) -> list[Version]:
        """Return all versions: those beyond ``done_lsn`` are added. The tables that need a copy are recorded (wanted_copies.py).

        The caller writes them before a change to which they apply, and after the changelog has the columns that they name.

        ``known`` are the versions recorded before. ``columns`` are the changelog's columns; it had ``before`` so far. A known
        version beyond ``done_lsn`` is from a snapshot, or from an attempt whose changes did not get into the changelog. The latter
        is recorded again in its turn.
        """
        versions = list(known)
        for preceding, use in zip((None, *uses), uses, strict=False):
            if use.end_lsn <= done_lsn:
                continue
            is_first = preceding is None or preceding.last_lsn < use.end_lsn
            ordinal = 0 if is_first else use.ordinal
            before_it = [version for version in versions if version.place < (use.end_lsn, ordinal)]
            is_remade = bool(before_it) and before_it[-1].relation_id != use.relation.relation_id
            if is_remade:
                self._check_new(table, use, before_it)
            is_same = preceding is not None and preceding.relation == use.relation and self._schemas.step(use) is None
            fills = () if is_remade or is_same else self._fills(table, use, before_it, before, columns)
            key = self._key(table, use, before_it)
            relation = self._warehouse.typed(use.relation)
            columns_now = [column.name for column in relation.columns]
            self._warehouse.masks.check_key(relation.namespace, relation.name, columns_now, key)
            version = version_of(use.end_lsn, ordinal, relation, columns, key, fills)
            versions = _insert(versions, replace(version, gone=self._gone(table, use, before_it, columns)))
        return versions

    def _check_new(self, table: Table, use: Use, known: Sequence[Version]) -> None:
        """Let the table be copied if it has come back to this name: then it is no new table, and has rows from before ``use``."""
        servers = self._schemas.captured.servers
        if any(each.relation_id == use.relation.relation_id and servers.is_one(each.place, use.place) for each in known):
            _logger.warning(
                "table %s has its name again, which another table had meanwhile: the replica lacks rows. Repair: run --heal, or %s",
                table,
                table.copying,
            )
            want_copy(self._warehouse, table, use.end_lsn, _CAME_BACK)

    def _gone(self, table: Table, use: Use, before_it: Sequence[Version], columns: StructType) -> tuple[str, ...]:
        """Return the changelog's columns that are gone with ``use``. Warns of those that may be gone, but stay."""
        if not self._drops_columns:
            fields = assign_columns(columns, self._warehouse.typed(use.relation))
            return tuple(sorted(gone_columns(before_it, use.end_lsn) - {field.name for field in fields}))
        gone, uncertain = find_gone(use, before_it, columns, self._schemas, self._warehouse.typed)
        new = [name for name in uncertain if (table, name) not in self._kept]
        if new:
            self._kept.update((table, name) for name in new)
            _logger.warning(
                "table %s does not have these columns any more, or they are not published: %s. No captured DDL says which, so they "
                "stay in the replica, and are NULL in new rows: see cdcpipe ddl install",
                table,
                ", ".join(new),
            )
        return gone

    def _key(self, table: Table, use: Use, known: Sequence[Version]) -> tuple[str, ...]:
        """Return the names of the columns that identify a row, in PostgreSQL's spelling; empty if no columns do."""
        relation = use.relation
        names = {column.name for column in relation.columns}
        named = (self._keys.get(str(each)) for each in (table, Table(table.schema, table.name)))
        key = next(filter(None, named), None)
        if key is not None:
            return key if set(key) <= names else ()

        place = use.place
        captured = self._schemas.captured.primary_key(relation, place)
        before = known[-1] if known and known[-1].relation_id == relation.relation_id else None

        def primary_key() -> tuple[str, ...]:
            if captured is not None and set(captured) <= names:
                return captured
            is_as_copied = before is not None and self._schemas.as_copied(table, relation, place) is not None
            if before is None or not (use.is_repeated or is_as_copied):
                found = self._answers.at(use.end_lsn).primary_key(relation)
                if found is not None and set(found) <= names:
                    return found
                # The table does not exist any more, its server is not there, or its key has columns that these changes lack.
                # So keep the previous key.
            return () if before is None else tuple(map(original_name, before.key))

        def identity() -> tuple[str, ...]:
            captured = self._schemas.captured.identity(relation, place)
            return self._answers.at(use.end_lsn).identity(relation) if captured is None else captured

        if use.is_repeated and before is not None and is_key_told(relation):
            former = tuple(map(original_name, before.key))
            if former in ((), marked(relation)):
                return former  # () if a column of the key was not published: the catalog may have another key since
        return identifying_columns(relation, primary_key, identity)

    def _fills(
        self, table: Table, use: Use, known: Sequence[Version], before: StructType | None, columns: StructType
    ) -> tuple[Fill, ...]:
        """Return the certain values of rows from before ``use``, and warn of the uncertain ones.

        ``known`` are the versions so far.
        """
        step, place = self._schemas.step(use), use.place
        here = self._schemas.version(use.relation.relation_id, place)
        is_after_snapshot = bool(known and known[-1].snapshot) and (step is None or known[-1].place > step[0].place)
        is_after_snapshot = is_after_snapshot and self._schemas.captured.servers.is_one(known[-1].place, place)
        if is_after_snapshot and here is not None and here.place == place:
            # The earlier rows are those of the snapshot.
            self._name_reprinted(table, place, {number: type_id for number, _, type_id, _ in known[-1].described}, here)
            here = _typed(self._warehouse, here)
            fills, unknown = fills_after_snapshot(known[-1], here, columns)
            self._name(table, place, unknown)
            self._name_retyped(table, place, retyped_since_copy(known[-1], here, columns, self._warehouse.typed))
            then = self.names.name(table, known[-1].place)
            self._check_columns(then, _numbers_of(known[-1]), here)
            return _hide(self._warehouse, table, here, columns, fills, then, _columns_of(known[-1]))
        if step is None:
            # The schema history lacks the previous version: the table began with a snapshot, or an older cdcpipe wrote it.
            old = set() if before is None else set(before.names)
            fields = fields_by_name(columns, self._warehouse.typed(use.relation))
            new = [name for name, field in fields.items() if before and field.name not in old]
            self._name(table, place, new)
            return ()
        previous, version = (_typed(self._warehouse, each) for each in step)
        before_name = Table.of(previous.relation)
        self._check_columns(before_name, _numbers(previous), version)
        if self.names.home(previous.relation.relation_id, before_name, previous.place) != table:
            _logger.warning(
                "table %s was renamed from %s: earlier rows are in the tables of the old name. They come to the new replica "
                "when they change, or with a copy of the table: run --heal, or %s",
                table,
                before_name,
                table.copying,
            )
            want_copy(self._warehouse, table, use.end_lsn, f"it was renamed from {before_name}, which has its earlier rows")
            return ()
        earlier = fields_by_name(columns, previous.relation)
        self._name_retyped(table, place, retyped(previous, version, columns))
        self._name_reprinted(table, place, _type_ids(step[0]), step[1])
        # Compare by name: columns from under another name of the table, or from before a snapshot, need not be in the changelog.
        earlier_versions = self._schemas.before(step[0])
        before_it = {column.name for each in earlier_versions for column in each.relation.columns}
        copied = {name for each in known for _, name in each.snapshot}
        shared = shared_names([*earlier_versions, *step], known)
        fills, unknown = fills_between(previous, version, columns, before_it | copied, shared)
        self._name(table, place, unknown)
        is_uncertain = self._schemas.is_uncertain(table, previous, earlier_versions)
        if (is_uncertain or (version.facts is None) != (previous.facts is None)) and looks(version.relation) == looks(
            previous.relation
        ):
            _logger.warning("table %s was altered, and %s", table, _AGAIN)
            want_copy(self._warehouse, table, place[0], _AGAIN)
        former = [(number, name, field.name) for number, (name, field) in zip(previous.numbers, earlier.items(), strict=True)]
        return _hide(self._warehouse, table, version, columns, fills, before_name, former)

    def _check_columns(self, then: Table, former: Mapping[int, str], version: SchemaVersion) -> None:
        """Raise InvalidArgumentsError if a mask has lost a column of the table that was called ``then``."""
        now = version.relation.namespace, version.relation.name
        self._warehouse.masks.check_columns((then.schema, then.name), former, now, _numbers(version))

    def _name(self, table: Table, place: Place, names: Sequence[str]) -> None:
        """Name the new columns for which the stream does not have the values of earlier rows: the table needs a copy."""
        if names:
            _logger.warning(
                "table %s has new columns: %s. If one was renamed or has a default, the stream does not have its value in earlier "
                "rows: in the replica it is NULL until these rows change, or until the table is copied: by run --heal, "
                "or %s",
                table,
                ", ".join(names),
                table.copying,
            )
            listed = ", ".join(names)
            want_copy(self._warehouse, table, place[0], f"the stream does not have the values of earlier rows in {listed}")

    def _name_retyped(self, table: Table, place: Place, columns: Iterable[Retyped]) -> None:
        """Name the columns whose new type does not hold every earlier value: the table needs a copy."""
        moved: list[str] = []
        stayed: list[str] = []
        for name, old, new in columns:
            (moved if old != new else stayed).append(name)
            _logger.warning(
                "table %s, column %s: its new type does not hold every value of the old one exactly; %s",
                table,
                name,
                f"new values go to column {new}, earlier values stay in {old}"
                if old != new
                else "earlier values stay as they were",
            )
        if moved:
            want_copy(self._warehouse, table, place[0], f"earlier values of {', '.join(moved)} are in columns of the old type")
        if stayed:
            want_copy(self._warehouse, table, place[0], f"earlier values of {', '.join(stayed)} are not rounded to the new type")

    def _name_reprinted(self, table: Table, place: Place, before: Mapping[int, int], version: SchemaVersion) -> None:
        """Name the columns whose earlier values have another text now: the table needs a copy. ``before``: type ids by number.

        The types are PostgreSQL's, also of masked columns: a hash is made of the text.
        """
        columns, relation = _by_number(version), version.relation
        kinds = self._warehouse.masks.kinds(relation.namespace, relation.name, [column.name for column in columns.values()])
        found = [
            column.name
            for number, column in columns.items()
            if kinds.get(column.name, HASH) == HASH
            and is_printed_otherwise(before.get(number, column.type_id), column.type_id, is_text=column.name in kinds)
        ]
        if found:
            listed = ", ".join(found)
            _logger.warning(
                "table %s has columns with another type, in which earlier values have another text: %s. Repair: run --heal, or %s",
                table,
                listed,
                table.copying,
            )
            want_copy(self._warehouse, table, place[0], f"with their new type, earlier values of {listed} have another text")


def _by_number(version: SchemaVersion) -> dict[int, Column]:
    """Return a description's columns by their numbers; nothing if these are not certain."""
    return {fact.number: column for column, fact in zip(version.relation.columns, version.facts or (), strict=False)}


def _type_ids(version: SchemaVersion) -> dict[int, int]:
    return {number: column.type_id for number, column in _by_number(version).items()}


def _typed(warehouse: Warehouse, version: SchemaVersion) -> SchemaVersion:
    """Return a description with the types that the columns have in the warehouse. The value of old rows is masked, too."""
    relation, masks = version.relation, warehouse.masks
    kinds = masks.kinds(relation.namespace, relation.name, [column.name for column in relation.columns])
    facts = version.facts
    if facts is not None and kinds:
        facts = tuple(
            replace(fact, missing=masked(pa.array([fact.missing], pa.string()), kinds[column.name], masks)[0].as_py())
            if column.name in kinds
            else fact
            for column, fact in zip(relation.columns, facts, strict=True)
        )
    return replace(version, relation=warehouse.typed(relation), facts=facts)


def _columns_of(snapshot: Version) -> list[_Former]:
    """Return the columns of a snapshot's rows. Snapshots of older versions of cdcpipe do not have PostgreSQL's names."""
    names = {number: name for number, name, *_ in snapshot.described}
    return [(number, names.get(number, plain_name(column)), column) for number, column in snapshot.snapshot]


def check_masked(
    warehouse: Warehouse, schemas: SchemaHistory, table: Table, relation: Relation, columns: Mapping[int, str], lsn: int
) -> None:
    """Raise InvalidArgumentsError if a copy as of ``lsn`` would show a column that was masked before: in the stream, or in a copy.

    ``columns`` are the names of the table's columns in the copy, by their numbers. The schema history may have a description
    whose changes were refused, because a column had left its mask. So this uses only descriptions whose changes the tables
    have. Those of another server tell nothing: its OIDs and numbers mean other tables and columns.
    """
    masks, own, place, done = warehouse.masks, (relation.namespace, relation.name), (lsn, 0), warehouse.source().position
    until, names = min(place, (0, 0) if done is None else (done.lsn + 1, 0)), table_names.names(warehouse)
    found = [each for each in schemas.until(relation.relation_id, until) if names.servers.is_one(each.place, place)]
    for described in [each for each in found if each.facts is not None][-1:]:
        masks.check_columns((described.relation.namespace, described.relation.name), _numbers(described), own, columns)
    copies = [each for each in warehouse.versions(table) if each.snapshot and each.relation_id == relation.relation_id]
    for copied in [each for each in copies if each.place <= place and names.servers.is_one(each.place, place)][-1:]:
        then = names.name(table, copied.place)
        masks.check_columns((then.schema, then.name), _numbers_of(copied), own, columns)


def _numbers(version: SchemaVersion) -> dict[int, str]:
    return {number: column.name for number, column in _by_number(version).items()}


def _numbers_of(snapshot: Version) -> dict[int, str]:
    return {number: name for number, name, _ in _columns_of(snapshot) if number is not None}


def _hide(
    warehouse: Warehouse,
    table: Table,
    version: SchemaVersion,
    columns: StructType,
    fills: tuple[Fill, ...],
    then: Table,
    former: Sequence[_Former],
) -> tuple[Fill, ...]:
    """Return the fills with NULL for earlier values that a mask hides since ``version``: a rename brought them into its pattern.

    The earlier rows have the columns ``former``, of the table that was called ``then``. Their values are as the server has sent
    them, or have another mask. The table needs a copy: it brings the masked values. The former column is NULL, too: it may stay in
    the tables, and a copy does not have the deleted rows.
    """
    masks, relation = warehouse.masks, version.relation
    if not masks.rules:
        return fills
    fields = fields_by_name(columns, relation)
    kinds = masks.kinds(relation.namespace, relation.name, fields)
    kinds_then = masks.kinds(then.schema, then.name, [name for _, name, _ in former])
    is_certain = version.facts is not None and all(number is not None for number, *_ in former)
    known = {number if is_certain else name: (name, column) for number, name, column in former}
    ids = version.numbers if is_certain else [*fields]
    hidden: dict[str, str] = {}
    for name, each in zip(fields, ids, strict=True):
        if name in kinds and each in known and kinds_then.get(known[each][0]) != kinds[name]:
            hidden[name] = known[each][1]
    if not hidden:
        return fills
    _logger.warning(
        "table %s: since a rename, a mask applies to %s. Earlier rows lack it: in the replica they have NULL there until the "
        "table is copied, by run --heal, or %s",
        table,
        ", ".join(hidden),
        table.copying,
    )
    want_copy(warehouse, table, version.end_lsn, f"since a rename, a mask applies to {', '.join(hidden)}")
    others = {field.name for name, field in fields.items() if name not in hidden}
    emptied = sorted({*(fields[name].name for name in hidden), *hidden.values()} - others)
    return (*(fill for fill in fills if fill.column not in emptied), *map(Fill, emptied))
