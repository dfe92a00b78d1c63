"""test_decoding's output from a pgoutput slot: the same bytes as PostgreSQL's example plugin, with all its options.

Like the original it can render streamed and prepared transactions; ``stream-changes`` asks pgoutput for the former. If the original
differs between versions of PostgreSQL, the server's version counts. docs/output-plugins.md lists the remaining differences.
"""
# ruff: noqa: ARG002, D102 - the callbacks are those of OutputPlugin, and described there

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.plugins import row_compiler
from cdcpipe.plugins.row_compiler import Expression, Field
from cdcpipe.plugins.template_plugin import TemplatePlugin
from cdcpipe.plugins.text import format_timestamp, parse_bool, quote_identifier, quote_literal
from cdcpipe.types.pg_type import type_ids_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cdcpipe.pgoutput.messages import LogicalMessage, Origin, Relation, Truncate
    from cdcpipe.plugins.base import Change, Options, Query, Transaction
    from cdcpipe.plugins.row_compiler import Style, Template
    from cdcpipe.plugins.template_plugin import Absent

__all__ = ["TestDecoding"]

_STYLES: Final[Mapping[int, Style]] = {
    # Written verbatim, NaN and the infinities included.
    **dict.fromkeys(type_ids_of("int2", "int4", "int8", "oid", "float4", "float8", "numeric"), row_compiler.VERBATIM),
    **dict.fromkeys(type_ids_of("bit", "varbit"), row_compiler.BIT_LITERAL),
    **dict.fromkeys(type_ids_of("bool"), row_compiler.BOOLEAN),
}
_KINDS: Final = {"I": b" INSERT:", "U": b" UPDATE:", "D": b" DELETE:"}
_DEFAULTS: Final = {
    "include-xids": True,
    "include-timestamp": False,
    "force-binary": False,
    "skip-empty-xacts": False,
    "only-local": False,
    "include-rewrites": False,
    "stream-changes": False,
}

_MESSAGES_COUNT_SINCE: Final = 170000


@dataclass(frozen=True, slots=True)
class _Table:
    """A relation: its name, and for each column the bytes before the value and the style of the value."""

    name: bytes
    columns: Sequence[tuple[bytes, Style]]


