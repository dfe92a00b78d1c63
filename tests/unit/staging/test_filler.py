"""Which part of a stream goes to which segment."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdcpipe.errors import ProtocolError
from cdcpipe.pipe.framing import scan_records
from spark_sink.staging import writer as staging_writer
from spark_sink.staging.filler import Cut, Discard, Idle, Operation, SealPolicy, SegmentFiller, Write
from spark_sink.staging.writer import Boundaries, StagingWriter
from support.pgoutput_stream import (
    Message,
    Transaction,
    begin,
    commit,
    decode_segment,
    encode_stream,
    insert,
    message,
    record,
    relation,
    truncate,
    type_record,
)
from support.staged import BIG, SOURCE, Drawn, build, landed, seal_all


class Memory:
    """Carries out a filler's operations in memory, and checks the filler's figures about them."""

    def __init__(self, start_lsn: int = 0) -> None:
        self.start_lsn = start_lsn
        self.segments: list[tuple[Cut, bytes]] = []
        self.open = b""
        self.boundaries = Boundaries()

    def apply(self, operations: list[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, Write):
                self.boundaries.add(operation, len(self.open))
                self.open += operation.data
            elif isinstance(operation, Cut):
                starts, ends, end_pos = scan_records(self.open)
                assert end_pos == len(self.open) == operation.size
                assert [list(array) for array in self.boundaries.arrays()] == [starts, ends]
                assert operation.records == len(starts)
                assert operation.start_lsn == self.start_lsn
                self.segments.append((operation, self.open))
                self.start_lsn = operation.end_lsn
                self.open, self.boundaries = b"", Boundaries()
            else:
                self.open, self.boundaries = b"", Boundaries()

    def transactions(self) -> list[Transaction | Message]:
        """Decode each segment by itself."""
        found = []
        for cut, data in self.segments:
            decoded = decode_segment(data)
            assert sum(isinstance(each, Transaction) for each in decoded) == cut.transactions
            assert all(cut.start_lsn < transaction.end_lsn <= cut.end_lsn for transaction in decoded)
            assert decoded[-1].end_lsn == cut.end_lsn
            found += decoded
        return found


TRANSACTIONS = st.lists(
    st.tuples(
        st.integers(1, 50),
        st.one_of(
            st.lists(st.tuples(st.sampled_from([0, *range(16384, 16390)]), st.binary(max_size=40)), max_size=6),
            st.binary(max_size=40),
        ),
    ),
    max_size=12,
)
"""Bytes are a message outside of transactions."""


@given(
    drawn=TRANSACTIONS,
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    segment_bytes=st.sampled_from([1, 100, 300, 1 << 20]),
    held_bytes=st.sampled_from([0, 50, 1 << 20]),
    times=st.lists(st.floats(0, 2), min_size=1, max_size=10),
)
def test_any_stream_in_any_pieces(
    drawn: Drawn,
    sizes: list[int],
    segment_bytes: int,
    held_bytes: int,
    times: list[float],
):
    transactions = build(drawn)
    stream = encode_stream(transactions)
    policy = SealPolicy(segment_bytes=segment_bytes, seal_interval_s=1.0, held_bytes=held_bytes)
    filler, memory, pos, turn, now = SegmentFiller(0x100, policy), Memory(0x100), 0, 0, 0.0
    while pos < len(stream):
        size = sizes[turn % len(sizes)]
        now += times[turn % len(times)]
        turn += 1
        memory.apply(filler.feed(stream[pos : pos + size], now))
        if filler.deadline is not None:
            assert filler.deadline > now
        memory.apply(filler.tick(now))
        pos += size
    memory.apply(filler.finish())
    assert memory.open == b""
    assert memory.transactions() == transactions


@given(drawn=TRANSACTIONS, cut=st.integers(0, 2000), held_bytes=st.sampled_from([0, 50, 1 << 20]))
def test_a_stream_that_breaks_anywhere_goes_on_in_the_next(drawn: Drawn, cut: int, held_bytes: int):
    transactions = build(drawn)
    stream = encode_stream(transactions)
    filler, memory = SegmentFiller(0x100, SealPolicy(1 << 30, 1e9, held_bytes)), Memory(0x100)
    memory.apply(filler.feed(stream[:cut], 0))
    memory.apply(filler.finish())
    assert memory.open == b""
    rest = [transaction for transaction in transactions if transaction.end_lsn > filler.end_lsn]
    memory.apply(filler.feed(encode_stream(rest), 0))
    memory.apply(filler.finish())
    assert memory.transactions() == transactions


def test_torn_at_every_byte_of_the_last_three_transactions():
    drawn: Drawn = [(5, [(16384, b"a"), (0, b"b\nw 0/0 5\n")]), (5, [(16385, b"")]), (5, b"C"), (5, []), (9, [(16386, b"c")])]
    transactions = build(drawn)
    first, stream = encode_stream(transactions[:1]), encode_stream(transactions)
    ends = [len(encode_stream(transactions[: n + 1])) for n in range(5)]
    for cut in range(len(first), len(stream) + 1):
        filler, memory = SegmentFiller(0x100, BIG), Memory(0x100)
        memory.apply(filler.feed(stream[:cut], 0))
        memory.apply(filler.finish())
        assert memory.transactions() == transactions[: sum(end <= cut for end in ends)]


def test_a_segment_is_cut_by_size_and_by_age():
    policy = SealPolicy(segment_bytes=200, seal_interval_s=1.0)
    filler = SegmentFiller(0, policy)
    assert filler.deadline is None
    assert not any(isinstance(operation, Cut) for operation in filler.feed(encode_stream([Transaction(0x20, ())]), 10.0))
    assert filler.deadline == 11.0
    assert filler.tick(10.999) == []
    assert [cut.end_lsn for cut in filler.tick(11.0) if isinstance(cut, Cut)] == [0x20]
    assert filler.deadline is None
    assert filler.tick(99.0) == []
    operations = filler.feed(encode_stream([Transaction(0x30, [(16384, bytes(200))])]), 12.0)
    assert [(cut.start_lsn, cut.end_lsn) for cut in operations if isinstance(cut, Cut)] == [(0x20, 0x30)]


def test_changes_from_before_the_stream_wait_longer_for_their_seal():
    """They are old, and fewer segments cost less. The size counts for them, too."""
    filler = SegmentFiller(0, SealPolicy(segment_bytes=200, seal_interval_s=0.5, backlog_interval_s=3.0), backlog_lsn=0x40)
    filler.feed(encode_stream([Transaction(0x20, ())]), 10.0)
    assert filler.deadline == 13.0
    assert filler.tick(12.999) == []
    assert [cut.end_lsn for cut in filler.tick(13.0) if isinstance(cut, Cut)] == [0x20]
    operations = filler.feed(encode_stream([Transaction(0x30, [(16384, bytes(200))])]), 14.0)
    assert [cut.end_lsn for cut in operations if isinstance(cut, Cut)] == [0x30]
    filler.feed(encode_stream([Transaction(0x38, ())]), 15.0)
    assert filler.deadline == 18.0
    filler.feed(encode_stream([Transaction(0x40, ())]), 15.1)
    assert filler.deadline == 15.5
    assert SealPolicy(seal_interval_s=9.0).deadline(1.0, is_backlog=True) == 10.0


def test_a_large_transaction_goes_to_disk_as_it_comes_in_a_segment_of_its_own():
    small, large = Transaction(0x20, [(16384, b"x")]), Transaction(0x90, [(16384, bytes(100))] * 50)
    stream = encode_stream([small, large])
    filler, memory = SegmentFiller(0, SealPolicy(1 << 30, 1e9, held_bytes=1000)), Memory()
    held = 0
    for pos in range(0, len(stream) - 10, 10):
        memory.apply(filler.feed(stream[pos : pos + 10], 0))
        held = max(held, pos + 10 - len(memory.open) - sum(len(data) for _, data in memory.segments))
    assert held < 1200
    assert [cut.end_lsn for cut, _ in memory.segments] == [0x20]  # nobody waits for the large one
    assert len(memory.open) > 4000
    broken = filler.finish()
    assert broken == [Discard()]
    memory.apply(broken)
    memory.apply(filler.feed(encode_stream([large, Transaction(0xA0, [(16384, b"y")])]), 0))
    memory.apply(filler.finish())
    assert [transaction.end_lsn for transaction in memory.transactions()] == [0x20, 0x90, 0xA0]


def test_a_row_larger_than_memory_is_passed_on_in_parts():
    transactions = [Transaction(0x20, ((16384, b"x"),)), Transaction(0x30, ((16384, bytes(5 << 20)), (16385, b"z")))]
    stream = encode_stream(transactions)
    filler, memory = SegmentFiller(0, SealPolicy(1 << 30, 1e9, held_bytes=1 << 20)), Memory()
    largest = 0
    for pos in range(0, len(stream), 100_000):
        operations = filler.feed(stream[pos : pos + 100_000], 0)
        largest = max([largest, *(len(operation.data) for operation in operations if isinstance(operation, Write))])
        memory.apply(operations)
    memory.apply(filler.finish())
    assert largest < 2 << 20
    assert memory.transactions() == transactions


@pytest.mark.parametrize("piece_bytes", [10_000, 100_000, 1 << 20])
def test_messages_larger_than_memory_are_passed_on_in_parts(piece_bytes: int):
    """Inside a transaction and outside, one right after the other."""
    large = bytes(3 << 20)
    transactions = [Message(0x10, large), Message(0x20, large), Transaction(0x30, ((0, large), (0, b"x"))), Message(0x40, large)]
    stream = encode_stream(transactions)
    filler, memory = SegmentFiller(0, SealPolicy(1 << 30, 1e9, held_bytes=1 << 20)), Memory()
    largest = 0
    for pos in range(0, len(stream), piece_bytes):
        operations = filler.feed(stream[pos : pos + piece_bytes], 0)
        largest = max([largest, *(len(operation.data) for operation in operations if isinstance(operation, Write))])
        memory.apply(operations)
    assert filler.is_whole
    memory.apply(filler.finish())
    assert largest < 3 << 20
    assert memory.transactions() == transactions


def test_messages_alone_are_cut_by_size_and_by_age():
    filler, memory = SegmentFiller(0, SealPolicy(segment_bytes=1000, seal_interval_s=1.0)), Memory()
    memory.apply(filler.feed(message(0x10, b"first"), 0.0))
    assert (filler.is_whole, filler.deadline, memory.segments) == (True, 1.0, [])
    memory.apply(filler.tick(1.0))
    assert [cut.end_lsn for cut, _ in memory.segments] == [0x10]
    sent = [Message(0x10 + lsn, b"y" * 20) for lsn in range(1, 1000)]
    for each in sent:
        memory.apply(filler.feed(each.encode(set()), 1.0))
        assert len(memory.open) < 1000
    memory.apply(filler.finish())
    assert memory.transactions() == [Message(0x10, b"first"), *sent]
    assert len(memory.segments) > 10


def test_a_message_that_is_half_there_is_forgotten():
    filler, memory = SegmentFiller(0, SealPolicy(1 << 30, 1e9, held_bytes=1 << 20)), Memory()
    stream = encode_stream([Message(0x10, b"x"), Message(0x20, bytes(5 << 20))])
    memory.apply(filler.feed(stream[: 4 << 20], 0))
    assert not filler.is_whole
    assert memory.open
    memory.apply(filler.finish())
    assert (memory.open, memory.transactions(), filler.end_lsn) == (b"", [Message(0x10, b"x")], 0x10)


def repeated(description: bytes) -> bytes:
    """Return a description as the launcher repeats it in a segment in which the server has not sent it."""
    return description.replace(b"w 0/0 ", b"w 0/1 ")


def test_the_next_segment_gets_the_newest_description_with_its_types():
    t1, y1, t2 = relation(16384, type_id=100_000), type_record(100_000, b"old"), relation(16384, type_id=100_000)
    y2 = type_record(100_000, b"new")
    stream = begin(0x1F, 1) + y1 + t1 + insert(16384, b"1") + y2 + t2 + insert(16384, b"2") + commit(0x1F, 0x20)
    filler, memory = SegmentFiller(0, SealPolicy(1, 1.0)), Memory()
    memory.apply(filler.feed(stream, 0))
    memory.apply(filler.feed(begin(0x2F, 2) + insert(16384, b"3") + commit(0x2F, 0x30), 0))
    assert memory.segments[0][1] == stream
    assert memory.segments[1][1] == begin(0x2F, 2) + y2 + repeated(t2) + insert(16384, b"3") + commit(0x2F, 0x30)


def test_truncate_needs_its_relations_described_too():
    first = begin(0x1F, 1) + relation(16384) + relation(16386) + truncate(16384, 16386) + commit(0x1F, 0x20)
    filler, memory = SegmentFiller(0, SealPolicy(1, 1.0)), Memory()
    memory.apply(filler.feed(first, 0))
    memory.apply(filler.feed(begin(0x2F, 2) + truncate(16386, 16384) + insert(16384, b"x") + commit(0x2F, 0x30), 0))
    expected = begin(0x2F, 2) + repeated(relation(16386)) + repeated(relation(16384)) + truncate(16386, 16384)
    assert memory.segments[1][1] == expected + insert(16384, b"x") + commit(0x2F, 0x30)
    memory.transactions()


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (b"x", "header"),
        (b"w 0/0 x\n", "header"),
        (begin(0x1FF, 1) + record(b""), "empty record amid a transaction"),
        (record(b"") + commit(1, 0x200), "broken transactions"),
        (record(b"S\x00\x00\x00\x01\x01"), "kind b'S'"),
        (record(b"Z"), "kind b'Z'"),
        (begin(0x1FF, 1) + begin(0x1FF, 1), "broken transactions"),
        (insert(16384, b"SECRET"), "broken transactions"),
        (record(b"I" + bytes(5 << 20))[: 2 << 20], "broken transactions"),
        (message(0x200, b"SECRET", flags=1), "outside of a transaction"),
        (message(0x200, b"SECRET" + bytes(5 << 20), flags=1)[: 2 << 20], "outside of a transaction"),
        (message(0x100, b"SECRET"), "message that ends at 0/100 after the stream had passed 0/100"),
        (message(0x200, b"") + message(0x200, b""), "message that ends at 0/200 after the stream had passed 0/200"),
        (record(b"M\0"), "Message record of 2 bytes"),
        (commit(0x1FF, 0x200), "broken transactions"),
        (begin(0x1FF, 1) + insert(16384, b"SECRET") + commit(0x1FF, 0x200), "did not describe"),
        (begin(0x1FF, 1) + truncate(16384) + commit(0x1FF, 0x200), "did not describe"),
        (begin(0x1FF, 1) + record(b"C123"), "Commit record of 4 bytes"),
        (encode_stream([Transaction(0x100, ())]), "after the stream had passed 0/100"),
        (encode_stream([Transaction(0x200, ()), Transaction(0x200, ())]), "after the stream had passed 0/200"),
    ],
)
def test_streams_without_whole_transactions_are_refused(stream: bytes, words: str):
    filler = SegmentFiller(0x100, BIG)
    with pytest.raises(ProtocolError, match=words) as caught:
        filler.feed(stream, 0)
    assert "SECRET" not in str(caught.value)


@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_garbage_is_a_protocol_error_or_waits_for_more(garbage: bytes, pos: int):
    stream = bytearray(encode_stream([Transaction(0x200, [(16384, b"abc"), (16385, b"")])]))
    stream[pos:pos] = garbage
    filler = SegmentFiller(0x100, SealPolicy(1, 0.0, 0))
    try:
        filler.feed(bytes(stream), 0)
        filler.finish()
    except ProtocolError:
        return


def test_boundaries_of_too_many_records_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(staging_writer, "_MAX_KNOWN_BOUNDARIES", 3)
    boundaries = Boundaries()
    starts, ends = np.array([10, 20]), np.array([11, 21])
    boundaries.add(Write(b"x" * 30, starts, ends, 9), 100)
    assert [list(array) for array in boundaries.arrays()] == [[101, 111], [102, 112]]
    boundaries.add(Write(b"x" * 30, starts, ends, 0), 130)
    assert not boundaries.is_complete
    assert boundaries.parts == []


@pytest.mark.parametrize("piece", [1, 7, 1 << 16])
def test_empty_records_are_idle_positions_and_no_part_of_a_segment(piece: int):
    first, second = encode_stream([Transaction(0x200, ((16384, b"a"),))]), encode_stream([Transaction(0x400, ((16384, b"b"),))])
    stream = b"w 0/150 0\n" + first + b"w 0/300 0\nw 0/310 0\n" + second + b"w 0/500 0\n"
    filler, operations = SegmentFiller(0x100, BIG), []
    for pos in range(0, len(stream), piece):
        operations += filler.feed(stream[pos : pos + piece], 0.0)
    assert [each.lsn for each in operations if isinstance(each, Idle)] == [0x150, 0x300, 0x310, 0x500]
    written = b"".join(each.data for each in operations if isinstance(each, Write))
    assert decode_segment(written) == [Transaction(0x200, ((16384, b"a"),)), Transaction(0x400, ((16384, b"b"),))]
    assert filler.is_whole
    [cut] = filler.finish()
    assert isinstance(cut, Cut)
    assert (cut.start_lsn, cut.end_lsn) == (0x100, 0x400)


def test_a_new_stream_describes_its_relations_anew():
    filler = SegmentFiller(0, BIG)
    filler.feed(encode_stream([Transaction(0x20, ((16384, b"x"),))]), 0)
    filler.finish()
    with pytest.raises(ProtocolError, match="did not describe"):
        filler.feed(begin(0x2F, 2) + insert(16384, b"y") + commit(0x2F, 0x30), 0)


def test_a_discarded_segment_is_begun_again(tmp_path: Path):
    large = Transaction(0x300, ((16384, bytes(3 << 20)),))
    with StagingWriter(tmp_path, slot="s") as writer:
        filler = SegmentFiller(writer.begin_epoch(SOURCE).start_lsn, SealPolicy(1 << 30, 1e9, 0))
        stream = encode_stream([large])
        seal_all(writer, filler.feed(stream[:-10], 0))
        assert [path.stat().st_size > 1 << 20 for path in tmp_path.glob("*/*.open")] == [True]
        seal_all(writer, filler.finish())
        assert not list(tmp_path.glob("*/*.open"))
        assert (writer.open_size, writer.end_lsn) == (0, 0x100)
        seal_all(writer, filler.feed(stream, 0) + filler.finish())
    assert landed(tmp_path) == [large]
