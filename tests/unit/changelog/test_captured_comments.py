"""The comments of captured DDL, for the columns of a changelog."""

from pathlib import Path
from typing import Any

from spark_sink.changelog.captured_comments import captured_comments
from spark_sink.schema.ddl import Descriptions
from spark_sink.schema.servers import Servers
from spark_sink.schema.table import AFTER_ALL, Table
from spark_sink.schema.types import merge_columns
from spark_sink.warehouse.comments import Comments, commented_tables, read_comments, write_comments
from spark_sink.warehouse.warehouse import Warehouse
from support.ddl_messages import described, message
from support.descriptions import table


def commented(columns: str, own: str | None, *comments: str | None) -> dict[str, Any]:
    value = described(columns, key=["id"], comment=own)
    for column, text in zip(value["columns"], comments, strict=True):
        column["comment"] = text
    return value


def test_the_newest_comments_count() -> None:
    captured, columns = Descriptions(), merge_columns(None, [table("id a:25 b"), table("id a:23 b")])
    assert captured_comments(table("id a b"), AFTER_ALL, columns, captured, lambda relation: relation) is None
    captured.add((10, 0), message(commented("id=1 a=2 b=3", "old", "key", None, "B")))
    captured.add((20, 1), message(commented("id=1 a=2 b=3", None, "key", "A", None)))
    # A column of another type has another name in the changelog.
    assert captured_comments(table("id a b"), AFTER_ALL, columns, captured, lambda relation: relation) == Comments(
        None, {"id": "key", "a__int": "A"}
    )
    # The publication does not have all columns; or these are not the columns that were described.
    assert captured_comments(table("id b"), AFTER_ALL, columns, captured, lambda relation: relation) == Comments(
        None, {"id": "key"}
    )
    assert captured_comments(table("id c"), AFTER_ALL, columns, captured, lambda relation: relation) is None
    captured.add((30, 0), message(kind="removed"))
    assert captured_comments(table("id a b"), AFTER_ALL, columns, captured, lambda relation: relation) is None


def test_comments_of_another_server_are_those_of_another_table() -> None:
    captured, relation, columns = Descriptions(), table("id"), merge_columns(None, [table("id")])
    captured.end_at([20], Servers([20]))
    captured.add((10, 0), message(commented("id=1", "old", None)))
    captured.add((20, 1), message(commented("id=1", "former", None)))
    captured.add((30, 0), message(commented("id=1", "other", None)))
    found = [captured_comments(relation, (lsn, 0), columns, captured, lambda relation: relation) for lsn in (9, 20, 21, 30)]
    assert [each and each.table for each in found] == ["former", "former", "other", "other"]


def test_comments_are_recorded(tmp_path: Path) -> None:
    house, first, second = Warehouse(tmp_path, "delta"), Table("public", "T"), Table("public", "t")
    assert (read_comments(house, first), commented_tables(house)) == (None, [])
    write_comments(house, first, Comments("one", {"a": "é"}))
    write_comments(house, second, Comments())
    assert read_comments(house, first) == Comments("one", {"a": "é"})
    assert commented_tables(house) == [(first, Comments("one", {"a": "é"})), (second, Comments())]
