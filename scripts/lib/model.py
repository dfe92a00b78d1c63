"""Random tables and transactions on a PostgreSQL that keeps a ledger of its commits: the model for what tables must hold.

`Model.prepare` makes a schema `app`, which is published, and a schema `ledger`, which is not. Each row of `app` has a `stamp`,
which is new with every change of the row. Triggers write every change into `ledger.change`, in the transaction that makes it. So
the ledger tells what was committed, and in which order inside a transaction, even if client or server are killed.

`Model.work` runs transactions of two sessions that interleave. They insert, upsert, update, delete and truncate rows. They change
keys, and exchange the keys of two rows. Values are at the edges of their types, or TOASTed and unchanged. There are nested
savepoints, prepared transactions, transactions large enough to be streamed, partitions, and ALTERs in between. Each session has its
own tables, so that neither waits for the other. A session knows only the catalog, so it can continue after the server was killed.

PostgreSQL sends nothing for some changes: RENAME COLUMN, ADD COLUMN ... DEFAULT and a table's new name rewrite no row. The same
transaction then updates all rows, unless `leave_untold` is set: in that case only a program that asks the server can know them.
A table gets another key, or is dropped and made again, only in a transaction that has not changed its rows before, unless
`rekey_with_rows` is set. Each table gets a new key only once. With REPLICA IDENTITY FULL, the stream tells nothing about a key that
existed only in between, so a program that is behind could not know it.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import random_transaction
from model_ledger import SCHEMA, Ledger
from model_values import EDGES, KEY_COUNT, KEYS, WIDER, literal, value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["PUBLICATION", "Model", "Relation", "quote"]

PUBLICATION = "model"

_NAMES = ["a", "B", "two words", 'q"u', "\u00e4\u4e16", "select", "x.y", "%s"]
_IDENTITIES = ["default"] * 4 + ["full"] * 3 + ["index"] * 2 + ["nothing"]


def quote(name: str) -> str:
    """Return a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


@dataclass
class Relation:
    """A table as the catalog describes it now: names quoted, types as `format_type` prints them."""

    name: str
    columns: dict[str, str]
    key: list[str]
    is_partitioned: bool
    is_numbered: bool
    """Whether a sequence gives the key: that of a table that was made again, or has got a new one."""

    @property
    def sql(self) -> str:
        """The table's name in SQL."""
        return f"app.{quote(self.name)}"

    @property
    def data(self) -> dict[str, str]:
        """The columns that belong neither to the key nor to the identity index, and are not the stamp."""
        return {name: kind for name, kind in self.columns.items() if name not in (*self.key, "stamp", "other")}


class _LostError(Exception):
    """The session is lost, and its transaction too unless it had committed."""


