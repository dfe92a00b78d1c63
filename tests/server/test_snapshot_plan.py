"""What a snapshot reads, on every server version and without Spark: from the catalog to the files of a chunk."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import postgres
import pyarrow.parquet as pq
import pytest
from faulty_proxy import FaultyProxy
from pyspark.sql.pandas.types import to_arrow_schema

from cdcpipe.errors import CdcpipeError, ConnectionClosedError, SlotDoesNotExistError
from cdcpipe.retry import RetryPolicy
from cdcpipe.sqlstate import WITHHELD
from spark_sink.client.exported import ExportedSnapshot, SnapshotError
from spark_sink.client.prepare import slot_exists
from spark_sink.files.parquet import Layout
from spark_sink.launcher.config import LauncherConfig
from spark_sink.schema.types import assign_columns, merge_columns, typed_schema
from spark_sink.snapshot import chunk
from spark_sink.snapshot import plan as snapshot_plan
from spark_sink.snapshot.chunk import ChunkTask, CopiedTable, select_columns, write_chunk
from spark_sink.snapshot.initial import InitialSnapshot
from spark_sink.snapshot.plan import LockedError, Plan, StaleSnapshotError, TablePlan, conninfo, make_plan, open_snapshot
from spark_sink.source.slices import Slice, read_relations
from spark_sink.source.typed import TypedReader
from spark_sink.warehouse.initial_copy import is_begun
from spark_sink.warehouse.warehouse import Warehouse
from support.logical_stream import peek_records
from support.segments import encode
from support.tcp_options import tcp_options
from support.typed_values import INFINITE_NUMERICS, NEWER_TYPES, TYPES
from support.waiting import until

HOSTILE_SETTINGS = {
    "datestyle": "German",
    "timezone": "Asia/Tokyo",
    "extra_float_digits": "-5",
    "bytea_output": "escape",
    "intervalstyle": "sql_standard",
    "search_path": "public",
    "quote_all_identifiers": "on",
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "default_transaction_deferrable": "on",
}


class Source:
    """A database, its slot, and a snapshot of it."""

    def __init__(self, database: postgres.Database, directory: Path) -> None:
        self.database = database
        self.directory = directory
        self.connection = database.connect()
        self.slot = f"s_{database.name}"[:63]
        self.export: ExportedSnapshot | None = None
        self.publications: tuple[str, ...] = ("p",)

    def sql(self, *statements: str) -> None:
        for statement in statements:
            self.connection.execute(statement)

    def config(self, **changes: Any) -> LauncherConfig:
        made = LauncherConfig(self.slot, self.directory, self.publications, ("-d", self.database.dsn), create_slot=True)
        return replace(made, **changes)

    def take(self) -> ExportedSnapshot:
        self.close()
        self.export = ExportedSnapshot(self.config(), lambda: False, self.directory / "export")
        return self.export

    @property
    def conninfo(self) -> str:
        assert self.export is not None
        return conninfo(self.export.connection, self.export.prepared.server_version)

    def plan(self, chunk_bytes: int = 1 << 20, names: Sequence[str] = ()) -> Plan:
        assert self.export is not None
        return make_plan(self.conninfo, self.export.name, self.publications, chunk_bytes, names)

    def tables(self, chunk_bytes: int = 1 << 20) -> dict[str, TablePlan]:
        return {table.relation.name: table for table in self.plan(chunk_bytes).tables}

    def copied(self, table: TablePlan) -> CopiedTable:
        """Return what the tasks of a table share."""
        assert self.export is not None
        columns = merge_columns(None, [table.relation])
        schema = typed_schema(columns)
        directory = self.directory / table.relation.name
        directory.mkdir(exist_ok=True)
        return CopiedTable(
            connection=self.conninfo,
            snapshot=self.export.name,
            shares=sum(chunk.share for chunk in table.chunks),
            condition=table.condition,
            selects=tuple(select_columns(table.relation)),
            names=tuple(field.name for field in assign_columns(columns, table.relation)),
            types=to_arrow_schema(columns, timezone="UTC"),
            epoch=1,
            lsn=int(self.export.consistent_point),
            time_us=0,
            directory=str(directory),
            layout=Layout(tuple(schema.names), to_arrow_schema(schema, timezone="UTC")),
        )

    def tasks(self, table: TablePlan) -> list[ChunkTask]:
        return [
            ChunkTask(
                chunk,
                number,
                str(self.directory / f"{table.relation.name}-{number}.json"),
                first_ordinal=sum(before.share for before in table.chunks[:number]),
            )
            for number, chunk in enumerate(table.chunks)
        ]

    def rows(self, table: TablePlan) -> list[dict[str, Any]]:
        """Copy a table, and read the written rows."""
        copied = self.copied(table)
        written = [write_chunk(copied, task, lambda _: None) for task in self.tasks(table)]
        found: list[dict[str, Any]] = []
        for each in written:
            rows = pq.read_table(Path(copied.directory) / each.file.name).to_pylist(maps_as_pydicts="strict")
            assert len(rows) == each.rows
            found += rows
        return found

    def close(self) -> None:
        if self.export is not None:
            self.export.close()
            self.export = None


def unpacked(table: TablePlan) -> TablePlan:
    """Return the plan for a table whose rows the server sends one by one."""
    return replace(table, chunks=tuple(replace(chunk, packed_pages=0) for chunk in table.chunks))


@pytest.fixture
def source(pg: postgres.Cluster, tmp_path: Path) -> Iterator[Source]:
    with pg.database() as database:
        made = Source(database, tmp_path)
        try:
            yield made
        finally:
            made.close()
            made.connection.close()


def test_a_chunk_that_spark_has_copied_twice_is_one_file(source: Source) -> None:
    source.sql("create table t (id int primary key)", "insert into t values (1), (2)", "create publication p for table t")
    source.take()
    (table,) = source.plan().tables
    copied, (task,) = source.copied(table), source.tasks(table)
    first, second = (write_chunk(copied, task, lambda _: None) for _ in range(2))
    assert first == second
    assert [path.name for path in Path(copied.directory).iterdir()] == [first.file.name]


def test_a_value_of_any_type_is_the_same_in_snapshot_and_stream(source: Source) -> None:
    kinds = [*TYPES, *NEWER_TYPES, ("numeric", None, INFINITE_NUMERICS, [])]
    values = [(number, value) for number, (_, _, fit, unfit) in enumerate(kinds) for value in [*fit, *unfit]]
    columns = ", ".join(f"c{number} {kind}" for number, (kind, *_) in enumerate(kinds))
    source.sql(
        "create type mood as enum ('so so')",
        "create domain padded as char(5)",
        "create type pair as (a int, b text)",
        f"create table t (id int primary key, m mood, p padded, r pair, ms mood[], {columns})",
        "create publication p for table t",
    )
    source.connection.execute("set timezone = 'UTC'")

    def insert(first_id: int) -> None:
        source.sql(
            f"insert into t (id) values ({first_id})",
            f"insert into t (id, m, p, r, ms) values ({first_id + 1}, 'so so', 'ab', (null, null), '{{so so}}')",
        )
        for number, (column, value) in enumerate(values, first_id + 2):
            source.connection.execute(f"insert into t (id, c{column}) values ({number}, %s)", (value,))

    insert(0)
    role = f"alter role current_user in database {source.database.name}"
    source.sql(*(f"{role} set {name} = '{value}'" for name, value in HOSTILE_SETTINGS.items()))
    source.take()
    with source.connection.transaction(force_rollback=True):  # a deferrable transaction would wait for its end
        source.connection.execute("set transaction isolation level serializable")
        source.connection.execute("set local idle_in_transaction_session_timeout = '20s'")
        source.connection.execute("insert into t (id) values (-1)")
        table = source.tables()["t"]
    assert all(chunk.packed_pages for chunk in table.chunks)
    taken = {row["id"]: row for row in source.rows(table)}
    by_row = {row["id"]: row for row in source.rows(unpacked(table))}
    for number, row in by_row.items():
        assert repr({**row, "_cdc_ordinal": 0}) == repr({**taken[number], "_cdc_ordinal": 0})
    source.close()
    source.sql(f"{role} reset all")
    insert(1000)
    records = peek_records(source.connection, source.slot, "p")
    path = source.directory / "0000000000000000-FFFFFFFFFFFFFFFF.cdc"
    path.write_bytes(encode(records))
    assert list(read_relations(path)) == [table.relation]
    schema = typed_schema(merge_columns(None, [table.relation]))
    reader = TypedReader(Slice(str(path), 1, 0, 2**64 - 1), {("public", "t"): None}, schema)
    streamed = {row["id"]: row for batch in reader.read() for row in batch.to_pylist(maps_as_pydicts="strict")}
    assert len(taken) == len(streamed) == len(values) + 2
    ignored = {"id"} | {name for name in schema.names if name.startswith("_cdc_")} - {"_cdc_exact", "_cdc_unchanged"}
    for number, row in taken.items():
        change = streamed[number + 1000]
        assert (row["_cdc_op"], row["_cdc_old"]) == ("snapshot", None)
        for name in set(row) - ignored:
            assert repr(row[name]) == repr(change[name]), (name, number, kinds[int(name[1:])][0] if name[1:].isdigit() else name)


NULLS = {
    "int4": ["-1985229329", "0"],  # the value that stands for NULL; another one
    "int8": ["-8526495043095935641", "0"],
    "int2": ["-32768", "32767"],
    "float8": ["NaN", "-0"],
    "bool": ["f", "t"],
    "date": ["-infinity", "4713-01-01 BC"],
    "timestamptz": ["-infinity", "infinity"],
    "numeric(18, 3)": ["NaN", "-999999999999999.999"],
    "numeric(3, 3)": ["NaN", "-0.001"],
    "text": ["", "x"],
    "bytea": ["", "x"],
    "char(3)": ["", "x"],
    "inet": ["::1", "10.0.0.0/8"],
}
"""Values of types that could be taken for NULL."""


@pytest.mark.parametrize("kind", NULLS)
def test_what_stands_for_null_is_not_taken_for_it(source: Source, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_row = []
    monkeypatch.setattr(chunk, "_read_rows", lambda copied, task, read=chunk._read_rows: by_row.append(task) or read(copied, task))
    source.sql(f"create table t (id int primary key, v {kind})", "create publication p for table t")
    values = [*NULLS[kind], None, *NULLS[kind]] * 20
    with source.connection.cursor() as cursor:
        cursor.executemany("insert into t values (%s, %s)", list(enumerate(values)))
    source.sql("set timezone = 'UTC'")
    expected = dict(source.connection.execute("select id, format('%s', v) from t where v is not null").fetchall())
    source.take()
    table = source.tables()["t"]
    for plan in (table, unpacked(table)):
        rows = {row["id"]: row for row in source.rows(plan)}
        assert len(rows) == len(values)
        for number, value in enumerate(values):
            row = rows[number]
            assert (row["v"] is None and not row["_cdc_exact"]) == (value is None)
            if row["_cdc_exact"]:
                assert row["_cdc_exact"] == {"v": expected[number]}
    assert len(by_row) == (2 if kind in ("int4", "int8") else 1)
    first, second = ({row["id"]: (row["v"], row["_cdc_exact"]) for row in source.rows(plan)} for plan in (table, unpacked(table)))
    assert repr(first) == repr(second)


def test_a_table_with_values_outside_of_its_rows_is_read_row_by_row(source: Source) -> None:
    source.sql(
        "create table t (id int primary key, v text); alter table t alter v set storage external",
        "create table u (id int primary key, v text)",
        "insert into t select g, repeat('x', 9000) from generate_series(1, 9) g; insert into u select * from t",
        "create publication p for table t, u",
    )
    source.take()
    tables = source.tables()
    assert [any(chunk.packed_pages for chunk in tables[name].chunks) for name in ("t", "u")] == [False, True]
    for table in tables.values():
        assert sorted((row["id"], len(row["v"])) for row in source.rows(table)) == [(number, 9000) for number in range(1, 10)]


@pytest.mark.parametrize("columns", [1, 1200])
def test_tables_of_strange_names_and_many_columns(source: Source, columns: int) -> None:
    name = '"cdcpipe pages"'
    listed = ", ".join(f"first{number} int" for number in range(columns))
    source.sql(
        f"create table {name} (first int primary key, {listed})",
        f"insert into {name} select generate_series(1, 5)",
        f"create publication p for table {name} where (first > 1)",
    )
    source.take()
    (table,) = source.plan().tables
    assert sorted(row["first"] for row in source.rows(table)) == [2, 3, 4, 5]


def test_a_database_of_another_encoding(pg: postgres.Cluster, tmp_path: Path) -> None:
    with pg.database() as database:
        name = f"{database.name}_l1"[:63]
        with pg.connect() as connection:
            connection.execute(f"create database {name} encoding 'LATIN1' locale 'C' template template0")
        other = postgres.Database(pg, name)
        try:
            made = Source(other, tmp_path)
            made.sql("create table t (id int primary key, v text)", "create publication p for table t")
            made.connection.execute("insert into t values (1, %s)", ("Köln",))
            made.take()
            table = made.tables()["t"]
            assert not any(chunk.packed_pages for chunk in table.chunks)
            assert [row["v"] for row in made.rows(table)] == ["Köln"]
            made.close()
            made.connection.close()
        finally:
            other.drop()


def test_every_row_of_the_snapshot_is_read_once(source: Source) -> None:
    source.sql(
        "create table t (id int primary key, v text)",
        "insert into t select g, repeat('x', g % 90) from generate_series(1, 3000) g",
        "create publication p for table t",
    )
    source.take()
    source.sql(
        "update t set v = v || 'y' where id % 3 = 0",
        "delete from t where id % 7 = 0",
        "insert into t select g, 'new' from generate_series(10000, 11000) g",
    )
    table = source.tables(chunk_bytes=16 << 10)["t"]
    assert len(table.chunks) > 10
    rows = source.rows(table)
    assert sorted(row["id"] for row in rows) == list(range(1, 3001))
    assert all(row["v"] == "x" * (row["id"] % 90) for row in rows)
    assert len({row["_cdc_ordinal"] for row in rows}) == len(rows)
    assert source.export is not None
    assert {(row["_cdc_epoch"], row["_cdc_end_lsn"]) for row in rows} == {(1, int(source.export.consistent_point))}


def test_the_published_columns_are_those_of_the_stream(source: Source) -> None:
    source.sql(
        "create table plain (id int primary key, g int generated always as (id * 2) stored, gone text, v text)",
        "alter table plain drop column gone",
        "create table listed (a int, b text not null, c text, primary key (a)); create unique index listed_index on listed (a, b)",
        "alter table listed replica identity using index listed_index",
        "create table whole (id int primary key, v text); alter table whole replica identity full",
        "create table nokey (v text)",
        "create table deferred (id int primary key deferrable, v text); alter table deferred replica identity full",
        "create table root (id int primary key, v text) partition by range (id)",
        "create table part_1 partition of root for values from (0) to (10)",
        "create table part_2 partition of root for values from (10) to (20) partition by list (id)",
        "create table part_22 partition of part_2 for values in (12)",
        "create table other (id int primary key) partition by list (id)",
        "create table other_1 partition of other for values in (1)",
        "create table parent (id int primary key); create table child (more text) inherits (parent)",
        "create publication p for table plain, listed (a, b), whole, nokey, deferred, other, only parent",
        "create publication rooted for table root with (publish_via_partition_root)",
        "create publication leaf for table part_1",
        "insert into root values (1, 'one'), (12, 'twelve'); insert into parent values (1); insert into child values (2, 'x')",
    )
    source.publications = ("p", "rooted", "leaf")
    source.take()
    tables = source.tables()
    assert set(tables) == {"plain", "listed", "whole", "nokey", "deferred", "root", "other_1", "parent"}
    assert {row["id"] for row in source.rows(tables["root"])} == {1, 12}
    assert [row["id"] for row in source.rows(tables["parent"])] == [1]
    for name in tables:
        target = {"root": "root", "other_1": "other"}.get(name, name)
        columns = {"listed": "(a, b)", "nokey": "(v)"}.get(name, "(id)")
        values = {"listed": "(9, 'x')", "nokey": "('x')", "root": "(9)", "other_1": "(1)"}.get(name, "(9)")
        source.sql(f"insert into {target} {columns} values {values}")
    records = peek_records(source.connection, source.slot, "p,rooted,leaf")
    path = source.directory / "0000000000000000-FFFFFFFFFFFFFFFF.cdc"
    path.write_bytes(encode(records))
    described = {relation.name: relation for relation in read_relations(path)}
    for name, table in tables.items():
        assert table.relation == described[name]
    assert tables["whole"].primary_key == ("id",)
    assert tables["nokey"].primary_key == ()
    assert tables["deferred"].primary_key == ()
    assert {name for name, table in tables.items() if not table.is_whole} == {"listed"}


def test_on_other_server_versions(any_pg: postgres.Cluster, tmp_path: Path) -> None:
    """The query on the catalog depends on the version. 14 has neither column lists nor row filters."""
    with any_pg.database() as database:
        made = Source(database, tmp_path)
        made.sql(
            "create table t (id int, v text, g int generated always as (id + 1) stored, primary key (id) include (v))",
            "insert into t values (1, 'x'), (2, null)",
            "create table part (g int generated always as (id % 2) stored, id int, primary key (id, g))",
            "create publication p for table t, part",
        )
        made.take()
        table = made.tables()["t"]
        assert (table.primary_key, table.is_whole) == (("id",), True)
        assert [(column.name, column.is_key) for column in table.relation.columns] == [("id", True), ("v", False)]
        assert [(row["id"], row["v"]) for row in made.rows(table)] == [(1, "x"), (2, None)]
        part = made.tables()["part"]
        assert ([(column.name, column.is_key) for column in part.relation.columns], part.identity) == ([("id", True)], ("id", "g"))
        assert made.plan(names=["public.t"]).tables == (table,)
        made.close()
        made.connection.close()


def test_row_filters_of_several_publications_are_joined_by_or(source: Source) -> None:
    source.sql(
        "create table t (id int primary key); create table u (id int primary key)",
        "insert into t select generate_series(1, 10); insert into u select generate_series(1, 10)",
        "create publication p for table t where (id < 3), u where (id > 5)",
        "create publication q for table t where (id = 7), u",
        # These publish no row.
        "create publication emptied for table t with (publish = 'truncate')",
        "create publication deleted for table t with (publish = 'delete')",
        "create publication filtered for table t where (id = 9) with (publish = 'delete, truncate')",
    )
    source.publications = ("p", "q", "emptied", "deleted", "filtered")
    source.take()
    tables = source.tables()
    assert sorted(row["id"] for row in source.rows(tables["t"])) == [1, 2, 7]
    assert sorted(row["id"] for row in source.rows(tables["u"])) == list(range(1, 11))


@pytest.mark.parametrize(
    "statement",
    [
        "alter table t rename v to w",
        "alter table t drop v",
        "alter table t rename to u",
        "alter table t set schema s",
        "drop table t",
    ],
)
def test_a_table_that_is_altered_is_noticed(source: Source, statement: str) -> None:
    source.sql("create table t (id int primary key, v text); insert into t values (1, 'x')", "create publication p for table t")
    source.sql("create schema s")
    source.take()
    table = source.tables()["t"]
    source.sql(statement)
    with pytest.raises(StaleSnapshotError, match="was altered while it was copied"):
        source.rows(table)


def test_a_table_or_a_partition_that_was_dropped_before_the_plan_ends_only_its_own_copy(source: Source) -> None:
    """The snapshot's catalog still has it, but the server can't tell its size any more. Row filters have no text then, either."""
    source.sql(
        "create table t (id int primary key); insert into t values (1)",
        "create table gone (id int primary key) partition by list (id); create table gone_1 partition of gone for values in (1)",
        "create table filtered (id int primary key, v text)",
        "create table root (id int primary key) partition by list (id)",
        "create table root_1 partition of root for values in (1); create table root_2 partition of root for values in (2)",
        "create publication p for table t, gone, root, filtered where (id > 0) with (publish_via_partition_root)",
    )
    source.take()
    source.sql("drop table gone", "drop table root_1", "drop table filtered")
    tables = source.tables()
    assert [row["id"] for row in source.rows(tables["t"])] == [1]
    assert [len(tables[name].chunks) for name in ("gone", "filtered", "root")] == [1, 1, 2]
    for name in ("gone", "filtered", "root"):
        with pytest.raises(StaleSnapshotError, match="was altered while it was copied"):
            source.rows(tables[name])
    source.take()
    assert {name: len(table.chunks) for name, table in source.tables().items()} == {"root": 1, "t": 1}


OTHER_NAMES = {
    "another table": ["alter table t rename to t_old", "create table t (like t_old)"],
    "another table with other types": ["alter table t rename to t_old", "create table t (id text, price bool)"],
    "a view": ["alter table t rename to t_old", "create view t as select * from t_old"],
    "a table whose first name it was": ["alter table t rename to t_old", "alter table other rename to t"],
    "tables of another schema": ["alter schema s rename to s_old", "create schema s", "create table s.leaf (like s_old.leaf)"],
    "another leaf": ["alter table s.leaf rename to leaf_old", "create table s.leaf partition of root for values in (2)"],
    "another column": ["alter table t rename price to price_cents", "alter table t add price int"],
    "another column of a leaf": ["alter table root rename price to price_cents", "alter table root add price int"],
    "another column in the row filter": ["alter table t rename wanted to w", "alter table t add wanted bool default true"],
}
"""Statements after which the names in a plan belong to another table, or to other columns."""


@pytest.mark.parametrize("statements", OTHER_NAMES.values(), ids=OTHER_NAMES)
def test_what_is_read_is_what_was_planned(source: Source, statements: list[str]) -> None:
    """A query in an old snapshot finds names in today's catalog."""
    source.sql(
        "create table t (id int primary key, dropped int, price int, wanted bool); alter table t drop dropped",
        "alter table t replica identity full; insert into t values (1, 5, true), (2, 6, false)",
        "create table other (id int primary key, price int, wanted bool); insert into other values (9, 9, true)",
        "create schema s; create table root (price int, id int) partition by list (id)",
        "create table s.leaf (id int, gone int, price int); insert into s.leaf values (1, 0, 5); alter table s.leaf drop gone",
        "alter table root attach partition s.leaf for values in (1); alter table root replica identity full",
        "create publication p for table t where (wanted), root with (publish_via_partition_root)",
    )
    source.take()
    tables = source.tables()
    assert [row["price"] for name in ("t", "root") for row in source.rows(tables[name])] == [5, 5]
    for path in source.directory.glob("*.json"):
        path.unlink()
    source.sql(*statements)
    changed = tables["root" if any("leaf" in each or "root" in each for each in statements) else "t"]
    problems = r"another table|columns have other names|.*access to non-system view"
    for table in (changed, unpacked(changed)):
        with pytest.raises(StaleSnapshotError, match=f"was altered while it was copied: ({problems})"):
            source.rows(table)


