"""Logical messages as the data source reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StringType, StructField, StructType

from spark_sink.schema.types import MESSAGE_SCHEMA
from spark_sink.source import slices
from spark_sink.source.contents import count_rows, find
from spark_sink.source.datasource import CdcpipeDataSource
from spark_sink.source.messages import MessageReader
from spark_sink.source.slices import Slice
from spark_sink.staging.log import Segment, StagingError, segment_name
from support.pgoutput_build import build
from support.segments import Log, encode, say
from support.source_rows import MESSAGES, A, fill, only, read


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
    assert {str(table): found.count for table, found in find([segment], log.end_lsn).by_table().items()} == {"_cdc_message": 1}
    assert count_rows([segment], log.end_lsn) == 1


def test_ranges_of_messages(log: Log) -> None:
    """The messages of a transaction belong to its end. The others have their own ends."""
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
    damaged = damage(build(say(0x1020, b"content")))
    path = log.segment([say(0x1010, b"before"), damaged, say(0x1030, b"behind" * 100)]).path
    with pytest.raises(StagingError, match=f"segment {path}.* at byte .*{problem}"):
        messages(log.root)


def test_large_messages_are_read_one_by_one(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one batch is in memory: at most BATCH_BYTES, or one message."""

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
