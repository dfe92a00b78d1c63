"""Our reader of the log of a Delta table that Spark writes, and reading by the names of files that the log has."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_sink.delta import sql as delta
from spark_sink.delta.log import TableLog, read_table
from spark_sink.delta.small import plain_files

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


PLAIN, ODD = "id int, v string", "id int, `the value` string"
CASES = {
    # name: directory, columns, properties, statements after the first rows, whether its files alone tell its rows
    "a later column": ("t", PLAIN, "", ["ALTER TABLE {} ADD COLUMNS (w int)", "INSERT INTO {} VALUES (9, 'x', 9)"], True),
    "an encoded name": ("public.odd%20one", PLAIN, "", ["OPTIMIZE {}"], True),
    "a checkpoint": ("t", PLAIN, "'delta.checkpointInterval' = '2'", ["INSERT INTO {} VALUES (8, 'x')"] * 3, True),
    "deletion vectors": ("t", PLAIN, "'delta.enableDeletionVectors' = 'true'", ["DELETE FROM {} WHERE id = 2"], False),
    "no deletion vector yet": ("t", PLAIN, "'delta.enableDeletionVectors' = 'true'", [], True),
    "mapped columns": ("t", ODD, "'delta.columnMapping.mode' = 'name'", [], False),
    "wider columns": ("t", PLAIN, "'delta.enableTypeWidening' = 'true'", ["ALTER TABLE {} ALTER COLUMN id TYPE bigint"], False),
    "partitions": ("t", f"{PLAIN}) USING delta PARTITIONED BY (id", "", [], False),
    "a pattern as a name": (r"t[1]{a,b}*?\x", PLAIN, "", [], True),
    "many files": ("t", PLAIN, "", ["INSERT INTO {} SELECT /*+ REPARTITION(40) */ id, 'y' FROM range(400)"], False),
    "no rows": ("t", PLAIN, "", ["DELETE FROM {}"], False),
}


@pytest.mark.spark
@pytest.mark.parametrize("case", CASES)
def test_small_tables_are_read_by_their_files(spark: "SparkSession", tmp_path: Path, case: str) -> None:
    directory, columns, properties, statements, is_plain = CASES[case]
    path = tmp_path / directory
    using = "" if "USING" in columns else ") USING delta"
    name, closing = f"delta.`{path}`", ")" if "USING" in columns else ""
    spark.sql(f"CREATE TABLE {name} ({columns}{using}{closing}" + (f" TBLPROPERTIES ({properties})" if properties else ""))
    spark.sql(f"INSERT INTO {name} SELECT /*+ REPARTITION(2) */ id, concat('v', id) FROM range(5)")
    for statement in statements:
        spark.sql(statement.format(name))
    assert bool(plain_files(TableLog(path).refresh())) == is_plain
    found, expected = delta.read_as_is(spark, path), spark.read.format("delta").load(str(path))
    assert found.schema == expected.schema
    rows = sorted(expected.collect(), key=repr)
    assert sorted(found.collect(), key=repr) == rows
    # A later commit does not change what was read.
    spark.sql(f"INSERT INTO {name} SELECT * FROM {name} LIMIT 1" if rows else f"INSERT INTO {name} VALUES (1, 'z')")
    assert sorted(found.collect(), key=repr) == rows


@pytest.mark.spark
def test_a_version_is_read_however_long_the_table_rested_after_it(spark: "SparkSession", tmp_path: Path) -> None:
    """Delta would refuse it by the age of its commit, although VACUUM keeps files that have left the table since."""
    name = f"delta.`{tmp_path}`"
    properties = "'delta.enableDeletionVectors' = 'true', 'delta.deletedFileRetentionDuration' = 'interval 1 hours'"
    spark.sql(f"CREATE TABLE {name} (id int) USING delta TBLPROPERTIES ({properties})")
    spark.sql(f"INSERT INTO {name} SELECT /*+ COALESCE(1) */ id FROM range(5)")
    spark.sql(f"DELETE FROM {name} WHERE id = 2")
    log = TableLog(tmp_path).refresh()
    assert not plain_files(log)
    hours_ago = time.time() - 7200
    for path in (tmp_path / "_delta_log").glob("*.json"):
        os.utime(path, (hours_ago, hours_ago))
    spark.sql(f"INSERT INTO {name} VALUES (7)")
    assert sorted(row.id for row in delta.read_at(spark, log).collect()) == [0, 1, 3, 4]
