"""Masks that change: what is noted, which tables are copied anew, what can't change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.masks import KEY_VARIABLE
from spark_sink.schema.names import Names, Naming
from spark_sink.schema.table import Table, Version
from spark_sink.staging.log import Position
from spark_sink.warehouse import landed_snapshots, mask_settings, wanted_copies
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.mask_settings import check_key, check_new, check_unchanged
from spark_sink.warehouse.warehouse import Warehouse, WarehouseError, masks_path

KEY = "0123456789abcdef"
IDENTITY = {"version": 1, "format": "delta", "types": "exact", "system_id": "1", "database": "d", "slot": "s"}
PERSON, OTHER = Table("public", "person"), Table("public", "other")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)


def house(root: Path, **masks: str) -> Warehouse:
    """Return a warehouse with these masks of the columns of public.person, as a start with ``--mask`` makes it."""
    return Warehouse(root, "delta", masks={f"public.person.{column}": kind for column, kind in masks.items()})


def settle(made: Warehouse) -> None:
    mask_settings.settle(made, TableLock(made.root))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A warehouse that has rows of two tables, up to 1:0/100."""
    made = house(tmp_path)
    (tmp_path / "_cdcpipe/tables").mkdir(parents=True)
    (tmp_path / "_cdcpipe/warehouse.json").write_text(json.dumps(IDENTITY | {"position": "1:0/100"}))
    for number, table in enumerate((PERSON, OTHER)):
        made.write_versions(table, [Version(10, 0, 16400 + number, ("email",), ("email",), ())])
    return tmp_path


def test_a_wrong_name_is_refused_before_it_is_noted(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    tables = [{"schema": "public", "name": "person", "columns": [{"name": "id"}, {"name": "email"}]}]
    with pytest.raises(InvalidArgumentsError, match=r"public\.person has no column 'emial'.*\(it has id, email\)") as caught:
        check_new(house(root, emial="null"), tables)
    assert "--mask public.person.emial=off" in (caught.value.hint or "")
    assert not masks_path(root).exists()
    check_new(house(root, email="null"), tables)
    assert not caplog.messages
    check_new(Warehouse(root, "delta", masks={"public.persn.email": "null", "*.*.e*": "null"}), tables)
    assert caplog.messages == ["--mask public.persn.email masks no column of a published table"]

    settle(house(root, ssn="null"))  # noted when it was there; dropped since: the stream tells
    check_new(house(root, ssn="null"), tables)


def test_a_new_warehouse_notes_its_masks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "_cdcpipe").mkdir()
    (tmp_path / "_cdcpipe/warehouse.json").write_text(json.dumps(IDENTITY))
    settle(house(tmp_path))
    assert not masks_path(tmp_path).exists()
    settle(house(tmp_path, email="hash", phone="redact"))
    noted = json.loads(masks_path(tmp_path).read_text())
    assert (noted["masks"], noted["changes"]) == ({"public.person.email": "hash", "public.person.phone": "redact"}, [])
    assert KEY not in masks_path(tmp_path).read_text()
    assert caplog.text == ""
    # A start without options keeps them, also one that changes others.
    assert house(tmp_path).masks.as_kinds == noted["masks"]
    assert house(tmp_path, phone="off", ssn="null").masks.as_kinds == {"public.person.email": "hash", "public.person.ssn": "null"}


def test_masks_that_change(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    settle(house(root, phone="redact"))
    waiting = wanted_copies.waiting(house(root))
    assert [(str(each.table), each.reasons[0].since_lsn) for each in waiting] == [("public.person", 0x101)]
    assert "Changes up to 0/100 have the old masks, in the changelogs of public.person" in caplog.text
    caplog.clear()
    settle(house(root, phone="redact"))
    assert caplog.text == ""
    settle(house(root, phone="off"))
    noted = json.loads(masks_path(root).read_text())
    assert noted["masks"] == {}
    person = {"schema": "public", "name": "person", "until": "0/100"}
    assert noted["changes"] == [
        {"until": "1:0/100", "masks": {}, "tables": [person]},
        {"until": "1:0/100", "masks": {"public.person.phone": "redact"}, "tables": [person]},
    ]


def test_what_can_not_change(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WarehouseError, match=r"the mask of public\.person\.email can't be changed") as raised:
        settle(house(root, email="hash"))
    assert raised.value.hint == "keep it (off), or begin another warehouse"
    assert wanted_copies.waiting(house(root)) == []
    settle(house(root, phone="hash"))
    monkeypatch.setenv(KEY_VARIABLE, KEY + "!")
    with pytest.raises(WarehouseError, match="is not the key"):
        settle(house(root))
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(InvalidArgumentsError, match="is not set"):
        settle(house(root))


def test_a_table_that_was_renamed(root: Path) -> None:
    """Its masks may come under its new name, too: for a column of its key nothing changes by that."""
    made = house(root)
    settled = Table("public", "people")
    made.write_names(Names([Naming((50, 0), 16400, PERSON, settled, PERSON)], is_following=True))
    settle(Warehouse(root, "delta", masks={"public.people.phone": "redact"}))
    assert [str(each.table.schema) + "." + each.table.name for each in wanted_copies.waiting(made)] == ["public.person"]
    with pytest.raises(WarehouseError, match="email can't be changed"):
        settle(Warehouse(root, "delta", masks={"public.people.email": "hash"}))


def test_rows_that_are_ahead_of_the_warehouse_are_copied_anew(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A copy beyond the position of the warehouse, or before there is one, has the former masks, and does not settle the reason."""
    made = house(root)
    first = made.versions(PERSON)[0]
    made.write_versions(PERSON, [first, replace(first, end_lsn=0x200, snapshot=((1, "email"),))])
    settle(house(root, phone="redact"))
    assert [each.reasons[0].since_lsn for each in wanted_copies.waiting(made)] == [0x201]
    assert "Changes up to 0/200 have the old masks" in caplog.text

    (tmp_path / "_cdcpipe/warehouse.json").write_text(json.dumps(IDENTITY))  # in the middle of the first copy
    landed_snapshots.record_start(made, PERSON, Position(1, 0x300))
    settle(house(root, phone="null"))
    landed_snapshots.record_end(made, PERSON)
    assert [each.reasons[0].since_lsn for each in wanted_copies.waiting(made)] == [0x301]


def test_a_copy_whose_masks_are_not_those_of_now(root: Path) -> None:
    copying = house(root)
    check_unchanged(copying)
    settle(house(root, phone="redact"))
    with pytest.raises(WarehouseError, match="were changed while rows were copied"):
        check_unchanged(copying)
    check_unchanged(house(root))


def test_hashes_are_not_compared_with_another_key(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(house(root, phone="hash"))
    check_key(Warehouse.existing(root))
    monkeypatch.setenv(KEY_VARIABLE, KEY + "!")
    with pytest.raises(WarehouseError, match="is not the key"):
        check_key(Warehouse.existing(root))


def test_masks_that_a_newer_version_has_noted(root: Path) -> None:
    settle(house(root, phone="redact"))
    path = masks_path(root)
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(WarehouseError, match=r"masks\.json has version 2; this program knows 1"):
        Warehouse.existing(root).masks  # noqa: B018 - every user of the masks reads them here
