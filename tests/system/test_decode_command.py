"""`cdcpipe decode`: captures rendered as the live stream is, explained, and all that can be wrong with one."""

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import postgres
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import DATA, run_workload

from cdcpipe.errors import CdcpipeError, InvalidArgumentsError, OutputError, ProtocolError
from cdcpipe.pgoutput.decode import NAMES, decode
from cdcpipe.pgoutput.messages import (
    UNCHANGED_TOAST,
    Begin,
    BeginPrepare,
    Binary,
    Column,
    Commit,
    CommitPrepared,
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
from cdcpipe.pipe.framing import RecordReader, encode_header
from cdcpipe.plugins.keywords import KEYWORDS
from cdcpipe.sql import quote_literal
from cdcpipe.subcommands.decode import CHUNK_BYTES, Captures, RenderConfig, explain, render
from cdcpipe.subcommands.explain import Explainer
from support import pgoutput_build
from support.cli_process import COMMAND, run_cli
from support.paths import ROOT
from support.pgoutput_build import build
from support.waiting import until

SMALL_MEMORY = "options=-c logical_decoding_work_mem=64kB"


def record(data: bytes, lsn: int = 0) -> bytes:
    return encode_header(lsn, len(data)) + data


def capture(*messages: Message | bytes) -> bytes:
    """Records with the LSNs 0/100, 0/200, …; 0/0 for descriptions."""
    parts = []
    for number, message in enumerate(messages, 1):
        lsn = 0 if isinstance(message, Relation | Type) else number << 8
        parts.append(record(message if isinstance(message, bytes) else build(message), lsn))
    return b"".join(parts)


def relation(xid: int | None = None) -> Relation:
    return Relation(xid, 16385, "public", "t", "d", (Column(1, "id", 23, -1), Column(0, "v", 25, -1)))


def row(number: int, value: bytes | None = b"x", xid: int | None = None) -> Insert:
    return Insert(xid, 16385, (b"%d" % number, value))


BEGIN, COMMIT = Begin(0x900, 5, 7), Commit(0, 0x900, 0x930, 5)
PLAIN = (BEGIN, relation(), row(1), row(2, None), COMMIT)
STREAMED = (StreamStart(7, True), relation(7), row(1, xid=7), StreamStop(), StreamCommit(7, 0, 0x900, 0x930, 5))


def rendered(tmp_path: Path, *captures: bytes, output: str = "wal2json", **config: object) -> tuple[bytes, CdcpipeError | None]:
    """Render captures in files called 0.cdc, 1.cdc, …: what was written, and the error that ended it."""
    options = {"format-version": "2"} if output == "wal2json" else {}
    files = []
    for number, data in enumerate(captures):
        path = tmp_path / f"{number}.cdc"
        path.write_bytes(data)
        files.append(str(path))
    error = None
    with tempfile.TemporaryFile() as out:
        try:
            render(files, RenderConfig(output, **{"options": options, "write_newline": True, **config}), out.fileno())  # type: ignore[arg-type]
        except CdcpipeError as ex:
            error = ex
        out.seek(0)
        return out.read(), error


def explained(tmp_path: Path, data: bytes) -> tuple[str, CdcpipeError | None]:
    path = tmp_path / "explained.cdc"
    path.write_bytes(data)
    error = None
    with tempfile.TemporaryFile() as out:
        try:
            explain([str(path)], out.fileno())
        except CdcpipeError as ex:
            error = ex
        out.seek(0)
        return out.read().decode(), error


# The same as live


class Recorded:
    """A database in which the workload of the recordings has run, and a slot that has it all before it."""

    def __init__(self, database: postgres.Database, directory: Path) -> None:
        self.database = database
        self.directory = directory
        self.slot = f"s_{database.name}"
        self.end_lsn = run_workload(database, self.make_slot)

    def make_slot(self, connection) -> None:
        connection.execute(f"select pg_create_logical_replication_slot({quote_literal(self.slot)}, 'pgoutput')")

    def released(self) -> None:
        with self.database.connect() as connection:
            sql = f"select 1 from pg_replication_slots where slot_name = {quote_literal(self.slot)} and not active"
            until(lambda: connection.execute(sql).fetchone(), "the slot's release")

    def live(self, *args: str) -> bytes:
        """Stream all of it; nothing is confirmed."""
        self.released()
        command = [*COMMAND, "-d", self.database.dsn, "-S", self.slot, "--publication", "p", "--endpos", self.end_lsn, *args]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            out = process.stdout.read()
            assert process.wait() == 0, process.stderr.read()
        return out

    def capture(self, name: str, *args: str) -> str:
        path = self.directory / name
        path.write_bytes(self.live("-H", *args))
        return str(path)


@contextlib.contextmanager
def record_workload(database: postgres.Database, directory: Path) -> Iterator[Recorded]:
    try:
        yield Recorded(database, directory)
    finally:
        with database.connect() as connection:  # origins belong to all databases
            connection.execute("select pg_replication_origin_drop(roname) from pg_replication_origin where roname = 'elsewhere'")


@pytest.fixture
def recorded(pg: postgres.Cluster, tmp_path: Path) -> Iterator[Recorded]:
    with pg.database() as database, record_workload(database, tmp_path) as made:
        yield made


def decoded(*args: str, stdin: bytes = b"") -> bytes:
    code, out, stderr = run_cli("decode", *args, stdin=stdin)
    assert (code, stderr) == (0, "")
    return out


FORMATS: Sequence[Sequence[str]] = [
    ["-j"],
    ["-J", "-N", *(f"-oinclude-{name}" for name in ("lsn", "xids", "timestamp", "pk", "origin", "domain-data-type"))],
    [
        "--output",
        "wal2json",
        "-H",
        *(f"-o{name}" for name in ("pretty-print", "write-in-chunks", "include-not-null", "include-default")),
    ],
    ["--output", "test_decoding", "-N", "-H", "-o", "skip-empty-xacts", "-o", "include-timestamp"],
    ["--output", "json", "-N"],
]


def test_the_same_bytes_as_live(recorded: Recorded) -> None:
    """Plain, and streamed and put together; from a file and from stdin; with the server's catalog, as live."""
    day = recorded.capture("day.cdc", "--messages")
    mode = "parallel" if recorded.database.cluster.version_num >= 160000 else "on"
    streamed = recorded.capture("streamed.cdc", "--messages", "--streaming", mode, "-m", SMALL_MEMORY)
    assert Path(streamed).read_bytes() != Path(day).read_bytes()
    server = ["-d", recorded.database.dsn]
    for format_ in FORMATS:
        expected = recorded.live(*format_)
        assert expected
        assert decoded(*format_, *server, day) == expected
    assert decoded(*format_, *server, "--whole-transactions", streamed) == expected
    assert decoded(*format_, *server, recorded.capture("binary.cdc", "--messages", "--binary")) == expected
    expected = recorded.live("-J")
    assert decoded("-J", *server, stdin=Path(day).read_bytes()) == expected
    assert decoded("-J", *server, "--whole-transactions", "--spill-threshold", "1kB", streamed, "-") == expected
    # Without a server all is the same but the names of domains.
    names = {rb'"type":"price"': b'"type":"numeric"', rb'"type":"\"Odd schema\".\"Mood\""': b'"type":"mood"'}
    for theirs, ours in names.items():
        assert theirs in expected
        expected = expected.replace(theirs, ours)
    assert without_lengths(decoded("-J", day)) == without_lengths(expected)


def without_lengths(out: bytes) -> bytes:
    return re.sub(rb"w ([0-9A-F]+/[0-9A-F]+) \d+\n", rb"w \1\n", out)


def test_streamed_and_prepared_transactions_as_they_come(recorded: Recorded) -> None:
    """test_decoding renders them live, too."""
    options = ["--output", "test_decoding", "-N", "-o", "stream-changes", "-o", "include-timestamp"]
    expected = recorded.live(*options, "-m", SMALL_MEMORY)
    assert b"opening a streamed block" in expected
    assert b"aborting streamed" in expected
    streamed = recorded.capture("streamed.cdc", "--messages", "--streaming", "on", "-m", SMALL_MEMORY)
    assert decoded(*options, "-d", recorded.database.dsn, streamed) == expected


def test_segments_of_a_staging_log(database: postgres.Database, tmp_path: Path) -> None:
    """All of them, and each by itself: a segment describes what is in it."""
    with record_workload(database, tmp_path) as recorded:
        expected = recorded.live("-J", "-N")
        recorded.released()
        staging = str(tmp_path / "staging")
        source = ["-d", database.dsn, "-S", recorded.slot, "--publication", "p"]
        land = [COMMAND[0], "-m", "spark_sink", "land", *source, "--staging", staging, "--segment-size", "4kB", "--available-now"]
        subprocess.run(land, check=True, capture_output=True)
        segments = sorted(map(str, Path(staging).glob("*/*.cdc")))
        assert len(segments) > 1
        assert decoded("-J", "-N", "-d", database.dsn, *segments) == expected
        assert b"".join(decoded("-J", "-N", "-d", database.dsn, segment) for segment in segments) == expected


def test_quoted_are_the_keywords_of_the_newest_server(pg: postgres.Cluster) -> None:
    with pg.connect() as connection:
        words = {word for (word,) in connection.execute("select word from pg_get_keywords() where catcode <> 'U'")}
    assert words <= KEYWORDS
    if pg.version_num >= 180000:
        assert words == KEYWORDS


# Recordings: what a capture of each option set gives


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


# Without a server


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
def test_what_only_the_catalog_says_is_an_error(tmp_path: Path, option: str) -> None:
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


def test_no_server_is_asked_unless_it_is_named() -> None:
    """Also where the environment names one that is not there."""
    path = str(DATA / "pg15" / "v1.cdc")
    environment = {"PGHOST": "/nonexistent", "PGSERVICE": "none"}
    assert run_cli("decode", "-J", path, env=environment)[0] == 0
    code, out, stderr = run_cli("decode", "-J", "-d", "x", path, env={"PGHOST": "/nonexistent"})
    assert (code, out) == (2, b"")
    assert "connection to the server failed" in stderr
    code, _, stderr = run_cli("decode", "-J", "-m", "password=secret", path)
    assert (code, "secret" in stderr) == (1, False)


# What is wrong with a capture


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
    ("empty", capture(b""), "byte 0: malformed pgoutput message of 0 bytes, an unknown kind: no kind byte"),
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
    """Whole records are rendered; the rest is an error, unless the cut is between two."""
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


def test_a_header_that_lies_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "lies.cdc"
    path.write_bytes(b"w 0/1 1000000000\nB")
    limited = ["bash", "-c", 'ulimit -v 600000; exec "$@"', "bash", *COMMAND]
    done = subprocess.run([*limited, "decode", "--explain", path], capture_output=True, text=True)
    assert done.returncode == 5
    assert "cut off in the middle of a record, after 1 of 1000000000 bytes" in done.stderr


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
        assert "0.cdc ends " + what in warnings[0] or what in warnings[0]


def test_the_warning_reaches_the_user() -> None:
    code, out, stderr = run_cli("decode", "-J", "-N", stdin=capture(*PLAIN[:-1]))
    assert (code, out.count(b'"I"')) == (0, 2)
    assert stderr == "cdcpipe: warning: stdin ends inside transaction 7: its records are not complete\n"


def test_many_unfinished_transactions_are_not_all_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    messages = [message for xid in range(1, 9) for message in (StreamStart(xid, True), StreamStop())]
    assert rendered(tmp_path, capture(*messages), output="test_decoding")[1] is None
    assert "(1, 2, 3, 4, 5 and 3 more)" in caplog.text


# Reading


class Pieces:
    """A file that gives its bytes in pieces of random size."""

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
    assert list(captures._records(Pieces(data, rng, largest))) == expected  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=30) | st.sampled_from([b"w 0/1 3\nabc", b"w 0/1 ", b"w", b"3\n", b"w 1/1 0\n"])), st.randoms())
