"""The stored history: in whatever rounds it was made, it has the versions that `read_history` makes of the whole changelog."""

import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import sql as delta
from spark_sink.delta.log import TableLog
from spark_sink.replica import history_table, merge
from spark_sink.replica.as_of import read_as_of
from spark_sink.replica.history import read_history
from spark_sink.replica.ordinary_history import merge_without_spark
from spark_sink.schema.table import Version
from spark_sink.spark.sql import quote
from spark_sink.staging.log import Position
from spark_sink.upkeep import upkeep
from spark_sink.upkeep.purge import purge, purge_histories
from spark_sink.warehouse import stored_histories
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import COLUMNS, EPOCH, KEY, TABLE, Ordinary, Source, append, comparable, schema_of

pytestmark = pytest.mark.spark

NAMES = ("case", "id", "a`b", "blob", "other")
SCHEMA = schema_of(COLUMNS.replace(" a ", " `a``b` "))  # a name that SQL has to quote
FIRST = Version(0, 0, 7, KEY, KEY)


class Made:
    """A changelog that grows, and its stored history."""

    def __init__(self, spark: Any, root: Path, seed: int, kind: type[Source] = Source) -> None:
        self.spark, self.source, self.house = spark, kind(random.Random(seed)), Warehouse(root, "delta", history="table")
        self.house.open(EPOCH)
        self.lock = TableLock(root)
        self.versions, self.written, self.reached = [FIRST], 0, 0
        self.late: list[tuple[Any, ...]] = []
        """The rows of a snapshot that is not in the changelog yet."""
        self.house.write_versions(TABLE, self.versions)
        self.house.record(Position(1, 0))  # the warehouse begins here

    def commit(self, changes: int = 3) -> None:
        for _ in range(self.source.rng.randint(1, changes)):
            self.source.step(8)
        self.source.commit()

    def append(self, *more: tuple[Any, ...]) -> None:
        """Append what has happened since to the changelog, but not the rows in ``late``."""
        new = [change for change in self.source.changes[self.written :] if change not in self.late]
        self.written = len(self.source.changes)
        start, self.reached = self.reached, self.source.lsn
        append(self.spark, self.house, [*more, *new], SCHEMA, Position(1, start), Position(1, self.reached))
        self.house.record(Position(1, self.reached))

    def bring(self) -> None:
        history_table.bring(self.spark, self.house, TABLE, Position(1, self.reached), self.lock)

    def stored(self) -> Any:
        return delta.read(self.spark, self.house.history(TABLE))


def rows_of(versions: Any) -> list[tuple[Any, ...]]:
    return sorted((tuple(bytes(v) if isinstance(v, bytearray) else v for v in row) for row in versions.collect()), key=repr)


def test_rounds_make_the_versions_of_the_whole_changelog(spark: Any, tmp_path: Path) -> None:
    """Keys that change with unsent values, TRUNCATE, and snapshots, one of which comes to the changelog after later changes."""
    made = Made(spark, tmp_path / "warehouse", seed=0)
    source = made.source
    for number in range(1, 8):
        for _ in range(source.rng.randint(1, 8)):
            made.commit()
        if number == 2:
            source.truncate()
            source.insert(3)
            source.commit()
        late = made.late
        if number in {3, 5}:
            if not source.rows:
                source.insert(0)
                source.commit()
            begin = len(source.changes)
            lsn = source.snapshot()
            made.late = source.changes[begin:] if number == 5 else []
            if number == 3:
                made.versions.append(Version(lsn, 0, 7, KEY, KEY, snapshot=tuple(enumerate(NAMES, 1))))
            made.commit()
        if number == 6:
            made.versions.append(Version(late[0][7], 0, 7, KEY, KEY, snapshot=tuple(enumerate(NAMES, 1))))
            made.late = []
            made.house.write_versions(TABLE, made.versions)
            made.append(*late)
        else:
            made.house.write_versions(TABLE, made.versions)
            made.append()
        made.bring()
        if number not in {3, 6, 7}:
            continue
        expected = read_history(spark, made.house.root, str(TABLE))
        assert made.stored().columns == expected.columns
        assert rows_of(made.stored()) == rows_of(expected), number
    # A kill before the note that the snapshots are known: the history goes back once more, and is the same.
    delta.set_properties(spark, made.house.history(TABLE), stored_histories.properties(copies=frozenset()))
    made.bring()
    assert rows_of(made.stored()) == rows_of(expected)
    known = stored_histories.facts(made.house, TABLE)
    assert known is not None
    assert (known.lsn, len(known.copies)) == (made.reached, 2)


