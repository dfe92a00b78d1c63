"""Merges without Spark: Spark reads the result, and unusual changes are left to Spark."""

import json
import random
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from spark_sink.delta import file_table, rewrite
from spark_sink.delta import sql as delta
from spark_sink.delta.log import TableLog, commit_path, read_table
from spark_sink.delta.rows import read_columns
from spark_sink.files import places
from spark_sink.replica import merge
from spark_sink.replica.ordinary_fill import fill_without_spark
from spark_sink.replica.ordinary_merge import merge_without_spark
from spark_sink.replica.pieces import Piece
from spark_sink.schema.table import Fill, Version
from spark_sink.staging.log import Position
from spark_sink.upkeep import upkeep
from spark_sink.upkeep.upkeep import Upkeep
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import COLUMNS, EPOCH, KEY, SCHEMA, TABLE, Ordinary, add, append, comparable, schema_of

pytestmark = pytest.mark.spark


@dataclass
class House:
    """A warehouse with one table, and the results of its merges without Spark."""

    spark: Any
    warehouse: Warehouse
    said: list[bool]

    def add(self, changes: list[tuple[Any, ...]], start: int, end: int) -> None:
        add(self.spark, self.warehouse, changes, start, end)

    def append(self, schema: str, changes: list[tuple[Any, ...]], start: int, end: int) -> None:
        append(self.spark, self.warehouse, changes, schema, Position(1, start), Position(1, end))

    def apply(self, lsn: int) -> bool:
        """Bring the replica to a position. Return whether this took no Spark."""
        merge.merge_changes(self.spark, self.warehouse, TABLE, Position(1, lsn))
        return self.said.pop()

    @property
    def replica(self) -> Path:
        return self.warehouse.replica(TABLE)

    def rows(self, *columns: str) -> list[Any]:
        return comparable(delta.read(self.spark, self.replica).select(*columns or ("case", "id", "a", "blob", "other")).collect())