@settings(max_examples=300)
def test_any_bytes_are_records_or_a_protocol_error(parts: list[bytes], rng: random.Random) -> None:
    """The very same records as the reader of the pipe sees."""
    data = b"".join(parts)
    reader = RecordReader()
    reader.feed(data)
    expected: list[tuple[int, bytes]] = []
    valid = True
    try:
        expected.extend(reader)
    except ProtocolError:
        valid = False
    captures = Captures([], lambda: None)
    found: list[tuple[int, bytes]] = []
    try:
        found.extend(captures._records(Pieces(data, rng, 10)))  # type: ignore[arg-type]
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


def test_memory_does_not_grow_with_the_capture(tmp_path: Path) -> None:
    """20 MB of small transactions, and what is rendered of them, within what the program takes anyway."""
    path = tmp_path / "long.cdc"
    one = capture(BEGIN, *[row(number, b"z" * 80) for number in range(50)], COMMIT)
    with path.open("wb") as file:
        file.write(capture(*PLAIN))
        for _ in range(20_000_000 // len(one)):
            file.write(one)
    script = "import resource, sys; from cli.main import invoke; assert invoke(sys.argv[1:]) == 0;"
    script += " sys.stderr.write(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))"
    peaks = []
    for name in (DATA / "pg18" / "v1.cdc", path):
        command = [COMMAND[0], "-c", script, "decode", "-J", name]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True)
        peaks.append(int(done.stderr))
    assert peaks[1] < peaks[0] + 15_000


