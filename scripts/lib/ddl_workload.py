"""Random DDL and changes of rows by several sessions at once, the same for the same seed.

One thread runs the statements of all sessions, so they interleave as the seed decides. No session ever waits for another one: a
table that one session alters is left alone by the others until its transaction has ended, and so is a row that one has changed.
Transactions commit, roll back, or are prepared and end later. Savepoints are released or rolled back to.

What a session may do next comes from the catalog, as its own transaction sees it. So nothing has to be undone here on a rollback.

The tables have keys of one to three columns, all replica identities, and values out of line (TOAST). A table is ``certain`` if no
command computes values that captured DDL does not tell. Such a table never needs a copy.

Certain tables also get other names, and exchange them. A table's *line* is its name at the beginning: a renamed table keeps it, and
so does a table that is dropped and made again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

__all__ = ["State", "Workload"]

_NUMBERS, _TEXTS = ("a", "b", "c"), ("t", "u", "v")
"""The names that columns may have. A column of one kind never gets a name of the other."""
_KEYS = ("id", "k, m", "m, k", "id, k", "id, k, m")
_BIG = 3000
_COLUMNS = """
    select attname from pg_attribute
    where attrelid = %s::regclass and attnum > 0 and not attisdropped and attgenerated = '' order by attnum"""
_LOCK_TIMEOUT = "10s"
"""A session that waits so long waits for another one, which is a mistake here."""


@dataclass(frozen=True, slots=True)
class State:
    """The rows of a table at a position of the WAL, as text. ``line`` is the table's name at the beginning."""

    line: str
    lsn: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


@dataclass(slots=True)
class _Transaction:
    """What an open or a prepared transaction holds."""

    altered: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    rows: set[tuple[str, int]] = field(default_factory=set)
    length: int = 0
    created: dict[str, str] = field(default_factory=dict)


