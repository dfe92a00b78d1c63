"""Checksums of tables, all in one snapshot, computed by the server: its half of comparing a table with a copy of it.

A row is its columns' texts, as the types' output functions write them under the pinned settings, which are the texts that
logical decoding sends. As bytes: each text in UTF-8, or for NULL the byte FF, and then the byte 00; neither byte is in any
text. A ``real`` or a ``double precision`` is the hexadecimal digits of its IEEE 754 bits instead (7ff8… for every NaN), because
the shortest decimal digits are spelled differently by everybody; so it is in an array of one dimension that begins at index
1, which is else as array_out writes it. A row's checksum is the number that the first 15
hexadecimal digits of the MD5 of these bytes make; a table's is the sum over its rows, whatever their order. A row is in the bucket
that the first 3 digits of the MD5 of its key's bytes name, so that what differs can be found without sending the table.

Whoever has numbers without their scale asks for ``trim_numbers``: the texts of numeric and numeric[] end with no zero behind
the point then.

What a publication does not send is not counted: rows beyond its row filter, columns beyond its column list, generated columns.

The snapshot is a REPEATABLE READ transaction's, taken when the tables are locked against ALTER and TRUNCATE (ACCESS SHARE):
those would show through it. `Snapshot` tells by transaction ids what it sees: the order in which transactions become
visible is not that of their commits in the WAL, so no LSN could.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from cdcpipe import catalog_sql
from cdcpipe.errors import InitError, InvalidArgumentsError
from cdcpipe.libpq.connection import Connection
from cdcpipe.libpq.waiting import NO_LIMIT
from cdcpipe.lsn import LSN
from cdcpipe.replication import table_locks
from cdcpipe.replication.commands import publication_names
from cdcpipe.replication.server import current_lsn
from cdcpipe.replication.slots import check_usable, find_slot, missing_slot_error
from cdcpipe.sql import TRIM_NUMBERS, quote_identifier, quote_literal, reading_rows
from cdcpipe.types.table import ARRAYS, NUMERIC_IDS, OUTPUT, TYPES, UNKNOWN

__all__ = ["Checksums", "ServerTable", "SlotState", "Snapshot"]

_BUCKET_DIGITS = 3
_SUM_DIGITS = 15  # 60 bits: positive as a bigint, and PostgreSQL adds bigints up in 128 bits

_BEGINNING_AND_END = (ord("B"), ord("C"))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Which transactions are seen: those below ``xmax`` but for ``running``, of those that committed. 64-bit ids.

    Everything that is seen is in the WAL before ``wal_lsn``.
    """

    xmax: int
    running: tuple[int, ...]
    wal_lsn: LSN


@dataclass(frozen=True, slots=True)
class ServerTable:
    """A table as it is in the snapshot, with the columns and rows that are published."""

    schema: str
    name: str
    relation_id: int
    columns: tuple[tuple[str, int, int], ...]
    """Name, type's OID, type modifier."""
    row_estimate: int
    source: str
    """The FROM clause, with a WHERE if there is a row filter."""
    trim_numbers: bool = False
    """Whether 1.50 is to be taken for 1.5."""
    published_as: tuple[str, str] | None = None
    """The partitioned table as whose rows this one's are published, for a partition that is not published as itself."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """How far a slot's consumer is; ``is_pending``: nobody uses the slot, and there are changes that nobody has taken."""

    active: bool
    confirmed_flush_lsn: LSN
    is_pending: bool


