"""What a snapshot copies: the published tables as one snapshot of the catalog sees them, cut into chunks. No pyspark.

Each table is described as pgoutput would describe it (a ``Relation``): the same columns under the same types, the same key. So
whatever is derived from a Relation is the same for a row of the snapshot and a change of the stream.

What is published is what the publications say: the tables, or with ``publish_via_partition_root`` the roots of partitions, whose
rows are read from the leaves; the columns (lists, and generated columns as the server publishes them); the rows, where a
row filter says so. As with PostgreSQL's own subscriptions a table that several publications filter has the rows of any, and
``publish`` (insert, update, …) does not matter.

A chunk is a range of a table's pages. Only its first and last page are known beforehand; rows are counted when they come.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cdcpipe.errors import CdcpipeError
from cdcpipe.pgoutput.messages import Column, Relation
from cdcpipe.sql import quote_identifier, quote_literal, reading_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Chunk", "LockedError", "Plan", "RewrittenError", "SnapshotError", "TablePlan", "conninfo", "make_plan", "open_snapshot"]

_KEY_FLAG: Final = 1
_LOCK_TIMEOUT_MS: Final = 2000
_LOCK_NOT_AVAILABLE: Final = "55P03"

_TABLES: Final = """
WITH published AS (
    SELECT c.oid, to_json(p.attnames) AS names, p.rowfilter
    FROM pg_publication_tables p
    JOIN pg_namespace n ON n.nspname = p.schemaname
    JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename
    WHERE p.pubname IN ({publications})
), wanted AS (
    SELECT oid, (array_agg(names))[1] AS names,
           CASE WHEN bool_or(rowfilter IS NULL) THEN NULL ELSE json_agg(DISTINCT rowfilter) END AS filters
    FROM published GROUP BY oid
)
SELECT json_build_object(
    'relation_id', c.oid::int8, 'schema', n.nspname, 'name', c.relname, 'identity', c.relreplident, 'filters', w.filters,
    'columns', (
        SELECT json_agg(json_build_object(
            'number', a.attnum, 'name', a.attname, 'type_id', a.atttypid::int8, 'type_modifier', a.atttypmod,
            'is_key', c.relreplident = 'f' OR EXISTS (
                SELECT FROM pg_index i
                WHERE i.indrelid = c.oid AND i.indisvalid AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])
                AND CASE c.relreplident WHEN 'd' THEN i.indisprimary AND i.indimmediate WHEN 'i' THEN i.indisreplident
                    ELSE false END)
        ) ORDER BY a.attnum)
        FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        AND (a.attgenerated = '' OR current_setting('server_version_num')::int >= 180000)
        AND a.attname IN (SELECT json_array_elements_text(w.names))),
    'primary_key', (
        SELECT json_agg(a.attname ORDER BY k.position)
        FROM pg_index i CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k (attnum, position)
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.attnum
        WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate AND k.position <= i.indnkeyatts),
    'parts', (
        WITH RECURSIVE part AS (
            SELECT c.oid UNION ALL SELECT i.inhrelid FROM part JOIN pg_inherits i ON i.inhparent = part.oid
            JOIN pg_class p ON p.oid = part.oid AND p.relkind = 'p'
        )
        SELECT json_agg(json_build_object(
            'relation_id', l.oid::int8, 'schema', m.nspname, 'name', l.relname, 'file', l.relfilenode::int8,
            'rows', l.reltuples, 'is_heap', am.amname = 'heap',
            'pages', pg_relation_size(l.oid) / current_setting('block_size')::int) ORDER BY l.oid)
        FROM part JOIN pg_class l ON l.oid = part.oid AND l.relkind = 'r'
        JOIN pg_namespace m ON m.oid = l.relnamespace JOIN pg_am am ON am.oid = l.relam)
)::text
FROM wanted w JOIN pg_class c ON c.oid = w.oid JOIN pg_namespace n ON n.oid = c.relnamespace
-- A partition whose root is published, by another of the publications, comes as rows of the root.
WHERE NOT EXISTS (SELECT FROM pg_partition_ancestors(c.oid) a JOIN wanted root ON root.oid = a.relid AND a.relid <> c.oid)
ORDER BY n.nspname, c.relname
"""


class SnapshotError(CdcpipeError):
    """A snapshot could not be taken or read."""


class LockedError(SnapshotError):
    """A table is locked by somebody, longer than it makes sense to wait without looking up."""


class RewrittenError(SnapshotError):
    """A table needs another snapshot, because its rows can't be seen any more as they were: it has been written anew since."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some pages of a table, or of a partition; ``last_page`` None: to the end.

    ``file`` is the table's file at the time of the snapshot: with another one (TRUNCATE, an ALTER TABLE that writes the
    table anew) the old rows can't be seen any more, and pages have other rows.
    """

    relation_id: int
    table: str
    file: int
    first_page: int = 0
    last_page: int | None = None

    def query(self, expressions: Sequence[str], condition: str | None) -> str:
        """Return the chunk's SELECT."""
        conditions = [] if condition is None else [condition]
        if self.first_page:
            conditions.append(f"ctid >= '({self.first_page},0)'")
        if self.last_page is not None:
            conditions.append(f"ctid < '({self.last_page},0)'")
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return f"SELECT {', '.join(expressions)} FROM ONLY {self.table}{where}"


