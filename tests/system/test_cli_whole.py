"""`--whole-transactions` on the real command line: the output equals version 1, however the server streams."""

import contextlib
import os
from collections.abc import Iterator

import postgres
import psutil
import pytest

from cdcpipe.lsn import LSN
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import Commit, Insert
from support.published_database import PublishedDatabase
from support.waiting import until
from support.whole_transactions import plain

WHOLE = ("--whole-transactions", "--streaming", "parallel")
SESSION = "options=-c logical_decoding_work_mem=64kB"
IMMEDIATE = SESSION + " -c debug_logical_replication_streaming=immediate"

Records = list[tuple[LSN, bytes]]


@pytest.fixture(params=["16", "18"])
def on(request: pytest.FixtureRequest) -> Iterator[PublishedDatabase]:
    cluster: postgres.Cluster = request.getfixturevalue(f"pg{request.param}")
    with cluster.database() as database, contextlib.closing(PublishedDatabase(database)) as made:
        yield made


def end(on: PublishedDatabase) -> str:
    on.sql("create table flush (); drop table flush")
    return str(on.value("select pg_current_wal_insert_lsn()"))


def records(on: PublishedDatabase, *args: str, until_lsn: str) -> Records:
    """Run to the end position, without feedback."""
    on.released()
    with on.cli("--endpos", until_lsn, *args) as cli:
        out = list(cli.records())
        assert cli.wait() == 0, cli.stderr
    return out


def rows(first: int, last: int, width: int = 100) -> str:
    return f"insert into t select g, repeat('x', {width}) from generate_series({first}, {last}) g"


def workload(on: PublishedDatabase) -> None:
    with on.database.connect() as one, on.database.connect() as two:
        for session in (one, two):
            session.execute("begin")
        for part in range(4):
            one.execute(rows(10_000 + 600 * part, 10_599 + 600 * part))
            two.execute(rows(20_000 + 600 * part, 20_599 + 600 * part))
            on.sql(f"insert into t values ({part}, 'between')")
            one.execute("savepoint s")
            one.execute(rows(30_000, 30_599))
            one.execute("rollback to s" if part % 2 else "delete from t where id >= 30000; release s")
        two.execute("commit")
        one.execute("commit")
    on.sql(
        f"begin; alter table t add column gone int; {rows(40_000, 41_000)}; rollback",
        f"begin; {rows(40_000, 40_600)}; savepoint a; alter table t add column gone int; {rows(41_000, 41_600)};"
        " rollback to a; insert into t values (42000, 'x'); commit",
        f"begin; savepoint a; {rows(50_000, 50_600)}; rollback to a; commit",
        "insert into t values (100, 'last'); update t set v = 'y' where id < 5; delete from t where id = 1",
    )


@pytest.mark.parametrize("spill", ["64MiB", "10kB"])
def test_the_same_as_version_1(on: PublishedDatabase, spill: str) -> None:
    workload(on)
    last = end(on)
    expected = records(on, until_lsn=last)
    raw = records(on, "--streaming", "parallel", "-m", SESSION, until_lsn=last)
    assert {b"S", b"E", b"c", b"A"} <= {data[:1] for _, data in raw}
    sessions = [SESSION, IMMEDIATE] if on.database.cluster.version == "18" else [SESSION]
    for session in sessions:
        assert plain(records(on, *WHOLE, "--spill-threshold", spill, "-m", session, until_lsn=last)) == plain(expected)


def test_from_and_to_any_position(on18: PublishedDatabase) -> None:
    """Also positions inside streamed transactions: every transaction that commits in between comes whole."""
    workload(on18)
    last = end(on18)
    expected = plain(records(on18, until_lsn=last))
    ends = [lsn for lsn, data in expected if data[:1] == b"C"]
    for start, stop in [(ends[1], ends[-3]), (LSN(ends[2] + 1), LSN(ends[-2] - 1)), (ends[-2], ends[-1])]:
        options = ("--startpos", str(start))
        wanted = plain(records(on18, *options, until_lsn=str(stop)))
        assert any(data[:1] == b"C" for _, data in wanted)
        assert plain(records(on18, *options, *WHOLE, "-m", SESSION, until_lsn=str(stop))) == wanted


def test_every_row_in_a_subtransaction_of_its_own(on18: PublishedDatabase) -> None:
    on18.sql("""do $$ begin
        for i in 1 .. 10000 loop
            begin
                insert into t values (i, repeat('x', 100));
                if i % 2 = 0 then raise 'undo'; end if;
            exception when raise_exception then null;
            end;
        end loop; end $$""")
    out = records(on18, *WHOLE, "-m", SESSION, "--spill-threshold", "100kB", until_lsn=end(on18))
    inserts = [decode(data) for _, data in out if data[:1] == b"I"]
    assert [int(insert.new[0]) for insert in inserts if isinstance(insert, Insert)] == list(range(1, 10000, 2))


def test_rendered_and_with_newlines(on18: PublishedDatabase) -> None:
    workload(on18)
    last = end(on18)
    for args in (["-J"], ["-J", "-N"], ["-N"]):
        expected = records(on18, *args, until_lsn=last)
        out = records(on18, *args, *WHOLE, "-m", IMMEDIATE, "--spill-threshold", "10kB", until_lsn=last)
        assert (plain(out) if args == ["-N"] else out) == (plain(expected) if args == ["-N"] else expected)


