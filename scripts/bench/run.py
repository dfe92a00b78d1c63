"""Measures cdcpipe beside other programs, and prints one JSON line for each run. README.md in this folder describes it.

Each run is a fresh process on a fresh copy of a slot. So all runs decode the same WAL. The variants of a benchmark take turns
(A B A B). The first turn is a warm-up and is not timed: it writes a file, and the rows and bytes in it are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import chart
import end_to_end
import freshness
import large
import latency
import network
import postgres
import psycopg
from backlog import PUBLICATION, Backlog, backlog

from cdcpipe.pipe.framing import scan_records
from spark_sink.staging import index as segment_index
from spark_sink.staging.log import list_segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
CDCPIPE = [sys.executable, "-m", "cli"]

# autovacuum's ANALYZE would make pgoutput send a Relation message again, in some runs and not in others.
SETTINGS = {"shared_buffers": "512MB", "autovacuum": "off"}


Counts = dict[str, int]


@dataclass(frozen=True)
class Variant:
    """One of the programs that a benchmark compares.

    ``command`` takes the backlog, a slot of ``plugin``, a DSN and an empty directory. ``count`` counts the result of a warm-up run
    in this directory. The file ``output`` there has its stdout. Variants with the same ``format`` write the same bytes.
    """

    name: str
    plugin: str
    command: Callable[[Backlog, str, str, Path], list[str]]
    count: Callable[[Path], Counts]
    reference: bool = False
    format: str = ""


def pg_recvlogical(*arguments: str, output: str = "-", is_looping: bool = False) -> Callable[[Backlog, str, str, Path], list[str]]:
    def command(backlog: Backlog, slot: str, dsn: str, scratch: Path) -> list[str]:
        program = str(backlog.cluster.bin("pg_recvlogical"))
        path = output if output == "-" else str(scratch / output)
        common = ["-d", dsn, "-S", slot, "--endpos", backlog.endpos]
        return [program, *common, "--start", *([] if is_looping else ["--no-loop"]), "-f", path, *arguments]

    return command


def cdcpipe(*arguments: str) -> Callable[[Backlog, str, str, Path], list[str]]:
    def command(backlog: Backlog, slot: str, dsn: str, _scratch: Path) -> list[str]:
        return [*CDCPIPE, "-d", dsn, "-S", slot, "--publication", PUBLICATION, "--endpos", backlog.endpos, *arguments]

    return command


def land(_backlog: Backlog, slot: str, dsn: str, scratch: Path) -> list[str]:
    staging = str(scratch / "staging")
    options = ["--publication", PUBLICATION, "--staging", staging, "--available-now"]
    return [sys.executable, "-m", "spark_sink", "land", "-d", dsn, "-S", slot, *options]


def count_framed(scratch: Path) -> Counts:
    """Count records with headers. Return the rows, the records, and the bytes of the records without headers."""
    data = (scratch / "output").read_bytes()
    starts, ends, rest = scan_records(data)
    if rest != len(data):
        raise SystemExit("the output ends inside a record")
    return _counts([data[start:end] for start, end in zip(starts, ends, strict=True)])


def count_lines(scratch: Path) -> Counts:
    """Count text records, one a line."""
    return _counts((scratch / "output").read_bytes().splitlines())


def count_bytes(scratch: Path) -> Counts:
    """Count bytes. The records of pgoutput, each followed by a newline, cannot be split again: the peer gives their number."""
    return {"bytes_with_newlines": (scratch / "output").stat().st_size}


def count_staged(scratch: Path) -> Counts:
    """Count the rows in a staging directory."""
    segments = list_segments(scratch / "staging")
    kinds = [segment_index.load(segment.path).kind for segment in segments]
    # The launcher has no end position. So it also lands the row beyond the backlog's end.
    return {"rows": sum(kind.tobytes().count(letter) for kind in kinds for letter in b"IUD") - 1}


# How a change looks in the records of pgoutput, wal2json 1 and 2, test_decoding, json and debezium; in the text formats, an
# insert. A record of wal2json 1 has many changes.
_CHANGE = re.compile(
    rb'\A[IUD]|\A\{"action":"I"|"kind":"insert"|\Atable [^:]*: INSERT:|\A\{"end_lsn":[^{]*"op":"insert"|"transaction":null,"op":"c"'
)


def _counts(records: list[bytes]) -> Counts:
    rows = sum(len(_CHANGE.findall(record)) for record in records)
    size = sum(map(len, records))
    return {"rows": rows, "records": len(records), "bytes": size, "bytes_with_newlines": size + len(records)}


PGOUTPUT = ["-o", "proto_version=1", "-o", f"publication_names={PUBLICATION}"]


def server_side(plugin: str, name: str, *options: str, reference: bool = False) -> Variant:
    arguments = [argument for option in options for argument in ("-o", option)]
    command = pg_recvlogical(*arguments)
    return Variant(f"pg_recvlogical, server's {name}", plugin, command, count_lines, reference, name)


def client_side(name: str, *arguments: str) -> Variant:
    return Variant(f"cdcpipe {name} on pgoutput", "pgoutput", cdcpipe("-H", *arguments), count_framed, format=name)


BENCHMARKS = {
    "stream": [
        Variant("pg_recvlogical", "pgoutput", pg_recvlogical(*PGOUTPUT), count_bytes, reference=True),
        Variant("cdcpipe -H", "pgoutput", cdcpipe("-H"), count_framed),
    ],
    "plugins": [
        server_side("wal2json", "wal2json 2", "format-version=2", reference=True),
        client_side("wal2json 2", "-J"),
        server_side("wal2json", "wal2json 1", "format-version=1", "include-lsn=true"),
        client_side("wal2json 1", "-j"),
        server_side("test_decoding", "test_decoding"),
        client_side("test_decoding", "--output", "test_decoding"),
        client_side("json", "--output", "json"),
        client_side("debezium", "--output", "debezium", "-o", "topic.prefix=bench"),
    ],
    # On mixed changes, followed by the stages in Spark.
    "stages": [
        Variant("pg_recvlogical", "pgoutput", pg_recvlogical(*PGOUTPUT), count_bytes, reference=True),
        Variant("streamer", "pgoutput", cdcpipe("-H"), count_framed),
        Variant(
            "streamer, whole transactions",
            "pgoutput",
            cdcpipe("-H", "--whole-transactions", "--streaming", "on", "--messages"),
            count_framed,
            format="with the logical message before the end",
        ),
        Variant("launcher: server to segments", "pgoutput", land, count_staged),
    ],
    "land": [
        Variant(
            "pg_recvlogical into a file",
            "pgoutput",
            pg_recvlogical(*PGOUTPUT, output="file"),
            lambda _scratch: {},
            reference=True,
        ),
        Variant("cdcpipe-spark land", "pgoutput", land, count_staged),
    ],
}


NETWORK: dict[str, dict[str, network.Command]] = {
    "tcp, 50 ms late": {
        "pg_recvlogical": pg_recvlogical(*PGOUTPUT),
        "cdcpipe -H": cdcpipe("-H"),
        "cdcpipe-spark land": land,
    },
    "tcp, 1 % resets": {
        "pg_recvlogical, its own loop": pg_recvlogical(*PGOUTPUT, is_looping=True),
        "cdcpipe -H -A, in a loop": network.until_success(cdcpipe("-H", "-A")),
        "cdcpipe-spark land": land,
    },
}
NETWORK_COUNTS = {"cdcpipe -H": count_framed, "cdcpipe-spark land": count_staged}


def machine() -> dict[str, Any]:
    """Describe this machine."""
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


def run_once(command: list[str], sink: str) -> dict[str, Any]:
    """Run the command in a fresh process, and return its figures."""
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
            server_before_s = made.server_cpu_s()
            with made.slot(variant.plugin) as slot, tempfile.TemporaryDirectory() as directory:
                scratch = Path(directory)
                command = variant.command(made, slot, dsn, scratch)
                result = run_once(command, str(scratch / "output") if run == 0 else sink)
                if run == 0:
                    counts[variant.name] = variant.count(scratch)
                    continue
            # The slot could be dropped. So its walsender has ended.
            result["server_cpu_s"] = round(made.server_cpu_s() - server_before_s, 2)
            emit(
                {
                    "benchmark": name,
                    "transport": transport,
                    "variant": variant.name,
                    "reference": variant.reference,
                    "format": variant.format,
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


def measure_spark(name: str, made: Backlog, runs: int) -> Iterator[dict[str, Any]]:
    """Land the backlog. Then yield a line for each run and stage from the staging directory to the tables."""
    with made.slot("pgoutput") as slot, tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        subprocess.run(land(made, slot, made.cluster.dsn, scratch), check=True, stderr=subprocess.DEVNULL)
        for run in range(1, runs + 1):
            command = [sys.executable, str(HERE / "spark_stage.py"), str(scratch / "staging"), str(scratch / "tables")]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            for stage, result in json.loads(done.stdout.splitlines()[-1]).items():
                # The launcher has no end position. So it also lands the row beyond the backlog's end.
                rows = result["rows"] - 1
                line = {"benchmark": name, "transport": "local[2]", "variant": stage, "reference": False, "run": run}
                # The rows of a replica are counted, not the changes that made them.
                fits = rows in (made.rows, made.replica_rows)
                yield line | {"rows_wanted": made.rows, "rows": made.rows if fits else rows, "wall_s": result["wall_s"]}


def main() -> int:
    """Run the benchmarks."""
    names = [*BENCHMARKS, "backlog", "freshness", "large", "latency", "network", "spark"]
    parser = argparse.ArgumentParser(prog="scripts/bench/run", description=__doc__)
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=f"{', '.join(names)} (default: all)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the backlog (default: 1000000)")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each variant (default: 5)")
    parser.add_argument("--sink", choices=["null", "pipe"], default="null", help="/dev/null, or a reader that drains")
    parser.add_argument("--transport", choices=["unix", "tcp"], action="append", help="default: both")
    parser.add_argument(
        "--output", type=Path, default=Path("bench-data/runs.jsonl"), help="relative to the checkout (default: %(default)s)"
    )
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
        compared = [name for name in BENCHMARKS if name in wanted and name != "stages"]
        surroundings = {"machine": machine(), "load_1m": round(os.getloadavg()[0], 2)}
        if compared or {"spark", "network"} & set(wanted):
            with (
                postgres.Cluster("15", settings=SETTINGS) as cluster,
                backlog(cluster, args.rows, ["pgoutput", "wal2json", "test_decoding"]) as made,
            ):
                for name in compared:
                    for transport in transports:
                        compare(name, made, transport, args.runs, args.sink, emit)
                if "spark" in wanted:
                    for line in measure_spark("spark", made, args.runs):
                        emit(line | surroundings)
                if "network" in wanted:
                    for line in network.measure(made, args.runs, NETWORK, NETWORK_COUNTS, run_once):
                        emit(line | surroundings)
        if "stages" in wanted or "backlog" in wanted:
            with (
                postgres.Cluster("15", settings=SETTINGS) as cluster,
                backlog(cluster, args.rows, ["pgoutput"], mixed=True) as made,
            ):
                if "stages" in wanted:
                    for transport in transports:
                        compare("stages", made, transport, args.runs, args.sink, emit)
                    for line in measure_spark("stages", made, args.runs):
                        emit(line | surroundings)
                if "backlog" in wanted:
                    for line in end_to_end.measure(made, args.runs):
                        emit(line | surroundings)
        if "freshness" in wanted:
            for line in freshness.measure(args.runs):
                emit(line | surroundings)
        if "large" in wanted:
            for line in large.measure(args.rows, args.runs, run_once):
                emit(surroundings | line)
        if "latency" in wanted:
            for line in latency.measure(args.runs, CDCPIPE):
                emit(line | surroundings)
    if "stages" in wanted:
        chart.write(args.output, args.output.with_name("stages.svg"))
    return subprocess.run([sys.executable, HERE / "report.py", args.output], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
