"""scripts/demo: copies PostgreSQL's tables and changes to Spark tables, crashes in between, and proves that the result is complete.

The demo starts a throwaway PostgreSQL with a small shop. `cdcpipe-spark run` copies the existing rows, and then follows the changes
of a workload (workload.py) that runs at the same time and alters a table. The demo kills the run with kill -9, and starts it
again. At the end `cdcpipe-spark verify` compares while everything runs. Then the demo compares each table once more in another way:
the replica row by row with PostgreSQL, and the length of the changelog with the number of copied rows and committed changes. The
exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import postgres
from demo_options import make_parser
from workload import KEYS, Workload, make_tables

from cdcpipe.lsn import LSN
from spark_sink.staging.log import Position
from spark_sink.status.report import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from psycopg import Connection
    from pyspark.sql import DataFrame, SparkSession

SLOT = PUBLICATION = "demo"

# The demo's three JVMs live for a minute each. With the optimising compiler they would use half as much CPU again.
JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

PATIENCE_S = 300
"""How long the pipeline may show no progress; the first start may have to fetch Delta Lake."""


class DemoError(Exception):
    """The demo cannot continue."""


@dataclass(frozen=True)
class Outcome:
    """The result of comparing one table. ``current`` is None for a table without a key.

    Logical messages are not in any table of PostgreSQL. So their ``source`` is None.
    """

    table: str
    source: int | None
    expected: int
    changes: int
    current: int | None
    is_equal: bool


class Pipeline:
    """`cdcpipe-spark run` as a subprocess, with its output in a file."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        with log.open("ab") as stream:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)

    def check(self) -> None:
        """Raise DemoError if the run has ended by itself."""
        code = self.process.poll()
        if code is not None:
            said = "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-20:])
            raise DemoError(f"cdcpipe-spark ended with {code}; the end of {self.log}:\n{said}")

    def kill(self) -> None:
        """End the run with SIGKILL, as a power failure would."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Ask the run to end, and wait until it has."""
        self.check()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        if code != 0:
            raise DemoError(f"cdcpipe-spark ended with {code} when asked to stop; see {self.log}")


class Demo:
    """The server, the workload, the pipeline, and the line that shows their progress."""

    def __init__(self, connection: Connection[Any], workload: Workload, staging: Path, warehouse: Path) -> None:
        self._connection = connection
        self._workload = workload
        self._staging = staging
        self._warehouse = warehouse
        self._is_terminal = sys.stderr.isatty()
        self._shown_at = 0.0
        self._started = time.monotonic()
        self._failure: BaseException | None = None

    def say(self, text: str) -> None:
        """Print a line above the progress line."""
        self._erase()
        print(f"{self._elapsed():5.1f} s  {text}", file=sys.stderr, flush=True)

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _erase(self) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr)

    def start_workload(self, changes: int, duration_s: float) -> threading.Thread:
        """Run a part of the workload in another thread. `wait` raises the thread's error."""

        def run() -> None:
            try:
                self._workload.run(changes, duration_s)
            except BaseException as ex:  # noqa: BLE001 - raised again in `wait`
                self._failure = ex

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def wait(self, pipeline: Pipeline, condition: Callable[[], bool]) -> None:
        """Show the progress until the condition is true."""
        seen, seen_at = None, time.monotonic()
        while not condition():
            if self._failure is not None:
                raise self._failure
            pipeline.check()
            state = self._progress()
            if state != seen:
                seen, seen_at = state, time.monotonic()
            elif time.monotonic() - seen_at > PATIENCE_S:
                raise DemoError(f"no progress for {PATIENCE_S} s; see {pipeline.log}")
            self._show(state)
            time.sleep(0.1)

    def wait_for_workload(self, pipeline: Pipeline, part: threading.Thread) -> None:
        """Show the progress until a part of the workload is done."""
        self.wait(pipeline, lambda: not part.is_alive())

    def _show(self, text: str) -> None:
        if self._is_terminal:
            self._erase()
            print(f"{self._elapsed():5.1f} s  {text}", end="", file=sys.stderr, flush=True)
        elif self._elapsed() - self._shown_at > 5:
            self._shown_at = self._elapsed()
            print(f"{self._elapsed():5.1f} s  {text}", file=sys.stderr, flush=True)

    def _progress(self) -> str:
        staged, tables = self.staged(), self.in_tables()
        now = self.server_lsn()

        def behind(position: Position | None) -> str:
            if position is None:
                return "not yet"
            return f"{max(0, now - position.lsn) / 1e6:.1f} MB of WAL behind"

        return f"{self._workload.done:,} changes committed | staging {behind(staged)} | tables {behind(tables)}"

    def server_lsn(self) -> int:
        """The server's position."""
        return LSN.parse(self._value("select pg_current_wal_lsn()::text"))

    def confirmed_lsn(self) -> int:
        """The position that the slot has confirmed: everything before it is sealed in the staging directory."""
        return LSN.parse(
            self._value(
                f"select coalesce(max(confirmed_flush_lsn), '0/0')::text from pg_replication_slots where slot_name = '{SLOT}'"
            )
        )

    def staged(self) -> Position | None:
        """The end of the staging log."""
        end = describe(self._staging)["end"] if self._staging.exists() else None
        return Position.parse(end) if end else None

    def in_tables(self) -> Position | None:
        """The position up to which the tables have everything."""
        path = self._warehouse / "_cdcpipe/warehouse.json"
        position = json.loads(path.read_bytes()).get("position") if path.exists() else None
        return Position.parse(position) if position else None

    def _value(self, query: str) -> str:
        row = self._connection.execute(query.encode()).fetchone()
        assert row is not None
        return str(row[0])


