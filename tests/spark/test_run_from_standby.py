"""`run -c` on a standby: the copy and the stream come from there, and the primary only has the publication."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import postgres
import pytest
from standbys import execute, wait_for_replay

import spark_sink
from support.requirements import need
from support.waiting import SPARK_DEADLINE_S, until

pytestmark = pytest.mark.spark


def test_the_tables_of_a_standby(spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    need("16")
    with (
        postgres.Cluster("16") as primary,
        postgres.Cluster("16", settings={"hot_standby_feedback": "on"}, standby_of=primary) as standby,
    ):
        execute(
            primary,
            "create table t (id int primary key, v text)",
            "insert into t select n, 'copied' from generate_series(1, 1000) n",
            "create publication p for table t",
        )
        wait_for_replay(standby, primary)
        launcher = spark_sink.LauncherConfig("s", tmp_path / "staging", ("p",), ("-d", standby.dsn), create_slot=True)
        config = spark_sink.RunConfig(launcher, tmp_path / "warehouse", replica_interval_s=0.5, optimize_interval_s=None)

        def is_equal() -> bool:
            rows = spark_sink.read_replica(spark, config.warehouse, "public.t").select("id", "v").collect()
            return sorted(map(tuple, rows)) == sorted(execute(primary, "select id, v from t"))

        with spark_sink.Runner(config, spark) as runner:
            with primary.connect() as connection, connection.transaction():  # as long as it is open, no slot can be made
                connection.execute("insert into t values (1001, 'while the slot is made')")
                until(lambda: "SELECT pg_log_standby_snapshot() on the primary" in caplog.text, "the advice", SPARK_DEADLINE_S)
            until(lambda: follow_advice(primary, runner), "the snapshot", SPARK_DEADLINE_S)
            execute(primary, "update t set v = 'streamed' where id <= 10", "delete from t where id = 11")
            until(is_equal, "the tables' equality", SPARK_DEADLINE_S)
        standby.promote()
        execute(standby, "insert into t values (2000, 'promoted')")
        primary.halt()
        primary = standby
        spark_sink.run(replace(config, launcher=replace(launcher, available_now=True)), spark)
        assert is_equal()
        assert (1001, "while the slot is made") in execute(standby, "select id, v from t")


def follow_advice(primary: postgres.Cluster, runner: spark_sink.Runner) -> bool:
    execute(primary, "select pg_log_standby_snapshot()")
    return runner.progress.tables is not None
