"""Tables that change while their changes stream: what holds for a change at its place."""

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import postgres
import pytest
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from cdcpipe.lsn import LSN
from cdcpipe.pgoutput.messages import Relation
from spark_sink.changelog.history import SchemaHistory, SchemaVersion
from spark_sink.changelog.tables import changelogs_of
from spark_sink.changelog.versions import TableVersions, fills_between, insert_snapshot
from spark_sink.commands.run import _Catalog
from spark_sink.delta import log as delta_log
from spark_sink.launcher.launcher import Launcher, LauncherConfig
from spark_sink.pipeline.pipeline import Pipeline
from spark_sink.replica.pieces import cut_pieces
from spark_sink.schema.column_numbers import numbered
from spark_sink.schema.published import PublishedTables
from spark_sink.schema.table import SCHEMA_HISTORY, Fill, Table, Version
from spark_sink.schema.types import assign_columns, merge_columns
from spark_sink.source.contents import Use
from spark_sink.staging.filler import SealPolicy
from spark_sink.staging.log import Epoch, Position, list_epochs
from spark_sink.staging.readers import register_reader
from spark_sink.warehouse.warehouse import Warehouse
from support.road import Road
from support.segments import relation
from support.waiting import SPARK_DEADLINE_S, until

ID, CODE, NONE = ("id",), ("code",), ()
EPOCH = Epoch(1, "7", 1, "db", "slot", ("p",), {}, 0)


def version(end_lsn: int, ordinal: int, key: tuple[str, ...], relation_id: int = 1) -> Version:
    return Version(end_lsn, ordinal, relation_id, key, key)


@pytest.mark.parametrize(
    ("versions", "after_lsn", "expected"),
    [
        # One key: one piece, from wherever the replica is.
        ([version(10, 0, ID)], 0, [(ID, 0, 99, 0, None, False)]),
        ([version(10, 0, ID)], 50, [(ID, 50, 99, 0, None, False)]),
        # Between two transactions.
        ([version(10, 0, ID), version(20, 0, CODE)], 0, [(ID, 0, 19, 0, None, False), (CODE, 19, 99, 0, None, False)]),
        ([version(10, 0, ID), version(20, 0, CODE)], 19, [(CODE, 19, 99, 0, None, False)]),
        # Amid one, which stands by itself; and amid it twice.
        (
            [version(10, 0, ID), version(20, 3, CODE)],
            0,
            [
                (ID, 0, 19, 0, None, False),
                (ID, 19, 20, 0, 3, False),
                (CODE, 19, 20, 3, None, False),
                (CODE, 20, 99, 0, None, False),
            ],
        ),
        (
            [version(10, 0, ID), version(20, 3, CODE), version(20, 5, ID)],
            12,
            [
                (ID, 12, 19, 0, None, False),
                (ID, 19, 20, 0, 3, False),
                (CODE, 19, 20, 3, 5, False),
                (ID, 19, 20, 5, None, False),
                (ID, 20, 99, 0, None, False),
            ],
        ),
        ([version(10, 0, ID), version(20, 3, CODE)], 20, [(CODE, 20, 99, 0, None, False)]),
        # Another table under the name, from a transaction on and amid one.
        ([version(10, 0, ID), version(20, 0, ID, 2)], 0, [(ID, 0, 19, 0, None, False), (ID, 19, 99, 0, None, True)]),
        ([version(10, 0, ID), version(20, 0, ID, 2)], 30, [(ID, 30, 99, 0, None, False)]),
        (
            [version(10, 0, ID), version(20, 3, CODE, 2)],
            19,
            [(ID, 19, 20, 0, 3, False), (CODE, 19, 20, 3, None, True), (CODE, 20, 99, 0, None, False)],
        ),
        # Without a key: by the one that comes later; never by another table's.
        ([version(10, 0, NONE), version(20, 0, CODE)], 0, [(CODE, 0, 19, 0, None, False), (CODE, 19, 99, 0, None, False)]),
        ([version(10, 0, NONE), version(20, 0, CODE, 2)], 0, [(CODE, 19, 99, 0, None, True)]),
        ([version(10, 0, NONE)], 0, []),
    ],
)
def test_pieces(versions: list[Version], after_lsn: int, expected: list[tuple[object, ...]]) -> None:
    pieces = cut_pieces(versions, after_lsn, 99)
    found = [(p.key, p.after_lsn, p.until_lsn, p.first_ordinal, p.end_ordinal, p.is_new_table) for p in pieces]
    assert found == expected


