"""How a replica is brought further: by a merge, or made anew. Without Spark."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from spark_sink.delta import file_table
from spark_sink.replica import merge
from spark_sink.schema.table import Table
from spark_sink.staging.log import Position
from spark_sink.warehouse import landed_snapshots
from spark_sink.warehouse.warehouse import Warehouse
from support.descriptions import ID, version

if TYPE_CHECKING:
    from pathlib import Path

FRUIT = Table("public", "fruit")
SCHEMA = StructType([StructField("id", LongType())])


@pytest.mark.parametrize(
    ("reached", "copies", "until", "is_unfinished", "remade_at"),
    [
        (20, [], 60, False, None),
        (None, [], 60, False, None),
        (50, [30, 50], 60, False, None),
        (20, [30, 50], 60, False, 60),  # put back from before a copy: a merge would keep the rows that the copy does not have
        (40, [30, 50], 60, False, 60),
        (20, [30, 80], 60, False, 80),  # the copy is later than the position of the tables
        (None, [30], 60, False, 60),
        (None, [80], 60, False, 80),
        (20, [30], 60, True, None),  # perhaps without the copy's rows: a killed process has left it
        (None, [30], 60, True, None),
    ],
)
def test_a_replica_from_before_a_copy_is_made_anew(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reached: int | None,
    copies: list[int],
    until: int,
    is_unfinished: bool,
    remade_at: int | None,
) -> None:
    spark: Any = None
    done: list[tuple[str, int]] = []
    monkeypatch.setattr(merge, "remake", lambda *arguments: done.append(("remake", arguments[-1].lsn)))
    monkeypatch.setattr(merge, "merge_changes", lambda *arguments: done.append(("merge", arguments[-1].lsn)))
    house = Warehouse(tmp_path, "delta")
    versions = [replace(version(lsn, 0, ID), snapshot=((1, "id"),)) for lsn in copies]
    house.write_versions(FRUIT, [version(0, 0, ID), *versions])
    if reached is not None:
        file_table.commit(file_table.define(house.replica(FRUIT), SCHEMA, {}), [], Position(1, reached))
    if is_unfinished:
        landed_snapshots.record_start(house, FRUIT, Position(1, copies[-1]))
    merge.bring(spark, house, FRUIT, Position(1, until))
    assert done == [("merge", until) if remade_at is None else ("remake", remade_at)]
