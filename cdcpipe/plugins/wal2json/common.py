"""The common part of wal2json's format versions 1 and 2: descriptions of tables, values, facts about a transaction."""
# ruff: noqa: D102 - the callbacks are those of OutputPlugin, and described there

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cdcpipe.lsn import format_lsn
from cdcpipe.plugins import row_compiler
from cdcpipe.plugins.catalog import ColumnFacts
from cdcpipe.plugins.held import Held
from cdcpipe.plugins.row_compiler import escape, json_string
from cdcpipe.plugins.template_plugin import TemplatePlugin
from cdcpipe.plugins.text import format_timestamp
from cdcpipe.plugins.wal2json.options import parse_settings
from cdcpipe.types.pg_type import type_ids_of
from cdcpipe.types.table import PLAIN_IDS

if TYPE_CHECKING:
    from cdcpipe.pgoutput import messages
    from cdcpipe.pgoutput.messages import LogicalMessage, Origin, Relation
    from cdcpipe.plugins.base import Options, Query, Transaction
    from cdcpipe.plugins.row_compiler import Style

__all__ = ["ACTIONS", "Column", "Table", "Wal2Json", "lsn_text", "message_parts"]

log = logging.getLogger(__name__)

_INTEGERS: Final = type_ids_of("int2", "int4", "int8", "oid")
_REALS: Final = type_ids_of("float4", "float8", "numeric")
_STYLES: Final[Mapping[int, Style]] = {
    **dict.fromkeys(PLAIN_IDS, row_compiler.QUOTED),
    **dict.fromkeys(_INTEGERS, row_compiler.VERBATIM),
    **dict.fromkeys(_REALS, row_compiler.NUMBER),
    **dict.fromkeys(type_ids_of("bool"), row_compiler.BOOLEAN),
    **dict.fromkeys(type_ids_of("bytea"), row_compiler.HEX),
}
_NUMBERS: Final = frozenset({*_INTEGERS, *_REALS})


def _json_type(text: str) -> bytes:
    """Return the JSON for a type's name.

    The server's plugin writes a name that PostgreSQL quotes, ``"Qt"``, unchanged as JSON, so the name loses its quotes. If the name
    is not valid JSON (``"a""b"``, ``"My Schema".t``), the server's record is not JSON, either. Here it keeps all quotes.
    """
    if re.fullmatch(r'"[^"\\\x00-\x1f]*"', text):
        return text.encode()
    return json_string(text)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a relation, with everything that is the same for all of its values. Names, types and defaults are JSON."""

    number: int
    """The number of the column in the message's tuples, from 0."""
    name: bytes
    type: bytes
    type_id: int
    style: Style
    is_key: bool
    """Whether the stream marks the column as a part of the key. With REPLICA IDENTITY FULL, which marks all, it is False."""
    facts: ColumnFacts

    @property
    def default(self) -> bytes:
        return b"null" if self.facts.default is None else json_string(self.facts.default)

    @property
    def optional(self) -> bytes:
        return b"false" if self.facts.is_not_null else b"true"


@dataclass(frozen=True, slots=True)
class Table:
    """A relation, from one of its descriptions to the next."""

    relation_id: int
    schema: bytes
    name: bytes
    columns: Sequence[Column]
    is_selected: bool

    @property
    def primary_key(self) -> Sequence[Column]:
        return [column for column in self.columns if column.facts.is_primary_key]


_NO_FACTS: Final = ColumnFacts(0, False, None, False)
ACTIONS: Final = {"I": "insert", "U": "update", "D": "delete"}


