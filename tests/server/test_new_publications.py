"""What -c publishes, and what it refuses before anything is made: patterns, tables without a key, owners, privileges."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import postgres
import psycopg
import pytest

from cdcpipe.errors import InitError
from cdcpipe.libpq.parameters import connection_parameters
from cdcpipe.publishing import NewPublication
from cdcpipe.replication import table_locks
from cdcpipe.replication.publications import create_publication
from cdcpipe.replication.selection import select
from cdcpipe.replication.session import connected
from support.cli_process import run_cli, run_spark_cli


@pytest.fixture
def database(any_pg: postgres.Cluster) -> Iterator[postgres.Database]:
    with any_pg.database() as made:
        yield made


@pytest.fixture
def role(database: postgres.Database) -> Iterator[str]:
    """A role that may stream and create publications of its own tables."""
    name = f"owner_{uuid.uuid4().hex[:12]}"
    with database.connect() as connection:
        connection.execute(f'create role {name} login replication; grant create on database "{database.name}" to {name}')
        yield name
        connection.execute(f"drop owned by {name} cascade; drop role {name}")


def prepare(database: postgres.Database, *options: str) -> tuple[int, str]:
    """Run ``cdcpipe prepare -c`` for a slot and a publication that do not exist, and return its exit code and stderr."""
    code, _, err = run_cli("prepare", "-d", database.dsn, "-S", "s", "--publication", "p", "-c", *options)
    return code, err


def things(connection: psycopg.Connection) -> list[str]:
    """Return the names of all slots and publications of the database."""
    found = connection.execute(
        "select slot_name from pg_replication_slots where database = current_database()"
        " union all select pubname from pg_publication"
    )
    return [row[0] for row in found.fetchall()]


def published(connection: psycopg.Connection, name: str = "p") -> list[str]:
    found = connection.execute(
        "select r.prrelid::regclass::text from pg_publication_rel r join pg_publication p on p.oid = r.prpubid"
        " where p.pubname = %s order by 1",
        [name],
    )
    return [row[0] for row in found.fetchall()]


KEYLESS = (
    "create table keyed (id int primary key, v text)",
    "create table plain (id int)",
    "create table deferred (id int primary key deferrable)",
    "create table nothing (id int primary key); alter table nothing replica identity nothing",
    "create table whole (id int); alter table whole replica identity full",
    "create table by_index (id int not null unique); alter table by_index replica identity using index by_index_id_key",
    "create table root (id int) partition by list (id)",
    "create table leaf partition of root for values in (1)",
    "create table keyed_root (id int primary key) partition by list (id)",
    "create table keyed_leaf partition of keyed_root for values in (1)",
    "create unlogged table volatile (id int)",
)
REFUSED = ["deferred", "nothing", "plain", "root"]
REFUSED_NAMES = ", ".join(f"public.{name}" for name in REFUSED)


@pytest.mark.parametrize(
    ("setting", "hint"),
    [("default_transaction_read_only=on", "default_transaction_read_only=off"), ("role={role}", "takes CREATE on the database")],
)
def test_a_publication_of_all_tables_that_can_not_be_created(
    database: postgres.Database, role: str, setting: str, hint: str
) -> None:
    code, _, err = run_cli(
        "prepare", "-d", database.dsn, "-S", "s", "--publication", "p", "-c", env={"PGOPTIONS": f"-c {setting.format(role=role)}"}
    )
    assert code == 2
    assert "publication 'p' could not be created" in err
    assert hint in err.partition("hint: ")[2]
    with database.connect() as connection:
        assert things(connection) == []


@pytest.mark.parametrize("command", [["prepare"], ["prepare", "--export-snapshot"], ["-A", "--endpos", "0/1"], ["-L"]])
def test_a_slot_name_that_the_server_refuses_leaves_no_publication_behind(database: postgres.Database, command: list[str]) -> None:
    code, _, err = run_cli(*command, "-d", database.dsn, "-S", "Shop-CDC", "--publication", "p", "-c")
    assert code == 2
    assert "lower case letters" in err.partition("hint: ")[2]
    with database.connect() as connection:
        assert things(connection) == []


def test_tables_whose_changes_the_server_would_refuse_are_refused_before_anything_is_made(database: postgres.Database) -> None:
    with database.connect() as connection:
        for statement in KEYLESS:
            connection.execute(statement)
        connection.execute("create temporary table gone (v text)")
        for command in ("prepare",), ("prepare", "--export-snapshot"), ("-A", "--endpos", "0/1"), ("-u", "5"):
            code, _, err = run_cli(*command, "-d", database.dsn, "-S", "s", "--publication", "p", "-c")
            assert code == 2, err
            assert f"replica identity: {REFUSED_NAMES}\n" in err
            assert "--exclude-table" in err
            assert things(connection) == []
        # The server is the oracle: with such a publication it refuses an UPDATE of these tables, and of no others.
        connection.execute("create publication p for all tables")
        for table in ("keyed", "whole", "by_index", "keyed_root", "volatile", *REFUSED):
            connection.execute(f"insert into {table} (id) values (1)")
            try:
                with connection.transaction(force_rollback=True):
                    connection.execute(f"delete from {table}")
                is_refused = False
            except psycopg.errors.ObjectNotInPrerequisiteState:
                is_refused = True
            assert is_refused == (table in REFUSED), table
        # An existing publication is no reason to refuse: its tables are named.
        code, err = prepare(database)
        assert code == 0
        assert "public.plain has no usable replica identity" in err
        connection.execute("select pg_drop_replication_slot('s'); drop publication p")
        excluded = [word for name in REFUSED for word in ("--exclude-table", f"public.{name}")]
        code, err = prepare(database, *excluded)
        assert (code, "identity" in err) == (0, False)
        assert published(connection) == ["by_index", "keyed", "keyed_root", "whole"]
        connection.execute("select pg_drop_replication_slot('s')")


def test_many_tables_without_a_key_are_counted(pg18: postgres.Cluster) -> None:
    with pg18.database() as database, database.connect() as connection:
        for number in range(23):
            connection.execute(f"create table t{number:02d} (v text)")
        code, err = prepare(database)
        assert code == 2
        assert "public.t19, … (23 in all)" in err
        assert "public.t20" not in err


TABLES = (
    "create schema s",
    'create schema "odd.one"',
    "create table a (id int primary key); create table b (id int primary key)",
    'create table "B" (id int primary key); create table "a*" (id int primary key)',
    "create table s.a (id int primary key); create table s.log_1 (id int primary key)",
    'create table "odd.one".t (id int primary key)',
    "create table parent (id int primary key); create table child (primary key (id)) inherits (parent)",
    "create table grandchild (primary key (id)) inherits (child)",
    "create table root (id int primary key) partition by list (id)",
    "create table root_1 partition of root for values in (1)",
    "create unlogged table volatile (id int primary key); create view seen as select 1 as id",
)
ORDINARY = {"a", "b", '"B"', '"a*"', "s.a", "s.log_1", '"odd.one".t', "parent", "child", "grandchild", "root"}


@pytest.mark.parametrize(
    ("tables", "excluded", "expected"),
    [
        (["public.a"], [], {"a"}),
        (["public.a", "s.*"], [], {"a", "s.a", "s.log_1"}),
        (["*.a"], [], {"a", "s.a"}),
        (['public."a*"'], [], {'"a*"'}),
        (['"odd.one".*'], [], {'"odd.one".t'}),
        (["*.*"], [], ORDINARY),
        ([], ["s.*", "public.b"], ORDINARY - {"s.a", "s.log_1", "b"}),
        (["s.*"], ["*.log_*"], {"s.a"}),
        # A name takes its heirs along, a pattern does not. Neither takes one that is excluded.
        (["public.parent"], [], {"parent", "child", "grandchild"}),
        (["public.parent*"], [], {"parent"}),
        (["public.parent"], ["public.child"], {"parent", "grandchild"}),
        # A partition goes with its table, unless it is named itself.
        (["public.root*"], [], {"root"}),
        (["public.root_1"], [], {"root_1"}),
    ],
)
def test_patterns(pg18: postgres.Cluster, tables: list[str], excluded: list[str], expected: set[str]) -> None:
    with pg18.database() as database, database.connect() as connection:
        for statement in TABLES:
            connection.execute(statement)
        with connected(connection_parameters([("dbname", database.dsn)])) as ours:
            wanted = NewPublication.of(tables=tables, exclude_tables=excluded)
            create_publication(ours, "p", select(ours, wanted), wanted)
        assert set(published(connection)) == expected


def test_patterns_that_publish_nothing(pg18: postgres.Cluster) -> None:
    with pg18.database() as database, database.connect() as connection:
        for statement in TABLES:
            connection.execute(statement)
        with connected(connection_parameters([("dbname", database.dsn)])) as ours:

            def refused(*tables: str, excluded: tuple[str, ...] = ()) -> str:
                with pytest.raises(InitError) as raised:
                    select(ours, NewPublication.of(tables=tables, exclude_tables=excluded))
                assert raised.value.hint
                return raised.value.message

            # All of them in one message, and upper case is not lower case.
            assert refused("public.A", "public.a", "t.*", excluded=("s.b",)) == (
                "--table public.A matches no table; --table t.* matches no table; --exclude-table s.b matches no table"
            )
            assert refused("public.volatile", "public.seen") == (
                "--table public.volatile matches no table that it can publish: public.volatile is unlogged;"
                " --table public.seen matches no table that it can publish: public.seen is a view"
            )
            assert "public.root_1 is a partition" in refused("public.root_*")
            assert "published with public.root" in refused("public.root", excluded=("public.root_1",))
            assert refused("public.a", excluded=("*.a",)) == "no table is left to publish"


def test_tables_of_extensions_are_named_one_by_one(pg18: postgres.Cluster) -> None:
    """FOR ALL TABLES has them, as the server says; a list has only those that are named."""
    with pg18.database() as database, database.connect() as connection:
        connection.execute("create table mine (id int primary key); create table theirs (id int primary key)")
        connection.execute("alter extension plpgsql add table theirs")
        with connected(connection_parameters([("dbname", database.dsn)])) as ours:

            def selected(*tables: str) -> list[str]:
                return [each.name for each in select(ours, NewPublication.of(tables=tables)).tables]

            assert selected() == ["mine", "theirs"]
            assert selected("public.*") == ["mine"]
            assert selected("public.theirs") == ["theirs"]
            with pytest.raises(InitError, match=r"public\.theirs is a table of the extension plpgsql"):
                select(ours, NewPublication.of(tables=["public.the*"]))
        connection.execute("alter extension plpgsql drop table theirs")


def test_tables_of_others_are_named_together(database: postgres.Database, role: str) -> None:
    with database.connect() as connection:
        connection.execute(
            "create table mine (id int primary key); create table b (id int primary key); create table a (id int primary key);"
            f"alter table mine owner to {role}"
        )
        code, err = prepare(database, "-U", role, "--table", "public.*")
        assert code == 2
        assert f"user '{role}' does not own public.a, public.b, and" in err
        assert things(connection) == []
        options = ("--exclude-table", "public.a", "--exclude-table", "public.b")
        assert prepare(database, "-U", role, "--table", "public.*", *options)[0] == 0
        connection.execute("select pg_drop_replication_slot('s')")


def test_tables_that_may_not_be_read_are_named_before_anything_is_made(database: postgres.Database, role: str) -> None:
    with database.connect() as connection:
        connection.execute("create schema s")
        for table in 's."T"', "u", "v":
            connection.execute(f"create table {table} (id int primary key); alter table {table} owner to {role}")
        connection.execute(f'grant usage on schema public to {role}; revoke select on s."T", u from {role}')
        options = ("-U", role, "--export-snapshot", "--check-select", "*", "--table", "*.*")
        code, err = prepare(database, *options)
        assert code == 2
        assert f"user '{role}' may not read public.u, s.T\n" in err
        assert things(connection) == []
        sql = err.partition("hint: ")[2].strip()
        assert sql == f'GRANT USAGE ON SCHEMA "s" TO "{role}"; GRANT SELECT ON "public"."u", "s"."T" TO "{role}"'
        check_hint(database, connection, err, *options)


@pytest.mark.parametrize("asked", ["fruit", '"public"."fruit"', "public.Fruit"])
def test_a_name_of_no_published_table_is_refused_before_anything_is_made(database: postgres.Database, asked: str) -> None:
    with database.connect() as connection:
        connection.execute("create table fruit (id int primary key)")
        options = ("--export-snapshot", "--check-select", "public.fruit", "--check-select", asked, "--check-select", "*")
        code, err = prepare(database, *options, "--table", "public.fruit")
        assert (code, f"not published: {asked}; the published tables are: public.fruit\n" in err) == (2, True)
        assert things(connection) == []


def check_hint(database: postgres.Database, connection: psycopg.Connection, err: str, *options: str) -> None:
    """Assert that after the hint's SQL the command makes what it refused to make. Drop the slot again."""
    connection.execute(err.partition("hint: ")[2].strip().encode())
    assert prepare(database, *options)[0] == 0
    connection.execute("select pg_drop_replication_slot('s')")


