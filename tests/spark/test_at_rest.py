"""`run --available-now` with nothing to do: it ends without Spark. Whatever there is to do, it is done."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import postgres
import pytest

import spark_sink
from spark_sink.client.slot_monitor import Lag
from spark_sink.delta import log as delta_log
from spark_sink.pipeline.at_rest import Rest
from spark_sink.pipeline.pipeline import PipelineProgress
from spark_sink.schema.table import Table
from spark_sink.warehouse import landed_snapshots, unchecked_merges, wanted_copies
from spark_sink.warehouse.warehouse import Warehouse

pytestmark = pytest.mark.spark

FRUIT = Table("public", "fruit")


class Shop:
    """A database with a table, and the options of a run that follows it."""

    def __init__(self, database: postgres.Database, spark: Any, root: Path) -> None:
        self.spark = spark
        self.connection = database.connect()
        launcher = spark_sink.LauncherConfig(
            f"rest_{database.name}"[:63], root / "staging", ("p",), ("-d", database.dsn), create_slot=True, available_now=True
        )
        self.config = spark_sink.RunConfig(launcher, root / "warehouse", history="table")
        self.house = self.config.house()

    def run(self) -> spark_sink.Runner:
        runner = spark_sink.Runner(self.config, self.spark)
        with runner:
            runner.wait()
        assert runner.is_complete
        return runner

    def is_at_rest(self, **options: Any) -> bool:
        """Tell whether a run with these options would have nothing to do, if no change came."""
        rest = Rest(replace(self.config, **options), self.house)
        return rest.is_possible() and rest.is_certain(lambda: False)

    def fruit(self) -> set[str]:
        return {row["name"] for row in spark_sink.read_replica(self.spark, self.config.warehouse, "public.fruit").collect()}


@pytest.fixture
def shop(database: postgres.Database, spark: Any, tmp_path: Path) -> Iterator[Shop]:
    made = Shop(database, spark, tmp_path)
    made.connection.execute("create table fruit (name text primary key); insert into fruit values ('apple'), ('fig')")
    made.connection.execute("create table keyless (v int); create publication p for all tables with (publish = 'insert')")
    yield made
    made.connection.close()


def test_only_what_there_is_to_do_needs_spark(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shop.run().pipeline is not None
    idle = shop.run()
    assert idle.pipeline is None
    assert idle.progress.tables == PipelineProgress(shop.house.source().position)
    assert idle.progress.lag == Lag(0, 0.0)

    shop.connection.execute("insert into fruit values ('kiwi')")
    assert shop.run().pipeline is not None
    assert shop.fruit() == {"apple", "fig", "kiwi"}

    shop.connection.execute("create table nut (name text primary key); insert into nut values ('hazel')")
    shop.connection.execute("truncate keyless")  # nothing comes of it: the publication has INSERTs alone
    assert shop.run().waiting == 0
    assert spark_sink.read_replica(shop.spark, shop.config.warehouse, "public.nut").count() == 1
    assert shop.run().pipeline is not None  # the copy comes to the stored history when the log has passed it
    assert shop.run().pipeline is None
    assert Warehouse.existing(shop.house.root).keeps_history  # a purge waits for the histories

    # Other options.
    assert shop.is_at_rest(conf={"spark.ui.enabled": "false"})
    assert not shop.is_at_rest(deletes="soft")
    assert not shop.is_at_rest(launcher=replace(shop.config.launcher, available_now=False))
    assert not shop.is_at_rest(catalog_database="shop")

    # What is due.
    vacuumed = shop.house.root / "_cdcpipe/vacuumed.json"
    found = vacuumed.read_text()
    vacuumed.write_text(json.dumps(json.loads(found) | {"replica/public.fruit": 86_400}))
    assert not shop.is_at_rest()
    vacuumed.write_text(found)
    assert shop.is_at_rest()

    # What a killed process has left, and a table that waits for a copy.
    position = shop.house.source().position
    assert position is not None
    landed_snapshots.record_start(shop.house, FRUIT, position)
    assert not shop.is_at_rest()
    landed_snapshots.record_end(shop.house, FRUIT)
    assert shop.is_at_rest()
    unchecked_merges.record_start(shop.house, FRUIT, position.lsn)
    assert not shop.is_at_rest()
    unchecked_merges.record_check(shop.house, FRUIT)
    assert shop.is_at_rest()
    wanted_copies.want_copy(shop.house, FRUIT, position.lsn, "a test")
    assert not shop.is_at_rest()
    wanted_copies.give_up(shop.house, FRUIT)
    assert shop.is_at_rest()

    # A server that can't be asked, and a log that is not the warehouse's.
    with monkeypatch.context() as patch:
        patch.setattr("spark_sink.snapshot.two_looks.look", _fail)
        assert not shop.is_at_rest()
    reader = shop.config.launcher.staging / "readers/tables.json"
    reader.rename(reader.with_suffix(".away"))
    assert not shop.is_at_rest()
    reader.with_suffix(".away").rename(reader)

    # What somebody has removed.
    for path in (shop.house.history(FRUIT), shop.house.replica(FRUIT)):
        assert shop.is_at_rest()
        shutil.rmtree(path)
        assert not shop.is_at_rest()
        assert shop.run().pipeline is not None
        assert delta_log.exists(path)
    shutil.rmtree(shop.house.changelog(FRUIT))
    assert not shop.is_at_rest()


def _fail(*_: object) -> None:
    raise InterruptedError


def test_the_command_starts_no_java(shop: Shop) -> None:
    """The command ends in the same way as after a run that looked with Spark, and prints the same line."""
    shop.config = replace(shop.config, history="off")
    shop.run()
    launcher = shop.config.launcher
    arguments = ["-S", launcher.slot, "--publication", "p", "-c", *launcher.connection, "--staging", str(launcher.staging)]
    arguments += ["--warehouse", str(shop.config.warehouse), "--available-now"]
    unusable = ["--conf", "spark.driver.extraJavaOptions=-agentlib:nonesuch"]
    command = [sys.executable, "-P", "-m", "spark_sink", "run", *arguments, *unusable]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = done.stderr.splitlines()[-1]  # before it: the warning of the table without a key
    assert line.startswith(f"tables {shop.house.source().position}, 0 rows/s, lag 0 B 0.0 s, 0 changes in 0 tables, log")
    shop.connection.execute("insert into fruit values ('kiwi')")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "Spark did not start" in done.stderr
    shop.run()
    assert "kiwi" in shop.fruit()
