"""The published tables and columns: our query on the catalogs compared with pg_publication_tables. It waits for no locked table."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import postgres
import psycopg
import pytest

from cdcpipe import catalog_sql
from cdcpipe.errors import InitError
from cdcpipe.libpq.parameters import connection_parameters
from cdcpipe.publishing import NewPublication
from cdcpipe.replication import table_locks
from cdcpipe.replication.publications import create_publication
from cdcpipe.replication.selection import select
from cdcpipe.replication.session import connected
from cdcpipe.replication.table_parts import table_parts
from cdcpipe.sql import quote_identifier
from cdcpipe.subcommands.checksum import Checksums
from support.cli_process import CLI, run_cli

_PUBLISHED = """
select n.nspname || '.' || c.relname,
       (select array_agg(a.attname::text order by a.attnum) from pg_attribute a
        where a.attrelid = c.oid and a.attnum = any (p.numbers)),
       p.filters
from {published} p join pg_class c on c.oid = p.relation_id join pg_namespace n on n.oid = c.relnamespace order by 1
"""

# The view of 15 lists generated columns, which the server does not publish before 18.
_ORACLE = """
select p.schemaname || '.' || p.tablename,
       (select array_agg(name::text) from unnest(p.attnames) with ordinality u (name, place)
        where {is_18} or name not in (select attname from pg_attribute a where a.attrelid = c.oid and a.attgenerated <> '')),
       case when p.rowfilter is not null then array[p.rowfilter] end
from pg_publication_tables p join pg_namespace n on n.nspname = p.schemaname
     join pg_class c on c.relnamespace = n.oid and c.relname = p.tablename
where p.pubname = %s order by 1
"""

# Before 15 the view has no columns (all but the generated ones are published), and a partition that is named beside its root twice.
_ORACLE_14 = """
select distinct p.schemaname || '.' || p.tablename,
       (select array_agg(a.attname::text order by a.attnum) from pg_attribute a
        where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.attgenerated = ''), null
from pg_publication_tables p join pg_namespace n on n.nspname = p.schemaname
     join pg_class c on c.relnamespace = n.oid and c.relname = p.tablename
