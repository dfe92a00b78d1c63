"""`--binary` on the command line: what is rendered is what the text form gives, byte for byte."""

import contextlib
import re

import postgres

from support.binary_values import VALUES, Server, array_of, values_of
from support.published_database import PublishedDatabase
from support.waiting import until

USERS = """
create type mood as enum ('ok', 'not "ok"', 'b\\s');
create domain price as numeric(8,2);
create domain boxy as box;
create type words as range (subtype = text, collation = "C");
create type pair as (a int, b text);
create type nest as (p pair, ps pair[], w words, m mood, r regclass, amount money);
create table users (id int primary key, m mood, ms mood[], p price, ps price[], bs boxy[], w words, ww words[], pr pair, prs pair[],
  n nest, a aclitem, card information_schema.cardinal_number, c pg_cast);
alter table users replica identity full;
"""
USER_ROWS = """
insert into users values
  (1, 'not "ok"', array['b\\s', null]::mood[], 1.5, '{1,NULL}', array['(1,1),(0,0)']::boxy[], '[a,"b\\"c,")',
   array['(,)', 'empty']::words[],
   (1, 'x "y"'), array[(2, ''), null, (null, ',')]::pair[],
   row((1, 'q'), array[(2, '(')]::pair[], '(,x]', 'ok', 'users', '12.5'), 'postgres=r/postgres', 5,
   (select c from pg_cast c order by oid limit 1)),
  (2, null, null, null, null, null, null, null, null, null, null, null, null, null);
update users set m = 'ok' where id = 1;
delete from users;
"""


def run(on: PublishedDatabase, *args: str) -> tuple[int, bytes, str]:
    """Run to the end position: exit code, stdout, stderr. Standard input stays open: its end would end the stream."""
    on.released()
    with on.cli(*args, "--endpos", str(on.value("select pg_current_wal_insert_lsn()")), header=False) as cli:
        out = b"".join(iter(cli.read_bytes, b""))
        return cli.wait(), out, cli.stderr


def fill(on: PublishedDatabase) -> None:
    """One table with a column of every type that a column can have, and of arrays of each; another with users' types."""
    server = Server(on.database)
    on.sql('create table "Odd table" ()', USERS)
    arrays = dict(
        server.query("select t.typname, a.typname from pg_type t join pg_type a on a.oid = t.typarray where t.oid < 10000")
    )
    columns, values = [], []
    for name in VALUES:
        if name == "xml" and not server.has_xml:
            continue
        # Without the quotes these two are other types.
        sql_name = f'"{name}"' if name in ("char", "bit") else name
        texts = values_of(server, name)
        columns.append(f'"{name}" {sql_name}')
        values.append((sql_name, texts))
        array = arrays.get(name)
        if array:
            elements = array_of(texts).decode()
            columns.append(f'"{array}" {array}')
            values.append((array, [elements.replace('","', '";"') if name == "box" else elements, "{}"]))
    server.connection.close()
    on.sql(f"create table everything (id int primary key, {', '.join(columns)}, large text)")
    on.sql("alter table everything replica identity full; alter table everything alter large set storage external")
    on.sql("alter publication p add table everything, users")
    for number in range(max(len(texts) for _, texts in values)):
        row = [texts[number % len(texts)] for _, texts in values]
        places = ", ".join(f"%s::text::{sql_name}" for sql_name, _ in values)
        on.connection.execute(f"insert into everything values ({number}, {places}, repeat('x', 3000))", row)
    on.sql("insert into everything (id) values (-1)", "update everything set id = id + 1000 where id < 3", USER_ROWS)
    on.sql("update everything set large = 'y' where id = 1000", "delete from everything where id > 5")


def without_time(line: bytes) -> bytes:
    """Leave out what Debezium's events say of the time of day."""
    return re.sub(rb'"ts_[mun]s":[0-9]+', b"", line)