@pytest.mark.parametrize(
    "statements",
    [
        ("alter table t add w int", "alter table t rename to u", "alter table u rename to t"),
        ("alter table t rename v to w", "alter table t rename w to v", "create table u (like t)", "insert into t values (2, 'y')"),
        ("alter table t detach partition l", "create schema u"),
    ],
)
def test_a_table_that_has_its_names_again_is_read(source: Source, statements: tuple[str, ...]) -> None:
    is_root = "partition" in statements[0]
    source.sql(
        "create table t (id int, v text)" + (" partition by list (id); create table l partition of t default" if is_root else ""),
        "insert into t values (1, 'x')",
        "create publication p for table t with (publish_via_partition_root)",
    )
    source.take()
    table = source.tables()["t"]
    source.sql(*statements)
    assert [(row["id"], row["v"]) for row in source.rows(table)] == [(1, "x")]


@pytest.mark.parametrize("statement", ["truncate t", "alter table t alter v type int using 1", "vacuum full t"])
def test_a_table_that_is_written_anew_is_noticed(source: Source, statement: str) -> None:
    source.sql("create table t (id int primary key, v text); insert into t values (1, 'x')", "create publication p for table t")
    source.take()
    table = source.tables()["t"]
    source.sql(statement)
    with pytest.raises(StaleSnapshotError, match="was rewritten"):
        source.rows(table)
    with pytest.raises(StaleSnapshotError):  # also if it happened between the snapshot and the plan
        source.rows(source.tables()["t"])


