"""The command line as its users meet it, on real servers: records, exit codes, slots and publications that it makes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pexpect
import postgres
import pytest

from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import Begin, Binary, Commit, Insert, LogicalMessage, Relation
from cdcpipe.sql import quote_identifier
from support.cli_process import CLI, COMMAND, run_cli
from support.published_database import PublishedDatabase
from support.requirements import need
from support.waiting import until

# Records


def test_records_headers_and_quit(on: PublishedDatabase) -> None:
    on.sql("insert into t values (1, 'a'), (2, E'line\\nbreak')")
    with on.cli() as cli:
        records = cli.take(5)
        kinds = [type(decode(record)) for _, record in records]
        assert kinds == [Begin, Relation, Insert, Insert, Commit]
        commit = decode(records[-1][1])
        assert isinstance(commit, Commit)
        assert records[-1][0] == commit.end_lsn
        assert records[1][0] == 0
        assert cli.quit() == 0
        assert cli.stderr == ""


def test_newline_counts_in_the_length(on18: PublishedDatabase) -> None:
    on18.sql("insert into t values (1, 'a')")
    with on18.cli("-N") as cli:
        for _, record in cli.take(4):
            assert record.endswith(b"\n")
            decode(record[:-1])


def test_without_header_there_are_only_records(on18: PublishedDatabase) -> None:
    on18.sql("insert into t values (1, 'a')")
    lsn = str(on18.value("select pg_current_wal_insert_lsn()"))
    with on18.cli("--endpos", lsn, header=False) as cli:
        assert cli.read_bytes(1) == b"B"
        assert cli.wait() == 0


@pytest.mark.parametrize("options", [[], ["-o", "include-xids=0"], ["-o", "skip-empty-xacts=1", "-o", "include-timestamp"]])
def test_any_plugin_byte_for_byte(on15: PublishedDatabase, options: list[str]) -> None:
    """What the C program passes through, we do: the SQL interface to the same slot is the oracle."""
    slot = on15.make_slot("test_decoding", "_td")
    on15.sql("insert into t values (1, E'a\\nb')", "update t set v = 'c'", "delete from t", "create table u()")
    pairs = [option.partition("=")[::2] for option in options[1::2]]
    arguments = [text for key, value in pairs for text in (key, value or "1")]
    expected = on15.connection.execute(
        f"select lsn, data from pg_logical_slot_peek_changes(%s, null, null{', %s' * len(arguments)})", (slot, *arguments)
    ).fetchall()
    with CLI("-d", on15.database.dsn, "-S", slot, *options) as cli:
        got = cli.take(len(expected))
        assert [record.decode() for _, record in got] == [data for _, data in expected]
        cli.say(f"F {got[-1][0]}\n")
        assert cli.quit() == 0
    # (With skip-empty-xacts those that are empty may or may not have been confirmed with a keepalive.)
    rest = on15.connection.execute(
        f"select count(*) from pg_logical_slot_peek_changes(%s, null, null{', %s' * len(arguments)})", (slot, *arguments)
    ).fetchone()
    assert rest == (0,)


def test_another_descriptor(on18: PublishedDatabase) -> None:
    on18.sql("insert into t values (1, 'a')")
    read_fd, write_fd = os.pipe()
    with on18.cli("-D", str(write_fd), pass_fds=[write_fd]) as cli:
        os.close(write_fd)
        assert os.read(read_fd, 2) == b"w "
        assert cli.quit() == 0
    os.close(read_fd)


def test_into_a_file(on18: PublishedDatabase, tmp_path: os.PathLike[str]) -> None:
    on18.sql("insert into t values (1, 'a')")
    end = str(on18.value("select pg_current_wal_insert_lsn()"))
    path = f"{tmp_path}/day.cdc"
    with open(path, "wb") as out:
        process = subprocess.Popen(
            [*COMMAND, "-d", on18.database.dsn, "-S", on18.slot, "--publication", "p", "-H", "--endpos", end],
            stdin=subprocess.PIPE,
            stdout=out,
        )
        assert process.wait(60) == 0
    with open(path, "rb") as written:
        assert written.read().startswith(b"w ")


def test_at_a_terminal(on18: PublishedDatabase) -> None:
    """Somebody types: commands and ^C work, records come out."""
    on18.sql("insert into t values (1, 'typed')")
    child = pexpect.spawn(
        sys.executable, ["-m", "cli", "-d", on18.database.dsn, "-S", on18.slot, "--publication", "p", "-HN"], timeout=60
    )
    child.expect(rb"w [0-9A-F]+/[0-9A-F]+ \d+\r\n")
    child.expect(b"typed")
    child.sendline("# a comment")
    child.sendcontrol("c")
    child.expect(pexpect.EOF)
    child.close()
    assert (child.exitstatus, child.signalstatus) == (0, None)


@pytest.mark.parametrize("name", ["MyPub", "a,b", 'a"b', "a'b", "a\\b", " p ", "é"])
def test_any_publication_name(on: PublishedDatabase, name: str) -> None:
    on.sql("drop publication p", f"create publication {quote_identifier(name)} for table t")
    on.connection.execute("select pg_drop_replication_slot(%s)", (on.slot,))
    on.make_slot()
    on.sql("insert into t values (1, 'a')")
    with on.cli(publication=name) as cli:
        assert cli.transactions(1)[0][1] == [b"1"]
        assert cli.quit() == 0


def test_publication_names_as_an_option_are_the_servers(on18: PublishedDatabase) -> None:
    on18.sql("insert into t values (1, 'a')")
    with on18.cli("-o", 'publication_names=P , "p"', publication="") as cli:
        cli.transactions(1)
        assert cli.quit() == 0


def test_a_hostile_session_changes_nothing(on: PublishedDatabase) -> None:
    on.sql(
        "create table h(id int primary key, d timestamptz, f float8, i interval, b bytea, r regclass)",
        "alter publication p add table h",
        "create role hostile superuser replication login",
        "alter role hostile set datestyle = 'German'",
        "alter role hostile set bytea_output = 'escape'",
        "alter role hostile set intervalstyle = 'iso_8601'",
        "alter role hostile set extra_float_digits = -5",
        "alter role hostile set quote_all_identifiers = on",
    )
    try:
        on.connection.execute("select pg_drop_replication_slot(%s)", (on.slot,))
        on.make_slot()
        on.sql(r"insert into h values (1, '2024-02-03 04:05:06.789+00', 0.1::float8 + 0.2::float8, '1 day 2:03', '\x00ff', 'h')")
        end = str(on.value("select pg_current_wal_insert_lsn()"))
        outputs = []
        for user, env in (
            ("postgres", {}),
            ("hostile", {"PGTZ": "Asia/Tokyo", "PGDATESTYLE": "German", "PGOPTIONS": "-c DateStyle=SQL"}),
        ):
            with on.cli("-U", user, "--endpos", end, env=env) as cli:
                outputs.append(list(cli.records()))
        assert outputs[0] == outputs[1]
        row = next(message for message in (decode(record) for _, record in outputs[0]) if isinstance(message, Insert))
        assert row.new == (b"1", b"2024-02-03 04:05:06.789+00", b"0.30000000000000004", b"1 day 02:03:00", b"\\x00ff", b"public.h")
    finally:
        on.sql("drop role hostile")


# What is wrong on the server: exit codes 2, 8, 9; and what libpq refuses: 1


def test_no_database(on18: PublishedDatabase) -> None:
    code, _, err = run_cli("-S", "s", "-d", on18.database.dsn + "_no")
    assert code == 2
    assert "does not exist" in err


FAULTY = [
    ({"PGTZ": "Mars"}, (), "correct TimeZone in the environment variable PGTZ"),
    ({"PGDATESTYLE": "Mars"}, (), "correct DateStyle in the environment variable PGDATESTYLE"),
    ({"PGGEQO": "Mars"}, (), "correct geqo in the environment variable PGGEQO"),
    ({"PGOPTIONS": "-c work_mem=Mars"}, (), "correct work_mem in the environment variable PGOPTIONS"),
    ({"PGOPTIONS": "--nonsense=1"}, (), "correct nonsense in the environment variable PGOPTIONS"),
    ({"PGOPTIONS": "-c nonsense"}, (), "correct the environment variable PGOPTIONS"),
    ({"PGOPTIONS": "-9"}, (), "correct the environment variable PGOPTIONS"),
    ({}, ("-m", "options=-c work_mem=Mars"), "correct work_mem in options, which -m or -d gives"),
    ({"PGSSLMODE": "verify-full", "PGSSLROOTCERT": "system"}, ("-h", "127.0.0.1"), "PGSSLMODE"),
    ({"PGUSER": "mars"}, (), "check the user's name (-U, PGUSER)"),
]

REFUSED = [
    ({"PGSERVICE": "Mars"}, (), "correct the environment variable PGSERVICE"),
    ({}, ("-m", "service=Mars"), "correct service, which -m or -d gives"),
    ({"PGSSLMODE": "Mars"}, (), "correct the environment variable PGSSLMODE"),
    ({}, ("-m", "sslmode=Mars"), "correct sslmode, which -m or -d gives"),
    ({"PGPORT": "Mars"}, (), "correct the environment variable PGPORT"),
    ({"PGPORT": "99999"}, (), "correct the environment variable PGPORT"),
    ({}, ("-p", "Mars"), "correct -p, or port in -d or -m"),
    ({"PGCONNECT_TIMEOUT": "Mars"}, (), "correct the environment variable PGCONNECT_TIMEOUT"),
    ({"PGTARGETSESSIONATTRS": "Mars"}, (), "correct the environment variable PGTARGETSESSIONATTRS"),
    ({"PGSSLMINPROTOCOLVERSION": "Mars"}, (), "correct the environment variable PGSSLMINPROTOCOLVERSION"),
]


@pytest.mark.parametrize(
    ("expected", "environment", "options", "hint"), [*((2, *each) for each in FAULTY), *((1, *each) for each in REFUSED)]
)
def test_the_hint_names_what_is_at_fault(
    pg18: postgres.Cluster, expected: int, environment: dict[str, str], options: tuple[str, ...], hint: str
) -> None:
    """The environment variable, or the option. What libpq refuses is wrong whatever the server is."""
    given = {word.partition("=")[0]: word.partition("=")[2] for word in pg18.dsn.split()}
    server = {f"PG{'DATABASE' if name == 'dbname' else name.upper()}": value for name, value in given.items()}
    code, _, err = run_cli("-S", "s", "-L", "-u", "0", *options, env=server | environment)
    assert code == expected
    assert hint in err.partition("hint: ")[2]


def test_a_wrong_password_is_one() -> None:
    need("18")
    with postgres.Cluster("18") as cluster, cluster.connect() as connection:
        connection.execute("create role guarded login password 'right'")
        hba = connection.execute("show hba_file").fetchone()
        assert hba is not None
        path = Path(hba[0])
        path.write_text(f"local all guarded scram-sha-256\n{path.read_text()}")
        connection.execute("select pg_reload_conf()")
        command = ("-d", cluster.dsn, "-U", "guarded", "-S", "s", "-L", "-u", "0")
        until(lambda: run_cli(*command, env={"PGPASSFILE": "/dev/null"})[0] == 2)
        assert "hint: set PGPASSWORD" in run_cli(*command, env={"PGPASSFILE": "/dev/null"})[2]
        code, _, err = run_cli(*command, env={"PGPASSWORD": "CANARY"})
        assert code == 2
        assert "hint: check the password (PGPASSWORD" in err
        assert "CANARY" not in err


def test_no_slot(on: PublishedDatabase) -> None:
    code, _, err = run_cli("-d", on.database.dsn, "-S", "no_such_slot", "--publication", "p")
    assert code == 8
    assert "no_such_slot" in err


def test_slot_in_use(on: PublishedDatabase) -> None:
    with on.cli() as first:
        until(on.is_active)
        code, _, err = on.run()
        assert code == 9
        assert "in use" in err
        assert first.quit() == 0


def test_missing_publications_are_named(on: PublishedDatabase) -> None:
    code, _, err = on.run("--publication", "Missing", "--publication", "gone")
    assert code == 2
    assert "'Missing', 'gone'" in err
    assert on.run(publication="")[0] == 2


def test_a_slot_of_another_database(on18: PublishedDatabase) -> None:
    code, _, err = run_cli("-d", on18.database.cluster.dsn, "-S", on18.slot, "--publication", "p")
    assert code == 2
    assert on18.database.name in err


def test_a_physical_slot(on18: PublishedDatabase) -> None:
    name = f"phys_{on18.database.name}"
    on18.connection.execute("select pg_create_physical_replication_slot(%s)", (name,))
    try:
        code, _, err = run_cli("-d", on18.database.dsn, "-S", name, "--publication", "p")
        assert code == 2
        assert "physical" in err
    finally:
        on18.connection.execute("select pg_drop_replication_slot(%s)", (name,))


def test_no_replication_privilege(on18: PublishedDatabase) -> None:
    on18.sql("create role plain login")
    try:
        code, _, err = on18.run("-U", "plain")
        assert code == 2
        assert "REPLICATION" in err
    finally:
        on18.sql("drop role plain")


def test_unknown_plugin(on: PublishedDatabase) -> None:
    code, _, err = run_cli("-d", on.database.dsn, "-S", "new_slot", "-c", "-P", "no_such_plugin")
    assert code == 2
    assert "no_such_plugin" in err
    assert on.value("select count(*) from pg_replication_slots where slot_name = 'new_slot'") == 0


def test_unknown_option_of_the_plugin(on: PublishedDatabase) -> None:
    code, _, err = on.run("-o", "nonsense=1")
    assert code == 2
    assert "nonsense" in err


def test_protocol_version_too_new(on: PublishedDatabase) -> None:
    code, _, err = on.run("-o", "proto_version=99")
    assert code == 2
    assert "99" in err


def test_another_system_is_refused(on18: PublishedDatabase) -> None:
    code, _, err = on18.run("--expect", "1234/1")
    assert code == 2
    assert "1234/1" in err


def test_a_start_beyond_the_servers_wal_is_refused(on: PublishedDatabase) -> None:
    on.sql("insert into t values (1, 'a')")
    before = on.confirmed()
    code, out, err = on.run("--startpos", "FF/0", "-A")
    assert (code, out) == (2, b"")
    assert "the server has gone back: its WAL ends at 0/" in err
    assert on.confirmed() == before
    position = str(on.value("select pg_current_wal_insert_lsn()"))
    with on.cli("--startpos", position, "--endpos", position) as cli:
        assert cli.wait() == 0, cli.stderr


def test_injection_is_a_name(on18: PublishedDatabase) -> None:
    code, _, _ = run_cli("-d", on18.database.dsn, "-S", "x'; drop table t; --", "--publication", "p")
    assert code == 8
    assert run_cli("-d", on18.database.dsn, "-S", "x'; drop table t; --", "-L", "-u", "0")[0] == 8
    assert on18.run("-o", "binary=it's\\")[0] == 2
    assert on18.value("select count(*) from t") == 0


def test_wal_level_and_lost_slots_are_explained() -> None:
    """On clusters of their own: what has to be set is named; a lost slot is never made anew."""
    need("18")
    with postgres.Cluster("18", settings={"wal_level": "replica"}) as cluster:
        code, _, err = run_cli("-d", cluster.dsn, "-S", "s", "--publication", "p")
        assert code == 2
        assert "wal_level = logical" in err
    settings = {"max_slot_wal_keep_size": "16MB", "min_wal_size": "32MB", "max_wal_size": "48MB"}
    with postgres.Cluster("18", settings=settings) as cluster, cluster.connect() as connection:
        connection.execute("create table t(id int)")
        connection.execute("create publication p for all tables")
        connection.execute("select pg_create_logical_replication_slot('lost', 'pgoutput')")

        def is_lost() -> bool:
            connection.execute("insert into t select generate_series(1, 1000)")
            connection.execute("select pg_switch_wal()")
            connection.execute("checkpoint")
            return connection.execute("select wal_status from pg_replication_slots").fetchone() == ("lost",)

        until(is_lost)
        for _ in range(2):
            code, _, err = run_cli("-d", cluster.dsn, "-S", "lost", "--publication", "p", "-c")
            assert code == 2
            assert "lost" in err
            assert "SELECT pg_drop_replication_slot('lost')" in err.partition("hint: ")[2]
        for wait in ("-L", "--standby"):  # otherwise a loop of -L and a stream would never end
            code, _, err = run_cli("-d", cluster.dsn, "-S", "lost", "--publication", "p", wait, "-u", "0")
            assert code == 2
            assert "is lost" in err


# Slots and publications are made with -c


def test_create_slot_and_publication_for_tables(on: PublishedDatabase) -> None:
    on.sql('create table "Odd ""name"""(id int primary key)', "create table other(id int primary key)")
    name = f"new_{on.database.name}"
    args = ["-d", on.database.dsn, "-S", name, "--publication", "New pub", "--table", 'public."Odd ""name"""']
    assert run_cli(*args)[0] == 8
    with CLI(*args, "-c") as cli:
        until(lambda: on.value("select active from pg_replication_slots where slot_name = %s", name))
        on.sql("insert into other values (1)", 'insert into "Odd ""name""" values (2)')
        assert cli.transactions(1)[0][1] == [b"2"]
        assert cli.quit() == 0
    assert on.value("select plugin from pg_replication_slots where slot_name = %s", name) == "pgoutput"
    with CLI(*args, "-c", "--endpos", "0/1") as cli:  # it exists by now
        assert cli.wait() == 0


