"""A column that changes its type: which column of the changelog has which values."""

import random

import pytest
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from spark_sink.schema import types as schema_types
from spark_sink.schema.casts import keeps_values
from spark_sink.schema.types import assign_columns, column_names, merge_columns
from support.oids import DATE, FLOAT4, FLOAT8, INT2, INT4, INT8, NUMERIC, TEXT, TIMESTAMP, TIMESTAMPTZ
from support.segments import relation

VARCHAR, BPCHAR, JSON, JSONB = 1043, 1042, 114, 3802


def numeric(precision: int, scale: int) -> tuple[int, int]:
    return NUMERIC, (precision << 16 | scale & 0x7FF) + 4


@pytest.mark.parametrize(
    ("kinds", "columns", "names"),
    [
        # What holds every value of what was there before takes its place.
        ([INT2, INT4, INT8], "c:bigint", "c c c"),
        ([INT2, FLOAT8], "c:double", "c c"),
        ([FLOAT4, FLOAT8], "c:double", "c c"),
        ([DATE, TIMESTAMP], "c:timestamp_ntz", "c c"),
        ([numeric(5, 2), numeric(9, 4)], "c:decimal(9,4)", "c c"),
        ([INT4, numeric(12, 2)], "c:decimal(12,2)", "c c"),
        ([INT8, numeric(22, 2)], "c:decimal(22,2)", "c c"),
        # An integer that is narrower than it was: its values fit, PostgreSQL has looked at each.
        ([INT8, INT4, INT2], "c:bigint", "c c c"),
        # What would round or could overflow, and what is only written in another way.
        ([INT8, FLOAT8], "c:bigint,c__double:double", "c c__double"),
        ([INT4, FLOAT4], "c:int,c__float:float", "c c__float"),
        ([INT2, numeric(5, 0)], "c:smallint,c__decimal_5_0:decimal(5,0)", "c c__decimal_5_0"),
        ([FLOAT8, INT4], "c:double,c__int:int", "c c__int"),
        ([FLOAT8, FLOAT4], "c:double,c__float:float", "c c__float"),
        ([TIMESTAMP, DATE], "c:timestamp_ntz,c__date:date", "c c__date"),
        ([TIMESTAMP, TIMESTAMPTZ], "c:timestamp_ntz,c__timestamp:timestamp", "c c__timestamp"),
        ([numeric(9, 4), numeric(9, 2)], "c:decimal(9,4),c__decimal_9_2:decimal(9,2)", "c c__decimal_9_2"),
        ([numeric(9, 2), numeric(9, 4)], "c:decimal(9,2),c__decimal_9_4:decimal(9,4)", "c c__decimal_9_4"),
        ([INT4, TEXT, INT4], "c:int,c__string:string", "c c__string c"),
        # The other name is for good: that column is not widened.
        ([TEXT, INT4, INT8], "c:string,c__int:int,c__bigint:bigint", "c c__int c__bigint"),
        # There and back again: each value in a column that holds it.
        ([INT4, FLOAT8, INT4], "c:double,c__int:int", "c__int c c__int"),
    ],
)
def test_a_column_changes_its_type(kinds: list[int | tuple[int, int]], columns: str, names: str) -> None:
    types = [kind if isinstance(kind, tuple) else (kind, -1) for kind in kinds]
    relations = [relation(1, "t", ("c", *of_type)) for of_type in types]
    merged = merge_columns(None, relations)
    assert merged.simpleString() == f"struct<{columns}>"
    assert [assign_columns(merged, version)[0].name for version in relations] == names.split()
    every = dict.fromkeys(assign_columns(merge_columns(None, [version]), version)[0].dataType for version in relations)
    assert [field.dataType for field in merge_columns(None, relations, widen=False)] == list(every)
    for cut in range(len(relations)):
        first = merge_columns(None, relations[:cut])
        assert merge_columns(first, relations[cut:]) == merge_columns(merged, relations[cut:]) == merged


def test_a_narrower_type_stays_in_its_column_until_the_wider_one_is_back() -> None:
    relations = [relation(1, "t", ("c", *kind)) for kind in (numeric(9, 4), numeric(7, 2), numeric(9, 4))]
    merged = merge_columns(None, relations)
    assert merged.simpleString() == "struct<c:decimal(9,4)>"
    assert {assign_columns(merged, version)[0].name for version in relations} == {"c"}
    assert merge_columns(None, relations[:2]).names == ["c", "c__decimal_7_2"]
    assert merge_columns(None, relations, widen=False).names == ["c", "c__decimal_7_2"]


