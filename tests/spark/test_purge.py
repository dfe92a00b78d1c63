"""Old changes are removed from changelogs: which ones go, which ones stay, and what is refused afterwards."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import postgres
import pytest
from click.testing import CliRunner
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.lsn import LSN
from spark_sink.changelog import delta_changelogs
from spark_sink.changelog.tables import changelogs_of
from spark_sink.commands import purge as purge_command
from spark_sink.delta import sql as delta
from spark_sink.delta.compaction import compact
from spark_sink.replica import as_of, history_table, merge
from spark_sink.replica.current import read_replica
from spark_sink.schema.table import MESSAGES, Table, Version
from spark_sink.schema.types import MESSAGE_SCHEMA
from spark_sink.staging.log import Position
from spark_sink.upkeep import purge as purge_module
from spark_sink.upkeep import upkeep
from spark_sink.upkeep.purge import Purged, purge, purge_histories
from spark_sink.upkeep.upkeep import Upkeep
from spark_sink.warehouse import appends, landed_snapshots, purged_changes, wanted_copies
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import EPOCH, KEY, SCHEMA, TABLE, add, append, schema_of
from support.cli_process import spark_cli
from support.logging_state import logging_as_before
from support.snapshots import TableCopies

pytestmark = pytest.mark.spark

NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)


def change(op: str, lsn: int, value: int | None, row: int = 1) -> tuple[Any, ...]:
    """Return a change of one row. Each LSN is a second."""
    return (1, row, value, None, None, op, 1, lsn, 0, 1, NEW_YEAR + timedelta(seconds=lsn), None, None, None)


CHANGES = [
    change("insert", 10, 10),
    change("insert", 20, 20, row=2),
    change("update", 30, 30),
    change("update", 40, 40),
    change("update", 50, 50, row=2),
]


def warehouse(root: Path, table_format: str) -> Warehouse:
    made = Warehouse(root, table_format)
    made.open(EPOCH)
    for lsn in (0, 50):
        made.record(Position(1, lsn))
    made.write_versions(TABLE, [Version(0, 0, 7, KEY, KEY)])
    return made


MESSAGES_SENT = [
    ("p", b"", False, 1, 15, 0, 15, None, None),
    ("p", b"", True, 1, 30, 0, 29, 1, NEW_YEAR + timedelta(seconds=30)),
]


def add_messages(spark: SparkSession, house: Warehouse, messages: list[tuple[Any, ...]], start: int, end: int) -> None:
    append(spark, house, messages, MESSAGE_SCHEMA, Position(1, start), Position(1, end), MESSAGES)


def current(rows: Any) -> dict[int, int]:
    return {row["id"]: row["a"] for row in rows.collect()}


def places(spark: SparkSession, house: Warehouse, table: Table = TABLE) -> list[int]:
    return sorted(row[0] for row in changelogs_of(spark, house).read(table).select("_cdc_end_lsn").collect())


def streamed(spark: SparkSession, house: Warehouse, checkpoint: Path) -> list[int]:
    """Return the places of the changes that a Delta stream of the changelog gets, as docs/spark/tables.md tells to read it."""
    options = {"startingVersion": "0", "skipChangeCommits": "true"}
    changes = spark.readStream.format("delta").options(**options).load(str(house.changelog(TABLE))).select("_cdc_end_lsn")
    query = changes.writeStream.format("memory").queryName("streamed").trigger(availableNow=True)
    query.option("checkpointLocation", str(checkpoint)).start().awaitTermination()
    return sorted(row[0] for row in spark.table("streamed").collect())


def test_a_stream_of_a_changelog_goes_on_after_a_new_column(spark: SparkSession, tmp_path: Path) -> None:
    """docs/spark/tables.md says with which error it ends, and that the same query then gets the other changes."""
    house = warehouse(tmp_path / "warehouse", "delta")
    place, seen = 0, []

    def add_row(columns: str, *values: int) -> None:
        nonlocal place
        schema = schema_of("id int").replace("id int", columns, 1)
        row = (*values, "insert", 1, place + 10, 0, 1, NEW_YEAR, None, None, None)
        append(spark, house, [row], schema, Position(1, place), Position(1, place + 10))
        place += 10

    def keep(rows: Any, _: int) -> None:
        own = [name for name in rows.columns if not name.startswith("_cdc_")]
        seen.extend(tuple(row) for row in rows.select([f"`{name}`" for name in own]).orderBy("id").collect())

    def start() -> Any:
        changes = spark.readStream.format("delta").option("skipChangeCommits", "true").load(str(house.changelog(TABLE)))
        return changes.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / "checkpoint")).start()

    def end(query: Any) -> None:
        with pytest.raises(StreamingQueryException, match="DELTA_SCHEMA_CHANGED_WITH_VERSION"):
            query.processAllAvailable()
        query.stop()

    add_row("id int", 1)
    query = start()
    query.processAllAvailable()
    add_row("id int, a int", 2, 2)
    end(query)
    query = start()
    query.processAllAvailable()
    add_row("id int, a bigint", 3, 1 << 40)
    add_row("id int, a bigint, `unit price` int", 4, 4, 4)  # takes column mapping
    end(query)
    query = start()
    query.processAllAvailable()
    query.stop()
    assert seen == [(1,), (2, 2), (3, 1 << 40, None), (4, 4, 4)]


def assert_refused(what: Any, *arguments: Any, **options: Any) -> None:
    # A place of as-of is an argument of the user.
    error = InvalidArgumentsError if what is as_of.read_as_of else WarehouseError
    with pytest.raises(error, match="changelog was purged up to") as caught:
        what(*arguments, **options)
    assert caught.value.hint == "cdcpipe-spark snapshot --table public.t gives the table a new beginning"


def test_delta(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = warehouse(tmp_path, "delta")
    for start, end in ((0, 25), (25, 50)):
        add(spark, house, CHANGES, start, end)
    add_messages(spark, house, MESSAGES_SENT, 0, 50)

    # Nothing that the replica does not have: there is none yet.
    assert purge(spark, tmp_path, LSN(31), tables=["public.t"]) == [Purged(TABLE, 0, 3, "there is no replica")]
    assert purged_changes.last_lsn(house, TABLE) == 0
    merge.bring(spark, house, TABLE, Position(1, 30))
    wanted = [Purged(TABLE, 3, 1, "the replica is at 0/1E"), Purged(MESSAGES, 2)]
    assert [(each.rows, each.kept) for each in purge(spark, tmp_path, LSN(41), is_dry_run=True)] == [(3, 1), (2, 0)]
    assert (purged_changes.last_lsn(house, TABLE), len(places(spark, house))) == (0, 5)

    # Killed after the note: nothing has gone, and nobody relies on it.
    history = as_of.read_as_of(spark, tmp_path, "public.t", LSN(20))
    with monkeypatch.context() as patched:
        patched.setattr(delta_changelogs._OldDeltaChanges, "remove", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            purge(spark, tmp_path, LSN(41))
    assert (purged_changes.last_lsn(house, TABLE), len(places(spark, house))) == (30, 5)
    assert_refused(as_of.read_as_of, spark, tmp_path, "public.t", LSN(20))

    assert compact(house.changelog(TABLE), 1 << 20, TableLock(house.root).append) == 2
    found = purge(spark, tmp_path, LSN(41))
    assert streamed(spark, house, tmp_path / "checkpoint") == [10, 20, 30, 40, 50]
    assert [(each.rows, each.kept) for each in found] == [(each.rows, each.kept) for each in wanted]
    assert found[0].reason == "the replica is at 0/1E"
    assert (places(spark, house), places(spark, house, MESSAGES)) == ([40, 50], [])
    assert current(history) == {1: 10, 2: 20}  # who had begun to read goes on with what was there
    staging = tmp_path / "staging"
    staging.mkdir()
    told = json.loads(spark_cli("status", "--warehouse", str(tmp_path), "--staging", str(staging), "--json").stdout)
    (row,) = (each for each in told["tables"] if each["table"] == "public.t")
    assert row["purged"] == "0/1E"

    # The replica goes on; its table's past is gone, and so is what it could be made of again.
    merge.bring(spark, house, TABLE, Position(1, 50))
    assert current(read_replica(spark, tmp_path, "public.t")) == {1: 40, 2: 50}
    for lsn in (20, 50):
        assert_refused(as_of.read_as_of, spark, tmp_path, "public.t", LSN(lsn))
    assert_refused(merge.remake, spark, house, TABLE, Position(1, 50))
    shutil.rmtree(house.replica(TABLE))
    assert_refused(merge.bring, spark, house, TABLE, Position(1, 50))

    # A snapshot is a new beginning, and so is a TRUNCATE.
    house.write_versions(TABLE, [Version(0, 0, 7, KEY, KEY), Version(60, 0, 7, KEY, KEY, snapshot=((1, "id"),))])
    add(spark, house, [change("snapshot", 60, 60), change("update", 70, 70)], 50, 70)
    house.record(Position(1, 70))
    merge.bring(spark, house, TABLE, Position(1, 70))
    assert current(read_replica(spark, tmp_path, "public.t")) == {1: 70}
    assert current(as_of.read_as_of(spark, tmp_path, "public.t", LSN(60))) == {1: 60}
    assert_refused(as_of.read_as_of, spark, tmp_path, "public.t", LSN(59))
    assert purge(spark, tmp_path, NEW_YEAR + timedelta(seconds=61), tables=["public.t"])[0].rows == 3
    assert_refused(as_of.read_as_of, spark, tmp_path, "public.t", LSN(70))
    add(spark, house, [change("truncate", 80, None), change("insert", 90, 90)], 70, 90)
    house.record(Position(1, 90))
    assert current(as_of.read_as_of(spark, tmp_path, "public.t", LSN(90))) == {1: 90}
    assert_refused(as_of.read_as_of, spark, tmp_path, "public.t", LSN(79))


def test_parquet(spark: SparkSession, tmp_path: Path) -> None:
    """In Parquet the current rows come from the changelog. So only changes before a snapshot go, one append at a time."""
    house = warehouse(tmp_path, "parquet")
    for start, end in ((0, 10), (10, 30), (30, 50)):
        add(spark, house, CHANGES, start, end)
    for is_dry_run in (True, False):
        with pytest.raises(WarehouseError, match=r"current rows of public\.t are made of all changes: ") as caught:
            purge(spark, tmp_path, LSN(31), is_dry_run=is_dry_run)
    assert caught.value.hint is not None
    assert "cdcpipe-spark snapshot --table public.t" in caught.value.hint
    frame = spark.createDataFrame([change("snapshot", 45, 45), change("snapshot", 45, 20, row=2)], SCHEMA)
    frame.coalesce(1).write.parquet(str(house.changelog(TABLE) / appends.snapshot_name(Position(1, 45))))
    with pytest.raises(WarehouseError, match="are made of all changes since 0/2D: "):
        purge(spark, tmp_path, LSN(46))
    reason = "they are in one append with later ones, or in the newest"
    for is_dry_run in (True, False):
        assert purge(spark, tmp_path, LSN(45), is_dry_run=is_dry_run) == [Purged(TABLE, 3, 1, reason)]
    assert places(spark, house) == [40, 45, 45, 50]
    assert not (house.changelog(TABLE) / "_purged").exists()
    assert current(read_replica(spark, tmp_path, "public.t")) == {1: 45, 2: 50}
    assert current(as_of.read_as_of(spark, tmp_path, "public.t", LSN(45))) == {1: 45, 2: 20}
    assert_refused(as_of.read_as_of, spark, tmp_path, "public.t", LSN(44))
    # The newest append says how far the changelog is, also if it is older than the snapshot.
    house.record(Position(1, 60))
    frame = spark.createDataFrame([change("snapshot", 60, 60)], SCHEMA)
    frame.coalesce(1).write.parquet(str(house.changelog(TABLE) / appends.snapshot_name(Position(1, 60))))
    assert purge(spark, tmp_path, LSN(60)) == [Purged(TABLE, 2, 2, reason)]
    assert (places(spark, house), house.format.lsn(house.changelog(TABLE))) == ([40, 50, 60], 50)


def test_logical_messages_in_parquet(spark: SparkSession, tmp_path: Path) -> None:
    """No current rows come from messages. So old messages go."""
    house = warehouse(tmp_path, "parquet")
    for message, start, end in zip(MESSAGES_SENT, (0, 20), (20, 50), strict=True):
        add_messages(spark, house, [message], start, end)
    reason = "they are in one append with later ones, or in the newest"
    assert purge(spark, tmp_path, LSN(41)) == [Purged(MESSAGES, 1, 1, reason)]
    assert places(spark, house, MESSAGES) == [30]


def test_a_transaction_far_ahead_that_stops_the_purge_is_named_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its time may have come already: the purge waits until it is as old as all others."""
    monkeypatch.setattr(purge_module, "_warned", set())
    house = warehouse(tmp_path, "delta")
    ahead = NEW_YEAR + timedelta(days=100)
    add(spark, house, [(*each[:10], ahead if each[7] == 20 else each[10], *each[11:]) for each in CHANGES], 0, 50)
    for _ in range(2):
        assert purge_module._place(spark, house, NEW_YEAR + timedelta(seconds=51)) == 19
    (message,) = caplog.messages
    assert message.startswith("no change from 0/14 on is removed by its age")
    assert "2026-04-11 00:00:00+00:00" in message


