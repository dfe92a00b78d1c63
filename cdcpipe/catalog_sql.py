"""SQL for PostgreSQL's catalogs that several modules share: which tables publications publish, which columns form a key.

None of this SQL opens a table. The view ``pg_publication_tables`` does since PostgreSQL 16 (in 15 if there is a row filter), and so
do functions like ``pg_partition_tree``, ``pg_relation_size`` and ``pg_get_expr``. They wait while another session holds ACCESS
EXCLUSIVE on the table (an open ALTER TABLE, VACUUM FULL, a prepared transaction with DDL). Logical decoding needs no such lock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Final

from cdcpipe.sql import quote_literal

__all__ = [
    "DIGESTS",
    "FIRST_USER_OID",
    "GENERATED_COLUMNS_SINCE",
    "SCHEMAS_LISTS_FILTERS_SINCE",
    "TEXTS",
    "digest_of",
    "generated_of_identity",
    "has_deferrable_key",
    "has_identity",
    "has_key_without_generated",
    "identity_of",
    "is_identity_index",
    "key_numbers",
    "leaves_of",
    "not_excepted",
    "parents_of",
    "primary_key_of",
    "published",
    "published_by_new",
    "without_exceptions",
]

SCHEMAS_LISTS_FILTERS_SINCE: Final = 150000
"""The first server version whose publications have schemas, column lists and row filters."""
GENERATED_COLUMNS_SINCE: Final = 180000
"""The first server version that can publish generated columns: stored ones. It refuses UPDATE and DELETE on a table if its replica
identity has a generated column that is not published. A virtual one, which this version has, too, never is."""
_EXCEPTIONS_SINCE: Final = 190000
"""The first server version with FOR ALL TABLES EXCEPT. Its exceptions are in pg_publication_rel, beside the published tables."""

FIRST_USER_OID: Final = 16384
"""Tables with a smaller OID were created by initdb. The server does not publish them."""

_PUBLISHED: Final = """(
WITH RECURSIVE publication AS (
    {publication}
), publishable AS (
    SELECT c.oid, c.relnamespace, c.relispartition FROM pg_catalog.pg_class c
    WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= {first_user_oid}
), member (publication, relation) AS (
    {named}
    UNION
    SELECT p.oid, c.oid FROM publication p
    JOIN publishable c ON p.puballtables AND NOT (p.pubviaroot AND c.relispartition) {exceptions}
    {schemas}
), expanded (publication, relation, kind, is_partition) AS (
    SELECT m.publication, c.oid, c.relkind, c.relispartition FROM member m JOIN pg_catalog.pg_class c ON c.oid = m.relation
    UNION
    SELECT e.publication, c.oid, c.relkind, c.relispartition
    FROM expanded e
    JOIN publication p ON p.oid = e.publication AND NOT p.pubviaroot
    JOIN pg_catalog.pg_inherits i ON i.inhparent = e.relation AND NOT i.inhdetachpending
    JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relkind <> 'f'
    WHERE e.kind = 'p'
), named AS (
    SELECT e.relation, e.is_partition, p.*, bool_or(p.pubinsert OR p.pubupdate) OVER (PARTITION BY e.relation) AS brings_rows
    FROM expanded e JOIN publication p ON p.oid = e.publication AND (p.pubviaroot OR e.kind <> 'p')
)
SELECT n.relation AS relation_id, bool_or(n.pubupdate) AS has_updates, bool_or(n.pubdelete) AS has_deletes,
    bool_or(n.pubinsert) AS has_inserts, bool_or(n.pubtruncate) AS has_truncates,
    coalesce(array_agg(DISTINCT a.attnum ORDER BY a.attnum) FILTER (WHERE a.attnum IS NOT NULL), '{{}}') AS numbers,
    bool_or({list} IS NOT NULL) AS has_list,
    {filters} AS filters
FROM named n {details}
LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = n.relation AND a.attnum > 0 AND NOT a.attisdropped
    AND CASE WHEN {list} IS NOT NULL THEN a.attnum = ANY ({list})
        ELSE a.attgenerated = '' OR (a.attgenerated = 's' AND n.has_generated) END
WHERE (NOT n.is_partition OR NOT EXISTS (
    SELECT FROM pg_catalog.pg_partition_ancestors(n.relation) up
    WHERE up.relid <> n.relation AND up.relid IN (SELECT relation FROM named))){only}
GROUP BY n.relation
)"""

_EXISTING: Final = """
    SELECT p.oid, p.puballtables, p.pubviaroot, p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate,
        {has_generated} AS has_generated
    FROM pg_catalog.pg_publication p WHERE p.pubname IN ({names})
