"""Taking many records at once gives the same chunks, ends and errors as taking them one by one, however the stream is cut."""

import functools
import os
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cdcpipe.config import StreamOptions
from cdcpipe.errors import CdcpipeError
from cdcpipe.libpq.connection import Notice
from cdcpipe.libpq.direct_copy import DirectCopy, Fields
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.pipe.framing import match_header
from cdcpipe.replication.boundaries import tracker_for
from cdcpipe.replication.progress import Progress
from cdcpipe.streaming import receiver as receiver_module
from cdcpipe.streaming.receiver import Receiver
from cdcpipe.streaming.wal_data import Run
from support.waiting import DEADLINE_S
from support.wire import error_fields, keepalive, message, wal_data

OPTIONS = StreamOptions(
    out_fd=1, write_header=True, write_newline=False, auto_feedback=False, wait_after_end=False, needs_commands=True
)


def relation(relation_id: int, xid: bytes = b"") -> bytes:
    columns = b"\1id\0" + struct.pack(">Ii", 25, -1)
    return b"R" + xid + struct.pack(">I", relation_id) + b"public\0t\0d\0\1" + columns


def row(kind: bytes, relation_id: int, value: bytes, xid: bytes = b"") -> bytes:
    return kind + xid + struct.pack(">I", relation_id) + b"N\0\1t" + struct.pack(">I", len(value)) + value


VALUES = st.binary(max_size=50) | st.integers(0, 12_000).map(lambda size: b"v" * size)
ROWS = st.lists(
    st.tuples(st.sampled_from([b"I", b"U", b"D", b"R", b"M"]), st.integers(1, 2), VALUES),
    max_size=12,
)
BETWEEN = st.sampled_from(["nothing", "keepalive", "notice", "message", "status"])
SUBXIDS = st.lists(st.integers(0, 2), min_size=12, max_size=12)


@dataclass
class Server:
    """Makes the messages of a stream."""

    wire: list[bytes] = field(default_factory=list)
    lsn: int = 0x1_0000_0100
    xid: int = 700

    def send(self, record: bytes, lsn: int | None = None) -> None:
        self.lsn += 8
        self.wire.append(wal_data(self.lsn if lsn is None else lsn, record))

    def between(self, what: str) -> None:
        self.lsn += 8
        if what == "keepalive":
            self.wire.append(keepalive(self.lsn, reply_requested=self.lsn % 16 == 0))
        elif what == "notice":
            self.wire.append(message(b"N", error_fields("NOTICE", "00000", "told")))
        elif what == "status":
            self.wire.append(message(b"S", b"a\0b\0"))
        elif what == "message":
            self.send(b"M" + struct.pack(">BQ", 0, self.lsn + 8) + b"p\0" + struct.pack(">I", 1) + b"c")

    def changes(self, rows: list[tuple[bytes, int, bytes]], xids: list[bytes]) -> None:
        for (kind, relation_id, value), xid in zip(rows, xids, strict=False):
            if kind == b"R":
                self.send(relation(relation_id, xid), 0)
            elif kind == b"M":
                self.send(b"M" + xid + struct.pack(">BQ", 1, self.lsn + 8) + b"p\0" + struct.pack(">I", len(value)) + value)
            else:
                self.send(row(kind, relation_id, value, xid))

    def transaction(self, rows: list[tuple[bytes, int, bytes]]) -> None:
        self.xid += 10
        commit_lsn = self.lsn + 8 * (len(rows) + 4)
        self.send(b"B" + struct.pack(">QqI", commit_lsn, 0, self.xid))
        for relation_id in (1, 2):
            self.send(relation(relation_id), 0)
        self.changes(rows, [b""] * len(rows))
        self.lsn = commit_lsn
        self.send(b"C" + struct.pack(">BQQq", 0, commit_lsn, self.lsn + 8, 0))

    def streamed(self, rows: list[tuple[bytes, int, bytes]], subxids: list[int], *, is_committed: bool) -> None:
        self.xid += 10
        xid = struct.pack(">I", self.xid)
        self.send(b"S" + xid + b"\1")
        for relation_id in (1, 2):
            self.send(relation(relation_id, xid), 0)
        self.changes(rows, [struct.pack(">I", self.xid + sub) for sub in subxids])
        self.send(b"E")
        if is_committed:
            self.send(b"c" + xid + struct.pack(">BQQq", 0, self.lsn, self.lsn + 8, 0))
        else:
            self.send(b"A" + xid + xid)


