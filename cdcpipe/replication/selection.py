"""Finds the tables of a publication that has to be created, and what keeps the server from publishing them. It locks no table.

    selection = select(connection, NewPublication(...))     # raises InitError for a pattern that matches no table
    check_owned(connection, selection)
    check_identities("shop", selection, REFUSE)

- A pattern with ``*``, and a list that is made because some tables are left out, have neither partitions, which come and go with
  their table, nor tables that belong to an extension. A name without ``*`` finds both.
- A name without ``*`` also takes the tables that inherit from it, as CREATE PUBLICATION does.
- FOR ALL TABLES has what the server says: every table that is logged and not temporary, also those of extensions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cdcpipe.catalog_sql import (
    FIRST_USER_OID,
    GENERATED_COLUMNS_SINCE,
    generated_of_identity,
    has_identity,
    has_key_without_generated,
    leaves_of,
)
from cdcpipe.errors import InitError
from cdcpipe.libpq.connection import Connection
from cdcpipe.publishing import FULL, INSERT_ONLY, NewPublication, TablePattern
from cdcpipe.replication.column_lists import without_columns
from cdcpipe.replication.selected import Selected, Selection
from cdcpipe.units import few

__all__ = ["check_identities", "check_owned", "select"]

_CANDIDATES: Final = f"""
SELECT c.oid::int8, n.nspname, c.relname, c.relkind, c.relpersistence, c.relispartition,
    (SELECT x.extname FROM pg_catalog.pg_depend d JOIN pg_catalog.pg_extension x ON x.oid = d.refobjid
     WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid AND d.deptype = 'e'
     AND d.refclassid = 'pg_catalog.pg_extension'::pg_catalog.regclass),
    (SELECT json_agg(i.inhparent::int8) FROM pg_catalog.pg_inherits i WHERE i.inhrelid = c.oid)::text
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND c.relpersistence <> 't' AND c.oid >= {FIRST_USER_OID} ORDER BY 2, 3
"""

_FACTS: Final = f"""
SELECT c.oid::int8, pg_catalog.pg_has_role(c.relowner, 'USAGE'), leaf.count, leaf.lacking::text, leaf.generated::text,
    leaf.has_better_key, c.relkind = 'r' AND c.relhassubclass
FROM pg_catalog.pg_class c CROSS JOIN LATERAL (
    SELECT count(*) AS count, json_agg(l.name ORDER BY l.nspname, l.relname) FILTER (WHERE NOT l.has_identity) AS lacking,
        json_agg(l.name ORDER BY l.nspname, l.relname) FILTER (WHERE l.has_generated) AS generated,
        bool_or(l.has_identity AND l.has_generated AND l.has_other_key) AS has_better_key
    FROM (
        SELECT s.nspname, l.relname, json_build_array(s.nspname, l.relname) AS name,
            l.relpersistence <> 'p' OR {has_identity("l")} AS has_identity,
            l.relpersistence = 'p' AND {{generated_matter}} AND EXISTS {generated_of_identity("l")} AS has_generated,
            {has_key_without_generated("l")} AS has_other_key
        FROM pg_catalog.pg_class l JOIN pg_catalog.pg_namespace s ON s.oid = l.relnamespace
        WHERE l.oid IN {leaves_of("c.oid")}) l) leaf
WHERE c.oid IN ({{oids}})
"""

_HOW_NAMES_ARE_READ: Final = (
    "names are taken as they are: upper and lower case differ, * stands for any characters, and a name with * finds neither"
    " partitions nor tables of extensions"
)

_KINDS: Final = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A relation that a pattern may match."""

    relation_id: int
    schema: str
    name: str
    kind: str
    is_unlogged: bool
    is_partition: bool
    extension: str | None
    parents: tuple[int, ...]

    @property
    def is_publishable(self) -> bool:
        return self.kind in ("r", "p") and not self.is_unlogged

    @property
    def is_listed(self) -> bool:
        """Whether a pattern with ``*`` finds it."""
        return self.is_publishable and not self.is_partition and self.extension is None

    @property
    def obstacle(self) -> str:
        """Why it is not found, with its name."""
        reason = _KINDS.get(self.kind) or ("unlogged" if self.is_unlogged else None)
        reason = reason or ("a partition" if self.is_partition else f"a table of the extension {self.extension}")
        return f"{self.schema}.{self.name} is {reason}"


