"""test_decoding from pgoutput against the real plugin: the same WAL of PostgreSQL 15 through both, byte for byte."""

from __future__ import annotations

import pytest

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.plugins import load, test_decoding
from support.decoding_records import render, without_empty
from support.logical_stream import WORDS, Both, both_on, refusals
from support.random_sql import VALUES, RandomSQL, fill_tables_of_types, make_tables_of_types
from support.recorder import nothing
from support.seeds import SEED

OPTION_SETS: list[dict[str, str | None]] = [
    {},
    {"include-xids": "0", "include-timestamp": None},
    {"skip-empty-xacts": "1", "include-timestamp": "1", "force-binary": "1"},
    {"skip-empty-xacts": "1", "include-xids": "0", "stream-changes": "0"},
]


def compare(both, option_sets=OPTION_SETS, **extra):
    for options in option_sets:
        theirs = without_empty(both.theirs(options))
        ours = without_empty(render(both, options, extra))
        assert theirs
        assert [record for _, record in ours] == [record for _, record in theirs], options
        # The header of BEGIN is the first change's, and may be another one's (wal2json's difference 2).
        first = (b"BEGIN", b"opening")
        assert [lsn for lsn, record in ours if not record.startswith(first)] == [
            lsn for lsn, record in theirs if not record.startswith(first)
        ]


@pytest.fixture
def both(pg15):
    with both_on(pg15, "test_decoding", logical_decoding_work_mem="64kB") as made:
        yield made
        for (gid,) in made.query("select quote_literal(gid) from pg_prepared_xacts where database = current_database()"):
            made.run(f"rollback prepared {gid}")


def test_every_type(both):
    tables = make_tables_of_types(both.run)
    for table in tables[1::2]:
        both.run(f"alter table {table} replica identity full")
    both.begin()
    fill_tables_of_types(both.run)
    for table in tables:
        both.run(f"update {table} set id = id + 100; delete from {table}")
    compare(both)


def test_names_and_types_of_users(both):
    both.run(
        """
        create schema "Odd schema"; create schema w; create type w.mood as enum ('x', 'it''s'); create domain price as numeric(8,2);
        create type "Qt" as enum ('q'); create extension hstore;
        create table "Odd schema"."Ta ble" ("Co""l" int primary key, "select" w.mood, "user" price, "name" "Qt"[], "1a" hstore,
          "\u00e4" text, integer text, between_ text, "between" text, "offset" text, "Up" text, "do" text, "a$b" text);
        """
    )
    both.begin()
    both.run(
        """insert into "Odd schema"."Ta ble" values (1, 'it''s', 1.5, '{q}', 'a=>b', E'back\\\\slash ''q'' \\n', 'i');
        update "Odd schema"."Ta ble" set "Co""l" = 2; update "Odd schema"."Ta ble" set "Up" = 'u';
        delete from "Odd schema"."Ta ble"; truncate "Odd schema"."Ta ble" restart identity cascade"""
    )
    compare(both)


def test_toast_truncate_and_messages(both):
    both.run(
        """
        create table t (id int primary key, a text, n int); alter table t alter a set storage external;
        create table f (id int primary key, a text, n int); alter table f alter a set storage external;
        alter table f replica identity full
        """
    )
    both.begin()
    for table in "tf":
        both.run(
            f"""insert into {table} values (1, repeat('x''', 3000), null); update {table} set n = 1; update {table} set id = 2;
            update {table} set a = 'y'; delete from {table}"""
        )
    both.run("truncate t, f; truncate t restart identity")
    both.run("select pg_logical_emit_message(true, 'p', '\\x61006200ff'::bytea)")
    both.run("select pg_logical_emit_message(false, 'q', 'x')")
    both.run("begin; insert into t values (1); select pg_logical_emit_message(true, 'p', 'x'); commit")
    compare(both)


STREAMS = [{"stream-changes": "1"}, {"stream-changes": "1", "skip-empty-xacts": "1", "include-xids": "0"}]
STREAMS.append({"stream-changes": "1", "include-timestamp": "1"})


def test_streamed_transactions(both):
    both.run("create table t (id int, v text default repeat('v', 100))")
    both.begin()
    both.run("begin; insert into t select generate_series(1, 2000); savepoint a; insert into t select generate_series(1, 2000)")
    both.run("rollback to a; savepoint b; insert into t select generate_series(1, 2000); release b; truncate t")
    both.run("select pg_logical_emit_message(true, 'p', 'x'); insert into t select generate_series(1, 2000)")
    both.run("commit")
    both.run("begin; insert into t select generate_series(1, 2000); rollback")
    both.run("insert into t values (1)")
    compare(both, STREAMS)


