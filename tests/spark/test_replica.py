"""A replica that gets its changes in parts equals a replay of the whole changelog."""

import random
import re
import shutil
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import DecimalType

from spark_sink.changelog.tables import changelogs_of
from spark_sink.delta import log as delta_log
from spark_sink.delta import sql as delta
from spark_sink.replica import history_table, merge, reduction
from spark_sink.replica.fills import filled
from spark_sink.replica.history import read_history
from spark_sink.replica.replay import replay, without_unneeded
from spark_sink.schema.table import Fill, Version
from spark_sink.staging.log import Position
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.wanted_copies import waiting
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import EPOCH, TABLE, append, schema_of

pytestmark = pytest.mark.spark

SCHEMA = schema_of("k int, c int, v string, m array<int>")

Row = tuple[Any, ...]


MATRIX, ANOTHER = "{{1,2},{3,4}}", "{{5},{6}}"
UNSENT = ...


def change(op: str, lsn: int, row: Row, ordinal: int = 0, *, old: Row | None = None, m: Any = None) -> Row:
    """Return a change; ``m`` is a list, or the text of one that its column can't hold, or UNSENT."""
    old = None if old is None else (*old, None)
    value, unsent = (m if isinstance(m, list) else None), (["m"] if m is UNSENT else None)
    return (*row, value, op, 1, lsn, ordinal, 1, None, unsent, old, {"m": m} if isinstance(m, str) else None)


def made(directory: Path) -> Warehouse:
    house = Warehouse(directory, "delta")
    house.open(EPOCH)
    return house


def ordered(rows: Any) -> list[Row]:
    return sorted(map(tuple, rows.select("k", "c", "v").collect()), key=str)


def bring(spark: Any, house: Warehouse, changes: list[Row], versions: list[Version], start: int, end: int) -> Any:
    """Merge the changes in (start, end] as micro-batches do. Return the replica, if there is one."""
    found = [each for each in changes if start < each[6] <= end]
    append(spark, house, found, SCHEMA, Position(1, start), Position(1, end))
    house.write_versions(TABLE, [version for version in versions if version.end_lsn <= end])
    merge.bring(spark, house, TABLE, Position(1, end))
    path = house.replica(TABLE)
    return delta.read(spark, path) if delta_log.exists(path) else None


def replayed(spark: Any, house: Warehouse) -> Any:
    return without_unneeded(replay(house, TABLE, changelogs_of(spark, house).read(TABLE)))


K, C, NONE = (Version(0, 0, 7, (name,) * bool(name), (name,) * bool(name)) for name in ("k", "c", ""))


def at(lsn: int, version: Version, ordinal: int = 0) -> Version:
    return Version(lsn, ordinal, version.relation_id, version.key, version.columns)


# A column is added, filled by the server, and becomes the key. With REPLICA IDENTITY FULL old rows have it at once.
BEGINNING = [change("insert", 10, (k, None, f"v{k}"), k) for k in (1, 2, 3)]
WITHOUT_IT = [change("update", 20, (1, None, "x1"), old=(1, None, "v1")), change("insert", 20, (4, None, "v4"), 1)]
WITH_IT = [
    change("update", 30, (1, 11, "y1"), old=(1, 11, "x1")),
    change("update", 30, (2, 12, "y2"), 1, old=(2, 12, "v2")),
    change("insert", 30, (4, 14, "another"), 2),
]
AFTER_IT = [change("update", 40, (1, 12, "z1"), old=(2, 12, "y2")), change("delete", 40, (4, 14, "another"), 1, old=(4, 14, "v"))]


@pytest.mark.parametrize(
    ("versions", "begins", "cuts"),
    [
        # The catalog was asked in time; late, for what came before the column; late, for all of it.
        ([at(10, K), at(30, C)], "insert", (10, 20, 30, 40)),
        ([at(10, K), at(20, NONE), at(30, C)], "snapshot", (10, 30, 40)),
        ([at(10, NONE), at(30, C)], "snapshot", (20, 40)),
    ],
)
def test_rows_from_before_the_keys_columns(
    spark: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    versions: list[Version],
    begins: str,
    cuts: tuple[int, ...],
) -> None:
    """With another key, nothing would find these rows again. So they are left out, and named."""
    beginning = [(*row[:4], begins, *row[5:]) for row in BEGINNING]
    changes = [*beginning, *WITHOUT_IT, *WITH_IT, *AFTER_IT]
    house = made(tmp_path)
    for start, end in zip((0, *cuts), cuts, strict=False):
        found = bring(spark, house, changes, versions, start, end)
        if end == 30:
            assert ordered(found) == [(1, 11, "y1"), (2, 12, "y2"), (4, 14, "another")]
    assert ordered(found) == ordered(replayed(spark, house)) == [(1, 11, "y1"), (1, 12, "z1")]
    assert "have no value for its key (c)" in caplog.text
    assert "cdcpipe-spark snapshot --table public.t" in caplog.text