def test_partitions_that_may_not_be_read_are_named_too(database: postgres.Database, role: str) -> None:
    """A copy reads the leaf partitions, each with privileges of its own, and columns in an order of its own."""
    with database.connect() as connection:
        connection.execute("create table r (gone int, id int primary key, v text) partition by range (id)")
        connection.execute("alter table r drop column gone; create schema s; create table s.low (v text, id int primary key)")
        connection.execute("alter table r attach partition s.low for values from (0) to (10)")
        connection.execute("create table high partition of r for values from (10) to (20)")
        connection.execute(f"grant select on r, high to {role}; create publication p for table r with (publish_via_partition_root)")
        options = ("-U", role, "--export-snapshot", "--check-select", "*")
        code, err = prepare(database, *options)
        assert code == 2
        assert f"user '{role}' may not read s.low\n" in err
        assert connection.execute("select slot_name from pg_replication_slots where slot_name = 's'").fetchall() == []
        sql = err.partition("hint: ")[2].strip()
        assert sql == f'GRANT USAGE ON SCHEMA "s" TO "{role}"; GRANT SELECT ON "s"."low" TO "{role}"'
        check_hint(database, connection, err, *options)


def test_row_security_that_hides_rows_from_a_copy_is_named_before_anything_is_made(database: postgres.Database, role: str) -> None:
    with database.connect() as connection:
        for table in "hidden", "forced", "open":
            connection.execute(f"create table {table} (id int primary key); grant select on {table} to {role}")
        connection.execute("create table root (id int primary key) partition by range (id)")
        connection.execute(f"create table leaf partition of root for values from (0) to (9); grant select on root, leaf to {role}")
        for table in "hidden", "forced", "leaf":
            connection.execute(f"alter table {table} enable row level security")
        connection.execute("alter table forced force row level security")
        # A copy reads the partition, which has no policy of its own.
        connection.execute("create table guarded (id int primary key) partition by range (id)")
        connection.execute("create table free partition of guarded for values from (0) to (9)")
        connection.execute(f"grant select on guarded, free to {role}; alter table guarded enable row level security")
        connection.execute(f"alter table forced owner to {role}; alter table open owner to {role}")
        connection.execute("create publication p for all tables with (publish_via_partition_root)")
        options = ("-U", role, "--export-snapshot", "--check-select", "*")
        code, err = prepare(database, *options)
        assert code == 2
        assert f"row-level security hides rows from user '{role}', " in err
        assert "public.forced, public.hidden, public.root\n" in err
        assert connection.execute("select slot_name from pg_replication_slots where slot_name = 's'").fetchall() == []
        check_hint(database, connection, err, *options)


