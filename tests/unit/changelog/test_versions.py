"""Versions of a table: its key, and the values of its columns in rows from before a version."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from cdcpipe.errors import InvalidArgumentsError, UnreachableError
from cdcpipe.masks import KEY_VARIABLE
from cdcpipe.pgoutput.messages import Column, Relation
from spark_sink.changelog.earlier_values import fills_between
from spark_sink.changelog.schema_history import SchemaHistory, SchemaVersion
from spark_sink.changelog.versions import TableVersions, check_masked, insert_snapshot
from spark_sink.schema.catalog_answers import CatalogAnswers
from spark_sink.schema.column_numbers import numbered
from spark_sink.schema.ddl import Descriptions
from spark_sink.schema.names import Names, Naming
from spark_sink.schema.servers import Servers
from spark_sink.schema.table import Fill, Table, Version
from spark_sink.schema.types import assign_columns, merge_columns
from spark_sink.source.contents import Use
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Position
from spark_sink.warehouse import gaps
from spark_sink.warehouse.wanted_copies import waiting
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import EPOCH
from support.ddl_messages import described as captured
from support.ddl_messages import message
from support.descriptions import CODE, ID, NONE, catalog, table, version
from support.oids import DATE, FLOAT4, FLOAT8, INT4, INT8, TIMESTAMP, TIMESTAMPTZ

TABLE = Table("public", "t")


@pytest.mark.parametrize(
    ("before", "after", "fills", "unknown"),
    [
        ("id=1 a=2", "id=1 a=2", [], []),
        ("id=1 a=2", "id=1 b=2", [Fill("b", "a")], []),
        ("id=1 a=2 b=3", "id=1 b=2 a=3", [Fill("b", "a"), Fill("a", "b")], []),
        ("id=1 a:23=2", "id=1 b:20=2", [Fill("b", "a")], []),
        ("id=1 a:25=2", "id=1 b:23=2", [], ["b"]),
        ("id=1 a:25=2", "id=1 a:23=2", [], []),
        ("id=1", "id=1 a=2", [], []),
        ("id=1", "id=1 a=2'7", [Fill("a", value="7")], []),
        ("id=1", "id=1 a:700=2'0.1", [Fill("a", value="0.10000000149011612")], []),  # the real's value in a double, too
        ("id=1", "id=1 a:700=2'-Infinity", [Fill("a", value="-Infinity")], []),
        ("id=1", "id=1 a:701=2'0.1", [Fill("a", value="0.1")], []),
        ("id=1", "id=1 a=2!", [], ["a"]),
        # Dropped and added again: not what was there before.
        ("id=1 a=2", "id=1 a=3", [Fill("a")], []),
        ("id=1 a=2", "id=1 a=3'7", [Fill("a", value="7")], []),
        ("id=1 a=2", "id=1 a=3!", [Fill("a")], ["a"]),
        ("id=1 a=2", "id=1", [], []),
    ],
)
def test_values_of_rows_from_before_a_version(before: str, after: str, fills: list[Fill], unknown: list[str]) -> None:
    versions = [SchemaVersion(1, 0, table(text), numbered(table(text), catalog(text), None)) for text in (before, after)]
    columns = merge_columns(None, [version.relation for version in versions])
    assert fills_between(versions[0], versions[1], columns) == (tuple(fills), unknown)
    nobody_knows = SchemaVersion(2, 0, versions[1].relation, None)
    names = [column.name for column in versions[1].relation.columns]
    new = [name for name in names if name not in before]
    assert fills_between(versions[0], nobody_knows, columns) == ((), new)
    # Where an earlier version had them, rows may still have values: they are another column's.
    assert {fill.column for fill in fills_between(versions[0], versions[1], columns, new)[0]} >= set(new)
    assert fills_between(versions[0], nobody_knows, columns, new) == (tuple(map(Fill, new)), new)


def test_a_column_that_is_wider_now() -> None:
    """Its earlier values still fit the narrower column that they come to."""
    texts = ("id=1 a=2", "id=1 b=2")
    before, after = (SchemaVersion(1, 0, table(text), numbered(table(text), catalog(text), None)) for text in texts)
    columns = merge_columns(None, [table("id a:23"), table("id b:23"), table("id a:20")], widen=True)
    assert [field.dataType.simpleString() for field in columns] == ["int", "bigint", "int"]
    assert fills_between(before, after, columns) == ((Fill("b", "a"),), [])


@pytest.mark.parametrize(
    ("before", "is_own"),
    [
        ("id=1 a:1082=2", True),
        ("id=1", True),
        ("id=1 a:1114=3", False),  # dropped, and added again
        ("id=1 A:1114=3", False),
        ("id=1 a:1082", False),  # nobody knows
    ],
)
def test_earlier_values_in_a_column_that_was_widened_before_the_narrower_one_came(
    tmp_path: Path, before: str, *, is_own: bool
) -> None:
    """There and back in one micro-batch: the changes before it are in the second column, older rows in the first one."""
    narrow, wide = "id=1 a:1082=2", "id=1 a:1114=2"
    relations = [table(narrow), table(wide)]
    columns = merge_columns(None, [*relations, relations[0]])
    assert columns.names == ["id", "a", "a__date"]
    first = SchemaVersion(5, 0, table(before), None if "=" not in before[-2:] else numbered(table(before), catalog(before), None))

    class Longer(Stepped):
        def before(self, _version: SchemaVersion) -> list[SchemaVersion]:
            return [first]

    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    history = cast("SchemaHistory", Longer(*described((narrow, wide), relations)))
    versions = TableVersions(warehouse, history, CatalogAnswers(None))
    [*_, noted] = versions.with_new(TABLE, [version(10, 0, ID)], [Use(30, 0, relations[1], 30)], 20, columns, columns)
    assert noted.fills == (Fill("a", "a__date", or_own=is_own),)
    assert Version.from_json(noted.to_json()) == noted
    # The rows of a copy come before the wider type, and there are changes of the first column between.
    snapshot = replace(version(20, 0, ID), snapshot=((1, "id"), (2, "a__date")))
    [*_, found] = insert_snapshot([version(30, 0, ID)], snapshot, history, columns, warehouse, TABLE)
    assert found.fills == (Fill("a", "a__date", or_own=True),)


class History:
    """A schema history with one version, as far as the code under test asks it."""

    def __init__(self, version: SchemaVersion) -> None:
        self._version = version
        self.captured = Descriptions()

    def version(self, _relation_id: int, place: tuple[int, int]) -> SchemaVersion | None:
        return self._version if self._version.place <= place else None

    description_of = SchemaHistory.description_of

    def step(self, _use: Use) -> None:
        return None

    def until(self, _relation_id: int, place: tuple[int, int]) -> list[SchemaVersion]:
        return [self._version] if self._version.place <= place else []

    def as_copied(self, *_: object) -> SchemaVersion | None:
        return None

    def is_uncertain(self, *_: object) -> bool:
        return False


@pytest.mark.parametrize(
    ("at_snapshot", "after", "fills", "unknown"),
    [
        # Renamed before the snapshot: its rows have the new name already.
        ("id=1 b=2", "id=1 b=2", [], []),
        # Renamed after it, and two that change places.
        ("id=1 a=2", "id=1 b=2", [Fill("b", "a")], []),
        ("a=1 b=2", "b=1 a=2", [Fill("b", "a"), Fill("a", "b")], []),
        # Dropped and added anew under the same name.
        ("id=1 a=2", "id=1 a=3", [Fill("a")], []),
        ("id=1 a=2", "id=1 a=3!", [Fill("a")], ["a"]),
        # Added after it: nothing is to be done where there is no default.
        ("id=1", "id=1 a=2", [], []),
        ("id=1", "id=1 a=2'7", [Fill("a", value="7")], []),
        ("id=1", "id=1 a:700=2'0.1", [Fill("a", value="0.10000000149011612")], []),
    ],
)
@pytest.mark.parametrize("ordinal", [0, 2])
def test_values_of_a_snapshots_rows(
    tmp_path: Path, at_snapshot: str, after: str, fills: list[Fill], unknown: list[str], ordinal: int
) -> None:
    """The rows of a late snapshot come after the stream has passed it, and has decided the values in rows from before a later
    change. Before this change, its transaction may have changed this table, or only others.
    """
    relations = [table(at_snapshot), table(after)]
    columns = merge_columns(None, relations)
    numbers = [int(part.partition("=")[2][:1]) for part in at_snapshot.split()]
    names = [field.name for field in assign_columns(columns, relations[0])]
    snapshot = replace(version(20, 0, ID), snapshot=tuple(zip(numbers, names, strict=True)))
    later = SchemaVersion(30, 2, relations[1], numbered(relations[1], catalog(after), None))
    known = [version(10, 0, ID), replace(version(30, ordinal, ID), fills=(Fill("b", "x"),))]
    found = insert_snapshot(known, snapshot, cast("SchemaHistory", History(later)), columns, Warehouse(tmp_path, "delta"), TABLE)
    assert [each.place for each in found] == [(10, 0), (20, 0), (30, ordinal)]
    assert found[1:] == [snapshot, replace(known[1], fills=tuple(fills))]
    assert Version.from_json(snapshot.to_json()) == snapshot

    # So is what the first description says that comes after a snapshot in time.
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    versions = TableVersions(warehouse, cast("SchemaHistory", History(later)), CatalogAnswers(None))
    noted = versions.with_new(Table("public", "t"), [snapshot], [Use(30, 2, relations[1], 30)], 20, columns, columns)
    assert noted[-1].fills == tuple(fills)
    assert [each.why for each in waiting(warehouse)] == [
        f"the stream does not have the values of earlier rows in {name}" for name in unknown
    ]


class Stepped(History):
    """The history of a table with a version before the present one."""

    def __init__(self, before: SchemaVersion, version: SchemaVersion) -> None:
        super().__init__(version)
        self._before = before

    def step(self, _use: Use) -> Any:
        return self._before, self._version

    def before(self, _version: SchemaVersion) -> list[SchemaVersion]:
        return []

    def until(self, _relation_id: int, place: tuple[int, int]) -> list[SchemaVersion]:
        return [each for each in (self._before, self._version) if each.place <= place]


def described(texts: Iterable[str], relations: Iterable[Relation]) -> list[SchemaVersion]:
    """Return the versions of a table at 10 and at 30, each with the columns that the catalog has."""
    return [
        SchemaVersion(lsn, 0, relation, numbered(relation, catalog(text), None))
        for lsn, text, relation in zip((10, 30), texts, relations, strict=False)
    ]


CIDR, INET, XML, TEXT, OID = 650, 869, 142, 25, 26


@pytest.mark.parametrize(
    ("old", "new", "is_wanted"),
    [
        (CIDR, INET, True),
        (XML, TEXT, True),
        (TEXT, 1043, False),
        (INET, INET, False),
        (INT4, OID, True),
    ],
)
@pytest.mark.parametrize("is_copied", [False, True])
def test_a_type_in_which_earlier_values_have_another_text(
    tmp_path: Path, old: int, new: int, *, is_wanted: bool, is_copied: bool
) -> None:
    """PostgreSQL rewrites no rows for these types: the catalog does not tell."""
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    texts = f"id=1 a:{old}=2", f"id=1 b:{new}=2"
    columns = merge_columns(None, map(table, texts))
    earlier, later = described(texts, map(table, texts))
    known = version(10, 0, ID)
    if is_copied:
        known = replace(known, snapshot=((1, "id"), (2, "a")), described=((1, "id", 23, -1), (2, "a", old, -1)))
    history = cast("SchemaHistory", History(later) if is_copied else Stepped(earlier, later))
    versions = TableVersions(warehouse, history, CatalogAnswers(None))
    versions.with_new(TABLE, [known], [Use(30, 0, later.relation, 30)], 20, columns, columns)
    reasons = [each.why for each in waiting(warehouse)]
    assert reasons == (["with their new type, earlier values of b have another text"] if is_wanted else [])


TIMES = TIMESTAMP, TIMESTAMPTZ


@pytest.mark.parametrize(
    ("old", "new", "mask", "is_wanted"),
    [
        (CIDR, INET, "hash", True),
        (INT4, OID, "hash", True),
        (XML, TEXT, "hash", True),
        (2205, OID, "hash", True),  # a regclass. Without a mask, Spark's types differ
        (*TIMES, "hash", True),  # rewrites nothing in a session with UTC
        (CIDR, INET, "null", False),
        (CIDR, INET, "redact", False),
        (INET, INET, "hash", False),
        (TEXT, 1043, "hash", False),
        (INT4, INT8, "hash", False),
        (*TIMES, "redact", False),
    ],
)
@pytest.mark.parametrize("is_copied", [False, True])
def test_the_type_of_a_hashed_column_gives_earlier_values_another_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: int, new: int, mask: str, *, is_wanted: bool, is_copied: bool
) -> None:
    """In the tables the column is a text before and after. But the hash is made of PostgreSQL's text."""
    monkeypatch.setenv(KEY_VARIABLE, "0123456789abcdef")
    warehouse = Warehouse(tmp_path, "delta", masks={"public.t.c": mask})
    warehouse.open(EPOCH)
    texts = f"id=1 c:{old}=2", f"id=1 c:{new}=2"
    columns = merge_columns(None, [warehouse.typed(table(each)) for each in texts])
    earlier, later = described(texts, map(table, texts))
    known = version(10, 0, ID)
    if is_copied:
        known = replace(known, snapshot=((1, "id"), (2, "c")), described=((1, "id", 23, -1), (2, "c", old, -1)))
    history = cast("SchemaHistory", History(later) if is_copied else Stepped(earlier, later))
    versions = TableVersions(warehouse, history, CatalogAnswers(None))
    versions.with_new(TABLE, [known], [Use(30, 0, later.relation, 30)], 20, columns, columns)
    reasons = [each.why for each in waiting(warehouse)]
    assert reasons == (["with their new type, earlier values of c have another text"] if is_wanted else [])


