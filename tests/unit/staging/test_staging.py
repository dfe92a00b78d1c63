"""The staging log: its layout and its readers, what goes to which segment, and crashes and errors at every step of the writer."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdcpipe.errors import ProtocolError
from cdcpipe.pipe.framing import scan_records
from spark_sink.files.local import DamagedFileError
from spark_sink.staging import writer as staging_writer
from spark_sink.staging.filler import Cut, Discard, Operation, SealPolicy, SegmentFiller, Write
from spark_sink.staging.lock import lock_owner
from spark_sink.staging.log import Position, StagingError, list_epochs, list_segments, log_end
from spark_sink.staging.readers import Retention, read_readers, register_reader, remove_consumed, unregister_reader
from spark_sink.staging.writer import Boundaries, Failpoint, Sealing, StagingWriter
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
from support.segments import describe_epoch

BIG = SealPolicy(segment_bytes=1 << 30, seal_interval_s=1e9)


# --- positions and layout ---


@pytest.mark.parametrize(
    ("text", "position"),
    [("1:0/171F388", (1, 0x171F388)), ("0:0/0", (0, 0)), ("12:FFFFFFFF/FFFFFFFF", (12, 2**64 - 1)), ("7:a/0b", (7, 0xA0000000B))],
)
def test_position_text(text: str, position: tuple[int, int]):
    assert Position.parse(text) == position
    assert type(Position.parse(text).lsn) is int  # no LSN: Spark takes that for a text
    assert Position.parse(str(Position(*position))) == position


@pytest.mark.parametrize("text", ["", "1", "1:", "1:0", ":0/0", "-1:0/0", "1:0/0 ", "1:0/0\n", "1:123456789/0", "\uff11:0/0"])
def test_position_text_that_is_none(text: str):
    with pytest.raises(ValueError, match="not a position"):
        Position.parse(text)


def make_epoch(root: Path, number: int, start_lsn: int, *segments: tuple[int, int], **fields: object) -> Path:
    directory = root / f"{number:06d}"
    directory.mkdir(parents=True)
    (directory / "epoch.json").write_text(describe_epoch(start_lsn, **{"system_id": "7"} | fields))
    for start, end in segments:
        (directory / f"{start:016X}-{end:016X}.cdc").write_bytes(commit(end - 1, end))
    return directory


def ranges(root: Path, after: Position | None = None) -> list[tuple[int, int, int]]:
    return [(segment.epoch, segment.start_lsn, segment.end_lsn) for segment in list_segments(root, after)]


def test_the_log_is_a_chain_over_epochs(tmp_path: Path):
    assert list_epochs(tmp_path) == []
    assert list_segments(tmp_path) == []
    assert log_end(tmp_path) is None
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300))
    make_epoch(tmp_path, 2, 0x300)
    make_epoch(tmp_path, 4, 0x300, (0x300, 0x400))
    (tmp_path / "000005").mkdir()  # its launcher ended before it had described it
    assert ranges(tmp_path) == [(1, 0x100, 0x200), (1, 0x200, 0x300), (4, 0x300, 0x400)]
    assert log_end(tmp_path) == (4, 0x400)
    assert [epoch.number for epoch in list_epochs(tmp_path)] == [1, 2, 4]
    assert list_epochs(tmp_path)[0].publications == ("p",)
    segment = list_segments(tmp_path)[0]
    assert (segment.start, segment.end) == ((1, 0x100), (1, 0x200))
    assert segment.index_path.name == "0000000000000100-0000000000000200.idx"


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (None, [0x200, 0x300, 0x400]),
        (Position(0, 0), [0x200, 0x300, 0x400]),
        (Position(1, 0x100), [0x200, 0x300, 0x400]),
        (Position(1, 0x150), [0x200, 0x300, 0x400]),
        (Position(1, 0x200), [0x300, 0x400]),
        (Position(1, 0x300), [0x400]),
        (Position(2, 0x300), [0x400]),
        (Position(2, 0x400), []),
    ],
)
def test_segments_after_a_position(tmp_path: Path, after: Position | None, expected: list[int]):
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300))
    make_epoch(tmp_path, 2, 0x300, (0x300, 0x400))
    assert [end for _, _, end in ranges(tmp_path, after)] == expected


@pytest.mark.parametrize(
    "after",
    [Position(1, 0xFF), Position(1, 0x301), Position(2, 0x401), Position(3, 0x400)],
    ids=["before the beginning", "beyond the fence", "beyond the end", "in an epoch to come"],
)
def test_a_position_of_another_log(tmp_path: Path, after: Position):
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300))
    make_epoch(tmp_path, 2, 0x300, (0x300, 0x400))
    with pytest.raises(StagingError, match="not"):
        list_segments(tmp_path, after)


def test_a_position_in_a_log_that_has_not_begun(tmp_path: Path):
    with pytest.raises(StagingError, match="which is empty"):
        list_segments(tmp_path, Position(1, 0x100))


def test_what_a_replaced_launcher_sealed_is_not_in_the_log(tmp_path: Path):
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x280), (0x280, 0x500))
    make_epoch(tmp_path, 2, 0x200, (0x200, 0x300))
    assert ranges(tmp_path) == [(1, 0x100, 0x200), (2, 0x200, 0x300)]
    with pytest.raises(StagingError, match="not in this log"):
        list_segments(tmp_path, Position(1, 0x280))


def _without_first(root: Path) -> None:
    next(root.glob("000001/*100-*.cdc")).unlink()


def _without_middle(root: Path) -> None:
    next(root.glob("000001/*200-*.cdc")).unlink()


def _without_last_of_epoch(root: Path) -> None:
    next(root.glob("000001/*300-*.cdc")).unlink()


def _overlap(root: Path) -> None:
    (root / "000001" / "0000000000000180-0000000000000200.cdc").write_bytes(b"")


def _over_the_fence(root: Path) -> None:
    next(root.glob("000001/*300-*.cdc")).rename(root / "000001" / "0000000000000300-0000000000000401.cdc")


def _bad_name(root: Path) -> None:
    (root / "000001" / "copy of 1.cdc").write_bytes(b"")


def _backward_name(root: Path) -> None:
    (root / "000001" / "0000000000000300-0000000000000300.cdc").write_bytes(b"")


def _no_description(root: Path) -> None:
    (root / "000001" / "epoch.json").unlink()


def _description(text: str) -> Callable[[Path], None]:
    return lambda root: (root / "000001" / "epoch.json").write_text(text) and None


def _changed(**fields: object) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = root / "000001" / "epoch.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_without_first, "missing"),
        (_without_middle, "missing"),
        (_without_last_of_epoch, "missing"),
        (_overlap, "overlaps"),
        (_over_the_fence, "overlaps"),
        (_bad_name, "not a segment's name"),
        (_backward_name, "not a segment's name"),
        (_no_description, "no epoch.json"),
        (_description("{"), "not JSON"),
        (_description("[]"), "not a JSON object"),
        (_description("\x80\x04K\x01."), "not JSON"),  # a pickle
        (_description("[" * 100_000), "not JSON"),
        (_changed(format=2), "format 2"),
        (_changed(start_lsn="x"), "not an LSN"),
        (_changed(start_lsn=7), "start_lsn"),
        (_changed(timeline="1"), "timeline"),
        (_changed(timeline=True), "timeline"),
        (_changed(publications="p"), "publications"),
        (_changed(slot="another"), "differ"),
        (_changed(system_id="8"), "differ"),
        (_changed(timeline=2), "differ"),
        (_changed(database="another"), "differ"),
        (_changed(start_lsn="0/500"), "before epoch"),
    ],
)
def test_damage_is_reported(tmp_path: Path, damage: Callable[[Path], None], words: str):
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300), (0x300, 0x400))
    make_epoch(tmp_path, 2, 0x400, (0x400, 0x500))
    damage(tmp_path)
    with pytest.raises(StagingError if "JSON" not in words else DamagedFileError, match=words):
        list_segments(tmp_path)


def test_not_a_staging_directory(tmp_path: Path):
    with pytest.raises(StagingError, match="no such directory"):
        list_segments(tmp_path / "nowhere")


def test_what_is_not_sealed_is_not_in_the_log(tmp_path: Path):
    directory = make_epoch(tmp_path, 1, 0x100, (0x100, 0x200))
    for name in ("0000000000000200.open", "0000000000000100-0000000000000200.idx", ".tmp-x", "notes.txt"):
        (directory / name).write_bytes(b"x")
    assert ranges(tmp_path) == [(1, 0x100, 0x200)]


# --- readers, and removal ---


def test_segments_go_once_all_readers_are_past_them(tmp_path: Path):
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300))
    make_epoch(tmp_path, 2, 0x300, (0x300, 0x400), (0x400, 0x500))
    list_segments(tmp_path)[0].index_path.write_bytes(b"x")
    assert remove_consumed(tmp_path) == []

    register_reader(tmp_path, "fast", Position(2, 0x500))
    register_reader(tmp_path, "slow", Position(1, 0x250))
    assert read_readers(tmp_path) == {"fast": (2, 0x500), "slow": (1, 0x250)}
    assert [segment.end_lsn for segment in remove_consumed(tmp_path)] == [0x200]
    assert ranges(tmp_path) == [(1, 0x200, 0x300), (2, 0x300, 0x400), (2, 0x400, 0x500)]
    assert not list(tmp_path.glob("*/*.idx"))
    assert len(list_segments(tmp_path, Position(1, 0x250))) == 3
    with pytest.raises(StagingError, match="do not exist any more"):
        list_segments(tmp_path, Position(1, 0x150))

    unregister_reader(tmp_path, "slow")
    assert [segment.end_lsn for segment in remove_consumed(tmp_path)] == [0x300, 0x400]
    assert ranges(tmp_path) == [(2, 0x400, 0x500)]  # the last one stays: the log's end stays known
    assert not (tmp_path / "000001").exists()
    assert log_end(tmp_path) == (2, 0x500)
    assert remove_consumed(tmp_path) == []


def test_segments_are_kept_for_a_time_or_up_to_a_size(tmp_path: Path):
    make_epoch(tmp_path, 1, 0x100, *((start, start + 0x100) for start in range(0x100, 0x700, 0x100)))
    segments = list_segments(tmp_path)
    register_reader(tmp_path, "r", segments[-1].end)
    now = time.time()
    for hours, segment in zip((9, 7, 5, 3, 1, 0), segments, strict=True):
        segment.path.write_bytes(b"x" * 10)
        os.utime(segment.path, (now - 3600 * hours, now - 3600 * hours))

    def removed(retention: Retention) -> list[int]:
        return [segment.end_lsn for segment in remove_consumed(tmp_path, retention)]

    assert removed(Retention(seconds=10 * 3600)) == []
    assert removed(Retention(seconds=6 * 3600)) == [0x200, 0x300]
    assert removed(Retention(size=30)) == []
    assert removed(Retention(size=29)) == [0x400]
    assert removed(Retention(seconds=4 * 3600, size=10)) == []
    assert removed(Retention()) == [0x500, 0x600]


def test_a_removal_that_was_cut_short_is_no_gap(tmp_path: Path):
    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300), (0x300, 0x400))
    (tmp_path / "removed.json").write_text('{"position": "1:0/300"}')
    next(tmp_path.glob("000001/*200-*.cdc")).unlink()  # and the one before it is still there
    assert ranges(tmp_path) == [(1, 0x300, 0x400)]
    register_reader(tmp_path, "r", Position(1, 0x300))
    assert remove_consumed(tmp_path) == []
    assert len(list(tmp_path.glob("000001/*.cdc"))) == 1


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 101, "a b", "é"])
def test_names_of_readers(tmp_path: Path, name: str):
    with pytest.raises(StagingError, match="not a reader's name"):
        register_reader(tmp_path, name, Position(1, 1))


def test_a_damaged_reader_is_reported(tmp_path: Path):
    register_reader(tmp_path, "r", Position(1, 1))
    (tmp_path / "readers" / "r.json").write_text('{"position": "x"}')
    with pytest.raises(StagingError, match="damaged"):
        read_readers(tmp_path)


# --- what goes to which segment ---


class Memory:
    """Carries out a filler's operations in memory, and checks what it says about them."""

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
        """Decode each segment alone."""
        found = []
        for cut, data in self.segments:
            decoded = decode_segment(data)
            assert sum(isinstance(each, Transaction) for each in decoded) == cut.transactions
            assert all(cut.start_lsn < transaction.end_lsn <= cut.end_lsn for transaction in decoded)
            assert decoded[-1].end_lsn == cut.end_lsn
            found += decoded
        return found


