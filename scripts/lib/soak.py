"""scripts/soak: random transactions on random tables, the pipeline killed meanwhile, and the proof that all is there, once.

A round: a database with random tables, some of them with rows already (model.py); `cdcpipe-spark run -c` beside random
transactions; kills of its parts and of the server at random moments, each after something has moved; between two runs sometimes
a checkpoint or a replica deleted, or batches cut otherwise. With ``--network`` the runs reach the server by way of a proxy
(faulty_proxy.py) that goes silent, breaks off, throttles and delays at random (weather.py). At the end, once everything is in the
tables, all of it is compared (equality.py). A round is made from its seed, which is printed; what it does is the same each time,
when it does it is not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import big
import equality
import postgres
import processes
from faulty_proxy import FaultyProxy
from model import PUBLICATION, Model
from model_ledger import Ledger
from weather import Weather

from cdcpipe.lsn import LSN
from spark_sink.staging.log import Position, list_epochs, log_end
from spark_sink.status.report import Tables
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

__all__ = ["EXECUTOR", "KILLS", "SETTINGS", "Round", "SoakError"]

SLOT = "soak"

SETTINGS = {"logical_decoding_work_mem": "64kB", "max_prepared_transactions": "20"}
"""The server's: what is larger than this is streamed before it commits."""

NETWORK_SETTINGS = {"wal_sender_timeout": "10s"}
"""With a bad network, too: the server gives up a connection before the network gets well again."""

KILLS = ("streamer", "walsender", "server", "driver", "jvm", "stop")
"""What is ended, and how: see `Round._kill_…`."""
EXECUTOR = "executor"
"""On a cluster, too: with a local master executors are the JVM's threads."""

# The exit codes with which a run may end when a server goes away under it: starting it again helps.
_PASSING = (2, 3, 5, 9)

_PASSING_WORDS = (
    # A server that went away under the snapshot.
    "cannot copy table",
    # Spark waits ten seconds for a Python process to start, which a busy machine may not do.
    "Python worker failed to connect back",
    # A server that could not be reached for a minute.
    "could not be looked up",
)
"""What an error says that has exit code 7, and passes as well."""

_MAX_STARTS = 60

PATIENCE_S = 600
"""How long nothing may move."""

# (With one tier alone there is room for a few minutes' code.)
JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC"


class SoakError(Exception):
    """Something that must not happen; the seed says how to see it again."""


