"""The types that rows from before a copy may have in its columns, if no earlier copy tells them."""

from dataclasses import replace

import pytest

from spark_sink.changelog.history import SchemaVersion
from spark_sink.replica.former_keys import types_told
from spark_sink.schema.column_numbers import ColumnFacts
from support.descriptions import ID, table, version

CIDR, INET = 650, 869


def told(lsn: int, columns: str, *numbers: int) -> SchemaVersion:
    facts = tuple(ColumnFacts(number, None, is_filled=False) for number in numbers) or None
    return SchemaVersion(lsn, 0, table(columns), facts)


@pytest.mark.parametrize(
    ("versions", "types"),
    [
        ([], None),
        ([told(10, "id:650", 1)], {CIDR}),
        # The rows may be of each of these times.
        ([told(10, "id:650", 1), told(20, "id:869", 1)], {CIDR, INET}),
        # The number tells which column it is, whatever it was called.
        ([told(10, "old:650 id:869", 1, 2), told(20, "id:869", 1)], {CIDR, INET}),
        ([told(10, "other", 2), told(20, "id:869", 1)], {INET}),
        # Without numbers, the name does.
        ([told(10, "id:650"), told(20, "id:869", 1)], {CIDR, INET}),
        ([told(10, "old:650"), told(20, "id:869")], None),
    ],
)
def test_types_of_former_keys(versions: list[SchemaVersion], types: set[int] | None) -> None:
    copy = replace(version(50, 0, ID), snapshot=((1, "id"),), described=((1, "id", INET, -1),))
    found = types_told(versions, copy).get(1)
    assert found == (types and {(type_id, -1) for type_id in types})
