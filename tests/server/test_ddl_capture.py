"""DDL capture on real servers: what each form of DDL writes into the stream, and what it must not."""

import contextlib
from collections.abc import Iterator

import postgres
import psycopg
import pytest

from support.ddl_capture import Capture, columns, summary, table


@pytest.fixture(scope="module", params=["15", "17", "18"])
def version(request: pytest.FixtureRequest) -> Iterator[Capture]:
    cluster: postgres.Cluster = request.getfixturevalue(f"pg{request.param}")
    with cluster.database() as database, contextlib.closing(Capture(database)) as made:
        yield made


@pytest.fixture
def capture(version: Capture) -> Capture:
    """Return the capture in a database with nothing but a table t, which has a row."""
    version.empty()
    version.run("create table t (id int primary key, name text)", "insert into t values (1, 'one')")
    return version


FORMS = {
    "create": ("create table n (id serial primary key, b numeric(10,2))", ["command CREATE TABLE n"]),
    "create as": ("create table n as select 1 as a", ["command CREATE TABLE AS n"]),
    "select into": ("select 1 as a into n", ["command SELECT INTO n"]),
    "create like": ("create table n (like t including all)", ["command CREATE TABLE n"]),
    "create in schema": ("create schema s create table n (id int)", ["command CREATE SCHEMA n"]),
    "unlogged": ("create unlogged table n (id int)", ["command CREATE TABLE n"]),
    "add column": ("alter table t add a int", ["command ALTER TABLE t"]),
    "drop column": ("alter table t drop name", ["drop ALTER TABLE t", "command ALTER TABLE t"]),
    "rename column": ("alter table t rename name to title", ["command ALTER TABLE t"]),
    "rename": ("alter table t rename to u", ["command ALTER TABLE u"]),
    "set schema": ("create schema s; alter table t set schema s", ["command CREATE SCHEMA", "command ALTER TABLE t"]),
    "rename schema": (
        "create schema s create table n (id int); alter schema s rename to z",
        ["command CREATE SCHEMA n", "command ALTER SCHEMA n"],
    ),
    "type": ("alter table t alter name type varchar(20)", ["rewrite ALTER TABLE", "command ALTER TABLE t"]),
    "volatile default": (
        "alter table t add r float default random()",
        ["rewrite ALTER TABLE", "command ALTER TABLE t"],
    ),
    "logged": (
        "create unlogged table n (id int); alter table n set logged",
        ["command CREATE TABLE n", "rewrite ALTER TABLE", "command ALTER TABLE n"],
    ),
    "several commands": (
        "alter table t add a int, drop name, alter id type bigint",
        ["rewrite ALTER TABLE", "drop ALTER TABLE t", "command ALTER TABLE t"],
    ),
    "several statements": (
        "alter table t add a int; alter table t add b int",
        ["command ALTER TABLE t", "command ALTER TABLE t"],
    ),
    "identity": ("alter table t replica identity full", ["command ALTER TABLE t"]),
    "drop key": ("alter table t drop constraint t_pkey", ["command ALTER TABLE t"]),
    "rename key": ("alter table t rename constraint t_pkey to k", ["command ALTER TABLE t"]),
    "unique index": ("create unique index i on t (name); drop index i", ["command CREATE INDEX t", "drop DROP INDEX t"]),
    "ordinary index": ("create index i on t (name)", []),
    "rename index": ("alter index t_pkey rename to k", ["command ALTER INDEX t"]),
    "drop": ("drop table t", ["drop DROP TABLE"]),
    "drop schema": (
        "create schema s create table n (id int); drop schema s cascade",
        ["command CREATE SCHEMA n", "drop DROP SCHEMA"],
    ),
    "comment": ("comment on table t is 'x'; comment on column t.name is 'y'", ["command COMMENT t", "command COMMENT t"]),
    "comment elsewhere": ("comment on schema public is 'x'; comment on index t_pkey is 'y'", []),
    "enum": (
        "create type e as enum ('a'); alter type e rename to f; drop type f",
        ["command CREATE TYPE", "command ALTER TYPE", "drop DROP TYPE"],
    ),
    "composite": (
        "create type c as (a int); create table n of c; alter type c add attribute b text cascade",
        ["command CREATE TYPE", "command CREATE TABLE n", "command ALTER TYPE n"],
    ),
    "domain": (
        "create domain d as int; create table n (id int, d d); alter domain d set not null; drop domain d cascade",
        ["command CREATE DOMAIN", "command CREATE TABLE n", "command ALTER DOMAIN", "drop DROP DOMAIN n"],
    ),
    "partitions": (
        "create table p (id int) partition by list (id); create table q partition of p default; alter table p add a int",
        ["command CREATE TABLE p", "command CREATE TABLE q", "command ALTER TABLE p q"],
    ),
    "inheritance": (
        "create table c () inherits (t); alter table t add a int",
        ["command CREATE TABLE c", "command ALTER TABLE t c"],
    ),
    "publication": (
        "create publication p for table t; alter publication p drop table t; drop publication p",
        ["command CREATE PUBLICATION t", "drop ALTER PUBLICATION", "command ALTER PUBLICATION", "drop DROP PUBLICATION"],
    ),
    "publication of schemas": (
        "create publication p for tables in schema public",
        ["command CREATE PUBLICATION t"],
    ),
    "publication options": (
        "create publication p; alter publication p set (publish = 'insert'); alter publication p rename to q",
        ["command CREATE PUBLICATION", "command ALTER PUBLICATION", "command ALTER PUBLICATION"],
    ),
    "do block": (
        "do $$ begin create table n (id int); execute 'alter table n add a int'; end $$",
        ["command CREATE TABLE n", "command ALTER TABLE n"],
    ),
    "temporary": ("create temp table n (id int); alter table n add a int; create index on n (a); drop table n", []),
    "views": ("create view v as select 1 as a; alter view v rename to w; drop view w", []),
    "others": ("create sequence s; create function f() returns int language sql as 'select 1'; grant select on t to public", []),
    "drop function": (
        (
            "create function f(int) returns int language sql immutable as 'select 1';"
            "alter table t add g int generated always as (f(id)) stored; drop function f cascade"
        ),
        ["rewrite ALTER TABLE", "command ALTER TABLE t", "drop DROP FUNCTION t"],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_ddl_has_its_messages(capture: Capture, form: str) -> None:
    statement, expected = FORMS[form]
    assert summary(capture.run(statement)) == expected


def test_a_table_is_described_completely(capture: Capture) -> None:
    capture.run("create domain d as numeric(10,2)", "create type mood as enum ('ok')")
    (message,) = capture.run(
        "create table public.n (id bigint generated always as identity, code varchar(5) not null, price d, mood mood default 'ok',"
        " twice int generated always as (1 + 1) stored, primary key (code, id) include (price), unique (id))"
    )
    found = table(message, "n")
    assert message["statement"].startswith("create table public.n (id")
    assert [each["type"] for each in message["objects"]] == ["table", "index", "index"]
    assert (found["schema"], found["kind"], found["persistence"], found["comment"]) == ("public", "table", "permanent", None)
    assert columns(message, "n") == [
        "1 id bigint!", "2 code character varying(5)!", "3 price public.d", "4 mood public.mood", "5 twice integer",
    ]  # fmt: skip
    assert [each["identity"] for each in found["columns"]] == ["always", None, None, None, None]
    assert [each["generated"] for each in found["columns"]] == [None, None, None, None, "stored"]
    assert [each["has_default"] for each in found["columns"]] == [False, False, False, True, False]
    assert found["columns"][1]["type"] == {
        "oid": 1043, "schema": "pg_catalog", "name": "varchar", "modifier": 9, "text": "character varying(5)",
    }  # fmt: skip
    assert (found["primary_key"]["columns"], found["primary_key"]["name"]) == ([2, 1], "n_pkey")
    assert [(each["name"], each["columns"]) for each in found["unique_indexes"]] == [("n_id_key", [1])]
    assert found["replica_identity"] == {"kind": "default", "index": None, "columns": [2, 1]}
    (message,) = capture.run("alter table n replica identity using index n_id_key")
    assert table(message, "n")["replica_identity"] == {
        "kind": "index", "index": found["unique_indexes"][0]["oid"], "columns": [1],
    }  # fmt: skip


MISSING = {
    "int": ("7", "7"),
    "text": ("$$a'b\"c,{}\\ NULL$$", "a'b\"c,{}\\ NULL"),
    "text /* empty */": ("''", ""),
    "text /* null */": ("'NULL'", "NULL"),
    "timestamptz": ("'2020-01-02 03:04:05.6+02'", "2020-01-02 01:04:05.6+00"),
    "interval": ("'1 day 02:03:04'", "1 day 02:03:04"),
    "float8": ("0.1", "0.1"),
    "bytea": ("'\\x00ff'", "\\x00ff"),
    "int[]": ("'{1,NULL,3}'", "{1,NULL,3}"),
    "text[]": ('\'{"a,b","c\\""}\'', '{"a,b","c\\""}'),
    "jsonb": ('\'{"a": [1, "x"]}\'', '{"a": [1, "x"]}'),
    "boolean": ("true", "t"),
    "regclass": ("'public.t'", "public.t"),
    "int4range": ("'[1,5)'", "[1,5)"),
    "box": ("'(1,1),(0,0)'", "(1,1),(0,0)"),
    "box[]": ("'{(1,1),(0,0);(2,2),(1,1)}'", "{(1,1),(0,0);(2,2),(1,1)}"),
}


@pytest.mark.parametrize("type_name", MISSING)
def test_old_rows_value_of_a_new_column_is_in_the_message(capture: Capture, type_name: str) -> None:
    """The settings of the session that runs the DDL don't matter: the text is that of the stream."""
    default, text = MISSING[type_name]
    capture.run(
        "set datestyle = 'SQL, DMY'", "set timezone = 'Asia/Tokyo'", "set intervalstyle = 'iso_8601'",
        "set extra_float_digits = -15", "set bytea_output = 'escape'", "set quote_all_identifiers = on",
    )  # fmt: skip
    (message,) = capture.run(f"alter table t add x {type_name} default {default}")
    assert table(message, "t")["columns"][-1]["missing"] == text
    assert '"' not in table(message, "t")["columns"][-1]["type"]["text"] + message["objects"][0]["identity"]
    capture.run("reset all")


def test_what_a_drop_dropped(capture: Capture) -> None:
    ((t_id,),) = capture.connection.execute("select 't'::regclass::oid::bigint")
    capture.run("create type mood as enum ('ok')", "alter table t add m mood")
    (drop,) = capture.run("drop type mood cascade")
    assert [(each["type"], each["name"], each["column"], each["number"], each["is_named"]) for each in drop["dropped"]] == [
        ("type", "mood", None, None, True),
        ("table column", "t", "m", 3, False),
    ]
    assert columns(drop, "t") == ["1 id integer!", "2 name text"]
    (drop,) = capture.run("drop table t")
    assert [(each["oid"], each["schema"], each["name"]) for each in drop["dropped"]] == [(t_id, "public", "t")]


def test_a_type_comes_with_those_that_contain_it(capture: Capture) -> None:
    capture.run(
        "create type mood as enum ('ok')",
        "create domain feeling as mood",
        "create domain feelings as feeling[]",
        "create type pair as (a int, moods mood[])",
        "create type pairs as (p pair)",
        "create type span as range (subtype = mood)",
        "create type other as enum ('ok')",
        "create table row_type (m feeling)",
        "create table no_row_type (m mood)",
        "create table n (id int, f feelings, p pairs, r row_type[], o other, x name)",
    )
    (message,) = capture.run("alter type mood rename value 'ok' to 'fine'")
    kinds = {each["name"]: each["kind"] for each in message["types"]}
    assert kinds == {
        "mood": "enum", "feeling": "domain", "feelings": "domain", "pair": "composite", "pairs": "composite",
        "span": "range", "span_multirange": "multirange", "row_type": "composite",
    }  # fmt: skip
    used = {each["oid"] for each in message["types"]} | {each["array"] for each in message["types"]}
    ((found,),) = capture.connection.execute(
        "select array_agg(attname::text order by attnum) from pg_attribute where attrelid = 'n'::regclass and atttypid = any (%s)",
        (list(used - {None}),),
    )
    assert found == ["f", "p", "r"]
    (message,) = capture.run("alter type pair add attribute c int")
    assert [each["name"] for each in message["types"]] == ["pair", "pairs"]


def test_a_default_that_went_with_its_function(capture: Capture) -> None:
    capture.run("create function f() returns text language sql as 'select 1'", "alter table t alter name set default f()")
    (drop,) = capture.run("drop function f cascade")
    assert [(each["type"], each["name"], each["column"], each["number"]) for each in drop["dropped"]] == [
        ("default value", "t", "name", 2)
    ]
    assert [each["has_default"] for each in table(drop, "t")["columns"]] == [False, False]
    assert summary(capture.run("alter table t alter name set default 'x'", "alter table t alter name drop default")) == [
        "command ALTER TABLE t", "command ALTER TABLE t",
    ]  # fmt: skip


def test_the_exceptions_of_a_publication_are_not_its_tables(capture: Capture) -> None:
    """There is no server of PostgreSQL 19 for the tests. A subquery has the column that it adds."""
    rows, with_exceptions = (
        "FROM pg_publication_rel r",
        "FROM (SELECT *, prrelid = 'public.t'::regclass AS prexcept FROM pg_publication_rel) r",
    )
    ((definition,),) = capture.connection.execute("select pg_get_functiondef('cdcpipe.ddl_publications(oid[])'::regprocedure)")
    assert definition.count(rows) == 1
    capture.run("create table u (id int primary key)")
    capture.connection.execute(definition.replace(rows, with_exceptions))
    try:
        (message,) = capture.run("create publication q for table t, u")
        assert [each["name"] for each in message["publications"][0]["tables"]] == ["u"]
    finally:
        capture.install()


def test_partitions_that_come_and_go(capture: Capture) -> None:
    parent = capture.run("create table p (id int primary key) partition by list (id)")[0]["tables"][0]
    capture.run("create table p1 (id int primary key)", "insert into p1 values (1)")
    (message,) = capture.run("alter table p attach partition p1 for values in (1)")
    assert table(message, "p1")["partition_of"] == {"oid": parent["oid"], "schema": "public", "name": "p"}
    for statement in ("alter table p detach partition p1", "alter table p detach partition p1 concurrently"):
        (message,) = capture.run(statement)
        assert table(message, "p1")["partition_of"] is None
        capture.run("alter table p attach partition p1 for values in (1)")


def test_messages_are_at_their_place_among_the_rows(capture: Capture) -> None:
    with capture.connection.transaction():
        capture.connection.execute("insert into t values (2, 'two')")
        capture.connection.execute("alter table t add a int default 5")
        capture.connection.execute("insert into t values (3, 'three', 3)")
    stream = [each if isinstance(each, str) else each["kind"] for each in capture.read_stream()]
    assert stream == ["R", "I", "command", "R", "I"]


def test_what_is_rolled_back_is_not_told(capture: Capture) -> None:
    capture.run("create table u (id int)")
    with capture.connection.transaction(force_rollback=True):
        capture.connection.execute("alter table t add a int")
    with capture.connection.transaction():
        capture.connection.execute("alter table t add b int")
        with capture.connection.transaction(force_rollback=True):
            capture.connection.execute("alter table t add c int")
            capture.connection.execute("drop table u")
        capture.connection.execute("alter table t add d int")
    assert [columns(message, "t")[2:] for message in capture.read()] == [["3 b integer"], ["3 b integer", "4 d integer"]]


def test_the_subtransaction_is_named(capture: Capture) -> None:
    def add(name: str) -> None:
        capture.connection.execute(f"alter table t add {name} int")

    with capture.connection.transaction():
        add("a")
        with capture.connection.transaction():
            add("b")
            with capture.connection.transaction():
                add("c")
            add("d")
        with capture.connection.transaction(force_rollback=True):
            add("e")
        add("f")
    first, *others = [message["xid"] for message in capture.read()]
    assert [xid - first for xid in others] == [1, 2, 1, 0]


def test_a_prepared_transaction_tells_its_ddl(capture: Capture) -> None:
    for statement in ("begin", "alter table t add a int", "insert into t values (2, 'two', 2)", "prepare transaction 'ddl'"):
        capture.connection.execute(statement)
    assert capture.read() == []
    assert summary(capture.run("commit prepared 'ddl'")) == ["command ALTER TABLE t"]


def test_everybody_s_ddl_is_captured_and_works(capture: Capture) -> None:
    """A user may have no privilege on the capture, and may hide catalogs and functions behind names of its own."""
    role = f"user_{capture.database.name}"
    found = capture.connection.execute("select oid::regprocedure::text from pg_proc where proname = 'pg_logical_emit_message'")
    functions = [name for (name,) in found]
    capture.run(f"create role {role}; create schema own authorization {role}")
    try:
        for function in functions:
            capture.connection.execute(f"revoke execute on function {function} from public")
        for statement in (
            f"set role {role}",
            "set search_path = own, pg_catalog",
            "create function own.json_agg(json) returns json language plpgsql as $$ begin raise 'called'; end $$",
            "create function own.left(text, int) returns text language plpgsql as $$ begin raise 'called'; end $$",
            "create table pg_class (id int primary key)",
            "alter table own.pg_class add a int",
            "drop table own.pg_class",
            "reset role",
        ):
            capture.connection.execute(statement)
        messages = capture.read()
        assert summary(messages) == ["command CREATE TABLE pg_class", "command ALTER TABLE pg_class", "drop DROP TABLE"]
        assert columns(messages[1], "pg_class") == ["1 id integer!", "2 a integer"]
    finally:
        capture.connection.execute(f"reset all; reset role; drop owned by {role} cascade; drop role {role}")
        for function in functions:
            capture.connection.execute(f"grant execute on function {function} to public")


def test_a_replica_s_session_is_captured(capture: Capture) -> None:
    capture.connection.execute("set session_replication_role = replica")
    assert summary(capture.run("alter table t add a int")) == ["command ALTER TABLE t"]


BROKEN = {
    "ddl_tables": ("alter table t add a int", "ddl_command_end", "ALTER TABLE"),
    "ddl_statement": ("drop table t", "sql_drop", "DROP TABLE"),
}


@pytest.mark.parametrize("function", ["ddl_tables", "ddl_statement"])
def test_an_error_in_the_capture_does_not_fail_the_statement(capture: Capture, function: str) -> None:
    statement, event, tag = BROKEN[function]
    warnings: list[str] = []
    capture.connection.add_notice_handler(lambda notice: warnings.append(notice.message_primary or ""))
    (definition,) = capture.connection.execute(
        "select pg_get_functiondef(oid) from pg_proc where pronamespace = 'cdcpipe'::regnamespace and proname = %s", [function]
    ).fetchone()
    capture.connection.execute(definition.replace("BEGIN\n", "BEGIN\n RAISE division_by_zero USING MESSAGE = 'broken';\n", 1))
    try:
        (message,) = capture.run(statement)
        assert (message["kind"], message["tag"], message["event"]) == ("failure", tag, event)
        assert (message["sqlstate"], message["error"]) == ("22012", "broken")
        assert warnings == [f"cdcpipe: {tag} was not captured: broken"]
        settings = '$$ select \'{"version": 1, "statements": true, "strict": true}\'::json $$'
        capture.connection.execute(
            f"create or replace function cdcpipe.ddl_settings() returns json language sql immutable as {settings}"
        )
        with pytest.raises(psycopg.errors.DivisionByZero):
            capture.connection.execute("create table never (id int); drop table never")
        assert capture.read() == []
    finally:
        capture.install("--no-strict")


def test_thousands_of_statements_need_no_subtransaction_ids(capture: Capture) -> None:
    with capture.connection.transaction():
        for number in range(20):
            capture.connection.execute(f"create table n{number} (id int)")
        ((first, last),) = capture.connection.execute(
            "select pg_current_xact_id()::text::bigint, pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        )
    assert {message["xid"] for message in capture.read()} == {first}
    assert last <= first + 2  # nobody else has written meanwhile, except for the server itself


def test_a_database_in_another_encoding(pg18: postgres.Cluster) -> None:
    """The content is UTF-8, whatever the encoding. pgoutput does not convert it."""
    with pg18.connect() as connection:
        connection.execute("create database latin encoding 'latin1' locale 'C' template template0")
    database = postgres.Database(pg18, "latin")
    try:
        with contextlib.closing(Capture(database)) as capture:
            (message,) = capture.run('create table "Größe" (id int)')
            assert summary([message]) == ["command CREATE TABLE Größe"]
            assert message["statement"] == 'create table "Größe" (id int)'
    finally:
        database.drop()


def test_odd_names(capture: Capture) -> None:
    (message,) = capture.run('create table "a""b \'c\\\n" ("d\'""\\" int primary key)')
    assert columns(message, "a\"b 'c\\\n") == ["1 d'\"\\ integer!"]
    (drop,) = capture.run('drop table "a""b \'c\\\n"')
    assert drop["dropped"][0]["name"] == "a\"b 'c\\\n"
