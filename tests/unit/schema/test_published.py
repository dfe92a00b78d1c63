"""What the catalog says of published tables, and when it is asked again."""

from collections.abc import Iterator
from typing import Any

from spark_sink.schema.keys import identifying_columns
from spark_sink.schema.published import PublishedTables
from support.descriptions import catalog, table


def test_another_identity_of_the_same_columns_is_asked_for() -> None:
    """Its other column is not published. So nothing but the catalog tells that the marked one alone is no key."""
    answers: Iterator[list[str]] = iter([["id"], ["id", "g"]])

    def describe() -> list[dict[str, Any]]:
        identity = next(answers)
        return [{"relation_id": 1, "schema": "public", "name": "t", "columns": catalog("id=1 a=2"), "identity": identity}]

    tables, relation = PublishedTables(describe), table("id a")

    def key() -> tuple[str, ...]:
        tables.begin_batch()
        return identifying_columns(relation, lambda: (), lambda: tables.identity(relation))

    assert [key(), key()] == [("id",), ()]
