"""Reads the messages of captured DDL (docs/operations/ddl.md): descriptions of tables, what was dropped and rewritten. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from cdcpipe.ddl import message
from cdcpipe.pgoutput.messages import IDENTITY_CODES
from spark_sink.schema.column_numbers import ColumnFacts
from spark_sink.schema.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from cdcpipe.pgoutput.messages import Relation

__all__ = ["ColumnDescription", "DdlMessage", "Families", "PublicationLists", "TableDescription", "parse"]

_NOT_OURS: Final = "it is not a message of cdcpipe's event triggers, or one of a later version"
_PARTITIONED: Final = "partitioned"
_OIDS: Final = range(1, 1 << 32)
_NUMBERS: Final = range(1, 1601)
"""The numbers that a table's columns may have: PostgreSQL allows 1600 columns, with those that were dropped."""
_MODIFIERS: Final = range(-(1 << 31), 1 << 31)


@dataclass(frozen=True, slots=True)
class ColumnDescription:
    """A column after a command."""

    name: str
    type_id: int
    type_modifier: int
    facts: ColumnFacts
    is_generated: bool
    comment: str | None


@dataclass(frozen=True, slots=True)
class TableDescription:
    """A table after a command. ``primary_key`` has the names of the key's columns; empty if there is none, or a deferrable one."""

    relation_id: int
    table: Table
    columns: tuple[ColumnDescription, ...]
    primary_key: tuple[str, ...]
    replica_identity: str
    """``d``, ``n``, ``f`` or ``i``, as in the stream."""
    identity: frozenset[int]
    """The numbers of the columns that are part of the replica identity: all with FULL."""
    partition_of: tuple[int, Table] | None
    """The OID and the name of the table of which it is a partition."""
    comment: str | None
    is_partitioned: bool
    """Whether its partitions have its rows."""

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> TableDescription:
        """Read an object of the message's ``tables``."""
        columns = tuple(map(_column, value["columns"]))
        names = {column.facts.number: column.name for column in columns}
        if not len(columns) == len(names) == len(set(names.values())):
            raise ValueError(_NOT_OURS)
        key = value["primary_key"]
        is_usable, parent = key is not None and not key["deferrable"], value["partition_of"]
        identity = IDENTITY_CODES[value["replica_identity"]["kind"]]
        return cls(
            _within(_OIDS, value["oid"]),
            _table(value),
            columns,
            tuple(names[number] for number in key["columns"]) if is_usable else (),
            identity,
            frozenset(names if identity == "f" else map(int, value["replica_identity"]["columns"])),
            None if parent is None else (_within(_OIDS, parent["oid"]), _table(parent)),
            _text(value.get("comment")),
            value.get("kind") == _PARTITIONED,
        )

    def columns_of(self, relation: Relation) -> list[ColumnDescription] | None:
        """Return the columns of a description from the stream; None if this is not the table that it describes.

        The stream may lack columns, because a publication does not have all. It has them in the order of their numbers. So another
        order tells that a column was dropped, and another one added with its name and type.
        """
        known = {column.name: column for column in self.columns}
        found = [known.get(column.name) for column in relation.columns]
        looks = [None if each is None else (each.type_id, each.type_modifier) for each in found]
        if looks != [(column.type_id, column.type_modifier) for column in relation.columns]:
            return None
        columns = [each for each in found if each is not None]
        numbers = [column.facts.number for column in columns]
        return columns if numbers == sorted(numbers) else None


@dataclass(frozen=True, slots=True)
class PublicationLists:
    """The OIDs of a publication's tables that have a list of columns there."""

    name: str
    tables: frozenset[int]


@dataclass(frozen=True, slots=True)
class DdlMessage:
    """What an event trigger has written: see docs/operations/ddl.md. ``tag`` is the command's, like ``ALTER TABLE``."""

    kind: str
    tag: str
    statement: str | None
    tables: tuple[TableDescription, ...]
    dropped: Mapping[Table, int]
    """The dropped tables with their OIDs."""
    rewritten: tuple[int, Table, tuple[str, ...]] | None
    """The table whose rows were written anew: OID, name, and why (``persistence``, ``default``, ``type``, ``access method``)."""
    types: frozenset[int] = frozenset()
    """The OIDs of the types that the command concerns, and of their arrays."""
    dropped_columns: Mapping[int, Mapping[int, str]] = field(default_factory=dict)
    """The dropped columns of each table: by the table's OID, and the column's number."""
    is_of_publication: bool = False
    """Whether the command concerns a publication, or has taken a table out of one."""
    lists: Mapping[int, PublicationLists] = field(default_factory=dict)
    """For each publication that the message tells of, by its OID: the tables with lists of columns. A dropped one has none."""


