"""wal2json 2.5's output from a pgoutput slot: the same bytes for the same WAL, format versions 1 and 2.

What can't be the same, and why, is on the numbered list in docs/output-plugins.md. Types are as the server prints them
with bytea_output=hex; so the plugin's records need a session with that setting, DateStyle ISO and TimeZone UTC.

Version 1 writes a transaction as one record (or, with ``write-in-chunks``, as one for each change), version 2 one for
each change and, with ``include-transaction``, for begin and commit. Version 2 with ``include-lsn`` puts the end of the
transaction into the record for its begin, which pgoutput tells only at the commit: the records of a transaction are held
until then, beyond a limit in a temporary file. Version 1 holds the transaction in memory, as the server does.
"""
# ruff: noqa: ARG002, D102 - the callbacks are those of OutputPlugin, and described there

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.lsn import format_lsn
from cdcpipe.plugins import row_compiler
from cdcpipe.plugins.catalog import ColumnFacts
from cdcpipe.plugins.held import Held
from cdcpipe.plugins.row_compiler import Expression, Field, escape, fill, json_string
from cdcpipe.plugins.template_plugin import TemplatePlugin
from cdcpipe.plugins.text import format_timestamp, invalid_value, parse_bool
from cdcpipe.types.pg_type import type_ids_of
from cdcpipe.types.table import PLAIN_IDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cdcpipe.pgoutput.messages import Column, LogicalMessage, Origin, Relation, Truncate
    from cdcpipe.plugins.base import Options, OutputPlugin, OutputWriter, Query, Transaction
    from cdcpipe.plugins.row_compiler import Part, Style, Template
    from cdcpipe.plugins.template_plugin import Absent

log = logging.getLogger(__name__)

__all__ = ["Wal2Json1", "Wal2Json2", "load"]


def load(options: Options, query: Query) -> OutputPlugin:
    """Return the plugin of the format version that the options ask for; 1 if they don't, as on the server."""
    version = _format_version(options)
    return (Wal2Json1 if version == 1 else Wal2Json2)(options, query)


# Options


@dataclass(frozen=True, slots=True)
class _TableName:
    """A table in a list; None stands for any."""

    schema: str | None
    name: str | None

    def matches(self, relation: Relation) -> bool:
        return self.schema in (None, relation.namespace) and self.name in (None, relation.name)


@dataclass(slots=True)
class _Settings:
    """The options, by their names with underscores; the defaults are the server's."""

    include_transaction: bool = True
    include_xids: bool = False
    include_timestamp: bool = False
    include_origin: bool = False
    include_schemas: bool = True
    include_types: bool = True
    include_type_oids: bool = False
    include_typmod: bool = True
    include_domain_data_type: bool = False
    include_column_positions: bool = False
    include_not_null: bool = False
    include_default: bool = False
    include_pk: bool = False
    include_lsn: bool = False
    pretty_print: bool = False
    write_in_chunks: bool = False
    numeric_data_types_as_string: bool = False
    actions: frozenset[str] = frozenset({"insert", "update", "delete", "truncate"})
    filter_origins: frozenset[int] = frozenset()
    filter_tables: Sequence[_TableName] = ()
    add_tables: Sequence[_TableName] = (_TableName(None, None),)
    filter_msg_prefixes: frozenset[str] = frozenset()
    add_msg_prefixes: frozenset[str] = frozenset()
    format_version: int = 1

    def selects(self, relation: Relation) -> bool:
        return any(table.matches(relation) for table in self.add_tables) and not any(
            table.matches(relation) for table in self.filter_tables
        )

    def selects_prefix(self, prefix: str) -> bool:
        return prefix not in self.filter_msg_prefixes and (not self.add_msg_prefixes or prefix in self.add_msg_prefixes)

    def needs_column_facts(self, relation: Relation) -> bool:
        """Return whether the catalog must be asked; what the key is with REPLICA IDENTITY DEFAULT, the stream says."""
        needs_key = self.include_pk and relation.replica_identity != "d" and self.format_version == 2
        return needs_key or self.include_not_null or self.include_default or self.include_column_positions


