"""A small micro-batch: segments written to the files of all tables at once, without Spark."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from cdcpipe.pgoutput.messages import Delete, Insert, LogicalMessage, Relation, Truncate
from spark_sink.changelog import writer as segment_writer
from spark_sink.changelog.writer import Target
from spark_sink.files.parquet import Layout
from spark_sink.schema.types import MESSAGE_SCHEMA, merge_columns, typed_schema
from spark_sink.source.slices import TOGETHER, OpenSlice, Slice, divide
from spark_sink.source.typed import TypedReader
from spark_sink.staging.log import Segment
from support.segments import Log, relation

LOST = "SparkException: Python worker exited unexpectedly (crashed). Consider setting …"

A, B, C = relation(1, "a", ("id", 23), ("day", 1082)), relation(2, "b", ("id", 23)), relation(3, "c", ("id", 23))
"""Three tables; a has a column of type date."""


@pytest.fixture
def segments(tmp_path: Path) -> list[Segment]:
    log = Log(tmp_path / "log")
    first = log.segment(
        [Insert(None, 1, (b"1", b"2024-02-29")), Insert(None, 2, (b"1",))],
        [Insert(None, 2, (b"2",)), Insert(None, 1, (b"2", b"infinity"))],
        before=[A, B, C],
    )
    second = log.segment(
        [Delete(None, 2, (b"1",), None), Truncate(None, 0, (1, 2))],
        [Insert(None, 1, (b"3", None))],
        before=[A, B],
    )
    return [first, second]


def target(directory: Path, described: Relation | None, after_lsn: int = 0) -> Target:
    schema = MESSAGE_SCHEMA if described is None else typed_schema(merge_columns(None, [described]))
    directory.mkdir(exist_ok=True)
    layout = Layout(tuple(schema.names), to_arrow_schema(renamed(schema), timezone="UTC"))
    relations = None if described is None else {(described.namespace, described.name): {described.relation_id}}
    return Target(relations, schema, str(directory), layout, after_lsn)


def renamed(schema: StructType) -> StructType:
    """Rename the columns as in a Delta table's files: they have other names there, also inside structs."""
    text: dict[str, Any] = schema.jsonValue()

    def rename(struct: dict[str, Any]) -> dict[str, Any]:
        fields = []
        for field in struct["fields"]:
            kind = field["type"]
            if isinstance(kind, dict) and kind["type"] == "struct":
                kind = rename(kind)
            fields.append(field | {"name": f"col-{field['name']}", "type": kind})
        return struct | {"fields": fields}

    return StructType.fromJson(rename(text))


def write(segments: list[Segment], targets: list[Target]) -> list[list[segment_writer.Written]]:
    spark: Any = None
    return segment_writer.write(spark, segments, targets)


def rows(directory: Path, written: list[segment_writer.Written]) -> list[dict[str, Any]]:
    found = [row for each in written for row in pq.read_table(directory / each.file.name).to_pylist()]
    assert len(found) == sum(each.file.rows for each in written)
    return found


