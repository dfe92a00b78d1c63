"""The order of what a micro-batch writes, without Spark."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import IntegerType, StructField, StructType

from cdcpipe.pgoutput.messages import UNCHANGED_TOAST, Insert, Update
from spark_sink.changelog.delta_changelogs import DeltaChangelogs
from spark_sink.changelog.interface import ChangelogState
from spark_sink.changelog.schema_history import SchemaHistory
from spark_sink.delta import file_table
from spark_sink.delta.log import TableLog
from spark_sink.pipeline import micro_batch
from spark_sink.pipeline.known_tables import KnownTables
from spark_sink.pipeline.micro_batch import MicroBatch
from spark_sink.replica import merge
from spark_sink.schema.catalog_answers import CatalogAnswers
from spark_sink.schema.table import Table
from spark_sink.schema.types import merge_columns, typed_schema
from spark_sink.source.contents import Found, find
from spark_sink.staging.log import Position, Segment
from spark_sink.warehouse import gaps, landed_snapshots, new_changelogs, purged_changes, wanted_copies
from spark_sink.warehouse.comments import Comments, read_comments, write_comments
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import EPOCH
from support.descriptions import ID, NONE, version
from support.given_sessions import given_session
from support.oids import INT4, TEXT
from support.segments import Log, into, relation

T = Table("public", "t")
KEYLESS = relation(1, "t", ("a", INT4), identity="n")
KEYED = relation(1, "t", ("id", INT4), ("a", INT4))
KEYED_TEXT = relation(1, "t", ("id", INT4), ("a", TEXT))


def known_tables(house: Warehouse) -> KnownTables:
    spark: Any = None
    answers = CatalogAnswers(None)
    return KnownTables(spark, house, SchemaHistory(spark, house, answers), answers)


def test_a_version_comes_after_the_columns_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier changes use a later key. So a version without its columns, left by a kill, would stop each reader."""
    house, log = Warehouse(tmp_path / "warehouse", "delta"), Log(tmp_path / "staging")
    house.open(EPOCH)
    tables = known_tables(house)
    MicroBatch(tables, [log.segment([KEYLESS, into(KEYLESS, b"1")])]).append()
    [before] = house.versions(T)
    assert not before.key
    later = MicroBatch(tables, [log.segment([KEYED, into(KEYED, b"1", b"2")])])
    open_files = DeltaChangelogs.open_files

    def fail(changelogs: DeltaChangelogs, table: Table, *arguments: Any) -> Any:
        if table == T:
            raise OSError("no space left on device")
        return open_files(changelogs, table, *arguments)

    monkeypatch.setattr(DeltaChangelogs, "open_files", fail)
    with pytest.raises(OSError, match="no space left"):
        later.append()
    assert house.versions(T) == [before]
    assert tables[T].versions == [before]


