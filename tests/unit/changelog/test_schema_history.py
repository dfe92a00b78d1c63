"""The versions of a table's description: what a snapshot tells about its columns, and a description that comes again."""

from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.parquet as pq
import pytest

from cdcpipe.errors import InvalidArgumentsError
from spark_sink.changelog.delta_changelogs import DeltaChangelogs
from spark_sink.changelog.schema_history import SchemaHistory, SchemaVersion
from spark_sink.changelog.versions import TableVersions
from spark_sink.pipeline.known_tables import KnownTables
from spark_sink.schema.catalog_answers import CatalogAnswers
from spark_sink.schema.column_numbers import ColumnFacts, looks
from spark_sink.schema.names import Names
from spark_sink.schema.servers import Servers
from spark_sink.schema.table import Fill, Table, Version
from spark_sink.schema.types import merge_columns
from spark_sink.source.contents import Contents, Use
from spark_sink.staging.gap import Gap
from spark_sink.staging.log import Position, Segment
from spark_sink.warehouse import dropped_tables, gaps
from spark_sink.warehouse.warehouse import Warehouse
from support.changelog_rows import EPOCH
from support.ddl_messages import ddl, described, message
from support.descriptions import ID, catalog, table, version
from support.oids import INT4

T = Table("public", "t")


def test_a_table_is_as_it_was_copied_until_captured_ddl_says_otherwise(tmp_path: Path) -> None:
    house = Warehouse(tmp_path, "delta")
    columns = tuple((number, name, INT4, -1) for number, name in ((1, "id"), (4, "a")))
    snapshot = replace(version(20, 0, ID), snapshot=((1, "id"), (4, "a")), described=columns)
    assert Version.from_json(snapshot.to_json()) == snapshot
    house.write_versions(T, [version(10, 0, ID), snapshot])
    spark: Any = None
    history = SchemaHistory(spark, house, CatalogAnswers(None))

    found = history.copied(T, 1, (30, 0))
    assert found is not None
    assert found.place == (20, 0)
    assert looks(found.relation) == looks(table("id a"))
    assert [fact.number for fact in found.facts or ()] == [1, 4]
    assert history.copied(T, 1, (19, 0)) is history.copied(T, 2, (30, 0)) is None

    # Nobody tells what has happened since.
    assert history.as_copied(T, table("id a"), (30, 0)) is None
    # A command of another table tells that the capture was there all the time.
    history.captured.add((40, 0), message(described("id=1", relation_id=7)))
    assert history.as_copied(T, table("id a"), (30, 0)) == found
    assert history.as_copied(T, table("id a:25"), (30, 0)) is None
    history.captured.add((50, 0), message(described("id=1 a=5", key=["id"])))
    assert history.as_copied(T, table("id a"), (49, 0)) == found
    assert history.as_copied(T, table("id a"), (50, 0)) is None


MOOD, OTHER = 16500, 16600


def copied_table(house: Warehouse, lsn: int, type_id: int) -> None:
    """Record a snapshot of the table: it has a column of this type."""
    columns = ((1, "id", INT4, -1), (2, "m", type_id, -1))
    house.write_versions(T, [replace(version(lsn, 0, ID), snapshot=((1, "id"), (2, "m")), described=columns)])


def test_the_tables_with_a_type_are_those_of_all_that_is_known(tmp_path: Path) -> None:
    house, spark, use = Warehouse(tmp_path, "delta"), cast("Any", None), Use(20, 1, table(f"id m:{OTHER}"), 20)
    history = SchemaHistory(spark, house, CatalogAnswers(None))

    def found(type_id: int, lsn: int, ordinal: int = 0) -> list[Table]:
        return history.tables_with(frozenset({type_id, 1}), (lsn, ordinal), Names())

    assert found(MOOD, 30) == []
    copied_table(house, 10, MOOD)
    assert [found(MOOD, lsn) for lsn in (9, 10, 30)] == [[], [T], [T]]
    # What the stream says later counts from then on. A message stands before the change with its place.
    segment = Segment(1, 15, 20, Path("log/000001/segment"))
    history.record_new({T: Contents(1, 20, [use])}, lambda *_: None, [segment])
    assert [found(MOOD, 20, 1), found(OTHER, 20, 1)] == [[T], []]
    assert [found(MOOD, 20, 2), found(OTHER, 20, 2)] == [[], [T]]
    # So does what captured DDL says, also when the capture has ended since.
    history.captured.add((40, 0), message(described(f"id=1 m:{MOOD}=2")))
    history.captured.add((50, 0), message(kind="removed"))
    assert [found(OTHER, 39), found(MOOD, 39), found(MOOD, 40), found(MOOD, 60)] == [[T], [], [T], [T]]
    # And another snapshot.
    copied_table(house, 55, INT4)
    assert [found(MOOD, 54), found(MOOD, 55), found(INT4, 55)] == [[T], [], [T]]


