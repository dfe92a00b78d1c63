"""Writes segments of the staging log by hand: records with their headers, in whole transactions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdcpipe.lsn import format_lsn
from cdcpipe.pgoutput.messages import Begin, Column, Commit, Insert, LogicalMessage, Message, Relation
from cdcpipe.pipe.framing import encode_header
from spark_sink.staging.log import Segment, segment_name
from support.pgoutput_build import build

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

COMMIT_TIME_US = 789_004_800_000_000  # 2025-01-01
START_LSN = 0x1000


def relation(relation_id: int, name: str, *columns: tuple[str, int] | tuple[str, int, int], identity: str = "d") -> Relation:
    """Return a relation in the schema ``public`` whose first column is its key."""
    return Relation(
        None,
        relation_id,
        "public",
        name,
        identity,
        tuple(
            Column(1 if number == 0 or identity == "f" else 0, name, type_id, *(modifier or (-1,)))
            for number, (name, type_id, *modifier) in enumerate(columns)
        ),
    )


def transaction(end_lsn: int, messages: Sequence[Message | bytes], xid: int = 700) -> list[Message | bytes]:
    """Return Begin, the messages and Commit. The commit record is 0x30 bytes long."""
    commit_lsn = end_lsn - 0x30
    return [
        Begin(commit_lsn, COMMIT_TIME_US, xid),
        *messages,
        Commit(0, commit_lsn, end_lsn, COMMIT_TIME_US),
    ]


def encode(messages: Iterable[Message | bytes]) -> bytes:
    """Return the records with their headers. A message given as bytes is a record already."""
    records = (message if isinstance(message, bytes) else build(message) for message in messages)
    return b"".join(encode_header(0x1000, len(record)) + record for record in records)


def describe_epoch(start_lsn: int, **fields: object) -> str:
    """Return the content of an epoch.json. ``fields`` replace the usual values."""
    usual = {
        "format": 1,
        "system_id": "7123456789",
        "timeline": 1,
        "database": "db",
        "slot": "s",
        "publications": ["p"],
        "options": {},
        "start_lsn": format_lsn(start_lsn),
    }
    return json.dumps(usual | fields)


class Log:
    """A staging directory that grows: each segment starts where the one before it ends."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.end_lsn = START_LSN
        self.epoch = 0
        self.new_epoch()

    def new_epoch(self) -> None:
        self.epoch += 1
        directory = self.root / f"{self.epoch:06d}"
        directory.mkdir(parents=True)
        (directory / "epoch.json").write_text(describe_epoch(self.end_lsn))

    def segment(self, *transactions: Sequence[Message | bytes], before: Sequence[Message | bytes] = ()) -> Segment:
        """Add a segment. Each item has the messages of one transaction; those of ``before`` precede the first transaction."""
        messages = list(before)
        start_lsn = self.end_lsn
        for number, body in enumerate(transactions):
            self.end_lsn += 0x100
            messages += transaction(self.end_lsn, body, xid=700 + number)
        path = self.root / f"{self.epoch:06d}" / segment_name(start_lsn, self.end_lsn)
        path.write_bytes(encode(messages))
        return Segment(self.epoch, start_lsn, self.end_lsn, path)


def into(rel: Any, *row: bytes | None) -> Insert:
    return Insert(None, rel.relation_id, row)


def say(lsn: int, content: bytes, *, prefix: str = "p", is_transactional: bool = True) -> LogicalMessage:
    return LogicalMessage(None, int(is_transactional), lsn, prefix, content)