def select(connection: Connection, wanted: NewPublication) -> Selection:
    """Return the tables that ``wanted`` means now. Raises InitError for a pattern that matches none, or if none is left."""
    candidates = [
        _Candidate(int(oid or 0), schema or "", name or "", kind or "", persistence == "u", is_partition == "t", extension, parents)
        for oid, schema, name, kind, persistence, is_partition, extension, found in connection.execute(_CANDIDATES)
        for parents in [tuple(json.loads(found or "[]"))]
    ]
    if wanted.is_all:
        chosen = [each for each in candidates if each.is_publishable and not each.is_partition]
    else:
        chosen = _choose(candidates, wanted)
    tables = _facts(connection, chosen)
    if wanted.exclude_columns:
        tables = without_columns(connection, tables, wanted)
    return Selection(tables, wanted.is_all)


def _choose(candidates: Sequence[_Candidate], wanted: NewPublication) -> list[_Candidate]:
    problems: list[str] = []
    named = set() if wanted.tables else {each.relation_id for each in candidates if each.is_listed}
    for pattern in wanted.tables:
        found = _matches(candidates, pattern, "--table", problems)
        named |= _with_heirs(candidates, found) if pattern.is_exact else found
    removed: set[int] = set()
    for pattern in wanted.exclude:
        removed |= _matches(candidates, pattern, "--exclude-table", problems)
    if problems:
        raise InitError("; ".join(problems), hint=_HOW_NAMES_ARE_READ)
    by_id = {each.relation_id: each for each in candidates}
    for relation_id in removed - named:
        root = _root(by_id, by_id[relation_id], named - removed)
        if root is not None:
            raise InitError(
                f"--exclude-table can't leave out {by_id[relation_id].obstacle}: it is published with {root.schema}.{root.name}",
                hint="name the other partitions one by one (--table), and leave out the table itself",
            )
    chosen = [each for each in candidates if each.relation_id in named - removed]
    if not chosen:
        raise InitError("no table is left to publish", hint="change --table and --exclude-table: every table is excluded")
    return chosen


def _matches(candidates: Sequence[_Candidate], pattern: TablePattern, option: str, problems: list[str]) -> set[int]:
    """Return the OIDs of what a pattern finds; if that is nothing, add to the problems."""
    named = [each for each in candidates if pattern.matches(each.schema, each.name)]
    found = {each.relation_id for each in named if (each.is_publishable if pattern.is_exact else each.is_listed)}
    if not found:
        obstacles = f" that it can publish: {few([each.obstacle for each in named])}" if named else ""
        problems.append(f"{option} {pattern.text} matches no table{obstacles}")
    return found


def _with_heirs(candidates: Sequence[_Candidate], of: Iterable[int]) -> set[int]:
    """Return these tables and the ordinary tables that inherit from them, at any depth."""
    found = set(of)
    while more := {
        each.relation_id
        for each in candidates
        if each.is_publishable and not each.is_partition and each.relation_id not in found and found.intersection(each.parents)
    }:
        found |= more
    return found


def _root(by_id: dict[int, _Candidate], partition: _Candidate, published: set[int]) -> _Candidate | None:
    """Return the nearest published table of which this is a partition."""
    at: _Candidate | None = partition
    while at is not None and at.is_partition and at.parents:
        at = by_id.get(at.parents[0])
        if at is not None and at.relation_id in published:
            return at
    return None


