"""What captured DDL says about a table at a place; and messages that no event trigger has written."""

import json
import weakref
from dataclasses import replace
from typing import Any

import pytest

from spark_sink.schema.column_numbers import ColumnFacts
from spark_sink.schema.ddl import Descriptions
from spark_sink.schema.ddl_message import DdlMessage, Families, PublicationLists, parse
from spark_sink.schema.servers import Servers
from spark_sink.schema.table import Table
from support.ddl_messages import content, described, message
from support.descriptions import table

ID, A, SEVEN = ColumnFacts(1, None, is_filled=False), ColumnFacts(2, None, is_filled=False), ColumnFacts(3, "7", is_filled=False)


def test_a_description_is_in_force_until_the_next_one() -> None:
    found = Descriptions()
    found.add((10, 0), message(described("id=1 a=2", key=["id"])))
    found.add((20, 3), message(described("id=1 b=2 a=3'7", key=["b", "id"])))
    before, after = table("id a"), table("id b a")
    assert found.facts(before, (9, 99)) is None
    assert found.facts(before, (10, 0)) == (ID, A)
    assert found.facts(before, (20, 2)) == (ID, A)
    assert found.facts(after, (20, 3)) == (ID, A, SEVEN)
    assert [found.primary_key(before, (10, 0)), found.primary_key(after, (30, 0))] == [("id",), ("b", "id")]
    # A publication may lack columns.
    assert found.facts(table("a"), (30, 0)) == (SEVEN,)
    assert found.facts(replace(after, relation_id=2), (30, 0)) is None


@pytest.mark.parametrize("columns", ["id a x", "id c", "id:20 a", "a id"])
def test_a_table_that_changed_without_a_message(columns: str) -> None:
    """The last one: id was dropped, and added again."""
    found = Descriptions()
    found.add((10, 0), message(described("id=1 a=2", key=["id"])))
    assert found.facts(table(columns), (11, 0)) is None
    assert found.primary_key(table(columns), (11, 0)) is None


def test_the_value_of_earlier_rows_is_that_of_the_first_description() -> None:
    """A rewrite of the table (VACUUM FULL) removes it from the catalog. The default may be another one by then."""
    found = Descriptions()
    found.add((10, 0), message(described("id=1")))
    found.add((20, 0), message(described("id=1 a=3'7")))
    found.add((30, 0), message(described("id=1 a=3!")))
    assert found.facts(table("id a"), (30, 0)) == (ID, SEVEN)


@pytest.mark.parametrize(
    ("more", "is_filled"),
    [({"has_default": True}, True), ({"identity": "always"}, True), ({"generated": "stored"}, True), ({}, False)],
)
def test_values_that_only_the_table_has(more: dict[str, object], is_filled: bool) -> None:
    described_table = described("id=1 a=2")
    described_table["columns"][1] |= more
    found = Descriptions()
    found.add((10, 0), message(described_table))
    facts = found.facts(table("id a"), (10, 0))
    assert facts is not None
    assert facts[1].is_filled == is_filled


def test_a_partitioned_table_tells_only_of_columns_that_come_while_ddl_is_captured() -> None:
    """It has no rows. After ADD COLUMN ... DEFAULT and DROP DEFAULT nothing about it says that old rows have the default."""
    found = Descriptions()
    kind = {"kind": "partitioned"}
    found.add((10, 0), message(described("id=1 a=2") | kind, kind="installed"))
    found.add((20, 0), message(described("id=1 a=2 b=3") | kind))
    found.add((25, 0), message(kind="removed"))
    found.add((30, 0), message(described("id=1 a=2 b=3 c=4") | kind, kind="installed"))
    facts = found.facts(table("id a b c"), (30, 0))
    assert facts is not None
    assert [fact.is_filled for fact in facts] == [True, True, False, True]
    found.add((40, 0), message(described("id=1 a=2", relation_id=2) | kind))
    facts = found.facts(replace(table("id a"), relation_id=2), (40, 0))
    assert facts is not None
    assert [fact.is_filled for fact in facts] == [True, True]


