"""Readers while a micro-batch is under way, or was killed: it has recorded a version, and not yet its changes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cdcpipe.pgoutput.messages import Relation, Update
from spark_sink.changelog.schema_history import SchemaHistory
from spark_sink.pipeline.known_tables import KnownTables
from spark_sink.pipeline.micro_batch import MicroBatch
from spark_sink.replica.as_of import read_as_of
from spark_sink.replica.current import read_replica
from spark_sink.replica.history import read_history
from spark_sink.replica.merge import merge_changes
from spark_sink.schema.catalog_answers import CatalogAnswers
from spark_sink.schema.table import Fill, Table, Version
from spark_sink.staging.log import Position
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import EPOCH
from support.descriptions import CODE, ID, NONE, version
from support.oids import FLOAT4, FLOAT8, INT4
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
    house, log, answers = Warehouse(tmp_path / "warehouse", "parquet"), Log(tmp_path / "staging"), CatalogAnswers(None)
    house.open(EPOCH)
    described = relation(1, "t", ("id", INT4), ("a", INT4), identity="d" if is_keyed else "n")
    tables = KnownTables(spark, house, SchemaHistory(spark, house, answers), answers)
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


class Catalog(CatalogAnswers):
    """The catalog's facts about columns that were never dropped."""

    def __init__(self) -> None:
        super().__init__(None)

    def columns(self, relation: Relation, *, is_of_now: bool = False) -> list[Any]:
        del is_of_now
        return [
            {"number": number, "name": c.name, "type_id": c.type_id, "type_modifier": -1, "missing": None, "is_filled": False}
            for number, c in enumerate(relation.columns, 1)
        ]


@pytest.mark.parametrize("is_back", [False, True])
def test_a_wider_type_that_came_without_its_changes(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_back: bool
) -> None:
    """A micro-batch ends between the column's new type and its rows. With ``is_back`` the type is back at once."""
    house, log, answers = Warehouse(tmp_path / "warehouse", "delta"), Log(tmp_path / "staging"), Catalog()
    house.open(EPOCH)
    narrow, wide = (relation(1, "t", ("id", INT4), ("v", kind)) for kind in (FLOAT4, FLOAT8))

    def update(key: bytes, value: bytes) -> Update:
        return Update(None, 1, None, None, (key, value))

    def tables() -> KnownTables:
        return KnownTables(spark, house, SchemaHistory(spark, house, answers), answers)

    def merge() -> list[float | None]:
        house.record(Position(1, log.end_lsn))
        merge_changes(spark, house, T, Position(1, log.end_lsn))
        rows = read_replica(spark, house.root, "public.t").orderBy("id").collect()
        return [row["v__float"] if "v__float" in row and row["v__float"] is not None else row["v"] for row in rows]

    MicroBatch(tables(), [log.segment([narrow, *(into(narrow, b"%d" % key, b"0.5") for key in range(4))])]).append()
    assert merge() == [0.5] * 4
    batch = [[update(b"1", b"1.5")], [wide, update(b"2", b"2.5")]] + [[narrow, update(b"3", b"3.5")]] * is_back
    segment = log.segment(*batch, before=[narrow])
    with monkeypatch.context() as patched:
        patched.setattr(MicroBatch, "_commit", None)
        with pytest.raises(TypeError):
            MicroBatch(tables(), [segment]).append()
    MicroBatch(tables(), [segment]).append()
    assert merge() == [0.5, 1.5, 2.5, 3.5 if is_back else 0.5]