"""
_EXISTING_NAMED: Final = (
    "SELECT r.prpubid, r.prrelid FROM pg_catalog.pg_publication_rel r JOIN publication p ON p.oid = r.prpubid{named_only}"
)

_NEW: Final = """
    SELECT 0::pg_catalog.oid AS oid, {all_tables} AS puballtables, {via_root} AS pubviaroot, {has_updates} AS pubupdate,
        {has_updates} AS pubdelete, true AS pubinsert, true AS pubtruncate,
        false AS has_generated
"""
_NEW_NAMED: Final = "SELECT 0::pg_catalog.oid, c.oid FROM publishable c WHERE c.oid IN ({relation_ids})"

_SCHEMAS: Final = """
    UNION
    SELECT s.pnpubid, c.oid
    FROM pg_catalog.pg_publication_namespace s
    JOIN publication p ON p.oid = s.pnpubid JOIN publishable c ON c.relnamespace = s.pnnspid
"""

_DETAILS: Final = """
LEFT JOIN {relations} r ON r.prpubid = n.oid AND r.prrelid = n.relation AND NOT EXISTS (
    SELECT FROM pg_catalog.pg_publication_namespace s JOIN pg_catalog.pg_class c ON c.relnamespace = s.pnnspid
    WHERE s.pnpubid = n.oid AND c.oid = n.relation)
"""

TEXTS, DIGESTS = "texts", "digests"
"""What `published` tells of row filters."""


def digest_of(text: str) -> str:
    """Return an expression for a digest of a text. It is no MD5, which a server in FIPS mode refuses to compute."""
    return f"encode(sha256(convert_to({text}, 'UTF8')), 'hex')"


# OFFSET 0 makes the server compute a digest once for each row, not for each column of the table. The digest leaves out the places
# that the parts of the expression had in the text of the command.
_WITH_DIGESTS: Final = f"""(
    SELECT *, {digest_of("regexp_replace(prqual::pg_catalog.text, ':location -?[0-9]+', '', 'g')")} AS digest
    FROM pg_catalog.pg_publication_rel OFFSET 0)"""

_FILTERS: Final = """CASE WHEN bool_or(r.prqual IS NULL) FILTER (WHERE {lifts}) THEN NULL
        ELSE array_agg(DISTINCT {each}) FILTER (WHERE {counts}) END"""
_NO_FILTERS: Final = "NULL::text[]"
_OF_ROWS: Final = "(n.pubinsert OR n.pubupdate OR NOT n.brings_rows)"
_TOLD_FILTERS: Final = {
    None: _NO_FILTERS,
    TEXTS: _FILTERS.format(
        lifts=_OF_ROWS, each="pg_catalog.pg_get_expr(r.prqual, r.prrelid)", counts=f"r.prqual IS NOT NULL AND {_OF_ROWS}"
    ),
    DIGESTS: " || ".join(
        _FILTERS.format(
            lifts=f"n.pub{operation}",
            each=f"'{operation} ' || r.digest",
            counts=f"n.pub{operation}",
        )
        for operation in ("insert", "update", "delete")
    ),
}
"""For each operation, the server asks the filters of the publications that publish it.

