"""Slot, staging directory and warehouse that do not belong together are refused, and nothing is changed."""

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdcpipe.doctor import server_checks
from cdcpipe.doctor.facts import Facts
from cdcpipe.doctor.findings import Finding, named
from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from cdcpipe.lsn import format_lsn
from cdcpipe.pgoutput.messages import Insert
from cdcpipe.replication.slots import Slot
from spark_sink.doctor import belonging as doctor
from spark_sink.files.local import read_json, write_json
from spark_sink.schema.table import Table
from spark_sink.staging import account, copied, recorded_gap, table_masks
from spark_sink.staging.gap import Gap
from spark_sink.staging.lock import make_root
from spark_sink.staging.log import Epoch, Position, StagingError, has_log
from spark_sink.staging.readers import read_readers, reader_place, register_reader, remove_consumed
from spark_sink.warehouse import belonging
from spark_sink.warehouse.belonging import check_belonging, copied_lsn, fed_tables, keep_segments, record_staging, register_tables
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.initial_copy import is_due, path_in
from spark_sink.warehouse.mask_settings import check_kept
from spark_sink.warehouse.reached import reached_lsn
from spark_sink.warehouse.warehouse import Warehouse
from support.descriptions import ID, version
from support.doctor_facts import ASKED, NEW, facts, server, slot
from support.pgoutput_build import build
from support.segments import Log, describe_epoch, relation
from support.small_pipeline import make_pipeline
from support.staged import make_epoch


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Return a directory with ``staging`` and ``warehouse``, which belong together."""
    return make_pipeline(tmp_path)


def check(staging: Path, warehouse: Path, slot: str = "s", **options: bool) -> None:
    check_belonging(Warehouse(warehouse, "delta"), staging, slot, **options)


def test_what_belongs_together_is_accepted(made: Path) -> None:
    check(made / "staging", made / "warehouse")
    check(made / "new/staging", made / "new/warehouse", "another")
    assert not (made / "new").exists()


@pytest.mark.parametrize(
    ("staging", "warehouse", "message"),
    [
        ("staging", "staging", r"--warehouse .*staging is a staging directory"),
        ("warehouse", "warehouse", r"--staging .*warehouse is a warehouse"),
        ("warehouse", "staging", r"--staging .*warehouse is a warehouse"),
        ("new", "new", "the same directory"),
        ("new", "other/../new", "the same directory"),
        ("new/changelog/staging", "new", "in the warehouse"),
        ("new/_cdcpipe", "new", "in the warehouse"),
    ],
)
def test_directories_for_two_purposes_are_refused(made: Path, staging: str, warehouse: str, message: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=message) as caught:
        check(made / staging, made / warehouse)
    assert caught.value.hint


def test_a_staging_directory_beside_the_tables_is_accepted(made: Path) -> None:
    check(made / "new/staging", made / "new")


@pytest.mark.parametrize("name", ["stagign", "empty"])
def test_a_misspelt_staging_directory_is_refused(made: Path, name: str) -> None:
    (made / "empty").mkdir()
    with pytest.raises(InvalidArgumentsError, match=rf"come from the log in {made}/staging; {made}/{name} has no log") as caught:
        check(made / name, made / "warehouse")
    assert f"use --staging {made}/staging" in (caught.value.hint or "")


def test_a_log_that_ends_before_the_tables_is_refused_while_the_other_is_there(made: Path) -> None:
    """The tables went on with another log, and the first one is given again."""
    log = Log(made / "older")
    log.segment([build(Insert(None, 1, (b"1",)))], before=[relation(1, "fruit", ("id", 23))])
    with pytest.raises(InvalidArgumentsError, match=r"ends at .*, before the tables"):
        check(made / "older", made / "warehouse")
    shutil.rmtree(made / "staging")
    check(made / "older", made / "warehouse")  # the launcher finds the gap, if there is one


def test_a_staging_directory_that_was_moved_or_lost_is_accepted(made: Path) -> None:
    (made / "staging").rename(made / "moved")
    check(made / "moved", made / "warehouse")
    check(made / "anew", made / "warehouse")


def test_the_former_place_of_a_move_that_cannot_be_read_is_named_with_the_way_on(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start named a place that is not on the command line."""
    (made / "staging").rename(made / "moved")

    def refused(root: Path) -> bool:
        if root == made / "staging":
            raise PermissionError(errno.EACCES, "Permission denied", str(root))
        return has_log(root)

    monkeypatch.setattr(belonging, "has_log", refused)
    with pytest.raises(StagingError, match=rf"come from the log in {made}/staging, which can't be read: .*denied") as caught:
        check(made / "moved", made / "warehouse")
    assert f"delete the key staging in {made}/warehouse/_cdcpipe/warehouse.json" in (caught.value.hint or "")
    identity = made / "warehouse/_cdcpipe/warehouse.json"
    write_json(identity, {name: value for name, value in (read_json(identity) or {}).items() if name != "staging"})
    check(made / "moved", made / "warehouse")

    register_reader(made / "moved", "tables", doctor_position(made), "unknown://bucket/shop")
    with pytest.raises(WarehouseError, match=r"the tables in unknown://bucket/shop, which can't be read: ") as caught:
        check(made / "moved", made / "warehouse")
    assert f"delete the key place in {made}/moved/readers/tables.json" in (caught.value.hint or "")
    register_reader(made / "moved", "tables", doctor_position(made))
    check(made / "moved", made / "warehouse")


