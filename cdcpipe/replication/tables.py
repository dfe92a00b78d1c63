"""Describes the tables of a stream: keys, replica identities, columns, and who may read them. No table is opened or locked.

Every function takes an ordinary ``Connection``. ``source`` is a subquery of `catalog_sql.published` or `published_by_new`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from cdcpipe.catalog_sql import (
    GENERATED_COLUMNS_SINCE,
    generated_of_identity,
    has_deferrable_key,
    has_identity,
    identity_of,
    leaves_of,
    parents_of,
    primary_key_of,
    published,
)
from cdcpipe.errors import InitError
from cdcpipe.libpq.connection import Connection
from cdcpipe.sql import quote_identifier, quote_table
from cdcpipe.units import FEW, few

__all__ = [
    "PublishedTable",
    "TableColumn",
    "TypeWithoutBinary",
    "Unreadable",
    "check_binary_forms",
    "check_readable",
    "describe",
    "grants",
    "hiding_rows",
    "published_tables",
    "types_without_binary",
    "unreadable",
]


_WITH_LEAVES: Final = (
    "SELECT each.relation, each.relation FROM {source} AS each (relation)"
    " UNION SELECT each.relation, leaf.oid FROM {source} AS each (relation)"
    " JOIN pg_catalog.pg_class root ON root.oid = each.relation AND root.relkind = 'p'"
    f" CROSS JOIN LATERAL {leaves_of('each.relation')} AS leaf"
)
"""The tables of a ``source``, and the leaf partitions of the partitioned ones: ``relation`` is the table, ``oid`` has its rows.

A checksum reads a table, a copy its leaf partitions.
"""


_MISSING_IN_LEAVES: Final = (
    "SELECT p.attname, bool_or(p.atthasmissing) AS has_missing,"
    " CASE WHEN bool_and(p.atthasmissing) AND min(p.value) = max(p.value) THEN min(p.value) END AS missing"
    " FROM (SELECT p.attname, p.atthasmissing, pg_catalog.array_to_string(p.attmissingval, '') AS value"
    "   FROM pg_catalog.pg_attribute p"
    "   WHERE {root}.relkind = 'p' AND p.attrelid IN {leaves} AND p.attnum > 0 AND NOT p.attisdropped) AS p"
    " GROUP BY p.attname"
)
"""For each column of a partitioned table, by name: whether a leaf partition has a missing value; the value, if all have the same.