class TestDecoding(TemplatePlugin[_Table]):
    """PostgreSQL's contrib/test_decoding."""

    __test__ = False
    """Tells pytest that this class is not a test, in spite of its name."""

    name = "test_decoding"
    leaves_out_null_in_old = True

    def __init__(self, options: Options, query: Query) -> None:
        super().__init__(options, query)
        for name in options:
            if name not in _DEFAULTS:
                msg = f"test_decoding has no option {name!r}"
                raise InvalidArgumentsError(msg, hint=f"its options are: {', '.join(sorted(_DEFAULTS))}")
        asked = _DEFAULTS | {name: parse_bool(name, value) for name, value in options.items()}
        if asked["include-rewrites"]:
            msg = "test_decoding's option 'include-rewrites' can't be honoured: pgoutput does not send a table's rewrite"
            raise InvalidArgumentsError(msg, hint="leave it out")
        self._has_xids = asked["include-xids"]
        self._has_timestamp = asked["include-timestamp"]
        self._only_local = asked["only-local"]
        self.needs_origin = "only-local" if self._only_local else None
        self._skips_empty = asked["skip-empty-xacts"]
        self._pending: Transaction | None = None
        """With skip-empty-xacts: the transaction or block whose BEGIN is written at its first change."""
        self._wrote: dict[int, bool] = {}
        """Whether a streamed transaction that is still in progress has had any change."""
        # The server's plugin always writes messages, and streams only if asked to.
        self.pgoutput_options = {"messages": "true"} | ({"streaming": "on"} if asked["stream-changes"] else {})

    def filter_by_origin(self, origin: Origin) -> bool:
        return self._only_local

    def describe(self, relation: Relation) -> _Table:
        columns = []
        for column in relation.columns:
            type_name = self.catalog.format_type(column.type_id, None)
            head = f" {self._quote(column.name)}[{type_name}]:".encode()
            columns.append((head, _STYLES.get(column.type_id, row_compiler.LITERAL)))
        return _Table(self._qualified(relation), columns)

    def template(self, table: _Table, kind: str, first: str, absent: Absent) -> Template:
        parts: list[bytes | Field | Expression] = [b"table ", table.name, b":", _KINDS[kind]]
        if first != "N":
            if kind == "U":
                parts.append(b" old-key:")
            for number, (head, style) in enumerate(table.columns):
                if (0, number) not in absent:
                    parts += [head, Field(number, style, 0)]
            if kind == "U":
                parts.append(b" new-tuple:")
        if kind != "D":
            row = 0 if first == "N" else 1
            for number, (head, style) in enumerate(table.columns):
                parts.append(head)
                parts.append(b"unchanged-toast-datum" if (row, number) in absent else Field(number, style, row))
        return parts

    def change(self, txn: Transaction, relation: Relation, change: Change, lsn: int) -> None:
        self._write_pending()
        super().change(txn, relation, change, lsn)

    def emit(self, table: _Table) -> str:
        if self._skips_empty:
            self._names |= {"plugin": self}
            return "if plugin._pending is not None:\n    plugin._write_pending()\nwrite(wal_start, {record})"
        return super().emit(table)

    def begin(self, txn: Transaction) -> None:
        if self._skips_empty:
            self._pending = txn
        else:
            self._write(txn.first_lsn, "BEGIN", txn)

    def commit(self, txn: Transaction, commit_lsn: int, lsn: int) -> None:
        if self._is_empty():
            return
        self._write(lsn, "COMMIT", txn, timestamp=True)

    def truncate(self, txn: Transaction, relations: Sequence[Relation], change: Truncate, lsn: int) -> None:
        self._write_pending()
        flags = " restart_seqs" * change.is_restart_identity + " cascade" * change.is_cascade
        tables = b", ".join(self._qualified(relation) for relation in relations)
        self.output.write(lsn, b"table %b: TRUNCATE:%b" % (tables, flags.encode() or b" (no-flags)"))

    def message(self, txn: Transaction | None, message: LogicalMessage, lsn: int) -> None:
        if self._pending is not None and txn is not None and self._counts_messages:
            self._write_pending()
        head = f"message: transactional: {message.flags & 1} prefix: {message.prefix}, sz: {len(message.content)} content:"
        self.output.write(lsn, head.encode() + message.content)

    def begin_prepare(self, txn: Transaction) -> None:
        self.begin(txn)

    def prepare(self, txn: Transaction, prepare_lsn: int, lsn: int) -> None:
        if not self._is_empty():
            self._write_prepared(lsn, "PREPARE TRANSACTION", txn)

    def commit_prepared(self, txn: Transaction, commit_lsn: int, lsn: int) -> None:
        self._write_prepared(lsn, "COMMIT PREPARED", txn)

    def rollback_prepared(self, txn: Transaction, prepare_end_lsn: int, prepare_time_us: int, lsn: int) -> None:
        self._write_prepared(lsn, "ROLLBACK PREPARED", txn)

    def stream_start(self, txn: Transaction, lsn: int) -> None:
        self._wrote.setdefault(txn.xid, False)
        if self._skips_empty:
            self._pending = txn
        else:
            self._write_streamed(lsn, "opening a streamed block for transaction", txn.xid)

    def stream_stop(self, txn: Transaction, lsn: int) -> None:
        if not self._is_empty():
            self._write_streamed(lsn, "closing a streamed block for transaction", txn.xid)

    def stream_change(self, txn: Transaction, relation: Relation, change: Change, lsn: int) -> None:
        self._open_block(txn)
        self._write_streamed(lsn, "streaming change for", txn.xid, "transaction")

    def stream_truncate(self, txn: Transaction, relations: Sequence[Relation], change: Truncate, lsn: int) -> None:
        self._open_block(txn)
        self._write_streamed(lsn, "streaming truncate for", txn.xid, "transaction")

    def stream_message(self, txn: Transaction, message: LogicalMessage, lsn: int) -> None:
        if self._skips_empty and self._counts_messages:
            self._open_block(txn)
        head = f"streaming message: transactional: {message.flags & 1} prefix: {message.prefix}, sz: {len(message.content)}"
        self.output.write(lsn, head.encode())

    def stream_abort(self, txn: Transaction, subxid: int, lsn: int) -> None:
        wrote = self._wrote.get(txn.xid, False)
        if subxid == txn.xid:
            self._wrote.pop(txn.xid, None)
        if wrote or not self._skips_empty:
            self._write_streamed(lsn, "aborting streamed (sub)transaction", subxid)

    def stream_prepare(self, txn: Transaction, prepare_lsn: int, lsn: int) -> None:
        if not self._wrote.pop(txn.xid, False) and self._skips_empty:
            return
        xid = f", txid {txn.xid}" if self._has_xids else ""
        text = f"preparing streamed transaction{' TXN' if self._has_xids else ''} {quote_literal(txn.gid or '')}{xid}"
        self.output.write(lsn, text.encode() + self._at(txn))

    def stream_commit(self, txn: Transaction, commit_lsn: int, lsn: int) -> None:
        if not self._wrote.pop(txn.xid, False) and self._skips_empty:
            return
        text = "committing streamed transaction" + (f" TXN {txn.xid}" if self._has_xids else "")
        self.output.write(lsn, text.encode() + self._at(txn))

    @property
    def _counts_messages(self) -> bool:
        """Whether a transaction with only messages counts as not empty: since PostgreSQL 17, and without a server."""
        version = self.catalog.server_version
        return version is None or version >= _MESSAGES_COUNT_SINCE

    def _is_empty(self) -> bool:
        """End a transaction or block. Returns True if nothing has to be written for it."""
        is_empty = self._pending is not None
        self._pending = None
        return is_empty

    def _write_pending(self) -> None:
        """Write the delayed BEGIN. Such a record has no position, as on the server."""
        if self._pending is not None:
            self._write(0, "BEGIN", self._pending)
            self._pending = None

    def _open_block(self, txn: Transaction) -> None:
        self._wrote[txn.xid] = True
        if self._pending is not None:
            self._pending = None
            self._write_streamed(0, "opening a streamed block for transaction", txn.xid)

    def _write(self, lsn: int, text: str, txn: Transaction, *, timestamp: bool = False) -> None:
        xid = f" {txn.xid}" if self._has_xids else ""
        self.output.write(lsn, f"{text}{xid}".encode() + (self._at(txn) if timestamp else b""))

    def _write_prepared(self, lsn: int, text: str, txn: Transaction) -> None:
        xid = f", txid {txn.xid}" if self._has_xids else ""
        self.output.write(lsn, f"{text} {quote_literal(txn.gid or '')}{xid}".encode() + self._at(txn))

    def _write_streamed(self, lsn: int, text: str, xid: int, without_xid: str = "") -> None:
        tail = f"TXN {xid}" if self._has_xids else without_xid
        self.output.write(lsn, f"{text} {tail}".rstrip().encode())

    def _at(self, txn: Transaction) -> bytes:
        return b" (at %b)" % format_timestamp(txn.commit_time_us) if self._has_timestamp else b""

    def _qualified(self, relation: Relation) -> bytes:
        return f"{self._quote(relation.namespace)}.{self._quote(relation.name)}".encode()

    def _quote(self, name: str) -> str:
        return quote_identifier(name, self.catalog.keywords)
