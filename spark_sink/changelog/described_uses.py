"""Makes descriptions of tables from captured DDL, as if the server had sent them where the command ran. No I/O.

The server describes a table again only before its next change. Until then, what a command did to the older rows would be missing: a
renamed column, a default. So a command counts as a use of the table's new description (source/contents.py), without a change.

A transaction has one such use of a table, with what the last of its commands left. No use is made where the captured description is
not all that the stream will say: for a table that has had no change yet, unless a snapshot has copied it; for one that goes on in
other tables under another name, or that has generated columns. (A publication may have these or not.) Nor is one made for a key
with a column that is neither known to be published nor new; for a table that the transaction drops; or where the server itself
describes the table. (Its description has the place of the command if the table's next change stands right behind it.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cdcpipe.pgoutput.messages import Column, Relation
from spark_sink.schema.table import Table
from spark_sink.source.contents import Contents, Use

if TYPE_CHECKING:
    from collections.abc import Container, MutableMapping, Sequence

    from spark_sink.changelog.schema_history import SchemaHistory, SchemaVersion
    from spark_sink.schema.ddl_message import TableDescription
    from spark_sink.schema.names import Names
    from spark_sink.schema.table import Place
    from spark_sink.source.ddl import Ddl

__all__ = ["add_described_uses"]

_KINDS = ("command", "drop")


@dataclass(slots=True)
class _Commands:
    """What a transaction's commands did to a table: its last description, the place of that, and the numbers of dropped columns."""

    place: Place
    description: TableDescription
    dropped: set[int] = field(default_factory=set)


def add_described_uses(contents: MutableMapping[Table, Contents], ddl: Sequence[Ddl], schemas: SchemaHistory, names: Names) -> None:
    """Add a use to the contents of each table that a transaction's commands have changed.

    `schemas.captured` has the captured DDL, and ``names`` has the names that it has given to tables.
    """
    found: dict[tuple[int, int], _Commands] = {}
    dropped = {(each.end_lsn, relation_id) for each in ddl for relation_id in each.message.dropped.values()}
    for each in ddl:
        for table in each.message.tables if each.message.kind in _KINDS else ():
            if (each.end_lsn, table.relation_id) in dropped:
                continue
            if schemas.captured.in_force(table.relation_id, each.place) is None:
                continue  # not of the table at its place
            commands = found.setdefault((each.end_lsn, table.relation_id), _Commands(each.place, table))
            commands.place, commands.description = each.place, table
            commands.dropped |= each.message.dropped_columns.get(table.relation_id, {}).keys()
    for commands in found.values():
        place, description = commands.place, commands.description
        home = names.shown(names.home(description.relation_id, description.table, place))
        if _is_told(place, description, contents.get(home)):
            continue
        told_at, previous = _relation_before(place, description, contents.get(home), schemas)
        if previous is not None and not _is_same_table(previous, description, place, names):
            continue
        before = _columns_before(commands, home, previous, told_at, schemas)
        if before is None:
            continue
        relation = _relation(description, *before)
        # A published column has gone. If all looks the same, another one has its name and type.
        is_replaced = not before[0].isdisjoint(commands.dropped)
        if relation is None:
            continue
        if relation == previous and not is_replaced and not schemas.was_copied_otherwise(home, relation, told_at, place):
            continue
        changed = contents.setdefault(home, Contents())
        changed.uses = sorted([*changed.uses, Use(*place, relation, place[0])], key=lambda use: use.place)
        changed.last_lsn = max(changed.last_lsn, place[0])


def _is_told(place: Place, description: TableDescription, contents: Contents | None) -> bool:
    """Tell whether the server itself describes the table at a place. Another use there would apply the fills again."""
    uses = [] if contents is None else contents.uses
    return any(use.place == place and use.relation.relation_id == description.relation_id for use in uses)


def _is_same_table(previous: Relation, description: TableDescription, place: Place, names: Names) -> bool:
    """Tell whether the changes after a description go to the same table of the warehouse as those before it."""
    former = Table.of(previous)
    return former == description.table or names.home(description.relation_id, former, place) == names.home(
        description.relation_id, description.table, place
    )


def _relation_before(
    place: Place, description: TableDescription, contents: Contents | None, schemas: SchemaHistory
) -> tuple[Place, Relation | None]:
    """Return the stream's description of the table before a place, and where it was used last, as far as these segments tell."""
    uses = [] if contents is None else contents.uses
    before = [use for use in uses if use.place < place and use.relation.relation_id == description.relation_id]
    if before:
        return before[-1].place, before[-1].relation
    version = schemas.version(description.relation_id, (place[0], place[1] - 1))
    return ((place[0], -1), None) if version is None else (version.place, version.relation)


def _columns_before(
    commands: _Commands, home: Table, previous: Relation | None, told_at: Place, schemas: SchemaHistory
) -> tuple[set[int], bool] | None:
    """Return the numbers of the columns that the stream had before commands, and whether it has all that there are after them.

    Returns None if the numbers are not certain.

    ``previous`` is what the stream has said of the table, at ``told_at``. Its changes so far are in ``home``.
    """
    # What a transaction does before the last change of the table counts: the stream has described the table after it.
    since, captured = max(told_at, (commands.place[0], -1)), schemas.captured
    copied = schemas.copied(home, commands.description.relation_id, since)
    if copied is not None and (previous is None or copied.place > told_at):
        previous, told_at = copied.relation, copied.place
    if previous is None:
        return None
    told = captured.numbers_at(previous, since) or _copied_before(schemas.as_copied(home, previous, since))
    before = told or captured.numbers_until_next(previous, told_at)
    relation_id = commands.description.relation_id
    has_list = captured.has_list(relation_id, commands.place) if copied is None else not copied.is_whole
    if before is not None and before[1] and has_list:
        before = told = before[0], False  # a publication's list may have all columns that there were: it gets no new one
    if before is None or before[1]:
        return before
    # A column of which nothing else tells whether it is new, or not published: PostgreSQL drops no column that a publication lists,
    # unless it takes the table out of the publication. So if a published one was dropped, all are published.
    if not before[0].isdisjoint(commands.dropped) and captured.keeps_lists(told_at, commands.place):
        return before[0], True
    return told


def _copied_before(copied: SchemaVersion | None) -> tuple[set[int], bool] | None:
    """Return the numbers of the columns that a snapshot has copied, and whether these are all; None without a snapshot."""
    if copied is None or copied.facts is None:
        return None
    # A publication with a list of columns does not have the new ones either. Numbers don't tell: it may lack the last column.
    return {fact.number for fact in copied.facts}, copied.is_whole


def _relation(description: TableDescription, numbers: Container[int], is_whole: bool) -> Relation | None:
    """Return what the stream will say of the table; None if that is not certain. See `_columns_before` for the numbers."""
    if any(column.is_generated for column in description.columns):
        return None
    if not is_whole and description.replica_identity != "f" and not all(number in numbers for number in description.identity):
        return None  # a key with a column that may be new, or not published
    columns = [column for column in description.columns if is_whole or column.facts.number in numbers]
    return Relation(
        None,
        description.relation_id,
        description.table.schema,
        description.table.name,
        description.replica_identity,
        tuple(
            Column(int(column.facts.number in description.identity), column.name, column.type_id, column.type_modifier)
            for column in columns
        ),
    )
