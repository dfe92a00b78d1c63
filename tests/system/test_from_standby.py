"""A stream from a standby: the publication is made on the primary, the slot on the standby."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from datetime import datetime

import postgres
import psycopg
import pytest

from support.cli_process import CLI, run_cli
from support.requirements import need
from support.waiting import until


class Pair:
    """A primary with a table, and its standby."""

    def __init__(self, primary: postgres.Cluster, standby: postgres.Cluster) -> None:
        self.primary = primary
        self.on_primary, self.on_standby = primary.connect(), standby.connect()
        self.arguments = ("-d", standby.dsn, "-S", "s", "--publication", "p")

    def close(self) -> None:
        self.on_primary.close()
        self.on_standby.close()

    def value(self, query: str, connection: psycopg.Connection | None = None) -> str:
        row = (connection or self.on_primary).execute(query).fetchone()
        assert row is not None
        return str(row[0])

    def replay(self) -> str:
        """Wait until the standby has all that is committed. Return the end of the WAL.

        The standby also has the record that follows, the one of pg_log_standby_snapshot(): a slot that is made later can't use it.
        """
        end = self.value("select pg_current_wal_insert_lsn()")
        logged = self.value("select pg_log_standby_snapshot()")
        until(lambda: self.value(f"select pg_last_wal_replay_lsn() >= '{logged}'", self.on_standby) == "True", "the replay")
        return end

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keep a transaction open that has written, so that no slot can be made, whatever the primary logs by itself."""
        with self.primary.connect() as connection, connection.transaction():
            connection.execute("select pg_current_xact_id()")
            yield

    @contextlib.contextmanager
    def being_advised(self, *args: str, header: bool = True) -> Iterator[CLI]:
        """Run a command that creates a slot on the standby. Wait for its advice, and follow it until the slot is there."""
        with contextlib.ExitStack() as stack:
            with self.writing():
                cli = stack.enter_context(CLI(*args, header=header))
                until(lambda: "SELECT pg_log_standby_snapshot() on the primary" in cli.stderr, "the advice")
            until(self._follow_advice, "the slot")
            yield cli
            assert cli.stderr.count("pg_log_standby_snapshot") == 1

    def _follow_advice(self) -> bool:
        self.on_primary.execute("select pg_log_standby_snapshot()")
        return self.value("select count(confirmed_flush_lsn) = 1 from pg_replication_slots", self.on_standby) == "True"

    def invalidate(self) -> None:
        """Let VACUUM remove rows of the catalog that the slot needs."""
        for number in range(20):
            self.on_primary.execute(f"create table made_{number}(a int); drop table made_{number}")
        self.on_primary.execute("vacuum full pg_class")
        self.replay()


def pair_of(version: str) -> Iterator[Pair]:
    need(version)
    with postgres.Cluster(version) as primary:
        with primary.connect() as connection:
            connection.execute("create table t(id int primary key)")
        with postgres.Cluster(version, standby_of=primary) as standby:
            pair = Pair(primary, standby)
            yield pair
            pair.close()


