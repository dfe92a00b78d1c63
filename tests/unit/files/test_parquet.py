"""How a Parquet file encodes its columns, and that any values come back from it."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_sink.files.parquet import FileWriter, Layout


def decimals(units: Iterable[int | None], precision: int) -> pa.Array:
    """Return decimals with two digits behind the point. A unit is a hundredth."""
    return pa.array([None if each is None else Decimal(each).scaleb(-2) for each in units], pa.decimal128(precision, 2))


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
    "prices": (decimals(range(0, 99 * ROWS, 99), 12), "DELTA_BINARY_PACKED"),
    "short prices": (decimals(range(-ROWS, ROWS, 2), 9), "DELTA_BINARY_PACKED"),
    "sliced prices": (decimals([10**17 * (-1) ** number for number in range(9)] + [*range(ROWS)], 18)[9:], "DELTA_BINARY_PACKED"),
    "prices with nulls": (decimals([None if number % 3 == 0 else -number for number in range(ROWS)], 12), "DELTA_BINARY_PACKED"),
    "extreme prices later": (decimals([*range(ROWS), 10**18 - 1, 1 - 10**18, None], 18), "DELTA_BINARY_PACKED"),
    "wide prices": (decimals([int(number) % 10**18 for number in WIDE], 18), "PLAIN"),
    "long prices": (decimals(range(ROWS), 19), "PLAIN"),
    "no price": (decimals([None] * ROWS, 12), "PLAIN"),
    "one price": (decimals([1], 12), "PLAIN"),
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
    if encoding == "DELTA_BINARY_PACKED":
        assert file.metadata.row_group(0).column(0).physical_type in ("INT32", "INT64")
    assert file.read().column(0).combine_chunks().equals(array)


def test_only_floating_point_numbers_have_no_bounds(tmp_path: Path) -> None:
    """For Spark NaN is the greatest number, but pyarrow's bounds leave NaN out: Spark skipped rows by them."""
    numbers, counts, texts = pa.array([1.0, float("nan"), 50.0]), pa.array([1, 2, 3]), pa.array(["a", "b", "c"])
    both = pa.StructArray.from_arrays([numbers, counts], ["x", "n"])
    offsets = pa.array([0, 1, 2, 3], pa.int32())
    columns = {
        "x": numbers,
        "real": numbers.cast(pa.float32()),
        "n": counts,
        "a.b": texts,
        "old": both,
        "list": pa.ListArray.from_arrays(offsets, numbers),
        "structs": pa.ListArray.from_arrays(offsets, both),
        "map": pa.MapArray.from_arrays(offsets, texts, numbers),
    }
    layout = Layout(tuple(columns), pa.schema([(name, array.type) for name, array in columns.items()]), clustering=("x", "n"))
    writer = FileWriter(str(tmp_path), "t.parquet", layout)
    writer.write(columns, 3)
    written = writer.close()
    row_group = pq.ParquetFile(tmp_path / "t.parquet").metadata.row_group(0)
    parts = [row_group.column(index) for index in range(row_group.num_columns)]
    bounded = [part.path_in_schema for part in parts if part.statistics is not None and part.statistics.has_min_max]
    assert bounded == ["n", "a.b", "old.n", "structs.list.element.n", "map.key_value.key"]
    assert (written.minimum, written.maximum, written.nulls) == ({"n": 1}, {"n": 3}, {"n": 0})


def test_an_empty_file(tmp_path: Path) -> None:
    writer = FileWriter(str(tmp_path), "t.parquet", Layout(("a",), pa.schema([("a", pa.int64())])))
    assert writer.close().rows == 0
    assert pq.read_table(tmp_path / "t.parquet").num_rows == 0