def row_of(connection: psycopg.Connection, sql: str) -> tuple[object, ...]:
    found = connection.execute(sql).fetchone()
    assert found is not None
    return found


def test_tables_without_a_key_have_their_inserts_in_a_second_publication(database: postgres.Database) -> None:
    with database.connect() as connection:
        for statement in KEYLESS:
            connection.execute(statement)
        code, err = prepare(database, "--keyless", "insert-only")
        assert code == 0, err
        assert f"'p_keyless' has only INSERT and TRUNCATE of the tables that have no key: {REFUSED_NAMES}" in err
        assert published(connection) == ["by_index", "keyed", "keyed_root", "whole"]
        assert published(connection, "p_keyless") == REFUSED
        # The applications go on as before.
        connection.execute("insert into plain values (1); update plain set id = 2; delete from root; truncate plain")
        connection.execute("insert into keyed values (1); insert into whole values (1); delete from whole")
        # A stream that would lack these tables is refused; once both are named, it has them.
        stream = ("-d", database.dsn, "-S", "s", "--publication", "p", "-A", "--endpos")
        (end,) = row_of(connection, "select pg_current_wal_insert_lsn()::text")
        code, _, err = run_cli(*stream, str(end))
        assert code == 2
        assert "--publication p_keyless" in err
        expected = [("insert", "plain"), ("truncate", "plain"), ("insert", "keyed"), ("insert", "whole"), ("delete", "whole")]
        # The first of these streams confirms what it had.
        for more, expected_now in (["--publication", "p_keyless"], expected), (["--keyless", "insert-only"], []):
            code, out, err = run_cli(*stream, str(end), *more, "--output", "json", "-N", "--startpos", "0/1")
            assert code == 0, err
            found = [json.loads(line) for line in out.splitlines()]
            changes = [(each["op"], each["table"]) for each in found if each["op"] in ("insert", "update", "delete", "truncate")]
            assert changes == expected_now
        connection.execute("select pg_drop_replication_slot('s'); drop publication p")
        code, err = prepare(database, "--keyless", "insert-only")
        assert code == 2
        assert "'p_keyless' is there, and 'p' is not" in err


