"""Primaries and standbys for tests of failover: what a crash, a promotion and a rebuilt standby need.

with Pair() as pair:                    # pair.primary, pair.standby: the standby keeps copies of failover slots
    kill(pair.primary)                  # SIGKILL to each of its processes
    pair.standby.promote()
    rebuild(pair.primary, pair.standby) # the old primary's directory becomes a standby of the new primary
    pair.swap()
"""

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any, Self

import processes
from postgres import Cluster, PostgresError

__all__ = ["Pair", "become_standby", "execute", "follow", "kill", "rebuild", "wait_for_replay"]

SYNCS_SLOTS = {"hot_standby_feedback": "on", "sync_replication_slots": "on"}
"""What a standby needs to keep copies of failover slots, beside a database in ``primary_conninfo``."""

_DEADLINE_S = 60.0


def kill(cluster: Cluster) -> None:
    """Kill all processes of a server with SIGKILL, and wait until they are gone. `Cluster.resume` starts it again."""
    postmaster = cluster.pid
    os.kill(postmaster, signal.SIGSTOP)  # so that it starts no more processes
    family = [postmaster, *processes.children(postmaster)]
    for process in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + _DEADLINE_S
    while any(map(_is_running, family)):
        if time.monotonic() > deadline:
            raise PostgresError(f"a process of {cluster.directory} survived SIGKILL")
        time.sleep(0.01)
    # Where nobody reaps it at once, its number still exists, and the next postmaster would take it for another one.
    for left in (cluster.data / "postmaster.pid", *cluster.directory.glob(".s.PGSQL.*.lock")):
        left.unlink()


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def rebuild(cluster: Cluster, primary: Cluster) -> None:
    """Make the directory of a server that was stopped a new standby of ``primary``, on the same port, and start it."""
    with primary.connect() as connection:  # pg_basebackup makes the slot
        connection.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = 'standby'")
    shutil.rmtree(cluster.data)
    cluster.standby_of = primary
    cluster.start()
    follow(cluster, primary)


def become_standby(cluster: Cluster, primary: Cluster, slot: str = "standby") -> None:
    """Start a former primary as a standby, with the data that it has. It was shut down in order before ``primary`` was promoted."""
    (cluster.data / "standby.signal").touch()
    with (cluster.data / "postgresql.auto.conf").open("a") as file:
        file.write(f"primary_conninfo = '{primary.dsn}'\nprimary_slot_name = '{slot}'\n")
    with primary.connect() as connection:
        connection.execute(_MAKE_SLOT, [slot, slot])
    cluster.resume()


_MAKE_SLOT = (
    "select pg_create_physical_replication_slot(%s, true) where not exists (select from pg_replication_slots where slot_name = %s)"
)


def follow(standby: Cluster, primary: Cluster, slot: str = "standby") -> None:
    """Let a standby follow another primary, with a database for the worker that copies slots. pg_basebackup -R writes none."""
    with primary.connect() as connection:
        connection.execute(_MAKE_SLOT, [slot, slot])
    # The user's name and the directory have no quotes.
    with standby.connect() as connection:
        connection.execute(f"alter system set primary_conninfo = '{primary.dsn}'")
        connection.execute(f"alter system set primary_slot_name = '{slot}'")
        connection.execute("select pg_reload_conf()")


def execute(server: Cluster, *sql: str) -> list[Any]:
    """Run the commands, each in a transaction of its own, and return the rows of the last one."""
    with server.connect() as connection:
        found = [cursor.fetchall() if cursor.description else [] for cursor in map(connection.execute, sql)]
    return found[-1]


def wait_for_replay(standby: Cluster, primary: Cluster) -> None:
    """Wait until the standby has replayed all WAL of the primary."""
    with primary.connect() as connection, standby.connect() as other:
        # Its record is flushed with the next commit, which nothing here waits for.
        [(lsn,)] = connection.execute("select pg_log_standby_snapshot()").fetchall()
        deadline = time.monotonic() + _DEADLINE_S
        while other.execute("select pg_last_wal_replay_lsn() >= %s::pg_lsn", [lsn]).fetchall() != [(True,)]:
            if time.monotonic() > deadline:
                raise PostgresError(f"{standby.directory} did not replay the WAL up to {lsn}")
            time.sleep(0.02)


class Pair:
    """A primary, and a standby that keeps copies of the primary's failover slots. ``settings`` are for both."""

    def __init__(self, version: str = "18", settings: dict[str, Any] | None = None) -> None:
        self._stack = contextlib.ExitStack()
        self._version = version
        self._settings = SYNCS_SLOTS | (settings or {})

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.primary = stack.enter_context(Cluster(self._version, settings=self._settings))
            self.standby = stack.enter_context(Cluster(self._version, settings=self._settings, standby_of=self.primary))
            follow(self.standby, self.primary)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def dsn(self) -> str:
        """A connection string with both servers, which finds the one that is the primary."""
        servers = sorted((self.primary, self.standby), key=lambda each: each.port)
        hosts, ports = (",".join(map(str, each)) for each in zip(*((s.directory, s.port) for s in servers), strict=True))
        return f"host={hosts} port={ports} user=postgres dbname=postgres target_session_attrs=read-write"

    def has_copy_of(self, slot: str) -> bool:
        """Tell whether the standby has a copy of the slot that would survive its promotion."""
        # A copy becomes permanent when the primary's slot has moved beyond such a record.
        execute(self.primary, "select pg_log_standby_snapshot()")
        is_ready = f"slot_name = '{slot}' and synced and not temporary"
        return bool(execute(self.standby, f"select 1 from pg_replication_slots where {is_ready}"))

    def swap(self) -> None:
        """Exchange the names of the two servers, after a promotion."""
        self.primary, self.standby = self.standby, self.primary
