"""How long a table's checkpoints name files that have left it."""

from pathlib import Path

from pyspark.sql.types import IntegerType, StructField, StructType

from spark_sink.delta import file_table
from spark_sink.delta.log import TableLog
from spark_sink.delta.removed_files import are_names_kept, keep_names
from spark_sink.staging.log import Position

SCHEMA = StructType([StructField("id", IntegerType())])
RETENTION = "delta.deletedFileRetentionDuration"


def made(path: Path, **properties: str) -> Path:
    file_table.commit(file_table.define(path, SCHEMA, properties), [], Position(1, 10))
    return path


def retention(path: Path) -> str | None:
    return TableLog(path).refresh().metadata["configuration"].get(RETENTION)


def test_it_is_set_once_and_follows_the_option(tmp_path: Path) -> None:
    assert not keep_names(tmp_path / "none", 3600.0)
    path = made(tmp_path / "t")
    assert not are_names_kept(TableLog(path).refresh().metadata, 86_400.0)
    assert keep_names(path, 86_400.0)
    assert retention(path) == "interval 86400 seconds"
    assert are_names_kept(TableLog(path).refresh().metadata, 86_400.0)
    assert not keep_names(path, 86_400.0)
    assert keep_names(path, 3600.0)
    assert retention(path) == "interval 3600 seconds"
    assert TableLog(path).refresh().lsn == 10


def test_a_value_of_the_user_stays(tmp_path: Path) -> None:
    path = made(tmp_path / "before", **{RETENTION: "interval 30 days"})
    assert are_names_kept(TableLog(path).refresh().metadata, 3600.0)
    assert not keep_names(path, 3600.0)
    assert retention(path) == "interval 30 days"
    path = made(tmp_path / "later")
    assert keep_names(path, 3600.0)
    file_table.redefine(
        path,
        "SET TBLPROPERTIES",
        lambda log: {**log.metadata, "configuration": {**log.metadata["configuration"], RETENTION: "interval 2 days"}},
    )
    assert not keep_names(path, 7200.0)
    assert retention(path) == "interval 2 days"
