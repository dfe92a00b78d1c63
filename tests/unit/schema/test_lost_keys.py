"""A table that has lost its key: its replica stops there, and is not behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spark_sink.schema.keys import keyed_until_dropped
from spark_sink.schema.table import Table, Version, mergeable_lsn
from spark_sink.status.report import Tables
from spark_sink.warehouse.warehouse import Warehouse

KEYLESS, KEYED = Version(0x50, 0, 7, (), (), ()), Version(0x60, 0, 7, ("id",), ("id",), ())
LOST = Version(0x80, 0, 7, (), (), ())


@pytest.mark.parametrize(
    ("versions", "lsn", "wanted"),
    [
        ([KEYED], 0x100, 0x100),
        ([KEYLESS, KEYED], 0x100, 0x100),
        ([KEYED, LOST], 0x100, 0x7F),
        ([KEYED, LOST, Version(0x90, 0, 7, (), (), ())], 0x100, 0x7F),
        ([KEYED, LOST, Version(0x90, 0, 7, ("id",), ("id",), ())], 0x100, 0x100),
        ([KEYED, LOST], 0x70, 0x70),
        ([KEYLESS], 0x100, 0),
    ],
)
def test_how_far_a_replica_can_get(versions: list[Version], lsn: int, wanted: int) -> None:
    assert mergeable_lsn(versions, lsn) == wanted


@pytest.mark.parametrize(
    ("versions", "is_added"),
    [
        ([KEYED, LOST], True),
        ([KEYED], False),
        ([KEYLESS], False),
        ([], False),
        ([KEYED, LOST, Version(0x90, 0, 8, (), (), ())], False),  # another table has the name already
        ([KEYED, replace(LOST, gone=("id",))], False),
    ],
)
def test_a_table_that_is_dropped_after_it_has_lost_its_key(versions: list[Version], *, is_added: bool) -> None:
    """The replica takes the DROP TABLE."""
    found = keyed_until_dropped(versions, 7, (0xA0, 2))
    assert found == [*versions, *([Version(0xA0, 2, 7, ("id",), ("id",))] if is_added else [])]
    assert not is_added or mergeable_lsn(found, 0x100) == 0x100
    assert keyed_until_dropped(found, 7, (0xA0, 2)) == found


@pytest.mark.parametrize(("reached", "rung"), [("1:0/7F", "1:0/100"), ("1:0/70", "1:0/70")])
def test_the_ladder_does_not_wait_for_a_lost_key(tmp_path: Path, reached: str, rung: str) -> None:
    (tmp_path / "_cdcpipe").mkdir()
    identity = {"version": 1, "format": "delta", "system_id": "1", "database": "d", "slot": "s", "position": "1:0/100"}
    (tmp_path / "_cdcpipe/warehouse.json").write_text(json.dumps(identity))
    tables = Tables(Warehouse.existing(tmp_path))
    tables._versions, tables._tables = {"public.t": [KEYED, LOST]}, {"public.t": Table("public", "t")}
    row = {"table": "public.t", "changelog": {"position": "1:0/F0"}, "replica": {"position": reached}}
    assert [(name, str(position)) for name, position in tables.rungs([row])] == [("changelog", "1:0/100"), ("replica", rung)]