where p.pubname = %s order by 1
"""

_SCHEMAS = ("public", "s", 'odd "one"')


class Catalog:
    """A database with tables of all kinds, and random publications of them."""

    def __init__(self, connection: psycopg.Connection, version: int, seed: int) -> None:
        self.connection, self.version, self.rng = connection, version // 10000, random.Random(seed)
        self.tables: list[str] = []
        self.generated: set[str] = set()

    def sql(self, statement: str) -> None:
        self.connection.execute(statement)

    def make_tables(self, count: int) -> None:
        for schema in _SCHEMAS[1:]:
            self.sql(f"create schema {quote_identifier(schema)}")
        self.sql("create unlogged table unlogged_one (id int primary key)")
        self.sql("create view a_view as select 1 as id")
        for number in range(count):
            self._make_table(f"{quote_identifier(self.rng.choice(_SCHEMAS))}.t{number}")

    def _make_table(self, name: str) -> None:
        columns = ["id int not null", "gone int", "v text"]
        if self.rng.random() < 0.4:
            columns.insert(1, "g int generated always as (id * 2) stored")
            self.generated.add(name)
        by = self._partition_by()
        self.sql(f"create table {name} ({', '.join(columns)}){by}")
        self.sql(f"alter table {name} drop column gone")
        self.tables.append(name)
        if by:
            self._partition(name, depth=0)

    def _partition_by(self) -> str:
        return " partition by list (id)" if self.rng.random() < 0.5 else ""

    def _partition(self, name: str, depth: int) -> None:
        for value in range(self.rng.randint(0, 2)):
            _, _, table = name.rpartition(".")
            part = f"{quote_identifier(self.rng.choice(_SCHEMAS))}.{table}_{value}"
            by = self._partition_by() if depth < 2 else ""
            self.sql(f"create table {part} partition of {name} {'default' if value else 'for values in (0)'}{by}")
            self.tables.append(part)
            if name in self.generated:
                self.generated.add(part)
            if by:
                self._partition(part, depth + 1)

    def make_publication(self, name: str) -> None:
        options = [f"publish_via_partition_root = {self.rng.choice(['true', 'false'])}"]
        if self.version >= 18:
            options.append(f"publish_generated_columns = {self.rng.choice(['none', 'stored'])}")
        options.append(f"publish = '{self.rng.choice(['insert', 'insert, update, delete', 'truncate', 'insert, delete'])}'")
        kind = self.rng.random()
        schemas = self.rng.sample(_SCHEMAS, self.rng.randint(1, 2)) if self.version >= 15 and kind < 0.4 else []
        if kind > 0.85:
            target = " for all tables"
        else:
            chosen = self.rng.sample(self.tables, self.rng.randint(0 if schemas else 1, 5))
            # A column list can't be in the company of a schema, a row filter can.
            parts = [f"table {self._listed(each, can_list=not schemas)}" for each in chosen]
            parts += [f"tables in schema {quote_identifier(schema)}" for schema in schemas]
            if self.version < 15:
                parts = ["table " + ", ".join(chosen)]
            target = " for " + ", ".join(parts)
        try:
            self.sql(f"create publication {name}{target} with ({', '.join(options)})")
        except psycopg.errors.InvalidParameterValue:
            # A list or a filter of a partitioned table, which needs publish_via_partition_root.
            self.sql(f"create publication {name}{target} with (publish_via_partition_root, publish = 'insert')")

    def _listed(self, table: str, *, can_list: bool) -> str:
        if self.version < 15:
            return table
        text = table
        if can_list and self.rng.random() < 0.4:
            columns = ["id", "v"] if self.rng.random() < 0.5 else ["v"]
            columns += ["g"] if self.version >= 18 and table in self.generated else []
            text += f" ({', '.join(columns)})"
        if self.rng.random() < 0.4:
            text += f" where (id > {self.rng.randint(0, 9)})"
        return text

    def ours(self, *names: str) -> list[tuple[object, ...]]:
        published = catalog_sql.published(names, self.version * 10000, filters=catalog_sql.TEXTS)
        return self.connection.execute(_PUBLISHED.format(published=published)).fetchall()

    def view(self, name: str) -> list[tuple[object, ...]]:
        oracle = _ORACLE_14 if self.version < 15 else _ORACLE.format(is_18=self.version >= 18)
        return self.connection.execute(oracle, [name]).fetchall()

    def view_of_several(self, names: list[str]) -> list[str]:
        """From version 16 on, a function takes several publications, as a subscription does."""
        rows = self.connection.execute(
            "select distinct n.nspname || '.' || c.relname from pg_get_publication_tables(variadic %s) p"
            " join pg_class c on c.oid = p.relid join pg_namespace n on n.oid = c.relnamespace order by 1",
            [names],
        ).fetchall()
        return [row[0] for row in rows]


@pytest.fixture
def database(any_pg: postgres.Cluster) -> Iterator[postgres.Database]:
    with any_pg.database() as made:
        yield made


def test_random_publications_publish_what_the_server_says(database: postgres.Database) -> None:
    with database.connect() as connection:
        made = Catalog(connection, connection.info.server_version, seed=7)
        made.make_tables(14)
        names = [f"p{number}" for number in range(60)]
        for name in names:
            made.make_publication(name)
            assert made.ours(name) == made.view(name), name
        assert made.ours("nope") == []
        if made.version >= 16:
            for _ in range(40):
                several = made.rng.sample(names, made.rng.randint(2, 4))
                assert [row[0] for row in made.ours(*several)] == made.view_of_several(several), several


_OF_19 = """
create schema of_19;
create view of_19.pg_publication_rel as
select oid, prpubid, prrelid, prattrs, prqual, false as prexcept from pg_publication_rel
union all
select 1, p.oid, c.oid, null, null, true from pg_publication p join pg_class c on c.relname in ('excepted', 'root')
where p.pubname = 'all_but_two';
create table plain (id int primary key);
create table excepted (id int primary key);
create table root (id int primary key) partition by range (id);
create table middle partition of root for values from (0) to (10) partition by range (id);
create table leaf partition of middle for values from (0) to (5);
create publication one for table excepted;
"""


@pytest.mark.parametrize("via_root", ["true", "false"])
def test_exceptions_of_all_tables_are_not_published(database: postgres.Database, via_root: str) -> None:
    """There is no server of PostgreSQL 19 for the tests. A view has the column that it adds, and its exceptions."""
    with database.connect() as connection:
        if connection.info.server_version < 150000:
            return
        connection.execute(f"create publication all_but_two for all tables with (publish_via_partition_root = {via_root})")
        connection.execute(_OF_19)

        def execute(sql: str, **_: object) -> list[Any]:
            sql = sql.replace("pg_catalog.pg_publication_rel", "of_19.pg_publication_rel").replace("p.pubgencols = 's'", "false")
            return connection.execute(sql).fetchall()

        def published(*names: str) -> list[str]:
            told = catalog_sql.published(names, 190000, filters=catalog_sql.TEXTS)
            return [row[0] for row in execute(_PUBLISHED.format(published=told))]

        assert published("all_but_two") == ["public.plain"]
        assert published("all_but_two", "one") == ["public.excepted", "public.plain"]
        server = SimpleNamespace(server_version=190000, execute=execute)
        publishers = connection.execute(
            "select 'plain'::regclass::oid, oid from pg_publication where pubname = 'all_but_two'"
            " union all select prrelid, oid from pg_publication_rel"
        )
        parts = table_parts(cast("Any", server), ["all_but_two", "one"])
        assert {table: told.published_by for table, told in parts.items()} == {table: (oid,) for table, oid in publishers}


def prepared(database: postgres.Database, *options: str) -> tuple[dict[str, dict[str, object]], str]:
    """Return the facts that `cdcpipe prepare` prints for each table, and its stderr."""
    connection = ["-d", database.dsn, "-S", "s", "--publication", "p"]
    code, out, err = run_cli("prepare", *connection, *options)
    assert code == 0, err
    return {f"{table['schema']}.{table['name']}": table for table in json.loads(out)["tables"]}, err


def test_a_foreign_partition_is_not_published(any_pg: postgres.Cluster) -> None:
    """The stream has nothing of it. It would get an empty changelog, and advice to give it a key, which it can't have."""
    with any_pg.database() as database, database.connect() as connection:
        connection.execute(
            "create foreign data wrapper w; create server far foreign data wrapper w;"
            "create table root (id int) partition by list (id); create table leaf partition of root for values in (1);"
            "create foreign table away partition of root for values in (2) server far;"
            "create publication leaves for table root; create publication whole for table root with (publish_via_partition_root)"
        )
        for publication, expected in (("leaves", "leaf"), ("whole", "root")):
            published = catalog_sql.published([publication], connection.info.server_version)
            assert connection.execute(f"select relation_id::regclass::text from {published} t").fetchall() == [(expected,)]


