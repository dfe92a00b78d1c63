"""Many messages at once become the same bytes as one by one."""

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cdcpipe.pipe.framing import encode_header
from cdcpipe.streaming.wal_data import Run
from support.wire import keepalive, message, wal_data

HIGHS = st.sampled_from([0, 1, 0xA, 0xFFFFFFFF])
LOWS = st.sampled_from([0, 1, 0xF, 0x10, 0xABCDE, 0x77777777, 0xFFFFFFFF]) | st.integers(0, 0xFFFFFFFF)
# Looks like the beginning of a message.
DECEPTIVE = st.builds(
    lambda length, rest: b"d" + struct.pack(">I", length) + b"w" + rest, st.integers(30, 200), st.binary(max_size=40)
)
RECORDS = st.builds(
    lambda kind, rest, more: kind + rest + more,
    st.sampled_from([b"I", b"U", b"B", b"C", b"w", b"d"]),
    st.binary(max_size=12) | st.integers(0, 9998).map(bytes) | DECEPTIVE,
    st.just(b"") | DECEPTIVE,
).filter(lambda record: len(record) <= 9999)


def one_by_one(messages: list[tuple[int, bytes]]) -> bytes:
    return b"".join(encode_header(lsn, len(record)) + record for lsn, record in messages)


@given(HIGHS, st.lists(st.tuples(LOWS, RECORDS), min_size=1, max_size=40), st.binary(max_size=70), st.data())
def test_a_run_is_framed_as_its_records_one_by_one(
    high: int, drawn: list[tuple[int, bytes]], before: bytes, data: st.DataObject
) -> None:
    messages = [(high << 32 | low, record) for low, record in drawn]
    wire = [wal_data(lsn, record) for lsn, record in messages]
    cut = data.draw(st.integers(0, len(wire[-1])), "bytes of the last message that have not arrived")
    whole = len(messages) - (cut > 0)
    buffer = bytearray(before + b"".join(wire) + bytes(64))
    run = Run(buffer, len(before), len(buffer) - 64 - cut)
    assert len(run) == whole
    assert [run.record(i) for i in range(whole)] == messages[:whole]
    assert run.others(frozenset(b"IU")) == [i for i in range(whole) if messages[i][1][0] not in b"IU"]
    count = data.draw(st.integers(0, whole), "count")
    rest = bytes(buffer[int(run.ends[count - 1]) if count else 0 :])
    assert bytes(run.framed(count)) == one_by_one(messages[:count])
    assert buffer[: len(before)] == before
    assert buffer.endswith(rest)  # the other messages are untouched


@given(
    st.lists(st.tuples(LOWS, st.sampled_from(b"IUDTRB"), st.sampled_from([7, 8]), st.binary(max_size=300)), max_size=40),
    st.booleans(),
    st.integers(0, 8),
)
@example([(1, ord("I"), 7, b"")], False, 64)
@example([(1, ord("I"), 7, b"x")], True, 0)
def test_the_changes_of_a_block_lose_their_xid(drawn: list[tuple[int, int, int, bytes]], has_end: bool, spare: int) -> None:
    """A Stream Stop, which has no xid, may end where the buffer ends."""
    xid = struct.pack(">I", 7)
    messages = [(low, bytes([kind]) + struct.pack(">I", of) + rest) for low, kind, of, rest in drawn]
    messages += [(9, b"E")] if has_end else []
    buffer = bytearray(bytes(8) + b"".join(wal_data(*each) for each in messages) + bytes(spare))
    run = Run(buffer, 8, len(buffer) - spare)
    fits = [record[0] in b"IUDT" and record[1:5] == xid and len(record) > 5 for _, record in messages]
    count = fits.index(False) if False in fits else len(fits)
    assert run.count_of_xid(xid, frozenset(b"IUDT")) == count
    wanted = [(lsn, record[:1] + record[5:]) for lsn, record in messages[:count]]
    assert bytes(run.framed(count, without_xid=True)) == one_by_one(wanted)


@pytest.mark.parametrize(
    "other",
    [
        keepalive(5),
        message(b"c"),
        message(b"N", b"SNOTICE\0\0"),
        message(b"E", b"d" * 60),
        wal_data(9, b""),
        wal_data(9, bytes(10_000)),
        message(b"d", b"w" + bytes(9)),
        message(b"d"),
        b"d\0\0\0\3w" + bytes(60),
        b"d\xff\xff\xff\xffw" + bytes(60),
        b"garbage" * 9,
    ],
)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_run_ends_before_anything_else(other: bytes, count: int) -> None:
    buffer = bytearray(wal_data(9, b"Ione") * count + other + wal_data(9, b"Itwo") * 9)
    run = Run(buffer, 0, len(buffer))
    assert len(run) == count
    assert bytes(run.framed(count)) == one_by_one([(9, b"Ione")] * count)


def test_a_run_ends_where_the_upper_half_of_the_lsn_changes() -> None:
    buffer = bytearray(wal_data(9, b"Ione") * 2 + wal_data(1 << 32, b"Itwo"))
    assert len(Run(buffer, 0, len(buffer))) == 2


def test_an_empty_buffer_has_no_run() -> None:
    assert len(Run(bytearray(100), 0, 0)) == len(Run(bytearray(100), 50, 60)) == 0
