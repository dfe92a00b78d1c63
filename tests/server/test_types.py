"""PostgreSQL's values in Spark's types, compared with the servers' own output."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import postgres
import pytest
from psycopg import errors, sql
from pyspark.sql.types import (
    ArrayType,
    DecimalType,
    StructType,
)

from spark_sink.schema.casts import is_printed_otherwise
from spark_sink.schema.types import (
    as_typed,
    assign_columns,
    merge_columns,
    split_schema,
    typed_schema,
)
from spark_sink.source.slices import Slice, read_relations
from spark_sink.source.typed import TypedReader
from support.logical_stream import peek_records
from support.segments import encode, relation
from support.typed_values import INFINITE_NUMERICS, NEWER_TYPES, STRING, TYPES

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg


SETTINGS = "-c TimeZone=UTC -c DateStyle=ISO -c bytea_output=hex -c extra_float_digits=3 -c IntervalStyle=postgres"


def raw(conn: psycopg.Connection, query: sql.SQL | sql.Composed, *args: object) -> list[tuple[str | None, ...]]:
    """Return a query's values as the types' output functions print them."""
    result = conn.execute(query, args).pgresult
    assert result is not None
    cells = [[result.get_value(row, column) for column in range(result.nfields)] for row in range(result.ntuples)]
    return [tuple(None if cell is None else bytes(cell).decode() for cell in row) for row in cells]


def literal(value: object) -> str:
    match value:
        case bool():
            return "t" if value else "f"
        case bytes():
            return "\\x" + value.hex()
        case Decimal():
            return f"{value:f}"
        case float():
            return repr(value)
        case list():
            return "{" + ",".join("NULL" if each is None else quoted(literal(each)) for each in value) + "}"
        case _:
            return str(value)


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@pytest.fixture
def typed(tmp_path: Path, pg: postgres.Cluster) -> Any:
    """Run SQL on a server. Return the resulting rows as Python values, with their schema."""
    with pg.database() as database, database.connect(options=SETTINGS) as conn:
        conn.execute("create publication p for all tables")
        conn.execute("select pg_create_logical_replication_slot('types', 'pgoutput')")

        def run(*statements: str, table: str = "t", types: str = "exact") -> tuple[StructType, list[dict[str, Any]]]:
            for statement in statements:
                conn.execute(statement)
            records = peek_records(conn, "types", "p")
            path = tmp_path / "0000000000000000-FFFFFFFFFFFFFFFF.cdc"
            path.write_bytes(encode(records))
            versions = [r for r in read_relations(path) if r.name == table]
            schema = typed_schema(merge_columns(None, (as_typed(version, types) for version in versions)))
            reader = TypedReader(Slice(str(path), 1, 0, 2**64 - 1), {("public", table): None}, schema, types)
            return schema, [row for batch in reader.read() for row in batch.to_pylist(maps_as_pydicts="strict")]

        yield conn, run
        conn.execute("select pg_drop_replication_slot('types')")


def test_values_of_every_type_round_trip(typed: Any, pg: postgres.Cluster) -> None:
    conn, run = typed
    types = [*TYPES, *NEWER_TYPES]
    names = [f"c{number}" for number in range(len(types))]
    declared = ", ".join(f"{name} {type_name}" for name, (type_name, *_) in zip(names, types, strict=True))
    inserts = ["insert into t(id) values (0)"]
    expected: dict[int, tuple[str, bool]] = {}
    for name, (_, _, fit, unfit) in zip(names, types, strict=True):
        for value in [*fit, *unfit]:
            expected[len(inserts)] = (name, value in fit)
            inserts.append(f"insert into t(id, {name}) values ({len(inserts)}, {sql.Literal(value).as_string(conn)})")
    schema, rows = run(f"create table t (id int primary key, {declared})", *inserts)

    for name, (type_name, data_type, *_) in zip(names, types, strict=True):
        assert schema[name].dataType == data_type, type_name
    assert all(rows[0][name] is None for name in names)
    types_by_name = dict(zip(names, (type_name for type_name, *_ in types), strict=True))
    assert len(rows) == len(inserts)
    for row in rows[1:]:
        name, fits = expected[row["id"]]
        type_name = types_by_name[name]
        ((text,),) = raw(conn, sql.SQL("select {} from t where id = {}").format(sql.Identifier(name), row["id"]))
        if not fits:
            assert (row[name], row["_cdc_exact"]) == (None, {name: text}), type_name
        elif schema[name].dataType == STRING:
            assert type(row[name]) is str
            assert (row[name], row["_cdc_exact"]) == (text, {}), type_name
        else:
            assert row["_cdc_exact"] == {}, (type_name, text)
            back = raw(conn, sql.SQL(f"select %s::{type_name}"), literal(row[name]))
            assert back == [(text,)], type_name


COERCIBLE = {
    "bit": ["101"],
    "varbit": ["101"],
    "varchar": ["a", "a "],
    "text": ["a", "a "],
    "cidr": ["10.0.0.0/8", "10.0.0.1/32"],
    "int4": ["7", "-1"],
    "oid": ["7", "4294967295"],
    "xml": ['<?xml version="1.0" encoding="UTF-8"?><a/>'],
    "regclass": ["pg_class"],
    "regcollation": ['"C"'],
    "regconfig": ["simple"],
    "regdictionary": ["simple"],
    "regnamespace": ["pg_catalog"],
    "regoper": ["||/"],
    "regoperator": ["||/(NONE,double precision)"],
    "regproc": ["now"],
    "regprocedure": ["now()"],
    "regrole": ["postgres"],
    "regtype": ["integer"],
}
"""Values of each type that PostgreSQL takes for another one without a look at them."""


def test_each_type_without_a_rewrite_keeps_its_texts_or_is_known(any_pg: postgres.Cluster) -> None:
    """Values stay as they are on disk. The stream does not tell that they have other texts, so `is_printed_otherwise` must know."""
    with any_pg.database() as database, database.connect() as conn:
        conn.prepare_threshold = None  # the same query gives another type after each command
        pairs = conn.execute(
            "select s.typname, s.oid::int8, t.typname, t.oid::int8 from pg_cast c join pg_type s on s.oid = c.castsource"
            " join pg_type t on t.oid = c.casttarget where c.castmethod = 'b'"
            " and s.typname !~ '^pg_'"  # nobody can write a value of these
            " order by s.typname, t.typname"
        ).fetchall()
        looked_at = 0
        for old, old_id, new, new_id in pairs:
            try:
                conn.execute(sql.SQL('create table t (c pg_catalog."{}")').format(sql.SQL(old)))
                for value in COERCIBLE[old]:
                    conn.execute("insert into t values (%s)", (value,))
            except errors.FeatureNotSupported:  # a server that was built without XML
                assert old == "xml"
                conn.execute("drop table t")
                continue
            query = sql.SQL("select c, pg_relation_filenode('t') from t order by ctid")
            before = raw(conn, query)
            conn.execute(sql.SQL('alter table t alter c type pg_catalog."{}"').format(sql.SQL(new)))
            after = raw(conn, query)
            conn.execute("drop table t")
            versions = [relation(1, "t", ("c", each, -1)) for each in (old_id, new_id)]
            columns = merge_columns(None, versions)
            is_moved = len({assign_columns(columns, version)[0].name for version in versions}) > 1
            is_same = [text for text, _ in before] == [text for text, _ in after]
            assert is_same or is_printed_otherwise(old_id, new_id, is_text=True), (old, new)
            if not is_moved:  # otherwise `retyped` names it
                has_file = {file for _, file in before} == {file for _, file in after}
                assert (has_file, is_same) == (True, not is_printed_otherwise(old_id, new_id)), (old, new)
                looked_at += 1
        assert looked_at > 10


def test_infinite_numeric_is_text(typed: Any) -> None:
    _, run = typed
    _, rows = run("create table t (id numeric)", *(f"insert into t values ('{text}')" for text in INFINITE_NUMERICS))
    assert [row["id"] for row in rows] == INFINITE_NUMERICS


NUMERICS = {
    "numeric": (DecimalType(38, 18), ["0", "1.50", "-99999999999999999999.000000000000000001", "1.5" + "0" * 20],
                ["NaN", "Infinity", "100000000000000000000", "0.0000000000000000001", "1e40"]),
    "numeric(12,2)": (DecimalType(12, 2), ["1.50"], ["NaN"]),
    "numeric(40,2)": (DecimalType(38, 2), ["9" * 36 + ".10"], ["1" + "0" * 37, "NaN"]),
    "numeric(50,30)": (DecimalType(38, 18), ["1.5"], ["0.0000000000000000001"]),
    "numeric(5,-2)": (DecimalType(7, 0), ["1234567", "9999900"], ["NaN"]),
    "numeric(3,5)": (DecimalType(5, 5), ["0.00999", "-0.00001"], ["NaN"]),
    "numeric[]": (ArrayType(DecimalType(38, 18)), ["{1.50,NULL,-2}", "{}"], ["{1,NaN}", "{{1.50}}"]),
}  # fmt: skip


def test_native_numerics_are_decimals(typed: Any) -> None:
    """The number is the same. Its trailing zeros are lost."""
    conn, run = typed
    kinds = list(NUMERICS)
    declared = ", ".join(f"c{number} {kind}" for number, kind in enumerate(kinds))
    inserts, expected = [], []
    for number, kind in enumerate(kinds):
        _, fit, unfit = NUMERICS[kind]
        for value in [*fit, *unfit]:
            expected.append((f"c{number}", kind, value in fit))
            inserts.append(f"insert into t (id, c{number}) values ({len(expected)}, '{value}')")
    schema, rows = run(f"create table t (id int primary key, {declared})", *inserts, types="native")
    assert [schema[f"c{number}"].dataType for number in range(len(kinds))] == [NUMERICS[kind][0] for kind in kinds]
    for row, (name, kind, fits) in zip(rows, expected, strict=True):
        query = sql.SQL("select {0}, {0} is not distinct from %s::{1} from t where id = {2}")
        (text, is_equal), *_ = raw(
            conn, query.format(sql.Identifier(name), sql.SQL(kind), row["id"]), row[name] and literal(row[name])
        )
        assert (is_equal, row["_cdc_exact"]) == (("t", {}) if fits else ("f", {name: text})), (kind, text)


def test_types_that_are_not_built_in_are_text(typed: Any) -> None:
    conn, run = typed
    values = {
        "mood": "so so", "price": "1.50", "pair": '(1,"x y")', "mood[]": '{"so so"}', "list": "{1,NULL}", "price[]": "{1.50}",
        "pair[]": '{"(1,)"}', "span": "[0.1,2.5)",
    }  # fmt: skip
    if conn.execute("select from pg_available_extensions where name = 'hstore'").fetchone():
        conn.execute("create extension hstore")
        values |= {"hstore": '"a"=>"b c", "n"=>NULL'}
    names = [f"c{number}" for number in range(len(values))]
    declared = ", ".join(f"{name} {kind}" for name, kind in zip(names, values, strict=True))
    schema, rows = run(
        "create type mood as enum ('so so')",
        "create domain price as numeric(8,2)",
        "create domain list as int[]",
        "create type pair as (a int, b text)",
        "create type span as range (subtype = float8)",
        f"create table t (id int primary key, {declared})",
        f"insert into t values (1, {', '.join(sql.Literal(value).as_string(conn) for value in values.values())})",
    )
    assert [schema[name].dataType for name in names] == [STRING] * len(names)
    assert [rows[0][name] for name in names] == list(values.values())


def test_changes_of_every_kind(typed: Any) -> None:
    """Keys, unchanged TOAST values, identities, truncates: the server's messages, and the rows made of them."""
    _, run = typed
    big = "x" * 5000
    _, rows = run(
        "create table t (id int primary key, big text, at timestamptz)",
        "alter table t alter big set storage external",
        f"insert into t values (1, '{big}', 'infinity')",
        "update t set at = '2024-01-01 00:00:00+00'",
        "update t set id = 2",
        "alter table t replica identity full",
        "update t set at = 'infinity'",
        "update t set at = null",
        "delete from t",
        "truncate t",
    )
    seen = [
        (r["_cdc_op"], r["id"], r["big"] and len(r["big"]), r["at"], r["_cdc_unchanged"], r["_cdc_exact"],
         r["_cdc_old"] and {k: v if k != "big" else v and len(v) for k, v in r["_cdc_old"].items()})
        for r in rows
    ]  # fmt: skip
    new_year = datetime(2024, 1, 1, tzinfo=UTC)
    assert seen == [
        ("insert", 1, 5000, None, [], {"at": "infinity"}, None),
        ("update", 1, None, new_year, ["big"], {}, None),
        ("update", 2, None, new_year, ["big"], {}, {"id": 1, "big": None, "at": None}),
        ("update", 2, 5000, None, [], {"at": "infinity"}, {"id": 2, "big": 5000, "at": new_year}),
        ("update", 2, 5000, None, [], {"_cdc_old.at": "infinity"}, {"id": 2, "big": 5000, "at": None}),
        ("delete", 2, 5000, None, [], {}, {"id": 2, "big": 5000, "at": None}),
        ("truncate", None, None, None, [], {}, None),
    ]
    assert len({(r["_cdc_end_lsn"], r["_cdc_ordinal"]) for r in rows}) == len(rows)


