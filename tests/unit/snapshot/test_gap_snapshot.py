"""The copy of all tables after a gap, without Spark: when it may begin."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spark_sink.snapshot import gap as module
from spark_sink.snapshot.gap import GapSnapshot
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Epoch
from spark_sink.warehouse import gaps
from spark_sink.warehouse.warehouse import Warehouse
from support.fake_streamer import Fake, make_fake

EPOCH = Epoch(2, "7", 2, "db", "s", ("p",), {}, 0x500, gap=Gap(0x400, "the server was promoted", 1.0, 2.0))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Return a server on another timeline, whose WAL passes the end of the gap, 0/500, at the third look."""
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    made = make_fake(tmp_path, monkeypatch)
    made.set_turns([{"wal_lsn": lsn} for lsn in ("0/450", "0/4FF", "0/500", "0/600")])
    return made


@pytest.fixture
def snapshot(server: Fake, tmp_path: Path) -> GapSnapshot:
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(EPOCH)
    gaps.record(house, [EPOCH])
    return GapSnapshot(replace(server.config(), available_now=False), house)


def looks(server: Fake) -> int:
    return sum("prepare" in json.loads(line) for line in server.read("starts"))


def test_it_begins_once_the_wal_has_passed_the_gap(server: Fake, snapshot: GapSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(snapshot, "_take", taken.append)
    snapshot.prepare(lambda: False)
    assert (looks(server), len(taken)) == (3, 1)


def test_a_stop_ends_the_wait(server: Fake, snapshot: GapSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_take", lambda _: pytest.fail("the WAL has not passed the gap"))
    with pytest.raises(InterruptedError):
        snapshot.prepare(lambda: looks(server) >= 2)
    assert looks(server) == 2


def test_a_gap_that_comes_during_the_copies_stays_open(snapshot: GapSnapshot) -> None:
    """A micro-batch records it meanwhile. The copies are from before it."""
    later = replace(EPOCH, number=3, start_lsn=0x900, gap=Gap(0x800, "the slot was moved", 3.0, 4.0))
    gaps.record(snapshot.warehouse, [EPOCH, later])
    assert not snapshot.is_needed([])
    assert [each.healed_lsn for each in gaps.read(snapshot.warehouse)] == [0x500, None]
    assert gaps.open_gap(snapshot.warehouse) == gaps.TablesGap(later.gap, later.start)
    assert not GapSnapshot(snapshot.config, snapshot.warehouse).is_needed([])
    assert gaps.open_gap(snapshot.warehouse) is None
