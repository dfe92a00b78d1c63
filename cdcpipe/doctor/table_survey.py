"""Asks a server for the facts about publications and tables. It opens and locks no table: see `catalog_sql`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cdcpipe.catalog_sql import SCHEMAS_LISTS_FILTERS_SINCE, identity_of, leaves_of, published, without_exceptions
from cdcpipe.doctor.facts import Asked, LeftOut, Partition, Publication, Restriction, Table
from cdcpipe.errors import CdcpipeError, InitError
from cdcpipe.libpq.connection import Connection
from cdcpipe.publishing import own
from cdcpipe.replication.new_publications import contents
from cdcpipe.replication.selected import Selection
from cdcpipe.replication.selection import select
from cdcpipe.replication.tables import (
    PublishedTable,
    TypeWithoutBinary,
    describe,
    hiding_rows,
    types_without_binary,
    unreadable,
)
from cdcpipe.sql import quote_literal

__all__ = ["Tables", "survey"]


@dataclass(frozen=True, slots=True)
class Tables:
    """The facts that this module collects. The fields have the same names as in `Facts`."""

    publications: tuple[Publication, ...] = ()
    tables: tuple[Table, ...] = ()
    restrictions: tuple[Restriction, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    without_binary: tuple[TypeWithoutBinary, ...] = ()
    selection: Selection | None = None
    selection_problem: CdcpipeError | None = None


def survey(connection: Connection, asked: Asked) -> Tables:
    """Return the facts about the publications asked for. A publication still to be created is treated as if it existed."""
    if not asked.publications:
        return Tables()
    version = connection.server_version
    publications = _publications(connection, asked.publications)
    names = [publication.name for publication in publications]
    selection, problem = None, None
    if len(names) < len(asked.publications):
        try:
            selection = select(connection, asked.new)
        except InitError as ex:
            problem = ex
    missing = own([name for name in asked.publications if name not in names])
    made = contents(missing[0], selection, asked.new) if missing and selection is not None else []
    new = [each.source for each in made] if asked.create else []
    sources = ([published(names, version)] if names else []) + new
    tables = {table.relation_id: table for source in reversed(sources) for table in describe(connection, source)}
    return Tables(
        publications=publications,
        tables=_tables(connection, tables, _column_sets(connection, [published([name], version) for name in names] + new)),
        restrictions=_restrictions(connection, names) if names and version >= SCHEMAS_LISTS_FILTERS_SINCE else (),
        left_out=_left_out(connection, publications, selection if new else None),
        without_binary=tuple(each for source in sources for each in types_without_binary(connection, source)),
        selection=selection,
        selection_problem=problem if asked.create else None,
    )


def _sql_list(names: Iterable[str]) -> str:
    return ", ".join(map(quote_literal, names))


def _publications(connection: Connection, names: Sequence[str]) -> tuple[Publication, ...]:
    schemas = (
        "(SELECT json_agg(n.nspname ORDER BY 1) FROM pg_catalog.pg_publication_namespace s"
        " JOIN pg_catalog.pg_namespace n ON n.oid = s.pnnspid WHERE s.pnpubid = p.oid)::text"
        if connection.server_version >= SCHEMAS_LISTS_FILTERS_SINCE
        else "NULL"
    )
    rows = connection.execute(
        f"SELECT p.pubname, p.puballtables, {schemas}, p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate"
        f" FROM pg_catalog.pg_publication p WHERE p.pubname IN ({_sql_list(names)}) ORDER BY 1"
    )
    kinds = ("insert", "update", "delete", "truncate")
    return tuple(
        Publication(
            name or "",
            all_tables == "t",
            tuple(json.loads(schemas or "[]")),
            frozenset(kind for kind, is_published in zip(kinds, operations, strict=True) if is_published == "t"),
        )
        for name, all_tables, schemas, *operations in rows
    )


def _column_sets(connection: Connection, sources: Sequence[str]) -> Mapping[int, int]:
    """Return the number of different sets of columns for each table that is in several sources. Each source is a publication."""
    if len(sources) <= 1:
        return {}
    sets: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
    for source in sources:
        for table in describe(connection, source):
            sets[table.relation_id].add(tuple(column.number for column in table.columns))
    return {relation_id: len(each) for relation_id, each in sets.items()}


def _partitions(relation: str) -> str:
    """Return an expression for the relations that hold a table's rows, and their identities, as a JSON array of arrays."""
    return (
        f"(SELECT json_agg(json_build_array(s.nspname, leaf.relname, leaf.relreplident, {identity_of('leaf')},"
        " (SELECT json_agg(json_build_array(a.attname, a.attgenerated = 'v') ORDER BY a.attnum) FROM pg_catalog.pg_attribute a"
        "  WHERE a.attrelid = leaf.oid AND a.attgenerated <> '' AND NOT a.attisdropped)) ORDER BY s.nspname, leaf.relname)"
        " FROM pg_catalog.pg_class leaf JOIN pg_catalog.pg_namespace s ON s.oid = leaf.relnamespace"
        f" WHERE leaf.oid IN {leaves_of(relation)})::text"
    )


