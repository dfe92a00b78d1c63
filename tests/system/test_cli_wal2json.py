"""-j and -J on the command line: a pgoutput slot rendered here, compared with the real plugin's slot on the same WAL."""

import contextlib
import json
from collections.abc import Iterator

import postgres
import pytest

from cdcpipe.lsn import LSN
from cdcpipe.pipe.exitcode import ExitCode
from support.cli_process import CLI, run_cli
from support.published_database import PublishedDatabase, insert
from support.waiting import until


@pytest.fixture
def on15(pg15: postgres.Cluster) -> Iterator[PublishedDatabase]:
    with pg15.database() as database, contextlib.closing(PublishedDatabase(database)) as made:
        made.sql(
            "create type mood as enum ('sad', 'ok')", "create table m(id int primary key, m mood, n numeric(8,2), s varchar(7))"
        )
        made.sql("alter publication p add table m")
        yield made


def workload(on: PublishedDatabase) -> str:
    on.make_slot("wal2json", "_w")
    on.connection.execute("select pg_drop_replication_slot(%s)", (on.slot,))
    on.make_slot()
    on.sql(
        "insert into t values (1, E'quote \" back \\\\ tab\\t é'), (2, null)",
        "begin",
        "update t set v = 'new' where id = 1",
        "update t set id = 3 where id = 2",
        "insert into m values (1, 'ok', 12.50, 'x')",
        "delete from t where id = 1",
        "commit",
        "truncate t",
        "select pg_logical_emit_message(true, 'prefix', 'content')",
    )
    return str(on.value("select pg_current_wal_insert_lsn()"))


@pytest.mark.parametrize("option", ["-j", "-J"])
def test_the_same_records(on15: PublishedDatabase, option: str) -> None:
    """Also the headers, except for Begin (pgoutput sends it with the first published change) and for version 1."""
    end = workload(on15)
    outputs = []
    for slot, publication in ((on15.slot + "_w", []), (on15.slot, ["--publication", "p"])):
        with CLI("-d", on15.database.dsn, "-S", slot, *publication, option, "--endpos", end) as cli:
            records = [(str(lsn), record.decode()) for lsn, record in cli.records()]
            differ = (record.startswith(('{"action":"B"', '{"nextlsn"')) for _, record in records)
            outputs.append([("" if differs else lsn, record) for differs, (lsn, record) in zip(differ, records, strict=True)])
            assert cli.wait() == 0, cli.stderr
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 3


def test_feedback_on_a_transactions_record_is_exact(on15: PublishedDatabase) -> None:
    end = workload(on15)
    with CLI("-d", on15.database.dsn, "-S", on15.slot, "--publication", "p", "-j", "--endpos", end, "--endpos-wait") as cli:
        lsn, record = list(cli.records())[1]
        assert str(lsn) == json.loads(record)["nextlsn"]
        cli.say(f"F {lsn}\n")
        assert cli.quit() == 0
    assert on15.confirmed() == lsn


def test_a_transaction_that_began_before_an_idle_position_is_not_confirmed_without_feedback(on15: PublishedDatabase) -> None:
    """The header of its record is before that position. After a crash of the consumer it comes again."""
    on15.slot = on15.make_slot("wal2json", "_w")

    def here() -> LSN:
        return LSN.parse(str(on15.value("select pg_current_wal_lsn()")))

    def written() -> LSN:
        found = "select coalesce(max(write_lsn), '0/0') from pg_stat_replication join pg_replication_slots on pid = active_pid"
        return LSN.parse(str(on15.value(f"{found} where slot_name = %s", on15.slot)))

    with on15.cli("-j", publication="") as cli, contextlib.closing(on15.database.connect()) as early:
        early.execute("begin")
        early.execute("insert into t values (1, 'early')")
        on15.sql("select pg_switch_wal()")
        idle = here()
        until(lambda: on15.confirmed() >= idle, "the idle position to be confirmed")
        early.execute("commit")
        [(lsn, record)] = cli.take(1)
        end = LSN.parse(json.loads(record)["nextlsn"])
        assert lsn < idle < end
        on15.sql("select pg_switch_wal()")
        later = here()
        until(lambda: written() >= later, "a keepalive after the transaction")
        assert idle <= on15.confirmed() < end
    on15.released()
    with on15.cli("-j", publication="") as cli:
        assert cli.take(1) == [(lsn, record)]
        cli.say(f"F {end}\n")
        until(lambda: on15.confirmed() >= later, "the idle position to be confirmed")
        assert cli.quit() == 0


