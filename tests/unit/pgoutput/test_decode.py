"""Every message of protocol versions 1 to 4: whole, cut at every byte, with bytes after it; and random bytes."""

from __future__ import annotations

import copy
import pickle
import struct
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.decode import decode
from cdcpipe.pgoutput.messages import (
    UNCHANGED_TOAST,
    Begin,
    BeginPrepare,
    Binary,
    Column,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)
from support import pgoutput_build

LSN = bytes.fromhex("00000001 0000ABCD")
END = bytes.fromhex("00000001 0000AC00")
TIME = bytes.fromhex("0002D0A1 00000000")
XID = bytes.fromhex("000002F3")
L, E, T, X = 0x10000ABCD, 0x10000AC00, 0x2D0A100000000, 755

# The wire forms are written out by hand here, so that the decoder and pgoutput_build can't share a mistake.
CASES: list[tuple[str, bytes, Message]] = [
    ("begin", b"B" + LSN + TIME + XID, Begin(L, T, X)),
    ("commit", b"C\0" + LSN + END + TIME, Commit(0, L, E, T)),
    ("before-2000", b"C\0" + LSN + END + b"\xff" * 8, Commit(0, L, E, -1)),
    ("origin", b"O" + LSN + b"node_a\0", Origin(L, "node_a")),
    (
        "relation",
        b"R\0\0\x40\x01public\0t\0d\0\2" + b"\1id\0\0\0\0\x17\xff\xff\xff\xff" + b"\0v\xc3\xa9\0\0\0\x04\x13\0\0\0\x0e",
        Relation(None, 16385, "public", "t", "d", (Column(1, "id", 23, -1), Column(0, "vé", 1043, 14))),
    ),
    ("relation-catalog", b"R\0\0\0\1\0pg_class\0n\0\0", Relation(None, 1, "pg_catalog", "pg_class", "n", ())),
    ("type", b"Y\0\0\x40\x02public\0mood\0", Type(None, 16386, "public", "mood")),
    ("type-domain", b"Y\0\0\x40\x02\0numeric\0", Type(None, 16386, "pg_catalog", "numeric")),
    ("insert", b"I\0\0\x40\x01N\0\2t\0\0\0\1an", Insert(None, 16385, (b"a", None))),
    ("insert-empty-value", b"I\0\0\x40\x01N\0\1t\0\0\0\0", Insert(None, 16385, (b"",))),
    ("insert-binary", b"I\0\0\x40\x01N\0\1b\0\0\0\2\0\7", Insert(None, 16385, (Binary(b"\0\7"),))),
    ("insert-no-columns", b"I\0\0\x40\x01N\0\0", Insert(None, 16385, ())),
    ("update", b"U\0\0\x40\x01N\0\2t\0\0\0\1au", Update(None, 16385, None, None, (b"a", UNCHANGED_TOAST))),
    (
        "update-key",
        b"U\0\0\x40\x01K\0\2t\0\0\0\1anN\0\2t\0\0\0\1bu",
        Update(None, 16385, (b"a", None), None, (b"b", UNCHANGED_TOAST)),
    ),
    ("update-full", b"U\0\0\x40\x01O\0\1t\0\0\0\1aN\0\1n", Update(None, 16385, None, (b"a",), (None,))),
    ("delete-key", b"D\0\0\x40\x01K\0\1t\0\0\0\1a", Delete(None, 16385, (b"a",), None)),
    ("delete-full", b"D\0\0\x40\x01O\0\1t\0\0\0\1a", Delete(None, 16385, None, (b"a",))),
    ("truncate", b"T\0\0\0\2\3\0\0\x40\x01\0\0\x40\x02", Truncate(None, 3, (16385, 16386))),
    ("message", b"M\1" + LSN + b"p\0\0\0\0\3a\0\xff", LogicalMessage(None, 1, L, "p", b"a\0\xff")),
    ("message-empty", b"M\0" + LSN + b"\0\0\0\0\0", LogicalMessage(None, 0, L, "", b"")),
    ("stream-start", b"S" + XID + b"\1", StreamStart(X, True)),
    ("stream-start-again", b"S" + XID + b"\0", StreamStart(X, False)),
    ("stream-stop", b"E", StreamStop()),
    ("stream-commit", b"c" + XID + b"\0" + LSN + END + TIME, StreamCommit(X, 0, L, E, T)),
    ("stream-abort", b"A" + XID + b"\0\0\2\xf4", StreamAbort(X, 756, None, None)),
    ("begin-prepare", b"b" + LSN + END + TIME + XID + b"gid 1\0", BeginPrepare(L, E, T, X, "gid 1")),
    ("prepare", b"P\0" + LSN + END + TIME + XID + b"g\0", Prepare(0, L, E, T, X, "g")),
    ("commit-prepared", b"K\0" + LSN + END + TIME + XID + b"g\0", CommitPrepared(0, L, E, T, X, "g")),
    (
        "rollback-prepared",
        b"r\0" + LSN + END + TIME + TIME + XID + b"g\0",
        RollbackPrepared(0, L, E, T, T, X, "g"),
    ),
    ("stream-prepare", b"p\0" + LSN + END + TIME + XID + b"g\0", StreamPrepare(0, L, E, T, X, "g")),
]
IN_STREAM: list[tuple[str, bytes, Message]] = [
    ("relation", b"R" + XID + b"\0\0\x40\x01s\0t\0f\0\0", Relation(X, 16385, "s", "t", "f", ())),
    ("type", b"Y" + XID + b"\0\0\x40\x02s\0mood\0", Type(X, 16386, "s", "mood")),
    ("insert", b"I" + XID + b"\0\0\x40\x01N\0\1n", Insert(X, 16385, (None,))),
    ("update", b"U" + XID + b"\0\0\x40\x01N\0\1n", Update(X, 16385, None, None, (None,))),
    ("delete", b"D" + XID + b"\0\0\x40\x01K\0\1n", Delete(X, 16385, (None,), None)),
    ("truncate", b"T" + XID + b"\0\0\0\1\0\0\0\x40\x01", Truncate(X, 0, (16385,))),
    ("message", b"M" + XID + b"\1" + LSN + b"p\0\0\0\0\1a", LogicalMessage(X, 1, L, "p", b"a")),
]
ALL = [pytest.param(data, message, False, id=name) for name, data, message in CASES]
ALL += [pytest.param(data, message, True, id="streamed-" + name) for name, data, message in IN_STREAM]


