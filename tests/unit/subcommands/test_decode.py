"""Captures rendered without a server, and everything that can be wrong with a capture."""

import itertools
import random
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import DATA

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError, ProtocolError
from cdcpipe.pgoutput.messages import (
    BeginPrepare,
    Binary,
    Column,
    CommitPrepared,
    Insert,
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
)
from cdcpipe.pipe.framing import RecordReader
from cdcpipe.subcommands.decode import CHUNK_BYTES, Captures, RenderConfig, explain, render
from support import pgoutput_build
from support.captures import BEGIN, COMMIT, PLAIN, STREAMED, capture, explained, relation, rendered, row
from support.pgoutput_build import build
from support.pgoutput_stream import record


@pytest.mark.parametrize("version", ["pg15", "pg16", "pg18"])
@pytest.mark.parametrize("output", ["wal2json", "json", "test_decoding"])
def test_every_option_set_gives_the_same(version: str, output: str, tmp_path: Path) -> None:
    baseline, error = rendered(tmp_path, (DATA / version / "v1-messages.cdc").read_bytes(), output=output)
    assert error is None
    for path in sorted(DATA.glob(f"{version}/*.cdc")):
        if path.stem != "v1" and "origin-none" not in path.stem and "binary" not in path.stem:
            out, error = rendered(tmp_path, path.read_bytes(), output=output, whole_transactions=True)
            assert error is None
            assert out == baseline, path


def test_several_files_are_one_stream(tmp_path: Path) -> None:
    data = (DATA / "pg18" / "v4-parallel-two-phase.cdc").read_bytes()
    expected = rendered(tmp_path, data, output="json", whole_transactions=True)
    ends = []
    pos = 0
    while pos < len(data):
        newline = data.index(b"\n", pos)
        pos = newline + 1 + int(data[pos:newline].split()[2])
        ends.append(pos)
    rng = random.Random(20261121)
    for _ in range(5):
        cuts = [0, *sorted(rng.sample(ends[:-1], 3)), len(data)]
        files = [data[start:end] for start, end in itertools.pairwise(cuts)]
        assert rendered(tmp_path, *files, output="json", whole_transactions=True) == expected


def test_idle_positions_are_no_messages(tmp_path: Path) -> None:
    plain = capture(*PLAIN)
    idle = b"w 0/50 0\n"
    assert rendered(tmp_path, idle + plain + idle, idle) == rendered(tmp_path, plain)
    assert explained(tmp_path, plain + idle) == explained(tmp_path, plain)


DESCRIBED = (
    BEGIN,
    Type(None, 20001, "public", "mood"),
    Type(None, 20002, "w", "_Odd type"),
    Type(None, 20003, "pg_catalog", "numeric"),
    Relation(
        None,
        16385,
        "public",
        "t",
        "f",
        (Column(1, "id", 20001, -1), Column(1, "select", 20002, -1), Column(1, "d", 20003, 5), Column(1, "v", 1043, 14)),
    ),
    Insert(None, 16385, (b"ok", b"{}", b"1.50", b"x")),
    COMMIT,
)


def test_types_have_the_names_that_the_stream_gave(tmp_path: Path) -> None:
    out, error = rendered(tmp_path, capture(*DESCRIBED), output="test_decoding")
    assert error is None
    lines = out.decode().splitlines()
    expected = "id[mood]:'ok' \"select\"[w.\"Odd type\"[]]:'{}' d[\"numeric\"]:'1.50' v[character varying]:'x'"
    assert lines[1] == "table public.t: INSERT: " + expected


def test_built_in_types_in_binary_form_need_no_server(tmp_path: Path) -> None:
    columns = (Column(1, "b", 16, -1), Column(0, "v", 25, -1), Column(0, "m", 20001, -1))
    described = Relation(None, 16385, "public", "t", "d", columns)
    messages = [BEGIN, Type(None, 20001, "public", "mood"), described]
    values = (Binary(b"\1"), Binary("ü".encode()))
    out, error = rendered(tmp_path, capture(*messages, Insert(None, 16385, (*values, None)), COMMIT), output="json")
    assert error is None
    assert '"new":{"b":true,"v":"ü","m":null}'.encode() in out
    _, error = rendered(tmp_path, capture(*messages, Insert(None, 16385, (*values, Binary(b"ok"))), COMMIT), output="json")
    assert isinstance(error, InvalidArgumentsError)
    assert "column 'm' of table 'public.t'" in error.message
    assert "there is no server to ask" in error.message


