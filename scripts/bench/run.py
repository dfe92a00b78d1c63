"""Measure cdcpipe beside its peers, one JSON line per run; see README.md here.

Each run is a fresh process on a fresh copy of a slot, so that all decode the same WAL. The variants of a benchmark take
turns (A B A B), and the first turn is a warm-up: it writes a file, whose rows and bytes are counted, and is not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import latency
import postgres
import psycopg
from backlog import PUBLICATION, Backlog, backlog

from cdcpipe.pipe.framing import scan_records

HERE = Path(__file__).parent
CDCPIPE = [sys.executable, "-m", "cli"]


@dataclass(frozen=True)
class Variant:
    """One of the programs that a benchmark compares: its name, the slot's plugin, its command for a slot and a DSN."""

    name: str
    plugin: str
    arguments: list[str]
    reference: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, backlog: Backlog, slot: str, dsn: str) -> list[str]:
        common = ["-d", dsn, "-S", slot, "--endpos", backlog.endpos]
        if self.reference:
            program = str(backlog.cluster.bin("pg_recvlogical"))
            return [program, *common, "--start", "--no-loop", "-f", "-", *self.arguments]
        return [*CDCPIPE, *common, *self.arguments]


BENCHMARKS = {
    "stream": [
        Variant(
            "pg_recvlogical",
            "pgoutput",
            ["-o", "proto_version=1", "-o", f"publication_names={PUBLICATION}"],
            reference=True,
        ),
        Variant("cdcpipe -H", "pgoutput", ["--publication", PUBLICATION, "-H"]),
    ],
    "wal2json": [
        Variant(
            "pg_recvlogical, server's wal2json",
            "wal2json",
            ["-o", "format-version=2", "-o", "include-lsn=1"],
            reference=True,
        ),
        Variant("cdcpipe -J on pgoutput", "pgoutput", ["--publication", PUBLICATION, "-J"]),
    ],
}


def machine() -> dict[str, Any]:
    """Say where this runs."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = models[0] if models else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "psycopg": psycopg.__version__,
        "psycopg_implementation": psycopg.pq.__impl__,
    }


def count_output(path: Path, *, framed: bool) -> dict[str, int]:
    """Count what a warm-up run wrote: rows, records, and the records' bytes without headers and newlines.

    pg_recvlogical ends each record with a newline. In pgoutput's binary form that can't be split again, so its rows are
    those of the peer when its bytes are.
    """
    data = path.read_bytes()
    if framed:
        starts, ends, rest = scan_records(data)
        if rest != len(data):
            raise SystemExit(f"{path}: the output ends inside a record")
        records = [data[start:end] for start, end in zip(starts, ends, strict=True)]
    elif data.startswith(b"{"):
        records = data.splitlines()
    else:
        return {"bytes_with_newlines": len(data)}
    rows = sum(record.startswith((b"I", b'{"action":"I"')) for record in records)
    size = sum(map(len, records))
    return {"rows": rows, "records": len(records), "bytes": size, "bytes_with_newlines": size + len(records)}


def run_once(command: list[str], sink: str) -> dict[str, Any]:
    """Run the command in a fresh process and return what it took."""
    with tempfile.NamedTemporaryFile() as stderr:
        order = {"command": command, "sink": sink, "stderr": stderr.name}
        done = subprocess.run([sys.executable, HERE / "run_once.py", json.dumps(order)], stdout=subprocess.PIPE, check=True)
        result: dict[str, Any] = json.loads(done.stdout)
        if result["exit_code"] != 0:
            said = Path(stderr.name).read_text(errors="replace")
            raise SystemExit(f"{command} ended with {result['exit_code']}:\n{said}")
    return result


def compare(name: str, made: Backlog, transport: str, runs: int, sink: str, emit: Any) -> None:
    """Run the variants of a benchmark in turn."""
    dsn = made.cluster.tcp_dsn if transport == "tcp" else made.cluster.dsn
    variants = BENCHMARKS[name]
    counts = {}
    for run in range(runs + 1):
        for variant in variants:
            with made.slot(variant.plugin) as slot, tempfile.TemporaryDirectory() as scratch:
                output = Path(scratch, "output")
                command = variant.command(made, slot, dsn)
                result = run_once(command, str(output) if run == 0 else sink)
                if run == 0:
                    counts[variant.name] = count_output(output, framed=not variant.reference)
                    continue
            emit(
                {
                    "benchmark": name,
                    "transport": transport,
                    "variant": variant.name,
                    "reference": variant.reference,
                    "run": run,
                    "rows_wanted": made.rows,
                    "sink": sink,
                    **counts[variant.name],
                    **result,
                    "load_1m": round(os.getloadavg()[0], 2),
                    "server": made.cluster.version_num,
                    "machine": machine(),
                }
            )


def main() -> int:
    """Run the benchmarks."""
    names = [*BENCHMARKS, "latency"]
    parser = argparse.ArgumentParser(prog="scripts/bench/run", description=__doc__)
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=f"{', '.join(names)} (default: all)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the backlog (default: 1000000)")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each variant (default: 5)")
    parser.add_argument("--sink", choices=["null", "pipe"], default="null", help="/dev/null, or a reader that drains")
    parser.add_argument("--transport", choices=["unix", "tcp"], action="append", help="default: both")
    parser.add_argument("--output", type=Path, default=Path("bench-data/runs.jsonl"), help="default: %(default)s")
    args = parser.parse_args()
    wanted = args.benchmarks or names
    unknown = set(wanted) - set(names)
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}")
    if args.rows % 1000:
        parser.error("--rows is a multiple of 1000")
    args.output.parent.mkdir(parents=True, exist_ok=True)

    with args.output.open("w") as file:

        def emit(line: dict[str, Any]) -> None:
            print(json.dumps(line), file=file, flush=True)
            figure = f"{line['wall_s']:.2f} s" if "wall_s" in line else f"p50 {line['p50_ms']:.2f} ms"
            print(
                f"{line['benchmark']} {line['transport']} {line['variant']} run {line['run']}: {figure}",
                file=sys.stderr,
            )

        transports = args.transport or ["unix", "tcp"]
        compared = [name for name in BENCHMARKS if name in wanted]
        if compared:
            with (
                postgres.Cluster("15", settings={"shared_buffers": "512MB"}) as cluster,
                backlog(cluster, args.rows, ["pgoutput", "wal2json"]) as made,
            ):
                for name in compared:
                    for transport in transports:
                        compare(name, made, transport, args.runs, args.sink, emit)
        if "latency" in wanted:
            for line in latency.measure(args.runs, CDCPIPE):
                emit(line | {"machine": machine()})
    return subprocess.run([sys.executable, HERE / "report.py", args.output], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
