"""The names under which rows came before: a mask goes by a name, and rows go from one name to another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.masks import Masks
from spark_sink.launcher.config import LauncherConfig
from spark_sink.pipeline.known_tables import KnownTables
from spark_sink.pipeline.micro_batch import MicroBatch
from spark_sink.schema.catalog_answers import CatalogAnswers
from spark_sink.schema.names import Names, Naming
from spark_sink.schema.table import Table
from spark_sink.snapshot import two_looks
from spark_sink.snapshot.catalog_look import CatalogLook
from spark_sink.source.contents import Use
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Position
from spark_sink.warehouse import gaps
from spark_sink.warehouse.former_names import FormerNames, carried
from spark_sink.warehouse.last_look import Seen, SeenTable, read, write
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import EPOCH
from support.descriptions import ID, version
from support.oids import INT4, TEXT
from support.segments import relation

ROOT, LEAF, OTHER = 100, 101, 102
MASKS = Masks.of({"public.orders.email": "null", "public.leaf.email": "null"})
ORDERS = Table("public", "orders")


def seen_table(number: int, name: str, *parts: int) -> SeenTable:
    return SeenTable("public", name, number, True, (7,), dict.fromkeys(parts or (number,), (1, "a")))


def look(*tables: SeenTable, system_id: str = "1") -> Seen:
    return Seen(system_id, 100, {each.relation_id: each for each in tables})


def names(house: Warehouse, number: int, *parts: int, is_new: bool = False) -> list[str]:
    return sorted(each.name for each in FormerNames(house).of(number, 150, parts, is_new=is_new))


@pytest.fixture
def house(tmp_path: Path) -> Warehouse:
    made = Warehouse(tmp_path, "delta", masks=MASKS.as_kinds)
    made.open(EPOCH)
    return made


def test_a_partition_under_its_own_name(house: Warehouse) -> None:
    """It was detached, or its publication does not publish it as its root any more."""
    before = look(seen_table(ROOT, "orders", LEAF, OTHER))
    assert names(house, LEAF) == []
    write(house, before)
    assert names(house, LEAF) == names(house, ROOT) == ["orders"]  # the stream may be ahead of the look
    detached = carried(before, look(seen_table(ROOT, "orders", OTHER), seen_table(LEAF, "leaf")), MASKS)
    write(house, detached)
    assert read(house) == detached
    for _ in range(2):  # a later look does not forget it
        assert (names(house, LEAF), names(house, ROOT)) == (["leaf", "orders"], ["orders"])
        detached = carried(detached, look(seen_table(ROOT, "orders", OTHER), seen_table(LEAF, "leaf")), MASKS)
        write(house, detached)
    # One that has partitions itself: what has its rows was known.
    assert names(house, 110, OTHER) == ["orders"]


def test_a_root_with_the_rows_of_a_table(house: Warehouse) -> None:
    """It was attached, or its publication publishes partitions as their root now."""
    before = look(seen_table(ROOT, "orders", OTHER), seen_table(LEAF, "leaf"))
    write(house, before)
    assert names(house, ROOT) == ["orders"]
    assert names(house, ROOT, OTHER, LEAF) == ["leaf", "orders"]  # the catalog has told, before the next look
    write(house, carried(before, look(seen_table(ROOT, "orders", OTHER, LEAF)), MASKS))
    assert names(house, ROOT) == ["leaf", "orders"]


def test_a_table_that_came_since_the_look(house: Warehouse) -> None:
    house.write_versions(Table("public", "leaf"), [version(10, 0, ID, LEAF)])
    assert names(house, ROOT, LEAF) == ["leaf"]
    assert (names(house, LEAF), names(house, LEAF, is_new=True)) == ([], ["leaf"])


def former_at(house: Warehouse, number: int, lsn: int) -> list[str]:
    return sorted(each.name for each in FormerNames(house).of(number, lsn, is_new=True))


def test_behind_a_gap_to_another_server_an_oid_tells_nothing(house: Warehouse) -> None:
    """Its tables have other OIDs. The changes that are left from before the gap still have those of the former server."""
    write(house, replace(look(seen_table(ROOT, "orders"), system_id="7"), lsn=9000, former={OTHER: (ORDERS,)}))  # beyond the log
    house.write_versions(Table("public", "leaf"), [version(90, 0, ID, LEAF)])
    after = replace(EPOCH, number=2, start_lsn=100, gap=Gap(90, "the slot was gone", 0.0, 0.0), former_system_id="7", system_id="8")
    for lsn in 50, 200:  # the gap is not recorded yet
        assert [former_at(house, number, lsn) for number in (ROOT, OTHER, LEAF)] == [["orders"], ["orders"], ["leaf"]]
    house.open(after, {"7"})
    gaps.record(house, [after])
    names = FormerNames(house)
    assert (names.is_plain(ROOT, 100), names.is_plain(ROOT, 101)) == (True, False)
    assert [former_at(house, number, 100) for number in (ROOT, OTHER, LEAF)] == [["orders"], ["orders"], ["leaf"]]
    assert [former_at(house, number, 101) for number in (ROOT, OTHER, LEAF)] == [[], [], []]
    house.write_versions(Table("public", "leaf"), [version(90, 0, ID, LEAF), version(120, 0, ID, LEAF)])
    assert former_at(house, LEAF, 130) == ["leaf"]
    write(house, look(seen_table(ROOT, "orders"), system_id="8"))
    assert former_at(house, ROOT, 130) == ["orders"]


def test_before_a_gap_to_another_server_its_oids_tell_nothing(house: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """The changes from before the gap may come to the tables after a look at the other server's catalog, and after its copies."""
    epoch = replace(EPOCH, number=2, start_lsn=100, gap=Gap(90, "the slot was gone", 0.0, 0.0), former_system_id="7", system_id="8")
    write(house, replace(look(seen_table(ROOT, "orders", LEAF), system_id="7"), former={OTHER: (ORDERS,)}))
    house.write_versions(Table("public", "both"), [version(90, 0, ID, 200), version(150, 0, ID, 201)])
    house.write_versions(Table("public", "copied"), [version(150, 0, ID, 200)])
    house.record(Position(1, 50))
    house.open(epoch, {"7"})
    gaps.record(house, [epoch])
    monkeypatch.setattr("spark_sink.snapshot.catalog_look.list_epochs", lambda _: [epoch])
    described: dict[str, Any] = {"relation_id": LEAF, "schema": "public", "name": "another", "columns": [{"name": "id"}]}
    described |= {"primary_key": ["id"], "replica_identity": "d", "published_by": [7], "operations": ["insert"], "parts": []}
    answer = SimpleNamespace(
        system_id="8",
        timeline=epoch.timeline,
        timeline_began_at={},
        wal_lsn=9000,
        tables=(described,),
        check_left_out=lambda _: None,
    )
    monkeypatch.setattr(two_looks, "look", lambda *_: answer)
    for _ in range(2):
        assert CatalogLook(LauncherConfig("slot", house.root), house).look(lambda: False)
        assert [former_at(house, number, 100) for number in (LEAF, OTHER)] == [["orders"], ["orders"]]
        assert [former_at(house, number, 101) for number in (LEAF, OTHER)] == [["another"], []]
        assert [former_at(house, 200, lsn) for lsn in (100, 101)] == [["both"], ["copied"]]
        assert [former_at(house, 201, lsn) for lsn in (100, 101)] == [[], ["both"]]
    house.record(Position(2, 100))  # the tables have come to the gap: nobody asks for the former server's tables any more
    assert CatalogLook(LauncherConfig("slot", house.root), house).look(lambda: False)
    assert former_at(house, LEAF, 100) == []
    assert former_at(house, LEAF, 101) == ["another"]