@pytest.mark.parametrize(("data", "message", "in_stream"), ALL)
class TestEachMessage:
    def test_whole(self, data, message, in_stream):
        assert decode(data, in_stream=in_stream) == message
        assert decode(memoryview(data), in_stream=in_stream) == message

    def test_build_gives_the_same_bytes(self, data, message, in_stream):
        assert pgoutput_build.build(message) == data

    def test_cut_at_every_byte(self, data, message, in_stream):
        for size in range(len(data)):
            with pytest.raises(ProtocolError, match=r"at byte \d+$"):
                decode(data[:size], in_stream=in_stream)

    def test_trailing_bytes(self, data, message, in_stream):
        for tail in (b"\0", b"n", b"\0\0\0\0", data):
            with pytest.raises(ProtocolError, match=f"it should end at byte {len(data)}$"):
                decode(data + tail, in_stream=in_stream)


def test_stream_abort_with_parallel_streaming():
    data = b"A" + XID + b"\0\0\2\xf4" + LSN + TIME
    assert decode(data, streaming_parallel=True) == StreamAbort(X, 756, L, T)
    with pytest.raises(ProtocolError):
        decode(data)
    for size in range(len(data)):
        with pytest.raises(ProtocolError):
            decode(data[:size], streaming_parallel=True)


def test_the_size_tells_a_stream_abort_of_parallel_streaming():
    short = b"A" + XID + b"\0\0\2\xf4"
    data = short + LSN + TIME
    assert decode(short, streaming_parallel=None) == StreamAbort(X, 756, None, None)
    assert decode(data, streaming_parallel=None) == StreamAbort(X, 756, L, T)
    for size in {*range(1, len(data))} - {len(short)}:
        with pytest.raises(ProtocolError, match="cut short"):
            decode(data[:size], streaming_parallel=None)
    with pytest.raises(ProtocolError, match="it should end"):
        decode(data + b"\0", streaming_parallel=None)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "no kind byte at byte 0"),
        (b"Z", "an unknown kind: no message has kind 0x5a at byte 0"),
        (b"\xff\0\0", "no message has kind 0xff"),
        (b"C\1" + LSN + END + TIME, "flags that must be 0 are 1 at byte 1"),
        (b"c" + XID + b"\2" + LSN + END + TIME, "flags that must be 0 are 2 at byte 5"),
        (b"P\1" + LSN + END + TIME + XID + b"g\0", "flags"),
        (b"r\1" + LSN + END + TIME + TIME + XID + b"g\0", "flags"),
        (b"S" + XID + b"\2", "a yes or no is 2 at byte 5"),
        (b"R\0\0\0\1s\0t\0x\0\0", "'R' (Relation): no replica identity is 0x78 at byte 9"),
        (b"R\0\0\0\1s\xff\0t\0d\0\0", "a string is not UTF-8 at byte 6"),
        (b"R\0\0\0\1s\0t", "a string has no end at byte 7"),
        (b"R\0\0\0\1s\0t\0d\xff\xff", "cut short"),
        (b"I\0\0\0\1X\0\0", "a new tuple should start at byte 5"),
        (b"I\0\0\0\1N\0\1x", "no column value has kind 0x78 at byte 8"),
        (b"I\0\0\0\1N\0\1t\0\0\0\2a", "a value is longer than the message at byte 8"),
        (b"I\0\0\0\1N\0\1t\xff\xff\xff\xffa", "a value is longer than the message"),
        (b"I\0\0\0\1N\0\1b\x80\0\0\0a", "a value is longer than the message"),
        (b"U\0\0\0\1K\0\0K\0\0", "a new tuple should start at byte 8"),
        (b"D\0\0\0\1N\0\0", "a key or an old tuple should start at byte 5"),
        (b"T\xff\xff\xff\xff\0\0\0\0\1", "4294967295 relations do not fit at byte 6"),
        (b"M\0" + LSN + b"p\0\xff\xff\xff\xff", "the content is longer than the message"),
        (b"M\0" + LSN + b"\xc3\x28\0\0\0\0\0", "a string is not UTF-8"),
    ],
)
def test_malformed(data, what):
    with pytest.raises(ProtocolError) as caught:
        decode(data)
    assert what in str(caught.value)
    assert f"{len(data)} bytes" in str(caught.value)


