"""Tables are compared in parts: each takes few of the locks for which the server has room."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from cdcpipe.errors import ConnectionClosedError, InitError
from spark_sink.schema.table import Table
from spark_sink.staging.log import Epoch
from spark_sink.verify import comparison
from spark_sink.verify.comparison import TableResult, VerifyError, verify
from spark_sink.warehouse.warehouse import Warehouse
from support.descriptions import ID, version

LOCKS = {"a": 30, "b": 20, "c": 1, "huge": 101, "large": 100}
"""The tables, and how many locks each takes. ``no`` is in the warehouse, and not on the server."""
MOST = 100


class Server:
    """A `ChecksumServer` that knows how many locks the tables take, and a published table that the warehouse does not have."""

    def __init__(self, _connection: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, request: dict[str, Any]) -> Any:
        if "published" in request:
            new = {"schema": "public", "name": "new", "relation_id": 99, "columns": ["id"], "primary_key": ["id"]}
            return [{**new, "replica_identity": "d", "unpublished_key": []}]
        return {"most": MOST, "tables": [[schema, name, LOCKS[name]] for schema, name in request["locks"] if name in LOCKS]}


class Comparison:
    """A `_Comparison` in which all tables are equal."""

    parts: list[list[str]]
    stopped_at: str | None
    failing: tuple[str, Exception] | None

    def __init__(self, _spark: Any, _house: Warehouse, tables: list[Table], *_: Any) -> None:
        self.tables = tables
        self.parts.append([table.name for table in tables])

    def begin_certain(self, *_: Any, **__: Any) -> None:
        if self.stopped_at in [table.name for table in self.tables]:
            raise VerifyError("no process takes them", hint="start run")

    def run(self, tell: Any) -> Iterator[TableResult]:
        tell("comparing", 0.5)
        for table in self.tables:
            if self.failing is not None and self.failing[0] == table.name:
                raise self.failing[1]
            yield TableResult(table, is_equal=True)


class SparkError(Exception):
    """An error whose class is one of Spark's."""

    __module__ = "pyspark.errors"


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Warehouse:
    house = Warehouse(tmp_path / "warehouse", "delta")
    house.open(Epoch(1, "7123", 1, "shop", "slot", ("p",), {}, 0))
    for number, name in enumerate([*LOCKS, "no"], 1):
        house.write_versions(Table("public", name), [version(1, 0, ID, number)])
    monkeypatch.setattr(comparison, "ChecksumServer", Server)
    monkeypatch.setattr(comparison, "exact_session", lambda spark: spark)
    monkeypatch.setattr(comparison, "check_log", lambda *_: None)
    monkeypatch.setattr(comparison, "_Comparison", Comparison)
    Comparison.parts, Comparison.stopped_at, Comparison.failing = [], None, None
    return house


def compared(house: Warehouse, *tables: str) -> tuple[list[TableResult], list[tuple[str, float]]]:
    told: list[tuple[str, float]] = []
    spark: Any = None
    results = verify(
        spark,
        house.root,
        (),
        tables=tables,
        staging=house.root.parent,
        tell=lambda text, share: told.append((text, round(share, 2))),
    )
    return results, told


def test_each_part_takes_few_locks(house: Warehouse) -> None:
    results, told = compared(house)
    assert Comparison.parts == [["a", "b"], ["c"], ["large"], ["no"]]
    assert [each for each in told if "comparing" in each[0]] == [
        ("part 1 of 4: comparing", 0.2),
        ("part 2 of 4: comparing", 0.5),
        ("part 3 of 4: comparing", 0.7),
        ("part 4 of 4: comparing", 0.9),
    ]
    problems = {each.table.name: each.problem for each in results}
    assert [name for name, problem in problems.items() if problem is None] == ["a", "b", "c", "large", "no"]
    assert problems["huge"] == (
        "to read it takes 101 locks on its partitions and indexes, and more than 100 would leave too few for other sessions;"
        " raise max_locks_per_transaction on the server"
    )
    assert "the warehouse has no such table" in (problems["new"] or "")  # asked once


def test_what_was_compared_stays_if_a_later_part_cannot_be(house: Warehouse) -> None:
    Comparison.stopped_at = "large"
    results, _ = compared(house)
    problems = {each.table.name: each.problem for each in results if each.problem != "no process takes them; start run"}
    assert (list(problems), Comparison.parts[-1]) == (["huge", "a", "b", "c", "new"], ["large"])
    assert problems.pop("new") is not None
    assert [each.table.name for each in results[len(problems) : -1]] == ["large", "no"]
    Comparison.stopped_at = "b"
    with pytest.raises(VerifyError):
        compared(house)


@pytest.mark.parametrize(
    ("ex", "problem"),
    [
        (InitError("public.b is locked"), "public.b is locked"),
        (ConnectionClosedError("the connection was lost", hint="start again"), "the connection was lost; start again"),
        (SparkError("no room"), "Spark failed: no room; "),
        (OSError(errno.EMFILE, "Too many open files", "a.json"), "a.json: Too many open files; raise the limit of open files: "),
        (OSError(errno.ENXIO, "No such device", "a.json"), "a.json: No such device; -v shows where this happened"),
        (MemoryError(), "out of memory; give the process more memory: "),
        (ValueError("a row's value"), "unexpected ValueError in line "),  # a damaged log of a table, or a defect
    ],
)
def test_what_was_compared_stays_if_a_later_table_fails(house: Warehouse, ex: Exception, problem: str) -> None:
    """A lock of another session, or a lost connection, used to take away what an hour had found."""
    Comparison.failing = ("b", ex)
    results, _ = compared(house)
    assert [each.table.name for each in results] == ["huge", "a", "b", "c", "large", "no", "new"]
    assert results[1].is_equal
    assert {(each.problem or "")[: len(problem)] for each in results[2:-1]} == {problem}
    assert "the warehouse has no such table" in (results[-1].problem or "")
    Comparison.failing = ("a", ex)
    with pytest.raises(type(ex)):  # nothing was compared
        compared(house)


def test_few_tables_are_one_part(house: Warehouse) -> None:
    results, told = compared(house, "public.a", "public.b")
    assert (Comparison.parts, [each.is_equal for each in results]) == ([["a", "b"]], [True, True])
    assert told == [("comparing", 0.5)]
