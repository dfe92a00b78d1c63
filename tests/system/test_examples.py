"""The examples run, and do what their comments promise. (test_cluster.py runs spark_submit.py.)"""

import importlib.util
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import postgres
import pytest

from spark_sink.delta import sql as delta
from spark_sink.schema.table import Table
from spark_sink.staging.log import Epoch, Position
from spark_sink.warehouse.warehouse import Warehouse
from support.paths import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = ROOT / "examples"


def test_the_second_of_a_pair_takes_over(shell: dict[str, str], database: postgres.Database) -> None:
    done = subprocess.run([EXAMPLES / "ha_pair.sh"], env=shell, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("the first one streams:  ")
    assert '"value":1}' in first
    assert second.startswith("the second took over:   ")
    with database.connect() as connection:
        left = "select count(*) from pg_replication_slots where database = current_database()"
        assert connection.execute(left).fetchone() == (0,)
        assert connection.execute("select to_regclass('ha_pair')").fetchone() == (None,)


@pytest.mark.spark
def test_change_rate_and_lag(spark: "SparkSession", tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(Epoch(1, "7123", 1, "db", "s", ("p",), {}, 0))
    fruit = Table("public", "fruit")
    house.write_versions(fruit, [])
    now = datetime.now(UTC)
    schema = "id int, _cdc_op string, _cdc_end_lsn bigint, _cdc_commit_time timestamp"
    for number, changes in enumerate(
        [[(1, "snapshot", 100)], [(1, "insert", 200), (2, "insert", 200), (1, "update", 300)], [(2, "delete", 400)]]
    ):
        rows: Any = spark.createDataFrame([(*change, now) for change in changes], schema)
        with delta.recording(spark, Position(1, changes[-1][2])):
            if number:
                rows.write.format("delta").mode("append").save(str(house.changelog(fruit)))
            else:
                delta.create(house.changelog(fruit), rows, {})
    spark.sql(f"OPTIMIZE {delta.table_name(house.changelog(fruit))}")
    spec = importlib.util.spec_from_file_location("change_rate", EXAMPLES / "change_rate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    picture = tmp_path / "change_rate.png"
    found = module.plot(spark, house.root, "public.fruit", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert found[["_cdc_end_lsn", "_cdc_op", "count"]].values.tolist() == [
        [200, "insert", 2],
        [300, "update", 1],
        [400, "delete", 1],
    ]
    lags = found["lag_s"].tolist()
    assert 0 <= lags[0] == lags[1] <= lags[2]  # two transactions in one commit, then another
