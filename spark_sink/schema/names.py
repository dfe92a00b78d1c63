"""The names of tables, by position: which table of the warehouse has the changes of a table of PostgreSQL. No I/O, no Spark.

    names = Names([Naming((700, 0), 16391, a, b, a)])       # ALTER TABLE a RENAME TO b, in the transaction that ends at 700
    names.home(16391, b, (800, 0))                          # a: the directories keep the first name
    names.home(16500, a, (800, 0))                          # a~16500: another table has the name now, and needs its own
    names.shown(a)                                          # prints as public.b

A table keeps the directories of the name under which its first change came: its *home*. The directories do not move, so that
readers find them, and a commit is never between two names. A `Naming` says that the table in a home has another name from a place
on. Without one the home's name is the table's name: nothing is recorded for tables that were never renamed.

A server that has lost changes has lost the names that they gave: behind them each table has the name again that it had before
(`Names.undone`).

Two tables never have one name at a place. A table that was dropped loses its name when another table is renamed to it: it is called
``NAME~OID`` then. A table that is created under the name of another one's home gets the home ``NAME~OID``. But a table that is
created under the name of a dropped table goes on in its home, as always.
"""

from __future__ import annotations

from bisect import bisect_right
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from cdcpipe.lsn import LSN, format_lsn
from spark_sink.schema.servers import Servers
from spark_sink.schema.table import AFTER_ALL, Place, Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["FOLLOW", "RENAMED", "Names", "Naming"]

FOLLOW, APART = RENAMED = ("follow", "apart")
"""What becomes of a table that is renamed: it goes on in its tables under the new name, or in tables of its own."""

_NO_OID: Final = 1
"""The number of a table that has lost its name, if its OID is not known. No table of a user has this OID."""