@pytest.mark.parametrize(
    ("versions", "after_lsn", "expected"),
    [
        ([version(10, 0, ID), version(20, 0, CODE)], 0, [False, True]),
        ([version(10, 0, ID), version(20, 0, CODE)], 20, [False]),
        ([version(10, 0, NONE), version(20, 0, CODE)], 0, [True, True]),
        ([version(10, 0, ID), replace(version(20, 0, ID), fills=(Fill("id"),))], 0, [False, True]),
        ([version(10, 0, ID), replace(version(20, 0, ID), fills=(Fill("v"),))], 0, [False, False]),
    ],
)
def test_where_rows_from_before_may_lack_the_key(versions: list[Version], after_lsn: int, expected: list[bool]) -> None:
    assert [piece.is_new_key for piece in cut_pieces(versions, after_lsn, 99)] == expected


INT2, INT4, INT8, FLOAT4, FLOAT8, DATE, TIMESTAMP, TIMESTAMPTZ, TEXT = 21, 23, 20, 700, 701, 1082, 1114, 1184, 25


def numeric(precision: int, scale: int) -> tuple[int, int]:
    return 1700, (precision << 16 | scale) + 4


@pytest.mark.parametrize(
    ("kinds", "columns", "names"),
    [
        # What holds every value of what was there before takes its place.
        ([INT2, INT4, INT8], "c:bigint", "c c c"),
        ([INT2, FLOAT8], "c:double", "c c"),
        ([FLOAT4, FLOAT8], "c:double", "c c"),
        ([DATE, TIMESTAMP], "c:timestamp_ntz", "c c"),
        ([numeric(5, 2), numeric(9, 4)], "c:decimal(9,4)", "c c"),
        ([INT4, numeric(12, 2)], "c:decimal(12,2)", "c c"),
        ([INT8, numeric(22, 2)], "c:decimal(22,2)", "c c"),
        # An integer that is narrower than it was: its values fit, PostgreSQL has looked at each.
        ([INT8, INT4, INT2], "c:bigint", "c c c"),
        # What would round or could overflow, and what is only written in another way.
        ([INT8, FLOAT8], "c:bigint,c__double:double", "c c__double"),
        ([INT4, FLOAT4], "c:int,c__float:float", "c c__float"),
        ([INT2, numeric(5, 0)], "c:smallint,c__decimal_5_0:decimal(5,0)", "c c__decimal_5_0"),
        ([FLOAT8, INT4], "c:double,c__int:int", "c c__int"),
        ([FLOAT8, FLOAT4], "c:double,c__float:float", "c c__float"),
        ([TIMESTAMP, DATE], "c:timestamp_ntz,c__date:date", "c c__date"),
        ([TIMESTAMP, TIMESTAMPTZ], "c:timestamp_ntz,c__timestamp:timestamp", "c c__timestamp"),
        ([numeric(9, 4), numeric(9, 2)], "c:decimal(9,4),c__decimal_9_2:decimal(9,2)", "c c__decimal_9_2"),
        ([numeric(9, 2), numeric(9, 4)], "c:decimal(9,2),c__decimal_9_4:decimal(9,4)", "c c__decimal_9_4"),
        ([INT4, TEXT, INT4], "c:int,c__string:string", "c c__string c"),
        # The other name is for good: that column is not widened.
        ([TEXT, INT4, INT8], "c:string,c__int:int,c__bigint:bigint", "c c__int c__bigint"),
        # There and back again: each value in a column that holds it.
        ([INT4, FLOAT8, INT4], "c:double,c__int:int", "c__int c c__int"),
    ],
)
def test_a_column_changes_its_type(kinds: list[int | tuple[int, int]], columns: str, names: str) -> None:
    types = [kind if isinstance(kind, tuple) else (kind, -1) for kind in kinds]
    relations = [relation(1, "t", ("c", *of_type)) for of_type in types]
    merged = merge_columns(None, relations)
    assert merged.simpleString() == f"struct<{columns}>"
    assert [assign_columns(merged, version)[0].name for version in relations] == names.split()
    every = dict.fromkeys(assign_columns(merge_columns(None, [version]), version)[0].dataType for version in relations)
    assert [field.dataType for field in merge_columns(None, relations, widen=False)] == list(every)
    for cut in range(len(relations)):
        assert merge_columns(merge_columns(None, relations[:cut]), relations[cut:]) == merged


