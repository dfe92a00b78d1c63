"""Small files of a Delta table are put together while others write to it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import ArrayType, DecimalType, LongType, MapType, StringType, StructField, StructType, TimestampType

from spark_sink.delta import compaction, file_table, row_groups
from spark_sink.delta.compaction import compact
from spark_sink.delta.file_table import ChangedError, DeltaError
from spark_sink.delta.log import TableLog, commit_path
from spark_sink.delta.rows import UnsupportedError
from spark_sink.delta.schema import arrow_schema
from spark_sink.files.parquet import FileWriter, part_name
from spark_sink.staging.log import Position

SMALL = 1 << 20
OLD = StructType([StructField("id", LongType()), StructField("text", StringType())])
SCHEMA = StructType(
    [
        StructField("id", LongType()),
        StructField("a text", StringType()),
        StructField("at", TimestampType()),
        StructField("price", DecimalType(12, 2)),
        StructField("old", OLD),
        StructField("exact", MapType(StringType(), StringType())),
        StructField("names", ArrayType(StringType())),
    ]
)


def row(number: int) -> dict[str, Any]:
    value = {
        "id": number,
        "a text": f"text {number}",
        "at": number * 10**6,
        "price": Decimal(number) / 4,
        "old": {"id": number, "text": None},
    }
    return value | {"exact": [("a text", "1")] if number % 2 else None, "names": ["x", None]}


def append(table: file_table.FileTable, *numbers: int, without: tuple[str, ...] = ()) -> None:
    writer = FileWriter(str(table.path), part_name(), table.layout(without=without))
    table.path.mkdir(exist_ok=True)
    columns = {field.name: pa.array([row(each)[field.name] for each in numbers], field.type) for field in arrow_schema(SCHEMA)}
    writer.write(columns, len(numbers))
    file_table.commit(table, [writer.close()], Position(1, table.lsn + 1))


def made(path: Path, files: int = 5) -> file_table.FileTable:
    table = file_table.define(path, SCHEMA, {})  # a name with a space: the files have other names for the columns
    for number in range(files):
        append(table, 2 * number, 2 * number + 1)
    return table


def rows(path: Path) -> list[str]:
    """Return the rows as text, by the columns' names in the files."""
    log = TableLog(path).refresh()
    return [str(each) for file in log.files for each in pq.read_table(path / file["path"]).to_pylist()]


def test_files_become_one(tmp_path: Path) -> None:
    table = made(tmp_path / "t")
    before, version = rows(table.path), TableLog(table.path).refresh().version
    assert compact(table.path, SMALL, nullcontext) == 5
    log = TableLog(table.path).refresh()
    assert (len(log.files), log.version, log.lsn) == (1, version + 1, 5)
    assert rows(table.path) == before  # in the same order
    assert compact(table.path, SMALL, nullcontext) == 0
    assert TableLog(table.path).refresh().version == log.version
    # A writer that knows the table from before goes on.
    append(table, 100)
    assert len(rows(table.path)) == 11
    kept = [file for file in table.path.glob("*.parquet") if pq.read_metadata(file).num_rows != 10]
    assert len(kept) == 6  # for readers of an older version; VACUUM removes them


def test_its_commit_changes_no_rows(tmp_path: Path) -> None:
    """A Delta stream that reads the table skips such a commit."""
    table = made(tmp_path / "t")
    compact(table.path, SMALL, nullcontext)
    actions = [*map(json.loads, commit_path(table.path, 5).read_text().splitlines())]
    changes = [body for action in actions for kind, body in action.items() if kind in ("add", "remove")]
    assert [body["dataChange"] for body in changes] == [False] * 6


def test_groups_have_the_wanted_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = made(tmp_path / "t", files=7)
    size = max(int(file["size"]) for file in TableLog(table.path).refresh().files)
    monkeypatch.setattr(row_groups, "_MOST_ROWS", 4)
    before = rows(table.path)
    assert compact(table.path, size + 1, nullcontext) == 6  # in twos: the last one stays alone
    assert sorted(rows(table.path)) == sorted(before)
    assert compact(table.path, 1, nullcontext) == 0  # no file is that small


