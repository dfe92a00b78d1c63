"""A small shop as a workload: several tables, two interleaved sessions, and everything that makes change capture hard.

The workload inserts, updates and deletes single rows and many rows. It has texts that PostgreSQL TOASTs and does not send again
when another column is updated. It changes keys, rolls back savepoints and whole transactions, truncates, has a table without a key,
and writes logical messages. Some of these messages remain although their transaction is rolled back. All other changes count if,
and only if, their transaction commits: `Workload.committed` is what a changelog must have.

The same seed gives the same transactions. One thread drives both sessions in turn. Each session changes only its own rows
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
    """Create the tables, without rows."""
    connection.execute(SCHEMA.encode())


class _Session:
    """One connection. It counts the changes of its open transaction."""

    def __init__(self, dsn: str, parity: int, rng: random.Random) -> None:
        self.connection = psycopg.connect(dsn)
        self.parity = parity
        self.rng = rng
        # Ids start at the session's parity and grow by two.
        self.next_id: Counter[str] = Counter(dict.fromkeys(KEYS, parity))
        self.changes: Counter[str] = Counter()

    def change(self, table: str, statement: str, **parameters: Any) -> None:
        done = self.connection.execute(statement.encode(), parameters)
        self.changes[table] += done.rowcount

    def take_ids(self, table: str, count: int) -> tuple[int, int]:
        """Reserve `count` ids for this session. Return the first and the last."""
        first = self.next_id[table]
        self.next_id[table] = first + 2 * count
        return first, first + 2 * (count - 1)

    def some_ids(self, table: str, count: int) -> tuple[int, int]:
        """Return a range with at most `count` ids that were used before. Some of them may be deleted."""
        last = max(self.next_id[table] - 2, self.parity)
        first = self.rng.randrange(self.parity, last + 1)
        return first, first + 2 * (count - 1)


class Workload:
    """Runs transactions on the tables that `make_tables` has made. It is a context manager, or can be closed."""

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
        """The number of committed changes."""
        return self.committed.total()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the sessions. Open transactions are rolled back."""
        for session in self._sessions:
            session.connection.close()

    def run(self, changes: int, duration_s: float = 0) -> None:
        """Commit about this many more changes, spread over this many seconds (0: as fast as possible)."""
        started, begun = time.monotonic(), self.done
        while self.done - begun < changes:
            self._interleave()
            ahead = (self.done - begun) / changes * duration_s - (time.monotonic() - started)
            if ahead > 0:
                time.sleep(ahead)

    def alter(self) -> None:
        """Add a column to the orders, and fill it for some of them in the same transaction."""
        session = self._sessions[0]
        session.change("orders", "update orders set status = 'before' where id < 20")
        session.connection.execute("alter table orders add column note text")
        session.change("orders", "update orders set note = 'after, ' || status where id < 200")
        self._commit(session)

    def truncate(self) -> None:
        """Truncate a table, and insert new rows in the same transaction."""
        session = self._sessions[0]
        session.connection.execute("truncate carts")
        session.changes["carts"] += 1
        session.change("carts", "insert into carts values (-1, '{}')")
        self._commit(session)

    def _interleave(self) -> None:
        """Run one transaction in each session, one statement at a time in turn. The one that began last may commit first."""
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
        """Change one order repeatedly. A replica may have only its last state."""
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
        """Update the title and not the body. The server then does not send the body."""
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
        """Give documents and customers new keys. The body is TOASTed, so it is not sent again."""
        for table in ("documents", "customers"):
            old, _ = session.some_ids(table, 1)
            old -= (old - session.parity) % 2
            new, _ = session.take_ids(table, 1)
            session.change(table, f"update {table} set id = %(new)s where id = %(old)s", new=new, old=old)

    def _savepoint(self, session: _Session) -> None:
        """Roll back one part of the transaction, and keep another."""
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
        # A truncate locks the whole table. So only one session uses it.
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
        """Write a logical message: in the transaction, or one that stays whatever becomes of the transaction."""
        is_transactional = self._rng.random() < 0.5
        content = self._rng.randbytes(self._rng.randrange(300))
        session.connection.execute("select pg_logical_emit_message(%s, 'shop', %s)", [is_transactional, content])
        counts = session.changes if is_transactional else self.committed
        counts[MESSAGES] += 1