_REFUSED: Final = {
    "include-unchanged-toast": ("was removed from it", "leave it out: columns with an unchanged value are left out"),
    "partition-root": (
        "can't be honoured: which partition belongs to which table only the server knows",
        "leave it out, and ALTER PUBLICATION … SET (publish_via_partition_root = true)",
    ),
}
"""Options that wal2json had before 2.5, or after 2.6: what is to be said of them, and what to do."""


def _settings(options: Options) -> _Settings:
    settings = _Settings()
    for name, value in options.items():
        attribute = name.replace("-", "_")
        if name in _REFUSED:
            what, hint = _REFUSED[name]
            msg = f"wal2json's option {name!r} {what}"
            raise InvalidArgumentsError(msg, hint=hint)
        if attribute not in _Settings.__slots__ or "_" in name:
            msg = f"wal2json has no option {name!r}"
            known = ", ".join(sorted(slot.replace("_", "-") for slot in _Settings.__slots__))
            raise InvalidArgumentsError(msg, hint=f"its options are: {known}")
        setattr(settings, attribute, _parse_option(name, value, getattr(settings, attribute)))
    return settings


def _parse_option(name: str, value: str | None, default: object) -> object:
    if name == "format-version":
        return _format_version({name: value})
    if isinstance(default, bool):
        return value is None or parse_bool(name, value)
    if name in ("filter-tables", "add-tables"):
        return [] if value is None else _parse_tables(name, value)
    items = frozenset() if value is None else frozenset(_split(name, value))
    if name == "actions":
        unknown = items - {"insert", "update", "delete", "truncate"}
        if unknown:
            raise invalid_value(name, ",".join(sorted(unknown)))
        return default if value is None else items
    if name == "filter-origins":
        return frozenset(_parse_number(item) for item in items)
    return items


def _format_version(options: Options) -> int:
    if "format-version" not in options:
        return 1
    value = options["format-version"]
    if value is None:
        return 2
    if value.strip() not in ("1", "2"):
        raise invalid_value("format-version", value)
    return int(value)


def _parse_number(text: str) -> int:
    """Read the leading number, and 0 where there is none, as C's atoi() does."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0


_SPACE: Final = " \t\n\v\f\r"


def _split(name: str, value: str) -> list[str]:
    """Cut at commas, with white space around them; a backslash keeps the next character from being either of these."""
    value = value.lstrip(_SPACE)
    if not value:
        return []
    items = []
    pos = 0
    while True:
        match = re.compile(r"(?:\\.|[^,\\ \t\n\v\f\r])+", re.DOTALL).match(value, pos)
        if match is None:
            raise invalid_value(name, value)
        items.append(match[0])
        rest = value[match.end() :].lstrip(_SPACE)
        if not rest:
            return items
        if rest[0] != ",":
            raise invalid_value(name, value)
        pos = len(value) - len(rest[1:].lstrip(_SPACE))


def _parse_tables(name: str, value: str) -> list[_TableName]:
    tables = []
    for item in _split(name, value):
        match = re.fullmatch(r"((?:\\.|[^.\\])*)\.(.*)", item, re.DOTALL)
        if match is None:
            raise InvalidArgumentsError(
                f"could not parse value {value!r} of the wal2json option {name!r}",
                hint="tables are named schema.table, with * for any; a backslash goes before , . * and space in a name",
            )
        schema, table = match.groups()
        tables.append(
            _TableName(
                None if schema == "*" else _unescape(schema),
                None if table == "*" else _unescape(table),
            )
        )
    return tables


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)


# Values

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

    The server takes a name that PostgreSQL quotes, ``"Qt"``, for JSON as it is, so it loses its quotes. Where that is
    not JSON (``"a""b"``, ``"My Schema".t``), the server's record is not JSON either; ours keeps all quotes.
    """
    if re.fullmatch(r'"[^"\\\x00-\x1f]*"', text):
        return text.encode()
    return json_string(text)


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of a relation, with all that is the same for each of its values; names, types and defaults as JSON."""

    number: int
    """The place in the message's tuples, from 0."""
    name: bytes
    type: bytes
    type_id: int
    style: Style
    is_identity: bool
    facts: ColumnFacts

    @property
    def default(self) -> bytes:
        return b"null" if self.facts.default is None else json_string(self.facts.default)

    @property
    def optional(self) -> bytes:
        return b"false" if self.facts.is_not_null else b"true"