def test_a_copied_column_with_a_mask_keeps_its_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy has recorded PostgreSQL's type, as the description has it."""
    monkeypatch.setenv(KEY_VARIABLE, "0123456789abcdef")
    warehouse = Warehouse(tmp_path, "delta", masks={"public.t.c": "hash"})
    warehouse.open(EPOCH)
    later = described([f"id=1 c:{XML}=2", f"id=1 c:{XML}=2 n=3"], map(table, [f"id c:{XML}", f"id c:{XML} n"]))[1]
    columns = merge_columns(None, [warehouse.typed(later.relation)])
    known = version(10, 0, ID)
    known = replace(known, snapshot=((1, "id"), (2, "c")), described=((1, "id", 23, -1), (2, "c", XML, -1)))
    versions = TableVersions(warehouse, cast("SchemaHistory", History(later)), CatalogAnswers(None))
    versions.with_new(TABLE, [known], [Use(30, 0, later.relation, 30)], 20, columns, columns)
    assert waiting(warehouse) == []


def test_a_narrower_integer_in_which_earlier_values_are_other_numbers(tmp_path: Path) -> None:
    """4294967295 as an oid is -1 as an int4, in a column of the tables that holds both."""
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    texts = f"id=1 c:{OID}=2", f"id=1 c:{INT4}=2"
    columns = merge_columns(None, map(table, texts))
    earlier, later = described(texts, map(table, texts))
    versions = TableVersions(warehouse, cast("SchemaHistory", Stepped(earlier, later)), CatalogAnswers(None))
    versions.with_new(TABLE, [version(10, 0, ID)], [Use(30, 0, later.relation, 30)], 20, columns, columns)
    assert [each.why for each in waiting(warehouse)] == ["with their new type, earlier values of c have another text"]


