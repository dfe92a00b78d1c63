"""Computes checksums of tables on the server, all in one snapshot. This is the server's half of comparing a table with a copy.

The checksums are defined as follows:

- A value's text is the output of its type's output function under the pinned settings. Logical decoding sends the same text.
- A ``real`` or a ``double precision`` is an exception: its text is the hexadecimal digits of its IEEE 754 bits (7ff8… for every
  NaN), because programs differ in how they write the shortest decimal digits. The same applies to the elements of an array of one
  dimension that begins at index 1; the rest of the array's text is as array_out writes it.
- A row's bytes are, for each column, the text in UTF-8 (the byte FF for NULL) and then the byte 00. No text contains these bytes.
- A row's checksum is the first 15 hexadecimal digits of the MD5 of its bytes, as a number.
- A table's checksum is the sum over its rows, so their order does not matter.
- A row's bucket is the first 3 hexadecimal digits of the MD5 of its key's bytes. With buckets, a program can find the differing
  rows without transferring the table. The first 6 digits are its part of the bucket: of a large table a bucket has very many rows.

With ``trim_numbers``, the texts of numeric and numeric[] have no trailing zeros after the decimal point. It is for a copy that does
not keep the scale of its numbers.

The checksums leave out what a publication does not send: rows that its row filter excludes, columns that are not in its column
list, and generated columns.

A copy may mask columns (cdcpipe/masks.py). A hashed column counts with its hash, which the server computes: the statement has two
texts from which everybody can compute hashes with this key. A column that is masked otherwise is left out.

The snapshot is that of a REPEATABLE READ transaction. It is taken after the tables are locked (ACCESS SHARE) against ALTER and
TRUNCATE, because their effects are visible in older snapshots. `Snapshot` describes by transaction ids what it sees. An LSN can't
describe it, because transactions do not become visible in the order of their commits in the WAL.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from cdcpipe import catalog_sql, sqlstate
from cdcpipe.errors import CommandError, InitError, ServerError
from cdcpipe.libpq.connection import Connection
from cdcpipe.libpq.waiting import NO_LIMIT
from cdcpipe.lsn import LSN
from cdcpipe.masks import HASH, NO_MASKS, Masks
from cdcpipe.replication import table_locks
from cdcpipe.replication.commands import publication_names
from cdcpipe.replication.publications import check_existing
from cdcpipe.replication.server import current_lsn, is_standby
from cdcpipe.replication.slots import as_login_role, check_usable, find_slot, missing_slot_error
from cdcpipe.replication.tables import PublishedTable, published_tables
from cdcpipe.sql import (
    BUCKET_DIGITS,
    PART_DIGITS,
    SUM_DIGITS,
    TRIM_NUMBERS,
    quote_identifier,
    quote_literal,
    quote_table,
    reading_rows,
)
from cdcpipe.types.pg_type import type_ids_of
from cdcpipe.types.table import ARRAYS, NUMERIC_IDS, OUTPUT, TYPES, UNKNOWN
from cdcpipe.units import few

__all__ = ["Checksums", "ServerTable", "SlotState", "Snapshot"]

[_TEXT_ID] = type_ids_of("text")
_BLOCK_BYTES = 64

_BEGIN, _COMMIT = ord("B"), ord("C")
_LOOK_MS = 10_000
"""How long the server may look for changes in a slot. A consumer that starts meanwhile has to wait."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The transactions that the snapshot sees: all that committed, have an id below ``xmax``, and are not in ``running``.

    The ids have 64 bits. Everything that the snapshot sees lies before ``wal_lsn`` in the WAL.
    """

    xmax: int
    running: tuple[int, ...]
    wal_lsn: LSN


@dataclass(frozen=True, slots=True)
class ServerTable:
    """A table as it is in the snapshot: its published columns and rows."""

    schema: str
    name: str
    relation_id: int
    columns: tuple[tuple[str, int, int], ...]
    """The name, the type's OID and the type modifier of each column."""
    row_estimate: int
    source: str
    """The FROM clause, with a WHERE if there is a row filter."""
    trim_numbers: bool = False
    """Whether 1.50 counts as equal to 1.5."""
    hashed: frozenset[str] = frozenset()
    """The columns whose text is masked with its hash. As columns they are texts."""
    left_out: tuple[str, ...] = ()
    """The columns that are masked otherwise. They are not among ``columns``."""
    masks: Masks = NO_MASKS
    """With the key of the hashes."""
    published_as: tuple[str, str] | None = None
    """For a partition whose rows are published as rows of a partitioned table: the schema and name of that table."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """How far a slot's consumer is, and whether a connection uses the slot."""

    active: bool
    confirmed_flush_lsn: LSN


