"""An output plugin may write nothing for a transaction. Then it is not outstanding. Every other transaction is."""

import struct
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from cdcpipe.config import StreamOptions
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.pipe.framing import RecordReader, encode_header
from cdcpipe.plugins import load
from cdcpipe.plugins.base import OutputPlugin
from cdcpipe.plugins.renderer import Renderer
from cdcpipe.replication.boundaries import tracker_for
from cdcpipe.replication.progress import Progress
from cdcpipe.replication.strict_progress import StrictProgress
from cdcpipe.streaming.receiver import Receiver
from support.pgoutput_stream import begin, commit, insert, message, record, relation, truncate
from support.wire import keepalive, wal_data

OPTIONS = StreamOptions(
    out_fd=1, write_header=True, write_newline=False, auto_feedback=False, wait_after_end=False, needs_commands=True
)
ROW = relation(1) + insert(1, b"a")
NO_RECORD = relation(1) + truncate(1)


class Stream:
    """A plugin on a stream whose messages the test gives. Debezium's writes nothing for a TRUNCATE."""

    def __init__(self, progress: Progress, *, is_whole: bool = False, plugin: OutputPlugin | None = None) -> None:
        self.progress = progress
        self._messages = deque[bytes]()
        walsender: Any = SimpleNamespace(direct=None, notices=[], receive=self._receive, consume_input=lambda: None)
        transactions = Transactions() if is_whole else None
        tracker = tracker_for("pgoutput", {}, progress, None, transactions)
        rendered_by = plugin or load("debezium", {}, lambda _: [["shop"]])
        self._receiver = Receiver(
            walsender,
            progress,
            tracker,
            OPTIONS,
            lambda _chunk, ends, _is_framed: progress.written(ends),
            lambda: None,
            make_feeder=lambda write: Renderer(rendered_by, write),
            transactions=transactions,
        )

    def _receive(self, _: int) -> tuple[int, bytes | None]:
        if not self._messages:
            return 0, None
        data = self._messages.popleft()
        return len(data), data

    def take(self, *parts: bytes, up_to: int = 0) -> None:
        """Take records, then a keepalive at the position ``up_to``."""
        reader = RecordReader()
        reader.feed(b"".join(parts))
        self._messages += [wal_data(lsn, record)[5:] for lsn, record in reader]
        if up_to:
            self._messages.append(keepalive(up_to)[5:])
        while self._messages or self._receiver.is_taking:
            self._receiver.receive()


def transaction(end_lsn: int, changes: bytes) -> bytes:
    return begin(end_lsn - 10, end_lsn) + changes + commit(end_lsn - 10, end_lsn)


def in_blocks(end_lsn: int, changes: bytes) -> bytes:
    """Return a transaction as the server streams it, in one block."""
    xid = struct.pack(">I", end_lsn)
    reader = RecordReader()
    reader.feed(changes)
    records = [(lsn, record[:1] + xid + record[1:]) for lsn, record in reader]
    records = [(end_lsn - 30, b"S" + xid + b"\1"), *records, (end_lsn - 20, b"E")]
    records.append((end_lsn, b"c" + xid + struct.pack(">BQQq", 0, end_lsn - 10, end_lsn, 0)))
    return b"".join(encode_header(lsn, len(record)) + record for lsn, record in records)


def prepared(end_lsn: int, changes: bytes) -> bytes:
    """Return a transaction at its PREPARE."""
    body = struct.pack(">QQqI", end_lsn - 10, end_lsn, 0, 5) + b"gid\0"
    return record(b"b" + body, end_lsn - 10) + changes + record(b"P\0" + body, end_lsn)


def outcome(kind: bytes, lsn: int) -> bytes:
    """Return the COMMIT PREPARED or ROLLBACK PREPARED of `prepared`."""
    times = bytes(8 if kind == b"K" else 16)
    return record(kind + b"\0" + struct.pack(">QQ", lsn - 10, lsn) + times + struct.pack(">I", 5) + b"gid\0", lsn)


@pytest.mark.parametrize("is_whole", [False, True])
def test_the_idle_position_is_confirmed_after_transactions_without_a_record(is_whole: bool) -> None:
    stream = Stream(progress := Progress(0.0), is_whole=is_whole)
    stream.take(transaction(210, ROW))
    progress.feedback(210, 0.0)
    stream.take(transaction(310, NO_RECORD), transaction(410, NO_RECORD), up_to=10_000)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (10_000, False)


@pytest.mark.parametrize("is_whole", [False, True])
def test_what_has_a_record_is_outstanding_whatever_comes_after_it(is_whole: bool) -> None:
    stream = Stream(progress := Progress(0.0), is_whole=is_whole)
    stream.take(transaction(210, NO_RECORD), transaction(310, ROW), transaction(410, NO_RECORD), up_to=10_000)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (0, True)
    stream.take(transaction(10_110, NO_RECORD + insert(1, b"b")), transaction(10_210, NO_RECORD), up_to=20_000)
    progress.feedback(310, 0.0)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (310, True)
    progress.feedback(10_110, 0.0)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (20_000, False)


def test_transactions_in_blocks_are_looked_at_when_they_are_assembled() -> None:
    stream = Stream(progress := Progress(0.0), is_whole=True)
    stream.take(in_blocks(210, NO_RECORD), up_to=1000)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (1000, False)
    stream.take(in_blocks(2010, relation(1) + b"".join(insert(1, b"v" * 9000) for _ in range(100))), up_to=3000)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (1000, True)
    stream.take(in_blocks(4010, NO_RECORD), message(5000, b"m"), up_to=6000)
    progress.feedback(2010, 0.0)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (2010, True)
    progress.feedback(5000, 0.0)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (6000, False)


def test_before_an_idle_position_is_told_nothing_else_is_outstanding() -> None:
    stream = Stream(progress := StrictProgress(0.0))
    stream.take(transaction(210, ROW), transaction(310, NO_RECORD), up_to=10_000)
    assert progress.take_idle(0.0) == 0
    progress.feedback(210, 0.0)
    assert progress.take_idle(0.0) == 10_000
    assert progress.confirmed_lsn == 210


@pytest.mark.parametrize("kind", [b"K", b"r"])
def test_a_prepared_transaction_without_a_record_is_not_outstanding(kind: bytes) -> None:
    plugin = load("test_decoding", {"only-local": "on"}, lambda _: [["180000"]])
    stream = Stream(progress := Progress(0.0), plugin=plugin)
    foreign = record(b"O" + bytes(8) + b"other\0")
    stream.take(prepared(110, foreign + ROW), up_to=1000)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (1000, False)
    stream.take(outcome(kind, 1110), up_to=2000)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (2000, False)
    stream.take(prepared(2110, ROW), up_to=3000)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (2000, True)
    stream.take(outcome(kind, 3110), up_to=4000)
    progress.feedback(2110, 0.0)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (2110, True)
    progress.feedback(3110, 0.0)
    assert (progress.confirmed_lsn, progress.is_outstanding) == (4000, False)
