"""Rounds of random DDL for scripts/soak and the tests: the tables follow, or whatever differs is named, and heals.

A round makes a database with the tables of ddl_workload.py. It runs parts of the workload, and brings each part to the tables with
`cdcpipe-spark run --available-now`. Runs are killed amid: by SIGKILL, or by an error at a random step in this process. Then:

- With captured DDL, every table that is certain needs no copy, and has no column that PostgreSQL has not. As of each position for
  which the workload has recorded its rows, it has these rows.
- With ``--heal off`` every table that differs is one of those that wait for a copy, also without captured DDL.
- After a run with ``--heal now`` all tables are equal, and none waits.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import processes
from ddl_workload import State, Workload
from soak_round import JVM_OPTIONS

import spark_sink
from cdcpipe.errors import CdcpipeError
from spark_sink.delta import file_table
from spark_sink.delta import sql as delta
from spark_sink.replica import merge
from spark_sink.replica.as_of import read_as_of
from spark_sink.replica.current import read_replica
from spark_sink.schema.types import METADATA_PREFIX
from spark_sink.snapshot import two_looks
from spark_sink.verify.comparison import verify
from spark_sink.warehouse import landed_snapshots, wanted_copies
from spark_sink.warehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from postgres import Cluster
    from pyspark.sql import SparkSession

__all__ = ["SETTINGS", "DdlError", "DdlRound"]

SETTINGS = {"max_prepared_transactions": "20"}
"""The server's."""

_SLOT = "ddl"
_PATIENCE_S = 600.0
_MADE_ANEW = ("the server has another table of this name", "the warehouse has no such table")
_NEEDLESS = {two_looks.REPLACED, two_looks.REWRITTEN, merge.INTERRUPTED}
"""Reasons for copies that say nothing of captured DDL: those of the looks at the catalog, which does not know it, and of a kill."""
_STEPS = [
    (file_table, "_write"),
    (Warehouse, "write_versions"),
    (Warehouse, "record"),
    (landed_snapshots, "record_start"),
    (landed_snapshots, "record_end"),
    (merge, "_run_merge"),
    (delta, "overwrite"),
    (delta, "drop_columns"),
    (delta, "add_columns"),
]
"""The functions after or before which a run may end with an error."""


class DdlError(Exception):
    """A table differs in silence, or has not healed."""


class _KilledError(Exception):
    """The run ends here, as if it were killed."""