@pytest.mark.parametrize(
    ("before", "after", "schema", "masks", "fills"),
    [
        ("id=1 pw:25=2", "id=1 password:25=2", "public", {"*.*.password": "null"}, [Fill("password"), Fill("pw")]),
        (
            "id=1 pw:25=2",
            "id=1 password:25=2",
            "public",
            {"*.*.p*": "hash", "*.*.password": "null"},
            [Fill("password"), Fill("pw")],
        ),
        ("id=1 pw:25=2", "id=1 password:25=2", "public", {"*.*.p*": "null"}, [Fill("password", "pw")]),
        ("id=1 pw:25=2", "id=1 password:25=2", "public", {"*.*.id": "hash"}, [Fill("password", "pw")]),
        # Another column has the name now.
        (
            "id=1 pw:25=2",
            "id=1 password:25=2 pw:25=3'x",
            "public",
            {"*.*.password": "null"},
            [Fill("pw", None, "x"), Fill("password")],
        ),
        # A number stays in its own column, which is of no use any more.
        ("id=1 pin=2", "id=1 pin=2", "secret", {"secret.*.pin": "redact"}, [Fill("pin"), Fill("pin__string")]),
        ("id=1 pw:25=2", "id=1 pw:25=2", "secret", {"secret.*.pw": "redact"}, [Fill("pw")]),
        ("id=1 pw:25=2", "id=1 pw:25=2", "secret", {"*.*.pw": "redact"}, []),
    ],
)
@pytest.mark.parametrize("is_copied", [False, True])
def test_earlier_values_that_a_mask_hides_since_a_rename(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    after: str,
    schema: str,
    masks: dict[str, str],
    fills: list[Fill],
    *,
    is_copied: bool,
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "0123456789abcdef")
    warehouse = Warehouse(tmp_path, "delta", masks=masks)
    warehouse.open(EPOCH)
    relations = [table(before), replace(table(after), namespace=schema)]
    columns = merge_columns(None, map(warehouse.typed, relations))
    earlier, later = described((before, after), relations)
    known = version(10, 0, ID)
    if is_copied:
        fields = assign_columns(columns, warehouse.typed(relations[0]))
        numbers = [fact.number for fact in earlier.facts or ()]
        known = replace(known, snapshot=tuple(zip(numbers, (field.name for field in fields), strict=True)))
    history = cast("SchemaHistory", History(later) if is_copied else Stepped(earlier, later))
    versions = TableVersions(warehouse, history, CatalogAnswers(None))
    versions.names = Names([Naming((30, 0), 1, TABLE, Table(schema, "t"), TABLE)]) if schema != "public" else Names()
    noted = versions.with_new(TABLE, [known], [Use(30, 0, relations[1], 30)], 20, columns, columns)
    assert set(noted[-1].fills) == set(fills)
    is_hidden = any(fill == Fill(fill.column) for fill in fills)
    assert any("since a rename, a mask applies to" in each.why for each in waiting(warehouse)) == is_hidden
    if is_copied:  # the same if the copy comes late
        house = Warehouse(tmp_path / "late", "delta", masks=masks)
        house.open(EPOCH)
        house.write_names(versions.names)
        [_, found] = insert_snapshot([version(30, 0, ID)], known, history, columns, house, TABLE)
        assert set(found.fills) == set(fills)
        assert bool(waiting(house)) == is_hidden


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize(
    ("after", "mask"),
    [
        ("id=1 ssn_raw:25=2 ssn:25=3", "public.t.ssn"),  # two columns swap names: there still is an ssn
        ("id=1 token:25=2 ssn:25=3", "public.t.ssn"),
        ("id=1 pw:25=2 token:25=3", "*.*.ssn"),
    ],
)
def test_a_rename_out_of_a_mask_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str, mask: str, *, is_copied: bool
) -> None:
    """A mask follows its column. The run ends before a version, and so a value, is written; and no copy shows the values."""
    monkeypatch.setenv(KEY_VARIABLE, "0123456789abcdef")
    before = "id=1 ssn:25=2 token:25=3"
    warehouse = Warehouse(tmp_path, "delta", masks={mask: "hash"})
    warehouse.open(EPOCH)
    warehouse.record(Position(1, 20))
    relations = [table(before), table(after)]
    columns = merge_columns(None, map(warehouse.typed, relations))
    earlier, later = described((before, after), relations)
    known = version(10, 0, ID)
    if is_copied:
        known = replace(
            known,
            snapshot=((1, "id"), (2, "ssn"), (3, "token")),
            described=((1, "id", 23, -1), (2, "ssn", 25, -1), (3, "token", 25, -1)),
        )
    warehouse.write_versions(TABLE, [known])
    history = cast("SchemaHistory", History(later) if is_copied else Stepped(earlier, later))
    use = Use(30, 0, relations[1], 30)

    def record(house: Warehouse) -> list[Version]:
        return TableVersions(house, history, CatalogAnswers(None)).with_new(TABLE, [known], [use], 20, columns, columns)

    def copy(house: Warehouse, lsn: int, text: str) -> None:
        names = {fact["number"]: fact["name"] for fact in catalog(text)}
        check_masked(house, history, TABLE, table(text), names, lsn)

    with pytest.raises(InvalidArgumentsError, match=r"was public\.t\.ssn, and --mask names it under the former name only"):
        record(warehouse)
    assert warehouse.versions(TABLE) == [known]
    copy(warehouse, 25, before)
    for lsn in 25, 40:  # the history knows the refused description, the tables do not have its changes
        with pytest.raises(InvalidArgumentsError, match=r"was public\.t\.ssn, and --mask names it under the former name only"):
            copy(warehouse, lsn, after)
    mended = Warehouse(tmp_path, "delta", masks={mask: "hash", "*.t.ssn_raw": "hash", "*.t.token": "hash", "*.t.pw": "hash"})
    copy(mended, 40, after)
    assert [each.place for each in record(mended)] == [(10, 0), (30, 0)]


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("former", [None, "7"])
def test_another_server_has_other_columns_under_the_same_numbers(tmp_path: Path, former: str | None, *, is_copied: bool) -> None:
    """A copy is not compared with what a former server has told. After a gap of the same server it is."""
    warehouse = Warehouse(tmp_path, "delta", masks={"public.*.ssn": "null"})
    warehouse.open(EPOCH)
    known = version(10, 0, ID)
    if is_copied:
        known = replace(known, snapshot=((1, "id"), (2, "ssn")), described=((1, "id", 23, -1), (2, "ssn", 25, -1)))
    warehouse.write_versions(TABLE, [known])
    [told] = described(["id=1 ssn:25=2"], [table("id ssn:25")])
    history = cast("SchemaHistory", History(replace(told, end_lsn=99) if is_copied else told))
    gaps.record(warehouse, [replace(EPOCH, number=2, start_lsn=20, gap=Gap(10, "", 0.0, 0.0), former_system_id=former)])
    warehouse.record(Position(2, 20))

    def copy(lsn: int) -> None:
        check_masked(warehouse, history, TABLE, table("id name:25"), {1: "id", 2: "name"}, lsn)

    for lsn in (20, 30) if former is None else (20,):
        with pytest.raises(InvalidArgumentsError, match=r"was public\.t\.ssn, and --mask names it under the former name only"):
            copy(lsn)
    if former is not None:
        copy(30)


