"""How much is read at most: the budget of uncompressed bytes, and only row groups with wanted rows."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from spark_sink.delta.log import TableLog
from spark_sink.delta.rewrite import Rewrite
from spark_sink.delta.rows import Budget, UnsupportedError, read_columns, read_rows, uncompressed_bytes
from spark_sink.staging.log import Position

FIELDS = {"id": pa.field("id", pa.int64()), "text": pa.field("text", pa.string())}


@pytest.fixture
def log(tmp_path: Path) -> TableLog:
    """Return the log of a table with one file. It is small, and its texts are not."""
    made = Rewrite.new(tmp_path / "t", ("id",), StructType([StructField("id", LongType()), StructField("text", StringType())]), {})
    made.add({"id": pa.array(range(1000)), "text": pa.array(f"{i} {'x' * 1000}" for i in range(1000))}, []).commit(Position(1, 10))
    return TableLog(tmp_path / "t").refresh()


def test_a_file_counts_with_its_uncompressed_bytes(log: TableLog) -> None:
    (file,) = log.files
    size = uncompressed_bytes(log.path, file)
    assert file["size"] < 100_000 < 1_000_000 < size
    assert read_columns(log.path, file, FIELDS, Budget(size))["id"].to_pylist() == list(range(1000))
    with pytest.raises(UnsupportedError, match="many bytes to read"):
        read_columns(log.path, file, FIELDS, Budget(size - 1))


def test_threads_share_a_budget(log: TableLog) -> None:
    (file,) = log.files
    budget = Budget(5 * uncompressed_bytes(log.path, file))

    def read(_: int) -> Any:
        try:
            return len(read_columns(log.path, file, FIELDS, budget)["id"])
        except UnsupportedError:
            return None

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(read, range(20)))
    assert (found.count(1000), found.count(None)) == (5, 15)


@pytest.mark.parametrize("rows", [[], [0], [99, 100, 101], [5, 999], list(range(1000))])
def test_some_rows_of_a_file(log: TableLog, monkeypatch: pytest.MonkeyPatch, rows: list[int]) -> None:
    """A row group counts as a whole while it is read. Of those read before, only the wanted rows count."""
    (file,) = log.files
    path = log.path / file["path"]
    pq.write_table(pq.read_table(path), path, row_group_size=100)
    one = max(pq.ParquetFile(path).metadata.row_group(number).total_byte_size for number in range(10))
    file = {**file, "size": path.stat().st_size}
    read: list[int] = []
    group = pq.ParquetFile.read_row_group
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", lambda *given: read.append(given[1]) or group(*given))
    wanted = np.array(rows, dtype=np.int64)
    found = read_rows(log.path, file, FIELDS, wanted, Budget(10 * one + len(rows) * 1100))
    assert found["id"].to_pylist() == rows
    assert [text.split()[0] for text in found["text"].to_pylist()] == [str(row) for row in rows]
    assert read == sorted({row // 100 for row in rows})
    if rows:
        with pytest.raises(UnsupportedError, match="many bytes to read"):
            read_rows(log.path, file, FIELDS, wanted, Budget(one // 2))


@pytest.mark.parametrize("key", ["org.apache.spark.legacyDateTime", "org.apache.spark.legacyINT96"])
def test_a_file_in_the_julian_calendar_is_left_to_spark(log: TableLog, key: str) -> None:
    """Spark wrote it with the setting datetimeRebaseModeInWrite or int96RebaseModeInWrite LEGACY. Arrow does not know the key."""
    (file,) = log.files
    path = log.path / file["path"]
    pq.write_table(pq.read_table(path).replace_schema_metadata({key: ""}), path)
    file = {**file, "size": path.stat().st_size}
    with pytest.raises(UnsupportedError, match="the Julian calendar"):
        read_columns(log.path, file, FIELDS)
    with pytest.raises(UnsupportedError, match="the Julian calendar"):
        read_rows(log.path, file, FIELDS, np.array([1]), Budget(1 << 20))
    with pytest.raises(UnsupportedError, match="the Julian calendar"):
        uncompressed_bytes(log.path, file)