def test_the_segments_are_read_once_for_all_tables_that_have_some_of_their_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An initial copy of thousands of tables lies amid the changes of a slot that was there before."""
    house, log = Warehouse(tmp_path / "warehouse", "delta"), Log(tmp_path / "staging")
    house.open(EPOCH)
    tables, described = known_tables(house), [relation(number, f"t{number}", ("id", INT4)) for number in range(1, 9)]
    whole = [[into(each, b"1") for each in described for _ in range(each.relation_id)] for _ in range(3)]
    segments = [log.segment(whole[0], whole[1], before=described), log.segment(whole[2], before=described)]
    batch = MicroBatch(tables, segments)
    amid = (segments[0].start_lsn + segments[0].end_lsn) // 2
    *first, last = described
    done = {Table("public", each.name): amid for each in first} | {Table("public", last.name): segments[0].end_lsn}
    tables.open(done)
    for table, lsn in done.items():
        tables[table].changelog = ChangelogState(typed_schema(merge_columns(None, [described[0]])), lsn)
    reads, commits = [], []

    def note(some: Iterable[Segment], lsn: int) -> Found:
        reads.append((list(some), lsn))
        return find(*reads[-1])

    monkeypatch.setattr(micro_batch, "find", note)
    monkeypatch.setattr(DeltaChangelogs, "commit_files", lambda *how: commits.append((how[1].name, how[-1])))
    batch.append()
    assert reads == [(segments, amid), (segments[1:], segments[0].end_lsn)]
    assert commits[1:] == [(each.name, (2 if each != last else 1) * each.relation_id) for each in described]


def test_the_columns_of_a_table_that_is_made_anew_again_and_again_are_merged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job drops and creates a table each minute, and `run` was down for a weekend: each of its OIDs is a new version."""
    house, log = Warehouse(tmp_path / "warehouse", "delta"), Log(tmp_path / "staging")
    house.open(EPOCH)
    others = [relation(number, "t", ("id", INT4), ("a", INT4 if number < 9 else TEXT)) for number in range(1, 13)]
    segment = log.segment(*[[each, into(each, b"1", b"2")] for each in others])
    merges = []
    monkeypatch.setattr(micro_batch, "merge_columns", lambda *how, **more: merges.append(how) or merge_columns(*how, **more))
    tables = known_tables(house)
    MicroBatch(tables, [segment]).append()
    assert len(merges) == 2  # for the schema history, and for the changelog
    columns = tables[T].columns
    assert columns is not None
    assert columns.names == ["id", "a", "a__string"]
    assert len(house.versions(T)) == len(others)


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_stored_history_does_not_go_on_with_a_changelog_that_begins_anew(tmp_path: Path, is_begun: bool) -> None:
    """Somebody has deleted the other files of the table. The history would show its last versions as valid until now."""
    house, log = Warehouse(tmp_path / "warehouse", "delta", history="table"), Log(tmp_path / "staging")
    house.open(EPOCH)
    tables = known_tables(house)
    if is_begun:
        MicroBatch(tables, [log.segment([KEYED, into(KEYED, b"1", b"2")])]).append()
    schema = StructType([StructField("id", IntegerType())])
    file_table.commit(file_table.define(house.history(T), schema, {}), [], Position(1, log.end_lsn))
    start_lsn = log.end_lsn
    MicroBatch(tables, [log.segment([KEYED, into(KEYED, b"3", b"4")])]).append()
    assert new_changelogs.begun_lsn(house, T) == (0 if is_begun else start_lsn + 1)
    assert purged_changes.last_lsn(house, T) == 0  # the replica begins with the new changelog


