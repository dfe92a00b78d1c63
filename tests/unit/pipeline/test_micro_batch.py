"""The order of what a micro-batch writes, without Spark."""

from pathlib import Path
from typing import Any

import pytest

from spark_sink.changelog.delta_changelogs import DeltaChangelogs
from spark_sink.changelog.history import SchemaHistory
from spark_sink.pipeline.micro_batch import KnownTables, MicroBatch
from spark_sink.schema.published import PublishedTables
from spark_sink.schema.table import Table
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import EPOCH
from support.oids import INT4
from support.segments import Log, into, relation

T = Table("public", "t")
KEYLESS = relation(1, "t", ("a", INT4), identity="n")
KEYED = relation(1, "t", ("id", INT4), ("a", INT4))


def known_tables(house: Warehouse) -> KnownTables:
    spark: Any = None
    published = PublishedTables(None)
    return KnownTables(spark, house, SchemaHistory(spark, house, published), published)


def test_a_version_comes_after_the_columns_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier changes use a later key. So a version without its columns, left by a kill, would stop each reader."""
    house, log = Warehouse(tmp_path / "warehouse", "delta"), Log(tmp_path / "staging")
    house.open(EPOCH)
    tables = known_tables(house)
    MicroBatch(tables, [log.segment([KEYLESS, into(KEYLESS, b"1")])]).append()
    [before] = house.versions(T)
    assert not before.key
    later = MicroBatch(tables, [log.segment([KEYED, into(KEYED, b"1", b"2")])])
    open_files = DeltaChangelogs.open_files

    def fail(changelogs: DeltaChangelogs, table: Table, *arguments: Any) -> Any:
        if table == T:
            raise OSError("no space left on device")
        return open_files(changelogs, table, *arguments)

    monkeypatch.setattr(DeltaChangelogs, "open_files", fail)
    with pytest.raises(OSError, match="no space left"):
        later.append()
    assert house.versions(T) == [before]
    assert tables[T].versions == [before]