class Renamed(History):
    """The history of a table that had other columns under another name, which this changelog does not have."""

    def step(self, _use: Use) -> Any:
        facts = [
            SchemaVersion(n, 0, table(text), numbered(table(text), catalog(text), None))
            for n, text in ((20, "id=1"), (30, "id=1 a=3"))
        ]
        return tuple(facts)

    def before(self, _version: SchemaVersion) -> list[SchemaVersion]:
        return [SchemaVersion(10, 0, table("id a elsewhere"), None)]


def test_a_type_that_does_not_hold_the_values_of_a_snapshot(tmp_path: Path) -> None:
    """The earlier values stay in the column of the old type: the table needs a copy."""
    relations = [table("id=1 a:25=2"), table("id=1 a:23=2")]
    columns = merge_columns(None, relations)
    snapshot = replace(version(20, 0, ID), snapshot=((1, "id"), (2, "a")))
    later = SchemaVersion(30, 2, relations[1], numbered(relations[1], catalog("id=1 a:23=2"), None))
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    versions = TableVersions(warehouse, cast("SchemaHistory", History(later)), CatalogAnswers(None))
    versions.with_new(Table("public", "t"), [snapshot], [Use(30, 2, relations[1], 30)], 20, columns, columns)
    [wanted] = waiting(warehouse)
    assert (wanted.why, wanted.reasons[0].since_lsn) == ("earlier values of a are in columns of the old type", 30)


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize(
    ("wide", "narrow", "is_wanted"), [(FLOAT8, FLOAT4, True), (TIMESTAMP, DATE, True), (FLOAT8, INT4, True), (INT8, INT4, False)]
)
def test_a_narrower_type_in_the_same_column(tmp_path: Path, wide: int, narrow: int, *, is_wanted: bool, is_copied: bool) -> None:
    """PostgreSQL has rounded earlier values. Back to the wide type they stay as they are."""
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    texts = f"id=1 a:{wide}=2", f"id=1 a:{narrow}=2"
    earlier, later = described(texts, map(table, texts))
    columns = merge_columns(None, [earlier.relation, later.relation, earlier.relation])
    assert columns.names == ["id", "a"]
    known = version(10, 0, ID)
    if is_copied:
        known = replace(known, snapshot=((1, "id"), (2, "a")), described=((1, "id", 23, -1), (2, "a", wide, -1)))
    history = cast("SchemaHistory", History(later) if is_copied else Stepped(earlier, later))

    def record(house: Warehouse, known: Version, history: SchemaHistory, relation: Relation) -> list[str]:
        versions = TableVersions(house, history, CatalogAnswers(None))
        [*_, noted] = versions.with_new(TABLE, [known], [Use(30, 0, relation, 30)], 20, columns, columns)
        assert noted.fills == ()
        return [each.why for each in waiting(house)]

    wanted = ["earlier values of a are not rounded to the new type"] if is_wanted else []
    assert record(warehouse, known, history, later.relation) == wanted
    house = Warehouse(tmp_path / "back", "delta")
    house.open(EPOCH)
    back = Stepped(replace(later, end_lsn=10), replace(earlier, end_lsn=30))
    assert record(house, version(10, 0, ID), cast("SchemaHistory", back), earlier.relation) == []


