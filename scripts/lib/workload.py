"""A small shop as a workload: several tables, two interleaved sessions, everything that makes change capture hard.

Inserts, updates and deletes of many rows and of single ones, texts that PostgreSQL moves out of line (TOAST) and that
an update of another column does not send again, changed keys, savepoints rolled back, whole transactions rolled back,
a truncate, one table without any key, and logical messages, some of which stay when their transaction is rolled back.
Everything else is counted when, and only when, its transaction commits: `Workload.committed` is what a changelog has to hold.

The same seed gives the same transactions. One thread drives both sessions in turn; each changes only rows of its own
(`id % 2`), so that neither waits for the other.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

import psycopg

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KEYS", "MESSAGES", "SCHEMA", "Workload", "make_tables"]

SCHEMA = """
create table customers (
    id bigint primary key, name text not null, email text, active boolean not null, created timestamptz not null);
create table orders (
    id bigint primary key, customer_id bigint not null, amount numeric(12,2) not null, status text not null,
    placed timestamptz not null, due date);
create table order_lines (
    order_id bigint, line integer, product text not null, quantity integer not null, price double precision,
    primary key (order_id, line));
create table documents (
    id bigint primary key, title text not null, body text not null, revision integer not null);
-- Out of line and not compressed: an update of another column leaves the body out of the stream.
alter table documents alter column body set storage external;
create table carts (id bigint primary key, content jsonb not null);
create table visits (customer_id bigint, page text not null, seen timestamptz not null)
"""

KEYS: dict[str, list[str]] = {
    "customers": ["id"],
    "orders": ["id"],
    "order_lines": ["order_id", "line"],
    "documents": ["id"],
    "carts": ["id"],
    "visits": [],
}

MESSAGES = "_cdc_message"
"""Under this name logical messages are counted."""


def make_tables(connection: psycopg.Connection[Any]) -> None:
    """Create the tables, empty."""
    connection.execute(SCHEMA.encode())


class _Session:
    """One connection; counts what its open transaction has changed."""

    def __init__(self, dsn: str, parity: int, rng: random.Random) -> None:
        self.connection = psycopg.connect(dsn)
        self.parity = parity
        self.rng = rng
        # Ids grow by two from the parity on.
        self.next_id: Counter[str] = Counter(dict.fromkeys(KEYS, parity))
        self.changes: Counter[str] = Counter()

    def change(self, table: str, statement: str, **parameters: Any) -> None:
        done = self.connection.execute(statement.encode(), parameters)
        self.changes[table] += done.rowcount

    def take_ids(self, table: str, count: int) -> tuple[int, int]:
        """Reserve `count` ids of this session: the first and the last."""
        first = self.next_id[table]
        self.next_id[table] = first + 2 * count
        return first, first + 2 * (count - 1)

    def some_ids(self, table: str, count: int) -> tuple[int, int]:
        """Return a range that holds at most `count` ids used so far, of which some may be gone."""
        last = max(self.next_id[table] - 2, self.parity)
        first = self.rng.randrange(self.parity, last + 1)
        return first, first + 2 * (count - 1)


class Workload:
    """Runs transactions against the tables that `make_tables` has made; close it, or use it as a context manager."""

    def __init__(self, dsn: str, *, seed: int = 1) -> None:
        self.committed: Counter[str] = Counter()
        self.transactions = self.rollbacks = 0
        self._rng = random.Random(seed)
        self._sessions = [_Session(dsn, parity, self._rng) for parity in (0, 1)]
        self._steps: list[tuple[Callable[[_Session], None], int]] = [
            (self._new_customers, 3),
            (self._new_orders, 8),
            (self._update_orders, 8),
            (self._single_rows, 6),
            (self._delete_orders, 3),
            (self._new_documents, 2),
            (self._retitle_documents, 3),
            (self._rewrite_documents, 1),
            (self._change_keys, 1),
            (self._savepoint, 4),
            (self._carts, 2),
            (self._visits, 3),
            (self._messages, 2),
        ]

    @property
    def done(self) -> int:
        """How many changes have been committed."""
        return self.committed.total()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the sessions; what is not committed is rolled back."""
        for session in self._sessions:
            session.connection.close()

    def run(self, changes: int, duration_s: float = 0) -> None:
        """Commit about so many changes more, over so many seconds (0: as fast as it goes)."""
        started, begun = time.monotonic(), self.done
        while self.done - begun < changes:
            self._interleave()
            ahead = (self.done - begun) / changes * duration_s - (time.monotonic() - started)
            if ahead > 0:
                time.sleep(ahead)

    def alter(self) -> None:
        """Give the orders a column, and some of them a value in it, in the same transaction."""
        session = self._sessions[0]
        session.change("orders", "update orders set status = 'before' where id < 20")
        session.connection.execute("alter table orders add column note text")
        session.change("orders", "update orders set note = 'after, ' || status where id < 200")
        self._commit(session)

    def truncate(self) -> None:
        """Truncate a table, and begin it anew in the same transaction."""
        session = self._sessions[0]
        session.connection.execute("truncate carts")
        session.changes["carts"] += 1
        session.change("carts", "insert into carts values (-1, '{}')")
        self._commit(session)

    def _interleave(self) -> None:
        """Run one transaction in each session, statement by statement in turn; who began last may commit first."""
        open_sessions = {session: self._rng.randint(1, 4) for session in self._sessions}
        while open_sessions:
            session = self._rng.choice(list(open_sessions))
            if open_sessions[session] == 0:
                self._finish(session)
                del open_sessions[session]
            else:
                open_sessions[session] -= 1
                (step,) = self._rng.choices([s for s, _ in self._steps], [weight for _, weight in self._steps])
                step(session)

    def _finish(self, session: _Session) -> None:
        if self._rng.random() >= 0.08:
            self._commit(session)
        else:
            session.connection.rollback()
            session.changes = Counter()
            self.rollbacks += 1

    def _commit(self, session: _Session) -> None:
        session.connection.commit()
        self.committed += session.changes
        self.transactions += 1
        session.changes = Counter()

    def _new_customers(self, session: _Session) -> None:
        first, last = session.take_ids("customers", self._rng.choice([1, 5, 50]))
        session.change(
            "customers",
            """insert into customers select i, 'Customer ' || i || ' "the, best" ' || chr(233),
               nullif(i %% 7, 0) || '@shop.example',
               i %% 5 <> 0, now()
               from generate_series(%(first)s::bigint, %(last)s, 2) i""",
            first=first,
            last=last,
        )

    def _new_orders(self, session: _Session) -> None:
        first, last = session.take_ids("orders", self._rng.choice([1, 10, 100, 400]))
        session.change(
            "orders",
            """insert into orders select i, i / 10, (i * 137 %% 1000000) / 100.0, 'new', clock_timestamp(),
               case when i %% 3 > 0 then date '2026-01-01' + (i %% 1000)::int end
               from generate_series(%(first)s::bigint, %(last)s, 2) i""",
            first=first,
            last=last,
        )
        session.change(
            "order_lines",
            """insert into order_lines select i, line, 'product ' || (i + line) %% 500, 1 + (i %% 9)::int, i / 7.0
               from generate_series(%(first)s::bigint, %(last)s, 2) i, generate_series(1, 1 + (i %% 3)::int) line""",
            first=first,
            last=last,
        )

    def _update_orders(self, session: _Session) -> None:
        first, last = session.some_ids("orders", self._rng.choice([1, 20, 300]))
        session.change(
            "orders",
            """update orders set status = %(status)s, amount = amount + 0.01
               where id between %(first)s and %(last)s and id %% 2 = %(parity)s""",
            status=self._rng.choice(["paid", "packed", "sent", "back\nagain", ""]),
            first=first,
            last=last,
            parity=session.parity,
        )

    def _single_rows(self, session: _Session) -> None:
        """Change one order again and again: only the last state may be in the replica."""
        order, _ = session.some_ids("orders", 1)
        order -= (order - session.parity) % 2
        for status in ("opened", "changed", "closed"):
            session.change("orders", "update orders set status = %(status)s where id = %(id)s", status=status, id=order)

    def _delete_orders(self, session: _Session) -> None:
        first, last = session.some_ids("orders", self._rng.choice([1, 40]))
        for table, column in (("order_lines", "order_id"), ("orders", "id")):
            session.change(
                table,
                f"delete from {table} where {column} between %(first)s and %(last)s and {column} %% 2 = %(parity)s",
                first=first,
                last=last,
                parity=session.parity,
            )

    def _new_documents(self, session: _Session) -> None:
        first, last = session.take_ids("documents", 3)
        session.change(
            "documents",
            """insert into documents select i, 'Title ' || i, repeat(md5(i::text), 100 + (i %% 100)::int), 1
               from generate_series(%(first)s::bigint, %(last)s, 2) i""",
            first=first,
            last=last,
        )

    def _retitle_documents(self, session: _Session) -> None:
        """Leave the body alone: the server does not send it."""
        first, last = session.some_ids("documents", 10)
        session.change(
            "documents",
            """update documents set title = title || '.', revision = revision + 1
               where id between %(first)s and %(last)s and id %% 2 = %(parity)s""",
            first=first,
            last=last,
            parity=session.parity,
        )

    def _rewrite_documents(self, session: _Session) -> None:
        first, last = session.some_ids("documents", 4)
        session.change(
            "documents",
            """update documents set body = reverse(body) || revision, revision = revision + 1
               where id between %(first)s and %(last)s and id %% 2 = %(parity)s""",
            first=first,
            last=last,
            parity=session.parity,
        )

    def _change_keys(self, session: _Session) -> None:
        """Give documents and customers a new key; the body, out of line, is not sent again."""
        for table in ("documents", "customers"):
            old, _ = session.some_ids(table, 1)
            old -= (old - session.parity) % 2
            new, _ = session.take_ids(table, 1)
            session.change(table, f"update {table} set id = %(new)s where id = %(old)s", new=new, old=old)

    def _savepoint(self, session: _Session) -> None:
        """Roll a part of the transaction back, keep another."""
        self._new_orders(session)
        kept = session.changes.copy()
        session.connection.execute("savepoint half_way")
        self._new_orders(session)
        self._update_orders(session)
        if self._rng.random() < 0.5:
            session.connection.execute("rollback to savepoint half_way")
            session.changes = kept
        else:
            session.connection.execute("release savepoint half_way")
        self._update_orders(session)

    def _carts(self, session: _Session) -> None:
        # A truncate needs the table to itself, so one session has it alone.
        if session.parity == 0:
            first, last = session.take_ids("carts", 20)
            session.change(
                "carts",
                """insert into carts select i, jsonb_build_object('item', i, 'price', 1.10, 'tags', array['a', null])
                   from generate_series(%(first)s::bigint, %(last)s, 2) i""",
                first=first,
                last=last,
            )

    def _visits(self, session: _Session) -> None:
        session.change(
            "visits",
            """insert into visits select i, '/page/' || i %% 10, now()
               from generate_series(1, %(count)s) i""",
            count=self._rng.choice([1, 30]),
        )

    def _messages(self, session: _Session) -> None:
        """Say something in the WAL: in the transaction, or at once, whatever becomes of it."""
        is_transactional = self._rng.random() < 0.5
        content = self._rng.randbytes(self._rng.randrange(300))
        session.connection.execute("select pg_logical_emit_message(%s, 'shop', %s)", [is_transactional, content])
        counts = session.changes if is_transactional else self.committed
        counts[MESSAGES] += 1
