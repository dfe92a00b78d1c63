"""One round of scripts/soak, made from a seed. The first lines of soak.py describe what `Round.play` does."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

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
from spark_sink.warehouse import stored_histories
from spark_sink.warehouse.reached import reached_lsn
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

__all__ = ["JVM_OPTIONS", "NETWORK_SETTINGS", "SETTINGS", "Round", "SoakError"]

SLOT = "soak"

SETTINGS = {"logical_decoding_work_mem": "64kB", "max_prepared_transactions": "20"}
"""The server's: what is larger than this is streamed before it commits."""

NETWORK_SETTINGS = {"wal_sender_timeout": "10s"}
"""With a bad network, too: the server gives up a connection before the network gets well again."""


# The exit codes of a run whose server has gone. Starting the run again helps.
_PASSING = (2, 3, 5, 9)

_PASSING_WORDS = (
    # The server went away during the snapshot.
    "cannot copy table",
    # Spark waits ten seconds for a Python process to start. On a busy machine this can take longer.
    "Python worker failed to connect back",
    # The server could not be reached for a minute.
    "could not be looked up",
)
"""What an error says that has exit code 7, and passes as well."""

_MAX_STARTS = 60

PATIENCE_S = 600
"""How long nothing may move."""

# (With one compiler tier only, the space for compiled code is enough for a few minutes.)
JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC"


class SoakError(Exception):
    """Something happened that must never happen. The message has the seed that repeats the round."""