def _parse_partitions(found: str | None) -> tuple[Partition, ...]:
    return tuple(
        Partition(
            schema,
            name,
            kind,
            None if identity is None else tuple(identity),
            generated=tuple(column for column, _ in generated or ()),
            virtual=tuple(column for column, is_virtual in generated or () if is_virtual),
        )
        for schema, name, kind, identity, generated in json.loads(found or "[]")
    )


def _tables(connection: Connection, found: Mapping[int, PublishedTable], column_sets: Mapping[int, int]) -> tuple[Table, ...]:
    if not found:
        return ()
    # The pages of the TOAST table count, too. pg_table_size() would open the table.
    pages = (
        "SELECT sum(greatest(leaf.relpages, 0)::int8 + greatest(toast.relpages, 0)::int8) FROM pg_catalog.pg_class leaf"
        f" LEFT JOIN pg_catalog.pg_class toast ON toast.oid = leaf.reltoastrelid WHERE leaf.oid IN {leaves_of('c.oid')}"
    )
    rows = connection.execute(
        "SELECT c.oid, pg_catalog.pg_has_role(c.relowner, 'USAGE'),"
        f" ({pages}) * pg_catalog.current_setting('block_size')::int8, {identity_of('c')}::text, {_partitions('c.oid')}"
        f" FROM pg_catalog.pg_class c WHERE c.oid IN ({', '.join(map(str, found))})"
    )
    hidden = unreadable(connection, list(found.values()))
    hiding = hiding_rows(connection, list(found), reads_roots=True)
    tables = [
        Table(
            published=(published := found[int(oid or 0)]),
            unreadable=tuple(each for each in hidden if each.published_id == published.relation_id),
            hides_rows=published.relation_id in hiding,
            is_owned=is_owned == "t",
            size_bytes=int(size or 0),
            identity=None if identity is None else tuple(json.loads(identity)),
            partitions=_parse_partitions(partitions),
            column_sets=column_sets.get(published.relation_id, 1),
        )
        for oid, is_owned, size, identity, partitions in rows
    ]
    return tuple(sorted(tables, key=lambda table: table.name))


