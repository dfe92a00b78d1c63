"""Finds the tables that need a copy of their rows after captured DDL, because the stream does not have the rows. No I/O.

- A rewrite computes new values: a default for each row, or another type with USING. A cast without USING changes no value that the
  column's new type holds; changelog/versions.py looks at that.
- ATTACH PARTITION brings rows into a partitioned table. (DETACH PARTITION is no reason: the replica may be an archive.)
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from spark_sink.schema.ddl import Descriptions, TableDescription
    from spark_sink.schema.table import Table
    from spark_sink.source.ddl import Ddl

__all__ = ["tables_with_unknown_rows"]

_CAST_ALONE: Final = re.compile(r"\s*ALTER\s+TABLE\b(?!.*\bUSING\b)[^;]*;?\s*", re.IGNORECASE | re.DOTALL)
"""A statement that is one ALTER TABLE without USING. A function that it calls runs no such command."""


def tables_with_unknown_rows(ddl: Iterable[Ddl], descriptions: Descriptions) -> Iterator[tuple[Table, int, str]]:
    """Yield each table with the end LSN of the transaction since which it needs a copy, and the reason.

    ``descriptions`` has the messages of ``ddl``. Tables without a changelog may be among the results.
    """
    before: dict[int, TableDescription] = {}
    for each in ddl:
        message = each.message
        if message.rewritten is not None:
            table, reasons = message.rewritten
            if "default" in reasons:
                yield table, each.end_lsn, f"{message.tag} computed a default for each row"
            elif "type" in reasons and not _CAST_ALONE.fullmatch(message.statement or ""):
                yield table, each.end_lsn, f"{message.tag} computed the values of a column anew"
        for description in message.tables:
            relation_id = description.relation_id
            known = before.get(relation_id) or descriptions.in_force(relation_id, (each.end_lsn, -1))
            before[relation_id] = description
            is_altered = message.tag == "ALTER TABLE" and message.kind == "command"
            if is_altered and (known is None or known.partition_of != description.partition_of):
                for table in _ancestors(description.partition_of, descriptions, each.place):
                    yield table, each.end_lsn, f"{description.table} was attached to it"


def _ancestors(parent: tuple[int, Table] | None, descriptions: Descriptions, place: tuple[int, int]) -> Iterator[Table]:
    """Yield the table and those of which it is a partition itself."""
    seen: set[int] = set()
    while parent is not None and parent[0] not in seen:
        relation_id, table = parent
        seen.add(relation_id)
        yield table
        described = descriptions.in_force(relation_id, place)
        parent = None if described is None else described.partition_of