MISTAKES = [
    ((), "", "pgoutput needs a publication"),
    (("-o", "messages=banana"), "p", "messages takes off, on, not 'banana'"),
    (("-o", "binary=1"), "p", "binary takes off, on, not '1'"),
    (("-o", "proto_version=99"), "p", "proto_version 99"),
    (("-o", "nonsense=1"), "p", "no option 'nonsense'"),
    (("--output", "json", "-o", "messages=maybe"), "p", "messages takes"),
    (("-o", "publication_names"), "p", "publication_names has no value"),
    (("--binary", "--table", "public.odd"), "q", "no binary form"),
    (("-P", "test_decoding"), "p", "would get the plugin test_decoding"),
    (("-P", "test_decoding", "--output", "json"), "", "would get the plugin test_decoding"),
    (("-P", "test_decoding", "--whole-transactions"), "", "would get the plugin test_decoding"),
    (("-U", "maker"), "p", "REPLICATION"),
    (("--expect", "1234/1"), "p", "not 1234/1"),
    (("--startpos", "FF/0"), "p", "FF/0"),
    (("--expect-lsn", "0/1"), "p", "beyond 0/1"),
]


@pytest.mark.parametrize(("options", "publication", "said"), MISTAKES)
def test_a_mistake_leaves_no_slot_behind(on: PublishedDatabase, options: tuple[str, ...], publication: str, said: str) -> None:
    """Nobody would read such a slot, and the server would keep WAL for it."""
    on.sql("create type pair as (one int, two aclitem)", "create table odd (id int primary key, v pair)")
    name = f"new_{on.database.name}"
    on.sql("create role maker login")
    try:
        code, out, err = run_cli(
            *("-d", on.database.dsn, "-S", name, "-c", *options), *(["--publication", publication] if publication else [])
        )
        assert (code, out) == (2, b"")
        assert said in err
        assert "is there now" not in err
        assert on.value("select count(*) from pg_replication_slots where slot_name = %s", name) == 0
        assert on.value("select count(*) from pg_publication") == 1
    finally:
        on.sql("drop role maker")