def test_what_an_older_program_named_otherwise_goes_on_under_that_name() -> None:
    narrow, wide = (relation(1, "t", ("c", kind)) for kind in (INT4, INT8))
    columns = StructType([StructField("c", IntegerType()), StructField("c__bigint", LongType())])
    assert merge_columns(columns, [wide, narrow]) == columns
    assert [assign_columns(columns, version)[0].name for version in (narrow, wide)] == ["c", "c__bigint"]


def table(columns: str) -> Relation:
    """Return a description of columns "name" or "name:type id", of which the catalog is told as "name=number"."""
    pairs = [column.partition("=")[0].partition(":") for column in columns.split()]
    return relation(1, "t", *((name, int(kind or INT4)) for name, _, kind in pairs))


def catalog(columns: str) -> list[dict[str, Any]]:
    """Return what the catalog says of columns "name=number"; "name=number!" is filled, "name=number'text" has text in old rows."""
    found = []
    for column, text in zip(table(columns).columns, columns.split(), strict=True):
        number, _, missing = text.partition("=")[2].partition("'")
        facts = {"number": int(number.rstrip("!")), "missing": missing or None, "is_filled": number.endswith("!")}
        found.append({"name": column.name, "type_id": column.type_id, "type_modifier": -1, **facts})
    return found


@pytest.mark.parametrize(
    ("before", "columns", "now", "numbers"),
    [
        # The catalog is of that time: without the version before, too.
        (None, "id a", "id=1 a=2", [1, 2]),
        (None, "id a", "id=1 b=2", None),
        (None, "id a", "", None),
        ("id=1 a=2", "id b", "id=1 b=2", [1, 2]),
        ("id=1 a=2", "id a", "id=1 a=3", [1, 3]),
        # It is later: what comes in between is found where there is one way to it.
        ("id=1 a=2", "id b", "id=1 b=2 c=3", [1, 2]),
        ("id=1 a=2", "id b c", "id=1 b=2 c=3 d=4", [1, 2, 3]),
        ("id=1 a=2 b=3", "id a", "id=1 a=2 c=4", [1, 2]),
        ("id=1 a=2 b=3", "id b", "id=1 a=2 b=5", None),
        ("id=1 a=2 b=3", "id b a", "id=1 b=2 a=3 c=4", [1, 2, 3]),
        # Under a name, or of a type, that neither has; or there are two ways.
        ("id=1 a=2", "id x", "id=1 b=2 c=3", None),
        ("id=1 a=2", "id b:25", "id=1 b=2 c=3", None),
        ("id=1 a=2", "id a", "id=1 a=3 b=4", None),
        # A column that is in both was there in between.
        ("id=1 a=2 b=3", "id a", "id=1 a=2 b=3 c=4", None),
    ],
)
def test_numbers_of_columns(before: str | None, columns: str, now: str, numbers: list[int] | None) -> None:
    known = None
    if before is not None:
        facts = numbered(table(before), catalog(before), None)
        assert facts is not None
        known = table(before), facts
    found = numbered(table(columns), catalog(now), known)
    assert (None if found is None else [fact.number for fact in found]) == numbers