def test_alike_values_of_small_files_are_not_in_memory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of gigabytes may take a megabyte on disk, and Arrow puts no more than 2 GiB into one array."""
    monkeypatch.setattr(row_groups, "_MOST_BYTES", 4 << 20)
    monkeypatch.setattr(compaction, "_BATCH_ROWS", 2)
    schema = StructType([StructField("text", StringType())])
    table = file_table.define(tmp_path / "t", schema, {})
    table.path.mkdir()
    for count in (40, 1):
        writer = FileWriter(str(table.path), part_name(), table.layout())
        writer.write({"text": pa.array(["x" * (1 << 20)] * count)}, count)
        file_table.commit(table, [writer.close()], Position(1, table.lsn + 1))
    assert compact(table.path, SMALL, nullcontext) == 2
    (file,) = TableLog(table.path).refresh().files
    written = pq.ParquetFile(table.path / file["path"])
    assert written.metadata.num_rows == 41
    assert max(written.metadata.row_group(each).num_rows for each in range(written.num_row_groups)) <= 5


def test_others_write_meanwhile(tmp_path: Path) -> None:
    table = made(tmp_path / "t")
    held = []

    @contextmanager
    def right() -> Iterator[None]:
        append(table, 50)  # between the look at the table and the commit
        held.append(1)
        yield

    assert compact(table.path, SMALL, right) == 5
    assert held == [1]
    log = TableLog(table.path).refresh()
    assert (len(log.files), log.lsn) == (2, 6)
    assert len(rows(table.path)) == 11


def lose_a_file(table: file_table.FileTable) -> None:
    log = TableLog(table.path).refresh()
    file_table.commit(table, [], Position(1, 90), replaced=[file_table.Replaced(next(iter(log.files)))])


def get_a_comment(table: file_table.FileTable) -> None:
    schema = StructType([*SCHEMA, StructField("more", LongType())])
    text = schema.json()
    file_table.redefine(table.path, "ADD COLUMNS", lambda log: {**log.metadata, "schemaString": text})


@pytest.mark.parametrize("change", [lose_a_file, get_a_comment])
def test_a_table_that_changes_meanwhile_stays_as_it_is(tmp_path: Path, change: Callable[[file_table.FileTable], None]) -> None:
    table = made(tmp_path / "t")

    @contextmanager
    def right() -> Iterator[None]:
        change(table)
        yield

    with pytest.raises(ChangedError):
        compact(table.path, SMALL, right)
    assert TableLog(table.path).refresh().version == 5
    assert len(list(table.path.glob("*.parquet"))) == 5  # the new file is gone


def test_a_stop_while_another_process_has_the_table_leaves_nothing(tmp_path: Path) -> None:
    @contextmanager
    def right() -> Iterator[None]:
        raise InterruptedError
        yield

    table = made(tmp_path / "t")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InterruptedError):
        compact(table.path, SMALL, right)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_commit_with_an_unknown_end_keeps_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may have the commit although the connection was lost."""
    table = made(tmp_path / "t")

    def lose(*arguments: Any) -> None:
        write(*arguments)
        raise OSError("the connection was lost")

    write = file_table._write
    monkeypatch.setattr(file_table, "_write", lose)
    with pytest.raises(OSError, match="the connection was lost"):
        compact(table.path, SMALL, nullcontext)
    assert len(rows(table.path)) == 10


def test_a_stop_leaves_nothing(tmp_path: Path) -> None:
    table = made(tmp_path / "t")
    asked: list[int] = []
    assert compact(table.path, SMALL, nullcontext, lambda: bool(asked.append(1)) or len(asked) > 2) == 0
    assert (TableLog(table.path).refresh().version, len(list(table.path.glob("*.parquet")))) == (4, 5)


def test_a_column_that_a_file_lacks_is_null(tmp_path: Path) -> None:
    """A snapshot's rows have no old row, and no file has a column that was added later."""
    table = made(tmp_path / "t", files=2)
    append(table, 7, without=("old", "price"))
    old = file_table.open_table(table.path).layout().schema.names[4]
    assert compact(table.path, SMALL, nullcontext) == 3
    [file] = TableLog(table.path).refresh().files
    assert [each[old] is None for each in pq.read_table(table.path / file["path"]).to_pylist()] == [False] * 4 + [True]


def test_what_needs_spark_is_left_to_it(tmp_path: Path) -> None:
    other = file_table.define(tmp_path / "other", StructType([StructField("id", LongType())]), {})
    other.path.mkdir()
    for number in range(2):
        writer = FileWriter(str(other.path), part_name(), other.layout())
        writer.write({"id": pa.array([number])}, 1)
        file_table.commit(other, [writer.close()], Position(1, number + 1))
    first = next(iter(TableLog(other.path).refresh().files))
    pq.write_table(pa.table({"id": pa.array([1], pa.int32())}), other.path / first["path"])
    with pytest.raises(UnsupportedError, match="other types"):
        compact(other.path, SMALL, nullcontext)
    pq.write_table(pa.table({"id": pa.array([1, 2])}), other.path / first["path"])
    with pytest.raises(UnsupportedError, match="not as many rows"):
        compact(other.path, SMALL, nullcontext)
    assert TableLog(other.path).refresh().version == 1
    assert len(list(other.path.glob("*.parquet"))) == 2


def test_a_name_with_a_dot_is_left_to_spark(tmp_path: Path) -> None:
    """Arrow takes it for a field of a struct. (Our own tables have other names in their files.)"""
    table = made(tmp_path / "t")
    text = StructType([StructField("a.b", LongType())]).json()
    file_table.redefine(table.path, "REPLACE COLUMNS", lambda log: {**log.metadata, "schemaString": text, "configuration": {}})
    with pytest.raises(UnsupportedError, match="a dot"):
        compact(table.path, SMALL, nullcontext)


def test_a_file_with_another_number_of_rows_is_refused(tmp_path: Path) -> None:
    table = made(tmp_path / "t", files=2)
    log = TableLog(table.path).refresh()
    writer = FileWriter(str(table.path), part_name(), table.layout())
    with pytest.raises(DeltaError, match=r"0 rows were written to .*, but the files to replace have 4"):
        file_table.replace_files(log, table, list(log.files), writer.close())
    assert TableLog(table.path).refresh().version == 1


def test_files_in_the_julian_calendar_are_left_to_spark(tmp_path: Path) -> None:
    table = made(tmp_path / "t")
    for path in table.path.glob("*.parquet"):
        pq.write_table(pq.read_table(path).replace_schema_metadata({"org.apache.spark.legacyDateTime": ""}), path)
    before = sorted(table.path.iterdir())
    with pytest.raises(UnsupportedError, match="the Julian calendar"):
        compact(table.path, SMALL, nullcontext)
    assert sorted(table.path.iterdir()) == before
