"""How a published table gets a replica identity with which the server takes UPDATE and DELETE: SQL, or words. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cdcpipe.catalog_sql import GENERATED_COLUMNS_SINCE
from cdcpipe.doctor.facts import Facts, Partition, Restriction, Table
from cdcpipe.sql import quote_identifier, quote_table

__all__ = ["NEED_IDENTITY", "first_publication", "has_list", "identify", "needs_identity", "takes_full", "without_generated"]

NEED_IDENTITY: Final = ("update", "delete")
"""The operations for which each row needs a replica identity."""


def identify(facts: Facts, table: Table | None, partition: Partition, *, in_list: bool) -> str:
    """Return the SQL for a replica identity; words if it can't be FULL, because there need be no index that fits.

    With ``in_list`` it has to consist of columns of a column list. FULL clashes with a column list, and dropping the list would
    publish more columns. FULL also clashes with generated columns that are not published.
    """
    name = quote_table(partition.schema, partition.name)
    if in_list:
        return f"for {name} name a unique index that has only columns of the column list, by REPLICA IDENTITY USING INDEX"
    if table is not None and not takes_full(facts, table, partition):
        return f"for {name} name a unique index without generated columns, by REPLICA IDENTITY USING INDEX"
    return f"ALTER TABLE {name} REPLICA IDENTITY FULL"


def takes_full(facts: Facts, table: Table, partition: Partition) -> bool:
    """Tell whether the server takes UPDATE and DELETE with REPLICA IDENTITY FULL: since 18 only if all columns are published."""
    published = {column.name for column in table.published.columns}
    return facts.server.version < GENERATED_COLUMNS_SINCE or published.issuperset(partition.generated)


def has_list(facts: Facts, table: Table) -> bool:
    """Tell whether a publication of UPDATE or DELETE has a column list of the table."""
    name = (table.published.schema, table.published.name)
    return any(
        (each.schema, each.name) == name and needs_identity(each) and each.columns is not None for each in facts.restrictions
    )


def needs_identity(found: Restriction) -> bool:
    """Tell whether the publication has UPDATE or DELETE."""
    return bool(found.operations.intersection(NEED_IDENTITY))


def without_generated(facts: Facts, table: Table, partition: Partition, missing: Sequence[str]) -> str:
    """Return how generated columns that are ``missing`` in the publication get into it, or out of the replica identity."""
    name, key = quote_table(partition.schema, partition.name), table.published.primary_key
    if key and partition.replica_identity != "d" and not set(key).intersection(partition.generated):
        other = f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT"
    else:
        other = f"another replica identity: ALTER TABLE {name} REPLICA IDENTITY USING INDEX …"
    if facts.publications and not set(missing).intersection(partition.virtual):
        return f"ALTER PUBLICATION {first_publication(facts)} SET (publish_generated_columns = stored), or {other}"
    return other


def first_publication(facts: Facts) -> str:
    """Return the name, in quotes, of a publication that is there, otherwise of one that is asked for."""
    names = [publication.name for publication in facts.publications] or list(facts.asked.publications)
    return quote_identifier(names[0]) if names else "…"