@pytest.mark.parametrize("gap", [None, Gap(90, "the slot was gone", 0.0, 0.0)])
def test_oids_go_on_if_it_is_the_same_server(house: Warehouse, gap: Gap | None) -> None:
    """A gap of its log, or pg_upgrade with the slot, of which the record of the look need not know yet."""
    write(house, look(seen_table(ROOT, "orders"), system_id="7"))
    house.write_versions(Table("public", "leaf"), [version(90, 0, ID, LEAF)])
    former = {"system_id": "8", "former_system_id": "7"} if gap is None else {}
    after = replace(EPOCH, number=2, start_lsn=100, gap=gap, **former)
    house.open(after, {"7"})
    gaps.record(house, [after])
    assert [former_at(house, number, 200) for number in (ROOT, LEAF)] == [["orders"], ["leaf"]]


def test_a_server_that_lost_changes_has_the_tables_from_before(house: Warehouse) -> None:
    """A look may have seen a table that was lost, or not: it counts. A table of which only the lost changes tell does not."""
    write(house, look(seen_table(ROOT, "orders"), system_id="8"))
    house.write_versions(Table("public", "leaf"), [version(90, 0, ID, LEAF)])
    house.write_versions(Table("public", "lost"), [version(95, 0, ID, OTHER)])
    other = replace(EPOCH, number=2, start_lsn=50, gap=Gap(40, "the slot was gone", 0.0, 0.0), former_system_id="7", system_id="8")
    gap = Gap(90, "timeline 2 branched off", 0.0, 0.0, is_divergence=True)
    failover = replace(EPOCH, number=3, start_lsn=100, gap=gap, system_id="8")
    house.open(failover, {"7"})
    gaps.record(house, [other, failover])
    assert [former_at(house, number, 100) for number in (ROOT, LEAF, OTHER)] == [["orders"], ["leaf"], ["lost"]]
    assert [former_at(house, number, 101) for number in (ROOT, LEAF, OTHER)] == [["orders"], ["leaf"], []]
    assert former_at(house, ROOT, 50) == []
    # It may be one of a partitioned table there.
    assert [FormerNames(house).is_plain(ROOT, lsn) for lsn in (100, 101)] == [True, False]
    write(house, replace(look(seen_table(ROOT, "orders"), system_id="8"), lsn=90))  # before the changes that were lost
    assert [FormerNames(house).is_plain(ROOT, lsn) for lsn in (100, 101)] == [True, True]
    write(house, replace(look(seen_table(ROOT, "orders"), system_id="8"), lsn=150))  # after them
    assert FormerNames(house).is_plain(ROOT, 200)


