"""The log through planned changes of the server: a switchover and back, a restore to a point in time, and pg_upgrade."""

import contextlib
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import postgres
import pytest
from standbys import Pair, become_standby, execute

from cdcpipe.errors import GapError
from cdcpipe.lsn import LSN
from spark_sink.launcher.config import LauncherConfig
from spark_sink.launcher.launcher import Launcher
from spark_sink.staging.filler import SealPolicy
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import StagingError, list_epochs, log_end
from support.landing import replay
from support.waiting import until

SLOT = "planned"


class Log:
    """The log of the table ``t`` in a staging directory."""

    def __init__(self, staging: Path, dsn: str) -> None:
        self.config = LauncherConfig(
            SLOT, staging, ("pub",), ("-d", dsn), create_slot=True, available_now=True, seal=SealPolicy(seal_interval_s=0.05)
        )

    def land(self, **changes: Any) -> None:
        with Launcher(replace(self.config, **changes)) as launcher:
            launcher.wait()

    @property
    def rows(self) -> list[int]:
        tables, _ = replay(self.config.staging)
        return sorted(int(key) for key in tables.get("t", {}))

    @property
    def gaps(self) -> list[Gap]:
        return [epoch.gap for epoch in list_epochs(self.config.staging) if epoch.gap is not None]

    @property
    def end_lsn(self) -> int:
        end = log_end(self.config.staging)
        assert end is not None
        return end.lsn


def make_table(server: postgres.Cluster) -> None:
    execute(server, "create table t (id int primary key)", "create publication pub for table t")


def rows(server: postgres.Cluster) -> list[int]:
    return [row for (row,) in execute(server, "select id from t order by id")]


def test_a_switchover_and_back(tmp_path: Path) -> None:
    """The launcher runs all the while. Each server is shut down in order, and becomes the standby of the other one."""
    with Pair() as pair:
        make_table(pair.primary)
        log = Log(tmp_path, pair.dsn)
        with Launcher(replace(log.config, available_now=False)) as launcher:
            for number in (1, 2, 3):
                execute(pair.primary, f"insert into t values ({number})")
                until(lambda: launcher.progress.transactions == number)  # noqa: B023
                if number == 3:
                    break
                until(lambda: pair.has_copy_of(SLOT), "a copy of the slot")
                pair.primary.halt("fast")
                pair.standby.promote()
                become_standby(pair.primary, pair.standby)
                pair.swap()
                # The original of the slot is in the way of a copy. One that was a copy itself becomes one again.
                original = f"slot_name = '{SLOT}' and not synced"
                execute(pair.standby, f"select pg_drop_replication_slot(slot_name) from pg_replication_slots where {original}")
        log.land()
        assert log.rows == rows(pair.primary) == [1, 2, 3]
        assert log.gaps == []
        assert list_epochs(tmp_path)[-1].timeline == 3


def test_a_restore_to_a_point_in_time(tmp_path: Path) -> None:
    """The server has the same system identifier, a new timeline, no slot, and uses positions of the log again."""
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(postgres.Cluster("18"))
        make_table(old)
        log = Log(tmp_path, old.dsn)
        log.land()
        execute(old, "insert into t values (1)")
        target = {"recovery_target_name": "here", "recovery_target_action": "promote"}
        restored = stack.enter_context(postgres.Cluster("18", settings=target, standby_of=old))
        execute(old, "select pg_create_restore_point('here')", "insert into t select generate_series(2, 11)")
        log.land()
        assert log.rows == list(range(1, 12))
        end_lsn = log.end_lsn
        until(lambda: execute(restored, "select pg_is_in_recovery()") == [(False,)], "the end of the recovery")
        old.halt()
        execute(restored, "insert into t values (100)")
        log = Log(tmp_path, restored.dsn)
        with pytest.raises(GapError, match="does not exist any more"):
            log.land()
        while LSN.parse(execute(restored, "select pg_current_wal_lsn()::text")[0][0]) <= end_lsn:
            execute(restored, "select pg_logical_emit_message(false, 'more', repeat('x', 1000))")
        log.land(on_gap="resnapshot")
        execute(restored, "insert into t values (101)")
        log.land()
        assert log.rows == [*range(1, 12), 101]  # the copies of the tables make up for it
        [gap] = log.gaps
        assert gap.is_divergence
        assert gap.lost is not None
        assert gap.lost.rows == {"public.t": 10}