@pytest.mark.parametrize(("options", "said"), [((), "needs a publication"), (("--publication", "p", "-P", "wal2json"), "wal2json")])
@pytest.mark.parametrize("export", [False, True])
def test_prepare_leaves_no_slot_behind(on18: PublishedDatabase, options: tuple[str, ...], said: str, export: bool) -> None:
    name = f"new_{on18.database.name}"
    code, out, err = run_cli(
        "prepare", "-d", on18.database.dsn, "-S", name, "-c", *options, *(["--export-snapshot"] if export else [])
    )
    assert (code, out) == (2, b"")
    assert said in err
    assert on18.value("select count(*) from pg_replication_slots where slot_name = %s", name) == 0


def test_a_new_slot_without_a_stream_is_named(on15: PublishedDatabase) -> None:
    """Only the server's plugin knows its options. The slot is there by then."""
    name = f"new_{on15.database.name}"
    code, _, err = run_cli("-d", on15.database.dsn, "-S", name, "-c", "-P", "test_decoding", "-o", "nonsense=1")
    try:
        assert code == 2
        assert "nonsense" in err
        assert f"replication slot '{name}' is there now" in err
        assert f"SELECT pg_drop_replication_slot('{name}')" in err.partition("hint: ")[2]
    finally:
        on15.sql(f"select pg_drop_replication_slot('{name}')")
    code, _, err = run_cli("-d", on15.database.dsn, "-S", on15.slot, "--publication", "p", "-o", "nonsense=1")
    assert "is there now" not in err