@dataclass
class Round:
    """One round in a database and a directory of its own.

    ``work`` is the number of transactions between two kills, ``before`` of those that the database has before the slot is made.
    Something is killed when the tables or the staging log have moved, or after some of the work: with the last two also while the
    snapshot is taken.
    A table that is renamed while the snapshot copies it has rows there that the ledger has under its old name, and the changelog
    is said to have too many: only ``alter_while_copied``.
    """

    cluster: postgres.Cluster
    directory: Path
    seed: int
    kills: tuple[str, ...]
    moments: tuple[str, ...] = ("tables", "tables", "staging", "work")
    work: int = 60
    before: int = 40
    tables: int = 6
    leave_untold: bool = False
    rekey_with_rows: bool = False
    alter_while_copied: bool = False
    say: Callable[[str], None] = print
    options: tuple[str, ...] = ()
    network: bool = False

    def __post_init__(self) -> None:
        self.ledger = Ledger()
        self._rng = random.Random(self.seed ^ 0x5EED)
        self._process: subprocess.Popen[bytes] | None = None
        self._batch_options: tuple[str, ...] = ()
        self._starts = 0
        self._weather: Weather | None = None

    @property
    def staging(self) -> Path:
        return self.directory / "staging"

    @property
    def warehouse(self) -> Path:
        return self.directory / "warehouse"

    @property
    def log(self) -> Path:
        """What the runs said on stderr."""
        return self.directory / "log"

    def play(self, spark: SparkSession) -> str:
        """Play it to the end with a session for the comparison; return a summary, or raise SoakError saying what is wrong."""
        with self.cluster.database() as self._database, contextlib.ExitStack() as self._resources:
            self._dsn = self._database.dsn
            if self.network:
                proxy = self._resources.enter_context(FaultyProxy(self.cluster.port))
                self._dsn = proxy.dsn(self._database.tcp_dsn)
                self._weather = Weather(proxy, self.seed, self.say)
            self._model = Model(
                self._database.connect,
                seed=self.seed,
                tables=self.tables,
                leave_untold=self.leave_untold,
                rekey_with_rows=self.rekey_with_rows,
            )
            try:
                self._model.prepare()
                self._model.work(self.before)
                self.say(f"{self.before} transactions; cdcpipe-spark run -c, and {self.work} more before each of {self.kills}")
                self._model.alters = self.alter_while_copied
                with self._weather or contextlib.nullcontext():
                    self._start()
                    for kill in self.kills:
                        self._disturb(kill)
                self._catch_up()
                self._end()
                return self._compare(spark)
            finally:
                self._model.close()
                if self._process is not None:
                    self._process.kill()
                    self._process.wait()

    # --- the run ---

    def _start(self) -> None:
        self._starts += 1
        command = [sys.executable, "-P", "-m", "spark_sink", "run", "-v", "-d", self._dsn, "-S", SLOT, "-c"]
        command += ["--publication", PUBLICATION, "--staging", str(self.staging), "--warehouse", str(self.warehouse)]
        command += ["--seal-interval", "0.1", "--trigger-interval", "0.2", *self._batch_options, *self.options]
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        environment = {"SPARK_SUBMIT_OPTS": JVM_OPTIONS} | os.environ | {"PYTHONPATH": path}
        with self.log.open("ab") as stream:
            stream.write(f"--- start {self._starts}: {' '.join(command)}\n".encode())
            stream.flush()
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment)

    def _disturb(self, kill: str) -> None:
        """Let transactions run, kill something when something has moved, and see that it goes on."""
        moment = self._rng.choice(self.moments)
        tables, staged = self._tables_at(), self._staged()
        with _Worker(self._model, self.work, lambda: self._staged() == staged) as worker:
            wanted = self._model.done + self._rng.randint(1, self.work)
            conditions: dict[str, Callable[[], bool]] = {
                "tables": lambda: self._has_begun() and self._tables_at() != tables,
                "staging": lambda: self._staged() != staged,
                # The worker rests once some of it is staged.
                "work": lambda: self._model.done >= wanted or self._staged() != staged,
            }
            self._wait(conditions[moment], worker)
            self.say(f"kill: {kill}, {moment} having moved")
            getattr(self, f"_kill_{kill}")()

    def _has_begun(self) -> bool:
        """Tell whether the tables have got changes, beyond a snapshot."""
        path = self.warehouse / "_cdcpipe/warehouse.json"
        if not path.exists():
            return False
        source = Warehouse.existing(self.warehouse).source()
        return source.position != source.begin

    def _tables_at(self) -> Position | None:
        if not (self.warehouse / "_cdcpipe/warehouse.json").exists():
            return None
        return Warehouse.existing(self.warehouse).source().position

    def _staged(self) -> Position | None:
        """How far the log is; None before there is something in it."""
        end = log_end(self.staging) if self.staging.exists() else None
        return None if end is None or end == list_epochs(self.staging)[0].start else end

    def _wait(self, condition: Callable[[], bool], worker: _Worker | None = None) -> None:
        """Wait for a condition, while the run is at work; start it again if it ended as it may."""
        state: object = None
        since = time.monotonic()
        while not condition():
            if worker is not None and worker.error is not None:
                raise worker.error
            self._check()
            self._model.alters = self.alter_while_copied or self._has_begun()
            now = (self._tables_at(), self._staged(), self._model.done)
            if now != state:
                state, since = now, time.monotonic()
            elif time.monotonic() - since > PATIENCE_S:
                raise SoakError(f"nothing has moved for {PATIENCE_S} s, at {state}; {self._said()}")
            time.sleep(0.02)

    def _check(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return
        is_passing = code in _PASSING or (code == 7 and any(text in self._said() for text in _PASSING_WORDS))
        if not is_passing or self._starts > _MAX_STARTS:
            raise SoakError(f"cdcpipe-spark ended with {code}; {self._said()}")
        errors = [line for line in self._said().splitlines() if "error:" in line]
        self.say(f"cdcpipe-spark ended with {code}: {errors[-1] if errors else ''}; starting it again")
        self._start()

    def _said(self) -> str:
        return f"the end of {self.log}:\n" + "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-30:])

    # --- what is killed ---

    def _kill(self, *roles: str) -> int:
        assert self._process is not None
        return processes.kill(self._process.pid, *roles)

    def _kill_streamer(self) -> None:
        """kill -9 of the process that streams; the launcher starts another one."""
        self._kill("streamer", "slot monitor")

    def _kill_walsender(self) -> None:
        """End the server's side of the stream."""
        with self.cluster.connect() as connection:
            connection.execute("select pg_terminate_backend(active_pid) from pg_replication_slots where active")

    def _kill_server(self) -> None:
        """Stop the server as a crash does, and start it again."""
        self.cluster.restart("immediate")

    def _kill_driver(self) -> None:
        """kill -9 of the launcher and the driver."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._between()
        self._start()

    def _kill_jvm(self) -> None:
        """kill -9 of Spark under the driver, which has to end with an error then."""
        assert self._process is not None
        if self._kill("JVM"):
            try:
                code = self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired as ex:
                raise SoakError(f"cdcpipe-spark goes on without its Spark; {self._said()}") from ex
            if code == 0:
                raise SoakError(f"cdcpipe-spark ended with 0 without its Spark; {self._said()}")
            self._between()
            self._start()

    def _kill_executor(self) -> None:
        """kill -9 of the executors; Spark starts others, and runs again what they have not finished."""
        self._wait(lambda: self._kill("executor") > 0)

    def _kill_stop(self) -> None:
        """End it in order, and start it again."""
        self._end()
        self._between()
        self._start()

    def _end(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(PATIENCE_S)
        if code != 0 and code not in (-signal.SIGTERM, *_PASSING):
            raise SoakError(f"cdcpipe-spark ended with {code} when asked to stop; {self._said()}")

    def _between(self) -> None:
        """Before the next start: lose what may be lost, or cut the batches otherwise."""
        what = self._rng.choice(["nothing", "checkpoint", "replica", "batches"])
        self.say(f"between two runs: {what}")
        if what == "checkpoint":
            shutil.rmtree(self.warehouse / "_cdcpipe/checkpoint", ignore_errors=True)
        elif what == "replica":
            found = sorted(self.warehouse.glob("replica/*"))
            if found:
                shutil.rmtree(self._rng.choice(found))
        elif what == "batches":
            size = self._rng.choice(["10kB", "100kB", "1MB"])
            self._batch_options = ("--max-bytes-per-trigger", size, "--segment-size", self._rng.choice(["64KiB", "1MiB"]))

    # --- the end ---

    def _catch_up(self) -> None:
        """Wait until the tables have all that is committed."""
        with self._database.connect() as connection:

            def look(query: str) -> int:
                row = connection.execute(query.encode()).fetchone()
                return 0 if row is None or row[0] is None else LSN.parse(row[0])

            # A commit after the last one: what comes before it is flushed with it.
            connection.execute("create temp table flush (); drop table flush")
            end_lsn = look("select pg_current_wal_lsn()::text")
            confirmed = f"select confirmed_flush_lsn::text from pg_replication_slots where slot_name = '{SLOT}'"
            self._wait(lambda: look(confirmed) >= end_lsn)
        self._wait(lambda: (at := self._tables_at()) is not None and ((end := self._staged()) is None or at.lsn >= end.lsn))
        # All of this may be so when a run was killed and the one after it has but begun.
        tables = Tables(Warehouse.existing(self.warehouse))
        self._wait(lambda: not any(_lacks_changes(tables.house, row) for row in tables.describe()))

    def _compare(self, spark: SparkSession) -> str:
        self.ledger = ledger = self._model.ledger()
        relations = self._model.relations()
        with self._database.connect() as connection:
            problems = list(equality.compare(spark, self.warehouse, self._database.dsn, connection, ledger, relations))
        if problems:
            raise SoakError("\n".join(problems))
        changes = sum(len(entries) for entries in ledger.changes.values())
        return (
            f"{self._model.done} transactions, {changes} changes in {len(ledger.changes)} tables, {self._starts} starts: all equal"
        )


def _lacks_changes(house: Warehouse, row: dict[str, Any]) -> bool:
    """Tell, of a table as `status` has it, whether it has a key and its replica is not where its changelog is, or further."""
    versions = house.versions(house.find(row["table"])) if row["versions"] else []
    if row["changelog"] is None or not versions or not versions[-1].key:
        return False
    replica: dict[str, Any] | None = row["replica"]
    # A replica that was made again stands where the warehouse was, the changelog at the table's last change.
    return replica is None or Position.parse(replica["position"]).lsn < Position.parse(row["changelog"]["position"]).lsn


class _Worker(threading.Thread):
    """Runs transactions beside us: so many, and then a few now and then as long as nothing of them has arrived."""

    def __init__(self, model: Model, transactions: int, is_waited_for: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self._model = model
        self._transactions = transactions
        self._is_waited_for = is_waited_for
        self._over = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._model.work(self._transactions)
            while not self._over.wait(0.5):
                if self._is_waited_for():
                    self._model.work(2)
        except BaseException as ex:  # noqa: BLE001 - raised again where it is waited for
            self.error = ex

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _value: object, _traceback: object) -> None:
        self._over.set()
        self.join()
        if self.error is not None and kind is None:
            raise self.error


def rounds(args: argparse.Namespace) -> Iterator[int]:
    """Yield the rounds' seeds: the one that was asked for first."""
    rng = random.Random(args.seed)
    deadline = time.monotonic() + 60 * args.minutes
    yield args.seed
    while time.monotonic() < deadline:
        yield rng.randrange(1 << 32)


def play(args: argparse.Namespace, seed: int, spark: SparkSession, directory: Path) -> None:
    """Play the round of a seed."""
    rng = random.Random(seed)
    version = args.postgres or rng.choice(postgres.available_versions())
    possible = KILLS if args.master.startswith("local[") else (*KILLS, EXECUTOR)
    kills = tuple(rng.choices(args.kill or possible, k=rng.randint(2, 5)))
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", file=sys.stderr, flush=True)

    print(f"round with --seed {seed}, PostgreSQL {version}", file=sys.stderr, flush=True)
    with postgres.Cluster(version, settings=SETTINGS | (NETWORK_SETTINGS if args.network else {})) as cluster:
        made = Round(
            cluster,
            directory,
            seed,
            kills,
            work=rng.choice([20, 60, 200]),
            before=rng.choice([0, 40]),
            tables=args.tables,
            leave_untold=args.leave_untold,
            rekey_with_rows=args.rekey_with_rows,
            alter_while_copied=args.alter_while_copied,
            say=say,
            options=("--master", args.master),
            network=args.network,
        )
        say(made.play(spark))


def play_big(args: argparse.Namespace) -> int:
    """Play the big cases; return the exit code."""
    for name in args.big:
        with tempfile.TemporaryDirectory(prefix="cdcpipe-big-") as directory, postgres.Cluster(args.postgres or "18") as cluster:
            started = time.monotonic()

            def say(text: str, started: float = started) -> None:
                print(f"{time.monotonic() - started:6.1f} s  {text}", file=sys.stderr, flush=True)

            try:
                figures = big.play(name, args.scale, cluster, Path(directory), say)
            except big.BigError as ex:
                print(f"scripts/soak: {name}: {ex}", file=sys.stderr)
                return 1
            print(json.dumps(figures))
    return 0


def main() -> int:
    """Play rounds until the time is over or one fails."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="begin no round after so long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of the first round (default: a random one)")
    parser.add_argument("--tables", type=int, default=6, help="to begin with (default: %(default)s)")
    parser.add_argument("--postgres", choices=postgres.VERSIONS, help="default: a random one for each round")
    parser.add_argument("--kill", action="append", choices=[*KILLS, EXECUTOR], help="kill only this; repeatable")
    parser.add_argument(
        "--master",
        default="local[2]",
        help="Spark's master for the runs (default: %(default)s); with local-cluster[2,1,1024] executors are killed, too",
    )
    parser.add_argument("--leave-untold", action="store_true", help="leave what PostgreSQL does not tell to the program")
    parser.add_argument(
        "--big", choices=sorted(big.CASES), action="append", help="no rounds, but what is large: see big.py; repeatable"
    )
    parser.add_argument(
        "--rekey-with-rows", action="store_true", help="change keys in transactions that change the table's rows, too"
    )
    parser.add_argument("--alter-while-copied", action="store_true", help="alter tables while the snapshot copies them, too")
    parser.add_argument("--network", action="store_true", help="the network between server and runs is bad, too")
    parser.add_argument("--scale", type=float, default=1.0, help="of the big cases (default: %(default)s)")
    args = parser.parse_args()
    if args.kill and EXECUTOR in args.kill and args.master.startswith("local["):
        parser.error(f"--kill {EXECUTOR} needs a cluster: --master 'local-cluster[2,1,1024]'")
    if args.big:
        return play_big(args)
    from spark_sink.spark import session

    os.environ.setdefault("SPARK_SUBMIT_OPTS", JVM_OPTIONS)
    started = time.monotonic()
    done = 0
    spark = session.build(app_name="soak", format="delta", conf={"spark.sql.shuffle.partitions": "2"})
    try:
        for seed in rounds(args):
            directory = Path(tempfile.mkdtemp(prefix="cdcpipe-soak-"))
            try:
                play(args, seed, spark, directory)
            except BaseException as ex:
                print(f"scripts/soak: round {done + 1} failed; its files are in {directory}", file=sys.stderr)
                print(f"scripts/soak: again: scripts/soak --minutes 0 {_again(args, seed)}", file=sys.stderr)
                if not isinstance(ex, SoakError):
                    raise
                print(f"scripts/soak: {ex}", file=sys.stderr)
                return 1
            shutil.rmtree(directory)
            done += 1
    except KeyboardInterrupt:
        print("scripts/soak: interrupted", file=sys.stderr)
    finally:
        spark.stop()
    print(f"{done} rounds in {(time.monotonic() - started) / 60:.0f} minutes, nothing missing, nothing twice")
    return 0 if done else 1


def _again(args: argparse.Namespace, seed: int) -> str:
    options: dict[str, Any] = {"--seed": seed, "--tables": args.tables, "--postgres": args.postgres, "--master": args.master}
    said = [f"{name} {value}" for name, value in options.items() if value is not None]
    said += [f"--kill {kill}" for kill in args.kill or ()]
    flags = ("leave_untold", "rekey_with_rows", "alter_while_copied", "network")
    said += [f"--{name.replace('_', '-')}" for name in flags if getattr(args, name)]
    return " ".join(said)


if __name__ == "__main__":
    sys.exit(main())