def test_pg_upgrade_with_the_slot(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(postgres.Cluster("18"))
        new = stack.enter_context(postgres.Cluster("18"))
        make_table(old)
        log = Log(tmp_path, old.dsn)
        with Launcher(replace(log.config, available_now=False)) as launcher:
            execute(old, "insert into t values (1)")
            until(lambda: launcher.progress.transactions == 1)
            old.halt("fast")  # the server waits until everything in the slot is confirmed
        assert log.rows == [1]
        new.halt("fast")
        upgrade(old, new)
        new.resume()
        execute(new, "insert into t values (2)")
        log = Log(tmp_path, new.dsn)
        with pytest.raises(StagingError, match="has the log of the server with system id") as caught:
            log.land()
        hint = caught.value.hint or ""
        [(system_id,)] = execute(new, "select system_identifier::text from pg_control_system()")
        assert f"--accept-system-id {system_id};" in hint
        for number in (3, 4):
            execute(new, f"insert into t values ({number})")
            log.land(accept_system_id=system_id)
        log.land()
        assert log.rows == rows(new) == [1, 2, 3, 4]
        assert log.gaps == []


def test_pg_upgrade_takes_the_slot_along_after_available_now(tmp_path: Path) -> None:
    """It refuses a slot behind any committed transaction, also if nothing of that is published."""
    with contextlib.ExitStack() as stack:
        old, new = (stack.enter_context(postgres.Cluster("18")) for _ in range(2))
        make_table(old)
        log = Log(tmp_path, old.dsn)
        log.land()
        execute(old, "insert into t values (1)", "create table other (id int)", "insert into other values (1)")
        log.land(seal=SealPolicy())  # the segment with the row is open until the end
        old.halt("fast")
        new.halt("fast")
        upgrade(old, new)
        new.resume()
        execute(new, "insert into t values (2)")
        [(system_id,)] = execute(new, "select system_identifier::text from pg_control_system()")
        log = Log(tmp_path, new.dsn)
        log.land(accept_system_id=system_id)
        assert log.rows == [1, 2]
        assert log.gaps == []


def test_another_server_with_a_slot_that_pg_upgrade_did_not_take_along(tmp_path: Path) -> None:
    """A dump was restored into it, or its pg_upgrade took no slots along. Nobody knows what happened before the slot was made."""
    with contextlib.ExitStack() as stack:
        old, new = (stack.enter_context(postgres.Cluster("18")) for _ in range(2))
        make_table(old)
        make_table(new)
        log = Log(tmp_path, old.dsn)
        log.land()
        execute(old, "insert into t select generate_series(1, 10)")
        log.land()
        end_lsn = log.end_lsn
        with pytest.raises(StagingError, match="has the log of the server with system id"):
            Log(tmp_path, new.dsn).land(on_gap="resnapshot")
        assert execute(new, "select slot_name from pg_replication_slots") == []  # a slot that nobody reads would keep WAL
        execute(new, f"select pg_create_logical_replication_slot('{SLOT}', 'pgoutput')", "insert into t values (1), (2)")
        while LSN.parse(execute(new, "select pg_current_wal_lsn()::text")[0][0]) <= end_lsn:
            execute(new, "select pg_logical_emit_message(false, 'more', repeat('x', 1000))")
        [(system_id,)] = execute(new, "select system_identifier::text from pg_control_system()")
        log = Log(tmp_path, new.dsn)
        with pytest.raises(GapError, match="pg_upgrade has not taken slot 'planned' along: it is at "):
            log.land(accept_system_id=system_id)
        execute(new, f"select pg_drop_replication_slot('{SLOT}')")
        log.land(accept_system_id=system_id, on_gap="resnapshot")
        execute(new, "insert into t values (11)")
        log.land()
        assert log.rows == list(range(1, 12))  # the copies of the tables make up for the rest
        [gap] = log.gaps
        assert "does not exist any more" in gap.cause  # recorded before the new one was made


def upgrade(old: postgres.Cluster, new: postgres.Cluster) -> None:
    command = [new.bin("pg_upgrade"), "--username", "postgres", "--old-bindir", old.bin("postgres").parent]
    command += ["--old-datadir", old.data, "--new-datadir", new.data, "--old-port", str(old.port), "--new-port", str(new.port)]
    command += ["--socketdir", new.directory]
    user = postgres.as_server_user()
    done = subprocess.run(command, cwd=new.directory, capture_output=True, text=True, check=False, **user)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