Drawn = list[tuple[int, list[tuple[int, bytes]] | bytes]]

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


def build(drawn: Drawn, start_lsn: int = 0x100) -> list[Transaction | Message]:
    transactions: list[Transaction | Message] = []
    end_lsn = start_lsn
    for distance, content in drawn:
        end_lsn += distance + 1
        is_message = isinstance(content, bytes)
        transactions.append(Message(end_lsn, content) if is_message else Transaction(end_lsn, tuple(content)))
    return transactions


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
    """Return a description as the launcher puts it into a segment in which the server has not sent it."""
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
        (record(b""), "empty"),
        (record(b"") + commit(1, 0x200), "kind|empty"),
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
def test_what_is_no_stream_of_whole_transactions(stream: bytes, words: str):
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


# --- the writer ---

SOURCE = {"system_id": "7", "timeline": 1, "database": "db", "slot": "s", "publications": ("p",), "options": {}}


class Crash(BaseException):
    """The process dies here."""


class Server:
    """What a server does with a slot: sends what committed after the confirmed position, forgets nothing before it is confirmed."""

    def __init__(self, transactions: list[Transaction]) -> None:
        self.transactions = transactions
        self.confirmed_lsn = 0x100

    def stream(self, start_lsn: int) -> bytes:
        after = max(start_lsn, self.confirmed_lsn)
        return encode_stream([transaction for transaction in self.transactions if transaction.end_lsn > after])


