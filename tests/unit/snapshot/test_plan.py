"""The ordinals of a snapshot's rows, and the errors of a copy."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from cdcpipe.errors import ConnectionClosedError, UnreachableError
from cdcpipe.masks import NO_MASKS
from cdcpipe.pgoutput.messages import Column, Relation
from spark_sink.client.exported import SnapshotError
from spark_sink.files.parquet import Layout, WrittenFile
from spark_sink.launcher.config import LauncherConfig
from spark_sink.schema.table import Table
from spark_sink.schema.types import merge_columns, typed_schema
from spark_sink.snapshot import chunk, plan, table
from spark_sink.snapshot.chunk import NOT_UTF8, NOT_UTF8_HINT, ChunkTask, CopiedTable, select_columns
from spark_sink.snapshot.initial import InitialSnapshot
from spark_sink.snapshot.plan import Chunk, TablePlan
from spark_sink.snapshot.progress import Written, begin
from spark_sink.staging.log import Position
from spark_sink.warehouse.initial_copy import is_begun
from spark_sink.warehouse.warehouse import Warehouse


def test_ordinals_go_on_below_zero_and_end(tmp_path: Path) -> None:
    schema = to_arrow_schema(typed_schema(merge_columns(None, [])), timezone="UTC")
    copied = CopiedTable("", "", 3, None, (), (), schema, 1, 5, 0, str(tmp_path), Layout((), schema))
    task = ChunkTask(Chunk(1, '"t"', 1), 1, str(tmp_path), 1)
    ordinals = chunk._metadata(copied, task, 0, 4)["_cdc_ordinal"].to_pylist()
    assert ordinals == [1, 4, 7, 10]
    row = (1 << 31) // 3
    assert chunk._metadata(copied, task, row - 1, 2)["_cdc_ordinal"].to_pylist() == [(1 << 31) - 4, (1 << 31) - 1]
    assert chunk._metadata(copied, task, row + 1, 1)["_cdc_ordinal"].to_pylist() == [2 - (1 << 31)]
    with pytest.raises(SnapshotError, match="more rows"):
        chunk._metadata(copied, task, (1 << 32) // 3, 1)


def test_each_chunk_has_ordinals_by_its_pages(tmp_path: Path) -> None:
    """A root with 10,000 partitions had 430,000 for each. Here the last one has a million rows, and most of the others none."""
    pages = [0] * 9990 + [40] * 9 + [4096]
    parts = [_part(number, count) for number, count in enumerate(pages)]
    chunks = [each for part in parts for each in plan._chunks(part, 4096, 64)]
    assert len(chunks) == len(pages)
    tasks = table._tasks(begin(tmp_path / "notes", "", chunks))
    schema = to_arrow_schema(typed_schema(merge_columns(None, [])), timezone="UTC")
    shares = sum(each.share for each in chunks)
    copied = CopiedTable("", "", shares, None, (), (), schema, 1, 5, 0, str(tmp_path), Layout((), schema))
    rows = [0] * 9980 + [1] * 10 + [9000] * 9 + [1_000_000]
    found = [
        ordinal
        for task, count in zip(tasks, rows, strict=True)
        for first, several in ((0, count // 2), (count // 2, count - count // 2))  # in two batches
        for ordinal in chunk._metadata(copied, task, first, several)["_cdc_ordinal"].to_pylist()
    ]
    assert len(set(found)) == len(found) == sum(rows)
    assert min(found) >= 0
    assert max(found) < 5_000_000


def test_a_part_of_unknown_size_has_the_ordinals_of_a_whole_chunk() -> None:
    parts = [_part(1, 0), _part(2, 0, is_locked=True), _part(3, 5, is_heap=False), _part(4, 10)]
    assert [each.share for part in parts for each in plan._chunks(part, 6, 64)] == [1, 6, 6, 5, 5]


def test_a_small_dense_partition_has_the_ordinals_of_an_average_chunk(tmp_path: Path) -> None:
    """Three partitions of 100 GB have few rows on a page. The fourth one has one page with 200 rows. It had room for 110."""
    parts = [*(_part(number, 13_000_000) for number in range(3)), _part(3, 1)]
    chunks = plan._with_least_share([each for part in parts for each in plan._chunks(part, 4096, 64)])
    shares = sum(each.share for each in chunks)
    assert shares - chunks[-1].share == 39_000_000  # the others have lost nothing
    task = table._tasks(begin(tmp_path / "notes", "", chunks))[-1]
    schema = to_arrow_schema(typed_schema(merge_columns(None, [])), timezone="UTC")
    copied = CopiedTable("", "", shares, None, (), (), schema, 1, 5, 0, str(tmp_path), Layout((), schema))
    ordinals = chunk._metadata(copied, task, 0, 450_000)["_cdc_ordinal"].to_pylist()
    assert len(set(ordinals)) == 450_000
    assert plan._with_least_share([]) == ()


def _part(number: int, pages: int, *, is_heap: bool = True, is_locked: bool = False) -> dict[str, Any]:
    facts = {"is_heap": is_heap, "is_locked": is_locked, "is_toasted": False, "pages": pages}
    return {"relation_id": number, "schema": "public", "name": f"p{number}", "file": number, **facts}


@pytest.mark.parametrize(("identity", "expected"), [(("id",), ("id",)), (("id", "g"), ())])
def test_a_copy_has_no_key_if_a_column_of_it_is_not_published(identity: tuple[str, ...], expected: tuple[str, ...]) -> None:
    described = Relation(None, 1, "public", "t", "d", (Column(1, "id", 23, -1),))
    planned = TablePlan(described, (1,), identity, None, (), 0, described.columns, identity=identity)
    copying: Any = SimpleNamespace(position=Position(1, 20))
    assert table._version(copying, planned, merge_columns(None, [described]), []).key == expected


def test_the_hint_for_a_value_that_is_not_utf8_comes_from_the_executor(tmp_path: Path) -> None:
    """To start again, as after other errors, would not help."""
    config = LauncherConfig("s", tmp_path / "staging", ("p",))
    snapshot = InitialSnapshot(config, Warehouse(tmp_path / "warehouse", "delta"))
    failed: Any = SimpleNamespace(relation=SimpleNamespace(namespace="public", name="t"))
    text = f"Traceback …\nspark_sink.client.exported.SnapshotError: table public.t: a value of column 'v' {NOT_UTF8}\n"
    found = snapshot._error_of(RuntimeError(text), failed)
    assert str(found) == "table public.t: a value of column 'v' is not UTF-8"
    assert found.hint == NOT_UTF8_HINT
    text = text.replace(NOT_UTF8, "is too long")
    other = snapshot._error_of(RuntimeError(text), failed)
    assert str(other) == "cannot copy table public.t: table public.t: a value of column 'v' is too long"
    assert other.hint == "start again: finished tables stay"


def test_the_hint_for_a_service_that_an_executor_lacks_comes_from_libpqs_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine has no such service file, or another one. To start again, as after a lost connection, would not help."""
    snapshot = InitialSnapshot(LauncherConfig("s", tmp_path / "staging", ("p",)), Warehouse(tmp_path / "warehouse", "delta"))
    failed: Any = SimpleNamespace(relation=SimpleNamespace(namespace="public", name="t"))
    (tmp_path / "services").write_text("[other]\n")
    for name in ("services", "nothing"):
        monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / name))
        with pytest.raises(ConnectionClosedError) as lost:
            plan.open_snapshot("service='shop'", "snapshot")
        text = f"Traceback …\ncdcpipe.errors.ConnectionClosedError: {lost.value.message}\n"
        hint = snapshot._error_of(RuntimeError(text), failed).hint
        assert str(hint).startswith("the service that -d or -m names has to be in a service file on each executor's machine")


