"""wal2json from pgoutput against the real plugin: the same WAL of PostgreSQL 15 through both, byte for byte."""

from __future__ import annotations

import json
import re

import pytest

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.plugins import load
from cdcpipe.plugins.wal2json.options import Settings
from support.logical_stream import WORDS, Both, refusals
from support.random_sql import VALUES, RandomSQL
from support.recorder import nothing
from support.seeds import SEED
from support.wal2json_records import EVERYTHING, OPTION_SETS, V1, V2, compare, render


@pytest.mark.parametrize("identity", ["default", "full", "using index i_two", "using index i_one"])
def test_replica_identities(both, identity):
    both.run(
        f"""
        create table t (a int, v text, id int primary key, b text not null, c int not null, d numeric);
        create unique index i_one on t (c);
        create unique index i_two on t (c, b);
        alter table t replica identity {identity};
        """
    )
    both.begin()
    both.run(
        """
        insert into t values (1, 'v', 1, 'b', 1, 1.5), (null, null, 2, 'b', 2, null);
        update t set v = 'w';
        update t set a = null where id = 1;
        update t set id = id + 10;
        update t set b = 'bb', c = c + 10;
        update t set b = 'c' where id = 11;
        delete from t where id = 11;
        delete from t;
        """
    )
    compare(both)


def test_full_identity_without_key_and_a_row_of_nulls(both):
    both.run("create table t (a int, b text); alter table t replica identity full")
    both.begin()
    both.run("insert into t values (null, null), (1, 'x'); update t set b = 'y'; update t set a = 2; delete from t")
    compare(both)


def test_toast(both):
    both.run(
        """
        create table t (id int primary key, a text, n int, b text); alter table t alter a set storage external;
        create table f (id int primary key, a text, n int, b text); alter table f alter a set storage external;
        alter table f replica identity full;
        create table k (k text primary key, n int, a text); alter table k alter k set storage external;
        alter table k alter a set storage external;
        """
    )
    both.begin()
    for table in "tf":
        both.run(
            f"""
            insert into {table} values (1, repeat('x"', 3000), 1, 'b'), (2, repeat('y', 5000), 2, repeat('z', 9000));
            update {table} set n = 5;
            update {table} set b = null where id = 1;
            update {table} set id = id + 10;
            update {table} set a = 'short' where id = 11;
            update {table} set a = null where id = 12;
            delete from {table};
            """
        )
    both.run("insert into k values (repeat('k', 2500), 1, repeat('a', 5000)); update k set n = 2; update k set a = 'x'")
    both.run("update k set k = 'short'; delete from k")
    compare(both)


def test_savepoints_and_rollbacks(both):
    both.run("create table t (id int primary key)")
    both.begin()
    both.run(
        """
        begin; insert into t values (1); savepoint a; insert into t values (2); rollback to a; insert into t values (3);
        savepoint b; insert into t values (4); release b; commit;
        begin; insert into t values (5); rollback;
        begin; savepoint a; insert into t values (6); commit;
        """
    )
    compare(both)


def test_interleaved_transactions(both):
    both.run("create table t (id int primary key)")
    both.begin()
    with both.database.connect() as other:
        other.execute("begin; insert into t values (1)")
        both.run("insert into t values (2)")
        other.execute("insert into t values (3); commit")
    both.run("insert into t select generate_series(10, 300)")
    compare(both)


def test_truncate(both):
    both.run(
        """
        create table a (id int primary key); create table b (id int primary key references a);
        create table c (id serial primary key)
        """
    )
    both.begin()
    both.run("insert into a values (1); insert into b values (1); truncate a, b; truncate c restart identity; truncate a cascade")
    both.run("begin; insert into c values (7); truncate c; insert into c values (8); commit")
    compare(both)


def test_partitions(both):
    both.run(
        """
        create table p (id int, v text, primary key (id)) partition by list (id);
        create table p1 partition of p for values in (1); create table p2 partition of p for values in (2)
        """
    )
    both.begin()
    both.run("insert into p values (1, 'x'); update p set id = 2; update p set v = 'y'; delete from p; truncate p2")
    compare(both)


