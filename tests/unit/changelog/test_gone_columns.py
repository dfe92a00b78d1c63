"""The columns that a table does not have any more, according to captured DDL."""

from dataclasses import replace
from typing import Any, cast

import pytest

from spark_sink.changelog.gone_columns import find_gone
from spark_sink.changelog.schema_history import SchemaHistory, SchemaVersion
from spark_sink.schema.column_numbers import numbered
from spark_sink.schema.ddl import Descriptions
from spark_sink.schema.table import Version, gone_columns
from spark_sink.schema.types import merge_columns
from spark_sink.source.contents import Use
from support.ddl_messages import described, message
from support.descriptions import ID, catalog, table, version


class History:
    """The versions of one relation or several, and captured DDL."""

    def __init__(self, *versions: SchemaVersion) -> None:
        self.captured = Descriptions()
        self._versions = versions

    def until(self, relation_id: int, place: tuple[int, int]) -> list[SchemaVersion]:
        return [each for each in self._versions if each.relation.relation_id == relation_id and each.place <= place]

    def version(self, relation_id: int, place: tuple[int, int]) -> SchemaVersion | None:
        return next(reversed(self.until(relation_id, place)), None)


def known(lsn: int, columns: str, relation_id: int = 1, *, is_certain: bool = True) -> SchemaVersion:
    relation = replace(table(columns), relation_id=relation_id)
    return SchemaVersion(lsn, 0, relation, numbered(relation, catalog(columns), None) if is_certain else None)


def found(
    *versions: SchemaVersion, now: str | None, before: list[Version] | None = None, widen: bool = True
) -> tuple[tuple[str, ...], list[str]]:
    """Return what is gone with the last of the versions. ``now`` is the captured description; None if there is none."""
    history, last = History(*versions), versions[-1]
    if now is not None:
        history.captured.add((last.end_lsn, 0), message(described(now, key=["id"], relation_id=last.relation.relation_id)))
    columns = merge_columns(None, [each.relation for each in versions], widen=widen)
    use = Use(last.end_lsn, 0, last.relation, last.end_lsn)
    if before is None:
        before = [version(each.end_lsn, 0, ID, each.relation.relation_id) for each in versions[:-1]]
    return find_gone(use, before, columns, cast("SchemaHistory", cast("Any", history)), lambda relation: relation)


@pytest.mark.parametrize(
    ("before", "after", "now", "gone"),
    [
        ("id=1 a=2 b=3", "id=1 a=2 b=3", None, ()),
        ("id=1 a=2 b=3", "id=1 b=3", None, ("a",)),
        ("id=1 a=2 b=3", "id=1", None, ("a", "b")),
        ("id=1 a=2", "id=1 b=2", None, ("a",)),
        ("id=1 a=2 b=3", "id=1 b=2 a=3", None, ()),
        # Dropped and added again, with its type, or with another one.
        ("id=1 a=2", "id=1 a=3", None, ()),
        ("id=1 a:25=2", "id=1 a:23=3", None, ("a",)),
        # The earlier values stay in the column of the old type, also if it was renamed; or they are in the new one, too.
        ("id=1 a:25=2", "id=1 a:23=2", None, ()),
        ("id=1 a:25=2", "id=1 b:23=2", None, ()),
        ("id=1 a:23=2", "id=1 b:20=2", None, ("a",)),
        # The table still has it, but the publication does not.
        ("id=1 a=2", "id=1", "id=1 a=2", ()),
        ("id=1 a=2", "id=1", "id=1 b=2", ()),
    ],
)
def test_columns_that_are_gone(before: str, after: str, now: str | None, gone: tuple[str, ...]) -> None:
    assert found(known(10, before), known(20, after), now=now or after) == (gone, [])


def test_a_column_of_a_new_type_in_parquet_has_the_values_of_the_old_one() -> None:
    assert found(known(10, "id=1 a:23=2"), known(20, "id=1 a:20=2"), now="id=1 a:20=2", widen=False) == (("a",), [])


def test_columns_stay_where_the_ddl_is_not_captured() -> None:
    versions = known(10, "id=1 a=2 b=3 c=4"), known(20, "id=1 b=3 d=4")
    assert found(*versions, now=None) == ((), ["a"])
    # Those that went before are still gone, unless the table has them again.
    before = [replace(version(10, 0, ID), gone=("b", "c"))]
    assert found(*versions, now=None, before=before) == (("c",), ["a"])
    # A description of other columns is from another time.
    assert found(*versions, now="id=1 x=3") == ((), ["a"])


def test_a_column_of_which_nothing_certain_is_known() -> None:
    assert found(known(10, "id=1 a=2", is_certain=False), known(20, "id=1"), now="id=1") == ((), ["a"])
    assert found(known(10, "id=1 a=2", is_certain=False), known(15, "id=1 a=2"), known(20, "id=1"), now="id=1") == ((), ["a"])


def test_the_columns_of_a_table_that_had_the_name_before_and_of_a_snapshot() -> None:
    assert found(known(10, "id=1 a=2", 7), known(20, "id=1 b=2"), now="id=1 b=2") == (("a",), [])
    snapshot = replace(version(15, 0, ID), snapshot=((1, "id"), (2, "a")))
    assert found(known(10, "id=1"), known(20, "id=1 a=3"), known(30, "id=1"), now="id=1", before=[snapshot]) == (("a",), [])
    assert found(known(20, "id=1 a=3"), known(30, "id=1"), now="id=1 b=2", before=[snapshot]) == ((), [])


def test_a_snapshot_brings_back_only_the_columns_that_it_has() -> None:
    versions = [
        version(10, 0, ID),
        replace(version(20, 0, ID), gone=("a", "b")),
        replace(version(30, 0, ID), snapshot=((1, "id"), (4, "b"))),
        replace(version(40, 2, ID), gone=("b",)),
    ]
    assert [sorted(gone_columns(versions, lsn)) for lsn in (19, 20, 29, 30, 39, 40)] == [
        [],
        ["a", "b"],
        ["a", "b"],
        ["a"],
        ["a"],
        ["b"],
    ]
    assert [Version.from_json(each.to_json()) for each in versions] == versions