@dataclass
class Outcome:
    """What a receiver has made of a stream."""

    data: bytes
    ends: list[int]
    received_lsn: int
    is_outstanding: bool
    records: int
    is_finished: bool
    error: str


def received(stream: bytes, cuts: list[int], end_lsn: int | None, *, is_whole: bool, by_runs: bool) -> Outcome:
    """Let a receiver take the stream, which arrives in pieces."""
    ours, server = socket.socketpair()
    data, ends, error = bytearray(), list[int](), ""
    with ours, server:
        copy = DirectCopy(ours.fileno(), lambda fields: notices.append(_notice(fields)))
        notices: list[Notice] = []
        walsender: Any = SimpleNamespace(
            direct=copy if by_runs else None,
            receive=copy.receive,
            consume_input=copy.consume_input,
            notices=notices,
            told_notices=set(),
        )
        progress = Progress(0.0)
        transactions = Transactions() if is_whole else None
        tracker = tracker_for("pgoutput", {}, progress, end_lsn, transactions)

        def put(chunk: bytes, chunk_ends: list[int], is_framed: bool) -> None:
            assert not is_framed or not chunk or match_header(chunk, 0)
            data.extend(chunk)
            ends.extend(chunk_ends)

        receiver = Receiver(walsender, progress, tracker, OPTIONS, put, not_needed, make_feeder=None, transactions=transactions)
        receiver._run_class = Run if by_runs else None
        try:
            for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
                for part in range(begin, end, 60_000):
                    server.sendall(stream[part : min(end, part + 60_000)])
                    receiver.has_more = True
                    while receiver.is_taking or (receiver.has_more and not tracker.is_finished):
                        receiver.receive()
        except CdcpipeError as ex:
            receiver.queue_before_failure()
            error = f"{type(ex).__name__}: {ex}"
        receiver.close()
        copy.close()
    return Outcome(bytes(data), ends, progress.received_lsn, progress.is_outstanding, receiver.records, tracker.is_finished, error)


def not_needed() -> None:
    """Stand for a wait for the consumer, where no output plugin writes."""
    raise AssertionError("an output plugin waits for the consumer")


def _notice(fields: Fields) -> Notice:
    return Notice("NOTICE", "00000", (fields.error_field(ord("M")) or b"").decode())


def make_stream(drawn: list[Any], *, is_whole: bool) -> Server:
    server = Server()
    for kind, rows, subxids, what in drawn:
        server.between(what)
        if kind == "plain" or not is_whole:
            server.transaction(rows)
        else:
            server.streamed(rows, subxids, is_committed=kind == "committed")
    return server


@pytest.fixture(autouse=True, scope="module")
def _small_limits() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(receiver_module, "LEAST_RUN_BYTES", 40)
        patch.setattr(receiver_module, "LEAST_RUN_RECORDS", 2)
        patch.setattr(receiver_module, "ONE_BY_ONE_RECORDS", 3)
        yield


STREAMS = st.lists(st.tuples(st.sampled_from(["plain", "committed", "aborted"]), ROWS, SUBXIDS, BETWEEN), max_size=6)


@settings(deadline=None)
@given(STREAMS, st.booleans(), st.none() | st.integers(0, 60), st.data())
@example([("plain", [(b"I", 1, b"")] * 9, [0] * 12, "nothing")] * 3, True, None, None)
@example([("committed", [(b"I", 1, b"value")] * 9, [0] * 12, "nothing")] * 3, True, None, None)
def test_runs_change_nothing(drawn: list[Any], is_whole: bool, end: int | None, data: st.DataObject | None) -> None:
    server = make_stream(drawn, is_whole=is_whole)
    stream = b"".join(server.wire)
    end_lsn = None if end is None else Server().lsn + 8 * end
    cuts = [] if data is None else sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12), "cuts"))
    wanted = received(stream, [], end_lsn, is_whole=is_whole, by_runs=False)
    assert received(stream, cuts, end_lsn, is_whole=is_whole, by_runs=True) == wanted


