"""The ledger of model.py: triggers write every change into it, and `Ledger.read` returns what was committed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import psycopg

__all__ = ["SCHEMA", "Change", "Ledger"]

# This needs PostgreSQL 15: publications of schemas, and ON DELETE for a row that moves to another partition.
SCHEMA = """
create schema app;
create schema ledger;
create sequence ledger.stamp;
create table ledger.change (
    seq bigint not null default nextval('ledger.stamp'), xid bigint not null default pg_current_xact_id()::text::bigint,
    name text not null, op text not null, stamp bigint, old_stamp bigint);
create table ledger.message (lsn pg_lsn not null);
create function ledger.published(id oid, via_root text) returns text language sql stable as $$
    select relname from pg_class where oid = case via_root when 'true' then coalesce(pg_partition_root(id), id) else id end $$;
create function ledger.stamp() returns trigger language plpgsql as $$
begin
    new.stamp := nextval('ledger.stamp');
    return new;
end $$;
create function ledger.note() returns trigger language plpgsql as $$
begin
    insert into ledger.change (name, op, stamp, old_stamp) values (
        ledger.published(tg_relid, tg_argv[0]), lower(tg_op),
        case when tg_op in ('INSERT', 'UPDATE') then new.stamp end, case when tg_op in ('UPDATE', 'DELETE') then old.stamp end);
    return null;
end $$;
create function ledger.note_truncate() returns trigger language plpgsql as $$
begin
    -- Of a partitioned table's truncate pgoutput sends what it publishes: the root, or the leaves.
    if (select case tg_argv[0] when 'true' then not relispartition else relkind = 'r' end from pg_class where oid = tg_relid) then
        insert into ledger.change (name, op) values (ledger.published(tg_relid, tg_argv[0]), 'truncate');
    end if;
    return null;
end $$"""


@dataclass(frozen=True)
class Change:
    """One entry of the ledger."""

    xid: int
    op: str
    stamp: int | None
    old_stamp: int | None


@dataclass
class Ledger:
    """The committed changes of each table, in order and under the table's name at that time, and the LSNs of transactional
    messages.
    """

    changes: dict[str, list[Change]] = field(default_factory=lambda: defaultdict(list))
    messages: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, connection: psycopg.Connection[Any]) -> Self:
        """Return everything that has been committed in a database."""
        found = cls()
        for name, *values in connection.execute(
            b"select name, xid & 4294967295, op, stamp, old_stamp from ledger.change order by seq"
        ):
            found.changes[name].append(Change(*values))
        found.messages = [lsn for (lsn,) in connection.execute("select lsn::text from ledger.message")]
        return found

    @staticmethod
    def stamps(changes: list[Change]) -> set[int]:
        """Return the stamps of the rows that remain after the first changes of a table."""
        found: set[int] = set()
        for change in changes:
            if change.op in ("truncate", "drop"):
                found.clear()
            found.discard(change.old_stamp or 0)
            if change.stamp is not None:
                found.add(change.stamp)
        return found
