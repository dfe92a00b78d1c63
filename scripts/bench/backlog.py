"""The rows that the benchmarks stream: a backlog in the WAL of a throwaway PostgreSQL, readable again and again."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import postgres

__all__ = ["PUBLICATION", "Backlog", "backlog"]

PUBLICATION = "bench"

_TABLE = """
create table bench_row (
    id bigint primary key, number integer, label text, amount numeric(12,2), changed timestamptz, flag boolean)
"""

# A DO block commits as it goes, so that the server makes the rows without a client in between.
_LOAD = """
do $$
begin
  for batch in 0 .. {rows} / {per_transaction} - 1 loop
    insert into bench_row
      select 10000000 + i, 100000 + i % 900000, 'row ' || left(md5(i::text), 16), (i % 1000000) / 100.0 + 1000000,
             timestamptz '2026-01-01 00:00:00.123456+00' + i * interval '1 second', i % 2 = 0
      from generate_series(batch * {per_transaction} + 1, (batch + 1) * {per_transaction}) i;
    commit;
  end loop;
end $$
"""


@dataclass(frozen=True)
class Backlog:
    """`rows` inserts, committed before `endpos`; `slots` has the slot of each plugin that stands before the first."""

    cluster: postgres.Cluster
    rows: int
    endpos: str
    slots: dict[str, str]

    @contextmanager
    def slot(self, plugin: str) -> Iterator[str]:
        """Make a copy of the plugin's slot, so that each run decodes the same WAL."""
        name = f"bench_run_{plugin}"
        with self.cluster.connect() as connection:
            connection.execute("select pg_copy_logical_replication_slot(%s, %s)", [self.slots[plugin], name])
        try:
            yield name
        finally:
            self.cluster.drop_slot(name)


@contextmanager
def backlog(cluster: postgres.Cluster, rows: int, plugins: list[str], per_transaction: int = 1000) -> Iterator[Backlog]:
    """Write the rows, with a slot per plugin from before them."""
    with cluster.connect() as connection:
        connection.execute(_TABLE)
        connection.execute(f"create publication {PUBLICATION} for table bench_row")
        slots = {plugin: f"bench_{plugin}" for plugin in plugins}
        for plugin, slot in slots.items():
            connection.execute("select pg_create_logical_replication_slot(%s, %s)", [slot, plugin])
        connection.execute(_LOAD.format(rows=rows, per_transaction=per_transaction).encode())
        row = connection.execute("select pg_current_wal_lsn()::text").fetchone()
        assert row is not None
        # Something beyond the end, so that a reader learns at once that it is there; and a gap before it, because
        # pg_recvlogical writes a record that stands exactly at the end.
        connection.execute("select pg_logical_emit_message(false, 'bench', 'gap')")
        connection.execute("insert into bench_row values (-1)")
        connection.execute("checkpoint")
    yield Backlog(cluster, rows, row[0], slots)