# c has become the key, and was NOT NULL from then on. Under REPLICA IDENTITY FULL the key of older changes is that of the catalog.
NULLABLE = [
    change("insert", 10, (1, 11, "v1")),
    change("insert", 10, (2, 12, "v2"), 1),
    change("insert", 20, (7, None, "v7")),
    change("update", 20, (1, None, "x1"), 1, old=(1, 11, "v1")),
    change("update", 30, (7, 17, "x7"), old=(7, None, "v7")),
    change("insert", 30, (3, 13, "x3"), 1),
]


@pytest.mark.parametrize("begins", ["insert", "snapshot"])
@pytest.mark.parametrize("cuts", [(10, 20, 30), (10, 30), (20, 30)])
def test_changes_from_a_time_when_the_keys_columns_took_null(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, begins: str, cuts: tuple[int, ...]
) -> None:
    """They are left out, as those without the columns are, and the table needs a copy. Other tables go on."""
    house, versions = made(tmp_path), [at(10, K), at(20, C)]
    if begins == "snapshot":
        versions[0] = replace(versions[0], snapshot=((1, "k"), (2, "c"), (3, "v")))
    changes = [(*row[:4], begins, *row[5:]) if row[6] == 10 else row for row in NULLABLE]
    for start, end in zip((0, *cuts), cuts, strict=False):
        found = bring(spark, house, changes, versions, start, end)
        if end == 20:
            assert ordered(found) == [(2, 12, "v2")]
        assert ["changes have no value for its key (c)" in each.why for each in waiting(house)] == [True] * (end >= 20)
    assert ordered(found) == ordered(replayed(spark, house)) == [(2, 12, "v2"), (3, 13, "x3"), (7, 17, "x7")]
    current = read_history(spark, tmp_path, "public.t").where("is_current")
    assert ordered(current) == ordered(found)
    assert "2 changes have no value for its key (c), and are only in the changelog" in caplog.text


@pytest.mark.parametrize(
    ("new", "there"),
    [
        # The row may be another one with k = 1. If it is this one, it keeps its value, which was not sent.
        ((1, 11, "x1"), [(1, 11, "x1", [1])]),
        # The key has changed: k says so. The value is that of the row before, and nothing tells which row this was.
        ((2, 11, "x2"), [(1, 11, "v1", [1]), (2, 11, "x2", None)]),
    ],
)
@pytest.mark.parametrize(("cuts", "deletes"), [((10, 20), "hard"), ((20,), "soft")])
def test_updates_with_a_part_of_the_old_key(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, new: Row, there: list[Row], cuts: tuple[int, ...], deletes: str
) -> None:
    """A partition's replica identity decides what the server sends of an old row. It may be another one than the table's."""
    house = Warehouse(tmp_path, "delta", deletes=deletes)
    house.open(EPOCH)
    versions = [Version(0, 0, 7, ("k", "c"), ("k", "c"))]
    changes = [change("insert", 10, (1, 11, "v1"), m=[1]), change("update", 20, new, old=(1, None, None), m=UNSENT)]
    for start, end in zip((0, *cuts), cuts, strict=False):
        found = bring(spark, house, changes, versions, start, end)
    rows = found, replayed(spark, house), read_history(spark, tmp_path, "public.t").where("is_current")
    for each in rows:
        assert sorted(map(tuple, each.select("k", "c", "v", "m").collect())) == there
    assert [each.why for each in waiting(house)] == ["updates have only a part of the key (k, c) that their rows had before"]
    assert "1 updates have only a part of the key (k, c) that their rows had before" in caplog.text
    marked = [row["_cdc_unchanged"] for row in found.collect()] if "_cdc_unchanged" in found.columns else [None]
    assert marked.count(["m"]) == len(there) - 1


