"""What captured DDL says about tables: their columns and keys from a place in the stream on. No I/O, no Spark.

`cdcpipe ddl install` puts event triggers into a database. They write a logical message at the place where a command ran, with a
description of each table as it was then (docs/operations/ddl.md). Where there is such a description, it is certain, and the catalog
is not asked. It is not used if the stream describes the table's columns in another way: then the capture was off for a while. It is
not used behind a gap of the log either, until the next command: nobody has the messages that the gap had.

A column's value in earlier rows is that of its first description. The catalog loses it when the table is rewritten.

A message also tells what the table was before its command, because it has the numbers of the columns that the command dropped, and
new columns have the greatest numbers. So the first message about a table tells the numbers of the columns before it, too. A catalog
that is asked later can't: it may have another column under the same name.

A transaction may describe a table as it was before a command whose transaction has ended first: it has an older snapshot
(REPEATABLE READ, SERIALIZABLE), or its command locks no table (ALTER PUBLICATION). A column's number goes away only with a message
that names it, and never comes back. So a description without a column that was there, or with one that was dropped, is not used.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from operator import attrgetter
from sys import intern
from typing import TYPE_CHECKING, Final, TypeAlias

from spark_sink.schema.column_numbers import ColumnFacts
from spark_sink.schema.servers import Servers
from spark_sink.schema.table import Place, Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from cdcpipe.pgoutput.messages import Relation
    from spark_sink.schema.ddl_message import ColumnDescription, DdlMessage, PublicationLists, TableDescription

__all__ = ["Descriptions"]

_BEGIN: Final = "installed"
_COMMAND: Final = "command"
_REMOVED: Final = "removed"
_ENDS: Final = (_REMOVED, "failure")


_Key: TypeAlias = tuple[int, int]
"""The number of a server (servers.py), and the OID of a table there."""

_Leaves: TypeAlias = "Mapping[str, set[tuple[str | None, bool]]]"
"""What partitions say of each column, by its name: the missing value, and ``is_filled``."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What one message says of a table. ``dropped`` has the numbers and names of the columns that it says were dropped."""

    place: Place
    ends: int
    """How often the capture had ended before the message."""
    description: TableDescription
    dropped: Mapping[int, str]
    is_doubtful: bool = False
    """Whether the description is not of the table at its place."""
    repeated: Place | None = None
    """The place of the last message that said the same again. Of several equal ones only the first and the last count."""


@dataclass(slots=True)
class _Known:
    """What the messages say of one table, in order, and the first facts about each of its columns."""

    said: list[_Said] = field(default_factory=list)
    first: dict[int, ColumnFacts] = field(default_factory=dict)
    present: frozenset[int] = frozenset()
    """The numbers of the columns that the table has, as far as the messages tell: those that the next description must have."""
    gone: frozenset[int] = frozenset()
    """The numbers of the columns that were dropped."""

    def take(self, said: _Said, leaves: _Leaves, *, is_continued: bool) -> bool:
        """Add what the next message says of the table. Return whether its description is doubtful, and so is not used.

        ``leaves`` is what the message says of the table's partitions. With ``is_continued``, every command since the last message
        about the table has sent one.
        """
        last, description = self.said[-1] if self.said else None, said.description
        if last is not None and last.description.columns == description.columns:
            description = replace(description, columns=last.description.columns)  # saves memory
        numbers = frozenset(column.facts.number for column in description.columns)
        is_doubtful = (is_continued and not self.present <= numbers) or bool(self.gone & numbers)
        may_repeat = is_continued and not is_doubtful and not said.dropped
        if may_repeat and last is not None and not last.is_doubtful and last.description == description:
            # Each ATTACH describes all partitions again: kept for years, that would be gigabytes. All columns are in `first`.
            self.said[-1], self.present = replace(last, repeated=said.place), numbers
            return False
        self.said.append(replace(said, description=description, is_doubtful=is_doubtful))
        if not is_doubtful:
            self.present = numbers
        for column in description.columns:
            facts, told = column.facts, leaves.get(column.name)
            if told is not None:
                facts = _of_leaves(facts, told)
            elif description.is_partitioned and facts.missing is None and not is_continued:
                # It may be older than the message. Then the partitions may have its missing value: this table has no rows.
                facts = replace(facts, is_filled=True)
            # A doubtful one may be that of the command that added a column. Missing values are right there, too, and a
            # rewrite takes them out of later descriptions.
            if not is_doubtful or facts.missing is not None:
                self.first.setdefault(facts.number, facts)
        return is_doubtful


