"""wal2json from pgoutput against the real plugin: the same WAL of PostgreSQL 15 through both, byte for byte."""

from __future__ import annotations

import itertools
import json
import os
import random
import re

import pytest

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.plugins import load
from cdcpipe.plugins.wal2json.options import Settings
from cdcpipe.sql import quote_literal
from support.logical_stream import WORDS, Both, refusals
from support.random_sql import VALUES, RandomSQL, fill_tables_of_types, make_tables_of_types
from support.recorder import nothing
from support.wal2json_records import V1, V2, render, without_empty, without_stray_commas

EVERYTHING = {
    "include-xids": "1",
    "include-timestamp": "1",
    "include-lsn": "1",
    "include-origin": "1",
    "include-pk": "1",
    "include-type-oids": "1",
    "include-not-null": "1",
    "include-default": "1",
    "include-column-positions": "1",
}
OPTION_SETS = [
    V1,
    V2,
    V1 | EVERYTHING,
    V2 | EVERYTHING,
    V1 | EVERYTHING | {"pretty-print": "1"},
    V1 | EVERYTHING | {"write-in-chunks": "1", "pretty-print": "on"},
    V1 | {"write-in-chunks": "true"},
    V1 | {"include-typmod": "0", "include-schemas": "0"},
    V1 | {"include-types": "0", "include-not-null": "1", "include-pk": "yes"},
    V1 | {"include-domain-data-type": "1", "include-type-oids": "1", "include-pk": "1"},
    V1 | {"include-domain-data-type": "1", "include-typmod": "0"},
    V2 | {"include-types": "0", "include-schemas": "f", "include-pk": "1"},
    V2 | {"include-typmod": "0", "include-type-oids": None},
    V2 | {"include-domain-data-type": "1", "include-lsn": "1", "include-transaction": "0"},
    V2 | {"include-xids": "1", "actions": "insert,delete"},
    V2 | {"actions": "update, truncate"},
    V1 | {"actions": "update"},
]


def compare(both: Both, option_sets=OPTION_SETS, *, may_be_invalid: bool = False) -> None:
    raw = both.raw()
    for options in option_sets:
        theirs = without_empty(without_stray_commas(both.theirs(options)), options)
        ours = without_empty(render(options, raw, both.query), options)
        assert theirs or "actions" in options, f"the scenario shows nothing with {options}"
        for their_group, our_group in itertools.zip_longest(theirs, ours, fillvalue=[]):
            their_records, our_records = [r for _, r in their_group], [r for _, r in our_group]
            for ours_is, theirs_is in itertools.zip_longest(our_records, their_records, fillvalue=b""):
                same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours_is, theirs_is, strict=False)))
                assert ours_is[max(0, same - 60) : same + 100] == theirs_is[max(0, same - 60) : same + 100], options
            assert our_records == their_records, options
            # Difference 2 concerns the first record alone.
            assert [lsn for lsn, _ in our_group[1:]] == [lsn for lsn, _ in their_group[1:]], options
            assert our_group[0][0] >= their_group[0][0]
            if not may_be_invalid and "write-in-chunks" not in options:
                for record in our_records:
                    json.loads(record)


def test_every_type(both):
    tables = make_tables_of_types(both.run)
    both.begin()
    fill_tables_of_types(both.run)
    for table in tables:
        both.run(f"update {table} set id = id + 100")
        both.run(f"delete from {table}")
    compare(both)


def test_every_type_as_identity(both):
    """FULL: all values are in the old row as well."""
    tables = make_tables_of_types(both.run, "id int")
    for table in tables:
        both.run(f"alter table {table} replica identity full")
    both.begin()
    fill_tables_of_types(both.run)
    for table in tables:
        both.run(f"update {table} set id = 1; delete from {table}")
    compare(both, [V1, V2, V2 | EVERYTHING, V1 | EVERYTHING | {"pretty-print": "1"}])


NO_INPUT = {"pg_node_tree", "pg_ndistinct", "pg_dependencies", "pg_mcv_list", "gtsvector"}
NO_INPUT |= {"pg_brin_bloom_summary", "pg_brin_minmax_multi_summary"}


