"""`run --on-gap resnapshot`: after a gap all tables are copied anew, and what is not known is refused."""

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import postgres
import psycopg
import pytest

import spark_sink
from cdcpipe.errors import CdcpipeError, GapError, InvalidArgumentsError
from cdcpipe.lsn import LSN
from spark_sink.client.exported import SnapshotError
from spark_sink.snapshot.table import copy_table
from spark_sink.staging.log import log_end
from spark_sink.staging.readers import register_reader, remove_consumed
from spark_sink.status.check import Limits, State, judge
from spark_sink.status.report import Tables, describe
from spark_sink.warehouse import gaps
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.initial_copy import is_unfinished
from spark_sink.warehouse.warehouse import READER, Warehouse
from support.road import KEEP
from support.waiting import SPARK_DEADLINE_S, until

pytestmark = pytest.mark.spark


class Shop:
    """The tables ``kept`` and ``quiet`` and the run that follows them; ``quiet`` has no change after the gap."""

    def __init__(self, spark: Any, database: postgres.Database, connection: psycopg.Connection[Any], root: Path) -> None:
        self.spark, self.connection = spark, connection
        self.staging, self.warehouse = root / "staging", root / "warehouse"
        self.slot = f"gap_{database.name}"[:63]
        launcher = spark_sink.LauncherConfig(
            self.slot, self.staging, ("p",), ("-d", database.dsn), create_slot=True, available_now=True
        )
        self.config = spark_sink.RunConfig(launcher, self.warehouse, snapshot="initial", optimize_interval_s=None)

    def execute(self, *sql: str) -> None:
        for each in sql:
            self.connection.execute(each)

    def value(self, sql: str) -> Any:
        return self.connection.execute(sql).fetchall()[0][0]

    def run(self, **changes: Any) -> None:
        spark_sink.run(replace(self.config, launcher=replace(self.config.launcher, **changes)), self.spark)

    def lsn(self) -> LSN:
        return LSN.parse(self.value("select pg_current_wal_lsn()::text"))

    @property
    def reached(self) -> LSN:
        position = Warehouse.existing(self.warehouse).source().position
        assert position is not None
        return LSN(position.lsn)

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        return sorted(map(tuple, spark_sink.read_replica(self.spark, self.warehouse, f"public.{table}").collect()))

    def rows_as_of(self, table: str, lsn: LSN | datetime) -> list[tuple[Any, ...]]:
        return sorted(map(tuple, spark_sink.read_as_of(self.spark, self.warehouse, f"public.{table}", lsn).collect()))

    def check(self) -> None:
        for table in ("kept", "quiet"):
            assert self.rows(table) == sorted(self.connection.execute(f"select * from {table}").fetchall())

    def state(self) -> State:
        house = Warehouse.existing(self.warehouse)
        return judge(describe(self.staging, Tables(house)) | {"launcher": {}}, Limits()).state


@pytest.fixture
def new_shop(spark: Any, database: postgres.Database, tmp_path: Path) -> Any:
    with database.connect() as connection:
        for table in ("kept", "quiet"):
            connection.execute(f"create table {table} (id int primary key, v text)")
            connection.execute(f"insert into {table} select n, 'copied' from generate_series(1, 4) n")
        connection.execute("create publication p for table kept, quiet")
        yield Shop(spark, database, connection, tmp_path)


@pytest.fixture
def shop(new_shop: Shop) -> Shop:
    new_shop.run()
    new_shop.execute("insert into kept values (10, 'streamed')", "delete from quiet where id = 4")
    new_shop.run()
    new_shop.check()
    return new_shop


def advance(shop: Shop) -> None:
    shop.execute(f"select pg_replication_slot_advance('{shop.slot}', pg_current_wal_lsn())")


def drop(shop: Shop) -> None:
    shop.execute(f"select pg_drop_replication_slot('{shop.slot}')")


@pytest.mark.parametrize("lose", [advance, pytest.param(drop, marks=pytest.mark.slow)])
def test_all_tables_are_copied_anew_after_a_gap(shop: Shop, lose: Callable[[Shop], None]) -> None:
    before = shop.reached
    known = {table: shop.rows(table) for table in ("kept", "quiet")}
    shop.execute(
        "update kept set v = 'lost' where id = 1", "delete from quiet where id = 1", "insert into quiet values (7, 'lost')"
    )
    lose(shop)
    with pytest.raises(GapError):
        shop.run()
    assert {table: shop.rows(table) for table in ("kept", "quiet")} == known
    inside, time_inside = shop.lsn(), shop.value("select clock_timestamp()")
    shop.execute("insert into kept values (11, 'after')")
    shop.run(on_gap="resnapshot")
    shop.check()
    assert shop.state() == State.OK
    shop.execute("update kept set v = 'later' where id = 11", "insert into quiet values (8, 'later')")
    shop.run()
    shop.check()

    for table in ("kept", "quiet"):
        assert shop.rows_as_of(table, before) == known[table]
        for at in (inside, time_inside):
            with pytest.raises(InvalidArgumentsError, match=r"are not known: changes are missing after .* since its copy at"):
                shop.rows_as_of(table, at)
        assert shop.rows_as_of(table, shop.reached) == shop.rows(table)
    [gap] = describe(shop.staging, Tables(Warehouse.existing(shop.warehouse)))["gaps"]
    assert gap["healed"] is not None
    assert shop.slot in gap["cause"]