def decoding(*args: str, **kwargs: object) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen([*COMMAND, "decode", *args], **{"stdin": pipe, "stdout": pipe, "stderr": pipe, "bufsize": 0, **kwargs})  # type: ignore[call-overload, no-any-return]


def test_what_is_there_is_rendered_before_more_is_waited_for() -> None:
    """As in `cdcpipe … -H | cdcpipe decode …`; also where stdin does not wait."""
    for is_blocking in (True, False):
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, is_blocking)
        with decoding("--output", "wal2json", "-o", "format-version=2", "-N", stdin=read_fd) as process:
            os.close(read_fd)
            assert process.stdout is not None
            assert process.stderr is not None
            for part in (PLAIN, (BEGIN, row(3), COMMIT)):
                data = capture(*part)
                os.write(write_fd, data[:50])
                os.write(write_fd, data[50:])
                out = b""
                while not out.endswith(b'{"action":"C"}\n'):
                    piece = os.read(process.stdout.fileno(), 1000)
                    assert piece, process.stderr.read()
                    out += piece
            os.close(write_fd)
            assert process.stdout.read() == b""
            assert process.wait() == 0


def test_ends_of_stdin_and_stdout(tmp_path: Path) -> None:
    assert run_cli("decode", "-J", stdin=b"") == (0, b"", "")
    path = str(DATA / "pg18" / "v1.cdc")
    shell = 'exec "$@"'
    for redirection, code, what in (
        (">&-", 7, "can't be written"),
        ("<&-", 7, "stdin can't be read"),
        (">/dev/full", 7, "No space"),
    ):
        files = [] if "<" in redirection else [path]
        done = subprocess.run(
            ["bash", "-c", f"{shell} {redirection}", "bash", *COMMAND, "decode", "-J", *files], capture_output=True
        )
        assert done.returncode == code, redirection
        assert what in done.stderr.decode()
    with decoding("--explain", path, path, path, path) as process:  # more than a pipe holds
        assert process.stdout is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait() == 7
    closed_fd = os.dup(0)
    os.close(closed_fd)
    with pytest.raises(OutputError, match="Bad file descriptor"):
        explain([path], closed_fd)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_does_not_look_like_success(number: signal.Signals) -> None:
    with decoding("-J", "-N") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(capture(*PLAIN))
        assert os.read(process.stdout.fileno(), 100)
        process.send_signal(number)
        assert process.wait() == -number


