"""What the statistics of files tell of the least values of a column."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType, TimestampType

from spark_sink.delta import least_values
from spark_sink.delta.least_values import has_none_before
from spark_sink.delta.log import TableLog
from spark_sink.delta.rewrite import Rewrite
from spark_sink.staging.log import Position

NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = StructType(
    [StructField("lsn", LongType()), StructField("time", TimestampType(), metadata={"delta.columnMapping.physicalName": "col-7"})]
)


def log_of(*stats: dict[str, Any] | None) -> TableLog:
    """Return the log of a table with a file for each of these statistics."""
    log = TableLog(Path("table"))
    log._apply({"metaData": {"schemaString": json.dumps(SCHEMA.jsonValue())}})
    for number, each in enumerate(stats):
        log._apply({"add": {"path": str(number)} | ({} if each is None else {"stats": json.dumps(each)})})
    return log


@pytest.fixture(autouse=True)
def _no_footers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each file tell nothing but its statistics, except in tests that set this back."""
    monkeypatch.setattr(least_values, "_MOST_FOOTERS", 0)


def least(**values: Any) -> dict[str, Any]:
    return {"numRecords": 3, "minValues": {name.replace("_", "-"): value for name, value in values.items()}}


ALL_NULL = {"numRecords": 3, "minValues": {}, "nullCount": {"lsn": 3, "col-7": 3}}
SOME_NULL = {"numRecords": 3, "minValues": {}, "nullCount": {"lsn": 2, "col-7": 2}}


@pytest.mark.parametrize(
    ("stats", "has_none"),
    [
        ([], True),
        ([least(lsn=10), least(lsn=20)], True),
        ([least(lsn=10), least(lsn=9)], False),
        ([least(lsn=10), ALL_NULL], True),
        ([SOME_NULL], False),
        ([least(lsn=10), None], False),
        ([least(lsn="10")], False),
        ([{"minValues": {}, "nullCount": {}}], False),
        ([{"minValues": []}], False),
    ],
)
def test_numbers(stats: list[dict[str, Any] | None], *, has_none: bool) -> None:
    assert has_none_before(log_of(*stats), "lsn", 10) == has_none


@pytest.mark.parametrize(
    ("text", "has_none"),
    [
        ("2026-01-01T00:00:00.000Z", True),
        ("2025-12-31T23:59:59.999Z", False),
        ("2026-01-01T01:00:00.000+01:00", True),  # as Spark writes it in a session with another time zone
        ("2026-01-01T00:00:00.000+01:00", False),
        ("2026-01-01T00:00:00.000", False),
        ("+12026-01-01T00:00:00.000Z", False),
        (1767225600000, False),
    ],
)
def test_times(text: object, *, has_none: bool) -> None:
    assert has_none_before(log_of(least(col_7=text)), "time", NEW_YEAR) == has_none


@pytest.mark.parametrize(("most", "added_us", "has_none"), [(2, 0, True), (2, -1, False), (1, 0, False)])
def test_files_without_statistics_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, added_us: int, *, has_none: bool
) -> None:
    """The writers of changelogs put no times in the log. The footers of the files have them."""
    monkeypatch.setattr(least_values, "_MOST_FOOTERS", most)
    schema = StructType([StructField("id", LongType()), StructField("time", TimestampType())])
    files: list[list[datetime | None]] = [[NEW_YEAR, None], [NEW_YEAR + timedelta(microseconds=added_us)]]
    for number, times in enumerate(files, 1):
        table = Rewrite.new(tmp_path, ("id",), schema, {}) if number == 1 else Rewrite.of_log(TableLog(tmp_path).refresh(), ("id",))
        rows = {"id": pa.array([7] * len(times), pa.int64()), "time": pa.array(times, pa.timestamp("us", "UTC"))}
        table.add(rows, []).commit(Position(1, number))
    log = TableLog(tmp_path).refresh()
    assert "time" not in str(log.files)
    assert has_none_before(log, "time", NEW_YEAR) == has_none
    assert has_none_before(log, "id", 0)
