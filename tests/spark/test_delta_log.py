"""Our reader of the log of a Delta table that Spark writes, and reading by the names of files that the log has."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_sink.delta import sql as delta
from spark_sink.delta.log import TableLog, read_table
from spark_sink.delta.small import plain_files
from spark_sink.spark import session
from spark_sink.staging.log import Position

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


@pytest.mark.spark
def test_a_copied_session_keeps_its_own_settings_for_its_own_commits(spark: "SparkSession", tmp_path: Path) -> None:
    """Delta's catalog works with the settings of the session that was the active one when the catalog was made."""
    notebook = spark.newSession()  # it has not made its catalog
    own = session.own(notebook)
    for number, each in enumerate((notebook, own), 1):
        path = tmp_path / str(number)
        with delta.recording(each, Position(1, number)):
            delta.create(path, each.range(1), {})
        found = delta.state(path)
        assert found is not None
        assert found.lsn == number


@pytest.mark.spark
def test_tables_are_written_by_path_whatever_the_current_catalog_is(spark: "SparkSession", tmp_path: Path) -> None:
    """Spark looked for them in the current catalog, as it does for any name."""
    lake = "spark.sql.catalog.lake"
    spark._jvm.System.setProperty("derby.stream.error.file", str(tmp_path / "derby.log"))
    notebook = session.copy(spark)
    notebook.conf.set(lake, "org.apache.spark.sql.execution.datasources.v2.jdbc.JDBCTableCatalog")
    notebook.conf.set(f"{lake}.url", "jdbc:derby:memory:lake;create=true")
    notebook.conf.set(f"{lake}.driver", "org.apache.derby.iapi.jdbc.AutoloadedDriver")
    notebook.sql("USE lake")
    own = session.own(notebook)
    notebook.sql("USE spark_catalog")
    assert own.catalog.currentCatalog() == "lake"  # where names are

    path = tmp_path / "t"
    name = delta.table_name(path)
    delta.create(path, own.range(3), {})
    delta.set_properties(own, path, {"a": "b"})
    own.sql(f"MERGE INTO {name} t USING (SELECT 1L AS id) s ON t.id = s.id WHEN MATCHED THEN DELETE")
    own.sql(f"DELETE FROM {name} WHERE id = 2")
    own.sql(f"OPTIMIZE {name}")
    delta.vacuum(own, path, [], 86400.0 * 30)
    assert [row["id"] for row in delta.read(own, path).collect()] == [0]
    own.sql(f"RESTORE TABLE {name} TO VERSION AS OF 0")
    assert delta.read(own, path).count() == 3


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
