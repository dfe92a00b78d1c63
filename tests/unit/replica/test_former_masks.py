"""Which masks rows from before a copy may lack."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spark_sink.replica import former_masks
from spark_sink.schema.table import Table, Version
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.warehouse import Warehouse, masks_path

PERSON = Table("public", "person")
SAID = {"schema": "public", "name": "person", "until": "0/100"}
NONE: dict[str, Any] = {"until": "1:0/100", "masks": {}}


@pytest.mark.parametrize(
    ("changes", "copied_lsn", "expected"),
    [
        ([], 0x90, {}),
        ([{**NONE, "tables": [SAID]}], 0x90, {"id": "hash", "ssn": "null"}),
        # The rows have had a copy since.
        ([{**NONE, "tables": [SAID]}], 0x300, {}),
        ([{**NONE, "tables": [{**SAID, "until": "0/200"}]}], 0x300, {"id": "hash", "ssn": "null"}),
        # The table had no rows then, or has had this mask before.
        ([{**NONE, "tables": [{**SAID, "name": "other"}]}], 0x90, {}),
        ([{**NONE, "tables": [SAID], "masks": {"*.*.ssn": "null"}}], 0x90, {"id": "hash"}),
        ([{**NONE, "tables": [SAID], "masks": {"*.*.ssn": "redact"}}], 0x90, {"id": "hash", "ssn": "null"}),
    ],
)
def test_the_masks_that_rows_may_lack(tmp_path: Path, changes: list[Any], copied_lsn: int, expected: dict[str, str]) -> None:
    house = Warehouse(tmp_path, "delta")
    (tmp_path / "_cdcpipe/tables").mkdir(parents=True)
    first = Version(0x10, 0, 16400, ("id",), ("id",))
    house.write_versions(PERSON, [first, replace(first, end_lsn=0x200, snapshot=((1, "id"),))])
    masks = {"public.person.ssn": "null", "public.*.id": "hash"}
    masks_path(tmp_path).write_text(json.dumps({"version": 1, "masks": masks, "key": None, "changes": changes}))
    found = former_masks.changed_kinds(house, PERSON, {"id", "ssn", "note"}, copied_lsn)
    assert found == expected


def test_a_change_that_does_not_name_its_tables_is_refused(tmp_path: Path) -> None:
    """Nobody knows then which rows lack the masks."""
    masks_path(tmp_path).parent.mkdir()
    masks_path(tmp_path).write_text(json.dumps({"version": 1, "masks": {}, "key": None, "changes": [NONE]}))
    with pytest.raises(WarehouseError, match=r"masks.json is damaged: KeyError\('tables'\)"):
        former_masks.changed_kinds(Warehouse(tmp_path, "delta"), PERSON, {"ssn"}, 0x90)
