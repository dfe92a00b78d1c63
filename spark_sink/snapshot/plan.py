"""Plans a snapshot: looks up the published tables in the catalog, and cuts them into chunks. No pyspark.

The plan describes each table as pgoutput would (a ``Relation``): the same columns, types and key. So everything derived from a
Relation is the same for a row of the snapshot and for a change of the stream.

The publications determine what is copied:

- The tables. With ``publish_via_partition_root`` these are the roots of partitions; their rows are read from the leaves.
- The columns: column lists, and generated columns if the server publishes them.
- The rows: row filters. A table that several publications filter has the rows that any of them lets through. If one of them
  publishes INSERT or UPDATE, only those that do count: the others bring no row.

As in PostgreSQL's own subscriptions, a table's rows are copied whatever ``publish`` (insert, update, …) says.

A chunk is a range of a table's pages. Its number of rows is not known before it is copied.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from cdcpipe import catalog_sql
from cdcpipe.errors import CdcpipeError, ConnectionClosedError
from cdcpipe.pgoutput.messages import Column, Relation
from cdcpipe.sql import quote_identifier, quote_literal, reading_rows
from cdcpipe.sqlstate import LOCK_NOT_AVAILABLE, WITHHELD, withheld
from spark_sink.client.exported import SnapshotError
from spark_sink.schema.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spark_sink.snapshot.packed import Packing

__all__ = [
    "Chunk",
    "LockedError",
    "Plan",
    "Select",
    "StaleSnapshotError",
    "TablePlan",
    "conninfo",
    "locked_error",
    "make_plan",
    "open_snapshot",
    "reading_error",
    "service_hint",
]

_KEY_FLAG: Final = 1
_MAX_PAGE: Final = 0xFFFFFFFE
_PACKED_BYTES: Final = 512 << 10
"""The size of the pages whose rows the server packs into one row. It holds their values in memory at once."""
_LOCK_TIMEOUT_MS: Final = 2000
_CHUNK_LOCK_TIMEOUT_MS: Final = 5000
_LOST: Final = ("08", "57")
"""Classes of SQLSTATE for a lost connection, and for a server that shuts down."""
_CANCELED: Final = re.compile(r"canceling statement due to [a-z ]+")
"""The server's messages for a statement that somebody or something has ended. They have no values."""
_NO_SERVICE: Final = re.compile('definition of service "|service file "')
"""libpq's words for a service that it does not find. The driver has found it: an executor's machine lacks it."""

_TABLES: Final = """
WITH locked AS (
    SELECT k.relation FROM pg_locks k JOIN pg_database d ON d.oid = k.database AND d.datname = current_database()
    WHERE k.locktype = 'relation' AND k.mode = 'AccessExclusiveLock' AND {estimates})
SELECT json_build_object(
    'relation_id', c.oid::int8, 'schema', n.nspname, 'name', c.relname, 'identity', c.relreplident, 'filters', to_json(w.filters),
    'has_list', w.has_list,
    'columns', (
        SELECT json_agg(json_build_object(
            'number', a.attnum, 'name', a.attname, 'type_id', a.atttypid::int8, 'type_modifier', a.atttypmod,
            'is_key', c.relreplident = 'f' OR EXISTS (
                SELECT FROM pg_index i WHERE {is_identity_index} AND a.attnum = ANY ({key_numbers}))
        ) ORDER BY a.attnum)
        FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum = ANY (w.numbers)),
    'primary_key', {primary_key}, 'identity_columns', {identity}, 'parents', {parents},
    'parts', (
        SELECT json_agg(json_build_object(
            'relation_id', l.oid::int8, 'schema', m.nspname, 'name', l.relname, 'file', l.relfilenode::int8,
            'rows', l.reltuples, 'is_heap', am.amname = 'heap', 'is_locked', k.is_locked,
            'is_toasted', CASE WHEN k.is_locked THEN l.reltoastrelid <> 0
                ELSE coalesce(pg_relation_size(nullif(l.reltoastrelid, 0)) > 0, false) END,
            'pages', CASE WHEN k.is_locked THEN l.relpages
                ELSE coalesce(pg_relation_size(l.oid), 0) / current_setting('block_size')::int END) ORDER BY l.oid)
        FROM pg_class l JOIN pg_namespace m ON m.oid = l.relnamespace JOIN pg_am am ON am.oid = l.relam
        CROSS JOIN LATERAL (SELECT EXISTS (
            SELECT FROM locked WHERE locked.relation IN (l.oid, l.reltoastrelid)) AS is_locked) k
        WHERE l.oid IN {leaves})
)::text
FROM {published} w JOIN pg_class c ON c.oid = w.relation_id JOIN pg_namespace n ON n.oid = c.relnamespace
ORDER BY n.nspname, c.relname
"""
"""The rows are those of the snapshot, but functions look into today's catalog: for a table that was dropped since they return NULL.
Its chunk then says so (StaleSnapshotError), if somebody wants the table at all.

``pg_relation_size`` waits for a table that is locked exclusively. If the lock stays, the last VACUUM tells the size of the table
(``estimates``). Its chunks may be of unequal size, but have all rows. They wait for the lock, and the other tables are copied. The
text of a row filter can only be read without the lock."""

