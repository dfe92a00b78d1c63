"""Values in binary form, decoded and compared with the server: its send functions give the bytes, its output functions the text."""

from __future__ import annotations

import contextlib
import math
import re
import struct
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from psycopg import pq

from cdcpipe.errors import ProtocolError
from cdcpipe.types.binary.decoder import UnknownTypeError, to_text
from cdcpipe.types.table import PLAIN_IDS, REG_TYPES
from support.binary_values import STRINGS, VALUES, Server, array_of, texts, values_of

EXCEPTIONS = {
    "pg_ndistinct": "a table can get one only by copying from pg_statistic_ext_data, and its text differs between versions",
    "pg_dependencies": "as pg_ndistinct",
    "pg_node_tree": "values are in the catalog only, and its send function is that of text: test_node_trees",
    "pg_mcv_list": "values are in the catalog only: test_statistics",
    "pg_brin_bloom_summary": "values are inside BRIN indexes only",
    "pg_brin_minmax_multi_summary": "values are inside BRIN indexes only",
    "pg_ddl_command": "a pseudo-type, which no column can have; its send function is an error",
    "void": "a pseudo-type, which no column can have",
    "anyarray": "a pseudo-type; values in pg_statistic are of their arrays' own types",
    "anycompatiblearray": "a pseudo-type, which no column can have",
    "unknown": "a pseudo-type, which no column can have: test_pseudo_types",
    "cstring": "a pseudo-type, which no column can have: test_pseudo_types",
    "record": "a pseudo-type: test_composites",
}


@pytest.fixture
def server(pg):
    with pg.database() as database:
        made = Server(database)
        made.connection.execute('create table "Odd table" ()')
        yield made
        made.connection.close()


def with_send(server: Server) -> list[tuple[str, str, str]]:
    """Each built-in type that has a send function and is no array: its name as SQL writes it, and the name of its array type."""
    rows = server.query(
        """select t.typname, format_type(t.oid, -1), coalesce(a.typname, '')
        from pg_type t left join pg_type a on a.oid = t.typarray
        where t.oid < 10000 and t.typsend <> 0 and t.typsend <> 'array_send'::regproc and t.typrelid = 0"""
    )
    return [(row[0] or "", row[1] or "", row[2] or "") for row in rows]


def test_every_type_and_its_arrays(server):
    """The list of types comes from the server. A type that the server has, and this test does not know, fails it."""
    for name, sql_name, array in with_send(server):
        assert (name in VALUES) != (name in EXCEPTIONS), f"type {name} is not tested"
        if name not in VALUES or (name == "xml" and not server.has_xml):
            continue
        values = values_of(server, name)
        shown = server.compare(f"select t::{sql_name} from unnest({texts(values)}) with ordinality u(t, n) order by n")
        assert len(shown) == len(values)
        if server.type_id in PLAIN_IDS:
            assert not re.search(rb'["\\\x00-\x1f]', b"".join(shown))
        if array:
            delimiter = ";" if name == "box" else ","
            elements = [value for value in (array_of([each]).decode()[1:-1] for each in values) if value]
            once = delimiter.join(elements)
            for text in (
                f"{{{once}}}",
                f"{{{once}{delimiter}NULL}}",
                f"[-1:{len(elements) - 2}]={{{once}}}",
                f"{{{{{once}}}{delimiter}{{{once}}}}}",
                "{}",
                "[0:1][5:5]={{NULL}" + delimiter + "{NULL}}",
            ):
                assert server.compare(f"select $1::text::{array}", text.encode())


def test_every_other_type_below_16384_is_known_with_a_catalog(server):
    """The row types of the catalogs, their arrays, and the domains of information_schema. Their ids differ between versions."""
    rows = server.query("select oid, typname from pg_type where oid < 16384 and typsend <> 0")
    elements_without = {"_aclitem", "_gtsvector", "_pg_attribute", "_pg_class"}
    for type_id, name in rows:
        if name in EXCEPTIONS or name in elements_without:
            continue
        try:
            server.types.to_text(int(type_id), b"\xff" * 3)
        except ProtocolError:
            continue
        except UnknownTypeError as ex:
            pytest.fail(f"{name}: {ex.message}")
    server.compare("select table_name from information_schema.tables")  # domains over name and varchar
    server.compare("select array_agg(ordinal_position) from information_schema.columns")
    server.compare("select c from pg_cast c")
    server.compare("select array_agg(o) from pg_operator o")