For `TEXTS`, INSERT and UPDATE count, which bring rows. If a table has neither, a copy still has rows. Their DELETE is published as
the filters say, so these count.
"""


_ONLY: Final = """
AND (SELECT m.nspname || '.' || c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace m ON m.oid = c.relnamespace
    WHERE c.oid = n.relation) IN ({names})"""


def without_exceptions(relation: str, server_version: int) -> str:
    """Return the condition, after AND, that a row of pg_publication_rel publishes its table. ``relation`` is its name in the query.

    Empty before PostgreSQL 19: each row does.
    """
    return f" AND NOT {relation}.prexcept" if server_version >= _EXCEPTIONS_SINCE else ""


def not_excepted(publication: str, relation: str, server_version: int) -> str:
    """Return the condition, after AND, that FOR ALL TABLES EXCEPT does not leave out a relation. Both are OIDs in the query.

    An exception is a whole table. That of a partitioned table stands for all its partitions. Empty before PostgreSQL 19.
    """
    if server_version < _EXCEPTIONS_SINCE:
        return ""
    return (
        f" AND NOT EXISTS (SELECT FROM pg_catalog.pg_publication_rel x WHERE x.prpubid = {publication} AND x.prexcept AND ("
        f"x.prrelid = {relation} OR x.prrelid IN (SELECT up.relid FROM pg_catalog.pg_partition_ancestors({relation}) up)))"
    )


def published(publications: Iterable[str], server_version: int, *, filters: str | None = None, only: Collection[str] = ()) -> str:
    """Return a subquery, in parentheses, with one row for each table that the stream of these publications describes.

    Its columns are:

    - ``relation_id``;
    - ``numbers``: the ``attnum`` of the published columns;
    - ``has_list``: whether a publication lists them, so that a new column is not published;
    - ``has_inserts``, ``has_updates``, ``has_deletes`` and ``has_truncates``: whether these are published;
    - ``filters``: NULL with the argument None. With `TEXTS` it has the row filters for INSERT and UPDATE (all, if neither is
      published): a row is published if it passes one of them, and NULL means that every row is published. Reading the text of a row
      filter needs a lock on its table. With `DIGESTS` it has digests of the filters, which need none: "OPERATION DIGEST" for each
      filter of INSERT, UPDATE and DELETE. An operation that a publication publishes without a filter has none. NULL means that no
      operation has one.

    ``only`` names the tables to return, as "schema.name"; empty for all. Nothing is asked, and so nothing locked, of the others.

    The rules are the server's:

    - A partitioned table appears as its leaf partitions. pg_publication_tables also lists those that are foreign tables, of which
      the stream has nothing; here they are left out.
    - With ``publish_via_partition_root`` the root appears instead of all its partitions, even those that another publication names.
    - A table in a published schema has no column list and no filter.
    - FOR ALL TABLES EXCEPT leaves out these tables, with all their partitions.
    """
    has_details = server_version >= SCHEMAS_LISTS_FILTERS_SINCE
    has_generated = "p.pubgencols = 's'" if server_version >= GENERATED_COLUMNS_SINCE else "false"
    relations = _WITH_DIGESTS if filters == DIGESTS else "pg_catalog.pg_publication_rel"
    return _PUBLISHED.format(
        publication=_EXISTING.format(names=", ".join(map(quote_literal, publications)), has_generated=has_generated),
        named=_EXISTING_NAMED.format(named_only=without_exceptions("r", server_version)),
        exceptions=not_excepted("p.oid", "c.oid", server_version),
        first_user_oid=FIRST_USER_OID,
        schemas=_SCHEMAS if has_details else "",
        details=_DETAILS.format(relations=relations) if has_details else "",
        list="r.prattrs" if has_details else "NULL::int2[]",
        filters=_TOLD_FILTERS[filters] if has_details else _NO_FILTERS,
        only=_ONLY.format(names=", ".join(map(quote_literal, only))) if only else "",
    )


def published_by_new(
    relation_ids: Iterable[int] | None,
    *,
    via_root: bool = False,
    has_updates: bool = True,
    column_lists: Mapping[int, Iterable[int]] = MappingProxyType({}),
) -> str:
    """Return a subquery as `published` does, for a publication that is still to be created.

    It is for the tables with these OIDs; None means all tables. Tables that can't be published are left out. ``has_updates``:
    updates and deletes are published. ``column_lists`` has the numbers of the published columns of the tables that get a list.
    """
    lists = "".join(
        f" WHEN {relation_id} THEN '{{{','.join(map(str, numbers))}}}'::int2[]" for relation_id, numbers in column_lists.items()
    )
    return _PUBLISHED.format(
        publication=_NEW.format(all_tables=relation_ids is None, via_root=via_root, has_updates=has_updates),
        named=_NEW_NAMED.format(relation_ids=", ".join(map(str, relation_ids or ())) or "NULL"),
        exceptions="",
        first_user_oid=FIRST_USER_OID,
        schemas="",
        details="",
        list=f"CASE n.relation::int8{lists} END" if lists else "NULL::int2[]",
        filters=_NO_FILTERS,
        only="",
    )


def leaves_of(relation: str) -> str:
    """Return a subquery, in parentheses, for the ``oid`` of the relations that hold the rows.

    These are the leaf partitions, or the table itself if it is not partitioned.
    """
    return (
        "(WITH RECURSIVE part (oid, kind) AS ("
        f" SELECT node.oid, node.relkind FROM pg_catalog.pg_class node WHERE node.oid = {relation}"
        " UNION ALL SELECT node.oid, node.relkind FROM part"
        " JOIN pg_catalog.pg_inherits edge ON edge.inhparent = part.oid AND NOT edge.inhdetachpending"
        " JOIN pg_catalog.pg_class node ON node.oid = edge.inhrelid WHERE part.kind = 'p')"
        " SELECT oid FROM part WHERE kind = 'r')"
    )


def parents_of(relation: str) -> str:
    """Return an expression for the tables that a relation is a partition of, or inherits from, at any depth.

    They are a JSON array of pairs of schema and name, which is NULL if there are none. A partition that is being detached counts:
    its rows still were those of the root.
    """
    return (
        "(WITH RECURSIVE up (oid) AS ("
        f" SELECT edge.inhparent FROM pg_catalog.pg_inherits edge WHERE edge.inhrelid = {relation}"
        " UNION SELECT edge.inhparent FROM up JOIN pg_catalog.pg_inherits edge ON edge.inhrelid = up.oid)"
        " SELECT json_agg(json_build_array(place.nspname, parent.relname) ORDER BY place.nspname, parent.relname)"
        " FROM up JOIN pg_catalog.pg_class parent ON parent.oid = up.oid"
        " JOIN pg_catalog.pg_namespace place ON place.oid = parent.relnamespace)"
    )


def key_numbers(index: str) -> str:
    """Return an expression for the ``attnum`` of an index's key columns; ``index`` is the alias of its row in pg_index.

    ``indkey`` lists the INCLUDE columns after the key columns. They are not part of the key.
    """
    return f"({index}.indkey::int2[])[0:{index}.indnkeyatts - 1]"


def primary_key_of(relation: str) -> str:
    """Return an expression for the columns of a table's primary key, in order, as a JSON array; NULL if the table has none.

    A deferrable primary key does not count, because within a transaction two rows may have the same value.
    """
    return _columns_of_index(f"i.indrelid = {relation} AND i.indisprimary AND i.indimmediate")


def identity_of(relation: str) -> str:
    """Return an expression for the names of the columns of the replica identity, as a JSON array.

    It is NULL if there is no identity, and an empty array with REPLICA IDENTITY FULL. ``relation`` is an alias of pg_class.
    """
    columns = _columns_of_index(is_identity_index("i", relation))
    return f"CASE {relation}.relreplident WHEN 'f' THEN '[]'::json ELSE {columns} END"


def _columns_of_index(condition: str) -> str:
    """Return an expression for the names of an index's key columns, as a JSON array.

    The index, with the alias ``i``, is the one that meets the condition.
    """
    return (
        "(SELECT json_agg(a.attname ORDER BY k.position) FROM pg_catalog.pg_index i"
        f" CROSS JOIN LATERAL unnest({key_numbers('i')}) WITH ORDINALITY AS k (attnum, position)"
        " JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum"
        f" WHERE {condition})"
    )


def has_deferrable_key(relation: str) -> str:
    """Return a condition that is true if the table's primary key is deferrable."""
    return f"EXISTS (SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = {relation} AND i.indisprimary AND NOT i.indimmediate)"