def test_the_tables_that_have_the_same_rows(source: Source) -> None:
    source.sql(
        "create schema s; create table s.root (id int) partition by list (id)",
        "create table branch partition of s.root default partition by list (id); create table leaf partition of branch default",
        "create table parent (id int); create table child () inherits (parent); create table grandchild () inherits (child)",
        "create publication p for table s.root, only parent, only grandchild",
        "create publication q for table s.root with (publish_via_partition_root)",
    )
    source.take()
    kin = {name: sorted(map(str, table.relatives)) for name, table in source.tables().items()}
    assert kin == {
        "leaf": ["public.branch", "public.leaf", "s.root"],
        "parent": ["public.parent"],
        "grandchild": ["public.child", "public.grandchild", "public.parent"],
    }
    source.publications = ("q",)
    assert sorted(map(str, source.tables()["root"].relatives)) == ["public.leaf"]


def test_a_table_that_is_locked_is_waited_for_a_moment(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_plan, "_CHUNK_LOCK_TIMEOUT_MS", 100)
    source.sql("create table t (id int primary key); insert into t values (1)", "create publication p for table t")
    source.take()
    table = source.tables()["t"]
    with source.database.connect() as other, other.transaction():
        other.execute("lock table t in access exclusive mode")
        with pytest.raises(
            LockedError, match=rf"^table public\.t is locked exclusively by server process {other.info.backend_pid}$"
        ):
            source.rows(table)
    assert [row["id"] for row in source.rows(table)] == [1]
    with source.database.connect() as other, other.transaction():
        other.execute("reindex index t_pkey")
        with pytest.raises(LockedError, match=r"^index public\.t_pkey is locked exclusively by server process"):
            source.rows(table)


