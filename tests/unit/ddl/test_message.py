"""The messages of DDL capture: what is one, and which of them stands for a statement."""

import json
from typing import Any

import pytest

from cdcpipe.ddl.message import is_statement, parse, serialize, subtransaction

MESSAGE = {"version": 1, "kind": "command", "xid": 7, "tag": "ALTER TABLE", "statement": "größer\n"}


def test_a_message_is_read() -> None:
    content = json.dumps(MESSAGE).encode()
    assert parse("cdcpipe.ddl", content) == parse("cdcpipe.ddl", content, is_checked=True) == MESSAGE
    assert subtransaction("cdcpipe.ddl", content) == 7
    assert json.loads(serialize(MESSAGE)) == MESSAGE
    assert b"\n" not in serialize(MESSAGE)


@pytest.mark.parametrize(
    ("prefix", "content"),
    [
        ("other", json.dumps(MESSAGE).encode()),
        ("cdcpipe.ddl", b""),
        ("cdcpipe.ddl", b"\xff"),
        ("cdcpipe.ddl", b"[]"),
        ("cdcpipe.ddl", b"7"),
        ("cdcpipe.ddl", b'{"version": 2, "kind": "command"}'),
        ("cdcpipe.ddl", b'{"version": 1}'),
        ("cdcpipe.ddl", b'{"version": 1, "kind": 5}'),
        ("cdcpipe.ddl", b'{"version": 1, "kind": "command", "x": NaN}'),
        ("cdcpipe.ddl", b'{"version": 1, "kind": "command", "x": 1e999}'),
        ("cdcpipe.ddl", rb'{"version": 1, "kind": "command", "x": "\ud800"}'),
        ("cdcpipe.ddl", b'{"version": 1, "kind": "command", "x": ' + b"9" * 5000 + b"}"),
        ("cdcpipe.ddl", b"[" * 100_000),
    ],
)
def test_everything_else_is_none(prefix: str, content: bytes) -> None:
    """Everybody may write a logical message, with any prefix and content."""
    assert parse(prefix, content) is None
    assert subtransaction(prefix, content) is None


@pytest.mark.parametrize("xid", [None, "7", [7]])
def test_a_subtransaction_that_is_no_number(xid: Any) -> None:
    assert subtransaction("cdcpipe.ddl", json.dumps(MESSAGE | {"xid": xid}).encode()) is None


@pytest.mark.parametrize(
    ("kind", "tag", "expected"),
    [
        ("command", "ALTER TABLE", True),
        ("drop", "DROP TABLE", True),
        ("drop", "DROP OWNED", True),
        ("drop", "ALTER TABLE", False),
        ("rewrite", "ALTER TABLE", False),
        ("failure", "ALTER TABLE", False),
        ("installed", None, False),
    ],
)
def test_one_message_stands_for_a_statement(kind: str, tag: str | None, expected: bool) -> None:
    assert is_statement({"version": 1, "kind": kind, "tag": tag}) is expected