def test_partitions_by_way_of_their_root(pg15):
    """The publication gives the root's name, wal2json the partition's. Otherwise the records are the same."""
    with pg15.database() as database:
        both = Both(database, "wal2json", "for all tables with (publish_via_partition_root)")
        both.run(
            """
            create table p (id int, v text, n int, primary key (id)) partition by list (id);
            create table p1 partition of p for values in (1);
            create table p2 partition of p for values in (2); create table p3 (n int, gone int, id int not null, v text);
            alter table p3 drop column gone; alter table p attach partition p3 for values in (3)
            """
        )
        both.begin()
        both.run(
            "insert into p values (1, 'x', 5); update p set id = 2; update p set v = 'y'; delete from p; insert into p1 values (1)"
        )
        both.run("update p1 set v = null; update p set id = 3; update p set n = 6; delete from p3; truncate p2; truncate p")
        for options in (V1, V2 | {"include-pk": "1"}):
            ours = render(options, both.raw(), both.query)
            theirs = [(lsn, re.sub(rb'"table":"p\d"', b'"table":"p"', record)) for lsn, record in both.theirs(options)]
            # A partition's own order of columns is not the root's: so its rows are compared by name.
            assert changes_by_name(ours) == changes_by_name(theirs)
        assert [record for _, record in ours if b'"T"' in record] == [b'{"action":"T","schema":"public","table":"p"}']
        both.connection.close()


@pytest.mark.parametrize("root", ["default", "full"])
def test_partitions_with_another_identity_than_their_root(pg15, root):
    """The partition's identity says which columns of an old row the server sends. The root needs no key for that."""
    with pg15.database() as database:
        both = Both(database, "wal2json", "for all tables with (publish_via_partition_root)")
        both.run(
            f"""
            create table p (v text, id int, n int) partition by list (n); alter table p replica identity {root};
            create table p1 partition of p (primary key (id)) for values in (1);
            create table p2 partition of p for values in (2); alter table p2 replica identity full;
            create table p3 partition of p for values in (3); alter table p3 alter id set not null, alter v set not null;
            create unique index u on p3 (v, id); alter table p3 replica identity using index u
            """
        )
        both.begin()
        both.run("insert into p values ('x', 1, 1), ('x', 2, 2), ('x', 4, 3); update p set v = 'y' where n = 1")
        both.run("update p set v = 'z' where n = 2")
        if root == "default":  # with FULL the columns outside of a partition's key are NULL in an old row
            both.run("update p set id = 5, v = 'w'; delete from p")
        for options in (V1, V2):
            ours = render(options, both.raw(), both.query)
            theirs = [(lsn, re.sub(rb'"table":"p\d"', b'"table":"p"', record)) for lsn, record in both.theirs(options)]
            assert changes_by_name(ours) == changes_by_name(theirs)
        both.connection.close()


def changes_by_name(records):
    """Return the changes of rows, parsed, with the columns sorted by name."""
    changes = []
    for _, record in records:
        parsed = json.loads(record)
        changes += parsed.get("change", [parsed] if parsed.get("action", "") in "IUD" else [])
    for change in changes:
        for name in ("columns", "identity"):
            change.get(name, []).sort(key=lambda column: column["name"])
        for where, prefix in ((change, "column"), (change.get("oldkeys", {}), "key")):
            lists = [where.pop(prefix + name, []) for name in ("names", "types", "values")]
            where[prefix] = sorted(zip(*lists, strict=True), key=lambda column: column[0])
    return changes


def test_column_lists_and_row_filters(pg15):
    """The published columns and rows are as in wal2json. The others are missing."""
    with pg15.database() as database:
        both = Both(database, "wal2json", "for table t (b, id, c) where (id > 10), table f where (n is null or n <> 5)")
        both.run(
            """
            create table t (a text, id int primary key, b text default 'b', secret text, c numeric(5,1));
            create table f (id int, n int, primary key (id, n)); alter table f alter n set not null, replica identity full;
            """
        )
        both.begin()
        both.run("insert into t select 'a', g, 'b' || g, 'secret', g / 2.0 from generate_series(8, 14) g")
        both.run("update t set secret = 'x', b = 'y'")
        both.run("update t set c = null where id > 12; delete from t where id in (9, 12)")
        both.run("insert into f select g, g from generate_series(3, 8) g; update f set id = id + 10; delete from f")
        more = {"include-pk": "1", "include-type-oids": "1", "include-default": "1", "include-not-null": "1"}
        for options in (V2, V2 | more):
            ours = [json.loads(record) for _, record in render(options, both.raw(), both.query)]
            assert [record for record in ours if record["action"] in "IUD"] == published(both.theirs(options))
            assert "secret" not in str(ours)
        both.connection.close()


