"""pgoutput's options through the command line, on each server: what comes, and what is refused before anything comes."""

import contextlib
import json
from collections.abc import Iterator

import postgres
import pytest

from cdcpipe.lsn import LSN
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
    Type,
)
from support.published_database import PublishedDatabase
from support.waiting import until

SMALL_MEMORY = ("-m", "options=-c logical_decoding_work_mem=64kB")


class On(PublishedDatabase):
    """With a way to run to the end of what there is."""

    def to_the_end(self, *args: str) -> list[tuple[LSN, bytes]]:
        self.sql("create table flush (); drop table flush")
        # What has been flushed is all that was committed here; what has been inserted may wait for its flush.
        end = str(self.value("select pg_current_wal_flush_lsn()"))
        self.released()
        with self.cli("--endpos", end, *args) as cli:
            records = list(cli.records())
            assert cli.wait() == 0, cli.stderr
        return records

    def messages(self, *args: str, parallel: bool = False) -> list[Message]:
        decoded = []
        in_stream = False
        for _, record in self.to_the_end(*args):
            decoded.append(decode(record, in_stream=in_stream, streaming_parallel=parallel))
            in_stream = isinstance(decoded[-1], StreamStart) or (in_stream and not isinstance(decoded[-1], StreamStop))
        return decoded

    def two_phase(self) -> bool:
        return bool(self.value("select two_phase from pg_replication_slots where slot_name = %s", self.slot))


@pytest.fixture
def on(pg: postgres.Cluster) -> Iterator[On]:
    with pg.database() as database, contextlib.closing(On(database)) as made:
        yield made
        for (gid,) in made.connection.execute(
            "select quote_literal(gid) from pg_prepared_xacts where database = current_database()"
        ):
            made.sql(f"rollback prepared {gid}")


def kinds(messages: list[Message]) -> list[str]:
    return [type(message).__name__ for message in messages]


# Messages and origins


def test_messages(on: On) -> None:
    """Raw bytes, each in its place; none without the option; those that need no transaction survive its end."""
    on.sql(
        "begin; insert into t values (1); select pg_logical_emit_message(true, 'in', '\\x00ff0a'::bytea);"
        " select pg_logical_emit_message(false, 'out', 'now'); commit",
        "begin; select pg_logical_emit_message(true, 'in', 'gone'); select pg_logical_emit_message(false, '', ''); rollback",
    )
    messages = on.messages("--messages")
    assert kinds(messages) == ["LogicalMessage", "Begin", "Relation", "Insert", "LogicalMessage", "Commit", "LogicalMessage"]
    found = [(m.is_transactional, m.prefix, m.content) for m in messages if isinstance(m, LogicalMessage)]
    assert found == [(False, "out", b"now"), (True, "in", b"\x00\xff\n"), (False, "", b"")]
    assert "LogicalMessage" not in kinds(on.messages())
    records = [json.loads(record) for _, record in on.to_the_end("-J")]
    assert [record["content"] for record in records if record["action"] == "M"] == ["now", "", ""]


def test_origin(on: On) -> None:
    name = f"origin_{on.database.name}"
    on.sql(f"select pg_replication_origin_create('{name}')", f"select pg_replication_origin_session_setup('{name}')")
    on.sql("begin; select pg_replication_origin_xact_setup('0/ABCD1234', now()); insert into t values (1); commit")
    on.sql("select pg_replication_origin_session_reset()", "insert into t values (2)")
    messages = on.messages()
    assert [m for m in messages if isinstance(m, Origin)] == [Origin(0xABCD1234, name)]
    assert kinds(messages).count("Begin") == 2
    if on.database.cluster.version == "15":
        before = on.confirmed()
        for which in ("any", "none"):
            code, out, err = on.run("--origin", which)
            assert (code, out) == (2, b"")
            assert f"origin={which} from PostgreSQL 16 on; this server is 15" in err
        assert on.confirmed() == before
    else:
        assert kinds(on.messages("--origin", "any")) == kinds(messages)
        assert [m.new[0] for m in on.messages("--origin", "none") if isinstance(m, Insert)] == [b"2"]
        # What was left out by its origin is none that the next run would miss.
        assert [m.new[0] for m in on.messages("--origin", "any") if isinstance(m, Insert)] == [b"1", b"2"]
    on.sql(f"select pg_replication_origin_drop('{name}')")


# Streaming


