"""What the catalog says of published tables, and when it is asked again."""

from dataclasses import replace
from typing import Any

import pytest

from spark_sink.schema.catalog_answers import CatalogAnswers
from spark_sink.schema.keys import identifying_columns
from support.descriptions import catalog, table


@pytest.mark.parametrize("asks_first", [False, True])
@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        (("id a", "id"), ("id a", "id g"), ()),
        (("id a", "id g"), ("id a", "id"), ("id",)),
        (("id a", "id g"), ("id a x", "id x"), ()),  # it has got another column since
        (("id a", "id g"), None, ()),  # it was dropped since
    ],
)
def test_another_identity_of_the_same_columns_is_asked_for(
    before: tuple[str, str], now: tuple[str, str] | None, found: tuple[str, ...], asks_first: bool
) -> None:
    """The column g is not published. So nothing but the catalog tells that the marked one alone is no key."""
    answers = iter([before, now])

    def describe() -> list[dict[str, Any]]:
        answer = next(answers)
        if answer is None:
            return []
        columns = catalog(" ".join(f"{name}={number}" for number, name in enumerate(answer[0].split(), 1)))
        return [{"relation_id": 1, "schema": "public", "name": "t", "columns": columns, "identity": answer[1].split()}]

    tables, relation = CatalogAnswers(describe), table("id a")
    keys = []
    for _ in range(2):
        tables.begin_batch()
        if not asks_first:
            tables.identity(replace(relation, relation_id=2))
        keys.append(identifying_columns(relation, lambda: (), lambda: tables.identity(relation)))
    assert keys[1] == found