def test_a_publication_named_like_a_companion_is_made_as_any_other(database: postgres.Database) -> None:
    """Without --keyless insert-only it is none. The slot would stay, and no later -c would make the publication."""
    with database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        assert prepare(database, "--publication", "p_keyless") == (0, "")
        assert sorted(things(connection)) == ["p", "p_keyless", "s"]
        connection.execute("select pg_drop_replication_slot('s')")


def test_tables_without_a_key_get_replica_identity_full(database: postgres.Database) -> None:
    with database.connect() as connection, database.connect() as other:
        for statement in KEYLESS:
            connection.execute(statement)
        connection.execute("create table other_leaf partition of root for values in (2)")
        connection.execute("alter table other_leaf replica identity full")
        identities = (
            "select relname::text from pg_class where relreplident = 'f' and relnamespace = 'public'::regnamespace order by 1"
        )

        def full() -> list[str]:
            return [row[0] for row in connection.execute(identities).fetchall()]

        # All or nothing: while one table is locked, no table is altered and no publication is made.
        with other.transaction():
            other.execute("lock table plain in access exclusive mode")
            with connected(connection_parameters([("dbname", database.dsn)])) as ours, pytest.MonkeyPatch.context() as patch:
                patch.setattr(table_locks, "LOCK_TIMEOUT", "100ms")
                wanted = NewPublication.of(keyless="full")
                with pytest.raises(InitError, match=r"table public\.plain is locked by server process"):
                    create_publication(ours, "p", select(ours, wanted), wanted)
        assert full() == ["other_leaf", "whole"]
        assert things(connection) == []
        code, err = prepare(database, "--keyless", "full", "--via-root")
        assert code == 0, err
        said = f"REPLICA IDENTITY FULL is set now on the tables that have no key: {REFUSED_NAMES}\n"
        assert said in err
        assert full() == ["deferred", "leaf", "nothing", "other_leaf", "plain", "root", "whole"]
        connection.execute("insert into plain values (1); update plain set id = 2; insert into root values (1); delete from root")
        assert row_of(connection, "select puballtables, pubviaroot from pg_publication") == (True, True)
        assert prepare(database, "--keyless", "full", "--via-root") == (0, "")
        connection.execute("select pg_drop_replication_slot('s')")