def test_deleted_rows_and_a_copy_without_a_key(spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No key tells whether the copy has a row that was deleted. So the deleted rows go, and a warning says so."""
    house, copied = Warehouse(tmp_path, "delta", deletes="soft"), replace(at(130, NONE), snapshot=((1, "k"), (2, "c"), (3, "v")))
    house.open(EPOCH)
    changes = [change("insert", lsn, (lsn, None, "v")) for lsn in (10, 20)]
    changes += [change("delete", 30, (10, None, "v")), change("snapshot", 130, (20, None, "v"))]
    versions = [at(10, K), at(100, NONE), copied]
    bring(spark, house, changes, versions, 0, 90)
    bring(spark, house, changes, versions, 90, 130)
    merge.remake(spark, house, TABLE, Position(1, 130))
    assert [row[0] for row in spark.read.format("delta").load(str(house.replica(TABLE))).collect()] == [20]
    assert "rows that were deleted before the table was copied are missing" in caplog.text


@pytest.mark.parametrize("is_removed", [False, True])
def test_changes_after_a_copy_without_a_key_come_with_a_later_key(spark: Any, tmp_path: Path, is_removed: bool) -> None:
    """The copy has the rows of its position. The replica must not say that it has the changes since."""
    house, copied = made(tmp_path), replace(at(130, NONE), snapshot=((1, "k"), (2, "c"), (3, "v")))
    versions = [at(10, K), at(100, NONE), copied, at(300, K)]
    changes = [change("insert", lsn, (lsn, None, "v")) for lsn in (10, 110)]
    changes += [change("snapshot", 130, (lsn, None, "v"), n) for n, lsn in enumerate((10, 110))]
    changes += [change("insert", lsn, (lsn, None, "v")) for lsn in (150, 200, 300)]
    bring(spark, house, changes, versions, 0, 90)
    if is_removed:
        shutil.rmtree(house.replica(TABLE))
    bring(spark, house, changes, versions, 90, 200)
    merge.remake(spark, house, TABLE, Position(1, 130))
    assert delta_log.newest_lsn(house.replica(TABLE)) == 130
    found = bring(spark, house, changes, versions, 200, 300)
    assert sorted(row[0] for row in ordered(found)) == [10, 110, 150, 200, 300]
    assert delta_log.newest_lsn(house.replica(TABLE)) == 300


# Two rows at a time have the same k; c tells them apart.
ALIKE = [
    change("insert", 10, (1, 11, "a")),
    change("insert", 10, (2, 12, "b"), 1),
    change("update", 20, (2, 12, "x"), old=(2, 12, "b")),
    change("insert", 20, (1, 13, "alike"), 1),
]


@pytest.mark.parametrize(
    ("versions", "m"),
    [
        ([at(10, K)], None),
        ([at(10, K)], MATRIX),
        # The key changes amid a transaction.
        ([at(10, C), at(20, K, 1)], None),
    ],
)
def test_rows_that_a_key_does_not_tell_apart_are_named(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, versions: list[Version], m: str | None
) -> None:
    changes = [(*row[:-1], {"m": m} if m else None) if row[4] == "insert" else row for row in ALIKE]
    house = made(tmp_path)
    for start, end in ((0, 10), (10, 20)):
        bring(spark, house, changes, versions, start, end)
    assert re.findall(r"by its key \((\w+)\), (\d+) new rows are rows that the replica had already", caplog.text) == [("k", "1")]
    assert "cdcpipe-spark snapshot --table public.t" in caplog.text


@pytest.mark.parametrize(
    ("versions", "m", "deletes"),
    [
        ([at(10, K)], None, "hard"),  # without Spark
        ([at(10, K)], MATRIX, "hard"),
        ([at(10, K)], None, "soft"),
        ([at(10, NONE), at(20, K, 4)], None, "hard"),  # the rows came before the key
    ],
)
def test_rows_that_a_key_does_not_tell_apart_after_a_truncate_are_named(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, versions: list[Version], m: str | None, deletes: str
) -> None:
    """A load: TRUNCATE, rows of which two have the same key, DELETE of one of them. The replica has none. It said nothing."""
    loaded = [
        change("truncate", 20, (None, None, None)),
        change("insert", 20, (1, 11, "a"), 1, m=m),
        change("insert", 20, (1, 12, "alike"), 2),
        change("delete", 20, (1, 12, "alike"), 3, old=(1, 12, "alike")),
        change("insert", 20, (2, 13, "b"), 4),
    ]
    changes = [(*row[:9], datetime(2026, 1, row[6], tzinfo=UTC), *row[10:]) for row in (*BEGINNING, *loaded)]
    house = Warehouse(tmp_path, "delta", deletes=deletes)
    house.open(EPOCH)
    for start, end in ((0, 10), (10, 20)):
        found = bring(spark, house, changes, versions, start, end)
    assert [row["k"] for row in found.collect() if deletes == "hard" or row["_cdc_deleted_at"] is None] == [2]
    assert re.findall(r"by its key \((\w+)\), (\d+) new rows are rows that the replica had already", caplog.text) == [("k", "1")]
    assert [str(each.table) for each in waiting(house)] == ["public.t"]


def test_a_summary_does_not_count_rows_behind_a_truncate(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For this Spark reads the changes once more, and only a check of the rows needs it."""
    changes = spark.createDataFrame(
        [*BEGINNING, change("truncate", 20, (None, None, None)), change("insert", 20, (1, 1, "a"), 1)], SCHEMA
    )
    with monkeypatch.context() as patched:
        patched.setattr(reduction, "_after", None)
        summary = reduction.summarize(changes, (("k",),))
    assert reduction.growth(changes, summary) == 1


def permuted(rng: random.Random, keys: int) -> tuple[list[Row], dict[int, str]]:
    """Return transactions that permute keys at random, as a deferrable key allows, and the resulting rows.

    The last transaction inserts a row after the key has become one that is not deferrable.
    """
    rows = [(key, f"v{key}") for key in range(keys)]
    changes = [change("insert", 10, (k, None, v), k) for k, v in rows]
    for lsn in range(20, 30):
        taken = rng.sample(range(keys), 4)
        targets = rng.sample([rows[index][0] for index in taken], 4)
        for ordinal, (index, target) in enumerate(zip(taken, targets, strict=True)):
            (key, value), new = rows[index], (target, f"{rows[index][1]} {lsn}")
            changes.append(change("update", lsn, (target, None, new[1]), ordinal, old=(key, None, value)))
            rows[index] = new
    changes.append(change("insert", 30, (keys, None, "new")))
    return changes, dict([*rows, (keys, "new")])


@pytest.mark.parametrize("cuts", [(29, 30), (30,)])
def test_keys_permuted_within_transactions(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, cuts: tuple[int, ...]
) -> None:
    """A deferrable key identifies no rows. So there is no replica. With a later key, each lost row is counted."""
    seed = random.randrange(10**6)
    print("seed", seed)
    changes, left = permuted(random.Random(seed), 40)
    house = made(tmp_path)
    for start, end in zip((0, *cuts), cuts, strict=False):
        found = bring(spark, house, changes, [at(10, NONE), at(30, K)], start, end)
        assert (found is None) == (end < 30)
    for read in (lambda: found, lambda: replayed(spark, house)):
        there = {row["k"]: row["v"] for row in read().collect()}
        assert there.items() <= left.items()
        counted = re.findall(r"by its key \(k\), (\d+) new rows are rows that the replica had already", caplog.text)
        assert counted == [str(len(left) - len(there))] * (len(left) > len(there))
        caplog.clear()


@pytest.mark.parametrize("m", [None, MATRIX], ids=["without Spark", "with Spark"])
def test_rows_that_came_without_a_change_are_named(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, m: str | None
) -> None:
    """For example rows of an attached partition. After a snapshot the replica had all rows."""
    house = made(tmp_path)
    changes = [
        change("snapshot", 10, (1, None, "a")),
        change("update", 20, (1, None, "b")),
        change("update", 20, (2, None, "unheard of"), 1, m=m),
        change("delete", 20, (3, None, None), 2, old=(3, None, None)),
    ]
    copied = replace(at(10, K), snapshot=((1, "k"), (2, "c"), (3, "v"), (4, "m")))
    for start, end in ((0, 10), (10, 20)):
        assert "without a change" not in caplog.text
        found = bring(spark, house, changes, [copied], start, end)
    assert ordered(found) == [(1, None, "b"), (2, None, "unheard of")]
    assert "table public.t: 2 rows that were changed or deleted were not in the replica" in caplog.text
    assert "a partition's replica identity is another one than the table's (cdcpipe doctor names it)" in caplog.text


@pytest.mark.parametrize(
    ("m", "killed_in", "reached"),
    [
        (None, "ordinary_merge.check_growth", 10),
        (None, "ordinary_merge.Rewrite.commit", 10),
        (MATRIX, "merge._run_merge", 10),
        (MATRIX, "merge.check_growth", 20),
    ],
)
def test_a_kill_around_the_commit_of_a_merge_loses_no_reason_for_a_copy(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, m: str | None, killed_in: str, reached: int
) -> None:
    class KilledError(BaseException):
        pass

    def kill(*_: Any) -> None:
        raise KilledError

    house = made(tmp_path)
    changes = [change("snapshot", 10, (1, None, "a")), change("update", 20, (2, None, "unheard of"), m=m)]
    copied = replace(at(10, K), snapshot=((1, "k"), (2, "c"), (3, "v"), (4, "m")))
    bring(spark, house, changes, [copied], 0, 10)
    merge.finish_merges(house)
    assert waiting(house) == []
    with monkeypatch.context() as patched:
        patched.setattr(f"spark_sink.replica.{killed_in}", kill)
        with pytest.raises(KilledError):
            bring(spark, house, changes, [copied], 10, 20)
    assert delta_log.newest_lsn(house.replica(TABLE)) == reached
    merge.finish_merges(house)
    merge.bring(spark, house, TABLE, Position(1, 20))
    assert [each.table for each in waiting(house)] == [TABLE]
    assert not list((house.root / "_cdcpipe/merges").glob("*"))


# What m's column can't hold is NULL there, and a text in _cdc_exact; being large it is sent only where it changes.
UNSENT_TEXTS = [
    *(change("insert", 10, (k, k, "v"), k, m=m) for k, m in enumerate([[1], MATRIX, MATRIX, MATRIX, MATRIX, MATRIX, [2]], 1)),
    change("update", 20, (1, 1, "x"), m=UNSENT),
    change("update", 20, (2, 2, "x"), 1, m=UNSENT),
    change("update", 20, (30, 3, "x"), 2, m=UNSENT, old=(3, None, None)),
    change("update", 20, (4, 4, "x"), 3, m=[4]),
    change("delete", 20, (5, None, None), 4, old=(5, None, None)),
    change("insert", 20, (5, 5, "x"), 5, m=None),
    change("update", 20, (7, 7, "x"), 6, m=ANOTHER),
    change("update", 30, (1, 1, "y"), m=ANOTHER),
    change("update", 30, (1, 1, "z"), 1, m=UNSENT),
    change("update", 30, (2, 2, "y"), 2, m=UNSENT),
    change("update", 30, (31, 3, "y"), 3, m=UNSENT, old=(30, None, None)),
    change("update", 30, (4, 4, "y"), 4, m=UNSENT),
    change("update", 30, (5, 5, "y"), 5),
    change("update", 30, (60, 6, "y"), 6, m=UNSENT, old=(6, None, None)),
    change("update", 30, (7, 7, "y"), 7, m=UNSENT),
    # Nobody has what the rows have that were there before.
    change("update", 30, (8, 8, "y"), 8, m=UNSENT),
    change("update", 30, (9, 9, "y"), 9, m=UNSENT, old=(90, None, None)),
]
HELD = {1: ANOTHER, 2: MATRIX, 31: MATRIX, 4: [4], 5: None, 60: MATRIX, 7: ANOTHER, 8: UNSENT, 9: UNSENT}


@pytest.mark.parametrize("cuts", [(10, 20, 30), (10, 30)])
def test_the_text_of_an_unsent_value_goes_with_it(spark: Any, tmp_path: Path, cuts: tuple[int, ...]) -> None:
    house = made(tmp_path)
    for start, end in zip((0, *cuts), cuts, strict=False):
        found = bring(spark, house, UNSENT_TEXTS, [at(10, K)], start, end)
    for rows in (found, replayed(spark, house)):
        held = {}
        for row in rows.collect():
            exact, unsent = row["_cdc_exact"] or {}, row["_cdc_unchanged"] or []
            held[row["k"]] = UNSENT if "m" in unsent else exact.get("m", row["m"])
            assert not (row["m"] and exact), row
        assert held == HELD


def test_the_values_of_new_columns_in_earlier_rows(spark: Any) -> None:
    """Not as Python's datetimes, which Spark takes for times of the Julian calendar, or of another zone."""
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "America/New_York")
    cases = {
        "a": ("timestamp", "0001-01-01 00:00:00+00", "timestamp_micros(-62135596800000000L)"),
        "b": ("timestamp_ntz", "0001-01-01 00:00:00", "timestamp_ntz'0001-01-01 00:00:00'"),
        "c": ("array<timestamp_ntz>", '{"2024-01-02 03:04:05",NULL}', "array(timestamp_ntz'2024-01-02 03:04:05', NULL)"),
        "d": ("array<timestamp>", '{"0001-01-01 00:00:00+00"}', "array(timestamp_micros(-62135596800000000L))"),
        "e": ("date", "0001-01-01", "date'0001-01-01'"),
        "f": ("double", "NaN", "double('NaN')"),
        "g": ("string", "it's \\ \n `", "concat('it', chr(39), 's ', chr(92), ' ', chr(10), ' `')"),
        "h": ("array<int>", "{}", "cast(array() as array<int>)"),
        "i": ("decimal(5,2)", "1.50", "1.50"),
        "j": ("boolean", "f", "false"),
        "k": ("date", "infinity", "cast(null as date)"),
    }
    columns = [f"cast(null as {kind}) as {name}" for name, (kind, _, _) in cases.items()]
    rows = session.range(1).selectExpr(*columns, "array('a') as _cdc_unchanged", "map('b', 'old') as _cdc_exact")
    made = filled(rows, [Fill(name, None, text) for name, (_, text, _) in cases.items()])
    (found,) = made.selectExpr(*(f"{name} <=> {expected} as {name}" for name, (*_, expected) in cases.items())).collect()
    assert [name for name, is_right in found.asDict().items() if not is_right] == []
    (marks,) = made.select("_cdc_unchanged", "_cdc_exact").collect()
    assert tuple(marks) == ([], {"k": "infinity"})


