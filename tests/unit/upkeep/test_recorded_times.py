"""When the daily parts of the upkeep are due."""

import time
from pathlib import Path

import pytest

from spark_sink.files.places import make_directory
from spark_sink.upkeep.recorded_times import PURGE, RecordedTimes
from spark_sink.warehouse.warehouse import Warehouse

DAY_S = 86_400.0


def test_what_was_done_is_due_again_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = Warehouse(tmp_path, "delta")
    make_directory(tmp_path / "_cdcpipe")
    now = 1_000_000_000.6
    monkeypatch.setattr(time, "time", lambda: now)
    assert RecordedTimes(house).is_due(PURGE)
    RecordedTimes(house).record(PURGE)
    assert not RecordedTimes(house).is_due(PURGE)
    now += DAY_S / 2
    assert not RecordedTimes(house).is_due(PURGE)
    now += DAY_S
    assert RecordedTimes(house).is_due(PURGE)


def test_a_clock_that_was_wrong_once_stops_nothing_for_years(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = Warehouse(tmp_path, "delta")
    make_directory(tmp_path / "_cdcpipe")
    now = 2_000_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    RecordedTimes(house).record(PURGE)
    now = 1_000_000_000.0
    assert RecordedTimes(house).is_due(PURGE)
    RecordedTimes(house).record(PURGE)
    assert not RecordedTimes(house).is_due(PURGE)
