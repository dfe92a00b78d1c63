"""Columns of a Delta table get wider types without Spark."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
)

from spark_sink.delta import file_table, wider_columns
from spark_sink.delta.file_table import DeltaError
from spark_sink.delta.log import TableLog, commit_path
from spark_sink.delta.rows import UnsupportedError, fields_of, read_columns
from spark_sink.delta.schema import COLUMN_ID, MAPPING_MODE, MAX_COLUMN_ID, PHYSICAL_NAME
from spark_sink.schema.types import holds
from support.delta_tables import struct, table_with_a_row

NARROW = struct(
    id=IntegerType(), price=DecimalType(5, 2), old=struct(id=IntegerType(), ratio=FloatType()), many=ArrayType(IntegerType())
)
WIDE = struct(id=LongType(), price=DecimalType(12, 4), old=struct(id=LongType(), ratio=DoubleType()), many=ArrayType(IntegerType()))


def fields_in_log(path: Path) -> dict[str, Any]:
    return {field["name"]: field for field in json.loads(TableLog(path).refresh().metadata["schemaString"])["fields"]}


def test_columns_and_fields_of_structs(tmp_path: Path) -> None:
    """The log says what Delta Lake 4.4 writes for the same ALTER TABLE, and the old file's values have the new types."""
    table = table_with_a_row(tmp_path / "t", NARROW, id=7, old={"id": 8, "ratio": 0.5})
    assert wider_columns.widen(table.path, WIDE)
    found = file_table.open_table(table.path)
    assert (found.schema, found.version, found.lsn) == (WIDE, 1, 10)
    assert found.properties == {"delta.appendOnly": "false", "delta.enableTypeWidening": "true"}
    log = TableLog(table.path).refresh()
    assert log.protocol == {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["typeWidening"],
        "writerFeatures": ["appendOnly", "invariants", "typeWidening"],
    }
    fields = fields_in_log(table.path)
    assert fields["id"]["metadata"] == {"delta.typeChanges": [{"toType": "long", "fromType": "integer"}]}
    assert fields["price"]["metadata"] == {"delta.typeChanges": [{"toType": "decimal(12,4)", "fromType": "decimal(5,2)"}]}
    assert [field["metadata"] for field in fields["old"]["type"]["fields"]] == [
        {"delta.typeChanges": [{"toType": "long", "fromType": "integer"}]},
        {"delta.typeChanges": [{"toType": "double", "fromType": "float"}]},
    ]
    assert (fields["old"]["metadata"], fields["many"]["metadata"]) == ({}, {})
    (file,) = log.files
    rows = read_columns(table.path, file, fields_of(found.physical, found.schema.names))
    assert (rows["id"].type, rows["id"].to_pylist()) == (pa.int64(), [7])
    assert rows["old"].to_pylist() == [{"id": 8, "ratio": 0.5}]


def test_nothing_to_widen(tmp_path: Path) -> None:
    """Columns that the table lacks, or that have their types already, are no reason for a commit."""
    table = table_with_a_row(tmp_path / "t", WIDE)
    assert not wider_columns.widen(table.path, StructType([*WIDE, StructField("a b", StringType())]))
    assert file_table.open_table(table.path).version == 0
    assert not wider_columns.widen(tmp_path / "missing", WIDE)


def test_a_second_change_of_a_type(tmp_path: Path) -> None:
    table = table_with_a_row(tmp_path / "t", NARROW)
    for digits in (7, 9):
        assert wider_columns.widen(table.path, struct(price=DecimalType(digits, 2)))
    assert fields_in_log(table.path)["price"]["metadata"] == {
        "delta.typeChanges": [
            {"toType": "decimal(7,2)", "fromType": "decimal(5,2)"},
            {"toType": "decimal(9,2)", "fromType": "decimal(7,2)"},
        ]
    }
    assert "protocol" not in commit_path(table.path, 2).read_text()


def test_a_type_that_needs_another_feature(tmp_path: Path) -> None:
    table = table_with_a_row(tmp_path / "t", struct(day=DateType()))
    assert wider_columns.widen(table.path, struct(day=TimestampNTZType()))
    assert TableLog(table.path).refresh().features("readerFeatures") == {"timestampNtz", "typeWidening"}