The root itself has no rows, and so never has one.
"""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column, as in ``pg_attribute``. A column keeps its ``number`` when it is renamed, and no other column ever gets it.

    - ``missing``: the column's value in rows that are older than the column and were not rewritten; None if that is NULL.
    - ``is_filled``: rows older than the column may have a value that is not in ``missing``. It comes from a default, an identity or
      an expression. Or the partitions of the table do not all have the same ``missing``.
    """

    name: str
    number: int
    type_id: int
    type_modifier: int
    missing: str | None
    is_filled: bool


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table of a publication.

    - ``replica_identity``: ``d``, ``n``, ``f`` or ``i``, as in ``pg_class``.
    - ``primary_key``: the key's columns, in order. It is empty for a deferrable primary key: within a transaction two rows may have
      the same key, so such a key does not identify the row of a change. Then ``has_deferrable_key`` is True.
    - ``identity``: the columns of the replica identity, in order. Some of them may not be published. It is empty with FULL and with
      NOTHING.
    - ``refused``: the commands (UPDATE, DELETE) that the server refuses, because they are published and a row has no identity, or
      has one with ``unpublished_generated``.
    - ``unpublished_generated``: the generated columns of the replica identity, of the table or of its partitions, that are not
      published; without a replica identity those that FULL would have. It is empty before PostgreSQL 18, where they do not matter.
    - ``columns``: the published columns, in order.
    - ``parents``: the schemas and names of the tables of which it is a partition, or from which it inherits, at any depth.
    """

    schema: str
    name: str
    relation_id: int
    replica_identity: str
    primary_key: tuple[str, ...]
    has_deferrable_key: bool
    identity: tuple[str, ...]
    refused: tuple[str, ...]
    columns: tuple[TableColumn, ...]
    parents: tuple[tuple[str, str], ...] = ()
    unpublished_generated: tuple[str, ...] = ()

    @property
    def unpublished_key(self) -> tuple[str, ...]:
        """The columns of the key that are not published: of the replica identity, otherwise of the primary key.

        If there are any, the others do not tell rows apart, and the table counts as one without a key.
        """
        published = {column.name for column in self.columns}
        return tuple(name for name in self.identity or self.primary_key if name not in published)


class TypeWithoutBinary(NamedTuple):
    """A column whose type has a binary form, but contains a type that has none."""

    table: str
    column: str
    type_name: str


class Unreadable(NamedTuple):
    """A table or partition that this user may not read. ``has_usage``: it may use its schema. ``published_id``: of which table."""

    schema: str
    name: str
    has_usage: bool
    published_id: int


def published_tables(connection: Connection, names: Sequence[str]) -> list[PublishedTable]:
    """Return the tables of the publications, by name."""
    return describe(connection, published(names, connection.server_version))


def _unpublished_generated(server_version: int) -> str:
    """Return a subquery for `PublishedTable.unpublished_generated`, as a JSON array; NULL if there are none.

    In the query around it, ``c`` is the table and ``p`` its row of the source. The columns of a partition have the names of its
    root's, and may have other numbers.
    """
    return (
        f"SELECT json_agg(DISTINCT g.attname) FROM pg_catalog.pg_class leaf CROSS JOIN LATERAL {generated_of_identity('leaf')} AS g"
        f" WHERE {server_version >= GENERATED_COLUMNS_SINCE} AND leaf.oid IN {leaves_of('c.oid')} AND g.attname NOT IN ("
        "SELECT a.attname FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum = ANY (p.numbers))"
    )


def describe(connection: Connection, source: str) -> list[PublishedTable]:
    """Return the tables of ``source``, by name."""
    is_identified = f"SELECT bool_and({has_identity('leaf')}) FROM pg_catalog.pg_class leaf WHERE leaf.oid IN {leaves_of('c.oid')}"
    missing_in_leaves = _MISSING_IN_LEAVES.format(root="c", leaves=leaves_of("c.oid"))
    rows = connection.execute(
        f"SELECT n.nspname, c.relname, c.oid, c.relreplident, {primary_key_of('c.oid')}::text, {has_deferrable_key('c.oid')},"
        f" {identity_of('c')}::text,"
        # For a partitioned table, the identities of its partitions decide.
        f" CASE WHEN coalesce(({is_identified}), true) AND unpublished.generated IS NULL THEN '[]'::json"
        "   ELSE (SELECT json_agg(v.command) FROM (VALUES"
        "     ('UPDATE', p.has_updates), ('DELETE', p.has_deletes)) AS v (command, is_published) WHERE v.is_published) END::text,"
        " (SELECT json_agg(json_build_array(a.attname, a.attnum, a.atttypid::int8, a.atttypmod,"
        # An array with one element. The text of the array would not do: that of a box has another delimiter than text[].
        "    coalesce(pg_catalog.array_to_string(a.attmissingval, ''), leaf.missing),"
        "    NOT a.atthasmissing AND CASE WHEN leaf.has_missing THEN leaf.missing IS NULL"
        "      ELSE a.atthasdef OR a.attidentity <> '' OR t.typdefault IS NOT NULL END) ORDER BY a.attnum)"
        "   FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid"
        f"   LEFT JOIN ({missing_in_leaves}) AS leaf ON leaf.attname = a.attname"
        f"   WHERE a.attrelid = c.oid AND a.attnum = ANY (p.numbers))::text, {parents_of('c.oid')}::text,"
        " unpublished.generated::text"
        f" FROM {source} AS p"
        " JOIN pg_catalog.pg_class c ON c.oid = p.relation_id JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        f" CROSS JOIN LATERAL ({_unpublished_generated(connection.server_version)}) AS unpublished (generated) ORDER BY 1, 2"
    )
    return [
        PublishedTable(
            schema=schema or "",
            name=name or "",
            relation_id=int(oid or 0),
            replica_identity=identity or "d",
            primary_key=tuple(json.loads(key)) if key else (),
            has_deferrable_key=is_deferrable == "t",
            identity=tuple(json.loads(named)) if named else (),
            refused=tuple(json.loads(refused or "[]")),
            columns=tuple(TableColumn(*column) for column in json.loads(columns or "[]")),
            parents=tuple((schema_of, name_of) for schema_of, name_of in json.loads(parents or "[]")),
            unpublished_generated=tuple(json.loads(generated or "[]")),
        )
        for schema, name, oid, identity, key, is_deferrable, named, refused, columns, parents, generated in rows
    ]


def check_binary_forms(connection: Connection, tables: Sequence[PublishedTable]) -> None:
    """Raise InitError if `types_without_binary` finds a column. With the option 'binary' the server would fail in mid-stream."""
    numbers = {table.relation_id: ",".join(str(column.number) for column in table.columns) for table in tables}
    rows = ", ".join(f"({oid}::pg_catalog.oid, '{{{columns}}}'::pg_catalog.int2[])" for oid, columns in numbers.items())
    source = f"(SELECT * FROM (VALUES {rows}) AS v (relation_id, numbers))"
    found = types_without_binary(connection, source) if rows else []
    if found:
        table, column, type_name = found[0]
        msg = f"column {column!r} of table {table!r} has no binary form: it is made of values of type {type_name}"
        raise InitError(msg, hint="leave the option 'binary' out, or the column out of the publication")


def types_without_binary(connection: Connection, source: str) -> list[TypeWithoutBinary]:
    """Return the columns that can't be sent in binary form.

    A column whose type itself has no binary form is not among them: the server sends it as text.
    """
    rows = connection.execute(
        "WITH RECURSIVE part(relation, attribute, type) AS ("
        " SELECT n.nspname || '.' || c.relname, a.attname, a.atttypid"
        f" FROM {source} AS p"
        " JOIN pg_catalog.pg_class c ON c.oid = p.relation_id JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        " JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY (p.numbers)"
        " JOIN pg_catalog.pg_type t ON t.oid = a.atttypid AND t.typsend <> 0"
        " UNION SELECT part.relation, part.attribute, inside.type"
        " FROM part JOIN pg_catalog.pg_type t ON t.oid = part.type CROSS JOIN LATERAL ("
        "   SELECT t.typelem WHERE t.typsend = 'pg_catalog.array_send'::pg_catalog.regproc"
        "   UNION ALL SELECT t.typbasetype WHERE t.typtype = 'd'"
        "   UNION ALL SELECT r.rngsubtype FROM pg_catalog.pg_range r WHERE r.rngtypid = t.oid"
        "   UNION ALL SELECT r.rngtypid FROM pg_catalog.pg_range r WHERE r.rngmultitypid = t.oid"
        "   UNION ALL SELECT a.atttypid FROM pg_catalog.pg_attribute a"
        "     WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped"
        " ) AS inside(type))"
        " SELECT part.relation, part.attribute, pg_catalog.format_type(t.oid, NULL)"
        " FROM part JOIN pg_catalog.pg_type t ON t.oid = part.type WHERE t.typsend = 0 ORDER BY 1, 2, 3"
    )
    return [TypeWithoutBinary(table or "", column or "", type_name or "") for table, column, type_name in rows]


def check_readable(connection: Connection, tables: Sequence[PublishedTable]) -> None:
    """Raise InitError unless this user may read the published columns of all the tables, and all their rows.

    The hint has the SQL that lets the user read them.
    """
    user = connection.execute("SELECT current_user")[0][0] or ""
    if found := unreadable(connection, tables):
        names = [f"{each.schema}.{each.name}" for each in found]
        raise InitError(f"user {user!r} may not read {few(names)}", hint="; ".join(grants(user, found)))
    hiding = hiding_rows(connection, [table.relation_id for table in tables], reads_roots=False)
    if names := [f"{table.schema}.{table.name}" for table in tables if table.relation_id in hiding]:
        msg = f"row-level security hides rows from user {user!r}, which the stream has and a copy would not have: {few(names)}"
        raise InitError(msg, hint=f"ALTER ROLE {quote_identifier(user)} BYPASSRLS")


def grants(user: str, found: Sequence[Unreadable]) -> Iterator[str]:
    """Yield the SQL that lets the user read the tables: each of them, or if they are many, all of their schemas."""
    role = quote_identifier(user)
    schemas = sorted({each.schema for each in found if not each.has_usage})
    if schemas:
        yield f"GRANT USAGE ON SCHEMA {', '.join(map(quote_identifier, schemas))} TO {role}"
    if len(found) <= FEW:
        what = ", ".join(quote_table(each.schema, each.name) for each in found)
    else:
        what = f"ALL TABLES IN SCHEMA {', '.join(quote_identifier(schema) for schema in sorted({each.schema for each in found}))}"
    yield f"GRANT SELECT ON {what} TO {role}"


def unreadable(connection: Connection, tables: Sequence[PublishedTable]) -> list[Unreadable]:
    """Return the tables of which this user may not read every published column, and their leaf partitions: a copy reads these."""
    columns = ", ".join(
        f"({table.relation_id}::pg_catalog.oid, {column.number}::pg_catalog.int2)" for table in tables for column in table.columns
    )
    if not columns:
        return []
    rows = connection.execute(
        f"WITH v (relation, attribute) AS (VALUES {columns}),"
        f" part (relation, oid) AS ({_WITH_LEAVES.format(source='(SELECT DISTINCT relation FROM v)')})"
        " SELECT DISTINCT n.nspname, c.relname, pg_catalog.has_schema_privilege(n.oid, 'USAGE'), v.relation"
        " FROM v JOIN part ON part.relation = v.relation"
        " JOIN pg_catalog.pg_class c ON c.oid = part.oid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        # The columns of a partition have the names of its root's, and may have other numbers.
        " JOIN pg_catalog.pg_attribute named ON named.attrelid = v.relation AND named.attnum = v.attribute"
        " JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attname = named.attname AND NOT a.attisdropped"
        " WHERE NOT pg_catalog.has_schema_privilege(n.oid, 'USAGE')"
        "   OR NOT pg_catalog.has_column_privilege(c.oid, a.attnum, 'SELECT') ORDER BY 1, 2"
    )
    return [Unreadable(schema or "", name or "", has_usage == "t", int(oid or 0)) for schema, name, has_usage, oid in rows]


def hiding_rows(connection: Connection, relation_ids: Sequence[int], *, reads_roots: bool) -> set[int]:
    """Return those of the tables of which row-level security hides rows from this user.

    A copy reads leaf partitions, and what hides rows of their root does not count for it. A checksum ``reads_roots``.
    """
    if not relation_ids:
        return set()
    values = ", ".join(f"({oid}::pg_catalog.oid)" for oid in relation_ids)
    rows = connection.execute(
        f"SELECT DISTINCT part.relation FROM ({_WITH_LEAVES.format(source=f'(VALUES {values})')}) AS part (relation, oid)"
        f" JOIN pg_catalog.pg_class c ON c.oid = part.oid AND ({reads_roots} OR c.relkind <> 'p')"
        " WHERE pg_catalog.row_security_active(part.oid)"
    )
    return {int(oid or 0) for (oid,) in rows}
