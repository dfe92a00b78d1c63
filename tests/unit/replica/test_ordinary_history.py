"""Rounds of a stored history without Spark: whatever ordinary changes come, the history has the versions that they make."""

import random
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import IntegerType, LongType

from spark_sink.delta import file_table, rewrite
from spark_sink.delta.log import TableLog
from spark_sink.delta.rewrite import Rewrite
from spark_sink.delta.rows import statistics
from spark_sink.replica.history import history_schema
from spark_sink.replica.ordinary_history import merge_without_spark
from spark_sink.schema.table import Version
from spark_sink.schema.types import typed_schema
from spark_sink.staging.log import Position
from spark_sink.warehouse import stored_histories
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import EPOCH, NAMES, TABLE, UNSENT, Later, Ordinary, OrdinaryLater, Source, add_copy, append, told
from support.delta_tables import struct, unsorted_rows
from support.merges import SCHEMA, in_ranges

VECTORS = {"delta.enableDeletionVectors": "true"}


class House:
    """A warehouse with one table and its history, and the versions that the history should have."""

    def __init__(
        self, root: Path, key: tuple[str, ...] = ("id", "case"), properties: dict[str, str] | None = None, *, is_new: bool = False
    ) -> None:
        self.key = key
        self.warehouse = Warehouse(root, "delta", history="table")
        self.warehouse.open(EPOCH)
        self.versions = [Version(0, 0, 7, key, key)]
        self.history = self.warehouse.history(TABLE)
        if not is_new:
            self.history.mkdir(parents=True)
            file_table.commit(file_table.define(self.history, history_schema(SCHEMA), properties or {}), [], Position(1, 0))
        self.current: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.ended: list[tuple[Any, ...]] = []
        self.added = self.reached = 0

    def commit(self, source: Source) -> None:
        """End a transaction of the source. Each key that it has touched ends a version, and begins one if it has a row."""
        new = [change for change in source.changes[self.added :] if change[7] == source.lsn + 1]
        rows = {row[:2]: row for row in source.rows.values()}
        keys = {(change[0], change[1]) for change in new} | {change[12][:2] for change in new if change[12] is not None}
        for key in keys:
            if key in self.current:
                row, time, lsn = self.current.pop(key)
                self.ended.append((*row, time, source.time, False, lsn, source.lsn + 1, None, None))
            if key in rows:
                self.current[key] = rows[key], source.time, source.lsn + 1
        source.commit()

    def add(self, source: Source) -> None:
        """Append what is new to the changelog."""
        start, self.reached = self.reached, source.lsn
        new, self.added = source.changes[self.added :], len(source.changes)
        append(None, self.warehouse, new, SCHEMA, Position(1, start), Position(1, source.lsn))

    def bring(self, lsn: int) -> bool:
        """Bring the history to an LSN. Return whether the changes were ordinary."""
        known = stored_histories.facts(self.warehouse, TABLE)
        return merge_without_spark(self.warehouse, TABLE, self.versions, known, Position(1, lsn))

    @property
    def expected(self) -> list[tuple[Any, ...]]:
        current = [(*row, time, None, True, lsn, None, None, None) for row, time, lsn in self.current.values()]
        return sorted([*self.ended, *current], key=_place)

    @property
    def stored(self) -> list[tuple[Any, ...]]:
        return sorted(unsorted_rows(self.history), key=_place)


def _place(version: tuple[Any, ...]) -> tuple[int, int]:
    return version[1], version[8]  # id and from_lsn


@pytest.mark.parametrize("properties", [{}, VECTORS], ids=["files written anew", "deletion vectors"])
@pytest.mark.parametrize(("key", "is_large"), [(("id",), False), (("id", "case"), True)], ids=["one range", "several ranges"])
def test_random_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, properties: dict[str, str], key: tuple[str, ...], is_large: bool
) -> None:
    """Rows that go and come again within a transaction, unsent values, and keys that rows take from each other."""
    monkeypatch.setattr(rewrite, "_SMALL_BYTES", 2000)
    seed = random.randrange(10**6)
    print("seed", seed)
    source, house = Ordinary(random.Random(seed)), House(tmp_path / "house", key, properties)
    for _ in range(8):
        for _ in range(source.rng.randint(3, 6)):
            for _ in range(source.rng.randint(5, 12)):
                source.step(keys=40)
            house.commit(source)
        house.add(source)
        with in_ranges(monkeypatch) if is_large else nullcontext():
            assert house.bring(source.lsn)
        assert house.stored == house.expected
    log = TableLog(house.history).refresh()
    assert log.lsn == source.lsn
    assert sum(statistics(file)["numRecords"] for file in log.files) >= len(house.expected)