def test_a_copy_of_the_staging_directory_is_accepted(made: Path) -> None:
    shutil.copytree(made / "staging", made / "copy")
    check(made / "copy", made / "warehouse")


def test_a_misspelt_warehouse_is_refused(made: Path) -> None:
    with pytest.raises(InvalidArgumentsError, match=rf"belongs to the tables in {made}/warehouse; .*, which is new") as caught:
        check(made / "staging", made / "warehose")
    assert f"use --warehouse {made}/warehouse" in (caught.value.hint or "")
    assert "add --snapshot initial" in (caught.value.hint or "")
    check(made / "staging", made / "new", begins_anew=True)
    Warehouse(made / "new", "delta").open(Epoch(1, "7123456789", 1, "db", "s", ("p",), {}, 0))  # a first run that was killed
    check(made / "staging", made / "new", begins_anew=True)


def test_a_copy_of_the_warehouse_is_refused_while_the_first_one_is_there(made: Path) -> None:
    shutil.copytree(made / "warehouse", made / "copy")
    for begins_anew in (False, True):
        with pytest.raises(InvalidArgumentsError, match="belongs to the tables in") as caught:
            check(made / "staging", made / "copy", begins_anew=begins_anew)
        assert "move the former one away" in (caught.value.hint or "")
    shutil.rmtree(made / "warehouse")
    check(made / "staging", made / "copy")


def test_a_warehouse_that_has_another_log_now_is_no_obstacle(made: Path) -> None:
    record_staging(Warehouse.existing(made / "warehouse"), made / "other")
    check(made / "staging", made / "new")


def test_a_log_of_an_older_version_does_not_know_its_warehouse(made: Path) -> None:
    register_reader(made / "staging", "tables", doctor_position(made))
    assert reader_place(made / "staging", "tables") is None
    check(made / "staging", made / "new")


def doctor_position(made: Path):
    position = Warehouse.existing(made / "warehouse").source().position
    assert position is not None
    return position


@pytest.mark.parametrize(("staging", "warehouse"), [("staging", "warehouse"), ("staging", "new"), ("new", "warehouse")])
def test_another_slot_is_refused(made: Path, staging: str, warehouse: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=r"'s'.*'two'") as caught:
        check(made / staging, made / warehouse, "two")
    assert caught.value.hint


