"""The stream itself on real servers: feedback, keepalives, blocked readers, positions."""

import random
import threading
import time
from pathlib import Path

import psutil
import pytest

from cdcpipe.lsn import LSN
from support.cli_process import CLI, run_cli
from support.published_database import PublishedDatabase, backlog, insert
from support.seeds import SEED
from support.waiting import until

# Feedback


def test_feedback_moves_the_slot_and_what_was_not_confirmed_comes_again(on: PublishedDatabase) -> None:
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


def test_interleaved_transactions_are_cut_exactly(on: PublishedDatabase) -> None:
    """T2 writes its row before T1 commits. After feedback on T1's end, the next stream sends all of T2 and nothing else (PITFALLS
    0, A1).
    """
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


def test_random_interleavings_and_kill_points_lose_nothing(on18: PublishedDatabase) -> None:
    """Consumers are killed at random. Confirmed and later transactions together are complete, and no confirmed one comes again."""
    print(f"CDCPIPE_TEST_SEED={SEED}")
    rng = random.Random(SEED)
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
def test_feedback_liars_confirm_no_more_than_was_written(on18: PublishedDatabase, lie: str) -> None:
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
def test_bad_commands_exit_6_and_keep_earlier_feedback(on18: PublishedDatabase, command: str) -> None:
    insert(on18, 1)
    with on18.cli() as cli:
        end, _ = cli.transactions(1)[0]
        cli.say(f"F {end}\n{command}")
        assert cli.wait() == 6
        assert "not a command" in cli.stderr or "4096" in cli.stderr
    assert on18.confirmed() >= end  # an idle server's keepalive may have moved it on


def test_feedback_in_the_middle_of_a_transaction_is_cut_down(on18: PublishedDatabase) -> None:
    insert(on18, 1)
    on18.sql("begin", "insert into t values (2)", "insert into t values (3)", "commit")
    with on18.cli() as cli:
        end, _ = cli.transactions(1)[0]
        records = cli.take(3)  # Begin, Insert, Insert
        cli.say(f"F {records[-1][0]}\n")
        assert cli.quit() == 0
    assert on18.confirmed() == end


def test_feedback_interval_delays_and_quit_does_not_lose_it(on18: PublishedDatabase) -> None:
    insert(on18, 1)
    before = on18.confirmed()
    with on18.cli("-F", "600", "-s", "600") as cli:
        end, _ = cli.transactions(1)[0]
        cli.say(f"F {end}\n")
        cli.say("#\n")
        assert on18.confirmed() == before
        assert cli.quit() == 0
    assert on18.confirmed() >= end


def test_auto_feedback_confirms_what_was_written(on: PublishedDatabase) -> None:
    insert(on, 1, 2)
    with on.cli("-A") as cli:
        end = cli.transactions(2)[-1][0]
        until(lambda: on.confirmed() >= end)


def test_100000_feedback_lines_before_the_first_read(on18: PublishedDatabase) -> None:
    """stdin is read although stdout is blocked. Otherwise two full pipes would be a deadlock (PITFALLS A8)."""
    backlog(on18, rows=50_000)
    with on18.cli() as cli:
        for _ in range(100):
            cli.say("F 0/1\n" * 1000)
        assert len(cli.transactions(50)) == 50
        assert cli.quit() == 0


# Keepalives


def test_an_idle_slot_retains_no_wal(on: PublishedDatabase) -> None:
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


def test_a_keepalive_is_not_confirmed_while_a_transaction_is_outstanding(on: PublishedDatabase) -> None:
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


def test_a_stalled_reader_costs_neither_connection_nor_memory(on: PublishedDatabase) -> None:
    """Also with -s 0: nobody reads the server's questions meanwhile, so they are answered unasked."""
    backlog(on, rows=150_000)
    with on.cli("-s", "0", "-m", "options=-c wal_sender_timeout=4s") as cli:
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


# Positions


def test_endpos_is_reached_and_not_passed(on: PublishedDatabase) -> None:
    insert(on, 1, 2)
    end = str(on.value("select pg_current_wal_insert_lsn()"))
    insert(on, 3)
    with on.cli("--endpos", end) as cli:
        assert [rows for _, rows in cli.transactions(2)] == [[b"1"], [b"2"]]
        assert cli.wait() == 0
    with on.cli("--endpos", end) as cli:  # nothing was confirmed
        assert len(cli.transactions(2)) == 2


def test_endpos_with_nothing_to_send(on18: PublishedDatabase) -> None:
    with on18.cli("--endpos", str(on18.value("select pg_current_wal_lsn()"))) as cli:
        assert cli.wait() == 0


def test_endpos_wait_takes_feedback_after_the_end(on18: PublishedDatabase) -> None:
    insert(on18, 1)
    end = str(on18.value("select pg_current_wal_insert_lsn()"))
    insert(on18, 2)
    with on18.cli("--endpos", end, "--endpos-wait", "--receive-timeout", "1") as cli:
        records = list(cli.records())  # stdout ends
        # The consumer takes its time. Nobody reads what the server sends meanwhile, and that is no silence.
        late = (
            "select reply_time > backend_start + interval '2 s' from pg_stat_replication"
            " join pg_replication_slots on pid = active_pid where slot_name = %s"
        )
        until(lambda: cli.process.poll() is not None or on18.value(late, on18.slot), "a late status update")
        assert cli.process.poll() is None, cli.stderr
        cli.say(f"F {records[-1][0]}\n")
        assert cli.quit() == 0
    assert on18.confirmed() == records[-1][0]


def test_startpos_leaves_out_without_confirming(on18: PublishedDatabase) -> None:
    insert(on18, 1, 2)
    before = on18.confirmed()
    with on18.cli() as cli:
        end, _ = cli.transactions(1)[0]
        assert cli.quit() == 0
    with on18.cli("--startpos", str(end)) as cli:
        assert cli.transactions(1)[0][1] == [b"2"]
        assert cli.quit() == 0
    assert on18.confirmed() == before


def test_no_secret_shows(on18: PublishedDatabase, tmp_path: Path) -> None:
    """A password from the environment is in no command line and in no message."""
    with on18.cli("-vv", env={"PGPASSWORD": "CANARY"}) as cli:
        until(on18.is_active)
        for process in [psutil.Process(cli.process.pid), *psutil.Process(cli.process.pid).children(recursive=True)]:
            assert "CANARY" not in " ".join(process.cmdline())
        assert cli.quit() == 0
        assert "CANARY" not in cli.stderr
    _, _, err = run_cli("-S", "s", "-v", "-h", str(tmp_path), env={"PGPASSWORD": "CANARY"})
    assert "CANARY" not in err


def test_wake_ups_do_not_hold_a_lone_transaction_back_over_tcp(on18: PublishedDatabase) -> None:
    """After a burst the kernel's low-water mark is reset: a single row arrives without another one after it."""
    backlog(on18, rows=30_000)
    with CLI("-d", on18.database.tcp_dsn, "-S", on18.slot, "--publication", "p") as cli:
        cli.transactions(30)
        for number in range(200_001, 200_011):
            insert(on18, number)
            assert cli.transactions(1)[0][1] == [str(number).encode()]
        assert cli.quit() == 0


def test_two_writers_while_streaming(on18: PublishedDatabase) -> None:
    """No change is lost or doubled under concurrent writes, with feedback for each transaction."""

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