def abandon(writer: StagingWriter) -> None:
    """What the end of a process does: its descriptors are closed, so its lock is gone."""
    os.close(writer._lock_fd)
    writer._lock_fd = -1


def land(root: Path, server: Server, hook: Callable[[Failpoint], None] | None = None, chunk: int = 100) -> None:
    """Do in one thread what the launcher does in two."""
    writer = StagingWriter(root, slot="s", hook=hook)
    try:
        epoch = writer.begin_epoch(**SOURCE, first_lsn=server.confirmed_lsn)
        filler = SegmentFiller(epoch.start_lsn, SealPolicy(segment_bytes=250, seal_interval_s=1e9, held_bytes=200))

        def apply(operations: list[Operation]) -> None:
            for operation in operations:
                sealing = writer.apply(operation)
                if sealing is not None:
                    segment = writer.seal(sealing)
                    if hook is not None:
                        hook(Failpoint.BEFORE_FEEDBACK)
                    server.confirmed_lsn = segment.end_lsn
                    if hook is not None:
                        hook(Failpoint.AFTER_FEEDBACK)

        stream = server.stream(epoch.start_lsn)
        for pos in range(0, len(stream), chunk):
            apply(filler.feed(stream[pos : pos + chunk], 0))
        apply(filler.finish())
    finally:
        abandon(writer)