def test_a_table_that_was_dropped_needs_no_copy_for_a_type(tmp_path: Path) -> None:
    house, spark = Warehouse(tmp_path, "delta"), cast("Any", None)
    history = SchemaHistory(spark, house, CatalogAnswers(None))
    copied_table(house, 10, MOOD)
    dropped_tables.record(house, T, 1, Position(1, 20))
    assert history.tables_with(frozenset({MOOD}), (30, 0), Names()) == []
    # Another table that was created under its name has no version yet.
    history.captured.add((25, 0), message(described(f"id=1 m:{MOOD}=2", relation_id=2)))
    assert history.tables_with(frozenset({MOOD}), (30, 0), Names()) == [T]


@pytest.mark.parametrize(
    ("later", "is_repeated", "numbers"),
    [
        ("id=1 a=2", False, [[1, 2]]),
        # Dropped and added again: the stream says the same as before, and not since when.
        ("id=1 a=3", False, [[1, 2], None]),
        ("id=1 a=3", True, [[1, 2]]),
        ("id=1 a=2 b=3", False, [[1, 2]]),
        # The catalog is further. Nobody knows whether that is the column from before.
        ("id=1 a=3 b=4", False, [[1, 2], None]),
    ],
)
def test_a_description_that_comes_again(tmp_path: Path, later: str, is_repeated: bool, numbers: list[list[int] | None]) -> None:
    house = Warehouse(tmp_path, "delta")
    answers = iter(["id=1 a=2", later, later])
    spark: Any = None
    tables = CatalogAnswers(lambda: [{"relation_id": 1, "schema": "public", "name": "t", "columns": catalog(next(answers))}])
    history = SchemaHistory(spark, house, tables)
    for lsn, repeated in ((10, False), (20, is_repeated), (30, is_repeated)):
        segment = Segment(1, lsn - 5, lsn, Path("log/000001/segment"))
        history.record_new({T: Contents(1, lsn, [Use(lsn, 0, table("id a"), lsn, repeated)])}, lambda *_: None, [segment])
    assert [each.facts and [fact.number for fact in each.facts] for each in history.until(1, (30, 0))] == numbers


@pytest.mark.parametrize(
    ("copied", "is_repeated", "fills"),
    [("b", False, (Fill("a", "b"),)), ("a", False, ()), ("b", True, ())],
)
def test_a_column_that_has_its_name_back_since_a_copy(
    tmp_path: Path, copied: str, is_repeated: bool, fills: tuple[Fill, ...]
) -> None:
    """The stream says the same as before the copy, whose rows have the values under the name of that time."""
    house, spark = Warehouse(tmp_path, "delta"), cast("Any", None)
    house.open(EPOCH)
    columns = catalog("id=1 a=2")
    tables = CatalogAnswers(lambda: [{"relation_id": 1, "schema": "public", "name": "t", "columns": columns}])
    history = SchemaHistory(spark, house, tables)
    first, again = Use(10, 0, table("id a"), 10), Use(30, 0, table("id a"), 30, is_repeated)
    snapshot = replace(
        version(20, 0, ID), snapshot=((1, "id"), (2, copied)), described=((1, "id", INT4, -1), (2, copied, INT4, -1)), is_whole=True
    )
    known = [version(10, 0, ID), snapshot]
    history.record_new({T: Contents(1, 10, [first])}, lambda *_: None, [Segment(1, 5, 10, Path("log/000001/segment"))])
    house.write_versions(T, known)
    history.record_new({T: Contents(1, 30, [again])}, lambda *_: None, [Segment(1, 10, 30, Path("log/000001/segment"))])
    schema = merge_columns(None, [table("id a"), table("id b")])
    found = TableVersions(house, history, tables).with_new(T, known, [again], 20, schema, schema)
    assert [each.fills for each in found[2:]] == ([fills] if fills else [])