def test_a_name_that_a_server_has_lost(house: Warehouse) -> None:
    """Rows came under it before the gap, and under the former name before and behind it, wherever the tables are."""
    home, kept, lost = (Table("public", name) for name in ("home", "kept", "lost"))
    house.write_versions(home, [version(10, 0, ID, LEAF)])
    house.write_names(Names([Naming((50, 0), LEAF, home, kept, home), Naming((95, 0), LEAF, kept, lost, home)]))
    gap = Gap(90, "timeline 2 branched off", 0.0, 0.0, is_divergence=True)
    gaps.record(house, [replace(EPOCH, number=2, start_lsn=100, gap=gap)])
    for lsn in (97, 100):
        house.record(Position(1, lsn))
        assert {"home", "lost"} <= set(former_at(house, LEAF, 98))
        assert former_at(house, LEAF, 101) == ["home", "kept"]


def test_pg_upgrade_behind_a_gap_to_another_server(house: Warehouse) -> None:
    """The look was at the server that has been upgraded since, and not at the one before the gap."""
    write(house, look(seen_table(ROOT, "orders"), system_id="8"))
    gap = Gap(90, "the slot was gone", 0.0, 0.0)
    other = replace(EPOCH, number=2, start_lsn=100, gap=gap, former_system_id="7", system_id="8")
    upgraded = replace(EPOCH, number=3, start_lsn=150, former_system_id="8", system_id="9")
    house.open(upgraded, {"7", "8"})
    gaps.record(house, [other, upgraded])
    assert former_at(house, ROOT, 200) == ["orders"]