def landed(root: Path) -> list[Transaction]:
    return [transaction for segment in list_segments(root) for transaction in decode_segment(segment.path.read_bytes())]


WORK = build([(20, [(16384 + n % 3, b"v%d" % n)] * (1 + n % 4)) for n in range(12)] + [(20, [(16385, bytes(90))] * 8)])


def test_the_writer_lands_everything_once(tmp_path: Path):
    server = Server(WORK)
    land(tmp_path, server)
    assert landed(tmp_path) == WORK
    assert server.confirmed_lsn == WORK[-1].end_lsn == list_segments(tmp_path)[-1].end_lsn
    assert len(list_segments(tmp_path)) > 4
    assert not list(tmp_path.glob("*/*.open"))


class At:
    """A hook that raises at the n-th pass of a failpoint."""

    def __init__(self, failpoint: Failpoint, turn: int, error: BaseException) -> None:
        self.failpoint, self.turn, self.error = failpoint, turn, error
        self.passed = 0

    def __call__(self, failpoint: Failpoint) -> None:
        if failpoint == self.failpoint:
            self.passed += 1
            if self.passed == self.turn:
                raise self.error


@pytest.mark.parametrize("failpoint", Failpoint)
@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_crash_at_any_point_loses_nothing_and_repeats_nothing(tmp_path: Path, failpoint: Failpoint, turn: int):
    server, crashes = Server(WORK), 0
    for attempt in range(40):
        hook = At(failpoint, turn, Crash())
        try:
            land(tmp_path, server, hook if attempt < 8 else None)
        except Crash:
            crashes += 1
            ends = [segment.end_lsn for segment in list_segments(tmp_path)]
            assert server.confirmed_lsn <= max([0x100, *ends])
            assert landed(tmp_path) == WORK[: len(landed(tmp_path))]
        else:
            break
    assert crashes > 0 or (turn > 1 and failpoint.name.startswith("EPOCH"))
    assert landed(tmp_path) == WORK
    assert server.confirmed_lsn <= WORK[-1].end_lsn
    assert not list(tmp_path.glob("*/*.open"))
    assert not list(tmp_path.glob("**/.tmp-*"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize(
    "failpoint",
    [
        Failpoint.BEFORE_WRITE,
        Failpoint.AFTER_WRITE,
        Failpoint.BEFORE_FSYNC,
        Failpoint.AFTER_FSYNC,
        Failpoint.AFTER_RENAME,
        Failpoint.AFTER_DIRECTORY_FSYNC,
        Failpoint.EPOCH_MADE,
    ],
)
def test_an_error_of_the_disk_stops_and_confirms_nothing(tmp_path: Path, failpoint: Failpoint, turn: int, code: int):
    server = Server(WORK)
    if failpoint == Failpoint.EPOCH_MADE:
        turn = 1
    with pytest.raises(StagingError, match=os.strerror(code)) as caught:
        land(tmp_path, server, At(failpoint, turn, OSError(code, os.strerror(code))))
    assert caught.value.hint
    assert server.confirmed_lsn <= max([0x100, *(segment.end_lsn for segment in list_segments(tmp_path))])
    land(tmp_path, server)
    assert landed(tmp_path) == WORK


def seal_all(writer: StagingWriter, operations: list[Operation]) -> None:
    for operation in operations:
        sealing = writer.apply(operation)
        if sealing is not None:
            writer.seal(sealing)


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_the_system_call_itself_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    with StagingWriter(tmp_path, slot="s") as writer:
        epoch = writer.begin_epoch(**SOURCE, first_lsn=0x100)
        filler = SegmentFiller(epoch.start_lsn, BIG)
        operations = filler.feed(encode_stream(WORK[:3]), 0) + filler.finish()
        calls = 0

        def fail(*_: object) -> int:
            nonlocal calls
            calls += 1
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(staging_writer.os, name, fail)
            with pytest.raises(StagingError, match="Input/output error"):
                seal_all(writer, operations)
        assert calls == 1
        # The disk works again, which proves nothing: nothing is tried again.
        with pytest.raises(StagingError, match="an earlier write"):
            writer.seal(Sealing(-1, tmp_path, Cut(0, 1, 1, 1, 1), Boundaries()))
        with pytest.raises(StagingError, match="an earlier write"):
            writer.apply(Write(bytes(2 << 20), np.array([]), np.array([]), 0))
    assert list_segments(tmp_path) == []
    server = Server(WORK)
    land(tmp_path, server)
    assert landed(tmp_path) == WORK


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = os.write
    monkeypatch.setattr(staging_writer.os, "write", lambda fd, data: write(fd, data[:7]))
    land(tmp_path, Server(WORK))
    assert landed(tmp_path) == WORK


# --- one launcher at a time ---


def tree(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}


def test_a_second_launcher_is_refused_and_touches_nothing(tmp_path: Path):
    with StagingWriter(tmp_path, slot="s") as writer:
        writer.begin_epoch(**SOURCE, first_lsn=0x100)
        before = tree(tmp_path)
        assert lock_owner(tmp_path)["pid"] == os.getpid()
        with pytest.raises(StagingError, match=f"another launcher uses .* process {os.getpid()} on"):
            StagingWriter(tmp_path, slot="s")
        assert tree(tmp_path) == before
    assert lock_owner(tmp_path) is None
    with StagingWriter(tmp_path, slot="s"):
        pass


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path):
    program = (
        "import sys, time; from spark_sink.staging.writer import StagingWriter; "
        "StagingWriter(sys.argv[1], slot='s'); print('x', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"x\n"
            assert lock_owner(tmp_path)["pid"] == process.pid
            with pytest.raises(StagingError, match=str(process.pid)):
                StagingWriter(tmp_path, slot="s")
        finally:
            process.send_signal(signal.SIGKILL)
    assert lock_owner(tmp_path) is None
    with StagingWriter(tmp_path, slot="s"):
        assert lock_owner(tmp_path)["pid"] == os.getpid()


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that does not keep locks."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)


def fill(writer: StagingWriter, transactions: list[Transaction]) -> Sealing:
    filler = SegmentFiller(writer.end_lsn, BIG)
    sealing = None
    for operation in filler.feed(encode_stream(transactions), 0) + filler.finish():
        sealing = writer.apply(operation) or sealing
    assert sealing is not None
    return sealing


@pytest.mark.usefixtures("no_locks")
def test_a_replaced_launcher_cannot_seal(tmp_path: Path):
    with StagingWriter(tmp_path, slot="s") as old:
        old.begin_epoch(**SOURCE, first_lsn=0x100)
        old.seal(fill(old, WORK[:2]))
        sealing = fill(old, WORK[2:3])  # and here it is paused
        with StagingWriter(tmp_path, slot="s") as new:
            assert new.begin_epoch(**SOURCE, first_lsn=0x100).start_lsn == WORK[1].end_lsn
            with pytest.raises(StagingError, match="another launcher has taken over"):
                old.seal(sealing)
            new.seal(fill(new, WORK[2:]))
    assert landed(tmp_path) == WORK


@pytest.mark.usefixtures("no_locks")
def test_a_launcher_that_is_replaced_after_its_rename_does_not_confirm(tmp_path: Path):
    made: list[StagingWriter] = []

    def replace(failpoint: Failpoint) -> None:
        if failpoint == Failpoint.AFTER_RENAME and not made:
            made.append(StagingWriter(tmp_path, slot="s"))
            # The segment is there already, so it is in the log, and not sent again.
            assert made[0].begin_epoch(**SOURCE, first_lsn=0x100).start_lsn == WORK[1].end_lsn

    with StagingWriter(tmp_path, slot="s", hook=replace) as old:
        old.begin_epoch(**SOURCE, first_lsn=0x100)
        with pytest.raises(StagingError, match="another launcher has taken over"):
            old.seal(fill(old, WORK[:2]))
    with made[0] as new:
        new.seal(fill(new, WORK[2:]))
    assert landed(tmp_path) == WORK


@pytest.mark.usefixtures("no_locks")
def test_a_launcher_that_is_replaced_right_before_its_rename_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with StagingWriter(tmp_path, slot="s") as old, StagingWriter(tmp_path, slot="s") as new:
        old.begin_epoch(**SOURCE, first_lsn=0x100)
        # Its open file stays this time: the new launcher has cleaned up before it was made.
        assert new.begin_epoch(**SOURCE, first_lsn=0x100).start_lsn == 0x100
        (tmp_path / "000001").mkdir(exist_ok=True)
        passed = iter([True])
        check = StagingWriter._check_fence
        monkeypatch.setattr(StagingWriter, "_check_fence", lambda self: next(passed, False) or check(self))
        with pytest.raises(StagingError, match="another launcher has taken over"):
            old.seal(fill(old, WORK[:2]))
        staging_writer._write_epoch(tmp_path / "000001" / "epoch.json", list_epochs(tmp_path)[-1])
        assert list((tmp_path / "000001").glob("*.cdc"))
        assert list_segments(tmp_path) == []
        monkeypatch.undo()
        new.seal(fill(new, WORK))
    assert landed(tmp_path) == WORK


# --- whose directory it is ---


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"system_id": "8"}, "system id 7; this server has system id 8"),
        ({"timeline": 2}, "timeline 2, .* timeline 1"),
        ({"database": "other"}, "database 'db', not of .* 'other'"),
    ],
)
def test_a_directory_of_another_source_is_refused(tmp_path: Path, change: dict[str, object], words: str):
    server = Server(WORK)
    land(tmp_path, server)
    before = list_epochs(tmp_path)
    with StagingWriter(tmp_path, slot="s") as writer, pytest.raises(StagingError, match=words) as caught:
        writer.begin_epoch(**(SOURCE | change), first_lsn=0x100)
    assert caught.value.hint
    assert list_epochs(tmp_path) == before