def test_a_plugin_that_the_slot_does_not_have_is_named(on15: PublishedDatabase) -> None:
    for options, is_warned in (("-P", "test_decoding"), True), (("-P", "pgoutput"), False), ((), False):
        for mode in (), ("-c",), ("-L", "-c"):
            code, _, err = on15.run(*options, *mode, "-A", "--endpos", "0/1")
            assert code == 0
            assert ("exists with the plugin pgoutput: -P test_decoding has no effect" in err) == is_warned


def test_the_hint_for_a_missing_publication_leads_on(on: PublishedDatabase) -> None:
    """With a slot that exists, -c makes no publication, so that the hint must not send the user to -c alone."""
    code, _, err = on.run("-c", publication="fruits")
    assert code == 2
    assert "no publication 'fruits'" in err
    hint = err.partition("hint: ")[2]
    assert "it has 'p'" in hint
    assert 'CREATE PUBLICATION "fruits"' in hint
    assert "dropped and made anew" in hint
    assert on.value("select count(*) from pg_publication") == 1
    on.sql("drop publication p")
    assert "it has none" in on.run()[2]


def test_create_slot_and_publication_for_all_tables(on18: PublishedDatabase) -> None:
    name = f"new_{on18.database.name}"
    args = ["-d", on18.database.dsn, "-S", name, "--publication", "everything", "-c"]
    with CLI(*args) as cli:
        until(lambda: on18.value("select active from pg_replication_slots where slot_name = %s", name))
        on18.sql("insert into t values (1)")
        assert cli.transactions(1)[0][1] == [b"1"]


