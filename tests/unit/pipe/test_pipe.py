"""The pipe's codecs (headers, records, commands, LSNs) on whole input, byte by byte, cut, and followed by more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdcpipe.errors import CommandError, ProtocolError
from cdcpipe.lsn import LSN, format_lsn
from cdcpipe.pipe.commands import QUIT, CommandReader, Feedback, Quit, encode_feedback
from cdcpipe.pipe.framing import RecordReader, encode_header, scan_records

LSNS = [("0/0", 0), ("0/9", 9), ("0/10", 16), ("A/0", 10 << 32), ("10/0", 16 << 32), ("16/374D848", 0x16_0374D848)]
LSNS += [("FFFFFFFF/FFFFFFFF", (1 << 64) - 1)]


@pytest.mark.parametrize(("text", "value"), LSNS)
def test_lsn(text: str, value: int) -> None:
    assert LSN.parse(text) == value
    assert str(LSN(value)) == format_lsn(value) == text


def test_lsn_padded_and_lower_case() -> None:
    assert LSN.parse("16/0374D848") == LSN.parse("16/374d848") == LSN(0x16_0374D848)


def test_lsns_sort_as_numbers() -> None:
    assert sorted(map(LSN.parse, ["10/0", "A/0", "0/10", "0/9"])) == [LSN.parse(t) for t in ["0/9", "0/10", "A/0", "10/0"]]


@pytest.mark.parametrize(
    "text",
    ["", "0", "/", "0/", "/0", "0/1junk", " 0/1", "0/1 ", "0x1/0", "-1/0", "1/123456789", "\N{FULLWIDTH DIGIT ONE}/0", "0/1\n"],
)
def test_not_an_lsn(text: str) -> None:
    with pytest.raises(ValueError, match="not an LSN"):
        LSN.parse(text)


RECORDS = [
    [],
    [(0, b"")],
    [(0x16_0374D848, b"plain")],
    [(1, b"w 0/0 5\nforged"), (2, b"\n\n\0\n"), (3, b"")],
    [(n << 30, bytes([n]) * n) for n in range(40)],
]


def encode(records: list[tuple[int, bytes]]) -> bytes:
    return b"".join(encode_header(lsn, len(record)) + record for lsn, record in records)


@pytest.mark.parametrize("records", RECORDS)
@pytest.mark.parametrize("size", [1, 2, 7, 1 << 20])
def test_records_in_pieces(records: list[tuple[int, bytes]], size: int) -> None:
    data = encode(records)
    reader = RecordReader()
    got = []
    for pos in range(0, len(data), size):
        reader.feed(data[pos : pos + size])
        got += list(reader)
    assert got == records
    assert not reader.has_partial


@pytest.mark.parametrize("records", RECORDS)
def test_records_cut_at_every_prefix(records: list[tuple[int, bytes]]) -> None:
    data = encode(records)
    boundaries = {len(encode(records[:n])): n for n in range(len(records) + 1)}
    whole = 0
    for end in range(len(data) + 1):
        whole = boundaries.get(end, whole)
        reader = RecordReader()
        reader.feed(data[:end])
        assert list(reader) == records[:whole]
        assert reader.has_partial == (end not in boundaries)
        starts, ends, pos = scan_records(data[:end])
        assert [data[a:b] for a, b in zip(starts, ends, strict=True)] == [record for _, record in records[:whole]]
        assert pos == len(encode(records[:whole]))


@given(st.lists(st.tuples(st.integers(0, (1 << 64) - 1), st.binary(max_size=50))), st.lists(st.integers(1, 60)))
def test_any_chunking_gives_the_same_records(records: list[tuple[int, bytes]], sizes: list[int]) -> None:
    data, got, reader = encode(records), [], RecordReader()
    for size in [*sizes, len(data)]:
        reader.feed(data[:size])
        data = data[size:]
        got += list(reader)
    assert got == records


@given(st.binary(max_size=80))
def test_any_bytes_are_records_or_a_protocol_error(data: bytes) -> None:
    reader = RecordReader()
    reader.feed(data)
    for read in (lambda: list(reader), lambda: scan_records(data)):
        try:
            read()
        except ProtocolError:
            pass


@pytest.mark.parametrize(
    "line",
    [
        b"x 0/0 1",
        b"w 0/0",
        b"w 0/0 -1",
        b"w 0/0 +1",
        b"w  0/0 1",
        b"w 0/0 1 ",
        b"w 0/0 1x",
        b"w 0-0 1",
        b"W 0/0 1",
        b"w 0/0 99999999999",
    ],
)
def test_not_a_header(line: bytes) -> None:
    reader = RecordReader()
    reader.feed(line + b"\n" + b"x" * 40)
    with pytest.raises(ProtocolError, match="not a record header"):
        list(reader)
    if line != b"w 0-0 1":  # scan_records leaves LSNs, which it does not return, to whoever reads them
        with pytest.raises(ProtocolError, match="not a record header"):
            scan_records(line + b"\n" + b"x" * 40)


def test_garbage_without_a_newline_is_not_waited_for() -> None:
    reader = RecordReader()
    reader.feed(b"w 0/0 " + b"1" * 40)
    with pytest.raises(ProtocolError):
        list(reader)


COMMANDS = [
    (b"", []),
    (b"\n\n# F 0/1\n#\n", []),
    (b"q\n", [Quit()]),
    (b"F 0/1\nF 16/B374D848\nq\n", [Feedback(LSN(1)), Feedback(LSN(0x16_B374D848)), Quit()]),
    (b"F 0/a\r\n", [Feedback(LSN(10))]),
    (b"F  0/1 \n", [Feedback(LSN(1))]),
]


@pytest.mark.parametrize(("data", "commands"), COMMANDS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_commands_in_pieces(data: bytes, commands: list[object], size: int) -> None:
    reader = CommandReader()
    got = []
    for pos in range(0, len(data), size):
        got += list(reader.feed(data[pos : pos + size]))
    assert got == commands


@pytest.mark.parametrize(
    "line", [b"F", b"F ", b"F 0", b"F 0/1junk", b"F0/1", b"f 0/1", b"Q", b"quit", b"hello", b"\xff\xfe", b"F 0/1 0/2", b" q"]
)
def test_not_a_command(line: bytes) -> None:
    with pytest.raises(CommandError, match="not a command"):
        list(CommandReader().feed(line + b"\n"))


def test_a_command_without_end_is_refused() -> None:
    with pytest.raises(CommandError, match="4096"):
        list(CommandReader().feed(b"#" * 5000))


@given(st.integers(0, (1 << 64) - 1))
def test_feedback_round_trip(lsn: int) -> None:
    assert list(CommandReader().feed(encode_feedback(lsn) + QUIT)) == [Feedback(LSN(lsn)), Quit()]