def _restrictions(connection: Connection, names: Sequence[str]) -> tuple[Restriction, ...]:
    """Return the column lists and row filters.

    The columns of a filter are read from its expression tree, because its text would need a lock on the table.
    """
    rows = connection.execute(
        "SELECT p.pubname, n.nspname, c.relname, p.pubupdate, p.pubdelete,"
        " CASE WHEN r.prattrs IS NOT NULL THEN (SELECT json_agg(a.attname ORDER BY a.attnum) FROM pg_catalog.pg_attribute a"
        "   WHERE a.attrelid = c.oid AND a.attnum = ANY (r.prattrs)) END::text,"
        " CASE WHEN r.prqual IS NOT NULL THEN (SELECT coalesce(json_agg(DISTINCT a.attname), '[]')"
        "   FROM pg_catalog.regexp_matches(r.prqual::text, ':varattno (\\d+)', 'g') AS v (number)"
        "   JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum = v.number[1]::int2) END::text,"
        f" {_partitions('c.oid')}"
        " FROM pg_catalog.pg_publication_rel r JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid"
        " JOIN pg_catalog.pg_class c ON c.oid = r.prrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        f" WHERE p.pubname IN ({_sql_list(names)}) AND (r.prattrs IS NOT NULL OR r.prqual IS NOT NULL)"
        # For a partition that is published as part of its root, the root's column list and row filter decide.
        " AND NOT (p.pubviaroot AND EXISTS (SELECT FROM pg_catalog.pg_partition_ancestors(c.oid) up"
        "   JOIN pg_catalog.pg_publication_rel u ON u.prpubid = p.oid AND u.prrelid = up.relid WHERE up.relid <> c.oid))"
        " ORDER BY 2, 3, 1"
    )
    return tuple(
        Restriction(
            publication=publication or "",
            schema=schema or "",
            name=name or "",
            operations=frozenset(kind for kind, has in (("update", has_updates), ("delete", has_deletes)) if has == "t"),
            columns=None if columns is None else tuple(json.loads(columns)),
            filtered_by=None if filtered_by is None else tuple(json.loads(filtered_by)),
            partitions=_parse_partitions(partitions),
        )
        for publication, schema, name, has_updates, has_deletes, columns, filtered_by, partitions in rows
    )


def _left_out(connection: Connection, publications: Sequence[Publication], new: Selection | None) -> tuple[LeftOut, ...]:
    """Return the tables that publications of all tables, of schemas and of partitioned tables leave out.

    ``new`` are the tables of a publication still to be created.
    """
    is_all = any(each.all_tables for each in publications) or (new is not None and new.is_all)
    oids = ", ".join(str(each.relation_id) for each in new.tables) if new is not None and new.tables else "NULL"
    schemas = _sql_list({schema for each in publications for schema in each.schemas}) or "NULL"
    names = _sql_list(each.name for each in publications) or "NULL"
    rows = connection.execute(
        "WITH RECURSIVE part (root, oid) AS ("
        " SELECT r.prrelid, r.prrelid FROM pg_catalog.pg_publication_rel r"
        f"  JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid AND p.pubname IN ({names})"
        f"  {without_exceptions('r', connection.server_version)}"
        f"  UNION SELECT c.oid, c.oid FROM pg_catalog.pg_class c WHERE c.oid IN ({oids})"
        " UNION SELECT part.root, i.inhrelid FROM part JOIN pg_catalog.pg_inherits i ON i.inhparent = part.oid)"
        " SELECT n.nspname, c.relname, CASE c.relkind WHEN 'f' THEN 'foreign' ELSE 'unlogged' END,"
        "  min(rn.nspname || '.' || root.relname)"
        " FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        " LEFT JOIN part ON part.oid = c.oid AND part.root <> c.oid"
        " LEFT JOIN pg_catalog.pg_class root ON root.oid = part.root AND root.relkind = 'p'"
        " LEFT JOIN pg_catalog.pg_namespace rn ON rn.oid = root.relnamespace"
        " WHERE (c.relkind = 'f' OR (c.relkind = 'r' AND c.relpersistence = 'u'))"
        f" AND ({is_all} OR n.nspname IN ({schemas}) OR root.oid IS NOT NULL) GROUP BY 1, 2, 3 ORDER BY 1, 2"
    )
    return tuple(LeftOut(schema or "", name or "", kind or "", parent) for schema, name, kind, parent in rows)
