"""What two looks at the catalog tell: which tables have rows that the stream does not have."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cdcpipe.errors import CdcpipeError
from cdcpipe.lsn import LSN
from spark_sink.client.exported import SnapshotError
from spark_sink.client.prepare import Prepared
from spark_sink.files.lock import hold_alone
from spark_sink.launcher.config import LauncherConfig
from spark_sink.pipeline.epochs import take_epochs
from spark_sink.schema.names import Names, Naming
from spark_sink.schema.table import DDL, Table
from spark_sink.snapshot import copy, initial, two_looks
from spark_sink.snapshot.catalog_look import RENAMED, CatalogLook, want_deleted
from spark_sink.snapshot.homes import Homes
from spark_sink.snapshot.initial import InitialSnapshot
from spark_sink.snapshot.plan import Chunk, Plan, TablePlan
from spark_sink.snapshot.two_looks import (
    ATTACHED,
    CAME,
    CAME_BACK,
    DELETED,
    KEY,
    MORE_COLUMNS,
    MORE_OPERATIONS,
    MORE_ROWS,
    NOT_COPIED,
    REPLACED,
    REWRITTEN,
    Need,
    compare,
    gone,
    seen,
    undecided,
)
from spark_sink.staging import account
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Epoch, Position, list_epochs
from spark_sink.staging.readers import remove_epoch
from spark_sink.staging.writer import StagingWriter
from spark_sink.warehouse import landed_snapshots
from spark_sink.warehouse.appends import append_name
from spark_sink.warehouse.belonging import record_staging
from spark_sink.warehouse.errors import WarehouseError
from spark_sink.warehouse.initial_copy import is_begun, is_unfinished
from spark_sink.warehouse.last_look import Seen, follow, read, unpublished, write
from spark_sink.warehouse.wanted_copies import MASKS_CHANGED, settle, waiting, want_copy
from spark_sink.warehouse.warehouse import Warehouse
from support.descriptions import ID, version
from support.segments import describe_epoch, relation
from support.staged import make_epoch

EPOCH = Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0)
T = Table("public", "t")


def part(relation_id: int = 100, file: int = 1, definition: str = "a", has_rows: bool | None = None) -> dict[str, Any]:
    return {
        "relation_id": relation_id,
        "file": file,
        "definition": definition,
        "is_attached": has_rows is not None,
        "has_rows": has_rows,
    }


def table(name: str = "t", **changes: Any) -> dict[str, Any]:
    found = {
        "schema": "public",
        "name": name,
        "relation_id": 100,
        "replica_identity": "d",
        "primary_key": ["id"],
        "columns": [{"name": "id"}],
    }
    return found | {"published_by": [7], "parts": [part()], "operations": ["insert", "update"]} | changes


def found(*tables: dict[str, Any], lsn: int = 200, system_id: str = "7123") -> Prepared:
    return Prepared(180000, system_id, 1, "shop", LSN(lsn), LSN(0), tables)


def not_keyed(_: Table) -> bool:
    return False


@pytest.fixture
def homes(tmp_path: Path) -> Homes:
    """The tables of an empty warehouse."""
    return Homes(Warehouse(tmp_path, "delta"))


BEFORE = seen(found(table(), lsn=100))


@pytest.mark.parametrize(
    ("now", "needs"),
    [
        (table(), []),
        (table("u"), [Need(Table("public", "u"), 200, CAME)]),
        (table("without_columns", columns=[]), []),
        (table(relation_id=101), [Need(T, 200, REPLACED)]),
        (table(published_by=[8]), [Need(T, 200, CAME_BACK)]),
        (table(published_by=[7, 8]), []),
        (table(operations=["delete", "insert", "update"]), [Need(T, 200, MORE_OPERATIONS)]),
        (table(operations=["insert"]), []),
        (table(operations=None), []),
        (table(parts=[part(file=2, definition="b")]), [Need(T, 200, REWRITTEN)]),
        # VACUUM FULL, or TRUNCATE.
        (table(parts=[part(file=2)]), []),
        # ADD COLUMN with a constant.
        (table(parts=[part(definition="b")]), []),
        (table(parts=[part(), part(101, has_rows=True)]), [Need(T, 200, ATTACHED)]),
        (table(parts=[part(), part(101, has_rows=False)]), []),
        (table(parts=[part(), part(101)]), []),
        # It was unlogged, and made by CREATE TABLE … PARTITION OF.
        (table(parts=[part(), part(101, 7) | {"has_rows": True}]), [Need(T, 200, ATTACHED)]),
        (table(parts=[part() | {"has_rows": True}]), []),
        (table(parts=[part(file=0)]), []),
        (table(parts=[]), []),
        (
            table(published_by=[9], parts=[part(file=2, definition="b"), part(101, has_rows=True)]),
            [Need(T, 200, CAME_BACK), Need(T, 200, REWRITTEN), Need(T, 200, ATTACHED)],
        ),
    ],
)
def test_what_two_looks_tell(now: dict[str, Any], needs: list[Need], homes: Homes) -> None:
    assert compare(BEFORE, found(now), not_keyed, homes, {}) == needs


EVERYTHING = {"operations": ["insert", "update", "delete", "truncate"]}


@pytest.mark.parametrize(
    ("then", "now", "reasons"),
    [
        ({"filters": ["insert a"]}, {"filters": ["insert a"]}, []),
        # Something publishes it without a filter, or with another one, also beside what publishes it already.
        ({"filters": ["insert a"]}, {"filters": []}, [MORE_ROWS]),
        ({"filters": ["insert a"]}, {"filters": [], "published_by": [7, 8]}, [MORE_ROWS]),
        ({"filters": ["insert a"]}, {"filters": ["insert b"]}, [MORE_ROWS]),
        # No INSERT is published any more.
        ({"filters": ["insert a"], "operations": ["insert", "truncate"]}, {"filters": [], "operations": ["truncate"]}, []),
        ({"filters": ["insert a"]}, {"filters": ["insert a", "insert b"], "published_by": [7, 8]}, [MORE_ROWS]),
        ({"filters": ["insert a", "insert b"]}, {"filters": ["insert b"]}, []),
        ({"filters": []}, {"filters": ["insert a"]}, []),
        # Each operation counts for itself.
        ({"filters": ["insert a", "delete a"]}, {"filters": ["insert a"]}, []),
        ({"filters": ["insert a", "delete a"], **EVERYTHING}, {"filters": ["insert a"], **EVERYTHING}, [MORE_ROWS]),
        ({"filters": ["update a"], **EVERYTHING}, {"filters": [], **EVERYTHING}, [MORE_ROWS]),
        ({"filters": ["update a"], **EVERYTHING}, {"filters": ["insert a", "update a"], **EVERYTHING}, []),
        # DROP EXPRESSION, publish_generated_columns, another list of columns.
        ({"unpublished": [2, 4]}, {"unpublished": [2]}, [MORE_COLUMNS]),
        ({"unpublished": [2]}, {"unpublished": []}, [MORE_COLUMNS]),
        # DROP COLUMN; ADD COLUMN of a column that is not published; ADD COLUMN.
        ({"unpublished": [2]}, {"unpublished": [1, 2, 3]}, []),
        ({"unpublished": []}, {"unpublished": []}, []),
        # A record of an older version, and a look that did not ask.
        ({}, {"filters": ["insert a"], "unpublished": [2]}, []),
        ({}, {"filters": [], "unpublished": []}, []),
        ({"filters": ["insert a"], "unpublished": [2]}, {}, []),
    ],
)
def test_rows_and_columns_that_were_not_published(
    tmp_path: Path, then: dict[str, Any], now: dict[str, Any], reasons: list[str]
) -> None:
    house = Warehouse(tmp_path, "delta")
    house.open(EPOCH)
    write(house, seen(found(table(**then), lsn=100)))
    before = read(house)
    assert before == seen(found(table(**then), lsn=100))
    assert compare(before, found(table(**now)), not_keyed, Homes(house), {}) == [Need(T, 200, each) for each in reasons]


def test_the_digests_of_an_older_version_are_not_compared(tmp_path: Path) -> None:
    """All tables with row filters would be copied after an upgrade of cdcpipe."""
    house, path = Warehouse(tmp_path, "delta"), tmp_path / "_cdcpipe/published.json"
    house.open(EPOCH)
    write(house, seen(found(table(filters=["insert new"]), lsn=100)))
    path.write_text(path.read_text().replace("filter_digests", "row_filters").replace("insert new", "insert old"))
    assert compare(read(house), found(table(filters=["insert new"])), not_keyed, Homes(house), {}) == []


def test_pg_upgrade_keeps_the_numbers_of_columns_but_not_the_digests_of_filters(tmp_path: Path) -> None:
    house, staging = Warehouse(tmp_path / "warehouse", "delta"), tmp_path / "staging"
    make_epoch(staging, 1, 0x100, (0x100, 0x200), system_id="7")
    house.open(list_epochs(staging)[0])
    write(house, seen(found(table(filters=["a"], unpublished=[2]), lsn=100, system_id="7")))
    make_epoch(staging, 2, 0x200, system_id="8", former_system_id="7")
    followed = follow(house, list_epochs(staging))
    now = found(table(published_by=[9], filters=["b"], unpublished=[]), system_id="8")
    assert compare(followed, now, not_keyed, Homes(house), {}) == [Need(T, 200, MORE_COLUMNS)]


def test_a_copy_from_before_the_first_look_at_a_table_does_not_settle_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition that was attached after this copy was in the record of this look, and taken for copied."""
    house, staging = Warehouse(tmp_path / "warehouse", "delta"), tmp_path / "staging"
    make_epoch(staging, 1, 0, system_id="7123")
    house.open(list_epochs(staging)[0])
    write(house, seen(found(table("old", relation_id=50), lsn=100)))
    house.write_versions(T, [replace(version(150, 0, ID, 100), snapshot=((1, "id"),))])
    root = table(parts=[part(101), part(102, has_rows=True)])
    monkeypatch.setattr(two_looks, "look", lambda *_: found(table("old", relation_id=50), root))
    assert CatalogLook(LauncherConfig("slot", staging), house).look(lambda: False)
    assert [(each.table, each.why, each.reasons[0].since_lsn) for each in waiting(house)] == [(T, CAME, 200)]
    house.write_versions(T, [replace(version(200, 0, ID, 100), snapshot=((1, "id"),))])
    assert CatalogLook(LauncherConfig("slot", staging), house).look(lambda: False)
    assert waiting(house) == []