@dataclass(slots=True)
class _Lists:
    """What the messages say of one publication: which of its tables have a list of columns.

    Each message names all of them. Kept for years, that would be gigabytes. So only the places are kept at which a table changes.
    """

    names: set[str] = field(default_factory=set)
    """All names that the publication has had."""
    places: list[Place] = field(default_factory=list)
    """The places of all messages, in order."""
    tables: frozenset[int] = frozenset()
    """The OIDs of the tables that have a list according to the last message."""
    changes: dict[int, list[Place]] = field(default_factory=dict)
    """For each table, by its OID, the places at which it got a list, lost it, got one again, and so on."""

    def take(self, place: Place, said: PublicationLists) -> None:
        """Add what the next message says."""
        self.names.add(said.name)
        self.places.append(place)
        for relation_id in self.tables ^ said.tables:
            self.changes.setdefault(relation_id, []).append(place)
        self.tables = said.tables

    def has(self, relation_id: int, place: Place) -> bool:
        """Tell whether a table has a list at a place, according to the last message up to there."""
        return bisect_right(self.changes.get(relation_id, ()), place) % 2 == 1


def _any_between(places: Sequence[Place], start: Place, until: Place) -> bool:
    """Tell whether one of the places, which are in order, is behind ``start``, and not behind ``until``."""
    return bisect_right(places, until) > bisect_right(places, start)


def _leaves(root: TableDescription, children: Mapping[int, Sequence[TableDescription]]) -> _Leaves:
    """Return what the partitions that have a table's rows say of each column.

    A command's message about a partitioned table describes all its partitions, too. So does one that names a dropped column of it:
    the partitions have lost the column, too. Others need not.
    """
    found: dict[str, set[tuple[str | None, bool]]] = {}
    below = list(children.get(root.relation_id, ()))
    while below:
        each = below.pop()
        if each.is_partitioned:
            below += children.get(each.relation_id, ())
            continue
        for column in each.columns:
            found.setdefault(column.name, set()).add((column.facts.missing, column.facts.is_filled))
    return found


def _of_leaves(facts: ColumnFacts, told: set[tuple[str | None, bool]]) -> ColumnFacts:
    """Return the facts of a partitioned table's column, which has no missing value itself: those that its partitions share."""
    [(missing, is_filled), *others] = told
    if others:
        return replace(facts, missing=None, is_filled=True)
    return replace(facts, missing=missing, is_filled=missing is None and (is_filled or facts.is_filled))