def test_a_file_that_is_gone_or_none(tmp_path: Path) -> None:
    with pytest.raises(CdcpipeError, match=r"gone\.cdc can't be read: No such file or directory") as caught:
        render([str(tmp_path / "gone.cdc")], RenderConfig("json"))
    assert caught.value.exit_code == 7
    with pytest.raises(CdcpipeError, match="can't be read: Is a directory"):
        explain([str(tmp_path)])


# The command line


PATH = str(DATA / "pg18" / "v1.cdc")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([PATH], "--output NAME, -j, -J or --explain has to be given"),
        (["-J", "nonexistent.cdc"], "'nonexistent.cdc' does not exist"),
        (["-J", str(DATA)], "is a directory"),
        (["-J", "-j", PATH], "-j and -J exclude each other"),
        (["-J", "--output", "json", PATH], "-j and -J are --output wal2json, not json"),
        (["--output", "nope", PATH], "there is no output plugin 'nope'"),
        (["--output", "json", "-o", "messages", PATH], "no option 'messages'"),
        (["-J", "-o", "include-lsn=maybe", PATH], "could not parse value 'maybe'"),
        (["--explain", "--output", "json", PATH], "--explain goes with no option of rendering"),
        (["--explain", "--whole-transactions", PATH], "--explain goes with no option of rendering"),
        (["-J", "-m", "nonsense", PATH], "--param takes KEY=VALUE"),
        (["-J", "-S", "slot", PATH], "No such option"),
    ],
)
def test_usage(arguments: list[str], what: str) -> None:
    code, out, stderr = run_cli("decode", *arguments)
    assert (code, out) == (1, b"")
    assert what.lower() in stderr.lower()


