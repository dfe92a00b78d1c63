"""The launcher and a slot that was moved or lost, each way in a test: the gap is noticed before anything is confirmed over it."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import postgres
import psycopg
import pytest

from cdcpipe.errors import GapError, LostSlotError
from cdcpipe.lsn import LSN
from spark_sink.launcher.config import LauncherConfig
from spark_sink.launcher.launcher import Launcher
from spark_sink.staging import account
from spark_sink.staging.log import list_epochs, log_end
from support.cli_process import run_spark_cli
from support.landing import check_tables, config_for, confirmed_lsn, land
from support.requirements import need
from support.waiting import until

Connection = psycopg.Connection[Any]


class Source:
    """A table ``t`` that was landed with row 1; row 2 was inserted and is not landed."""

    def __init__(self, database: postgres.Database, connection: Connection, staging: Path) -> None:
        self.database = database
        self.connection = connection
        self.config: LauncherConfig = config_for(database, staging, available_now=True)
        self.slot = self.config.slot
        connection.execute("create table t (id int primary key)")
        self.land()
        self.land(1)
        self.execute("insert into t values (2)")

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(sql)
        return cursor.fetchall() if cursor.description else []

    def land(self, *ids: int, **changes: Any) -> Launcher:
        for each in ids:
            self.execute(f"insert into t values ({each})")
        launcher = Launcher(replace(self.config, **changes))
        with launcher:
            launcher.wait()
        return launcher


@pytest.fixture
def source(database: postgres.Database, tmp_path: Path) -> Iterator[Source]:
    with database.connect() as connection:
        connection.execute("create publication pub for all tables")
        yield Source(database, connection, tmp_path / "staging")


def drop_and_make_again(source: Source) -> None:
    source.execute(f"select pg_drop_replication_slot('{source.slot}')")
    source.execute(f"select pg_create_logical_replication_slot('{source.slot}', 'pgoutput')")


def advance(source: Source) -> None:
    source.execute(f"select pg_replication_slot_advance('{source.slot}', pg_current_wal_lsn())")


def read_by_sql(source: Source) -> None:
    options = "'proto_version', '1', 'publication_names', 'pub'"
    assert source.execute(f"select pg_logical_slot_get_binary_changes('{source.slot}', null, null, {options})")


def read_by_another_pipeline(source: Source) -> None:
    land(replace(source.config, staging=source.config.staging.with_name("other")))


WAYS = [drop_and_make_again, advance, read_by_sql, read_by_another_pipeline]


@pytest.mark.parametrize("move", WAYS)
def test_a_slot_that_was_moved_is_a_gap(source: Source, move: Callable[[Source], None]):
    end = log_end(source.config.staging)
    move(source)
    moved_to = confirmed_lsn(source.database)
    source.execute("insert into t values (3)")
    for _ in range(2):
        with pytest.raises(GapError) as caught:
            source.land()
        assert caught.value.exit_code == 2
        assert str(LSN(moved_to)) in caught.value.message
        assert "of WAL lie between" in caught.value.message
        assert "--on-gap resnapshot" in (caught.value.hint or "")
        assert log_end(source.config.staging) == end
        assert confirmed_lsn(source.database) == moved_to  # nothing was confirmed over the gap
    source.land(on_gap="resnapshot")
    [gap] = [epoch.gap for epoch in list_epochs(source.config.staging) if epoch.gap is not None]
    assert end is not None
    assert end.lsn <= gap.after_lsn < moved_to
    reached = log_end(source.config.staging)
    assert reached is not None
    assert reached.lsn > moved_to
    source.land(4)  # the gap is passed: the next run is as usual
    with pytest.raises(AssertionError):  # row 2 never came; the tables have to be copied anew
        check_tables(source.database, source.config.staging, "t")


def test_a_slot_that_is_gone_is_a_gap_and_is_not_made_again_without_a_word(source: Source):
    source.execute(f"select pg_drop_replication_slot('{source.slot}')")
    with pytest.raises(GapError, match="does not exist any more"):
        source.land()
    assert source.execute(f"select 1 from pg_replication_slots where slot_name = '{source.slot}'") == []
    source.land(3, on_gap="resnapshot")
    assert [epoch.gap is not None for epoch in list_epochs(source.config.staging)].count(True) == 1


def test_a_lost_slot_is_a_gap_that_resnapshot_passes(tmp_path: Path):
    """The server invalidates the slot while the launcher streams. Another try is of no use, and the user can go on with -c."""
    need("18")
    settings = {"max_slot_wal_keep_size": "16MB", "min_wal_size": "32MB", "max_wal_size": "48MB"}
    with postgres.Cluster("18", settings=settings) as cluster, cluster.database() as database, database.connect() as connection:
        connection.execute("create publication pub for all tables")
        source = Source(database, connection, tmp_path / "staging")
        launcher = Launcher(replace(source.config, available_now=False)).start()
        until(lambda: launcher.progress.transactions)

        def is_lost() -> bool:
            for _ in range(5):  # faster than the streamer confirms idle positions
                source.execute("select pg_current_xact_id()")
                source.execute("select pg_switch_wal()")
            source.execute("checkpoint")
            return launcher.has_ended

        until(is_lost)
        with pytest.raises(LostSlotError, match="is lost") as caught:
            launcher.wait(0)
        assert caught.value.exit_code == 2
        assert "-c --on-gap resnapshot" in (caught.value.hint or "")
        with pytest.raises(LostSlotError):  # without -c, nothing makes another slot
            source.land(create_slot=False, on_gap="resnapshot")
        source.land(3, on_gap="resnapshot")
        assert [epoch.gap is not None for epoch in list_epochs(source.config.staging)].count(True) == 1
        source.land(4)


def test_an_older_copy_of_the_staging_directory_is_a_gap(source: Source):
    staging = source.config.staging
    copy = staging.with_name("copy")
    shutil.copytree(staging, copy)
    source.land()
    shutil.rmtree(staging)
    copy.rename(staging)
    with pytest.raises(GapError, match="the log has everything only up to"):
        source.land()


def test_a_slot_that_is_behind_the_log_is_no_gap(source: Source):
    """What the server sends again is skipped: a slot's position may be lost in a crash of the server."""
    copied = f"{source.slot}_copy"
    source.execute(f"select pg_copy_logical_replication_slot('{source.slot}', '{copied}')")
    source.land()
    source.execute(f"select pg_drop_replication_slot('{source.slot}')")
    source.execute(f"select pg_copy_logical_replication_slot('{copied}', '{source.slot}')")
    source.land(3)
    check_tables(source.database, source.config.staging, "t")
    assert [epoch.gap for epoch in list_epochs(source.config.staging)] == [None] * len(list_epochs(source.config.staging))