def test_a_killed_healing_is_finished_by_the_next_run(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.execute("update kept set v = 'lost'", "update quiet set v = 'lost'")
    advance(shop)
    with monkeypatch.context() as patch:
        patch.setattr("spark_sink.snapshot.gap.GapSnapshot._choose", fail)
        with pytest.raises(InterruptedError, match="the copy begins"):
            shop.run(on_gap="resnapshot")
    assert shop.state() == State.CRITICAL
    assert gaps.open_gap(Warehouse.existing(shop.warehouse)) is not None
    with pytest.raises(AssertionError):
        shop.check()
    shop.run()  # the decision was made, and is written down
    shop.check()
    assert shop.state() == State.OK


def test_a_pipeline_alone_warns_until_a_run_has_copied_the_tables(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    shop.execute("update kept set v = 'lost'")
    advance(shop)
    with spark_sink.Launcher(replace(shop.config.launcher, on_gap="resnapshot")) as launcher:
        launcher.wait()
    for _ in range(2):
        caplog.clear()
        spark_sink.Pipeline(shop.spark, shop.staging, shop.warehouse).process_available()
        assert "until a run has copied them anew" in caplog.text
        assert shop.state() == State.CRITICAL
    shop.run()
    shop.check()
    caplog.clear()
    spark_sink.Pipeline(shop.spark, shop.staging, shop.warehouse).process_available()
    assert "copied them anew" not in caplog.text


def fail(*_: Any) -> Any:
    raise InterruptedError("the copy begins")


def test_a_run_ends_where_the_log_has_changes_before_a_gap_and_none_after_it(shop: Shop) -> None:
    shop.execute("insert into kept values (12, 'in the log')")
    with spark_sink.Launcher(shop.config.launcher) as launcher:
        assert launcher.wait(SPARK_DEADLINE_S)
    drop(shop)
    config = replace(shop.config, launcher=replace(shop.config.launcher, on_gap="resnapshot"))
    with spark_sink.Runner(config, shop.spark) as runner:
        until(lambda: runner.progress.tables is not None and runner.launcher.has_ended, deadline_s=SPARK_DEADLINE_S)
        assert runner.wait(SPARK_DEADLINE_S)
    shop.check()
    end = log_end(shop.staging)
    assert end is not None
    assert shop.reached == end.lsn
    assert shop.state() == State.OK


def test_a_gap_while_it_runs(shop: Shop) -> None:
    config = replace(shop.config, launcher=replace(shop.config.launcher, available_now=False, on_gap="resnapshot"))
    active = f"select active_pid from pg_replication_slots where slot_name = '{shop.slot}' and active"
    with spark_sink.Runner(config, shop.spark) as runner:
        until(lambda: runner.progress.tables is not None, deadline_s=SPARK_DEADLINE_S)
        while True:
            with shop.connection.transaction():
                shop.execute("update quiet set v = v || 'x'", f"select pg_terminate_backend(active_pid) from ({active}) s")
            until(lambda: not shop.connection.execute(active).fetchall())
            try:
                advance(shop)
            except psycopg.errors.ObjectInUse:  # the launcher was faster
                continue
            break
        until(
            lambda: gaps.read(Warehouse.existing(shop.warehouse)) and not gaps.open_gap(Warehouse.existing(shop.warehouse)),
            deadline_s=SPARK_DEADLINE_S,
        )
    shop.run()
    shop.check()


def test_an_older_copy_of_the_staging_directory(shop: Shop) -> None:
    copy = shutil.copytree(shop.staging, shop.staging.with_name("copy"))
    shop.execute("insert into kept values (20, 'after the copy')")
    shop.run()
    shutil.rmtree(shop.staging)
    copy.rename(shop.staging)
    shop.execute("insert into kept values (21, 'later')")
    with pytest.raises(GapError, match="staging directory is an older copy"):
        shop.run()
    shop.run(on_gap="resnapshot")
    shop.check()


def test_a_launcher_goes_on_with_older_copies_of_server_and_staging_directory(shop: Shop) -> None:
    """It passes the position of the tables before they are asked. Its epoch has the number of theirs."""
    staging = shutil.copytree(shop.staging, shop.staging.with_name("copy"))
    shop.execute(f"select pg_copy_logical_replication_slot('{shop.slot}', '{shop.slot}_copy')")
    shop.execute("insert into kept values (20, 'after the copy')")
    shop.run()
    shutil.rmtree(shop.staging)
    staging.rename(shop.staging)
    drop(shop)
    shop.execute(f"select pg_copy_logical_replication_slot('{shop.slot}_copy', '{shop.slot}')")
    shop.execute(f"select pg_drop_replication_slot('{shop.slot}_copy')", "insert into kept values (21, 'later')")
    with spark_sink.Launcher(shop.config.launcher) as launcher:
        assert launcher.wait(SPARK_DEADLINE_S)
    end = log_end(shop.staging)
    assert end is not None
    assert end.lsn > shop.reached
    with pytest.raises(WarehouseError, match=r"the log in .* has other changes there"):
        spark_sink.Pipeline(shop.spark, shop.staging, shop.warehouse).process_available()
    with pytest.raises(GapError, match="a launcher has gone on"):
        shop.run()
    shop.run(on_gap="resnapshot")
    shop.check()
    shop.execute("insert into kept values (22, 'healed')")
    shop.run()
    shop.check()


def test_an_older_copy_of_the_warehouse(shop: Shop) -> None:
    """While the log has the segments, the tables catch up. Later the message says which of the two is old."""
    copy = shutil.copytree(shop.warehouse, shop.warehouse.with_name("copy"))
    for number in (30, 31):
        shop.execute(f"insert into kept values ({number}, 'after the copy')")
        shop.run(retention=KEEP)  # otherwise the second start removes what the tables have
    shutil.rmtree(shop.warehouse)
    shutil.copytree(copy, shop.warehouse)
    shop.run()  # its start removes only what this warehouse has
    shop.check()
    end = log_end(shop.staging)
    assert end is not None
    register_reader(shop.staging, READER, end)
    assert remove_consumed(shop.staging)
    shutil.rmtree(shop.warehouse)
    copy.rename(shop.warehouse)
    with pytest.raises(WarehouseError, match="the warehouse is an older copy") as caught:
        shop.run()
    assert f"To keep what this one has, move everything but masks.json out of {shop.staging}" in (caught.value.hint or "")
    at = shop.reached
    known = shop.rows_as_of("kept", at)
    shop.staging.rename(shop.staging.with_name("away"))
    with pytest.raises(GapError, match=r"their log, .*, is not there"):
        shop.run()
    shop.run(on_gap="resnapshot")
    shop.check()
    assert shop.rows_as_of("kept", at) == known


def go_on(shop: Shop, *keys: int) -> None:
    """Run once more for each new row: the gap has no later effect."""
    for key in keys:
        shop.execute(f"insert into kept values ({key}, 'after')")
        shop.run()
        shop.check()


def test_a_lost_staging_directory_is_replaced_by_an_empty_one(shop: Shop) -> None:
    """What only the lost log had is a gap. If the server still has everything that the tables lack, the new log begins there."""
    shop.execute("insert into kept values (40, 'only in the log')")
    with spark_sink.Launcher(shop.config.launcher) as launcher:
        assert launcher.wait(SPARK_DEADLINE_S)
    lost = shop.staging.rename(shop.staging.with_name("lost"))
    with pytest.raises(GapError, match=rf"their log, {shop.staging}, is not there"):
        shop.run()
    assert not list(shop.staging.glob("0*"))
    shop.run(on_gap="resnapshot")
    shop.check()
    go_on(shop, 41, 42)
    shutil.rmtree(lost)

    drop(shop)
    shutil.rmtree(shop.staging)
    with pytest.raises(GapError, match=r"slot .* does not exist any more"):
        shop.run()
    assert shop.value(f"select count(*) from pg_replication_slots where slot_name = '{shop.slot}'") == 0
    shop.run(on_gap="resnapshot")
    shop.check()


@pytest.fixture
def half_copied(new_shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """Return a shop whose first run has copied ``kept`` and was killed. Its launcher had landed and confirmed later changes."""
    is_copied = threading.Event()

    def copy_kept(copying: Any, plan: Any, table: Any) -> int:
        if table.name == "quiet":
            assert is_copied.wait(SPARK_DEADLINE_S)
            raise SnapshotError("killed")
        count = copy_table(copying, plan, table)
        is_copied.set()
        return count

    with monkeypatch.context() as patch:
        patch.setattr("spark_sink.snapshot.copy.copy_table", copy_kept)
        with pytest.raises(CdcpipeError, match="killed"):
            new_shop.run()
    assert [table.name for table in Warehouse.existing(new_shop.warehouse).tables()] == ["kept"]
    new_shop.execute("update kept set v = 'in the log' where id = 1", "update quiet set v = 'in the log' where id = 1")
    with spark_sink.Launcher(new_shop.config.launcher) as launcher:
        assert launcher.wait(SPARK_DEADLINE_S)
    return new_shop


def test_a_staging_directory_that_is_lost_before_all_tables_are_copied(half_copied: Shop) -> None:
    """The tables had no position, so the new log was taken for their first one: what was copied lacked the changes in between."""
    shop = half_copied
    shutil.rmtree(shop.staging)
    for _ in range(2):
        with pytest.raises(GapError, match=r"are at .* \(their oldest copy\); their log, .*, is not there, and the slot is at"):
            shop.run()
    shop.run(on_gap="resnapshot")
    shop.check()
    go_on(shop, 41, 42)


def test_a_slot_that_is_gone_before_all_tables_are_copied(half_copied: Shop) -> None:
    """The first copy made another slot before the launcher had judged: also on a wrong server, and without --on-gap resnapshot."""
    shop = half_copied
    drop(shop)
    for _ in range(2):
        with pytest.raises(GapError, match=r"slot .* does not exist any more"):
            shop.run()
    assert shop.value(f"select count(*) from pg_replication_slots where slot_name = '{shop.slot}'") == 0
    shop.execute("delete from kept where id = 2", "delete from quiet where id = 2")  # without a slot
    shop.run(on_gap="resnapshot")
    shop.check()
    assert not is_unfinished(Warehouse.existing(shop.warehouse))
    go_on(shop, 41, 42)


def test_a_log_that_was_begun_without_the_tables(shop: Shop) -> None:
    """The staging directory was lost, and `land` has begun another one before the next run: it knows nothing of the tables."""
    shop.execute("insert into kept values (40, 'only in the lost log')")
    with spark_sink.Launcher(shop.config.launcher) as launcher:
        assert launcher.wait(SPARK_DEADLINE_S)
    shutil.rmtree(shop.staging)
    shop.execute("insert into kept values (41, 'only in the new log')")
    with spark_sink.Launcher(shop.config.launcher) as launcher:
        assert launcher.wait(SPARK_DEADLINE_S)
    for _ in range(2):
        with pytest.raises(GapError, match=r"the tables are at .*, but the log begins at"):
            shop.run()
    shop.run(on_gap="resnapshot")
    shop.check()
    go_on(shop, 42, 43)


def test_a_run_that_is_given_another_directory_changes_nothing(shop: Shop) -> None:
    config, sizes = shop.config, {path: path.stat().st_size for path in shop.warehouse.rglob("*.json")}
    shop.execute("insert into kept values (50, 'next')")
    wrong = {
        "/stagign has no log": replace(config, launcher=replace(config.launcher, staging=shop.staging.with_name("stagign"))),
        "/warehose, which is new, would not": replace(config, snapshot=None, warehouse=shop.warehouse.with_name("warehose")),
        "/warehouse is a warehouse": replace(config, launcher=replace(config.launcher, staging=shop.warehouse)),
        "but -S is 'another'": replace(config, launcher=replace(config.launcher, slot="another")),
    }
    for said, each in wrong.items():
        with pytest.raises(InvalidArgumentsError, match=said):
            spark_sink.run(each, shop.spark)
    assert {path.name for path in shop.staging.parent.iterdir()} == {"staging", "warehouse"}
    assert {path: path.stat().st_size for path in shop.warehouse.rglob("*.json")} == sizes
    assert shop.connection.execute("select slot_name from pg_replication_slots where slot_name = 'another'").fetchall() == []
    shop.run()
    shop.check()


def test_a_lost_warehouse_is_made_again(shop: Shop) -> None:
    """The log does not go back to its beginning any more. A copy of the rows takes the place of what it lacks."""
    for number in (60, 61):
        shop.execute(f"insert into kept values ({number}, 'before')")
        shop.run()
    end = log_end(shop.staging)
    assert end is not None
    register_reader(shop.staging, READER, end, str(shop.warehouse))
    assert remove_consumed(shop.staging)
    shutil.rmtree(shop.warehouse)
    shop.config = replace(shop.config, snapshot="never")
    with pytest.raises(WarehouseError, match="does not go back to its beginning") as caught:
        shop.run()
    assert "--snapshot initial" in (caught.value.hint or "")
    shutil.rmtree(shop.warehouse)
    shop.config = replace(shop.config, snapshot=None)  # with -c
    shop.execute("insert into kept values (62, 'meanwhile')")
    shop.run()
    shop.check()
    shop.execute("update kept set v = 'later' where id = 60")
    shop.run()
    shop.check()

    shutil.rmtree(shop.warehouse)
    drop(shop)
    shop.run(on_gap="resnapshot")  # the copies after the gap are those with which the tables begin
    shop.check()