@pytest.mark.parametrize("export", [False, True])
def test_the_sessions_limits_of_time_are_lifted(on: PublishedDatabase, export: bool) -> None:
    """Neither the creation of a slot, nor the stream, nor a snapshot that is held ends for a limit of the role or the database."""
    limits = ["statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout"]
    limits += ["transaction_timeout"] * (on.database.cluster.version == "18")
    on.sql(*[f'alter database "{on.database.name}" set {limit} = 200' for limit in limits])
    name = f"new_{on.database.name}"
    waiting = "select count(*) from pg_replication_slots where slot_name = %s and active"
    arguments = ["-d", on.database.dsn, "-S", name, "--publication", "p", "-c"]
    with on.database.connect(options="".join(f"-c {limit}=0 " for limit in limits)) as other:
        other.execute("begin")
        other.execute("insert into t values (1)")
        with CLI(*(["prepare", "--export-snapshot"] if export else []), *arguments, header=not export) as cli:
            until(lambda: cli.process.poll() is not None or on.value(waiting, name), "the server's waiting")
            on.sql("select pg_sleep(0.6)")
            other.execute("commit")
            if export:
                assert json.loads(cli.read_bytes())["snapshot"]
            else:
                until(lambda: on.value(f"{waiting} and confirmed_flush_lsn is not null", name), "the stream")
                on.sql("insert into t values (2)")
                cli.transactions(1)
            on.sql("select pg_sleep(0.6)", "insert into t values (3)")
            if not export:
                cli.transactions(1)
            assert cli.quit() == 0, cli.stderr


