"""A Delta replica that does not exist is equal to nothing."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType

from spark_sink.schema.table import Table
from spark_sink.staging.log import Epoch
from spark_sink.verify import comparison
from spark_sink.verify.comparison import _Comparison
from spark_sink.warehouse.warehouse import Warehouse
from support.delta_tables import struct, table_with_a_row
from support.descriptions import ID, version

FRUIT = Table("public", "fruit")


class Server:
    """A `ChecksumServer` that knows the table."""

    def ask(self, _: Any) -> dict[str, Any]:
        there = {"schema": "public", "name": "fruit", "relation_id": 1, "row_estimate": 1, "columns": [["id", 23, -1]]}
        return {"system_id": "7123", "database": "shop", "xmax": 1100, "running": [], "wal_lsn": "0/64", "tables": [there]}


def make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table_with_a_row(path, struct(_cdc_end_lsn=LongType(), _cdc_xid=LongType()), _cdc_end_lsn=10, _cdc_xid=1000)


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Comparison:
    """A comparison of a table with a changelog and no replica."""
    house = Warehouse(tmp_path, "delta")
    house.open(Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0))
    house.write_versions(FRUIT, [version(1, 0, ID)])
    make(house.changelog(FRUIT))
    monkeypatch.setattr(comparison, "wait_for_log", lambda *_: None)
    monkeypatch.setattr(comparison, "wait_for_tables", lambda *_: None)
    found = _Comparison(None, house, [FRUIT], Server(), 10)
    found.begin(tmp_path, 0.0, lambda *_: None)
    return found


def test_it_is_not_compared(compared: _Comparison, tmp_path: Path) -> None:
    assert not compared.gets_replica(tmp_path, 0.0, lambda *_: None)
    [result] = compared.run(lambda *_: None)
    assert not result.is_equal
    assert result.problem == "it had no replica; start cdcpipe-spark run, which makes it"


def test_one_that_is_made_meanwhile_is_waited_for(compared: _Comparison, tmp_path: Path) -> None:
    said: list[str] = []

    def tell(text: str, _: float) -> None:
        said.append(text)
        make(Warehouse(tmp_path, "delta").replica(FRUIT))

    assert compared.gets_replica(tmp_path, float("inf"), tell)
    assert said == ["waiting for the replica of public.fruit; no launcher runs"]
