"""What keeps `run --available-now` from ending without Spark. tests/spark/test_at_rest.py has the rest."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from spark_sink.delta import file_table
from spark_sink.delta import log as delta_log
from spark_sink.launcher.config import LauncherConfig
from spark_sink.pipeline.at_rest import Rest
from spark_sink.pipeline.config import RunConfig
from spark_sink.schema.table import NO_COPIES, Table
from spark_sink.staging.log import Position, list_epochs
from spark_sink.staging.readers import register_reader
from spark_sink.warehouse.warehouse import READER, Warehouse
from support.descriptions import ID, version
from support.staged import make_epoch


def at_rest(tmp_path: Path) -> tuple[RunConfig, Warehouse]:
    """Make a warehouse that has the whole log, up to 1:0/200."""
    staging, end = tmp_path / "staging", Position(1, 0x200)
    make_epoch(staging, 1, 0x100, (0x100, 0x200))
    config = RunConfig(LauncherConfig("s", staging), tmp_path / "warehouse", heal="off", vacuum_retention_s=None)
    house = config.house()
    house.open(list_epochs(staging)[0])
    house.record(end, staging)
    register_reader(staging, READER, end)
    return config, house


@pytest.mark.parametrize("table", NO_COPIES)
def test_a_start_names_what_no_copy_makes_up_for(tmp_path: Path, table: Table) -> None:
    """RESTORE has set it back, and no change comes."""
    config, house = at_rest(tmp_path)
    path, rest = house.changelog(table), Rest(config, house)
    for lsn in (0x180, 0x200):
        schema = StructType([StructField("id", LongType())])
        made = file_table.open_table(path) if delta_log.exists(path) else file_table.define(path, schema, {})
        file_table.commit(made, [], Position(1, lsn))
    assert rest.is_certain(lambda: False)
    information = {"operation": "RESTORE", "operationParameters": {"version": 0}}
    delta_log.commit_path(path, 2).write_text(json.dumps({"commitInfo": information}))
    assert not rest.is_certain(lambda: False)


def test_a_replica_from_before_the_copy_of_its_table_is_something_to_do(tmp_path: Path) -> None:
    """In a quiet database the copy is later than each change, and the replica may seem to have them all."""
    (config, house), fruit = at_rest(tmp_path), Table("public", "fruit")
    house.write_versions(fruit, [version(0, 0, ID), replace(version(0x300, 0, ID), snapshot=((1, "id"),))])
    for path in (house.changelog(fruit), house.replica(fruit)):
        file_table.commit(file_table.define(path, StructType([StructField("id", LongType())]), {}), [], Position(1, 0x180))
    assert not Rest(config, house).is_certain(lambda: False)
    file_table.commit(file_table.open_table(house.replica(fruit)), [], Position(1, 0x300))
    assert Rest(config, house).is_certain(lambda: False)


@pytest.mark.parametrize("heal", ["off", "now"])
def test_a_run_that_heals_nothing_needs_no_look_at_the_catalog(tmp_path: Path, heal: str) -> None:
    """Where each look failed, Spark was started each time, although nobody was to use what the look finds."""
    staging, end = tmp_path / "staging", Position(1, 0x200)
    make_epoch(staging, 1, 0x100, (0x100, 0x200))
    config = RunConfig(LauncherConfig("s", staging, available_now=True), tmp_path / "warehouse", heal=heal)
    house = config.house()
    house.open(list_epochs(staging)[0])
    house.record(end, staging)
    register_reader(staging, READER, end)
    rest = Rest(config, house)
    rest.record(has_looked=False)
    assert rest.is_possible() == (heal == "off")
    rest.record(has_looked=True)
    assert rest.is_possible()
    (house.root / "_cdcpipe/complete.json").write_text("{")  # a disk that was full, for instance
    assert not rest.is_possible()


def test_a_run_with_other_options_that_did_not_become_complete(tmp_path: Path) -> None:
    """What it has changed, e.g. whether there are stored histories, is not what the former options ask for."""
    config, _ = at_rest(tmp_path)
    config = replace(config, launcher=replace(config.launcher, available_now=True))
    rest = Rest(config, config.house())
    rest.record(has_looked=False)
    assert rest.is_possible()
    replace(config, history="table").house().open(list_epochs(config.launcher.staging)[0])
    assert not rest.is_possible()