def test_a_column_that_the_table_had_under_another_name(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    history = Renamed(SchemaVersion(30, 0, table("id a"), None))
    versions = TableVersions(warehouse, cast("SchemaHistory", history), CatalogAnswers(None))
    columns = merge_columns(None, [table("id a")])
    noted = versions.with_new(Table("public", "t"), [version(20, 0, ID)], [Use(30, 0, table("id a"), 30)], 20, columns, columns)
    assert noted[-1].fills == (Fill("a"),)


@pytest.mark.parametrize(
    ("known", "primary_key", "expected", "is_repeated"),
    [
        ([], ["id"], ID, False),
        ([version(10, 0, CODE)], ["id"], ID, False),
        # The launcher has only repeated what was said before.
        ([version(10, 0, CODE)], ["id"], CODE, True),
        ([version(10, 0, NONE)], ["id"], NONE, True),
        ([version(10, 0, CODE, 2)], ["id"], ID, True),
        ([], ["id"], ID, True),
        # It has got a column since, which is the key now; nobody knows what was before, or somebody does.
        ([], ["later"], NONE, False),
        ([version(10, 0, ID)], ["later"], ID, False),
        ([version(10, 0, ("gone",))], ["later"], NONE, False),
        ([version(10, 0, ID, 2)], ["later"], NONE, False),
        # It has been dropped, or has no key any more.
        ([version(10, 0, ID)], None, ID, False),
        ([version(10, 0, ID)], [], NONE, False),
    ],
)
def test_a_key_that_the_catalog_has_of_another_time(
    tmp_path: Path, known: list[Version], primary_key: list[str] | None, expected: tuple[str, ...], is_repeated: bool
) -> None:
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    described = [] if primary_key is None else [{"relation_id": 1, "primary_key": primary_key}]
    full = replace(table("id code"), replica_identity="f")
    columns = merge_columns(None, [full])
    history = cast("SchemaHistory", History(SchemaVersion(1, 0, full, None)))
    versions = TableVersions(warehouse, history, CatalogAnswers(lambda: described))
    noted = versions.with_new(Table("public", "t"), known, [Use(20, 0, full, 20, is_repeated)], 15, None, columns)
    assert noted[-1].key == expected


def test_behind_a_gap_the_key_is_not_that_of_captured_ddl_from_before(tmp_path: Path) -> None:
    """The table has got another key in the gap, and was copied with it."""
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    full = replace(table("id code"), replica_identity="f")
    columns = merge_columns(None, [full])
    history = History(SchemaVersion(1, 0, full, None))
    history.captured.end_at([1000], Servers())
    history.captured.add((10, 0), message(captured("id=1 code=2", key=["id"])))
    answers = CatalogAnswers(lambda: [{"relation_id": 1, "primary_key": ["id", "code"], "columns": catalog("id=1 code=2")}])
    versions = TableVersions(warehouse, cast("SchemaHistory", history), answers)
    both = ("id", "code")
    copied = replace(version(1500, 0, both), snapshot=((1, "id"), (2, "code")), described=((1, "id", 23, -1), (2, "code", 23, -1)))
    noted = versions.with_new(TABLE, [version(5, 0, ID), copied], [Use(2000, 0, full, 2000)], 1500, columns, columns)
    assert [each.key for each in noted] == [ID, both]


KEYED = Relation(None, 1, "public", "t", "d", (Column(1, "id", 23, -1), Column(0, "code", 23, -1)))


@pytest.mark.parametrize(
    ("known", "identity", "expected", "is_repeated"),
    [
        ([], ["id"], ID, False),
        ([], ["id", "g"], NONE, False),
        ([version(10, 0, ID)], ["id", "g"], NONE, False),
        # The catalog has the identity of another time, or does not say it.
        ([], ["id", "code"], ID, False),
        ([], ["code"], ID, False),
        ([], [], ID, False),
        # The launcher has only repeated what was said before.
        ([version(10, 0, NONE)], ["id"], NONE, True),
        ([version(10, 0, NONE)], ["id"], ID, False),
        ([version(10, 0, NONE, 2)], ["id"], ID, True),
    ],
)
def test_a_key_of_which_a_column_is_not_published_is_none(
    tmp_path: Path, known: list[Version], identity: list[str], expected: tuple[str, ...], is_repeated: bool
) -> None:
    """The server marks the columns of the key that it describes. Rows may differ in the others alone."""
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    columns = merge_columns(None, [KEYED])
    history = cast("SchemaHistory", History(SchemaVersion(1, 0, KEYED, None)))
    versions = TableVersions(
        warehouse, history, CatalogAnswers(lambda: [{"relation_id": 1, "identity": identity, "columns": catalog("id=1 code=2")}])
    )
    noted = versions.with_new(TABLE, known, [Use(20, 0, KEYED, 20, is_repeated)], 15, None, columns)
    assert noted[-1].key == expected


def test_a_key_that_got_a_new_column_since_was_whole_before(tmp_path: Path) -> None:
    """The tables lag behind: the catalog has a column already, and it in the key, that these changes do not have yet."""
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    columns = merge_columns(None, [KEYED])
    history = cast("SchemaHistory", History(SchemaVersion(1, 0, KEYED, None)))
    now = {"relation_id": 1, "identity": ["id", "g"], "columns": catalog("id=1 code=2 g=3")}
    versions = TableVersions(warehouse, history, CatalogAnswers(lambda: [now]))
    assert versions.with_new(TABLE, [], [Use(20, 0, KEYED, 20)], 15, None, columns)[-1].key == ID


def test_one_question_that_nobody_answers_is_enough_for_a_micro_batch() -> None:
    """It takes a minute each. What was answered before is still known."""
    asked: list[bool] = []

    def describe() -> list[dict[str, Any]]:
        asked.append(True)
        if len(asked) in {2, 3}:
            raise UnreachableError("no server")
        return [{"relation_id": 1, "primary_key": ["id"], "identity": ["id", "g"], "columns": catalog("id=1 code=2")}]

    answers, unknown = CatalogAnswers(describe), replace(KEYED, relation_id=2)
    assert answers.identity(KEYED) == ("id", "g")
    answers.begin_batch()
    assert (answers.columns(unknown), answers.columns(unknown), answers.identity(KEYED)) == ([], [], ("id", "g"))
    with pytest.raises(UnreachableError):
        answers.primary_key(KEYED)
    assert len(asked) == 2
    answers.begin_batch()
    assert (answers.columns(unknown), len(asked)) == ([], 3)


def test_captured_ddl_says_which_columns_of_the_key_are_not_published(tmp_path: Path) -> None:
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    columns = merge_columns(None, [KEYED])
    history = History(SchemaVersion(1, 0, KEYED, None))
    history.captured.add((10, 0), message(captured("id=1 code=2 g=3", key=["id", "g"])))
    versions = TableVersions(warehouse, cast("SchemaHistory", history), CatalogAnswers(lambda: [{"relation_id": 1}]))
    assert versions.with_new(TABLE, [], [Use(20, 0, KEYED, 20)], 15, None, columns)[-1].key == NONE


def test_a_key_is_told_also_while_the_catalog_cannot_be_asked(tmp_path: Path) -> None:
    def describe() -> list[dict[str, Any]]:
        raise UnreachableError("no server")

    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    columns = merge_columns(None, [KEYED])
    history = cast("SchemaHistory", History(SchemaVersion(1, 0, KEYED, None)))
    versions = TableVersions(warehouse, history, CatalogAnswers(describe))
    assert versions.with_new(TABLE, [], [Use(20, 0, KEYED, 20)], 15, None, columns)[-1].key == ID


def test_the_catalog_tells_nothing_of_another_server(tmp_path: Path) -> None:
    """Its OIDs are those of other tables. Changes from before the gap may be in the log still."""
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    full = replace(table("id code"), replica_identity="f")
    columns = merge_columns(None, [full])
    history = cast("SchemaHistory", History(SchemaVersion(1, 0, full, None)))
    keys = iter(["code", "id"])

    def describe() -> list[dict[str, Any]]:
        return [{"relation_id": 1, "primary_key": [next(keys)], "columns": catalog("id=1 code=2"), "parts": [{"relation_id": 9}]}]

    answers = CatalogAnswers(describe)
    before = answers.primary_key(full), answers.at(20).parts(full)
    assert before == (CODE, [9])
    answers.end_at(Servers([100]))
    versions = TableVersions(warehouse, history, answers)
    known = [version(10, 0, ID)]
    for lsn, expected in (20, ID), (100, ID), (101, ID):
        assert versions.with_new(TABLE, known, [Use(lsn, 0, full, lsn)], 15, None, columns)[-1].key == expected
    assert next(keys, None) is None  # what was answered before the gap does not count behind it
    old = answers.at(100)
    assert (old.primary_key(full), old.identity(full), old.columns(full), old.parts(full), old.relation(1)) == (
        None,
        (),
        [],
        [],
        None,
    )


def test_a_key_is_asked_for_once_in_a_micro_batch() -> None:
    keys = iter(["id", "code"])
    answers = CatalogAnswers(lambda: [{"relation_id": 1, "primary_key": [next(keys)], "columns": catalog("id=1 code=2")}])
    found = []
    for _ in range(2):
        answers.begin_batch()
        found += [answers.primary_key(table("id code")) for _ in range(2)]
    assert found == [ID, ID, CODE, CODE]


@pytest.mark.parametrize(
    ("others", "gap_at", "reasons"),
    [
        ([2], None, ["another table had its name for a while"]),
        ([2, 3], None, ["another table had its name for a while"]),
        ([2], 25, []),  # another server's table with this OID
        ([], None, []),
    ],
)
def test_a_table_that_gets_its_name_back(tmp_path: Path, others: list[int], gap_at: int | None, reasons: list[str]) -> None:
    """Two tables swapped their names and swapped back, between two looks at the catalog. The replica lost all unchanged rows."""
    warehouse = Warehouse(tmp_path, "delta")
    warehouse.open(EPOCH)
    history = History(SchemaVersion(1, 0, table("id"), None))
    history.captured.servers = Servers([] if gap_at is None else [gap_at])
    columns = merge_columns(None, [table("id")])
    versions = TableVersions(warehouse, cast("SchemaHistory", history), CatalogAnswers(None))
    known, uses = [version(10, 0, ID)], [*others, 1, 1]
    for lsn, number in enumerate(uses, 20 if gap_at is None else 25):
        use = Use(lsn, 0, replace(table("id"), relation_id=number), lsn)
        known = versions.with_new(TABLE, known, [use], lsn - 1, columns, columns)
        is_back = number == 1
        assert [each.why for each in waiting(warehouse)] == (reasons if is_back else [])
    assert [each.relation_id for each in known] == [1, *others, *([1] if others else [])]
    assert [reason.since_lsn for each in waiting(warehouse) for reason in each.reasons] == [20 + len(others)] * len(reasons)