def test_the_example_of_the_help_runs(tmp_path: Path) -> None:
    code, out, _ = run_cli("decode", "--help")
    assert code == 0
    example = out.decode().splitlines()[-1].strip()
    assert example.startswith("cdcpipe decode")
    (tmp_path / "day.cdc").write_bytes(Path(PATH).read_bytes())
    arguments = example.split("cdcpipe ", 1)[1].split()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*COMMAND, *arguments], cwd=tmp_path, capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b'{"action":"B"}') > 30


def test_j_means_what_it_means_live() -> None:
    assert decoded("-j", PATH) == decoded("--output", "wal2json", "-o", "format-version=1", "-o", "include-lsn", PATH)
    assert decoded("-J", PATH) == decoded("--output", "wal2json", "-o", "format-version=2", "-H", PATH)
    with_newline = decoded("-J", "-N", PATH)
    reader = RecordReader()
    reader.feed(with_newline)
    assert b"".join(body for _, body in reader) == decoded("--output", "wal2json", "-o", "format-version=2", "-N", PATH)


# Explained
# ruff: noqa: ISC004 - a text of several lines beside its message


EXPLAINED = [
    (
        Begin(0x10000ABCD, 848_659_320_123_400, 7),
        "Begin (B)\n    final_lsn: 1/ABCD\n    commit_time: 2026-11-22 10:42:00.1234+00\n    xid: 7\n",
    ),
    (
        Type(None, 20001, "public", "mood"),
        "Type (Y)\n    type_id: 20001\n    namespace: 'public'\n    name: 'mood'\n",
    ),
    (
        Relation(
            None,
            16385,
            "Odd schema",
            "t",
            "i",
            (Column(1, "id", 1700, 655366), Column(0, "Ta b\nle", 20001, -1), Column(0, "u", 5, -1)),
        ),
        "Relation (R)\n    relation_id: 16385\n    namespace: 'Odd schema'\n    name: 't'\n"
        "    replica_identity: i (index)\n"
        "    columns: 3\n        id: type_id 1700 (numeric(10,2)), type_modifier 655366, flags 1, key\n"
        '        "Ta b\\nle": type_id 20001 (public.mood), type_modifier -1, flags 0\n'
        "        u: type_id 5, type_modifier -1, flags 0\n",
    ),
    (
        Update(None, 16385, (b"1", None, None), None, (Binary(b"\0\xff"), b"a'b\\\x1b[31m\xe9\n\xc3\xa9", UNCHANGED_TOAST)),
        "Update (U)\n    relation_id: 16385 (\"Odd schema\".t)\n    key: 3 columns\n        id: '1'\n"
        '        "Ta b\\nle": not sent, it is not part of the key\n'
        "        u: not sent, it is not part of the key\n    new: 3 columns\n"
        "        id: x'00ff'\n        \"Ta b\\nle\": 'a\\'b\\\\\\x1b[31m\\xe9\\né'\n        u: UNCHANGED_TOAST\n",
    ),
    (
        Insert(None, 5, (b"", None)),
        "Insert (I)\n    relation_id: 5 (not described before)\n    new: 2 columns\n        column 1: ''\n        column 2: NULL\n",
    ),
    (
        Insert(None, 16385, (b"x",)),
        "Insert (I)\n    relation_id: 16385 (\"Odd schema\".t)\n    new: 1 columns\n        column 1: 'x'\n",
    ),
    (
        Truncate(None, 3, (16385, 5)),
        'Truncate (T)\n    flags: 3 (cascade, restart identity)\n    relation_ids: 2\n        16385 ("Odd schema".t)\n'
        "        5 (not described before)\n",
    ),
    (
        LogicalMessage(None, 1, 255, "a\u202eb", b"\0\xff"),
        "Message (M)\n    flags: 1 (transactional)\n    lsn: 0/FF\n    prefix: 'a\\u202eb'\n    content: x'00ff'\n",
    ),
    (
        LogicalMessage(None, 0, 255, "\U000e0001\x85", b"text\0"),
        "Message (M)\n    flags: 0 (not transactional)\n    lsn: 0/FF\n    prefix: '\\U000e0001\\u0085'\n"
        "    content: 'text\\x00'\n",
    ),
    (
        Commit(0, 1, 2, 1 << 62),
        "Commit (C)\n    flags: 0\n    commit_lsn: 0/1\n    end_lsn: 0/2\n"
        "    commit_time: 4611686018427387904 microseconds since 2000\n",
    ),
    (StreamStart(7, True), "Stream Start (S)\n    xid: 7\n    first_segment: yes\n"),
    (Insert(8, 5, ()), "Insert (I)\n    xid: 8\n    relation_id: 5 (not described before)\n    new: 0 columns\n"),
    (StreamStop(), "Stream Stop (E)\n"),
    (StreamAbort(7, 8, None, None), "Stream Abort (A)\n    xid: 7\n    subxid: 8\n"),
    (
        StreamAbort(7, 8, 9, 0),
        "Stream Abort (A)\n    xid: 7\n    subxid: 8\n    abort_lsn: 0/9\n    abort_time: 2000-01-01 00:00:00+00\n",
    ),
]


