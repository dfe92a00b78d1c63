"""Changelogs in Parquet, with a fake of Spark's reader."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from spark_sink.changelog.parquet_changelogs import ParquetChangelogs
from spark_sink.files.parquet import FileWriter, part_name
from spark_sink.schema.table import Table
from spark_sink.schema.types import typed_schema
from spark_sink.staging.log import Position
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.warehouse import Warehouse

TABLE = Table("public", "t")
OLD = StructType([StructField("id", IntegerType())])
NEW = StructType([*OLD, StructField("name", StringType())])


class Reader:
    """Spark's reader: it lists the files when it is called. ``meanwhile`` are what others do before that, in turn."""

    def __init__(self, *meanwhile: Any) -> None:
        self._meanwhile = list(meanwhile)
        self._columns: list[str] = []

    @property
    def read(self) -> "Reader":
        return self

    def schema(self, schema: StructType) -> "Reader":
        self._columns = schema.names
        return self

    def option(self, _name: str, _value: str) -> "Reader":
        return self

    def parquet(self, path: str) -> tuple[list[str], int]:
        if self._meanwhile:
            self._meanwhile.pop(0)()
        return self._columns, len(list(Path(path).glob("cdc_append=*")))


def changelogs(root: Path, reader: Any) -> ParquetChangelogs:
    return ParquetChangelogs(reader, Warehouse(root, "parquet"))


def append(root: Path, columns: StructType, lsn: int, *, is_snapshot: bool = False) -> None:
    made, schema = changelogs(root, None), typed_schema(columns)
    rows = pa.Table.from_batches([], made.snapshot_layout(TABLE, schema).schema)
    if not is_snapshot:
        made.append(TABLE, rows, schema, Position(1, lsn - 1), Position(1, lsn))
        return
    directory = root / f"copy-{lsn}"
    directory.mkdir()
    files = [FileWriter(str(directory), part_name(), made.snapshot_layout(TABLE, schema)).close()]
    made.add_snapshot(TABLE, directory, files, Position(1, lsn))


@pytest.mark.parametrize("is_snapshot", [False, True])
def test_a_reader_has_the_columns_of_all_appends_that_it_reads(tmp_path: Path, is_snapshot: bool) -> None:
    """An append that came between brought its rows without its new column."""
    append(tmp_path, OLD, 1)
    rows: Any = changelogs(tmp_path, Reader(lambda: append(tmp_path, NEW, 2, is_snapshot=is_snapshot))).read(TABLE)
    assert rows == (typed_schema(NEW).names, 2)
    rows = changelogs(tmp_path, Reader(lambda: append(tmp_path, NEW, 3))).read(TABLE)
    assert rows == (typed_schema(NEW).names, 3)
    with pytest.raises(WarehouseError, match=r"there is no changelog of public\.u"):
        changelogs(tmp_path, Reader()).read(Table("public", "u"))