@dataclass(frozen=True, slots=True)
class _Table:
    """A relation as it is from its description to the next one."""

    schema: bytes
    name: bytes
    columns: Sequence[_Column]
    is_selected: bool

    @property
    def identity(self) -> Sequence[_Column]:
        return [column for column in self.columns if column.is_identity]

    @property
    def primary_key(self) -> Sequence[_Column]:
        return [column for column in self.columns if column.facts.is_primary_key]


_NO_FACTS: Final = ColumnFacts(0, False, None, False)
_ACTIONS: Final = {"I": "insert", "U": "update", "D": "delete"}


class _Wal2Json(TemplatePlugin[_Table]):
    """What both format versions have in common."""

    name = "wal2json"
    # The server's wal2json writes logical messages unless they are filtered.
    pgoutput_options: Mapping[str, str] = {"messages": "true"}

    def __init__(self, options: Options, query: Query) -> None:
        super().__init__(options, query)
        self._settings = _settings(options)
        self._txn_part = [b""]
        """What version 2 says about the transaction in each record; a list, because compiled rows look into it."""
        self._names["txn_part"] = self._txn_part

    def filter_by_origin(self, origin: Origin) -> bool:
        filtered = self._settings.filter_origins
        return bool(filtered) and self.catalog.origin_id(origin.name) in filtered

    def _type_of(self, column: Column) -> tuple[int, str]:
        """Return the type that decides how values look, and the name that is printed."""
        raise NotImplementedError

    def emit(self, table: _Table) -> str:
        return self._emit.replace("{limit}", str(Held.row_limit(len(table.columns))))

    def describe(self, relation: Relation) -> _Table:
        is_selected = self._settings.selects(relation)
        facts: Mapping[str, ColumnFacts] = {}
        if is_selected and self._settings.needs_column_facts(relation):
            facts = self.catalog.columns(relation.relation_id, with_defaults=self._settings.include_default)
        columns = []
        for number, column in enumerate(relation.columns if is_selected else ()):
            type_id, type_name = self._type_of(column) if self._settings.include_types else (column.type_id, "")
            style = _STYLES.get(type_id, row_compiler.STRING)
            if self._settings.numeric_data_types_as_string and type_id in _NUMBERS:
                style = row_compiler.QUOTED
            fact = facts.get(column.name, _NO_FACTS._replace(position=number + 1))
            if relation.replica_identity == "d":
                fact = fact._replace(is_primary_key=column.is_key)
            elif self._settings.format_version == 1:
                # The server's version 1 knows no primary key but the one that is the replica identity.
                fact = fact._replace(is_primary_key=False)
            columns.append(
                _Column(
                    number,
                    json_string(column.name),
                    _json_type(type_name),
                    type_id,
                    style,
                    column.is_key or relation.replica_identity == "f",
                    fact,
                )
            )
        table = _Table(json_string(relation.namespace), json_string(relation.name), columns, is_selected)
        if is_selected and not table.identity:
            log.info("%s.%s: no replica identity, updates and deletes are left out", relation.namespace, relation.name)
        return table

    def renders(self, table: _Table, kind: str) -> bool:
        """Return whether changes of this kind are written; those of a table without identity are not, as on the server."""
        return table.is_selected and _ACTIONS[kind] in self._settings.actions and (kind == "I" or bool(table.identity))

    def _transaction_facts(self, txn: Transaction) -> list[tuple[bytes, bytes]]:
        """Return what is asked for about the transaction: names and JSON, without the positions."""
        settings = self._settings
        facts = []
        if settings.include_xids:
            facts.append((b"xid", b"%d" % txn.xid))
        if settings.include_timestamp:
            facts.append((b"timestamp", b'"%b"' % format_timestamp(txn.commit_time_us)))
        if settings.include_origin:
            facts.append((b"origin", b"%d" % (self.catalog.origin_id(txn.origin.name) if txn.origin else 0)))
        return facts


def _message_parts(message: LogicalMessage) -> tuple[bytes, bytes, bytes]:
    """Return, as JSON, whether it is transactional, the prefix, and the content up to the first NUL."""
    content = b'"' + escape(message.content.partition(b"\0")[0]) + b'"'
    return b"true" if message.is_transactional else b"false", json_string(message.prefix), content


