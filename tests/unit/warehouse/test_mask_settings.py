"""Masks that change: what is noted, which tables are copied anew, what can't change."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.masks import KEY_VARIABLE
from spark_sink.delta import file_table
from spark_sink.files.local import DamagedFileError
from spark_sink.replica import former_masks
from spark_sink.schema.names import Names, Naming
from spark_sink.schema.table import Table, Version
from spark_sink.staging import table_masks
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Position, StagingError, list_epochs
from spark_sink.warehouse import gaps, landed_snapshots, mask_settings, stored_histories, wanted_copies
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.lock import TableLock
from spark_sink.warehouse.mask_settings import check_kept, check_key, check_new, check_unchanged
from spark_sink.warehouse.warehouse import Warehouse, masks_path
from support.staged import make_epoch

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY = "0123456789abcdef"
IDENTITY = {"version": 1, "format": "delta", "types": "exact", "system_id": "1", "database": "d", "slot": "s"}
PERSON, OTHER = Table("public", "person"), Table("public", "other")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)


def house(root: Path, **masks: str) -> Warehouse:
    """Return a warehouse with these masks of the columns of public.person, as a start with ``--mask`` makes it."""
    return Warehouse(root, "delta", masks={f"public.person.{column}": kind for column, kind in masks.items()})


def staging_of(made: Warehouse) -> Path:
    staging = made.root.parent / f"{made.root.name}-staging"
    staging.mkdir(exist_ok=True)
    return staging


def settle(made: Warehouse) -> None:
    mask_settings.settle(made, TableLock(made.root), staging_of(made))


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


def test_a_mask_of_a_table_must_hold_for_what_has_its_rows(root: Path) -> None:
    """A partition that is published under its own name, or a table that inherits from the masked one."""
    columns = [{"name": "id"}, {"name": "email"}]
    parents = [{"schema": "public", "name": "person"}]
    tables = [{"schema": "public", "name": "person_1", "columns": columns, "parents": parents}]
    with pytest.raises(InvalidArgumentsError, match=r"person_1 has rows of public\.person, and --mask names email of") as caught:
        check_new(house(root, email="null"), tables)
    assert caught.value.hint == "mask them under this name, too: --mask public.person_1.email=null"
    check_new(Warehouse(root, "delta", masks={"public.person*.email": "null"}), tables)


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


@pytest.mark.parametrize("history", ["off", "table"])
def test_a_history_that_gets_no_copy(root: Path, caplog: pytest.LogCaptureFixture, history: str) -> None:
    """Without ``--history table`` nothing ends its current versions, and so they keep what the new mask hides."""
    made = Warehouse(root, "delta", history=history, masks={"public.*.phone": "redact"})
    schema = StructType([StructField("phone", StringType())])
    properties = stored_histories.properties(after_lsn=0, copies=frozenset())
    file_table.commit(file_table.define(made.history(PERSON), schema, properties), [], Position(1, 0x100))
    settle(made)
    said = "the stored histories of public.person keep the old masks in all their versions"
    assert (said in caplog.text) is (history == "off")


def test_what_can_not_change(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WarehouseError, match=r"the mask of public\.person\.email can't be changed") as raised:
        settle(house(root, email="hash"))
    assert raised.value.hint == "keep it (off), or begin another warehouse (--warehouse, --staging and -S, each another one)"
    assert wanted_copies.waiting(house(root)) == []
    settle(house(root, phone="hash"))
    monkeypatch.setenv(KEY_VARIABLE, KEY + "!")
    with pytest.raises(WarehouseError, match="is not the key"):
        settle(house(root))
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(InvalidArgumentsError, match="is not set"):
        settle(house(root))


def test_a_lost_note_does_not_take_the_masks_of_a_key_back(root: Path) -> None:
    """The hint for lost masks offers both ways. The one was refused as a change, and the other showed the key in plain."""
    table_masks.record(staging_of(house(root)), {"public.person.email": "hash"}, None)
    assert not masks_path(root).exists()
    with pytest.raises(InvalidArgumentsError, match="had masks that"):
        settle(house(root))
    with pytest.raises(WarehouseError, match=r"public\.person\.email can't be changed") as caught:
        settle(house(root, email="off"))
    assert "keep it (hash)" in (caught.value.hint or "")
    settle(house(root, email="hash"))
    assert json.loads(masks_path(root).read_text())["masks"] == {"public.person.email": "hash"}
    settle(house(root))


@pytest.mark.parametrize("pattern", ["public.person.email", "public.person.phone"])
def test_another_key_of_hashes_while_the_note_is_lost(root: Path, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    """Each row would come once more under another key, and the former one would stay as deleted. Other columns are copied anew."""
    made, staging = Warehouse(root, "delta", masks={pattern: "hash"}), staging_of(house(root))
    key = made.masks.fingerprint
    table_masks.record(staging, made.masks.as_kinds, key)
    with monkeypatch.context() as patch:
        patch.setenv(KEY_VARIABLE, KEY + "!")
        other = Warehouse(root, "delta", masks={pattern: "hash"})
        if pattern == "public.person.email":
            with pytest.raises(WarehouseError, match="is not the key"):
                settle(other)
            assert not masks_path(root).exists()
        else:
            settle(other)
            assert table_masks.read_key(staging) == other.masks.fingerprint != key
            return
    settle(made)
    assert table_masks.read_key(staging) == key


def test_values_of_a_warehouse_that_lacks_its_note_count_as_not_masked(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be a copy from before its first mask. The key, whose mask can't have changed, is not hidden in deleted rows."""
    table_masks.record(staging_of(house(root)), {"public.per*.*": "hash"}, None)
    settle(Warehouse(root, "delta", masks={"public.per*.*": "hash"}))
    assert "has no _cdcpipe/masks.json: it has lost this file, or is a copy from before its first mask" in caplog.text
    assert [str(each.table) for each in wanted_copies.waiting(house(root))] == ["public.person"]
    changed = former_masks.changed_kinds(house(root), PERSON, {"email", "phone"}, 0x90)
    assert changed == {"phone": "hash"}