@pytest.mark.parametrize(
    "option", ["include-not-null", "include-default", "include-column-positions", "include-pk", "include-domain-data-type"]
)
def test_a_type_that_needs_the_catalog_is_an_error(tmp_path: Path, option: str) -> None:
    options = {"format-version": "2", option: None}
    out, error = rendered(tmp_path, capture(*DESCRIBED), options=options)
    assert out == b""
    assert isinstance(error, InvalidArgumentsError)
    assert option in error.message
    assert "0.cdc, byte " in error.message
    assert "-d, -h, -p, -U, -m" in str(error.hint)


@pytest.mark.parametrize("options", [{"include-origin": None}, {"filter-origins": "1"}])
def test_the_number_of_an_origin_is_only_in_the_catalog(tmp_path: Path, options: dict[str, str | None]) -> None:
    assert rendered(tmp_path, capture(*PLAIN), options=options)[1] is None
    out, error = rendered(tmp_path, capture(BEGIN, Origin(1, "o"), relation(), row(1), COMMIT), options=options)
    assert out == b""
    assert isinstance(error, InvalidArgumentsError)
    assert "the number of the replication origin 'o'" in error.message


def test_the_key_of_the_default_identity_needs_no_catalog(tmp_path: Path) -> None:
    out, error = rendered(tmp_path, capture(*PLAIN), options={"format-version": "2", "include-pk": None})
    assert error is None
    assert b'"pk":[{"name":"id","type":"integer"}]' in out


BAD: list[tuple[str, bytes, str]] = [
    ("no-header", b"B\0\0\0\0", r"0\.cdc, byte 0: not a record header"),
    ("not-a-capture", b"w 0/1 12 \n", "byte 0: not a record header"),
    ("negative", b"w 0/1 -1\n", "byte 0: not a record header"),
    ("huge", b"w 0/1 2147483648\nB", "byte 0: not a record header"),
    ("garbage-after", capture(BEGIN) + b"{}", r"byte 32: not a record header"),
    (
        "unknown-kind",
        capture(BEGIN, relation(), b"Z\0"),
        r"byte 81 \(kind 0x5a, LSN 0/300\): malformed .* no message has kind 0x5a",
    ),
    ("cut-message", capture(BEGIN, relation(), build(row(1))[:-1]), r"byte 81 \(Insert, LSN 0/300\): .* a value is longer"),
    ("not-described", capture(BEGIN, Insert(None, 5, ())), r"byte 32 \(Insert, LSN 0/200\): relation 5 was never described"),
    ("truncate-not-described", capture(BEGIN, Truncate(None, 0, (5,))), r"\(Truncate, LSN 0/200\): relation 5 was never described"),
    ("columns", capture(BEGIN, relation(), Insert(None, 16385, (b"1",))), "has 1 values, the relation 2 columns"),
    ("out-of-place", capture(relation(), row(1)), r"byte \d+ \(Insert, LSN 0/200\): the server sent a Insert message outside"),
    ("begin-twice", capture(BEGIN, BEGIN), "a Begin message inside a transaction"),
    ("newlines", capture(build(BEGIN) + b"\n"), "it should end at byte 21"),
    ("rendered", record(b'{"action":"B"}'), "no message has kind 0x7b"),
]


@pytest.mark.parametrize(("data", "what"), [pytest.param(data, what, id=name) for name, data, what in BAD])
def test_damage_is_named_with_its_place(tmp_path: Path, data: bytes, what: str) -> None:
    whole = capture(*PLAIN)
    before, _ = rendered(tmp_path, whole)
    out, error = rendered(tmp_path, data)
    assert isinstance(error, ProtocolError)
    assert re.search(what, error.message), error.message
    assert error.hint is not None
    assert "cdcpipe -H" in error.hint
    # All that came before is written, and the place is one in the file that has it.
    out, error = rendered(tmp_path, whole, data)
    assert isinstance(error, ProtocolError)
    assert "1.cdc, byte " in error.message
    assert out.startswith(before)