def test_streaming(on: On) -> None:
    rows = "insert into t select g, repeat('x', 100) from generate_series({}, {}) g"
    on.sql(
        f"begin; {rows.format(1, 1000)}; savepoint a; {rows.format(1001, 2000)}; rollback to a; {rows.format(2001, 3000)}; commit"
    )
    on.sql("insert into t values (5000)")
    plain = on.messages(*SMALL_MEMORY)
    expected = [m.new for m in plain if isinstance(m, Insert)]
    assert len(expected) == 2001
    assert not {"StreamStart", "StreamCommit"} & set(kinds(plain))
    assert kinds(on.messages(*SMALL_MEMORY, "--streaming", "off")) == kinds(plain)
    modes = ["on"] if on.database.cluster.version == "15" else ["on", "parallel"]
    for mode in modes:
        messages = on.messages(*SMALL_MEMORY, "--streaming", mode, parallel=mode == "parallel")
        aborted = {m.subxid: m for m in messages if isinstance(m, StreamAbort)}
        assert all((m.abort_lsn is not None) == (mode == "parallel") for m in aborted.values())
        assert [m.new for m in messages if isinstance(m, Insert) and m.xid not in aborted] == expected
        assert [type(m) for m in messages if isinstance(m, (StreamCommit, Begin))] == [StreamCommit, Begin]
    if modes == ["on"]:
        code, out, err = on.run("--streaming", "parallel")
        assert (code, out) == (2, b"")
        assert "streaming=parallel from PostgreSQL 16 on; this server is 15" in err


@pytest.mark.parametrize(("options", "version"), [((), "1"), (("--streaming", "on"), "2"), (("--proto-version", "2"), "2")])
def test_protocol_versions(on: On, options: tuple[str, ...], version: str) -> None:
    """The lowest that serves is chosen, a higher one can be asked for; the same rows come."""
    on.sql("insert into t values (1)")
    assert [m.new[0] for m in on.messages(*options) if isinstance(m, Insert)] == [b"1"]
    last = "3" if on.database.cluster.version == "15" else "4"
    assert [m.new[0] for m in on.messages("--proto-version", last) if isinstance(m, Insert)] == [b"1"]
    with on.cli(*options) as cli:
        until(on.is_active)
        query = "select query from pg_stat_activity where pid = (select active_pid from pg_replication_slots where slot_name = %s)"
        assert f"\"proto_version\" '{version}'" in str(on.value(query, on.slot))
        assert cli.quit() == 0
    code, out, err = on.run("--proto-version", str(int(last) + 1))
    assert (code, out) == (2, b"")
    assert f"speaks 1 to {last}" in err


@pytest.mark.parametrize("option", [("--streaming", "on"), ("--two-phase",)])
def test_what_an_output_plugin_has_no_callbacks_for(on: On, option: tuple[str, ...]) -> None:
    """Named before the stream starts, not at the first such transaction; put together, they can be rendered."""
    on.sql("insert into t values (1)")
    code, out, err = on.run("-J", *option)
    assert (code, out) == (1, b"")
    assert "the output plugin wal2json can't render" in err
    assert not on.two_phase()
    records = on.to_the_end("-J", *option, "--whole-transactions")
    assert [json.loads(record)["action"] for _, record in records] == ["B", "I", "C"]


# Two-phase


def test_prepared_transactions_as_they_come(on: On) -> None:
    """The records pass as they are; what was prepared and confirmed does not come again, only what became of it does."""
    on.sql(
        "begin; insert into t values (1); prepare transaction 'one'", "begin; insert into t values (2); prepare transaction 'two'"
    )
    with on.cli("--two-phase", "-v") as cli:
        records = [(lsn, decode(record)) for lsn, record in cli.take(7)]
        assert kinds([m for _, m in records]) == [
            "BeginPrepare",
            "Relation",
            "Insert",
            "Prepare",
            "BeginPrepare",
            "Insert",
            "Prepare",
        ]
        until(lambda: "for good" in cli.stderr)
        assert on.two_phase()
        prepared = [(lsn, m) for lsn, m in records if isinstance(m, Prepare)]
        assert [m.gid for _, m in prepared] == ["one", "two"]
        assert all(lsn == m.end_lsn for lsn, m in prepared)
        cli.say(f"F {prepared[-1][0]}\n")
        until(lambda: on.confirmed() >= prepared[-1][0])
        cli.process.kill()
    on.released()
    on.sql("rollback prepared 'two'", "commit prepared 'one'", "insert into t values (3)")
    messages = on.messages("--two-phase")
    assert [type(m) for m in messages[:2]] == [RollbackPrepared, CommitPrepared]
    assert [m.gid for m in messages[:2] if isinstance(m, (RollbackPrepared, CommitPrepared))] == ["two", "one"]
    assert [m.new[0] for m in messages if isinstance(m, Insert)] == [b"3"]


