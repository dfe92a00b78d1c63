"""wal2json from pgoutput against the real plugin: every type, every escape, odd names."""

from __future__ import annotations

import json

from cdcpipe.sql import quote_literal
from support.random_sql import VALUES, fill_tables_of_types, make_tables_of_types
from support.wal2json_records import EVERYTHING, V1, V2, compare, render


def test_every_type(both):
    tables = make_tables_of_types(both.run)
    both.begin()
    fill_tables_of_types(both.run)
    for table in tables:
        both.run(f"update {table} set id = id + 100")
        both.run(f"delete from {table}")
    compare(both)


def test_every_type_as_identity(both):
    """With FULL the old row has all values, too."""
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
    """Every type that a column can have, from the server's own list: also arrays, row types of catalogs, and domains of
    information_schema.
    """
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


def test_numbers_as_strings(both):
    """An option of wal2json 2.6. Version 2.5 refuses it."""
    both.run("create table t (id int primary key, n numeric, f real)")
    both.begin()
    both.run("insert into t values (1, 1.50, 'NaN')")
    options = V2 | {"numeric-data-types-as-string": "1", "include-types": "0"}
    record = render(options, both.raw(), both.query)[1][1]
    assert [column["value"] for column in json.loads(record)["columns"]] == ["1", "1.50", "NaN"]