def test_rendered_as_the_text_form_is(on: PublishedDatabase) -> None:
    fill(on)
    for output in (["-J"], ["--output", "test_decoding"], ["--output", "json"], ["--output", "debezium"]):
        code, expected, stderr = run(on, *output, "-H", "-N")
        assert (code, stderr) == (0, ""), f"{output}, text: {stderr}"
        code, found, stderr = run(on, *output, "-H", "-N", "--binary")
        assert (code, stderr) == (0, ""), f"{output}, binary: {stderr}"
        for theirs, ours in zip(expected.split(b"\n"), found.split(b"\n"), strict=True):
            assert without_time(ours) == without_time(theirs), output
        assert len(found) > 100_000


def test_unrendered_records_are_as_the_server_sends_them(on18: PublishedDatabase) -> None:
    on18.sql("insert into t values (258, 'x')")
    _, out, _ = run(on18, "--binary")
    assert b"b\0\0\0\4\0\0\1\2" in out


def test_streamed_transactions_too(on18: PublishedDatabase) -> None:
    on18.sql("create table n (id int primary key, at timestamptz, n numeric)", "alter publication p add table n")
    on18.sql("insert into n select g, timestamptz '2000-01-01' + g * interval '1 s', g / 7.0 from generate_series(1, 5000) g")
    expected = run(on18, "-J", "-N")
    session = ["-m", "options=-c logical_decoding_work_mem=64kB"]
    found = run(on18, "-J", "-N", "--binary", "--whole-transactions", "--streaming", "parallel", *session)
    assert expected[0] == found[0] == 0
    records = [[line for line in out.split(b"\n") if line[:1] == b"{"] for _, out, _ in (expected, found)]
    assert records[0] == records[1]
    assert expected[1].count(b'"action":"I"') == 5000


def test_a_type_without_a_binary_form_is_named_before_the_stream_starts(on: PublishedDatabase) -> None:
    on.sql(
        "create domain rights as aclitem[]",
        "create type holder as (a int, r rights)",
        "create domain single as aclitem",
        "create table u (id int primary key, fine aclitem, fine_too single, hs holder[])",
        "alter publication p add table u",
        "insert into u values (1, 'postgres=r/postgres', 'postgres=r/postgres', null)",
    )
    for option in (["--binary"], ["-o", "binary"]):
        code, _, stderr = run(on, *option)
        assert code == 2
        assert "column 'hs' of table 'public.u' has no binary form: it is made of values of type aclitem" in stderr
        assert "'binary'" in stderr
    assert run(on, "-o", "binary=off")[0] == 0
    on.sql("alter table u drop column hs")
    code, out, _ = run(on, "--binary", "--output", "json")
    assert code == 0
    assert out.count(b"postgres=r/postgres") == 2


def test_a_type_without_a_binary_form_in_mid_stream(on18: PublishedDatabase) -> None:
    """A table that is published after the start; the server's own error does not name it."""
    with on18.cli("--binary") as cli:
        until(on18.is_active, "the stream")
        on18.sql("create table u (id int primary key, a aclitem[])", "alter publication p add table u")
        on18.sql("insert into u values (1, '{postgres=r/postgres}')")
        assert cli.wait() == 5
        assert "no binary output function available for type aclitem" in cli.stderr
        assert "leave the option 'binary' out" in cli.stderr


def test_column_lists_may_leave_such_a_column_out(on18: PublishedDatabase) -> None:
    on18.sql("create table u (id int primary key, a aclitem[])", "alter publication p add table u (id)")
    assert run(on18, "--binary")[0] == 0


def test_an_extensions_type_is_named(pg15: postgres.Cluster) -> None:
    with pg15.database() as database, contextlib.closing(PublishedDatabase(database)) as on:
        on.sql("create extension hstore; create extension citext")
        on.sql("create table u (id int primary key, c citext, h hstore)", "alter publication p add table u")
        on.sql("insert into u values (1, 'It', null)")
        code, out, _ = run(on, "--binary", "--output", "test_decoding")
        assert code == 0
        assert b"c[citext]:'It' h[hstore]:null" in out
        on.sql("insert into u values (2, 'It', 'a=>b')")
        code, _, stderr = run(on, "--binary", "--output", "test_decoding")
        assert code == 7  # the server has been streaming: the arguments were right for all that came before
        assert "column 'h' of table 'public.u' came in binary form" in stderr
        assert "'binary'" in stderr
        assert run(on, "--binary")[0] == 0