def test_a_transaction_far_ahead_that_stops_the_purge_of_histories_is_named_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(purge_module, "_warned", set())
    house, lock = warehouse(tmp_path, "delta"), TableLock(tmp_path)
    ahead = NEW_YEAR + timedelta(days=100)
    add(spark, house, [(*each[:10], ahead if each[7] == 30 else each[10], *each[11:]) for each in CHANGES], 0, 50)
    history_table.bring(spark, house, TABLE, Position(1, 50), lock)
    for seconds in (30, 35, 51, 51):  # until the first version after it is old, nothing stays for its sake
        assert purge_histories(spark, house, lock, NEW_YEAR + timedelta(seconds=seconds)) == []
        assert len(caplog.messages) == (seconds == 51)
    assert caplog.messages[0].startswith("no version of public.t that ended at 0/1E or later is removed by its age until the time")
    assert purge_histories(spark, house, lock, ahead + timedelta(seconds=1)) == [Purged(TABLE, 3)]


def test_spark_reads_only_what_may_have_something_old(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each purge started three jobs for each table, also for those of the source that were dropped years ago."""
    house, lock = warehouse(tmp_path, "delta"), TableLock(tmp_path)
    add(spark, house, CHANGES, 0, 50)
    add_messages(spark, house, MESSAGES_SENT[1:], 0, 50)
    merge.bring(spark, house, TABLE, Position(1, 50))
    history_table.bring(spark, house, TABLE, Position(1, 50), lock)
    read: list[str] = []
    read_changelog, read_history = delta.read_as_is, delta.read
    monkeypatch.setattr(delta, "read_as_is", lambda spark, path: read.append(path.name) or read_changelog(spark, path))
    monkeypatch.setattr(delta, "read", lambda spark, path: read.append(path.name) or read_history(spark, path))

    def purge_up_to(seconds: int) -> tuple[list[Purged], list[str]]:
        read.clear()
        before = NEW_YEAR + timedelta(seconds=seconds)
        found = [*purge(spark, tmp_path, before), *purge_histories(spark, house, lock, before)]
        return [each for each in found if each.rows], read

    assert purge_up_to(10) == ([], [])
    assert purge_up_to(20) == ([Purged(TABLE, 1, 0, "the replica is at 0/A")], ["public.t"] * 2)  # for the place, and the rows
    found, read_then = purge_up_to(100)
    assert [(each.table, each.rows) for each in found] == [(TABLE, 4), (MESSAGES, 1), (TABLE, 3)]
    assert read_then
    assert purge_up_to(200) == ([], ["public.t"])  # the history: its file still has the versions, and a deletion vector


def test_the_place_of_a_time(spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The place is before the first transaction, of any table, that is not older. The times of later transactions do not matter."""
    house = warehouse(tmp_path, "delta")
    early, late = NEW_YEAR + timedelta(seconds=30), NEW_YEAR + timedelta(seconds=35)
    out_of_order = [(*each[:10], {20: late, 40: early}.get(each[7], each[10]), *each[11:]) for each in CHANGES]
    add(spark, house, out_of_order, 0, 50)

    seconds = [(10, 0), (11, 10), (34, 19), (36, 40), (51, 50)]
    times = [NEW_YEAR + timedelta(seconds=second) for second, _ in seconds]
    assert [purge_module._place(spark, house, time) for time in times] == [place for _, place in seconds]
    assert caplog.messages == []  # seconds, and all the more milliseconds, are nothing to warn of
    assert [purge_module._place(spark, house, place) for place in (LSN(41), Position(1, 41))] == [40, 40]
    for looks in (0, 1):
        answers = iter([*[False] * looks, True])
        with pytest.raises(InterruptedError):
            purge_module._place(spark, house, times[-1], lambda answers=answers: next(answers))
    for beyond in (LSN(51), Position(2, 50)):
        with pytest.raises(InvalidArgumentsError, match=r"the tables are at .*, before") as caught:
            purge(spark, tmp_path, beyond)
        assert caught.value.hint == "give 1:0/32 or an earlier one"
    arguments = ("purge", "--warehouse", str(tmp_path), "--before")
    assert "is still to come" in spark_cli(*arguments, "2999-01-01", code=1).stderr
    assert "neither a time nor an LSN" in spark_cli(*arguments, "long ago", code=1).stderr
    assert "has no table 'public.x'" in spark_cli(*arguments, "0/1", "--table", "public.x", code=1).stderr


def test_a_copied_row_is_as_old_as_its_copy(spark: SparkSession, tmp_path: Path) -> None:
    """A copy from a standby of a quiet primary has the time of the last transaction. A purge removed its rows minutes later."""
    house = warehouse(tmp_path, "delta")
    copied_at = int((NEW_YEAR + timedelta(days=3)).timestamp())
    copied = Version(45, 0, 7, KEY, KEY, snapshot=((1, "id"),), copied_at=copied_at)
    clock_was_ahead = replace(copied, end_lsn=42, copied_at=int((datetime.now(UTC) + timedelta(days=400)).timestamp()))
    house.write_versions(TABLE, [Version(0, 0, 7, KEY, KEY), clock_was_ahead, copied])
    add(spark, house, [*CHANGES, change("snapshot", 45, 45)], 0, 50)
    times = [NEW_YEAR + timedelta(days=3, seconds=seconds) for seconds in (0, 1)]
    assert [purge_module._place(spark, house, time) for time in times] == [44, 50]


def test_run_does_so_once_a_day(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    house = warehouse(tmp_path, "delta")
    monkeypatch.setattr(upkeep, "datetime", Later)
    care = Upkeep(spark, house, TableLock(house.root), optimize_interval_s=None, vacuum_retention_s=None, keep_changelog_s=3600.0)
    for end, left in ((30, [40, 50]), (50, [40, 50])):
        if end == 30:
            add(spark, house, CHANGES, 0, 50)
            merge.bring(spark, house, TABLE, Position(1, 30))
        else:
            merge.bring(spark, house, TABLE, Position(1, 50))
        care.run()
        assert places(spark, house) == left
    noted = tmp_path / "_cdcpipe/vacuumed.json"
    assert list(json.loads(noted.read_text())) == ["purge"]
    noted.write_text('{"purge": 0}')
    Upkeep(spark, house, TableLock(house.root), optimize_interval_s=None, vacuum_retention_s=None, keep_changelog_s=3600.0).run(
        lambda: True
    )
    assert places(spark, house) == [40, 50]  # asked to stop
    Upkeep(spark, house, TableLock(house.root), optimize_interval_s=None, vacuum_retention_s=None, keep_changelog_s=3600.0).run()
    assert places(spark, house) == []
    assert current(read_replica(spark, tmp_path, "public.t")) == {1: 40, 2: 50}
    assert "was not" not in caplog.text
    arguments = ("run", "-S", "s", "--publication", "p", "--staging", str(tmp_path / "s"), "--warehouse", str(tmp_path / "w"))
    refused = spark_cli(*arguments, "--format", "parquet", "--keep-changelog", "30d", code=1)
    assert "--keep-changelog is for Delta tables" in refused.stderr


class Later(datetime):
    """A clock that is a little more than an hour after the last change."""

    @classmethod
    def now(cls, tz: Any = None) -> "Later":
        return cls(2026, 1, 1, 1, 1, tzinfo=UTC)


def test_a_snapshot_gives_a_new_beginning(
    database: postgres.Database,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a server. If the command purges while a copy is in progress, another snapshot gives the table at once."""
    # The command has the session of the tests (system/test_process.py tests how it starts its own one).
    monkeypatch.setattr(purge_command, "warehouse_session", lambda *_, **__: nullcontext(spark))
    road = TableCopies(database, spark, tmp_path, f"s_{database.name}"[:63])
    road.execute(
        "create table t (id int primary key, v text)",
        "alter table t alter v set storage external",
        "create publication everything for table t",
    )
    road.land()
    road.execute(
        "insert into t select g, repeat('x', 5000) || g from generate_series(1, 10) g", "update t set id = -id where id < 4"
    )
    road.run()

    removed: list[str] = []

    def go_on_and_purge() -> None:
        road.execute("delete from t where id = (select max(id) from t where id < 10)")
        road.run()
        ((now,),) = road.query("select now()")
        arguments = ("--warehouse", str(road.warehouse), "--before", now.isoformat(), "--table", "public.t")
        with logging_as_before():
            done = CliRunner().invoke(purge_command.command, arguments)
        assert done.exit_code == 0
        removed.append(done.stdout)

    go_on_and_purge()
    shutil.rmtree(road.house.replica(Table("public", "t")))
    road.run()  # one table does not stop all
    assert [each.why for each in wanted_copies.waiting(road.house)] == ["its replica needs changes that were purged"]
    road.snapshot("t")
    assert not wanted_copies.waiting(road.house)
    copied = road.snapshot("t", while_held=go_on_and_purge, hold_s=60.0)
    assert "from after its copy began were purged meanwhile" in caplog.text
    assert [rows for rows, _ in copied.copied.values()] == [8]
    assert removed == ["public.t: 14 rows removed\n", "public.t: 10 rows removed\n"]
    assert not landed_snapshots.unfinished(road.house)
    assert not wanted_copies.waiting(road.house)
    road.execute("update t set id = 100 where id = 10")
    road.run()
    road.assert_verified()
    assert as_of.read_as_of(spark, road.warehouse, "public.t", datetime.now(UTC)).count() == 8
    road.connection.close()
