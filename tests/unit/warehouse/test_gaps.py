"""The gaps of a warehouse's tables: which rows are known."""

from dataclasses import replace
from pathlib import Path

import pytest

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.schema.names import Names, Naming
from spark_sink.schema.table import Table
from spark_sink.snapshot.homes import Homes
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Epoch, Position
from spark_sink.warehouse import gaps, landed_snapshots
from spark_sink.warehouse.warehouse import Warehouse
from support.descriptions import ID, version

EPOCH = Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0)
FRUIT = Table("public", "fruit")


def test_after_a_gap_rows_are_known_since_a_copy_that_is_complete(tmp_path: Path) -> None:
    house = Warehouse(tmp_path, "delta")
    house.open(EPOCH)
    gaps.record(house, [replace(EPOCH, number=2, start_lsn=200, gap=Gap(100, "the slot was gone", 0.0, 0.0))])
    house.write_versions(FRUIT, [version(1, 0, ID), replace(version(250, 0, ID), snapshot=((1, "id"),))])
    landed_snapshots.record_start(house, FRUIT, Position(2, 250), adds_rows=True)  # its rows may not be in the changelog yet

    def check_known(lsn: int) -> None:
        gaps.check_known(house, FRUIT, lsn, gaps.complete_copies(house, FRUIT))

    check_known(100)
    with pytest.raises(InvalidArgumentsError, match=r"the rows of public\.fruit at 0/12C are not known"):
        check_known(300)
    landed_snapshots.record_end(house, FRUIT)
    check_known(300)
    with pytest.raises(InvalidArgumentsError, match="they are known again since its copy at 0/FA"):
        check_known(249)


def test_a_copy_that_begins_meanwhile_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = Warehouse(tmp_path, "delta")
    house.open(EPOCH)
    unfinished = landed_snapshots.unfinished

    def begins_afterwards(asked: Warehouse) -> list[tuple[Table, Position]]:
        found = unfinished(asked)
        landed_snapshots.record_start(house, FRUIT, Position(2, 250), adds_rows=True)
        house.write_versions(FRUIT, [version(1, 0, ID), replace(version(250, 0, ID), snapshot=((1, "id"),))])
        return found

    monkeypatch.setattr(landed_snapshots, "unfinished", begins_afterwards)
    for ask in (gaps.complete_copies, lambda *_: gaps.is_copied_since(house, FRUIT, 200)):
        landed_snapshots.record_end(house, FRUIT)
        house.write_versions(FRUIT, [version(1, 0, ID)])
        assert not ask(house, FRUIT)


def test_a_gap_before_another_server_says_so(tmp_path: Path) -> None:
    house = Warehouse(tmp_path, "delta")
    house.open(EPOCH)
    gap = Gap(100, "the slot was gone", 0.0, 0.0)
    later = [
        replace(EPOCH, number=number, start_lsn=number * 100, gap=gap, former_system_id=of) for number, of in ((2, None), (3, "7"))
    ]
    gaps.record(house, later)
    gaps.record_healed(house, 400)
    assert [(each.start.lsn, each.is_other_server, each.healed_lsn) for each in gaps.read(house)] == [
        (200, False, 400),
        (300, True, 400),
    ]


def test_a_gap_that_an_older_version_has_recorded_gets_the_former_server(tmp_path: Path) -> None:
    house = Warehouse(tmp_path, "delta")
    house.open(EPOCH)
    epoch = replace(EPOCH, number=2, start_lsn=200, gap=Gap(100, "the slot was gone", 0.0, 0.0), former_system_id="7")
    gaps.record(house, [replace(epoch, former_system_id=None)])
    gaps.record_healed(house, 400)
    gaps.record(house, [epoch])
    assert [(each.former_system_id, each.healed_lsn) for each in gaps.read(house)] == [("7", 400)]
    gaps.record(house, [replace(EPOCH, number=3, start_lsn=300)])
    assert [each.former_system_id for each in gaps.read(house)] == ["7"]


def test_oids_end_where_another_server_begins(tmp_path: Path) -> None:
    house = Warehouse(tmp_path, "delta")
    house.open(EPOCH)
    other = Table("public", "other")
    house.write_names(Names([Naming((50, 0), 16384, FRUIT, other, FRUIT)]))
    gap = Gap(100, "the slot was gone", 0.0, 0.0)
    gaps.record(house, [replace(EPOCH, number=2, start_lsn=200, gap=gap)])
    assert Homes(house).table(16384, FRUIT) == replace(FRUIT, called=other)
    gaps.record(house, [replace(EPOCH, number=3, start_lsn=300, gap=gap, former_system_id="7")])
    assert Homes(house).table(16384, FRUIT) == replace(FRUIT, number=16384)
    assert Homes(house).table(16500, other) == replace(FRUIT, called=other)