def test_objects_that_are_gone(server):
    for name in REG_TYPES.values():
        server.compare(f"select array[999999999::oid::{name}, 4294967295::oid::{name}, 0::oid::{name}]")


def test_node_trees(server):
    server.connection.execute("create view v as select oid, relname || 'x' from pg_class where relname like 'a%'")
    assert len(server.compare("select ev_action from pg_rewrite")) > 100


def test_statistics(server):
    server.connection.execute("create table s as select n % 3 a, n % 4 b from generate_series(1, 1000) n")
    server.connection.execute("create statistics st (mcv) on a, b from s")
    server.connection.execute("analyze s")
    assert server.compare("select stxdmcv from pg_statistic_ext_data")


def test_pseudo_types(server):
    server.compare("select textout('it''s')")
    for text in STRINGS:
        assert to_text(705, text.encode()) == to_text(2275, text.encode()) == text.encode()


def test_types_of_users(server):
    server.connection.execute(
        """
        create type mood as enum ('ok', 'not "ok"', 'b\\s', 'NULL');
        create domain price as numeric(8,2);
        create domain deep as price;
        create domain prices as numeric[];
        create domain moods as mood[];
        create domain boxy as box;
        create type words as range (subtype = text, collation = "C");
        create type moody as range (subtype = mood);
        create type pair as (a int, b text);
        create type nest as (p pair, ps pair[], w words, m mood, n numeric, d deep, empty text, r regclass);
        """
    )
    server.compare("select m from unnest(enum_range(null::mood)) m")
    server.compare("select enum_range(null::mood)")
    server.compare("select 1.5::price")
    server.compare("select array[1.5, null, 2]::deep[]")
    server.compare("select '{1.5,NaN}'::prices")
    server.compare("select array['{ok,\"b\\\\s\"}'::moods]")
    server.compare("select array['(1,1),(2,2)'::boxy, '(0,0),(3,3)']")
    server.compare(
        "select words(least(a, b), greatest(a, b), '[]') from unnest($1::text[]) a, unnest($1::text[]) b", array_of(STRINGS)
    )
    server.compare("select array_agg(words(a, null)) from unnest($1::text[]) a", array_of(STRINGS))
    server.compare("select range_agg(words(a, null)) from unnest($1::text[]) a", array_of(STRINGS))
    server.compare("select multirange(words('a,', 'b\"'))")
    server.compare("select array[moody('ok', 'b\\s', '[)'), 'empty', null]")
    server.compare("select (n, a)::pair from unnest($1::text[]) with ordinality u(a, n)", array_of(STRINGS))
    server.compare("select array_agg(row(n, a)::pair) from unnest($1::text[]) with ordinality u(a, n)", array_of(STRINGS))
    server.compare(
        """select row(row(n, a)::pair, array[row(n, a)::pair, null, row(null, null)::pair],
          words(a, null), 'not "ok"', 'NaN', 1, '', 'pg_class')::nest
        from unnest($1::text[]) with ordinality u(a, n)""",
        array_of(STRINGS),
    )
    server.connection.execute("alter type nest drop attribute ps; alter type nest add attribute extra json")
    server.compare("select row(null, words('a', 'b'), null, null, null, '\"', null, '{\"a\": 1}')::nest")


def test_composites(server):
    server.compare("select row(1, 'a'::text, null::int, ''::text, '{a,\"b c\"}'::text[], row(1.5, row('x\"y\\'::text)))")
    server.compare("select row()")
    server.compare("select array[row(1, 'a'::text), row(2, 'b,'::text)]")


def test_types_of_extensions(pg15):
    """citext uses the functions of text. hstore and ltree have functions of their own."""
    with pg15.database() as database:
        server = Server(database)
        server.connection.execute("create extension citext; create extension hstore; create extension ltree; create extension cube")
        server.compare("select 'Ab\"c'::citext")
        server.compare("select array['Ab\"c', null, '']::citext[]")
        for expression in ("'a=>b'::hstore", "'a.b'::ltree", "array['a.b'::ltree]", "row('a.b'::ltree)", "'(1,2)'::cube"):
            with pytest.raises(UnknownTypeError, match="is not built in") as caught:
                server.compare(f"select {expression}")
            assert "binary" in str(caught.value.hint)
        server.connection.close()


