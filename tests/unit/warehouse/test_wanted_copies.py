"""The tables that need a copy: what is recorded, what a copy settles, and what stays."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spark_sink.files import lock
from spark_sink.schema.table import Table
from spark_sink.staging.log import Epoch, Position
from spark_sink.warehouse import landed_snapshots
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.wanted_copies import Failures, Reason, WantedCopy, give_up, record_failure, settle, waiting, want_copy
from spark_sink.warehouse.warehouse import Warehouse
from support.descriptions import ID, version
from support.waiting import until

EPOCH = Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0)
ORDERS, FRUIT = Table("public", "Orders"), Table("public", "fruit")


@pytest.fixture
def house(tmp_path: Path) -> Warehouse:
    made = Warehouse(tmp_path, "delta")
    made.open(EPOCH)
    return made


def copied(house: Warehouse, table: Table, lsn: int) -> None:
    """Record that a snapshot of the table at an LSN is complete."""
    house.write_versions(table, [version(1, 0, ID), replace(version(lsn, 0, ID), snapshot=((1, "id"),))])


def test_a_table_waits_until_a_copy_from_its_position_or_later_is_complete(house: Warehouse) -> None:
    assert waiting(house) == []
    want_copy(house, ORDERS, 100, "it was renamed", lambda: 7.0)
    want_copy(house, FRUIT, 50, "it is new", lambda: 8.0)
    want_copy(house, ORDERS, 200, "a column was computed", lambda: 9.0)
    renamed, computed = Reason("it was renamed", 100, 7.0), Reason("a column was computed", 200, 9.0)
    assert waiting(house) == [WantedCopy(ORDERS, (renamed, computed)), WantedCopy(FRUIT, (Reason("it is new", 50, 8.0),))]
    assert waiting(house)[0].why == "it was renamed; a column was computed"

    copied(house, FRUIT, 49)
    copied(house, ORDERS, 150)
    assert [(each.table, each.reasons) for each in waiting(house)] == [
        (ORDERS, (computed,)),
        (FRUIT, (Reason("it is new", 50, 8.0),)),
    ]
    # The snapshot is in the changelog, but may not be in the replica yet.
    landed_snapshots.record_start(house, ORDERS, Position(1, 150))
    assert waiting(house)[0].reasons == (renamed, computed)
    landed_snapshots.record_end(house, ORDERS)
    copied(house, FRUIT, 50)
    copied(house, ORDERS, 300)
    assert waiting(house) == []
    settle(house)
    assert list((house.root / "_cdcpipe/copies").iterdir()) == []
    # A change that comes to the tables later than the copy, and is older.
    want_copy(house, ORDERS, 250, "it was renamed")
    assert waiting(house) == []
    want_copy(house, ORDERS, 301, "it was renamed")
    assert [each.table for each in waiting(house)] == [ORDERS]


def test_what_is_unfinished_is_read_once_for_all_tables(house: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (ORDERS, FRUIT):
        copied(house, table, 100)
        for lsn in (100, 200, 300):
            want_copy(house, table, lsn, f"reason {lsn}")
    unfinished, reads = landed_snapshots.unfinished, list[Warehouse]()
    monkeypatch.setattr(landed_snapshots, "unfinished", lambda asked: reads.append(asked) or unfinished(asked))
    assert [len(each.reasons) for each in waiting(house)] == [2, 2]
    assert reads == [house]


def test_only_the_records_of_some_tables_are_read(house: Warehouse) -> None:
    for table in (ORDERS, FRUIT):
        want_copy(house, table, 100, "it is new")
    copied(house, ORDERS, 100)
    for path in (house.root / "_cdcpipe/copies").glob("*fruit*"):
        path.write_text("damaged")
    assert waiting(house, [ORDERS]) == []
    settle(house, [ORDERS])
    assert [path.name for path in (house.root / "_cdcpipe/copies").iterdir()] == ["public.fruit.json"]


def test_a_reason_that_comes_again_has_the_later_position(house: Warehouse) -> None:
    for lsn, found_at in ((100, 1.0), (100, 2.0), (300, 3.0), (200, 4.0)):
        want_copy(house, ORDERS, lsn, "rows were missing", lambda at=found_at: at)
    assert waiting(house) == [WantedCopy(ORDERS, (Reason("rows were missing", 300, 1.0),))]


def test_many_reasons_do_not_make_a_long_record(house: Warehouse) -> None:
    want_copy(house, ORDERS, 1000, "the first one")
    for number in range(20):
        want_copy(house, ORDERS, number + 1, f"reason {number}")
    [found] = waiting(house)
    assert [each.text for each in found.reasons] == [f"reason {number}" for number in range(12, 20)]
    # A copy that would not settle what was left out does not settle everything.
    copied(house, ORDERS, 999)
    assert [each.table for each in waiting(house)] == [ORDERS]
    copied(house, ORDERS, 1000)
    assert waiting(house) == []


def test_failures_are_counted_until_a_copy_succeeds(house: Warehouse) -> None:
    record_failure(house, ORDERS, "nobody waits for this", 1.0)
    assert waiting(house) == []
    want_copy(house, ORDERS, 100, "it was renamed", lambda: 1.0)
    record_failure(house, ORDERS, "the server is away", 10.0)
    record_failure(house, ORDERS, "it is locked", 20.0)
    want_copy(house, ORDERS, 100, "it was renamed")
    assert waiting(house)[0].failures == Failures(2, 20.0, "it is locked")
    want_copy(house, ORDERS, 200, "a column was computed", lambda: 2.0)
    copied(house, ORDERS, 150)
    settle(house)
    assert waiting(house) == [WantedCopy(ORDERS, (Reason("a column was computed", 200, 2.0),))]


def test_a_table_that_is_not_published_any_more_is_given_up(house: Warehouse) -> None:
    want_copy(house, ORDERS, 100, "it was renamed")
    give_up(house, ORDERS)
    give_up(house, FRUIT)
    assert waiting(house) == []


def test_a_damaged_record_is_named(house: Warehouse) -> None:
    want_copy(house, ORDERS, 100, "it was renamed")
    [path] = (house.root / "_cdcpipe/copies").iterdir()
    path.write_text(json.dumps({"schema": "public"}))
    with pytest.raises(WarehouseError, match="is damaged") as caught:
        waiting(house)
    assert "delete it" in (caught.value.hint or "")


_HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("write", [settle, want_copy, give_up, record_failure])
def test_two_processes_do_not_write_at_the_same_time(
    house: Warehouse, write: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A snapshot found a new reason while `run` settled the ones before, and removed the file with the new one."""
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.0)
    want_copy(house, ORDERS, 100, "it was renamed", lambda: 1.0)
    arguments: dict[Any, tuple[Any, ...]] = {
        want_copy: (ORDERS, 200, "new"),
        give_up: (ORDERS,),
        record_failure: (ORDERS, "away", 2.0),
    }
    command = [sys.executable, "-c", _HOLDER, house.root / "_cdcpipe/copies.lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        before = waiting(house)
        thread = threading.Thread(target=write, args=(house, *arguments.get(write, ())))
        thread.start()
        until(lambda: caplog.messages or not thread.is_alive(), "the wait for the other process")
        assert "still waiting for the lock" in caplog.text
        assert waiting(house) == before
        other.stdin.close()
        thread.join()
    assert write is settle or waiting(house) != before