def in_postgres(connection: Connection[Any], table: str) -> tuple[list[str], Counter[tuple[Any, ...]]]:
    """The table's columns, and its rows in a form that can be compared with Spark's rows."""
    columns, expressions = [], []
    for name, kind in connection.execute(
        "select column_name, data_type from information_schema.columns where table_name = %s order by ordinal_position",
        [table],
    ):
        columns.append(name)
        expressions.append(
            f"(extract(epoch from {name}) * 1000000)::bigint"
            if kind == "timestamp with time zone"
            else f"{name}::text"
            if kind == "jsonb"
            else name
        )
    rows = connection.execute(f"select {', '.join(expressions)} from {table}".encode())
    return columns, Counter(rows)


def in_spark(frame: DataFrame, columns: list[str]) -> Counter[tuple[Any, ...]]:
    """The rows of a frame, in the form of `in_postgres`."""
    from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

    kinds = dict(frame.dtypes)
    selected = [F.unix_micros(name) if kinds[name] == "timestamp" else F.col(name) for name in columns]
    return Counter(tuple(row) for row in frame.select(*selected).collect())


def compare(spark: SparkSession, warehouse: Path, connection: Connection[Any], expected: Counter[str]) -> Iterator[Outcome]:
    """Compare each table with PostgreSQL. Its changelog must have ``expected`` rows.

    A table without a key only grows. So its changelog is compared, which has all its rows.
    """
    from spark_sink.changelog.tables import changelogs_of
    from spark_sink.replica.current import read_replica
    from spark_sink.schema.table import MESSAGES, Table
    from spark_sink.warehouse.warehouse import Warehouse

    found = Warehouse.existing(warehouse)
    for table, key in KEYS.items():
        columns, wanted = in_postgres(connection, table)
        changes = changelogs_of(spark, found).read(Table("public", table))
        current = read_replica(spark, warehouse, f"public.{table}") if key else changes.drop(*_metadata(changes))
        rows = in_spark(current, columns)
        yield Outcome(
            table=table,
            source=wanted.total(),
            expected=expected[table],
            changes=(count := changes.count()),
            current=rows.total() if key else None,
            is_equal=current.columns == columns and rows == wanted and count == expected[table],
        )
    messages = changelogs_of(spark, found).read(MESSAGES)
    emitted, count, distinct = expected[str(MESSAGES)], messages.count(), messages.select("_cdc_lsn").distinct().count()
    yield Outcome(str(MESSAGES), None, emitted, count, None, is_equal=count == distinct == emitted)