def is_identity_index(index: str, relation: str) -> str:
    """Return a condition that is true if the index is its table's replica identity.

    The arguments are aliases of pg_index and pg_class.
    """
    return (
        f"{index}.indrelid = {relation}.oid AND {index}.indisvalid AND {index}.indimmediate AND CASE {relation}.relreplident"
        f" WHEN 'd' THEN {index}.indisprimary WHEN 'i' THEN {index}.indisreplident ELSE false END"
    )


def generated_of_identity(relation: str) -> str:
    """Return a subquery, in parentheses, for the ``attname`` of the generated columns in a table's replica identity.

    They are all its generated columns with REPLICA IDENTITY FULL, and also without a replica identity: FULL would have them.
    ``relation`` is an alias of pg_class.
    """
    return (
        "(SELECT g.attname FROM pg_catalog.pg_attribute g"
        f" WHERE g.attrelid = {relation}.oid AND g.attnum > 0 AND g.attgenerated <> ''"
        f" AND NOT EXISTS (SELECT FROM pg_catalog.pg_index i WHERE {is_identity_index('i', relation)}"
        f" AND g.attnum <> ALL ({key_numbers('i')})))"
    )


def has_identity(relation: str) -> str:
    """Return a condition that is true if each row of the table has a replica identity; ``relation`` is an alias of pg_class."""
    return f"({relation}.relreplident = 'f' OR EXISTS (SELECT FROM pg_catalog.pg_index i WHERE {is_identity_index('i', relation)}))"


def has_key_without_generated(relation: str) -> str:
    """Return a condition that is true if the table has a primary key that is not deferrable, and without generated columns."""
    return (
        f"EXISTS (SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = {relation}.oid AND i.indisprimary AND i.indimmediate"
        f" AND NOT EXISTS (SELECT FROM pg_catalog.pg_attribute g WHERE g.attrelid = {relation}.oid AND g.attgenerated <> ''"
        f" AND g.attnum = ANY ({key_numbers('i')})))"
    )
