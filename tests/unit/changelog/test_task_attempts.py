"""Spark may run a task twice (retry, speculation). The attempt that does not count may write at any time. Without Spark."""

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from spark_sink.changelog.interface import Files
from spark_sink.changelog.tables import changelogs_of
from spark_sink.files.parquet import FileWriter, WrittenFile
from spark_sink.schema.table import Table
from spark_sink.snapshot import progress as snapshot_progress
from spark_sink.snapshot.plan import Chunk
from spark_sink.snapshot.progress import Written
from spark_sink.staging.log import Position
from spark_sink.warehouse.appends import append_name
from spark_sink.warehouse.warehouse import Warehouse

SCHEMA = StructType([StructField("id", LongType())])
FRUIT = Table("public", "fruit")
START, END, LATER = Position(1, 10), Position(1, 20), Position(1, 30)
NO_SPARK: Any = None


def attempt(files: Files, name: str) -> FileWriter:
    """Begin the writing of a task."""
    writer = FileWriter(str(files.directory), name, files.layout)
    writer.write({"id": pa.array([1, 2, 3])}, 3)
    return writer


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def rows(house: Warehouse) -> int:
    return sum(pq.read_metadata(path).num_rows for path in house.changelog(FRUIT).glob("cdc_append=*/*.parquet"))


def test_files_of_other_attempts_do_not_become_part_of_a_parquet_changelog(tmp_path: Path) -> None:
    house = Warehouse(tmp_path, "parquet")
    files = changelogs_of(NO_SPARK, house).open_files(FRUIT, SCHEMA)
    counted = attempt(files, "counted.parquet").close()
    attempt(files, "again.parquet").close()
    straggler = attempt(files, "straggler.parquet")
    changelogs_of(NO_SPARK, house).commit_files(FRUIT, files, [counted], START, END, 3)
    batch = house.changelog(FRUIT) / append_name(START, END)
    assert names(batch) == ["counted.parquet"]
    # It goes on, while the next append is made.
    straggler.write({"id": pa.array([1, 2, 3])}, 3)
    files = changelogs_of(NO_SPARK, house).open_files(FRUIT, SCHEMA)
    attempt(files, "late.parquet")
    with pytest.raises(FileNotFoundError):
        straggler.close()
    changelogs_of(NO_SPARK, house).commit_files(FRUIT, files, [attempt(files, "next.parquet").close()], END, LATER, 3)
    assert names(house.changelog(FRUIT)) == [append_name(START, END), append_name(END, LATER)]
    assert rows(house) == 6
    assert pd.read_parquet(house.changelog(FRUIT))["id"].tolist() == [1, 2, 3] * 2


def test_an_append_that_was_killed_is_made_again(tmp_path: Path) -> None:
    house = Warehouse(tmp_path, "parquet")
    left = house.changelog(FRUIT) / "_gathered"
    left.mkdir(parents=True)
    (left / "half.parquet").write_bytes(b"half")
    files = changelogs_of(NO_SPARK, house).open_files(FRUIT, SCHEMA)
    changelogs_of(NO_SPARK, house).commit_files(FRUIT, files, [attempt(files, "counted.parquet").close()], START, END, 3)
    assert rows(house) == 3


def test_the_attempt_that_notes_a_chunk_first_is_the_one_that_counts(tmp_path: Path) -> None:
    chunks = [Chunk(1, "public.fruit", 2, 0, 10), Chunk(1, "public.fruit", 2, 10, None)]
    begun = snapshot_progress.begin(tmp_path, "copy", chunks)
    first, second = (Written(3, WrittenFile(f"part-{name}.parquet", 1, 3, {}, {}, {}), {}) for name in "ab")
    assert snapshot_progress.note(begun.record_path(1), first) == first
    assert snapshot_progress.note(begun.record_path(1), second) == first
    again = snapshot_progress.resume(tmp_path, "copy")
    assert again is not None
    assert again.done == {1: first}

    # A task of that copy is still at work when another copy has begun, cut otherwise.
    other = snapshot_progress.begin(tmp_path, "copy", chunks[:1])
    assert snapshot_progress.note(begun.record_path(0), second) == second
    again = snapshot_progress.resume(tmp_path, "copy")
    assert again is not None
    assert (again.done, again.record_path(0)) == ({}, other.record_path(0))