@dataclass
class DdlRound:
    """One round, in a database and a directory of its own. It runs ``parts`` times ``steps`` statements.

    ``kills`` is the number of runs that are ended by SIGKILL. Each other run but the last may end with an error.
    """

    cluster: Cluster
    directory: Path
    seed: int
    spark: SparkSession
    is_captured: bool = True
    parts: int = 3
    steps: int = 60
    kills: int = 0
    states: int = 20
    say: Callable[[str], None] = print
    options: tuple[str, ...] = ()
    _states: list[State] = field(default_factory=list)

    def play(self) -> str:
        """Play the round. Returns a summary. Raises DdlError with what is wrong."""
        self._rng = random.Random(self.seed ^ 0xDD1)
        with self.cluster.database() as database, contextlib.ExitStack() as resources:
            self._dsn = database.dsn
            self._workload = Workload(database.connect, self.seed, renames=self.is_captured)
            resources.callback(self._end)
            self._workload.prepare()
            # The first rows come with a snapshot, or with the stream. The capture is older than the slot, or younger.
            is_copied, is_older, drops = (self._rng.random() < 0.6 for _ in range(3))
            drops &= self.is_captured
            if is_copied:
                self._workload.fill()
            if self.is_captured and is_older:
                self._install()
            launcher = spark_sink.LauncherConfig(
                _SLOT, self.directory / "staging", ("everything",), ("-d", self._dsn), create_slot=True, available_now=True
            )
            self._config = spark_sink.RunConfig(
                launcher,
                self.directory / "warehouse",
                snapshot="initial" if is_copied else "never",
                heal="off",
                dropped_columns="drop" if drops else "keep",
                replica_interval_s=self._rng.choice([0.0, 10.0]),
                optimize_interval_s=None,
            )
            self._run()
            if self.is_captured and not is_older:
                self._install()
            if not is_copied:
                self._workload.fill()
            for part in range(self.parts):
                self._work()
                if part < self.kills:
                    self._run_and_kill()
                elif part < self.parts - 1:
                    self._run_and_fail()
            self._workload.settle()
            if not self.is_captured:
                self._workload.fill()  # the stream describes a table only before its next change
            self._run()
            return self._compare(drops=drops)

    def _end(self) -> None:
        with contextlib.suppress(Exception):
            self._workload.settle()
        self._workload.close()

    def _work(self) -> None:
        wanted = -(-self.states // self.parts)
        for number in range(wanted):
            self._workload.work(self.steps // wanted + (number < self.steps % wanted))
            state = self._workload.state() if self.is_captured else None
            if state is not None:
                self._states.append(state)

    # --- runs ---

    def _run(self, **changes: Any) -> None:
        spark_sink.run(replace(self._config, **changes), self.spark)

    def _run_and_fail(self) -> None:
        left = self._rng.randint(1, 40)
        self.say(f"a run that ends at its step {left}")
        with _failing(left, is_before=self._rng.random() < 0.5), contextlib.suppress(CdcpipeError, _KilledError):
            self._run()

    def _run_and_kill(self) -> None:
        """Run the command, and kill it after some commits."""
        wanted = self._commits() + self._rng.randint(1, 25)
        command = [sys.executable, "-P", "-m", "spark_sink", "run", "-d", self._dsn, "-S", _SLOT, "--publication", "everything"]
        command += ["--staging", str(self.directory / "staging"), "--warehouse", str(self.directory / "warehouse")]
        command += ["--heal", "off", "--dropped-columns", self._config.dropped_columns, "--optimize-interval", "off"]
        command += ["--seal-interval", "0.1", "--replica-interval", "0", "--available-now", *self.options]
        with (self.directory / "log").open("ab") as stream:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=processes.environment(SPARK_SUBMIT_OPTS=JVM_OPTIONS),
            )
        try:
            deadline = time.monotonic() + _PATIENCE_S
            while process.poll() is None and self._commits() < wanted:
                if time.monotonic() > deadline:
                    raise DdlError(f"nothing has moved for {_PATIENCE_S} s; see {self.directory / 'log'}")
                time.sleep(0.02)
        finally:
            process.kill()
            code = process.wait()
        self.say(f"cdcpipe-spark run ended with {code} at {self._commits()} commits")
        if code not in (0, -9):
            raise DdlError(f"cdcpipe-spark run ended with {code}; see {self.directory / 'log'}")

    def _commits(self) -> int:
        return sum(1 for _ in self.directory.glob("warehouse/*/*/_delta_log/*.json"))

    def _install(self) -> None:
        command = [sys.executable, "-P", "-m", "cli", "ddl", "install", "-d", self._dsn, "--publication", "everything"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=processes.environment(SPARK_SUBMIT_OPTS=JVM_OPTIONS))

    # --- the comparison ---

    def _compare(self, *, drops: bool) -> str:
        house = Warehouse.existing(self.directory / "warehouse")
        waiting = {str(each.table): each.why for each in wanted_copies.waiting(house)}
        certain = [f"public.{name}" for name, is_certain in self._workload.tables.items() if is_certain]
        problems = []
        if self.is_captured:
            told = {name: sorted(set(why.split("; ")) - _NEEDLESS) for name, why in waiting.items()}
            problems += [f"{name} waits for a copy: {'; '.join(told[name])}" for name in certain if told.get(name)]
            problems += [problem for state in self._states for problem in self._compare_state(house, state)]
        different = self._different(house)
        # verify can't compare a table that was made, or made anew, and has not changed since. It says so, and the table waits for
        # a copy.
        is_compared = {name for name, text in different.items() if not text.startswith(_MADE_ANEW)}
        named = waiting.keys() - (is_compared.intersection(certain) if self.is_captured else set())
        problems += [f"{name} differs: {text}" for name, text in different.items() if name not in named]
        self.say(f"{len(different)} tables differ, {len(waiting)} wait, {len(self._states)} states")
        self._run(heal="now", snapshot=None)
        problems += [f"{name} has not healed: {text}" for name, text in self._different(house).items()]
        problems += [f"{each.table} still waits for a copy: {each.why}" for each in wanted_copies.waiting(house)]
        if drops:
            problems += [problem for name in certain for problem in self._compare_columns(house, name)]
        if problems:
            raise DdlError("\n".join(problems))
        return f"{len(self._states)} states, {len(waiting)} tables had to be copied: all equal"

    def _different(self, house: Warehouse) -> dict[str, str]:
        """Return the tables that differ, each with what differs."""
        results = verify(self.spark, house.root, ("-d", self._dsn), timeout_s=_PATIENCE_S)
        return {
            str(each.table): each.problem or ", ".join(f"{d.kind} {d.key}" for d in each.differences)
            for each in results
            if not each.is_equal
        }

    def _compare_state(self, house: Warehouse, state: State) -> Iterator[str]:
        name = next(name for name, line in self._workload.lines.items() if line == state.line)
        rows = read_as_of(self.spark, house.root, f"public.{name}", state.lsn)
        # A table that was made anew has its new columns from its first row on.
        columns = state.columns if state.rows else ()
        found = rows.selectExpr(*(f"string(`{name}`)" for name in columns)).collect()
        if sorted(repr(tuple(row)) for row in found) != sorted(map(repr, state.rows)):
            yield f"public.{name} differs as of {state.lsn}: {len(found)} rows, not {len(state.rows)}, or other values"

    def _compare_columns(self, house: Warehouse, name: str) -> Iterator[str]:
        found = {column for column in read_replica(self.spark, house.root, name).columns if not column.startswith(METADATA_PREFIX)}
        wanted = set(self._workload.columns(name))
        if found != wanted:
            yield f"the replica of {name} has the columns {sorted(found)}, not {sorted(wanted)}"


@contextlib.contextmanager
def _failing(left: int, *, is_before: bool) -> Iterator[None]:
    """Let the step with this number raise an error, before or after it is done, and all later steps, too."""
    count = 0

    def wrap(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count > left or (count == left and is_before):
                raise _KilledError
            made = function(*arguments, **named)
            if count >= left:
                raise _KilledError
            return made

        return call

    with contextlib.ExitStack() as patches:
        for owner, name in _STEPS:
            patches.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        yield
