"""The data source in a real Spark session: rows, ranges, streams, and what is missing or damaged."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes
from pyspark.sql.types import StringType, StructField, StructType

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError
from cdcpipe.pgoutput.messages import UNCHANGED_TOAST, Binary, Delete, Insert, LogicalMessage, Truncate, Update
from cdcpipe.pipe.framing import encode_header
from spark_sink.schema.table import SchemaError
from spark_sink.schema.types import MESSAGE_SCHEMA, merge_columns, typed_schema
from spark_sink.source import datasource as source
from spark_sink.source import envelope, slices
from spark_sink.source.contents import count_rows, read_contents
from spark_sink.source.datasource import ENVELOPE_SCHEMA, CdcpipeDataSource, quote_table, relation_versions, tables_in
from spark_sink.source.envelope import EnvelopeReader
from spark_sink.source.messages import MessageReader
from spark_sink.source.slices import Slice
from spark_sink.source.typed import TypedReader
from spark_sink.staging import index as segment_index
from spark_sink.staging import log as staging
from spark_sink.staging.filler import Cut, SealPolicy, SegmentFiller, Write
from spark_sink.staging.log import Position, Segment, StagingError, segment_name
from support.paths import ROOT
from support.pgoutput_build import build
from support.segments import COMMIT_TIME_US, Log, encode, relation, transaction

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

INT, TEXT, NUMERIC, DATE, TIMESTAMP, TIMESTAMPTZ = 23, 25, 1700, 1082, 1114, 1184
A = relation(11, "a", ("id", INT), ("t", TEXT))
A2 = relation(11, "a", ("id", INT), ("t", INT), ("u", TEXT))
B = relation(12, "b", ("id", INT), ("n", NUMERIC, (8 << 16 | 2) + 4), ("at", TIMESTAMPTZ), identity="f")
NEW_YEAR = datetime(2025, 1, 1, tzinfo=UTC)


def into(rel: Any, *row: bytes | None) -> Insert:
    return Insert(None, rel.relation_id, row)


def say(lsn: int, content: bytes, *, prefix: str = "p", is_transactional: bool = True) -> LogicalMessage:
    return LogicalMessage(None, int(is_transactional), lsn, prefix, content)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "staging")


def read(path: Path, schema: Any = None, **options: str) -> tuple[list[dict[str, Any]], Any]:
    """Read a batch as Spark would, in this process: plan, pickle, read each partition."""
    made = CdcpipeDataSource({"path": str(path), **options})
    schema = schema or made.schema()
    reader = pickle.loads(pickle.dumps(made)).reader(schema)
    parts = [pickle.loads(pickle.dumps(part)) for part in reader.partitions()]
    batches = [batch for part in parts for batch in reader.read(part)]
    return [row for batch in batches for row in batch.to_pylist(maps_as_pydicts="strict")], parts


def typed(path: Path, table: str = "public.a", **options: str) -> list[dict[str, Any]]:
    return read(path, table=table, **options)[0]


def only(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


# In Spark


@pytest.fixture
def session(spark: SparkSession) -> SparkSession:
    source.register(spark)
    return spark


def fill(log: Log) -> None:
    """Two epochs, three segments: every kind of change on table a, a table with exact texts, logical messages."""
    log.segment(
        [
            A,
            into(A, b"1", b"one"),
            say(0x1020, b"\xff\0"),
            say(0x1030, b""),
            into(A, b"2", None),
            B,
            into(B, b"1", b"1.50", b"infinity"),
        ],
        [Update(None, 11, None, None, (b"1", UNCHANGED_TOAST)), Update(None, 11, (b"2", None), None, (b"3", b"three"))],
        before=[say(0x1010, b"at once", is_transactional=False)],
    )
    log.new_epoch()
    log.segment(
        [A, Delete(None, 11, (b"3", None), None)], [B, Update(None, 12, None, (b"1", b"NaN", None), (b"1", b"-0.01", None))]
    )
    log.segment([A, B, Truncate(None, 0, (12, 11))])


@pytest.mark.spark
def test_typed_rows(session: SparkSession, log: Log) -> None:
    fill(log)
    frame = session.read.format("cdcpipe").option("table", "public.a").load(str(log.root))
    columns = merge_columns(None, [A])
    assert frame.schema == typed_schema(columns)
    rows = sorted(frame.collect(), key=lambda r: (r["_cdc_epoch"], r["_cdc_end_lsn"], r["_cdc_ordinal"]))
    assert [
        (r["_cdc_op"], r["id"], r["t"], r["_cdc_epoch"], r["_cdc_end_lsn"], r["_cdc_ordinal"], r["_cdc_xid"], r["_cdc_unchanged"],
         r["_cdc_old"] and r["_cdc_old"].asDict(), r["_cdc_exact"])
        for r in rows
    ] == [
        ("insert", 1, "one", 1, 0x1100, 0, 700, [], None, {}),
        ("insert", 2, None, 1, 0x1100, 1, 700, [], None, {}),
        ("update", 1, None, 1, 0x1200, 0, 701, ["t"], None, {}),
        ("update", 3, "three", 1, 0x1200, 1, 701, [], {"id": 2, "t": None}, {}),
        ("delete", 3, None, 2, 0x1300, 0, 700, [], {"id": 3, "t": None}, {}),
        ("truncate", None, None, 2, 0x1500, 1, 700, [], None, {}),
    ]  # fmt: skip
    times = frame.selectExpr("unix_micros(_cdc_commit_time) as us").distinct().collect()
    assert [row.us for row in times] == [COMMIT_TIME_US + 946_684_800_000_000]

    b = session.read.format("cdcpipe").option("table", "public.b").load(str(log.root)).where("_cdc_op != 'truncate'")
    assert [(r["_cdc_op"], str(r["n"]), r["at"], r["_cdc_exact"]) for r in b.orderBy("_cdc_end_lsn").collect()] == [
        ("insert", "1.50", None, {"at": "infinity"}),
        ("update", "-0.01", None, {"_cdc_old.n": "NaN"}),
    ]


@pytest.mark.spark
def test_rows_do_not_depend_on_the_sessions_time_zone(session: SparkSession, log: Log) -> None:
    rel = relation(1, "zones", ("at", TIMESTAMPTZ), ("local", TIMESTAMP), ("day", DATE))
    log.segment(
        [
            rel,
            into(rel, b"2024-03-10 07:30:00.5+00", b"2024-03-10 02:30:00", b"2024-03-10"),
            into(rel, b"0001-01-01 00:00:00+00", None, b"0001-01-01"),
        ]
    )
    frame = session.read.format("cdcpipe").option("table", "public.zones").load(str(log.root)).orderBy("_cdc_ordinal")
    fields = frame.selectExpr("unix_micros(at)", "cast(local as string)", "cast(day as string)")
    before = session.conf.get("spark.sql.session.timeZone")
    try:
        for zone in ("America/New_York", "UTC"):
            session.conf.set("spark.sql.session.timeZone", zone)
            assert [tuple(row) for row in fields.collect()] == [
                (1710055800500000, "2024-03-10 02:30:00", "2024-03-10"),
                (-62135596800000000, None, "0001-01-01"),
            ]
    finally:
        session.conf.set("spark.sql.session.timeZone", before)


@pytest.mark.spark
def test_odd_tables_in_spark(session: SparkSession, log: Log) -> None:
    none = relation(1, "none")
    odd = relation(2, "{a,b}", ("id", INT), ("ID", INT), ("", TEXT), ("_cdc_op", TEXT), ("a.b\n", TEXT))
    changed = relation(2, "{a,b}", ("id", TEXT))
    log.segment([none, into(none), odd, into(odd, b"1", b"2", b"", b"op", b"ab"), changed, into(changed, b"x")])

    def rows(table: str) -> list[Any]:
        return session.read.format("cdcpipe").option("table", table).load(str(log.root)).orderBy("_cdc_ordinal").collect()

    assert [(row["_cdc_op"], row["_cdc_exact"]) for row in rows("public.none")] == [("insert", {})]
    assert [tuple(row)[:6] for row in rows("public.{a,b}")] == [(1, 2, "", "op", "ab", None), (None, None, None, None, None, "x")]


@pytest.mark.spark
def test_envelope_and_segments(session: SparkSession, log: Log) -> None:
    fill(log)
    frame = session.read.format("cdcpipe").load(str(log.root))
    assert frame.schema == ENVELOPE_SCHEMA
    assert [(r["_cdc_op"], r["table_name"], r["new"], r["old"]) for r in frame.where("_cdc_epoch = 2").collect()] == [
        ("delete", "a", None, {"id": "3"}),
        ("update", "b", {"id": "1", "n": "-0.01", "at": None}, {"id": "1", "n": "NaN", "at": None}),
        ("truncate", "b", None, None),
        ("truncate", "a", None, None),
    ]
    segments = session.read.format("cdcpipe").option("view", "segments").load(str(log.root)).collect()
    assert [(r.epoch, r.start_lsn, r.end_lsn) for r in segments] == [(1, 0x1000, 0x1200), (2, 0x1200, 0x1400), (2, 0x1400, 0x1500)]
    assert all((log.root / r.path).stat().st_size == r.size for r in segments)


MESSAGES = [
    ("p", b"at once", False, 1, 0x1010, 0, 0x1010, None, None),
    ("p", b"\xff\0", True, 1, 0x1100, 1, 0x1020, 700, NEW_YEAR),
    ("p", b"", True, 1, 0x1100, 1, 0x1030, 700, NEW_YEAR),
]


@pytest.mark.spark
def test_messages_in_spark(session: SparkSession, log: Log) -> None:
    fill(log)
    reader = session.read.format("cdcpipe").option("view", "messages")
    frame = reader.load(str(log.root))
    assert frame.schema == MESSAGE_SCHEMA
    rows = frame.withColumn("_cdc_commit_time", frame["_cdc_commit_time"].cast("long")).orderBy("_cdc_lsn").collect()
    assert [tuple(row)[:8] for row in rows] == [message[:8] for message in MESSAGES]
    assert [row["_cdc_commit_time"] for row in rows] == [None, *[int(NEW_YEAR.timestamp())] * 2]
    # Together with the changes: each at its place.
    changes = session.read.format("cdcpipe").option("table", "public.a").load(str(log.root))
    both = changes.unionByName(frame, allowMissingColumns=True)
    rows = both.orderBy("_cdc_end_lsn", "_cdc_ordinal", F.col("_cdc_lsn").asc_nulls_last()).collect()
    assert [row["_cdc_op"] or bytes(row["content"]) for row in rows] == [
        b"at once", "insert", b"\xff\0", b"", "insert", "update", "update", "delete", "truncate",
    ]  # fmt: skip


def drain(frame: DataFrame, checkpoint: Path, metrics: list[dict[str, Any]] | None = None) -> list[list[Any]]:
    """Run a stream with availableNow; give the rows of each micro-batch, and what its progress says of the source."""
    batches: list[list[Any]] = []
    query = (
        frame.writeStream.foreachBatch(lambda batch, _: batches.append(batch.collect()))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    if metrics is not None:
        metrics += [json.loads(progress.sources[0].latestOffset) for progress in query.recentProgress]
    return batches


@pytest.mark.spark
def test_a_stream_goes_on_where_it_was(session: SparkSession, log: Log, tmp_path: Path) -> None:
    fill(log)
    size = sum(path.stat().st_size for path in (log.root / "000002").glob("*.cdc"))
    stream = session.readStream.format("cdcpipe").option("view", "segments").option("max_bytes_per_trigger", str(size))

    metrics: list[dict[str, Any]] = []

    def ends(checkpoint: str = "checkpoint") -> list[list[int]]:
        return [[row.end_lsn for row in rows] for rows in drain(stream.load(str(log.root)), tmp_path / checkpoint, metrics)]

    assert sorted(ends()) == [[0x1200], [0x1400, 0x1500]]
    # What listeners and lastProgress see of each micro-batch: changes and logical messages.
    sizes = [path.stat().st_size for path in sorted(log.root.rglob("*.cdc"))]
    assert [(found["batchRows"], found["batchBytes"], found["lagBytes"]) for found in metrics[:2]] == [
        (8, sizes[0], 0x300),
        (4, sum(sizes[1:]), 0),
    ]
    assert metrics[0]["lagSeconds"] > 0 == metrics[1]["lagSeconds"]
    assert {found["position"] for found in metrics} == {"2:0/1500"}
    assert ends() == []
    log.segment([A, into(A, b"5", b"five")])
    assert ends() == [[0x1600]]
    # A batch that was not committed runs again, with the same offsets.
    commits = tmp_path / "checkpoint" / "commits"
    last = max((path for path in commits.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    for path in (last, commits / f".{last.name}.crc"):
        path.unlink()
    assert ends() == [[0x1600]]
    stream = stream.option("start", "2:0/1400")
    assert ends("another") == [[0x1500, 0x1600]]


@pytest.mark.spark
def test_a_stream_of_typed_rows(session: SparkSession, log: Log, tmp_path: Path) -> None:
    fill(log)
    batches = drain(session.readStream.format("cdcpipe").option("table", "public.a").load(str(log.root)), tmp_path / "checkpoint")
    assert [sorted(r["_cdc_op"] for r in rows) for rows in batches] == [
        ["delete", "insert", "insert", "truncate", "update", "update"],
    ]


@pytest.mark.spark
def test_errors_reach_the_user(session: SparkSession, log: Log) -> None:
    fill(log)
    reader = session.read.format("cdcpipe").option("table", "public.a")
    path = log.root / "000002" / "0000000000001400-0000000000001500.cdc"
    frame = reader.load(str(log.root))
    data = path.read_bytes()
    path.write_bytes(b"?" + data[1:])
    path.with_suffix(".idx").unlink(missing_ok=True)
    with pytest.raises(Exception, match=f"StagingError.*{path} is corrupt at byte 0"):
        frame.collect()
    with pytest.raises(Exception, match=r"StagingError.*has no change of table public\.nope"):
        session.read.format("cdcpipe").option("table", "public.nope").option("end", "2:0/1400").load(str(log.root))


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from spark_sink.spark import session
from spark_sink.source import datasource as source
spark = session.build(master="local[1]", format="parquet")
source.register(spark)
source.register(spark)
rows = spark.read.format("cdcpipe").option("table", "public.a").load(sys.argv[2]).collect()
print("rows:", len(rows))
"""


