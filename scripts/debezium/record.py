"""Records what Debezium's connector writes for the workloads in tests/data/debezium: the oracle of tests/server/test_debezium.py.

Each directory there is a workload: schema.sql, changes.sql, and a *.properties file for each set of the connector's options. This
program runs its changes once. One engine for each set listens on its own slot of a PostgreSQL 15. The output of each engine becomes
a *.jsonl file beside its properties. The raw stream of the same changes becomes stream.cdc.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import postgres

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "debezium"


def statements(path: Path) -> list[str]:
    """Split at semicolons at the ends of lines. Each statement runs in its own transaction, unless the file begins one."""
    return [statement for statement in path.read_text().split(";\n") if statement.strip()]


def record(cluster: postgres.Cluster, libraries: Path, workload: Path) -> None:
    """Record one workload."""
    options = sorted(workload.glob("*.properties"))
    with cluster.database("db") as database, database.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        for statement in statements(workload / "schema.sql"):
            connection.execute(statement)
        connection.execute("create publication p for all tables")
        connection.execute("select pg_create_logical_replication_slot('raw', 'pgoutput')")
        program = ["java", "-Xmx512m", "-Duser.timezone=UTC", "-cp", f"{libraries}/*", Path(__file__).with_name("Record.java")]
        with subprocess.Popen([*program, "127.0.0.1", str(cluster.port), database.name, workload, *options]) as engines:
            active = "select count(*) from pg_replication_slots where active and slot_name like 'debezium%'"
            while connection.execute(active).fetchone() != (len(options),):
                if engines.poll() is not None:
                    raise SystemExit("the engines ended too early")
                time.sleep(0.2)
            for statement in statements(workload / "changes.sql"):
                connection.execute(statement)
            connection.execute("select pg_logical_emit_message(true, 'end', '')")
            if engines.wait():
                raise SystemExit("an engine failed")
        (end,) = connection.execute("select pg_current_wal_insert_lsn()").fetchone() or ("",)
        stream = ["--publication", "p", "--messages", "-H", "--endpos", str(end)]
        with (workload / "stream.cdc").open("wb") as file:
            command = [sys.executable, "-m", "cli", "-d", database.dsn, "-S", "raw", *stream]
            with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=file) as streamer:
                # cdcpipe ends at the end of its stdin. So its stdin stays open.
                if streamer.wait():
                    raise SystemExit("the raw stream failed")


def main() -> int:
    """Record the named workloads, or all."""
    libraries = Path(sys.argv[1])
    names = sys.argv[2:] or sorted(path.name for path in DATA.iterdir())
    with postgres.Cluster("15") as cluster:
        for name in names:
            record(cluster, libraries, DATA / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
