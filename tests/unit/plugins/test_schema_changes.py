"""Debezium's schema change events of messages that somebody else than DDL capture has written."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from cdcpipe.plugins.debezium.schema_changes import schema_change

MESSAGE: dict[str, Any] = {
    "version": 1,
    "kind": "command",
    "tag": "CREATE TABLE",
    "statement": "create table t (id int primary key)",
    "objects": [{"type": "table", "oid": 5, "tag": "CREATE TABLE"}],
    "dropped": [{"type": "table", "oid": 4, "schema": "public", "name": "s"}],
    "tables": [
        {
            "oid": 5,
            "schema": "public",
            "name": "t",
            "comment": None,
            "primary_key": {"columns": [1]},
            "columns": [
                {
                    "number": 1,
                    "name": "id",
                    "type": {"oid": 1700, "modifier": 655366, "text": "numeric(10,2)", "name": "numeric"},
                    "not_null": True,
                    "identity": None,
                    "generated": None,
                    "comment": None,
                }
            ],
        }
    ],
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value inside a message."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from places(each, (*path, key))


@pytest.mark.parametrize("other", [None, True, 7, -1, 1 << 80, 1.5, "x", [], [1], ["x"], {}, {"a": 1}], ids=repr)
def test_no_value_of_another_type_ends_the_stream(other: Any) -> None:
    """Everybody may write a logical message. The server would send it again after each restart."""
    assert schema_change(MESSAGE, "db") is not None
    for path in places(MESSAGE):
        message = deepcopy(MESSAGE)
        inner = message
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = other
        change = schema_change(message, "db")
        if change is not None:
            assert isinstance(change.schema, str | None)
            assert isinstance(change.table, str | None)
            json.loads(b"{%b}" % change.members)
