"""cdcpipe's own JSON (``--output json``): one record for each change, without loss, and each with its position.

``json.schema.json`` in this directory describes the records. In short:

- ``end_lsn`` (the end of the transaction) and ``ordinal`` (the number of the change in it, from 0) identify a change, and order all
  changes. The last record of a transaction is ``"op": "commit"``. Its ``end_lsn``, also in its header, is the position to confirm.
- ``new`` and ``old`` are objects from column to value. ``old`` has what the server sent of the old row: the replica identity, or
  the whole row with REPLICA IDENTITY FULL. With publish_via_partition_root that is the partition's identity. A large value that an
  update did not change is not in ``new``; ``unchanged`` names its column. Such an update is an insert if it brought the row into a
  row filter.
- Numbers that a reader with 64-bit floats would change (bigint, numeric) are strings. So are NaN and the infinities. int2, int4,
  oid and floats are numbers, booleans are booleans. All other values are strings with PostgreSQL's text.
- A message of DDL capture (``cdcpipe ddl install``) is ``"op": "ddl"``, with the message in ``ddl``.
- Any other message's content is in ``content`` if it is UTF-8, else in ``content_base64``. A message that is not transactional has
  only an ``lsn``.

The position is known only at the commit. So a transaction is held until then, beyond 8 MiB in a temporary file.
"""
# ruff: noqa: ARG002, D102 - the callbacks are those of OutputPlugin, and described there

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cdcpipe.ddl import message as ddl
from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.lsn import format_lsn
from cdcpipe.plugins import row_compiler
from cdcpipe.plugins.held import Held
from cdcpipe.plugins.row_compiler import Field, json_string
from cdcpipe.plugins.template_plugin import TemplatePlugin
from cdcpipe.plugins.text import format_timestamp
from cdcpipe.types.pg_type import type_ids_of
from cdcpipe.types.table import PLAIN_IDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cdcpipe.pgoutput.messages import LogicalMessage, Relation, Truncate
    from cdcpipe.plugins.base import Options, OutputWriter, Query, Transaction
    from cdcpipe.plugins.row_compiler import Part, Style, Template
    from cdcpipe.plugins.template_plugin import Absent

__all__ = ["JsonLines"]

_STYLES: Final[Mapping[int, Style]] = {
    **dict.fromkeys(PLAIN_IDS, row_compiler.QUOTED),
    **dict.fromkeys(type_ids_of("int2", "int4", "oid"), row_compiler.VERBATIM),
    **dict.fromkeys(type_ids_of("float4", "float8"), row_compiler.EXACT_NUMBER),
    **dict.fromkeys(type_ids_of("bool"), row_compiler.BOOLEAN),
}
_OPS: Final = {"I": b'"insert"', "U": b'"update"', "D": b'"delete"'}


@dataclass(frozen=True, slots=True)
class _Table:
    name: bytes
    """The members ``schema`` and ``table``."""
    columns: Sequence[tuple[bytes, Style]]


class JsonLines(TemplatePlugin[_Table]):
    """The output plugin ``json``."""

    name = "json"
    pgoutput_options: Mapping[str, str] = {"messages": "true"}

    def __init__(self, options: Options, query: Query) -> None:
        super().__init__(options, query)
        for name in options:
            msg = f"the output plugin json has no option {name!r}"
            raise InvalidArgumentsError(msg, hint="it has no options")

    def startup(self, output: OutputWriter) -> None:
        super().startup(output)
        self._held = Held()
        self._names |= self._held.names

    def shutdown(self) -> None:
        self._held.clear()

    def describe(self, relation: Relation) -> _Table:
        columns = [(json_string(column.name), _STYLES.get(column.type_id, row_compiler.STRING)) for column in relation.columns]
        return _Table(_table(relation), columns)

    def template(self, table: _Table, kind: str, first: str, absent: Absent) -> Template:
        parts: list[Part] = [b'"op":', _OPS[kind], b",", table.name]
        if kind != "D":
            row = 0 if first == "N" else 1
            parts += [b',"new":', *_object(table, row, absent)]
            unchanged = [name for n, (name, _) in enumerate(table.columns) if (row, n) in absent]
            if unchanged:
                parts.append(b',"unchanged":[%b]' % b",".join(unchanged))
        if first != "N":
            parts += [b',"old":', *_object(table, 0, absent)]
        return parts

    def emit(self, table: _Table) -> str:
        return Held.emit(len(table.columns))

    def emit_long(self, table: _Table) -> str:
        return Held.emit_long(len(table.columns))

    def add(self, lsn: int, record: bytes) -> None:
        self._held.add(lsn, record)

    def truncate(self, txn: Transaction, relations: Sequence[Relation], change: Truncate, lsn: int) -> None:
        flags = b'"cascade":%b,"restart_identity":%b' % (_bool(change.is_cascade), _bool(change.is_restart_identity))
        for relation in relations:
            self._held.add(lsn, b'"op":"truncate",%b,%b' % (_table(relation), flags))

    def message(self, txn: Transaction | None, message: LogicalMessage, lsn: int) -> None:
        if txn is not None and (captured := ddl.parse(message.prefix, message.content)) is not None:
            self._held.add(lsn, b'"op":"ddl","ddl":' + ddl.serialize(captured))
            return
        try:
            content = b'"content":' + json_string(message.content.decode())
        except UnicodeDecodeError:
            content = b'"content_base64":"%b"' % base64.b64encode(message.content)
        record = b'"op":"message","transactional":%b,"prefix":%b,%b' % (
            _bool(txn is not None),
            json_string(message.prefix),
            content,
        )
        if txn is None:
            self.output.write(lsn, b'{"lsn":"%b",%b}' % (format_lsn(message.lsn).encode(), record))
        else:
            self._held.add(lsn, record)

    def commit(self, txn: Transaction, commit_lsn: int, lsn: int) -> None:
        write = self.output.write
        time = format_timestamp(txn.commit_time_us).replace(b" ", b"T").replace(b"+00", b"Z")
        origin = b',"origin":%b' % json_string(txn.origin.name) if txn.origin else b""
        end_lsn = format_lsn(txn.end_lsn).encode()
        head = b'{"end_lsn":"%b","xid":%d,"commit_time":"%b"%b,"ordinal":' % (end_lsn, txn.xid, time, origin)
        ordinal = 0
        for held_lsn, record in self._held:
            write(held_lsn, b"%b%d,%b}" % (head, ordinal, record))
            ordinal += 1
        self._held.clear()
        write(lsn, b'%b%d,"op":"commit"}' % (head, ordinal))


def _bool(value: bool) -> bytes:
    return b"true" if value else b"false"


def _table(relation: Relation) -> bytes:
    return b'"schema":%b,"table":%b' % (json_string(relation.namespace), json_string(relation.name))


def _object(table: _Table, row: int, absent: Absent) -> Template:
    parts: list[Part] = [b"{"]
    for number, (name, style) in enumerate(table.columns):
        if (row, number) not in absent:
            parts += [b"," if len(parts) > 1 else b"", name, b":", Field(number, style, row)]
    return [*parts, b"}"]
