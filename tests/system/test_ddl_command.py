"""`cdcpipe ddl`: install, status and remove on real servers, and who may run them."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import postgres
import psycopg
import pytest

from cdcpipe.ddl import script
from cdcpipe.libpq.parameters import connection_parameters
from cdcpipe.replication.session import connected
from cdcpipe.subcommands import ddl
from support.cli_process import run_cli
from support.ddl_capture import Capture, columns, summary

EVERYTHING = """
select 'function', oid::regprocedure::text from pg_proc where pronamespace <> 'pg_catalog'::regnamespace
union all select 'trigger', evtname from pg_event_trigger
union all select 'schema', nspname from pg_namespace
order by 1, 2
"""


@pytest.fixture
def db(any_pg: postgres.Cluster) -> Iterator[postgres.Database]:
    with any_pg.database() as made:
        yield made


@pytest.fixture
def capture(pg15: postgres.Cluster) -> Iterator[Capture]:
    with pg15.database() as made:
        opened = Capture(made)
        opened.run("create table t (id int primary key)")
        yield opened
        opened.close()


def status(database: postgres.Database, *options: str) -> tuple[int, dict]:
    code, out, err = run_cli("ddl", "status", "-d", database.dsn, "--json", *options)
    assert err == ""
    return code, json.loads(out)


def levels(report: dict) -> list[tuple[str, str, str | None]]:
    return [(each["level"], each["check"], each["subject"]) for each in report["findings"] if each["level"] != "ok"]


def replace_settings(capture: Capture, settings: dict) -> None:
    text = json.dumps(settings)
    capture.connection.execute(
        f"create or replace function cdcpipe.ddl_settings() returns json language sql as $$ select '{text}'::json $$"
    )


def test_what_is_installed_is_removed_without_a_trace(db: postgres.Database) -> None:
    with db.connect() as connection:
        before = connection.execute(EVERYTHING).fetchall()
        assert status(db)[0] == 1
        for _ in range(2):  # the second one finds everything there
            code, out, err = run_cli("ddl", "install", "-d", db.dsn)
            place = f"the database {db.name}, schema cdcpipe"
            assert (code, err) == (0, "")
            assert out.decode() == f"DDL capture of version 4 is installed in {place}, with the statements' texts\n"
        code, report = status(db)
        assert (code, levels(report)) == (0, [])
        assert report["installed"] == {
            "schema": "cdcpipe", "version": 4, "statements": True, "strict": False,
            "triggers": dict.fromkeys(["cdcpipe_ddl_command_end", "cdcpipe_sql_drop", "cdcpipe_table_rewrite"], "always"),
        }  # fmt: skip
        for said in ("is removed", "there is no DDL capture"):
            code, out, err = run_cli("ddl", "remove", "-d", db.dsn)
            assert (code, err) == (0, "")
            assert said in out.decode()
        assert connection.execute(EVERYTHING).fetchall() == before


def test_the_message_of_an_installation_describes_the_publications_tables(capture: Capture) -> None:
    message = capture.install("--publication", "everything", "--no-statements")
    assert columns(message, "t") == ["1 id integer!"]
    assert message["settings"] == {"version": 4, "statements": False, "strict": False}
    assert [each["name"] for each in message["publications"]] == ["everything"]
    (message,) = capture.run("alter table t add a int")
    assert message["statement"] is None
    assert run_cli("ddl", "remove", "-d", capture.database.dsn)[0] == 0
    assert summary(capture.read()) == ["removed"]
    assert capture.run("alter table t add b int") == []


def test_an_installation_that_is_run_again_keeps_what_nobody_asks_it_to_change(database: postgres.Database) -> None:
    def said(*options: str) -> str:
        code, out, err = run_cli("ddl", "install", "-d", database.dsn, *options)
        assert (code, err) == (0, "")
        return out.decode().partition(", schema ")[2]

    assert said("--schema", "my app", "--no-statements", "--strict") == "my app, without the statements' texts, strict\n"
    kept = "kept as it was installed before"
    assert said() == f"my app, without the statements' texts, strict\n{kept}: --schema 'my app' --no-statements --strict\n"
    assert said("--no-strict") == f"my app, without the statements' texts\n{kept}: --schema 'my app' --no-statements\n"
    assert said("--schema", "my app", "--statements") == "my app, with the statements' texts\n"
    installed = status(database)[1]["installed"]
    assert [installed[key] for key in ("schema", "statements", "strict")] == ["my app", True, False]


def test_a_dump_without_comments_keeps_the_options(database: postgres.Database) -> None:
    """The texts of the statements came back into the stream without a word."""
    assert run_cli("ddl", "install", "-d", database.dsn, "--no-statements", "--strict")[0] == 0
    with database.connect() as connection:
        connection.execute("comment on function cdcpipe.ddl_settings() is null")
    assert status(database)[0] == 0
    code, out, _ = run_cli("ddl", "install", "-d", database.dsn)
    assert (code, "without the statements' texts, strict" in out.decode()) == (0, True)


def test_options_that_cannot_be_read_have_to_be_given(capture: Capture) -> None:
    replace_settings(capture, {"mine": True})
    assert levels(status(capture.database)[1]) == [("error", "ddl.installed", None)]
    for options in ([], ["--no-statements"], ["--strict"]):
        code, _, err = run_cli("ddl", "install", "-d", capture.database.dsn, *options)
        assert (code, "the options of the DDL capture in the schema 'cdcpipe' can't be read" in err) == (2, True)
    assert capture.install("--no-statements", "--no-strict")["settings"]["statements"] is False


def test_a_text_that_may_hold_a_password_is_left_out(capture: Capture) -> None:
    for text in (
        "create role {0} password 'geheim'; create table u (id int)",
        "create table u (id int); create role {0} encrypted PASSWORD /* x */ E'geheim'",
        "do $$ begin execute format('create role {0} password %L', 'geheim'); create table u (id int); end $$",
        "create table u (id int); comment on table u is 'postgresql://me:geheim@host/db'",
        "create table u (id int); comment on table u is 'host=h password=''geheim'''",
    ):
        role = f"r_{capture.database.name}"
        messages = capture.run(text.format(role))
        assert {message["statement"] for message in messages} == {None}
        capture.run("drop table u", f"drop role if exists {role}")
    (message,) = capture.run("create table u (id int, password text)")
    assert message["statement"] == "create table u (id int, password text)"


def test_a_long_text_is_cut(capture: Capture) -> None:
    (message,) = capture.run(f"create table u (id int) /* {'x' * 20_000} */")
    assert message["statement"] == f"create table u (id int) /* {'x' * 20_000} */"[:10_000]


def test_a_read_only_session_is_told_of_its_setting(database: postgres.Database) -> None:
    code, _, err = run_cli("ddl", "install", "-d", database.dsn, "-m", "options=-c default_transaction_read_only=on")
    assert code == 2
    assert "default_transaction_read_only=off" in err.partition("hint: ")[2]


def test_another_schema(capture: Capture) -> None:
    code, _, err = run_cli("ddl", "install", "-d", capture.database.dsn, "--schema", "other")
    assert (code, "is installed already, in the schema 'cdcpipe'" in err) == (2, True)
    run_cli("ddl", "remove", "-d", capture.database.dsn)
    capture.read()
    capture.install("--schema", 'Od"d $ schema')
    assert summary(capture.run("alter table t add a int")) == ["command ALTER TABLE t"]
    assert status(capture.database)[1]["installed"]["schema"] == 'Od"d $ schema'
    assert run_cli("ddl", "remove", "-d", capture.database.dsn)[0] == 0
    assert capture.connection.execute("select count(*) from pg_namespace where nspname = 'Od\"d $ schema'").fetchone() == (0,)


def test_a_schema_with_something_else_in_it_stays(capture: Capture) -> None:
    capture.run("create table cdcpipe.mine (id int)")
    assert run_cli("ddl", "remove", "-d", capture.database.dsn)[0] == 0
    assert capture.connection.execute("select * from cdcpipe.mine").fetchall() == []


def test_a_schema_that_was_there_keeps_its_comment_and_its_privileges(database: postgres.Database) -> None:
    with database.connect() as connection:
        connection.execute("create schema app; comment on schema app is 'mine'")
        connection.execute("create function app.f() returns int language sql as 'select 1'")
        for _ in range(2):
            assert run_cli("ddl", "install", "-d", database.dsn, "--schema", "app")[0] == 0
        callable_by_all = "select proname from pg_proc where pronamespace = 'app'::regnamespace and proacl is null"
        assert connection.execute(callable_by_all).fetchall() == [("f",)]
        assert connection.execute("select obj_description('app'::regnamespace)").fetchone() == ("mine",)


def test_status_names_what_is_not_captured(capture: Capture) -> None:
    execute = capture.connection.execute
    execute("alter event trigger cdcpipe_sql_drop disable")
    execute("alter event trigger cdcpipe_table_rewrite enable")
    execute("drop event trigger cdcpipe_ddl_command_end")
    code, report = status(capture.database, "--publication", "everything", "--publication", "nope")
    assert (code, levels(report)) == (
        1,
        [
            ("error", "ddl.trigger", "cdcpipe_ddl_command_end"),
            ("error", "ddl.trigger", "cdcpipe_sql_drop"),
            ("warning", "ddl.trigger", "cdcpipe_table_rewrite"),
            ("error", "ddl.publication", "nope"),
        ],
    )
    assert "captured" not in "".join(each["message"] for each in report["findings"] if each["level"] == "ok")
    capture.install()
    assert status(capture.database)[0] == 0


def test_a_user_without_the_privilege_is_told_which_one(capture: Capture) -> None:
    role, stranger = f"owner_{capture.database.name}", f"stranger_{capture.database.name}"
    capture.connection.execute(f"create role {role} login; create role {stranger} login")
    try:
        capture.connection.execute(f'alter database "{capture.database.name}" owner to {role}')
        run_cli("ddl", "remove", "-d", capture.database.dsn)
        code, _, err = run_cli("ddl", "install", "-d", capture.database.dsn, "-U", role)
        assert code == 2
        assert "permission denied to create event trigger" in err
        assert "superuser" in err
        code, _, err = run_cli("ddl", "install", "-d", capture.database.dsn, "-U", stranger)
        assert (code, "permission denied for database" in err, "connect as a superuser" in err) == (2, True, True)
        assert capture.connection.execute("select count(*) from pg_namespace where nspname = 'cdcpipe'").fetchone() == (0,)
        capture.connection.execute(f"create schema cdcpipe authorization {role}")
        code, _, err = run_cli("ddl", "install", "-d", capture.database.dsn)
        assert (code, "belongs to another user" in err, "name another schema, or drop this one" in err) == (2, True, True)
        capture.connection.execute(f"reassign owned by {role} to postgres; drop owned by {role}")
        assert run_cli("ddl", "install", "-d", capture.database.dsn)[0] == 0
        assert status(capture.database, "-U", role)[0] == 0  # everybody may ask
    finally:
        capture.connection.execute(f'alter database "{capture.database.name}" owner to postgres; drop role {role}, {stranger}')


def test_the_printed_sql_is_what_is_installed(capture: Capture) -> None:
    run_cli("ddl", "remove", "-d", capture.database.dsn)
    capture.read()
    code, sql, err = run_cli("ddl", "install", "--print", "--schema", "s", "--strict")
    assert (code, err) == (0, "")
    assert summary(capture.run(sql.decode())) == ["installed"]
    assert status(capture.database)[1]["installed"]["strict"] is True


def test_the_printed_sql_can_describe_no_publication() -> None:
    code, out, err = run_cli("ddl", "install", "--print", "--publication", "shop")
    assert (code, out, "--publication and --print can't be used together" in err) == (1, b"", True)


def test_a_later_version_is_not_replaced(capture: Capture) -> None:
    replace_settings(capture, {"version": 99, "statements": True, "strict": False})
    code, _, err = run_cli("ddl", "install", "-d", capture.database.dsn)
    assert (code, "later version 99 is installed" in err) == (2, True)


def test_an_older_version_is_brought_up_to_date(capture: Capture) -> None:
    """An older version has other functions under the same names; here, functions that do nothing."""
    replace_settings(capture, {"version": 0, "statements": True, "strict": False})
    for name in ("ddl_command_end", "ddl_sql_drop", "ddl_table_rewrite"):
        capture.connection.execute(
            f"create or replace function cdcpipe.{name}() returns event_trigger language plpgsql as 'begin end'"
        )
    assert capture.run("alter table t add a int") == []
    assert levels(status(capture.database)[1]) == [("warning", "ddl.version", None)]
    capture.install()
    assert levels(status(capture.database)[1]) == []
    assert summary(capture.run("alter table t add b int")) == ["command ALTER TABLE t"]


def test_two_at_the_same_time(capture: Capture) -> None:
    sql = run_cli("ddl", "install", "--print")[1].decode()
    with capture.database.connect() as connection, capture.database.connect() as other:
        other.execute("set lock_timeout = '50ms'")
        with connection.transaction():
            connection.execute(sql)
            with pytest.raises(psycopg.errors.LockNotAvailable):
                other.execute(sql)
        other.execute(sql)


def test_no_ddl_of_others_fails_while_the_capture_comes_and_goes(capture: Capture) -> None:
    done = threading.Event()

    def work(number: int) -> int:
        rounds = 0
        with capture.database.connect() as connection:
            while not done.is_set():
                connection.execute(f"create table w{number} (id int)")
                connection.execute(f"alter table w{number} add a int")
                connection.execute(f"drop table w{number}")
                rounds += 1
        return rounds

    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(work, number) for number in range(3)]
        try:
            with connected(connection_parameters([("dbname", capture.database.dsn)])) as connection:
                for _ in range(8):
                    ddl.remove(connection)
                    ddl.install(connection, ddl.Wanted())
                    ddl.install(connection, ddl.Wanted())
        finally:
            done.set()
        assert all(worker.result() for worker in workers)


def test_what_a_killed_removal_left_is_removed(capture: Capture) -> None:
    capture.connection.execute(script.disarm())
    assert [level for level, _, _ in levels(status(capture.database)[1])] == ["error"] * 3
    assert run_cli("ddl", "remove", "-d", capture.database.dsn)[0] == 0
    assert capture.connection.execute("select count(*) from pg_namespace where nspname = 'cdcpipe'").fetchone() == (0,)
