"""Finds out from captured DDL which tables have got another name. No I/O.

    names = follow(names, uses, ddl, homes, is_following=True)      # names: those so far

A table is known by its OID. Its home is that of the newest change or copy with this OID, on the server of the command. A command
that describes the table with another name than its home has at this place is a rename: ALTER TABLE … RENAME TO or SET SCHEMA, ALTER
SCHEMA … RENAME TO. The changes of the transaction up to the command have the old name, those after it the new one. OIDs end where
the log goes on with another server. There a table is known by its name, until its first copy or change. A copy from behind such an
end may be in the warehouse before the changes from before it. It does not tell their tables either.

A decision is made once for each message, and recorded with its position before any change depends on it. So it is the same again
after a kill, also if the next run has another ``--renamed``.
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

from spark_sink.schema.names import Names, Naming
from spark_sink.source.contents import Use

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from spark_sink.schema.ddl_message import TableDescription
    from spark_sink.schema.table import Place, Table, Version
    from spark_sink.source.ddl import Ddl

__all__ = ["follow", "told"]


def follow(
    names: Names, uses: Iterable[Use], ddl: Iterable[Ddl], versions: Mapping[Table, Sequence[Version]], *, is_following: bool
) -> Names:
    """Return the names with those that are new in some segments. ``names`` itself is returned if nothing is new.

    ``uses`` and ``ddl`` are all of the segments, in any order and in order. ``versions`` are those of each table of the
    warehouse. Without ``is_following`` a renamed table goes on in tables of its own, as without captured DDL.
    """
    finder = _Finder(names, versions, is_following=is_following)
    commands = [each for each in ddl if each.message.kind == "command"]
    # A message stands before the change with the same place.
    events: list[tuple[Place, bool, Use | Ddl]] = [(each.place, False, each) for each in commands]
    events += [(use.place, True, use) for use in uses]
    for place, _, event in sorted(events, key=lambda each: each[:2]):
        finder.pass_to(place)
        if isinstance(event, Use):
            finder.see(place, event)
        elif place[0] > names.done_lsn:
            for description in event.message.tables:
                finder.hear(place, description)
    done_lsn = max((each.end_lsn for each in commands), default=0)
    is_chosen_anew = names.is_following not in (None, is_following)
    if len(finder.names.namings) == len(names.namings) and done_lsn <= names.done_lsn and not is_chosen_anew:
        return names
    found = finder.names if finder.names is not names else names.copy()
    found.done_lsn, found.is_following = max(done_lsn, names.done_lsn), is_following
    return found


def told(before: Names, now: Names) -> list[str]:
    """Return a line for each table whose name has changed."""
    first: dict[Table, Table] = {}
    for naming in now.namings[len(before.namings) :]:
        first.setdefault(naming.home, naming.former)
    lines = []
    for home, old in first.items():
        new = now.shown(home)
        if str(old) == str(new):
            continue
        if new.now.number:
            lines.append(f"another table is {old} now: the tables of the dropped one go on as {new}")
        else:
            lines.append(f"{old} is {new} now: its tables go on under the new name")
    return lines


class _Finder:
    """The names, and the newest OID in each home, as of a place that moves on."""

    def __init__(self, names: Names, versions: Mapping[Table, Sequence[Version]], *, is_following: bool) -> None:
        self.names = names
        self._before = names
        self._is_following = is_following
        self._versions = versions
        self._known = {home: [(each.place, each.relation_id) for each in found] for home, found in versions.items()}
        """For each home, at which places a table with which OID had it: as its versions tell, and what was seen since."""
        self._server = -1
        self._ended: set[Table] = set()
        """The homes whose OIDs are those of a former server."""
        self._relation_of: dict[Table, int] = {}
        self._home_of: dict[int, Table] = {}

    def pass_to(self, place: Place) -> None:
        """Move on to a place. OIDs are those of the server that is there: not of one before it, nor of one behind it."""
        servers = self._before.servers
        before, self._server = self._server, servers.number(place)
        if before == self._server:
            return
        for naming in self.names.undone(place):
            self._add(naming)
        known = {home: self._until_now(found) for home, found in self._known.items()}
        new = {home: each[-1] for home, each in known.items() if each and before < servers.number(each[-1][0])}
        own = {home: [each for each in found if servers.is_one(each[0], place)] for home, found in known.items()}
        here = {home: each[-1] for home, each in own.items() if each}
        self._relation_of |= {home: relation_id for home, (_, relation_id) in (new | here).items()}
        in_order = sorted((seen_at, home, relation_id) for home, (seen_at, relation_id) in here.items())
        self._home_of = {relation_id: home for _, home, relation_id in in_order}
        self._ended = self._relation_of.keys() - here.keys()

    def _until_now(self, known: Sequence[tuple[Place, int]]) -> list[tuple[Place, int]]:
        """Return what is known of a home on the server of now, and on those before it, in order. Copies may be from behind it."""
        return sorted((each for each in known if self._before.servers.number(each[0]) <= self._server), key=itemgetter(0))

    def _add(self, naming: Naming) -> None:
        if self.names is self._before:
            self.names = self._before.copy()
        self.names.add(naming)

    def see(self, place: Place, use: Use) -> None:
        """Take a description from the stream: the table has a home from here on."""
        relation_id = use.relation.relation_id
        home = self.names.home(relation_id, use.name, place)
        if home.number and not self.names.has(home):
            self._add(Naming(place, relation_id, use.name, use.name, home))
        self._relation_of[home], self._home_of[relation_id] = relation_id, home
        self._known.setdefault(home, []).append((place, relation_id))
        self._ended.discard(home)

    def hear(self, place: Place, described: TableDescription) -> None:
        """Take a captured description: the table may have got another name."""
        relation_id, name = described.relation_id, described.table
        if not self._is_following:
            return
        home = self._home_of.get(relation_id)
        if home is None:
            self._hear_of_new(place, relation_id, name)
            return
        former, holder = self.names.name(home, place), self.names.holder(name, place)
        if former == name:
            return
        other = None if holder is None else self._relation_of.get(holder)
        is_same = other == relation_id and holder not in self._ended
        if holder is not None and (is_same or self._is_ahead(holder, place)):
            self._home_of[relation_id] = holder  # a copy, or an older program, was there first: this name has its changes
            return
        if holder is not None and other is not None:
            self._add(Naming(place, other, name, replace(name, number=other), holder))
        self._add(Naming(place, relation_id, former, name, home))

    def _hear_of_new(self, place: Place, relation_id: int, name: Table) -> None:
        """Take the description of a table without changes so far. If it has the name of a dropped table, it goes on in its home.

        This is recorded, so that a copy need not wait for the table's first change (snapshot/homes.py).
        """
        holder = self.names.holder(name, place)
        if holder in self._relation_of and not self.names.is_called(relation_id, name, place):
            self._add(Naming(place, relation_id, name, name, holder))

    def _is_ahead(self, home: Table, place: Place) -> bool:
        """Tell whether a table has a copy from beyond a place. It has the name later in any case."""
        return any(each.place > place for each in self._versions.get(home, ())[-1:])
