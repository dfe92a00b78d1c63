"""`run` and `Runner` with a PostgreSQL server, in a session of the calling program."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import postgres
import pytest

import spark_sink
from cdcpipe.errors import SlotDoesNotExistError
from spark_sink.client.slot_monitor import Lag
from spark_sink.pipeline import runner as runner_module
from spark_sink.staging import last_error
from support.road import KEEP
from support.waiting import SPARK_DEADLINE_S, until

pytestmark = pytest.mark.spark


def config(database: postgres.Database, tmp_path: Path, **options: Any) -> spark_sink.RunConfig:
    slot = f"runner_{database.name}"[:63]
    launcher = spark_sink.LauncherConfig(
        slot, tmp_path / "staging", ("p",), ("-d", database.dsn), **{"create_slot": True, "available_now": True} | options
    )
    return spark_sink.RunConfig(launcher, tmp_path / "warehouse", format="parquet", snapshot="initial", deletes="soft")


def test_a_program_runs_what_the_command_runs(
    spark: Any, database: postgres.Database, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot, then changes, in the active session, which stays active. Then a stop in the middle. Deleted rows are kept."""
    caplog.set_level("INFO", "spark_sink.doctor")
    with database.connect() as connection:
        connection.execute(
            "create table t (id int primary key, v text); insert into t select n, 'old' from generate_series(1, 5) n"
        )
        connection.execute("create publication p for table t")
        with spark_sink.Runner(config(database, tmp_path), spark) as runner:
            assert runner.wait(600)
        assert runner.is_complete
        progress = runner.progress
        assert progress.snapshot is not None
        assert (progress.snapshot.rows, progress.snapshot.tables_done) == (5, 1)
        assert progress.snapshot.elapsed_s > 0
        assert progress.lag == Lag(0, 0.0)

        connection.execute("update t set v = 'new' where id > 3; insert into t values (6, 'new'); delete from t where id = 1")
        spark_sink.run(config(database, tmp_path), spark)
        rows = spark_sink.read_replica(spark, tmp_path / "warehouse", "public.t").collect()
        assert {row["id"]: (row["v"], row["_cdc_deleted_at"] is not None) for row in rows} == {
            **{number: ("old", number == 1) for number in (1, 2, 3)},
            **dict.fromkeys((4, 5, 6), ("new", False)),
        }

        monkeypatch.setattr(runner_module, "_WATCH_AFTER_S", 0.0)  # the doctor's line comes below
        runner = spark_sink.Runner(config(database, tmp_path, available_now=False), spark).start()
        connection.execute("insert into t values (7, 'new')")
        until(lambda: runner.progress.tables is not None and runner.progress.tables.changes == 1, deadline_s=SPARK_DEADLINE_S)
        until(lambda: "max_slot_wal_keep_size is unlimited" in caplog.text)
        assert not runner.wait(0)
        runner.stop()
        assert runner.wait()
        assert not runner.is_complete
        assert spark.range(1).count() == 1


def test_the_error_that_ended_the_run_is_raised(spark: Any, database: postgres.Database, tmp_path: Path) -> None:
    with database.connect() as connection:
        connection.execute("create publication p for all tables")
    (tmp_path / "staging").mkdir(mode=0o700)
    with pytest.raises(SlotDoesNotExistError, match="does not exist"):
        spark_sink.run(config(database, tmp_path, create_slot=False), spark)
    noted = last_error.read(tmp_path / "staging")
    assert noted is not None
    assert noted["exit_code"] == 8


def test_a_new_warehouse_begins_with_the_rows_though_the_slot_is_there(
    spark: Any, database: postgres.Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The slot is left over from a first run that failed, or was made by hand; the log is from `land`. -c copies the rows."""
    with database.connect() as connection:
        connection.execute("create table t (id int primary key); insert into t values (1)")
        connection.execute("create publication p for table t")
        made = config(database, tmp_path, retention=KEEP)
        connection.execute(f"select pg_create_logical_replication_slot('{made.launcher.slot}', 'pgoutput')")
        connection.execute("insert into t values (2)")
        made = replace(made, snapshot=None, deletes="hard")
        spark_sink.run(made, spark)

        def rows(warehouse: Path) -> list[int]:
            return sorted(row["id"] for row in spark_sink.read_replica(spark, warehouse, "public.t").collect())

        assert rows(tmp_path / "warehouse") == [1, 2]
        assert "begin" not in caplog.text
        connection.execute("insert into t values (3)")
        spark_sink.run(made, spark)  # not copied again
        assert rows(tmp_path / "warehouse") == [1, 2, 3]

        shutil.rmtree(tmp_path / "warehouse")
        spark_sink.run(made, spark)
        assert "changes from before; they are not in the changelogs" in caplog.text
        assert rows(tmp_path / "warehouse") == [1, 2, 3]

        shutil.rmtree(tmp_path / "warehouse")
        connection.execute("insert into t values (4)")
        spark_sink.run(replace(made, launcher=replace(made.launcher, create_slot=False)), spark)
        assert "begin without the rows" in caplog.text
        assert rows(tmp_path / "warehouse") == [2, 3, 4]
