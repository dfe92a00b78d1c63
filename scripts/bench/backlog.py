"""The backlog that the benchmarks stream: changes in the WAL of a throwaway PostgreSQL. Each run can read it from its start."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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

_INSERT = """
      insert into bench_row
      select 10000000 + i, 100000 + i % 900000, 'row ' || left(md5(i::text), 16), (i % 1000000) / 100.0 + 1000000,
             timestamptz '2026-01-01 00:00:00.123456+00' + i * interval '1 second', i % 2 = 0
      from generate_series({first}, {last}) i"""

# Of ten changes, six insert rows, three update rows of the previous transaction, one deletes another such row.
_MIXED = f"""
      {_INSERT.format(first="batch * size + 1", last="(batch + 1) * size")};
      update bench_row set number = number + 1, label = label || '+'
        where id > 10000000 + (batch - 1) * size and id <= 10000000 + (batch - 1) * size + size / 2;
      delete from bench_row where id > 10000000 + batch * size - size / 6 and id <= 10000000 + batch * size"""

# The DO block commits after each batch. So the server makes all changes without waiting for a client.
_LOAD = """
do $$
declare size bigint := {inserts};
begin
  for batch in 0 .. {transactions} - 1 loop
    {statements};
    commit;
  end loop;
end $$
"""


@dataclass(frozen=True)
class Backlog:
    """``rows`` changes, committed before ``endpos``. ``slots`` has a slot for each plugin, which starts before the first change."""

    cluster: postgres.Cluster
    rows: int
    endpos: str
    slots: dict[str, str]
    replica_rows: int
    """How many rows a replica made of the changes alone has."""

    def server_cpu_s(self) -> float:
        """Return the CPU time of the server's processes that have ended, such as walsenders (Linux)."""
        pid = int((self.cluster.directory / "data" / "postmaster.pid").read_text().split()[0])
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")

    @contextmanager
    def slot(self, plugin: str, number: int = 1) -> Iterator[str]:
        """Copy the plugin's slot for one run. Then all runs decode the same WAL."""
        name = f"bench_run_{plugin}_{number}"
        with self.cluster.connect() as connection:
            connection.execute("select pg_copy_logical_replication_slot(%s, %s)", [self.slots[plugin], name])
        try:
            yield name
        finally:
            self.cluster.drop_slot(name)


@contextmanager
def backlog(
    cluster: postgres.Cluster, rows: int, plugins: list[str], per_transaction: int = 1000, *, mixed: bool = False
) -> Iterator[Backlog]:
    """Write the changes, and make a slot for each plugin before them.

    The changes are inserts or, with ``mixed``, 60 % inserts, 30 % updates and 10 % deletes.
    """
    inserts = per_transaction * 6 // 10 if mixed else per_transaction
    statements = _MIXED if mixed else _INSERT.format(first="batch * size + 1", last="(batch + 1) * size")
    with cluster.connect() as connection:
        connection.execute(_TABLE)
        connection.execute(f"create publication {PUBLICATION} for table bench_row")
        if mixed:  # the rows that the first transaction updates and deletes
            connection.execute(_INSERT.format(first=1 - inserts, last=0).encode())
        slots = {plugin: f"bench_{plugin}" for plugin in plugins}
        for plugin, slot in slots.items():
            connection.execute("select pg_create_logical_replication_slot(%s, %s)", [slot, plugin])
        load = _LOAD.format(inserts=inserts, transactions=rows // per_transaction, statements=statements)
        connection.execute(load.encode())
        row = connection.execute("select pg_current_wal_lsn()::text").fetchone()
        assert row is not None
        # A row beyond the end: it tells a reader at once that the end is reached. The message before it makes a gap, because
        # pg_recvlogical also writes a record that begins exactly at the end.
        connection.execute("select pg_logical_emit_message(false, 'bench', 'gap')")
        connection.execute("insert into bench_row values (-1)")
        connection.execute("checkpoint")
    # The first transaction updates half of the rows that are older than the slots: a replica gets these, too. The rows that it
    # deletes are also older than the slots: no replica ever had them.
    replica_rows = rows * 5 // 10 + per_transaction * 4 // 10 if mixed else rows
    yield Backlog(cluster, rows, row[0], slots, replica_rows)
