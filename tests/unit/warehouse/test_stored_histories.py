"""Which moments a stored history has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spark_sink.schema.table import Fill, Version
from spark_sink.warehouse.stored_histories import HistoryFacts

FIRST = Version(10, 0, 7, ("id",), ("id",))
COPY = replace(FIRST, end_lsn=150, snapshot=((1, "id"),))
FILLED = replace(FIRST, end_lsn=150, fills=(Fill("v"),))


@pytest.mark.parametrize(
    ("lsn", "changelog_lsn", "versions", "expected"),
    [
        (100, 100, [], True),
        (50, 100, [], True),
        (20, 100, [], False),  # its versions were removed
        # The table has not changed since, others have.
        (200, 100, [], True),
        (200, 101, [], False),
        (200, 300, [], False),
        # The history does not have the copy, or the values of a new column, yet.
        (200, 100, [COPY], False),
        (149, 100, [COPY], True),
        (200, 100, [FILLED], False),
        (50, 100, [FILLED], False),
        # It has a later change, but not a copy from before it.
        (95, 100, [replace(COPY, end_lsn=90)], False),
        (200, 100, [replace(COPY, end_lsn=90)], False),
    ],
)
def test_the_moments_that_it_has(lsn: int, changelog_lsn: int, versions: list[Version], expected: bool) -> None:
    facts = HistoryFacts(100, 20, frozenset())
    assert facts.has(lsn, [FIRST, *versions], changelog_lsn) == expected


def test_one_that_was_set_back_has_none() -> None:
    assert not HistoryFacts(100, 20, frozenset(), is_restored=True).has(200, [FIRST], 100)
