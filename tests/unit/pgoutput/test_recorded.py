"""Recorded streams of real servers (tests/data/pgoutput, by scripts/record-stream): whole, cut, damaged, assembled."""

import random
import re
from functools import cache
from pathlib import Path

import pytest
from recording import DATA

from cdcpipe.errors import ProtocolError
from cdcpipe.pgoutput.decode import NAMES, decode
from cdcpipe.pgoutput.messages import (
    UNCHANGED_TOAST,
    Binary,
    Column,
    Message,
    Relation,
    StreamAbort,
    StreamStart,
    StreamStop,
    Type,
    Update,
)
from cdcpipe.pgoutput.transactions import Transactions
from cdcpipe.subcommands.decode import Captures
from cdcpipe.subcommands.explain import Explainer
from support.pgoutput_build import build
from support.whole_transactions import plain, rows_with_columns, take_all

STREAMS = sorted(DATA.glob("pg*/*.cdc"))
VERSIONS = sorted({stream.parent.name for stream in STREAMS})

by_name = pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: f"{stream.parent.name}-{stream.stem}")


@cache
def records(stream: Path) -> list[tuple[int, bytes]]:
    return list(Captures([str(stream)], lambda: None))


def messages(stream: Path) -> list[tuple[bytes, bool, Message]]:
    """Yield each record, whether it is in a stream block, and its message."""
    out = []
    in_stream = False
    for _, data in records(stream):
        message = decode(data, in_stream=in_stream, streaming_parallel="parallel" in stream.stem)
        out.append((data, in_stream, message))
        if isinstance(message, StreamStart | StreamStop):
            in_stream = isinstance(message, StreamStart)
    return out


def distinct(version: str) -> list[tuple[bytes, bool]]:
    """Return the messages of a version that differ in more than numbers. So each layout is there, mostly once."""
    found = {}
    for stream in DATA.glob(f"{version}/*.cdc"):
        for data, in_stream, message in messages(stream):
            found.setdefault((re.sub(r"\d+", "0", repr(message)), in_stream), data)
    return [(data, in_stream) for (_, in_stream), data in found.items()]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_kind_of_message_was_recorded(version: str) -> None:
    kinds: dict[str, int] = {}
    lengths = set()
    for stream in DATA.glob(f"{version}/*.cdc"):
        for data, _, message in messages(stream):
            kinds[chr(data[0])] = kinds.get(chr(data[0]), 0) + 1
            if isinstance(message, StreamAbort):
                lengths.add(len(data))
    assert set(kinds) == set(NAMES)
    assert lengths == ({9} if version == "pg15" else {9, 25})


def test_the_recordings_have_every_layout() -> None:
    """All versions and sets of options; every layout of a change, inside a stream block and outside."""
    assert VERSIONS == ["pg15", "pg16", "pg18"]
    names = {version: {stream.stem for stream in DATA.glob(f"{version}/*.cdc")} for version in VERSIONS}
    assert {"v1", "v1-messages", "v1-binary", "v2-streaming", "v3-two-phase", "v3-two-phase-streaming"} == names["pg15"]
    assert names["pg16"] == names["pg18"] > names["pg15"] | {"v1-origin-none", "v4-streaming", "v4-parallel"}
    for version in VERSIONS:
        found = {(data[:1], in_stream) for data, in_stream in distinct(version)}
        assert {(kind, where) for kind in (b"I", b"U", b"D", b"T", b"M", b"R", b"Y") for where in (False, True)} <= found
        rows = [message for stream in DATA.glob(f"{version}/*.cdc") for _, _, message in messages(stream)]
        updates = [message for message in rows if isinstance(message, Update)]
        assert {(message.key is None, message.old is None) for message in updates} == {(True, True), (True, False), (False, True)}
        assert any(UNCHANGED_TOAST in message.new for message in updates)
        assert any(isinstance(value, Binary) for message in updates for value in message.new)
        relations = [message for message in rows if isinstance(message, Relation)]
        assert {message.replica_identity for message in relations} == set("dnfi")
        assert Column(1, "Co l", 23, -1) in {column for message in relations for column in message.columns}


@by_name
def test_each_message_is_read_and_built_again(stream: Path) -> None:
    for data, _, message in messages(stream):
        assert build(message) == data


@by_name
def test_the_capture_tells_the_layout_of_stream_aborts(stream: Path) -> None:
    for data, in_stream, message in messages(stream):
        assert decode(data, in_stream=in_stream, streaming_parallel=None) == message


@pytest.mark.parametrize("version", VERSIONS)
def test_every_prefix_is_a_protocol_error(version: str) -> None:
    for data, in_stream in distinct(version):
        parallel = len(data) == 25 and data[:1] == b"A"
        for size in range(len(data)):
            with pytest.raises(ProtocolError):
                decode(data[:size], in_stream=in_stream, streaming_parallel=parallel)