def test_a_mask_that_is_taken_back_while_the_note_is_lost(root: Path) -> None:
    """The rows may be masked, or not: only a copy makes them all the same."""
    table_masks.record(staging_of(house(root)), {"public.person.phone": "redact"}, None)
    settle(house(root, phone="off"))
    assert [str(each.table) for each in wanted_copies.waiting(house(root))] == ["public.person"]
    assert table_masks.read(staging_of(house(root))) == {}


def test_a_mask_that_is_taken_back_while_the_note_is_lost_and_a_kill(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start finds neither a note nor a record, and so it does not know that the tables need copies."""
    table_masks.record(staging_of(house(root)), {"public.person.phone": "redact"}, None)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mask_settings, "_change", killed)
        with pytest.raises(KeyboardInterrupt):
            settle(house(root, phone="off"))
    settle(house(root))
    assert [str(each.table) for each in wanted_copies.waiting(house(root))] == ["public.person"]


def test_a_table_that_was_renamed(root: Path) -> None:
    """Its masks may come under its new name, too: for a column of its key nothing changes by that."""
    made = house(root)
    settled = Table("public", "people")
    made.write_names(Names([Naming((50, 0), 16400, PERSON, settled, PERSON)], is_following=True))
    settle(Warehouse(root, "delta", masks={"public.people.phone": "redact"}))
    assert [str(each.table.schema) + "." + each.table.name for each in wanted_copies.waiting(made)] == ["public.person"]
    with pytest.raises(WarehouseError, match="email can't be changed"):
        settle(Warehouse(root, "delta", masks={"public.people.email": "hash"}))


def test_a_mask_that_comes_with_a_lost_rename(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first start after a failover has a mask for the name that the table has again. Nobody has recorded the gap yet."""
    made, known, lost = house(root), Table("public", "known"), Table("public", "lost")
    namings = [Naming((50, 0), 16400, PERSON, known, PERSON), Naming((0x90, 0), 16400, known, lost, PERSON)]
    made.write_names(Names(namings, is_following=True))
    gap = Gap(0x80, "timeline 2 branched off", 0.0, 0.0, is_divergence=True)
    make_epoch(staging_of(made), 2, 0x200, gap=gap.to_json())
    masked = Warehouse(root, "delta", masks={"public.known.phone": "redact"})
    settle(masked)
    assert "Changes up to 0/100 have the old masks, in the changelogs of public.lost" in caplog.messages[0]
    # The gap's copy does not have the rows that were deleted: they stay, with the new mask.
    gaps.record(masked, list_epochs(staging_of(made)))
    assert former_masks.changed_kinds(masked, PERSON, {"email", "phone"}, 0x90) == {"phone": "redact"}


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
    with pytest.raises(WarehouseError, match="has changed the masks of"):
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


def begin(made: Warehouse) -> Warehouse:
    """Begin a warehouse, as a start of `run` does, and return it."""
    check_kept(made, staging_of(made))
    (made.root / "_cdcpipe").mkdir(parents=True)
    (made.root / "_cdcpipe/warehouse.json").write_text(json.dumps(IDENTITY))
    settle(made)
    return made


def test_a_warehouse_that_is_made_anew_keeps_its_masks_or_gives_them_up(tmp_path: Path) -> None:
    """Later starts need no ``--mask``. So who deletes the warehouse, as the pages say, starts without one, too."""
    root = tmp_path / "warehouse"
    begin(house(root, email="hash", phone="redact"))
    settle(house(root, phone="off", p="null"))
    masks = {"public.person.email": "hash", "public.person.p": "null"}
    assert table_masks.read(staging_of(house(root))) == masks
    shutil.rmtree(root)
    with pytest.raises(
        InvalidArgumentsError, match=r"which is new, does not have: public\.person\.email=hash, .*\.p=null"
    ) as caught:
        begin(house(root))
    assert not root.exists()
    assert caught.value.exit_code == 1
    assert caught.value.hint == (
        "start run with --mask public.person.email=hash --mask public.person.p=null; or to show the values from now on, with"
        " --mask public.person.email=off --mask public.person.p=off"
    )
    with pytest.raises(InvalidArgumentsError, match=r"does not have: public\.person\.p=null"):
        begin(house(root, email="null"))
    begin(house(root, email="null", p="off"))
    assert table_masks.read(staging_of(house(root))) == {"public.person.email": "null"}
    settle(house(root))
    settle(house(root, email="off"))
    settle(house(root))
    shutil.rmtree(root)
    begin(house(root))


def test_an_older_copy_of_a_warehouse_has_no_fewer_masks(root: Path) -> None:
    settle(house(root, phone="null"))
    masks_path(root).unlink()
    for made in (house(root), Warehouse.existing(root)):
        with pytest.raises(InvalidArgumentsError, match=r"-staging has fed had masks that \S+ does not have"):
            settle(made)
    assert not masks_path(root).exists()
    settle(house(root, phone="null"))


def test_a_mask_that_was_taken_back_just_before_a_kill(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warehouse does not know it any more, and the next start need not name it."""
    settle(house(root, phone="null"))
    change = mask_settings._change

    def killed(made: Warehouse, found: Mapping[str, Any], before: Mapping[str, str], lsns: Mapping[Table, int]) -> None:
        change(made, found, before, lsns)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mask_settings, "_change", killed)
        with pytest.raises(KeyboardInterrupt):
            settle(house(root, phone="off"))
    settle(house(root))
    assert table_masks.read(staging_of(house(root))) == {}


def test_a_log_without_this_record_gets_it(root: Path) -> None:
    """An older cdcpipe did not write it; and a mask that could not be noted is not in it."""
    settle(house(root, phone="null"))
    path = staging_of(house(root)) / "masks.json"
    path.unlink()
    settle(house(root))
    assert table_masks.read(path.parent) == {"public.person.phone": "null"}
    with pytest.raises(WarehouseError, match="can't be changed"):
        settle(house(root, email="hash"))
    assert table_masks.read(path.parent) == {"public.person.phone": "null"}
    settle(house(root))


@pytest.mark.parametrize(
    ("text", "error"), [("{", DamagedFileError), ('{"version": 1}', StagingError), ('{"version": 2, "masks": {}}', StagingError)]
)
def test_a_record_in_the_log_that_tells_nothing_is_not_taken_for_none(root: Path, text: str, error: type[Exception]) -> None:
    (staging_of(house(root)) / "masks.json").write_text(text)
    with pytest.raises(error):
        settle(house(root))


def test_another_warehouse_needs_the_masks_of_this_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(Warehouse(root, "delta", masks={"public.p*.ssn": "hash"}))
    kept = "each another one, and the masks of this one: --mask 'public.p*.ssn=hash')"
    monkeypatch.setenv(KEY_VARIABLE, KEY + "!")
    with pytest.raises(WarehouseError, match="is not the key") as caught:
        settle(house(root))
    assert kept in (caught.value.hint or "")
    with pytest.raises(InvalidArgumentsError, match="not parquet") as refused:
        Warehouse(root, "parquet").check_choices(IDENTITY)
    assert kept in (refused.value.hint or "")
