"""Files with the JSON object of one table: those that say something of all tables name them as they are called now."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_sink.files import places
from spark_sink.files.local import RESTORE
from spark_sink.schema.names import Names, Naming
from spark_sink.schema.table import Table
from spark_sink.staging.log import Position
from spark_sink.warehouse import (
    comments,
    dropped_tables,
    gaps,
    landed_snapshots,
    last_look,
    new_changelogs,
    purged_changes,
    unchecked_merges,
)
from spark_sink.warehouse.comments import Comments
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.table_files import TableFiles
from spark_sink.warehouse.warehouse import Warehouse

T = Table("public", "t")


@pytest.mark.parametrize(
    ("folder", "read"),
    [
        ("purged", lambda house: purged_changes.last_lsn(house, T)),
        ("begun", lambda house: new_changelogs.begun_lsn(house, T)),
        ("merges", unchecked_merges.unchecked),
        ("snapshots", landed_snapshots.unfinished),
        ("dropped", lambda house: dropped_tables.where(house, T, ())),
        ("comments", comments.commented_tables),
        ("comments", lambda house: comments.read_comments(house, T)),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, folder: str, read: Callable[[Warehouse], Any]) -> None:
    path = tmp_path / "_cdcpipe" / folder / "public.t.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"schema": "public", "name": "t"}')
    with pytest.raises(WarehouseError, match=r"public\.t\.json is damaged: KeyError") as caught:
        read(Warehouse(tmp_path, "delta"))
    assert caught.value.hint == RESTORE


def test_tables_have_the_names_of_now(tmp_path: Path) -> None:
    house = Warehouse(tmp_path, "delta")
    a, b = Table("public", "a"), Table("public", "b")
    house.write_names(Names([Naming((10, 0), 5, b, a, b)]))
    for table in (Table("public", "z"), b):
        comments.write_comments(house, table, Comments())
        landed_snapshots.record_start(house, table, Position(1, 20))
    assert [str(table) for table, _ in comments.commented_tables(house)] == ["public.a", "public.z"]
    assert [str(table) for table, _ in landed_snapshots.unfinished(house)] == ["public.a", "public.z"]


def test_files_in_a_store_are_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start waited for each of thousands of files."""
    both = threading.Barrier(2, timeout=30)
    files = TableFiles("comments", lambda value: (both.wait(), value["n"])[1])
    house = Warehouse(tmp_path, "delta")
    for number, table in enumerate((T, Table("public", "z"))):
        files.write(house, table, {"n": number})
    monkeypatch.setattr(places, "is_local", lambda path: path.suffix == ".json")  # the directory counts as one in a store
    assert [value for _, value in files.read_all(house)] == [0, 1]


def test_a_replica_that_cannot_be_removed_keeps_its_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows would count as those of a table that is copied."""
    house = Warehouse(tmp_path, "delta")
    landed_snapshots.record_start(house, T, Position(1, 20))
    log = house.replica(T) / "_delta_log"
    log.mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_args, **_options: None)
        with pytest.raises(WarehouseError, match=r"public\.t is left from a copy .* and can't be removed"):
            landed_snapshots.take_back(house, T)
    assert landed_snapshots.unfinished(house) == [(T, Position(1, 20))]
    landed_snapshots.take_back(house, T)
    assert (log.exists(), landed_snapshots.unfinished(house)) == (False, [])


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("gaps.json", '{"gaps": ["x"]}', gaps.read),
        ("names.json", '{"namings": "x"}', Warehouse.recorded_names),
        ("published.json", '{"tables": ["x"]}', last_look.read),
    ],
)
def test_other_values_than_expected_are_damage(tmp_path: Path, name: str, text: str, read: Callable[[Warehouse], Any]) -> None:
    house = Warehouse(tmp_path, "delta")
    (tmp_path / "_cdcpipe").mkdir()
    (tmp_path / "_cdcpipe" / name).write_text(text)
    with pytest.raises(WarehouseError, match=rf"{name} is damaged: "):
        read(house)
