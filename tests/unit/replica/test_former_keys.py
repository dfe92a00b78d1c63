"""The keys of rows from before a copy: their types, if no earlier copy tells them, and whether they are hashes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spark_sink.changelog.schema_history import SchemaHistory, SchemaVersion
from spark_sink.replica import former_keys
from spark_sink.replica.former_keys import is_hashed, types_told
from spark_sink.schema.catalog_answers import CatalogAnswers
from spark_sink.schema.column_numbers import ColumnFacts
from spark_sink.schema.names import Names, Naming
from spark_sink.schema.table import Table
from spark_sink.source.contents import Contents, Use
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Epoch, Position
from spark_sink.warehouse import gaps
from spark_sink.warehouse.warehouse import Source, Warehouse
from support.ddl_messages import message
from support.descriptions import ID, table, version

CIDR, INET, MOOD = 650, 869, 16500
SOURCE = Source("7123", "shop", "slot", ("p",), None, None, Position(1, 50))


def told(lsn: int, columns: str, *numbers: int) -> SchemaVersion:
    facts = tuple(ColumnFacts(number, None, is_filled=False) for number in numbers) or None
    return SchemaVersion(lsn, 0, table(columns), facts)


@pytest.mark.parametrize(
    ("versions", "types"),
    [
        ([], None),
        ([told(10, "id:650", 1)], {CIDR}),
        # The rows may be of each of these times.
        ([told(10, "id:650", 1), told(20, "id:869", 1)], {CIDR, INET}),
        # The number tells which column it is, whatever it was called.
        ([told(10, "old:650 id:869", 1, 2), told(20, "id:869", 1)], {CIDR, INET}),
        ([told(10, "other", 2), told(20, "id:869", 1)], {INET}),
        # Without numbers, the name does.
        ([told(10, "id:650"), told(20, "id:869", 1)], {CIDR, INET}),
        ([told(10, "old:650"), told(20, "id:869")], None),
    ],
)
def test_types_of_former_keys(versions: list[SchemaVersion], types: set[int] | None) -> None:
    copy = replace(version(50, 0, ID), snapshot=((1, "id"),), described=((1, "id", INET, -1),))
    found = types_told(versions, copy).get(1)
    assert found == (types and {(type_id, -1) for type_id in types})


@pytest.mark.parametrize("lost_after", [5, 15, 25])
def test_types_of_rows_that_a_server_has_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_after: int) -> None:
    """A failover loses changes of a table that was never copied, and the gap's copy comes: its key has the type of those rows.

    Each transaction has changed another table before. So each description has a later place than the version that begins there.
    """
    house, none = Warehouse(tmp_path, "delta"), cast("Any", None)
    epoch = Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0)
    house.open(epoch)
    gap = Gap(lost_after, "timeline 2 branched off", 0.0, 0.0, is_divergence=True)
    gaps.record(house, [replace(epoch, number=2, start_lsn=30, gap=gap)])
    history, t = SchemaHistory(none, house, CatalogAnswers(None)), Table("public", "t")
    for lsn, columns in (10, "id:650"), (20, "id:869"), (40, "id:650 more"):
        segment: Any = SimpleNamespace(epoch=1, start_lsn=lsn - 5, end_lsn=lsn, end=Position(1, lsn))
        history.record_new({t: Contents(1, lsn, [Use(lsn, 1, table(columns), lsn)])}, lambda *_: None, [segment])
    monkeypatch.setattr(former_keys, "SchemaHistory", lambda *_: history)
    copy = replace(version(50, 0, ID), snapshot=((1, "id"),), described=((1, "id", INET, -1),))
    # A description with another type of the key, and nothing else, begins no version.
    first, second, third = (version(lsn, 0, ID) for lsn in (10, 20, 40))
    before = [first], [first, second], [second, third], [third]
    changes: Any = SimpleNamespace(sparkSession=None)
    found = [former_keys._former_types(house, changes, each, copy).get(1) for each in before]
    # The versions of the rows tell from which servers they came.
    both = {(CIDR, -1), (INET, -1)}
    assert found == [both, both, both, both if lost_after == 25 else {(CIDR, -1)}]
    # Also if the table was copied before that: rows since then may be of the server that had this copy.
    copied = replace(version(5, 0, ID), snapshot=((1, "id"),), described=((1, "id", CIDR, -1),))
    found = [former_keys._former_types(house, changes, [copied, *each], copy).get(1) for each in before]
    assert found == [both] * 4
    copied = replace(version(45, 0, ID), snapshot=((1, "id"),), described=((1, "id", INET, -1),))
    assert former_keys._former_types(house, changes, [first, second, copied], copy).get(1) == {(INET, -1)}


@pytest.mark.parametrize(
    ("statement", "key", "expected"),
    [
        ("alter type mood rename value 'ok' to 'fine'", MOOD, {MOOD, MOOD + 1}),
        (None, MOOD, {MOOD, MOOD + 1}),
        ("alter type mood add value 'new'", MOOD, set()),
        ("alter type mood rename value 'ok' to 'fine'", INET, set()),
    ],
)
def test_a_type_of_keys_whose_values_have_other_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str | None, key: int, expected: set[int]
) -> None:
    """Each row was a deleted one, too: under the key that the enum's value had before it was renamed."""
    asked: list[Any] = []
    said = message(tag="ALTER TYPE", statement=statement, types=[{"oid": MOOD, "array": MOOD + 1}])

    def messages(*arguments: Any) -> list[Any]:
        asked.append(arguments)
        return [said]

    house: Any = SimpleNamespace(root=tmp_path, source=lambda: SOURCE)
    monkeypatch.setattr(former_keys, "DdlLog", lambda *_: SimpleNamespace(messages=messages, exists=True))
    earlier, copy = (
        replace(version(lsn, 0, ID), snapshot=((1, "id"), (2, "v")), described=((1, "id", key, -1), (2, "v", MOOD, -1)))
        for lsn in (20, 50)
    )
    changes: Any = SimpleNamespace(sparkSession=None)
    for before, since in (([version(10, 0, ID)], 0), ([version(10, 0, ID), earlier, version(30, 0, ID)], 20)):
        asked.clear()
        assert former_keys._altered_types(house, changes, before, copy, {"id"}) == expected
        assert asked == ([("ALTER TYPE", since, 50)] if key == MOOD else [])