# Version 2

_TXN_PART: Final = Expression("txn_part[0]")


class Wal2Json2(_Wal2Json):
    """Format version 2: a record for each change."""

    def startup(self, output: OutputWriter) -> None:
        super().startup(output)
        self._held: Held | None = None
        if self._settings.include_lsn and self._settings.include_transaction:
            self._held = Held(may_spill=True)
            self._emit = Held.EMIT
            self._names |= self._held.names

    def shutdown(self) -> None:
        if self._held is not None:
            self._held.clear()

    def begin(self, txn: Transaction) -> None:
        self._txn_part[0] = b"".join(b',"%b":%b' % fact for fact in self._transaction_facts(txn))
        if self._settings.include_transaction and self._held is None:
            self.output.write(txn.first_lsn, b'{"action":"B"%b}' % self._txn_part[0])

    def commit(self, txn: Transaction, commit_lsn: int, lsn: int) -> None:
        if not self._settings.include_transaction:
            return
        head = self._txn_part[0]
        if self._held is not None:
            head += b',"lsn":"%b","nextlsn":"%b"' % (_lsn(commit_lsn), _lsn(txn.end_lsn))
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
            txn_part += b',"lsn":"%b"' % _lsn(message.lsn)
        record = b'{"action":"M"%b,"transactional":%b,"prefix":%b,"content":%b}'
        if txn is None:
            self.output.write(lsn, record % (txn_part, *_message_parts(message)))
        else:
            self.add(lsn, record % (txn_part, *_message_parts(message)))

    def add(self, lsn: int, record: bytes) -> None:
        if self._held is None:
            self.output.write(lsn, record)
        else:
            self._held.add(lsn, record)

    def _type_of(self, column: Column) -> tuple[int, str]:
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

    def _table_name(self, table: _Table) -> list[bytes]:
        schema = [b',"schema":', table.schema] if self._settings.include_schemas else []
        return [*schema, b',"table":', table.name]

    def template(self, table: _Table, kind: str, first: str, absent: Absent) -> Template:
        template = [*self._head(kind), *self._table_name(table)]
        old_row = 0
        new_row = 0 if first == "N" else 1
        if kind != "D":
            template += [b',"columns":[', *self._objects(table.columns, new_row, absent, is_new=True), b"]"]
        if kind != "I":
            template += [b',"identity":[', *self._objects(table.identity, old_row, absent, is_new=False), b"]"]
        if self._settings.include_pk:
            columns = [column for column in table.primary_key if (old_row, column.number) not in absent]
            objects = b",".join(b"{%b}" % self._description(column) for column in columns)
            template += [b',"pk":[', objects, b"]"]
        return [*template, b"}"]

    def _description(self, column: _Column) -> bytes:
        parts = [b'"name":%b' % column.name]
        if self._settings.include_types:
            parts.append(b'"type":%b' % column.type)
        if self._settings.include_type_oids:
            # The server prints it as a signed number.
            signed = column.type_id - (1 << 32) if column.type_id >= 1 << 31 else column.type_id
            parts.append(b'"typeoid":%d' % signed)
        return b",".join(parts)

    def _objects(self, columns: Sequence[_Column], row: int, absent: Absent, *, is_new: bool) -> list[Part]:
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


def _lsn(lsn: int) -> bytes:
    return format_lsn(lsn).encode()


# Version 1