def test_ordinary_changes_need_no_spark(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark reads the versions, and goes on with them after a TRUNCATE; then it is our turn again."""
    made = Made(spark, tmp_path / "warehouse", seed := random.randrange(10**6), Ordinary)
    print("seed", seed)
    said: list[bool] = []
    monkeypatch.setattr(history_table, "merge_without_spark", lambda *given: said.append(merge_without_spark(*given)) or said[-1])
    for number in range(9):
        for _ in range(made.source.rng.randint(1, 6)):
            made.commit(8)
        if number == 5:
            made.source.truncate()
            made.source.insert(3)
            made.source.commit()
        made.append()
        made.bring()
        if number in {4, 8}:
            expected = read_history(spark, made.house.root, str(TABLE))
            assert made.stored().columns == expected.columns
            assert rows_of(made.stored()) == rows_of(expected)
    assert said == [True, True, True, True, True, False, True, True, True]


def test_a_purge_keeps_what_the_history_needs_and_the_history_keeps_what_is_current(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upkeep sorts the history by key, and the next round goes on with it."""
    made = Made(spark, tmp_path / "warehouse", seed=11)
    house, lock = made.house, made.lock
    states: list[tuple[int, list[Any]]] = []
    for _ in range(12):
        made.commit()
        states.append((made.source.lsn, sorted(made.source.rows.values())))
    made.append()
    made.bring()
    made.commit()
    made.append()

    def rows_at(lsn: int) -> Any:
        return comparable(read_as_of(spark, house.root, str(TABLE), f"0/{lsn:X}").select(*map(quote, NAMES)).collect())

    assert all(rows_at(lsn) == comparable(rows) for lsn, rows in states[3::4])
    # The changelog has a change that the history lacks; there is no replica either.
    changes = changelogs_of(spark, house)
    kept = changes.old_changes(TABLE, made.reached)
    assert (kept.rows, kept.reason) == (0, "there is no replica")
    merge.bring(spark, house, TABLE, Position(1, made.reached))
    kept = changes.old_changes(TABLE, made.reached)
    assert kept.kept
    assert kept.reason.startswith("the history is at 0/")
    made.bring()
    assert purge(spark, house.root, Position(1, made.reached))[0].rows
    # The changelog does not have these states any more, the history does.
    assert all(rows_at(lsn) == comparable(rows) for lsn, rows in states[3::4])
    with pytest.raises(InvalidArgumentsError, match="not known"):
        read_as_of(spark, house.root, str(TABLE), made.source.time)
    before = rows_of(made.stored())
    at_lsn = states[6][0]
    time = datetime.fromtimestamp(made.source.time.timestamp() - (made.source.lsn - at_lsn), UTC)
    kept = read_as_of(spark, house.root, str(TABLE), f"0/{states[3][0]:X}").select(*map(quote, NAMES))
    assert purge_histories(spark, house, lock, time)[0].rows
    assert comparable(kept.collect()) == comparable(states[3][1])  # rows that were read before the purge lose none
    after = rows_of(made.stored())
    assert set(after) < set(before)
    assert [row for row in before if row[7]] == [row for row in after if row[7]]
    assert rows_at(states[9][0]) == comparable(states[9][1])
    with pytest.raises(InvalidArgumentsError, match="purged"):
        rows_at(states[1][0])
    monkeypatch.setattr(upkeep, "_MOST_SMALL_FILES", 1)
    upkeep.Upkeep(spark, house, lock, optimize_interval_s=1.0, vacuum_retention_s=86400.0).run()
    assert TableLog(house.history(TABLE)).refresh().clustering == KEY
    assert rows_of(made.stored()) == after
    made.commit()
    made.append()
    made.bring()
    assert rows_at(made.source.lsn) == comparable(made.source.rows.values())
    house.record(Position(1, made.reached + 1000))  # other tables have changed since
    assert rows_at(made.reached + 1000) == comparable(made.source.rows.values())