def test_an_initial_snapshot_that_was_refused_leaves_nothing(tmp_path: Path) -> None:
    """Otherwise a run with the right name of the slot would be told that the warehouse belongs to another one."""
    nowhere = ("-h", str(tmp_path), "-d", "nowhere")
    config = LauncherConfig("typo", tmp_path / "staging", ("p",), nowhere, create_slot=True)
    warehouse = Warehouse(tmp_path / "warehouse", "delta")
    with pytest.raises(UnreachableError):
        InitialSnapshot(config, warehouse, "initial").prepare(lambda: False)
    assert not is_begun(warehouse)


def test_what_all_tasks_share_is_not_in_each_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark keeps all tasks in the driver's JVM. A table of 1 TB has 32,768 of them."""
    relation = Relation(None, 1, "public", "t", "d", tuple(Column(0, f"column_{number}", 23, -1) for number in range(300)))
    chunks = tuple(Chunk(1, '"public"."t"', 1, 4096 * number, 4096 * (number + 1), 64) for number in range(3))
    columns = merge_columns(None, [relation])
    schema = to_arrow_schema(typed_schema(columns), timezone="UTC")
    planned = TablePlan(relation, tuple(range(1, 301)), (), None, chunks, 0, relation.columns, tuple(select_columns(relation)))
    sizes, copied = [], []

    def parallelize(tasks: list[ChunkTask], _slices: int) -> Any:
        sizes.extend(len(pickle.dumps(task)) for task in tasks)
        return SimpleNamespace(map=lambda function: SimpleNamespace(collect=lambda: [function(task) for task in tasks]))

    def write_chunk(shared: CopiedTable, task: ChunkTask, _count_rows: Any) -> Written:
        copied.append((shared.names[-1], task.chunk, Path(task.note)))
        return Written(1, WrittenFile("f", 1, 1, {}, {}, {}), {})

    monkeypatch.setattr(table, "write_chunk", write_chunk)
    copying: Any = SimpleNamespace(
        spark=SimpleNamespace(sparkContext=SimpleNamespace(parallelize=parallelize)),
        warehouse=SimpleNamespace(masks=NO_MASKS),
        connection="",
        snapshot="",
        position=Position(1, 5),
        time_us=7,
        is_utf8=True,
        is_stopping=lambda: False,
        rows=SimpleNamespace(add=lambda _rows: None),
        chunks=SimpleNamespace(add=lambda _chunks: None),
    )
    begun = begin(tmp_path / "notes", "", chunks)
    shared = table._copied(copying, planned, begun, columns, tmp_path, Layout(tuple(schema.names), schema))
    assert len(table._run(copying, Table("public", "t"), begun, shared, frozenset())) == 3
    assert copied == [("column_299", chunk, begun.record_path(number)) for number, chunk in enumerate(chunks)]
    assert max(sizes) < 1000


def test_of_a_locked_table_one_chunk_waits() -> None:
    """A task that waits for a lock takes a core: those of other tables, and of other partitions, go on."""
    tasks: list[Any] = [
        SimpleNamespace(number=number, chunk=SimpleNamespace(relation_id=relation_id))
        for number, relation_id in enumerate([1, 1, 2, 2, 3, 1])
    ]

    def tried(*locked: int) -> list[int]:
        return [task.number for task in table._without_waiting(tasks, frozenset(locked))]

    assert tried() == [0, 1, 2, 3, 4, 5]
    assert tried(1) == [0, 2, 3, 4]
    assert tried(1, 2) == [0, 2, 4]
