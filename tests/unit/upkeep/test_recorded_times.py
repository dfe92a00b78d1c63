"""When the daily parts of the upkeep are due."""

import time
from pathlib import Path

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from spark_sink.delta import file_table
from spark_sink.files.places import make_directory
from spark_sink.schema.table import Table
from spark_sink.staging.log import Position
from spark_sink.upkeep import recorded_times
from spark_sink.upkeep.recorded_times import PURGE, RecordedTimes, is_due, vacuum_of
from spark_sink.warehouse.warehouse import Warehouse
from support.descriptions import ID, version

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
    RecordedTimes(house).record(PURGE)
    (tmp_path / "_cdcpipe/vacuumed.json").write_text("{")  # damaged
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


@pytest.mark.parametrize(("retention_s", "interval_s"), [(3600.0, 3600.0), (DAY_S, DAY_S), (7 * DAY_S, DAY_S)])
def test_vacuum_runs_once_in_the_time_for_which_it_keeps_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retention_s: float, interval_s: float
) -> None:
    house = Warehouse(tmp_path, "delta")
    make_directory(tmp_path / "_cdcpipe")
    house.write_versions(Table("public", "t"), [version(10, 0, ID)])
    path = house.changelog(Table("public", "t"))
    file_table.commit(file_table.define(path, StructType([StructField("id", LongType())]), {}), [], Position(1, 10))
    now = 1_000_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)

    def is_any_due(vacuum_retention_s: float | None = retention_s) -> bool:
        return is_due(house, vacuum_retention_s=vacuum_retention_s, purges=False, purges_histories=False)

    assert not is_any_due()  # a new table has nothing to vacuum
    RecordedTimes(house).record(vacuum_of(path))
    now += interval_s - 1
    assert not is_any_due()
    now += 1
    assert is_any_due()
    assert not is_any_due(None)


def test_what_was_done_for_thousands_of_tables_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_directory(tmp_path / "_cdcpipe")
    written: list[int] = []
    monkeypatch.setattr(recorded_times, "write_json", lambda _, times: written.append(len(times)))
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    times = RecordedTimes(Warehouse(tmp_path, "delta"))
    for number in range(1000):
        times.note(f"changelog/{number}")
    assert written == []
    times.flush()
    times.flush()
    assert written == [1000]