_HOLDER: Final = """
SELECT CASE c.relkind WHEN 'i' THEN 'index ' ELSE 'table ' END || n.nspname || '.' || c.relname, l.pid
FROM pg_locks l JOIN pg_database d ON d.oid = l.database AND d.datname = current_database()
JOIN pg_class c ON c.oid = l.relation JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock' AND c.oid IN ({relations})
ORDER BY l.granted DESC, 1 LIMIT 1
"""


class LockedError(SnapshotError):
    """Another session locks the table for longer than one query waits. The caller may try again."""


class StaleSnapshotError(SnapshotError):
    """This snapshot can't give the table any more, for example because the server has rewritten it.

    The copy takes another snapshot by itself. The user sees the message in a warning.
    """


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some pages of a table or a partition. With ``last_page`` None the chunk goes to the end of the table.

    ``file`` is the table's file at the time of the snapshot. If the table has another file now (TRUNCATE, an ALTER TABLE that
    rewrites the table), the old rows can't be read any more, and pages have other rows.

    A query names table and columns, and finds them in today's catalog, also in an old snapshot. There these names may belong
    to another table or to other columns. `check_query` tells whether they do.
    """

    relation_id: int
    table: str
    file: int
    first_page: int = 0
    last_page: int | None = None
    packed_pages: int = 0
    """The number of pages whose rows the server may pack into one row (packed.py); 0 if it must send each row."""
    share: int = 1
    """The chunk's part of the ordinals, in relation to the other chunks of the table (snapshot/chunk.py)."""

    def query(self, expressions: Sequence[str], condition: str | None) -> str:
        """Return the chunk's SELECT."""
        conditions = [] if condition is None else [condition]
        if self.first_page:
            conditions.append(f"ctid >= '({self.first_page},0)'")
        if self.last_page is not None:
            conditions.append(f"ctid < '({self.last_page},0)'")
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return f"SELECT {', '.join(expressions)} FROM ONLY {self.table}{where}"

    def packed_query(self, aggregates: Sequence[str], expressions: Sequence[str], condition: str | None) -> str:
        """Return the chunk's SELECT of ``aggregates``, over the rows of `packed_pages` pages each."""
        pages = quote_identifier("cdcpipe pages")
        if self.table.endswith(f".{pages}"):
            pages = quote_identifier("cdcpipe's pages")  # inside, the other name is the table's
        # A column of the table that is gone must not be found here.
        first = quote_identifier("cdcpipe first page")
        if self.last_page is None:
            end, last = f"pg_relation_size({self.relation_id}::oid) / current_setting('block_size')::int8", _MAX_PAGE
        else:
            end, last = str(self.last_page), self.last_page
        conditions = [] if condition is None else [condition]
        conditions.append(f"ctid >= format('(%s,0)', {pages}.{first})::tid")
        conditions.append(f"ctid < format('(%s,0)', least({pages}.{first} + {self.packed_pages}, {last}))::tid")
        named = ", ".join(f"{aggregate} AS a{number}" for number, aggregate in enumerate(aggregates))
        # With OFFSET 0 the server computes each expression once, however often an aggregate uses it.
        rows = f"SELECT {', '.join(expressions)} FROM ONLY {self.table} WHERE {' AND '.join(conditions)} OFFSET 0"
        return (
            f"SELECT packed.* FROM generate_series({self.first_page}::int8, {end} - 1, {self.packed_pages}) AS {pages} ({first}), "
            f"LATERAL (SELECT {named} FROM ({rows}) AS selected) AS packed"
        )

    def check_query(self) -> str:
        """Return a SELECT that locks what has the table's name now. Until the end of the transaction its answer stays true.

        It returns the file of the planned table, the OID of the table that has its name, and whether its columns have their names.
        """
        return f"""
            SELECT pg_relation_filenode({self.relation_id}::oid)::int8, to_regclass({quote_literal(self.table)})::oid::int8,
                NOT EXISTS (
                    SELECT FROM pg_attribute a,
                    LATERAL pg_identify_object_as_address('pg_class'::regclass, a.attrelid, a.attnum) today
                    WHERE a.attrelid = {self.relation_id} AND a.attnum > 0 AND NOT a.attisdropped
                    AND a.attname IS DISTINCT FROM today.object_names[3]),
                EXISTS (SELECT FROM ONLY {self.table} WHERE false)
        """  # the columns of pg_attribute are those of the snapshot; functions look into today's catalog