class Families:
    """The last descriptions of partitioned tables and partitions, for a caller that reads many messages in their order.

    A command on one partition describes all of them again. A description that repeats the last one is not read again.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[Mapping[str, Any], TableDescription]] = {}

    def read(self, value: Mapping[str, Any]) -> TableDescription:
        """Read an object of a message's ``tables``."""
        if value["partition_of"] is None and value.get("kind") != _PARTITIONED:
            return TableDescription.of(value)
        last = self._last.get(value["oid"])
        if last is not None and last[0] == value:
            return last[1]
        found = TableDescription.of(value)
        self._last[found.relation_id] = value, found
        return found

    def forget(self, relation_ids: Iterable[int]) -> None:
        """Forget tables that were dropped."""
        for relation_id in relation_ids:
            self._last.pop(relation_id, None)


def parse(
    content: bytes, *, is_checked: bool = False, read: Callable[[Mapping[str, Any]], TableDescription] = TableDescription.of
) -> DdlMessage:
    """Read a message's content. Raises ValueError for anything that the event triggers do not write.

    Any session may write messages with any prefix. So a caller goes on without a message that can't be read. ``is_checked``: it was
    read before, as those in a changelog. ``read`` reads the description of a table.
    """
    value = message.parse(message.PREFIX, content, is_checked=is_checked)
    if value is None:
        raise ValueError(_NOT_OURS)
    try:
        tag, dropped = str(value.get("tag") or ""), value.get("dropped", ())
        return DdlMessage(
            str(value["kind"]),
            tag,
            _text(value.get("statement")),
            tuple(map(read, value.get("tables", ()))),
            {_table(each): _within(_OIDS, each["oid"]) for each in dropped if each["type"] == "table"},
            None
            if (found := value.get("rewritten")) is None
            else (_within(_OIDS, found["oid"]), _table(found), tuple(map(str, found["reasons"]))),
            frozenset(
                _within(_OIDS, oid) for each in value.get("types", ()) for oid in (each["oid"], each["array"]) if oid is not None
            ),
            _dropped_columns(dropped),
            tag.endswith("PUBLICATION") or any(each["type"] == "publication relation" for each in dropped),
            {
                **{
                    _within(_OIDS, each["oid"]): PublicationLists("", frozenset())
                    for each in dropped
                    if each["type"] == "publication"
                },
                **{_within(_OIDS, each["oid"]): _listed(each) for each in value.get("publications", ())},
            },
        )
    except (KeyError, TypeError, AttributeError, ValueError) as ex:
        raise ValueError(_NOT_OURS) from ex


def _dropped_columns(dropped: Iterable[Mapping[str, Any]]) -> dict[int, dict[int, str]]:
    found: dict[int, dict[int, str]] = {}
    for each in dropped:
        if each["type"] == "table column":
            numbers = found.setdefault(_within(_OIDS, each["oid"]), {})
            numbers[_within(_NUMBERS, each["number"])] = _name(each["column"])
    return found


def _listed(publication: Mapping[str, Any]) -> PublicationLists:
    tables = frozenset(_within(_OIDS, each["oid"]) for each in publication["tables"] if each["columns"] is not None)
    return PublicationLists(_name(publication["name"]), tables)


def _table(value: Mapping[str, Any]) -> Table:
    return Table(_name(value["schema"]), _name(value["name"]))


def _column(value: Mapping[str, Any]) -> ColumnDescription:
    missing = value["missing"]
    is_filled = missing is None and bool(value["has_default"] or value["identity"] or value["generated"])
    kind = value["type"]
    facts = ColumnFacts(_within(_NUMBERS, value["number"]), None if missing is None else str(missing), is_filled)
    return ColumnDescription(
        _name(value["name"]),
        _within(_OIDS, kind["oid"]),
        _within(_MODIFIERS, kind["modifier"]),
        facts,
        value["generated"] is not None,
        _text(value.get("comment")),
    )


def _within(allowed: range, value: Any) -> int:
    """Return a number that PostgreSQL can have there. Another one may not fit into a column of the warehouse, at each start."""
    number = int(value)
    if number not in allowed:
        raise ValueError(_NOT_OURS)
    return number


def _name(value: object) -> str:
    """Return a name that something in PostgreSQL can have."""
    name = str(value)
    if not name or "\0" in name:
        raise ValueError(_NOT_OURS)
    return name


def _text(value: object) -> str | None:
    return None if value is None else str(value)