def published(records):
    """Return wal2json's changes as the publication of the previous test shows them."""
    kept = []
    for _, record in records:
        change = json.loads(record)
        if change["action"] not in "IUD":
            continue
        change = {
            name: [column for column in value if change["table"] == "f" or column["name"] in ("id", "b", "c")]
            if name == "columns"
            else value
            for name, value in change.items()
        }
        row = {column["name"]: column["value"] for column in change.get("columns", change.get("identity"))}
        if row["id"] > 10 if change["table"] == "t" else row["n"] != 5:
            kept.append(change)
    return kept


def test_schema_changes_in_mid_stream(both):
    both.run("create table t (a int, id int primary key, b text)")
    both.begin()
    both.run(
        """
        begin;
        insert into t values (1, 1, 'x');
        alter table t add column c int default 7;
        insert into t values (2, 2, 'y');
        alter table t drop column a;
        insert into t values (3, 'z');
        alter table t rename b to bb;
        update t set bb = 'u' where id = 3;
        alter table t alter c type text using 'T' || c;
        insert into t values (4, 'z', 'c');
        commit;
        alter table t replica identity full;
        update t set c = 'd' where id = 4;
        alter table t replica identity default;
        update t set c = 'e' where id = 4;
        alter table t rename to t2;
        delete from t2 where id = 4;
        create table t (id bigint primary key, n numeric(5,1));
        insert into t values (1, 1.5);
        drop table t;
        create table t (id text primary key);
        insert into t values ('new');
        """
    )
    # Catalog facts (difference 4) and positions of dropped columns are of today, so they are left out.
    compare(both, [V1, V2, V1 | {"pretty-print": "1", "include-type-oids": "1"}, V2 | {"include-lsn": "1"}])


def test_messages(both):
    both.run("create table t (id int primary key)")
    both.begin()
    for sql in (
        """
        begin; insert into t values (1); select pg_logical_emit_message(true, 'tx', 'one "two"');
        select pg_logical_emit_message(true, 'cut', '\\x610062'::bytea); select pg_logical_emit_message(true, '', '');
        commit
        """,
        "select pg_logical_emit_message(true, 'alone', E'\\\\xc3\\n')",
        "begin; select pg_logical_emit_message(true, 'rolled back', 'x'); rollback",
        "select pg_logical_emit_message(false, 'b', '\\xff'::bytea)",
        """
        begin; insert into t values (2); select pg_logical_emit_message(true, 'tx', '1');
        select pg_logical_emit_message(false, 'now', 'three'); commit
        """,
    ):
        both.run(sql)
    compare(
        both,
        [
            *OPTION_SETS[:7],
            V2 | {"add-msg-prefixes": "tx,alone"},
            V1 | {"filter-msg-prefixes": "tx , now"},
            V2 | EVERYTHING | {"filter-msg-prefixes": "tx", "add-msg-prefixes": "cut,tx"},
        ],
        may_be_invalid=True,
    )


def test_table_lists(both):
    both.run(
        """
        create schema w; create table t (id int primary key); create table w.t (id int primary key);
        create table w."a.b,c d\\e" (id int primary key); create table "*" (id int primary key)
        """
    )
    both.begin()
    both.run(
        'insert into t values (1); insert into w.t values (2); insert into w."a.b,c d\\e" values (3); insert into "*" values (4)'
    )
    both.run("truncate t, w.t")
    lists = ["*.t", "w.*", "public.t", " public.t ,  w.t", "*.*", "w.a\\.b\\,c\\ d\\\\e", "public.\\*", "w.a.b\\,c\\ d\\\\e"]
    compare(both, [version | {"add-tables": tables} for tables in lists for version in (V1, V2)])
    compare(both, [version | {"filter-tables": tables} for tables in lists if tables != "*.*" for version in (V1, V2)])
    compare(both, [V2 | {"add-tables": "w.*", "filter-tables": "*.t"}])