def test_rows_from_before_a_narrower_column_keep_their_values(spark: Any) -> None:
    """A column was widened before it got the column of the narrower type (`Fill.or_own`)."""
    rows = spark.createDataFrame(
        [
            (1, None, 1.5, [], {}),
            (2, 2.5, None, [], {}),
            (3, None, None, [], {}),
            (4, None, None, [], {"v": "old"}),
            (5, None, None, [], {"v__float": "new"}),
            (6, 6.5, None, [], {"v": "old"}),
            (7, None, None, ["v"], {}),
            (8, None, 8.5, ["v__float"], {}),
        ],
        "k int, v__float float, v double, _cdc_unchanged array<string>, _cdc_exact map<string, string>",
    )
    made = filled(rows, [Fill("v", "v__float", or_own=True)]).orderBy("k")
    found = [(row["v"], "v" in row["_cdc_unchanged"], row["_cdc_exact"].get("v")) for row in made.collect()]
    assert found == [
        (1.5, False, None),
        (2.5, False, None),
        (None, False, None),
        (None, False, "old"),
        (None, False, "new"),
        (6.5, False, None),
        (None, True, None),
        (None, True, None),
    ]


@pytest.mark.parametrize(
    ("narrower", "wider", "own", "expected"),
    [
        ("date", "timestamp_ntz", "timestamp_ntz'2020-01-01 12:34:00'", "timestamp_ntz'2020-01-01 00:00:00'"),
        ("float", "double", "0.1d", "cast(0.1f as double)"),
        ("decimal(10,2)", "decimal(12,3)", "1.005BD", "1.010BD"),
        ("int", "double", "2.5d", "2d"),
        ("int", "decimal(12,2)", "-2.5BD", "-3BD"),
        ("int", "bigint", "7L", "7L"),
        ("int", "bigint", "3000000000L", "null"),
    ],
)
def test_a_value_that_lay_in_a_narrower_column_is_rounded_as_postgresql_does(
    spark: Any, narrower: str, wider: str, own: str, expected: str
) -> None:
    marks = "cast(array() as array<string>) as _cdc_unchanged", "cast(map() as map<string, string>) as _cdc_exact"
    rows = spark.range(1).selectExpr(f"cast(null as {narrower}) as v__n", f"cast({own} as {wider}) as v", *marks)
    made = filled(rows, [Fill("v", "v__n", or_own=True)])
    assert made.selectExpr(f"v <=> cast({expected} as {wider})").collect()[0][0]


