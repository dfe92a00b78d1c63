"""The schema history: every version of every table's description, with the position of the first change to which it applies.

It is a changelog in the same format as the others: ``changelog/_cdc_schema_history`` (changelog/tables.py). Versions belong to a
relation id, not to a name. So a renamed table keeps its history, and a table that was dropped and created again begins a new one. A
description that only repeats the previous one is no version, unless a snapshot between has found other columns.

A column's number, and its value in earlier rows, come from the catalog (schema/column_numbers.py). They are NULL if they are not
certain. Where the DDL is captured (changelog/ddl_log.py), they come from there, and are certain. That also holds for the last
version before the first captured command. What the catalog said of that version does not count any more: it may have been asked
after later commands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from cdcpipe.pgoutput.messages import IDENTITY_CODES, REPLICA_IDENTITIES, Column, Relation
from cdcpipe.types.names import format_built_in_type
from spark_sink.changelog.ddl_log import DdlLog
from spark_sink.changelog.interface import ChangelogState
from spark_sink.changelog.tables import changelogs_of
from spark_sink.schema.column_numbers import ColumnFacts, looks, numbered
from spark_sink.schema.table import AFTER_ALL, SCHEMA_HISTORY, Placed, Table
from spark_sink.staging.log import Position
from spark_sink.warehouse import dropped_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pyspark.sql import Row, SparkSession

    from spark_sink.schema.catalog_answers import CatalogAnswers
    from spark_sink.schema.ddl import Descriptions
    from spark_sink.schema.names import Names
    from spark_sink.schema.table import Place, Version
    from spark_sink.source.contents import Contents, Use
    from spark_sink.source.ddl import Ddl
    from spark_sink.staging.log import Segment
    from spark_sink.warehouse.warehouse import Warehouse

__all__ = ["HISTORY_SCHEMA", "SchemaHistory", "SchemaVersion"]

_COLUMN: Final = StructType(
    [
        StructField("name", StringType()),
        StructField("type", StringType()),
        StructField("type_id", LongType()),
        StructField("type_modifier", IntegerType()),
        StructField("is_key", BooleanType()),
        StructField("number", IntegerType()),
        StructField("missing", StringType()),
        StructField("is_filled", BooleanType()),
        StructField("spark_column", StringType()),
        StructField("spark_type", StringType()),
    ]
)

HISTORY_SCHEMA: Final = StructType(
    [
        StructField("table_schema", StringType()),
        StructField("table_name", StringType()),
        StructField("relation_id", LongType()),
        StructField("replica_identity", StringType()),
        StructField("columns", ArrayType(_COLUMN)),
        StructField("_cdc_epoch", IntegerType()),
        StructField("_cdc_end_lsn", LongType()),
        StructField("_cdc_ordinal", IntegerType()),
    ]
)
"""``type`` is NULL for a type that is not built in. ``is_key``: part of the replica identity; with FULL every column is."""


@dataclass(frozen=True, slots=True)
class SchemaVersion(Placed):
    """A description, and the catalog's facts about its columns; None if these are not certain."""

    relation: Relation
    facts: tuple[ColumnFacts, ...] | None
    is_whole: bool = False
    """Whether a snapshot tells that no publication had a list of the table's columns."""

    @property
    def numbers(self) -> tuple[int | None, ...]:
        """The number of each column; None for each if these are not certain."""
        return (None,) * len(self.relation.columns) if self.facts is None else tuple(fact.number for fact in self.facts)


_V = TypeVar("_V", SchemaVersion, "Version")