def _metadata(frame: DataFrame) -> list[str]:
    return [name for name in frame.columns if name.startswith("_cdc_")]


def print_outcomes(outcomes: list[Outcome], elapsed_s: float) -> None:
    """Print the final table."""
    print(f"\n{'table':12} {'PostgreSQL':>12} {'replica':>12} {'copied and':>12} {'changelog':>12}")
    print(f"{'':12} {'rows':>12} {'rows':>12} {'committed':>12} {'rows':>12}")
    for found in outcomes:
        source = "" if found.source is None else f"{found.source:,}"
        current = "" if found.source is None else "no key" if found.current is None else f"{found.current:,}"
        verdict = "equal" if found.is_equal else "DIFFERENT"
        print(f"{found.table:12} {source:>12} {current:>12} {found.expected:12,} {found.changes:12,}   {verdict}")
    changes = sum(found.changes for found in outcomes)
    print(
        f"\n{changes:,} rows and changes in {elapsed_s:.0f} s ({changes / elapsed_s:,.0f} per second), "
        "two starts of Spark and a kill -9 included"
    )


def _command(args: argparse.Namespace, cluster: postgres.Cluster, staging: Path, warehouse: Path) -> list[str]:
    """Return the command line of the pipeline."""
    options = ["-d", cluster.dsn, "-S", SLOT, "--publication", PUBLICATION]
    command = [
        sys.executable,
        "-m",
        "spark_sink",
        "run",
        *options,
        "-c",
        "--keyless",
        "insert-only",
        "-v",
        "--staging",
        str(staging),
    ]
    command += ["--warehouse", str(warehouse), "--format", args.format]
    if args.jars:
        command += ["--jars", str(args.jars)]
    return command