@pytest.mark.parametrize(
    ("kind", "root", "leaves", "expected"),
    [
        ("command", "w=2", ["w=2", "w=2"], (None, False)),  # ADD COLUMN w
        ("command", "w=2!", ["w=2'5", "w=5'5"], ("5", False)),  # ... DEFAULT 5; a partition may have another number for it
        ("command", "w=2", ["w=2'5", "w=2'5"], ("5", False)),  # ... and then DROP DEFAULT
        ("command", "w=2!", ["w=2!", "w=2!"], (None, True)),  # a default computed for each row
        ("command", "w=2!", ["w=2", "w=2"], (None, True)),
        ("command", "w=2", ["w=2'5", "w=2"], (None, True)),  # a partition was created since, or written anew
        ("command", "w=2", ["w=2", "w=2!"], (None, True)),
        # These messages need not have all partitions.
        ("installed", "w=2", ["w=2", "w=2"], (None, True)),
        ("drop", "w=2", ["w=2", "w=2"], (None, True)),
    ],
)
def test_a_partitioned_table_has_in_old_rows_what_its_partitions_have(
    kind: str, root: str, leaves: list[str], expected: tuple[str | None, bool]
) -> None:
    found = Descriptions()
    top = described(f"id=1 {root}", kind="partitioned")
    middle = described(f"id=1 {root}", relation_id=2, name="m", parent=(1, "t"), kind="partitioned")
    below = [
        described(f"id=1 {each}", relation_id=number, name=f"p{number}", parent=(parent, "x"))
        for each, (number, parent) in zip(leaves, ((3, 1), (4, 2)), strict=True)
    ]
    found.add((10, 0), message(top, middle, *below, kind=kind))
    facts = found.facts(table("id w"), (10, 0))
    assert facts is not None
    assert facts[1] == ColumnFacts(2, expected[0], is_filled=expected[1])


def test_a_command_that_drops_a_column_of_a_partitioned_table_and_adds_one() -> None:
    """The message about the dropped column comes first. It describes the table and its partitions as the command leaves them."""
    found = Descriptions()
    parts = [(1, "t", None), (2, "p", (1, "t"))]
    before = [described("id=1 a=2", relation_id=oid, name=name, parent=parent) for oid, name, parent in parts]
    after = [
        described(f"id=1 c=3{value}", relation_id=oid, name=name, parent=parent)
        for (oid, name, parent), value in zip(parts, ("!", "'5"), strict=True)
    ]
    lost = [dropped(2, "a") | {"oid": oid, "name": name} for oid, name, _ in parts]
    for tables in (before, after):
        tables[0]["kind"] = "partitioned"
    found.add((10, 0), message(*before, kind="installed"))
    found.add((20, 0), message(*after, kind="drop", dropped=lost))
    found.add((20, 1), message(*after))
    facts = found.facts(table("id c"), (20, 1))
    assert facts is not None
    assert facts[1] == ColumnFacts(3, "5", is_filled=False)


def test_a_partitioned_table_does_not_tell_of_columns_that_came_in_a_gap() -> None:
    found = Descriptions()
    found.end_at([15], Servers())
    for place, columns in ((10, 0), "id=1 a=2"), ((20, 0), "id=1 a=2 b=3"), ((30, 0), "id=1 a=2 b=3 c=4"):
        found.add(place, message(described(columns, kind="partitioned")))
    facts = found.facts(table("id a b c"), (30, 0))
    assert facts is not None
    assert [fact.is_filled for fact in facts] == [True, True, True, False]