def test_a_large_transaction_is_confirmed_whole_or_not_at_all(on18: PublishedDatabase) -> None:
    """It is larger than the pipe. Its end counts once all of it is written. Its memory and files are limited, and released at the
    end.
    """
    on18.sql("insert into t values (1, 'before')", rows(10, 60_010, 500), "insert into t values (2, 'after')")
    with on18.cli(*WHOLE, "-m", SESSION, "--spill-threshold", "1MiB", "-A") as cli:
        before = cli.transactions(1)[0]
        until(lambda: on18.confirmed() == before[0], "the first transaction's confirmation")
        # All of the large one is received by now or soon; the pipe holds 1 MiB of it, and nobody reads.
        process = psutil.Process(cli.process.pid)
        until(lambda: any("deleted" in each for each in open_files(process)), "the file that holds the rest")
        assert on18.confirmed() == before[0]
        large, after = cli.transactions(2)
        assert len(large[1]) == 60_001
        until(lambda: on18.confirmed() >= after[0], "the confirmation of all")
        assert not any("deleted" in each for each in open_files(process))
        assert process.memory_info().rss < 120 << 20
        assert cli.quit() == 0


def open_files(process: psutil.Process) -> list[str]:
    base = f"/proc/{process.pid}/fd"
    out = []
    for fd in os.listdir(base):
        with contextlib.suppress(OSError):
            out.append(os.readlink(f"{base}/{fd}"))
    return out


def test_quit_while_a_large_transaction_is_written_ends_between_records(on18: PublishedDatabase) -> None:
    on18.sql("insert into t values (1, 'before')", rows(10, 60_010, 500))
    with on18.cli(*WHOLE, "-m", SESSION, "--spill-threshold", "1MiB") as cli:
        first, _ = cli.transactions(1)[0]
        cli.take(100)
        cli.say(f"F {first}\nq\n")
        rest = list(cli.records())
        assert not any(data[:1] == b"C" for _, data in rest)
        assert cli.wait() == 0
    assert on18.confirmed() == first


def test_a_prepared_transaction_comes_with_its_commit_and_holds_feedback(on: PublishedDatabase) -> None:
    slot = on.slot + "_2pc"
    on.connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", [slot])
    on.slot = slot
    arguments = (*WHOLE, "--two-phase", "-m", SESSION, "-A")
    on.sql(
        "begin; insert into t values (1, 'x'); prepare transaction 'small'",
        f"begin; {rows(100, 1000)}; prepare transaction 'large'",
    )
    on.sql("begin; insert into t values (9, 'x'); prepare transaction 'never'", "insert into t values (2, 'x')")
    start = on.confirmed()
    with on.cli(*arguments) as cli:
        assert [bytes(row or b"") for row in cli.transactions(1)[0][1]] == [b"2"]
        on.sql("insert into t values (3, 'x')")
        cli.transactions(1)
        cli.process.kill()
    assert on.confirmed() <= start
    on.released()
    on.sql("commit prepared 'small'", "rollback prepared 'never'", "commit prepared 'large'")
    with on.cli(*arguments) as cli:
        done = cli.transactions(4)
        assert [len(found) for _, found in done] == [1, 1, 1, 901]
        assert done[2][1] == [b"1"]
        until(lambda: on.confirmed() >= done[3][0], "the confirmation of all")
        assert cli.quit() == 0


def test_a_restart_after_overlapping_prepared_transactions(on18: PublishedDatabase) -> None:
    """Also after one without published changes: it gives no output, but the server sends its COMMIT PREPARED."""
    on18.connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", [on18.slot + "_2pc"])
    on18.slot += "_2pc"
    arguments = (*WHOLE, "--two-phase", "-A")
    on18.sql("create table unpublished(id int)")
    on18.sql("begin; insert into unpublished values (1); prepare transaction 'empty'", "insert into t values (1, 'x')")
    on18.sql("begin; insert into t values (2, 'x'); prepare transaction 'a'", "insert into t values (3, 'x')")
    on18.sql("begin; insert into t values (4, 'x'); prepare transaction 'b'", "commit prepared 'a'", "commit prepared 'empty'")
    with on18.cli(*arguments, "-s", "0") as cli:
        assert [row for _, found in cli.transactions(3) for row in found] == [b"1", b"3", b"2"]
        assert cli.quit() == 0
    on18.sql("commit prepared 'b'")
    on18.released()
    with on18.cli(*arguments) as cli:
        done = cli.transactions(4)
        assert [row for _, found in done for row in found] == [b"1", b"3", b"2", b"4"]
        until(lambda: on18.confirmed() >= done[-1][0], "the confirmation of all")
        assert cli.quit() == 0


def test_it_needs_pgoutput_and_a_size(pg15: postgres.Cluster) -> None:
    with pg15.database() as database, contextlib.closing(PublishedDatabase(database)) as on15:
        code, _, stderr = on15.run("--whole-transactions", "--spill-threshold", "lots")
        assert (code, "'lots' is not a size" in stderr) == (1, True)
        on15.slot = on15.make_slot("test_decoding", "_text")
        code, _, stderr = on15.run("--whole-transactions", publication="")
        assert (code, "only from a slot with the plugin pgoutput" in stderr) == (2, True)


def test_rows_are_whole_records(on18: PublishedDatabase) -> None:
    """A consumer of version 1 can read the output, and need not know of streaming."""
    on18.sql(rows(1, 2000))
    with on18.cli(*WHOLE, "-m", IMMEDIATE) as cli:
        out = cli.take(2003)
    kinds = [type(decode(data)) for _, data in out]
    assert kinds.count(Insert) == 2000
    assert kinds[-1] is Commit
