"""Spark types for PostgreSQL's types, and column names that differ for Spark, too."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from cdcpipe.pgoutput.messages import Column
from spark_sink.delta.schema import needed_features
from spark_sink.schema.table import SchemaError
from spark_sink.schema.types import (
    METADATA_FIELDS,
    assign_columns,
    base_names,
    column_names,
    merge_columns,
    original_name,
    plain_name,
    spark_type,
    split_schema,
    typed_schema,
    versioned_name,
)
from support.segments import relation
from support.typed_values import STRING

# Type modifiers


@pytest.mark.parametrize(
    ("type_modifier", "data_type"),
    [
        (-1, STRING),
        ((12 << 16 | 2) + 4, DecimalType(12, 2)),
        ((38 << 16) + 4, DecimalType(38, 0)),
        ((39 << 16) + 4, STRING),
        ((1000 << 16 | 1000) + 4, STRING),
        (329730, STRING),  # numeric(5,-2)
        (196617, STRING),  # numeric(3,5)
        (4, STRING),  # numeric(0,0), which no server has
    ],
)
def test_numeric_modifiers(type_modifier: int, data_type: DataType) -> None:
    assert spark_type(Column(0, "n", 1700, type_modifier)) == data_type


# Names


@pytest.mark.parametrize(
    ("names", "spelled"),
    [
        (["id", "a.b", "Größe", "x y", "userId", "_x", "cdc_x"], ["id", "a.b", "Größe", "x y", "userId", "_x", "cdc_x"]),
        (["id", "ID", "Id"], ["id", "_cdc_column_%49%44", "_cdc_column_%49d"]),
        (["ID", "id"], ["ID", "_cdc_column_id"]),
        (["", "_cdc_op", "_CDC_x"], ["_cdc_column_", "_cdc_column__cdc_op", "_cdc_column__%43%44%43_x"]),
        (["a__int", "a__decimal_1_0", "a__Timestamp", "a__b", "a__array"],
         ["_cdc_column_a_%5Fint", "_cdc_column_a_%5Fdecimal_1_0", "_cdc_column_a_%5F%54imestamp", "a__b", "a__array"]),
        (["é", "É", "%C3"], ["é", "_cdc_column_%C3%89", "%C3"]),
    ],
)  # fmt: skip
def test_names(names: list[str], spelled: list[str]) -> None:
    assert column_names(relation(1, "t", *((name, 25) for name in names))) == spelled


@given(
    st.lists(st.text(st.sampled_from("aAbB_%4.é "), max_size=5) | st.sampled_from(["_cdc_op", "a__int", "ID", "id"]), unique=True)
)
def test_names_are_distinct_and_can_be_read_back(names: list[str]) -> None:
    spelled = column_names(relation(1, "t", *((name, 25) for name in names)))
    versioned = [versioned_name(name, IntegerType()) for name in spelled]
    every = [name.lower() for name in [*spelled, *versioned]]
    assert len(set(every)) == len(every)
    assert [original_name(name) for name in spelled] == names
    assert [plain_name(name) for name in spelled] == names
    kinds = (StringType(), ArrayType(StringType()), DecimalType(8, 2), TimestampNTZType())
    assert [plain_name(versioned_name(name, kind)) for name in spelled for kind in kinds] == [name for name in names for _ in kinds]
    assert not set(spelled) & set(METADATA_FIELDS)


@pytest.mark.parametrize(
    ("data_type", "name"),
    [
        (IntegerType(), "c__int"),
        (LongType(), "c__bigint"),
        (ShortType(), "c__smallint"),
        (StringType(), "c__string"),
        (DecimalType(12, 2), "c__decimal_12_2"),
        (TimestampNTZType(), "c__timestamp_ntz"),
        (TimestampType(), "c__timestamp"),
        (ArrayType(IntegerType()), "c__array_int"),
        (ArrayType(DecimalType(12, 2)), "c__array_decimal_12_2"),
    ],
)
def test_versioned_names(data_type: DataType, name: str) -> None:
    assert versioned_name("c", data_type) == name
    assert column_names(relation(1, "t", (name, 25))) != [name]


INT, TEXT = 23, 25


def test_a_schema_grows_over_versions() -> None:
    versions = [
        relation(1, "t", ("id", INT), ("c", INT)),
        relation(1, "t", ("id", INT), ("c", TEXT), ("d", INT)),
        relation(1, "t", ("id", INT), ("c", INT), ("d", TEXT)),
    ]
    merged = merge_columns(None, versions)
    assert merged.simpleString() == "struct<id:int,c:int,c__string:string,d:int,d__string:string>"
    assert merge_columns(merged, versions) == merged
    assert merge_columns(merge_columns(None, versions[:1]), versions[1:]) == merged
    assert [[field.name for field in assign_columns(merged, version)] for version in versions] == [
        ["id", "c"], ["id", "c__string", "d"], ["id", "c", "d__string"],
    ]  # fmt: skip


def test_a_column_keeps_its_field_when_the_one_that_clashed_is_dropped() -> None:
    both, one = relation(1, "t", ("id", INT), ("ID", INT)), relation(1, "t", ("ID", INT))
    merged = merge_columns(None, [both, one])
    assert merged.fieldNames() == ["id", "_cdc_column_%49%44"]
    assert [field.name for field in assign_columns(merged, one)] == ["_cdc_column_%49%44"]


def test_sanitized_names_need_no_column_mapping() -> None:
    """Each character that Delta can't have in a name is replaced, and no other one; the rule is the one of all escaped names."""
    for character in string.printable + "ä€":
        described = relation(1, "t", ("id", INT), (f"unit{character}", INT))
        plain, safe = merge_columns(None, [described]), merge_columns(None, [described], sanitize=True)
        assert not needed_features(safe)
        assert (safe != plain) == bool(needed_features(plain)), character
        assert original_name(safe.names[1]) == f"unit{character}"


