"""The data source in a real Spark session: rows, streams, messages, and errors that reach the user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from spark_sink.schema.types import MESSAGE_SCHEMA, merge_columns, typed_schema
from spark_sink.source import datasource
from spark_sink.source.datasource import ENVELOPE_SCHEMA
from support.oids import DATE, INT4, TEXT, TIMESTAMP, TIMESTAMPTZ
from support.paths import ROOT
from support.segments import COMMIT_TIME_US, Log, into, relation
from support.source_rows import MESSAGES, NEW_YEAR, A, fill

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture
def session(spark: SparkSession) -> SparkSession:
    datasource.register(spark)
    return spark


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
    odd = relation(2, "{a,b}", ("id", INT4), ("ID", INT4), ("", TEXT), ("_cdc_op", TEXT), ("a.b\n", TEXT))
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
    """Run a stream with availableNow. Return the rows of each micro-batch, and the source's part of its progress."""
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
from spark_sink.source import datasource
spark = session.build(master="local[1]", format="parquet")
datasource.register(spark)
datasource.register(spark)
rows = spark.read.format("cdcpipe").option("table", "public.a").load(sys.argv[2]).collect()
print("rows:", len(rows))
"""


@pytest.mark.spark
def test_workers_need_no_path(log: Log, tmp_path: Path) -> None:
    """Only the driver needs to find the package. Its sources go to the workers."""
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