@dataclass(frozen=True, slots=True)
class Select:
    """A column in a SELECT, in binary form or as text. ``rest`` selects as text the values that the first cannot represent.

    ``is_hashed``: the text is masked with its hash when it has arrived.
    """

    expression: str
    is_text: bool = False
    rest: str | None = None
    is_hashed: bool = False
    packing: Packing | None = None
    """How the server packs the column; None if it must send each row."""


@dataclass(frozen=True, slots=True)
class TablePlan:
    """A published table: its description as in the stream, the condition for published rows, and its chunks."""

    relation: Relation
    numbers: tuple[int, ...]
    """The columns' numbers (pg_attribute.attnum)."""
    primary_key: tuple[str, ...]
    condition: str | None
    chunks: tuple[Chunk, ...]
    row_estimate: int
    described: tuple[Column, ...] = ()
    """The columns as PostgreSQL describes them, if ``relation`` has them as the warehouse types them."""
    selects: tuple[Select, ...] = ()
    """How to select each column."""
    identity: tuple[str, ...] = ()
    """The columns of the replica identity, also those that are not published; empty with FULL and NOTHING."""
    is_whole: bool = False
    """Whether no publication has a list of the table's columns: then it publishes new ones, too."""
    relatives: frozenset[Table] = frozenset()
    """The tables that have its rows, too: its partitions, and the tables of which it is a partition or from which it inherits."""
    locked: frozenset[int] = frozenset()
    """The relations of those chunks that have to wait, because another session had locked their tables exclusively."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The tables to copy. ``is_utf8`` says whether the server checks that texts are UTF-8."""

    tables: tuple[TablePlan, ...]
    is_utf8: bool


def conninfo(parameters: Mapping[str, str], server_version: int) -> str:
    """Return libpq's conninfo string for sessions that read a snapshot. It overrides the session settings in ``parameters``."""
    # No time limit for a statement, because a chunk may be large. A limit for locks, so that waiting can be reported.
    settings = reading_rows(server_version) | {"lock_timeout": f"{_CHUNK_LOCK_TIMEOUT_MS}ms"}
    # In this list a space ends a value, unless a backslash stands before it.
    escaped_settings = ((name, value.replace("\\", r"\\").replace(" ", r"\ ")) for name, value in settings.items())
    options = [
        parameters.get("options", ""),
        *(f"-c {name}={value}" for name, value in escaped_settings),
    ]
    values = {**parameters, "client_encoding": "UTF8", "options": " ".join(filter(None, options))}
    values.setdefault("fallback_application_name", "cdcpipe")
    escaped = ((name, value.replace("\\", "\\\\").replace("'", "\\'")) for name, value in values.items())
    return " ".join(f"{name}='{value}'" for name, value in escaped)


def open_snapshot(connection: str, snapshot: str) -> Any:
    """Connect, and begin a transaction with the exported snapshot. Returns ADBC's connection, which the caller closes."""
    try:
        from adbc_driver_manager import AdbcConnection
        from adbc_driver_manager import dbapi as adbc
    except ImportError as ex:
        raise SnapshotError("adbc-driver-postgresql is not installed", hint="pip install 'cdcpipe[spark]'") from ex
    try:
        unclosed: Any = _Unclosed()
        opened = adbc.Connection(unclosed, AdbcConnection(_types(connection)), autocommit=True)
    except adbc.Error as ex:
        # An earlier connection has worked. So the server or the network is away now, which passes.
        raise ConnectionClosedError(
            f"connection to the server failed: {_first_line(ex)}", hint="start again: finished chunks stay"
        ) from ex
    try:
        with opened.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cursor.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(snapshot)}")
    except adbc.Error as ex:
        opened.close()
        # The session that exported the snapshot was lost, and the snapshot with it.
        raise ConnectionClosedError(
            f"the snapshot can't be used: {_first_line(ex)}", hint="start again: finished tables stay"
        ) from ex
    return opened


