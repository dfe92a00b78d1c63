"""wal2json's format version 1: one record for each transaction."""
# ruff: noqa: ARG002, D102 - the callbacks are those of OutputPlugin, and described there

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdcpipe.plugins.held import Held
from cdcpipe.plugins.row_compiler import Field
from cdcpipe.plugins.wal2json.common import ACTIONS, Column, Table, Wal2Json, lsn_text, message_parts

if TYPE_CHECKING:
    from cdcpipe.pgoutput import messages
    from cdcpipe.pgoutput.messages import LogicalMessage
    from cdcpipe.plugins.base import OutputWriter, Transaction
    from cdcpipe.plugins.row_compiler import Part, Template
    from cdcpipe.plugins.template_plugin import Absent

__all__ = ["Wal2Json1"]


class Wal2Json1(Wal2Json):
    """Format version 1: a record for each transaction, in which each change has lists of names, types and values."""

    leaves_out_null_in_old = True

    def startup(self, output: OutputWriter) -> None:
        super().startup(output)
        is_pretty = self._settings.pretty_print
        self._tab, self._newline, self._space = (b"\t", b"\n", b" ") if is_pretty else (b"", b"", b"")
        self._before = self._newline + 2 * self._tab
        self._held = Held(None if self._settings.write_in_chunks else self._before + b",")
        self._is_holding = True
        self._names |= self._held.names

    def shutdown(self) -> None:
        self._held.clear()

    def commit(self, txn: Transaction, commit_lsn: int, lsn: int) -> None:
        tab, newline, space = self._tab, self._newline, self._space
        facts = self._transaction_facts(txn)
        if self._settings.include_lsn:
            facts.insert(1 if self._settings.include_xids else 0, (b"nextlsn", b'"%b"' % lsn_text(txn.end_lsn)))
        lines = [b'%b"%b":%b%b,%b' % (tab, name, space, value, newline) for name, value in facts]
        head = b'{%b%b%b"change":%b[' % (newline, b"".join(lines), tab, space)
        tail = b"%b]%b}" % (tab, newline)
        if self._settings.write_in_chunks:
            self.output.write(txn.first_lsn, head)
            for number, (held_lsn, record) in enumerate(self._held):
                self.output.write(held_lsn, tab + tab + (b"," if number else b"") + record)
            self.output.write(lsn, tail)
            self._held.clear()
        else:
            # The server's plugin gives the record the position of its first change. After feedback on that, the server sends the
            # transaction again. Here the record has the end of the transaction, so that feedback is exact.
            record = self._held.joined(head, self._before, newline + tail)
            self._held.clear()  # before the record is written, which copies it
            self.output.write(lsn, record)

    def message(self, txn: Transaction | None, message: LogicalMessage, lsn: int) -> None:
        if not self._settings.selects_prefix(message.prefix):
            return
        tab, newline, space = self._tab, self._newline, self._space
        names = (b"transactional", b"prefix", b"content")
        items = [(b"kind", b'"message"'), *zip(names, message_parts(message), strict=True)]
        lines = (b",%b" % newline).join(b'%b"%b":%b%b' % (3 * tab, name, space, value) for name, value in items)
        record = b"{%b%b%b%b}" % (newline, lines, newline, 2 * tab)
        if txn is None:
            head = b'{%b%b"change":%b[%b%b' % (newline, tab, space, newline, 2 * tab)
            self.output.write(lsn, b"%b%b%b%b]%b}" % (head, record, newline, tab, newline))
        else:
            self._held.add(lsn, record)

    def add(self, lsn: int, record: bytes) -> None:
        self._held.add(lsn, record)

    def type_of(self, column: messages.Column) -> tuple[int, str]:
        type_id, typmod = column.type_id, column.type_modifier
        if self._settings.include_domain_data_type:
            facts = self.catalog.type(type_id)
            if facts.base_type:
                type_id, typmod = facts.base_type, facts.base_typmod
        if self._settings.include_typmod:
            return type_id, self.catalog.format_type(type_id, typmod)
        return type_id, self.catalog.type(type_id).name

    def template(self, table: Table, kind: str, first: str, absent: Absent) -> Template:
        tab, newline = self._tab, self._newline
        new_row = 0 if first == "N" else 1
        has_pk = self._settings.include_pk and bool(table.primary_key)
        members: list[Template] = [[self._member(3, b"kind", b'"%b"' % ACTIONS[kind].encode())]]
        if self._settings.include_schemas:
            members.append([self._member(3, b"schema", table.schema)])
        members.append([self._member(3, b"table", table.name)])
        if kind != "D":
            members += self._lists(b"column", table.columns, new_row, absent)
        if has_pk:
            members.append(self._object(b"pk", self._primary_key(table)))
        if kind != "I":
            # With REPLICA IDENTITY FULL all columns that are not NULL count as the key.
            members.append(self._object(b"oldkeys", self._lists(b"key", self.old_columns(table, first), 0, absent)))
        return [b"{" + newline, *self._separated(members), newline + 2 * tab + b"}"]

    def _member(self, depth: int, name: bytes, value: bytes) -> bytes:
        return b'%b"%b":%b%b' % (depth * self._tab, name, self._space, value)

    def _object(self, name: bytes, members: Sequence[Template]) -> Template:
        head = self._member(3, name, b"{" + self._newline)
        return [head, *self._separated(members), self._newline + 3 * self._tab + b"}"]

    def _separated(self, members: Sequence[Template]) -> Template:
        parts: list[Part] = []
        for member in members:
            if parts:
                parts.append(b"," + self._newline)
            parts += member
        return parts

    def _list(self, depth: int, name: bytes, items: Sequence[bytes | Field]) -> Template:
        parts: list[Part] = [self._member(depth, name, b"[")]
        for number, item in enumerate(items):
            if number:
                parts.append(b"," + self._space)
            parts.append(item)
        return [*parts, b"]"]

    def _primary_key(self, table: Table) -> Sequence[Template]:
        columns = table.primary_key
        types = [column.type for column in columns] if self._settings.include_types else []
        return [
            self._list(4, b"pknames", [column.name for column in columns]),
            self._list(4, b"pktypes", types),
        ]

    def _lists(self, what: bytes, columns: Sequence[Column], row: int, absent: Absent) -> Sequence[Template]:
        """Return the lists of names, types and so on of the new row's columns, or of the old row's keys."""
        settings = self._settings
        is_new = what == b"column"
        depth = 3 if is_new else 4
        columns = [column for column in columns if (row, column.number) not in absent]
        lists: list[tuple[bytes, Sequence[bytes | Field]]] = [(b"names", [column.name for column in columns])]
        if settings.include_types:
            lists.append((b"types", [column.type for column in columns]))
        if settings.include_type_oids:
            lists.append((b"typeoids", [b"%d" % column.type_id for column in columns]))
        if is_new and settings.include_column_positions:
            lists.append((b"positions", [b"%d" % column.facts.position for column in columns]))
        if is_new and settings.include_not_null:
            # The server prints them only together with the types.
            lists.append((b"optionals", [column.optional for column in columns if settings.include_types]))
        if is_new and settings.include_default:
            lists.append((b"defaults", [column.default for column in columns]))
        values = [Field(column.number, column.style, row) for column in columns]
        lists.append((b"values", values))
        return [self._list(depth, what + name, items) for name, items in lists]
