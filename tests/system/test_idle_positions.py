"""``--idle-positions``: the slot moves only where the consumer says so, also while nothing is published."""

import random
import signal

import postgres

from cdcpipe.lsn import LSN
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import Commit, Insert
from support.cli_process import CLI
from support.published_database import PublishedDatabase, insert
from support.waiting import until

OPTIONS = ("--idle-positions", "-s", "0.1")


def write_wal(on: PublishedDatabase) -> LSN:
    """Write WAL that the publication does not have, and return its end."""
    on.sql(
        "create table if not exists unpublished(v text)",
        "insert into unpublished select repeat('x', 1000) from generate_series(1, 100)",
    )
    return LSN.parse(str(on.value("select pg_current_wal_flush_lsn()")))


def idle_at(cli: CLI, at_least: int) -> LSN:
    """Read empty records, and confirm each but the last, which has this position or a later one. Return its position."""
    for lsn, record in cli.records():
        assert record == b""
        if lsn >= at_least:
            return lsn
        cli.say(f"F {lsn}\n")
    raise AssertionError(cli.stderr)


def status_updates(on: PublishedDatabase, count: int) -> None:
    """Wait until the server has got so many more status updates."""
    query = "select reply_time from pg_stat_replication r join pg_replication_slots s on r.pid = s.active_pid where slot_name = %s"
    for _ in range(count):
        before = on.value(query, on.slot)
        until(lambda before=before: on.value(query, on.slot) != before, "a status update")


def test_the_slot_moves_only_after_feedback(on: PublishedDatabase) -> None:
    with on.cli(*OPTIONS) as cli:
        lsn = idle_at(cli, write_wal(on))
        status_updates(on, 2)  # the feedback before this record has arrived
        moved = on.confirmed()
        assert moved < lsn
        write_wal(on)
        status_updates(on, 3)
        assert on.confirmed() == moved
        cli.say(f"F {lsn}\n")
        until(lambda: on.confirmed() == lsn, "the confirmation")
        assert idle_at(cli, lsn + 1) > lsn  # the position that was reached meanwhile
        assert cli.quit() == 0
    on.released()
    assert on.confirmed() == lsn


def test_without_feedback_there_is_one_record_and_transactions_follow_it(on18: PublishedDatabase) -> None:
    before = on18.confirmed()
    with on18.cli(*OPTIONS) as cli:
        idle, record = cli.take(1)[0]
        assert record == b""
        write_wal(on18)
        status_updates(on18, 5)
        insert(on18, 1)
        assert [rows for _, rows in cli.transactions(1)] == [[b"1"]]  # fails to decode an empty record
        write_wal(on18)
        status_updates(on18, 5)
        assert on18.confirmed() == before
        cli.say(f"F {idle}\n")
        until(lambda: on18.confirmed() >= idle, "the confirmation")
        assert on18.confirmed() == idle
        assert cli.quit() == 0
    on18.released()
    with on18.cli() as cli:
        assert [rows for _, rows in cli.transactions(1)] == [[b"1"]]


def test_kills_in_between_lose_nothing(on18: PublishedDatabase) -> None:
    """The account is what the consumer has noted before each F. No start finds the slot beyond it, and no row is missing."""
    rng = random.Random(13)
    account, rows, inserted = on18.confirmed(), set(), 0
    for _ in range(8):
        with on18.cli(*OPTIONS, "--expect-lsn", str(account)) as cli:
            for _ in range(rng.randrange(1, 6)):
                if rng.random() < 0.5:
                    inserted += 1
                    insert(on18, inserted)
                else:
                    write_wal(on18)
            end, pending = write_wal(on18), []
            for lsn, record in cli.records():
                message = decode(record) if record else None
                if isinstance(message, Insert):
                    pending.append(int(message.new[0] or b""))
                elif isinstance(message, Commit) or not record:
                    # After a kill, the server sends again what the consumer has and the server does not know of.
                    rows, account = rows | set(pending), max(account, lsn)
                    pending.clear()
                    cli.say(f"F {lsn}\n")
                    if lsn >= end or rng.random() < 0.3:
                        break
            cli.signal(signal.SIGKILL)
            assert cli.wait() == -signal.SIGKILL
        on18.released()
        assert on18.confirmed() <= account
    end = str(on18.value("select pg_current_wal_insert_lsn()"))
    with on18.cli("--endpos", end, "--expect-lsn", str(account)) as cli:
        messages = [decode(record) for _, record in cli.records()]
        assert cli.wait() == 0, cli.stderr
    rows |= {int(message.new[0] or b"") for message in messages if isinstance(message, Insert)}
    assert rows == set(range(1, inserted + 1))


def test_the_end_position_can_be_confirmed(on18: PublishedDatabase) -> None:
    insert(on18, 1)
    write_wal(on18)
    end = LSN.parse(str(on18.value("select pg_current_wal_insert_lsn()")))
    write_wal(on18)
    with on18.cli("--idle-positions", "--endpos", str(end), "--endpos-wait") as cli:
        *_, (lsn, last) = list(cli.records())  # stdout ends
        assert last == b""
        assert lsn >= end
        cli.say(f"F {lsn}\n")
        assert cli.quit() == 0
    on18.released()
    assert on18.confirmed() == lsn


def test_without_the_option_there_is_no_empty_record(on18: PublishedDatabase) -> None:
    write_wal(on18)
    end = str(on18.value("select pg_current_wal_insert_lsn()"))
    write_wal(on18)
    code, out, err = on18.run("-H", "-A", "--endpos", end)
    assert (code, out) == (0, b""), err


def test_auto_feedback_confirms_what_is_written(on18: PublishedDatabase) -> None:
    with on18.cli(*OPTIONS, "-A", "-N") as cli:
        end = write_wal(on18)
        until(lambda: on18.confirmed() >= end, "the confirmation")
        assert cli.take(1)[0][1] == b"\n"
        assert cli.quit() == 0


def test_with_an_output_plugin(on18: PublishedDatabase) -> None:
    insert(on18, 1)
    with on18.cli(*OPTIONS, "-J", header=False) as cli:
        for lsn, record in cli.records():
            if not record:
                break
            if b'"C"' in record:
                cli.say(f"F {lsn}\n")
        assert cli.quit() == 0


def test_a_transaction_that_the_plugin_leaves_out_holds_nothing_back(on18: PublishedDatabase) -> None:
    """Debezium's plugin writes nothing for a TRUNCATE, so the consumer has nothing to confirm."""
    insert(on18, 1)
    with on18.cli("--output", "debezium") as cli:
        cli.take(1)
        commit = LSN.parse(str(on18.value("select pg_current_wal_flush_lsn()")))
        cli.say(f"F {commit}\n")
        on18.sql("truncate t")
        end = write_wal(on18)
        until(lambda: on18.confirmed() >= end, "the confirmation")
        assert cli.quit() == 0
    on18.released()
    with on18.cli(*OPTIONS, "--output", "debezium") as cli:
        on18.sql("truncate t")
        end = write_wal(on18)
        assert idle_at(cli, end) >= end  # an empty record, and no other
        assert on18.confirmed() < end
        assert cli.quit() == 0


def test_a_server_shuts_down_before_an_idle_position_is_confirmed() -> None:
    with postgres.Cluster("18") as cluster, cluster.database() as database:
        on = PublishedDatabase(database)
        with on.cli(*OPTIONS) as cli:
            assert cli.take(1)[0][1] == b""
            before = on.confirmed()
            write_wal(on)
            cluster.restart()
            assert cli.wait() == 3, cli.stderr
        on.connection = database.connect()
        assert on.confirmed() == before
        on.close()