@pytest.fixture(params=["16", "18"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield from pair_of(request.param)


def test_from_creation_to_a_lost_slot(pair: Pair) -> None:
    code, out, err = run_cli(*pair.arguments, "-c", "--table", "public.t", "-A", "--endpos", "0/1")
    assert (code, out) == (2, b"")
    assert "there is no publication 'p', and a standby can't make one" in err
    assert 'hint: on the primary: CREATE PUBLICATION "p" FOR TABLE "public"."t"' in err

    pair.on_primary.execute("create publication p for table t")
    pair.replay()
    with pair.being_advised(*pair.arguments, "-c", "-A", "--endpos", "0/1") as cli:
        assert cli.wait() == 0, cli.stderr
    pair.on_primary.execute("insert into t values (1)")
    end = pair.replay()
    code, out, err = run_cli(*pair.arguments, "-J", "-N", "-A", "--endpos", end)
    assert code == 0, err
    assert b'"value":1' in out

    with CLI(*pair.arguments) as cli:
        until(lambda: pair.value("select active from pg_replication_slots", pair.on_standby) == "True", "the stream")
        pair.invalidate()
        assert cli.wait() in (3, 5)
        assert "start again" in cli.stderr
    code, _, err = run_cli(*pair.arguments, "-A", "--endpos", end)
    assert code == 2
    assert "replication slot 's' is lost: the primary has removed rows of the catalog that it needed" in err
    assert "hot_standby_feedback = on" in err


def test_a_role_whose_transactions_are_serializable_uses_a_standby(pair: Pair) -> None:
    """A standby can't make such a transaction."""
    options = ("-m", "options=-c default_transaction_isolation=serializable")
    code, _, err = run_cli("slot", "-d", pair.arguments[1], "-S", "s", *options)
    assert code == 8, err
    assert "replication slot 's' does not exist" in err


def test_a_snapshot_of_a_standby_is_exact(pair: Pair) -> None:
    """The snapshot has what committed before the slot's beginning, and the stream has the rest."""
    pair.on_primary.execute("create publication p for table t")
    pair.on_primary.execute("insert into t values (1)")
    pair.replay()
    with pair.being_advised("prepare", *pair.arguments, "-c", "--export-snapshot", header=False) as cli:
        printed = b""
        while not printed.endswith(b"\n}\n"):
            printed += cli.read_bytes()
        prepared = json.loads(printed)
        assert prepared["slot"]["failover"] in (None, False)
        # A time of the primary's commits. The standby's clock would be later than commits that are still to be replayed.
        assert datetime.fromisoformat(prepared["snapshot_time"]) <= datetime.fromisoformat(
            pair.value("select pg_last_xact_replay_timestamp()", pair.on_standby)
        )
        pair.on_primary.execute("insert into t values (2)")
        end = pair.replay()
        with pair.on_standby.transaction():
            pair.on_standby.execute("set transaction isolation level repeatable read, read only")
            pair.on_standby.execute(f"set transaction snapshot '{prepared['snapshot']}'")
            assert pair.on_standby.execute("select id from t").fetchall() == [(1,)]
        cli.close_stdin()
        assert cli.wait() == 0
    code, out, err = run_cli(*pair.arguments, "-J", "-N", "-A", "--endpos", end)
    assert code == 0, err
    assert out.count(b'"action":"I"') == 1
    assert b'"value":2' in out


def test_what_the_creation_waits_for_when_it_is_too_long(pair: Pair) -> None:
    pair.on_primary.execute("create publication p for table t")
    pair.replay()
    with pair.writing():
        code, _, err = run_cli(*pair.arguments, "-c", "--create-timeout", "0.5", "-A", "--endpos", "0/1")
    assert code == 2
    assert "the server waits for its primary to say which transactions are running" in err
    assert "hint: SELECT pg_log_standby_snapshot() on the primary makes it say so" in err


def test_a_standby_of_version_15_has_no_slots() -> None:
    for pair in pair_of("15"):
        pair.on_primary.execute("create publication p for table t")
        end = pair.value("select pg_current_wal_insert_lsn()")
        until(lambda: pair.value(f"select pg_last_wal_replay_lsn() >= '{end}'", pair.on_standby) == "True", "the replay")  # noqa: B023
        code, _, err = run_cli(*pair.arguments, "-c", "-A", "--endpos", "0/1")
        assert code == 2
        assert "logical slots on a standby take PostgreSQL 16 or newer: connect to the primary" in err


def test_a_copied_slot_on_a_standby_of_version_15_waits_for_the_promotion() -> None:
    """pg_failover_slots and Patroni make such slots. -L took one for free, and --standby did not wait."""
    need("15")
    with postgres.Cluster("15") as primary, primary.connect() as connection:
        connection.execute("create table t (id int primary key); create publication p for table t")
        with postgres.Cluster("15", standby_of=primary) as standby:
            connection.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
            copy_slot("s", primary, standby)
            arguments = ("-d", standby.dsn, "-S", "s", "--publication", "p", "-J", "-N")
            code, _, err = run_cli(*arguments, "-L", "-u", "0")
            assert code == 9
            assert "hint: wait longer (-u), or promote this standby" in err
            for command in ((), ("prepare",)):
                options = arguments[:-2] if command else arguments
                code, _, err = run_cli(*command, *options)
                assert code == 2
                assert "replication slot 's' is on a standby older than PostgreSQL 16: nobody can stream from it before" in err
                assert "hint: connect to the primary; or wait for the promotion" in err
            with CLI(*arguments, "--standby", "-v") as cli:
                until(lambda: "waiting" in cli.stderr, "the wait for the promotion")
                standby.promote()
                with standby.connect() as promoted:
                    promoted.execute("insert into t values (7)")
                assert [body for _, body in cli.take(3)][1].count(b'"value":7') == 1
                assert cli.quit() == 0


def copy_slot(name: str, primary: postgres.Cluster, standby: postgres.Cluster) -> None:
    """Copy the primary's slot to the standby by its file, as Patroni does."""
    standby.halt("fast")
    source, target = (cluster.data / "pg_replslot" / name for cluster in (primary, standby))
    shutil.copytree(source, target)
    owner = standby.data.stat()
    for path in (target, *target.iterdir()):
        os.chown(path, owner.st_uid, owner.st_gid)
    standby.resume()