def test_a_key_whose_columns_another_program_has_made_wider(spark: Any, tmp_path: Path) -> None:
    """Spark compares these values as text. It did not find the rows: those of another type have other texts."""
    schema = schema_of("n decimal(12,4), d date, i int, v string, m string")
    key, old_names = ("n", "d", "i"), {1: "deleted", 2: "updated", 3: "moved"}

    def one(op: str, lsn: int, i: int, v: str, *, m: str | None = None, old: int | None = None) -> Row:
        row, before = ((Decimal("1.5"), date(2024, 1, 1), each, *values) for each, *values in ((i, v, m), (old, None, None)))
        unsent = ["m"] if op == "update" else None
        return (*row, op, 1, lsn, 0, 1, datetime(2024, 1, 2), unsent, None if old is None else before, None)

    house = Warehouse(tmp_path, "delta", history="table")
    house.open(EPOCH)
    house.record(Position(1, 0))
    house.write_versions(TABLE, [Version(0, 0, 7, key, key)])
    lock = TableLock(tmp_path)
    first = [one("insert", 10 + i, i, v, m=f"m{i}") for i, v in old_names.items()]
    later = [one("delete", 20, 1, "deleted", old=1), one("update", 21, 2, "new"), one("update", 22, 30, "new", old=3)]
    for changes, start, end in ((first, 0, 19), (later, 19, 30)):
        append(spark, house, changes, schema, Position(1, start), Position(1, end))
        merge.bring(spark, house, TABLE, Position(1, end))
        history_table.bring(spark, house, TABLE, Position(1, end), lock)
        for path in (house.replica(TABLE), house.history(TABLE)) if end == 19 else ():
            delta.set_properties(spark, path, {"delta.enableTypeWidening": "true", "delta.feature.timestampNtz": "supported"})
            spark.sql(
                f"ALTER TABLE {delta.table_name(path)}"
                " ALTER COLUMN n TYPE decimal(20,6), d TYPE timestamp_ntz, i TYPE decimal(20,2)"
            )
    rows = delta.read(spark, house.replica(TABLE))
    assert rows.schema["n"].dataType == DecimalType(20, 6)
    assert sorted(map(tuple, rows.selectExpr("int(i)", "v", "m").collect())) == [(2, "new", "m2"), (30, "new", "m3")]
    assert "_cdc_unchanged" not in rows.columns
    versions = delta.read(spark, house.history(TABLE)).selectExpr("int(i)", "v", "m", "is_current").collect()
    ended = [(1, "deleted", "m1", False), (2, "new", "m2", True), (2, "updated", "m2", False)]
    assert sorted(map(tuple, versions)) == [*ended, (3, "moved", "m3", False), (30, "new", "m3", True)]


