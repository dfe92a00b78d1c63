"""What a view with a table's history can express, and the literals in its text. What its SQL returns is tested with Spark."""

from datetime import UTC, datetime

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from spark_sink.replica.fills import constant_sql
from spark_sink.replica.history_view import HistoryShape, UnfitError, history_shape
from spark_sink.schema.table import Fill, Version

KEY = ("id",)
FIRST = Version(10, 0, 7, KEY, KEY)
SNAPSHOT = Version(50, 0, 7, KEY, KEY, snapshot=((1, "id"),))


def test_a_table_that_only_gets_columns_and_copies() -> None:
    fills = (Fill("price", None, "7"),), (Fill("price", None, "8"),)
    versions = [FIRST, Version(30, 2, 7, KEY, KEY, fills[0]), SNAPSHOT, Version(60, 0, 7, KEY, KEY, fills[1], gone=("old",))]
    assert history_shape(versions) == HistoryShape(
        key=(KEY,), fills=(((60, 0), fills[1]), ((30, 2), fills[0])), snapshots=frozenset({50})
    )


def test_another_table_with_the_name_and_the_same_key() -> None:
    assert history_shape([FIRST, Version(30, 4, 8, KEY, KEY)]).new_tables == ((30, 4),)


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (Version(30, 0, 7, ("id", "name"), ("id", "name")), "its key has changed"),
        (Version(30, 0, 7, KEY, ("id__string",)), "its key has changed"),
        (Version(30, 0, 8, ("code",), ("code",)), "its key has changed"),
        (Version(30, 0, 7, (), ()), "when it had no key"),
        (Version(30, 0, 8, (), ()), "when it had no key"),
        (Version(30, 0, 7, KEY, KEY, (Fill("title", "name"),)), "in title"),
        (Version(30, 0, 7, KEY, KEY, (Fill("id", None, "1"),)), "a column of its key"),
    ],
)
def test_what_the_sql_cannot_express(second: Version, reason: str) -> None:
    with pytest.raises(UnfitError, match=reason):
        history_shape([FIRST, second])
    # Once the changes from before it are purged, only the last version counts.
    if second.key:
        shape = history_shape([FIRST, second, Version(50, 0, second.relation_id, second.key, second.columns)], 40)
        assert (tuple(names[0] for names in shape.key), shape.fills, shape.new_tables) == (second.columns, (), ())


def test_a_table_whose_first_changes_had_no_key() -> None:
    with pytest.raises(UnfitError, match="had no key"):
        history_shape([Version(10, 0, 7, (), ()), Version(30, 0, 7, KEY, KEY)])


NULL_TEXT = "CAST(NULL AS STRING)"


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        (None, LongType(), "CAST(NULL AS bigint)"),
        ("t", BooleanType(), "CAST('True' AS boolean)"),
        ("-7", IntegerType(), "CAST('-7' AS int)"),
        ("1.50", DecimalType(5, 2), "CAST('1.50' AS decimal(5,2))"),
        ("Infinity", DoubleType(), "CAST('inf' AS double)"),
        ("it's \\", StringType(), r"CAST('it\'s \\' AS string)"),
        ("\\x00ff", BinaryType(), "CAST(X'00ff' AS binary)"),
        ("2024-01-02", DateType(), "CAST('2024-01-02' AS date)"),
        ("2024-01-02 03:04:05.5", TimestampNTZType(), "CAST('2024-01-02 03:04:05.500000' AS timestamp_ntz)"),
        (
            "2024-01-02 03:04:05+00",
            TimestampType(),
            f"CAST(timestamp_micros({int(datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp())}000000L) AS timestamp)",
        ),
        ("{1,NULL}", ArrayType(IntegerType()), "CAST(array(CAST('1' AS int), CAST(NULL AS int)) AS array<int>)"),
    ],
)
def test_values_of_new_columns(text: str | None, kind: DataType, expected: str) -> None:
    assert constant_sql(text, kind) == (expected, NULL_TEXT)


def test_a_value_that_the_type_cannot_hold() -> None:
    assert constant_sql("infinity", DateType()) == ("CAST(NULL AS date)", "'infinity'")