def test_a_table_that_has_got_a_key_in_the_publication_of_those_without_one(
    house: Warehouse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its replica would never get an UPDATE or a DELETE, and nothing else says so."""
    staging = house.root / "staging"
    make_epoch(staging, 1, 0, system_id="7123")
    server: list[Prepared] = []
    monkeypatch.setattr(two_looks, "look", lambda *_: server[-1])

    def said(catalog: CatalogLook, **changes: Any) -> list[str]:
        server.append(found(table("log", **changes)))
        caplog.clear()
        assert catalog.look(lambda: False)
        return [each for each in caplog.messages if "neither UPDATE nor DELETE" in each]

    keyless = {"primary_key": []}
    inserts = {"operations": ["insert", "truncate"], "identity": ["id"], "unpublished_generated": []}
    catalog = CatalogLook(LauncherConfig("slot", staging, ("shop", "shop_keyless")), house)
    assert said(catalog, **keyless, **inserts) == []
    [text] = said(catalog, **inserts)
    assert "table public.log has a key, and its publication (shop_keyless)" in text
    assert "gets none: move it to the other publication (shop)" in text
    assert said(catalog, **inserts) == []
    assert said(CatalogLook(catalog._config, house)) == []
    # With REPLICA IDENTITY NOTHING, the server would refuse UPDATE and DELETE there.
    # And so it would with REPLICA IDENTITY FULL, if the table has generated columns.
    for unusable in {"identity": []}, {"replica_identity": "f", "identity": [], "unpublished_generated": ["g"]}:
        [text] = said(CatalogLook(catalog._config, house), **inserts | unusable)
        assert "gets none: give it a replica identity" in text
    # A publication of one's own is what its owner wants.
    assert said(CatalogLook(LauncherConfig("slot", staging, ("shop",)), house), **inserts) == []


@pytest.mark.parametrize(("reason", "is_named"), [(MASKS_CHANGED, True), (REWRITTEN, False)])
def test_a_table_that_has_left_keeps_what_a_new_mask_hides(
    house: Warehouse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str, *, is_named: bool
) -> None:
    """Nothing else says that the mask is not in force there: the table waits for nothing any more."""
    staging = house.root / "staging"
    make_epoch(staging, 1, 0, system_id="7123")
    want_copy(house, A, 151, reason)
    monkeypatch.setattr(two_looks, "look", lambda *_: found(table("b", relation_id=101), lsn=200))
    assert CatalogLook(LauncherConfig("slot", staging), house).look(lambda: False)
    assert waiting(house) == []
    assert ("table public.a gets no copy with the new masks" in caplog.text) is is_named


@pytest.mark.parametrize("is_open", [True, False])
def test_a_look_that_lacks_a_table_of_the_initial_snapshot_does_not_have_it_copied_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_open: bool
) -> None:
    """A run that was killed has left a record. The next run takes another snapshot, which has a table that came since."""
    house, staging = Warehouse(tmp_path / "warehouse", "delta"), tmp_path / "staging"
    make_epoch(staging, 1, 0, system_id="7123")
    [epoch] = list_epochs(staging)
    if is_open:
        house.open(epoch)
    write(house, seen(found(table("old", relation_id=50), lsn=100)))
    server = found(table("old", relation_id=50), table(), lsn=150)
    monkeypatch.setattr(two_looks, "look", lambda *_: server)
    monkeypatch.setattr(initial, "slot_exists", lambda *_: True)
    records = []
    monkeypatch.setattr(
        copy, "ExportedSnapshot", lambda *_, **__: records.append(read(house)) or SimpleNamespace(is_left_over=False)
    )
    config = LauncherConfig("slot", staging, create_slot=True)
    InitialSnapshot(config, house, "initial").prepare(lambda: False)
    assert read(house) == (replace(seen(server), epoch=1) if is_open else None)
    if is_open:  # the look comes before the snapshot
        assert records == [replace(seen(server), epoch=1)]
    server = replace(server, wal_lsn=LSN(200))
    if not is_open:
        two_looks.begin(house, config, server, lambda: False)
        house.open(epoch)
    house.write_versions(T, [replace(version(160, 0, ID, 100), snapshot=((1, "id"),))])
    server = replace(server, wal_lsn=LSN(300))
    assert CatalogLook(config, house).look(lambda: False)
    assert waiting(house) == []


def test_a_start_beside_a_run_that_copies_keeps_the_first_look_of_that_run(tmp_path: Path) -> None:
    """That run may have only begun to start Spark: it has no warehouse yet. Later looks are compared with the first one."""
    house, staging = Warehouse(tmp_path / "warehouse", "delta"), tmp_path / "staging"
    first = seen(found(table("old", relation_id=50), lsn=100))
    write(house, first)
    held = house.local_root(staging) / "_cdcpipe/snapshot_export/lock"
    held.parent.mkdir(parents=True)
    snapshot = InitialSnapshot(LauncherConfig("slot", staging, create_slot=True), house)
    snapshot._note(is_complete=False)
    with hold_alone(held), pytest.raises(SnapshotError, match="another process holds a snapshot"):
        snapshot.prepare(lambda: False)
    assert read(house) == first


@pytest.mark.parametrize("is_held", [True, False])
def test_of_two_first_starts_at_one_moment_the_later_one_leaves_the_record_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_held: bool
) -> None:
    """It took that record back, or wrote its own. If the other one was killed, no run copied the tables that it had left."""
    house = Warehouse(tmp_path / "warehouse", "delta")
    earlier, later = (
        InitialSnapshot(LauncherConfig(slot, tmp_path / slot, create_slot=True), house) for slot in ("earlier", "later")
    )
    monkeypatch.setattr(initial, "slot_exists", lambda *_: False)
    monkeypatch.setattr(later, "_begins", lambda: earlier._note(is_complete=False) or True)
    held = house.local_root(tmp_path) / "_cdcpipe/snapshot_export/lock"
    held.parent.mkdir(parents=True)
    text = "another process holds a snapshot" if is_held else "another run has just begun"
    with hold_alone(held) if is_held else nullcontext(), pytest.raises(CdcpipeError, match=text):
        later.prepare(lambda: False)
    assert json.loads((house.root / "_cdcpipe/snapshot.json").read_text())["slot"] == "earlier"


def test_an_unlogged_partition_that_becomes_logged(homes: Homes) -> None:
    before = seen(found(table(parts=[part(), part(101, 0)]), lsn=100))
    for now, needs in (
        (part(101, 0), []),
        (part(101, 0) | {"has_rows": True}, []),
        (part(101, 7) | {"has_rows": True}, [Need(T, 200, ATTACHED)]),
        # A crash of the server, or a TRUNCATE, has emptied it meanwhile.
        (part(101, 7) | {"has_rows": False}, [Need(T, 200, ATTACHED)]),
    ):
        assert compare(before, found(table(parts=[part(), now])), not_keyed, homes, {}) == needs


def test_a_partition_attached_between_the_snapshot_and_the_first_look_is_found(tmp_path: Path) -> None:
    """The copy lacks its rows. The look came before the copy, and had recorded the partition as known."""
    house, staging = Warehouse(tmp_path / "warehouse", "delta"), tmp_path / "staging"
    house.open(EPOCH)
    root = table(parts=[part(100), part(101), part(102, has_rows=True)])
    write(house, seen(found(root, table("other", relation_id=200, parts=[part(200), part(201)]), lsn=100)))
    chunks = tuple(Chunk(number, "public.t", 1, 0, None, 0) for number in (100, 101))
    plan = Plan((TablePlan(relation(100, "t", ("id", 23)), (1,), ("id",), None, chunks, 0),), is_utf8=True)
    made = InitialSnapshot(LauncherConfig("slot", staging), house)
    assert made._choose(plan, Homes(house)) == [*plan.tables]
    before = read(house)
    assert before is not None
    assert {number: [*(each.parts or ())] for number, each in before.tables.items()} == {100: [100, 101], 200: [200, 201]}
    assert compare(before, found(root), not_keyed, Homes(house), {}) == [Need(T, 200, ATTACHED)]


def test_a_table_that_gets_a_key(homes: Homes) -> None:
    keyless = seen(found(table(primary_key=[]), lsn=100))
    assert compare(keyless, found(table()), not_keyed, homes, {}) == [Need(T, 200, KEY)]
    assert compare(keyless, found(table(primary_key=[], replica_identity="i")), not_keyed, homes, {}) == [Need(T, 200, KEY)]
    assert compare(keyless, found(table()), lambda _: True, homes, {}) == []  # the stream has told it
    assert compare(keyless, found(table(primary_key=[])), not_keyed, homes, {}) == []
    assert compare(BEFORE, found(table(primary_key=[])), not_keyed, homes, {}) == []


def test_the_first_look_only_records(homes: Homes) -> None:
    """So does the first look at another server that the record does not follow, and one after a record without parts."""
    assert compare(None, found(table()), not_keyed, homes, {}) == []
    assert compare(BEFORE, found(table("u"), system_id="7999"), not_keyed, homes, {}) == []
    without = seen(found({name: value for name, value in table().items() if name not in ("parts", "published_by")}))
    assert compare(without, found(table(parts=[part(101, 2, "b", has_rows=True)], published_by=[8])), not_keyed, homes, {}) == []


def test_the_catalog_of_an_old_primary_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house, staging = Warehouse(tmp_path / "warehouse", "delta"), tmp_path / "staging"
    make_epoch(staging, 1, 0x100, system_id="7123", timeline=2)
    house.open(list_epochs(staging)[0])
    server = found(table())
    monkeypatch.setattr(two_looks, "look", lambda *_: server)
    catalog = CatalogLook(LauncherConfig("slot", staging), house)
    assert not catalog.look(lambda: False)
    assert read(house) is None
    server = replace(server, timeline=2)
    assert catalog.look(lambda: False)


GAP = Gap(0x100, "the slot is a new one", since=1.0, found=2.0)


@pytest.mark.parametrize(("gap", "is_found"), [(None, True), (GAP, False)], ids=["with the slot", "without the slot"])
@pytest.mark.parametrize("is_passed", [False, True], ids=["", "after the tables have passed the epoch"])
def test_a_table_that_came_before_pg_upgrade_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap: Gap | None, is_found: bool, is_passed: bool
) -> None:
    """It came after the last look. After a gap all tables are copied, and another server may have other OIDs."""
    house, staging = Warehouse(tmp_path / "warehouse", "delta"), tmp_path / "staging"
    make_epoch(staging, 1, 0x100, (0x100, 0x200), system_id="7")
    house.open(list_epochs(staging)[0])
    write(house, seen(found(table(), lsn=100, system_id="7")))
    came = table("basket", relation_id=101, parts=[part(101)], published_by=[9])
    server = found(table(published_by=[9]), came, system_id="8")
    monkeypatch.setattr(two_looks, "look", lambda *_: server)
    catalog = CatalogLook(LauncherConfig("slot", staging), house)

    assert not catalog.look(lambda: False)  # the launcher has not accepted this server yet
    assert (waiting(house), read(house)) == ([], seen(found(table(), lsn=100, system_id="7")))
    make_epoch(staging, 2, 0x200, system_id="8", former_system_id="7", gap=None if gap is None else gap.to_json())
    if is_passed:
        take_epochs(house, staging)
        remove_epoch(staging, 1)
        (staging / "000002/epoch.json").write_text(describe_epoch(0x200, system_id="8"))
    assert catalog.look(lambda: False)
    assert [(str(each.table), each.why) for each in waiting(house)] == ([("public.basket", CAME)] if is_found else [])
    assert catalog.look(lambda: False)
    assert read(house) == replace(seen(server, homes=Homes(house)), epoch=2)


@pytest.mark.parametrize(
    ("later", "names"),
    [
        ([["p", "q"], ["p", "q", "r"]], []),
        ([["q", "p"]], []),
        ([["r"]], []),  # it was renamed, or the other one is not wanted any more
        ([["p"]], []),
        ([["p"], ["q", "p"]], [MORE_OPERATIONS]),
        ([["p"], ["p"], ["p", "q"]], [MORE_OPERATIONS]),
        ([["r"], ["p", "q"]], [MORE_OPERATIONS]),
    ],
)
@pytest.mark.parametrize("is_passed", [False, True])
def test_changes_that_no_launcher_has_asked_for_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: list[list[str]], names: list[str], is_passed: bool
) -> None:
    """A start left a publication out, and no look came in between: the two looks saw the same."""
    house, config = Warehouse(tmp_path / "warehouse", "delta"), LauncherConfig("s", tmp_path / "staging")
    writer = StagingWriter(config.staging, slot="s")

    def begin(publications: list[str]) -> None:
        writer.begin_epoch(Epoch(1, "7", 1, "shop", "s", tuple(publications), {}, 0x100))

    monkeypatch.setattr(two_looks, "look", lambda *_: found(table(), system_id="7"))
    catalog = CatalogLook(config, house)
    with writer:
        begin(["p", "q"])
        house.open(list_epochs(config.staging)[0])
        assert catalog.look(lambda: False)
        for publications in later:
            begin(publications)
            if is_passed:  # the pipeline goes on without a look, and the log forgets what it has read
                take_epochs(house, config.staging)
                for number in range(1, list_epochs(config.staging)[-1].number):
                    remove_epoch(config.staging, number)
    for _ in range(2):
        assert catalog.look(lambda: False)
        assert [reason.text for each in waiting(house) for reason in each.reasons] == names


def test_a_look_before_the_launcher_asks_again_forgets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made while an initial snapshot goes on: it has the tables, and the log still lacks their changes."""
    house, config = Warehouse(tmp_path / "warehouse", "delta"), LauncherConfig("s", tmp_path / "staging", ("p", "q"))
    monkeypatch.setattr(two_looks, "look", lambda *_: found(table(), system_id="7"))
    catalog = CatalogLook(config, house)
    with StagingWriter(config.staging, slot="s") as writer:
        for publications, names in ((("p", "q"), []), (("p",), []), (("p", "q"), [MORE_OPERATIONS])):
            writer.begin_epoch(Epoch(1, "7", 1, "shop", "s", publications, {}, 0x100))
            house.open(list_epochs(config.staging)[-1])
            assert catalog.look(lambda: False)
            assert [reason.text for each in waiting(house) for reason in each.reasons] == names


A, B = Table("public", "a"), Table("public", "b")


@pytest.fixture
def house(tmp_path: Path) -> Warehouse:
    """A warehouse that has captured DDL, is at position 150, and has a copy of the table with the OID 100 under the name a."""
    made = Warehouse(tmp_path, "parquet")
    made.open(EPOCH)
    made.record(Position(1, 150))
    made.write_versions(A, [version(50, 0, ID, 100)])
    (made.changelog(DDL) / append_name(Position(1, 1), Position(1, 2))).mkdir(parents=True)
    return made


def look_again(house: Warehouse, before: Seen, now: Prepared) -> tuple[list[Need], Seen]:
    homes = Homes(house)
    kept = undecided(before, now, homes)
    return compare(before, now, not_keyed, homes, kept), seen(now, kept)


def test_a_table_that_was_renamed_waits_for_the_stream(house: Warehouse) -> None:
    """It is the same table, whose rows may have been rewritten meanwhile."""
    before = seen(found(table("a"), lsn=100))
    renamed = found(table("b", parts=[part(file=2, definition="b")]), lsn=200)
    needs, record = look_again(house, before, renamed)
    assert (needs, record.tables[100].table, record.tables[100].undecided_lsn) == ([], A, 200)
    write(house, record)
    assert read(house) == record
    # The stream is not there yet. Then it has told of the rename.
    assert look_again(house, record, renamed) == ([], record)
    house.write_names(Names([Naming((180, 0), 100, A, B, A)], 180, is_following=True))
    house.record(Position(1, 200))
    needs, after = look_again(house, record, renamed)
    assert needs == [Need(A, 200, REWRITTEN)]
    assert str(needs[0].table) == "public.b"
    assert look_again(house, after, renamed) == ([], after)
    # Another table under the old name: it has tables of its own.
    other = table("a", relation_id=101)
    needs, _ = look_again(house, after, replace(renamed, wal_lsn=LSN(300), tables=(*renamed.tables, other)))
    assert needs == [Need(Table("public", "a", 101), 300, CAME)]
    assert str(needs[0].table) == "public.a"


def test_a_rename_of_which_nothing_tells(house: Warehouse) -> None:
    before = seen(found(table("a"), lsn=100))
    _, record = look_again(house, before, found(table("b"), lsn=200))
    house.record(Position(1, 200))
    assert look_again(house, record, found(table("b"), lsn=300))[0] == [Need(B, 300, CAME)]
    # So it is if its changes have come already, to tables of their own.
    house.write_versions(B, [version(160, 0, ID, 100)])
    assert look_again(house, record, found(table("b"), lsn=300))[0] == [Need(B, 300, CAME)]
    house.forget(B)
    # Tables of their own are wanted, or there is no captured DDL: nothing has to be waited for.
    house.write_names(Names(is_following=False))
    assert look_again(house, before, found(table("b"), lsn=300))[0] == [Need(B, 300, CAME)]


def test_a_copy_goes_to_no_wrong_tables(house: Warehouse) -> None:
    """A table with the OID of another name, or with another OID: the stream may have told of it, but it is not there yet."""
    homes = Homes(house)
    for relation_id, name in ((100, "b"), (101, "a")):
        described = replace(relation(relation_id, name), replica_identity="d")
        with pytest.raises(SnapshotError, match=f"public.{name} is another table on the server than in the warehouse"):
            homes.check(described, 200)
        homes.check(described, 150)
    homes.check(relation(100, "a"), 200)
    # The stream has told that the table 101 was created as "a", and so goes on in these tables.
    house.write_names(Names([Naming((140, 0), 101, A, A, A)], 150, is_following=True))
    Homes(house).check(relation(101, "a"), 200)
    with pytest.raises(SnapshotError):
        Homes(house).check(relation(102, "a"), 200)
    homes.check(relation(102, "c"), 200)


def test_many_new_tables_read_the_other_tables_once(house: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    all_versions = house.all_versions
    monkeypatch.setattr(house, "all_versions", lambda: reads.append(1) or all_versions())
    new = [table(f"n{number}", relation_id=number) for number in range(200, 210)]
    assert len(look_again(house, seen(found(table("a"), lsn=100)), found(table("a"), *new, lsn=200))[0]) == 10
    assert reads == [1]


def test_an_initial_snapshot_leaves_out_what_may_have_been_renamed(house: Warehouse, tmp_path: Path) -> None:
    """It ended with the advice to wait for the stream, which comes to the tables only after it, and so did each later run."""
    write(house, seen(found(table("b"), table("new", relation_id=101), lsn=200)))
    plans = (TablePlan(relation(number, name), (1,), (), None, (), 0) for number, name in ((100, "b"), (101, "new")))
    snapshot = InitialSnapshot(LauncherConfig("slot", tmp_path / "staging"), house, "initial")
    chosen = snapshot._choose(Plan(tuple(plans), is_utf8=True), Homes(house))
    assert [each.relation.name for each in chosen] == ["new"]
    house.write_versions(Table("public", "new"), [replace(version(200, 0, ID, 101), snapshot=((1, "id"),))])
    snapshot._finish()
    assert (is_unfinished(house), waiting(house)) == (False, [])
    # The next looks wait for the stream. Then its tables, which no snapshot has, get their copy.
    before = read(house)
    assert before is not None
    now = found(table("b"), table("new", relation_id=101), lsn=210)
    needs, record = look_again(house, before, now)
    assert (needs, record.tables[100].undecided_lsn) == ([], 200)
    house.write_names(Names([Naming((180, 0), 100, A, B, A)], 180, is_following=True))
    house.record(Position(1, 200))
    assert look_again(house, record, now)[0] == [Need(A, 210, CAME)]


def test_a_snapshot_that_is_given_up_is_over(house: Warehouse, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The hint of `snapshot --table` says that --snapshot never gives it up. It stayed unfinished, and the error came again."""
    config = LauncherConfig("slot", tmp_path / "staging")
    never = InitialSnapshot(config, house, "never")
    never.prepare(lambda: False)
    never.give_up()
    assert not is_begun(house)
    InitialSnapshot(config, house)._note(is_complete=False)
    never.prepare(lambda: False)
    never.give_up()
    assert is_unfinished(house)  # there was no look yet, so nothing tells which tables lack their rows
    write(house, seen(found(table("a"), table("new", relation_id=101), table("copied", relation_id=102), lsn=200)))
    house.write_versions(Table("public", "copied"), [replace(version(200, 0, ID, 102), snapshot=((1, "id"),))])
    InitialSnapshot(config, house, "initial").give_up()
    assert is_unfinished(house)
    (house.root / "_cdcpipe/snapshot/0").mkdir(parents=True)
    left = house.root / "_cdcpipe/snapshot_export/export.json"
    left.parent.mkdir()
    left.touch()
    never.give_up()
    assert not is_unfinished(house)
    assert not left.exists()
    assert not (house.root / "_cdcpipe/snapshot").exists()
    assert [(str(each.table), each.why) for each in waiting(house)] == [(str(A), NOT_COPIED), ("public.new", NOT_COPIED)]
    assert caplog.messages == [
        "the initial snapshot is given up: tables that are not copied have only their changes, and wait for a copy"
    ]


@pytest.mark.parametrize("is_given_up", [True, False])
def test_a_first_copy_that_was_killed_at_its_end_is_one(house: Warehouse, tmp_path: Path, *, is_given_up: bool) -> None:
    """It counted as none: the table was copied a second time. The pipeline makes its replica later, without the snapshot."""
    house.write_versions(A, [replace(version(160, 0, ID, 100), snapshot=((1, "id"),))])
    (house.changelog(A) / append_name(Position(1, 150), Position(1, 160))).mkdir(parents=True)
    landed_snapshots.record_start(house, A, Position(1, 160))
    write(house, seen(found(table("a"), lsn=200)))
    snapshot = InitialSnapshot(LauncherConfig("slot", tmp_path / "staging"), house, "never" if is_given_up else "initial")
    snapshot._note(is_complete=False)
    if is_given_up:
        snapshot.give_up()
    snapshot._finish()
    assert (is_unfinished(house), landed_snapshots.unfinished(house), waiting(house)) == (False, [(A, Position(1, 160))], [])


def test_the_record_in_the_warehouse(tmp_path: Path) -> None:
    house = Warehouse(tmp_path, "delta")
    house.open(EPOCH)
    assert read(house) is None
    without = {name: value for name, value in table("Without").items() if name not in ("parts", "published_by")}
    now = seen(found(table(parts=[part(), part(101, 2, "b")]), without))
    write(house, now)
    assert read(house) == now
    write(house, replace(now, lsn=300))
    assert read(house) == replace(now, lsn=300)
    (tmp_path / "_cdcpipe/published.json").write_text("{}")
    with pytest.raises(WarehouseError, match="is damaged"):
        read(house)


def test_a_table_whose_files_were_deleted_is_copied(house: Warehouse) -> None:
    """Otherwise its next change makes it anew, without its earlier rows."""
    write(house, seen(found(table("a"), table("other", relation_id=101), lsn=140), homes=Homes(house)))
    assert read(house) == seen(found(table("a"), table("other", relation_id=101), lsn=140), homes=Homes(house))
    want_deleted(house)
    assert waiting(house) == []
    (house.root / "_cdcpipe/tables/public.a.json").unlink()
    want_deleted(house)
    assert [(each.table, each.why, each.reasons[0].since_lsn) for each in waiting(house)] == [(A, DELETED, 140)]


def test_tables_that_are_not_published_any_more(house: Warehouse) -> None:
    homes = Homes(house)
    before = seen(found(table("a"), table("never_here", relation_id=101)), homes=homes)
    renamed = found(table("b"))
    assert gone(before, renamed, homes, undecided(before, renamed, homes)) == {}  # the stream may tell it
    # It does not. So is a table that became a partition, if a partitioned one has its name and is published as its leaves.
    assert gone(before, renamed, homes, {}) == {A: B}
    assert gone(before, found(table("a", relation_id=102)), homes, {}) == {}  # another table has its name
    assert gone(before, found(table("x", relation_id=103)), homes, {}) == {A: None}
    assert gone(before, found(system_id="8"), homes, {}) == gone(None, found(), homes, {}) == {}
    house.write_names(Names([Naming((180, 0), 100, A, B, A)], 180, is_following=True))
    assert gone(before, renamed, Homes(house), {}) == {}  # its tables go on


def test_a_table_that_became_a_partition_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The partitioned table that has its name is published as its leaves. Its replica stood still, without a word."""
    house, staging = Warehouse(tmp_path / "warehouse", "delta"), tmp_path / "staging"
    make_epoch(staging, 1, 0, system_id="7123")
    house.open(list_epochs(staging)[0])
    house.write_versions(T, [version(50, 0, ID, 100)])
    write(house, seen(found(table(), lsn=100), homes=Homes(house)))
    house.record(Position(1, 130))
    monkeypatch.setattr(type(house.format), "lsn", lambda *_: 120)
    monkeypatch.setattr(two_looks, "look", lambda *_: found(table("t_p0"), lsn=140))
    catalog = CatalogLook(LauncherConfig("slot", staging), house)
    for _ in range(2):
        assert catalog.look(lambda: False)
    said = "table public.t is published as public.t_p0 now, in tables of its own: the tables of public.t get no changes from now on"
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == [said]


def test_tables_of_the_warehouse_that_were_not_published_at_the_last_look(house: Warehouse) -> None:
    """A table that came to the warehouse after the look is none of them."""

    def left() -> set[Table] | None:
        return unpublished(house, {table: house.versions(table) for table in house.tables()})

    assert left() is None
    write(house, seen(found(table("a"), lsn=140)))
    house.write_versions(Table("public", "late"), [version(141, 0, ID)])
    assert left() == set()
    write(house, seen(found(table("late", relation_id=101), lsn=150)))
    assert left() == {A}


def test_the_first_run_makes_the_first_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new warehouse, and in one of an older version; but not in one that the run is about to refuse."""
    answers: list[Any] = []

    def look(*_: Any) -> Prepared:
        answer = answers.pop()
        if isinstance(answer, Exception):
            raise answer
        return cast("Prepared", answer)

    monkeypatch.setattr(two_looks, "look", look)
    config = LauncherConfig("slot", tmp_path)
    prepared = found({name: value for name, value in table().items() if name not in ("parts", "published_by")}, lsn=100)

    new = Warehouse(tmp_path / "new", "delta")
    answers.append(found(table()))
    two_looks.begin(new, config, prepared, lambda: False)
    assert read(new) == seen(found(table()))
    two_looks.begin(new, config, prepared, lambda: False)  # asks nobody

    away = Warehouse(tmp_path / "away", "delta")
    answers.append(CdcpipeError("the server is away"))
    two_looks.begin(away, config, prepared, lambda: False)
    assert read(away) == seen(prepared)

    promoted, began = replace(prepared, timeline=2, timeline_history=((1, 0x50),)), ((1, 0x40),)
    for number, other in enumerate([{}, {"timeline": 2, "timeline_history": began}, {"system_id": "7999"}]):
        house = Warehouse(tmp_path / str(number), "delta")
        answers.append(replace(found(table()), **other))
        two_looks.begin(house, config, promoted, lambda: False)
        assert read(house) == seen(promoted)

    older = Warehouse(tmp_path / "older", "delta")
    older.open(EPOCH)
    for other in (LauncherConfig("another", tmp_path), config):
        answers[:] = [found(table())]
        two_looks.begin(older, other, prepared, lambda: False)
        assert (read(older) is None) == (other.slot == "another")


def test_a_table_that_was_changed_under_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job renames it, changes it and gives it its name back: no look sees the other name. Its replica stayed as it was."""
    house, staging = Warehouse(tmp_path / "warehouse", "delta"), tmp_path / "staging"
    make_epoch(staging, 1, 0, system_id="7123")
    house.open(list_epochs(staging)[0])
    other, swapped, load = Table("public", "other"), table("other", relation_id=200, parts=[part(200)]), Table("public", "load")
    copied = {number: replace(version(50, 0, ID, number), snapshot=((1, "id"),)) for number in (100, 200)}
    house.write_versions(T, [copied[100]])
    house.write_versions(other, [copied[200]])
    lsns = {load: 0, T: 50, other: 50}
    monkeypatch.setattr(
        type(house.format), "lsn", lambda _, path: next(lsn for name, lsn in lsns.items() if path.name == str(name))
    )
    server = found(table(), swapped, lsn=100)
    monkeypatch.setattr(two_looks, "look", lambda *_: server)
    catalog = CatalogLook(LauncherConfig("slot", staging), house)

    def looked(lsn: int) -> list[tuple[str, str, int]]:
        """Return what waits after two looks, the tables being where the first one was."""
        nonlocal server
        server = replace(server, wal_lsn=LSN(lsn))
        house.record(Position(1, lsn))
        for _ in range(2):
            assert catalog.look(lambda: False)
        return [(str(each.table), reason.text, reason.since_lsn) for each in waiting(house) for reason in each.reasons]

    assert looked(100) == []
    house.write_versions(load, [version(110, 0, ID, 100)])
    lsns[load] = 120
    assert looked(130) == [("public.t", RENAMED, 120)]
    house.write_versions(T, [copied[100], replace(copied[100], end_lsn=140)])
    assert looked(150) == []
    # The next night. The description is known, so there is no other version.
    lsns[load] = 160
    assert looked(170) == [("public.t", RENAMED, 160)]
    house.write_versions(T, [copied[100], replace(copied[100], end_lsn=180)])
    # Another table goes through the same name. Two tables swap their names and swap back.
    house.write_versions(load, [version(110, 0, ID, 100), version(190, 0, ID, 200)])
    assert looked(195) == [("public.other", RENAMED, 190), ("public.t", RENAMED, 190)]
    house.write_versions(T, [copied[100], replace(copied[100], end_lsn=196)])
    house.write_versions(other, [copied[200], replace(copied[200], end_lsn=196)])
    # The night after the other table is the first. Its description is known, so only the version of the next table tells.
    house.write_versions(load, [version(110, 0, ID, 100), version(190, 0, ID, 200), version(198, 0, ID, 100)])
    assert looked(199) == [("public.other", RENAMED, 198), ("public.t", RENAMED, 198)]
    house.write_versions(other, [copied[200], version(200, 0, ID, 100), replace(copied[200], end_lsn=201)])
    house.write_versions(T, [copied[100], version(200, 0, ID, 200)])
    lsns[T] = 202
    assert looked(210) == [("public.other", RENAMED, 202), ("public.t", RENAMED, 201)]


def test_a_look_asks_once_how_far_the_tables_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that came at different times asked for each time, and read the log's files each time."""
    house, staging = Warehouse(tmp_path / "warehouse", "delta"), tmp_path / "staging"
    make_epoch(staging, 1, 0, system_id="7123")
    house.open(list_epochs(staging)[0])
    house.record(Position(1, 200))
    record_staging(house, staging)
    catalog, asked = CatalogLook(LauncherConfig("slot", staging), house), []
    read_account = account.read
    monkeypatch.setattr(account, "read", lambda directory: (asked.append(directory), read_account(directory))[1])
    for count in range(1, 5):
        tables = [table(f"t{number}", relation_id=number, parts=[part(number)]) for number in range(100, 100 + count)]
        monkeypatch.setattr(two_looks, "look", lambda *_, tables=tables, lsn=100 + count: found(*tables, lsn=lsn))
        asked.clear()
        assert catalog.look(lambda: False)
    assert len(asked) == 1


def test_a_table_that_was_renamed_for_good_is_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its earlier changes are in the tables of the old name, and stay there."""
    house, staging = Warehouse(tmp_path / "warehouse", "delta"), tmp_path / "staging"
    make_epoch(staging, 1, 0, system_id="7123")
    house.open(list_epochs(staging)[0])
    house.write_versions(T, [version(50, 0, ID, 100)])
    monkeypatch.setattr(type(house.format), "lsn", lambda *_: 120)
    write(house, seen(found(table(), lsn=100), homes=Homes(house)))
    house.record(Position(1, 130))
    monkeypatch.setattr(two_looks, "look", lambda *_: found(table("u"), lsn=140))
    catalog, copied = CatalogLook(LauncherConfig("slot", staging), house), Table("public", "u")
    for _ in range(2):
        assert catalog.look(lambda: False)
        assert [(str(each.table), each.why) for each in waiting(house)] == [("public.u", CAME)]
    # Nothing has copied it when its first change comes under the new name. It does not get its name back.
    house.write_versions(copied, [version(145, 0, ID, 100)])
    house.record(Position(1, 145))
    assert catalog.look(lambda: False)
    told = "it was changed under another name, and these changes are in the tables of that name"
    assert [each.why for each in waiting(house)] == [f"{CAME}; {told}"]
    house.write_versions(copied, [replace(version(150, 0, ID, 100), snapshot=((1, "id"),))])
    for lsn in (160, 170):
        house.record(Position(1, lsn))
        assert catalog.look(lambda: False)
        assert waiting(house) == []
    settle(house)
    # With captured DDL the names follow, and the stream tells all.
    monkeypatch.setattr(house, "has_changelog", lambda name: name == DDL)
    house.write_versions(copied, [version(150, 0, ID, 100)])
    house.record(Position(1, 180))
    assert catalog.look(lambda: False)
    assert waiting(house) == []