@pytest.mark.parametrize(
    ("before", "after", "fills", "unknown"),
    [
        ("id=1 a=2", "id=1 a=2", [], []),
        ("id=1 a=2", "id=1 b=2", [Fill("b", "a")], []),
        ("id=1 a=2 b=3", "id=1 b=2 a=3", [Fill("b", "a"), Fill("a", "b")], []),
        ("id=1 a:23=2", "id=1 b:20=2", [Fill("b", "a")], []),
        ("id=1 a:25=2", "id=1 b:23=2", [], ["b"]),
        ("id=1 a:25=2", "id=1 a:23=2", [], []),
        ("id=1", "id=1 a=2", [], []),
        ("id=1", "id=1 a=2'7", [Fill("a", value="7")], []),
        ("id=1", "id=1 a=2!", [], ["a"]),
        # Dropped and added again: not what was there before.
        ("id=1 a=2", "id=1 a=3", [Fill("a")], []),
        ("id=1 a=2", "id=1 a=3'7", [Fill("a", value="7")], []),
        ("id=1 a=2", "id=1 a=3!", [Fill("a")], ["a"]),
        ("id=1 a=2", "id=1", [], []),
    ],
)
def test_what_rows_from_before_have(before: str, after: str, fills: list[Fill], unknown: list[str]) -> None:
    versions = [SchemaVersion(1, 0, table(text), numbered(table(text), catalog(text), None)) for text in (before, after)]
    columns = merge_columns(None, [version.relation for version in versions])
    assert fills_between(versions[0], versions[1], columns) == (tuple(fills), unknown)
    nobody_knows = SchemaVersion(2, 0, versions[1].relation, None)
    names = [column.name for column in versions[1].relation.columns]
    new = [name for name in names if name not in before]
    assert fills_between(versions[0], nobody_knows, columns) == ((), new)
    # Where an earlier version had them, rows may still have values: they are another column's.
    assert {fill.column for fill in fills_between(versions[0], versions[1], columns, new)[0]} >= set(new)
    assert fills_between(versions[0], nobody_knows, columns, new) == (tuple(map(Fill, new)), new)


class History:
    """What is asked of a schema history that has one version."""

    def __init__(self, version: SchemaVersion) -> None:
        self._version = version

    def version(self, _relation_id: int, place: tuple[int, int]) -> SchemaVersion | None:
        return self._version if self._version.place <= place else None

    def step(self, _use: Use) -> None:
        return None


@pytest.mark.parametrize(
    ("at_snapshot", "after", "fills"),
    [
        # Renamed before the snapshot: its rows have the new name already.
        ("id=1 b=2", "id=1 b=2", []),
        # Renamed after it, and two that change places.
        ("id=1 a=2", "id=1 b=2", [Fill("b", "a")]),
        ("a=1 b=2", "b=1 a=2", [Fill("b", "a"), Fill("a", "b")]),
        # Dropped and added anew under the same name.
        ("id=1 a=2", "id=1 a=3", [Fill("a")]),
        ("id=1 a=2", "id=1 a=3!", [Fill("a")]),
        # Added after it: nothing is to be done where there is no default.
        ("id=1", "id=1 a=2", []),
        ("id=1", "id=1 a=2'7", [Fill("a", value="7")]),
    ],
)
def test_what_a_snapshots_rows_have(tmp_path: Path, at_snapshot: str, after: str, fills: list[Fill]) -> None:
    """A late one's rows come when the stream has passed it, and has settled what rows from before a later change have."""
    relations = [table(at_snapshot), table(after)]
    columns = merge_columns(None, relations)
    numbers = [int(part.partition("=")[2][:1]) for part in at_snapshot.split()]
    names = [field.name for field in assign_columns(columns, relations[0])]
    snapshot = replace(version(20, 0, ID), snapshot=tuple(zip(numbers, names, strict=True)))
    later = SchemaVersion(30, 2, relations[1], numbered(relations[1], catalog(after), None))
    known = [version(10, 0, ID), replace(version(30, 2, ID), fills=(Fill("b", "x"),))]
    found = insert_snapshot(known, snapshot, cast("SchemaHistory", History(later)), columns, "exact")
    assert [each.place for each in found] == [(10, 0), (20, 0), (30, 2)]
    assert found[1:] == [snapshot, replace(known[1], fills=tuple(fills))]
    assert Version.from_json(snapshot.to_json()) == snapshot

    # So is what the first description says that comes after a snapshot in time.
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    versions = TableVersions(warehouse, cast("SchemaHistory", History(later)), PublishedTables(None))
    noted = versions.record_new(Table("public", "t"), [snapshot], [Use(30, 2, relations[1], 30)], 20, columns, columns)
    assert noted[-1].fills == tuple(fills)


