"""The ordinals of a snapshot's rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from spark_sink.client.exported import SnapshotError
from spark_sink.files.parquet import Layout
from spark_sink.schema.types import merge_columns, typed_schema
from spark_sink.snapshot import chunk
from spark_sink.snapshot.chunk import ChunkTask
from spark_sink.snapshot.plan import Chunk


def test_ordinals_go_on_below_zero_and_end(tmp_path: Path) -> None:
    schema = to_arrow_schema(typed_schema(merge_columns(None, [])), timezone="UTC")
    task = ChunkTask(
        "", "", Chunk(1, '"t"', 1), 1, 3, None, (), (), schema, 1, 5, 0, str(tmp_path), str(tmp_path), Layout((), schema)
    )
    ordinals = chunk._metadata(task, 0, 4)["_cdc_ordinal"].to_pylist()
    assert ordinals == [1, 4, 7, 10]
    row = (1 << 31) // 3
    assert chunk._metadata(task, row - 1, 2)["_cdc_ordinal"].to_pylist() == [(1 << 31) - 4, (1 << 31) - 1]
    assert chunk._metadata(task, row + 1, 1)["_cdc_ordinal"].to_pylist() == [2 - (1 << 31)]
    with pytest.raises(SnapshotError, match="more rows"):
        chunk._metadata(task, (1 << 32) // 3, 1)
