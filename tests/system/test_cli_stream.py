"""The stream itself on real servers: feedback, keepalives, blocked readers, ways out, poll mode and take-over."""

import contextlib
import os
import random
import shlex
import signal
import subprocess
import threading
import time
from pathlib import Path

import postgres
import psutil
import pytest

from cdcpipe.lsn import LSN
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import Commit, Insert
from support.cli_process import CLI, run_cli
from support.published_table import Fixture, backlog
from support.requirements import need
from support.waiting import until


def insert(on: Fixture, *ids: int) -> None:
    for number in ids:
        on.connection.execute("insert into t values (%s, 'x')", (number,))


# Feedback


def test_feedback_moves_the_slot_and_what_was_not_confirmed_comes_again(on: Fixture) -> None:
    insert(on, 1, 2, 3)
    with on.cli() as cli:
        done = cli.transactions(3)
        cli.say(f"F {done[1][0]}\n")
        until(lambda: on.confirmed() == done[1][0])
        cli.process.kill()
    on.released()
    with on.cli() as cli:
        assert cli.transactions(1)[0][1] == [b"3"]
        assert cli.quit() == 0


def test_interleaved_transactions_are_cut_exactly(on: Fixture) -> None:
    """T2's row is written before T1 commits: feedback on T1's end brings T2 again, all of it and nothing else (PITFALLS 0, A1)."""
    with on.database.connect() as one, on.database.connect() as two:
        for connection in (two, one):
            connection.execute("begin")
        two.execute("insert into t values (2)")
        one.execute("insert into t values (1)")
        one.execute("commit")
        two.execute("commit")
    with on.cli() as cli:
        (end, rows), _ = cli.transactions(2)
        assert rows == [b"1"]
        cli.say(f"F {end}\n")
        assert cli.quit() == 0
    assert on.confirmed() == end
    with on.cli() as cli:
        assert cli.transactions(1)[0][1] == [b"2"]