@settings(deadline=None)
@given(
    STREAMS.filter(bool),
    st.booleans(),
    st.integers(0, 200),
    st.sampled_from(
        [
            wal_data(0x1_0000_0100, b"X" * 30),
            wal_data(0x1_0000_0100, b"C" + bytes(3)),
            wal_data(0x1_0000_0100, b""),
            message(b"d", b"w" + bytes(7)),
            message(b"d", b"x" + bytes(40)),
            b"w" + bytes(60),
            b"d\0\0\0\1" + bytes(60),
        ]
    ),
)
def test_an_error_comes_after_the_same_records(drawn: list[Any], is_whole: bool, place: int, broken: bytes) -> None:
    server = make_stream(drawn, is_whole=is_whole)
    place %= len(server.wire)
    stream = b"".join([*server.wire[:place], broken, *server.wire[place:]])
    wanted = received(stream, [], None, is_whole=is_whole, by_runs=False)
    assert wanted.error
    found = received(stream, [], None, is_whole=is_whole, by_runs=True)
    # Ends in a chunk before that of the error count.
    whole = received(b"".join(server.wire[:place]), [], None, is_whole=is_whole, by_runs=False)
    assert found.ends == whole.ends[: len(found.ends)]
    # The records before an error are not all counted.
    assert replace(found, records=wanted.records, ends=wanted.ends) == wanted


def test_runs_are_taken_once_numpy_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    turn_s = sys.getswitchinterval()
    receiver: Any = SimpleNamespace(_run_class=None)
    receiver._import_runs = functools.partial(Receiver._import_runs, receiver)
    Receiver._load(receiver).join(DEADLINE_S)
    assert receiver._run_class is Run
    assert os.environ["OPENBLAS_NUM_THREADS"] == "1"
    assert sys.getswitchinterval() == turn_s


def test_what_it_remembers_of_lengths_is_bounded() -> None:
    most = receiver_module.LONG_RECORD_BYTES
    layouts, suffixes = receiver_module._Layouts(0), receiver_module._BlockSuffixes()
    lengths = [*range(25, 200), *range(most, most + 200), *range(1 << 20, (1 << 20) + 5000)]
    for length in lengths:
        assert layouts[length][1] == b" %d\n" % (length - 25)
        assert suffixes[length] == b" %d\n" % (length - 29)
    remembered = {length for length in lengths if length - 25 <= most}
    assert layouts.keys() == suffixes.keys() == remembered


class WritesAtCommit:
    """An output plugin that writes a whole transaction at its commit."""

    def __init__(self, write: Callable[[int, bytes], None], records: int) -> None:
        self._write = write
        self._records = records

    def feed(self, wal_start: int, data: bytes) -> None:
        if data[:1] == b"C":
            for number in range(self._records):
                self._write(wal_start, b"%08d" % number * 1250)

    def close(self) -> None:
        pass


def test_what_an_output_plugin_writes_at_once_is_handed_on_in_parts() -> None:
    """The consumer is waited for in between, and only the last part ends the transaction."""
    server = Server()
    server.transaction([])
    messages = [data[5:] for data in server.wire]
    walsender: Any = SimpleNamespace(
        direct=None,
        receive=lambda _: (len(messages[0]), messages.pop(0)) if messages else (0, b""),
        consume_input=lambda: None,
        notices=[],
    )
    progress = Progress(0.0)
    tracker = tracker_for("pgoutput", {}, progress, None)
    queued: list[tuple[int, list[int]]] = []
    taken: list[tuple[int, list[int]]] = []

    def make_room() -> None:
        assert len(queued) == 1
        taken.append(queued.pop())

    receiver = Receiver(
        walsender,
        progress,
        tracker,
        OPTIONS,
        lambda chunk, ends, _: queued.append((len(chunk), ends)),
        make_room,
        make_feeder=lambda write: WritesAtCommit(write, 1000),
        transactions=None,
    )
    receiver.receive()
    taken += queued
    assert max(size for size, _ in taken) < 1.1 * receiver_module.RENDERED_BYTES
    assert sum(size for size, _ in taken) > 10_000_000
    assert [ends for _, ends in taken[:-1]] == [[]] * (len(taken) - 1)
    assert taken[-1][1] == [server.lsn]