class Checksums:
    """Answers questions on one ordinary connection. ``begin`` takes a new snapshot; the other methods read from it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        connection.reads_rows = True
        # While we wait for a lock, later requests for the same table wait behind ours.
        connection.pin_session(reading_rows(connection.server_version) | {"lock_timeout": table_locks.LOCK_TIMEOUT})
        if is_standby(connection):
            raise InitError(
                "the server is a standby: its snapshots do not say which transactions they see", hint="connect to the primary"
            )

    def system(self) -> tuple[str, str]:
        """Return the system identifier and the database's name."""
        return self._connection.execute("SELECT system_identifier FROM pg_control_system()")[0][0] or "", self._connection.database

    def begin(
        self,
        tables: Collection[tuple[str, str]],
        publications: Sequence[str],
        *,
        trim_numbers: bool = False,
        masks: Masks = NO_MASKS,
    ) -> tuple[Snapshot, list[ServerTable]]:
        """Lock the tables that exist, and take a snapshot. Return the snapshot and these tables, masked as the copy is.

        Raises InitError for more tables than one session may lock (`needed_locks`), and for a publication that does not exist:
        without it nobody knows what the copy has. Without tables, the publications do not matter: such a request asks which server
        answers. ``masks`` have their key (`Masks.with_key`).
        """
        execute = self._connection.execute
        execute("ROLLBACK")
        if tables:
            check_existing(self._connection, publications)
        self._connection.notices.clear()
        condition = f"c.relkind IN ('r', 'p') AND (n.nspname, c.relname) IN ({table_locks.pairs(tables)})" if tables else "false"
        source = f"FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE {condition}"
        there = execute(f"SELECT n.nspname, c.relname {source} ORDER BY 1, 2")
        table_locks.check_room(self._connection, tables)
        execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if there:
            # The first query takes the snapshot. Here no query has run yet.
            with table_locks.naming_locks(self._connection, tables):
                names = ", ".join(quote_table(schema or "", name or "") for schema, name in there)
                execute(f"LOCK TABLE {names} IN ACCESS SHARE MODE")
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
            table = _masked(table, masks)
            found.append(replace(table, trim_numbers=trim_numbers, published_as=root))
        return snapshot, found

    def needed_locks(self, tables: Collection[tuple[str, str]]) -> tuple[int, dict[tuple[str, str], int]]:
        """Return how many locks the tables of one `begin` may take, and how many each of these tables takes, if it exists."""
        return table_locks.most_locks(self._connection), table_locks.needed_locks(self._connection, tables)

    def _published(self, publications: Sequence[str]) -> dict[tuple[str, str], tuple[set[str], list[str] | None]]:
        """Return for each table its published columns and its row filters (None if one publication has no filter for it)."""
        if not publications:
            return {}
        rows = self._connection.execute(
            "SELECT n.nspname, c.relname, (SELECT json_agg(a.attname) FROM pg_attribute a"
            "   WHERE a.attrelid = c.oid AND a.attnum = ANY (p.numbers)), to_json(p.filters)"
            f" FROM {catalog_sql.published(publications, self._connection.server_version, filters=catalog_sql.TEXTS)} AS p"
            " JOIN pg_class c ON c.oid = p.relation_id JOIN pg_namespace n ON n.oid = c.relnamespace"
        )
        return {
            (schema or "", name or ""): (set(json.loads(columns or "[]")), json.loads(filters) if filters else None)
            for schema, name, columns, filters in rows
        }

    def published_tables(self, publications: Sequence[str]) -> list[PublishedTable]:
        """Return the tables of the publications, by name. Raises InitError for a publication that does not exist."""
        check_existing(self._connection, publications)
        return published_tables(self._connection, publications)

    def buckets(self, table: ServerTable, key: Sequence[str], within: Collection[str] = ()) -> dict[str, tuple[int, int]]:
        """Return the number of rows and the sum of their checksums for each bucket that has rows.

        If ``within`` names buckets, return the same for each part of these buckets.
        """
        source, digits = table.source, BUCKET_DIGITS
        if within:
            source, digits = _rows_in(table, key, within), BUCKET_DIGITS + PART_DIGITS
        rows = self._connection.execute(
            f"SELECT {_bucket(table, key, digits)}, count(*),"
            f" sum(('x' || substr({_row_md5(table)}, 1, {SUM_DIGITS}))::bit(60)::bigint)"
            f" FROM {source} GROUP BY 1",
            timeout_s=NO_LIMIT,
        )
        return {bucket or "": (int(count or 0), int(total or 0)) for bucket, count, total in rows}

    def rows(self, table: ServerTable, key: Sequence[str], buckets: Collection[str]) -> list[tuple[str | None, ...]]:
        """Return for each row in the buckets its key, as texts, and its MD5. Instead of buckets these may be parts of buckets."""
        keys = ", ".join(_text(table, name, type_id) for name, type_id, _ in _key_columns(table, key))
        return self._connection.execute(
            f"SELECT {keys}, {_row_md5(table)} FROM {_rows_in(table, key, buckets)}",
            timeout_s=NO_LIMIT,
        )


