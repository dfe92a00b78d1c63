"""Replaces rows of a Delta table by key, without Spark and without change data."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from spark_sink.delta import file_table, rewrite, row_groups, rows
from spark_sink.delta.file_table import ChangedError
from spark_sink.delta.log import TableLog, commit_path
from spark_sink.delta.rewrite import Rewrite
from spark_sink.delta.rows import UnsupportedError, fields_of, files_between, read_between
from spark_sink.staging.log import Position
from support.delta_tables import rows_of

COLUMNS = StructType([StructField("shelf", StringType()), StructField("id", LongType()), StructField("title", StringType())])
KEY = ("id", "shelf")
PROPERTIES = {"delta.enableDeletionVectors": "true"}
BOOKS = [("a", number, f"book {number}") for number in range(6)]


def arrays(rows: list[tuple[Any, ...]]) -> dict[str, pa.Array]:
    kinds = {"shelf": pa.string(), "id": pa.int64(), "title": pa.string()}
    return {name: pa.array([row[index] for row in rows], kind) for index, (name, kind) in enumerate(kinds.items())}


def keys(*values: tuple[int, str]) -> pa.Table:
    return pa.table({"k0": pa.array([each[0] for each in values], pa.int64()), "k1": pa.array([each[1] for each in values])})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = Rewrite.new(tmp_path / "books", KEY, COLUMNS, PROPERTIES)
    made.add(arrays(BOOKS), []).commit(Position(1, 10))
    return tmp_path / "books"


def again(path: Path) -> Rewrite:
    return Rewrite.of_log(TableLog(path).refresh(), KEY)


@pytest.mark.parametrize("small_bytes", [0, 1 << 20], ids=["deletion vectors", "files written anew"])
def test_rows_are_replaced_by_key(path: Path, monkeypatch: pytest.MonkeyPatch, small_bytes: int) -> None:
    monkeypatch.setattr(rewrite, "_SMALL_BYTES", small_bytes)
    table = again(path)
    found = table.find(keys((1, "a"), (2, "b"), (9, "a"), (4, "a")))
    (file,) = found
    assert dict(zip(file.keys.tolist(), file.rows.tolist(), strict=True)) == {0: 1, 3: 4}
    assert table.values(file.file, ["title"], file.rows[file.keys == 3])["title"].to_pylist() == ["book 4"]
    table.add(arrays([("a", 1, "new")]), found).commit(Position(1, 20))
    assert rows_of(path) == [("a", 0, "book 0"), ("a", 1, "new"), ("a", 2, "book 2"), ("a", 3, "book 3"), ("a", 5, "book 5")]
    log = TableLog(path).refresh()
    assert log.lsn == 20
    assert any("deletionVector" in each for each in log.files) == (small_bytes == 0)

    # What has gone is not found once more, and a file of which all rows go is no part of the table any more.
    table = again(path)
    found = table.find(keys((1, "a"), (4, "a"), *((number, "a") for number in (0, 2, 3, 5))))
    assert sum(len(each.rows) for each in found) == 5
    table.add(arrays([]), found).commit(Position(1, 30))
    assert (rows_of(path), list(TableLog(path).refresh().files)) == ([], [])


@pytest.mark.parametrize(("most_values", "has_vector"), [(len(BOOKS) * len(COLUMNS), True), (len(BOOKS) * len(COLUMNS) + 1, False)])
def test_a_file_with_few_bytes_and_many_values_is_not_written_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch, most_values: int, has_vector: bool
) -> None:
    monkeypatch.setattr(rewrite, "_SMALL_VALUES", most_values)
    table = again(path)
    table.add(arrays([("a", 1, "new")]), table.find(keys((1, "a")))).commit(Position(1, 20))
    assert rows_of(path) == [BOOKS[0], ("a", 1, "new"), *BOOKS[2:]]
    assert any("deletionVector" in file for file in TableLog(path).refresh().files) == has_vector


def test_files_without_the_keys_are_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "_SMALL_BYTES", 0)
    again(path).add(arrays([("a", number, "far") for number in range(100, 103)]), []).commit(Position(1, 20))
    found = again(path).find(keys((101, "a")))
    assert [each.rows.tolist() for each in found] == [[1]]
    log = TableLog(path).refresh()
    fields = fields_of(file_table.of_log(log).physical, COLUMNS.names)
    (file,) = files_between(log.files, fields["id"].name, 50, 101)
    assert read_between(path, file, fields, "id", 50, 101)["id"].to_pylist() == [100, 101]


def test_another_commit_meanwhile_is_an_error(path: Path) -> None:
    table = again(path)
    commit_path(path, 1).write_text(json.dumps({"commitInfo": {}}) + "\n")
    with pytest.raises(ChangedError):
        table.add(arrays([]), table.find(keys((1, "a")))).commit(Position(1, 20))
    assert rows_of(path) == BOOKS


def test_an_error_before_the_commit_leaves_no_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new row has its file already when the marks of the replaced one can't be written: the disk is full."""
    there = sorted(path.iterdir())
    monkeypatch.setattr(rewrite, "_SMALL_BYTES", 0)

    def full(_: int) -> None:
        assert len(list(path.iterdir())) == len(there) + 2
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    table = again(path)
    found = table.find(keys((1, "a")))
    table.add(arrays([("a", 1, "new")]), found).add(arrays([]), [])
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        table.commit(Position(1, 20))
    assert sorted(path.iterdir()) == there