def test_random_interleavings_and_kill_points_lose_nothing(on18: Fixture) -> None:
    """Consumers die at random; what they had confirmed and what came later is everything, and nothing confirmed comes again."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    expected: set[bytes] = set()
    connections = [on18.database.connect() for _ in range(3)]
    number = 0
    for _ in range(40):
        for connection in connections:
            connection.execute("begin")
        for connection in rng.choices(connections, k=6):
            number += 1
            connection.execute("insert into t values (%s)", (number,))
            expected.add(str(number).encode())
        for connection in rng.sample(connections, 3):
            connection.execute("commit")
    for connection in connections:
        connection.close()
    confirmed: set[bytes] = set()
    while confirmed != expected:
        with on18.cli() as cli:
            pending: set[bytes] = set()
            for _ in range(rng.randrange(1, 25)):
                if confirmed | pending == expected:
                    break
                end, rows = cli.transactions(1)[0]
                assert not confirmed & {row for row in rows if row}
                pending |= {row for row in rows if row}
                if rng.random() < 0.3:
                    cli.say(f"F {end}\n")
                    until(lambda end=end: on18.confirmed() >= end)
                    confirmed |= pending
                    pending = set()
            cli.process.kill()
        on18.released()
        if confirmed | pending == expected and rng.random() < 0.5:
            break


LIARS = ["F FFFFFFFF/FFFFFFFF\n", "F 7F000000/0\n", "F 0/0\n", "F 0/1\n", "# F FFFFFFFF/0\n\n"]


@pytest.mark.parametrize("lie", LIARS)
def test_feedback_liars_confirm_no_more_than_was_written(on18: Fixture, lie: str) -> None:
    insert(on18, 1, 2)
    with on18.cli() as cli:
        cli.say(lie)
        ends = [end for end, _ in cli.transactions(2)]
        cli.say(lie)
        insert(on18, 3)
        ends.append(cli.transactions(1)[0][0])
        assert cli.quit() == 0
    assert on18.confirmed() < ends[2]
    with on18.cli() as cli:
        assert cli.transactions(1)[0][1] in ([b"1"], [b"3"])


@pytest.mark.parametrize("command", ["F 0/1junk\n", "F\n", "hello\n", "#" * 5000, "f 0/1\n"])
def test_bad_commands_exit_6_and_keep_earlier_feedback(on18: Fixture, command: str) -> None:
    insert(on18, 1)
    with on18.cli() as cli:
        end, _ = cli.transactions(1)[0]
        cli.say(f"F {end}\n{command}")
        assert cli.wait() == 6
        assert "not a command" in cli.stderr or "4096" in cli.stderr
    assert on18.confirmed() >= end  # an idle server's keepalive may have moved it on


def test_feedback_in_the_middle_of_a_transaction_is_cut_down(on18: Fixture) -> None:
    insert(on18, 1)
    on18.sql("begin", "insert into t values (2)", "insert into t values (3)", "commit")
    with on18.cli() as cli:
        end, _ = cli.transactions(1)[0]
        records = cli.take(3)  # Begin, Insert, Insert
        cli.say(f"F {records[-1][0]}\n")
        assert cli.quit() == 0
    assert on18.confirmed() == end


def test_feedback_interval_delays_and_quit_does_not_lose_it(on18: Fixture) -> None:
    insert(on18, 1)
    before = on18.confirmed()
    with on18.cli("-F", "600", "-s", "600") as cli:
        end, _ = cli.transactions(1)[0]
        cli.say(f"F {end}\n")
        cli.say("#\n")
        assert on18.confirmed() == before
        assert cli.quit() == 0
    assert on18.confirmed() >= end


def test_auto_feedback_confirms_what_was_written(on: Fixture) -> None:
    insert(on, 1, 2)
    with on.cli("-A") as cli:
        end = cli.transactions(2)[-1][0]
        until(lambda: on.confirmed() >= end)


def test_100000_feedback_lines_before_the_first_read(on18: Fixture) -> None:
    """stdin is read while stdout is blocked: both pipes full would be the end (PITFALLS A8)."""
    backlog(on18, rows=50_000)
    with on18.cli() as cli:
        for _ in range(100):
            cli.say("F 0/1\n" * 1000)
        assert len(cli.transactions(50)) == 50
        assert cli.quit() == 0


# Keepalives


def test_an_idle_slot_retains_no_wal(on: Fixture) -> None:
    on.sql("create table unpublished(v text)")
    with on.cli():
        until(on.is_active)
        for _ in range(6):
            on.sql("insert into unpublished select repeat('x', 1000) from generate_series(1, 3000)")
        lag = "select pg_wal_lsn_diff(pg_current_wal_lsn(), {}) from pg_replication_slots where slot_name = %s"
        until(lambda: int(str(on.value(lag.format("confirmed_flush_lsn"), on.slot))) < 1 << 20)

        def restart_is_near() -> bool:
            on.sql("checkpoint")  # writes the running transactions, from which restart_lsn is taken
            return int(str(on.value(lag.format("restart_lsn"), on.slot))) < 1 << 20

        until(restart_is_near)


def test_a_keepalive_is_not_confirmed_while_a_transaction_is_outstanding(on: Fixture) -> None:
    on.sql("create table unpublished(v text)")
    insert(on, 1)
    before = on.confirmed()
    with on.cli("-s", "0.1") as cli:
        end, _ = cli.transactions(1)[0]

        def sent() -> LSN:
            text = on.value(
                "select sent_lsn from pg_stat_replication where application_name = 'cdcpipe' and pid ="
                " (select active_pid from pg_replication_slots where slot_name = %s)",
                on.slot,
            )
            return LSN.parse(str(text))

        for _ in range(5):
            on.sql("insert into unpublished select repeat('x', 1000) from generate_series(1, 1000)")
            target = LSN.parse(str(on.value("select pg_current_wal_lsn()")))
            until(lambda target=target: sent() >= target)
        assert before <= on.confirmed() < end
        cli.process.kill()
    on.released()
    with on.cli() as cli:
        assert cli.transactions(1)[0][1] == [b"1"]


# A reader that does not read


@pytest.mark.slow
def test_a_stalled_reader_costs_neither_connection_nor_memory(on: Fixture) -> None:
    backlog(on, rows=150_000)
    with on.cli("-m", "options=-c wal_sender_timeout=4s") as cli:
        until(on.is_active)
        cli.read_bytes(1)
        stalled_until = time.monotonic() + 6
        process = psutil.Process(cli.process.pid)
        while time.monotonic() < stalled_until:
            assert cli.process.poll() is None, cli.stderr
            assert process.memory_info().rss < 120 << 20
            time.sleep(0.2)
        cli.reader.feed(b"w")
        rows = [row for _, transaction in cli.transactions(150) for row in transaction]
        assert rows == [str(number).encode() for number in range(1, 150_001)]
        assert process.memory_info().rss < 120 << 20
        assert cli.quit() == 0


@pytest.mark.parametrize("way", ["q", "SIGINT", "SIGTERM"])
def test_ways_out_lose_no_feedback_under_a_backlog(on: Fixture, way: str) -> None:
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


def test_quit_in_the_middle_of_a_huge_transaction(on18: Fixture) -> None:
    insert(on18, 0)
    on18.sql("insert into t select g, repeat('x', 100) from generate_series(1, 200000) g")
    with on18.cli() as cli:
        end, _ = cli.transactions(1)[0]
        cli.take(10)
        cli.say(f"F {end}\nq\n")
        assert cli.wait_without_reading() == 0, cli.stderr
    assert on18.confirmed() == end


# Ways out


def test_stdin_closed_is_4_and_keeps_feedback(on: Fixture) -> None:
    insert(on, 1)
    with on.cli() as cli:
        end, _ = cli.transactions(1)[0]
        cli.say(f"F {end}\n")
        cli.close_stdin()
        assert cli.wait() == 4
    assert on.confirmed() >= end


def test_with_auto_feedback_and_an_end_nobody_needs_stdin(on18: Fixture) -> None:
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


def test_a_named_pipe_keeps_stdin_open(on18: Fixture, tmp_path: Path) -> None:
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
def test_descriptors_that_are_closed_at_the_start(on18: Fixture, closed: str, code: int) -> None:
    """Nothing else takes their place: a socket, say, that would be read as commands."""
    command = shlex.join(CLI_ARGS(on18))
    done = subprocess.run(["sh", "-c", f"exec {command} {closed}"], stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == code


@pytest.mark.parametrize("busy", [True, False])
def test_stdout_closed_is_7(on18: Fixture, busy: bool) -> None:
    if busy:
        backlog(on18, rows=20_000)
    with on18.cli() as cli:
        until(on18.is_active)
        assert cli.process.stdout is not None
        cli.process.stdout.close()
        assert cli.wait_without_reading() == 7
        assert "Traceback" not in cli.stderr


def test_stdout_full_is_7(on18: Fixture) -> None:
    insert(on18, 1)
    with open("/dev/full", "wb") as full:
        code = subprocess.Popen([*CLI_ARGS(on18)], stdin=subprocess.PIPE, stdout=full, stderr=subprocess.DEVNULL).wait(60)
    assert code == 7


def CLI_ARGS(on: Fixture) -> list[str]:  # noqa: N802 - reads as the class beside it
    import sys

    return [sys.executable, "-m", "cli", "-d", on.database.dsn, "-S", on.slot, "--publication", "p", "-H"]


def test_a_terminated_backend_is_3(on: Fixture) -> None:
    with on.cli() as cli:
        pid = until(lambda: on.value("select active_pid from pg_replication_slots where slot_name = %s", on.slot))
        on.connection.execute("select pg_terminate_backend(%s)", (pid,))
        assert cli.wait() == 3
        assert "57P01" in cli.stderr


def test_a_publication_dropped_in_mid_stream(on: Fixture) -> None:
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


def test_a_publication_younger_than_the_slot_loses_nothing_silently(on: Fixture) -> None:
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


def test_changes_made_while_there_was_no_publication_end_the_stream_before_them(on: Fixture) -> None:
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
    on.sql(f"select pg_copy_logical_replication_slot('{on.slot}', '{on.slot}_gap', false, 'test_decoding')")
    gap = on.connection.execute("select data from pg_logical_slot_peek_changes(%s, null, null)", [on.slot + "_gap"]).fetchall()
    assert [f"table public.t: INSERT: id[integer]:{number}" in str(gap) for number in (2, 3)] == [True, True]


def test_a_publication_that_had_another_name_is_streamed_under_it(on: Fixture) -> None:
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
        with cluster.database("db") as database, contextlib.closing(Fixture(database)) as on:
            insert(on, 1)
            with on.cli() as cli:
                cli.transactions(1)
                os.kill(int(str(on.value("select active_pid from pg_replication_slots"))), signal.SIGKILL)
                assert cli.wait() == 3
            until(lambda: _connects(cluster))
        with cluster.database("db2") as database, contextlib.closing(Fixture(database)) as on:
            insert(on, 1)
            before = on.confirmed()
            with on.cli() as cli:
                cli.transactions(1)
                cluster.restart("fast")
                assert cli.wait() == 3
            on.connection = database.connect()
            assert on.confirmed() == before
            with on.cli() as cli:
                assert cli.transactions(1)[0][1] == [b"1"]
                assert cli.quit() == 0


def _connects(cluster: postgres.Cluster) -> bool:
    import psycopg

    try:
        cluster.connect().close()
    except psycopg.OperationalError:
        return False
    return True


def test_a_frozen_walsender_is_given_up(on18: Fixture) -> None:
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


def test_silence_is_no_loss_while_the_server_answers(on18: Fixture) -> None:
    with on18.cli("--receive-timeout", "1", "-s", "0") as cli:
        until(on18.is_active)
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            assert cli.process.poll() is None, cli.stderr
            time.sleep(0.1)
        insert(on18, 1)
        cli.transactions(1)
        assert cli.quit() == 0


# Positions


def test_endpos_is_reached_and_not_passed(on: Fixture) -> None:
    insert(on, 1, 2)
    end = str(on.value("select pg_current_wal_insert_lsn()"))
    insert(on, 3)
    with on.cli("--endpos", end) as cli:
        assert [rows for _, rows in cli.transactions(2)] == [[b"1"], [b"2"]]
        assert cli.wait() == 0
    with on.cli("--endpos", end) as cli:  # nothing was confirmed
        assert len(cli.transactions(2)) == 2


def test_endpos_with_nothing_to_send(on18: Fixture) -> None:
    with on18.cli("--endpos", str(on18.value("select pg_current_wal_lsn()"))) as cli:
        assert cli.wait() == 0


def test_endpos_wait_takes_feedback_after_the_end(on18: Fixture) -> None:
    insert(on18, 1)
    end = str(on18.value("select pg_current_wal_insert_lsn()"))
    insert(on18, 2)
    with on18.cli("--endpos", end, "--endpos-wait") as cli:
        records = list(cli.records())  # stdout ends
        assert cli.process.poll() is None
        cli.say(f"F {records[-1][0]}\n")
        assert cli.quit() == 0
    assert on18.confirmed() == records[-1][0]


def test_startpos_leaves_out_without_confirming(on18: Fixture) -> None:
    insert(on18, 1, 2)
    before = on18.confirmed()
    with on18.cli() as cli:
        end, _ = cli.transactions(1)[0]
        assert cli.quit() == 0
    with on18.cli("--startpos", str(end)) as cli:
        assert cli.transactions(1)[0][1] == [b"2"]
        assert cli.quit() == 0
    assert on18.confirmed() == before


# Poll mode and standby


def test_poll_mode(on: Fixture) -> None:
    base = ["-d", on.database.dsn, "-S", on.slot, "-L"]
    assert run_cli(*base)[:2] == (0, b"")
    assert run_cli("-d", on.database.dsn, "-S", "nope", "-L")[0] == 8
    assert run_cli("-d", on.database.dsn, "-S", "nope", "-L", "-u", "0")[0] == 8
    with on.cli() as active:
        until(on.is_active)
        assert run_cli(*base, "-u", "0")[0] == 9
        assert run_cli(*base, "-u", "0.5", "-i", "0.1")[0] == 9
        waiting = CLI(*base, "-i", "0.05", header=False)
        with waiting:
            assert active.quit() == 0
            assert waiting.wait() == 0


def test_poll_mode_needs_no_replication_role(on18: Fixture) -> None:
    on18.sql("create role poller login")
    try:
        assert run_cli("-d", on18.database.dsn, "-U", "poller", "-S", on18.slot, "-L")[0] == 0
    finally:
        on18.sql("drop role poller")


def test_standby_takes_over(on: Fixture) -> None:
    """The active one is killed; one of two standbys goes on where it was, the other goes on waiting."""
    insert(on, 1, 2)
    with on.cli() as active:
        end, _ = active.transactions(1)[0]
        active.say(f"F {end}\n")
        until(lambda: on.confirmed() == end)
        with on.cli("--standby", "-v") as one, on.cli("--standby", "-v") as two:
            until(lambda: "waiting" in one.stderr and "waiting" in two.stderr)
            active.process.kill()
            winner = until(lambda: next((cli for cli in (one, two) if "streaming" in cli.stderr), None))
            loser = two if winner is one else one
            assert winner.transactions(1)[0][1] == [b"2"]
            assert loser.process.poll() is None
            assert winner.quit() == 0
            until(lambda: "streaming" in loser.stderr)
            assert loser.quit() == 0


def test_standby_honours_the_poll_duration(on18: Fixture) -> None:
    with on18.cli():
        until(on18.is_active)
        assert on18.run("--standby", "-u", "0.3")[0] == 9
        with on18.cli("--standby", "-v") as standby:
            until(lambda: "waiting" in standby.stderr)
            standby.signal(signal.SIGTERM)
            assert standby.wait() == 0


def test_a_stopped_consumer_holds_the_slot_until_the_servers_timeout(on18: Fixture) -> None:
    with on18.cli("-m", "options=-c wal_sender_timeout=2s") as active:
        until(on18.is_active)
        active.signal(signal.SIGSTOP)
        try:
            assert on18.run("-L", "-u", "0.2", publication="")[0] == 9
            assert on18.run("-L", "-u", "60", "-i", "0.1", publication="")[0] == 0
        finally:
            active.signal(signal.SIGCONT)


# Elsewhere


def test_a_parent_that_dies_takes_the_streamer_along(on18: Fixture, tmp_path: Path) -> None:
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


def test_no_secret_shows(on18: Fixture, tmp_path: Path) -> None:
    """A password from the environment is in no command line, and in nothing that is said."""
    with on18.cli("-vv", env={"PGPASSWORD": "CANARY"}) as cli:
        until(on18.is_active)
        for process in [psutil.Process(cli.process.pid), *psutil.Process(cli.process.pid).children(recursive=True)]:
            assert "CANARY" not in " ".join(process.cmdline())
        assert cli.quit() == 0
        assert "CANARY" not in cli.stderr
    _, _, err = run_cli("-S", "s", "-v", "-h", str(tmp_path), env={"PGPASSWORD": "CANARY"})
    assert "CANARY" not in err


def test_wake_ups_do_not_hold_a_lone_transaction_back_over_tcp(on18: Fixture) -> None:
    """After a burst the kernel's low-water mark goes back: the next single row is there without another one after it."""
    backlog(on18, rows=30_000)
    with CLI("-d", on18.database.tcp_dsn, "-S", on18.slot, "--publication", "p") as cli:
        cli.transactions(30)
        for number in range(200_001, 200_011):
            insert(on18, number)
            assert cli.transactions(1)[0][1] == [str(number).encode()]
        assert cli.quit() == 0


def test_two_writers_while_streaming(on18: Fixture) -> None:
    """Nothing is missing and nothing is twice under concurrent writes with feedback for each transaction."""

    def write(start: int) -> None:
        with on18.database.connect() as connection:
            for number in range(start, start + 300):
                connection.execute("insert into t values (%s)", (number,))

    threads = [threading.Thread(target=write, args=(start,)) for start in (0, 1000)]
    with on18.cli() as cli:
        for thread in threads:
            thread.start()
        rows: list[bytes | None] = []
        for _ in range(600):
            end, transaction = cli.transactions(1)[0]
            rows += transaction
            cli.say(f"F {end}\n")
        for thread in threads:
            thread.join()
        assert sorted(int(row) for row in rows if row) == [*range(300), *range(1000, 1300)]
        assert cli.quit() == 0
    assert on18.confirmed() >= end