@pytest.mark.parametrize("options", [{"format": "parquet"}, {"types": "native"}])
def test_other_choices_are_refused(made: Path, options: dict[str, str]) -> None:
    house = Warehouse(made / "warehouse", **({"format": "delta"} | options))
    with pytest.raises(InvalidArgumentsError, match="not"):
        check_belonging(house, made / "staging", "s")


def test_a_log_that_has_lost_its_epochs_is_refused(made: Path) -> None:
    (made / "staging/known.json").write_text('{"lsn": "0/500"}')
    shutil.rmtree(made / "staging/000001")
    for staging in ("staging", "new"):  # the warehouse records the one that is damaged
        with pytest.raises(CdcpipeError, match="has lost the directories of its epochs") as caught:
            check(made / staging, made / "warehouse")
        assert f"move everything but masks.json out of {made}/staging, and start run as before" in (caught.value.hint or "")
    shutil.move(made / "staging", made / "elsewhere")
    (made / "staging").mkdir()
    table_masks.record(made / "staging", {"public.person.email": "hash"}, None)  # as the hint says
    for staging in ("staging", "new"):
        check(made / staging, made / "warehouse")
    with pytest.raises(InvalidArgumentsError, match=r"had masks that \S+ does not have: public\.person\.email=hash"):
        check_kept(Warehouse.existing(made / "warehouse"), made / "staging")


def test_the_doctor_says_the_same(made: Path) -> None:
    (good,) = doctor.together(made / "warehouse", "delta", made / "staging", "s")
    assert (good.level, good.message) == ("ok", f"{made}/warehouse and {made}/staging belong together")
    (bad,) = doctor.together(made / "warehouse", "delta", made / "stagign", "s")
    assert bad.level == "error"
    assert f"use --staging {made}/staging" in (bad.fix or "")
    (new,) = doctor.together(made / "new", "delta", made / "new-staging", "s")
    assert new.message.endswith("can be used together")