@pytest.mark.parametrize("mode", [["--create-timeout", "1"], ["-L", "-u", "1"], ["-L", "-u", "60", "--create-timeout", "1"]])
def test_creation_that_waits_for_a_transaction_gives_up(on: PublishedDatabase, mode: list[str]) -> None:
    name = f"new_{on.database.name}"
    with on.database.connect() as other:
        other.execute("begin")
        other.execute("insert into t values (1)")
        code, _, err = run_cli("-d", on.database.dsn, "-S", name, "--publication", "p", "-c", *mode)
        other.execute("rollback")
    assert code == 2
    assert "running transactions" in err
    # In poll mode the limit is what the looks at the slot and the server leave of the duration.
    assert re.search(r"within (1|0\.\d) s \(--create-timeout, in poll mode also --poll-duration\)", err), err
    assert on.value("select count(*) from pg_replication_slots where slot_name = %s", name) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_slot_is_made_leaves_none(on18: PublishedDatabase, number: signal.Signals) -> None:
    name = f"new_{on18.database.name}"
    with on18.database.connect() as other:
        other.execute("begin")
        other.execute("insert into t values (1)")
        with CLI("-d", on18.database.dsn, "-S", name, "--publication", "p", "-c") as cli:
            until(lambda: on18.value("select count(*) from pg_replication_slots where slot_name = %s", name))
            cli.signal(number)
            assert cli.wait() == 0
        other.execute("rollback")
    until(lambda: on18.value("select count(*) from pg_replication_slots where slot_name = %s", name) == 0)