class Wal2Json(TemplatePlugin[Table]):
    """The base of both format versions."""

    name = "wal2json"
    # The server's wal2json writes all logical messages that its options do not filter out.
    pgoutput_options: Mapping[str, str] = {"messages": "true"}

    def __init__(self, options: Options, query: Query) -> None:
        super().__init__(options, query)
        self._settings = parse_settings(options)
        if self._settings.filter_origins or self._settings.include_origin:
            self.needs_origin = "filter-origins" if self._settings.filter_origins else "include-origin"
        self._txn_part = [b""]
        """The facts about the transaction in each record of version 2. It is a list, because compiled rows use it."""
        self._names["txn_part"] = self._txn_part
        self._is_holding = False
        """Whether records wait for the end of their transaction (`Held`)."""
        self._keys: dict[int, Sequence[Column]] = {}
        """For each relation the columns that identify the row of an update without an old row."""

    def filter_by_origin(self, origin: Origin) -> bool:
        filtered = self._settings.filter_origins
        return bool(filtered) and self.catalog.origin_id(origin.name) in filtered

    def type_of(self, column: messages.Column) -> tuple[int, str]:
        """Return the type that determines how values are written, and the type name to print."""
        raise NotImplementedError

    def emit(self, table: Table) -> str:
        return Held.emit(len(table.columns)) if self._is_holding else super().emit(table)

    def emit_long(self, table: Table) -> str:
        return Held.emit_long(len(table.columns)) if self._is_holding else super().emit_long(table)

    def describe(self, relation: Relation) -> Table:
        is_selected = self._settings.selects(relation)
        facts: Mapping[str, ColumnFacts] = {}
        if is_selected and self._settings.needs_column_facts(relation):
            facts = self.catalog.columns(relation.relation_id, with_defaults=self._settings.include_default)
        columns = []
        for number, column in enumerate(relation.columns if is_selected else ()):
            type_id, type_name = self.type_of(column) if self._settings.include_types else (column.type_id, "")
            style = _STYLES.get(type_id, row_compiler.STRING)
            if self._settings.numeric_data_types_as_string and type_id in _NUMBERS:
                style = row_compiler.QUOTED
            fact = facts.get(column.name, _NO_FACTS._replace(position=number + 1))
            if relation.replica_identity == "d":
                fact = fact._replace(is_primary_key=column.is_key)
            elif self._settings.format_version == 1:
                # In version 1 the server's plugin knows only a primary key that is the replica identity.
                fact = fact._replace(is_primary_key=False)
            columns.append(
                Column(
                    number,
                    json_string(column.name),
                    _json_type(type_name),
                    type_id,
                    style,
                    column.is_key and relation.replica_identity != "f",
                    fact,
                )
            )
        self._keys.pop(relation.relation_id, None)
        return Table(relation.relation_id, json_string(relation.namespace), json_string(relation.name), columns, is_selected)

    def renders(self, table: Table, kind: str) -> bool:
        return table.is_selected and ACTIONS[kind] in self._settings.actions

    def old_columns(self, table: Table, first: str) -> Sequence[Column]:
        """Return the columns of the first tuple that identify the old row. Those that are absent from the tuple are among them."""
        return self._key(table) if first == "N" else table.columns

    def _key(self, table: Table) -> Sequence[Column]:
        """Return the key's columns. An update without an old row has not changed their values."""
        key = self._keys.get(table.relation_id)
        if key is None:
            key = [column for column in table.columns if column.is_key]
            if not key:
                key = self._key_of_partitions(table)
            self._keys[table.relation_id] = key
        return key

    def _key_of_partitions(self, table: Table) -> Sequence[Column]:
        """Return the columns that the keys of all partitions have. The stream has only the key of the root."""
        root = f"{table.schema.decode()}.{table.name.decode()}"
        names = {json_string(name) for name in self.catalog.partitions_key(table.relation_id, root)}
        key = [column for column in table.columns if column.name in names]
        if not key:
            log.warning("%s: its partitions have no key in common, so an update of a row may come without an identity", root)
        return key

    def _transaction_facts(self, txn: Transaction) -> list[tuple[bytes, bytes]]:
        """Return the requested facts about the transaction as names and JSON, without positions."""
        settings = self._settings
        facts = []
        if settings.include_xids:
            facts.append((b"xid", b"%d" % txn.xid))
        if settings.include_timestamp:
            facts.append((b"timestamp", b'"%b"' % format_timestamp(txn.commit_time_us)))
        if settings.include_origin:
            facts.append((b"origin", b"%d" % (self.catalog.origin_id(txn.origin.name) if txn.origin else 0)))
        return facts


def message_parts(message: LogicalMessage) -> tuple[bytes, bytes, bytes]:
    """Return, as JSON, whether it is transactional, the prefix, and the content up to the first NUL."""
    content = b'"' + escape(message.content.partition(b"\0")[0]) + b'"'
    return b"true" if message.is_transactional else b"false", json_string(message.prefix), content


def lsn_text(lsn: int) -> bytes:
    """Return an LSN as in the server's records."""
    return format_lsn(lsn).encode()