GENERATED = (
    "create table fine (id int primary key, v int, g int generated always as (v) stored unique)",
    "create table log (id int, v int, g int generated always as (v) stored)",
    "create table whole (id int not null unique, v int, g int generated always as (v) stored)",
    "alter table whole replica identity full",
    "create table by_key (id int not null unique, v int, g int generated always as (id) stored, primary key (id, g))",
    "create table root (id int primary key, v int, g int generated always as (v) stored) partition by list (id)",
    "create table leaf partition of root for values in (1); alter table leaf replica identity full",
)


def update_all(connection: psycopg.Connection) -> None:
    for table in "fine", "log", "whole", "by_key", "root":
        connection.execute(f"insert into {table} (id, v) values (1, 1); update {table} set v = 2; delete from {table}")


@pytest.mark.parametrize("is_virtual", [False, True])
def test_a_replica_identity_with_generated_columns_is_none_since_18(pg18: postgres.Cluster, *, is_virtual: bool) -> None:
    """The server is the oracle: it would refuse UPDATE and DELETE, also with the REPLICA IDENTITY FULL that -c would set."""
    with pg18.database() as database, database.connect() as connection:
        for statement in GENERATED:
            # There is no index on a virtual column.
            virtual = statement.replace("(v) stored unique", "(v)").replace("(v) stored", "(v)")
            connection.execute(virtual if is_virtual else statement)
        code, err = prepare(database)
        assert code == 2
        assert "refuse every UPDATE and DELETE on tables that have generated columns in their replica identity" in err
        assert ": public.by_key, public.root, public.whole\n" in err
        code, err = prepare(database, "--keyless", "full")
        assert code == 2
        assert ": public.by_key, public.log, public.root, public.whole\n" in err
        assert things(connection) == []
        # The primary key identifies the rows of root, so in Spark it has a replica.
        code, err = prepare(database, "--keyless", "insert-only")
        assert code == 2
        assert "(REPLICA IDENTITY FULL has all columns): public.root\n" in err
        assert things(connection) == []
        connection.execute("alter table leaf replica identity default")
        code, err = prepare(database, "--keyless", "insert-only")
        assert code == 0, err
        assert "'p_keyless' has only INSERT and TRUNCATE of the tables that have no key: public.log\n" in err
        assert "generated columns in their replica identity: public.by_key, public.whole\n" in err
        update_all(connection)
        assert (published(connection), published(connection, "p_keyless")) == (["fine", "root"], ["by_key", "log", "whole"])
        connection.execute("select pg_drop_replication_slot('s'); drop publication p, p_keyless")
        # What the hints say helps.
        for table in "by_key", "whole":
            connection.execute(f"alter table {table} replica identity using index {table}_id_key")
        code, err = prepare(database)
        assert code == 2
        assert "nor another replica identity: public.log\n" in err
        assert "(--keyless full), but not on those with generated columns: public.log\n" in err
        connection.execute("alter table log add primary key (id)")
        assert prepare(database, "--via-root") == (0, "")
        update_all(connection)
        # A publication that is there is its creator's. It gets a warning.
        connection.execute("alter table log replica identity full")
        with pytest.raises(psycopg.errors.InvalidColumnReference):
            connection.execute("update log set v = 1")
        code, err = prepare(database)
        assert code == 0
        assert "public.log has no usable replica identity: the server refuses UPDATE and DELETE on it" in err
        assert "not published (g): ALTER TABLE … REPLICA IDENTITY DEFAULT" in err
        connection.execute("alter table log replica identity default")
        assert prepare(database) == (0, "")
        if not is_virtual:
            connection.execute("alter publication p set (publish_generated_columns = stored)")
            connection.execute("alter table log replica identity full")
            update_all(connection)
            assert prepare(database) == (0, "")
        connection.execute("select pg_drop_replication_slot('s')")


