"""Finds the column lists of a publication that has to be created, and the reasons why the server would not accept them.

A column list may leave out neither a column of a key nor, for a table whose updates are published, any column if the replica
identity is FULL. The server says so late: CREATE PUBLICATION succeeds, and then each UPDATE fails, for every application.

The lists have no generated columns. Before PostgreSQL 18 none may have them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cdcpipe.catalog_sql import SCHEMAS_LISTS_FILTERS_SINCE, generated_of_identity, has_identity, key_numbers, leaves_of
from cdcpipe.errors import InitError
from cdcpipe.libpq.connection import Connection
from cdcpipe.publishing import FULL, INSERT_ONLY, NewPublication
from cdcpipe.replication.selected import Selected
from cdcpipe.units import few

__all__ = ["without_columns"]

_COLUMNS: Final = f"""
SELECT c.oid::int8,
    (SELECT json_agg(json_build_array(a.attname, a.attnum, a.attgenerated <> '') ORDER BY a.attnum) FROM pg_catalog.pg_attribute a
     WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)::text,
    (SELECT json_agg(DISTINCT a.attname) FROM pg_catalog.pg_class l JOIN pg_catalog.pg_index i ON i.indrelid = l.oid
     JOIN pg_catalog.pg_attribute a ON a.attrelid = l.oid AND a.attnum = ANY ({key_numbers("i")})
     WHERE (l.oid = c.oid OR l.oid IN {leaves_of("c.oid")})
     AND (i.indisprimary OR (l.relreplident = 'i' AND i.indisreplident)))::text,
    (SELECT bool_or(l.relreplident = 'f') FROM pg_catalog.pg_class l WHERE l.oid = c.oid OR l.oid IN {leaves_of("c.oid")}),
    (SELECT json_agg(DISTINCT g.attname) FROM pg_catalog.pg_class l CROSS JOIN LATERAL {generated_of_identity("l")} g
     WHERE l.oid IN {leaves_of("c.oid")} AND l.relreplident <> 'f' AND {has_identity("l")})::text
FROM pg_catalog.pg_class c WHERE c.oid IN ({{oids}})
"""


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of a table: name and number of those that a list has, the generated ones, and those of keys.

    ``generated_in_identity``: the generated columns in the index that is the replica identity.
    """

    numbers: Mapping[str, int]
    generated: frozenset[str]
    keys: frozenset[str]
    generated_in_identity: frozenset[str]
    is_full: bool


def without_columns(connection: Connection, tables: Sequence[Selected], wanted: NewPublication) -> tuple[Selected, ...]:
    """Return the tables with their column lists. Raises InitError that names everything that can't be left out."""
    if connection.server_version < SCHEMAS_LISTS_FILTERS_SINCE:
        raise InitError(
            f"--exclude-column takes PostgreSQL 15 or newer; this server has {connection.server_version // 10000}",
            hint="--mask of cdcpipe-spark run hides a column in the tables; the staging log has its values then",
        )
    columns = _columns(connection, tables)
    used: set[str] = set()
    problems: list[str] = []
    made: list[Selected] = []
    for table in tables:
        found = columns[table.relation_id]
        left_out = set()
        for pattern in wanted.exclude_columns:
            names = {name for name in (*found.numbers, *found.generated) if pattern.matches(table.schema, table.name, name)}
            used |= {pattern.text} if names else set()
            left_out |= names
        if not left_out:
            made.append(table)
            continue
        problems += _problems(table, found, left_out, wanted)
        kept = {name: number for name, number in found.numbers.items() if name not in left_out}
        made.append(replace(table, columns=kept))
    problems += [
        f"--exclude-column {each.text} matches no column of a published table"
        for each in wanted.exclude_columns
        if each.text not in used
    ]
    if problems:
        raise InitError(
            f"columns can't be left out: {few(problems)}",
            hint="names are taken as they are; --mask of cdcpipe-spark run hides a column that has to be published",
        )
    return tuple(made)


def _problems(table: Selected, found: _Columns, left_out: set[str], wanted: NewPublication) -> list[str]:
    name = table.full_name
    problems = [f"{name}.{column} is part of a key" for column in sorted(left_out & found.keys)]
    if table.is_partitioned and not wanted.via_root:
        problems.append(f"{name} is partitioned, and has a column list only with --via-root")
    if table.is_refused and wanted.keyless == INSERT_ONLY:
        return problems  # its updates and deletes are not published
    problems += [
        f"{name}.{column} is a generated column of the replica identity, which the column list would lack (REPLICA IDENTITY USING"
        " INDEX can name another key)"
        for column in sorted(found.generated_in_identity - left_out)
    ]
    if found.is_full or (table.lacking and wanted.keyless == FULL):
        problems.append(f"{name} has REPLICA IDENTITY FULL, which needs all columns")
    return problems


def _columns(connection: Connection, tables: Sequence[Selected]) -> Mapping[int, _Columns]:
    rows = connection.execute(_COLUMNS.format(oids=", ".join(str(each.relation_id) for each in tables) or "NULL"))
    found = {}
    for oid, columns, keys, is_full, generated in rows:
        described = json.loads(columns or "[]")
        found[int(oid or 0)] = _Columns(
            numbers={name: number for name, number, is_generated in described if not is_generated},
            generated=frozenset(name for name, _, is_generated in described if is_generated),
            keys=frozenset(json.loads(keys or "[]")),
            generated_in_identity=frozenset(json.loads(generated or "[]")),
            is_full=is_full == "t",
        )
    return found