def test_a_table_of_1600_columns_with_dates(source: Source) -> None:
    """A SELECT has room for 1664 expressions. A date has two, because Spark's years end at 9999."""
    kinds = ("date", "timestamp", "timestamptz")
    names = [f"c{number}" for number in range(800)]
    source.sql(
        f"create table t (id int primary key, {', '.join(f'{name} {kinds[number % 3]}' for number, name in enumerate(names))},"
        f" {', '.join(f'i{number} int' for number in range(799))})",
        "insert into t (id, i798) values (0, 7)",
        "insert into t (id, c0, c799) values (1, '2024-02-29', '9999-12-31'), (2, 'infinity', '0044-03-15 BC')",
        "create publication p for table t",
    )
    source.take()
    table = source.tables()["t"]
    nulls, dates, others = sorted(source.rows(unpacked(table)), key=lambda row: row["id"])
    assert (len(table.relation.columns), nulls["i798"], {nulls[name] for name in names}) == (1600, 7, {None})
    assert [(dates[name].year, dates[name].month, dates[name].day) for name in ("c0", "c799")] == [(2024, 2, 29), (9999, 12, 31)]
    assert others["_cdc_exact"] == {"c0": "infinity", "c799": "0044-03-15 00:00:00 BC"}
    assert {others[name] for name in names} == {None}
    assert not dates["_cdc_exact"]


