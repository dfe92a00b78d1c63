"""Descriptions from captured DDL, at the place of the command, as if the server had sent them."""

from dataclasses import replace
from typing import Any, cast

import pytest

from cdcpipe.pgoutput.messages import Relation
from spark_sink.changelog.described_uses import add_described_uses
from spark_sink.changelog.schema_history import SchemaHistory, SchemaVersion
from spark_sink.schema.column_numbers import looks, numbered
from spark_sink.schema.ddl import Descriptions
from spark_sink.schema.names import Names, Naming
from spark_sink.schema.table import Table
from spark_sink.source.contents import Contents, Use
from spark_sink.source.ddl import Ddl
from support.ddl_messages import ddl, described
from support.descriptions import catalog, table

T = Table("public", "t")


class History:
    """A schema history with one version at most, as far as the code under test asks it."""

    def __init__(self, *messages: Ddl, relation: Relation | None = None, snapshot: SchemaVersion | None = None) -> None:
        self.captured = Descriptions()
        self._copied = snapshot
        for each in messages:
            self.captured.add(each.place, each.message)
        self._relation = relation

    def version(self, _relation_id: int, place: tuple[int, int]) -> SchemaVersion | None:
        return None if self._relation is None or place < (5, 0) else SchemaVersion(5, 0, self._relation, None)

    def copied(self, *_: object) -> SchemaVersion | None:
        return self._copied

    was_copied_otherwise = SchemaHistory.was_copied_otherwise

    def as_copied(self, _table: Table, relation: Relation, _place: tuple[int, int]) -> SchemaVersion | None:
        return self._copied if self._copied is not None and looks(self._copied.relation) == looks(relation) else None


def uses(
    contents: dict[Table, Contents],
    *messages: Ddl,
    known: Ddl,
    relation: Relation | None,
    snapshot: SchemaVersion | None = None,
    names: Names | None = None,
) -> list[tuple[tuple[int, int], str]]:
    history = History(known, *messages, relation=relation, snapshot=snapshot)
    add_described_uses(contents, messages, cast("SchemaHistory", cast("Any", history)), names or Names())
    found = contents.get(T, Contents())
    assert found.last_lsn >= max((use.end_lsn for use in found.uses), default=0)
    return [((use.end_lsn, use.ordinal), " ".join(column.name for column in use.relation.columns)) for use in found.uses]


INSTALLED = ddl(1, 0, described("id=1 a=2", key=["id"]), kind="installed")
ADDED = ddl(10, 2, described("id=1 a=2 b=3'7", key=["id"]))
COLUMN: dict[str, Any] = {"type": "table column", "oid": 1, "number": 2, "column": "a"}


def test_a_command_is_a_use_of_what_it_left() -> None:
    contents: dict[Table, Contents] = {}
    assert uses(contents, ADDED, known=INSTALLED, relation=table("id a")) == [((10, 2), "id a b")]
    # It says what the server will say.
    assert contents[T].uses[0].relation == table("id a b")
    assert contents[T].count == 0


def test_only_the_last_command_of_a_transaction_counts() -> None:
    """A column that another command of the same transaction renames or drops never comes to the tables."""
    between = ddl(10, 0, described("id=1 x=2", key=["id"]))
    assert uses({}, between, ADDED, known=INSTALLED, relation=table("id a")) == [((10, 2), "id a b")]
    again = ddl(20, 0, described("id=1 c=2 b=3", key=["id"]))
    assert [columns for _, columns in uses({}, ADDED, again, known=INSTALLED, relation=table("id a"))] == ["id a b", "id c b"]


def test_a_command_after_a_change_in_the_same_transaction() -> None:
    """The usual migration: ADD COLUMN, UPDATE, DROP COLUMN, RENAME. The stream describes the table amid it."""
    added = ddl(10, 0, described("id=1 a=2 b=3 n=4", key=["id"]))
    dropped = ddl(10, 1, described("id=1 b=3 n=4", key=["id"]), kind="drop", dropped=[COLUMN])
    renamed = ddl(10, 1, described("id=1 b=3 a=4", key=["id"]))
    known = ddl(1, 0, described("id=1 a=2 b=3", key=["id"]), kind="installed")
    expected = [((10, 0), "id a b n"), ((10, 1), "id b a")]
    for before in [known, ddl(1, 0)]:
        contents = {T: Contents(1, 10, [Use(10, 0, table("id a b n"), 10)])}
        assert uses(contents, added, dropped, renamed, known=before, relation=table("id a b")) == expected
    # A command before the change was not captured.
    contents = {T: Contents(1, 10, [Use(10, 0, table("id a b n"), 10)])}
    assert uses(contents, ddl(10, 0, kind="failure"), dropped, renamed, known=known, relation=table("id a b")) == expected[:1]


