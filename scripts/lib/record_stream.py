"""The program of scripts/record-stream, whose comment says what it does."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psycopg
from postgres import Cluster, Database, available_versions, missing_reason
from recording import DATA, run_workload

ROOT = Path(__file__).resolve().parent.parent.parent

SMALL_MEMORY = "logical_decoding_work_mem=64kB"
IMMEDIATE = "debug_logical_replication_streaming=immediate"

# Name: first server version, options, setting of the walsender. Each one with --two-phase has a slot of its own.
SETS = {
    "v1": (15, [], None),
    "v1-messages": (15, ["--messages"], None),
    "v1-binary": (15, ["--messages", "--binary"], None),
    "v1-origin-none": (16, ["--messages", "--origin", "none"], None),
    "v2-streaming": (15, ["--messages", "--streaming", "on"], SMALL_MEMORY),
    "v3-two-phase": (15, ["--messages", "--two-phase"], None),
    "v3-two-phase-streaming": (15, ["--messages", "--two-phase", "--streaming", "on"], SMALL_MEMORY),
    "v4-streaming": (16, ["--messages", "--proto-version", "4", "--streaming", "on"], SMALL_MEMORY),
    "v4-parallel": (16, ["--messages", "--streaming", "parallel"], SMALL_MEMORY),
    "v4-parallel-two-phase": (16, ["--messages", "--streaming", "parallel", "--two-phase"], SMALL_MEMORY),
    "v4-parallel-immediate": (16, ["--messages", "--streaming", "parallel"], IMMEDIATE),
    "v4-parallel-binary-two-phase-immediate": (
        16,
        ["--messages", "--streaming", "parallel", "--binary", "--two-phase"],
        IMMEDIATE,
    ),
}


def make_slots(names: list[str], connection: psycopg.Connection) -> None:
    for name in names:
        sql = "select pg_create_logical_replication_slot(%s, 'pgoutput', false, %s)"
        connection.execute(sql, [slot(name), "--two-phase" in SETS[name][1]])


def slot(name: str) -> str:
    return name.replace("-", "_")


def record(database: Database, name: str, end_lsn: str, target: Path) -> None:
    _, options, setting = SETS[name]
    command = [sys.executable, "-m", "cli", "-d", database.dsn, "-S", slot(name), "--publication", "p", "-H", "--endpos", end_lsn]
    if setting:
        command += ["-m", f"options=-c {setting}"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
    with target.open("wb") as file, tempfile.TemporaryFile("w+") as stderr:
        # stdin stays open, because its end would end the stream.
        with subprocess.Popen(
            [*command, *options], cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=file, stderr=stderr
        ) as p:
            code = p.wait()
        if code:
            stderr.seek(0)
            raise SystemExit(f"{name} was not recorded, exit code {code}:\n{stderr.read()}")


def main(versions: Sequence[str]) -> None:
    if reasons := [reason for version in versions if (reason := missing_reason(version))]:
        raise SystemExit(f"scripts/record-stream: {'; '.join(reasons)}")
    for version in versions or available_versions():
        directory = DATA / f"pg{version}"
        names = [name for name, (since, _, _) in SETS.items() if int(version) >= since]
        with Cluster(version) as cluster, cluster.database("recorded") as database:
            directory.mkdir(exist_ok=True)
            for old in directory.glob("*.cdc"):
                old.unlink()
            end_lsn = run_workload(database, partial(make_slots, names))
            for name in names:
                record(database, name, end_lsn, directory / f"{name}.cdc")
                print(f"pg{version}/{name}.cdc: {(directory / name).with_suffix('.cdc').stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
