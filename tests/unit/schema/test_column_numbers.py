"""The catalog's numbers for columns that the stream has described, also if the catalog is from another time."""

import pytest

from spark_sink.schema.column_numbers import numbered
from support.descriptions import catalog, table


@pytest.mark.parametrize(
    ("before", "columns", "now", "numbers"),
    [
        # The catalog is of that time: without the version before, too.
        (None, "id a", "id=1 a=2", [1, 2]),
        (None, "id a", "id=1 b=2", None),
        (None, "id a", "", None),
        ("id=1 a=2", "id b", "id=1 b=2", [1, 2]),
        ("id=1 a=2", "id a", "id=1 a=3", [1, 3]),
        # It is later: what comes in between is found where there is one way to it.
        ("id=1 a=2", "id b", "id=1 b=2 c=3", [1, 2]),
        ("id=1 a=2", "id b c", "id=1 b=2 c=3 d=4", [1, 2, 3]),
        ("id=1 a=2 b=3", "id a", "id=1 a=2 c=4", [1, 2]),
        ("id=1 a=2 b=3", "id b", "id=1 a=2 b=5", None),
        ("id=1 a=2 b=3", "id b a", "id=1 b=2 a=3 c=4", [1, 2, 3]),
        # Under a name, or of a type, that neither has; or there are two ways.
        ("id=1 a=2", "id x", "id=1 b=2 c=3", None),
        ("id=1 a=2", "id b:25", "id=1 b=2 c=3", None),
        ("id=1 a=2", "id a", "id=1 a=3 b=4", None),
        # A column that is in both was there in between.
        ("id=1 a=2 b=3", "id a", "id=1 a=2 b=3 c=4", None),
    ],
)
def test_numbers_of_columns(before: str | None, columns: str, now: str, numbers: list[int] | None) -> None:
    known = None
    if before is not None:
        facts = numbered(table(before), catalog(before), None)
        assert facts is not None
        known = table(before), facts
    found = numbered(table(columns), catalog(now), known)
    assert (None if found is None else [fact.number for fact in found]) == numbers