def test_a_directory_of_another_slot_is_refused_before_anything_is_asked(tmp_path: Path):
    land(tmp_path, Server(WORK))
    with pytest.raises(StagingError, match="slot 's', not of 't'"):
        StagingWriter(tmp_path, slot="t")
    with StagingWriter(tmp_path, slot="s"):
        pass


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(StagingError, match="this process runs as 4242"):
        StagingWriter(tmp_path, slot="s")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StagingError, match="cannot create"):
        StagingWriter(tmp_path / "file" / "staging", slot="s")


def test_files_are_private_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        land(tmp_path / "a" / "b", Server(WORK))
        register_reader(tmp_path / "a" / "b", "r", Position(1, 0x100))
    finally:
        os.umask(before)
    for path in (tmp_path / "a").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_planted_link_is_not_followed(tmp_path: Path):
    target = tmp_path / "target"
    with StagingWriter(tmp_path / "staging", slot="s") as writer:
        writer.begin_epoch(**SOURCE, first_lsn=0x100)
        (tmp_path / "staging" / "000001" / f"{0x100:016X}.open").symlink_to(target)
        with pytest.raises(StagingError, match="File exists"):
            fill(writer, WORK)
    assert not target.exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "lock").symlink_to(target)
    with pytest.raises(StagingError, match="cannot open"):
        StagingWriter(tmp_path / "other", slot="s")
    assert not target.exists()


