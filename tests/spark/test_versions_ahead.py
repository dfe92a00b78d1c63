"""Readers while a micro-batch is under way, or was killed: it has recorded a version, and not yet its changes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spark_sink.changelog.history import SchemaHistory
from spark_sink.pipeline.micro_batch import KnownTables, MicroBatch
from spark_sink.replica.as_of import read_as_of
from spark_sink.replica.current import read_replica
from spark_sink.replica.history import read_history
from spark_sink.schema.published import PublishedTables
from spark_sink.schema.table import Fill, Table, Version
from spark_sink.staging.log import Position
from spark_sink.warehouse.warehouse import Warehouse, WarehouseError
from support.changelog_rows import EPOCH
from support.descriptions import CODE, ID, NONE, version
from support.oids import INT4
from support.segments import Log, into, relation

pytestmark = pytest.mark.spark
T = Table("public", "t")


@pytest.mark.parametrize(
    ("is_keyed", "ahead"),
    [
        (True, [Version(1 << 40, 0, 1, ID, ID, (Fill("b", value="7"),))]),
        (False, [version(1 << 40, 0, CODE)]),
        (True, [version(1 << 40, 0, CODE)]),
    ],
)
def test_columns_that_come_with_its_changes(spark: Any, tmp_path: Path, ahead: list[Version], *, is_keyed: bool) -> None:
    """With Parquet: ADD COLUMN … DEFAULT, a key on a new column."""
    house, log, published = Warehouse(tmp_path / "warehouse", "parquet"), Log(tmp_path / "staging"), PublishedTables(None)
    house.open(EPOCH)
    described = relation(1, "t", ("id", INT4), ("a", INT4), identity="d" if is_keyed else "n")
    tables = KnownTables(spark, house, SchemaHistory(spark, house, published), published)
    MicroBatch(tables, [log.segment([described, into(described, b"1", b"2")])]).append()
    house.record(Position(1, log.end_lsn))
    known = house.versions(T)
    assert [each.key for each in known] == [ID if is_keyed else NONE]
    house.write_versions(T, [*known, *ahead])

    readers: list[Any] = [read_replica, read_history, partial(read_as_of, at=f"1:0/{log.end_lsn:X}")]
    for read in readers:
        if is_keyed:
            assert [(row["id"], row["a"]) for row in read(spark, house.root, "public.t").collect()] == [(1, 2)]
        else:
            with pytest.raises(WarehouseError, match="has no key"):
                read(spark, house.root, "public.t")
