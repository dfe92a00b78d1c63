"""Facts from which one sees that a table's rows have changed without a change in the stream.

`table_parts` asks for them now; who compares two answers (spark_sink/snapshot/two_looks.py) finds

- a table that has come into a publication, or has left it and come back: other objects publish it (``published_by``);
- a table some of whose changes were not published for a while (``operations``);
- a table some of whose rows, or columns, were not published for a while (``filters``, ``unpublished``);
- a table that ALTER TABLE has rewritten: a part has another file and another ``definition``. (VACUUM FULL, CLUSTER and TRUNCATE
  change only the file, and ALTER TABLE without a rewrite changes only the definition. One case looks like a rewrite by ALTER TABLE:
  ADD COLUMN … DEFAULT left the default out of the older rows. The first VACUUM FULL or CLUSTER afterwards puts it there, and
  changes the column's row in pg_attribute.)
- a partition whose rows the stream lacks: a new part with rows (``has_rows``) that was attached, or may have been unlogged; or a
  part that was unlogged (file 0) in the first answer, and is not any more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cdcpipe.catalog_sql import (
    DIGESTS,
    SCHEMAS_LISTS_FILTERS_SINCE,
    digest_of,
    leaves_of,
    not_excepted,
    published,
    without_exceptions,
)
from cdcpipe.libpq.connection import Connection
from cdcpipe.sql import quote_literal

__all__ = ["Part", "TableParts", "table_parts"]

_TIMEOUT_S: Final = 150.0
"""10,000 relations take about 2 s. Those who ask (spark_sink/client/process.py) wait for 180 s."""

_MOST_COMMANDS_OF_CREATE: Final = 4
"""CREATE TABLE … PARTITION OF inserts the rows of pg_attribute and pg_inherits within few command ids (2 or 3 were seen). CREATE
TABLE and then ATTACH PARTITION in one transaction take at least 5."""


@dataclass(frozen=True, slots=True)
class Part:
    """A relation that holds rows of a table: a leaf partition, or the table itself.

    - ``file``: the number of its file, which changes when the rows are written anew; 0 while it is unlogged;
    - ``definition``: a digest that changes when ALTER TABLE changes a column, or VACUUM FULL puts its default in older rows;
    - ``is_attached``: whether ATTACH PARTITION has made it a part, instead of CREATE TABLE … PARTITION OF;
    - ``has_rows``: whether an attached part has rows, or had some. So for a partition that does not have its first file any more:
      it may have been unlogged. None for other parts.
    """

    relation_id: int
    file: int
    definition: str
    is_attached: bool
    has_rows: bool | None


@dataclass(frozen=True, slots=True)
class TableParts:
    """A published table's parts, and how it is published.

    - ``published_by``: the OIDs of what publishes it: a publication, a schema or the table in one;
    - ``operations``: which changes are published, of ``insert``, ``update``, ``delete`` and ``truncate``;
    - ``filters``: digests of the row filters of each operation, as `cdcpipe.catalog_sql.DIGESTS` tells;
    - ``unpublished``: the numbers of the columns that it has, or had, and that are not published. A number that no longer is among
      them is not that of a new column.
    """

    published_by: tuple[int, ...]
    operations: tuple[str, ...]
    filters: tuple[str, ...]
    unpublished: tuple[int, ...]
    parts: tuple[Part, ...]


_ATTACHED: Final = f"""EXISTS (
    SELECT FROM (SELECT l.oid AS relid UNION SELECT up.relid FROM pg_catalog.pg_partition_ancestors(l.oid) up) up
    JOIN pg_catalog.pg_inherits i ON i.inhrelid = up.relid
    JOIN pg_catalog.pg_attribute born ON born.attrelid = up.relid AND born.attnum = -1
    WHERE l.relispartition AND (i.xmin <> born.xmin
        OR i.cmin::pg_catalog.text::pg_catalog.int8 - born.cmin::pg_catalog.text::pg_catalog.int8 > {_MOST_COMMANDS_OF_CREATE}))"""
"""The rows of a table's system columns are written when it is created, and never again."""

_COLUMN_ROWS: Final = "string_agg(a.attnum || ':' || a.xmin::text, ',' ORDER BY a.attnum)"
"""Each row of pg_attribute, and the transaction that has written it."""

