"""Messages of captured DDL for tests, in the form that the event triggers write."""

import json
from collections.abc import Sequence
from typing import Any

from spark_sink.schema.ddl_message import DdlMessage, parse
from spark_sink.source.ddl import Ddl
from support.descriptions import catalog


def described(
    columns: str,
    *,
    key: Sequence[str] = (),
    relation_id: int = 1,
    name: str = "t",
    parent: tuple[int, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the description of a table. ``columns`` is in the notation of `descriptions.catalog`."""
    facts = catalog(columns)
    numbers = {each["name"]: each["number"] for each in facts}
    return {
        "oid": relation_id,
        "schema": "public",
        "name": name,
        "columns": [
            {
                "number": each["number"],
                "name": each["name"],
                "type": {"oid": each["type_id"], "modifier": each["type_modifier"]},
                "missing": each["missing"],
                "has_default": each["is_filled"] or each["missing"] is not None,
                "identity": None,
                "generated": None,
            }
            for each in facts
        ],
        "primary_key": {"columns": [numbers[name] for name in key], "deferrable": False} if key else None,
        "replica_identity": {"kind": "default", "index": None, "columns": [numbers[name] for name in key]},
        "partition_of": None if parent is None else {"oid": parent[0], "schema": "public", "name": parent[1]},
    } | more


def content(*tables: dict[str, Any], kind: str = "command", tag: str = "ALTER TABLE", **more: Any) -> bytes:
    return json.dumps({"version": 1, "kind": kind, "tag": tag, "statement": None, "tables": tables} | more).encode()


def message(*tables: dict[str, Any], **more: Any) -> DdlMessage:
    return parse(content(*tables, **more))


def ddl(end_lsn: int, ordinal: int, *tables: dict[str, Any], **more: Any) -> Ddl:
    """Return a message with its place."""
    text = content(*tables, **more)
    return Ddl(end_lsn, ordinal, 1, end_lsn, 7, 0, text.decode(), parse(text))
