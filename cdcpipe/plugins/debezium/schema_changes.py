"""Debezium's schema change events, from the messages of DDL capture.

Debezium's PostgreSQL connector has none. These have the form of the events that its connectors for MySQL, SQL Server and Oracle
write to their schema change topics: ``databaseName``, ``schemaName``, ``ddl``, and in ``tableChanges`` the whole description of
each table after the statement (CREATE, ALTER), or null (DROP). The numbers of ``jdbcType`` are those that PostgreSQL's JDBC driver
gives the types; ``nativeType`` is the type's OID.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cdcpipe.ddl.message import serialize
from cdcpipe.types.pg_type import type_ids_of

if TYPE_CHECKING:
    from cdcpipe.ddl.message import DDLMessage

__all__ = ["SchemaChange", "schema_change"]

_JDBC_TYPES: Final[Mapping[int, int]] = {
    **dict.fromkeys(type_ids_of("int2"), 5),
    **dict.fromkeys(type_ids_of("int4"), 4),
    **dict.fromkeys(type_ids_of("int8", "oid"), -5),
    **dict.fromkeys(type_ids_of("numeric"), 2),
    **dict.fromkeys(type_ids_of("float4"), 7),
    **dict.fromkeys(type_ids_of("float8", "money"), 8),
    **dict.fromkeys(type_ids_of("char", "bpchar"), 1),
    **dict.fromkeys(type_ids_of("varchar", "text", "name"), 12),
    **dict.fromkeys(type_ids_of("bytea"), -2),
    **dict.fromkeys(type_ids_of("bool", "bit"), -7),
    **dict.fromkeys(type_ids_of("date"), 91),
    **dict.fromkeys(type_ids_of("time", "timetz"), 92),
    **dict.fromkeys(type_ids_of("timestamp", "timestamptz"), 93),
    **dict.fromkeys(type_ids_of("xml"), 2009),
}
_ARRAY: Final = 2003
_OTHER: Final = 1111

_NUMERIC: Final = type_ids_of("numeric")
_WITH_HEADER: Final = type_ids_of("bpchar", "varchar", "numeric")
"""Types whose modifier is four more than what it says."""
_WITH_LENGTH: Final = (*_WITH_HEADER, *type_ids_of("bit", "varbit"))


@dataclass(frozen=True, slots=True)
class SchemaChange:
    """What an event says: the first table's name, which is in ``source``, and the members after ``ts_ms`` as JSON."""

    schema: str | None
    table: str | None
    members: bytes


def schema_change(message: DDLMessage, database: str) -> SchemaChange | None:
    """Return the event for a message that stands for a statement.

    Return None if the message lacks something, or has it in another type. Then the capture has not written it, because everybody
    may write logical messages.
    """
    try:
        return _schema_change(message, database)
    except (KeyError, TypeError, AttributeError, ValueError):
        return None


def _schema_change(message: DDLMessage, database: str) -> SchemaChange:
    changes = [*_dropped(message), *_described(message)]
    schema, table = (changes[0][1], changes[0][2]) if changes else (None, None)
    members = {
        "databaseName": database,
        "schemaName": schema,
        "ddl": message.get("statement"),
        "tableChanges": [
            {"type": kind, "id": ".".join(map(_quoted, (database, schema, name))), "table": description}
            for kind, schema, name, description in changes
        ],
    }
    return SchemaChange(schema, table, serialize(members)[1:-1])


_Change = tuple[str, str, str, "dict[str, Any] | None"]


def _dropped(message: DDLMessage) -> list[_Change]:
    return [("DROP", each["schema"], each["name"], None) for each in message.get("dropped", []) if each["type"] == "table"]


def _described(message: DDLMessage) -> list[_Change]:
    created = {each["oid"] for each in message.get("objects", []) if each["type"] == "table" and each["tag"] in _CREATING}
    return [
        ("CREATE" if table["oid"] in created else "ALTER", table["schema"], table["name"], _table(table))
        for table in message.get("tables", [])
    ]


_CREATING: Final = ("CREATE TABLE", "CREATE TABLE AS", "SELECT INTO")


def _table(table: Mapping[str, Any]) -> dict[str, Any]:
    names = {column["number"]: column["name"] for column in table["columns"]}
    key = table["primary_key"]
    return {
        "defaultCharsetName": None,
        "primaryKeyColumnNames": [names[number] for number in key["columns"]] if key else [],
        "columns": [_column(position, column) for position, column in enumerate(table["columns"], 1)],
        "comment": table["comment"],
    }


def _column(position: int, column: Mapping[str, Any]) -> dict[str, Any]:
    type_ = column["type"]
    length, scale = _size(type_["oid"], type_["modifier"])
    return {
        "name": column["name"],
        "jdbcType": _ARRAY if type_["text"].endswith("[]") else _JDBC_TYPES.get(type_["oid"], _OTHER),
        "nativeType": type_["oid"],
        "typeName": type_["name"],
        "typeExpression": type_["text"],
        "charsetName": None,
        "length": length,
        "scale": scale,
        "position": position,
        "optional": not column["not_null"],
        "autoIncremented": column["identity"] is not None,
        "generated": column["generated"] is not None,
        "comment": column["comment"],
        "defaultValueExpression": None,
        "enumValues": None,
    }


def _size(type_id: int, modifier: int) -> tuple[int | None, int | None]:
    """Return length and scale of a type, as far as its modifier has them."""
    if modifier < 0 or type_id not in _WITH_LENGTH:
        return None, None
    if type_id in _WITH_HEADER:
        modifier -= 4
    if type_id not in _NUMERIC:
        return modifier, None
    scale = modifier & 0x7FF
    return modifier >> 16, scale - 0x800 if scale & 0x400 else scale


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