def perform(args: argparse.Namespace, cluster: postgres.Cluster) -> bool:
    """Play the whole demo. Return whether everything is equal."""
    directory: Path = args.directory
    staging, warehouse, log = directory / "staging", directory / "warehouse", directory / "cdcpipe-spark.log"
    command = _command(args, cluster, staging, warehouse)

    with (
        cluster.connect() as connection,
        Workload(cluster.dsn, seed=args.seed) as workload,
        contextlib.ExitStack() as stack,
    ):
        demo = Demo(connection, workload, staging, warehouse)
        demo.say(f"PostgreSQL {cluster.version_num // 10000} runs: psql '{cluster.dsn}'")
        make_tables(connection)
        workload.run(args.changes // 4)
        # The changelog must have one row for each row that exists when the slot is made, and one for each later change.
        expected = rows_of(connection)
        demo.say(f"a shop with {expected.total():,} rows in {len(KEYS)} tables; starting cdcpipe-spark run -c, which copies them")
        expected.subtract(workload.committed)
        started = time.monotonic()
        pipeline = Pipeline(command, log)
        stack.callback(pipeline.kill)
        demo.wait(pipeline, lambda: demo.confirmed_lsn() > 0)
        start_lsn = demo.server_lsn()
        demo.say("the slot is made: what was committed before is being copied, what comes now is streamed")
        part = args.changes // 4
        first = demo.start_workload(part, 5)

        def something_is_there() -> bool:
            in_tables = demo.in_tables()
            return in_tables is not None and in_tables.lsn > start_lsn

        demo.wait(pipeline, lambda: not first.is_alive() and something_is_there())
        demo.say("all that was there is in the tables, and the first changes; the workload goes on")
        demo.wait_for_workload(pipeline, demo.start_workload(part // 2, 3))
        workload.alter()
        demo.say("altered, in mid-stream: orders has a column more, and a part of the orders has values in it")

        begun = workload.done
        second = demo.start_workload(part, 15)
        demo.wait(pipeline, lambda: workload.done - begun >= part // 3)
        pipeline.kill()
        demo.say("kill -9 of cdcpipe-spark, in the middle of the workload; starting it again")
        pipeline = Pipeline(command, log)
        stack.callback(pipeline.kill)
        demo.wait_for_workload(pipeline, second)
        workload.truncate()
        end_lsn = demo.server_lsn()
        demo.say(f"the workload is done: {workload.transactions:,} transactions committed, {workload.rollbacks:,} rolled back")

        def all_is_there() -> bool:
            staged, in_tables = demo.staged(), demo.in_tables()
            return demo.confirmed_lsn() >= end_lsn and staged is not None and in_tables is not None and in_tables.lsn >= staged.lsn

        demo.wait(pipeline, all_is_there)
        elapsed_s = time.monotonic() - started
        demo.say("everything is in the tables; cdcpipe-spark verify compares them, while cdcpipe-spark run goes on")
        print(verify(args, cluster, warehouse))
        demo.say("stopping cdcpipe-spark run with SIGTERM")
        pipeline.stop()

        demo.say("comparing once more, row by row, and counting what is in the changelogs")
        from spark_sink.spark import session

        spark = session.build(app_name="demo", format=args.format, jars_dir=args.jars)
        try:
            outcomes = list(compare(spark, warehouse, connection, expected + workload.committed))
        finally:
            spark.stop()
        print_outcomes(outcomes, elapsed_s)
    return all(found.is_equal for found in outcomes)


def rows_of(connection: Connection[Any]) -> Counter[str]:
    """Return how many rows each table has."""
    found: Counter[str] = Counter()
    for table in KEYS:
        (count,) = connection.execute(f"select count(*) from {table}".encode()).fetchone() or (0,)
        found[table] = count
    return found


def verify(args: argparse.Namespace, cluster: postgres.Cluster, warehouse: Path) -> str:
    """Run `cdcpipe-spark verify`; return what it says. DemoError if anything differs."""
    command = [sys.executable, "-m", "spark_sink", "verify", "-d", cluster.dsn, "--warehouse", str(warehouse)]
    if args.jars:
        command += ["--jars", str(args.jars)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DemoError(f"cdcpipe-spark verify ended with {done.returncode}:\n{done.stdout}{done.stderr[-4000:]}")
    return "".join(f"         {line}\n" for line in done.stdout.splitlines())


def print_how_to_look(args: argparse.Namespace) -> None:
    """Say where the tables are and how to open them."""
    jars = f", jars_dir={str(args.jars)!r}" if args.jars else ""
    code = (
        f"from spark_sink import build_session, register_views; spark = build_session(format={args.format!r}{jars}); "
        f"register_views(spark, {str(args.directory / 'warehouse')!r}); "
        "spark.sql('select * from `public.orders` limit 10').show()"
    )
    print(f"\nThe tables are in {args.directory}/warehouse (changelog/ and replica/). To look at them in Spark:\n")
    print(f'  {sys.executable} -i -c "{code}"')


def main() -> int:
    """Run the demo."""
    parser = make_parser()
    args = parser.parse_args()
    args.directory = args.directory.absolute()
    os.environ.setdefault("SPARK_SUBMIT_OPTS", JVM_OPTIONS)
    marker = args.directory / ".demo"
    if args.directory.exists() and not marker.exists():
        parser.error(f"{args.directory} exists, and is not from an earlier demo")
    shutil.rmtree(args.directory, ignore_errors=True)
    args.directory.mkdir(parents=True)
    marker.touch()
    try:
        with postgres.Cluster(args.postgres) as cluster:
            is_equal = perform(args, cluster)
    except (DemoError, postgres.PostgresError) as ex:
        print(f"scripts/demo: {ex}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nscripts/demo: interrupted", file=sys.stderr)
        return 1
    print_how_to_look(args)
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
