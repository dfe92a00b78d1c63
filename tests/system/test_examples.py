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
from support.road import Road
from support.waiting import SPARK_DEADLINE_S

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = ROOT / "examples"


def example(name: str) -> Any:
    """Load an example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
def test_the_notebook(database: postgres.Database, spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    road = Road(database, spark, tmp_path)
    road.execute("create table fruit (id int primary key, name text)")
    road.land()
    road.execute("insert into fruit values (1, 'fig'), (2, 'pear')", "update fruit set name = 'plum' where id = 2")
    road.run()
    road.execute("delete from fruit where id = 1")
    road.run()
    monkeypatch.setenv("WAREHOUSE", str(road.warehouse))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))  # the kernel does not depend on a user's profile
    notebook = nbformat.read(EXAMPLES / "changes.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}
    assert not any(cell.outputs or cell.execution_count for cell in code.values()), "commit it without outputs"
    nbclient.NotebookClient(notebook, timeout=SPARK_DEADLINE_S, kernel_name="python3").execute(cwd=str(tmp_path))

    def said(cell: str) -> str:
        return "".join(output.text for output in code[cell].outputs if output.output_type == "stream" and output.name == "stdout")

    def table(cell: str) -> str:
        return "".join(output.data["text/plain"] for output in code[cell].outputs if output.output_type == "execute_result")

    assert said("replica") == "1 rows\n"
    assert table("replica").split() == ["id", "name", "0", "2", "plum"]
    assert [kind for kind in table("changelog").split() if kind in {"insert", "update", "delete"}] == [
        "delete",
        "update",
        "insert",
        "insert",
    ]
    assert said("history") == "3 versions, 1 of them current\n"
    assert said("lag").startswith("3 transactions, the slowest ")
    for cell in ("rate", "lag"):
        assert any("image/png" in output.get("data", {}) for output in code[cell].outputs)
    assert not any("incubator" in output.get("text", "") for cell in code.values() for output in cell.outputs)


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
    module = example("change_rate")
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


@pytest.mark.spark
def test_two_tables_are_joined_as_they_were(spark: "SparkSession", database: postgres.Database, tmp_path: Path) -> None:
    """PostgreSQL's own join of each moment is the expectation."""
    road = Road(database, spark, tmp_path, slot=f"join_{database.name}"[:63])
    query = "select o.id, o.quantity, f.name, f.price from orders o left join fruit f on f.id = o.fruit_id order by 1"
    road.execute(
        "create table fruit (id int primary key, name text, price int)",
        "create table orders (id int primary key, fruit_id int, quantity int)",
    )
    road.land()
    moments, ordered = [], {}
    for statements in (
        "insert into fruit values (1, 'apple', 3), (2, 'pear', 4); insert into orders values (1, 1, 10)",
        "update fruit set price = 5 where id = 1; insert into orders values (2, 1, 20), (3, 2, 30)",
        "update orders set quantity = 11 where id = 1; delete from fruit where id = 2",
        "update fruit set price = 6; delete from orders where id = 2; insert into orders values (4, 2, 40)",
    ):
        road.execute(statements)
        [(lsn,)] = road.query("select pg_current_wal_lsn()::text")
        rows = road.query(query)
        moments.append((lsn, rows))
        ordered |= {(row[0], row[1]): row for row in rows if (row[0], row[1]) not in ordered}
    road.run()
    module, names = example("point_in_time_join"), ("f.id", "f.quantity", "d.name", "d.price")
    tables = (str(road.warehouse), "public.orders", "public.fruit", "fruit_id")
    for lsn, rows in moments:
        found = module.joined_at(spark, *tables, lsn).select(*names).orderBy("f.id").collect()
        assert list(map(tuple, found)) == rows, lsn
    found = module.joined_as_committed(spark, *tables).select(*names).collect()
    assert sorted(map(tuple, found)) == sorted(ordered.values())