@pytest.mark.spark
@pytest.mark.slow
def test_workers_need_no_path(log: Log, tmp_path: Path) -> None:
    """A driver that has found the package somehow is enough: its sources go along."""
    fill(log)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT), str(log.root)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (0, "rows: 6\n"), done.stderr


def test_the_sources_can_be_imported_as_executors_do(tmp_path: Path) -> None:
    """From a zip file, by a relative path, with nothing else of ours there."""
    archive = source._source_archive()
    shutil.copy(archive, tmp_path)
    modules = ["spark_sink.source.datasource", "spark_sink.source.typed", "spark_sink.snapshot.table"]
    code = f"import sys; sys.path.insert(0, './{archive.name}'); import {', '.join(modules)}; print(spark_sink.__file__)"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert archive.name in done.stdout


# Without a session: what is planned, and what the rows are


def test_ranges(log: Log) -> None:
    fill(log)

    def ends(**options: str) -> list[int]:
        return sorted({row["_cdc_end_lsn"] for row in read(log.root, **options)[0]})

    assert ends() == [0x1100, 0x1200, 0x1300, 0x1400, 0x1500]
    assert ends(start="1:0/1000") == ends()
    assert ends(start="1:0/1100") == [0x1200, 0x1300, 0x1400, 0x1500]
    assert ends(start="1:0/1200", end="2:0/1300") == [0x1300]
    assert ends(start="2:0/1200", end="2:0/1400") == [0x1300, 0x1400]
    assert ends(start="1:0/1100", end="2:0/1300") == [0x1200, 0x1300]
    assert ends(end="1:0/1000") == []
    assert ends(start="2:0/1500") == ends(start="2:0/1400", end="2:0/1400") == []
    assert only(typed(log.root, start="1:0/1100", end="1:0/1200"), "_cdc_op", "id") == [("update", 1), ("update", 3)]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"end": "2:0/1600"}, "not in this log"),
        ({"start": "2:0/1600"}, "not in this log"),
        ({"start": "1:0/1300"}, "not in this log"),
        ({"end": "1:0/1300"}, "not in this log"),
        ({"end": "3:0/1500"}, "not in this log"),
        ({"start": "1:0/900"}, "do not exist any more"),
    ],
)
def test_positions_that_are_not_in_the_log_are_refused(log: Log, options: dict[str, str], problem: str) -> None:
    fill(log)
    with pytest.raises(StagingError, match=problem):
        read(log.root, **options)


