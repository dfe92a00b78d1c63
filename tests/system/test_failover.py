"""Failover of PostgreSQL 18 to a standby that has a copy of the slot: the log goes on, or names what is lost."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import postgres
import pytest
from standbys import execute

from cdcpipe.errors import GapError
from cdcpipe.lsn import LSN
from cdcpipe.replication.timelines import parse_timeline_history
from spark_sink.launcher.config import LauncherConfig
from spark_sink.launcher.launcher import Launcher
from spark_sink.staging import copied as staging_copied
from spark_sink.staging.filler import SealPolicy
from spark_sink.staging.gap import LostChanges
from spark_sink.staging.log import StagingError, list_epochs, log_end
from support.cli_process import run_spark_cli
from support.landing import replay
from support.waiting import until

SETTINGS = {"hot_standby_feedback": "on", "sync_replication_slots": "on"}
SLOT = "shop_cdc"


class Pair:
    """A primary, and a standby that keeps a copy of the slot. Both are named in the launcher's connection."""

    def __init__(self, stack: ExitStack, staging: Path) -> None:
        self.primary = stack.enter_context(postgres.Cluster("18"))
        self.execute("create table t (id int primary key)", "create publication pub for table t")
        self.standby = stack.enter_context(postgres.Cluster("18", settings=SETTINGS, standby_of=self.primary))
        # pg_basebackup -R writes no database, which the slots' worker needs.
        with self.standby.connect() as connection:
            [(info,)] = connection.execute("show primary_conninfo").fetchall()
            connection.execute("alter system set primary_conninfo = '{}'".format(f"{info} dbname=postgres".replace("'", "''")))
            connection.execute("select pg_reload_conf()")
        hosts = ",".join(str(each.directory) for each in (self.primary, self.standby))
        ports = ",".join(str(each.port) for each in (self.primary, self.standby))
        dsn = f"host={hosts} port={ports} user=postgres dbname=postgres target_session_attrs=read-write"
        self.config = LauncherConfig(
            SLOT,
            staging,
            ("pub",),
            ("-d", dsn),
            create_slot=True,
            available_now=True,
            seal=SealPolicy(seal_interval_s=0.05),
        )

    def execute(self, *sql: str) -> list[Any]:
        return execute(self.primary, *sql)

    def land(self, **changes: Any) -> None:
        with Launcher(replace(self.config, **changes)) as launcher:
            launcher.wait()

    def await_standby(self, *, is_landing: bool = False) -> None:
        """Wait until the standby has all WAL, and a copy of the slot that would survive a promotion."""
        [(lsn,)] = self.execute("select pg_current_wal_lsn()")
        until(lambda: execute(self.standby, f"select pg_last_wal_replay_lsn() >= '{lsn}'") == [(True,)])
        ready = f"select true from pg_replication_slots where slot_name = '{SLOT}' and synced and not temporary"

        def is_ready() -> bool:
            # The copy becomes permanent when the slot on the primary has moved beyond the WAL that the standby keeps for it.
            self.execute("select pg_log_standby_snapshot()")
            if not is_landing:
                self.land()
            return execute(self.standby, ready) == [(True,)]

        until(is_ready, "a copy of the slot")

    def leave_standby_behind(self) -> None:
        """Land ten rows. Then the primary goes on with row 666, which the standby never gets."""
        self.land()
        self.execute("insert into t select generate_series(1, 10)")
        self.land()
        self.await_standby()
        self.standby.halt()
        self.execute("insert into t values (666)", "select pg_create_restore_point('more WAL')")

    def fail_over(self) -> None:
        """Stop the primary, and promote the standby, which was stopped."""
        self.primary.halt()
        self.standby.resume()
        self.standby.promote()

    def landed(self) -> list[int]:
        tables, _ = replay(self.config.staging)
        return sorted(int(key) for key in tables.get("t", {}))

    def rows(self, server: postgres.Cluster) -> list[int]:
        return [row for (row,) in execute(server, "select id from t order by id")]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, tmp_path / "staging")


def test_the_log_goes_on_after_a_promotion_and_an_old_primary_is_refused(pair: Pair) -> None:
    pair.land()
    pair.execute("insert into t select generate_series(1, 10)")
    pair.land()
    pair.await_standby()
    with Launcher(replace(pair.config, available_now=False)) as launcher:
        pair.execute("insert into t values (11)")
        until(lambda: launcher.progress.transactions)
        pair.await_standby(is_landing=True)
        pair.primary.halt()
        pair.standby.promote()
        execute(pair.standby, "insert into t values (12)")
        until(lambda: launcher.progress.transactions == 2, deadline_s=120)
    assert pair.landed() == pair.rows(pair.standby) == list(range(1, 13))
    last = list_epochs(pair.config.staging)[-1]
    [(history,)] = execute(pair.standby, "select pg_read_file('pg_wal/00000002.history')")
    [left] = parse_timeline_history(history, 2)
    assert (last.timeline, last.timeline_began_lsn) == (2, left.end_lsn)
    assert not any(epoch.gap for epoch in list_epochs(pair.config.staging))
    pair.land()
    assert pair.landed() == pair.rows(pair.standby)
    pair.standby.halt()
    pair.primary.resume()
    with pytest.raises(StagingError, match="this server is an old primary"):
        pair.land()


def test_changes_that_the_new_primary_never_had_are_a_gap(pair: Pair) -> None:
    pair.leave_standby_behind()
    pair.land()
    assert 666 in pair.landed()
    end = log_end(pair.config.staging)
    assert end is not None
    pair.fail_over()
    execute(pair.standby, "insert into t values (11)")
    with pytest.raises(GapError, match=r"timeline 2 branched off at .* never had these") as caught:
        pair.land()
    assert caught.value.exit_code == 2
    assert f"they are 1 transaction up to {LSN(end.lsn)}, changes of public.t: 1" in caught.value.message
    # Until the new primary's WAL has passed the end of the log, its positions are taken.
    while LSN.parse(execute(pair.standby, "select pg_current_wal_lsn()::text")[0][0]) <= end.lsn:
        execute(pair.standby, "select pg_logical_emit_message(false, 'more', repeat('x', 1000))")
    pair.land(on_gap="resnapshot")
    execute(pair.standby, "insert into t values (12)")
    pair.land()
    assert 12 in pair.landed()
    [gap] = [epoch.gap for epoch in list_epochs(pair.config.staging) if epoch.gap is not None]
    assert gap.after_lsn < end.lsn
    assert gap.lost == LostChanges(1, {"public.t": 1}, end.lsn)
    status = run_spark_cli("status", "--staging", str(pair.config.staging)).stdout
    assert "never happened: 1 transaction up to" in status


@pytest.mark.parametrize("is_run", [True, False])
def test_a_copy_of_rows_that_the_new_primary_never_had_is_a_gap(pair: Pair, is_run: bool) -> None:
    """The log ends before the promotion, but a table was copied later: a copy does not wait for the standby.

    `run` knows the tables; `land` only what the log records.
    """
    pair.leave_standby_behind()
    [(copied,)] = pair.execute("select pg_current_wal_lsn()::text")
    pair.fail_over()
    launcher = Launcher(pair.config)
    if is_run:
        launcher.read_copied_lsn = lambda: LSN.parse(copied)
    else:
        staging_copied.record(pair.config.staging, LSN.parse(copied))
    with pytest.raises(GapError, match=f"branched off at .*, but a table was copied on timeline 1 at {copied}"), launcher:
        launcher.wait()
    if is_run:
        pair.land()  # does not know of the copy
        assert pair.landed() == pair.rows(pair.standby)