def test_wal2json_is_the_plugin_of_a_new_slot_with_version_2(on15: PublishedDatabase) -> None:
    name = f"new_{on15.database.name}"
    with CLI("-d", on15.database.dsn, "-S", name, "-c", "-J", header=False) as cli:
        until(lambda: on15.value("select active from pg_replication_slots where slot_name = %s", name))
        on15.sql("insert into t values (1, 'a')")
        records = cli.take(3)
    assert [json.loads(record)["action"] for _, record in records] == ["B", "I", "C"]
    assert on15.value("select plugin from pg_replication_slots where slot_name = %s", name) == "wal2json"


def test_a_plugin_that_the_server_does_not_allow() -> None:
    need("15")
    with postgres.Cluster("15", settings={"output_plugin_libraries": "pgoutput"}) as cluster:
        code, _, err = run_cli("-d", cluster.dsn, "-S", "s", "-c", "-J")
        assert code == 2
        assert "output_plugin_libraries" in err


def test_a_table_without_identity_is_named(on18: PublishedDatabase) -> None:
    on18.sql("create table nokey(v int)", "alter publication p add table nokey")
    with on18.cli() as cli:
        until(lambda: "nokey" in cli.stderr)
        assert cli.quit() == 0


# pgoutput's own options, by name


def test_options_for_newer_servers_are_named(on15: PublishedDatabase) -> None:
    code, _, err = on15.run("--streaming", "parallel")
    assert code == 2
    assert "streaming=parallel" in err
    assert "16" in err
    assert on15.run("--origin", "none")[0] == 2


def test_messages(on: PublishedDatabase) -> None:
    on.sql("select pg_logical_emit_message(false, 'prefix', 'content')", "insert into t values (1)")
    with on.cli("--messages") as cli:
        message = decode(cli.take(1)[0][1])
        assert isinstance(message, LogicalMessage)
        assert (message.prefix, message.content) == ("prefix", b"content")
        assert len(cli.transactions(1)) == 1
        assert cli.quit() == 0


def test_binary(on18: PublishedDatabase) -> None:
    on18.sql("insert into t values (258, 'a')")
    with on18.cli("--binary") as cli:
        row = decode(cli.take(3)[-1][1])
        assert isinstance(row, Insert)
        assert row.new[0] == Binary(b"\0\0\1\2")
        assert cli.quit() == 0


def test_an_output_that_does_not_fit_the_slot(on15: PublishedDatabase) -> None:
    slot = on15.make_slot("test_decoding", "_td")
    code, _, err = run_cli("-d", on15.database.dsn, "-S", slot, "--output", "wal2json")
    assert code == 2
    assert "test_decoding" in err