@pytest.mark.parametrize(
    ("begins", "end", "described_at"),
    [
        ((10, 0), (20, 0), (10, 0)),
        # The transaction has changed other tables before, and describes this one twice.
        ((20, 0), (20, 5), (20, 3)),
        ((20, 0), (40, 0), (20, 3)),
        ((20, 5), (40, 0), (20, 5)),
        # The key is another one, and the description is the same: until the next version, or to the end.
        ((20, 0), (20, 3), (10, 0)),
        ((30, 0), (40, 0), (20, 5)),
        ((9, 0), (10, 0), None),
    ],
)
def test_the_description_that_begins_with_a_version(
    tmp_path: Path, begins: tuple[int, int], end: tuple[int, int], described_at: tuple[int, int] | None
) -> None:
    house, spark = Warehouse(tmp_path, "delta"), cast("Any", None)
    history = SchemaHistory(spark, house, CatalogAnswers(None))
    uses = [Use(*place, table(text), place[0]) for place, text in (((10, 0), "id"), ((20, 3), "id a"), ((20, 5), "id b"))]
    segment = Segment(1, 5, 20, Path("log/000001/segment"))
    history.record_new({T: Contents(3, 20, uses)}, lambda *_: None, [segment])
    found = history.description_of(version(*begins, ID), end)
    assert (found and found.place) == described_at


def test_behind_a_gap_to_another_server_its_oids_are_those_of_other_tables(tmp_path: Path) -> None:
    """Also for a table that was copied there, and not described yet; and for one of the former server that nobody copies there."""
    house, spark = Warehouse(tmp_path, "delta"), cast("Any", None)
    house.open(EPOCH)
    gaps.record(house, [replace(EPOCH, number=2, start_lsn=20, gap=Gap(10, "", 0.0, 0.0), former_system_id="7")])
    copied_table(house, 8, MOOD)
    now = {"relation_id": 1, "schema": "public", "name": "other", "columns": catalog("id=1 b=2")}
    answers = CatalogAnswers(lambda: [now])
    answers.end_at(Servers([20]))
    history, other = SchemaHistory(spark, house, answers), Table("public", "other")
    segment = Segment(1, 5, 10, Path("log/000001/segment"))
    history.record_new({T: Contents(1, 10, [Use(10, 0, table("id a"), 10)])}, lambda *_: None, [segment])
    house.write_versions(other, [version(30, 0, ID)])
    for lsn, is_known in (20, True), (21, False):
        assert bool(history.before(SchemaVersion(lsn, 0, table("id a"), None))) == is_known
        assert (history.version(1, (lsn, 0)) is not None, history.copied(T, 1, (lsn, 0)) is not None) == (is_known, is_known)
    assert [each and looks(each) for each in map(history.newest, (T, other))] == [looks(table("id a")), looks(table("id b"))]


def test_a_gap_to_another_server_counts_as_soon_as_it_is_recorded(tmp_path: Path) -> None:
    """Copies may come from behind it while segments from before it are still to be applied: an OID is no table there."""
    house, spark = Warehouse(tmp_path, "delta"), cast("Any", None)
    house.open(EPOCH)
    answers = CatalogAnswers(lambda: [{"relation_id": 1, "schema": "public", "name": "t", "columns": catalog("id=1 b=2")}])
    history, other = SchemaHistory(spark, house, answers), Table("public", "other")
    tables = KnownTables(spark, house, history, answers)
    segment = Segment(1, 5, 10, Path("log/000001/segment"))
    history.record_ddl([], [segment])
    history.record_new({T: Contents(1, 10, [Use(10, 0, table("id a"), 10)])}, lambda *_: None, [segment])
    gaps.record(house, [replace(EPOCH, number=2, start_lsn=20, gap=Gap(10, "", 0.0, 0.0), former_system_id="7")])
    tables.read_names()
    house.write_versions(other, [version(30, 0, ID)])
    segment = Segment(1, 10, 15, Path("log/000001/segment"))
    history.record_ddl([], [segment])
    newest = history.newest(other)
    assert newest is not None
    assert looks(newest) == looks(table("id b"))


def test_numbers_of_another_server_are_no_certain_ones(tmp_path: Path) -> None:
    """The catalog has the new column in place of a dropped one. That the former server had its number says nothing."""
    for former, is_uncertain in (None, False), ("7", True):
        house, spark = Warehouse(tmp_path / str(former), "delta"), cast("Any", None)
        house.open(EPOCH)
        gaps.record(house, [replace(EPOCH, number=2, start_lsn=20, gap=Gap(10, "", 0.0, 0.0), former_system_id=former)])
        house.write_versions(T, [replace(version(8, 0, ID), snapshot=((1, "id"), (3, "a")))])
        history = SchemaHistory(spark, house, CatalogAnswers(None))
        facts = tuple(ColumnFacts(number, None, is_filled=False) for number in (1, 3))
        first, last = (SchemaVersion(lsn, 0, table("id a"), facts) for lsn in (10, 30))
        assert history.is_uncertain(T, last, [first]) is is_uncertain