def test_prepare_does_not_wait_for_a_locked_table(database: postgres.Database) -> None:
    """Another session holds ACCESS EXCLUSIVE. The queries before and during a stream wait for no table."""
    with database.connect() as connection, database.connect() as other:
        details = " (id, v) where (id > 0)" if connection.info.server_version >= 150000 else ""
        for statement in (
            "create table t (id int primary key, v text default 'x' || 'y')",
            "create table root (id int primary key) partition by list (id)",
            "create table part partition of root for values in (1)",
            f"create publication p for table t{details}, root",
            "select pg_create_logical_replication_slot('s', 'pgoutput')",
            "insert into t values (1); insert into root values (1)",
        ):
            connection.execute(statement)
        with other.transaction():
            other.execute("lock table t, root in access exclusive mode")
            assert set(prepared(database)[0]) == {"public.t", "public.part"}
            for options in ["--binary"], ["-J", "-o", "include-pk=1", "-o", "include-not-null=1"]:
                with CLI("-d", database.dsn, "-S", "s", "--publication", "p", *options) as cli:
                    cli.take(1)
                    assert cli.quit() == 0


def test_only_the_key_columns_of_an_index_are_a_key(database: postgres.Database) -> None:
    with database.connect() as connection:
        for statement in (
            "create table with_more (b int, a int, v text, primary key (a, b) include (v))",
            "create table at_most_once (id int, primary key (id) deferrable)",
            "create table generated (id int, g int generated always as (id % 2) stored, primary key (g, id))",
            "create table indexed (id int, v int not null, x int not null, primary key (id))",
            "create unique index indexed_v on indexed (v, x)",
            "alter table indexed replica identity using index indexed_v",
            "create publication p for table with_more, at_most_once, generated, indexed",
            "select pg_create_logical_replication_slot('s', 'pgoutput')",
        ):
            connection.execute(statement)
        tables, said = prepared(database)
        assert tables["public.with_more"]["primary_key"] == ["a", "b"]
        assert tables["public.indexed"]["identity"] == ["v", "x"]
        # Of this one the server describes the column id alone, as the key.
        assert "'g'" not in str(tables["public.generated"]["columns"])
        assert (tables["public.generated"]["identity"], tables["public.generated"]["unpublished_key"]) == (["g", "id"], ["g"])
        # A deferrable key is no replica identity.
        assert "with_more" not in said
        assert "at_most_once has no usable replica identity" in said