def test_each_field_by_its_name(tmp_path: Path) -> None:
    data = b"".join(record(build(message), 0x2_0000_00AB) for message, _ in EXPLAINED)
    text, error = explained(tmp_path, data)
    assert error is None
    pos = 0
    expected = ""
    for message, lines in EXPLAINED:
        expected += f"byte {pos}, LSN 2/AB: " + lines.replace("\n", f", {len(build(message))} bytes\n", 1)
        pos += len(record(build(message), 0x2_0000_00AB))
    assert text == expected


@pytest.mark.parametrize("path", sorted(DATA.glob("pg*/*.cdc")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_recorded_message_is_explained(path: Path, tmp_path: Path) -> None:
    text, error = explained(tmp_path, path.read_bytes())
    assert error is None
    blocks = re.split(r"^(?=byte )", text, flags=re.MULTILINE)[1:]
    records = list(Captures([str(path)], lambda: None))
    assert len(blocks) == len(records)
    in_stream = False
    for block, (lsn, data) in zip(blocks, records, strict=True):
        message = decode(data, in_stream=in_stream, streaming_parallel=None)
        if isinstance(message, StreamStart | StreamStop):
            in_stream = isinstance(message, StreamStart)
        head, *lines = block.splitlines()
        assert re.fullmatch(
            rf"byte \d+, LSN {lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}: {NAMES[chr(data[0])]} \(.\), {len(data)} bytes", head
        )
        assert "not described before" not in block
        names = {line.strip().partition(":")[0] for line in lines if line[4] != " "}
        assert names == {field.name.removesuffix("_us") for field in fields(message) if getattr(message, field.name) is not None}
        assert all(line.isprintable() for line in lines)


@given(st.lists(pgoutput_build.changes(st.none()) | pgoutput_build.controls, max_size=4))
def test_whatever_a_message_holds_a_terminal_can_show_it(messages: list[Message]) -> None:
    explainer = Explainer()
    for message in messages:
        with contextlib.suppress(ProtocolError):  # after a Stream Start, one without its xid is none
            text = explainer.explain(0, 0, build(message))
            assert text.endswith("\n")
            assert all(line.isprintable() for line in text[:-1].split("\n"))


def test_explaining_goes_on_up_to_the_damage(tmp_path: Path) -> None:
    text, error = explained(tmp_path, capture(BEGIN, row(1), b"X"))
    assert text.count("bytes\n") == 2
    assert isinstance(error, ProtocolError)
    assert re.search(r"explained\.cdc, byte 63 \(kind 0x58, LSN 0/300\): .* no message has kind 0x58", error.message)