@dataclass
class Round:
    """One round, in a database and a directory of its own.

    ``work`` is the number of transactions between two kills, ``before`` the number of transactions before the slot is made. A kill
    comes after the tables or the staging log have progressed, or after part of the work. The latter two also kill during the
    snapshot.

    If a table is renamed while the snapshot copies it, the ledger has those rows under its old name. The comparison would then say
    that the changelog has too many rows. So only ``alter_while_copied`` does this.
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
    network: str | None = None

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
        """The stderr of all runs."""
        return self.directory / "log"

    def play(self, spark: SparkSession) -> str:
        """Play the round. The comparison uses the given session. Return a summary, or raise SoakError with the difference."""
        with self.cluster.database() as self._database, contextlib.ExitStack() as self._resources:
            self._dsn = self._database.dsn
            if self.network:
                proxy = self._resources.enter_context(FaultyProxy(self.cluster.port))
                self._dsn = proxy.dsn(self._database.tcp_dsn)
                self._weather = Weather(proxy, self.seed, self.say, self.network)
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

    def _start(self, *options: str) -> None:
        self._starts += 1
        command = [sys.executable, "-P", "-m", "spark_sink", "run", "-v", "-d", self._dsn, "-S", SLOT, "-c"]
        command += ["--publication", PUBLICATION, "--staging", str(self.staging), "--warehouse", str(self.warehouse)]
        command += ["--seal-interval", "0.1", "--trigger-interval", "0.2", *self._batch_options, *self.options, *options]
        environment = processes.environment(SPARK_SUBMIT_OPTS=JVM_OPTIONS)
        with self.log.open("ab") as stream:
            stream.write(f"--- start {self._starts}: {' '.join(command)}\n".encode())
            stream.flush()
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment)

    def _disturb(self, kill: str) -> None:
        """Run transactions, kill something after some progress, and check that the progress continues."""
        moment = self._rng.choice(self.moments)
        tables, staged = self._tables_at(), self._staged()
        with _Worker(self._model, self.work, lambda: self._staged() == staged) as worker:
            wanted = self._model.done + self._rng.randint(1, self.work)
            conditions: dict[str, Callable[[], bool]] = {
                "tables": lambda: self._has_begun() and self._tables_at() != tables,
                "staging": lambda: self._staged() != staged,
                # The worker pauses once the staging log has some of its transactions.
                "work": lambda: self._model.done >= wanted or self._staged() != staged,
            }
            self._wait(conditions[moment], worker)
            self.say(f"kill: {kill}, {moment} having moved")
            getattr(self, f"_kill_{kill}")()

    def _has_begun(self) -> bool:
        """Tell whether the tables have changes beyond the snapshot."""
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
        """The end of the staging log; None while it is empty."""
        end = log_end(self.staging) if self.staging.exists() else None
        return None if end is None or end == list_epochs(self.staging)[0].start else end

    def _wait(self, condition: Callable[[], bool], worker: _Worker | None = None) -> None:
        """Wait for a condition while the run works. Start the run again if it ended in a permitted way."""
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
                raise SoakError(f"nothing has moved for {PATIENCE_S} s, at {state}; {_end_of(self.log)}")
            time.sleep(0.02)

    def _check(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return
        is_passing = code in _PASSING or (code == 7 and any(text in _end_of(self.log) for text in _PASSING_WORDS))
        if not is_passing or self._starts > _MAX_STARTS:
            raise SoakError(f"cdcpipe-spark ended with {code}; {_end_of(self.log)}")
        errors = [line for line in _end_of(self.log).splitlines() if "error:" in line]
        self.say(f"cdcpipe-spark ended with {code}: {errors[-1] if errors else ''}; starting it again")
        self._start()

    # --- what is killed ---

    def _kill(self, *roles: str) -> int:
        assert self._process is not None
        return processes.kill(self._process.pid, *roles)

    def _kill_streamer(self) -> None:
        """Send SIGKILL to the process that streams. The launcher starts another one."""
        self._kill("streamer", "slot monitor")

    def _kill_walsender(self) -> None:
        """End the stream on the server's side."""
        with self.cluster.connect() as connection:
            connection.execute("select pg_terminate_backend(active_pid) from pg_replication_slots where active")

    def _kill_server(self) -> None:
        """Stop the server as a crash does, and start it again."""
        self.cluster.restart("immediate")

    def _kill_driver(self) -> None:
        """Send SIGKILL to the launcher and the driver."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._between()
        self._start()

    def _kill_jvm(self) -> None:
        """Send SIGKILL to the JVM of the driver. The driver must then end with an error."""
        assert self._process is not None
        if self._kill("JVM"):
            try:
                code = self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired as ex:
                raise SoakError(f"cdcpipe-spark goes on without its Spark; {_end_of(self.log)}") from ex
            if code == 0:
                raise SoakError(f"cdcpipe-spark ended with 0 without its Spark; {_end_of(self.log)}")
            self._between()
            self._start()

    def _kill_executor(self) -> None:
        """Send SIGKILL to the executors. Spark starts others, and repeats their unfinished tasks."""
        self._wait(lambda: self._kill("executor") > 0)

    def _kill_stop(self) -> None:
        """Stop the run normally, and start it again."""
        self._end()
        self._between()
        self._start()

    def _end(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(PATIENCE_S)
        if code != 0 and code not in (-signal.SIGTERM, 128 + signal.SIGTERM, *_PASSING):
            raise SoakError(f"cdcpipe-spark ended with {code} when asked to stop; {_end_of(self.log)}")

    def _between(self) -> None:
        """Before the next start, delete what may be deleted, or change how batches are cut."""
        what = self._rng.choice(["nothing", "checkpoint", "replica", "batches"])
        self.say(f"between two runs: {what}")
        _wait_for_jvm(self.warehouse)
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
        """Wait until the tables have everything that is committed."""
        with self._database.connect() as connection:

            def look(query: str) -> int:
                row = connection.execute(query.encode()).fetchone()
                return 0 if row is None or row[0] is None else LSN.parse(row[0])

            # One more commit: it flushes all WAL before it.
            connection.execute("create temp table flush (); drop table flush")
            end_lsn = look("select pg_current_wal_lsn()::text")
            confirmed = f"select confirmed_flush_lsn::text from pg_replication_slots where slot_name = '{SLOT}'"
            self._wait(lambda: look(confirmed) >= end_lsn)
        self._wait(lambda: (at := self._tables_at()) is not None and ((end := self._staged()) is None or at.lsn >= end.lsn))
        # All of this can also be true when a run was killed and the next one has only just begun.
        tables = Tables(Warehouse.existing(self.warehouse))
        self._wait(lambda: not any(_lacks_changes(tables.house, row) for row in tables.describe()))
        self._wait(lambda: not any(_lacks_versions(tables.house, row) for row in tables.describe()))

    def _problems(self, spark: SparkSession) -> list[str]:
        relations = self._model.relations()
        with self._database.connect() as connection:
            return list(equality.compare(spark, self.warehouse, self._database.dsn, connection, self.ledger, relations))

    def _compare(self, spark: SparkSession) -> str:
        self.ledger = ledger = self._model.ledger()
        problems = self._problems(spark)
        if problems:
            # A table may still wait for its copy: an ALTER TABLE has rewritten texts in _cdc_exact, which the stream does not tell.
            self.say("tables differ: run --available-now, which copies those that need it")
            self._start("--available-now")
            assert self._process is not None
            if code := self._process.wait(PATIENCE_S):
                raise SoakError(f"cdcpipe-spark run --available-now ended with {code}; {_end_of(self.log)}")
            problems = self._problems(spark)
        if problems:
            raise SoakError("\n".join(problems))
        changes = sum(len(entries) for entries in ledger.changes.values())
        return (
            f"{self._model.done} transactions, {changes} changes in {len(ledger.changes)} tables, {self._starts} starts: all equal"
        )


def _lacks_changes(house: Warehouse, row: dict[str, Any]) -> bool:
    """Tell, from a table's entry in `status`, whether it has a key and its replica is behind its changelog."""
    versions = house.versions(house.find(row["table"])) if row["versions"] else []
    if row["changelog"] is None or not versions or not versions[-1].key:
        return False
    replica: dict[str, Any] | None = row["replica"]
    # A replica that was made again has the warehouse's position of that time. A changelog has the position of its last change.
    return replica is None or Position.parse(replica["position"]).lsn < Position.parse(row["changelog"]["position"]).lsn


def _lacks_versions(house: Warehouse, row: dict[str, Any]) -> bool:
    """Tell, from a table's entry in `status`, whether its stored history is behind its changelog."""
    table = house.find(row["table"]) if row["versions"] else None
    known = None if table is None else stored_histories.facts(house, table)
    if table is None or known is None:
        return False
    versions, reached = house.versions(table), reached_lsn(house, house.source())
    lsn = stored_histories.wanted_lsn(versions, Position.parse(row["changelog"]["position"]).lsn, reached)
    return known.known_lsn(versions) < lsn


class _Worker(threading.Thread):
    """Runs transactions in another thread: a fixed number, then now and then one more until some of them have arrived."""

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


def _wait_for_jvm(warehouse: Path) -> None:
    """Wait until the JVM of a killed run has ended. It lives for some seconds, and may still write."""
    since = time.monotonic()
    while processes.is_open(warehouse / "_cdcpipe/tables.lock"):  # the JVM inherits it
        if time.monotonic() - since > PATIENCE_S:
            raise SoakError("the JVM of a killed run has not ended")
        time.sleep(0.05)


def _end_of(log: Path) -> str:
    return f"the end of {log}:\n" + "".join(log.read_text(errors="replace").splitlines(keepends=True)[-30:])
