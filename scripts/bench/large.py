"""Compares one large transaction with the same rows in small ones: does the large one cost more time, and how much memory?

The server streams the large transaction before it commits, and cdcpipe holds it until the commit. pg_recvlogical reads without
streaming: the server then writes the large transaction to its own disk first.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import postgres
from backlog import PUBLICATION, Backlog, backlog

from cdcpipe.pipe.framing import scan_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["measure"]

PER_TRANSACTION = 1000
PIECE_BYTES = 16 << 20

# The WAL of the whole table must stay, and so must the transaction that the server spills for pg_recvlogical.
SETTINGS = {"shared_buffers": "256MB", "max_wal_size": "32GB"}


def cdcpipe(made: Backlog, slot: str) -> list[str]:
    options = ["--publication", PUBLICATION, "--endpos", made.endpos, "-H", "--whole-transactions", "--streaming", "parallel"]
    return [sys.executable, "-m", "cli", "-d", made.cluster.dsn, "-S", slot, *options]


def pg_recvlogical(made: Backlog, slot: str) -> list[str]:
    options = ["-o", "proto_version=1", "-o", f"publication_names={PUBLICATION}", "--start", "--no-loop", "-f", "-"]
    return [str(made.cluster.bin("pg_recvlogical")), "-d", made.cluster.dsn, "-S", slot, "--endpos", made.endpos, *options]


VARIANTS = {
    "cdcpipe, small transactions": (cdcpipe, "small"),
    "cdcpipe, one transaction": (cdcpipe, "large"),
    "pg_recvlogical, small transactions": (pg_recvlogical, "small"),
    "pg_recvlogical, one transaction": (pg_recvlogical, "large"),
}
REFERENCE = "cdcpipe, small transactions"


def count_rows(path: Path) -> int:
    """Count the inserts in a file of records with headers. Read the file in pieces."""
    rows, held = 0, b""
    with path.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            held += data
            starts, _, pos = scan_records(held)
            rows += bytes(map(held.__getitem__, starts)).count(b"I")
            held = held[pos:]
    if held:
        raise SystemExit("the output ends inside a record")
    return rows


def measure(rows: int, runs: int, run_once: Callable[[list[str], str], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a line for each run. The variants take turns and write to a pipe. cdcpipe's rows are counted before the runs."""
    with contextlib.ExitStack() as stack:
        made = {}
        for name, size in (("small", PER_TRANSACTION), ("large", rows)):
            cluster = stack.enter_context(postgres.Cluster("18", settings=SETTINGS))
            made[name] = stack.enter_context(backlog(cluster, rows, ["pgoutput"], size))
        counts = {}
        for run in range(runs + 1):
            for variant, (command, name) in VARIANTS.items():
                if run == 0 and command is not cdcpipe:
                    continue
                with made[name].slot("pgoutput") as slot, tempfile.TemporaryDirectory() as directory:
                    output = Path(directory) / "output"
                    result = run_once(command(made[name], slot), str(output) if run == 0 else "pipe")
                    if run == 0:
                        counts[variant] = count_rows(output)
                        continue
                yield {
                    "benchmark": "large",
                    "transport": "unix",
                    "variant": variant,
                    "reference": variant == REFERENCE,
                    "run": run,
                    "rows_wanted": rows,
                    "rows": counts.get(variant, rows),
                    "sink": "pipe",
                    **result,
                    "load_1m": round(os.getloadavg()[0], 2),
                    "server": made[name].cluster.version_num,
                }