def test_a_missing_segment_is_an_error(log: Log) -> None:
    fill(log)
    made = CdcpipeDataSource({"path": str(log.root)}).streamReader(ENVELOPE_SCHEMA)
    start, end = made.initialOffset(), made.latestOffset(made.initialOffset(), ReadAllAvailable())
    parts = made.partitions(start, end)
    path = log.root / "000002" / "0000000000001200-0000000000001400.cdc"
    path.unlink()
    with pytest.raises(StagingError, match="segments are missing"):
        made.partitions(start, end)
    with pytest.raises(StagingError, match=f"{path} cannot be read"):
        [list(made.read(part)) for part in parts]


def test_offsets(log: Log) -> None:
    fill(log)
    size = {s.name: s.stat().st_size for s in log.root.rglob("*.cdc")}
    made = CdcpipeDataSource({"path": str(log.root), "max_bytes_per_trigger": "1"}).streamReader(ENVELOPE_SCHEMA)
    start = made.initialOffset()
    assert list(start.items()) == [("format", 1), ("position", "1:0/1000")]
    limit = made.getDefaultReadLimit()
    assert limit == ReadMaxBytes(1)

    def latest(position: str, limit: Any) -> str:
        return made.latestOffset({"position": position, "format": 1}, limit)["position"]

    assert latest("1:0/1000", limit) == "1:0/1200"
    assert latest("1:0/1200", limit) == "2:0/1400"
    assert latest("2:0/1500", limit) == latest("1:0/1000", ReadAllAvailable()) == "2:0/1500"
    total = sum(size.values())
    assert latest("1:0/1000", ReadMaxBytes(total)) == "2:0/1500"
    assert latest("1:0/1000", ReadMaxBytes(total - 1)) == "2:0/1400"
    assert made.reportLatestOffset()["position"] == "2:0/1500"
    assert made.partitions(start, start) == []

    made.prepareForTriggerAvailableNow()
    log.segment([A, into(A, b"9", None)])
    assert latest("1:0/1000", ReadAllAvailable()) == "2:0/1500"
    assert latest("2:0/1500", limit) == "2:0/1500"
    assert made.reportLatestOffset()["position"] == "2:0/1600"