def find_slot_state(connection: Connection, slot: str) -> SlotState:
    """Return how far the slot's consumer is. Raises InitError or SlotDoesNotExistError for a slot that can't be streamed from."""
    found = find_slot(connection, slot)
    if found is None:
        raise missing_slot_error(slot)
    check_usable(connection, found)
    return SlotState(found.active, found.confirmed_flush_lsn or LSN(0))


def may_have_changes(connection: Connection, slot: str, publications: Sequence[str], upto: LSN) -> bool:
    """Tell whether the slot may have changes before ``upto`` that its consumer lacks.

    The server takes the slot for the time that it looks, so that no consumer can take it: at most `_LOOK_MS`. The answer is yes if
    the server has not found out by then, and if another connection uses the slot.
    """
    connection.reads_rows = True  # it decodes changes
    # The server keeps to this limit even if this process is killed.
    connection.execute(f"SET statement_timeout = {_LOOK_MS}")
    # With 1,000 messages or more, the function has not returned all of them. They count as changes, which does no harm if they are
    # not: a consumer has to read them anyway. Before 15, the server sends a Begin and a Commit for a transaction without published
    # changes. The server counts, because a transaction comes whole, however large it is.
    sql = (
        f"SELECT count(*) >= 1000 OR coalesce(bool_or(get_byte(data, 0) NOT IN ({_BEGIN}, {_COMMIT})), false)"
        f" FROM pg_logical_slot_peek_binary_changes({quote_literal(slot)}, {quote_literal(str(upto))}, 1000, 'proto_version', '1',"
        f" 'publication_names', {quote_literal(publication_names(publications))})"
    )
    try:
        with as_login_role(connection):
            return connection.execute(sql) == [("t",)]
    except ServerError as ex:
        if ex.sqlstate in (sqlstate.QUERY_CANCELED, sqlstate.OBJECT_IN_USE):
            return True
        raise


