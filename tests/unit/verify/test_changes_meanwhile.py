"""What other processes do to a warehouse while its tables are compared."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType

from spark_sink.delta.log import TableLog
from spark_sink.delta.rewrite import Rewrite
from spark_sink.files.places import write_json
from spark_sink.schema.table import Table
from spark_sink.staging.log import Epoch, Position
from spark_sink.verify import comparison, quick
from spark_sink.verify.comparison import _Comparison
from spark_sink.warehouse import purged_changes
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.warehouse import MASKS_VERSION, Warehouse, masks_path
from support.delta_tables import struct, table_with_a_row
from support.descriptions import ID, version
from support.oids import INT8

FRUIT, STONE = Table("public", "fruit"), Table("public", "stone")
EPOCH = Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0)
COLUMNS = [["id", INT8, -1]]


class Server:
    """A `ChecksumServer` that has one row in each table, with the id 1. It answers the questions in their order."""

    def __init__(self, sums: Mapping[str, tuple[int, int]]) -> None:
        self.sums, self.asked = sums, 0

    def ask(self, _: Any) -> dict[str, Any]:
        of_each = {"schema": "public", "relation_id": 1, "row_estimate": 1, "columns": COLUMNS}
        tables = [{"name": table.name, **of_each} for table in (FRUIT, STONE)]
        return {"system_id": "7123", "database": "shop", "xmax": 1100, "running": [], "wal_lsn": "0/64", "tables": tables}

    def send(self, _: Any) -> None:
        assert self.asked == 0, "the answer to the question before was not taken"
        self.asked += 1

    def receive(self) -> Mapping[str, tuple[int, int]]:
        self.asked -= 1
        return self.sums


@pytest.fixture
def house(tmp_path: Path) -> Warehouse:
    """A warehouse with two tables, whose replicas have the row 1 at the LSN 10."""
    made = Warehouse(tmp_path, "delta")
    made.open(EPOCH)
    for table in (FRUIT, STONE):
        made.write_versions(table, [version(1, 0, ID)])
        for path in (made.changelog(table), made.replica(table)):
            path.parent.mkdir(exist_ok=True)
        columns = struct(_cdc_end_lsn=LongType(), _cdc_xid=LongType())
        table_with_a_row(made.changelog(table), columns, _cdc_end_lsn=10, _cdc_xid=1000)
        rows = Rewrite.new(made.replica(table), ID, struct(id=LongType()), {})
        rows.add({"id": pa.array([1])}, []).commit(Position(1, 10))
    return made


@pytest.fixture
def compared(house: Warehouse, monkeypatch: pytest.MonkeyPatch) -> _Comparison:
    sums = quick.checksums(TableLog(house.replica(STONE)).refresh(), [("id", INT8, -1)], ID, house.types)
    assert sums
    monkeypatch.setattr(comparison, "wait_for_log", lambda *_: None)
    monkeypatch.setattr(comparison, "wait_for_tables", lambda *_: None)
    return _Comparison(None, house, [FRUIT, STONE], Server(sums), 10)


def begin(compared: _Comparison, staging: Path) -> None:
    compared.begin(staging, 0.0, lambda *_: None)


def test_a_purge_of_a_change_that_the_snapshot_does_not_see(
    compared: _Comparison, house: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica has the change. Nothing tells this any more, and its rows counted as different from the server's."""

    def rows(self: _Comparison, table: Table) -> None:
        purged_changes.check(house, table, self._bases[table].lsn)
        pytest.fail("the rows are compared")

    monkeypatch.setattr(_Comparison, "_rows", rows)  # which needs Spark
    begin(compared, tmp_path)
    merged = Rewrite.of_log(TableLog(house.replica(FRUIT)).refresh(), ID)
    merged.add({"id": pa.array([2])}, []).commit(Position(1, 60))
    purged_changes.record(house, FRUIT, 60)
    fruit, stone = compared.run(lambda *_: None)
    assert fruit.problem is not None
    assert "changes of public.fruit that were removed" in fruit.problem
    assert "start verify again" in fruit.problem
    assert stone.is_equal


def test_a_run_that_is_started_with_other_masks(
    compared: _Comparison, house: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are not those that the server was asked for."""
    begin(compared, tmp_path)
    noted = {"version": MASKS_VERSION, "masks": {"public.fruit.note": "hash"}}
    monkeypatch.setattr(comparison, "wait_for_tables", lambda *_: write_json(masks_path(house.root), noted))
    with pytest.raises(WarehouseError, match="has changed the masks of"):
        begin(compared, tmp_path)


def test_a_run_that_is_started_with_other_choices(
    compared: _Comparison, house: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the rules for deleted rows have to do with what is compared. Another --history left all tables uncompared."""
    monkeypatch.setattr(comparison, "wait_for_tables", lambda *_: Warehouse(house.root, "delta", history="table").open(EPOCH))
    begin(compared, tmp_path)
    monkeypatch.setattr(comparison, "wait_for_tables", lambda *_: Warehouse(house.root, "delta", deletes="soft").open(EPOCH))
    with pytest.raises(WarehouseError, match=r"deletes is soft now, and was hard$"):
        begin(compared, tmp_path)
