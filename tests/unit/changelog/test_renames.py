"""Names of tables that captured DDL gives: single cases, and a random model of names against a simple oracle."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from spark_sink.changelog.renames import follow, told
from spark_sink.schema.names import Names, Naming
from spark_sink.schema.servers import Servers
from spark_sink.schema.table import Table, Version
from spark_sink.source.contents import Use
from spark_sink.source.ddl import Ddl
from spark_sink.warehouse.warehouse import encode_name
from support.ddl_messages import ddl, described
from support.descriptions import ID, table, version

X, Y, Z = 11, 12, 13


def named(name: str, number: int = 0) -> Table:
    return Table("public", name, number)


def change(end_lsn: int, ordinal: int, relation_id: int, name: str) -> Use:
    return Use(end_lsn, ordinal, replace(table("id"), relation_id=relation_id, name=name), end_lsn)


def rename(end_lsn: int, ordinal: int, relation_id: int, name: str, **more: Any) -> Ddl:
    return ddl(end_lsn, ordinal, described("id=1", relation_id=relation_id, name=name), **more)


def newest(**homes: int) -> dict[Table, list[Version]]:
    return {named(name): [version(5, 0, ID, relation_id)] for name, relation_id in homes.items()}


def found(
    *events: Use | Ddl, known: dict[Table, list[Version]], names: Names | None = None, is_following: bool = True
) -> tuple[Names, list[str]]:
    """Return the names after these events, and the lines that tell of them."""
    before = names or Names()
    uses = [each for each in events if isinstance(each, Use)]
    messages = [each for each in events if isinstance(each, Ddl)]
    now = follow(before, uses, messages, known, is_following=is_following)
    return now, told(before, now)


def shown(names: Names, *homes: Table) -> list[str]:
    return [str(names.shown(home)) for home in homes]


def test_a_table_goes_on_under_another_name() -> None:
    names, lines = found(change(10, 0, X, "a"), rename(10, 2, X, "b"), change(10, 2, X, "b"), known=newest(a=X))
    assert lines == ["public.a is public.b now: its tables go on under the new name"]
    assert [names.home(X, named(name)) for name in "ab"] == [named("a")] * 2
    assert [str(names.name(named("a"), place)) for place in ((9, 0), (10, 1), (10, 2))] == ["public.a", "public.a", "public.b"]
    # A description that has the old name still, as of PostgreSQL 15 after ALTER SCHEMA … RENAME.
    assert names.home(X, named("a"), (20, 0)) == named("a")
    # Another table under the old name, whose second description comes from another table again.
    names, _ = found(change(20, 0, Y, "a"), names=names, known={})
    assert names.home(Y, named("a")) == names.home(Z, named("a")) == named("a", Y)
    assert shown(names, named("a"), named("a", Y)) == ["public.b", "public.a"]
    assert names.since(named("a")) == named("b")


def test_another_server_has_other_tables_under_the_same_oids() -> None:
    """As after dump and restore. OIDs begin at 16384 there, too."""
    names = Names([Naming((7, 0), Y, named("b"), named("c"), named("b"))])
    names.servers = Servers([100])
    # A new table has the OID of a former one. Before the end it was a rename.
    for lsn, expected in ((50, named("a")), (100, named("a")), (200, named("new"))):
        now, lines = found(rename(lsn, 0, X, "new"), known=newest(a=X, b=Y), names=names)
        assert (now.home(X, named("new"), (300, 0)) == named("a")) == bool(lines) == (lsn <= 100)
        assert now.home(X, named("new"), (lsn, 5)) == expected
    # It has a name that the other one had before it was renamed: it goes on in tables of its own.
    assert names.home(Y, named("b"), (50, 0)) == named("b")
    assert names.home(Y, named("b"), (200, 0)) == named("b", Y)
    assert names.home(Z, named("c"), (200, 0)) == named("b")
    # A table that was copied there is followed again, also to the name of a table whose former OID was the same.
    known = newest(a=X) | {named("d"): [version(150, 0, ID, X)]}
    now, lines = found(rename(200, 0, X, "a"), known=known, names=names)
    assert lines == [
        "another table is public.a now: the tables of the dropped one go on as public.a~11",
        "public.d is public.a now: its tables go on under the new name",
    ]
    assert (now.home(X, named("a")), now.name(named("a"))) == (named("d"), named("a", X))
    # A change from before it in the same segments does not count either.
    now, lines = found(change(60, 0, X, "a"), change(150, 0, Z, "a"), rename(200, 0, X, "new"), known=newest(a=X), names=names)
    assert (now.namings, lines) == (names.namings, [])


def test_a_server_that_lost_changes_gives_their_oids_to_other_tables() -> None:
    """As after a failover: it has what the log has up to 50. A table from before that keeps its OID, and is followed."""
    names = Names([Naming((7, 0), Y, named("b"), named("c"), named("b"))])
    names.servers = Servers([100], [50])
    for lsn, expected in ((50, named("a")), (60, named("new"))):  # where the table came: behind 50 it was lost
        known = {named("a"): [version(lsn, 0, ID, X)], named("b"): [version(5, 0, ID, Y)]}
        now, lines = found(rename(200, 0, X, "new"), known=known, names=names)
        assert (now.home(X, named("new"), (300, 0)), bool(lines)) == (expected, expected == named("a"))
    # A change that was lost does not hide the versions from before it, nor do those names end that it has.
    known = {named("a"): [version(10, 0, ID, X), version(60, 0, ID, Z)]}
    now, lines = found(rename(200, 0, X, "new"), rename(210, 0, Z, "other"), known=known, names=names)
    assert (lines, now.home(X, named("new"))) == (["public.a is public.new now: its tables go on under the new name"], named("a"))
    assert now.home(Z, named("other")) == named("other")
    assert [names.home(Y, named(name), (200, 0)) for name in "bc"] == [named("b")] * 2
    # Nor does one in the same segments. Those tell as the versions do, from the first change of a table on.
    seen = change(40, 0, X, "a"), change(60, 0, Z, "lost"), rename(200, 0, X, "new"), rename(210, 0, Z, "other")
    for more in ((), (change(60, 1, X, "a"),), (change(60, 1, Z, "a"),)):
        now, lines = found(*seen, *more, known={}, names=names)
        assert lines == ["public.a is public.new now: its tables go on under the new name"]
        assert [now.home(*each) for each in ((X, named("new")), (Z, named("other")))] == [named("a"), named("other")]


def test_a_rename_that_was_lost_is_undone() -> None:
    names = Names()
    names.servers = Servers([100], [50])
    renames = rename(40, 0, X, "b"), rename(60, 0, X, "c"), rename(70, 0, X, "d")
    # The changes before the gap and those behind it may come in the same segments, or not.
    for events in ([*renames, change(200, 0, X, "b")], [*renames[:2]], [*renames]):
        now, _ = found(*events, known=newest(a=X), names=names)
        now, _ = found(change(200, 0, X, "b"), rename(210, 0, Y, "z"), known=newest(a=X), names=now)
        assert [str(now.name(named("a"), (lsn, 0))) for lsn in (45, 65, 100, 101)] == [
            "public.b",
            "public.c",
            "public.d" if renames[2] in events else "public.c",
            "public.b",
        ]
        assert (now.home(X, named("b")), shown(now, named("a"))) == (named("a"), ["public.b"])
        assert now.undone((300, 0)) == []
        assert now.home(Z, named("c"), (200, 0)) == named("c")  # the lost name is free
        assert [now.is_called(X, named(name)) for name in "abc"] == [False, True, False]
    assert found(change(200, 0, X, "b"), known=newest(a=X), names=now)[0] is now


@pytest.mark.parametrize(
    ("common", "name"),
    [
        (150, "c"),  # the second one has the change at 130
        (80, "b"),  # it goes on from where the first one had already lost changes
        (40, "a"),  # it has lost more than the first one
    ],
)
def test_what_a_second_failover_undoes(common: int, name: str) -> None:
    """A name that the first one has lost never comes back."""
    names = Names()
    names.servers = Servers([100, 200], [60, common])
    steps = rename(50, 0, X, "b"), rename(70, 0, X, "lost"), rename(130, 0, X, "c")
    # Each server's changes come by themselves, or those of both servers come together.
    at_once, _ = found(*steps, change(210, 0, Y, "y"), known=newest(a=X), names=names)
    apart = names
    for step in (*steps, change(210, 0, Y, "y")):
        apart, _ = found(step, known=newest(a=X), names=apart)
    late, _ = found(*steps, known=newest(a=X), names=names)
    for naming in late.undone((210, 0)):
        late.add(naming)
    for now in (at_once, apart, late):
        called = [now.name(named("a"), (lsn, 0)).name for lsn in (55, 75, 101, 140, 201)]
        assert called == ["b", "lost", "b", "c", name]
        assert now.undone((300, 0)) == []
    # Nothing of the first server has come to the tables.
    early, _ = found(*steps[:2], known=newest(a=X), names=names)
    undone = [(each.place[0], each.former.name, each.name.name) for each in early.undone((210, 0))]
    assert undone == [(101, "lost", "b"), *([(201, "b", "a")] if common == 40 else [])]


def test_a_copy_of_another_server_tells_nothing_of_the_tables_before_it() -> None:
    """It may be there before the changes from before the gap: these are in the log, and the copy does not wait for them."""
    names = Names()
    names.servers = Servers([100])
    copied = {named("d"): [version(150, 0, ID, X)]}
    # A table that is created before the gap has the OID of one that was copied behind it.
    events = rename(50, 0, X, "new"), change(50, 1, X, "new")
    now, lines = found(*events, known=copied, names=names)
    assert (now.namings, lines) == (names.namings, [])
    assert (now.home(X, named("new"), (50, 1)), now.home(X, named("d"), (200, 0))) == (named("new"), named("d"))
    # So has one that is renamed: the table before the gap is known by its own changes, whatever was copied since.
    for known in newest(a=X) | copied, {named("a"): [*newest(a=X)[named("a")], version(150, 0, ID, Y)]} | copied:
        now, lines = found(rename(50, 0, X, "new"), known=known, names=names)
        assert lines == ["public.a is public.new now: its tables go on under the new name"]
        # The name counts for these changes alone: behind the gap the OID is that of the other table, also under the same name.
        assert [now.home(X, named("new"), (lsn, 9)) for lsn in (50, 100)] == [named("a")] * 2
        assert now.home(X, named("d"), (200, 0)) == named("d")
    # A name that was recorded behind the gap tells nothing of changes before it.
    names = Names([Naming((150, 0), X, named("e"), named("f"), named("e"))])
    names.servers = Servers([100])
    assert [names.home(X, named("f"), (lsn, 0)) for lsn in (100, 150)] == [named("f"), named("e")]


def test_two_tables_change_their_names_in_one_transaction() -> None:
    steps = [rename(10, 0, X, "tmp"), rename(10, 0, Y, "a"), rename(10, 0, X, "b")]
    names, lines = found(*steps, change(10, 0, X, "b"), change(10, 1, Y, "a"), known=newest(a=X, b=Y))
    assert shown(names, named("a"), named("b")) == ["public.b", "public.a"]
    assert lines == [f"public.{old} is public.{new} now: its tables go on under the new name" for old, new in ("ab", "ba")]
    assert (names.home(X, named("b")), names.home(Y, named("a"))) == (named("a"), named("b"))
    # Nothing else was ever called tmp: a table that is created with this name has tables of this name.
    assert names.home(Z, named("tmp"), (20, 0)) == named("tmp")


def test_a_name_that_comes_back() -> None:
    names, lines = found(rename(10, 0, X, "b"), rename(20, 0, X, "a"), known=newest(a=X))
    assert (shown(names, named("a")), lines) == (["public.a"], [])
    assert names.former(named("a")) == {named("b")}


def test_a_dropped_table_loses_its_name() -> None:
    """It does so when another table is renamed to it. A table that is created goes on in its tables."""
    names, lines = found(change(8, 0, Y, "b"), rename(10, 0, X, "b"), known=newest(a=X, b=Y))
    assert shown(names, named("a"), named("b")) == ["public.b", "public.b~12"]
    assert lines == [
        "another table is public.b now: the tables of the dropped one go on as public.b~12",
        "public.a is public.b now: its tables go on under the new name",
    ]
    assert names.home(Y, named("b"), (8, 0)) == named("b")
    assert names.home(Z, named("b"), (20, 0)) == named("a")
    assert encode_name(named("b", Y)) == "public.b~12"


@pytest.mark.parametrize(
    "said",
    [
        rename(10, 0, X, "b", kind="installed"),  # what was renamed before the capture
        rename(10, 0, Z, "b"),  # no table of the warehouse
        rename(10, 0, X, "a"),
    ],
)
def test_what_is_no_rename(said: Ddl) -> None:
    names, lines = found(said, known=newest(a=X))
    assert (list(names.namings), lines) == ([], [])


def test_a_copy_that_has_the_name_already() -> None:
    ahead = newest(a=X) | {named("b"): [version(50, 0, ID, X)]}
    assert list(found(rename(10, 0, X, "b"), known=ahead)[0].namings) == []
    later = newest(a=X) | {named("b"): [version(50, 0, ID, Z)]}
    assert list(found(rename(10, 0, X, "b"), known=later)[0].namings) == []


def test_a_table_that_is_made_anew_and_has_no_change_yet() -> None:
    """It goes on in the home of the dropped one, which is recorded: a copy need not wait for its first change."""
    created = rename(10, 0, Y, "a", tag="CREATE TABLE")
    names, lines = found(created, rename(10, 0, Y, "a", tag="COMMENT"), rename(10, 0, Z, "b"), known=newest(a=X))
    assert ([naming.relation_id for naming in names.namings], lines) == ([Y], [])
    assert names.home(Y, named("a")) == names.home(X, named("a")) == named("a")
    assert [names.is_called(number, named("a")) for number in (X, Y, Z)] == [False, True, False]
    assert names.since(named("a")) is None
    # Another server that has not lost these changes, or one that has.
    for common, is_known in ((10, True), (9, False)):
        names.servers = Servers([100], [common])
        assert [names.is_called(Y, named("a"), (lsn, 0)) for lsn in (100, 101)] == [True, is_known]
        # What a server tells of such a table is recorded once for it.
        again, _ = found(rename(20, 0, Y, "a"), rename(200, 0, Y, "a"), rename(201, 0, Y, "a"), known=newest(a=X), names=names)
        assert [naming.place[0] for naming in again.namings] == ([10] if is_known else [10, 200])
    names.servers = Servers()
    # With another name before its first change it has tables of its own.
    names, _ = found(rename(20, 0, Y, "c"), change(20, 0, Y, "c"), names=names, known=newest(a=X))
    assert names.home(Y, named("c")) == named("c")
    assert shown(names, named("a"), named("c")) == ["public.a", "public.c"]


def test_a_decision_is_made_once() -> None:
    apart, _ = found(rename(10, 0, X, "b"), known=newest(a=X), is_following=False)
    assert (list(apart.namings), apart.done_lsn, apart.is_following) == ([], 10, False)
    assert list(found(rename(10, 0, X, "b"), known=newest(a=X), names=apart)[0].namings) == []
    names, _ = found(rename(10, 0, X, "b"), known=newest(a=X))
    again, lines = found(rename(10, 0, X, "b"), known=newest(a=X), names=names)
    assert (again is names, lines) == (True, [])
    assert Names.from_json(names.to_json()).to_json() == names.to_json()


@dataclass
class Server:
    """The oracle: tables with their names, and the tables of the warehouse by name. It knows nothing of positions."""

    rng: random.Random
    names: dict[int, str] = field(default_factory=dict)
    """The name of each table, by OID."""
    home_of: dict[int, Table] = field(default_factory=dict)
    """By OID: the tables of the warehouse that have its changes. A table without changes has none."""
    held: dict[str, Table] = field(default_factory=dict)
    """By name: the tables of the warehouse that are called so, also those of a dropped table."""
    occupants: dict[Table, Version] = field(default_factory=dict)
    lost: dict[Table, str] = field(default_factory=dict)
    next_id: int = 1

    def transaction(self, lsn: int) -> list[tuple[Use | Ddl, Table | None]]:
        """Return what a transaction writes; with each change its table of the warehouse."""
        made: list[tuple[Use | Ddl, Table | None]] = []
        ordinal = 0
        for _ in range(self.rng.randint(1, 6)):
            relation_id = self.rng.choice([*self.names, 0])
            match self.rng.randrange(6):
                case 0 if len(self.names) < 5:
                    made.append((self.create(lsn, ordinal), None))
                case 1 if relation_id and self.rng.random() < 0.4:
                    made.append((self.drop(lsn, ordinal, relation_id), None))
                case 2 | 3 if relation_id and len(self.names) < 5:
                    made.append((self.rename(lsn, ordinal, relation_id), None))
                case _ if relation_id:
                    made.append(
                        (change(lsn, ordinal, relation_id, self.names[relation_id]), self.change(lsn, ordinal, relation_id))
                    )
                    ordinal += 1
        return made

    def free(self) -> str:
        return self.rng.choice([name for name in "abcde" if name not in self.names.values()])

    def create(self, lsn: int, ordinal: int) -> Ddl:
        self.names[self.next_id] = self.free()
        self.next_id += 1
        return rename(lsn, ordinal, self.next_id - 1, self.names[self.next_id - 1], tag="CREATE TABLE")

    def drop(self, lsn: int, ordinal: int, relation_id: int) -> Ddl:
        gone = {"type": "table", "oid": relation_id, "schema": "public", "name": self.names.pop(relation_id)}
        return ddl(lsn, ordinal, kind="drop", tag="DROP TABLE", dropped=[gone])

    def change(self, lsn: int, ordinal: int, relation_id: int) -> Table:
        name = self.names[relation_id]
        if relation_id not in self.home_of:
            new = named(name, relation_id if named(name) in self.occupants else 0)
            self.home_of[relation_id] = home = self.held.setdefault(name, new)
            self.occupants[home] = version(lsn, ordinal, ID, relation_id)
        return self.home_of[relation_id]

    def rename(self, lsn: int, ordinal: int, relation_id: int) -> Ddl:
        old, new = self.names[relation_id], self.free()
        self.names[relation_id] = new
        home = self.home_of.get(relation_id)
        if home is not None:
            del self.held[old]
            if new in self.held:
                self.lost[self.held[new]] = f"public.{new}~{self.occupants[self.held[new]].relation_id}"
            self.held[new] = home
        return rename(lsn, ordinal, relation_id, new)

    def shown(self) -> dict[Table, str]:
        return self.lost | {home: f"public.{name}" for name, home in self.held.items()}


def split(events: Iterable[Use | Ddl]) -> tuple[list[Use], list[Ddl]]:
    listed = list(events)
    return [each for each in listed if isinstance(each, Use)], [each for each in listed if isinstance(each, Ddl)]


@pytest.mark.parametrize("seed", range(60))
def test_random_names(seed: int) -> None:
    """Each change goes to the table that it belongs to, whatever a micro-batch has, and after each kill."""
    rng = random.Random(seed)
    server, names, lsn = Server(rng), Names(), 0
    for _ in range(30):
        versions = {home: [known] for home, known in server.occupants.items()}
        batch: list[tuple[Use | Ddl, Table | None]] = []
        for _ in range(rng.randint(1, 3)):
            lsn += 10
            batch += server.transaction(lsn)
            if rng.random() < 0.2:  # a micro-batch is killed after its names were recorded; some tables have its changes
                names = Names.from_json(follow(names, *split(each for each, _ in batch), versions, is_following=True).to_json())
                versions |= {home: [known] for home, known in server.occupants.items() if rng.random() < 0.5}
        names = follow(names, *split(each for each, _ in batch), versions, is_following=True)
        for each, home in batch:
            if isinstance(each, Use):
                assert names.home(each.relation.relation_id, each.name, (each.end_lsn, each.ordinal)) == home
        assert {home: str(names.shown(home)) for home in server.occupants} == server.shown()
        for name in "abcde":
            free = None if named(name) in server.occupants else named(name)
            assert names.holder(named(name)) == server.held.get(name, free)
    assert names.namings
