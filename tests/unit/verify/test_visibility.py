"""Which changes a snapshot of the server sees."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType

from cdcpipe.errors import InvalidArgumentsError, RewoundServerError
from spark_sink.schema.table import Table
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Epoch, Position
from spark_sink.staging.writer import StagingWriter
from spark_sink.verify import comparison
from spark_sink.verify.visibility import VerifyError, check_log, check_server
from spark_sink.warehouse import gaps
from spark_sink.warehouse.warehouse import Warehouse
from support.delta_tables import struct, table_with_a_row
from support.descriptions import ID, version

EPOCH = Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0)
FRUIT = Table("public", "fruit")


class Server:
    """A `ChecksumServer` that has used the transaction ids below 1100."""

    def ask(self, _: Any) -> dict[str, Any]:
        return {"system_id": "7123", "database": "shop", "xmax": 1100, "running": [], "wal_lsn": "0/64", "tables": []}


@pytest.mark.parametrize(("gap_start", "is_early"), [(None, True), (5, True), (10, False), (20, False)])
def test_transaction_ids_from_before_a_gap_are_those_of_another_history(
    gap_start: int | None, is_early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changelog keeps the changes that never happened on the server that was promoted or restored. Its ids are lower."""
    house = Warehouse(tmp_path, "delta")
    house.open(EPOCH)
    house.write_versions(FRUIT, [version(1, 0, ID)])
    for path in (house.changelog(FRUIT), house.replica(FRUIT)):
        path.parent.mkdir(parents=True, exist_ok=True)
        table_with_a_row(path, struct(_cdc_end_lsn=LongType(), _cdc_xid=LongType()), _cdc_end_lsn=10, _cdc_xid=1200)
    if gap_start is not None:
        gap = Gap(3, "the server has gone back", 0.0, 0.0, is_divergence=True)
        gaps.record(house, [replace(EPOCH, number=2, start_lsn=gap_start, gap=gap)])
    monkeypatch.setattr(comparison, "wait_for_log", lambda *_: None)
    monkeypatch.setattr(comparison, "wait_for_tables", lambda *_: None)
    compared = comparison._Comparison(None, house, [FRUIT], Server(), 10)
    compared.begin(tmp_path, 0.0, lambda *_: None)
    assert compared.find_early() == (FRUIT if is_early else None)


@pytest.mark.parametrize(("name", "value"), [("system_id", "8"), ("database", "other"), ("slot", "s2"), ("number", 1)])
def test_the_log_of_another_source_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    """Positions of another server mean nothing for the tables, although its slot and database have the same names."""
    house, staging = Warehouse(tmp_path / "warehouse", "delta"), tmp_path / "staging"
    house.open(EPOCH)
    with StagingWriter(staging, slot="s2" if name == "slot" else "slot") as writer:
        with pytest.raises(InvalidArgumentsError, match="has no log"):
            check_log(house, staging)
        writer.begin_epoch(replace(EPOCH, **{name: value}))
    said = f"changes of {name} '.*', but .* has '{value}'"
    with nullcontext() if name == "number" else pytest.raises(InvalidArgumentsError, match=said):
        check_log(house, staging)


@pytest.mark.parametrize(("reached_lsn", "gap_start", "has_gone_back"), [(100, None, False), (101, None, True), (101, 101, False)])
def test_a_server_without_the_last_changes_has_gone_back(
    reached_lsn: int, gap_start: int | None, has_gone_back: bool, tmp_path: Path
) -> None:
    """Nobody waits until they become visible there. A gap that is recorded already may begin behind the end of the WAL."""
    house = Warehouse(tmp_path, "delta")
    house.open(EPOCH)
    house.record(Position(1, reached_lsn))
    if gap_start is not None:
        gap = Gap(3, "the server has gone back", 0.0, 0.0, is_divergence=True)
        gaps.record(house, [replace(EPOCH, number=2, start_lsn=gap_start, gap=gap)])
    if has_gone_back:
        with pytest.raises(VerifyError, match=f"^{RewoundServerError.BEGINNING}its WAL ends at 0/64, but .* up to 0/65"):
            check_server(Server(), house)
    else:
        assert check_server(Server(), house) == 100