def test_descriptions_that_repeat_the_last_one_take_no_memory() -> None:
    """Each ATTACH PARTITION describes all partitions. After years there are millions of equal descriptions."""
    families, found = Families(), Descriptions()

    def said(lsn: int, columns: str) -> None:
        tables = [described(columns, kind="partitioned"), described(columns, relation_id=2, name="p", parent=(1, "t"))]
        found.add((lsn, 0), parse(content(*tables), read=families.read))

    said(1, "id=1")
    said(2, "id=1")
    for lsn in range(3, 1003):
        said(lsn, "id=1")
    assert [len(known.said) for known in found._known.values()] == [1, 1]
    said(2000, "id=1 a=2")
    for relation_id in (1, 2):
        assert [found.last_place(relation_id, (lsn, 0)) for lsn in (0, 500, 3000)] == [None, (1, 0), (2000, 0)]
        assert [len(each.columns) for _, each in found.last_before((1500, 0))] == [1, 1]
        assert found.numbers_at(replace(table("id"), relation_id=relation_id), (1500, 0)) == ({1}, True)
        # The next message after a place may be one that repeats the last one.
        assert [found.is_later_number(relation_id, (lsn, 0), 2) for lsn in (0, 500, 1002)] == [True, True, False]


@pytest.mark.parametrize("between", [message(kind="failure"), None])
def test_an_equal_description_counts_after_the_end_of_the_capture_or_a_gap(between: DdlMessage | None) -> None:
    found = Descriptions()
    found.end_at([20] if between is None else [], Servers())
    found.add((10, 0), message(described("id=1")))
    if between is not None:
        found.add((20, 0), between)
    found.add((30, 0), message(described("id=1")))
    assert found.in_force(1, (30, 0)) is not None


@pytest.mark.parametrize("kind", ["removed", "failure"])
def test_nothing_is_certain_after_the_capture_ended(kind: str) -> None:
    found = Descriptions()
    found.add((10, 0), message(described("id=1", key=["id"])))
    found.add((20, 1), message(kind=kind))
    relation = table("id")
    assert [found.primary_key(relation, place) for place in ((20, 0), (20, 1), (99, 0))] == [("id",), None, None]
    found.add((30, 0), message(described("id=1", key=["id"]), kind="installed"))
    assert found.primary_key(relation, (30, 0)) == ("id",)


def test_a_gap_of_the_log_ends_what_was_described() -> None:
    """The gap may have had a command on the table, or the end of the capture."""
    found = Descriptions()
    found.end_at([20], Servers())
    found.add((10, 0), message(described("id=1 a=2'7", key=["id"])))
    found.add((20, 0), message(described("id=1 a=2'7", key=["id"])))  # the last one before the gap
    before = table("id a")
    assert [found.primary_key(before, place) for place in [(15, 0), (20, 9), (21, 0), (40, 0)]] == [("id",), ("id",), None, None]
    assert found.facts(before, (40, 0)) is found.numbers_at(before, (21, -1)) is None
    assert [found.covers(*places) for places in [((11, 0), (20, 0)), ((11, 0), (30, 0)), ((25, 0), (30, 0))]] == [
        True,
        False,
        False,
    ]
    found.add((50, 0), message(described("id=1 a=2", key=["a"])))
    assert [found.primary_key(before, place) for place in [(15, 0), (40, 0), (50, 0)]] == [("id",), None, ("a",)]
    assert found.facts(before, (50, 0)) == (ID, replace(A, missing="7"))  # the columns are those of before
    # The capture was there behind the gap, because its first message does not begin it.
    assert [found.covers(*places) for places in [((25, 0), (30, 0)), ((15, 0), (60, 0)), ((25, 0), (60, 0))]] == [True, False, True]
    found.end_at([20, 40], Servers())
    assert not found.covers((25, 0), (30, 0))


def test_a_gap_of_the_log_ends_what_was_told_of_lists() -> None:
    found = Descriptions()
    found.end_at([20], Servers())
    tables = [{"oid": 1, "schema": "public", "name": "t", "columns": [1, 2], "has_filter": False}]
    for lsn in 10, 30:
        found.add((lsn, 0), message(tag="ALTER PUBLICATION", publications=[{"oid": 7, "name": "p", "tables": tables}]))
    assert [found.has_list(1, (lsn, 0)) for lsn in (5, 15, 25, 35)] == [False, True, False, True]


