"""The table of types is complete: each type has a rule for every use of its values, and docs/spark/types.md agrees."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import ArrayType, DataType, DecimalType, StringType

from cdcpipe.pgoutput.messages import Column, Relation
from cdcpipe.types.arrow.casts import ARROW_TYPES, convert_text
from cdcpipe.types.pg_type import PG_TYPES, type_id_of, type_ids_of
from cdcpipe.types.shape import Kind, Shape
from cdcpipe.types.table import ARRAYS, NUMERIC_IDS, TYPES, UNKNOWN, BuiltInType, ColumnType, NoText
from spark_sink.schema.types import SPARK_TYPES, spark_type
from spark_sink.snapshot.chunk import select_columns
from spark_sink.spark.value_text import arrow_texts, value_text

DOC = Path(__file__).parents[3] / "docs" / "spark" / "types.md"

INTERNAL = {
    "aclitem",
    "cstring",
    "gtsvector",
    "pg_dependencies",
    "pg_mcv_list",
    "pg_ndistinct",
    "pg_node_tree",
    "record",
    "unknown",
}
"""Types of the catalog's own columns, and pseudo-types: no table of a user's has them."""


def typed(type_id: int, type_modifier: int = -1) -> DataType:
    return spark_type(Column(0, "c", type_id, type_modifier))


@pytest.mark.parametrize("type_id", TYPES, ids=lambda type_id: PG_TYPES[type_id].name)
def test_every_type_has_every_column(type_id: int) -> None:
    row = TYPES[type_id]
    match row.to_text:
        case Shape(of=of):
            assert not of or of in TYPES
        case NoText(reason):
            assert reason
        case function:
            assert callable(function)
    assert row.column_type in ColumnType
    for expression in (row.selected.expression, row.canonical, *([row.selected.fits] if row.selected.fits else [])):
        assert '"c"' in expression.format('"c"')
    assert len(row.delimiter) == 1
    assert isinstance(typed(type_id), DataType)


def test_every_type_of_the_catalog_that_is_made_of_a_known_one_is_known() -> None:
    made = {type_id for type_id, row in PG_TYPES.items() if row.of in TYPES and row.kind is not None}
    assert made <= TYPES.keys()
    assert all(isinstance(TYPES[type_id].to_text, Shape) for type_id in made)


def test_a_list_is_an_array_whose_delimiter_is_a_comma() -> None:
    arrays = {type_id for type_id, row in PG_TYPES.items() if row.kind is Kind.ARRAY and type_id in TYPES}
    assert arrays - ARRAYS.keys() == set(type_ids_of("_box"))
    assert all(ARRAYS[type_id] in TYPES for type_id in ARRAYS)


@pytest.mark.parametrize("column_type", ColumnType)
def test_every_column_type_has_its_place_in_arrow_and_in_spark(column_type: ColumnType) -> None:
    """A decimal's precision comes from the column. So decimal is the only type in neither table."""
    is_decimal = column_type is ColumnType.DECIMAL
    data_type = DecimalType(12, 2) if is_decimal else SPARK_TYPES[column_type]
    arrow_type = pa.decimal128(12, 2) if is_decimal else ARROW_TYPES[column_type]
    assert to_arrow_type(data_type, timezone="UTC") == arrow_type
    for kind in (arrow_type, pa.list_(arrow_type)):
        assert convert_text(pa.array([None], pa.string()), kind).array.equals(pa.array([None], kind))
        assert arrow_texts(pa.array([None], kind)) == [None]
    for each in (data_type, ArrayType(data_type)):
        assert value_text("c", each) is not None


def test_no_column_type_is_left_over() -> None:
    assert {row.column_type for row in TYPES.values()} == set(ColumnType)
    assert SPARK_TYPES.keys() == ARROW_TYPES.keys() == set(ColumnType) - {ColumnType.DECIMAL}


def test_a_type_that_is_not_built_in_is_text() -> None:
    assert typed(16384) == StringType()
    assert BuiltInType(UNKNOWN.to_text) == UNKNOWN


def test_a_name_that_no_type_has_is_an_error() -> None:
    with pytest.raises(KeyError):
        type_ids_of("int3")
    assert type_id_of("int3") is None


def test_a_snapshot_can_pack_every_type() -> None:
    columns = tuple(Column(0, f"c{type_id}", type_id, -1) for type_id in (*TYPES, 16384))
    for select in select_columns(Relation(None, 1, "public", "t", "d", columns)):
        assert select.packing is not None, select


def test_braces_in_a_columns_name_stay() -> None:
    columns = tuple(Column(0, "{0}{x}", type_id, -1) for type_id in type_ids_of("int4", "uuid", "date", "inet"))
    for select in select_columns(Relation(None, 1, "public", "t", "d", columns)):
        assert '"{0}{x}"' in select.expression
        assert select.packing is not None
        assert '"{0}{x}"' in select.packing.value


# docs/spark/types.md


def documented() -> list[tuple[list[str], list[str]]]:
    """Return the types, and their Spark types, of each row of the first table."""
    section = DOC.read_text().split("## Exact types")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("|")][2:]
    names = [[re.sub(r" \(.*\)$", "", cell.strip()) for cell in re.split(r", (?![^(]*\))", first)] for first, _ in rows]
    return list(zip(names, [second.strip().split(", ") for _, second in rows], strict=True))


def id_of(name: str) -> int:
    formatted = {row.formatted: type_id for type_id, row in PG_TYPES.items()}
    by_name = {row.name: type_id for type_id, row in PG_TYPES.items()}
    return by_name["bpchar"] if name == "char(n)" else by_name.get(name) or formatted[name]


def test_the_page_has_every_type_with_its_spark_type() -> None:
    found: dict[int, str] = {}
    for names, spark_names in documented():
        if names[0].startswith(("numeric", "array of", "enums")):
            continue
        for name, spark_name in zip(names, spark_names * len(names) if len(spark_names) == 1 else spark_names, strict=True):
            found[id_of(name)] = spark_name
    assert found == {type_id: typed(type_id).simpleString() for type_id in found}
    wanted = {type_id for type_id in TYPES if type_id not in ARRAYS and PG_TYPES[type_id].name not in INTERNAL}
    assert found.keys() == wanted - set(NUMERIC_IDS)


def test_the_page_has_the_three_rules() -> None:
    rows = {names[0].split(" of")[0]: spark_names for names, spark_names in documented()}
    assert rows["numeric(p,s)"] == ["decimal(p,s)"]
    assert rows["numeric"] == ["string"]
    assert rows["array"] == ["array of the type's Spark type"]
    assert typed(1700, ((12 << 16) | 2) + 4) == DecimalType(12, 2)
    assert typed(1700) == StringType()
    assert typed(1007) == ArrayType(typed(23))