class SchemaHistory:
    """Reads and writes the history of one warehouse."""

    def __init__(self, spark: SparkSession, warehouse: Warehouse, answers: CatalogAnswers) -> None:
        self._warehouse = warehouse
        self._changelogs = changelogs_of(spark, warehouse)
        self._answers = answers
        self._ddl = DdlLog(spark, warehouse)
        self._state: ChangelogState | None = None
        self._versions: dict[int, list[SchemaVersion]] | None = None

    @property
    def captured(self) -> Descriptions:
        """What captured DDL says about the tables."""
        return self._ddl.descriptions

    def read_gaps(self) -> None:
        """Read the gaps of the log again: when there may be another one. What is asked counts for one server."""
        self._ddl.read_gaps()

    def record_ddl(self, ddl: Sequence[Ddl], segments: Sequence[Segment]) -> None:
        """Record the captured DDL that is new in the segments."""
        self._ddl.record_new(ddl, segments)
        for relation_id in {table.relation_id for each in ddl for table in each.message.tables}:
            self._load()[relation_id] = [self._corrected(version) for version in self._load().get(relation_id, [])]

    def record_new(
        self,
        contents: Mapping[Table, Contents],
        fields_of: Callable[[Table, Use], Sequence[StructField] | None],
        segments: Sequence[Segment],
    ) -> None:
        """Record the versions that are new in the segments.

        ``fields_of`` returns the changelog's columns for the columns of a relation; None for a relation that the changelog lacks.
        """
        self._answers.begin_batch()
        before, versions = self._load(), dict[int, list[SchemaVersion]]()
        done_lsn = 0 if self._state is None else self._state.lsn
        uses = [(use, table) for table, found in contents.items() for use in found.uses if use.end_lsn > done_lsn]
        rows = []
        for use, table in sorted(uses, key=lambda item: item[0].place):
            relation_id = use.relation.relation_id
            known = versions.setdefault(relation_id, list(before.get(relation_id, ())))
            is_new, facts = self._is_new(table, use, known)
            if is_new:
                known.append(self._corrected(SchemaVersion(*use.place, use.relation, facts)))
                rows.append(_row(known[-1], _epoch(use, segments), fields_of(table, use)))
        if rows:
            end = segments[-1].end
            start = Position(segments[0].epoch, max(segments[0].start_lsn, done_lsn))
            table = pa.Table.from_pylist(rows, to_arrow_schema(HISTORY_SCHEMA, timezone="UTC"))
            self._changelogs.append(SCHEMA_HISTORY, table, HISTORY_SCHEMA, start, end)
            self._state, self._versions = ChangelogState(HISTORY_SCHEMA, end.lsn), before | versions

    def step(self, use: Use) -> tuple[SchemaVersion, SchemaVersion] | None:
        """Return the version that begins with ``use``, and the one before it; None if there are no such two versions.

        A version of another server is none before it: OIDs and numbers of columns mean something else there.
        """
        known = (self._versions or {}).get(use.relation.relation_id, [])
        for before, after in pairwise(known):
            if after.place == use.place:
                return (before, after) if self.captured.servers.is_one(before.place, after.place) else None
        return None

    def before(self, version: SchemaVersion) -> list[SchemaVersion]:
        """Return the relation's versions before this one, without those of a server before it."""
        known = (self._versions or {}).get(version.relation.relation_id, [])
        return self._of_server([other for other in known if other.place < version.place], version.place)

    def until(self, relation_id: int, place: Place) -> list[SchemaVersion]:
        """Return the relation's versions up to a place among the table's changes, without those of a server before it."""
        known = [version for version in self._load().get(relation_id, []) if version.place <= place]
        return self._of_server(known, place)

    def _of_server(self, versions: Sequence[_V], place: Place) -> list[_V]:
        """Return those of the versions that are of the server that is there at a place: only there its OIDs are these tables'."""
        return [each for each in versions if self.captured.servers.is_one(each.place, place)]

    def version(self, relation_id: int, place: Place) -> SchemaVersion | None:
        """Return the version that applies at a place among the table's changes; None if it is not known.

        For what begins with a version of a table, ask `description_of`.
        """
        known = self.until(relation_id, place)
        return known[-1] if known else None

    def description_of(self, version: Version, end: Place) -> SchemaVersion | None:
        """Return the description with which a table's version begins: a new one, or that from before; None if it is not known.

        ``end`` is where the next version begins. A version that begins with the table's first change in a transaction has the
        ordinal 0. A new description has the place of this change: it may be behind that, because changes of other tables count.
        """
        known = self.until(version.relation_id, (version.end_lsn, AFTER_ALL[0]))
        begun = (each for each in known if version.place <= each.place < end)
        return next(begun, None) or self.version(version.relation_id, version.place)

    def newest(self, table: Table) -> Relation | None:
        """Return the newest description of a table: from the stream, or from the catalog if the stream has none yet."""
        versions = self._warehouse.versions(table)
        if not versions:
            return None
        for described in self._of_server(self._load().get(versions[-1].relation_id, []), versions[-1].place)[-1:]:
            return described.relation
        return self._answers.at(versions[-1].end_lsn).relation(versions[-1].relation_id)

    def copied(self, table: Table, relation_id: int, place: Place) -> SchemaVersion | None:
        """Return the table as its last snapshot up to ``place`` has found it; None if there is none.

        Of the facts only the numbers are known, and of the relation neither identity nor key.
        """
        return _copied(table, self._of_server(self._warehouse.versions(table), place), relation_id, place)

    def as_copied(self, table: Table, relation: Relation, place: Place) -> SchemaVersion | None:
        """Return the table as its last snapshot has found it, if captured DDL tells that nothing has altered it up to ``place``."""
        found = self.copied(table, relation.relation_id, place)
        if found is None or not self.captured.covers(found.place, place) or looks(found.relation) != looks(relation):
            return None
        described = self.captured.last_place(relation.relation_id, place)
        return found if described is None or described <= found.place else None

    def was_copied_otherwise(self, table: Table, relation: Relation, told_at: Place, place: Place) -> bool:
        """Tell whether the last snapshot between two places has found other columns than ``relation`` has.

        The stream says the same before and after a column is renamed and gets its name back. A snapshot between has the other name.
        """
        found = self.copied(table, relation.relation_id, place)
        return found is not None and told_at < found.place and looks(found.relation) != looks(relation)

    def tables_with(self, types: frozenset[int], place: Place, names: Names) -> list[Table]:
        """Return the tables that have a column of one of these types at ``place``, by the OIDs of the types.

        What was told last of a table counts: by captured DDL, by the stream, or by a snapshot. Tables without a changelog may be
        among the results, but none that is known to be dropped.
        """
        last = {home: (relation_id, used) for _, home, relation_id, used in sorted(self._told(place, names), key=itemgetter(0))}
        return [
            home
            for home, (relation_id, used) in last.items()
            if not types.isdisjoint(used) and not dropped_tables.is_dropped(self._warehouse, home, relation_id)
        ]

    def _told(self, place: Place, names: Names) -> Iterator[tuple[Place, Table, int, list[int]]]:
        """Yield the last descriptions of tables at ``place``, from each source: their place, the home, the OID, the types."""
        for told_at, each in self.captured.last_before(place):
            home = names.home(each.relation_id, each.table, place)
            yield told_at, home, each.relation_id, [column.type_id for column in each.columns]
        for known in self._load().values():
            # A message stands before the change with its place.
            version = next((each for each in reversed(known) if each.place < place), None)
            if version is not None:
                relation = version.relation
                home = names.home(relation.relation_id, Table.of(relation), place)
                yield version.place, home, relation.relation_id, [column.type_id for column in relation.columns]
        for home, versions in self._warehouse.all_versions().items():
            newest = versions[-1]
            copied = _copied(home, versions, newest.relation_id, place)
            if copied is not None:
                yield copied.place, home, newest.relation_id, [column.type_id for column in copied.relation.columns]

    def _is_new(self, table: Table, use: Use, known: Sequence[SchemaVersion]) -> tuple[bool, tuple[ColumnFacts, ...] | None]:
        """Tell whether a version begins with ``use``, and return its facts.

        Without captured DDL, a description that the server has sent again may be about another column with the same name and type.
        Then its facts are not certain, because nobody knows at which description the column was another one.
        """
        place, last = use.place, known[-1] if known else None
        if last is not None and not self.captured.servers.is_one(last.place, place):
            last = None  # it may be of another table
        captured = self.captured.facts(use.relation, place)
        if last is None or _said(last.relation) != _said(use.relation):
            return True, captured or self._facts(table, use, last)
        if not use.is_repeated and self.was_copied_otherwise(table, use.relation, last.place, place):
            return True, captured or self._facts(table, use, last)
        if captured is not None:
            may_have_others = not use.is_repeated and last.place != place and self.is_uncertain(table, last, known[:-1])
            return may_have_others or _has_other_columns(captured, last.facts), captured
        if use.is_repeated or last.facts is None or last.place == place:
            return False, None
        if self.as_copied(table, use.relation, place) is not None:
            return False, None
        catalog = self._answers.at(use.end_lsn).columns(use.relation, is_of_now=True)
        facts = numbered(use.relation, catalog, (last.relation, last.facts))
        is_other = facts is None or _has_other_columns(facts, last.facts) or self.is_uncertain(table, last, known[:-1])
        return bool(catalog) and is_other, None

    def is_uncertain(self, table: Table, last: SchemaVersion, earlier: Sequence[SchemaVersion]) -> bool:
        """Tell whether a number may be that of a younger column, which took the name and type of a column that was dropped since.

        The numbers may be those of a much later catalog. A number that was known before is certain. So are all numbers if no column
        was dropped since, and those that captured DDL tells.
        """
        if self._captured_facts(last) is not None:
            return False
        numbers, earlier = {fact.number for fact in last.facts or ()}, self._of_server(earlier, last.place)
        certain = next(({fact.number for fact in each.facts} for each in reversed(earlier) if each.facts is not None), None)
        for version in self._of_server(self._warehouse.versions(table), last.place):
            if version.snapshot and version.relation_id == last.relation.relation_id:
                certain = (certain or set()) | {number for number, _ in version.snapshot}
        dropped = set(range(1, max(numbers, default=1))) - numbers
        if certain:
            dropped -= set(range(1, max(certain))) - certain
        return any(number > min(dropped) for number in numbers - (certain or set())) if dropped else False

    def _captured_facts(self, version: SchemaVersion) -> tuple[ColumnFacts, ...] | None:
        """Return the version's facts from captured DDL: from the command before it, or from the first command after it."""
        found = self.captured.facts(version.relation, version.place)
        return self.captured.facts_until_next(version.relation, version.place) if found is None else found

    def _corrected(self, version: SchemaVersion) -> SchemaVersion:
        """Return a version with the facts that captured DDL tells. Facts of the catalog that contradict it are not certain."""
        captured = self._captured_facts(version)
        if captured is not None:
            return replace(version, facts=captured)
        place, relation_id = version.place, version.relation.relation_id
        if any(self.captured.is_later_number(relation_id, place, fact.number) for fact in version.facts or ()):
            return replace(version, facts=None)
        return version

    def _facts(self, table: Table, use: Use, previous: SchemaVersion | None) -> tuple[ColumnFacts, ...] | None:
        copied = self.as_copied(table, use.relation, use.place)
        if copied is not None:
            return copied.facts
        copied = self.copied(table, use.relation.relation_id, use.place)
        if copied is not None and (previous is None or previous.place < copied.place):
            previous = copied
        before = None if previous is None or previous.facts is None else (previous.relation, previous.facts)
        return numbered(use.relation, self._answers.at(use.end_lsn).columns(use.relation), before)

    def _load(self) -> dict[int, list[SchemaVersion]]:
        """Return the versions of every relation, in order. They are read once."""
        if self._versions is None:
            self._state = self._changelogs.state(SCHEMA_HISTORY)
            versions: dict[int, list[SchemaVersion]] = {}
            if self._state is not None:
                rows, shared = self._changelogs.read(SCHEMA_HISTORY).orderBy("_cdc_end_lsn", "_cdc_ordinal"), dict[Any, Any]()
                for row in rows.toLocalIterator():  # not all at a time: a job may create tables anew every night, for years
                    versions.setdefault(row["relation_id"], []).append(_version(row, shared))
            self._versions = {relation_id: list(map(self._corrected, known)) for relation_id, known in versions.items()}
        return self._versions


