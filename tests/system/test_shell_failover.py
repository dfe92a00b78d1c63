"""Loops of shell commands for high availability go on across a failover of the database, without a person."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from standbys import Pair, execute, kill, wait_for_replay

from support.cli_process import CLI, run_cli
from support.paths import ROOT
from support.waiting import until

SLOT = "shell"

STANDBY = """
while :; do
    cdcpipe -d "$DSN" -S shell --publication pub -J -N -A --standby <&3 >>"$1"
    case $? in 0) exit ;; 2 | 3 | 5 | 9) sleep 0.2 ;; *) exit 1 ;; esac
done
"""

POLLER = """
while :; do
    cdcpipe -d "$DSN" -S shell -L -i 0.1
    case $? in 0) ;; 2 | 3 | 5 | 9) sleep 0.2; continue ;; *) exit 1 ;; esac
    cdcpipe -d "$DSN" -S shell --publication pub -J -N -A <&3 >>"$1"
    case $? in 0) exit ;; 2 | 3 | 5 | 9) sleep 0.2 ;; *) exit 1 ;; esac
done
"""
"""The loop that serves the C program: a poller, then a streamer."""


class Loops:
    """Two loops on one slot, of which one streams and the other one waits."""

    def __init__(self, dsn: str, loop: str, directory: Path) -> None:
        program = directory / "cdcpipe"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cli "$@"\n')
        program.chmod(0o755)
        environment = os.environ | {"PATH": f"{directory}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "DSN": dsn}
        self.outputs = [directory / name for name in ("first", "second")]
        os.mkfifo(directory / "commands")
        script = f'exec 3<>"{directory}/commands"\n{loop}'  # stdin stays open
        self.log = directory / "log"
        with self.log.open("wb") as log:
            self.processes = [
                subprocess.Popen(["/bin/sh", "-c", script, "sh", path], env=environment, stderr=log, start_new_session=True)
                for path in self.outputs
            ]

    def received(self) -> set[int]:
        """Return the rows in the lines that are complete."""
        lines = [line for path in self.outputs if path.exists() for line in path.read_text().rpartition("\n")[0].splitlines()]
        return {int(line.split('"value":')[1].split("}")[0]) for line in lines if '"action":"I"' in line}

    def check(self) -> None:
        assert all(process.poll() is None for process in self.processes), self.log.read_text()

    def end(self) -> None:
        for process in self.processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as made:
        execute(made.primary, "create table t (id int primary key)", "create publication pub for table t")
        execute(made.primary, f"select pg_create_logical_replication_slot('{SLOT}', 'pgoutput', false, false, true)")
        yield made


@pytest.mark.parametrize("loop", [STANDBY, POLLER], ids=["standby", "poller"])
def test_a_loop_survives_a_failover(pair: Pair, loop: str, tmp_path: Path) -> None:
    loops = Loops(pair.dsn, loop, tmp_path)
    try:
        execute(pair.primary, "insert into t select generate_series(1, 10)")
        until(lambda: loops.received() >= set(range(1, 11)), "the first rows")
        until(lambda: pair.has_copy_of(SLOT), "a copy of the slot")
        wait_for_replay(pair.standby, pair.primary)
        kill(pair.primary)
        pair.standby.promote()
        execute(pair.standby, "insert into t select generate_series(11, 20)")
        until(lambda: loops.received() >= set(range(1, 21)), "the rows after the promotion")
        loops.check()
    finally:
        loops.end()


def test_a_copy_of_the_slot_is_waited_for_until_its_server_is_promoted(pair: Pair) -> None:
    """Each machine's process waits at the server of this machine. Nobody can stream from a standby's copy of a slot."""
    execute(pair.primary, "insert into t values (1)")

    def has_copy() -> bool:
        execute(pair.primary, f"select pg_replication_slot_advance('{SLOT}', pg_current_wal_lsn())")
        return pair.has_copy_of(SLOT)

    until(has_copy, "a copy of the slot")
    base = ["-d", pair.standby.dsn, "-S", SLOT]
    code, _, err = run_cli(*base, "--publication", "pub")
    assert (code, "copy of its primary's slot" in err) == (2, True), err
    code, _, err = run_cli(*base, "-L", "-u", "0")
    assert (code, "promote this standby" in err) == (9, True), err
    with CLI(*base, "-L", "-v", header=False) as poller, CLI(*base, "--publication", "pub", "--standby", "-v") as standby:
        until(lambda: "waiting" in poller.stderr and "waiting" in standby.stderr, "both wait")
        wait_for_replay(pair.standby, pair.primary)
        kill(pair.primary)
        pair.standby.promote()
        execute(pair.standby, "insert into t values (2)")
        assert standby.transactions(1)[0][1] == [b"2"]
        assert standby.quit() == 0
        assert poller.wait() == 0
