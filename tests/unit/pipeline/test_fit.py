"""What a pipeline checks before it continues. Without Spark."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from cdcpipe.lsn import format_lsn
from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import file_table
from spark_sink.delta import log as delta_log
from spark_sink.files import places
from spark_sink.files.local import write_json
from spark_sink.pipeline import fit
from spark_sink.schema.table import MESSAGES, NO_COPIES, Table
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Epoch, Position, list_segments
from spark_sink.staging.readers import register_reader, remove_consumed
from spark_sink.warehouse import gaps, purged_changes
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.wanted_copies import SET_BACK, waiting, waits_for
from spark_sink.warehouse.warehouse import CHECKPOINT, Warehouse
from support.descriptions import ID, version
from support.segments import Log
from support.staged import make_epoch

FRUIT = Table("public", "fruit")
SCHEMA = StructType([StructField("id", LongType())])
EPOCH = Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0)


@pytest.fixture
def house(tmp_path: Path) -> Warehouse:
    """A changelog and a replica that are both at 20."""
    made = Warehouse(tmp_path, "delta")
    made.open(EPOCH)
    made.write_versions(FRUIT, [version(0, 0, ID)])
    for path in (made.changelog(FRUIT), made.replica(FRUIT)):
        for lsn in (10, 20):
            table = file_table.open_table(path) if delta_log.exists(path) else file_table.define(path, SCHEMA, {})
            file_table.commit(table, [], Position(1, lsn))
    return made


def commit(path: Path, operation: str, *actions: dict[str, Any]) -> None:
    """Commit as another program does."""
    information = {"commitInfo": {"operation": operation, "engineInfo": "Apache-Spark/4.2.0 Delta-Lake/4.4.0"}}
    lines = [json.dumps(action) for action in (information, *actions)]
    delta_log.commit_path(path, delta_log.commits(path)[-1] + 1).write_text("\n".join(lines))


@pytest.mark.parametrize("what", ["changelog", "replica"])
def test_a_table_that_was_set_back_is_copied(house: Warehouse, what: str) -> None:
    path = house.root / what / "public.fruit"
    commit(path, "OPTIMIZE")
    fit.check_tables(house, Position(1, 40))
    assert waiting(house) == []
    commit(path, "RESTORE")
    commit(path, "OPTIMIZE")
    file_table.redefine(path, "SET TBLPROPERTIES", lambda log: {**log.metadata, "description": "fruit"})
    assert house.format.lsn(path) == 20  # it says that it has what it has lost
    fit.check_tables(house, Position(1, 40))
    wanted = [(each.table, each.why, each.reasons[0].since_lsn) for each in waiting(house)]
    assert wanted == [(FRUIT, f"RESTORE has set its {what} back to an earlier version", 41)]
    assert [waits_for(house, FRUIT, SET_BACK.format(kind)) for kind in ("changelog", "replica")] == [
        what == "changelog",
        what == "replica",
    ]
    # as-of must not be asked for what the changelog has lost.
    assert purged_changes.last_lsn(house, FRUIT) == (20 if what == "changelog" else 0)


@pytest.mark.parametrize("what", ["changelog", "replica"])
def test_a_table_that_was_set_back_to_before_its_copy_is_copied(house: Warehouse, what: str) -> None:
    """In a quiet database the copy is later than the position of the tables. It does not make up for its own loss."""
    copy = replace(version(50, 0, ID), snapshot=((1, "id"),))
    house.write_versions(FRUIT, [version(0, 0, ID), copy])
    path = house.root / what / "public.fruit"
    file_table.commit(file_table.open_table(path), [], Position(1, 50), is_reached=what == "replica")
    fit.check_tables(house, Position(1, 40))
    assert waiting(house) == []
    commit(path, "RESTORE")
    fit.check_tables(house, Position(1, 40))
    assert [each.reasons[0].since_lsn for each in waiting(house)] == [51]
    # The rows of the copy are lost, too.
    assert purged_changes.last_lsn(house, FRUIT) == (50 if what == "changelog" else 0)
    house.write_versions(FRUIT, [*house.versions(FRUIT), replace(copy, end_lsn=60)])
    assert waiting(house) == []


def test_a_copy_ends_that_a_table_counts_as_set_back(house: Warehouse) -> None:
    path = house.changelog(FRUIT)
    commit(path, "RESTORE")
    file_table.commit(file_table.open_table(path), [], Position(1, 50), is_reached=False)  # the rows of the copy
    assert house.format.end(path) == (20, False)
    commit(path, "RESTORE")
    commit(path, "WRITE", {"txn": {"appId": "cdcpipe", "version": 60}})  # Spark's commit for us
    assert house.format.end(path) == (60, False)


def test_a_copy_before_the_next_start_notes_what_the_changelog_has_lost(house: Warehouse) -> None:
    spark: Any = None
    changelogs, directory = changelogs_of(spark, house), house.root / "copy"
    commit(house.changelog(FRUIT), "RESTORE")
    with pytest.raises(purged_changes.PurgedError):  # a copy from before the loss would not make up for it
        changelogs.add_snapshot(FRUIT, directory, [], Position(1, 20))
    copies = [replace(version(lsn, 0, ID), snapshot=((1, "id"),)) for lsn in (30, 50)]  # the first one may be lost
    house.write_versions(FRUIT, [version(0, 0, ID), *copies])
    changelogs.add_snapshot(FRUIT, directory, [], Position(1, 50))
    fit.check_tables(house, Position(1, 60))
    assert purged_changes.last_lsn(house, FRUIT) == 30
    assert waiting(house) == []


def test_a_start_looks_at_each_log_once(house: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, list_names = Counter[Path](), places.list_names
    monkeypatch.setattr(places, "list_names", lambda path: listed.update([path]) or list_names(path))
    ends = fit.check_tables(house, Position(1, 40))
    assert ends == dict.fromkeys((house.changelog(FRUIT), house.replica(FRUIT)), (20, False))
    own = [house.changelog(table) for table in NO_COPIES]
    assert listed == {path / "_delta_log": 1 for path in (*ends, *own)}


@pytest.mark.parametrize("table", NO_COPIES)
def test_a_changelog_of_no_table_that_was_set_back(house: Warehouse, caplog: pytest.LogCaptureFixture, table: Table) -> None:
    """No copy makes up for what it has lost. With the older descriptions `run` tells what the next one changes."""
    path = house.changelog(table)
    for lsn in (10, 20):
        opened = file_table.open_table(path) if delta_log.exists(path) else file_table.define(path, SCHEMA, {})
        file_table.commit(opened, [], Position(1, lsn))
    commit(path, "RESTORE")
    expected = f"RESTORE has set {table} back to an earlier version"
    if table == MESSAGES:
        fit.check_tables(house, Position(1, 40))
        assert [message.partition(":")[0] for message in caplog.messages] == [expected]
        assert purged_changes.last_lsn(house, MESSAGES) == 20
    else:
        with pytest.raises(WarehouseError, match=expected) as caught:
            fit.check_tables(house, Position(1, 40))
        assert "if the files of that version are gone: begin another warehouse" in (caught.value.hint or "")
    information = {"operation": "RESTORE", "operationParameters": {"version": 1}}
    delta_log.commit_path(path, 3).write_text(json.dumps({"commitInfo": information}))  # as the hint says
    caplog.clear()
    fit.check_tables(house, Position(1, 40))
    assert not caplog.messages


def test_a_changelog_that_has_gone_is_an_error(house: Warehouse) -> None:
    shutil.rmtree(house.replica(FRUIT))
    assert fit.check_tables(house, Position(1, 40))[house.replica(FRUIT)] is None
    shutil.rmtree(house.changelog(FRUIT))
    with pytest.raises(WarehouseError, match=r"the changelog of public\.fruit, .*, has gone") as caught:
        fit.check_tables(house, Position(1, 40))
    assert "run does not see what an older copy of it lacks" in (caught.value.hint or "")


def test_a_changelog_that_has_gone_with_a_copy_is_an_error(house: Warehouse) -> None:
    """A table that begins with a copy may begin beyond the position of the tables."""
    shutil.rmtree(house.changelog(FRUIT))
    house.write_versions(FRUIT, [version(50, 0, ID)])
    fit.check_tables(house, Position(1, 40))  # a micro-batch that was killed before it made the changelog
    house.write_versions(FRUIT, [replace(version(50, 0, ID), snapshot=((1, "id"),))])
    with pytest.raises(WarehouseError, match="has gone"):
        fit.check_tables(house, Position(1, 40))


@pytest.mark.parametrize(
    ("gap_end", "other_lsn", "has_replica", "is_forgotten"),
    [
        (60, 0, False, True),
        (55, 0, False, True),
        (49, 0, False, False),  # the log has its changes, or the changelog is only out of sight: a file system is not mounted
        (60, 30, False, False),
        (60, 0, True, False),
    ],
    ids=[
        "its changes were lost",
        "its first change was lost",
        "they come again",
        "another table has lost its changelog",
        "it has a replica",
    ],
)
def test_a_table_is_forgotten_only_if_it_never_came(
    house: Warehouse, *, gap_end: int, other_lsn: int, has_replica: bool, is_forgotten: bool
) -> None:
    """Without its versions, nothing knows a table whose changelog is only out of sight, until the server describes it again."""
    gaps.record(house, [replace(EPOCH, number=2, start_lsn=gap_end, gap=Gap(40, "their log was lost", 1.0, 2.0))])
    shutil.rmtree(house.changelog(FRUIT))
    if not has_replica:
        shutil.rmtree(house.replica(FRUIT))
    house.write_versions(FRUIT, [version(50, 0, ID), version(58, 0, ID)])
    if other_lsn:
        house.write_versions(Table("public", "other"), [version(other_lsn, 0, ID)])
    with pytest.raises(WarehouseError, match="has gone") if other_lsn else nullcontext():
        fit.check_tables(house, Position(1, 40))
    assert (FRUIT not in house.tables()) == is_forgotten


@pytest.mark.parametrize(
    ("start", "removed", "is_refused"),
    [
        (0x100, 0, False),
        (0x100, 0x250, False),
        (0x100, 0x400, True),
        (0x250, 0, False),
        (0x260, 0, True),  # begun after the staging directory was lost
    ],
)
def test_the_log_of_a_new_warehouse_has_all_changes_since_its_copies(
    house: Warehouse, tmp_path: Path, start: int, removed: int, is_refused: bool
) -> None:
    path, staging = house.root / "_cdcpipe/snapshot.json", tmp_path / "staging"
    make_epoch(staging, 1, start)
    if removed:
        write_json(staging / "removed.json", {"position": f"1:{format_lsn(removed)}"})
    reached = Position(1, removed) if removed else None
    path.write_text(json.dumps({"version": 1, "slot": "slot", "is_complete": True}))
    copies = [replace(version(lsn, 0, ID), snapshot=((1, "id"),)) for lsn in (0x200, 0x250)]
    house.write_versions(FRUIT, copies)
    house.write_versions(Table("public", "empty"), [version(0, 0, ID)])
    if is_refused:
        with pytest.raises(WarehouseError, match=rf"copies of its tables from 0/250, .* goes back only to 0/{removed or start:X}"):
            fit.first_position(house, staging, Position(1, start), reached)
        make_epoch(staging, 2, 0x500, gap=Gap(0x250, "their log was lost", 1.0, 2.0).to_json())  # run copies them anew
    assert fit.first_position(house, staging, Position(1, start), reached) == (1, removed or start)


def test_a_new_warehouse_without_copies_begins_after_the_last_gap_of_a_log_that_lacks_its_beginning(
    house: Warehouse, tmp_path: Path
) -> None:
    """There run copies all tables. It ended at each start, until it got --snapshot initial."""
    staging, removed, start = tmp_path / "staging", Position(2, 0x300), Position(1, 0x100)
    for number, start_lsn in (1, 0x100), (2, 0x200):
        make_epoch(staging, number, start_lsn, gap=Gap(0x100, "the slot was lost", 1.0, 2.0).to_json())
    write_json(staging / "removed.json", {"position": str(removed)})
    with pytest.raises(WarehouseError, match="does not go back to its beginning"):
        fit.first_position(house, staging, start, removed)
    make_epoch(staging, 3, 0x400, gap=Gap(0x300, "the slot was lost", 1.0, 2.0).to_json())
    assert fit.first_position(house, staging, start, removed) == (3, 0x400)


@pytest.mark.parametrize(
    ("offsets", "committed", "is_of_use"),
    [
        ([2], 1, False),  # the log begins at 3: "the segments from ... do not exist any more"
        ([2, 4], 1, False),  # Spark would run its last micro-batch again, and reads it from 2 on
        ([2, 4], 2, True),
        ([3], 1, True),
        ([4, 5], 2, True),
        ([2, 3], 1, False),
    ],
)
def test_a_checkpoint_that_the_log_does_not_reach_any_more(
    house: Warehouse, tmp_path: Path, offsets: list[int], committed: int, *, is_of_use: bool
) -> None:
    """The tables were brought further with another --checkpoint. Without it, each run ended with an error."""
    log = Log(tmp_path / "staging")
    ends = [Position(1, log.end_lsn), *(log.segment([]).end for _ in range(5))]
    register_reader(log.root, "spark", ends[3], "warehouse")
    remove_consumed(log.root)
    assert list_segments(log.root)[0].start == ends[3]
    checkpoint = tmp_path / "checkpoint"
    make_checkpoint(checkpoint, [ends[offset] for offset in offsets], committed)
    if ends[offsets[committed - 1]] > ends[4]:  # it may be another warehouse's
        with pytest.raises(WarehouseError, match=r"the checkpoint .* is at 1:"):
            fit.tidy_checkpoint(house, checkpoint, log.root, ends[4])
    else:
        fit.tidy_checkpoint(house, checkpoint, log.root, ends[4])
    assert checkpoint.exists() == is_of_use


def make_checkpoint(checkpoint: Path, offsets: list[Position], committed: int) -> None:
    for name in ("offsets", "commits"):
        (checkpoint / name).mkdir(parents=True)
    (checkpoint / "metadata").write_text('{"id":"32f908df"}')
    for number, offset in enumerate(offsets):
        (checkpoint / "offsets" / str(number)).write_text(f'v1\n{{}}\n{{"format": 1, "position": "{offset}"}}')
        if number < committed:
            (checkpoint / "commits" / str(number)).write_text("v1\n{}")


@pytest.mark.parametrize(
    ("offsets", "committed", "is_of_use"),
    [
        ([1, 3], 2, False),
        ([3, 4], 1, False),
        ([1, 2], 2, True),
        ([2, 3], 1, True),  # a micro-batch was killed
        ([3], 0, True),
        ([], 0, True),
    ],
)
def test_a_checkpoint_beyond_the_tables_is_worth_nothing(
    house: Warehouse, tmp_path: Path, offsets: list[int], committed: int, *, is_of_use: bool
) -> None:
    """A warehouse in a store was set back: with no change to come, no micro-batch has seen it. The tables stayed as they were."""
    log = Log(tmp_path / "staging")
    ends = [Position(1, log.end_lsn), *(log.segment([]).end for _ in range(4))]
    checkpoint = house.local_root(log.root) / CHECKPOINT
    make_checkpoint(checkpoint, [ends[offset] for offset in offsets], committed)
    fit.tidy_checkpoint(house, checkpoint, log.root, ends[2])
    assert checkpoint.exists() == is_of_use


def test_the_checkpoint_of_another_program_is_left_to_spark(house: Warehouse, tmp_path: Path) -> None:
    log = Log(tmp_path / "staging")
    (tmp_path / "offsets").mkdir()
    (tmp_path / "metadata").write_text('{"id":"32f908df"}')
    (tmp_path / "offsets/0").write_text('v1\n{}\n{"topic":{"0":5}}')
    fit.tidy_checkpoint(house, tmp_path, log.root, log.segment([]).end)
    assert (tmp_path / "offsets/0").exists()