def test_idle_positions_are_in_the_account_before_they_are_confirmed(source: Source):
    source.land()
    for _ in range(3):
        source.execute("create temporary table other as select generate_series(1, 1000); drop table other")
        source.land()
        assert account.read(source.config.staging).lsn >= confirmed_lsn(source.database)
    check_tables(source.database, source.config.staging, "t")


def move_while_the_streamer_is_away(source: Source) -> None:
    """End the walsender, and move the slot before the launcher has started the next one."""
    active = f"select active_pid from pg_replication_slots where slot_name = '{source.slot}' and active"
    while True:
        with source.connection.transaction():
            source.execute("insert into t select max(id) + 1 from t")
            source.execute(f"select pg_terminate_backend(active_pid) from ({active}) s")
        until(lambda: not source.execute(active))
        try:
            advance(source)
        except psycopg.errors.ObjectInUse:  # the launcher was faster
            continue
        return


def test_a_gap_between_two_streamers(source: Source):
    launcher = Launcher(replace(source.config, available_now=False)).start()
    until(lambda: launcher.progress.transactions)
    move_while_the_streamer_is_away(source)
    with pytest.raises(GapError):
        launcher.wait(60)
    with Launcher(replace(source.config, available_now=False, on_gap="resnapshot")) as launcher:
        until(lambda: source.execute(f"select 1 from pg_replication_slots where slot_name = '{source.slot}' and active"))
        move_while_the_streamer_is_away(source)
        until(lambda: launcher.progress.gaps == 2)  # the one that the first launcher had found, and this one
        source.execute("insert into t select max(id) + 1 from t")
        until(lambda: launcher.progress.transactions)
    assert [epoch.gap is not None for epoch in list_epochs(source.config.staging)].count(True) == 2


def test_land_ends_with_exit_code_2_and_says_what_to_do(source: Source):
    advance(source)
    arguments = [
        "land",
        "-d",
        source.database.dsn,
        "-S",
        source.slot,
        "--publication",
        "pub",
        "--staging",
        str(source.config.staging),
    ]
    done = run_spark_cli(*arguments, "--available-now")
    assert done.returncode == 2
    assert "changes are missing: slot" in done.stderr
    assert "hint:" in done.stderr
    assert run_spark_cli(*arguments, "--available-now", "--on-gap", "resnapshot").returncode == 0
    status = run_spark_cli("status", "--staging", str(source.config.staging)).stdout
    assert "gap        from" in status