def test_money_follows_lc_monetary(pg15):
    with pg15.database() as database:
        server = Server(database)
        locales = server.query("select setting from pg_settings where name = 'lc_monetary'")
        assert locales
        for amount in VALUES["money"]:
            server.compare(f"select '{amount}'::money")
        server.compare("select array_agg((n || '.5')::money) from generate_series(-20, 20) n")
        server.connection.close()


# Any value


def many(examples: int) -> Any:
    return settings(max_examples=examples, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def pg18_server(pg18):
    with pg18.database() as database:
        made = Server(database)
        made.connection.execute(
            'create type words as range (subtype = text, collation = "C"); create type pair as (a text, b text)'
        )
        yield made
        made.connection.close()


characters = st.characters(codec="utf-8", exclude_characters="\0")
nasty = st.text(st.sampled_from("\"\\{}()[], \t\n\v\f\r'NULLnul;ä世") | characters, max_size=8)


@many(30)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=300))
def test_any_float8(pg18_server, bits):
    numbers = [struct.unpack(">d", struct.pack(">Q", each))[0] for each in bits]
    values = [repr(number).replace("inf", "Infinity") for number in numbers]
    pg18_server.compare("select x::float8 from unnest($1::text[]) x", array_of(values))


@many(30)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300))
def test_any_float4(pg18_server, bits):
    numbers = [struct.unpack(">f", struct.pack(">I", each))[0] for each in bits]
    values = [f"{number:.9g}".replace("inf", "Infinity") for number in numbers]
    pg18_server.compare("select x::float4 from unnest($1::text[]) x", array_of(values))


def test_floats_on_the_edge(pg18_server):
    """Powers of two, where the next smaller number is nearer than the next larger one, and decimals halfway between two numbers."""
    powers = [repr(math.ldexp(1.0, power)) for power in range(-1074, 1024)]
    pg18_server.compare("select x::float8 from unnest($1::text[]) x", array_of(powers))
    singles = [f"{math.ldexp(1.0, power):.9g}" for power in range(-149, 128)]
    pg18_server.compare("select x::float4 from unnest($1::text[]) x", array_of(singles))
    decimals = [f"{digit}e{power}" for digit in (1, 3, 5, 7, 9, 11, 99, 123456789) for power in range(-30, 36)]
    pg18_server.compare("select x::float8 from unnest($1::text[]) x", array_of(decimals))
    pg18_server.compare("select x::float4 from unnest($1::text[]) x where x::float8 < 3e38", array_of(decimals))
    assert to_text(701, struct.pack(">d", 1e23)) != b"1e+23"


@many(50)
@given(
    st.lists(st.decimals(allow_nan=False, allow_infinity=False) | st.decimals(-(10**9), 10**9, places=6), min_size=1, max_size=50)
)
def test_any_numeric(pg18_server, numbers: list[Decimal]):
    numbers = [number for number in numbers if -16000 < number.adjusted() < 131000 and number.as_tuple().exponent > -16000]
    assume(numbers)
    pg18_server.compare("select x::numeric from unnest($1::text[]) x", array_of([str(number) for number in numbers]))