def test_before_18_generated_columns_in_a_replica_identity_do_not_matter(pg17: postgres.Cluster) -> None:
    with pg17.database() as database, database.connect() as connection:
        for statement in GENERATED:
            connection.execute(statement)
        code, err = prepare(database, "--keyless", "full", "--via-root")
        assert (code, err) == (0, "REPLICA IDENTITY FULL is set now on the tables that have no key: public.log\n")
        update_all(connection)
        connection.execute("select pg_drop_replication_slot('s')")


def test_one_line_says_how_many_tables_partitioned_ones_become(database: postgres.Database) -> None:
    with database.connect() as connection:
        connection.execute("create table root (id int primary key) partition by range (id)")
        for number in range(3):
            connection.execute(f"create table root_{number} partition of root for values from ({number}) to ({number + 1})")
        for name in "p", "q":
            more = ["--via-root"] if name == "q" else []
            code, _, err = run_cli("prepare", "-d", database.dsn, "-S", name, "--publication", name, "-c", *more)
            assert code == 0
            assert ("as their partitions: public.root as 3; --via-root" in err) == (name == "p")
            connection.execute(f"select pg_drop_replication_slot('{name}')")


def test_an_existing_publication_that_is_not_what_the_options_ask_for_is_named(database: postgres.Database) -> None:
    with database.connect() as connection:
        connection.execute("create table a (id int primary key); create table b (id int primary key); create table log (id int)")
        connection.execute("create table root (id int primary key) partition by list (id)")
        connection.execute("create table leaf partition of root for values in (1)")
        connection.execute("create publication p for table a, root, log")
        options = ("--table", "public.*", "--exclude-table", "public.a", "--keyless", "full", "--via-root")
        for _ in range(2):  # -c makes the slot, and later finds it
            code, err = prepare(database, *options)
            assert code == 0
            assert (
                "publication 'p' exists, and is not what the options ask for: it lacks public.b; it also has public.a;"
                " it has partitions in place of partitioned tables (--via-root); --keyless full does not change public.log;"
                " ALTER PUBLICATION changes it" in err
            )
        connection.execute("alter publication p set table b, root, log; alter publication p set (publish_via_partition_root)")
        connection.execute("alter table log add primary key (id)")
        assert prepare(database, *options) == (0, "")
        code, err = prepare(database, "--table", "public.gone")
        assert code == 0
        assert "the options do not fit the tables any more: --table public.gone matches no table" in err
        code, err = prepare(database, "--keyless", "insert-only")
        assert code == 2
        assert "no publication 'p_keyless'" in err
        connection.execute("select pg_drop_replication_slot('s')")


