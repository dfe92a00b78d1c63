"""Rounds of failover for scripts/soak and the tests: the pipeline goes on by itself, and nothing is lost in silence.

    with Pair() as pair, FailoverRounds(pair, directory, spark, seed) as rounds:
        print(rounds.play("synchronous"))

One `Runner` with ``--on-gap resnapshot`` runs through all rounds, and random transactions as well. Each round kills all processes
of the primary at a random moment, promotes the standby, and makes the old primary the new standby:

| kind | the standby | what must come out |
|---|---|---|
| synchronous | has all that was committed or sent (`synchronous_standby_names`, `synchronized_standby_slots`) | equal, and no gap |
| asynchronous | may lack the last changes | equal; a gap is named |
| lagging | was down for a while, so it lacks changes that the pipeline has | equal; a gap is named, with the changes |

At its end a round compares the replicas with PostgreSQL's tables, row by row, and checks that no change is twice in a changelog.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import psycopg
from standbys import kill, rebuild

import spark_sink
from spark_sink.warehouse import gaps
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from postgres import Cluster
    from pyspark.sql import SparkSession
    from standbys import Pair

    from spark_sink.staging.gap import Gap

__all__ = ["FailoverError", "FailoverRounds"]

_SLOT = "rounds"
_TABLES = ("small", "wide")
_PATIENCE_S = 300.0


class FailoverError(Exception):
    """Something was lost in silence, or the pipeline did not go on."""


class _Traffic:
    """A thread that runs small random transactions on the primary, wherever it is."""

    def __init__(self, dsn: str, seed: int) -> None:
        self.done = 0
        """How many transactions the server has acknowledged."""
        self._dsn = dsn
        self._rng = random.Random(seed)
        self._next_id = 0
        self._going, self._idle, self._ending = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._going.set()
        self._thread.start()

    def pause(self) -> None:
        """Return when no transaction runs."""
        self._going.clear()
        if not self._idle.wait(_PATIENCE_S):
            raise FailoverError("a transaction did not end")

    def go_on(self) -> None:
        self._idle.clear()
        self._going.set()

    def end(self) -> None:
        self._ending.set()
        self._going.set()
        self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        while not self._ending.is_set():
            with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self._dsn) as connection:
                while not self._ending.is_set():
                    self._wait()
                    with connection.transaction():
                        self._change(connection)
                    self.done += 1
                    time.sleep(0.005)  # this is not about speed
            self._wait()
            time.sleep(0.05)

    def _wait(self) -> None:
        if not self._going.is_set():
            self._idle.set()
            self._going.wait()

    def _change(self, connection: psycopg.Connection[Any]) -> None:
        rng = self._rng
        for _ in range(rng.randint(1, 4)):
            table = rng.choice(_TABLES)
            self._next_id += 1
            connection.execute(f"insert into {table} values (%s, %s)", [self._next_id, "x" * rng.randint(0, 200)])
            known = rng.randint(1, self._next_id)
            if rng.random() < 0.4:
                connection.execute(f"update {table} set v = v || 'y' where id = %s", [known])
            if rng.random() < 0.2:
                connection.execute(f"delete from {table} where id = %s", [known])


class FailoverRounds:
    """The pipeline and the traffic, and the rounds that disturb them."""

    def __init__(self, pair: Pair, directory: Path, spark: SparkSession, seed: int) -> None:
        self._pair, self._spark, self._rng = pair, spark, random.Random(seed)
        self._staging, self._warehouse = directory / "staging", directory / "warehouse"
        self._traffic = _Traffic(pair.dsn, seed)
        launcher = spark_sink.LauncherConfig(
            _SLOT,
            self._staging,
            ("p",),
            ("-d", pair.dsn),
            create_slot=True,
            on_gap="resnapshot",
            seal=spark_sink.SealPolicy(seal_interval_s=0.1),
        )
        config = spark_sink.RunConfig(
            launcher, self._warehouse, trigger_interval_s=0.2, replica_interval_s=1.0, optimize_interval_s=None
        )
        self._runner = spark_sink.Runner(config, spark)

    def __enter__(self) -> Self:
        with self._pair.primary.connect() as connection:
            for table in _TABLES:
                connection.execute(f"create table {table} (id bigint primary key, v text)")
            connection.execute(f"create publication p for table {', '.join(_TABLES)}")
        self._traffic.start()
        try:
            self._runner.start()
            self._wait(lambda: self._runner.progress.tables is not None, "the first snapshot")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._traffic.end()
        self._runner.stop()

    def play(self, kind: str) -> str:
        """Play a round, and return what it saw. Raises FailoverError if something was lost in silence."""
        pair, before = self._pair, self._gaps()
        self._make_synchronous(pair.primary, is_synchronous=kind == "synchronous")
        self._wait(lambda: pair.has_copy_of(_SLOT), "a copy of the slot on the standby")
        if kind == "lagging":
            pair.standby.halt()
            self._go_on_for(self._rng.randint(20, 40))
            self._wait_for_log()
        else:
            self._go_on_for(self._rng.randint(5, 60))
        time.sleep(self._rng.random() * 0.3)
        kill(pair.primary)
        if kind == "lagging":
            pair.standby.resume()
        pair.standby.promote()
        self._make_synchronous(pair.standby, is_synchronous=kind == "synchronous")
        rebuild(pair.primary, pair.standby)
        pair.swap()
        self._go_on_for(20)
        self._compare()
        found = self._gaps()[len(before) :]
        if (found and kind == "synchronous") or (not found and kind == "lagging"):
            raise FailoverError(f"the round was {kind}, and the log has the gaps {found}")
        if kind == "lagging" and not any(gap.lost is not None and gap.lost.transactions for gap in found):
            raise FailoverError(f"the changes that were lost are not named: {found}")
        named = "; ".join(f"{gap.cause} ({gap.lost})" for gap in found)
        return f"{kind}: equal after {self._traffic.done} transactions, {named or 'no gap'}"

    # --- waiting ---

    def _wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            if self._runner.wait(0.0):  # it raises the error, if there is one
                raise FailoverError("the pipeline has ended")
            if time.monotonic() > deadline:
                raise FailoverError(f"{what} did not come within {_PATIENCE_S:.0f} s")
            time.sleep(0.1)

    def _go_on_for(self, transactions: int) -> None:
        done = self._traffic.done + transactions
        self._wait(lambda: self._traffic.done >= done, f"{transactions} transactions")

    def _wait_for_log(self) -> None:
        """Wait until the log has changes of this moment."""
        landed = self._runner.progress.launcher.transactions + 5
        self._wait(lambda: self._runner.progress.launcher.transactions >= landed, "a few transactions in the log")

    # --- servers and tables ---

    def _make_synchronous(self, server: Cluster, *, is_synchronous: bool) -> None:
        with server.connect() as connection:
            connection.execute(f"alter system set synchronous_standby_names = '{'*' if is_synchronous else ''}'")
            connection.execute(f"alter system set synchronized_standby_slots = '{'standby' if is_synchronous else ''}'")
            connection.execute("select pg_reload_conf()")

    def _gaps(self) -> list[Gap]:
        return [each.gap for each in gaps.read(Warehouse.existing(self._warehouse))]

    def _compare(self) -> None:
        """Wait until the replicas have PostgreSQL's rows, and check that no change is twice in a changelog."""
        self._traffic.pause()
        try:
            self._wait(lambda: all(map(self._is_equal, _TABLES)), "the tables' equality")
            self._wait(lambda: gaps.open_gap(Warehouse.existing(self._warehouse)) is None, "the end of the copies")
        finally:
            self._traffic.go_on()
        for table in _TABLES:
            changes = self._spark.read.format("delta").load(str(self._warehouse / f"changelog/public.{table}"))
            places = changes.where("_cdc_op <> 'snapshot'").groupBy("_cdc_end_lsn", "_cdc_ordinal").count()
            if twice := places.where("count > 1").collect():
                raise FailoverError(f"changes of {table} are twice in its changelog: {twice}")

    def _is_equal(self, table: str) -> bool:
        with self._pair.primary.connect() as connection:
            expected = sorted(connection.execute(f"select id, v from {table}").fetchall())
        rows = spark_sink.read_replica(self._spark, self._warehouse, f"public.{table}").select("id", "v").collect()
        return sorted(map(tuple, rows)) == expected