@many(50)
@given(st.lists(st.integers(-211_813_488_000_000_000, 9_223_371_331_199_999_999), min_size=1, max_size=100))
def test_any_timestamp(pg18_server, times_us):
    sql = "select {} + (x::int8 / 1000000) * interval '1 s' + (x::int8 % 1000000) * interval '1 us' from unnest($1::text[]) x"
    values = array_of([str(time) for time in times_us])
    pg18_server.compare(sql.format("timestamp '2000-01-01'"), values)
    pg18_server.compare(sql.format("timestamptz '2000-01-01 00:00+00'"), values)
    days = array_of([str(time // 86_400_000_000) for time in times_us])
    pg18_server.compare("select date '2000-01-01' + x::int4 from unnest($1::text[]) x", days)


@many(50)
@given(
    st.lists(
        st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1), st.integers(-(2**62), 2**62)), min_size=1
    )
)
def test_any_interval(pg18_server, intervals):
    small = [(months % 40 - 20, days % 5 - 2, time_us % 10_000_000 - 5_000_000) for months, days, time_us in intervals]
    values = [f"{months} mons {days} days {time_us} us" for months, days, time_us in [*intervals, *small]]
    pg18_server.compare("select x::interval from unnest($1::text[]) x", array_of(values))


@many(50)
@given(st.lists(nasty, min_size=1, max_size=6), st.integers(-3, 3))
def test_any_array(pg18_server, values, lower):
    pg18_server.compare("select $1::text[]", array_of(values))
    pg18_server.compare(
        "select array_fill(x, array[2, 1, 2], array[$2::int, 1, 0]) from unnest($1::text[]) x", array_of(values), b"%d" % lower
    )
    pg18_server.compare("select array[$1::text[], $1::text[]]::varchar[]", array_of(values))
    pg18_server.compare("select array_agg(row(x, x)::pair) from unnest($1::text[]) x", array_of(values))
    pg18_server.compare("select row(x, array[row(x, x)::pair])::record from unnest($1::text[]) x", array_of(values))
    pg18_server.compare("select array[words(x, null), words(null, x, '(]')] from unnest($1::text[]) x", array_of(values))
    pg18_server.compare(
        "select array_to_tsvector($1::text[])" if all(values) else "select ''::tsvector",
        *([array_of(values)] if all(values) else []),
    )


lexemes = st.sampled_from(["a", "b", "'it''s'", "c:*", "d:AB", "'\\\\'"])
queries = st.recursive(
    lexemes,
    lambda inner: (
        st.builds("!({})".format, inner) | st.builds("({}) {} ({})".format, inner, st.sampled_from(["&", "|", "<->", "<3>"]), inner)
    ),
    max_leaves=12,
)


@many(100)
@given(st.lists(queries, min_size=1, max_size=20))
def test_any_tsquery(pg18_server, values):
    pg18_server.compare("select x::tsquery from unnest($1::text[]) x", array_of(values))


@many(50)
@given(
    st.lists(st.ip_addresses().flatmap(lambda a: st.tuples(st.just(a), st.integers(0, a.max_prefixlen))), min_size=1, max_size=50),
    st.data(),
)
def test_any_inet(pg18_server, addresses, data):
    kept = [data.draw(st.integers(0, 0xFF)) for _ in addresses]
    values = []
    for (address, bits), keep in zip(addresses, kept, strict=True):
        # Words of zeros in all places: they decide how an address is written.
        packed = bytes(byte if keep >> (place // 2) & 1 else 0 for place, byte in enumerate(address.packed))
        values.append(f"{type(address)(packed)}/{bits}")
    pg18_server.compare("select x::inet from unnest($1::text[]) x", array_of(values))
    pg18_server.compare("select network(x::inet)::cidr from unnest($1::text[]) x", array_of(values))


# Any bytes


@pytest.fixture(scope="module")
def sent(pg18):
    """Return some values of each type as the server sends them."""
    with pg18.database() as database:
        server = Server(database)
        server.connection.execute('create table "Odd table" ()')
        found = []
        for name, sql_name, _ in with_send(server):
            for value in VALUES.get(name, [])[:6] if name not in ("money", *REG_TYPES.values()) else []:
                cast = f"$1::text::{sql_name}"
                for expression in (cast, f"array[{cast}, null, {cast}]"):
                    with contextlib.suppress(AssertionError):
                        (row,) = server._rows(f"select {expression}", (value.encode(),), pq.Format.BINARY)
                        found.append((server.type_id, row[0]))
        server.connection.close()
        assert len(found) > 400
        return found


@settings(max_examples=3000)
@given(st.data())
def test_damaged_values_give_text_or_an_error(sent, data):
    type_id, value = data.draw(st.sampled_from(sent))
    value = bytearray(value)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(value)))
        match data.draw(st.sampled_from(["set", "cut", "insert", "flip"])):
            case "set" if place < len(value):
                value[place] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
            case "flip" if place < len(value):
                value[place] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del value[place:]
            case "insert":
                value[place:place] = data.draw(st.binary(min_size=1, max_size=4))
    try:
        text = to_text(type_id, bytes(value))
    except (ProtocolError, UnknownTypeError):
        return
    assert isinstance(text, bytes)


def test_every_prefix_of_a_value_gives_text_or_an_error(sent):
    for type_id, value in sent:
        for size in range(len(value)):
            with contextlib.suppress(ProtocolError):
                to_text(type_id, value[:size])