def test_a_log_that_is_the_same_is_not_listed_again(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(log)
    listed = []
    read_chain = staging.read_chain
    monkeypatch.setattr(staging, "read_chain", lambda root: listed.append(root) or read_chain(root))
    made = staging.LogView(log.root)
    directories = [log.root, *(log.root / f"{number:06d}" for number in staging.epoch_numbers(log.root))]

    def look(age_s: float) -> int:
        """Return where the log ends, for one whose directories were changed so long ago."""
        for directory in directories:
            os.utime(directory, (time.time() - age_s,) * 2)
        listed.clear()
        first, end, segments = made.end(), made.end(), made.segments()
        assert first == end == segments[-1].end
        return end.lsn

    assert (look(60), len(listed)) == (0x1500, 1)
    log.segment([A, into(A, b"9", None)])  # in its directory the time is another one now
    assert (look(50), len(listed)) == (0x1600, 1)
    log.segment([A, into(A, b"10", None)])
    assert (look(0), len(listed)) == (0x1700, 3)  # something may happen at the same time yet
    listed.clear()
    monkeypatch.setattr(staging, "_LISTING_S", 0.0)
    assert (look(60), len(listed)) == (0x1700, 3)
    shutil.rmtree(directories[-1])
    with pytest.raises(StagingError, match="position 2:0/1700 is not in this log"):
        made.segments(Position(2, 0x1700))


@pytest.mark.parametrize(
    "offset", [{"format": 2, "position": "1:0/0"}, {"position": "1:0/0"}, {"format": 1}, {"format": 1, "position": "0/1"}]
)
def test_offsets_of_another_format_are_refused(log: Log, offset: dict[str, Any]) -> None:
    made = CdcpipeDataSource({"path": str(log.root)}).streamReader(ENVELOPE_SCHEMA)
    with pytest.raises(StagingError, match="the checkpoint has"):
        made.latestOffset(offset, ReadAllAvailable())


def test_a_log_that_has_not_begun(log: Log, tmp_path: Path) -> None:
    made = CdcpipeDataSource({"path": str(log.root)}).streamReader(ENVELOPE_SCHEMA)
    assert made.initialOffset()["position"] == "1:0/1000"
    assert made.latestOffset(made.initialOffset(), ReadAllAvailable()) == made.initialOffset()
    assert read(log.root)[0] == []
    (tmp_path / "empty").mkdir()
    made = CdcpipeDataSource({"path": str(tmp_path / "empty")}).streamReader(ENVELOPE_SCHEMA)
    start = made.initialOffset()
    assert start["position"] == "0:0/0"
    shutil.copytree(log.root, tmp_path / "empty", dirs_exist_ok=True)
    assert made.latestOffset(start, ReadAllAvailable()) == start
    fill(Log(tmp_path / "other"))
    shutil.copytree(tmp_path / "other", tmp_path / "empty", dirs_exist_ok=True)
    end = made.latestOffset(start, ReadAllAvailable())
    assert end["position"] == "2:0/1500"
    assert len(made.partitions(start, end)) == 1
    with pytest.raises(StagingError, match="no such directory"):
        read(tmp_path / "nowhere")


def test_a_partition_of_another_version_is_refused(log: Log) -> None:
    """An upgrade below a running driver: its workers are new, what it planned is not."""
    fill(log)
    reader = CdcpipeDataSource({"path": str(log.root)}).reader(ENVELOPE_SCHEMA)
    [part] = reader.partitions()
    vars(part)["piece"] = vars(part).pop("pieces")
    with pytest.raises(StagingError, match="does not know"):
        list(reader.read(part))


def test_a_schema_change_in_the_middle_of_a_segment(log: Log) -> None:
    renamed = relation(11, "z", ("id", INT), ("u", TEXT))
    log.segment(
        [A, into(A, b"1", b"one"), A, into(A, b"2", b"two"), A2, into(A2, b"3", b"3", b"x"), A, into(A, b"4", b"four")],
        [renamed, into(renamed, b"5", b"five"), relation(99, "a", ("id", TEXT)), into(relation(99, "a"), b"six")],
    )
    rows = typed(log.root)
    assert {(r["id"], r["id__string"], r["t"], r["t__int"], r["u"]) for r in rows} == {
        (1, None, "one", None, None),
        (2, None, "two", None, None),
        (3, None, None, 3, "x"),
        (4, None, "four", None, None),
        (None, "six", None, None, None),
    }
    assert only(typed(log.root, "public.z"), "id", "u") == [(5, "five")]
    assert [r.name for r in relation_versions(log.root, "public.a")] == ["a"] * 3
    assert {table: len(versions) for table, versions in tables_in(log.root).items()} == {("public", "a"): 3, ("public", "z"): 1}


def test_a_schema_that_the_user_gives(log: Log) -> None:
    log.segment([A, into(A, b"1", b"one"), A2, into(A2, b"2", b"3", b"x")])
    columns = merge_columns(None, [A, A2]).add("more", StringType())
    rows, _ = read(log.root, typed_schema(columns), table="public.a")
    assert only(rows, "id", "t", "t__int", "u", "more") == [(1, "one", None, None, None), (2, None, 3, "x", None)]
    with pytest.raises(SchemaError, match="has a column 't' of Spark type int"):
        read(log.root, typed_schema(merge_columns(None, [A])), table="public.a")
    bare, _ = read(log.root, merge_columns(None, [A, A2]), table="public.a")
    assert bare == [{"id": 1, "t": "one", "t__int": None, "u": None}, {"id": 2, "t": None, "t__int": 3, "u": "x"}]


def test_nothing_is_lost_for_want_of_a_metadata_column(log: Log) -> None:
    log.segment([A, Update(None, 11, None, None, (b"1", UNCHANGED_TOAST)), B, into(B, b"1", b"NaN", None)])
    with pytest.raises(StagingError, match="a TOAST value was not sent, and the schema has no _cdc_unchanged"):
        read(log.root, merge_columns(None, [A]), table="public.a")
    with pytest.raises(StagingError, match="a value does not fit its type, and the schema has no _cdc_exact"):
        read(log.root, merge_columns(None, [B]), table="public.b")


def test_odd_columns(log: Log) -> None:
    none = relation(1, "none")
    odd = relation(2, "odd.er", ("id", INT), ("ID", INT), ("", TEXT), ("_cdc_op", TEXT), ("a.b\n", TEXT))
    log.segment(
        [
            none,
            into(none),
            odd,
            into(odd, b"1", b"2", b"", b"op", b"ab"),
            Update(None, 2, None, None, (b"1", b"2", *[UNCHANGED_TOAST] * 3)),
        ]
    )
    assert only(typed(log.root, "public.none"), "_cdc_op", "_cdc_exact") == [("insert", {})]
    rows = typed(log.root, quote_table("public", "odd.er"))
    assert list(rows[0])[:6] == ["id", "_cdc_column_%49%44", "_cdc_column_", "_cdc_column__cdc_op", "a.b\n", "_cdc_op"]
    assert list(rows[0].values())[:6] == [1, 2, "", "op", "ab", "insert"]
    assert rows[1]["_cdc_unchanged"] == ["_cdc_column_", "_cdc_column__cdc_op", "a.b\n"]
    envelope, _ = read(log.root)
    assert envelope[1]["new"] == {"id": "1", "ID": "2", "": "", "_cdc_op": "op", "a.b\n": "ab"}
    assert envelope[2]["_cdc_unchanged"] == ["", "_cdc_op", "a.b\n"]


def test_unchanged_values_are_filled_in_from_the_old_row_or_key(log: Log) -> None:
    log.segment(
        [
            A,
            Update(None, 11, None, (b"1", b"big"), (b"2", UNCHANGED_TOAST)),
            Update(None, 11, (b"1", None), None, (b"2", UNCHANGED_TOAST)),
            # A key that is TOASTed: the server sends it as the old one with every update.
            Update(None, 11, (b"3", None), None, (UNCHANGED_TOAST, UNCHANGED_TOAST)),
        ]
    )
    assert only(typed(log.root), "id", "t", "_cdc_unchanged") == [(2, "big", []), (2, None, ["t"]), (3, None, ["t"])]
    envelope, _ = read(log.root)
    assert only(envelope, "new", "_cdc_unchanged") == [({"id": "2", "t": "big"}, []), ({"id": "2"}, ["t"]), ({"id": "3"}, ["t"])]


def test_messages_and_other_tables_do_not_count(log: Log) -> None:
    log.segment([A, LogicalMessage(None, 1, 5, "p", b"x"), B, into(A, b"1", None), Truncate(None, 0, (12,))])
    assert only(typed(log.root), "_cdc_op", "_cdc_ordinal") == [("insert", 0)]
    assert only(typed(log.root, "public.b"), "_cdc_op", "_cdc_ordinal") == [("truncate", 1)]


def messages(path: Path, schema: Any = None, **options: str) -> list[dict[str, Any]]:
    return read(path, schema, view="messages", **options)[0]


def test_messages(log: Log) -> None:
    fill(log)
    rows = messages(log.root)
    assert only(rows, *MESSAGE_SCHEMA.names) == MESSAGES
    schema = StructType([MESSAGE_SCHEMA["content"], MESSAGE_SCHEMA["_cdc_xid"]])
    assert messages(log.root, schema) == [{"content": message[1], "_cdc_xid": message[7]} for message in MESSAGES]
    for name, data_type in (("content", StringType()), ("more", StringType())):
        with pytest.raises(StagingError, match=f"messages have no column {name} of type string"):
            messages(log.root, StructType([StructField(name, data_type)]))
    assert len(read(log.root)[0]) == 9  # none of them is a change


def test_a_segment_that_has_messages_and_no_transaction(log: Log) -> None:
    end_lsn = log.end_lsn + 0x100
    path = log.root / "000001" / segment_name(log.end_lsn, end_lsn)
    path.write_bytes(encode([say(end_lsn - 8, b"x", is_transactional=False)]))
    segment = Segment(1, log.end_lsn, end_lsn, path)
    assert {str(table): found.count for table, found in read_contents([segment], log.end_lsn).items()} == {"_cdc_message": 1}
    assert count_rows([segment], log.end_lsn) == 1


@pytest.mark.parametrize(("identity", "expected"), [("f", [(0, False), (2, False), (5, False)]), ("d", [(0, False)])])
def test_a_description_that_the_server_sends_again(log: Log, identity: str, expected: list[tuple[int, bool]]) -> None:
    """It is another use where it does not tell the key; what the launcher repeats, one per segment, is none."""
    described, row = relation(11, "a", ("id", INT), identity=identity), Insert(None, 11, (b"1",))
    groups = [[described, row, row], [described, row, row], [row], [described, row]]
    ends = [log.end_lsn + 0x100 * (number + 1) for number in range(len(groups))]
    stream = b"".join(
        encode_header(0 if message is described else 0x1000, len(record)) + record
        for end, group in zip(ends, groups, strict=True)
        for message in transaction(end, group)
        for record in [build(message)]
    )
    filler, segments, data = SegmentFiller(log.end_lsn, SealPolicy(1, 1e9)), [], b""
    for at in range(0, len(stream), 50):
        for operation in filler.feed(stream[at : at + 50], 0):
            if isinstance(operation, Write):
                data += operation.data
            elif isinstance(operation, Cut):
                path = log.root / "000001" / segment_name(operation.start_lsn, operation.end_lsn)
                path.write_bytes(data)
                segments.append(Segment(1, operation.start_lsn, operation.end_lsn, path))
                data = b""
    assert len(segments) == len(groups)
    (found,) = read_contents(segments).values()
    rows = [(end, ordinal) for end, group in zip(ends, groups, strict=True) for ordinal in range(len(group) - (described in group))]
    assert [(rows.index((use.end_lsn, use.ordinal)), use.is_repeated) for use in found.uses] == expected
    (alone,) = read_contents(segments[2:3]).values()
    assert alone.uses[0].is_repeated


def test_ranges_of_messages(log: Log) -> None:
    """A transaction's messages go with its end; the others have ends of their own."""
    log.segment(
        [say(0x1020, b"a")],
        [say(0x1120, b"c"), say(0x1130, b"d")],
        before=[say(0x1010, b"0", is_transactional=False)],
    )
    log.segment([say(0x1250, b"f")], before=[say(lsn, b"e", is_transactional=False) for lsn in (0x1208, 0x1210)])

    def contents(**options: str) -> str:
        return b"".join(row["content"] for row in messages(log.root, **options)).decode()

    assert contents() == "0acdeef"
    assert contents(start="1:0/1008", end="1:0/1010") == "0"
    assert contents(start="1:0/1010", end="1:0/1100") == "a"
    assert contents(end="1:0/1200") == "0acd"
    assert contents(start="1:0/1100", end="1:0/1208") == "cde"
    assert contents(start="1:0/1208") == "ef"
    assert contents(end="1:0/100F") == ""
    places = [row["_cdc_end_lsn"] for row in messages(log.root)]
    assert places == [0x1010, 0x1100, 0x1200, 0x1200, 0x1208, 0x1210, 0x1300]


def test_a_stream_of_messages(log: Log) -> None:
    fill(log)
    made = CdcpipeDataSource({"path": str(log.root), "view": "messages"}).streamReader(MESSAGE_SCHEMA)
    start = made.initialOffset()
    parts = made.partitions(start, made.latestOffset(start, ReadAllAvailable()))
    rows = [row for part in parts for batch in made.read(part) for row in batch.to_pylist()]
    assert only(rows, *MESSAGE_SCHEMA.names) == MESSAGES


@pytest.mark.parametrize("prefix", ["", "é" * 63, "x" * 128, "y" * 5000])
def test_prefixes_of_any_length(log: Log, prefix: str) -> None:
    log.segment([say(0x1010, b"a\0b", prefix=prefix), say(0x1018, b"", prefix=prefix)])
    assert only(messages(log.root), "prefix", "content") == [(prefix, b"a\0b"), (prefix, b"")]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda data: data[:10] + data[10:].replace(b"\0", b"\1"), "prefix of a logical message has no end"),
        (lambda data: data[:-1], "another length than its header"),
        (lambda data: data + b"x", "another length than its header"),
        (lambda data: data[:10] + b"pppppp\0\0\0", "another length than its header"),
        (lambda data: data.replace(b"p\0", b"\xe9\0"), "not UTF-8"),
    ],
)
def test_a_damaged_message_is_named(log: Log, damage: Any, problem: str) -> None:
    from support.pgoutput_build import build

    damaged = damage(build(say(0x1020, b"content")))
    path = log.segment([say(0x1010, b"before"), damaged, say(0x1030, b"behind" * 100)]).path
    with pytest.raises(StagingError, match=f"segment {path}.* at byte .*{problem}"):
        messages(log.root)