def test_no_type_of_the_server_is_forgotten(both):
    """Each that a column can have, arrays, catalogs' rows and information_schema's domains included, from the server's own list."""
    known = {**VALUES, "information_schema.yes_or_no": ["'YES'"]}
    samples = {both.query(f"select to_regtype({quote_literal(name)})::oid")[0][0]: values[0] for name, values in known.items()}
    types = {
        oid: rest
        for oid, *rest in both.query(
            """
            select t.oid, format_type(t.oid, null), t.typtype, case when t.typcategory = 'A' then t.typelem end, t.typbasetype
            from pg_type t left join pg_type e on e.oid = t.typelem and t.typcategory = 'A'
            where t.oid < 16384 and 'p' not in (t.typtype, coalesce(e.typtype, 'b')) and not exists
              (select from pg_attribute where attrelid in (t.typrelid, e.typrelid)
               and atttypid in ('anyarray'::regtype, 'pg_statistic[]'::regtype))
            order by t.oid
            """
        )
    }

    def value(oid: str) -> str:
        name, kind, element, base = types[oid]
        if kind == "c" or name in NO_INPUT:
            return "null"
        if oid in samples:
            return f"({samples[oid]})::{name}"
        return f"array[{value(element)}]::{name}" if element else f"{value(base)}::{name}"

    columns = [(name, value(oid)) for oid, (name, *_) in types.items()]
    assert len(columns) > 500
    for number in range(0, len(columns), 50):
        listed = ", ".join(f"c{column} {name}" for column, (name, _) in enumerate(columns[number : number + 50]))
        both.run(f"create table t{number} (id int primary key, {listed})")
        if number % 100:
            both.run(f"alter table t{number} replica identity full")
    both.begin()
    for number in range(0, len(columns), 50):
        values = ", ".join(sample for _, sample in columns[number : number + 50])
        both.run(f"insert into t{number} values (1, {values}); update t{number} set id = 2; delete from t{number}")
    compare(both, [V1, V2, V1 | {"include-typmod": "0", "include-type-oids": "1"}, V2 | {"include-domain-data-type": "1"}])


def test_types_of_users(both):
    both.run(
        """
        create schema w;
        create type mood as enum ('ok', 'not "ok"', 'b\\s');
        create type w.mood as enum ('x');
        create type "Qt" as enum ('q');
        create type pair as (a int, b text);
        create domain price as numeric(8,2) check (value > 0);
        create domain "Text" as varchar(7);
        create domain w.flag as bool;
        create domain w.nested as price;
        create domain w.data as bytea;
        create type floats as range (subtype = float8);
        create extension hstore; create extension citext; create extension ltree;
        create table t (id int primary key, m mood, wm w.mood, q "Qt", p pair, d price, t "Text", f w.flag,
          n w.nested, y w.data, r floats, h hstore, c citext, l ltree, ma mood[], qa "Qt"[], da price[], wa w.mood[],
          pa pair[], ra floats[], card information_schema.cardinal_number);
        alter table t replica identity full;
        create table k (k price primary key, v text);
        """
    )
    both.begin()
    both.run(
        """
        insert into t values (1, 'ok', 'x', 'q', (1, 'a "b" \\'), 1.5, 'x', true, 2.5, '\\x01', '[1,2)', 'a=>"b\\"c"',
          'C', 'a.b', '{ok,"not \\"ok\\""}', '{q}', '{1.5}', '{x}', array[(1,'"')::pair], '{"[1,2)"}', 5);
        insert into t (id, m) values (2, 'not "ok"'), (3, 'b\\s');
        update t set id = id + 10;
        insert into k values (1.5, 'x'); update k set v = 'y'; update k set k = 2; delete from k;
        delete from t;
        """
    )
    compare(both)


def test_every_escape(both):
    both.run("create table t (id int primary key, v text, w varchar(200)); alter table t replica identity full")
    both.begin()
    for code in range(1, 128):
        both.run(f"insert into t values ({code}, chr({code}), 'a' || chr({code}) || chr({code}) || 'z')")
    both.run("insert into t values (1000, chr(8232) || chr(8233) || chr(128) || chr(1114109), '')")
    both.run("update t set w = v || w; delete from t")
    both.run("select pg_logical_emit_message(true, 'p' || chr(c) || 'q', 'x' || chr(c) || 'y') from generate_series(1, 127) c")
    compare(both, [V1, V2, V2 | EVERYTHING, V1 | {"pretty-print": "1"}])


