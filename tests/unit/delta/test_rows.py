"""How much is read at most: the budget of uncompressed bytes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from spark_sink.delta.log import TableLog
from spark_sink.delta.rewrite import Rewrite
from spark_sink.delta.rows import Budget, UnsupportedError, read_columns, uncompressed_bytes
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
