"""Merges without Spark, also of more changes than fit into memory: these come in several ranges of keys."""

import errno
import os
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from spark_sink.delta import rewrite
from spark_sink.delta.log import TableLog
from spark_sink.replica import ordinary_changes, ordinary_merge
from spark_sink.replica.ordinary_changes import ChangeReader, NotOrdinaryError
from spark_sink.replica.ordinary_fill import fill_without_spark
from spark_sink.replica.ordinary_merge import merge_without_spark
from spark_sink.replica.pieces import Piece
from spark_sink.schema.table import Fill, Version
from spark_sink.staging.log import Position
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import EPOCH, NAMES, TABLE, UNSENT, Later, Ordinary, OrdinaryLater, Source, append, comparable, told
from support.delta_tables import rows_of, unsorted_rows
from support.merges import SCHEMA, in_ranges


class House:
    """A warehouse with one table."""

    def __init__(self, root: Path, key: tuple[str, ...] = ("id", "case"), deletes: str = "hard") -> None:
        self.key = key
        self.warehouse = Warehouse(root, "delta", deletes=deletes)
        self.warehouse.open(EPOCH)
        self.warehouse.write_versions(TABLE, [Version(0, 0, 7, key, key)])
        self.replica = self.warehouse.replica(TABLE)

    def add(self, source: Source, start: int) -> None:
        changes = [change for change in source.changes if start < change[7] <= source.lsn]
        append(None, self.warehouse, changes, SCHEMA, Position(1, start), Position(1, source.lsn))

    def merge(self, lsn: int) -> bool:
        """Merge the changes up to an LSN. Return whether they were ordinary."""
        after = TableLog(self.replica).refresh().lsn or 0
        piece = Piece(self.key, tuple((name,) for name in self.key), after, lsn, is_new_table=False)
        return merge_without_spark(self.warehouse, TABLE, piece, Position(1, lsn))


@pytest.mark.parametrize("deletes", ["hard", "soft"])
@pytest.mark.parametrize("seed", range(2))
def test_the_rows_are_the_same_in_several_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deletes: str, seed: int) -> None:
    """Random changes, TRUNCATE, and keys that go to other ranges. With kept deleted rows some are unusual, then in both ways."""
    source = Ordinary(random.Random(seed))
    one, several = (House(tmp_path / name, deletes=deletes) for name in ("one", "several"))
    merges = 0
    for _ in range(8):
        start = source.lsn
        for _ in range(source.rng.randint(3, 6)):
            for _ in range(source.rng.randint(5, 10)):
                source.step(keys=60)
            if deletes == "hard" and source.rng.random() < 0.2:
                source.truncate()
                for _ in range(source.rng.randint(0, 9)):
                    source.step(keys=60)
            source.commit()
        for house in (one, several):
            house.add(source, start)
        is_ordinary = one.merge(source.lsn)
        with in_ranges(monkeypatch) as numbers:
            assert several.merge(source.lsn) == is_ordinary
        assert max(numbers) > 1
        if is_ordinary:
            merges += 1
            assert rows_of(several.replica) == rows_of(one.replica)
            if deletes == "hard":
                assert rows_of(one.replica) == comparable(source.rows.values())
    assert merges > 2


@pytest.mark.parametrize("deletes", ["hard", "soft"])
@pytest.mark.parametrize("seed", range(4))
def test_a_value_that_was_not_sent_is_never_null(tmp_path: Path, deletes: str, seed: int) -> None:
    """A column came with a value of the server in each row. A change leaves it out, and no change has it: Spark marks it."""
    source, house = OrdinaryLater(random.Random(seed)), House(tmp_path / "house", deletes=deletes)
    for key in range(8):
        source.insert(key)
    source.commit()
    house.add(source, 0)
    assert house.merge(source.lsn)
    source.add_column()
    for _ in range(40):
        start = source.lsn
        for _ in range(source.rng.randint(1, 3)):
            source.step(keys=16)
        source.commit()
        house.add(source, start)
        if not house.merge(source.lsn):
            break
        rows = [row for row in unsorted_rows(house.replica) if deletes == "hard" or row[5] is None]
        assert told(dict(zip(NAMES, row, strict=False)) for row in rows) == source.told
    assert deletes == "soft" or source.has_incomplete or UNSENT in source.known.values()


@pytest.mark.parametrize("where", ["deleted in the same merge", "deleted earlier", "not deleted"])
@pytest.mark.parametrize("deletes", ["hard", "soft"])
def test_an_insert_that_lacks_a_value_is_left_to_spark(tmp_path: Path, deletes: str, where: str) -> None:
    """The value of the row before it is another one, also of a row that is there because the row filter was another one."""
    source, house = Later(random.Random(1)), House(tmp_path / "house", deletes=deletes)
    source.is_added = True
    source.rows[1] = (0, 1, 5, "blob", b"before")
    source._emit("insert", source.rows[1])
    source.commit()
    house.add(source, 0)
    assert house.merge(source.lsn)
    before = rows_of(house.replica)
    start = source.lsn
    if where != "not deleted":
        source.delete(1)
    if where == "deleted earlier":
        source.commit()
        house.add(source, start)
        assert house.merge(source.lsn)
        before, start = rows_of(house.replica), source.lsn
    source.enter(1)
    source.commit()
    house.add(source, start)
    assert not house.merge(source.lsn)
    assert rows_of(house.replica) == before


def inserted(house: House, count: int) -> Ordinary:
    """Return a source with this many rows, which are all in the changelog."""
    source = Ordinary(random.Random(1))
    for key in range(count):
        source.insert(key)
    source.commit()
    house.add(source, 0)
    return source