def service_hint(said: str) -> str | None:
    """Return the hint for an executor's connection that lacks the service it names; None for another error. ``said`` names it."""
    if _NO_SERVICE.search(said) is None:
        return None
    return (
        "the service that -d or -m names has to be in a service file on each executor's machine; or name it with PGSERVICE, which"
        " executors do not need"
    )


@lru_cache(maxsize=1)
def _types(connection: str) -> Any:
    """Return ADBC's "database": what it knows of the server's types. It has no session, so it can stay open.

    ADBC reads the types in a session of its own, which takes 20 ms of CPU time here, and more on the server.
    """
    import adbc_driver_postgresql

    return adbc_driver_postgresql.connect(connection)


class _Unclosed:
    """Stands for a database that a connection does not close with itself."""

    def close(self) -> None:
        pass


def reading_error(ex: Any, connection: Any, message: str, hint: str | None = None) -> CdcpipeError:
    """Return the error to raise for an error of ADBC: ConnectionClosedError for a lost connection, else SnapshotError.

    ``ex`` is ADBC's, or an OSError: amid the rows pyarrow raises nothing else, and without a SQLSTATE. So ``connection`` is tried.
    Its message may have values of rows. So raise the new error ``from None``: a traceback would show the message of its cause.
    """
    loss = _loss(connection) if isinstance(ex, OSError) else _first_line(ex) if _tells_loss(ex) else None
    if loss is not None:
        return ConnectionClosedError(f"{message}: {loss}", hint="start again: finished chunks stay")
    return SnapshotError(f"{message}: {_without_values(ex)}", hint=hint)


def locked_error(connection: Any, relations: str, otherwise: str) -> LockedError:
    """Return the error to raise after the server has given up waiting for a lock. It names the table and the lock's holder.

    ``relations`` is SQL for the OIDs of what may be locked. ``otherwise`` is what to name if the lock is gone by now.
    """
    try:
        with connection.cursor() as cursor:
            cursor.execute("ROLLBACK")
            cursor.execute(_HOLDER.format(relations=relations))
            found = cursor.fetchone()
    except connection.Error:  # the connection is lost; the next attempt says so
        found = None
    if found is None:
        locked, holder = otherwise, ""
    else:
        locked, holder = found[0], " by a prepared transaction" if found[1] is None else f" by server process {found[1]}"
    return LockedError(f"{locked} is locked exclusively{holder}", hint="end the transaction that holds the lock")


def _without_values(ex: Any) -> str:
    if isinstance(ex, OSError):
        canceled = _CANCELED.search(str(ex))
        return canceled[0] if canceled else f"the server has reported an error: {WITHHELD}"
    instead = withheld(ex.sqlstate) if ex.sqlstate else None
    return f"{instead} ({ex.sqlstate})" if instead else _first_line(ex)


def _loss(connection: Any) -> str | None:
    """Return how the connection was lost; None if it was not."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except connection.Error as ex:
        return _first_line(ex) if _tells_loss(ex) else None  # in a failed transaction, the server answers with an error of its own
    return None


def _tells_loss(ex: Any) -> bool:
    # Without a SQLSTATE the error does not come from the server.
    return ex.sqlstate[:2] in _LOST if ex.sqlstate else ex.status_code.name == "IO"


def _first_line(ex: BaseException) -> str:
    return str(ex).strip().partition("\n")[0]


def _tables_query(publications: Sequence[str], server_version: int, names: Sequence[str], *, estimates: bool) -> str:
    return _TABLES.format(
        estimates=estimates,
        published=catalog_sql.published(publications, server_version, filters=catalog_sql.TEXTS, only=names),
        is_identity_index=catalog_sql.is_identity_index("i", "c"),
        key_numbers=catalog_sql.key_numbers("i"),
        primary_key=catalog_sql.primary_key_of("c.oid"),
        identity=catalog_sql.identity_of("c"),
        parents=catalog_sql.parents_of("c.oid"),
        leaves=catalog_sql.leaves_of("c.oid"),
    )


_FACTS: Final = """
SELECT current_setting('server_version_num')::int8, current_setting('block_size')::int8,
    current_setting('server_encoding')::text