_MAY_HAVE_OTHER_ROWS: Final = "made.attached OR (l.relispartition AND l.relpersistence = 'p' AND l.relfilenode <> l.oid)"
"""Until its rows are written anew, a table's file has the table's OID for its number."""

_HAS_ROWS: Final = """l.relpages > 0 OR l.reltuples > 0 OR pg_catalog.pg_stat_get_tuples_inserted(l.oid) > 0
    OR EXISTS (SELECT FROM pg_catalog.pg_locks k WHERE k.relation = l.oid AND k.mode = 'AccessExclusiveLock')
    OR pg_catalog.pg_relation_size(l.oid) > 0"""
"""Only the last term opens the relation. It is reached only for a partition that was empty so far, and is not locked."""


def table_parts(connection: Connection, names: Sequence[str]) -> Mapping[int, TableParts]:
    """Return the parts of the publications' tables, by the tables' OIDs. Raises ServerError after 150 s."""
    publications = ", ".join(map(quote_literal, names))
    schemas = (
        " UNION SELECT s.oid FROM pg_catalog.pg_publication_namespace s JOIN pub ON pub.oid = s.pnpubid"
        " JOIN pg_catalog.pg_class x ON x.relnamespace = s.pnnspid JOIN self ON self.relid = x.oid"
    )
    rows = connection.execute(
        f"SELECT w.relation_id::int8::text, (WITH pub AS ("
        f"  SELECT * FROM pg_catalog.pg_publication WHERE pubname IN ({publications})),"
        " self AS (SELECT w.relation_id AS relid UNION SELECT up.relid FROM pg_catalog.pg_partition_ancestors(w.relation_id) up)"
        " SELECT json_agg(m.oid::int8 ORDER BY m.oid) FROM ("
        "  SELECT r.oid FROM pg_catalog.pg_publication_rel r JOIN pub ON pub.oid = r.prpubid JOIN self ON self.relid = r.prrelid"
        f"  {without_exceptions('r', connection.server_version)}"
        "  UNION SELECT pub.oid FROM pub WHERE pub.puballtables"
        f"  {not_excepted('pub.oid', 'w.relation_id', connection.server_version)}"
        f" {schemas if connection.server_version >= SCHEMAS_LISTS_FILTERS_SINCE else ''}) m)::text,"
        " (SELECT json_agg(json_build_array(l.oid::int8, CASE l.relpersistence WHEN 'p' THEN l.relfilenode::int8 ELSE 0 END,"
        f"   (SELECT {digest_of(_COLUMN_ROWS)} FROM pg_catalog.pg_attribute a"
        "    WHERE a.attrelid = l.oid AND a.attnum > 0),"
        f"  made.attached, CASE WHEN {_MAY_HAVE_OTHER_ROWS} THEN {_HAS_ROWS} END) ORDER BY l.oid)"
        f"  FROM pg_catalog.pg_class l CROSS JOIN LATERAL (SELECT {_ATTACHED} AS attached) made"
        f"  WHERE l.oid IN {leaves_of('w.relation_id')})::text,"
        " concat_ws(',', CASE WHEN w.has_inserts THEN 'insert' END, CASE WHEN w.has_updates THEN 'update' END,"
        "   CASE WHEN w.has_deletes THEN 'delete' END, CASE WHEN w.has_truncates THEN 'truncate' END),"
        " to_json(w.filters)::text,"
        # The numbers of dropped columns count: relnatts is the greatest number.
        " (SELECT json_agg(n ORDER BY n) FROM pg_catalog.pg_class c CROSS JOIN generate_series(1, c.relnatts::int4) AS n"
        "  WHERE c.oid = w.relation_id AND n <> ALL (w.numbers))::text"
        f" FROM {published(names, connection.server_version, filters=DIGESTS)} AS w",
        timeout_s=_TIMEOUT_S,
    )
    return {
        int(relation_id or 0): TableParts(
            tuple(json.loads(by or "[]")),
            tuple(operations.split(",")) if operations else (),
            tuple(json.loads(filters or "[]")),
            tuple(json.loads(unpublished or "[]")),
            tuple(Part(*part) for part in json.loads(parts or "[]")),
        )
        for relation_id, by, parts, operations, filters, unpublished in rows
    }