@pytest.mark.parametrize("version", ["15", "17"])
def test_messages_without_changes(request, version):
    """The server's version decides whether messages alone make a transaction, or a block of one."""
    with request.getfixturevalue(f"pg{version}").database() as database:
        both = Both(database, "test_decoding", logical_decoding_work_mem="64kB")
        try:
            both.run("create table t (id int)")
            both.begin()
            both.run("begin; select pg_logical_emit_message(true, 'p', 'x'); commit")
            both.run("begin; select pg_logical_emit_message(true, 'p', 'x'); insert into t values (1); commit")
            both.run("begin; select pg_logical_emit_message(true, 'p', repeat('x', 1000)) from generate_series(1, 200); commit")
            both.run("begin; insert into t values (2); select pg_logical_emit_message(false, 'p', 'x'); commit")
            compare(both, [{"skip-empty-xacts": "1", "stream-changes": streams} for streams in "01"])
        finally:
            both.connection.close()


def test_origins(both):
    """Also large transactions in progress and prepared ones. Messages outside of transactions have no origin (wal2json's difference
    6).
    """
    both.run(
        "create table t (id int, v text default repeat('v', 100)); select pg_replication_origin_create('test_decoding_origin')"
    )
    both.begin(two_phase=True)
    both.run("select pg_replication_origin_session_setup('test_decoding_origin')")
    both.run("begin; insert into t values (1); select pg_logical_emit_message(true, 'p', 'x'); commit")
    both.run("begin; insert into t select generate_series(1, 2000); commit")
    both.run("begin; insert into t values (2); prepare transaction 'from elsewhere'")
    both.run("commit prepared 'from elsewhere'")
    both.run("begin; insert into t select generate_series(1, 2000); prepare transaction 'large, from elsewhere'")
    both.run("rollback prepared 'large, from elsewhere'")
    both.run("select pg_replication_origin_session_reset()")
    both.run("insert into t values (2)")
    both.run("begin; insert into t select generate_series(1, 2000); commit")
    phases = {"two_phase": "on"}
    for only in ({}, {"only-local": "1"}):
        compare(both, [only, {**only, "stream-changes": "1"}])
        compare(both, [only, {**only, "stream-changes": "1"}], **phases)
    both.run("select pg_replication_origin_drop('test_decoding_origin')")


def test_two_phase(both):
    both.run("create table t (id int, v text default repeat('v', 100))")
    both.begin(two_phase=True)
    for gid, end in (("it's", "commit"), ("back\\slash", "rollback")):
        quoted = gid.replace("'", "''")
        both.run(f"begin; insert into t values (1); prepare transaction '{quoted}'")
        both.run(f"{end} prepared '{quoted}'")
    both.run("begin; insert into t select generate_series(1, 3000); prepare transaction 'big'")
    both.run("commit prepared 'big'")
    both.run("insert into t values (2)")
    phases = {"two_phase": "on"}
    compare(both, [{}, {"include-timestamp": "1"}, {"skip-empty-xacts": "1", "include-xids": "0"}], **phases)
    compare(both, STREAMS, **phases)


def test_a_gid_that_the_servers_plugin_does_not_prepare(both):
    """docs/output-plugins.md, test_decoding, 2."""
    both.run("create table t (id int)")
    both.begin(two_phase=True)
    both.run("begin; insert into t values (1); prepare transaction 'a_nodecode'")
    both.run("commit prepared 'a_nodecode'")
    options = {"include-xids": "0"}
    change = b"table public.t: INSERT: id[integer]:1"
    assert [record for _, record in without_empty(both.theirs(options))] == [b"BEGIN", change, b"COMMIT"]
    ours = [b"BEGIN", change, b"PREPARE TRANSACTION 'a_nodecode'", b"COMMIT PREPARED 'a_nodecode'"]
    assert [record for _, record in render(both, options, {"two_phase": "on"})] == ours


@pytest.mark.parametrize("two_phase", [False, True])
def test_random_workload(both, two_phase):
    print(f"CDCPIPE_TEST_SEED={SEED}")
    with both.database.connect() as other:
        work = RandomSQL(SEED, VALUES, [both.run, other.execute], is_plain=two_phase)
        work.prepare()
        both.begin(two_phase=two_phase)
        work.work(120)
    phases = {"two_phase": "on"} if two_phase else {}
    compare(both, OPTION_SETS[:3], **phases)
    compare(both, STREAMS, **phases)


def test_options_are_the_servers(both):
    both.begin()
    cases = [{name: value} for name in [*test_decoding._DEFAULTS, "nonsense", "include_xids"] for value in WORDS]
    for options, said in zip(cases, refusals(both.database.dsn, both.slots[0], cases), strict=True):
        try:
            load("test_decoding", options, nothing)
            ours = None
        except InvalidArgumentsError as ex:
            ours = str(ex)
        assert (said is None) == (ours is None) or "include-rewrites" in options, (options, said, ours)