def test_large_messages_are_read_one_by_one(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in memory is one batch: no more than BATCH_BYTES, or one message."""

    monkeypatch.setattr(slices, "BATCH_BYTES", 1 << 20)
    sizes = [3 << 20, 1, 2, 3 << 20, 600_000, 600_000]
    path = log.segment([A, *(say(0x1008 + 8 * n, bytes([n]) * size) for n, size in enumerate(sizes))]).path
    before = pa.total_allocated_bytes()
    found = []
    for batch in MessageReader(Slice(str(path), 1, 0, log.end_lsn), MESSAGE_SCHEMA).read():
        found.append([len(content.as_py()) for content in batch.column("content")])
        assert pa.total_allocated_bytes() - before < 4 << 20
        del batch
    assert found == [[3 << 20], [1, 2], [3 << 20], [600_000], [600_000]]


@pytest.mark.parametrize("slice_bytes", [30, 1000])
def test_slices_together_are_the_segment(log: Log, slice_bytes: int) -> None:
    fill(log)
    log.segment(*([into(A, b"%d" % n, b"x"), A2, into(A2, b"%d" % n, b"1", None), A] for n in range(10)), before=[A])
    for options in ({}, {"table": "public.a"}, {"view": "messages"}):
        whole, parts = read(log.root, **options)
        sliced, more = read(log.root, max_partition_bytes=str(slice_bytes), **options)
        assert len(more) > len(parts) == 1  # four small segments, one task

        def key(row: dict[str, Any]) -> tuple[int, int, int]:
            return row["_cdc_end_lsn"], row["_cdc_ordinal"], row.get("_cdc_lsn", 0)

        assert sorted(sliced, key=key) == sorted(whole, key=key)


SHAPES = {
    11: [
        relation(11, "a", ("id", TEXT), ("t", TEXT)),
        relation(11, "a", ("t", TEXT)),
        relation(11, "b", ("id", TEXT), ("u", TEXT)),
    ],
    12: [relation(12, "b", ("id", TEXT)), relation(12, "a", ("u", TEXT), ("t", TEXT))],
}


@st.composite
def logs(draw: st.DrawFn) -> list[list[list[Any]]]:
    """Segments of transactions of changes of two relations whose names and columns move about."""
    segments: list[list[list[Any]]] = []
    for _ in range(draw(st.integers(1, 3))):
        in_force: dict[int, Any] = {}
        transactions: list[list[Any]] = []
        for _ in range(draw(st.integers(1, 4))):
            messages: list[Any] = []
            for _ in range(draw(st.integers(0, 5))):
                relation_id = draw(st.sampled_from([11, 12]))
                if relation_id not in in_force or draw(st.integers(0, 3)) == 0:
                    in_force[relation_id] = draw(st.sampled_from(SHAPES[relation_id]))
                    messages.append(in_force[relation_id])
                columns = in_force[relation_id].columns
                value = st.sampled_from([None, b"", b"x", UNCHANGED_TOAST])
                row = st.tuples(*[value] * len(columns))
                key = st.tuples(*[st.sampled_from([b"1", b"2"]), *[st.none()] * (len(columns) - 1)])
                messages.append(
                    draw(
                        st.one_of(
                            st.builds(Insert, st.none(), st.just(relation_id), row),
                            st.builds(Update, st.none(), st.just(relation_id), st.none() | key, st.none(), row),
                            st.builds(Update, st.none(), st.just(relation_id), st.none(), row, row),
                            st.builds(Delete, st.none(), st.just(relation_id), key, st.none()),
                            st.just(Truncate(None, 0, tuple(in_force))),
                        )
                    )
                )
            transactions.append(messages)
        segments.append(transactions)
    return segments


@settings(max_examples=40)
@given(logs(), st.data())
def test_typed_rows_say_what_the_envelope_says(segments: list[list[list[Any]]], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        log = Log(Path(directory))
        for transactions in segments:
            log.segment(*transactions)
        places = st.integers(0, (log.end_lsn - 0x1000) // 0x100).map(lambda n: f"1:0/{0x1000 + n * 0x100:X}")
        options = {name: value for name in ("start", "end") if (value := data.draw(st.none() | places, label=name)) is not None} | {
            "max_partition_bytes": data.draw(st.sampled_from(["100", "100000"]))
        }
        found: list[tuple[Any, ...]] = []
        tables = tables_in(log.root)
        for table, versions in tables.items():
            schema = typed_schema(merge_columns(None, versions))
            for row in read(log.root, schema, table=quote_table(*table), **options)[0]:
                place = row["_cdc_end_lsn"], row["_cdc_ordinal"]
                values = {name: row[name] for name in merge_columns(None, versions).names if row[name] is not None}
                old = {name: value for name, value in (row["_cdc_old"] or {}).items() if value is not None}
                found.append((*place, row["_cdc_op"], *table, values, old, row["_cdc_unchanged"]))
        expected = []
        for row in read(log.root, **options)[0]:
            new = row["old"] if row["_cdc_op"] == "delete" else row["new"]
            new, old = ({name: value for name, value in (some or {}).items() if value is not None} for some in (new, row["old"]))
            place = row["_cdc_end_lsn"], row["_cdc_ordinal"]
            expected.append((*place, row["_cdc_op"], row["table_schema"], row["table_name"], new, old, row["_cdc_unchanged"]))
        assert sorted(found, key=lambda r: r[:5]) == sorted(expected, key=lambda r: r[:5])


def test_batches_are_bounded(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:

    path = log.segment([A, *(into(A, b"%d" % n, b"x" * 50) for n in range(100))]).path
    piece = Slice(str(path), 1, 0, log.end_lsn)
    schema = typed_schema(merge_columns(None, [A]))

    def sizes() -> list[int]:
        batches = list(TypedReader(piece, ("public", "a"), schema).read())
        assert [value for batch in batches for value in batch.column("id").to_pylist()] == list(range(100))
        return [batch.num_rows for batch in batches]

    assert sizes() == [100]
    monkeypatch.setattr(slices, "BATCH_ROWS", 33)
    assert sizes() == [33, 33, 33, 1]
    monkeypatch.setattr(slices, "BATCH_BYTES", 690)
    assert max(sizes()) == 10
    monkeypatch.setattr(slices, "BATCH_SPAN_BYTES", 200)
    assert max(sizes()) == 3
    monkeypatch.setattr(slices, "BATCH_BYTES", 1)
    assert sizes() == [1] * 100
    monkeypatch.setattr(envelope, "ENVELOPE_ROWS", 40)
    assert [batch.num_rows for batch in EnvelopeReader(piece, ENVELOPE_SCHEMA).read()] == [40, 40, 20]


def test_a_damaged_row_is_named(log: Log) -> None:
    from support.pgoutput_build import build

    damaged = build(into(A, b"1", b"one"))[:-1]
    path = log.segment([A, damaged]).path
    for options in ({}, {"table": "public.a"}):
        with pytest.raises(StagingError, match=f"{path} is corrupt.* at byte"):
            read(log.root, **options)
    path.unlink()
    log.end_lsn = 0x1000
    path = log.segment([A, into(A, b"1", b"\xe9")]).path
    for options in ({}, {"table": "public.a"}):
        with pytest.raises(
            StagingError,
            match=f"{path} is corrupt.*column 't'.* at byte .*not UTF-8|{path} is corrupt at byte .*column 't' is not UTF-8",
        ):
            read(log.root, **options)


def test_values_in_binary_form(log: Log) -> None:
    log.segment([A, into(A, Binary(b"\0\0\0\7"), Binary(b"one"))])
    (row,), _ = read(log.root, table="public.a")
    assert (row["id"], row["t"]) == (7, "one")
    (row,), _ = read(log.root)
    assert dict(row["new"]) == {"id": "7", "t": "one"}


def test_a_binary_value_of_a_users_type_is_refused_by_name(log: Log) -> None:
    users = relation(11, "a", ("id", INT), ("t", 16400))
    log.segment([users, into(users, b"1", Binary(b"one"))])
    for options in ({}, {"table": "public.a"}):
        with pytest.raises(CdcpipeError, match=r"column 't' of table 'public\.a' came in binary form"):
            read(log.root, **options)


def test_an_index_of_other_content_does_no_harm(log: Log) -> None:
    """Somebody moved files about: the size is the same, the name is not."""
    one = log.segment([A, into(A, b"1", b"one"), into(A, b"22", b"two")]).path
    two = log.segment([A, into(A, b"11", b"one"), into(A, b"2", b"two")]).path
    assert one.stat().st_size == two.stat().st_size
    segment_index.build(one)
    one.with_suffix(".idx").replace(two.with_suffix(".idx"))
    assert only(typed(log.root, start="1:0/1100"), "id", "t") == [(11, "one"), (2, "two")]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "'path'.* is missing"),
        ({"path": "x", "tabel": "a.b"}, "'tabel'.* is not known"),
        ({"path": "x", "types": "all"}, "'types'.* can only be 'exact' or 'native'"),
        ({"path": "x", "view": "tables"}, "'view'.* can only be 'messages' or 'segments'"),
        ({"path": "x", "view": "segments", "table": "a.b"}, "cannot be given with 'view'"),
        ({"path": "x", "start": "0/1"}, "'start'.* cannot be read: not a position"),
        ({"path": "x", "end": "1:x"}, "'end'.* cannot be read: not a position"),
        ({"path": "x", "max_bytes_per_trigger": "0"}, "'max_bytes_per_trigger'.* above 0"),
        ({"path": "x", "max_partition_bytes": "64m"}, "'max_partition_bytes'.* cannot be read"),
        ({"path": "x", "table": "a"}, "'table'.* must be schema.name"),
        ({"path": "x", "table": "a.b.c"}, "'table'.* must be schema.name"),
    ],
)
def test_options_that_cannot_be(options: dict[str, str], problem: str) -> None:
    with pytest.raises(InvalidArgumentsError, match=problem):
        CdcpipeDataSource(options)


def test_a_stream_has_no_end_option() -> None:
    with pytest.raises(InvalidArgumentsError, match="a stream has no end"):
        CdcpipeDataSource({"path": "x", "end": "1:0/1"}).streamReader(ENVELOPE_SCHEMA)


@pytest.mark.parametrize("name", [("public", "a"), ("a.b", "c"), ('a"b', 'c".d'), ("x\n", " "), ("Ü", "é")])
def test_any_table_can_be_named(name: tuple[str, str]) -> None:
    assert source._parse_table(quote_table(*name)) == name