class _Session:
    def __init__(self, number: int, connect: Callable[[], psycopg.Connection[Any]]) -> None:
        self.number = number
        self.touched: set[str] = set()
        """The tables that the open transaction may have changed."""
        self._connect = connect
        self._connection: psycopg.Connection[Any] | None = None

    def open(self) -> None:
        """Connect. Try again while the server is starting."""
        if self._connection is not None and not self._connection.closed:
            return
        deadline = time.monotonic() + 120
        while True:
            try:
                self._connection = self._connect()
                self._connection.prepare_threshold = None
                # The holder of a lock that this session waits for may itself wait for our other session, which is not running then.
                self._connection.execute("set lock_timeout = '3s'")
                prefix = f"model {self.number} %"
                # A prepared transaction survives a crash of its server, and keeps its locks.
                for (gid,) in self._connection.execute("select gid from pg_prepared_xacts where gid like %s", [prefix]).fetchall():
                    self._connection.execute(f"rollback prepared {literal(gid)}".encode())
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    def run(self, statement: str) -> list[tuple[Any, ...]]:
        """Execute a statement. Raises _LostError if the connection is lost."""
        assert self._connection is not None
        try:
            cursor = self._connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []
        except psycopg.Error as ex:
            if self._connection.closed or (ex.sqlstate or "").startswith("57P"):
                self._connection.close()
                raise _LostError from ex
            raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class Model:
    """Random tables in a database of their own. The same seed gives the same work, if nobody kills the server."""

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        *,
        seed: int,
        tables: int = 6,
        leave_untold: bool = False,
        rekey_with_rows: bool = False,
    ) -> None:
        self._rng = random.Random(seed)
        self._connect = connect
        self._tables = tables
        self._names, self._most_names = 0, 2 * tables
        self._leave_untold = leave_untold
        self._rekey_with_rows = rekey_with_rows
        self._sessions = [_Session(number, connect) for number in (0, 1)]
        self._numbers = iter(range(1 << 30))
        self.via_root = self._rng.random() < 0.5
        """Whether a partition's changes are published as its root's."""
        self.alters = True
        """Whether tables are altered, made and dropped; keys and rows change in any case."""
        self.done = 0
        """How many transactions have come to their end, whatever it was."""

    def close(self) -> None:
        """Close the sessions. Open transactions are rolled back."""
        for session in self._sessions:
            session.close()

    def prepare(self) -> None:
        """Make the tables, without rows, and the publication."""
        with self._connect() as connection:
            connection.execute(SCHEMA.encode())
            connection.execute(b"create type app.mood as enum ('so so', 'ok')")
            via_root = str(self.via_root).lower()
            connection.execute(
                f"create publication {PUBLICATION} for tables in schema app with (publish_via_partition_root = {via_root})".encode()
            )
        for session in self._sessions:
            session.open()
            for _ in range(self._tables // 2):
                self._create(session)

    def work(self, transactions: int) -> None:
        """Run this number of transactions, two at a time."""
        for _ in range((transactions + 1) // 2):
            bodies = [self._transaction(session) for session in self._sessions]
            while bodies:
                body = self._rng.choice(bodies)
                if next(body, self) is self:
                    bodies.remove(body)

    def ledger(self) -> Ledger:
        """Return the committed changes."""
        with self._connect() as connection:
            return Ledger.read(connection)

    def relations(self) -> dict[str, Relation]:
        """Return the tables whose changes are published under their own names, by name."""
        with self._connect() as connection:
            return {
                relation.name: relation
                for relation, is_partition in _relations(lambda query: connection.execute(query.encode()).fetchall())
                if (not is_partition if self.via_root else not relation.is_partitioned)
            }

    def _transaction(self, session: _Session) -> Iterator[None]:
        """Run one transaction, step by step. It ends early if the server ends."""
        try:
            session.open()
            yield from self._steps(session)
        except _LostError:
            pass
        self.done += 1

    def _steps(self, session: _Session) -> Iterator[None]:
        rng = self._rng
        session.touched.clear()
        if self.alters and rng.random() < 0.05:
            yield from self._change_key_columns(session)
            return
        yield from random_transaction.steps(
            rng,
            session.run,
            lambda: self._statements(session),
            lambda: literal(f"model {session.number} {next(self._numbers)}"),
            count=rng.choice([1, 1, 2, 4, 8]),
            chances=random_transaction.Chances(make=0.25, leave=0.3, prepare=0.06, commit=0.86),
        )

    def _own(self, session: _Session) -> list[Relation]:
        """Return the session's tables as its transaction sees them."""
        return [
            relation
            for relation, is_partition in _relations(session.run)
            if not is_partition and relation.name.endswith(f" {session.number}")
        ]

    def _statements(self, session: _Session) -> list[str]:
        """Return the statements of the next step."""
        rng = self._rng
        own = self._own(session)
        if not own:
            return self._creation(session)
        table = rng.choice(own)
        is_untouched = table.name not in session.touched
        session.touched.add(table.name)
        action = rng.random()
        if action < 0.36:
            return [self._insert(table, rng.choice([1, 1, 3, 20, 20, 400 if rng.random() < 0.2 else 40]))]
        if action < 0.62:
            return [self._update(table, rng.choice([1, 3, 20]))]
        if action < 0.74:
            return self._new_keys(table)
        if action < 0.83:
            return [f"delete from {table.sql} where {self._some(table, rng.choice([1, 3, 10]))}"]
        if action < 0.845:
            other = rng.choice(own)
            session.touched.add(other.name)
            return [f"truncate {', '.join(dict.fromkeys([table.sql, other.sql]))}"]
        if action < 0.88:
            if rng.random() < 0.5:
                return ["select pg_logical_emit_message(false, 'aside', 'said')"]
            # A row comes first: a streamed message does not tell its savepoint, so one before the savepoint's first row would
            # stay if it is rolled back (docs/limits.md).
            transactional = f"insert into ledger.message values (pg_logical_emit_message(true, 'model', {rng.choice(_MESSAGES)}))"
            return [self._insert(table, 1), transactional]
        if not self.alters:
            return [self._update(table, 2)]
        return self._alter(session, table, may_begin_anew=is_untouched or self._rekey_with_rows)

    # --- rows ---

    def _some(self, table: Relation, count: int) -> str:
        """Return a condition that is true for about this many random rows."""
        salt = self._rng.randrange(1 << 30)
        return f"stamp in (select stamp from {table.sql} order by md5(stamp::text || '{salt}') limit {count})"

    def _key(self, table: Relation, number: str) -> list[str]:
        """Return expressions for the key's columns, with a different key for each `number` below KEY_COUNT."""
        if len(table.key) == 1:
            return [KEYS[table.columns[table.key[0]]].format(x=number)]
        parts = [f"({number}) / 10", f"({number}) % 10"]
        return [KEYS[table.columns[name]].format(x=part) for name, part in zip(table.key, parts, strict=True)]

    def _insert(self, table: Relation, count: int) -> str:
        rng = self._rng
        number = f"((i * {rng.choice([1, 7, 11])} + {rng.randrange(KEY_COUNT)}) % {KEY_COUNT})"
        if count > KEY_COUNT:
            number = f"(i + {1000 + 1000 * next(self._numbers)})"
        names, values = list(table.key), self._key(table, number) if table.key else []
        for name, kind in table.data.items():
            names.append(name)
            values.append(value(rng, kind))
        if "other" in table.columns:
            # The index is unique: the sequence gives another value each time.
            names.append("other")
            values.append("nextval('ledger.stamp')")
        conflict = "on conflict do nothing"
        if table.key and table.data and rng.random() < 0.3:
            name = quote(rng.choice(list(table.data)))
            conflict = f"on conflict ({', '.join(map(quote, table.key))}) do update set {name} = excluded.{name}"
        listed = ", ".join(map(quote, names))
        if not names:
            return f"insert into {table.sql} (stamp) select 0 from generate_series(1, {count}) i"
        return f"insert into {table.sql} ({listed}) select {', '.join(values)} from generate_series(1, {count}) i {conflict}"

    def _update(self, table: Relation, count: int) -> str:
        rng = self._rng
        chosen = rng.sample(list(table.data), min(len(table.data), rng.choice([1, 1, 2])))
        settings = [f"{quote(name)} = {value(rng, table.data[name], 'stamp % 1000')}" for name in chosen]
        if "other" in table.columns and rng.random() < 0.3:
            settings.append("other = nextval('ledger.stamp')")
        return f"update {table.sql} set {', '.join(settings or ['stamp = stamp'])} where {self._some(table, count)}"

    def _new_keys(self, table: Relation) -> list[str]:
        """Give a row another key, or let two rows exchange their keys."""
        rng = self._rng
        if not table.key:
            return [self._update(table, 2)]

        def at(number: int) -> str:
            pairs = zip(map(quote, table.key), self._key(table, str(number)), strict=True)
            return " and ".join(f"{name} = {value}" for name, value in pairs)

        def move(old: int, new: int) -> str:
            pairs = zip(map(quote, table.key), self._key(table, str(new)), strict=True)
            return f"update {table.sql} set {', '.join(f'{name} = {value}' for name, value in pairs)} where {at(old)}"

        one, two, free = rng.randrange(KEY_COUNT), rng.randrange(KEY_COUNT), KEY_COUNT + next(self._numbers) % 700
        if rng.random() < 0.6:
            return [f"delete from {table.sql} where {at(two)}"] * (rng.random() < 0.3) + [move(one, two)]
        return [move(one, free), move(two, one), move(free, two)]

    def _touch(self, name: str, columns: dict[str, str]) -> str:
        """Return an update that sends all rows, with all their values."""
        settings = ["stamp = stamp", *(f"{quote(n)} = {quote(n)} || ''" for n, kind in columns.items() if kind == "text")]
        return f"update app.{quote(name)} set {', '.join(settings)}"

    # --- tables ---

    def _create(self, session: _Session) -> None:
        for statement in self._creation(session):
            session.run(statement)

    def _creation(self, session: _Session) -> list[str]:
        """Return the statements that make a table."""
        rng = self._rng
        name = self._table_name(session)
        table = f"app.{quote(name)}"
        key = {f"{rng.choice(_NAMES)} k{number}": rng.choice(list(KEYS)) for number in range(rng.choice([0, 1, 1, 1, 2, 2]))}
        identity = rng.choice(_IDENTITIES) if key else rng.choice(["full", "full", "nothing"])
        columns = [f"{quote(column)} {kind}" for column, kind in key.items()]
        columns += [f"{quote(self._column())} {rng.choice(list(EDGES))}" for _ in range(rng.randint(0, 5))]
        long = self._column()
        columns += [f"{quote(long)} text", "stamp bigint not null"]
        is_partitioned = len(key) == 1 and list(key.values()) == ["integer"] and identity in ("default", "full")
        if identity == "index":
            columns.append("other bigint not null")
        rng.shuffle(columns)
        if key:
            columns.append(f"primary key ({', '.join(map(quote, key))})")
        by = f" partition by hash ({quote(next(iter(key)))})" if is_partitioned else ""
        statements = [f"create table {table} ({', '.join(columns)}){by}"]
        tables = [table]
        for part in range(2) if is_partitioned else ():
            tables.append(f"app.{quote(f'{name} part {part}')}")
            statements.append(f"create table {tables[-1]} partition of {table} for values with (modulus 2, remainder {part})")
        if identity == "index":
            index = f"i{next(self._numbers)}"
            statements.append(f"create unique index {index} on {table} (other)")
            statements.append(f"alter table {table} replica identity using index {index}")
        else:
            statements += [f"alter table {each} replica identity {identity}" for each in tables]
        statements += [f"alter table {each} alter {quote(long)} set storage external" for each in tables]
        return statements + self._triggers(table, tables)

    def _triggers(self, table: str, parts: list[str]) -> list[str]:
        """Return the statements that make the triggers for a table's changes. ``parts`` are the table and its partitions."""
        via_root = literal(str(self.via_root).lower())
        row = f"on {table} for each row execute function"
        note = f"create trigger note_truncate after truncate on {{}} execute function ledger.note_truncate({via_root})"
        return [
            f"create trigger stamp before insert or update {row} ledger.stamp()",
            f"create trigger note after insert or update or delete {row} ledger.note({via_root})",
            *(note.format(part) for part in parts),
        ]

    def _column(self) -> str:
        return f"{self._rng.choice(_NAMES)} c{next(self._numbers)}"

    def _alter(self, session: _Session, table: Relation, *, may_begin_anew: bool) -> list[str]:
        """Return statements that change a table. `_touch` follows if the stream does not tell the change."""
        rng = self._rng
        column = rng.choice(list(table.data)) if table.data else None
        kind = table.data.get(column or "", "")
        choice = rng.choice(["add", "add default", "drop", "rename column", "type", "rename", "anew", "identity", "new"])
        if choice == "add default":
            name, kind = self._column(), rng.choice(["integer", "text", "numeric(12,2)", "boolean"])
            default = literal(rng.choice(EDGES[kind]))
            alter = f"alter table {table.sql} add column {quote(name)} {kind} default {default}"
            return [alter, *self._told(table, table.columns | {name: kind})]
        if choice == "drop" and column:
            return [f"alter table {table.sql} drop column {quote(column)}"]
        if choice == "rename column" and column:
            name = self._column()
            columns = {name if old == column else old: kind for old, kind in table.columns.items()}
            alter = f"alter table {table.sql} rename {quote(column)} to {quote(name)}"
            return [alter, *self._told(table, columns)]
        if choice == "type" and column and kind in WIDER:
            return [f"alter table {table.sql} alter {quote(column)} type {rng.choice(WIDER[kind])}"]
        if choice == "rename" and not table.is_partitioned and self._names < self._most_names:
            name = self._table_name(session)
            gone = f"insert into ledger.change (name, op) values ({literal(table.name)}, 'drop')"
            touch = self._touch(name, table.columns)
            return [f"alter table {table.sql} rename to {quote(name)}", gone, touch]
        if choice == "anew" and may_begin_anew and not table.is_partitioned:
            gone = f"insert into ledger.change (name, op) values ({literal(table.name)}, 'drop')"
            # Without a row, nothing in the stream would tell that the table is another one.
            first = f"insert into app.{quote(table.name)} (stamp) values (0)"
            creation = self._creation_like(table)
            return [f"drop table {table.sql}", gone, *creation, first]
        if choice == "identity" and table.key and not table.is_partitioned and "other" not in table.columns:
            return [f"alter table {table.sql} replica identity {rng.choice(['full', 'default'])}"]
        if choice == "new" and self._names < self._most_names:
            return self._creation(session)
        return [f"alter table {table.sql} add column {quote(self._column())} {rng.choice(list(EDGES))}"]

    def _table_name(self, session: _Session) -> str:
        self._names += 1
        return f"{self._rng.choice(_NAMES)} {next(self._numbers)} {session.number}"

    def _creation_like(self, table: Relation) -> list[str]:
        """Return the statements that make another table with a dropped table's name. Its key is a number from a sequence."""
        columns = [f"{quote(self._column())} {self._rng.choice(list(EDGES))}" for _ in range(self._rng.randint(0, 3))]
        key = f"{quote(self._column())} integer primary key default nextval('ledger.stamp')"
        create = f"create table {table.sql} ({', '.join([key, 'stamp bigint not null', *columns])})"
        return [create, *self._triggers(table.sql, [table.sql])]

    def _told(self, table: Relation, columns: dict[str, str]) -> list[str]:
        return [] if self._leave_untold else [self._touch(table.name, columns)]

    def _change_key_columns(self, session: _Session) -> Iterator[None]:
        """Make another, new column the primary key. This takes two transactions, or one with `rekey_with_rows`."""
        own = self._own(session)
        chosen = [t for t in own if t.key and not (t.is_numbered or t.is_partitioned or "other" in t.columns)]
        if not chosen:
            return
        table, name, run = self._rng.choice(chosen), f"{self._column()}", session.run
        run("begin")
        add = f"alter table {table.sql} add column {quote(name)} integer not null default nextval('ledger.stamp')"
        random_transaction.all_or_none(session.run, [add, self._touch(table.name, table.columns)])
        yield
        if not self._rekey_with_rows:
            run("commit")
            run("begin")
        constraint = f"select conname from pg_constraint where conrelid = {literal(table.sql)}::regclass and contype = 'p'"
        found = run(constraint)
        drop = f"alter table {table.sql} drop constraint {quote(found[0][0])}" if found else "select"
        random_transaction.all_or_none(session.run, [drop, f"alter table {table.sql} add primary key ({quote(name)})"])
        yield
        run("commit")


_MESSAGES = ["'said'", "''", "'\\x00ff'::bytea", "repeat('large', 3000)"]

_CATALOG = """
select c.relname, c.relkind = 'p', c.relispartition, a.attname, format_type(a.atttypid, a.atttypmod),
       coalesce(a.attnum = any(i.indkey), false), coalesce(a.atthasdef, false)
from pg_class c left join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
left join pg_index i on i.indrelid = c.oid and i.indisprimary
where c.relnamespace = 'app'::regnamespace and c.relkind in ('r', 'p') order by c.relname collate "C", a.attnum"""

_SHORT = {
    "timestamp without time zone": "timestamp",
    "timestamp with time zone": "timestamptz",
    "time without time zone": "time",
    "character varying": "varchar",
}


def _relations(run: Callable[[str], list[tuple[Any, ...]]]) -> list[tuple[Relation, bool]]:
    """Return the tables, and whether each is a partition."""
    found: dict[str, tuple[Relation, bool]] = {}
    for name, is_partitioned, is_partition, column, kind, is_key, has_default in run(_CATALOG):
        relation, _ = found.setdefault(name, (Relation(name, {}, [], is_partitioned, is_numbered=False), is_partition))
        if column is None:
            continue
        base, parenthesis, rest = kind.partition("(")
        relation.columns[column] = _SHORT.get(base, base) + parenthesis + rest
        if is_key:
            relation.key.append(column)
            relation.is_numbered |= has_default
    return list(found.values())
