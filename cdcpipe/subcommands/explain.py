"""Writes pgoutput's messages as text for people: every field with its name, LSNs and times readable, names beside ids.

Bytes that are not a message raise a ProtocolError. The order of the messages is not checked, so that people can look at the end of
a stream without its beginning. If a relation was not described, its names are missing. No text of a row reaches a terminal
unescaped: every character that is not printable is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Final

from cdcpipe.ddl import message as ddl
from cdcpipe.errors import ProtocolError
from cdcpipe.lsn import format_lsn
from cdcpipe.pgoutput.decode import NAMES, decode
from cdcpipe.pgoutput.messages import (
    REPLICA_IDENTITIES,
    UNCHANGED_TOAST,
    Binary,
    Column,
    LogicalMessage,
    Message,
    Relation,
    Row,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    UnchangedToast,
    Value,
)
from cdcpipe.plugins.text import format_timestamp
from cdcpipe.printable import printable_character, printable_json
from cdcpipe.types.names import format_built_in_type

__all__ = ["Explainer"]

_ESCAPES: Final = {"\\": "\\\\", "'": "\\'", '"': '\\"'}
_WORD: Final = re.compile(r"\w+")


class Explainer:
    """Explains the messages of one stream, in its order."""

    def __init__(self) -> None:
        self._in_stream = False
        self._relations: dict[int, Relation] = {}
        self._types: dict[int, Type] = {}

    def explain(self, pos: int, wal_start: int, data: bytes) -> str:
        """Return the lines for the message whose record begins at byte ``pos``. Raises ProtocolError if it is not a message."""
        message = decode(data, in_stream=self._in_stream, streaming_parallel=None)
        match message:
            case StreamStart() | StreamStop():
                self._in_stream = isinstance(message, StreamStart)
            case Relation():
                self._relations[message.relation_id] = message
            case Type():
                self._types[message.type_id] = message
        kind = chr(data[0])
        lines = [f"byte {pos}, LSN {format_lsn(wal_start)}: {NAMES[kind]} ({kind}), {len(data)} bytes\n"]
        for field in fields(message):
            if field.name == "content" and isinstance(message, LogicalMessage):
                captured = ddl.parse(message.prefix, message.content)
                if captured is not None:
                    lines += _ddl(captured)
                    continue
            lines += self._field(message, field.name, getattr(message, field.name))
        return "".join(lines)

    def _field(self, message: Message, name: str, value: object) -> Iterator[str]:
        """Yield a field's lines. A field that is not in the message has none."""
        if value is None:
            return
        if isinstance(value, tuple):
            yield f"    {name}: {len(value)}{'' if name in ('relation_ids', 'columns') else ' columns'}\n"
            if name == "relation_ids":
                lines = [self._relation(relation_id) for relation_id in value]
            elif isinstance(message, Relation):
                lines = [self._column(column) for column in message.columns]
            else:
                lines = list(self._row(getattr(message, "relation_id", 0), value, is_key=name == "key"))
            for line in lines:
                yield f"        {line}\n"
            return
        yield f"    {name.removesuffix('_us')}: {self._scalar(message, name, value)}\n"

    def _scalar(self, message: Message, name: str, value: object) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, int):
            if name.endswith("lsn"):
                return format_lsn(value)
            if name.endswith("_time_us"):
                return _time(value)
            if name == "relation_id" and not isinstance(message, Relation):
                return self._relation(value)
            meaning = _flags(message) if name == "flags" else ""
            return f"{value}{meaning}"
        if isinstance(value, bytes):
            return _content(value)
        assert isinstance(value, str)
        if name == "replica_identity":
            return f"{value} ({REPLICA_IDENTITIES[value]})"
        return f"'{_escape(value)}'"

    def _relation(self, relation_id: int) -> str:
        relation = self._relations.get(relation_id)
        name = "not described before" if relation is None else f"{_name(relation.namespace)}.{_name(relation.name)}"
        return f"{relation_id} ({name})"

    def _column(self, column: Column) -> str:
        type_name = format_built_in_type(column.type_id, column.type_modifier)
        type_ = self._types.get(column.type_id)
        if type_name is None and type_ is not None:
            type_name = f"{_name(type_.namespace)}.{_name(type_.name)}"
        shown = f"{column.type_id} ({type_name})" if type_name else f"{column.type_id}"
        key = ", key" if column.is_key else ""
        return f"{_name(column.name)}: type_id {shown}, type_modifier {column.type_modifier}, flags {column.flags}{key}"

    def _row(self, relation_id: int, row: Row, *, is_key: bool) -> Iterator[str]:
        relation = self._relations.get(relation_id)
        columns = relation.columns if relation is not None and len(relation.columns) == len(row) else None
        for number, value in enumerate(row):
            name = f"column {number + 1}" if columns is None else _name(columns[number].name)
            if is_key and value is None and columns is not None and not columns[number].is_key:
                yield f"{name}: not sent, it is not part of the key"
            else:
                yield f"{name}: {_value(value)}"


def _ddl(message: ddl.DDLMessage) -> Iterator[str]:
    """Yield the lines for a message of DDL capture: one for each member, and for each item of a list."""
    yield "    content: a message of DDL capture\n"
    for name, value in message.items():
        items = value if isinstance(value, list) else None
        yield f"        {_name(name)}: {_json(value) if items is None else len(items)}\n"
        for item in items or []:
            yield f"            {_json(item)}\n"


def _json(value: object) -> str:
    """Return JSON whose characters are all printable."""
    return printable_json(ddl.serialize(value).decode())


def _value(value: Value) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, UnchangedToast):
        return UNCHANGED_TOAST.name
    if isinstance(value, Binary):
        return f"x'{value.hex()}'"
    return f"'{_escape(value.decode('utf-8', 'surrogateescape'))}'"


def _content(content: bytes) -> str:
    try:
        return f"'{_escape(content.decode())}'"
    except UnicodeDecodeError:
        return f"x'{content.hex()}'"


def _flags(message: Message) -> str:
    meanings = []
    if isinstance(message, Truncate):
        meanings = ["cascade"] * message.is_cascade + ["restart identity"] * message.is_restart_identity
    elif isinstance(message, LogicalMessage):
        meanings = ["transactional" if message.is_transactional else "not transactional"]
    return f" ({', '.join(meanings)})" if meanings else ""


def _time(time_us: int) -> str:
    try:
        return format_timestamp(time_us).decode()
    except ProtocolError:
        return f"{time_us} microseconds since 2000"


def _name(name: str) -> str:
    return name if _WORD.fullmatch(name) else f'"{_escape(name)}"'


def _escape(text: str) -> str:
    r"""Escape quotes, backslashes and characters that are not printable. ``\x`` is a byte that is not part of valid UTF-8."""
    if text.isprintable() and not ("'" in text or '"' in text or "\\" in text):
        return text
    return "".join(_ESCAPES.get(c) or (c if c.isprintable() else printable_character(c)) for c in text)