class Workload:
    """The tables and the sessions. ``tables`` maps each table's name to whether it is certain, ``lines`` to its line."""

    def __init__(
        self, connect: Callable[[], psycopg.Connection[Any]], seed: int, sessions: int = 3, *, renames: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.tables = {"one": True, "other": True, "third": True, "computed": False, "parts": False}
        self.lines = {name: name for name in self.tables}
        self._renames = renames
        self._watcher = connect()
        self._sessions: dict[psycopg.Connection[Any], _Transaction | None] = {connect(): None for _ in range(sessions)}
        self._prepared: dict[str, _Transaction] = {}
        self._next_id, self._next_name = 1, 1
        for session in self._sessions:
            session.prepare_threshold = None
            session.execute(f"set lock_timeout = '{_LOCK_TIMEOUT}'")
            session.execute("set client_min_messages = warning")

    def prepare(self) -> None:
        """Create the tables, and the publication."""
        for name in self.tables:
            for statement in self._create(name):
                self._watcher.execute(statement)
        self._watcher.execute("create publication everything for all tables with (publish_via_partition_root = true)")

    def fill(self) -> None:
        """Insert a few rows into each table."""
        for name in self.tables:
            for _ in range(3):
                self._watcher.execute(self._insert(self._watcher, name))

    def close(self) -> None:
        """Close the connections."""
        for connection in (self._watcher, *self._sessions):
            connection.close()

    # --- transactions ---

    def work(self, steps: int) -> None:
        """Run so many statements, and leave the transactions as they are then."""
        for _ in range(steps):
            self._step()

    def settle(self) -> None:
        """End all transactions."""
        for session in self._sessions:
            self._end(session)
        for gid in list(self._prepared):
            self._end_prepared(gid)

    def columns(self, name: str) -> list[str]:
        """Return the present columns of a table, without generated ones."""
        return self._columns(self._watcher, name)

    def state(self) -> State | None:
        """Return the present rows of a certain table; None if no table can be read now."""
        free = [name for name, is_certain in self.tables.items() if is_certain and not self._holders(name, altered=True)]
        if not free:
            return None
        name = self.rng.choice(free)
        columns = tuple(self._columns(self._watcher, name))
        ((lsn,),) = self._watcher.execute("select pg_current_wal_insert_lsn()::text").fetchall()
        listed = ", ".join(f"{column}::text" for column in columns)
        return State(self.lines[name], str(lsn), columns, self._watcher.execute(f"select {listed} from {name}").fetchall())

    def _step(self) -> None:
        rng = self.rng
        if self._prepared and rng.random() < 0.15:
            self._end_prepared(rng.choice(list(self._prepared)))
            return
        if self._renames and rng.random() < 0.05:
            self._rename()
            return
        session = rng.choice(list(self._sessions))
        open_one = self._sessions[session]
        if open_one is not None and rng.random() < 0.1 + 0.08 * open_one.length:
            self._end(session)
            return
        if open_one is None:
            session.execute("begin")
            open_one = self._sessions[session] = _Transaction()
        free = [name for name in self.tables if not self._holders(name, altered=True, but=open_one)]
        if not free:
            self._end(session)
            return
        name = rng.choice(free)
        open_one.length += 1
        is_undone = rng.random() < 0.1
        if is_undone or rng.random() < 0.1:
            session.execute("savepoint s")
        else:
            is_undone = False
        for statement in self._statements(session, name, open_one):
            session.execute(statement)
        if is_undone:
            session.execute("rollback to s")

    def _rename(self) -> None:
        """Give a certain table another name, or exchange the names of two, if no transaction holds them."""
        free = [name for name, is_certain in self.tables.items() if is_certain and not self._holders(name, altered=False)]
        if not free:
            return
        one, other = self.rng.choice(free), self.rng.choice(free)
        if one != other:
            names = {one: other, other: one}
            commands = [(one, "x"), (other, one), ("x", other)]
        else:
            self._next_name += 1
            names = {one: f"renamed_{self._next_name}"}
            commands = list(names.items())
        with self._watcher.transaction():
            for old, new in commands:
                self._watcher.execute(f"alter table {old} rename to {new}")
        self.tables = {names.get(name, name): is_certain for name, is_certain in self.tables.items()}
        self.lines = {names.get(name, name): line for name, line in self.lines.items()}

    def _end(self, session: psycopg.Connection[Any]) -> None:
        open_one = self._sessions[session]
        if open_one is None:
            return
        self._sessions[session] = None
        how = self.rng.random()
        if how < 0.12:
            session.execute("rollback")
        elif how < 0.3:
            gid = f"t{self._next_name}"
            self._next_name += 1
            session.execute(f"prepare transaction '{gid}'")
            self._prepared[gid] = open_one
        else:
            session.execute("commit")

    def _end_prepared(self, gid: str) -> None:
        del self._prepared[gid]
        self._watcher.execute(f"{self.rng.choice(['commit', 'commit', 'commit', 'rollback'])} prepared '{gid}'")

    def _holders(self, name: str, *, altered: bool, but: _Transaction | None = None) -> list[_Transaction]:
        """Return the open transactions that have altered a table, or, unless ``altered``, changed it."""
        found = [each for each in (*self._sessions.values(), *self._prepared.values()) if each is not None and each is not but]
        return [each for each in found if name in each.altered or (not altered and name in each.changed)]

    # --- statements ---

    def _statements(self, session: psycopg.Connection[Any], name: str, held: _Transaction) -> list[str]:
        rng = self.rng
        if rng.random() < 0.4 and not self._holders(name, altered=False, but=held):
            held.altered.add(name)
            return self._ddl(session, name)
        held.changed.add(name)
        return [self._change(session, name, held)]

    def _create(self, name: str) -> list[str]:
        columns = "id int not null, k int not null, m int not null, a int, t text"
        if name == "parts":
            made = [f"create table {name} ({columns}, primary key (id)) partition by range (id)"]
            return [*made, f"create table {name}_0 partition of {name} for values from (0) to (1000000)"]
        key = self.rng.choice(_KEYS)
        made = [f"create table {name} ({columns}, primary key ({key}))", f"alter table {name} alter t set storage external"]
        return [*made, *self._identity(name)]

    def _identity(self, name: str) -> list[str]:
        # PostgreSQL 18 refuses UPDATE on a table with FULL and a generated column, which only such tables get.
        full = ["full", "full"] if self.tables[name] else []
        kind = self.rng.choice(["default", "default", *full, "index", "nothing"])
        if kind != "index":
            return [f"alter table {name} replica identity {kind}"]
        self._next_name += 1  # a renamed table keeps its indexes' names
        index = f"ident_{self._next_name}"
        return [f"create unique index {index} on {name} (id)", f"alter table {name} replica identity using index {index}"]

    def _columns(self, session: psycopg.Connection[Any], name: str) -> list[str]:
        return [column for (column,) in session.execute(_COLUMNS, [name]).fetchall()]

    def _value(self, column: str) -> str:
        rng = self.rng
        if rng.random() < 0.1:
            return "null"
        if column in _NUMBERS:
            return str(rng.randrange(1000))
        return f"repeat('{rng.choice('xyz')}', {_BIG if rng.random() < 0.4 else 5}) || '{rng.randrange(100)}'"

    def _new_key(self) -> tuple[int, int, int]:
        key, self._next_id = self._next_id, self._next_id + 1
        return key, key // 5, key % 5

    def _insert(self, session: psycopg.Connection[Any], name: str) -> str:
        data = _with_data(self._columns(session, name))
        values = [*map(str, self._new_key()), *(self._literal(session, name, column) for column in data)]
        return f"insert into {name} ({', '.join(['id', 'k', 'm', *data])}) values ({', '.join(values)})"

    def _literal(self, session: psycopg.Connection[Any], name: str, column: str) -> str:
        find = "select format_type(atttypid, atttypmod) from pg_attribute where attrelid = %s::regclass and attname = %s"
        ((kind,),) = session.execute(find, [name, column]).fetchall()
        return f"({self._value(column)})::{kind}"

    def _change(self, session: psycopg.Connection[Any], name: str, held: _Transaction) -> str:
        rng, choice = self.rng, self.rng.random()
        ((identity,),) = session.execute(f"select relreplident::text from pg_class where oid = '{name}'::regclass").fetchall()
        others = [each for each in (*self._sessions.values(), *self._prepared.values()) if each is not None and each is not held]
        taken = {row for each in others for row in each.rows}
        ids = [key for (key,) in session.execute(f"select id from {name} order by id").fetchall() if (name, key) not in taken]
        if choice < 0.03 and not self._holders(name, altered=False, but=held):
            held.altered.add(name)
            return f"truncate {name}"
        if not ids or choice < 0.4 or identity == "n":
            return self._insert(session, name)
        key = rng.choice(ids)
        held.rows.add((name, key))
        data = _with_data(self._columns(session, name))
        if choice < 0.75 and data:
            column = rng.choice(data)
            return f"update {name} set {column} = {self._literal(session, name, column)} where id = {key}"
        if choice < 0.88:
            new = self._new_key()
            return f"update {name} set id = {new[0]}, k = {new[1]}, m = {new[2]} where id = {key}"
        return f"delete from {name} where id = {key}"

    def _ddl(self, session: psycopg.Connection[Any], name: str) -> list[str]:
        """Return a command, or several that belong together."""
        rng, data = self.rng, _with_data(self._columns(session, name))
        if not self.tables[name] and rng.random() < 0.4:
            return self._computed(name, data)
        if name == "parts":
            return self._columns_changed(name, data)
        if rng.random() < 0.7:
            return self._columns_changed(name, data)
        alter = f"alter table {name} "
        match rng.randrange(5):
            case 0:
                find = f"select conname from pg_constraint where conrelid = '{name}'::regclass and contype = 'p'"
                ((constraint,),) = session.execute(find).fetchall()
                added = f"add constraint {constraint} primary key ({rng.choice(_KEYS)})"
                if rng.random() < 0.5:
                    return [f"{alter}drop constraint {constraint}, {added}"]
                return [f"{alter}drop constraint {constraint}", f"{alter}{added}"]
            case 1:
                return self._identity(name)
            case 2 if rng.random() < 0.4:
                return [f"drop table {name}", *self._create(name)]
            case 3:
                return [f"do $$ begin execute 'comment on table {name} is ''{rng.randrange(9)}'''; end $$"]
            case _:
                column = rng.choice(["id", *data])
                return [f"comment on column {name}.{column} is {rng.choice(['null', repr('text'), repr('other')])}"]

    def _columns_changed(self, name: str, data: list[str]) -> list[str]:
        """Return commands on the columns of one kind, with values that captured DDL tells."""
        alter, rng, kind = f"alter table {name} ", self.rng, self.rng.randrange(2)
        names = [column for column in data if column in (_NUMBERS, _TEXTS)[kind]]
        free = [column for column in (_NUMBERS, _TEXTS)[kind] if column not in data]
        made = ("int", "text")[kind]

        def added(column: str) -> str:
            default = self._value(column) if rng.random() < 0.6 else "null"
            return f"add {column} {made}" + ("" if default == "null" else f" default {default}")

        match rng.randrange(9):
            case 0 | 1 if free:
                return [alter + ", ".join(map(added, free[: rng.randint(1, len(free))]))]
            case 2 if names:
                return [f"{alter}drop {rng.choice(names)}"]
            case 3 if names:
                old = rng.choice(names)
                if rng.random() < 0.3:
                    return [f"{alter}drop {old}, {added(old)}"]
                return [f"{alter}drop {old}", f"{alter}{added(old)}"]
            case 4 if names and free:
                return [f"{alter}rename {rng.choice(names)} to {rng.choice(free)}"]
            case 5 if len(names) > 1:
                one, other = rng.sample(names, 2)
                return [f"{alter}rename {one} to x", f"{alter}rename {other} to {one}", f"{alter}rename x to {other}"]
            case 6 if names and not kind:
                return [f"{alter}alter {rng.choice(names)} type bigint"]
            case 7 if names:
                old = rng.choice(names)
                return [f"{alter}alter {old} set default {self._value(old)}", f"{alter}alter {old} drop default"][
                    : rng.randint(1, 2)
                ]
            case 8:
                return [f"{alter}rename to {name}_x", f"alter table {name}_x rename to {name}"]
        return [f"{alter}add x int default 3", f"{alter}drop x"]

    def _computed(self, name: str, data: list[str]) -> list[str]:
        """Return commands after which only a copy has the rows."""
        alter, rng = f"alter table {name} ", self.rng
        numbers, texts = ([column for column in data if column in names] for names in (_NUMBERS, _TEXTS))
        free = [column for column in _NUMBERS if column not in data]
        match rng.randrange(5):
            case 0 if free:
                return [f"{alter}add {free[0]} int default (random() * 1000)::int"]
            case 1 if numbers and name != "parts":
                kind = rng.choice(["int", "numeric(12,2)", "bigint"])
                return [f"{alter}alter {numbers[0]} type {kind} using ({numbers[0]} + 1) % 1000"]
            case 2 if texts:
                return [f"{alter}alter {texts[0]} type text using upper({texts[0]})"]
            case 3 if name == "parts":
                number, key = self._next_name, 1_000_000 + 1000 * self._next_name
                self._next_name += 1
                part = f"parts_{number}"
                return [
                    f"create table {part} (like parts including all)",
                    f"insert into {part} (id, k, m) select i, i, i from generate_series({key}, {key + 3}) i",
                    f"{alter}attach partition {part} for values from ({key}) to ({key + 1000})",
                ]
            case 4:
                return [
                    f"{alter}add column if not exists g int generated always as (id * 2) stored",
                    *([f"{alter}drop column if exists g"] if rng.random() < 0.7 else []),
                ]
        return [f"{alter}add x int default 3", f"{alter}drop x"]


def _with_data(columns: list[str]) -> list[str]:
    """Return the columns that have values of this workload."""
    return [column for column in columns if column in _NUMBERS + _TEXTS]