def _server_table(row: Sequence[str | None], published: tuple[set[str], list[str] | None] | None) -> ServerTable:
    schema, name, relation_id, kind, estimate, columns = row
    found = json.loads(columns or "[]")
    source = f"{'ONLY ' if kind == 'r' else ''}{quote_table(schema or '', name or '')}"
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


def _masked(table: ServerTable, masks: Masks) -> ServerTable:
    """Return the table without the columns whose values the copy does not have, and with the hashes of others."""
    kinds = masks.kinds(table.schema, table.name, [name for name, _, _ in table.columns])
    columns = [
        (name, _TEXT_ID, -1) if name in kinds else (name, type_id, modifier)
        for name, type_id, modifier in table.columns
        if kinds.get(name, HASH) == HASH
    ]
    hashed = frozenset(name for name, _, _ in columns if name in kinds)
    left_out = tuple(name for name, _, _ in table.columns if name in kinds and name not in hashed)
    return replace(table, columns=tuple(columns), hashed=hashed, left_out=left_out, masks=masks)


def _hmac(text: str, key: bytes) -> str:
    """Return the expression for the HMAC-SHA256 of a text, as hexadecimal digits (RFC 2104). NULL stays NULL."""
    block = (key if len(key) <= _BLOCK_BYTES else hashlib.sha256(key).digest()).ljust(_BLOCK_BYTES, b"\0")
    inner, outer = (bytes(byte ^ pad for byte in block).hex() for pad in (0x36, 0x5C))
    digest = f"sha256('\\x{inner}'::bytea || convert_to({text}, 'UTF8'))"
    return f"encode(sha256('\\x{outer}'::bytea || {digest}), 'hex')"


def _text(table: ServerTable, name: str, type_id: int) -> str:
    """Return the expression for a column's text. It is NULL for a NULL value."""
    column = quote_identifier(name)
    if name in table.hashed:
        return _hmac(OUTPUT.format(column), table.masks.key)
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
    parts = [f"(coalesce(convert_to({text}, 'UTF8'), '\\xff'::bytea) || '\\x00'::bytea)" for text in texts]
    return f"md5({_joined(parts)})"


def _joined(parts: Sequence[str]) -> str:
    """Return the expression for the bytes of all parts, one after the other.

    Each ``||`` copies the bytes of both sides. In a chain it would copy all bytes so far for each column, so the parts are joined
    in pairs, and the pairs in pairs.
    """
    joined = list(parts)
    while len(joined) > 1:
        pairs = [f"({left} || {right})" for left, right in zip(joined[::2], joined[1::2], strict=False)]
        joined = pairs + joined[len(pairs) * 2 :]
    return joined[0]


def _row_md5(table: ServerTable) -> str:
    return _md5(table, table.columns)


def _bucket(table: ServerTable, key: Sequence[str], digits: int) -> str:
    return f"substr({_md5(table, _key_columns(table, key))}, 1, {digits})"


def _rows_in(table: ServerTable, key: Sequence[str], buckets: Collection[str]) -> str:
    """Return the FROM clause for the rows in some buckets, or in some parts of buckets."""
    bucket = _bucket(table, key, max(map(len, buckets), default=BUCKET_DIGITS))
    return f"(SELECT * FROM {table.source}) AS t WHERE {bucket} IN ({', '.join(map(quote_literal, buckets))})"


def _key_columns(table: ServerTable, key: Sequence[str]) -> list[tuple[str, int, int]]:
    columns = {column[0]: column for column in table.columns}
    missing = [name for name in key if name not in columns]
    if missing or not key:
        msg = f"table {table.schema}.{table.name} has no published column {', '.join(map(repr, missing)) or 'as its key'}"
        raise CommandError(msg, hint=f"its published columns are {few(list(columns))}")
    return [columns[name] for name in key]