def test_of_a_publications_messages_only_the_changes_of_lists_are_kept() -> None:
    """Each message names all tables of the publication: with thousands of them, that would be gigabytes over the years."""
    found, said, sets = Descriptions(), message(), list[weakref.ref[frozenset[int]]]()
    for lsn, tables in ((10, {1}), (20, {1, 2}), (30, {2}), (40, {2}), (50, {1, 2})):
        listed = PublicationLists("p", frozenset(tables))
        sets.append(weakref.ref(listed.tables))
        found.add((lsn, 0), replace(said, lists={7: listed}))
    del listed
    places = [(lsn, 0) for lsn in (5, 15, 25, 35, 45, 55)]
    assert [found.has_list(1, place) for place in places] == [False, True, True, False, False, True]
    assert [found.has_list(2, place) for place in places] == [False, False, True, True, True, True]
    assert [each() for each in sets[:-1]] == [None] * 4


def test_another_server_has_other_tables_under_the_same_oids() -> None:
    found = Descriptions()
    found.end_at([20], Servers([20]))
    found.add((10, 0), message(described("id=1 a=2'7 b=3", key=["id"])))
    found.add((30, 0), message(described("id=1 a=2", key=["a"])))
    assert found.facts(table("id a"), (15, 0)) == (ID, replace(A, missing="7"))
    assert found.facts(table("id a"), (30, 0)) == (ID, A)
    assert [len(each.columns) for _, each in found.last_before((15, 0))] == [3]
    assert [len(each.columns) for _, each in found.last_before((40, 0))] == [2]
    found.add((40, 0), message(kind="drop", dropped=[{"type": "table", "schema": "public", "name": "t", "oid": 1}]))
    found.forget_dropped(40)
    assert (found.in_force(1, (15, 0)) is None, found.in_force(1, (45, 0))) == (False, None)


def test_a_transaction_that_is_open_while_the_capture_is_removed_does_not_begin_it_again() -> None:
    found, relation = Descriptions(), table("id")
    found.add((10, 0), message(kind="removed"))
    assert not found.is_off
    found.add((20, 0), message(described("id=1", key=["id"])))
    assert found.is_off
    assert [found.primary_key(relation, place) for place in ((20, 0), (99, 0))] == [None, None]
    found.add((30, 0), message(described("id=1", key=["id"]), kind="installed"))
    assert not found.is_off
    assert found.primary_key(relation, (29, 0)) is None
    assert found.primary_key(relation, (30, 0)) == ("id",)


def test_a_failure_after_a_command_without_a_change_between() -> None:
    found, relation = Descriptions(), table("id")
    found.add((10, 0), message(described("id=1", key=["id"])))
    found.add((10, 0), message(kind="failure"))
    assert found.primary_key(relation, (10, 0)) is None
    found.add((20, 0), message(kind="failure"))
    found.add((20, 0), message(described("id=1", key=["id"])))
    assert found.primary_key(relation, (20, 0)) == ("id",)


def test_a_deferrable_key_identifies_nothing() -> None:
    found = Descriptions()
    found.add((10, 0), message(described("id=1", primary_key={"columns": [1], "deferrable": True})))
    assert found.primary_key(table("id"), (10, 0)) == ()


def test_dropped_and_rewritten_tables() -> None:
    dropped = [
        {"type": "table", "oid": 5, "schema": "public", "name": "t"},
        {"type": "table column", "oid": 6, "schema": "public", "name": "u", "number": 2, "column": "a"},
    ]
    assert message(kind="drop", dropped=dropped).dropped == {Table("public", "t"): 5}
    rewritten = {"oid": 5, "schema": "public", "name": "t", "reasons": ["default", "type"]}
    assert message(kind="rewrite", rewritten=rewritten).rewritten == (5, Table("public", "t"), ("default", "type"))


