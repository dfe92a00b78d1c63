"""The initial snapshot, killed in the middle: the next run continues it."""

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import postgres
import pytest

from spark_sink.schema.table import Table
from spark_sink.warehouse.warehouse import Warehouse
from support.snapshots import HELD, InitialCopy
from support.waiting import until

pytestmark = pytest.mark.spark
WORKERS = """
    select count(*) from pg_stat_activity
    where datname = current_database() and query like '%FROM ONLY%' and pid <> pg_backend_pid()"""
KILLED = """
import os, signal, sys
from spark_sink import __main__
from spark_sink.changelog import delta_changelogs

move, moves = delta_changelogs._move, []

def move_some(made, target):
    moves.append(target)
    if len(moves) == {count}:
        os.kill(os.getpid(), signal.SIGKILL)
    move(made, target)

delta_changelogs._move = move_some
sys.exit(__main__.invoke(sys.argv[1:]))
"""


def test_killed_in_the_middle_it_goes_on(pg18: postgres.Cluster, spark: Any, tmp_path: Path) -> None:
    """Between a table's replica and its changelog. The finished table stays. This one begins again, with the changes since."""
    with pg18.database() as database:
        killed = InitialCopy(database, spark, tmp_path, "killed")
        names = ["a", "b"]
        for name in names:
            killed.execute(f"create table {name} (id int primary key, v text); insert into {name} values (1, 'x'), (2, 'y')")
        killed.execute("create publication p for all tables")
        warehouse = Warehouse(tmp_path / "delta", "delta")
        options = ["run", "-d", database.dsn, "-S", "killed", "--publication", "p", "-c", "--available-now"]
        options += ["--staging", str(tmp_path / "staging"), "--warehouse", str(warehouse.root)]
        program = [sys.executable, "-c", KILLED.format(count=4), *options]
        done = subprocess.run(program, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        assert done.returncode == -signal.SIGKILL
        finished = [name for name in names if warehouse.has_changelog(Table("public", name))]
        assert len(finished) == 1
        until(lambda: not killed.query("select 1 from pg_replication_slots where active"), "the slot's release")
        for name in names:
            killed.execute(
                f"update {name} set v = 'z' where id = 1",
                f"insert into {name} values (3, 'new')",
                f"delete from {name} where id = 2",
            )
        # Without -c, too, what was begun is finished; and a third time there is nothing to do.
        assert killed.run(warehouse, publications=("p",), create_slot=False).is_needed
        for name in names:
            killed.assert_equal(warehouse, name)
            ops = Counter(row["_cdc_op"] for row in killed.changes(warehouse, name).collect())
            assert ops == ({"snapshot": 2, "update": 1, "insert": 1, "delete": 1} if name in finished else {"snapshot": 2})
        assert not killed.run(warehouse, publications=("p",)).is_needed
        assert not list((warehouse.root / "_cdcpipe").glob("snapshot/*"))
        killed.connection.close()


@pytest.mark.parametrize("table_format", ["delta", pytest.param("parquet", marks=pytest.mark.slow)])
def test_killed_in_the_middle_of_a_table_it_goes_on_with_the_next_chunk(
    database: postgres.Database, spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, table_format: str
) -> None:
    """It uses the same snapshot, however the rows have changed since. The table has none of the unfinished rows."""
    killed = InitialCopy(database, spark, tmp_path, f"s_{database.name}"[:63])
    killed.execute(
        "create table t (id int primary key, v text)",
        "insert into t select g, repeat('x', 500) || g from generate_series(1, 4000) g",
        "create publication p for table t",
    )
    warehouse = Warehouse(tmp_path / table_format, table_format)
    options = ["run", "-d", database.dsn, "-S", killed.slot, "--publication", "p", "-c", "--available-now"]
    options += ["--format", table_format]
    options += ["--staging", str(tmp_path / "staging"), "--warehouse", str(warehouse.root), "--snapshot-chunk-size", "64KiB"]
    program = [sys.executable, "-m", "spark_sink", *options]
    other = database.connect()
    other.autocommit = False
    scratch = warehouse.root / "_cdcpipe/snapshot"

    def done() -> int:
        return len(list(scratch.glob("*/notes/[0-9]*.json")))

    with subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: done() >= 3 or process.poll() is not None, "three chunks", 300)
        other.execute("lock table t in access exclusive mode")  # so that it does not come to its end
        process.kill()
    other.rollback()
    (begun,) = (json.loads(path.read_text()) for path in scratch.glob("*/notes/begun.json"))
    (files,) = {path.parent for path in scratch.glob("*/changelog/part-*.parquet")}
    (files / "part-half.parquet").write_bytes(b"half")
    until(lambda: killed.query(WORKERS) == [(0,)], "the end of the executors' sessions")
    assert 3 <= done() < len(begun["chunks"])
    # Every row moves to another page.
    killed.execute("update t set v = v || 'y' where id % 2 = 0", "delete from t where id < 100", "vacuum t")
    killed.execute("update t set v = v || 'z' where id % 2 = 1", "insert into t select g, 'new' from generate_series(1, 50) g")
    caplog.clear()
    with caplog.at_level("INFO", "spark_sink"):
        assert killed.run(warehouse, publications=("p",), hold_s=60.0).is_needed
    (there,) = [
        found for text in caplog.messages if (found := re.match(r"public.t: an earlier run has copied (\d+) of (\d+) chunks", text))
    ]
    assert 3 <= int(there[1]) < int(there[2]) == len(begun["chunks"])
    killed.assert_equal(warehouse, "t")
    rows = killed.changes(warehouse, "t").where("_cdc_op = 'snapshot'")
    assert rows.count() == rows.select("_cdc_ordinal").distinct().count() == rows.select("id").distinct().count()
    assert rows.select("_cdc_end_lsn").distinct().count() == 1
    assert not list(scratch.parent.glob("snapshot/*"))
    until(lambda: killed.query(HELD) == [(0,)], "the snapshot's end")
    other.close()
    killed.connection.close()