def test_columns_that_never_leave_the_server(database: postgres.Database, role: str) -> None:
    with database.connect() as connection:
        for statement in (
            "create table person (id int primary key, name text, ssn text, double int generated always as (id * 2) stored)",
            'create schema s; create table s.person (id int primary key, "Secret key" text, ssn text)',
            "create table plain (id int primary key, v text)",
            "create table log (line text, ssn text)",
            "create table root (id int primary key, ssn text) partition by list (id)",
            "create table leaf partition of root for values in (1)",
        ):
            connection.execute(statement)
        for table in "person", "s.person", "plain", "log", "root", "leaf":
            connection.execute(f"alter table {table} owner to {role}")
        connection.execute(f"grant usage on schema public, s to {role}")
        options = ["-U", role, "--exclude-column", "*.*.ssn", "--exclude-column", "s.person.Secret*"]
        options += ["--keyless", "insert-only", "--via-root"]
        if connection.info.server_version < 150000:
            code, err = prepare(database, *options)
            assert code == 2
            assert "--exclude-column takes PostgreSQL 15 or newer; this server has 14" in err
            assert things(connection) == []
            return
        # A snapshot needs no SELECT on columns that are not published.
        connection.execute(f"revoke select on person from {role}; grant select (id, name) on person to {role}")
        code, err = prepare(database, *options, "--export-snapshot", "--check-select", "*")
        assert code == 0, err
        columns = "select p.schemaname || '.' || p.tablename, p.attnames::text[] from pg_publication_tables p order by 1"
        found = dict(connection.execute(columns).fetchall())
        if connection.info.server_version < 160000:  # its view lists generated columns, which the server does not publish
            found = {table: [name for name in names if name != "double"] for table, names in found.items()}
        assert found == {
            "public.log": ["line"],
            "public.person": ["id", "name"],
            "public.plain": ["id", "v"],
            "public.root": ["id"],
            "s.person": ["id"],
        }
        connection.execute("insert into person values (1, 'Ann', 'canary-1')")
        connection.execute(
            "update person set ssn = 'canary-2'; insert into log values ('x', 'canary-3'); update log set line = 'y'"
        )
        connection.execute("insert into root values (1, 'canary-4'); delete from root")
        (end,) = row_of(connection, "select pg_current_wal_insert_lsn()::text")
        stream = ("-d", database.dsn, "-S", "s", "--publication", "p", *options[4:], "-A", "--endpos", str(end))
        code, out, err = run_cli(*stream, "--output", "json", "-N")
        assert code == 0, err
        assert b"Ann" in out
        assert b"canary" not in out
        # An existing publication that has the column is refused: a warning would come too late.
        connection.execute("alter publication p set table person, s.person, plain, root")
        code, err = prepare(database, *options)
        assert code == 2
        assert "an existing publication has public.person.ssn, public.root.ssn, s.person.Secret key, s.person.ssn\n" in err
        connection.execute("select pg_drop_replication_slot('s')")