def test_all_tables_are_written_at_once(tmp_path: Path, segments: list[Segment], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr(segment_writer, "OpenSlice", lambda piece: opened.append(piece) or OpenSlice(piece))
    a, b, c = write(segments, [target(tmp_path / "a", A), target(tmp_path / "b", B), target(tmp_path / "c", C)])
    assert len(opened) == len(segments)
    assert [(row["col-id"], row["col-_cdc_op"]) for row in rows(tmp_path / "a", a)] == [
        (1, "insert"),
        (2, "insert"),
        (3, "insert"),
        (None, "truncate"),
    ]
    assert a[0].exact == {"day": 1}
    assert [(row["col-id"], row["col-_cdc_op"]) for row in rows(tmp_path / "b", b)] == [
        (1, "insert"),
        (2, "insert"),
        (1, "delete"),
        (None, "truncate"),
    ]
    assert [row["col-_cdc_old"] for row in rows(tmp_path / "b", b)] == [None, None, {"col-id": 1}, None]
    assert b[0].file.minimum["col-_cdc_end_lsn"] < b[0].file.maximum["col-_cdc_end_lsn"]
    assert c == []
    assert not list((tmp_path / "c").iterdir())


def test_an_error_leaves_no_file(tmp_path: Path, segments: list[Segment], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk each new attempt would take the room that was freed."""
    there = []

    def fails(_: pa.RecordBatch) -> dict[str, int]:
        there[:] = [len(list((tmp_path / name).iterdir())) for name in "ab"]
        if all(there):  # a has its file, b the beginning of one
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return {}

    monkeypatch.setattr(segment_writer, "_count_exact", fails)
    with pytest.raises(OSError, match="No space left"):
        write(segments, [target(tmp_path / "a", A), target(tmp_path / "b", B)])
    assert there == [1, 1]
    assert not [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]


def test_each_table_goes_on_from_where_it_is(tmp_path: Path, segments: list[Segment]) -> None:
    amid = (segments[0].start_lsn + segments[0].end_lsn) // 2
    found = [write(segments, [target(tmp_path / "a", A, lsn)])[0] for lsn in (0, amid, segments[0].end_lsn, segments[1].end_lsn)]
    assert [sum(each.file.rows for each in of_lsn) for of_lsn in found] == [4, 3, 2, 0]


def test_messages_are_a_table_among_others(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    lsn = log.end_lsn + 0x80
    segment = log.segment([LogicalMessage(None, 1, lsn, "p", b"content"), Insert(None, 2, (b"1",))], before=[B])
    messages, b = write([segment], [target(tmp_path / "m", None), target(tmp_path / "b", B)])
    assert [row["col-content"] for row in rows(tmp_path / "m", messages)] == [b"content"]
    assert len(rows(tmp_path / "b", b)) == 1


def test_tasks_are_of_about_one_size() -> None:
    slices = [(Slice(str(number), 1, 0, 1), size) for number, size in enumerate([10, 20, 10, 100, 5, 5])]
    tasks = divide(slices, 40, 40)
    assert [[(int(piece.path), piece.part, piece.part_count) for piece in task] for task in tasks] == [
        [(0, 0, 1), (1, 0, 1), (2, 0, 1)],
        [(3, 0, 3)],
        [(3, 1, 3)],
        [(3, 2, 3)],
        [(4, 0, 1), (5, 0, 1)],
    ]


def test_the_work_is_for_the_tables_that_a_segment_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day of a quiet database has tens of thousands of segments, and a reader takes longer to make than a change to write."""
    log, described = Log(tmp_path / "log"), [relation(number, f"t{number}", ("id", 23)) for number in range(1, 31)]
    segments = [log.segment([Insert(None, each.relation_id, (b"1",))], before=[each]) for each in described * 2]
    segments.append(log.segment([Truncate(None, 0, tuple(each.relation_id for each in described))], before=described))
    opened, readers = [], []
    monkeypatch.setattr(segment_writer, "OpenSlice", lambda piece: opened.append(piece) or OpenSlice(piece))
    monkeypatch.setattr(segment_writer, "TypedReader", lambda *how: readers.append(how[0]) or TypedReader(*how))
    targets = [target(tmp_path / each.name, each) for each in described]
    # The last table has the changes of its first segment.
    targets[-1] = target(tmp_path / described[-1].name, described[-1], segments[len(described) - 1].end_lsn)
    written = write(segments, targets)
    assert len(opened) == len(segments)
    assert len(readers) == 3 * len(described) - 1
    for number, (each, of_table) in enumerate(zip(described, written, strict=True)):
        found = [(row["col-_cdc_op"], row["col-_cdc_ordinal"]) for row in rows(tmp_path / each.name, of_table)]
        assert found == [("insert", 0)] * (1 if each == described[-1] else 2) + [("truncate", number)]


def test_truncates_of_a_table_that_was_made_anew_are_in_order(tmp_path: Path) -> None:
    """Its OIDs have no order, so they are not the order of its changes."""
    log, (first, second) = Log(tmp_path / "log"), [relation(number, "t", ("id", 23)) for number in (9, 4)]
    bodies = [[first, Truncate(None, 0, (2, 9))], [second, Truncate(None, 0, (4, 2))], [Truncate(None, 0, (9, 4, 9))]]
    described = target(tmp_path / "t", first)
    described = replace(described, relations={("public", "t"): {4, 9}})
    [written] = write([log.segment(*bodies, before=[relation(2, "b", ("id", 23))])], [described])
    lsns = [log.end_lsn - 0x200, log.end_lsn - 0x100, *[log.end_lsn] * 3]
    found = [(row["col-_cdc_end_lsn"], row["col-_cdc_ordinal"]) for row in rows(tmp_path / "t", written)]
    assert found == list(zip(lsns, (1, 0, 0, 1, 2), strict=True))


def test_a_task_has_a_bounded_number_of_slices() -> None:
    """Each open slice takes memory, however small its segment is."""
    slices = [(Slice(str(number), 1, 0, 1), 1) for number in range(2 * TOGETHER + 1)]
    tasks = divide(slices, 1 << 30, 1 << 30)
    assert [len(task) for task in tasks] == [TOGETHER, TOGETHER, 1]
    assert [piece for task in tasks for piece in task] == [piece for piece, _ in slices]
    assert divide([], 1, 1) == []


class LosesWorkers:
    """Stands for Spark: its tasks run here. The first jobs have written their files when they fail."""

    defaultParallelism = 1  # noqa: N815 - Spark's own word for it

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.sparkContext = self
        self._run: Any = None

    def parallelize(self, tasks: list[Any], _count: int) -> "LosesWorkers":
        self._tasks = tasks
        return self

    def map(self, function: Any) -> "LosesWorkers":
        self._run = function
        return self

    def collect(self) -> list[Any]:
        found = [self._run(task) for task in self._tasks]
        if self.errors:
            raise self.errors.pop(0)
        return found


def test_the_tasks_run_again_if_a_worker_was_killed(
    segments: list[Segment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(segment_writer, "_DRIVER_BYTES", 0)
    monkeypatch.setattr(segment_writer, "settle", lambda: None)
    spark: Any = LosesWorkers(RuntimeError(LOST), RuntimeError(LOST))
    ((written,),) = segment_writer.write(spark, segments, [target(tmp_path / "b", B)])
    assert written.file.rows == len(pq.read_table(tmp_path / "b" / written.file.name))
    assert len(list((tmp_path / "b").glob("*.parquet"))) == 3  # those of the lost jobs count nowhere
    assert [record.message.startswith("a Python worker of Spark has ended") for record in caplog.records] == [True, True]

    spark = LosesWorkers(*[RuntimeError(LOST)] * 3)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        segment_writer.write(spark, segments, [target(tmp_path / "b", B)])
    spark = LosesWorkers(RuntimeError("No space left on device"))
    with pytest.raises(RuntimeError, match="No space left"):
        segment_writer.write(spark, segments, [target(tmp_path / "b", B)])
    assert not spark.errors