def test_only_new_columns_are_sanitized() -> None:
    """Two names never become one, and a column keeps the name that it has, whatever the option is now."""
    names = ["unit price", "Unit Price", "unit_price", "unit.price", "_cdc_column_unit%20price"]
    described = relation(1, "t", *((name, INT) for name in names))
    safe = merge_columns(None, [described], sanitize=True)
    assert len({name.lower() for name in safe.names}) == len(names)
    assert safe.names[0] == "_cdc_column_unit%20price"
    plain = merge_columns(None, [relation(1, "t", ("unit price", INT))])
    grown = relation(1, "t", ("unit price", TEXT), ("a b", INT))
    assert merge_columns(plain, [grown], sanitize=True).names == ["unit price", "unit price__string", "_cdc_column_a%20b"]
    for sanitize in (True, False):
        later = merge_columns(safe, [relation(1, "t", ("unit price", TEXT))], sanitize=sanitize)
        assert later.names == [*safe.names, "_cdc_column_unit%20price__string"]
        assert base_names(later, relation(1, "t", ("unit price", TEXT))) == ["_cdc_column_unit%20price"]


@pytest.mark.parametrize(("name", "spelled"), [("_metadata", "_cdc_column__metadata"), ("_MetaData", "_cdc_column__%4Deta%44ata")])
def test_only_a_new_column_is_not_called_like_the_hidden_one(name: str, spelled: str) -> None:
    described = relation(1, "t", ("id", INT), (name, INT))
    columns = merge_columns(None, [described])
    assert columns.names == ["id", spelled]
    assert assign_columns(columns, described)[1].name == base_names(columns, described)[1] == spelled
    assert original_name(spelled) == name
    own = StructType([StructField("id", IntegerType()), StructField(name, IntegerType())])
    assert merge_columns(own, [described]) == own
    assert base_names(own, described) == own.names


def test_a_column_that_has_no_place_is_an_error() -> None:
    with pytest.raises(SchemaError, match=r"'public\.t' has a column 'd' of Spark type string") as caught:
        assign_columns(merge_columns(None, [relation(1, "t", ("d", INT))]), relation(1, "t", ("d", TEXT)))
    assert "'d__string'" in str(caught.value.hint)


def test_split_schema_takes_a_typed_schema_apart() -> None:
    columns = merge_columns(None, [relation(1, "t", ("id", INT), ("ID", TEXT))])
    assert split_schema(typed_schema(columns)) == (columns, columns)
    assert split_schema(typed_schema(StructType())) == (StructType(), None)
    for field in (StructField("_cdc_epoch", LongType()), StructField("_cdc_epcoh", IntegerType()), StructField("_cdc_old", STRING)):
        with pytest.raises(SchemaError, match=field.name):
            split_schema(StructType([field]))