def with_column(**values: object) -> dict[str, Any]:
    """Return a description with other values in its second column."""
    found = described("id=1 a=2")
    found["columns"][1] |= values
    return found


def test_the_greatest_numbers_that_a_server_has() -> None:
    """Others fit into no column of the warehouse: they ended each start of `run`."""
    last = (1 << 32) - 1
    largest = with_column(number=1600, type={"oid": last, "modifier": (1 << 31) - 1})
    gone = {"type": "table column", "oid": last, "number": 1600, "schema": "public", "name": "t", "column": "b"}
    said = message(largest | {"oid": last}, dropped=[gone], types=[{"oid": last, "array": None}])
    assert [said.tables[0].relation_id, said.tables[0].columns[1].facts.number, said.types] == [last, 1600, {last}]
    assert said.dropped_columns == {last: {1600: "b"}}


@pytest.mark.parametrize(
    "text",
    [
        content(with_column(number=1 << 40)),
        content(with_column(number=1601)),
        content(with_column(number=0)),
        content(with_column(number=1)),
        content(with_column(name="id")),
        content(with_column(name="")),
        content(with_column(name="a\0")),
        content(with_column(type={"oid": 1 << 63, "modifier": -1})),
        content(with_column(type={"oid": 23, "modifier": 1 << 31})),
        content(described("id=1") | {"oid": 1 << 32}),
        content(described("id=1") | {"oid": -1}),
        content(described("id=1", name="")),
        content(described("id=1", parent=(0, "u"))),
        content(dropped=[{"type": "table", "oid": 0, "schema": "public", "name": "t"}]),
        content(dropped=[{"type": "table column", "oid": 1, "number": 1 << 40, "schema": "public", "name": "t", "column": "b"}]),
        content(rewritten={"oid": 1 << 32, "schema": "public", "name": "t", "reasons": []}),
        content(types=[{"oid": 1, "array": 1 << 32}]),
        b"",
        b"\xff",
        b"[]",
        b"1",
        b"{",
        b'{"version": 1}',
        b'{"version": 2, "kind": "command", "tag": ""}',
        b'{"version": 1, "kind": "command", "tag": "\\ud800"}',
        b"[" * 100_000,
        content({"oid": 1}),
        content(described("id=1", key=["id"], primary_key={"columns": [9], "deferrable": False})),
        content(described("id=1") | {"columns": [{"number": "x"}]}),
        content(dropped=[{"type": "table"}]),
        content(rewritten=5),
        json.dumps({"version": 1, "kind": "command", "tables": 5}).encode(),
    ],
)
def test_what_no_trigger_writes(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"^it "):
        parse(text)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([], False),
        ([(5, "command")], True),
        ([(5, "installed")], True),
        ([(5, "installed"), (7, "removed")], False),
        # It was there before, or begins later.
        ([(25, "command")], True),
        ([(25, "installed")], False),
        ([(15, "installed"), (25, "command")], False),
        ([(15, "drop"), (16, "failure")], False),
        ([(5, "command"), (25, "removed")], True),
        ([(25, "removed")], False),
        # The command's transaction began before the removal, and ended after it.
        ([(5, "removed"), (7, "command")], False),
        ([(5, "removed"), (15, "command")], False),
        ([(5, "removed"), (7, "failure"), (8, "command")], False),
        ([(5, "removed"), (7, "command"), (8, "installed")], True),
        ([(5, "failure"), (7, "command")], True),
    ],
)
def test_whether_the_ddl_between_two_places_was_captured(kinds: list[tuple[int, str]], expected: bool) -> None:
    found = Descriptions()
    for lsn, kind in kinds:
        found.add((lsn, 0), message(kind=kind))
    assert found.covers((10, 0), (20, 0)) == expected


