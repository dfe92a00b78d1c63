"""Where the locks of a warehouse in an object store are. No test connects to a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_sink.staging.log import Position, list_epochs
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


@pytest.mark.parametrize(
    ("other", "position", "is_alone"),
    [
        ([(3, 0x300, "b"), (4, 0x300, "d")], Position(4, 0x400), False),
        ([(3, 0x300, "b")], Position(3, 0x400), True),
        ([], Position(2, 0x400), True),  # the run before this one
    ],
)
def test_another_run_with_a_copy_of_the_staging_directory_is_seen(
    tmp_path: Path, other: list[tuple[int, int, str]], position: Position, is_alone: bool
) -> None:
    """An environment was cloned, and the bucket was not. Each run left out what the other one had written."""
    for name, later in (("ours", [(3, 0x300, "b")]), ("theirs", other)):
        for number, start_lsn, token in [(2, 0x200, "a"), *later]:
            make_epoch(tmp_path / name, number, start_lsn, token=token)
    made = Warehouse(tmp_path / "warehouse", "delta")
    made.open(list_epochs(tmp_path / "ours")[-1])
    made.record(position, tmp_path / "theirs")
    if is_alone:
        made.record(Position(3, 0x500), tmp_path / "ours")
        made.record(Position(3, 0x600), tmp_path / "ours")
        return
    with pytest.raises(WarehouseError, match=rf"another run writes the tables in \S+, too: they are at {position}"):
        made.record(Position(3, 0x500), tmp_path / "ours")
    assert made.source().position == position