@pytest.fixture
def house(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    made = Warehouse(tmp_path / "warehouse[1]", "delta")  # a pattern for Spark's readers of files
    made.open(EPOCH)
    made.write_versions(TABLE, [Version(0, 0, 7, KEY, KEY)])
    said: list[bool] = []

    def listened(*arguments: Any) -> bool:
        said.append(merge_without_spark(*arguments))
        return said[-1]

    monkeypatch.setattr(merge, "merge_without_spark", listened)
    return House(spark, made, said)


def filled(house: House, seed: int, keys: int) -> Ordinary:
    """Return a source with this many rows, all in the changelog."""
    source = Ordinary(random.Random(seed))
    for key in range(keys):
        source.insert(key)
    house.add(source.changes, 0, source.commit())
    return source


@pytest.mark.parametrize("small_bytes", [0, 1 << 20], ids=["deletion vectors", "files written anew"])
def test_random_changes(house: House, monkeypatch: pytest.MonkeyPatch, small_bytes: int) -> None:
    monkeypatch.setattr(rewrite, "_SMALL_BYTES", small_bytes)
    seed = random.randrange(10**6)
    print("seed", seed)
    source = Ordinary(random.Random(seed))
    for _ in range(14):
        start = source.lsn
        for _ in range(source.rng.randint(1, 6)):
            for _ in range(source.rng.randint(1, 10)):
                source.step(keys=60)
            source.commit()
        house.add(source.changes, start, source.lsn)
        assert house.apply(source.lsn)
        assert not house.said
    assert house.rows() == comparable(source.rows.values())
    state = read_table(house.replica)
    assert state is not None
    assert (state.lsn, state.rows) == (source.lsn, len(source.rows))
    vectors = [file for file in TableLog(house.replica).refresh().files if "deletionVector" in file]
    assert bool(vectors) == (small_bytes == 0)
    # Spark goes on from there, and then it is our turn again.
    key = min(source.rows)
    with monkeypatch.context() as spark_alone:
        spark_alone.setattr(merge, "merge_without_spark", lambda *_: house.said.append(False))
        source.update(key)
        house.add(source.changes, source.lsn, source.commit())
        assert not house.apply(source.lsn)
    assert house.rows() == comparable(source.rows.values())
    source.truncate()
    for key in range(3):
        source.insert(key)
    house.add(source.changes, source.lsn, source.commit())
    assert house.apply(source.lsn)
    assert house.rows() == comparable(source.rows.values())
    source.update(0)
    house.add(source.changes, source.lsn, source.commit())
    assert house.apply(source.lsn)
    assert house.rows() == comparable(source.rows.values())


def test_tables_that_spark_has_written(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark has made, merged and checkpointed the replica, with its own deletion vectors. Merges without Spark continue it, and
    then Spark again.
    """
    monkeypatch.setattr(rewrite, "_SMALL_BYTES", 0)
    source = filled(house, 5, 40)
    with monkeypatch.context() as spark_alone:
        spark_alone.setattr(merge, "merge_without_spark", lambda *_: house.said.append(False))
        assert not house.apply(source.lsn)
        for turn in range(3):
            for key in range(turn, 40, 7):
                source.update(key)
            house.add(source.changes, source.lsn, source.commit())
            assert not house.apply(source.lsn)
    before = [file for file in TableLog(house.replica).refresh().files if "deletionVector" in file]
    assert before
    delta.checkpoint(house.spark, house.replica)
    for key in range(0, 40, 3):
        source.update(key)
    source.delete(1)
    source.update(2, 77)
    house.add(source.changes, source.lsn, source.commit())
    assert house.apply(source.lsn)
    assert house.rows() == comparable(source.rows.values())
    house.spark.sql(f"OPTIMIZE {delta.table_name(house.replica)}")
    source.update(77)
    house.add(source.changes, source.lsn, source.commit())
    assert house.apply(source.lsn)
    assert house.rows() == comparable(source.rows.values())


def test_a_key_in_another_order_than_the_columns(house: House) -> None:
    house.warehouse.write_versions(TABLE, [Version(0, 0, 7, KEY[::-1], KEY[::-1])])
    rows = [(1, 2, 0, "x", b""), (2, 1, 0, "y", b""), (1, 1, 0, "z", b""), (2, 2, 0, "v", b"")]
    house.append(SCHEMA, [change(lsn, "insert", row) for lsn, row in enumerate(rows, 1)], 0, 10)
    assert house.apply(10)
    deleted = (1, 2, None, None, None)
    moved = (3, 3, 7, "y", b"")
    house.append(
        SCHEMA, [change(11, "delete", deleted, old=deleted), change(12, "update", moved, old=(2, 1, None, None, None))], 10, 20
    )
    assert house.apply(20)
    assert house.rows() == comparable([moved, *rows[2:]])


def change(
    lsn: int, op: str, values: tuple[Any, ...], unchanged: list[str] | None = None, old: Any = None, exact: Any = None
) -> tuple[Any, ...]:
    return (*values, op, 1, lsn, 0, 1, None, unchanged, old, exact)


ONE = (1, 1, 5, "blob", b"o")
LEFT_TO_SPARK = {
    "a drop": (SCHEMA, [change(20, "drop", (None,) * 5)], []),
    "an exact text": (SCHEMA, [change(20, "insert", (1, 2, None, "x", b""), exact={"a": "9" * 99})], [(1, 2, None, "x", b"")]),
    "a moved row with a column left out": (
        SCHEMA,
        [change(20, "update", (1, 9, 6, None, b"n"), ["blob"], (1, 1, None, None, None))],
        [(1, 9, 6, "blob", b"n")],
    ),
}


def test_a_new_column(house: House) -> None:
    """The replica gets it, also a name that the files cannot have once the table has column mapping."""
    house.append(SCHEMA, [change(10, "insert", ONE), change(10, "insert", (1, 2, 6, "x", b""))], 0, 10)
    assert house.apply(10)
    house.append(schema_of(f"{COLUMNS}, more int"), [change(20, "update", (1, 2, 7, None, b"n", 4), ["blob"])], 10, 20)
    assert house.apply(20)
    assert house.rows("id", "a", "blob", "more") == comparable([(1, 5, "blob", None), (2, 7, "x", 4)])
    wider = schema_of(f"{COLUMNS}, more int, `unit price` decimal(9,2)")
    house.append(wider, [change(30, "insert", (1, 3, 8, "y", b"", 5, Decimal("1.25")))], 20, 30)
    assert not house.apply(30)  # Spark turns on column mapping
    widest = schema_of(f"{COLUMNS}, more int, `unit price` decimal(9,2), `a note` string")
    house.append(widest, [change(40, "update", (1, 1, 9, "z", b"", 6, Decimal(2), "n"))], 30, 40)
    assert house.apply(40)
    expected = [(1, 9, "z", 6, Decimal(2), "n"), (2, 7, "x", 4, None, None), (3, 8, "y", 5, Decimal("1.25"), None)]
    assert house.rows("id", "a", "blob", "more", "`unit price`", "`a note`") == comparable(expected)
    house.append(widest, [change(50, "drop", (None,) * 8)], 40, 50)
    assert not house.apply(50)  # Spark goes on with the table
    assert house.rows("`a note`") == []


def test_wider_types(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns get them, one of the key among them. The older files stay, one with a deletion vector. Spark goes on with them."""
    monkeypatch.setattr(rewrite, "_SMALL_BYTES", 0)
    monkeypatch.setattr(delta, "_widen_by_spark", None)
    narrow = f"{COLUMNS}, price decimal(5,2), day date, ratio float"
    own = (Decimal("1.25"), date(2026, 2, 3), 0.5)
    house.append(schema_of(narrow), [change(10, "insert", (1, key, key * 10, "x", b"", *own)) for key in range(4)], 0, 10)
    assert house.apply(10)
    wide = narrow
    for before, after in (
        ("id int", "id bigint"),
        ("a int", "a bigint"),
        ("(5,2)", "(12,4)"),
        ("date", "timestamp_ntz"),
        ("float", "double"),
    ):
        wide = wide.replace(before, after)
    new = (1 << 40, "y", b"", Decimal("12345678.1234"), datetime(2026, 2, 3, 4, 5), 0.1)
    deleted = (1, 3, *(None,) * 6)
    changes = [
        change(20, "update", (1, 1, *new)),
        change(20, "insert", (1, 1 << 40, *new)),
        change(20, "delete", deleted, old=deleted),
    ]
    house.append(schema_of(wide), changes, 10, 20)
    assert house.apply(20)
    files = list(TableLog(house.replica).refresh().files)
    assert any("deletionVector" in file for file in files)
    names = ("id", "a", "price", "day", "ratio")
    old = (Decimal("1.2500"), datetime(2026, 2, 3), 0.5)
    expected = [(0, 0, *old), (1, new[0], *new[3:]), (2, 20, *old), (1 << 40, new[0], *new[3:])]
    assert house.rows(*names) == comparable(expected)
    table = delta.table_name(house.replica)
    house.spark.sql(f"UPDATE {table} SET ratio = ratio + 1 WHERE id = 2")
    house.spark.sql(f"OPTIMIZE {table}")
    house.append(schema_of(wide), [change(30, "update", (1, 0, *new))], 20, 30)
    assert house.apply(30)
    expected = [(0, new[0], *new[3:]), *expected[1:2], (2, 20, *old[:2], 1.5), *expected[3:]]
    assert house.rows(*names) == comparable(expected)


FILLS = (
    Fill("more", value="5"),
    Fill("note", value=None),
    Fill("price", value="1.50"),
    Fill("tags", value="{a,NULL}"),
    Fill("renamed", "a"),
)


def test_new_columns_with_values(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several files, one with a deletion vector, get them; so do rows of the same round from before the columns."""
    monkeypatch.setattr(rewrite, "_SMALL_BYTES", 0)
    house.append(SCHEMA, [change(10, "insert", (1, key, key * 10, "x", b"")) for key in range(8)], 0, 10)
    assert house.apply(10)
    house.append(SCHEMA, [change(20, "delete", (1, 0, None, None, None), old=(1, 0, None, None, None))], 10, 20)
    assert house.apply(20)
    assert any("deletionVector" in file for file in TableLog(house.replica).refresh().files)
    house.append(SCHEMA, [change(25, "insert", (1, 9, 90, "x", b""))], 20, 25)
    house.warehouse.write_versions(TABLE, [Version(0, 0, 7, KEY, KEY), Version(30, 0, 7, KEY, KEY, FILLS)])
    wider = schema_of(f"{COLUMNS}, more int, note string, price decimal(9,2), tags array<string>, renamed int")
    own = (7, "n", Decimal(2), [], 8)
    house.append(wider, [change(30, "update", (1, 1, 6, "y", b"", *own))], 25, 30)

    def killed(*_: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(merge, "fill_without_spark", lambda *arguments: fill_without_spark(*arguments) and killed())
        with pytest.raises(KeyboardInterrupt):  # between the fill and the merge
            house.apply(30)
    assert house.said.pop()  # the piece before
    filled = (5, None, Decimal("1.50"), ["a", None])
    names = ("id", "more", "note", "price", "tags", "renamed")
    assert house.rows(*names) == comparable([(key, *filled, key * 10) for key in (*range(1, 8), 9)])
    assert read_table(house.replica).lsn == 29
    house.said.clear()
    assert house.apply(30)
    assert house.said == []
    assert house.rows(*names) == comparable([(1, *own), *((key, *filled, key * 10) for key in (*range(2, 8), 9))])


def test_values_that_are_left_to_spark(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica is too large, and then the column does not hold the value. At last two columns swap their names."""
    house.append(SCHEMA, [change(10, "insert", ONE)], 0, 10)
    assert house.apply(10)
    versions = [Version(0, 0, 7, KEY, KEY), Version(20, 0, 7, KEY, KEY, (Fill("more", value="5"),))]
    house.warehouse.write_versions(TABLE, versions)
    more = schema_of(f"{COLUMNS}, more int")
    house.append(more, [change(20, "insert", (1, 2, 5, "x", b"", 6))], 10, 20)
    with monkeypatch.context() as patched:
        patched.setattr(rewrite, "_MOST_FILLED_BYTES", 0)
        assert house.apply(20)  # of the changes before
    assert house.said == []
    assert house.rows("id", "more") == comparable([(1, 5), (2, 6)])
    house.warehouse.write_versions(TABLE, [*versions, Version(30, 0, 7, KEY, KEY, (Fill("price", value="12345.678"),))])
    most = schema_of(f"{COLUMNS}, more int, price decimal(4,2)")
    house.append(most, [change(30, "insert", (1, 3, 5, "x", b"", 7, Decimal(1)))], 20, 30)
    assert house.apply(30)
    rows = house.rows("id", "price", "_cdc_exact.price")
    assert rows == comparable([(1, None, "12345.678"), (2, None, "12345.678"), (3, Decimal(1), None)])
    swapped = Piece(KEY, (), 30, 40, is_new_table=False, fills=(Fill("a", "more"), Fill("more", "a")))
    assert not fill_without_spark(house.warehouse, TABLE, swapped)


@pytest.mark.parametrize("name", LEFT_TO_SPARK)
def test_unusual_changes_are_left_to_spark(house: House, name: str) -> None:
    schema, changes, added = LEFT_TO_SPARK[name]
    house.append(SCHEMA, [change(10, "insert", ONE)], 0, 10)
    assert house.apply(10)
    house.append(schema, changes, 10, 20)
    files, log = sorted(house.replica.rglob("*")), TableLog(house.replica).refresh().version
    piece = Piece(KEY, tuple((column,) for column in KEY), 10, 20, is_new_table=False)
    assert not merge_without_spark(house.warehouse, TABLE, piece, Position(1, 20))
    assert (sorted(house.replica.rglob("*")), TableLog(house.replica).refresh().version) == (files, log)
    assert not house.apply(20)
    stays = [] if name in ("a drop", "a moved row with a column left out") else [ONE]
    assert house.rows() == comparable([*stays, *added])


@pytest.mark.parametrize("kind", ["float", "double", "array<int>"])
def test_keys_that_are_compared_otherwise(house: House, kind: str) -> None:
    value = [1, 2] if kind == "array<int>" else 0.5
    house.warehouse.write_versions(TABLE, [Version(0, 0, 7, ("k",), ("k",))])
    house.append(schema_of(f"k {kind}"), [change(10, "insert", (value,))], 0, 10)
    assert not house.apply(10)
    assert house.rows("k") == [(value,)]


def test_a_value_that_was_not_sent_and_is_not_known(house: House) -> None:
    """A row that is older than the slot is updated without its large column. Spark marks the column in the replica."""
    house.append(SCHEMA, [change(10, "update", (1, 1, 5, None, b"o"), ["blob"])], 0, 10)
    assert not house.apply(10)
    assert house.rows("id", "blob", "_cdc_unchanged") == [(1, None, ["blob"])]
    # From then on each column that was not sent may be one that is not known.
    house.append(SCHEMA, [change(20, "update", (1, 1, 6, None, b"o"), ["blob"])], 10, 20)
    assert not house.apply(20)
    house.append(SCHEMA, [change(30, "update", (1, 1, 6, "now", b"o"))], 20, 30)
    assert house.apply(30)
    assert house.rows("id", "blob", "_cdc_unchanged") == [(1, "now", None)]


def test_a_value_that_was_not_sent_of_a_column_that_the_replica_always_had(house: House) -> None:
    """The column came after the row, and before the replica. Another row has NULL there, and stays as it is."""
    blobs = [(1, 1, 5, None, b"o"), (1, 2, 5, None, b"o"), (1, 3, 5, "three", b"o")]
    house.append(SCHEMA, [change(10, "insert", row) for row in blobs], 0, 10)
    assert house.apply(10)
    house.append(SCHEMA, [change(20, "update", (1, 3, 6, None, b"o"), ["blob"])], 10, 20)
    assert house.apply(20)
    house.append(SCHEMA, [change(30, "update", (1, key, 7, None, b"o"), ["blob"]) for key in (1, 3)], 20, 30)
    assert not house.apply(30)
    assert house.rows("id", "a", "blob", "_cdc_unchanged") == [(1, 7, None, ["blob"]), (2, 5, None, None), (3, 7, "three", None)]


def test_a_column_with_the_name_of_sparks_hidden_one(house: House, tmp_path: Path) -> None:
    """A replica of an older version may have such a column. Without deletion vectors, Delta merges it."""
    house.warehouse = Warehouse(tmp_path / "another", "delta", readers="any")
    house.warehouse.open(EPOCH)
    house.warehouse.write_versions(TABLE, [Version(0, 0, 7, ("id",), ("id",))])
    schema = schema_of("id int, _metadata string")
    house.append(schema, [change(10, "insert", (key, f"own {key}")) for key in (1, 2)], 0, 10)
    assert house.apply(10)
    house.append(schema, [change(20, "update", (3, None), ["_metadata"])], 10, 20)
    assert not house.apply(20)
    assert house.rows("id", "_metadata", "_cdc_unchanged") == [(1, "own 1", None), (2, "own 2", None), (3, None, ["_metadata"])]


def test_another_program_commits_meanwhile(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program deletes a row after the merge has read the files, and before its commit. The merge reads again."""
    monkeypatch.setattr(rewrite, "_SMALL_BYTES", 0)
    source = filled(house, 6, 4)
    assert house.apply(source.lsn)
    source.update(2)
    house.add(source.changes, source.lsn, source.commit())
    commit, calls = file_table.commit, []

    def late(*arguments: Any, **options: Any) -> None:
        if not calls:
            house.spark.sql(f"DELETE FROM {delta.table_name(house.replica)} WHERE id = 3")
        calls.append(arguments)
        commit(*arguments, **options)

    monkeypatch.setattr(file_table, "commit", late)
    assert house.apply(source.lsn)
    assert len(calls) == 2
    source.rows.pop(3)
    assert house.rows() == comparable(source.rows.values())


def test_a_column_that_another_program_has_widened(house: House) -> None:
    """It stays wide. The values of the changelog fit into it."""
    source = filled(house, 8, 20)
    assert house.apply(source.lsn)
    delta.widen(
        house.spark, house.replica, StructType([StructField("a", IntegerType())]), StructType([StructField("a", LongType())])
    )
    source.update(3)
    source.insert(20)
    house.add(source.changes, source.lsn, source.commit())
    assert not house.apply(source.lsn)
    assert house.rows() == comparable(source.rows.values())
    merge.remake(house.spark, house.warehouse, TABLE, Position(1, source.lsn))
    assert house.rows() == comparable(source.rows.values())
    assert dict(delta.read(house.spark, house.replica).dtypes)["a"] == "bigint"


def test_small_files_do_not_pile_up(house: House) -> None:
    for number in range(30):
        lsn = 10 * (number + 1)
        house.append(SCHEMA, [change(lsn, "insert", (1, number, 0, "x", b""))], lsn - 10, lsn)
        assert house.apply(lsn)
    state = read_table(house.replica)
    assert state is not None
    assert state.files <= 9
    assert [row[0] for row in house.rows("id")] == list(range(30))


def test_files_that_have_none_of_the_keys(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica is clustered first by a text, then by its numeric key. The merge reads only files that may have the keys."""
    monkeypatch.setattr(rewrite, "_SMALL_BYTES", 0)
    monkeypatch.setattr(upkeep, "_MOST_SMALL_FILES", -1)
    monkeypatch.setattr(upkeep, "_CLUSTERED_BYTES", 150)
    reading: set[str] = set()

    def listened(directory: Path, file: Any, fields: Any) -> Any:
        if directory == house.replica:
            reading.add(file["path"])
        return read_columns(directory, file, fields)

    monkeypatch.setattr(rewrite, "read_columns", listened)
    versions = [Version(0, 0, 7, ("k",), ("k",))]
    house.warehouse.write_versions(TABLE, versions)
    schema, rows = (
        schema_of("k string, n int"),
        {number: (f"{number * 37 % 60:02} é\U0001f34e{'x' * 40}", number) for number in range(60)},
    )
    for turn in range(3):
        house.append(
            schema, [change(10 * turn + 10, "insert", rows[number]) for number in range(turn, 60, 3)], 10 * turn, 10 * turn + 10
        )
        assert house.apply(10 * turn + 10)
    lock = TableLock(house.warehouse.root)
    care = Upkeep(house.spark, house.warehouse, lock, optimize_interval_s=0.0, vacuum_retention_s=None, clustering=True)
    for lsn, key, number in ((40, "k", 7), (60, "n", 8)):
        if key == "n":
            versions.append(Version(50, 0, 7, ("n",), ("n",)))
            house.warehouse.write_versions(TABLE, versions)
            rows[60] = ("new", 60)
            house.append(schema, [change(50, "insert", rows[60])], 40, 50)
            merge.merge_changes(house.spark, house.warehouse, TABLE, Position(1, 50))
        care.run()
        found = house.spark.sql(f"DESCRIBE DETAIL {delta.table_name(house.replica)}").collect()[0]
        assert (found.clusteringColumns, found.numFiles > 2) == ([key], True)
        if key == "n":
            delta.checkpoint(house.spark, house.replica)  # it says, too, by what the table is clustered
        reading.clear()
        rows[number] = (rows[number][0], 1000 + number) if key == "k" else (f"{number}", number)
        house.append(schema, [change(lsn, "update", rows[number])], lsn - 10, lsn)
        assert house.apply(lsn)
        assert len(reading) == 1
        assert_noted(house.replica, rows[number][key == "n"])
        found_row = delta.read(house.spark, house.replica).where(f"k = '{rows[number][0]}'").collect()
        assert [(row.k, row.n) for row in found_row] == [rows[number]]
    assert house.rows("k", "n") == comparable(rows.values())


@pytest.mark.parametrize("stats", ['{"numRecords": 3, "minValues": null}', "[]"], ids=["TypeError", "AttributeError"])
def test_unknown_features_are_left_to_spark(house: House, stats: str) -> None:
    """Any feature of the table that the merge without Spark does not know."""
    source = filled(house, 1, 3)
    assert house.apply(source.lsn)
    log = TableLog(house.replica).refresh()
    (file,) = log.files
    added = {"add": {**file, "stats": stats, "dataChange": False}}
    commit_path(house.replica, log.version + 1).write_text(json.dumps({"commitInfo": {}}) + "\n" + json.dumps(added))
    start = source.lsn
    source.update(0)
    house.add(source.changes, start, source.commit())
    assert not house.apply(source.lsn)
    assert house.rows() == comparable(source.rows.values())


def assert_noted(replica: Path, value: Any) -> None:
    """Check that the files have statistics of the columns that cluster the table, as Delta's protocol asks."""
    log = TableLog(replica).refresh()
    (column,) = log.clustering
    added = [json.loads(line).get("add") for line in places.read_lines(commit_path(replica, log.version))]
    found = [json.loads(each["stats"]) for each in added if each is not None and "deletionVector" not in each]
    (bounds,) = [(each["minValues"][column], each["maxValues"][column]) for each in found]
    cut = value[:32] if isinstance(value, str) else value
    assert bounds == (cut, f"{cut}\U0010ffff" if cut != value else value)
    assert all(each["nullCount"][column] == 0 for each in found)


def test_a_checkpoint_of_the_second_form(spark: Any, tmp_path: Path) -> None:
    name = delta.table_name(tmp_path / "t")
    spark.sql(f"CREATE TABLE {name} (id bigint) USING delta TBLPROPERTIES ('delta.checkpointPolicy' = 'v2')")
    for number in range(3):
        spark.sql(f"INSERT INTO {name} VALUES ({number})")
    whole = TableLog(tmp_path / "t").refresh()
    delta.checkpoint(spark, tmp_path / "t")
    spark.sql(f"INSERT INTO {name} VALUES (3)")
    for number in range(2):
        (tmp_path / f"t/_delta_log/{number:020d}.json").unlink()
    again = TableLog(tmp_path / "t").refresh()
    assert again.version == whole.refresh().version == 4
    assert {file["path"] for file in again.files} == {file["path"] for file in whole.files}
    assert (again.metadata["schemaString"], again.protocol) == (whole.metadata["schemaString"], whole.protocol)
    assert json.loads(next(iter(again.files))["stats"])["numRecords"] == 1
    (tmp_path / f"t/_delta_log/{4:020d}.json").rename(tmp_path / f"t/_delta_log/{5:020d}.json")
    with pytest.raises(ValueError, match=rf"lacks a commit .*/{4:020d}\.json"):
        TableLog(tmp_path / "t").refresh()
