"""wal2json's format version 2: one record for each change."""
# ruff: noqa: ARG002, D102 - the callbacks are those of OutputPlugin, and described there

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from cdcpipe.plugins import row_compiler
from cdcpipe.plugins.held import Held, one_behind
from cdcpipe.plugins.row_compiler import Expression, Field, fill
from cdcpipe.plugins.wal2json.common import Column, Table, Wal2Json, lsn_text, message_parts

if TYPE_CHECKING:
    from cdcpipe.pgoutput import messages
    from cdcpipe.pgoutput.messages import LogicalMessage, Relation, Truncate
    from cdcpipe.plugins.base import OutputWriter, Transaction
    from cdcpipe.plugins.row_compiler import Part, Template
    from cdcpipe.plugins.template_plugin import Absent

__all__ = ["Wal2Json2"]

_TXN_PART: Final = Expression("txn_part[0]")


class Wal2Json2(Wal2Json):
    """Format version 2: a record for each change."""

    def startup(self, output: OutputWriter) -> None:
        super().startup(output)
        self._held: Held | None = None
        if self._settings.include_lsn and self._settings.include_transaction:
            self._held = Held()
            self._is_holding = True
            self._names |= self._held.names
        # Without a record for the commit, the last record tells the end of the transaction. So each record waits for the next one.
        self._put, self._end = one_behind(output.write)
        if not self._settings.include_transaction:
            self._names["put"] = self._put
            self._emit = "put(wal_start, {record})"

    def shutdown(self) -> None:
        self._end(None)
        if self._held is not None:
            self._held.clear()

    def begin(self, txn: Transaction) -> None:
        self._txn_part[0] = b"".join(b',"%b":%b' % fact for fact in self._transaction_facts(txn))
        if self._settings.include_transaction and self._held is None:
            self.output.write(txn.first_lsn, b'{"action":"B"%b}' % self._txn_part[0])

    def commit(self, txn: Transaction, commit_lsn: int, lsn: int) -> None:
        if not self._settings.include_transaction:
            self._end(lsn)
            return
        head = self._txn_part[0]
        if self._held is not None:
            head += b',"lsn":"%b","nextlsn":"%b"' % (lsn_text(commit_lsn), lsn_text(txn.end_lsn))
            self.output.write(txn.first_lsn, b'{"action":"B"%b}' % head)
            for held_lsn, record in self._held:
                self.output.write(held_lsn, record)
            self._held.clear()
        self.output.write(lsn, b'{"action":"C"%b}' % head)

    def truncate(self, txn: Transaction, relations: Sequence[Relation], change: Truncate, lsn: int) -> None:
        if "truncate" not in self._settings.actions:
            return
        for relation in relations:
            table = self._tables[relation.relation_id]
            if table.is_selected:
                template = [*self._head("T"), *self._table_name(table), b"}"]
                self.add(lsn, fill(template, [], self._names, lsn))

    def message(self, txn: Transaction | None, message: LogicalMessage, lsn: int) -> None:
        if not self._settings.selects_prefix(message.prefix):
            return
        txn_part = self._txn_part[0]
        if txn is None:
            asked = {"xid": "include_xids", "timestamp": "include_timestamp", "origin": "include_origin"}
            names = [name for name, option in asked.items() if getattr(self._settings, option)]
            txn_part = b"".join(b',"%b":null' % name.encode() for name in names)
        if self._settings.include_lsn:
            txn_part += b',"lsn":"%b"' % lsn_text(message.lsn)
        record = b'{"action":"M"%b,"transactional":%b,"prefix":%b,"content":%b}'
        if txn is None:
            self.output.write(lsn, record % (txn_part, *message_parts(message)))
        else:
            self.add(lsn, record % (txn_part, *message_parts(message)))

    def add(self, lsn: int, record: bytes) -> None:
        if not self._settings.include_transaction:
            self._put(lsn, record)
        elif self._held is None:
            self.output.write(lsn, record)
        else:
            self._held.add(lsn, record)

    def type_of(self, column: messages.Column) -> tuple[int, str]:
        facts = self.catalog.type(column.type_id) if self._settings.include_domain_data_type else None
        if facts and facts.base_type:
            return column.type_id, self.catalog.format_type(facts.base_type, facts.base_typmod)
        return column.type_id, self.catalog.format_type(column.type_id, column.type_modifier)

    def _head(self, action: str) -> list[Part]:
        parts: list[Part] = [b'{"action":"%b"' % action.encode()]
        settings = self._settings
        if settings.include_xids or settings.include_timestamp or settings.include_origin:
            parts.append(_TXN_PART)
        if settings.include_lsn:
            parts += [b',"lsn":"', *row_compiler.LSN, b'"']
        return parts

    def _table_name(self, table: Table) -> list[bytes]:
        schema = [b',"schema":', table.schema] if self._settings.include_schemas else []
        return [*schema, b',"table":', table.name]

    def template(self, table: Table, kind: str, first: str, absent: Absent) -> Template:
        template = [*self._head(kind), *self._table_name(table)]
        new_row = 0 if first == "N" else 1
        if kind != "D":
            template += [b',"columns":[', *self._objects(table.columns, new_row, absent, is_new=True), b"]"]
        if kind != "I":
            template += [b',"identity":[', *self._objects(self.old_columns(table, first), 0, absent, is_new=False), b"]"]
        if self._settings.include_pk:
            columns = [column for column in table.primary_key if first != "N" or (0, column.number) not in absent]
            objects = b",".join(b"{%b}" % self._description(column) for column in columns)
            template += [b',"pk":[', objects, b"]"]
        return [*template, b"}"]

    def _description(self, column: Column) -> bytes:
        parts = [b'"name":%b' % column.name]
        if self._settings.include_types:
            parts.append(b'"type":%b' % column.type)
        if self._settings.include_type_oids:
            # The server prints the OID as a signed number.
            signed = column.type_id - (1 << 32) if column.type_id >= 1 << 31 else column.type_id
            parts.append(b'"typeoid":%d' % signed)
        return b",".join(parts)

    def _objects(self, columns: Sequence[Column], row: int, absent: Absent, *, is_new: bool) -> list[Part]:
        parts: list[Part] = []
        settings = self._settings
        for column in columns:
            if (row, column.number) in absent:
                continue
            parts += [
                b",{" if parts else b"{",
                self._description(column),
                b',"value":',
                Field(column.number, column.style, row),
            ]
            if is_new and settings.include_not_null:
                parts.append(b',"optional":%b' % column.optional)
            if is_new and settings.include_column_positions:
                parts.append(b',"position":%d' % column.facts.position)
            if is_new and settings.include_default:
                parts.append(b',"default":%b' % column.default)
            parts.append(b"}")
        return parts