def test_ranges_have_about_as_many_changes_each(tmp_path: Path) -> None:
    house = House(tmp_path / "house")
    source = inserted(house, 1000)
    log = TableLog(house.warehouse.changelog(TABLE)).refresh()
    reader = ChangeReader(log, house.key, 0, source.lsn)
    assert [keys.is_all for keys in reader.ranges(1)] == [True]
    sizes = [reader.read(keys).growth for keys in reader.ranges(7)]
    assert (len(sizes), sum(sizes)) == (7, 1000)
    assert max(sizes) - min(sizes) <= 1


def test_an_unusual_change_in_a_later_range_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(tmp_path / "house")
    source = inserted(house, 100)
    assert house.merge(source.lsn)
    before = rows_of(house.replica), sorted(house.replica.rglob("*"))
    start = source.lsn
    for key in range(100):
        source.update(key)
    source.commit()
    house.add(source, start)
    reduce, calls = ordinary_merge._reduce, []

    def fails_later(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise NotOrdinaryError("a value")
        return reduce(*arguments, **options)

    with in_ranges(monkeypatch), monkeypatch.context() as patched:
        patched.setattr(ordinary_merge, "_reduce", fails_later)
        assert not house.merge(source.lsn)
    assert len(calls) == 3
    assert (rows_of(house.replica), sorted(house.replica.rglob("*"))) == before


@pytest.mark.parametrize(("number", "is_left_to_spark"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EIO, True)])
def test_a_full_disk_is_not_left_to_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_left_to_spark: bool
) -> None:
    """Spark would find no room either, after seconds, and leave more files behind."""
    new, filled = House(tmp_path / "new"), House(tmp_path / "filled")
    lsn = inserted(new, 10).lsn
    assert filled.merge(inserted(filled, 10).lsn)
    fills = Piece(
        filled.key, tuple((name,) for name in filled.key), lsn, lsn + 1, is_new_table=False, fills=(Fill("a", value="5"),)
    )

    def full(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(rewrite._Writer, "add", full)
    for bring in (lambda: new.merge(lsn), lambda: fill_without_spark(filled.warehouse, TABLE, fills)):
        with nullcontext() if is_left_to_spark else pytest.raises(OSError, match=os.strerror(number)):
            assert not bring()


def test_too_many_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many bytes in one range, and too many changes of one value of the key's first column."""
    house, same = House(tmp_path / "house"), House(tmp_path / "same", key=("case", "id"))
    lsn = inserted(house, 100).lsn
    assert inserted(same, 100).lsn == lsn
    monkeypatch.setattr(ordinary_changes, "_MOST_BYTES", 2000)
    with in_ranges(monkeypatch, 3):
        assert not house.merge(lsn)
    with in_ranges(monkeypatch, 30) as numbers:
        assert not same.merge(lsn)
        assert numbers == [1]
        assert house.merge(lsn)


def ranges_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of changes of each range."""
    parts: list[int] = []
    events = ordinary_changes.Changes.events
    monkeypatch.setattr(ordinary_changes.Changes, "events", lambda each, keys: parts.append(len(each)) or events(each, keys))
    return parts


def with_long_texts(house: House) -> Ordinary:
    """Return a source whose 200 rows, with the same long text, were added to the changelog."""
    source = Ordinary(random.Random(0))
    source._blob = lambda: "a long text " * 100
    for key in range(200):
        source.insert(key)
    source.commit()
    house.add(source, 0)
    return source


def test_values_that_are_alike_count_as_they_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary in the file has each of them once. Merges of such changes took gigabytes, and the kernel killed `run`."""
    house = House(tmp_path / "house")
    source = with_long_texts(house)
    monkeypatch.setattr(ordinary_changes, "_MOST_BYTES", 100_000)
    parts = ranges_of(monkeypatch)
    assert house.merge(source.lsn)
    [file] = TableLog(house.warehouse.changelog(TABLE)).refresh().files
    assert (file["size"] < 50_000, len(parts) > 3, sum(parts)) == (True, True, 200)
    assert rows_of(house.replica) == comparable(source.rows.values())


def test_values_of_the_replica_make_more_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates that did not send a large value are few bytes. The values take more memory than one range has."""
    house = House(tmp_path / "house")
    source = with_long_texts(house)
    assert house.merge(source.lsn)
    start, parts = source.lsn, ranges_of(monkeypatch)
    for key in range(200):
        source.update(key)
    source.commit()
    house.add(source, start)
    monkeypatch.setattr(rewrite, "_MOST_BYTES", 100_000)
    assert house.merge(source.lsn)
    assert (parts[0], sum(parts[1:]) >= 200, max(parts[1:]) < 100) == (200, True, True)
    assert rows_of(house.replica) == comparable(source.rows.values())


@pytest.mark.parametrize("rows", [0, 1, 100])
def test_a_truncate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """All files of the replica go. Changes before it in its transaction do not count."""
    house, soft = House(tmp_path / "house"), House(tmp_path / "soft", deletes="soft")
    source = inserted(house, 50)
    soft.add(source, 0)
    for each in (house, soft):
        assert each.merge(source.lsn)
    files = {file["path"] for file in TableLog(house.replica).refresh().files}
    start = source.lsn
    source.update(3)
    source.truncate()
    for key in range(rows):
        source.insert(key)
    source.commit()
    for each in (house, soft):
        each.add(source, start)
    assert not soft.merge(source.lsn)
    assert house.merge(source.lsn)
    assert rows_of(house.replica) == comparable(source.rows.values())
    assert len(source.rows) == rows
    assert files.isdisjoint(file["path"] for file in TableLog(house.replica).refresh().files)
    # It goes on from there.
    start = source.lsn
    source.insert(1000)
    source.commit()
    house.add(source, start)
    assert house.merge(source.lsn)
    assert rows_of(house.replica) == comparable(source.rows.values())