def test_prepared_transactions_rendered(on: On) -> None:
    on.sql("begin; insert into t values (1, 'x'); prepare transaction 'it''s'", "commit prepared 'it''s'")
    rendered = ("--two-phase", "--output", "test_decoding", "-o", "include-xids=0")
    records = [record.decode() for _, record in on.to_the_end(*rendered)]
    # pgoutput's protocol version follows from all options together: streams need a lower one than prepared transactions.
    assert [record.decode() for _, record in on.to_the_end(*rendered, "-o", "stream-changes=1")] == records
    assert records == [
        "BEGIN",
        "table public.t: INSERT: id[integer]:1 v[text]:'x'",
        "PREPARE TRANSACTION 'it''s'",
        "COMMIT PREPARED 'it''s'",
    ]


def test_without_the_option_a_prepared_transaction_comes_when_it_is_committed(on: On) -> None:
    on.sql(
        "begin; insert into t values (1); prepare transaction 'one'", "begin; insert into t values (2); prepare transaction 'two'"
    )
    on.sql("insert into t values (3)", "rollback prepared 'two'", "commit prepared 'one'")
    messages = on.messages()
    assert [m.new[0] for m in messages if isinstance(m, Insert)] == [b"3", b"1"]
    assert {type(m) for m in messages} >= {Begin, Commit}
    assert not on.two_phase()
    assert not [m for m in messages if isinstance(m, (BeginPrepare, Prepare, CommitPrepared, Type))]


def test_a_slot_that_sends_them_anyway(on: On) -> None:
    """Once on, two_phase stays with the slot: a stream that did not ask for it is refused, or puts them together."""
    on.sql("begin; insert into t values (1); prepare transaction 'one'")
    on.messages("--two-phase")
    assert on.two_phase()
    before = on.confirmed()
    for options in ((), ("-J",), ("--output", "test_decoding")):
        code, out, err = on.run(*options)
        assert (code, out) == (2, b"")
        assert "sends prepared transactions when they are prepared" in err
        assert "--whole-transactions" in err
    assert on.confirmed() == before
    on.sql("commit prepared 'one'")
    messages = on.messages("--whole-transactions")
    assert kinds(messages) == ["Begin", "Relation", "Insert", "Commit"]
    assert [json.loads(record)["action"] for _, record in on.to_the_end("--whole-transactions", "-J")] == ["B", "I", "C"]


def test_put_together_from_a_position_after_the_prepare(on: On) -> None:
    """--startpos between PREPARE and COMMIT PREPARED: its changes come, because the slot is before them; those before it don't."""
    on.messages("--two-phase")
    on.sql("begin; insert into t values (1); prepare transaction 'one'", "insert into t values (2)")
    on.sql("select pg_logical_emit_message(false, 'at', 'once')")
    middle = on.to_the_end("--two-phase", "--messages")[-1][0]
    on.sql("commit prepared 'one'", "insert into t values (3)")
    whole = on.messages("--two-phase", "--whole-transactions", "--messages")
    assert [m.new[0] for m in whole if isinstance(m, Insert)] == [b"2", b"1", b"3"]
    rest = on.messages("--whole-transactions", "--messages", "--startpos", str(middle))
    assert kinds(rest) == ["Begin", "Relation", "Insert", "Commit", "Begin", "Insert", "Commit"]
    assert [m.new[0] for m in rest if isinstance(m, Insert)] == [b"1", b"3"]


def test_put_together_after_the_prepare_was_confirmed(on: On) -> None:
    """Its changes come no more, and that is an error, not an empty commit."""
    on.sql("begin; insert into t values (1); prepare transaction 'one'")
    with on.cli("--two-phase", "-A", "--endpos", str(on.value("select pg_current_wal_insert_lsn()"))) as cli:
        assert cli.wait() == 0
    on.sql("commit prepared 'one'")
    on.released()
    with on.cli("--two-phase", "--whole-transactions") as cli:
        assert cli.wait() == 5
        assert "'one' is committed, but its changes came in an earlier stream" in cli.stderr