CHANGE_DATA_FEED = PROPERTIES | {"delta.enableChangeDataFeed": "true"}


def test_a_table_that_asks_for_more_is_left_alone(tmp_path: Path) -> None:
    file_table.commit(file_table.define(tmp_path / "t", COLUMNS, CHANGE_DATA_FEED), [], Position(1, 10))
    with pytest.raises(UnsupportedError, match="ChangeDataFeed"):
        again(tmp_path / "t")


def test_a_file_is_written_anew_in_small_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file may have gigabytes of values, if they are alike."""
    monkeypatch.setattr(rows, "_BATCH_ROWS", 2)
    monkeypatch.setattr(row_groups, "_MOST_ROWS", 2)
    table = again(path)
    table.add(arrays([("a", 1, "new")]), table.find(keys((1, "a")))).commit(Position(1, 20))
    assert rows_of(path) == [BOOKS[0], ("a", 1, "new"), *BOOKS[2:]]
    [file] = TableLog(path).refresh().files
    metadata = pq.read_metadata(path / file["path"])
    assert [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)] == [1, 3, 2]


def test_the_values_of_all_files_have_one_budget(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates that leave a column out bring the values of all their rows from the table."""
    again(path).add(arrays([("b", number, "title") for number in range(6)]), []).commit(Position(1, 20))
    monkeypatch.setattr(rewrite, "_MOST_BYTES", 80)
    table = again(path)
    found = table.find(keys(*((number, shelf) for number in range(6) for shelf in "ab")))
    first, second = (lambda each=each: table.values(each.file, ["title"], each.rows) for each in found)
    first()
    with pytest.raises(UnsupportedError, match="many bytes"):
        second()
    table.add(arrays([]), [])  # what follows is another part of the changes
    second()


def test_without_deletion_vectors_larger_files_are_written_anew_each_on_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrite, "_SMALL_BYTES", 0)
    path = tmp_path / "books"
    Rewrite.new(path, KEY, COLUMNS, {}).add(arrays(BOOKS), []).commit(Position(1, 10))
    again(path).add(arrays([("a", number, "far") for number in range(100, 103)]), []).commit(Position(1, 20))
    table = again(path)
    table.add(arrays([("a", 1, "new")]), table.find(keys((1, "a"), (2, "a"), (101, "a")))).commit(Position(1, 30))
    far = [("a", 100, "far"), ("a", 102, "far")]
    assert rows_of(path) == [BOOKS[0], ("a", 1, "new"), *BOOKS[3:], *far]
    log = TableLog(path).refresh()
    assert sorted(json.loads(file["stats"])["numRecords"] for file in log.files) == [1, 2, 4]
    assert log.features("readerFeatures") == set()

    monkeypatch.setattr(rewrite, "_MOST_REWRITTEN_BYTES", 1)
    table = again(path)
    with pytest.raises(UnsupportedError, match="to write anew"):
        table.add(arrays([]), table.find(keys((3, "a")))).commit(Position(1, 40))
    assert TableLog(path).refresh().lsn == 30
