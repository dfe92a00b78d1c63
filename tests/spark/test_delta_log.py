"""Our reader of the log of a Delta table that Spark writes."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_sink.delta.log import read_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
def test_rows_that_spark_writes_are_counted(spark: "SparkSession", tmp_path: Path) -> None:
    path = tmp_path / "t"
    name = f"delta.`{path}`"
    spark.sql(
        f"CREATE TABLE {name} (id int) USING delta TBLPROPERTIES "
        "('delta.enableDeletionVectors' = 'true', 'delta.checkpointInterval' = '3')"
    )
    for statement in (
        f"INSERT INTO {name} SELECT id FROM range(100)",
        f"DELETE FROM {name} WHERE id % 10 = 3",
        f"INSERT INTO {name} SELECT id FROM range(7)",
        f"DELETE FROM {name} WHERE id = 4",
        f"OPTIMIZE {name}",
        f"INSERT INTO {name} VALUES (1)",
    ):
        spark.sql(statement)
        state = read_table(path)
        assert state is not None
        assert state.rows == spark.read.format("delta").load(str(path)).count(), statement
        assert state.files == spark.sql(f"DESCRIBE DETAIL {name}").collect()[0]["numFiles"]
    assert list((path / "_delta_log").glob("*.checkpoint.parquet"))