def test_origins(both):
    both.run("create table t (id int primary key)")
    both.run("select pg_replication_origin_create('here'), pg_replication_origin_create('the \"other\"')")
    both.begin()
    for origin in ("here", 'the "other"'):
        both.run(
            f"""
            select pg_replication_origin_session_setup('{origin}');
            begin; select pg_replication_origin_xact_setup('0/ABCD1234', now()); insert into t values ({len(origin)});
            select pg_logical_emit_message(true, 'p', 'x'); commit;
            select pg_replication_origin_session_reset();
            """
        )
    both.run("insert into t values (1)")
    numbers = dict(both.query("select roname, roident from pg_replication_origin"))
    compare(
        both,
        [
            *OPTION_SETS[:6],
            V2 | {"include-origin": "1", "filter-origins": numbers["here"]},
            V1 | {"filter-origins": f"{numbers['here']}, 99"},
        ],
    )
    both.run("select pg_replication_origin_drop('here'), pg_replication_origin_drop('the \"other\"')")


def test_random_workload(both):
    print(f"CDCPIPE_TEST_SEED={SEED}")
    with both.database.connect() as other:
        work = RandomSQL(SEED, VALUES, [both.run, other.execute])
        work.prepare()
        both.begin()
        work.work(120)
    # What the catalog says is of today (difference 4), and the schemas change.
    stream_only = {"include-xids": "1", "include-timestamp": "1", "include-lsn": "1", "include-type-oids": "1"}
    sets = [V1, V2, V1 | stream_only | {"pretty-print": "1"}, V2 | stream_only, V1 | {"write-in-chunks": "1"}]
    compare(both, [*sets, V2 | {"include-domain-data-type": "1", "include-transaction": "0", "actions": "insert, truncate"}])


def test_random_workload_and_what_the_catalog_says(both):
    print(f"CDCPIPE_TEST_SEED={SEED}")
    with both.database.connect() as other:
        work = RandomSQL(SEED, VALUES, [both.run, other.execute], is_plain=True)
        work.prepare()
        both.begin()
        work.work(60)
    compare(both, [V1 | EVERYTHING, V2 | EVERYTHING])


LISTS = [None, "", " ", "a", ",", "a,", "a,,b", " a , b ", "a b", "a\\ b", "a\\,b", "a\tb", "\u00e4", "a,b"]
TABLES = ["t", "s.t", "s.", ".", ".t", "*.*", "*", "s.t.u", "s.t,", "s.t,t", "a\\.b", "a\\.b.c", "*.t,s.*", "s . t"]
OPTIONS: dict[str, list[str | None]] = {
    **{slot.replace("_", "-"): WORDS for slot in Settings.__slots__},
    "include-unchanged-toast": WORDS,
    "format-version": [None, "", "1", "2", "3", "0", "-1", " 2", "2 ", "2x", "two", "2147483648"],
    "actions": [*LISTS, "insert", "insert, update,delete ,truncate", "INSERT", "insert,merge"],
    # An empty number is 0 to the server: "a," is refused here.
    "filter-origins": [None, "", "1", "1,2", "x", "-1", "1x", " 1 , 2 ", "1 2"],
    "filter-msg-prefixes": LISTS,
    "add-msg-prefixes": LISTS,
    "filter-tables": [*LISTS, *TABLES],
    "add-tables": [*LISTS, *TABLES],
    "nonsense": ["1"],
    "include_xids": ["1"],
    "Include-Xids": ["1"],
    "partition-root": ["1"],
}
del OPTIONS["numeric-data-types-as-string"]  # is 2.6's


def test_options_are_the_servers(both):
    both.begin()
    cases = [{name: value} for name, values in OPTIONS.items() for value in values]
    for options, said in zip(cases, refusals(both.database.dsn, both.slots[0], cases), strict=True):
        try:
            load("wal2json", options, nothing)
            ours = None
        except InvalidArgumentsError as ex:
            ours = str(ex)
        assert (said is None) == (ours is None), (options, said, ours)