def test_versions_that_end_make_more_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deletes are few bytes. The versions that they end take more memory than one range has."""
    source, house = Ordinary(random.Random(0)), House(tmp_path / "house")
    for change in (source.insert, source.delete):
        for key in range(200):
            change(key)
        house.commit(source)
        house.add(source)
        assert house.bring(source.lsn)
        monkeypatch.setattr(rewrite, "_MOST_BYTES", 10_000)
    assert house.stored == house.expected


@pytest.mark.parametrize("has_copy", [False, True], ids=["with changes", "with a snapshot"])
def test_a_new_history(tmp_path: Path, has_copy: bool) -> None:
    """It says since when it has all rows: since the snapshot with which the changelog begins, if it does."""
    source, house = Ordinary(random.Random(8)), House(tmp_path / "house", is_new=True)
    for key in range(9):
        source.insert(key)
    if has_copy:
        source.changes.clear()
        source.lsn = 20
        for row in source.rows.values():
            source._emit("snapshot", row)
        house.versions.append(replace(house.versions[0], end_lsn=21, snapshot=((1, "id"),)))
        house.commit(source)
        append(None, house.warehouse, [], SCHEMA, Position(1, 0), Position(1, 1))
        add_copy(None, house.warehouse, source.changes, 21, SCHEMA)
        house.added, house.reached = len(source.changes), 1
    for _ in range(3):
        house.commit(source)
        for _ in range(9):
            source.step(keys=20)
    house.commit(source)
    house.add(source)
    assert house.bring(source.lsn)
    assert house.stored == house.expected
    found = stored_histories.facts(house.warehouse, TABLE)
    assert found == stored_histories.HistoryFacts(source.lsn, 20 if has_copy else 0, frozenset({21} if has_copy else ()))
    assert TableLog(house.history).refresh().metadata["configuration"]["cdcpipe.table"] == "public.t"
    source.step(keys=20)
    house.commit(source)
    house.add(source)
    assert house.bring(source.lsn)
    assert house.stored == house.expected


@pytest.mark.parametrize("lsn", [None, 15, 30], ids=["two known snapshots", "a change from before", "a snapshot's row from later"])
def test_a_new_history_that_is_left_to_spark(tmp_path: Path, lsn: int | None) -> None:
    house = House(tmp_path / "house", is_new=True)
    copy = replace(house.versions[0], end_lsn=21, snapshot=((1, "id"),))
    house.versions += [copy] if lsn else [copy, replace(copy, end_lsn=25)]
    source = Ordinary(random.Random(9))
    source.lsn = 20
    source.rows[1] = (0, 1, 5, "blob", b"other")
    source._emit("snapshot", source.rows[1])
    if lsn:
        source.lsn = lsn - 1
        source._emit("insert" if lsn < 21 else "snapshot", (0, 2, 5, "blob", b"other"))
    append(None, house.warehouse, source.changes, SCHEMA, Position(1, 0), Position(1, 40))
    assert not house.bring(40)
    assert not house.history.exists()


def test_what_is_left_to_spark(tmp_path: Path) -> None:
    """A TRUNCATE, a value that nobody knows, a snapshot, another key, changes to take back: nothing is written."""
    source, house = Ordinary(random.Random(3)), House(tmp_path / "house")
    for key in range(9):
        source.insert(key)
    house.commit(source)
    house.add(source)
    assert house.bring(source.lsn)
    before = house.stored, sorted(house.history.rglob("*"))
    start = source.lsn

    def is_refused(versions: list[Version]) -> bool:
        house.versions = versions
        is_ordinary = house.bring(source.lsn)
        return not is_ordinary and (house.stored, sorted(house.history.rglob("*"))) == before

    versions = house.versions
    source.update(2)
    house.commit(source)
    house.add(source)
    copy = Version(start + 1, 0, 7, ("id", "case"), ("id", "case"), snapshot=((1, "id"),))
    assert is_refused([*versions, copy])
    assert is_refused([*versions, Version(start - 1, 0, 7, ("id", "case"), ("id", "case"), snapshot=((1, "id"),))])
    assert is_refused([*versions, Version(source.lsn, 0, 7, ("id",), ("id",))])
    house.versions = versions
    assert house.bring(source.lsn)
    assert house.stored == house.expected
    before = house.stored, sorted(house.history.rglob("*"))
    # The row is not in the history. So nobody knows what the update has not sent.
    source.rows[77] = (source.case, 77, 1, "blob", b"other")
    while source.changes[-1][:2] != (source.case, 77) or not source.changes[-1][11]:
        source.rows[77] = (source.case, 77, 1, "blob", b"other")
        source.update(77)
    source.commit()
    house.add(source)
    assert is_refused(versions)


@pytest.mark.parametrize("seed", range(4))
def test_a_value_that_was_not_sent_is_never_null(tmp_path: Path, seed: int) -> None:
    """A column came with a value of the server in each row. A change leaves it out, and no change has it: Spark marks it."""
    source, house = OrdinaryLater(random.Random(seed)), House(tmp_path / "house")
    for key in range(8):
        source.insert(key)
    source.commit()
    house.add(source)
    assert house.bring(source.lsn)
    source.add_column()
    for _ in range(40):
        for _ in range(source.rng.randint(1, 3)):
            source.step(keys=16)
        source.commit()
        house.add(source)
        if not house.bring(source.lsn):
            break
        assert told(dict(zip(NAMES, row, strict=False)) for row in house.stored if row[7]) == source.told
    assert source.has_incomplete or UNSENT in source.known.values()


@pytest.mark.parametrize("is_deleted", [False, True])
def test_an_insert_that_lacks_a_value_is_left_to_spark(tmp_path: Path, is_deleted: bool) -> None:
    """It begins another row: the version that the history has of the key has another value."""
    source, house = Later(random.Random(1)), House(tmp_path / "house")
    source.is_added = True
    source.rows[1] = (0, 1, 5, "blob", b"before")
    source._emit("insert", source.rows[1])
    house.commit(source)
    house.add(source)
    assert house.bring(source.lsn)
    before = house.stored
    if is_deleted:
        source.delete(1)
    source.enter(1)
    house.commit(source)
    house.add(source)
    assert not house.bring(source.lsn)
    assert house.stored == before


def test_a_truncate_is_left_to_spark(tmp_path: Path) -> None:
    source, house = Ordinary(random.Random(4)), House(tmp_path / "house")
    source.insert(1)
    house.commit(source)
    house.add(source)
    assert house.bring(source.lsn)
    source.truncate()
    source.insert(1)
    source.commit()
    house.add(source)
    assert not house.bring(source.lsn)
    assert house.stored == house.expected


@pytest.mark.parametrize("unsent", [None, ["blob"]])
def test_a_value_that_the_history_does_not_know(tmp_path: Path, unsent: list[str] | None) -> None:
    """An update that does not send it is left to Spark. One that sends it ends the version, which keeps its mark."""
    house, time = House(tmp_path / "house"), datetime(2026, 1, 1, tzinfo=UTC)
    begun = {"case": [0], "id": [1], "is_current": [True], "from_lsn": [5], "_cdc_unchanged": [["blob"]]}
    table = Rewrite.of_log(TableLog(house.history).refresh(), house.key)
    table.add({name: pa.array(values) for name, values in begun.items()}, []).commit(Position(1, 5))
    update = (0, 1, 7, None if unsent else "new", b"other", "update", 1, 11, 0, 1, time, unsent, None, None)
    append(None, house.warehouse, [update], SCHEMA, Position(1, 0), Position(1, 11))
    assert house.bring(11) == (unsent is None)
    marks = [(row[3], row[7], row[11]) for row in house.stored]
    assert marks == ([(None, True, ["blob"])] if unsent else [(None, False, ["blob"]), ("new", True, None)])


def test_a_table_that_gets_a_column_of_the_historys(tmp_path: Path) -> None:
    """Spark writes such a history anew: its own column gets another name."""
    house = House(tmp_path / "house")
    schema = typed_schema(struct(**{field.name: field.dataType for field in SCHEMA[:5]}, valid_to=IntegerType()))
    insert = (0, 1, 7, "new", b"other", 9, "insert", 1, 11, 0, 1, datetime(2026, 1, 1, tzinfo=UTC), None, None, None)
    append(None, house.warehouse, [insert], schema, Position(1, 0), Position(1, 11))
    assert not house.bring(11)
    assert not house.stored


def test_columns_come_and_get_wider(tmp_path: Path) -> None:
    """Versions from before a column have NULL in it, in the history as in the changelog."""
    source, house = Ordinary(random.Random(5)), House(tmp_path / "house")
    for key in (1, 2):
        source.insert(key)
    house.commit(source)
    house.add(source)
    assert house.bring(source.lsn)
    source.update(1)
    start, end = house.reached, source.commit()
    new = [(*row[:2], 1 << 40, *row[3:5], 5, *row[5:11], None, None, None) for row in source.changes[house.added :]]
    columns = {"case": IntegerType(), "id": IntegerType(), "a": LongType()}
    schema = typed_schema(struct(**columns, blob=SCHEMA["blob"].dataType, other=SCHEMA["other"].dataType, more=IntegerType()))
    append(None, house.warehouse, new, schema, Position(1, start), Position(1, end))
    assert house.bring(end)
    found = [(row[1], row[2] == 1 << 40, row[7], row[-1]) for row in house.stored]
    assert found == [(1, False, False, None), (1, True, True, 5), (2, False, True, None)]


def test_files_without_a_current_version_are_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "_SMALL_BYTES", 0)
    source, house = Ordinary(random.Random(6)), House(tmp_path / "house", properties=VECTORS)
    searched: list[str] = []
    find = rewrite.Rewrite._find_in
    monkeypatch.setattr(rewrite.Rewrite, "_find_in", lambda *given: searched.append(given[1]["path"]) or find(*given))
    for change in (source.insert, source.delete, source.insert, source.update):
        change(1)
        house.commit(source)
        house.add(source)
        searched.clear()
        assert house.bring(source.lsn)
        assert house.stored == house.expected
    assert len(TableLog(house.history).refresh().files) == 2
    assert len(searched) == 1