def test_odd_names(both):
    both.run(
        """
        create schema "Odd schema"; create schema "q""u'o\\te";
        create table "Odd schema"."Ta ble" ("Co l" int primary key, "q""uote" text, "back\\slash" text, "tab\tnl\n" text,
          "\u00e4\u4e16" text, "select" text, "" "" text);
        """.replace('"" ""', '" "')
    )
    both.run("""create table "q""u'o\\te"."x.y" ("a,b" int, "%s %X" text, "{record}" text, primary key ("a,b", "%s %X"))""")
    both.run(f'create table "{"t" * 63}" ("{"c" * 63}" int primary key)')
    both.begin()
    both.run(
        f"""
        insert into "Odd schema"."Ta ble" values (1, 'a', 'b', 'c', 'd', 'e', 'f');
        update "Odd schema"."Ta ble" set "Co l" = 2; delete from "Odd schema"."Ta ble";
        insert into "q""u'o\\te"."x.y" values (1, '%', '{{wal_start}}'); update "q""u'o\\te"."x.y" set "{{record}}" = null;
        delete from "q""u'o\\te"."x.y";
        insert into "{"t" * 63}" values (1);
        truncate "Odd schema"."Ta ble", "q""u'o\\te"."x.y";
        """
    )
    compare(both)


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


def test_many_and_no_columns(both):
    columns = ", ".join(f"c{number} int" for number in range(1000))
    both.run(f"create table wide ({columns}, primary key (c0, c999)); create table none ()")
    both.begin()
    both.run(f"insert into wide values ({', '.join(str(number) for number in range(1000))})")
    both.run("update wide set c5 = null; update wide set c0 = 5; delete from wide; insert into wide (c0, c999) values (1, 2)")
    both.run("insert into none default values")
    compare(both, [V1, V2, V2 | EVERYTHING])


def test_lengths_around_what_the_fast_path_takes(both):
    both.run("create table t (id int primary key, a text, b text)")
    both.begin()
    for length in (0, 1, 78, 110, 115, 116, 117, 127, 128, 254, 255, 256, 257, 511, 512, 65535, 65536, 29696):
        both.run(f"insert into t values ({length}, repeat('t', {length}), repeat('n', {length}))")
        both.run(f"insert into t values ({length + 1000000}, repeat('\"', {length}), 't')")
    both.run("update t set a = b || 't' where length(a) < 300")
    compare(both, [V1, V2, V2 | EVERYTHING])


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
    """What the publication gives the root's name, wal2json gives the partition's; else the records are the same."""
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


def changes_by_name(records):
    """Return the rows' changes, parsed, with columns in the order of their names."""
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
    """What is published is as wal2json has it, without the columns and the rows that are not."""
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
    """Return wal2json's changes as the publication of the test above shows them."""
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
    seed = int(os.environ.get("CDCPIPE_TEST_SEED", random.randrange(1 << 32)))
    print(f"CDCPIPE_TEST_SEED={seed}")
    with both.database.connect() as other:
        work = RandomSQL(seed, VALUES, [both.run, other.execute])
        work.prepare()
        both.begin()
        work.work(120)
    # What the catalog says is of today (difference 4), and the schemas change.
    stream_only = {"include-xids": "1", "include-timestamp": "1", "include-lsn": "1", "include-type-oids": "1"}
    sets = [V1, V2, V1 | stream_only | {"pretty-print": "1"}, V2 | stream_only, V1 | {"write-in-chunks": "1"}]
    compare(both, [*sets, V2 | {"include-domain-data-type": "1", "include-transaction": "0", "actions": "insert, truncate"}])


def test_random_workload_and_what_the_catalog_says(both):
    seed = int(os.environ.get("CDCPIPE_TEST_SEED", random.randrange(1 << 32)))
    print(f"CDCPIPE_TEST_SEED={seed}")
    with both.database.connect() as other:
        work = RandomSQL(seed, VALUES, [both.run, other.execute], is_plain=True)
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


def test_numbers_as_strings(both):
    """An option of wal2json 2.6: 2.5 refuses it."""
    both.run("create table t (id int primary key, n numeric, f real)")
    both.begin()
    both.run("insert into t values (1, 1.50, 'NaN')")
    options = V2 | {"numeric-data-types-as-string": "1", "include-types": "0"}
    record = render(options, both.raw(), both.query)[1][1]
    assert [column["value"] for column in json.loads(record)["columns"]] == ["1", "1.50", "NaN"]
