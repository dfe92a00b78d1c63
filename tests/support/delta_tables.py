"""Makes and reads small Delta tables without Spark."""

from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.types import DataType, StructField, StructType

from spark_sink.delta import file_table
from spark_sink.delta.log import TableLog
from spark_sink.delta.rows import fields_of, present_rows, read_columns
from spark_sink.files.parquet import FileWriter, part_name
from spark_sink.staging.log import Position


def struct(**fields: DataType) -> StructType:
    """Return a struct with these fields."""
    return StructType([StructField(name, kind) for name, kind in fields.items()])


def table_with_a_row(path: Path, schema: StructType, **values: Any) -> file_table.FileTable:
    """Make a table at the LSN 10 with one row. Columns without a value are NULL."""
    path.mkdir()
    table = file_table.define(path, schema, {"delta.appendOnly": "false"})
    writer = FileWriter(str(path), part_name(), table.layout())
    fields = fields_of(table.physical, table.schema.names)
    writer.write({name: pa.array([values.get(name)], fields[name].type) for name in schema.names}, 1)
    file_table.commit(table, [writer.close()], Position(1, 10))
    return table


def rows_of(path: Path) -> list[tuple[Any, ...]]:
    """Return the rows of a table, in order."""
    return sorted(unsorted_rows(path))


def unsorted_rows(path: Path) -> list[tuple[Any, ...]]:
    """Return the rows of a table, some of which may have NULL where others have values."""
    log, found = TableLog(path).refresh(), []
    table = file_table.of_log(log)
    fields = fields_of(table.physical, table.schema.names)
    for file in log.files:
        columns = [values.to_pylist() for values in read_columns(path, file, fields).values()]
        present = present_rows(path, file, len(columns[0]))
        found += [row for row, is_there in zip(zip(*columns, strict=True), present, strict=True) if is_there]
    return found