def test_a_key_is_an_array_of_floating_point_numbers(spark: Any, tmp_path: Path) -> None:
    """Spark's MERGE and joins compare it; both refuse expressions that are not deterministic."""

    def one(op: str, lsn: int, key: float, v: str, old: float | None = None) -> Row:
        return ([key, None], v, op, 1, lsn, 0, 1, None, None, None if old is None else ([old, None], None), None)

    nan = float("nan")
    changes = [one("insert", 10 + index, key, "new") for index, key in enumerate((0.0, nan, 0.1, 1e300, 5e-324))]
    changes += [one("update", 20, -0.0, "moved", old=0.0), one("update", 21, nan, "later"), one("delete", 22, 0.1, "new", old=0.1)]
    house = made(tmp_path)
    for start, end in ((0, 19), (19, 30)):
        found = [each for each in changes if start < each[4] <= end]
        append(spark, house, found, schema_of("k array<double>, v string"), Position(1, start), Position(1, end))
        house.write_versions(TABLE, [at(10, K)])
        merge.bring(spark, house, TABLE, Position(1, end))
    expected = sorted([("[-0.0, None]", "moved"), ("[nan, None]", "later"), ("[1e+300, None]", "new"), ("[5e-324, None]", "new")])
    for rows in (delta.read(spark, house.replica(TABLE)), replayed(spark, house)):
        assert sorted((str(row["k"]), row["v"]) for row in rows.collect()) == expected