def test_the_doctor_reports_the_rest_where_it_may_read_nothing(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline has another user: there was an unexpected PermissionError, and no report."""

    def refuse(path: Path, *_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("spark_sink.files.local.open_file", refuse)
    staging, root = made / "staging", made / "warehouse"
    assert list(doctor.together(root, "delta", staging, "s")) == list(doctor.gone_back(staging)) == []
    assert list(doctor.begin(root, "delta", {"slot_exists": True}, creates_slot=False, snapshot=None)) == []
    known = doctor.begun(staging, root, "delta")
    assert known is not None
    assert not known.is_certain


def test_the_doctor_does_not_approve_of_tables_whose_log_is_lost(made: Path) -> None:
    """It does not compare them with the slot, and run refuses to start if the slot is beyond them."""
    shutil.rmtree(made / "staging")
    (lost,) = doctor.together(made / "warehouse", "delta", made / "staging", "s")
    assert (lost.level, f"are at {doctor_position(made)}" in lost.message) == ("warning", True)
    assert "start with --on-gap resnapshot" in (lost.fix or "")
    house = Warehouse(made / "new", "delta")
    house.open(Epoch(1, "7123456789", 1, "db", "s", ("p",), {}, 0))  # a first run that was killed before its first table
    (new,) = doctor.together(made / "new", "delta", made / "new-staging", "s")
    assert new.level == "ok"


LOST = slot(wal_status="lost")


@pytest.mark.parametrize("left", ["both", "staging", "warehouse"])
@pytest.mark.parametrize(("found", "is_created"), [((), False), ((), True), ((LOST,), False)])
def test_the_doctor_has_no_slot_made_beside_a_pipeline_that_has_begun(
    made: Path, left: str, found: tuple[Slot, ...], is_created: bool
) -> None:
    """With --accept-system-id, run takes it for one that pg_upgrade took along, and changes are missing without a word."""
    asked = facts(asked=NEW if is_created else ASKED, server=server(slots=found))
    said = list(named("slot.state", server_checks.slot_state(asked)))
    for name in {"both": (), "staging": ("warehouse",), "warehouse": ("staging",)}[left]:
        shutil.rmtree(made / name)
    told = {"slot_exists": bool(found), "system_id": "7123456789"}
    known = doctor.begun(made / "staging", made / "warehouse", "delta")
    (finding,) = doctor.without_making(said, known, told)
    assert finding.level == "error"
    assert "prepare" not in finding.line
    assert finding.line.endswith("start once with -c --on-gap resnapshot, which makes the slot and copies all tables anew")
    assert list(doctor.right_server(known, "s", told)) == []
    told["system_id"] = "8"
    (finding,) = doctor.without_making(said, known, told)
    assert "start once with --accept-system-id 8 -c --on-gap resnapshot" in finding.line
    (verdict,) = doctor.right_server(known, "s", told)
    assert (verdict.level, "system id 7123456789; this server is 8" in verdict.message) == ("error", True)
    assert "start once with --accept-system-id 8 -c --on-gap resnapshot" in (verdict.fix or "")
    assert ("pg_drop_replication_slot('s')" in (verdict.fix or "")) == bool(found)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({}, ()),
        ({"timeline": 3, "confirmed_flush_lsn": "0/180"}, ()),
        ({"timeline": 2, "confirmed_flush_lsn": "0/181"}, ("slot 's' is at 0/181; the log has everything only up to 0/180",)),
        ({"timeline": 1}, ("the server is on timeline 1, but {staging} has changes of timeline 2: this server is an old primary",)),
        ({"timeline": None, "confirmed_flush_lsn": None}, ()),
    ],
)
def test_the_doctor_compares_timeline_and_slot_with_the_log(tmp_path: Path, now: dict[str, Any], expected: tuple[str, ...]) -> None:
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x140), timeline=2)
    account.record(tmp_path, 0x180, 0x140)
    known = doctor.begun(tmp_path, None, "delta")
    found = list(doctor.right_server(known, "s", {"slot_exists": True, "system_id": "7"} | now))
    assert len(found) == len(expected)
    for verdict, text in zip(found, expected, strict=True):
        assert (verdict.level, text.format(staging=tmp_path) in verdict.message) == ("error", True)


def test_the_doctor_finds_a_gap_that_refuses_every_start(tmp_path: Path) -> None:
    gap = Gap(0x120, "the server has gone back: its WAL ends at 0/120", 0.0, 0.0, is_divergence=True)
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x140))
    assert list(doctor.gone_back(tmp_path)) == []
    recorded_gap.record(tmp_path, gap)
    (found,) = doctor.gone_back(tmp_path)
    assert (found.level, "the server has gone back" in found.message) == ("error", True)
    assert "--on-gap resnapshot goes on with this server" in (found.fix or "")
    make_epoch(tmp_path, 2, 0x140, gap=gap.to_json())  # the launcher was killed before it removed the record
    assert list(doctor.gone_back(tmp_path)) == []


def test_the_doctor_says_of_a_new_pipeline_what_cdcpipe_says(tmp_path: Path) -> None:
    said = list(named("slot.state", server_checks.slot_state(facts())))
    assert doctor.begun(tmp_path / "staging", tmp_path / "warehouse", "delta") is doctor.begun(tmp_path, None, "delta") is None
    assert list(doctor.without_making(said, None, {"slot_exists": False})) == said
    assert list(doctor.right_server(None, "s", {"system_id": "8"})) == []


def test_the_doctor_knows_nothing_of_a_damaged_log(made: Path) -> None:
    """But it may have been begun, so no slot is to be made. A superuser may also hide the server's system id."""
    (made / "staging/000001/epoch.json").write_text("{")
    known = doctor.begun(made / "staging", made / "warehouse", "delta")
    assert known is not None
    assert list(doctor.right_server(known, "s", {"system_id": "8"})) == []
    assert list(doctor.right_server(replace(known, system_id="7"), "s", {"system_id": None})) == []


@pytest.mark.parametrize("damaged", ["staging/000001/epoch.json", "warehouse/_cdcpipe/warehouse.json"])
def test_the_doctor_claims_no_missing_changes_of_a_pipeline_that_it_cannot_read(made: Path, damaged: str) -> None:
    """It may be a new one. But it may also not be, so no slot is to be made."""
    if damaged.startswith("warehouse"):
        shutil.rmtree(made / "staging")
    (made / damaged).write_text("{")
    known = doctor.begun(made / "staging", made / "warehouse", "delta")

    def told(asked: Facts, *, is_there: bool) -> tuple[list[Finding], list[Finding]]:
        said = list(named("slot.state", server_checks.slot_state(asked)))
        return said, list(doctor.without_making(said, known, {"slot_exists": is_there, "system_id": "8"}))

    said, found = told(facts(asked=NEW, server=server(slots=())), is_there=False)
    assert found == said
    for asked, is_there in ((facts(server=server(slots=())), False), (facts(server=server(slots=(LOST,))), True)):
        said, found = told(asked, is_there=is_there)
        assert [(each.level, each.message, each.why) for each in found] == [(each.level, each.message, each.why) for each in said]
        assert "prepare" not in found[0].line
        assert f"{made / damaged.partition('/')[0]} cannot be read" in found[0].line


def test_the_doctor_warns_of_a_new_warehouse_for_an_old_slot(made: Path) -> None:
    def found(name: str, *, there: bool, creates: bool = False, snapshot: str | None = None) -> list[str]:
        verdicts = doctor.begin(made / name, "delta", {"slot_exists": there}, creates_slot=creates, snapshot=snapshot)
        return [each.message for each in verdicts]

    assert found("new", there=True) == ["the warehouse is new, and the slot is not"]
    assert found("new", there=True, snapshot="initial") == found("new", there=True, snapshot="never") == []
    assert found("new", there=True, creates=True) == found("new", there=False) == found("warehouse", there=True) == []


def test_a_command_that_gets_a_staging_directory_as_warehouse_says_so(made: Path) -> None:
    with pytest.raises(InvalidArgumentsError, match="is not a warehouse of cdcpipe") as caught:
        Warehouse.existing(made / "staging")
    assert "it is a staging directory" in (caught.value.hint or "")


def test_another_way_to_write_the_same_place_is_accepted(made: Path) -> None:
    (made / "link").symlink_to(made / "warehouse")
    check(made / "staging", made / "link")
    (made / "staging link").symlink_to(made / "staging")
    check(made / "staging link", made / "link")
    store = Warehouse("s3a://bucket/lake", "delta")
    for recorded, same in (("s3://bucket/lake/", True), ("s3a://bucket/lake2", False), ("/bucket/lake", False)):
        assert belonging._is_same(recorded, store) is same


@pytest.mark.parametrize(
    ("reader", "removed", "registered"),
    [
        ("1:0/9000", None, "warehouse"),  # an older copy, and the log has all that it lacks
        ("1:0/9000", "1:0/8000", "1:0/9000"),  # the log lacks some of it: the start refuses the copy
        ("1:0/100", None, "1:0/100"),
    ],
)
def test_segments_are_kept_for_an_older_copy(made: Path, reader: str, removed: str | None, registered: str) -> None:
    house, staging = Warehouse.existing(made / "warehouse"), made / "staging"
    register_reader(staging, "tables", Position.parse(reader), house.name)
    if removed is not None:
        write_json(staging / "removed.json", {"position": removed})
    keep_segments(house, staging)
    expected = house.source().position if registered == "warehouse" else Position.parse(registered)
    assert read_readers(staging) == {"tables": expected}
    assert reader_place(staging, "tables") == house.name


@pytest.mark.parametrize("is_shorter", [False, True])
def test_a_new_warehouse_keeps_the_segments_that_it_needs_after_its_copies(tmp_path: Path, is_shorter: bool) -> None:
    house, staging = Warehouse(tmp_path / "new", "delta"), tmp_path / "staging"
    make_root(staging)
    keep_segments(house, staging)
    register_tables(house, staging)
    assert read_readers(staging) == {}
    path_in(house).parent.mkdir(parents=True)
    write_json(path_in(house), {"is_complete": False})
    register_tables(house, staging)
    assert read_readers(staging) == {"tables": Position(0, 0)}
    assert reader_place(staging, "tables") == house.name
    (staging / "readers/tables.json").unlink()
    log = Log(staging)
    segments = [log.segment([relation(1, "fruit", ("id", 23))]) for _ in range(3)]
    begin = Position(0, 0)
    if is_shorter:
        begin = segments[0].end
        register_reader(staging, "audit", begin)
        remove_consumed(staging)
    register_tables(house, staging)
    register_reader(staging, "audit", segments[2].end)  # while the copies run
    assert remove_consumed(staging) == []
    assert read_readers(staging)["tables"] == begin


def test_the_log_forgets_no_segment_of_tables_that_it_does_not_know(made: Path) -> None:
    """readers/tables.json was lost, or the whole directory, and another reader is there before Spark has started."""
    house, staging = Warehouse.existing(made / "warehouse"), made / "staging"
    (staging / "readers/tables.json").unlink(missing_ok=True)
    register_tables(house, staging)
    assert read_readers(staging) == {"tables": house.source().position}
    assert reader_place(staging, "tables") == house.name


def test_copies_that_an_older_copy_of_the_warehouse_lacks(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    house, staging = Warehouse.existing(made / "warehouse"), made / "staging"
    position = house.source().position
    assert position is not None
    register_reader(staging, "tables", Position(position.epoch, position.lsn + 10), house.name)
    keep_segments(house, staging)
    assert caplog.text == ""
    copied.record(staging, position.lsn + 5)
    register_reader(staging, "tables", Position(position.epoch, position.lsn + 10), house.name)
    keep_segments(house, staging)
    assert "tables were copied since" in caplog.text


def test_how_far_the_tables_are_known_to_be_complete(made: Path) -> None:
    """A directory that lacks its newest segments, such as a copy made while a launcher wrote, does not know it."""
    house = Warehouse.existing(made / "warehouse")
    source = house.source()
    assert source.position is not None
    lsn = source.position.lsn
    assert reached_lsn(house, source) == lsn
    for end_lsn, expected in (lsn, lsn + 0x500), (lsn + 0x100, lsn):
        write_json(made / "staging/known.json", {"lsn": format_lsn(lsn + 0x500), "end": format_lsn(end_lsn)})
        assert reached_lsn(house, source) == expected


def test_the_timeline_of_the_position_is_recorded(made: Path, tmp_path: Path) -> None:
    house, staging = Warehouse(tmp_path / "other", "delta"), made / "staging"
    epoch = Epoch(3, "7", 2, "shop", "s", ("p",), {}, 0x200, timeline_began_lsn=0x150)
    log = tmp_path / "log"
    (log / "000003").mkdir(parents=True)
    (log / "000003/epoch.json").write_text(describe_epoch(0x200, timeline=2, timeline_began="0/150", token="abc"))
    house.open(epoch)

    def timeline() -> tuple[int, int]:
        tables = fed_tables(house, staging)
        assert tables is not None
        return tables.timeline, tables.timeline_began_lsn

    house.record(Position(3, 0x300))  # the log lacks the epoch
    assert timeline() == (0, 0)
    house.record(Position(3, 0x300), log)
    assert timeline() == (2, 0x150)
    house.open(epoch, ["8", "7"])  # the log has come back to its former server
    assert timeline() == (2, 0x150)
    before = read_json(house.identity_path)
    assert before is not None
    house.open(replace(epoch, system_id="8", timeline=1), ["7"])  # after pg_upgrade, whose timelines are others
    assert (timeline(), house.source().epoch_token) == ((0, 0), "abc")  # the token is the log's
    for name in "timeline", "timeline_began":  # as in a warehouse of an older version
        del before[name]
    write_json(house.identity_path, before)
    assert house.open(epoch) == Position(3, 0x300)
    assert timeline() == (0, 0)


def test_what_the_launcher_knows_of_the_tables(made: Path) -> None:
    house = Warehouse.existing(made / "warehouse")
    assert fed_tables(Warehouse(made / "new", "delta"), made / "staging") is None
    register_reader(made / "staging", "tables", Position(1, 0x9000))
    for staging, lsn in (made / "staging", 0x9000), (made / "new", 0):
        tables = fed_tables(house, staging)
        assert tables is not None
        assert (tables.name, tables.position, tables.reached_lsn) == (house.name, house.source().position, lsn)
    assert copied_lsn(house) == 0
    for name, lsns in ("a", (100, 300)), ("b", (200, 250)):
        copies = [replace(version(lsn, 0, ID), snapshot=((1, "id"),)) for lsn in lsns]
        house.write_versions(Table("public", name), [*copies, version(400, 0, ID)])
    assert copied_lsn(house) == 300


def test_tables_whose_first_copy_is_not_finished_need_the_log_since_their_oldest_copy(made: Path) -> None:
    """They have no position yet. The launcher took a new log that begins later for their first one, and they lacked the changes."""
    house, staging = Warehouse(made / "new", "delta"), made / "lost"
    house.open(Epoch(1, "7", 2, "db", "s", ("p",), {}, 0x200, timeline_began_lsn=0x150, token="abc"))
    assert fed_tables(house, staging) is doctor.begun(staging, made / "new", "delta") is None
    for name, lsns in ("a", (0x100, 0x300)), ("b", (0x280,)), ("c", ()):
        copies = [replace(version(lsn, 0, ID), snapshot=((1, "id"),)) for lsn in lsns]
        house.write_versions(Table("public", name), copies or [version(0x250, 0, ID)])
    assert doctor.begun(staging, made / "new", "delta") == doctor.Begun(house.name, "7", timeline=2)
    tables = fed_tables(house, staging)
    assert tables is not None
    assert (tables.position, tables.reached_lsn, tables.timeline, tables.epoch_token) == ((0, 0x280), 0, 2, "")
    assert tables.at == "0/280 (their oldest copy)"
    for start_lsn, removed, position in (0x290, None, (0, 0x280)), (0x280, None, None), (0x200, 0x290, (5, 0x280)):
        make_epoch(staging, 5, start_lsn)  # by `land`
        if removed is not None:
            write_json(staging / "removed.json", {"position": f"5:{format_lsn(removed)}"})
        tables = fed_tables(house, staging)
        assert (None if tables is None else tables.position) == position
        shutil.rmtree(staging)


def test_a_first_copy_goes_on_if_its_record_was_lost(tmp_path: Path) -> None:
    """Otherwise the tables that it had left would never get their rows."""
    house = Warehouse(tmp_path / "warehouse", "delta")
    assert is_due(house, None, creates_slot=True)
    house.open(Epoch(1, "7", 1, "db", "s", ("p",), {}, 0x100))
    assert not is_due(house, None, creates_slot=True)  # --snapshot never
    house.write_versions(Table("public", "fruit"), [replace(version(0x200, 0, ID), snapshot=((1, "id"),))])
    assert is_due(house, None, creates_slot=True)
    assert not is_due(house, None, creates_slot=False)
    assert not is_due(house, "never", creates_slot=True)
    house.record(Position(1, 0x300))
    assert not is_due(house, None, creates_slot=True)