def test_feedback_on_rendered_records(on15: PublishedDatabase) -> None:
    end = workload(on15)
    with CLI(
        "-d", on15.database.dsn, "-S", on15.slot, "--publication", "p", "-JN", "--endpos", end, "--endpos-wait", header=False
    ) as cli:
        commits = [lsn for lsn, record in cli.records() if json.loads(record)["action"] == "C"]
        cli.say(f"F {commits[1]}\n")
        assert cli.quit() == 0
    assert on15.confirmed() == commits[1]


def test_an_unknown_option_is_named(on15: PublishedDatabase) -> None:
    code, _, err = run_cli("-d", on15.database.dsn, "-S", on15.slot, "--publication", "p", "-J", "-o", "nonsense=1")
    assert code in (1, 2)
    assert "nonsense" in err


def test_without_the_servers_plugin(pg18: postgres.Cluster) -> None:
    """The purpose of all this: JSON from a server without wal2json."""
    with pg18.database() as database, contextlib.closing(PublishedDatabase(database)) as on:
        on.sql("insert into t values (1, 'a')")
        with on.cli("-J", header=False) as cli:
            records = [json.loads(record) for _, record in cli.take(3)]
            assert [record["action"] for record in records] == ["B", "I", "C"]
            assert records[1]["columns"] == [
                {"name": "id", "type": "integer", "value": 1},
                {"name": "v", "type": "text", "value": "a"},
            ]
            assert cli.quit() == 0


@pytest.mark.parametrize("option", ["-j", "-J"])
def test_a_transaction_that_cannot_be_rendered_is_not_confirmed(pg18: postgres.Cluster, option: str) -> None:
    """The records before it are written. It may also fail at its very end, when only its own record is missing."""
    with pg18.database() as database, contextlib.closing(PublishedDatabase(database)) as on:
        origin = f"gone_{database.name}"
        on.sql("insert into t values (1, 'local')")
        on.sql(f"select pg_replication_origin_create('{origin}')", f"select pg_replication_origin_session_setup('{origin}')")
        on.sql("begin", "select pg_replication_origin_xact_setup('0/1', now())", "insert into t values (2, 'from afar')", "commit")
        on.sql("select pg_replication_origin_session_reset()", f"select pg_replication_origin_drop('{origin}')")
        failed = on.value("select pg_current_wal_insert_lsn()")
        with on.cli(option, "-A", "-o", "include-origin=1", "-o", "include-xids=1") as cli:
            written = b"".join(record for _, record in cli.records())
            assert cli.wait() == ExitCode.SYSTEM_ERROR
        assert "is no longer in pg_replication_origin" in cli.stderr
        assert b'"local"' in written
        assert b"from afar" not in written
        assert on.confirmed() < LSN.parse(str(failed))


def test_a_consumer_moves_to_a_pgoutput_slot(on15: PublishedDatabase) -> None:
    """As docs/cdcpipe.md says (Move a script or a slot): no change is lost, and none comes twice."""
    dsn, old, new = on15.database.dsn, on15.slot + "_w", f"new_{on15.database.name}"
    on15.make_slot("wal2json", "_w")
    taken: list[int] = []

    def take(*args: str) -> None:
        code, out, err = run_cli("-d", dsn, *args, "-J", "-N", "-A")
        assert code == 0, err
        records = [json.loads(line) for line in out.decode().splitlines() if line.startswith('{"action":"I"')]
        taken.extend(record["columns"][0]["value"] for record in records)

    insert(on15, 1, 2)
    prepared = json.loads(run_cli("prepare", "-d", dsn, "-S", new, "--publication", "p", "-c")[1])
    insert(on15, 3)  # in both slots: the old one goes beyond the end by one transaction
    take("-S", old, "--endpos", prepared["slot"]["confirmed_flush_lsn"])
    assert taken == [1, 2, 3]
    start = json.loads(run_cli("slot", "-d", dsn, "-S", old)[1])["confirmed_flush_lsn"]
    insert(on15, 4)
    take("-S", new, "--publication", "p", "--startpos", start, "--endpos", str(on15.value("select pg_current_wal_lsn()")))
    assert taken == [1, 2, 3, 4]
    on15.connection.execute("select pg_drop_replication_slot(%s)", (new,))