@dataclass(frozen=True, slots=True)
class TablePlan:
    """A published table: how the stream describes it, which rows of it are published, and its chunks."""

    relation: Relation
    numbers: tuple[int, ...]
    """Of its columns: pg_attribute.attnum."""
    primary_key: tuple[str, ...]
    condition: str | None
    chunks: tuple[Chunk, ...]
    row_estimate: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a snapshot copies. ``time_us``: when it was taken (UTC, since 1970). ``is_utf8``: whether the server checks texts."""

    tables: tuple[TablePlan, ...]
    time_us: int
    is_utf8: bool


def conninfo(parameters: Mapping[str, str], server_version: int) -> str:
    """Return libpq's conninfo string for sessions that read a snapshot: the settings of the session are ours, whatever is given."""
    # A large chunk may take its time, and so may whoever waits for a table that is locked.
    settings = reading_rows(server_version) | {"lock_timeout": "0"}
    options = [
        parameters.get("options", os.environ.get("PGOPTIONS", "")),
        *(f"-c {name}={value}" for name, value in settings.items()),
    ]
    values = {**parameters, "client_encoding": "UTF8", "options": " ".join(filter(None, options))}
    values.setdefault("fallback_application_name", "cdcpipe")
    escaped = ((name, value.replace("\\", "\\\\").replace("'", "\\'")) for name, value in values.items())
    return " ".join(f"{name}='{value}'" for name, value in escaped)


def open_snapshot(connection: str, snapshot: str) -> Any:
    """Connect and begin a transaction that sees the exported snapshot; return ADBC's connection, to be closed."""
    try:
        import adbc_driver_postgresql.dbapi as adbc
    except ImportError as ex:
        raise SnapshotError("adbc-driver-postgresql is not installed", hint="pip install 'cdcpipe[spark]'") from ex
    try:
        opened = adbc.connect(connection, autocommit=True)
    except adbc.Error as ex:
        raise SnapshotError(f"connection to the server failed: {_first_line(ex)}") from ex
    try:
        with opened.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cursor.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(snapshot)}")
    except adbc.Error as ex:
        opened.close()
        raise SnapshotError(
            f"the snapshot can't be used: {_first_line(ex)}", hint="start again: it is gone with its session"
        ) from ex
    return opened


def _first_line(ex: BaseException) -> str:
    return str(ex).strip().partition("\n")[0]


_FACTS: Final = """
SELECT current_setting('block_size')::int8, (extract(epoch FROM now()) * 1000000)::int8, current_setting('server_encoding')::text
"""


def make_plan(connection: str, snapshot: str, publications: Sequence[str], chunk_bytes: int) -> Plan:
    """Return the tables of the publications, by name, each cut into chunks of about ``chunk_bytes``.

    Raise LockedError after a moment if a table is locked exclusively: then its size can't be asked for.
    """
    opened = open_snapshot(connection, snapshot)
    try:
        with opened.cursor() as cursor:
            cursor.execute(f"SET LOCAL lock_timeout = {_LOCK_TIMEOUT_MS}")
            cursor.execute(_FACTS)
            page_bytes, time_us, encoding = cursor.fetchone()
            cursor.execute(_TABLES.format(publications=", ".join(map(quote_literal, publications))))
            found = [json.loads(row[0]) for row in cursor.fetchall()]
    except opened.Error as ex:
        if ex.sqlstate == _LOCK_NOT_AVAILABLE:
            raise LockedError("a published table is locked exclusively", hint="end the transaction that holds the lock") from ex
        raise SnapshotError(f"the published tables could not be looked up: {_first_line(ex)}") from ex
    finally:
        opened.close()
    pages = max(1, chunk_bytes // page_bytes)
    return Plan(tuple(_table(value, pages) for value in found), time_us, encoding != "SQL_ASCII")


def _table(value: dict[str, Any], chunk_pages: int) -> TablePlan:
    columns = tuple(
        Column(_KEY_FLAG if column["is_key"] else 0, column["name"], column["type_id"], column["type_modifier"])
        for column in value["columns"] or ()
    )
    relation = Relation(None, value["relation_id"], value["schema"], value["name"], value["identity"], columns)
    chunks = [chunk for part in value["parts"] or () for chunk in _chunks(part, chunk_pages)]
    filters = value["filters"]
    return TablePlan(
        relation=relation,
        numbers=tuple(column["number"] for column in value["columns"] or ()),
        primary_key=tuple(value["primary_key"] or ()),
        condition=None if filters is None else f"({' OR '.join(f'({each})' for each in filters)})",
        chunks=tuple(chunks),
        row_estimate=sum(max(int(part["rows"]), 0) for part in value["parts"] or ()),
    )


def _chunks(part: dict[str, Any], chunk_pages: int) -> list[Chunk]:
    """Cut a table of pages into even chunks; one that is stored in another way is one chunk."""
    table = f"{quote_identifier(part['schema'])}.{quote_identifier(part['name'])}"
    count = max(1, -(-part["pages"] // chunk_pages)) if part["is_heap"] else 1
    borders = [part["pages"] * number // count for number in range(count)]
    return [
        Chunk(part["relation_id"], table, part["file"], first, last)
        for first, last in zip(borders, [*borders[1:], None], strict=True)
    ]