@pytest.mark.parametrize("widen", [True, False])
def test_the_next_attempt_finds_the_columns_of_the_first_one(*, widen: bool) -> None:
    """A changelog gets its columns before the rows. An attempt that ends between decides nothing anew."""
    chosen = random.Random(1)
    decimals = (numeric(10, 2), numeric(12, 2), numeric(12, 4), numeric(14, 4))
    kinds = [INT2, INT4, INT8, FLOAT4, FLOAT8, DATE, TIMESTAMP, TEXT, *decimals]
    for _ in range(3000):
        few = chosen.sample(kinds, chosen.randint(1, 5))  # so that types come back
        types = [kind if isinstance(kind, tuple) else (kind, -1) for kind in chosen.choices(few, k=chosen.randint(2, 6))]
        relations = [relation(1, "t", ("c", *of_type)) for of_type in types]
        done = merge_columns(None, relations[: chosen.randint(0, 2)], widen=widen)
        merged = merge_columns(done, relations, widen=widen)
        assert merge_columns(merged, relations, widen=widen) == merged, types


@pytest.mark.parametrize(
    ("old", "new", "is_kept"),
    [
        (TEXT, VARCHAR, True),
        ((VARCHAR, 14), TEXT, True),
        ((VARCHAR, 14), (VARCHAR, 24), True),
        ((VARCHAR, 14), (VARCHAR, 13), False),
        (TEXT, (VARCHAR, 14), False),
        (TEXT, (BPCHAR, 14), False),
        ((BPCHAR, 14), TEXT, False),
        (INT8, INT2, True),
        (INT4, FLOAT8, True),
        (INT4, numeric(12, 2), True),
        (INT4, NUMERIC, True),
        (INT4, numeric(20, -2), False),
        (INT4, DATE, False),
        (FLOAT4, FLOAT8, True),
        (FLOAT8, FLOAT4, False),
        (numeric(8, 2), NUMERIC, True),
        (numeric(8, 2), numeric(10, 2), True),
        (numeric(8, 2), numeric(10, 4), True),
        (numeric(8, 2), numeric(9, 4), False),
        (numeric(8, 4), numeric(8, 2), False),
        (numeric(50, 2), numeric(60, 2), True),
        (numeric(50, 2), numeric(60, 4), False),  # texts get zeros
        (numeric(30, 2), numeric(50, 4), False),
        (numeric(5, -2), numeric(9, 0), False),
        (NUMERIC, numeric(50, 2), False),
        (NUMERIC, numeric(8, 2), False),
        (TIMESTAMP, (TIMESTAMP, 0), False),
        (DATE, TIMESTAMP, False),
        (JSON, JSONB, False),
        (100_000, 100_000, True),
        (100_000, TEXT, False),
    ],
)
def test_casts_that_keep_the_values(old: int | tuple[int, int], new: int | tuple[int, int], is_kept: bool) -> None:
    before, after = (kind if isinstance(kind, tuple) else (kind, -1) for kind in (old, new))
    assert keeps_values(before, after) == is_kept


@pytest.mark.parametrize(
    ("old", "new", "is_kept"),
    [
        (INT4, INT8, True),
        (INT4, NUMERIC, True),
        (INT4, numeric(12, 0), True),
        (INT4, numeric(12, 2), False),
        (INT8, FLOAT8, False),  # 1e+15
        (FLOAT4, FLOAT8, False),
        (VARCHAR, TEXT, True),
        (numeric(8, 2), NUMERIC, True),
        (numeric(8, 2), numeric(10, 2), True),
        (numeric(8, 2), numeric(10, 4), False),
    ],
)
def test_casts_that_keep_the_texts(old: int | tuple[int, int], new: int | tuple[int, int], is_kept: bool) -> None:
    before, after = (kind if isinstance(kind, tuple) else (kind, -1) for kind in (old, new))
    assert keeps_values(before, after, is_text=True) == is_kept


def test_columns_keep_the_name_that_an_older_version_gave_them() -> None:
    narrow, wide = (relation(1, "t", ("c", kind)) for kind in (INT4, INT8))
    columns = StructType([StructField("c", IntegerType()), StructField("c__bigint", LongType())])
    assert merge_columns(columns, [wide, narrow]) == columns
    assert [assign_columns(columns, version)[0].name for version in (narrow, wide)] == ["c", "c__bigint"]


@pytest.mark.parametrize("seed", range(20))
def test_equal_descriptions_in_a_row_are_merged_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, calls = random.Random(seed), []
    kinds = [INT4, INT8, INT2, TEXT, DATE, TIMESTAMP]
    names = [("c",), ("c", "C"), ("c", "_cdc_c"), ("_metadata", "c")]
    versions = [[(name, chosen.choice(kinds)) for name in chosen.choice(names)] for _ in range(chosen.randint(1, 6))]
    versions = [each for number, each in enumerate(versions) if number == 0 or versions[number - 1] != each]
    once = [relation(number, "t", *each) for number, each in enumerate(versions)]
    again = [relation(100 + number, "t", *each) for number, each in enumerate(v for v in versions for _ in range(5))]
    for widen in (True, False):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(schema_types, "column_names", lambda each: calls.append(each) or column_names(each))
            merged = merge_columns(None, again, widen=widen)
        assert len(calls) == len(once)
        assert merged == merge_columns(None, once, widen=widen)
        with monkeypatch.context() as patch:  # the same with each of them
            patch.setattr(schema_types, "groupby", lambda relations, _: ((each, [each]) for each in relations))
            assert merged == merge_columns(None, again, widen=widen)
