"""Columns are added to a Delta table without Spark."""

import json
from pathlib import Path

import pytest
from pyspark.sql.types import (
    ArrayType,
    DecimalType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
)

from spark_sink.delta import file_table, new_columns
from spark_sink.delta.file_table import DeltaError
from spark_sink.delta.log import TableLog, commit_path
from spark_sink.delta.rows import UnsupportedError, fields_of, read_columns
from spark_sink.delta.schema import COLUMN_ID, MAX_COLUMN_ID, PHYSICAL_NAME
from support.delta_tables import struct, table_with_a_row

OLD = struct(id=LongType())
PLAIN = struct(id=LongType(), old=OLD)
WIDER = StructType([*struct(id=LongType(), old=struct(id=LongType(), price=DecimalType(9, 2))), StructField("n", IntegerType())])


def test_columns_and_fields_of_structs(tmp_path: Path) -> None:
    table = table_with_a_row(tmp_path / "t", PLAIN, id=1, old={"id": 2})
    assert new_columns.add(table.path, WIDER)
    found = file_table.open_table(table.path)
    assert (found.schema, found.version, found.lsn) == (WIDER, 1, 10)
    assert found.properties == {"delta.appendOnly": "false"}
    assert not new_columns.add(table.path, WIDER)
    assert not new_columns.add(table.path, OLD)  # no column is removed
    assert file_table.open_table(table.path).version == 1
    (file,) = TableLog(table.path).refresh().files
    fields = fields_of(found.physical, found.schema.names)
    rows = read_columns(table.path, file, {name: fields[name] for name in ("id", "n")})
    assert {name: values.to_pylist() for name, values in rows.items()} == {"id": [1], "n": [None]}


def test_columns_of_a_table_with_column_mapping(tmp_path: Path) -> None:
    """New columns get numbers that no column had, and names of their own in the files."""
    table = table_with_a_row(tmp_path / "t", StructType([*PLAIN, StructField("a b", StringType())]), id=1, old={"id": 2})
    wanted = StructType([*WIDER, StructField("c d", ArrayType(struct(e=StringType())))])
    assert new_columns.add(table.path, wanted)
    metadata = TableLog(table.path).refresh().metadata
    fields = {field["name"]: field for field in json.loads(metadata["schemaString"])["fields"]}
    assert list(fields) == ["id", "old", "a b", "n", "c d"]
    inner = fields["c d"]["type"]["elementType"]["fields"] + fields["old"]["type"]["fields"]
    numbers = [field["metadata"][COLUMN_ID] for field in (*fields.values(), *inner)]
    assert sorted(numbers) == list(range(1, 9))
    assert metadata["configuration"][MAX_COLUMN_ID] == "8"
    assert len({field["metadata"][PHYSICAL_NAME] for field in (*fields.values(), *inner)}) == 8
    assert file_table.open_table(table.path).physical.fields[0].metadata == {COLUMN_ID: 1}


def test_a_column_that_needs_a_feature(tmp_path: Path) -> None:
    """The commit gives the feature to the table."""
    table = table_with_a_row(tmp_path / "t", PLAIN, id=1, old={"id": 2})
    assert new_columns.add(table.path, struct(at=TimestampNTZType()))
    assert TableLog(table.path).refresh().protocol == {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["timestampNtz"],
        "writerFeatures": ["appendOnly", "invariants", "timestampNtz"],
    }
    assert new_columns.add(table.path, struct(other=TimestampNTZType()))
    assert "protocol" not in commit_path(table.path, 2).read_text()


@pytest.mark.parametrize(
    "wanted",
    [
        StructType([StructField("a b", LongType())]),
        struct(ID=LongType()),
        struct(old=struct(Id=LongType())),
    ],
    ids=["column mapping", "only another case", "only another case in a struct"],
)
def test_what_only_spark_can_do(tmp_path: Path, wanted: StructType) -> None:
    table = table_with_a_row(tmp_path / "t", PLAIN, id=1, old={"id": 2})
    with pytest.raises(UnsupportedError):
        new_columns.add(table.path, wanted)
    assert file_table.open_table(table.path).version == 0


def test_a_feature_that_this_client_does_not_support(tmp_path: Path) -> None:
    table = table_with_a_row(tmp_path / "t", PLAIN, id=1, old={"id": 2})
    protocol = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["checkConstraints"]}
    commit_path(table.path, 1).write_text(json.dumps({"protocol": protocol}) + "\n")
    with pytest.raises(DeltaError, match="checkConstraints"):
        new_columns.add(table.path, WIDER)