def test_a_table_that_was_dropped_is_forgotten_when_its_changes_are_done() -> None:
    found = Descriptions()
    drop = [{"type": "table", "oid": 1, "schema": "public", "name": "t"}]
    found.add((10, 0), message(described("id=1")))
    found.add((20, 0), message(kind="drop", tag="DROP TABLE", dropped=drop))
    found.forget_dropped(19)
    assert found.facts(table("id"), (15, 0)) is not None
    found.forget_dropped(20)
    assert found.facts(table("id"), (15, 0)) is None
    assert found.covers((5, 0), (25, 0))  # what the messages tell of the capture stays
    found.add((30, 0), message(described("id=1")))  # PostgreSQL uses an OID again after four billions of others
    found.forget_dropped(40)
    assert found.facts(table("id"), (35, 0)) is not None


def dropped(number: int, name: str) -> dict[str, object]:
    return {"type": "table column", "oid": 1, "number": number, "schema": "public", "name": "t", "column": name}


ADDED = described("id=1 a=2 c=3", key=["id"])


def test_a_description_that_is_older_than_its_place_is_not_used() -> None:
    """A transaction under REPEATABLE READ, which has waited for the one that adds a column, describes the table without it."""
    found = Descriptions()
    assert found.add((10, 0), message(described("id=1 a=2"), kind="installed")) == []
    assert found.add((20, 0), message(ADDED)) == []
    for lsn in (30, 40):  # it may run several commands, and there may be two such transactions
        assert found.add((lsn, 0), message(described("id=1 x=2"), tag="COMMENT")) == [Table("public", "t")]
        assert found.in_force(1, (lsn, 0)) is found.primary_key(table("id x"), (lsn, 0)) is None
    assert found.in_force(1, (29, 9)) is not None
    assert [place for place, _ in found.last_before((45, 0))] == [(20, 0)]
    assert found.last_place(1, (45, 0)) == (40, 0)
    # A description from the stream between two of them: the second one does not tell what was there before.
    assert found.facts_until_next(table("id x c"), (35, 0)) is None
    assert found.add((50, 0), message(described("id=1 x=2 c=3 d=4", key=["id"]))) == []
    assert found.primary_key(table("id x c d"), (50, 0)) == ("id",)


def test_a_description_that_is_older_than_its_place_has_the_missing_values_of_its_command() -> None:
    """A rewrite of the table, before its next change, takes them out of the catalog."""
    found = Descriptions()
    found.add((10, 0), message(ADDED))
    assert found.add((20, 0), message(described("id=1 a=2 n=4'5 m=5"))) == [Table("public", "t")]  # c is not in the snapshot
    found.add((30, 0), message(described("id=1 a=2 c=3 n=4 m=5!")))
    assert found.facts(table("id a c n m"), (30, 0)) == (
        *(ColumnFacts(number, None, is_filled=False) for number in (1, 2, 3)),
        ColumnFacts(4, "5", is_filled=False),
        ColumnFacts(5, None, is_filled=True),
    )


def test_partitions_tell_the_missing_value_in_a_description_that_is_older_than_its_place() -> None:
    found = Descriptions()
    found.add((10, 0), message(ADDED | {"kind": "partitioned"}))
    top, leaf = described("id=1 a=2 n=4!", kind="partitioned"), described("id=1 a=2 n=4'5", relation_id=2, parent=(1, "t"))
    found.add((20, 0), message(top, leaf))
    found.add((30, 0), message(described("id=1 a=2 c=3 n=4", kind="partitioned"), kind="drop"))
    facts = found.facts(table("id a c n"), (30, 0))
    assert facts is not None
    assert facts[3] == ColumnFacts(4, "5", is_filled=False)


def test_a_column_that_was_dropped_does_not_come_back() -> None:
    """ALTER PUBLICATION locks no table. Its transaction may end after the one that drops a column of a table."""
    found = Descriptions()
    found.add((10, 0), message(described("id=1 a=2")))
    assert found.add((20, 0), message(described("id=1"), kind="drop", dropped=[dropped(2, "a")])) == []
    assert found.add((30, 0), message(described("id=1 a=2"), tag="ALTER PUBLICATION")) == [Table("public", "t")]
    assert found.add((40, 0), message(described("id=1 a=3"))) == []