def told_behind_gap(house: Warehouse, former: str | None, *told: tuple[int, str, str]) -> Callable[[int], list[Version]]:
    """Let the stream describe a table: LSN, name, columns. There is a gap at 20. Return what makes the versions of one of these."""
    house.open(EPOCH)
    gaps.record(house, [replace(EPOCH, number=2, start_lsn=20, gap=Gap(10, "", 0.0, 0.0), former_system_id=former)])
    spark: Any = None
    now = {"columns": catalog(told[0][2])}
    answers = CatalogAnswers(lambda: [{"relation_id": 1, "schema": "public", "name": "t", **now}])
    history, uses = SchemaHistory(spark, house, answers), list[Use]()
    for lsn, name, text in told:
        now["columns"] = catalog(text)
        segment = Segment(1, lsn - 5, lsn, Path("log/000001/segment"))
        uses.append(Use(lsn, 0, replace(table(text), name=name), lsn))
        history.record_new({T: Contents(1, lsn, uses[-1:])}, lambda *_: None, [segment])
    columns = merge_columns(None, [house.typed(each) for each in (table("id email"), *(use.relation for use in uses))])
    versions = TableVersions(house, history, answers)
    return lambda number: versions.with_new(T, house.versions(T), [uses[number]], uses[number].end_lsn - 1, columns, columns)


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("former", [None, "7"])
def test_masks_behind_a_gap_do_not_go_by_the_oids_of_another_server(tmp_path: Path, former: str | None, *, is_copied: bool) -> None:
    """The OID is that of a masked table, or the number is that of a masked column, of the former server."""
    house = Warehouse(tmp_path, "delta", masks={"public.*.email": "null"})
    if is_copied:
        house.write_versions(T, [replace(version(15, 0, ID), snapshot=((1, "id"), (2, "email")))])
    before = [] if is_copied else [(10, "person", "id=1 email=2")]
    make = told_behind_gap(house, former, *before, (30, "t", "id=1 name=2"))
    if former is None:
        with pytest.raises(InvalidArgumentsError, match=r"column public\.t\.name was public\.\w+\.email"):
            make(-1)
    else:
        assert make(-1)[-1].fills == ()


@pytest.mark.parametrize("former", [None, "7"])
@pytest.mark.parametrize("after", ["id=1 email=2", "id=1 email=2 a=3"])
def test_masks_behind_a_gap_go_by_what_the_server_behind_it_has_said(tmp_path: Path, former: str | None, after: str) -> None:
    """Also if its first description is that of the former server."""
    house = Warehouse(tmp_path, "delta", masks={"public.*.email": "null"})
    make = told_behind_gap(house, former, (10, "t", "id=1 email=2"), (30, "t", after), (40, "t", after.replace("email", "name")))
    with pytest.raises(InvalidArgumentsError, match=r"column public\.t\.name was public\.t\.email"):
        make(2)


def test_a_table_that_is_created_anew_every_night_has_its_columns_once_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, spark = Warehouse(tmp_path, "delta"), cast("Any", None)
    ids = range(1, 4)
    tables = CatalogAnswers(
        lambda: [{"relation_id": number, "schema": "public", "name": "t", "columns": catalog("id=1 a=2")} for number in ids]
    )
    history = SchemaHistory(spark, house, tables)
    for number in ids:
        segment = Segment(1, number * 10 - 5, number * 10, Path("log/000001/segment"))
        use = Use(number * 10, 0, replace(table("id a"), relation_id=number), number * 10)
        history.record_new({T: Contents(1, number * 10, [use])}, lambda *_: None, [segment])

    def read(_: DeltaChangelogs, of: Table) -> Any:
        rows = [row for path in house.changelog(of).glob("*.parquet") for row in pq.read_table(path).to_pylist()]
        return SimpleNamespace(orderBy=lambda *names: SimpleNamespace(toLocalIterator=lambda: sorted(rows, key=itemgetter(*names))))

    monkeypatch.setattr(DeltaChangelogs, "read", read)
    found = SchemaHistory(spark, house, CatalogAnswers(None))
    versions = [each for number in ids for each in found.until(number, (100, 0))]
    assert versions == [each for number in ids for each in history.until(number, (100, 0))]
    assert {id(each.relation.columns) for each in versions} == {id(versions[0].relation.columns)}
    assert {id(each.facts) for each in versions} == {id(versions[0].facts)}