def _copied(table: Table, versions: Sequence[Version], relation_id: int, place: Place) -> SchemaVersion | None:
    for version in reversed(versions):
        if version.described and version.relation_id == relation_id and version.place <= place:
            columns = tuple(Column(0, name, type_id, modifier) for _, name, type_id, modifier in version.described)
            facts = tuple(ColumnFacts(number, None, is_filled=True) for number, *_ in version.described)
            relation = Relation(None, relation_id, table.schema, table.name, "d", columns)
            return SchemaVersion(*version.place, relation, facts, version.is_whole)
    return None


def _said(relation: Relation) -> tuple[object, ...]:
    """Return the parts of a description. A description that differs in one of them is another version."""
    columns = tuple((column.name, column.type_id, column.type_modifier, column.is_key) for column in relation.columns)
    return relation.namespace, relation.name, relation.replica_identity, columns


def _has_other_columns(facts: Sequence[ColumnFacts] | None, before: Sequence[ColumnFacts] | None) -> bool:
    """Tell whether a column was dropped and another one added with its name and type, if both versions' facts are known."""
    return bool(facts and before) and [fact.number for fact in facts or ()] != [fact.number for fact in before or ()]


def _version(row: Row, shared: dict[Any, Any]) -> SchemaVersion:
    """Return the version of a row. ``shared`` keeps equal columns once: a table that is created anew has those from before."""
    columns: Iterable[Any] = row["columns"]
    described = tuple(Column(int(c["is_key"]), c["name"], c["type_id"], c["type_modifier"]) for c in columns)
    relation = Relation(
        None,
        row["relation_id"],
        row["table_schema"],
        row["table_name"],
        IDENTITY_CODES[row["replica_identity"]],
        shared.setdefault(described, described),
    )
    facts = tuple(ColumnFacts(c["number"], c["missing"], c["is_filled"]) for c in columns if c["number"] is not None)
    facts = shared.setdefault(facts, facts)
    is_known = len(facts) == len(relation.columns)
    return SchemaVersion(row["_cdc_end_lsn"], row["_cdc_ordinal"], relation, facts if is_known else None)


def _row(version: SchemaVersion, epoch: int, fields: Sequence[StructField] | None) -> dict[str, object]:
    relation = version.relation
    unknown = (None,) * len(relation.columns)
    facts = version.facts or unknown
    described = [
        (
            column.name,
            format_built_in_type(column.type_id, column.type_modifier),
            column.type_id,
            column.type_modifier,
            column.is_key,
            *((None, None, None) if fact is None else (fact.number, fact.missing, fact.is_filled)),
            *((None, None) if field is None else (field.name, field.dataType.simpleString())),
        )
        for column, fact, field in zip(relation.columns, facts, unknown if fields is None else fields, strict=True)
    ]
    identity = REPLICA_IDENTITIES[relation.replica_identity]
    columns = [dict(zip(_COLUMN.names, values, strict=True)) for values in described]
    position = epoch, version.end_lsn, version.ordinal
    row = relation.namespace, relation.name, relation.relation_id, identity, columns, *position
    return dict(zip(HISTORY_SCHEMA.names, row, strict=True))


def _epoch(use: Use, segments: Sequence[Segment]) -> int:
    return next(segment.epoch for segment in segments if use.end_lsn <= segment.end_lsn)