@dataclass(frozen=True, slots=True)
class Naming:
    """From a place on, the table with this OID, in ``home``, is called ``name``. Before it was called ``former``."""

    place: Place
    relation_id: int
    former: Table
    name: Table
    home: Table

    def to_json(self) -> dict[str, Any]:
        """Return the object for the file."""
        return {
            "end_lsn": format_lsn(self.place[0]),
            "ordinal": self.place[1],
            "relation_id": self.relation_id,
            "former": self.former.to_json(),
            "name": self.name.to_json(),
            "home": self.home.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Naming:
        """Read the object of `to_json`; raise ValueError, KeyError or TypeError for anything else."""
        place = int(LSN.parse(value["end_lsn"])), int(value["ordinal"])
        tables = (Table.from_json(value[key]) for key in ("former", "name", "home"))
        return cls(place, int(value["relation_id"]), *tables)


class Names:
    """The names of a warehouse's tables. A place is the end LSN of a transaction, and an ordinal in it.

    ``done_lsn`` is the LSN up to which captured DDL has been looked through for names. ``is_following`` is the choice of the last
    run (``--renamed``); None before the first one.
    """

    def __init__(self, namings: Iterable[Naming] = (), done_lsn: int = 0, *, is_following: bool | None = None) -> None:
        self.done_lsn = done_lsn
        self.is_following = is_following
        self.servers = Servers()
        """Whose OIDs those at a place are. They are not recorded with the names."""
        self._namings: list[Naming] = []
        self._last_place: Place = (0, 0)
        # A job may rename a table every night, for years. So a copy shares the values, which are never changed.
        self._of_relation: dict[int, tuple[Naming, ...]] = {}
        self._of_home: dict[Table, tuple[Naming, ...]] = {}
        self._taken: dict[Table, tuple[Naming, ...]] = {}
        self._held: dict[Table, tuple[Table, ...]] = {}
        """For each name the homes of which it is the last name, in the order in which they got it."""
        for each in namings:
            self.add(each)

    def copy(self) -> Names:
        """Return another object with the same names."""
        made = Names()
        vars(made).update({name: copy(value) for name, value in vars(self).items()})
        return made

    def to_json(self) -> dict[str, Any]:
        """Return the object for the file."""
        namings = [each.to_json() for each in self._namings]
        return {"done": format_lsn(self.done_lsn), "follow": self.is_following, "names": namings}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Names:
        """Read the object of `to_json`; raise ValueError, KeyError or TypeError for anything else."""
        namings = map(Naming.from_json, value["names"])
        return cls(namings, int(LSN.parse(value["done"])), is_following=value["follow"])

    @property
    def namings(self) -> Sequence[Naming]:
        """All that was added, in the order of the places."""
        return self._namings

    def add(self, naming: Naming) -> None:
        """Add a naming. They come in their order."""
        if self.has(naming.home):
            before = self.name(naming.home)
            self._held[before] = tuple(home for home in self._held[before] if home != naming.home)
        self._held[naming.name] = (*self._held.get(naming.name, ()), naming.home)
        self._last_place = max(self._last_place, naming.place)
        self._namings.append(naming)
        self._of_home[naming.home] = (*self._of_home.get(naming.home, ()), naming)
        self._taken[naming.name] = (*self._taken.get(naming.name, ()), naming)
        self._of_relation[naming.relation_id] = (*self._of_relation.get(naming.relation_id, ()), naming)

    def undone(self, place: Place) -> list[Naming]:
        """Return the namings to add at a place.

        With them tables have the names again that they had before the changes that its server has lost.
        """
        found: list[Naming] = []
        last_of: dict[Table, Naming] = {}
        for common_lsn, end_lsn in self.servers.lost(place):
            for home, known in self._of_home.items():
                last, then = last_of.get(home, known[-1]), self.name(home, (common_lsn, AFTER_ALL[0]))
                if common_lsn < last.place[0] <= end_lsn and last.name != then:
                    # Without its OID: that may be another table's now.
                    last_of[home] = Naming((end_lsn + 1, -1), _NO_OID, last.name, then, home)
                    found.append(last_of[home])
        return found

    def home(self, relation_id: int, name: Table, place: Place = AFTER_ALL) -> Table:
        """Return the home of the changes that the stream describes with this OID and name at a place.

        A table whose names are recorded keeps its home under each of these names: the server may describe a table for a while
        with a name that it had before.
        """
        for naming in reversed(self._of_relation.get(relation_id, ())):
            if name in (naming.name, naming.former) and self.servers.is_one(naming.place, place):
                return naming.home
        held = self.holder(name, place)
        return Table(name.schema, name.name, relation_id) if held is None else held

    def is_called(self, relation_id: int, name: Table, place: Place = AFTER_ALL) -> bool:
        """Tell whether ``name`` is the last name that is recorded of the table with this OID, on the server at a place."""
        known = (each for each in reversed(self._of_relation.get(relation_id, ())) if self.servers.is_one(each.place, place))
        last = next(known, None)
        return last is not None and last.name == name

    def holder(self, name: Table, place: Place = AFTER_ALL) -> Table | None:
        """Return the home of the table with this name; None if the home of this name belongs to a table that has another name."""
        if place >= self._last_place:
            held = self._held.get(name)
            return held[-1] if held else (name if self.name(name) == name else None)
        for naming in reversed(self._taken.get(name, ())):
            if naming.place <= place and self.name(naming.home, place) == name:
                return naming.home
        return name if self.name(name, place) == name else None

    def name(self, home: Table, place: Place = AFTER_ALL) -> Table:
        """Return the name of the table in a home."""
        known = self._of_home.get(home, ())
        number = bisect_right(known, place, key=lambda naming: naming.place)
        if number:
            return known[number - 1].name
        return known[0].former if known else Table(home.schema, home.name)

    def first_and_last(self, home: Table) -> set[tuple[str, str]]:
        """Return the name of a table's directories, and the name that the table has now."""
        return {(each.schema, each.name) for each in (home, self.name(home))}

    def has(self, home: Table) -> bool:
        """Tell whether a name of the table in a home is recorded."""
        return home in self._of_home

    def shown(self, home: Table) -> Table:
        """Return the home such that it prints as the table's name now."""
        name = self.name(home)
        if self.holder(name) not in (None, home):  # a copy came late, of a table that had lost its name
            name = replace(name, number=home.number or _NO_OID)
        return replace(home, called=None if name == home else name)

    def former(self, home: Table) -> set[Table]:
        """Return all names that the table in a home had before, without that of now."""
        return {naming.former for naming in self._of_home.get(home, ())} - {self.name(home)}

    def since(self, former: Table) -> Table | None:
        """Return the present name of the last table that had this name and lost it; None if no table has lost it."""
        homes = [naming.home for naming in self._namings if naming.former == former != self.name(naming.home)]
        return self.name(homes[-1]) if homes else None