class Descriptions:
    """The captured descriptions of all tables."""

    def __init__(self) -> None:
        self._known: dict[_Key, _Known] = {}
        self._dropped: dict[_Key, int] = {}
        """The dropped tables, with the end LSN of the transaction that dropped them."""
        self._places: list[Place] = []
        self._kinds: list[str] = []
        """The places and kinds of all messages, in order. One after a removal counts as a removal."""
        self._ends: list[Place] = []
        """Where the capture was removed, or failed. What was described before may have changed since, without a message."""
        self._gaps: list[Place] = []
        """Behind the gaps of the log: what was described before may have changed in the gap, and the capture may have ended."""
        self._publications: list[Place] = []
        """Where publications may have got other columns."""
        self._lists: dict[_Key, _Lists] = {}
        """The publications that messages tell of, by their OIDs."""
        self._streamed: dict[int, frozenset[str]] = {}
        """The names of the publications that the stream has behind an LSN. Others are of other consumers."""
        self.servers = Servers()
        """Whose OIDs and numbers those at a place are."""
        self.is_off = False
        """Whether the last message came after the capture was removed. Such a message is not used."""

    def end_at(self, gaps: Iterable[int], servers: Servers) -> None:
        """Take the gaps of the log, in order, as the LSNs at which it goes on, and the servers.

        Call this before messages from behind these gaps are added. The same server counts as another one if it never had the last
        changes before a gap: it gives their numbers to other columns.
        """
        self._gaps = [(start_lsn + 1, -1) for start_lsn in gaps]
        self.servers = servers

    def stream(self, after_lsn: int, publications: Iterable[str]) -> None:
        """Take the names of the publications that the stream has behind an LSN."""
        self._streamed[after_lsn] = frozenset(publications)

    def _key(self, relation_id: int, place: Place) -> _Key:
        return self.servers.number(place), relation_id

    def _around(self, relation_id: int, place: Place) -> tuple[_Said | None, _Said | None]:
        """Return what was said last of a table up to a place, and what is said next."""
        known = self._known.get(self._key(relation_id, place))
        said = [] if known is None else known.said
        number = bisect_right(said, place, key=attrgetter("place"))
        last = said[number - 1] if number else None
        if last is not None and last.repeated is not None and place < last.repeated:
            return last, replace(last, place=last.repeated, dropped={})
        return last, said[number] if number < len(said) else None

    def add(self, place: Place, said: DdlMessage) -> list[Table]:
        """Add a message. It stands before the change with the same place. Messages come in their order.

        Return the tables whose descriptions are not used, because they are older than the message.

        After the capture was removed, only an installation begins it again. Another message is of a transaction that began before
        the removal, and ended after it: what it describes is true at its place, and nobody tells what happens then.
        """
        self.is_off = self._kinds[-1:] == [_REMOVED] and said.kind != _BEGIN
        kind = _REMOVED if self.is_off else intern(said.kind)
        self._places.append(place)
        self._kinds.append(kind)
        doubtful = []
        if kind == _BEGIN:  # columns may have been dropped without a message
            for known in self._known.values():
                known.present = known.gone = frozenset()
        for relation_id, columns in said.dropped_columns.items():
            known = self._known.setdefault(self._key(relation_id, place), _Known())
            known.present, known.gone = known.present.difference(columns), known.gone.union(columns)
        children: dict[int, list[TableDescription]] = {}
        for description in said.tables:
            if description.partition_of is not None:
                children.setdefault(description.partition_of[0], []).append(description)
        for description in said.tables:
            key = self._key(description.relation_id, place)
            known = self._known.setdefault(key, _Known())
            has_leaves = description.is_partitioned and (kind == _COMMAND or description.relation_id in said.dropped_columns)
            leaves = _leaves(description, children) if has_leaves else {}
            if self._dropped.pop(key, None) is not None:
                known.present = known.gone = frozenset()
            is_continued = kind != _BEGIN and bool(known.said) and not self._is_over(known.said[-1], place)
            dropped = said.dropped_columns.get(description.relation_id, {})
            if known.take(_Said(place, len(self._ends), description, dropped), leaves, is_continued=is_continued):
                doubtful.append(description.table)
        for relation_id in said.dropped.values():
            self._dropped[self._key(relation_id, place)] = place[0]
        if kind in _ENDS:
            self._ends.append(place)
        else:
            for number, listed in said.lists.items():
                self._lists.setdefault(self._key(number, place), _Lists()).take(place, listed)
        if said.is_of_publication:
            self._publications.append(place)
        return doubtful

    def _is_over(self, said: _Said, place: Place) -> bool:
        """Tell whether the capture or the log ended between a message and a place behind it."""
        return bisect_right(self._ends, place) > said.ends or _any_between(self._gaps, said.place, place)

    def forget_dropped(self, until_lsn: int) -> None:
        """Forget the tables that were dropped up to an LSN. Call this when nobody asks for places up to there any more."""
        for key in [each for each, lsn in self._dropped.items() if lsn <= until_lsn]:
            del self._dropped[key]
            self._known.pop(key, None)

    def facts(self, relation: Relation, place: Place) -> tuple[ColumnFacts, ...] | None:
        """Return the facts of each column of a description from the stream that applies from ``place``; None if not captured."""
        if (found := self.of_stream(relation, place)) is None:
            return None
        first = self._known[self._key(relation.relation_id, place)].first
        return tuple(first[column.facts.number] for column in found[1])

    def facts_until_next(self, relation: Relation, place: Place) -> tuple[ColumnFacts, ...] | None:
        """Return the facts about each column at a ``place`` where no message is in force: the table's next message tells them.

        Returns None if there is no message so far, if the DDL before it was not all captured, or if they are not certain.
        """
        found = self.numbers_until_next(relation, place)
        if found is None:
            return None
        first = self._known[self._key(relation.relation_id, place)].first
        return tuple(first.get(number, ColumnFacts(number, None, is_filled=True)) for number in sorted(found[0]))

    def numbers_until_next(self, relation: Relation, place: Place) -> tuple[set[int], bool] | None:
        """Return the numbers of the columns at a ``place`` where no message is in force: the table's next message tells them.

        The message has the columns that were there before: those that its command has dropped, and all others but new ones. They
        count as all only if none of the others may be new.
        """
        _, following = self._around(relation.relation_id, place)
        if following is None or following.is_doubtful or not self.covers(place, following.place):
            return None
        if self.in_force(relation.relation_id, place) is not None:
            return None  # the stream does not say what the command before said: the capture was off
        after, dropped = {column.facts.number: column for column in following.description.columns}, following.dropped
        numbers = sorted({*after, *dropped})[: len(relation.columns)]
        if len(numbers) < len(relation.columns):
            return None
        names = [dropped[number] if number in dropped else after[number].name for number in numbers]
        others = sum(name != column.name for name, column in zip(names, relation.columns, strict=True))
        # RENAME COLUMN changes one name, and nothing else. Otherwise the publication lacks some of the table's columns.
        if others and (others > 1 or dropped or len(after) != len(numbers)):
            return None
        return set(numbers), len(after) + len(dropped) == len(numbers)

    def is_later_number(self, relation_id: int, place: Place, number: int) -> bool:
        """Tell whether a column of this number was added after the first description that follows ``place``."""
        _, following = self._around(relation_id, place)
        if following is None:
            return False
        return number > max((*(column.facts.number for column in following.description.columns), *following.dropped), default=0)

    def numbers_at(self, relation: Relation, place: Place) -> tuple[set[int], bool] | None:
        """Return the numbers of the columns that a description from the stream has at ``place``, and whether these are all.

        Returns None if this was not captured.
        """
        found = self.of_stream(relation, place)
        return None if found is None else ({each.facts.number for each in found[1]}, len(found[1]) == len(found[0].columns))

    def covers(self, start: Place, until: Place) -> bool:
        """Tell whether the DDL between two places was captured, as far as the messages tell. Only then is no message no DDL.

        A capture that begins says so. So one whose first message after ``start`` is another one was there already. The same holds
        behind a gap.
        """
        first, gaps = bisect_right(self._places, start), bisect_right(self._gaps, start)
        if _any_between(self._ends, start, until) or _any_between(self._gaps, start, until):
            return False
        begin = bisect_right(self._places, self._gaps[gaps - 1]) if gaps else 0
        if first > begin:
            return self._kinds[first - 1] not in _ENDS
        if begin == len(self._places) or _any_between(self._gaps, start, self._places[begin]):
            return False
        return self._kinds[begin] not in (_BEGIN, *_ENDS)

    def keeps_lists(self, start: Place, until: Place) -> bool:
        """Tell whether no publication has got another list of columns between two places, as far as the messages tell."""
        return not _any_between(self._publications, start, until) and self.covers(start, until)

    def has_list(self, relation_id: int, place: Place) -> bool:
        """Tell whether a streamed publication has a list of the table's columns at ``place``, as far as the messages tell.

        What they told before the end of the capture or a gap does not count. A publication that is renamed is the same one.
        """
        server = self.servers.number(place)
        begin = max((after_lsn for after_lsn in self._streamed if after_lsn < place[0]), default=None)
        for told in [told for (of, _), told in self._lists.items() if of == server]:
            if not told.has(relation_id, place) or (begin is not None and told.names.isdisjoint(self._streamed[begin])):
                continue
            told_at = told.places[bisect_right(told.places, place) - 1]
            if not _any_between(self._ends, told_at, place) and not _any_between(self._gaps, told_at, place):
                return True
        return False

    def primary_key(self, relation: Relation, place: Place) -> tuple[str, ...] | None:
        """Return the primary key at ``place``, empty if there is none; None if it was not captured."""
        found = self.of_stream(relation, place)
        return None if found is None else found[0].primary_key

    def identity(self, relation: Relation, place: Place) -> tuple[str, ...] | None:
        """Return the columns of the replica identity at ``place``, also those that are not published; None if not captured."""
        if (found := self.of_stream(relation, place)) is None:
            return None
        return tuple(column.name for column in found[0].columns if column.facts.number in found[0].identity)

    def last_before(self, place: Place) -> Iterator[tuple[Place, TableDescription]]:
        """Yield the last description of each table up to ``place``, with its own place: also one after which the capture ended."""
        server = self.servers.number(place)
        for said in [known.said for (of, _), known in self._known.items() if of == server]:
            number = bisect_right(said, place, key=attrgetter("place"))
            while number and said[number - 1].is_doubtful:
                number -= 1
            if number:
                yield said[number - 1].place, said[number - 1].description

    def last_place(self, relation_id: int, place: Place) -> Place | None:
        """Return the place of the last description up to ``place``; None if there is none."""
        last, _ = self._around(relation_id, place)
        return None if last is None else last.place

    def of_stream(self, relation: Relation, place: Place) -> tuple[TableDescription, list[ColumnDescription]] | None:
        """Return what is in force at ``place``, and its columns that the stream describes; None if that is not this table."""
        description = self.in_force(relation.relation_id, place)
        columns = None if description is None else description.columns_of(relation)
        return None if description is None or columns is None else (description, columns)

    def in_force(self, relation_id: int, place: Place) -> TableDescription | None:
        """Return the last description up to ``place``; None if there is none, or if the capture or the log ended since.

        It is also None if the last one is not of the table at its place.
        """
        last, _ = self._around(relation_id, place)
        return None if last is None or last.is_doubtful or self._is_over(last, place) else last.description