def test_only_published_commands_are_reported_as_refused(database: postgres.Database) -> None:
    """The server is the oracle: it refuses a command on a table without replica identity if this command is published."""
    with database.connect() as connection:
        for statement in (
            "create table keyless (v int)",
            "create table keyed (id int primary key)",
            "create table root (v int) partition by list (v); create table part partition of root for values in (1)",
            # The rows are in the leaf, and its identity counts.
            "alter table part replica identity full",
            "insert into keyless values (1); insert into keyed values (1); insert into root values (1)",
            "select pg_create_logical_replication_slot('s', 'pgoutput')",
        ):
            connection.execute(statement)
        for published in "insert", "insert, update", "delete, truncate", "insert, update, delete", "truncate":
            for via_root in "false", "true":
                connection.execute(
                    "create publication p for table keyless, keyed, root with"
                    f" (publish = '{published}', publish_via_partition_root = {via_root})"
                )
                refused = [
                    command.partition(" ")[0].upper()
                    for command in ("update keyless set v = 2", "delete from keyless")
                    if not is_taken(connection, command)
                ]
                assert is_taken(connection, "update keyed set id = 2")
                assert is_taken(connection, "delete from root")
                tables, said = prepared(database)
                assert tables["public.keyless"]["refused"] == refused
                assert prepared(database, "--quiet") == (tables, "")
                if refused:
                    assert (
                        f"public.keyless has no usable replica identity: the server refuses {' and '.join(refused)} on it" in said
                    )
                assert said.count("no usable replica identity") == bool(refused), published
                connection.execute("drop publication p")


def is_taken(connection: psycopg.Connection, command: str) -> bool:
    """Try a command, and undo it."""
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(command)
    except psycopg.errors.ObjectNotInPrerequisiteState:
        return False
    return True


def test_the_holder_of_a_lock_is_named(pg18: postgres.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a lock is necessary, the wait for it ends."""
    monkeypatch.setattr(table_locks, "LOCK_TIMEOUT", "100ms")
    with pg18.database() as database, database.connect() as connection, database.connect() as other:
        connection.execute("create table t (id int) partition by list (id); create table part partition of t for values in (1)")
        parameters = connection_parameters([("dbname", database.dsn)])
        tables, wanted = [("public", "t")], NewPublication.of(tables=["public.t"])

        def refusals() -> Iterator[InitError]:
            with connected(parameters) as ours:
                with pytest.raises(InitError) as refused:
                    create_publication(ours, "made", select(ours, wanted), wanted)
                yield refused.value
            with connected(parameters) as ours:
                checksums = Checksums(ours)
                with pytest.raises(InitError) as refused:
                    checksums.begin(tables, [])
                yield refused.value

        with other.transaction(force_rollback=True):
            other.execute("lock table t in access exclusive mode")
            pid = other.info.backend_pid
            for refused in refusals():
                assert f"table public.t is locked by server process {pid}" in refused.message
                assert refused.hint
                assert f"pg_terminate_backend({pid})" in refused.hint
        other.execute("begin; alter table t add v text; prepare transaction 'altered'")
        try:
            for refused in refusals():
                assert "is locked by a prepared transaction" in refused.message
        finally:
            other.execute("rollback prepared 'altered'")
        with connected(parameters) as ours:
            create_publication(ours, "made", select(ours, wanted), wanted)
            assert ours.execute("show lock_timeout") == [("0",)]
            Checksums(ours).begin(tables, ["made"])


def test_tables_are_locked_only_if_others_keep_room(any_pg: postgres.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds the server's table of locks full gets an error. What is counted is what a session that reads holds."""
    with any_pg.database() as database, database.connect() as connection:
        connection.execute("create table plain (id int primary key, v text unique)")
        connection.execute("create table root (id int primary key) partition by range (id)")
        connection.execute("create table low partition of root for values from (1) to (9) partition by range (id)")
        connection.execute("create table lowest partition of low for values from (1) to (5)")
        connection.execute("create table parent (id int primary key); create table child (n int unique) inherits (parent)")
        tables = [("public", name) for name in ("plain", "root", "parent", "nowhere")]
        with connected(connection_parameters([("dbname", database.dsn)])) as ours:
            checksums = Checksums(ours)
            most, needed = checksums.needed_locks(tables)
            assert needed == {("public", "plain"): 3, ("public", "root"): 6, ("public", "parent"): 4}
            places = "select setting::int from pg_settings where name = 'max_locks_per_transaction'"
            assert most > 30 * (connection.execute(places).fetchone() or (0,))[0]
            monkeypatch.setattr(table_locks, "most_locks", lambda _: 12)
            with pytest.raises(InitError, match="to read 4 tables at one time takes 13 locks"):
                checksums.begin(tables, [])
            assert ours.execute("select count(*) from pg_locks where pid = pg_backend_pid() and relation >= 16384") == [("0",)]
            monkeypatch.setattr(table_locks, "most_locks", lambda _: 13)
            for table in checksums.begin(tables, [])[1]:
                checksums.buckets(table, ["id"])
            held = ours.execute(
                "select relation::regclass::text from pg_locks where pid = pg_backend_pid() and locktype = 'relation'"
                " and relation >= 16384 order by 1"
            )
            # The child's index is counted, and not locked: the rows of a parent are read without those of its children. Before 16
            # the indexes of partitioned tables are not locked either.
            assert len(held) == (12 if ours.server_version >= 160000 else 10), held