@pytest.mark.parametrize(
    ("function", "code"),
    [("fcntl.flock", errno.ENOLCK), ("os.fsync", errno.EINVAL), ("pathlib.Path.rename", errno.ENOTSUP)],
)
def test_a_file_system_without_what_sealing_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int):
    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(function, refuse)
    with pytest.raises(StagingError, match=re.escape(os.strerror(code))) as caught:
        StagingWriter(tmp_path, slot="s")
    assert "POSIX" in (caught.value.hint or "")
    monkeypatch.undo()
    StagingWriter(tmp_path, slot="s").close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


# --- what is found at the start ---


def test_what_earlier_launchers_left_is_cleaned_up(tmp_path: Path):
    server = Server(WORK[:4])
    land(tmp_path, server)
    (tmp_path / "000001" / f"{WORK[3].end_lsn:016X}.open").write_bytes(b"half")
    (tmp_path / "000001" / ".tmp-1").write_bytes(b"half")
    (tmp_path / ".tmp-2").write_bytes(b"half")
    (tmp_path / "000002").mkdir()
    server.transactions = WORK
    land(tmp_path, server)
    assert landed(tmp_path) == WORK
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001", "000003", "lock"]
    assert all(path.suffix in {".cdc", ".json"} for path in (tmp_path / "000001").iterdir())