@pytest.mark.parametrize(
    ("reached", "exists", "key", "expected"),
    [
        (49, True, MOOD, {MOOD}),
        (None, True, MOOD, {MOOD}),
        (50, True, MOOD, set()),
        (49, True, INET, set()),
        # Without captured DDL nobody ever tells.
        (49, False, MOOD, set()),
    ],
)
def test_a_copy_ahead_of_the_stream_may_have_other_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reached: int | None, key: int, expected: set[int], *, exists: bool
) -> None:
    """The ALTER TYPE from before the copy has yet to come: each row was a deleted one, too."""
    source = replace(SOURCE, position=None if reached is None else Position(1, reached))
    house: Any = SimpleNamespace(root=tmp_path, source=lambda: source)
    log = SimpleNamespace(messages=lambda *_: [], exists=exists)
    monkeypatch.setattr(former_keys, "DdlLog", lambda *_: log)
    copy = replace(version(50, 0, ID), snapshot=((1, "id"), (2, "v")), described=((1, "id", key, -1), (2, "v", MOOD + 9, -1)))
    changes: Any = SimpleNamespace(sparkSession=None)
    assert former_keys._altered_types(house, changes, [version(10, 0, ID)], copy, {"id"}) == expected


@pytest.mark.parametrize(
    ("gap_lsn", "start_lsn", "exists", "key", "expected"),
    [
        (30, 40, True, MOOD, {MOOD}),
        (10, 25, True, MOOD, {MOOD}),
        (10, 20, True, MOOD, set()),  # the copy before is from after it
        (50, 60, True, MOOD, set()),
        (30, 40, True, INET, set()),
        (30, 40, False, MOOD, set()),
    ],
)
def test_a_copy_after_a_gap_may_have_other_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap_lsn: int, start_lsn: int, key: int, expected: set[int], *, exists: bool
) -> None:
    """Nothing ever tells of an ALTER TYPE in the gap: each row was a deleted one, too."""
    house: Any = SimpleNamespace(root=tmp_path, source=lambda: SOURCE)
    epoch = Epoch(2, "7123", 1, "shop", "slot", ("p",), {}, start_lsn, gap=Gap(gap_lsn, "the slot was lost", 0.0, 0.0))
    gaps.record(house, [epoch])
    monkeypatch.setattr(former_keys, "DdlLog", lambda *_: SimpleNamespace(messages=lambda *_: [], exists=exists))
    before, copy = (
        replace(version(lsn, 0, ID), snapshot=((1, "id"), (2, "v")), described=((1, "id", key, -1), (2, "v", MOOD + 9, -1)))
        for lsn in (20, 50)
    )
    changes: Any = SimpleNamespace(sparkSession=None)
    assert former_keys._altered_types(house, changes, [before], copy, {"id"}) == expected


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ({"public.b.id": "hash"}, True),
        ({"public.a.id": "hash"}, True),
        ({"public.c.id": "hash", "public.b.other": "hash"}, False),
        ({"public.b.id": "redact"}, False),
    ],
)
def test_a_key_that_is_hashed_under_the_name_of_now(tmp_path: Path, masks: dict[str, str], *, expected: bool) -> None:
    house, home, now = Warehouse(tmp_path, "delta", masks=masks), Table("public", "a"), Table("public", "b")
    house.write_names(Names([Naming((20, 0), 1, home, now, home)], is_following=True))
    copy = replace(version(50, 0, ID), snapshot=((1, "id"),), described=((1, "id", INET, -1),))
    assert is_hashed(house, home, copy, 1) == expected