def test_ddl_in_one_transaction(typed: Any) -> None:
    """PITFALLS B1: five shapes of a table within a transaction, and a rename after it."""
    conn, run = typed
    conn.execute("create table t (id int primary key, a int, b text, c int)")
    with conn.transaction():
        conn.execute("insert into t values (1, 1, 'one', 11)")
        conn.execute("alter table t add column d int default 7")
        conn.execute("insert into t values (2, 2, 'two', 22)")
        conn.execute("alter table t drop column a")
        conn.execute("insert into t values (3, 'three', 33)")
        conn.execute("alter table t rename b to bb")
        conn.execute("insert into t values (4, 'four', 44)")
        conn.execute("alter table t alter c type text using 'T' || c")
        conn.execute("insert into t values (5, 'five', 'T55')")
    schema, rows = run("alter table t rename to t2", "insert into t2 values (6, 'six', 'T66')")
    assert split_schema(schema)[0].fieldNames() == ["id", "a", "b", "c", "d", "bb", "c__string"]
    assert [{k: v for k, v in row.items() if not k.startswith("_cdc_") and v is not None} for row in rows] == [
        {"id": 1, "a": 1, "b": "one", "c": 11},
        {"id": 2, "a": 2, "b": "two", "c": 22, "d": 7},
        {"id": 3, "b": "three", "c": 33, "d": 7},
        {"id": 4, "bb": "four", "c": 44, "d": 7},
        {"id": 5, "bb": "five", "c__string": "T55", "d": 7},
    ]
    _, rows = run(table="t2")
    assert [(row["id"], row["bb"], row["c"]) for row in rows] == [(6, "six", "T66")]