def test_errors_hold_no_values():
    with pytest.raises(ProtocolError) as caught:
        decode(b"I\0\0\0\1N\0\2t\0\0\0\6secretx")
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_huge_counts_cost_nothing():
    """65535 columns or 4 G relations are announced, and missing. The decoder reserves no memory for them."""
    tracemalloc.start()
    for data in (
        b"I\0\0\0\1N\xff\xff",
        b"R\0\0\0\1s\0t\0d\xff\xff",
        b"T\xff\xff\xff\xff\0",
        b"T\x7f\xff\xff\xff\0" * 3,
    ):
        for _ in range(100):
            with pytest.raises(ProtocolError):
                decode(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_values_are_themselves_after_a_copy():
    assert copy.deepcopy(UNCHANGED_TOAST) is UNCHANGED_TOAST
    assert pickle.loads(pickle.dumps(UNCHANGED_TOAST)) is UNCHANGED_TOAST
    assert Binary(b"1") == Binary(b"1")
    assert Binary(b"1") != b"1"
    assert [Binary(b"1")] != [b"1"]
    assert repr(UNCHANGED_TOAST) == "UNCHANGED_TOAST"


def test_flags_have_names():
    assert [Truncate(None, flags, ()).is_cascade for flags in range(4)] == [False, True, False, True]
    assert [Truncate(None, flags, ()).is_restart_identity for flags in range(4)] == [False, False, True, True]
    assert [LogicalMessage(None, flags, 0, "", b"").is_transactional for flags in range(2)] == [False, True]
    assert [Column(flags, "c", 23, -1).is_key for flags in range(2)] == [False, True]


@given(pgoutput_build.controls | pgoutput_build.changes(st.none()))
def test_built_messages_are_decoded(message):
    assert decode(pgoutput_build.build(message)) == message


@given(pgoutput_build.changes(pgoutput_build.u32))
def test_built_messages_are_decoded_in_a_stream_block(message):
    assert decode(pgoutput_build.build(message), in_stream=True) == message


@given(pgoutput_build.u32, pgoutput_build.u32, pgoutput_build.lsns, pgoutput_build.times)
def test_parallel_stream_abort_is_read_back(xid, subxid, lsn, time_us):
    message = StreamAbort(xid, subxid, lsn, time_us)
    assert decode(pgoutput_build.build(message), streaming_parallel=True) == message


@given(st.sampled_from(b"BCORYIUDTMSEcAbPKrp").map(lambda kind: bytes([kind])), st.binary(max_size=80), st.booleans())
@example(b"I", struct.pack(">IcHcI", 1, b"N", 1, b"t", 0x80000000), False)
def test_garbage_gives_a_message_or_a_protocol_error(kind, body, in_stream):
    for streaming_parallel in (False, True, None):
        try:
            message = decode(kind + body, in_stream=in_stream, streaming_parallel=streaming_parallel)
        except ProtocolError:
            continue
        assert decode(pgoutput_build.build(message), in_stream=in_stream, streaming_parallel=streaming_parallel) == message


@given(
    pgoutput_build.controls | pgoutput_build.changes(st.none()),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_damaged_messages_give_a_message_or_a_protocol_error(message, damage):
    data = bytearray(pgoutput_build.build(message))
    for pos, value in damage:
        data[pos % len(data)] = value
    try:
        decode(bytes(data))
    except ProtocolError:
        pass