def test_a_capture_may_be_cut_anywhere(tmp_path: Path) -> None:
    """Whole records are rendered. The rest is an error, unless the cut is between two records."""
    data = capture(*PLAIN)
    ends = {0}
    for message in PLAIN:
        ends.add(data.index(build(message)) + len(build(message)))
    whole, _ = rendered(tmp_path, data)
    for size in range(len(data)):
        out, error = rendered(tmp_path, data[:size])
        start = max(end for end in ends if end <= size)
        assert out == rendered(tmp_path, data[:start])[0]
        assert whole.startswith(out)
        if size in ends:
            assert error is None
        else:
            assert isinstance(error, ProtocolError)
            assert f"byte {start}: cut off in the middle of a " in error.message
    _, error = rendered(tmp_path, data[:-1])
    assert error is not None
    assert error.message.endswith("cut off in the middle of a record, after 25 of 26 bytes")
    # The next file does not go on where this one was cut: it may be the capture of another stream.
    _, error = rendered(tmp_path, data[:-1], data[-1:])
    assert error is not None
    assert "0.cdc, byte " in error.message


def test_transactions_that_the_output_plugin_does_not_know(tmp_path: Path) -> None:
    for data in (capture(*STREAMED), capture(BeginPrepare(1, 2, 3, 7, "g"), relation(), row(1))):
        out, error = rendered(tmp_path, data)
        assert (out, type(error)) == (b"", InvalidArgumentsError)
        assert error is not None
        assert "wal2json can't render" in error.message
        assert "--whole-transactions" in str(error.hint)
    out, error = rendered(tmp_path, capture(*STREAMED), whole_transactions=True)
    assert error is None
    assert out == rendered(tmp_path, capture(BEGIN, relation(), row(1), COMMIT))[0]


def test_damage_in_a_streamed_transaction_is_an_error_at_its_commit(tmp_path: Path) -> None:
    messages = (StreamStart(7, True), row(1, xid=7), StreamStop(), StreamCommit(7, 0, 0x900, 0x930, 5))
    _, error = rendered(tmp_path, capture(*messages), whole_transactions=True)
    assert isinstance(error, ProtocolError)
    assert re.search(r"byte \d+ \(Stream Commit, LSN 0/400\): relation 16385 was never described", error.message)
    _, error = rendered(tmp_path, capture(StreamCommit(7, 0, 1, 2, 3)), whole_transactions=True)
    assert isinstance(error, ProtocolError)
    assert "none of its stream blocks came" in error.message


PREPARED = (BeginPrepare(1, 2, 3, 7, "g'1"), relation(), row(1), Prepare(0, 1, 2, 3, 7, "g'1"))
UNFINISHED: list[tuple[tuple[Message, ...], bool, str]] = [
    (PLAIN, False, ""),
    (PLAIN[:-1], False, "inside transaction 7: its records are not complete"),
    (PLAIN[:-1], True, "inside transaction 7: its records are not complete"),
    (PREPARED[:-1], False, "inside transaction 7"),
    (PREPARED, False, ""),
    (PREPARED, True, 'while transactions are prepared ("g\'1"): none of their records are written'),
    ((*PREPARED, CommitPrepared(0, 1, 2, 3, 7, "g'1")), True, ""),
    ((*PREPARED, RollbackPrepared(0, 1, 2, 3, 4, 7, "g'1")), True, ""),
    (STREAMED, False, ""),
    (STREAMED[:-1], False, "while transactions are in progress (7): their records are not complete"),
    (STREAMED[:-2], True, "while transactions are in progress (7): none of their records are written"),
    ((*STREAMED[:-1], StreamAbort(7, 8, None, None)), True, "in progress (7)"),
    ((*STREAMED[:-1], StreamAbort(7, 7, 1, 2)), True, ""),
    ((*STREAMED[:-1], StreamPrepare(0, 1, 2, 3, 7, "g")), True, "are prepared ('g')"),
    ((*STREAMED[:-1], StreamPrepare(0, 1, 2, 3, 7, "g")), False, ""),
]