def test_what_is_kept() -> None:
    before = look(seen_table(ROOT, "orders", 1, 2, 3), seen_table(LEAF, "plain"))
    left = carried(before, look(seen_table(3, "c")), MASKS).former
    assert left == dict.fromkeys((ROOT, 1, 2, 3), (ORDERS,))  # no mask names public.plain
    assert carried(before, look(seen_table(3, "c"), system_id="2"), MASKS).former == {}
    assert carried(None, look(seen_table(3, "c")), MASKS).former == {}
    # The tables still get changes of the former server, before which there was another one.
    chain = carried(replace(before, earlier=look()), look(seen_table(3, "c"), system_id="2"), MASKS, is_at_server_of_now=False)
    assert chain.earlier == replace(before, earlier=look())
    assert carried(chain, look(system_id="2"), MASKS, is_at_server_of_now=False).earlier == chain.earlier
    assert carried(chain, look(system_id="2"), MASKS).earlier is None
    assert carried(before, look(system_id="2"), Masks.of({}), is_at_server_of_now=False).earlier is None
    assert carried(Seen("1", 100, {}, left), look(seen_table(3, "c")), Masks.of({"public.leaf.email": "null"})).former == {}
    # Partitions leave the table each day, for years. Nobody knows which of them are dropped, and which come back.
    former = dict.fromkeys(range(1000, 4000), (ORDERS,))
    assert carried(Seen("1", 100, {}, former), look(seen_table(3, "c")), MASKS).former == former


def test_the_looks_of_a_run_carry_the_names(house: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    def tables(*described: tuple[int, str, list[int]]) -> tuple[dict[str, Any], ...]:
        return tuple(
            {"schema": "public", "name": name, "relation_id": number, "replica_identity": "d", "primary_key": ["id"]}
            | {"columns": [{"name": "id"}], "published_by": [7], "operations": ["insert"]}
            | {
                "parts": [
                    {"relation_id": part, "file": 1, "definition": "a", "is_attached": False, "has_rows": None} for part in parts
                ]
            }
            for number, name, parts in described
        )

    answers = [tables((ROOT, "orders", [LEAF, OTHER])), tables((ROOT, "orders", [OTHER]), (LEAF, "leaf", [LEAF]))]

    def answer(*_: Any) -> Any:
        return SimpleNamespace(system_id="7123", wal_lsn=200, tables=answers.pop(0), check_left_out=lambda _: None)

    monkeypatch.setattr(two_looks, "look", answer)
    for _ in range(2):
        CatalogLook(LauncherConfig("slot", house.root), house).look(lambda: False)
    found = read(house)
    assert found is not None
    assert found.former == {LEAF: (ORDERS,)}


def check(house: Warehouse, number: int, name: str, described: list[dict[str, Any]] | None, *, is_repeated: bool = False) -> None:
    """Check the masks of a table for a micro-batch that has its changes."""
    table = Table("public", name)

    def describe() -> list[dict[str, Any]]:
        assert described is not None, "the catalog is asked"
        return described

    tables = cast("KnownTables", Tables(house, CatalogAnswers(describe)))
    use = Use(30, 0, relation(number, name, ("id", INT4), ("email", TEXT)), 30, is_repeated)
    MicroBatch(tables, [])._check_masks(table, [use])


class Tables:
    """The known tables, as far as the check of masks asks for them. Each has a version already."""

    def __init__(self, house: Warehouse, answers: CatalogAnswers) -> None:
        self.warehouse, self.answers = house, answers

    def __getitem__(self, _table: Table) -> Any:
        return SimpleNamespace(versions=[version(10, 0, ID)])


def test_a_micro_batch_shows_no_rows_that_were_masked(house: Warehouse) -> None:
    write(house, look(seen_table(ROOT, "orders", OTHER), seen_table(LEAF, "leaf")))
    check(house, ROOT, "orders", [])
    check(house, LEAF, "leaf", None)  # a table without partitions never gets any
    message = r"table public\.orders_2024 has rows of public\.orders, and --mask names email of public\.orders, but not"
    with pytest.raises(InvalidArgumentsError, match=message) as raised:
        check(house, OTHER, "orders_2024", [])
    assert raised.value.hint
    assert raised.value.hint.endswith("--mask public.orders_2024.email=null")
    mended = Warehouse(house.root, "delta", masks=MASKS.as_kinds | {"public.orders_2024.email": "null"})
    check(mended, OTHER, "orders_2024", [])
    # The server describes a root anew before the first change of a partition that was attached: then the catalog tells.
    described = [{"relation_id": 200, "parts": [{"relation_id": LEAF}]}]
    check(house, 200, "whole", described, is_repeated=True)
    with pytest.raises(InvalidArgumentsError, match=r"table public\.whole has rows of public\.leaf"):
        check(house, 200, "whole", described)