@pytest.mark.parametrize(
    ("first", "columns", "snapshot", "versions"),
    [
        # The catalog was asked when it had the new column already.
        (None, "id=1 a=3", (), 2),
        (None, "id=1 a=2", (), 1),
        ("id=1 b=2", "id=1 a=2", (), 2),
        ("id=1 b=2", "id=1 a=3", (), 3),
        # No column can have been dropped before this one came, or all were dropped before that.
        ("id=1", "id=1 a=2", (), 2),
        ("id=1 b=3", "id=1 b=3 a=4", (), 2),
        ("id=1 b=3", "id=1 b=3 a=5", (), 3),
        (None, "id=1 a=3", ((1, "id"), (3, "a")), 1),
        (None, "id=1 a=3", ((1, "id"), (2, "a")), 2),
    ],
)
def test_a_number_that_is_of_a_later_catalog(
    tmp_path: Path, first: str | None, columns: str, snapshot: tuple[tuple[int, str], ...], versions: int
) -> None:
    house = Warehouse(tmp_path, "delta")
    house.write_versions(T, [replace(version(5, 0, ID), snapshot=snapshot)] if snapshot else [])
    said = [*([first] if first else []), columns, columns]
    answers = iter([*said, columns])
    spark: Any = None
    tables = CatalogAnswers(lambda: [{"relation_id": 1, "schema": "public", "name": "t", "columns": catalog(next(answers))}])
    history = SchemaHistory(spark, house, tables)
    for lsn, text in zip((10, 20, 30), said, strict=False):
        segment = Segment(1, lsn - 5, lsn, Path("log/000001/segment"))
        history.record_new({T: Contents(1, lsn, [Use(lsn, 0, table(text), lsn)])}, lambda *_: None, [segment])
    assert len(history.until(1, (30, 0))) == versions


@pytest.mark.parametrize(
    ("kind", "described_first", "numbers"),
    [
        # A column was dropped and added again before the catalog was asked. The command after the rows tells what they had.
        ("command", "id=1 a=2", [1, 2]),
        # The capture began after the rows: the catalog can't be right, and nobody knows what is.
        ("installed", "id=1 a=2", None),
        ("installed", "id=1 a=3", [1, 3]),
    ],
)
def test_captured_ddl_is_believed_and_not_a_later_catalog(
    tmp_path: Path, kind: str, described_first: str, numbers: list[int] | None
) -> None:
    house = Warehouse(tmp_path, "delta")
    spark: Any = None
    tables = CatalogAnswers(lambda: [{"relation_id": 1, "schema": "public", "name": "t", "columns": catalog("id=1 a=3")}])
    history = SchemaHistory(spark, house, tables)
    segment = Segment(1, 5, 10, Path("log/000001/segment"))
    history.record_new({T: Contents(1, 10, [Use(10, 0, table("id a"), 10)])}, lambda *_: None, [segment])
    assert [fact.number for fact in history.until(1, (10, 0))[0].facts or ()] == [1, 3]

    segment = Segment(1, 10, 20, Path("log/000001/segment"))
    history.record_ddl([ddl(20, 0, described(described_first), kind=kind)], [segment])
    [known] = history.until(1, (10, 0))
    assert (known.facts and [fact.number for fact in known.facts]) == numbers


@pytest.mark.parametrize(("numbers", "versions"), [("id=1 a=2", 1), ("id=1 a=3", 2)])
def test_a_table_that_was_altered_before_the_capture_began(tmp_path: Path, numbers: str, versions: int) -> None:
    """The server describes it again with its first change. With a gap in the numbers a column may be another one since then."""
    house = Warehouse(tmp_path, "delta")
    spark: Any = None
    tables = CatalogAnswers(lambda: [{"relation_id": 1, "schema": "public", "name": "t", "columns": catalog(numbers)}])
    history = SchemaHistory(spark, house, tables)
    for lsn in (10, 30):
        segment = Segment(1, lsn - 5, lsn, Path("log/000001/segment"))
        history.record_new({T: Contents(1, lsn, [Use(lsn, 0, table("id a"), lsn)])}, lambda *_: None, [segment])
        segment = Segment(1, lsn, lsn + 10, Path("log/000001/segment"))
        history.record_ddl([ddl(lsn + 10, 0, described(numbers), kind="installed")] if lsn == 10 else [], [segment])
    found = history.until(1, (30, 0))
    assert len(found) == versions
    assert history.is_uncertain(T, found[0], []) == (versions == 2)