"""


def make_plan(connection: str, snapshot: str, publications: Sequence[str], chunk_bytes: int, names: Sequence[str] = ()) -> Plan:
    """Return the tables of the publications, ordered by name, each cut into chunks of about ``chunk_bytes``.

    ``names`` has the tables to return, as "schema.name"; empty for all. If one of these stays locked exclusively for a moment, its
    size is estimated. Raises LockedError if the server can't tell its row filter then.
    """
    try:
        return _make_plan(connection, snapshot, publications, chunk_bytes, names, estimates=False)
    except LockedError:
        return _make_plan(connection, snapshot, publications, chunk_bytes, names, estimates=True)


def _make_plan(
    connection: str, snapshot: str, publications: Sequence[str], chunk_bytes: int, names: Sequence[str], *, estimates: bool
) -> Plan:
    opened, server_version = open_snapshot(connection, snapshot), 0
    try:
        with opened.cursor() as cursor:
            cursor.execute(f"SET LOCAL lock_timeout = {_LOCK_TIMEOUT_MS}")
            cursor.execute(_FACTS)
            server_version, page_bytes, encoding = cursor.fetchone()
            cursor.execute(_tables_query(publications, server_version, names, estimates=estimates))
            found = [json.loads(row[0]) for row in cursor.fetchall()]
    except (opened.Error, OSError) as ex:
        if getattr(ex, "sqlstate", None) == LOCK_NOT_AVAILABLE:
            tables = catalog_sql.published(publications, server_version, only=names)
            raise locked_error(opened, f"SELECT w.relation_id FROM {tables} w", "a published table") from ex
        raise reading_error(ex, opened, "cannot look up the published tables") from None
    finally:
        opened.close()
    pages = max(1, chunk_bytes // page_bytes)
    packed_pages = max(1, _PACKED_BYTES // page_bytes) if encoding == "UTF8" else 0
    return Plan(tuple(_table(value, pages, packed_pages) for value in found), encoding != "SQL_ASCII")


def _table(value: dict[str, Any], chunk_pages: int, packed_pages: int) -> TablePlan:
    columns = tuple(
        Column(_KEY_FLAG if column["is_key"] else 0, column["name"], column["type_id"], column["type_modifier"])
        for column in value["columns"] or ()
    )
    relation = Relation(None, value["relation_id"], value["schema"], value["name"], value["identity"], columns)
    chunks = [chunk for part in value["parts"] or () for chunk in _chunks(part, chunk_pages, packed_pages)]
    filters = value["filters"]
    return TablePlan(
        relation=relation,
        numbers=tuple(column["number"] for column in value["columns"] or ()),
        primary_key=tuple(value["primary_key"] or ()),
        condition=None if filters is None else f"({' OR '.join(f'({each})' for each in filters)})",
        chunks=_with_least_share(chunks),
        identity=tuple(value["identity_columns"] or ()),
        is_whole=not value["has_list"],
        row_estimate=sum(max(int(part["rows"]), 0) for part in value["parts"] or ()),
        relatives=frozenset(
            [*(Table(*parent) for parent in value["parents"] or ()), *(Table.from_json(part) for part in value["parts"] or ())]
        ),
        locked=frozenset(part["relation_id"] for part in value["parts"] or () if part["is_locked"]),
    )


def _chunks(part: dict[str, Any], chunk_pages: int, packed_pages: int) -> list[Chunk]:
    """Cut a heap table into chunks of equal size. A table with another storage (no pages) is one chunk.

    A chunk's share of the ordinals is its number of pages. Where that does not bound the rows, the share is that of a whole chunk.
    """
    packed_pages = packed_pages if part["is_heap"] and not part["is_toasted"] else 0
    table = f"{quote_identifier(part['schema'])}.{quote_identifier(part['name'])}"
    count = max(1, -(-part["pages"] // chunk_pages)) if part["is_heap"] else 1
    borders = [part["pages"] * number // count for number in range(count)]
    least = 1 if part["is_heap"] and not part["is_locked"] else chunk_pages
    shares = [max(last - first, least) for first, last in zip(borders, [*borders[1:], part["pages"]], strict=True)]
    return [
        Chunk(part["relation_id"], table, part["file"], first, last, packed_pages, share)
        for first, last, share in zip(borders, [*borders[1:], None], shares, strict=True)
    ]


def _with_least_share(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """Give no chunk less than the mean share: a small table may have many more rows on a page than the other partitions.

    Large chunks lose ordinals by that only if there are many small ones, and never more than half.
    """
    least = sum(chunk.share for chunk in chunks) // max(1, len(chunks))
    return tuple(replace(chunk, share=max(chunk.share, least)) for chunk in chunks)