def test_epochs_in_which_nothing_came_do_not_pile_up(tmp_path: Path):
    server = Server(WORK)
    land(tmp_path, server)
    for _ in range(3):
        land(tmp_path, server)
    assert [epoch.number for epoch in list_epochs(tmp_path)] == [1, 4]
    assert log_end(tmp_path) == (4, WORK[-1].end_lsn)
    assert list_segments(tmp_path, Position(2, WORK[-1].end_lsn)) == []  # a position in an epoch that is gone


ENDS_WITH_A_MESSAGE = [*WORK, Message(WORK[-1].end_lsn + 9, message(WORK[-1].end_lsn + 9, b"one in the other"))]


def test_a_log_that_ends_with_a_message(tmp_path: Path):
    land(tmp_path, Server(ENDS_WITH_A_MESSAGE))
    more = [*ENDS_WITH_A_MESSAGE, Transaction(ENDS_WITH_A_MESSAGE[-1].end_lsn + 8, ((16384, b"x"),))]
    land(tmp_path, Server(more))
    assert [each for segment in list_segments(tmp_path) for each in decode_segment(segment.path.read_bytes())] == more


@pytest.mark.parametrize("work", [WORK, ENDS_WITH_A_MESSAGE], ids=["a transaction", "a message"])
@pytest.mark.parametrize("damage", ["cut", "empty", "grown", "renamed", "other bytes"])
def test_a_damaged_segment_is_found_at_the_start(tmp_path: Path, damage: str, work: list[Transaction | Message]):
    land(tmp_path, Server(work))
    segment = list_segments(tmp_path)[-1]
    data = segment.path.read_bytes()
    if damage == "renamed":
        segment.path.rename(segment.path.with_name(f"{segment.start_lsn:016X}-{segment.end_lsn + 1:016X}.cdc"))
    else:
        segment.path.write_bytes({"cut": data[:-1], "empty": b"", "grown": data + b"\x00", "other bytes": bytes(len(data))}[damage])
    with pytest.raises(StagingError, match=r"is damaged: it does not end with"):
        StagingWriter(tmp_path, slot="s")
    assert lock_owner(tmp_path) is None


