"""Finds the tables that need a copy of their rows after captured DDL, because the stream does not have the rows. No I/O.

- A rewrite computes new values: a default for each row, or another type. A cast without USING is no reason if it is known to keep
  the values (`keeps_values`), or of a column that is hashed, the texts. changelog/versions.py compares Spark's types.
- SET LOGGED: the stream does not have what was changed while the table was unlogged.
- ALTER TYPE that renames an enum's value, or changes the attributes of a composite type: old values have another text then.
- ATTACH PARTITION brings rows into a partitioned table. (DETACH PARTITION is no reason: the replica may be an archive.)

A partitioned table that is published as one table has its partitions' rows. PostgreSQL rewrites partitions, never the root, which
has no rows of its own. So what is unknown of a partition is unknown of the tables of which it is a partition.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from cdcpipe.masks import HASH, NO_MASKS
from spark_sink.schema.casts import keeps_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from cdcpipe.masks import Masks
    from spark_sink.schema.ddl import Descriptions
    from spark_sink.schema.ddl_message import DdlMessage, TableDescription
    from spark_sink.schema.names import Names
    from spark_sink.schema.table import Place, Table
    from spark_sink.source.ddl import Ddl

__all__ = ["ALTER_TYPE", "changes_texts", "tables_with_unknown_rows"]

ALTER_TYPE: Final = "ALTER TYPE"

_CAST_ALONE: Final = re.compile(r"\s*ALTER\s+TABLE\b(?!.*\bUSING\b)[^;]*;?\s*", re.IGNORECASE | re.DOTALL)
"""A statement that is one ALTER TABLE without USING. A function that it calls runs no such command."""
_NO_ATTACH: Final = re.compile(r"\s*ALTER\s+TABLE\b(?!.*\bATTACH\b)[^;]*;?\s*", re.IGNORECASE | re.DOTALL)
"""The same without ATTACH."""

_IDENTIFIER: Final = r'(?:"(?:[^"]|"")*"|[^\W\d][\w$]*)'
_SAME_TEXTS: Final = re.compile(
    rf"\s*ALTER\s+TYPE\s+{_IDENTIFIER}(?:\s*\.\s*{_IDENTIFIER})*\s+"
    r"(ADD\s+VALUE|RENAME\s+TO|OWNER\s+TO|SET\s+SCHEMA)\b[^;]*;?\s*",
    re.IGNORECASE | re.DOTALL,
)
"""A statement that is one ALTER TYPE after which all values have the texts that they had.

The words stand behind the type's name. Elsewhere they may be those of a label: RENAME VALUE 'add value' TO 'add_value'.
"""
_CUT_BYTES: Final = 10_000
"""The event triggers cut a longer text to as many characters. (With SQL_ASCII a character is a byte.)"""


def tables_with_unknown_rows(
    ddl: Sequence[Ddl],
    descriptions: Descriptions,
    names: Names,
    tables_with: Callable[[frozenset[int], Place, Names], Iterable[Table]],
    masks: Masks = NO_MASKS,
) -> Iterator[tuple[Table, int, str]]:
    """Yield each table with the end LSN of the transaction since which it needs a copy, and the reason.

    ``descriptions`` has the messages of ``ddl``, ``names`` the names that they have given. ``tables_with`` is
    `SchemaHistory.tables_with`. Tables without a changelog may be among the results.
    """
    yield from dict.fromkeys(  # each of a thousand partitions may have the same reason for the root
        (names.shown(names.home(relation_id, name, each.place)), each.end_lsn, reason)
        for each, relation_id, name, reason in _names_with_unknown_rows(ddl, descriptions, masks)
    )
    for each in ddl:
        message = each.message
        if changes_texts(message):
            for home in tables_with(message.types, each.place, names):
                yield names.shown(home), each.end_lsn, "ALTER TYPE changed the texts of values"


def changes_texts(message: DdlMessage) -> bool:
    """Tell whether old values of the message's types may have other texts since its command."""
    return message.tag == ALTER_TYPE and bool(message.types) and not _is(_SAME_TEXTS, message.statement)