@pytest.mark.parametrize("end", [message(kind="failure"), message(kind="removed"), message(kind="installed"), None])
def test_columns_that_may_have_been_dropped_without_a_message(end: DdlMessage | None) -> None:
    """The capture may have been off, or the log have a gap."""
    found = Descriptions()
    found.end_at([40] if end is None else [], Servers())
    found.add((10, 0), message(ADDED))
    found.add((20, 0), message(described("id=1 a=2")))  # event triggers were off
    assert found.in_force(1, (25, 0)) is None
    if end is not None:
        found.add((30, 0), end)
        found.add((35, 0), message(kind="installed"))
    assert found.add((50, 0), message(described("id=1 a=2"))) == []
    assert found.in_force(1, (50, 0)) is not None


def test_a_table_that_was_dropped_has_no_columns_that_another_one_needs() -> None:
    """PostgreSQL uses an OID again after four billions of others."""
    found, gone = Descriptions(), {"type": "table", "oid": 1, "schema": "public", "name": "t"}
    found.add((10, 0), message(ADDED))
    found.add((15, 0), message(described("id=1 a=2"), kind="drop", dropped=[dropped(3, "c")]))
    found.add((20, 0), message(kind="drop", tag="DROP TABLE", dropped=[gone]))
    assert found.add((30, 0), message(described("c=3"), tag="CREATE TABLE")) == []


@pytest.mark.parametrize(
    ("before", "after", "gone", "numbers"),
    [
        ("id a", "id=1 b=2", [], [1, 2]),
        ("id a", "id=1 a=2 b=4", [], [1, 2]),
        ("id a:23", "id=1 a:25=2", [], [1, 2]),
        ("a b", "b=1 a=2", [], None),
        # Dropped and added with the same name, as one command: it is not what it was before.
        ("id a", "id=1 a=3", [(2, "a")], [1, 2]),
        ("id a b", "id=1 b=3 a=4", [(2, "a")], [1, 2, 3]),
        ("id a b", "id=1 c=4", [(2, "a"), (3, "b")], [1, 2, 3]),
        # A publication lacks columns: those at the end, or others.
        ("id a", "id=1 a=2 b=3 c=4", [], [1, 2]),
        ("id b", "id=1 a=2 b=3", [], None),
        ("id a b", "id=1 a=2", [], None),
    ],
)
def test_a_command_tells_what_the_table_was_before(
    before: str, after: str, gone: list[tuple[int, str]], numbers: list[int] | None
) -> None:
    found, relation = Descriptions(), table(before)
    found.add((10, 0), message(kind="command"))
    assert found.facts_until_next(relation, (15, 0)) is None
    found.add((20, 0), message(described(after), kind="drop", dropped=[dropped(*each) for each in gone]))
    found.add((30, 0), message(described("id=1 z=99")))
    facts = found.facts_until_next(relation, (15, 0))
    assert (None if facts is None else [fact.number for fact in facts]) == numbers
    assert found.facts_until_next(relation, (30, 0)) is None
    assert found.facts_until_next(replace(relation, relation_id=2), (15, 0)) is None


@pytest.mark.parametrize("kind", ["installed", "removed", "failure"])
def test_what_was_not_captured_says_nothing_of_before(kind: str) -> None:
    found = Descriptions()
    found.add((18, 0), message(kind=kind))
    found.add((20, 0), message(described("id=1 a=2")))
    assert found.facts_until_next(table("id a"), (15, 0)) is None
    assert [found.is_later_number(1, (15, 0), number) for number in (2, 3)] == [False, True]
    assert not found.is_later_number(1, (20, 0), 3)


def test_a_description_that_contradicts_the_command_before_it() -> None:
    """The capture was off for a while."""
    found = Descriptions()
    found.add((10, 0), message(described("id=1 a=2")))
    found.add((20, 0), message(described("id=1 b=3 c=4")))
    assert found.facts_until_next(table("id b"), (15, 0)) is None
