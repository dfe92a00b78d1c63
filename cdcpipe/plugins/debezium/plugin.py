"""Debezium's change events (``--output debezium``), as its PostgreSQL connector writes them through the JSON converter.

The reference is Debezium 3.6 with the converter's ``schemas.enable=false``; ``tests/server/test_debezium.py`` compares the two.
There is one record for each event, without a key. docs/output-plugins.md has a numbered list of all differences.

- ``before``, ``after``: the rows; ``op``: c, u, d, t (truncate), and m for logical messages. An update that changes the key is
  a delete and a create, both with the update's position.
- With ``include.schema.changes`` a statement of DDL capture is a schema change event (schema_changes.py), and no ``m``. What is no
  statement, and no part of one, stays ``m``.
- ``source``: where the change comes from. ``lsn`` is the position of the change in the WAL. ``sequence`` has the end of the
  previous transaction (null at the start) and ``lsn``. ``ts_ms`` is the time of the commit.
- ``ts_ms`` outside of ``source``: the time at which cdcpipe began with the transaction.

There is no event for a commit. Instead the header of a transaction's last record has the end of the transaction, so that feedback
on it is exact. For this, each record waits for the next one. That is never long, because a transaction comes together with its
commit.

Three facts come from today's catalog: the key of a table with REPLICA IDENTITY FULL, the kind of a type that is not built in, and
the name of the database.
"""
# ruff: noqa: ARG002, D102 - the callbacks are those of OutputPlugin, and described there

from __future__ import annotations

import dataclasses
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cdcpipe.catalog_sql import key_numbers
from cdcpipe.ddl import message as ddl
from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.pgoutput.messages import UNCHANGED_TOAST, UNIX_2000_US, Delete, Insert, Update
from cdcpipe.plugins.catalog import NoCatalogError
from cdcpipe.plugins.debezium.schema_changes import schema_change
from cdcpipe.plugins.debezium.values import ValueOptions, Values
from cdcpipe.plugins.held import one_behind
from cdcpipe.plugins.row_compiler import Expression, Field, Same, fill, json_string
from cdcpipe.plugins.template_plugin import TemplatePlugin
from cdcpipe.plugins.text import invalid_value, parse_bool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cdcpipe.pgoutput.messages import LogicalMessage, Relation, Truncate
    from cdcpipe.plugins.base import Change, Handler, Options, OutputWriter, Query, Transaction
    from cdcpipe.plugins.debezium.values import Form
    from cdcpipe.plugins.row_compiler import Part, Template
    from cdcpipe.plugins.template_plugin import Absent

__all__ = ["Debezium"]

_VERSION: Final = b'"3.6.3.Final"'
_OPS: Final = {"I": b'"c"', "U": b'"u"', "D": b'"d"', "T": b'"t"'}

_MODES: Final[Mapping[str, Sequence[str]]] = {
    "decimal.handling.mode": ("precise", "string", "double"),
    "time.precision.mode": ("adaptive", "adaptive_time_microseconds", "connect", "isostring", "microseconds", "nanoseconds"),
    "interval.handling.mode": ("numeric", "string"),
    "binary.handling.mode": ("bytes", "base64", "base64-url-safe", "hex"),
    "hstore.handling.mode": ("json", "map"),
}
_OTHERS: Final = (
    "database.dbname",
    "include.schema.changes",
    "include.unknown.datatypes",
    "money.fraction.digits",
    "skipped.operations",
    "topic.prefix",
    "unavailable.value.placeholder",
)

# The connector's options that can have only these values, each with the reason.
_FIXED: Final[Mapping[str, tuple[Sequence[str], str]]] = {
    "schemas.enable": (("false",), "records have no schemas"),
    "tombstones.on.delete": (("false",), "records have no keys, so there is nothing that a tombstone could name"),
    "provide.transaction.metadata": (("false",), "the number of a transaction's events is not known before its end"),
    "snapshot.mode": (("no_data", "never"), "only changes are streamed"),
    "plugin.name": (("pgoutput",), "the slot's plugin is pgoutput"),
    "replace.null.with.default": (("false",), "NULL is written as null, whatever the column's default"),
}
_REFUSED: Final[Mapping[str, str]] = {
    "message.key.columns": "records have no keys",
    "publication.name": "the publication is named with --publication",
    "slot.name": "the slot is named with -S",
    "table.include.list": "a publication says which tables are streamed",
    "table.exclude.list": "a publication says which tables are streamed",
    "schema.include.list": "a publication says which tables are streamed",
    "schema.exclude.list": "a publication says which tables are streamed",
    "column.include.list": "a publication's column list says which columns are streamed",
    "column.exclude.list": "a publication's column list says which columns are streamed",
    "signal.data.collection": "there are no signals",
    "heartbeat.interval.ms": "cdcpipe confirms the position by itself while nothing is published",
}