def _names_with_unknown_rows(ddl: Sequence[Ddl], descriptions: Descriptions, masks: Masks) -> Iterator[tuple[Ddl, int, Table, str]]:
    """Yield each message with the OID and the name of a table, and the reason."""
    before: dict[int, TableDescription | None] = {}

    def known_before(relation_id: int, lsn: int) -> TableDescription | None:
        return before[relation_id] if relation_id in before else descriptions.in_force(relation_id, (lsn, -1))

    for behind, each in enumerate(ddl, 1):
        message = each.message
        if message.rewritten is not None:
            relation_id, table, _ = message.rewritten
            steps = {relation_id: (known_before(relation_id, each.end_lsn), _next(relation_id, ddl[behind:]))}
            tables = {relation_id: table}
            for described in steps[relation_id]:
                tables |= _ancestors(None if described is None else described.partition_of, descriptions, each.place)
            for number, name in tables.items():
                steps[number] = known_before(number, each.end_lsn), _next(number, ddl[behind:])
                # A partition's columns are those of the whole table, under other numbers.
                is_kept = any(_keeps_values(*steps[of], name, masks) for of in (number, relation_id))
                reason = _why_rewritten(message, is_kept=is_kept, partition=None if number == relation_id else table)
                if reason is not None:
                    yield each, number, name, reason
        for description in message.tables:
            relation_id = description.relation_id
            known = known_before(relation_id, each.end_lsn)
            is_used = descriptions.in_force(relation_id, each.place) is not None
            before[relation_id] = description if is_used else None  # one that is older than its place tells nothing of what follows
            is_altered = message.tag == "ALTER TABLE" and message.kind == "command"
            may_be_attached = not _is(_NO_ATTACH, message.statement)
            if is_altered and (may_be_attached if known is None else _parent(known) != _parent(description)):
                for number, table in _ancestors(description.partition_of, descriptions, each.place):
                    yield each, number, table, f"{description.table} was attached to it"


def _why_rewritten(message: DdlMessage, *, is_kept: bool, partition: Table | None) -> str | None:
    """Return why a table needs a copy after a rewrite of its rows, or of those of a partition of it; None if it needs none.

    ``is_kept`` tells whether a cast without USING keeps the values.
    """
    reasons = () if message.rewritten is None else message.rewritten[2]
    if "default" in reasons:
        return f"{message.tag} computed a default for each row"
    if "type" in reasons and not (is_kept and _is(_CAST_ALONE, message.statement)):
        return f"{message.tag} computed the values of a column anew"
    if "persistence" in reasons:
        what = "it" if partition is None else f"its partition {partition}"
        return f"{message.tag} made {what} logged: what was changed before is not in the stream"
    return None


def _is(pattern: re.Pattern[str], statement: str | None) -> bool:
    """Tell whether a whole statement is of the pattern's form. Of a text that may be cut, nobody knows what its end was."""
    return statement is not None and len(statement.encode()) < _CUT_BYTES and pattern.fullmatch(statement) is not None


def _next(relation_id: int, ddl: Iterable[Ddl]) -> TableDescription | None:
    """Return a table's first description in these messages."""
    found = (description for each in ddl for description in each.message.tables if description.relation_id == relation_id)
    return next(found, None)


def _keeps_values(before: TableDescription | None, after: TableDescription | None, table: Table, masks: Masks) -> bool:
    """Tell whether each column that has another type is known to have the same values. ``table`` is what the masks know it as."""
    if before is None or after is None:
        return False
    types = {column.facts.number: (column.type_id, column.type_modifier) for column in before.columns}
    kinds = masks.kinds(table.schema, table.name, [column.name for column in after.columns])
    return all(
        keeps_values(types.get(column.facts.number, now), now, is_text=kinds.get(column.name) == HASH)
        for column in after.columns
        for now in [(column.type_id, column.type_modifier)]
    )


def _parent(description: TableDescription) -> int | None:
    """Return the OID of the table of which it is a partition. Its name may change meanwhile."""
    return None if description.partition_of is None else description.partition_of[0]


def _ancestors(parent: tuple[int, Table] | None, descriptions: Descriptions, place: Place) -> Iterator[tuple[int, Table]]:
    """Yield the table and those of which it is a partition itself."""
    seen: set[int] = set()
    while parent is not None and parent[0] not in seen:
        relation_id, table = parent
        seen.add(relation_id)
        yield relation_id, table
        described = descriptions.in_force(relation_id, place)
        parent = None if described is None else described.partition_of