def _facts(connection: Connection, chosen: Sequence[_Candidate]) -> tuple[Selected, ...]:
    if not chosen:
        return ()
    oids = ", ".join(str(each.relation_id) for each in chosen)
    generated_matter = connection.server_version >= GENERATED_COLUMNS_SINCE
    rows = connection.execute(_FACTS.format(oids=oids, generated_matter=generated_matter))
    facts = {int(oid or 0): found for oid, *found in rows}
    return tuple(
        Selected(
            relation_id=each.relation_id,
            schema=each.schema,
            name=each.name,
            is_partitioned=each.kind == "p",
            partition_count=int(count or 0) if each.kind == "p" else 0,
            has_heirs=has_heirs == "t",
            is_owned=is_owned == "t",
            lacking=tuple((schema, name) for schema, name in json.loads(lacking or "[]")),
            generated=tuple((schema, name) for schema, name in json.loads(generated or "[]")),
            has_better_key=has_better_key == "t",
        )
        for each in chosen
        if each.relation_id in facts  # it was dropped between the two questions
        for is_owned, count, lacking, generated, has_better_key, has_heirs in [facts[each.relation_id]]
    )


def check_owned(connection: Connection, selection: Selection) -> None:
    """Raise InitError that names the tables that this user can't add to a publication, because others own them."""
    foreign = [each.full_name for each in selection.tables if not each.is_owned]
    if foreign:
        user = connection.execute("SELECT current_user")[0][0]
        raise InitError(
            f"user {user!r} does not own {few(foreign)}, and only the owner of a table can publish or alter it",
            hint="let the owner or a superuser create the publication, make this user a member of the owner's role,"
            " or leave the tables out (--exclude-table)",
        )


def check_identities(name: str, selection: Selection, keyless: str) -> None:
    """Raise InitError if the server would refuse UPDATE and DELETE on some tables once they are published with ``--keyless``.

    With insert-only it refuses none. But a table with a key has a replica in Spark, which would then never get them.
    """
    if keyless == INSERT_ONLY:
        if selection.with_better_key:
            raise InitError(
                f"publication {name!r} is not created, because --keyless insert-only would publish only INSERT and TRUNCATE of"
                " tables that have a primary key, but another replica identity, with generated columns (REPLICA IDENTITY FULL has"
                f" all columns): {few(selection.with_better_key)}",
                hint="let the primary key be their replica identity (ALTER TABLE … REPLICA IDENTITY DEFAULT); or leave them out"
                " (--exclude-table SCHEMA.NAME, with * for any characters)",
            )
        return
    refusal = f"publication {name!r} is not created, because the server would then refuse every UPDATE and DELETE on tables"
    with_full = [each.full_name for each in selection.tables if each.generated]
    if generated := with_full if keyless == FULL else selection.with_generated_identity:
        raise InitError(
            f"{refusal} that have generated columns in their replica identity, which the publication does not have"
            f" (REPLICA IDENTITY FULL has all columns): {few(generated)}",
            hint="let another key without generated columns be their replica identity (ALTER TABLE … REPLICA IDENTITY DEFAULT"
            " for the primary key, or USING INDEX for a unique index); or leave them out (--exclude-table SCHEMA.NAME, with * for"
            " any characters); or, if they have no such key, publish their INSERT and TRUNCATE alone (--keyless insert-only)",
        )
    if selection.lacking and keyless != FULL:
        without_full = [each.full_name for each in selection.tables if each.lacking and not each.takes_full]
        exception = f", but not on those with generated columns: {few(without_full)}" if without_full else ""
        raise InitError(
            f"{refusal} that have neither a primary key (one that is not deferrable) nor another replica identity:"
            f" {few(selection.lacking)}",
            hint="give them a primary key; or leave them out (--exclude-table SCHEMA.NAME, with * for any characters), publish"
            " their INSERT and TRUNCATE alone (--keyless insert-only), or have REPLICA IDENTITY FULL set on them (--keyless full)"
            f"{exception}",
        )
