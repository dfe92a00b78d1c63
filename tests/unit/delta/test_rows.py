"""How much is read at most: the budget of bytes in memory, and only row groups with wanted rows."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from spark_sink.delta import rows as delta_rows
from spark_sink.delta.log import TableLog
from spark_sink.delta.rewrite import Rewrite
from spark_sink.delta.rows import (
    Budget,
    ManyBytesError,
    UnsupportedError,
    encoded_bytes,
    read_batches,
    read_between,
    read_columns,
    read_rows,
    read_where,
)
from spark_sink.staging.log import Position

FIELDS = {"id": pa.field("id", pa.int64()), "text": pa.field("text", pa.string())}


@pytest.fixture
def log(tmp_path: Path) -> TableLog:
    """Return the log of a table with one file. It is small, and its texts, which are alike, are not."""
    made = Rewrite.new(tmp_path / "t", ("id",), StructType([StructField("id", LongType()), StructField("text", StringType())]), {})
    made.add({"id": pa.array(range(1000)), "text": pa.array(f"{i // 100} {'x' * 1000}" for i in range(1000))}, []).commit(
        Position(1, 10)
    )
    return TableLog(tmp_path / "t").refresh()


def test_values_count_with_their_bytes_in_memory(log: TableLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary has each text once: Parquet's uncompressed size is a hundredth of what they take in memory."""
    monkeypatch.setattr(delta_rows, "_BATCH_ROWS", 10)
    (file,) = log.files
    size = sum(values.nbytes for values in read_columns(log.path, file, FIELDS).values())
    assert encoded_bytes(log.path, file) < 50_000 < 1_000_000 < size
    for read in (
        lambda budget: read_columns(log.path, file, FIELDS, budget),
        lambda budget: read_between(log.path, file, FIELDS, "id", -1, 999, budget),
        lambda budget: read_where(log.path, file, FIELDS, ["id"], lambda found: np.ones(len(found["id"]), dtype=bool), budget),
        lambda budget: read_rows(log.path, file, FIELDS, np.arange(1000), budget),
    ):
        assert read(Budget(size + 2000))["id"].to_pylist() == list(range(1000))
        with pytest.raises(ManyBytesError, match="many bytes to read"):
            read(Budget(size - 10_000))
    assert len(read_between(log.path, file, FIELDS, "id", 0, 10, Budget(20_000))["id"]) == 10  # only these rows count


def test_a_batch_has_no_rows_of_two_row_groups(log: TableLog) -> None:
    """Row groups of large rows have few of them. A batch of many row groups took gigabytes before the budget counted it."""
    (file,) = log.files
    path = log.path / file["path"]
    pq.write_table(pq.read_table(path), path, row_group_size=100)
    file = {**file, "size": path.stat().st_size}
    assert [count for _, count in read_batches(log.path, file, FIELDS)] == [100] * 10


def test_threads_share_a_budget(log: TableLog) -> None:
    (file,) = log.files
    budget = Budget(5 * sum(values.nbytes for values in read_columns(log.path, file, FIELDS).values()) + 1000)

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
    """Only the row groups that have some of them are read, and only these rows count."""
    (file,) = log.files
    path = log.path / file["path"]
    pq.write_table(pq.read_table(path), path, row_group_size=100)
    file = {**file, "size": path.stat().st_size}
    read: list[int] = []
    batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *given, **more: read.extend(given[2]) or batches(*given, **more))
    wanted = np.array(rows, dtype=np.int64)
    found = read_rows(log.path, file, FIELDS, wanted, Budget(len(rows) * 1100))
    assert found["id"].to_pylist() == rows
    assert [text.split()[0] for text in found["text"].to_pylist()] == [str(row // 100) for row in rows]
    assert read == sorted({row // 100 for row in rows})
    if rows:
        with pytest.raises(UnsupportedError, match="many bytes to read"):
            read_rows(log.path, file, FIELDS, wanted, Budget(len(rows) * 1000))


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
        encoded_bytes(log.path, file)