def test_a_column_that_takes_the_name_and_type_of_a_dropped_one() -> None:
    """The server will describe the table as before. But the older rows have the new column's default."""
    dropped = ddl(10, 1, described("id=1", key=["id"]), kind="drop", dropped=[COLUMN])
    added = ddl(10, 1, described("id=1 a=3'7", key=["id"]))
    assert uses({}, dropped, added, known=INSTALLED, relation=table("id a")) == [((10, 1), "id a")]
    contents = {T: Contents(1, 10, [Use(10, 0, table("id a"), 10)])}
    assert uses(contents, dropped, added, known=INSTALLED, relation=None) == [((10, 0), "id a"), ((10, 1), "id a")]
    # The stream has described the new column already.
    contents = {T: Contents(1, 10, [Use(10, 2, table("id a"), 10)])}
    commented = ddl(10, 3, described("id=1 a=3'7", key=["id"]))
    assert uses(contents, dropped, added, commented, known=INSTALLED, relation=None) == [((10, 2), "id a")]


def test_a_command_right_before_a_change_of_its_table() -> None:
    """The server's description has the place of the command. Two would be two versions if another table's change stands before."""
    swapped, known = ddl(10, 1, described("id=1 b=2 a=3", key=["id"])), ddl(1, 0, described("id=1 a=2 b=3", key=["id"]))
    contents = {T: Contents(1, 10, [Use(10, 1, table("id b a"), 10)])}
    assert uses(contents, swapped, known=known, relation=table("id a b")) == [((10, 1), "id b a")]


def test_changes_in_the_same_segments() -> None:
    contents = {T: Contents(2, 30, [Use(7, 0, table("id a"), 8), Use(30, 0, table("id a b"), 30)])}
    found = uses(contents, ADDED, known=INSTALLED, relation=None)
    assert found == [((7, 0), "id a"), ((10, 2), "id a b"), ((30, 0), "id a b")]
    assert contents[T].count == 2


@pytest.mark.parametrize(
    ("after", "relation"),
    [
        (described("id=1 a=2", key=["id"]), table("id a")),  # nothing has changed
        (described("id=1 b=2", key=["id"]), None),  # it has had no change yet
        (described("id=1 b=2", key=["id"]), table("id z")),  # it is not what was described before
        (described("id=1 b=2", key=["id"], name="u"), table("id a")),
    ],
)
def test_what_the_stream_will_say_is_not_certain(after: dict[str, Any], relation: Relation | None) -> None:
    assert uses({}, ddl(10, 0, after), known=INSTALLED, relation=relation) == []


@pytest.mark.parametrize("relation", [None, table("id a b")])
def test_a_table_that_was_copied_and_has_not_been_altered_since(relation: Relation | None) -> None:
    """The capture was there before the stream. So nothing but the snapshot tells what the table was."""
    renamed, nothing = ddl(10, 0, described("id=1 x=2 b=3 c=5", key=["id"])), ddl(1, 0)
    snapshot = SchemaVersion(2, 0, table("id a b"), numbered(table("id a b"), catalog("id=1 a=2 b=3"), None), is_whole=True)
    assert uses({}, renamed, known=nothing, relation=relation, snapshot=snapshot) == [((10, 0), "id x b c")]
    assert uses({}, renamed, known=nothing, relation=relation) == []
    # The stream has described other columns since.
    assert uses({}, renamed, known=nothing, relation=table("id a"), snapshot=snapshot) == []
    # The publication has a list of columns: here c may be older than the copy.
    assert uses({}, renamed, known=nothing, relation=relation, snapshot=replace(snapshot, is_whole=False)) == [((10, 0), "id x b")]
    snapshot = SchemaVersion(2, 0, table("id b"), numbered(table("id b"), catalog("id=1 b=3"), None))
    assert uses({}, renamed, known=nothing, relation=None, snapshot=snapshot) == [((10, 0), "id b")]