def test_a_table_with_column_mapping(tmp_path: Path) -> None:
    """Fields of structs in arrays have metadata of their own. They are no other types."""
    table = table_with_a_row(tmp_path / "t", StructType([*NARROW, StructField("a b", ArrayType(struct(e=StringType())))]))
    wanted = StructType([*WIDE, StructField("a b", ArrayType(struct(e=StringType())))])
    before = fields_in_log(table.path)
    assert wider_columns.widen(table.path, wanted)
    after = fields_in_log(table.path)
    assert after["id"]["metadata"] == before["id"]["metadata"] | {"delta.typeChanges": [{"toType": "long", "fromType": "integer"}]}
    assert after["a b"] == before["a b"]
    assert {COLUMN_ID, PHYSICAL_NAME} <= after["id"]["metadata"].keys()
    assert {MAPPING_MODE, MAX_COLUMN_ID} <= file_table.open_table(table.path).properties.keys()


def test_features_that_a_version_implies(tmp_path: Path) -> None:
    """Delta Lake writes version 2 for readers of a table with column mapping. It implies the feature, and lists none."""
    table = table_with_a_row(tmp_path / "t", NARROW)
    protocol = {"minReaderVersion": 2, "minWriterVersion": 7, "writerFeatures": ["columnMapping", "invariants", "appendOnly"]}
    commit_path(table.path, 1).write_text(json.dumps({"protocol": protocol}) + "\n")
    assert wider_columns.widen(table.path, WIDE)
    found = TableLog(table.path).refresh().protocol
    assert found["readerFeatures"] == ["columnMapping", "typeWidening"]
    assert found["writerFeatures"] == ["appendOnly", "columnMapping", "invariants", "typeWidening"]


@pytest.mark.parametrize(
    "wanted",
    [
        struct(many=ArrayType(LongType())),
        struct(id=ArrayType(LongType())),
        struct(old=LongType()),
        struct(id=ShortType()),
        struct(id=StringType()),
        struct(id=DecimalType(10, 1)),
        struct(price=DecimalType(12, 1)),
        struct(price=DecimalType(5, 3)),
        struct(price=DoubleType()),
        struct(old=struct(ratio=LongType())),
    ],
    ids=str,
)
def test_what_is_not_allowed(tmp_path: Path, wanted: StructType) -> None:
    table = table_with_a_row(tmp_path / "t", NARROW)
    with pytest.raises(UnsupportedError, match="a change of the type"):
        wider_columns.widen(table.path, wanted)
    assert file_table.open_table(table.path).version == 0


INTEGERS = (ByteType(), ShortType(), IntegerType(), LongType())
KINDS = [
    *INTEGERS,
    FloatType(),
    DoubleType(),
    DateType(),
    TimestampNTZType(),
    StringType(),
    *(DecimalType(digits, scale) for digits, scale in ((9, 0), (10, 0), (12, 2), (20, 0), (22, 2), (22, 3), (38, 18))),
]


def test_no_type_is_wider_than_itself() -> None:
    assert not any(wider_columns.is_wider(kind, kind) for kind in KINDS)


@pytest.mark.parametrize("narrow", KINDS, ids=str)
def test_what_holds_the_values_is_allowed(tmp_path: Path, narrow: DataType) -> None:
    """The types of PostgreSQL's columns are widened by the same rule."""
    for number, wide in enumerate(KINDS):
        if wide == narrow or ByteType() in (narrow, wide):  # PostgreSQL has no type of one byte
            continue
        table = table_with_a_row(tmp_path / str(number), struct(id=narrow))
        try:
            is_allowed = wider_columns.widen(table.path, struct(id=wide))
        except UnsupportedError:
            is_allowed = False
        assert is_allowed == holds(wide, narrow), (narrow, wide)


def test_a_feature_that_this_client_does_not_support(tmp_path: Path) -> None:
    table = table_with_a_row(tmp_path / "t", NARROW)
    protocol = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["checkConstraints"]}
    commit_path(table.path, 1).write_text(json.dumps({"protocol": protocol}) + "\n")
    with pytest.raises(DeltaError, match="checkConstraints"):
        wider_columns.widen(table.path, WIDE)
