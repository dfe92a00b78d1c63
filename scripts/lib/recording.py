"""Runs tests/data/pgoutput/workload.sql for scripts/record-stream and for tests. The comments in that file hold here."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg
    from postgres import Database

__all__ = ["DATA", "run_workload"]

DATA = Path(__file__).resolve().parent.parent.parent / "tests" / "data" / "pgoutput"


def run_workload(database: "Database", make_slots: "Callable[[psycopg.Connection[Any]], object]") -> str:
    """Run the whole workload. Return a flushed position that is beyond all its changes."""
    with ExitStack() as stack:
        sessions: dict[str, psycopg.Connection[Any]] = {}
        session = "one"
        statement: list[str] = []
        for line in (DATA / "workload.sql").read_text().splitlines():
            if line.startswith("-- session "):
                session = line.removeprefix("-- session ")
            if session not in sessions:
                sessions[session] = stack.enter_context(database.connect())
            if line == "-- slots":
                make_slots(sessions[session])
            elif not line.startswith("--"):
                statement.append(line)
                if line.endswith(";"):
                    sessions[session].execute("\n".join(statement))
                    statement = []
        connection = sessions["one"]
        # A commit flushes all WAL before it.
        connection.execute("create table flush (); drop table flush")
        row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
        assert row
        return str(row[0])