def test_a_table_that_the_same_transaction_drops() -> None:
    """As a restore does. The new table under the name keeps its version, and the dropped one its key up to the DROP TABLE."""
    altered, end = ddl(10, 0, described("id=1 a=2")), {"type": "table", "oid": 1, "schema": "public", "name": "t"}
    dropped = ddl(10, 0, kind="drop", tag="DROP TABLE", dropped=[end])
    assert uses({}, altered, dropped, known=INSTALLED, relation=table("id a")) == []
    made = ddl(10, 0, described("id=1 a=2", relation_id=2), tag="CREATE TABLE")
    described_by_server = Use(10, 0, replace(table("id a"), relation_id=2), 10)
    contents = {T: Contents(1, 10, [described_by_server])}
    uses(contents, altered, dropped, made, known=INSTALLED, relation=table("id a"))
    assert contents[T].uses == [described_by_server]


def test_the_first_command_tells_what_was_there_before() -> None:
    """The capture is older than the slot, and the table came with the stream alone."""
    nothing, relation = ddl(1, 0), table("id a b")
    dropped = ddl(10, 0, described("id=1 b=3", key=["id"]), kind="drop", dropped=[COLUMN])
    again = ddl(10, 0, described("id=1 b=3 a=4", key=["id"]))
    assert uses({}, dropped, again, known=nothing, relation=relation) == [((10, 0), "id b a")]
    assert uses({}, ddl(10, 0, described("id=1 x=2 b=3", key=["id"])), known=nothing, relation=relation) == [((10, 0), "id x b")]
    # Is c new, or not published?
    assert uses({}, ddl(10, 0, described("id=1 a=2 b=3 c=4", key=["id"])), known=nothing, relation=relation) == []
    # The capture was off in between.
    removed = ddl(7, 0, kind="removed")
    assert uses({}, removed, dropped, again, known=nothing, relation=relation) == []


def dropping(place: int, columns: str, **more: Any) -> Ddl:
    """Return the message of a command that dropped column a, the second one."""
    return ddl(place, 0, described(columns, key=["id"]), kind="drop", **{"dropped": [COLUMN], **more})


def test_a_dropped_column_tells_that_the_publication_has_no_list() -> None:
    """PostgreSQL refuses to drop a column that is in a list of columns."""
    nothing, relation = ddl(1, 0), table("id a b")
    # One command drops the column and adds another one.
    once = dropping(10, "id=1 b=3 a=4"), ddl(10, 0, described("id=1 b=3 a=4", key=["id"]))
    assert uses({}, *once, known=nothing, relation=relation) == [((10, 0), "id b a")]
    # After the first command nobody knows whether c is new, or not published.
    first = ddl(10, 0, described("id=1 a=2 b=3 c=4", key=["id"]))
    again = dropping(20, "id=1 b=3 c=4"), ddl(20, 0, described("id=1 b=3 c=4 a=5", key=["a"]))
    contents: dict[Table, Contents] = {}
    assert uses(contents, first, *again, known=nothing, relation=relation) == [((20, 0), "id b c a")]
    assert [column.name for column in contents[T].uses[0].relation.columns if column.is_key] == ["a"]
    # It was not published.
    hidden = dropping(20, "id=1 b=3 c=4"), ddl(20, 0, described("id=1 x=3 c=4", key=["id"]))
    assert uses({}, first, *hidden, known=nothing, relation=table("id b")) == [((20, 0), "id x")]


@pytest.mark.parametrize(
    "told", [ddl(15, 0, tag="ALTER PUBLICATION"), ddl(20, 0, tag="ALTER PUBLICATION"), ddl(15, 0, kind="failure"), None]
)
def test_a_column_that_is_dropped_while_no_publication_has_the_table(told: Ddl | None) -> None:
    nothing, relation = ddl(1, 0), table("id a b")
    first = ddl(10, 0, described("id=1 a=2 b=3 secret=4", key=["id"]))
    out = {"type": "publication relation", "oid": 7, "number": None, "schema": "public", "name": "t", "column": None}
    dropped = dropping(20, "id=1 b=3 secret=4", dropped=[COLUMN] if told is not None else [COLUMN, out])
    messages = [first, *([told] if told is not None else []), dropped]
    assert "secret" not in str(uses({}, *messages, known=nothing, relation=relation))


