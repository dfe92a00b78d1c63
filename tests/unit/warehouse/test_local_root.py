"""Where the locks of a warehouse in an object store are. No test connects to a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_sink.staging.log import Position
from spark_sink.warehouse.belonging import check_locks_in
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.warehouse import Source, Warehouse
from support.staged import make_epoch

HERE = "is another one, or an older copy of it"


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Warehouse:
    """A warehouse with changes of the second epoch, whose log is recorded to be here."""
    source = Source("7", "d", "s", (), tmp_path, Position(1, 0x100), Position(2, 0x300), "its")
    monkeypatch.setattr(Warehouse, "source", lambda _: source)
    return Warehouse("s3a://bucket/shop", "delta")


@pytest.mark.parametrize(
    ("epochs", "is_right"),
    [
        ([(1, 0x100, "x"), (2, 0x200, "its")], True),
        ([(2, 0x200, "its"), (3, 0x300, "y")], True),
        ([(3, 0x300, "y")], True),
        ([(2, 0x200, "")], True),  # an older version has begun it
        ([], False),
        ([(1, 0x100, "x")], False),
        ([(1, 0x100, "x"), (2, 0x200, "other")], False),
    ],
)
def test_locks_count_only_where_the_log_of_the_tables_is(
    house: Warehouse, tmp_path: Path, epochs: list[tuple[int, int, str]], is_right: bool
) -> None:
    """A purge on the machine from which the staging directory was moved away wrote beside `run`, without a lock."""
    for number, start_lsn, token in epochs:
        make_epoch(tmp_path, number, start_lsn, token=token)
    if is_right:
        assert house.local_root().parent == tmp_path
        check_locks_in(tmp_path, house)
        return
    with pytest.raises(WarehouseError, match=HERE):
        house.local_root()
    with pytest.raises(WarehouseError, match=HERE):  # `snapshot` may be told the directory
        check_locks_in(tmp_path, house)
    assert house.local_root(tmp_path).parent == tmp_path  # `run` decides whether the log is right