@pytest.mark.parametrize("version", VERSIONS)
def test_bytes_after_the_end_are_a_protocol_error(version: str) -> None:
    for data, in_stream in distinct(version):
        parallel = len(data) == 25 and data[:1] == b"A"
        for tail in (b"\0", b"\n", b"n", data):
            with pytest.raises(ProtocolError, match=f"it should end at byte {len(data)}$"):
                decode(data + tail, in_stream=in_stream, streaming_parallel=parallel)


@pytest.mark.parametrize("version", VERSIONS)
def test_damage_gives_a_message_or_a_protocol_error(version: str) -> None:
    """Each byte is replaced by values that matter in lengths and counts, and by a random one. Pieces are removed or repeated."""
    rng = random.Random(20261121)
    for data, in_stream in distinct(version):
        damaged = []
        for pos in range(len(data)):
            values = {0, 1, 0x7F, 0xFF, data[pos] ^ 1, rng.randrange(256)}
            damaged += [data[:pos] + bytes([value]) + data[pos + 1 :] for value in sorted(values)]
        for _ in range(20):
            start, end = sorted(rng.choices(range(len(data) + 1), k=2))
            damaged += [data[:start] + data[end:], data[:end] + data[start:]]
        for each in damaged:
            for where in (in_stream, not in_stream):
                try:
                    message = decode(each, in_stream=where, streaming_parallel=None)
                except ProtocolError:
                    continue
                # What is read is what the bytes say: nothing was skipped or made up.
                assert build(message) == each


@pytest.mark.parametrize("version", VERSIONS)
def test_damage_to_a_stream_gives_records_or_a_protocol_error(version: str) -> None:
    """Messages are lost, repeated, out of order or damaged; then assembled and explained."""
    rng = random.Random(20261121)
    for stream in DATA.glob(f"{version}/*.cdc"):
        for _ in range(10):
            damaged = list(records(stream))
            for _ in range(rng.choice([1, 1, 3])):
                pos = rng.randrange(len(damaged))
                lsn, data = damaged[pos]
                byte = rng.randrange(len(data))
                replacement = data[:byte] + bytes([rng.randrange(256)]) + data[byte + 1 :]
                damaged[pos : pos + 1] = rng.choice([[], [damaged[pos]] * 2, [damaged[pos - 1]], [(lsn, replacement)]])
            transactions = Transactions(streaming_parallel=None, spill_threshold=10_000)
            explainer = Explainer()
            try:
                for lsn, data in damaged:
                    transactions.feed(lsn, data)
            except ProtocolError:
                pass
            take_all(transactions)
            transactions.close()
            try:
                for lsn, data in damaged:
                    assert all(line.isprintable() for line in explainer.explain(0, lsn, data).split("\n"))
            except ProtocolError:
                pass


def baseline(stream: Path) -> Path:
    """The recording of the same changes in version 1 of the protocol."""
    same = stream.stem in ("v1", "v1-origin-none")
    return stream if same else stream.with_stem("v1-binary" if "binary" in stream.stem else "v1-messages")


def comparable(found: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Remove the position at the origin, which a server does not send for a streamed transaction."""
    return [(lsn, data[:1] + bytes(8) + data[9:] if data[:1] == b"O" else data) for lsn, data in plain(found)]


@by_name
@pytest.mark.parametrize("spill_threshold", [0, 1 << 20])
def test_put_together_it_is_what_version_1_sends(stream: Path, spill_threshold: int) -> None:
    transactions = Transactions(streaming_parallel=None, spill_threshold=spill_threshold)
    out = []
    for lsn, data in records(stream):
        transactions.feed(lsn, data)
        out += take_all(transactions)
    expected = records(baseline(stream))
    assert comparable(out) == comparable(expected)
    assert rows_with_columns(out) == rows_with_columns(expected)
    assert not transactions._held.all()


@by_name
def test_descriptions_come_before_their_first_use(stream: Path) -> None:
    described: set[int] = set()
    for _, _, message in messages(stream):
        if isinstance(message, Type):
            described.add(message.type_id)
        elif isinstance(message, Relation):
            described.add(message.relation_id)
            assert all(column.type_id < 10_000 or column.type_id in described for column in message.columns)
        elif (relation_id := getattr(message, "relation_id", None)) is not None:
            assert relation_id in described


def test_the_recordings_are_of_this_workload() -> None:
    """After the last change of the SQL they were recorded again: each has its last row, and one of its special cases."""
    sql = (DATA / "workload.sql").read_text()
    assert "values (99, 'last', 1);\n" in sql[-80:]
    for stream in STREAMS:
        content = stream.read_bytes()
        assert b"\0\0\0\x04last" in content
        assert "\u202e\x1b[31m".encode() in content