def test_a_copied_table_whose_publication_lacks_the_last_column() -> None:
    """An excluded column never comes to the tables."""
    nothing, snapshot = ddl(1, 0), SchemaVersion(2, 0, table("id a"), numbered(table("id a"), catalog("id=1 a=2"), None))
    renamed = ddl(10, 0, described("id=1 x=2 secret=3'hush", key=["id"]))
    assert uses({}, renamed, known=nothing, relation=None, snapshot=snapshot) == [((10, 0), "id x")]
    dropped = ddl(10, 0, described("id=1 a=2 c=4'5", key=["id"]), kind="drop", dropped=[COLUMN | {"number": 3, "column": "secret"}])
    assert uses({}, dropped, known=nothing, relation=None, snapshot=snapshot) == [((10, 0), "id a")]
    # A dropped column that was published tells that there was no list, also if the copy is one of an older cdcpipe.
    assert uses({}, dropping(10, "id=1 secret=3"), known=nothing, relation=None, snapshot=snapshot) == [((10, 0), "id secret")]


@pytest.mark.parametrize("relation", [None, table("id a"), table("id z")])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_list_that_has_all_columns_gets_no_new_one(relation: Relation | None, *, is_whole: bool) -> None:
    """The publication lists (id, a), which are all columns. The copy knows that there is a list."""
    snapshot = SchemaVersion(2, 0, table("id a"), numbered(table("id a"), catalog("id=1 a=2"), None), is_whole=is_whole)
    renamed = ddl(10, 1, described("id=1 a=2", key=["id"]))  # the stream has described it under another name since the copy
    messages, known = ([renamed, ADDED], ddl(1, 0)) if relation == table("id z") else ([ADDED], INSTALLED)
    listed = [] if relation == table("id a") else [((10, 2), "id a")]  # [] if the stream has said so already
    found = uses({}, *messages, known=known, relation=relation, snapshot=snapshot)
    assert found == ([((10, 2), "id a b")] if is_whole else listed)


def publication(columns: list[int] | None, oid: int = 7) -> dict[str, Any]:
    tables = [{"oid": 1, "schema": "public", "name": "t", "columns": columns, "has_filter": False}]
    return {"publications": [{"oid": oid, "name": "p", "tables": tables}]}


GONE = {"type": "publication", "oid": 7, "number": None, "schema": None, "name": "p", "column": None, "publication": None}


def test_a_list_of_a_table_that_was_not_copied() -> None:
    """Messages about publications tell of it: that of the installation, and those of commands."""
    listed, whole = publication([1, 2]), publication(None)
    known = ddl(1, 0, described("id=1 a=2", key=["id"]), kind="installed", **listed)
    assert uses({}, ADDED, known=known, relation=table("id a")) == []
    renamed = ddl(10, 0, described("id=1 x=2 b=3'7", key=["id"]))
    assert uses({}, renamed, known=known, relation=table("id a")) == [((10, 0), "id x")]
    assert uses({}, ddl(7, 0, tag="ALTER PUBLICATION", **listed), ADDED, known=INSTALLED, relation=table("id a")) == []
    # The table is in the publication without a list now, or gets one only later.
    for message in ddl(7, 0, tag="ALTER PUBLICATION", **whole), ddl(10, 3, tag="ALTER PUBLICATION", **listed):
        before = known if message.end_lsn == 7 else INSTALLED
        assert uses({}, message, ADDED, known=before, relation=table("id a")) == [((10, 2), "id a b")]
    # Another publication without a list does not bring the new column: the server refuses two lists of one table.
    other = ddl(7, 0, tag="CREATE PUBLICATION", **publication(None, oid=8))
    assert uses({}, other, ADDED, known=known, relation=table("id a")) == []
    # The publication with the list is gone, or the capture has ended since: the list may be gone without a message.
    gone = ddl(7, 0, kind="drop", tag="DROP PUBLICATION", dropped=[GONE], publications=[])
    assert uses({}, gone, ADDED, known=known, relation=table("id a")) == [((10, 2), "id a b")]
    for kind in "failure", "removed":
        ended = ddl(2, 0, kind=kind, **listed), ddl(3, 0, described("id=1 a=2", key=["id"]), kind="installed")
        assert uses({}, *ended, ADDED, known=known, relation=table("id a")) == [((10, 2), "id a b")]


