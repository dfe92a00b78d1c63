"""How a Parquet file encodes its columns, and that any values come back from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_sink.files.parquet import FileWriter, Layout

ROWS = 5000
WIDE = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, ROWS)
SECONDS = np.arange(ROWS) * 1_000_000
VALUES = {
    "ascending": (pa.array(np.arange(ROWS)), "DELTA_BINARY_PACKED"),
    "shuffled": (pa.array(np.random.default_rng(1).permutation(ROWS).astype(np.int32)), "DELTA_BINARY_PACKED"),
    "short": (pa.array(np.arange(ROWS).astype(np.int16)), "DELTA_BINARY_PACKED"),
    "extremes later": (pa.array([*range(ROWS), 2**63 - 1, -(2**63), None]), "DELTA_BINARY_PACKED"),
    "with nulls": (pa.array([None if number % 3 == 0 else number for number in range(ROWS)]), "DELTA_BINARY_PACKED"),
    "times": (pa.array(SECONDS).cast(pa.timestamp("us", "UTC")), "DELTA_BINARY_PACKED"),
    "days": (pa.array(np.arange(ROWS).astype(np.int32)).cast(pa.date32()), "DELTA_BINARY_PACKED"),
    "wide": (pa.array(WIDE), "PLAIN"),
    "repeated": (pa.array(np.arange(ROWS) % 5), "RLE_DICTIONARY"),
    "null": (pa.nulls(ROWS, pa.int64()), "RLE_DICTIONARY"),
    "numbers": (pa.array(np.arange(ROWS) / 2), "PLAIN"),
    "texts": (pa.array([str(number) for number in range(ROWS)]), "PLAIN"),
}
"""Values, and the encoding of their column."""


@pytest.mark.parametrize("name", VALUES)
def test_the_first_values_decide_how_a_column_is_encoded(tmp_path: Path, name: str) -> None:
    array, encoding = VALUES[name]
    writer = FileWriter(str(tmp_path), "t.parquet", Layout(("a.b",), pa.schema([("a.b", array.type)])))
    writer.write({"a.b": array}, len(array))
    writer.close()
    file = pq.ParquetFile(tmp_path / "t.parquet")
    assert encoding in file.metadata.row_group(0).column(0).encodings
    assert file.read().column(0).combine_chunks().equals(array)


def test_an_empty_file(tmp_path: Path) -> None:
    writer = FileWriter(str(tmp_path), "t.parquet", Layout(("a",), pa.schema([("a", pa.int64())])))
    assert writer.close().rows == 0
    assert pq.read_table(tmp_path / "t.parquet").num_rows == 0
