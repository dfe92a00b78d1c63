"""The names of a warehouse's tables, also those that a server has lost."""

from dataclasses import replace
from pathlib import Path

import pytest

from spark_sink.schema.names import Names, Naming
from spark_sink.schema.table import Table
from spark_sink.snapshot.homes import Homes
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Epoch, Position
from spark_sink.warehouse import gaps, last_look, table_names
from spark_sink.warehouse.last_look import Seen, SeenTable
from spark_sink.warehouse.warehouse import Warehouse
from support.descriptions import ID, version

EPOCH = Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0)
FRUIT = Table("public", "fruit")


def test_the_names_of_a_warehouse_that_has_no_source_yet(tmp_path: Path) -> None:
    """As at the start of the first run."""
    assert table_names.record_names(Warehouse(tmp_path, "delta")).namings == []


def test_oids_and_names_that_a_server_has_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    house = Warehouse(tmp_path, "delta")
    house.open(EPOCH)
    other, last = Table("public", "other"), Table("public", "last")
    house.write_names(Names([Naming((50, 0), 16384, FRUIT, other, FRUIT), Naming((150, 0), 16384, other, last, FRUIT)]))
    gap = Gap(100, "timeline 2 branched off", 0.0, 0.0, is_divergence=True)
    gaps.record(house, [replace(EPOCH, number=2, start_lsn=200, gap=gap)])
    house.record(Position(1, 180))  # changes that were lost are still to come to the tables
    assert str(Homes(house).table(16384, other)) == "public.other"  # the server has lost them
    assert table_names.record_names(house).name(FRUIT) == last
    house.record(Position(2, 200))
    for _ in range(2):
        assert str(Homes(house).table(16384, other)) == "public.other"
        assert [Homes(house).table(16384, each) for each in (FRUIT, other, last)] == [FRUIT, FRUIT, last]
        assert len(table_names.record_names(house).namings) == len(house.recorded_names().namings) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "the server has lost the change of a name: public.last is public.other again, and its tables go on"
    ]
    # What nobody knows of another server holds, although it has lost changes, too.
    gaps.record(house, [replace(EPOCH, number=3, start_lsn=300, gap=replace(gap, after_lsn=250), former_system_id="7")])
    assert Homes(house).table(16384, FRUIT) == replace(FRUIT, number=16384)


def test_a_copy_before_the_last_changes_that_were_lost(tmp_path: Path) -> None:
    """The only rename of a table was lost. The gap's copy goes to its tables as soon as the gap is known."""
    house = Warehouse(tmp_path, "delta")
    house.open(EPOCH)
    house.write_names(Names([Naming((150, 0), 16384, FRUIT, Table("public", "other"), FRUIT)]))
    gap = Gap(100, "timeline 2 branched off", 0.0, 0.0, is_divergence=True)
    gaps.record(house, [replace(EPOCH, number=2, start_lsn=200, gap=gap)])
    found = {FRUIT: [version(50, 0, ID, 16384)]}
    last_look.write(house, Seen("7123", 300, {16384: SeenTable("public", "fruit", 16384, True, (7,), None)}))
    for lsn in (180, 200):
        house.record(Position(1, lsn))
        assert Homes(house).table(16384, FRUIT) == FRUIT
        assert str(Homes(house).table(16384, FRUIT)) == "public.fruit"
        assert last_look.unpublished(house, found) == set()