def test_a_listing_that_a_writer_overtook_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from spark_sink.staging import log as staging

    make_epoch(tmp_path, 1, 0x100, (0x100, 0x200), (0x200, 0x300))
    listing, turns = staging.epoch_segments, iter([1, 2])

    def miss_the_first(root: Path, number: int):
        found = listing(root, number)
        return found[1:] if next(turns, 3) < 3 else found

    monkeypatch.setattr(staging, "epoch_segments", miss_the_first)
    assert ranges(tmp_path) == [(1, 0x100, 0x200), (1, 0x200, 0x300)]


def test_boundaries_of_too_many_records_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(staging_writer, "_MAX_KNOWN_BOUNDARIES", 3)
    boundaries = Boundaries()
    starts, ends = np.array([10, 20]), np.array([11, 21])
    boundaries.add(Write(b"x" * 30, starts, ends, 9), 100)
    assert [list(array) for array in boundaries.arrays()] == [[101, 111], [102, 112]]
    boundaries.add(Write(b"x" * 30, starts, ends, 0), 130)
    assert not boundaries.is_complete
    assert boundaries.parts == []


def test_the_order_of_durability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each file before its name, each name before the directory's fsync, and all of it before `seal` returns."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(fd: int) -> None:
        done.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).relative_to(tmp_path)}")
        fsync(fd)

    def note_rename(self: Path, target: Path) -> Path:
        done.append(f"rename {target.relative_to(tmp_path)}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    root = tmp_path / "staging"
    with StagingWriter(root, slot="s") as writer:
        assert done[0] == "fsync ."
        assert done[1:4] == [done[1], "rename staging/.tmp-trial", "fsync staging"]  # what the file system can do
        assert len(done) == 4
        done.clear()
        writer.begin_epoch(**SOURCE, first_lsn=0x100)
        assert done[0] == "fsync staging"
        assert done[1].startswith("fsync staging/000001/.tmp-")
        assert done[2:] == ["rename staging/000001/epoch.json", "fsync staging/000001"]
        done.clear()
        segment = writer.seal(fill(writer, WORK))
        assert done == [
            "fsync staging/000001/0000000000000100.open",
            f"rename {segment.path.relative_to(tmp_path)}",
            "fsync staging/000001",
        ]


def test_a_new_stream_describes_its_relations_anew():
    filler = SegmentFiller(0, BIG)
    filler.feed(encode_stream([Transaction(0x20, ((16384, b"x"),))]), 0)
    filler.finish()
    with pytest.raises(ProtocolError, match="did not describe"):
        filler.feed(begin(0x2F, 2) + insert(16384, b"y") + commit(0x2F, 0x30), 0)


def test_a_discarded_segment_is_begun_again(tmp_path: Path):
    large = Transaction(0x300, ((16384, bytes(3 << 20)),))
    with StagingWriter(tmp_path, slot="s") as writer:
        filler = SegmentFiller(writer.begin_epoch(**SOURCE, first_lsn=0x100).start_lsn, SealPolicy(1 << 30, 1e9, 0))
        stream = encode_stream([large])
        seal_all(writer, filler.feed(stream[:-10], 0))
        assert [path.stat().st_size > 1 << 20 for path in tmp_path.glob("*/*.open")] == [True]
        seal_all(writer, filler.finish())
        assert not list(tmp_path.glob("*/*.open"))
        assert (writer.open_size, writer.end_lsn) == (0, 0x100)
        seal_all(writer, filler.feed(stream, 0) + filler.finish())
    assert landed(tmp_path) == [large]


@pytest.mark.usefixtures("no_locks")
def test_an_epoch_begins_where_the_log_ends_once_it_is_made(tmp_path: Path):
    with StagingWriter(tmp_path, slot="s") as old, StagingWriter(tmp_path, slot="s") as new:
        old.begin_epoch(**SOURCE, first_lsn=0x100)
        old.seal(fill(old, WORK[:2]))  # the new one has looked at the log before, and makes its epoch after
        assert new.begin_epoch(**SOURCE, first_lsn=0x100).start_lsn == WORK[1].end_lsn
        new.seal(fill(new, WORK[2:]))
    assert landed(tmp_path) == WORK
