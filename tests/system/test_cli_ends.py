"""Ways out of the stream on real servers: pipes that close, backends and publications that go, silence."""

import contextlib
import fcntl
import json
import os
import resource
import shlex
import signal
import subprocess
import time
from pathlib import Path

import postgres
import pytest

from cdcpipe.lsn import LSN
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import Commit, Insert
from support.cli_process import COMMAND
from support.published_database import PublishedDatabase, backlog, insert
from support.requirements import need
from support.waiting import until


@pytest.mark.parametrize("way", ["q", "SIGINT", "SIGTERM"])
def test_ways_out_lose_no_feedback_under_a_backlog(on: PublishedDatabase, way: str) -> None:
    """Feedback, then the end at once, with unread data on the socket and stdout blocked (PITFALLS A9)."""
    backlog(on, rows=40_000)
    for _ in range(3):
        with on.cli() as cli:
            end, _ = cli.transactions(1)[0]
            cli.say(f"F {end}\n" + ("q\n" if way == "q" else ""))
            if way != "q":
                cli.signal(signal.Signals[way])
            assert cli.wait_without_reading() == 0, cli.stderr
        assert on.confirmed() == end


@pytest.mark.parametrize("options", [(), ("--output", "wal2json", "-o", "format-version=2")], ids=["pgoutput", "wal2json"])
def test_feedback_for_a_transaction_in_a_chunk_that_is_out_in_part(on18: PublishedDatabase, options: tuple[str, ...]) -> None:
    """The pipe holds a page, and each chunk has many transactions. The consumer confirms what it has just read, and quits."""
    insert(on18, 0)
    with on18.cli(*options) as cli:
        assert cli.process.stdout is not None
        cli.take(3)
        fcntl.fcntl(cli.process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        cli.signal(signal.SIGSTOP)
        backlog(on18, rows=2000, per_transaction=1, width=500)
        cli.signal(signal.SIGCONT)
        confirmed = 0
        for lsn, record in cli.take(1500):
            if json.loads(record)["action"] == "C" if options else record[:1] == b"C":
                confirmed = lsn
        until(cli.is_stdout_full, "a full pipe")
        cli.say(f"F {confirmed}\nq\n")
        assert cli.wait_without_reading() == 0, cli.stderr
    assert on18.confirmed() == confirmed


def test_quit_in_the_middle_of_a_huge_transaction(on18: PublishedDatabase) -> None:
    insert(on18, 0)
    on18.sql("insert into t select g, repeat('x', 100) from generate_series(1, 200000) g")
    with on18.cli() as cli:
        end, _ = cli.transactions(1)[0]
        cli.take(10)
        cli.say(f"F {end}\nq\n")
        assert cli.wait_without_reading() == 0, cli.stderr
    assert on18.confirmed() == end


def test_a_slow_consumer_loses_neither_feedback_nor_the_connection_after_quit(on18: PublishedDatabase) -> None:
    """It takes the last records with many pauses. Meanwhile, the server gets the feedback, and signs of life."""
    insert(on18, 0)
    backlog(on18, 10_000, width=1000)
    with on18.cli("-F", "600", "-s", "0.05", "-m", "options=-c wal_sender_timeout=1s") as cli:
        end, _ = cli.transactions(1)[0]
        until(cli.is_stdout_full, "a full pipe")
        cli.say(f"F {end}\nq\n")
        taken = 0

        def take_some_and_look() -> bool:
            nonlocal taken
            taken += len(cli.read_bytes(1000))
            return on18.confirmed() == end

        until(take_some_and_look, "the feedback")
        assert taken < 500_000, "the feedback waited for the consumer"
        assert cli.wait() == 0, cli.stderr
    assert on18.confirmed() == end


@pytest.mark.parametrize(("way", "code"), [("the end of stdin", 4), ("q", 0)])
def test_ways_out_while_a_large_transaction_is_rendered(on18: PublishedDatabase, way: str, code: int) -> None:
    """The plugin writes all of it at its commit, which reaches the end position. The consumer has not taken all of it."""
    insert(on18, 0)
    on18.sql("insert into t select g, repeat('x', 3000) from generate_series(1, 5000) g")
    end = str(on18.value("select pg_current_wal_insert_lsn()"))
    with on18.cli("--output", "json", "--endpos", end) as cli:
        lsn, _ = cli.take(2)[-1]
        until(cli.is_stdout_full, "a full pipe")
        cli.say(f"F {lsn}\n")
        until(lambda: on18.confirmed() == lsn, "the feedback, while the plugin waits for the consumer")
        if way == "q":
            cli.say("q\n")
        else:
            cli.close_stdin()
        assert cli.wait_without_reading() == code, cli.stderr
    assert on18.confirmed() == lsn


@pytest.mark.parametrize("way", ["the end of stdin", "q", "SIGTERM"])
def test_ways_out_while_debezium_holds_a_huge_record(on18: PublishedDatabase, way: str) -> None:
    """The plugin keeps each record until the next one. What it has at the end is dropped: nobody waits for room for it."""
    on18.sql("begin", "insert into t select g, repeat('x', 1500000) from generate_series(1, 40) g", "commit")
    with on18.cli("--output", "debezium") as cli:
        cli.take(1)
        until(cli.is_stdout_full, "a full pipe")
        if way == "q":
            cli.say("q\n")
        elif way == "SIGTERM":
            cli.signal(signal.SIGTERM)
        else:
            cli.close_stdin()
        assert cli.wait() == (4 if way == "the end of stdin" else 0), cli.stderr


def test_stdin_closed_is_4_and_keeps_feedback(on: PublishedDatabase) -> None:
    insert(on, 1)
    with on.cli() as cli:
        end, _ = cli.transactions(1)[0]
        cli.say(f"F {end}\n")
        cli.close_stdin()
        assert cli.wait() == 4
    assert on.confirmed() >= end


def test_with_auto_feedback_and_an_end_nobody_needs_stdin(on18: PublishedDatabase) -> None:
    """As from cron and systemd. All other streams end with stdin, and say how to keep it open."""
    end = str(on18.value("select pg_current_wal_insert_lsn() + 65536"))
    with on18.cli("-A", "--endpos", end) as cli:
        cli.close_stdin()
        insert(on18, 1)
        assert cli.transactions(1)[0][1] == [b"1"]
        on18.sql("select pg_logical_emit_message(true, '', repeat('x', 100000))")
        assert cli.wait() == 0, cli.stderr
    on18.released()
    for options in (("-A",), ("--endpos", "FF/0"), ("-A", "--endpos", "FF/0", "--endpos-wait")):
        with on18.cli(*options) as cli:
            cli.close_stdin()
            assert cli.wait() == 4
            assert "mkfifo commands; cdcpipe … <>commands" in cli.stderr
        on18.released()


def test_a_named_pipe_keeps_stdin_open(on18: PublishedDatabase, tmp_path: Path) -> None:
    """The way that the hint of exit code 4 shows."""
    os.mkfifo(tmp_path / "commands")
    insert(on18, 1)
    command = shlex.join(CLI_ARGS(on18))
    with subprocess.Popen(["sh", "-c", f"exec {command} -A <>{tmp_path}/commands"]) as process:
        until(lambda: on18.confirmed() >= LSN.parse(str(on18.value("select pg_current_wal_flush_lsn()"))))
        assert process.poll() is None
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.parametrize(("closed", "code"), [("<&-", 4), ("2>&- </dev/null", 4), ("-A --endpos 0/1 <&- 2>&-", 0)])
def test_descriptors_that_are_closed_at_the_start(on18: PublishedDatabase, closed: str, code: int) -> None:
    """Nothing else takes their place: a socket, say, that would be read as commands."""
    command = shlex.join(CLI_ARGS(on18))
    done = subprocess.run(["sh", "-c", f"exec {command} {closed}"], stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == code


def run_within(on: PublishedDatabase, *options: str, limits: dict[int, int]) -> subprocess.CompletedProcess[str]:
    """Run a stream to the end of what there is, with limits of the process: the ``RLIMIT_`` constants and their values."""

    def set_limits() -> None:
        for which, limit in limits.items():
            resource.setrlimit(which, (limit, limit))

    command = [*COMMAND, "-d", on.database.dsn, "-S", on.slot, "--publication", "p", "-A", "--endpos", "0/1", *options]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, preexec_fn=set_limits)


def test_too_few_descriptors_are_no_defect(on18: PublishedDatabase) -> None:
    """The limit is named, wherever it is met: in libpq, in a module's import, in the stream."""
    codes = []
    for limit in range(5, 12):
        done = run_within(on18, limits={resource.RLIMIT_NOFILE: limit})
        assert done.returncode in (0, 7), done.stderr
        if done.returncode:
            assert f"ulimit -n (now {limit})" in done.stderr.partition("hint: ")[2]
        assert "defect" not in done.stderr
        codes.append(done.returncode)
    assert codes == sorted(codes, reverse=True)
    assert set(codes) == {0, 7}


def test_a_thread_that_can_not_be_started_is_no_defect(on18: PublishedDatabase) -> None:
    """A new thread's stack is as large as RLIMIT_STACK says, so that there is no room for it."""
    done = run_within(on18, limits={resource.RLIMIT_AS: 2 << 30, resource.RLIMIT_STACK: 4 << 30})
    assert done.returncode == 7
    assert "can't start new thread" in done.stderr
    assert "ulimit -u" in done.stderr.partition("hint: ")[2]
    assert "ulimit -v (now 2097152, in KiB)" in done.stderr
    assert "defect" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("-S", "{new}", "--publication", "p", "-c"),
        ("prepare", "-S", "{new}", "--publication", "p", "-c"),
        ("slot", "-S", "{slot}"),
        ("--help",),
        ("slot", "--help"),
    ],
    ids=" ".join,
)
def test_a_stdout_that_is_closed_at_the_start_is_named(on18: PublishedDatabase, arguments: tuple[str, ...]) -> None:
    """Before a slot is created."""
    words = [word.format(new="new_slot", slot=on18.slot) for word in arguments]
    address = [] if "--help" in words else ["-d", on18.database.dsn]
    command = ["sh", "-c", f"exec {shlex.join([*COMMAND, *words, *address])} </dev/null >&-"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 7
    assert done.stderr.startswith("cdcpipe: error: stdout is closed")
    assert ">/dev/null" in done.stderr
    assert on18.value("select count(*) from pg_replication_slots where slot_name = 'new_slot'") == 0


@pytest.mark.parametrize("options", ["-L -u 0", "-A --endpos 0/1 -D 7 7>/dev/null"])
def test_a_closed_stdout_does_not_matter_where_nothing_is_written_to_it(on18: PublishedDatabase, options: str) -> None:
    command = shlex.join([*COMMAND, "-d", on18.database.dsn, "-S", on18.slot, "--publication", "p"])
    done = subprocess.run(["sh", "-c", f"exec {command} {options} </dev/null >&-"], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("busy", [True, False])
def test_stdout_closed_is_7(on18: PublishedDatabase, busy: bool) -> None:
    if busy:
        backlog(on18, rows=20_000)
    with on18.cli() as cli:
        until(on18.is_active)
        assert cli.process.stdout is not None
        cli.process.stdout.close()
        assert cli.wait_without_reading() == 7
        assert "Traceback" not in cli.stderr


def test_stdout_full_is_7(on18: PublishedDatabase) -> None:
    insert(on18, 1)
    with open("/dev/full", "wb") as full:
        code = subprocess.Popen([*CLI_ARGS(on18)], stdin=subprocess.PIPE, stdout=full, stderr=subprocess.DEVNULL).wait(60)
    assert code == 7


def CLI_ARGS(on: PublishedDatabase) -> list[str]:  # noqa: N802 - reads as the class beside it
    import sys

    return [sys.executable, "-m", "cli", "-d", on.database.dsn, "-S", on.slot, "--publication", "p", "-H"]


def test_a_terminated_backend_is_3(on: PublishedDatabase) -> None:
    insert(on, 1)
    with on.cli() as cli:
        cli.take(1)  # the slot is active before the stream is: until then, it would be 2
        pid = until(lambda: on.value("select active_pid from pg_replication_slots where slot_name = %s", on.slot))
        on.connection.execute("select pg_terminate_backend(%s)", (pid,))
        assert cli.wait() == 3
        assert "57P01" in cli.stderr


def test_a_publication_dropped_in_mid_stream(on: PublishedDatabase) -> None:
    """Up to 17 the server says so; from 18 on it only warns, and skips: both end the stream, and nothing is confirmed."""
    before = on.confirmed()
    with on.cli("-s", "0.1") as cli:
        until(on.is_active)
        on.sql("drop publication p")
        insert(on, 1)
        assert cli.wait() == 5
        assert "p" in cli.stderr
    on.released()
    assert on.confirmed() < LSN.parse(str(on.value("select pg_current_wal_lsn()")))
    assert on.confirmed() >= before


def test_a_publication_younger_than_the_slot_loses_nothing_silently(on: PublishedDatabase) -> None:
    on.sql("drop publication p")
    on.connection.execute("select pg_drop_replication_slot(%s)", (on.slot,))
    on.make_slot()
    before = on.confirmed()
    insert(on, 1)
    on.sql("create publication p for table t")
    with on.cli("-s", "0.1") as cli:
        assert cli.wait() == 5
    on.released()
    assert on.confirmed() == before


def test_changes_made_while_there_was_no_publication_end_the_stream_before_them(on: PublishedDatabase) -> None:
    """Whatever came after them, and whatever messages the database's sessions are to get: a later version only warns."""
    on.sql(f'alter database "{on.database.name}" set client_min_messages = error')
    insert(on, 1)
    on.sql("drop publication p")
    insert(on, 2)
    on.sql("create publication p for table t")
    insert(on, 3)
    for found in ([b"1"], []):
        with on.cli("-A") as cli:
            records = [decode(record) for _, record in cli.records()]
            assert cli.wait() == 5
        assert [record.new[0] for record in records if isinstance(record, Insert)] == found
        assert "made while no publication had this name" in cli.stderr
        on.released()
        on.sql(*[f"select pg_replication_slot_advance('{on.slot}', '{LSN(r.end_lsn)}')" for r in records if isinstance(r, Commit)])
    if on.database.cluster.version != "15":
        return  # only Debian's packages have test_decoding
    # As the hint says:
    on.sql(f"select pg_copy_logical_replication_slot('{on.slot}', '{on.slot}_gap', true, 'test_decoding')")
    gap = on.connection.execute("select data from pg_logical_slot_peek_changes(%s, null, null)", [on.slot + "_gap"]).fetchall()
    assert [f"table public.t: INSERT: id[integer]:{number}" in str(gap) for number in (2, 3)] == [True, True]


def test_a_text_that_is_not_utf8_is_passed_with_the_position_that_the_hint_names(pg: postgres.Cluster) -> None:
    with pg.database() as database:
        name = f"{database.name}_a"[:63]
        with pg.connect() as connection:
            connection.execute(f"create database {name} encoding 'SQL_ASCII' locale 'C' template template0")
        ascii_database = postgres.Database(pg, name)
        try:
            on = PublishedDatabase(ascii_database)
            insert(on, 1)
            on.sql(r"insert into t values (2, E'\xe9'), (3, 'x')")
            insert(on, 4)
            with on.cli("-A") as cli:  # its stdin stays open, so that only the server's error can end it
                assert cli.wait() == 5
            err = cli.stderr
            assert "in it cannot be converted to UTF-8" in err
            assert "0xe9" not in err
            start = err.partition("--startpos ")[2].partition(",")[0]
            on.released()
            with on.cli("--startpos", start) as cli:
                assert cli.transactions(1)[0][1] == [b"4"]
                assert cli.quit() == 0, cli.stderr
            on.close()
        finally:
            ascii_database.drop()


def test_a_publication_that_had_another_name_is_streamed_under_it(on: PublishedDatabase) -> None:
    insert(on, 1)
    on.sql("alter publication p rename to q")
    insert(on, 2)
    on.sql("alter publication q rename to p")
    insert(on, 3)
    on.sql("create publication q")
    start = on.confirmed()
    for name, row, code in (("p", b"1", 5), ("q", b"2", 5), ("p", b"3", 0)):
        with on.cli("--startpos", str(start), publication=name) as cli:
            start, found = cli.transactions(1)[0]
            assert found == [row]
            assert (cli.wait() if code else cli.quit()) == code
        on.released()


def test_a_server_that_is_gone_is_3() -> None:
    """kill -9 of the walsender, then a fast stop with unconfirmed data: the server stops, the stream ends, nothing is confirmed."""
    version = "18"
    need(version)
    with postgres.Cluster(version) as cluster:
        with cluster.database("db") as database, contextlib.closing(PublishedDatabase(database)) as on:
            insert(on, 1)
            with on.cli() as cli:
                cli.transactions(1)
                os.kill(int(str(on.value("select active_pid from pg_replication_slots"))), signal.SIGKILL)
                assert cli.wait() == 3
            until(lambda: _connects(cluster))
        with cluster.database("db2") as database, contextlib.closing(PublishedDatabase(database)) as on:
            insert(on, 1)
            before = on.confirmed()
            with on.cli() as cli:
                cli.transactions(1)
                cluster.restart("fast")
                assert cli.wait() == 3
                assert "it is shutting down" in cli.stderr
            on.connection = database.connect()
            assert on.confirmed() == before
            with on.cli() as cli:
                assert cli.transactions(1)[0][1] == [b"1"]
                assert cli.quit() == 0


@pytest.mark.parametrize("is_confirmed", [False, True])
def test_a_server_stops_while_a_stream_waits_at_its_end_position(is_confirmed: bool) -> None:
    """It waits for the answers to its keepalives: they say that the server need not wait for a confirmation."""
    version = "18"
    need(version)
    with (
        postgres.Cluster(version) as cluster,
        cluster.database("db") as database,
        contextlib.closing(PublishedDatabase(database)) as on,
    ):
        insert(on, 1)
        end = str(on.value("select pg_current_wal_insert_lsn()"))
        with on.cli("--endpos", end, "--endpos-wait") as cli:
            last = list(cli.records())[-1][0]
            if is_confirmed:
                cli.say(f"F {last}\n")
                until(lambda: on.confirmed() >= last)
            before = on.confirmed()
            cluster.restart("fast")
            assert cli.wait() == 3
            assert "it is shutting down" in cli.stderr
        on.connection = database.connect()
        assert on.confirmed() == before


def _connects(cluster: postgres.Cluster) -> bool:
    import psycopg

    try:
        cluster.connect().close()
    except psycopg.OperationalError:
        return False
    return True


def test_a_frozen_walsender_is_given_up(on18: PublishedDatabase) -> None:
    with on18.cli("--receive-timeout", "2") as cli:
        pid = int(str(until(lambda: on18.value("select active_pid from pg_replication_slots where slot_name = %s", on18.slot))))
        os.kill(pid, signal.SIGSTOP)
        try:
            assert cli.wait() == 3
        finally:
            os.kill(pid, signal.SIGCONT)
    on18.released()
    insert(on18, 1)
    with on18.cli("--receive-timeout", "2") as cli:
        assert cli.transactions(1)[0][1] == [b"1"]


def test_silence_is_no_loss_while_the_server_answers(on18: PublishedDatabase) -> None:
    with on18.cli("--receive-timeout", "2", "-s", "0") as cli:
        until(on18.is_active)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            assert cli.process.poll() is None, cli.stderr
            time.sleep(0.1)
        insert(on18, 1)
        cli.transactions(1)
        assert cli.quit() == 0


def test_a_parent_that_dies_takes_the_streamer_along(on18: PublishedDatabase, tmp_path: Path) -> None:
    """kill -9 of the parent closes stdin: no orphan keeps the slot (PITFALLS D20)."""
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "time.sleep(1000)\n"
    )
    import sys

    parent = subprocess.Popen([sys.executable, "-c", script, *CLI_ARGS(on18)])
    until(on18.is_active)
    parent.kill()
    parent.wait()
    on18.released()