def test_the_newer_one_of_stream_and_copy_counts() -> None:
    nothing, known = ddl(1, 0), table("id a b")
    added = ddl(10, 0, described("id=1 a=2 b=3 c=4", key=["id"]))
    renamed = ddl(20, 0, described("id=1 x=2 b=3 c=4", key=["id"]))
    snapshot = SchemaVersion(15, 0, table("id a b c"), numbered(table("id a b c"), catalog("id=1 a=2 b=3 c=4"), None))
    assert uses({}, renamed, known=added, relation=known, snapshot=snapshot) == [((20, 0), "id x b c")]
    assert uses({}, added, renamed, known=nothing, relation=known) == [((20, 0), "id x b")]


@pytest.mark.parametrize(("copied", "found"), [("id b", [((20, 0), "id a")]), ("id a", [])])
def test_a_column_that_has_its_name_back_since_a_copy(copied: str, found: list[tuple[tuple[int, int], str]]) -> None:
    """The stream has said the same before. The copied rows have the other name."""
    snapshot = SchemaVersion(
        15, 0, table(copied), numbered(table(copied), catalog("id=1 b=2" if "b" in copied else "id=1 a=2"), None)
    )
    known, back = ddl(17, 0, described("id=1 b=2", key=["id"]), kind="installed"), ddl(20, 0, described("id=1 a=2", key=["id"]))
    assert uses({}, back, known=known, relation=table("id a"), snapshot=snapshot) == found


def test_a_key_that_may_not_be_published() -> None:
    """A version without a key would stop the replica."""
    added, nothing = ddl(10, 0, described("id=1 a=2 k=3", key=["id"])), ddl(1, 0)
    assert uses({}, added, ddl(20, 0, described("id=1 x=2 k=3", key=["k"])), known=nothing, relation=table("id a")) == []
    assert uses({}, added, ddl(20, 0, described("id=1 x=2 k=3", key=["id"])), known=nothing, relation=table("id a")) == [
        ((20, 0), "id x")
    ]


def test_a_table_that_goes_on_under_another_name() -> None:
    u = Table("public", "u")
    after = ddl(10, 2, described("id=1 b=2", key=["id"], name="u"))
    names = Names([Naming((10, 2), 1, T, u, T)])
    contents: dict[Table, Contents] = {}
    assert uses(contents, after, known=INSTALLED, relation=table("id a"), names=names) == [((10, 2), "id b")]
    assert [str(each) for each in contents] == ["public.u"]


def test_a_generated_column_may_be_published_or_not() -> None:
    after = described("id=1 a=2 b=3", key=["id"])
    after["columns"][2]["generated"] = "stored"
    assert uses({}, ddl(10, 0, after), known=INSTALLED, relation=table("id a")) == []


def test_a_publication_that_has_a_list_of_columns() -> None:
    """A renamed column stays in it. A new one is not in it."""
    after = ddl(10, 0, described("id=1 x=2 hidden=3 b=4", key=["id"]))
    known = ddl(1, 0, described("id=1 a=2 hidden=3", key=["id"]), kind="installed")
    assert uses({}, after, known=known, relation=table("id a")) == [((10, 0), "id x")]


def test_a_description_that_is_older_than_its_place_is_no_use() -> None:
    """A transaction with an older snapshot does not see the column that another one has added before."""
    older = ddl(20, 0, described("id=1 x=2", key=["id"]))
    assert uses({}, ADDED, older, known=INSTALLED, relation=table("id a")) == [((10, 2), "id a b")]


def test_the_identity_is_part_of_it() -> None:
    full = described("id=1 a=2", key=["id"], replica_identity={"kind": "full", "index": None, "columns": []})
    contents: dict[Table, Contents] = {}
    assert uses(contents, ddl(10, 0, full), known=INSTALLED, relation=table("id a")) == [((10, 0), "id a")]
    made = contents[T].uses[0].relation
    assert made == replace(table("id a"), replica_identity="f", columns=made.columns)
    assert all(column.is_key for column in made.columns)