def test_a_changelog_that_begins_anew_gets_the_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are recorded for the one before it. A kill before it has them leaves them to the next micro-batch."""
    house, log, comments = (
        Warehouse(tmp_path / "warehouse", "delta"),
        Log(tmp_path / "staging"),
        Comments("a table", {"id": "a number"}),
    )
    house.open(EPOCH)
    write_comments(house, T, comments)
    tables, segment = known_tables(house), log.segment([KEYED, into(KEYED, b"1", b"2")])
    monkeypatch.setattr(micro_batch, "captured_comments", lambda *_: comments)
    with monkeypatch.context() as patched:
        patched.setattr(DeltaChangelogs, "comment", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            MicroBatch(tables, [segment]).append()
    assert read_comments(house, T) is None
    tables.forget()
    MicroBatch(tables, [segment]).append()
    assert TableLog(house.changelog(T)).refresh().metadata["description"] == "a table"
    assert read_comments(house, T) == comments


@pytest.mark.parametrize("table_format", ["delta", "parquet"])
def test_a_first_copy_that_failed_does_not_count_once_the_stream_makes_the_changelog(tmp_path: Path, table_format: str) -> None:
    """Its rows are in no changelog. Its replica may be there: nothing else would tell that the table has changed since."""
    house, log = Warehouse(tmp_path / "warehouse", table_format), Log(tmp_path / "staging")
    house.open(EPOCH)
    copied_at = Position(1, log.end_lsn + 0x50)
    wanted_copies.want_copy(house, T, copied_at.lsn - 1, "new")
    landed_snapshots.record_start(house, T, copied_at)
    house.write_versions(T, [replace(version(copied_at.lsn, 0, ID), snapshot=((1, "id"), (2, "a")))])
    house.replica(T).mkdir(parents=True)

    MicroBatch(known_tables(house), [log.segment([KEYED, into(KEYED, b"1", b"2")])]).append()
    assert house.has_changelog(T)
    [made] = house.versions(T)
    assert (made.key, made.snapshot, made.end_lsn) == (ID, (), log.end_lsn)
    assert not house.replica(T).exists()
    assert not landed_snapshots.unfinished(house)
    assert not gaps.is_copied_since(house, T, 0)
    [wanted] = wanted_copies.waiting(house)
    assert wanted.reasons[-1].since_lsn == copied_at.lsn


@pytest.mark.parametrize("table_format", ["delta", "parquet"])
def test_a_row_that_comes_into_a_row_filter_without_a_value_lets_its_table_be_copied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, table_format: str
) -> None:
    """The reason is there before the changelog has the row. A copy from the row's transaction on settles it."""
    house, log = Warehouse(tmp_path / "warehouse", table_format), Log(tmp_path / "staging")
    house.open(EPOCH)
    tables = known_tables(house)
    lacks = Insert(None, 1, (b"1", UNCHANGED_TOAST))
    first = log.segment([KEYED_TEXT, lacks, lacks], [Update(None, 1, None, None, (b"1", UNCHANGED_TOAST))])
    MicroBatch(tables, [first]).append()
    [wanted] = wanted_copies.waiting(house)
    assert wanted.why == "rows came into the row filter of a publication, and large values of them were not sent"
    assert [reason.since_lsn for reason in wanted.reasons] == [first.start_lsn + (first.end_lsn - first.start_lsn) // 2]
    MicroBatch(tables, [log.segment([KEYED_TEXT, lacks, Insert(None, 1, (b"2", b"sent"))])]).append()
    assert [reason.since_lsn for reason in wanted_copies.waiting(house)[0].reasons] == [log.end_lsn]
    [warning] = caplog.messages
    assert warning.startswith("table public.t: an UPDATE brought rows into the row filter of a publication, and the server did not")


def test_an_update_that_leaves_out_a_value_lets_no_table_be_copied(tmp_path: Path) -> None:
    house, log = Warehouse(tmp_path / "warehouse", "delta"), Log(tmp_path / "staging")
    house.open(EPOCH)
    update = Update(None, 1, None, None, (b"1", UNCHANGED_TOAST))
    MicroBatch(known_tables(house), [log.segment([KEYED_TEXT, Insert(None, 1, (b"1", b"sent")), update])]).append()
    assert not wanted_copies.waiting(house)


@pytest.mark.parametrize("is_past", [True, False])
def test_a_later_copy_that_failed_leaves_the_key_of_the_changes_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_past: bool
) -> None:
    """The stream has recorded no version of its own, because the copy's version said the same."""
    house, log = Warehouse(tmp_path / "warehouse", "delta"), Log(tmp_path / "staging")
    house.open(EPOCH)
    tables = known_tables(house)
    MicroBatch(tables, [log.segment([KEYLESS, into(KEYLESS, b"1")])]).append()
    [first] = house.versions(T)
    assert first.key == NONE
    copied_at = Position(1, log.end_lsn + 0x50)
    snapshot = replace(version(copied_at.lsn, 0, ID), snapshot=((1, "a"), (2, "id")))
    landed_snapshots.record_start(house, T, copied_at, adds_rows=True)
    house.write_versions(T, [first, snapshot])
    tables.forget()
    if is_past:
        MicroBatch(tables, [log.segment([KEYED, into(KEYED, b"1", b"2")])]).append()
        assert house.versions(T)[1:] == [snapshot]

    monkeypatch.setattr(merge, "_has_rows_of", lambda *_: False)
    spark: Any = given_session(addJobTag=lambda _: None)
    merge.finish_snapshots(spark, house)
    assert house.versions(T) == [first, *([replace(snapshot, snapshot=())] if is_past else [])]
    assert [each.why for each in wanted_copies.waiting(house)][:1] == (["a copy of its rows was killed"] if is_past else [])


def test_a_first_copy_that_failed_leaves_its_table_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The copy was in the place of a changelog that had gone. Nothing told any more that the table had been there."""
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(EPOCH)
    house.replica(T).mkdir(parents=True)
    house.write_versions(T, [replace(version(50, 0, ID), snapshot=((1, "id"),))])
    landed_snapshots.record_start(house, T, Position(1, 50))
    spark: Any = given_session(addJobTag=lambda _: None)
    merge.finish_snapshots(spark, house)
    assert (house.replica(T).exists(), house.tables(), landed_snapshots.unfinished(house)) == (False, [], [])
    assert [(each.table, each.why, each.reasons[0].since_lsn) for each in wanted_copies.waiting(house)] == [
        (T, "a copy of its rows was killed", 50)
    ]
    assert caplog.messages == ["a copy of public.t ended before its rows were in the changelog: the table waits for another copy"]