@pytest.mark.parametrize(("messages", "whole", "what"), UNFINISHED)
def test_a_capture_that_ends_inside_a_transaction(
    tmp_path: Path, messages: tuple[Message, ...], whole: bool, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    out, error = rendered(tmp_path, capture(*messages), output="test_decoding", whole_transactions=whole)
    assert error is None
    assert out or whole
    warnings = [each.getMessage() for each in caplog.records]
    assert bool(warnings) == bool(what)
    if what:
        assert re.search(rf"0\.cdc ends .*{re.escape(what)}", warnings[0])


def test_many_unfinished_transactions_are_not_all_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    messages = [message for xid in range(1, 9) for message in (StreamStart(xid, True), StreamStop())]
    assert rendered(tmp_path, capture(*messages), output="test_decoding")[1] is None
    assert "(1, 2, 3, 4, 5 and 3 more)" in caplog.text


class Pieces:
    """A file whose reads return pieces of random size."""

    def __init__(self, data: bytes, rng: random.Random, largest: int) -> None:
        self.data, self.pos, self.rng, self.largest = data, 0, rng, largest

    def read(self, size: int) -> bytes:
        size = min(size, self.rng.randint(1, self.largest))
        piece = self.data[self.pos : self.pos + size]
        self.pos += len(piece)
        return piece


@given(
    st.lists(st.tuples(pgoutput_build.lsns, st.binary(max_size=80)), max_size=10), st.randoms(), st.sampled_from([1, 3, 30, 1000])
)
def test_any_pieces_give_the_same_records(expected: list[tuple[int, bytes]], rng: random.Random, largest: int) -> None:
    data = b"".join(record(body, lsn) for lsn, body in expected)
    captures = Captures([], lambda: None)
    assert list(captures._records(Pieces(data, rng, largest))) == [(lsn, body) for lsn, body in expected if body]


@given(st.lists(st.binary(max_size=30) | st.sampled_from([b"w 0/1 3\nabc", b"w 0/1 ", b"w", b"3\n", b"w 1/1 0\n"])), st.randoms())
@settings(max_examples=300)
def test_any_bytes_are_records_or_a_protocol_error(parts: list[bytes], rng: random.Random) -> None:
    """The same records as the reader of the pipe finds, except empty ones."""
    data = b"".join(parts)
    reader = RecordReader()
    reader.feed(data)
    expected: list[tuple[int, bytes]] = []
    valid = True
    try:
        expected.extend(pair for pair in reader if pair[1])
    except ProtocolError:
        valid = False
    captures = Captures([], lambda: None)
    found: list[tuple[int, bytes]] = []
    try:
        found.extend(captures._records(Pieces(data, rng, 10)))
    except ProtocolError:
        assert not valid or reader.has_partial
    else:
        assert valid
        assert not reader.has_partial
    assert found == expected
    assert captures.pos <= len(data)


@given(st.lists(st.binary(max_size=60), max_size=5), st.booleans())
def test_any_records_are_rendered_or_a_protocol_error(bodies: list[bytes], whole: bool) -> None:
    data = capture(*PLAIN, *STREAMED[:-2], *bodies)
    with tempfile.TemporaryDirectory() as directory:
        _, error = rendered(Path(directory), data, output="test_decoding", whole_transactions=whole)
        assert error is None or isinstance(error, ProtocolError)
        _, error = explained(Path(directory), data)
        assert error is None or isinstance(error, ProtocolError)


def test_a_record_larger_than_what_is_read_at_once(tmp_path: Path) -> None:
    large = row(1, b"Y" * (3 * CHUNK_BYTES + 1))
    out, error = rendered(tmp_path, capture(BEGIN, relation(), large, row(2), COMMIT))
    assert error is None
    assert out.count(b"Y") == 3 * CHUNK_BYTES + 1
    assert out.count(b'"I"') == 2


def test_a_file_that_is_gone_or_none(tmp_path: Path) -> None:
    with pytest.raises(CdcpipeError, match=r"gone\.cdc can't be read: No such file or directory") as caught:
        render([str(tmp_path / "gone.cdc")], RenderConfig("json"))
    assert caught.value.exit_code == 7
    with pytest.raises(CdcpipeError, match="can't be read: Is a directory"):
        explain([str(tmp_path)])


@pytest.mark.parametrize(
    ("output", "option", "value", "whole"),
    [
        ("test_decoding", "only-local", None, False),
        ("test_decoding", "only-local", None, True),
        ("wal2json", "filter-origins", "1", True),
        ("wal2json", "include-origin", "1", True),
    ],
)
def test_an_option_that_needs_origins_is_refused_for_a_streamed_transaction(
    output: str, option: str, value: str | None, whole: bool, tmp_path: Path
) -> None:
    config: dict[str, object] = {"output": output, "whole_transactions": whole}
    plain, error = rendered(tmp_path, capture(*PLAIN), options={option: value}, **config)
    assert (bool(plain), error) == (True, None)
    out, error = rendered(tmp_path, capture(*PLAIN, *STREAMED), options={option: value}, **config)
    assert isinstance(error, InvalidArgumentsError)
    assert out == plain  # what came before
    assert re.search(rf"0\.cdc, byte \d+ \(Stream Start, LSN 0/600\): with streaming, {output}'s option '{option}'", error.message)
    assert "leave the option out" in (error.hint or "")
    assert rendered(tmp_path, capture(*PLAIN, *STREAMED), options={}, **config)[1] is None