# The parts of a record that are the same in a whole transaction. _set_transaction() makes them.
_SOURCE_BEFORE_LSN, _SOURCE_AFTER_LSN, _TXID, _AFTER_SOURCE, _NOW = (Expression(f"txn[{number}]") for number in range(5))
# The LSN is in a record twice, but formatted once.
_LSN, _LSN_AGAIN = Expression("(lsn := b'%d' % wal_start)"), Expression("lsn")


@dataclass(frozen=True, slots=True)
class _Table:
    name: bytes
    """The end of ``source``: the members ``schema`` and ``table``."""
    columns: Sequence[tuple[int, bytes, Form]]
    """Number, name and form of the columns that are written."""
    key: tuple[int, ...]
    """The columns of the key. An update that changes one of them becomes a delete and a create."""


class Debezium(TemplatePlugin[_Table]):
    """The output plugin ``debezium``."""

    name = "debezium"
    pgoutput_options: Mapping[str, str] = {"messages": "true"}

    def __init__(self, options: Options, query: Query) -> None:
        super().__init__(options, query)
        given = _parse(options)
        self._database = given.get("database.dbname")
        self._prefix = given.get("topic.prefix", "cdcpipe")
        self._skipped = _skipped(given.get("skipped.operations", "t"))
        self._has_schema_changes = parse_bool("include.schema.changes", given.get("include.schema.changes", "false"))
        names = {field.name: field.name.replace("_", ".") for field in dataclasses.fields(ValueOptions)}
        settings: dict[str, object] = {field: given[name] for field, name in names.items() if name in given}
        if "include_unknown_datatypes" in settings:
            settings["include_unknown_datatypes"] = parse_bool("include.unknown.datatypes", given["include.unknown.datatypes"])
        if "money_fraction_digits" in settings:
            settings["money_fraction_digits"] = _parse_digits(given["money.fraction.digits"])
        value_options = dataclasses.replace(ValueOptions(), **settings)  # type: ignore[arg-type]  # by name, from a dict of all kinds
        _check_placeholder(value_options)
        self._values = Values(value_options, self.catalog)
        self._last_commit: int | None = None
        self._last_time_us: int | None = None
        self._txn: list[bytes] = [b""] * 5
        self._emit = "put(wal_start, {record})"

    def startup(self, output: OutputWriter) -> None:
        super().startup(output)
        self._put, self._end = one_behind(output.write)
        # The compiled functions use this list. So only its items may change.
        self._names |= {"txn": self._txn, "put": self._put}
        self._source = b""

    def shutdown(self) -> None:
        self._end(None)

    def add(self, lsn: int, record: bytes) -> None:
        self._put(lsn, record)

    def describe(self, relation: Relation) -> _Table:
        columns = []
        for number, column in enumerate(relation.columns):
            form = self._values.form(column.type_id, column.type_modifier)
            if form is not None:
                columns.append((number, json_string(column.name), form))
        name = _name(relation.namespace, relation.name)
        flagged = tuple(number for number, column in enumerate(relation.columns) if column.is_key)
        return _Table(name, columns, self._key(relation) if relation.replica_identity == "f" else flagged)

    def _key(self, relation: Relation) -> tuple[int, ...]:
        """Return the columns of the key. With FULL the stream marks all columns, so the catalog is asked."""
        # Find the key as the connector does: the primary key, else the first unique index.
        sql = f"""
            select a.attname
            from (select i.indrelid, {key_numbers("i")} as columns
                  from pg_index i join pg_class c on c.oid = i.indexrelid
                  where i.indrelid = {relation.relation_id} and i.indisunique
                  order by i.indisprimary desc, c.relname limit 1) i
                 join pg_attribute a on a.attrelid = i.indrelid and a.attnum = any (i.columns)
        """
        try:
            names = {name for (name,) in self.query(sql)}
        except NoCatalogError:
            raise NoCatalogError(f"the key of {relation.namespace}.{relation.name}, which has REPLICA IDENTITY FULL,") from None
        return tuple(number for number, column in enumerate(relation.columns) if column.name in names)

    def relation(self, relation: Relation) -> Mapping[bytes, Callable[[], Handler]]:
        makers = super().relation(relation)
        if self.renders(self._tables[relation.relation_id], "U"):
            return makers
        # An update with an old row may change the key, which makes it a delete and a create: change() looks at each of them.
        return {head: maker for head, maker in makers.items() if head[:1] != b"U" or head[5:6] == b"N"}

    def renders(self, table: _Table, kind: str) -> bool:
        return _OPS[kind] not in self._skipped

    def template(self, table: _Table, kind: str, first: str, absent: Absent) -> Template:
        new_row = 0 if first == "N" else 1
        parts: list[Part] = [b'{"before":']
        if first == "N":
            parts.append(b"null")
        else:
            parts += _row(table, 0, absent, is_key=first == "K")
        parts.append(b',"after":')
        if kind == "D":
            parts.append(b"null")
        else:
            parts += _row(table, new_row, absent)
        if kind == "U" and first != "N":
            written = {number for number, _, _ in table.columns}
            parts.append(Same(tuple(number for number in table.key if number in written)))
        return [*parts, b",", *_after_rows(table.name, _OPS[kind])]

    def change(self, txn: Transaction, relation: Relation, change: Change, lsn: int) -> None:
        if not isinstance(change, Update):
            super().change(txn, relation, change, lsn)
            return
        old = change.old if change.key is None else change.key
        table = self._tables[relation.relation_id]
        if old is None:
            super().change(txn, relation, change, lsn)
            return
        # An unchanged TOAST value may be in the old row.
        new = tuple(
            before if value is UNCHANGED_TOAST and before is not None else value
            for before, value in zip(old, change.new, strict=True)
        )
        # The partition's key may lack a column of the root's: then NULL stands there, and tells nothing.
        if not any(old[column] is not None and old[column] != new[column] for column in table.key):
            super().change(txn, relation, dataclasses.replace(change, new=new), lsn)
        else:
            # skipped.operations says which events are skipped. These two are no "u".
            super().change(txn, relation, Delete(change.xid, change.relation_id, change.key, change.old), lsn)
            super().change(txn, relation, Insert(change.xid, change.relation_id, new), lsn)

    def truncate(self, txn: Transaction, relations: Sequence[Relation], change: Truncate, lsn: int) -> None:
        if _OPS["T"] in self._skipped:
            return
        for relation in relations:
            rows = b'{"before":null,"after":null,'
            template = [rows, *_after_rows(_name(relation.namespace, relation.name), _OPS["T"])]
            self.add(lsn, fill(template, [], self._names, lsn))

    def begin(self, txn: Transaction) -> None:
        self._last_time_us = txn.commit_time_us + UNIX_2000_US
        self._set_transaction(self._last_time_us, txn)

    def commit(self, txn: Transaction, commit_lsn: int, lsn: int) -> None:
        self._end(lsn)
        self._last_commit = lsn

    def message(self, txn: Transaction | None, message: LogicalMessage, lsn: int) -> None:
        now_ns = time.time_ns()
        if txn is not None and self._has_schema_changes and self._write_schema_change(message, lsn):
            return
        if txn is None:
            # The message has no commit time.
            self._last_commit = lsn
            self._set_transaction(now_ns // 1000 if self._last_time_us is None else self._last_time_us, None)
        content = self._values.binary(message.content)
        head = b'{"op":"m","ts_ms":%d,' % (now_ns // 1_000_000)
        tail = b',"message":{"prefix":%b,"content":%b}}' % (json_string(message.prefix), content)
        template = [head, *_source_parts(_name("", "")), b',"transaction":null', tail]
        record = fill(template, [], self._names, lsn)
        if txn is None:
            self.output.write(lsn, record)
        else:
            self.add(lsn, record)

    def _write_schema_change(self, message: LogicalMessage, lsn: int) -> bool:
        """Write the event for a statement. Return False if the message is neither a statement nor a part of one."""
        captured = ddl.parse(message.prefix, message.content)
        if captured is None:
            return False
        if not ddl.is_statement(captured):
            return captured["kind"] in ("rewrite", "drop")  # a part of a statement has no event, but a failure is none
        change = schema_change(captured, self._database or self._current_database())
        if change is None:
            return False
        head = [b"{", *_source_parts(_name(change.schema or "", change.table or ""))]
        tail = b',"ts_ms":%d,%b}' % (time.time_ns() // 1_000_000, change.members)
        self.add(lsn, fill([*head, tail], [], self._names, lsn))
        return True

    def _set_transaction(self, time_us: int, txn: Transaction | None) -> None:
        if not self._source:
            names = (_VERSION, json_string(self._prefix), json_string(self._database or self._current_database()))
            self._source = (
                b'"source":{"version":%b,"connector":"postgresql","name":%b,"ts_ms":%%d,"snapshot":"false","db":%b,'
                % tuple(name.replace(b"%", b"%%") for name in names)
            )
        last = b"null" if self._last_commit is None else b'\\"%d\\"' % self._last_commit
        origin = b'null,"origin_lsn":null'
        if txn is not None and txn.origin is not None:
            origin = b'%b,"origin_lsn":%d' % (json_string(txn.origin.name), txn.origin.lsn)
        now_ns = time.time_ns()
        self._txn[:] = [
            self._source % (time_us // 1000) + b'"sequence":"[%b,\\"' % last,
            b'\\"]","ts_us":%d,"ts_ns":%d000,' % (time_us, time_us),
            b',"txId":%b,"lsn":' % (b"null" if txn is None else b"%d" % txn.xid),
            b',"xmin":null,"origin":%b}' % origin,
            b',"ts_ms":%d,"ts_us":%d,"ts_ns":%d}' % (now_ns // 1_000_000, now_ns // 1000, now_ns),
        ]

    def _current_database(self) -> str:
        try:
            return self.query("select current_database()")[0][0] or ""
        except NoCatalogError:
            raise NoCatalogError("the name of the database (it may be given as -o database.dbname=NAME)") from None


def _name(schema: str, table: str) -> bytes:
    return b'"schema":%b,"table":%b' % (json_string(schema), json_string(table))


def _row(table: _Table, row: int, absent: Absent, *, is_key: bool = False) -> list[Part]:
    """Return the template of a row's object. A column that is absent is null in a key, else the placeholder."""
    parts: list[Part] = [b"{"]
    for number, name, form in table.columns:
        parts += [b"," if len(parts) > 1 else b"", name, b":"]
        if (row, number) in absent:
            parts.append(b"null" if is_key else form.unavailable)
        else:
            parts.append(Field(number, form.style, row))
    return [*parts, b"}"]


def _source_parts(name: bytes) -> list[Part]:
    return [_SOURCE_BEFORE_LSN, _LSN, _SOURCE_AFTER_LSN, name, _TXID, _LSN_AGAIN, _AFTER_SOURCE]


def _after_rows(name: bytes, op: bytes) -> list[Part]:
    return [*_source_parts(name), b',"transaction":null,"op":', op, _NOW]


# Options


def _parse(options: Options) -> dict[str, str]:
    """Return the options that matter. Raises InvalidArgumentsError for options that are not supported."""
    given = {}
    for name, value in options.items():
        if name in _REFUSED:
            raise InvalidArgumentsError(f"debezium's option {name!r} can't be honoured: {_REFUSED[name]}")
        if name in _FIXED:
            values, why = _FIXED[name]
            if value not in values:
                raise InvalidArgumentsError(f"debezium's option {name!r} can only be {' or '.join(values)}: {why}")
            continue
        if name not in _MODES and name not in _OTHERS:
            known = ", ".join(sorted([*_MODES, *_OTHERS]))
            raise InvalidArgumentsError(f"the output plugin debezium has no option {name!r}", hint=f"its options are: {known}")
        if value is None and name not in ("include.schema.changes", "include.unknown.datatypes"):
            raise InvalidArgumentsError(f"debezium's option {name!r} needs a value")
        value = "true" if value is None else value
        if name in _MODES and value.lower() not in _MODES[name]:
            msg = f"could not parse value {value!r} of debezium's option {name!r}"
            raise InvalidArgumentsError(msg, hint=f"it is one of {', '.join(_MODES[name])}")
        given[name] = value.lower() if name in _MODES else value
    # The connector's rule, because names of topics contain the prefix.
    if not re.fullmatch(r"[\w.-]+", given.get("topic.prefix", "cdcpipe"), re.ASCII):
        raise InvalidArgumentsError("debezium's option 'topic.prefix' has only letters, digits, underscores, hyphens and dots")
    return given


def _skipped(value: str) -> frozenset[bytes]:
    items = [item.strip() for item in value.split(",")]
    if items == ["none"]:
        return frozenset()
    if not {f'"{item}"'.encode() for item in items} <= set(_OPS.values()):
        hint = "it is a list of c, u, d and t, or none"
        raise InvalidArgumentsError(f"could not parse value {value!r} of debezium's option 'skipped.operations'", hint=hint)
    return frozenset(f'"{item}"'.encode() for item in items)


def _parse_digits(value: str) -> int:
    if not re.fullmatch(r"\d", value, re.ASCII):
        raise invalid_value("money.fraction.digits", value)
    return int(value)


def _check_placeholder(options: ValueOptions) -> None:
    try:
        options.placeholder  # noqa: B018 - raises ValueError if it can't be read
    except ValueError:
        raise invalid_value("unavailable.value.placeholder", options.unavailable_value_placeholder) from None
