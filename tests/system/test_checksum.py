"""``cdcpipe checksum``: what the server's half of a comparison answers, and that its checksums are what is documented."""

import hashlib
import json
import subprocess
import sys
from typing import Any

import postgres

from cdcpipe.lsn import LSN
from cdcpipe.pipe.exitcode import ExitCode


class Asked:
    """The command at work."""

    def __init__(self, database: postgres.Database, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cli", "checksum", "-d", database.dsn, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write((request if isinstance(request, str) else json.dumps(request)) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


def row_bytes(*texts: str | None) -> bytes:
    return b"".join((b"\xff" if text is None else text.encode()) + b"\0" for text in texts)


def test_numbers_without_zeros_at_their_end(pg18: postgres.Cluster) -> None:
    texts = {"1": ("1.5", "{1.5,NULL,-20,0.01}"), "2": ("100", "{{0},{NaN}}"), "3": ("0", None)}
    with pg18.database() as database, database.connect() as connection:
        connection.execute("create table t (id int primary key, n numeric, ns numeric[])")
        connection.execute(
            "insert into t values (1, 1.50, '{1.500,NULL,-20.00,0.010}'), (2, 100, '{{0.0},{NaN}}'), (3, 0.00, null)"
        )
        ask = Asked(database)
        ask({"begin": [["public", "t"]], "trim_numbers": True})
        found = ask({"rows": ["public", "t"], "key": ["id"], "buckets": [md5(key)[:3] for key in texts]})
        assert sorted(found) == [[key, md5(key, *row)] for key, row in texts.items()]
        assert ask.end() == (0, "")


def test_an_error_about_a_row_has_no_value_of_it(pg18: postgres.Cluster) -> None:
    with pg18.database() as database, database.connect() as connection:
        connection.execute("create table t (id int primary key, m int)")
        connection.execute("create publication p for table t where (make_date(2024, m, 1) > '2024-01-01')")
        connection.execute("insert into t values (1, 777)")
        ask = Asked(database)
        ask({"begin": [["public", "t"]], "publications": ["p"]})
        assert ask({"buckets": ["public", "t"], "key": ["id"]}) is None
        code, said = ask.end()
        assert (code, "777" in said, "datetime_field_overflow" in said) == (ExitCode.PG_ERROR, False, True)


def md5(*texts: str | None) -> str:
    return hashlib.md5(row_bytes(*texts)).hexdigest()


def test_checksums_are_what_is_documented(pg: postgres.Cluster) -> None:
    """On every version; as the output functions write, not as casts do."""
    rows = {
        "1": ("t", "ab   ", "192.168.0.1", "3fb999999999999a", "(,)", "", "\\x00ff", "{bdcccccd,NULL,7fc00000}"),
        "2": (None, None, None, "7ff8000000000000", None, None, None, None),
        "3": ("f", "é    ", "::1/64", "8000000000000000", '(1,"x y")', "NULL", "\\x", "[0:0]={0.1}"),
        "4": (None,) * 7 + ("{}",),
    }
    with pg.database() as database, database.connect() as connection:
        connection.execute("create type pair as (a int, b text)")
        connection.execute(
            "create table t (id int primary key, b bool, c char(5), i inet, f float8, p pair, s text, d bytea, fs float4[],"
            " g int generated always as (id) stored)"
        )
        connection.execute("insert into t values (1, true, 'ab', '192.168.0.1', 0.1, '(,)', '', '\\x00ff', '{-0.1,NULL,NaN}')")
        connection.execute("insert into t values (2, null, null, null, 'NaN', null, null, null, null)")
        connection.execute("insert into t values (3, false, 'é', '::1/64', '-0', '(1,x y)', 'NULL', '', '[0:0]={0.1}')")
        connection.execute("insert into t (id, fs) values (4, '{}')")
        ask = Asked(database, "-m", "options=-c extra_float_digits=0 -c bytea_output=escape")
        begun = ask({"begin": [["public", "t"], ["public", "nowhere"]]})
        assert begun["database"] == database.name
        assert LSN.parse(begun["wal_lsn"]) > 0
        (table,) = begun["tables"]
        assert [name for name, *_ in table["columns"]] == ["id", "b", "c", "i", "f", "p", "s", "d", "fs"]
        buckets = ask({"buckets": ["public", "t"], "key": ["id"]})
        expected = {md5(key)[:3]: [1, int(md5(key, *texts)[:15], 16)] for key, texts in rows.items()}
        assert buckets == expected
        connection.execute("delete from t")
        found = ask({"rows": ["public", "t"], "key": ["id"], "buckets": [md5("1")[:3], md5("3")[:3]]})
        assert sorted(found) == [[key, md5(key, *rows[key])] for key in ("1", "3")]
        parts = ask({"buckets": ["public", "t"], "key": ["id"], "within": [md5("1")[:3], md5("3")[:3]]})
        assert parts == {md5(key)[:6]: expected[md5(key)[:3]] for key in ("1", "3")}
        found = ask({"rows": ["public", "t"], "key": ["id"], "buckets": [md5("3")[:6], md5("1")[:5] + "-"]})
        assert found == [["3", md5("3", *rows["3"])]]
        assert ask({"begin": [["public", "t"]], "publications": []})["tables"]
        assert ask({"buckets": ["public", "t"], "key": ["id"]}) == {}
        assert ask.end() == (0, "")


def test_a_table_of_1600_columns(pg18: postgres.Cluster) -> None:
    """The expression for a row's bytes is not as deep as the table is wide, which would take time and the server's stack."""
    with pg18.database() as database, database.connect() as connection:
        connection.execute(f"create table t (id int primary key, {', '.join(f'c{number} int' for number in range(1, 1600))})")
        connection.execute(f"insert into t values (0, {', '.join(map(str, range(1, 1599)))})")
        connection.execute(f"alter database {database.name} set max_stack_depth = '256kB'")
        ask = Asked(database)
        ask({"begin": [["public", "t"]]})
        row = md5(*map(str, range(1599)), None)
        assert ask({"rows": ["public", "t"], "key": ["id"], "buckets": [md5("0")[:3]]}) == [["0", row]]
        assert ask({"buckets": ["public", "t"], "key": ["id"]}) == {md5("0")[:3]: [1, int(row[:15], 16)]}
        assert ask.end() == (0, "")


def test_a_snapshot_says_what_it_sees(database: postgres.Database) -> None:
    with database.connect() as running, database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        running.execute("begin")
        running.execute("insert into t values (1)")
        ((xid,),) = running.execute("select pg_current_xact_id()::text::bigint").fetchall()
        connection.execute("insert into t values (2)")
        ask = Asked(database)
        begun = ask({"begin": [["public", "t"]]})
        assert xid in begun["running"] or xid >= begun["xmax"]
        running.execute("commit")
        assert sum(count for count, _ in ask({"buckets": ["public", "t"], "key": ["id"]}).values()) == 1
        assert xid not in ask({"begin": [["public", "t"]]})["running"]
        assert sum(count for count, _ in ask({"buckets": ["public", "t"], "key": ["id"]}).values()) == 2
        assert ask.end()[0] == 0


def test_an_unused_slot(database: postgres.Database) -> None:
    with database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        connection.execute("create table other (id int)")
        connection.execute("create publication p for table t")
        connection.execute("select pg_create_logical_replication_slot('checksum_unused', 'pgoutput')")
        ask = Asked(database)
        pending: dict[str, Any] = {"pending": "checksum_unused", "publications": ["p"]}
        connection.execute("insert into other values (1)")
        ((lsn,),) = connection.execute("select pg_current_wal_insert_lsn()::text").fetchall()
        before = ask({"slot": "checksum_unused"})
        assert not before["active"]
        assert LSN.parse(before["confirmed_flush_lsn"]) < LSN.parse(lsn)
        assert ask(pending | {"upto": lsn}) is False
        connection.execute("insert into t values (1)")
        assert ask(pending | {"upto": lsn}) is False
        ((lsn,),) = connection.execute("select pg_current_wal_insert_lsn()::text").fetchall()
        assert ask(pending | {"upto": lsn}) is True
        assert ask({"slot": "checksum_unused"}) == before
        assert ask({"slot": "nowhere"}) is None
        code, errors = ask.end()
    assert code == ExitCode.SLOT_NOT_EXIST
    assert "'nowhere' does not exist" in errors


def test_a_publication_that_does_not_exist_is_named(database: postgres.Database) -> None:
    """Without it, the checksums would be those of all rows and columns."""
    with database.connect() as connection:
        connection.execute("create table t (id int primary key, secret text); create publication p for table t (id)")
    ask = Asked(database)
    assert [name for name, *_ in ask({"begin": [["public", "t"]], "publications": ["p"]})["tables"][0]["columns"]] == ["id"]
    assert ask({"begin": [], "publications": ["q"]})["database"] == database.name
    assert ask({"begin": [["public", "t"]], "publications": ["p", "q"]}) is None
    code, errors = ask.end()
    assert code == ExitCode.INIT_FAILED
    assert "no publication 'q'" in errors
    assert "hint: it has 'p'\n" in errors


def test_published_tables_need_no_privilege(database: postgres.Database) -> None:
    """Neither SELECT nor REPLICATION. They are those of the snapshot."""
    role = f"{database.name}_checker"
    with database.connect() as connection:
        connection.execute("create table t (id int primary key, secret text); create table u (x int); create table v (x int)")
        connection.execute(f'create publication p for table t (id), table u; create role "{role}" login')
        ask = Asked(database, "-U", role)
        assert ask({"begin": [], "publications": ["p"]})
        connection.execute("alter publication p add table v")
        found = ask({"published": ["p"]})
        assert ask({"published": ["p", "q"]}) is None
        code, errors = ask.end()
        connection.execute(f'drop role "{role}"')
    assert [(each["name"], each["primary_key"], each["columns"]) for each in found] == [("t", ["id"], ["id"]), ("u", [], ["x"])]
    assert code == ExitCode.INIT_FAILED
    assert "no publication 'q'" in errors


def test_tables_that_do_not_exist_are_named(database: postgres.Database) -> None:
    with database.connect() as connection:
        connection.execute("create table t (id int primary key); create view v as select 1; create schema s")
    for begun, said in ([], "named in 'begin'"), ([{"begin": [["public", "t"], ["s", "t"], ["public", "v"]]}], "it has public.t\n"):
        ask = Asked(database)
        for request in begun:
            answer = ask(request)
            assert [table["name"] for table in answer["tables"]] == ["t"]
            assert answer["missing"] == [["public", "v"], ["s", "t"]]
        assert ask({"buckets": ["s", "t"], "key": ["id"]}) is None
        code, errors = ask.end()
        assert code == ExitCode.CMD_ERROR
        assert "the snapshot has no table s.t" in errors
        assert said in errors.partition("hint: ")[2]


def test_columns_that_do_not_exist_are_named(database: postgres.Database) -> None:
    """The request is wrong, not the command line, so the exit code is 6."""
    with database.connect() as connection:
        connection.execute("create table t (id int primary key, v text)")
    ask = Asked(database)
    assert ask({"begin": [["public", "t"]]})["missing"] == []
    assert ask({"buckets": ["public", "t"], "key": ["id", "nope"]}) is None
    code, errors = ask.end()
    assert code == ExitCode.CMD_ERROR
    assert "table public.t has no published column 'nope'" in errors
    assert "its published columns are id, v" in errors


def test_rows_that_a_policy_hides_are_an_error(database: postgres.Database) -> None:
    role = f"{database.name}_reader"
    with database.connect() as connection:
        connection.execute("create table t (id int primary key)")
        connection.execute("alter table t enable row level security")
        connection.execute(f'create role "{role}" login')
        connection.execute(f'grant select on t to "{role}"')
        ask = Asked(database, "-U", role)
        assert ask({"begin": [["public", "t"]]})["tables"]
        assert ask({"buckets": ["public", "t"], "key": ["id"]}) is None
        code, errors = ask.end()
        connection.execute(f'drop owned by "{role}"')
        connection.execute(f'drop role "{role}"')
    assert code == ExitCode.PG_ERROR
    assert "row-level security" in errors