class Renamed(History):
    """That of a table which had other columns under another name, of which the changelog of this one knows nothing."""

    def step(self, _use: Use) -> Any:
        facts = [
            SchemaVersion(n, 0, table(text), numbered(table(text), catalog(text), None))
            for n, text in ((20, "id=1"), (30, "id=1 a=3"))
        ]
        return tuple(facts)

    def before(self, _version: SchemaVersion) -> list[SchemaVersion]:
        return [SchemaVersion(10, 0, table("id a elsewhere"), None)]


def test_a_column_that_the_table_had_under_another_name(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    history = Renamed(SchemaVersion(30, 0, table("id a"), None))
    versions = TableVersions(warehouse, cast("SchemaHistory", history), PublishedTables(None))
    columns = merge_columns(None, [table("id a")])
    noted = versions.record_new(Table("public", "t"), [version(20, 0, ID)], [Use(30, 0, table("id a"), 30)], 20, columns, columns)
    assert noted[-1].fills == (Fill("a"),)


@pytest.mark.parametrize(
    ("known", "primary_key", "expected", "is_repeated"),
    [
        ([], ["id"], ID, False),
        ([version(10, 0, CODE)], ["id"], ID, False),
        # The launcher has only repeated what was said before.
        ([version(10, 0, CODE)], ["id"], CODE, True),
        ([version(10, 0, NONE)], ["id"], NONE, True),
        ([version(10, 0, CODE, 2)], ["id"], ID, True),
        ([], ["id"], ID, True),
        # It has got a column since, which is the key now; nobody knows what was before, or somebody does.
        ([], ["later"], NONE, False),
        ([version(10, 0, ID)], ["later"], ID, False),
        ([version(10, 0, ("gone",))], ["later"], NONE, False),
        ([version(10, 0, ID, 2)], ["later"], NONE, False),
        # It has been dropped, or has no key any more.
        ([version(10, 0, ID)], None, ID, False),
        ([version(10, 0, ID)], [], NONE, False),
    ],
)
def test_a_key_that_the_catalog_has_of_another_time(
    tmp_path: Path, known: list[Version], primary_key: list[str] | None, expected: tuple[str, ...], is_repeated: bool
) -> None:
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    described = [] if primary_key is None else [{"relation_id": 1, "primary_key": primary_key}]
    full = replace(table("id code"), replica_identity="f")
    columns = merge_columns(None, [full])
    history = cast("SchemaHistory", History(SchemaVersion(1, 0, full, None)))
    versions = TableVersions(warehouse, history, PublishedTables(lambda: described))
    noted = versions.record_new(Table("public", "t"), known, [Use(20, 0, full, 20, is_repeated)], 15, None, columns)
    assert noted[-1].key == expected


def test_a_key_is_asked_for_once_in_a_micro_batch() -> None:
    keys = iter(["id", "code"])
    published = PublishedTables(lambda: [{"relation_id": 1, "primary_key": [next(keys)], "columns": catalog("id=1 code=2")}])
    found = []
    for _ in range(2):
        published.begin_batch()
        found += [published.primary_key(table("id code")) for _ in range(2)]
    assert found == [ID, ID, CODE, CODE]


KINDS = ("full",)


def transaction(statements: str) -> str:
    return f"begin; {statements}; commit"


MADE = [
    "create table mark (n int)",
    "create schema other",
    *(
        statement.format(t=f"grows_{which}")
        for which in KINDS
        for statement in (
            """create table {t} (id smallint primary key, other int not null, n int, f real, p numeric(8, 2), d date, i int,
               plain text)""",
            "alter table {t} alter plain set storage external",
            f"alter table {{t}} replica identity {which}",
        )
    ),
    "create table narrowed (id bigint primary key, n bigint, f double precision, t text)",
    "create table columned (id int primary key, a int, b text, c date, gone text)",
    "alter table columned alter b set storage external",
    "create table rekeyed (id int primary key, code text not null unique, v int)",
    "create table turned (id int primary key, code text not null unique, v int)",
    "create table silent (id int primary key, code text not null unique, v int)",
    "alter table silent replica identity full",
    "create table deferred (id int primary key deferrable, v int)",
    "alter table deferred replica identity full",
    "create table late (x int)",
    "alter table late replica identity full",
    "create table remade (id int primary key, a text)",
    "create table moved (id int primary key, a text)",
]

BEFORE = [
    *(
        f"""insert into grows_{which} select i, i, 1000 * i, 0.1 * i, 1.1 * i, '2024-02-29'::date + i, i, repeat('x', 5000)
            from generate_series(1, 9) i"""
        for which in KINDS
    ),
    "insert into narrowed select i, i, i / 2.0, i::text from generate_series(1, 5) i",
    """insert into columned select i, i, repeat('x', 5000), case i when 2 then '0044-03-15 BC' else '2024-02-29'::date end, 'gone'
       from generate_series(1, 5) i""",
    "insert into rekeyed select i, 'c' || i, i from generate_series(1, 5) i",
    "insert into turned select i, 'c' || i, i from generate_series(1, 5) i",
    "insert into silent select i, 'c' || i, i from generate_series(1, 5) i",
    "insert into deferred select i, i from generate_series(1, 9) i",
    "insert into late values (1), (2)",
    "insert into remade values (1, 'of the first table'), (2, 'too')",
    "insert into moved values (1, 'before'), (2, 'before')",
]

DURING = [
    *(
        statement.format(t=f"grows_{which}")
        for which in KINDS
        for statement in (
            transaction(
                """update {t} set n = n + 1 where id = 1; delete from {t} where id = 2;
                alter table {t} alter id type bigint, alter n type bigint, alter f type double precision,
                    alter p type numeric(20, 4), alter d type timestamp, alter i type numeric(12, 2);
                update {t} set n = 1::bigint << 40, f = 0.1, p = 123456789.1234, d = '2024-01-01 01:02:03.5', i = 1.5 where id = 3;
                insert into {t} (id, other, n, f, i) values (1000000, 100, 1, 1.5, 2.5);
                update {t} set id = 2000000 where id = 4"""
            ),
            "update {t} set d = 'infinity', p = 'NaN' where id = 5",
            "delete from {t} where id in (5, 6)",
            "update {t} set n = 3 where id = 3",
            "alter table {t} alter n type int",
            "update {t} set n = 7 where id = 7",
        )
    ),
    "alter table narrowed alter n type smallint, alter f type int, alter t type int using t::int",
    "update narrowed set n = 10, f = 11, t = 12 where id = 1",
    "insert into narrowed values (6, 6, 6, 6)",
    # New names, names that change places, and columns with something in rows that nobody wrote.
    transaction(
        """insert into columned values (6, 6, 'b6', '2024-01-01', 'gone'); alter table columned rename b to bb;
        update columned set a = 10 where id = 1; alter table columned add d int default 7, add e text;
        insert into columned values (7, 7, 'b7', null, 'gone', 8, 'e')"""
    ),
    # The key, between two rows; what was one row by the old key are two by the new one.
    transaction(
        """update rekeyed set v = 10 where id = 1; alter table rekeyed drop constraint rekeyed_pkey;
        alter table rekeyed add primary key (code); insert into rekeyed values (1, 'again', 1);
        update rekeyed set v = 20 where code = 'c1'; delete from rekeyed where code = 'c2';
        update rekeyed set code = 'new' where code = 'c3'"""
    ),
    "update rekeyed set id = 7 where code = 'again'",
    # The same where the stream does not tell the key: its description is sent again, and is the one before.
    "alter table silent drop constraint silent_pkey",
    "alter table silent add primary key (code)",
    "insert into silent values (1, 'again', 1)",
    "update silent set id = 1, v = 40 where code = 'c4'",
    "delete from silent where code = 'c1'",
    # Rows that have the same key for a moment, which so is none.
    "update deferred set id = 10 - id",
    # Identities, one after the other.
    transaction(
        """update turned set v = 1 where id = 1; alter table turned replica identity full; update turned set v = 2 where id = 2;
        alter table turned replica identity using index turned_code_key; update turned set code = 'x3' where id = 3;
        alter table turned replica identity default; update turned set id = 40 where id = 4"""
    ),
    "alter table turned replica identity full",
    "update turned set v = 5, id = 50 where id = 5",
    transaction(
        """insert into remade values (3, 'dropped too'); drop table remade; create table remade (code text primary key, b int);
        insert into remade values ('of the second table', 1)"""
    ),
    # A key that what was written before can't have.
    "alter table late add id int generated always as identity primary key",
    "update late set x = 10 where id = 1",
    "insert into late values (3)",
    # A new table, whose key the stream does not tell.
    transaction(
        """create table added (id int primary key, a text); alter table added replica identity full;
        insert into added values (1, 'a'); alter table added add b int default 5; insert into added values (2, 'b', 6)"""
    ),
    "update added set a = 'changed' where id = 1",
    "alter table moved rename to renamed",
    "alter table renamed set schema other",
    "update other.renamed set a = 'after' where id = 1",
]

AFTER = [
    "alter table columned rename a to x",
    "alter table columned rename d to a",
    "alter table columned rename x to d",
    "alter table columned add w int default random()",  # writes the rows anew
    "alter table columned drop gone, add gone text default 'late', add noted timestamp default '2024-01-01 12:00'",
    "update columned set c = null where id = 3",
    "insert into columned (id) values (8)",
    # The same name again, after a change without it: what rows have from before is another column's.
    "alter table columned drop e",
    "update columned set c = null where id = 8",
    "alter table columned add e text",
    "update columned set e = 'new' where id = 8",
]


GROWN = "struct<id:bigint,other:int,n:bigint,f:double,p:decimal(20,4),d:timestamp_ntz,i:decimal(12,2),plain:string>"
COLUMNS = {
    "rekeyed": ("id", "code", "v"),
    "turned": ("id", "code", "v"),
    "silent": ("id", "code", "v"),
    "remade": ("code", "b"),
    "added": ("id", "a", "b"),
}


def history_of(spark: Any, warehouse: Path) -> list[tuple[Any, ...]]:
    """Return the versions in order, with of each column its name, its type and whether it is part of the key."""
    rows = (
        changelogs_of(spark, Warehouse.existing(warehouse)).read(SCHEMA_HISTORY).orderBy("_cdc_end_lsn", "_cdc_ordinal").collect()
    )
    names = ("table_schema", "table_name", "relation_id", "replica_identity", "_cdc_epoch", "_cdc_end_lsn", "_cdc_ordinal")
    return [(*(row[name] for name in names), [(c["name"], c["type"], c["is_key"]) for c in row["columns"]]) for row in rows]


@pytest.mark.spark
def test_tables_change_under_a_running_pipeline(
    database: postgres.Database, spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    road = Road(database, spark, tmp_path)
    road.execute(*MADE)
    config = LauncherConfig(
        slot=road.slot,
        staging=road.staging,
        publications=(road.publication,),
        connection=("-d", database.dsn),
        create_slot=True,
        seal=SealPolicy(seal_interval_s=0.2),
    )
    with Launcher(config):
        until(lambda: road.staging.exists() and bool(list_epochs(road.staging)), deadline_s=SPARK_DEADLINE_S)
        register_reader(road.staging, "test", Position(0, 0))
        describe = _Catalog(config, threading.Event()).describe
        with Pipeline(spark, road.staging, road.warehouse, describe=describe, trigger_interval_s=0.2) as pipeline:
            for wave in (BEFORE, DURING, AFTER):
                road.execute(*wave)
                end = LSN.parse(road.query("select pg_current_wal_insert_lsn()::text")[0][0])
                road.execute("insert into mark values (1)")
                until(lambda end=end: not pipeline.wait(0.01) and pipeline.progress.position.lsn >= end, deadline_s=600)
    streamed = caplog.text
    Pipeline(spark, road.staging, tmp_path / "parquet", format="parquet", describe=describe).process_available()

    for which in KINDS:
        road.assert_equal(f"grows_{which}", "id", "other", "n", "f", "p", "d", "i", "plain")
        rows, changes = road.replica(f"public.grows_{which}"), road.changelog("public", f"grows_{which}")
        assert rows.drop("_cdc_exact").schema.simpleString() == GROWN
        assert changes.schema["_cdc_old"].dataType.simpleString() == GROWN
        found = (
            changes.orderBy("_cdc_end_lsn", "_cdc_ordinal").where("_cdc_op = 'update'").select("id", "n", "_cdc_exact").collect()
        )
        assert [tuple(row) for row in found] == [
            (1, 1001, {}), (3, 1 << 40, {}), (2000000, 4000, {}), (5, 5000, {"p": "NaN", "d": "infinity"}), (3, 3, {}), (7, 7, {}),
        ]  # fmt: skip
    old = (
        road.changelog("public", "grows_full").where("_cdc_op = 'update' and id = 3").selectExpr("_cdc_old.n", "string(_cdc_old.f)")
    )
    assert sorted(map(tuple, old.collect())) == [(3000, "0.30000001192092896"), (1 << 40, "0.1")]

    road.assert_equal("columned", "id", "a", "bb", "d", "e", "gone", "noted")
    exact = road.replica("public.columned").where("c is null").select("id", "_cdc_exact").collect()
    assert {row["id"]: row["_cdc_exact"] for row in exact} == {2: {"c": "0044-03-15 BC"}, 3: None, 7: None, 8: None}
    rows = road.replica("public.narrowed").where("id in (1, 5, 6)").selectExpr("id", "n", "f", "t", "f__int", "t__int").collect()
    assert sorted(map(tuple, rows)) == [(1, 10, None, None, 11, 12), (5, 5, 2.5, "5", None, None), (6, 6, None, None, 6, 6)]
    for warehouse in (road.warehouse, tmp_path / "parquet"):
        for name in ("rekeyed", "turned", "silent", "remade", "added"):
            road.assert_equal(name, *COLUMNS[name], warehouse=warehouse)
    assert sorted(map(tuple, road.replica("public.late").collect())) == [(3, 3), (10, 1)]
    rows = road.replica("other.renamed").collect()
    assert [tuple(row) for row in rows] == [(1, "after")]

    assert "table public.deferred has no key: it has a changelog and no replica" in streamed
    assert not delta_log.exists(Warehouse.existing(road.warehouse).replica(Table("public", "deferred")))

    assert "were there already" not in streamed
    told = set(re.findall(r"table (\S+) has (new columns: [\w, ]+)|column (\w+): its new|(\S+ was renamed from [\w.]+):", streamed))
    assert {"".join(groups) for groups in told} == {
        "public.addednew columns: b", "public.columnednew columns: w", "public.latenew columns: id",
        "f", "t", "other.renamed was renamed from public.moved",
    }  # fmt: skip
    history = history_of(spark, road.warehouse)
    assert [(version[3], version[7]) for version in history if version[1] == "rekeyed"] == [
        ("default", [("id", "integer", True), ("code", "text", False), ("v", "integer", False)]),
        ("default", [("id", "integer", False), ("code", "text", True), ("v", "integer", False)]),
    ]
    assert [version[3] for version in history if version[1] == "turned"] == ["default", "full", "index", "default", "full"]
    assert len({version[4:7] for version in history}) == len(history)
    assert history_of(spark, tmp_path / "parquet") == history
