"""Times and positions as users write them, and rows that a copy has made known."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors.exceptions.base import AnalysisException

from cdcpipe.errors import InitError, InvalidArgumentsError
from cdcpipe.lsn import LSN
from spark_sink.delta import sql
from spark_sink.replica import as_of
from spark_sink.replica.as_of import parse_at, read_as_of
from spark_sink.replica.current import read_replica, register_views
from spark_sink.replica.history import read_history
from spark_sink.schema.table import Table
from spark_sink.spark import refused_settings
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Epoch, Position
from spark_sink.warehouse import gaps, landed_snapshots, new_changelogs, purged_changes
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.warehouse import Warehouse
from support.descriptions import ID, version
from support.given_sessions import given_session


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("0/171F388", LSN(0x171F388)),
        ("2:0/171F388", Position(2, 0x171F388)),
        ("2026-03-01", datetime(2026, 3, 1, tzinfo=UTC)),
        ("2026-03-01 12:30:00.5", datetime(2026, 3, 1, 12, 30, 0, 500000, tzinfo=UTC)),
        ("2026-03-01T12:30:00.000001+01:00", datetime(2026, 3, 1, 11, 30, 0, 1, tzinfo=UTC)),
    ],
)
def test_moments(text: str, at: Any) -> None:
    assert parse_at(text) == at
    assert type(parse_at(text)) is type(at)


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("at", [LSN(300), datetime(2026, 3, 1, tzinfo=UTC)], ids=["LSN", "time"])
def test_a_copy_that_comes_after_the_changes_were_read_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: Any, is_late: bool
) -> None:
    """Behind a gap, rows are known since a copy, if it is among the changes that were read."""
    table, epoch = Table("public", "fruit"), Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0)
    house = Warehouse(tmp_path, "delta")
    house.open(epoch)
    house.record(Position(2, 300))
    gaps.record(house, [replace(epoch, number=2, start_lsn=200, gap=Gap(100, "the slot was gone", 0.0, 0.0))])
    house.write_versions(table, [version(1, 0, ID), replace(version(250, 0, ID), snapshot=((1, "id"),))])
    if is_late:
        landed_snapshots.record_start(house, table, Position(2, 250), adds_rows=True)

    class Changelogs:
        def read(self, _: Table) -> str:
            landed_snapshots.record_end(house, table)
            return "changes"

    monkeypatch.setattr(as_of, "changelogs_of", lambda *_: Changelogs())
    monkeypatch.setattr(as_of, "_last_lsn", lambda *_: 300)
    monkeypatch.setattr(as_of, "_is_before", lambda *_: False)
    monkeypatch.setattr(as_of, "rows_at", lambda *_: "rows")
    monkeypatch.setattr(as_of, "check_key_kept", lambda *_: None)
    monkeypatch.setattr(as_of, "without_unneeded", lambda rows, _: rows)
    spark = given_session()
    if not is_late:
        assert read_as_of(spark, tmp_path, "public.fruit", at) == "rows"
        return
    with pytest.raises(InvalidArgumentsError, match=r"the rows of public\.fruit at 0/12C are not known"):
        read_as_of(spark, tmp_path, "public.fruit", at)


@pytest.mark.parametrize(
    ("at", "copies", "limiting"),
    [
        (datetime(2026, 3, 1, tzinfo=UTC), [50, 90], [90]),
        (datetime(2026, 3, 1, tzinfo=UTC), [50], []),
        (datetime(2026, 3, 1, tzinfo=UTC), [90], [90]),
        (datetime(2026, 3, 1, tzinfo=UTC), [], []),
        (LSN(40), [50, 90], [50, 90]),
    ],
)
def test_only_the_first_copy_shows_the_rows_from_before_it(tmp_path: Path, at: Any, copies: list[int], limiting: list[int]) -> None:
    """Each later copy was made because the stream did not tell all rows."""
    table, house = Table("public", "fruit"), Warehouse(tmp_path, "delta")
    house.open(Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0))
    house.write_versions(table, [replace(version(lsn, 0, ID), snapshot=((1, "id"),)) for lsn in (50, 90)])
    assert as_of._limiting(house, table, at, copies) == limiting


@pytest.mark.parametrize("lsn", [150, 200, 201])
@pytest.mark.parametrize("is_copied", [True, False])
def test_rows_from_before_a_changelog_that_began_anew_are_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, lsn: int, is_copied: bool
) -> None:
    """The history ended before. A copy may be from before the first changes: the new changelog has all since."""
    table, epoch = Table("public", "fruit"), Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0)
    house = Warehouse(tmp_path, "delta")
    house.open(epoch)
    house.record(Position(1, 300))
    house.write_versions(table, [replace(version(180 if is_copied else 201, 0, ID), snapshot=((1, "id"),) if is_copied else ())])
    house.history(table).mkdir(parents=True)
    monkeypatch.setattr(house.format, "exists", lambda _: True)
    new_changelogs.record_begin(house, table, 200)
    monkeypatch.undo()
    assert purged_changes.last_lsn(house, table) == 0
    changelogs: Any = SimpleNamespace(read=lambda _: "changes")
    monkeypatch.setattr(as_of, "changelogs_of", lambda *_: changelogs)
    monkeypatch.setattr(as_of, "_last_lsn", lambda *_: lsn)
    monkeypatch.setattr(as_of, "rows_at", lambda *_: None)
    monkeypatch.setattr(as_of, "replay", lambda *_, **__: "rows")
    monkeypatch.setattr(as_of, "check_key_kept", lambda *_: None)
    monkeypatch.setattr(as_of, "without_unneeded", lambda rows, _: rows)
    if lsn > (179 if is_copied else 200):
        assert read_as_of(given_session(), tmp_path, "public.fruit", LSN(lsn)) == "rows"
        return
    with pytest.raises(InvalidArgumentsError, match=f"not known at {LSN(lsn)}: its changelog began anew at 0/C8"):
        read_as_of(given_session(), tmp_path, "public.fruit", LSN(lsn))


@pytest.mark.parametrize(
    "read",
    [
        lambda spark, path: read_as_of(spark, path, "public.fruit", LSN(1)),
        lambda spark, path: read_history(spark, path, "public.fruit"),
        lambda spark, path: read_replica(spark, path, "public.fruit"),
        register_views,
    ],
)
def test_a_session_that_would_read_other_values_is_refused(tmp_path: Path, read: Any) -> None:
    """The texts in our SQL would keep their backslashes."""
    house = Warehouse(tmp_path, "parquet")
    house.open(Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0))
    house.write_versions(Table("public", "fruit"), [version(1, 0, ID)])
    with pytest.raises(InitError, match="escapedStringLiterals=true"):
        read(given_session({"spark.sql.parser.escapedStringLiterals": "true"}.get), tmp_path)


def test_a_table_without_a_replica_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark's own error for one table hid its name, and the tables after it got no view."""
    house = Warehouse(tmp_path, "delta")
    house.open(Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0))
    for name, key in (("early", ID), ("fruit", ID), ("log", ())):
        house.write_versions(Table("public", name), [version(1, 0, key)])
    made = []

    def read(_: Any, path: Path) -> Any:
        if path.name != "public.fruit":
            raise AnalysisException("[PATH_NOT_FOUND]")
        return SimpleNamespace(createOrReplaceTempView=made.append)

    monkeypatch.setattr(sql, "read", read)
    for name, message in (("early", "has no replica yet"), ("log", "has no key, which identifies its rows")):
        with pytest.raises(WarehouseError, match=rf"public\.{name} {message}"):
            read_replica(given_session(), tmp_path, f"public.{name}")
    assert register_views(given_session(), tmp_path) == ["public.fruit"]
    assert made == ["`public.fruit`"]
    assert caplog.messages == ["no view: public.early has no replica yet"]


def test_a_session_may_read_whatever_it_would_write() -> None:
    calendar = {"spark.sql.parquet.datetimeRebaseModeInWrite": "LEGACY"}
    refused_settings.refuse_to_read(calendar.get)
    with pytest.raises(InitError, match="LEGACY"):
        refused_settings.refuse(calendar.get)