class Wal2Json1(_Wal2Json):
    """Format version 1: a record for each transaction, in which each change has lists of names, types and values."""

    leaves_out_null_in_old = True

    def startup(self, output: OutputWriter) -> None:
        super().startup(output)
        is_pretty = self._settings.pretty_print
        self._tab, self._newline, self._space = (b"\t", b"\n", b" ") if is_pretty else (b"", b"", b"")
        self._held = Held(may_spill=self._settings.write_in_chunks)
        self._emit = Held.EMIT
        self._names |= self._held.names

    def shutdown(self) -> None:
        self._held.clear()

    def commit(self, txn: Transaction, commit_lsn: int, lsn: int) -> None:
        tab, newline, space = self._tab, self._newline, self._space
        facts = self._transaction_facts(txn)
        if self._settings.include_lsn:
            facts.insert(1 if self._settings.include_xids else 0, (b"nextlsn", b'"%b"' % _lsn(txn.end_lsn)))
        lines = [b'%b"%b":%b%b,%b' % (tab, name, space, value, newline) for name, value in facts]
        head = b'{%b%b%b"change":%b[' % (newline, b"".join(lines), tab, space)
        tail = b"%b]%b}" % (tab, newline)
        if self._settings.write_in_chunks:
            self.output.write(txn.first_lsn, head)
            for number, (held_lsn, record) in enumerate(self._held):
                self.output.write(held_lsn, tab + tab + (b"," if number else b"") + record)
            self.output.write(lsn, tail)
        else:
            before = newline + tab + tab
            changes = (before + b",").join(record for _, record in self._held)
            # The server's plugin gives the record its first change's position: feedback on that brings the transaction again.
            # With the end of the transaction, which is what a record of all of it stands for, feedback is exact.
            self.output.write(lsn, head + (before + changes if changes else b"") + newline + tail)
        self._held.clear()

    def message(self, txn: Transaction | None, message: LogicalMessage, lsn: int) -> None:
        if not self._settings.selects_prefix(message.prefix):
            return
        tab, newline, space = self._tab, self._newline, self._space
        names = (b"transactional", b"prefix", b"content")
        items = [(b"kind", b'"message"'), *zip(names, _message_parts(message), strict=True)]
        lines = (b",%b" % newline).join(b'%b"%b":%b%b' % (3 * tab, name, space, value) for name, value in items)
        record = b"{%b%b%b%b}" % (newline, lines, newline, 2 * tab)
        if txn is None:
            head = b'{%b%b"change":%b[%b%b' % (newline, tab, space, newline, 2 * tab)
            self.output.write(lsn, b"%b%b%b%b]%b}" % (head, record, newline, tab, newline))
        else:
            self._held.add(lsn, record)

    def add(self, lsn: int, record: bytes) -> None:
        self._held.add(lsn, record)

    def _type_of(self, column: Column) -> tuple[int, str]:
        type_id, typmod = column.type_id, column.type_modifier
        if self._settings.include_domain_data_type:
            facts = self.catalog.type(type_id)
            if facts.base_type:
                type_id, typmod = facts.base_type, facts.base_typmod
        if self._settings.include_typmod:
            return type_id, self.catalog.format_type(type_id, typmod)
        return type_id, self.catalog.type(type_id).name

    def template(self, table: _Table, kind: str, first: str, absent: Absent) -> Template:
        tab, newline = self._tab, self._newline
        old_row = 0
        new_row = 0 if first == "N" else 1
        has_pk = self._settings.include_pk and bool(table.primary_key)
        members: list[Template] = [[self._member(3, b"kind", b'"%b"' % _ACTIONS[kind].encode())]]
        if self._settings.include_schemas:
            members.append([self._member(3, b"schema", table.schema)])
        members.append([self._member(3, b"table", table.name)])
        if kind != "D":
            members += self._lists(b"column", table.columns, new_row, absent)
        if has_pk:
            members.append(self._object(b"pk", self._primary_key(table)))
        if kind == "U":
            # Of an old row that was sent, all that is not NULL is taken to be its key.
            columns = table.columns if first != "N" and absent else table.identity
            members.append(self._object(b"oldkeys", self._lists(b"key", columns, old_row, absent)))
        elif kind == "D":
            members.append(self._object(b"oldkeys", self._lists(b"key", table.identity, old_row, absent)))
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

    def _primary_key(self, table: _Table) -> Sequence[Template]:
        columns = table.primary_key
        types = [column.type for column in columns] if self._settings.include_types else []
        return [
            self._list(4, b"pknames", [column.name for column in columns]),
            self._list(4, b"pktypes", types),
        ]

    def _lists(self, what: bytes, columns: Sequence[_Column], row: int, absent: Absent) -> Sequence[Template]:
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
        values = [Field(column.number, column.style, row, is_required=not is_new) for column in columns]
        lists.append((b"values", values))
        return [self._list(depth, what + name, items) for name, items in lists]
