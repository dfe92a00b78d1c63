"""A staging log with every kind of change, and a reader of its rows that works like Spark, but in this process."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cdcpipe.pgoutput.messages import UNCHANGED_TOAST, Delete, Truncate, Update
from spark_sink.source.datasource import CdcpipeDataSource
from support.oids import INT4, NUMERIC, TEXT, TIMESTAMPTZ
from support.segments import Log, into, relation, say

A = relation(11, "a", ("id", INT4), ("t", TEXT))
A2 = relation(11, "a", ("id", INT4), ("t", INT4), ("u", TEXT))
B = relation(12, "b", ("id", INT4), ("n", NUMERIC, (8 << 16 | 2) + 4), ("at", TIMESTAMPTZ), identity="f")
NEW_YEAR = datetime(2025, 1, 1, tzinfo=UTC)


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


def fill(log: Log) -> None:
    """Write two epochs and three segments: every kind of change on table a, a table with exact texts, logical messages."""
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


MESSAGES = [
    ("p", b"at once", False, 1, 0x1010, 0, 0x1010, None, None),
    ("p", b"\xff\0", True, 1, 0x1100, 1, 0x1020, 700, NEW_YEAR),
    ("p", b"", True, 1, 0x1100, 1, 0x1030, 700, NEW_YEAR),
]