class Checksums:
    """One ordinary connection; ``begin`` starts the snapshot, or a new one, the rest looks at it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # While we wait for a lock, everybody who comes later waits for us.
        connection.pin_session(reading_rows(connection.server_version) | {"lock_timeout": table_locks.LOCK_TIMEOUT})
        if connection.execute("SELECT pg_is_in_recovery()") == [("t",)]:
            raise InitError(
                "the server is a standby: its snapshots do not say which transactions they see", hint="connect to the primary"
            )

    def system(self) -> tuple[str, str]:
        """Return the system identifier and the database's name."""
        return self._connection.execute("SELECT system_identifier FROM pg_control_system()")[0][0] or "", self._connection.database

    def begin(
        self, tables: Collection[tuple[str, str]], publications: Sequence[str], *, trim_numbers: bool = False
    ) -> tuple[Snapshot, list[ServerTable]]:
        """Lock those of the tables that there are, take a snapshot, and return it and them."""
        execute = self._connection.execute
        execute("ROLLBACK")
        self._connection.notices.clear()
        wanted = ", ".join(f"({quote_literal(schema)}, {quote_literal(name)})" for schema, name in tables)
        condition = f"c.relkind IN ('r', 'p') AND (n.nspname, c.relname) IN ({wanted})" if wanted else "false"
        source = f"FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE {condition}"
        there = execute(f"SELECT n.nspname, c.relname {source} ORDER BY 1, 2")
        execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if there:
            # The snapshot is that of the first query: here there is none yet.
            with table_locks.naming_locks(self._connection, tables):
                execute(f"LOCK TABLE {', '.join(_qualified(schema, name) for schema, name in there)} IN ACCESS SHARE MODE")
        xmax, running = execute(
            "SELECT pg_snapshot_xmax(s), (SELECT json_agg(x) FROM pg_snapshot_xip(s) AS x) FROM pg_current_snapshot() AS s"
        )[0]
        ids = json.loads(running) if running else []
        snapshot = Snapshot(int(xmax or 0), tuple(map(int, ids)), current_lsn(self._connection))
        rows = execute(
            "SELECT n.nspname, c.relname, c.oid, c.relkind, greatest(c.reltuples, 0)::bigint, (SELECT json_agg(json_build_array("
            "a.attname, a.atttypid::bigint, a.atttypmod, a.attgenerated) ORDER BY a.attnum) FROM pg_attribute a"
            " WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),"
            " (SELECT json_agg(json_build_array(rn.nspname, r.relname) ORDER BY up.level)"
            "  FROM pg_partition_ancestors(c.oid) WITH ORDINALITY AS up (relid, level)"
            "  JOIN pg_class r ON r.oid = up.relid JOIN pg_namespace rn ON rn.oid = r.relnamespace)"
            f" {source} ORDER BY 1, 2"
        )
        published = self._published(publications)
        found = []
        for *facts, ancestors in rows:
            name = facts[0] or "", facts[1] or ""
            table = _server_table(facts, published.get(name))
            above = [ancestor for ancestor in map(tuple, json.loads(ancestors or "[]")) if ancestor in published]
            root = above[-1] if above and name not in published else None
            found.append(replace(table, trim_numbers=trim_numbers, published_as=root))
        return snapshot, found

    def _published(self, publications: Sequence[str]) -> dict[tuple[str, str], tuple[set[str], list[str] | None]]:
        """Return the columns of each table that are published, and its row filters, None if there is one without."""
        if not publications:
            return {}
        rows = self._connection.execute(
            "SELECT n.nspname, c.relname, (SELECT json_agg(a.attname) FROM pg_attribute a"
            "   WHERE a.attrelid = c.oid AND a.attnum = ANY (p.numbers)), to_json(p.filters)"
            f" FROM {catalog_sql.published(publications, self._connection.server_version, filters=True)} AS p"
            " JOIN pg_class c ON c.oid = p.relation_id JOIN pg_namespace n ON n.oid = c.relnamespace"
        )
        return {
            (schema or "", name or ""): (set(json.loads(columns or "[]")), json.loads(filters) if filters else None)
            for schema, name, columns, filters in rows
        }

    def buckets(self, table: ServerTable, key: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Return the number of rows and the sum of their checksums for each bucket that has any."""
        rows = self._connection.execute(
            f"SELECT {_bucket(table, key)}, count(*), sum(('x' || substr({_row_md5(table)}, 1, {_SUM_DIGITS}))::bit(60)::bigint)"
            f" FROM {table.source} GROUP BY 1",
            timeout_s=NO_LIMIT,
        )
        return {bucket or "": (int(count or 0), int(total or 0)) for bucket, count, total in rows}

    def rows(self, table: ServerTable, key: Sequence[str], buckets: Collection[str]) -> list[tuple[str | None, ...]]:
        """Return the key, as texts, and the MD5 of each row in the buckets."""
        keys = ", ".join(_text(table, name, type_id) for name, type_id, _ in _key_columns(table, key))
        return self._connection.execute(
            f"SELECT {keys}, {_row_md5(table)} FROM (SELECT * FROM {table.source}) AS t"
            f" WHERE {_bucket(table, key)} IN ({', '.join(map(quote_literal, buckets))})",
            timeout_s=NO_LIMIT,
        )


def find_slot_state(connection: Connection, slot: str, publications: Sequence[str], upto: LSN) -> SlotState:
    """Look how far the slot's consumer is; if it has none, also whether it would get something before ``upto``."""
    found = find_slot(connection, slot)
    if found is None:
        raise missing_slot_error(slot)
    check_usable(connection, found)
    confirmed = found.confirmed_flush_lsn or LSN(0)
    if found.active or confirmed >= upto:
        return SlotState(found.active, confirmed, is_pending=False)
    # Before 15 a transaction that changes nothing that is published comes as a beginning and an end.
    rows = connection.execute(
        "SELECT get_byte(data, 0) FROM pg_logical_slot_peek_binary_changes("
        f"{quote_literal(slot)}, {quote_literal(str(upto))}, 1000, 'proto_version', '1',"
        f" 'publication_names', {quote_literal(publication_names(publications))})",
        timeout_s=NO_LIMIT,
    )
    # So many that not all could be looked at are changes as well, or else no harm: somebody has to take them.
    is_pending = len(rows) >= 1000 or any(int(kind or 0) not in _BEGINNING_AND_END for (kind,) in rows)
    return SlotState(active=False, confirmed_flush_lsn=confirmed, is_pending=is_pending)


def _server_table(row: Sequence[str | None], published: tuple[set[str], list[str] | None] | None) -> ServerTable:
    schema, name, relation_id, kind, estimate, columns = row
    found = json.loads(columns or "[]")
    source = f"{'ONLY ' if kind == 'r' else ''}{_qualified(schema, name)}"
    if published is None:
        chosen = [column for column in found if not column[3]]
    else:
        chosen = [column for column in found if column[0] in published[0]]
        if published[1]:
            source += f" WHERE {' OR '.join(f'({row_filter})' for row_filter in published[1])}"
    return ServerTable(
        schema=schema or "",
        name=name or "",
        relation_id=int(relation_id or 0),
        columns=tuple((str(column[0]), int(column[1]), int(column[2])) for column in chosen),
        row_estimate=int(estimate or 0),
        source=source,
    )


def _qualified(schema: str | None, name: str | None) -> str:
    return f"{quote_identifier(schema or '')}.{quote_identifier(name or '')}"


def _text(table: ServerTable, name: str, type_id: int) -> str:
    """Return the expression for a column's text, NULL where the value is."""
    column = quote_identifier(name)
    text = TYPES.get(type_id, UNKNOWN).canonical.format(column)
    element = TYPES.get(ARRAYS.get(type_id, 0), UNKNOWN).canonical
    if element != OUTPUT:
        is_list = f"array_ndims({column}) = 1 AND array_lower({column}, 1) = 1"
        each = f"coalesce({element.format('u.e')}, 'NULL')"
        elements = f"SELECT string_agg({each}, ',' ORDER BY u.n) FROM unnest({column}) WITH ORDINALITY AS u(e, n)"
        return f"CASE WHEN {is_list} THEN concat('{{', ({elements}), '}}') ELSE {text} END"
    if table.trim_numbers and type_id in NUMERIC_IDS:
        for pattern, replacement in TRIM_NUMBERS:
            text = f"regexp_replace({text}, {quote_literal(pattern)}, {quote_literal(replacement)}, 'g')"
    return text


def _md5(table: ServerTable, columns: Sequence[tuple[str, int, int]]) -> str:
    texts = [_text(table, name, type_id) for name, type_id, _ in columns]
    parts = [f"coalesce(convert_to({text}, 'UTF8'), '\\xff'::bytea) || '\\x00'::bytea" for text in texts]
    return f"md5({' || '.join(parts)})"


def _row_md5(table: ServerTable) -> str:
    return _md5(table, table.columns)


def _bucket(table: ServerTable, key: Sequence[str]) -> str:
    return f"substr({_md5(table, _key_columns(table, key))}, 1, {_BUCKET_DIGITS})"


def _key_columns(table: ServerTable, key: Sequence[str]) -> list[tuple[str, int, int]]:
    columns = {column[0]: column for column in table.columns}
    missing = [name for name in key if name not in columns]
    if missing or not key:
        msg = f"table {table.schema}.{table.name} has no published column {', '.join(map(repr, missing)) or 'as its key'}"
        raise InvalidArgumentsError(msg)
    return [columns[name] for name in key]