def test_one_chunk_of_a_round_waits_for_a_lock(source: Source) -> None:
    """A lock may come when a thousand chunks are still to be read. If each waited, nobody would hear of the lock for an hour."""
    source.sql("create table t (id int primary key); insert into t values (1)", "create publication p for table t")
    source.take()
    table = source.tables()["t"]
    patient, (task,) = source.copied(table), source.tasks(table)
    assert " -c lock_timeout=5000ms" in patient.connection
    hasty, patient = (
        replace(patient, connection=patient.connection.replace("lock_timeout=5000ms", f"lock_timeout={limit}"))
        for limit in ("100ms", "1h")
    )
    with source.database.connect() as other, other.transaction():
        other.execute("lock table t in access exclusive mode")
        for number in (1, 2):
            for copied in (hasty, patient):
                with pytest.raises(LockedError):
                    write_chunk(copied, replace(task, round=number), lambda _: None)
    assert write_chunk(patient, replace(task, round=2), lambda _: None).rows == 1


def test_a_later_copy_of_a_table_waits_for_locks_again(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark keeps its Python workers. In one that had waited for the copy before, a lock of milliseconds counted as a long one."""
    monkeypatch.setattr(snapshot_plan, "_CHUNK_LOCK_TIMEOUT_MS", 100)
    source.sql("create table t (id int primary key); insert into t values (1)", "create publication p for table t")
    source.take()
    with source.database.connect() as other, other.transaction():
        other.execute("lock table t in access exclusive mode")
        with pytest.raises(LockedError):
            source.rows(source.tables()["t"])
    monkeypatch.setattr(snapshot_plan, "_CHUNK_LOCK_TIMEOUT_MS", 3_600_000)
    source.take()
    table = source.tables()["t"]
    waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    with ThreadPoolExecutor(1) as pool, source.database.connect() as other, source.database.connect() as looking:
        with other.transaction():
            other.execute("lock table t in access exclusive mode")
            rows = pool.submit(source.rows, table)
            until(lambda: rows.done() or looking.execute(waiting).fetchone() == (1,))
        assert [row["id"] for row in rows.result()] == [1]


def test_a_plan_does_not_wait_for_the_size_of_a_table_that_is_locked(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its own chunks wait, and the other tables are copied."""
    monkeypatch.setattr(snapshot_plan, "_LOCK_TIMEOUT_MS", 100)
    source.sql(
        "create table a (id int primary key, v text); insert into a select n, repeat('x', 1000) from generate_series(1, 100) n",
        "create table b (id int primary key); insert into b values (1)",
        "analyze a",
        "create publication p for table a, b",
    )
    source.take()
    expected = source.tables(chunk_bytes=8192)
    assert len(expected["a"].chunks) > 9
    with source.database.connect() as other, other.transaction():
        other.execute("lock table a in access exclusive mode")
        found = source.tables(chunk_bytes=8192)
        assert [row["id"] for row in source.rows(found["b"])] == [1]
    without_packing = [replace(chunk, packed_pages=0) for chunk in expected["a"].chunks]
    locked = frozenset([expected["a"].relation.relation_id])
    assert found == expected | {"a": replace(expected["a"], chunks=tuple(without_packing), locked=locked)}
    assert len(source.rows(found["a"])) == 100


def test_a_plan_waits_a_moment_for_the_row_filter_of_a_table_that_is_locked(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_plan, "_LOCK_TIMEOUT_MS", 100)
    source.sql(
        "create table a (id int primary key); create table b (id int primary key)",
        "create publication p for table a where (id > 0), b where (id > 1)",
    )
    source.take()
    with source.database.connect() as other, other.transaction():
        other.execute("lock table a in access exclusive mode")
        with pytest.raises(
            LockedError, match=rf"^table public\.a is locked exclusively by server process {other.info.backend_pid}$"
        ):
            source.plan()
        (only,) = source.plan(names=["public.b"]).tables
        assert (only.relation.name, only.condition) == ("b", "(((id > 1)))")


def test_rows_that_a_policy_hides_are_an_error(source: Source) -> None:
    source.sql(
        "create table t (id int primary key); insert into t values (1), (2); alter table t enable row level security",
        "create policy visible on t using (id = 1)",
        "create publication p for table t",
        "drop role if exists reader",
        "create role reader login; grant select on t to reader",
    )
    try:
        export = source.take()
        table = source.tables()["t"]
        assert len(source.rows(table)) == 2
        copied, (task,) = source.copied(table), source.tasks(table)
        other = conninfo(export.connection | {"user": "reader"}, export.prepared.server_version)
        with pytest.raises(SnapshotError, match="row-level security"):
            write_chunk(replace(copied, connection=other), task, lambda _: None)
    finally:
        source.close()
        source.sql("drop owned by reader; drop role reader")


def test_a_snapshot_that_is_gone(source: Source) -> None:
    source.sql("create table t (id int primary key)", "create publication p for table t")
    export = source.take()
    connection = source.conninfo
    source.close()
    with pytest.raises(ConnectionClosedError, match="connection to the server failed"):  # it passes: exit code 3
        open_snapshot(conninfo({"host": "127.0.0.1", "port": "1"}, export.prepared.server_version), export.name)
    with pytest.raises(ConnectionClosedError, match="snapshot can't be used"):
        open_snapshot(connection, export.name)


def test_connections_that_copy_rows_have_the_options_of_a_service_file(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    source.sql("create table t (id int primary key)", "create publication p for table t")
    service = source.directory / "service.conf"
    place = source.database.tcp_dsn.replace(" ", "\n")
    service.write_text(f"[shop]\n{place}\noptions=-c role=pg_read_all_data\n")
    monkeypatch.setenv("PGSERVICEFILE", str(service))
    with closing(export_as(source, "service=shop")) as export:
        assert asked(export, "current_user::text") == "pg_read_all_data"


def test_connections_that_copy_rows_are_protected_as_the_environment_says(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor on another machine has another environment. With libpq's defaults, it would not verify the server."""
    source.sql("create table t (id int primary key)", "create publication p for table t")
    service = source.directory / "service.conf"
    service.write_text(f"[shop]\n{source.database.tcp_dsn.replace(' ', chr(10))}\nsslrootcert=/etc/ssl/shop.pem\n")
    in_environment = {"PGSERVICEFILE": str(service), "PGSSLMODE": "allow", "PGREQUIREAUTH": "none", "PGPASSWORD": "CANARY"}
    for name, value in in_environment.items():
        monkeypatch.setenv(name, value)
    with closing(export_as(source, "service=shop")) as export:
        for name in in_environment:
            monkeypatch.delenv(name)
        protected = {"sslmode": "allow", "require_auth": "none", "sslrootcert": "/etc/ssl/shop.pem"}
        assert protected.items() <= export.connection.items()
        assert "channel_binding" not in export.connection, "its default, which the executor's environment may replace"
        assert "CANARY" not in export.connection.values()
        export.connection = {name: value for name, value in export.connection.items() if name != "service"}
        assert asked(export, "current_database()") == source.database.name


def test_connections_that_copy_rows_need_no_name_of_a_host_with_an_address(source: Source) -> None:
    """The name may be there only for the server's certificate."""
    source.sql("create table t (id int primary key)", "create publication p for table t")
    place = source.database.tcp_dsn.replace("host=", "host=db.invalid hostaddr=")
    with closing(export_as(source, place)) as export:
        assert asked(export, "host(inet_server_addr())") == "127.0.0.1"


def export_as(source: Source, place: str) -> ExportedSnapshot:
    return ExportedSnapshot(source.config(connection=("-d", place)), lambda: False, source.directory / "export")


def asked(export: ExportedSnapshot, expression: str) -> Any:
    with (
        closing(open_snapshot(conninfo(export.connection, export.prepared.server_version), export.name)) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(f"SELECT {expression}")
        return cursor.fetchone()[0]


def test_connections_that_copy_rows_notice_a_dead_network(source: Source) -> None:
    source.sql("create table t (id int primary key)", "create publication p for table t")
    tcp = ("-d", f"{source.database.tcp_dsn} keepalives_idle=20")
    with closing(ExportedSnapshot(source.config(connection=tcp), lambda: False, source.directory / "export")) as export:
        assert export.connection["connect_timeout"] == "30"
        with closing(open_snapshot(conninfo(export.connection, export.prepared.server_version), export.name)):
            options = tcp_options(source.database.cluster.port)
            assert [tuple(each.values()) for each in options] == [(20, 10, 6, 80_000)]


def test_a_chunk_is_read_again_after_a_lost_connection(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    source.sql("create table t (id int primary key)", "insert into t values (1)", "create publication p for table t")
    export = source.take()
    table = source.tables()["t"]
    (task,) = source.tasks(table)
    waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    with (
        FaultyProxy(source.database.cluster.port) as proxy,
        source.database.connect() as holder,
        source.database.connect() as looking,
        ThreadPoolExecutor(1) as pool,
    ):
        address = {"host": "127.0.0.1", "port": str(proxy.port), "sslmode": "disable", "gssencmode": "disable"}
        copied = replace(source.copied(table), connection=conninfo(export.connection | address, export.prepared.server_version))
        holder.execute("begin; lock table t in access exclusive mode")
        reading = pool.submit(write_chunk, copied, task, lambda _: None)
        until(lambda: looking.execute(waiting).fetchone() == (1,))
        proxy.reset()
        until(
            lambda: looking.execute(waiting).fetchone() == (2,)
        )  # the server does not see the first connection's end while it waits
        holder.execute("rollback")
        written = reading.result(60)
        assert written.rows == 1
        assert [path.name for path in Path(copied.directory).iterdir()] == [written.file.name]

        Path(task.note).unlink()
        monkeypatch.setattr(chunk, "_LOST", RetryPolicy(attempts=1))
        holder.execute("begin; lock table t in access exclusive mode")
        reading = pool.submit(write_chunk, copied, task, lambda _: None)
        until(lambda: looking.execute(waiting).fetchone() == (1,))
        proxy.reset()
        with pytest.raises(ConnectionClosedError, match=r'cannot read table "public"\."t"'):
            reading.result(60)
        holder.execute("rollback")
        assert [path.name for path in Path(copied.directory).iterdir()] == [written.file.name]


def test_a_chunk_is_read_again_if_its_connection_is_lost_amid_the_rows(source: Source) -> None:
    """There pyarrow raises an OSError, which does not tell the cause. Nothing of the first attempt is left."""
    source.sql(
        "create table t (id int primary key, v text)",
        "insert into t select g, repeat(md5(g::text), 55) from generate_series(1, 40000) g",
        "create publication p for table t",
    )
    source.take()
    (table,) = source.plan(1 << 30).tables
    copied, (task,) = source.copied(table), source.tasks(table)
    counts: list[int] = []

    def count(rows: int) -> None:
        if not counts:
            source.sql(
                "select pg_terminate_backend(pid) from pg_stat_activity where query like 'COPY (%' and datname = current_database()"
            )
        counts.append(rows)

    written = write_chunk(copied, task, count)
    assert (written.rows, sum(counts)) == (40000, 40000)
    assert min(counts) < 0
    assert [path.name for path in Path(copied.directory).iterdir()] == [written.file.name]


def test_an_error_about_a_row_has_no_value_of_it(source: Source) -> None:
    """Neither its message has, nor its traceback, which Spark puts into the executor's log. Other reasons are told."""
    source.sql("create table t (id int primary key, m int)", "insert into t values (1, 777)", "create publication p for table t")
    source.take()
    table = source.tables()["t"]
    copied, (task,) = source.copied(table), source.tasks(table)
    with pytest.raises(SnapshotError) as raised:
        write_chunk(replace(copied, condition="make_date(2024, m, 1) > '2024-01-01'"), task, lambda _: None)
    assert WITHHELD in str(raised.value)
    assert "777" not in "".join(traceback.format_exception(raised.value))
    with pytest.raises(SnapshotError, match=r"canceling statement due to user request$"):
        write_chunk(replace(copied, condition="pg_cancel_backend(pg_backend_pid())"), task, lambda _: None)


def test_the_slot_is_asked_for_and_made_once(source: Source) -> None:
    source.sql("create table t (id int primary key)")
    assert not slot_exists(source.config())
    assert source.take().is_slot_new
    assert slot_exists(source.config())
    assert not source.take().is_slot_new
    with pytest.raises(SlotDoesNotExistError, match="nope"):
        ExportedSnapshot(source.config(slot="nope", create_slot=False), lambda: False, source.directory / "nope")
    with pytest.raises(InterruptedError):
        ExportedSnapshot(source.config(), lambda: True, source.directory / "stopping")
    with pytest.raises(SnapshotError, match="another process holds a snapshot"):
        ExportedSnapshot(source.config(), lambda: False, source.directory / "export")


def test_an_initial_snapshot_that_was_refused_leaves_a_record_only_if_there_is_a_slot(source: Source, tmp_path: Path) -> None:
    source.sql("create table t (id int primary key)", "create publication p for table t")
    warehouse = Warehouse(tmp_path / "warehouse", "delta")

    def refused(**changes: Any) -> bool:
        with pytest.raises(CdcpipeError):
            InitialSnapshot(source.config(**changes), warehouse, "initial").prepare(lambda: False)
        return not is_begun(warehouse)

    assert refused(slot="No Name")
    assert refused(create_slot=False)
    source.take()
    source.close()
    assert not refused(publications=("nope",), create_slot=False)


def test_a_snapshot_has_the_servers_time_of_its_export(source: Source) -> None:
    """Not an earlier one: the server waits for the transaction that is running, and the snapshot has its rows."""
    source.sql("create table t (id int primary key)", "create publication p for table t")
    writer = source.database.connect()
    writer.execute("begin")
    writer.execute("insert into t values (1)")
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(source.take)
        waits = f"select count(*) from pg_stat_activity where wait_event = 'transactionid' and datname = '{source.database.name}'"
        until(lambda: source.connection.execute(waits).fetchone() == (1,), "the export that waits")
        committed_us = now_us(writer)
        writer.execute("commit")
        export = taking.result()
    assert committed_us <= export.time_us <= now_us(source.connection)


def now_us(connection: Any) -> int:
    """Return the time of the server's clock."""
    found = connection.execute("select (extract(epoch from clock_timestamp()) * 1000000)::int8").fetchone()
    return int(found[0])


def test_a_snapshot_that_was_left_is_gone_on_with_where_it_fits(source: Source) -> None:
    source.sql("create table t (id int primary key)", "insert into t values (1)", "create table u (id int primary key)")
    source.sql("create publication p for table t, u")
    held = "select count(*) from pg_stat_activity where backend_type = 'walsender' and datname = current_database()"

    def take(hold_s: float = 60.0, tables: tuple[str, ...] = ()) -> ExportedSnapshot:
        return ExportedSnapshot(source.config(), lambda: False, source.directory / "left", tables=tables, hold_s=hold_s)

    first = take()
    assert not first.is_left_over
    first.leave()
    source.sql("insert into t values (2)")
    again = take()
    assert again.is_left_over
    assert (again.name, again.consistent_point, again.prepared) == (first.name, first.consistent_point, first.prepared)
    assert again.time_us == first.time_us
    again.check()
    rows = open_snapshot(conninfo(again.connection, again.prepared.server_version), again.name)
    with rows.cursor() as cursor:
        cursor.execute("select count(*) from public.t")
        assert cursor.fetchone() == (1,)
    rows.close()
    again.leave()

    names = {first.name}

    def expect_new(made: ExportedSnapshot) -> None:
        assert not made.is_left_over
        assert made.name not in names
        names.add(made.name)
        # The one that was left is not held any longer than until it is known to be of no use.
        assert source.connection.execute(held).fetchone() == (1,)
        made.leave()

    expect_new(take(tables=("public.t",)))
    source.sql("alter table u add b int")  # another table's columns do not matter
    of_table = take(tables=("public.t",))
    assert of_table.is_left_over
    of_table.leave()
    source.sql("alter table t add b int default 3")
    expect_new(take(tables=("public.t",)))
    expect_new(take(hold_s=0.0))  # which holds nothing, so that nothing is left
    expect_new(take())
    source.sql(f"select pg_drop_replication_slot('{source.slot}')")
    expect_new(take())
    assert slot_exists(source.config())
    # The server ends it: so does who holds it, and there is nothing to go on with.
    ends = (
        "select pg_terminate_backend(pid) from pg_stat_activity where backend_type = 'walsender' and datname = current_database()"
    )
    source.sql(ends)
    until(lambda: not is_read(source.directory / "left/hold"), "the end of the process that holds the snapshot")
    last = take()
    assert not last.is_left_over
    source.sql(ends)
    with pytest.raises(CdcpipeError):
        until_raised(last.check)
    last.close()


def is_read(pipe: Path) -> bool:
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def until_raised(check: Callable[[], None]) -> None:
    def checked() -> bool:
        check()
        return False

    until(checked, "an error")


def test_a_snapshot_that_was_left_is_read_as_the_next_run_says(source: Source) -> None:
    """Somebody ends a run because its user or its TLS is wrong, and starts again with other options."""
    source.sql("create table t (id int primary key)", "create publication p for table t")

    def take(place: str) -> ExportedSnapshot:
        config = source.config(connection=("-d", place))
        return ExportedSnapshot(config, lambda: False, source.directory / "left", hold_s=60.0)

    take(f"{source.database.tcp_dsn} keepalives_idle=20 sslmode=disable").leave()
    again = take(f"{source.database.tcp_dsn} options='-c role=pg_read_all_data' sslmode=allow")
    assert again.is_left_over
    assert (again.connection["sslmode"], again.connection["keepalives_idle"]) == ("allow", "60")
    assert asked(again, "current_user::text") == "pg_read_all_data"
    again.leave()
    with closing(take(source.database.dsn)) as elsewhere:
        assert not elsewhere.is_left_over, "with these options nobody knows whether the former host works"
        assert asked(elsewhere, "current_database()") == source.database.name