def test_columns_that_can_not_be_left_out(pg18: postgres.Cluster) -> None:
    with pg18.database() as database, database.connect() as connection:
        for statement in (
            "create table a (id int primary key, code int not null unique, v text)",
            "alter table a replica identity using index a_code_key",
            "create table whole (id int primary key, v text); alter table whole replica identity full",
            "create table root (id int primary key, v text) partition by list (id)",
            "create table keyless (v text)",
        ):
            connection.execute(statement)
        with connected(connection_parameters([("dbname", database.dsn)])) as ours:

            def refused(*columns: str, **options: Any) -> str:
                with pytest.raises(InitError) as raised:
                    select(ours, NewPublication.of(exclude_columns=columns, **options))
                assert raised.value.hint
                return raised.value.message.removeprefix("columns can't be left out: ")

            assert refused("public.a.id", "public.a.code") == "public.a.code is part of a key, public.a.id is part of a key"
            assert refused("public.whole.v") == "public.whole has REPLICA IDENTITY FULL, which needs all columns"
            assert (
                refused("public.keyless.v", keyless="full") == "public.keyless has REPLICA IDENTITY FULL, which needs all columns"
            )
            assert refused("public.root.v") == "public.root is partitioned, and has a column list only with --via-root"
            assert refused("public.A.v", "public.a.V") == (
                "--exclude-column public.A.v matches no column of a published table, --exclude-column public.a.V matches no column"
                " of a published table"
            )
            # The server is the oracle: it accepts the first of these publications, and refuses an UPDATE with the second.
            wanted = NewPublication.of(tables=["public.a"], exclude_columns=["public.a.v"])
            create_publication(ours, "good", select(ours, wanted), wanted)
        connection.execute("insert into a values (1, 1, 'x'); update a set v = 'y'")
        connection.execute("create publication bad for table a (id, v)")
        with pytest.raises(psycopg.errors.InvalidColumnReference):
            connection.execute("update a set v = 'z'")


@pytest.mark.parametrize("version", ["15", "18"])
def test_a_column_list_lacks_no_generated_column_of_the_replica_identity(request: pytest.FixtureRequest, version: str) -> None:
    """The server would refuse each UPDATE and DELETE."""
    cluster: postgres.Cluster = request.getfixturevalue(f"pg{version}")
    with cluster.database() as database, database.connect() as connection:
        connection.execute(
            "create table t (id int not null unique, secret text, g int generated always as (id) stored, primary key (id, g));"
            "insert into t (id) values (1)"
        )
        options = "--table", "public.t", "--exclude-column", "public.t.secret"
        code, err = prepare(database, *options)
        assert code == 2
        assert "public.t.g is a generated column of the replica identity, which the column list would lack" in err
        assert things(connection) == []
        if version == "18":  # where it could not be published without a list, either
            assert prepare(database, *options, "--keyless", "insert-only")[0] == 0
            connection.execute("update t set secret = 'x'")
            connection.execute("select pg_drop_replication_slot('s'); drop publication p, p_keyless")
        # What the message says helps.
        connection.execute("alter table t replica identity using index t_id_key")
        assert prepare(database, *options) == (0, "")
        connection.execute("update t set secret = 'y'; delete from t; select pg_drop_replication_slot('s')")


def test_land_takes_the_same_options(pg18: postgres.Cluster, tmp_path: Path) -> None:
    with pg18.database() as database, database.connect() as connection:
        connection.execute("create table keyed (id int primary key); create table plain (v text)")
        land = (
            "land",
            "-d",
            database.dsn,
            "-S",
            "s",
            "--publication",
            "p",
            "-c",
            "--available-now",
            "--staging",
            str(tmp_path / "s"),
        )
        ended = run_spark_cli(*land)
        assert (ended.returncode, ended.stderr.count("public.plain")) == (2, 1)
        assert "--keyless insert-only" in ended.stderr
        assert things(connection) == []
        ended = run_spark_cli(*land, "--keyless", "insert-only")
        assert ended.returncode == 0, ended.stderr
        assert "'p_keyless' has only INSERT and TRUNCATE" in ended.stderr
        assert sorted(things(connection)) == ["p", "p_keyless", "s"]
        epoch = json.loads(next(iter((tmp_path / "s").glob("*/epoch.json"))).read_text())
        assert epoch["publications"] == ["p", "p_keyless"]
        # A later start with other options says what differs, and goes on.
        connection.execute("create table late (id int primary key)")
        ended = run_spark_cli(*land, "--keyless", "insert-only", "--table", "public.*")
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr.count("'p' exists, and is not what the options ask for: it lacks public.late") == 1
        connection.execute("select pg_drop_replication_slot('s')")
